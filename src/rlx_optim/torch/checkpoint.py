"""Checkpoints of torch optimizers: by parameter name, the names bare of what wrappers put before them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import files
from ..checkpoint.format import CheckpointError, Tensor, sort_for_writing
from ..checkpoint.optimizers import demand_callables
from ..checkpoint.snapshot import Parameter, SavedOptimizer, SavedSettings, Snapshot, check_fit, check_names, list_possible_state
from ..registry import spec_class
from ..rounding import LOW
from ..routing import Choice, bare
from ..spec import Spec
from ..splits import WHOLE, shapes_of
from .eval_mode import dicts_in
from .groups import read_numbers, settings_in_dtype
from .optimizer import RuleOptimizer
from .params import current_split, home_of, is_dormant, wanted_split
from .placements.local import ARITHMETIC
from .policy import resume_guard
from .state import init_state, part_names
from .state_dict import COUNTABLE, fill_state, make_state, read_parameter

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


# ---- to a snapshot ------------------------------------------------------------------------------------------------------
def snapshot_of(opt: RuleOptimizer) -> Snapshot:
    """Everything a torch optimizer is and has."""
    specs = opt._specs.update(opt)
    members, where = _members(opt)
    parameters = {}
    for name, (index, param) in parameters_of(opt).items():
        if is_dormant(opt, param):
            continue
        group, state = opt.param_groups[index], opt.state[param]
        split = current_split(opt, name, param)
        home = home_of(opt, name, param, specs[index], split)
        init_state(state, specs[index], param, split, home)
        p = parameters[name] = read_parameter(opt._owner, specs[index], param, split, state, name, home, live=True)
        (p.member, p.group), p.reason = where[index, _kind(opt, group, param)], opt._why.get(param, "")
    iteration = max((p.step for p in parameters.values()), default=0)
    window = {} if opt._guard is None else opt._guard.values()
    return Snapshot(members, parameters, iteration, opt.skipped, opt.nonfinite, "torch", skip_above=opt.skip_above, window=window)


def _kind(opt: RuleOptimizer, group: Mapping[str, Any], param: torch.Tensor) -> torch.dtype:
    """The dtype whose settings a parameter has: its own where the group's follow the dtype, else float32."""
    return torch.float32 if settings_in_dtype(opt._rules[group["rule"]], group, param.dtype) is group else param.dtype


def _members(opt: RuleOptimizer) -> tuple[list[SavedOptimizer], dict[tuple[int, torch.dtype], tuple[int, int | None]]]:
    """The rules with their groups, and for each of torch's groups and kinds of parameters in it the place there."""
    trained = [[p for p in group["params"] if not is_dormant(opt, p)] for group in opt.param_groups]
    kinds = [
        {_kind(opt, group, p): None for p in params} or {torch.float32: None}
        for group, params in zip(opt.param_groups, trained, strict=True)
    ]
    members = []
    where: dict[tuple[int, torch.dtype], tuple[int, int | None]] = {}
    for place, (rule, its) in enumerate(opt._rules.items()):
        mine = [(i, kind) for i, group in enumerate(opt.param_groups) if group["rule"] == rule for kind in kinds[i]]
        values = [_values(its.fields, settings_in_dtype(its, opt.param_groups[i], kind)) for i, kind in mine]
        values = values or [_values(its.fields, settings_in_dtype(its, opt._defaults_of(rule), torch.float32))]
        members.append(SavedOptimizer.of(rule, values))
        where |= {i: (place, k - 1 if k else None) for k, i in enumerate(mine)}
    return members, where


def _values(fields: Mapping[str, Any], group: Mapping[str, Any]) -> SavedSettings:
    given = read_numbers({name: group[name] for name in fields})
    beside = read_numbers({k: v for k, v in group.items() if k not in (*fields, "params", "param_names", "rule")})
    return SavedSettings(
        given, [k for k, v in given.items() if callable(v)], {k: v for k, v in beside.items() if isinstance(v, PLAIN)}
    )


