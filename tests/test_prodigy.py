"""Prodigy: what is one number for all tensors of an optimizer."""

import copy
import itertools
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from helpers import distance
from test_golden import FOLDER, PROBLEM

import rlx_optim
import rlx_optim.optax
import rlx_optim.torch

ENGINES = ["reference", "cpu"]
FILES = ["prodigy__author__default", "prodigy__author__d0_1e4"]


def golden(file):
    found = np.load(FOLDER / f"{file}.npz")
    note = json.loads(str(found["json"]))
    return found, note["hyper"], {k: np.array(PROBLEM[f"params0/{k}"]) for k in note["tensors"]}


def gradients(t, names):
    return {k: np.array(PROBLEM[f"grads/{k}"][t]) for k in names}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("file", FILES)
def test_distance_is_the_authors(file, engine):
    found, hyper, params = golden(file)
    opt = rlx_optim.Prodigy(**hyper, engine=engine)
    for t in range(20):
        opt.step_all(params, gradients(t, params))
        every = {float(opt.state(k)["d"]) for k in params}
        assert len(every) == 1
        assert every.pop() == pytest.approx(found["d"][t], rel=2e-6)


@pytest.mark.parametrize("file", FILES)
def test_torch_and_jax_follow_the_golden(file):
    found, hyper, start = golden(file)
    params = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
    opts = [rlx_optim.torch.Prodigy(params.items(), **hyper, engine=engine) for engine in ("cpu", "torch")]
    copies = [params, {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}]
    opts[1] = rlx_optim.torch.Prodigy(copies[1].items(), **hyper, engine="torch")
    hyper = {
        "learning_rate" if k == "lr" else {"d0": "estim_lr0", "d_coef": "estim_lr_coef"}.get(k, k): v for k, v in hyper.items()
    }
    b1, b2 = hyper.pop("betas")
    tx = rlx_optim.optax.prodigy(b1=b1, b2=b2, **hyper)
    leaves = {k: jnp.asarray(v) for k, v in start.items()}
    state = tx.init(leaves)
    for t in range(20):
        grads = gradients(t, start)
        for opt, mine in zip(opts, copies, strict=True):
            for k, p in mine.items():
                p.grad = torch.tensor(grads[k])
            opt.step()
        updates, state = tx.update({k: jnp.asarray(g) for k, g in grads.items()}, state, leaves)
        leaves = optax.apply_updates(leaves, updates)
    want = {k: found[f"after/{k}"][-1] for k in start}
    ends = [{k: p.detach().numpy() for k, p in mine.items()} for mine in copies] + [{k: np.asarray(p) for k, p in leaves.items()}]
    assert [distance(end, want, start) < (5e-4 if "default" in file else 2e-4) for end in ends] == [True] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_one_by_one_is_all_at_once(engine):
    """p moves when the iteration ends; the gradient's array may be used again before that."""
    _, hyper, params = golden(FILES[1])
    alone, together = copy.deepcopy(params), params
    one, all_ = (rlx_optim.Prodigy(**hyper, engine=engine) for _ in range(2))
    for t in range(5):
        grads, before = gradients(t, params), copy.deepcopy(alone)
        all_.step_all(together, grads)
        for k, g in grads.items():
            room = np.array(2 * g)
            one.step(k, alone[k], room, grad_scale=0.5)
            room[...] = np.nan
        assert all((alone[k] == before[k]).all() for k in alone)
        one.end_iteration()
        for k in params:
            np.testing.assert_array_equal(alone[k], together[k])


def test_what_waits_is_not_lost(tmp_path):
    opt, w, g = rlx_optim.Prodigy(engine="cpu"), np.ones(3, np.float32), np.ones(3, np.float32)
    opt.step("w", w, g)
    for what in (lambda: opt.save(tmp_path / "a"), lambda: copy.deepcopy(opt), lambda: opt.step_all({"b": w}, {"b": g})):
        with pytest.raises(ValueError, match="'w' of this iteration waits for the others; call end_iteration"):
            what()
    with pytest.raises(ValueError, match="'w' was already stepped in iteration 0"):
        opt.step("w", w, g)
    opt.end_iteration()
    assert opt.step_count("w") == 1
    assert (w < 1).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_that_joins_takes_over_the_distance(engine):
    """And one whose rate is 0 takes no part in finding it."""
    _, hyper, params = golden(FILES[1])
    opt = rlx_optim.Prodigy(**hyper, engine=engine, groups=[{"match": "b5", "lr": 0.0}])
    late = params.pop("w48x48")
    for t in range(6):
        opt.step_all(params, gradients(t, params))
    d, gained = float(opt.state("s")["d"]), float(opt.state("s")["gained"])
    assert d > 10 * hyper["d0"]
    params["w48x48"] = late
    opt.step_all(params, gradients(6, params))
    m = opt.state("w48x48")["m"]
    np.testing.assert_allclose(m, d * 0.1 * PROBLEM["grads/w48x48"][6], rtol=1e-5)
    assert float(opt.state("w48x48")["gained"]) == float(opt.state("s")["gained"]) != gained
    assert (params["b5"] == PROBLEM["params0/b5"]).all()
    assert not opt.state("b5")["s"].any()


