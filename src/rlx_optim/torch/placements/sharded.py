"""Parameters that are spread over ranks, and who steps them.

Elementwise rules run on this rank's shards, in the ordinary placements; rules that measure whole tensors do too, in `Sharded`,
which adds their sums up over ranks. Matrix rules are for `Owner`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor

from ...engine import Bundle, Engine
from ...engines.torch_ import TorchEngine
from ...language import Reduction
from ...program import Pass, commit_has_reduction, has_reduction, reduced_axis, reduces_over_all
from ...routing import bare
from ...spec import Shape, Spec
from ...stepping import Grouping
from ..memory import local_part
from ..state import Slots
from .comm import Comm, CommChain, DTensorLayout, chain_comms
from .consensus import Consensus, local_grad
from .homes import Owned
from .local import LocalTensors, ParamEntry, Placement
from .owner import Owner

if TYPE_CHECKING:
    from .build import Planned


class Reducing(TorchEngine):
    """The torch engine on shards: what a rule measures over whole tensors is summed here and all-reduced.

    All tensors of a bundle and all results of one map travel in one flat float64 buffer per process group, so a step costs as
    many all-reduces as the rule has dependent measurements. An empty shard adds nothing and takes part.
    `bundle.pointers` holds the layouts of a step's tensors, `bundle.index` says which of them are in the bundle."""

    def run(self, bundle: Bundle, move: bool = True) -> Mapping[str, Any]:
        self.layouts: list[DTensorLayout] = [bundle.pointers[i] for i in bundle.index]
        return super().run(bundle, move)

    def reduce_array(self, array: torch.Tensor, how: Reduction) -> torch.Tensor:
        """The sum over what is here, in float64."""
        if how.largest and not array.numel():
            return torch.full_like(array.double().sum(how.axis), -math.inf)
        return super().reduce_array(array.double(), how)

    def finish_reductions(self, step: Pass, shapes: Sequence[Shape], raw: Sequence[Sequence[torch.Tensor]]) -> dict[int, Any]:
        sums = [list(each) for each in raw]
        self._add_up([
            (layout, None if how.axis is None else reduced_axis(step.domain, how), how.largest, each, i)
            for (_, _, how), each in zip(step.reduces, sums, strict=True)
            for i, layout in enumerate(self.layouts)
        ])  # fmt: skip
        found = super().finish_reductions(step, [layout.shape for layout in self.layouts], sums)
        return {n: [t.to(self.dtype) for t in value] if isinstance(value, list) else value for n, value in found.items()}

    @staticmethod
    def _add_up(entries: list[tuple[DTensorLayout, int | None, bool, list[torch.Tensor], int]]) -> None:
        """Make the sums of this rank those of all ranks that share what was summed over."""
        shared: dict[tuple[str, bool], tuple[Comm, list[tuple[list[torch.Tensor], int]]]] = {}
        for layout, axis, largest, sums, i in entries:
            for (_, dim), comm in zip(layout.shards, layout.comms, strict=True):
                if comm.size > 1 and axis in (None, dim - len(layout.shape)):
                    shared.setdefault((comm.name, largest), (comm, []))[1].append((sums, i))
        for (_, largest), (comm, members) in shared.items():
            flat = torch.cat([sums[i].reshape(-1) for sums, i in members])
            op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(flat, op, group=comm.group)
            for (sums, i), total in zip(members, flat.split([sums[i].numel() for sums, i in members]), strict=True):
                sums[i] = total.reshape(sums[i].shape)


class Sharded(LocalTensors):
    """Shards of rules that measure whole tensors. Empty ones take part: their ranks must be in every all-reduce."""

    together = True

    def __init__(self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float):
        reducing: Any = Reducing(device, dtype)
        super().__init__(reducing, "sums over ranks are taken by the torch engine", device, dtype, sign)

    def group(self) -> Grouping:
        return Grouping(self.engine, self.records, [DTensorLayout(cast(Any, entry.param)) for entry in self.entries])

    def cut_to_part(self, entry: ParamEntry, spec: Spec, slots: Mapping[str, Slots]) -> Mapping[str, Slots]:
        size, found = entry.records[0].size, super().cut_to_part(entry, spec, slots)
        entry.records[0].size = size  # an empty shard is stepped, too
        return found


def find_kind(make: type[Placement], each: Planned) -> tuple[type[Placement], str]:
    """The placement for a parameter that is spread, and what it does in words. make: that of its shards by themselves."""
    spec, home = each.spec, each.home
    if isinstance(home, Owned):
        kind, what = Owner, f"each matrix on its owner, one of {home.comm.size} ranks"
    elif not home.layout.shards and not reduces_over_all(spec, home.layout.shape):
        return make, "replicated: every rank steps it"
    elif spec.matrix:
        kind, what = Owner, "gathered whole: its placement is not one plain shard"
    else:
        return (Sharded, "on shards, sums all-reduced") if has_reduction(spec, home.layout.shape) else (make, "on shards")
    if commit_has_reduction(spec):
        whose, instead = "decay='hyperball'", "use decay='decoupled' or 'cautious' there"
        if type(spec).commit is not Spec.commit:
            whose, instead = "its commit", "let `update` take it from p and u, and the commit from numbers"
        name = bare(each.name)
        raise spec.refuse(f"{whose} needs the norm of a whole matrix, and {name!r} is shared out over ranks ({what}); {instead}")
    return kind, what


def make_consensus(owner: str, found: Sequence[Any], comm: Comm | None, watched: bool) -> Consensus | None:
    """The ranks that step some of these parameters together, or (`watched`) must decide together; None where each goes its own
    way. found: of each parameter what it is to be placed by (`placements.build`)."""
    spread = [each for each in found if each.spread]
    kinds = [find_kind(LocalTensors, each)[0] for each in spread]
    working = {i: kind for i, kind in enumerate(kinds) if kind.together}
    deciding = [i for i in range(len(spread)) if watched or i in working]
    params = [spread[i].param for i in deciding]
    together = chain_comms([p for p in params if isinstance(p, DTensor) and DTensorLayout(p).comms], None)
    owned = [spread[i].home.comm for i in working if isinstance(spread[i].home, Owned)]
    together = CommChain([*together.comms, *owned])
    if not together.comms:
        return None
    keys = {i: (spread[i].param.device.type, *map(str, spread[i].key[1:])) for i in working}  # ranks have several devices
    layout = {spread[i].number: (kind.__name__, *keys[i], spread[i].place) for i, kind in working.items()}
    return Consensus(owner, together, spread[min(working, default=0)].param.device, layout, comm is not None)


def sum_over_ranks(params: Iterable[Any], reduce: Callable[[list[torch.Tensor]], torch.Tensor], largest: bool) -> torch.Tensor:
    """What `reduce` gives of the gradients that are here, added up over all ranks, or the largest: one all-reduce for those
    that are split in one way. A gradient may be missing, the parameter is there."""
    found: dict[tuple[str, ...], tuple[list[Comm], list[torch.Tensor]]] = {}
    for param in params:
        comms = [comm for comm in (DTensorLayout(param).comms if isinstance(param, DTensor) else []) if comm.size > 1]
        _, grads = found.setdefault(tuple(comm.name for comm in comms), (comms, []))
        if param.grad is not None:
            spread = isinstance(param, DTensor)
            grads.append(local_grad("clip_grad_norm_", "a parameter", param, param.grad) if spread else local_part(param.grad))
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    values = []
    for comms, grads in found.values():
        values.append(value := reduce(grads))
        for comm in comms:
            torch.distributed.all_reduce(value, op, group=comm.group)
    each = torch.stack(values)
    return each.max() if largest else each.sum()
