"""A spec as an optax GradientTransformation: pure, traceable, with state that mirrors the parameters."""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ..storage import COMPONENTS
from .leaves import (
    LeafEntry,
    ScheduledRule,
    arithmetic,
    decode_slots,
    encode_slots,
    init_arrays,
    numbers_of,
    read_leaves,
    to_array,
)

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


_watched: contextvars.ContextVar[list[tuple[Transform, Tree]] | None] = contextvars.ContextVar("watched", default=None)


@contextlib.contextmanager
def watch_inits() -> Iterator[list[tuple[Transform, Tree]]]:
    """Which of ours are asked for a state in this block, and for what parameters."""
    found: list[tuple[Transform, Tree]] = []
    token = _watched.set(found)
    try:
        yield found
    finally:
        _watched.reset(token)


def probe_slots(member: ScheduledRule, shapes: Iterable[Shape]) -> Iterator[tuple[Shape, str, Slot]]:
    """Yield the slots that a rule has for each of these shapes that it takes."""
    for shape in shapes:
        if not member.steady.takes(shape):
            yield from ((shape, name, slot) for name, slot in member.steady.stored_slots(shape).items())


def find_aligned(member: ScheduledRule) -> dict[str, bool]:
    """Say of each slot of a rule whether it always has the shape of its parameter; the others are factors."""
    found: dict[str, bool] = {}
    for shape, name, slot in probe_slots(member, PROBES):
        found[name] = found.get(name, True) and (slot.shape == shape or bool(slot.drop))
    return found


def array_names(member: ScheduledRule, names: list[str]) -> list[str]:
    """Return the names of the arrays that these slots are kept in."""
    ends = [name + end for _, name, slot in probe_slots(member, LARGE) if name in names for end in COMPONENTS[slot.storage]]
    return list(dict.fromkeys([*names, *ends]))


