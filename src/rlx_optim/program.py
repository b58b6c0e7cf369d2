"""Programs: an update as data. `trace` runs a spec's `update` and `commit` once, on names instead of arrays.

A program is a tuple of steps. A `Pass` goes once over the coordinates of every tensor: it loads arrays, applies a rule (or
several, made one) in registers, stores and reduces. An `Each` is a function of numbers, one per tensor. Values are known by
number, so what is read and when is settled here: engines execute, they do not interpret names. What could mean different things
on different engines (a value read after it was overwritten, a result that is dropped, an unknown reduction) is refused.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import hashlib
import itertools
import linecache
import math
from collections.abc import Iterable, Mapping
from typing import Any

from . import ops, stats
from .language import REDUCTIONS, LanguageError, Reduction, Rule, checked, signature, signature_of_numbers
from .spec import Shape, Slot, Spec

#: what numbers, one per tensor, can be reduced by: it leaves alone what is the same for all
OVER_TENSORS = ("all_max", "all_mean")
Drop = tuple[int, ...]  # which of the parameter's last two axes an array lacks


@dataclasses.dataclass(frozen=True)
class Pass:
    """A rule, once over the coordinates of every tensor. domain: the axes that these coordinates lack.

    takes and gives: the values that are the rule's arguments (arrays, then numbers, each once) and results. stores: (value,
    place), the place a buffer's name, or the value's own number for scratch. reduces: (result, value, how).
    """

    rule: Rule
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    domain: Drop
    arrays: tuple[int, ...]
    numbers: tuple[int, ...]
    stores: tuple[tuple[int, str | int], ...]
    reduces: tuple[tuple[int, int, Reduction], ...]


@dataclasses.dataclass(frozen=True)
class Each:
    """A function on numbers, one per tensor. reductions: (result, how) of those that become one for all tensors."""

    function: Rule
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    reductions: tuple[tuple[int, Reduction], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """inputs: the number of each value there is at first, by name: "p", "g", the slots, the numbers. drops: of every array, by
    number. buffers: the last values of p and the slots, by name. given: what else the caller may ask for at the end, by name."""

    steps: tuple[Pass | Each, ...]
    inputs: Mapping[str, int]
    drops: Mapping[int, Drop]
    buffers: Mapping[str, int]
    given: Mapping[str, int]
    names: Mapping[int, str]

    @functools.cached_property
    def passes(self) -> list[Pass]:
        return [step for step in self.steps if isinstance(step, Pass)]

    @property
    def has_reduction(self) -> bool:
        """Whether it reduces anything, so that a part of a tensor does not know enough."""
        return any(step.reduces for step in self.passes)

    @functools.cached_property
    def reduction_over_all(self) -> str | None:
        """The first of its results that is reduced over all tensors of the optimizer, as `name="how"`."""
        found = [(result, how.name) for step in self.passes for result, _, how in step.reduces if how.everything]
        found += [(n, how.name) for step in self.steps if isinstance(step, Each) for n, how in step.reductions]
        return next((f'{self.names[result]}="{name}"' for result, name in found), None)

    def check(self, title: str, names: Iterable[str], shapes: Iterable[Shape]) -> None:
        """Refuse tensors that have not the axes which are reduced."""
        axis = min((axis for drop in self.drops.values() for axis in drop), default=0)
        for name, shape in zip(names, shapes, strict=True):
            if len(shape) < -axis:
                lines = "rows" if axis == -1 else "columns"
                raise LanguageError(
                    f"{title}: {name!r} has shape {shape} and no {lines}, which its update reduces or keeps; let `slots` or "
                    "`takes` tell such tensors apart"
                )

    def place(self, number: int) -> str | None:
        """The buffer that a value lies in: p's, g's, a slot's."""
        return next((name for name, each in self.inputs.items() if each == number and (each in self.drops)), None)

    def traffic(self) -> int:
        """Arrays of the parameter's size that a step reads and writes: times the bytes of an element, its memory traffic."""
        full = sum(not self.drops[i] for step in self.passes for i in step.arrays)
        return full + sum(not self.drops[i] for step in self.passes for i, _ in step.stores)

    def sums(self, shape: Shape, dim: int) -> list[int]:
        """How many numbers each measurement of a tensor adds up over ranks, one after the other, if axis `dim` is cut."""
        found = []
        for step in self.passes:
            if step.reduces:
                found.append(sum(_count_added(shape, step.domain, how, dim) for _, _, how in step.reduces))
        return found


