"""The named-step API of those that take estimates of the Hessian's diagonal."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from ..spec import Shape
from ..stepping import TensorState, observe
from ..storage import make_buffer
from . import validation
from .optimizer import NamedOptimizer


class CurvatureOptimizer(NamedOptimizer):
    """Base of those that take estimates of the Hessian's diagonal."""

    def update_hessian(self, name: str, estimate: np.ndarray, shape: Any = None) -> None:
        """Average an estimate into the curvature of one parameter; the next step uses it. Legal before the first step."""
        validation.check_name(self._owner, name)
        validation.check_array(self._owner, name, "Hessian estimate", estimate)
        wanted = validation.logical_shape(self._owner, name, estimate, shape)
        known = self._records.get(name)
        if known is not None and wanted == (known.size,):
            wanted = known.shape  # flat, like a flat parameter
        if known is not None and wanted != known.shape and not _open(known, wanted):
            raise ValueError(f"{self._owner}: Hessian estimate of {name!r} has shape {wanted}, its parameter {known.shape}")
        _, record, why = self._lookup(name, wanted)
        self._settle([name], [estimate])
        if not self._passes([name], [estimate]):
            return
        if record is not known:
            record.init_state(self._specs()[record.group], self._engine.allocate)
            self._records[name], self._why[name] = record, why
        observe(record, self._specs()[record.group], self._engine, estimate)

    def _lookup(self, name: str, shape: Shape) -> tuple[Self, TensorState, str]:
        """Where a flat estimate came first, the shape is said later."""
        known = self._records.get(name)
        if known is None or not _open(known, shape):
            return super()._lookup(name, shape)
        record = TensorState(name, shape, known.group)
        record.counters = known.counters
        slots = self._specs()[record.group].stored_slots(shape)
        record.state = {
            name: make_buffer(self._engine, slots[name], buffer.reshape(shape)) for name, buffer in known.state.items()
        }
        return self, record, self._why[name]


def _open(record: TensorState, shape: Shape) -> bool:
    """Whether a tensor that was not stepped yet, and came flat, may turn out to have this shape."""
    return not record.t and record.shape == (record.size,) != shape and math.prod(shape) == record.size
