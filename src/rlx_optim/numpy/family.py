"""What an optimizer and its `otherwise` do together: check the tensors of a call, find who takes each, step them in bundles.

`optimizer` puts the named-step API on top of this.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..engine import Engine
from ..engines import check_engine, get_engine
from ..guard import Guard
from ..pointers import PointerTable
from ..program import reduces_over_all
from ..routing import OTHERWISE, OWN, Choice, decide, quote
from ..spec import Shape, Spec
from ..stats import Row
from ..stepping import Grouping, Part, StepPart, TensorState, check_axes, list_stats, make_part, run_part
from . import validation
from .settings import GroupOverrides, Settings

log = logging.getLogger("rlx_optim")


class SingleStep(NamedTuple):
    """One tensor, to be stepped by itself. shape: of the arrays, which may be flat; version: of the settings."""

    part: Part
    pointers: PointerTable
    version: int
    shape: Shape


class Item(NamedTuple):
    """One tensor of a call, checked."""

    member: Member
    record: TensorState
    param: np.ndarray
    grad: np.ndarray
    why: str  # it came to this member

    @property
    def name(self) -> str:
        return self.record.name


class Work(NamedTuple):
    """What a call steps, checked: each tensor's member and record, its arrays, and where parameters and gradients begin.
    why: how each came to its member, where some are new or their settings have changed."""

    entries: Sequence[tuple[Member, TensorState]]
    params: Sequence[np.ndarray]
    grads: Sequence[np.ndarray]
    places: tuple[Sequence[int], Sequence[int]]
    why: Sequence[str] = ()


class Member:
    """One of a family: its own settings and records, the engine of all."""

    spec: ClassVar[type[Spec]]
    otherwise: Any
    _settings: Settings  # first, so that __getattr__ has it

    def __init__(
        self,
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        engine: Any = "auto",
        precision: str = "float32",
        nonfinite: str = "propagate",
        skip_above: float | None = None,
        otherwise: Member | None = None,
        **hyperparameters: Any,
    ):
        self._settings = Settings(self.spec, hyperparameters, groups)
        self.nonfinite, self.skip_above = nonfinite, skip_above
        if otherwise is not None and not isinstance(otherwise, Member):
            raise TypeError(f"{self._owner}: otherwise must be an optimizer such as AdamW(lr=3e-4), or None, got {otherwise!r}")
        check_engine(engine, precision)
        self._engine_choice = (engine, precision, "float32")  # what `get_engine` takes
        self._guard = Guard(np)
        self._belongs = False  # whether it is the `otherwise` of another, or used by a group of it
        self.__dict__["otherwise"] = otherwise
        if otherwise is not None:
            otherwise._join(self)
        self._used: tuple[Any, ...] = ()  # those that groups send tensors to
        self._used = self._join_groups(self._settings.groups)
        self._iteration = self._skipped = 0
        self._records: dict[str, TensorState] = {}
        self._why: dict[str, str] = {}  # how a name came here
        self._asked = False  # whether the steps of this iteration are to say what they do
        self._rows: list[Row] = []  # what they did
        self._grouping: Grouping | None = None  # of the records, as long as these are the same
        self._numbers: dict[Any, dict[str, Any]] = {}
        self._told: set[str] = set()
        self._waiting: dict[str, Item] = {}  # steps that are taken when the iteration ends: of those that sum over all tensors
        self._converted = ""
        #: the arrays stepped last, where there is another point to evaluate at
        self._seen: dict[str, Any] | None = {} if any(member.spec.evaluated for member in self._family()) else None

    def _join_groups(self, groups: Sequence[GroupOverrides]) -> tuple[Member, ...]:
        """Take in the optimizers that groups use, beside `otherwise`."""
        found: list[Member] = []
        for group in groups:
            use, what = group.use, f'{self._owner}: group {group.match!r}: "use"'
            if use == OTHERWISE and self.otherwise is None:
                raise ValueError(f'{what} is "otherwise", but there is no otherwise')
            if use in (None, OWN, OTHERWISE):
                continue
            if not isinstance(use, Member):
                raise ValueError(f'{what} must be "otherwise", "own" or an optimizer such as Lion(lr=1e-4), got {use!r}')
            if use._children():
                raise ValueError(f"{what} must be an optimizer that hands nothing on, with otherwise=None, got {use!r}")
            if group.overrides:
                raise ValueError(f"{what} is an optimizer, which has its own {quote(group.overrides)}; say it there")
            if use is not self.otherwise and use not in found:
                use._join(self)
                found.append(use)
        return tuple(found)

    def _join(self, owner: Member) -> None:
        """Belong to another optimizer: run on its engine, follow its iterations."""
        if self._belongs:
            raise ValueError(
                f"{owner._owner}: {self!r} is already the otherwise of another optimizer, or used by one of its groups, and each "
                "needs its own; give a fresh one"
            )
        if any(member._records or member._iteration for member in self._family()):
            raise ValueError(f"{owner._owner}: {self._owner} has already stepped; give a fresh optimizer")
        self._belongs = True
        for member in self._family():
            member._engine_choice = owner._engine_choice

    @property
    def _owner(self) -> str:
        return type(self).__name__

    @functools.cached_property
    def _engine(self) -> Engine:
        return get_engine(*self._engine_choice)  # not before it is needed: it may import a compiler

    def _settle(self, names: Sequence[str], arrays: Sequence[np.ndarray]) -> None:
        """The first step decides the type of all parameters: state and arithmetic follow it."""
        stored = self._engine_choice[2]
        if all(array.dtype == stored for array in arrays):
            return
        known = any(member._records for member in self._family())
        types = dict(zip((array.dtype.name for array in arrays), names, strict=True))
        if known or len(types) > 1:
            expected = f"this optimizer steps {stored} ones" if known else "one optimizer steps one type"
            kinds = ", ".join(f"{name!r} is {kind}" for kind, name in types.items() if kind != stored or not known)
            raise TypeError(f"{self._owner}: {kinds}, but {expected}; give each type an optimizer of its own")
        for member in self._family() if arrays[0].dtype != "float32" else ():
            for spec in member._specs():
                if spec.state_dtype != "float32":
                    raise TypeError(
                        f"{self._owner}: {names[0]!r} is {arrays[0].dtype}, and so is its state; "
                        f"state_dtype={spec.state_dtype!r} is for float32 parameters"
                    )
        choice = (*self._engine_choice[:2], arrays[0].dtype.name)
        get_engine(*choice)  # refuses what it does not take, before anything has changed
        for member in self._family():
            member._store(choice[2])

    def _store(self, stored: str) -> None:
        self._engine_choice = (*self._engine_choice[:2], stored)
        self.__dict__.pop("_engine", None)

    def _children(self) -> tuple[Any, ...]:
        """Return those that tensors may be handed to."""
        return self._used if self.otherwise is None else (self.otherwise, *self._used)

    def _family(self) -> Iterator[Self]:
        """Yield this one and all that its tensors may be handed to."""
        yield self
        for child in self._children():
            yield from child._family()

    def _find_record(self, name: str) -> tuple[Self, TensorState] | None:
        """Return who steps what has this name, and its record; None where it was not stepped yet."""
        for member in self._family():
            if (record := member._records.get(name)) is not None:
                return member, record
        return None

    # ---- checking: nothing below is written until all of it has passed -----------------------------------------------
    def _checked(self, name: Any, param: Any, grad: Any, shape: Any) -> Item:
        shape = validation.check_pair(self._owner, name, param, grad, shape)
        member, record, why = self._lookup(name, shape)
        if record.stepped == member._iteration or name in self._waiting:
            raise ValueError(
                f"{self._owner}: {name!r} was already stepped in iteration {self._iteration}; call end_iteration() between steps"
            )
        return Item(member, record, param, grad, why)

    def _lookup(self, name: str, shape: Shape) -> tuple[Self, TensorState, str]:
        """The record of a name, or a new one that is not kept yet."""
        if found := self._find_record(name):
            member, record = found
            if record.shape != shape:
                raise ValueError(f"{self._owner}: {name!r} came with shape {shape}, but its state is for {record.shape}")
            return member, record, member._why[name]
        member, why = self._route(name, shape)
        return member, TensorState(name, shape, member._settings.group_of(name)), why

    def _route(self, name: str, shape: Shape) -> tuple[Self, str]:
        """Which of the family takes a tensor, and why where it is not the first."""
        group, other = self._settings.group_for(name), self.otherwise
        wish = None
        if group is not None and group.use is not None:
            group.matched = True
            wish = group.use if isinstance(group.use, str) else group.use._choice(), f"matches {group.match!r}"
        behind = None if other is None else other._choice()
        choice, why = decide(self._owner, name, shape, self._choice(), behind, wish)
        if choice is not behind:
            return choice.rule, why
        member, later = other._route(name, shape)
        return member, later or why

    def _choice(self) -> Choice:
        return Choice(self._specs()[-1], self)

    def _left_out(self, grads: Sequence[np.ndarray], scale: float, loss: float | None) -> bool:
        """Whether skip_above leaves out this step."""
        if self.skip_above is None:
            return False
        with np.errstate(all="ignore"):
            norm = np.float64(scale) * math.hypot(*(float(np.linalg.norm(grad)) for grad in grads))
            bad = bool(self._guard.bad(self.skip_above, abs(norm), loss))
        self._skipped += bad
        return bad

    def _passes(self, names: Iterable[str], grads: Sequence[np.ndarray]) -> bool:
        """Whether the step may be taken; asks about finiteness only where the policy needs to know."""
        if self.nonfinite == "propagate" or self._engine.all_finite(grads):
            return True
        if self.nonfinite == "raise":
            bad = [name for name, grad in zip(names, grads, strict=True) if not np.isfinite(grad).all()]
            raise ValueError(f"{self._owner}: gradient of {quote(bad)} is not finite; nothing was stepped")
        self._skipped += 1
        return False

    def _collect(self, items: Sequence[Item]) -> Work:
        """Check tensors beside each other, and those that are new beside their settings."""
        names, params, grads = ([getattr(item, what) for item in items] for what in ("name", "param", "grad"))
        validation.check_overlap(self._owner, names, params, grads)
        for member in self._family():
            member._specs()  # a schedule's bad value is refused here
        self._settle(names, params)
        entries = [(item.member, item.record) for item in items]
        return Work(entries, params, grads, (validation.locate(params), validation.locate(grads)), [item.why for item in items])

    # ---- doing ----------------------------------------------------------------------------------------------------
    def _run(self, work: Work, scale: float, loss: float | None = None) -> None:
        """Step what was collected, unless it is to be left out."""
        if not self._passes((record.name for _, record in work.entries), work.grads) or self._left_out(work.grads, scale, loss):
            return
        if work.why:
            self._init_records(work)
        for member in self._family():
            chosen = [i for i, (owner, _) in enumerate(work.entries) if owner is member]
            if chosen:
                sides: tuple[Any, ...] = tuple([side[i] for i in chosen] for side in (work.params, work.grads, *work.places))
                member._step_own([work.entries[i][1] for i in chosen], sides, scale)
        if self._seen is not None:
            self._seen |= zip([record.name for _, record in work.entries], map(weakref.ref, work.params), strict=True)

    def _init_records(self, work: Work) -> None:
        """Make the state of those that are new, and what a changed setting asks for."""
        for (member, record), param in zip(work.entries, work.params, strict=True):
            spec = member._specs()[record.group]
            if spec.decay == "hyperball" and not record.t and record.size and not param.any():
                raise spec.zero_norm_error(record.name, f"groups=[{{'match': {record.name!r}, 'decay': 'decoupled'}}]")
        for member, record in work.entries:
            record.init_state(member._specs()[record.group], self._engine.allocate)
        for (member, record), why in zip(work.entries, work.why, strict=True):
            record.version = member._settings.version
            member._records[record.name], member._why[record.name] = record, why
            if advice := member._specs()[record.group].advice(record.counters):
                member._tell("advice", f"{record.name!r} {advice}")

    def _step_own(self, records: Sequence[TensorState], sides: tuple[Any, ...], scale: float) -> None:
        """Step this member's records. sides: parameters, gradients, and where each of both begins."""
        params, grads, at, grads_at = sides
        specs, first = self._specs(), records[0]
        if len(records) == 1 and first.size and not reduces_over_all(specs[first.group], first.shape):
            return self._step_alone(first, params[0], grads[0], at[0], grads_at[0], scale)
        grouping = self._group()
        if len(records) == len(grouping.records) and all(map(operator.is_, records, grouping.records)):
            chosen: tuple[int, ...] = tuple(range(len(records)))
        else:
            row_of = {id(record): row for row, record in enumerate(grouping.records)}
            chosen = tuple(row_of[id(record)] for record in records)
        grouping.pointers.set(np.array(chosen), at, grads_at)
        parts = grouping.find(chosen, specs, self._settings.fusion_keys, self._asked)
        rows = dict(zip(chosen, range(len(chosen)), strict=True))
        for part, some, where in parts:
            ps, gs = ([side[rows[row]] for row in where] for side in (params, grads))
            run_part(part, self._engine, specs, self._numbers, ps, gs, scale, some)
            for row in where:  # at once: should another part fail, this one is not stepped again
                grouping.records[row].stepped = self._iteration
        for record in records:
            if not record.size:  # nothing to compute, but the step counts
                record.t, record.stepped = record.t + 1, self._iteration
        if log.isEnabledFor(logging.DEBUG):
            how = f"{self._engine.name} in {len(parts)} parts"
            log.debug("%s: %d of %d tensors by %s", self._owner, len(records), len(grouping.records), how)
        if self._asked:
            self._rows += list_stats(parts, {record: record.name for record in records})

    def _step_alone(self, record: TensorState, param: np.ndarray, grad: np.ndarray, at: int, grad_at: int, scale: float) -> None:
        """Step one record, whose rule does not reduce over all tensors."""
        alone = self._alone(record, param)
        alone.pointers.set_one(at, grad_at)
        run_part(alone.part, self._engine, self._specs(), self._numbers, (param,), (grad,), scale)
        record.stepped = self._iteration
        if self._asked:
            self._rows += list_stats([StepPart(alone.part, None, (0,))], {record: record.name})

    def _alone(self, record: TensorState, param: np.ndarray) -> SingleStep:
        """The part of one tensor."""
        found: SingleStep | None = record.alone
        version = self._settings.version
        if found is None or found.version != version or found.part.bundle.with_stats != self._asked or found.shape != param.shape:
            pointers, specs = PointerTable(1), self._specs()
            check_axes([record], specs[record.group])
            part = make_part([(0, record)], specs, pointers, self._asked)
            found = record.alone = SingleStep(part, pointers, version, param.shape)
        return found

    def _group(self) -> Grouping:
        """Who finds which records are stepped together."""
        found, records = self._grouping, self._records.values()
        if found is None or len(found.records) != len(records) or not all(map(operator.is_, found.records, records)):
            found = self._grouping = Grouping(self._engine, list(records), PointerTable(len(records)))
        return found

    def _specs(self) -> list[Spec]:
        """The spec of each group, this iteration."""
        return self._settings.specs(self._iteration)

    def _tell(self, topic: str, message: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            warnings.warn(f"{self._owner}: {message}", stacklevel=5)
