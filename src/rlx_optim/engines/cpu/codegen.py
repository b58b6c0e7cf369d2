"""Compiled functions, written as Python that computes with names of machine values.

A `Value` is a number of the compiled function, not of this process: an operator on it adds an instruction. So a loop over arrays,
a codec or the body of a kernel is ordinary Python that runs once, while the function is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from .runtime import compile_module

TYPES = {f"{sign}int{n}": ir.IntType(n) for n in (8, 16, 32, 64) for sign in ("", "u")}
TYPES |= {"bool": ir.IntType(1), "float32": ir.FloatType(), "float64": ir.DoubleType()}
SIZES = {kind: int(kind.lstrip("uintfloa")) // 8 for kind in TYPES if kind != "bool"}


def _operator(name: str, swapped: bool = False) -> Callable[[Value, Any], Value]:
    """A method of `Value` that adds an instruction of LLVM; of floats it has an f in front."""

    def method(self: Value, other: Any) -> Value:
        left, right = (self._beside(other), self.ir) if swapped else (self.ir, self._beside(other))
        full = f"f{name}" if self.is_float else name
        return Value(self.code, self.kind, getattr(self.code.b, full)(left, right))

    return method


def _comparison(sign: str) -> Callable[[Value, Any], Value]:
    def method(self: Value, other: Any) -> Value:
        b, right = self.code.b, self._beside(other)
        compare = b.icmp_signed if not self.is_float else b.fcmp_unordered if sign == "!=" else b.fcmp_ordered
        return Value(self.code, "bool", compare(sign, self.ir, right))  # with NaN all are false but !=

    return method


class Value:
    """A number of a compiled function. Beside it, a Python number is one of the same kind. Integers compare as signed ones, `//`
    is for those that are not negative, and `>>` brings in zeros."""

    __slots__ = ("code", "ir", "kind")

    def __init__(self, code: Code, kind: str, found: Any):
        self.code, self.kind, self.ir = code, kind, found

    __add__, __sub__, __mul__, __truediv__, __floordiv__ = map(_operator, ("add", "sub", "mul", "div", "udiv"))
    __radd__, __rsub__, __rmul__, __rtruediv__ = (_operator(name, swapped=True) for name in ("add", "sub", "mul", "div"))
    __and__, __or__, __xor__, __lshift__, __rshift__ = map(_operator, ("and_", "or_", "xor", "shl", "lshr"))
    __lt__, __le__, __gt__, __ge__, __eq__, __ne__ = map(_comparison, ("<", "<=", ">", ">=", "==", "!="))  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Value:
        return Value(self.code, self.kind, self.code.b.fneg(self.ir))

    def __bool__(self) -> bool:
        raise TypeError("compiled code does not branch in Python; use where(…)")

    @property
    def is_float(self) -> bool:
        return self.kind.startswith("float")

    def _beside(self, other: Any) -> Any:
        """What stands beside it in an instruction."""
        if not isinstance(other, Value):
            return self.code.constant(self.kind, other).ir
        if other.kind != self.kind:
            raise TypeError(f"compiled code mixes {self.kind} and {other.kind}; convert one by .to(…)")
        return other.ir

    def to(self, kind: str) -> Value:
        """Convert to another kind of number."""
        if kind == self.kind:
            return self
        b, target, unsigned = self.code.b, TYPES[kind], self.kind.startswith("u")
        if self.is_float and kind.startswith("float"):
            found = b.fpext(self.ir, target) if kind == "float64" else b.fptrunc(self.ir, target)
        elif self.is_float:
            found = b.fptosi(self.ir, target)
        elif kind.startswith("float"):
            found = b.uitofp(self.ir, target) if unsigned else b.sitofp(self.ir, target)
        elif target.width <= TYPES[self.kind].width:
            found = self.ir if target.width == TYPES[self.kind].width else b.trunc(self.ir, target)
        else:
            found = b.zext(self.ir, target) if unsigned else b.sext(self.ir, target)
        return Value(self.code, kind, found)

    def bits(self) -> Value:
        """The bits of a float32 as an int32."""
        return Value(self.code, "int32", self.code.b.bitcast(self.ir, TYPES["int32"]))

    def real(self) -> Value:
        """The float32 that has these bits."""
        return Value(self.code, "float32", self.code.b.bitcast(self.ir, TYPES["float32"]))


class Array:
    """Numbers of one kind that lie one after the other in memory."""

    __slots__ = ("code", "ir", "kind")

    def __init__(self, code: Code, kind: str, found: Any):
        self.code, self.kind, self.ir = code, kind, found

    def _at(self, place: Any) -> Any:
        place = place.ir if isinstance(place, Value) else self.code.constant("int64", place).ir
        return self.code.b.gep(self.ir, [place])

    def __getitem__(self, place: Any) -> Value:
        return Value(self.code, self.kind, self.code.b.load(self._at(place)))

    def __setitem__(self, place: Any, value: Any) -> None:
        value = value if isinstance(value, Value) else self.code.constant(self.kind, value)
        self.code.b.store(value.to(self.kind).ir, self._at(place))


class Code:
    """A compiled function while it is made."""

    def __init__(self, name: str, kinds: Sequence[str]):
        """kinds: of its arguments; an array is given by its address."""
        self.module = ir.Module(name)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [TYPES[kind] for kind in kinds]), name)
        self.function.attributes.add("nounwind")
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.arguments = [Value(self, kind, each) for kind, each in zip(kinds, self.function.args, strict=True)]

    def compile(self) -> int:
        self.b.ret_void()
        return compile_module(str(self.module), self.function.name)

    def constant(self, kind: str, value: float) -> Value:
        if kind == "float32":  # rounded once, whatever it is
            value = float(np.float32(np.int64(value) if isinstance(value, int) else value))
        if not kind.startswith("float"):
            half = 1 << (TYPES[kind].width - 1)
            value = (int(value) + half) % (2 * half) - half  # modulo 2^n, as a signed number
        return Value(self, kind, ir.Constant(TYPES[kind], value if isinstance(value, int) else float(value)))

    def array(self, kind: str, address: Value) -> Array:
        return Array(self, kind, self.b.inttoptr(address.ir, TYPES[kind].as_pointer()))

    def variable(self, value: Value) -> Array:
        """A number that changes, at place 0."""
        made = self.stack_array(value.kind, 1)
        made[0] = value
        return made

    def stack_array(self, kind: str, size: int) -> Array:
        """Memory on the stack."""
        with self.b.goto_entry_block():
            return Array(self, kind, self.b.alloca(TYPES[kind], size))

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any) -> Iterator[Value]:
        """Run what is inside for each place from start to below stop."""
        b, block = self.b, self.function.append_basic_block
        first, last = (each.ir if isinstance(each, Value) else self.constant("int64", each).ir for each in (start, stop))
        body, after = block("body"), block("after")
        before = b.block
        b.cbranch(b.icmp_signed("<", first, last), body, after)
        b.position_at_end(body)
        place = b.phi(TYPES["int64"])
        place.add_incoming(first, before)
        yield Value(self, "int64", place)
        onward = b.add(place, ir.Constant(TYPES["int64"], 1), flags=("nsw",))
        place.add_incoming(onward, b.block)
        b.cbranch(b.icmp_signed("<", onward, last), body, after)
        b.position_at_end(after)

    @contextlib.contextmanager
    def while_taken(self, counter: Array, place: int, step: Value, stop: Value) -> Iterator[tuple[Value, Value]]:
        """Run what is inside for pieces of `step` places, first and beyond the last, which are taken from a counter that several
        threads share, as long as there are any below stop."""
        b, block = self.b, self.function.append_basic_block
        head, body, after = block("take"), block("taken"), block("none")
        b.branch(head)
        b.position_at_end(head)
        first = Value(self, "int64", b.atomic_rmw("add", counter._at(place), step.ir, "acq_rel"))
        b.cbranch((first < stop).ir, body, after)
        b.position_at_end(body)
        yield first, smaller(first + step, stop)
        b.branch(head)
        b.position_at_end(after)

    def intrinsic(self, name: str, *values: Value) -> Value:
        kind = values[0].kind
        signature = ir.FunctionType(TYPES[kind], [TYPES[kind]] * len(values))
        function = self.module.declare_intrinsic(f"llvm.{name}", [TYPES[kind]], signature)
        return Value(self, kind, self.b.call(function, [value.ir for value in values]))


# ---- the vocabulary on one coordinate, as NumPy defines it: NaN in, NaN out ------------------------------------------------
def sqrt(x: Value) -> Value:
    return x.code.intrinsic("sqrt", x)


def rsqrt(x: Value) -> Value:
    return 1 / sqrt(x)


def absolute(x: Value) -> Value:
    return x.code.intrinsic("fabs", x)


def exp(x: Value) -> Value:
    return x.code.intrinsic("exp", x)


def log(x: Value) -> Value:
    return x.code.intrinsic("log", x)


def where(condition: Value, yes: Value, no: Value) -> Value:
    return Value(yes.code, yes.kind, yes.code.b.select(condition.ir, yes.ir, yes._beside(no)))


def sign(x: Value) -> Value:
    one = x.code.constant(x.kind, 1)
    return where((x > 0) | (x < 0), x.code.intrinsic("copysign", one, x), x)


def minimum(a: Value, b: Value) -> Value:
    return where((a < b) | (a != a), a, b)


def maximum(a: Value, b: Value) -> Value:
    return where((a > b) | (a != a), a, b)


def clamp(x: Value, low: Value, high: Value) -> Value:
    return minimum(maximum(x, low), high)


WORDS: dict[str, Callable[..., Value]] = {
    "sqrt": sqrt, "rsqrt": rsqrt, "abs": absolute, "sign": sign, "exp": exp, "log": log, "minimum": minimum, "maximum": maximum,
    "clamp": clamp, "where": where,
}  # fmt: skip


def smaller(a: Value, b: Any) -> Value:
    """Of two integers."""
    b = b if isinstance(b, Value) else a.code.constant(a.kind, b)
    return where(a < b, a, b)


def loose_add(a: Value, b: Value) -> Value:
    """a + b where the order of a sum does not matter, so that a reduction is vectorised; nothing else is relaxed."""
    return Value(a.code, a.kind, a.code.b.fadd(a.ir, b.ir, flags=("reassoc",)))
