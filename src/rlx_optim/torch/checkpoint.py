"""Checkpoints of torch optimizers: by parameter name, the names bare of what wrappers put before them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..checkpoint.files import opened
from ..checkpoint.format import CheckpointError, Tensor
from ..checkpoint.optimizers import demand
from ..checkpoint.snapshot import Group, Member, Parameter, Snapshot, Values, possible
from ..registry import spec_class
from ..rounding import LOW
from ..routing import Choice, bare
from ..spec import Shape, Spec
from ..splits import WHOLE, Split, number, part, shapes_of
from ..storage import COMPONENTS, Words
from ..validation import listed
from . import halves
from .lanes import ARITHMETIC
from .names import in_dtype
from .optimizer import RuleOptimizer
from .state import counter, device_of, dtype_of, init_state, names_of, part_names, piece_shape, put, room, shape_in_state
from .state_errors import COUNTABLE, described, unreadable
from .stepping import plain

PLAIN = (bool, int, float, str, type(None))


def parameters_of(opt: RuleOptimizer) -> dict[str, tuple[int, torch.Tensor]]:
    """By bare name: the index of the group, and the parameter."""
    found: dict[str, tuple[int, torch.Tensor]] = {}
    for index, group in enumerate(opt.param_groups):
        if not group.get("param_names") and group["params"]:
            raise CheckpointError(
                f"{opt._owner}: a checkpoint goes by names, and group {index} has none; "
                "make the optimizer from the model, or from model.named_parameters()"
            )
        for name, param in zip(group.get("param_names", ()), group["params"], strict=True):
            if bare(name) in found:
                raise CheckpointError(f"{opt._owner}: two parameters are called {bare(name)!r} once wrappers' prefixes are gone")
            found[bare(name)] = index, param
    return found


def host(tensor: torch.Tensor, what: str, dtype: str = "") -> np.ndarray:
    """A tensor's values where NumPy sees them; not copied if they are on the CPU already. dtype: of a part of a slot in fewer
    bits, which is given as it is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{what} is a {type(tensor).__name__}; gather the whole of it first")
    tensor = tensor.detach().cpu()
    if dtype == "bfloat16":
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor if dtype or tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()


def wrapped(
    tensor: torch.Tensor, shape: Shape, what: str, dtype: str = "", whole: Callable[[], torch.Tensor] | None = None
) -> Tensor:
    """A tensor of state that is fetched from its device when it is written; `whole` brings it together from the ranks."""
    if whole is None and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        check_numbers(tensor, shape, what)
    kind: Any = Words.types[dtype] if dtype else np.float64 if tensor.dtype is torch.float64 else np.float32
    fetched = functools.partial(_fetched, (lambda: tensor) if whole is None else whole, shape, what, dtype)
    return Tensor(shape, np.dtype(kind), fetched)


def check_numbers(tensor: torch.Tensor, shape: Shape, what: str) -> None:
    """Refuse a tensor of state that has no numbers, those of another shape, or few numbers that it repeats: a file of a hundred
    bytes can say that it has 10^12."""
    if hint := unreadable(tensor):
        raise CheckpointError(f"{what} is {described(tensor)}, needed is a tensor of shape {shape}; {hint}")
    if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:  # a mean of rows may keep the axis it is over
        raise CheckpointError(f"{what} has shape {tuple(tensor.shape)}, needed is {shape}")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{what} repeats few numbers {tensor.numel():,} times; give it memory of its own (.contiguous())")


def _fetched(whole: Callable[[], torch.Tensor], shape: Shape, what: str, dtype: str) -> np.ndarray:
    return host(whole(), what, dtype).reshape(shape)


