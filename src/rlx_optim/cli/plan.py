"""`rlx-optim plan`: what a step would send and how evenly it would be shared out, for a model sharded over many ranks.

    rlx-optim plan --model 8b --ranks 8,64,512 --optimizer muon,soap

Computed from shapes with the functions that share real parameters out; nothing is run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Annotated

import typer

from ..named import list_optimizers
from ..registry import aliases, required, spec_class
from ..routing import reason_by_name
from ..sharing import extent, traffic
from ..spec import Shape, Spec
from . import Problem, choose, show_table, unknown

SIZES = {"float32": 4, "bfloat16": 2}
HEAD = (
    "optimizer", "ranks", "matrices", "sent/rank, most", "mean", "all-reduces", "of bytes", "balance", "state/rank, most", "mean",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Llama:
    """The shapes of a model of the Llama family."""

    layers: int
    width: int
    inner: int
    keys: int
    words: int

    def shapes(self) -> dict[str, Shape]:
        square, keys, up = (self.width, self.width), (self.keys, self.width), (self.inner, self.width)
        block: dict[str, Shape] = {
            "q": square,
            "k": keys,
            "v": keys,
            "o": square,
            "gate": up,
            "up": up,
            "down": (self.width, self.inner),
        }
        block |= {"norm1": (self.width,), "norm2": (self.width,)}
        layers = {f"layers.{i}.{name}": shape for i in range(self.layers) for name, shape in block.items()}
        return {"embedding": (self.words, self.width), **layers, "norm": (self.width,), "head": (self.words, self.width)}


MODELS = {
    "1b": Llama(22, 2048, 5632, 256, 32000),
    "8b": Llama(32, 4096, 14336, 1024, 128256),
    "70b": Llama(80, 8192, 28672, 1024, 128256),
}


@dataclasses.dataclass
class Row:
    """A step of one optimizer on so many ranks, in bytes. balance: the mean of the ranks' work over the most."""

    model: str
    optimizer: str
    ranks: int
    parameters: int
    matrices: int
    sent_most: int
    sent_mean: float
    all_reduced: list[int]
    balance: float | None
    state_most: int
    state_mean: float


def spec_of(name: str) -> Spec:
    kind = spec_class(name)
    return kind(**required(kind))


def planned(model: str, name: str, ranks: int, itemsize: int) -> Row:
    own = spec_of(name)
    routed = own.otherwise_default
    other = own if routed is None else spec_class(routed.name)(**routed.settings)
    entries = [
        (shape, other if routed and (own.takes(shape) or reason_by_name(layer)) else own)
        for layer, shape in MODELS[model].shapes().items()
    ]
    step = traffic(entries, ranks, itemsize)
    wide = max(itemsize, 4)
    beside = wide * sum(kept(shape, spec, ranks) for shape, spec in entries if not spec.matrix)
    state = [held + beside for held in step.state]
    return Row(
        model,
        name,
        ranks,
        sum(math.prod(shape) for shape, _ in entries),
        sum(spec.matrix for _, spec in entries),
        max(step.sent),
        sum(step.sent) / ranks,
        step.all_reduced,
        sum(step.work) / ranks / max(step.work) if any(step.work) else None,
        max(state),
        sum(state) / ranks,
    )


def kept(shape: Shape, spec: Spec, ranks: int) -> int:
    """How many numbers of state the first rank has beside its shard; an axis that a slot lacks is not cut."""
    cut = (extent(shape[0], ranks, 0)[1], *shape[1:])
    lacking = [slot.drop is None or -len(shape) in slot.drop for slot in spec.slots(shape).values()]
    slots = zip(lacking, spec.slots(shape).values(), spec.slots(cut).values(), strict=True)
    return sum(math.prod((whole if lacks else part).shape) for lacks, whole, part in slots)


def size(count: float) -> str:
    """Bytes with three digits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"


def cells(row: Row) -> list[str]:
    balance = "–" if row.balance is None else f"{100 * row.balance:.0f} %"
    reduced = [str(len(row.all_reduced)), size(sum(row.all_reduced))] if row.all_reduced else ["0", "–"]
    sent = [size(row.sent_most), size(row.sent_mean)] if row.sent_most else ["–", "–"]
    return [
        row.optimizer, f"{row.ranks:,}", str(row.matrices), *sent, *reduced, balance, size(row.state_most), size(row.state_mean),
    ]  # fmt: skip


def command(
    model: Annotated[str, typer.Option(help=f"Shapes: {', '.join(MODELS)} (the Llama family).")] = "8b",
    ranks: Annotated[str, typer.Option(help="How many ranks a parameter is sharded over; several, comma-separated.")] = "8",
    optimizer: Annotated[str, typer.Option(help="Names, comma-separated, or all.")] = "muon",
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a step sends and how evenly its work is shared out, for a model sharded over many ranks."""
    if model not in MODELS:
        raise unknown("model", model, list(MODELS))
    if dtype not in SIZES:
        raise unknown("dtype", dtype, list(SIZES))
    counts = [part.strip().replace("_", "") for part in ranks.split(",")]
    if not all(count.isdecimal() and 0 < int(count) <= 100_000 for count in counts):
        raise Problem(f"--ranks must be whole numbers from 1 to 100000, comma-separated, got {ranks!r}")
    chosen = choose("optimizer", optimizer, list_optimizers(), aliases())
    rows = [planned(model, name, int(count), SIZES[dtype]) for name in chosen for count in counts]
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    print(f"{model}: {rows[0].parameters:,} parameters in {dtype}, one step; bytes that a rank sends to others")
    show_table(HEAD, [cells(row) for row in rows], [False] * len(rows))
