"""The language of rules: every construct on every engine, what is outside refused with its place, and `check_rule`."""

import ast
import functools
import inspect
import json
import math
import re
import time
from typing import ClassVar

import numpy as np
import pytest
from interpreter import in_the_interpreter

import rlx_optim
from lab.constructs import BROKE, CONSTRUCTS, Small
from lab.language import check_construct, check_language
from rlx_optim import language, ops
from rlx_optim.check.engines import get_speaker, list_present
from rlx_optim.check.rule_subject import RuleSubject
from rlx_optim.check.table import Wrong
from rlx_optim.language import HINTS, REDUCTIONS, LanguageError, checked
from rlx_optim.numpy.optimizer import NamedOptimizer
from rlx_optim.ops import abs, clamp, exp, log, maximum, minimum, one_minus_power, rsqrt, sign, sqrt, where
from rlx_optim.program import trace
from rlx_optim.spec import Slot, Spec, flag, like, real

HERE = [engine for engine in ("cpu", "cpu-float64", "torch", "jax") if engine in list_present()]
BY_NAME = {each.name: each for each in CONSTRUCTS}


def wrong(rows):
    return {(row.construct, row.engine): (row.seen, row.note) for row in rows if not row.ok}


# ---- every construct on every engine ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", HERE)
def test_every_construct(engine):
    rows = check_language([engine])
    assert len(rows) == len(CONSTRUCTS) > 50
    assert wrong(rows) == {}


@pytest.mark.slow  # a minute and a half; on a GPU it is test_every_construct_on_cuda
@pytest.mark.timeout(600)
def test_every_construct_in_the_interpreter():
    assert in_the_interpreter("interpreted", "test_language") == []


def interpreted():
    return [f"{row.construct}: {row.note}" for row in check_language(["triton"]) if not row.ok]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["triton", "torch-cuda"])
def test_every_construct_on_cuda(engine):
    rows = check_language([engine])
    assert len(rows) == len(CONSTRUCTS)
    assert wrong(rows) == {}


def test_the_table_has_the_whole_language():
    """Every operator, comparison, word and reduction is in a construct."""
    texts = [ast.parse(inspect.getsource(inspect.getmodule(Small)))]
    nodes = [node for text in texts for node in ast.walk(text)]
    kinds = {type(node) for node in nodes}
    assert set(language.OPERATORS + language.COMPARISONS) | {ast.USub, ast.BitAnd, ast.BitOr} <= kinds
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert set(ops.RULE) <= called
    used = set()
    for each in CONSTRUCTS:
        if not each.refused and not each.spec.matrix:
            program = trace(each.spec(), each.spec().slots((4, 3)))
            used |= {how.name for step in program.passes for _, _, how in step.reduces}
    assert used == set(REDUCTIONS)
    assert len(BROKE) == 10


# ---- a mutation of an engine is noticed --------------------------------------------------------------------------------------
def broken(engine, name):
    get_speaker.cache_clear()
    row = check_construct(BY_NAME[name], engine)
    get_speaker.cache_clear()
    return not row.ok


WORDS = "minimum maximum clamp of NaN and ±inf"


@pytest.mark.parametrize("word", sorted(ops.RULE))
def test_a_wrong_word_is_noticed_torch(word, monkeypatch):
    torch_ = pytest.importorskip("rlx_optim.engines.torch_")
    right = torch_.LISTS[word]
    where_ = word == "where"
    monkeypatch.setitem(torch_.LISTS, word, (lambda c, y, n: right(c, n, y)) if where_ else lambda *a: -right(*a))
    assert any(broken("torch", each.name) for each in CONSTRUCTS if not each.refused)


@pytest.mark.parametrize("word", sorted(ops.RULE))
def test_a_wrong_word_is_noticed_jax(word, monkeypatch):
    if "jax" not in HERE:
        pytest.skip("jax is not installed")
    from rlx_optim.engines import jax_

    right = jax_.WORDS[word]
    where_ = word == "where"
    monkeypatch.setitem(jax_.WORDS, word, (lambda c, y, n: right(c, n, y)) if where_ else lambda *a: -right(*a))
    chosen = {"where": "where(g*m > 0, g, m)", "minimum": WORDS, "maximum": WORDS, "clamp": WORDS}
    assert broken("jax", chosen.get(word, "sqrt rsqrt abs sign exp log"))


