"""`check_rule`: is a rule fit to be used? It is stepped on every engine that is here, and every habit of a good rule is tried."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import inspect
import itertools
import math
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..curvature import CurvatureOptimizer
from ..language import LanguageError
from ..optimizer import NamedOptimizer
from ..program import Program, commit_measures, trace
from ..spec import MODIFIERS, REQUIRED, Field, Shape, Slot, Spec
from .engines import Arrays, Speaker, Walk, gap, missing, present, speaker, updated_by_optax

SHAPES: tuple[Shape, ...] = ((), (1,), (37,), (24, 16), (40, 8), (6, 30), (4, 3, 3, 2))
SMALL: tuple[Shape, ...] = ((5, 4), (3, 6), (7,))
STEPS, LONG = 4, 12
BAR, MATRIX_BAR = 2e-5, 1e-3  # of the distance travelled, for rules that multiply matrices the second
UNITS, NUDGES = 4, 3  # in the last place of the input, by which an engine's rounding may be worse; how often that is tried
COUNTED = 1_000  # steps in which a counter must move
#: what is tried in the place of a hyperparameter's value, where it is in range
NUMBERS = (0.5, 0.1, 0.01, 0.9, 2.0, 1.0, 0.0, -0.5)
LEAST = 1e-12  # of p: what moves it less does nothing
Asked = Callable[[], tuple[bool, float | None, str]]

#: why each is asked; those of hyperparameters are asked of every one
REASONS = {
    "language": "what is outside the language of rules no engine can run",
    "declared": "only what is declared can be set, scheduled, saved and documented",
    "slots": "a slot that nobody reads or writes is memory for nothing",
    "counters": "a counter that never moves is a constant in every checkpoint",
    "jit": "a jitted update of optax traces the step count, and every number that is a schedule",
    "engine": "every engine that is here ends where the reference does",
    "groups": "groups that differ in every number are stepped each by its own",
    "same again": "the same steps must give the same bits",
    "resume": "state that was saved half-way goes on bit for bit",
    "order": "which tensor comes first must not matter",
    "one by one": "tensors stepped one by one end where they end together",
    "NaN": "a NaN in one gradient must not reach another tensor",
    "zero": "gradients of zero must not make anything NaN",
    "ranks": "on DTensors of two gloo processes it ends where one process does: owners see what the rule reads",
    "hyperparameter": "one that does nothing is a bug that no loss curve shows",
    "schedule": "a constant schedule is that number, and one that moves compiles nothing",
}
#: beside what a check found; what was raised says by itself how to mend it
HINTS = {
    "declared": "declare it: lr: float = real(1e-3), or with flag, integer, choice of rlx_optim.rule; a constant is a ClassVar",
    "slots": "take it out of `slots`, or let `update` give it to a rule and take its next value from there",
    "counters": "`scalars` (or the `update` of a matrix rule) gives its next value: {name: counters[name] + 1}",
    "jit": "t, counters and schedules are traced there, in float32: with the words of rlx_optim.rule, where(t > 3, a, b) for if, "
    "maximum(t, 2) for max, sqrt(t) for math.sqrt; an `update` on matrices computes with E and operators, and chooses by E.cond",
    "engine": "the rule is too delicate for float32: subtract near-equal numbers in `scalars`, which is float64",
    "groups": "`update` is traced once for all groups: what differs between them must come from `scalars`, or be in `structure`",
    "resume": "state must be in slots or counters: nothing else is saved",
    "same again": "a step may depend on p, g, slots, counters, t and hyperparameters alone",
    "order": "tensors are stepped in any order: a rule must not remember what came before",
    "one by one": "a tensor's step must not depend on which others are stepped with it, unless by an all_… reduction",
    "NaN": "a NaN must not leave its tensor: only all_… reductions may look at several",
    "zero": "keep divisions away from 0 with an eps, or maximum(…)",
    "ranks": "a step may depend on p, g, slots, counters, t and hyperparameters alone, and the commit on p, u and numbers",
    "hyperparameter": "it changes nothing: does `scalars` give it, does the rule read it, is it in `structure`?",
    "schedule": "a number of `scalars` must do: what picks code or slots is structural (flag, integer, choice)",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check on one engine. seen: how far off, where that is a number."""

    check: str
    engine: str
    ok: bool
    seen: float | None
    note: str = ""

    @property
    def skipped(self) -> bool:
        """Whether it was not asked, which the note says why."""
        return self.ok and self.seen is None and bool(self.note) and self.check != "language"


