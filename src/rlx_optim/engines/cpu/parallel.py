"""Running a kernel over its chunks: on this thread, or on several through numba's threading layer.

Two things numba leaves to its user are settled here. Its "workqueue" layer must not be entered by two threads at once: a lock
keeps them apart. GNU OpenMP must not be used in a child that was forked after its parent used it: there we stay on one thread.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def, attr-defined, call-arg"

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

import numba as nb
from numba import cfunc, njit, prange, types

from .cache import compiled
from .native import call, int64_at

_lock = threading.Lock()
_first_used_in: list[int] = []  # the process that started numba's threads


@compiled(njit, types.void(*[types.int64] * 8), parallel=True, nogil=True)
def _spread(kernel, address, numbers, chunks, bounds, pieces, partial, scratch):
    for k in prange(pieces):
        edge = int64_at(bounds)
        call(kernel, address, numbers, chunks, edge[k], edge[k + 1], partial, scratch)


@compiled(cfunc, types.void(types.int64))
def _alone(arguments):
    a = int64_at(arguments)
    call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])


#: run a kernel on this thread, given the address of its own address and its seven arguments; one pointer is cheaper to pass than
#: eight numbers. `alone_briefly` keeps the interpreter's lock, which is cheaper still where the work takes microseconds.
alone = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_alone.address or 0)
alone_briefly = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_alone.address or 0)


def may_spread() -> bool:
    """False in a forked child whose parent used OpenMP: entering it there ends the process."""
    return not _first_used_in or _first_used_in[0] == os.getpid() or nb.threading_layer() != "omp"


def spread(*arguments: int, threads: int) -> None:
    """Run the pieces of a kernel on several threads."""
    if not _first_used_in:
        with _lock:  # starts the layer
            _spread(*arguments)
            _first_used_in.append(os.getpid())
            return
    guard = _lock if nb.threading_layer() == "workqueue" else contextlib.nullcontext()
    with guard:
        nb.set_num_threads(min(threads, nb.config.NUMBA_NUM_THREADS))
        _spread(*arguments)


def description() -> str:
    return nb.threading_layer() if _first_used_in else "not started"
