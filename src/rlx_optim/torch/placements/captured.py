"""Steps that a CUDA graph can capture: counts, hyperparameters and the decision to skip are on the device.

Every number that depends on the step count is computed from the counts on the device, in float64, by the same `Spec.scalars`. A
step that is skipped is launched all the same and writes nothing. What a rule decides by the count (`Spec.decisions`: SOAP's
refreshes, KronPSGD's updates) the host counts along, one for every step that it launches or replays; `Graphed` keeps a graph for
each combination.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...engines.torch_ import pause_gc
from ...spec import Spec
from ...stepping import Part, TensorState, count_step, run_bundle
from .local import Batch, LocalTriton, ParamEntry, Selection, mark_written

#: what of state in fewer bits can be captured
ALONE = "with capturable=True codes are for tensors that keep all of a slot in them; use capturable=False, or float32 state"


def unsupported_reason(spec: Spec, engine: str, nonfinite: str) -> str | None:
    """Why this cannot be captured; None if it can."""
    if engine != "triton":
        return f"capturable=True needs the triton engine and CUDA parameters, this is engine {engine!r}"
    if spec.step_dependent and not has_decisions(spec):
        return f"{type(spec).__name__} cannot be captured: what its step does depends on the step count; use capturable=False"
    if called := [name for name, value in spec.values().items() if callable(value)]:
        return f"{type(spec).__name__} cannot be captured with {called[0]}=…, which the host would have to call at every replay"
    if nonfinite == "raise":
        return "nonfinite='raise' needs the host to look at every gradient; with capturable=True use 'skip' or 'propagate'"
    return None


def has_decisions(spec: Spec) -> bool:
    """Whether the host says what a step does."""
    return type(spec).decisions is not Spec.decisions


def find_decisions(part: Part) -> dict[str, Any]:
    """What the next step of a part does, as the host counts."""
    first = part.records[0]
    return part.bundle.spec.decisions(first.t + 1, first.counters)


class Captured(LocalTriton):
    """A placement whose counts are on the device. flag: not 0 where the step must not be taken; None: nobody decides. followed:
    whoever captures a step tells the host of every replay."""

    counts: torch.Tensor
    flag: torch.Tensor | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    followed = False

    def share_counts(self) -> None:
        self.engine.sender.prepare()
        self.counts = torch.tensor(
            [float(entry.state["step"]) for entry in self.entries], dtype=torch.float64, device=self.device
        )
        self.counted: dict[str, tuple[list[int], torch.Tensor]] = {}
        names = dict.fromkeys(name for entry in self.entries for name in entry.counters)
        ours = {name for entry in self.entries for name in entry.decided}
        self.share_counters(sorted(ours))
        for name in names.keys() - ours:
            who = [i for i, entry in enumerate(self.entries) if name in entry.counters]
            current = [float(self.entries[i].state[name]) for i in who]
            self.counted[name] = who, torch.tensor(current, dtype=torch.float64, device=self.device)
        for i, entry in enumerate(self.entries):
            entry.state["step"] = self.counts[i]
            for name in entry.counters.keys() & self.counted.keys():
                who, values = self.counted[name]
                entry.state[name] = entry.counters[name] = values[who.index(i)]
            entry.remember_state()
        self.indices: dict[Any, torch.Tensor] = {}
        self.arrange()

    def rng_step(self, entry: ParamEntry) -> torch.Tensor:
        return self.counts[self.entries.index(entry)].long() + 1  # it is counted later

    def has_known_counts(self) -> bool:
        """What others write to the counts is read by the next step anyway."""
        return True

    def restore_counts(self) -> None:
        """The counts on the device are the truth; those that the host keeps are made anew from them."""

    def step(self, batch: Batch, specs: Sequence[Spec], fusion_keys: tuple[Any, ...], scale: Any) -> None:
        rows = self.select(batch.chosen).rows
        prepared = self.grouping.key(rows, specs, fusion_keys, self.with_stats) in self.grouping.plans
        if self.engine.sender.capturing():
            if not prepared:
                raise RuntimeError(
                    "a CUDA graph is being captured and this step is not prepared: take a step with the same parameters before"
                )
            self.parts = self.grouping.find(rows, specs, fusion_keys, self.with_stats)
            if not self.followed and (deciding := self.deciding()):
                raise RuntimeError(
                    f"{deciding[0].bundle.spec.title}: what its step does depends on the step count, which a replayed graph does "
                    "not tell; capture it with rlx_optim.torch.Graphed(step, optimizer)"
                )
        elif not prepared:
            self.indices = {}
        with pause_gc() if self.engine.sender.capturing() else contextlib.nullcontext():
            super().step(batch, specs, fusion_keys, scale)

    def deciding(self) -> list[Part]:
        """The parts whose rule decides by the step count."""
        return [step.part for step in self.parts if has_decisions(step.part.bundle.spec)]

    def phase(self) -> tuple[tuple[Any, ...], bool]:
        """What the next step of each part does, and whether the host asks the device about it."""
        found, asks = [], False
        for part in self.deciding():
            current, counters = find_decisions(part), part.records[0].counters
            found.append(tuple(bool(value) for name, value in current.items() if name not in counters))
            asks = asks or any(current[name] for name in part.bundle.spec.syncs_on)
        return tuple(found), asks

    def follow(self) -> None:
        """A step is on its way: the host counts it, whether the device takes it or not. One that it asks the device about comes
        again if it was not taken."""
        if self.flag is not None and self.phase()[1] and bool(self.flag):
            return
        for part in self.deciding():
            count_step(part.records, find_decisions(part))
        self.write_counters()

    def launch(
        self, selection: Selection, entries: list[ParamEntry], params: list[torch.Tensor], grads: list[torch.Tensor],
        specs: Sequence[Spec], scale: Any,
    ) -> None:  # fmt: skip
        self.pointers.flag = self.flag
        place = {record: i for i, entry in enumerate(self.entries) for record in entry.records}
        sides = [self.arrays(selection, entries, side) for side in (params, grads)]
        taken = None if self.flag is None else (self.flag == 0).reshape(())
        after: dict[str, torch.Tensor] = {}
        for bundle in (step.part.bundle for step in self.parts):
            if not self.engine.sweeps(bundle):
                what = f"state_dtype={bundle.spec.state_dtype!r}: {ALONE}" if bundle.storages else ""
                raise bundle.spec.refuse(what or "with capturable=True it steps matrices and vectors only")
        for part, _, places in self.parts:
            bundle = part.bundle
            bundle.spec = specs[part.records[0].group]
            numbers, counts = self.numbers_of(part, place)
            if bundle.spec.matrix:
                bundle.t = (self.counts[place[part.records[0]]] + 1).long()
            arrays = {name: [side[i] for i in places] for name, side in zip("pg", sides, strict=True)}
            part.keep_report(run_bundle(bundle, self.engine, numbers, scale, p=arrays["p"], g=arrays["g"]))
            for name, index, new in counts:
                values = after.setdefault(name, self.counted[name][1].clone())
                new = self.as_column(new, len(index))
                values.index_copy_(0, index, new if taken is None else torch.where(taken, new, values[index]))
        for name, values in after.items():
            self.counted[name][1].copy_(values)
        mark_written(params)

    def numbers_of(self, part: Part, place: Mapping[TensorState, int]) -> tuple[dict[str, Any], list[Any]]:
        """The numbers of a part, one per tensor where they depend on counts; and the counters' next values, with their places."""
        groups: dict[int, list[int]] = {}
        for i, record in enumerate(part.records):
            groups.setdefault(record.group, []).append(i)
        every: list[dict[str, Any]] = []
        counts: list[tuple[str, torch.Tensor, Any]] = []
        for group, members in groups.items():
            entries = [place[part.records[i]] for i in members]
            where = self.index_of(part, group, entries)
            t = self.counts[where].double() + 1
            counted = {
                name: (self.index_of((part, name), group, [who.index(s) for s in entries]), values)
                for name, (who, values) in self.counted.items()
                if all(s in who for s in entries)
            }
            before = {name: values[index] for name, (index, values) in counted.items()}
            spec = object.__new__(type(part.bundle.spec))  # hyperparameters that are on the device are read there
            spec.__dict__.update({name: as_double(self.groups[group][name]) for name in part.bundle.spec.fields})
            current = {**before, **spec.numbers(t, before, find_decisions(part))}
            current |= {"_rng_step": t} if part.bundle.roundings else {}
            counts += [(name, index, current[name]) for name, (index, _) in counted.items()]
            every.append(current)
        if len(groups) == 1:
            return every[0], counts
        order = [i for members in groups.values() for i in members]
        back = self.index_of((part, "order"), 0, [order.index(i) for i in range(len(order))])
        sizes = [len(members) for members in groups.values()]
        columns = {
            name: torch.cat([self.as_column(current[name], n) for current, n in zip(every, sizes, strict=True)])[back]
            for name, value in every[0].items()
            if value is not None
        }
        return columns, counts

    def as_column(self, value: Any, n: int) -> torch.Tensor:
        """A number, or one per tensor, as a vector on the device; made there: nothing may be copied to it during a capture."""
        if not torch.is_tensor(value):
            return torch.full((n,), float(value), dtype=torch.float64, device=self.device)
        return value.double().expand(n)

    def index_of(self, what: Any, group: int, places: list[int]) -> torch.Tensor:
        """Places as a tensor on the device, made once."""
        if (what, group) not in self.indices:
            self.indices[what, group] = torch.tensor(places, dtype=torch.int64, device=self.device)
        return self.indices[what, group]

    def count(self, chosen: Sequence[int]) -> None:
        if not self.engine.sender.capturing():
            self.follow()
        step: Any = 1 if self.flag is None else (self.flag == 0).to(self.counts.dtype).reshape(())
        if len(chosen) == len(self.entries):
            self.counts += step
        else:
            self.counts[self.index_of(tuple(chosen), 0, list(chosen))] += step


def as_double(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(as_double, value))
    return value.double().reshape(()) if torch.is_tensor(value) else value


def not_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """1 where an entry of these gradients is infinite or NaN, else 0, decided where they are."""
    largest = torch.stack(torch._foreach_norm(list(grads), float("inf")))
    return 1 - largest.isfinite().all().to(torch.int32)
