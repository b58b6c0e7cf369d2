"""Hyperparameters: what each is by default, what it may be, and what a change of it means. A rule's fields are made of these."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Field:
    """One hyperparameter: its default, its range, and what kind of thing it is.

    structural: its value picks the rule or the state, so tensors that differ in it never share a pass.
    fixed: the layout of the state depends on it, so it cannot change once a tensor has state.
    meaning: what it is, where the docstring of a class does not say it.
    """

    default: Any
    expected: str
    check: Callable[[Any], Any]
    annotation: str
    structural: bool = False
    fixed: bool = False
    meaning: str = ""

    @property
    def callable(self) -> bool:
        """Whether a function is the value itself, and never a schedule."""
        return self.annotation.startswith("Callable")

    def validated(self, owner: str, name: str, value: Any) -> Any:
        try:
            return self.check(value)
        except (OverflowError, TypeError, ValueError) as problem:
            kind = TypeError if isinstance(problem, TypeError) else ValueError
            raise kind(f"{owner}: {name} must be {self.expected}, got {value!r}") from None


REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from low to high, with these or without; infinite ones where `infinite` says so."""

    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    infinite: bool = False

    def check(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError
        x = float(value)
        above = x > self.low if self.open_low else x >= self.low
        below = x < self.high if self.open_high else x <= self.high
        if not (above and below and (self.infinite or math.isfinite(x))):  # a NaN fails both comparisons
            raise ValueError
        return x

    def __str__(self) -> str:
        lower = "" if self.low == -math.inf else f"{'>' if self.open_low else '>='} {self.low:g}"
        upper = "" if self.high == math.inf else f"{'<' if self.open_high else '<='} {self.high:g}"
        return " and ".join(filter(None, (lower, upper)))


def real(
    default: Any, low: float = 0.0, high: float = math.inf, *,
    open_low: bool = False, open_high: bool = False, infinite: bool = False, optional: bool = False,
) -> Any:  # fmt: skip
    """A number in a range; with optional=True also None, which is structural."""
    bounds = Range(low, high, open_low, open_high, infinite)
    words = ["a" if bounds.infinite else "a finite", "number", str(bounds), "or None" if optional else ""]

    def check(value: Any) -> float | None:
        return None if value is None and optional else bounds.check(value)

    return Field(default, " ".join(filter(None, words)), check, "float | None" if optional else "float")


def reals(default: tuple[float, ...], low: float = 0.0, high: float = math.inf, *, open_high: bool = False) -> Any:
    """A tuple of numbers, each in the same range. Lists are taken as tuples."""
    bounds, n = Range(low, high, open_high=open_high), len(default)

    def check(value: Any) -> tuple[float, ...]:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            raise TypeError
        values = tuple(value)
        if len(values) != n:
            raise ValueError
        return tuple(map(bounds.check, values))

    expected = f"{n} finite numbers{f', each {bounds}' if str(bounds) else ''}"
    return Field(default, expected, check, f"tuple[{', '.join(['float'] * n)}]")


def triples(default: Any, *names: str) -> Any:
    """Three numbers, several such threes, or a name; None too where that is the default. Lists are taken as tuples."""
    one = reals((0.0, 0.0, 0.0), -math.inf).check

    def check(value: Any) -> Any:
        if value in names if isinstance(value, str) else value is None and default is None:
            return value
        if isinstance(value, str):
            raise ValueError
        values = tuple(value)
        return tuple(map(one, values)) if values and all(hasattr(each, "__iter__") for each in values) else one(values)

    three, known = "tuple[float, float, float]", [*map(repr, names), *(["None"] if default is None else [])]
    expected = f"3 finite numbers, several such, or one of {', '.join(known)}"
    annotation = f"Literal[{', '.join(known)}] | {three} | Sequence[{three}]"
    return Field(default, expected, check, annotation)


def betas(first: float, second: float) -> Any:
    return reals((first, second), 0.0, 1.0, open_high=True)


def integer(default: int, low: int, *, fixed: bool = False) -> Any:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError
        if value < low:
            raise ValueError
        return int(value)

    return Field(default, f"an integer >= {low}", check, "int", structural=True, fixed=fixed)


def flag(default: bool | None, *, fixed: bool = False, optional: bool = False) -> Any:
    def check(value: Any) -> bool | None:
        if value is None and optional:
            return None
        if not isinstance(value, bool) and type(value).__name__ != "bool":  # numpy's bool too
            raise TypeError
        return bool(value)

    expected, annotation = ("True, False or None", "bool | None") if optional else ("True or False", "bool")
    return Field(default, expected, check, annotation, structural=True, fixed=fixed)


def choice(*options: str | None, fixed: bool = True) -> Any:
    """One of a few names; the first is the default."""
    names = ", ".join(repr(o) for o in options if o is not None)
    annotation = f"Literal[{names}]" + (" | None" if None in options else "")

    def check(value: Any) -> str | None:
        if not isinstance(value, str | None) or value not in options:
            raise ValueError
        return value

    expected = "one of " + ", ".join(repr(o) for o in options)
    return Field(options[0], expected, check, annotation, structural=True, fixed=fixed)


def function() -> Any:
    """A callable that is itself the value (never a schedule), or None."""

    def check(value: Any) -> Any:
        if value is not None and not callable(value):
            raise TypeError
        return value

    return Field(None, "callable or None", check, "Callable[..., Any] | None", structural=True)
