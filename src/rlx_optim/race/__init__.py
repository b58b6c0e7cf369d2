"""The race: the same model trained by every optimizer, from the same weights, on the same batches. Only the optimizer differs.

    rlx-optim race
    rlx-optim race --model logreg --optimizers adamw,muon --seeds 5 --tune

`digits` is what is trained, `rates` has the committed learning rates, `running` runs and tunes, `report` and `pages/` make the
page. Nothing here prints; the command line is `rlx_optim.cli.race`. The repository's `lab/races` has language models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Settings = Mapping[str, Any]
#: called after every step with the loss of its batch
Tick = Callable[[float], None]


@dataclasses.dataclass
class Run:
    """One training run. `losses` are those of each step's batch before the step, `seconds` the time since the start at each."""

    seed: int
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    #: "accuracy", "test_loss", "train_loss" at the end, "validation_loss" where there is such text; nothing if it diverged
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    ms_per_step: float = 0.0  # of the optimizer's step alone, the mean over the second half of the run
    state_bytes: int = 0
    peak_bytes: int = 0  # of the device's memory during the run: weights, gradients and activations too; 0 where it is not known
    diverged_at: int | None = None  # the first step whose loss was not finite; the run ends there
    engine: str = ""  # in words: what stepped it


class Model(Protocol):
    """What is raced on."""

    name: str
    title: str  # in one line
    metric: str  # the one that ranks: "accuracy" or "test_loss"
    decides: str  # the one that settings are chosen by: never that of the test data
    goal: float | None  # the accuracy that everyone reaches in a full race
    steps: int
    seeds: int
    devices: tuple[str, ...]
    device: str  # one of them
    halves: bool  # whether it has bfloat16 weights, where `weights` among the settings says so

    @property
    def engines(self) -> tuple[str, ...]: ...

    def describe(self) -> dict[str, Any]:
        """Parameters, batch, data: what a reader of the report should know."""

    def train(self, optimizer: str, settings: Settings, steps: int, seed: int, engine: str, tick: Tick) -> Run:
        """Train once. Weights and batches depend on the seed alone."""
