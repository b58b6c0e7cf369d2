"""Checkpoints of optax states: leaf paths are the names, the transformation is the settings."""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..checkpoint import files
from ..checkpoint.format import CheckpointError, tensor
from ..checkpoint.optimizers import refuse_evaluation
from ..checkpoint.snapshot import Group, Parameter, SavedOptimizer, SavedSettings, Snapshot, check_fit, check_names
from ..registry import spec_class
from ..routing import quote
from ..spec import Slot, Spec
from ..storage import components
from . import leaves
from .leaves import LeafEntry
from .nested import NestedTransform, part_of
from .transform import RuleState, Transform, arithmetic, encoded, factors_of, mirrors

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
    count = int(_checked(part.transform, part.state_in(state)).count)
    return files.save(lambda: snapshot_of(tx, state, params), count, path, every, keep, allow_nan)


def load_state(path: str | os.PathLike[str], tx: optax.GradientTransformation, params: Tree, *, allow_nan: bool = False) -> Any:
    """The state that was saved to a file by any front end, for `tx` to go on with: a RuleState, or where tx only holds our
    transformation, its whole state with our part and its counts in place; what else it keeps begins anew, and a warning says so.

    A transformation cannot be changed: where its settings are not the file's, its own count, and a warning says so.
    """
    part = part_of(tx, params)
    with files.opened(path, allow_nan) as snapshot:
        ours = restored(part, snapshot)
        return part.put_into(ours, snapshot.members[0].values.hyperparameters)


def transform_of(tx: Any) -> Transform:
    """What is behind a transformation of ours."""
    match tx:
        case optax.GradientTransformation(init=types.MethodType(__self__=Transform() as transform)):
            return transform
    raise TypeError(f"tx must be made by rlx_optim.optax, as adamw(1e-3) is, got {tx!r:.200}")


def opened(tx: Any, state: Any) -> tuple[Transform, int]:
    """What is behind a transformation of ours, and how many steps its state has taken."""
    transform = transform_of(tx)
    ours = _checked(transform, NestedTransform(transform, None, None).state_in(state))
    return transform, int(ours.count)


def _checked(transform: Transform, state: RuleState) -> RuleState:
    if state.slots.keys() != set(transform.names):
        raise ValueError(f"{transform.owner}: state has {quote(state.slots)}, but this tx keeps {quote(transform.names)}")
    return state


# ---- to a snapshot ------------------------------------------------------------------------------------------------------
def snapshot_of(tx: optax.GradientTransformation, state: Any, params: Tree) -> Snapshot:
    """Everything a transformation and its state are and have."""
    part, whole = part_of(tx, params), state
    transform = part.transform
    state = _checked(transform, part.state_in(whole))
    count = int(state.count)
    leaves, tree, where = transform.laid_out(part.params)
    slots = {name: tree.flatten_up_to(each) for name, each in state.slots.items()}
    factors = factors_of(state, tree)
    found = []
    for i, place in enumerate(where):
        arrays, prefix = {name: each[i] for name, each in slots.items()} | factors[i], transform.counters(place.member)
        arrays = {name + end: arrays[name + end] for name, slot in place.slots.items() for end in components(slot)}
        found.append((arrays, {k: float(state.counters[prefix + k]) for k in place.member.steady.counters()}))
    return assembled(transform, [part.member(each, whole) for each in transform.members], leaves, where, found, count)


def assembled(
    transform: Transform, now: Sequence[leaves.ScheduledRule], params: Sequence[Any], where: Sequence[LeafEntry],
    states: Iterable[tuple[Mapping[str, Any], dict[str, float]]], count: int,
) -> Snapshot:  # fmt: skip
    """A snapshot of leaves from their arrays and counters. now: the members with the values in force."""
    members = [_member(each, value, where, count) for each, value in zip(transform.members, now, strict=True)]
    parameters: dict[str, Parameter] = {}
    for place, leaf, (arrays, counters) in zip(where, params, states, strict=True):
        if place.name in parameters:
            raise CheckpointError(f"two leaves are called {place.name!r}")
        member = next(i for i, each in enumerate(transform.members) if each is place.member)
        p = parameters[place.name] = Parameter(
            member, None if place.decays else 0, place.shape, count, {}, counters, str(leaf.dtype),
            len(place.names), place.inner, place.why,
        )  # fmt: skip
        kept = p.arrays({name: (slot,) for name, slot in place.slots.items()})
        p.tensors = {name: tensor(host(array).reshape(kept[name][0])) for name, array in arrays.items()}
    return Snapshot(members, parameters, count, front_end="optax")


def host(array: Any) -> np.ndarray:
    """An array as NumPy has it: a bfloat16 is a uint16."""
    found = np.asarray(array)
    return found.view(np.uint16) if array.dtype == jnp.bfloat16 else found


def settings(member: leaves.ScheduledRule, count: int) -> Spec:
    """The values in force at a count, as plain numbers."""
    spec = member.spec(jnp.asarray(count, jnp.int32))
    return member.kind(**{name: _plain(value) for name, value in spec.values().items()})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, (jax.Array, np.ndarray, np.generic)) else value


def _member(member: leaves.ScheduledRule, now: leaves.ScheduledRule, where: Sequence[LeafEntry], count: int) -> SavedOptimizer:
    values = settings(now, count).values()
    callables = [name for name, value in now.values.items() if callable(value)]
    groups = []
    if any(place.member is member and not place.decays for place in where):
        kept = [name for name in callables if name != "weight_decay"]
        groups = [Group(SavedSettings({**values, "weight_decay": 0.0}, kept), overrides=["weight_decay"])]
    return SavedOptimizer(member.rule, SavedSettings(values, callables), groups)


