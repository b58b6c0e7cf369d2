"""Whether a step is taken, and by what: `nonfinite`, `skip_above`, GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..guard import Guard
from ..routing import quote
from ..spec import Spec
from .aliasing import Work, rounds
from .clip import grad_norm, measured
from .eval_mode import EvalMode, named
from .memory import are_finite
from .placements.captured import not_finite
from .placements.local import Batch


class Policy(EvalMode):
    """What decides about a step when its gradients are there."""

    nonfinite: str
    capturable: bool
    _repeated: dict[torch.Tensor, int]  # parameters that groups list more than once, and how often
    skip_above: float | None  # standard deviations
    _guard: Guard | None
    _consensus: Any  # of the ranks that must agree before a step (`placements.consensus`)
    _listed_specs: list[Spec]
    _views: Callable[[], list[dict[str, Any]]]  # the groups, as placements have them
    _skipped: int
    _skips: torch.Tensor | None  # steps skipped by a decision on the device

    @property
    def _owner(self) -> str:
        return type(self).__name__

    @property
    def skipped(self) -> int:
        """How many steps were left out by nonfinite="skip" or skip_above."""
        return self._skipped + (0 if self._skips is None else int(self._skips))

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped, self._skips = count, None

    def _decide(self, work: Work, loss: Any, problem: Exception | None) -> Any:
        """By what gradients are multiplied in this step; None where it is not taken. problem: why this rank cannot take it.
        Where ranks decide together, `work` is then what all of them step."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        try:
            loss = self._checked_loss(loss)
        except Exception as refused:
            problem = problem or refused
        stopped = not self.capturable and found is not None and bool(float(found))
        if self._consensus is not None:
            agreed, stopped, bad, norm = self._consensus.agree(
                self.param_groups, self._listed_specs, lambda: self._prepared(work, problem), stopped
            )
            work[:] = agreed
            if stopped or not self._finite(work, bad) or self._left_out(work, scale, loss, norm):
                return None
        elif problem is not None:
            raise problem
        elif stopped:
            return None
        elif self.capturable:
            self._decide_on_device(work, found, scale, loss)
        elif not self._finite(work) or self._left_out(work, scale, loss, self._measured(work)):
            return None
        return 1.0 if scale is None else 1.0 / (scale if self.capturable else float(scale))

    def _finite(self, work: Work, verdict: bool | None = None) -> bool:
        """Whether the gradients are finite, where that matters."""
        if self.nonfinite == "propagate":
            return True
        if verdict is None:
            verdict = not all(map(Batch.is_finite, work))
        grads = [grad for batch in work for grad in batch.grads]
        return self._passes(lambda: [batch.placement.entries[i].param for batch in work for i in batch.chosen], grads, verdict)

    def _checked_loss(self, loss: Any) -> torch.Tensor | None:
        """The loss as skip_above looks at it."""
        if loss is None or self.skip_above is None:
            return None
        try:
            return torch.as_tensor(loss, dtype=torch.float64).detach().reshape(())
        except (TypeError, ValueError, RuntimeError) as problem:
            raise type(problem)(f"{self._owner}: loss is for skip_above and must be a number, got {loss!r:.80}") from None

    def _prepared(self, work: Work, problem: Exception | None) -> tuple[Work, bool, torch.Tensor | None]:
        """This rank's work, whether something in it is not finite and should be, and the norm before a clip of it."""
        if problem is not None:
            raise problem
        rounds(self._owner, work, self.param_groups, self._repeated)  # refuses what ranks cannot step together
        watched = self.nonfinite != "propagate"
        bad = watched and not all(map(Batch.is_finite, work))
        return work, bad, self._measured(work)

    def _passes(
        self, params: Callable[[], Iterable[torch.Tensor]], arrays: Sequence[torch.Tensor], verdict: bool | None = None
    ) -> bool:
        """Whether the step may be taken, by the arrays that came for parameters, or by the verdict of all ranks."""
        if self.nonfinite == "propagate" or verdict is False or (verdict is None and are_finite(arrays)):
            return True
        bad = [param for param, array in zip(params(), arrays, strict=True) if not bool(torch.isfinite(array).all())]
        if self.nonfinite == "raise":
            names = {param: name for group in self.param_groups for name, param in named(group)}
            which = f"gradient of {quote(names[p] for p in bad)}" if bad else "a gradient on another rank"
            raise ValueError(f"{self._owner}: {which} is not finite; nothing was stepped")
        self._skipped += 1
        return False

    def _measured(self, work: Work) -> torch.Tensor | None:
        """The norm of these gradients before a clip that was the last to change them."""
        norm = None if self.skip_above is None else measured([b.placement.entries[i].param for b in work for i in b.chosen])
        return None if norm is None else norm.total

    def _outlier(self, work: Work, scale: Any, loss: Any, norm: torch.Tensor | None) -> torch.Tensor:
        """Whether the gradients or the loss are out of line, decided where the first gradient is. norm: that before a clip."""
        if norm is not None:
            device = norm.device
        elif self._consensus is not None:
            norm = grad_norm([param for group in self.param_groups for param in group["params"]])
            device = norm.device
        else:
            device = work[0].placement.device
            norms = [norm for batch in work for norm in torch._foreach_norm(batch.grads)]
            norm = torch.stack([norm.to(device).double() for norm in norms]).square().sum().sqrt()
        norm = norm if scale is None else norm / torch.as_tensor(scale, device=device).reshape(())
        given = None if loss is None else loss.to(device)
        if self._guard is None or self._guard.places.device != device:
            before, self._guard = self._guard, Guard(torch, device=device)
            self._guard.take({} if before is None else before.values())
        assert self.skip_above is not None
        bad: torch.Tensor = self._guard.bad(self.skip_above, norm, given)
        return bad

    def _resume_guard(self, window: Mapping[str, Sequence[float]]) -> None:
        """Go on with the windows of a checkpoint; without any, begin anew."""
        self._guard = None
        if window:
            self._guard = Guard(torch, device="cpu")
            self._guard.take(window)

    def _left_out(self, work: Work, scale: Any, loss: Any, norm: torch.Tensor | None) -> bool:
        """Whether skip_above leaves out this step; the host asks. Where ranks decide together, one of them is enough: their
        losses may differ."""
        if self.skip_above is None or (not work and self._consensus is None):
            return False
        bad = bool(self._outlier(work, scale, loss, norm))
        if self._consensus is not None:
            (bad,) = map(bool, self._consensus.together.highest([int(bad)], device=self._consensus.device))
        self._skipped += bad
        return bad

    def _decide_on_device(self, work: list[Any], found: torch.Tensor | None, scale: Any, loss: Any) -> None:
        """Whether the step is taken, decided on the device: by GradScaler, by nonfinite="skip", by skip_above."""
        flags, ours = [] if found is None else [found], []
        if self.nonfinite == "skip" and work:
            ours += [not_finite(batch.grads) for batch in work]
        if self.skip_above is not None and work:
            ours.append(self._outlier(work, scale, loss, self._measured(work)).to(torch.int32))
        if ours:
            flags += ours
            bad = torch.stack([flag.to(ours[-1].device).reshape(()) for flag in ours]).max()
            self._skips = bad.clone() if self._skips is None else self._skips.add_(bad)
        for placement in (batch.placement for batch in work):
            placement.groups = self._views()
            placement.flag = (
                torch.stack([flag.to(placement.device).float().reshape(()) for flag in flags]).max() if flags else None
            )