class Transform:
    """init and update for one rule, its `otherwise` and those that `route` sends leaves to."""

    def __init__(self, own: ScheduledRule, other: ScheduledRule | None, mask: Any = None, route: Any = None, stacked: Any = None):
        self.owner = own.kind.title
        self.choice = Choice(own.steady, own)
        self.router = Router(self.owner, None if other is None else Choice(other.steady, other), route, self._admitted)
        if stacked is not None and not isinstance(stacked, Mapping):
            raise TypeError(f'{self.owner}: stacked must be a dict such as {{"blocks.*": 1}}, got {stacked!r}')
        self.own, self.mask = own, mask
        self.stacked = {p: AXES.validated(self.owner, f"stacked[{p!r}]", n) for p, n in (stacked or {}).items()}
        members = [own, other, *(route.values() if isinstance(route, Mapping) else ())]
        self.members = list({id(each): each for each in members if isinstance(each, ScheduledRule)}.values())
        aligned = [(member, find_aligned(member)) for member in self.members]
        names = (name for member, slots in aligned for name in array_names(member, [name for name in slots if slots[name]]))
        self.names = list(dict.fromkeys(names))
        self.has_factors = not all(all(slots.values()) for _, slots in aligned)

    # ---- which leaf goes where -----------------------------------------------------------------------------------------
    def _admitted(self, given: Any) -> Choice:
        if not isinstance(given, ScheduledRule):  # the state has its rules from the beginning
            raise TypeError(f"{self.owner}: a dict routes to optimizers, a function says True, False or None; got {given!r}")
        return Choice(given.steady, given)

    def counters(self, member: ScheduledRule) -> str:
        """What the names of a rule's counters begin with; a number keeps apart those who share the rule."""
        alike = [each for each in self.members if each.kind.name == member.kind.name]
        place = next(i for i, each in enumerate(alike) if each is member)
        return f"{member.kind.name}{place or ''}."

    def lay_out(self, params: Tree) -> tuple[list[Any], Any, list[LeafEntry]]:
        """The leaves as arrays, their tree, and an entry for each."""
        tree: Any = jax.tree.structure(params)
        names, leaves = read_leaves(self.owner, params)
        axes = self._axes(names, [tuple(leaf.shape) for leaf in leaves])
        rows = zip(names, leaves, axes, self._masked(names, tree.unflatten(leaves)), strict=True)
        entries = [self._entry(*row) for row in rows]
        self.router.check_used()
        return leaves, tree, entries

    def _masked(self, names: list[str], params: Tree) -> list[bool]:
        """Say of each leaf whether its weights decay."""
        if self.mask is None:
            return [True] * len(names)
        mask = self.mask(params) if callable(self.mask) else self.mask
        wanted = f"{self.owner}: mask must be a tree of booleans like the parameters, or a function that makes one"
        if isinstance(self.mask, (bool, np.bool_, jax.Array)):  # what inject_hyperparams makes of a function
            hint = 'optax.inject_hyperparams calls functions as schedules: give it static_args=("mask",)'
            raise TypeError(f"{wanted}, got {self.mask!r}; {hint}")
        try:
            decays = jax.tree.leaves(jax.tree.map(lambda m, p: jax.tree.map(lambda _: m, p), mask, params))
        except ValueError as problem:
            raise ValueError(f"{wanted}: {problem}") from None
        for name, value in zip(names, decays, strict=True):
            if not isinstance(value, (bool, int, np.generic, np.ndarray, jax.Array)) or np.shape(value):
                raise TypeError(f"{wanted}; of {name!r} it has {value!r:.80}")
        return list(map(bool, decays))

    def _axes(self, names: list[str], shapes: list[Shape]) -> list[int]:
        """How many leading axes of each leaf only count, by the first pattern that matches it."""
        found = [next((pattern for pattern in self.stacked if fnmatch.fnmatchcase(name, pattern)), None) for name in names]
        for pattern, n in self.stacked.items():
            matched = {name: shape for name, shape, by in zip(names, shapes, found, strict=True) if by == pattern}
            if not matched:
                raise ValueError(f"{self.owner}: stacked[{pattern!r}] matches no leaf; there are {quote(names) or 'none'}")
            name, shape = min(matched.items(), key=lambda leaf: len(leaf[1]))
            few = "too few axes" if n > len(shape) else ""
            if n and all(len(shape) == n for shape in matched.values()):
                few = "no axis is left for its tensors"
            if few:
                raise ValueError(f"{self.owner}: stacked[{pattern!r}] is {n}, but {name!r} has shape {shape}: {few}")
        return [0 if pattern is None else self.stacked[pattern] for pattern in found]

    def _entry(self, name: str, leaf: Any, axes: int, decays: bool) -> LeafEntry:
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
        return report([(p.name, p.shape, p.member.kind, p.why) for p in self.lay_out(params)[2]])

    # ---- state -----------------------------------------------------------------------------------------------------------
    def first_counters(self) -> dict[str, float]:
        """Return the counters of all rules, with their first values."""
        return {self.counters(m) + k: v for m in self.members for k, v in m.steady.counters().items()}

    def check_state(self, state: Any) -> RuleState:
        """Refuse a state that another transformation made."""
        if not isinstance(state, RuleState):
            raise TypeError(f"{self.owner}: state must be what this tx's init or update gave, got {type(state).__name__}")
        found, wanted = {*state.slots, *state.counters}, {*self.names, *self.first_counters()}
        if found != wanted:
            has, keeps = quote(found) or "nothing", quote(wanted) or "nothing"
            raise ValueError(f"{self.owner}: state has {has}, but this tx keeps {keeps}; tx.init(params) makes a new one")
        return state

    def read_state(self, state: Any, tree: Any, entries: list[LeafEntry]) -> list[dict[str, Any]]:
        """Return what is kept of each leaf, by name; refuse a state that does not fit."""
        self.check_state(state)
        what = f"{self.owner}: the state was made for other parameters, tx.init(params) makes a new one; its arrays have"
        factors = flatten_like(tree, state.factors, what) if jax.tree.leaves(state.factors) else [{}] * tree.num_leaves
        kept = [dict(each) for each in factors]
        for name, slots in state.slots.items():
            for arrays, array in zip(kept, flatten_like(tree, slots, what), strict=True):
                if not isinstance(array, optax.MaskedNode):
                    arrays[name] = array
        for entry, arrays in zip(entries, kept, strict=True):
            for name in dict.fromkeys([*entry.arrays, *arrays]):
                has = np.shape(arrays[name]) if name in arrays else "missing"
                needs = entry.arrays[name][0] if name in entry.arrays else "none such"
                if has != needs:
                    raise ValueError(
                        f"{entry.member.kind.title}: the state {name!r} of {entry.name!r} has shape {has}, needed is {needs}; "
                        "it was made for other parameters or by another transformation: tx.init(params) makes a new one"
                    )
        return kept

    def build_state(self, tree: Any, kept: list[dict[str, Any]], count: Any, counters: dict[str, Any]) -> RuleState:
        """Return the state that keeps these arrays of each leaf."""
        slots = {name: tree.unflatten(each.get(name, optax.MaskedNode()) for each in kept) for name in self.names}
        factors = [{name: array for name, array in each.items() if name not in self.names} for each in kept]
        return RuleState(count, slots, tree.unflatten(factors) if self.has_factors else (), counters)

    # ---- optax's pair ----------------------------------------------------------------------------------------------------
    def init(self, params: Tree) -> RuleState:
        if (found := _watched.get()) is not None:
            found.append((self, params))
        leaves, tree, entries = self.lay_out(params)
        kept = [init_arrays(entry, leaf) for entry, leaf in zip(entries, leaves, strict=True)]
        counters = {name: jnp.asarray(value, float) for name, value in self.first_counters().items()}
        return self.build_state(tree, kept, jnp.zeros((), jnp.int32), counters)

    def update(self, grads: Tree, state: RuleState, params: Tree = None, **extra: Any) -> tuple[Tree, RuleState]:
        if params is None:
            raise ValueError(NO_PARAMS.format(self.owner))
        ps, tree, entries = self.lay_out(params)
        gs = self._flatten_gradients(grads, tree, entries)
        kept, t = self.read_state(state, tree, entries), state.count + 1
        groups = group_leaves(entries, ps)
        programs: list[tuple[Spec, Program, list[str]]] = []
        steps: list[tuple[int, Any]] = []
        for group in groups:
            first, dtype = entries[group[0]], arithmetic(ps[group[0]])
            spec, numbers = self._numbers([entries[i] for i in group], state, dtype)
            leaves = [(entries[i], {"p": ps[i], "g": gs[i]} | decode_slots(entries[i], kept[i])) for i in group]
            if not spec.matrix:
                programs.append((spec, trace(spec, first.slots, "change", numbers), [first.name]))
                check_together(programs)
            step = _matrix_step if spec.matrix else _program_step
            steps.append((id(first.member), step(spec, leaves, dtype, numbers, t)))
        updates, counters = [jnp.zeros_like(p) for p in ps], dict(state.counters)
        for group, x in zip(groups, resolve_all(steps), strict=True):
            for i, new in zip(group, split_by_leaf(x, [entries[i] for i in group]), strict=True):
                updates[i] = to_update(ps[i], new.pop("change"), entries[i], t)
                kept[i] = encode_slots(entries[i], new, t)
            for name, (short, old) in self._counters_of(entries[group[0]].member, counters).items():
                counters[name] = 0 * old + x.get(short, old)  # a constant would be a copy
        return tree.unflatten(updates), recast_state(state, self.build_state(tree, kept, t, counters), tree)

    def _flatten_gradients(self, grads: Tree, tree: Any, entries: list[LeafEntry]) -> list[Any]:
        """Return the gradient of each leaf as an array; refuse one of another shape."""
        found = []
        for entry, given in zip(entries, flatten_like(tree, grads, f"{self.owner}: the gradients have"), strict=True):
            g = to_array(self.owner, f"the gradient of {entry.name!r}", given)
            if tuple(g.shape) != entry.shape:
                raise ValueError(
                    f"{self.owner}: the gradient of {entry.name!r} has shape {tuple(g.shape)}, its parameter {entry.shape}"
                )
            found.append(g)
        return found

    def _counters_of(self, member: ScheduledRule, counters: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        """Return the counters of one rule: by their name in the state, the rule's own name and the value."""
        prefix = self.counters(member)
        return {name: (name.removeprefix(prefix), value) for name, value in counters.items() if name.startswith(prefix)}

    def _numbers(self, entries: list[LeafEntry], state: RuleState, dtype: Any) -> tuple[Spec, dict[str, Any]]:
        """Return the spec that steps these leaves and the numbers of the step, one for each tensor where only some decay."""
        member = entries[0].member
        counters = {short: value.astype(dtype) for short, value in self._counters_of(member, state.counters).values()}
        by_decay = {}
        for decays in dict.fromkeys(entry.decays for entry in entries):
            spec = member.spec(state.count, dtype, **({} if decays else member.undecayed))
            by_decay[decays] = (counters if spec.matrix else {}) | numbers_of(spec, state.count + 1, counters, dtype)
        if len(by_decay) == 1:
            return spec, by_decay[entries[0].decays]
        if "decay" in member.undecayed:
            raise spec.refuse("it sums over all leaves, and decay='hyperball' cannot be masked in some; leave mask out")
        decaying, other = by_decay[True], by_decay[False]
        column = jnp.asarray([entry.decays for entry in entries for _ in entry.names])
        return spec, {
            name: value if value is other[name] else jnp.where(column, value, other[name]) for name, value in decaying.items()
        }


def group_leaves(entries: list[LeafEntry], leaves: list[Any]) -> list[list[int]]:
    """Return which leaves are stepped together: those of one rule, arithmetic and set of slots that decay or do not, and for most
    matrix rules of one shape. What is reduced over all leaves takes both kinds. Empty leaves are left out."""
    groups: dict[Any, list[int]] = {}
    mixed = not all(entry.decays for entry in entries)
    for i, (entry, leaf) in enumerate(zip(entries, leaves, strict=True)):
        if leaf.size:
            decays = entry.decays or (mixed and reduces_over_all(entry))
            by_shape = entry.member.kind.matrix and not entry.member.steady.mixed_shapes()
            key = (id(entry.member), decays, tuple(entry.slots), str(arithmetic(leaf)), entry.inner if by_shape else None)
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def recast(given: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """New values by name in the kind of mapping that the old ones came in: transformations around ours (MultiSteps, `skip_above`)
    compare the two, and flax.nnx hands a state back with mappings of its own for dicts."""
    if type(given) is dict:
        return new
    tree: Any = jax.tree.structure(given, is_leaf=lambda each: each is not given)
    names = {place: name for name, place in tree.unflatten(range(tree.num_leaves)).items()}
    return tree.unflatten(new[names[place]] for place in range(tree.num_leaves))


def recast_state(given: RuleState, new: RuleState, tree: Any) -> RuleState:
    """Return a new state in the mappings of the old one."""
    factors = given.factors
    if jax.tree.leaves(factors):
        factors = tree.unflatten(map(recast, tree.flatten_up_to(factors), tree.flatten_up_to(new.factors)))
    return RuleState(new.count, recast(given.slots, new.slots), factors, recast(given.counters, new.counters))


def flatten_like(tree: Any, value: Tree, what: str) -> list[Any]:
    """Return what a tree has for each leaf of the parameters. what: the message's beginning where it has another structure."""
    try:
        leaves: list[Any] = tree.flatten_up_to(value)
    except ValueError as problem:
        raise ValueError(f"{what} another tree than the parameters: {problem}") from None
    return leaves


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
        pairs = zip(leaves, flatten_like(tree, lead, "averaged: the state has"), strict=True)
        leaves = [p if isinstance(more, optax.MaskedNode) else (p + more).astype(p.dtype) for p, more in pairs]
    return tree.unflatten(leaves)


# ---- leaves to what a rule takes, and back ---------------------------------------------------------------------------------
Leaf = tuple[LeafEntry, dict[str, Any]]  # p, g and the slots by name


def _program_step(spec: Spec, leaves: list[Leaf], dtype: Any, numbers: dict[str, Any], t: Any) -> Values:
    """Lists with an array per tensor; the tensors of a stacked leaf one by one, as some rules measure each."""
    slots = leaves[0][0].slots
    program = trace(spec, slots, "change", numbers)
    program.check(type(spec).__name__, [entry.name for entry, _ in leaves], [entry.inner for entry, _ in leaves])
    arrays: dict[str, list[Any]] = {name: [] for name in ("p", "g", *slots)}
    shapes: list[Shape] = []
    for entry, given in leaves:
        shapes += [entry.inner] * len(entry.names)
        for name, tensors in arrays.items():
            shape = entry.slots[name].shape if name in entry.slots else entry.inner
            array = given[name].astype(dtype)
            tensors.extend(list(array.reshape(-1, *shape)) if entry.axes else [array])
    E = engine_in(dtype)
    found = E.run_program(program, shapes, arrays, numbers)
    ends = {name: arrays[name] for name in slots} | E.collect_buffers(program, found, len(shapes))
    return Values(ends, **numbers, change=found[program.given["change"]])


def _matrix_step(spec: Spec, leaves: list[Leaf], dtype: Any, numbers: dict[str, Any], t: Any) -> Any:
    """Arrays whose first axis counts tensors, all of a shape at once, so that a program has its text once for each shape. For a
    rule that takes unequal shapes, the tensors themselves."""
    every: list[dict[str, Any]] = []
    for entry, arrays in leaves:
        every.append({name: arrays[name].astype(dtype).reshape(-1, *entry.inner) for name in ("p", "g")})
        every[-1] |= {name: arrays[name].reshape(-1, *slot.shape) for name, slot in entry.slots.items()}
    E = engine_in(dtype, free=precision() is None)
    if len(every) == 1:
        out = every[0]
    elif spec.mixed_shapes():
        out = {name: MixedShapes(t for each in every for t in each[name]) for name in every[0]}
    else:
        factors = {name: slot for name, slot in leaves[0][0].slots.items() if spec.unstacked_factors and slot.factor}
        piled = {name for name, slot in factors.items() if math.prod(slot.shape) >= PILED}
        out = {name: (LeafStack if name in piled else jnp.concatenate)([each[name] for each in every]) for name in every[0]}
    x = Values(out, names=[name for entry, _ in leaves for name in entry.names], **numbers, t=t, seed=spec.values().get("seed"))

    def committed(x: Values) -> Any:
        return spec.commit(E, spec.mask(E, x))

    # SOAP's bases and KronPSGD's factors need float32 products, and accelerators take fewer bits unless told. Muon needs no more.
    with jax.default_matmul_precision("highest" if spec.step_dependent and precision() is None else precision()):
        x = spec.update(E, x)
    return x.followed(committed) if isinstance(x, Deferred) else committed(x)


def to_update(p: Any, change: Any, entry: LeafEntry, t: Any) -> Any:
    """What is to be added to a leaf, in its own type, for a change that is to be taken from it. Stochastic rounding is done here:
    p plus this is the number that it came to, as long as their difference can be said in that type."""
    kind = str(p.dtype)
    if entry.member.steady.rounding == NEAREST or kind not in LARGEST:
        return -change.astype(p.dtype)
    wide, key = p.astype(jnp.float32), key_of(entry.member.steady.values().get("seed"), entry.name)
    return (rounded(engine_in(jnp.float32), wide - change, kind, t, key) - wide).astype(p.dtype)


def reduces_over_all(entry: LeafEntry) -> bool:
    """Whether what steps this leaf must see all others with it."""
    spec = entry.member.steady
    numbers = spec.numbers(1, spec.counters())
    return not spec.matrix and trace(spec, entry.slots, "change", numbers).reduction_over_all is not None


def split_by_leaf(x: Values, entries: list[LeafEntry]) -> Iterator[dict[str, Any]]:
    """Yield the change of p and the slots of each leaf, in the shapes that they came with."""
    first = 0
    for entry in entries:
        shapes = {"change": entry.inner} | {name: slot.shape for name, slot in entry.slots.items()}
        last = first + len(entry.names)
        yield {name: stack_tensors(x[name], first, last).reshape((*entry.stack, *shape)) for name, shape in shapes.items()}
        first = last


def stack_tensors(value: Any, first: int, last: int) -> Any:
    if not isinstance(value, list):
        return value[first:last]
    return value[first] if last - first == 1 else jnp.stack(value[first:last])


def find_transform(tx: Any) -> Transform | None:
    """Return what is behind a transformation of ours."""
    owner = getattr(getattr(tx, "init", None), "__self__", None)
    return owner if isinstance(owner, Transform) else None


def transformation(transform: Transform, update: Callable[..., Any] | None = None) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(transform.init, update or transform.update)
