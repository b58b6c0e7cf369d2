"""What a matrix rule reads, found out by running `update`, so that nobody has to declare it: of its parameter the values, or the
shape alone (over ranks a matrix is sent to its owner only where the rule reads it); of its hyperparameters which numbers."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from .engine import Bundle
from .engines.reference import Reference
from .program import Unread
from .spec import Shape, Spec

SMALL = 4096  # elements of a tensor up to which an update is tried on its own shape
UNITS = 4, 64  # of larger ones the axes are made so short, in their order, times 2, 3, …
_found: dict[Any, bool] = {}


class Trying(Reference):
    """The reference, which goes both ways at every branch."""

    def cond(self, predicate: Any, yes: Any, no: Any, *operands: Any) -> Any:
        no(*operands)
        return yes(*operands)

    def by_shape(self, function: Any, X: Any) -> Any:
        return super().by_shape(function, abs(X))  # where shapes differ, p's is among its values

    def probe(self, function: Any, x: Any) -> Any:
        return np.ones(x.p.shape)  # the caller's function counts its calls, perhaps


@functools.lru_cache(4096)
def reads_p(spec: Spec, shape: Shape) -> bool:
    """Whether the update of a matrix of this shape uses p's values. What cannot be tried is taken to do so."""
    sample = next((each for each in samples(shape) if spec.takes(each) is None), None)
    if sample is None:
        return True
    key = type(spec), tuple(map(_kind, spec.values().values())), sample
    if key not in _found:
        _found[key] = _tried(spec, sample)
    return _found[key]


def _kind(value: Any) -> Any:
    """A hyperparameter as far as an update may choose by it: of floats, which schedules move, whether they are 0."""
    return tuple(map(_kind, value)) if isinstance(value, tuple) else value != 0 if isinstance(value, float) else value


def samples(shape: Shape) -> list[Shape]:
    """A shape, or small ones whose axes are equal, longer or shorter as its are."""
    if math.prod(shape) <= SMALL:
        return [shape]
    lengths = sorted({n for n in shape if n > 1})
    return [tuple(n if n <= 1 else unit * (2 + lengths.index(n)) for n in shape) for unit in UNITS]


def check_replays(spec: Spec, shape: Shape) -> None:
    """Refuse an `update` that reads a float of the hyperparameters where `replays` says that its step can be recorded: a recorded
    step would go on with the float that it was recorded with."""
    if not spec.graph_safe():
        return
    unread = object.__new__(type(spec))
    for name, value in spec.values().items():
        unread.__dict__[name] = Unread(type(spec).__name__, name) if type(value) is float else value
    for sample in (each for each in samples(shape) if spec.takes(each) is None):
        _run(spec, sample, unread, without_p=False)


def _tried(spec: Spec, shape: Shape) -> bool:
    try:
        _run(spec, shape, spec, without_p=True)
    except Exception:  # it reads p, or is not for NumPy
        return True
    return False


def _run(spec: Spec, shape: Shape, shown: Spec, without_p: bool) -> None:
    """Run the update of one matrix, both ways at every branch. shown: the spec that `update` sees."""
    engine, slots, counters = Trying(), spec.slots(shape), spec.counters()
    gradient = np.random.default_rng(0).standard_normal(shape)
    state = {name: [engine.allocate(slot)] for name, slot in slots.items()}
    bundle = Bundle(shown, ["p"], [shape], slots, {"p": [np.zeros(shape)], "g": [gradient], **state}, t=1, without_p=without_p)
    bundle.numbers = {**counters, **spec.numbers(1, counters)}
    engine.run(bundle, move=False)
