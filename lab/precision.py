"""When numbers go wrong: small gradients, bfloat16 weights, half-precision products, directions that gradients lack, spikes. On a
CPU, in a minute.

python -m lab.precision          # writes benchmarks/precision.json, which docs/numbers.md shows
"""

from __future__ import annotations

import functools
import json
import platform
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlx_optim
import rlx_optim.torch as front
from rlx_optim import create, list_optimizers
from rlx_optim.coefficients import KELLER
from rlx_optim.registry import spec_class

SHAPE, STEPS, SPIKE_AT, SPIKE = (32, 32), 200, 100, 1000.0
SCALES = (1.0, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12)
Gradient = Callable[[int], np.ndarray]


def settings(name: str) -> dict[str, Any]:
    """A learning rate that is the same for all and matters to none of the ratios, no decay."""
    fields = spec_class(name).fields
    given: dict[str, Any] = {"lr": 1.0 if name == "prodigy" else 1e-3, "engine": "reference"}
    if "weight_decay" in fields:
        given["weight_decay"] = 0.0
    return given


def walk(name: str, gradient: Gradient, steps: int, **more: Any) -> np.ndarray:
    """Where the parameter is after every step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = create(name, **{**settings(name), **more})
    params, points = {"w": np.random.default_rng(7).normal(0, 0.1, SHAPE)}, []
    for t in range(steps):
        g = gradient(t)
        if spec_class(name).observes and t % 10 == 0:
            opt.update_hessian("w", g * g)  # type: ignore[attr-defined]
        opt.step_all(params, {"w": g})
        points.append(params["w"].copy())
    return np.array(points)


def noise(t: int) -> np.ndarray:
    """A gradient: a direction that stays, and noise of the same size."""
    return np.random.default_rng(3).normal(size=SHAPE) + np.random.default_rng([5, t]).normal(size=SHAPE)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))


def small(name: str) -> dict[str, float]:
    """How far 30 steps lead when gradients are so many times smaller, as a share of how far they lead when they are not."""
    far = {}
    for scale in SCALES:
        points = walk(name, lambda t, scale=scale: scale * noise(t), 30)
        far[scale] = rms(points[-1] - points[0])
    return {f"{scale:g}": far[scale] / far[1.0] for scale in SCALES[1:]}


def spike(name: str, **more: Any) -> dict[str, float]:
    """One gradient a thousand times too large: by how many ordinary steps it moved the parameter at once, and how large steps are
    20 and 99 steps later, as a share of what they would have been."""
    plain = walk(name, noise, STEPS, **more)
    hit = walk(name, lambda t: noise(t) * (SPIKE if t == SPIKE_AT else 1.0), STEPS, **more)
    sizes, hit_sizes = ([rms(step) for step in np.diff(points, axis=0)] for points in (plain, hit))
    usual = float(np.mean(sizes[SPIKE_AT - 50 : SPIKE_AT - 1]))
    later = {f"after_{n}": hit_sizes[SPIKE_AT - 1 + n] / sizes[SPIKE_AT - 1 + n] for n in (20, 99)}
    return {"moved": rms(hit[SPIKE_AT] - plain[SPIKE_AT]) / usual, **later}


def bfloat16(name: str, dtype: torch.dtype, **more: Any) -> float:
    """How far weights of 1 go in 400 steps at lr 2e-5 under a gradient that stays."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    given = {key: value for key, value in settings(name).items() if key != "engine"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = front.create(name, [("w", weight)], **{**given, "lr": 2e-5, **more})
    gradient = torch.from_numpy(np.random.default_rng(3).normal(size=(64, 64))).abs().to(dtype)
    for _ in range(400):
        weight.grad = gradient.clone()
        opt.step()
    return float((weight.detach().float() - 1).mean())


