"""The same step once more: nearly all of them are.

Groups, state and gradients are compared with those of the last step by identity and by address, in a handful of passes that run
in C; if nothing has changed but where gradients lie and what they hold, every check that a step makes has been made. Anything
else (None) goes the long way, which finds out what it is. No gradient is kept.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..spec import Spec
from .lanes import AddressLane

if TYPE_CHECKING:
    from .stepping import Stepper

GRADIENT, DTYPE = operator.attrgetter("grad"), operator.attrgetter("dtype")
ADDRESS, SIZE, CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous


class Again:
    """What a whole step, just taken, looked like."""

    def __init__(self, groups: list[dict[str, Any]], state: Any, lanes: Sequence[AddressLane]):
        self.groups = [list(group["params"]) for group in groups]
        self.dicts = list(state.values())
        self.held = [value for each in self.dicts for value in each.values()]
        self.lanes = [(lane, Standing(lane)) for lane in lanes]

    @classmethod
    def after(cls, opt: Stepper) -> Again | None:
        """None where the step just taken is not of the kind that is simply repeated."""
        lanes = [lane for lane in opt._lanes or [] if isinstance(lane, AddressLane)]
        simple = len(lanes) == len(opt._lanes or ()) and all(map(repeats, lanes))
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
        """This step's gradients, by lane, if they are of the kind they were; the lanes have been told where they are."""
        found = []
        try:
            for lane, standing in self.lanes:
                if (grads := standing.gradients(lane)) is None:
                    return None
                found.append(grads)
        except RuntimeError:  # a sparse gradient has no address
            return None
        return found

    def step(self, found: list[list[torch.Tensor]], specs: Sequence[Spec]) -> None:
        for (lane, standing), grads in zip(self.lanes, found, strict=True):
            lane.numbers.clear()
            lane.launch(lane.seats, standing.params, grads, specs, lane.sign)
            lane.count(standing.every)


class Standing:
    """The parameters of a lane: where they are and how they and their gradients are stored."""

    def __init__(self, lane: AddressLane):
        self.params = [seat.param for seat in lane.seats]
        self.every = range(len(self.params))
        self.places = list(map(ADDRESS, self.params))
        self.sizes, self.types = list(map(SIZE, self.params)), list(lane.watch.grad_types)
        self.addresses = lane.watch.grads.tolist()

    def gradients(self, lane: AddressLane) -> list[torch.Tensor] | None:
        # torch keeps a gradient to its parameter's type and shape: the gradient's tell the parameter's
        params = self.params
        grads = list(map(GRADIENT, params))
        if (
            set(map(type, grads)) != {torch.Tensor}
            or list(map(ADDRESS, params)) != self.places
            or list(map(DTYPE, grads)) != self.types
            or list(map(SIZE, grads)) != self.sizes
            or not all(map(CONTIGUOUS, grads))
        ):
            return None
        addresses = list(map(ADDRESS, grads))
        if addresses != self.addresses:
            lane.watch.grads[:] = addresses
            lane.watch.version += 1
            self.addresses = addresses
        return grads


def repeats(lane: AddressLane) -> bool:
    """Whether all of a lane was stepped, on memory as it is."""
    return not lane.spread and len(lane.present) == len(lane.seats) == lane.watch.n and not lane.scratched
