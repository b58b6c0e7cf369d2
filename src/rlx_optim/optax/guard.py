"""`skip_above` around a transformation: pure, its windows are state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..guard import WINDOW, checked, judged


class SkipState(NamedTuple):
    """inner: the transformation's own. norm, loss: the window of each and how many values it has seen. skipped: steps."""

    inner: Any
    norm: tuple[jax.Array, jax.Array]
    loss: tuple[jax.Array, jax.Array]
    skipped: jax.Array


def skip_above(inner: optax.GradientTransformation, sigmas: float = 6.0) -> optax.GradientTransformationExtraArgs:
    """Leave out steps whose global gradient norm (and loss, given as update(…, loss=…)) is so many deviations above the mean
    of the last 128: updates are zero, and the state of the transformation stays what it was."""
    inner = optax.with_extra_args_support(inner)
    limit = checked("skip_above", sigmas)
    if limit is None:
        raise ValueError("skip_above: sigmas must be a number of standard deviations, got None")

    def fresh() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(WINDOW), jnp.zeros((), jnp.int32)

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), fresh(), fresh(), jnp.zeros((), jnp.int32))

    def update(grads: Any, state: SkipState, params: Any = None, *, loss: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        places, bad = jnp.arange(WINDOW), jnp.zeros((), bool)
        after: dict[str, Any] = {}
        for what, value in (("norm", optax.global_norm(grads)), ("loss", loss)):
            if value is not None:
                window, count = getattr(state, what)
                verdict, window, count = judged(jnp, places, window, count, jnp.asarray(value, float), limit)
                bad, after[what] = bad | verdict, (window, count)
        updates, inside = inner.update(grads, state.inner, params, **extra)

        def unless(new: Any, old: Any) -> Any:
            return jnp.where(bad, old, new)

        updates = jax.tree.map(lambda u: unless(u, jnp.zeros_like(u)), updates)
        return updates, state._replace(inner=jax.tree.map(unless, inside, state.inner), skipped=state.skipped + bad, **after)

    return optax.GradientTransformationExtraArgs(init, update)
