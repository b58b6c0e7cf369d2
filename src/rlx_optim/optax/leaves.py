"""Which rule takes which leaf of a tree, and with what values: plain numbers, schedules of the step count, traced numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..engines.jax_ import engine_in
from ..spec import Shape, Slot, Spec
from ..storage import COMPONENTS, Quantized, components, decode, encode

ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, numbers.Number)  # what a leaf may be


def arithmetic(leaf: Any) -> Any:
    return jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32


@dataclasses.dataclass(frozen=True)
class ScheduledRule:
    """One rule of a transformation, with values that may be schedules (of the step count) or traced numbers."""

    kind: type[Spec]
    values: Mapping[str, Any]

    def spec(self, count: Any, dtype: Any = None, **changes: Any) -> Spec:
        values = {
            k: v(count) if callable(v) and not self.kind.fields[k].callable else v for k, v in {**self.values, **changes}.items()
        }
        return build_spec(self.kind, values if dtype is None else {k: to_dtype(v, dtype) for k, v in values.items()})

    @property
    def undecayed(self) -> dict[str, Any]:
        """What is otherwise for a leaf that does not decay: what would keep its norm does not either."""
        return {"weight_decay": 0.0, **({"decay": "decoupled"} if self.values.get("decay") == "hyperball" else {})}

    @functools.cached_property
    def steady(self) -> Spec:
        """For shapes and structure, which no schedule changes."""
        return self.spec(jnp.zeros((), jnp.int32))


def is_static(kind: type[Spec], name: str) -> bool:
    """Whether a field cannot be traced: it shapes the state or the program, unless it is an integer of which the rule's file says
    how it is given."""
    field = kind.fields[name]
    return field.fixed or (field.structural and (field.annotation != "int" or name not in kind.optax.defaults))


def is_traced(value: Any) -> bool:
    return isinstance(value, (jax.Array, jax.core.Tracer)) or (isinstance(value, tuple) and any(map(is_traced, value)))


def to_dtype(value: Any, dtype: Any) -> Any:
    """Traced reals in the arithmetic of a bundle, so that a float64 learning rate does not widen float32 state."""
    if isinstance(value, tuple):
        return tuple(to_dtype(each, dtype) for each in value)
    return value.astype(dtype) if is_traced(value) and jnp.issubdtype(value.dtype, jnp.floating) else value


def numbers_of(spec: Spec, t: Any, counters: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """What a spec gives at a traced step, in the arithmetic of a bundle: what NumPy made of plain numbers is float64, which JAX
    would widen a bundle to."""
    found = spec.numbers(t, counters)
    return {name: float(value) if isinstance(value, np.floating) else to_dtype(value, dtype) for name, value in found.items()}


def build_spec(kind: type[Spec], values: Mapping[str, Any]) -> Spec:
    """A spec in which traced numbers stand as they are; plain ones are checked as always."""
    spec = object.__new__(kind)
    for name, field in kind.fields.items():
        value = values.get(name, field.default)
        if is_traced(value) and is_static(kind, name):
            raise TypeError(f"{kind.title}: {name} cannot be traced; with inject_hyperparams, name it in static_args")
        if is_traced(value) and any(map(np.shape, value if isinstance(value, tuple) else (value,))):
            raise TypeError(f"{kind.title}: {name} must be {field.expected}, got {value!r:.80}")
        spec.__dict__[name] = value if is_traced(value) else field.validated(kind.title, name, value)
    traced = any(map(is_traced, spec.__dict__.values()))
    if not traced:
        spec.check()
    spec.check_modifiers(traced)
    spec.check_storage()
    return spec


@dataclasses.dataclass(frozen=True)
class LeafEntry:
    """One leaf: its path as a name, the rule that takes it and why, how many leading axes count tensors, whether it decays."""

    name: str
    member: ScheduledRule
    why: str
    axes: int
    shape: Shape
    decays: bool

    @property
    def inner(self) -> Shape:
        return self.shape[self.axes :]

    @property
    def stack(self) -> Shape:
        return self.shape[: self.axes]

    @property
    def names(self) -> list[str]:
        """One for each tensor of the leaf."""
        return [f"{self.name}[{k}]" for k in range(math.prod(self.stack))] if self.axes else [self.name]

    @functools.cached_property
    def slots(self) -> dict[str, Slot]:
        return self.member.steady.stored_slots(self.inner)

    @functools.cached_property
    def arrays(self) -> dict[str, tuple[Shape, str]]:
        """The arrays that its slots are kept in: their shapes, and types where they are codes."""
        parts = ((name + end, part) for name, slot in self.slots.items() for end, part in components(slot).items())
        return {name: ((*self.stack, *shape), dtype) for name, (shape, dtype) in parts}


def to_array(owner: str, what: str, leaf: Any) -> Any:
    """A leaf as an array: numbers and NumPy arrays as JAX takes them. Arithmetic here is real, so complex ones are refused."""
    if not isinstance(leaf, ARRAYS) and not hasattr(leaf, "__jax_array__"):
        raise TypeError(f"{owner}: {what} is {leaf!r:.80}, which is neither an array nor a number")
    array = leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{owner}: {what} is {array.dtype}, which cannot be stepped; optimize the real and imaginary parts as two leaves"
        )
    return array


def read_leaves(owner: str, params: Any) -> tuple[list[str], list[Any]]:
    """Return the names of the parameters, and each as an array. Integers and booleans are refused: optax's own rules give them
    real updates, which `apply_updates` then cuts, so that 5 becomes 4 by whatever small step."""
    found = [(name, to_array(owner, repr(name), leaf)) for name, leaf in named_leaves(params)]
    for name, array in found:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{owner}: {name!r} is {array.dtype}, which no step can move by less than 1; make it floating, keep it out of "
                "the parameters, or leave it to optax.set_to_zero() by optax.partition"
            )
    return [name for name, _ in found], [array for _, array in found]


def named_leaves(params: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree, each with its path as "layers.0.kernel": the same before and after flax.nnx takes them out of its
    variables, as it does for `update` but not for `init`."""
    for path, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)[0]:
        for inside, leaf in jax.tree_util.tree_flatten_with_path(node)[0]:
            keys = path + inside[is_variable(node) :]
            yield ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys), leaf


