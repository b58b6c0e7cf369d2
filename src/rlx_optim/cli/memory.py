"""`rlx-optim memory`: the bytes of state of an optimizer for a model, slot by slot, without allocating any of it.

    rlx-optim memory --model gpt2-124m --optimizers soap
    rlx-optim memory --model shapes.json --optimizers all
    rlx-optim memory --model gpt2-124m --optimizers adamw --set state_dtype=int8 --set rounding=exact

    rlx-optim memory --model llama-7b --optimizers adamw --weights bfloat16 --offload

A file of shapes is JSON: {"fc.weight": [64, 32], "fc.bias": [64]}, or a list of shapes. What is counted is what the named API and
the compiled engines allocate: float32 buffers, or what state_dtype says; with rounding=exact also the low halves that bfloat16
parameters have. Counters are a few numbers on the host (torch keeps them as 4-byte tensors). --offload says what `offload="cpu"`
of the torch classes leaves on the device, and what it takes on the host; page-locked memory comes in powers of two.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import buckets
from ..numpy.classes import create, list_optimizers
from ..numpy.optimizer import NamedOptimizer
from ..program import has_reduction, reduces_over_all
from ..registry import aliases
from ..rounding import EXACT, LOW
from ..storage import count_bytes
from . import NAMES, Problem, choose, choose_one, say, show_size, show_table, write_json
from .costs import settings_of
from .shapes import KNOWN, Shapes, count_numbers, shapes_of

ITEM = 4  # bytes of a float32
ENGINES = ("auto", "cpu", "torch", "triton")
WEIGHTS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass
class SlotBytes:
    """One slot of one rule, over all tensors that have it."""

    rule: str
    slot: str
    tensors: int = 0
    bytes: int = 0


def slots_of(optimizer: NamedOptimizer, shapes: Shapes) -> list[SlotBytes]:
    """The state that stepping these tensors would make. Each goes to the rule that would take it."""
    found: dict[tuple[str, str], SlotBytes] = {}
    for name, shape in shapes.items():
        member, record, _ = optimizer._lookup(name, shape)
        rule = type(member).__name__
        for slot, buffer in member._specs()[record.group].stored_slots(shape).items():
            row = found.setdefault((rule, slot), SlotBytes(rule, slot))
            row.tensors += 1
            row.bytes += count_bytes(buffer, ITEM)
        if member._specs()[record.group].rounding == EXACT:  # of bfloat16 parameters
            row = found.setdefault((rule, LOW), SlotBytes(rule, LOW))
            row.tensors, row.bytes = row.tensors + 1, row.bytes + 2 * math.prod(shape)
    return list(found.values())


# ---- where it is -----------------------------------------------------------------------------------------------------------
def place_bytes(
    optimizer: NamedOptimizer, shapes: Shapes, item: int, offload: bool, engine: str = "auto"
) -> dict[str, dict[str, int]]:
    """Bytes on the device and on the host, of parameters of so many bytes each, their gradients, and state. engine: of offloaded
    rules, which says where they are computed."""
    each = item * count_numbers(shapes)
    device = {"parameters": each, "gradients": each}
    if not offload:
        return {"device": device | {"state": sum(slot.bytes for slot in slots_of(optimizer, shapes))}, "host": {}}
    state, lanes, together = 0, dict[tuple[bool, bool], list[int]](), False  # what goes where it is computed, by where and who
    for name, shape in shapes.items():
        member, record, _ = optimizer._lookup(name, shape)
        spec, rows = member._specs()[record.group], (shape or (1,))[0]
        kept = [count_bytes(buffer, ITEM) for buffer in spec.stored_slots(shape).values()]
        above = buckets.on_the_device(spec.matrix, engine)
        row = sum(kept) // max(rows, 1) if above else 2 * item * math.prod(shape[1:])
        kept += [2 * math.prod(shape)] * (spec.rounding == EXACT)
        state += sum(map(round_up_locked, kept)) if above else sum(kept)
        together = together or reduces_over_all(spec, shape)
        whole = spec.matrix or has_reduction(spec, shape) or not shape
        for run in [slice(0, rows)] if whole else buckets.runs(rows, row, buckets.most(above, spec.matrix)):
            moved = kept if above else [item * math.prod(shape)] * 2
            size = sum(buckets.aligned(n * (run.stop - run.start) // max(rows, 1)) for n in moved)
            lanes.setdefault((above, spec.matrix), []).append(size)
    device["buckets"] = sum(sum(buckets.rooms(sizes, buckets.most(*who))) for who, sizes in lanes.items() if who[0])
    rooms = [
        room for who, sizes in lanes.items() if not who[0] for room in buckets.rooms(sizes, buckets.most(*who), together)
    ]  # fmt: skip
    return {"device": device, "host": {"state": state, "buckets": sum(map(round_up_locked, rooms))}}


def round_up_locked(size: int) -> int:
    """What torch takes for so many bytes of page-locked memory."""
    return 1 << (size - 1).bit_length() if size else 0


# ---- what is asked ------------------------------------------------------------------------------------------------------
def read_shapes(text: str) -> Shapes:
    """A shape set by name, or those of a JSON file."""
    if not text.endswith(".json"):
        try:
            return shapes_of(text)
        except Problem as problem:
            raise Problem(f"--model: {problem}, or a file that ends in .json") from None
    try:
        given = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as problem:
        raise Problem(f"--model: {text}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise Problem(f"--model: {text} is not JSON: {problem}") from None
    named = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(named, dict) or not named:
        raise Problem(f'--model: {text} must hold {{"name": [rows, columns], …}} or a list of shapes')
    return {str(name): _shape(text, name, value) for name, value in named.items()}


def _shape(file: str, name: Any, value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
    if not good:
        raise Problem(f"--model: {file}: the shape of {name!r} must be a list of whole numbers, got {value!r}")
    return tuple(value)


def read_settings(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value is JSON, or else a word."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise Problem(f"--set: {pair!r} must look like KEY=VALUE, such as momentum=0.9")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def make_named(name: str, settings: Mapping[str, Any]) -> NamedOptimizer:
    try:
        return create(name, **{**settings_of(name), **settings})
    except (TypeError, ValueError) as problem:
        raise Problem(f"--set: {problem}") from None


def format_sizes(sizes: Mapping[str, int]) -> str:
    """In words: "8.80 GB (parameters 4.40 GB, gradients 4.40 GB)"."""
    return f"{show_size(sum(sizes.values()))} ({', '.join(f'{what} {show_size(n)}' for what, n in sizes.items() if n)})"


# ---- what is said -------------------------------------------------------------------------------------------------------
def format_columns(total: int, count: int) -> list[str]:
    return [f"{total:,}", show_size(total), f"{total / max(count, 1):.3f}"]


def list_rows(report: Mapping[str, Any], count: int) -> Iterator[tuple[list[str], bool]]:
    for name, entry in report.items():
        for s in entry["slots"]:
            yield [name, f"{s['rule']}: {s['slot']}", f"{s['tensors']:,}", *format_columns(s["bytes"], count)], False
        yield [name, "all state", "", *format_columns(entry["state_bytes"], count)], True


def command(
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "adamw",
    model: Annotated[str, typer.Option(help=f"Shapes: {KNOWN}, or a JSON file.")] = "gpt2-124m",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter; may be repeated.")
    ] = None,
    weights: Annotated[str, typer.Option(help=f"What parameters and gradients are: {', '.join(WEIGHTS)}.")] = "float32",
    offload: Annotated[
        bool, typer.Option("--offload", help="State on the host, as the torch classes' offload keeps it.")
    ] = False,
    engine: Annotated[str, typer.Option(help=f"With --offload, as in the torch classes: {', '.join(ENGINES)}.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count the bytes of state that an optimizer needs for a model."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    tensors, settings = read_shapes(model), read_settings(set_ or [])
    item = WEIGHTS[choose_one("type", weights, list(WEIGHTS))]
    report: dict[str, Any] = {}
    for name in chosen:
        slots = slots_of(make_named(name, settings), tensors)
        report[name] = {"state_bytes": sum(slot.bytes for slot in slots), "slots": [dataclasses.asdict(slot) for slot in slots]}
        report[name] |= place_bytes(make_named(name, settings), tensors, item, offload, choose_one("engine", engine, ENGINES))
    count = count_numbers(tensors)
    if as_json:
        about = {"shapes": model, "tensors": len(tensors), "parameters": count, "parameter_bytes": item * count}
        write_json({**about, "optimizers": report})
        return
    say(f"{model}: tensors {len(tensors):,}, parameters {count:,}, {show_size(item * count)} of {weights} parameters")
    lines = list(list_rows(report, count))
    show_table(
        ("optimizer", "rule: slot", "tensors", "bytes", "rounded", "B/param"),
        [line for line, _ in lines],
        [strong for _, strong in lines],
        spare=(4, 2, 5),
    )
    for name, entry in report.items() if offload else ():
        say(f"{name}: " + "; ".join(f"{place}: {format_sizes(entry[place])}" for place in ("device", "host")))
    if "sgd" in chosen and "momentum" not in settings:
        say("SGD here has momentum=0.9; --set momentum=0 for none")
