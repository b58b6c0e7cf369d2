"""Every optimizer as a torch.optim.Optimizer, from its spec.

`param_groups` and `state` are torch's own and hold the truth; lanes (which parameter is stepped by which engine, in which
bundle) are made from them when needed and thrown away whenever groups or state are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..admission import listed
from ..optimizer import NONFINITE, NamedOptimizer
from ..routing import report
from ..spec import Spec
from .engines import choose
from .lanes import ARITHMETIC, CpuLane, Lane, Seat, TorchLane, inner_shape
from .names import outside, translated
from .routing import Router, first_match, reasons_from
from .state import furnish, taken_over


class Boxed:
    """Carries a tensor past torch's loader, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class RuleOptimizer(torch.optim.Optimizer):
    """Base of the fourteen. A group's "rule" says which rule steps it: this class's own, or that of `otherwise`."""

    spec: ClassVar[type[Spec]]
    rule: ClassVar[str]
    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf instead of an extra pass

    def __init__(
        self,
        params: Any,
        hyperparameters: Mapping[str, Any],
        *,
        maximize: bool = False,
        engine: str = "auto",
        nonfinite: str = "propagate",
        otherwise: NamedOptimizer | None = None,
        route: Any = None,
        split: Mapping[str, int] | None = None,
    ):
        if nonfinite not in NONFINITE:
            raise ValueError(f"{self._owner}: nonfinite must be one of {', '.join(map(repr, NONFINITE))}, got {nonfinite!r}")
        if otherwise is not None and not isinstance(otherwise, NamedOptimizer):
            raise TypeError(f"{self._owner}: otherwise must be like rlx_optim.AdamW(lr=3e-4), or None, got {otherwise!r}")
        choose(engine, torch.device("cpu"), torch.float32)  # refuses an unknown engine now
        self.engine, self.nonfinite, self.skipped = engine, nonfinite, 0
        self._split, self._split_used = dict(split or {}), set[str]()
        self._rules: dict[str, type[Spec]] = {self.rule: self.spec}
        self._other: dict[str, Any] = {}  # the settings of `otherwise`
        if otherwise is not None:
            name = type(otherwise).__name__.lower()
            self._rules[name] = otherwise.spec
            self._other = {"rule": name, **otherwise.hyperparameters(), "maximize": maximize}
        self._forget()
        known = reasons_from(params) if isinstance(params, nn.Module) else {}
        self._router = Router(self._owner, route, otherwise is not None, known)
        self._why: dict[int, str] = {}
        given = {name: hyperparameters.get(name, field.default) for name, field in self.spec.fields.items()}
        if otherwise is not None:
            given["lr"] = _number(given["lr"])  # one tensor cannot stand for two learning rates
        self.spec(**_plain(given))
        params = params.named_parameters() if isinstance(params, nn.Module) else params
        super().__init__(params, {"rule": self.rule, **given, "maximize": maximize})
        self._router.check_used()
        if unused := set(self._split) - self._split_used:
            raise ValueError(f"{self._owner}: split pattern {listed(unused)} matches no parameter name")

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def _forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self._lanes: list[Lane] | None = None
        self._specs: list[tuple[Any, Spec | None]] = []

    # ---- groups --------------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Parameters that are not for this rule form a group of their own, with the settings of `otherwise`."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        params = param_group["params"]
        if isinstance(params, (set, torch.Tensor)) or "rule" in param_group:
            return self._add({**param_group, "params": [params] if isinstance(params, torch.Tensor) else params})
        own: list[Any] = []
        other: list[Any] = []
        spec = self.spec(**_plain({name: param_group.get(name, self.defaults[name]) for name in self.spec.fields}))
        for entry in params:
            name, tensor = entry if isinstance(entry, tuple) else (None, entry)
            why = self._router.to_otherwise(name, tensor, spec) if isinstance(tensor, torch.Tensor) else None
            (own if why is None else other).append(entry)
            self._why[id(tensor)] = why or ""
        if own or not other:
            self._add({**param_group, "params": own})
        if other:
            kept = {k: v for k, v in param_group.items() if k not in self.spec.fields and k != "params"}
            self._add({**self._other, **kept, "params": other})
        return None

    def _add(self, group: dict[str, Any]) -> None:
        rule = group.get("rule", self.rule)
        mine, self.defaults = self.defaults, self._defaults_of(rule)
        try:
            self._spec_of({**self.defaults, **group})
            super().add_param_group(group)
        finally:
            self.defaults = mine
        added = self.param_groups[-1]
        try:
            spec = self._spec_of(added)
            for name, param in zip(added.get("param_names") or [None] * len(added["params"]), added["params"], strict=True):
                self._check_param(name, param)
                furnish(self.state[param], rule, spec, param, self._batch(name, param))
        except BaseException:
            self.param_groups.pop()
            raise
        self._forget()

    def _defaults_of(self, rule: str) -> dict[str, Any]:
        if rule not in self._rules:
            raise ValueError(f"{self._owner}: a group is for rule {rule!r}; known are {', '.join(map(repr, self._rules))}")
        return self.defaults if rule == self.rule else self._other

    def _check_param(self, name: str | None, param: torch.Tensor) -> None:
        what = f"{self._owner}: parameter {name!r}" if name else f"{self._owner}: a parameter of shape {tuple(param.shape)}"
        if param.device.type == "meta":
            raise ValueError(
                f"{what} is on the meta device; materialise the model (model.to_empty(device=…)) before the optimizer"
            )
        if param.dtype not in ARITHMETIC:
            hint = "; optimize torch.view_as_real of it" if param.is_complex() else ""
            raise ValueError(f"{what} has dtype {param.dtype}; float32, float64, bfloat16 and float16 can be stepped{hint}")

    def _batch(self, name: str | None, param: torch.Tensor) -> int:
        """Into how many matrices a parameter is split."""
        pattern, count = first_match(self._split, name) or (None, 1)
        if pattern is not None:
            self._split_used.add(pattern)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{self._owner}: split of {name!r} must be an integer >= 1, got {count!r}")
        inner_shape(tuple(param.shape), count)
        return count

    def _spec_of(self, group: Mapping[str, Any]) -> Spec:
        kind = self._rules[group["rule"]]
        return kind(**_plain({name: group[name] for name in kind.fields}))

    # ---- stepping ------------------------------------------------------------------------------------------------------
    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. Everything is checked before anything is written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step(None)
        return loss

    def _step(self, only: torch.Tensor | None) -> None:
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and float(found):
            return
        specs = self._current_specs()
        work = []
        for lane in self._ready():
            chosen = [
                i for i, seat in enumerate(lane.seats) if seat.param.grad is not None and (only is None or seat.param is only)
            ]
            if chosen:
                work.append((lane, chosen, [self._checked_grad(lane.seats[i]) for i in chosen]))
        if not self._passes(grad for _, _, grads in work for grad in grads):
            return
        structures = [spec.structure() for spec in specs]
        for lane, chosen, grads in work:
            lane.step(chosen, specs, structures, grads, lane.sign if scale is None else lane.sign / float(scale))
            seats = [lane.seats[i] for i in chosen]
            torch._foreach_add_([seat.state["step"] for seat in seats], 1.0)
            for seat in seats:
                for counter, value in seat.records[0].counters.items():
                    seat.state[counter].fill_(value)

    def _checked_grad(self, seat: Seat) -> torch.Tensor:
        grad: Any = seat.param.grad
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._owner}: {seat.records[0].name} has a sparse gradient; dense ones are needed (sparse=False)"
            )
        if grad.device != seat.param.device:
            raise RuntimeError(f"{self._owner}: {seat.records[0].name} is on {seat.param.device}, its gradient on {grad.device}")
        return grad.detach()

    def _passes(self, grads: Iterable[torch.Tensor]) -> bool:
        if self.nonfinite == "propagate" or all(bool(torch.isfinite(grad).all()) for grad in grads):
            return True
        if self.nonfinite == "raise":
            raise ValueError(f"{self._owner}: a gradient is not finite; nothing was stepped")
        self.skipped += 1
        return False

    def _current_specs(self) -> list[Spec]:
        """The spec of every group as it is now; made anew where a value changed, which checks it."""
        if len(self._specs) != len(self.param_groups):
            self._forget()
            self._specs = [(None, None)] * len(self.param_groups)
        for i, group in enumerate(self.param_groups):
            values = [group[name] for name in self._rules[group["rule"]].fields]
            before, spec = self._specs[i]
            if spec is None or any(isinstance(value, torch.Tensor) for value in values) or values != before:
                now = self._spec_of(group)
                if spec is not None and now.structure() != spec.structure():
                    self._lanes = None  # its state may need more
                self._specs[i] = (values, now)
        return [spec for _, spec in self._specs if spec is not None]

    def _ready(self) -> list[Lane]:
        if self._lanes is None:
            self._lanes = self._make_lanes()
        for lane in self._lanes:
            for seat in lane.seats:
                if seat.param.device != lane.device:
                    raise RuntimeError(
                        f"{self._owner}: {seat.records[0].name} has moved to {seat.param.device}, its state is on {lane.device}; "
                        "move the model before making the optimizer, or load its state_dict into a new one"
                    )
        return self._lanes

    def _make_lanes(self) -> list[Lane]:
        lanes: dict[Any, Lane] = {}
        for index, group in enumerate(self.param_groups):
            rule, spec = group["rule"], self._spec_of(group)
            names = group.get("param_names") or [f"shape {tuple(p.shape)}" for p in group["params"]]
            for name, param in zip(names, group["params"], strict=True):
                dtype = ARITHMETIC[param.dtype]
                key = (param.device, dtype, group["maximize"])
                if key not in lanes:
                    engine, why = choose(self.engine, param.device, dtype)
                    make = CpuLane if engine.name == "cpu" else TorchLane
                    lanes[key] = make(engine, why, param.device, -1.0 if group["maximize"] else 1.0)
                furnish(self.state[param], rule, spec, param, int(self.state[param].get("batch", 1)))
                lanes[key].seats.append(self._seat(lanes[key], rule, spec, param, name, index))
        return list(lanes.values())

    def _seat(self, lane: Lane, rule: str, spec: Spec, param: torch.Tensor, name: str, group: int) -> Seat:
        state = self.state[param]
        batch = int(state.get("batch", 1))
        seat = Seat(param, state, name, group, batch)
        for i, record in enumerate(seat.records):
            record.slots = spec.slots(record.shape)
            record.t = int(state["step"])
            record.counters = {counter: state[counter].item() for counter in spec.counters()}
            for slot, expected in record.slots.items():
                pieces = state[outside(rule, slot)].reshape(batch, *expected.shape)
                record.state[slot] = lane.view(pieces[i])
        return seat

    # ---- state dicts -----------------------------------------------------------------------------------------------------
    @torch.compiler.disable
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over state and groups, ours or torch.optim's, by value and in the precision they were saved in."""

        def box(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            def boxed(state: Any) -> Any:
                return {k: Boxed(v) if torch.is_tensor(v) else v for k, v in state.items()} if isinstance(state, dict) else state

            return {**loaded, "state": {key: boxed(state) for key, state in loaded["state"].items()}}

        handle = self.register_load_state_dict_pre_hook(box)  # the last one: it sees what the user's hooks made of it
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_lanes", "_specs", "_router", "_why")
        mine = {k: v for k, v in self.__dict__.items() if k not in derived and not k.startswith("_optimizer_")}
        return {**mine, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" not in state:  # from load_state_dict: check it all before anything of ours changes
            groups = [self._completed(group) for group in state["param_groups"]]
            state = {"param_groups": groups, "state": self._loaded(groups, state["state"])}
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch's addition; a step here cannot be differentiated
        self._forget()
        self.__dict__.setdefault("_router", Router(self._owner, None, bool(self._other), {}))
        self.__dict__.setdefault("_why", {})

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """A saved group with every setting there is: it may be torch.optim's, or of an older version."""
        rule = group.get("rule", self.rule)
        done = {**self._defaults_of(rule), **translated(rule, group), "rule": rule}
        self._spec_of(done)
        return done

    def _loaded(self, groups: list[dict[str, Any]], saved: Mapping[Any, Any]) -> Any:
        state = type(self.state)(dict)
        state.update({k: v for k, v in saved.items() if not isinstance(k, torch.Tensor)})
        for group in groups:
            spec = self._spec_of(group)
            names = group.get("param_names") or [f"shape {tuple(p.shape)}" for p in group["params"]]
            for name, param in zip(names, group["params"], strict=True):
                given = {k: v.tensor if isinstance(v, Boxed) else v for k, v in (saved.get(param) or {}).items()}
                batch = int(given.get("batch", self.state[param].get("batch", 1)))
                state[param] = taken_over(self._owner, group["rule"], spec, param, batch, given, name)
        return state

    # ---- reports ---------------------------------------------------------------------------------------------------------
    def engine_report(self) -> dict[str, str]:
        """Which engine steps what, and why: {"12 parameters on cpu, float32 arithmetic": "cpu: … (why)"}."""
        out = {}
        for lane in self._ready():
            first = lane.seats[0]
            arithmetic = str(ARITHMETIC[first.param.dtype]).removeprefix("torch.")
            spec = self._spec_of(self.param_groups[first.records[0].group])
            key = (
                f"{len(lane.seats)} parameters on {lane.device}, {arithmetic} arithmetic{', maximized' if lane.sign < 0 else ''}"
            )
            out[key] = f"{lane.engine.live(spec)} ({lane.why})"
        return out

    def routing_report(self) -> str:
        """A table: parameter, shape, rule, why."""
        rows = []
        for group in self.param_groups:
            names = group.get("param_names") or ["(unnamed)"] * len(group["params"])
            for name, param in zip(names, group["params"], strict=True):
                rows.append((name, tuple(param.shape), group["rule"], self._why.get(id(param), "")))
        return report(rows)

    # ---- gradient release ------------------------------------------------------------------------------------------------
    def attach(self, model: nn.Module | Iterable[torch.Tensor]) -> Callable[[], None]:
        """Step each parameter as soon as its gradient is complete, and free the gradient. Gives a function that undoes it."""
        params: list[Any] = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
        known = {p for group in self.param_groups for p in group["params"]}
        if strangers := [p for p in params if p.requires_grad and p not in known]:
            raise ValueError(f"{self._owner}: {len(strangers)} parameters of the model are not in this optimizer")

        def release(param: torch.Tensor) -> None:
            with torch.no_grad():
                self._step(param)
            param.grad = None

        handles = [p.register_post_accumulate_grad_hook(release) for p in params if p.requires_grad]

        def detach() -> None:
            for handle in handles:
                handle.remove()

        return detach


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"a hyperparameter given as a tensor must have one element, got shape {tuple(value.shape)}")
        return value.item()
    return value


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters with one-element tensors read."""
    return {k: tuple(map(_number, v)) if isinstance(v, (tuple, list)) else _number(v) for k, v in values.items()}
