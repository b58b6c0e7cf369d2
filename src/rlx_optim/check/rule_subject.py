"""A rule under check: it is stepped by the engines themselves, or through the named API, beside the reference."""

from __future__ import annotations

import dataclasses
import functools
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..language import LanguageError
from ..numpy.curvature import CurvatureOptimizer
from ..numpy.optimizer import NamedOptimizer
from ..program import trace
from ..spec import REQUIRED, Field, Shape, Spec
from .engines import Arrays, Speaker, Walk, get_speaker, list_present
from .subject import Subject, distance, list_neighbours
from .table import Check, RuleReport, Skip, Wrong

SHAPES: tuple[Shape, ...] = ((), (1,), (37,), (24, 16), (40, 8), (6, 30), (4, 3, 3, 2))
SMALL: tuple[Shape, ...] = ((5, 4), (3, 6), (7,))
STEPS, LONG = 4, 12
BAR, MATRIX_BAR = 2e-5, 1e-3  # of the distance travelled, for rules that multiply matrices the second
UNITS, NUDGES = 4, 3  # in the last place of the input, by which an engine's rounding may be worse; how often that is tried
#: what is tried in the place of a hyperparameter's value, where it is in range
NUMBERS = (0.5, 0.1, 0.01, 0.9, 2.0, 1.0, 0.0, -0.5)
Seen = float | str | tuple[float | str, str]  # a number or "", and perhaps a note
Problem = tuple[list[np.ndarray], list[list[np.ndarray]]]  # where tensors begin, and the gradients of each step


@dataclasses.dataclass(frozen=True)
class Survey:
    """Of the shapes tried: those that a rule takes, what it says of the others, and whether it reduces over all tensors."""

    shapes: list[Shape]
    others: str
    reduces_over_all: bool


