"""From a rule to machine code: one compiled loop per rule and layout.

A kernel is a C function over a table of addresses (tensor × array), a table of numbers (tensor × number) and a table of chunks.
It is made once per process: `build` writes its instructions around those of the rule, whose syntax `evaluate` walks.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

from ...language import Reduction, Rule, checked
from ...rounding import EXACT, NEAREST, STOCHASTIC
from ...storage import BLOCK, COMPONENTS, HALF, POSITIVE, SIGNED, TINY, TOP
from . import codecs
from .codegen import SIZES, WORDS, Array, Code, Value, loose_add, maximum, smaller, sqrt, where

#: columns of the chunk table
CHUNK = ("tensor", "first", "last", "rows", "columns", "scratch")
ROWWISE = {"row": "_r", "matrix": "_r // _rows", "column": "(_r // _rows) * _columns"}  # where a row of the domain finds its own


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a rule's arguments and results lie in memory.

    takes: per argument "full" (an array), "scaled" (the gradient: an array times the scale), "row", "column" or "matrix" (one
    number per row, per column or per matrix of the domain) or "number" (one per tensor).
    gives: per result "store" (into an array of its own), the number of the argument whose array it replaces, or its reduction. A
    replacement is not a store to a second pointer, because the compiler's overlap check would then always fail and the loop run
    one element at a time.
    element, arithmetic: "float32" or "float64", of the buffers and of the computation.
    coded: per argument what it is kept in (`storage`), "" as it is; no row, column or reduction of such goes with that.
    half: "bfloat16" or "float16" where the parameter and the gradient are that. parameter: which argument it is, if any.
    rounding: how it is rounded (`rounding`).
    """

    takes: tuple[str, ...]
    gives: tuple[str | int | Reduction, ...]
    element: str = "float32"
    arithmetic: str = "float32"
    coded: tuple[str, ...] = ()
    half: str = ""
    parameter: int = -1
    rounding: str = NEAREST

    @property
    def by_row(self) -> bool:
        lines = any(kind in ROWWISE for kind in self.takes) or any(how.axis is not None for _, how in self.reductions)
        return lines or bool(self.scaled)

    @property
    def scaled(self) -> list[int]:
        """Arguments that have scales beside their codes."""
        return [j for j, storage in enumerate(self.coded) if len(COMPONENTS[storage]) > 1]

    @property
    def extra_numbers(self) -> int:
        """How many numbers stand behind the rule's own: the scale of gradients; where chance rounds, the step and the first place
        of the state; where it rounds the parameter, its key and its first place."""
        return 5 if self.stochastic else 3 if HALF in self.coded else 1

    @property
    def stochastic(self) -> bool:
        return bool(self.half) and self.parameter in self.gives and self.rounding == STOCHASTIC

    @property
    def has_low_half(self) -> bool:
        """Whether the parameter has a low half."""
        return bool(self.half) and self.parameter >= 0 and self.rounding == EXACT

    @property
    def width(self) -> int:
        """How many addresses a tensor has: of its arguments, of results, of scales, of a low half."""
        arrays = len(self.takes) - self.takes.count("number")
        return arrays + len(self.own_arrays) + len(self.scaled) + self.has_low_half

    @property
    def reductions(self) -> list[tuple[int, Reduction]]:
        """(result, how)."""
        return [(k, how) for k, how in enumerate(self.gives) if isinstance(how, Reduction)]

    @property
    def over_tensors(self) -> list[tuple[int, Reduction]]:
        return [(k, how) for k, how in self.reductions if how.axis is None]

    @property
    def over_columns(self) -> list[tuple[int, Reduction]]:
        return [(k, how) for k, how in self.reductions if how.axis == -2]

    @property
    def own_arrays(self) -> list[int]:
        """Results that have an array of their own: stored ones, rows and columns."""
        return [k for k, how in enumerate(self.gives) if how == "store" or (isinstance(how, Reduction) and how.axis is not None)]


