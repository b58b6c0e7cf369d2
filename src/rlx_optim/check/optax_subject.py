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


class OptaxSubject(Subject):
    kind = "optax"

    def __init__(self, target: str, made: Any, settings: Mapping[str, Any]):
        super().__init__(target, made, settings)
        self._made: dict[str, tuple[Any, Any]] = {}
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

    def renew(self) -> None:
        self._made.clear()

    def stepping(self, **settings: Any) -> tuple[Any, Any]:
        """A transformation and its compiled step, kept: most walks are under the same settings."""
        key = repr(sorted(settings.items()))
        if key not in self._made:
            tx = self.make(**settings)
            self._made[key] = tx, jax.jit(lambda g, state, p: self.update(tx, g, state, p), compiler_options=FAST)
        return self._made[key]

    def walk(self, start: Arrays, gradient: Gradient, steps: int, **settings: Any) -> Arrays:
        keys = {name: f"p{i}_{name}" for i, name in enumerate(start)}  # JAX sorts by name
        params: Tree = {keys[name]: jnp.asarray(p) for name, p in start.items()}
        tx, step = self.stepping(**settings)
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

    def run(self, tx: Any, params: Tree, state: Tree, begin: int, end: int) -> tuple[Tree, Tree]:
        step = jax.jit(lambda g, state, p: self.update(tx, g, state, p), compiler_options=FAST)
        for t in range(begin, end):
            params, state = step(self.grads(t), state, params)
        return params, state

    @functools.cached_property
    def plain(self) -> Tree:
        """Parameters after six steps, each compiled by itself."""
        params, (tx, step) = self.start(), self.stepping()
        state = tx.init(params)
        for t in range(6):
            params, state = step(self.grads(t), state, params)
        return params

    def close(self, got: Tree, want: Tree, what: str) -> float:
        return self.near(arrays(got), arrays(want), arrays(self.start()), what)

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