# ---- from a snapshot ----------------------------------------------------------------------------------------------------
def restored(part: NestedTransform, snapshot: Snapshot) -> RuleState:
    transform = part.transform
    leaves, tree, where = transform.laid_out(part.params)
    names = {place.name for place in where}
    check_names(snapshot, names, names)
    steps = {p.step for p in snapshot.parameters.values()}
    if len(steps) > 1:
        raise CheckpointError(
            f"its parameters have taken between {min(steps)} and {max(steps)} steps; optax counts for all at once"
        )
    count = steps.pop() if steps else 0
    if count >= 2**31:
        raise CheckpointError(f"its parameters have taken {count} steps; optax counts to {2**31 - 1}")
    for place, leaf in zip(where, leaves, strict=True):
        _check_fit(snapshot, snapshot.parameters[place.name], place, leaf)
    _compare(transform, snapshot, where, count, part.injected())
    slots: dict[str, list[Any]] = {name: [] for name in transform.names}
    factors = []
    for place, leaf in zip(where, leaves, strict=True):
        arrays = _arrays(snapshot.parameters[place.name], place, leaf)
        for name in transform.names:
            slots[name].append(arrays.pop(name, optax.MaskedNode()))
        factors.append(arrays)
    mirrored = {name: tree.unflatten(each) for name, each in slots.items()}
    counters = _counters(transform, snapshot, where)
    found = tree.unflatten(factors) if transform.has_factors else ()
    return RuleState(jnp.asarray(count, jnp.int32), mirrored, found, counters)


def _check_fit(snapshot: Snapshot, p: Parameter, place: LeafEntry, leaf: Any) -> None:
    rule, here, name = snapshot.members[p.member].optimizer, place.member.rule, place.name
    if rule != here:
        titles = spec_class(rule).title, spec_class(here).title
        raise CheckpointError(
            f"{name!r} is stepped by {titles[0]} in the checkpoint and by {titles[1]} in this transformation, which decides that"
        )
    check_fit(name, p, place.shape, arithmetic(leaf) is jnp.float64)
    there, inside = (p.pieces, p.piece), (len(place.names), place.inner)
    if there != inside:
        says = ["{} of {}".format(*each) for each in (there, inside)]
        raise CheckpointError(f"{name!r} is {says[0]} in the checkpoint, expected {says[1]} (stacked=)")
    if snapshot.members[p.member].values_of(p.group).extra.get("maximize"):
        raise CheckpointError(f"{name!r} is maximized, which the optax front end does not do")
    refuse_evaluation(name, p)
    for slot, each in place.slots.items():
        if slot not in p.tensors or p.tensors[slot].shape != p.stored((each,)):
            found = p.tensors[slot].shape if slot in p.tensors else "missing"
            raise CheckpointError(f"state {slot!r} of {name!r} is {found}, expected {p.stored((each,))} with these settings")


def _arrays(p: Parameter, place: LeafEntry, leaf: Any) -> dict[str, Any]:
    """The state of a leaf: codes of the same format as they are, others decoded and encoded."""
    out: dict[str, Any] = {}
    for name, slot in place.slots.items():
        if slot.storage and p.storage_of(name) == slot.storage:
            for end, (shape, dtype) in components(slot).items():
                found = p.tensors[name + end].read().reshape((*place.stack, *shape))
                out[name + end] = beside(leaf, slot, found.view(jnp.bfloat16) if dtype == "bfloat16" else found)
        else:
            values = np.asarray(p.values(name).reshape((*place.stack, *slot.shape)), arithmetic(leaf))
            out |= encoded(place, {name: beside(leaf, slot, values)}, 0)
    return out


def beside(leaf: Any, slot: Slot, array: np.ndarray) -> jax.Array:
    """An array that was read, where `init` would have it."""
    known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed
    return jax.device_put(array, leaf.sharding) if known and mirrors(slot, array.shape, leaf) else jnp.asarray(array)


def _counters(transform: Transform, snapshot: Snapshot, where: list[LeafEntry]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for member in transform.members:
        mine = [snapshot.parameters[place.name] for place in where if place.member is member]
        for name, first in member.steady.counters().items():
            values = {p.counters.get(name, first) for p in mine} or {first}
            if len(values) > 1:
                raise CheckpointError(f"its parameters differ in {name!r}; optax counts for all at once")
            value = found[transform.counters(member) + name] = jnp.asarray(values.pop(), float)
            if not jnp.isfinite(value):
                raise CheckpointError(f"counter {name!r} is beyond {value.dtype}; set jax_enable_x64 to read it")
    return found


def _compare(transform: Transform, snapshot: Snapshot, where: list[LeafEntry], count: int, injected: Collection[str]) -> None:
    """Warn where the transformation goes on with other settings than the file's; those that are injected are taken from it."""
    told: dict[tuple[str, str], str] = {}
    for place in where:
        p = snapshot.parameters[place.name]
        here: dict[str, Any] = settings(place.member, count).values() | ({} if place.decays else {"weight_decay": 0.0})
        there: Mapping[str, Any] = snapshot.spec(p).values()
        for name, value in here.items():
            taken = place.member is transform.own and name in injected
            if value != there[name] and not callable(value) and not taken:
                told.setdefault((place.member.rule, name), f"{name} of {place.name!r} was {there[name]!r} and is {value!r} now")
    if told:
        title = transform.own.kind.title
        warnings.warn(
            f"{title}: the transformation's settings are not the checkpoint's: {'; '.join(told.values())}", stacklevel=4
        )
