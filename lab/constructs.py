"""Every construct of the language of rules, each in a rule of its own: what the conformance test runs on every engine.

A construct is a small spec. What its rule computes is kept in slots, one by name, so that what an engine gets wrong has a name
too. docs/language.md is the specification that these follow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from rlx_optim.language import REDUCTIONS, Rule
from rlx_optim.ops import abs, clamp, exp, log, maximum, minimum, rsqrt, sign, sqrt, where
from rlx_optim.spec import Shape, Slot, Spec, like, real


class Small(Spec):
    """Two numbers beside the step, and slots by name."""

    lr: float = real(0.1)
    a: float = real(0.5, low=-math.inf)
    b: float = real(2.0, low=-math.inf)
    keeps = ""
    fill = 0.0

    def slots(self, shape: Shape) -> dict[str, Slot]:
        return {name: Slot(shape, self.fill) for name in self.keeps.split()}

    def scalars(self, t: int, counters: Any) -> dict[str, Any]:
        return {"step": self.lr, "a": self.a, "b": self.b, "late": 1.0 / t}

    def update(self, E: Any, x: Any) -> Any:
        raise self.refuse("a construct says its own update")


@dataclasses.dataclass(frozen=True)
class Construct:
    """A spec and what it is run on. special: with NaN, infinities and zeros among its values. least: of the dimensions.

    compiled: Triton's interpreter cannot do it, its compiler can. refused: there is no program for it.
    """

    name: str
    spec: type[Spec]
    special: bool = False
    least: int = 0
    compiled: bool = False
    refused: bool = False


CONSTRUCTS: list[Construct] = []


def construct(name: str, special: bool = False, least: int = 0) -> Callable[[type[Spec]], type[Spec]]:
    def add(spec: type[Spec]) -> type[Spec]:
        CONSTRUCTS.append(Construct(name, spec, special, least))
        return spec

    return add


def mapped(name: str, rule: Rule, keeps: str = "", special: bool = False, fill: float = 0.0, compiled: bool = False) -> None:
    """A construct that is one rule, mapped once."""
    body = {"keeps": keeps, "fill": fill, "update": lambda self, E, x: E.map(rule, x), "__module__": __name__}
    CONSTRUCTS.append(Construct(name, type(rule.__name__, (Small,), body), special, compiled=compiled))


# ruff: noqa: E741  (names that collide with a generator's are the point)
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ---- operators ------------------------------------------------------------------------------------------------------------
def arithmetic(p, g, a, b):
    sums = p + g + a + 1
    lesses = 1 - a - g - 2.5
    products = 2 * g * a * p
    quotients = 1 / (2 + g * g) / b
    turned = a / (p * p + 1)
    u = g
    return u, sums, lesses, products, quotients, turned


mapped("+ - * / of arrays, numbers and literals", arithmetic, "sums lesses products quotients turned")


def among_numbers(p, g, a, b, late):
    scaled = (a * b - a / b + late) * g
    turned = (1 - a) * p + (2 / b - late * late) * g
    chosen = where(a < b, a + b, a - b) * g + maximum(a, late) * minimum(late, b) * p
    rooted = (sqrt(abs(a)) + rsqrt(abs(b)) + exp(-abs(a)) + log(abs(b)) + sign(a) + clamp(b, -1, late)) * g
    u = scaled
    return u, scaled, turned, chosen, rooted


mapped("number × number where groups differ", among_numbers, "scaled turned chosen rooted")


def negative(p, g, a, b):
    arrays = -g
    numbers = -a * p
    literals = -2.0 * g + -1 * p
    twice = -(-g - -b)
    u = -g
    return u, arrays, numbers, literals, twice


mapped("unary minus", negative, "arrays numbers literals twice")


def compared(p, g, a, late):
    less = where(g < p, g, p) + where(a < g, 1.0, 0.0)
    more = where(g > p, g, p) + where(a > g, 1.0, 0.0)
    least = where(g <= p, g, p) + where(g <= g, 1.0, 0.0)
    most = where(g >= a, g, p) + where(g <= 0, 1.0, 0.0)
    same = where(g == p, 1.0, 2.0) + where(a == late, g, p)
    other = where(g != g, 1.0, 2.0) + where(a != late, g, p)
    u = g
    return u, less, more, least, most, same, other


mapped("comparisons < > <= >= == !=", compared, "less more least most same other")
mapped("comparisons with NaN, inf and zeros", compared, "less more least most same other", special=True)


def both_and_either(p, g, a, b):
    both = where((g > 0) & (p > a), g, p)
    either = where((g > 0) | (a > p), g, p)
    nested = where(((g > a) & (p > 0)) | ((g < 0) & (p < b)), g, 0.0)
    numbers = where((a > 0) & (b > 0), g, p) + where((a > 1) | (b > 2.5), g, p)
    u = g
    return u, both, either, nested, numbers


mapped("& and | inside where", both_and_either, "both either nested numbers")


def mixed_conditions(p, g, a, b):
    both = where((a > 0) & (g > 0), g, p)
    either = where((p > 0) | (a > b), 1.0, a)
    u = g
    return u, both, either


mapped("& and | of numbers and arrays", mixed_conditions, "both either", compiled=True)


def agreeing(g, m):
    m = where(g * m > 0, g, m) + g
    u = m
    return u, m


mapped("where(g*m > 0, g, m)", agreeing, "m")


def chosen(p, g, a, b):
    literals = where(g > 0, 1.0, -1.0)
    numbers = where(g > p, a, b)
    either = where(a > b, g, p)
    mixed = where(g > 0, p, a) + where(g > 0, 1, p)
    nested = where(g > 0, where(p > 0, 1.0, 2.0), where(p > 0, 3.0, a))
    u = where(a > b, a, b) * g
    return u, literals, numbers, either, mixed, nested


mapped("where of arrays, numbers and literals", chosen, "literals numbers either mixed nested")


def literals(g):
    whole = 2 * g + 1
    tiny = 1e-30 + g
    huge = minimum(g, 3e38)
    half = 1 / 2 * g + 3 / 4
    u = 0.25 * g
    return u, whole, tiny, huge, half


mapped("literals", literals, "whole tiny huge half")


# ---- the vocabulary -------------------------------------------------------------------------------------------------------
def one_argument(g, p):
    size = abs(g) + abs(p)
    root = sqrt(abs(g))
    inverse = rsqrt(abs(g) + 1)
    direction = sign(g)
    power = exp(g)
    natural = log(abs(g) + 0.5)
    u = size
    return u, size, root, inverse, direction, power, natural


mapped("sqrt rsqrt abs sign exp log", one_argument, "size root inverse direction power natural")


def at_the_edges(g, p):
    size = abs(g)
    root = sqrt(g)
    inverse = rsqrt(g)
    direction = sign(g)
    power = exp(g)
    natural = log(g)
    u = p
    return u, size, root, inverse, direction, power, natural


mapped("sqrt rsqrt abs sign exp log of NaN, ±inf, 0 and below", at_the_edges, "size root inverse direction power natural", True)


def several_arguments(p, g, a, b):
    least = minimum(p, g) + minimum(a, g) + minimum(g, 0.25) + minimum(-0.25, g)
    most = maximum(p, g) + maximum(g, a) + maximum(0.25, g)
    within = clamp(g, -0.5, 0.5) + clamp(p, -b, b) + clamp(g, p - 1, p + 1)
    bounded = clamp(a, g, p) + clamp(0.0, g, 1.0)
    u = g
    return u, least, most, within, bounded


mapped("minimum maximum clamp", several_arguments, "least most within bounded")


def several_at_the_edges(p, g, a):
    least = minimum(p, g)
    turned = minimum(g, p)
    most = maximum(p, g)
    beside = maximum(g, a)
    before = minimum(a, g)
    within = clamp(g, -0.5, 0.5)
    bounded = clamp(p, g, 3e38)
    u = g
    return u, least, turned, most, beside, before, within, bounded


mapped("minimum maximum clamp of NaN and ±inf", several_at_the_edges, "least turned most beside before within bounded", True)


# ---- arguments and results ------------------------------------------------------------------------------------------------
def number_first(a, g, b, m, late, p):
    m = a * m + b * g + late * p
    u = m
    return u, m


mapped("a number before an array among the arguments", number_first, "m")


def swapped(g, m, v):
    old = m
    m = v + g
    v = old - g
    u = g
    return v, u, m


mapped("two slots exchanged, results in another order", swapped, "m v")


def only_a_number(g, a, b):
    level = a
    flat = 1.5
    product = a * b
    copied = g
    u = g
    return u, level, flat, product, copied


mapped("a result that is a number or an argument", only_a_number, "level flat product copied")


def written(p, g):
    seen = p * g
    u = g
    return u, seen


mapped("a slot that is written and never read", written, "seen")


def fixed(g, anchor):
    u = g - anchor
    return u


mapped("a slot that is read and never written", fixed, "anchor", fill=0.75)


def twice_the_same(g, again, p, number, a):
    u = g * again + p * again + number * a
    return u


@construct("the same value passed twice")
class Same(Small):
    def update(self, E, x):
        return E.map(twice_the_same, x.set(again=x.g, number=x.a))


def first(t, out, rows, columns, scale, chunk, kernel, i, n, F, tl, x, y, s):
    l = t + 2 * out + 3 * rows + 4 * columns + 5 * scale
    numba = chunk + kernel * i - n
    live = F * tl + x * y
    at = s + l * numba * 0.01 + live
    u = at
    inf = at
    return u, t, inf


@construct("names of a generator's locals: a rule called first, values t out rows …")
class Colliding(Small):
    keeps = "t out rows columns inf"

    def scalars(self, t, counters):
        names = ["scale", "chunk", "kernel", "i", "n", "F", "tl", "x", "y", "s"]
        return {"step": self.lr} | {name: self.a + k / 8 + self.b / t for k, name in enumerate(names)}

    def update(self, E, x):
        return E.map(first, x)


def kernel(float32, float64, carray, where_, np, self_, range, value, step):
    value = value + float32 * float64 + carray + np
    u = value * self_ + range + where_ + step
    return u, value


@construct("names of modules, types and built-ins: a rule called kernel")
class Builtins(Small):
    keeps = "value carray"

    def scalars(self, t, counters):
        names = ["float32", "float64", "np", "self_", "range", "where_"]
        return {"step": self.lr} | {name: self.a + k / 8 + self.b / t for k, name in enumerate(names)}

    def update(self, E, x):
        return E.map(kernel, x)


def keeps_all(g):
    u = g
    return u


@construct("numbers that are zero")
class Zeros(Small):
    keeps = "m"

    def scalars(self, t, counters):
        return {"step": self.lr, "shrink": 0.0, "a": 0.0, "b": 0.0, "late": 0.0}

    def update(self, E, x):
        return E.map(number_first, x)


# ---- several maps ---------------------------------------------------------------------------------------------------------
def averaged(g, m, a):
    m = a * m + (1 - a) * g
    return m


def heavy(m, g):
    u = m + g
    return u


@construct("one rule mapped twice in an update")
class Twice(Small):
    keeps = "m"

    def update(self, E, x):
        x = E.map(averaged, x)
        x = E.map(averaged, x.set(a=x.late))
        return E.map(heavy, x)


@construct("one rule mapped twice with a reduction between")
class TwiceApart(Small):
    keeps = "m"

    def update(self, E, x):
        x = E.map(averaged_and_measured, x, size="rms")
        x = E.map(averaged_and_measured, x.set(a=x.size), size="rms")
        return E.map(divided, x)


def averaged_and_measured(g, m, a):
    m = a * m + g
    size = m
    return m, size


def divided(m, size):
    u = m / (size + 1)
    return u


def doubled(g, late):
    t = g * late
    u = t + t
    return u


def lifted(u, m, a):
    t = u + m
    m = t * a
    u = t - m
    return u, m


def ended(u, m, v, g):
    t = u * m
    v = v + t
    u = t + g
    return u, v


@construct("rules chained in one pass")
class Chained(Small):
    keeps = "m v"

    def update(self, E, x):
        return E.map(ended, E.map(lifted, E.map(doubled, x)))


@construct("a value read after the map that wrote it")
class ReadAfter(Small):
    keeps = "m v"

    def update(self, E, x):
        x = E.map(averaged_and_measured, x, size="norm")
        x = E.map(follow, x)
        return E.map(ended, x)


def follow(m, size, p, v):
    u = m / (size + 1) + 0.01 * p
    v = m - v
    return u, v


@construct("an array kept between passes")
class Scratch(Small):
    keeps = "m"

    def update(self, E, x):
        x = E.map(between, x, size="norm", top="max")
        return E.map(after, x)


def between(p, g, m, a):
    middle = p * g + a
    m = m + middle
    size = middle
    top = g
    return middle, m, size, top


def after(g, middle, size, top):
    u = g + middle / (size + top + 3)
    return u


# ---- the commit -----------------------------------------------------------------------------------------------------------
@construct("shrink·p + step·u")
class Shrinking(Small):
    def scalars(self, t, counters):
        return {"step": self.lr, "shrink": self.a * 0.01}

    def update(self, E, x):
        return E.map(keeps_all, x)


def kept(p, u, keep, step):
    change = p - (keep * p - step * u)
    return change


@construct("p = keep*p − lr*g, as a commit")
class Keeping(Small):
    committed = ("keep", "step")

    def scalars(self, t, counters):
        return {"step": self.lr, "keep": 1 - self.a / 8}

    def update(self, E, x):
        return E.map(keeps_all, x)

    def commit(self, E, x):
        return E.map(kept, x)


def cautious(g, u, step):
    change = where(u * g > 0, step * u, 0.0)
    return change


@construct("a commit that masks")
class Cautious(Small):
    keeps = "m"

    def update(self, E, x):
        return E.map(agreeing, x)

    def commit(self, E, x):
        return E.map(cautious, x)


def measured(p, u):
    size = p
    pace = u
    return size, pace


def ratio(size, pace, step):
    step = step * size / (pace + 1)
    return step


@construct("a commit that measures")
class Measuring(Small):
    def update(self, E, x):
        return E.map(keeps_all, x)

    def commit(self, E, x):
        return super().commit(E, E.each(ratio, E.map(measured, x, size="norm", pace="rms")))


# ---- numbers --------------------------------------------------------------------------------------------------------------
def numbers_alone(a, b, late):
    c = sqrt(abs(a)) + rsqrt(abs(b)) + exp(-late) + log(abs(b) + 1)
    d = where((a > 0) & (b > late), a, 1.0) + minimum(a, 0.25) + maximum(0.25, b) + clamp(a, -1.0, late) + sign(a) - abs(b)
    return c, d


def weighed(g, m, c, d):
    m = c * m + d * g
    u = m
    return u, m


@construct("E.each of numbers alone")
class Alone(Small):
    keeps = "m"

    def update(self, E, x):
        return E.map(weighed, E.each(numbers_alone, x))


@construct("E.each of reductions and numbers")
class OfReductions(Small):
    keeps = "m"

    def update(self, E, x):
        x = E.map(measures_of_both, x, size="norm", pace="mean")
        x = E.each(numbers_alone, x.set(a=x.size, b=x.pace))
        return E.map(weighed, E.each(mixed_numbers, x))


def measures_of_both(p, g):
    size = p
    pace = g
    return size, pace


def mixed_numbers(c, d, size, late):
    c = c / (size + late + 1) / 8
    d = d / 8
    return c, d


# ---- reductions -----------------------------------------------------------------------------------------------------------
def five(p, g):
    total = p + 3
    average = p * g + 1
    length = g
    rms = p - g
    top = g
    return total, average, length, rms, top


FIVE = {"total": "sum", "average": "mean", "length": "norm", "rms": "rms", "top": "max"}


def spread_five(g, total, average, length, rms, top):
    r1 = total + g * 0
    r2 = average + g * 0
    r3 = length + g * 0
    r4 = rms + g * 0
    r5 = top + g * 0
    u = g
    return u, r1, r2, r3, r4, r5


class Reductions(Small):
    keeps = "r1 r2 r3 r4 r5"
    scope = ""

    def update(self, E, x):
        x = E.map(five, x, **{name: self.scope + kind for name, kind in FIVE.items()})
        return E.map(spread_five, x)


for _scope, _words in {"": "of a tensor", "row_": "of each row", "column_": "of each column", "all_": "of all tensors"}.items():
    _made = type(f"Reductions{_scope.title().strip('_')}", (Reductions,), {"scope": _scope, "__module__": __name__})
    CONSTRUCTS.append(Construct(f"sum mean norm rms max {_words}", _made, least={"row_": 1, "column_": 2}.get(_scope, 0)))


def gradual(g, pace):
    size = g
    m = pace * g
    return size, m


def renewed(pace, total, size, late):
    pace = pace / 2 + size
    total = total + late
    return pace, total


def by_pace(m, pace, total):
    u = m / (pace + total)
    return u


@construct("a number kept for each tensor, read by a rule before and after it is given anew")
class NumberPerTensor(Small):
    scope = ""

    def slots(self, shape):
        number = {"pace": Slot((), 0.5, drop=None), "total": Slot((), drop=None)}
        return {**number, **like(shape, "m")}

    def update(self, E, x):
        x = E.each(renewed, E.map(gradual, x, size=f"{self.scope}rms"))
        return E.map(by_pace, x)


@construct("a number kept for each tensor, the same for all")
class NumberForAll(NumberPerTensor):
    scope = "all_"


@construct("numbers that become one for all tensors")
class SharedNumber(NumberPerTensor):
    def update(self, E, x):
        x = E.each(renewed, E.map(gradual, x, size="rms"), pace="all_max", total="all_mean")
        return E.map(by_pace, x)


def with_nan(p, g):
    top = where(g > 0, g / (g - g), p)
    low = where(g > 3, g, -1.0)
    total = g
    return top, low, total


def spread_three(g, top, low, total):
    r1 = where(top == top, top, -9.0)
    r2 = low + g * 0
    r3 = total + g * 0
    u = g
    return u, r1, r2, r3


@construct("max of infinities, of what is below zero, sum beside it")
class Extremes(Small):
    keeps = "r1 r2 r3"

    def update(self, E, x):
        return E.map(spread_three, E.map(with_nan, x, top="max", low="max", total="sum"))


@construct("reductions of NaN and inf", special=True)
class SpecialReductions(Reductions):
    pass


@construct("a constant reduced, and nothing stored beside it")
class Constant(Small):
    keeps = "r1 r2 r3"

    def update(self, E, x):
        return E.map(spread_three, E.map(constants, x, top="max", low="mean", total="sum"))


def constants(g, a, b):
    top = a
    low = b
    total = 1.0
    return top, low, total


# ---- rows and columns -------------------------------------------------------------------------------------------------------
def lines(g):
    by_row = g * g
    by_column = g * g
    return by_row, by_column


def keep_rows(row, by_row, a):
    row = a * row + by_row
    total = row
    most = row
    return row, total, most


def keep_columns(col, by_column, a):
    col = a * col + by_column
    return col


def keep_both(col, by_column, a):
    col = a * col + by_column
    total = col
    most = col
    return col, total, most


def of_lines(g, p, row, col, total, most, a):
    u = g * rsqrt(row * col + 1) + total * p * 0.01 + where(row > col, a, most)
    seen = u
    return u, seen


class Lines(Small):
    def slots(self, shape):
        rows, columns = Slot(shape[:-1], drop=(-1,)), Slot(shape[:-2] + shape[-1:], drop=(-2,))
        return {"row": rows, "col": columns, **like(shape, "seen")}


@construct("rows and columns: slots, and reductions of rows", least=2)
class RowReductions(Lines):
    def update(self, E, x):
        x = E.map(lines, x, by_row="row_mean", by_column="column_max")
        x = E.map(keep_rows, x, total="row_sum", most="row_max")
        return E.map(of_lines, E.map(keep_columns, x))


@construct("rows and columns: reductions of a slot of columns", least=2)
class Columns(Lines):
    def update(self, E, x):
        x = E.map(lines, x, by_row="row_norm", by_column="column_rms")
        x = E.map(average_row, x)
        return E.map(of_lines, E.map(keep_both, x, total="rms", most="row_mean"))


def average_row(row, by_row, a):
    row = a * row + by_row
    return row


def per_row(row, by_row, a):
    row = a * row + by_row
    u = row
    return row, u


@construct("a direction that is one number a row", least=2)
class RowDirection(Lines):
    def update(self, E, x):
        return E.map(per_row, E.map(lines, x, by_row="row_mean", by_column="column_mean"))


# ---- stacks: matrix rules -----------------------------------------------------------------------------------------------------
class Stack(Small):
    matrix = True
    keeps = "r1 r2 r3 r4 r5"
    scope = ""

    def update(self, E, x):
        x = E.map(five, x, **{name: self.scope + kind for name, kind in FIVE.items()})
        return E.map(spread_five, x)


for _scope, _words in {"": "of a tensor", "row_": "of each row", "column_": "of each column"}.items():
    _made = type(f"Stack{_scope.title().strip('_')}", (Stack,), {"scope": _scope, "__module__": __name__})
    CONSTRUCTS.append(Construct(f"stacks: sum mean norm rms max {_words}", _made, least=2))


def scaled(number, g, scale, plan, p, flag):
    u = number * g + scale * plan + flag
    kept = number * p
    return u, kept


@construct("stacks: one number per tensor, words, numbers called scale, plan, flag", least=2)
class StackNumbers(Small):
    matrix = True
    keeps = "kept r1 m"

    def scalars(self, t, counters):
        return {"step": self.lr, "shrink": 0.01, "a": self.a, "late": 1 / t, "scale": self.a, "plan": self.b, "flag": 1.0 / t}

    def update(self, E, x):
        x = E.map(of_each, x, number="rms")
        x = E.map(scaled, E.map(worded, x))
        return x.set(step=x.step * 2)


def of_each(g, p, m, a, late):
    number = g
    m = a * m + late * g
    r1 = clamp(where((g > a) & (p > 0), g, -p), -late, 1.0) + sign(m) * sqrt(abs(p)) + exp(-abs(g)) + log(maximum(1, abs(g)))
    return number, m, r1


def worded(r1, number, m):
    r1 = r1 + minimum(number, 0.5) + maximum(m, number) + rsqrt(number) + where(number > 0.1, number, m)
    return r1


class StackMapped(Small):
    matrix = True
    rule: Any = None

    def update(self, E, x):
        return E.map(type(self).rule, x)


for _name, _rule, _keeps, _special in (
    ("stacks: the vocabulary of NaN, ±inf, 0 and below", at_the_edges, "size root inverse direction power natural", True),
    (
        "stacks: minimum maximum clamp of NaN and ±inf",
        several_at_the_edges,
        "least turned most beside before within bounded",
        True,
    ),
    ("stacks: numbers alone", among_numbers, "scaled turned chosen rooted", False),
    ("stacks: where of arrays, numbers and literals", chosen, "literals numbers either mixed nested", False),
    ("stacks: a result that is a number or an argument", only_a_number, "level flat product copied", False),
):
    _made = type(f"Stack_{_rule.__name__}", (StackMapped,), {"keeps": _keeps, "rule": _rule, "__module__": __name__})
    CONSTRUCTS.append(Construct(_name, _made, _special, least=2))


@construct("stacks: a rule mapped twice and chained", least=2)
class StackTwice(Small):
    matrix = True
    keeps = "m v"

    def update(self, E, x):
        x = E.map(averaged_and_measured, x, size="norm")
        x = E.map(averaged_and_measured, x.set(a=x.size), size="rms")
        return E.map(ended, E.map(follow, x))


# ---- refused ------------------------------------------------------------------------------------------------------------------
def moves_p(p, g, step):
    p = p - step * g
    u = p
    return p, u


class WritesP(Small):
    def update(self, E, x):
        return E.map(moves_p, x)


class Unknown(Small):
    def update(self, E, x):
        return E.map(measured, E.map(keeps_all, x), size="median")


class Stale(Small):
    keeps = "m"

    def update(self, E, x):
        E.map(averaged, x)
        return E.map(heavy, x)


for _name, _refused in {
    "reading x.p after a map that wrote p": WritesP,
    "an unknown reduction": Unknown,
    "a value as it was before a map wrote it": Stale,
}.items():
    CONSTRUCTS.append(Construct(_name, _refused, refused=True))

#: what broke engines before the language was specified, by the names of constructs
BROKE = (
    "where(g*m > 0, g, m)", "unary minus", "number × number where groups differ",
    "a number before an array among the arguments", "p = keep*p − lr*g, as a commit", "reading x.p after a map that wrote p",
    "one rule mapped twice in an update", "names of a generator's locals: a rule called first, values t out rows …",
    "an unknown reduction", "stacks: sum mean norm rms max of each row",
)  # fmt: skip
assert set(BROKE) <= {each.name for each in CONSTRUCTS}
assert {scope + kind for scope in ("", "row_", "column_", "all_") for kind in FIVE.values()} == set(REDUCTIONS)
