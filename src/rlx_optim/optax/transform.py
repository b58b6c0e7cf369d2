"""A spec as an optax GradientTransformation: pure, traceable, with state that mirrors the parameters."""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import registry
from ..engine import MixedShapes
from ..engines.jax_ import Deferred, LeafStack, engine_in, precision, resolve_all
from ..program import Program, Values, trace
from ..rounding import EXACT, LARGEST, NEAREST, key_of, rounded
from ..routing import Choice, Router, quote, report
from ..spec import Shape, Slot, Spec, integer
from ..stepping import check_together
from ..storage import COMPONENTS, Quantized, components, decode, encode
from .leaves import LeafEntry, ScheduledRule, admitted, converted, named_leaves, stepped

Tree = Any
NO_PARAMS = "{}: update needs the params too: tx.update(grads, state, params)"
AXES = integer(0, 0)  # that a leaf has before those of its tensors
PROBES = ((), (3,), (3, 5), (3, 5, 7))  # shapes whose slots show which names a rule uses
PILED = 1 << 18  # numbers of a factor, from which on a stack of them costs more than its parts one by one
LARGE = ((64, 128), (16, 16, 32))  # and which of them may be kept in fewer bits


class RuleState(NamedTuple):
    """count: steps taken. slots: by name, each shaped like the parameters. factors: per parameter, matrices by name; () where
    the rules have none, as who calls a jitted step takes time for every node of a state."""

    count: Any
    slots: dict[str, Tree]
    factors: Tree
    counters: dict[str, Any]


_begun: contextvars.ContextVar[list[tuple[Transform, Tree]] | None] = contextvars.ContextVar("begun", default=None)


@contextlib.contextmanager
def begun() -> Iterator[list[tuple[Transform, Tree]]]:
    """Which of ours are asked for a state in this block, and for what parameters."""
    found: list[tuple[Transform, Tree]] = []
    token = _begun.set(found)
    try:
        yield found
    finally:
        _begun.reset(token)


def lines_up(member: ScheduledRule) -> dict[str, bool]:
    """Whether a slot always lines up with the parameter; the others are factors."""
    found: dict[str, bool] = {}
    for shape in taken(member, PROBES):
        for name, slot in member.steady.stored_slots(shape).items():
            found[name] = found.get(name, True) and (slot.shape == shape or bool(slot.drop))
    return found


def taken(member: ScheduledRule, shapes: Iterable[Shape]) -> list[Shape]:
    """Those that a rule takes."""
    return [shape for shape in shapes if not member.steady.takes(shape)]


def parts_of(member: ScheduledRule, names: list[str]) -> list[str]:
    """Names of the arrays that these slots are kept in."""
    shapes = taken(member, LARGE)
    found = [(name, slot.storage) for shape in shapes for name, slot in member.steady.stored_slots(shape).items()]
    return list(dict.fromkeys([*names, *(name + end for name, kept in found if name in names for end in COMPONENTS[kept])]))


def arithmetic(leaf: Any) -> Any:
    return jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32


