"""Which engine steps a parameter: by device, or as the user says."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from ..engine import Engine

KNOWN = ("auto", "cpu", "torch")


@functools.cache
def choose(wanted: str, device: torch.device, dtype: torch.dtype) -> tuple[Engine, str]:
    """The engine for a device and arithmetic, and why."""
    if wanted not in KNOWN:
        raise ValueError(f"unknown engine {wanted!r}; known are {', '.join(map(repr, KNOWN))}")
    if wanted == "cpu" and device.type != "cpu":
        raise ValueError(f"engine 'cpu' cannot step a parameter on {device}; use 'auto' or 'torch'")
    if wanted == "torch":
        return _torch(device, dtype), "asked for"
    if device.type != "cpu":
        return _torch(device, dtype), f"no compiled engine for {device.type}"
    if importlib.util.find_spec("numba") is None:
        if wanted == "cpu":
            raise ValueError("engine 'cpu' needs numba (pip install numba)")
        return _torch(device, dtype), "numba is not installed"
    from ..engines.cpu import Cpu

    make: Any = Cpu

    name = "float64" if dtype is torch.float64 else "float32"
    return make(name, name), "asked for" if wanted == "cpu" else "CPU tensors, numba installed"


def _torch(device: torch.device, dtype: torch.dtype) -> Any:
    from ..engines.torch_ import Torch

    return Torch(device, dtype)
