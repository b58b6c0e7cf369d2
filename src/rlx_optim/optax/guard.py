"""`skip_above` around a transformation: pure, its windows are state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..guard import WINDOW, check_sigmas, judge
from .leaves import ARRAYS


class SkipState(NamedTuple):
    """inner: the transformation's own. norm, loss: the window of each and how many values it has seen. skipped: steps."""

    inner: Any
    norm: tuple[jax.Array, jax.Array]
    loss: tuple[jax.Array, jax.Array]
    skipped: jax.Array


def global_norm(grads: Any) -> jax.Array:
    """The 2-norm over all leaves, in float32 at least."""
    squares = [jnp.sum(jnp.square(jnp.abs(jnp.asarray(g)).astype(float))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.asarray(sum(squares), float))


def skip_above(inner: optax.GradientTransformation, sigmas: float = 6.0) -> optax.GradientTransformationExtraArgs:
    """Leave out steps whose global gradient norm (and loss, given as update(…, loss=…)) is so many deviations above the mean
    of the last 128: updates are zero, and the state of the transformation stays what it was."""
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(f"skip_above: inner must be a transformation, as rlx_optim.optax.adamw(1e-3) is, got {inner!r:.80}")
    inner = optax.with_extra_args_support(inner)
    limit = check_sigmas("skip_above", sigmas)
    if limit is None:
        raise ValueError("skip_above: sigmas must be a number of standard deviations, got None")

    def fresh() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(WINDOW), jnp.zeros((), jnp.int32)

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), fresh(), fresh(), jnp.zeros((), jnp.int32))

    def update(grads: Any, state: SkipState, params: Any = None, *, loss: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        if loss is not None and (not isinstance(loss, ARRAYS) or jnp.asarray(loss).ndim):
            raise TypeError(f"skip_above: loss must be a number, got {loss!r:.80}")
        bad = jnp.zeros((), bool)
        after: dict[str, Any] = {}
        for what, value in (("norm", global_norm(grads)), ("loss", loss)):
            if value is not None:
                window, count = getattr(state, what)
                verdict, *seen = judge(jnp, jnp.arange(WINDOW), window, count, jnp.asarray(value, float), limit)
                bad, after[what] = bad | verdict, tuple(seen)
        updates, inside = inner.update(grads, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(bad, jnp.zeros_like(u), u), updates)
        inside = jax.tree.map(lambda new, old: jnp.where(bad, old, new), inside, state.inner)
        return updates, state._replace(inner=inside, skipped=state.skipped + bad, **after)

    return optax.GradientTransformationExtraArgs(init, update)
