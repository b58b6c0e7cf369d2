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

from ..spec import Shape, Slot, Spec

ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, numbers.Number)  # what a leaf may be


@dataclasses.dataclass(frozen=True)
class ScheduledRule:
    """One rule of a transformation, with values that may be schedules (of the step count) or traced numbers."""

    kind: type[Spec]
    values: Mapping[str, Any]

    @property
    def rule(self) -> str:
        return self.kind.name

    def spec(self, count: Any, dtype: Any = None, **changes: Any) -> Spec:
        now = {
            k: v(count) if callable(v) and not self.kind.fields[k].callable else v for k, v in {**self.values, **changes}.items()
        }
        return unchecked(self.kind, now if dtype is None else {k: converted(v, dtype) for k, v in now.items()})

    @property
    def undecayed(self) -> dict[str, Any]:
        """What is otherwise for a leaf that does not decay: what would keep its norm does not either."""
        return {"weight_decay": 0.0, **({"decay": "decoupled"} if self.values.get("decay") == "hyperball" else {})}

    @functools.cached_property
    def steady(self) -> Spec:
        """For shapes and structure, which no schedule changes."""
        return self.spec(jnp.zeros((), jnp.int32))


def is_static(kind: type[Spec], name: str) -> bool:
    """Whether a field cannot be traced: it shapes the state, or it is an integer, unless the rule's file says how it is given."""
    field = kind.fields[name]
    return field.fixed or (field.annotation == "int" and name not in kind.optax.defaults)


def is_traced(value: Any) -> bool:
    return isinstance(value, (jax.Array, jax.core.Tracer)) or (isinstance(value, tuple) and any(map(is_traced, value)))


def converted(value: Any, dtype: Any) -> Any:
    """Traced reals in the arithmetic of a bundle, so that a float64 learning rate does not widen float32 state."""
    if isinstance(value, tuple):
        return tuple(converted(each, dtype) for each in value)
    return value.astype(dtype) if is_traced(value) and jnp.issubdtype(value.dtype, jnp.floating) else value


def unchecked(kind: type[Spec], values: Mapping[str, Any]) -> Spec:
    """A spec in which traced numbers stand as they are; plain ones are checked as always."""
    spec = object.__new__(kind)
    for name, field in kind.fields.items():
        value = values.get(name, field.default)
        if is_traced(value) and is_static(kind, name):
            raise TypeError(f"{kind.title}: {name} cannot be traced; with inject_hyperparams, name it in static_args")
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

    @property
    def slots(self) -> dict[str, Slot]:
        return self.member.steady.stored_slots(self.inner)


def admitted(owner: str, what: str, leaf: Any) -> Any:
    """A leaf as an array: numbers and NumPy arrays as JAX takes them. Arithmetic here is real, so complex ones are refused."""
    if not isinstance(leaf, ARRAYS) and not hasattr(leaf, "__jax_array__"):
        raise TypeError(f"{owner}: {what} is {leaf!r:.80}, which is neither an array nor a number")
    array = leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{owner}: {what} is {array.dtype}, which cannot be stepped; optimize the real and imaginary parts as two leaves"
        )
    return array


def stepped(owner: str, name: str, leaf: Any) -> Any:
    """A parameter as an array. Integers and booleans are refused: optax's own rules give them real updates, which `apply_updates`
    then cuts, so that 5 becomes 4 by whatever small step."""
    array = admitted(owner, repr(name), leaf)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{owner}: {name!r} is {array.dtype}, which no step can move by less than 1; make it floating, keep it out of the "
            "parameters, or leave it to optax.set_to_zero() by optax.partition"
        )
    return array


def named_leaves(params: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree, each with its path as "layers.0.kernel": the same before and after flax.nnx takes them out of its
    variables, as it does for `update` but not for `init`."""
    for path, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)[0]:
        for inside, leaf in jax.tree_util.tree_flatten_with_path(node)[0]:
            yield path_name(path + inside[is_variable(node) :]), leaf


def is_variable(node: Any) -> bool:
    """Whether it is a variable of flax.nnx, known by its word for what it has beside a value."""
    return hasattr(type(node), "get_metadata")


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's path as "layers.0.kernel"."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
