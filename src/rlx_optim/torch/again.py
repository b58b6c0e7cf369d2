"""The same step once more: nearly all of them are.

A step that all lanes have just taken whole, on memory as it is, is remembered: which groups, which state, where every parameter
and every buffer of state is and how it is laid out, of which kind the gradients were. If this step finds all of that so again
(`headers` asks the tensors themselves), every check that a step makes has been made and the lanes' tables of addresses are right.
Anything else goes the long way, which finds out what it is. No gradient is kept.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..spec import Spec
from .headers import remembered
from .lanes import AddressLane
from .overlap import Work

if TYPE_CHECKING:
    from .stepping import Stepper

GRADIENT = operator.attrgetter("grad")


class Again:
    """What a whole step, just taken, looked like."""

    def __init__(self, groups: list[dict[str, Any]], state: Any, lanes: Sequence[AddressLane]):
        self.groups = [list(group["params"]) for group in groups]
        self.dicts = list(state.values())
        self.held = [value for each in self.dicts for value in each.values()]
        self.lanes = [(lane, Standing(lane)) for lane in lanes]

    @classmethod
    def after(cls, opt: Stepper, taken: Work) -> Again | None:
        """None where the step just taken is not of the kind that is simply repeated. A lane that sat it out, or was given copies,
        knows nothing of where its parameters and their gradients are."""
        lanes = [lane for lane, _, grads in taken if isinstance(lane, AddressLane) and lane.stepped_whole and lane.theirs(grads)]
        simple = len(lanes) == len(taken) == len(opt._lanes or ())
        return cls(opt.param_groups, opt.state, lanes) if simple else None

    def stands(self, groups: list[dict[str, Any]], state: Any) -> bool:
        """Whether groups and state are what they were."""
        return (
            len(groups) == len(self.groups)
            and all(
                len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
                for group, known in zip(groups, self.groups, strict=True)
            )
            and len(state) == len(self.dicts)
            and all(map(operator.is_, state.values(), self.dicts))
            and sum(map(len, self.dicts)) == len(self.held)
            and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, self.dicts)), self.held))
            and all(lane.version == lane.versions() for lane, _ in self.lanes)
        )

    def gradients(self) -> list[list[torch.Tensor]] | None:
        """This step's gradients, by lane, if they are of the kind they were and nothing else has moved; the lanes have been told
        where they are."""
        found = []
        for lane, standing in self.lanes:
            if (grads := standing.gradients(lane)) is None:
                return None
            found.append(grads)
        return found

    def step(self, found: list[list[torch.Tensor]], specs: Sequence[Spec]) -> None:
        for (lane, standing), grads in zip(self.lanes, found, strict=True):
            lane.numbers.clear()
            lane.launch(lane.seats, standing.params, grads, specs, lane.sign)
            lane.count(standing.every)


class Standing:
    """The parameters of a lane and their state: where they are and how they and the gradients are stored."""

    def __init__(self, lane: AddressLane):
        self.params = [seat.param for seat in lane.seats]
        self.every = range(len(self.params))
        state = [value for seat in lane.seats for value in seat.held if isinstance(value, torch.Tensor)]
        grads: Any = list(map(GRADIENT, self.params))
        self.headers = remembered(self.params, state, grads)

    def gradients(self, lane: AddressLane) -> list[torch.Tensor] | None:
        grads = list(map(GRADIENT, self.params))
        verdict = self.headers.same(grads)
        if verdict == 0:
            return None
        if verdict == 2:
            lane.watch.grads[:] = self.headers.addresses
            lane.watch.version += 1
        return grads
