"""How many threads the cpu engine uses."""

from __future__ import annotations

import functools
import os

_threads: int | None = None


@functools.cache
def available() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(n: int | None) -> None:
    """Use n threads from the next step on; None goes back to every available core. The results do not depend on it."""
    global _threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(f"set_threads needs an integer >= 1 or None, got {n!r}")
    _threads = n


def get_threads() -> int:
    """The number of threads in use: the one set, but never more than the cores available."""
    return available() if _threads is None else min(_threads, available())
