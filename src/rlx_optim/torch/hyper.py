"""The hyperparameters of an optimizer's groups: read out of `param_groups`, which hold the truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..spec import Spec

FIXED = (float, int, bool, str, type(None))


def fixed(value: Any) -> bool:
    """Whether nobody can change it in place."""
    return type(value) in FIXED or (type(value) is tuple and all(map(fixed, value)))


def identified(value: Any) -> Any:
    """A value by which it can be told whether it was replaced: tensors count as themselves, whatever they hold."""
    if type(value) is tuple:
        return tuple(map(identified, value))
    return id(value) if isinstance(value, torch.Tensor) else value


def number(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        return value.item()
    return value


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters with one-element tensors read."""
    return {k: tuple(number(k, x) for x in v) if isinstance(v, (tuple, list)) else number(k, v) for k, v in values.items()}


def in_dtype(kind: type[Spec], group: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A group as it is for parameters of a dtype."""
    return group if kind.torch.in_dtype is None else kind.torch.in_dtype(group, torch.finfo(dtype).eps)
