"""The JAX front end is the reference, and optax where that computes the same."""

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from helpers import copies, distance  # noqa: E402
from optax_cases import FACTORIES, MATRIX, TITLES, build, curvature, jnp, objected, problem, rest, run  # noqa: E402

import rlx_optim  # noqa: E402
from rlx_optim import optax as ours  # noqa: E402
from rlx_optim.spec import MODIFIERS  # noqa: E402

SHAPES = {"w": (24, 16), "b": (37,), "s": ()}
MATRICES = {"tall": (24, 7), "wide": (6, 30), "b": (5,), "c": (4, 3, 3, 2)}
STEPS = 100


# ---- equal to the reference -----------------------------------------------------------------------------------------------
#: factory, its keywords, the same for the named API
REFERENCE = [
    ("sgd", {"learning_rate": 0.05}, {"lr": 0.05}),
    ("sgd", {"learning_rate": 0.05, "weight_decay": 0.1}, {"lr": 0.05, "weight_decay": 0.1}),
    ("sgd", {"learning_rate": 0.02, "momentum": 0.9, "dampening": 0.5}, {"lr": 0.02, "momentum": 0.9, "dampening": 0.5}),
    ("sgd", {"learning_rate": 0.02, "momentum": 0.9, "nesterov": True}, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    ("adam", {"learning_rate": 0.01}, {"lr": 0.01}),
    ("adam", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    ("adam", {"learning_rate": 0.01, "b2": 0.9, "amsgrad": True}, {"lr": 0.01, "betas": (0.9, 0.9), "amsgrad": True}),
    ("adamw", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.99, "weight_decay": 0.1}, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}),
    ("adamw", {"learning_rate": 0.01, "b1": 0.0, "amsgrad": True}, {"lr": 0.01, "betas": (0.0, 0.999), "weight_decay": 1e-4, "amsgrad": True}),
    ("nadamw", {"learning_rate": 0.01}, {"lr": 0.01, "weight_decay": 1e-4}),
    ("nadamw", {"learning_rate": 0.01, "convention": "torch", "momentum_decay": 0.1}, {"lr": 0.01, "weight_decay": 1e-4, "convention": "torch", "momentum_decay": 0.1}),
    ("nadamw", {"learning_rate": 0.01, "convention": "algoperf"}, {"lr": 0.01, "weight_decay": 1e-4, "convention": "algoperf"}),
    ("radam", {"learning_rate": 0.01}, {"lr": 0.01, "convention": "paper"}),
    ("radam", {"learning_rate": 0.01, "b2": 0.9, "convention": "torch", "weight_decay": 0.1, "decoupled_weight_decay": True},
     {"lr": 0.01, "betas": (0.9, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("qhadamw", {"learning_rate": 0.01}, {"lr": 0.01}),
    ("qhadamw", {"learning_rate": 0.01, "b1": 0.9, "b2": 0.99, "nu1": 0.5, "nu2": 0.6}, {"lr": 0.01, "betas": (0.9, 0.99), "nus": (0.5, 0.6)}),
    ("stableadamw", {"learning_rate": 0.01}, {"lr": 0.01}),
    ("stableadamw", {"learning_rate": 0.01, "b2": 0.9, "clip": 0.5, "convention": "first"}, {"lr": 0.01, "betas": (0.9, 0.9), "clip": 0.5, "convention": "first"}),
    ("ademamix", {"learning_rate": 0.01}, {"lr": 0.01, "alpha": 5.0}),
    ("ademamix", {"learning_rate": 0.01, "b3": 0.999, "alpha": 2.0, "weight_decay": 0.1, "alpha_warmup": 40, "beta3_warmup": 60},
     {"lr": 0.01, "betas": (0.9, 0.999, 0.999), "weight_decay": 0.1, "alpha_warmup": 40, "beta3_warmup": 60}),
    ("adan", {"learning_rate": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.1}),
    ("adan", {"learning_rate": 0.01, "b1": 0.9, "b2": 0.8, "b3": 0.95, "no_prox": True, "max_grad_norm": 1.0, "weight_decay": 0.1},
     {"lr": 0.01, "betas": (0.9, 0.8, 0.95), "no_prox": True, "max_grad_norm": 1.0, "weight_decay": 0.1}),
    ("adopt", {"learning_rate": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.1}),
    ("adopt", {"learning_rate": 0.01, "b2": 0.9, "eps": 0.1, "clip_exp": 0.1, "decouple": True, "weight_decay": 0.1},
     {"lr": 0.01, "betas": (0.9, 0.9), "eps": 0.1, "clip_exp": 0.1, "decouple": True, "weight_decay": 0.1}),
    ("laprop", {"learning_rate": 0.01, "weight_decay": 0.01}, {"lr": 0.01, "weight_decay": 0.01}),
    ("laprop", {"learning_rate": 0.01, "b1": 0.8, "weight_decay": 0.1, "convention": "timm"}, {"lr": 0.01, "betas": (0.8, 0.999), "weight_decay": 0.1, "convention": "timm"}),
    ("lars", {"learning_rate": 5.0, "weight_decay": 0.1}, {"lr": 5.0, "weight_decay": 0.1}),
    ("lars", {"learning_rate": 5.0, "nesterov": True, "eps": 0.1, "convention": "timm", "weight_decay": 0.1}, {"lr": 5.0, "nesterov": True, "eps": 0.1, "convention": "timm", "weight_decay": 0.1}),
    ("lars", {"learning_rate": 0.05, "trust_coefficient": None}, {"lr": 0.05, "trust_coefficient": None}),
    ("lamb", {"learning_rate": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.1}),
    ("lamb", {"learning_rate": 0.01, "trust_clip": 0.7, "bias_correction": False}, {"lr": 0.01, "weight_decay": 0.0, "trust_clip": 0.7, "bias_correction": False}),
    ("adafactor", {}, {}),
    ("adafactor", {"learning_rate": 0.02, "decay_rate": 0.5, "momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.02, "beta2_decay": -0.5, "beta1": 0.9, "weight_decay": 0.1}),
    ("adafactor", {"learning_rate": 0.02, "clipping_threshold": None, "multiply_by_parameter_scale": False}, {"lr": 0.02, "clip_threshold": math.inf, "scale_parameter": False}),
    ("adafactor", {"learning_rate": 0.02, "convention": "torch"}, {"lr": 0.02, "convention": "torch"}),
    ("lion", {"learning_rate": 1e-3, "b1": 0.8, "weight_decay": 0.1}, {"lr": 1e-3, "betas": (0.8, 0.99), "weight_decay": 0.1}),
    ("sophia", {"learning_rate": 1e-2}, {"lr": 1e-2, "eps": 1e-8, "weight_decay": 1e-4}),
    ("sophia", {"learning_rate": 1e-2, "b1": 0.9, "b2": 0.5, "gamma": 0.1, "clip_threshold": 0.5}, {"lr": 1e-2, "betas": (0.9, 0.5), "eps": 1e-8, "weight_decay": 1e-4, "gamma": 0.1, "clip": 0.5}),
    ("mars", {"learning_rate": 0.01, "gamma": 0.3}, {"lr": 0.01, "gamma": 0.3}),
    ("mars", {"learning_rate": 0.01, "clip_norm": None, "otherwise": None}, {"lr": 0.01, "clip_norm": None, "otherwise": None}),
    ("mars", {"learning_rate": 1e-3, "variant": "lion", "otherwise": None}, {"lr": 1e-3, "variant": "lion", "otherwise": None}),
    ("muon", {"learning_rate": 0.02}, {"lr": 0.02}),
    ("muon", {"learning_rate": 0.02, "beta": 0.8, "nesterov": False, "ns_steps": 3, "weight_decay": 0.1, "convention": "moonlight"},
     {"lr": 0.02, "momentum": 0.8, "nesterov": False, "ns_steps": 3, "weight_decay": 0.1, "convention": "moonlight"}),
    ("muon", {"learning_rate": 0.005, "convention": "rlx"}, {"lr": 0.005, "convention": "rlx"}),
    ("normuon", {"learning_rate": 0.02}, {"lr": 0.02}),
    ("normuon", {"learning_rate": 0.02, "momentum": 0.8, "beta2": 0.5, "nesterov": True, "ns_steps": 3, "weight_decay": 0.1, "convention": "dion"},
     {"lr": 0.02, "momentum": 0.8, "beta2": 0.5, "nesterov": True, "ns_steps": 3, "weight_decay": 0.1, "convention": "dion"}),
    ("normuon", {"learning_rate": 0.02, "weight_decay": 5.0, "convention": "speedrun"}, {"lr": 0.02, "weight_decay": 5.0, "convention": "speedrun"}),
    ("scion", {"learning_rate": 0.02}, {"lr": 0.02}),
    ("scion", {"learning_rate": 0.02, "momentum": 0.1, "norm": "sign", "scale": 3.0, "unconstrained": True},
     {"lr": 0.02, "momentum": 0.1, "norm": "sign", "scale": 3.0, "unconstrained": True}),
    ("scion", {"learning_rate": 0.02, "norm": "rownorm", "transpose": True}, {"lr": 0.02, "norm": "rownorm", "transpose": True}),
    ("schedulefreeadamw", {"learning_rate": 0.01}, {"lr": 0.01}),
    ("schedulefreeadamw", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.99, "weight_decay": 0.1, "warmup_steps": 10, "r": 1.0, "weight_lr_power": 1.0},
     {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1, "warmup_steps": 10, "r": 1.0, "weight_lr_power": 1.0}),
    ("schedulefreesgd", {"learning_rate": 0.05, "momentum": 0.8, "weight_decay": 0.1, "warmup_steps": 10},
     {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "warmup_steps": 10}),
    # every rotated Gram matrix has full rank from the first gradient on, so its eigenvectors are determined
    ("soap", {"learning_rate": 0.01, "max_precond_dim": 6}, {"lr": 0.01, "max_precond_dim": 6}),
    ("soap", {"learning_rate": 0.01, "max_precond_dim": 6, "merge_dims": True, "precondition_frequency": 3, "shampoo_beta": 0.8, "weight_decay": 0.1},
     {"lr": 0.01, "max_precond_dim": 6, "merge_dims": True, "precondition_frequency": 3, "shampoo_beta": 0.8, "weight_decay": 0.1}),
    ("kron_psgd", {"learning_rate": 0.01}, {"lr": 0.01}),
    ("kron_psgd", {"learning_rate": 0.01, "memory_save_mode": "one_diag", "preconditioner_update_probability": 0.3, "weight_decay": 0.1, "seed": 7},
     {"lr": 0.01, "memory_save_mode": "one_diag", "preconditioner_update_probability": 0.3, "weight_decay": 0.1, "seed": 7}),
]  # fmt: skip


def described(row):
    return row[0] + "-" + (",".join(f"{k}={v}" for k, v in row[1].items() if k != "learning_rate") or "default").replace(" ", "")


@pytest.mark.filterwarnings("ignore:Sophia")
@pytest.mark.parametrize(("name", "keywords", "settings"), REFERENCE, ids=map(described, REFERENCE))
def test_equals_reference(name, keywords, settings):
    """A hundred steps end where the named API ends on the reference engine."""
    shapes = (
        MATRICES
        if name in ("muon", "normuon", "scion", "soap", "adafactor")
        else {"w": (7, 5), "b": (6,)}
        if name == "kron_psgd"
        else SHAPES
    )
    params, grads = problem(shapes, STEPS)
    opt, want = getattr(rlx_optim, TITLES[name])(engine="reference", **settings), copies(params)
    for t in range(STEPS):
        if name == "sophia" and t % 10 == 0:
            for k in want:
                opt.update_hessian(k, curvature(want[k].shape))
        opt.step_all(want, {k: np.asarray(g[t]) for k, g in grads.items()})
    assert distance(run(build(name, **keywords), params, grads), want, params) < (1e-3 if name in MATRIX else 2e-5)


def test_positions_are_those_of_optax():
    """What optax takes by position after the learning rate we take at the same place, or by keyword alone."""
    peers = {n: getattr(optax, n, None) or getattr(optax.contrib, n, None) for n in FACTORIES}
    for name, peer in peers.items():
        found = [p.name for p in inspect.signature(getattr(ours, name)).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert found[0] == "learning_rate"
        if peer is not None:
            assert found == list(inspect.signature(peer).parameters)[: len(found)], name


def test_the_guide_names_every_factory_and_its_keywords():
    """The table of docs/jax.md, beside what all of them have."""
    text = (Path(__file__).parent.parent / "docs" / "jax.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| .*? \|$", text, re.MULTILINE))
    always = {"learning_rate", "weight_decay", "mask", *MODIFIERS}
    for name in FACTORIES:
        assert {*re.findall(r"`(\w+)`", rows[name])} == {*inspect.signature(getattr(ours, name)).parameters} - always, name


# ---- equal to optax -----------------------------------------------------------------------------------------------------
# Not compared, because the rule is another one: adam(amsgrad) keeps the maximum of the uncorrected v (optax.amsgrad of the
# corrected one); muon's Nesterov form (optax corrects m and g by different factors); adafactor's weight_decay (optax does not
# multiply it by the step) and its tensors of three dimensions and more (optax factors the two largest, ours the last two);
# sophia with b1 > 0 (optax corrects the bias of m) or b2 > 0 (it uses an estimate one step late).
def optax_muon(learning_rate, beta, weight_decay=0.0, ns_steps=5, consistent_rms=None):
    axes = {"w": optax.contrib.MuonDimensionNumbers((1,), (0,)), "b": None, "s": None}
    return optax.contrib.muon(
        learning_rate, ns_steps=ns_steps, beta=beta, eps=1e-7, weight_decay=weight_decay, nesterov=False, consistent_rms=consistent_rms,
        adam_b1=0.9, adam_b2=0.95, adam_learning_rate=0.01, adam_weight_decay=0.0,
        muon_weight_dimension_numbers=axes,
    )  # fmt: skip


def optax_sophia(learning_rate, **settings):
    return objected(optax.contrib.sophia(learning_rate, b1=0.0, b2=0.0, update_interval=1, **settings))


def from_the_second(rate):
    """No first step: optax's Sophia has no estimate then."""
    return lambda count: jnp.where(count > 0, rate, 0.0)


def decayed(rule, weight_decay=0.0):
    return optax.chain(optax.add_decayed_weights(weight_decay), rule)


#: factory, keywords, optax's, and the dtype of both: at b2 = 0.999 optax's own float32 is 1e-5 off, in RAdam 1e-3
PEERS = [
    ("sgd", {"learning_rate": 0.05}, lambda: optax.sgd(0.05), "float32"),
    ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.2}, lambda: decayed(optax.sgd(0.05, 0.9), 0.2), "float64"),
    ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}, lambda: optax.sgd(0.05, 0.9, True), "float32"),
    ("adam", {"learning_rate": 0.01}, lambda: optax.adam(0.01), "float64"),
    ("adam", {"learning_rate": 0.01, "b1": 0.5, "b2": 0.9, "eps": 0.1, "weight_decay": 0.2}, lambda: decayed(optax.adam(0.01, 0.5, 0.9, 0.1), 0.2), "float32"),
    ("adamw", {"learning_rate": 0.01}, lambda: optax.adamw(0.01), "float64"),
    ("adamw", {"learning_rate": 0.01, "b1": 0.5, "b2": 0.9, "eps": 0.1, "weight_decay": 0.3}, lambda: optax.adamw(0.01, 0.5, 0.9, 0.1, weight_decay=0.3), "float32"),
    ("nadamw", {"learning_rate": 0.01}, lambda: optax.nadamw(0.01), "float64"),
    ("nadamw", {"learning_rate": 0.01, "b1": 0.5, "b2": 0.9, "weight_decay": 0.3}, lambda: optax.nadamw(0.01, 0.5, 0.9, weight_decay=0.3), "float32"),
    ("radam", {"learning_rate": 0.01}, lambda: optax.radam(0.01, threshold=4.0), "float64"),
    ("radam", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.9, "eps": 0.1}, lambda: optax.radam(0.01, 0.8, 0.9, 0.1, threshold=4.0), "float64"),
    ("ademamix", {"learning_rate": 0.01}, lambda: optax.contrib.ademamix(0.01), "float64"),
    ("ademamix", {"learning_rate": 0.01, "b1": 0.5, "b2": 0.9, "b3": 0.99, "alpha": 3.0, "eps": 0.1, "weight_decay": 0.3},
     lambda: optax.contrib.ademamix(0.01, 0.5, 0.9, 0.99, 3.0, 0.1, weight_decay=0.3), "float32"),
    ("adan", {"learning_rate": 0.01, "b1": 0.9, "b2": 0.5, "b3": 0.8, "eps": 0.1, "no_prox": True, "weight_decay": 0.3},
     lambda: optax.adan(0.01, 0.9, 0.5, 0.8, 0.1, 0.0, 0.3), "float64"),  # at b2 = 0.5 it is the authors' rule
    ("adopt", {"learning_rate": 0.01}, lambda: optax.contrib.adopt(0.01), "float64"),
    ("adopt", {"learning_rate": 0.01, "clip_exp": None}, lambda: optax.contrib.adopt(0.01, use_clipping=False), "float64"),
    ("adopt", {"learning_rate": 0.01, "b1": 0.5, "b2": 0.9, "eps": 0.1, "weight_decay": 0.3}, lambda: decayed(optax.contrib.adopt(0.01, 0.5, 0.9, 0.1), 0.3), "float32"),
    ("lars", {"learning_rate": 5.0}, lambda: optax.lars(5.0), "float32"),
    ("lars", {"learning_rate": 5.0, "momentum": 0.5, "nesterov": True, "eps": 0.1, "trust_coefficient": 0.01, "weight_decay": 0.3},
     lambda: optax.lars(5.0, 0.3, True, 0.01, 0.1, True, 0.5, True), "float64"),
    ("lars", {"learning_rate": 0.05, "trust_coefficient": None, "weight_decay": 0.3}, lambda: optax.lars(0.05, 0.3, trust_ratio_mask=False), "float64"),
    ("lamb", {"learning_rate": 0.01}, lambda: optax.lamb(0.01), "float32"),
    ("lamb", {"learning_rate": 0.01, "b1": 0.5, "b2": 0.9, "weight_decay": 0.3}, lambda: optax.lamb(0.01, 0.5, 0.9, weight_decay=0.3), "float64"),
    ("lion", {"learning_rate": 1e-3}, lambda: optax.lion(1e-3), "float32"),
    ("lion", {"learning_rate": 1e-3, "b1": 0.5, "b2": 0.9, "weight_decay": 0.3}, lambda: optax.lion(1e-3, 0.5, 0.9, weight_decay=0.3), "float64"),
    ("adafactor", {"learning_rate": 0.02}, lambda: optax.adafactor(0.02, 1), "float32"),
    ("adafactor", {"learning_rate": 0.02, "decay_rate": 0.3, "clipping_threshold": 0.5, "momentum": 0.8, "multiply_by_parameter_scale": False},
     lambda: optax.adafactor(0.02, 1, 0.3, 0, False, 0.5, 0.8, "float32"), "float64"),
    ("muon", {"learning_rate": 0.02, "beta": 0.95, "nesterov": False}, lambda: optax_muon(0.02, 0.95), "float32"),
    ("muon", {"learning_rate": 0.02, "beta": 0.5, "nesterov": False, "weight_decay": 0.3, "ns_steps": 3, "convention": "moonlight"},
     lambda: optax_muon(0.02, 0.5, 0.3, 3, 0.2), "float64"),
    ("prodigy", {"learning_rate": 1.0, "estim_lr0": 0.01, "use_bias_correction": True, "weight_decay": 0.1},
     lambda: optax.contrib.prodigy(1.0, estim_lr0=0.01, weight_decay=0.1), "float64"),
    ("schedulefreeadamw", {"learning_rate": 0.01}, lambda: optax.contrib.schedule_free_adamw(0.01), "float32"),
    ("schedulefreeadamw", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "weight_lr_power": 1.0},
     lambda: optax.contrib.schedule_free_adamw(0.01, b1=0.8, b2=0.99, eps=1e-3, weight_decay=0.1, weight_lr_power=1.0), "float64"),
    ("schedulefreesgd", {"learning_rate": 0.05}, lambda: optax.contrib.schedule_free_sgd(0.05), "float64"),
    ("schedulefreesgd", {"learning_rate": 0.05, "momentum": 0.8, "weight_decay": 0.1},
     lambda: optax.contrib.schedule_free_sgd(0.05, b1=0.8, weight_decay=0.1), "float64"),
    ("sophia", {"learning_rate": from_the_second(0.01), "b1": 0.0, "b2": 0.0, "update_interval": 1}, lambda: optax_sophia(from_the_second(0.01)), "float32"),
    ("sophia", {"learning_rate": from_the_second(0.01), "b1": 0.0, "b2": 0.0, "update_interval": 1, "gamma": 0.1, "clip_threshold": None, "eps": 0.1, "weight_decay": 0.3},
     lambda: optax_sophia(from_the_second(0.01), gamma=0.1, clip_threshold=None, eps=0.1, weight_decay=0.3), "float64"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keywords", "peer", "dtype"), PEERS, ids=map(described, PEERS))
def test_equals_optax(name, keywords, peer, dtype):
    """Thirty steps end where optax's do, at optax's defaults and away from them."""
    params, grads = problem({"w": (12, 8), "b": (7,), "s": ()}, 30)
    if name == "muon":
        keywords = {**keywords, "otherwise": rest()}
    with jax.enable_x64(dtype == "float64"):
        got, want = run(build(name, **keywords), params, grads, dtype), run(peer(), params, grads, dtype)
    assert all(v.dtype == dtype for v in got.values())
    assert distance(got, want, params) < 1e-5


# ---- numbers ------------------------------------------------------------------------------------------------------------
COUNTS = np.unique(np.concatenate([np.arange(1, 3001), np.geomspace(3001, 1e6, 3000).astype(int)]))


def first_updates(tx, counts):
    """The update of a gradient 1 from empty state, at each step count."""
    p = jnp.zeros(())

    def one(count):
        return tx.update(jnp.ones(()), tx.init(p)._replace(count=count - 1), p)[0]

    return np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(counts, jnp.int32)), np.float64)


