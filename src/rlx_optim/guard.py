"""`skip_above`: leave out a step whose gradient, or loss, is far above what it has been, as OLMo-core's SkipStepOptimizer does.

A value is judged by the mean and the standard deviation of the finite ones before it, as many as the window holds, once that is
half full. It joins the window whatever the verdict, so that a new level is taken for one after a while; what is not finite is
skipped and does not join (it would stay for 128 steps, and skip them all).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .spec import real

WINDOW, HALF = 128, 63  # HALF: how many before; OLMo-core counts the value itself
FLOOR = 1e-6  # of the mean: the least standard deviation, so that rounding is not an outlier
SIGMAS = real(None, open_low=True, optional=True)


def judge(xp: Any, places: Any, window: Any, count: Any, value: Any, sigmas: float) -> tuple[Any, Any, Any]:
    """Whether a value is out of line, and the window and the count of values after it: all of them arrays of the library xp, so
    that nobody waits. places: 0, 1, … of the window."""
    known, nothing = places < count, xp.zeros_like(window)
    n = xp.where(known, nothing + 1, nothing).sum()
    mean = xp.where(known, window, nothing).sum() / n
    spread = xp.sqrt(xp.where(known, (window - mean) * (window - mean), nothing).sum() / (n - 1))
    far = value - mean > sigmas * xp.maximum(spread, FLOOR * abs(mean))
    finite = xp.isfinite(value)
    window = xp.where((places == count % WINDOW) & finite, value, window)
    return ~finite | ((n >= HALF) & far), window, xp.where(finite, count + 1, count)


def check_sigmas(owner: str, sigmas: Any) -> float | None:
    """The setting itself: a number of standard deviations, or None."""
    found: float | None = SIGMAS.validated(owner, "skip_above", sigmas)
    if found is not None and not math.isfinite(found):
        raise ValueError(f"{owner}: skip_above must be {SIGMAS.expected}, got {sigmas!r}")
    return found


def window_error(values: Any) -> str | None:
    """What is wrong with windows from a checkpoint; None: nothing."""
    if not isinstance(values, Mapping) or not values.keys() <= {"norm", "loss"}:
        return "windows of 'norm' and 'loss' are needed"
    for what, each in values.items():
        fine = isinstance(each, (list, tuple)) and each and all(type(x) in (int, float) and math.isfinite(x) for x in each)
        if not fine or each[0] != int(each[0]) or each[0] < 0 or len(each) - 1 != min(each[0], WINDOW):
            return f"{what!r} must be a count and as many finite numbers, {WINDOW} at most, got {each!r:.80}"
    return None


class Guard:
    """The windows of one optimizer: of the norm of all gradients, and of the loss where it is given."""

    def __init__(self, xp: Any, **options: Any):
        self.library: str = xp.__name__  # by name: it is copied and pickled with its optimizer
        self.places = xp.arange(WINDOW, **options)
        self.seen = {
            what: (xp.zeros(WINDOW, dtype=xp.float64, **options), xp.zeros((), dtype=xp.int64, **options))
            for what in ("norm", "loss")
        }

    def bad(self, sigmas: float, norm: Any, loss: Any = None) -> Any:
        """Whether to leave this step out; takes its values in."""
        verdicts = []
        for what, value in (("norm", norm), ("loss", loss)):
            if value is not None:
                verdict, *after = judge(sys.modules[self.library], self.places, *self.seen[what], value, sigmas)
                self.keep(what, *after)
                verdicts.append(verdict)
        return verdicts[0] if loss is None else verdicts[0] | verdicts[1]

    def values(self) -> dict[str, list[float]]:
        """For a checkpoint: of each window how many values it has seen, then those it holds."""
        found = {}
        for what, (window, count) in self.seen.items():
            seen = int(count)
            found[what] = [seen, *window.tolist()[:seen]]
        return found

    def take(self, values: Mapping[str, Sequence[float]]) -> None:
        """Go on where a checkpoint ended; `window_error` has said nothing against it."""
        xp = sys.modules[self.library]
        for what, (seen, *window) in values.items():
            full = [*window, *[0.0] * (WINDOW - len(window))]
            self.keep(what, xp.asarray(full, dtype=xp.float64), xp.asarray(int(seen)))

    def keep(self, what: str, window: Any, count: Any) -> None:
        """In the same memory, where a captured step finds it again."""
        for held, new in zip(self.seen[what], (window, count), strict=True):
            held[...] = new
