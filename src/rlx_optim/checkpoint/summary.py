"""What is in a checkpoint, in words: the rows that `rlx-optim inspect` shows, and what differs between two files."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..registry import spec_class
from ..rounding import LOW
from ..routing import sized
from ..spec import Spec
from ..splits import described
from ..storage import CODECS
from .format import Tensor
from .snapshot import Parameter, SavedOptimizer, SavedSettings, Snapshot

HEAD = ("parameter", "optimizer", "shape", "dtype", "steps", "state", "bytes")


def title_of(member: SavedOptimizer) -> str:
    return spec_class(member.optimizer).title


def describe_snapshot(snapshot: Snapshot) -> list[str]:
    """The file as a whole, line by line."""
    saved = datetime.datetime.fromtimestamp(snapshot.saved_ns / 1e9).astimezone().isoformat(timespec="seconds")
    total = sum(each.nbytes for each in snapshot.tensors().values())
    lines = [
        f"written by {snapshot.written_by} ({snapshot.front_end}), {saved}",
        f"iteration {snapshot.iteration:,}, {len(snapshot.parameters):,} parameters, {total:,} bytes of state",
    ]
    for i, member in enumerate(snapshot.members):
        values = _describe_values(member.values, list(member.values.hyperparameters))
        lines.append(f"{'otherwise ' * i}{title_of(member)}({values})")
        for group in member.groups:
            where = "listed parameters" if group.match is None else f"{group.match!r}"
            use = group.use if not isinstance(group.use, int) else title_of(snapshot.members[group.use])
            use = f"to {use}" if use else _describe_values(group.values, group.overrides)
            lines.append(f"  group {where}: {use}")
    return lines


def _describe_values(values: SavedSettings, names: list[str]) -> str:
    def one(name: str) -> str:
        return f"{name}={values.hyperparameters[name]!r}" + (" (a callable)" if name in values.callables else "")

    return ", ".join(map(one, names))


def _describe_pieces(p: Parameter) -> str:
    return described(p.shape, p.parts) if p.parts else f"{p.pieces} of {sized(p.piece)}"


def list_rows(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """A row for each parameter, by HEAD."""
    table: list[tuple[str, ...]] = []
    for name, p in snapshot.parameters.items():
        codecs = {slot: CODECS[p.storage_of(slot)] for slot in p.used(snapshot.spec(p))}
        parts = [f"{slot} in {codec.format}" if codec.name else slot for slot, codec in codecs.items()]
        parts += [LOW] * (LOW in p.tensors) + [f"{name}={value:g}" for name, value in p.counters.items()]
        size = sum(each.nbytes for each in p.tensors.values())
        shape = sized(p.shape) + (f" as {_describe_pieces(p)}" if p.split else "")
        owner, state = title_of(snapshot.members[p.member]), ", ".join(parts) or "–"
        table.append((name, owner, shape, p.dtype, f"{p.step:,}", state, f"{size:,}"))
    return table


# ---- two files ----------------------------------------------------------------------------------------------------------
def find_differences(a: Snapshot, b: Snapshot) -> Iterator[str]:
    """What differs, in words, the settings first; tensors are compared one pair at a time."""
    if a.iteration != b.iteration:
        yield f"iteration: {a.iteration} and {b.iteration}"
    yield from _compare_settings(a, b)
    for name in [*a.parameters, *(n for n in b.parameters if n not in a.parameters)]:
        if name not in a.parameters or name not in b.parameters:
            yield f"{name}: only in the {'first' if name in a.parameters else 'second'} file"
            continue
        yield from _compare_parameters(name, a, b)


def _compare_settings(a: Snapshot, b: Snapshot) -> Iterator[str]:
    names = [", ".join(map(title_of, each.members)) for each in (a, b)]
    if names[0] != names[1]:
        yield f"optimizer: {names[0]} and {names[1]}"
        return
    for one, other in zip(a.members, b.members, strict=True):
        if len(one.groups) != len(other.groups):
            yield f"{title_of(one)}: {len(one.groups)} groups and {len(other.groups)}"
        for place in (None, *range(min(len(one.groups), len(other.groups)))):
            label = title_of(one) if place is None else f"{title_of(one)}, group {one.groups[place].match!r}"
            yield from _compare_values(label, one.values_of(place).hyperparameters, other.values_of(place).hyperparameters)


def _compare_values(label: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield f"{label}: {name} is {one.get(name)!r} and {other.get(name)!r}"


def _compare_parameters(name: str, a: Snapshot, b: Snapshot) -> Iterator[str]:
    one, other = a.parameters[name], b.parameters[name]
    by = title_of(a.members[one.member]), title_of(b.members[other.member])
    for what, left, right in (
        ("optimizer", *by),
        ("shape", one.shape, other.shape),
        ("steps", one.step, other.step),
        ("counters", one.counters, other.counters),
        ("state", sorted(one.tensors), sorted(other.tensors)),
    ):
        if left != right:
            yield f"{name}: {what} {left} and {right}"
    mine, its = _decode_slots(one, a.spec(one)), _decode_slots(other, b.spec(other))
    for slot in [slot for slot in mine if slot in its]:
        if found := _compare_tensors(mine[slot], its[slot]):
            yield f"{name}/{slot}: {found}"


def _decode_slots(p: Parameter, spec: Spec) -> dict[str, Tensor]:
    """What is in its slots, decoded where that is codes, when it is read."""

    def one(slot: str) -> Tensor:
        return dataclasses.replace(p.tensors[slot], dtype=np.dtype(np.float32), read=lambda: p.values(slot))

    def halves() -> Any:
        return np.ascontiguousarray(p.tensors[LOW].read()).view("<u2").reshape(p.shape)

    found = {slot: one(slot) if p.storage_of(slot) else p.tensors[slot] for slot in p.used(spec)}
    if LOW in p.tensors:
        found[LOW] = dataclasses.replace(p.tensors[LOW], shape=p.shape, dtype=np.dtype(np.uint16), read=halves)
    return found


def _compare_tensors(one: Tensor, other: Tensor) -> str | None:
    if one.shape != other.shape:
        return f"shape {one.shape} and {other.shape}"
    wide = max(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    left, right = (each.read().reshape(-1).astype(wide, copy=False) for each in (one, other))
    unequal = int(np.count_nonzero(left.view(f"u{wide.itemsize}") != right.view(f"u{wide.itemsize}")))  # NaN equals itself so
    if not unequal:
        return None if one.dtype == other.dtype else f"{one.dtype} and {other.dtype}, equal in value"
    with np.errstate(invalid="ignore"):
        apart = left - right if wide.kind == "f" else left.astype(np.float64) - right  # integers would wrap around
        gap = np.nanmax(np.abs(apart), initial=0.0)
    return f"{unequal:,} of {left.size:,} numbers differ, by at most {gap:.3g}"