def has_reduction(spec: Spec, shape: Shape) -> bool:
    """Whether the step of such a tensor reduces it, so that a part of it does not know enough."""
    return not spec.matrix and trace(spec, spec.slots(shape)).has_reduction


def reduces_over_all(spec: Spec, shape: Shape) -> bool:
    """Whether the step of such a tensor reduces all tensors of its optimizer, which must then be stepped together."""
    return not spec.matrix and trace(spec, spec.slots(shape)).reduction_over_all is not None


def commit_has_reduction(spec: Spec) -> bool:
    """Whether the commit of a matrix rule reduces p or u, so that a shard of them does not know enough."""
    return trace(spec, {}, "move", dict.fromkeys((*spec.committed, "rate"), 0.0)).has_reduction


def _count_added(shape: Shape, domain: Drop, how: Reduction, dim: int) -> int:
    if how.axis is None:
        return 1
    axis = reduced_axis(domain, how)
    if dim - len(shape) != axis:
        return 0
    return math.prod(n for i, n in enumerate(shape) if i - len(shape) not in (*domain, axis))


def reduced_axis(domain: Drop, how: Reduction) -> int:
    """The axis of the parameter that a reduction takes away: along rows it is the last that the domain has."""
    if how.axis == -2:
        return -2
    return -2 if -1 in domain else -1


# ---- tracing ----------------------------------------------------------------------------------------------------------------
class Opaque:
    """Stands for what an update may pass on but not compute with: every operator refuses."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> Any:
        raise LanguageError("an update computes with what belongs into a rule")

    def _operator(self, *others: Any) -> Any:
        return self._refuse(*others)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __matmul__ = _operator
    __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __float__ = __getitem__ = __len__ = __iter__ = __abs__ = __pow__ = _operator


class NotSent(LanguageError):
    """An update reads p where p was not sent to."""


class Unsent(Opaque):
    """Stands for p where it was not sent to: it has the shape and the type of g, and its values are refused."""

    __slots__ = ("gradient", "title")
    readable = frozenset(("shape", "ndim", "dtype", "device", "size", "numel", "dim"))

    def __init__(self, title: str, gradient: Any):
        self.title, self.gradient = title, gradient

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotSent(f"{self.title}.update reads p, which was not sent here")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gradient, name) if name in self.readable else self._refuse()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        cls("An", None)._refuse()

    __array__ = __array_ufunc__ = __array_function__ = _refuse
    __and__ = __or__ = __rand__ = __ror__ = __invert__ = __pos__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _refuse
    __rmatmul__ = __rpow__ = __int__ = __index__ = __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Symbol(Opaque):
    """A value while an update is traced."""

    __slots__ = ("drop", "name", "number", "owner")

    def __init__(self, owner: Recorder, name: str, drop: Drop | None):
        self.owner, self.name, self.drop, self.number = owner, name, drop, owner.count
        owner.count += 1

    @property
    def is_array(self) -> bool:
        return self.drop is not None

    def _refuse(self, *_: Any) -> Any:
        raise LanguageError(
            f"{self.owner.title}.update computes with {self.name!r} itself; computing belongs into a rule (E.map) or, for "
            "numbers, into a function (E.each), and choices depend on structural hyperparameters alone"
        )


class Values(dict[str, Any]):
    """Everything an update may name: p, g, the state, the numbers. Never changed in place: `set` gives a new one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def set(self, **values: Any) -> Values:
        return Values({**self, **values})


