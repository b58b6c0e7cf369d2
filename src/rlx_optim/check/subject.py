"""What is checked: an optimizer of any library, as a walk of NumPy arrays over given gradients."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import itertools
import math
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .table import Check, Report, Skip, Wrong, expect

Arrays = dict[str, np.ndarray]
Gradient = Callable[[int, Arrays], Arrays]
MATRICES: dict[str, tuple[int, ...]] = {"w": (6, 4), "tall": (8, 3), "twin": (6, 4)}
SHAPES: dict[str, tuple[int, ...]] = {**MATRICES, "v": (7,), "conv": (2, 3, 2, 2)}
SMALL = {name: SHAPES[name] for name in ("w", "v", "conv")}
NUMBERS = (0.5, 0.1, 0.9, 0.01, 2.0, 1.0, 0.0)
SCALES = (1.0, 0.1, 0.01)  # of gradients: what looks back over several steps shows
#: keywords that say how a step is computed, not what it gives
NEUTRAL = ("foreach", "fused", "capturable", "differentiable", "engine", "amp_scaling")
#: keywords that need something other than numbers of float32, or a schedule, or say what becomes of a bad gradient
UNASKED = (
    *NEUTRAL, "nonfinite", "skip_above", "process_group", "otherwise",
    "route", "split", "stacked", "mask", "weight_decay_mask", "seed",
    "hessian_seed", "corrected_weight_decay", "verbose", "print_win_rate_every_n_step", "kwargs", "rounding",
)  # fmt: skip
BAR, COARSE = 1e-5, 0.1  # of the distance travelled: two orders of one computation; what says nothing any more
CRASHES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError)


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int = 0, scale: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(scale * rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def replay(shapes: Mapping[str, tuple[int, ...]], scale: float = 1.0) -> Gradient:
    """Gradients that depend on the step alone; each tensor has its own, whatever the others."""

    def gradient(t: int, params: Arrays) -> Arrays:
        size = scale * SCALES[t % len(SCALES)]
        return {n: size * draw({n: s}, 100 + 17 * t + sum(map(ord, n)))[n] for n, s in shapes.items()}

    return gradient


def distance(got: np.ndarray, want: np.ndarray, start: np.ndarray, path: Sequence[np.ndarray] = ()) -> float:
    """Return the largest difference of a tensor over the distance it travelled; one unit in the last place is free.

    path: where `want` was on its way, for tensors of few numbers, which may come back to where they began.
    """
    if not want.size:
        return 0.0
    places = [np.asarray(place, np.float64) for place in (want, *path)]
    free = np.spacing(np.max(np.abs(places), axis=0).astype(np.float32)).astype(np.float64)
    apart = (np.abs(got.astype(np.float64) - want) - free).max()
    moved = max(np.abs(place - start).max() for place in places)
    return float(max(apart, 0.0) / max(moved, 1e-30)) if np.isfinite(apart) else math.inf


def find_gap(got: Arrays, want: Arrays, start: Arrays) -> float:
    """Return the distance of the worst of all tensors."""
    return max((distance(got[name], value, start[name]) for name, value in want.items()), default=0.0)


def list_neighbours(now: Any, numbers: Sequence[float]) -> tuple[Any, ...]:
    """Return other values of a setting that may be in range; refusals are found out by trying."""
    if isinstance(now, bool):
        return (not now,)
    if isinstance(now, int):
        return (1, 2, 3, now + 1)
    if isinstance(now, (tuple, list)):
        return tuple((*now[:i], x, *now[i + 1 :]) for i, x in itertools.product(range(len(now)), numbers))
    return (now * 0.5, now * 2.0, *numbers) if isinstance(now, float) else tuple(numbers)


def is_finite(arrays: Arrays) -> bool:
    return all(np.isfinite(a.astype(np.float64)).all() for a in arrays.values())


def is_refused(call: Callable[[], Any]) -> bool:
    """Make a call, and tell whether it raised."""
    try:
        call()
    except Exception:
        return True
    return False


class Subject:
    """What is checked. described: how a message names it. crash: the status of a check that raised."""

    kind: str
    described: str
    report, crash = Report, "error"

    def __init__(self, target: str, settings: Mapping[str, Any]):
        self.target, self.settings = target, dict(settings)
        self.asked: set[str] = set()  # checks of taste that the user asked for by a word of their own

    def refuse_check(self, check: Check) -> None:
        """Raise Skip where a check cannot be asked."""

    def explain_crash(self, problem: Exception, hint: str) -> str:
        """Return what was raised, in a line."""
        return f"{type(problem).__name__}: {(str(problem).strip() or '(no message)').splitlines()[0][:200]}"

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave the library as it was."""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield


