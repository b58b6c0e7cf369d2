"""Schedules: callables of the iteration (0, 1, 2, …) for any hyperparameter.

    opt = AdamW(lr=schedules.warmup_cosine(3e-4, warmup=100, total=10_000))

Any other callable of one integer does as well.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

__all__ = ["constant", "cosine", "linear_warmup", "warmup_cosine", "warmup_stable_decay"]

Schedule = Callable[[int], float]


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return int(value)


def _real(name: str, value: Any) -> float:
    if not (isinstance(value, numbers.Real) and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Up from `start` to `peak` over warmup, level for stable, down to `end` over decay (cosine or linear), level after."""

    peak: float
    warmup: int = 0
    stable: int = 0
    decay: int = 0
    start: float = 0.0
    end: float = 0.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        for name in ("peak", "start", "end"):
            object.__setattr__(self, name, _real(name, getattr(self, name)))  # a NumPy number's own arithmetic may be narrow
        for name in ("warmup", "stable", "decay"):
            object.__setattr__(self, name, _whole(name, getattr(self, name), 0))
        if self.shape not in ("linear", "cosine"):
            raise ValueError(f"shape must be 'linear' or 'cosine', got {self.shape!r}")

    def __call__(self, iteration: int) -> float:
        if iteration < self.warmup:
            return self.start + (self.peak - self.start) * iteration / self.warmup
        into = iteration - self.warmup - self.stable
        if into <= 0 or self.decay == 0:
            return self.peak
        left = max(0.0, 1 - into / self.decay)
        if self.shape == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return self.end + (self.peak - self.end) * left


def constant(value: float) -> Schedule:
    """Always the same."""
    return _Pieces(value)


def linear_warmup(peak: float, warmup: int, start: float = 0.0) -> Schedule:
    """From start at iteration 0 to peak at iteration `warmup` in equal steps, then constant."""
    return _Pieces(peak, warmup=warmup, start=start)


def cosine(peak: float, total: int, end: float = 0.0) -> Schedule:
    """Half a cosine from peak at iteration 0 to end at iteration `total`, then constant."""
    return _Pieces(peak, decay=_whole("total", total, 1), end=end, shape="cosine")


def warmup_cosine(peak: float, warmup: int, total: int, start: float = 0.0, end: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine that reaches end at iteration `total`."""
    total, warmup = _whole("total", total, 1), _whole("warmup", warmup, 0)
    if total <= warmup:
        raise ValueError(f"total must be greater than warmup, got total={total!r}, warmup={warmup!r}")
    return _Pieces(peak, warmup=warmup, decay=total - warmup, start=start, end=end, shape="cosine")


def warmup_stable_decay(
    peak: float, warmup: int, stable: int, decay: int, start: float = 0.0, end: float = 0.0, shape: str = "linear"
) -> Schedule:
    """Linear warm-up, a level stretch, then down to end, linearly or along half a cosine."""
    return _Pieces(peak, warmup=warmup, stable=stable, decay=decay, start=start, end=end, shape=shape)