class Recorder:
    """The engine that an update is traced with: it has `map` and `each`, and writes down what they are given."""

    def __init__(self, title: str, counters: Iterable[str] = ()):
        self.title, self.count, self.counters = title, 0, frozenset(counters)
        self.steps: list[Pass | Each] = []
        self.symbols: dict[int, Symbol] = {}
        self.current: dict[str, int] = {}  # the value that each buffer holds

    def symbol(self, name: str, drop: Drop | None) -> Symbol:
        made = Symbol(self, name, drop)
        self.symbols[made.number] = made
        return made

    def argument(self, rule: Rule, name: str, x: Values) -> Symbol:
        where = f"{rule.__code__.co_filename}:{rule.__code__.co_firstlineno}: {rule.__name__}"
        if name not in x:
            known = ", ".join(sorted(x))
            raise LanguageError(f"{where} takes {name!r}, which {self.title} does not have; it has {known}")
        found = x[name]
        if found is None:
            raise LanguageError(f"{where} takes {name!r}, which {self.title}.scalars gives as None with these settings")
        if not isinstance(found, Symbol):
            raise LanguageError(
                f"{where} takes {name!r}, which is {found!r}; numbers come from `scalars`, so that they are checked"
            )
        if found.number != self.current.get(found.name, found.number):
            raise LanguageError(
                f"{where} reads {name!r} as it was before a map wrote it; use the values that this map gave (x = E.map(…))"
            )
        return found

    def refuse_counters(self, rule: Rule, gives: Iterable[str]) -> None:
        """A counter is the same for all tensors of a cohort, so that what a rule gives would be lost."""
        if moved := [name for name in gives if name in self.counters]:
            raise LanguageError(
                f"{rule.__qualname__} gives {moved[0]!r}, which is a counter: `scalars` gives its next value; what differs from "
                "tensor to tensor is a slot with drop=None"
            )

    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        takes, gives = signature(rule)
        where = f"{rule.__code__.co_filename}:{rule.__code__.co_firstlineno}: {rule.__name__}"
        values = [self.argument(rule, name, x) for name in takes]
        arrays = [v for v in values if v.is_array]
        if not arrays:
            raise LanguageError(f"{where} takes no array; a function of numbers is run by E.each")
        drops: list[Drop] = [v.drop for v in arrays if v.drop is not None]
        domain = tuple(axis for axis in drops[0] if all(axis in drop for drop in drops))
        for name, kind in reduce.items():
            if name not in gives:
                raise LanguageError(f"{where} does not return {name!r}, which is to be reduced")
            if kind not in REDUCTIONS:
                raise LanguageError(f"{where}: unknown reduction {name}={kind!r}; known are {', '.join(REDUCTIONS)}")
            if name in self.current:
                raise LanguageError(f"{where}: {name!r} is a buffer; give what is reduced another name")
            if domain and (REDUCTIONS[kind].axis == -2 or len(domain) > 1):
                raise LanguageError(f"{where}: {name}={kind!r}: what it reduces lacks that axis already")
        if "p" in gives and rule is not subtract:
            raise LanguageError(f"{where} returns p, which the commit alone moves; return the direction u, or write `commit`")
        self.refuse_counters(rule, gives)
        results = {name: self.symbol(name, domain) for name in gives}
        reduces, given = [], {}
        for name, value in results.items():
            if name not in reduce:
                given[name] = value
                continue
            how = REDUCTIONS[reduce[name]]
            left = None if how.axis is None else (*domain, reduced_axis(domain, how))
            given[name] = self.symbol(name, left)
            reduces.append((given[name].number, value.number, how))
        stores: list[tuple[int, str | int]] = []
        for name, value in results.items():
            if name in reduce:
                continue
            home = name in self.current and self.symbols[self.current[name]].drop == domain
            if name in self.current and not home:
                raise LanguageError(f"{where}: {name!r} is a buffer of another shape than what it returns")
            stores.append((value.number, name if home else value.number))
            if home:
                self.current[name] = value.number
        into, out = tuple(v.number for v in values), tuple(value.number for value in results.values())
        read = tuple(dict.fromkeys(v.number for v in arrays))
        numbers = tuple(dict.fromkeys(v.number for v in values if not v.is_array))
        self.steps.append(Pass(rule, into, out, domain, read, numbers, tuple(stores), tuple(reduces)))
        return x.set(**given)

    def each(self, function: Rule, x: Values, **reduce: str) -> Values:
        takes, gives = signature_of_numbers(function)
        for name, kind in reduce.items():
            if name not in gives or kind not in OVER_TENSORS:
                raise LanguageError(
                    f"{function.__qualname__}: {name}={kind!r}; of the numbers it gives ({', '.join(gives)}) there may be one "
                    f"for all tensors, by {' or '.join(OVER_TENSORS)}"
                )
        values = [self.argument(function, name, x) for name in takes]
        if wrong := [v.name for v in values if v.is_array]:
            raise LanguageError(
                f"{function.__qualname__} takes {wrong[0]!r}, which is an array; a function of coordinates is run by E.map"
            )
        if wrong := [name for name in gives if name in self.current and self.symbols[self.current[name]].is_array]:
            raise LanguageError(f"{function.__qualname__} gives {wrong[0]!r}, which is an array; arrays are given by E.map")
        self.refuse_counters(function, gives)
        results = {name: self.symbol(name, None) for name in gives}
        self.current |= {name: value.number for name, value in results.items() if name in self.current}
        reductions = tuple((results[name].number, REDUCTIONS[kind]) for name, kind in reduce.items())
        self.steps.append(Each(function, tuple(v.number for v in values), tuple(v.number for v in results.values()), reductions))
        return x.set(**results)


