"""The named-step optimizers: to a snapshot and back."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..numpy import classes
from ..numpy.optimizer import NamedOptimizer
from ..numpy.settings import Settings
from ..registry import is_registered, spec_class
from ..routing import OTHERWISE
from ..spec import TRAINED, Spec
from ..stepping import TensorState
from ..storage import fill_buffer, flatten_components
from .format import CheckpointError, Tensor, make_tensor
from .snapshot import Group, Parameter, SavedOptimizer, SavedSettings, Snapshot


# ---- to a snapshot ------------------------------------------------------------------------------------------------------
def snapshot_of(opt: NamedOptimizer) -> Snapshot:
    """Everything an optimizer is and has; its buffers are looked at when they are written."""
    family = list(opt._family())
    return Snapshot(
        [_save_member(each, family) for each in family],
        {name: p for _, _, name, p in parameters_of(opt)},
        opt.iteration,
        opt.skipped,
        opt.nonfinite,
        "named",
        skip_above=opt.skip_above,
        window={} if opt.skip_above is None else opt._guard.values(),
    )


def parameters_of(opt: NamedOptimizer) -> Iterator[tuple[NamedOptimizer, Spec, str, Parameter]]:
    """Every parameter with the optimizer that steps it, its spec and its name."""
    for i, member in enumerate(opt._family()):
        specs = member._specs()
        for name, record in member._records.items():
            spec, group = specs[record.group], record.group if record.group < len(member._settings.groups) else None
            yield member, spec, name, Parameter(
                i, group, record.shape, record.t, _read_tensors(opt, record, spec), {**spec.counters(), **record.counters},
                opt._engine_choice[2], piece=record.shape, reason=member._why[name], stepped=record.stepped == member._iteration,
            )  # fmt: skip


def _read_tensors(opt: NamedOptimizer, record: TensorState, spec: Spec) -> dict[str, Tensor]:
    missing = {name: slot for name, slot in spec.stored_slots(record.shape).items() if name not in record.state}
    fresh = {name: opt._engine.allocate(slot) for name, slot in missing.items()}  # a setting has changed: a step would make it
    return {name: make_tensor(np.asarray(part)) for name, part in flatten_components({**record.state, **fresh}).items()}


def _save_member(opt: NamedOptimizer, family: list[NamedOptimizer]) -> SavedOptimizer:
    if not is_registered(opt.spec) or classes.make_class(opt.spec) is not type(opt):
        raise ValueError(f"{opt._owner}: only registered optimizers can be saved; rlx_optim.register(Rule) makes one")
    settings, specs = opt._settings, opt._specs()

    def values(given: Mapping[str, Any], spec: Spec) -> SavedSettings:
        return SavedSettings(spec.values(), [name for name, value in given.items() if callable(value)])

    def use(given: Any) -> Any:
        if not isinstance(given, NamedOptimizer):
            return given
        return OTHERWISE if given is opt.otherwise else family.index(given)

    groups = [
        Group(values({**settings.given, **g.overrides}, spec), g.match, use(g.use), list(g.overrides))
        for g, spec in zip(settings.groups, specs, strict=False)
    ]
    return SavedOptimizer(opt.spec.name, values(settings.given, specs[-1]), groups)


# ---- from a snapshot ----------------------------------------------------------------------------------------------------
def optimizer_from(snapshot: Snapshot, engine: Any, precision: str, given: Mapping[str, Any]) -> NamedOptimizer:
    """The optimizer a snapshot was taken of. `given`: what was marked as a callable, once more."""
    stored = find_state_type(snapshot)
    owed = [select_callables(snapshot, depth, given) for depth in range(len(snapshot.members))]
    line = find_otherwise_line(snapshot)
    made: dict[int, NamedOptimizer] = {}
    for index in reversed(range(len(snapshot.members))):
        behind = made[line[line.index(index) + 1]] if index in line[:-1] else None
        made[index] = _make_member(snapshot, index, owed[index], behind, made, engine, precision)
    opt = made[0]
    reached = list(opt._family())
    opt._used += tuple(made[index] for index in sorted(made) if made[index] not in reached)  # no pattern leads there
    restore(made, snapshot.parameters, snapshot.iteration, stored)
    opt._skipped = snapshot.skipped
    return opt


def find_otherwise_line(snapshot: Snapshot) -> list[int]:
    """The first optimizer, its `otherwise`, that one's and so on; the others are used by groups or by single parameters."""
    used = {group.use for member in snapshot.members for group in member.groups}
    line = [0]
    for index in range(1, len(snapshot.members)):
        if index not in used and (line == [0] or classes.spec_class(snapshot.members[line[-1]].optimizer).otherwise_default):
            line.append(index)
    return line


def find_state_type(snapshot: Snapshot) -> str:
    """The type of the state, and so of the parameters that are stepped here. What is not done here is refused."""
    types: dict[str, str] = {}
    for name, p in snapshot.parameters.items():
        if p.split:
            raise CheckpointError(f"{name!r} is split into {p.pieces} of shape {p.piece}, which the named API does not do")
        if snapshot.members[p.member].values_of(p.group).extra.get("maximize"):
            raise CheckpointError(f"{name!r} is maximized, which the named API does not do")
        refuse_evaluation(name, p)
        if not p.tensors:
            types["float64" if p.dtype == "float64" else "float32"] = f"{name!r} is {p.dtype}"
        for slot, each in p.tensors.items():
            if each.dtype.kind == "f":
                types[each.dtype.name] = f"{slot} of {name!r} is {each.dtype}"
    if len(types) > 1:
        raise CheckpointError(f"{', '.join(types.values())}; one optimizer of the named API steps one type")
    return next(iter(types), "float32")


