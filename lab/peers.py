"""The peers of a benchmark. PEERS is data: for each of our optimizers the same rule elsewhere, at our settings where it matters.

A new peer is a new line of it. Whatever the library, what runs is a `Contender`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from rlx_optim.threads import get_threads

Arrays = dict[str, np.ndarray]

LIBRARIES = ("torch", "optax", "pytorch_optimizer")


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something that can be stepped again and again. `renew` replaces every gradient by a new array of the same values."""

    label: str
    step: Callable[[], Any]
    state_bytes: Callable[[], int] = lambda: 0
    renew: Callable[[], None] = lambda: None
    wait: Callable[[], None] | None = None  # until the device is idle, where steps are only enqueued
    moved: int = 0  # bytes of a step, for the copy
    kept: str = "float32"  # the format of its state
    rounding: str | None = None  # of weights in bfloat16
    compile_s: float | None = None  # seconds until a step was traced and compiled, where that comes first


@dataclasses.dataclass(frozen=True)
class Peer:
    """A rule of another library: "module:function", its settings, and which of `HOW` steps it."""

    library: str
    label: str
    rule: str
    settings: dict[str, Any]
    how: str


# ---- the table --------------------------------------------------------------------------------------------------------
WAYS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}, "": {}}
CPU_WAYS = ("foreach", "loop")  # either may be the faster


def _torch(rule: str, *ways: str, how: str = "torch", library: str = "torch", **settings: Any) -> list[Peer]:
    module = "torch.optim" if library == "torch" else library
    return [Peer(library, f"{library} {way}".strip(), f"{module}:{rule}", settings | WAYS[way], how) for way in ways]


_po = functools.partial(_torch, library="pytorch_optimizer")


def _optax(rule: str, learning_rate: float = 1e-3, **settings: Any) -> list[Peer]:
    module, _, function = f"optax.{rule}".rpartition(".")
    return [Peer("optax", "optax", f"{module}:{function}", {"learning_rate": learning_rate, **settings}, "optax")]


KRON: dict[str, Any] = {"pre_conditioner_update_probability": 0.1}
QH: dict[str, Any] = {"betas": (0.995, 0.999), "nus": (0.7, 1.0), "weight_decay": 0.01, "weight_decouple": True}
NEVER = 10**9  # steps between estimates: the first is the only one
PEERS: dict[str, list[Peer]] = {
    "sgd": _torch("SGD", "fused", "foreach", lr=1e-3, momentum=0.9) + _optax("sgd", momentum=0.9),
    "adam": _torch("Adam", "fused", "foreach") + _optax("adam"),
    "adamw": _torch("AdamW", "fused", "foreach", weight_decay=0.01) + _optax("adamw", weight_decay=0.01),
    "nadamw": _torch("NAdam", *CPU_WAYS, weight_decay=0.01, decoupled_weight_decay=True) + _optax("nadamw", weight_decay=0.01),
    "radam": _torch("RAdam", *CPU_WAYS) + _optax("radam") + _po("RAdam", *CPU_WAYS),
    "qhadamw": _po("QHAdam", *CPU_WAYS, **QH),
    "stableadamw": _po("StableAdamW", *CPU_WAYS, weight_decay=0.2, kahan_sum=False),
    "ademamix": _optax("contrib.ademamix", alpha=2.0) + _po("AdEMAMix", *CPU_WAYS, alpha=2.0, weight_decouple=True),
    "adan": _optax("adan", eps_root=0.0) + _po("Adan", *CPU_WAYS),
    "adopt": _optax("contrib.adopt") + _po("ADOPT", *CPU_WAYS),
    "laprop": _po("LaProp", *CPU_WAYS),
    "lamb": _optax("lamb", weight_decay=0.01) + _po("Lamb", *CPU_WAYS, weight_decay=0.01),
    "lars": _optax("lars", 1.0) + _po("LARS", *CPU_WAYS, lr=1.0),
    "adafactor": _torch("Adafactor", *CPU_WAYS) + _optax("adafactor", 1e-2) + _po("AdaFactor", *CPU_WAYS, betas=(None, 0.999)),
    "lion": _optax("lion", 1e-4, weight_decay=0.0) + _po("Lion", *CPU_WAYS),
    "soap": _po("SOAP", ""),
    "kronpsgd": _po("Kron", "", **KRON),
    "muon": (
        _torch("Muon", "", how="torch, AdamW for the rest", lr=0.02, weight_decay=0.0)
        + _optax("contrib.muon", 0.02)
        + _po("Muon", *CPU_WAYS, how="torch, Muon groups", lr=0.02)
    ),
    "sophia": (
        _optax("contrib.sophia", weight_decay=0.1, hessian_diagonal_fn="optax:identity", update_interval=NEVER)
        + _po("SophiaH", *CPU_WAYS, how="torch, one estimate", lr=1e-3, p=1.0, weight_decay=0.1, update_period=NEVER)
    ),
    "mars": _po("MARS", *CPU_WAYS),
    "prodigy": _optax("contrib.prodigy", 1.0) + _po("Prodigy", *CPU_WAYS, lr=1.0),
    "normuon": _po("NorMuon", *CPU_WAYS, how="torch, Muon groups", lr=0.02),
    "schedulefreeadamw": _optax("contrib.schedule_free_adamw", 2.5e-3) + _po("ScheduleFreeAdamW", *CPU_WAYS, lr=2.5e-3),
    "schedulefreesgd": _optax("contrib.schedule_free_sgd", 1.0) + _po("ScheduleFreeSGD", *CPU_WAYS, lr=1.0),
}