class Transform:
    """init and update for one rule, its `otherwise` and those that `route` sends leaves to."""

    def __init__(self, own: ScheduledRule, other: ScheduledRule | None, mask: Any = None, route: Any = None, stacked: Any = None):
        self.owner = own.kind.title
        self.choice = Choice(own.steady, own)
        self.router = Router(self.owner, None if other is None else Choice(other.steady, other), route, self._admitted)
        if stacked is not None and not isinstance(stacked, Mapping):
            raise TypeError(f'{self.owner}: stacked must be a dict such as {{"blocks.*": 1}}, got {stacked!r}')
        if isinstance(mask, (bool, np.bool_, jax.Array)):  # what inject_hyperparams makes of a function
            raise TypeError(
                f"{self.owner}: mask must be a tree of booleans like the parameters, or a function that makes one, got {mask!r}; "
                'optax.inject_hyperparams calls functions as schedules: give it static_args=("mask",)'
            )
        self.own, self.mask = own, mask
        self.stacked = {p: AXES.validated(self.owner, f"stacked[{p!r}]", n) for p, n in (stacked or {}).items()}
        routed = route.values() if isinstance(route, Mapping) else ()
        members = [own, *([] if other is None else [other]), *(each for each in routed if isinstance(each, ScheduledRule))]
        self.members = list({id(member): member for member in members}.values())
        aligned = [(member, lines_up(member)) for member in self.members]
        names = (name for member, slots in aligned for name in parts_of(member, [name for name in slots if slots[name]]))
        self.names = list(dict.fromkeys(names))
        self.has_factors = not all(all(slots.values()) for _, slots in aligned)

    # ---- which leaf goes where -----------------------------------------------------------------------------------------
    def _admitted(self, given: Any) -> Choice:
        if not isinstance(given, ScheduledRule):  # the state has its rules from the beginning
            raise TypeError(f"{self.owner}: a dict routes to optimizers, a function says True, False or None; got {given!r}")
        return Choice(given.steady, given)

    def counters(self, member: ScheduledRule) -> str:
        """What the names of a rule's counters begin with; a number keeps apart those who share the rule."""
        alike = [each for each in self.members if each.rule == member.rule]
        place = next(i for i, each in enumerate(alike) if each is member)
        return f"{member.rule}{place or ''}."

    def laid_out(self, params: Tree) -> tuple[list[Any], Any, list[LeafEntry]]:
        """The leaves as arrays, their tree, and a place for each."""
        found = list(named_leaves(params))
        tree: Any = jax.tree.structure(params)
        names = [name for name, _ in found]
        leaves = [stepped(self.owner, name, leaf) for name, leaf in found]
        params = tree.unflatten(leaves)
        mask = self.mask(params) if callable(self.mask) else self.mask
        decays = (
            [True] * len(leaves)
            if mask is None
            else jax.tree.leaves(jax.tree.map(lambda m, p: jax.tree.map(lambda _: m, p), mask, params))
        )
        axes = self._axes(names, [tuple(leaf.shape) for leaf in leaves])
        rows = zip(names, leaves, axes, map(bool, decays), strict=True)
        places = [self._place(*row) for row in rows]
        self.router.check_used()
        return leaves, tree, places

    def _axes(self, names: list[str], shapes: list[Shape]) -> list[int]:
        """How many leading axes of each leaf only count, by the first pattern that matches it."""
        found = [next((pattern for pattern in self.stacked if fnmatch.fnmatchcase(name, pattern)), None) for name in names]
        for pattern, n in self.stacked.items():
            mine = [(name, shape) for name, shape, its in zip(names, shapes, found, strict=True) if its == pattern]
            if not mine:
                raise ValueError(f"{self.owner}: stacked[{pattern!r}] matches no leaf; there are {quote(names) or 'none'}")
            name, shape = min(mine, key=lambda leaf: len(leaf[1]))
            if n > len(shape):
                raise ValueError(f"{self.owner}: stacked[{pattern!r}] is {n}, but {name!r} has shape {shape}: too few axes")
            if n and all(len(shape) == n for _, shape in mine):
                raise ValueError(
                    f"{self.owner}: stacked[{pattern!r}] is {n}, but {name!r} has shape {shape}: no axis is left for its tensors"
                )
        return [0 if pattern is None else self.stacked[pattern] for pattern in found]

    def _place(self, name: str, leaf: Any, axes: int, decays: bool) -> LeafEntry:
        shape = tuple(leaf.shape)
        choice, why = self.router.decide(self.choice, name, shape[axes:], leaf)
        steady = choice.rule.steady
        if steady.rounding == EXACT and str(leaf.dtype) in LARGEST:
            raise ValueError(
                f"{self.owner}: rounding='exact' is not done under optax, where {name!r} of {leaf.dtype} is moved by adding in "
                "its own type; use rounding='stochastic', or float32 parameters"
            )
        if leaf.dtype == jnp.float64 and steady.state_dtype != "float32":
            raise steady.refuse(
                f'{name!r} is float64, and so is its state; route it to a rule with state_dtype="float32", or make it float32'
            )
        return LeafEntry(name, choice.rule, why, 0 if choice is self.router.otherwise else axes, shape, decays)

    def routing_report(self, params: Tree) -> str:
        """A table: parameter, shape, rule, why."""
        return report([(p.name, p.shape, p.member.kind, p.why) for p in self.laid_out(params)[2]])

    # ---- optax's pair ----------------------------------------------------------------------------------------------------
    def init(self, params: Tree) -> RuleState:
        if (found := _begun.get()) is not None:
            found.append((self, params))
        leaves, tree, places = self.laid_out(params)
        slots: dict[str, list[Any]] = {name: [] for name in self.names}
        factors = []
        for place, leaf in zip(places, leaves, strict=True):
            _refuse_zeros(place, leaf)
            fresh = {
                name + end: filled(slot, (*place.stack, *shape), 0, dtype, leaf) if dtype else start(slot, place, leaf)
                for name, slot in place.slots.items()
                for end, (shape, dtype) in components(slot).items()
            }
            for name in self.names:
                slots[name].append(fresh.get(name, optax.MaskedNode()))
            factors.append({name: array for name, array in fresh.items() if name not in self.names})
        first = {self.counters(m) + k: v for m in self.members for k, v in m.steady.counters().items()}
        counters = {name: jnp.asarray(value, float) for name, value in first.items()}
        mirrored = {name: tree.unflatten(each) for name, each in slots.items()}
        return RuleState(jnp.zeros((), jnp.int32), mirrored, tree.unflatten(factors) if self.has_factors else (), counters)

    def update(self, grads: Tree, state: RuleState, params: Tree = None, **extra: Any) -> tuple[Tree, RuleState]:
        if params is None:
            raise ValueError(NO_PARAMS.format(self.owner))
        ps, tree, places = self.laid_out(params)
        gs = [
            admitted(self.owner, f"the gradient of {place.name!r}", g)
            for place, g in zip(places, tree.flatten_up_to(grads), strict=True)
        ]
        for place, g in zip(places, gs, strict=True):
            if tuple(g.shape) != place.shape:
                raise ValueError(
                    f"{self.owner}: the gradient of {place.name!r} has shape {tuple(g.shape)}, its parameter {place.shape}"
                )
        slots = {name: tree.flatten_up_to(each) for name, each in state.slots.items()}
        factors = factors_of(state, tree)
        updates: list[Any] = [jnp.zeros_like(p) for p in ps]
        counters = dict(state.counters)
        bundles: dict[Any, list[int]] = {}
        mixed = not all(place.decays for place in places)
        for i, place in enumerate(places):
            if ps[i].size:
                apart = place.decays or (mixed and reduces_over_all(place))
                key = (id(place.member), apart, tuple(place.slots), str(arithmetic(ps[i])))
                alone = place.member.kind.matrix and not place.member.steady.mixed_shapes()
                bundles.setdefault((*key, place.inner) if alone else key, []).append(i)
        programs: list[tuple[Spec, Program, list[str]]] = []
        steps: list[tuple[int, Any]] = []
        for indices in bundles.values():
            place = places[indices[0]]
            member, dtype = place.member, arithmetic(ps[indices[0]])
            prefix = self.counters(member)
            mine = {k.removeprefix(prefix): v.astype(dtype) for k, v in state.counters.items() if k.startswith(prefix)}
            kinds = {}
            for decays in dict.fromkeys(places[i].decays for i in indices):
                spec = member.spec(state.count, dtype, **({} if decays else member.undecayed))
                kinds[decays] = (mine if spec.matrix else {}) | numbers_of(spec, state.count + 1, mine, dtype)
            if len(kinds) > 1 and "decay" in member.undecayed:
                raise spec.refuse("it sums over all leaves, and decay='hyperball' cannot be masked in some; leave mask out")
            numbers = kinds[place.decays] if len(kinds) == 1 else columns(kinds, [places[i] for i in indices])
            leaves = [
                (places[i], {"p": ps[i], "g": gs[i]} | decoded(places[i], {n: slots[n][i] for n in self.names} | factors[i]))
                for i in indices
            ]
            if not member.kind.matrix:
                programs.append((spec, trace(spec, place.slots, "change", numbers), [place.name]))
                check_together(programs)
            step = _matrix_step if member.kind.matrix else _program_step
            steps.append((id(member), step(spec, leaves, dtype, numbers, state.count + 1)))
        for indices, x in zip(bundles.values(), resolve_all(steps), strict=True):
            for i, back in zip(indices, returned(x, [places[i] for i in indices]), strict=True):
                updates[i] = added(ps[i], back.pop("change"), places[i], state.count + 1)
                back = encoded(places[i], back, state.count + 1)
                for name in back.keys() & set(self.names):
                    slots[name][i] = back.pop(name)
                factors[i] = back
            prefix = self.counters(places[indices[0]].member)
            mine = {name: old for name, old in counters.items() if name.startswith(prefix)}
            moved = {name: x.get(name.removeprefix(prefix), old) for name, old in mine.items()}
            counters |= {name: 0 * mine[name] + new for name, new in moved.items()}  # a constant would be a copy
        mirrored = recast(state.slots, {name: tree.unflatten(each) for name, each in slots.items()})
        changed = state.factors
        if any(factors):
            changed = tree.unflatten(map(recast, tree.flatten_up_to(state.factors), factors))
        return tree.unflatten(updates), RuleState(state.count + 1, mirrored, changed, recast(state.counters, counters))


