"""Newton–Schulz on tensor cores: float16 products with float32 accumulation, symmetric ones computed once and mirrored.

Every matrix of the iteration is a polynomial in R = XXᵀ, so all of them are symmetric and commute. On oblong matrices the
iteration runs on the small side alone ("gram"): P = aI + bR + cR², R ← PRP, Q ← PQ, and X ← QX at the end. Rounding R and Q
loses the small singular values of a matrix with few dominant directions, so X ← QX is carried out and R taken anew after the
second step, and after every third from there. On nearly square ones the plain form X ← (aI + bR + cR²)X needs no more operations
and loses less.
X is divided by its norm in float32; within half precision it is kept at √(rows·columns) times that, so that its entries are
about 1, and R carries the scale back.
"""

# mypy: ignore-errors

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...linalg import Coefficients, step_coefficients

NOTE = "matrices of 128 and more orthogonalised by float16 products with float32 sums, rotations in tf32"
#: the smaller side below which half precision saves nothing, and the ratio of sides from which the gram form pays
LEAST, OBLONG = 128, 1.5
SIDE = 64  # what sides are multiples of: the depth of a product's step, so that nothing is masked or compiled for a remainder
RESTARTS = range(2, 1000, 3)  # before these steps X ← QX and R anew
#: from which side on: rows and columns of a tile, depth of a product's step, warps, stages; as measured on an H200
CONFIGS = (
    {"LEAST": 1024, "BM": 128, "BN": 256, "BK": SIDE, "num_warps": 8, "num_stages": 3},
    {"LEAST": 0, "BM": 128, "BN": 128, "BK": SIDE, "num_warps": 8, "num_stages": 3},
)


def even(*numbers: int) -> bool:
    """Whether all are multiples of 16."""
    return not any(n % 16 for n in numbers)


@triton.jit
def known(n, EVEN: tl.constexpr):
    """A number which the compiler is to know as a multiple of 16, where it is one."""
    if EVEN:
        return n // 16 * 16
    else:
        return n


