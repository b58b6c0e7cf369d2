"""The same rules in other libraries, in the settings in which they are ours, and how they walk: in float64. For `parity`.

PEERS is data: a new peer is a new entry of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .peers import load
from .walks import BAR, EVERY, SHAPES, Arrays, Problem, Settings


@dataclasses.dataclass(frozen=True)
class Peer:
    """The same rule elsewhere: what to build there, and the settings in which ours is that rule."""

    optimizer: str
    library: str
    rule: str
    theirs: Settings
    ours: Settings
    bar: float = BAR
    remark: str = ""
    #: (rule, parameters, settings) -> optimizer, where it is not rule(parameters, **settings)
    prepare: Callable[..., Any] | None = None
    #: the tensors that are compared, where it is not all
    tensors: tuple[str, ...] = tuple(SHAPES)


# ---- running a peer -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def float64() -> Iterator[Any]:
    """torch with float64 as the type of its counts and products."""
    torch: Any = importlib.import_module("torch")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield torch
    finally:
        torch.set_default_dtype(before)


def walk_torch(peer: Peer, todo: Problem) -> Arrays:
    with float64() as torch:
        params = {k: torch.nn.Parameter(torch.tensor(p, dtype=torch.float64)) for k, p in todo.start.items()}
        made = (peer.prepare or _plain)(load(peer.rule), list(params.values()), peer.theirs)
        for t, grads in enumerate(todo.gradients):
            for k, p in params.items():
                p.grad = torch.tensor(grads[k], dtype=torch.float64)
            made.step(**_estimates(peer, todo, t, torch))
    return {k: p.detach().numpy() for k, p in params.items()}


def _estimates(peer: Peer, todo: Problem, t: int, torch: Any) -> dict[str, Any]:
    """What Sophia is fed: the peer has no gamma, so its estimates are scaled by ours."""
    if peer.optimizer != "sophia" or t % EVERY:
        return {}
    return {"hessian": [torch.tensor(peer.ours["gamma"] * h, dtype=torch.float64) for h in todo.hessian.values()]}


def walk_optax(peer: Peer, todo: Problem) -> Arrays:
    jax, optax = importlib.import_module("jax"), importlib.import_module("optax")
    with jax.enable_x64(True):
        start = {k: jax.numpy.asarray(p, dtype="float64") for k, p in todo.start.items()}
        grads = {k: jax.numpy.stack([jax.numpy.asarray(g[k], dtype="float64") for g in todo.gradients]) for k in start}
        tx = (peer.prepare or _keywords)(load(peer.rule), start, peer.theirs)

        def step(carry: Any, g: Any) -> Any:
            p, state = carry
            updates, state = tx.update(g, state, p)
            return (optax.apply_updates(p, updates), state), None

        (after, _), _ = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g))(start, grads)
        return {k: np.asarray(p) for k, p in after.items()}


def _plain(rule: Any, params: Any, settings: Settings) -> Any:
    return rule(params, **settings)


def _keywords(rule: Any, params: Any, settings: Settings) -> Any:
    return rule(**settings)


def _muon_group(rule: Any, params: Any, settings: Settings) -> Any:
    return rule([{"use_muon": True, "params": params, **settings}])


def _muon_optax(rule: Any, params: Any, settings: Settings) -> Any:
    axes = load("optax.contrib:MuonDimensionNumbers")
    return rule(**settings, muon_weight_dimension_numbers={k: axes((1,), (0,)) for k in params})


# ---- the table ----------------------------------------------------------------------------------------------------------
ADAM: Settings = {"lr": 0.01, "betas": (0.8, 0.9)}
PAIR: Settings = {"learning_rate": 0.01, "b1": 0.8, "b2": 0.9}
DECAY: Settings = {"weight_decay": 0.1}
EPS: Settings = {"eps": 1e-15}  # next to none, where the libraries put it in different places
STABLE: Settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, **DECAY}
MIX: Settings = {"lr": 0.01, "betas": (0.8, 0.9, 0.99)}
NESTEROV: Settings = {"lr": 0.01, "betas": (0.9, 0.8, 0.7)}
SLOW = "torch.optim.Muon rounds to bfloat16 before its products"
ROUNDED = "pytorch_optimizer's NorMuon rounds to bfloat16 before its products"
MATRICES = ("w", "tall", "wide")
PEERS = [
    Peer("sgd", "torch", "torch.optim:SGD", {"lr": 0.05, "momentum": 0.9, **DECAY}, {"lr": 0.05, "momentum": 0.9, **DECAY}),
    Peer(
        "sgd",
        "optax",
        "optax:sgd",
        {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    ),
    Peer("adam", "torch", "torch.optim:Adam", {**ADAM, **DECAY}, {**ADAM, **DECAY}),
    Peer("adam", "optax", "optax:adam", PAIR, ADAM),
    Peer("adamw", "torch", "torch.optim:AdamW", {**ADAM, **DECAY}, {**ADAM, **DECAY}),
    Peer("adamw", "optax", "optax:adamw", {**PAIR, **DECAY}, {**ADAM, **DECAY}),
    Peer(
        "nadamw",
        "torch",
        "torch.optim:NAdam",
        {**ADAM, **DECAY, "decoupled_weight_decay": True},
        {**ADAM, **DECAY, "convention": "torch"},
    ),
    Peer("nadamw", "optax", "optax:nadamw", {**PAIR, **DECAY}, {**ADAM, **DECAY, "convention": "dozat"}),
    Peer("radam", "torch", "torch.optim:RAdam", {**ADAM, **DECAY}, {**ADAM, **DECAY, "convention": "torch"}),
    Peer("radam", "optax", "optax:radam", {**PAIR, "threshold": 4.0}, {**ADAM, "convention": "paper"}),
    Peer(
        "qhadamw",
        "pytorch_optimizer",
        "pytorch_optimizer:QHAdam",
        {**ADAM, "nus": (0.7, 0.9), **DECAY, "weight_decouple": True},
        {**ADAM, "nus": (0.7, 0.9), **DECAY},
    ),
    Peer("stableadamw", "pytorch_optimizer", "pytorch_optimizer:StableAdamW", {**STABLE, "kahan_sum": False}, STABLE),
    Peer("ademamix", "optax", "optax.contrib:ademamix", {**PAIR, "b3": 0.99, "alpha": 2.0, **DECAY}, {**MIX, **DECAY}),
    Peer(
        "ademamix",
        "pytorch_optimizer",
        "pytorch_optimizer:AdEMAMix",
        {**MIX, "alpha": 2.0, **DECAY, "weight_decouple": True},
        {**MIX, **DECAY},
    ),
    Peer(
        "adan",
        "optax",
        "optax:adan",
        {"learning_rate": 0.01, "b1": 0.9, "b2": 0.5, "b3": 0.8, "eps_root": 0.0, **DECAY},
        {"lr": 0.01, "betas": (0.9, 0.5, 0.8), "no_prox": True, **DECAY},
        remark="at b2 = 0.5, where optax's 1 − b2 is the authors' b2",
    ),
    Peer("adan", "pytorch_optimizer", "pytorch_optimizer:Adan", {**NESTEROV, **DECAY}, {**NESTEROV, **DECAY}),
    Peer("adopt", "optax", "optax.contrib:adopt", PAIR, ADAM, remark="without decay, which optax's does not have"),
    Peer(
        "adopt",
        "pytorch_optimizer",
        "pytorch_optimizer:ADOPT",
        {**ADAM, **DECAY, "clip_lambda": lambda t: (t - 1) ** 0.25},
        {**ADAM, **DECAY},
        remark="its clip, at t^0.25, moved by a step",
    ),
    Peer(
        "laprop",
        "pytorch_optimizer",
        "pytorch_optimizer:LaProp",
        {**ADAM, **DECAY},
        {**ADAM, **DECAY, "convention": "timm"},
    ),
    Peer("lars", "optax", "optax:lars", {"learning_rate": 5.0, **DECAY}, {"lr": 5.0, **DECAY}),
    Peer(
        "lars",
        "pytorch_optimizer",
        "pytorch_optimizer:LARS",
        {"lr": 5.0, **DECAY},
        {"lr": 5.0, **DECAY, "convention": "timm"},
        remark="matrices; it steps vectors as SGD",
        tensors=MATRICES,
    ),
    Peer("lamb", "optax", "optax:lamb", {**PAIR, "eps": 1e-8, **DECAY}, {**ADAM, "eps": 1e-8, **DECAY}),
    Peer(
        "adafactor",
        "torch",
        "torch.optim:Adafactor",
        {"lr": 0.02, "eps": (1e-30, 1e-3), "foreach": False},
        {"lr": 0.02, "convention": "torch"},
    ),
    Peer(
        "adafactor",
        "optax",
        "optax:adafactor",
        {"learning_rate": 0.02, "min_dim_size_to_factor": 1, "dtype_momentum": "float64"},
        {"lr": 0.02},
        remark="matrices and vectors; optax factors other axes of larger tensors",
        tensors=("w", "tall", "wide", "vector", "scalar"),
    ),
    Peer("lion", "optax", "optax:lion", {"learning_rate": 0.01, "b1": 0.9, "b2": 0.99, **DECAY}, {"lr": 0.01, **DECAY}),
    Peer("lion", "pytorch_optimizer", "pytorch_optimizer:Lion", {"lr": 0.01, **DECAY}, {"lr": 0.01, **DECAY}),
    Peer(
        "soap",
        "pytorch_optimizer",
        "pytorch_optimizer:SOAP",
        {"lr": 0.01, "max_precondition_dim": 6, "precondition_frequency": 3},
        {"lr": 0.01, "max_precond_dim": 6, "precondition_frequency": 3},
    ),
    Peer(
        "muon",
        "torch",
        "torch.optim:Muon",
        {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "original"},
        {"lr": 0.02},
        math.inf,
        SLOW,
        tensors=MATRICES,
    ),
    Peer(
        "muon",
        "optax",
        "optax.contrib:muon",
        {"learning_rate": 0.02, "nesterov": False, "eps": 1e-7},
        {"lr": 0.02, "nesterov": False},
        remark="without Nesterov momentum, whose bias optax corrects",
        prepare=_muon_optax,
        tensors=MATRICES,
    ),
    Peer(
        "sophia",
        "pytorch_optimizer",
        "pytorch_optimizer:SophiaH",
        {"lr": 0.01, "betas": (0.9, 0.5), "p": 1.0, "eps": 1e-12, **DECAY, "update_period": 10**9},
        {"lr": 0.01, "betas": (0.9, 0.5), "gamma": 0.3, "clip": 1.0, "eps": 1e-12, **DECAY},
    ),
    Peer(
        "mars",
        "pytorch_optimizer",
        "pytorch_optimizer:MARS",
        {"lr": 0.01, "betas": (0.8, 0.9), "gamma": 0.3, "optimize_1d": True, **EPS, **DECAY},
        {"lr": 0.01, "betas": (0.8, 0.9), "gamma": 0.3, "otherwise": None, **EPS, **DECAY},
    ),
    Peer(
        "normuon",
        "pytorch_optimizer",
        "pytorch_optimizer:NorMuon",
        {"lr": 0.02},
        {"lr": 0.02},
        math.inf,
        ROUNDED,
        prepare=_muon_group,
        tensors=MATRICES,
    ),
    Peer(
        "scion",
        "pytorch_optimizer",
        "pytorch_optimizer:SCION",
        {"lr": 0.02, "momentum": 0.1, "constraint": True, "norm_type": 4, "norm_kwargs": {}},
        {"lr": 0.02, "momentum": 0.1, "norm": "sign"},
        remark="with the norm of signs; of the spectral one, it rounds to bfloat16 before its products",
        tensors=MATRICES,
    ),
    Peer(
        "prodigy",
        "optax",
        "optax.contrib:prodigy",
        {"learning_rate": 1.0, "betas": (0.8, 0.9), "estim_lr0": 0.05, **DECAY},
        {"betas": (0.8, 0.9), "d0": 0.05, "use_bias_correction": True, **DECAY},
        remark="with use_bias_correction",
    ),
    Peer(
        "prodigy",
        "pytorch_optimizer",
        "pytorch_optimizer:Prodigy",
        {"lr": 1.0, "betas": (0.8, 0.9), "d0": 0.05, **EPS, **DECAY, "weight_decouple": True},
        {"betas": (0.8, 0.9), "d0": 0.05, **EPS, **DECAY},
    ),
    Peer("schedulefreeadamw", "optax", "optax.contrib:schedule_free_adamw", {**PAIR, **DECAY}, {**ADAM, **DECAY}),
    Peer(
        "schedulefreesgd",
        "optax",
        "optax.contrib:schedule_free_sgd",
        {"learning_rate": 0.05, "b1": 0.8, **DECAY},
        {"lr": 0.05, "momentum": 0.8, **DECAY},
    ),
    Peer(
        "schedulefreesgd",
        "pytorch_optimizer",
        "pytorch_optimizer:ScheduleFreeSGD",
        {"lr": 0.05, "warmup_steps": 4, **DECAY},
        {"lr": 0.05, "warmup_steps": 4, **DECAY},
    ),
]
ALONE = {"kronpsgd": "its noise is drawn elsewhere in every library, so only engines are compared"}
