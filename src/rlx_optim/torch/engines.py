"""Which engine steps a parameter: by device, or as the user says."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

from ..engine import Engine
from ..engines import no_compiler

KNOWN = ("auto", "cpu", "torch", "triton")


def check_engine(wanted: str) -> None:
    if wanted not in KNOWN:
        raise ValueError(f"unknown engine {wanted!r}; known are {', '.join(map(repr, KNOWN))}")


@functools.cache
def choose_engine(wanted: str, device: torch.device, dtype: torch.dtype, fake: bool = False) -> tuple[Engine, str]:
    """The engine for a device and arithmetic, and why. fake: the tensors have no memory (FakeTensorMode)."""
    if wanted == "cpu" and device.type != "cpu":
        raise ValueError(f"engine 'cpu' cannot step a parameter on {device}; use 'auto' or 'torch'")
    if wanted == "torch":
        return _torch(device, dtype), "asked for"
    if fake:
        return _torch(device, dtype), "fake tensors have no memory"
    if wanted == "triton" or device.type == "cuda":
        return _triton(wanted, device, dtype)
    if device.type != "cpu":
        return _torch(device, dtype), f"no compiled engine for {device.type}"
    if (reason := no_compiler()) is not None:
        if wanted == "cpu":
            raise ValueError(f"engine 'cpu' cannot run: {reason}")
        return _torch(device, dtype), reason
    from ..engines.cpu import Cpu

    make: Any = Cpu
    name = "float64" if dtype is torch.float64 else "float32"
    return make(name, name), "asked for" if wanted == "cpu" else "CPU tensors, llvmlite installed"


def _triton(wanted: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, str]:
    if importlib.util.find_spec("triton") is None:
        if wanted == "triton":
            raise ValueError("engine 'triton' needs Triton (pip install triton)")
        return _torch(device, dtype), "Triton is not installed"
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise ValueError(f"engine 'triton' cannot step a parameter on {device}; use 'auto' or 'torch'")
    from ..engines.triton_ import Triton

    return Triton(device, dtype), "asked for" if wanted == "triton" else "CUDA tensors, Triton installed"


def _torch(device: torch.device, dtype: torch.dtype) -> Any:
    from ..engines.torch_ import TorchEngine

    return TorchEngine(device, dtype)
