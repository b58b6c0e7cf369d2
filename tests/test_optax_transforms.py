"""The JAX front end under JAX's and optax's transformations; its state; the mask of weight decay."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from helpers import distance, slowly  # noqa: E402
from optax_cases import FACTORIES, FEW, KINDS, QUICK, advance, apart, asarrays, build, jnp, objected, problem, run  # noqa: E402

from rlx_optim import optax as ours  # noqa: E402


# ---- JAX's transformations -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", slowly(FACTORIES, KINDS))
def test_one_trace_serves_every_step_and_rate(name):
    """The rate is an argument of the jitted step; the state keeps its structure, shapes and types."""
    traces = 0

    @jax.jit
    def step(params, state, grads, rate):
        nonlocal traces
        traces += 1
        return advance(build(name, **{**QUICK[name], "learning_rate": rate}), params, state, grads)

    params, grads = problem(steps=3)
    now = asarrays(params)
    state = start = build(name, **QUICK[name]).init(now)
    for t, rate in enumerate((0.02, 0.01, 0.03)):
        now, state = step(now, state, {k: jnp.asarray(g[t]) for k, g in grads.items()}, rate)
    assert traces == step._cache_size() == 1
    assert jax.tree.structure(state) == jax.tree.structure(start)
    assert isinstance(state, tuple)
    assert int(state.count) == 3
    assert all(np.isfinite(p).all() and np.abs(p - params[k]).min() > 0 for k, p in now.items())


@pytest.mark.parametrize(
    "name", ["adamw", "radam", "ademamix", "adopt", "laprop", "lamb", "adafactor", "mars", "sophia", "muon", "soap", "kron_psgd"]
)
def test_vmap_scan_and_cond(name):
    """A batch of problems, each stepped in a scan that skips some steps by lax.cond, ends where each does alone."""
    tx = build(name, **QUICK[name])

    def solve(params, grads, taken):
        def step(carry, now):
            g, take = now
            return jax.lax.cond(take, lambda c: advance(tx, *c, g), lambda c: c, carry), None

        return jax.lax.scan(step, (params, tx.init(params)), (grads, taken))[0]

    taken = jnp.array([True, True, False, True, True])
    params, grads = zip(*(asarrays(problem(steps=5, seed=seed)) for seed in range(3)), strict=True)
    together = [jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (params, grads)]
    after, state = jax.jit(jax.vmap(solve, (0, 0, None)))(*together, taken)
    alone = jax.jit(solve)
    for i in range(3):
        want, _ = alone(params[i], grads[i], taken)
        assert apart({k: v[i] for k, v in after.items()}, want) < 2e-6
    assert state.count.tolist() == [4, 4, 4]


INJECTED = {
    "sgd": ("weight_decay", "momentum"),
    "adam": ("b1", "b2", "eps", "weight_decay"),
    "adamw": ("b1", "b2", "eps", "weight_decay"),
    "nadamw": ("b1", "b2", "eps", "weight_decay"),
    "radam": ("b1", "b2", "eps", "weight_decay"),
    "qhadamw": ("b1", "b2", "eps", "weight_decay", "nu1", "nu2"),
    "stableadamw": ("b1", "b2", "eps", "weight_decay", "clip"),
    "ademamix": ("b1", "b2", "b3", "alpha", "eps", "weight_decay"),
    "adan": ("b1", "b2", "b3", "eps", "weight_decay"),
    "adopt": ("b1", "b2", "eps", "weight_decay", "clip_exp"),
    "laprop": ("b1", "b2", "eps", "weight_decay"),
    "lamb": ("b1", "b2", "eps", "weight_decay"),
    "lars": ("momentum", "weight_decay", "trust_coefficient", "eps"),
    "adafactor": ("decay_rate", "eps", "clipping_threshold", "weight_decay"),
    "lion": ("b1", "b2", "weight_decay"),
    "soap": ("b1", "b2", "eps", "weight_decay", "precondition_frequency"),
    "kron_psgd": ("b1", "weight_decay", "precond_lr"),
    "muon": ("beta", "eps", "weight_decay"),
    "sophia": ("b1", "b2", "eps", "weight_decay", "gamma", "clip_threshold", "update_interval"),
    "mars": ("b1", "b2", "eps", "weight_decay", "gamma", "clip_norm"),
    "prodigy": ("b1", "b2", "eps", "weight_decay", "estim_lr0", "estim_lr_coef"),
    "normuon": ("momentum", "beta2", "weight_decay"),
    "scion": ("momentum", "scale", "weight_decay"),
    "schedulefreeadamw": ("b1", "b2", "eps", "weight_decay", "r", "weight_lr_power"),
    "schedulefreesgd": ("momentum", "weight_decay", "r", "weight_lr_power"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_inject_hyperparams(name):
    """Every real hyperparameter is injected by default, and is then as good as a constant; a new rate needs no new trace."""
    keywords = {**QUICK[name], **({"max_precond_dim": 0} if name == "soap" else {})}  # no basis that rounding decides
    static = ("max_precond_dim",) if name == "soap" else ()
    plain = build(name, **keywords)
    injected = optax.inject_hyperparams(getattr(ours, name), static_args=static)(**keywords)
    if name == "sophia":
        injected = objected(injected)

    @jax.jit
    def both(params, states, grads):
        return advance(plain, params, states[0], grads), advance(injected, params, states[1], grads)

    params, grads = problem(steps=3)
    params = asarrays(params)
    states = plain.init(params), injected.init(params)
    assert {"learning_rate", *INJECTED[name]} <= states[1].hyperparams.keys()
    for t in range(3):
        (want, first), (got, second) = both(params, states, {k: jnp.asarray(g[t]) for k, g in grads.items()})
        moved = {k: np.abs(want[k] - params[k]).max() for k in want}
        assert all(np.abs(got[k] - want[k]).max() <= 2e-5 * moved[k] + 1e-7 for k in want)
        params, states = want, (first, second)
    values = states[1].hyperparams
    values.update({k: jnp.zeros_like(values[k]) for k in ("learning_rate", "weight_decay")})
    _, (got, _) = both(params, states, {k: jnp.asarray(g[0]) for k, g in grads.items()})
    if ours.known()[name].evaluated:
        return  # the average still moves
    mine = ["w"] if name in ("muon", "normuon", "mars") else list(params)  # the rest has its own rate
    assert apart({k: got[k] for k in mine}, {k: params[k] for k in mine}) < 1e-7
    assert both._cache_size() == 1


def test_injected_schedule():
    rate = optax.linear_schedule(0.05, 0.01, 20)
    params, grads = problem(steps=20)
    got = run(optax.inject_hyperparams(ours.adamw)(learning_rate=rate), params, grads)
    assert distance(got, run(ours.adamw(rate), params, grads), params) < 1e-6


def test_multi_steps():
    """Two gradients in one step are a step by their mean."""
    params, grads = problem(steps=8)
    got = run(optax.MultiSteps(ours.adamw(0.02), 2), params, grads)
    means = {k: g.reshape(4, 2, *g.shape[1:]).mean(1) for k, g in grads.items()}
    assert distance(got, run(ours.adamw(0.02), params, means), params) < 1e-5


def test_chain():
    """Behind a clip, and before a scale."""
    params, grads = problem(steps=6)
    got = run(optax.chain(optax.clip_by_global_norm(0.5), ours.adamw(0.02, weight_decay=0.1), optax.scale(0.5)), params, grads)
    norms = np.sqrt(sum((g.reshape(6, -1) ** 2).sum(1) for g in grads.values()))
    clipped = {k: g * np.minimum(1, 0.5 / norms).reshape(-1, *[1] * (g.ndim - 1)).astype(np.float32) for k, g in grads.items()}
    assert norms.min() > 0.5
    assert distance(got, run(ours.adamw(0.01, weight_decay=0.1), params, clipped), params) < 1e-5


def test_masked():
    """What is masked out is left to others: its gradient passes through, and no state is kept for it."""
    params, grads = problem()
    params, grads = asarrays(params), {k: jnp.asarray(g[0]) for k, g in grads.items()}
    tx = optax.masked(ours.muon(0.02), {"w": True, "b": False, "s": False})
    state = tx.init(params)
    updates, _ = tx.update(grads, state, params)
    alone = ours.muon(0.02)
    want, _ = alone.update({"w": grads["w"]}, alone.init({"w": params["w"]}), {"w": params["w"]})
    assert apart(updates["w"], want["w"]) < 1e-7
    assert apart([updates["b"], updates["s"]], [grads["b"], grads["s"]]) == 0
    assert len(jax.tree.leaves(state)) == 2  # the count, and m of w


@pytest.mark.parametrize("combine", ["partition", "multi_transform"])
def test_partition(combine):
    params, grads = problem(steps=5)
    tx = getattr(optax, combine)({"hidden": ours.muon(0.02), "rest": ours.lion(0.01)}, {"w": "hidden", "b": "rest", "s": "rest"})
    got = run(tx, params, grads)
    pick = lambda tree, *keys: {k: tree[k] for k in keys}  # noqa: E731
    want = run(ours.muon(0.02), pick(params, "w"), pick(grads, "w"))
    want |= run(ours.lion(0.01), pick(params, "b", "s"), pick(grads, "b", "s"))
    assert apart(got, want) < 1e-6


# ---- state ----------------------------------------------------------------------------------------------------------------
def described_types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float32 beside float64"])
@pytest.mark.parametrize("name", FACTORIES)
def test_dtypes(name, dtype):
    """Parameters keep their dtype, state is float32 (float64), and a step changes no shape, dtype or weak type."""
    own = dtype.split()[0]
    wide = "float64" if own == "float64" else "float32"
    with jax.enable_x64("float64" in dtype):
        rates = [0.01, lambda count: jnp.asarray(0.01, float) * count]  # the second is float64 where there is one
        for tx in [build(name, learning_rate=rate) for rate in rates]:
            shapes = {**FEW, "empty": (0, 3), "cube": (2, 3, 4)}
            params = {k: jax.ShapeDtypeStruct(s, own) for k, s in shapes.items()}
            state = jax.eval_shape(tx.init, params)
            updates, after = jax.eval_shape(tx.update, params, state, params)
            assert described_types(after) == described_types(state)
            assert {k: (u.shape, u.dtype) for k, u in updates.items()} == {k: (p.shape, p.dtype) for k, p in params.items()}
            assert {str(x.dtype) for x in jax.tree.leaves((state.slots, state.factors))} <= {wide}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_half_precision_is_storage_alone(name, dtype):
    """Steps are taken in float32: the update is that of the widened numbers, rounded."""
    params, grads = problem(steps=3)
    half = asarrays(params, dtype)
    tx = build(name, **QUICK[name], rounding="nearest")
    state, update = tx.init(half), jax.jit(tx.update)
    for t in range(3):
        g = {k: jnp.asarray(each[t], dtype) for k, each in grads.items()}
        got, after = update(g, state, half)
        want, _ = update(asarrays(g, "float32"), state, asarrays(half, "float32"))
        state, half = after, optax.apply_updates(half, got)
        assert apart(asarrays(got, "float32"), asarrays(asarrays(want, dtype), "float32")) < 1e-6
    assert all(p.dtype == dtype for p in half.values())


def test_updates_are_not_rounded_to_the_parameter():
    """A small step from a large parameter is exact: what is applied is the caller's choice."""
    params, grads = {"p": jnp.full(4, 1000.0)}, {"p": jnp.full(4, 1.0)}
    for name in ("sgd", "adam", "lion"):
        tx = getattr(ours, name)(1e-6, **({"weight_decay": 0.0} if name == "lion" else {}))
        updates, _ = tx.update(grads, tx.init(params), params)
        assert np.allclose(updates["p"], -1e-6, rtol=1e-6), name


