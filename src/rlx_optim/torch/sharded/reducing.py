"""The torch engine on shards: what a rule measures over whole tensors is summed here and all-reduced.

All tensors of a bundle and all results of one map travel in one flat float64 buffer per process group, so a step costs as many
all-reduces as the rule has dependent measurements, however many tensors there are. An empty shard adds nothing and takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...engine import Bundle, Rule, Tensors, Values
from ...engines.torch_ import Torch
from .layout import Circle, Layout


class Reducing(Torch):
    """`bundle.watch` holds the layouts of a step's tensors, `bundle.index` says which of them are in the bundle."""

    def run(self, bundle: Bundle, update: Callable[[Any, Values], Values]) -> Values:
        self.layouts: list[Layout] = [bundle.watch[i] for i in bundle.index]
        return super().run(bundle, update)

    def reduced(self, array: torch.Tensor, kind: str) -> Any:
        """The sum over what is here."""
        if kind in ("norm", "rms"):
            wide = array.double()
            return (wide * wide).sum()
        return array.sum(-2 if kind == "column_mean" else -1, dtype=torch.float64)

    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        x = super().map(rule, x, **reduce)
        if not reduce:
            return x
        sums = {name: list(x[name]) for name in reduce}
        self._add_up([(layout, self._axis(x[name]), sums[name], i) for name in reduce for i, layout in enumerate(self.layouts)])
        return x.set(**{name: self._finished(kind, x[name], sums[name]) for name, kind in reduce.items()})

    @staticmethod
    def _axis(value: Any) -> int | None:
        """The axis of the parameter that was summed over last; None for all of them."""
        return value.drop[-1] if isinstance(value, Tensors) else None

    @staticmethod
    def _add_up(entries: list[tuple[Layout, int | None, list[torch.Tensor], int]]) -> None:
        """Make the sums of this rank those of all ranks that share what was summed over."""
        shared: dict[str, tuple[Circle, list[tuple[list[torch.Tensor], int]]]] = {}
        for layout, axis, sums, i in entries:
            for (_, dim), circle in zip(layout.shards, layout.circles, strict=True):
                if circle.size > 1 and axis in (None, dim - len(layout.shape)):
                    shared.setdefault(circle.name, (circle, []))[1].append((sums, i))
        for circle, members in shared.values():
            flat = torch.cat([sums[i].reshape(-1) for sums, i in members])
            torch.distributed.all_reduce(flat, group=circle.group)
            for (sums, i), total in zip(members, flat.split([sums[i].numel() for sums, i in members]), strict=True):
                sums[i] = total.reshape(sums[i].shape)

    def _finished(self, kind: str, value: Any, sums: list[torch.Tensor]) -> Any:
        shapes = [layout.shape for layout in self.layouts]
        if kind in ("norm", "rms"):
            counts = [math.prod(shape) if kind == "rms" else 1 for shape in shapes]
            return torch.stack([(total / count).sqrt() for total, count in zip(sums, counts, strict=True)])
        lengths = [1 if kind == "row_sum" else shape[value.drop[-1]] for shape in shapes]
        return Tensors([(total / n).to(self.dtype) for total, n in zip(sums, lengths, strict=True)], value.drop)