def recast(given: Mapping[str, Any], new: dict[str, Any]) -> Any:
    """New values by name in the kind of mapping that the old ones came in: transformations around ours (MultiSteps, `skip_above`)
    compare the two, and flax.nnx hands a state back with mappings of its own for dicts."""
    if type(given) is dict:
        return new
    tree: Any = jax.tree.structure(given, is_leaf=lambda each: each is not given)
    names = {place: name for name, place in tree.unflatten(range(tree.num_leaves)).items()}
    return tree.unflatten(new[names[place]] for place in range(tree.num_leaves))


def factors_of(state: RuleState, tree: Any) -> list[dict[str, Any]]:
    """The factors of each leaf by name."""
    found = tree.flatten_up_to(state.factors) if jax.tree.leaves(state.factors) else [{}] * tree.num_leaves
    return [dict(each) for each in found]


def averaged(state: Any, params: Tree) -> Tree:
    """The point to evaluate at, a pure function: of leaves that Schedule-Free steps their average x, of others the leaf itself.
    state: of a transformation of ours, or whatever it is in (chain, multi_transform, inject_hyperparams, …)."""
    inside = jax.tree.leaves(state, is_leaf=lambda each: isinstance(each, RuleState))
    names = {kind.evaluated for kind in registry.known().values() if kind.evaluated is not None}
    leads = [each.slots[name] for each in inside if isinstance(each, RuleState) for name in names & each.slots.keys()]
    if not leads:
        raise ValueError("averaged: the state has no other point to evaluate at than the params; that of Schedule-Free rules has")
    leaves: list[Any] = jax.tree.leaves(params)
    tree: Any = jax.tree.structure(params)
    for lead in leads:
        there = zip(leaves, tree.flatten_up_to(lead), strict=True)
        leaves = [p if isinstance(more, optax.MaskedNode) else (p + more).astype(p.dtype) for p, more in there]
    return tree.unflatten(leaves)


