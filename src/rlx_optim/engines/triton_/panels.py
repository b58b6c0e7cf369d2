"""A few columns made orthonormal (`linalg.by_pivots`), in float64 wherever their own number would be squared: three launches.
Columns less what a few others span (`linalg.without`): two. And passes over whole bases that read and write once."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .precise import HIGH, halves
from .products import even, known

#: rows and columns of a tile of a Cholesky factor, and columns of a panel
TILE, WIDTH = 32, 64
#: rows of a panel that a program takes at once, and how many programs share a Gram matrix, or at most a product
ROWS, SHARED = 32, 8
#: what entries up to 1 are scaled by for half precision, far from its overflow and its smallest
SCALE = tl.constexpr(2.0 ** (HIGH - 1))
#: programs that share a product, if there are no others
BUSY = 256
TINY = tl.constexpr(2.0**-1000)


@triton.jit
def product(A, B, acc=None):
    return tl.dot(A, B, acc, out_dtype=tl.float64)


@triton.jit(do_not_specialize=("rows", "n", "xb", "xr", "share"))
def gram(X, S, rows, n, xb, xr, xc, share, EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """A part of X'X, of so many rows of X (rows, n), n at most W: part by part (W, W) in S. EVEN: columns and strides are."""
    n, xb, xr = known(n, EVEN), known(xb, EVEN), known(xr, EVEN)
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w, r = tl.arange(0, W), part * share + tl.arange(0, R)
    acc = tl.zeros((W, W), tl.float64)
    for k in range(0, share, R):
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


@triton.jit(do_not_specialize=("n", "nb"))
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


