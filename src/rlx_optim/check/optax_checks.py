"""Checks of an optax factory: JAX's transformations, optax's wrappers, its state."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .optax_subject import FAST, OptaxSubject, expect_bitwise, to_arrays
from .table import Skip, Wrong, check, expect

FAR = 2**24  # float32 counts no further
FUSED = 1e-4  # of the distance travelled: what is compiled whole is rounded otherwise


def is_same_tree(a: Any, b: Any) -> bool:
    return bool(jax.tree.structure(a) == jax.tree.structure(b))  # type: ignore[operator]


@check("compiled and not compiled it ends in the same place", "optax")
def jit(s: OptaxSubject) -> Any:
    return s.expect_close(s.jitted[0], s.plain, "jit ends elsewhere than no jit", FUSED)


@check("update is traced once: a second trace of a large model costs minutes", "optax")
def one_trace(s: OptaxSubject) -> Any:
    _, traces = s.jitted
    return expect(traces <= 1, f"six steps were traced {traces} times: dtypes or shapes of the state change", traces)


@check("a training loop inside jax.lax.scan ends where the loop outside does", "optax")
def scan(s: OptaxSubject) -> Any:
    tx, params = s.make(), s.make_params()
    many = jax.tree.map(lambda *each: jnp.stack(each), *(s.make_grads(t) for t in range(6)))

    def body(carry: Any, g: Any) -> Any:
        return s.update(tx, g, carry[1], carry[0]), None

    (got, _), _ = jax.jit(lambda p, g: jax.lax.scan(body, (p, tx.init(p)), g), compiler_options=FAST)(params, many)
    return s.expect_close(got, s.plain, "scan ends elsewhere than a loop", FUSED)


@check("over a stack of models at once it ends where each ends alone", "optax", quick=False)
def vmap(s: OptaxSubject) -> Any:
    tx, params = s.make(), s.make_params()
    two = jax.tree.map(lambda p: jnp.stack((p, p * 0.5)), params)
    state = jax.vmap(tx.init)(two)
    step = jax.jit(jax.vmap(lambda g, state, p: s.update(tx, g, state, p)), compiler_options=FAST)
    for t in range(6):
        two, state = step(jax.tree.map(lambda g: jnp.stack((g, g)), s.make_grads(t)), state, two)
    return s.expect_close(jax.tree.map(lambda p: p[0], two), s.plain, "under vmap it ends elsewhere", FUSED)


@check("state keeps its structure, shapes and dtypes: scan and donated buffers need that", "optax")
def stable_state(s: OptaxSubject) -> Any:
    count = 0
    for dtype in (jnp.float32, jnp.bfloat16):
        tx, params = s.make(), s.make_params(dtype)
        before = jax.eval_shape(tx.init, params)
        after = jax.eval_shape(lambda p, g, tx=tx: s.update(tx, g, tx.init(p), p)[1], params, s.make_grads(0, dtype))
        if not is_same_tree(before, after):
            raise Wrong(f"the structure of the state changes with the first step ({jnp.dtype(dtype)})", "structure")
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise Wrong(f"state{jax.tree_util.keystr(path)} is {a.dtype}{a.shape} and then {b.dtype}{b.shape}", str(b.dtype))
            count += 1
    return f"{count} leaves"


@check("a tree without arrays, or with None in it, is a tree", "optax")
def empty_tree(s: OptaxSubject) -> Any:
    tx = s.make()
    for tree in ({}, {"a": None, "w": jnp.ones((4, 3))}):
        state = tx.init(tree)
        got, _ = s.eager(tx, jax.tree.map(lambda x: 0.1 * x, tree), state, tree)
        expect(is_same_tree(got, tree), f"{tree.keys()} came back as {jax.tree.structure(got)}", "structure")
    return "kept"


@check("optax.masked steps what is asked and leaves the rest", "optax")
def masked(s: OptaxSubject) -> Any:
    s.refuse_entangled()
    mask = {name: i % 2 == 0 for i, name in enumerate(s.make_params())}

    def chosen(tree: Any) -> Any:
        return to_arrays({name: p for name, p in tree.items() if mask[name]})

    got = s.run_steps(optax.masked(s.make(), mask))
    return s.expect_near(chosen(got), chosen(s.plain), chosen(s.make_params()), "under optax.masked it ends elsewhere")


@check("optax.multi_transform gives each label its own optimizer", "optax")
def multi_transform(s: OptaxSubject) -> Any:
    s.refuse_entangled()
    labels = {name: "ab"[i % 2] for i, name in enumerate(s.make_params())}
    tx = optax.multi_transform({"a": s.make(), "b": s.make()}, labels)
    return s.expect_close(s.run_steps(tx), s.plain, "under optax.multi_transform it ends elsewhere")


def find_rate(s: OptaxSubject) -> Any:
    if s.rate is None or not isinstance(s.get_setting(s.rate), (int, float)):
        raise Skip("it has no learning_rate that is a number")
    return float(s.get_setting(s.rate))


@check("optax.inject_hyperparams holds the learning rate in the state, where it is read at every step", "optax")
def inject_hyperparams(s: OptaxSubject) -> Any:
    rate, params = find_rate(s), s.make_params()
    numeric = {name for name in s.keywords if isinstance(s.get_setting(name), float)}
    others = [name for name in s.keywords if name not in numeric]
    tx = optax.inject_hyperparams(s.factory, static_args=tuple(others))(**{**s.settings, str(s.rate): rate})
    # numbers that were float64 on the host are float32 now: more than a rounding
    seen = s.expect_close(s.run_steps(tx), s.plain, "under inject_hyperparams it ends elsewhere", 1e-3)

    def begun(rate: float) -> Any:
        state = tx.init(params)
        for name in (str(s.rate), *s.without_decay()):
            if name in state.hyperparams:
                state.hyperparams[name] = jnp.asarray(rate if name == s.rate else 0.0)
        return s.run(tx, params, state, 0, 2)[0]

    still, going = begun(0.0), begun(rate)
    led = [n for n in params if not jnp.array_equal(still[n], going[n])]  # the others are left to a rule with a rate of its own
    far = max((float(jnp.abs(still[n] - params[n]).max()) for n in led), default=rate)
    expect(not far > 1e-12, f"parameters moved by {far:.1e} with an injected learning rate of 0", far)
    return seen


@check("a constant schedule is that number, and step 0 is its first", "optax")
def schedule(s: OptaxSubject) -> Any:
    rate = find_rate(s)
    with s.allow_refusal("a schedule as learning rate"):
        got = s.run_steps(s.make(**{str(s.rate): lambda step: rate}))
    return s.expect_close(got, s.plain, "a constant schedule ends elsewhere than its number")


@check("optax.MultiSteps over two halves of a gradient is one step on the whole", "optax")
def multi_steps(s: OptaxSubject) -> Any:
    got = s.run_steps(
        optax.MultiSteps(s.make(), 2), 12, lambda t: jax.tree.map(lambda g: g * (0.5, 1.5)[t % 2], s.make_grads(t // 2))
    )
    return s.expect_close(got, s.plain, "under MultiSteps it ends elsewhere")


@check("state that went through pickle goes on bit for bit", "optax")
def resume(s: OptaxSubject) -> Any:
    tx, params = s.make(), s.make_params()
    state = tx.init(params)
    params, state = s.run(tx, params, state, 0, 3)
    leaves, tree = jax.tree.flatten(state)
    carried = jax.tree.unflatten(tree, [jnp.asarray(x) for x in pickle.loads(pickle.dumps(jax.device_get(leaves)))])
    again = s.make()
    return expect_bitwise(s.run(again, params, carried, 3, 6)[0], s.plain, "resumed, it goes on elsewhere")


@check("arrays that are given stay as they were, NumPy's too", "optax")
def gradients_unwritten(s: OptaxSubject) -> Any:
    tx, params = s.make(), {n: np.asarray(p).copy() for n, p in s.make_params().items()}
    grads = {n: np.asarray(g).copy() for n, g in s.make_grads(0).items()}
    before = jax.tree.map(np.copy, (params, grads))
    s.eager(tx, grads, tx.init(params), params)
    return expect_bitwise((params, grads), before, "update wrote to what it was given")


@check("float32 stops counting at 16777216; what depends on the count then stands still", "optax")
def count(s: OptaxSubject) -> Any:
    tx, params = s.make(), s.make_params()
    first, second = (jax.tree.leaves(s.run(tx, params, tx.init(params), 0, steps)[1]) for steps in (1, 2))
    counters = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if jnp.ndim(a) == 0 and (a, b) == (1, 2)]
    if not counters:
        raise Skip("nothing in its state counts steps")
    leaves, tree = jax.tree.flatten(s.run(tx, params, tx.init(params), 0, 1)[1])
    far = [jnp.full_like(x, FAR) if i in counters else x for i, x in enumerate(leaves)]
    got, state = s.run(tx, params, jax.tree.unflatten(tree, far), 1, 4)
    if not all(bool(jnp.isfinite(p).all()) for p in got.values()) or all(bool((got[n] == params[n]).all()) for n in got):
        raise Wrong("after 2^24 steps parameters stand still or are not finite", "NaN")
    counts = [float(jax.tree.leaves(state)[i]) for i in counters]
    if min(counts) < FAR + 3:
        raise Wrong(f"three steps after 2^24 the count is 2^24 + {min(counts) - FAR:g}", min(counts) - FAR)
    return "2^24 + 3"
