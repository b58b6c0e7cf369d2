"""The JAX front end: routing, stacked layers, Sophia, refusals, sharded arrays."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")


from optax_cases import (  # noqa: E402
    FACTORIES,
    MATRIX,
    QUICK,
    SHARDED,
    TITLES,
    advance,
    apart,
    asarrays,
    build,
    curvature,
    jnp,
    objective,
    problem,
    rolled,
    run,
    sharded,
)

import rlx_optim  # noqa: E402
from rlx_optim import optax as ours  # noqa: E402

# ---- routing --------------------------------------------------------------------------------------------------------------
MODEL = {
    "params": {
        "embed": {"embedding": (50, 8)},
        "blocks_0": {"multi_head_attention": {"query": {"kernel": (8, 8), "bias": (8,)}}, "mlp": {"output": {"kernel": (8, 8)}}},
        "norm": {"scale": (8,)},
        "lm_head": {"kernel": (8, 50)},
    }
}


def model():
    return jax.tree.map(lambda shape: jnp.full(shape, 0.1), MODEL, is_leaf=lambda x: isinstance(x, tuple))


def rules_of(report):
    """path -> (rule, why)"""
    rows = [line.split(maxsplit=3) for line in report.splitlines()[1:]]
    return {row[0]: (row[2], *row[3:]) for row in rows}


HEAD, EMBEDDING = "params.lm_head.kernel", "params.embed.embedding"
QUERY, OUTPUT = "params.blocks_0.multi_head_attention.query.kernel", "params.blocks_0.mlp.output.kernel"


def test_routing_report():
    """Embeddings, heads and what is no matrix go to `otherwise`, and the report says why."""
    report = ours.routing_report("muon", model())
    assert report.splitlines()[0].split() == ["parameter", "shape", "rule", "why"]
    assert "50×8" in report
    assert rules_of(report) == {
        EMBEDDING: ("AdamW", "embedding (by name)"),
        HEAD: ("AdamW", "output head (by name)"),
        QUERY: ("Muon",),
        OUTPUT: ("Muon",),
        QUERY.replace("kernel", "bias"): ("AdamW", "1 dimensions; Muon takes 2 or more"),
        "params.norm.scale": ("AdamW", "1 dimensions; Muon takes 2 or more"),
    }
    assert rules_of(ours.routing_report("mars", model()))[HEAD][0] == "AdamW"
    for tx in (ours.muon(0.02), optax.chain(optax.clip(1.0), ours.muon(0.02)), optax.MultiSteps(ours.muon(0.02), 2)):
        assert ours.routing_report(tx, model()) == report
    with pytest.raises(TypeError, match="route beside a transformation, which has its own"):
        ours.routing_report(ours.muon(0.02), model(), route=None)
    with pytest.raises(TypeError, match="tx must be made by rlx_optim"):
        ours.routing_report(optax.adam(1e-3), model())
    assert {rule for rule, *_ in rules_of(ours.routing_report("adamw", model())).values()} == {"AdamW"}


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("wte.w", False), ("model.embed_tokens.weight", False), ("Embed_0.embedding", False), ("pos_embedding", False),
        ("head.kernel", False), ("head_0.kernel", False), ("classifier.kernel", False), ("decoder.logits_dense.kernel", False),
        ("output.kernel", False), ("policy_head.kernel", False), ("h.3.attn.heads.kernel", True), ("multi_head_attention.query.kernel", True),
        ("layers.1.output.kernel", True), ("embedder_mlp.kernel", True), ("member.kernel", True), ("Dense_2.kernel", True),
    ],
)  # fmt: skip
def test_names(path, hidden):
    """Heads are whole parts of a path; a hidden matrix is not taken for one."""
    assert (rules_of(ours.routing_report("muon", {path: jnp.ones((4, 4))}))[path][0] == "Muon") is hidden


def test_routed_steps():
    """Each leaf steps by the rule it was sent to, with that rule's own rate."""
    params = model()
    grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape), params)
    every, other = ours.muon(0.02, route=lambda path, leaf: True), ours.adamw(0.005)
    own, rest = (tx.update(grads, tx.init(params), params)[0]["params"] for tx in (every, other))
    tx = ours.muon(0.02, otherwise=other)
    updates, state = tx.update(grads, tx.init(params), params)
    updates = updates["params"]
    assert apart(updates["blocks_0"]["mlp"], own["blocks_0"]["mlp"]) < 1e-7
    assert all(apart(updates[part], rest[part]) < 1e-7 for part in ("embed", "norm", "lm_head"))
    assert apart(own["lm_head"], rest["lm_head"]) > 1e-3
    assert isinstance(state.slots["v"]["params"]["blocks_0"]["mlp"]["output"]["kernel"], optax.MaskedNode)


