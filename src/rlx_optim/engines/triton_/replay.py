"""Newton–Schulz on matrices that are small for the device: some twenty launches become the replay of one CUDA graph.

On such matrices the host takes longer to launch than the device to multiply. The graph's input and output stay allocated, four
bytes an entry, which is why large ones are not kept.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch

from ...linalg import Coefficients
from . import products

MOST = 1 << 26  # entries of a stack: 128 MiB in and as much out


def pays(X: torch.Tensor) -> bool:
    return X.device.type == "cuda" and X.numel() <= MOST


class Replay:
    """The iteration for stacks of one shape. The first call runs it, the second records it."""

    def __init__(self, X: torch.Tensor, steps: int, coefficients: Coefficients):
        self.input = torch.empty(X.shape, dtype=torch.float16, device=X.device)
        self.how = (steps, coefficients)
        self.calls, self.graph, self.output = 0, None, None

    def __call__(self, U: torch.Tensor, norm: torch.Tensor, eps: float) -> Any:
        self.calls += 1
        products.half(U, norm, eps, self.input)
        if self.calls == 1:
            return products.iterate(self.input, *self.how)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.output = products.iterate(self.input, *self.how)
        self.graph.replay()
        return self.output
