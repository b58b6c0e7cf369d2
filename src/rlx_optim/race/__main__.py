"""The command line of the race: a progress bar, a table, and DIR/results.json."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import difflib
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ..named import list_optimizers
from ..registry import ALIASES
from ..threads import available, get_threads
from . import BATCH, GOAL, LAYERS, STEPS, TRAIN, Result, train

try:
    import rich.progress
    import rich.table
except ImportError:  # the extra "cli" is not installed: plain lines instead
    rich = None  # type: ignore[assignment]

ENGINES = ("auto", "cpu", "reference")


@contextlib.contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Two functions: one names who runs, the other counts a step."""
    if rich is None:
        yield print, lambda: None
        return
    with rich.progress.Progress() as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, description=name), lambda: bar.advance(task)


def show(results: Sequence[Result]) -> None:
    """Print the table."""
    head = ("optimizer", "test accuracy", "train loss", "ms per step", "bytes of state")
    rows = [(r.optimizer, f"{r.accuracy:.1%}", f"{r.loss:.4f}", f"{r.ms_per_step:.3f}", f"{r.state_bytes:,}") for r in results]
    if rich is None:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    else:
        table = rich.table.Table(*(rich.table.Column(title, justify="right") for title in head))
        for row in rows:
            table.add_row(*row)
        rich.print(table)


def write(path: Path, results: Sequence[Result], args: argparse.Namespace) -> None:
    """The race as JSON: settings, versions, machine, and one entry for each optimizer that finished."""
    asked = {"optimizers": args.optimizers, "steps": args.steps, "seed": args.seed, "engine": args.engine}
    entries = {r.optimizer: dataclasses.asdict(r) for r in results}
    for entry in entries.values():
        del entry["optimizer"], entry["curve"]
        entry["loss"] = entry["loss"] if math.isfinite(entry["loss"]) else None  # JSON has no NaN
    loaded = {name: sys.modules[name].__version__ for name in ("rlx_optim", "numpy", "scipy", "numba") if name in sys.modules}
    report = {
        "settings": {**asked, "batch": BATCH, "train": TRAIN, "layers": LAYERS, "schedule": "cosine"},
        "versions": {"python": platform.python_version()} | loaded,
        "machine": {"platform": platform.platform(), "cores": available(), "threads": get_threads()},
        "optimizers": entries,
    }
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def known_names(text: str) -> list[str]:
    """A comma-separated list, in the order of the registry."""
    asked = [ALIASES.get(name, name) for name in (part.strip().lower() for part in text.split(","))]
    known = list_optimizers()
    for name in asked:
        if name not in known:
            near = "".join(f"; did you mean {match!r}?" for match in difflib.get_close_matches(name, known, 1))
            raise argparse.ArgumentTypeError(f"unknown optimizer {name!r}, known are {', '.join(known)}{near}")
    return [name for name in known if name in asked]


def whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} up, got {text!r}")
        return int(text)

    return parse


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with the folder --out made: nothing is trained for results that have no place."""
    parser = Parser(prog="python -m rlx_optim.race", description="Train a small network with all fourteen optimizers.")
    parser.add_argument("--optimizers", type=known_names, default=list_optimizers(), help="names, comma-separated (default: all)")
    parser.add_argument("--steps", type=whole(1), default=STEPS, help="steps for each optimizer (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of initial weights and batches (default: %(default)s)")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="where the steps run (default: %(default)s)")
    default = Path(f"race-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=default, help="a new or empty folder (default: race-DATE-TIME)"
    )
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if any(args.out.iterdir()):
            parser.error(f"argument --out: {args.out} is not empty")
    except OSError as error:
        parser.error(f"argument --out: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the race. 0: done; 1: a full race in which someone missed the goal; 130: interrupted, the rest is written."""
    args = arguments(argv)
    results: list[Result] = []
    with progress(len(args.optimizers) * args.steps) as (begin, tick), contextlib.suppress(KeyboardInterrupt):
        for name in args.optimizers:
            begin(name)
            results.append(train(name, steps=args.steps, seed=args.seed, engine=args.engine, tick=tick))
    write(args.out / "results.json", results, args)
    show(results)
    print(f"results: {args.out / 'results.json'}")
    if len(results) < len(args.optimizers):
        print("interrupted", file=sys.stderr)
        return 130
    full = args.optimizers == list_optimizers() and args.steps == STEPS
    return int(full and any(r.accuracy < GOAL for r in results))


if __name__ == "__main__":
    sys.exit(main())
