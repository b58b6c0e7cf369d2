"""The engines that are here, and how a rule is stepped on each, on NumPy's arrays."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..engine import Engine
from ..engines import get_engine, no_compiler
from ..spec import Spec
from ..stepping import TensorState, make_parts, run_part

Arrays = dict[str, list[np.ndarray]]


# ---- engines ---------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Speaker:
    """An engine, and how NumPy's arrays become what it steps, and back."""

    engine: Engine
    given: Callable[[np.ndarray], Any] = np.copy
    taken: Callable[[Any], np.ndarray] = np.asarray


def _torch(kind: str, device: str) -> Speaker:
    torch = importlib.import_module("torch")
    module, name = ("torch_", "TorchEngine") if kind == "torch" else ("triton_", "Triton")
    engine = getattr(importlib.import_module(f"rlx_optim.engines.{module}"), name)(device)
    return Speaker(engine, lambda a: torch.tensor(a, device=device), lambda t: t.cpu().numpy())


def _jax() -> Speaker:
    """The engine under jit, as `rlx_optim.optax` runs it: numbers are traced, but for zeros."""
    jax, jax_ = importlib.import_module("jax"), importlib.import_module("rlx_optim.engines.jax_")

    class Traced(jax_.Jax):  # type: ignore[name-defined, misc]
        def run_program(self, program: Any, shapes: Any, arrays: Any, numbers: Any) -> Any:
            zeros = {name: value for name, value in numbers.items() if type(value) is float and value == 0}
            return self.jitted(program, tuple(shapes), tuple(zeros))(arrays, {n: v for n, v in numbers.items() if n not in zeros})

        @functools.cache  # noqa: B019  (one engine, a table's programs)
        def jitted(self, program: Any, shapes: Any, zeros: Any) -> Any:
            whole = super().run_program

            def traced(arrays: Any, numbers: Any) -> Any:
                found = whole(program, shapes, arrays, {**numbers, **dict.fromkeys(zeros, 0.0)})
                return {n: found[n] for n in program.buffers.values()}

            return jax.jit(traced)

    return Speaker(Traced())


EXTRAS = {"torch": "torch", "jax": "jax", "optax": "jax"}  # of this package, by what they install


def say_missing(*libraries: str, gpu: bool = False) -> str | None:
    """Return which of these libraries is missing and how to get it, or that there is no GPU; None where all are here."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            wanted = f'"rlx-optim[{EXTRAS[library]}]"' if library in EXTRAS else library
            return f"{library} is not installed (pip install {wanted})"
    if gpu and not importlib.import_module("torch").cuda.is_available():
        return "torch sees no CUDA device"
    return None


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """How an engine is made, why it is not here (None where it is), and what it is."""

    make: Callable[[], Speaker]
    missing: Callable[[], str | None]
    what: str


INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
ENGINES: Mapping[str, EngineChoice] = {
    "reference": EngineChoice(lambda: Speaker(get_engine("reference")), lambda: None, "NumPy in float64"),
    "cpu": EngineChoice(lambda: Speaker(get_engine("cpu")), no_compiler, "compiled by LLVM, float32"),
    "cpu-float64": EngineChoice(lambda: Speaker(get_engine("cpu", "float64")), no_compiler, "compiled by LLVM, float64"),
    "torch": EngineChoice(lambda: _torch("torch", "cpu"), lambda: say_missing("torch"), "torch functions on CPU tensors"),
    "torch-cuda": EngineChoice(
        lambda: _torch("torch", "cuda"), lambda: say_missing("torch", gpu=True), "torch functions on CUDA tensors"
    ),
    "triton": EngineChoice(
        lambda: _torch("triton", "cpu" if INTERPRETED else "cuda"),
        lambda: say_missing("torch", "triton", gpu=not INTERPRETED),
        "compiled by Triton, CUDA tensors",
    ),
    "jax": EngineChoice(_jax, lambda: say_missing("jax"), "traced by JAX"),
}


@functools.cache
def get_speaker(name: str) -> Speaker:
    return ENGINES[name].make()


def list_present() -> list[str]:
    """Return the engines that are here."""
    return [name for name, engine in ENGINES.items() if engine.missing() is None]


# ---- stepping ---------------------------------------------------------------------------------------------------------------
class Walk:
    """Tensors, stepped by specs on an engine. apart: they are of different groups and have stepped before, differently often."""

    def __init__(self, specs: Sequence[Spec], who: Speaker, start: Sequence[np.ndarray], apart: bool = False, names: Any = None):
        self.specs, self.who = specs, who
        self.params = [who.given(p) for p in start]
        self.records = []
        for i, p in enumerate(start):
            record = TensorState(f"tensor {i}" if names is None else names[i], p.shape, i % len(specs) if apart else 0)
            record.t = i % 4 if apart else 0
            record.init_state(specs[record.group], who.engine.allocate)
            self.records.append(record)

    def step(self, gradients: Sequence[np.ndarray], scale: float = 1.0) -> None:
        grads = [self.who.given(g) for g in gradients]
        numbers: dict[Any, dict[str, Any]] = {}
        for part in make_parts(enumerate(self.records), self.specs, self.who.engine):
            params, mine = [self.params[i] for i in part.bundle.index], [grads[i] for i in part.bundle.index]
            run_part(part, self.who.engine, self.specs, numbers, params, mine, scale)

    def found(self) -> Arrays:
        """Parameters and state, by name."""
        names = dict.fromkeys(name for record in self.records for name in record.slots)
        state = {name: [self.who.taken(r.state[name]) for r in self.records if name in r.state] for name in names}
        return {"p": [self.who.taken(p) for p in self.params]} | state


def walk_by_optax(spec: Spec, start: Sequence[np.ndarray], gradients: Any, scheduled: bool) -> list[np.ndarray]:
    """Parameters after jitted updates of the factory of this rule in `rlx_optim.optax`, called as those of a `Walk`. scheduled:
    the learning rate is traced."""
    jax, factories = importlib.import_module("jax"), importlib.import_module("rlx_optim.optax.factories")
    settings = {keyword: value for keyword, (_, value) in factories.to_keywords(type(spec), spec.values()).items()}
    rate = settings["learning_rate"]
    given = settings | ({"learning_rate": lambda count: rate + 0.0 * count} if scheduled else {})
    tx = factories.make_factory(type(spec))(**given).init.__self__  # without estimates
    params = {f"tensor {i}": jax.numpy.asarray(p) for i, p in enumerate(start)}
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in gradients:
        updates, state = update({f"tensor {i}": g for i, g in enumerate(grads)}, state, params)
        params = {name: p + updates[name] for name, p in params.items()}
    return [np.asarray(p) for p in params.values()]


def find_gap(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """The largest difference over the largest value, tensor by tensor; inf where NaN or infinities are not the same."""
    worst = 0.0
    for mine, theirs in zip(got, want, strict=True):
        x, y = np.asarray(mine, np.float64).reshape(-1), np.asarray(theirs, np.float64).reshape(-1)
        fine = np.isfinite(y)
        if not np.array_equal(x[~fine], y[~fine], equal_nan=True) or not np.isfinite(x[fine]).all():
            return math.inf
        if fine.any():
            worst = max(worst, float(np.abs(x[fine] - y[fine]).max() / max(np.abs(y[fine]).max(), 1e-30)))
    return worst
