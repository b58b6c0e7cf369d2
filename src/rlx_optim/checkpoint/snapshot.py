"""Everything there is to save, the same for every front end: a `Snapshot`, and whether it fits together.

A front end makes a Snapshot of its optimizer and is restored from one; tensors are fetched when they are written or read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Self

import numpy as np

from .. import random, storage
from ..guard import check_sigmas, window_error
from ..numpy.optimizer import NONFINITE
from ..registry import spec_class
from ..rounding import LOW
from ..routing import quote
from ..spec import KEY, TRAINED, Shape, Slot, Spec
from ..splits import WHOLE, Split, exact, part, shapes_of, slots_of, stored
from .format import CODES, CheckpointError, Tensor, make_tensor
from .reader import is_whole_number

DTYPES = ("float32", "float64", "bfloat16", "float16")
#: what slots are kept in, by the type of their arrays
STORED = {np.dtype(storage.Words.types[dtype]): kind for dtype, kind in storage.STORED.items()}


@dataclasses.dataclass
class SavedSettings:
    """Every hyperparameter of a group; those that were given as functions; what the front end keeps beside them."""

    hyperparameters: dict[str, Any]
    callables: list[str] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Group:
    """Parameters with values of their own: by glob, by globs, or (None) those that name this group.

    use: where it sends them: "own", "otherwise", the optimizer of this index, or None where that is decided as usual.
    """

    values: SavedSettings
    match: str | list[str] | None = None
    use: str | int | None = None
    overrides: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class SavedOptimizer:
    """An optimizer, the `otherwise` of the one before it, or one that groups use."""

    optimizer: str
    values: SavedSettings
    groups: list[Group] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, optimizer: str, values: Sequence[SavedSettings]) -> Self:
        """With a group for all values but the first."""
        first = values[0].hyperparameters
        groups = [Group(each, overrides=[k for k, v in each.hyperparameters.items() if v != first[k]]) for each in values[1:]]
        return cls(optimizer, values[0], groups)

    def values_of(self, group: int | None) -> SavedSettings:
        return self.values if group is None else self.groups[group].values

    @functools.cached_property
    def specs(self) -> dict[int | None, Spec]:
        """By group; making them checks the values."""
        kind = spec_class(self.optimizer)
        return {i: kind(**self.values_of(i).hyperparameters) for i in (None, *range(len(self.groups)))}


@dataclasses.dataclass
class Parameter:
    """One parameter: who steps it, how often it was, and its state by the rule's names."""

    member: int
    group: int | None
    shape: Shape
    step: int
    tensors: dict[str, Tensor]
    counters: dict[str, float] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    pieces: int = 1  # the rule sees it as so many tensors
    piece: Shape = ()  # of this shape; its own, if it is not split; the first's, if they differ
    reason: str = ""  # for its member
    stepped: bool = False  # already, in the iteration that has not ended
    parts: tuple[int, ...] = ()  # how long the pieces are along an axis, where that is said
    generator: Any = None  # in older files: of each piece two words of 32 bits that noise is drawn by
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)  # what a user keeps in a state dict beside ours

    @property
    def split(self) -> bool:
        return self.piece != self.shape

    @property
    def way(self) -> Split:
        """How it is split."""
        return self.parts or self.pieces

    def slots(self, spec: Spec) -> dict[str, tuple[Slot, ...]]:
        """The slots of its pieces: of one where they are equal."""
        return slots_of(spec, self.shape, self.parts) if self.parts else slots_of(spec, self.piece, WHOLE)

    def used(self, spec: Spec) -> dict[str, tuple[Slot, ...]]:
        """Those that there is state for, now or before a setting changed."""
        slots = self.slots(spec)
        slots = slots if self.tensors.keys() <= self.arrays(slots).keys() else list_possible_state(spec, self)[0]
        return {name: each for name, each in slots.items() if name in self.tensors}

    def kept(self, slots: Mapping[str, tuple[Slot, ...]]) -> dict[str, tuple[Slot, ...]]:
        """Slots as the file has them: exact where it has numbers, whatever the settings say."""
        plain = {name for name, each in self.tensors.items() if each.dtype.kind == "f"}
        return {name: exact(each) if name in plain else each for name, each in slots.items()}

    def storage_of(self, slot: str) -> str:
        """What a slot is kept in."""
        return STORED.get(self.tensors[slot].dtype, storage.EXACT)

    def arrays(self, slots: Mapping[str, tuple[Slot, ...]]) -> dict[str, tuple[Shape, str]]:
        """The tensors of slots in the file, by name: shape and type; and the low half of a bfloat16 parameter, if it is there."""
        low = {LOW: ((*self.shape, 2), "uint8")} if LOW in self.tensors and self.dtype == "bfloat16" else {}
        return low | {
            name + end: (self.stored(part(each, end)), dtype)
            for name, each in slots.items()
            for end, dtype in storage.COMPONENTS[each[0].storage].items()
        }

    def values(self, name: str) -> np.ndarray:
        """A slot's values, in whatever they are kept."""
        kind = self.storage_of(name)
        found = [self.tensors[name + end].read() for end in storage.COMPONENTS[kind]]
        if not kind:
            return found[0]
        if len(found) > 1:  # the scales of a split parameter may have another shape than its codes
            found[1] = found[1].reshape(*found[0].shape[:-1], -1)
        return np.asarray(storage.decode(storage.NUMPY, storage.Quantized(kind, *found)))

    def stored(self, slots: tuple[Slot, ...]) -> Shape:
        """The shape of a slot in the file."""
        if self.parts:
            return stored(slots, self.shape, self.parts)
        (slot,) = slots
        if not self.split:
            return slot.shape
        return self.shape if slot.shape == self.piece else (self.pieces, *slot.shape)


