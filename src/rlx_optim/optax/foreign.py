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
from ..spec import Shape
from .checkpoint import assembled, opened, restored, transform_of
from .leaves import LeafEntry
from .nested import part_of
from .transform import RuleState, Transform, arithmetic, decoded

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


def fields(part: Any) -> Mapping[str, Any]:
    return dict(part._asdict())


# ---- to ours ------------------------------------------------------------------------------------------------------------
def from_optax(tx: optax.GradientTransformation, state: Any, params: Tree, count: int | None = None) -> RuleState:
    """The state for `tx`, a transformation of ours, that goes on where optax's stopped.

    count: how many steps were taken, where optax's state does not say (sgd without a schedule).
    """
    transform = transform_of(tx)
    found = {type(part).__name__: part for part in reversed(list(parts_of(state)))}
    counts = [int(part.count) for part in found.values() if "count" in fields(part)]
    steps = max(counts, default=1) if count is None else count
    leaves, tree, places = transform.laid_out(params)
    states = []
    for i, (place, leaf) in enumerate(zip(places, leaves, strict=True)):
        theirs = _theirs(place, found, tree, i)
        arrays = {name: np.asarray(_slot(name, place, theirs), arithmetic(leaf)) for name in place.slots}
        first = place.member.steady.counters()
        states.append((arrays, {name: float(steps > 0) if name == "started" else value for name, value in first.items()}))
    return restored(part_of(tx, params), assembled(transform, transform.members, leaves, places, states, steps))


def _theirs(place: LeafEntry, found: Mapping[str, Any], tree: Any, i: int) -> dict[str, Any]:
    """What optax keeps for one leaf, by our names."""
    kind = place.member.kind
    if not kind.optax.state:
        raise CheckpointError(f"optax has no {kind.title} whose state could be taken over")
    return {
        slot: tree.flatten_up_to(getattr(found[part], field))[i]
        for part, names in kind.optax.state.items() if part in found
        for slot, field in names.items()
    }  # fmt: skip


def _slot(name: str, place: LeafEntry, theirs: Mapping[str, Any]) -> np.ndarray:
    shape = place.shape
    if name in ("row", "col") and np.shape(theirs.get("v", ())) == shape:  # a small matrix, which optax does not factor
        return np.asarray(np.mean(np.asarray(theirs["v"]), -1 if name == "row" else -2, np.float64))
    if name in ("row", "col"):
        name = {"row": "col", "col": "row"}[name] if _swapped(place.name, shape) else name
    value = theirs.get(name)
    if value is None or isinstance(value, optax.MaskedNode):
        raise CheckpointError(f"optax's state has no {name!r} for {place.name!r}, which {place.member.kind.title} needs")
    return np.asarray(value)


def _swapped(name: str, shape: Shape) -> bool:
    """Whether optax's rows are our columns: it averages over the largest dimension first, ours over the last."""
    second, first = np.argsort(shape)[-2:]
    if {int(first), int(second)} != {len(shape) - 1, len(shape) - 2}:
        raise CheckpointError(f"{name!r}: optax factors the two largest dimensions of {shape}, and they are not the last two")
    return int(first) != len(shape) - 1


# ---- to optax -----------------------------------------------------------------------------------------------------------
def to_optax(tx: optax.GradientTransformation, state: RuleState, params: Tree, template: Any) -> Any:
    """optax's state, made from ours in the form of `template`, what optax's own init gave for these parameters."""
    transform, _ = opened(tx, state)
    kinds = {kind for each in known().values() for kind in each.optax.state}
    counted = {type(part).__name__ for part in parts_of(template) if "count" in fields(part)}

    def stop(part: Any) -> bool:
        return type(part).__name__ in kinds | counted

    def filled(part: Any) -> Any:
        if not stop(part):
            return part
        new = _filled(transform, state, params, part) if type(part).__name__ in kinds else part
        return new._replace(**{k: jnp.asarray(state.count, v.dtype) for k, v in fields(part).items() if k.startswith("count")})

    return jax.tree.map(filled, template, is_leaf=stop)


def _filled(transform: Transform, state: RuleState, params: Tree, part: Any) -> Any:
    _, tree, places = transform.laid_out(params)
    kind = type(part).__name__
    slots = {name: tree.flatten_up_to(each) for name, each in state.slots.items()}
    table = {place.member.rule: place.member.kind.optax.state.get(kind, {}) for place in places}
    new = {}
    for field in dict.fromkeys(field for names in table.values() for field in names.values()):
        entries = tree.flatten_up_to(getattr(part, field))
        for i, place in enumerate(places):
            if not isinstance(entries[i], optax.MaskedNode):
                ours = decoded(place, {k: v[i] for k, v in slots.items()}, slots)
                entries[i] = _entry(field, table[place.member.rule], place, ours, entries[i])
        new[field] = tree.unflatten(entries)
    return part._replace(**new)


def _entry(field: str, names: Mapping[str, str], place: LeafEntry, ours: Mapping[str, Any], old: Any) -> Any:
    slot = next((slot for slot, its in names.items() if its == field), None)
    shape, title = np.shape(old), place.member.kind.title
    if slot in ("row", "col") and slot in place.slots and shape != (1,) and _swapped(place.name, place.shape):
        slot = {"row": "col", "col": "row"}[slot]
    if slot in place.slots and np.shape(ours[slot]) == shape:
        return jnp.asarray(ours[slot], old.dtype)
    if field in ("v_row", "v_col", "v") and shape == (1,):
        return old  # holds the place of what is not kept
    raise CheckpointError(f"optax keeps {field} of shape {shape} for {place.name!r}, which {title} does not have here")
