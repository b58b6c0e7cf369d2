"""QK-Clip: weights of queries and keys, head by head, where attention logits have grown too large (Kimi K2, arXiv:2507.20534).

    γ = threshold/S for heads whose largest logit S is above it, else 1
    W_q ← W_q·γ^alpha, W_k ← W_k·γ^(1 − alpha)

After a step, so that the next one starts below. Where several heads share a key (grouped queries), the key follows the smallest
γ of its heads, and each query makes up for what is its own: the logits of every head change by its γ.
"""

from __future__ import annotations

from typing import Any

import torch

from .halves import is_spread, local


@torch.no_grad()
def qk_clip_(
    query: torch.Tensor, key: torch.Tensor, max_logits: Any, threshold: float = 100.0, *, alpha: float = 0.5
) -> torch.Tensor:
    """Scale the weights of queries and keys in place, so that no head's largest logit is above the threshold.

    query, key: of shapes (heads·size, n) and (groups·size, n): parameters, slices of a fused one, biases, or DTensors.
    max_logits: the largest logit of each head since the last step, after the scaling by 1/√size; of all ranks, where they see
    other data. The factors of the heads are given back. Nothing waits for the device.
    """
    largest = torch.as_tensor(max_logits, dtype=torch.float32, device=local(query).device).detach().reshape(-1)
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
    over = largest.isfinite() & (largest > threshold)  # what is not finite says nothing of the weights
    factors = torch.where(over, threshold / largest, 1.0)
    shared = factors.reshape(groups, -1).amin(1).pow(1 - alpha)
    own = factors / shared.repeat_interleave(heads // groups)
    for weight, each in ((query, own), (key, shared)):
        _scale(weight, each.repeat_interleave(size))
    return factors


def _scale(weight: torch.Tensor, rows: torch.Tensor) -> None:
    """Row by row: in float32 and rounded once, where the weight has fewer bits."""
    rows = rows.reshape(-1, *[1] * (weight.ndim - 1))
    if is_spread(weight):
        from torch.distributed.tensor import DTensor, Replicate

        mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
        rows = DTensor.from_local(rows, mesh, [Replicate()] * mesh.ndim, run_check=False)
    weight.mul_(rows)
