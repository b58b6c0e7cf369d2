"""Cholesky factors of a few rows and columns, inverted, a program each: `linalg.whitening` makes large ones by products."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: rows and columns that one program takes
WIDTH = 32


@triton.jit
def factor(S, LOW, C, n, sb, sr, lb, cb, cr, W: tl.constexpr):
    """C = N^-1 of S = NN' (n, n), n at most W; rows are contiguous. A pivot that is not above LOW is left out."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, W)
    inside = (i[:, None] < n) & (i[None, :] < n)
    A = tl.load(S + b * sb + i[:, None] * sr + i[None, :], mask=inside, other=0.0)
    low = tl.load(LOW + b * lb + i, mask=i < n, other=1.0)
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
    tl.store(C + b * cb + i[:, None] * cr + i[None, :], B, mask=inside)


def whiten(S: torch.Tensor, low: torch.Tensor, C: torch.Tensor) -> None:
    """`linalg.whiten` of a stack."""
    batch, n, _ = S.shape
    factor[(batch,)](S, low, C, n, S.stride(0), S.stride(1), low.stride(0), C.stride(0), C.stride(1), WIDTH, num_warps=1)
