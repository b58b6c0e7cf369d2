"""A few columns made orthonormal (`linalg.by_pivots`), in float64 wherever their own number would be squared: three launches."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: rows and columns of a tile of a Cholesky factor, and columns of a panel
TILE, WIDTH = 32, 64
#: rows of a panel that a program takes at once, and most programs that share a Gram matrix
ROWS, SHARED = 32, 8
TINY = tl.constexpr(2.0**-1000)


@triton.jit
def product(A, B, acc=None):
    return tl.dot(A, B, acc, out_dtype=tl.float64)


@triton.jit
def gram(X, S, rows, n, xb, xr, xc, SHARE: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """A part of X'X, of SHARE rows of X (rows, n), n at most W: part by part (W, W) in S."""
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w, r = tl.arange(0, W), part * SHARE + tl.arange(0, R)
    acc = tl.zeros((W, W), tl.float64)
    for k in range(0, SHARE, R):
        at = (k + r)[:, None].to(tl.int64) * xr + w[None, :] * xc
        x = tl.load(X + b * xb + at, mask=(k + r < rows)[:, None] & (w < n)[None, :], other=0.0).to(tl.float64)
        acc = product(tl.trans(x), x, acc)
    tl.store(S + (b * tl.num_programs(0) + part) * W * W + w[:, None] * W + w[None, :], acc)


@triton.jit
def inverted(A, noise, W: tl.constexpr):
    """N^-1 of A = NN' (W, W), where a pivot that is not above its noise is left out; and what became of the noise."""
    i = tl.arange(0, W)
    B = tl.where(i[:, None] == i[None, :], A * 0 + 1, A * 0)
    for k in range(W):
        row = tl.sum(tl.where(i[:, None] == k, A, 0.0), 0)  # which is the column, too
        pivot, bar = tl.sum(tl.where(i == k, row, 0.0), 0), tl.sum(tl.where(i == k, noise, 0.0), 0)
        root = tl.where(pivot > bar, 1 / tl.sqrt(tl.maximum(pivot, TINY)), 0.0)
        row = tl.where(i > k, row * root, 0.0)
        A -= row[:, None] * row[None, :]
        bar *= root * root
        noise = tl.where(i == k, bar, tl.maximum(noise, row * row * bar))
        found = tl.sum(tl.where(i[:, None] == k, B, 0.0), 0) * root
        B = tl.where(i[:, None] == k, found[None, :], B - row[:, None] * found[None, :])
    return B, noise


@triton.jit
def block(S, i, j, PARTS: tl.constexpr, W: tl.constexpr):
    """Rows i and columns j of the sum of so many (2W, 2W)."""
    at = i[:, None] * 2 * W + j[None, :]
    A = tl.load(S + at)
    for k in range(1, PARTS):
        A += tl.load(S + k * 4 * W * W + at)
    return A


@triton.jit
def factor(S, NOISE, C, n, nb, PARTS: tl.constexpr, W: tl.constexpr):
    """C = N^-1 (2W, 2W) of the sum NN' of parts of S, of which n rows and columns count; NOISE as above, in its place."""
    b = tl.program_id(0).to(tl.int64)
    S, NOISE, C = S + b * PARTS * 4 * W * W, NOISE + b * nb, C + b * 4 * W * W
    i = tl.arange(0, W)
    j = W + i
    one, noise = inverted(block(S, i, i, PARTS, W), tl.load(NOISE + i, mask=i < n, other=0.0).to(tl.float64), W)
    N = product(block(S, j, i, PARTS, W), tl.trans(one))
    follows = tl.load(NOISE + j, mask=j < n, other=0.0).to(tl.float64)
    follows = tl.maximum(follows, tl.max(N * N * noise[None, :], 1))
    corner = C + j[:, None] * 2 * W + j[None, :]
    tl.store(corner, block(S, j, j, PARTS, W) - product(N, tl.trans(N)))
    tl.debug_barrier()
    two, follows = inverted(tl.load(corner), follows, W)  # not laid out as products are, which are slow to take apart
    tl.store(C + i[:, None] * 2 * W + i[None, :], one)
    tl.store(C + i[:, None] * 2 * W + j[None, :], one * 0)
    tl.store(C + j[:, None] * 2 * W + i[None, :], -product(two, product(N, one)))
    tl.store(corner, two)
    tl.store(NOISE + i, noise, mask=i < n)
    tl.store(NOISE + j, follows, mask=j < n)


@triton.jit
def combine(X, C, OUT, rows, n, xb, xr, xc, R: tl.constexpr, W: tl.constexpr):
    """OUT (rows, n), contiguous, = X C'."""
    b = tl.program_id(1).to(tl.int64)
    w, r = tl.arange(0, W), tl.program_id(0) * R + tl.arange(0, R)
    live = (r < rows)[:, None] & (w < n)[None, :]
    x = tl.load(X + b * xb + r[:, None].to(tl.int64) * xr + w[None, :] * xc, mask=live, other=0.0).to(tl.float64)
    found = product(x, tl.load(C + b * W * W + w[None, :] * W + w[:, None]))
    tl.store(OUT + (b * rows + r[:, None]) * n + w[None, :], found, mask=live)


@triton.jit
def follows(NOISE, SHARES, BEFORE, n, nb, sb, sr, bb, M: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """NOISE (n) no less than the largest SHARES²·BEFORE of each column (M, n)."""
    b = tl.program_id(1).to(tl.int64)
    w, r = tl.program_id(0) * W + tl.arange(0, W), tl.arange(0, R)
    noise = tl.load(NOISE + b * nb + w, mask=w < n, other=0.0)
    for k in range(0, M, R):
        live = (k + r < M)[:, None] & (w < n)[None, :]
        share = tl.load(SHARES + b * sb + (k + r)[:, None].to(tl.int64) * sr + w[None, :], mask=live, other=0.0)
        before = tl.load(BEFORE + b * bb + k + r, mask=k + r < M, other=0.0)
        noise = tl.maximum(noise, tl.max(share * share * before[:, None], 0))
    tl.store(NOISE + b * nb + w, noise, mask=w < n)


def follow(noise: torch.Tensor, shares: torch.Tensor, before: torch.Tensor) -> None:
    """What noise (batch, n) becomes, in its place, of shares (batch, m, n) of columns that are off by `before` (batch, m)."""
    shares = shares.contiguous()
    batch, m, n = shares.shape
    strides = (noise.stride(0), shares.stride(0), shares.stride(1), before.stride(0))
    follows[(-(-n // TILE), batch)](noise, shares, before, n, *strides, m, WIDTH, TILE, num_warps=4)


def orthonormal(X: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The Q of each X = QR (rows, n), n at most WIDTH, up to what noise (n) leaves out, in whose place is what became of it."""
    batch, rows, n = X.shape
    blocks = -(-rows // ROWS)
    share = ROWS * -(-blocks // SHARED)
    parts = -(-rows // share)
    S, C = (X.new_empty((batch, k, WIDTH, WIDTH), dtype=torch.float64) for k in (parts, 1))
    out = X.new_empty(X.shape)
    gram[(parts, batch)](X, S, rows, n, *X.stride(), share, ROWS, WIDTH, num_warps=4)
    factor[(batch,)](S, noise, C, n, noise.stride(0), parts, TILE, num_warps=4)
    combine[(blocks, batch)](X, C, out, rows, n, *X.stride(), ROWS, WIDTH, num_warps=4)
    return out
