"""States of optax's sgd, adam, adamw, nadamw, radam, lamb, lion, adafactor, contrib.ademamix, contrib.adopt, contrib.muon and
contrib.sophia: to ours and back.

tx = rlx_optim.optax.adamw(1e-3)
state = from_optax(tx, optax_state, params)                    # then tx.update, or save_state
optax_state = to_optax(tx, state, params, optax.adamw(1e-3).init(params))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..checkpoint.format import CheckpointError
from ..registry import known
from .checkpoint import build_snapshot, restore_state
from .leaves import LeafEntry, arithmetic, decode_slots
from .nested import part_of
from .transform import RuleState, Transform

Tree = Any


def parts_of(state: Any) -> Iterator[Any]:
    """Every named tuple in a state, the outer ones first."""
    if isinstance(state, Mapping):
        state = tuple(state.values())
    if isinstance(state, tuple):
        if type(state) is not tuple:
            yield state
        for each in state:
            yield from parts_of(each)


# ---- to ours ------------------------------------------------------------------------------------------------------------
def from_optax(tx: optax.GradientTransformation, state: Any, params: Tree, count: int | None = None) -> RuleState:
    """The state for `tx`, a transformation of ours, that goes on where optax's stopped.

    count: how many steps were taken, where optax's state does not say (sgd without a schedule).
    """
    part = part_of(tx, params)
    transform = part.transform
    found = {type(part).__name__: part for part in reversed(list(parts_of(state)))}
    counts = [int(part.count) for part in found.values() if "count" in part._fields]
    steps = max(counts, default=1) if count is None else count
    leaves, tree, entries = transform.lay_out(params)
    states = []
    for i, (entry, leaf) in enumerate(zip(entries, leaves, strict=True)):
        saved = _read_leaf(entry, found, tree, i)
        arrays = {name: np.asarray(_slot(name, entry, saved), arithmetic(leaf)) for name in entry.slots}
        first = entry.member.steady.counters()
        states.append((arrays, {name: float(steps > 0) if name == "started" else value for name, value in first.items()}))
    return restore_state(part, build_snapshot(transform, transform.members, leaves, entries, states, steps))


def _read_leaf(entry: LeafEntry, found: Mapping[str, Any], tree: Any, i: int) -> dict[str, Any]:
    """What optax keeps for one leaf, by our names."""
    kind = entry.member.kind
    if not kind.optax.state:
        raise CheckpointError(f"optax has no {kind.title} whose state could be taken over")
    return {
        slot: tree.flatten_up_to(getattr(found[part], field))[i]
        for part, names in kind.optax.state.items() if part in found
        for slot, field in names.items()
    }  # fmt: skip


def _slot(name: str, entry: LeafEntry, saved: Mapping[str, Any]) -> np.ndarray:
    shape = entry.shape
    if name in ("row", "col") and np.shape(saved.get("v", ())) == shape:  # a small matrix, which optax does not factor
        return np.asarray(np.mean(np.asarray(saved["v"]), -1 if name == "row" else -2, np.float64))
    if name in ("row", "col"):
        name = _other_factor(name, entry)
    value = saved.get(name)
    if value is None or isinstance(value, optax.MaskedNode):
        raise CheckpointError(f"optax's state has no {name!r} for {entry.name!r}, which {entry.member.kind.title} needs")
    return np.asarray(value)


def _other_factor(name: str, entry: LeafEntry) -> str:
    """Name optax's factor that is our row or col: optax averages over the largest dimension first, ours over the last."""
    second, first = map(int, np.argsort(entry.shape)[-2:])
    last = len(entry.shape) - 1
    if {first, second} != {last, last - 1}:
        raise CheckpointError(
            f"{entry.name!r}: optax factors the two largest dimensions of {entry.shape}, and they are not the last two"
        )
    return name if first == last else {"row": "col", "col": "row"}[name]


# ---- to optax -----------------------------------------------------------------------------------------------------------
def to_optax(tx: optax.GradientTransformation, state: RuleState, params: Tree, template: Any) -> Any:
    """optax's state, made from ours in the form of `template`, what optax's own init gave for these parameters."""
    transform = part_of(tx, params).transform
    transform.check_state(state)
    kinds = {kind for each in known().values() for kind in each.optax.state}
    counted = {type(part).__name__ for part in parts_of(template) if "count" in part._fields}

    def stop(part: Any) -> bool:
        return type(part).__name__ in kinds | counted

    def filled(part: Any) -> Any:
        if not stop(part):
            return part
        new = _filled(transform, state, params, part) if type(part).__name__ in kinds else part
        return new._replace(**{k: jnp.asarray(state.count, v.dtype) for k, v in part._asdict().items() if k.startswith("count")})

    return jax.tree.map(filled, template, is_leaf=stop)


def _filled(transform: Transform, state: RuleState, params: Tree, part: Any) -> Any:
    _, tree, entries = transform.lay_out(params)
    kind, kept = type(part).__name__, transform.read_state(state, tree, entries)
    table = {entry.member.kind.name: entry.member.kind.optax.state.get(kind, {}) for entry in entries}
    new = {}
    for field in dict.fromkeys(field for names in table.values() for field in names.values()):
        values = tree.flatten_up_to(getattr(part, field))
        for i, entry in enumerate(entries):
            if not isinstance(values[i], optax.MaskedNode):
                own = decode_slots(entry, kept[i])
                values[i] = _entry(field, table[entry.member.kind.name], entry, own, values[i])
        new[field] = tree.unflatten(values)
    return part._replace(**new)


def _entry(field: str, names: Mapping[str, str], entry: LeafEntry, own: Mapping[str, Any], old: Any) -> Any:
    slot = next((slot for slot, name in names.items() if name == field), None)
    shape, title = np.shape(old), entry.member.kind.title
    if slot in ("row", "col") and slot in entry.slots and shape != (1,):
        slot = _other_factor(slot, entry)
    if slot in entry.slots and np.shape(own[slot]) == shape:
        return jnp.asarray(own[slot], old.dtype)
    if field in ("v_row", "v_col", "v") and shape == (1,):
        return old  # holds the place of what is not kept
    raise CheckpointError(f"optax keeps {field} of shape {shape} for {entry.name!r}, which {title} does not have here")
