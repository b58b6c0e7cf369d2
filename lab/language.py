"""Does every engine speak the language of rules? Each construct of `constructs` on each engine that is here, beside NumPy.

A construct is stepped twice: once with tensors that share every number, once with groups and step counts that differ in every
number. `rlx-optim check --language` prints the table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_optim.check.engines import ENGINES, INTERPRETED, Arrays, Walk, find_gap, get_speaker, list_present
from rlx_optim.cli import say, show_table, write_json
from rlx_optim.language import LanguageError
from rlx_optim.program import trace
from rlx_optim.spec import Shape

from .constructs import BROKE, CONSTRUCTS, Construct

SHAPES: tuple[Shape, ...] = ((24, 16), (6, 30), (24, 16), (300, 5), (4, 3, 3, 2), (37,), (1,), (), (1100,))
#: shapes of an engine that compiles every shape, and of one that interprets every block
FEWER: dict[str, tuple[Shape, ...]] = {"jax": ((6, 30), (4, 3, 2), ())}
FEWER |= {"triton": ((6, 30), (300, 5), (6, 30), (4, 3, 2), (1100,), ())} if INTERPRETED else {}
BAR = 2e-6  # of the largest of what is compared
STEPS = 2
#: what sets the tensors apart: groups by turns, and step counts
GROUPS = ({"lr": 0.1, "a": 0.5, "b": 2.0}, {"lr": 0.03, "a": -0.25, "b": 3.0}, {"lr": 0.2, "a": 0.75, "b": -1.5})
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0)


@dataclasses.dataclass(frozen=True)
class ConstructResult:
    """What an engine made of a construct. note: where it is furthest off, or what it raised."""

    construct: str
    engine: str
    ok: bool
    seen: float
    note: str


def draw(construct: Construct, shapes: Sequence[Shape], seed: int) -> list[np.ndarray]:
    """Draw arrays of the shapes that a construct takes."""
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes if len(shape) >= construct.least]
    if construct.special:
        for array in arrays:
            flat = array.reshape(-1)
            for k, value in enumerate(SPECIAL):
                flat[(seed + 3 * k) % 13 :: 31] = value
    return arrays


def run(construct: Construct, engine: str, shapes: Sequence[Shape], apart: bool) -> Arrays:
    """Return parameters and state after a few steps. apart: tensors differ in every number."""
    specs = [construct.spec(**group) for group in GROUPS]
    walk = Walk(specs, get_speaker(engine), draw(construct, shapes, 0), apart)
    for step in range(STEPS):
        walk.step(draw(construct, shapes, 1 + step), 0.5 if step else 1.0)
    return walk.found()


@functools.cache
def expected(construct: Construct, shapes: tuple[Shape, ...], apart: bool) -> Arrays:
    """Return what the reference makes of a construct."""
    return run(construct, "reference", shapes, apart)


def check_construct(construct: Construct, engine: str) -> ConstructResult:
    """Compare what an engine makes of a construct with what the reference makes of it."""
    if construct.refused:
        try:
            trace(construct.spec(), construct.spec().slots((4, 3)))
        except LanguageError as problem:
            return ConstructResult(construct.name, engine, True, math.nan, str(problem).partition(": ")[2])
        return ConstructResult(construct.name, engine, False, math.inf, "a program was made of it")
    worst, note, shapes = 0.0, "", FEWER.get(engine, SHAPES)
    try:
        for apart in (False, True):
            want, got = expected(construct, shapes, apart), run(construct, engine, shapes, apart)
            for name in want:
                if (seen := find_gap(got[name], want[name])) > worst:
                    worst, note = seen, f"{name}, {'numbers that differ' if apart else 'shared numbers'}"
    except Exception as problem:  # whatever an engine raises is what it made of the construct
        return ConstructResult(construct.name, engine, False, math.inf, f"{type(problem).__name__}: {str(problem).strip()[:300]}")
    return ConstructResult(construct.name, engine, worst <= BAR, worst, note)


def check_language(engines: Sequence[str]) -> list[ConstructResult]:
    """Check every construct on these engines."""
    left = {"triton"} if INTERPRETED else set()  # engines that cannot do what only a compiler can
    return [check_construct(each, engine) for each in CONSTRUCTS for engine in engines if not (each.compiled and engine in left)]


def show(as_json: bool) -> bool:
    """Show every construct on every engine; return whether all hold."""
    engines = [engine for engine in list_present() if engine != "reference"]
    rows = check_language(engines)
    if as_json:
        listed = [{**vars(row), "seen": row.seen if math.isfinite(row.seen) else None} for row in rows]
        write_json({"engines": engines, "bar": BAR, "broke": list(BROKE), "rows": listed})
    else:
        results = {(row.construct, row.engine): row for row in rows}
        names = [*BROKE, *(each.name for each in CONSTRUCTS if each.name not in BROKE)]
        table = [[name, *(cell(results.get((name, engine))) for engine in engines)] for name in names]
        show_table(["construct", *engines], table, [name in BROKE for name in names])
        say(
            f"Largest difference from the reference over the largest value; up to {BAR:g} is right. Bold ones broke engines once."
        )
        say("\n".join(f"{row.construct}, {row.engine}: {row.note}" for row in rows if not row.ok))
        say("\n".join(f"{name}: {why}" for name, each in ENGINES.items() if (why := each.missing()) is not None))
    return all(row.ok for row in rows)


def cell(row: Any) -> str:
    if row is None:
        return "–"
    return "WRONG" if not row.ok else "refused" if math.isnan(row.seen) else f"{row.seen:.0e}" if row.seen else "0"
