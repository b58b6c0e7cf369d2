"""Parameters of 16 bits: how a step, computed in float32, gets into them.

    nearest       the nearest number of the type, as everywhere. A step below half a unit in the last place is lost
    stochastic    the next above or below, the nearer the likelier: on average p moves as float32 would
    exact         the low 16 bits of a float32 parameter are kept in the state (`LOW`); p is its upper half, bit for bit

Chance is `storage.hash_bits`, of the step, the element's index in the whole parameter, and a key, which stands for the rule's
seed (0 where it has none) and the parameter's name: neither order nor sharding, resuming or the engine changes it. What is finite
stays so: beyond the largest number of a type comes no infinity. NaN and infinities stay what they are.
Written in the words of an engine E; compiled engines have the same in their kernels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from . import random
from .storage import hash_bits

STOCHASTIC, NEAREST, EXACT = ROUNDINGS = ("stochastic", "nearest", "exact")
LOW = "low"  # the name of the low half in the state
#: the largest number of each type
LARGEST = {"bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0}
SMALLEST = 2.0**-14  # below it numbers of float16 are multiples of 2^-24


@dataclasses.dataclass(frozen=True, eq=False)
class ParamRounding:
    """A tensor that is a parameter of 16 bits, or a part of one. kind: its type. key: of chance. first: the index of its first
    element in the whole parameter, where the others follow it; None where they do not. low: its low half, if it has one."""

    kind: str
    rounding: str
    key: int = 0
    first: int | None = 0
    low: Any = None


def key_of(seed: int | None, name: str) -> int:
    """The word that stands for a seed and a name."""
    return random.key(seed or 0, name)[0]


def rounded(E: Any, x: Any, kind: str, t: Any, key: int, first: int = 0, places: Any = None) -> Any:
    """Float32 numbers that are of a type, by chance. first: the place in the whole parameter of the first element, which the
    others follow; places: of each, where they do not."""
    flat = x.reshape(-1)
    noise = E.cast(hash_bits(E, t, flat.shape[0], first, key, places), "int32")
    bits, size = flat.view(E.xp.int32), abs(flat)
    if kind == "bfloat16":
        near = ((bits + noise) & -65536).view(E.xp.float32)
    else:
        near = ((bits + (noise >> 3)) & -8192).view(E.xp.float32)
        count = E.cast(E.xp.where(size < SMALLEST, size, 0.0) * 2.0**40, "int32")  # in units of 2^-40
        small = E.cast((count + noise) >> 16, "float32") * 2.0**-24
        near = E.xp.where(size < SMALLEST, E.xp.where(flat < 0, -small, small), near)
    near = E.xp.clip(near, -LARGEST[kind], LARGEST[kind])
    return E.xp.where(size < math.inf, near, flat).reshape(x.shape)