def test_state_mirrors_the_parameters():
    """Slots are trees like the parameters, so sharding rules and checkpoints apply to them by path."""
    params, _ = problem({"layer": (4, 3), "norm": (3,)})
    nested = {"params": params}
    state = ours.adamw(0.01).init(asarrays(nested))
    assert jax.tree.structure(state.slots["m"]) == jax.tree.structure(nested)
    assert state._fields == ("count", "slots", "factors", "counters")
    doubled = optax.tree.map_params(ours.adamw(0.01), lambda x: x + 1, state)
    assert apart(doubled.slots["m"], jax.tree.map(np.ones_like, nested)) == 0
    assert int(doubled.count) == 0


@pytest.mark.parametrize("name", FACTORIES)
def test_optax_maps_over_the_state(name):
    """optax.tree.map_params asks init for a state of no leaves, and looks for its parts in that of the parameters."""
    tx = build(name, **QUICK[name])
    for shapes in ({"layer": (4, 3), "norm": (3,)}, {"norm": (3,)}):
        state = tx.init(asarrays(problem(shapes)[0]))
        more = optax.tree.map_params(tx, lambda x: x + 1, state)
        assert jax.tree.structure(more) == jax.tree.structure(state)
        mirrored, factors = jax.tree.map(lambda x: x + 1, (state.slots, state.factors))
        assert apart(more, state._replace(slots=mirrored, factors=factors)) == 0  # not the counts