@pytest.mark.parametrize("how", ["largest", "squared", "mean", "root"])
@pytest.mark.parametrize("engine", [engine for engine in HERE if engine != "jax"])
def test_a_wrong_reduction_is_noticed(engine, how, monkeypatch):
    """An engine that overlooks one property of reductions."""
    import dataclasses

    who = type(get_speaker(engine).engine)
    if engine == "torch":
        if how in ("largest", "squared"):
            right = who.reduce_array
            monkeypatch.setattr(who, "reduce_array", lambda self, a, r: right(self, a, dataclasses.replace(r, **{how: False})))
        else:
            right = who.finish_reduction
            monkeypatch.setattr(
                who, "finish_reduction", lambda self, v, r, n: right(self, v, dataclasses.replace(r, **{how: False}), n)
            )
    else:
        from rlx_optim.engines.cpu import engine as cpu
        from rlx_optim.engines.cpu import kernels

        if how in ("mean", "root"):
            right = who.finish_reduction
            monkeypatch.setattr(
                who, "finish_reduction", lambda self, v, r, n: right(self, v, dataclasses.replace(r, **{how: False}), n)
            )
        else:
            right = kernels.Builder.accumulate
            monkeypatch.setattr(
                kernels.Builder,
                "accumulate",
                lambda self, k, r, i, v: right(self, k, dataclasses.replace(r, **{how: False}), i, v),
            )
            monkeypatch.setattr(cpu, "compile_kernel", functools.cache(kernels.compile_kernel.__wrapped__))
    assert broken(engine, "sum mean norm rms max of a tensor")


