"""Handwritten digits in NumPy: a small network (`digits-mlp`) and, without hidden layers, a logistic regression (`logreg`)."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import schedules
from ..data import load_digits
from ..engines import list_engines
from ..numpy.classes import create
from ..numpy.curvature import CurvatureOptimizer
from ..numpy.optimizer import NamedOptimizer
from . import Run, Settings, Tick

BATCH, TRAIN = 64, 1437  # TRAIN of the 1,797 digits are learned, the other 360 test
HESSIAN_EVERY = 10  # steps between curvature estimates, for those that take them
WARM = 2  # steps on copies before the clock starts: the first ones compile

Arrays = dict[str, np.ndarray]


@functools.cache
def split_digits() -> tuple[np.ndarray, ...]:
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
    """The optimizer at its settings; lr is the peak of the schedule that all share, half a cosine down to 0."""
    given = {**settings, "lr": schedules.cosine(settings["lr"], steps)}
    if "otherwise" in given:
        given["otherwise"] = build("adamw", given["otherwise"], steps, engine)
    return create(optimizer, engine=engine, **given)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss of a batch, and the log-probabilities."""
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -float(log_p[np.arange(len(labels)), labels].mean()), log_p


class Digits:
    """Layers of (inputs, outputs) with tanh between them, trained on the digits."""

    metric, decides, seeds, steps = "accuracy", "train_loss", 3, 500
    devices: tuple[str, ...] = ("cpu",)
    device, halves = "cpu", False

    def __init__(self, name: str, title: str, layers: dict[str, tuple[int, int]], goal: float | None = None):
        self.name, self.title, self.layers, self.goal = name, title, layers, goal

    @property
    def engines(self) -> tuple[str, ...]:
        return ("auto", *list_engines())

    def describe(self) -> dict[str, Any]:
        return {
            "parameters": sum(outputs * (inputs + 1) for inputs, outputs in self.layers.values()),
            "layers": {name: list(shape) for name, shape in self.layers.items()},
            "batch": BATCH,
            "data": f"{TRAIN:,} handwritten digits of 8×8 pixels to learn, 360 others to test (UCI, CC BY 4.0)",
        }

    # ---- the network ----------------------------------------------------------------------------------------------------
    def initial(self, rng: np.random.Generator, dtype: Any = np.float32) -> Arrays:
        """Weights (outputs × inputs) of variance 1/inputs, biases of zero."""
        params: Arrays = {}
        for layer, (inputs, outputs) in self.layers.items():
            params[f"{layer}.weight"] = (rng.standard_normal((outputs, inputs)) / math.sqrt(inputs)).astype(dtype)
            params[f"{layer}.bias"] = np.zeros(outputs, dtype)
        return params

    def forward(self, params: Arrays, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """What enters each layer, and the logits."""
        inputs: list[np.ndarray] = []
        logits = x
        for layer in self.layers:
            inputs.append(np.tanh(logits) if inputs else x)
            logits = inputs[-1] @ params[f"{layer}.weight"].T + params[f"{layer}.bias"]
        return inputs, logits

    def gradients(self, params: Arrays, x: np.ndarray, labels: np.ndarray) -> tuple[float, Arrays]:
        """The mean cross-entropy of a batch and its gradients, in the dtype of the parameters."""
        inputs, logits = self.forward(params, x)
        loss, log_p = cross_entropy(logits, labels)
        delta = np.exp(log_p)
        delta[np.arange(len(x)), labels] -= 1
        delta /= len(x)
        grads: Arrays = {}
        for layer, entered in zip(reversed(self.layers), reversed(inputs), strict=True):
            grads |= {f"{layer}.weight": delta.T @ entered, f"{layer}.bias": delta.sum(axis=0)}
            delta = (delta @ params[f"{layer}.weight"]) * (1 - entered**2)
        return loss, grads

    def curvature(self, params: Arrays, x: np.ndarray, rng: np.random.Generator) -> Arrays:
        """Gauss–Newton–Bartlett: batch size × squared gradient, at labels drawn from the model's own softmax."""
        logits = self.forward(params, x)[1]
        drawn = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        return {name: len(x) * g * g for name, g in self.gradients(params, x, drawn)[1].items()}

    # ---- a run ------------------------------------------------------------------------------------------------------------
    def evaluate(self, params: Arrays) -> dict[str, float]:
        images, labels, test_images, test_labels = split_digits()
        logits = self.forward(params, test_images)[1]
        return {
            "accuracy": float((logits.argmax(axis=1) == test_labels).mean()),
            "test_loss": cross_entropy(logits, test_labels)[0],
            "train_loss": cross_entropy(self.forward(params, images)[1], labels)[0],
        }

    @np.errstate(all="ignore")  # a run that diverges says so by itself
    def train(self, optimizer: str, settings: Settings, steps: int, seed: int, engine: str, tick: Tick) -> Run:
        self._walk(optimizer, settings, WARM, seed, engine, lambda loss: None)
        run, params = self._walk(optimizer, settings, steps, seed, engine, tick)
        return run if run.diverged_at is not None else finish_run(run, self.evaluate(params))

    def _walk(self, optimizer: str, settings: Settings, steps: int, seed: int, engine: str, tick: Tick) -> tuple[Run, Arrays]:
        images, labels, *_ = split_digits()
        rng, noise = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        params, opt = self.initial(rng), build(optimizer, settings, steps, engine)
        run, stepping = Run(seed), Stopwatch()
        start = time.perf_counter()
        for step, rows in enumerate(batches(rng, steps)):
            x, y = images[rows], labels[rows]
            loss, grads = self.gradients(params, x, y)
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(loss)
            if not math.isfinite(loss):
                run.diverged_at = step
                break
            estimates: Arrays = {}
            if isinstance(opt, CurvatureOptimizer) and step % HESSIAN_EVERY == 0:
                estimates = self.curvature(params, x, noise)
            with stepping:
                for name, estimate in estimates.items():
                    opt.update_hessian(name, estimate)
                opt.step_all(params, grads)
            tick(loss)
        run.ms_per_step, run.state_bytes = stepping.late_ms(), opt.state_bytes()
        run.engine = next(iter(opt.engine_report().values()))
        return run, params


def finish_run(run: Run, metrics: dict[str, float]) -> Run:
    """A run that took all its steps, with what it came to; the last step may have thrown it."""
    if all(map(math.isfinite, metrics.values())):
        run.metrics = metrics
    else:
        run.diverged_at = len(run.losses)
    return run


class Stopwatch:
    """Seconds of every `with` block."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)

    def late_ms(self) -> float:
        """Milliseconds, the mean over the second half."""
        late = self.seconds[len(self.seconds) // 2 :]
        return 1e3 * sum(late) / max(len(late), 1)


MLP = Digits(
    "digits-mlp", "a small network on handwritten digits", {"fc1": (64, 64), "fc2": (64, 32), "head": (32, 10)}, goal=0.95
)
LOGREG = Digits("logreg", "a logistic regression on handwritten digits", {"head": (64, 10)})