def trace(spec: Spec, slots: Mapping[str, Slot], what: str = "step", numbers: Mapping[str, Any] | None = None) -> Program:
    """The program of a spec for tensors with these slots.

    what: "step", all of it; "change", all but the last subtraction: p is as it was and `change` is given; "move", the commit
    alone, of a direction u that is an array; "commit", the same of one that comes in g's place, as engines take it; "observe",
    the second update of those that take estimates; "stats", a step that also gives what it did (`stats`). numbers: what `scalars`
    gives, where it is known already.
    """
    if what not in PARTS:
        raise ValueError(f"unknown program {what!r}; known are {', '.join(PARTS)}")
    numbers = spec.numbers(1, spec.counters()) if numbers is None else numbers
    key: Any = (type(spec), spec.fusion_key(), tuple((name, slot.drop, slot.storage) for name, slot in slots.items()), what)
    key = (*key, tuple((name, value is None) for name, value in numbers.items()))
    if key not in _traced:
        _traced[key] = _trace(spec, slots, what, numbers)
    return _traced[key]


_traced: dict[Any, Program] = {}
WHOLE = ("update", "mask", "commit")
#: the methods of a spec that each program consists of
PARTS = {"step": WHOLE, "change": WHOLE, "stats": WHOLE, "move": ("commit",), "commit": ("commit",), "observe": ("observe",)}


def _trace(spec: Spec, slots: Mapping[str, Slot], what: str, given: Mapping[str, Any]) -> Program:
    E = Recorder(type(spec).__name__, spec.counters())
    if both := [name for name in given if name in slots or name in ("p", "g", "u", "change")]:
        raise LanguageError(f"{E.title}: a number of `scalars` is called {both[0]!r}, which is an array of every step; rename it")
    counted_for_it = {"estimates"} if spec.observes else set()
    if what in ("step", "change", "stats") and (dead := E.counters - given.keys() - counted_for_it):
        name = min(dead)
        raise LanguageError(
            f"{E.title}.scalars does not give the counter {name!r}, which so never moves; it gives the next value of each, as in "
            f'{{"{name}": counters["{name}"] + 1}}'
        )
    arrays, second = {name: E.symbol(name, slot.drop) for name, slot in slots.items()}, "u" if what == "move" else "g"
    inputs = Values({"p": E.symbol("p", ()), second: E.symbol(second, ()), **arrays})
    E.current = {name: value.number for name, value in inputs.items() if name not in ("g", "u")}
    numbers = {name: None if value is None else E.symbol(name, None) for name, value in given.items()}
    x = inputs.set(**numbers)
    spec, before = _hide_varying(spec), E.current["p"]
    x = stats.measure_gradient(E, x) if what == "stats" else x.set(u=x.g) if what == "commit" else x
    for part in PARTS[what]:
        if part == "commit" and type(spec).commit is Spec.commit:
            for name, whose in (("u", "update"), ("step", "scalars")):
                if not isinstance(x.get(name), Symbol):
                    raise LanguageError(f"{E.title}.{whose} gives no {name}; the commit takes shrink·p + step·u from p")
        x = getattr(spec, part)(E, x)
        if not isinstance(x, Values):
            raise LanguageError(f"{E.title}.{part} must return the values that its last E.map or E.each gave, not {x!r:.80}")
        if E.current["p"] != before:
            raise LanguageError(f"{E.title}.{part} writes p; rules give the direction u, and the commit what is taken from p")
    x = stats.measure_change(E, x) if what == "stats" else x
    if what in ("step", "move", "commit", "stats"):
        x = E.map(subtract, x)
    for name, number in E.current.items():
        if x[name].number != number:
            raise LanguageError(f"{E.title}.update loses what a map gave for {name!r}; return the values that the last map gave")
    wanted = {name: x[name].number for name in {"change": ["change"], "stats": stats.list_wanted(x)}.get(what, [])}
    names = {number: value.name for number, value in E.symbols.items()}
    steps = _fuse_passes(E.steps, set(wanted.values()), names)
    steps = _recompute_quantized(steps, {name for name, slot in slots.items() if slot.storage}, set(wanted.values()), names)
    buffers = {name: number for name, number in E.current.items() if number != inputs[name].number}
    known = {name: value.number for name, value in {**inputs, **{k: v for k, v in numbers.items() if v is not None}}.items()}
    drops = {number: value.drop for number, value in E.symbols.items() if value.drop is not None}
    return Program(tuple(steps), known, drops, buffers, wanted, names)


