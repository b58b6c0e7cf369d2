"""What the tests of the JAX front end share."""

import functools
import json
import math
import tempfile

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")


import helpers  # noqa: E402

import rlx_optim  # noqa: E402
from rlx_optim import optax as ours  # noqa: E402

jnp = jax.numpy
FACTORIES = tuple(ours.known())
TITLES = {name: kind.title for name, kind in ours.known().items()}
MATRIX = tuple(name for name, kind in ours.known().items() if kind.matrix)
KINDS = tuple(name for name, kind in ours.known().items() if kind.name in helpers.KINDS)
FEW = {"w": (8, 6), "b": (8,), "s": ()}
#: for tests of what all do
QUICK = {name: {"learning_rate": 0.02} for name in FACTORIES} | {"sgd": {"learning_rate": 0.05, "momentum": 0.9}}
QUICK["lars"] = {"learning_rate": 5.0, "convention": "timm"}  # where the momentum has no rate in it: a rate of 0 moves nothing
QUICK["prodigy"] = {"learning_rate": 0.02, "estim_lr0": 0.1}


# ---- problems -----------------------------------------------------------------------------------------------------------
def problem(shapes=FEW, steps=1, seed=0):
    """Parameters, and the gradients of all steps: a drift and noise, stacked along the first axis."""
    rng = np.random.default_rng(seed)
    params = {k: np.asarray(rng.standard_normal(s), np.float32) for k, s in shapes.items()}
    drift = {k: rng.choice([-0.05, 0.05], s) for k, s in shapes.items()}
    return params, {k: np.asarray(drift[k] + 0.1 * rng.standard_normal((steps, *s)), np.float32) for k, s in shapes.items()}


def curvature(shape):
    """The diagonal of a Hessian: some of it is clipped, some of it not."""
    return np.linspace(0.0, 20.0, math.prod(shape), dtype=np.float32).reshape(shape)


def objective(params):
    """Its Hessian is diagonal, so Hutchinson's estimate of it is exact."""
    return sum(0.5 * jnp.sum(curvature(p.shape).astype(p.dtype) * p * p) for p in jax.tree.leaves(params))


def build(name, **settings):
    """A transformation; Sophia's has its objective."""
    tx = getattr(ours, name)(**settings)
    return objected(tx) if name == "sophia" else tx


def objected(tx):
    return optax.GradientTransformationExtraArgs(tx.init, functools.partial(tx.update, obj_fn=objective))


def asarrays(tree, dtype=None):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def advance(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def rolled(tx, params, grads):
    """Parameters and state after all steps, in one lax.scan."""

    def step(carry, g):
        return advance(tx, *carry, g), None

    return jax.lax.scan(step, (params, tx.init(params)), grads)[0]


def run(tx, params, grads, dtype=None):
    """As `rolled`, compiled, and the parameters as NumPy arrays."""
    after, _ = jax.jit(functools.partial(rolled, tx))(asarrays(params, dtype), asarrays(grads, dtype))
    return {k: np.asarray(v) for k, v in after.items()}


def apart(a, b):
    """The largest difference of two trees, in units of the larger of 1 and the entry."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    gaps = [
        np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)) / np.maximum(1, np.abs(np.asarray(y, np.float64)))
        for x, y in pairs
    ]
    return max(float(gap.max()) for gap in gaps if gap.size)


def rest():
    return rlx_optim.AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.0)


# ---- sharded arrays -----------------------------------------------------------------------------------------------------------
#: of each kind of program: elementwise, measured, rows and columns, of all tensors, matrices
SHARDED = ("sgd", "adamw", "nadamw", "lamb", "adafactor", "prodigy", "sophia", "muon", "normuon", "soap", "kron_psgd")


def sharded():
    """For each of them the gap between four devices and one after five steps, where the parameter is then, and which slots of
    its shape are not spread as it is: of a new state, of one after the steps, of one that was saved and loaded."""
    devices = jax.devices()
    assert len(devices) == 4
    rows = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("rows",)), jax.sharding.PartitionSpec("rows"))
    params, grads = problem({"w": (8, 6), "b": (8,)}, 5)
    out = {}
    for name in SHARDED:
        # no basis that rounding decides
        tx = build(name, **QUICK[name], **({"max_precond_dim": 6, "precondition_frequency": 2} if name == "soap" else {}))
        ends, elsewhere = [], []
        for place in (rows, devices[-1]):
            step = jax.jit(functools.partial(advance, tx))
            now = jax.device_put(asarrays(params), place)
            state = tx.init(now)
            elsewhere.append(aside(state, now))
            for t in range(5):
                now, state = step(now, state, jax.device_put({k: jnp.asarray(g[t]) for k, g in grads.items()}, place))
            loaded = carried_over(tx, state, now)
            elsewhere += [aside(state, now), aside(loaded, now)]
            assert all(map(jnp.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(state)))
            ends.append(
                (
                    {k: np.asarray(v) for k, v in now.items()},
                    len(now["w"].sharding.device_set),
                    now["w"].sharding.is_fully_replicated,
                )
            )
        out[name] = apart(ends[0][0], ends[1][0]), ends[0][1], ends[0][2], elsewhere
    square = jax.device_put({"w": jnp.ones((8, 8))}, rows)
    for name in ("soap", "kron_psgd"):  # factors are no parameters, be they of the same shape
        tx = build(name, **QUICK[name])
        for state in (tx.init(square), carried_over(tx, tx.init(square), square)):
            assert {len(factor.sharding.device_set) for factor in jax.tree.leaves(state.factors)} == {1}, name
    print(json.dumps(out))


def carried_over(tx, state, params):
    """A state that was saved and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        ours.save_state(f"{folder}/a.safetensors", tx, state, params)
        return ours.load_state(f"{folder}/a.safetensors", tx, params)


def aside(state, params):
    """Slots of a parameter's shape that are not where it is."""
    found = [(f"{slot}.{k}", each[k], p) for slot, each in state.slots.items() for k, p in params.items()]
    return [
        name
        for name, a, p in found
        if getattr(a, "shape", None) == p.shape and not a.sharding.is_equivalent_to(p.sharding, p.ndim)
    ]
