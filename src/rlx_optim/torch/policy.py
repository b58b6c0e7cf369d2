"""Whether a step is taken, and by what: `nonfinite`, `skip_above`, GradScaler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..guard import Guard
from ..routing import quote
from .aliasing import Work, split_rounds
from .clip import find_norm, grad_norm
from .groups import name_params, view_groups
from .placements.captured import not_finite
from .placements.local import Batch

if TYPE_CHECKING:
    from .optimizer import RuleOptimizer


def decide(opt: RuleOptimizer, work: Work, loss: Any, problem: Exception | None) -> Any:
    """By what gradients are multiplied in this step; None where it is not taken. problem: why this rank cannot take it.
    Where ranks decide together, `work` is then what all of them step."""
    found, scale = getattr(opt, "found_inf", None), getattr(opt, "grad_scale", None)
    try:
        loss = read_loss(opt, loss)
    except Exception as refused:
        problem = problem or refused
    stopped = not opt.capturable and found is not None and bool(float(found))
    if opt._consensus is not None:
        agree = opt._consensus.agree
        work[:], stopped, bad, norm = agree(opt.param_groups, opt._specs.current, lambda: measure(opt, work, problem), stopped)
    elif problem is not None:
        raise problem
    elif opt.capturable:
        decide_on_device(opt, work, found, scale, loss)
        return 1.0 if scale is None else 1.0 / scale
    elif not stopped:
        bad, norm = is_bad(opt, work), clipped_norm(opt, work)
    if stopped or (bad and skip_nonfinite(opt, pair_grads(work))) or is_left_out(opt, work, scale, loss, norm):
        return None
    return 1.0 if scale is None else 1.0 / float(scale)


def read_loss(opt: RuleOptimizer, loss: Any) -> torch.Tensor | None:
    """The loss as skip_above looks at it."""
    if loss is None or opt.skip_above is None:
        return None
    try:
        return torch.as_tensor(loss, dtype=torch.float64).detach().reshape(())
    except (TypeError, ValueError, RuntimeError) as problem:
        raise type(problem)(f"{opt._owner}: loss is for skip_above and must be a number, got {loss!r:.80}") from None


def measure(opt: RuleOptimizer, work: Work, problem: Exception | None) -> tuple[Work, bool, torch.Tensor | None]:
    """This rank's work, whether something in it is not finite and should be, and the norm before a clip of it."""
    if problem is not None:
        raise problem
    split_rounds(opt._owner, work, opt.param_groups, opt._repeated)  # refuses what ranks cannot step together
    return work, is_bad(opt, work), clipped_norm(opt, work)


def is_bad(opt: RuleOptimizer, work: Work) -> bool:
    """Whether a gradient is not finite, where that matters."""
    return opt.nonfinite != "propagate" and not all(map(Batch.is_finite, work))


def pair_grads(work: Work) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter of a step with its gradient."""
    for batch in work:
        yield from zip((batch.placement.entries[i].param for i in batch.chosen), batch.grads, strict=True)


def skip_nonfinite(opt: RuleOptimizer, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Count a step that is left out for what is not finite, or refuse it by name, as `nonfinite` says."""
    if opt.nonfinite == "raise":
        bad = [param for param, array in pairs if not bool(torch.isfinite(array).all())]
        names = {param: name for group in opt.param_groups for name, param in name_params(group)}
        which = f"gradient of {quote(names[p] for p in bad)}" if bad else "a gradient on another rank"
        raise ValueError(f"{opt._owner}: {which} is not finite; nothing was stepped")
    opt._skipped += 1
    return True


def clipped_norm(opt: RuleOptimizer, work: Work) -> torch.Tensor | None:
    """The norm of these gradients before a clip that was the last to change them."""
    norm = None if opt.skip_above is None else find_norm([b.placement.entries[i].param for b in work for i in b.chosen])
    return None if norm is None else norm.total


def is_outlier(opt: RuleOptimizer, work: Work, scale: Any, loss: Any, norm: torch.Tensor | None) -> torch.Tensor:
    """Whether the gradients or the loss are out of line, decided where the first gradient is. norm: that before a clip."""
    if norm is not None:
        device = norm.device
    elif opt._consensus is not None:
        norm = grad_norm([param for group in opt.param_groups for param in group["params"]])
        device = norm.device
    else:
        device = work[0].placement.device
        norms = [norm for batch in work for norm in torch._foreach_norm(batch.grads)]
        norm = torch.stack([norm.to(device).double() for norm in norms]).square().sum().sqrt()
    norm = norm if scale is None else norm / torch.as_tensor(scale, device=device).reshape(())
    given = None if loss is None else loss.to(device)
    if opt._guard is None or opt._guard.places.device != device:
        before, opt._guard = opt._guard, Guard(torch, device=device)
        opt._guard.take({} if before is None else before.values())
    bad: torch.Tensor = opt._guard.bad(opt.skip_above or 0.0, norm, given)
    return bad


def resume_guard(opt: RuleOptimizer, window: Mapping[str, Sequence[float]]) -> None:
    """Go on with the windows of a checkpoint; without any, begin anew."""
    opt._guard = Guard(torch, device="cpu") if window else None
    if opt._guard is not None:
        opt._guard.take(window)


def is_left_out(opt: RuleOptimizer, work: Work, scale: Any, loss: Any, norm: torch.Tensor | None) -> bool:
    """Whether skip_above leaves out this step; the host asks. Where ranks decide together, one of them is enough: their
    losses may differ."""
    if opt.skip_above is None or (not work and opt._consensus is None):
        return False
    bad = bool(is_outlier(opt, work, scale, loss, norm))
    if opt._consensus is not None:
        (bad,) = map(bool, opt._consensus.together.highest([int(bad)], device=opt._consensus.device))
    opt._skipped += bad
    return bad


def decide_on_device(opt: RuleOptimizer, work: list[Any], found_inf: torch.Tensor | None, scale: Any, loss: Any) -> None:
    """Whether the step is taken, decided on the device: by GradScaler, by nonfinite="skip", by skip_above."""
    flags, ours = [] if found_inf is None else [found_inf], []
    if opt.nonfinite == "skip" and work:
        ours += [not_finite(batch.grads) for batch in work]
    if opt.skip_above is not None and work:
        ours.append(is_outlier(opt, work, scale, loss, clipped_norm(opt, work)).to(torch.int32))
    if ours:
        flags += ours
        bad = torch.stack([flag.to(ours[-1].device).reshape(()) for flag in ours]).max()
        opt._skips = bad.clone() if opt._skips is None else opt._skips.add_(bad)
    for placement in (batch.placement for batch in work):
        found = [flag.to(placement.device).float().reshape(()) for flag in flags]
        placement.groups, placement.flag = view_groups(opt), torch.stack(found).max() if found else None