# ---- a rule on one coordinate -----------------------------------------------------------------------------------------------
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.Lt: operator.lt, ast.Gt: operator.gt, ast.LtE: operator.le, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def evaluate(rule: Rule, code: Code, arithmetic: str, values: list[Value]) -> list[Value]:
    """The results of a rule for these arguments. Its literals are numbers of the kernel's arithmetic."""
    text = checked(rule)
    known = dict(zip(text.takes, values, strict=True))

    def value_of(node: ast.expr) -> Value:
        match node:
            case ast.Name(id=name):
                return known[name]
            case ast.Constant(value=int() | float() as number):
                return code.constant(arithmetic, number)
            case ast.UnaryOp(operand=operand):
                return -value_of(operand)
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                result: Value = OPERATORS[type(op)](value_of(left), value_of(right))
                return result
            case ast.Call(func=ast.Name(id=word), args=given):
                return WORDS[word](*map(value_of, given))
        raise AssertionError(ast.dump(node))  # `checked` refuses it

    for statement in text.tree.body:
        if isinstance(statement, ast.Assign):
            known[statement.targets[0].id] = value_of(statement.value)  # type: ignore[attr-defined]
    return [known[name] for name in text.gives]


# ---- how an argument is read and written ------------------------------------------------------------------------------------
class Operand:
    """An argument or a result of a kernel in memory, as it is. `kernel` has what stands for the whole chunk.

    fetch: before the innermost loop, over n coordinates from `start` on; read, write: one of them; finish: after that loop.
    """

    def __init__(self, kernel: Builder, base: Value, kind: str):
        self.kernel, self.base, self.kind = kernel, base, kind

    def place(self, start: Value) -> Array:
        return self.kernel.code.array(self.kind, self.base + start * SIZES[self.kind])

    def fetch(self, start: Value, n: Value) -> None:
        self.at = self.place(start)

    def read(self, i: Value) -> Value:
        return self.at[i].to(self.kernel.arithmetic)

    def write(self, i: Value, value: Value) -> None:
        self.at[i] = value

    def finish(self) -> None:
        pass


class Line(Operand):
    """One number for a row or a matrix of the domain."""

    def fetch(self, start: Value, n: Value) -> None:
        self.value = self.place(start)[0].to(self.kernel.arithmetic)

    def read(self, i: Value) -> Value:
        return self.value


class ScaledBlocks(Operand):
    """A slot of 8 bits, whose blocks have scales. What is written waits on the stack for the block's scale."""

    def __init__(self, kernel: Builder, base: Value, storage: str, scales: Value, written: bool):
        super().__init__(kernel, base, {SIGNED: "int8", POSITIVE: "uint8"}[storage])
        self.storage, self.scales, self.written = storage, kernel.code.array("float32", scales), written
        self.decode = codecs.from_signed if storage == SIGNED else codecs.from_positive
        self.encode = codecs.to_signed if storage == SIGNED else codecs.to_positive
        self.waiting, self.most = kernel.code.stack_array("float32", BLOCK), kernel.code.stack_array("int32", 1)

    def fetch(self, start: Value, n: Value) -> None:
        super().fetch(start, n)
        self.n, self.scale = n, self.scales[self.kernel.block]
        if self.written:
            self.most[0] = 0

    def read(self, i: Value) -> Value:
        return self.decode(self.at[i], self.scale).to(self.kernel.arithmetic)

    def write(self, i: Value, value: Value) -> None:
        value = (sqrt(value) if self.storage == POSITIVE else value).to("float32")
        self.waiting[i] = value
        self.most[0] = codecs.larger(self.most[0], value)

    def finish(self) -> None:
        if not self.written:
            return
        code = self.kernel.code
        self.scales[self.kernel.block] = scale = self.most[0].real()
        tiny = code.constant("float32", TINY)
        inverse = TOP[self.storage] ** 2 / where(tiny > scale, tiny, scale)
        with code.loop(0, self.n) as i:
            self.at[i] = self.encode(self.waiting[i], inverse)


class HalfState(Operand):
    """A slot in bfloat16, rounded by chance."""

    def read(self, i: Value) -> Value:
        return codecs.from_bfloat16(self.at[i]).to(self.kernel.arithmetic)

    def write(self, i: Value, value: Value) -> None:
        self.at[i] = codecs.to_half(value.to("float32"), codecs.hash_bits(self.kernel.places["state"][0], self.kernel.tick))


class HalfParameter(Operand):
    """A parameter of 16 bits, or a gradient."""

    def read(self, i: Value) -> Value:
        return codecs.DECODE[self.kernel.layout.half](self.at[i]).to(self.kernel.arithmetic)

    def write(self, i: Value, value: Value) -> None:
        kernel, value = self.kernel, value.to("float32")
        if kernel.layout.stochastic:
            noise = codecs.hash_bits(kernel.places["parameter"][0], kernel.word)
            self.at[i] = codecs.BY_CHANCE[kernel.layout.half](value, noise)
        else:
            self.at[i] = codecs.NEAREST_OF[kernel.layout.half](value)


