"""`rlx-optim landscape`: the optimizers' paths on three known functions, as one page.

rlx-optim landscape --optimizers sgd,adamw,muon --out paths.html
"""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engines import list_engines
from ..named import list_optimizers
from ..race import landscape
from ..registry import aliases
from . import NAMES, Problem, check_place, choose, machine, one, progress, say, show_table, write_json
from .bench import digits


def show(found: dict[str, Any], names: list[str]) -> None:
    surfaces = found["surfaces"].values()
    ends = {name: [surface["paths"][name] for surface in surfaces] for name in names}
    rows = [[name, *(f"{digits(e['value'])} (lr {e['lr']:g})" for e in end)] for name, end in ends.items()]
    say(f"value after {found['steps']} steps, with the best of {len(found['rates'])} learning rates")
    show_table(["optimizer", *(surface["title"] for surface in surfaces)], rows, [False] * len(rows))


def command(
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "all",
    steps: Annotated[int, typer.Option(min=1, help="Of each walk.")] = landscape.STEPS,
    engine: Annotated[str, typer.Option(help="Where the steps run.")] = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="The page; landscape-DATE-TIME.html by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON instead of a table.")] = False,
) -> None:
    """Draw the optimizers' paths on Rosenbrock, Beale and Rastrigin as one page."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    where = one("engine", engine, ("auto", *list_engines()))
    page = out or Path(f"landscape-{datetime.datetime.now():%Y%m%d-%H%M%S}.html")
    check_place("--out", page, (".html",))
    if page.exists():
        raise Problem(f"--out: {page} exists; name a new file")
    again = shlex.join(["rlx-optim", "landscape", "--optimizers", ",".join(chosen), "--steps", str(steps), "--engine", where])
    with progress(len(chosen) * len(landscape.SURFACES)) as tick:
        found = landscape.results(chosen, steps, where, tick, again, machine())
    page.write_text(landscape.html(found), encoding="utf-8")
    if as_json:
        write_json(found)
    else:
        show(found, chosen)
        print(f"page: {page}")
