"""A small memory of what was asked for last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Recent:
    """Entries that were asked for last, of a limited weight together."""

    def __init__(self, most: int):
        self.most, self.weight = most, 0
        self.entries: dict[Any, tuple[Any, int]] = {}  # in the order in which they were asked for

    def find(self, key: Any, make: Callable[[], Any], weight: int = 1) -> Any:
        """The entry of a key, made where there is none."""
        if (known := self.entries.pop(key, None)) is None:
            known = make(), weight
            self.weight += weight
            while self.entries and self.weight > self.most:
                oldest = next(iter(self.entries))
                self.weight -= self.entries.pop(oldest)[1]
        self.entries[key] = known
        return known[0]

    def clear(self) -> None:
        """Forget all of them."""
        self.entries.clear()
        self.weight = 0

    def __contains__(self, key: Any) -> bool:
        return key in self.entries
