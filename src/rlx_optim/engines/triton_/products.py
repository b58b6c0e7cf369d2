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
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...linalg import Coefficients, of_each_step

NOTE = "matrices of 128 and more orthogonalised by float16 products with float32 sums, rotations in tf32"
#: the smaller side below which half precision saves nothing, and the ratio of sides from which the gram form pays
LEAST, OBLONG = 128, 1.5
RESTARTS = range(2, 1000, 3)  # before these steps X ← QX and R anew
#: from which side on: rows and columns of a tile, depth of a product's step, warps, stages; as measured on an H200
CONFIGS = (
    {"LEAST": 1024, "BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 4},
    {"LEAST": 0, "BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
)


@triton.jit
def tile_of(pid, W: tl.constexpr):
    """Where tile `pid` of those that touch or lie above the diagonal is: column j has the tiles i < W·(j + 1)."""
    j = ((tl.sqrt(1.0 + 8.0 * pid.to(tl.float32) / W) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(W * (j + 1) * (j + 2) // 2 <= pid, j + 1, j)
    j = tl.where(W * j * (j + 1) // 2 > pid, j - 1, j)
    return pid - W * j * (j + 1) // 2, j


@triton.jit
def symmetric(
    X, Y, C, O, M, alpha, beta, gamma,
    K: tl.constexpr, HAS_C: tl.constexpr, TALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """O = alpha·XYᵀ + beta·C + gamma·I, known to be symmetric: tiles that touch or lie above the diagonal, mirrored.

    X, Y: descriptors of (batch·M, K), or of (batch·K, M) where TALL and the product is XᵀY; C, O: (batch, M, M). Sides are
    multiples of the blocks, BN of BM.
    """
    b = tl.program_id(1)
    i, j = tile_of(tl.program_id(0), BN // BM)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        if TALL:
            acc = tl.dot(X.load([b * K + k, i * BM]).T, Y.load([b * K + k, j * BN]), acc)
        else:
            acc = tl.dot(X.load([b * M + i * BM, k]), Y.load([b * M + j * BN, k]).T, acc)
    acc = acc * alpha
    ri = i * BM + tl.arange(0, BM)
    rj = j * BN + tl.arange(0, BN)
    first = b.to(tl.int64) * M * M
    at = first + ri[:, None] * M + rj[None, :]
    if HAS_C:
        acc += beta * tl.load(C + at).to(tl.float32)
    if (i + 1) * BM > j * BN:
        acc = tl.where(ri[:, None] == rj[None, :], acc + gamma, acc)
    out = acc.to(O.dtype.element_ty)
    tl.store(O + at, out)
    if (i + 1) * BM <= j * BN:
        tl.store(O + first + rj[:, None] * M + ri[None, :], tl.trans(out))


@triton.jit
def symmetric_any(
    X, Y, C, O, M, sb, sm, sk, alpha, beta, gamma,
    K: tl.constexpr, HAS_C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same for sides that are not multiples of the blocks: X[batch, M, K] and Y like it with strides sb, sm, sk."""
    b = tl.program_id(1).to(tl.int64)
    i, j = tile_of(tl.program_id(0), BN // BM)
    rk = tl.arange(0, BK)
    ri = i * BM + tl.arange(0, BM)
    rj = j * BN + tl.arange(0, BN)
    x = X + b * sb + (ri % M)[:, None] * sm + rk[None, :] * sk
    y = Y + b * sb + (rj % M)[None, :] * sm + rk[:, None] * sk
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        inside = rk < K - k
        acc = tl.dot(tl.load(x, mask=inside[None, :], other=0.0), tl.load(y, mask=inside[:, None], other=0.0), acc)
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
    """Matrices from flat memory into a stack of larger ones, with zeros around them; or (OUT) back. n: entries of one there,
    C: its columns. TABLE: `Plan.stacks`."""
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


def product(
    X: torch.Tensor, Y: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 0.0,
    gamma: float = 0.0, tall: bool = False,
) -> torch.Tensor:  # fmt: skip
    """alpha·XYᵀ + beta·add + gamma·I (of Xᵀ and Yᵀ where tall), if the result is symmetric."""
    batch, m, k = X.shape
    if tall:
        m, k = k, m
    config = next((c for c in CONFIGS if m % c["BN"] == 0 and m >= c["LEAST"]), CONFIGS[-1])
    blocks = {name: value for name, value in config.items() if name != "LEAST"}
    BM, BN, BK = blocks["BM"], blocks["BN"], blocks["BK"]
    columns = -(-m // BN)
    grid = (BN // BM * columns * (columns + 1) // 2, batch)
    C, options = X if add is None else add, {"K": k, "HAS_C": add is not None, **blocks}
    if m >= CONFIGS[0]["LEAST"] and m % BN == 0 and k % BK == 0:  # below, descriptors cost the host more than they save
        left, right = ((BK, BM), (BK, BN)) if tall else ((BM, BK), (BN, BK))
        described = [TensorDescriptor.from_tensor(Z.view(-1, Z.shape[2]), list(block)) for Z, block in ((X, left), (Y, right))]
        symmetric[grid](*described, C, out, m, alpha, beta, gamma, TALL=tall, **options)
    else:
        strides = X.stride()
        strides = (strides[0], strides[2], strides[1]) if tall else strides
        symmetric_any[grid](X, Y, C, out, m, *strides, alpha, beta, gamma, **options)
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


def scale_of(shape: Any) -> float:
    """What makes the entries of a matrix of norm 1 about 1; a power of two, so that it is exact."""
    return 2.0 ** round(math.log2(math.sqrt(math.prod(shape[1:]))))


def half(U: torch.Tensor, norm: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """U / (norm + eps) in float16, times `scale_of`."""
    n = U[0].numel()
    factor = (scale_of(U.shape) / (norm.double() + eps)).float()
    X = torch.empty(U.shape, dtype=torch.float16, device=U.device) if out is None else out
    shrink[(-(-n // 4096), U.shape[0])](U, X, factor, n, 4096, num_warps=8)
    return X


def orthogonalize(
    U: torch.Tensor, norm: torch.Tensor, steps: int, coefficients: Coefficients, eps: float, form: str = "auto"
) -> torch.Tensor:
    """Newton–Schulz on (batch, rows, columns); the result is in float16."""
    return iterate(half(U, norm, eps), steps, coefficients, form)


def iterate(X: torch.Tensor, steps: int, coefficients: Coefficients, form: str = "auto") -> torch.Tensor:
    """The iteration on what `half` gives."""
    small, large = sorted(X.shape[1:])
    form = ("gram" if large >= OBLONG * small else "plain") if form == "auto" else form
    X, scale = FORMS[form](X, scale_of(X.shape), steps, coefficients, X.shape[1] > X.shape[2])
    return X if scale == 1.0 else X.mul_(1 / scale)


def plain(X: torch.Tensor, scale: float, steps: int, coefficients: Any, tall: bool) -> tuple[torch.Tensor, float]:
    n = min(X.shape[1:])
    A, B = (torch.empty((X.shape[0], n, n), dtype=X.dtype, device=X.device) for _ in range(2))
    for a, b, c in of_each_step(coefficients, steps):
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
    for k, (a, b, c) in enumerate(of_each_step(coefficients, steps)):
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
