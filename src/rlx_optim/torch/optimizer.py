"""Every optimizer as a torch.optim.Optimizer, from its spec.

`param_groups` and `state` are torch's own and hold the truth; how they are stepped is in `stepping`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from .. import guard
from ..numpy.optimizer import NONFINITE, NamedOptimizer
from ..registry import known
from ..routing import Choice, Router, first_match, quote, report
from ..spec import Spec
from ..splits import WHOLE, Split, checked, described, shapes_of
from .collect import find_ready
from .engines import check_engine
from .eval_mode import eager, named
from .foreign_reader import layout_of, settings_of, state_of, unwrap_state
from .foreign_table import Origin
from .hyper import number
from .model_hints import has_heads, kinds_of, splits_of
from .placements.local import ARITHMETIC
from .replaced_params import list_params
from .state import (
    export_state,
    init_state,
    is_frozen,
    kept_slots,
    names_of,
    piece_shape,
    shapes_in_state,
    split_in,
)
from .state_dict import check_outline, load_state, order_by_name, refuse_codes, refuse_state, split_of, torch_settings
from .stepping import Stepper


class Boxed:
    """Carries a value past torch's loader, which would cast a tensor to the parameter's dtype and take a string to pieces."""

    def __init__(self, value: Any):
        self.value = value


def unboxed(state: Any) -> Any:
    """The state of a parameter, out of its boxes."""
    if isinstance(state, Boxed):
        return state.value
    return {k: v.value if isinstance(v, Boxed) else v for k, v in state.items()}


class RuleOptimizer(Stepper):
    """Base of all optimizers. A group's "rule" says which rule steps it: this class's own, `otherwise`'s, or one of `route`'s."""

    spec: ClassVar[type[Spec]]

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
        self._split, self._split_used = self._patterns(split, heads), set[str]()
        self._offload, self._hosted, self._offload_used = self._hosts(offload), set[torch.Tensor](), set[str]()
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
        self._kinds = kinds_of(params) if isinstance(params, nn.Module) else {}
        if process_group is None and not self._offload and isinstance(params, nn.parallel.DistributedDataParallel):
            process_group = params.process_group
        if process_group is not None:
            from .placements.comm import Comm

            self._comm = Comm(process_group)
        self._consolidated: tuple[Any, Any] = (None, None)
        self._forget()
        self._listed = []
        self._why: dict[torch.Tensor, str] = {}
        given = {name: hyperparameters.get(name, field.default) for name, field in self.spec.fields.items()}
        if otherwise is not None:
            given["lr"] = number("lr", given["lr"])  # one tensor cannot stand for two learning rates
        self._spec_of({"rule": self.rule, **given})
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

    def _hosts(self, offload: Any) -> dict[str, str | None]:
        """Whose state is on the host, by pattern."""
        if offload is None:
            return {}
        given = offload if isinstance(offload, Mapping) else {"*": offload}
        if any(value not in ("cpu", None) for value in given.values()):
            raise ValueError(
                f'{self._owner}: offload must be "cpu", or a dict such as {{"*embed*": "cpu"}} (None: beside the parameter), got '
                f"{offload!r}"
            )
        return dict(given)

    def _choose_home(self, name: str | None, param: torch.Tensor) -> None:
        """Whether the state of a parameter is on the host: as the first pattern says that matches."""
        pattern, where = first_match(self._offload, name or "") or ("", None)
        self._offload_used.add(pattern)
        if where is not None:
            self._hosted.add(param)

    def _patterns(self, split: Any, heads: Any) -> dict[str, Split]:
        """Splits by pattern, as the user says: of `split`, and of `heads`, which are equal parts."""
        for what, given in (("split", split), ("heads", heads)):
            if not isinstance(given, Mapping | None) and not (what == "heads" and isinstance(given, bool)):
                raise TypeError(f'{self._owner}: {what} must be a dict such as {{"*.qkv.weight": 3}}, got {given!r}')
        counted, found = heads if isinstance(heads, Mapping) else {}, dict[str, Split]()
        for pattern, given in {**(split or {}), **counted}.items():
            if pattern in counted and (not isinstance(given, int) or pattern in (split or {})):
                raise ValueError(
                    f"{self._owner}: heads of {pattern!r} must be their number, and not be in split too, got {given!r}"
                )
            try:
                found[pattern] = checked(given)
            except ValueError as problem:
                raise ValueError(f"{self._owner}: split of {pattern!r} must be {problem}, got {given!r}") from None
        return found

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
        return Choice(self._spec_of(settings_of_rule), settings_of_rule)

    # ---- groups --------------------------------------------------------------------------------------------------------
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
        own = Choice(self._spec_of({**self.defaults, **param_group}), {})
        shares: list[tuple[dict[str, Any], list[Any]]] = [(own.rule, [])]  # settings that differ from the group's, and for whom
        for entry in params:
            name, tensor = entry if isinstance(entry, tuple) else (None, entry)
            if not isinstance(tensor, torch.Tensor):
                shares[0][1].append(entry)  # torch says what is wrong with it
                continue
            piece = piece_shape(tensor, self._batch(name, tensor))
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
        )  # whose words are each rule's own
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
            kept["lr"] = number("lr", kept["lr"])  # one tensor cannot stand for two learning rates
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
        self._current_specs()

    def _add(self, group: dict[str, Any]) -> None:
        rule = group.get("rule", self.rule)
        own_defaults, self.defaults = self.defaults, self._defaults_of(rule)
        try:
            self._spec_of({**self.defaults, **group})
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
        spec = self._spec_of(added)
        entries = list(zip(added.get("param_names") or [None] * len(added["params"]), added["params"], strict=True))
        for name, param in entries:
            self._choose_home(name, param)
            self._batch(name, param)  # a pattern for frozen parameters alone has its use when they are trained
        self._admit(entries, spec, added)

    def _admit(self, entries: Iterable[tuple[str | None, torch.Tensor]], spec: Spec, group: Mapping[str, Any]) -> None:
        """Check parameters and make their state. Frozen ones are left alone until they are trained, whatever they are."""
        newcomers = [(name, param) for name, param in entries if not self.state.get(param) and not is_frozen(param)]
        for name, param in newcomers:
            self._check_param(name, param, group)
        self._share_out(newcomers, spec)
        for name, param in newcomers:
            batch = self._batch(name, param)
            init_state(self.state[param], spec, param, batch, self._home(name, param, spec, batch))

    def _share_out(self, entries: Sequence[tuple[str | None, torch.Tensor]], spec: Spec) -> None:
        """Give parameters that are spread over ranks their owners, all of a group at once so that the work is even."""
        if (homes := self._all_homes([param for _, param in entries], spec)) is not None:
            homes.share_out([(param, spec, self._batch(name, param)) for name, param in entries])

    def _defaults_of(self, rule: str, whose: str = "a group") -> dict[str, Any]:
        if not isinstance(rule, str) or rule not in self._rules:
            other = known().get(rule) if isinstance(rule, str) else None
            hint = "it is misspelt or damaged, or of a package that is not installed"
            if other:
                hint = f"make this one as that one was made: as rlx_optim.torch.{other.title}, or with route="
            raise ValueError(f"{self._owner}: {whose} is for rule {rule!r}; known are {quote(self._rules)}; {hint}")
        return self.defaults if rule == self.rule else self._others[rule]

    def _pieces(self, name: str | None, param: torch.Tensor) -> Split:
        """Into which matrices a parameter is split: as its state says, or where that was cleared, the user or the model."""
        return split_in(self.state.get(param, {})) or self._batch(name, param)

    def _batch(self, name: str | None, param: torch.Tensor) -> Split:
        """Into which matrices the user splits a parameter, or its model."""
        pattern, split = first_match(self._split, name) or (None, self._known_split.get(param, (WHOLE, ""))[0])
        if pattern is not None:
            self._split_used.add(pattern)
        try:
            shapes_of(tuple(param.shape), split)
        except ValueError as problem:
            raise ValueError(f"{self._owner}: {name!r}: {problem}") from None
        return split

    def _saved_split(self, name: str, param: torch.Tensor, saved: Mapping[str, Any]) -> Split:
        """Into which matrices a parameter was split whose state was saved. State that does not say it is of a whole one, which it
        stays in spite of what the model says: the run goes on as it began."""
        split = split_of(self._owner, param, saved, name)
        if split is None and saved and not first_match(self._split, name):
            return WHOLE
        return split or self._pieces(name, param)

    def _how_split(self, name: str | None, param: torch.Tensor) -> str:
        """In words, where the model says it."""
        split, why = self._known_split.get(param, (WHOLE, ""))
        if split == WHOLE or first_match(self._split, name) or split != self._pieces(name, param):
            return ""
        return f"as {described(tuple(param.shape), split)} ({why})"

    # ---- state dicts -----------------------------------------------------------------------------------------------------
    @eager
    def state_dict(self) -> dict[str, Any]:
        """torch's, and in each group what torch.optim calls its settings, so that it can load them.

        Where matrices of DTensors have owners, every rank must call it; their state is then given as DTensors.
        """

        def complete(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            if self._evaluates():  # train() takes out of the state what was saved here
                saved["state"] = {key: copy.copy(state) for key, state in saved["state"].items()}
            for group in saved["param_groups"]:
                group.update(torch_settings(self._rules[group.get("rule", self.rule)], group))
                present = [key for key in group["params"] if key in saved["state"]]
                saved["state"] |= {key: export_state(group, saved["state"][key]) for key in present}
            return saved if self._guard is None else {**saved, "skip_window": self._guard.values()}

        self._refresh()
        kept, handle = self.state, self.register_state_dict_post_hook(complete, prepend=True)  # the user's hooks see all of it
        try:
            self.state = self._for_all(kept)
            return super().state_dict()
        finally:
            self.state = kept
            handle.remove()

    def consolidate_state_dict(self) -> None:
        """Bring together what owners hold of a DDP model's state, so that `state_dict()` may be called, on whichever rank.

        Every rank must call it. It holds until the next step. Only for `Muon(ddp_model)` and its like, or with process_group=…
        """
        from .placements.homes import exported

        self._refresh()
        owned = [entry for entry in self._owned() if entry[1].layout is None]
        self._consolidated = self._stamp(), exported(self.state, owned)

    def _stamp(self) -> list[float]:
        """Moves with every step."""
        states = [self.state.get(param) for group in self.param_groups for param in group["params"]]
        return [float(state["step"]) for state in states if state]

    def _owned(self) -> list[Any]:
        """(parameter, home, shapes of its state by name) of what has one owner."""
        from .placements.homes import Owned

        found = []
        for group in self.param_groups:
            spec = self._spec_of(group)
            for name, param in named(group):
                if not self.state.get(param):
                    continue
                split = self._pieces(name, param)
                home = self._home(name, param, spec, split)
                if isinstance(home, Owned):
                    found.append((param, home, shapes_in_state(spec, param, split)))
        return found

    def _for_all(self, state: Any) -> Any:
        """The state as every rank may have it: what owners hold is spread out."""
        if self._homes is None:
            return state
        from .placements.homes import exported

        owned = self._owned()
        if any(home.layout is None for _, home, _ in owned):
            stamp, state = self._consolidated
            if stamp != self._stamp():
                raise RuntimeError(
                    f"{self._owner}: the state is shared out among ranks; call consolidate_state_dict() on every rank first "
                    "(or save(path), which does it by itself)"
                )
        return exported(state, [entry for entry in owned if entry[1].layout is not None])

    @eager
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over state and groups, ours or torch.optim's, by value and in the precision they were saved in. By place, as torch
        does; where both sides have the same names in another order, by name."""

        def box(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            def boxed(state: Any) -> Any:
                state = unwrap_state(state)
                if not isinstance(state, Mapping):
                    return Boxed(state)
                return {k: Boxed(v) for k, v in state.items()}

            check_outline(self._owner, loaded)
            if problem := guard.window_error(given := loaded.get("skip_window", {})):
                raise ValueError(f"{self._owner}: 'skip_window' of the state dict: {problem}")
            window.update(given)
            groups = loaded["param_groups"]
            if len(groups) == len(self.param_groups):
                groups = [order_by_name(*pair) for pair in zip(self.param_groups, groups, strict=True)]
            boxes = {key: boxed(state) for key, state in loaded["state"].items()}
            return {**loaded, "state": boxes, "param_groups": groups}

        self._refresh()
        window: dict[str, Any] = {}
        if not isinstance(state_dict, Mapping):  # before torch copies it
            check_outline(self._owner, state_dict)
        handle = self.register_load_state_dict_pre_hook(box)  # the last one: it sees what the user's hooks made of it
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._resume_guard(window)

    def __getstate__(self) -> dict[str, Any]:
        self._refresh()  # what was replaced is not told of to the copy
        derived = {"_asked", "_rows", "_placements", "_layout", "_places", "_specs", "_given", "_consensus", "_consolidated"}
        derived |= {"_listed", "_listed_specs", "_fusion_keys", "_dormant", "_evaluating", "_lock"}
        kept = {k: v for k, v in self.__dict__.items() if k not in derived and not k.startswith("_optimizer_")}
        kept = {
            k: v for k, v in kept.items() if not callable(getattr(type(self), k, None))
        }  # a scheduler's wrapper around `step`
        return {**kept, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" not in state:  # from load_state_dict: check it all before anything of ours changes
            formats = [group["state_dtype"] for group in self.param_groups]
            layouts = [self._layout_of(group, i, state["state"]) for i, group in enumerate(state["param_groups"])]
            given = zip(state["param_groups"], formats, layouts, strict=True)
            groups = [self._completed({**g, "state_dtype": kept}, i, layout) for i, (g, kept, layout) in enumerate(given)]
            state = {"param_groups": groups, "state": self._loaded(groups, state, layouts)}
        super().__setstate__(state)
        self._consolidated = (None, None)
        self.defaults.pop("differentiable", None)  # torch's addition; a step here cannot be differentiated
        self._forget()
        self._listed = list_params(self.param_groups)
        self._current_specs()

    def _layout_of(self, group: dict[str, Any], place: int, saved: Mapping[Any, Any]) -> Origin | None:
        """How a saved group is laid out: it may be of another library."""
        ours = self.param_groups[place]
        kind = self._rules[ours["rule"]]
        states = [unboxed(saved.get(param) or {}) for param in group["params"]]
        return layout_of(self._owner, kind, group, states, [name for name in ours if name not in kind.fields and name != "rule"])

    def _completed(self, group: dict[str, Any], place: int, layout: Origin | None) -> dict[str, Any]:
        """A saved group with every setting there is: it may be another library's, or of an older version."""
        ours = self.param_groups[place]
        rule = group.get("rule", ours["rule"])
        done = {
            **self._defaults_of(rule, f"group {place} of the checkpoint"),
            **settings_of(self._owner, self._rules[rule], layout, group, ours),
            "rule": rule,
        }
        self._spec_of(done)
        return done

    def _loaded(self, groups: list[dict[str, Any]], checkpoint: Mapping[str, Any], layouts: list[Origin | None]) -> Any:
        saved = checkpoint["state"]
        state = type(self.state)(dict)
        state.update({k: unboxed(v) for k, v in saved.items() if not isinstance(k, torch.Tensor)})
        for index, (group, given, layout) in enumerate(zip(groups, checkpoint["param_groups"], layouts, strict=True)):
            spec, saved_format = self._spec_of(group), given.get("state_dtype", "float32")
            for name, param in named(group, index):
                given_state = unboxed(saved.get(param) or {})
                if not isinstance(given_state, Mapping | None):
                    raise refuse_state(self._owner, name, given_state)
                if not given_state and is_frozen(param):
                    continue
                self._check_param(name, param, group)
                split = self._saved_split(name, param, given_state or {})
                home = self._home(name, param, spec, split)
                slots = list(names_of(spec, kept_slots(spec, param, split, home)).values())
                given_state = state_of(self._owner, spec, layout, given, given_state or {}, slots, tuple(param.shape), name)
                if saved_format not in ("float32", spec.state_dtype):
                    refuse_codes(self._owner, spec, saved_format, param, split, given_state, name)
                state[param] = load_state(self._owner, spec, param, split, given_state, name, home)
                if split != self._batch(name, param):
                    state[param]["batch"] = split  # a whole one says so too, where it would be split
        return state

    # ---- checkpoints -----------------------------------------------------------------------------------------------------
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
        from .placements.comm import sharing

        params = [param for group in self.param_groups for param in group["params"]]
        return sharing(params, self._homes.comm).agreed(what, params[0].device)

    # ---- reports ---------------------------------------------------------------------------------------------------------
    def engine_report(self) -> dict[str, str]:
        """Which engine steps what, and why: {"12 parameters on cpu, float32 arithmetic": "cpu: … (why)"}."""
        out = {}
        asked = self._ignored and f"; {self._ignored}= makes no difference, engine= does"
        find_ready(self)
        for placement in self._placements or []:
            first = placement.entries[0]
            arithmetic = str(ARITHMETIC[first.param.dtype]).removeprefix("torch.")
            spec = self._spec_of(self._views()[first.records[0].group])
            turned = ", maximized" if placement.sign < 0 else ""
            key = f"{len(placement.entries)} parameters on {placement.device}, {arithmetic} arithmetic{turned}"
            key += (placement.spread and f", {placement.spread}") + placement.words
            copies = f"; the last step took {placement.copied} of them through copies" if placement.copied else ""
            out[key] = f"{placement.engine.describe(spec)} ({placement.why}{asked}{copies})"
        if self._dormant:
            out[f"{len(self._dormant)} frozen parameters"] = "not stepped, no state until they are trained"
        return out

    def routing_report(self) -> str:
        """A table: parameter, shape, rule, why."""
        self._refresh()
        rows = []
        for group in self.param_groups:
            names = group.get("param_names") or ["(unnamed)"] * len(group["params"])
            for name, param in zip(names, group["params"], strict=True):
                frozen = "frozen: no state until it is trained" if self._is_dormant(param) else ""
                how, why = self._how_split(name, param), self._why.get(param, "")
                parts = (frozen, why) if how in why else (frozen, why, how)  # files of 0.2.0 have both in one
                why = "; ".join(filter(None, parts))
                rows.append((name, tuple(param.shape), self._rules[group["rule"]], why))
        return report(rows)


def pair_with_names(owner: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group whose names stand beside its parameters (torchtitan's, and those of torch's own groups) with pairs of both."""
    if group.get("param_names") is None:
        return {k: v for k, v in group.items() if k != "param_names"}
    params, names = group["params"], list(group["param_names"])
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if any(isinstance(entry, tuple) for entry in params):
        raise ValueError(f"{owner}: a group has pairs of name and parameter, and param_names too; leave out one of them")
    if len(names) != len(params):
        raise ValueError(f"{owner}: a group has {len(params)} parameters and {len(names)} param_names; give each its name")
    return {k: v for k, v in group.items() if k != "param_names"} | {"params": list(zip(names, params, strict=True))}
