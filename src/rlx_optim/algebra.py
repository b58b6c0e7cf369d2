"""What matrix rules ask of an engine, beside array syntax (+ - * / < @ .mT .reshape .sum .argmax): here in any library that looks
like NumPy. Axis 0 of every array counts tensors of equal shape.

An engine overrides what its hardware does better; what a result must be is said here.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from . import linalg, random, storage

Array = Any


class Algebra(storage.Words):
    """`dtype` is that of arithmetic and scratch, `stored` of buffers."""

    dtype: Any = np.float64
    stored: Any = np.float32

    def norm(self, X: Array, order: float = 2) -> Array:
        """One number per tensor, broadcastable: 2-norm, or the largest |entry| (NaN if there is one)."""
        flat = X.reshape(X.shape[0], -1)
        norm = self.xp.sqrt((flat * flat).sum(-1)) if order == 2 else self.most(abs(flat), -1)
        return norm.reshape(-1, *[1] * (X.ndim - 1))

    def most(self, X: Array, axis: int | None = None) -> Array:
        """The largest entry, of all or along an axis; NaN if there is one."""
        return X.max() if axis is None else X.max(axis)

    def lines(self, X: Array, axis: int) -> Array:
        """The sum of squares of each row (axis -1) or column (-2), with an axis of length 1."""
        sums = (X * X).sum(axis)
        return sums[..., None] if axis == -1 else sums[..., None, :]

    def scaled(self, X: Array, factors: Array) -> Array:
        """X times what lines up with it. X is not needed any more: it may be what is given back."""
        return X * factors

    def cap(self, X: Array, high: float) -> Array:
        return self.xp.minimum(X, high)

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        return self.xp.where(condition, yes, no)

    def moveaxis(self, X: Array, source: int, target: int) -> Array:
        return self.xp.moveaxis(X, source, target)

    def triu(self, X: Array) -> Array:
        return self.xp.triu(X)

    def argsort(self, X: Array) -> Array:
        """The order (B, n) that sorts each row."""
        return X.argsort(-1)

    def inverse(self, order: Array) -> Array:
        """The order (B, n) that undoes one."""
        return order.argsort(-1)

    def take(self, X: Array, index: Array, axis: int) -> Array:
        """Gather along one axis by an index that broadcasts over the others."""
        return self.xp.take_along_axis(X, index, axis)

    def reordered(self, X: Array, order: Array) -> Array:
        """X (B, rows, n) with its columns in an order (B, n). X is not needed any more, and is in no state."""
        return linalg.permute(self, X, order, 2)

    def chosen(self, X: Array, near: Array, free: Array, order: Array) -> Array:
        """The columns of X, those of `near` where they are `free` (B, n), in an order (B, n)."""
        return linalg.permute(self, self.where(free[:, None, :], near, X), order, 2)

    def wide(self, X: Array) -> Array:
        """X in the widest arithmetic that is cheap here, for decisions that rounding would tip."""
        return X

    def narrow(self, X: Array) -> Array:
        """X rounded to what is stored, and back in this engine's arithmetic."""
        return X.astype(self.stored, copy=False).astype(self.dtype, copy=False)

    def eigh(self, L: Array) -> tuple[Array, Array]:
        """Eigenvalues (B, n) of symmetric matrices, descending, and eigenvectors; of a null space they may be any."""
        values, vectors = self.xp.linalg.eigh(L)
        return values[..., ::-1], vectors[..., ::-1]

    def diagonal(self, A: Array, B: Array) -> Array:
        """That of A^T B (B, n)."""
        return (A * B).sum(-2)

    def applied(self, L: Array, Q: Array) -> Array:
        """L Q as `precise`, of an average Gram matrix and a basis; a column of which L leaves rounding alone may be 0."""
        return self.precise(self.wide(L), Q)

    def product(self, A: Array, B: Array) -> Array:
        """A B where rounding does no more than round the step: engines may use fewer bits."""
        return A @ B

    def less(self, X: Array, A: Array, B: Array) -> Array:
        """X − A B, likewise."""
        return X - self.product(A, B)

    def precise(self, A: Array, B: Array, most: float | None = None) -> Array:
        """A B where rounding may decide a basis: as good as this engine's arithmetic, on whatever is fast. most: what no entry of
        the two is above, if that is known."""
        return A @ B

    def square(self, X: Array, most: float | None = None) -> Array:
        """X X^T as `precise`."""
        return X @ X.mT

    def average_gram(self, L: Array, X: Array, axis: int, beta: float, alpha: float) -> tuple[Array, Array]:
        """beta·L + alpha·(Gram matrix of an axis of X), or L where that is not finite: as it is stored, and what `wide` makes it
        of before it is rounded."""
        return linalg.average_gram(self, L, X, axis, beta, alpha)

    def qr(self, X: Array, surely: bool = False) -> Array:
        """The Q of X = QR, up to signs. In directions that X leaves open it may be any (`linalg.orthonormal` settles them).
        surely: there are such, so that what fails then need not be tried."""
        return self.xp.linalg.qr(X)[0]

    def extended(self, X: Array, near: Array, free: Array) -> Array:
        """`qr` of X, whose last columns, those that are `free` (B, n), are those of orthonormal `near`."""
        return self.qr(self.where(free[:, None, :], near, X))

    def reach(self, Q: Array, X: Array, free: Array) -> Array:
        """How far an error of X = QR reaches in each column of Q (B, n): the lengths of the columns of R^-1, but for those that
        are `free`."""
        return linalg.reach(self, Q, X, free)

    def orthonormal(self, X: Array, near: Array, order: Array, free: Array) -> Array:
        """The basis that follows `near`, the one before, from X = L·near."""
        return linalg.orthonormal(self, X, near, order, free)

    # what `linalg.gram_schmidt` asks
    panel: ClassVar[int] = 128  # columns that are taken at once

    def few(self, X: Array, noise: Array | None = None) -> None:
        """The Q of such columns, in their memory; with noise, as `linalg.gram_schmidt` says."""
        X[...] = linalg.by_cholesky(self, X) if noise is None else linalg.by_pivots(self, X, noise)

    def without(self, rest: Array, first: Array, after: Array | None = None, before: Array | None = None) -> None:
        """What `linalg.without` says."""
        linalg.without(self, rest, first, after, before)

    def cholesky(self, G: Array) -> Array:
        """R, upper triangular, of G = R^T R."""
        return self.xp.linalg.cholesky(G).mT

    def solve(self, R: Array, X: Array) -> Array:
        """R^-T X for upper triangular R."""
        return self.xp.linalg.solve(R.mT, X)

    def upper(self, R: Array, X: Array, rounds: bool = False) -> Array:
        """R X for upper triangular R. rounds: as `product`, else as `precise`."""
        return self.product(R, X) if rounds else self.precise(R, X)

    def upper_transposed(self, R: Array, X: Array) -> Array:
        """R^T X for upper triangular R, as `product`."""
        return self.product(R.mT, X)

    def upper_upper(self, T: Array, R: Array) -> Array:
        """triu(T) R for upper triangular R, as `precise`."""
        return self.upper(self.triu(T), R)

    def difference(self, A: Array, B: Array) -> Array:
        """A − B. B is not needed any more, and is in no state."""
        return A - B

    def orthogonalize(self, X: Array, steps: int, coefficients: linalg.Coefficients, eps: float) -> Array:
        return linalg.orthogonalize(self, X, steps, coefficients, eps)

    # what `random` asks of an array library
    def threefry(self, key0: Array, key1: Array, n: int, x1: Any) -> tuple[Array, Array]:
        """Two words (B, n) for each of n counters beside x1, by keys (B, 1)."""
        return random.threefry(key0, key1, self.counter(n), self.word(x1), self.word(random.MASK))

    def real(self, words: Array) -> Array:
        return words.astype(self.dtype)

    def sqrt(self, X: Array) -> Array:
        return self.xp.sqrt(X)

    def log(self, X: Array) -> Array:
        return self.xp.log(X)

    def cos(self, X: Array) -> Array:
        return self.xp.cos(X)

    def sin(self, X: Array) -> Array:
        return self.xp.sin(X)

    def concatenate(self, arrays: tuple[Array, ...]) -> Array:
        return self.xp.concatenate(arrays, -1)