@triton.jit
def tile_of(pid, W: tl.constexpr):
    """Where tile `pid` of those that touch or lie above the diagonal is: column j has the tiles i < W·(j + 1)."""
    j = ((tl.sqrt(1.0 + 8.0 * pid.to(tl.float32) / W) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(W * (j + 1) * (j + 2) // 2 <= pid, j + 1, j)
    j = tl.where(W * j * (j + 1) // 2 > pid, j - 1, j)
    return pid - W * j * (j + 1) // 2, j


@triton.jit(do_not_specialize=("tiles", "each"))
def symmetric(
    X, Y, C, O, MIRROR, rows, tiles, each, M, K, alpha, beta, gamma,
    HAS_C: tl.constexpr, TALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """O = alpha·XYᵀ + beta·C + gamma·I, known to be symmetric: the tiles that touch or lie above the diagonal, `each` of a
    matrix, mirrored.

    Everything is a descriptor: X, Y of (batch·M, K), or of (batch·K, M) where TALL and the product is XᵀY; C, O and MIRROR, which
    is O with sides of blocks exchanged, of (rows, M), rows = batch·M. Sides are multiples of the blocks, BN of BM.
    A program takes one tile after the other, so that the next is fetched while the last is stored. What lies outside is not
    written: what would be mirrored across the diagonal of a tile.
    """
    tl.assume(K >= BK)  # else tiles follow each other in two ways, one for products of nothing
    H: tl.constexpr = BN // 2  # half a tile is stored at a time: there is no room for more
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        b = tile // each
        i, j = tile_of(tile % each, BN // BM)
        first, row, column = b * M, i * BM, j * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            if TALL:
                acc = tl.dot(X.load([b * K + k, row]).T, Y.load([b * K + k, column]), acc)
            else:
                acc = tl.dot(X.load([first + row, k]), Y.load([first + column, k]).T, acc)
        left, right = tl.split(tl.permute(tl.reshape(acc * alpha, (BM, 2, H)), (0, 2, 1)))
        if HAS_C:
            left += beta * C.load([first + row, column]).to(tl.float32)
            right += beta * C.load([first + row, column + H]).to(tl.float32)
        below = row - column + tl.arange(0, BM)[:, None] - tl.arange(0, H)[None, :]
        left, right = tl.where(below == 0, left + gamma, left), tl.where(below == H, right + gamma, right)
        mirror = tl.where(row + BM <= column, first + column, rows)
        O.store([first + row, column], left.to(tl.float16))
        O.store([first + row, column + H], right.to(tl.float16))
        MIRROR.store([mirror, row], left.to(tl.float16).T)
        MIRROR.store([mirror + H, row], right.to(tl.float16).T)


@triton.jit
def symmetric_any(
    X, Y, C, O, M, K, sb, sm, sk, alpha, beta, gamma,
    HAS_C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same for sides that are not multiples of the blocks: X[batch, M, K] and Y like it with strides sb, sm, sk; but K is one
    of BK."""
    b = tl.program_id(1).to(tl.int64)
    i, j = tile_of(tl.program_id(0), BN // BM)
    rk = tl.arange(0, BK)
    ri = i * BM + tl.arange(0, BM)
    rj = j * BN + tl.arange(0, BN)
    x = X + b * sb + (ri % M)[:, None] * sm + rk[None, :] * sk
    y = Y + b * sb + (rj % M)[None, :] * sm + rk[:, None] * sk
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(x), tl.load(y), acc)
        x += BK * sk
        y += BK * sk
    acc = acc * alpha
    mask = (ri[:, None] < M) & (rj[None, :] < M)
    at = b * M * M + ri[:, None] * M + rj[None, :]
    if HAS_C:
        acc += beta * tl.load(C + at, mask=mask, other=0.0).to(tl.float32)
    acc = tl.where(ri[:, None] == rj[None, :], acc + gamma, acc)
    out = acc.to(O.dtype.element_ty)
    tl.store(O + at, out, mask=mask)
    if (i + 1) * BM <= j * BN:
        tl.store(O + b * M * M + rj[:, None] * M + ri[None, :], tl.trans(out), mask=(rj[:, None] < M) & (ri[None, :] < M))


@triton.jit
def shrink(U, X, FACTOR, n, BLOCK: tl.constexpr):
    """X = U·FACTOR[tensor], in half precision."""
    b = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(U + b * n + at, mask=at < n, other=0.0).to(tl.float32) * tl.load(FACTOR + b)
    tl.store(X + b * n + at, value.to(X.dtype.element_ty), mask=at < n)


@triton.jit
def repack(FLAT, TABLE, STACK, n, C, OUT: tl.constexpr, BLOCK: tl.constexpr):
    """TritonArrays from flat memory into a stack of larger ones, with zeros around them; or (OUT) back. n: entries of one there,
    C: its columns. TABLE: `LaunchPlan.stacks`."""
    b = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, j = at // C, at % C
    row = TABLE + b * 5
    flat = FLAT + tl.load(row) + i * tl.load(row + 1) + j * tl.load(row + 2)
    inside = (at < n) & (i < tl.load(row + 3)) & (j < tl.load(row + 4))
    if OUT:
        tl.store(flat, tl.load(STACK + b * n + at, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(STACK + b * n + at, tl.load(flat, mask=inside, other=0.0), mask=at < n)


def packed(flat: torch.Tensor, table: torch.Tensor, stack: torch.Tensor, out: bool = False) -> None:
    """`repack`."""
    n = stack[0].numel()
    repack[(-(-n // 1024), len(table))](flat, table, stack, n, stack.shape[2], out, 1024)


@functools.cache
def processors(device: torch.device) -> int:
    """That a program each keeps busy."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def product(
    X: torch.Tensor, Y: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 0.0,
    gamma: float = 0.0, tall: bool = False,
) -> torch.Tensor:  # fmt: skip
    """alpha·XYᵀ + beta·add + gamma·I (of Xᵀ and Yᵀ where tall), if the result is symmetric."""
    batch, m, k = X.shape
    if tall:
        m, k = k, m
    config = next((c for c in CONFIGS if m % c["BN"] == 0 and m >= c["LEAST"]), CONFIGS[-1])
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    columns = -(-m // BN)
    grid = (BN // BM * columns * (columns + 1) // 2, batch)
    options = {"HAS_C": add is not None, **{name: value for name, value in config.items() if name != "LEAST"}}
    if m >= CONFIGS[0]["LEAST"] and m % BN == 0 and k % BK == 0:  # below, descriptors cost the host more than they save
        left, right = ((BK, BM), (BK, BN)) if tall else ((BM, BK), (BN, BK))
        half, turned = (BM, BN // 2), (BN // 2, BM)
        blocks = ((X, left), (Y, right), (out if add is None else add, half), (out, half), (out, turned))
        described = [TensorDescriptor.from_tensor(Z.view(-1, Z.shape[2]), list(block)) for Z, block in blocks]
        tiles = math.prod(grid)
        programs = min(tiles, processors(X.device))
        symmetric[(programs,)](*described, batch * m, tiles, grid[0], m, k, alpha, beta, gamma, TALL=tall, **options)
    else:
        strides = X.stride()
        strides = (strides[0], strides[2], strides[1]) if tall else strides
        symmetric_any[grid](X, Y, X if add is None else add, out, m, k, *strides, alpha, beta, gamma, **options)
    return out


def pays(X: torch.Tensor) -> bool:
    """Whether these matrices are large enough for half precision to be worth its rounding."""
    return X.dtype is torch.float32 and min(X.shape[1:]) >= LEAST


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Matrix products of float32 by tensor cores: ten bits of each factor, several times as fast."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def rounding(A: torch.Tensor, B: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """For a product that only rounds the step: `tf32` where both are large enough."""
    return tf32() if pays(A) and pays(B) else contextlib.nullcontext()


def scale_of(shape: Any) -> float:
    """What makes the entries of a matrix of norm 1 about 1; a power of two, so that it is exact."""
    return 2.0 ** round(math.log2(math.sqrt(math.prod(shape[1:]))))


def zero_padded(shape: Any, device: torch.device) -> torch.Tensor:
    """Half-precision memory for matrices (batch, rows, columns), sides filled up to multiples of SIDE with zeros, which stay so
    through the iteration."""
    filled = (shape[0], *(-(-n // SIDE) * SIDE for n in shape[1:]))
    return (torch.empty if filled == tuple(shape) else torch.zeros)(filled, dtype=torch.float16, device=device)


def half(U: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """U / (norm + eps) in float16, times `scale_of`, in `zero_padded` memory."""
    X = zero_padded(U.shape, U.device) if out is None else out
    factor = (scale_of(X.shape) / (norm.double() + eps)).float()
    if X.shape == U.shape:
        n = U[0].numel()
        shrink[(-(-n // 4096), U.shape[0])](U, X, factor, n, 4096, num_warps=8)
    else:
        torch.mul(U, factor[:, None, None], out=X[:, : U.shape[1], : U.shape[2]])
    return X


def orthogonalize(
    U: torch.Tensor, norm: torch.Tensor, steps: int, coefficients: Coefficients, eps: float, form: str = "auto"
) -> torch.Tensor:
    """Newton–Schulz on (batch, rows, columns); the result is in float16."""
    return iterate(half(U, norm, eps), steps, coefficients, form)[:, : U.shape[1], : U.shape[2]]


def iterate(X: torch.Tensor, steps: int, coefficients: Coefficients, form: str = "auto") -> torch.Tensor:
    """The iteration on what `half` gives."""
    small, large = sorted(X.shape[1:])
    form = ("gram" if large >= OBLONG * small else "plain") if form == "auto" else form
    X, scale = FORMS[form](X, scale_of(X.shape), steps, coefficients, X.shape[1] > X.shape[2])
    return X if scale == 1.0 else X.mul_(1 / scale)


def plain(X: torch.Tensor, scale: float, steps: int, coefficients: Any, tall: bool) -> tuple[torch.Tensor, float]:
    n = min(X.shape[1:])
    A, B = (torch.empty((X.shape[0], n, n), dtype=X.dtype, device=X.device) for _ in range(2))
    for a, b, c in step_coefficients(coefficients, steps):
        product(X, X, A, alpha=1 / (scale * scale), tall=tall)
        product(A, A, B, add=A, alpha=c, beta=b, gamma=a)
        left, right = (X, B) if tall else (B, X)
        X, scale = torch.empty_like(X).baddbmm_(left, right, beta=0.0, alpha=1 / scale), 1.0
    return X, scale


def gram(X: torch.Tensor, scale: float, steps: int, coefficients: Any, tall: bool) -> tuple[torch.Tensor, float]:
    n = min(X.shape[1:])

    def new() -> torch.Tensor:
        return torch.empty((X.shape[0], n, n), dtype=X.dtype, device=X.device)

    def apply(Q: torch.Tensor, X: torch.Tensor, alpha: float) -> torch.Tensor:
        left, right = (X, Q) if tall else (Q, X)
        return torch.empty_like(X).baddbmm_(left, right, beta=0.0, alpha=alpha)

    R, P, T, Q = new(), new(), new(), None
    product(X, X, R, alpha=1 / (scale * scale), tall=tall)
    for k, (a, b, c) in enumerate(step_coefficients(coefficients, steps)):
        if k in RESTARTS:
            X, scale, Q = apply(Q, X, 1 / scale), 1.0, None
            product(X, X, R, tall=tall)
        product(R, R, P, add=R, alpha=c, beta=b, gamma=a)
        if k + 1 < steps and k + 1 not in RESTARTS:  # R is used once more before it is taken anew
            product(product(P, R, T), P, R)
        if Q is None:
            Q, P = P, new()
        else:
            product(P, Q, T)
            Q, T = T, Q
    return apply(Q, X, 1 / scale), 1.0


FORMS = {"plain": plain, "gram": gram}
