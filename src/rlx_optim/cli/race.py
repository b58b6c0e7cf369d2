"""`rlx-optim race`: every optimizer trains the same model, and a page shows how they did.

rlx-optim race
rlx-optim race --model char-gpt --optimizers adamw,muon,soap --steps 500 --tune --out my-race
rlx-optim race --model gpt --device cuda --plan race --minutes 9 --out evidence
"""

from __future__ import annotations

import contextlib
import datetime
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..named import list_optimizers
from ..race import plan as planned
from ..race import records, report
from ..race.running import GRID, MODELS, Race, get_model, missing, run
from ..registry import aliases
from . import NAMES, Problem, choose, machine, one, say, show_table, size, write_json
from .bench import digits

REPORT, RESULTS = "report.html", "results.json"


def new_folder(given: Path | None, resumed: bool = False) -> Path:
    """A folder that is new or empty, or has the runs of a plan that goes on; made before anything is trained for it."""
    folder = given or Path(f"race-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (resumed and (folder / records.RUNS).exists()):
            raise Problem(f"--out: {folder} is not empty; name a new folder{' or one of a plan' if resumed else ''}")
        (folder / REPORT).touch()
        (folder / REPORT).unlink()
    except OSError as problem:
        raise Problem(f"--out: cannot write {folder}: {problem.strerror}") from None
    return folder


@contextlib.contextmanager
def live(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[float], None]]]:
    """A bar on stderr: what runs, its loss, the time left. Gives the two functions that move it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("[bold]{task.description:28}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("loss {task.fields[loss]:<8}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, loss="")
        yield (
            lambda name: bar.update(task, description=name),
            lambda loss: bar.update(task, advance=1, loss=f"{loss:.4g}"),
        )


def show_grid(found: dict[str, Any]) -> None:
    """The training loss at each rate of the grid, the one taken marked."""

    def cell(trial: dict[str, Any], taken: float) -> str:
        end = "diverged" if trial["train_loss"] is None else digits(trial["train_loss"])
        return f"{trial['lr']:g}: {end}{' *' if trial['lr'] == taken else ''}"

    rows = [[name, *(cell(trial, e["lr"]) for trial in e["grid"])] for name, e in found["optimizers"].items()]
    say("learning rate: final training loss (* the one taken)")
    show_table(["optimizer", *(f"× {factor:g}" for factor in GRID)], rows, [False] * len(rows))


def show(found: dict[str, Any]) -> None:
    """The table, best first."""
    metric = found["model"]["metric"]

    def rank(item: tuple[str, dict[str, Any]]) -> float:
        end = item[1][metric]
        return float("inf") if end is None else -end["mean"] if metric == "accuracy" else end["mean"]

    def spread(end: dict[str, Any] | None, show: Callable[[float], str]) -> str:
        if end is None:
            return "diverged"
        return show(end["mean"]) + ("" if end["sd"] is None else f" ± {show(end['sd'])}")

    rows = []
    for name, e in sorted(found["optimizers"].items(), key=rank):
        note = f" ({e['diverged']} of {e['runs']} diverged)" if e["diverged"] else ""
        rows.append([
            name + note, f"{e['lr']:g}", spread(e["accuracy"], "{:.1%}".format), spread(e["test_loss"], "{:.3g}".format),
            spread(e["train_loss"], "{:.3g}".format), digits(e["ms_per_step"]["mean"]), size(e["state_bytes"]),
        ])  # fmt: skip
    head = ("optimizer", "lr", "test accuracy", "test loss", "train loss", "ms/step", "state")
    show_table(head, rows, [place == 0 for place in range(len(rows))], spare=(3,))


def command_line(race: Race, default: Race) -> str:
    """The command that gives this race again."""
    given: list[str] = ["rlx-optim", "race", "--model", race.model.name]
    if list(race.optimizers) != list(default.optimizers):
        given += ["--optimizers", ",".join(race.optimizers)]
    given += ["--steps", str(race.steps), "--seeds", str(race.seeds), "--engine", race.engine]
    given += ["--plan", race.plan] if race.plan else ["--tune"] if race.tune else []
    return shlex.join(given)


def cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def known_runs(given: list[Path]) -> list[Path]:
    """Files of earlier runs: those given, and those of folders given."""
    for path in given:
        if not path.exists():
            raise Problem(f"--known: no file or folder {path}")
    return [file for path in given for file in ([path] if path.is_file() else sorted(path.rglob("*.jsonl")))]


def pursue(race: Race, folder: Path, known: list[Path], stop: planned.Deadline, shared: bool) -> int:
    """Run what is missing of a plan, a line for each finished run; the exit code."""
    where = machine()
    pool = records.Pool(race.model, race.engine, folder / records.RUNS, known, shared)
    began, code, race.interrupted = len(pool.records), 0, True
    print(f"{began} runs known", flush=True)
    try:
        race.interrupted = not planned.go(
            pool, race.plan or "", race.optimizers, race.steps, stop, {key: where[key] for key in ("cpu", "versions")},
            lambda words: print(words, flush=True),
        )  # fmt: skip
    except KeyboardInterrupt:
        code = 130
    print(f"{len(pool.records) - began} runs made; {'more to do' if race.interrupted else 'the plan is done'}", flush=True)
    race.entries += planned.entries(pool, race.optimizers, race.steps)
    return code


def command(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.", autocompletion=lambda: list(MODELS))] = "digits-mlp",
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "all",
    steps: Annotated[int | None, typer.Option(min=1, help="Of each run; the model's own number by default.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each optimizer, from different weights and batches.")] = None,
    engine: Annotated[str, typer.Option(help="auto, cpu or reference; for char-gpt auto, cpu, torch or triton.")] = "auto",
    tune: Annotated[
        bool, typer.Option("--tune", help=f"First try the learning rates times {', '.join(map(str, GRID))}.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new or empty folder for the report; race-DATE-TIME by default.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help=f"{' or '.join(planned.PLANS)}: runs in the order of their worth, resumed where they stand."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Of a plan: begin nothing that would end later.")] = None,
    known: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Of a plan: earlier runs, a file or a folder of *.jsonl.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Of a plan: others use the device too; losses count, seconds do not.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; for gpt cuda by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Train one model with every optimizer and write a report that opens in a browser."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    name = one("model", model, list(MODELS))
    if library := missing(name):
        raise Problem(f'model {name} needs {library}: pip install "rlx-optim[{library}]"; digits-mlp and logreg do not')
    stop = planned.Deadline(None if minutes is None else 60 * minutes)
    raced = get_model(name)
    raced.device = raced.device if device is None else one("device", device, raced.devices)
    if raced.device == "cuda" and not cuda_is_there():
        raise Problem(f"model {name} is for a GPU, and torch finds none; --device cpu runs it all the same, slowly")
    where = one("engine", engine, raced.engines)
    followed = one("plan", plan, list(planned.PLANS)) if plan is not None else "race" if tune and name == "gpt" else None
    if followed is None and (minutes is not None or known or shared):
        raise Problem(f"--minutes, --known and --shared are for a plan: add --plan, one of {', '.join(planned.PLANS)}")
    race = Race(raced, chosen, steps or raced.steps, seeds or raced.seeds, where, tune or followed is not None, followed)
    files = known_runs(known or [])
    folder, code = new_folder(out, followed is not None), 130
    if followed is not None:
        code = pursue(race, folder, files, stop, shared)
    else:
        with live(race.total) as (begin, tick):
            run(race, begin, tick)
    every = Race(raced, list_optimizers(), race.steps, race.seeds, where, tune)
    found = report.results(race, command_line(race, every), machine())
    write_json(found, folder / RESULTS)
    (folder / REPORT).write_text(report.html(found), encoding="utf-8")
    if as_json:
        write_json(found)
    else:
        if tune and followed is None:
            show_grid(found)
        show(found)
        print(f"report: {folder / REPORT}")
    if race.interrupted:
        raise typer.Exit(code)
    if missed := race.missed():
        say(f"below the goal of {raced.goal:.0%}: {', '.join(missed)}", sys.stderr)
    raise typer.Exit(int(bool(missed) and chosen == list_optimizers()))
