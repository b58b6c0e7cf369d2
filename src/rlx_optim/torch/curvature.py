"""Sophia's estimates of the Hessian's diagonal, by Hutchinson's method through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import random
from ..engine import Bundle
from .lanes import CpuLane
from .optimizer import RuleOptimizer


class CurvatureOptimizer(RuleOptimizer):
    """Base of those that take estimates of the Hessian's diagonal."""

    def __init__(self, params: Any, hyperparameters: Any, *, hessian_seed: int = 0, **rest: Any):
        self.hessian_seed = hessian_seed
        super().__init__(params, hyperparameters, **rest)

    def update_hessian(self, loss_closure: Callable[[], torch.Tensor], every: int = 1) -> bool:
        """Average u ⊙ Hu into the curvature, u random signs, H the Hessian of the loss the closure computes.

        Call it before `step`; with every=10 it works on every tenth step and costs nothing on the others. The signs depend on
        hessian_seed, the parameter and how many estimates it has had, so a resumed run draws the same. Gives whether it worked.
        """
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if every < 1:
            raise ValueError(f"{type(self).__name__}: every must be at least 1, got {every!r}")
        if every > 1 and int(max(float(self.state[p]["step"]) for p in params)) % every:
            return False
        with torch.enable_grad():
            loss = loss_closure()
            grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            used = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None and g.requires_grad]
            signs = [self._signs(p) for p, _ in used]
            dot = sum(((g * u).sum() for (_, g), u in zip(used, signs, strict=True)), torch.zeros((), device=loss.device))
            products = torch.autograd.grad(dot, [p for p, _ in used], allow_unused=True)
        for (p, _), u, product in zip(used, signs, products, strict=True):
            self._observe(p, u * product if product is not None else torch.zeros_like(p))
        return True

    def _signs(self, param: torch.Tensor) -> torch.Tensor:
        """Random signs, keyed by seed, place and count: no global generator is touched."""
        place = next(i for i, p in enumerate(q for g in self.param_groups for q in g["params"]) if p is param)
        count = int(self.state[param]["estimates"])
        words, _ = random.threefry(*random.key(self.hessian_seed, f"hessian {place}"), torch.arange(param.numel()), count)
        signs: torch.Tensor = (words & 1) * 2 - 1
        return signs.to(param.device, param.dtype).reshape(param.shape)

    @torch.no_grad()
    def _observe(self, param: torch.Tensor, estimate: torch.Tensor) -> None:
        for lane in self._ready():
            for seat in lane.seats:
                if seat.param is param:
                    record = seat.records[0]
                    spec: Any = self._current_specs()[record.group]
                    dtype = seat.state["hessian"].dtype
                    given = estimate.detach().to(dtype).contiguous()
                    array = given.numpy() if isinstance(lane, CpuLane) else given
                    buffers: Any = {"g": [array], "h": [record.state["h"]]}
                    numbers = spec.scalars(record.t + 1, record.counters)
                    if record.size:
                        lane.engine.run(Bundle(spec, [record.name], [record.shape], record.slots, buffers, numbers), spec.observe)
                    record.counters["estimates"] += 1
                    seat.state["estimates"].fill_(record.counters["estimates"])
                    return
