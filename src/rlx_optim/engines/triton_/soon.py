"""Decisions that do not wait for the device: each is taken by what it would have been the last time."""

# mypy: ignore-errors

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch


class Soon:
    """The decisions of one bundle's updates, each known by its place among them."""

    def __init__(self) -> None:
        self.last: dict[Any, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self.begin()

    def begin(self) -> None:
        """An update begins."""
        self.path: tuple[Any, ...] = ()
        self.counts: collections.Counter[Any] = collections.Counter()

    def decide(self, predicate: torch.Tensor, yes: Callable[..., Any], no: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """The first time it waits."""
        place = (*self.path, yes.__qualname__)
        self.counts[place] += 1
        key = (*place, self.counts[place])
        now = self.tell(predicate)
        told, self.last[key] = self.last.get(key, now), now
        told[1].synchronize()
        path, self.path = self.path, key
        try:
            return (yes if bool(told[0]) else no)(*operands)
        finally:
            self.path = path

    @staticmethod
    def tell(predicate: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(predicate, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event
