"""Orthonormal bases that follow a running average of Gram matrices, where rounding may not decide them.

A Gram matrix of few gradients is rank deficient: eigenvectors of its null space, and what QR makes of them, are rounding. These
functions find such columns (`null_space`, a mask (B, n)) and take them from an orthonormal matrix that is known, `prev_basis`.
`lab/notes/bases.md` has the reasons and the measurements. Axis 0 of every array counts matrices; an engine may replace what is
`Overridable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .linalg import TINY, Overridable, invert_permutation, permute

ROUNDING = {8: 2.0**-20, 4: 2.0**-16}  # what it may leave of a matrix kept in float32, by the bytes of the arithmetic
MAX_ERROR = 1e-4  # what is further from orthonormal went wrong: rounding leaves a tenth of it at most


# ---- the first basis, and the next ----------------------------------------------------------------------------------------
def eigenbasis(E: Any, L: Any, eye: Any) -> Any:
    """Eigenvectors of symmetric L, by descending eigenvalue. Those of a null space are the unit vectors whose columns of L depend
    on those before, less what the other eigenvectors span, made orthonormal one by one."""
    L = L / E.floor(E.norm(L, math.inf), TINY)
    values, Q = E.eigh(L)
    null_space = below_rounding(E, values)  # the last ones

    def complete(Q: Any) -> Any:
        units = permute(E, eye, move_last(E, dependent_columns(E, E.qr(L, surely=True), L), E.counter(L.shape[-1])[None]), 2)
        return E.where(null_space.any(-1)[:, None, None], E.qr(E.where(null_space[:, None, :], units, Q), surely=True), Q)

    return E.cond(null_space.any(), complete, lambda Q: Q, Q)


@Overridable
def orthonormalize(E: Any, X: Any, prev_basis: Any, order: Any, null_space: Any) -> Any:
    """The Q of X = QR, up to signs; the caller gives X up. A column that depends on those before is that of `prev_basis` instead,
    less what the others span, made orthonormal one by one by ascending `order` (B, n). Columns in `null_space` (B, n), the last
    ones, are known to.

    One decomposition tells which others do; where there are any, a second one settles them."""
    X = E.scale(X, 1 / E.floor(E.norm(X, math.inf), TINY))
    Q = extend_basis(E, X, prev_basis, null_space)
    dependent = dependent_columns(E, Q, X, null_space)

    def once_more(Q: Any) -> Any:
        behind = move_last(E, dependent, order)
        return permute(E, E.qr(select_columns(E, X, prev_basis, dependent, behind)), invert_permutation(E, behind), 2)

    return E.cond((dependent & ~null_space).any(), once_more, lambda Q: Q, Q)


def orthonormalize_by_products(E: Any, X: Any, prev_basis: Any, order: Any, null_space: Any) -> Any:
    """`orthonormalize` by products alone, and the host asks nothing: where the result is no basis, `prev_basis` stays.

    Columns are made orthonormal twice: those of X, which tells what depends on others; then those that do not, as they are,
    with columns of `prev_basis` behind."""
    X = X / E.floor(E.norm(X, math.inf), TINY)
    lengths = E.floor(E.sqrt(E.sum_squares(X, -2)), TINY)
    noise = ROUNDING[X.dtype.itemsize] * E.norm(lengths, math.inf) / lengths
    noise = E.where(null_space[:, None, :], 0 * noise + 2, E.minimum(noise, 2.0))[:, 0] ** 2
    V = gram_schmidt_of_units(E, X / lengths, noise)
    null_space = ~(E.sum_squares(V, -2)[:, 0] > 0.5)
    behind = move_last(E, null_space, order)
    Q = gram_schmidt_of_units(E, select_columns(E, V, prev_basis, null_space, behind))
    Q = permute(E, reorthogonalize(E, Q), invert_permutation(E, behind), 2)
    return E.where((orthogonality_error(E, Q) < MAX_ERROR)[:, None, None], Q, prev_basis)


@Overridable
def extend_basis(E: Any, X: Any, prev_basis: Any, null_space: Any) -> Any:
    """The Q of X, whose last columns, those in `null_space` (B, n), are those of `prev_basis`."""
    return E.qr(E.where(null_space[:, None, :], prev_basis, X))


def dependent_columns(E: Any, Q: Any, X: Any, known: Any = None) -> Any:
    """Which columns of X = QR (B, n) depend on those before, but for rounding; those `known` to are not looked at."""
    sizes = abs(column_dots(E, Q, X))  # of R
    bar, top = ROUNDING[sizes.dtype.itemsize], E.norm(sizes, math.inf)
    dependent, doubtful = (~(sizes > share * top) for share in (bar, math.sqrt(bar)))  # NaN is not larger
    if known is not None:
        dependent, doubtful = dependent | known, doubtful & ~known
    doubtful = doubtful.any(-1)[:, None]

    def examine(dependent: Any) -> Any:
        return dependent | doubtful & (bar * top * inv_r_norms(E, Q, X, dependent) >= 1)

    return E.cond(doubtful.any(), examine, lambda dependent: dependent, dependent)


@Overridable
def inv_r_norms(E: Any, Q: Any, X: Any, null_space: Any) -> Any:
    """How far an error of X = QR reaches in each column of Q (B, n): the norms of the columns of R⁻¹, but for those in
    `null_space`."""
    places = E.counter(null_space.shape[-1])
    eye = 0 * Q + (places[:, None] == places)
    R = E.where(null_space[:, None, :] | null_space[:, :, None], eye, E.triu(E.matmul_precise(Q.mT, X)))
    return E.sqrt(E.sum_squares(E.solve_triangular(R, eye), -1))[..., 0]


# ---- Gram–Schmidt by halves -----------------------------------------------------------------------------------------------
def gram_schmidt(E: Any, X: Any, noise: Any = None) -> Any:
    """The Q of X = QR, in X's own memory: by halves, the second less what the first spans.

    noise (B, n): the square of what a column of length 1 may be off. What that makes of later ones is followed, in its place, and
    a column of which no more is left becomes zero. Without it, where columns depend on others, Q is no basis, and where they
    nearly do, none that `reorthogonalize` would mend."""
    X /= E.floor(E.sqrt(E.sum_squares(X, -2)), TINY)
    return gram_schmidt_of_units(E, X, noise)


def gram_schmidt_of_units(E: Any, X: Any, noise: Any = None) -> Any:
    """The same of columns that have length 1."""
    n, width = X.shape[-1], E.panel_width
    if n <= width:
        orthonormalize_panel(E, X, noise)
        return X
    middle = width * -(-n // (2 * width))
    (first, rest), (before, after) = ((None, None) if of is None else (of[..., :middle], of[..., middle:]) for of in (X, noise))
    gram_schmidt_of_units(E, first, before)
    project_out(E, rest, first, after, before)
    gram_schmidt_of_units(E, rest, after)
    return X


@Overridable
def orthonormalize_panel(E: Any, X: Any, noise: Any = None) -> None:
    """The Q of a few columns, in their memory; with noise, as `gram_schmidt` says."""
    X[...] = orthonormalize_by_cholesky(E, X) if noise is None else orthonormalize_by_pivots(E, X, noise)


@Overridable
def project_out(E: Any, rest: Any, first: Any, after: Any = None, before: Any = None) -> None:
    """Columns less what orthonormal `first` span, in their memory. With noise, which then decides, twice; `after` (B, k) follows,
    where columns of `first` are off by `before` (B, m)."""
    shares = E.matmul_precise(first.mT, rest, bound=1)
    rest -= E.matmul_precise(first, shares, bound=1)
    if after is None:
        return
    after[...] = elementwise_max(E, after, E.row_max((shares * shares * before[:, :, None]).mT))
    if rest.dtype.itemsize < 8:  # what rounding left of it, which the columns' shrinking would enlarge
        rest -= E.matmul(first, E.matmul(first.mT, rest))


def orthonormalize_by_cholesky(E: Any, X: Any) -> Any:
    """The Q of a few columns X = QR: R is the Cholesky factor of their Gram matrix, once they have length 1."""
    X = X / E.floor(E.sqrt(E.sum_squares(X, -2)), TINY)
    G, places = X.mT @ X, E.counter(X.shape[-1])
    return X @ E.solve_triangular(E.cholesky(G), 0 * G + (places[:, None] == places)).mT


def orthonormalize_by_pivots(E: Any, X: Any, noise: Any) -> Any:
    """The Q of a few columns X = QR, by the Cholesky factor N of their Gram matrix, one after the other; noise as above."""
    S, places = X.mT @ X, E.counter(X.shape[-1])
    C = 0 * S + (places[:, None] == places)  # N⁻¹ at the end; zero in what is left out
    for k in range(S.shape[-1]):
        pivot = S[:, k, k]
        root = E.where(pivot > noise[:, k], 1 / E.sqrt(E.floor(pivot, TINY)), 0 * pivot)
        column = E.where(places > k, S[:, k], 0.0) * root[:, None]
        C[:, k] *= root[:, None]
        C -= column[:, :, None] * C[:, None, k]
        S -= column[:, :, None] * column[:, None]
        noise[:, k] *= root * root
        noise[...] = elementwise_max(E, noise, column * column * noise[:, k, None])
    return X @ C.mT


def elementwise_max(E: Any, a: Any, b: Any) -> Any:
    """The larger of each two entries."""
    return E.where(a > b, a, b)


def reorthogonalize(E: Any, Q: Any) -> Any:
    """Q nearly orthonormal, but for the square of what it lacks: with QᵀQ = I + U + Uᵀ, up to lengths, and U strictly upper
    triangular it is Q (I − U), as Q R⁻¹ would be with the Cholesky factor R of QᵀQ."""
    D, places = E.syrk(Q.mT, bound=1), E.counter(Q.shape[-1])
    Q = E.matmul_sub(Q, Q, E.where(places[:, None] < places, D, 0.0))
    return Q / E.sqrt(E.sum_squares(Q, -2))


def orthogonality_error(E: Any, Q: Any) -> Any:
    """How far QᵀQ·1 is from 1, for each of a stack: nearly nothing where Q is orthonormal, NaN where it is NaN."""
    return E.norm((Q.mT @ Q.sum(-1)[..., None])[..., 0] - 1, math.inf)[:, 0]


# ---- columns and their order ----------------------------------------------------------------------------------------------
def below_rounding(E: Any, sizes: Any) -> Any:
    """Which of the sizes (B, n) may be rounding of the largest."""
    return sizes <= ROUNDING[sizes.dtype.itemsize] * E.norm(sizes, math.inf)


def move_last(E: Any, chosen: Any, order: Any) -> Any:
    """The order (B, n) that puts the chosen at the end, by ascending `order`, and leaves the others as they are."""
    n = chosen.shape[-1]
    return E.argsort(E.where(chosen, order + n, E.counter(n)))


def descending_order(E: Any, sizes: Any) -> Any:
    """The order (B, n) of descending sizes; those that may be rounding come last, as they are."""
    return E.argsort(E.where(below_rounding(E, sizes), E.to_real(E.counter(sizes.shape[-1])), -sizes))


@Overridable
def column_dots(E: Any, A: Any, B: Any) -> Any:
    """The product of each column of A with that of B (B, n): the diagonal of AᵀB."""
    return (A * B).sum(-2)


@Overridable
def gram_matmul(E: Any, L: Any, Q: Any) -> Any:
    """L Q as `matmul_precise`, of an average Gram matrix and a basis; a column of which L leaves rounding alone may be 0."""
    return E.matmul_precise(E.to_float64(L), Q)


@Overridable
def permute_columns(E: Any, X: Any, order: Any) -> Any:
    """X (B, rows, n) with its columns in an order (B, n). The caller gives X up, which is in no state."""
    return permute(E, X, order, 2)


@Overridable
def select_columns(E: Any, X: Any, prev_basis: Any, null_space: Any, order: Any) -> Any:
    """The columns of X, those of `prev_basis` where they are in `null_space` (B, n), in an order (B, n)."""
    return permute(E, E.where(null_space[:, None, :], prev_basis, X), order, 2)


@Overridable
def map_by_size(E: Any, function: Callable[..., Any], stacks: Sequence[tuple[dict[int, Any], ...]]) -> list[dict[int, Any]]:
    """A function of what belongs to each axis of each of the stacks; an engine may take those of one size at once."""
    return [{axis: function(*(of[axis] for of in stack)) for axis in stack[0]} for stack in stacks]
