"""Every optimizer as a torch.optim.Optimizer, from its spec.

`param_groups` and `state` are torch's own and hold the truth; everything else is derived from them when it is needed, and dropped
whenever they are replaced. What a step does is in `step`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from .. import guard
from ..numpy.optimizer import NONFINITE, NamedOptimizer
from ..registry import known
from ..routing import Choice, Router, first_match, quote, report
from ..spec import Spec
from ..stats import Row, Stats, summarize_stats
from .calls import LOCKED, eager, exclusive
from .collect import list_placements
from .engines import check_engine
from .eval_mode import is_evaluating, start_evaluating, stop_evaluating
from .foreign_reader import layout_of, settings_of, state_of, unwrap_state
from .groups import GroupSpecs, name_params, pair_with_names, read_number, spec_of, view_groups
from .model_hints import find_kinds, has_heads, splits_of
from .params import (
    admit,
    check_param,
    current_split,
    describe_split,
    home_of,
    is_dormant,
    parse_offload,
    parse_splits,
    saved_split,
    wanted_split,
)
from .placements.local import ARITHMETIC, Placement
from .policy import resume_guard
from .replaced_params import carry_state_over, list_params, pair_replaced
from .state import as_tensor, export_state, is_frozen, kept_slots, names_of, piece_shape, shapes_in_state
from .state_dict import begin_state, check_outline, order_by_name, refuse_codes, state_type_error, torch_settings
from .step import take_step


@dataclasses.dataclass
class Boxed:
    """Carries a state past torch's loader, which would cast its tensors to the parameter's dtype and take strings to pieces."""

    value: Any


class RuleOptimizer(torch.optim.Optimizer):
    """Base of all optimizers. A group's "rule" says which rule steps it: this class's own, `otherwise`'s, or one of `route`'s."""

    spec: ClassVar[type[Spec]]
    rule: ClassVar[str]
    _specs: GroupSpecs
    _guard: guard.Guard | None
    _lock: Any  # one thread is in here at a time; copies have their own. No default: wrappers that forward (Lightning) find it
    _comm: Any = None  # whose ranks share out matrices that all of them have; None: each rank steps its own
    _agreement = contextlib.ExitStack()  # of ranks, while a state dict is checked
    _homes: Any = None  # where parameters that are spread over ranks keep their state (`placements.homes`)
    _gathering = False  # whether a rule reduces over all parameters
    _stats_requested = False  # whether the next step is to say what it does
    _rows: Sequence[Row] = ()  # what the last did that was asked

    def __new__(cls, *_: Any, **__: Any) -> Self:
        new = super().__new__(cls)
        new._lock, new._specs = threading.RLock(), GroupSpecs()
        LOCKED.add(new)
        return new

    def __init__(
        self,
        params: Any,
        hyperparameters: Mapping[str, Any],
        *,
        maximize: bool = False,
        engine: str = "auto",
        nonfinite: str = "propagate",
        skip_above: float | None = None,
        capturable: bool = False,
        amp_scaling: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
        otherwise: NamedOptimizer | None = None,
        route: Any = None,
        split: Mapping[str, int | Sequence[int]] | None = None,
        heads: bool | Mapping[str, int] = False,
        offload: str | Mapping[str, str | None] | None = None,
        process_group: Any = None,
        beside: Mapping[str, Any] | None = None,
    ):
        """beside: settings of a group, not of the rule. The others: `rlx_optim.documentation.TORCH`."""
        if nonfinite not in NONFINITE:
            raise ValueError(f"{self._owner}: nonfinite must be one of {', '.join(map(repr, NONFINITE))}, got {nonfinite!r}")
        check_engine(engine)
        for switch, on in (("capturable", capturable), ("amp_scaling", amp_scaling)):
            if not isinstance(on, bool):
                raise TypeError(f"{self._owner}: {switch} must be True or False, got {on!r}")
        if fused and foreach:
            raise RuntimeError(f"{self._owner}: fused and foreach cannot be True together")  # torch's own words and type
        if differentiable:
            raise ValueError(
                f"{self._owner}: differentiable=True is not done here: autograd does not record a step; use torch.optim"
            )
        self._ignored = " and ".join(name for name, on in (("fused", fused), ("foreach", foreach)) if on is not None)
        self._step_supports_amp_scaling = amp_scaling  # GradScaler's and Lightning's name for it
        self.engine, self.nonfinite, self.capturable, self.skipped = engine, nonfinite, capturable, 0
        self.skip_above, self._guard = guard.check_sigmas(self._owner, skip_above), None
        self._split, self._split_used = parse_splits(self._owner, split, heads), set[str]()
        self._offload, self._hosted, self._offload_used = parse_offload(self._owner, offload), set[torch.Tensor](), set[str]()
        if self._offload and capturable:
            raise ValueError(
                f"{self._owner}: offload={offload!r} has state on the host, where no CUDA graph reaches; not with capturable=True"
            )
        read = self.spec.matrix and (split is None or heads is True)
        self._known_split = splits_of(params, heads is True) if read else {}
        if heads is True and not (self._known_split and has_heads(params)):
            raise ValueError(
                f"{self._owner}: heads=True asks a model's config (of transformers) or its nn.MultiheadAttention how many there "
                'are, and there is none that says it; say heads={"*.q_proj.weight": 32}'
            )
        self._rules: dict[str, type[Spec]] = {self.rule: self.spec}
        self._others: dict[str, dict[str, Any]] = {}  # by rule, beside the class's own: the settings it was given first
        self._maximize = maximize
        other = None if otherwise is None else self._choice(otherwise, "otherwise")
        self._router = Router(self._owner, other, route, self._choice)
        self._kinds = find_kinds(params) if isinstance(params, nn.Module) else {}
        if process_group is None and not self._offload and isinstance(params, nn.parallel.DistributedDataParallel):
            process_group = params.process_group
        if process_group is not None:
            from .placements.comm import Comm

            self._comm = Comm(process_group)
        self._consolidated: tuple[Any, Any] = (None, None)
        self._forget()
        self._listed: list[list[torch.Tensor]] = []  # the parameters of each group, as state was last in line with them
        self._why: dict[torch.Tensor, str] = {}
        given = {name: hyperparameters.get(name, field.default) for name, field in self.spec.fields.items()}
        if otherwise is not None:
            given["lr"] = read_number("lr", given["lr"])  # one tensor cannot stand for two learning rates
        spec_of(self, {"rule": self.rule, **given})
        params = params.named_parameters() if isinstance(params, nn.Module) else params
        self._router.warned = True  # not before everything is admitted
        super().__init__(params, {"rule": self.rule, **given, "maximize": maximize, **(beside or {})})
        self._router.warned = False
        self._router.warn(3)
        self._router.check_used()
        if unused := set(self._split) - self._split_used:
            raise ValueError(f"{self._owner}: split pattern {quote(unused)} matches no parameter name")
        if isinstance(offload, Mapping) and (unused := set(self._offload) - self._offload_used):
            raise ValueError(f"{self._owner}: offload pattern {quote(unused)} matches no parameter name")

    def _choice(self, given: Any, what: str = "route's optimizer") -> Choice:
        """A further rule. Only its settings are taken over: what it has beside them must not be lost silently."""
        if not isinstance(given, NamedOptimizer):
            raise TypeError(f"{self._owner}: {what} must be like rlx_optim.AdamW(lr=3e-4), got {given!r}")
        settings, fields = given._settings, given.spec.fields
        if scheduled := [k for k, v in settings.given.items() if callable(v) and "Callable" not in fields[k].annotation]:
            raise ValueError(f"{self._owner}: {what} has a schedule for {quote(scheduled)}; use torch's schedulers")
        if settings.groups:
            raise ValueError(
                f"{self._owner}: {what} has groups of its own; group the parameters, as for any torch optimizer: "
                '[{"params": …, "weight_decay": 0.0}, …]; what a group says holds for all rules'
            )
        if what == "otherwise" and not given.spec.accepts_any_shape:
            raise ValueError(f"{self._owner}: otherwise must take every tensor itself, as rlx_optim.AdamW does, got {given!r}")
        if given.otherwise is not None:
            raise ValueError(f"{self._owner}: {what} must take every tensor itself; give {type(given).__name__} otherwise=None")
        rule = given.spec.name
        settings_of_rule = {"rule": rule, **given.hyperparameters(), "maximize": self._maximize}
        self._rules[rule] = given.spec
        self._others.setdefault(rule, settings_of_rule)
        return Choice(spec_of(self, settings_of_rule), settings_of_rule)

    @property
    def _owner(self) -> str:
        return type(self).__name__

    @property
    def skipped(self) -> int:
        """How many steps were left out by nonfinite="skip" or skip_above."""
        return self._skipped + (0 if self._skips is None else int(self._skips))

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped: int = count
        self._skips: torch.Tensor | None = None  # steps skipped by a decision on the device

    # ---- groups --------------------------------------------------------------------------------------------------------
    @exclusive
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Parameters that are for another rule form a group of their own, with that one's settings (`otherwise`'s,
        `route`'s) but for those that the group itself says."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        self._refresh()
        param_group = pair_with_names(self._owner, param_group)
        params = param_group["params"]
        if isinstance(params, (set, torch.Tensor)) or "rule" in param_group:
            return self._add_all([{**param_group, "params": [params] if isinstance(params, torch.Tensor) else params}])
        own = Choice(spec_of(self, {**self.defaults, **param_group}), {})
        shares: list[tuple[dict[str, Any], list[Any]]] = [(own.rule, [])]  # settings that differ from the group's, and for whom
        for entry in params:
            name, tensor = entry if isinstance(entry, tuple) else (None, entry)
            if not isinstance(tensor, torch.Tensor):
                shares[0][1].append(entry)  # torch says what is wrong with it
                continue
            piece = piece_shape(tensor, wanted_split(self, name, tensor))
            choice, why = self._router.decide(own, name, piece, tensor, self._kinds.get(tensor))
            if not choice.spec.matrix and choice.spec.takes(tuple(tensor.shape)) is None:
                self._known_split.pop(tensor, None)  # matrix rules alone ask a model: others measure, and save, the whole
            self._why[tensor] = why
            if (share := next((each for each in shares if each[0] == choice.rule), None)) is None:
                shares.append(share := (choice.rule, []))
            share[1].append(entry)
        (_, own_params), *rest = shares
        groups = [{**param_group, "params": own_params}] if own_params or not rest else []
        groups += [{**rule, **self._kept(param_group, rule["rule"], others), "params": others} for rule, others in rest]
        self._add_all(groups)
        self._router.warn(2)

    def _kept(self, group: Mapping[str, Any], rule: str, entries: list[Any]) -> dict[str, Any]:
        """What a group says that holds too for those of its parameters that go to another rule."""
        known_fields = self._rules[rule].fields.keys() - (
            {"convention"} if rule != self.rule else ()
        )  # each rule has its own words
        lost = [k for k in group if k in self.spec.fields and k not in known_fields]
        if lost:
            named = [entry[0] if isinstance(entry, tuple) else f"shape {tuple(entry.shape)}" for entry in entries]
            warnings.warn(
                f"{self._owner}: group {len(self.param_groups)} sets {quote(lost)}, which {rule} does not have, "
                f"and {quote(named)} of it go there; put them into a group without it",
                stacklevel=3,
            )
        kept = {k: v for k, v in group.items() if k != "params" and k not in lost}
        if "lr" in kept:
            kept["lr"] = read_number("lr", kept["lr"])  # one tensor cannot stand for two learning rates
        return kept

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
        self._listed = list_params(self.param_groups)
        self._specs.update(self)

    def _add(self, group: dict[str, Any]) -> None:
        rule = group.get("rule", self.rule)
        own_defaults, self.defaults = self.defaults, self._defaults_of(rule)
        try:
            spec_of(self, {**self.defaults, **group})
            super().add_param_group(group)
        except ValueError as problem:
            if "names" not in str(problem):
                raise
            if not self.param_groups:
                raise ValueError(f"{self._owner}: some parameters have names and some have none; name all, or none") from None
            how = "pairs of name and parameter" if "param_names" in self.param_groups[0] else "parameters without names"
            raise ValueError(f"{self._owner}: the other groups have {how}; give such here too ({problem})") from None
        finally:
            self.defaults = own_defaults
        added = self.param_groups[-1]
        spec = spec_of(self, added)
        entries = list(zip(added.get("param_names") or [None] * len(added["params"]), added["params"], strict=True))
        for name, param in entries:
            pattern, where = first_match(self._offload, name or "") or ("", None)
            self._offload_used.add(pattern)
            self._hosted |= set() if where is None else {param}
            wanted_split(self, name, param)  # a pattern for frozen parameters alone has its use when they are trained
        admit(self, entries, spec, added)

    def _refresh(self) -> None:
        """Bring state in line with the groups: it follows parameters that were replaced, and thawed ones get theirs."""
        if pairs := pair_replaced(self._listed, self.param_groups):
            carry_state_over(self, pairs)
        self._listed = list_params(self.param_groups)
        for index, group in enumerate(self.param_groups):
            if not all(self.state.get(param) or is_frozen(param) for param in group["params"]):
                spec = self._specs.at(index) or spec_of(self, group)
                admit(self, list(name_params(group, index)), spec, group)

    def _forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self._placements: list[Placement] | None = None
        self._layout: list[list[torch.Tensor]] = []  # the parameters of each group when the placements were made
        self._places: dict[torch.Tensor, tuple[Placement, int]] = {}
        self._repeated: dict[torch.Tensor, int] = {}  # parameters that groups list more than once, and how often
        self._dormant: list[torch.Tensor] = []  # frozen parameters without state, when the placements were made
        self._consensus: Any = None  # of the ranks that must agree before a step (`placements.consensus`)
        self._evaluating: bool | None = None  # whether parameters are where to evaluate; None: ask the state
        self._specs.clear()

    def _defaults_of(self, rule: str, whose: str = "a group") -> dict[str, Any]:
        if not isinstance(rule, str) or rule not in self._rules:
            other = known().get(rule) if isinstance(rule, str) else None
            hint = "it is misspelt or damaged, or of a package that is not installed"
            if other:
                hint = f"make this one as that one was made: as rlx_optim.torch.{other.title}, or with route="
            raise ValueError(f"{self._owner}: {whose} is for rule {rule!r}; known are {quote(self._rules)}; {hint}")
        return self.defaults if rule == self.rule else self._others[rule]

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

    @exclusive
    def attach(self, model: nn.Module | Iterable[torch.Tensor]) -> Callable[[], None]:
        """Step each parameter as soon as its gradient is complete, and free the gradient. Gives a function that undoes it."""
        params: list[Any] = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
        known = {p for group in self.param_groups for p in group["params"]}
        if strangers := [p for p in params if p.requires_grad and p not in known]:
            raise ValueError(f"{self._owner}: {len(strangers)} parameters of the model are not in this optimizer")
        list_placements(self)
        together = "here ranks step them together (whole matrices, whole tensors' norms, or nonfinite)"
        if reason := "its rule reduces over all" if self._gathering else together if self._consensus is not None else "":
            raise ValueError(f"{self._owner}: attach steps parameters one by one, but {reason}; call step() instead")

        def release(param: torch.Tensor) -> None:
            with torch.no_grad(), self._lock:  # autograd calls it on a thread a device
                self._step(param)
            param.grad = None

        handles = [p.register_post_accumulate_grad_hook(release) for p in params if p.requires_grad]

        def detach() -> None:
            for handle in handles:
                handle.remove()

        return detach

    # ---- where to evaluate -----------------------------------------------------------------------------------------------
    @eager
    @exclusive
    def eval(self) -> None:
        """Put the parameters where the model is to be evaluated, until `train()`: those of Schedule-Free at their average x.
        What they were is kept in the state, so that the way back is exact and a checkpoint has both. Others stay as they are."""
        self._refresh()
        start_evaluating(self)

    @eager
    @exclusive
    def train(self) -> None:
        """Put the parameters back where gradients are taken, after `eval()`."""
        self._refresh()
        stop_evaluating(self)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """`with opt.averaged():` has the parameters where the model is to be evaluated, and puts them back."""
        before = is_evaluating(self)
        self.eval()
        try:
            yield
        finally:
            if not before:
                self.train()

    # ---- state dicts -----------------------------------------------------------------------------------------------------
    @eager
    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """torch's, and in each group what torch.optim calls its settings, so that it can load them.

        Where matrices of DTensors have owners, every rank must call it; their state is then given as DTensors.
        """

        def complete(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            if is_evaluating(self):  # train() takes out of the state what was saved here
                saved["state"] = {key: copy.copy(state) for key, state in saved["state"].items()}
            for group in saved["param_groups"]:
                group.update(torch_settings(self._rules[group.get("rule", self.rule)], group))
                states = saved["state"]
                states |= {key: export_state(group, states[key]) for key in group["params"] if key in states}
            return saved if self._guard is None else {**saved, "skip_window": self._guard.values()}

        self._refresh()
        kept, handle = self.state, self.register_state_dict_post_hook(complete, prepend=True)  # the user's hooks see all of it
        try:
            self.state = self._for_all(kept)
            return super().state_dict()
        finally:
            self.state = kept
            handle.remove()

    @exclusive
    def consolidate_state_dict(self) -> None:
        """Bring together what owners hold of a DDP model's state, so that `state_dict()` may be called, on whichever rank.

        Every rank must call it. It holds until the next step. Only for `Muon(ddp_model)` and its like, or with process_group=…
        """
        from .placements.homes import export_owned

        self._refresh()
        owned = [entry for entry in self._owned() if entry[1].layout is None]
        self._consolidated = self._stamp(), export_owned(self.state, owned)

    def _stamp(self) -> list[float]:
        """Moves with every step."""
        states = [self.state.get(param) for group in self.param_groups for param in group["params"]]
        return [float(state["step"]) for state in states if state]

    def _owned(self) -> list[Any]:
        """(parameter, home, shapes of its state by name) of what has one owner."""
        from .placements.homes import Owned

        found = []
        for group in self.param_groups:
            spec = spec_of(self, group)
            for name, param in name_params(group):
                if not self.state.get(param):
                    continue
                split = current_split(self, name, param)
                home = home_of(self, name, param, spec, split)
                if isinstance(home, Owned):
                    found.append((param, home, shapes_in_state(spec, param, split)))
        return found

    def _for_all(self, state: Any) -> Any:
        """The state as every rank may have it: what owners hold is spread out."""
        if self._homes is None:
            return state
        from .placements.homes import export_owned

        owned = self._owned()
        if any(home.layout is None for _, home, _ in owned):
            stamp, state = self._consolidated
            if stamp != self._stamp():
                raise RuntimeError(
                    f"{self._owner}: the state is shared out among ranks; call consolidate_state_dict() on every rank first "
                    "(or save(path), which does it by itself)"
                )
        return export_owned(state, [entry for entry in owned if entry[1].layout is not None])

    @eager
    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over state and groups, ours or torch.optim's, by value and in the precision they were saved in. By place, as torch
        does; where both sides have the same names in another order, by name."""

        def box(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            check_outline(self._owner, loaded)
            if problem := guard.window_error(given := loaded.get("skip_window", {})):
                raise ValueError(f"{self._owner}: 'skip_window' of the state dict: {problem}")
            window.update(given)
            groups = loaded["param_groups"]
            if len(groups) == len(self.param_groups):
                groups = [order_by_name(*pair) for pair in zip(self.param_groups, groups, strict=True)]
            boxes = {key: Boxed(unwrap_state(state)) for key, state in loaded["state"].items()}
            return {**loaded, "state": boxes, "param_groups": groups}

        self._refresh()
        window: dict[str, Any] = {}
        if not isinstance(state_dict, Mapping):  # before torch copies it
            check_outline(self._owner, state_dict)
        handle = self.register_load_state_dict_pre_hook(box)  # the last one: it sees what the user's hooks made of it
        try:
            with contextlib.ExitStack() as self._agreement:  # it ends before ranks exchange state
                self._agreement.enter_context(self._agreed("the state dict was refused"))
                super().load_state_dict(state_dict)
        finally:
            handle.remove()
        resume_guard(self, window)

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        self._refresh()  # what was replaced is not told of to the copy
        derived = {"_rows", "_placements", "_layout", "_places", "_specs", "_consensus", "_consolidated", "_listed", "_dormant"}
        derived |= {"_evaluating", "_lock", "_stats_requested", "_agreement"}
        kept = {k: v for k, v in self.__dict__.items() if k not in derived and not k.startswith("_optimizer_")}
        wrapped = {k for k in kept if callable(getattr(type(self), k, None))}  # a scheduler's wrapper of `step`
        return {k: v for k, v in kept.items() if k not in wrapped} | super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" not in state:  # from load_state_dict: check it all before anything of ours changes
            state = self._read_state_dict(state["param_groups"], {k: boxed.value for k, boxed in state["state"].items()})
        super().__setstate__(state)
        self._consolidated = (None, None)
        self.defaults.pop("differentiable", None)  # torch's addition; a step here cannot be differentiated
        self._forget()
        self._listed = list_params(self.param_groups)
        self._specs.update(self)

    def _read_state_dict(self, groups: list[dict[str, Any]], saved: dict[Any, Any]) -> dict[str, Any]:
        """Groups with every setting there is, and the state of their parameters. Both may be another library's, or of an older
        version."""
        completed, state, filling = [], type(self.state)(dict), list[Callable[[], None]]()
        state.update({k: v for k, v in saved.items() if not isinstance(k, torch.Tensor)})
        for index, (group, ours) in enumerate(zip(groups, self.param_groups, strict=True)):
            kind, states = self._rules[ours["rule"]], [saved.get(param) for param in group["params"]]
            states = [{} if given is None else given for given in states]
            beside = [name for name in ours if name not in kind.fields and name != "rule"]
            layout = layout_of(self._owner, kind, group, states, beside)
            rule = group.get("rule", ours["rule"])
            defaults = self._defaults_of(rule, f"group {index} of the checkpoint")
            given = {**group, "state_dtype": ours["state_dtype"]}
            completed.append({**defaults, **settings_of(self._owner, self._rules[rule], layout, given, ours), "rule": rule})
            spec, saved_format = spec_of(self, completed[-1]), group.get("state_dtype", "float32")
            for (name, param), given in zip(name_params(completed[-1], index), states, strict=True):  # type: ignore[assignment]
                if not isinstance(given, Mapping):
                    raise state_type_error(self._owner, name, given)
                if not given and is_frozen(param):
                    continue
                check_param(self, name, param, completed[-1])
                split = saved_split(self, name, param, given)
                home = home_of(self, name, param, spec, split)
                slots = list(names_of(spec, kept_slots(spec, param, split, home)).values())
                given = state_of(self._owner, spec, layout, group, given, slots, tuple(param.shape), name)
                if saved_format not in ("float32", spec.state_dtype):
                    refuse_codes(self._owner, spec, saved_format, param, split, given, name)
                state[param], finish = begin_state(self._owner, spec, param, split, given, name, home)
                filling.append(finish)
                if split != wanted_split(self, name, param):
                    state[param]["batch"] = split  # a whole one says so too, where it would be split
        self._agreement.close()
        for finish in filling:
            finish()
        return {"param_groups": completed, "state": state}

    # ---- checkpoints -----------------------------------------------------------------------------------------------------
    @exclusive
    def save(
        self, path: str | os.PathLike[str], every: int = 1, keep: int | None = None, *, allow_nan: bool = False
    ) -> Path | None:
        """Write everything to a file that every front end reads, by parameter name; see `rlx_optim.NamedOptimizer.save`.

        The iteration is the largest step count. The model's own parameters are not in it. Where parameters are spread over ranks,
        every rank must call it; one of them writes.
        """
        from .checkpoint import save

        self._refresh()
        return save(self, path, every, keep, allow_nan)

    @exclusive
    def load(self, path: str | os.PathLike[str], *, strict: bool = True, allow_nan: bool = False, **callables: Any) -> None:
        """Take over settings, routing and state from a file of any front end; a bad file changes nothing here.

        strict=False leaves alone the parameters that the file does not know, and what it knows beside them. What was a schedule
        in the file must be given as a number: load(path, lr=1e-3), otherwise={"lr": 3e-4}; torch's schedulers may then move it.
        Where parameters are spread over ranks, every rank must call it and takes its own part.
        """
        from .checkpoint import load_into

        self._refresh()
        load_into(self, path, strict, allow_nan, callables)

    def _agreed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block that all ranks leave, or all of them with an error."""
        if self._homes is None:
            return contextlib.nullcontext()
        from .placements.comm import chain_comms

        params = [param for group in self.param_groups for param in group["params"]]
        return chain_comms(params, self._homes.comm).raise_together(what, params[0].device)

    # ---- reports ---------------------------------------------------------------------------------------------------------
    @exclusive
    def stats(self, next: bool = False) -> Stats:
        """What the last step that was asked about did, in all and by parameter: `opt.stats(next=True)` asks about the next, which
        takes it in the same passes; the others measure nothing. Tensors on the device: nothing waits for them."""
        if not next and not self._rows:
            raise RuntimeError(f"{self._owner}: no step was asked about; call stats(next=True) before it")
        if next and any(placement.spread for placement in list_placements(self)):  # here: in a step the other ranks would wait
            raise RuntimeError(f"{self._owner}: stats is not for parameters that are spread over ranks")
        found, self._stats_requested = self._rows, self._stats_requested or next
        device = as_tensor(found[0][2]["grad_norm"]).device if found else None
        moved = [
            (name, size, {kind: as_tensor(value).to(device, non_blocking=True) for kind, value in each.items()})
            for name, size, each in found
        ]
        return summarize_stats(moved)

    @exclusive
    def engine_report(self) -> dict[str, str]:
        """Which engine steps what, and why: {"12 parameters on cpu, float32 arithmetic": "cpu: … (why)"}."""
        out = {}
        asked = self._ignored and f"; {self._ignored}= makes no difference, engine= does"
        for placement in list_placements(self):
            first = placement.entries[0]
            arithmetic = str(ARITHMETIC[first.param.dtype]).removeprefix("torch.")
            spec = spec_of(self, view_groups(self)[first.records[0].group])
            turned = ", maximized" if placement.sign < 0 else ""
            key = f"{len(placement.entries)} parameters on {placement.device}, {arithmetic} arithmetic{turned}"
            key += (placement.spread and f", {placement.spread}") + placement.words
            copies = f"; the last step took {placement.copied} of them through copies" if placement.copied else ""
            out[key] = f"{placement.engine.describe(spec)} ({placement.why}{asked}{copies})"
        if self._dormant:
            out[f"{len(self._dormant)} frozen parameters"] = "not stepped, no state until they are trained"
        return out

    @exclusive
    def routing_report(self) -> str:
        """A table: parameter, shape, rule, why."""
        self._refresh()
        rows = []
        for group in self.param_groups:
            names = group.get("param_names") or ["(unnamed)"] * len(group["params"])
            for name, param in zip(names, group["params"], strict=True):
                frozen = "frozen: no state until it is trained" if is_dormant(self, param) else ""
                how, why = describe_split(self, name, param), self._why.get(param, "")
                parts = (frozen, why) if how in why else (frozen, why, how)  # files of 0.2.0 have both in one
                why = "; ".join(filter(None, parts))
                rows.append((name, tuple(param.shape), self._rules[group["rule"]], why))
        return report(rows)
