"""QK-Clip: weights of queries and keys, head by head, where attention logits have grown too large (Kimi K2, arXiv:2507.20534).

    γ = threshold/S for heads whose largest logit S is above it, else 1
    W_q ← W_q·γ^alpha, W_k ← W_k·γ^(1 − alpha)

After a step, so that the next one starts below. Where several heads share a key (grouped queries), the key follows the smallest
γ of its heads, and each query makes up for what is its own: the logits of every head change by its γ.
"""

from __future__ import annotations

from typing import Any

import torch

from ..engines.torch_ import join_halves, split_halves
from ..rounding import LOW
from .bf16 import extent
from .memory import is_dtensor, local_part


@torch.no_grad()
def qk_clip_(
    query: torch.Tensor,
    key: torch.Tensor,
    max_logits: Any,
    threshold: float = 100.0,
    *,
    alpha: float = 0.5,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.Tensor:
    """Scale the weights of queries and keys in place, so that no head's largest logit is above the threshold.

    query, key: of shapes (heads·size, n) and (groups·size, n): parameters, slices of a fused one, biases, or DTensors.
    max_logits: the largest logit of each head since the last step, after the scaling by 1/√size; of all ranks, where they see
    other data. optimizer: whose state has the low halves of bfloat16 weights (`rounding="exact"`), which are scaled with them.
    The factors of the heads are given back. Nothing waits for the device.
    """
    largest = torch.as_tensor(max_logits, dtype=torch.float32, device=local_part(query).device).detach().reshape(-1)
    heads = largest.numel()
    size = query.shape[0] // max(heads, 1)
    groups = key.shape[0] // max(size, 1)
    if not heads or heads * size != query.shape[0] or not groups or groups * size != key.shape[0] or heads % groups:
        raise ValueError(
            f"qk_clip_: {heads} largest logits do not fit queries of shape {tuple(query.shape)} and keys of {tuple(key.shape)}; "
            "give one a head, and keys of a head's rows for each, or for each group of heads"
        )
    for name, value, fits in (("threshold", threshold, threshold > 0), ("alpha", alpha, 0 <= alpha <= 1)):
        if not fits:
            raise ValueError(f"qk_clip_: {name} must be {'> 0' if name == 'threshold' else 'from 0 to 1'}, got {value!r}")
    lows = [_low(weight, name, optimizer) for name, weight in (("query", query), ("key", key))]  # or refused: nothing is scaled
    over = largest.isfinite() & (largest > threshold)  # what is not finite says nothing of the weights
    factors = torch.where(over, threshold / largest, 1.0)
    shared = factors.reshape(groups, -1).amin(1).pow(1 - alpha)
    own = factors / shared.repeat_interleave(heads // groups)
    for weight, each, low in ((query, own, lows[0]), (key, shared, lows[1])):
        _scale(weight, each.repeat_interleave(size), low)
    return factors


def _low(weight: torch.Tensor, name: str, optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
    """The low half of what is here of a weight, as the state of an optimizer has it."""
    params = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    param = next((p for p in params if p is weight or _over(weight, p)), None)
    if optimizer is not None and param is None:
        raise ValueError(
            f"qk_clip_: the {name} of shape {tuple(weight.shape)} is no parameter of the optimizer, nor a part of one"
        )
    if optimizer is None or param is None or LOW not in optimizer.state.get(param, {}):
        return None
    low = local_part(optimizer.state[param][LOW]).view(torch.int16).view(local_part(param).shape)
    if weight is param:
        return low
    if not param.is_contiguous():
        raise ValueError(
            f"qk_clip_: the {name} is a part of a parameter that is not contiguous; give the parameter, or make it so"
        )
    return low.as_strided(weight.shape, weight.stride(), weight.storage_offset() - param.storage_offset())


def _over(weight: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether they are over one memory."""
    if is_dtensor(weight) or is_dtensor(param):
        return False
    return weight.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()


def _scale(weight: torch.Tensor, rows: torch.Tensor, low: torch.Tensor | None) -> None:
    """Row by row: in float32 and rounded once, where the weight has fewer bits; with its low half, where it has one."""
    if is_dtensor(weight) and weight.ndim:
        offsets, lengths = extent(weight)
        rows = rows[offsets[0] : offsets[0] + lengths[0]]
    rows, weights = rows.reshape(-1, *[1] * (weight.ndim - 1)), local_part(weight)
    if low is None:
        weights.mul_(rows)
    else:
        split_halves(join_halves(weights, low) * rows, weights, low)
    if weights is not weight:
        torch.autograd.graph.increment_version(weight)
