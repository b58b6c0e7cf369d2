"""One small problem, walked by an optimizer on any engine, and how far two walks end from each other.

`parity` measures engines and their peers with it.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx_optim import create
from rlx_optim.check.engines import say_missing
from rlx_optim.engines import no_compiler
from rlx_optim.numpy.curvature import CurvatureOptimizer
from rlx_optim.registry import required, spec_class

Arrays = dict[str, np.ndarray]
Settings = dict[str, Any]

STEPS = 20
SHAPES = {"w": (24, 16), "tall": (40, 8), "wide": (6, 30), "vector": (37,), "scalar": (), "conv": (4, 3, 3, 2)}
FAST: Settings = {"lr": 0.01}  # far enough that a unit in the last place of a parameter does not show
#: what is not the default. SOAP: dimensions whose first Gram matrix has full rank, or rounding would choose its basis
SETTINGS: dict[str, Settings] = {
    **dict.fromkeys(
        ("adam", "adamw", "nadamw", "radam", "qhadamw", "sophia", "mars", "lion", "stableadamw", "adan", "adopt", "laprop"), FAST
    ),
    "sgd": {"lr": 0.01, "momentum": 0.9},
    "ademamix": {"lr": 0.01, "alpha_warmup": 10, "beta3_warmup": 15},
    "lamb": {"lr": 0.05},
    "lars": {"lr": 10.0, "weight_decay": 0.1},
    "adafactor": {"lr": 0.05, "eps": (1e-30, 1e-3), "convention": "paper"},
    "soap": {"lr": 0.01, "max_precond_dim": 6},
}
EVERY = 10  # steps between Sophia's estimates
MATRIX_BAR, BAR = 1e-3, 2e-5  # how far from the reference is still right, for rules that multiply matrices and for the others


def settings_of(name: str) -> Settings:
    return SETTINGS.get(name) or dict(required(spec_class(name)))


def bar_of(name: str) -> float:
    return MATRIX_BAR if spec_class(name).matrix else BAR


@dataclasses.dataclass(frozen=True)
class Problem:
    """Where the parameters start, the gradients of every step, and a diagonal Hessian."""

    start: Arrays
    gradients: list[Arrays]
    hessian: Arrays


def problem(steps: int = STEPS, names: Sequence[str] = tuple(SHAPES)) -> Problem:
    rng = np.random.default_rng(0)

    def draw(scale: float) -> Arrays:
        return {k: np.asarray(scale * rng.standard_normal(SHAPES[k]), np.float32) for k in names}

    start, drift, hessian = draw(0.1), draw(0.05), draw(10.0)
    gradients = [{k: np.asarray(drift[k] + noise) for k, noise in draw(0.1).items()} for _ in range(steps)]
    return Problem(start, gradients, {k: np.asarray(np.abs(h)) for k, h in hessian.items()})


def distance(got: Arrays, want: Arrays, start: Arrays) -> float:
    """max|got − want| over the distance travelled, the worst of all tensors."""
    worst = 0.0
    for name, value in want.items():
        moved = np.abs(value.astype(np.float64) - start[name]).max()
        gap = np.abs(got[name].astype(np.float64) - value).max()
        worst = max(worst, float(gap / max(moved, 1e-30))) if np.isfinite(gap) else math.inf
    return worst


# ---- engines ------------------------------------------------------------------------------------------------------------
def named(name: str, settings: Settings, todo: Problem, engine: str = "reference", precision: str = "float32") -> Arrays:
    opt = create(name, engine=engine, precision=precision, **settings)
    params = {k: p.copy() for k, p in todo.start.items()}
    for t, grads in enumerate(todo.gradients):
        if isinstance(opt, CurvatureOptimizer) and t % EVERY == 0:
            for k, h in todo.hessian.items():
                opt.update_hessian(k, h)
        opt.step_all(params, grads)
    return params


def torch_(name: str, settings: Settings, todo: Problem, engine: str = "torch", device: str = "cpu") -> Arrays:
    torch, front = importlib.import_module("torch"), importlib.import_module("rlx_optim.torch")
    params = {k: torch.nn.Parameter(torch.tensor(p, device=device)) for k, p in todo.start.items()}
    hessian = {k: torch.tensor(h, device=device) for k, h in todo.hessian.items()}
    opt = front.create(name, list(params.items()), engine=engine, **settings)
    for grads in todo.gradients:
        if spec_class(name).observes:
            opt.update_hessian(lambda: sum((hessian[k] * p * p).sum() / 2 for k, p in params.items()), every=EVERY)
        for k, p in params.items():
            p.grad = torch.tensor(grads[k], device=device)
        opt.step()
    return {k: p.detach().cpu().numpy() for k, p in params.items()}


def jax_(name: str, settings: Settings, todo: Problem) -> Arrays:
    jax, optax = importlib.import_module("jax"), importlib.import_module("optax")
    from rlx_optim.optax.estimates import with_estimates
    from rlx_optim.optax.leaves import ScheduledRule
    from rlx_optim.optax.transform import Transform, transformation

    kind, fallback = spec_class(name), spec_class(name).otherwise_default
    other = None if fallback is None else ScheduledRule(spec_class(fallback.name), fallback.settings)
    rule = Transform(ScheduledRule(kind, kind(**settings).values()), other)
    tx: Any = transformation(rule, with_estimates(rule, EVERY, 0)) if kind.observes else transformation(rule)
    extra: Any = {"obj_fn": lambda p: sum((h * p[k] * p[k]).sum() / 2 for k, h in todo.hessian.items())} if kind.observes else {}

    def step(carry: Any, g: Any) -> Any:
        p, state = carry
        updates, state = tx.update(g, state, p, **extra)
        return (optax.apply_updates(p, updates), state), None

    start = {k: jax.numpy.asarray(p) for k, p in todo.start.items()}
    grads = {k: jax.numpy.stack([g[k] for g in todo.gradients]) for k in start}
    with jax.default_matmul_precision("highest"):  # accelerators multiply with fewer bits unless told
        (after, _), _ = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g))(start, grads)
    return {k: np.asarray(p) for k, p in after.items()}


@dataclasses.dataclass(frozen=True)
class Place:
    """An engine: how an optimizer walks on it, and why it is not there (None where it is)."""

    walk: Callable[[str, Settings, Problem], Arrays]
    missing: Callable[[], str | None]
    what: str


def _cpu(precision: str) -> Callable[[str, Settings, Problem], Arrays]:
    return lambda name, settings, todo: named(name, settings, todo, "cpu", precision)


def _torch(engine: str, device: str) -> Callable[[str, Settings, Problem], Arrays]:
    return lambda name, settings, todo: torch_(name, settings, todo, engine, device)


ENGINES = {
    "reference": Place(named, lambda: None, "NumPy in float64"),
    "cpu": Place(_cpu("float32"), no_compiler, "compiled by LLVM, float32"),
    "cpu-float64": Place(_cpu("float64"), no_compiler, "compiled by LLVM, float64"),
    "torch": Place(_torch("torch", "cpu"), lambda: say_missing("torch"), "torch functions on CPU tensors"),
    "torch-cuda": Place(_torch("torch", "cuda"), lambda: say_missing("torch", gpu=True), "torch functions on CUDA tensors"),
    "triton": Place(
        _torch("triton", "cuda"), lambda: say_missing("torch", "triton", gpu=True), "compiled by Triton, CUDA tensors"
    ),
    "jax": Place(jax_, lambda: say_missing("jax", "optax"), "traced by JAX, as optax transformations"),
}


def walk(engine: str, name: str, settings: Settings, todo: Problem) -> Arrays:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # routing and first estimates are known here
        return ENGINES[engine].walk(name, settings, todo)
