"""Checks of a rule: it is stepped on every engine that is here, and every habit of a good rule is tried."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..program import commit_has_reduction, trace
from ..spec import KEY, MODIFIERS, Shape, Slot, Spec
from .engines import Arrays, Walk, find_gap, get_speaker, say_missing, walk_by_optax
from .rule_subject import LONG, MATRIX_BAR, SMALL, RuleSubject, Seen, expect_same
from .subject import distance
from .table import Check, RuleReport, Skip, Wrong, check, choose_checks, expect, run_checks

COUNTED = 1_000  # steps in which a counter must move
LEAST = 1e-12  # of p: what moves it less does nothing


def check_rule(
    rule: type[Spec], *, engines: Sequence[str] | None = None, only: Sequence[str] = (), **settings: Any
) -> RuleReport:
    """Step a rule on every engine that is here, against the reference: over shapes, over groups that differ, resumed, with bad
    gradients, with every hyperparameter changed and scheduled. only: names of checks, or patterns like schedule*; the first,
    language, is always one of them. settings: where they are not the defaults."""
    subject = RuleSubject(rule, settings, engines)
    report: RuleReport = run_checks(subject, choose_checks(subject, only=only))
    return report


# ---- cases ------------------------------------------------------------------------------------------------------------------
def every_engine(s: RuleSubject, check: Check) -> Iterator[Check]:
    return (check.case(engine, engine) for engine in s.engines)


def two_engines(s: RuleSubject, check: Check) -> Iterator[Check]:
    """The reference, and the engine that most people use."""
    return (check.case(engine, get_speaker(engine)) for engine in dict.fromkeys(("reference", s.best)))


def every_field(s: RuleSubject, check: Check) -> Iterator[Check]:
    return (check.case("reference", name, name=f"{check.name} {name}") for name in s.rule.fields)


def every_number(s: RuleSubject, check: Check) -> Iterator[Check]:
    """Hyperparameters that may be schedules."""
    for name, field in s.rule.fields.items():
        if field.annotation in ("float", "float | None") and not field.structural:
            yield check.case(s.best, name, name=f"{check.name} of {name}")


# ---- what it is made of -----------------------------------------------------------------------------------------------------
@check("no engine can run what is outside the language of rules", "rule", engine="trace", essential=True)
def language(s: RuleSubject) -> Seen:
    return "", s.survey.others


@check(
    "only what is declared can be set, scheduled, saved and documented", "rule", engine="trace",
    hint="declare it: lr: float = real(1e-3), or with flag, integer, choice of rlx_optim.rule; a constant is a ClassVar",
)  # fmt: skip
def declared(s: RuleSubject) -> Seen:
    """What stands in the class as a plain value, though it is a hyperparameter's."""
    rule, kinds = s.rule, [kind for kind in s.rule.__mro__ if issubclass(kind, Spec) and kind is not Spec]
    annotated = {name: str(word) for kind in kinds for name, word in inspect.get_annotations(kind).items()}
    names = {name for name, word in annotated.items() if "ClassVar" not in word and name not in (*rule.fields, *vars(Spec))}
    names |= {name for kind in kinds for name in vars(kind) if name in rule.fields}  # a plain value over a declared one
    names |= {"lr"} - rule.fields.keys()
    values = {name: f"is {getattr(rule, name)!r:.80}" for name in names if hasattr(rule, name)}
    plain = sorted(f"{name} {values[name]}" if name in values else f"there is no {name}" for name in names)
    return expect(not plain, f"{', '.join(plain)}, and not a hyperparameter")


@check(
    "a slot that nobody reads or writes is memory for nothing", "rule", engine="reference",
    hint="take it out of `slots`, or let `update` give it to a rule and take its next value from there",
)  # fmt: skip
def slots(s: RuleSubject) -> Seen:
    """Whether every slot is read or written, and what begins at 0 is written; of matrix rules, whether it changes anything, or is
    changed."""
    spec, slots, read, written = s.spec, dict[str, Slot](), set[str](), {s.rule.evaluated}
    for shape in s.survey.shapes:
        slots |= (found := spec.slots(shape))
        if s.rule.matrix:
            written |= find_lively_slots(s, spec, shape)
            continue
        for what in ("step", "observe")[: 1 + spec.observes]:
            program = trace(spec, found, what)
            taken = {n for step in program.steps for n in step.takes}
            read |= {name for name, n in program.inputs.items() if n in taken}
            written |= program.buffers.keys()
    often = f" in {LONG} steps" if s.rule.matrix else ""
    idle = sorted(slots.keys() - read - written)
    expect(not idle, f"nobody reads or writes {', '.join(idle)}{often}")
    zeros = {name for name, slot in slots.items() if not (slot.fill or slot.eye or slot.meaning == KEY)}
    still = sorted(zeros & read - written)
    return expect(not still, f"nobody writes {', '.join(still)}, which stays 0")


