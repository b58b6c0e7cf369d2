"""Every optimizer as a torch.optim.Optimizer, from its spec.

`param_groups` and `state` are torch's own and hold the truth; lanes (which parameter is stepped by which engine, in which
bundle) are made from them when needed and thrown away whenever groups or state are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..admission import listed
from ..optimizer import NONFINITE, NamedOptimizer
from ..routing import report
from ..spec import Spec
from .engines import check_engine, choose
from .lanes import ARITHMETIC, CpuLane, Lane, Seat, TorchLane, inner_shape
from .names import bare, foreign, outside, translated
from .routing import Router, first_match, reasons_from
from .state import furnish, piece_shape, settle, shape_in_state, taken_over


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
        beside: Mapping[str, Any] | None = None,
    ):
        """beside: settings of a group that are not the rule's."""
        if nonfinite not in NONFINITE:
            raise ValueError(f"{self._owner}: nonfinite must be one of {', '.join(map(repr, NONFINITE))}, got {nonfinite!r}")
        if otherwise is not None and not isinstance(otherwise, NamedOptimizer):
            raise TypeError(f"{self._owner}: otherwise must be like rlx_optim.AdamW(lr=3e-4), or None, got {otherwise!r}")
        check_engine(engine)
        self.engine, self.nonfinite, self.skipped = engine, nonfinite, 0
        self._split, self._split_used = dict(split or {}), set[str]()
        self._rules: dict[str, type[Spec]] = {self.rule: self.spec}
        self._other: dict[str, Any] = {}  # the settings of `otherwise`
        if otherwise is not None:
            self._refuse_more_than_settings(otherwise)
            name = type(otherwise).__name__.lower()
            self._rules[name] = otherwise.spec
            self._other = {"rule": name, **otherwise.hyperparameters(), "maximize": maximize}
        self._forget()
        known = reasons_from(params) if isinstance(params, nn.Module) else {}
        self._router = Router(self._owner, route, otherwise is not None, known)
        self._why: dict[torch.Tensor, str] = {}
        given = {name: hyperparameters.get(name, field.default) for name, field in self.spec.fields.items()}
        if otherwise is not None:
            given["lr"] = _number(given["lr"])  # one tensor cannot stand for two learning rates
        self.spec(**_plain(given))
        params = params.named_parameters() if isinstance(params, nn.Module) else params
        super().__init__(params, {"rule": self.rule, **given, "maximize": maximize, **(beside or {})})
        self._router.check_used()
        if unused := set(self._split) - self._split_used:
            raise ValueError(f"{self._owner}: split pattern {listed(unused)} matches no parameter name")

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def _refuse_more_than_settings(self, otherwise: NamedOptimizer) -> None:
        """Only the settings of `otherwise` are taken over: what it has beside them must not be lost silently."""
        given, fields = otherwise._settings.given, otherwise.spec.fields
        if scheduled := [k for k, v in given.items() if callable(v) and "Callable" not in fields[k].annotation]:
            raise ValueError(f"{self._owner}: otherwise has a schedule for {listed(scheduled)}; use torch's schedulers")
        if otherwise._settings.groups:
            raise ValueError(f"{self._owner}: otherwise has groups of its own; use param_groups")
        if otherwise.otherwise is not None or not otherwise.spec.everywhere:
            raise ValueError(
                f"{self._owner}: otherwise must take every tensor itself, as rlx_optim.AdamW does, got {otherwise!r}"
            )

    def _forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self._lanes: list[Lane] | None = None
        self._layout: list[int] = []  # the parameters when the lanes were made
        self._places: dict[torch.Tensor, tuple[Lane, int]] = {}
        self._specs: list[tuple[Any, Spec | None]] = []

    # ---- groups --------------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Parameters that are not for this rule form a group of their own, with the settings of `otherwise`."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        params = param_group["params"]
        if isinstance(params, (set, torch.Tensor)) or "rule" in param_group:
            return self._add_all([{**param_group, "params": [params] if isinstance(params, torch.Tensor) else params}])
        own: list[Any] = []
        other: list[Any] = []
        spec = self.spec(**_plain({name: param_group.get(name, self.defaults[name]) for name in self.spec.fields}))
        for entry in params:
            name, tensor = entry if isinstance(entry, tuple) else (None, entry)
            if not isinstance(tensor, torch.Tensor):
                own.append(entry)  # torch says what is wrong with it
                continue
            why = self._router.to_otherwise(name, tensor, spec, piece_shape(tensor, self._batch(name, tensor)))
            (own if why is None else other).append(entry)
            self._why[tensor] = why or ""
        kept = {k: v for k, v in param_group.items() if k not in self.spec.fields and k != "params"}
        groups = [{**param_group, "params": own}] if own or not other else []
        return self._add_all([*groups, {**self._other, **kept, "params": other}] if other else groups)

    def _add_all(self, groups: list[dict[str, Any]]) -> None:
        """Add groups, or none of them."""
        before = len(self.param_groups)
        try:
            for group in groups:
                self._add(group)
        except BaseException:
            for group in self.param_groups[before:]:
                for param in group["params"]:
                    self.state.pop(param, None)
            del self.param_groups[before:]
            raise
        self._forget()
        self._current_specs()

    def _add(self, group: dict[str, Any]) -> None:
        rule = group.get("rule", self.rule)
        mine, self.defaults = self.defaults, self._defaults_of(rule)
        try:
            self._spec_of({**self.defaults, **group})
            super().add_param_group(group)
        finally:
            self.defaults = mine
        added = self.param_groups[-1]
        spec = self._spec_of(added)
        for name, param in zip(added.get("param_names") or [None] * len(added["params"]), added["params"], strict=True):
            self._check_param(name, param)
            furnish(self.state[param], rule, spec, param, self._batch(name, param))

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
        if is_traceable_wrapper_subclass(param):  # it has no memory of its own
            raise ValueError(f"{what} is a {type(param).__name__}; plain tensors are needed, sharded ones cannot be stepped")
        if param.dtype not in ARITHMETIC:
            hint = "; optimize torch.view_as_real of it" if param.is_complex() else ""
            raise ValueError(f"{what} has dtype {param.dtype}; float32, float64, bfloat16 and float16 can be stepped{hint}")
        choose(self.engine, param.device, ARITHMETIC[param.dtype])  # refuses a device the engine cannot reach

    def _batch(self, name: str | None, param: torch.Tensor) -> int:
        """Into how many matrices a parameter is split."""
        pattern, count = first_match(self._split, name) or (None, 1)
        if pattern is not None:
            self._split_used.add(pattern)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{self._owner}: split of {name!r} must be an integer >= 1, got {count!r}")
        try:
            inner_shape(tuple(param.shape), count)
        except ValueError as problem:
            raise ValueError(f"{self._owner}: {name!r}: {problem}") from None
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
        for lane, chosen in self._ready(only):
            if chosen:
                work.append((lane, chosen, [self._checked_grad(lane, lane.seats[i]) for i in chosen]))
        if not self._passes(
            (lane.seats[i].param, grad) for lane, chosen, grads in work for i, grad in zip(chosen, grads, strict=True)
        ):
            return
        structures = [spec.structure() for spec in specs]
        for lane, chosen, grads in work:
            lane.step(chosen, specs, structures, grads, lane.sign if scale is None else lane.sign / float(scale))
            for i in chosen:
                lane.seats[i].count()

    def _checked_grad(self, lane: Lane, seat: Seat) -> torch.Tensor:
        self._check_seat(lane, seat)
        grad: Any = seat.param.grad
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._owner}: {seat.records[0].name} has a sparse gradient; dense ones are needed (sparse=False)"
            )
        if type(grad) is not torch.Tensor and is_traceable_wrapper_subclass(grad):
            raise RuntimeError(f"{self._owner}: the gradient of {seat.records[0].name} is a {type(grad).__name__}, not a tensor")
        if grad.shape != seat.shape or grad.device != lane.device:
            raise RuntimeError(
                f"{self._owner}: {seat.records[0].name} is on {lane.device} and of shape {tuple(seat.shape)}, "
                f"its gradient on {grad.device} and of shape {tuple(grad.shape)}"
            )
        return grad

    def _passes(self, arrived: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether the step may be taken, by what has arrived for which parameters."""
        if self.nonfinite == "propagate":
            return True
        bad = [param for param, array in arrived if not bool(torch.isfinite(array).all())]
        if not bad:
            return True
        if self.nonfinite == "raise":
            names = {param: name for group in self.param_groups for name, param in named(group)}
            raise ValueError(f"{self._owner}: gradient of {listed(names[p] for p in bad)} is not finite; nothing was stepped")
        self.skipped += 1
        return False

    def _current_specs(self) -> list[Spec]:
        """The spec of every group as it is now; made anew where a value changed, which checks it."""
        if len(self._specs) != len(self.param_groups):
            self._forget()
            self._specs = [(None, None)] * len(self.param_groups)
        for i, group in enumerate(self.param_groups):
            fields = self._rules[group["rule"]].fields
            values = [tuple(value) if type(value) is list else value for value in map(group.__getitem__, fields)]
            values.append(group["maximize"])
            before, spec = self._specs[i]
            if spec is None or any(isinstance(value, torch.Tensor) for value in values) or values != before:
                now = self._spec_of(group)
                if spec is not None and (now.structure() != spec.structure() or values[-1] != before[-1]):
                    self._refuse_reshaping(spec, now)
                    self._lanes = None  # its state may need more, or it goes to another lane
                self._specs[i] = (values, now)
        return [spec for _, spec in self._specs if spec is not None]

    def _refuse_reshaping(self, before: Spec, now: Spec) -> None:
        for name, field in before.fields.items():
            was, given = before.values()[name], now.values()[name]
            if field.fixed and given != was:
                raise ValueError(
                    f"{self._owner}: {name} shapes the state and cannot change in a group (is {was!r}, got {given!r}); "
                    "make a new optimizer"
                )

    def _ready(self, only: torch.Tensor | None = None) -> list[tuple[Lane, list[int]]]:
        """The lanes, with those of their seats that have a gradient. Groups and state are the truth: where they are no longer
        what the lanes were made from, lanes are made anew."""
        known = self._layout == self._laid_out() if only is None else only in self._places
        if self._lanes is None or not known:
            self._make_lanes()
        chosen = self._with_gradient(only)
        if not all(lane.seats[i].holds(self.state) for lane, which in chosen for i in which):
            self._make_lanes()
            chosen = self._with_gradient(only)
        return chosen

    def _laid_out(self) -> list[int]:
        return [identity for group in self.param_groups for identity in map(id, group["params"])]

    def _with_gradient(self, only: torch.Tensor | None) -> list[tuple[Lane, list[int]]]:
        if only is not None:
            lane, place = self._places[only]
            return [(lane, [place])]
        return [(lane, [i for i, seat in enumerate(lane.seats) if seat.param.grad is not None]) for lane in self._lanes or []]

    def _check_seat(self, lane: Lane, seat: Seat) -> None:
        """Refuse a parameter that is no longer what its state was made for."""
        param, name = seat.param, seat.records[0].name
        if param.shape == seat.shape and ARITHMETIC.get(param.dtype) is lane.dtype and param.device == lane.device:
            return
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

    def _make_lanes(self) -> None:
        lanes: dict[Any, Lane] = {}
        for index, group in enumerate(self.param_groups):
            rule, spec = group["rule"], self._spec_of(group)
            for name, param in named(group):
                self._check_param(name, param)
                dtype = ARITHMETIC[param.dtype]
                key = (param.device, dtype, group["maximize"])
                if key not in lanes:
                    engine, why = choose(self.engine, param.device, dtype)
                    make = CpuLane if engine.name == "cpu" else TorchLane
                    lanes[key] = make(engine, why, param.device, dtype, -1.0 if group["maximize"] else 1.0)
                furnish(self.state[param], rule, spec, param, int(self.state[param].get("batch", 1)))
                lanes[key].seats.append(self._seat(lanes[key], rule, spec, param, name, index))
        self._lanes, self._layout = list(lanes.values()), self._laid_out()
        self._places = {seat.param: (lane, i) for lane in self._lanes for i, seat in enumerate(lane.seats)}

    def _seat(self, lane: Lane, rule: str, spec: Spec, param: torch.Tensor, name: str, group: int) -> Seat:
        state = self.state[param]
        batch = int(state.get("batch", 1))
        settle(state, spec)
        seat = Seat(param, state, bare(name), group, batch, spec.counters())
        for i, record in enumerate(seat.records):
            record.slots = spec.slots(record.shape)
            record.t = int(state["step"])
            record.counters = {counter: float(state[counter]) for counter in spec.counters()}
            for slot, expected in record.slots.items():
                buffer, shape = state[outside(rule, slot)], shape_in_state(expected, param, batch)
                where = (buffer.shape, buffer.dtype, buffer.device)
                if where != (shape, lane.dtype, lane.device) or not buffer.is_contiguous():
                    raise RuntimeError(
                        f"{self._owner}: {outside(rule, slot)!r} of {name} must be contiguous, of shape {shape}, {lane.dtype} "
                        f"and on {lane.device}; it is of shape {tuple(buffer.shape)}, {buffer.dtype} and on {buffer.device}"
                    )
                record.state[slot] = lane.view(buffer.reshape(batch, *expected.shape)[i])
        return seat

    # ---- state dicts -----------------------------------------------------------------------------------------------------
    @torch.compiler.disable
    def state_dict(self) -> dict[str, Any]:
        """torch's, and in each group what torch.optim calls its settings, so that it can load them."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update(foreign(group.get("rule", self.rule), group))
        return saved

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
        derived = ("_lanes", "_layout", "_places", "_specs")
        mine = {k: v for k, v in self.__dict__.items() if k not in derived and not k.startswith("_optimizer_")}
        mine = {k: v for k, v in mine.items() if not hasattr(type(self), k)}  # a scheduler's wrapper around `step` is not ours
        return {**mine, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" not in state:  # from load_state_dict: check it all before anything of ours changes
            groups = [self._completed(group) for group in state["param_groups"]]
            state = {"param_groups": groups, "state": self._loaded(groups, state["state"])}
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch's addition; a step here cannot be differentiated
        self._forget()
        self._current_specs()

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """A saved group with every setting there is: it may be torch.optim's, or of an older version."""
        rule = group.get("rule", self.rule)
        done = {**self._defaults_of(rule), **translated(self._owner, rule, group), "rule": rule}
        self._spec_of(done)
        return done

    def _loaded(self, groups: list[dict[str, Any]], saved: Mapping[Any, Any]) -> Any:
        state = type(self.state)(dict)
        state.update({k: v for k, v in saved.items() if not isinstance(k, torch.Tensor)})
        for group in groups:
            spec = self._spec_of(group)
            for name, param in named(group):
                given = {k: v.tensor if isinstance(v, Boxed) else v for k, v in (saved.get(param) or {}).items()}
                batch = int(given.get("batch", self.state[param].get("batch", 1)))
                state[param] = taken_over(self._owner, group["rule"], spec, param, batch, given, name)
        return state

    # ---- checkpoints -----------------------------------------------------------------------------------------------------
    def save(
        self, path: str | os.PathLike[str], every: int = 1, keep: int | None = None, *, allow_nan: bool = False
    ) -> Path | None:
        """Write everything to a file that every front end reads, by parameter name; see `rlx_optim.NamedOptimizer.save`.

        The iteration is the largest step count. The model's own parameters are not in it.
        """
        from ..checkpoint import files
        from .checkpoint import snapshot_of

        steps = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        return files.save(lambda: snapshot_of(self), steps, path, every, keep, allow_nan)

    def load(self, path: str | os.PathLike[str], *, strict: bool = True, allow_nan: bool = False, **callables: Any) -> None:
        """Take over settings, routing and state from a file of any front end; a bad file changes nothing here.

        strict=False leaves alone the parameters that the file does not know, and what it knows beside them. What was a schedule
        in the file must be given as a number: load(path, lr=1e-3), otherwise={"lr": 3e-4}; torch's schedulers may then move it.
        """
        from .checkpoint import load_into

        load_into(self, path, strict, allow_nan, callables)

    # ---- reports ---------------------------------------------------------------------------------------------------------
    def engine_report(self) -> dict[str, str]:
        """Which engine steps what, and why: {"12 parameters on cpu, float32 arithmetic": "cpu: … (why)"}."""
        out = {}
        self._ready()
        for lane in self._lanes or []:
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
                rows.append((name, tuple(param.shape), group["rule"], self._why.get(param, "")))
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


def named(group: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A group's parameters with their names, or with what can be said of them."""
    names = group.get("param_names") or [f"shape {tuple(p.shape)}" for p in group["params"]]
    return zip(names, group["params"], strict=True)


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"a hyperparameter given as a tensor must have one element, got shape {tuple(value.shape)}")
        return value.item()
    return value


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters with one-element tensors read."""
    return {k: tuple(map(_number, v)) if isinstance(v, (tuple, list)) else _number(v) for k, v in values.items()}
