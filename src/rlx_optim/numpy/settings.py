"""Hyperparameters as the user gave them: numbers or callables of the iteration, overridden by groups of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..spec import REQUIRED, Field, Spec

RESERVED = ("match", "use")


def is_schedule(field: Field, value: Any) -> bool:
    return callable(value) and field.annotation != "Callable[..., Any] | None"


class GroupOverrides:
    """Overrides for the names that match a glob pattern, or one of several, as written by the user."""

    def __init__(self, owner: str, fields: Mapping[str, Field], given: Any):
        match: Any = given.get("match") if isinstance(given, Mapping) else None
        self.patterns: list[str] = [match] if isinstance(match, str) else match
        if not isinstance(self.patterns, list) or not all(isinstance(pattern, str) for pattern in self.patterns):
            raise TypeError(f'{owner}: a group must be a dict with a glob pattern under "match", got {given!r}')
        unknown = set(given) - set(fields) - set(RESERVED)
        if unknown:
            known = ", ".join([*RESERVED, *fields])
            raise TypeError(
                f"{owner}: group {given['match']!r} sets unknown {', '.join(sorted(map(repr, unknown)))}; known are {known}"
            )
        self.match: str | list[str] = given["match"]
        self.use = given.get("use")  # "own", "otherwise", an optimizer, or None: decide as usual
        self.overrides = {name: value for name, value in given.items() if name not in RESERVED}
        self.matched = False

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


class Settings:
    """One spec per group (the last entry is for names no group matches), evaluated at an iteration."""

    def __init__(self, kind: type[Spec], given: Mapping[str, Any], groups: Sequence[Any] | None):
        self.kind, self.owner = kind, kind.__name__
        unknown = set(given) - set(kind.fields)
        if unknown:
            known = ", ".join(kind.fields)
            raise TypeError(f"{self.owner}: unknown hyperparameter {', '.join(sorted(map(repr, unknown)))}; known are {known}")
        self.given = {name: self._clean(name, given.get(name, field.default)) for name, field in kind.fields.items()}
        if isinstance(groups, Mapping):
            raise TypeError(f"{self.owner}: groups must be a list of dicts, got one dict; write groups=[{dict(groups)!r}]")
        if groups is not None and not isinstance(groups, Iterable):
            raise TypeError(f"{self.owner}: groups must be a list of dicts, got {groups!r:.80}")
        self.groups = [GroupOverrides(self.owner, kind.fields, group) for group in groups or ()]
        self._evaluated: tuple[Any, list[Spec]] = (None, [])
        self.fusion_keys: tuple[Any, ...] = ()
        self.version = 0  # moves when a structural field does
        self.specs(0)

    def assign(self, name: str, value: Any, stepped: bool, iteration: int) -> None:
        """Change one hyperparameter; on refusal nothing has changed."""
        before = self.given[name]
        if stepped and self.kind.fields[name].fixed and value != before:
            raise ValueError(
                f"{self.owner}: {name} shapes the state and cannot change after the first step (is {before!r}, got {value!r}); "
                "make a new optimizer"
            )
        self.given[name] = self._clean(name, value)
        try:
            self._evaluated = (None, [])
            self.specs(iteration)
        except (TypeError, ValueError):
            self.given[name] = before
            self._evaluated = (None, [])
            raise

    def _clean(self, name: str, value: Any) -> Any:
        field = self.kind.fields[name]
        if value is REQUIRED:
            raise TypeError(f"{self.owner}: {name} is required ({field.expected})")
        return value if is_schedule(field, value) else field.validated(self.owner, name, value)

    def specs(self, iteration: int) -> list[Spec]:
        """The spec of each group at this iteration. Schedules are called once an iteration, and their values are checked."""
        at, specs = self._evaluated
        if at == iteration or (specs and at == "constant"):
            return specs
        sets = [{**self.given, **group.overrides} for group in self.groups] + [self.given]
        schedules: dict[Any, Any] = {}
        specs = [
            self.kind(**{name: self._now(name, value, iteration, schedules) for name, value in given.items()}) for given in sets
        ]
        self._evaluated = (iteration if schedules else "constant", specs)
        fusion_keys = tuple(spec.fusion_key() for spec in specs)
        if fusion_keys != self.fusion_keys:
            self.fusion_keys, self.version = fusion_keys, self.version + 1
        return specs

    def _now(self, name: str, value: Any, iteration: int, called: dict[Any, Any]) -> Any:
        field = self.kind.fields[name]
        if not is_schedule(field, value):
            return value
        if field.fixed:
            raise TypeError(f"{self.owner}: {name} shapes the state and cannot be a schedule")
        if id(value) not in called:
            called[id(value)] = value(iteration)
        return called[id(value)]

    def group_for(self, name: str) -> GroupOverrides | None:
        """The first group whose pattern matches."""
        return next((group for group in self.groups if group.matches(name)), None)

    def group_of(self, name: str) -> int:
        """The index of that group; that of the rest if there is none."""
        group = self.group_for(name)
        if group is None:
            return len(self.groups)
        group.matched = True
        return self.groups.index(group)

    def unmatched(self) -> list[str | list[str]]:
        return [group.match for group in self.groups if not group.matched]