def find_lively_slots(s: RuleSubject, spec: Spec, shape: Shape) -> set[str]:
    """Return the slots of a tensor that some steps change, or that change some steps."""
    start, gradients = s.draw_problem((shape,), LONG)

    def walk(other: str = "") -> tuple[Arrays, Arrays]:
        walk = Walk([spec], get_speaker("reference"), start)
        if other:
            walk.records[0].state[other][...] += 1.0
        before = copy.deepcopy(walk.found())
        for g in gradients:
            walk.step(g)
        return before, walk.found()

    first, want = walk()

    def changes(name: str) -> bool:
        before, after = walk(name)
        return not np.array_equal(before[name], after[name]) or not np.array_equal(after["p"], want["p"])

    return {name for name in first if name != "p" and (not np.array_equal(first[name], want[name]) or changes(name))}


# ---- on engines -------------------------------------------------------------------------------------------------------------
@check(  # before an engine uses CUDA, after which nothing can be forked
    "on DTensors of two gloo processes a rule ends where one process does: owners see what the rule reads", "rule",
    hint="a step may depend on p, g, slots, counters, t and hyperparameters alone, and the commit on p, u and numbers",
    cases=lambda s, check: [check] * ("torch" in s.engines), engine="torch",
)  # fmt: skip
def ranks(s: RuleSubject) -> Seen:
    from .ranks import over_ranks

    if s.rule.matrix and commit_has_reduction(s.spec):
        raise Skip("its commit measures p or u, which is refused where matrices are spread over ranks")
    start, gradients = s.draw_problem()
    want, got = over_ranks(s.rule, s.settings, start, gradients)
    worst = max(distance(a, b, p) for a, b, p in zip(got["p"], want["p"], start, strict=True))
    expect(worst <= s.bar, "parameters end elsewhere than in one process", worst)
    bad = [name for name in want if name != "p" and not find_gap(got[name], want[name]) <= 10 * s.bar]
    return expect(not bad, f"{bad and bad[0]} ends elsewhere than in one process", worst)


@check(
    "every engine that is here ends where the reference does", "rule", cases=every_engine,
    hint="the rule is too delicate for float32: subtract near-equal numbers in `scalars`, which is float64",
)  # fmt: skip
def engine(s: RuleSubject, engine: str) -> Seen:
    problem = s.draw_problem()
    return s.judge(s.walk([s.spec], get_speaker(engine), *problem)["p"], [s.spec], *problem)


@check(
    "groups that differ in every number are stepped each by its own", "rule",
    cases=lambda s, check: (check.case(engine, engine) for engine in (*s.engines, "reference")),
    hint="`update` is traced once for all groups: what differs between them must come from `scalars`, or be in `static_key`",
)  # fmt: skip
def groups(s: RuleSubject, engine: str) -> Seen:
    """Groups together beside the reference; there, each beside itself alone."""
    (start, gradients), specs, who = s.draw_problem(), s.make_groups(), get_speaker(engine)
    if engine != "reference":
        return s.judge(s.walk(specs, who, start, gradients, True)["p"], specs, start, gradients, True)
    s.refuse_reductions()
    together = s.walk(specs, who, start, gradients, True)["p"]
    for i in range(len(start)):
        walk = Walk([specs[i % len(specs)]], who, [start[i]], names=[f"tensor {i}"])
        walk.records[0].t = i % 4
        for g in gradients:
            walk.step([g[i]])
        if not np.array_equal(walk.found()["p"][0], together[i], equal_nan=True):
            changed = ", ".join(f"{k}={v!r}" for k, v in specs[i % len(specs)].values().items())
            raise Wrong(f"a tensor of shape {start[i].shape} in a group with {changed} takes another's values")
    return 0.0


