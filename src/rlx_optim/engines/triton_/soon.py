"""Decisions that do not wait for the device: each is taken by what it would have been the last time."""

# mypy: ignore-errors

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from .replay import recording


class Soon:
    """The decisions of one bundle's updates, each known by its place among them. A graph has been recorded with some answers, and
    tells what they would have been."""

    def __init__(self) -> None:
        self.last: dict[Any, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self.taken: list[Any] = []  # in the update that runs
        self.before: list[Any] = []  # in the last one that took any
        self.recorded: dict[Any, dict[Any, torch.Tensor]] = {}  # of graphs, by their answers: where each tells its decisions
        self.answers: tuple[Any, ...] = ()  # of the last update that took decisions
        self.begin()

    def begin(self) -> None:
        """An update begins."""
        self.path: tuple[Any, ...] = ()
        self.counts: collections.Counter[Any] = collections.Counter()
        self.before, self.taken = self.taken or self.before, []
        if recording():
            self.recorded[self.answers] = {}

    def ask(self) -> tuple[Any, ...]:
        """How the last update that took decisions would have them now, by which a graph may take the next; () if none did."""
        self.begin()
        told = [(key, *self.last[key]) for key in self.before]
        for _, _, event in told[-1:]:
            event.synchronize()  # the others were before
        self.answers = tuple([(key, bool(host)) for key, host, _ in told])
        return self.answers

    def replayed(self) -> None:
        """The graph of these answers has told anew what they would have been."""
        event, told = torch.cuda.Event(), self.recorded[self.answers]
        event.record()
        self.last |= {key: (host, event) for key, host in told.items()}
        self.taken = list(told)

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
            host = self.last[key][0]
            answer, self.recorded[self.answers][key] = bool(host), host.copy_(predicate, non_blocking=True)
            return answer
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
