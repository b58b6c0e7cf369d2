"""The noise of KronPSGD: the same numbers everywhere, drawn by a key that is kept in the state."""

import numpy as np
import pytest

from rlx_optim import random
from rlx_optim.engines import get_engine

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from rlx_optim.torch import KronPSGD  # noqa: E402

EVERY = dict(lr=0.05, preconditioner_update_probability=1.0)


def parameters(n=3, seed=0):
    rng = np.random.default_rng(seed)
    return [nn.Parameter(torch.from_numpy(rng.standard_normal((6, 4)).astype(np.float32))) for _ in range(n)]


def steps(opt, params, first, last):
    for t in range(first, last):
        for i, p in enumerate(params):
            p.grad = torch.from_numpy(np.random.default_rng([t, i]).standard_normal(p.shape).astype(np.float32))
        opt.step()


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_a_stack_of_keys_draws_what_each_would(kind):
    """And a key that is kept as halves gives Threefry's words of the key itself."""
    E = get_engine("reference")
    keys = [random.key(3, name) for name in "abc"]
    found = E.random(kind, np.array([random.split_key(key) for key in keys], np.float64), 7, (3, 5, 2))
    for key, mine in zip(keys, found, strict=True):
        first, second = random.threefry(*key, np.arange(10), 4 * 7 + random.KINDS[kind])
        a, b = ((word >> 8) * 2.0**-24 + 2.0**-25 for word in (first, second))
        a, b = (a, b) if kind == "uniform" else (a[:5], b[:5])
        turn = 2 * np.pi * b
        normal = np.sqrt(-2 * np.log(a)) * np.array([np.cos(turn), np.sin(turn)])
        np.testing.assert_allclose(mine.reshape(-1), a if kind == "uniform" else normal.reshape(-1), rtol=1e-12)


def test_equal_shapes_without_names_do_not_share_noise():
    params = [nn.Parameter(torch.ones(6, 4)) for _ in range(3)]
    opt = KronPSGD([{"params": params[:2]}, {"params": params[2:]}], **EVERY)
    for p in params:
        p.grad = torch.arange(24.0).reshape(6, 4)
    opt.step()
    factors = [opt.state[p]["q1"] for p in params]
    assert not any(torch.equal(a, b) for i, a in enumerate(factors) for b in factors[:i])
    assert len({tuple(opt.state[p]["key"].tolist()) for p in params}) == 3


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_a_state_without_names_goes_on_with_them(engine):
    """Bit for bit, and the other way round."""
    whole, apart = parameters(), parameters()
    opt = KronPSGD(whole, engine=engine, **EVERY)
    steps(opt, whole, 0, 5)
    first = KronPSGD(apart, engine=engine, **EVERY)
    steps(first, apart, 0, 3)
    second = KronPSGD([(f"layer.{i}", p) for i, p in enumerate(apart)], engine=engine, seed=9, **EVERY)
    second.load_state_dict(first.state_dict())
    steps(second, apart, 3, 4)
    third = KronPSGD(apart, engine=engine, **EVERY)
    third.load_state_dict({**second.state_dict(), "param_groups": third.state_dict()["param_groups"]})
    steps(third, apart, 4, 5)
    for a, b in zip(whole, apart, strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(opt.state[a][k], third.state[b][k]) for k in ("momentum_buffer", "q1", "q2", "key", "counter"))


def test_a_state_of_before_gets_the_key_that_it_drew_by():
    """State dicts of older versions have none: it is that of seed and name, also for each part of a split parameter."""
    params = [("w", parameters(1)[0]), ("qkv", parameters(1, 1)[0])]
    opt = KronPSGD(params, split={"qkv": (2, 4)}, seed=5, **EVERY)
    steps(opt, [p for _, p in params], 0, 2)
    saved = opt.state_dict()
    kept = [saved["state"][i].pop("key") for i in range(2)]
    assert kept[0].tolist() == random.split_key(random.key(5, "w"))
    assert kept[1].tolist() == [random.split_key(random.key(5, f"qkv[{i}]")) for i in range(2)]
    opt.load_state_dict(saved)
    assert all(torch.equal(opt.state[p]["key"], key) for (_, p), key in zip(params, kept, strict=True))


def test_jax_keeps_the_key_too():
    jax = pytest.importorskip("jax")
    import rlx_optim.optax as ours

    params = {"a": jax.numpy.ones((3, 2)), "b": jax.numpy.ones((3, 2))}
    tx = ours.kron_psgd(0.1, seed=4)
    state = tx.init(params)
    _, state = jax.jit(tx.update)(params, state, params)
    assert {k: v["key"].tolist() for k, v in state.factors.items()} == {k: random.split_key(random.key(4, k)) for k in "ab"}