@check(
    "a jitted update of optax traces the step count, and every number that is a schedule", "rule", engine="optax",
    hint="t, counters and schedules are traced there, in float32: with the words of rlx_optim.rule, where(t > 3, a, b) for if, "
    "maximum(t, 2) for max, sqrt(t) for math.sqrt; an `update` on matrices computes with E and operators, and chooses by E.cond",
)  # fmt: skip
def jit(s: RuleSubject) -> Seen:
    """Jitted updates of `rlx_optim.optax` beside the reference; the learning rate is a number, then traced."""
    if (why := say_missing("jax", "optax") or (None if "lr" in s.rule.fields else "it has no lr")) is not None:
        raise Skip(f"not asked: {why}")
    spec, found = s.spec, list[Seen]()
    problem = s.draw_problem([shape for shape in SMALL if spec.takes(shape) is None] or s.survey.shapes[:2])
    for scheduled in (False, True)[: 1 + isinstance(spec.values().get("lr"), float)]:
        found.append(s.judge(walk_by_optax(spec, *problem, scheduled), [spec], *problem))
    return found[-1]


# ---- state ------------------------------------------------------------------------------------------------------------------
@check(
    "a counter that never moves is a constant in every checkpoint", "rule", engine="reference",
    hint="`scalars` (or the `update` of a matrix rule) gives its next value: {name: counters[name] + 1}",
)  # fmt: skip
def counters(s: RuleSubject) -> Seen:
    """Whether every counter moves: in some steps, or as `scalars` and `decisions` count many, with some setting."""
    first, trail = s.spec.counters(), s.walk_by_name({}) or {}
    still = {name for name, value in first.items() if all(found == value for found in trail.get(name, ()))}
    changes = ({name: value} for name, field in s.rule.fields.items() for value in s.list_values(name, field))
    for change in itertools.chain([{}], changes):
        if still:
            spec = s.rule(**{**s.settings, **change})
            now = first = spec.counters()
            for t in range(1, COUNTED + 1):
                now = now | {name: value for name, value in spec.numbers(t, now).items() if name in now}
                still -= {name for name, value in now.items() if value != first[name]}
    return expect(not still, f"{', '.join(sorted(still))} never moves")


@check(
    "the same steps must give the same bits", "rule", name="same again", cases=two_engines,
    hint="a step may depend on p, g, slots, counters, t and hyperparameters alone",
)  # fmt: skip
def same_again(s: RuleSubject, who: Any) -> Seen:
    return expect_same(s.walk_plainly(who), s.walk_plainly(who), "the same steps give other numbers the second time")


@check(
    "state that was saved half-way goes on bit for bit", "rule", cases=two_engines,
    hint="state must be in slots or counters: nothing else is saved",
)  # fmt: skip
def resume(s: RuleSubject, who: Any) -> Seen:
    (start, gradients), want = s.draw_problem(), s.walk_plainly(who)
    before = Walk([s.spec], who, start)
    for g in gradients[:2]:
        before.step(g)
    s.walk_plainly(who)  # others step in between
    after = Walk([s.spec], who, before.found()["p"])
    for old, new in zip(before.records, after.records, strict=True):
        new.t, new.counters = old.t, dict(old.counters)
        for name, value in new.state.items():
            value[...] = old.state[name]
    for g in gradients[2:]:
        after.step(g)
    return expect_same(want, after.found(), "state that was saved and restored half-way goes on differently")


# ---- several tensors --------------------------------------------------------------------------------------------------------
@check(
    "which tensor comes first must not matter", "rule", cases=two_engines,
    hint="tensors are stepped in any order: a rule must not remember what came before",
)  # fmt: skip
def order(s: RuleSubject, who: Any) -> Seen:
    s.refuse_reductions()
    start, gradients = s.draw_problem()
    names = [f"tensor {i}" for i in range(len(start))][::-1]
    back = s.walk([s.spec], who, start[::-1], [g[::-1] for g in gradients], names=names)["p"]
    return expect_same({"p": s.walk_plainly(who)["p"]}, {"p": back[::-1]}, "tensors that come in another order end elsewhere")


@check(
    "tensors stepped one by one end where they end together", "rule", name="one by one", cases=two_engines,
    hint="a tensor's step must not depend on which others are stepped with it, unless by an all_… reduction",
)  # fmt: skip
def one_by_one(s: RuleSubject, who: Any) -> Seen:
    s.refuse_reductions()
    (start, gradients), together = s.draw_problem(), s.walk_plainly(who)["p"]
    singly = [s.walk([s.spec], who, [p], [[g[i]] for g in gradients], names=[f"tensor {i}"])["p"][0] for i, p in enumerate(start)]
    what = "tensors stepped one by one end elsewhere"
    if s.rule.matrix:  # products of stacks may be rounded otherwise than those of matrices
        worst = max(distance(a, b, p) for a, b, p in zip(singly, together, start, strict=True))
        return expect(worst <= MATRIX_BAR, what, worst)
    return expect_same({"p": together}, {"p": singly}, what)


