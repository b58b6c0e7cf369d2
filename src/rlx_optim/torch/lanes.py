"""A lane: the parameters that one engine steps together, and how their memory reaches it.

`CpuLane` hands the cpu engine the addresses of torch's own memory; what it cannot use as it is (bfloat16, float16, other
strides) goes through a scratch copy and is rounded once on the way back. `TorchLane` hands tensors to the torch engine.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..engine import Engine
from ..spec import Shape, Spec
from ..stepping import Part, Record, bundle_up, run_part

ARITHMETIC = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


class Seat:
    """One parameter in a lane: its records (several where it is split into matrices) and its state as torch keeps it."""

    __slots__ = ("batch", "counters", "held", "param", "records", "shape", "state", "step", "version")

    def __init__(self, param: torch.Tensor, state: dict[str, Any], name: str, group: int, batch: int, counters: Iterable[str]):
        self.param, self.shape, self.state, self.batch = param, param.shape, state, batch
        self.step, self.counters = state["step"].numpy(), {counter: state[counter].numpy() for counter in counters}
        self.held = tuple(state.values())
        self.version = self.versions()
        inner = tuple(param.shape) if batch == 1 else inner_shape(tuple(param.shape), batch)
        self.records = [Record(name if batch == 1 else f"{name}[{i}]", inner, group) for i in range(batch)]

    def versions(self) -> int:
        """Moves when others change the counts: we write through NumPy, which torch does not see (and which is much quicker)."""
        version: int = self.state["step"]._version
        return version + sum([self.state[name]._version for name in self.counters]) if self.counters else version

    def holds(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> bool:
        """Whether what it holds is still the optimizer's state: the same memory, the counts not changed by others."""
        now = states.get(self.param) or {}
        same = len(now) == len(self.held) and all(map(operator.is_, now.values(), self.held))
        return same and self.versions() == self.version

    def count(self) -> None:
        """Write down that its records have stepped."""
        first = self.records[0]
        if not first.size:
            first.t += 1  # nothing to compute, but the step counts
        self.step[()] = first.t
        for name, value in first.counters.items():
            self.counters[name][()] = value


def inner_shape(shape: Shape, batch: int) -> Shape:
    """The shape of one of `batch` equal pieces: whole leading axes (experts), or a share of the first (fused matrices)."""
    if batch > 1 and not shape:
        raise ValueError(f"a parameter without dimensions cannot be split into {batch} equal matrices")
    kept, left = list(shape), batch
    while left > 1 and kept and left % kept[0] == 0 and len(kept) > 2:
        left //= kept.pop(0)
    if left > 1:
        if kept[0] % left:
            raise ValueError(f"shape {shape} cannot be split into {batch} equal matrices")
        kept[0] //= left
    return tuple(kept)


class Addresses:
    """Where the arrays of a step are, in the form the cpu engine reads."""

    def __init__(self, n: int):
        self.n, self.version = n, 0
        self.params, self.grads = np.zeros(n, np.int64), np.zeros(n, np.int64)


class Lane(abc.ABC):
    """Seats that share an engine."""

    spread = ""  # in words: how parameters that are spread over ranks are stepped

    def __init__(self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float):
        self.engine, self.why, self.device, self.dtype = engine, why, device, dtype  # dtype: of arithmetic and state
        self.sign = sign  # -1 where groups maximize
        self.seats: list[Seat] = []
        self.present: tuple[int, ...] = ()
        self.structures: Any = None
        self.parts: list[Part] = []
        self.numbers: dict[Any, dict[str, Any]] = {}

    def pieces(self, tensor: torch.Tensor, seat: Seat) -> Sequence[torch.Tensor]:
        return [tensor] if seat.batch == 1 else list(tensor.reshape(seat.batch, *seat.records[0].shape))

    def step(self, chosen: list[int], specs: Sequence[Spec], structures: Any, grads: list[torch.Tensor], scale: float) -> None:
        """Step the chosen seats, whose gradients these are."""
        key = tuple(chosen)
        if key != self.present or structures != self.structures:
            self.present, self.structures = key, structures
            records = [record for i in chosen for record in self.seats[i].records]
            self.parts = bundle_up(enumerate(records), specs, self.engine, self.fresh_watch(len(records)))
        self.numbers.clear()
        self.run([self.seats[i] for i in chosen], specs, grads, scale)

    def fresh_watch(self, n: int) -> Any:
        return None

    @abc.abstractmethod
    def run(self, seats: list[Seat], specs: Sequence[Spec], grads: list[torch.Tensor], scale: float) -> None:
        """Run the parts on these seats' memory."""

    @staticmethod
    @abc.abstractmethod
    def view(buffer: torch.Tensor) -> Any:
        """A state tensor as the engine wants it."""


