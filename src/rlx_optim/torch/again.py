"""The same step once more: nearly all of them are.

A step that all lanes have just taken whole, on memory as it is, is remembered: which groups, which state, where every parameter
and every buffer of state is and how it is laid out, of which kind the gradients were. If this step finds all of that so again
(`structure` asks groups and state, `headers` the tensors themselves), every check that a step makes has been made and the lanes'
tables of addresses are right. Anything else goes the long way, which finds out what it is. No gradient is kept.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..spec import Spec
from .headers import remembered
from .lanes import PointerBucket
from .overlap import Work
from .structure import Groups, State, kept

if TYPE_CHECKING:
    from .stepping import Stepper


class Again:
    """What a whole step, just taken, looked like."""

    def __init__(self, groups: Groups, state: State, lanes: Sequence[PointerBucket]):
        self.structure = kept(groups, state)
        self.lanes = [(lane, Standing(lane)) for lane in lanes]
        self.specs: Sequence[Spec] = ()  # those last seen to ask for the lanes' passes

    @classmethod
    def after(cls, opt: Stepper, taken: Work) -> Again | None:
        """None where the step just taken is not of the kind that is simply repeated. A lane that sat it out, or was given copies,
        knows nothing of where its parameters and their gradients are. Nor after the first step of a process that has not needed
        numba so far, which takes seconds to be there: most of what is compiled for a device is compiled in that step."""
        lanes = [
            lane for lane, _, grads in taken if isinstance(lane, PointerBucket) and lane.stepped_whole and lane.theirs(grads)
        ]
        simple = len(lanes) == len(taken) == len(opt._lanes or ())
        first = "numba" not in sys.modules and any(seat.records[0].t == 1 for lane in lanes for seat in lane.seats[:1])
        return cls(opt.param_groups, opt.state, lanes) if simple and not first else None

    def stands(self, groups: Groups, state: State) -> bool:
        """Whether groups, state and counts are what they were, all tensors are where they were, and the gradients are of the kind
        they were. The lanes have then been told where they are."""
        return (
            self.structure.stands(groups, state)
            and all(lane.counts_stand() for lane, _ in self.lanes)
            and all(standing.stands(lane) for lane, standing in self.lanes)
        )

    def step(self, specs: Sequence[Spec]) -> bool:
        """Take it; False, and nothing done, where the specs ask for other passes."""
        if len(specs) != len(self.specs) or not all(map(operator.is_, specs, self.specs)):
            structures = [spec.likeness() for spec in specs]
            if any(lane.structures != structures for lane, _ in self.lanes):
                return False
            self.specs = specs
        for lane, standing in self.lanes:
            lane.numbers.clear()
            grads = [] if lane.all_by_address else [p.grad for p in standing.params]
            lane.launch(lane.seats, standing.params, grads, specs, lane.sign)  # type: ignore[arg-type]
            lane.count(standing.every)
        return True


class Standing:
    """The parameters of a lane and their state: where they are and how they and the gradients are stored."""

    def __init__(self, lane: PointerBucket):
        self.params: list[torch.Tensor] = [seat.param for seat in lane.seats]
        self.every = range(len(self.params))
        state = [value for seat in lane.seats for value in seat.held if isinstance(value, torch.Tensor)]
        self.headers = remembered(self.params, state)

    def stands(self, lane: PointerBucket) -> bool:
        verdict = self.headers.same()
        if verdict == 2:
            lane.watch.grads[:] = self.headers.addresses
            lane.watch.version += 1
        return verdict > 0
