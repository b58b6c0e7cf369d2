"""The race: every optimizer trains the same small network on handwritten digits.

    python -m rlx_optim.race
    python -m rlx_optim.race --optimizers adamw,muon --steps 200 --out my-race

All start from the same weights and see the same batches; only the optimizer differs. `train` runs one of them and prints
nothing; the command line is in `__main__`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import schedules
from ..data import load_digits
from ..named import create
from ..optimizer import CurvatureOptimizer, NamedOptimizer

LAYERS = {"fc1": (64, 64), "fc2": (64, 32), "head": (32, 10)}  # inputs, outputs; tanh between them
STEPS, BATCH, TRAIN = 500, 64, 1437  # TRAIN of the 1,797 digits are learned, the other 360 test
GOAL = 0.95  # the test accuracy that everyone reaches in a full race
HESSIAN_EVERY = 10  # steps between curvature estimates, for those that take them

#: lr is the peak: it falls to 0 along half a cosine. "otherwise" is the AdamW for tensors that the rule does not take.
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.2, "momentum": 0.9, "nesterov": True},
    "adam": {"lr": 1e-2},
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "nadamw": {"lr": 1e-2, "weight_decay": 0.1},
    "radam": {"lr": 3e-2},
    "qhadamw": {"lr": 1e-2, "weight_decay": 0.1},
    "lamb": {"lr": 1e-2},
    "adafactor": {"lr": 5e-2},
    "lion": {"lr": 2e-3, "weight_decay": 0.1},
    "soap": {"lr": 1e-2},
    "kronpsgd": {"lr": 1e-2},
    "muon": {"lr": 4e-2, "groups": [{"match": "head.*", "use": "otherwise"}], "otherwise": {"lr": 1e-2}},
    "sophia": {"lr": 4e-3, "weight_decay": 0.1},
    "mars": {"lr": 1e-2, "otherwise": {"lr": 1e-2}},
}

Arrays = dict[str, np.ndarray]


# ---- the network ------------------------------------------------------------------------------------------------------
def initial(rng: np.random.Generator, dtype: Any = np.float32) -> Arrays:
    """Weights (outputs × inputs) of variance 1/inputs, biases of zero."""
    params: Arrays = {}
    for layer, (inputs, outputs) in LAYERS.items():
        params[f"{layer}.weight"] = (rng.standard_normal((outputs, inputs)) / math.sqrt(inputs)).astype(dtype)
        params[f"{layer}.bias"] = np.zeros(outputs, dtype)
    return params


def forward(params: Arrays, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """What enters each layer, and the logits."""
    inputs: list[np.ndarray] = []
    logits = x
    for layer in LAYERS:
        inputs.append(np.tanh(logits) if inputs else x)
        logits = inputs[-1] @ params[f"{layer}.weight"].T + params[f"{layer}.bias"]
    return inputs, logits


def gradients(params: Arrays, x: np.ndarray, labels: np.ndarray) -> tuple[float, Arrays]:
    """The mean cross-entropy of a batch and its gradients, in the dtype of the parameters."""
    inputs, logits = forward(params, x)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    truth = (np.arange(len(x)), labels)
    delta = np.exp(log_p)
    delta[truth] -= 1
    delta /= len(x)
    grads: Arrays = {}
    for layer, entered in zip(reversed(LAYERS), reversed(inputs), strict=True):
        grads |= {f"{layer}.weight": delta.T @ entered, f"{layer}.bias": delta.sum(axis=0)}
        delta = (delta @ params[f"{layer}.weight"]) * (1 - entered**2)
    return -float(log_p[truth].mean()), grads


def curvature(params: Arrays, x: np.ndarray, rng: np.random.Generator) -> Arrays:
    """Gauss–Newton–Bartlett: batch size × squared gradient, at labels drawn from the model's own softmax."""
    logits = forward(params, x)[1]
    drawn = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return {name: len(x) * g * g for name, g in gradients(params, x, drawn)[1].items()}


# ---- one optimizer ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Result:
    """How one optimizer did. `curve` is the loss of every step's batch, before the step."""

    optimizer: str
    accuracy: float
    loss: float
    ms_per_step: float
    state_bytes: int
    settings: Mapping[str, Any]
    curve: list[float]


@functools.cache
def digits() -> tuple[np.ndarray, ...]:
    """Images and labels to learn, images and labels to test: the same split in every race."""
    images, labels = load_digits()
    order = np.random.default_rng(0).permutation(len(labels))
    learn, test = order[:TRAIN], order[TRAIN:]
    return images[learn], labels[learn], images[test], labels[test]


def batches(rng: np.random.Generator, steps: int) -> np.ndarray:
    """The rows of every step's batch: each epoch in its own order, one after the other."""
    epochs = -(-steps * BATCH // TRAIN)
    return np.concatenate([rng.permutation(TRAIN) for _ in range(epochs)])[: steps * BATCH].reshape(steps, BATCH)


def build(optimizer: str, settings: Mapping[str, Any], steps: int, engine: str) -> NamedOptimizer:
    """The optimizer at its settings, with the schedule that all share."""
    given = {**settings, "lr": schedules.cosine(settings["lr"], steps)}
    if "otherwise" in given:
        given["otherwise"] = build("adamw", given["otherwise"], steps, engine)
    return create(optimizer, engine=engine, **given)


def train(
    optimizer: str,
    settings: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    seed: int = 0,
    engine: str = "auto",
    tick: Callable[[], None] = lambda: None,
) -> Result:
    """Train the network once; `tick` is called after every step."""
    settings = SETTINGS[optimizer] if settings is None else settings
    images, labels, test_images, test_labels = digits()
    rng = np.random.default_rng(seed)
    params, opt = initial(rng), build(optimizer, settings, steps, engine)
    curve, seconds = [], []
    for step, rows in enumerate(batches(rng, steps)):
        x, y = images[rows], labels[rows]
        loss, grads = gradients(params, x, y)
        estimates: Arrays = {}
        if isinstance(opt, CurvatureOptimizer) and step % HESSIAN_EVERY == 0:
            estimates = curvature(params, x, rng)
        start = time.perf_counter()
        for name, estimate in estimates.items():
            opt.update_hessian(name, estimate)
        opt.step_all(params, grads)
        seconds.append(time.perf_counter() - start)
        curve.append(loss)
        tick()
    return Result(
        optimizer,
        accuracy=float((forward(params, test_images)[1].argmax(axis=1) == test_labels).mean()),
        loss=gradients(params, images, labels)[0],
        ms_per_step=1000 * float(np.mean(seconds[len(seconds) // 2 :])),  # the first steps compile
        state_bytes=opt.state_bytes(),
        settings=settings,
        curve=curve,
    )
