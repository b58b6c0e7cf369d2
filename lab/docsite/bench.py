"""Tables of speed, from the committed results of `rlx-optim bench --json`: benchmarks/*/*.json."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlx_optim import list_optimizers
from rlx_optim.cli.info import describe_rule
from rlx_optim.registry import spec_class

from . import evidence
from .text import table

ROOT = Path(__file__).parents[2]
MODELS = {
    "one:1k": "one tensor of 1,000",
    "one:16k": "one tensor of 16,000",
    "one:262k": "one tensor of 262,000",
    "one:4M": "one tensor of 4 million",
    "one:32M": "one tensor of 32 million",
    "many-tiny": "2,000 tensors of 64 to 4,000",
    "many-small": "2,000 tensors of 1,000 to 64,000",
    "two-blocks": "two GPT-2 blocks, 24 tensors",
}


class Measured(NamedTuple):
    """Ours and the best peer, timed in one run."""

    ms: float
    ns: float
    gb: float | None
    peer: str
    peer_ms: float | None
    run: dict[str, Any]

    @property
    def ratio(self) -> float | None:
        return None if self.peer_ms is None else self.peer_ms / self.ms

    @property
    def adamw_ms(self) -> float | None:
        """Our AdamW's time in the same run, or in the one nearest to it on such a processor."""
        near = [run for run in runs() if (run["model"], run["machine"]["cpu"]) == (self.run["model"], self.run["machine"]["cpu"])]
        near = [self.run, *sorted(near, key=lambda run: abs(seconds(run) - seconds(self.run)))]
        wanted = ("adamw", "ours")
        rows = [row for run in near for row in run["rows"] if (row["optimizer"], row["implementation"]) == wanted]
        return rows[0]["ms_per_step"] if rows else None


def seconds(run: dict[str, Any]) -> float:
    """When it was."""
    return datetime.datetime.fromisoformat(run["machine"]["date"]).timestamp()


