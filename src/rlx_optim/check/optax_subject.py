"""An optax factory, made and stepped; imported where JAX and optax are."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .subject import Arrays, Gradient, OptimizerSubject, draw, replay
from .table import Wrong

Tree = Any
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiled soon, and run a few times
MANY = 50  # steps that are worth a compilation


class OptaxSubject(OptimizerSubject):
    kind = "optax"

    def make(self, **settings: Any) -> Any:
        tx = self.factory(**{**self.settings, **settings})
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(f"it gives no transformation but {tx!r}")
        return tx

    @functools.cached_property
    def extra(self) -> bool:
        """Whether update wants a function of the parameters, as Sophia's estimates do."""
        return "obj_fn" in inspect.signature(self.make().update).parameters or "sophia" in self.target.lower()

    def update(self, tx: Any, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """(parameters, state) after one step."""
        more = {"obj_fn": lambda p: sum(((x**4).sum() for x in jax.tree.leaves(p)), jnp.zeros(()))} if self.extra else {}
        updates, state = tx.update(grads, state, params, **more)
        return optax.apply_updates(params, updates), state

    def eager(self, tx: Any, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The same, operation by operation: JAX compiles an operation once for all steps and settings, a step for each anew."""
        with jax.disable_jit():
            return self.update(tx, grads, state, params)

    def compile_step(self, tx: Any) -> Any:
        return jax.jit(lambda g, state, p: self.update(tx, g, state, p), compiler_options=FAST)

    def walk(
        self, start: Arrays, gradient: Gradient, steps: int, in_dtype: str = "float32", zeroed_at: int = -1, **settings: Any
    ) -> Arrays:
        keys = {name: f"p{i}_{name}" for i, name in enumerate(start)}  # JAX sorts by name
        with jax.enable_x64(True) if in_dtype == "float64" else contextlib.nullcontext():
            params: Tree = {keys[name]: jnp.asarray(p, in_dtype) for name, p in start.items()}
            tx = self.make(**settings)
            step = self.compile_step(tx) if steps > MANY else functools.partial(self.eager, tx)
            state = tx.init(params)
            for t in range(steps):
                params = jax.tree.map(jnp.zeros_like, params) if t == zeroed_at else params
                found = gradient(t, {name: np.asarray(params[key]) for name, key in keys.items()})
                params, state = step({key: jnp.asarray(found[name], in_dtype) for name, key in keys.items()}, state, params)
        if other := next((p.dtype for p in params.values() if p.dtype != in_dtype), None):
            raise Wrong(f"{in_dtype} parameters became {other}", str(other))
        return {name: np.asarray(params[key], "float64" if in_dtype == "float64" else "float32") for name, key in keys.items()}

    # ---- trees -------------------------------------------------------------------------------------------------------------
    def make_params(self, dtype: Any = jnp.float32) -> Tree:
        return {name: jnp.asarray(p, dtype) for name, p in draw(self.shapes).items()}

    def make_grads(self, t: int, dtype: Any = jnp.float32) -> Tree:
        return {name: jnp.asarray(g, dtype) for name, g in replay(self.shapes)(t, {}).items()}

    def run(self, tx: Any, params: Tree, state: Tree, begin: int, end: int, grads: Any = None) -> tuple[Tree, Tree]:
        """Steps that could be compiled, which tracing says, and are not."""
        given = grads or self.make_grads
        jax.eval_shape(lambda g, state, p: self.update(tx, g, state, p), given(begin), state, params)
        for t in range(begin, end):
            params, state = self.eager(tx, given(t), state, params)
        return params, state

    def run_steps(self, tx: Any, steps: int = 6, grads: Any = None) -> Tree:
        """Return parameters after some steps from the start."""
        params = self.make_params()
        return self.run(tx, params, tx.init(params), 0, steps, grads)[0]

    @functools.cached_property
    def plain(self) -> Tree:
        """Parameters after six steps."""
        return self.run_steps(self.make())

    @functools.cached_property
    def jitted(self) -> tuple[Tree, int]:
        """The same compiled, and how often a step was traced."""
        tx, params, traces = self.make(), self.make_params(), []
        state = tx.init(params)

        def step(g: Tree, state: Tree, p: Tree) -> tuple[Tree, Tree]:
            traces.append(1)
            return self.update(tx, g, state, p)

        fast = jax.jit(step, compiler_options=FAST)
        for t in range(6):
            params, state = fast(self.make_grads(t), state, params)
        return params, len(traces)

    def expect_close(self, got: Tree, want: Tree, what: str, bar: float = 0.0) -> float:
        return self.expect_near(to_arrays(got), to_arrays(want), to_arrays(self.make_params()), what, max(self.bar, bar))


def to_arrays(tree: Tree) -> Arrays:
    return {str(i): np.asarray(x, np.float32) for i, x in enumerate(jax.tree.leaves(tree))}


def expect_bitwise(got: Tree, want: Tree, what: str) -> float:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True):
            raise Wrong(what, float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()))
    return 0.0