def test_route_is_the_users_word():
    """True keeps a leaf that its name would send away, False sends it, None decides as usual; shapes have the last word."""
    asked = {}

    def route(path, leaf):
        asked[path] = leaf.shape
        return {HEAD: True, OUTPUT: False, "params.norm.scale": True}.get(path)

    found = rules_of(ours.routing_report("muon", model(), route=route))
    assert found[HEAD] == ("Muon",)
    assert found[OUTPUT] == ("AdamW", "route")
    assert found[QUERY] == ("Muon",)
    assert found["params.norm.scale"] == ("AdamW", "1 dimensions; Muon takes 2 or more")
    assert asked[HEAD] == (8, 50)


def test_otherwise_follows_its_own_schedule():
    """`otherwise` may be one of these transformations, so that its rate can be a schedule."""
    rate = optax.linear_schedule(0.1, 0.0, 10)
    params, grads = problem(steps=10)
    got = run(ours.muon(0.02, otherwise=ours.adamw(rate, weight_decay=0.1)), params, grads)
    want = run(ours.adamw(rate, weight_decay=0.1), params, grads)
    assert apart([got["b"], got["s"]], [want["b"], want["s"]]) < 1e-6


# ---- stacked layers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "layers", "shape"),
    [
        ("muon", (3,), (4, 6)), ("muon", (1,), (4, 6)), ("muon", (2, 2), (4, 6)), ("mars", (3,), (4, 6)), ("kron_psgd", (2,), (4, 6)),
        ("soap", (3,), (4, 6)), ("soap", (1,), (4, 6)), ("soap", (2,), (2, 3, 4)), ("soap", (2,), (5,)),
    ],
)  # fmt: skip
def test_stacked_layers_are_separate_tensors(name, layers, shape):
    """(L, n, m) under `stacked` steps as L matrices do, those of SOAP and KronPSGD with factors and noise of their own."""
    keywords = {"soap": {"max_precond_dim": 4, "precondition_frequency": 2}, "mars": {"clip_norm": 0.1}}.get(name, {})
    params, grads = problem({f"blocks.w[{i}]": shape for i in range(math.prod(layers))}, steps=6)
    tree = {"blocks": {"w": np.stack(list(params.values())).reshape(*layers, *shape)}}
    slopes = {"blocks": {"w": np.stack(list(grads.values()), 1).reshape(6, *layers, *shape)}}
    tx = build(name, learning_rate=0.02, stacked={"*blocks*": len(layers)}, **keywords)
    after, state = jax.jit(functools.partial(rolled, tx))(asarrays(tree), asarrays(slopes))
    want = run(build(name, learning_rate=0.02, **keywords), params, grads)
    assert apart(after["blocks"]["w"].reshape(-1, *shape), np.stack([want[k] for k in params])) < 1e-6
    assert all(factor.shape[: len(layers)] == layers for factor in jax.tree.leaves(state.factors))


def test_without_stacked_a_stack_is_one_tensor():
    params, grads = problem({"w": (3, 4, 6)}, steps=2)
    one, three = (run(ours.muon(0.02, stacked=stacked), params, grads)["w"] for stacked in (None, {"w": 1}))
    assert np.abs(one - three).max() > 1e-3


def test_stacked_vectors_go_to_otherwise():
    found = rules_of(
        ours.routing_report("muon", {"blocks": {"w": jnp.ones((3, 4, 4)), "b": jnp.ones((3, 4))}}, stacked={"blocks.*": 1})
    )
    assert found == {"blocks.b": ("AdamW", "1 dimensions; Muon takes 2 or more"), "blocks.w": ("Muon",)}


# ---- Sophia -----------------------------------------------------------------------------------------------------------------
def test_sophia_estimates_every_interval():
    """The Hessian's diagonal is averaged in on steps 1, 1 + interval, … and used in the same step."""
    params = {"x": jnp.linspace(-1.0, 1.0, 6)}
    tx = build("sophia", learning_rate=1e-3, update_interval=3, b2=0.9)
    state, step, seen = tx.init(params), jax.jit(functools.partial(advance, tx)), []
    for _ in range(7):
        params, state = step(params, state, jax.grad(objective)(params))
        seen.append(np.asarray(state.slots["h"]["x"]))
    diagonal = curvature((6,))
    for t, h in enumerate(seen, 1):
        assert np.allclose(h, (1 - 0.9 ** math.ceil(t / 3)) * diagonal, rtol=1e-5), t


def test_sophia_hutchinson():
    """For a Hessian that is not diagonal the estimate is right on average, differs from step to step, and is the seed's alone."""
    A = np.random.default_rng(0).standard_normal((5, 5))
    A = jnp.asarray(A @ A.T, jnp.float32)

    def final(seed, steps=400):
        tx = ours.sophia(0.0, b2=0.0, update_interval=1, seed=seed, weight_decay=0.0)
        p = jnp.zeros(5)

        def step(state, _):
            _, state = tx.update(jnp.zeros(5), state, p, obj_fn=lambda x: 0.5 * x @ A @ x)
            return state, state.slots["h"]

        return np.asarray(jax.jit(lambda: jax.lax.scan(step, tx.init(p), length=steps)[1])())

    first, again, other = final(1), final(1), final(2)
    assert np.abs(first.mean(0) - np.diag(A)).max() < 0.2 * np.diag(A).max()
    assert np.ptp(first, 0).min() > 0.1
    assert (first == again).all()
    assert (first != other).any()


