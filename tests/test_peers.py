"""Our steps against the same rule in torch.optim, optax and pytorch_optimizer, on both engines.

Peers run in float64, so their own rounding is out of the way; ours stores float32 on either engine. The measure is
max|ours - peer| / max|peer - start| per tensor. Every expected value comes from the peer.
"""

import contextlib
import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import rlx_optim

ENGINES = ("cpu", "reference")
STEPS = 15
BAR = 2e-5

SHAPES = {
    "scalar": (),
    "one": (1,),
    "vector": (37,),
    "odd": (5, 7),
    "tall": (64, 32),
    "conv": (2, 3, 4, 5),
    "big": (1025, 17),  # more than one chunk of the cpu engine
    "from_zero": (6,),  # starts at 0: Lamb's trust ratio, Adafactor's eps[1]
    "half_dead": (4, 9),  # its first row and column never have a gradient
    "faint": (7, 5),  # its gradient is small
    "square": (6, 6),
    "cube": (4, 5, 6),
    "wide": (6, 40),
}
PLAIN = ("scalar", "one", "vector", "odd", "tall", "conv", "big", "from_zero", "half_dead", "faint")
SMALL = tuple(name for name in PLAIN if name not in ("tall", "big"))
MATRICES = ("odd", "tall", "big", "half_dead")
FEW = ("scalar", "vector", "tall", "conv", "from_zero", "half_dead")  # each costs jax compile time


def start(name):
    """Where a tensor starts, in float32."""
    rng = np.random.default_rng([1, *name.encode()])
    return (0.0 if name == "from_zero" else 0.5) * rng.standard_normal(SHAPES[name], dtype=np.float32)


@functools.cache
def gradients(name):
    """Its gradients: a drift, noise, and a size that swings by 100 from step to step."""
    rng = np.random.default_rng([2, *name.encode()])
    noise = rng.standard_normal((STEPS + 1, *SHAPES[name]))
    swing = 10.0 ** np.sin(np.arange(STEPS)).reshape(-1, *[1] * len(SHAPES[name]))
    g = (swing * (noise[1:] + 0.7 * np.sign(noise[0]))).astype(np.float32)
    if name == "half_dead":
        g[:, 0] = g[:, :, 0] = 0
    return np.float32(0.1) * g if name == "faint" else g


def ours(kind, tensors, engine, settings, feed=None):
    """The tensors after our optimizer has stepped them."""
    opt = getattr(rlx_optim, kind)(engine=engine, **settings)
    params = {name: np.array(start(name)) for name in tensors}
    for t in range(STEPS):
        if feed is not None:
            feed(opt, t)
        opt.step_all(params, {name: np.array(gradients(name)[t]) for name in tensors})
    return params


def compare(found, expected, bar):
    """Fail with the list of tensors that are further from the peer than the bar."""
    far = {}
    for name, value in expected.items():
        assert np.isfinite(value).all(), f"the peer itself is not finite on {name}"
        travelled = np.abs(value - start(name)).max()
        error = np.abs(found[name] - value).max()
        if not error <= bar * travelled:
            far[name] = f"{error / travelled if travelled else error:.2g}"
    assert not far, f"further than {bar:g} of the distance travelled: {far}"


# ---- running a peer -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def in_float64(torch):
    """torch keeps its counts and products of scalars in the default dtype. One thread: the tensors are small."""
    before = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])


def run_torch(build, tensors, settings, feed=None):
    torch = pytest.importorskip("torch")
    params = [torch.nn.Parameter(torch.tensor(np.asarray(start(name)), dtype=torch.float64)) for name in tensors]
    with in_float64(torch):
        opt = build(params, **settings)
        for t in range(STEPS):
            for name, p in zip(tensors, params, strict=True):
                p.grad = torch.tensor(gradients(name)[t], dtype=torch.float64)
            opt.step(**(feed(t) if feed else {}))
    return {name: p.detach().numpy() for name, p in zip(tensors, params, strict=True)}


def run_optax(build, tensors, settings):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    with jax.enable_x64(True):
        params = {name: jax.numpy.asarray(start(name), dtype="float64") for name in tensors}
        grads = {name: jax.numpy.asarray(gradients(name), dtype="float64") for name in tensors}
        tx = build(optax, **settings)

        def step(carry, g):
            p, state = carry
            updates, state = tx.update(g, state, p)
            return (optax.apply_updates(p, updates), state), None

        (after, _), _ = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g))(params, grads)
        return {name: np.asarray(value) for name, value in after.items()}