@functools.cache
def runs() -> list[dict[str, Any]]:
    """Every committed CPU run, the oldest first."""
    found = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").glob("*/*.json"))]
    cpu = [run for run in found if "rows" in run and run["settings"].get("device", "cpu") == "cpu"]
    return sorted(cpu, key=lambda run: run["machine"]["date"])


@functools.cache
def newest() -> dict[tuple[str, str], Measured]:
    """By (model, optimizer): the run with the most peers of it, the latest of equals."""
    latest: dict[tuple[str, str], Measured] = {}
    counts: dict[tuple[str, str], int] = {}
    for run in runs():
        if run["settings"].get("fresh_gradients"):
            continue
        for name in list_optimizers():
            rows = [row for row in run["rows"] if row["optimizer"] == name]
            ours = [row for row in rows if row["implementation"] == "ours"]
            if not ours or len(rows) < counts.get((run["model"], name), 0):
                continue
            counts[run["model"], name] = len(rows)
            peers = [row for row in rows if not row["implementation"].startswith("ours")]
            best = min(peers, key=lambda row: row["ms_per_step"], default=None)
            latest[run["model"], name] = Measured(
                ours[0]["ms_per_step"],
                ours[0]["ns_per_parameter"],
                ours[0].get("gb_per_second"),
                best["implementation"] if best else "",
                best["ms_per_step"] if best else None,
                run,
            )
    return latest


# ---- words ----------------------------------------------------------------------------------------------------------------
def figures(x: float) -> str:
    """Three figures."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def duration(ms: float) -> str:
    return f"{figures(ms)} ms" if ms >= 1 else f"{figures(1000 * ms)} µs"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"


def source(model: str) -> str:
    """Where the figures of a model come from."""
    used = [m.run["machine"] for (of, _), m in newest().items() if of == model]
    said = sorted({f"{on['date'][:10]}, {on['threads']} threads of an {on['cpu'].replace('(R)', '')}" for on in used})
    return f"from `rlx-optim bench --model {model}` ({'; '.join(said)})"


def copies(model: str = "two-blocks") -> str:
    """How fast a plain copy was in the runs of a model."""
    found = sorted(row["copy_gb_per_second"] for (of, _), m in newest().items() if of == model for row in m.run["rows"])
    return f"{found[0]:.0f} to {found[-1]:.0f} GB/s"


def speed(name: str) -> str:
    """ns a parameter on two blocks."""
    found = newest().get(("two-blocks", name))
    return figures(found.ns) if found else "–"


def measured(name: str) -> str:
    """What was measured of an optimizer, in a sentence."""
    found = newest().get(("two-blocks", name))
    if found is None:
        return ""
    peer = f", {times(found.ratio)} the speed of the best peer there ({found.peer})" if found.ratio else ""
    how = ", with momentum" if name == "sgd" else ""
    size = f"24 tensors, {found.run['parameters'] / 1e6:.1f} M parameters"
    return (
        f"Measured{how}: a step of two GPT-2 blocks ({size}) takes {duration(found.ms)}, {figures(found.ns)} ns a parameter"
        f"{peer}; "
        f"{source('two-blocks')}, all of them in [the benchmarks](../benchmarks.md)."
    )


# ---- tables -----------------------------------------------------------------------------------------------------------------
def by_optimizer(model: str = "two-blocks", among: Sequence[str] | None = None) -> str:
    rows = []
    for name in among or list_optimizers():
        if (model, name) in newest():
            m = newest()[model, name]
            peer = f"{m.peer}, {duration(m.peer_ms)}" if m.peer_ms else "none measured"
            moved = figures(m.gb) if m.gb else "–"
            rows.append([spec_class(name).title, duration(m.ms), figures(m.ns), moved, peer, times(m.ratio)])
    return table(["optimizer", "a step", "ns a parameter", "GB/s", "best peer", "ours is"], rows, right=(1, 2, 3, 5))


def by_size(name: str = "adamw") -> str:
    rows = []
    for model, words in MODELS.items():
        if (model, name) in newest():
            m = newest()[model, name]
            rows.append([words, duration(m.ms), f"{m.peer}, {duration(m.peer_ms)}" if m.peer_ms else "–", times(m.ratio)])
    return table(["tensors", "a step", "best peer", "ours is"], rows, right=(1, 3))


def choices() -> str:
    """What each costs: state, traffic, and time beside AdamW's in the same run, on a CPU and on a GPU."""
    rows, beside = [], evidence.cost("adamw")
    for name in list_optimizers():
        told, found, gpu = describe_rule(name), newest().get(("two-blocks", name)), device_ms().get(name)
        traffic = told["traffic_bytes_per_parameter"]
        rows.append([
            f"[{told['class']}](optimizers/{name}.md)",
            figures(told["state_bytes_per_parameter"]),
            str(traffic) if traffic else "matrix products",
            figures(found.ns) if found else "–",
            times(found.ms / found.adamw_ms) if found and found.adamw_ms else "–",
            figures(gpu[0]) if gpu else "–",
            times(gpu[0] / gpu[1]) if gpu else "–",
            times(spent.step / beside.step) if (spent := evidence.cost(name)) and beside else "–",
        ])  # fmt: skip
    head = [
        "optimizer", "state, bytes a parameter", "traffic, bytes a parameter", "CPU: ns a parameter", "AdamW = 1",
        "H200: ms for GPT-2 124M", "AdamW = 1", "a training step, AdamW = 1",
    ]  # fmt: skip
    return table(head, rows, right=(1, 2, 3, 4, 5, 6, 7))


@functools.cache
def on_device(model: str = "gpt2-124m") -> list[dict[str, Any]]:
    """The committed runs of a model on a GPU, the oldest first."""
    found = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").glob("*/*.json"))]
    gpu = [r for r in found if r.get("model") == model and r["settings"].get("device") == "cuda"]
    return sorted(gpu, key=lambda r: r["machine"]["date"])


