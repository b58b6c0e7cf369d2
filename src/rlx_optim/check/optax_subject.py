"""An optax factory, made and stepped; imported where JAX and optax are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .subject import SHAPES, Arrays, Gradient, Subject, drawn, replayed
from .table import Wrong

Tree = Any
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiled soon, and run a few times
MANY = 50  # steps that are worth a compilation


class OptaxSubject(Subject):
    kind = "optax"

    def __init__(self, target: str, made: Any, settings: Mapping[str, Any]):
        super().__init__(target, made, settings)
        try:
            with self.undisturbed():
                tx = self.make()
                if not (hasattr(tx, "init") and hasattr(tx, "update")):
                    raise TypeError(f"it gave {tx!r}")
                self.walk(drawn({"w": (4, 3)}), replayed({"w": (4, 3)}), 2)
        except Exception as problem:
            message = (str(problem).strip() or "(no message)").splitlines()[0]
            raise ValueError(f"{target} gives no transformation that steps: {type(problem).__name__}: {message}") from problem

    def make(self, **settings: Any) -> Any:
        return self.made(**{**self.settings, **settings})

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

    def compiled(self, tx: Any) -> Any:
        return jax.jit(lambda g, state, p: self.update(tx, g, state, p), compiler_options=FAST)

    def walk(self, start: Arrays, gradient: Gradient, steps: int, **settings: Any) -> Arrays:
        keys = {name: f"p{i}_{name}" for i, name in enumerate(start)}  # JAX sorts by name
        params: Tree = {keys[name]: jnp.asarray(p) for name, p in start.items()}
        tx = self.make(**settings)
        step = self.compiled(tx) if steps > MANY else functools.partial(self.eager, tx)
        state = tx.init(params)
        for t in range(steps):
            found = gradient(t, {name: np.asarray(params[key]) for name, key in keys.items()})
            params, state = step({key: jnp.asarray(found[name], params[key].dtype) for name, key in keys.items()}, state, params)
        return {name: np.asarray(params[key]) for name, key in keys.items()}

    # ---- trees -------------------------------------------------------------------------------------------------------------
    def start(self, dtype: Any = jnp.float32) -> Tree:
        return {name: jnp.asarray(p, dtype) for name, p in drawn(self.shapes).items()}

    def grads(self, t: int, dtype: Any = jnp.float32) -> Tree:
        return {name: jnp.asarray(g, dtype) for name, g in replayed(self.shapes)(t, {}).items()}

    def run(self, tx: Any, params: Tree, state: Tree, begin: int, end: int, grads: Any = None) -> tuple[Tree, Tree]:
        """Steps that could be compiled, which tracing says, and are not."""
        given = grads or self.grads
        jax.eval_shape(lambda g, state, p: self.update(tx, g, state, p), given(begin), state, params)
        for t in range(begin, end):
            params, state = self.eager(tx, given(t), state, params)
        return params, state

    @functools.cached_property
    def plain(self) -> Tree:
        """Parameters after six steps."""
        tx, params = self.make(), self.start()
        return self.run(tx, params, tx.init(params), 0, 6)[0]

    @functools.cached_property
    def jitted(self) -> tuple[Tree, int]:
        """The same compiled, and how often a step was traced."""
        tx, params, traces = self.make(), self.start(), []
        state = tx.init(params)

        def step(g: Tree, state: Tree, p: Tree) -> tuple[Tree, Tree]:
            traces.append(1)
            return self.update(tx, g, state, p)

        fast = jax.jit(step, compiler_options=FAST)
        for t in range(6):
            params, state = fast(self.grads(t), state, params)
        return params, len(traces)

    def close(self, got: Tree, want: Tree, what: str, bar: float = 0.0) -> float:
        return self.near(arrays(got), arrays(want), arrays(self.start()), what, max(self.bar, bar))

    @property
    def everywhere(self) -> bool:
        return self.shapes is SHAPES


def arrays(tree: Tree) -> Arrays:
    return {str(i): np.asarray(x, np.float32) for i, x in enumerate(jax.tree.leaves(tree))}


def bitwise(got: Tree, want: Tree, what: str) -> float:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True):
            raise Wrong(what, float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()))
    return 0.0