# ---- to a snapshot ------------------------------------------------------------------------------------------------------
def snapshot_of(opt: RuleOptimizer) -> Snapshot:
    """Everything a torch optimizer is and has."""
    specs = opt._current_specs()
    members, where = _members(opt)
    parameters = {}
    for name, (index, param) in parameters_of(opt).items():
        if opt._is_dormant(param):
            continue
        group, state = opt.param_groups[index], opt.state[param]
        split = opt._pieces(name, param)
        home = opt._home(name, param, specs[index], split)
        init_state(state, specs[index], param, split, home)
        parameters[name] = _parameter(
            name,
            where[index, _kind(opt, group, param)],
            specs[index],
            param,
            state,
            split,
            opt._why.get(param, ""),
            home,
        )
    iteration = max((p.step for p in parameters.values()), default=0)
    window = {} if opt._guard is None else opt._guard.values()
    return Snapshot(members, parameters, iteration, opt.skipped, opt.nonfinite, "torch", skip_above=opt.skip_above, window=window)


def _kind(opt: RuleOptimizer, group: Mapping[str, Any], param: torch.Tensor) -> torch.dtype:
    """The dtype whose settings a parameter has: its own where the group's follow the dtype, else float32."""
    return torch.float32 if in_dtype(opt._rules[group["rule"]], group, param.dtype) is group else param.dtype


def _members(opt: RuleOptimizer) -> tuple[list[Member], dict[tuple[int, torch.dtype], tuple[int, int | None]]]:
    """The rules with their groups, and for each of torch's groups and kinds of parameters in it the place there."""
    trained = [[p for p in group["params"] if not opt._is_dormant(p)] for group in opt.param_groups]
    kinds = [
        {_kind(opt, group, p): None for p in params} or {torch.float32: None}
        for group, params in zip(opt.param_groups, trained, strict=True)
    ]
    members = []
    where: dict[tuple[int, torch.dtype], tuple[int, int | None]] = {}
    for place, (rule, its) in enumerate(opt._rules.items()):
        mine = [(i, kind) for i, group in enumerate(opt.param_groups) if group["rule"] == rule for kind in kinds[i]]
        values = [_values(its.fields, in_dtype(its, opt.param_groups[i], kind)) for i, kind in mine]
        values = values or [_values(its.fields, in_dtype(its, opt._defaults_of(rule), torch.float32))]
        first = values[0].hyperparameters
        groups = [Group(each, overrides=[k for k, v in each.hyperparameters.items() if v != first[k]]) for each in values[1:]]
        members.append(Member(rule, values[0], groups))
        where |= {i: (place, k - 1 if k else None) for k, i in enumerate(mine)}
    return members, where


def _values(fields: Mapping[str, Any], group: Mapping[str, Any]) -> Values:
    given = plain({name: group[name] for name in fields})
    beside = plain({k: v for k, v in group.items() if k not in (*fields, "params", "param_names", "rule")})
    return Values(given, [k for k, v in given.items() if callable(v)], {k: v for k, v in beside.items() if isinstance(v, PLAIN)})


