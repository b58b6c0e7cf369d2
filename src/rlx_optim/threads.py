"""How many threads the cpu engine uses, its own and those of NumPy's BLAS."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from typing import Any

_threads: int | None = None


@functools.cache
def available() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(n: int | None) -> None:
    """Use n threads from the next step on; None goes back to every available core. The results do not depend on it, but for how
    BLAS rounds the products of matrix rules."""
    global _threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(f"set_threads needs an integer >= 1 or None, got {n!r}")
    _threads = n


def get_threads() -> int:
    """The number of threads in use: the one set, but never more than the cores available."""
    return available() if _threads is None else min(_threads, available())


@functools.cache
def _libraries() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def blas() -> contextlib.AbstractContextManager[Any]:
    """A context in which NumPy's BLAS uses our number of threads, where it was set and threadpoolctl is installed."""
    if _threads is None or importlib.util.find_spec("threadpoolctl") is None:
        return contextlib.nullcontext()
    limited: contextlib.AbstractContextManager[Any] = _libraries().limit(limits=get_threads(), user_api="blas")
    return limited
