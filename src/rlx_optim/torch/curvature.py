"""Sophia's estimates of the Hessian's diagonal, by Hutchinson's method through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import random
from ..engine import Bundle
from .optimizer import RuleOptimizer


class CurvatureOptimizer(RuleOptimizer):
    """Base of those that take estimates of the Hessian's diagonal."""

    def __init__(self, params: Any, hyperparameters: Any, *, hessian_seed: int = 0, **rest: Any):
        if isinstance(hessian_seed, bool) or not isinstance(hessian_seed, int) or hessian_seed < 0:
            raise ValueError(f"{type(self).__name__}: hessian_seed must be an integer >= 0, got {hessian_seed!r}")
        super().__init__(params, hyperparameters, beside={"hessian_seed": hessian_seed}, **rest)  # in the groups it is saved

    @property
    def hessian_seed(self) -> int:
        """What the signs are drawn from; a setting of the groups, so that a checkpoint brings it along."""
        return int(self.param_groups[0]["hessian_seed"])

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
            used = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
            curved = {p: self._signs(p) for p, g in used.items() if g.requires_grad}  # the rest enters linearly: its H is 0
            dot = sum(((used[p] * u).sum() for p, u in curved.items()), torch.zeros((), device=loss.device))
            products = torch.autograd.grad(dot, list(curved), allow_unused=True) if curved else ()
        estimates = {p: torch.zeros_like(p, requires_grad=False) for p in used}
        estimates |= {p: u * Hu for (p, u), Hu in zip(curved.items(), products, strict=True) if Hu is not None}
        if not self._passes(estimates.items()):
            return False
        for p, estimate in estimates.items():
            self._observe(p, estimate)
        return True

    def _signs(self, param: torch.Tensor) -> torch.Tensor:
        """Random signs, keyed by seed, place and count: no global generator is touched."""
        places = ((i, p, group) for i, (p, group) in enumerate((p, g) for g in self.param_groups for p in g["params"]))
        place, seed = next((i, group["hessian_seed"]) for i, p, group in places if p is param)
        count = int(self.state[param]["estimates"])
        words, _ = random.threefry(*random.key(seed, f"hessian {place}"), torch.arange(param.numel()), count)
        signs: torch.Tensor = (words & 1) * 2 - 1
        return signs.to(param.device, param.dtype).reshape(param.shape)

    @torch.no_grad()
    def _observe(self, param: torch.Tensor, estimate: torch.Tensor) -> None:
        spec_of = self._current_specs()
        ((lane, (place,)),) = self._ready(param)
        seat = lane.seats[place]
        self._check_seat(lane, seat)
        record = seat.records[0]
        spec: Any = spec_of[record.group]
        given = estimate.detach().to(lane.dtype).contiguous()
        buffers: Any = {"g": [lane.view(given)], "h": [record.state["h"]]}
        numbers = spec.scalars(record.t + 1, record.counters)
        if record.size:
            lane.engine.run(Bundle(spec, [record.name], [record.shape], record.slots, buffers, numbers), spec.observe)
        record.counters["estimates"] += 1
        seat.state["estimates"].fill_(record.counters["estimates"])  # as torch sees it: Lightning calls this on a wrapper
        lane.version = lane.versions()
