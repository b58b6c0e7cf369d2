"""Our part inside a transformation of optax: chain, inject_hyperparams, MultiSteps, masked and whatever else calls its init."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .factories import build_by_name, put_over, to_keywords
from .leaves import ScheduledRule
from .transform import RuleState, Transform, find_transform, watch_inits

Tree = Any
TAKES = "tx must be made by rlx_optim.optax, as adamw(1e-3) is, or hold one such part, as optax.chain(clip, adamw(1e-3)) does"


@dataclasses.dataclass(frozen=True)
class NestedTransform:
    """What is ours, the parameters that it sees, and a fresh state of all that is around it (None where nothing is)."""

    transform: Transform
    params: Tree
    whole: Any

    def state_in(self, state: Any) -> RuleState:
        """Our part of a state of tx."""
        owner = self.transform.owner
        found = [state] if self.whole is None else nodes(state, is_ours)
        if len(found) != 1:
            raise TypeError(f"{owner}: state must be what this tx's init or update gave, got {type(state).__name__}")
        for each in nodes(state, lambda node: hasattr(node, "mini_step")):
            if gathered := int(each.mini_step):
                raise ValueError(
                    f"{owner}: MultiSteps has gathered {gathered} gradients that would be lost; save when mini_step is 0"
                )
        return self.transform.check_state(found[0])

    def put_into(self, ours: RuleState, settings: Mapping[str, Any]) -> Any:
        """A state of tx with our part in it. Counts go on with ours, injected settings are the file's; what else there is begins
        anew, and a warning says so."""
        if self.whole is None:
            return ours
        fresh, saved = [], {f".hyperparams['{keyword}']": value for keyword, (_, value) in self._injected(settings).items()}

        def find_value(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path)
            if is_ours(leaf):
                return ours
            if name.endswith((".count", ".gradient_step")):
                return jnp.array(ours.count, leaf.dtype)  # a copy: each may be donated
            if values := [value for keyword, value in saved.items() if name.endswith(keyword)]:
                return jnp.asarray(values[0], leaf.dtype)
            if not any(kept in name for kept in (".mini_step", ".acc_grads", ".hyperparams")):
                fresh.append(name)
            return leaf

        restored = jax.tree_util.tree_map_with_path(find_value, self.whole, is_leaf=is_ours)
        if fresh:
            names = ", ".join(f"state{name}" for name in fresh[:5]) + (f" and {len(fresh) - 5} more" if len(fresh) > 5 else "")
            begin = "begin" if len(fresh) > 1 else "begins"
            warnings.warn(f"{self.transform.owner}: the file has the part of rlx_optim alone; {names} {begin} anew", stacklevel=3)
        return restored

    def member(self, member: ScheduledRule, state: Any) -> ScheduledRule:
        """A member with the settings in force: those that are injected stand in the state."""
        given = hyperparams(state)
        if member is not self.transform.own or not given:
            return member
        return dataclasses.replace(member, values=put_over(member.kind, member.values, given))

    def injected(self) -> set[str]:
        """The settings of our rule that are state of inject_hyperparams."""
        return {field for field, _ in self._injected(self.transform.own.values).values()}

    def _injected(self, settings: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        given = hyperparams(self.whole)
        return {k: each for k, each in to_keywords(self.transform.own.kind, settings).items() if k in given} if given else {}


def hyperparams(state: Any) -> Mapping[str, Any]:
    """What inject_hyperparams keeps for a factory of ours."""
    found = nodes(state, lambda node: is_ours(getattr(node, "inner_state", None)) and hasattr(node, "hyperparams"))
    return found[0].hyperparams if found else {}


def is_ours(node: Any) -> bool:
    return isinstance(node, RuleState)


def nodes(state: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    return [each for each in jax.tree.leaves(state, is_leaf=wanted) if wanted(each)]


def part_of(tx: Any, params: Tree) -> NestedTransform:
    """Our part of a transformation: found by making a state, since whoever holds it asks it for one."""
    if (transform := find_transform(tx)) is not None:
        return NestedTransform(transform, params, None)
    if not callable(getattr(tx, "init", None)):
        raise TypeError(f"{TAKES}; got {tx!r:.200}")
    with watch_inits() as found:
        whole = tx.init(params)
    if len(found) != 1:
        many = f"has {len(found)} of them; save each with its own tx and state" if found else f"is {tx!r:.200}"
        raise TypeError(f"{TAKES}; this one {many}")
    return NestedTransform(*found[0], whole)


def routing_report(tx: str | optax.GradientTransformation, params: Any, **keywords: Any) -> str:
    """Which parameter goes to which rule, and why, as a table. tx: one of our transformations, or a chain that holds one, or the
    name of a factory, with its keywords: routing_report("muon", params, route={"*head*": "own"})."""
    if isinstance(tx, str):
        return build_by_name(tx, keywords).routing_report(params)
    if keywords:
        given = ", ".join(keywords)
        raise TypeError(f"routing_report: {given} beside a transformation, which has its own; give the name of a factory")
    part = part_of(tx, params)
    return part.transform.routing_report(part.params)
