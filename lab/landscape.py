"""`rlx-optim landscape`: the optimizers' paths on three known functions of two numbers, each with the rate that suits it best.

    rlx-optim landscape --optimizers sgd,adamw,muon --out paths.html

The point is one tensor of 1×2, so that rules for matrices walk too. Learning rates fall to 0 along half a cosine.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rlx_optim import list_optimizers
from rlx_optim.cli import (
    NAMES,
    Problem,
    check_output_path,
    choose,
    choose_one,
    get_machine,
    say,
    show_digits,
    show_progress,
    show_table,
    write_json,
)
from rlx_optim.engines import list_engines
from rlx_optim.numpy.curvature import CurvatureOptimizer
from rlx_optim.race.digits import HESSIAN_EVERY, build
from rlx_optim.race.rates import SGD
from rlx_optim.race.report import digits as rounded
from rlx_optim.race.report import page
from rlx_optim.registry import aliases

STEPS = 300
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2e-2, 4e-2, 0.08, 0.15, 0.3, 0.6)
GRID = (120, 120)  # points at which a function is drawn
FIRST = ("sgd", "adamw", "lion", "soap", "muon", "sophia")  # who is shown when the page opens: all paths at once hide each other

Pair = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Surface:
    """A function of two numbers: its value (of arrays too), gradient, diagonal of the Hessian, and what to show of it."""

    title: str
    about: str
    value: Callable[[Any, Any], Any]
    gradient: Callable[[float, float], Pair]
    curvature: Callable[[float, float], Pair]
    start: Pair
    minimum: Pair
    box: tuple[float, float, float, float]  # left, right, bottom, top


def _beale(x: Any, y: Any) -> list[tuple[float, int, Any]]:
    return [(constant, power, constant - x + x * y**power) for constant, power in ((1.5, 1), (2.25, 2), (2.625, 3))]


def _beale_gradient(x: float, y: float) -> Pair:
    parts = _beale(x, y)
    return sum(2 * r * (y**n - 1) for _, n, r in parts), sum(2 * r * x * n * y ** (n - 1) for _, n, r in parts)


def _beale_curvature(x: float, y: float) -> Pair:
    parts = _beale(x, y)
    across = sum(2 * (y**n - 1) ** 2 for _, n, _ in parts)
    along = sum(2 * (x * n * y ** (n - 1)) ** 2 + 2 * r * x * n * (n - 1) * y ** max(n - 2, 0) for _, n, r in parts)
    return across, along


def _wave(x: Any) -> Any:
    return x**2 - 10 * np.cos(2 * np.pi * x)


SURFACES = {
    "rosenbrock": Surface(
        "Rosenbrock",
        "A curved valley: falling into it is easy, following it is not.",
        lambda x, y: (1 - x) ** 2 + 100 * (y - x**2) ** 2,
        lambda x, y: (-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)),
        lambda x, y: (2 - 400 * (y - 3 * x**2), 200.0),
        start=(-1.5, 2.0), minimum=(1.0, 1.0), box=(-2.0, 2.0, -1.0, 3.0),
    ),
    "beale": Surface(
        "Beale",
        "Steep walls around a plain: gradients differ by thousands.",
        lambda x, y: sum(r**2 for _, _, r in _beale(x, y)),
        _beale_gradient,
        _beale_curvature,
        start=(0.6, 1.6), minimum=(3.0, 0.5), box=(-1.0, 4.5, -2.0, 3.5),
    ),
    "rastrigin": Surface(
        "Rastrigin",
        "A bowl full of dents: most stop in one on the way to the middle.",
        lambda x, y: 20 + _wave(x) + _wave(y),
        lambda x, y: (2 * x + 20 * math.pi * math.sin(2 * math.pi * x), 2 * y + 20 * math.pi * math.sin(2 * math.pi * y)),
        lambda x, y: (2 + 40 * math.pi**2 * math.cos(2 * math.pi * x), 2 + 40 * math.pi**2 * math.cos(2 * math.pi * y)),
        start=(-2.35, 2.6), minimum=(0.0, 0.0), box=(-3.2, 3.2, -3.2, 3.2),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Walk:
    """A path and the value at its end, infinite if it left the picture on the way."""

    lr: float
    path: list[Pair]
    value: float


def walk(surface: Surface, optimizer: str, lr: float, steps: int, engine: str) -> Walk:
    """Step down the surface from its start."""
    opt = build(optimizer, {"lr": lr, **(SGD if optimizer == "sgd" else {})}, steps, engine)
    point, path = np.array([surface.start], np.float32), [surface.start]
    left, right, bottom, top = surface.box
    inside = True
    with np.errstate(all="ignore"):
        for step in range(steps):
            x, y = path[-1]
            if isinstance(opt, CurvatureOptimizer) and step % HESSIAN_EVERY == 0:
                opt.update_hessian("point", np.array([surface.curvature(x, y)], np.float32))
            opt.step_all({"point": point}, {"point": np.array([surface.gradient(x, y)], np.float32)})
            path.append((float(point[0, 0]), float(point[0, 1])))
            inside = left <= path[-1][0] <= right and bottom <= path[-1][1] <= top
            if not inside:
                break
    return Walk(lr, path, float(surface.value(*path[-1])) if inside else math.inf)


def best(surface: Surface, optimizer: str, steps: int, engine: str) -> Walk:
    """The walk, of all rates, that ends lowest without leaving the picture."""
    return min((walk(surface, optimizer, lr, steps, engine) for lr in RATES), key=lambda w: w.value)


def picture(surface: Surface) -> list[int]:
    """The function's height on a grid, row by row from the top, as logarithms from 0 to 999."""
    left, right, bottom, top = surface.box
    columns, rows = GRID
    x, y = np.meshgrid(np.linspace(left, right, columns), np.linspace(top, bottom, rows))
    height = np.log(surface.value(x, y) - surface.value(*surface.minimum) + 0.5)
    levels = 999 * (height - height.min()) / (height.max() - height.min())
    return [int(v) for v in levels.ravel()]


