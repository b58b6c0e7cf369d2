"""Measuring steps: ours, its peers and a memory copy take turns, round after round. Gives a `Report` and prints nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rlx_optim import create
from rlx_optim.cli import get_machine
from rlx_optim.cli.costs import settings_of
from rlx_optim.cli.shapes import Shapes, count_numbers
from rlx_optim.numpy.curvature import CurvatureOptimizer
from rlx_optim.threads import get_threads, set_threads

from . import cuda
from .peers import Arrays, Contender, contender
from .results import Report, Request, Timing, label_of, notes, present, rows

Tick = Callable[[str], None]

COPIED = 1 << 26  # float32 elements of the memory copy: 256 MiB read and as much written, far beyond any cache
CYCLE = {"soap": 10, "kronpsgd": 10}  # steps from one update of the preconditioner to the next: a turn takes whole cycles


# ---- who runs ---------------------------------------------------------------------------------------------------------
def draw(shapes: Shapes) -> tuple[Arrays, Arrays]:
    """Parameters and gradients."""
    rng = np.random.default_rng(0)
    first, second = ({k: rng.standard_normal(s, np.float32) * np.float32(0.02) for k, s in shapes.items()} for _ in range(2))
    return first, second


def ours(name: str, params: Arrays, grads: Arrays, single: bool = False, kept: str = "float32") -> Contender:
    """Our optimizer on copies of the parameters: all tensors in one pass, or each by `step`. Every matrix counts as hidden."""
    made = create(name, engine="cpu", groups=[{"match": "*", "use": "own"}], **settings_of(name), state_dtype=kept)
    params, grads = {k: p.copy() for k, p in params.items()}, dict(grads)
    if isinstance(made, CurvatureOptimizer):
        for k, g in grads.items():
            made.update_hessian(k, abs(g))

    def step() -> None:
        for k, p in params.items():
            made.step(k, p, grads[k])
        made.end_iteration()

    def renew() -> None:
        grads.update({k: g.copy() for k, g in grads.items()})

    whole = functools.partial(made.step_all, params, grads)
    label = "ours (step)" if single else label_of(kept)
    return Contender(label, step if single else whole, made.state_bytes, renew, kept=kept)


def memory_copy() -> Contender:
    """A copy on all threads, in slices: NumPy copies those as fast as the machine can."""
    source, target = np.ones(COPIED, np.float32), np.zeros(COPIED, np.float32)
    pieces = get_threads()
    slices = [slice(k * COPIED // pieces, (k + 1) * COPIED // pieces) for k in range(pieces)]
    threads = ThreadPoolExecutor(pieces)

    def step() -> None:
        list(threads.map(lambda part: np.copyto(target[part], source[part]), slices))

    return Contender("copy", step, moved=8 * COPIED)


def field(name: str, request: Request, arrays: tuple[Arrays, Arrays]) -> dict[str, Callable[[], Contender]]:
    """Who competes, by label, not built yet."""
    runs: dict[str, Callable[[], Contender]] = {"ours": functools.partial(ours, name, *arrays)}
    if len(request.shapes) == 1:
        runs["ours (step)"] = functools.partial(ours, name, *arrays, single=True)
    runs |= {label_of(kept): functools.partial(ours, name, *arrays, kept=kept) for kept in request.state_dtypes}
    return runs | {peer.label: functools.partial(contender, peer, *arrays) for peer in present(name, request)}


# ---- turns ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Entrant:
    """A contender, how many steps its turn has, and the seconds that a step took, turn by turn."""

    contender: Contender
    steps: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    host: float | None = None  # seconds until a step is enqueued
    first: float | None = None  # seconds of the first step

    def play(self, fresh: bool) -> None:
        self.seconds.append(turn(self.contender, self.steps, fresh) / self.steps)


def turn(contender: Contender, steps: int, fresh: bool) -> float:
    """Seconds that so many steps take; making fresh gradients is not counted."""
    step, clock, total, wait = contender.step, time.perf_counter, 0.0, contender.wait or (lambda: None)
    wait()
    if not fresh:
        start = clock()
        for _ in range(steps):
            step()
        wait()
        return clock() - start
    for _ in range(steps):
        contender.renew()
        wait()
        start = clock()
        step()
        wait()
        total += clock() - start
    return total


def enqueue(contender: Contender, fresh: bool, times: int = 20) -> float | None:
    """Seconds until a step is enqueued; None where steps are not."""
    if contender.wait is None:
        return None
    taken = []
    for _ in range(times):
        if fresh:
            contender.renew()
        contender.wait()
        start = time.perf_counter()
        contender.step()
        taken.append(time.perf_counter() - start)
    contender.wait()
    return statistics.median(taken)


def prepare(contender: Contender, seconds: float, cycle: int, fresh: bool) -> Entrant:
    """Take the first steps, which compile, and find how many fill a turn."""
    first = turn(contender, 1, fresh)
    if contender.wait is not None:
        turn(contender, 2, fresh)  # on a device the second step records what later ones replay
    steps, took = 1, turn(contender, 1, fresh)
    while took < seconds / 10:  # too short to tell
        steps *= 4
        took = turn(contender, steps, fresh)
    count = cycle * max(1, math.ceil(seconds * steps / took / cycle))
    return Entrant(contender, count, host=enqueue(contender, fresh), first=first)


def compete(name: str, request: Request, arrays: Any, copy: Contender, report: Report, tick: Tick) -> None:
    """Measure one optimizer. What was measured is in the report even if this ends early."""
    ceiling = prepare(copy, request.seconds, 1, fresh=False)
    entrants: list[Entrant] = []

    def attempt(label: str, action: Callable[[], Any]) -> bool:
        tick(f"{name}: {label}")
        try:
            action()
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            report.notes.append(f"failed: {name}, {label}: {type(error).__name__}: {reason}")
            return False
        return True

    def enter(build: Callable[[], Contender]) -> None:
        entrants.append(prepare(build(), request.seconds, CYCLE.get(name, 1), request.fresh_gradients))

    try:
        for label, build in PLACES[request.device].field(name, request, arrays).items():
            attempt(label, functools.partial(enter, build))
        for _ in range(request.rounds):
            ceiling.play(fresh=False)
            entrants[:] = [e for e in entrants if attempt(e.contender.label, functools.partial(e.play, request.fresh_gradients))]
    finally:
        report.rows += rows(name, request.shapes, [timing(e) for e in entrants if e.seconds], copy_speed(ceiling))


def timing(entrant: Entrant) -> Timing:
    contender = entrant.contender
    held = contender.state_bytes(), entrant.host, contender.kept, contender.rounding, contender.compile_s, entrant.first
    return Timing(contender.label, entrant.seconds, entrant.steps, *held)


def copy_speed(ceiling: Entrant) -> float | None:
    """GB/s, read and written."""
    return ceiling.contender.moved / statistics.median(ceiling.seconds) / 1e9 if ceiling.seconds else None


#: where steps run: who draws the arrays, copies and competes there
PLACES: dict[str, Any] = {"cpu": sys.modules[__name__], "cuda": cuda}


# ---- a run ------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Everybody on so many threads. torch is told when a contender is built, jax reads NPROC when it starts."""
    before = dict(os.environ)
    set_threads(threads)
    if threads is not None:
        os.environ["NPROC"] = str(get_threads())
    try:
        yield
    finally:
        set_threads(None)
        os.environ.clear()
        os.environ.update(before)


def run(request: Request, tick: Tick) -> Report:
    """Measure everything. Ctrl-C ends it early, with what there is."""
    settings = {k: v for k, v in dataclasses.asdict(request).items() if k not in ("model", "shapes")}
    with limited(request.threads):
        found = notes(request)
        where = get_machine() | ({"gpu": cuda.name_of_device()} if request.device == "cuda" else {})
        report = Report(request.model, len(request.shapes), count_numbers(request.shapes), settings, where, notes=found)
        try:
            place = PLACES[request.device]
            arrays, copy = place.draw(request.shapes), place.memory_copy()
            for name in request.optimizers:
                compete(name, request, arrays, copy, report, tick)
        except KeyboardInterrupt:
            report.interrupted = True
    return report
