"""Clipping by the global norm, for plain and spread parameters alike.

Given an optimizer, the factor is not multiplied into the gradients but waits *on* them: each carries the `Clip` it is under, and
its version at that time. The step that uses these gradients applies it; gradients that were thrown away take it with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .stepping import Stepper

MARK = "_rlx_optim_clip"


class Clip:
    """A factor that gradients are still to be multiplied by."""

    def __init__(self, factor: float):
        self.factor = factor

    def put_on(self, grad: torch.Tensor) -> None:
        setattr(grad, MARK, (self, version(grad)))


def version(grad: torch.Tensor) -> int:
    return 0 if grad.is_inference() else grad._version


def clip_of(grad: Any) -> Clip | None:
    """What a gradient is under. One that was changed in place since then can no longer be clipped on the way."""
    mark = getattr(grad, "__dict__", {}).get(MARK)
    if mark is None:
        return None
    if mark[1] != version(grad):
        raise RuntimeError(
            "a gradient was changed in place after clip_grad_norm_(optimizer, …), which has not multiplied it yet; clip the "
            "parameters' gradients themselves (clip_grad_norm_(model.parameters(), …)), or let zero_grad() set them to None"
        )
    clip: Clip = mark[0]
    return clip


def release(grad: torch.Tensor) -> None:
    """Forget what a gradient is under."""
    getattr(grad, "__dict__", {}).pop(MARK, None)


def waits(clip: Clip, params: Iterable[torch.Tensor]) -> bool:
    """Whether the gradients of these parameters are all under this clip."""
    under = [clip_of(p.grad) is clip for p in params]  # all of them: one may have been changed
    return all(under)


def scaled(grad: torch.Tensor, clip: Clip | None) -> torch.Tensor:
    return grad if clip is None else grad * clip.factor


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
    optimizer of this package it does not touch the gradients: the step that uses them multiplies them on the way, which costs no
    pass. foreach is accepted and makes no difference.
    """
    from .stepping import Stepper

    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be >= 0 and norm_type > 0, got {max_norm!r} and {norm_type!r}")
    params = _listed(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    for grad in grads:  # clipped before and not stepped since
        if (clip := clip_of(grad)) is not None:
            delattr(grad, MARK)
            _local(grad).mul_(clip.factor)
    total = grad_norm(params, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(total)}; not clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's own form
    if isinstance(parameters, Stepper):
        clip = parameters._clip = Clip(float(factor)) if float(factor) != 1.0 else None
        if clip is not None:
            for grad in grads:
                clip.put_on(grad)
    else:
        for grad in grads:
            local = _local(grad)
            local.mul_(factor.to(local.device, local.dtype))
    return total


def _local(grad: Any) -> torch.Tensor:
    return grad.to_local() if hasattr(grad, "placements") else grad


def _listed(parameters: Any) -> list[Any]:
    if hasattr(parameters, "param_groups"):
        return [p for group in parameters.param_groups for p in group["params"]]
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def grad_norm(params: list[Any], order: float = 2.0) -> torch.Tensor:
    """The norm of all gradients; every rank that shares one of the parameters must ask."""
    grads = [p.grad for p in params if p.grad is not None]
    device = grads[0].device if grads else params[0].device if params else torch.device("cpu")
    if any(hasattr(p, "placements") for p in params):
        from .sharded.norms import sorted_out, total

        combined = total({way: _power(each, order, device) for way, each in sorted_out(params).items()}, math.isinf(order))
    else:
        combined = _power(grads, order, device)
    return combined if math.isinf(order) else combined ** (1 / order)


def _power(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of |x|^order (the largest |x| where order is infinite) over tensors, in float64."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    filled = [t for t in tensors if t.numel()]
    norms = [torch.linalg.vector_norm(t, order, dtype=torch.float64).to(device) for t in filled]
    if not norms:
        return found
    each = torch.stack(norms)
    return each.max() if math.isinf(order) else (each**order).sum()