def results(
    optimizers: Sequence[str], steps: int, engine: str, tick: Callable[[str], None], command: str, machine: dict[str, Any]
) -> dict[str, Any]:
    """Every optimizer on every surface, as JSON can hold it."""
    surfaces: dict[str, Any] = {}
    for key, surface in SURFACES.items():
        paths = {}
        for name in optimizers:
            tick(f"{surface.title}: {name}")
            done = best(surface, name, steps, engine)
            paths[name] = {"lr": done.lr, "value": rounded(done.value), "path": [[rounded(x), rounded(y)] for x, y in done.path]}
        shape = {"start": surface.start, "minimum": surface.minimum, "box": surface.box, "grid": GRID}
        surfaces[key] = {"title": surface.title, "about": surface.about, **shape, "picture": picture(surface), "paths": paths}
    return {"command": command, "steps": steps, "engine": engine, "rates": RATES, "machine": machine, "surfaces": surfaces}


def html(found: dict[str, Any]) -> str:
    place = {name: i for i, name in enumerate(list_optimizers())}
    names = list(next(iter(found["surfaces"].values()))["paths"])
    first = [name for name in FIRST if name in names]
    data = {**found, "names": names, "place": place, "first": first}
    return page(Path(__file__).parent / "pages" / "landscape", "rlx-optim landscape", data)


# ---- the command ----------------------------------------------------------------------------------------------------------
def show(found: dict[str, Any], names: list[str]) -> None:
    surfaces = found["surfaces"].values()
    ends = {name: [surface["paths"][name] for surface in surfaces] for name in names}
    rows = [[name, *(f"{show_digits(e['value'])} (lr {e['lr']:g})" for e in end)] for name, end in ends.items()]
    say(f"value after {found['steps']} steps, with the best of {len(found['rates'])} learning rates")
    show_table(["optimizer", *(surface["title"] for surface in surfaces)], rows, [False] * len(rows))


def command(
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "all",
    steps: Annotated[int, typer.Option(min=1, help="Of each walk.")] = STEPS,
    engine: Annotated[str, typer.Option(help="Where the steps run.")] = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="The page; landscape-DATE-TIME.html by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON instead of a table.")] = False,
) -> None:
    """Draw the optimizers' paths on Rosenbrock, Beale and Rastrigin as one page."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    where = choose_one("engine", engine, ("auto", *list_engines()))
    page = out or Path(f"landscape-{datetime.datetime.now():%Y%m%d-%H%M%S}.html")
    check_output_path("--out", page, (".html",))
    if page.exists():
        raise Problem(f"--out: {page} exists; name a new file")
    again = shlex.join(["rlx-optim", "landscape", "--optimizers", ",".join(chosen), "--steps", str(steps), "--engine", where])
    with show_progress(len(chosen) * len(SURFACES)) as tick:
        found = results(chosen, steps, where, tick, again, get_machine())
    page.write_text(html(found), encoding="utf-8")
    if as_json:
        write_json(found)
    else:
        show(found, chosen)
        print(f"page: {page}")
