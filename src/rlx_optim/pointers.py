"""Where the arrays of a step are in memory, as compiled engines read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def address(array: np.ndarray) -> int:
    """Where an array's memory begins."""
    start: int = array.__array_interface__["data"][0]
    return start


class PointerTable:
    """The addresses of parameters and gradients, a row for each tensor that an engine steps.

    A step writes the rows of the tensors that it has; the others keep what they had, and nobody reads them. `version` moves when
    a row changes, so an engine sends addresses to a device, or into its own tables, only then.
    """

    def __init__(self, n: int):
        self.n, self.version = n, 0
        self.params, self.grads = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.param_types: tuple[Any, ...] = (None,) * n
        self.grad_types: tuple[Any, ...] = (None,) * n
        self.halves: list[str] = [""] * n  # the type of 16 bits that parameter and gradient are, where the cpu engine takes it
        self.flag: Any = None  # on the device: not 0 where nothing must be written
        self.pool: Any = None  # where an engine's graphs of these arrays have their memory
        self.tracks: list[Any] = []  # streams that some of them run on, each with its own
        self.recorded = True  # whether an engine may keep such graphs

    def set(self, rows: Any, params: Any, grads: Any, param_types: Sequence[Any] = (), grad_types: Sequence[Any] = ()) -> None:
        """Write these rows: addresses, and of what types the arrays are where an engine asks. rows: an index of NumPy's."""
        moved = False
        for column, given in ((self.params, params), (self.grads, grads)):
            if not np.array_equal(column[rows], given):
                column[rows] = given
                moved = True
        if param_types:
            moved |= self._set_types("param_types", rows, param_types) | self._set_types("grad_types", rows, grad_types)
        self.version += moved

    def set_one(self, param: int, grad: int) -> None:
        """Write the only row."""
        if self.params[0] != param or self.grads[0] != grad:
            self.params[0], self.grads[0] = param, grad
            self.version += 1

    def _set_types(self, name: str, rows: Any, given: Sequence[Any]) -> bool:
        before = getattr(self, name)
        if isinstance(rows, slice):
            after = tuple(given)
        else:
            types = list(before)
            for row, kind in zip(rows, given, strict=True):
                types[row] = kind
            after = tuple(types)
        if after == before:
            return False
        setattr(self, name, after)
        return True
