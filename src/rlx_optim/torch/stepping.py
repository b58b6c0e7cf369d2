"""A step of a torch optimizer: from groups and state, which hold the truth, to placements, and through them.

Lanes (which parameter is stepped by which engine, in which bundle) are made when needed and thrown away whenever groups or state
are replaced.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..buckets import on_the_device
from ..spec import Spec
from ..splits import Split
from ..stats import Row, Stats, summarize_stats
from ..stepping import TensorState
from . import bf16
from .collect import find_ready
from .engines import choose
from .eval_mode import eager, named
from .hyper import fixed, identified, in_dtype, number, plain
from .memory import GRAD, REQUIRES_GRAD, is_dtensor
from .placements.captured import Captured
from .placements.host import COPY_STREAMS
from .placements.local import ARITHMETIC, Placement
from .policy import Policy
from .replaced_params import follow, list_params, pair_replaced
from .state import (
    HOST,
    is_frozen,
    tensor_of,
)
from .step import take_step

DTYPES = list(ARITHMETIC)
ROUNDED = 1e-9  # of the rate a schedule began with: below zero by no more is zero (LinearLR gets there by adding up)


class Stepper(Policy):
    """What is derived from groups and state, and the step."""

    rule: ClassVar[str]
    engine: str
    _listed: list[list[torch.Tensor]]  # the parameters of each group, as state was last in line with them
    _admit: Callable[..., None]  # checks parameters and makes their state
    _rules: dict[str, type[Spec]]  # by name: the class's own, that of `otherwise`, and those that `route` sends to
    _pieces: Callable[[str | None, torch.Tensor], Split]  # into which matrices a parameter is split
    _comm: Any = None  # whose ranks share out matrices that all of them have; None: each rank steps its own
    _gathering: bool  # whether a rule reduces over all parameters
    _homes: Any = None  # where parameters that are spread over ranks keep their state (`placements.homes`)
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
        if next and any(placement.spread for placement, *_ in find_ready(self)):  # here: in a step the other ranks would wait
            raise RuntimeError(f"{self._owner}: stats is not for parameters that are spread over ranks")
        found, self._asked = self._rows, self._asked or next
        device = tensor_of(found[0][2]["grad_norm"]).device if found else None
        moved = [
            (name, size, {kind: tensor_of(value).to(device, non_blocking=True) for kind, value in each.items()})
            for name, size, each in found
        ]
        return summarize_stats(moved)

    def _forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self._placements: list[Placement] | None = None
        self._layout: list[list[torch.Tensor]] = []  # the parameters of each group when the placements were made
        self._places: dict[torch.Tensor, tuple[Placement, int]] = {}
        self._repeated: dict[torch.Tensor, int] = {}  # parameters that groups list more than once, and how often
        self._specs: list[tuple[Any, Spec | None]] = []
        self._listed_specs: list[Spec] = []
        self._fusion_keys: tuple[Any, ...] = ()  # what `fusion_key` gives of each
        self._given: dict[int, list[Any]] = {}  # of groups whose settings were such as nobody can change in place
        self._consensus: Any = None  # of the ranks that must agree before a step (`placements.consensus`)
        self._evaluating = None
        self._dormant: list[torch.Tensor] = []  # frozen parameters without state, when the placements were made

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
        if self._homes is None and ((spec.matrix and self._comm is not None) or any(map(is_dtensor, params))):
            from .placements.homes import Homes

            self._homes = Homes(self._owner, self._comm)
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
        if problem := bf16.refusal(group["rounding"], param):
            raise ValueError(f"{what} {problem}")
        if param.device.type == "meta":
            raise ValueError(
                f"{what} is on the meta device; materialise the model (model.to_empty(device=…)) before the optimizer"
            )
        if is_traceable_wrapper_subclass(param) and not is_dtensor(param):  # it has no memory of its own
            raise ValueError(f"{what} is a {type(param).__name__}; plain tensors and DTensors can be stepped")
        if is_dtensor(param) and any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
            raise ValueError(f"{what} is a partial sum; redistribute it to Shard or Replicate before the optimizer is made")
        if param.dtype not in ARITHMETIC:
            hint = "; optimize torch.view_as_real of it" if param.is_complex() else ""
            raise ValueError(f"{what} has dtype {param.dtype}; float32, float64, bfloat16 and float16 can be stepped{hint}")
        if param in self._hosted and param.device.type not in COPY_STREAMS:
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
        """Step all parameters that have a gradient, or one. problem: why this rank cannot."""
        take_step(self, only, loss, problem)

    def _record_names(self) -> dict[TensorState, str]:
        """What each record is called in `stats`: as its parameter, or by its place, "group.place"."""
        names: dict[TensorState, str] = {}
        for i, group in enumerate(self.param_groups):
            for k, param in enumerate(group["params"]):
                if param not in self._places:
                    continue
                placement, place = self._places[param]
                called = group["param_names"][k] if group.get("param_names") else f"{i}.{k}"
                names |= dict.fromkeys(placement.entries[place].records, called)
        return names

    def _agreeable_specs(self) -> tuple[list[Spec], Exception | None]:
        """The specs as they are now. Where ranks step together, a bad one is told to all before it is raised."""
        try:
            return self._current_specs(), None
        except Exception as problem:
            if self._homes is None:
                raise
            return [spec for _, spec in self._specs if spec is not None], problem

    def _captured_placements(self) -> list[Captured]:
        """Those there are, with the settings as they are now."""
        specs = self._current_specs()
        placements: Any = self._placements or []
        for step in (step for placement in placements for step in placement.parts):
            step.part.bundle.spec = specs[step.part.records[0].group]
        return list(placements)

    def _break_off(self) -> None:
        """Leave state as what was stepped until now needs it; the next step begins from there."""
        for placement in self._placements or ():
            placement.settle_counts()
        self._layout = []

    def _current_specs(self) -> list[Spec]:
        """The spec of every group as it is now; made anew where a value changed, which checks it."""
        given = [self._given_in(group) for group in self.param_groups]
        before = self._given
        same = [
            len(current) == len(before.get(i, ())) and all(map(operator.is_, current, before[i]))
            for i, current in enumerate(given)
        ]
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
                current = self._spec_of(group)
                if spec is not None and (current.fusion_key() != spec.fusion_key() or values[-1] != known[-1]):
                    self._refuse_reshaping(spec, current)
                    self._placements = None  # its state may need more, or it goes to another placement
                self._specs[i] = (values, current)
        self._given = {i: current for i, current in enumerate(given) if all(map(fixed, current[1:]))}
        self._listed_specs = [spec for _, spec in self._specs if spec is not None]
        self._fusion_keys = tuple(spec.fusion_key() for spec in self._listed_specs)
        return self._listed_specs

    def _given_in(self, group: Mapping[str, Any]) -> list[Any]:
        """What a group says, as it is."""
        fields = self._rules[group["rule"]].fields
        return [fields, *map(group.__getitem__, fields), group["maximize"]]

    def _refuse_reshaping(self, before: Spec, current: Spec) -> None:
        for name, field in before.fields.items():
            was, given = before.values()[name], current.values()[name]
            if field.fixed and given != was:
                raise ValueError(
                    f"{self._owner}: {name} shapes the state and cannot change in a group (is {was!r}, got {given!r}); "
                    "make a new optimizer"
                )

    # ---- gradient release ------------------------------------------------------------------------------------------------
    def attach(self, model: nn.Module | Iterable[torch.Tensor]) -> Callable[[], None]:
        """Step each parameter as soon as its gradient is complete, and free the gradient. Gives a function that undoes it."""
        params: list[Any] = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
        known = {p for group in self.param_groups for p in group["params"]}
        if strangers := [p for p in params if p.requires_grad and p not in known]:
            raise ValueError(f"{self._owner}: {len(strangers)} parameters of the model are not in this optimizer")
        find_ready(self)
        if self._gathering:
            raise ValueError(
                f"{self._owner}: attach steps parameters one by one, but its rule reduces over all; call step() instead"
            )
        if self._consensus is not None:
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
