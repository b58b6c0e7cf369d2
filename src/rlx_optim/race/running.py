"""Running a race: every optimizer, every seed, and before that, where asked, a small grid of learning rates."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from . import Model, Run, Settings
from .digits import LOGREG, MLP
from .rates import SETTINGS, Table, settings_of

MODELS: dict[str, Model] = {model.name: model for model in (MLP, LOGREG)}
GRID = (0.1, 0.3, 1.0, 3.0, 10.0)  # times the committed learning rate
TUNING_SEED = 1_000_003  # none of a race's own


@dataclasses.dataclass
class Trial:
    """A learning rate of the grid, and how the run with it ended. The loss is that of the training data."""

    lr: float
    train_loss: float | None
    accuracy: float | None
    diverged_at: int | None


@dataclasses.dataclass
class Entry:
    """One optimizer of a race: its settings, its runs, and the grid where it was tuned."""

    optimizer: str
    settings: Settings
    runs: list[Run] = dataclasses.field(default_factory=list)
    grid: list[Trial] = dataclasses.field(default_factory=list)

    def metric(self, name: str) -> list[float]:
        return [run.metrics[name] for run in self.runs if run.metrics]


@dataclasses.dataclass
class Race:
    """What was asked, and what came of it."""

    model: Model
    optimizers: Sequence[str]
    steps: int
    seeds: int
    engine: str
    tune: bool
    plan: str | None = None
    entries: list[Entry] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    settings: Table = dataclasses.field(default_factory=lambda: SETTINGS)  # the committed ones, by model

    @property
    def total(self) -> int:
        """Steps of all runs."""
        return self.steps * len(self.optimizers) * (self.seeds + (len(GRID) if self.tune else 0))

    def missed(self) -> list[str]:
        """Who, of those with committed settings, did not reach the goal, where there is one and the race was a full one."""
        goal = self.model.goal
        if goal is None or self.interrupted or self.steps < self.model.steps:
            return []
        tuned = [entry for entry in self.entries if entry.optimizer in self.settings[self.model.name]]
        return [e.optimizer for e in tuned if len(e.metric("accuracy")) < len(e.runs) or min(e.metric("accuracy")) < goal]


Begin = Callable[[str], None]
Tick = Callable[[float], None]


def run(race: Race, begin: Begin, tick: Tick) -> None:
    """Run everything; Ctrl-C ends it with the runs that are done. `begin` hears what runs, `tick` the loss of each step."""
    try:
        for name in race.optimizers:
            entry = Entry(name, settings_of(race.model.name, name, race.settings))
            if race.tune:
                tune(race, entry, begin, tick)
            race.entries.append(entry)
            for seed in range(race.seeds):
                begin(f"{name}, seed {seed + 1} of {race.seeds}")
                entry.runs.append(race.model.train(name, entry.settings, race.steps, seed, race.engine, tick))
    except KeyboardInterrupt:
        race.interrupted = True
        race.entries[:] = [entry for entry in race.entries if entry.runs]


def tune(race: Race, entry: Entry, begin: Begin, tick: Tick) -> None:
    """Try the grid with a seed of its own and take the rate whose training loss ends lowest: the test data decide nothing."""
    for factor in GRID:
        settings = {**entry.settings, "lr": float(f"{factor * entry.settings['lr']:.3g}")}
        begin(f"{entry.optimizer}, lr {settings['lr']:g}")
        done = race.model.train(entry.optimizer, settings, race.steps, TUNING_SEED, race.engine, tick)
        end: dict[str, Any] = done.metrics
        entry.grid.append(Trial(settings["lr"], end.get("train_loss"), end.get("accuracy"), done.diverged_at))
    good = [trial for trial in entry.grid if trial.train_loss is not None]
    if good:
        best = min(good, key=lambda trial: trial.train_loss or 0.0)
        entry.settings = {**entry.settings, "lr": best.lr}


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, least, most, standard deviation and every value over the seeds; None where there is none."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values), "sd": deviation, "values": list(values)}