def test_a_wrong_operator_is_noticed(monkeypatch):
    torch_ = pytest.importorskip("rlx_optim.engines.torch_")
    for name, construct in {
        "__rsub__": "+ - * / of arrays, numbers and literals",
        "__neg__": "unary minus",
        "__lt__": "comparisons < > <= >= == !=",
        "__or__": "& and | inside where",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(torch_.ForeachTensor, name, lambda self, *other: self)
            assert broken("torch", construct), name


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """A wrong word, a gradient that is not scaled, a row that reads another's number."""
    from rlx_optim.engines.cpu import engine as cpu
    from rlx_optim.engines.cpu import kernels

    class Unscaled(kernels.Builder):
        def bind_operands(self, tensor):
            super().bind_operands(tensor)
            self.scale = self.code.constant(self.arithmetic, 1)

    class First(kernels.Line):
        def fetch(self, start, n):
            super().fetch(0 * start, n)

    for owner, name, other, construct in (
        (kernels.WORDS, "maximum", kernels.WORDS["minimum"], WORDS),
        (kernels, "Builder", Unscaled, "+ - * / of arrays, numbers and literals"),
        (kernels, "Line", First, "rows and columns: slots, and reductions of rows"),
    ):
        with monkeypatch.context() as patch:
            (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, other)
            patch.setattr(cpu, "compile_kernel", functools.cache(kernels.compile_kernel.__wrapped__))
            assert broken("cpu", construct), name


# ---- what is outside is refused, with its place and the way to say it --------------------------------------------------------
def power(g):
    u = g**2
    return u


def conditional(g):
    u = g if g > 0 else -g
    return u


def branch(g):
    if g > 0:
        u = g
    return u


def loop(g):
    for k in (1, 2):
        u = g * k
    return u


def forever(g):
    while g > 0:
        u = g
    return u


def both(g, p):
    u = where(g > 0 and p > 0, g, p)
    return u


def element(g):
    u = g[0]
    return u


def attribute(g):
    u = np.sqrt(g)
    return u


def member(g):
    u = g.real
    return u


def augmented(g):
    g += 1
    u = g
    return u


def compared(g):
    u = g > 0
    return u


def unknown_name(g):
    u = g * scale_of_another_file  # noqa: F821
    return u


def unknown_word(g):
    u = max(g, 0.0)
    return u


def too_many(g):
    u = sqrt(g, g)
    return u


def defaults(g, a=1.0):
    u = a * g
    return u


def returns_g(g):
    g = -g
    return g


def no_value(g):
    return u  # noqa: F821


def expression_returned(g):
    return g * 2


def text(g):
    u = "g"
    return u


def two_names(g):
    u, v = g, g
    return u, v


def reserved(g, sqrt):
    u = g * sqrt
    return u


def underscored(g, _a):
    u = g * _a
    return u


def same_twice(g):
    u = g
    return u, u


def chained_comparison(g, p):
    u = where(0 < g < p, g, p)
    return u


def number_condition(g, p):
    u = where(g, g, p)
    return u


OUTSIDE = {
    power: (1, HINTS[ast.Pow]),
    conditional: (1, HINTS[ast.IfExp]),
    branch: (1, HINTS[ast.If]),
    loop: (1, HINTS[ast.For]),
    forever: (1, HINTS[ast.While]),
    both: (1, HINTS[ast.BoolOp]),
    element: (1, HINTS[ast.Subscript]),
    attribute: (1, "the vocabulary is"),
    member: (1, HINTS[ast.Attribute]),
    augmented: (1, HINTS[ast.AugAssign]),
    compared: (1, HINTS[ast.Compare]),
    unknown_name: (1, "neither an argument nor a name"),
    unknown_word: (1, "the vocabulary is"),
    too_many: (1, "sqrt takes 1 arguments"),
    defaults: (0, "without defaults"),
    returns_g: (2, "gradients are never written"),
    no_value: (1, "'u' has no value"),
    expression_returned: (1, "`return` and the names of its results"),
    text: (1, "the only literals are numbers"),
    two_names: (1, "one name each"),
    reserved: (0, "cannot be the name of a value"),
    underscored: (0, "cannot be the name of a value"),
    same_twice: (2, "each result is returned once"),
    chained_comparison: (1, "compares two values"),
    number_condition: (1, "compares two values"),
}


@pytest.mark.parametrize("rule", OUTSIDE, ids=lambda rule: rule.__name__)
def test_outside_is_refused(rule):
    line, hint = OUTSIDE[rule]
    with pytest.raises(LanguageError) as caught:
        checked(rule)
    assert hint in str(caught.value)
    assert str(caught.value).startswith(f"{__file__}:{rule.__code__.co_firstlineno + line}: {rule.__name__}: ")


def test_every_hint_is_given():
    said = [hint for _, hint in OUTSIDE.values()]
    assert [kind.__name__ for kind, hint in HINTS.items() if hint not in said] == []


def test_functions_that_are_no_rules():
    def inside(g):
        u = g * line
        return u

    line = 2.0
    with pytest.raises(LanguageError, match=f"{re.escape(__file__)}:.*'line' from around it; give it as an argument"):
        checked(inside)
    with pytest.raises(LanguageError, match="a function with a name"):
        checked(lambda g: g)
    with pytest.raises(LanguageError, match="without decorators"):
        checked(decorated)
    with pytest.raises(LanguageError, match="a function with a name"):
        checked(np.sqrt)
    scope = {}
    exec("def nowhere(g):\n    u = g\n    return u\n", scope)
    with pytest.raises(LanguageError, match="must be in a file"):
        checked(scope["nowhere"])


@functools.wraps(power)
def decorated(g):
    return g


def plain(g):
    u = g
    return u


def averages(g, m, a):
    m = a * m + g
    return m


def of_m(m):
    u = m
    return u


def sizes(p, g):
    size = p
    u = g
    return size, u


def into_m(g):
    m = g
    return m


def doubled(a):
    a = 2 * a
    return a


def of_array(g):
    u = g
    return u


def moves(p, g):
    p = p - g
    u = g
    return p, u


def no_array(a, b):
    u = a * b
    return u


def of_missing(g, momentum):
    u = g * momentum
    return u


def of_none(g, late):
    u = g * late
    return u


def a_row(row, g):
    row = g
    u = g
    return row, u


UPDATES = {
    "unknown reduction": (lambda s, E, x: E.map(sizes, x, size="median"), "unknown reduction size='median'; known are sum, mean"),
    "stale read": (lambda s, E, x: (E.map(averages, x), E.map(of_m, x))[1], "reads 'm' as it was before a map wrote it; use"),
    "lost update": (lambda s, E, x: (E.map(averages, x), E.map(plain, x))[1], "loses what a map gave for 'm'; return the values"),
    "reduction onto a slot": (lambda s, E, x: E.map(into_m, x, m="norm"), "'m' is a buffer; give what is reduced another name"),
    "not returned": (lambda s, E, x: E.map(plain, x, size="norm"), "does not return 'size', which is to be reduced"),
    "array in E.each": (lambda s, E, x: E.each(of_array, x), "takes 'g', which is an array; a function of coordinates is run by"),
    "no array": (lambda s, E, x: E.map(no_array, x), "takes no array; a function of numbers is run by E.each"),
    "arithmetic": (lambda s, E, x: E.map(plain, x.set(a=x.a * 2)), "computes with 'a' itself; computing belongs into a rule"),
    "a choice": (lambda s, E, x: E.map(plain, x) if x.a > 0 else x, "computes with 'a' itself"),
    "a number of its own": (lambda s, E, x: E.map(averages, x.set(a=0.5)), "which is 0.5; numbers come from `scalars`"),
    "None": (lambda s, E, x: E.map(of_none, x), "takes 'late', which Wrong.scalars gives as None with these settings"),
    "missing": (lambda s, E, x: E.map(of_missing, x), "takes 'momentum', which Wrong does not have; it has a, "),
    "returns p": (lambda s, E, x: E.map(moves, x), "returns p, which the commit alone moves; return the direction u"),
    "a hyperparameter": (
        lambda s, E, x: E.map(plain, x) if s.a > 0 else x,
        "Wrong.update reads 'a', in which the tensors of one",
    ),
    "not values": (lambda s, E, x: 3, "must return the values that its last E.map"),
    "no such axis": (lambda s, E, x: E.map(of_m, E.map(into_row, x), u="column_sum"), "lacks that axis already"),
}


def into_row(row):
    m = row
    return m


@pytest.mark.parametrize("case", UPDATES)
def test_updates_that_are_refused(case):
    update, message = UPDATES[case]

    class Wrong(Small):
        def slots(self, shape):
            from rlx_optim.spec import Slot

            return {**({} if case == "no such axis" else like(shape, "m")), "row": Slot(shape[:-1], drop=(-1,))}

        def scalars(self, t, counters):
            return {"step": self.lr, "a": self.a, "b": self.b, "late": None}

    Wrong.update = update
    with pytest.raises(LanguageError) as caught:
        trace(Wrong(), Wrong().slots((4, 3)))
    assert message in str(caught.value)


def test_a_buffer_of_another_shape():
    class Wrong(Small):
        def slots(self, shape):
            from rlx_optim.spec import Slot

            return {"row": Slot(shape[:-1], drop=(-1,))}

        def update(self, E, x):
            return E.map(a_row, x)

    with pytest.raises(LanguageError, match="'row' is a buffer of another shape"):
        trace(Wrong(), Wrong().slots((4, 3)))


# ---- what a program cannot be run on --------------------------------------------------------------------------------------------
class ByColumn(Small):
    def update(self, E, x):
        return E.map(plain, E.map(sizes, x, size="column_max"))


class Gathering(Small):
    """The step shrinks with the norm of all gradients."""

    kept = rlx_optim.spec.flag(False)

    def slots(self, shape):
        return like(shape, "m") if self.kept else {}

    def update(self, E, x):
        return E.map(over_all, E.map(sizes_of_g, x, size="all_norm"))


def sizes_of_g(g):
    size = g
    return size


def over_all(g, size):
    u = g / size
    return u


def named(spec, **settings):
    return type(spec.__name__, (NamedOptimizer,), {"spec": spec})(**settings)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return {f"w{i}": np.asarray(rng.standard_normal(shape), np.float32) for i, shape in enumerate(shapes)}


def test_tensors_without_the_axes():
    opt = named(ByColumn, engine="reference")
    with pytest.raises(LanguageError, match=r"ByColumn: 'w0' has shape \(3,\) and no columns"):
        opt.step_all(arrays((3,)), arrays((3,)))


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_all_tensors_are_those_of_the_call(engine):
    opt, params, grads = named(Gathering, engine=engine, lr=1.0), arrays((3, 2), (5,)), arrays((3, 2), (5,))
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    want = {k: p - grads[k] / norm for k, p in params.items()}
    opt.step_all(params, grads)
    for k in params:
        np.testing.assert_allclose(params[k], want[k], rtol=1e-5, atol=1e-6)


def test_all_tensors_of_two_bundles_are_refused():
    grads = arrays((3,), (3,))
    opt = named(Gathering, engine="reference", groups=[{"match": "w1", "kept": True}])
    with pytest.raises(ValueError, match=r"Gathering: size=\"all_norm\" is over all tensors, but 'w0' and 'w1' are not stepped"):
        opt.step_all(arrays((3,), (3,)), grads)


def test_all_tensors_one_by_one_are_stepped_when_the_iteration_ends():
    one, every = (named(Gathering, engine="reference") for _ in range(2))
    mine, theirs, grads = arrays((3,), (4,)), arrays((3,), (4,)), arrays((3,), (4,))
    every.step_all(theirs, grads)
    for name, p in mine.items():
        one.step(name, p, grads[name])
    assert not any((mine[k] == theirs[k]).all() for k in mine)
    one.end_iteration()
    assert all((mine[k] == theirs[k]).all() for k in mine)


def test_all_tensors_in_optax():
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    from rlx_optim.optax.leaves import ScheduledRule
    from rlx_optim.optax.transform import Transform, transformation

    tx = transformation(Transform(ScheduledRule(Gathering, Gathering(lr=1.0).values()), None))
    params, grads = arrays((3, 2), (5,)), arrays((3, 2), (5,))
    params = {k: jax.numpy.asarray(p) for k, p in params.items()}
    updates, _ = tx.update(grads, tx.init(params), params)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    for k, g in grads.items():
        np.testing.assert_allclose(updates[k], -g / norm, rtol=1e-5)
    mixed = {"a": jax.numpy.ones(3), "b": jax.numpy.ones(3, "float16")}
    assert tx.update(mixed, tx.init(mixed), mixed)  # one arithmetic
    del optax


# ---- check_rule ------------------------------------------------------------------------------------------------------------------
def simple(g, m, beta):
    m = beta * m + g
    u = m
    return u, m


class Momentum(Spec):
    lr = real(0.1)
    beta = real(0.9, high=1.0)

    def slots(self, shape):
        return like(shape, "m")

    def scalars(self, t, counters):
        return {"step": self.lr, "beta": self.beta}

    def update(self, E, x):
        return E.map(simple, x)


class Idle(Momentum):
    nothing = real(1.0)


class OnTheClass(Momentum):
    seen = 0

    def scalars(self, t, counters):
        type(self).seen += 1
        return {"step": self.lr / type(self).seen, "beta": self.beta}


class Clock(Momentum):
    def scalars(self, t, counters):
        return {"step": self.lr * (1 + time.perf_counter() % 1), "beta": self.beta}


class ReadsItself(Momentum):
    """Its update, traced once, bakes in a number of one group."""

    def update(self, E, x):
        return E.map(simple if self.beta > 0.6 else plainly, x)


def plainly(g, m):
    m = m + g
    u = g
    return u, m


def dividing(g, m):
    m = m + g * g
    u = g / sqrt(m)
    return u, m


class Divides(Momentum):
    def update(self, E, x):
        return E.map(dividing, x)


class Outside(Momentum):
    def update(self, E, x):
        return E.map(power, x)


class Undeclared(Momentum):
    """The same rate for everybody, whatever they ask for."""

    lr = 0.1
    ratio: float = 0.5
    shown: ClassVar[float] = 0.5


def straight(g):
    u = g
    return u


class Bare(Spec):
    lr = 0.1

    def slots(self, shape):
        return {}

    def scalars(self, t, counters):
        return {"step": self.lr}

    def update(self, E, x):
        return E.map(straight, x)


class Hoards(Momentum):
    def slots(self, shape):
        return like(shape, "m", "spare")


def forgotten(g, m, beta):
    m = beta * m + g
    u = m
    return u


class Forgetful(Momentum):
    """Its average is computed and not kept."""

    def update(self, E, x):
        return E.map(forgotten, x)


class DecayAlone(Momentum):
    """The rate is forgotten where it matters."""

    weight_decay = real(0.0)

    def scalars(self, t, counters):
        return {"step": 0.1, "shrink": self.lr * self.weight_decay, "beta": self.beta}


class HoardsMatrices(Hoards):
    matrix, step_dependent = True, True

    def decisions(self, t, counters):
        return {"third": t % 3 == 0}

    def slots(self, shape):
        return like(shape, "m", "read", "rare", "spare")

    def update(self, E, x):
        m = E.cond(x.third, lambda: x.m + x.rare, lambda: x.m)
        return E.map(simple, x.set(m=m, g=x.g + x.read))


@pytest.mark.parametrize(
    ("rule", "check", "words"),
    [
        (Undeclared, "declared", "lr is 0.1, ratio is 0.5, and not a hyperparameter; declare it: lr: float = real(1e-3)"),
        (Bare, "declared", "lr is 0.1, and not a hyperparameter"),
        (Hoards, "slots", "nobody reads or writes spare; take it out of `slots`"),
        (Forgetful, "slots", "nobody writes m, which stays 0; take it out of `slots`, or let `update`"),
        (DecayAlone, "hyperparameter lr", "lr was changed, alone and beside others, and nothing moved"),
        (HoardsMatrices, "slots", "nobody reads or writes spare in 12 steps; take it out of `slots`"),
        (Idle, "hyperparameter nothing", "does `scalars` give it"),
        (OnTheClass, "resume", "state must be in slots or counters"),
        (OnTheClass, "same again", "a step may depend on"),
        (Clock, "same again", "a step may depend on"),
        (ReadsItself, "language", "ReadsItself.update reads 'beta', in which the tensors of one pass may differ"),
        (Divides, "zero", "keep divisions away from 0"),
        (Divides, "hyperparameter beta", "does `scalars` give it"),
        (Outside, "language", "write x * x"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_rules_that_are_not_fit(rule, check, words):
    report = rlx_optim.check_rule(rule, engines=["reference"])
    bad = {row.check: row.note for row in report.rows if not row.ok}
    assert not report.ok
    assert words in bad[check]
    assert "WRONG" in str(report)


class Misfit(Momentum):
    def slots(self, shape):
        return {"m": Slot((3, 5))}


class Picky(Momentum):
    def takes(self, shape):
        return "it is not to its taste"


class Misspelt(Momentum):
    def update(self, E, x):
        return E.map(simple, x.set(m=x.n))


class Directionless(Momentum):
    def update(self, E, x):
        return x


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Misfit, r"ValueError: Misfit: slots\(\(\)\): 'm' has shape \(3, 5\), .* factor=True of what does not"),
        (Picky, "it takes none of these shapes: .*: it is not to its taste"),
        (Misspelt, r"AttributeError: n; raised at .*test_language.py:\d+"),
        (Directionless, "LanguageError: Directionless.update gives no u; the commit takes shrink·p [+] step·u from p"),
        (Outside, r"LanguageError: .*test_language.py:\d+: power: `g \*\* 2` is outside the language .*; see docs/language.md"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.__name__,
)
def test_what_is_wrong_beside_the_language_has_no_hint_about_it(rule, words):
    report = rlx_optim.check_rule(rule, engines=["reference"])
    assert [row.check for row in report.rows] == ["language"]
    assert re.fullmatch(words, report.rows[0].note)


class InTurn(Momentum):
    """A tensor's step depends on how many came before."""

    count: ClassVar[list[int]] = [0]

    def counters(self):
        InTurn.count[0] += 1
        return {"place": float(InTurn.count[0] % 5)}

    def scalars(self, t, counters):
        return {"step": self.lr * (1 + counters["place"]), "beta": self.beta, **counters}


def test_a_rule_that_depends_on_order():
    bad = {row.check for row in rlx_optim.check_rule(InTurn, engines=["reference"]).rows if not row.ok}
    assert {"groups", "same again", "resume", "order", "one by one", "NaN", "schedule of lr"} <= bad


class LooksAcross(Momentum):
    """The last of equal tensors has nothing to say to the first but a NaN."""

    matrix = True

    def update(self, E, x):
        x = E.map(simple, x)
        return x.set(u=x.u + 0.0 * x.u.sum(0)[None])


def test_a_rule_that_looks_across_tensors():
    report = rlx_optim.check_rule(LooksAcross, engines=["cpu"])  # which steps tensors of one shape together
    assert [(row.check, row.engine) for row in report.rows if not row.ok] == [("NaN", "cpu")]
    assert str(report).count("a NaN in one tensor's gradient reaches another") == 1


def signed(g, m, beta):
    m = beta * m + g
    u = sign(m)
    return u, m


class Signed(Momentum):
    """Steps of one size, after which a scalar may be where it began."""

    def update(self, E, x):
        return E.map(signed, x)


def test_a_rule_whose_scalars_come_back_is_right():
    report = rlx_optim.check_rule(Signed, engines=["cpu"], only=["engine", "groups"])
    assert report.ok, str(report)


def test_check_rule_takes_specs():
    with pytest.raises(TypeError, match="takes a Spec class, got 'adamw'"):
        rlx_optim.check_rule("adamw")


# ---- natural mistakes, and right forms that look like them --------------------------------------------------------------------
class IfOfStep(Momentum):
    def scalars(self, t, counters):
        return {"step": self.lr if t > 3 else 0.5 * self.lr, "beta": self.beta}


class MathOfStep(Momentum):
    def scalars(self, t, counters):
        return {"step": self.lr / math.sqrt(t), "beta": self.beta}


class MaxOfStep(Momentum):
    def scalars(self, t, counters):
        return {"step": self.lr / max(t, 2), "beta": self.beta}


class NumPyOfStep(Momentum):
    def scalars(self, t, counters):
        return {"step": self.lr / np.sqrt(t), "beta": self.beta}


class MathOfRate(Momentum):
    """Fails where the rate is a schedule."""

    def scalars(self, t, counters):
        return {"step": math.sqrt(self.lr), "beta": self.beta}


class IfOfCounter(Momentum):
    def counters(self):
        return {"seen": 0}

    def scalars(self, t, counters):
        return {"step": self.lr, "beta": self.beta if counters["seen"] else 0.0, "seen": 1}


class TextOfStep(Momentum):
    """Traced once, it has the same number for ever."""

    def scalars(self, t, counters):
        return {"step": self.lr * (1 + len(str(t)) % 3), "beta": self.beta}


class IfOfValues(Momentum):
    matrix = True

    def update(self, E, x):
        x = E.map(simple, x)
        return x.set(u=0.5 * x.u) if E.norm(x.m).sum() > 1 else x


class NumPyOfValues(Momentum):
    matrix = True

    def update(self, E, x):
        return E.map(simple, x.set(g=np.sign(x.g)))


class StillCounter(Momentum):
    def counters(self):
        return {"seen": 0.0}

    def scalars(self, t, counters):
        return {"step": self.lr, "beta": self.beta, "seen": counters["seen"]}


class StillCounterOfMatrices(Momentum):
    matrix = True

    def counters(self):
        return {"seen": 0.0}


@pytest.mark.parametrize(
    ("rule", "check", "words"),
    [
        *(
            (rule, "jit", r"raised at .*test_language.py:\d+; .* where\(t > 3, a, b\) for if, maximum\(t, 2\) for max")
            for rule in (IfOfStep, MathOfStep, MaxOfStep, NumPyOfStep, MathOfRate, IfOfCounter, IfOfValues, NumPyOfValues)
        ),
        (TextOfStep, "jit", r"a tensor of shape \(5, 4\) ends elsewhere; t, counters and schedules are traced there"),
        (StillCounter, "counters", "seen never moves; `scalars` .* gives its next value"),
        (StillCounterOfMatrices, "counters", "seen never moves; `scalars` .* gives its next value"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.__name__,
)
def test_natural_mistakes_are_not_fit(rule, check, words):
    """Each is the only finding: all else about such a rule is right."""
    if check == "jit":
        pytest.importorskip("optax")
    wrong = {row.check: row.note for row in rlx_optim.check_rule(rule, engines=["reference"]).rows if not row.ok}
    assert list(wrong) == [check]
    assert re.search(words, wrong[check])


def further(seen):
    seen = seen + 1
    return seen


def measured(g, m, beta):
    m = beta * m + g
    u = m
    seen = m
    return u, m, seen


class CounterByEach(StillCounter):
    def update(self, E, x):
        return E.map(simple, E.each(further, x))


class CounterByMap(StillCounter):
    def update(self, E, x):
        return E.map(measured, x, seen="norm")


class CounterForgotten(StillCounter):
    def scalars(self, t, counters):
        return {"step": self.lr, "beta": self.beta}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (CounterByEach, "further gives 'seen', which is a counter: `scalars` gives its next value"),
        (CounterByMap, "measured gives 'seen', which is a counter: `scalars` gives its next value"),
        (CounterForgotten, "CounterForgotten.scalars does not give the counter 'seen', which so never moves"),
    ],
)
def test_counters_that_nobody_moves_are_refused(rule, words):
    with pytest.raises(LanguageError, match=words):
        trace(rule(), rule().slots((4, 3)))
    (row,) = rlx_optim.check_rule(rule, engines=["reference"]).rows
    assert words in row.note


def test_a_modifier_that_is_none_cannot_be_unfit():
    with pytest.raises(
        TypeError, match="Mine: incompatible has 'cautious', which is no modifier; known are cautious=True, decay='cau"
    ):
        type("Mine", (Momentum,), {"incompatible": {"cautious": "it is not"}})


class Flat(Momentum):
    def takes(self, shape):
        return None if len(shape) < 5 else f"{len(shape)} dimensions; Flat takes 4 at most"


class FlatButEverywhere(Flat):
    accepts_any_shape = True

    def takes(self, shape):
        return super().takes(shape)


def test_what_a_rule_does_not_take_is_refused_unless_it_says_everywhere():
    big = {"w": np.ones((2, 1, 1, 1, 2), np.float32)}
    opt = type("FlatOptimizer", (rlx_optim.numpy.optimizer.NamedOptimizer,), {"spec": Flat})(engine="reference")
    with pytest.raises(ValueError, match="5 dimensions; Flat takes 4 at most"):
        opt.step_all(big, {"w": np.ones_like(big["w"])})
    assert rlx_optim.check_rule(Flat, engines=["reference"], only=["jit", "hyperparameter lr"]).ok
    opt = type("FlatOptimizer", (rlx_optim.numpy.optimizer.NamedOptimizer,), {"spec": FlatButEverywhere})(engine="reference")
    opt.step_all(big, {"w": np.ones_like(big["w"])})
    assert (big["w"] < 1).all()


class Inherits(Momentum):
    share = real(0.5)

    def scalars(self, t, counters):
        return {**super().scalars(t, counters), "step": self.lr * self.share * sqrt(one_minus_power(self.beta, t))}


class InheritsTwice(Inherits):
    def scalars(self, t, counters):
        return super().scalars(t, counters)


class Methods(Momentum):
    def warm(self, t):
        return minimum(1.0, t / 5)

    def pace(self, t):
        return self.lr * self.warm(t)

    def scalars(self, t, counters):
        return {"step": self.pace(t), "beta": self.beta}


def outer(t, beta):
    return inner(t, beta) * maximum(t, 2)


def inner(t, beta):
    return sqrt(one_minus_power(beta, t)) + where(t > 3, 1.0, 0.5)


class Helpers(Momentum):
    def scalars(self, t, counters):
        return {"step": self.lr / outer(t, self.beta), "beta": self.beta}


class EveryWord(Momentum):
    def scalars(self, t, counters):
        found = exp(-t / 10.0) + rsqrt(t) + clamp(t, 2, 5) + log(t) + abs(t) + sign(t - 2) + minimum(t, 3)
        return {"step": self.lr * found, "beta": self.beta}


class WordsOfMatrices(Momentum):
    matrix = True

    def update(self, E, x):
        x = E.map(simple, x)
        return x.set(u=sign(x.u) * sqrt(abs(x.u)))


class CountedByMatrices(StillCounterOfMatrices):
    def update(self, E, x):
        return E.map(simple, x).set(seen=x.seen + 1)


class Late(Momentum):
    """Its counter moves after fifty steps."""

    def counters(self):
        return {"late": 0.0}

    def scalars(self, t, counters):
        late = where(t > 50, 1.0, counters["late"])
        return {"step": self.lr / (1 + late), "beta": self.beta, "late": late}


class LargestRate(Momentum):
    """AdamC's decay, which is another only where the rate falls."""

    weight_decay = real(0.1)
    corrected = flag(False)

    def counters(self):
        return {"largest": 0.0}

    def scalars(self, t, counters):
        largest = maximum(counters["largest"], self.lr)
        share = self.lr / largest if self.corrected else 1.0
        return {"step": self.lr, "beta": self.beta, "largest": largest, "shrink": self.lr * self.weight_decay * share}


def averaging(p, g, m, a, beta, share):
    m = beta * m + g
    u = m
    a = a + share * (p - a)
    return u, m, a


class Averages(Momentum):
    """ASGD's t0, which acts on the average alone."""

    t0 = real(3.0)

    def slots(self, shape):
        return like(shape, "m", "a")

    def scalars(self, t, counters):
        return {"step": self.lr, "beta": self.beta, "share": 1 / maximum(1.0, t - self.t0)}

    def update(self, E, x):
        return E.map(averaging, x)


def by_turns(g, e, up, down):
    u = down * (g + e) - up * g
    e = up * g / (up + 1e-30)
    return u, e


class Sharpness(Spec):
    """SAM's rho, which acts through the gradients where p is then."""

    lr = real(0.1)
    rho = real(0.05)

    def slots(self, shape):
        return like(shape, "e")

    def scalars(self, t, counters):
        return {"step": 1.0, "up": t % 2 * self.rho, "down": (1 - t % 2) * self.lr}

    def update(self, E, x):
        return E.map(by_turns, x)


class Straight(Spec):
    """Its direction has the gradient's signs, so that cautious leaves it as it is."""

    lr = real(0.1)
    slots, scalars, update = Bare.slots, Bare.scalars, Bare.update


@pytest.mark.parametrize(
    ("rule", "notes"),
    [
        *(
            (rule, {})
            for rule in (Inherits, InheritsTwice, Methods, Helpers, EveryWord, WordsOfMatrices, CountedByMatrices, Late, Averages)
        ),
        (Sharpness, {}),
        (LargestRate, {"hyperparameter corrected": "beside an lr that falls"}),
        (Straight, {"hyperparameter cautious": "it changes nothing: the direction has the gradient's signs"}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.__name__,
)
def test_right_forms_are_fit(rule, notes):
    pytest.importorskip("optax")
    report = rlx_optim.check_rule(rule, engines=["reference"])
    assert report.ok, str(report)
    found = {row.check: row for row in report.rows}
    assert found["jit"].seen is not None
    assert {check: found[check].note for check in notes} == notes


def followed(p, g, z, n, alpha, l1, l2):
    new = n + g * g
    z = z + g - (sqrt(new) - sqrt(n)) / alpha * p
    n = new
    end = where(abs(z) > l1, 0 - (z - sign(z) * l1) / (sqrt(new) / alpha + l2), 0.0)
    u = p - end
    return u, z, n


class Follows(Spec):
    """FTRL: p is z, which is a difference of large numbers where the rate is small."""

    lr = real(1e-4)
    l1 = real(0.01)
    l2 = real(0.01)

    def slots(self, shape):
        return like(shape, "z", "n")

    def scalars(self, t, counters):
        return {"step": 1.0, "alpha": self.lr, "l1": self.l1, "l2": self.l2}

    def update(self, E, x):
        return E.map(followed, x)


@pytest.mark.parametrize("engine", [engine for engine in HERE if engine != "cpu-float64"])
def test_what_a_rule_makes_of_a_last_bit_is_no_fault_of_an_engine(engine):
    row = next(row for row in rlx_optim.check_rule(Follows, engines=[engine], only=["engine"]).rows if row.check == "engine")
    assert row.ok, row.note
    assert 2e-5 < row.seen < 2e-4
    assert row.note.startswith("ill-conditioned")


def test_an_engine_that_is_off_is_found_whatever_the_rule():
    for rule, off in ((Momentum, 1e-4), (Follows, 1e-2)):
        asked = RuleSubject(rule, {}, [])
        start, gradients = asked.draw_problem()
        want = asked.walk([rule()], get_speaker("reference"), start, gradients)["p"]
        assert asked.judge(want, [rule()], start, gradients) == 0
        wrong = [p + np.float32(off) * (p - s) for p, s in zip(want, start, strict=True)]
        with pytest.raises(Wrong, match="ends elsewhere"):
            asked.judge(wrong, [rule()], start, gradients)


# ---- the command -----------------------------------------------------------------------------------------------------------------
def test_command(capsys):
    pytest.importorskip("typer")
    from rlx_optim.cli import main

    assert main(["check", "sgd"]) == 0
    assert "fit to be used" in capsys.readouterr().out
    assert main(["check", "test_language:Idle", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [row["check"] for row in found["rows"] if not row["ok"]] == ["hyperparameter nothing"]
    assert main(["check"]) == 2
    assert main(["check", "test_language:simple"]) == 2
    assert main(["check", "nowhere:Rule"]) == 2
    assert "give an optimizer" in capsys.readouterr().err


def test_command_of_the_language(capsys, monkeypatch):
    pytest.importorskip("typer")
    from lab import language as table
    from rlx_optim import cli

    monkeypatch.setattr(table, "list_present", lambda: ["reference", "torch"])
    assert cli.main(["check", "--language"]) == 0
    out = capsys.readouterr().out
    assert all(name[:20] in out for name in BROKE)
    assert "refused" in out
    monkeypatch.setattr(cli, "find_checkout", lambda: None)
    assert cli.main(["check", "--language"]) == 2
    assert "check --language is in the repository's lab/" in capsys.readouterr().err
