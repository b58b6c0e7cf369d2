"""Clipping by the global norm, for plain and spread parameters alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .memory import is_dtensor, is_fake, local_part

MARK = "_rlx_optim_norm"


class Norm:
    """What a clip measured, kept on the gradients: `skip_above` judges a step by it, since clipped gradients hide their norm."""

    def __init__(self, total: torch.Tensor, count: int):
        self.total, self.count = total, count


def count_changes(grad: Any) -> int:
    """The count of changes in place; a DTensor's is its part's, which FSDP changes directly."""
    local: torch.Tensor = local_part(grad)
    return 0 if local.is_inference() else local._version


def find_norm(params: Sequence[torch.Tensor]) -> Norm | None:
    """What one clip measured of exactly these parameters' gradients, if none was changed since."""
    found = None
    for param in params:
        norm, before = getattr(param.grad, "__dict__", {}).get(MARK, (None, 0))
        if norm is None or norm is not (found or norm) or norm.count != len(params) or before != count_changes(param.grad):
            return None
        found = norm
    return found


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their norm, all together, is at most max_norm. Gives the norm before that.

    As torch.nn.utils.clip_grad_norm_, for the parameters of an optimizer too, and for DTensors of any mixture of meshes by one
    all-reduce a process group. `skip_above` of an optimizer given here judges its step by the norm before the clip. foreach is
    accepted and makes no difference.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be >= 0 and norm_type > 0, got {max_norm!r} and {norm_type!r}")
    params = _list_params(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    total = grad_norm(params, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(total)}; not clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's own form
    if total.device.type == "cpu" and not is_fake(total) and float(factor) == 1.0:  # elsewhere asking would wait for the device
        return total
    watched = getattr(parameters, "skip_above", None) is not None
    norm = Norm(total if norm_type == 2 else grad_norm(params), len(grads)) if watched else None
    _multiply(list(map(_local, grads)), factor)
    for grad in grads if watched else ():
        setattr(grad, MARK, (norm, count_changes(grad)))
    return total


def _multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    alike: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_neg():  # a sign that autograd left for later, which no foreach function takes
            tensor.mul_(factor.to(tensor.device))
        else:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), each in alike.items():
        torch._foreach_mul_(each, factor.to(device))


def _local(grad: Any) -> torch.Tensor:
    return grad.to_local() if hasattr(grad, "placements") else grad


def _list_params(parameters: Any) -> list[Any]:
    if hasattr(parameters, "param_groups"):
        return list(dict.fromkeys(p for group in parameters.param_groups for p in group["params"]))
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def grad_norm(params: list[Any], order: float = 2.0) -> torch.Tensor:
    """The norm of all gradients; every rank that shares one of the parameters must ask."""
    grads = [p.grad for p in params if p.grad is not None]
    device = grads[0].device if grads else params[0].device if params else torch.device("cpu")
    if any(map(is_dtensor, params)):
        from .placements.sharded import sum_over_ranks

        combined = sum_over_ranks(params, lambda each: _sum_powers(each, order, device), math.isinf(order))
    else:
        combined = _sum_powers(grads, order, device)
    return combined if math.isinf(order) else combined ** (1 / order)


def _sum_powers(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of |x|^order (the largest |x| where order is infinite) over tensors, in float64."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return found
    each = torch.stack([norm.to(device) for norm in torch._foreach_norm(filled, order, dtype=torch.float64)])
    return each.max() if math.isinf(order) else (each**order).sum()
