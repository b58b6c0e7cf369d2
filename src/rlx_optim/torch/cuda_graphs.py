"""A training step as CUDA graphs, also where what the optimizer does depends on the step count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..engines.torch_ import pause_gc
from .optimizer import RuleOptimizer

WARM = 2  # how often what a graph is to hold is done without one


class Graphed:
    """`step` and its optimizers, each made with capturable=True: called, it does what `step()` does and gives what that gives.

    step: a function without arguments that takes one step of each optimizer, usually gradients to None, forward, backward and
    `opt.step()`. Inputs are copied into tensors that it reads; what it gives are tensors that the next call overwrites.
    There is a graph for each thing that a step may do: SOAP has one with a refresh of its bases and one without. At first `step`
    is called as it is.
    """

    def __init__(self, step: Callable[[], Any], *optimizers: RuleOptimizer):
        for opt in optimizers:
            if not isinstance(opt, RuleOptimizer) or not opt.capturable:
                raise ValueError(f"Graphed: {type(opt).__name__} must be one of rlx_optim.torch, made with capturable=True")
        if not optimizers:
            raise ValueError("Graphed: give the optimizers that step() takes a step of: Graphed(step, opt)")
        self.function, self.optimizers = step, optimizers
        self._forget(())

    def _forget(self, placements: Any) -> None:
        self.placements = placements  # whose memory the graphs use
        self.calls: dict[Any, int] = {}
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pool: Any = None
        self.stream: Any = None

    def __call__(self) -> Any:
        for opt in self.optimizers:
            specs = opt._specs.update(opt)
            for step in (step for placement in opt._placements or [] for step in placement.parts):
                step.part.bundle.spec = specs[step.part.records[0].group]
        placements: Any = tuple(placement for opt in self.optimizers for placement in opt._placements or [])
        if placements != self.placements:
            self._forget(placements)
        found = [placement.phase() for placement in placements]
        phase, asks = tuple(phase for phase, _ in found), any(asks for _, asks in found)
        self.calls[phase] = self.calls.get(phase, 0) + 1
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        if not placements or asks or self.calls[phase] <= WARM:
            return self._plainly()
        if phase not in self.graphs:
            self.graphs[phase] = self._captured(placements)
        graph, result = self.graphs[phase]
        graph.replay()
        for placement in placements:
            placement.follow()
        return result

    def _plainly(self) -> Any:
        """On the stream that captures: autograd remembers where it was."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = self.function()
        current.wait_stream(self.stream)
        return result

    @pause_gc()
    def _captured(self, placements: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        for placement in placements:
            placement.followed = True
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                return graph, self.function()
        finally:
            for placement in placements:
                placement.followed = False