@dataclasses.dataclass(frozen=True)
class RuleReport:
    """What `check_rule` found; `str` is a table."""

    rule: str
    rows: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        wide, names = max(len(row.check) for row in self.rows), max(len(row.engine) for row in self.rows)
        lines = [f"{self.rule}: {'fit to be used' if self.ok else 'something is wrong'}"]
        for row in self.rows:
            seen = "" if row.seen is None else f"{row.seen:.1e}" if row.seen else "0"
            word = "skip " if row.skipped else "ok   " if row.ok else "WRONG"
            lines.append(f"  {word} {row.check:{wide}}  {row.engine:{names}}  {seen}".rstrip())
            lines += textwrap.wrap(row.note, 96, initial_indent="        ", subsequent_indent="        ")
        wrong = sum(not row.ok for row in self.rows)
        ran = sum(not row.skipped for row in self.rows)
        return "\n".join([*lines, f"{ran} checks, {wrong or 'none'} of them wrong, {len(self.rows) - ran} not asked"])

    def as_dict(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) for row in self.rows]
        for row in rows:
            row["seen"] = row["seen"] if row["seen"] is None or math.isfinite(row["seen"]) else None
        return {"rule": self.rule, "ok": self.ok, "rows": rows}


def check_rule(
    rule: type[Spec], *, engines: Sequence[str] | None = None, only: Sequence[str] = (), **settings: Any
) -> RuleReport:
    """Step a rule on every engine that is here, against the reference: over shapes, over groups that differ, resumed, with bad
    gradients, with every hyperparameter changed and scheduled. only: names of checks, or patterns like schedule*; the first,
    language, is always one of them. settings: where they are not the defaults."""
    asked = RuleChecks(rule, settings, engines)
    return RuleReport(rule.__name__, tuple(asked.findings(only)))


