"""Linear algebra on stacks of tensors, in the words of the engine protocol alone.

Axis 0 of every array counts tensors of equal shape, the other axes are the tensor's own. A *factor* belongs to one axis of
the tensor: a matrix (B, n, n) or, for `gram` and `every`, also a diagonal (B, n).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

TINY = 2.0**-126  # the smallest normal float32
ROUNDING = {8: 2.0**-20, 4: 2.0**-16}  # what it may leave of a matrix kept in float32, by the bytes of the arithmetic
SKEW = 1e-4  # what is further from orthonormal went wrong: rounding leaves a tenth of it at most


def along(E: Any, f: Callable[[Any], Any], X: Any, axis: int) -> Any:
    """f, which acts on (B, n, rest), applied to one axis of a stack."""
    Y = E.moveaxis(X, axis, 1)
    return E.moveaxis(f(Y.reshape(*Y.shape[:2], -1)).reshape(Y.shape), 1, axis)


def every(E: Any, f: Callable[[Any, Any], Any], factors: Mapping[int, Any], X: Any) -> Any:
    """f(factor, ·) along each axis that has a factor."""
    for axis, q in factors.items():
        X = along(E, functools.partial(f, q), X, axis)
    return X


def rotated(E: Any, bases: Mapping[int, Any], X: Any, back: bool = False) -> Any:
    """X in the basis of each axis that has one; back: out of it. The last axis is rotated where it is, which moves nothing."""
    for axis, Q in bases.items():
        if axis == X.ndim - 1:
            X = E.product(X.reshape(X.shape[0], -1, X.shape[-1]), Q.mT if back else Q).reshape(X.shape)
        else:
            X = along(E, functools.partial(E.product, Q if back else Q.mT), X, axis)
    return X


def gram(E: Any, X: Any, axis: int, diagonal: bool = False) -> Any:
    """X contracted with itself over every axis of the tensor but one."""
    U = E.moveaxis(X, axis, 1).reshape(X.shape[0], X.shape[axis], -1)
    return (U * U).sum(-1) if diagonal else E.square(U)


def average_gram(E: Any, L: Any, X: Any, axis: int, beta: float, alpha: float) -> tuple[Any, Any]:
    """What `E.average_gram` says."""
    new = beta * E.wide(L) + alpha * gram(E, E.wide(X), axis)
    sound = finite(E, E.narrow(new))
    return E.where(sound, E.narrow(new), L), E.where(sound, new, E.wide(L))


def permute(E: Any, X: Any, order: Any, axis: int) -> Any:
    """X with one axis reordered, each tensor of the stack by its own order (B, n)."""
    return E.take(X, order.reshape(order.shape[0], *(-1 if i == axis else 1 for i in range(1, X.ndim))), axis)


def finite(E: Any, X: Any) -> Any:
    """Per tensor, broadcastable: no entry is infinite or NaN."""
    return E.norm(X, math.inf) < math.inf


def spectral_bound(E: Any, T: Any) -> Any:
    """A cheap lower bound on the spectral norm of symmetric T, which is not needed any more: one power step from its largest
    column, floored at TINY."""
    top = E.floor(E.norm(T, math.inf), TINY)
    T = E.scaled(T, 1 / top)
    largest = E.lines(T, -2).argmax(-1)[..., None]
    x = T @ E.take(T, largest, 2)
    return E.floor(E.norm(T @ (x / E.floor(E.norm(x), TINY))) * top, TINY)


def eigenbasis(E: Any, L: Any, eye: Any) -> Any:
    """Eigenvectors of symmetric L, by descending eigenvalue. Of a null space: the unit vectors whose columns of L depend on those
    before, less what the other eigenvectors span, made orthonormal one by one."""
    L = L / E.floor(E.norm(L, math.inf), TINY)
    values, Q = E.eigh(L)
    free = minor(E, values)  # the last ones

    def settled(Q: Any) -> Any:
        units = permute(E, eye, last(E, dependent(E, E.qr(L, surely=True), L), E.counter(L.shape[-1])[None]), 2)
        return E.where(free.any(-1)[:, None, None], E.qr(E.where(free[:, None, :], units, Q), surely=True), Q)

    return E.cond(free.any(), settled, lambda Q: Q, Q)


def orthonormal(E: Any, X: Any, near: Any, order: Any, free: Any) -> Any:
    """The Q of X = QR, up to signs; X is not needed any more. A column that depends on those before is that of orthonormal `near`
    instead, less what the others span, made orthonormal one by one by ascending `order` (B, n). Those that are `free` (B, n), and
    last, are known to.

    One decomposition tells which others do; where there are any, a second one settles them."""
    X = E.scaled(X, 1 / E.floor(E.norm(X, math.inf), TINY))
    Q = E.extended(X, near, free)
    every = dependent(E, Q, X, free)

    def once_more(Q: Any) -> Any:
        return settle(E, X, every, near, order)

    return E.cond((every & ~free).any(), once_more, lambda Q: Q, Q)


def orthonormal_by_products(E: Any, X: Any, near: Any, order: Any, free: Any) -> Any:
    """`orthonormal` by products alone, and nobody is asked what came: where that is no basis, `near` stays.

    Columns are made orthonormal twice: those of X, which tells what depends on others; then those that do not, as they are,
    with columns of `near` behind."""
    X = X / E.floor(E.norm(X, math.inf), TINY)
    lengths = E.floor(E.sqrt(E.lines(X, -2)), TINY)
    noise = ROUNDING[X.dtype.itemsize] * E.norm(lengths, math.inf) / lengths
    noise = E.where(free[:, None, :], 0 * noise + 2, E.cap(noise, 2.0))[:, 0] ** 2
    V = gram_schmidt_of_units(E, X / lengths, noise)
    free = ~(E.lines(V, -2)[:, 0] > 0.5)
    behind = last(E, free, order)
    Q = gram_schmidt_of_units(E, E.chosen(V, near, free, behind))
    Q = permute(E, straightened(E, Q), E.inverse(behind), 2)
    return E.where((skew(E, Q) < SKEW)[:, None, None], Q, near)


def settle(E: Any, X: Any, free: Any, near: Any, order: Any) -> Any:
    """The Q of X, whose `free` columns are those of `near`, and come after all others."""
    behind = last(E, free, order)
    return permute(E, E.qr(E.chosen(X, near, free, behind)), E.inverse(behind), 2)


def dependent(E: Any, Q: Any, X: Any, known: Any = None) -> Any:
    """Which columns of X = QR (B, n) depend on those before, but for rounding; those `known` to are not looked at."""
    sizes = abs(E.diagonal(Q, X))  # of R
    bar, top = ROUNDING[sizes.dtype.itemsize], E.norm(sizes, math.inf)
    free, doubtful = (~(sizes > share * top) for share in (bar, math.sqrt(bar)))  # NaN is not larger
    if known is not None:
        free, doubtful = free | known, doubtful & ~known
    doubtful = doubtful.any(-1)[:, None]

    def examine(free: Any) -> Any:
        return free | doubtful & (bar * top * E.reach(Q, X, free) >= 1)

    return E.cond(doubtful.any(), examine, lambda free: free, free)


def reach(E: Any, Q: Any, X: Any, free: Any) -> Any:
    """What `E.reach` says."""
    places = E.counter(free.shape[-1])
    eye = 0 * Q + (places[:, None] == places)
    R = E.where(free[:, None, :] | free[:, :, None], eye, E.triu(E.precise(Q.mT, X)))
    return E.sqrt(E.lines(E.solve(R, eye), -1))[..., 0]


def gram_schmidt(E: Any, X: Any, noise: Any = None) -> Any:
    """The Q of X = QR, in X's own memory: by halves, the second less what the first spans.

    noise (B, n): the square of what a column of length 1 may be off. What that makes of later ones is followed, in its place, and
    a column of which no more is left becomes zero. Without it, where columns depend on others, Q is no basis, and where they
    nearly do, none that `straightened` would mend."""
    X /= E.floor(E.sqrt(E.lines(X, -2)), TINY)
    return gram_schmidt_of_units(E, X, noise)


def gram_schmidt_of_units(E: Any, X: Any, noise: Any = None) -> Any:
    """The same of columns that have length 1."""
    n, width = X.shape[-1], E.panel
    if n <= width:
        E.few(X, noise)
        return X
    middle = width * -(-n // (2 * width))
    (first, rest), (before, after) = ((None, None) if of is None else (of[..., :middle], of[..., middle:]) for of in (X, noise))
    gram_schmidt_of_units(E, first, before)
    E.without(rest, first, after, before)
    gram_schmidt_of_units(E, rest, after)
    return X


def without(E: Any, rest: Any, first: Any, after: Any, before: Any) -> None:
    """Columns less what orthonormal `first` span, in their memory. With noise, which then decides, twice; `after` (B, k) follows,
    where columns of `first` are off by `before` (B, m)."""
    shares = E.precise(first.mT, rest, most=1)
    rest -= E.precise(first, shares, most=1)
    if after is None:
        return
    after[...] = larger(E, after, E.row_max((shares * shares * before[:, :, None]).mT))
    if rest.dtype.itemsize < 8:  # what rounding left of it, which the columns' shrinking would enlarge
        rest -= E.product(first, E.product(first.mT, rest))


def by_cholesky(E: Any, X: Any) -> Any:
    """The Q of a few columns X = QR: R is the Cholesky factor of their Gram matrix, once they have length 1."""
    X = X / E.floor(E.sqrt(E.lines(X, -2)), TINY)
    G, places = X.mT @ X, E.counter(X.shape[-1])
    return X @ E.solve(E.cholesky(G), 0 * G + (places[:, None] == places)).mT


def by_pivots(E: Any, X: Any, noise: Any) -> Any:
    """The Q of a few columns X = QR, by the Cholesky factor N of their Gram matrix, one after the other; noise as above."""
    S, places = X.mT @ X, E.counter(X.shape[-1])
    C = 0 * S + (places[:, None] == places)  # N^-1 at the end; zero in what is left out
    for k in range(S.shape[-1]):
        pivot = S[:, k, k]
        root = E.where(pivot > noise[:, k], 1 / E.sqrt(E.floor(pivot, TINY)), 0 * pivot)
        column = E.where(places > k, S[:, k], 0.0) * root[:, None]
        C[:, k] *= root[:, None]
        C -= column[:, :, None] * C[:, None, k]
        S -= column[:, :, None] * column[:, None]
        noise[:, k] *= root * root
        noise[...] = larger(E, noise, column * column * noise[:, k, None])
    return X @ C.mT


def larger(E: Any, a: Any, b: Any) -> Any:
    return E.where(a > b, a, b)


def straightened(E: Any, Q: Any) -> Any:
    """Q nearly orthonormal, but for the square of what it lacks: with Q'Q = I + U + U', up to lengths, and U strictly upper
    triangular it is Q (I − U), as Q R^-1 would be with the Cholesky factor R of Q'Q."""
    D, places = E.square(Q.mT, most=1), E.counter(Q.shape[-1])
    Q = E.less(Q, Q, E.where(places[:, None] < places, D, 0.0))
    return Q / E.sqrt(E.lines(Q, -2))


