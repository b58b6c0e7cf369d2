"""State in fewer bits: which formats there are, what a slot is kept in, and the codes themselves.

`state_dtype` says how many bits; what a slot *means* says how they are used. A slot of 8 bits is two ordinary arrays, the codes
and, for every 128 neighbours of a row (the last block of a row may be shorter), a float32 scale s, their largest magnitude:

    with a sign (m)       x = m    code = round(127·√(|x|/s)) with the sign of x    back: x = s·code·|code|/127²    int8
    not below zero (v)    x = √v   code = round(255·√(x/s)), 1 at least             back: x = s·code²/255²          uint8

Scales are exact: an average with a decay of 0.999 moves less in a step than a rounded scale would show, and would never decay. A
block with a NaN or an infinity has such a scale, and is not finite as a whole. 16 bits are bfloat16, rounded up or down by chance
for the same reason; chance is a hash of the step and the place, which on a shard is that in the whole. All of it is in float32
arithmetic, on every engine, by the functions below, in the words of the engine E; compiled engines have them in their kernels.
Rules know nothing of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

BLOCK = 128  # neighbours with one scale
SMALL = 4096  # elements below which a tensor's state is exact
TINY = 1e-33  # a scale that is divided by

SIGNED, POSITIVE, HALF, EXACT = "signed", "positive", "half", ""


@dataclasses.dataclass(frozen=True)
class Codec:
    """How a slot is stored: the arrays that it consists of, and what makes them of its values and back in the words of an engine.

    format: the `state_dtype` that asks for it. signed: whether it is for values of both signs; None: for all. components: by what
    is added to the slot's name, the type of each array; "" is the arithmetic's own. top: the largest code. Compiled engines have
    `encode` and `decode` in their kernels under the codec's name (`engines/cpu/codecs`, `engines/triton_/kernels`).
    """

    name: str
    format: str
    components: Mapping[str, str]
    encode: Callable[..., dict[str, Any]]
    decode: Callable[..., Any]
    signed: bool | None = None
    top: float = 0.0


#: whether values may be below zero, by the first words of what a slot means; slots of other meanings stay exact
SIGNED_MEANINGS = (
    "first moment", "average of", "sum of steps", "sum of scaled gradients", "last gradient",
    "minus the last gradient", "curvature",
)  # fmt: skip
MEANINGS = dict.fromkeys(SIGNED_MEANINGS, True) | {"second moment": False, "largest second moment": False}


class Formats(dict[str, str]):
    """A format for each of some slots, by name."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def check_format(value: Any) -> Any:
    """A `state_dtype`: one format, or formats by slot."""
    if isinstance(value, Mapping):
        if all(isinstance(name, str) and each in FORMATS for name, each in value.items()):
            return Formats(value)
    elif isinstance(value, str) and value in FORMATS:
        return value
    raise ValueError


def is_signed(slot: Any) -> bool | None:
    """Whether a slot's values may be below zero, by what they mean; None: it stays exact."""
    whole = slot.drop == () and not slot.factor and not slot.eye and not slot.fill
    return next((signed for words, signed in MEANINGS.items() if whole and f"{slot.meaning} ".startswith(f"{words} ")), None)


def storage_of(slot: Any, wanted: str) -> str:
    """The codec of a slot for the format that is wanted: small tensors and vectors stay exact."""
    signed = is_signed(slot)
    if signed is None or len(slot.shape) < 2 or math.prod(slot.shape) < SMALL:
        return EXACT
    return next(codec.name for codec in CODECS.values() if codec.format == wanted and codec.signed in (None, signed))


