"""Decisions that do not wait for the device: each is taken by what it would have been the last time."""

# mypy: ignore-errors

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from .replay import recording


class Soon:
    """The decisions of one bundle's updates, each known by its place among them. In a graph all of them are no."""

    def __init__(self) -> None:
        self.last: dict[Any, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self.taken: list[Any] = []  # in the update that runs
        self.before: list[Any] = []  # in the last one that took any
        self.recorded: dict[Any, torch.Tensor] = {}  # those in a graph, with where it tells them
        self.begin()

    def begin(self) -> None:
        """An update begins."""
        self.path: tuple[Any, ...] = ()
        self.counts: collections.Counter[Any] = collections.Counter()
        self.before, self.taken = self.taken or self.before, []
        if recording():
            self.recorded = {}

    def quiet(self) -> bool:
        """Whether the last update that took decisions would have them all no, so that a graph may take the next."""
        self.begin()
        told = [self.last[key] for key in self.before]
        for _, event in told[-1:]:
            event.synchronize()  # the others were before
        return bool(told) and not any(bool(host) for host, _ in told)

    def replayed(self) -> None:
        """A graph has told anew what its decisions would have been."""
        event = torch.cuda.Event()
        event.record()
        self.last |= {key: (host, event) for key, host in self.recorded.items()}
        self.taken = list(self.recorded)

    def decide(self, predicate: torch.Tensor, yes: Callable[..., Any], no: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """The first time it waits."""
        place = (*self.path, yes.__qualname__)
        self.counts[place] += 1
        key = (*place, self.counts[place])
        self.taken.append(key)
        path, self.path = self.path, key
        try:
            return (yes if self.told(key, predicate) else no)(*operands)
        finally:
            self.path = path

    def told(self, key: Any, predicate: torch.Tensor) -> bool:
        if recording():
            if key not in self.last:
                raise RuntimeError("a decision that was never taken cannot be recorded")
            self.recorded[key] = self.last[key][0].copy_(predicate, non_blocking=True)
            return False
        now = self.tell(predicate)
        told, self.last[key] = self.last.get(key, now), now
        told[1].synchronize()
        return bool(told[0])

    @staticmethod
    def tell(predicate: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(predicate, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event
