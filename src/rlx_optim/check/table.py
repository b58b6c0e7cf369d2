"""What a check is and what comes of it.

A check is a function of a subject that gives the number it saw. It fails by raising `Wrong`, and says by `Skip` why it cannot be
asked. One that gives nothing has not run, which is an error: nothing passes unseen.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

STATUS = ("passed", "failed", "skipped", "error")
KINDS = ("torch", "optax")
CHECKS: dict[tuple[str, tuple[str, ...]], Check] = {}  # by name and kinds, in the order in which they run


class Skip(Exception):
    """Why a check cannot be asked of this optimizer, or here."""


class Wrong(Exception):
    """What does not hold, and the number that says so."""

    def __init__(self, message: str, seen: Any = None):
        super().__init__(message)
        self.seen = seen


@dataclasses.dataclass(frozen=True)
class Check:
    """reason: why it matters, in a line. taste: good people differ, so it is shown and not counted. ranks: needs processes."""

    name: str
    reason: str
    kinds: tuple[str, ...]
    run: Callable[[Any], Any]
    quick: bool = True
    taste: bool = False
    ranks: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """One check of one optimizer. seen: the number, or the word, that it saw; note: what is wrong, or why it was skipped."""

    name: str
    status: str
    seen: float | str | None
    note: str
    reason: str
    taste: bool
    seconds: float

    @property
    def ok(self) -> bool:
        return self.taste or self.status in ("passed", "skipped")

    @property
    def shown(self) -> str:
        if self.seen is None or isinstance(self.seen, str):
            return self.seen or ""
        return f"{self.seen:.1e}" if isinstance(self.seen, float) and self.seen else f"{self.seen:g}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found of one optimizer."""

    target: str
    settings: dict[str, Any]
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether something was seen and nothing that counts is wrong."""
        return any(each.status == "passed" for each in self.results) and all(each.ok for each in self.results)

    def counts(self) -> dict[str, int]:
        counted = {status: sum(each.status == status and not each.taste for each in self.results) for status in STATUS}
        return counted | {"taste": sum(each.taste and each.status in ("failed", "error") for each in self.results)}

    def as_dict(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(each) for each in self.results]
        for row in rows:
            row["seen"] = str(row["seen"]) if isinstance(row["seen"], float) and not math.isfinite(row["seen"]) else row["seen"]
        settings = {
            name: value if isinstance(value, (int, float, str, list)) else repr(value) for name, value in self.settings.items()
        }
        return {"target": self.target, "settings": settings, "ok": self.ok, "counts": self.counts(), "results": rows}


def check(
    name: str, reason: str, kind: str = "both", *, quick: bool = True, taste: bool = False, ranks: bool = False
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Enter a function into the table."""

    def enter(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        kinds = KINDS if kind == "both" else (kind,)
        CHECKS[name, kinds] = Check(name, reason, kinds, run, quick, taste, ranks)
        return run

    return enter


def chosen(kind: str, *, quick: bool = False, only: Sequence[str] = (), ranks: int = 0) -> Iterator[Check]:
    """The checks for that kind of optimizer. only: names, or patterns like resume*."""
    for each in CHECKS.values():
        named = any(fnmatch.fnmatchcase(each.name, word) for word in only)
        if kind in each.kinds and (named if only else (each.quick or not quick) and (ranks > 1 or not each.ranks)):
            yield each


def ran(each: Check, subject: Any) -> Result:
    """Run one check; whatever is raised is what it found."""
    began = time.perf_counter()
    seen: Any = None
    try:
        with subject.undisturbed():
            seen = each.run(subject)
        status, note = ("passed", "") if seen is not None else ("error", "the check ended without having seen anything")
    except Skip as why:
        status, note = "skipped", str(why)
    except Wrong as wrong:
        status, seen, note = "failed", wrong.seen, str(wrong)
    except Exception as problem:
        status, note = "error", f"{type(problem).__name__}: {(str(problem).strip() or '(no message)').splitlines()[0][:200]}"
    seen = float(seen) if isinstance(seen, float) else seen if seen is None or isinstance(seen, int) else str(seen)
    taste = each.taste and each.name not in subject.asked
    return Result(each.name, status, seen, note, each.reason, taste, round(time.perf_counter() - began, 3))


def told(subject: Any, checks: Iterable[Check], tick: Callable[[str], None] = lambda name: None) -> Report:
    """Run checks and give the report."""
    results = []
    for each in checks:
        tick(each.name)
        results.append(ran(each, subject))
    return Report(subject.target, subject.settings, tuple(results))