@dataclasses.dataclass
class Snapshot:
    """Everything there is to save."""

    members: list[SavedOptimizer]
    parameters: dict[str, Parameter]
    iteration: int = 0
    skipped: int = 0
    nonfinite: str = "propagate"
    front_end: str = "named"
    written_by: str = ""
    saved_ns: int = 0
    skip_above: float | None = None
    window: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # what skip_above judges by

    def spec(self, parameter: Parameter) -> Spec:
        return self.members[parameter.member].specs[parameter.group]

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the file."""
        return {f"{name}/{slot}": each for name, p in self.parameters.items() for slot, each in p.tensors.items()}


# ---- whether it fits an optimizer ---------------------------------------------------------------------------------------
def check_names(snapshot: Snapshot, needed: Set[str], known: Set[str], hint: str = "") -> None:
    """Refuse a file that lacks parameters which an optimizer steps, or has others."""
    lacking, extra = needed - snapshot.parameters.keys(), snapshot.parameters.keys() - known
    says = [f"no state for {quote(lacking)}"] * bool(lacking) + [f"state for {quote(extra)}, unknown here"] * bool(extra)
    if says:
        raise CheckpointError(f"the checkpoint has {' and '.join(says)}{hint}")


def check_fit(name: str, p: Parameter, shape: Shape, wide: bool) -> None:
    """Refuse a parameter of another shape, and float64 state where float32 is kept."""
    if p.shape != shape:
        raise CheckpointError(f"{name!r} has shape {p.shape} in the checkpoint, expected {shape}")
    for slot, each in p.tensors.items():
        if each.dtype.itemsize > 4 and not wide:
            raise CheckpointError(f"state {slot!r} of {name!r} is float64, expected float32, which would lose bits")


# ---- whether it fits together -------------------------------------------------------------------------------------------
CORRUPT = "The checkpoint is corrupt or from another model"


def describe_wrong_shape(key: str, name: str, found: Shape, expected: Shape) -> str:
    """What is said of state of another shape, by every front end."""
    return f"state {key!r} of {name!r} has shape {found}, expected {expected}. {CORRUPT}"


def describe_missing(key: str, name: str, kind: str = "state") -> str:
    """What is said of state that is not there."""
    return f"{kind} {key!r} of {name!r} is missing. {CORRUPT}"


def check_snapshot(snapshot: Snapshot) -> None:
    """Refuse what could not be gone on with: settings out of range, state that is missing, too much or of another shape."""
    if not snapshot.members:
        raise CheckpointError("the manifest names no optimizer")
    if snapshot.nonfinite not in NONFINITE:
        raise CheckpointError(f"the manifest: 'nonfinite' cannot be {snapshot.nonfinite!r:.80}")
    try:
        check_sigmas("the manifest", snapshot.skip_above)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(str(problem)) from None
    if wrong := window_error(snapshot.window):
        raise CheckpointError(f"the manifest: 'skip_window': {wrong}")
    for index, member in enumerate(snapshot.members):
        _check_member(member)
        for group in member.groups:
            if isinstance(group.use, int) and not (index < group.use < len(snapshot.members) and not group.overrides):
                raise CheckpointError(f"a group of {member.optimizer} uses optimizer {group.use}, which it cannot")
            if isinstance(group.use, int) and any(isinstance(g.use, int) for g in snapshot.members[group.use].groups):
                raise CheckpointError(f"a group of {member.optimizer} uses optimizer {group.use}, which hands on in turn")
    for name, p in snapshot.parameters.items():
        _check_parameter(snapshot, p, name)


def _check_member(member: SavedOptimizer) -> None:
    try:
        for place, spec in member.specs.items():
            member.values_of(place).hyperparameters = spec.values()  # a field that an older version did not have has its default
    except (TypeError, ValueError) as problem:
        raise CheckpointError(f"the file's settings are refused: {problem}") from None
    fields = spec_class(member.optimizer).fields
    for values in (member.values, *(group.values for group in member.groups)):
        if unknown := set(values.callables) - set(fields):
            raise CheckpointError(f"{member.optimizer}: unknown hyperparameter {min(unknown)!r} is marked as a callable")
    for group in member.groups:
        if unknown := set(group.overrides) - set(fields):
            raise CheckpointError(f"{member.optimizer}: a group sets unknown {min(unknown)!r}")


def _check_parameter(snapshot: Snapshot, p: Parameter, name: str) -> None:
    what = f"parameter {name!r}"
    if p.member >= len(snapshot.members):
        raise CheckpointError(f"{what} is stepped by optimizer {p.member}, and there are {len(snapshot.members)}")
    member = snapshot.members[p.member]
    if p.group is not None and p.group >= len(member.groups):
        raise CheckpointError(f"{what} is in group {p.group} of {member.optimizer}, which has {len(member.groups)}")
    if p.dtype not in DTYPES:
        raise CheckpointError(f"{what}: its dtype cannot be {p.dtype!r:.80}; known are {', '.join(DTYPES)}")
    whole = p.pieces * math.prod(p.piece) == math.prod(p.shape) and (p.split or p.pieces == 1)
    if p.parts:
        try:
            shapes = shapes_of(p.shape, p.parts)
            whole = len(shapes) == p.pieces and shapes[0] == p.piece and p.split
        except ValueError:
            whole = False
    if not whole:
        raise CheckpointError(f"{what}: {p.pieces} pieces of shape {p.piece} are not its shape {p.shape}")
    _check_state(member.specs[p.group], p, name)


def _check_state(spec: Spec, p: Parameter, owner: str) -> None:
    what, slots, counters = f"parameter {owner!r}", p.slots(spec), spec.counters()
    for name in [name for name, each in slots.items() if each[0].meaning == KEY and name not in p.tensors]:
        p.tensors[name] = make_tensor(_read_older_key(p, what).reshape(p.stored(slots[name])))
    parts = p.arrays(p.kept(slots))
    for kind, needed, given in (("state", parts, p.tensors), ("counter", counters, p.counters)):
        if lacking := set(needed) - set(given):
            raise CheckpointError(describe_missing(min(lacking), owner, kind))
    if left := (set(p.tensors) - set(parts)) | (set(p.counters) - set(counters)):
        slots, known = list_possible_state(spec, p)
        parts = p.arrays(p.kept(slots))
        if left := left - set(parts) - set(known):
            raise CheckpointError(f"state {min(left)!r} of {owner!r} is unknown to {spec.title}. {CORRUPT}")
    for name, allowed in spec.counter_ranges.items():
        try:
            allowed.validated(what, f"counter {name!r}", p.counters.get(name, allowed.default))
        except (TypeError, ValueError) as problem:
            raise CheckpointError(str(problem)) from None
    for name, each in p.tensors.items():
        shape, dtype = parts[name]
        if each.shape != shape:
            raise CheckpointError(describe_wrong_shape(name, owner, each.shape, shape))
        fits = each.dtype == storage.Words.types[dtype] if dtype else each.dtype in CODES and each.dtype.kind == "f"
        if not fits:
            expected = dtype or "float32 or float64"
            raise CheckpointError(f"state {name!r} of {owner!r} is {each.dtype}, expected {expected}. {CORRUPT}")


def _read_older_key(p: Parameter, what: str) -> np.ndarray:
    """`random.key` of each piece, as an older file has it."""
    pairs = p.generator if isinstance(p.generator, list) and len(p.generator) == p.pieces else [None]
    if not all(isinstance(each, list) and len(each) == 2 and all(is_whole_number(n, 2**32 - 1) for n in each) for each in pairs):
        raise CheckpointError(f"{what} has no key of its noise: its generator cannot be {p.generator!r:.80}")
    return np.array(list(map(random.split_key, p.generator)), np.float64 if p.dtype == "float64" else np.float32)


def list_possible_state(spec: Spec, p: Parameter) -> tuple[dict[str, tuple[Slot, ...]], dict[str, float]]:
    """Slots and counters that were in use before a changeable field was changed: they are kept, in case it changes back. p: of
    a torch optimizer in evaluation mode, where gradients are taken."""
    slots, counters = p.slots(spec), dict(spec.counters())
    shapes = shapes_of(p.shape, p.parts) if p.parts else [p.piece]
    slots |= {} if spec.evaluated is None else {TRAINED: tuple(map(Slot, shapes))}
    for variant in _list_variants(spec):
        slots |= p.slots(variant)
        counters |= variant.counters()
    return slots, counters


def _list_variants(spec: Spec) -> Iterator[Spec]:
    for name, field in spec.fields.items():
        for value in () if field.fixed else (True, False, None, 0.5):
            try:
                yield spec.replace(**{name: value})
            except (TypeError, ValueError):
                continue
