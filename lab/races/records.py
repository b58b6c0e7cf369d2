"""Runs that were made, one a line of a file, and those that are to be made.

Lines count only where the model, its text, the device and the schedule are the same (`conditions`). Several processes may share a
device, each with its own optimizers: losses are what they would be alone, the time of such runs does not count.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx_optim.race import Model, Run, Settings

RUNS = "runs.jsonl"
EVERY = 10  # steps of a point of a curve
TUNING_SEED = 1_000_003  # none of a race's own
#: settings of runs that are no part of a search
ASIDE = {"state_dtype", "weights", "precondition_frequency", "preconditioner_update_probability"}

Record = dict[str, Any]


def plain(settings: Settings) -> dict[str, Any]:
    """As JSON gives them back."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


@dataclasses.dataclass(frozen=True)
class Job:
    optimizer: str
    settings: Settings
    steps: int
    seed: int

    @functools.cached_property
    def key(self) -> str:
        return json.dumps([self.optimizer, self.settings, self.steps, self.seed], sort_keys=True)

    def describe(self) -> str:
        more = "".join(f", {key} {value}" for key, value in self.settings.items() if key in (*ASIDE, "rounding"))
        which = "tuning" if self.seed == TUNING_SEED else f"seed {self.seed}"
        return f"{self.optimizer}, lr {self.settings['lr']:g}{more}, {self.steps} steps, {which}"


def conditions(model: Model, engine: str) -> dict[str, Any]:
    """What must be the same for runs to be compared."""
    told = model.describe()
    return {"model": model.name, "engine_asked": engine, **{k: told[k] for k in CONDITIONS if k in told}}


CONDITIONS = ("parameters", "shape", "batch", "device", "corpus", "schedule")


def read(files: Iterable[Path]) -> list[Record]:
    """The records of files, one a line; a line that was cut off in writing is left out."""
    found = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


class Pool:
    """All runs that count: those of other files, and those of one that grows."""

    def __init__(
        self, model: Model, engine: str = "auto", file: Path | None = None, beside: Iterable[Path] = (), shared: bool = False
    ):
        self.model, self.engine, self.file, self.same = model, engine, file, plain(conditions(model, engine))
        self.shared = shared  # the device, with other processes
        self.records: list[Record] = []
        self.taken: dict[str, Record] = {}
        self.whose: dict[str, list[Record]] = {}
        self.failed: dict[str, str] = {}  # what raised an error here: left out, not written, tried again in another session
        for record in read([*beside, *([file] if file is not None and file.exists() else [])]):
            if {key: record.get(key) for key in self.same} == self.same:
                self._take(record)

    def _take(self, record: Record) -> None:
        key = Job(record["optimizer"], record["settings"], record["steps"], record["seed"]).key
        if key not in self.taken:
            self.taken[key] = record
            self.records.append(record)
            self.whose.setdefault(record["optimizer"], []).append(record)

    def has(self, job: Job) -> Record | None:
        return self.taken.get(job.key)

    def add(self, job: Job, run: Run, machine: Mapping[str, Any]) -> Record:
        """Take a run, and write it before anything else happens."""
        record = {
            **self.same, "optimizer": job.optimizer, "settings": plain(job.settings), "steps": job.steps, "seed": job.seed,
            **run.metrics, "diverged_at": run.diverged_at, "seconds": run.seconds[-1], "ms_per_step": run.ms_per_step,
            "training_ms": late_ms(run.seconds),
            "state_bytes": run.state_bytes, "peak_bytes": run.peak_bytes or None, "engine": run.engine,
            "loss": [digits(mean(run.losses[i : i + EVERY])) for i in range(0, len(run.losses), EVERY)],
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "shared": self.shared, **machine,
        }  # fmt: skip
        if self.file is not None:
            torn = self.file.exists() and not self.file.read_bytes().endswith(b"\n")  # a line that was cut off in writing
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self._take(record)
        return record

    def of(self, optimizer: str, steps: int | None = None, seed: int | None = None) -> list[Record]:
        """The runs of an optimizer in the order they were made, but for those of a setting that is not searched (ASIDE)."""
        return [
            record for record in self.whose.get(optimizer, ())
            if not ASIDE & record["settings"].keys() and steps in (None, record["steps"]) and seed in (None, record["seed"])
        ]  # fmt: skip

    def timed(self, optimizer: str, steps: int) -> list[Record]:
        """Those that had the device to themselves, to the end."""
        return [r for r in self.of(optimizer, steps) if not r.get("shared") and r["diverged_at"] is None]

    def pace(self, job: Job) -> float:
        """Seconds a step of the newest run that had as much of the device: of these settings, of this optimizer, of any; 0."""
        known = [r for r in self.records if r.get("shared", False) == self.shared]
        own = [r for r in known if r["optimizer"] == job.optimizer]
        alike = [r for r in own if r["settings"] == plain(job.settings)]
        newest = next((runs[-1] for runs in (alike, own, known) if runs), None)
        return newest["seconds"] / max(1, EVERY * len(newest["loss"])) if newest else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def late_ms(seconds: Sequence[float]) -> float:
    """Of a training step, the mean over the second half of a run, given when its steps ended."""
    half = len(seconds) // 2
    return 1e3 * (seconds[-1] - (seconds[half - 1] if half else 0.0)) / (len(seconds) - half)


def digits(value: float) -> float | None:
    """Five digits that count; None for what is no number."""
    return float(f"{value:.5g}") if abs(value) < float("inf") else None


def as_run(record: Record) -> Run:
    """A run again, its losses between the means over EVERY steps."""
    means = [float("nan") if loss is None else loss for loss in record["loss"]]
    count = record["steps"] if record["diverged_at"] is None else EVERY * len(means)
    losses = np.interp(np.arange(count), EVERY * (np.arange(len(means)) + 0.5), means).tolist()
    seconds = [record["seconds"] * (i + 1) / count for i in range(count)]
    metrics = {key: record[key] for key in METRICS if key in record}
    return Run(
        record["seed"], losses, seconds, metrics, record["ms_per_step"], record["state_bytes"],
        record["peak_bytes"] or 0, record["diverged_at"], record["engine"],
    )  # fmt: skip


METRICS = ("accuracy", "test_loss", "validation_loss", "train_loss")
