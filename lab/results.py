"""What a benchmark asks and finds, as data, and the arithmetic from seconds to rows."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Iterable
from typing import Any

from rlx_optim.cli import Problem, load_average, physical_memory
from rlx_optim.cli.costs import count_bytes, settings_of
from rlx_optim.cli.shapes import Shapes, count_numbers
from rlx_optim.registry import spec_class
from rlx_optim.threads import available, get_threads

from .peers import PEERS, REMARKS, Peer, installed

BUSY = 0.5  # load average
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure. `peers` are libraries; `seconds` is about how long a turn takes."""

    model: str
    shapes: Shapes
    optimizers: list[str]
    peers: list[str]
    rounds: int = 7
    seconds: float = 0.3
    fresh_gradients: bool = False
    threads: int | None = None
    device: str = "cpu"
    front: str = "torch"  # of ours, on a CUDA device
    state_dtypes: tuple[str, ...] = ()  # formats of state in which ours is measured beside float32
    weights: str = "float32"  # and gradients; in bfloat16 ours is measured with each rounding


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of a step in each turn of one implementation."""

    implementation: str
    seconds: list[float]
    steps_per_turn: int
    state_bytes: int
    host_seconds: float | None = None  # until a step is enqueued
    kept: str = "float32"  # the format of its state
    rounding: str | None = None  # of weights in bfloat16
    compile_s: float | None = None  # seconds until a step was compiled
    first_s: float | None = None  # seconds of the first step


@dataclasses.dataclass(frozen=True)
class Row:
    """One optimizer in one implementation: the median over its turns, and the best and the worst turn."""

    optimizer: str
    implementation: str
    ms_per_step: float
    ms_best: float
    ms_worst: float
    ns_per_parameter: float
    gb_per_second: float | None  # the bytes that the rule needs over the time; None for a matrix rule
    copy_gb_per_second: float | None  # of a memory copy between the same turns
    copy_fraction: float | None
    state_bytes_per_parameter: float
    ratio_to_best_peer: float | None  # the best peer's time over this one: above 1 is faster than every peer
    turns: int
    steps_per_turn: int
    host_ms: float | None = None  # until a step is enqueued, on a device
    compile_s: float | None = None  # seconds until a step of a JAX program is traced and compiled
    first_s: float | None = None  # seconds of the first step, with what it compiles and is not cached yet


@dataclasses.dataclass
class Report:
    """Everything a run found, and where."""

    model: str
    tensors: int
    parameters: int
    settings: dict[str, Any]
    machine: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)  # who is missing or failed, and what else to know
    interrupted: bool = False


def label_of(kept: str, rounding: str | None = None) -> str:
    """Ours, by the format of its state and how weights in bfloat16 are rounded."""
    return ", ".join(filter(None, ("ours", "" if kept == "float32" else f"{kept} state", rounding)))


def traffic(name: str, shapes: Shapes, kept: str = "float32", rounding: str | None = None) -> float | None:
    """Bytes a parameter for these tensors: what a rule does not take counts as its `otherwise`. kept: the format of its state.
    rounding: of weights in bfloat16."""
    rule, fallback = spec_class(name)(**settings_of(name), state_dtype=kept), spec_class(name).otherwise_default
    other = None if fallback is None else spec_class(fallback.name)(**fallback.settings, state_dtype=kept)
    total = 0.0
    for shape in shapes.values():
        each = count_bytes(rule if other is None or rule.takes(shape) is None else other, shape, rounding)
        if each is None:
            return None
        total += each * math.prod(shape)
    return total / count_numbers(shapes)


# ---- before anything runs -----------------------------------------------------------------------------------------------
def present(name: str, request: Request) -> list[Peer]:
    """The peers that take part."""
    return [peer for peer in PEERS.get(name, ()) if peer.library in request.peers and installed(peer.library)]


def turns(request: Request) -> list[int]:
    """How many implementations of each optimizer take turns; one tensor alone is stepped by `step` as well."""
    more = len(request.state_dtypes) + (len(request.shapes) == 1)
    return [1 + more + len(present(name, request)) for name in request.optimizers]


def check_memory(request: Request) -> None:
    """Refuse a model that could not be held as often as it is needed: parameters, gradients, state and scratch of each."""
    count, most = count_numbers(request.shapes), max(turns(request))
    if 4 * count * (2 + 5 * most) > physical_memory() > 0:
        raise Problem(f"model {request.model}: {count:,} parameters in {most} implementations are too many for this memory")


def routing_note(name: str, shapes: Shapes) -> str | None:
    """What to know when a rule for matrices meets none."""
    kind = spec_class(name)
    if any(len(shape) > 1 for shape in shapes.values()) or not (kind.matrix or kind.otherwise_default):
        return None
    if kind.otherwise_default is None:
        return f"note: {name}: there are only vectors here; it steps them itself, without matrices"
    return f"note: {name}: there are only vectors here; all go to `otherwise` ({kind.otherwise_default.name})"


def notes(request: Request) -> list[str]:
    """What can be said before anything runs."""
    load = load_average()
    busy = f"note: load average {load:.1f} at the start: if something else is running, these times mean little"
    said = [busy] if load > BUSY else []
    said += [f"missing: {library} (pip install {library})" for library in request.peers if not installed(library)]
    said += [note for name in request.optimizers if (note := routing_note(name, request.shapes))]
    for name in request.optimizers:
        if present(name, request) and name in REMARKS:
            said.append(f"note: {name}: {REMARKS[name]}")
        if request.peers and not any(peer.library in request.peers for peer in PEERS.get(name, ())):
            said.append(f"note: {name}: none of {', '.join(request.peers)} has it")
    matrix = any(spec_class(name).matrix for name in request.optimizers)
    if matrix and get_threads() < available() and not any(map(os.environ.get, BLAS_THREADS)):
        said.append(f"note: NumPy's BLAS keeps its own threads; set {BLAS_THREADS[0]}={get_threads()} before starting")
    return said


# ---- after ------------------------------------------------------------------------------------------------------------
def rows(name: str, shapes: Shapes, timings: Iterable[Timing], copy_gb: float | None) -> list[Row]:
    """The rows of one optimizer."""
    medians = {t.implementation: statistics.median(t.seconds) for t in timings}
    best = min((median for label, median in medians.items() if not label.startswith("ours")), default=None)
    count, made = count_numbers(shapes), []
    for t in timings:
        median, needed = medians[t.implementation], traffic(name, shapes, t.kept, t.rounding)
        speed = None if needed is None else needed * count / median / 1e9
        made.append(
            Row(
                optimizer=name,
                implementation=t.implementation,
                ms_per_step=1e3 * median,
                ms_best=1e3 * min(t.seconds),
                ms_worst=1e3 * max(t.seconds),
                ns_per_parameter=1e9 * median / count,
                gb_per_second=speed,
                copy_gb_per_second=copy_gb,
                copy_fraction=None if speed is None or copy_gb is None else speed / copy_gb,
                state_bytes_per_parameter=t.state_bytes / count,
                ratio_to_best_peer=None if best is None else best / median,
                turns=len(t.seconds),
                steps_per_turn=t.steps_per_turn,
                host_ms=None if t.host_seconds is None else 1e3 * t.host_seconds,
                compile_s=t.compile_s,
                first_s=t.first_s,
            )
        )
    return made