@check(
    "a NaN in one gradient must not reach another tensor", "rule", name="NaN", cases=two_engines,
    hint="a NaN must not leave its tensor: only all_… reductions may look at several",
)  # fmt: skip
def nan(s: RuleSubject, who: Any) -> Seen:
    s.refuse_reductions()
    start, gradients = s.draw_problem()
    start, gradients = [*start, start[-1]], [[*g, g[-1]] for g in gradients]
    bad = [[*g[:-1], np.full_like(g[-1], math.nan)] for g in gradients]
    clean, dirty = (s.walk([s.spec], who, start, g)["p"][:-1] for g in (gradients, bad))
    return expect_same({"p": clean}, {"p": dirty}, "a NaN in one tensor's gradient reaches another")


@check(
    "gradients of zero must not make anything NaN", "rule", cases=two_engines,
    hint="keep divisions away from 0 with an eps, or maximum(…)",
)  # fmt: skip
def zero(s: RuleSubject, who: Any) -> Seen:
    start, gradients = s.draw_problem()
    found = s.walk([s.spec], who, start, [[np.zeros_like(x) for x in g] for g in gradients])
    bad = [name for name, arrays in found.items() if not all(np.isfinite(a).all() for a in arrays)]
    return expect(not bad, f"gradients of zero make {', '.join(bad)} NaN or infinite")


# ---- hyperparameters --------------------------------------------------------------------------------------------------------
@check(
    "a hyperparameter that does nothing is a bug that no loss curve shows", "rule", cases=every_field,
    hint="does `scalars` give it, does the rule read it, is it in `static_key`?",
)  # fmt: skip
def hyperparameter(s: RuleSubject, name: str) -> Seen:
    """Whether it does something to p or to the state: by itself, or beside another that is changed too, or a learning rate that
    falls."""
    fields = s.rule.fields
    if fields[name].annotation.startswith("Callable"):
        raise Skip("a function: not tried")
    if name in (untried := {"state_dtype": "too small to be coded", "rounding": "of float32"}):
        raise Skip(f"not tried: tensors here are {untried[name]}")
    others: list[dict[str, Any]] = [{}]
    others += [{k: value} for k, each in fields.items() if k != name for value in s.list_values(k, each)]
    if name == "lr":  # of every rule, by itself; what decay alone reads is no rate
        others = [{"weight_decay": 0.0} if s.spec.values().get("weight_decay") else {}]
    tried = False
    falling = itertools.product((False, True)[: 1 + (name != "lr")], others)
    for falls, context in sorted(falling, key=lambda each: len(each[1])):  # what is alone comes first
        want = s.walk_by_name(context, falls=falls)
        for value in s.list_values(name, fields[name], context):
            tried = True
            if (moved := s.measure_change(s.walk_by_name(context | {name: value}, falls=falls), want)) > LEAST:
                beside = [f"{k}={v!r}" for k, v in context.items()] + ["an lr that falls"] * falls
                return moved, f"beside {', '.join(beside)}" if beside else ""
    if not tried and name in MODIFIERS:
        raise Skip("every other value is refused")
    if name == "cautious" and s.rule.caution is not None:
        return 0.0, "it changes nothing: the direction has the gradient's signs"
    raise Wrong(f"{name} was changed, alone and beside others, and nothing moved", 0.0)


@check(
    "a constant schedule means its number, and a schedule that moves compiles nothing", "rule", cases=every_number,
    hint="a number of `scalars` must do: what picks code or slots is structural (flag, integer, choice)",
)  # fmt: skip
def schedule(s: RuleSubject, name: str) -> Seen:
    from ..engines.cpu.kernels import compile_kernel

    value = next(iter(s.list_values(name, s.rule.fields[name])), None)
    if not isinstance(value, float):
        raise Skip("no other value was in range")
    if not s.measure_change(s.walk_by_name({name: value}, s.best), s.walk_by_name({name: lambda i: value}, s.best)) <= 0:
        raise Wrong(f"{name} as a schedule that is always {value} does other than {name}={value}")
    s.walk_by_name({name: lambda i: value * (1 - 1e-3 * i)}, s.best)
    before = compile_kernel.cache_info().currsize
    s.walk_by_name({name: lambda i: value * (1 - 2e-3 * i)}, s.best)
    made = compile_kernel.cache_info().currsize - before
    return expect(not made, f"{made} kernels were compiled while {name} moved")
