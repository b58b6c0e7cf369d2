"""`rlx-optim bench`: our steps against every installed peer's, in one run.

    rlx-optim bench --model two-blocks --optimizers adamw,lion --json results.json --plot results.png
    rlx-optim bench --model one:1M --peers none --json

This file has the options and what is printed; `measure` does the work.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from pathlib import Path
from typing import Annotated

import typer

from rlx_optim import list_optimizers
from rlx_optim.cli import (
    NAMES,
    Problem,
    check_output_path,
    choose,
    say,
    show_digits,
    show_progress,
    show_table,
    unknown_name,
    write_json,
)
from rlx_optim.cli.shapes import KNOWN, shapes_of
from rlx_optim.engines import no_compiler
from rlx_optim.registry import aliases
from rlx_optim.storage import FORMATS

from . import cuda
from .measure import run
from .peers import LIBRARIES
from .results import Report, Request, Row, check_memory, turns

PLOTS = (".png", ".svg", ".pdf")
HEAD = (
    "optimizer",
    "implementation",
    "ms/step",
    "best … worst",
    "ns/param",
    "GB/s",
    "of copy",
    "state B/param",
    "best peer / this",
)
SPARE = (7, 3, 6, 9)  # columns that a narrow terminal does without
DEVICES = ("cpu", "cuda")
FRONTS = ("torch", "jax")
WEIGHTS = ("float32", "bfloat16")


# ---- what is printed --------------------------------------------------------------------------------------------------
def cells(row: Row) -> list[str]:
    share = None if row.copy_fraction is None else 100 * row.copy_fraction
    spread = f"{show_digits(row.ms_best)} … {show_digits(row.ms_worst)}"
    numbers = [show_digits(row.ns_per_parameter), show_digits(row.gb_per_second), show_digits(share, " %")]
    return [
        row.optimizer, row.implementation, show_digits(row.ms_per_step), spread, *numbers,
        show_digits(row.state_bytes_per_parameter), show_digits(row.ratio_to_best_peer, "×"),
        *([] if row.host_ms is None else [show_digits(row.host_ms)]),
    ]  # fmt: skip


def describe(report: Report) -> str:
    """The machine and the model, in three lines."""
    m, asked = report.machine, report.settings
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    gradients = "new gradient arrays every step" if asked["fresh_gradients"] else "standing gradient arrays"
    return (
        f"{m.get('gpu', '')}\n{m['cpu']}, {m['cores']} cores, {m['threads']} threads, {m['memory_gb']} GB, {m['platform']}, "
        f"{m['date']}\n{versions}\n"
        f"{report.model}: tensors {report.tensors:,}, parameters {report.parameters:,}, {gradients}; "
        f"{asked['rounds']} rounds of {asked['seconds']} s"
    ).lstrip("\n")


def show(report: Report) -> None:
    say(describe(report))
    enqueued = any(row.host_ms is not None for row in report.rows)
    head = (*HEAD, "host ms") if enqueued else HEAD
    spare = [column for column in SPARE if column < len(head)]
    show_table(head, [cells(row) for row in report.rows], [ours(row) for row in report.rows], spare)
    copies = sorted({row.copy_gb_per_second for row in report.rows if row.copy_gb_per_second is not None})
    if copies:
        say(f"memory copy: {show_digits(statistics.median(copies))} GB/s ({show_digits(copies[0])} … {show_digits(copies[-1])})")
    compiled = [row for row in report.rows if row.compile_s is not None]
    if compiled:
        each = (f"{row.optimizer}, {row.implementation}: {row.compile_s:.1f} s" for row in compiled)
        say(f"traced and compiled in: {'; '.join(each)}")
    if enqueued:
        each = (f"{row.optimizer}, {row.implementation}: {show_digits(row.first_s)} s" for row in report.rows)
        say(f"first step: {'; '.join(each)}")
    for note in report.notes:
        say(note)


def ours(row: Row) -> bool:
    return row.implementation.startswith("ours")


def plot(report: Report, path: Path) -> None:
    """Bars of ns per parameter, one panel an optimizer, each at its own scale; ours in colour."""
    from matplotlib.figure import Figure

    panels = {name: [r for r in report.rows if r.optimizer == name] for name in dict.fromkeys(r.optimizer for r in report.rows)}
    heights = [len(panel) for panel in panels.values()]
    figure = Figure(figsize=(9, 1.3 + 0.32 * sum(heights) + 0.55 * len(panels)), layout="constrained")
    figure.suptitle(
        f"{report.model}: ns per parameter and step, less is better\n{report.machine['cpu']}, {report.machine['threads']} threads"
    )
    axes = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for ax, (name, panel) in zip(axes, panels.items(), strict=True):
        values = [row.ns_per_parameter for row in panel]
        colours = ["tab:orange" if ours(row) else "0.7" for row in panel]
        bars = ax.barh([row.implementation for row in panel], values, color=colours)
        ax.bar_label(bars, [show_digits(value) for value in values], padding=4)
        ax.set_title(name, loc="left", fontweight="bold")
        ax.set_xlim(0, 1.15 * max(values))
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def measure_offload(model: str, chosen: list[str], rounds: int, as_json: bool, file: Path | None) -> None:
    """`--offload`: a table of its own, written after every row."""
    from . import offload

    with show_progress(len(chosen) * len(offload.KINDS) + 1) as tick:
        report = offload.run(model, shapes_of(model), chosen, rounds, tick)
    if not as_json or file not in (None, Path("-")):
        offload.show(report)
    if as_json:
        write_json(dataclasses.asdict(report), file)


# ---- the command ------------------------------------------------------------------------------------------------------
def command(
    model: Annotated[str, typer.Option(help=f"Shapes: {KNOWN}.")] = "two-blocks",
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "adamw",
    peers: Annotated[str, typer.Option(help=f"{', '.join(LIBRARIES)}, comma-separated; all or none.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each implementation.")] = 7,
    seconds: Annotated[float, typer.Option(min=1e-6, help="About how long a turn takes.")] = 0.3,
    threads: Annotated[int | None, typer.Option(min=1, help="Of all implementations; every core by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: ours and torch's also captured in a CUDA graph.")] = "cpu",
    front: Annotated[str, typer.Option(help="On cuda, how ours is run: torch, or jax, beside optax.")] = "torch",
    state_dtype: Annotated[str, typer.Option(help="Ours also with its state in bfloat16, int8 or both, comma-separated.")] = "",
    weights: Annotated[
        str, typer.Option(help="On cuda, of weights and gradients: float32, or bfloat16, in each rounding.")
    ] = "float32",
    offload: Annotated[
        bool, typer.Option("--offload", help="On a CUDA device, with state on the host, and what a step is made of.")
    ] = False,
    in_situations: Annotated[
        bool, typer.Option("--situations", help="Beside torch fused, where gradients are absent, come and go, or are looked at.")
    ] = False,
    fresh_gradients: Annotated[bool, typer.Option("--fresh-gradients", help="New gradient arrays for every step.")] = False,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the results.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    file: Annotated[Path | None, typer.Argument(help="With --json: write it there, beside the table.")] = None,
) -> None:
    """Time our steps and those of every installed peer, interleaved, beside a memory copy."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    libraries = [] if peers == "none" else choose("peer", peers, LIBRARIES)
    if file is not None and not as_json:
        raise Problem(f"unexpected argument {file}: --json {file} writes the results there")
    check_output_path("--json", file, (".json",))
    check_output_path("--plot", plot_file, PLOTS)
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise Problem('--plot needs matplotlib: pip install "rlx-optim[cli]"')
    if in_situations:
        if device not in DEVICES:
            raise unknown_name("device", device, DEVICES)
        from . import situations

        situations.run(device, file)
        return
    if offload:
        measure_offload(model, chosen, rounds, as_json, file)
        return
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    if device == "cpu" and (lacking := no_compiler()):
        raise Problem(f"bench measures the compiled engine: {lacking}")
    if front not in FRONTS:
        raise unknown_name("front", front, FRONTS)
    if front == "jax" and device != "cuda":
        raise Problem("--front jax is for --device cuda; on the CPU ours is the named API, beside optax among the peers")
    if front == "jax" and state_dtype:
        raise Problem("--state-dtype is for --front torch, and for the CPU")
    if weights not in WEIGHTS:
        raise unknown_name("type of weights", weights, WEIGHTS)
    if weights != WEIGHTS[0] and (device != "cuda" or front == "jax"):
        raise Problem(f"--weights {weights} is for --device cuda and --front torch")
    kept = tuple(choose("state dtype", state_dtype, FORMATS[1:])) if state_dtype else ()
    request = Request(
        model, shapes_of(model), chosen, libraries, rounds, seconds, fresh_gradients, threads, device, front, kept, weights
    )  # fmt: skip
    (cuda.check if device == "cuda" else check_memory)(request)
    with show_progress(sum(turns(request)) * (1 + rounds) * (1 + (device == "cuda"))) as tick:
        report = run(request, tick)
    if not as_json or file not in (None, Path("-")):
        show(report)
    if as_json:
        write_json(dataclasses.asdict(report), file)
    if plot_file is not None and report.rows:
        plot(report, plot_file)
    finished = {row.optimizer for row in report.rows if ours(row)} >= set(chosen)
    raise typer.Exit(130 if report.interrupted else int(not finished))