def test_nothing_moves_without_any_gradient():
    opt, w = rlx_optim.Prodigy(weight_decay=0.5, engine="reference"), np.ones(3, np.float32)
    opt.step_all({"w": w}, {"w": np.zeros(3, np.float32)})
    assert (w == 1).all()


def test_groups_that_cannot_be_stepped_together_are_refused():
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]
    opt = rlx_optim.torch.Prodigy([("a", params[0]), ("b", params[1])])
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r'"all_.*is over all tensors, but .a. and .b. are not stepped together'):
        opt.step()
    assert all((p == 1).all() for p in params)


def test_the_authors_checkpoints_are_refused_by_name():
    p = torch.nn.Parameter(torch.ones(3))
    group = {"params": [0], "lr": 1.0, "betas": (0.9, 0.999), "d": 0.1, "d0": 1e-6, "d_max": 0.1, "d_numerator": 0.2, "k": 3}
    theirs = {
        "state": {0: {"step": 3, "exp_avg": p.data, "exp_avg_sq": p.data, "s": p.data, "p0": p.data}},
        "param_groups": [group],
    }
    opt = rlx_optim.torch.Prodigy([("w", p)])
    with pytest.raises(ValueError, match="Prodigy: the checkpoint is prodigyopt's, whose d is in its groups"):
        opt.load_state_dict(theirs)


def test_leaves_without_decay_are_stepped_with_the_others():
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    grads = {"a": jnp.asarray([1.0, 2.0, -1.0]), "b": jnp.ones((2, 2))}
    ends = []
    for mask, decay in ((None, 0.0), ({"a": True, "b": False}, 0.5), (None, 0.5)):
        tx = rlx_optim.optax.prodigy(1.0, mask=mask, weight_decay=decay, estim_lr0=0.1)
        end, state = tree, tx.init(tree)
        for _ in range(2):
            updates, state = tx.update(grads, state, end)
            end = optax.apply_updates(end, updates)
        ends.append((end, state))
    (plain, _), (masked, state), (decayed, _) = ends
    assert float(abs(masked["a"] - plain["a"]).max()) > 1e-3
    np.testing.assert_allclose(masked["a"], decayed["a"], rtol=0.05)  # but for what the decay of b does to d
    assert state.slots.get("d", state.factors) is not None
    distances = {float(each["d"]) for each in state.factors.values()}
    assert len(distances) == 1


def pulled(opt, steps, start=3.0):
    """d after each step towards the minimum of a separable quadratic."""
    rng = np.random.default_rng(0)
    p, found = {"w": np.array(start * rng.standard_normal((6, 4)), np.float32)}, []
    for _ in range(steps):
        opt.step_all(p, {"w": 2 * p["w"]})
        found.append(float(opt.state("w")["d"]))
    return found, p["w"]


@pytest.mark.parametrize("engine", ENGINES)
def test_growth_is_limited_once_d_has_left_d0(engine):
    """The first estimate may be as far from d0 as it likes; after that no step multiplies d by more than growth_rate."""
    found, _ = pulled(rlx_optim.Prodigy(growth_rate=1.05, engine=engine), 40)
    steps = [b / a for a, b in itertools.pairwise([float(np.float32(1e-6)), *found])]
    first = next(i for i, step in enumerate(steps) if step > 1)
    assert steps[first] > 1.2
    assert max(steps[first + 1 :]) <= 1.05 * (1 + 1e-6)
    assert min(steps) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_small_d0_costs_a_few_steps_unless_rounding_loses_them_all(engine):
    for d0 in (1e-2, 1e-4, 1e-6):
        found, p = pulled(rlx_optim.Prodigy(d0=d0, engine=engine), 60)
        assert found[-1] > 0.1, d0
        assert np.abs(p).max() < 3
    found, p = pulled(rlx_optim.Prodigy(d0=1e-10, engine=engine), 60)
    assert set(found) == {np.float32(1e-10)}
    assert (p == pulled(rlx_optim.Prodigy(lr=0.0, engine=engine), 1)[1]).all()


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_a_group_that_maximizes_shares_the_distance(engine):
    """As one that minimizes with gradients of the other sign, whichever group it is; setting and unsetting it included."""
    names = ("a", "b")
    ours, other = ({k: torch.nn.Parameter(torch.ones(4) * (1 + i)) for i, k in enumerate(names)} for _ in range(2))
    opt = rlx_optim.torch.Prodigy([{"params": [p]} for p in ours.values()], engine=engine)
    plain = rlx_optim.torch.Prodigy(other.values(), engine=engine)
    for t in range(12):
        climbs = {"a": t % 4 == 1, "b": t % 3 == 2}
        for group, k in zip(opt.param_groups, names, strict=True):
            group["maximize"] = climbs[k]
            other[k].grad = other[k].detach() * torch.rand(4, generator=torch.Generator().manual_seed(t))
            ours[k].grad = -other[k].grad if climbs[k] else other[k].grad.clone()
        opt.step(), plain.step()
        assert all(torch.equal(ours[k], other[k]) for k in names)
        assert opt.state[ours["a"]]["d"] == opt.state[ours["b"]]["d"] == plain.state[other["a"]]["d"]
    assert float(plain.state[other["a"]]["d"]) > 1e-6