# ---- refusals ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FACTORIES)
def test_refuses(name):
    """No parameters, a bad number or an unknown keyword: an error that says what and where."""
    factory, title = getattr(ours, name), TITLES[name]
    params = asarrays(problem()[0])
    tx = build(name, **QUICK[name])
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=rf"{title}: lr must be .* got -1"):
        factory(-1.0)
    with pytest.raises(ValueError, match=rf"{title}: weight_decay must be .* got nan"):
        factory(1e-3, weight_decay=math.nan)
    with pytest.raises(TypeError, match=rf"{name}: .*'wieght_decay'.*weight_decay"):
        factory(1e-3, wieght_decay=0.1)
    if name != "adafactor":
        with pytest.raises(TypeError, match=rf"{name}: .*'learning_rate'"):
            factory()
    with pytest.raises(ValueError, match=r"[Ss]tructure|[Kk]ey"):
        tx.update({"w": params["w"]}, tx.init(params), params)
    assert "Formulas" in factory.__doc__


REFUSALS = [
    (TypeError, "muon: otherwise must be like", lambda: ours.muon(0.1, otherwise="adamw")),
    (TypeError, "mars: otherwise must be like", lambda: ours.mars(0.1, otherwise=optax.adamw(0.1))),
    (ValueError, "muon: otherwise must be one rule", lambda: ours.muon(0.1, otherwise=rlx_optim.Muon())),
    (ValueError, "muon: otherwise must be one rule", lambda: ours.muon(0.1, otherwise=ours.muon(0.1))),
    (ValueError, "muon: otherwise must be one rule", lambda: ours.muon(0.1, otherwise=ours.sophia(0.1))),
    (ValueError, "without groups or a mask", lambda: ours.muon(0.1, otherwise=ours.adamw(0.1, mask={"w": True}))),
    (ValueError, "without groups or a mask", lambda: ours.muon(0.1, otherwise=rlx_optim.AdamW(groups=[{"match": "b", "lr": 0.1}]))),
    (ValueError, "schedules only as", lambda: ours.muon(0.1, otherwise=rlx_optim.AdamW(lr=lambda t: 0.1))),
    (ValueError, "'b' has shape.*otherwise", lambda: ours.muon(0.1, otherwise=None).init({"b": jnp.ones(3)})),
    (ValueError, "no otherwise", lambda: ours.muon(0.1, otherwise=None, route=lambda *_: False).init({"b": jnp.ones((3, 3))})),
    (TypeError, "route must be a dict of patterns or a function", lambda: ours.muon(0.1, route="a")),
    (TypeError, "stacked must be a dict", lambda: ours.soap(0.1, stacked="blocks")),
    (ValueError, "Adam: betas must be", lambda: ours.adam(0.1, b2=1.0)),
    (ValueError, "SGD: nesterov", lambda: ours.sgd(0.1, nesterov=True)),
    (ValueError, "NAdamW: convention must be", lambda: ours.nadamw(0.1, convention="keras")),
    (TypeError, "unexpected|positional", lambda: ours.adamw(0.1, 0.9, 0.99, 1e-8, 0.0)),  # optax's fifth is eps_root
    (TypeError, "rout is called route here", lambda: ours.routing_report("muon", {}, rout=None)),
    (ValueError, "obj_fn", lambda: ours.sophia(0.1).update({}, ours.sophia(0.1).init({}), {})),
    (TypeError, "SOAP: max_precond_dim cannot be traced.*static_args", lambda: optax.inject_hyperparams(ours.soap)(0.1, max_precond_dim=3).init({})),
    (TypeError, "AdamW: mask must be.*static_args", lambda: optax.inject_hyperparams(ours.adamw)(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)).init({})),
    (TypeError, "KronPSGD: seed cannot be traced.*static_args", lambda: optax.inject_hyperparams(ours.kron_psgd)(0.1, seed=3).init({})),
    (TypeError, "Sophia: seed must be an integer", lambda: optax.inject_hyperparams(ours.sophia)(0.1, seed=3).init({})),
    (ValueError, "Sophia: update_interval must be an integer >= 1, got 0", lambda: ours.sophia(0.1, update_interval=0)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS, ids=[row[1] for row in REFUSALS])
def test_refusals(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_sharded():
    """Rows over four host devices: the same steps, for all."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    paths = os.pathsep.join([str(Path(rlx_optim.__file__).parent.parent), *sys.path])
    script = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert script.returncode == 0, script.stderr[-2000:]
    found = json.loads(script.stdout.splitlines()[-1])
    assert found.keys() == set(SHARDED)
    assert {name: gap for name, (gap, *_) in found.items() if gap > 1e-6} == {}
    assert all(devices == 4 for _, devices, _, _ in found.values())
    assert not any(replicated for name, (_, _, replicated, _) in found.items() if name not in MATRIX)
    assert {name: aside for name, (*_, aside) in found.items() if any(aside)} == {}


if __name__ == "__main__":
    sharded()
