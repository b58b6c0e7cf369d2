"""Counter-based random numbers, the same on every engine.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written in shifts, sums
and xor of 32-bit words, so that one text runs on NumPy, torch and JAX. A draw depends on (key, t, kind, position) alone, so
neither call order nor stacking, sharding or resuming changes it. A key is kept as four numbers below 2^16, which every floating
type of state holds exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

MASK = 0xFFFFFFFF
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
KINDS = {"normal": 0, "uniform": 1}


def key(seed: int, name: str) -> tuple[int, int]:
    """The two words that stand for (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def split_key(key: Sequence[int]) -> list[int]:
    """A key as it is kept."""
    return [half for word in key for half in (word & 0xFFFF, word >> 16)]


def words(E: Any, keys: Any) -> tuple[Any, Any]:
    """The two words of each key that is kept (B, 4), as columns."""
    first, second = (E.word(keys[..., i : i + 1]) + 0x10000 * E.word(keys[..., i + 1 : i + 2]) for i in (0, 2))
    return first, second


def threefry(key0: Any, key1: Any, x0: Any, x1: Any, mask: Any = MASK) -> tuple[Any, Any]:
    """Two random words for each counter (x0, x1). Words are integers below 2**32 in any wider type, or uint32."""
    keys = (key0, key1, (key0 ^ key1 ^ 0x1BD11BDA) & mask)
    x0, x1 = (x0 + keys[0]) & mask, (x1 + keys[1]) & mask
    for block in range(5):
        for r in ROTATIONS[block % 2]:
            x0 = (x0 + x1) & mask
            x1 = (((x1 << r) & mask) | (x1 >> (32 - r))) ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & mask
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & mask
    return x0, x1


def uniforms(E: Any, kind: str, keys: Any, t: Any, n: int) -> tuple[Any, Any]:
    """Two streams of n numbers in (0, 1), as float arrays of the engine, for each of the keys (B, 4)."""
    first, second = E.threefry(*words(E, keys), n, 4 * t + KINDS[kind])
    return E.to_real(first >> 8) * 2.0**-24 + 2.0**-25, E.to_real(second >> 8) * 2.0**-24 + 2.0**-25


def draw(E: Any, kind: str, keys: Any, t: Any, n: int) -> Any:
    """n numbers for each of the keys (B, 4): standard normal (Box–Muller) or uniform in (0, 1)."""
    if kind == "uniform":
        return uniforms(E, kind, keys, t, n)[0]
    a, b = uniforms(E, kind, keys, t, (n + 1) // 2)
    radius, angle = E.sqrt(-2.0 * E.log(a)), 2.0 * math.pi * b
    return E.concatenate((radius * E.cos(angle), radius * E.sin(angle)))[..., :n]
