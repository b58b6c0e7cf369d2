"""Clipping by the global norm, for plain and spread parameters alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .stepping import Stepper, is_spread


@torch.no_grad()
def clip_grad_norm_(
    parameters: Stepper | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their norm, all together, is at most max_norm. Gives the norm before that.

    As torch.nn.utils.clip_grad_norm_, and for DTensors of any mixture of meshes by one all-reduce a process group. Given an
    optimizer of this package it does not touch the gradients: its next step multiplies them on the way, which costs no pass.
    foreach is accepted and makes no difference.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be >= 0 and norm_type > 0, got {max_norm!r} and {norm_type!r}")
    folded = isinstance(parameters, Stepper)
    params = _listed(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    total = _norm(params, grads, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(total)}; not clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's own form
    if isinstance(parameters, Stepper):
        parameters._clip = float(factor)
    for grad in [] if folded else grads:
        local = grad.to_local() if is_spread(grad) else grad
        local.mul_(factor.to(local.device, local.dtype))
    return total


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, Stepper):
        return [p for group in parameters.param_groups for p in group["params"]]
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _norm(params: list[Any], grads: list[Any], order: float) -> torch.Tensor:
    """The norm of all gradients; every rank that shares one of the parameters must ask."""
    device = grads[0].device if grads else params[0].device if params else torch.device("cpu")
    if any(map(is_spread, params)):
        from .sharded.norms import sorted_out, total

        combined = total({way: _power(each, order, device) for way, each in sorted_out(params).items()}, math.isinf(order))
    else:
        combined = _power(grads, order, device)
    return combined if math.isinf(order) else combined ** (1 / order)


def _power(tensors: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of |x|^order (the largest |x| where order is infinite) over tensors, in float64."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    filled = [t for t in tensors if t.numel()]
    norms = [torch.linalg.vector_norm(t, order, dtype=torch.float64).to(device) for t in filled]
    if not norms:
        return found
    each = torch.stack(norms)
    return each.max() if math.isinf(order) else (each**order).sum()