class Unread(Opaque):
    """A hyperparameter that tensors of one pass may differ in, while an update is traced: only whether it is None is known."""

    def __init__(self, title: str, name: str):
        self.title, self.name = title, name

    def _refuse(self, *_: Any) -> Any:
        raise LanguageError(
            f"{self.title}.update reads {self.name!r}, in which the tensors of one pass may differ; give it to rules through "
            '`scalars`, or choose by a structural hyperparameter (flag, integer, choice) or by the slots there are ("m" in x)'
        )

    def __eq__(self, other: object) -> Any:
        return self._refuse()

    __hash__ = None  # type: ignore[assignment]


def _hide_varying(spec: Spec) -> Spec:
    """A spec as all tensors of a pass have it."""
    shared = object.__new__(type(spec))
    for name, value in spec.values().items():
        known = spec.fields[name].structural or value is None
        shared.__dict__[name] = value if known else Unread(type(spec).__name__, name)
    return shared


def subtract(p, change):  # type: ignore[no-untyped-def]
    p = p - change
    return p


# ---- passes that can be one ----------------------------------------------------------------------------------------------------
def _fuse_passes(steps: Iterable[Pass | Each], wanted: set[int], names: Mapping[int, str]) -> list[Pass | Each]:
    """Neighbours over the same coordinates become one pass, and what nobody reads from memory afterwards is not stored."""
    groups: list[list[Any]] = []
    for step in steps:
        if isinstance(step, Pass) and groups and all(isinstance(each, Pass) and _can_join(each, step) for each in groups[-1]):
            groups[-1].append(step)
        else:
            groups.append([step])
    read = [{n for each in group if isinstance(each, Pass) for n in each.arrays} for group in groups]
    out: list[Pass | Each] = []
    for i, group in enumerate(groups):
        later = set().union(*read[i + 1 :]) | wanted
        out.append(_join_passes(group, later, names) if isinstance(group[0], Pass) else group[0])
    return out


def _can_join(first: Pass, second: Pass) -> bool:
    reduced = {result for result, _, _ in first.reduces}
    return first.domain == second.domain and not reduced & {*second.arrays, *second.numbers}