def skew(E: Any, Q: Any) -> Any:
    """How far Q'Q·1 is from 1, for each of a stack: nearly nothing where Q is orthonormal, NaN where it is NaN."""
    return E.norm((Q.mT @ Q.sum(-1)[..., None])[..., 0] - 1, math.inf)[:, 0]


def minor(E: Any, sizes: Any) -> Any:
    """Which of the sizes (B, n) may be rounding of the largest."""
    return sizes <= ROUNDING[sizes.dtype.itemsize] * E.norm(sizes, math.inf)


def last(E: Any, chosen: Any, order: Any) -> Any:
    """The order (B, n) that puts the chosen at the end, by ascending `order`, and leaves the others as they are."""
    n = chosen.shape[-1]
    return E.argsort(E.where(chosen, order + n, E.counter(n)))


def descending(E: Any, sizes: Any) -> Any:
    """The order (B, n) of descending sizes; those that may be rounding come last, as they are."""
    return E.argsort(E.where(minor(E, sizes), E.real(E.counter(sizes.shape[-1])), -sizes))


#: a, b and c of a Newton–Schulz step, or of each: the last go on
Coefficients = tuple[Any, ...]


def of_each_step(coefficients: Coefficients, steps: int) -> list[Any]:
    """a, b and c of every step."""
    several = coefficients if isinstance(coefficients[0], tuple) else (coefficients,)
    return [several[min(k, len(several) - 1)] for k in range(steps)]


def orthogonalize(E: Any, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
    """Newton–Schulz: push the singular values of each matrix of (B, rows, columns) towards 1, on the smaller side. Further axes
    are columns too."""
    shape = X.shape
    X = X.reshape(*shape[:2], -1)
    tall = X.shape[1] > X.shape[2]
    X = X.mT if tall else X
    X = X / (E.norm(X) + eps)
    for a, b, c in of_each_step(coefficients, steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A.mT)) @ X  # A is symmetric; saying so lets BLAS halve the work
    return (X.mT if tall else X).reshape(shape)
