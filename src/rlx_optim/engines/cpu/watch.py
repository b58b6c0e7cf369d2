"""The quick check of arrays that were checked before: a compiled look at NumPy's own array headers.

A header (PyArrayObject, part of NumPy's C interface) holds the address, shape, type and flags. Reading it costs nanoseconds
where Python's attributes cost microseconds, and it sees every change: another buffer, another shape, a cleared write flag. Where
headers do not look as expected (another interpreter), `trusted` is False and every call is checked in full instead.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cfunc, types

from .cache import compiled
from .native import int32_at, int64_at

# offsets into the header: type, data, number of dimensions, dimensions, element type, flags
TYPE, DATA, NDIM, DIMS, DESCR, FLAGS = 8, 16, 24, 32, 56, 64
READABLE, WRITABLE = 0x0001 | 0x0100, 0x0001 | 0x0100 | 0x0400  # C-contiguous and aligned; and writable
NDARRAY = id(np.ndarray)


@compiled(cfunc, types.int64(types.int64, types.int64))
def _admit(table, n):
    """0, and nothing written, unless all headers are as expected and no gradient lies in a parameter. Else the version of the
    gradients' addresses in the table, which are written and counted up only then: it moves when one of them does.

    table: n ids of parameters, n of gradients, n parameter addresses, n gradient addresses, n numbers of dimensions, n offsets
    into the dimensions, n parameter starts in order, n ends in that order, ids of ndarray and the dtype, the version,
    bytes of an element, dimensions.
    """
    t = int64_at(table)
    ndarray, dtype, dims = t[8 * n], t[8 * n + 1], 8 * n + 4
    moved = 0
    for k in range(2 * n):
        i = k % n
        header = t[k]
        need = WRITABLE if k < n else READABLE
        if int64_at(header + TYPE)[0] != ndarray or int64_at(header + DESCR)[0] != dtype:
            return 0
        if int32_at(header + FLAGS)[0] & need != need or int32_at(header + NDIM)[0] != t[4 * n + i]:
            return 0
        shape = int64_at(int64_at(header + DIMS)[0])
        size = t[8 * n + 3]
        for d in range(t[4 * n + i]):
            if shape[d] != t[dims + t[5 * n + i] + d]:
                return 0
            size *= shape[d]
        data = int64_at(header + DATA)[0]
        if k < n:
            if data != t[2 * n + i]:
                return 0
            continue
        if t[3 * n + i] == data:
            continue
        moved = 1
        lo, hi = 0, n  # the first parameter that ends after the gradient starts
        while lo < hi:
            middle = (lo + hi) // 2
            if t[7 * n + middle] <= data:
                lo = middle + 1
            else:
                hi = middle
        if lo < n and size > 0 and t[6 * n + lo] < data + size:
            return 0
    if moved:
        for i in range(n):
            t[3 * n + i] = int64_at(t[n + i] + DATA)[0]
        t[8 * n + 2] += 1
    return t[8 * n + 2]


@functools.cache
def _quick() -> Any:
    # PYFUNCTYPE keeps the interpreter lock: nobody changes a header while it is read
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(_admit.address or 0)


def address(array: np.ndarray) -> int:
    start: int = array.__array_interface__["data"][0]
    return start


class HeaderWatch:
    """Remembers the headers of arrays that passed every check."""

    def __init__(self, params: Sequence[np.ndarray], grads: Sequence[np.ndarray]):
        n = self.n = len(params)
        starts = [address(p) for p in params]
        # empty arrays own no memory: they stand beyond every other
        spans = sorted((s, s + p.nbytes) if p.size else (2**62, 2**62) for s, p in zip(starts, params, strict=True))
        dims = [p.shape for p in params]
        offsets = itertools.accumulate((len(shape) for shape in dims[:-1]), initial=0)
        parts: list[Any] = [map(id, params), map(id, grads), starts, map(address, grads), map(len, dims), offsets]
        dtype = np.dtype(params[0].dtype.type if n else np.float32)  # all have the same; NumPy has one object for each
        parts += [(s for s, _ in spans), (e for _, e in spans), (NDARRAY, id(dtype), 1, dtype.itemsize)]
        parts += [(d for shape in dims for d in shape)]
        self.table = np.array([int(value) for part in parts for value in part], np.int64)
        self.where = address(self.table)
        self.pair = (ctypes.c_int64 * 2).from_buffer(self.table.data)  # the ids of a single pair; faster than through NumPy
        self.version = 1  # of the gradients' addresses
        self.check = _quick()
        self.ids, self.params, self.grads = self.table[: 2 * n], self.table[2 * n : 3 * n], self.table[3 * n : 4 * n]

    def admit(self, params: Sequence[np.ndarray], grads: Sequence[np.ndarray]) -> bool:
        if self.n == 1:
            self.pair[:] = [id(params[0]), id(grads[0])]
        else:
            self.ids[:] = [*map(id, params), *map(id, grads)]
        version = self.check(self.where, self.n)
        if version:
            self.version = version
        return version > 0  # type: ignore[no-any-return]


@functools.cache
def trusted() -> bool:
    """Whether headers look here as this module reads them."""
    if ctypes.sizeof(ctypes.c_void_p) != 8 or object.__basicsize__ != 16:
        return False
    good, other = np.zeros((3, 5), np.float32), np.ones((3, 5), np.float32)
    locked = np.zeros((3, 5), np.float32)
    locked.flags.writeable = False
    watch = HeaderWatch([good], [other])
    moved = np.ones((3, 5), np.float32)
    refused: list[tuple[np.ndarray, np.ndarray]] = [(locked, other), (good, good), (good, other.T)]
    refused += [(good, np.zeros((3, 5))), (good, np.zeros((5, 3), np.float32))]
    return (
        watch.admit([good], [other])
        and int(watch.grads[0]) == address(other)
        and watch.admit([good], [moved])
        and int(watch.grads[0]) == address(moved)
        and not any(watch.admit([p], [g]) for p, g in refused)
    )
