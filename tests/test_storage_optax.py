"""State in 8 and 16 bits under optax: the same codes as elsewhere, traced, in files and inside optax's own wrappers."""

import numpy as np
import pytest
from optax_cases import MATRIX, build, jax, jnp, optax, ours
from test_storage import FORMATS, NEEDED, relative, start

import rlx_optim
from rlx_optim.optax.foreign import from_optax, to_optax
from rlx_optim.storage import flatten_components

STEPS = 3


def case(name, **settings):
    tx = build(name, **{"learning_rate": 0.02, **{k: v for k, v in NEEDED.get(name, {}).items() if k != "lr"}, **settings})
    return tx, {k: jnp.asarray(v) for k, v in start().items()}


def walk(tx, params, state, steps, first=0):
    step = jax.jit(tx.update)
    for i in range(first, first + steps):
        updates, state = step({k: jnp.asarray(g) for k, g in start(100 + i).items()}, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def unequal(a, b):
    return max(float(np.mean(np.asarray(x, np.float64) != np.asarray(y, np.float64))) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "mars", "muon", "lion"])
def test_codes_are_those_of_the_reference(name, wanted, tmp_path):
    """Parameters end where the reference's do, codes differ where float32 does in the last place; one file is read by both."""
    tx, params = case(name, state_dtype=wanted)
    params, state = walk(tx, params, tx.init(params), STEPS)
    ours.save_state(tmp_path / "a.safetensors", tx, state, params)
    opt = rlx_optim.load(tmp_path / "a.safetensors", engine="reference")
    other = {} if opt.otherwise is None else {"otherwise": rlx_optim.AdamW(**opt.otherwise.hyperparameters())}
    fresh, there = rlx_optim.create(name, engine="reference", **opt.hyperparameters(), **other), start()
    for i in range(STEPS):
        fresh.step_all(there, start(100 + i))
    for k, p in there.items():
        assert relative(np.asarray(params[k]) - start()[k], p - start()[k]) < (5e-3 if name in MATRIX else 1e-3), k
    mine, its = (flatten_components(each._records["w"].state) for each in (opt, fresh))
    assert mine.keys() == its.keys()
    codes = [k for k, v in mine.items() if v.dtype.kind in "iu"]
    assert codes
    assert unequal([mine[k] for k in codes], [its[k] for k in codes]) < 5e-4


@pytest.mark.parametrize("wanted", [*FORMATS, {"m": "int8", "v": "bfloat16"}], ids=str)
def test_state_is_stable_under_jit_scan_and_donation(wanted):
    tx, params = case("adamw", state_dtype=wanted)
    state = tx.init(params)
    assert isinstance(state, ours.RuleState)
    kinds = {name: str(each["w"].dtype) for name, each in state.slots.items()}
    assert kinds == {
        "int8": {"m": "int8", "v": "uint8", "m_scale": "float32", "v_scale": "float32"},
        "bfloat16": {"m": "bfloat16", "v": "bfloat16"},
    }.get(str(wanted), {"m": "int8", "v": "bfloat16", "m_scale": "float32"})
    assert state.slots["m"]["b"].dtype == jnp.float32
    grads = {k: jnp.stack([jnp.asarray(start(100 + i)[k]) for i in range(STEPS)]) for k in params}

    def step(carry, g):
        updates, after = tx.update(g, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), after), None

    scanned = jax.lax.scan(step, (params, state), grads)[0]
    donated = jax.jit(tx.update, donate_argnums=1)
    there, kept = params, tx.init(params)
    for i in range(STEPS):
        updates, kept = donated({k: g[i] for k, g in grads.items()}, kept, there)
        there = optax.apply_updates(there, updates)
    assert jax.tree.structure((there, kept)) == jax.tree.structure(scanned)
    for a, b in zip(jax.tree.leaves((there, kept)), jax.tree.leaves(scanned), strict=True):
        assert a.dtype == b.dtype
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        else:
            assert unequal([a], [b]) < 5e-3


@pytest.mark.parametrize("wanted", FORMATS)
def test_files_go_to_and_fro(wanted, tmp_path):
    """Bit for bit to the same format; decoded and encoded to another; from NumPy's optimizer and back to it."""
    tx, params = case("adamw", state_dtype=wanted)
    params, state = walk(tx, params, tx.init(params), STEPS)
    path = tmp_path / "a.safetensors"
    ours.save_state(path, tx, state, params)
    again = ours.load_state(path, tx, params)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(*map(jax.tree.leaves, (again, state)), strict=True))
    ends = [walk(tx, params, each, 1, STEPS)[0] for each in (state, again)]
    assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, ends), strict=True))
    opt = rlx_optim.load(path)
    assert opt.state_dtype == wanted
    opt.save(tmp_path / "b.safetensors")
    back = ours.load_state(tmp_path / "b.safetensors", tx, params)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (back, state)), strict=True))
    wide, _ = case("adamw")
    with pytest.warns(UserWarning, match=f"state_dtype of '.*' was '{wanted}' and is 'float32' now"):
        plain = ours.load_state(path, wide, params)
    assert {str(v.dtype) for v in jax.tree.leaves(plain.slots)} == {"float32"}
    ours.save_state(tmp_path / "c.safetensors", wide, plain, params)
    with pytest.warns(UserWarning, match="state_dtype"):
        coded = ours.load_state(tmp_path / "c.safetensors", tx, params)
    assert unequal(jax.tree.leaves(coded.slots), jax.tree.leaves(state.slots)) < 1e-3


