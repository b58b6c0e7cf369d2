"""What matrix rules ask of the cpu engine: products through NumPy's BLAS, and as little new memory as may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import basis, linalg
from ...engine import ArrayEngine
from ...linalg import Coefficients
from ...pointers import address
from ...spec import Shape
from . import bases, noise
from .grams import average_gram
from .orthogonal import WIDE, orthogonalize_wide
from .triangular import matmul_two_upper, matmul_upper, matmul_upper_transposed, solve_transposed

STACKED = 1 << 18  # entries of tensors of one shape, or of their factors, taken at once: Python takes longer than BLAS for these
LARGE = 256  # rows from which matrix products are faster than LAPACK's reflections
SKEW = 1e-9  # how far from orthonormal what they give may be
STRAIGHT = 2.0**-18  # from where on one correction, which leaves the square of that, does not do
LOOSE = 2.0  # times the rounding of what is stored: how far columns of a basis may stay that L leaves open


class CpuArrays(ArrayEngine):
    """The half of the engine that has no passes."""

    dtype: np.dtype
    stored: np.dtype

    def stack_size(self, shape: Shape) -> int:
        """A thin tensor has few entries, and its factors have the square of its longest side."""
        return max(1, STACKED // max(1, math.prod(shape), max(shape, default=1) ** 2))

    def to_float64(self, X: Any) -> np.ndarray:
        found: np.ndarray = X() if callable(X) else np.array(X, np.float64, order="C")
        return found

    def to_storage_dtype(self, X: np.ndarray) -> np.ndarray:
        return np.array(X, self.stored, order="C").astype(self.dtype, copy=False)

    def store(self, buffer: np.ndarray, value: np.ndarray) -> None:
        """But what was not changed, and is in its place."""
        value = np.asarray(value).reshape(buffer.shape)
        if (address(value), value.strides, value.dtype) != (address(buffer), buffer.strides, buffer.dtype):
            super().store(buffer, value)

    def average_gram(self, L: np.ndarray, X: np.ndarray, axis: int, beta: float, alpha: float) -> tuple[Any, Any]:
        """The first step alone asks for what was not rounded, and finds it then."""
        U = self.moveaxis(X, axis, 1).reshape(X.shape[0], X.shape[axis], -1).astype(np.float64)  # in X's order
        out = np.empty(L.shape, self.stored)
        for one, u, new in zip(np.ascontiguousarray(L), U, out, strict=True):
            average_gram(one, u, beta, alpha, new)
        return out.astype(self.dtype, copy=False), lambda: linalg.average_gram.default(self, L, X, axis, beta, alpha)[1]

    def norm(self, X: np.ndarray, order: float = 2) -> np.ndarray:
        """Without a copy of X."""
        flat = X.reshape(X.shape[0], -1)
        norm: np.ndarray = np.sqrt(np.vecdot(flat, flat)) if order == 2 else np.maximum(flat.max(-1), -flat.min(-1))
        return norm.reshape(-1, *[1] * (X.ndim - 1))

    def sum_squares(self, X: np.ndarray, axis: int) -> np.ndarray:
        """Likewise."""
        sums: np.ndarray = np.vecdot(X, X) if axis == -1 else self.column_dots(X, X)
        return np.expand_dims(sums, axis)

    def where(self, condition: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
        whole = condition.all() and np.shape(yes) == np.broadcast_shapes(np.shape(condition), np.shape(no))
        return yes if whole else np.where(condition, yes, no)  # a copy less, nearly always

    def take(self, X: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
        if X.shape[0] > 1 or index.size != index.shape[axis]:
            return np.take_along_axis(X, index, axis)
        flat = index.reshape(-1)
        alike = len(flat) == X.shape[axis] and (flat == np.arange(len(flat))).all()
        return X if alike else X.take(flat, axis)  # a copy less, mostly

    def eigh(self, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if L.shape[-1] < LARGE:
            return super().eigh(L)
        values, Q = zip(*map(bases.solve_symmetric, L), strict=True)
        return np.stack(values), np.stack(Q)

    def column_dots(self, A: np.ndarray, B: np.ndarray) -> np.ndarray:
        """Without their product."""
        found: np.ndarray = np.einsum("bij,bij->bj", A, B)
        return found

    def scale(self, X: np.ndarray, factors: np.ndarray) -> np.ndarray:
        X *= factors
        return X

    def subtract(self, A: np.ndarray, B: np.ndarray) -> np.ndarray:
        np.subtract(A, B, out=B)
        return B

    def gram_matmul(self, L: np.ndarray, Q: np.ndarray) -> np.ndarray:
        if L.shape[-1] < LARGE:
            return basis.gram_matmul.default(self, L, Q)  # type: ignore[no-any-return]
        out = np.empty(Q.shape, Q.dtype)
        for one, q, x in zip(L, Q, out, strict=True):
            bases.multiply_gram(one, q, x, basis.ROUNDING[q.dtype.itemsize])
        return out

    def qr(self, X: np.ndarray, surely: bool = False) -> np.ndarray:
        if X.shape[-1] < LARGE:
            return np.linalg.qr(X)[0]
        Q = X.copy()
        for i, x in enumerate(X):
            if surely or not self._by_products(Q[i : i + 1], len(x)):
                Q[i] = bases.find_householder_q(x)[0]
        return Q

    def extend_basis(self, X: np.ndarray, near: np.ndarray, free: np.ndarray) -> np.ndarray:
        if X.shape[-1] < LARGE:
            return self.qr(self.where(free[:, None, :], near, X))
        Q = X.copy()
        np.copyto(Q, near, where=free[:, None, :])
        for i, open_ in enumerate(free):
            if not self._by_products(Q[i : i + 1], int((~open_).sum())):
                Q[i] = bases.find_householder_q(np.where(open_, near[i], X[i]))[0]
        return Q

    def orthonormalize(self, X: np.ndarray, near: np.ndarray, order: np.ndarray, free: np.ndarray) -> np.ndarray:
        """Large ones one by one: what another of the stack asks for once more would be rounded otherwise."""
        if len(X) == 1 or X.shape[-1] < LARGE:
            return basis.orthonormalize.default(self, X, near, order, free)  # type: ignore[no-any-return]
        each = zip(X, near, order, free, strict=True)
        return np.concatenate([basis.orthonormalize.default(self, *(one[None] for one in of)) for of in each])

    def _by_products(self, Q: np.ndarray, first: int) -> bool:
        """Q <- its Q of QR, where the columns from `first` on are orthonormal already. Whether it is a basis."""
        one, two, loose = Q[..., :first], Q[..., first:], LOOSE * np.finfo(self.stored).eps
        if first:
            basis.gram_schmidt(self, one)
            if not basis.orthogonality_error(self, one)[0] < SKEW:
                return False
        if first < len(Q[0]) and not self._completed(one[0], two[0], loose):
            self.project_out(two, one)
            basis.gram_schmidt(self, two)
        return bool(basis.orthogonality_error(self, Q)[0] < max(SKEW, 2 * loose))

    def _completed(self, one: np.ndarray, two: np.ndarray, loose: float) -> bool:
        """two <- what of it is orthogonal to orthonormal `one`, and orthonormal, where it nearly is both. Else False: it may have
        changed, but not what its leading columns span beside `one`. What it lacks itself is left where that is `loose`."""
        shares = one.T @ two
        if not bases.max_abs(shares) < STRAIGHT:
            return False
        bases.subtract_product(two, one.astype(np.float32), shares.astype(np.float32))
        two /= np.sqrt(self.sum_squares(two[None], -2)[0])
        skewed = bases.probe_orthogonality(two)
        if loose <= skewed < STRAIGHT:
            two[...] = basis.reorthogonalize(self, two[None])[0]
        return skewed < STRAIGHT

    def project_out(self, rest: np.ndarray, first: np.ndarray, after: Any = None, before: Any = None) -> None:
        if after is not None:
            basis.project_out.default(self, rest, first, after, before)
            return
        for x, q in zip(rest, first, strict=True):
            bases.subtract_product(x, q, q.T @ x)

    def permute_columns(self, X: np.ndarray, order: np.ndarray) -> np.ndarray:
        for x, places in zip(X, order, strict=True):
            bases.reorder_columns(x, places)
        return X

    def inv_r_norms(self, Q: np.ndarray, X: np.ndarray, free: np.ndarray) -> np.ndarray:
        out = np.ones(free.shape)
        for q, x, bound, lengths in zip(Q, X, ~free, out, strict=True):
            lengths[bound] = bases.find_inv_r_norms(q[:, bound], x[:, bound])
        return out

    def cholesky(self, G: np.ndarray) -> np.ndarray:
        try:
            return np.linalg.cholesky(G).mT
        except np.linalg.LinAlgError:
            return np.full_like(G, np.nan)

    def solve_triangular(self, R: np.ndarray, X: np.ndarray) -> np.ndarray:
        out = np.array(X, order="C")
        for r, x in zip(np.asarray(R, out.dtype), out, strict=True):
            solve_transposed(r, x)
        return out

    def triangular_matmul(self, R: np.ndarray, X: np.ndarray, rounds: bool = False) -> np.ndarray:
        out = np.empty_like(X, self.dtype)  # in the order of X
        for r, x, y in zip(R, X, out, strict=True):
            matmul_upper(r, x, y)
        return out

    def triangular_matmul_transposed(self, R: np.ndarray, X: np.ndarray) -> np.ndarray:
        out = np.empty_like(X, self.dtype)
        for r, x, y in zip(R, X, out, strict=True):
            matmul_upper_transposed(r, x, y)
        return out

    def triangular_product(self, T: np.ndarray, R: np.ndarray) -> np.ndarray:
        out = np.empty(R.shape, self.dtype)
        for t, r, y in zip(T, R, out, strict=True):
            matmul_two_upper(t, r, y)
        return out

    def threefry(self, key0: np.ndarray, key1: np.ndarray, n: int, x1: int) -> tuple[np.ndarray, np.ndarray]:
        return noise.threefry(key0, key1, n, x1)

    def orthogonalize(self, X: np.ndarray, steps: int, coefficients: Coefficients, eps: float) -> np.ndarray:
        shape = X.shape
        X = X.reshape(*shape[:2], -1)
        tall = X.shape[1] > X.shape[2]
        wide = X.mT if tall else X
        if wide.shape[2] < WIDE * wide.shape[1]:
            plain: np.ndarray = super().orthogonalize(X, steps, coefficients, eps)
            return plain.reshape(shape)
        start = wide / (self.norm(wide) + eps)
        done = np.stack([orthogonalize_wide(matrix, steps, coefficients) for matrix in start])
        return (done.mT if tall else done).reshape(shape)
