"""Steps that a CUDA graph can capture: counts, hyperparameters and the decision to skip are on the device.

The host knows nothing of the step count here, so every number that depends on it is computed from the counts on the device, in
float64, by the same `Spec.scalars`. A step that is skipped is launched all the same and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..engine import bind_all
from ..engines.torch_ import NUMBERS
from ..spec import Spec
from ..stepping import Part, Record, run_bundle
from .lanes import Seat, TritonLane, written


def refusal(spec: Spec, engine: str, nonfinite: str) -> str | None:
    """Why this cannot be captured; None if it can."""
    if engine != "triton":
        return f"capturable=True needs the triton engine and CUDA parameters, this is engine {engine!r}"
    if spec.branches:
        return f"{type(spec).__name__} cannot be captured: what its step does depends on the step count; use capturable=False"
    if spec.state_dtype != "float32":
        return f"state_dtype={spec.state_dtype!r} cannot be captured yet; use capturable=False, or float32"
    if nonfinite == "raise":
        return "nonfinite='raise' needs the host to look at every gradient; with capturable=True use 'skip' or 'propagate'"
    return None


class GraphLane(TritonLane):
    """A lane whose counts live on the device. `flag`: not 0 where the step must not be taken; None: nobody decides."""

    counts: torch.Tensor
    flag: torch.Tensor | None = None
    groups: Sequence[Mapping[str, Any]] = ()

    def share_counts(self) -> None:
        self.engine.sender.prepare()
        self.counts = torch.tensor([float(seat.state["step"]) for seat in self.seats], dtype=torch.float64, device=self.device)
        self.counted: dict[str, tuple[list[int], torch.Tensor]] = {}
        for name in dict.fromkeys(name for seat in self.seats for name in seat.counters):
            who = [i for i, seat in enumerate(self.seats) if name in seat.counters]
            now = [float(self.seats[i].state[name]) for i in who]
            self.counted[name] = who, torch.tensor(now, dtype=torch.float64, device=self.device)
        for i, seat in enumerate(self.seats):
            seat.state["step"] = self.counts[i]
            for name in seat.counters:
                who, values = self.counted[name]
                seat.state[name] = seat.counters[name] = values[who.index(i)]
            seat.hold()
        self.indices: dict[Any, torch.Tensor] = {}
        self.version = 0

    def tick(self, seat: Seat) -> torch.Tensor:
        return self.counts[self.seats.index(seat)].long() + 1  # it is counted later

    def versions(self) -> int:
        """What others write to the counts is read by the next step anyway."""
        return 0

    def step(self, chosen: list[int], specs: Sequence[Spec], structures: Any, grads: list[torch.Tensor], scale: Any) -> None:
        if self.engine.sender.capturing() and not self.prepared(tuple(chosen), structures):
            raise RuntimeError(
                "a CUDA graph is being captured and this step is not prepared: take a step with the same parameters before"
            )
        if not self.prepared(tuple(chosen), structures):
            self.indices = {}
        super().step(chosen, specs, structures, grads, scale)

    def launch(
        self, seats: list[Seat], params: list[torch.Tensor], grads: list[torch.Tensor], specs: Sequence[Spec], scale: Any
    ) -> None:
        self.watch.flag = self.flag
        place = {record: i for i, seat in enumerate(self.seats) for record in seat.records}
        sides = [self.arrays(seats, side) for side in (params, grads)]
        taken = None if self.flag is None else (self.flag == 0).reshape(())
        after: dict[str, torch.Tensor] = {}
        for part in self.parts:
            bundle = part.bundle
            if not self.engine.sweeps(bundle):
                raise RuntimeError(f"{type(bundle.spec).__name__} with capturable=True steps matrices and vectors only")
            bundle.spec = specs[part.records[0].group]
            numbers, counts = self.numbers_of(part, place)
            mine = {name: [side[i] for i in bundle.index] for name, side in zip("pg", sides, strict=True)}
            part.tell(run_bundle(bundle, self.engine, numbers, scale, **mine))
            for name, index, new in counts:
                values = after.setdefault(name, self.counted[name][1].clone())
                new = self.column(new, len(index))
                values.index_copy_(0, index, new if taken is None else torch.where(taken, new, values[index]))
        for name, values in after.items():
            self.counted[name][1].copy_(values)
        written(params)

    def numbers_of(self, part: Part, place: Mapping[Record, int]) -> tuple[dict[str, Any], list[Any]]:
        """The numbers of a part, one per tensor where they depend on counts; and the counters' next values, with their places."""
        groups: dict[int, list[int]] = {}
        for i, record in enumerate(part.records):
            groups.setdefault(record.group, []).append(i)
        every: list[dict[str, Any]] = []
        counts: list[tuple[str, torch.Tensor, Any]] = []
        for group, members in groups.items():
            seats = [place[part.records[i]] for i in members]
            where = self.index(part, group, seats)
            t = self.counts[where].double() + 1
            mine = {
                name: (self.index((part, name), group, [who.index(s) for s in seats]), values)
                for name, (who, values) in self.counted.items()
                if all(s in who for s in seats)
            }
            before = {name: values[index] for name, (index, values) in mine.items()}
            spec = self.live(part.bundle.spec, self.groups[group])
            now = {**before, **spec.numbers(t, before, bind_all(type(spec).scalars, NUMBERS))}
            now |= {"_tick": t} if part.bundle.halves else {}
            counts += [(name, index, now[name]) for name, (index, _) in mine.items()]
            every.append(now)
        if len(groups) == 1:
            return every[0], counts
        order = [i for members in groups.values() for i in members]
        back = self.index((part, "order"), 0, [order.index(i) for i in range(len(order))])
        sizes = [len(members) for members in groups.values()]
        columns = {
            name: torch.cat([self.column(now[name], n) for now, n in zip(every, sizes, strict=True)])[back]
            for name, value in every[0].items()
            if value is not None
        }
        return columns, counts

    def column(self, value: Any, n: int) -> torch.Tensor:
        """A number, or one per tensor, as a vector on the device; made there: nothing may be copied to it during a capture."""
        if not torch.is_tensor(value):
            return torch.full((n,), float(value), dtype=torch.float64, device=self.device)
        return value.double().expand(n)

    def index(self, what: Any, group: int, places: list[int]) -> torch.Tensor:
        """Places as a tensor on the device, made once."""
        if (what, group) not in self.indices:
            self.indices[what, group] = torch.tensor(places, dtype=torch.int64, device=self.device)
        return self.indices[what, group]

    def live(self, spec: Spec, group: Mapping[str, Any]) -> Spec:
        """The spec with the hyperparameters that are on the device in place of what was read of them once."""
        live = object.__new__(type(spec))
        live.__dict__.update({name: as_double(group[name]) for name in spec.fields})
        return live

    def count(self, chosen: Sequence[int]) -> None:
        step: Any = 1 if self.flag is None else (self.flag == 0).to(self.counts.dtype).reshape(())
        if len(chosen) == len(self.seats):
            self.counts += step
        else:
            self.counts[self.index(tuple(chosen), 0, list(chosen))] += step


def as_double(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(as_double, value))
    return value.double().reshape(()) if torch.is_tensor(value) else value


def not_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """1 where an entry of these gradients is infinite or NaN, else 0, decided where they are."""
    largest = torch.stack(torch._foreach_norm(list(grads), float("inf")))
    return 1 - largest.isfinite().all().to(torch.int32)
