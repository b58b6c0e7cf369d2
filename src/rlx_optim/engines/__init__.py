"""The places a rule runs. Third parties add theirs through the entry-point group `rlx_optim.engines`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from importlib.metadata import entry_points
from typing import Any

from ..engine import Engine

#: name -> "module:class", imported when first asked for
BUILT_IN = {
    "reference": "rlx_optim.engines.reference:Reference",
    "cpu": "rlx_optim.engines.cpu:Cpu",
}
PRECISIONS = ("float32", "float64")


def list_engines() -> list[str]:
    """Every engine that can be named, whether or not its libraries are installed."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group="rlx_optim.engines"))})


def check_engine(name: Any, precision: str) -> None:
    """Refuse what `get_engine` could not give, without importing anything."""
    fine = name in ("auto", *BUILT_IN) if isinstance(name, str) else isinstance(name, Engine)
    if not fine:  # those of others are looked for only then: it takes long
        known = list_engines()
        listed = ", ".join(map(repr, ["auto", *known]))
        if not isinstance(name, str):
            raise TypeError(f"engine must be one of {listed} or an Engine, got {name!r}")
        if name not in known:
            raise ValueError(f"unknown engine {name!r}; known are {listed}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")


def get_engine(name: Any = "auto", precision: str = "float32", stored: str = "float32") -> Engine:
    """The engine of that name; an engine object is taken as it is. stored: the type of parameters, gradients and state."""
    check_engine(name, precision)
    if stored != "float32" and name not in ("auto", *BUILT_IN):
        raise TypeError(f"engine {name!r} steps float32 arrays; {stored} ones are for {', '.join(map(repr, BUILT_IN))}")
    return _engine(_automatic() if name == "auto" else name, precision, stored) if isinstance(name, str) else name


def no_compiler() -> str | None:
    """Why the cpu engine cannot run here, and what to do; None where it can."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed (pip install llvmlite)"
    return None


@functools.cache
def _automatic() -> str:
    if (reason := no_compiler()) is None:
        return "cpu"
    warnings.warn(f"rlx_optim: stepping on the slow reference engine: {reason}", stacklevel=5)
    return "reference"


@functools.cache
def _engine(name: str, precision: str, stored: str) -> Engine:
    if name == "cpu" and (reason := no_compiler()) is not None:
        raise ValueError(f"engine 'cpu' cannot run: {reason}; engine='auto' steps without it")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        make = getattr(importlib.import_module(module), attribute)
    else:
        (point,) = entry_points(group="rlx_optim.engines", name=name)
        make = point.load()
    widest = max(precision, stored)  # the names are in that order
    engine = make(widest, stored) if name == "cpu" else make(stored) if name in BUILT_IN else make()
    if not isinstance(engine, Engine):
        raise TypeError(f"engine {name!r} does not follow rlx_optim.engine.Engine (see docs/engines.md)")
    return engine
