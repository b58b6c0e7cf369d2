"""State in fewer bits and parameters of 16 bits, in compiled code: `storage` and `rounding`, in 32-bit words."""

from __future__ import annotations

from ...storage import POSITIVE, SIGNED, TOP
from .codegen import Value, sqrt, where

WHOLE = 12582912.0  # 1.5 · 2^23: added to a small number, it leaves the nearest integer in the last bits, ties to even
SIZE, SIGN = 0x7FFFFFFF, 0x80000000
INFINITE = 0x7F800000
NORMAL = 0x38800000  # 2^-14, the least normal number of float16


def size_of(x: Value) -> Value:
    return (x.bits() & SIZE).real()


def nearest_code(x: Value, kind: str) -> Value:
    return (x + WHOLE).bits().to(kind)


# ---- state ----------------------------------------------------------------------------------------------------------------
def from_signed(code: Value, scale: Value) -> Value:
    c = code.to("float32")
    return scale * (c * size_of(c) * TOP[SIGNED] ** -2)


def to_signed(x: Value, inverse: Value) -> Value:
    c = sqrt(size_of(x) * inverse)
    return nearest_code((c.bits() | x.bits() & SIGN).real(), "int8")


def from_positive(code: Value, scale: Value) -> Value:
    c = code.to("float32")
    x = scale * (c * c * TOP[POSITIVE] ** -2)
    return x * x


def to_positive(x: Value, inverse: Value) -> Value:
    c = sqrt(x * inverse)
    return nearest_code(where(c > 1, c, c.code.constant("float32", 1)), "uint8")


def to_half(x: Value, noise: Value) -> Value:
    """Of state, by chance: what is beyond the largest number becomes infinity."""
    return (where(x == x, x.bits() + noise, x.bits()) >> 16).to("uint16")


def from_bfloat16(code: Value) -> Value:
    return (code.to("int32") << 16).real()


def larger(most: Value, x: Value) -> Value:
    """The larger magnitude, as its bits: in their order NaN is above all."""
    bits = x.bits() & SIZE
    return where(bits > most, bits, most)


# ---- parameters and gradients ----------------------------------------------------------------------------------------------
def sixteen_bits(x: Value, found: Value, largest: int, infinity: int, quiet: int) -> Value:
    """A number of 16 bits of its size, where x is finite; else an infinity or NaN. With the sign of x."""
    size = x.bits() & SIZE
    found = where(found < largest, found, x.code.constant("int32", largest))
    odd = where(size > INFINITE, x.code.constant("int32", quiet), x.code.constant("int32", infinity))
    found = where(size < INFINITE, found, odd)
    return (found | (x.bits() >> 16) & 0x8000).to("uint16")


def to_bfloat16(x: Value, noise: Value) -> Value:
    """`rounding.rounded`, as the next."""
    return sixteen_bits(x, ((x.bits() & SIZE) + noise) >> 16, 0x7F7F, 0x7F80, 0x7FC0)


def to_float16(x: Value, noise: Value) -> Value:
    size = x.bits() & SIZE
    units = (where(size < NORMAL, size.real(), x.code.constant("float32", 0)) * 2.0**40).to("int32")
    usual = ((size + (noise >> 3)) >> 13) - 0x1C000
    return sixteen_bits(x, where(size < NORMAL, (units + noise) >> 16, usual), 0x7BFF, 0x7C00, 0x7E00)


def near_bfloat16(x: Value) -> Value:
    """The nearest, ties to even; infinity beyond."""
    size = x.bits() & SIZE
    return sixteen_bits(x, (size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F80, 0x7F80, 0x7FC0)


def near_float16(x: Value) -> Value:
    size = x.bits() & SIZE
    units = where(size < NORMAL, size.real(), x.code.constant("float32", 0)) * 2.0**24
    usual = ((size + 0xFFF + ((size >> 13) & 1)) >> 13) - 0x1C000
    return sixteen_bits(x, where(size < NORMAL, (units + WHOLE).bits() - 0x4B400000, usual), 0x7C00, 0x7C00, 0x7E00)


def from_float16(code: Value) -> Value:
    bits = code.to("int32")
    size = (bits & 0x7FFF) << 13
    found = where(size < 0x0F800000, (size.real() * 2.0**112).bits(), size | INFINITE)
    return (found | (bits & 0x8000) << 16).real()


def upper_half(x: Value) -> Value:
    return (x.bits() >> 16).to("uint16")


def lower_half(x: Value) -> Value:
    return x.bits().to("uint16")


def join_halves(upper: Value, low: Value) -> Value:
    return (upper.to("int32") << 16 | low.to("int32")).real()


# ---- chance ---------------------------------------------------------------------------------------------------------------
def scramble(count: Value, factor: int) -> Value:
    """A product modulo 2^32: what `hash_bits` is given, of the place and of the step."""
    return count.to("int32") * factor


def hash_bits(place: Value, tick: Value) -> Value:
    """16 random bits: `storage.hash_bits`."""
    z = place ^ tick
    return (z ^ (z >> 15)) * 0x2C1B3C6D >> 16


DECODE = {"bfloat16": from_bfloat16, "float16": from_float16}
BY_CHANCE = {"bfloat16": to_bfloat16, "float16": to_float16}
NEAREST_OF = {"bfloat16": near_bfloat16, "float16": near_float16}