class TorchLane(Lane):
    def run(self, seats: list[Seat], specs: Sequence[Spec], grads: list[torch.Tensor], scale: float) -> None:
        params: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        back = []
        for seat, grad in zip(seats, grads, strict=True):
            whole = seat.param.detach()
            if seat.batch > 1 and not whole.is_contiguous():
                whole = whole.contiguous()
                back.append((seat.param, whole))
            params += self.pieces(whole, seat)
            pieces += self.pieces(grad, seat)
        for part in self.parts:
            index = part.bundle.index
            run_part(part, self.engine, specs, self.numbers, [params[i] for i in index], [pieces[i] for i in index], scale)
        for param, whole in back:
            param.detach().copy_(whole)

    @staticmethod
    def view(buffer: torch.Tensor) -> Any:
        return buffer


class CpuLane(Lane):
    def fresh_watch(self, n: int) -> Addresses:
        self.watch = Addresses(n)
        return self.watch

    @staticmethod
    def view(buffer: torch.Tensor) -> Any:
        return buffer.numpy()

    def run(self, seats: list[Seat], specs: Sequence[Spec], grads: list[torch.Tensor], scale: float) -> None:
        dtype = self.dtype
        params, back = [], []
        for i, seat in enumerate(seats):
            param = seat.param
            if param.dtype is dtype and param.is_contiguous():
                params.append(param)
            else:
                scratch = param.detach().to(dtype, memory_format=torch.contiguous_format, copy=True)
                params.append(scratch)
                back.append((param, scratch))
            grad = grads[i]
            if grad.dtype is not dtype or not grad.is_contiguous():
                grads[i] = grad.to(dtype).contiguous()
        self.tell(seats, params, grads)
        arrays = self.arrays(seats, params, grads) if any(part.bundle.spec.matrix for part in self.parts) else None
        for part in self.parts:
            ps, gs = ([], []) if arrays is None else ([side[i] for i in part.bundle.index] for side in arrays)
            run_part(part, self.engine, specs, self.numbers, ps, gs, scale)
        for param, scratch in back:
            param.detach().copy_(scratch)
        torch.autograd.graph.increment_version([seat.param for seat in seats])

    def tell(self, seats: list[Seat], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Write down where this step's arrays are."""
        if len(seats) == self.watch.n:
            places: Any = [p.data_ptr() for p in params], [g.data_ptr() for g in grads]
        else:
            places = ([], [])
            for seat, p, g in zip(seats, params, grads, strict=True):
                stride = p.element_size() * math.prod(seat.records[0].shape)
                for side, tensor in zip(places, (p, g), strict=True):
                    side += [tensor.data_ptr() + k * stride for k in range(seat.batch)]
        self.watch.params[:], self.watch.grads[:] = places
        self.watch.version += 1

    def arrays(self, seats: list[Seat], params: list[torch.Tensor], grads: list[torch.Tensor]) -> Any:
        sides: Any = ([], [])
        for seat, p, g in zip(seats, params, grads, strict=True):
            for side, tensor in zip(sides, (p, g), strict=True):
                side += [piece.numpy() for piece in self.pieces(tensor.detach(), seat)]
        return sides