def assign_storage(slots: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """Slots with what they are kept in."""
    if wanted == "float32":
        return slots
    each = wanted if isinstance(wanted, Mapping) else dict.fromkeys(slots, wanted)
    return {name: dataclasses.replace(slot, storage=storage_of(slot, each.get(name, "float32"))) for name, slot in slots.items()}


def unsupported_reason(slots: Mapping[str, Any], wanted: Any) -> str | None:
    """What is wrong with formats by slot for a rule that has these slots; None: nothing."""
    for name in wanted if isinstance(wanted, Mapping) else ():
        if name not in slots:
            return f"state_dtype names {name!r}, which is no slot of this rule; it has {', '.join(map(repr, slots)) or 'none'}"
        if wanted[name] != "float32" and is_signed(slots[name]) is None:
            return f"state_dtype: {name!r} ({slots[name].meaning or 'of no meaning that others know'}) stays exact; leave it out"
    return None


# ---- the arrays of a slot -------------------------------------------------------------------------------------------------
def components(slot: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of the arrays that a slot is kept in, by what is added to its name."""
    shape = slot.shape
    scales = (*shape[:-1], -(-shape[-1] // BLOCK)) if shape else ()
    return {end: (scales if end else shape, dtype) for end, dtype in COMPONENTS[slot.storage].items()}


def count_bytes(slot: Any, own: int = 4) -> int:
    """How many bytes a slot takes; own: those of a number in the arithmetic's own type."""
    size = {"": own, "bfloat16": 2, "int8": 1, "uint8": 1, "float32": 4}
    return sum(math.prod(shape) * size[dtype] for shape, dtype in components(slot).values())


class Quantized:
    """A slot in fewer bits: its components, as arrays of whatever library. A bfloat16 is a uint16 where the library has none.
    first: which place of a whole tensor its first coordinate is; of a shard it may be another than 0."""

    __slots__ = ("codes", "first", "scale", "storage")

    def __init__(self, storage: str, codes: Any, scale: Any = None, *, first: int = 0):
        self.storage, self.codes, self.scale, self.first = storage, codes, scale, first

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def components(self) -> dict[str, Any]:
        """By what is added to the slot's name."""
        return {end: self.scale if end else self.codes for end in COMPONENTS[self.storage]}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.components.values())


def flatten_components(state: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by name, of slots by name."""
    return {
        name + end: part
        for name, each in state.items()
        for end, part in (each.components if isinstance(each, Quantized) else {"": each}).items()
    }


def make_buffer(E: Any, slot: Any, value: Any) -> Any:
    """A buffer of an engine's making, with this value in it."""
    buffer = E.allocate(slot)
    fill_buffer(E, buffer, value)
    return buffer


def fill_buffer(E: Any, buffer: Any, value: Any) -> None:
    """Leave a value in a buffer of an engine's making."""
    if isinstance(buffer, Quantized):
        E.store_encoded(buffer, value, 0)
    else:
        buffer[...] = value


# ---- codes, in the words of an engine -------------------------------------------------------------------------------------
class Words:
    """What is asked of an array library, here NumPy. Engines are such."""

    xp: Any = np
    #: the types of parts; NumPy has no bfloat16
    types: ClassVar[Mapping[str, Any]] = {"bfloat16": np.uint16, "int8": np.int8, "uint8": np.uint8, "float32": np.float32}

    def cast(self, X: Any, dtype: str) -> Any:
        return X.astype(dtype)

    def row_max(self, X: Any) -> Any:
        """The largest magnitude along the last axis, of such; NaN if there is one."""
        return X.max(-1)

    def floor(self, X: Any, low: float) -> Any:
        return self.xp.maximum(X, low)

    def to_half(self, X: Any) -> Any:
        """Float32 numbers that are bfloat16, as such."""
        return (X.view(np.uint32) >> 16).astype(np.uint16)

    def from_half(self, X: Any) -> Any:
        return (X.astype(np.uint32) << 16).view(np.float32)

    def counter(self, n: int) -> Any:
        return self.xp.arange(n, dtype=self.xp.int64)

    def word(self, n: Any) -> Any:
        return n if isinstance(n, int) else self.cast(n, "int64")


NUMPY = Words()


def encode(E: Any, storage: str, x: Any, t: Any, first: int = 0) -> dict[str, Any]:
    """The components of values, by what is added to the slot's name. t, first: the step and the first place, by which bfloat16 is
    rounded."""
    codec = CODECS[storage]
    return codec.encode(codec, E, E.cast(x, "float32"), t, first)


def decode(E: Any, coded: Quantized) -> Any:
    """The values, in float32."""
    codec = CODECS[coded.storage]
    return codec.decode(codec, E, *coded.components.values())


def to_half(codec: Codec, E: Any, x: Any, t: Any, first: int) -> dict[str, Any]:
    return {"": E.to_half(round_half(E, x, t, first))}


def from_half(codec: Codec, E: Any, codes: Any) -> Any:
    return E.from_half(codes)


def to_codes(codec: Codec, E: Any, x: Any, t: Any, first: int) -> dict[str, Any]:
    x = x if codec.signed else E.xp.sqrt(x)
    scale = block_max(E, x)
    code = E.xp.round(codec.top * E.xp.sqrt(abs(x) * repeat_scales(E, 1.0 / E.floor(scale, TINY), x.shape)))
    code = E.xp.where(x < 0, -code, code) if codec.signed else E.floor(code, 1.0)
    code = E.xp.where(code == code, code, 0.0)  # of what is not finite, as the scale says
    return {"": E.cast(code, codec.components[""]), "_scale": scale}


def from_codes(codec: Codec, E: Any, codes: Any, scale: Any) -> Any:
    code = E.cast(codes, "float32")
    x = repeat_scales(E, scale, codes.shape) * (code * abs(code) * codec.top**-2)
    return x if codec.signed else x * x


def block_max(E: Any, x: Any) -> Any:
    """The largest magnitude of each block."""
    whole = x.shape[-1] // BLOCK * BLOCK
    blocks = [abs(x[..., :whole]).reshape(*x.shape[:-1], whole // BLOCK, BLOCK)] if whole else []
    blocks += [abs(x[..., whole:])[..., None, :]] if whole < x.shape[-1] else []
    found = [E.row_max(block) for block in blocks]
    return found[0] if len(found) == 1 else E.xp.concatenate(found, -1)


def repeat_scales(E: Any, scale: Any, shape: Any) -> Any:
    """A number for each coordinate, of one for each block."""
    wide = E.xp.broadcast_to(scale[..., None], (*scale.shape, BLOCK))
    return wide.reshape(*scale.shape[:-1], scale.shape[-1] * BLOCK)[..., : shape[-1]]


def round_half(E: Any, x: Any, t: Any, first: int) -> Any:
    """Float32 numbers that are bfloat16: the next above or below, the nearer the likelier."""
    bits = x.reshape(-1).view(E.xp.int32)
    noisy = ((bits + E.cast(hash_bits(E, t, bits.shape[0], first), "int32")) & -65536).view(E.xp.float32).reshape(x.shape)
    return E.xp.where(x == x, noisy, x)


def hash_bits(E: Any, t: Any, n: int, first: int = 0, key: int = 0, places: Any = None) -> Any:
    """16 random bits for each of n places from the first on, at step t: a hash of both, and of a key. places: where they do not
    follow one another."""
    mask = E.word(0xFFFFFFFF)
    places = E.counter(n) + E.word(first) if places is None else places
    z = ((places * E.word(0x9E3779B1)) & mask) ^ ((E.word(t) * E.word(0x85EBCA77)) & mask) ^ E.word(key)
    return (((z ^ (z >> 15)) * E.word(0x2C1B3C6D)) & mask) >> 16


# ---- the codecs -----------------------------------------------------------------------------------------------------------
#: a further format is another row, with its two functions; and their text in the kernels of each compiled engine
CODECS = {
    codec.name: codec
    for codec in (
        Codec(EXACT, "float32", {"": ""}, lambda codec, E, x, t, first: {"": x}, lambda codec, E, x: x),
        Codec(HALF, "bfloat16", {"": "bfloat16"}, to_half, from_half),
        Codec(SIGNED, "int8", {"": "int8", "_scale": "float32"}, to_codes, from_codes, signed=True, top=127.0),
        Codec(POSITIVE, "int8", {"": "uint8", "_scale": "float32"}, to_codes, from_codes, signed=False, top=255.0),
    )
}
FORMATS = tuple(dict.fromkeys(codec.format for codec in CODECS.values()))
COMPONENTS = {codec.name: codec.components for codec in CODECS.values()}
TOP = {codec.name: codec.top for codec in CODECS.values() if codec.top}
STORED = {codec.components[""]: codec.name for codec in CODECS.values() if codec.name}  # by the type of the codes
BESIDE = {end for parts in COMPONENTS.values() for end in parts if end}  # what the names of further arrays end in