class OptimizerSubject(Subject, abc.ABC):
    """An optimizer of a library. Libraries differ in `walk` and `keywords`; what is probed is kept."""

    claimed: str | None = None  # the rule that it is said to be
    ranks = 2
    draws = False  # whether a step draws from the library's generator

    def __init__(self, target: str, made: Any, settings: Mapping[str, Any]):
        super().__init__(target, settings)
        self.factory, self.described = made, f"for {self.kind}"
        signature = inspect.signature(made)
        self.keywords = {
            name: p
            for name, p in signature.parameters.items()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in ("self", "params")
        }
        self.rate = next((name for name in ("lr", "learning_rate") if name in self.keywords), None)
        for name, p in self.keywords.items():
            if p.default is p.empty and name == self.rate:
                self.settings.setdefault(name, 0.01)
            elif p.default is p.empty and name not in self.settings:
                raise ValueError(f"{target} needs {name}: give it with --kwargs '{{\"{name}\": …}}'")
        try:
            with self.undisturbed():
                self.walk(draw({"w": (4, 3)}), replay({"w": (4, 3)}), 2)
        except Exception as problem:
            message = (str(problem).strip() or "(no message)").splitlines()[0]
            raise ValueError(f"{target} takes no step on a 4×3 parameter: {type(problem).__name__}: {message}") from problem

    # ---- what libraries do their own way ---------------------------------------------------------------------------------
    @abc.abstractmethod
    def walk(
        self, start: Arrays, gradient: Gradient, steps: int, in_dtype: str = "float32", zeroed_at: int = -1, **settings: Any
    ) -> Arrays:
        """Return parameters of a dtype after some steps. zeroed_at: the step before which they are put to zero."""

    # ---- what is found out about it --------------------------------------------------------------------------------------
    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes it is stepped on: matrices alone where it takes nothing else."""
        return MATRICES if is_refused(lambda: self.walk(draw({"v": (7,)}), replay({"v": (7,)}), 1)) else SHAPES

    @functools.cached_property
    def small(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in SMALL.items() if len(shape) == 2 or self.shapes is SHAPES}

    def walk_shapes(self, steps: int = 6, **settings: Any) -> Arrays:
        """Over all shapes."""
        return self.walk(draw(self.shapes), replay(self.shapes), steps, **settings)

    @functools.cached_property
    def bar(self) -> float:
        """What is taken for rounding: a multiple of what a unit in the last place of a gradient makes."""
        start, plain = draw(self.shapes), replay(self.shapes)
        want = self.walk(start, plain, 6)
        expect(is_finite(want), "six plain steps end in NaN or infinity", "NaN")
        noise = 0.0
        for sign in (1, -1):
            got = self.walk(start, lambda t, p: {n: g * np.float32(1 + sign * 1.2e-7) for n, g in plain(t, p).items()}, 6)  # noqa: B023
            noise = max(noise, find_gap(got, want, start))
        if 8 * noise > COARSE:
            raise Skip(f"a unit in the last place of the gradients moves it by {noise:.0e} of its way: nothing can be compared")
        return max(BAR, 8 * noise)

    @functools.cached_property
    def entangled(self) -> float:
        """How much a tensor's step depends on the gradients beside its own, in units of its own."""
        start, plain = draw(self.shapes), replay(self.shapes)
        want, worst = self.walk(start, plain, 6), 0.0
        for name in self.shapes:

            def alone(t: int, p: Arrays, name: str = name) -> Arrays:
                return {n: g if n == name else 0 * g for n, g in plain(t, p).items()}

            got = self.walk(start, alone, 6)
            worst = max(worst, find_gap({name: got[name]}, {name: want[name]}, start))
        return worst

    @functools.cached_property
    def random(self) -> bool:
        """Whether a step draws: from the library's generator, or by a seed of its own."""
        if self.draws or "seed" not in self.keywords:
            return self.draws
        ends = [self.try_settings(seed=seed) for seed in (1, 2)]
        return None not in ends and any(not np.array_equal(ends[0][n], ends[1][n]) for n in self.small)  # type: ignore[index]

    def refuse_random(self) -> None:
        """Skip where what is drawn depends on a parameter's place."""
        if self.random:
            raise Skip("it draws random numbers, for each parameter by its place")

    def refuse_entangled(self) -> None:
        """Skip where tensors are measured together."""
        if self.entangled > self.bar:
            raise Skip(f"its tensors depend on each other, by {self.entangled:.0e}")

    def expect_near(self, got: Arrays, want: Arrays, start: Arrays, what: str, bar: float | None = None) -> float:
        """How far apart two walks end; Wrong where it is more than rounding."""
        apart = find_gap(got, want, start)
        return expect(not apart > (self.bar if bar is None else bar), f"{what}: {apart:.1e} of the distance travelled", apart)

    @contextlib.contextmanager
    def allow_refusal(self, what: str) -> Iterator[None]:
        """A clean refusal is no failure; a crash is."""
        try:
            yield
        except (Skip, Wrong):
            raise
        except Exception as problem:
            message = (str(problem).strip() or type(problem).__name__).splitlines()[0][:120]
            if isinstance(problem, CRASHES):
                raise Wrong(f"{what} is not refused but breaks it: {type(problem).__name__}: {message}", "crash") from None
            raise Skip(f"{what} is refused: {message}") from None

    # ---- hyperparameters -------------------------------------------------------------------------------------------------
    def get_setting(self, name: str) -> Any:
        return self.settings.get(name, self.keywords[name].default)

    def find_keyword(self, *names: str) -> str | None:
        """The first of these keywords that it has."""
        return next((name for name in names if name in self.keywords), None)

    def without_decay(self) -> dict[str, Any]:
        name = self.find_keyword("weight_decay")
        return {} if name is None else {name: 0.0}

    def try_settings(self, **settings: Any) -> Arrays | None:
        """Twelve steps; None where these settings are refused."""
        noise, drift = replay(self.small), draw(self.small, 9, 0.3)  # for rules that look where gradients agree
        try:
            got = self.walk(draw(self.small), lambda t, p: {n: g + drift[n] for n, g in noise(t, p).items()}, 12, **settings)
        except Exception:
            return None
        return got if is_finite(got) else None

    def list_values(self, name: str) -> list[Any]:
        """Other values that may be in range; refusals are found out by trying."""
        now = self.get_setting(name)
        tried = list_neighbours(now, NUMBERS)
        if isinstance(now, str):
            tried = self.list_words(name)
        elif isinstance(now, int) and not isinstance(now, bool):
            tried = (*tried, *NUMBERS)
        elif now is None:
            tried = (*tried, True, False, 1, 2, (0.5, 0.6), *self.list_words(name))
        return [value for value in tried if type(value) is not type(now) or value != now]

    def list_words(self, name: str) -> tuple[Any, ...]:
        """What a keyword of words takes, by its annotation or by what the refusal of another says."""
        annotation = self.keywords[name].annotation
        found = [word for part in (annotation, *typing.get_args(annotation)) for word in typing.get_args(part)]
        try:
            self.walk(draw(self.small), replay(self.small), 1, **dict[str, Any]({name: "no such word"}))
        except Exception as problem:
            found += re.findall(r"['\"](\w+)['\"]", str(problem))
        return tuple(dict.fromkeys(word for word in found if isinstance(word, str)))
