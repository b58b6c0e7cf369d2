"""`check_rule`: is a rule fit to be used? It is stepped on every engine that is here, and every habit of a good rule is tried."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..language import LanguageError
from ..numpy.curvature import CurvatureOptimizer
from ..numpy.optimizer import NamedOptimizer
from ..program import Program, commit_has_reduction, trace
from ..spec import KEY, MODIFIERS, REQUIRED, Field, Shape, Slot, Spec
from .engines import Arrays, Speaker, Walk, gap, missing, present, speaker, updated_by_optax
from .subject import Subject, distance, neighbours
from .table import Check, RuleReport, Skip, Wrong, chosen, expect, run_checks

SHAPES: tuple[Shape, ...] = ((), (1,), (37,), (24, 16), (40, 8), (6, 30), (4, 3, 3, 2))
SMALL: tuple[Shape, ...] = ((5, 4), (3, 6), (7,))
STEPS, LONG = 4, 12
BAR, MATRIX_BAR = 2e-5, 1e-3  # of the distance travelled, for rules that multiply matrices the second
UNITS, NUDGES = 4, 3  # in the last place of the input, by which an engine's rounding may be worse; how often that is tried
COUNTED = 1_000  # steps in which a counter must move
#: what is tried in the place of a hyperparameter's value, where it is in range
NUMBERS = (0.5, 0.1, 0.01, 0.9, 2.0, 1.0, 0.0, -0.5)
LEAST = 1e-12  # of p: what moves it less does nothing
Seen = float | str | tuple[float | str, str]  # a number or "", and perhaps a note

#: why each is asked, and how to mend what it finds; what was raised says that by itself. Those of hyperparameters are asked of
#: every one
REASONS = {
    "language": ("no engine can run what is outside the language of rules", ""),
    "declared": (
        "only what is declared can be set, scheduled, saved and documented",
        "declare it: lr: float = real(1e-3), or with flag, integer, choice of rlx_optim.rule; a constant is a ClassVar",
    ),
    "slots": (
        "a slot that nobody reads or writes is memory for nothing",
        "take it out of `slots`, or let `update` give it to a rule and take its next value from there",
    ),
    "counters": (
        "a counter that never moves is a constant in every checkpoint",
        "`scalars` (or the `update` of a matrix rule) gives its next value: {name: counters[name] + 1}",
    ),
    "jit": (
        "a jitted update of optax traces the step count, and every number that is a schedule",
        "t, counters and schedules are traced there, in float32: with the words of rlx_optim.rule, where(t > 3, a, b) for if, "
        "maximum(t, 2) for max, sqrt(t) for math.sqrt; an `update` on matrices computes with E and operators, and chooses by "
        "E.cond",
    ),
    "engine": (
        "every engine that is here ends where the reference does",
        "the rule is too delicate for float32: subtract near-equal numbers in `scalars`, which is float64",
    ),
    "groups": (
        "groups that differ in every number are stepped each by its own",
        "`update` is traced once for all groups: what differs between them must come from `scalars`, or be in `static_key`",
    ),
    "same again": (
        "the same steps must give the same bits",
        "a step may depend on p, g, slots, counters, t and hyperparameters alone",
    ),
    "resume": (
        "state that was saved half-way goes on bit for bit",
        "state must be in slots or counters: nothing else is saved",
    ),
    "order": (
        "which tensor comes first must not matter",
        "tensors are stepped in any order: a rule must not remember what came before",
    ),
    "one by one": (
        "tensors stepped one by one end where they end together",
        "a tensor's step must not depend on which others are stepped with it, unless by an all_… reduction",
    ),
    "NaN": (
        "a NaN in one gradient must not reach another tensor",
        "a NaN must not leave its tensor: only all_… reductions may look at several",
    ),
    "zero": (
        "gradients of zero must not make anything NaN",
        "keep divisions away from 0 with an eps, or maximum(…)",
    ),
    "ranks": (
        "on DTensors of two gloo processes a rule ends where one process does: owners see what the rule reads",
        "a step may depend on p, g, slots, counters, t and hyperparameters alone, and the commit on p, u and numbers",
    ),
    "hyperparameter": (
        "a hyperparameter that does nothing is a bug that no loss curve shows",
        "does `scalars` give it, does the rule read it, is it in `static_key`?",
    ),
    "schedule": (
        "a constant schedule means its number, and a schedule that moves compiles nothing",
        "a number of `scalars` must do: what picks code or slots is structural (flag, integer, choice)",
    ),
}  # fmt: skip


def check_rule(
    rule: type[Spec], *, engines: Sequence[str] | None = None, only: Sequence[str] = (), **settings: Any
) -> RuleReport:
    """Step a rule on every engine that is here, against the reference: over shapes, over groups that differ, resumed, with bad
    gradients, with every hyperparameter changed and scheduled. only: names of checks, or patterns like schedule*; the first,
    language, is always one of them. settings: where they are not the defaults."""
    subject = RuleSubject(rule, settings, engines)
    report: RuleReport = run_checks(subject, chosen(subject, subject.checks(), only=only))
    return report


class RuleSubject(Subject):
    """A rule under check. Parameters are stepped by the engines themselves, or through the named API."""

    kind, report = "rule", RuleReport

    def __init__(self, rule: type[Spec], settings: Mapping[str, Any], engines: Sequence[str] | None = None):
        if not (isinstance(rule, type) and issubclass(rule, Spec)):
            raise TypeError(f"check_rule takes a Spec class, got {rule!r}")
        required = {name: 0.1 for name, field in rule.fields.items() if field.default is REQUIRED}
        super().__init__(rule.__name__, required | dict(settings))
        self.rule, self.described = rule, f"of {rule.__name__}"
        self.engines = [engine for engine in engines or present() if engine != "reference"]

    # ---- what is asked ---------------------------------------------------------------------------------------------------
    def checks(self) -> Iterator[Check]:
        """Yield every check on every engine where it is asked."""

        def asked(name: str, engine: str, run: Callable[[], Seen]) -> Check:
            reason, hint = REASONS[next(key for key in REASONS if name.startswith(key))]
            first = name == "language"
            return Check(name, reason, ("rule",), lambda s: s.explained(run, hint, first), engine=engine, essential=first)

        yield asked("language", "trace", lambda: ("", self.taken[1]))
        yield asked("declared", "trace", self.declared)
        yield asked("slots", "reference", self.touched)
        if "torch" in self.engines:  # before an engine uses CUDA, after which nothing can be forked
            yield asked("ranks", "torch", self.over_ranks)
        for check, apart in (("engine", False), ("groups", True)):
            for engine in self.engines:
                yield asked(check, engine, functools.partial(self.beside, engine, apart))
        yield asked("groups", "reference", self.alone)
        yield asked("jit", "optax", self.jitted)
        yield asked("counters", "reference", self.counted)
        best = "cpu" if "cpu" in self.engines else "reference"
        for check, run in {
            "same again": self.again, "resume": self.resumed, "order": self.reversed, "one by one": self.single,
            "NaN": self.local, "zero": self.zero,
        }.items():  # fmt: skip
            for engine in dict.fromkeys(("reference", best)):
                yield asked(check, engine, functools.partial(run, speaker(engine)))
        for name, field in self.rule.fields.items():
            yield asked(f"hyperparameter {name}", "reference", functools.partial(self.moves, name, field))
            if field.annotation in ("float", "float | None") and not field.structural:
                yield asked(f"schedule of {name}", best, functools.partial(self.scheduled, name, field, best))

    def explained(self, run: Callable[[], Seen], hint: str, first: bool) -> Seen:
        """Run a check, and say beside what is wrong how to mend it, or where in the rule's file something was raised."""
        try:
            if not first and self.spoken is None:
                raise Skip("the rule is outside the language")
            return run()
        except Skip:
            raise
        except Wrong as wrong:
            raise Wrong("; ".join(filter(None, (str(wrong), hint))), wrong.seen) from None
        except Exception as problem:
            text, place = str(problem).strip(), self.place(problem)
            if type(problem).__module__.startswith("jax"):  # it says a page about tracing, and nothing of the words for it
                text, place = text.partition("\n")[0], f"{place}; {hint}"
            raise Wrong("; ".join(filter(None, (f"{type(problem).__name__}: {text}", place)))) from problem

    def place(self, problem: Exception) -> str:
        """Return the line of the rule's file that raised something; a LanguageError says its own."""
        file = self.rule.update.__code__.co_filename
        lines = [each.lineno for each in traceback.extract_tb(problem.__traceback__) if each.filename == file]
        return f"raised at {file}:{lines[-1]}" if lines and not isinstance(problem, LanguageError) else ""

    @functools.cached_property
    def taken(self) -> tuple[list[Shape], str, bool]:
        """The shapes that the rule takes, which it leaves to others, and whether it reduces over all tensors."""
        spec, shapes, left, gathers = self.rule(**self.settings), list[Shape](), list[str](), False
        for shape in SHAPES:
            if (why := spec.takes(shape)) is not None:
                left.append(f"{shape}: {why}")
                continue
            slots = spec.stored_slots(shape)
            program: Program | None = None if spec.matrix else trace(spec, slots)
            if program is not None:
                program.check(self.rule.__name__, ["a tensor"], [shape])
                gathers = gathers or program.reduction_over_all is not None
            shapes.append(shape)
        if not shapes:
            raise Wrong(f"it takes none of these shapes: {'; '.join(left)}")
        return shapes, f"left to others: {'; '.join(left)}" if left else "", gathers

    @functools.cached_property
    def spoken(self) -> list[Shape] | None:
        """The shapes that the rule takes; None where it is outside the language."""
        try:
            return self.taken[0]
        except Exception:
            return None

    def by_itself(self) -> None:
        """Skip where tensors are meant to look at each other."""
        if self.taken[2]:
            raise Skip("not asked of a rule that reduces over all tensors")

    # ---- checks ----------------------------------------------------------------------------------------------------------
    def declared(self) -> Seen:
        """What stands in the class as a plain value, though it is a hyperparameter's."""
        kinds = [kind for kind in self.rule.__mro__ if issubclass(kind, Spec) and kind is not Spec]
        said = {name: str(word) for kind in kinds for name, word in inspect.get_annotations(kind).items()}
        names = {name for name, word in said.items() if "ClassVar" not in word and name not in (*self.rule.fields, *vars(Spec))}
        names |= {name for kind in kinds for name in vars(kind) if name in self.rule.fields}  # a plain value over a declared one
        names |= {"lr"} - self.rule.fields.keys()
        values = {name: f"is {getattr(self.rule, name)!r:.80}" for name in names if hasattr(self.rule, name)}
        plain = sorted(f"{name} {values[name]}" if name in values else f"there is no {name}" for name in names)
        return expect(not plain, f"{', '.join(plain)}, and not a hyperparameter")

    def touched(self) -> Seen:
        """Whether every slot is read or written, and what begins at 0 is written; of matrix rules, whether it changes anything,
        or is changed."""
        spec, slots, read, written = self.rule(**self.settings), dict[str, Slot](), set[str](), {self.rule.evaluated}
        for shape in self.taken[0]:
            slots |= (found := spec.slots(shape))
            if self.rule.matrix:
                written |= self.felt(spec, shape)
                continue
            for what in ("step", "observe")[: 1 + spec.observes]:
                program = trace(spec, found, what)
                taken = {n for step in program.steps for n in step.takes}
                read |= {name for name, n in program.inputs.items() if n in taken}
                written |= program.buffers.keys()
        often = f" in {LONG} steps" if self.rule.matrix else ""
        idle = sorted(slots.keys() - read - written)
        expect(not idle, f"nobody reads or writes {', '.join(idle)}{often}")
        zeros = {name for name, slot in slots.items() if not (slot.fill or slot.eye or slot.meaning == KEY)}
        still = sorted(zeros & read - written)
        return expect(not still, f"nobody writes {', '.join(still)}, which stays 0")

    def felt(self, spec: Spec, shape: Shape) -> set[str]:
        """Return the slots of a tensor that some steps change, or that change some steps."""
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

    def counted(self) -> Seen:
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
        return expect(not still, f"{', '.join(sorted(still))} never moves")

    def jitted(self) -> Seen:
        """Jitted updates of `rlx_optim.optax` beside the reference; the learning rate is a number, then traced."""
        if (why := missing("jax", "optax") or (None if "lr" in self.rule.fields else "it has no lr")) is not None:
            raise Skip(f"not asked: {why}")
        spec = self.rule(**self.settings)
        start, gradients = self.problem([shape for shape in SMALL if spec.takes(shape) is None] or self.taken[0][:2])
        found: Seen = ""
        for scheduled in (False, True)[: 1 + isinstance(spec.values().get("lr"), float)]:
            found = self.judged(updated_by_optax(spec, start, gradients, scheduled), [spec], start, gradients)
        return found

    def beside(self, engine: str, apart: bool) -> Seen:
        """Beside the reference."""
        start, gradients = self.problem()
        specs = self.specs() if apart else [self.rule(**self.settings)]
        return self.judged(self.walked(specs, speaker(engine), start, gradients, apart)["p"], specs, start, gradients, apart)

    def judged(self, got: Sequence[np.ndarray], specs: Sequence[Spec], start: Any, gradients: Any, apart: bool = False) -> Seen:
        """Return how far tensors end from where the reference leaves them, in the distance travelled. They may by what a few
        units in the last place of the input move the reference itself: no float32 arithmetic is better than that."""

        def gaps(found: Sequence[np.ndarray]) -> list[float]:
            return [distance(f, *each) for f, *each in zip(found, want, start, zip(*path, strict=True), strict=True)]

        who = speaker("reference")
        walk, path = Walk(specs, who, start, apart), list[list[np.ndarray]]()
        for g in gradients:
            walk.step(g)
            path.append(list(map(np.copy, walk.found()["p"])))
        want = path[-1]
        found = gaps(got)
        if max(found) <= self.bar:
            return max(found)
        nudges = [self.walked(specs, who, *_nudged(start, gradients, seed), apart)["p"] for seed in range(NUDGES)]
        moved = [max(each) for each in zip(*map(gaps, nudges), strict=True)]
        far = [i for i, gap in enumerate(found) if not gap <= max(self.bar, UNITS * moved[i])]
        if far:
            raise Wrong(f"a tensor of shape {start[far[0]].shape} ends elsewhere", max(found[i] for i in far))
        return max(found), "ill-conditioned: a unit in the last place of its input moves the reference about as far"

    @property
    def bar(self) -> float:
        return MATRIX_BAR if self.rule.matrix else BAR

    def alone(self) -> Seen:
        """Groups together, and each by itself."""
        self.by_itself()
        (start, gradients), specs, who = self.problem(), self.specs(), speaker("reference")
        together = self.walked(specs, who, start, gradients, True)["p"]
        for i in range(len(start)):
            walk = Walk([specs[i % len(specs)]], who, [start[i]], names=[f"tensor {i}"])
            walk.records[0].t = i % 4
            for g in gradients:
                walk.step([g[i]])
            if not np.array_equal(walk.found()["p"][0], together[i], equal_nan=True):
                changed = ", ".join(f"{k}={v!r}" for k, v in specs[i % len(specs)].values().items())
                raise Wrong(f"a tensor of shape {start[i].shape} in a group with {changed} takes another's values")
        return 0.0

    def again(self, who: Speaker) -> Seen:
        return self.same(self.plainly(who), self.plainly(who), "the same steps give other numbers the second time")

    def resumed(self, who: Speaker) -> Seen:
        (start, gradients), spec = self.problem(), self.rule(**self.settings)
        whole = self.plainly(who)
        before = Walk([spec], who, start)
        for g in gradients[:2]:
            before.step(g)
        self.plainly(who)  # others step in between
        after = Walk([spec], who, before.found()["p"])
        for old, new in zip(before.records, after.records, strict=True):
            new.t, new.counters = old.t, dict(old.counters)
            for name, value in new.state.items():
                value[...] = old.state[name]
        for g in gradients[2:]:
            after.step(g)
        return self.same(whole, after.found(), "state that was saved and restored half-way goes on differently")

    def reversed(self, who: Speaker) -> Seen:
        self.by_itself()
        start, gradients = self.problem()
        names = [f"tensor {i}" for i in range(len(start))][::-1]
        back = self.walked([self.rule(**self.settings)], who, start[::-1], [g[::-1] for g in gradients], names=names)
        return self.same(
            {"p": self.plainly(who)["p"]}, {"p": back["p"][::-1]}, "tensors that come in another order end elsewhere"
        )

    def single(self, who: Speaker) -> Seen:
        self.by_itself()
        (start, gradients), specs = self.problem(), [self.rule(**self.settings)]
        together = self.plainly(who)["p"]
        singly = [
            self.walked(specs, who, [p], [[g[i]] for g in gradients], names=[f"tensor {i}"])["p"][0] for i, p in enumerate(start)
        ]
        what = "tensors stepped one by one end elsewhere"
        if self.rule.matrix:  # products of stacks may be rounded otherwise than those of matrices
            worst = max(distance(a, b, s) for a, b, s in zip(singly, together, start, strict=True))
            return expect(worst <= MATRIX_BAR, what, worst)
        return self.same({"p": together}, {"p": singly}, what)

    def local(self, who: Speaker) -> Seen:
        self.by_itself()
        start, gradients = self.problem()
        start, gradients = [*start, start[-1]], [[*g, g[-1]] for g in gradients]
        bad = [[*g[:-1], np.full_like(g[-1], math.nan)] for g in gradients]
        clean, dirty = (self.walked([self.rule(**self.settings)], who, start, g)["p"][:-1] for g in (gradients, bad))
        return self.same({"p": clean}, {"p": dirty}, "a NaN in one tensor's gradient reaches another")

    def zero(self, who: Speaker) -> Seen:
        start, gradients = self.problem()
        none = [[np.zeros_like(x) for x in g] for g in gradients]
        found = self.walked([self.rule(**self.settings)], who, start, none)
        bad = [name for name, arrays in found.items() if not all(np.isfinite(a).all() for a in arrays)]
        return expect(not bad, f"gradients of zero make {', '.join(bad)} NaN or infinite")

    def over_ranks(self) -> Seen:
        """Two processes, beside one."""
        from .ranks import over_ranks

        if self.rule.matrix and commit_has_reduction(self.rule(**self.settings)):
            raise Skip("its commit measures p or u, which is refused where matrices are spread over ranks")
        start, gradients = self.problem()
        want, got = over_ranks(self.rule, self.settings, start, gradients)
        worst = max(distance(a, b, s) for a, b, s in zip(got["p"], want["p"], start, strict=True))
        expect(worst <= self.bar, "parameters end elsewhere than in one process", worst)
        bad = [name for name in want if name != "p" and not gap(got[name], want[name]) <= 10 * self.bar]
        return expect(not bad, f"{bad and bad[0]} ends elsewhere than in one process", worst)

    def moves(self, name: str, field: Field) -> Seen:
        """Whether a hyperparameter does something to p or to the state: by itself, or beside another that is changed too, or a
        learning rate that falls."""
        if field.annotation.startswith("Callable"):
            raise Skip("a function: not tried")
        if name in (untried := {"state_dtype": "too small to be coded", "rounding": "of float32"}):
            raise Skip(f"not tried: tensors here are {untried[name]}")
        others: list[dict[str, Any]] = [{}]
        others += [{k: value} for k, each in self.rule.fields.items() if k != name for value in self.alternatives(k, each)]
        if name == "lr":  # of every rule, by itself; what decay alone reads is no rate
            others = [{"weight_decay": 0.0} if self.rule(**self.settings).values().get("weight_decay") else {}]
        tried = False
        falling = itertools.product((False, True)[: 1 + (name != "lr")], others)
        for falls, context in sorted(falling, key=lambda each: len(each[1])):  # what is alone comes first
            want = self.named(context, falls=falls)
            for value in self.alternatives(name, field, context):
                tried = True
                got = self.named(context | {name: value}, falls=falls)
                if want is not None and got is not None and (moved := _moved(got, want)) > LEAST:
                    beside = [f"{k}={v!r}" for k, v in context.items()] + ["an lr that falls"] * falls
                    return moved, f"beside {', '.join(beside)}" if beside else ""
        if not tried and name in MODIFIERS:
            raise Skip("every other value is refused")
        if name == "cautious" and self.rule.caution is not None:
            return 0.0, "it changes nothing: the direction has the gradient's signs"
        raise Wrong(f"{name} was changed, alone and beside others, and nothing moved", 0.0)

    def scheduled(self, name: str, field: Field, engine: str) -> Seen:
        value = next(iter(self.alternatives(name, field)), None)
        if not isinstance(value, float):
            raise Skip("no other value was in range")
        flat, moving = self.named({name: value}, engine), self.named({name: lambda i: value}, engine)
        if flat is None or moving is None or _moved(flat, moving) > 0:
            raise Wrong(f"{name} as a schedule that is always {value} does other than {name}={value}")
        self.named({name: lambda i: value * (1 - 1e-3 * i)}, engine)
        before = _kernels()
        self.named({name: lambda i: value * (1 - 2e-3 * i)}, engine)
        made = _kernels() - before
        return expect(not made, f"{made} kernels were compiled while {name} moved")

    # ---- what they share -------------------------------------------------------------------------------------------------
    def problem(self, shapes: Sequence[Shape] = (), steps: int = STEPS) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
        rng = np.random.default_rng(0)

        def draw(scale: float) -> list[np.ndarray]:
            return [np.asarray(scale * rng.standard_normal(shape), np.float32) for shape in shapes or self.taken[0]]

        return draw(0.1), [draw(0.1) for _ in range(steps)]

    def walked(
        self, specs: Sequence[Spec], who: Speaker, start: Any, gradients: Any, apart: bool = False, names: Any = None
    ) -> Arrays:
        walk = Walk(specs, who, start, apart, names)
        for g in gradients:
            walk.step(g)
        return walk.found()

    def plainly(self, who: Speaker) -> Arrays:
        """Return parameters and state after the plain problem."""
        return self.walked([self.rule(**self.settings)], who, *self.problem())

    def specs(self) -> list[Spec]:
        """Return two groups that differ in every number that may differ."""
        spec, changed = self.rule(**self.settings), dict[str, Any]()
        for name, field in self.rule.fields.items():
            for value in () if field.structural or spec.values()[name] is None else self.alternatives(name, field):
                if value is not None and self.accepts({**changed, name: value}):
                    changed[name] = value
                    break
        return [spec, spec.replace(**changed)]

    def accepts(self, settings: Mapping[str, Any]) -> bool:
        """Whether the rule takes these settings beside those of the check."""
        try:
            self.rule(**{**self.settings, **settings})
        except (TypeError, ValueError):
            return False
        return True

    def alternatives(self, name: str, field: Field, context: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Yield other values of a hyperparameter that are in range beside the others."""
        context = context or {}
        if not self.accepts(context):
            return
        now = self.rule(**{**self.settings, **context}).values()[name]
        tried: Sequence[Any] = neighbours(now, NUMBERS)
        if field.annotation.startswith("bool") and not isinstance(now, bool):
            tried = (True, False)
        elif field.annotation.startswith("Literal"):
            tried = [*_options(field.annotation), None]
        elif isinstance(now, float):
            tried = (*tried, None)
        yield from (value for value in tried if value != now and self.accepts({**context, name: value}))

    def named(self, settings: dict[str, Any], engine: str = "reference", falls: bool = False) -> Arrays | None:
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
            if self.rule.observes:
                for name, p in params.items():
                    opt.update_hessian(name, np.asarray(np.abs(rng.standard_normal(p.shape)), np.float32))
            opt.step_all(params, {name: np.asarray(0.1 * p + noise[name], np.float32) for name, p in params.items()})
            for name, p in params.items():
                for slot, array in {"p": p, **opt.state(name)}.items():
                    found.setdefault(slot, []).append(array.copy())
        return found

    @staticmethod
    def same(first: Arrays, second: Arrays, otherwise: str) -> Seen:
        """Return 0 where two walks end with the same bits."""
        for name, arrays in first.items():
            for a, b in zip(arrays, second[name], strict=True):
                if not np.array_equal(a, b, equal_nan=True):
                    raise Wrong(f"{otherwise}: {name} of shape {a.shape}", float(np.nanmax(np.abs(a - b))))
        return 0.0


def _moved(got: Arrays, want: Arrays) -> float:
    """Return the largest difference of what both have in one shape."""
    pairs = [pair for name in got.keys() & want.keys() for pair in zip(got[name], want[name], strict=False)]
    return max((float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs if a.shape == b.shape and a.size), default=0.0)


def _nudged(start: Any, gradients: Any, seed: int) -> tuple[Any, Any]:
    """Return every number, one unit in the last place up or down."""
    rng = np.random.default_rng(seed)

    def nudged(array: np.ndarray) -> np.ndarray:
        return np.asarray(array + np.spacing(array) * rng.choice((-1, 1), array.shape), np.float32)

    return list(map(nudged, start)), [list(map(nudged, each)) for each in gradients]


def _options(annotation: str) -> list[str]:
    return [each.strip().strip("'") for each in annotation.partition("[")[2].partition("]")[0].split(",")]


def _kernels() -> int:
    """How many kernels the cpu engine has compiled."""
    from ..engines.cpu.kernels import compile_kernel

    return compile_kernel.cache_info().currsize
