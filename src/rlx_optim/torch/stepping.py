"""A step of a torch optimizer: from groups and state, which hold the truth, to lanes, and through them.

Lanes (which parameter is stepped by which engine, in which bundle) are made when needed and thrown away whenever groups or state
are replaced.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..buckets import on_the_device
from ..program import trace
from ..routing import bare
from ..spec import Spec
from ..splits import WHOLE, Split, part, slots_of
from ..stats import Row, Stats, summed_up
from ..stepping import StepPart, TensorState, check_together, rows
from ..storage import COMPONENTS, Quantized
from . import halves
from .deciding import Deciding
from .engines import choose
from .evaluating import eager, named
from .graphs import GraphBucket, refusal
from .halves import is_spread
from .lanes import ARITHMETIC, BUCKETS, Batch, Bucket, ParamEntry, TorchBucket, packed
from .memory import DTYPE, GRAD, REQUIRES_GRAD, are_finite, in_bounds, is_fake
from .names import in_dtype
from .offload import LINKS, HostBucket, whole
from .overlap import Work, rounds
from .replaced import follow, list_params, pair_replaced
from .state import (
    HOST,
    canonicalize,
    count_of,
    dtype_of,
    in_pieces,
    init_state,
    is_frozen,
    names_of,
    part_names,
    shape_in_state,
    split_in,
    tensor_of,
)

log = logging.getLogger("rlx_optim")
DTYPES = list(ARITHMETIC)
FIXED = (float, int, bool, str, type(None))
CAST = ("cuda", "cpu", "xpu", "mps")  # devices that autocast knows
ROUNDED = 1e-9  # of the rate a schedule began with: below zero by no more is zero (LinearLR gets there by adding up)


class Stepper(Deciding):
    """What is derived from groups and state, and the step."""

    rule: ClassVar[str]
    engine: str
    _listed: list[list[torch.Tensor]]  # the parameters of each group, as state was last in line with them
    _admit: Callable[..., None]  # checks parameters and makes their state
    _rules: dict[str, type[Spec]]  # by name: the class's own, that of `otherwise`, and those that `route` sends to
    _pieces: Callable[[str | None, torch.Tensor], Split]  # into which matrices a parameter is split
    _process_group: Any = None  # whose ranks share out matrices that all of them have; None: each rank steps its own
    _homes: Any = None  # where parameters that are spread over ranks keep their state (`sharded.homes`)
    _hosted: set[torch.Tensor]  # those whose state is on the host (`offload`)

    _lock: Any = None  # one thread steps at a time; copies and pickles have locks of their own
    _asked = False  # whether the next step is to say what it does
    _rows: Sequence[Row] = ()  # what the last did that was asked

    capturable: bool

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        made._lock = threading.RLock()
        return made

    def stats(self, next: bool = False) -> Stats:
        """What the last step that was asked about did, in all and by parameter: `opt.stats(next=True)` asks about the next, which
        takes it in the same passes; the others measure nothing. Tensors on the device: nothing waits for them."""
        if not next and not self._rows:
            raise RuntimeError(f"{self._owner}: no step was asked about; call stats(next=True) before it")
        if next and any(lane.spread for lane, *_ in self._ready()):  # here: in a step the other ranks would wait
            raise RuntimeError(f"{self._owner}: stats is not for parameters that are spread over ranks")
        found, self._asked = self._rows, self._asked or next
        device = tensor_of(found[0][2]["grad_norm"]).device if found else None
        there = [
            (name, size, {kind: tensor_of(value).to(device, non_blocking=True) for kind, value in each.items()})
            for name, size, each in found
        ]
        return summed_up(there)

    def _forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self._lanes: list[Bucket] | None = None
        self._layout: list[list[torch.Tensor]] = []  # the parameters of each group when the lanes were made
        self._places: dict[torch.Tensor, tuple[Bucket, int]] = {}
        self._repeated: dict[torch.Tensor, int] = {}  # parameters that groups list more than once, and how often
        self._specs: list[tuple[Any, Spec | None]] = []
        self._listed_specs: list[Spec] = []
        self._structures: tuple[Any, ...] = ()  # what `likeness` gives of each
        self._given: dict[int, list[Any]] = {}  # of groups whose settings were such as nobody can change in place
        self._council: Any = None  # of the ranks that must agree before a step (`sharded.council`)
        self._evaluating = None
        self._dormant: list[torch.Tensor] = []  # frozen parameters without state, when the lanes were made

    def _is_dormant(self, param: torch.Tensor) -> bool:
        """Whether a parameter is frozen and has no state: nothing is asked of it, whatever it is."""
        return is_frozen(param) and not self.state.get(param)

    def _has_woken(self) -> bool:
        """Whether a parameter that was frozen is trained now."""
        dormant = self._dormant
        return any(map(REQUIRES_GRAD, dormant)) or any(grad is not None for grad in map(GRAD, dormant))

    def _refresh(self) -> None:
        """Bring state in line with the groups: it follows parameters that were replaced, and thawed ones get theirs."""
        if pairs := pair_replaced(self._listed, self.param_groups):
            follow(self, pairs)  # type: ignore[arg-type]
        self._listed = list_params(self.param_groups)
        for index, group in enumerate(self.param_groups):
            if not all(self.state.get(param) or is_frozen(param) for param in group["params"]):
                spec = (self._specs[index][1] if len(self._specs) > index else None) or self._spec_of(group)
                self._admit(list(named(group, index)), spec, group)

    def _all_homes(self, params: Iterable[Any], spec: Spec) -> Any:
        """Made with the first parameter that is spread over ranks; None without one."""
        if self._homes is None and ((spec.matrix and self._process_group is not None) or any(map(is_spread, params))):
            from .sharded.homes import Homes

            self._homes = Homes(self._owner, self._process_group)
        return self._homes

    def _home(self, name: str | None, param: torch.Tensor, spec: Spec, split: Split) -> Any:
        """Where the state of a parameter is kept that is spread over ranks, or offloaded; None for all others."""
        homes = self._all_homes([param], spec)
        home = None if homes is None else homes.of(name or "", param, spec, split)
        if param not in self._hosted:
            return home
        if home is not None:
            raise ValueError(
                f"{self._owner}: {name or tuple(param.shape)!r} is spread over ranks, and offload='cpu' is for parameters that "
                "are not; give fully_shard offload_policy=CPUOffloadPolicy() (and no offload here), or leave out process_group"
            )
        return HOST

    def _reached(self, param: torch.Tensor, kind: type[Spec]) -> torch.device:
        """Where the arithmetic of a parameter is."""
        hosted = param in self._hosted and not on_the_device(kind.matrix, self.engine)
        return HOST.device if hosted else param.device

    def _spec_of(self, group: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Spec:
        if not isinstance(up := group.get("maximize", False), bool):  # whatever is true would climb
            raise TypeError(f"{self._owner}: maximize must be True or False, got {up!r}")
        kind = self._rules[group["rule"]]
        group = in_dtype(kind, group, dtype)
        values = plain({name: group[name] for name in kind.fields})
        lr, first = values["lr"], group.get("initial_lr")
        if isinstance(lr, float) and lr < 0 and first is not None and -lr <= ROUNDED * abs(number("initial_lr", first)):
            values["lr"] = 0.0
        return kind(**values)

    def _views(self) -> list[dict[str, Any]]:
        """The groups; where settings may follow the dtype, as they are for each dtype, one dtype after the other."""
        if not self._by_dtype():
            return self.param_groups
        return [in_dtype(self._rules[group["rule"]], group, dtype) for dtype in DTYPES for group in self.param_groups]

    def _by_dtype(self) -> bool:
        return any(kind.torch.in_dtype is not None for kind in self._rules.values())

    def _place(self, group: int, dtype: torch.dtype) -> int:
        """Where a parameter of a group finds its settings in `_views`."""
        return group + len(self.param_groups) * DTYPES.index(dtype) if self._by_dtype() else group

    def _check_param(self, name: str | None, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        what = f"{self._owner}: parameter {name!r}" if name else f"{self._owner}: a parameter of shape {tuple(param.shape)}"
        if group["state_dtype"] != "float32" and param.dtype is torch.float64:
            raise ValueError(f'{what} is float64, and so is its state; give it a group of its own with state_dtype="float32"')
        if problem := halves.refusal(group["rounding"], param):
            raise ValueError(f"{what} {problem}")
        if param.device.type == "meta":
            raise ValueError(
                f"{what} is on the meta device; materialise the model (model.to_empty(device=…)) before the optimizer"
            )
        if is_traceable_wrapper_subclass(param) and not is_spread(param):  # it has no memory of its own
            raise ValueError(f"{what} is a {type(param).__name__}; plain tensors and DTensors can be stepped")
        if is_spread(param) and any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
            raise ValueError(f"{what} is a partial sum; redistribute it to Shard or Replicate before the optimizer is made")
        if param.dtype not in ARITHMETIC:
            hint = "; optimize torch.view_as_real of it" if param.is_complex() else ""
            raise ValueError(f"{what} has dtype {param.dtype}; float32, float64, bfloat16 and float16 can be stepped{hint}")
        if param in self._hosted and param.device.type not in LINKS:
            raise ValueError(
                f"{what} is on {param.device}, and offload='cpu' is for parameters on a CUDA device: move the model there before "
                "the optimizer is made, or leave offload out, or name others: offload={'*pattern*': 'cpu'}"
            )
        where = self._reached(param, self._rules[group["rule"]])
        choose(self.engine, where, ARITHMETIC[param.dtype])  # refuses a device the engine cannot reach

    # ---- stepping ------------------------------------------------------------------------------------------------------
    @eager
    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """One step of every parameter that has a gradient. Everything is checked before anything is written.

        loss: what skip_above looks at beside the norm of the gradients; a closure gives it."""
        problem: Exception | None = None
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except Exception as raised:
                if self._homes is None:
                    raise
                problem = raised  # the other ranks wait to hear of it
        with torch.no_grad(), self._lock:
            self._step(None, loss, problem)
        return None if closure is None else loss

    def _step(self, only: torch.Tensor | None, loss: Any = None, problem: Exception | None = None) -> None:
        if cast := list(filter(torch.is_autocast_enabled, CAST)):  # for forward passes: products here would lose bits
            with contextlib.ExitStack() as off:
                for kind in cast:
                    off.enter_context(torch.autocast(kind, enabled=False))
                return self._step(only, loss, problem)
        if self._evaluating is not False and self._evaluates():
            raise RuntimeError(
                f"{self._owner}: it is in evaluation mode, where parameters are their averages; call train() before step()"
            )
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        stopped = not self.capturable and found is not None and bool(float(found))
        specs, refused = self._agreeable_specs()
        problem = problem or refused
        work: Work = []
        try:
            work = self._collect(only)  # after a refusal too: ranks lay out together, and the council is made with the lanes
        except Exception as raised:
            if self._council is None:
                raise problem or raised  # noqa: B904
            problem = problem or raised  # the other ranks wait to hear of it
        if only is not None and self._gathering:
            raise RuntimeError(f"{self._owner}: its rule reduces over all parameters; step them together, not one by one")
        if self.skip_above is not None and only is not None:
            raise RuntimeError(f"{self._owner}: skip_above is about the gradients of all parameters at once, and not for attach")
        if self._council is not None:
            work, stopped, bad, norm = self._council.agree(lambda: self._prepared(work, problem), stopped)
            if stopped or not self._finite(work, bad) or self._left_out(work, scale, loss, norm):
                return
        else:
            if problem is not None:
                raise problem
            if stopped:
                return
            if self.capturable:
                self._decide(work, found, scale, loss)
            elif not self._finite(work) or self._left_out(work, scale, loss, self._measured(work)):
                return
        factor: Any = 1.0 if scale is None else 1.0 / (scale if self.capturable else float(scale))
        asked, done = self._asked and only is None, list[StepPart]()
        buckets = [batch.bucket for batch in work]
        for bucket in buckets:
            bucket.asked = asked
        try:
            with whole(buckets) if any(bucket.hosted for bucket in buckets) else contextlib.nullcontext():
                for round_ in rounds(self._owner, work, self.param_groups, self._repeated):
                    for batch in round_:
                        batch.bucket.step(batch, specs, self._structures, batch.bucket.sign * factor)
                        batch.bucket.count(batch.chosen)
                        if log.isEnabledFor(logging.DEBUG):
                            log.debug("%s: %s", self._owner, batch.bucket.describe(len(batch.chosen)))
                        done += batch.bucket.parts if asked else ()
        except BaseException:
            self._break_off()
            raise
        if asked:
            self._asked, self._rows = False, rows(done, self._record_names())

    def _record_names(self) -> dict[TensorState, str]:
        """What each record is called in `stats`: as its parameter, or by its place, "group.place"."""
        names: dict[TensorState, str] = {}
        for i, group in enumerate(self.param_groups):
            for k, param in enumerate(group["params"]):
                if param not in self._places:
                    continue
                lane, place = self._places[param]
                called = group["param_names"][k] if group.get("param_names") else f"{i}.{k}"
                names |= dict.fromkeys(lane.seats[place].records, called)
        return names

    def _agreeable_specs(self) -> tuple[list[Spec], Exception | None]:
        """The specs as they are now. Where ranks step together, a bad one is told to all before it is raised."""
        try:
            return self._current_specs(), None
        except Exception as problem:
            if self._homes is None:
                raise
            return [spec for _, spec in self._specs if spec is not None], problem

    def _graph_lanes(self) -> list[GraphBucket]:
        """Those there are, with the settings as they are now."""
        specs = self._current_specs()
        lanes: Any = self._lanes or []
        for step in (step for lane in lanes for step in lane.parts):
            step.part.bundle.spec = specs[step.part.records[0].group]
        return list(lanes)

    def _break_off(self) -> None:
        """Leave state as what was stepped until now needs it; the next step begins from there."""
        for lane in self._lanes or ():
            lane.settle_counts()
        self._layout = []

    def _collect(self, only: torch.Tensor | None) -> Work:
        """What is to be stepped: the parameters that have a gradient, once all of it has been checked."""
        return [self._checked(bucket, chosen, grads) for bucket, chosen, grads in self._ready(only) if chosen]

    def _checked(self, bucket: Bucket, chosen: Sequence[int], grads: list[Any]) -> Batch:
        """The gradients of these seats. Those that are not such as nearly all are, are looked at one by one."""
        expected = bucket.select(chosen).expected
        addresses = expected.locate(grads)
        for i in range(len(chosen)) if addresses is None else {*addresses.odd, *expected.fresh}:
            grads[i] = self._checked_grad(bucket, bucket.seats[chosen[i]])
        if expected.fresh:
            bucket.selections.clear()
        if expected.turned:
            addresses = None
            for i in expected.turned:
                grads[i] = -grads[i]
        return Batch(bucket, chosen, grads, addresses)

    def _finite(self, work: Work, verdict: bool | None = None) -> bool:
        """Whether the gradients are finite, where that matters."""
        if self.nonfinite == "propagate":
            return True
        grads = work[0].grads if len(work) == 1 else [grad for batch in work for grad in batch.grads]
        return self._passes(lambda: [batch.bucket.seats[i].param for batch in work for i in batch.chosen], grads, verdict)

    def _prepared(self, work: Work, problem: Exception | None) -> tuple[Work, bool, torch.Tensor | None]:
        """This rank's work, whether something in it is not finite and should be, and the norm before a clip of it."""
        if problem is not None:
            raise problem
        rounds(self._owner, work, self.param_groups, self._repeated)  # refuses what ranks cannot step together
        watched = self.nonfinite != "propagate"
        bad = watched and not are_finite([grad for batch in work for grad in batch.grads])
        return work, bad, self._measured(work)

    def _refuse_zeros(self, lane: Bucket, seat: ParamEntry) -> None:
        """What is to keep its norm must have one, at the first step. Shards do not know it of the whole."""
        first = seat.records[0]
        spec: Any = self._specs[first.group][1]
        if spec.decay != "hyperball" or first.t or not first.size or is_spread(seat.param):
            return
        for record, piece in zip(seat.records, lane.pieces(packed(seat.param.detach(), seat), seat), strict=True):
            if not bool(piece.any()):
                raise spec.stuck(record.name, "a group of its own, {'params': …, 'decay': 'decoupled'}")

    def _checked_grad(self, lane: Bucket, seat: ParamEntry) -> torch.Tensor:
        self._check_seat(lane, seat)
        if seat.fresh:
            self._refuse_zeros(lane, seat)
            seat.fresh = False
        grad: Any = seat.param.grad
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._owner}: {seat.records[0].name} has a sparse gradient; dense ones are needed (sparse=False)"
            )
        if is_spread(seat.param):
            from .sharded.council import local_grad

            return local_grad(self._owner, seat.records[0].name, seat.param, grad)
        if type(grad) is not torch.Tensor and is_traceable_wrapper_subclass(grad):
            raise RuntimeError(f"{self._owner}: the gradient of {seat.records[0].name} is a {type(grad).__name__}, not a tensor")
        if grad.shape != seat.shape or grad.device != lane.device:
            raise RuntimeError(
                f"{self._owner}: {seat.records[0].name} is on {lane.device} and of shape {tuple(seat.shape)}, "
                f"its gradient on {grad.device} and of shape {tuple(grad.shape)}"
            )
        if not in_bounds(grad):
            raise RuntimeError(f"{self._owner}: the storage of the gradient of {seat.records[0].name} has been resized")
        return grad.resolve_neg()  # autograd may leave the sign of a gradient for later

    def _current_specs(self) -> list[Spec]:
        """The spec of every group as it is now; made anew where a value changed, which checks it."""
        given = [self._given_in(group) for group in self.param_groups]
        before = self._given
        same = [len(now) == len(before.get(i, ())) and all(map(operator.is_, now, before[i])) for i, now in enumerate(given)]
        if all(same) and len(before) == len(given):
            return self._listed_specs
        groups, self._given = self._views(), {}
        if len(self._specs) != len(groups):
            self._forget()
            self._specs, same = [(None, None)] * len(groups), [False] * len(given)
        for i, group in enumerate(groups):
            if same[i % len(given)]:
                continue
            fields = self._rules[group["rule"]].fields
            values = [tuple(value) if type(value) is list else value for value in map(group.__getitem__, fields)]
            values.append(group["maximize"])
            tensors = any(isinstance(v, torch.Tensor) or (type(v) is tuple and any(map(torch.is_tensor, v))) for v in values)
            if tensors and self.capturable:  # what is on the device is read by the step itself
                values, tensors = list(map(identified, values)), False
            known, spec = self._specs[i]
            if spec is None or tensors or values != known:
                now = self._spec_of(group)
                if spec is not None and (now.likeness() != spec.likeness() or values[-1] != known[-1]):
                    self._refuse_reshaping(spec, now)
                    self._lanes = None  # its state may need more, or it goes to another lane
                self._specs[i] = (values, now)
        self._given = {i: now for i, now in enumerate(given) if all(map(fixed, now[1:]))}
        self._listed_specs = [spec for _, spec in self._specs if spec is not None]
        self._structures = tuple(spec.likeness() for spec in self._listed_specs)
        return self._listed_specs

    def _given_in(self, group: Mapping[str, Any]) -> list[Any]:
        """What a group says, as it is."""
        fields = self._rules[group["rule"]].fields
        return [fields, *map(group.__getitem__, fields), group["maximize"]]

    def _refuse_reshaping(self, before: Spec, now: Spec) -> None:
        for name, field in before.fields.items():
            was, given = before.values()[name], now.values()[name]
            if field.fixed and given != was:
                raise ValueError(
                    f"{self._owner}: {name} shapes the state and cannot change in a group (is {was!r}, got {given!r}); "
                    "make a new optimizer"
                )

    def _ready(self, only: torch.Tensor | None = None) -> list[tuple[Bucket, Sequence[int], list[Any]]]:
        """The lanes, with those of their seats that have a gradient, and the gradients. Groups and state are the truth: where
        they are no longer what the lanes were made from, lanes are made anew."""
        if not self.capturable and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self._owner}: a CUDA graph is being captured; make the optimizer with capturable=True")
        known = self._is_laid_out() if only is None else only in self._places
        if self._lanes is None or not known or self._has_woken():
            self._make_lanes()
        chosen = self._with_gradient(only)
        if any(self._is_stale(lane, which) for lane, which, _ in chosen):
            self._make_lanes()
            chosen = self._with_gradient(only)
        return chosen

    def _is_stale(self, lane: Bucket, chosen: Sequence[int]) -> bool:
        """Whether the state of these seats has been replaced or moved, or a parameter is read otherwise now."""
        if not chosen:
            return False
        expected = lane.select(chosen).expected
        recast = list(map(DTYPE, expected.params)) != expected.dtypes and any(cast(lane, lane.seats[i]) for i in chosen)
        return recast or not lane.counts_stand() or expected.is_stale(self.state)

    def _is_laid_out(self) -> bool:
        """Whether the groups list the parameters that the lanes were made from."""
        return len(self._layout) == len(self.param_groups) and all(
            len(params) == len(known) and all(map(operator.is_, params, known))
            for known, params in zip(self._layout, (group["params"] for group in self.param_groups), strict=True)
        )

    def _with_gradient(self, only: torch.Tensor | None) -> list[tuple[Bucket, Sequence[int], list[Any]]]:
        if only is not None:
            lane, place = self._places[only]
            return [(lane, (place,), [only.grad])]
        return [(lane, *lane.with_gradient()) for lane in self._lanes or []]

    def _check_seat(self, lane: Bucket, seat: ParamEntry) -> None:
        """Refuse a parameter that is no longer what its state was made for."""
        param, name = seat.param, seat.records[0].name
        if param.shape == seat.shape and ARITHMETIC.get(param.dtype) is lane.dtype and param.device == lane.device:
            if is_spread(param) or is_fake(param) or in_bounds(param):
                return
            raise RuntimeError(
                f"{self._owner}: the storage of {name} has been resized to {param.untyped_storage().nbytes()} bytes; give the "
                "parameter its memory back before the step"
            )
        if param.device != lane.device:
            what = f"has moved to {param.device}, its state is on {lane.device}"
        elif param.shape != seat.shape:
            what = f"has now shape {tuple(param.shape)}, its state is for {tuple(seat.shape)}"
        else:
            what = f"has become {param.dtype}, its state is {lane.dtype}"
        raise RuntimeError(
            f"{self._owner}: {name} {what}; move or cast the model before making the optimizer, "
            "or load its state_dict into a new one"
        )

    @torch.inference_mode(False)  # what is kept has versions, even if this step is taken in inference mode
    @torch.no_grad()
    def _make_lanes(self) -> None:
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if capturing:
            raise RuntimeError(
                f"{self._owner}: a CUDA graph is being captured; make it with capturable=True and take a step before"
            )
        self._refresh()
        lanes: dict[Any, Bucket] = {}
        self._dormant = []
        gathering: dict[Any, tuple[Spec, Any, list[str]]] = {}
        placed: set[torch.Tensor] = set()
        mixed = len({group["maximize"] for group in self.param_groups}) > 1
        for index, group in enumerate(self.param_groups):
            for name, param in named(group, index):
                if param in placed:
                    continue  # listed twice: one seat, stepped twice
                placed.add(param)
                if self._is_dormant(param):
                    self._dormant.append(param)
                    continue
                self._check_param(name, param, group)
                dtype, split, place = ARITHMETIC[param.dtype], self._pieces(name, param), self._place(index, param.dtype)
                spec = (self._specs[place][1] if self._specs else None) or self._spec_of(group, param.dtype)
                home = self._home(name, param, spec, split)
                init_state(self.state[param], spec, param, split, home)
                where = self._reached(param, type(spec))
                engine, why = choose(self.engine, where, dtype, is_fake(param))
                make: Any = GraphBucket if self.capturable else BUCKETS.get(engine.name, TorchBucket)
                program = None if spec.matrix else trace(spec, spec.slots(tuple(param.shape)))
                gathers = program is not None and program.gathers is not None
                turned = mixed and gathers and group["maximize"]  # what is one number for all is one lane's
                key: Any = (param.device, dtype, group["maximize"] and not turned)
                if gathers:
                    gathering.setdefault((spec.name, home is None, *key), (spec, program, [bare(name)]))
                if home is HOST:
                    key = (*key, where, spec.matrix)
                    above = on_the_device(spec.matrix, self.engine)
                    make = functools.partial(HostBucket, where=where, above=above)
                elif home is not None:
                    if self.capturable:
                        raise ValueError(
                            f"{self._owner}: capturable=True is for parameters that are not spread over ranks; {name} is"
                        )
                    from .sharded import lanes as sharded

                    lane = sharded.add(lanes, key, make, (engine, why), spec, param, bare(name), place, self.state[param], home)
                    self._round(lane, spec, bare(name))
                    lane.seats[-1].turned = turned
                    continue
                if key not in lanes:
                    lanes[key] = make(engine, why, param.device, dtype, -1.0 if group["maximize"] and not turned else 1.0)
                if self.capturable and (problem := refusal(spec, engine.name, self.nonfinite)):
                    raise ValueError(f"{self._owner}: {problem}")
                lanes[key].admit(self._seat(lanes[key], spec, param, name, place), spec)
                self._round(lanes[key], spec, bare(name))
                lanes[key].seats[-1].turned = turned
        check_together(list(gathering.values()))
        self._gathering = bool(gathering)
        for lane in lanes.values():
            lane.share_counts()
        self._lanes, self._layout = sorted(lanes.values(), key=lambda lane: lane.waits), list_params(self.param_groups)
        if self._homes is not None:
            from .sharded.lanes import council

            self._council = council(self._lanes, self.nonfinite != "propagate" or self.skip_above is not None)
        self._places = {seat.param: (lane, i) for lane in self._lanes for i, seat in enumerate(lane.seats)}
        times = collections.Counter(id(param) for params in self._layout for param in params)
        self._repeated = {param: times[id(param)] for param in placed if times[id(param)] > 1}

    def _round(self, lane: Bucket, spec: Spec, name: str) -> None:
        """Tell the last seat of a lane how its parameter is rounded. name: by which chance is keyed."""
        seat = lane.seats[-1]
        low = halves.checked(self._owner, seat.state, spec, seat.param, name, lane.kept)
        seat.half = halves.half_of(spec, seat.param, name, low)
        halves.tell(lane, seat)

    def _seat(self, lane: Bucket, spec: Spec, param: torch.Tensor, name: str, group: int) -> ParamEntry:
        state = self.state[param]
        split = split_in(state) or WHOLE
        if not self.capturable:
            canonicalize(state, spec)
        seat = ParamEntry(param, state, bare(name), group, split, spec.counters())
        seat.decided = spec.decisions(1, spec.counters()).keys() & spec.counters().keys()
        for record in seat.records:
            record.t = int(count_of(state["step"]))
            record.counters = {counter: count_of(state[counter]) for counter in spec.counters()}
        slots = slots_of(spec, tuple(param.shape), split)
        if isinstance(lane, HostBucket):
            lane.canonicalize(state, part_names(spec, slots))
        for slot, key in names_of(spec, slots).items():
            kind, views = slots[slot][0].storage, []
            for end in COMPONENTS[kind]:
                parts = part(slots[slot], end)
                buffer, shape, dtype = state[key + end], shape_in_state(parts, param, split), dtype_of(slots[slot], param, end)
                where = (buffer.shape, buffer.dtype, buffer.device)
                if where != (shape, dtype, lane.kept) or not buffer.is_contiguous():
                    raise RuntimeError(
                        f"{self._owner}: {key + end!r} of {name} must be contiguous, of shape {shape}, {dtype} "
                        f"and on {lane.kept}; it is of shape {tuple(buffer.shape)}, {buffer.dtype} and on {buffer.device}"
                    )
                views.append([lane.view(each) for each in in_pieces(buffer, parts)])
            for record, each, *mine in zip(seat.records, slots[slot], *views, strict=True):
                record.slots[slot], record.state[slot] = each, Quantized(kind, *mine) if kind else mine[0]
        return seat

    # ---- gradient release ------------------------------------------------------------------------------------------------
    def attach(self, model: nn.Module | Iterable[torch.Tensor]) -> Callable[[], None]:
        """Step each parameter as soon as its gradient is complete, and free the gradient. Gives a function that undoes it."""
        params: list[Any] = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
        known = {p for group in self.param_groups for p in group["params"]}
        if strangers := [p for p in params if p.requires_grad and p not in known]:
            raise ValueError(f"{self._owner}: {len(strangers)} parameters of the model are not in this optimizer")
        self._ready()
        if self._gathering:
            raise ValueError(
                f"{self._owner}: attach steps parameters one by one, but its rule reduces over all; call step() instead"
            )
        if self._council is not None:
            raise ValueError(
                f"{self._owner}: attach steps parameters one by one, but here ranks step them together (whole matrices, whole "
                "tensors' norms, or nonfinite); call step() instead"
            )

        def release(param: torch.Tensor) -> None:
            with torch.no_grad(), self._lock:  # autograd calls it on a thread a device
                self._step(param)
            param.grad = None

        handles = [p.register_post_accumulate_grad_hook(release) for p in params if p.requires_grad]

        def detach() -> None:
            for handle in handles:
                handle.remove()

        return detach


def cast(lane: Bucket, seat: ParamEntry) -> bool:
    """Whether a parameter has since become of another type that is computed in the same: its memory is read otherwise now."""
    return seat.param.dtype is not seat.dtype and ARITHMETIC.get(seat.param.dtype) is lane.dtype


def fixed(value: Any) -> bool:
    """Whether nobody can change it in place."""
    return type(value) in FIXED or (type(value) is tuple and all(map(fixed, value)))


def identified(value: Any) -> Any:
    """A value by which it can be told whether it was replaced: tensors count as themselves, whatever they hold."""
    if type(value) is tuple:
        return tuple(map(identified, value))
    return id(value) if isinstance(value, torch.Tensor) else value


def number(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        return value.item()
    return value


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters with one-element tensors read."""
    return {k: tuple(number(k, x) for x in v) if isinstance(v, (tuple, list)) else number(k, v) for k, v in values.items()}
