"""From a race to `results.json` and to the page that shows it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..numpy.classes import list_optimizers
from . import Run
from .running import Entry, Race, spread

POINTS = 500  # of a curve: longer ones are averaged


def results(race: Race, command: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything about a race, as JSON can hold it."""
    return {
        "command": command,
        "interrupted": race.interrupted,
        "asked": list(race.optimizers),
        "steps": race.steps,
        "seeds": race.seeds,
        "engine": race.engine,
        "tuned": race.tune,
        "plan": race.plan,
        "model": {"name": race.model.name, "title": race.model.title, "metric": race.model.metric, **race.model.describe()},
        "machine": machine,
        "optimizers": {entry.optimizer: described(entry) for entry in race.entries},
    }


def described(entry: Entry) -> dict[str, Any]:
    runs = entry.runs
    return {
        "lr": entry.settings["lr"],
        "settings": dict(entry.settings),
        "runs": len(runs),
        "diverged": sum(run.diverged_at is not None for run in runs),
        "diverged_at": [run.diverged_at for run in runs],
        **{metric: spread(entry.metric(metric)) for metric in ("accuracy", "test_loss", "train_loss")},
        "ms_per_step": spread([run.ms_per_step for run in runs]),
        "seconds": float(np.mean([run.seconds[-1] for run in runs])),
        "state_bytes": max(run.state_bytes for run in runs),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "engine": runs[0].engine,
        "curve": curve(runs),
        "grid": [dataclasses.asdict(trial) for trial in entry.grid],
    }


def curve(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Loss by step over the seeds (mean, least, most) and the mean time, in at most POINTS points. A diverged run counts up to
    its last finite loss."""
    length = max(len(run.losses) for run in runs)
    losses, seconds = (np.full((len(runs), length), np.nan) for _ in range(2))
    for row, run in enumerate(runs):
        known = [loss if math.isfinite(loss) else np.nan for loss in run.losses]
        losses[row, : len(known)], seconds[row, : len(known)] = known, run.seconds
    edges = np.unique(np.linspace(0, length, min(length, POINTS) + 1).astype(int))
    points: dict[str, list[Any]] = {"step": [], "loss": [], "low": [], "high": [], "seconds": []}
    for first, last in itertools.pairwise(edges):
        part = losses[:, first:last]
        alive = ~np.isnan(part).all(axis=1)
        if alive.any():
            each = np.nanmean(part[alive], axis=1)
            points["step"].append(int(last))
            points["seconds"].append(digits(np.nanmean(seconds[alive, last - 1]) if alive.any() else 0.0))
            for key, value in {"loss": each.mean(), "low": each.min(), "high": each.max()}.items():
                points[key].append(digits(value))
    return points


def digits(value: float) -> float | None:
    """Five digits that count."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# ---- pages --------------------------------------------------------------------------------------------------------------
PAGES = Path(__file__).parent / "pages"


def page(file: Path, title: str, data: dict[str, Any]) -> str:
    """A page with its style, its scripts and its data inside: it needs nothing else and no network. file: without its suffix."""

    held = {
        "title": title.replace("&", "&amp;").replace("<", "&lt;"),
        "style": (PAGES / "style.css").read_text(encoding="utf-8"),
        "script": f"{(PAGES / 'plot.js').read_text(encoding='utf-8')}\n{file.with_suffix('.js').read_text(encoding='utf-8')}",
        "data": json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/"),
    }
    text = file.with_suffix(".html").read_text(encoding="utf-8")
    for word, value in held.items():
        text = text.replace("{{" + word + "}}", value)
    return text


def html(found: dict[str, Any]) -> str:
    """The report of a race. Every optimizer keeps its colour, whoever else takes part."""
    place = {name: i for i, name in enumerate(list_optimizers())}
    data = {**found, "names": list(found["optimizers"]), "place": place}
    return page(PAGES / "report", f"rlx-optim race: {found['model']['name']}", data)
