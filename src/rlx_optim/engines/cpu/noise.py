"""The words of `rlx_optim.random`, compiled: one walk where NumPy takes a hundred."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types

from ...random import MASK, ROTATIONS
from .cache import compiled

PARITY, TURNS = np.uint32(0x1BD11BDA), tuple(tuple(np.uint32(r) for r in four) for four in ROTATIONS)
WIDTH = np.uint32(32)


def _draw(key0, key1, x1, first, second):
    """Two words for each of the counters 0, 1, … and x1."""
    keys = (key0, key1, np.uint32(key0 ^ key1 ^ PARITY))
    for i in range(len(first)):
        a, b = np.uint32(np.uint32(i) + key0), np.uint32(x1 + key1)
        for block in range(5):
            for r in TURNS[block % 2]:
                a = np.uint32(a + b)
                b = np.uint32((np.uint32(b << r) | np.uint32(b >> (WIDTH - r))) ^ a)
            a = np.uint32(a + keys[(block + 1) % 3])
            b = np.uint32(b + keys[(block + 2) % 3] + np.uint32(block + 1))
        first[i], second[i] = a, b


@functools.cache
def _drawing() -> Any:
    word, words = types.uint32, types.Array(types.uint32, 1, "C")
    return compiled(njit, types.void(word, word, word, words, words), nogil=True)(_draw)


def threefry(key0: np.ndarray, key1: np.ndarray, n: int, x1: int) -> tuple[np.ndarray, np.ndarray]:
    """`random.threefry` for keys (B, 1), n counters and a number."""
    first, second = (np.empty((len(key0), n), np.uint32) for _ in range(2))
    for a, b, one, two in zip(key0[:, 0], key1[:, 0], first, second, strict=True):
        _drawing()(np.uint32(a), np.uint32(b), np.uint32(x1 & MASK), one, two)
    return first, second