def _join_passes(steps: list[Pass], later: set[int], names: Mapping[int, str]) -> Pass:
    """later: what is read from memory afterwards."""
    made = {n for step in steps for n in step.gives}
    arrays = tuple(dict.fromkeys(n for step in steps for n in step.arrays if n not in made))
    numbers = tuple(dict.fromkeys(n for step in steps for n in step.numbers))
    places = {place: n for step in steps for n, place in step.stores}  # the last to be stored in a buffer
    stores = tuple((n, place) for place, n in places.items() if isinstance(place, str) or n in later)
    reduces = tuple(each for step in steps for each in step.reduces)
    takes, gives = (*arrays, *numbers), (*(n for n, _ in stores), *(n for _, n, _ in reduces))
    if len(steps) == 1 and (takes, gives) == (steps[0].takes, steps[0].gives):
        return dataclasses.replace(steps[0], stores=stores)
    rule = _chain_rules([(step.rule, step.takes, step.gives) for step in steps], takes, gives, names)
    return Pass(rule, takes, gives, steps[0].domain, arrays, numbers, stores, reduces)


def _recompute_quantized(
    steps: list[Pass | Each], coded: set[str], wanted: set[int], names: Mapping[int, str]
) -> list[Pass | Each]:  # fmt: skip
    """Of state in fewer bits, which does not say exactly what it was made of: a pass that would read what one before has written
    computes it again, of the same, and is the one that writes it."""
    for j, second in enumerate(steps):
        for i, first in enumerate(steps[:j]):
            if not (isinstance(first, Pass) and isinstance(second, Pass)) or first.domain != second.domain:
                continue
            written = dict(first.stores)
            between = [step for step in steps[i + 1 : j] if isinstance(step, Pass)]
            touched = any(written.keys() & {*step.arrays} or step.stores for step in between)
            if touched or not any(place in coded and n in second.arrays for n, place in written.items()):
                continue
            later = {n for step in steps[j + 1 :] if isinstance(step, Pass) for n in step.arrays} | wanted
            steps[j] = _join_passes([dataclasses.replace(first, reduces=()), second], later, names)
            steps[i] = _join_passes([dataclasses.replace(first, stores=())], set(), names)
            return _recompute_quantized(steps, coded, wanted, names)
    return steps


def _chain_rules(calls: Any, takes: tuple[int, ...], gives: tuple[int, ...], names: Mapping[int, str]) -> Rule:
    """Rules one after the other as one, with a text of its own: compilers start from that. Every value gets a name of its own."""
    known: dict[int, str] = {}
    taken: set[str] = set(ops.SCALARS)

    def make_name(name: str) -> str:
        found = next(each for each in itertools.chain([name], (f"{name}{k}" for k in itertools.count(2))) if each not in taken)
        taken.add(found)
        return found

    for n in takes:
        known[n] = make_name(names[n])
    lines = []
    for rule, into, out in calls:
        read = checked(rule)
        local = {name: known[n] for name, n in zip(read.takes, into, strict=True)}
        for statement in read.tree.body:
            if isinstance(statement, ast.Assign):
                value = ast.unparse(_Renamed(local).visit(copy.deepcopy(statement.value)))
                (target,) = statement.targets
                local[target.id] = make_name(target.id)  # type: ignore[attr-defined]
                lines.append(f"    {local[target.id]} = {value}")  # type: ignore[attr-defined]
        known |= {n: local[name] for name, n in zip(read.gives, out, strict=True)}
    results = []
    last = {names[n]: n for n in gives}  # a result keeps its own name, if it is the last to have it
    for n in gives:
        name = names[n] if last[names[n]] == n else make_name(names[n]) if known[n] in results else known[n]
        if name != known[n]:
            lines.append(f"    {name} = {known[n]}")
        results.append(name)
    title = make_name("_then_".join(rule.__name__ for rule, _, _ in calls))
    text = f"def {title}({', '.join(known[n] for n in takes)}):\n" + "\n".join(lines) + f"\n    return {', '.join(results)}\n"
    file = f"<rlx_optim {title} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": calls[0][0].__module__} | {word: getattr(ops, word) for word in ops.RULE}
    exec(compile(text, file, "exec"), scope)
    made: Rule = scope[title]
    return made


@functools.cache
def reorder_arguments(rule: Rule, first: tuple[str, ...]) -> Rule:
    """A rule that takes these arguments before the others."""
    takes, gives = signature(rule)
    names = dict(enumerate((*takes, *gives)))
    into, out = tuple(range(len(takes))), tuple(range(len(takes), len(names)))
    return _chain_rules([(rule, into, out)], tuple(sorted(into, key=lambda n: names[n] not in first)), out, names)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)
