"""Tables of the small races on a CPU, from committed results of `rlx-optim race`: benchmarks/race/MODEL.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlx_optim.registry import spec_class

from .text import table

ROOT = Path(__file__).parents[2]


@functools.cache
def found(model: str) -> dict[str, Any]:
    """What `results.json` has, the curves thinned (`lab/race.py`)."""
    read: dict[str, Any] = json.loads((ROOT / "benchmarks" / "race" / f"{model}.json").read_text())
    return read


def by_optimizer(model: str) -> str:
    """One line an optimizer, the best first. Times are left out: they are of a machine that did other things."""
    metric = found(model)["model"]["metric"]
    sign = -1 if metric == "accuracy" else 1
    entries = sorted(found(model)["optimizers"].items(), key=lambda item: sign * item[1][metric]["mean"])

    def cell(end: dict[str, Any], show: Callable[[float], str]) -> str:
        told = show(end["mean"]) + (f" ± {show(end['sd'])}" if end["sd"] is not None else "")
        return told.replace(" ", "\u00a0").replace("-", "\u2011")  # not to be folded

    rows = [
        [
            f"[{spec_class(name).title}](optimizers/{name}.md)", f"{e['lr']:g}", cell(e["accuracy"], "{:.1%}".format),
            cell(e["test_loss"], "{:.2g}".format if model != "char-gpt" else "{:.3f}".format),
            cell(e["train_loss"], "{:.2g}".format if model != "char-gpt" else "{:.3f}".format), f"{e['state_bytes'] / 1e3:,.1f}",
        ]
        for name, e in entries
    ]  # fmt: skip
    return table(["optimizer", "lr", "test accuracy", "test loss", "training loss", "state, kB"], rows, right=(1, 2, 3, 4, 5))


def drawn() -> list[str]:
    """The models whose committed results have curves."""
    models = sorted(path.stem for path in (ROOT / "benchmarks" / "race").glob("*.json"))
    return [model for model in models if all("curve" in entry for entry in found(model)["optimizers"].values())]


def figure(model: str) -> str:
    if model not in drawn():
        return "Its curves were not kept."
    words = f"Training loss by step, {found(model)['model']['title']}; the best at the end in colour, and AdamW"
    return "\n".join(f"![{words}](assets/plots/race-{model}-{theme}.svg#only-{theme})" for theme in ("light", "dark"))


def source(model: str) -> str:
    told = found(model)
    used = ", ".join(f"{n} {v}" for n, v in told["machine"]["versions"].items() if n in ("python", "numpy", "torch", "rlx_optim"))
    size = f"{told['model']['parameters']:,} parameters, {told['model']['data']}"
    return f"`{told['command']}`, {told['machine']['date'][:10]} ({used}): {size}"