class RuleSubject(Subject):
    """A rule under check. engines: where it is stepped, beside the reference."""

    kind, report, crash = "rule", RuleReport, "failed"

    def __init__(self, rule: type[Spec], settings: Mapping[str, Any], engines: Sequence[str] | None = None):
        if not (isinstance(rule, type) and issubclass(rule, Spec)):
            raise TypeError(f"check_rule takes a Spec class, got {rule!r}")
        required = {name: 0.1 for name, field in rule.fields.items() if field.default is REQUIRED}
        super().__init__(rule.__name__, required | dict(settings))
        self.rule, self.described = rule, f"of {rule.__name__}"
        self.engines = [engine for engine in engines or list_present() if engine != "reference"]
        self.best = "cpu" if "cpu" in self.engines else "reference"
        self.bar = MATRIX_BAR if rule.matrix else BAR

    @property
    def spec(self) -> Spec:
        return self.rule(**self.settings)

    # ---- what can be asked -----------------------------------------------------------------------------------------------
    @functools.cached_property
    def survey(self) -> Survey:
        spec, shapes, left, reduces = self.spec, list[Shape](), list[str](), False
        for shape in SHAPES:
            if (why := spec.takes(shape)) is not None:
                left.append(f"{shape}: {why}")
                continue
            slots = spec.stored_slots(shape)
            if not spec.matrix:
                program = trace(spec, slots)
                program.check(self.rule.__name__, ["a tensor"], [shape])
                reduces = reduces or program.reduction_over_all is not None
            shapes.append(shape)
        if not shapes:
            raise Wrong(f"it takes none of these shapes: {'; '.join(left)}")
        return Survey(shapes, f"left to others: {'; '.join(left)}" if left else "", reduces)

    def refuse_check(self, check: Check) -> None:
        try:
            self.survey  # noqa: B018  (what is asked first says what is wrong)
        except Exception:
            if not check.essential:
                raise Skip("the rule is outside the language") from None

    def refuse_reductions(self) -> None:
        """Skip where tensors are meant to look at each other."""
        if self.survey.reduces_over_all:
            raise Skip("not asked of a rule that reduces over all tensors")

    def explain_crash(self, problem: Exception, hint: str) -> str:
        """Return what was raised, and by which line of the rule's file; a LanguageError says its own."""
        file, text = self.rule.update.__code__.co_filename, str(problem).strip()
        lines = [each.lineno for each in traceback.extract_tb(problem.__traceback__) if each.filename == file]
        place = f"raised at {file}:{lines[-1]}" if lines and not isinstance(problem, LanguageError) else ""
        if type(problem).__module__.startswith("jax"):  # it says a page about tracing, and nothing of the words for it
            text, place = text.partition("\n")[0], f"{place}; {hint}"
        return "; ".join(filter(None, (f"{type(problem).__name__}: {text}", place)))

    # ---- stepping by an engine -------------------------------------------------------------------------------------------
    def draw_problem(self, shapes: Sequence[Shape] = (), steps: int = STEPS) -> Problem:
        rng = np.random.default_rng(0)

        def draw() -> list[np.ndarray]:
            return [np.asarray(0.1 * rng.standard_normal(shape), np.float32) for shape in shapes or self.survey.shapes]

        return draw(), [draw() for _ in range(steps)]

    @staticmethod
    def walk(specs: Sequence[Spec], who: Speaker, start: Any, gradients: Any, apart: bool = False, names: Any = None) -> Arrays:
        """Return parameters and state after some steps."""
        walk = Walk(specs, who, start, apart, names)
        for g in gradients:
            walk.step(g)
        return walk.found()

    def walk_plainly(self, who: Speaker) -> Arrays:
        return self.walk([self.spec], who, *self.draw_problem())

    def make_groups(self) -> list[Spec]:
        """Return two groups that differ in every number that may differ."""
        spec, changed = self.spec, dict[str, Any]()
        for name, field in self.rule.fields.items():
            for value in () if field.structural or spec.values()[name] is None else self.list_values(name, field):
                if value is not None and self.accepts({**changed, name: value}):
                    changed[name] = value
                    break
        return [spec, spec.replace(**changed)]

    def judge(self, got: Sequence[np.ndarray], specs: Sequence[Spec], start: Any, gradients: Any, apart: bool = False) -> Seen:
        """Return how far tensors end from where the reference leaves them, in the distance travelled. They may by what a few
        units in the last place of the input move the reference itself: no float32 arithmetic is better than that."""

        def gaps(found: Sequence[np.ndarray]) -> list[float]:
            return [distance(f, *each) for f, *each in zip(found, want, start, zip(*path, strict=True), strict=True)]

        who = get_speaker("reference")
        walk, path = Walk(specs, who, start, apart), list[list[np.ndarray]]()
        for g in gradients:
            walk.step(g)
            path.append(list(map(np.copy, walk.found()["p"])))
        want = path[-1]
        found = gaps(got)
        if max(found) <= self.bar:
            return max(found)
        nudges = [self.walk(specs, who, *nudge(start, gradients, seed), apart)["p"] for seed in range(NUDGES)]
        moved = [max(each) for each in zip(*map(gaps, nudges), strict=True)]
        far = [i for i, gap in enumerate(found) if not gap <= max(self.bar, UNITS * moved[i])]
        if far:
            raise Wrong(f"a tensor of shape {start[far[0]].shape} ends elsewhere", max(found[i] for i in far))
        return max(found), "ill-conditioned: a unit in the last place of its input moves the reference about as far"

    # ---- hyperparameters -------------------------------------------------------------------------------------------------
    def accepts(self, settings: Mapping[str, Any]) -> bool:
        """Whether the rule takes these settings beside those of the check."""
        try:
            self.rule(**{**self.settings, **settings})
        except (TypeError, ValueError):
            return False
        return True

    def list_values(self, name: str, field: Field, context: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Yield other values of a hyperparameter that are in range beside the others."""
        context = context or {}
        if not self.accepts(context):
            return
        now = self.rule(**{**self.settings, **context}).values()[name]
        tried: Sequence[Any] = list_neighbours(now, NUMBERS)
        if field.annotation.startswith("bool") and not isinstance(now, bool):
            tried = (True, False)
        elif field.annotation.startswith("Literal"):
            words = field.annotation.partition("[")[2].partition("]")[0].split(",")
            tried = [*(word.strip().strip("'") for word in words), None]
        elif isinstance(now, float):
            tried = (*tried, None)
        yield from (value for value in tried if value != now and self.accepts({**context, name: value}))

    def walk_by_name(self, settings: dict[str, Any], engine: str = "reference", falls: bool = False) -> Arrays | None:
        """Return parameters, slots and counters after each of some steps through the named API, with gradients that depend on p;
        None where the settings are refused together. falls: the learning rate does."""
        base = CurvatureOptimizer if self.rule.observes else NamedOptimizer
        given = {**self.settings, **settings}
        try:
            spec = self.rule(**{**self.settings, **{name: value for name, value in settings.items() if not callable(value)}})
            rate = spec.values().get("lr")
            if falls and isinstance(rate, float):
                given["lr"] = lambda i: rate * (1 - i / (2 * LONG))
            opt: Any = type(self.rule.__name__, (base,), {"spec": self.rule})(engine=engine, **given)
        except (TypeError, ValueError):
            return None
        rng = np.random.default_rng(1)
        shapes = [shape for shape in SMALL if self.rule.accepts_any_shape or spec.takes(shape) is None]
        params = {str(i): np.asarray(rng.standard_normal(shape), np.float32) for i, shape in enumerate(shapes)}
        found: Arrays = {}
        for _ in range(LONG):
            noise = {name: rng.standard_normal(p.shape) for name, p in params.items()}
            for name, p in params.items() if self.rule.observes else ():
                opt.update_hessian(name, np.asarray(np.abs(rng.standard_normal(p.shape)), np.float32))
            opt.step_all(params, {name: np.asarray(0.1 * p + noise[name], np.float32) for name, p in params.items()})
            for name, p in params.items():
                for slot, array in {"p": p, **opt.state(name)}.items():
                    found.setdefault(slot, []).append(array.copy())
        return found

    def measure_change(self, one: Arrays | None, other: Arrays | None) -> float:
        """Return the largest difference of what two walks have in one shape; NaN where one of them was refused."""
        if one is None or other is None:
            return math.nan
        pairs = [pair for name in one.keys() & other.keys() for pair in zip(one[name], other[name], strict=False)]
        gaps = (float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs if a.shape == b.shape and a.size)
        return max(gaps, default=0.0)


def nudge(start: Any, gradients: Any, seed: int) -> tuple[Any, Any]:
    """Return every number, one unit in the last place up or down."""
    rng = np.random.default_rng(seed)

    def move(array: np.ndarray) -> np.ndarray:
        return np.asarray(array + np.spacing(array) * rng.choice((-1, 1), array.shape), np.float32)

    return list(map(move, start)), [list(map(move, each)) for each in gradients]


def expect_same(first: Arrays, second: Arrays, otherwise: str) -> Seen:
    """Return 0 where two walks end with the same bits."""
    for name, arrays in first.items():
        for a, b in zip(arrays, second[name], strict=True):
            if not np.array_equal(a, b, equal_nan=True):
                raise Wrong(f"{otherwise}: {name} of shape {a.shape}", float(np.nanmax(np.abs(a - b))))
    return 0.0
