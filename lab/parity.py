"""`rlx-optim parity`: do all engines compute the same, and the same as everybody else?

    rlx-optim parity
    rlx-optim parity --optimizers adamw,soap --out parity.md

Every optimizer walks a small problem on every installed engine and ends next to the reference, which computes in float64. Where
another library has the same rule (`counterparts.PEERS` says in which settings), it walks too, in float64. The measure is the
largest difference over the distance travelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rlx_optim import list_optimizers
from rlx_optim.cli import NAMES, Problem, check_output_path, choose, get_machine, say, show_progress, show_table, write_json
from rlx_optim.registry import aliases

from .counterparts import ALONE, PEERS, Peer, walk_optax, walk_torch
from .peers import LIBRARIES, installed
from .walks import BAR, ENGINES, MATRIX_BAR, STEPS, bar_of, distance, problem, settings_of, walk

NOTHING = "none"
WRONG = ("differs", "failed")
COLUMNS = {"torch": "torch.optim"}  # a library whose name is an engine's, too


# ---- measuring ----------------------------------------------------------------------------------------------------------
def measured(name: str, against: str, bar: float, walked: Callable[[], float], remark: str = "") -> dict[str, Any]:
    """One line of the table; whatever a library raises is its result."""
    row = {"optimizer": name, "against": against, "error": None, "bar": bar if math.isfinite(bar) else None, "remark": remark}
    try:
        error = walked()
    except Exception as problem:
        return row | {"status": "failed", "remark": f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"}
    finite = math.isfinite(error)
    status = "equal" if error <= bar and math.isfinite(bar) else "measured" if finite and not math.isfinite(bar) else "differs"
    return row | {"error": error if finite else None, "status": status}


def engine_row(name: str, engine: str) -> dict[str, Any]:
    todo, settings = problem(), settings_of(name)

    def walked() -> float:
        return distance(walk(engine, name, settings, todo), walk("reference", name, settings, todo), todo.start)

    return measured(name, engine, bar_of(name), walked)


def peer_row(peer: Peer) -> dict[str, Any]:
    todo, theirs = problem(names=peer.tensors), walk_optax if peer.library == "optax" else walk_torch

    def walked() -> float:
        return distance(walk("reference", peer.optimizer, peer.ours, todo), theirs(peer, todo), todo.start)

    return measured(peer.optimizer, peer.rule.replace(":", "."), peer.bar, walked, peer.remark)


def absent(engines: list[str], libraries: list[str]) -> list[str]:
    """Who was asked for and is not here, and why."""
    said = [f"{engine}: {reason}" for engine in engines if (reason := ENGINES[engine].missing()) is not None]
    return said + [f"{library}: not installed (pip install {library})" for library in libraries if not installed(library)]


def cells(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line an optimizer, a column an engine and a peer library; what is not equal says so."""
    columns = list(dict.fromkeys(row["column"] for row in sorted(report["rows"], key=lambda row: row["kind"])))
    told: dict[tuple[str, str], str] = {}
    for row in report["rows"]:
        error = "" if row["error"] is None else f"{row['error']:.1e}" if row["error"] else "0"
        told[row["optimizer"], row["column"]] = f"{error} {row['status']}".strip() if row["status"] in WRONG else error
    names = list(dict.fromkeys(row["optimizer"] for row in report["rows"]))
    return ["optimizer", *columns], [[name, *(told.get((name, column), "–") for column in columns)] for name in names]


def remarks(report: dict[str, Any]) -> list[str]:
    said = [f"{row['optimizer']}, {row['against']}: {row['remark']}" for row in report["rows"] if row["remark"]]
    return [*said, *report["notes"]]


def show(report: dict[str, Any]) -> None:
    head, rows = cells(report)
    bad = {row["optimizer"] for row in report["rows"] if row["status"] in WRONG}
    say(f"largest difference from the reference after {STEPS} steps, over the distance travelled")
    show_table(head, rows, [row[0] in bad for row in rows])
    say("\n".join(remarks(report)))
    wrong = sum(row["status"] in WRONG for row in report["rows"])
    verdict = f"{wrong} of them wrong" if wrong else "all within their bars"
    say(f"{len(report['rows'])} comparisons, {verdict} ({BAR:g}; matrix rules {MATRIX_BAR:g})")


def markdown(report: dict[str, Any]) -> str:
    head, rows = cells(report)
    used = ", ".join(f"{name} {version}" for name, version in report["machine"]["versions"].items())
    return "\n".join([
        f"Largest difference from the reference after {STEPS} steps, over the distance travelled.",
        "Engines compute in float32 unless named otherwise, peers in float64.", "",
        f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", *(f"| {' | '.join(row)} |" for row in rows), "",
        *(f"- {line}" for line in remarks(report)), "",
        f"Made by `{report['command']}` with {used}.", "",
    ])  # fmt: skip


def command(
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "all",
    engines: Annotated[str, typer.Option(help=f"{', '.join(list(ENGINES)[1:])}, comma-separated; all or none.")] = "all",
    peers: Annotated[str, typer.Option(help=f"{', '.join(LIBRARIES)}, comma-separated; all or none.")] = "all",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table: FILE.json or FILE.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare every optimizer on every installed engine with the reference, and with its peers."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    places = [] if engines == NOTHING else choose("engine", engines, list(ENGINES)[1:])
    libraries = [] if peers == NOTHING else choose("peer", peers, LIBRARIES)
    if not places and not libraries:
        raise Problem("--engines none and --peers none leave nothing to compare")
    check_output_path("--out", out, (".json", ".md"))
    here = [engine for engine in places if ENGINES[engine].missing() is None]
    rivals = [peer for peer in PEERS if peer.optimizer in chosen and peer.library in libraries and installed(peer.library)]
    if not here and not rivals:
        raise Problem(f"there is nothing to compare: {'; '.join(absent(places, libraries)) or f'no peer has {optimizers}'}")
    rows: list[dict[str, Any]] = []
    with show_progress(len(chosen) * len(here) + len(rivals)) as tick:
        for name in chosen:
            for engine in here:
                tick(f"{name}: {engine}")
                rows.append({**engine_row(name, engine), "kind": "engine", "column": engine})
            for peer in (peer for peer in rivals if peer.optimizer == name):
                tick(f"{name}: {peer.library}")
                rows.append({**peer_row(peer), "kind": "peer", "column": COLUMNS.get(peer.library, peer.library)})
    given = {"optimizers": optimizers, "engines": engines, "peers": peers}
    asked = " ".join(["rlx-optim parity", *(f"--{option} {value}" for option, value in given.items() if value != "all")])
    notes = absent(places, libraries) + [f"{name}: {why}" for name, why in ALONE.items() if name in chosen and libraries]
    report = {"command": asked, "steps": STEPS, "machine": get_machine(), "rows": rows, "notes": notes}
    if out is not None:
        write_json(report, out) if out.suffix == ".json" else out.write_text(markdown(report), encoding="utf-8")
    write_json(report) if as_json else show(report)
    raise typer.Exit(int(any(row["status"] in WRONG for row in rows)))