def refuse_evaluation(name: str, p: Parameter) -> None:
    if TRAINED in p.tensors:
        raise CheckpointError(
            f"{name!r} was saved in evaluation mode, which torch alone has: load it there and save it after opt.train()"
        )


def select_callables(snapshot: Snapshot, depth: int, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the caller gave again for a member and for each of its groups; all that is marked must be there, and no more."""
    member, last = snapshot.members[depth], depth == len(snapshot.members) - 1
    for _ in range(depth):
        given = given.get("otherwise", {})
    if last and "otherwise" in given:
        raise TypeError("load: the checkpoint has no such otherwise")
    how, title = "load(path, " + "otherwise=dict(" * depth + "{}" + ")" * depth + ")", spec_class(member.optimizer).title
    own = {k: v for k, v in given.items() if k not in ("groups", "otherwise")}
    demand_callables(title, member.values.callables, member.values, own, how.format("NAME=…"))
    per_group: dict[str, dict[str, Any]] = {k: dict(v) for k, v in given.get("groups", {}).items()}
    if unknown := set(per_group) - {str(group.match) for group in member.groups}:
        raise TypeError(f"load: the checkpoint has no group {min(unknown)!r}")
    for group in member.groups:
        key = str(group.match)
        marked = [name for name in group.values.callables if name in group.overrides]
        again = how.format(f"groups={{{key!r}: dict(NAME=…)}}")
        demand_callables(f"{title}, group {key!r}", marked, group.values, per_group.setdefault(key, {}), again)
    return own, [per_group[str(group.match)] for group in member.groups]


def demand_callables(title: str, marked: list[str], values: SavedSettings, given: Mapping[str, Any], how: str) -> None:
    """Refuse what was not marked as a callable, and a marked NAME that is not given; `how` to give it."""
    if unknown := set(given) - set(marked):
        raise TypeError(
            f"load: {title} has no {min(unknown)!r} that was a callable when it was saved; set other hyperparameters afterwards"
        )
    for name in marked:
        if name not in given:
            raise CheckpointError(
                f"{title}: {name} was a callable when it was saved (then worth {values.hyperparameters[name]!r}); "
                f"give it, or a number, again: {how.replace('NAME', name)}"
            )


def _make_member(
    snapshot: Snapshot, index: int, given: Any, otherwise: NamedOptimizer | None, made: Mapping[int, NamedOptimizer],
    engine: Any, precision: str,
) -> NamedOptimizer:  # fmt: skip
    """One of the family, without state."""
    member, (own, per_group) = snapshot.members[index], given
    listed: dict[int, list[str]] = {}
    for name, p in snapshot.parameters.items():
        if p.member == index and p.group is not None:
            listed.setdefault(p.group, []).append(glob.escape(name))
    groups = [
        {"match": listed.get(i, []) if group.match is None else group.match, "use": made.get(group.use, group.use)}  # type: ignore[arg-type]
        | {name: group.values.hyperparameters[name] for name in group.overrides} | per_group[i]
        for i, group in enumerate(member.groups)
    ]  # fmt: skip
    kind = classes.make_class(spec_class(member.optimizer))
    if otherwise is None and any(group.use == OTHERWISE for group in member.groups):
        raise CheckpointError(f"a group of {kind.__name__} goes to otherwise, and there is none")
    try:
        Settings(kind.spec, member.values.hyperparameters | own, groups)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(f"the settings are refused: {problem}") from None
    one = object.__new__(kind)  # not through its own __init__, which has opinions about `otherwise`
    NamedOptimizer.__init__(
        one, **member.values.hyperparameters | own, groups=groups, engine=engine, precision=precision,
        nonfinite=snapshot.nonfinite, skip_above=snapshot.skip_above, otherwise=otherwise,
    )  # fmt: skip
    one._guard.take(snapshot.window)
    return one


def restore(members: Mapping[int, NamedOptimizer], parameters: Mapping[str, Parameter], iteration: int, stored: str) -> None:
    """Give optimizers the parameters of a snapshot. stored: the type of their state."""
    for member in members.values():
        member._store(stored)
        member._iteration = iteration
    for name, p in parameters.items():
        member = members[p.member]
        groups, specs = member._settings.groups, member._specs()
        record = TensorState(name, p.shape, len(groups) if p.group is None else p.group)
        if record.group < len(groups):
            groups[record.group].matched = True
        fill_record(record, specs[record.group], p, member)
        if p.stepped:
            record.stepped = iteration
        member._records[name], member._why[name] = record, p.reason


def fill_record(record: TensorState, spec: Spec, p: Parameter, opt: NamedOptimizer) -> None:
    """A record's buffers, of the engine's own making, with the state of a snapshot in them; what it has none of starts anew."""
    record.counters, record.t = dict(p.counters), p.step
    for name, (slot,) in p.used(spec).items():
        buffer = record.state[name] = opt._engine.allocate(slot)
        if p.storage_of(name) != slot.storage:
            fill_buffer(opt._engine, buffer, p.values(name))
            continue
        for key, each in flatten_components({name: buffer}).items():
            np.copyto(each, p.tensors[key].read())
    record.init_state(spec, opt._engine.allocate)
