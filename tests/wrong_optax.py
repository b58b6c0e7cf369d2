"""optax transformations that are wrong on purpose, each `right` but for one thing. WRONG says by which check each is caught."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

COUNT = itertools.count()
WRONG = {}
CLAIMED = {"which": "adamw", "orthogonal": "muon", "scale-free": "muon"}  # what these say they are


def made(
    learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01, *, change=None, begin=None, finish=None, number=jnp.int32
):
    """AdamW, written plainly. change(u, g, p, place, n), finish(update, g), begin(p): what a wrong one does otherwise."""

    def init(params):
        moment = begin or (lambda p: jnp.zeros(jnp.shape(p), jnp.promote_types(jnp.asarray(p).dtype, jnp.float32)))
        return number(0), jax.tree.map(moment, params), jax.tree.map(moment, params)

    def update(grads, state, params=None):
        count, m, v = jnp.asarray(state[0], jnp.float32 if number is jnp.float32 else jnp.int32) + 1, *state[1:]
        rate = learning_rate(count - 1) if callable(learning_rate) else learning_rate
        wide = jax.tree.map(lambda g, m: jnp.asarray(g, jnp.promote_types(m.dtype, jnp.float32)), grads, m)
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, wide)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, wide)
        u = jax.tree.map(lambda m, v: m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps), m, v)
        if change is not None:
            leaves, tree = jax.tree.flatten(u)
            both = list(zip(leaves, jax.tree.leaves(wide), jax.tree.leaves(params), strict=True))
            u = jax.tree.unflatten(tree, [change(u, g, p, i, both) for i, (u, g, p) in enumerate(both)])
        given = jax.tree.map(
            lambda u, p, g: -(rate * (u + weight_decay * jnp.asarray(p, u.dtype))).astype(jnp.asarray(g).dtype), u, params, grads
        )
        return given if finish is None else jax.tree.map(finish, given, grads), (count, m, v)

    return optax.GradientTransformation(init, update)


def right(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    return made(learning_rate, b1, b2, eps, weight_decay)


def wrong(check, *also, **how):
    """A factory that is wrong in a way, entered."""

    def factory(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
        return made(learning_rate, b1, b2, eps, weight_decay, **how)

    factory.__name__ = factory.__qualname__ = "wrong_" + check.replace("-", "_")
    globals()[factory.__name__] = factory
    WRONG[check] = factory.__name__, set(also)


def traced(x):
    return isinstance(x, jax.core.Tracer)


wrong("order", "independence", change=lambda u, g, p, i, all: u * (1 + i))
wrong("shapes", change=lambda u, g, p, i, all: u + 0 * jnp.max(p))
wrong("zero-gradients", "zero-stays", change=lambda u, g, p, i, all: u * (jnp.abs(g).sum() / jnp.abs(g).sum() if g.size else 1))
wrong("nan-contained", change=lambda u, g, p, i, all: u + 0 * sum(each[1].sum() for each in all))
wrong("scales", change=lambda u, g, p, i, all: u + 0 * jnp.exp(g * 1e-9))
wrong("jit", change=lambda u, g, p, i, all: u * (1.01 if traced(u) else 1))
wrong("one-trace", "multi-steps", number=lambda n: n)
wrong("vmap", change=lambda u, g, p, i, all: u * (1.01 if type(u).__name__ == "BatchTracer" else 1))
wrong("stable-state", begin=jnp.zeros_like)
wrong("independence", change=lambda u, g, p, i, all: u / (1 + 1e-2 * sum(jnp.abs(each[1]).sum() for each in all)))
wrong("zero-stays", change=lambda u, g, p, i, all: u + 1e-3 * (g == 0))
for check in ("quadratic", "rosenbrock", "regression"):
    wrong(check, "quadratic", "rosenbrock", "regression", "which", change=lambda u, g, p, i, all: -u)
wrong("orthogonal", "keywords")
wrong("scale-free", "keywords", "orthogonal", change=lambda u, g, p, i, all: g)
wrong("which", change=lambda u, g, p, i, all: u * 1.1)
wrong("count", number=jnp.float32)
wrong("bfloat16", finish=lambda u, g: u * (0 if g.dtype == jnp.bfloat16 else 1))


def wrong_keywords(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    return made(learning_rate, b1, b2, eps)


def wrong_deterministic(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    noise = 1 + 1e-3 * next(COUNT)
    return made(learning_rate, b1, b2, eps, weight_decay, change=lambda u, g, p, i, all: u * noise)


def wrong_scan(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    inner, calls = right(learning_rate, b1, b2, eps, weight_decay), []

    def update(g, state, p):
        calls.append(1)  # a count on the host: one trace is one step
        updates, state = inner.update(g, state, p)
        return jax.tree.map(lambda u: u * (1 + 0.1 * len(calls)), updates), state

    return optax.GradientTransformation(inner.init, update)


def wrong_empty_tree(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    inner = right(learning_rate, b1, b2, eps, weight_decay)

    def update(g, state, p):
        jnp.concatenate([x.ravel() for x in jax.tree.leaves(g)])
        return inner.update(g, state, p)

    return optax.GradientTransformation(inner.init, update)


def wrong_masked(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    inner = right(learning_rate, b1, b2, eps, weight_decay)

    def update(g, state, p):
        jax.tree.map(lambda x: x + 0, g, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
        return inner.update(g, state, p)

    return optax.GradientTransformation(inner.init, update)


def wrong_inject_hyperparams(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    return right(learning_rate if callable(learning_rate) else float(learning_rate), b1, b2, eps, weight_decay)


def wrong_schedule(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    rate = (lambda t: 1.01 * learning_rate(t)) if callable(learning_rate) else learning_rate
    return right(rate, b1, b2, eps, weight_decay)


def wrong_gradients_unwritten(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    inner = right(learning_rate, b1, b2, eps, weight_decay)

    def update(g, state, p):
        updates, state = inner.update(g, state, p)
        for x in jax.tree.leaves(g):
            if isinstance(x, np.ndarray):
                x *= 0.5
        return updates, state

    return optax.GradientTransformation(inner.init, update)


def wrong_float64(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01):
    inner = right(learning_rate, b1, b2, eps, weight_decay)

    def update(g, state, p):
        updates, state = inner.update(g, state, p)
        near = jax.tree.map(lambda u, p: (p + u).astype(jnp.float32).astype(p.dtype) - p, updates, p)
        return (near if any(x.dtype == jnp.float64 for x in jax.tree.leaves(p)) else updates), state

    return optax.GradientTransformation(inner.init, update)


def wrong_bfloat16_learns(learning_rate=1e-2, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01):
    inner = right(learning_rate, b1, b2, eps, weight_decay)  # so long a memory moves by less than a unit of bfloat16

    def update(g, state, p):
        updates, (count, *moments) = inner.update(g, state, p)
        return updates, (count, *jax.tree.map(lambda x, g: x.astype(g.dtype).astype(x.dtype), tuple(moments), (g, g)))

    return optax.GradientTransformation(inner.init, update)


WRONG |= {
    "bfloat16-learns": ("wrong_bfloat16_learns", set()),
    "keywords": ("wrong_keywords", set()),
    "deterministic": (
        "wrong_deterministic",
        {"resume", "jit", "scan", "masked", "multi-transform", "inject-hyperparams", "schedule", "multi-steps"},
    ),
    "resume": ("wrong_deterministic", {"deterministic"}),
    "scan": ("wrong_scan", {"jit", "one-trace"}),
    "empty-tree": ("wrong_empty_tree", set()),
    "masked": ("wrong_masked", {"multi-transform"}),
    "multi-transform": ("wrong_masked", {"masked"}),
    "inject-hyperparams": ("wrong_inject_hyperparams", set()),
    "multi-steps": ("wrong_one_trace", {"one-trace"}),
    "schedule": ("wrong_schedule", set()),
    "gradients-unwritten": ("wrong_gradients_unwritten", set()),
    "float64": ("wrong_float64", set()),
}
