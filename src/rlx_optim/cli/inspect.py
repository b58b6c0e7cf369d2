"""`rlx-optim inspect`: what is in a checkpoint, whether it is sound, and what differs between two.

    rlx-optim inspect run/checkpoint-00000100.safetensors
    rlx-optim inspect a.safetensors b.safetensors

Two files that differ give the exit code 1, a bad file 2.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..checkpoint import CheckpointError, summary
from ..checkpoint.files import open_checkpoint
from . import Problem, get_width, say, show_table, write_json


def show(path: Path, as_json: bool) -> int:
    with open_checkpoint(path, allow_nan=True) as snapshot:
        said, told = summary.describe_snapshot(snapshot), [list(row) for row in summary.list_rows(snapshot)]
    if as_json:
        entries = [dict(zip(summary.HEAD, row, strict=True)) for row in told]
        write_json({"file": str(path), "verified": True, "description": list(said), "state": entries})
        return 0
    say("\n".join([str(path), *said]))
    if sum(max(map(len, column)) + 3 for column in zip(summary.HEAD, *told, strict=True)) < get_width():
        show_table(summary.HEAD, [[escape(cell) for cell in row] for row in told], [False] * len(told))
    else:
        for name, optimizer, shape, dtype, steps, state, count in told:
            say(f"{name}\n  {optimizer}, {shape}, {dtype}, steps {steps}, bytes {count}: {state}")
    say("SHA-256 verified: every byte is as it was written")
    return 0


def compare(path: Path, other: Path, as_json: bool) -> int:
    with open_checkpoint(path, allow_nan=True) as one, open_checkpoint(other, allow_nan=True) as two:
        found = list(summary.find_differences(one, two))
    if as_json:
        write_json({"files": [str(path), str(other)], "equal": not found, "differences": found})
        return int(bool(found))
    say("\n".join(found) or "equal in settings, counts and every bit of state")
    return int(bool(found))


def command(
    file: Annotated[Path, typer.Argument(help="A checkpoint.")],
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare it with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a checkpoint and verify it, or say what differs between two."""
    try:
        code = show(file, as_json) if other is None else compare(file, other, as_json)
    except CheckpointError as problem:
        # of a device or a pipe zipfile would read without end
        theirs = next((each for each in (file, other) if each and each.is_file() and zipfile.is_zipfile(each)), None)
        hint = f"{theirs} is a torch.save file; make a checkpoint of it: rlx-optim convert {theirs} FILE.safetensors"
        raise Problem(hint if theirs else str(problem)) from None
    raise typer.Exit(code)