def corrected(beta, counts):
    return -np.expm1(counts * math.log(beta))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.9999), (0.5, 0.9), (0.999, 0.999999)])
def test_bias_corrections_are_exact(betas):
    """At every step count up to 10⁶, to the rounding of float32."""
    b1, b2 = betas
    want = -(1 - b1) / corrected(b1, COUNTS) / np.sqrt((1 - b2) / corrected(b2, COUNTS))
    got = first_updates(ours.adamw(1.0, *betas, 0.0), COUNTS)
    assert np.abs(got / want - 1).max() < 5e-7


@pytest.mark.parametrize(("convention", "threshold"), [("paper", 4), ("torch", 5)])
@pytest.mark.parametrize("b2", [0.9, 0.95, 0.99, 0.999, 0.9999])
def test_radam_rectification(b2, convention, threshold):
    """r_t in float32 at every step count up to 10⁶, against mpmath with 50 digits."""
    mp = pytest.importorskip("mpmath").mp.clone()
    mp.dps = 50
    beta, counts = mp.mpf(b2), COUNTS[:: 1 if b2 == 0.999 else 7]
    longest = 2 / (1 - beta) - 1
    want = []
    for t in map(int, counts):
        c2 = 1 - beta**t
        rho = longest - 2 * t * beta**t / c2
        r = mp.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)) if rho > threshold else None
        want.append(1 / (1 - mp.mpf("0.9") ** t) * (1 if r is None else r * mp.sqrt(c2) / mp.sqrt(1 - beta)))
    want = -(1 - 0.9) * np.array(want, np.float64)
    got = first_updates(ours.radam(1.0, 0.9, b2, 0.0, convention=convention), counts)
    assert np.abs(got / want - 1).max() < 1e-5