def is_variable(node: Any) -> bool:
    """Whether it is a variable of flax.nnx, known by its word for what it has beside a value."""
    return hasattr(type(node), "get_metadata")


# ---- what is kept of a leaf ------------------------------------------------------------------------------------------------
def init_arrays(entry: LeafEntry, leaf: Any) -> dict[str, Any]:
    """Return the arrays of a new leaf, spread over devices as it is. Zeros that are to keep their norm are refused where they can
    be seen: not while `init` is traced."""
    spec = entry.member.steady
    if spec.decay == "hyperball" and entry.decays and not isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        for name, tensor in zip(entry.names, np.asarray(leaf).reshape(len(entry.names), -1), strict=True):
            if tensor.size and not tensor.any():
                raise spec.zero_norm_error(name, "mask=… with False there")
    found = {}
    for name, slot in entry.slots.items():
        for end, (shape, dtype) in components(slot).items():
            shape, value = (*entry.stack, *shape), 0 if dtype else slot.fill
            if slot.eye and not dtype:
                array = jnp.broadcast_to(jnp.eye(slot.shape[0], dtype=arithmetic(leaf)) * value, shape)
            elif is_mirrored(slot, shape, leaf):
                array = jnp.full_like(leaf, value, dtype or arithmetic(leaf))
            else:
                array = jnp.full(shape, value, dtype or arithmetic(leaf))
            found[name + end] = array
    return found


def is_mirrored(slot: Slot, shape: Shape, leaf: Any) -> bool:
    """Whether an array of a slot is spread over devices as the leaf is, but under jit, where nobody knows how that is."""
    return shape == leaf.shape and not slot.factor


def decode_slots(entry: LeafEntry, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those slots of a leaf that are given, decoded where they are kept in fewer bits."""
    E, found = engine_in(jnp.float32), {}
    for name, slot in entry.slots.items():
        parts = [given[name + end] for end in COMPONENTS[slot.storage] if name + end in given]
        if parts:
            found[name] = decode(E, Quantized(slot.storage, *parts)) if slot.storage else parts[0]
    return found


def encode_slots(entry: LeafEntry, values: Mapping[str, Any], t: Any) -> dict[str, Any]:
    """Return what the slots of a leaf are kept in, encoded where that is fewer bits; a tensor of a stack by itself."""
    E = engine_in(jnp.float32)
    out: dict[str, Any] = {}
    for name in values:
        slot, made = entry.slots[name], {"": values[name]}
        if slot.storage:
            code = functools.partial(encode, E, slot.storage, t=t)
            made = jax.vmap(code)(values[name].reshape(-1, *slot.shape)) if entry.axes else code(values[name])
        out |= {name + end: array.reshape(entry.arrays[name + end][0]) for end, array in made.items()}
    return out