def _parameter(
    name: str,
    where: tuple[int, int | None],
    spec: Spec,
    param: torch.Tensor,
    state: Any,
    split: Split,
    why: str,
    home: Any,
) -> Parameter:
    piece, parts = piece_shape(param, split), () if isinstance(split, int) else split
    shape, kind = tuple(param.shape), str(param.dtype).removeprefix("torch.")
    counters = spec.counters()
    p = Parameter(*where, shape, int(state["step"]), {}, {}, kind, number(split), piece, why, parts=parts)
    slots = p.slots(spec) if home is None else home.kept(p.slots(spec), split)
    if set(state) - {"step", "batch", LOW, *counters, *part_names(spec, slots)}:  # left by a changed setting, perhaps
        slots, counters = possible(spec, p)
    p.counters = {k: _whole(float(state[k])) for k in counters if k in state}
    arrays = p.arrays(slots)
    for key, (slot, end) in part_names(spec, slots).items():
        if key in state:
            each = slots[slot]
            there = shape_in_state(part(each, end) * (p.pieces // len(each)), param, split)
            whole = None if home is None else functools.partial(home.get, state[key], there)
            stored, dtype = arrays[slot + end]
            p.tensors[slot + end] = wrapped(state[key], stored, f"{key!r} of {name!r}", dtype, whole)
    if halves.keeps_low(spec, param):
        low = state[LOW]
        together = low.full_tensor if halves.is_spread(low) else None
        p.tensors[LOW] = wrapped(low, (*shape, 2), f"{LOW!r} of {name!r}", "uint8", together)
    return p


def _whole(value: float) -> float:
    return int(value) if value.is_integer() else value


# ---- from a snapshot ----------------------------------------------------------------------------------------------------
def load_into(
    opt: RuleOptimizer, path: str | os.PathLike[str], strict: bool, allow_nan: bool, callables: Mapping[str, Any]
) -> None:
    """Take over groups, routing and state from a file of any front end. Nothing changes before all of it has been checked."""
    with contextlib.ExitStack() as stack:
        with opt._agreed("the checkpoint was refused"):
            snapshot = stack.enter_context(opened(path, allow_nan))
            known = parameters_of(opt)
            _check_names(opt, snapshot, known, strict)
            there = {name: p for name, p in snapshot.parameters.items() if name in known}
            for name, p in there.items():
                _check_fit(opt, name, p, known[name][1])
            values = _given_again(opt, snapshot, known, there, callables)
            groups = _regrouped(opt, snapshot, known, there, values)
            states = {known[name][1]: _room(opt, snapshot, name, p, *known[name]) for name, p in there.items()}
        for name, p in there.items():  # from here on nothing but the disk can fail
            here = _here(opt, snapshot, p, known[name][0])
            home = opt._home(name, known[name][1], here, p.way)
            _fill(states[known[name][1]], snapshot.spec(p), here, p, home)
        opt.state.update(states)
        opt._consolidated = (None, None)
        opt._why.update({known[name][1]: p.reason for name, p in there.items()})
        _take_over(opt, snapshot, groups)


def _take_over(opt: RuleOptimizer, snapshot: Snapshot, groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for group, content in groups:
        group.clear()
        group.update(content)
    opt.param_groups[:] = [group for group, _ in groups]
    said: dict[str, Choice] = {}
    for member in snapshot.members[1:]:
        mine = {"rule": member.optimizer, **member.values.hyperparameters, "maximize": opt.defaults["maximize"]}
        said.setdefault(member.optimizer, Choice(member.specs[None], mine))
    other = opt._router.otherwise
    was = None if other is None else other.rule["rule"]
    routed = opt._others.keys() - {was}
    for rule, choice in said.items() if was not in said else [(was, said[was])]:
        if rule == was or (rule not in routed and choice.spec.everywhere):
            other = choice
            break
    opt._router.otherwise = other
    opt._others |= {rule: choice.rule for rule, choice in said.items()}
    rules = [opt.rule, *([] if other is None else [other.rule["rule"]]), *said, *(group["rule"] for group in opt.param_groups)]
    opt._rules = {rule: spec_class(rule) for rule in rules}
    opt.nonfinite, opt.skipped = snapshot.nonfinite, snapshot.skipped
    opt.skip_above = opt.skip_above if snapshot.skip_above is None else snapshot.skip_above
    opt._resume_guard(snapshot.window)
    opt._forget()
    opt._current_specs()


def _check_names(opt: RuleOptimizer, snapshot: Snapshot, known: Mapping[str, Any], strict: bool) -> None:
    own = snapshot.members[0].optimizer
    if own != opt.rule:
        title = spec_class(own).title
        raise CheckpointError(f"it is of {title}; load it into rlx_optim.torch.{title}, not into {opt._owner}")
    if len(snapshot.members) > 2 and spec_class(snapshot.members[1].optimizer).otherwise_default is not None:
        raise CheckpointError("it has an otherwise behind an otherwise, which the torch classes do not do")
    needed = {name for name, (_, param) in known.items() if not opt._is_dormant(param)}
    missing, extra = needed - snapshot.parameters.keys(), snapshot.parameters.keys() - known.keys()
    if strict and (missing or extra):
        says = [f"it has no state for {listed(missing)}"] * bool(missing) + [
            f"it has state for {listed(extra)}, unknown here"
        ] * bool(extra)
        raise CheckpointError(f"{'; '.join(says)} (strict=False leaves such parameters as they are)")


def _check_fit(opt: RuleOptimizer, name: str, p: Parameter, param: torch.Tensor) -> None:
    if p.shape != tuple(param.shape):
        raise CheckpointError(f"{name!r} has shape {p.shape} there and {tuple(param.shape)} here")
    try:
        piece = shapes_of(p.shape, p.way)[0]
    except ValueError:
        piece = ()
    if piece != p.piece:
        raise CheckpointError(f"{name!r} is split into {p.pieces} pieces of shape {p.piece} there, which cannot be done here")
    if p.step > COUNTABLE:
        raise CheckpointError(f"{name!r} has taken {p.step} steps; torch counts to {COUNTABLE}")
    wide = ARITHMETIC[param.dtype] is torch.float64
    for slot, each in p.tensors.items():
        if each.dtype.itemsize > 4 and not wide:
            raise CheckpointError(f"{slot} of {name!r} is {each.dtype}; {opt._owner} keeps float32 here and would lose bits")


def _given_again(
    opt: RuleOptimizer, snapshot: Snapshot, known: Mapping[str, Any], there: Mapping[str, Parameter], callables: Mapping[str, Any]
) -> dict[tuple[int, int | None], dict[str, Any]]:
    """Hyperparameters by (member, group), with what was marked as a callable given again."""
    found: dict[tuple[int, int | None], dict[str, Any]] = {}
    given: list[Mapping[str, Any]] = []
    for _ in snapshot.members:
        given.append({k: v for k, v in callables.items() if k != "otherwise"})
        callables = callables.get("otherwise", {})
    for name, p in there.items():
        if (p.member, p.group) in found:
            continue
        member, here = snapshot.members[p.member], opt.param_groups[known[name][0]]
        values = member.values_of(p.group)
        again = {k: here[k] for k in values.callables if callable(here.get(k))}  # KronPSGD's probe
        again |= {k: v for k, v in given[p.member].items() if k in values.callables}
        how = "load(path, " + "otherwise=dict(" * p.member + "NAME=…" + ")" * p.member + ")"
        demand(spec_class(member.optimizer).title, values.callables, values, again, how)
        found[p.member, p.group] = {**values.hyperparameters, **again}
        try:
            member.specs[p.group].replace(**found[p.member, p.group])
        except (TypeError, ValueError) as problem:
            raise CheckpointError(f"{problem}; torch takes numbers, which its schedulers then move") from None
    for member, mine in zip(snapshot.members, given, strict=False):
        marked = {k for each in (None, *range(len(member.groups))) for k in member.values_of(each).callables}
        if unknown := set(mine) - marked:
            title = spec_class(member.optimizer).title
            raise TypeError(f"load: {title} has no {min(unknown)!r} that was a callable when it was saved")
    return found


def _regrouped(
    opt: RuleOptimizer, snapshot: Snapshot, known: Mapping[str, Any], there: Mapping[str, Parameter], values: Mapping[Any, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """torch's groups, split where the file's settings differ: (dict, what it shall hold). A group's first part keeps its dict."""
    names = {id(param): name for name, (_, param) in known.items()}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    new: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in opt.param_groups:
        saved = [there.get(names[id(param)]) for param in group["params"]]
        places = [None if p is None else (p.member, p.group) for p in saved]
        beside = next((place for place in places if place is not None), None)  # frozen parameters, which no file has, stay there
        parts: dict[Any, list[int]] = {}
        for i, (param, place) in enumerate(zip(group["params"], places, strict=True)):
            parts.setdefault(beside if place is None and opt._is_dormant(param) else place, []).append(i)
        contents = [_content(snapshot, group, place, which, values) for place, which in parts.items()] or [dict(group)]
        kept.append((group, contents[0]))
        new += [({}, content) for content in contents[1:]]
    return [*kept, *new]


def _content(
    snapshot: Snapshot, group: Mapping[str, Any], place: Any, which: list[int], values: Mapping[Any, Any]
) -> dict[str, Any]:
    content = {**group, "params": [group["params"][i] for i in which], "param_names": [group["param_names"][i] for i in which]}
    if place is None:
        return content
    member = snapshot.members[place[0]]
    kind = spec_class(group["rule"])
    content = {k: v for k, v in content.items() if k not in kind.fields}
    extra = member.values_of(place[1]).extra
    for key, value in extra.items():
        _check_extra(key, value, group.get(key), (*member.specs[place[1]].fields, "params", "param_names", "rule"))
    lr, rate = group["lr"], values[place]["lr"]
    moved = {"lr": torch.full_like(lr, rate)} if isinstance(lr, torch.Tensor) and rate is not None else {}
    content |= values[place] | moved | extra | {"rule": member.optimizer, "state_dtype": group["state_dtype"]}
    if member.optimizer == group["rule"] and kind.torch.in_dtype:  # a None that follows the dtype stays where it means the file's
        follows = {k: group[k] for k, v in in_dtype(kind, group, torch.float32).items() if v is not group[k]}
        unsaid = {**content, **follows}
        meant = [in_dtype(kind, unsaid, p.dtype) for p in content["params"] if p.dtype in ARITHMETIC]
        return unsaid if all(each[k] == content[k] for each in meant for k in follows) else content
    return content


def _check_extra(key: str, value: Any, here: Any, taken: Sequence[str]) -> None:
    """A setting beside the rule's must be of the kind it has here."""
    numbers = isinstance(value, (int, float)) and isinstance(here, (int, float, torch.Tensor))
    alike = here is None or type(value) is type(here) or (numbers and not isinstance(value, bool) and not isinstance(here, bool))
    if key in taken or not isinstance(value, PLAIN) or not alike:
        raise CheckpointError(f"a group's {key!r} cannot be {value!r:.80}")


def _room(opt: RuleOptimizer, snapshot: Snapshot, name: str, p: Parameter, index: int, param: torch.Tensor) -> dict[str, Any]:
    """State for a parameter, to be filled: buffers that fit are used again."""
    rule, spec = snapshot.members[p.member].optimizer, _here(opt, snapshot, p, index)
    home = opt._home(None, param, spec, p.way)
    used = p.used(spec) if home is None else home.kept(p.used(spec), p.way)
    slots = {slot: each * (p.pieces // len(each)) for slot, each in used.items()}
    device = device_of(param, home)
    before, was, earlier = opt.state[param], opt.param_groups[index]["rule"], opt._current_specs()[index]
    state: dict[str, Any] = {"step": counter(p.step)}
    if p.pieces > 1 or opt._batch(name, param) != WHOLE:  # what was whole says so, where it would be split
        state["batch"] = p.way
    for key, (slot, end) in part_names(spec, slots).items():
        each = slots[slot]
        old, shape = before.get(key), shape_in_state(part(each, end), param, p.way)
        fits = was == rule and torch.is_tensor(old) and (old.dtype, old.device) == (dtype_of(each, param, end), device)
        fits = fits and old.is_contiguous() and (old.shape == shape if home is None else home.fits(old, shape))
        state[key] = old if fits else room(each, param, p.way, home, end)
    state |= {k: counter(v) for k, v in p.counters.items()}
    halves.init_state(state, spec, param, device)
    others, counters = possible(earlier, p)
    ours = {"step", "batch", LOW, *part_names(earlier, others), *counters}
    return state | {k: v for k, v in before.items() if k not in state and k not in ours}  # the user's own


def _here(opt: RuleOptimizer, snapshot: Snapshot, p: Parameter, index: int) -> Spec:
    """The file's settings, with what state is kept in here."""
    return snapshot.spec(p).replace(state_dtype=opt.param_groups[index]["state_dtype"])


@torch.no_grad()
def _fill(state: dict[str, Any], there: Spec, here: Spec, p: Parameter, home: Any) -> None:
    """Take over a file's state. there, here: its settings, and with what state is kept in here."""
    slots, mine = p.kept(p.used(there)), p.used(here)
    mine = mine if home is None else home.kept(mine, p.way)
    if LOW in state and LOW in p.tensors:
        halves.put(state[LOW], torch.from_numpy(p.tensors[LOW].read()))
    names = names_of(there, slots)
    for name, slot in slots.items():
        kind, wanted = slot[0].storage, mine[name][0].storage
        same = {end: p.tensors[name + end].read() for end in COMPONENTS[kind]} if kind == wanted else None
        put({end: state[names[name] + end] for end in COMPONENTS[wanted]}, wanted, same or p.values(slots, name), home)