class Peer(NamedTuple):
    """A peer's rule, and the settings, in our words, in which it is ours."""

    library: str
    kind: str
    build: Callable[..., Any]
    table: list[dict[str, Any]]
    tensors: tuple[str, ...] = PLAIN
    bar: float = BAR
    #: ours alone: what makes our rule that of the peer
    fixed: Callable[[], dict[str, Any]] = dict
    #: in force while the peer runs
    patch: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


# ---- torch.optim ------------------------------------------------------------------------------------------------------
def torch_optim(name, **always):
    def build(params, **settings):
        return getattr(importlib.import_module("torch.optim"), name)(params, **settings, **always)

    return build


def torch_adafactor(params, lr=None, clip_threshold=1.0, eps=(1e-30, 1e-3), **settings):
    lr = 1e-2 if lr is None else lr
    return torch_optim("Adafactor")(params, lr=lr, d=clip_threshold, eps=eps, foreach=False, **settings)


def torch_muon(params, convention="keller", **settings):
    adjust = {"keller": "original", "moonlight": "match_rms_adamw"}[convention]
    return torch_optim("Muon", adjust_lr_fn=adjust)(params, **{"weight_decay": 0.0, **settings})


def no_bfloat16():
    """torch.optim.Muon rounds to bfloat16 before its products (3 % off); let it keep float64."""
    torch = pytest.importorskip("torch")
    return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)


ADAM = [
    {"lr": 0.01},
    {"lr": 0.01, "weight_decay": 0.3},
    {"lr": 0.03, "betas": (0.5, 0.9), "weight_decay": 0.1},
    {"lr": 0.01, "betas": (0.0, 0.99)},
    {"lr": 0.05, "eps": 0.3},
]
AMSGRAD = [
    {"lr": 0.01, "betas": (0.9, 0.8), "amsgrad": True},
    {"lr": 0.02, "betas": (0.8, 0.7), "eps": 0.1, "weight_decay": 0.2, "amsgrad": True},
]
RADAM = [
    {"lr": 0.01},
    {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.3},
    {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.3, "decoupled_weight_decay": True},
    {"lr": 0.02, "betas": (0.7, 0.9), "eps": 0.3},
    {"lr": 0.01, "betas": (0.9, 0.7)},  # the average is never much longer than 5
    {"lr": 0.01, "betas": (0.9, 0.5)},  # never rectified
]
TORCH = [
    Peer("torch", "SGD", torch_optim("SGD"), [
        {"lr": 0.05},
        {"lr": 0.05, "weight_decay": 0.3},
        {"lr": 0.05, "dampening": 0.5},
        {"lr": 0.05, "momentum": 0.9},
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.4},
        {"lr": 0.05, "momentum": 0.8, "dampening": 1.0, "weight_decay": 0.1},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.3},
    ]),
    Peer("torch", "Adam", torch_optim("Adam"), ADAM + AMSGRAD),
    Peer("torch", "AdamW", torch_optim("AdamW"), ADAM + AMSGRAD),
    Peer("torch", "NAdamW", torch_optim("NAdam", decoupled_weight_decay=True), [
        *({"weight_decay": 0.01, **row} for row in ADAM),
        {"lr": 0.01, "weight_decay": 0.0, "momentum_decay": 0.1},
        {"lr": 0.01, "weight_decay": 0.2, "momentum_decay": 0.0},
    ], fixed=lambda: {"convention": "torch"}),
    Peer("torch", "RAdam", torch_optim("RAdam"), RADAM),
    # a clip_threshold below 1 is refused by torch
    Peer("torch", "Adafactor", torch_adafactor, [
        {},
        {"lr": 0.05},
        {"lr": 0.5, "weight_decay": 0.1},  # above 1/sqrt(t) from t = 5 on
        {"lr": 0.02, "weight_decay": 0.3},
        {"lr": 0.02, "beta2_decay": -0.3, "clip_threshold": 2.0},
        {"lr": 0.02, "clip_threshold": 1e9},
        {"lr": 0.02, "eps": (0.5, 1e-3)},
        {"lr": 0.02, "eps": (0.05, 1e-3)},
        {"lr": 0.02, "eps": (1e-30, 2.0)},
    ], fixed=lambda: {"convention": "torch"}),
    Peer("torch", "Muon", torch_muon, [
        {"lr": 0.02},
        {"lr": 0.02, "nesterov": False},
        {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.3},
        {"lr": 0.02, "convention": "moonlight", "weight_decay": 0.1},
        {"lr": 0.1, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5)},
    ], MATRICES, patch=no_bfloat16),
]  # fmt: skip