class RuleChecks:
    """What is asked of a rule, one by one."""

    def __init__(self, rule: type[Spec], settings: dict[str, Any], engines: Sequence[str] | None = None):
        if not (isinstance(rule, type) and issubclass(rule, Spec)):
            raise TypeError(f"check_rule takes a Spec class, got {rule!r}")
        required = {name: 0.1 for name, field in rule.fields.items() if field.default is REQUIRED}
        self.rule, self.settings = rule, required | settings
        self.engines = [engine for engine in engines or present() if engine != "reference"]
        self.shapes: list[Shape] = []
        self.gathers = False

    # ---- what is done ----------------------------------------------------------------------------------------------------
    def findings(self, only: Sequence[str] = ()) -> Iterator[Finding]:
        first, *others = self.plan()
        names = list(dict.fromkeys(check for check, _, _ in (first, *others)))
        chosen = {name for name in names if not only or any(fnmatch.fnmatchcase(name, word) for word in only)}
        if not chosen:
            raise ValueError(f"no check of {self.rule.__name__} is called {', '.join(only)}; known are {', '.join(names)}")
        yield (spoken := self.told(*first))
        yield from (self.told(*each) for each in others if spoken.ok and each[0] in chosen)

    def plan(self) -> Iterator[tuple[str, str, Asked]]:
        """(check, engine, what is asked), the language first: the others step the shapes that it found."""
        yield "language", "trace", self.language
        yield "declared", "trace", self.declared
        yield "slots", "reference", self.touched
        if "torch" in self.engines:  # before an engine uses CUDA, after which nothing can be forked
            yield "ranks", "torch", self.over_ranks
        for engine in self.engines:
            yield "engine", engine, functools.partial(self.beside, engine, False)
        for engine in self.engines:
            yield "groups", engine, functools.partial(self.beside, engine, True)
        yield "groups", "reference", self.alone
        yield "jit", "optax", self.jitted
        yield "counters", "reference", self.counted
        best = next((engine for engine in ("cpu",) if engine in self.engines), "reference")
        for check, run in {
            "same again": self.again, "resume": self.resumed, "order": self.reversed, "one by one": self.single,
            "NaN": self.local, "zero": self.zero,
        }.items():  # fmt: skip
            for engine in dict.fromkeys(("reference", best)):
                yield check, engine, functools.partial(run, speaker(engine))
        for name, field in self.rule.fields.items():
            yield f"hyperparameter {name}", "reference", functools.partial(self.moves, name, field)
            if field.annotation in ("float", "float | None") and not field.structural:
                yield f"schedule of {name}", best, functools.partial(self.scheduled, name, field, best)

    def told(self, check: str, engine: str, run: Asked) -> Finding:
        """What a check found; whatever is raised is what it found."""
        hint = next((HINTS[key] for key in HINTS if check.startswith(key)), "")
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # a rule's advice is not asked for here
                ok, seen, note = run()
        except Exception as problem:
            text, place = str(problem).strip(), self.place(problem)
            if type(problem).__module__.startswith("jax"):  # it says a page about tracing, and nothing of the words for it
                text, hint = text.partition("\n")[0], f"{place}; {hint}"
            else:
                hint = place
            ok, seen, note = False, None, f"{type(problem).__name__}: {text}"
        return Finding(check, engine, ok, seen, note if ok else "; ".join(part for part in (note, hint) if part))

    def place(self, problem: Exception) -> str:
        """The line of the rule's file that raised something; a LanguageError says its own."""
        file = self.rule.update.__code__.co_filename
        lines = [each.lineno for each in traceback.extract_tb(problem.__traceback__) if each.filename == file]
        return f"raised at {file}:{lines[-1]}" if lines and not isinstance(problem, LanguageError) else ""

    # ---- checks: whether it holds, what was seen, a note ----------------------------------------------------------------
    def language(self) -> tuple[bool, float | None, str]:
        spec, left = self.rule(**self.settings), []
        for shape in SHAPES:
            if (why := spec.takes(shape)) is not None:
                left.append(f"{shape}: {why}")
                continue
            slots = spec.stored_slots(shape)
            program: Program | None = None if spec.matrix else trace(spec, slots)
            if program is not None:
                program.check(self.rule.__name__, ["a tensor"], [shape])
                self.gathers = self.gathers or program.gathers is not None
            self.shapes.append(shape)
        if not self.shapes:
            return False, None, f"it takes none of these shapes: {'; '.join(left)}"
        return True, None, f"left to others: {'; '.join(left)}" if left else ""

    def declared(self) -> tuple[bool, float | None, str]:
        """What stands in the class as a plain value, though it is a hyperparameter's."""
        kinds = [kind for kind in self.rule.__mro__ if issubclass(kind, Spec) and kind is not Spec]
        said = {name: str(word) for kind in kinds for name, word in inspect.get_annotations(kind).items()}
        names = {name for name, word in said.items() if "ClassVar" not in word and name not in (*self.rule.fields, *vars(Spec))}
        names |= {name for kind in kinds for name in vars(kind) if name in self.rule.fields}  # a plain value over a declared one
        names |= {"lr"} - self.rule.fields.keys()
        plain = [
            f"{name} is {getattr(self.rule, name)!r:.80}" if hasattr(self.rule, name) else f"there is no {name}" for name in names
        ]
        return not plain, None, f"{', '.join(sorted(plain))}, and not a hyperparameter" if plain else ""

    def touched(self) -> tuple[bool, float | None, str]:
        """Whether every slot is read or written; of matrix rules, whether it changes anything, or is changed."""
        spec, names, touched = self.rule(**self.settings), set[str](), {self.rule.evaluated}
        for shape in self.shapes:
            slots = spec.slots(shape)
            names |= slots.keys()
            touched |= self.felt(spec, shape) if self.rule.matrix else _traced(spec, slots)
        often = f" in {LONG} steps" if self.rule.matrix else ""
        idle = ", ".join(sorted(names - touched))
        return not idle, None, f"nobody reads or writes {idle}{often}" if idle else ""

    def felt(self, spec: Spec, shape: Shape) -> set[str]:
        """The slots of a tensor that some steps change, or that change some steps."""
        start, gradients = self.problem((shape,), LONG)

        def walk(other: str = "") -> tuple[Arrays, Arrays]:
            made = Walk([spec], speaker("reference"), start)
            if other:
                made.records[0].state[other][...] += 1.0
            before = copy.deepcopy(made.found())
            for g in gradients:
                made.step(g)
            return before, made.found()

        first, want = walk()

        def changes(name: str) -> bool:
            before, after = walk(name)
            return not np.array_equal(before[name], after[name]) or not np.array_equal(after["p"], want["p"])

        return {name for name in first if name != "p" and (not np.array_equal(first[name], want[name]) or changes(name))}

    def counted(self) -> tuple[bool, float | None, str]:
        """Whether every counter moves: in some steps, or as `scalars` and `decisions` count many, with some setting."""
        first, trail = self.rule(**self.settings).counters(), self.named({}) or {}
        still = {name for name, value in first.items() if all(found == value for found in trail.get(name, ()))}
        changes = ({name: value} for name, field in self.rule.fields.items() for value in self.alternatives(name, field))
        for change in itertools.chain([{}], changes):
            if still:
                spec = self.rule(**{**self.settings, **change})
                now = first = spec.counters()
                for t in range(1, COUNTED + 1):
                    now = now | {name: value for name, value in spec.numbers(t, now).items() if name in now}
                    still -= {name for name, value in now.items() if value != first[name]}
        return not still, None, f"{', '.join(sorted(still))} never moves" if still else ""

    def jitted(self) -> tuple[bool, float | None, str]:
        """Jitted updates of `rlx_optim.optax` beside the reference; the learning rate is a number, then traced."""
        if (why := missing("jax", "optax") or (None if "lr" in self.rule.fields else "it has no lr")) is not None:
            return True, None, f"not asked: {why}"
        spec = self.rule(**self.settings)
        start, gradients = self.problem([shape for shape in SMALL if spec.takes(shape) is None] or self.shapes[:2])
        found: tuple[bool, float | None, str] = True, None, ""
        for scheduled in (False, True)[: 1 + isinstance(spec.values().get("lr"), float)]:
            if found[0]:
                got = updated_by_optax(spec, start, gradients, scheduled)
                found = self.judged(got, [spec], start, gradients)
        return found

    def beside(self, engine: str, apart: bool) -> tuple[bool, float | None, str]:
        """Beside the reference."""
        start, gradients = self.problem()
        specs = self.specs() if apart else [self.rule(**self.settings)]
        return self.judged(self.walked(specs, speaker(engine), start, gradients, apart)["p"], specs, start, gradients, apart)

    def judged(
        self, got: Sequence[np.ndarray], specs: Sequence[Spec], start: Any, gradients: Any, apart: bool = False
    ) -> tuple[bool, float | None, str]:
        """How far tensors end from where the reference leaves them, in the distance travelled. They may by what a few units in
        the last place of the input move the reference itself: no float32 arithmetic is better than that."""

        def gaps(found: Sequence[np.ndarray]) -> list[float]:
            return [_apart(f, w, s) for f, w, s in zip(found, want, start, strict=True)]

        who = speaker("reference")
        want = self.walked(specs, who, start, gradients, apart)["p"]
        found, bar = gaps(got), MATRIX_BAR if self.rule.matrix else BAR
        worst = max(found)
        if worst <= bar:
            return True, worst, ""
        nudges = [self.walked(specs, who, *_nudged(start, gradients, seed), apart)["p"] for seed in range(NUDGES)]
        moved = [max(each) for each in zip(*map(gaps, nudges), strict=True)]
        far = [i for i, gap in enumerate(found) if not gap <= max(bar, UNITS * moved[i])]
        if far:
            return False, max(found[i] for i in far), f"a tensor of shape {start[far[0]].shape} ends elsewhere"
        return True, worst, "ill-conditioned: a unit in the last place of its input moves the reference about as far"

    def alone(self) -> tuple[bool, float | None, str]:
        """Groups together, and each by itself."""
        (start, gradients), specs, who = self.problem(), self.specs(), speaker("reference")
        if self.gathers:
            return True, None, "not asked of a rule that reduces over all tensors"
        together = self.walked(specs, who, start, gradients, True)["p"]
        for i in range(len(start)):
            walk = Walk([specs[i % len(specs)]], who, [start[i]], names=[f"tensor {i}"])
            walk.records[0].t = i % 4
            for g in gradients:
                walk.step([g[i]])
            if not np.array_equal(walk.found()["p"][0], together[i], equal_nan=True):
                changed = ", ".join(f"{k}={v!r}" for k, v in specs[i % len(specs)].values().items())
                return False, None, f"a tensor of shape {start[i].shape} in a group with {changed} takes another's values"
        return True, 0.0, ""

    def again(self, who: Speaker) -> tuple[bool, float | None, str]:
        start, gradients = self.problem()
        first, second = (self.walked([self.rule(**self.settings)], who, start, gradients) for _ in range(2))
        return self.same(first, second, "the same steps give other numbers the second time")

    def resumed(self, who: Speaker) -> tuple[bool, float | None, str]:
        start, gradients = self.problem()
        whole = self.walked([self.rule(**self.settings)], who, start, gradients)
        before = Walk([self.rule(**self.settings)], who, start)
        for g in gradients[:2]:
            before.step(g)
        self.walked([self.rule(**self.settings)], who, start, gradients)  # others step in between
        after = Walk([self.rule(**self.settings)], who, before.found()["p"])
        for old, new in zip(before.records, after.records, strict=True):
            new.t, new.counters = old.t, dict(old.counters)
            for name, value in new.state.items():
                value[...] = old.state[name]
        for g in gradients[2:]:
            after.step(g)
        return self.same(whole, after.found(), "state that was saved and restored half-way goes on differently")

    def reversed(self, who: Speaker) -> tuple[bool, float | None, str]:
        start, gradients = self.problem()
        spec = self.rule(**self.settings)
        there = self.walked([spec], who, start, gradients)["p"]
        names = [f"tensor {i}" for i in range(len(start))][::-1]
        back = self.walked([spec], who, start[::-1], [g[::-1] for g in gradients], names=names)["p"][::-1]
        if self.gathers:
            return True, None, "not asked of a rule that reduces over all tensors"
        return self.same({"p": there}, {"p": back}, "tensors that come in another order end elsewhere")

    def single(self, who: Speaker) -> tuple[bool, float | None, str]:
        if self.gathers:
            return True, None, "not asked of a rule that reduces over all tensors"
        start, gradients = self.problem()
        spec = self.rule(**self.settings)
        together = self.walked([spec], who, start, gradients)["p"]
        singly = [
            self.walked([spec], who, [p], [[g[i]] for g in gradients], names=[f"tensor {i}"])["p"][0] for i, p in enumerate(start)
        ]
        if self.rule.matrix:  # products of stacks may be rounded otherwise than those of matrices
            worst = max(_apart(a, b, s) for a, b, s in zip(singly, together, start, strict=True))
            return worst <= MATRIX_BAR, worst, ""
        return self.same({"p": together}, {"p": singly}, "tensors stepped one by one end elsewhere")

    def local(self, who: Speaker) -> tuple[bool, float | None, str]:
        if self.gathers:
            return True, None, "not asked of a rule that reduces over all tensors"
        start, gradients = self.problem()
        start, gradients = [*start, start[-1]], [[*g, g[-1]] for g in gradients]
        bad = [[*g[:-1], np.full_like(g[-1], math.nan)] for g in gradients]
        spec = self.rule(**self.settings)
        clean, dirty = (self.walked([spec], who, start, g)["p"][:-1] for g in (gradients, bad))
        return self.same({"p": clean}, {"p": dirty}, "a NaN in one tensor's gradient reaches another")

    def zero(self, who: Speaker) -> tuple[bool, float | None, str]:
        start, gradients = self.problem()
        none = [[np.zeros_like(x) for x in g] for g in gradients]
        found = self.walked([self.rule(**self.settings)], who, start, none)
        bad = [name for name, arrays in found.items() if not all(np.isfinite(a).all() for a in arrays)]
        return not bad, None, f"gradients of zero make {', '.join(bad)} NaN or infinite" if bad else ""

    def over_ranks(self) -> tuple[bool, float | None, str]:
        """Two processes, beside one."""
        from .rule_ranks import over_ranks
        from .table import Skip

        if self.rule.matrix and commit_measures(self.rule(**self.settings)):
            return True, None, "its commit measures p or u, which is refused where matrices are spread over ranks"
        start, gradients = self.problem()
        try:
            want, got = over_ranks(self.rule, self.settings, start, gradients)
        except Skip as why:
            return True, None, str(why)
        bar = MATRIX_BAR if self.rule.matrix else BAR
        worst = max(_apart(a, b, s) for a, b, s in zip(got["p"], want["p"], start, strict=True))
        if not worst <= bar:
            return False, worst, "parameters end elsewhere than in one process"
        bad = [name for name in want if name != "p" and not gap(got[name], want[name]) <= 10 * bar]
        return not bad, worst, f"{bad[0]} ends elsewhere than in one process" if bad else ""

    def moves(self, name: str, field: Field) -> tuple[bool, float | None, str]:
        """Whether a hyperparameter does something to p or to the state: by itself, or beside another that is changed too, or a
        learning rate that falls."""
        if field.annotation.startswith("Callable"):
            return True, None, "a function: not tried"
        others: list[dict[str, Any]] = [{}]
        others += [
            {other: value}
            for other, each in self.rule.fields.items()
            if other != name
            for value in self.alternatives(other, each)
        ]
        if name in (untried := {"state_dtype": "too small to be coded", "rounding": "of float32"}):
            return True, None, f"not tried: tensors here are {untried[name]}"
        tried = False
        falling = itertools.product((False, True), others) if name != "lr" else itertools.product((False,), others)
        for falls, context in sorted(falling, key=lambda each: len(each[1])):  # what is alone comes first
            want = self.named(context, falls=falls)
            for value in self.alternatives(name, field, context):
                tried = True
                got = self.named(context | {name: value}, falls=falls)
                if want is not None and got is not None and (moved := _moved(got, want)) > LEAST:
                    beside = [f"{k}={v!r}" for k, v in context.items()] + ["an lr that falls"] * falls
                    return True, moved, f"beside {', '.join(beside)}" if beside else ""
        if not tried and name in MODIFIERS:
            return True, None, "every other value is refused"
        if name == "cautious" and self.rule.caution is not None:
            return True, 0.0, "it changes nothing: the direction has the gradient's signs"
        return False, 0.0, f"{name} was changed, alone and beside others, and nothing moved"

    def scheduled(self, name: str, field: Field, engine: str) -> tuple[bool, float | None, str]:
        value = next(iter(self.alternatives(name, field)), None)
        if not isinstance(value, float):
            return True, None, "no other value was in range"
        flat, moving = self.named({name: value}, engine), self.named({name: lambda i: value}, engine)
        if flat is None or moving is None or _moved(flat, moving) > 0:
            return False, None, f"{name} as a schedule that is always {value} does other than {name}={value}"
        self.named({name: lambda i: value * (1 - 1e-3 * i)}, engine)
        before = _kernels()
        self.named({name: lambda i: value * (1 - 2e-3 * i)}, engine)
        made = _kernels() - before
        return not made, None, f"{made} kernels were compiled while {name} moved" if made else ""

    # ---- what they share -------------------------------------------------------------------------------------------------
    def problem(self, shapes: Sequence[Shape] = (), steps: int = STEPS) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
        rng = np.random.default_rng(0)

        def draw(scale: float) -> list[np.ndarray]:
            return [np.asarray(scale * rng.standard_normal(shape), np.float32) for shape in shapes or self.shapes]

        return draw(0.1), [draw(0.1) for _ in range(steps)]

    def walked(
        self, specs: Sequence[Spec], who: Speaker, start: Any, gradients: Any, apart: bool = False, names: Any = None
    ) -> Arrays:
        walk = Walk(specs, who, start, apart, names)
        for g in gradients:
            walk.step(g)
        return walk.found()

    def specs(self) -> list[Spec]:
        """Two groups that differ in every number that may differ."""
        spec, changed = self.rule(**self.settings), dict[str, Any]()
        for name, field in self.rule.fields.items():
            for value in self.alternatives(name, field):
                if field.structural or value is None or spec.values()[name] is None:
                    continue
                try:
                    self.rule(**{**self.settings, **changed, name: value})
                except (TypeError, ValueError):
                    continue
                changed[name] = value
                break
        return [spec, spec.replace(**changed)]

    def alternatives(self, name: str, field: Field, context: dict[str, Any] | None = None) -> Iterator[Any]:
        """Other values of a hyperparameter that are in range beside the others."""
        settings = {**self.settings, **(context or {})}
        try:
            now = self.rule(**settings).values()[name]
        except (TypeError, ValueError):
            return
        tried: Sequence[Any] = NUMBERS
        if isinstance(now, bool):
            tried = (not now,)
        elif field.annotation.startswith("bool"):
            tried = (True, False)
        elif field.annotation.startswith("Literal"):
            tried = [*_options(field.annotation), None]
        elif field.annotation == "int":
            tried = (1, 2, 3, now + 1)
        elif isinstance(now, tuple):
            tried = [(*now[:i], value, *now[i + 1 :]) for i, value in itertools.product(range(len(now)), NUMBERS)]
        elif isinstance(now, float):
            tried = (now * 0.5, now * 2.0, *NUMBERS, None)
        for value in tried:
            try:
                if value != now:
                    self.rule(**{**settings, name: value})
                    yield value
            except (TypeError, ValueError):
                continue

    def named(self, settings: dict[str, Any], engine: str = "reference", falls: bool = False) -> Arrays | None:
        """Parameters, slots and counters after each of some steps through the named API, with gradients that depend on p; None
        where the settings are refused together. falls: the learning rate does."""
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
        shapes = [shape for shape in SMALL if self.rule.everywhere or spec.takes(shape) is None]
        params = {str(i): np.asarray(rng.standard_normal(shape), np.float32) for i, shape in enumerate(shapes)}
        found: Arrays = {}
        for _ in range(LONG):
            noise = {name: rng.standard_normal(p.shape) for name, p in params.items()}
            if self.rule.observes:
                for name, p in params.items():
                    opt.update_hessian(name, np.asarray(np.abs(rng.standard_normal(p.shape)), np.float32))
            opt.step_all(params, {name: np.asarray(0.1 * p + noise[name], np.float32) for name, p in params.items()})
            for name, p in params.items():
                for slot, array in {"p": p, **opt.state(name)}.items():
                    found.setdefault(slot, []).append(array.copy())
        return found

    @staticmethod
    def same(first: Arrays, second: Arrays, otherwise: str) -> tuple[bool, float | None, str]:
        for name, arrays in first.items():
            for a, b in zip(arrays, second[name], strict=True):
                if not np.array_equal(a, b, equal_nan=True):
                    return False, float(np.nanmax(np.abs(a - b))), f"{otherwise}: {name} of shape {a.shape}"
        return True, 0.0, ""


