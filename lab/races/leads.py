"""What the runs of a pool allow to be said: spreads over seeds, leads beyond them, what was reached in how many steps.

A lead is the mean difference over seeds that both have; it is called one only if it is larger than what seeds alone do: two
standard errors of the differences, and never less than what AdamW's own spread over its seeds makes likely for that many of them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

BESIDE = 2.0  # standard errors
APART = 10.0  # times what AdamW's seeds make likely: from there on seeds say nothing together


@dataclasses.dataclass(frozen=True)
class Lead:
    """How much lower a loss is than the one it is compared with, over the seeds of both."""

    mean: float  # of (other − own): above 0 is better
    margin: float | None  # that seeds alone would do; None where nothing is known of them
    seeds: int
    apart: bool = False  # whether its own seeds are

    @property
    def verdict(self) -> str:
        """ "ahead", "behind", "level", "unclear" where seeds are too far apart, or "open" where the spread is not known."""
        if self.margin is None:
            return "open"
        if abs(self.mean) <= self.margin:
            return "unclear" if self.apart else "level"
        return "ahead" if self.mean > 0 else "behind"


def deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def lead(own: Mapping[int, float], other: Mapping[int, float]) -> Lead | None:
    """Losses by seed, against those of another with its own spread; None where they share no seed."""
    shared = sorted(own.keys() & other.keys())
    if not shared:
        return None
    differences = [other[seed] - own[seed] for seed in shared]
    alone, paired = deviation(list(other.values())), deviation(differences)
    if alone is None:
        return Lead(statistics.fmean(differences), None, len(shared))
    # a difference of two runs with different seeds would have √2 of the spread; that of equal seeds is taken as no surer
    likely = BESIDE * math.sqrt(2) * alone / math.sqrt(len(shared))
    found = BESIDE * paired / math.sqrt(len(shared)) if paired is not None else 0.0
    return Lead(statistics.fmean(differences), max(likely, found), len(shared), found > APART * likely)


def reaches(own: Mapping[int, float], goal: Mapping[int, float]) -> bool:
    """Whether losses by seed are, in the mean, at or below those of the same seeds. False where none is shared."""
    shared = own.keys() & goal.keys()
    return bool(shared) and statistics.fmean(own[s] for s in shared) <= statistics.fmean(goal[s] for s in shared)


def reached(lengths: Mapping[int, Mapping[int, float]], goal: Mapping[int, float]) -> int | None:
    """The shortest runs, by their steps, that reach a loss. Each had its own schedule: no longer one is cut."""
    return min((steps for steps, losses in lengths.items() if reaches(losses, goal)), default=None)