# ---- weight decay's mask --------------------------------------------------------------------------------------------------
def not_vectors(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


@pytest.mark.parametrize("mask", [{"w": True, "b": False, "s": False}, not_vectors], ids=["tree", "callable"])
@pytest.mark.parametrize(
    "name", ["sgd", "adam", "adamw", "stableadamw", "adan", "laprop", "lamb", "lars", "adafactor", "sophia", "mars", "muon"]
)
def test_mask(name, mask):
    """Masked leaves step as with weight_decay=0, the others as without a mask."""
    keywords = {**QUICK[name], **({"otherwise": ours.adamw(0.01, weight_decay=0.5)} if name in ("muon", "mars") else {})}
    params, grads = problem()
    params, grads = asarrays(params), {k: jnp.asarray(g[0]) for k, g in grads.items()}

    def updates(**more):
        tx = build(name, **{**keywords, **more})
        return tx.update(grads, tx.init(params), params)[0]

    got, full = updates(weight_decay=0.5, mask=mask), updates(weight_decay=0.5)
    bare = {"otherwise": ours.adamw(0.01, weight_decay=0.0)} if name in ("muon", "mars") else {}
    none = updates(weight_decay=0.0, **bare)
    assert apart(got["w"], full["w"]) == 0
    assert apart([got["b"], got["s"]], [none["b"], none["s"]]) == 0
    assert np.abs(full["w"] - none["w"]).max() > 1e-4


def test_mask_may_be_a_prefix():
    params = {"a": {"x": jnp.ones(3), "y": jnp.ones((2, 2))}, "b": jnp.ones(2)}
    tx = ours.adamw(0.1, weight_decay=0.5, mask={"a": False, "b": True})
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert apart(updates["a"], jax.tree.map(np.zeros_like, params["a"])) == 0
    assert np.allclose(updates["b"], -0.05)
