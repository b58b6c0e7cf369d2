"""How an optimizer's methods are called: outside of compiled graphs, and by one thread at a time."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:  # whether frames are being compiled
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler
except ImportError:
    compiler = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """torch.compiler.disable, with a type that checkers can bind to an instance; where nothing is compiled it costs nothing.
    torch's own form of it, where there is one, does not import the compiler (a second or more) before it is needed."""
    disabled = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)
    if compiler is None:
        return disabled

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiled = torch.compiler.is_compiling() or compiler() is not None
        return disabled(*args, **kwargs) if compiled else function(*args, **kwargs)

    return call  # type: ignore[return-value]


def exclusive(method: F) -> F:
    """Let one thread at a time into an optimizer: what another reads or writes meanwhile would be half of a step."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


LOCKED: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, each with a lock


def renew_locks() -> None:
    """Give every optimizer a lock of its own in a forked child, where the thread that held the old one does not exist."""
    for optimizer in LOCKED:
        optimizer._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_locks)
