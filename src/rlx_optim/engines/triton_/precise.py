"""Matrix products of float32 on half-precision tensor cores: each number is the sum of two of float16, 22 bits of its 24.

Of the four products of such sums that of the two remainders is below float32's rounding and left out. What is split has been
scaled, by a power of two for each matrix, to a largest entry of 512 to 1024: far from float16's overflow, and its smallest step
is 2^-34 of that entry. Sums are in float32, which tensor cores cut off rather than round: 1e-6 to 2e-6 of a product on an H200.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .products import even, known, tile_of

#: the smaller side of a matrix from which splitting pays
LEAST = 256
#: the largest entry after scaling is two to this at most
HIGH = 10
#: rows and columns of a tile of a Gram matrix, depth of a product's step
SIDE, DEPTH = 128, 64


@triton.jit
def halves(x):
    """x as the sum of two of half precision, 22 bits of its 24."""
    h = x.to(tl.float16)
    return h, (x - h.to(tl.float32)).to(tl.float16)


@triton.jit(do_not_specialize=("rows", "columns", "sb", "sr", "ob", "orow", "part"))
def split(
    X, OUT, FACTOR, rows, columns, sb, sr, ob, orow, part,
    EVEN: tl.constexpr, EACH: tl.constexpr, LOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """X·FACTOR[matrix] (or a number for all, unless EACH) = h + l, both in half precision: h, or l where LOW says so, into each
    part of OUT, `part` apart. Rows of X are contiguous. EVEN: all but `rows` are multiples of 16."""
    b = tl.program_id(2).to(tl.int64)
    columns, sb, sr = known(columns, EVEN), known(sb, EVEN), known(sr, EVEN)
    ob, orow, part = known(ob, EVEN), known(orow, EVEN), known(part, EVEN)
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    live = (r[:, None] < rows) & (c[None, :] < columns)
    x = tl.load(X + b * sb + r[:, None] * sr + c[None, :], mask=live, other=0.0) * (tl.load(FACTOR + b) if EACH else FACTOR)
    h, l = halves(x)
    for k in tl.static_range(len(LOW)):
        value = l if LOW[k] else h
        tl.store(OUT + k * part + b * ob + r[:, None] * orow + c[None, :], value, mask=live)


@triton.jit
def renew(
    H, L, ADDRESS, FACTOR, ALPHA, BETA, M, K,
    TALL: tl.constexpr, FRESH: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A ← BETA·A + ALPHA·G with G = XX', X·FACTOR = H + L (M, K), or X'X of X (K, M) where TALL; A (M, M) by address, numbers by
    tensor. Tiles that touch or lie above the diagonal, mirrored. M is a multiple of S. Where ALPHA is 0, G may be NaN; where
    FRESH, A may be anything, and becomes G."""
    b = tl.program_id(1).to(tl.int64)
    i, j = tile_of(tl.program_id(0), 1)
    ri, rj, rk = i * S + tl.arange(0, S), j * S + tl.arange(0, S), tl.arange(0, D)
    acc = tl.zeros((S, S), tl.float32)
    first = b * M * K
    for k in range(0, K, D):
        inside = rk < K - k
        if TALL:
            x = first + (k + rk)[:, None].to(tl.int64) * M + ri[None, :]
            y = first + (k + rk)[:, None].to(tl.int64) * M + rj[None, :]
            hx, lx = tl.load(H + x, mask=inside[:, None], other=0.0).T, tl.load(L + x, mask=inside[:, None], other=0.0).T
            hy, ly = tl.load(H + y, mask=inside[:, None], other=0.0), tl.load(L + y, mask=inside[:, None], other=0.0)
        else:
            x = first + ri[:, None].to(tl.int64) * K + (k + rk)[None, :]
            y = first + rj[:, None].to(tl.int64) * K + (k + rk)[None, :]
            hx, lx = tl.load(H + x, mask=inside[None, :], other=0.0), tl.load(L + x, mask=inside[None, :], other=0.0)
            hy, ly = tl.load(H + y, mask=inside[None, :], other=0.0).T, tl.load(L + y, mask=inside[None, :], other=0.0).T
        acc = tl.dot(hx, ly, acc)
        acc = tl.dot(lx, hy, acc)
        acc = tl.dot(hx, hy, acc)
    scale = 1 / tl.load(FACTOR + b)
    A = tl.load(ADDRESS + b).to(tl.pointer_type(tl.float32))
    at = A + ri[:, None].to(tl.int64) * M + rj[None, :]
    if FRESH:
        out = acc * scale * scale
    else:
        alpha, beta, before = tl.load(ALPHA + b), tl.load(BETA + b), tl.load(at)
        out = tl.where(alpha == 0.0, before, beta * before + acc * scale * (scale * alpha))
    tl.store(at, out)
    if i != j:
        tl.store(A + rj[:, None].to(tl.int64) * M + ri[None, :], tl.trans(out))


def sizes(X: torch.Tensor) -> torch.Tensor:
    """The largest entry of each of a stack; NaN where there is one."""
    return torch.linalg.vector_norm(X.flatten(1), float("inf"), dim=-1)


