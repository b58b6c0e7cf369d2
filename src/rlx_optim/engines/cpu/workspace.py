"""Memory for large matrices that come and go with every tensor of a step.

The system maps, clears and takes back new memory of that size each time, which can take as long as a product with it. Here it is
kept for the next, and between tensors the system is told that it may take it (MADV_FREE): it does when memory runs short.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
from typing import Any

import numpy as np

LEAST = 2**22  # bytes: of less the C library keeps enough itself
FREE, LARGE_PAGES = getattr(mmap, "MADV_FREE", None), getattr(mmap, "MADV_HUGEPAGE", None)


class WorkspaceCache(threading.local):
    """The rooms of a thread: bytes, and the mapping they are in."""

    def __init__(self) -> None:
        self.mappings: list[tuple[np.ndarray, mmap.mmap]] = []


cache = WorkspaceCache()


def _references(workspace: list[tuple[np.ndarray, Any]], i: int) -> int:
    return sys.getrefcount(workspace[i][0])


UNUSED = _references([(np.empty(0), None)], 0)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose entries are any. Its memory is given to another once nothing refers to the array or to a part of it."""
    dtype, workspace = np.dtype(dtype), cache.mappings
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or FREE is None:
        return np.empty(shape, dtype)
    for i in range(len(workspace)):
        if size <= workspace[i][0].size <= 2 * size and _references(workspace, i) == UNUSED:
            break
    else:
        try:
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return np.empty(shape, dtype)  # which says what is missing
        _advise(mapped, LARGE_PAGES)
        i = len(workspace)
        workspace.append((np.frombuffer(mapped, np.uint8), mapped))
    found: np.ndarray = workspace[i][0][:size].view(dtype).reshape(shape)
    return found


def copy(X: np.ndarray, dtype: Any = None) -> np.ndarray:
    """X in a room."""
    out = empty(X.shape, dtype or X.dtype)
    np.copyto(out, X, casting="unsafe")
    return out


def release_unused() -> None:
    """What is not used may be taken by the system."""
    workspace = cache.mappings
    for i in range(len(workspace)):
        if _references(workspace, i) == UNUSED:
            _advise(workspace[i][1], FREE)


def _advise(mapped: mmap.mmap, advice: int | None) -> None:
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without large pages, memory that is locked
            mapped.madvise(advice)
