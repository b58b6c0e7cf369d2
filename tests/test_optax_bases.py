"""SOAP under JAX: bases of one size are one text, whatever tensors they belong to; what the engine does otherwise for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlx_optim.engines.jax_ import Jax, _halves, engine_in
from rlx_optim.optax import kron_psgd, soap, transform

SHAPES = {"a": (6, 4), "b": (4, 6), "c": (4, 6), "d": (6,)}


def walked(tx, shapes, steps=6):
    @jax.jit
    def step(g, state, p):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    params = {k: jnp.ones(s) for k, s in shapes.items()}
    state = tx.init(params)
    for t in range(steps):
        rngs = {k: np.random.default_rng([t, ord(k)]) for k in shapes}
        params, state = step({k: jnp.asarray(rngs[k].normal(size=s), jnp.float32) for k, s in shapes.items()}, state, params)
    return params


def decompositions(shapes):
    params = {k: jnp.ones(s) for k, s in shapes.items()}
    tx = soap(1e-2)
    return jax.jit(tx.update).lower(params, tx.init(params), params).as_text().count("@lapack_sgeqrf_ffi(")


def test_bases_of_one_size_are_one_text():
    once = decompositions({"a": (4, 4)})
    assert once > 0
    assert decompositions({"a": (6, 4), "b": (4, 6), "c": (4, 4), "d": (4, 6, 4), "e": (6,)}) == 2 * once


def test_leaves_end_where_they_would_alone():
    """With a leaf that shares their sizes, and one of another rule."""
    often, seldom = soap(1e-2, precondition_frequency=1), soap(1e-2, precondition_frequency=4)
    routed = soap(1e-2, precondition_frequency=1, route={"b": seldom})
    together = walked(routed, SHAPES)
    for name, tx in {"a": often, "b": seldom}.items():
        alone = walked(tx, {name: SHAPES[name]})
        np.testing.assert_allclose(together[name], alone[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_an_order_by_counting(dtype):
    keys = np.random.default_rng(0).integers(0, 20, (5, 40)).astype(dtype)
    order = engine_in(jnp.float32).argsort(jnp.asarray(keys))
    np.testing.assert_array_equal(order, keys.argsort(-1, kind="stable"))
    np.testing.assert_array_equal(engine_in(jnp.float32).invert_permutation(order), np.asarray(order).argsort(-1))


def test_an_order_with_nan_and_infinity():
    keys = np.float32([[3, np.nan, -np.inf, np.inf, 1, np.nan, 0]])
    np.testing.assert_array_equal(engine_in(jnp.float32).argsort(jnp.asarray(keys)), [[2, 6, 4, 0, 1, 3, 5]])


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_products_by_halves(monkeypatch, gpu):
    """What a GPU multiplies in TF32: the halves add up to the number, the first fits, and the products are as good as float32's."""
    monkeypatch.setattr("rlx_optim.engines.jax_._product", lambda A, B: tf32(A) @ tf32(B))
    E = Jax(jnp.float32, free=True)
    A, B = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32) * np.float32(1e-3)
    exact = A.astype(np.float64) @ B.astype(np.float64)
    assert np.abs(E.matmul_precise(A, B) - exact).max() < 1e-6 * np.abs(exact).max() < np.abs(E.matmul(A, B) - exact).max()
    exact = A.astype(np.float64) @ A.astype(np.float64).swapaxes(-1, -2)
    assert np.abs(E.syrk(A) - exact).max() < 1e-6 * np.abs(exact).max()


def test_halves_are_rounded_to_the_nearest():
    """Cut off, the rest would have the sign of the number, and every sum of squares come out too small."""
    X = (np.random.default_rng(0).normal(size=10_000) * 10.0 ** np.arange(-20, 20).repeat(250)).astype(np.float32)
    top, rest = map(np.asarray, _halves(jnp.asarray(X)))
    np.testing.assert_array_equal(tf32(top), top)
    np.testing.assert_array_equal(top.astype(np.float64) + rest, X)
    assert (np.abs(rest) <= 2.0**-11 * np.abs(X)).all()
    assert 0.45 < (np.sign(rest) == np.sign(X)).mean() < 0.55


