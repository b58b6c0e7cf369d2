"""Parameters as they come into an optimizer: what is refused, how they are split, and where their state is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..buckets import on_the_device
from ..rounding import EXACT
from ..routing import first_match
from ..spec import Spec
from ..splits import WHOLE, Split, checked, described, shapes_of
from .engines import choose_engine
from .memory import REPEATS, has_repeats, is_dtensor
from .placements.host import COPY_STREAMS
from .placements.local import ARITHMETIC
from .state import HOST, init_state, is_frozen, read_split
from .state_dict import split_of

if TYPE_CHECKING:
    from .optimizer import RuleOptimizer


def parse_offload(owner: str, offload: Any) -> dict[str, str | None]:
    """Whose state is on the host, by pattern."""
    if offload is None:
        return {}
    given = offload if isinstance(offload, Mapping) else {"*": offload}
    if any(value not in ("cpu", None) for value in given.values()):
        raise ValueError(
            f'{owner}: offload must be "cpu", or a dict such as {{"*embed*": "cpu"}} (None: beside the parameter), got '
            f"{offload!r}"
        )
    return dict(given)


def parse_splits(owner: str, split: Any, heads: Any) -> dict[str, Split]:
    """Splits by pattern, as the user says: of `split`, and of `heads`, which are equal parts."""
    for what, given in (("split", split), ("heads", heads)):
        if not isinstance(given, Mapping | None) and not (what == "heads" and isinstance(given, bool)):
            raise TypeError(f'{owner}: {what} must be a dict such as {{"*.qkv.weight": 3}}, got {given!r}')
    counted, found = heads if isinstance(heads, Mapping) else {}, dict[str, Split]()
    for pattern, given in {**(split or {}), **counted}.items():
        if pattern in counted and (not isinstance(given, int) or pattern in (split or {})):
            raise ValueError(f"{owner}: heads of {pattern!r} must be their number, and not be in split too, got {given!r}")
        try:
            found[pattern] = checked(given)
        except ValueError as problem:
            raise ValueError(f"{owner}: split of {pattern!r} must be {problem}, got {given!r}") from None
    return found


def admit(opt: RuleOptimizer, entries: Iterable[tuple[str | None, torch.Tensor]], spec: Spec, group: Mapping[str, Any]) -> None:
    """Check parameters and make their state. Frozen ones are left alone until they are trained, whatever they are."""
    newcomers = [(name, param) for name, param in entries if not opt.state.get(param) and not is_frozen(param)]
    for name, param in newcomers:
        check_param(opt, name, param, group)
    share_out(opt, newcomers, spec)
    for name, param in newcomers:
        batch = wanted_split(opt, name, param)
        init_state(opt.state[param], spec, param, batch, home_of(opt, name, param, spec, batch))


def share_out(opt: RuleOptimizer, entries: Sequence[tuple[str | None, torch.Tensor]], spec: Spec) -> None:
    """Give parameters that are spread over ranks their owners, all of a group at once so that the work is even."""
    if (homes := find_homes(opt, [param for _, param in entries], spec)) is not None:
        homes.share_out([(param, spec, wanted_split(opt, name, param)) for name, param in entries])


def check_param(opt: RuleOptimizer, name: str | None, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    what = f"{opt._owner}: parameter {name!r}" if name else f"{opt._owner}: a parameter of shape {tuple(param.shape)}"
    if group["state_dtype"] != "float32" and param.dtype is torch.float64:
        raise ValueError(f'{what} is float64, and so is its state; give it a group of its own with state_dtype="float32"')
    if group["rounding"] == EXACT and param.dtype is torch.float16:
        hint = "use rounding='stochastic', or bfloat16"
        raise ValueError(f"{what} is float16, which is not the upper half of a float32; {hint}")
    if param.device.type == "meta":
        raise ValueError(f"{what} is on the meta device; materialise the model (model.to_empty(device=…)) before the optimizer")
    if is_traceable_wrapper_subclass(param) and not is_dtensor(param):  # it has no memory of its own
        raise ValueError(f"{what} is a {type(param).__name__}; plain tensors and DTensors can be stepped")
    if is_dtensor(param) and any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
        raise ValueError(f"{what} is a partial sum; redistribute it to Shard or Replicate before the optimizer is made")
    if has_repeats(param):
        raise ValueError(f"{what} {'; '.join(REPEATS)}")
    if param.dtype not in ARITHMETIC:
        hint = "; optimize torch.view_as_real of it" if param.is_complex() else ""
        raise ValueError(f"{what} has dtype {param.dtype}; float32, float64, bfloat16 and float16 can be stepped{hint}")
    if param in opt._hosted and param.device.type not in COPY_STREAMS:
        raise ValueError(
            f"{what} is on {param.device}, and offload='cpu' is for parameters on a CUDA device: move the model there before "
            "the optimizer is made, or leave offload out, or name others: offload={'*pattern*': 'cpu'}"
        )
    where = compute_device(opt, param, opt._rules[group["rule"]])
    choose_engine(opt.engine, where, ARITHMETIC[param.dtype])  # refuses a device the engine cannot reach


def is_dormant(opt: RuleOptimizer, param: torch.Tensor) -> bool:
    """Whether a parameter is frozen and has no state: nothing is asked of it, whatever it is."""
    return is_frozen(param) and not opt.state.get(param)


def find_homes(opt: RuleOptimizer, params: Iterable[Any], spec: Spec) -> Any:
    """Made with the first parameter that is spread over ranks; None without one."""
    if opt._homes is None and ((spec.matrix and opt._comm is not None) or any(map(is_dtensor, params))):
        from .placements.homes import Homes

        opt._homes = Homes(opt._owner, opt._comm)
    return opt._homes


def home_of(opt: RuleOptimizer, name: str | None, param: torch.Tensor, spec: Spec, split: Split) -> Any:
    """Where the state of a parameter is kept that is spread over ranks, or offloaded; None for all others."""
    homes = find_homes(opt, [param], spec)
    home = None if homes is None else homes.find(name or "", param, spec, split)
    if param not in opt._hosted:
        return home
    if home is not None:
        raise ValueError(
            f"{opt._owner}: {name or tuple(param.shape)!r} is spread over ranks, and offload='cpu' is for parameters that "
            "are not; give fully_shard offload_policy=CPUOffloadPolicy() (and no offload here), or leave out process_group"
        )
    return HOST


def compute_device(opt: RuleOptimizer, param: torch.Tensor, kind: type[Spec]) -> torch.device:
    """Where the arithmetic of a parameter is."""
    hosted = param in opt._hosted and not on_the_device(kind.matrix, opt.engine)
    return HOST.device if hosted else param.device


def current_split(opt: RuleOptimizer, name: str | None, param: torch.Tensor) -> Split:
    """Into which matrices a parameter is split: as its state says, or where that was cleared, the user or the model."""
    return read_split(opt.state.get(param, {})) or wanted_split(opt, name, param)


def wanted_split(opt: RuleOptimizer, name: str | None, param: torch.Tensor) -> Split:
    """Into which matrices the user splits a parameter, or its model."""
    pattern, split = first_match(opt._split, name) or (None, opt._known_split.get(param, (WHOLE, ""))[0])
    if pattern is not None:
        opt._split_used.add(pattern)
    try:
        shapes_of(tuple(param.shape), split)
    except ValueError as problem:
        raise ValueError(f"{opt._owner}: {name!r}: {problem}") from None
    return split


def saved_split(opt: RuleOptimizer, name: str, param: torch.Tensor, saved: Mapping[str, Any]) -> Split:
    """Into which matrices a parameter was split whose state was saved. State that does not say it is of a whole one, which it
    stays in spite of what the model says: the run goes on as it began."""
    split = split_of(opt._owner, param, saved, name)
    if split is None and saved and not first_match(opt._split, name):
        return WHOLE
    return split or current_split(opt, name, param)


def describe_split(opt: RuleOptimizer, name: str | None, param: torch.Tensor) -> str:
    """In words, where the model says it."""
    split, why = opt._known_split.get(param, (WHOLE, ""))
    if split == WHOLE or first_match(opt._split, name) or split != current_split(opt, name, param):
        return ""
    return f"as {described(tuple(param.shape), split)} ({why})"
