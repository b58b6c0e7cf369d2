"""Estimates of curvature inside a traced update: Hutchinson's u ⊙ Hu of the objective, every few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import random
from ..engines.jax_ import engine_in
from ..program import trace
from ..spec import integer
from .leaves import is_traced
from .transform import NO_PARAMS, RuleState, Transform, arithmetic, decoded, encoded, parts_of, recast

INTERVAL, SEED = integer(10, 1), integer(0, 0)


def with_estimates(transform: Transform, interval: Any, seed: Any) -> Callable[..., Any]:
    """The update with an `obj_fn=` (a function of the parameters) that is differentiated twice on every interval-th step."""
    owner, counted = transform.owner, f"{transform.own.rule}.estimates"  # as the other front ends count them
    seed = SEED.validated(owner, "seed", 0 if seed is None else seed)
    interval = interval if is_traced(interval) else INTERVAL.validated(owner, "update_interval", interval)

    def update(
        grads: Any, state: RuleState, params: Any = None, *, obj_fn: Callable[[Any], Any] | None = None, **extra: Any
    ) -> Any:
        if obj_fn is None:
            raise ValueError(
                f"{transform.own.rule}: update needs obj_fn=, a function of the parameters, to estimate the Hessian's diagonal"
            )
        if params is None:
            raise ValueError(NO_PARAMS.format(owner))
        due = state.count % interval == 0
        mine = {name: each for name, each in state.slots.items() if name in parts_of(transform.own, ["h"])}
        mine = engine_in(jnp.float32).cond(
            due, lambda kept: observed(transform, state, params, obj_fn, kept, seed), lambda kept: kept, mine
        )
        counters = {**state.counters, counted: state.counters[counted] + due}
        slots, counters = recast(state.slots, {**state.slots, **mine}), recast(state.counters, counters)
        return transform.update(grads, state._replace(slots=slots, counters=counters), params, **extra)

    return update


def observed(transform: Transform, state: RuleState, params: Any, obj_fn: Callable[[Any], Any], kept: Any, seed: int) -> Any:
    """What h is kept in, with this step's estimate averaged in."""
    leaves, tree, places = transform.laid_out(params)
    signs = [random_signs(seed, i, state.count, leaf) for i, leaf in enumerate(leaves)]
    product = jax.jvp(jax.grad(obj_fn), (tree.unflatten(leaves),), (tree.unflatten(signs),))[1]
    member = transform.own
    spec: Any = member.spec(state.count)
    numbers = spec.scalars(state.count + 1, {})
    out = {name: tree.flatten_up_to(each) for name, each in kept.items()}
    for i, (place, u, hu) in enumerate(zip(places, signs, jax.tree.leaves(product), strict=True)):
        old = decoded(place, {name: each[i] for name, each in out.items()}, ["h"])["h"]
        dtype = arithmetic(old)
        program = trace(spec, spec.slots(old.shape), "observe", numbers)
        arrays = {"h": [old], "g": [u.astype(dtype) * hu.astype(dtype)]}
        new = engine_in(dtype).executed(program, [old.shape], arrays, numbers)[program.buffers["h"]][0]
        for name, array in encoded(place, {"h": new}, state.count + 1).items():
            out[name][i] = array
    return {name: tree.unflatten(each) for name, each in out.items()}


def random_signs(seed: int, place: int, count: Any, leaf: Any) -> Any:
    """±1, keyed by (seed, leaf, count): the same on every device and after every resume."""
    engine = engine_in(jnp.float32)
    key0, key1 = map(engine.word, random.key(seed, f"hessian {place}"))
    words, _ = random.threefry(key0, key1, engine.counter(leaf.size), engine.word(count), engine.word(random.MASK))
    return ((words & 1).astype(jnp.float32) * 2 - 1).astype(leaf.dtype).reshape(leaf.shape)