#: what a fair reader should know
REMARKS = {
    "kronpsgd": "all update their factors once in 10 steps",
    "muon": "every matrix counts as hidden, embeddings too; torch and pytorch_optimizer multiply in bfloat16, others in float32",
    "sophia": "steps alone, without estimates of the curvature",
}


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


# ---- how each is run ----------------------------------------------------------------------------------------------------
def _matrix(tensor: Any) -> bool:
    return bool(tensor.ndim == 2)


def _plain(make: Any, tensors: list[Any], settings: dict[str, Any], hidden: Any = _matrix) -> list[Any]:
    return [make(tensors, **settings)]


def _split(make: Any, tensors: list[Any], settings: dict[str, Any], hidden: Any = _matrix) -> list[Any]:
    matrices, rest = [p for p in tensors if hidden(p)], [p for p in tensors if not hidden(p)]
    adamw = functools.partial(load("torch.optim:AdamW"), fused=True)
    return ([make(matrices, **settings)] if matrices else []) + ([adamw(rest)] if rest else [])


def _groups(make: Any, tensors: list[Any], settings: dict[str, Any], hidden: Any = _matrix) -> list[Any]:
    groups = [{"params": [p for p in tensors if hidden(p) is matrix], "use_muon": matrix} for matrix in (True, False)]
    return [make([group for group in groups if group["params"]], **settings)]


def _one_estimate(make: Any, tensors: list[Any], settings: dict[str, Any], hidden: Any = _matrix) -> list[Any]:
    made = make(tensors, **settings)
    made.step(hessian=[p.grad.abs() for p in tensors])
    return [made]


HOW = {"torch": _plain, "torch, AdamW for the rest": _split, "torch, Muon groups": _groups, "torch, one estimate": _one_estimate}


def torch_contender(peer: Peer, params: Arrays, grads: Arrays) -> Contender:
    """A torch optimizer on parameters of its own."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(get_threads())
    tensors = [torch.nn.Parameter(torch.tensor(p)) for p in params.values()]
    for tensor, g in zip(tensors, grads.values(), strict=True):
        tensor.grad = torch.tensor(g)
    return running(peer.label, HOW[peer.how](load(peer.rule), tensors, peer.settings), tensors)


def running(label: str, made: list[Any], tensors: list[Any], wait: Callable[[], None] | None = None) -> Contender:
    """Torch optimizers that together step these tensors."""

    def step() -> None:
        for optimizer in made:
            optimizer.step()

    def renew() -> None:
        for tensor in tensors:
            tensor.grad = tensor.grad.clone()

    return Contender(label, step, lambda: sum(_tensor_bytes(m.state.values()) for m in made), renew, wait)


def _tensor_bytes(values: Iterable[Any]) -> int:
    """Bytes of all tensors in nested containers."""
    total = 0
    for value in values:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
        total += getattr(value, "nbytes", 0) if inside is None else _tensor_bytes(inside)
    return total


def optax_contender(peer: Peer, params: Arrays, grads: Arrays, device: Any = None) -> Contender:
    """An optax rule, on the CPU or the device given."""
    # a setting with a colon names a function without arguments
    settings = {k: load(v)() if isinstance(v, str) and ":" in v else v for k, v in peer.settings.items()}
    return jitted(peer.label, load(peer.rule)(**settings), params, grads, device)


def jitted(label: str, rule: Any, params: Arrays, grads: Arrays, device: Any = None) -> Contender:
    """A transformation in one jitted function that gives its buffers back. On a device steps are only enqueued."""
    jax, optax = importlib.import_module("jax"), importlib.import_module("optax")
    place = device or jax.devices("cpu")[0]

    def advance(p: Any, state: Any, g: Any) -> Any:
        updates, state = rule.update(g, state, p)
        return optax.apply_updates(p, updates), state

    def put(arrays: Arrays) -> Any:
        return {name: jax.device_put(jax.numpy.array(array), place) for name, array in arrays.items()}

    p, g = put(params), put(grads)
    now = [p, jax.device_put(jax.jit(rule.init)(p), place), g]  # all committed to the device
    start = time.perf_counter()
    compiled = jax.jit(advance, donate_argnums=(0, 1)).lower(*now).compile()
    took = time.perf_counter() - start

    def step() -> None:
        now[:2] = compiled(*now)
        if device is None:
            wait()

    def wait() -> None:
        jax.block_until_ready(now[0])

    def renew() -> None:
        now[2] = {name: jax.device_put(jax.numpy.array(array), place) for name, array in now[2].items()}

    held = lambda: sum(leaf.nbytes for leaf in jax.tree.leaves(now[1]))  # noqa: E731
    return Contender(label, step, held, renew, None if device is None else wait, compile_s=took)


def contender(peer: Peer, params: Arrays, grads: Arrays) -> Contender:
    return (optax_contender if peer.how == "optax" else torch_contender)(peer, params, grads)