def exact_products(kind: type[Spec]) -> contextlib.AbstractContextManager[Any]:
    """SOAP's bases and KronPSGD's factors need float32 products; accelerators take fewer bits unless told. Muon needs no more."""
    return jax.default_matmul_precision("highest") if kind.step_dependent and precision() is None else contextlib.nullcontext()


def _refuse_zeros(place: LeafEntry, leaf: Any) -> None:
    """What is to keep its norm must have one; where it can be seen: not while `init` is traced."""
    if (
        place.member.steady.decay == "hyperball"
        and place.decays
        and not isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))
    ):
        for name, tensor in zip(place.names, np.asarray(leaf).reshape(len(place.names), -1), strict=True):
            if tensor.size and not tensor.any():
                raise place.member.steady.zero_norm_error(name, "mask=… with False there")


# ---- leaves to what a rule takes, and back ---------------------------------------------------------------------------------
Leaf = tuple[LeafEntry, dict[str, Any]]  # p, g and the slots by name


def decoded(place: LeafEntry, given: Mapping[str, Any], only: Collection[str] | None = None) -> dict[str, Any]:
    """The slots of a leaf, decoded where they are kept in fewer bits."""
    E, kept = engine_in(jnp.float32), {n: slot.storage for n, slot in place.slots.items() if only is None or n in only}
    for name, slot in place.slots.items():
        wanted = (*place.stack, *slot.shape)
        if name in kept and not kept[name] and (shape := tuple(given[name].shape)) != wanted:
            raise ValueError(
                f"{place.member.kind.title}: the state {name!r} of {place.name!r} has shape {shape}, needed is {wanted}; it "
                "was made for other parameters: tx.init(params) makes a new one"
            )
    return {
        name: decode(E, Quantized(kind, *(given[name + end] for end in COMPONENTS[kind]))) if kind else given[name]
        for name, kind in kept.items()
    }