def _traced(spec: Spec, slots: Mapping[str, Slot]) -> set[str]:
    """The slots that a step or an estimate reads or writes."""
    programs = [trace(spec, slots, what) for what in ("step", "observe")[: 1 + spec.observes]]
    read = {n for program in programs for step in program.steps for n in step.takes}
    return {name for program in programs for name, n in program.inputs.items() if n in read or name in program.buffers}


def _apart(got: np.ndarray, want: np.ndarray, start: np.ndarray) -> float:
    """The largest difference over the distance travelled. One unit in the last place is free."""
    moved = np.abs(want.astype(np.float64) - start).max()
    gap = (np.abs(got.astype(np.float64) - want) - np.spacing(np.abs(want))).max()
    return float(max(gap, 0.0) / max(moved, 1e-30)) if np.isfinite(gap) else math.inf


def _moved(got: Arrays, want: Arrays) -> float:
    """The largest difference of what both have in one shape."""
    pairs = [pair for name in got.keys() & want.keys() for pair in zip(got[name], want[name], strict=False)]
    return max((float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs if a.shape == b.shape and a.size), default=0.0)


def _nudged(start: Any, gradients: Any, seed: int) -> tuple[Any, Any]:
    """Every number, one unit in the last place up or down."""
    rng = np.random.default_rng(seed)

    def nudged(array: np.ndarray) -> np.ndarray:
        return np.asarray(array + np.spacing(array) * rng.choice((-1, 1), array.shape), np.float32)

    return list(map(nudged, start)), [list(map(nudged, each)) for each in gradients]


def _options(annotation: str) -> list[str]:
    inside = annotation.partition("[")[2].partition("]")[0]
    return [each.strip().strip("'") for each in inside.split(",")]


def _kernels() -> int:
    """How many kernels the cpu engine has compiled."""
    from ..engines.cpu.kernels import compiled

    return compiled.cache_info().currsize