@triton.jit(do_not_specialize=("rows", "n", "xb", "xr"))
def combine(X, C, rows, n, xb, xr, xc, EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """X (rows, n) ← X C'."""
    n, xb, xr = known(n, EVEN), known(xb, EVEN), known(xr, EVEN)
    b = tl.program_id(1).to(tl.int64)
    w, r = tl.arange(0, W), tl.program_id(0) * R + tl.arange(0, R)
    live, at = (r < rows)[:, None] & (w < n)[None, :], X + b * xb + r[:, None].to(tl.int64) * xr + w[None, :] * xc
    x = tl.load(at, mask=live, other=0.0).to(tl.float64)
    tl.store(at, product(x, tl.load(C + b * W * W + w[None, :] * W + w[:, None])), mask=live)


@triton.jit(do_not_specialize=("rows", "m", "k", "ab", "ar", "bb", "br", "share"))
def shares(
    A, B, P, rows, m, k, ab, ar, bb, br, share, EVEN: tl.constexpr, ONCE: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """A part of A'B, of so many rows of A (rows, m) and B (rows, k): part by part (m, k) in P. ONCE: of R rows."""
    part, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m, k = known(m, EVEN), known(k, EVEN)
    ab, ar, bb, br = known(ab, EVEN), known(ar, EVEN), known(bb, EVEN), known(br, EVEN)
    tiles = tl.cdiv(k, W)
    i, j = tl.program_id(1) // tiles * W + tl.arange(0, W), tl.program_id(1) % tiles * W + tl.arange(0, W)
    acc = tl.zeros((W, W), tl.float32)
    for start in range(0, R if ONCE else share, R):
        r = part * share + start + tl.arange(0, R)
        live, at = (r < rows)[:, None], r[:, None].to(tl.int64)
        ah, al = halves(tl.load(A + b * ab + at * ar + i[None, :], mask=live & (i < m)[None, :], other=0.0) * SCALE)
        bh, bl = halves(tl.load(B + b * bb + at * br + j[None, :], mask=live & (j < k)[None, :], other=0.0) * SCALE)
        acc = tl.dot(tl.trans(al), bh, acc)
        acc = tl.dot(tl.trans(ah), bl, acc)
        acc = tl.dot(tl.trans(ah), bh, acc)
    inside = (i < m)[:, None] & (j < k)[None, :]
    tl.store(P + (b * tl.num_programs(0) + part) * m * k + i[:, None] * k + j[None, :], acc * (1 / (SCALE * SCALE)), mask=inside)


@triton.jit(do_not_specialize=("rows", "m", "k", "ab", "ar", "bb", "br", "nb", "fb", "parts"))
def less(
    A, B, P, NOISE, BEFORE, rows, m, k, ab, ar, bb, br, nb, fb, parts,
    EVEN: tl.constexpr, ONCE: tl.constexpr, FOLLOW: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """B (rows, k) ← B − A P, of the sum P (m, k) of parts; NOISE (k) no less than the largest P²·BEFORE of each column. ONCE: of
    W columns of A at most."""
    b = tl.program_id(2).to(tl.int64)
    m, k = known(m, EVEN), known(k, EVEN)
    ab, ar, bb, br = known(ab, EVEN), known(ar, EVEN), known(bb, EVEN), known(br, EVEN)
    r, j, w = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * W + tl.arange(0, W), tl.arange(0, W)
    acc = tl.zeros((R, W), tl.float32)
    noise = tl.zeros((W,), tl.float32)
    for i in range(0, W if ONCE else m, W):
        live, at = (i + w < m)[:, None] & (j < k)[None, :], P + b * parts * m * k + (i + w)[:, None] * k + j[None, :]
        p = tl.load(at, mask=live, other=0.0)
        for part in range(1, parts):
            p += tl.load(at + part * m * k, mask=live, other=0.0)
        if FOLLOW:
            before = tl.load(BEFORE + b * fb + i + w, mask=i + w < m, other=0.0)
            noise = tl.maximum(noise, tl.max(p * p * before[:, None], 0))
        ph, pl = halves(p * SCALE)
        inside = (r < rows)[:, None] & (i + w < m)[None, :]
        ah, al = halves(tl.load(A + b * ab + r[:, None].to(tl.int64) * ar + (i + w)[None, :], mask=inside, other=0.0) * SCALE)
        acc = tl.dot(al, ph, acc)
        acc = tl.dot(ah, pl, acc)
        acc = tl.dot(ah, ph, acc)
    inside, at = (r < rows)[:, None] & (j < k)[None, :], B + b * bb + r[:, None].to(tl.int64) * br + j[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) - acc * (1 / (SCALE * SCALE)), mask=inside)
    if FOLLOW:
        if tl.program_id(0) == 0:
            off = NOISE + b * nb + j
            tl.store(off, tl.maximum(tl.load(off, mask=j < k, other=0.0), noise), mask=j < k)


@triton.jit(do_not_specialize=("m", "n", "nb", "sb", "sr", "bb"))
def follows(NOISE, SHARES, BEFORE, m, n, nb, sb, sr, bb, EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """NOISE (n) no less than the largest SHARES²·BEFORE of each column (m, n)."""
    b = tl.program_id(1).to(tl.int64)
    n, sb, sr = known(n, EVEN), known(sb, EVEN), known(sr, EVEN)
    w, r = tl.program_id(0) * W + tl.arange(0, W), tl.arange(0, R)
    noise = tl.load(NOISE + b * nb + w, mask=w < n, other=0.0)
    for k in range(0, m, R):
        live = (k + r < m)[:, None] & (w < n)[None, :]
        share = tl.load(SHARES + b * sb + (k + r)[:, None].to(tl.int64) * sr + w[None, :], mask=live, other=0.0)
        before = tl.load(BEFORE + b * bb + k + r, mask=k + r < m, other=0.0)
        noise = tl.maximum(noise, tl.max(share * share * before[:, None], 0))
    tl.store(NOISE + b * nb + w, noise, mask=w < n)


@triton.jit(do_not_specialize=("rows", "n"))
def dots(A, B, OUT, rows, n, EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Of each column of A (rows, n) with that of B."""
    b, n = tl.program_id(1).to(tl.int64), known(n, EVEN)
    r, w = tl.arange(0, R), tl.program_id(0) * W + tl.arange(0, W)
    acc = tl.zeros((R, W), tl.float32)
    for k in range(0, rows, R):
        live, at = (k + r < rows)[:, None] & (w < n)[None, :], (b * rows + k + r[:, None]) * n + w[None, :]
        acc += tl.load(A + at, mask=live, other=0.0) * tl.load(B + at, mask=live, other=0.0)
    tl.store(OUT + b * n + w, tl.sum(acc, 0), mask=w < n)


@triton.jit(do_not_specialize=("rows", "n"))
def choose(X, NEAR, FREE, ORDER, OUT, rows, n, EVEN: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """OUT (rows, n): columns of X, of NEAR where they are FREE (n), in an ORDER (n)."""
    b, n = tl.program_id(2).to(tl.int64), known(n, EVEN)
    r, w = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * W + tl.arange(0, W)
    live, row = (r < rows)[:, None] & (w < n)[None, :], (b * rows + r[:, None]) * n
    column = tl.load(ORDER + b * n + w, mask=w < n, other=0)
    free = tl.load(FREE + b * n + column, mask=w < n, other=0) != 0
    at = row + column[None, :]
    x, near = tl.load(X + at, mask=live & ~free[None, :], other=0.0), tl.load(NEAR + at, mask=live & free[None, :], other=0.0)
    tl.store(OUT + row + w[None, :], tl.where(free[None, :], near, x), mask=live)


def follow(noise: torch.Tensor, shares: torch.Tensor, before: torch.Tensor) -> None:
    """What noise (batch, n) becomes, in its place, of shares (batch, m, n) of columns that are off by `before` (batch, m)."""
    shares = shares.contiguous()
    batch, m, n = shares.shape
    strides = (noise.stride(0), shares.stride(0), shares.stride(1), before.stride(0))
    follows[(-(-n // TILE), batch)](
        noise, shares, before, m, n, *strides, even(n, *shares.stride()[:2]), WIDTH, TILE, num_warps=4
    )


def orthonormal(X: torch.Tensor, noise: torch.Tensor) -> None:
    """X ← the Q of each X = QR (rows, n), n at most WIDTH, but for what noise (n) leaves out; it becomes what it then is."""
    batch, rows, n = X.shape
    share = shared(rows, ROWS, SHARED)
    S, C = (X.new_empty((batch, k, WIDTH, WIDTH), dtype=torch.float64) for k in (SHARED, 1))
    sixteens = even(n, *X.stride()[:2])
    gram[(SHARED, batch)](X, S, rows, n, *X.stride(), share, sixteens, ROWS, WIDTH, num_warps=4)
    factor[(batch,)](S, noise, C, n, noise.stride(0), SHARED, TILE, num_warps=4)
    combine[(-(-rows // ROWS), batch)](X, C, rows, n, *X.stride(), sixteens, ROWS, WIDTH, num_warps=4)


def shared(rows: int, block: int, among: int) -> int:
    """How many rows each of so many takes, in blocks."""
    return block * -(-rows // (block * among))


def takes(*arrays: torch.Tensor) -> bool:
    return all(X.dtype is torch.float32 and X.stride(-1) == 1 for X in arrays)


def without(rest: torch.Tensor, first: torch.Tensor, after: torch.Tensor | None, before: torch.Tensor | None) -> None:
    """`linalg.without`, once; entries are at most 1."""
    (batch, rows, k), m = rest.shape, first.shape[-1]
    across, down = -(-k // WIDTH), -(-m // WIDTH)
    share = shared(rows, WIDTH, max(1, min(SHARED, BUSY // (across * down * batch))))
    parts = -(-rows // share)
    P = rest.new_empty((batch, parts, m, k))
    strides = (first.stride(0), first.stride(1), rest.stride(0), rest.stride(1))
    sixteens = even(m, k, *strides)
    shares[(parts, across * down, batch)](
        first, rest, P, rows, m, k, *strides, share, sixteens, share == WIDTH, WIDTH, WIDTH, num_warps=4
    )
    noise = (rest, rest, 0, 0) if after is None else (after, before, after.stride(0), before.stride(0))
    less[(-(-rows // WIDTH), across, batch)](
        first, rest, P, *noise[:2], rows, m, k, *strides, *noise[2:], parts, sixteens, m <= WIDTH, after is not None,
        WIDTH, WIDTH, num_warps=4,
    )  # fmt: skip


def plain(*arrays: torch.Tensor) -> bool:
    return all(X.dtype is torch.float32 and X.is_contiguous() for X in arrays)


def diagonal(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """That of A'B (batch, n)."""
    batch, rows, n = A.shape
    out = A.new_empty((batch, n))
    dots[(-(-n // WIDTH), batch)](A, B, out, rows, n, even(n), ROWS, WIDTH, num_warps=4)
    return out


def chosen(X: torch.Tensor, near: torch.Tensor, free: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Columns of X, of `near` where they are `free` (batch, n), in an order (batch, n)."""
    batch, rows, n = X.shape
    out = torch.empty_like(X)
    grid = (-(-rows // ROWS), -(-n // (2 * WIDTH)), batch)
    choose[grid](X, near, free.contiguous(), order.contiguous(), out, rows, n, even(n), ROWS, 2 * WIDTH, num_warps=4)
    return out
