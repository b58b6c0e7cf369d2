"""Parameters of 16 bits: their low halves in the state, and the way to float32 and back that engines do not go themselves."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..engines.torch_ import TorchEngine, split_halves, with_low_half
from ..rounding import EXACT, LOW, NEAREST, ParamRounding, key_of, rounded
from ..spec import Spec
from .memory import is_dtensor, local_part

KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def keeps_low(spec: Spec, param: torch.Tensor) -> bool:
    return spec.rounding == EXACT and param.dtype is torch.bfloat16


def init_state(state: dict[str, Any], spec: Spec, param: torch.Tensor, device: torch.device) -> None:
    """The low half, where there is to be one: two bytes for each element, in a last dimension (no backend of torch.distributed
    sends integers of 16 bits), spread over ranks as the parameter is."""
    if not keeps_low(spec, param):
        state.pop(LOW, None)
    elif LOW not in state:
        shard = local_part(param)
        low = torch.zeros((*shard.shape, 2), dtype=torch.uint8, device=device)
        state[LOW] = low if shard is param else _layout(param).wrap(low, (*param.shape, 2), param.placements)  # type: ignore[attr-defined]


def _layout(tensor: Any) -> Any:
    from .placements.comm import DTensorLayout

    return DTensorLayout(tensor)


@torch.no_grad()
def write_low(low: Any, value: torch.Tensor) -> None:
    """Take over a low half: a DTensor of whatever placement, or the whole tensor, which every rank has."""
    if not is_dtensor(low):
        low.copy_(value)
        return
    from .placements.homes import Shards

    Shards(_layout(low)).write(low, value)


def read_low(
    owner: str, state: Mapping[str, Any], spec: Spec, param: torch.Tensor, name: str, device: torch.device
) -> torch.Tensor | None:
    """The low half of what is here, as integers of 16 bits, if there is to be one."""
    if not keeps_low(spec, param):
        return None
    kept, shard, shape = state[LOW], local_part(param), (*param.shape, 2)
    low = local_part(kept)
    same = tuple(kept.shape) == shape and tuple(low.shape) == (*shard.shape, 2) and is_dtensor(kept) == is_dtensor(param)
    odd = low.storage_offset() % 2  # pairs of bytes are read as one number
    if not same or low.dtype is not torch.uint8 or low.device != device or not low.is_contiguous() or odd:
        raise RuntimeError(
            f"{owner}: {LOW!r} of {name} must be a contiguous uint8 of shape {shape}, on {device} and at an even place of its "
            f"storage; it is {low.dtype}, of shape {tuple(kept.shape)}, on {low.device} and at place {low.storage_offset()}"
        )
    found: torch.Tensor = low.view(torch.int16).view(shard.shape)
    return found


def find_rounding(spec: Spec, param: torch.Tensor, name: str, low: torch.Tensor | None) -> ParamRounding | None:
    """How a parameter is rounded; None: to nearest, or it is not of 16 bits. name: by which chance is keyed."""
    if param.dtype not in KINDS or spec.rounding == NEAREST:
        return None
    first: int | None = 0
    if is_dtensor(param):
        offsets, shard = extent(param)
        rows = tuple(shard[1:]) == tuple(param.shape[1:])
        first = None if not rows else offsets[0] * math.prod(shard[1:]) if shard else 0
    return ParamRounding(KINDS[param.dtype], spec.rounding, key_of(spec.values().get("seed"), name), first, low)


def extent(param: Any) -> tuple[list[int], list[int]]:
    """Where what is here of a parameter begins, along each axis, and how long it is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shard, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return list(offsets), list(shard)


def index_elements(param: Any) -> torch.Tensor:
    """The index in the whole parameter of each element that is here."""
    offsets, shard = extent(param)
    device, found = local_part(param).device, torch.zeros((), dtype=torch.int64, device="cpu")
    for axis, (offset, n) in enumerate(zip(offsets, shard, strict=True)):
        along = torch.arange(n, dtype=torch.int64, device="cpu") + offset
        found = found[..., None] + along * math.prod(param.shape[axis + 1 :])
    return found.reshape(-1).to(device)


def read_whole(entry: Any) -> torch.Tensor:
    """What this rank has of an entry's parameter, with its low half if it has one."""
    return with_low_half(local_part(entry.param).detach().resolve_neg(), entry.rounding)


def copy_in(entry: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy of an entry's parameter in the arithmetic's type."""
    p = local_part(entry.param).detach().resolve_neg()
    wide = with_low_half(p, entry.rounding)
    return wide if wide is not p else p.to(dtype, memory_format=torch.contiguous_format, copy=True)


def write_back(entry: Any, value: torch.Tensor, t: Any) -> None:
    """Leave in an entry's parameter what came of such a copy at step t."""
    p, half = local_part(entry.param).detach(), entry.rounding
    if half is None:
        p.copy_(value.to(p.dtype))  # torch's copy between types loses the sign that a float16 tensor leaves for later
    elif half.low is not None:
        split_halves(value, p, half.low)
    else:
        index = index_elements(entry.param) if half.first is None else None
        near = rounded(TorchEngine(p.device), value.contiguous(), half.kind, t, half.key, half.first or 0, index)
        p.copy_(near.to(p.dtype))


def set_rounding(placement: Any, entry: Any) -> None:
    """Tell the records of an entry how they are rounded, as the engine of their placement wants it."""
    if placement.separates:
        for record in entry.records:
            record.kind = KINDS.get(entry.param.dtype, "")
    if placement.rounds:
        split_rounding(placement, entry)


def split_rounding(placement: Any, entry: Any) -> None:
    """Tell the records of an entry how they are rounded, each a part of it, as the engine of their placement wants it."""
    half = entry.rounding
    if half is None or half.first is None or entry.columns:
        return
    sizes = [record.size for record in entry.records]
    for record, first in zip(entry.records, itertools.accumulate(sizes[:-1], initial=0), strict=True):
        low = None if half.low is None else placement.view(half.low.view(-1)[first : first + record.size])
        record.rounding = dataclasses.replace(half, first=half.first + first, low=low)
