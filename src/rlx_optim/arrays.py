"""The array operations of an engine: what a matrix rule may call beside array syntax (+ - * / < @ .mT .reshape .sum .argmax).

Here they are those of any library that looks like NumPy. Axis 0 of every array counts tensors of equal shape. An engine overrides
what its hardware does better; each docstring says what the result must be. `docs/matrices.md` lists them with shapes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from . import linalg, random, storage

Array = Any


class Arrays(storage.Words):
    """Array operations; `dtype` is that of arithmetic and scratch, `stored` of buffers."""

    dtype: Any = np.float64
    stored: Any = np.float32
    panel_width: ClassVar[int] = 128  # columns that `basis.gram_schmidt` takes at once

    def __getattr__(self, name: str) -> Any:
        """Operations by the names that they had in 0.2, with a warning."""
        from . import renamed

        return renamed.find_operation(self, name)

    # entry by entry, and reductions ---------------------------------------------------------------------------------
    def norm(self, X: Array, order: float = 2) -> Array:
        """The 2-norm of each tensor, or its largest |entry| (NaN if there is one), broadcastable."""
        flat = X.reshape(X.shape[0], -1)
        norm = self.xp.sqrt((flat * flat).sum(-1)) if order == 2 else self.amax(abs(flat), -1)
        return norm.reshape(-1, *[1] * (X.ndim - 1))

    def amax(self, X: Array, axis: int | None = None) -> Array:
        """The largest entry, of all or along an axis; NaN if there is one."""
        return X.max() if axis is None else X.max(axis)

    def sum_squares(self, X: Array, axis: int) -> Array:
        """The sum of squares of each row (axis -1) or column (-2), with an axis of length 1."""
        sums = (X * X).sum(axis)
        return sums[..., None] if axis == -1 else sums[..., None, :]

    def scale(self, X: Array, factors: Array) -> Array:
        """X times what broadcasts with it. The caller gives X up: the result may be in its memory."""
        return X * factors

    def subtract(self, A: Array, B: Array) -> Array:
        """A − B. The caller gives B up, which is in no state: the result may be in its memory."""
        return A - B

    def minimum(self, X: Array, high: float) -> Array:
        """Each entry, at most `high`."""
        return self.xp.minimum(X, high)

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        """`yes` where the condition holds, else `no`."""
        return self.xp.where(condition, yes, no)

    def sqrt(self, X: Array) -> Array:
        """The square root of each entry."""
        return self.xp.sqrt(X)

    def log(self, X: Array) -> Array:
        """The natural logarithm of each entry."""
        return self.xp.log(X)

    def cos(self, X: Array) -> Array:
        """The cosine of each entry."""
        return self.xp.cos(X)

    def sin(self, X: Array) -> Array:
        """The sine of each entry."""
        return self.xp.sin(X)

    # the order of entries -------------------------------------------------------------------------------------------
    def moveaxis(self, X: Array, source: int, target: int) -> Array:
        """X with one axis moved."""
        return self.xp.moveaxis(X, source, target)

    def concatenate(self, arrays: tuple[Array, ...]) -> Array:
        """Arrays joined along their last axis."""
        return self.xp.concatenate(arrays, -1)

    def triu(self, X: Array) -> Array:
        """The upper triangle of each matrix, zeros below."""
        return self.xp.triu(X)

    def argsort(self, X: Array) -> Array:
        """The order (B, n) that sorts each row."""
        return X.argsort(-1)

    def take(self, X: Array, index: Array, axis: int) -> Array:
        """Entries along one axis, by an index that broadcasts over the others."""
        return self.xp.take_along_axis(X, index, axis)

    # precision ------------------------------------------------------------------------------------------------------
    def to_float64(self, X: Array) -> Array:
        """X in the widest arithmetic that is cheap on this engine, for decisions that rounding would tip."""
        return X

    def to_storage_dtype(self, X: Array) -> Array:
        """X rounded to the type of buffers, and back in this engine's arithmetic."""
        return X.astype(self.stored, copy=False).astype(self.dtype, copy=False)

    def to_real(self, words: Array) -> Array:
        """Integers as numbers of this engine's arithmetic."""
        return words.astype(self.dtype)

    # linear algebra -------------------------------------------------------------------------------------------------
    def matmul(self, A: Array, B: Array) -> Array:
        """A B where rounding does no more than round the step: engines may use fewer bits."""
        return A @ B

    def matmul_sub(self, X: Array, A: Array, B: Array) -> Array:
        """X − A B, likewise."""
        return X - self.matmul(A, B)

    def matmul_precise(self, A: Array, B: Array, bound: float | None = None) -> Array:
        """A B where rounding may decide a basis: as good as this engine's arithmetic, on whatever is fast. bound: what no entry
        of the two exceeds, if that is known."""
        return A @ B

    def syrk(self, X: Array, bound: float | None = None) -> Array:
        """X Xᵀ as `matmul_precise`."""
        return X @ X.mT

    def eigh(self, L: Array) -> tuple[Array, Array]:
        """Eigenvalues (B, n) of symmetric matrices, descending, and eigenvectors; those of a null space may be any."""
        values, vectors = self.xp.linalg.eigh(L)
        return values[..., ::-1], vectors[..., ::-1]

    def qr(self, X: Array, surely: bool = False) -> Array:
        """The Q of X = QR, up to signs. Columns that depend on others may be any (`basis.orthonormalize` settles them).
        surely: there are such columns, so that what fails then need not be tried."""
        return self.xp.linalg.qr(X)[0]

    def cholesky(self, G: Array) -> Array:
        """R, upper triangular, of G = RᵀR."""
        return self.xp.linalg.cholesky(G).mT

    def solve_triangular(self, R: Array, X: Array) -> Array:
        """R⁻ᵀ X for upper triangular R."""
        return self.xp.linalg.solve(R.mT, X)

    def orthogonalize(self, X: Array, steps: int, coefficients: linalg.Coefficients, eps: float) -> Array:
        """Newton–Schulz steps on X / (‖X‖ + eps): `linalg.newton_schulz`."""
        return linalg.newton_schulz(self, X, steps, coefficients, eps)

    def threefry(self, key0: Array, key1: Array, n: int, x1: Any) -> tuple[Array, Array]:
        """Two random words (B, n) for each of n counters beside x1, by keys (B, 1)."""
        return random.threefry(key0, key1, self.counter(n), self.word(x1), self.word(random.MASK))