def tf32(X):
    return (jnp.asarray(X).view(jnp.uint32) & jnp.uint32(0xFFFFE000)).view(jnp.float32)


@pytest.mark.parametrize(
    "shapes", [((2, 4, 4), (2, 4, 6)), ((2, 6, 4), (2, 4, 4)), ((2, 4, 4), (2, 4, 4)), ((1, 3, 5), (1, 5, 2))]
)
def test_products_from_the_right_are_the_same(gpu, shapes):
    A, B = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes))
    np.testing.assert_allclose(Jax(jnp.float32, free=True).matmul(A, B), A @ B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(Jax(jnp.float32, free=True).matmul_precise)(A, B), A @ B, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", [None, "highest", "tensorfloat32"])
def test_a_precision_that_is_asked_for_holds(gpu, asked):
    """Without one SOAP takes the fast products, of halves for its bases; else all take what was asked."""
    params = {"w": jnp.ones((4, 4))}
    tx = soap(1e-2)
    with jax.default_matmul_precision(asked):
        text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    words = {word for word in ("HIGHEST", "HIGH,", "DEFAULT") if word in text}
    assert words == {None: {"HIGH,"}, "highest": {"HIGHEST"}, "tensorfloat32": {"HIGH,"}}[asked]


def test_a_default_device_that_is_no_gpu_multiplies_in_full(gpu):
    """`jax.default_device(cpu)` on a machine with a GPU."""
    assert Jax(jnp.float32, free=True).half
    for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
            assert not Jax(jnp.float32, free=True).half
    params = {"w": jnp.ones((4, 4))}
    tx = soap(1e-2)
    update = jax.jit(tx.update)
    texts = [update.lower(params, tx.init(params), params).as_text()]
    with jax.default_device("cpu"):
        texts.append(update.lower(params, tx.init(params), params).as_text())
    assert ["HIGH," in text for text in texts] == [True, False]


# ---- stacks that are not made ---------------------------------------------------------------------------------------------
LEAVES = {"a": (12, 20), "b": (12, 20), "layers": (3, 12, 20), "c": (20, 12), "bias": (20,)}


def gone_on(tx, steps, jit):
    params = {k: jax.random.normal(jax.random.key(i), shape) for i, (k, shape) in enumerate(LEAVES.items())}
    state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
    for t in range(steps):
        grads = jax.tree.map(lambda p, t=t: jnp.sin(3 * p + t), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("settings", [{}, {"cautious": True}, {"state_dtype": "bfloat16"}])
@pytest.mark.parametrize("jit", [True, False])
def test_factors_in_parts_make_the_steps_that_stacks_do(monkeypatch, jit, settings):
    ends = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(transform, "PILED", least)
        tx = soap(0.01, precondition_frequency=3, stacked={"layers": 1}, **settings)
        ends.append(gone_on(tx, 5 if jit else 4, jit))
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        assert jnp.array_equal(one, other)
    assert jax.tree.structure(ends[0]) == jax.tree.structure(ends[1])


def test_a_gram_matrix_that_is_not_finite_leaves_the_parts_alone(monkeypatch):
    monkeypatch.setattr(transform, "PILED", 0)
    tx = soap(0.01)
    params = {k: jax.random.normal(jax.random.key(i), (6, 4)) for i, k in enumerate("ab")}
    _, state = tx.update(params, tx.init(params), params)
    bad = {"a": params["a"], "b": params["b"].at[0, 0].set(jnp.inf)}
    _, after = tx.update(bad, state, params)
    assert not jnp.array_equal(after.factors["a"]["L1"], state.factors["a"]["L1"])
    for name in ("L1", "L2", "Q1", "Q2"):
        assert jnp.array_equal(after.factors["b"][name], state.factors["b"][name])


@pytest.mark.parametrize(("make", "branches"), [(soap, 1), (kron_psgd, 3)])
def test_a_step_waits_for_few_branches(make, branches):
    """Before each the host reads which way to go: SOAP asks once for all tensors, KronPSGD once a shape."""
    tx = make(0.01)
    params = {k: jnp.ones(shape) for k, shape in LEAVES.items() if k != "layers"}
    traced = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    assert sum(eqn.primitive.name == "cond" for eqn in traced.jaxpr.eqns) == branches