# ---- from a snapshot ----------------------------------------------------------------------------------------------------
def load_into(
    opt: RuleOptimizer, path: str | os.PathLike[str], strict: bool, allow_nan: bool, callables: Mapping[str, Any]
) -> None:
    """Take over groups, routing and state from a file of any front end. Nothing changes before all of it has been checked."""
    with contextlib.ExitStack() as stack:
        with opt._agreed("the checkpoint was refused"):
            snapshot = stack.enter_context(files.open_checkpoint(path, allow_nan))
            known = parameters_of(opt)
            _check_names(opt, snapshot, known, strict)
            there = {name: p for name, p in snapshot.parameters.items() if name in known}
            for name, p in there.items():
                _check_fit(name, p, known[name][1])
            values = _given_again(opt, snapshot, known, there, callables)
            groups = _regrouped(opt, snapshot, known, there, values)
            states = {known[name][1]: _room(opt, snapshot, name, p, *known[name]) for name, p in there.items()}
        for name, p in there.items():  # from here on nothing but the disk can fail
            here = _here(opt, snapshot, p, known[name][0])
            fill_state(states[known[name][1]], here, p, home_of(opt, name, known[name][1], here, p.way))
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
        if rule == was or (rule not in routed and choice.spec.accepts_any_shape):
            other = choice
            break
    opt._router.otherwise = other
    opt._others |= {rule: choice.rule for rule, choice in said.items()}
    rules = [opt.rule, *([] if other is None else [other.rule["rule"]]), *said, *(group["rule"] for group in opt.param_groups)]
    opt._rules = {rule: spec_class(rule) for rule in rules}
    opt.nonfinite, opt.skipped = snapshot.nonfinite, snapshot.skipped
    opt.skip_above = opt.skip_above if snapshot.skip_above is None else snapshot.skip_above
    resume_guard(opt, snapshot.window)
    opt._forget()
    opt._specs.update(opt)


def _check_names(opt: RuleOptimizer, snapshot: Snapshot, known: Mapping[str, Any], strict: bool) -> None:
    own = snapshot.members[0].optimizer
    if own != opt.rule:
        title = spec_class(own).title
        raise CheckpointError(f"the checkpoint is of {title}; load it into rlx_optim.torch.{title}, not into {opt._owner}")
    if len(snapshot.members) > 2 and spec_class(snapshot.members[1].optimizer).otherwise_default is not None:
        raise CheckpointError("the checkpoint has an otherwise behind an otherwise, which the torch classes do not do")
    needed = {name for name, (_, param) in known.items() if not is_dormant(opt, param)}
    if strict:
        check_names(snapshot, needed, known.keys(), "; strict=False leaves such parameters as they are")


def _check_fit(name: str, p: Parameter, param: torch.Tensor) -> None:
    check_fit(name, p, tuple(param.shape), ARITHMETIC[param.dtype] is torch.float64)
    try:
        piece = shapes_of(p.shape, p.way)[0]
    except ValueError:
        piece = ()
    if piece != p.piece:
        raise CheckpointError(
            f"{name!r} is split into {p.pieces} pieces of shape {p.piece} in the checkpoint, which its shape does not allow"
        )
    if p.step > COUNTABLE:
        raise CheckpointError(f"{name!r} has taken {p.step} steps; torch counts to {COUNTABLE}")


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
        demand_callables(spec_class(member.optimizer).title, values.callables, values, again, how)
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
            parts.setdefault(beside if place is None and is_dormant(opt, param) else place, []).append(i)
        contents: list[tuple[dict[str, Any], list[int]]] = []
        for place, which in parts.items():
            content = _content(snapshot, group, place, [group["params"][i] for i in which], values)
            if same := next((members for each, members in contents if read_numbers(each) == read_numbers(content)), None):
                same += which  # parameters of other types, whose settings in the file say what the group's say of each type
            else:
                contents.append((content, which))
        for content, which in contents:
            content |= {key: [group[key][i] for i in sorted(which)] for key in ("params", "param_names")}
        kept.append((group, contents[0][0] if contents else dict(group)))
        new += [({}, content) for content, _ in contents[1:]]
    return [*kept, *new]


def _content(
    snapshot: Snapshot, group: Mapping[str, Any], place: Any, params: Sequence[torch.Tensor], values: Mapping[Any, Any]
) -> dict[str, Any]:
    """The settings of a group of these parameters."""
    content = {k: v for k, v in group.items() if k not in ("params", "param_names")}
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
        follows = {k: group[k] for k, v in settings_in_dtype(kind, group, torch.float32).items() if v is not group[k]}
        unsaid = {**content, **follows}
        meant = [settings_in_dtype(kind, unsaid, p.dtype) for p in params if p.dtype in ARITHMETIC]
        return unsaid if all(each[k] == content[k] for each in meant for k in follows) else content
    return content


