"""The few things numba's language lacks: memory by address, a call by address, and a sum the compiler may reorder.

Everything here is used inside compiled code.
"""

# mypy: ignore-errors

import math

import numba as nb
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _pointer_to(element):
    @intrinsic
    def at(typing_context, address):
        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return at


int64_at = _pointer_to(types.int64)
int32_at = _pointer_to(types.int32)
float64_at = _pointer_to(types.float64)
float32_at = _pointer_to(types.float32)


@intrinsic
def loose_add(typing_context, a, b):
    """a + b where the order of a sum does not matter, so that a reduction is vectorised; nothing else is relaxed."""

    def codegen(context, builder, signature, arguments):
        return builder.fadd(*arguments, flags=("reassoc",))

    return a(a, a), codegen


@intrinsic
def call(typing_context, function, address, columns, chunks, first, last, partial, scratch):
    """Call a compiled kernel by its address."""
    word = ir.IntType(64)

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [word] * 7)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


# ---- the vocabulary on one coordinate, as NumPy defines it: NaN in, NaN out ------------------------------------------------
_word = nb.njit(error_model="numpy", inline="always")


@_word
def sqrt(x):
    return math.sqrt(x)


@_word
def rsqrt(x):
    return type(x)(1) / math.sqrt(x)


@_word
def where(condition, yes, no):
    return yes if condition else no


@_word
def sign(x):
    return math.copysign(type(x)(1), x) if x > 0 or x < 0 else x


@_word
def minimum(a, b):
    return a if a < b or a != a else b


@_word
def maximum(a, b):
    return a if a > b or a != a else b


@_word
def clamp(x, low, high):
    return minimum(maximum(x, low), high)


@_word
def exp(x):
    return math.exp(x)


@_word
def log(x):
    return math.log(x)


@_word
def abs(x):
    return math.fabs(x)
