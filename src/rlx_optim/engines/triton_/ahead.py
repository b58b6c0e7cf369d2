"""Kernels compiled ahead, by threads, while the step goes on with what comes before them.

Most of a compile is outside of Python (LLVM, ptxas, a C compiler for the launcher), so several take about as long as one. A
thread runs the real thing on a small stack, so that it compiles just what the step will launch.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
import triton

from . import panels, precise, products

PANEL_ROWS = 512  # rows of a small basis; products of twice as many are summed in parts


def start(device: torch.device, *functions: Callable[[], None]) -> list[threading.Thread]:
    """Threads that call these functions; none on a device that is not CUDA's."""

    def run(function: Callable[[], None]) -> None:
        with torch.cuda.device(device), torch.no_grad():
            function()

    if device.type != "cuda":
        return []
    triton.runtime.driver.active.get_current_device()  # which is made once, and not by two threads
    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def is_capturing(device: torch.device) -> bool:
    """Whether this thread records a graph, in which nothing is waited for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


@functools.cache
def shrinking(device: torch.device) -> list[threading.Thread]:
    """`shrink`, which Newton–Schulz begins with."""

    def shrink() -> None:
        products.half(small(device), torch.ones(1, device=device), 1.0)

    return start(device, shrink)


@functools.cache
def packing(device: torch.device) -> list[threading.Thread]:
    """`repack`, which matrices of many shapes are stacked with, both ways."""

    def pack() -> None:
        flat, table = torch.zeros(1, device=device), torch.zeros((1, 5), dtype=torch.int64, device=device)
        stack = small(device)
        products.packed(flat, table, stack)
        products.packed(flat, table, stack, out=True)

    return start(device, pack)


def small(device: torch.device) -> torch.Tensor:
    return torch.zeros((1, products.SIDE, products.SIDE), device=device)


@functools.cache
def multiplying(device: torch.device, large: bool = False, tall: bool = False) -> list[threading.Thread]:
    """Newton–Schulz's products: of matrices of `large` sides, or of others; the first of them of tall ones, where they are."""

    def multiply(added: bool, tall: bool = False) -> None:
        side = products.CONFIGS[0]["LEAST"] if large else products.LEAST
        X = products.zero_padded((1, side, side), device)
        products.product(X, X, torch.empty_like(X), add=X if added else None, tall=tall)

    each = [functools.partial(multiply, False), functools.partial(multiply, True)]
    return start(device, *each, *([functools.partial(multiply, False, True)] if tall else []))


@functools.cache
def bases(device: torch.device) -> list[threading.Thread]:
    """What makes the bases that follow the first, some steps later."""

    def tensors(rows: int = PANEL_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.eye(rows, device=device)[None], torch.zeros((1, rows), device=device)

    def orthonormalize() -> None:
        X, noise = tensors()
        panels.orthonormal(X[..., : panels.WIDTH], noise[:, : panels.WIDTH])

    def project_out(first: int, rows: int) -> None:
        """Columns less what so many others span, a panel or more."""
        X, noise = tensors(rows)
        rest, first = slice(first, 2 * first), slice(first)
        for after in (noise[:, rest], None):
            panels.without(X[..., rest], X[..., first], after, noise[:, first])

    def multiply() -> None:
        X, noise = tensors()
        half = PANEL_ROWS // 2
        shares = precise.product(X[..., :half].mT, X[..., half:], 1)
        precise.joined(X[..., half:], X[..., :half], shares, 1, 1.0, -1.0)
        panels.follow(noise[:, half:], shares, noise[:, :half])

    def look() -> None:
        X, noise = tensors()
        panels.diagonal(X, X)
        panels.chosen(X, X, noise > 0, torch.arange(PANEL_ROWS, device=device)[None])
        precise.square(X.mT, 1)
        precise.product(X, X)

    parts = [functools.partial(project_out, panels.WIDTH * k, PANEL_ROWS * k) for k in (1, 2)]
    return start(device, orthonormalize, *parts, multiply, look)