def scales(largest: torch.Tensor) -> torch.Tensor:
    """The powers of two that scale matrices of such largest entries; NaN for NaN."""
    return (HIGH - largest.log2().ceil()).clamp(-100, 100).exp2()


def parts(X: torch.Tensor, factor: torch.Tensor | float, low: tuple[bool, ...], axis: int) -> torch.Tensor:
    """X·factor in half precision, its low half where `low` says so, else its high one, one behind the other: along an axis, or
    (axis 0) each by itself."""
    turned = X.stride(-1) != 1
    N = X.mT if turned else X
    N = N if N.stride(-1) == 1 else N.contiguous()
    batch, rows, columns = N.shape
    n, along = len(low), axis if not (turned and axis) else 3 - axis
    shape, part = {
        0: ((n * batch, rows, columns), batch * rows * columns),
        1: ((batch, n * rows, columns), rows * columns),
        2: ((batch, rows, n * columns), columns),
    }[along]
    out = torch.empty(shape, dtype=torch.float16, device=X.device)
    grid = (-(-rows // 8), -(-columns // 256), batch)
    numbers = (columns, N.stride(0), N.stride(1), out.stride(0) if along else rows * columns, out.stride(1), part)
    split[grid](N, out, factor, rows, *numbers, even(*numbers), torch.is_tensor(factor), low, 8, 256, num_warps=4)
    return out.mT if turned else out


def product(A: torch.Tensor, B: torch.Tensor, bound: float | None = None) -> torch.Tensor:
    """A B; bound: what no entry is above, a power of two."""
    out = A.new_empty((*A.shape[:2], B.shape[2]))
    if bound is not None:
        return joined(out, A, B, bound, 0.0, 1.0)
    left, right = scales(sizes(A)), scales(sizes(B))
    multiplied(out, A, B, left, right, 0.0, 1.0)
    return out.mul_((1 / left)[:, None, None]).mul_((1 / right)[:, None, None])  # 1/(l·r) may be too small


def joined(S: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bound: float, beta: float, alpha: float) -> torch.Tensor:
    """S ← beta·S + alpha·A B, in place; bound: what no entry of A and B is above, a power of two."""
    factor = 2.0 ** (HIGH - 1) / bound
    return multiplied(S, A, B, factor, factor, beta, alpha * factor**-2)


def multiplied(
    S: torch.Tensor, A: torch.Tensor, B: torch.Tensor, left: torch.Tensor | float, right: torch.Tensor | float,
    beta: float, alpha: float,
) -> torch.Tensor:  # fmt: skip
    """S ← beta·S + alpha·(left·A)(right·B), in place; where beta is 0, S may be anything."""
    high, low = False, True
    X, Y = parts(A, left, (high, high, low), 2), parts(B, right, (high, low, high), 1)
    if S.device.type == "cuda":
        return torch.baddbmm(S, X, Y, torch.float32, beta=beta, alpha=alpha, out=S)
    return S.baddbmm_(X.float(), Y.float(), beta=beta, alpha=alpha)


def pays(*arrays: torch.Tensor) -> bool:
    return all(X.ndim == 3 and X.dtype is torch.float32 and min(X.shape[1:]) >= LEAST for X in arrays)


def average_gram(address: torch.Tensor, X: torch.Tensor, tall: bool, beta: Any, alpha: Any, live: torch.Tensor | None) -> None:
    """A ← beta·A + alpha·XX' (X'X where tall) for the matrices at `address`. Where X or the product is not finite, or live is
    False, nothing changes."""
    largest = sizes(X)
    factor = scales(largest)
    sound = X.shape[1 if tall else 2] * largest.double() ** 2 < torch.finfo(torch.float32).max
    sound = sound if live is None else sound & live
    _renew(X, factor, address, (torch.where(sound, alpha, 0.0).to(factor.dtype), torch.zeros_like(factor) + beta), tall)


def square(X: torch.Tensor, bound: float | None = None) -> torch.Tensor:
    """XX'; bound: what no entry is above."""
    tall = X.stride(-1) != 1
    batch, n, _ = X.shape
    X = X.mT if tall else X
    factor = scales(sizes(X)) if bound is None else X.new_full((batch,), 2.0 ** (HIGH - 1) / bound)
    out = X.new_empty((batch, n, n))
    address = out.data_ptr() + out.stride(0) * out.element_size() * torch.arange(batch, device=X.device)
    _renew(X, factor, address, None, tall)
    return out


def _renew(
    X: torch.Tensor, factor: torch.Tensor, address: torch.Tensor, numbers: tuple[torch.Tensor, torch.Tensor] | None, tall: bool
) -> None:
    """`renew`; numbers: alpha and beta of each, or None for new matrices."""
    M, K = X.shape[:0:-1] if tall else X.shape[1:]
    high, low = parts(X, factor, (False, True), 0).chunk(2)
    tiles = M // SIDE
    grid = (tiles * (tiles + 1) // 2, X.shape[0])
    alphas, betas = numbers or (factor, factor)
    renew[grid](high, low, address, factor, alphas, betas, M, K, tall, numbers is None, SIDE, DEPTH, num_warps=8, num_stages=3)