def test_inside_optaxs_own():
    """chain, masked, multi_transform, inject_hyperparams, MultiSteps, stacked leaves, an empty tree."""
    tx, params = case("adamw", state_dtype="int8")
    want = walk(tx, params, tx.init(params), STEPS)[0]

    def ends(other, steps=STEPS):
        return walk(other, params, other.init(params), steps)[0]

    labels = {"w": "own", "e": "own", "b": "own", "s": "own"}
    made = optax.inject_hyperparams(ours.adamw)(learning_rate=0.02, state_dtype="int8")
    same = [
        optax.chain(optax.identity(), tx),
        optax.masked(tx, True),
        optax.multi_transform({"own": tx}, labels),
        made,
    ]
    for other in same:
        for k, p in ends(other).items():
            np.testing.assert_allclose(p, want[k], rtol=1e-5, atol=1e-6)
    few = optax.MultiSteps(tx, 2)
    state = few.init(params)
    for _ in range(2):
        updates, state = jax.jit(few.update)({k: jnp.asarray(g) for k, g in start(100).items()}, state, params)
    one = walk(tx, params, tx.init(params), 1)[0]
    for k, p in optax.apply_updates(params, updates).items():
        np.testing.assert_allclose(p, one[k], rtol=1e-5, atol=1e-6)
    part = optax.masked(tx, {"w": True, "e": False, "b": True, "s": False})
    assert part.init(params).inner_state.slots["m"]["w"].dtype == jnp.int8
    assert jax.tree.leaves(tx.update({}, tx.init({}), {})[0]) == []
    both = {"w": jnp.stack([params["w"], params["w"]])}
    stacked = ours.muon(0.02, state_dtype="bfloat16", stacked={"w": 1})
    alone = ours.muon(0.02, state_dtype="bfloat16")
    g = jnp.asarray(start(100)["w"])
    _, after = stacked.update({"w": jnp.stack([g, g])}, stacked.init(both), both)
    _, single = alone.update({"w": g}, alone.init({"w": params["w"]}), {"w": params["w"]})
    for k in range(2):
        assert np.array_equal(after.slots["m"]["w"][k], single.slots["m"]["w"])
    assert after.slots["m"]["w"].dtype == jnp.bfloat16


def test_sophias_curvature_is_coded_and_optax_states_are_taken_over():
    tx, params = case("sophia", state_dtype="int8")
    wide, _ = case("sophia")
    ends = [walk(each, params, each.init(params), STEPS) for each in (tx, wide)]
    assert ends[0][1].slots["h"]["w"].dtype == jnp.int8
    gap = np.linalg.norm(ends[0][0]["w"] - ends[1][0]["w"]) / np.linalg.norm(ends[1][0]["w"] - params["w"])
    assert 0 < gap < 0.05
    theirs = optax.adamw(0.02)
    there, kept = walk(theirs, params, theirs.init(params), STEPS)
    mine, _ = case("adamw", state_dtype="int8")
    state = from_optax(mine, kept, there)
    back = to_optax(mine, state, there, theirs.init(there))
    gap = np.linalg.norm(back[0].mu["w"] - kept[0].mu["w"]) / np.linalg.norm(kept[0].mu["w"])
    assert 0 < gap < 0.02


def test_what_is_not_finite_stays_in_its_block():
    tx, params = case("adamw", state_dtype="int8")
    states = []
    for bad in (False, True):
        grads = {k: jnp.asarray(g) for k, g in start(100).items()}
        grads["w"] = grads["w"].at[3, 7].set(jnp.nan) if bad else grads["w"]
        states.append(jax.jit(tx.update)(grads, tx.init(params), params)[1].slots)
    for name in ("m", "v"):
        good, hurt = (np.asarray(each[f"{name}_scale"]["w"]) for each in states)
        assert np.isnan(hurt[3, 0])
        elsewhere = np.ones(hurt.shape, bool)
        elsewhere[3, 0] = False
        assert np.array_equal(good[elsewhere], hurt[elsewhere])
        codes = [np.delete(np.asarray(each[name]["w"]).reshape(-1), np.s_[600:728]) for each in states]
        assert np.array_equal(*codes)


def test_refused_under_optax():
    with pytest.raises(ValueError, match="state_dtype"):
        ours.adamw(0.02, state_dtype="int4")
    with pytest.raises(ValueError, match="state_dtype names 'x', which is no slot of this rule"):
        ours.adamw(0.02, state_dtype={"x": "int8"}).init({"w": jnp.zeros((64, 64))})
    with jax.enable_x64(True), pytest.raises(ValueError, match="AdamW: 'w' is float64, and so is its state"):
        ours.adamw(0.02, state_dtype="int8").init({"w": jnp.zeros((64, 64), jnp.float64)})