def _check_extra(key: str, value: Any, here: Any, taken: Sequence[str]) -> None:
    """A setting beside the rule's must be of the kind it has here."""
    numbers = isinstance(value, (int, float)) and isinstance(here, (int, float, torch.Tensor))
    alike = here is None or type(value) is type(here) or (numbers and not isinstance(value, bool) and not isinstance(here, bool))
    if key in taken or not isinstance(value, PLAIN) or not alike:
        raise CheckpointError(f"a group's {key!r} cannot be {value!r:.80}")


def _room(opt: RuleOptimizer, snapshot: Snapshot, name: str, p: Parameter, index: int, param: torch.Tensor) -> dict[str, Any]:
    """State for a parameter, to be filled: buffers that fit are used again, what is the user's own stays."""
    spec, before = _here(opt, snapshot, p, index), opt.state[param]
    alike = snapshot.members[p.member].optimizer == opt.param_groups[index]["rule"]
    state = make_state(spec, p, param, home_of(opt, None, param, spec, p.way), before if alike else None)
    if wanted_split(opt, name, param) != WHOLE:  # what was whole says so, where it would be split
        state["batch"] = p.way
    earlier = opt._specs.update(opt)[index]
    others, counters = list_possible_state(earlier, p)
    ours = {"step", "batch", LOW, *part_names(earlier, others), *counters}
    return state | {k: v for k, v in before.items() if k not in state and k not in ours}


def _here(opt: RuleOptimizer, snapshot: Snapshot, p: Parameter, index: int) -> Spec:
    """The file's settings, with what state is kept in here."""
    return snapshot.spec(p).replace(state_dtype=opt.param_groups[index]["state_dtype"])


# ---- to a file ----------------------------------------------------------------------------------------------------------
def save(opt: RuleOptimizer, path: str | os.PathLike[str], every: int, keep: int | None, allow_nan: bool) -> Path | None:
    """Write an optimizer to a file; where parameters are spread over ranks, by all of them together."""
    steps = max((int(state["step"]) for state in dicts_in(opt.state) if "step" in state), default=0)
    if opt._homes is None:
        return files.save(lambda: snapshot_of(opt), steps, path, every, keep, allow_nan)
    return save_together(opt, steps, path, every, keep, allow_nan)


def save_together(
    opt: RuleOptimizer, steps: int, path: str | os.PathLike[str], every: int, keep: int | None, allow_nan: bool
) -> Path | None:
    """Write one file from all ranks: they gather tensor after tensor, and the one with the lowest number writes.

    At no time is more than one tensor whole. A writer that fails goes on gathering, so that nobody waits for it, and then
    everybody hears of it; a rank that dies ends the others' collectives, and the file written before is still there.
    """
    from .placements.comm import chain_comms

    params = [param for group in opt.param_groups for param in group["params"]]
    together, device = chain_comms(params, opt._homes.comm), params[0].device
    rank = torch.distributed.get_rank()
    steps, lead = together.highest([steps, -rank], torch.int64, device)
    if type(every) is int and every > 0 and steps % every:
        return None
    refused = "the checkpoint was not written"
    with together.raise_together(refused, device):  # before ranks gather anything
        snapshot = snapshot_of(opt)
    with together.raise_together(refused, device):
        lockstep = Lockstep(snapshot)
        try:
            if rank == -lead:
                return files.save(lambda: snapshot, steps, path, every, keep, allow_nan)
        finally:
            lockstep.finish()
        return files.path_of_iteration(path, steps)


class Lockstep:
    """The tensors of a snapshot, which all ranks gather in the order in which they are written."""

    def __init__(self, snapshot: Snapshot):
        self.next, self.broken = 0, False
        for p in snapshot.parameters.values():
            p.tensors = {slot: dataclasses.replace(each, read=self._reading(each)) for slot, each in p.tensors.items()}
        self.tensors: list[Tensor] = [each for _, each in sort_for_writing(snapshot.tensors())]

    def _reading(self, each: Tensor) -> Any:
        def read() -> Any:
            self.next += 1
            try:
                return each.read()
            except Exception:
                self.broken = True  # the others are not there any more
                raise

        return read

    def finish(self) -> None:
        """Take part in what is left."""
        while self.next < len(self.tensors) and not self.broken:
            self.tensors[self.next].read()
