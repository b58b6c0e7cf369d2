"""Leaves of 16 bits under optax: what is added to them gives the rounded result, the same that torch parameters have."""

import numpy as np
import pytest
import torch
from torch import nn

import rlx_optim.torch as front

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
ours = pytest.importorskip("rlx_optim.optax")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def leaves(tensors):
    return {k: jnp.asarray(t.detach().float().numpy()).astype(str(t.dtype).removeprefix("torch.")) for k, t in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "title", "rate"), [("adamw", "AdamW", 1e-3), ("lion", "Lion", 1e-3), ("nadamw", "NAdamW", 1e-3)]
)
def test_chance_is_that_of_torch(name, title, rate, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw():
        return {k: torch.randn(s, generator=generator).to(DTYPES[dtype]) for k, s in (("w", (48, 40)), ("b", (30,)))}

    params = {k: nn.Parameter(p) for k, p in draw().items()}
    opt = getattr(front, title)(list(params.items()), lr=rate, weight_decay=0.0, engine="torch")
    tx = getattr(ours, name)(rate, weight_decay=0.0)
    here = leaves(params)
    state, update = tx.init(here), jax.jit(tx.update)
    for _ in range(3):
        grads = draw()
        for k, p in params.items():
            p.grad = grads[k] * 0.1
        opt.step()
        updates, state = update({k: g * 0.1 for k, g in leaves(grads).items()}, state, here)
        assert all(u.dtype == dtype for u in updates.values())
        here = optax.apply_updates(here, updates)
        for k, p in params.items():
            got, want = np.asarray(here[k].astype(jnp.float32)), p.detach().float().numpy()
            apart = int((got != want).sum())
            assert apart <= 2 + 0.005 * want.size, (k, apart)  # float32 arithmetic differs in the last place
        here = leaves(params)  # so that one such number does not become more


def test_small_steps_count_and_nearest_stands_still():
    start = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    moved = {}
    for how in ("stochastic", "nearest"):
        tx = ours.adamw(2e-5, weight_decay=0.0, rounding=how)
        params, state, update = start, tx.init(start), jax.jit(tx.update)
        for _ in range(100):
            updates, state = update(jax.tree.map(jnp.ones_like, start), state, params)
            params = optax.apply_updates(params, updates)
        moved[how] = float(params["w"].astype(jnp.float32).mean()) - 1
    assert abs(moved["stochastic"] + 0.002) < 2e-4
    assert moved["nearest"] == 0


def test_exact_is_refused_by_name():
    tx = ours.muon(0.02, rounding="exact")
    with pytest.raises(
        ValueError, match=r"Muon: rounding='exact' is not done under optax, where 'a.w' of bfloat16 .* use rounding="
    ):
        tx.init({"a": {"w": jnp.ones((4, 4), jnp.bfloat16)}})
    state = tx.init({"w": jnp.ones((4, 4))})  # float32 has no use for it
    assert jax.tree.leaves(tx.update({"w": jnp.ones((4, 4))}, state, {"w": jnp.ones((4, 4))})[0])[0].dtype == jnp.float32


def test_not_finite_stays_so():
    params = {"w": jnp.asarray([1.0, jnp.inf, jnp.nan, 3.3e38], jnp.bfloat16)}
    tx = ours.sgd(1.0)
    updates, _ = tx.update({"w": jnp.asarray([jnp.nan, 0.0, 0.0, 0.0], jnp.bfloat16)}, tx.init(params), params)
    found = np.asarray(optax.apply_updates(params, updates)["w"].astype(jnp.float32))
    assert np.isnan(found[[0, 2]]).all()
    assert not np.isfinite(found[1])
    assert np.isfinite(found[3])
