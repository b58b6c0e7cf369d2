"""The few things numba's language lacks: memory by address, a call by address, and a sum the compiler may reorder.

Everything here is used inside compiled code.
"""

# mypy: ignore-errors

import math

import numba as nb
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...storage import BLOCK, POSITIVE, SIGNED, TOP


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
int8_at = _pointer_to(types.int8)
uint8_at = _pointer_to(types.uint8)
uint16_at = _pointer_to(types.uint16)


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


# ---- state in fewer bits: `storage` in 32-bit words, which numba's own integers would widen --------------------------------
_word32, _real = ir.IntType(32), ir.FloatType()


def _f(value):
    return ir.Constant(_real, value)


def _i(value):
    return ir.Constant(_word32, value)


def _bits(b, x):
    return b.bitcast(x, _word32)


def _size(b, x):
    return b.bitcast(b.and_(_bits(b, x), _i(0x7FFFFFFF)), _real)


def _code(b, x, width):
    """The nearest integer, ties to even: the last bits of what a large number added leaves."""
    return b.trunc(_bits(b, b.fadd(x, _f(12582912.0))), ir.IntType(width))


def _root(b, x):
    return b.call(b.module.declare_intrinsic("llvm.sqrt", [_real]), [x])


def _of_two(result, first, second):
    """A function of two values for compiled code, from one that builds its instructions."""

    def made(build):
        @intrinsic
        def function(typing_context, a, b):
            def codegen(context, builder, signature, arguments):
                return build(builder, *arguments)

            return result(first, second), codegen

        return function

    return made


@_of_two(types.float32, types.int8, types.float32)
def from_signed(b, code, scale):
    c = b.sitofp(code, _real)
    return b.fmul(scale, b.fmul(b.fmul(c, _size(b, c)), _f(TOP[SIGNED] ** -2)))


@_of_two(types.int8, types.float32, types.float32)
def to_signed(b, x, inverse):
    c = _root(b, b.fmul(_size(b, x), inverse))
    return _code(b, b.bitcast(b.or_(_bits(b, c), b.and_(_bits(b, x), _i(0x80000000))), _real), 8)


@_of_two(types.float32, types.uint8, types.float32)
def from_positive(b, code, scale):
    c = b.uitofp(code, _real)
    x = b.fmul(scale, b.fmul(b.fmul(c, c), _f(TOP[POSITIVE] ** -2)))
    return b.fmul(x, x)


@_of_two(types.uint8, types.float32, types.float32)
def to_positive(b, x, inverse):
    c = _root(b, b.fmul(x, inverse))
    return _code(b, b.select(b.fcmp_ordered(">", c, _f(1.0)), c, _f(1.0)), 8)


@_of_two(types.uint16, types.float32, types.int32)
def to_half(b, x, noise):
    bits = _bits(b, x)
    there = b.select(b.fcmp_ordered("==", x, x), b.add(bits, noise), bits)
    return b.trunc(b.lshr(there, _i(16)), ir.IntType(16))


@_of_two(types.float32, types.uint16, types.float32)
def from_half(b, code, scale):
    return b.bitcast(b.shl(b.zext(code, _word32), _i(16)), _real)


def _half_of(b, x, there, largest, infinity, quiet):
    """A number of 16 bits of its size, where x is finite; else an infinity or NaN. With the sign of x."""
    size = b.and_(_bits(b, x), _i(0x7FFFFFFF))
    there = b.select(b.icmp_signed("<", there, _i(largest)), there, _i(largest))
    odd = b.select(b.icmp_signed(">", size, _i(0x7F800000)), _i(quiet), _i(infinity))
    there = b.select(b.icmp_signed("<", size, _i(0x7F800000)), there, odd)
    return b.trunc(b.or_(there, b.and_(b.lshr(_bits(b, x), _i(16)), _i(0x8000))), ir.IntType(16))


@_of_two(types.uint16, types.float32, types.int32)
def to_bfloat16(b, x, noise):
    """`rounding.rounded`, as the two below."""
    size = b.and_(_bits(b, x), _i(0x7FFFFFFF))
    return _half_of(b, x, b.lshr(b.add(size, noise), _i(16)), 0x7F7F, 0x7F80, 0x7FC0)


