"""Checkpoints of optax states: leaf paths are the names, the transformation is the settings."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..checkpoint import files
from ..checkpoint.format import CheckpointError, make_tensor
from ..checkpoint.optimizers import refuse_evaluation
from ..checkpoint.snapshot import Group, Parameter, SavedOptimizer, SavedSettings, Snapshot, check_fit, check_names
from ..registry import spec_class
from ..spec import Slot, Spec
from ..storage import components
from .leaves import LeafEntry, ScheduledRule, arithmetic, encode_slots, is_mirrored
from .nested import NestedTransform, part_of
from .transform import RuleState, Transform

Tree = Any


def save_state(
    path: str | os.PathLike[str],
    tx: optax.GradientTransformation,
    state: optax.OptState,
    params: Tree,
    every: int = 1,
    keep: int | None = None,
    *,
    allow_nan: bool = False,
) -> Path | None:
    """Write a state to a file that every front end reads: `tx` made it, for `params`; see `rlx_optim.NamedOptimizer.save`.

    tx may hold our transformation: a chain, inject_hyperparams, MultiSteps, masked. The file has our part. The iteration is its
    count. The parameters themselves are not in it.
    """
    part = part_of(tx, params)
    count = int(part.state_in(state).count)
    return files.save(lambda: snapshot_of(tx, state, params), count, path, every, keep, allow_nan)


def load_state(path: str | os.PathLike[str], tx: optax.GradientTransformation, params: Tree, *, allow_nan: bool = False) -> Any:
    """The state that was saved to a file by any front end, for `tx` to go on with: a RuleState, or where tx only holds our
    transformation, its whole state with our part and its counts in place; what else it keeps begins anew, and a warning says so.

    A transformation cannot be changed: where its settings are not the file's, its own count, and a warning says so.
    """
    part = part_of(tx, params)
    with files.open_checkpoint(path, allow_nan) as snapshot:
        return part.put_into(restore_state(part, snapshot), snapshot.members[0].values.hyperparameters)


# ---- to a snapshot ------------------------------------------------------------------------------------------------------
def snapshot_of(tx: optax.GradientTransformation, state: Any, params: Tree) -> Snapshot:
    """Everything a transformation and its state are and have."""
    part = part_of(tx, params)
    transform, ours = part.transform, part.state_in(state)
    leaves, tree, entries = transform.lay_out(part.params)
    states = []
    for entry, arrays in zip(entries, transform.read_state(ours, tree, entries), strict=True):
        prefix = transform.counters(entry.member)
        counters = {name: float(ours.counters[prefix + name]) for name in entry.member.steady.counters()}
        states.append(({name: arrays[name] for name in entry.arrays}, counters))
    in_force = [part.member(each, state) for each in transform.members]
    return build_snapshot(transform, in_force, leaves, entries, states, int(ours.count))


def build_snapshot(
    transform: Transform, in_force: Sequence[ScheduledRule], params: Sequence[Any], entries: Sequence[LeafEntry],
    states: Iterable[tuple[Mapping[str, Any], dict[str, float]]], count: int,
) -> Snapshot:  # fmt: skip
    """A snapshot of leaves from their arrays and counters. in_force: the members with the values that now count."""
    members = [_member(each, values, entries, count) for each, values in zip(transform.members, in_force, strict=True)]
    parameters: dict[str, Parameter] = {}
    for entry, leaf, (arrays, counters) in zip(entries, params, states, strict=True):
        if entry.name in parameters:
            raise CheckpointError(f"two leaves are called {entry.name!r}")
        member = next(i for i, each in enumerate(transform.members) if each is entry.member)
        p = parameters[entry.name] = Parameter(
            member, None if entry.decays else 0, entry.shape, count, {}, counters, str(leaf.dtype),
            len(entry.names), entry.inner, entry.why,
        )  # fmt: skip
        kept = p.arrays({name: (slot,) for name, slot in entry.slots.items()})
        p.tensors = {name: make_tensor(to_numpy(array).reshape(kept[name][0])) for name, array in arrays.items()}
    return Snapshot(members, parameters, count, front_end="optax")


def to_numpy(array: Any) -> np.ndarray:
    """An array as NumPy has it: a bfloat16 is a uint16."""
    found = np.asarray(array)
    return found.view(np.uint16) if array.dtype == jnp.bfloat16 else found


def settings(member: ScheduledRule, count: int) -> Spec:
    """The values in force at a count, as plain numbers."""
    spec = member.spec(jnp.asarray(count, jnp.int32))
    return member.kind(**jax.tree.map(lambda value: value.item() if hasattr(value, "item") else value, spec.values()))


def _member(member: ScheduledRule, in_force: ScheduledRule, entries: Sequence[LeafEntry], count: int) -> SavedOptimizer:
    values = settings(in_force, count).values()
    callables = [name for name, value in in_force.values.items() if callable(value)]
    groups = []
    if any(entry.member is member and not entry.decays for entry in entries):
        kept = [name for name in callables if name != "weight_decay"]
        groups = [Group(SavedSettings({**values, "weight_decay": 0.0}, kept), overrides=["weight_decay"])]
    return SavedOptimizer(member.kind.name, SavedSettings(values, callables), groups)


# ---- from a snapshot ----------------------------------------------------------------------------------------------------
def restore_state(part: NestedTransform, snapshot: Snapshot) -> RuleState:
    transform = part.transform
    leaves, tree, entries = transform.lay_out(part.params)
    names = {entry.name for entry in entries}
    check_names(snapshot, names, names)
    steps = {p.step for p in snapshot.parameters.values()}
    if len(steps) > 1:
        raise CheckpointError(
            f"its parameters have taken between {min(steps)} and {max(steps)} steps; optax counts for all at once"
        )
    count = steps.pop() if steps else 0
    if count >= 2**31:
        raise CheckpointError(f"its parameters have taken {count} steps; optax counts to {2**31 - 1}")
    pairs = list(zip(entries, leaves, strict=True))
    for entry, leaf in pairs:
        _check_fit(snapshot, snapshot.parameters[entry.name], entry, leaf)
    _compare(transform, snapshot, entries, count, part.injected())
    kept = [_arrays(snapshot.parameters[entry.name], entry, leaf) for entry, leaf in pairs]
    return transform.build_state(tree, kept, jnp.asarray(count, jnp.int32), _counters(transform, snapshot, entries))


def _check_fit(snapshot: Snapshot, p: Parameter, entry: LeafEntry, leaf: Any) -> None:
    rule, name = spec_class(snapshot.members[p.member].optimizer), entry.name
    if rule.name != entry.member.kind.name:
        raise CheckpointError(
            f"{name!r} is stepped by {rule.title} in the checkpoint and by {entry.member.kind.title} in this transformation, "
            "which decides that"
        )
    check_fit(name, p, entry.shape, arithmetic(leaf) is jnp.float64)
    if (p.pieces, p.piece) != (pieces := (len(entry.names), entry.inner)):
        saved, expected = ("{} of {}".format(*each) for each in ((p.pieces, p.piece), pieces))
        raise CheckpointError(f"{name!r} is {saved} in the checkpoint, expected {expected} (stacked=)")
    if snapshot.members[p.member].values_of(p.group).extra.get("maximize"):
        raise CheckpointError(f"{name!r} is maximized, which the optax front end does not do")
    refuse_evaluation(name, p)
    for slot, each in entry.slots.items():
        if slot not in p.tensors or p.tensors[slot].shape != p.stored((each,)):
            found = p.tensors[slot].shape if slot in p.tensors else "missing"
            raise CheckpointError(f"state {slot!r} of {name!r} is {found}, expected {p.stored((each,))} with these settings")


def _arrays(p: Parameter, entry: LeafEntry, leaf: Any) -> dict[str, Any]:
    """The state of a leaf: codes of the same format as they are, others decoded and encoded."""
    out: dict[str, Any] = {}
    for name, slot in entry.slots.items():
        if slot.storage and p.storage_of(name) == slot.storage:
            for end, (shape, dtype) in components(slot).items():
                found = p.tensors[name + end].read().reshape((*entry.stack, *shape))
                out[name + end] = place_beside(leaf, slot, found.view(jnp.bfloat16) if dtype == "bfloat16" else found)
        else:
            values = np.asarray(p.values(name).reshape((*entry.stack, *slot.shape)), arithmetic(leaf))
            out |= encode_slots(entry, {name: place_beside(leaf, slot, values)}, 0)
    return out


def place_beside(leaf: Any, slot: Slot, array: np.ndarray) -> jax.Array:
    """Return an array that was read where `init` would have it."""
    placed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed
    return jax.device_put(array, leaf.sharding) if placed and is_mirrored(slot, array.shape, leaf) else jnp.asarray(array)


def _counters(transform: Transform, snapshot: Snapshot, entries: list[LeafEntry]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for member in transform.members:
        parameters = [snapshot.parameters[entry.name] for entry in entries if entry.member is member]
        for name, first in member.steady.counters().items():
            values = {p.counters.get(name, first) for p in parameters} or {first}
            if len(values) > 1:
                raise CheckpointError(f"its parameters differ in {name!r}; optax counts for all at once")
            value = found[transform.counters(member) + name] = jnp.asarray(values.pop(), float)
            if not jnp.isfinite(value):
                raise CheckpointError(f"counter {name!r} is beyond {value.dtype}; set jax_enable_x64 to read it")
    return found


def _compare(transform: Transform, snapshot: Snapshot, entries: list[LeafEntry], count: int, injected: Collection[str]) -> None:
    """Warn where the transformation goes on with other settings than the file's; those that are injected are taken from it."""
    changes: dict[tuple[str, str], str] = {}
    for entry in entries:
        saved = snapshot.spec(snapshot.parameters[entry.name]).values()
        values: dict[str, Any] = settings(entry.member, count).values() | ({} if entry.decays else {"weight_decay": 0.0})
        for name, value in values.items():
            from_file = entry.member is transform.own and name in injected
            if value != saved[name] and not callable(value) and not from_file:
                change = f"{name} of {entry.name!r} was {saved[name]!r} and is {value!r} now"
                changes.setdefault((entry.member.kind.name, name), change)
    if changes:
        what = f"{transform.owner}: the transformation's settings are not the checkpoint's"
        warnings.warn(f"{what}: {'; '.join(changes.values())}", stacklevel=4)
