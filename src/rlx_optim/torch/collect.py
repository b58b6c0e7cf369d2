"""What a step is of: the parameters that have a gradient, once they, their gradients and their state have been checked.

All refusals of a step are in this file; nothing has been written when one is raised. Questions are asked of all tensors at once,
and one by one where an answer is not what the state was made for.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .aliasing import Work
from .memory import DTYPE, GRAD, REPEATS, REQUIRES_GRAD, as_plain, has_repeats, in_bounds, is_dtensor, is_fake
from .placements.build import make_placements
from .placements.local import ARITHMETIC, Batch, ParamEntry, Placement, pack_pieces

if TYPE_CHECKING:
    from .optimizer import RuleOptimizer


def collect(opt: RuleOptimizer, only: torch.Tensor | None) -> Work:
    """What is to be stepped: the parameters that have a gradient, once all of it has been checked."""
    return [check_batch(opt, placement, chosen, grads) for placement, chosen, grads in find_ready(opt, only) if chosen]


def find_ready(opt: RuleOptimizer, only: torch.Tensor | None = None) -> list[tuple[Placement, Sequence[int], list[Any]]]:
    """The placements, with those of their entries that have a gradient, and the gradients."""
    check_laid_out(opt, only)
    chosen = select_ready(opt, only)
    if any(is_stale(opt, placement, which) for placement, which, _ in chosen):
        make_placements(opt)
        chosen = select_ready(opt, only)
    return chosen


def list_placements(opt: RuleOptimizer) -> list[Placement]:
    """The placements of all parameters. Gradients are not looked at: a thread of autograd may be writing them."""
    check_laid_out(opt, None)
    if any(is_stale(opt, placement, placement.every) for placement in opt._placements or []):
        make_placements(opt)
    return opt._placements or []


def check_laid_out(opt: RuleOptimizer, only: torch.Tensor | None) -> None:
    """Make the placements anew where groups, which hold the truth, are no longer what they were made from."""
    if not opt.capturable and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{opt._owner}: a CUDA graph is being captured; make the optimizer with capturable=True")
    known, dormant = is_laid_out(opt) if only is None else only in opt._places, opt._dormant
    woken = any(map(REQUIRES_GRAD, dormant)) or any(grad is not None for grad in map(GRAD, dormant))
    if opt._placements is None or not known or woken:
        make_placements(opt)


def is_stale(opt: RuleOptimizer, placement: Placement, chosen: Sequence[int]) -> bool:
    """Whether the state of these entries has been replaced or moved, or a parameter is read otherwise now."""
    if not chosen:
        return False
    expected = placement.select(chosen).expected
    dtypes = list(map(DTYPE, expected.params))
    recast = any(
        ARITHMETIC.get(dtype) is placement.dtype for dtype, was in zip(dtypes, expected.dtypes, strict=True) if dtype is not was
    )
    return recast or not placement.has_known_counts() or expected.is_stale(opt.state)


def is_laid_out(opt: RuleOptimizer) -> bool:
    """Whether the groups list the parameters that the placements were made from."""
    return len(opt._layout) == len(opt.param_groups) and all(
        len(params) == len(known) and all(map(operator.is_, params, known))
        for known, params in zip(opt._layout, (group["params"] for group in opt.param_groups), strict=True)
    )


def select_ready(opt: RuleOptimizer, only: torch.Tensor | None) -> list[tuple[Placement, Sequence[int], list[Any]]]:
    if only is not None:
        placement, place = opt._places[only]
        return [(placement, (place,), [only.grad])]
    return [(placement, *placement.with_gradient()) for placement in opt._placements or []]


def check_batch(opt: RuleOptimizer, placement: Placement, chosen: Sequence[int], grads: list[Any]) -> Batch:
    """The gradients of these entries. Those that are not such as nearly all are, are looked at one by one."""
    expected = placement.select(chosen).expected
    addresses = expected.locate(grads)
    for i in range(len(chosen)) if addresses is None else {*addresses.odd, *expected.newcomers}:
        grads[i] = check_grad(opt, placement, placement.entries[chosen[i]])
    if expected.newcomers:
        placement.selections.clear()
    if expected.negated:
        addresses = None
        for i in expected.negated:
            grads[i] = -grads[i]
    return Batch(placement, chosen, grads, addresses)


def check_grad(opt: RuleOptimizer, placement: Placement, entry: ParamEntry) -> torch.Tensor:
    check_entry(opt, placement, entry)
    if entry.is_new:
        refuse_zeros(opt, placement, entry)
        entry.is_new = False
    grad: Any = entry.param.grad
    if grad.layout is not torch.strided:
        raise RuntimeError(f"{opt._owner}: {entry.records[0].name} has a sparse gradient; dense ones are needed (sparse=False)")
    if is_dtensor(entry.param):
        from .placements.consensus import local_grad

        return local_grad(opt._owner, entry.records[0].name, entry.param, grad)
    if type(grad) is not torch.Tensor and is_traceable_wrapper_subclass(grad):
        raise RuntimeError(f"{opt._owner}: the gradient of {entry.records[0].name} is a {type(grad).__name__}, not a tensor")
    if grad.shape != entry.shape or grad.device != placement.device:
        raise RuntimeError(
            f"{opt._owner}: {entry.records[0].name} is on {placement.device} and of shape {tuple(entry.shape)}, "
            f"its gradient on {grad.device} and of shape {tuple(grad.shape)}"
        )
    if not in_bounds(grad):
        raise RuntimeError(f"{opt._owner}: the storage of the gradient of {entry.records[0].name} has been resized")
    return as_plain(grad).resolve_neg()  # autograd may leave the sign of a gradient for later


def check_entry(opt: RuleOptimizer, placement: Placement, entry: ParamEntry) -> None:
    """Refuse a parameter that is no longer what its state was made for."""
    param, name = entry.param, entry.records[0].name
    what, way_out = "", "move or cast the model before making the optimizer, or load its state_dict into a new one"
    if param.device != placement.device:
        what = f"has moved to {param.device}, its state is on {placement.device}"
    elif param.shape != entry.shape:
        what = f"has now shape {tuple(param.shape)}, its state is for {tuple(entry.shape)}"
    elif ARITHMETIC.get(param.dtype) is not placement.dtype:
        what = f"has become {param.dtype}, its state is {placement.dtype}"
    elif has_repeats(param):
        what, way_out = REPEATS
    elif not (is_dtensor(param) or is_fake(param) or in_bounds(param)):
        what = f"is in a storage that has been resized to {param.untyped_storage().nbytes()} bytes"
        way_out = "give the parameter its memory back before the step"
    if what:
        raise RuntimeError(f"{opt._owner}: {name} {what}; {way_out}")


def refuse_zeros(opt: RuleOptimizer, placement: Placement, entry: ParamEntry) -> None:
    """What is to keep its norm must have one, at the first step. Shards do not know it of the whole."""
    first = entry.records[0]
    spec: Any = opt._specs.at(first.group)
    if spec.decay != "hyperball" or first.t or not first.size or is_dtensor(entry.param):
        return
    for record, piece in zip(entry.records, placement.pieces(pack_pieces(entry.param.detach(), entry), entry), strict=True):
        if not bool(piece.any()):
            raise spec.zero_norm_error(record.name, "a group of its own, {'params': …, 'decay': 'decoupled'}")
