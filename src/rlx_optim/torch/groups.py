"""An optimizer's `param_groups`, which hold the truth: names, settings, and the specs that are made of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..spec import Spec
from .placements.local import ARITHMETIC

if TYPE_CHECKING:
    from .optimizer import RuleOptimizer

DTYPES = list(ARITHMETIC)
ROUNDED = 1e-9  # of the rate a schedule began with: below zero by no more is zero (LinearLR gets there by adding up)
FIXED = (float, int, bool, str, type(None))


def is_fixed(value: Any, tensors: bool) -> bool:
    """Whether nobody can change it in place. tensors: they count as such, since the step itself reads them on the device."""
    if type(value) is tuple:
        return all(is_fixed(each, tensors) for each in value)
    return type(value) in FIXED or (tensors and isinstance(value, torch.Tensor))


def read_number(name: str, value: Any) -> Any:
    """A hyperparameter, with the number of a tensor of one element in its place, and a tuple for a list."""
    if isinstance(value, (tuple, list)):
        return tuple(read_number(name, each) for each in value)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        return value.item()
    return value


def read_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters with the numbers of tensors read."""
    return {name: read_number(name, value) for name, value in values.items()}


def settings_in_dtype(kind: type[Spec], group: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A group as it is for parameters of a dtype."""
    return group if kind.torch.in_dtype is None else kind.torch.in_dtype(group, torch.finfo(dtype).eps)


def name_params(group: Mapping[str, Any], place: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """A group's parameters with their names, or with what can be said of them. place: the group's, so that no two are
    called alike."""
    said = "" if place is None else f"{place}."
    params = group["params"]
    names = group.get("param_names") or [f"{said}{i} of shape {tuple(p.shape)}" for i, p in enumerate(params)]
    if len(names) != len(params):
        raise ValueError(f"a group has {len(params)} parameters and {len(names)} param_names; change both together")
    return zip(names, params, strict=True)


def pair_with_names(owner: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group whose names stand beside its parameters (torchtitan's, and those of torch's own groups) with pairs of both."""
    rest = {k: v for k, v in group.items() if k != "param_names"}
    if group.get("param_names") is None:
        return rest
    params, names = group["params"], list(group["param_names"])
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if any(isinstance(entry, tuple) for entry in params):
        raise ValueError(f"{owner}: a group has pairs of name and parameter, and param_names too; leave out one of them")
    if len(names) != len(params):
        raise ValueError(f"{owner}: a group has {len(params)} parameters and {len(names)} param_names; give each its name")
    return rest | {"params": list(zip(names, params, strict=True))}


class GroupSpecs:
    """The specs of an optimizer's groups, made anew where a value changed, which checks it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was made."""
        self.made: list[Spec | None] = []  # of each view of the groups
        self.current: list[Spec] = []
        self.fusion_keys: tuple[Any, ...] = ()  # what `fusion_key` gives of each
        self.signs: list[bool] = []  # whether groups are maximized
        self.given: dict[int, list[Any]] = {}  # settings of the groups in which nobody can change a value in place

    def at(self, view: int) -> Spec | None:
        """The spec that was made of a view of the groups."""
        return self.made[view] if len(self.made) > view else None

    def update(self, opt: RuleOptimizer) -> list[Spec]:
        """The spec of every view of the groups as it is now."""
        groups, before = opt.param_groups, self.given
        given = [[g["rule"], *map(g.__getitem__, opt._rules[g["rule"]].fields), g["maximize"]] for g in groups]
        same = [
            len(values) == len(before.get(i, ())) and all(map(operator.is_, values, before[i])) for i, values in enumerate(given)
        ]
        if all(same) and len(before) == len(given):
            return self.current
        groups, self.given = view_groups(opt), {}
        if len(self.made) != len(groups):
            opt._forget()
            self.made, same = [None] * len(groups), [False] * len(given)
        for i, group in enumerate(groups):
            if same[i % len(given)]:
                continue
            spec, current = self.made[i], spec_of(opt, group)
            if spec is not None and current.fusion_key() != spec.fusion_key():
                refuse_reshaping(opt._owner, spec, current)
                opt._placements = None  # its state may need more
            self.made[i] = current
        signs = [group["maximize"] for group in groups]
        if signs != self.signs:
            self.signs, opt._placements = signs, None
        self.given = {i: current for i, current in enumerate(given) if all(is_fixed(value, opt.capturable) for value in current)}
        self.current = [spec for spec in self.made if spec is not None]
        self.fusion_keys = tuple(spec.fusion_key() for spec in self.current)
        return self.current


def refuse_reshaping(owner: str, before: Spec, current: Spec) -> None:
    """Refuse another value of a hyperparameter that says what state there is."""
    for name, field in before.fields.items():
        was, given = before.values()[name], current.values()[name]
        if field.fixed and given != was:
            raise ValueError(
                f"{owner}: {name} shapes the state and cannot change in a group (is {was!r}, got {given!r}); make a new optimizer"
            )


def spec_of(opt: RuleOptimizer, group: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Spec:
    """The spec of a group as it is for parameters of a dtype."""
    if not isinstance(up := group.get("maximize", False), bool):  # whatever is true would climb
        raise TypeError(f"{opt._owner}: maximize must be True or False, got {up!r}")
    kind = opt._rules[group["rule"]]
    group = settings_in_dtype(kind, group, dtype)
    values = read_numbers({name: group[name] for name in kind.fields})
    lr, first = values["lr"], group.get("initial_lr")
    if isinstance(lr, float) and lr < 0 and first is not None and -lr <= ROUNDED * abs(read_number("initial_lr", first)):
        values["lr"] = 0.0
    return kind(**values)


def view_groups(opt: RuleOptimizer) -> list[dict[str, Any]]:
    """The groups; where settings may follow the dtype, as they are for each dtype, one dtype after the other."""
    if not follows_dtype(opt):
        return opt.param_groups
    return [settings_in_dtype(opt._rules[group["rule"]], group, dtype) for dtype in DTYPES for group in opt.param_groups]


def follows_dtype(opt: RuleOptimizer) -> bool:
    """Whether a rule has settings that follow the dtype of a parameter."""
    return any(kind.torch.in_dtype is not None for kind in opt._rules.values())


def view_index(opt: RuleOptimizer, group: int, dtype: torch.dtype) -> int:
    """Where a parameter of a group finds its settings in `view_groups`."""
    return group + len(opt.param_groups) * DTYPES.index(dtype) if follows_dtype(opt) else group
