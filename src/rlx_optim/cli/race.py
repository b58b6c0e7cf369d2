"""`rlx-optim race`: every optimizer trains the same model, and a page shows how they did.

rlx-optim race
rlx-optim race --model logreg --optimizers adamw,muon,soap --seeds 5 --tune --out my-race
"""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..numpy.classes import list_optimizers
from ..race import report
from ..race.running import GRID, MODELS, Race, run
from ..registry import aliases
from . import NAMES, Problem, choose, choose_one, get_machine, say, show_digits, show_progress, show_size, show_table, write_json

REPORT, RESULTS = "report.html", "results.json"
#: help of options that the races of language models have too
STEPS, SEEDS = "Of each run; the model's own number by default.", "Runs of each optimizer, from different weights and batches."
TUNE = f"First try the learning rates times {', '.join(map(str, GRID))}."
OUT = "A new or empty folder for the report; race-DATE-TIME by default."


def new_folder(given: Path | None, resumed: str | None = None) -> Path:
    """A folder that is new or empty, or has the file of a plan that goes on; made before anything is trained for it."""
    folder = given or Path(f"race-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (resumed and (folder / resumed).exists()):
            raise Problem(f"--out: {folder} is not empty; name a new folder{' or one of a plan' if resumed else ''}")
        (folder / REPORT).touch()
        (folder / REPORT).unlink()
    except OSError as problem:
        raise Problem(f"--out: cannot write {folder}: {problem.strerror}") from None
    return folder


def show_grid(found: dict[str, Any]) -> None:
    """The training loss at each rate of the grid, the one taken marked."""

    def cell(trial: dict[str, Any], taken: float) -> str:
        end = "diverged" if trial["train_loss"] is None else show_digits(trial["train_loss"])
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
            spread(e["train_loss"], "{:.3g}".format), show_digits(e["ms_per_step"]["mean"]), show_size(e["state_bytes"]),
        ])  # fmt: skip
    head = ("optimizer", "lr", "test accuracy", "test loss", "train loss", "ms/step", "state")
    show_table(head, rows, [place == 0 for place in range(len(rows))], spare=(3,))


def command_line(race: Race, name: str = "race") -> str:
    """The command that gives this race again."""
    given: list[str] = ["rlx-optim", name, "--model", race.model.name]
    if list(race.optimizers) != list_optimizers():
        given += ["--optimizers", ",".join(race.optimizers)]
    given += ["--steps", str(race.steps), "--seeds", str(race.seeds), "--engine", race.engine]
    given += ["--plan", race.plan] if race.plan else ["--tune"] if race.tune else []
    return shlex.join(given)


def conclude(race: Race, folder: Path, command_: str, as_json: bool, code: int = 130) -> NoReturn:
    """Write what came of a race, show it and end the process. code: that of a race that was interrupted."""
    found = report.results(race, command_, get_machine())
    write_json(found, folder / RESULTS)
    (folder / REPORT).write_text(report.html(found), encoding="utf-8")
    if as_json:
        write_json(found)
    else:
        if race.tune and race.plan is None:
            show_grid(found)
        show(found)
        print(f"report: {folder / REPORT}")
    if race.interrupted:
        raise typer.Exit(code)
    if missed := race.missed():
        say(f"below the goal of {race.model.goal:.0%}: {', '.join(missed)}", sys.stderr)
    raise typer.Exit(int(bool(missed) and list(race.optimizers) == list_optimizers()))


def train(race: Race) -> None:
    """Run everything, with a bar that says what runs, its loss and the time left."""
    with show_progress(race.total, 0) as tick:
        run(race, lambda name: tick(name, 0), lambda loss: tick(note=f"loss {loss:.4g}"))


def command(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.", autocompletion=lambda: list(MODELS))] = "digits-mlp",
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "all",
    steps: Annotated[int | None, typer.Option(min=1, help=STEPS)] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help=SEEDS)] = None,
    engine: Annotated[str, typer.Option(help="auto, cpu, reference, or a third party's.")] = "auto",
    tune: Annotated[bool, typer.Option("--tune", help=TUNE)] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Train one model with every optimizer and write a report that opens in a browser."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    raced = MODELS[choose_one("model", model, list(MODELS))]
    where = choose_one("engine", engine, raced.engines)
    race = Race(raced, chosen, steps or raced.steps, seeds or raced.seeds, where, tune)
    folder = new_folder(out)
    train(race)
    conclude(race, folder, command_line(race), as_json)
