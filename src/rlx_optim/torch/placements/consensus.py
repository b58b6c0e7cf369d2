"""What ranks agree on before a step touches anything: which parameters have a gradient, and whether the step is taken at all.

One small all-reduce a step and process group (one byte a parameter), wherever later collectives or the verdict depend on it. A
parameter whose gradient is missing everywhere is left alone everywhere; one that has a gradient on some rank is stepped on all,
with zeros where it is missing. What one rank refuses, all refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..memory import local_part
from .comm import RemoteError, Together
from .local import Batch, Placement

Work = list[Batch]
REFUSED, STOPPED, NOT_FINITE, UNMEASURED = range(4)


class Consensus:
    """Who must agree, and the placements whose entries they agree on, in the same order on every rank."""

    def __init__(self, together: Together, placements: Sequence[Placement], device: torch.device):
        self.together, self.placements, self.device = together, placements, device

    def agree(
        self, prepare: Callable[[], tuple[Work, bool, torch.Tensor | None]], stopped: bool
    ) -> tuple[Work, bool, bool, torch.Tensor | None]:
        """What is to be done, by the word of all ranks: (work, stopped, not finite, the norm before a clip, if all know it).
        `prepare` gives what this rank says of it."""
        problem: Exception | None = None
        work: Work = []
        bad, norm = False, None
        try:
            work, bad, norm = prepare()
        except Exception as raised:
            problem = raised
        here_too = {(id(placement), i) for placement, chosen, *_ in work for i in chosen}
        flags = [int(problem is not None), int(stopped), int(bad), int(norm is None)]
        flags += [int((id(placement), i) in here_too) for placement in self.placements for i in range(len(placement.entries))]
        flags = self.together.highest(flags, device=self.device)
        if problem is not None:
            raise problem
        if flags[REFUSED]:
            raise RemoteError("a gradient or a setting was refused on another rank, which says why; nothing was stepped")
        norm = None if flags[UNMEASURED] else norm
        return self._completed(work, flags[4:]), bool(flags[STOPPED]), bool(flags[NOT_FINITE]), norm

    def _completed(self, work: Work, present: list[int]) -> Work:
        """The work with zeros for gradients that only others have."""
        found = {id(batch.placement): (batch.chosen, batch.grads) for batch in work}
        flags = iter(present)
        wanted = {id(placement): [i for i in range(len(placement.entries)) if next(flags)] for placement in self.placements}
        out: Work = [batch for batch in work if id(batch.placement) not in wanted]
        for placement in self.placements:
            chosen = wanted[id(placement)]
            present_grads = dict(zip(*found.get(id(placement), ([], [])), strict=True))
            if chosen:
                out.append(
                    Batch(
                        placement,
                        chosen,
                        [present_grads[i] if i in present_grads else self._nothing(placement.entries[i].param) for i in chosen],
                    )
                )
        return out

    @staticmethod
    def _nothing(param: Any) -> torch.Tensor:
        return torch.zeros_like(local_part(param))


def local_grad(owner: str, name: str, param: Any, grad: Any) -> torch.Tensor:
    """The part of a DTensor's gradient that is here, placed like the parameter."""
    if not hasattr(grad, "placements"):
        raise RuntimeError(f"{owner}: {name} is a DTensor and its gradient a plain tensor; make it a DTensor of the same mesh")
    if grad.device_mesh != param.device_mesh:
        raise RuntimeError(f"{owner}: {name} lies on {param.device_mesh}, its gradient on {grad.device_mesh}")
    if tuple(grad.placements) != tuple(param.placements):  # a replicated parameter's gradient may be a partial sum
        grad = grad.redistribute(placements=param.placements)
    local = local_part(grad)
    return local.wait() if hasattr(local, "wait") else local