@functools.cache
def device_ms() -> dict[str, tuple[float, float]]:
    """Milliseconds of our step of GPT-2 124M on a GPU, and AdamW's of the same run, from the newest that has both."""
    found = {}
    for run in on_device():
        ours = {row["optimizer"]: row["ms_per_step"] for row in run["rows"] if row["implementation"] == "ours"}
        found |= {name: (ms, ours["adamw"]) for name, ms in ours.items() if "adamw" in ours}
    return found


def device_source() -> str:
    dates = sorted({run["machine"]["date"][:10] for run in on_device()})
    said = f"from `rlx-optim bench --device cuda --model gpt2-124m` ({' and '.join(dates)}; eager steps)"
    return f"Time on a GPU is {said}, that of a whole training step from [the GPT of 25 M](evidence.md)."


def training_run() -> str:
    """What a step costs a training run, from the page of the H200."""
    text = (ROOT / "benchmarks" / "h200.md").read_text().partition("## What a step costs a training run\n")[2]
    return text.partition("\n## ")[0].strip()


# ---- a GPU ------------------------------------------------------------------------------------------------------------
GRAPH = ", in a CUDA graph"


def on_a_gpu(model: str) -> str:
    """One line an optimizer of the newest run of this model on a GPU that has peers."""
    run = next(r for r in reversed(on_device(model)) if any(not row["implementation"].startswith("ours") for row in r["rows"]))
    lines = []
    for name in dict.fromkeys(row["optimizer"] for row in run["rows"]):
        rows = {row["implementation"]: row for row in run["rows"] if row["optimizer"] == name}
        ours, captured = rows["ours"], rows.get("ours" + GRAPH)
        peers = [row for label, row in rows.items() if not label.startswith("ours")]
        best = min(peers, key=lambda row: row["ms_per_step"], default=None)
        eager = min(
            (row for row in peers if GRAPH not in row["implementation"]), key=lambda row: row["ms_per_step"], default=None
        )
        share = "" if ours["copy_fraction"] is None else f"{100 * ours['copy_fraction']:.0f} %"
        lines.append(
            [
                spec_class(name).title, f"{ours['ms_per_step']:.3g}", share, f"{ours['host_ms']:.2g}",
                "" if captured is None else f"{captured['ms_per_step']:.3g}",
                "" if eager is None else f"{eager['implementation']} {eager['ms_per_step']:.3g}",
                "" if eager is None else f"{eager['ms_per_step'] / ours['ms_per_step']:.2f}×",
                "" if best is None or captured is None
                else f"{best['ms_per_step'] / min(ours['ms_per_step'], captured['ms_per_step']):.2f}×",
            ]
        )  # fmt: skip
    head = [
        "optimizer",
        "ours ms",
        "of copy",
        "host ms",
        "in a graph ms",
        "best eager peer ms",
        "ratio",
        "best of each, graphs too",
    ]
    return table(head, lines)


def in_jax() -> str:
    """Ours under JAX beside optax, from the committed run on a GPU."""
    rows = json.loads((ROOT / "benchmarks" / "jax-h200-2026-11-16.json").read_text())["rows"]
    pairs: dict[str, dict[str, Any]] = {}
    for row in rows:
        pairs.setdefault(row["optimizer"], {})[row["implementation"]] = row
    lines = []
    for name, by in pairs.items():
        ours, theirs = by["ours, in JAX"], by["optax"]
        milliseconds = [f"{figures(row[key])}" for row in (ours, theirs) for key in ("ms_per_step", "ms_best", "ms_worst")]
        lines.append(
            [spec_class(name).title, "{}, {} … {}".format(*milliseconds[:3]), "{}, {} … {}".format(*milliseconds[3:]),
             times(theirs["ms_per_step"] / ours["ms_per_step"]), f"{ours['compile_s']:.1f}", f"{theirs['compile_s']:.1f}"]
        )  # fmt: skip
    head = ["rule", "ours, ms: median, best … worst", "optax's", "ratio", "compiled in, s", "optax's, s"]
    return table(head, lines, right=(3, 4, 5))
