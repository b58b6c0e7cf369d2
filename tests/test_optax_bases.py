"""SOAP under JAX: bases of one size are one text, whatever tensors they belong to; what the engine does otherwise for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlx_optim.engines.jax_ import Jax, engine_in
from rlx_optim.optax import soap

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
    np.testing.assert_array_equal(engine_in(jnp.float32).inverse(order), np.asarray(order).argsort(-1))


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
    assert np.abs(E.precise(A, B) - exact).max() < 1e-6 * np.abs(exact).max() < np.abs(E.product(A, B) - exact).max()
    exact = A.astype(np.float64) @ A.astype(np.float64).swapaxes(-1, -2)
    assert np.abs(E.square(A) - exact).max() < 1e-6 * np.abs(exact).max()


def tf32(X):
    return (jnp.asarray(X).view(jnp.uint32) & jnp.uint32(0xFFFFE000)).view(jnp.float32)


@pytest.mark.parametrize(
    "shapes", [((2, 4, 4), (2, 4, 6)), ((2, 6, 4), (2, 4, 4)), ((2, 4, 4), (2, 4, 4)), ((1, 3, 5), (1, 5, 2))]
)
def test_products_from_the_right_are_the_same(gpu, shapes):
    A, B = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes))
    np.testing.assert_allclose(Jax(jnp.float32, free=True).product(A, B), A @ B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(Jax(jnp.float32, free=True).precise)(A, B), A @ B, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", [None, "highest", "tensorfloat32"])
def test_a_precision_that_is_asked_for_holds(gpu, asked):
    """Without one SOAP takes the fast products, of halves for its bases; else all take what was asked."""
    params = {"w": jnp.ones((4, 4))}
    tx = soap(1e-2)
    with jax.default_matmul_precision(asked):
        text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    words = {word for word in ("HIGHEST", "HIGH,", "DEFAULT") if word in text}
    assert words == {None: {"HIGH,"}, "highest": {"HIGHEST"}, "tensorfloat32": {"HIGH,"}}[asked]