def encoded(place: LeafEntry, values: Mapping[str, Any], t: Any) -> dict[str, Any]:
    """What the slots of a leaf are kept in, encoded where that is fewer bits; a tensor of a stack by itself."""
    E = engine_in(jnp.float32)
    out: dict[str, Any] = {}
    for name in values:
        slot, made = place.slots[name], {"": values[name]}
        if slot.storage:
            code = functools.partial(encode, E, slot.storage, t=t)
            made = jax.vmap(code)(values[name].reshape(-1, *slot.shape)) if place.axes else code(values[name])
        out |= {name + end: array.reshape((*place.stack, *components(slot)[end][0])) for end, array in made.items()}
    return out


def _program_step(spec: Spec, leaves: list[Leaf], dtype: Any, numbers: dict[str, Any], t: Any) -> Values:
    """Lists with an array per tensor; the tensors of a stacked leaf one by one, as some rules measure each."""
    slots = leaves[0][0].slots
    program = trace(spec, slots, "change", numbers)
    program.check(type(spec).__name__, [place.name for place, _ in leaves], [place.inner for place, _ in leaves])
    arrays: dict[str, list[Any]] = {name: [] for name in ("p", "g", *slots)}
    shapes: list[Shape] = []
    for place, given in leaves:
        shapes += [place.inner] * len(place.names)
        for name, tensors in arrays.items():
            shape = place.slots[name].shape if name in place.slots else place.inner
            array = given[name].astype(dtype)
            tensors.extend(list(array.reshape(-1, *shape)) if place.axes else [array])
    E = engine_in(dtype)
    found = E.run_program(program, shapes, arrays, numbers)
    ends = {name: arrays[name] for name in slots} | E.collect_buffers(program, found, len(shapes))
    return Values(ends, **numbers, change=found[program.given["change"]])


def _matrix_step(spec: Spec, leaves: list[Leaf], dtype: Any, numbers: dict[str, Any], t: Any) -> Any:
    """Arrays whose first axis counts tensors, all of a shape at once, so that a program has its text once for each shape. For a
    rule that takes unequal shapes, the tensors themselves."""
    every: list[dict[str, Any]] = []
    for place, arrays in leaves:
        every.append({name: arrays[name].astype(dtype).reshape(-1, *place.inner) for name in ("p", "g")})
        every[-1] |= {name: arrays[name].reshape(-1, *slot.shape) for name, slot in place.slots.items()}
    E = engine_in(dtype, free=precision() is None)
    if len(every) == 1:
        out = every[0]
    elif spec.mixed_shapes():
        out = {name: MixedShapes(t for each in every for t in each[name]) for name in every[0]}
    else:
        piled = {
            name
            for name, slot in leaves[0][0].slots.items()
            if spec.unstacked_factors and slot.factor and math.prod(slot.shape) >= PILED
        }
        out = {name: (LeafStack if name in piled else jnp.concatenate)([each[name] for each in every]) for name in every[0]}
    x = Values(out, names=[name for place, _ in leaves for name in place.names], **numbers, t=t, seed=spec.values().get("seed"))

    def committed(x: Values) -> Any:
        return spec.commit(E, spec.mask(E, x))

    with exact_products(type(spec)):
        x = spec.update(E, x)
    return x.followed(committed) if isinstance(x, Deferred) else committed(x)