# ---- optax ------------------------------------------------------------------------------------------------------------
# Not here: optax.amsgrad keeps the maximum of the corrected v, ours (and torch's) of the uncorrected one; optax.contrib.sophia
# corrects the bias of m and uses an estimate one step late; optax.contrib.muon's Nesterov form corrects m and g by different
# factors, so only its heavy-ball form is ours; optax.adafactor's decay is not multiplied by the step.
def optax_sgd(o, lr, momentum=None, nesterov=False, weight_decay=0.0):
    return o.chain(o.add_decayed_weights(weight_decay), o.sgd(lr, momentum, nesterov))


def optax_adam(o, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    return o.chain(o.add_decayed_weights(weight_decay), o.adam(lr, *betas, eps))


def optax_decoupled(name):
    def build(o, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        return getattr(o, name)(lr, *betas, eps, weight_decay=weight_decay)

    return build


def optax_radam(o, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled_weight_decay=False):
    decay = o.add_decayed_weights(weight_decay)
    rule = o.scale_by_radam(*betas, eps, threshold=4.0)
    return o.chain(*([rule, decay] if decoupled_weight_decay else [decay, rule]), o.scale_by_learning_rate(lr))


def optax_ademamix(o, lr, betas=(0.9, 0.999, 0.9999), alpha=2.0, eps=1e-8, weight_decay=0.0):
    return o.contrib.ademamix(lr, *betas, alpha, eps, weight_decay=weight_decay)


def optax_adopt(o, lr, betas=(0.9, 0.9999), eps=1e-6, weight_decay=0.0, clip_exp=0.25):
    return o.chain(o.add_decayed_weights(weight_decay), o.contrib.adopt(lr, *betas, eps, clip_value_fn=lambda t: t**clip_exp))


def optax_adan(o, lr, betas, eps=1e-8, weight_decay=0.0):
    return o.adan(lr, *betas, eps, 0.0, weight_decay)


def optax_lars(o, lr, momentum=0.9, weight_decay=0.0, trust_coefficient=1e-3, eps=0.0, nesterov=False):
    return o.lars(lr, weight_decay, True, trust_coefficient, eps, True, momentum, nesterov)


def optax_lion(o, lr, betas=(0.9, 0.99), weight_decay=0.0):
    return o.lion(lr, *betas, weight_decay=weight_decay)


def optax_adafactor(o, lr=None, beta2_decay=-0.8, eps=(1e-30, 1e-3), clip_threshold=1.0, beta1=None, scale_parameter=True):
    lr = 1e-2 if lr is None else lr  # min(1e-2, 1/sqrt(t)) until t = 10000
    assert eps[1] == 1e-3, "optax has no other"
    return o.adafactor(lr, 1, -beta2_decay, 0, scale_parameter, clip_threshold, beta1, "float64", eps=eps[0])


def optax_muon(o, lr, momentum=0.95, weight_decay=0.0, convention="keller", ns_steps=5):
    Axes = o.contrib.MuonDimensionNumbers
    ranks = {name: len(SHAPES[name]) for name in FEW}
    axes = {name: Axes(tuple(range(1, rank)), (0,)) if rank > 1 else None for name, rank in ranks.items()}
    rms = 0.2 if convention == "moonlight" else None
    return o.contrib.muon(
        lr, ns_steps=ns_steps, beta=momentum, eps=1e-7, weight_decay=weight_decay, nesterov=False, consistent_rms=rms,
        adam_b1=0.8, adam_b2=0.9, adam_learning_rate=0.01, adam_weight_decay=0.1, muon_weight_dimension_numbers=axes,
    )  # fmt: skip


def muon_of_optax():
    adamw = rlx_optim.AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    return {"nesterov": False, "otherwise": adamw}


OPTAX = [
    Peer("optax", "SGD", optax_sgd, [
        {"lr": 0.05, "weight_decay": 0.2},
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    ], FEW),
    Peer("optax", "Adam", optax_adam, ADAM[1:3], FEW),
    Peer("optax", "AdamW", optax_decoupled("adamw"), ADAM[2:], FEW),
    Peer("optax", "NAdamW", optax_decoupled("nadamw"), ADAM[1:], FEW),
    Peer("optax", "RAdam", optax_radam, RADAM, FEW, fixed=lambda: {"convention": "paper"}),
    Peer("optax", "AdEMAMix", optax_ademamix, [
        {"lr": 0.01},
        {"lr": 0.02, "betas": (0.5, 0.9, 0.99), "alpha": 4.0, "eps": 0.3, "weight_decay": 0.3},
    ], FEW),
    Peer("optax", "ADOPT", optax_adopt, [
        {"lr": 0.01},
        {"lr": 0.02, "betas": (0.5, 0.9), "eps": 0.3, "weight_decay": 0.3, "clip_exp": 0.1},
    ], FEW),
    # only at b2 = 0.5: elsewhere it takes 1 − b2 where the authors take b2
    Peer("optax", "Adan", optax_adan, [
        {"lr": 0.01, "betas": (0.98, 0.5, 0.99)},
        {"lr": 0.02, "betas": (0.8, 0.5, 0.9), "eps": 0.3, "weight_decay": 0.3},
    ], FEW, fixed=lambda: {"no_prox": True}),
    Peer("optax", "LARS", optax_lars, [
        {"lr": 5.0},
        {"lr": 5.0, "momentum": 0.5, "nesterov": True, "weight_decay": 0.3},
        {"lr": 5.0, "eps": 0.3, "trust_coefficient": 0.01, "weight_decay": 0.1},
    ], FEW),
    Peer("optax", "Lamb", optax_decoupled("lamb"), [
        {"lr": 0.01},
        {"lr": 0.01, "weight_decay": 0.0},
        {"lr": 0.05, "betas": (0.5, 0.9), "eps": 0.3, "weight_decay": 0.5},
    ], (*FEW, "big"), fixed=lambda: {"eps": 1e-8}),
    Peer("optax", "Lion", optax_lion, [
        {"lr": 0.01},
        {"lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"lr": 0.01, "betas": (0.95, 0.98)},
    ], FEW),
    Peer("optax", "Adafactor", optax_adafactor, [
        {},
        {"lr": 0.05, "scale_parameter": False},
        {"lr": 0.02, "beta2_decay": -0.3, "clip_threshold": 2.0},
        {"lr": 0.02, "beta1": 0.8},
        {"lr": 0.02, "eps": (0.5, 1e-3), "clip_threshold": 0.5},
    ], FEW),
    Peer("optax", "Muon", optax_muon, [
        {"lr": 0.02},
        {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.3, "convention": "moonlight", "ns_steps": 3},
    ], FEW, fixed=muon_of_optax),
]  # fmt: skip


# ---- pytorch_optimizer --------------------------------------------------------------------------------------------------
def po(name, **always):
    def build(params, **settings):
        return getattr(importlib.import_module("pytorch_optimizer"), name)(params, **settings, **always)

    return build


def po_muon(params, convention="keller", ns_coefficients=(3.4445, -4.7750, 2.0315), **settings):
    muon = {"use_muon": True, "params": [p for p in params if p.ndim > 1], "ns_coeffs": ns_coefficients, **settings}
    rest = {"use_muon": False, "params": [p for p in params if p.ndim < 2], "lr": 0.01}
    return po("Muon", use_adjusted_lr=convention == "moonlight")([muon, rest])


def po_normuon(params, **settings):
    muon = {"use_muon": True, "params": [p for p in params if p.ndim > 1], **settings}
    return po("NorMuon")([muon, {"use_muon": False, "params": [p for p in params if p.ndim < 2], "lr": 0.01}])


def po_scion(params, norm="auto", unconstrained=False, **settings):
    kinds = importlib.import_module("pytorch_optimizer.optimizer.scion").LMONorm
    names = {"auto": "AUTO", "sign": "SIGN", "colnorm": "COL", "rownorm": "ROW"}
    options = {k: settings.pop(k) for k in ("normalized", "transpose") if k in settings}
    return po("SCION", constraint=not unconstrained, norm_type=getattr(kinds, names[norm]), norm_kwargs=options)(
        params, **settings
    )


def po_adafactor(params, lr=None, beta2_decay=-0.8, eps=(1e-30, 1e-3), beta1=None, **settings):
    torch = importlib.import_module("torch")
    rule = po(
        "AdaFactor",
        relative_step=lr is None,
        decay_rate=beta2_decay,
        eps1=eps[0],
        eps2=eps[1],
        betas=(beta1, math.nextafter(1, 0)),
    )
    return rule(params, lr=1.0 if lr is None else lr, momentum_dtype=torch.float64, **settings)


def po_kron(params, beta1=0.9, precond_lr=0.1, precond_init_scale=1.0, memory_save_mode=None, **settings):
    torch = importlib.import_module("torch")
    names = {
        "preconditioner_update_probability": "pre_conditioner_update_probability",
        "max_size": "max_size_triangular",
        "momentum_into_precond_update": "momentum_into_precondition_update",
    }
    settings = {"preconditioner_update_probability": 1.0, **settings}
    group = {"params": params, "precondition_lr": precond_lr, "precondition_init_scale": precond_init_scale}
    rule = po("Kron", momentum=beta1, precondition_dtype=torch.float64, balance_prob=0.0, memory_save_mode=memory_save_mode)
    return rule([group], **{names.get(name, name): value for name, value in settings.items()})


class Probes:
    """The k-th probe of each shape, the same for ours and the peer's."""

    def __init__(self):
        self.count = Counter()

    def __call__(self, name, t, shape):
        self.count[shape] += 1
        return np.random.default_rng([self.count[shape], *shape]).standard_normal(shape)


def same_probes():
    torch, probes = pytest.importorskip("torch"), Probes()
    return mock.patch.object(torch, "randn_like", lambda x, dtype: torch.tensor(probes("", 0, tuple(x.shape)), dtype=dtype))


def float64_products():
    base = pytest.importorskip("pytorch_optimizer.optimizer.muon.base")
    wide = functools.partial(base.zero_power_via_newton_schulz_5, dtype=importlib.import_module("torch").float64)
    stack = contextlib.ExitStack()
    for module in ("muon.base", "scion"):
        where = importlib.import_module(f"pytorch_optimizer.optimizer.{module}")
        stack.enter_context(mock.patch.object(where, "zero_power_via_newton_schulz_5", wide))
    return stack


def nothing_under_the_root():
    """Its MARS adds 1e-15 to v, which shows where a clipped c is next to 0."""
    mars = pytest.importorskip("pytorch_optimizer").MARS
    bare = functools.partial(mars.apply_ams_bound_foreach, exp_avg_sq_eps=0.0)
    return mock.patch.object(mars, "apply_ams_bound_foreach", staticmethod(bare))


def nothing_in_laprop():
    """Its LaProp adds 1e-15 to v too."""
    laprop = pytest.importorskip("pytorch_optimizer").LaProp
    bare = functools.partial(laprop.apply_ams_bound, exp_avg_sq_eps=0.0)
    return mock.patch.object(laprop, "apply_ams_bound", staticmethod(bare))


def po_ademamix(params, alpha=2.0, **settings):
    return po("AdEMAMix", weight_decouple=True)(params, alpha=alpha, **settings)


def po_adan(params, no_prox=False, **settings):
    return po("Adan", weight_decouple=no_prox)(params, **settings)


def po_soap(params, max_precond_dim, **settings):
    return po("SOAP", max_precondition_dim=max_precond_dim)(params, **settings)


PYTORCH_OPTIMIZER = [
    Peer("pytorch_optimizer", "QHAdamW", po("QHAdam", weight_decouple=True), [
        {"lr": 0.01, "betas": (0.995, 0.999), "nus": (0.7, 1.0), "weight_decay": 0.01},
        {"lr": 0.01, "betas": (0.9, 0.99), "nus": (0.7, 0.5), "weight_decay": 0.3},
        {"lr": 0.01, "betas": (0.9, 0.99), "nus": (0.0, 0.9)},
        {"lr": 0.05, "betas": (0.9, 0.99), "nus": (1.0, 0.8), "eps": 0.3},
    ], fixed=lambda: {"weight_decay": 0.0}),
    Peer("pytorch_optimizer", "StableAdamW", po("StableAdamW", kahan_sum=False), [
        {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.2},
        {"lr": 0.02, "betas": (0.5, 0.9), "eps": 0.3, "weight_decay": 0.3},
    ]),
    Peer("pytorch_optimizer", "AdEMAMix", po_ademamix, [
        {"lr": 0.01},
        {"lr": 0.02, "betas": (0.5, 0.9, 0.99), "alpha": 4.0, "eps": 0.3, "weight_decay": 0.3},
    ]),
    Peer("pytorch_optimizer", "Adan", po_adan, [
        {"lr": 0.01},
        {"lr": 0.1, "betas": (0.8, 0.7, 0.9), "eps": 0.3, "weight_decay": 0.3},
        {"lr": 0.02, "betas": (0.8, 0.7, 0.9), "weight_decay": 0.3, "no_prox": True},
    ]),
    # which clips at t^0.25 unless told
    Peer("pytorch_optimizer", "ADOPT", po("ADOPT", clip_lambda=lambda t: (t - 1) ** 0.25), [
        {"lr": 0.01},
        {"lr": 0.02, "betas": (0.5, 0.9), "eps": 0.3, "weight_decay": 0.3},
    ]),
    # matrices, for it steps vectors as SGD does
    Peer("pytorch_optimizer", "LARS", po("LARS"), [
        {"lr": 5.0},
        {"lr": 5.0, "momentum": 0.5, "weight_decay": 0.3},
        {"lr": 5.0, "nesterov": True, "trust_coefficient": 0.01, "weight_decay": 0.1},
    ], MATRICES, fixed=lambda: {"convention": "timm"}),
    Peer("pytorch_optimizer", "LaProp", po("LaProp"), [
        {"lr": 0.01},
        {"lr": 0.02, "betas": (0.5, 0.9), "weight_decay": 0.3},
    ], fixed=lambda: {"convention": "timm"}, patch=nothing_in_laprop),
    # its norm of p is cut off at 10, which the small tensors stay under
    Peer("pytorch_optimizer", "Lamb", po("Lamb", weight_decouple=False, adam_debias=True, eps=1e-12), [
        {"lr": 0.01, "weight_decay": 0.0},
        {"lr": 0.02, "betas": (0.5, 0.9), "weight_decay": 0.3},
    ], SMALL, fixed=lambda: {"bias_correction": False, "eps": 1e-12}),
    Peer("pytorch_optimizer", "Lion", po("Lion"), [
        {"lr": 0.01},
        {"lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.3},
    ]),
    # its eps stands before bias correction: next to none here
    Peer("pytorch_optimizer", "MARS", po("MARS", optimize_1d=True, eps=1e-15), [
        {"lr": 0.01},
        {"lr": 0.01, "betas": (0.8, 0.9), "gamma": 0.3, "weight_decay": 0.3},
        {"lr": 0.01, "gamma": 0.0},
    ], fixed=lambda: {"eps": 1e-15, "otherwise": None}, patch=nothing_under_the_root),
    Peer("pytorch_optimizer", "MARS", po("MARS", optimize_1d=True, mars_type="lion"), [
        {"lr": 0.01},
        {"lr": 0.01, "betas": (0.8, 0.9), "gamma": 0.3, "weight_decay": 0.3},
    ], fixed=lambda: {"variant": "lion", "otherwise": None}),
    # what MARS does not take goes to AdamW; more than two dimensions are MARS's there and not ours
    Peer("pytorch_optimizer", "MARS", po("MARS", eps=1e-15), [
        {"lr": 0.01},
    ], ("one", "vector", "odd", "tall", "from_zero"),
        fixed=lambda: {
            "eps": 1e-15, "otherwise": rlx_optim.AdamW(lr=3e-3, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.1)},
        patch=nothing_under_the_root),
    Peer("pytorch_optimizer", "Adafactor", po_adafactor, [
        {"weight_decay": 0.5},
        {"lr": 0.02, "weight_decay": 0.5, "scale_parameter": False},
        {"lr": 0.02, "weight_decay": 0.5, "beta1": 0.8},
        {"lr": 0.02, "eps": (0.1, 2.0), "clip_threshold": 0.5, "beta2_decay": -0.5},
    ]),
    Peer("pytorch_optimizer", "Muon", po_muon, [
        {"lr": 0.02},
        {"lr": 0.02, "momentum": 0.5, "nesterov": False, "weight_decay": 0.3},
        {"lr": 0.02, "convention": "moonlight", "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    ], fixed=lambda: {"otherwise": rlx_optim.AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)},
        patch=float64_products),
    Peer("pytorch_optimizer", "NorMuon", po_normuon, [
        {"lr": 0.02},
        {"lr": 0.02, "momentum": 0.5, "beta2": 0.8, "nesterov": False, "weight_decay": 0.3, "ns_steps": 3},
    ], fixed=lambda: {"otherwise": rlx_optim.AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)},
        patch=float64_products),
    # of kernels that are no squares it takes both sides, the authors the first one twice
    Peer("pytorch_optimizer", "Scion", po_scion, [
        {"lr": 0.02, "momentum": 0.1},
        {"lr": 0.02, "momentum": 0.3, "scale": 5.0, "unconstrained": True},
    ], tuple(name for name in PLAIN if name != "conv"), patch=float64_products),
    Peer("pytorch_optimizer", "Scion", po_scion, [
        {"lr": 0.02, "momentum": 0.1, "norm": "sign"},
        {"lr": 0.02, "momentum": 0.1, "norm": "colnorm"},
        {"lr": 0.02, "momentum": 0.1, "norm": "colnorm", "normalized": True, "transpose": True},
        {"lr": 0.02, "momentum": 0.1, "norm": "rownorm"},
        {"lr": 0.02, "momentum": 0.1, "norm": "rownorm", "normalized": False},
    ], MATRICES),
    Peer("pytorch_optimizer", "ScheduleFreeSGD", po("ScheduleFreeSGD"), [
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1, "warmup_steps": 4, "r": 1.0, "weight_lr_power": 1.0},
    ]),
    # it adds 1e-15 under the root, and its eps is next to that
    Peer("pytorch_optimizer", "ScheduleFreeAdamW", po("ScheduleFreeAdamW"), [
        {"lr": 0.01, "eps": 1e-3},
        {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "warmup_steps": 4, "r": 1.0, "weight_lr_power": 1.0},
    ]),
    # tensors and sizes for which every rotated Gram matrix has full rank, so that its eigenvectors are determined
    Peer("pytorch_optimizer", "SOAP", po_soap, [
        {"lr": 0.01, "max_precond_dim": 6, "precondition_frequency": 3},
        {"lr": 0.01, "max_precond_dim": 6, "precondition_frequency": 1, "weight_decay": 0.3},
        {"lr": 0.01, "max_precond_dim": 6, "betas": (0.8, 0.9), "shampoo_beta": 0.5, "precondition_frequency": 2},
        {"lr": 0.05, "max_precond_dim": 4, "eps": 0.3, "precondition_frequency": 4},
        {"lr": 0.01, "max_precond_dim": 12, "merge_dims": True, "precondition_frequency": 2},
    ], ("scalar", "vector", "conv", "cube", "wide")),
    Peer("pytorch_optimizer", "KronPSGD", po_kron, [
        {"lr": 0.01},
        {"lr": 0.01, "beta1": 0.5, "weight_decay": 0.3},
        {"lr": 0.01, "momentum_into_precond_update": False},
        {"lr": 0.01, "preconditioner_update_probability": 0.4},
        {"lr": 0.01, "memory_save_mode": "one_diag"},
        {"lr": 0.01, "memory_save_mode": "all_diag"},
        {"lr": 0.01, "max_size": 5, "precond_lr": 0.3},
        {"lr": 0.01, "min_ndim_triangular": 1, "precond_init_scale": 0.3},
        {"lr": 0.01, "min_ndim_triangular": 3},
    ], ("scalar", "one", "vector", "odd", "conv", "square", "cube", "half_dead"),
        fixed=lambda: {"balance_probability": 0.0, "preconditioner_update_probability": 1.0, "probe": Probes()},
        patch=same_probes),
]  # fmt: skip

ROWS = [(peer, settings) for peer in TORCH + OPTAX + PYTORCH_OPTIMIZER for settings in peer.table]


def describe(peer, settings):
    return f"{peer.library}-{peer.kind}-" + (",".join(f"{k}={v}" for k, v in settings.items()).replace(" ", "") or "default")


@functools.cache
def expected(row):
    peer, settings = ROWS[row]
    run = run_optax if peer.library == "optax" else run_torch
    pytest.importorskip(peer.library)
    with peer.patch():
        return run(peer.build, peer.tensors, settings)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", range(len(ROWS)), ids=[describe(*row) for row in ROWS])
def test_equals_peer(row, engine):
    """Fifteen steps end where the peer's do."""
    peer, settings = ROWS[row]
    value = expected(row)
    compare(ours(peer.kind, peer.tensors, engine, {**peer.fixed(), **settings}), value, peer.bar)


# ---- Sophia, which is fed -----------------------------------------------------------------------------------------------
@functools.cache
def hessian(name, t):
    """An estimate of the Hessian's diagonal; some of it is negative."""
    return np.asarray(np.random.default_rng([3, t, *name.encode()]).standard_normal(SHAPES[name]) + 0.7, np.float32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.01, "betas": (0.965, 0.9), "gamma": 1.0, "weight_decay": 0.0},
        {"lr": 0.01, "betas": (0.5, 0.8), "gamma": 0.05, "clip": math.inf, "eps": 0.02, "weight_decay": 0.3},
        {"lr": 0.01, "betas": (0.9, 0.5), "gamma": 2.0, "clip": 3.0, "weight_decay": 0.1},
    ],
)
def test_sophia_equals_peer(settings, engine):
    """pytorch_optimizer's SophiaH has no gamma: its estimates are scaled by ours."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("pytorch_optimizer")
    settings = {"clip": 1.0, "eps": 1e-12, **settings}
    theirs = {"p" if k == "clip" else k: v for k, v in settings.items() if k != "gamma"}
    every = 4

    def to_peer(t):
        estimates = [torch.tensor(hessian(name, t), dtype=torch.float64) * settings["gamma"] for name in PLAIN]
        return {"hessian": estimates} if t % every == 0 else {}

    def to_ours(opt, t):
        for name in PLAIN if t % every == 0 else ():
            opt.update_hessian(name, hessian(name, t))

    value = run_torch(po("SophiaH", update_period=10**9), PLAIN, theirs, to_peer)
    compare(ours("Sophia", PLAIN, engine, settings, to_ours), value, BAR)


@pytest.mark.parametrize(("name", "peer", "settings"), [
    ("SGD", "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adam", "Adam", {"lr": 1e-3, "weight_decay": 0.1}),
    ("Adam", "Adam", {"lr": 1e-3, "amsgrad": True}),
    ("AdamW", "AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
    ("RAdam", "RAdam", {"lr": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("NAdamW", "NAdam", {"lr": 1e-3, "weight_decay": 0.1}),
])  # fmt: skip
def test_float32_ends_as_near_to_float64_as_torchs_does(name, peer, settings):
    """At small steps the rounding of p is what shows: the same steps in float64, and in float32 no farther from them than torch."""
    torch = pytest.importorskip("torch")
    from rlx_optim import torch as front

    rng = np.random.default_rng(0)
    first = rng.standard_normal((64, 48)) * 0.5
    grads = [10 ** math.sin(t) * rng.standard_normal((64, 48)) for t in range(20)]

    def walk(kind, dtype, **more):
        p = torch.nn.Parameter(torch.tensor(first, dtype=torch.float32).to(dtype))
        opt = kind([p], **settings, **more)
        for g in grads:
            p.grad = torch.tensor(g, dtype=torch.float32).to(dtype)
            opt.step()
        return p.detach().double()

    mine, theirs = (
        {"convention": "torch"} if name == "NAdamW" else {},
        {"decoupled_weight_decay": True} if peer == "NAdam" else {},
    )
    kinds = {"ours": (getattr(front, name), mine), "torch": (getattr(torch.optim, peer), theirs)}
    wide = {who: walk(kind, torch.float64, **more) for who, (kind, more) in kinds.items()}
    way = (wide["torch"] - torch.tensor(first, dtype=torch.float32).double()).abs().max()
    assert (wide["ours"] - wide["torch"]).abs().max() < 1e-8 * way
    off = {who: float((walk(kind, torch.float32, **more) - wide[who]).abs().max() / way) for who, (kind, more) in kinds.items()}
    assert off["ours"] < 1.25 * off["torch"] < 5e-4