@_of_two(types.uint16, types.float32, types.int32)
def to_float16(b, x, noise):
    size = b.and_(_bits(b, x), _i(0x7FFFFFFF))
    tiny = b.icmp_signed("<", size, _i(0x38800000))
    units = b.fptosi(b.fmul(b.select(tiny, _size(b, x), _f(0.0)), _f(2.0**40)), _word32)
    small = b.lshr(b.add(units, noise), _i(16))
    usual = b.sub(b.lshr(b.add(size, b.lshr(noise, _i(3))), _i(13)), _i(0x1C000))
    return _half_of(b, x, b.select(tiny, small, usual), 0x7BFF, 0x7C00, 0x7E00)


@_of_two(types.uint16, types.float32, types.int32)
def near_bfloat16(b, x, nothing):
    """The nearest, ties to even; infinity beyond."""
    size = b.and_(_bits(b, x), _i(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, _i(16)), _i(1))
    return _half_of(b, x, b.lshr(b.add(b.add(size, _i(0x7FFF)), odd), _i(16)), 0x7F80, 0x7F80, 0x7FC0)


@_of_two(types.uint16, types.float32, types.int32)
def near_float16(b, x, nothing):
    size = b.and_(_bits(b, x), _i(0x7FFFFFFF))
    tiny = b.icmp_signed("<", size, _i(0x38800000))
    units = b.fmul(b.select(tiny, _size(b, x), _f(0.0)), _f(2.0**24))
    small = b.sub(_bits(b, b.fadd(units, _f(12582912.0))), _i(0x4B400000))
    odd = b.and_(b.lshr(size, _i(13)), _i(1))
    usual = b.sub(b.lshr(b.add(b.add(size, _i(0xFFF)), odd), _i(13)), _i(0x1C000))
    return _half_of(b, x, b.select(tiny, small, usual), 0x7C00, 0x7C00, 0x7E00)


@_of_two(types.float32, types.uint16, types.float32)
def from_float16(b, code, nothing):
    bits = b.zext(code, _word32)
    size = b.shl(b.and_(bits, _i(0x7FFF)), _i(13))
    usual = _bits(b, b.fmul(b.bitcast(size, _real), _f(2.0**112)))
    found = b.select(b.icmp_signed("<", size, _i(0x0F800000)), usual, b.or_(size, _i(0x7F800000)))
    return b.bitcast(b.or_(found, b.shl(b.and_(bits, _i(0x8000)), _i(16))), _real)


@_of_two(types.int32, types.int32, types.int32)
def crossed(b, word, key):
    return b.xor(word, key)


@_of_two(types.uint16, types.float32, types.int32)
def half_at(b, x, shift):
    """16 bits of a float32, from so many up."""
    return b.trunc(b.lshr(_bits(b, x), shift), ir.IntType(16))


@_of_two(types.float32, types.uint16, types.uint16)
def of_halves(b, upper, low):
    return b.bitcast(b.or_(b.shl(b.zext(upper, _word32), _i(16)), b.zext(low, _word32)), _real)


@_of_two(types.int32, types.int64, types.int64)
def spun(b, count, factor):
    """A product modulo 2^32: what `chance` is given, of the place and of the step."""
    return b.mul(b.trunc(count, _word32), b.trunc(factor, _word32))


@_of_two(types.int32, types.int32, types.int32)
def onward(b, word, step):
    """The word of the next place: a sum, so that the loop's own counter is one of 32 bits."""
    return b.add(word, step)


@_of_two(types.int32, types.int32, types.int32)
def chance(b, place, t):
    z = b.xor(place, t)
    return b.lshr(b.mul(b.xor(z, b.lshr(z, _i(15))), _i(0x2C1B3C6D)), _i(16))


@_of_two(types.int32, types.int32, types.float32)
def larger(b, most, x):
    """The larger magnitude, as its bits: in their order NaN is above all."""
    bits = b.and_(_bits(b, x), _i(0x7FFFFFFF))
    return b.select(b.icmp_signed(">", bits, most), bits, most)


@_of_two(types.float32, types.int32, types.int32)
def magnitude(b, most, nothing):
    return b.bitcast(most, _real)


@intrinsic
def room(typing_context):
    """Memory for a block of float32, on the stack."""

    def codegen(context, builder, signature, arguments):
        block = ir.ArrayType(_real, BLOCK)
        with builder.goto_entry_block():
            place = builder.alloca(block)
        return builder.bitcast(place, _real.as_pointer())

    return types.CPointer(types.float32)(), codegen


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
