"""Counter-based noise on the device: `rlx_optim.random` in Triton's language, word for word."""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ...random import KINDS, ROTATIONS
from .products import even, known

BLOCK = 1024
TURN = tl.constexpr(2.0 * math.pi)
FIRST, SECOND = (tl.constexpr(rotations) for rotations in ROTATIONS)


@triton.jit
def four(x0, x1, rotations: tl.constexpr):
    for k in tl.static_range(4):
        x0 = x0 + x1
        x1 = ((x1 << rotations[k]) | (x1 >> (32 - rotations[k]))) ^ x0
    return x0, x1


@triton.jit
def words(k0, k1, x0, x1):
    """Threefry-2x32, 20 rounds, on uint32, which wraps by itself."""
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = x0 + k0, x1 + k1
    x0, x1 = four(x0, x1, FIRST)
    x0, x1 = x0 + k1, x1 + k2 + 1
    x0, x1 = four(x0, x1, SECOND)
    x0, x1 = x0 + k2, x1 + k0 + 2
    x0, x1 = four(x0, x1, FIRST)
    x0, x1 = x0 + k0, x1 + k1 + 3
    x0, x1 = four(x0, x1, SECOND)
    x0, x1 = x0 + k1, x1 + k2 + 4
    x0, x1 = four(x0, x1, FIRST)
    return x0 + k2, x1 + k0 + 5


@triton.jit(do_not_specialize=("t", "kind", "n", "draws"))
def fill(
    OUT, KEYS, t, kind, n, draws, EVEN: tl.constexpr, COUNTED: tl.constexpr, NORMAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of a tensor's draws; a pair of words makes two normal numbers, `draws` apart. COUNTED: t is on the device. EVEN:
    n and draws are."""
    n, draws = known(n, EVEN), known(draws, EVEN)
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k0 = tl.load(KEYS + 4 * b).to(tl.uint32) + (tl.load(KEYS + 4 * b + 1).to(tl.uint32) << 16)
    k1 = tl.load(KEYS + 4 * b + 2).to(tl.uint32) + (tl.load(KEYS + 4 * b + 3).to(tl.uint32) << 16)
    zero = tl.zeros((BLOCK,), tl.uint32)
    step = tl.load(t).to(tl.int64) if COUNTED else t
    first, second = words(k0, k1, i.to(tl.uint32), zero + (4 * step + kind).to(tl.uint32))
    a = (first >> 8).to(tl.float32) * 5.9604644775390625e-08 + 2.98023223876953125e-08
    c = (second >> 8).to(tl.float32) * 5.9604644775390625e-08 + 2.98023223876953125e-08
    out = OUT + b * n
    if NORMAL:
        radius, angle = tl.sqrt(-2.0 * tl.log(a)), TURN * c
        tl.store(out + i, radius * tl.cos(angle), mask=(i < draws) & (i < n))
        tl.store(out + draws + i, radius * tl.sin(angle), mask=(i < draws) & (i < n - draws))
    else:
        tl.store(out + i, a, mask=i < n)


def draw(kind: str, keys: torch.Tensor, t: int | torch.Tensor, shape: Any) -> torch.Tensor:
    """Noise of a stack's shape; row b of `keys` (B, 4) is its b-th tensor's."""
    n = math.prod(shape[1:])
    draws = (n + 1) // 2 if kind == "normal" else n
    out = torch.empty(shape, dtype=torch.float32, device=keys.device)
    how = (even(n, draws), torch.is_tensor(t), kind == "normal", BLOCK)
    fill[(-(-draws // BLOCK), shape[0])](out, keys, t, KINDS[kind], n, draws, *how, num_warps=4)
    return out