def test_schedule():
    """The rate at step t is schedule(t − 1), as in the named API."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, 10, 60, 0.001)
    params, grads = problem(SHAPES, 60)
    opt, want = rlx_optim.AdamW(lr=lambda t: float(rate(t)), weight_decay=lambda t: 0.01 * t, engine="reference"), copies(params)
    for t in range(60):
        opt.step_all(want, {k: np.asarray(g[t]) for k, g in grads.items()})
    got = run(ours.adamw(rate, weight_decay=lambda t: 0.01 * t), params, grads)
    assert distance(got, want, params) < 2e-5


def test_muon_counts_rows_as_outputs_and_optax_columns():
    """Unless told so (`optax_muon`): "keller" there scales by columns/rows; "moonlight" is the same either way."""
    params, grads = problem({"w": (12, 8)}, 5)
    turned = [{"w": tree["w"].T} for tree in (params,)], {"w": grads["w"].transpose(0, 2, 1)}
    plain = run(optax.contrib.muon(0.02, eps=1e-7, nesterov=False), params, grads)
    assert distance(run(build("muon", learning_rate=0.02, nesterov=False), params, grads), plain, params) > 0.1
    mirrored = run(build("muon", learning_rate=0.02, nesterov=False), turned[0][0], turned[1])
    assert distance({"w": mirrored["w"].T}, plain, params) < 1e-5
    same = run(optax.contrib.muon(0.02, eps=1e-7, nesterov=False, consistent_rms=0.2), params, grads)
    assert (
        distance(run(build("muon", learning_rate=0.02, nesterov=False, convention="moonlight"), params, grads), same, params)
        < 1e-5
    )
