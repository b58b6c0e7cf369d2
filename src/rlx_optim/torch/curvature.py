"""Sophia's estimates of the Hessian's diagonal, by Hutchinson's method through autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import random
from ..routing import bare
from .calls import exclusive
from .collect import check_entry, find_ready, list_placements
from .groups import name_params
from .memory import are_finite, is_dtensor
from .optimizer import RuleOptimizer
from .policy import skip_nonfinite
from .state import read_counter


class CurvatureRuleOptimizer(RuleOptimizer):
    """Base of those that take estimates of the Hessian's diagonal."""

    def __init__(self, params: Any, hyperparameters: Any, *, hessian_seed: int = 0, **rest: Any):
        if isinstance(hessian_seed, bool) or not isinstance(hessian_seed, int) or hessian_seed < 0:
            raise ValueError(f"{type(self).__name__}: hessian_seed must be an integer >= 0, got {hessian_seed!r}")
        super().__init__(params, hyperparameters, beside={"hessian_seed": hessian_seed}, **rest)  # in the groups it is saved
        self._advised = False  # of a step without an estimate

    def _step(self, only: torch.Tensor | None, loss: Any = None, problem: Exception | None = None) -> None:
        super()._step(only, loss, problem)
        if not self._advised:  # after a step, which refuses what is damaged on one rank on all of them
            self._advised = True
            self._advise()

    def _advise(self) -> None:
        """Say so, once, if the first step comes before any estimate."""
        for spec, group in zip(self._specs.update(self), self.param_groups, strict=True):
            for name, param in name_params(group):
                if param.grad is not None:
                    counters = {k: read_counter(self.state.get(param, {}).get(k, first)) for k, first in spec.counters().items()}
                    if advice := spec.advice(counters):
                        warnings.warn(f"{self._owner}: {bare(name)!r} {advice}", stacklevel=6)
                        return

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
        if not callable(loss_closure):
            raise TypeError(
                f"{self._owner}: update_hessian takes a function that computes the loss, update_hessian(lambda: loss_of(batch)), "
                f"got {type(loss_closure).__name__}"
            )
        if not self._due(params, every):
            return False
        with torch.enable_grad():
            loss = loss_closure()
            grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            used = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
            curved = {p: self._signs(p) for p, g in used.items() if g.requires_grad}  # the rest enters linearly: its H is 0
            dots = [(used[p] * u).sum() for p, u in curved.items()]
            try:
                products = torch.autograd.grad(sum(dots[1:], dots[0]), list(curved), allow_unused=True) if curved else ()
            except RuntimeError as problem:
                if "scaled_dot_product" not in str(problem):
                    raise
                raise RuntimeError(
                    f"{self._owner}: this attention kernel has no second derivative; wrap it in "
                    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) in the closure, or use update_hessian_from_gradients"
                ) from problem
        if not used and any(map(is_dtensor, params)):
            raise RuntimeError(
                f"{self._owner}: the loss does not reach the sharded parameters (fully_shard computes with copies of them, which "
                "cannot be differentiated twice); use update_hessian_from_gradients"
            )
        estimates = {p: torch.zeros_like(p, requires_grad=False) for p in used}
        estimates |= {p: u * Hu for (p, u), Hu in zip(curved.items(), products, strict=True) if Hu is not None}
        for group in self.param_groups:  # to maximize a loss is to minimize its negative, whose Hessian is −H
            if group["maximize"]:
                estimates |= {p: -estimates[p] for p in group["params"] if p in estimates}
        return self._observed(estimates)

    @torch.no_grad()
    def update_hessian_from_gradients(self, batch_size: int, every: int = 1) -> bool:
        """Average batch_size · g² into the curvature, g the gradients that are there (Gauss–Newton–Bartlett).

        Compute them from the mean loss on labels drawn from the model's own predictions, call this, then zero_grad(). One
        backward pass is enough, so it works where a second derivative does not, as under fully_shard. Gives whether it worked.
        The Gauss–Newton matrix of the negative log-likelihood is the same, and positive, whichever of the two is computed and
        whether it is maximized or minimized: g² has no sign to turn.
        """
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if batch_size < 1 or every < 1:
            raise ValueError(f"{self._owner}: batch_size and every must be at least 1, got {batch_size!r} and {every!r}")
        if not self._due(params, every):
            return False
        return self._observed({p: p.grad * p.grad * batch_size for p in params})

    def _due(self, params: list[torch.Tensor], every: int) -> bool:
        """Whether there is something to look at, and its turn has come."""
        steps = [int(self.state.get(p, {}).get("step", 0)) for p in params] if every > 1 else [0] * len(params)
        return bool(params) and max(steps) % every == 0

    @exclusive
    @torch.no_grad()
    def _observed(self, estimates: dict[Any, torch.Tensor]) -> bool:
        """Take estimates over, unless there are none or they are not finite and should be."""
        if not estimates:
            return False
        self._specs.update(self)
        list_placements(self)
        local = {p: self._local(p, estimate) for p, estimate in estimates.items()}
        bad = self.nonfinite != "propagate" and not are_finite(list(local.values()))
        if self._consensus is not None and self.nonfinite != "propagate":
            bad = bool(self._consensus.together.highest([int(bad)], device=next(iter(local.values())).device)[0])
        if bad and skip_nonfinite(self, local.items()):
            return False
        for p, estimate in local.items():
            ((placement, (place,), _),) = find_ready(self, p)
            entry = placement.entries[place]
            check_entry(self, placement, entry)
            record, given = entry.records[0], estimate.detach().resolve_neg().to(placement.dtype).contiguous()
            placement.observe(entry, self._specs.current[record.group], given)
            entry.state["estimates"].fill_(record.counters["estimates"])  # on the device, where it is captured
            placement.write_counters()
        return True

    def _local(self, param: Any, tensor: Any) -> torch.Tensor:
        """The part of a tensor that is here, placed like the parameter."""
        if not is_dtensor(param):
            return tensor
        from .placements.consensus import local_grad

        return local_grad(self._owner, "a parameter", param, tensor.detach())

    def _signs(self, param: torch.Tensor) -> torch.Tensor:
        """Random signs, keyed by seed, place and count: no global generator is touched."""
        places = ((i, p, group) for i, (p, group) in enumerate((p, g) for g in self.param_groups for p in g["params"]))
        place, seed = next((i, group["hessian_seed"]) for i, p, group in places if p is param)
        count = int(self.state.get(param, {}).get("estimates", 0))
        words, _ = random.threefry(*random.key(seed, f"hessian {place}"), torch.arange(param.numel(), device="cpu"), count)
        signs: torch.Tensor = ((words & 1) * 2 - 1).to(param.device, param.dtype).reshape(param.shape)
        if not is_dtensor(param):
            return signs
        from .placements.comm import DTensorLayout

        layout = DTensorLayout(param)  # type: ignore[arg-type]
        return layout.wrap(layout.cut(signs, layout.placements), layout.shape, layout.placements)
