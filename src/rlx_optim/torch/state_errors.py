"""What a state dict may hold, and what is said where it holds something else."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..checkpoint.snapshot import wrong_shape
from ..spec import Field

COUNTABLE = 2**53  # "step" is a float64
#: what no numbers can be copied from, and the way out
CLOSED: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda value: not isinstance(value, torch.Tensor), "The checkpoint is corrupt"),
    (lambda value: value.layout is not torch.strided, "Make it dense (.to_dense())"),
    (lambda value: value.is_quantized, "Make it numbers (.dequantize())"),
    (lambda value: value.is_meta, "It was never filled; read the file onto a device that has memory (map_location=)"),
    (lambda value: value.is_complex(), "The checkpoint is corrupt, or of a complex parameter"),
)


def restart(name: str) -> str:
    return f"; remove the state of {name!r} to restart it with zero state"


def unreadable(value: Any) -> str | None:
    """The way out where no numbers can be copied from a value; None where they can."""
    return next((hint for is_so, hint in CLOSED if is_so(value)), None)


def described(value: Any) -> str:
    """A value, in a message."""
    if not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    if value.numel() < 2 and not unreadable(value):
        return repr(value)
    layout = "" if value.layout is torch.strided else f" {str(value.layout).removeprefix('torch.')}"
    return f"{value.dtype}{layout} of shape {tuple(value.shape)} on {value.device}"


def state_error(owner: str, key: str, name: str, value: Any, needed: str) -> ValueError:
    """What is said of a value in a parameter's state."""
    hint = unreadable(value) or CLOSED[0][1]
    hint += restart(name) if hint == CLOSED[0][1] else ""
    return ValueError(f"{owner}: state {key!r} of {name!r} is {described(value)}, expected {needed}. {hint}")


def refuse_state(owner: str, name: str, value: Any) -> ValueError:
    """What is said where the state of a parameter is no dict."""
    return ValueError(f"{owner}: the state of {name!r} is {described(value)}, expected a dict of tensors{restart(name)}")


def check_outline(owner: str, given: Any) -> None:
    """That a state dict has parameters in groups, which torch's loader takes for granted."""

    def refuse(what: str, value: Any, needed: str) -> ValueError:
        return ValueError(f"{owner}: {what} is {described(value)}, expected {needed}. Give what state_dict() returned")

    if not isinstance(given, Mapping):
        raise refuse("the state dict", given, "a dict")
    state, groups = given.get("state"), given.get("param_groups")
    if not isinstance(state, Mapping):
        raise refuse("'state' of the state dict", state, "a dict, by the places of parameters")
    if not isinstance(groups, (list, tuple)):
        raise refuse("'param_groups' of the state dict", groups, "a list of dicts")
    for i, group in enumerate(groups):
        here = f"group {i} of the state dict"
        if not isinstance(group, Mapping):
            raise refuse(here, group, "a dict")
        params, names = group.get("params"), group.get("param_names")
        if not isinstance(params, (list, tuple)):
            raise refuse(f"'params' of {here}", params, "a list of the places of parameters")
        listed = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        if names is not None and not (listed and len(names) in (0, len(params))):
            raise refuse(f"'param_names' of {here}", names, f"a list of {len(params)}, a name for each of its 'params'")


def number_in(owner: str, key: str, name: str, value: Any, allowed: Field | None = None) -> float:
    """A number that is kept beside the slots of a parameter; "step" counts. allowed: its range, where the rule says one."""
    try:
        value = value.detach() if isinstance(value, torch.Tensor) else value
        found = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = math.nan
    counts = key == "step"
    if not math.isfinite(found) or (counts and (not 0 <= found <= COUNTABLE or found != int(found))):
        raise state_error(owner, key, name, value, "a whole number from 0 to 2^53" if counts else "a finite number")
    if allowed is not None:
        try:
            allowed.check(found)
        except ValueError:
            raise state_error(owner, key, name, value, allowed.expected) from None
    return found


def check_tensor(owner: str, key: str, name: str, value: Any, shape: tuple[int, ...]) -> None:
    """A slot of a parameter, or a part of one."""
    if unreadable(value):
        raise state_error(owner, key, name, value, f"a tensor of shape {shape}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{owner}: {wrong_shape(key, name, tuple(value.shape), shape)}{restart(name)}")
