"""A spec as an optax GradientTransformation: pure, traceable, with state that mirrors the parameters."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..engine import Tensors, Values
from ..engines.jax_ import Jax, traceable
from ..routing import report
from ..spec import Shape, Slot, Spec

Tree = Any
PROBES = ((), (3,), (3, 5), (3, 5, 7))  # shapes whose slots show which names a rule uses
HEADS = re.compile(r"(^|[./_])(emb|embed|embedding|embeddings|wte|wpe|lm_head|head|classifier|unembed)([./_]|$)", re.IGNORECASE)


class RuleState(NamedTuple):
    """count: steps taken. slots: by name, each shaped like the parameters. factors: per parameter, matrices by name."""

    count: Any
    slots: dict[str, Tree]
    factors: Tree
    counters: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Member:
    """One rule of a transformation, with values that may be schedules (of the step count) or traced numbers."""

    rule: str
    kind: type[Spec]
    values: Mapping[str, Any]

    def spec(self, count: Any, **changes: Any) -> Spec:
        now = {k: v(count) if callable(v) and k != "probe" else v for k, v in {**self.values, **changes}.items()}
        return unchecked(self.kind, now)

    @functools.cached_property
    def steady(self) -> Spec:
        """For shapes and structure, which no schedule changes."""
        return self.spec(jnp.zeros((), jnp.int32))


def is_traced(value: Any) -> bool:
    return isinstance(value, (jax.Array, jax.core.Tracer)) or (isinstance(value, tuple) and any(map(is_traced, value)))


def unchecked(kind: type[Spec], values: Mapping[str, Any]) -> Spec:
    """A spec in which traced numbers stand as they are; plain ones are checked as always."""
    spec = object.__new__(kind)
    for name, field in kind.fields.items():
        value = values.get(name, field.default)
        spec.__dict__[name] = value if is_traced(value) else field.validated(kind.__name__, name, value)
    if not any(map(is_traced, spec.__dict__.values())):
        spec.check()
    return spec


@dataclasses.dataclass(frozen=True)
class Place:
    """One leaf: its path as a name, the rule that takes it and why, how many matrices it holds, whether it decays."""

    name: str
    member: Member
    why: str
    batch: int
    shape: Shape
    decays: bool

    @property
    def inner(self) -> Shape:
        return self.shape if self.batch == 1 else self.shape[-2:]

    @property
    def slots(self) -> dict[str, Slot]:
        return self.member.steady.slots(self.inner)


def aligned_slots(member: Member) -> list[str]:
    """Names of slots that always line up with the parameter; the others are factors."""
    found = [
        (name, slot.shape == shape or bool(slot.drop)) for shape in PROBES for name, slot in member.steady.slots(shape).items()
    ]
    return list(dict.fromkeys(name for name, _ in found if all(lines_up for n, lines_up in found if n == name)))


def arithmetic(leaf: Any) -> Any:
    return jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32


class Transform:
    """init and update for one rule, or for one rule and its `otherwise`."""

    def __init__(self, own: Member, other: Member | None, mask: Any = None, route: Any = None, stacked: Any = None):
        self.own, self.other, self.mask, self.route, self.stacked = own, other, mask, route, stacked
        self.members = [own] if other is None else [own, other]
        self.names = list(dict.fromkeys(name for member in self.members for name in aligned_slots(member)))

    # ---- which leaf goes where -----------------------------------------------------------------------------------------
    def places(self, params: Tree) -> list[Place]:
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        mask = self.mask(params) if callable(self.mask) else self.mask
        decays = (
            [True] * len(leaves)
            if mask is None
            else jax.tree.leaves(jax.tree.map(lambda m, p: jax.tree.map(lambda _: m, p), mask, params))
        )
        return [self._place(path_name(path), leaf, bool(d)) for (path, leaf), d in zip(leaves, decays, strict=True)]

    def _place(self, name: str, leaf: Any, decays: bool) -> Place:
        shape = tuple(leaf.shape)
        axes = next((n for pattern, n in (self.stacked or {}).items() if fnmatch.fnmatchcase(name, pattern)), 0)
        batch = math.prod(shape[:axes]) if axes else 1
        reason = self.own.steady.takes(shape[axes:])
        if self.other is None:
            if reason is not None and not self.own.kind.everywhere:
                raise ValueError(f"{self.own.kind.__name__}: {name!r} has shape {shape}: {reason}; give otherwise=…")
            return Place(name, self.own, "", batch, shape, decays)
        wish = self.route(name, leaf) if self.route is not None else None
        if reason is None and wish is None and HEADS.search(name):
            reason = "embedding or head (by name)"
        if wish is False:
            reason = "route"
        member = self.own if reason is None else self.other
        return Place(name, member, reason or "", batch if member is self.own else 1, shape, decays)

    def routing_report(self, params: Tree) -> str:
        """A table: parameter, shape, rule, why."""
        return report([(p.name, p.shape, p.member.rule, p.why) for p in self.places(params)])

    # ---- optax's pair ----------------------------------------------------------------------------------------------------
    def init(self, params: Tree) -> RuleState:
        leaves = jax.tree.leaves(params)
        tree: Any = jax.tree.structure(params)
        places = self.places(params)
        slots: dict[str, list[Any]] = {name: [] for name in self.names}
        factors = []
        for place, leaf in zip(places, leaves, strict=True):
            fresh = {name: start(slot, place, arithmetic(leaf)) for name, slot in place.slots.items()}
            for name in self.names:
                slots[name].append(fresh.get(name, optax.MaskedNode()))
            factors.append({name: array for name, array in fresh.items() if name not in self.names})
        counters = {f"{m.rule}.{k}": jnp.asarray(v, jnp.float32) for m in self.members for k, v in m.steady.counters().items()}
        mirrored = {name: tree.unflatten(each) for name, each in slots.items()}
        return RuleState(jnp.zeros((), jnp.int32), mirrored, tree.unflatten(factors), counters)

    def update(self, grads: Tree, state: RuleState, params: Tree = None, **extra: Any) -> tuple[Tree, RuleState]:
        if params is None:
            raise ValueError(optax._src.base.NO_PARAMS_MSG)
        places = self.places(params)
        tree: Any = jax.tree.structure(params)
        ps, gs = jax.tree.leaves(params), jax.tree.leaves(grads)
        slots = {name: tree.flatten_up_to(each) for name, each in state.slots.items()}
        factors = tree.flatten_up_to(state.factors)
        moved: list[Any] = list(ps)
        counters = dict(state.counters)
        bundles: dict[Any, list[int]] = {}
        for i, place in enumerate(places):
            if ps[i].size:
                key = (place.member.rule, place.decays, tuple(place.slots), str(arithmetic(ps[i])))
                bundles.setdefault((*key, i) if place.member.kind.matrix else key, []).append(i)
        for indices in bundles.values():
            place = places[indices[0]]
            member, dtype = place.member, arithmetic(ps[indices[0]])
            changes = {} if place.decays else {"weight_decay": 0.0}
            spec = member.spec(state.count, **changes)
            prefix = f"{member.rule}."
            mine = {k.removeprefix(prefix): v for k, v in state.counters.items() if k.startswith(prefix)}
            numbers = {**mine, **traceable(member.kind.scalars)(spec, state.count + 1, mine)}
            gather = self._stack if member.kind.matrix else self._lists
            x = gather(places, indices, ps, gs, slots, factors, dtype)
            x = x.set(**numbers, t=state.count + 1, seed=spec.values().get("seed"))
            x = traceable(member.kind.update)(spec, Jax(dtype), x)
            for k, i in enumerate(indices):
                back = {name: restored(x[name], name, places[i], k) for name in ("p", *place.slots)}
                moved[i] = back.pop("p")
                for name in back.keys() & set(self.names):
                    slots[name][i] = back.pop(name)
                factors[i] = back
            counters |= {prefix + name: jnp.asarray(x[name], jnp.float32) for name in mine}
        updates = [
            (new - p.astype(new.dtype)).astype(p.dtype) if p.size else jnp.zeros_like(p) for new, p in zip(moved, ps, strict=True)
        ]
        mirrored = {name: tree.unflatten(each) for name, each in slots.items()}
        return tree.unflatten(updates), RuleState(state.count + 1, mirrored, tree.unflatten(factors), counters)

    def _lists(self, places: Any, indices: list[int], ps: Any, gs: Any, slots: Any, factors: Any, dtype: Any) -> Values:
        expected = places[indices[0]].slots
        values = {"p": Tensors([ps[i].astype(dtype) for i in indices]), "g": Tensors([gs[i].astype(dtype) for i in indices])}
        return Values(values | {name: Tensors([slots[name][i] for i in indices], slot.drop) for name, slot in expected.items()})

    def _stack(self, places: Any, indices: list[int], ps: Any, gs: Any, slots: Any, factors: Any, dtype: Any) -> Values:
        (i,), place = indices, places[indices[0]]
        stack = (place.batch, *place.inner)
        values = {"p": ps[i].astype(dtype).reshape(stack), "g": gs[i].astype(dtype).reshape(stack)}
        for name, slot in place.slots.items():
            values[name] = (slots[name][i] if name in self.names else factors[i][name]).reshape(place.batch, *slot.shape)
        names = [place.name] if place.batch == 1 else [f"{place.name}[{k}]" for k in range(place.batch)]
        return Values(values, names=names)


def restored(value: Any, name: str, place: Place, k: int) -> Any:
    """A slot (or p) of one leaf, out of a list or in the shape it had before it was a stack."""
    if isinstance(value, Tensors):
        return value[k]
    slot = place.slots.get(name)
    if slot is None or slot.shape == place.inner:
        return value.reshape(place.shape)
    return value.reshape(slot.shape if place.batch == 1 else (place.batch, *slot.shape))


def start(slot: Slot, place: Place, dtype: Any) -> Any:
    shape = place.shape if slot.shape == place.inner else slot.shape if place.batch == 1 else (place.batch, *slot.shape)
    if slot.eye:
        return jnp.broadcast_to(jnp.eye(slot.shape[0], dtype=dtype) * slot.fill, shape)
    return jnp.full(shape, slot.fill, dtype)


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's path as "layers.0.kernel"."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def transformation(transform: Transform, update: Callable[..., Any] | None = None) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(transform.init, update or transform.update)