def added(p: Any, change: Any, place: LeafEntry, t: Any) -> Any:
    """What is to be added to a leaf, in its own type, for a change that is to be taken from it. Stochastic rounding is done here:
    p plus this is the number that it came to, as long as their difference can be said in that type."""
    kind = str(p.dtype)
    if place.member.steady.rounding == NEAREST or kind not in LARGEST:
        return -change.astype(p.dtype)
    wide, key = p.astype(jnp.float32), key_of(place.member.steady.values().get("seed"), place.name)
    return (rounded(engine_in(jnp.float32), wide - change, kind, t, key) - wide).astype(p.dtype)


def reduces_over_all(place: LeafEntry) -> bool:
    """Whether what steps this leaf must see all others with it."""
    spec = place.member.steady
    if spec.matrix:
        return False
    return trace(spec, place.slots, "change", spec.numbers(1, spec.counters())).reduction_over_all is not None


def numbers_of(spec: Spec, t: Any, counters: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """What a spec gives at a traced step, in the arithmetic of a bundle: what NumPy made of plain numbers is float64, which JAX
    would widen a bundle to."""
    found = spec.numbers(t, counters)
    return {name: float(value) if isinstance(value, np.floating) else converted(value, dtype) for name, value in found.items()}


def columns(kinds: Mapping[bool, Mapping[str, Any]], places: list[LeafEntry]) -> dict[str, Any]:
    """One number per tensor, where those with decay and those without differ."""
    decays = jnp.asarray([place.decays for place in places for _ in place.names])
    return {
        name: value if value is kinds[False][name] else jnp.where(decays, value, kinds[False][name])
        for name, value in kinds[True].items()
    }


def returned(x: Values, places: list[LeafEntry]) -> Iterator[dict[str, Any]]:
    """The change of p and the slots of each leaf, in the shapes that they came with."""
    first = 0
    for place in places:
        shapes = {"change": place.inner} | {name: slot.shape for name, slot in place.slots.items()}
        last = first + len(place.names)
        yield {name: gathered(x[name], first, last).reshape((*place.stack, *shape)) for name, shape in shapes.items()}
        first = last


def gathered(value: Any, first: int, last: int) -> Any:
    if not isinstance(value, list):
        return value[first:last]
    return value[first] if last - first == 1 else jnp.stack(value[first:last])


def start(slot: Slot, place: LeafEntry, leaf: Any) -> Any:
    shape, dtype = (*place.stack, *slot.shape), arithmetic(leaf)
    if slot.eye:
        return jnp.broadcast_to(jnp.eye(slot.shape[0], dtype=dtype) * slot.fill, shape)
    return filled(slot, shape, slot.fill, dtype, leaf)


def filled(slot: Slot, shape: Shape, value: float, dtype: Any, leaf: Any) -> Any:
    return jnp.full_like(leaf, value, dtype) if mirrors(slot, shape, leaf) else jnp.full(shape, value, dtype)


def mirrors(slot: Slot, shape: Shape, leaf: Any) -> bool:
    """Whether what a slot is kept in is spread over devices as the leaf is, but under jit, where nobody knows how that is."""
    return shape == leaf.shape and not slot.factor


def transformation(transform: Transform, update: Callable[..., Any] | None = None) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(transform.init, update or transform.update)