class TwoHalves(Operand):
    """A parameter in bfloat16 whose low half is kept beside it."""

    def __init__(self, kernel: Builder, base: Value, low: Value):
        super().__init__(kernel, base, "uint16")
        self.low = Operand(kernel, low, "uint16")

    def fetch(self, start: Value, n: Value) -> None:
        super().fetch(start, n)
        self.low.fetch(start, n)

    def read(self, i: Value) -> Value:
        return codecs.join_halves(self.at[i], self.low.at[i]).to(self.kernel.arithmetic)

    def write(self, i: Value, value: Value) -> None:
        value = value.to("float32")
        self.at[i], self.low.at[i] = codecs.upper_half(value), codecs.lower_half(value)


# ---- a kernel ---------------------------------------------------------------------------------------------------------------
#: what a call of a kernel is given, each an int64: where its tables are, how many chunks there are and how many are taken at
#: once, and, in the last, how many have been taken
CALL = ("addresses", "numbers", "chunks", "count", "partial", "scratch", "step", "taken")


class Builder:
    """Writes the instructions of a kernel."""

    def __init__(self, rule: Rule, layout: Layout, name: str):
        self.rule, self.layout, self.arithmetic = rule, layout, layout.arithmetic
        code = self.code = Code(name, ["int64"])
        call = code.array("int64", code.arguments[0])
        self.addresses, self.table = (code.array("int64", call[CALL.index(name)]) for name in ("addresses", "chunks"))
        self.numbers, self.partial = (code.array("float64", call[CALL.index(name)]) for name in ("numbers", "partial"))
        self.scratch = call[CALL.index("scratch")]
        step, count = call[CALL.index("step")], call[CALL.index("count")]
        with code.while_taken(call, CALL.index("taken"), step, count) as (first, last), code.loop(first, last) as c:
            self.build_chunk(c)

    def build_chunk(self, c: Value) -> None:
        layout, code = self.layout, self.code
        tensor, first, last, rows, columns, scratch = (self.table[c * len(CHUNK) + k] for k in range(len(CHUNK)))
        row_of_numbers = tensor * (layout.takes.count("number") + layout.extra_numbers)
        self.own = [self.numbers[row_of_numbers + k] for k in range(layout.takes.count("number") + layout.extra_numbers)]
        self.bind_operands(tensor)
        self.places = {name: code.stack_array("int32", 1) for name in self.begins}
        self.sums = [code.variable(self.initial_value(how)) for _, how in layout.over_tensors]
        self.columns = {}
        for i, (k, how) in enumerate(layout.over_columns):
            at = self.columns[k] = code.array("float64", self.scratch + (scratch + columns * i) * 8)
            with code.loop(0, columns) as place:
                at[place] = self.initial_value(how)
        if not layout.by_row:
            self.build_loop(first, last - first)
        else:
            with code.loop(first, last) as r:
                self.build_row(r, rows, columns)
        for i, total in enumerate(self.sums):
            self.partial[c * len(self.sums) + i] = total[0]

    def bind_operands(self, tensor: Value) -> None:
        """Settle where each argument and each stored result of this tensor is, and how it is read and written."""
        layout = self.layout
        arrays = [j for j, kind in enumerate(layout.takes) if kind != "number"]
        address = [self.addresses[tensor * layout.width + slot] for slot in range(layout.width)]
        numbers = iter(self.own)
        self.arguments: dict[int, Operand] = {}
        self.given = {j: next(numbers).to(self.arithmetic) for j, kind in enumerate(layout.takes) if kind == "number"}
        self.scale = next(numbers).to(self.arithmetic)
        for slot, j in enumerate(arrays):
            kind, storage = layout.takes[j], layout.coded[j] if layout.coded else ""
            if storage == HALF:
                self.arguments[j] = HalfState(self, address[slot], "uint16")
            elif storage:
                scales = address[len(arrays) + len(layout.own_arrays) + layout.scaled.index(j)]
                self.arguments[j] = ScaledBlocks(self, address[slot], storage, scales, j in layout.gives)
            elif layout.half and j == layout.parameter and layout.has_low_half:
                self.arguments[j] = TwoHalves(self, address[slot], address[-1])
            elif layout.half and (kind == "scaled" or j == layout.parameter):
                self.arguments[j] = HalfParameter(self, address[slot], "uint16")
            else:
                self.arguments[j] = (Line if kind in ("row", "matrix") else Operand)(self, address[slot], layout.element)
        self.results = {k: Operand(self, address[slot], layout.element) for slot, k in enumerate(layout.own_arrays, len(arrays))}
        self.begins: dict[str, Value] = {}  # of the places that chance goes by, of state and of the parameter
        if layout.extra_numbers > 1:
            self.tick = codecs.scramble(next(numbers).to("int64"), 0x85EBCA77)
            first = next(numbers).to("int64")
            if HALF in layout.coded:
                self.begins["state"] = first
        if layout.stochastic:
            self.word = self.tick ^ next(numbers).to("int64").to("int32")
            self.begins["parameter"] = next(numbers).to("int64")

    def build_row(self, r: Value, rows: Value, columns: Value) -> None:
        layout, code = self.layout, self.code
        of = {"row": r, "matrix": r // rows, "column": r // rows * columns}  # where a row of the domain finds its own
        totals = {k: code.variable(self.initial_value(how)) for k, how in layout.reductions if how.axis == -1}
        self.rows_sums = totals
        if not layout.scaled:
            self.build_loop(r * columns, columns, of)
        else:
            blocks = (columns + (BLOCK - 1)) // BLOCK
            with code.loop(0, blocks) as q:
                self.block = r * blocks + q
                self.build_loop(r * columns + q * BLOCK, smaller(columns - q * BLOCK, BLOCK), of)
        for k, total in totals.items():
            how = self.layout.gives[k]
            done = total[0] / columns.to("float64") if how.mean else total[0]  # type: ignore[union-attr]
            self.results[k].fetch(r, columns)
            self.results[k].write(code.constant("int64", 0), sqrt(done) if how.root else done)  # type: ignore[union-attr]

    def build_loop(self, start: Value, n: Value, of: dict[str, Value] | None = None) -> None:
        """The loop over n coordinates from `start` on."""
        layout, code = self.layout, self.code
        stored = {k: result for k, result in self.results.items() if not isinstance(layout.gives[k], Reduction)}
        for j, operand in self.arguments.items():
            operand.fetch((of or {}).get(layout.takes[j], start), n)
        for result in stored.values():
            result.fetch(start, n)
        for name, begin in self.begins.items():
            self.places[name][0] = codecs.scramble(begin + start, 0x9E3779B1)
        with code.loop(0, n) as i:
            values = [self.given[j] if j in self.given else self.arguments[j].read(i) for j in range(len(layout.takes))]
            values = [v * self.scale if kind == "scaled" else v for v, kind in zip(values, layout.takes, strict=True)]
            found = evaluate(self.rule, code, self.arithmetic, values)
            for k, how in enumerate(layout.gives):
                if isinstance(how, Reduction):
                    self.accumulate(k, how, i, found[k].to("float64"))
                else:
                    (stored[k] if how == "store" else self.arguments[how]).write(i, found[k])  # type: ignore[index]
            for place in self.places.values():  # a sum, so that the loop's own counter is one of 32 bits
                place[0] = place[0] + 0x9E3779B1
        for operand in self.arguments.values():
            operand.finish()

    def accumulate(self, k: int, how: Reduction, i: Value, value: Value) -> None:
        """Take a value into a running reduction."""
        value = value * value if how.squared else value
        if how.axis is None:
            into, i = self.sums[[j for j, _ in self.layout.over_tensors].index(k)], self.code.constant("int64", 0)
        elif how.axis == -2:
            into = self.columns[k]
        else:
            into, i = self.rows_sums[k], self.code.constant("int64", 0)
        into[i] = (maximum if how.largest else loose_add)(into[i], value)

    def initial_value(self, how: Reduction) -> Value:
        return self.code.constant("float64", -math.inf if how.largest else 0.0)


_count = itertools.count()  # compiled functions are found by name


@functools.cache
def compile_kernel(rule: Rule, layout: Layout) -> int:
    """The address of a rule's kernel, made once."""
    return Builder(rule, layout, f"rlx_kernel_{next(_count)}").code.compile()
