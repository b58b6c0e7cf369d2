"""The words of `rlx_optim.random`, compiled: one walk where NumPy takes a hundred."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from ...pointers import address
from ...random import MASK, ROTATIONS
from .codegen import Code

PARITY = 0x1BD11BDA


@functools.cache
def _compile_threefry() -> Callable[[int, int, int, int, int, int], None]:
    """Two words for each of n counters 0, 1, … and x1, of a key, into two arrays."""
    code = Code("threefry", ["int64"] * 6)
    *words, n, first, second = code.arguments
    key0, key1, x1 = (word.to("int32") for word in words)
    keys, one, two = (key0, key1, key0 ^ key1 ^ PARITY), code.array("int32", first), code.array("int32", second)
    with code.loop(0, n) as i:
        a, b = i.to("int32") + key0, x1 + key1
        for block in range(5):
            for r in ROTATIONS[block % 2]:
                a = a + b
                b = (b << r | b >> (32 - r)) ^ a
            a = a + keys[(block + 1) % 3]
            b = b + keys[(block + 2) % 3] + (block + 1)
        one[i], two[i] = a, b
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(code.compile())


def threefry(key0: np.ndarray, key1: np.ndarray, n: int, x1: int) -> tuple[np.ndarray, np.ndarray]:
    """`random.threefry` for keys (B, 1), n counters and a number."""
    first, second = (np.empty((len(key0), n), np.uint32) for _ in range(2))
    for a, b, one, two in zip(key0[:, 0], key1[:, 0], first, second, strict=True):
        _compile_threefry()(int(a), int(b), x1 & MASK, n, address(one), address(two))
    return first, second
