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
        self.param_types, self.grad_types = np.full(n, None), np.full(n, None)
        self.half_dtypes: list[str] = [""] * n  # the type of 16 bits of parameter and gradient, where the cpu engine takes it
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
            before = self.param_types, self.grad_types
            self.param_types, self.grad_types = (
                self._typed(column, rows, kinds)
                for column, kinds in ((self.param_types, param_types), (self.grad_types, grad_types))
            )
            moved |= self.param_types is not before[0] or self.grad_types is not before[1]
        self.version += moved

    @staticmethod
    def _typed(column: np.ndarray, rows: Any, kinds: Sequence[Any]) -> np.ndarray:
        """A column of types with these in some rows: the same object where nothing changes, by which engines tell."""
        if column[rows].tolist() == list(kinds):
            return column
        column = column.copy()
        column[rows] = kinds
        return column

    def set_one(self, param: int, grad: int) -> None:
        """Write the only row."""
        if self.params[0] != param or self.grads[0] != grad:
            self.params[0], self.grads[0] = param, grad
            self.version += 1
