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
from .leaves import arithmetic, decode_slots, encode_slots, is_traced
from .transform import NO_PARAMS, RuleState, Transform, array_names, recast

INTERVAL, SEED = integer(10, 1), integer(0, 0)


def with_estimates(transform: Transform, interval: Any, seed: Any) -> Callable[..., Any]:
    """The update with an `obj_fn=` (a function of the parameters) that is differentiated twice on every interval-th step."""
    owner, counted = transform.owner, f"{transform.own.kind.name}.estimates"  # as the other front ends count them
    seed = SEED.validated(owner, "seed", 0 if seed is None else seed)
    interval = interval if is_traced(interval) else INTERVAL.validated(owner, "update_interval", interval)

    def update(
        grads: Any, state: RuleState, params: Any = None, *, obj_fn: Callable[[Any], Any] | None = None, **extra: Any
    ) -> Any:
        if not callable(obj_fn):
            what = "a function of the parameters that gives a number, to estimate the Hessian's diagonal"
            raise (ValueError if obj_fn is None else TypeError)(f"{owner}: update needs obj_fn=, {what}; got {obj_fn!r:.80}")
        if params is None:
            raise ValueError(NO_PARAMS.format(owner))
        due = transform.check_state(state).count % interval == 0
        curvature = {name: state.slots[name] for name in array_names(transform.own, ["h"])}
        curvature = engine_in(jnp.float32).cond(
            due, lambda kept: observe(transform, state, params, obj_fn, kept, seed), lambda kept: kept, curvature
        )
        counters = {**state.counters, counted: state.counters[counted] + due}
        slots, counters = recast(state.slots, {**state.slots, **curvature}), recast(state.counters, counters)
        return transform.update(grads, state._replace(slots=slots, counters=counters), params, **extra)

    return update


def observe(transform: Transform, state: RuleState, params: Any, obj_fn: Callable[[Any], Any], kept: Any, seed: int) -> Any:
    """Return what h is kept in, with this step's estimate averaged in."""
    leaves, tree, entries = transform.lay_out(params)
    signs = [random_signs(seed, i, state.count, leaf) for i, leaf in enumerate(leaves)]
    product = jax.jvp(jax.grad(obj_fn), (tree.unflatten(leaves),), (tree.unflatten(signs),))[1]
    spec: Any = transform.own.spec(state.count)
    numbers = spec.scalars(state.count + 1, {})
    out = {name: tree.flatten_up_to(each) for name, each in kept.items()}
    for i, (entry, u, hu) in enumerate(zip(entries, signs, jax.tree.leaves(product), strict=True)):
        old = decode_slots(entry, {name: each[i] for name, each in out.items()})["h"]
        dtype = arithmetic(old)
        program = trace(spec, spec.slots(old.shape), "observe", numbers)
        arrays = {"h": [old], "g": [u.astype(dtype) * hu.astype(dtype)]}
        new = engine_in(dtype).run_program(program, [old.shape], arrays, numbers)[program.buffers["h"]][0]
        for name, array in encode_slots(entry, {"h": new}, state.count + 1).items():
            out[name][i] = array
    return {name: tree.unflatten(each) for name, each in out.items()}


def random_signs(seed: int, place: int, count: Any, leaf: Any) -> Any:
    """±1, keyed by (seed, leaf, count): the same on every device and after every resume."""
    engine = engine_in(jnp.float32)
    key0, key1 = map(engine.word, random.key(seed, f"hessian {place}"))
    words, _ = random.threefry(key0, key1, engine.counter(leaf.size), engine.word(count), engine.word(random.MASK))
    return ((words & 1).astype(jnp.float32) * 2 - 1).astype(leaf.dtype).reshape(leaf.shape)