def polar(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Five steps of Newton–Schulz with products in a format."""
    a, b, c = KELLER
    x = (x / x.norm()).to(dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.double()


def products() -> dict[str, dict[str, float]]:
    """The relative error of Newton–Schulz in a format, by kind of matrix."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(128, 512, generator=generator, dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(n, 128, generator=generator, dtype=torch.float64))[0] for n in (128, 512))
    few = left * torch.where(torch.arange(128) < 16, 1.0, 1e-3) @ right.mT
    found = {}
    for kind, matrix in {"Gaussian": gaussian, "16 large directions of 128": few}.items():
        exact = polar(matrix, torch.float64)
        found[kind] = {
            name: float((polar(matrix, dtype) - exact).norm() / exact.norm())
            for name, dtype in {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}.items()
        }
    return found


def narrow(t: int) -> np.ndarray:
    """A gradient of size 1, in float32, that keeps to 8 directions on either side."""
    left, right = sides()
    g = left @ np.random.default_rng([5, t]).normal(size=(8, 8)) @ right.T
    return (g / rms(g)).astype(np.float32)


@functools.cache
def sides() -> list[np.ndarray]:
    fixed = np.random.default_rng(3)
    return [np.linalg.qr(fixed.normal(size=(n, n)))[0][:, :8] for n in MATRIX]


Ends = Callable[[str, np.ndarray], np.ndarray]


def outside(ends: Ends) -> dict[str, float]:
    """What share of the way that 40 steps make leads where gradients never go, by the arithmetic."""
    start, (left, right), found = np.random.default_rng(7).normal(0, 0.1, MATRIX).astype(np.float32), sides(), {}
    for dtype in ("float32", "float64"):
        way = ends(dtype, start) - start
        found[dtype] = rms(way - left @ (left.T @ way @ right) @ right.T) / rms(way)
    return found


def ours(name: str, **more: Any) -> Ends:
    def ends(dtype: str, start: np.ndarray) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt = create(name, **{**settings(name), **more, "engine": {"float32": "cpu", "float64": "reference"}[dtype]})
        params = {"w": start.copy()}
        for t in range(40):
            opt.step_all(params, {"w": narrow(t)})
        return params["w"].astype(np.float64)

    return ends


def theirs(dtype: str, start: np.ndarray) -> np.ndarray:
    """pytorch_optimizer's SOAP."""
    from pytorch_optimizer import SOAP

    weight = torch.nn.Parameter(torch.tensor(start, dtype=getattr(torch, dtype)))
    opt = SOAP([weight], lr=1e-3, weight_decay=0.0)
    for t in range(40):
        weight.grad = torch.from_numpy(narrow(t)).to(weight.dtype)
        opt.step()
    return weight.detach().double().numpy()


MATRIX = (96, 64)
WALKS: Mapping[str, Ends] = {
    "Muon": ours("muon"),
    "KronPSGD": ours("kronpsgd"),
    "SOAP": ours("soap"),
    "SOAP, eps 1e-6": ours("soap", eps=1e-6),
    "SOAP, eps 1e-4": ours("soap", eps=1e-4),
    "SOAP, eps 1e-2": ours("soap", eps=1e-2),
    "pytorch_optimizer's SOAP": theirs,
}
ROUNDED = ("adamw", "lion", "adafactor", "lamb", "muon", "soap")
NO_STREAM = ("prodigy",)  # finds its rate from how gradients change along the way, which a stream of them does not
GUARDED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "AdamW, b2 0.95": ("adamw", {"betas": (0.9, 0.95)}),
    "AdamW, skip_above 6": ("adamw", {"skip_above": 6.0}),
}


def measured() -> dict[str, Any]:
    names = list_optimizers()
    modes: dict[str, dict[str, Any]] = {"float32": {}}
    modes |= {f"bfloat16, {mode}": {"rounding": mode} for mode in ("nearest", "stochastic", "exact")}
    return {
        "command": "python -m lab.precision",
        "versions": {
            "python": platform.python_version(),
            "rlx_optim": rlx_optim.__version__,
            **{name: version(name) for name in ("numpy", "torch", "pytorch_optimizer")},
        },
        "small": {name: small(name) for name in names},
        "spikes": {
            **{spec_class(name).title: spike(name) for name in names if name not in NO_STREAM},
            **{words: spike(name, **more) for words, (name, more) in GUARDED.items()},
        },
        "bfloat16": {
            name: {mode: bfloat16(name, getattr(torch, mode.partition(",")[0]), **more) for mode, more in modes.items()}
            for name in ROUNDED
        },
        "products": products(),
        "outside": {words: outside(ends) for words, ends in WALKS.items()},
    }


def rounded(value: Any) -> Any:
    """Four digits: what is left differs from machine to machine."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    place = Path(__file__).parents[1] / "benchmarks" / "precision.json"
    place.write_text(json.dumps(rounded(measured()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
