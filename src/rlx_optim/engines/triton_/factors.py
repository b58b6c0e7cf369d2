"""Cholesky factors of a few rows and columns, inverted, a program each: `linalg.whitening` makes large ones by products."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: rows and columns of a tile, and of what one program takes
TILE, WIDTH = 32, 64


@triton.jit
def inverted(A, low, W: tl.constexpr):
    """N^-1 of A = NN' (W, W). A pivot that is not above `low` is left out."""
    i = tl.arange(0, W)
    B = tl.where(i[:, None] == i[None, :], A * 0 + 1, A * 0)
    for k in range(W):
        column = tl.sum(tl.where(i[None, :] == k, A, 0.0), 1)
        row = tl.sum(tl.where(i[:, None] == k, A, 0.0), 0)  # the same, laid out for the other axis
        pivot, bar = tl.sum(tl.where(i == k, row, 0.0), 0), tl.sum(tl.where(i == k, low, 0.0), 0)
        root = tl.where(pivot > bar, 1 / tl.sqrt(tl.maximum(pivot, bar)), 0.0)
        column, row = tl.where(i > k, column * root, 0.0), tl.where(i > k, row * root, 0.0)
        A -= column[:, None] * row[None, :]
        found = tl.sum(tl.where(i[:, None] == k, B, 0.0), 0) * root
        B = tl.where(i[:, None] == k, found[None, :], B - column[:, None] * found[None, :])
    return B


@triton.jit
def factor(S, LOW, C, n, sb, sr, lb, cb, cr, BOTH: tl.constexpr, W: tl.constexpr):
    """C = N^-1 of S = NN' (n, n), of one tile, or (BOTH) of two by two; rows are contiguous. LOW as above."""
    b = tl.program_id(0).to(tl.int64)
    S, LOW, C = S + b * sb, LOW + b * lb, C + b * cb
    i, j = tl.arange(0, W), W + tl.arange(0, W)
    inside = (i[:, None] < n) & (i[None, :] < n)
    A = tl.load(S + i[:, None] * sr + i[None, :], mask=inside, other=0.0)
    one = inverted(A, tl.load(LOW + i, mask=i < n, other=1.0), W)
    tl.store(C + i[:, None] * cr + i[None, :], one, mask=inside)
    if BOTH:
        beside, beyond = (j[:, None] < n) & (i[None, :] < n), (j[:, None] < n) & (j[None, :] < n)
        N = tl.load(S + j[:, None] * sr + i[None, :], mask=beside, other=0.0)
        N = tl.dot(N, tl.trans(one), input_precision="tf32x3")
        A = tl.load(S + j[:, None] * sr + j[None, :], mask=beyond, other=0.0)
        two = inverted(A - tl.dot(N, tl.trans(N), input_precision="tf32x3"), tl.load(LOW + j, mask=j < n, other=1.0), W)
        tl.store(C + j[:, None] * cr + j[None, :], two, mask=beyond)
        mixed = tl.dot(two, tl.dot(N, one, input_precision="tf32x3"), input_precision="tf32x3")
        tl.store(C + j[:, None] * cr + i[None, :], -mixed, mask=beside)


def whiten(S: torch.Tensor, low: torch.Tensor, C: torch.Tensor) -> None:
    """`linalg.whiten` of a stack."""
    batch, n, _ = S.shape
    strides = (S.stride(0), S.stride(1), low.stride(0), C.stride(0), C.stride(1))
    factor[(batch,)](S, low, C, n, *strides, n > TILE, TILE, num_warps=1)
