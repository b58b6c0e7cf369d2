"""One file from a sharded run: all ranks bring tensor after tensor together, one of them writes.

At no time is more than one tensor whole. A writer that fails goes on bringing tensors together, so that nobody waits for it, and
then everybody hears of it; a rank that dies ends the others' collectives, and the file written before is still there.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import files
from ...checkpoint.format import Tensor, in_order
from ...checkpoint.snapshot import Snapshot
from ..checkpoint import snapshot_of
from .together import sharing


class Lockstep:
    """The tensors of a snapshot, to be brought together by all ranks in the order in which they are written."""

    def __init__(self, snapshot: Snapshot):
        self.next, self.broken = 0, False
        for p in snapshot.parameters.values():
            p.tensors = {slot: dataclasses.replace(each, read=self._reading(each)) for slot, each in p.tensors.items()}
        self.tensors: list[Tensor] = [each for _, each in in_order(snapshot.tensors())]

    def _reading(self, each: Tensor) -> Any:
        def read() -> Any:
            self.next += 1
            try:
                return each.read()
            except Exception:
                self.broken = True  # the others are not there any more
                raise

        return read

    def finish(self) -> None:
        """Take part in what is left."""
        while self.next < len(self.tensors) and not self.broken:
            self.tensors[self.next].read()


def save(opt: Any, steps: int, path: str | os.PathLike[str], every: int, keep: int | None, allow_nan: bool) -> Path | None:
    """As `checkpoint.files.save`, by all ranks together; the one with the lowest number writes."""
    params = [param for group in opt.param_groups for param in group["params"]]
    together, device = sharing(params, opt._homes.comm), params[0].device
    rank = torch.distributed.get_rank()
    steps, lead = together.highest([steps, -rank], torch.int64, device)
    if type(every) is int and every > 0 and steps % every:
        return None
    with together.agreed("the checkpoint was not written", device):
        snapshot = snapshot_of(opt)
        lockstep = Lockstep(snapshot)
        try:
            if rank == -lead:
                return files.save(lambda: snapshot, steps, path, every, keep, allow_nan)
        finally:
            lockstep.finish()
        return files.target(path, steps)
