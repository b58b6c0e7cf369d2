"""`rlx-optim plan`: what a step would send and how evenly it would be shared out, for a model sharded over many ranks.

    rlx-optim plan --model llama-8b --ranks 8,64,512 --optimizers muon,soap

Computed from shapes with the functions that share real parameters out; nothing is run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import typer

from ..numpy.classes import list_optimizers
from ..partition import extent, traffic
from ..registry import aliases, required, spec_class
from ..routing import reason_by_name
from ..spec import Shape, Spec
from ..storage import FORMATS, count_bytes
from . import NAMES, Problem, choose, choose_one, say, show_size, show_table, write_json
from .shapes import KNOWN, shapes_of

SIZES = {"float32": 4, "bfloat16": 2}
HEAD = (
    "optimizer", "ranks", "matrices", "most sent a rank", "mean sent", "stages", "hidden", "all-reduces", "of bytes", "balance",
    "most state a rank", "mean state",
)  # fmt: skip
SPARE = (4, 11, 2, 5, 8)


@dataclasses.dataclass
class Row:
    """A step of one optimizer on so many ranks, in bytes. stages: in which matrices travel and are computed. hidden: the share of
    what is sent that goes while its owner computes others. balance: the mean of the ranks' work over the most."""

    model: str
    optimizer: str
    ranks: int
    parameters: int
    matrices: int
    sent_most: int
    sent_mean: float
    stages: int
    hidden: float | None
    all_reduced: list[int]
    balance: float | None
    state_most: int
    state_mean: float


def plan_step(model: str, name: str, ranks: int, itemsize: int, state_dtype: str = "float32") -> Row:
    kind = spec_class(name)
    own = kind(**required(kind), state_dtype=state_dtype)
    routed = own.otherwise_default
    other = own if routed is None else spec_class(routed.name)(**{**routed.settings, "state_dtype": state_dtype})
    entries = [
        (shape, other if routed and (own.takes(shape) or reason_by_name(layer)) else own)
        for layer, shape in shapes_of(model).items()
    ]
    step = traffic(entries, ranks, itemsize)
    wide = max(itemsize, 4)
    beside = sum(count_kept_bytes(shape, spec, ranks, wide) for shape, spec in entries if not spec.matrix)
    state = [held + beside for held in step.state]
    return Row(
        model,
        name,
        ranks,
        sum(math.prod(shape) for shape, _ in entries),
        sum(spec.matrix for _, spec in entries),
        max(step.sent),
        sum(step.sent) / ranks,
        step.stages,
        sum(step.hidden) / sum(step.sent) if any(step.sent) else None,
        step.all_reduced,
        sum(step.work) / ranks / max(step.work) if any(step.work) else None,
        max(state),
        sum(state) / ranks,
    )


def count_kept_bytes(shape: Shape, spec: Spec, ranks: int, wide: int) -> int:
    """How many bytes of state the first rank has beside its shard; an axis that a slot lacks is not cut."""
    whole = spec.stored_slots(shape)
    cut = {name: (slot, whole[name]) for name, slot in spec.slots((extent(shape[0], ranks, 0)[1], *shape[1:])).items()}
    lacks = {name for name, slot in whole.items() if slot.drop is None or -len(shape) in slot.drop}
    here = [its if name in lacks else dataclasses.replace(part, storage=its.storage) for name, (part, its) in cut.items()]
    return sum(count_bytes(slot, wide) for slot in here)


def format_cells(row: Row) -> list[str]:
    balance = "–" if row.balance is None else f"{100 * row.balance:.0f} %"
    reduced = [str(len(row.all_reduced)), show_size(sum(row.all_reduced))] if row.all_reduced else ["0", "–"]
    sent = [show_size(row.sent_most), show_size(row.sent_mean)] if row.sent_most else ["–", "–"]
    state = [show_size(row.state_most), show_size(row.state_mean)]
    return [
        row.optimizer, f"{row.ranks:,}", str(row.matrices), *sent, str(row.stages) if row.stages else "–",
        "–" if row.hidden is None else f"{100 * row.hidden:.0f} %", *reduced, balance, *state,
    ]  # fmt: skip


def command(
    model: Annotated[str, typer.Option(help=f"Shapes: {KNOWN}.")] = "llama-8b",
    ranks: Annotated[str, typer.Option(help="How many ranks a parameter is sharded over; several, comma-separated.")] = "8",
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "muon",
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: float32 or bfloat16.")] = "float32",
    state_dtype: Annotated[str, typer.Option(help="What the state is kept in: float32, bfloat16 or int8.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a step sends and how evenly its work is shared out, for a model sharded over many ranks."""
    dtype, state_dtype = choose_one("dtype", dtype, list(SIZES)), choose_one("state dtype", state_dtype, list(FORMATS))
    counts = [part.strip().replace("_", "") for part in ranks.split(",")]
    if not all(count.isdecimal() and 0 < int(count) <= 100_000 for count in counts):
        raise Problem(f"--ranks must be whole numbers from 1 to 100000, comma-separated, got {ranks!r}")
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    rows = [plan_step(model, name, int(count), SIZES[dtype], state_dtype) for name in chosen for count in counts]
    if as_json:
        return write_json([dataclasses.asdict(row) for row in rows])
    say(f"{model}: {rows[0].parameters:,} parameters in {dtype}, one step; bytes that a rank sends to others")
    show_table(HEAD, [format_cells(row) for row in rows], [False] * len(rows), SPARE, texts=1)
