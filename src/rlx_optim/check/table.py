"""The framework: a subject is asked checks, some of them case by case; each gives a result, and all results are the report.

A check is a function of a subject (and of a case) that returns what it saw: a number, a word, "" where there is nothing to show,
or one of these with a note. It fails by raising `Wrong`, and says by `Skip` why it cannot be asked. One that returns None has not
run, which is an error: nothing passes unseen.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

STATUS = ("passed", "failed", "skipped", "error")
KINDS = ("torch", "optax", "rule")
CHECKS: dict[tuple[str, tuple[str, ...]], Check] = {}  # by name and kinds, in the order in which they run
Run = Callable[..., Any]


class Skip(Exception):
    """Why a check cannot be asked of this optimizer, or here."""


class Wrong(Exception):
    """What does not hold, and the number that says so."""

    def __init__(self, message: str, seen: Any = None):
        super().__init__(message)
        self.seen = seen


def expect(holds: bool, otherwise: str, seen: Any = "") -> Any:
    """Return what was seen where it holds; raise Wrong where it does not."""
    if not holds:
        raise Wrong(otherwise, None if seen == "" else seen)
    return seen


@dataclasses.dataclass(frozen=True)
class Check:
    """reason: why it matters, in a line. hint: how to mend what it finds. cases: gives its cases for a subject, each a check.
    taste: good people differ, so it is shown and not counted. ranks: needs processes. engine: where a case runs. essential: the
    others are asked only where it passes."""

    name: str
    reason: str
    kinds: tuple[str, ...]
    run: Run
    hint: str = ""
    cases: Callable[[Any, Check], Iterable[Check]] | None = None
    quick: bool = True
    taste: bool = False
    ranks: bool = False
    engine: str = ""
    essential: bool = False

    def case(self, engine: str, *given: Any, name: str = "") -> Check:
        """Return the check of one case, which its function gets after the subject."""
        run = lambda subject: self.run(subject, *given)  # noqa: E731
        return dataclasses.replace(self, name=name or self.name, engine=engine, run=run, cases=None)


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
    engine: str = ""

    @property
    def ok(self) -> bool:
        return self.taste or self.status in ("passed", "skipped")

    @property
    def skipped(self) -> bool:
        return self.status == "skipped"

    @property
    def check(self) -> str:
        """The name, as rows of `check_rule` call it."""
        return self.name

    @property
    def shown(self) -> str:
        if self.seen is None or isinstance(self.seen, str):
            return self.seen or ""
        return f"{self.seen:.1e}" if isinstance(self.seen, float) and self.seen else f"{self.seen:g}"

    @property
    def word(self) -> str:
        bad = self.status in ("failed", "error")
        return "taste" if self.taste and bad else dict(zip(STATUS, ("ok", "WRONG", "skip", "ERROR"), strict=True))[self.status]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found of one optimizer; `str` is a table."""

    target: str
    settings: dict[str, Any]
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether something was seen and nothing that counts is wrong."""
        return any(each.status == "passed" for each in self.results) and all(each.ok for each in self.results)

    def counts(self) -> dict[str, int]:
        counted = {status: sum(each.status == status and not each.taste for each in self.results) for status in STATUS}
        return counted | {"taste": sum(each.word == "taste" for each in self.results)}

    def summary(self) -> str:
        """Return the result in a line."""
        counts = self.counts()
        wrong = counts["failed"] + counts["error"]
        taste = f"; {counts['taste']} more are matters of taste" if counts["taste"] else ""
        return f"{counts['passed'] + wrong} checks ran, {wrong or 'none'} of them wrong, {counts['skipped']} skipped{taste}"

    def lines(self) -> Iterator[str]:
        """Yield a line a check, and under it what is wrong and why that matters; what was said before is not repeated."""
        yield f"{self.target}: {'fit to be used' if self.ok else 'something is wrong'}"
        wide, engines = (max(len(getattr(each, name)) for each in self.results) for name in ("name", "engine"))
        said = set[str]()
        for each in self.results:
            where = f"  {each.engine:{engines}}" if engines else ""
            yield f"  {each.word:5} {each.name:{wide}}{where}  {each.shown[:40] if each.note else each.shown}".rstrip()
            why = f"Why it matters: {each.reason}." if each.status in ("failed", "error") else ""
            for text in (each.note, why):
                if text and text not in said:
                    yield f"        {text}"
                elif text and text == each.note:
                    yield "        The same as above."
                said.add(text)
        yield f"{self.target}: {self.summary()}"

    def __str__(self) -> str:
        return "\n".join(
            part for line in self.lines() for part in textwrap.wrap(line, 96, subsequent_indent=" " * 8, break_on_hyphens=False)
        )

    def as_dict(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(each) for each in self.results]
        for row in rows:
            del row["engine"]
            row["seen"] = str(row["seen"]) if isinstance(row["seen"], float) and not math.isfinite(row["seen"]) else row["seen"]
        return {"target": self.target, "settings": self.list_settings(), "ok": self.ok, "counts": self.counts(), "results": rows}

    def list_settings(self) -> dict[str, Any]:
        """Return the settings beside the defaults, as JSON can hold them."""
        return {
            name: value if isinstance(value, (int, float, str, list)) else repr(value) for name, value in self.settings.items()
        }


class RuleReport(Report):
    """What `check_rule` found; `str` is a table."""

    @property
    def rule(self) -> str:
        return self.target

    @property
    def rows(self) -> tuple[Result, ...]:
        return self.results

    def as_dict(self) -> dict[str, Any]:
        def number(row: Result) -> float | None:
            return row.seen if isinstance(row.seen, (int, float)) and math.isfinite(row.seen) else None

        rows = [{"check": r.name, "engine": r.engine, "ok": r.ok, "seen": number(r), "note": r.note} for r in self.rows]
        return {"rule": self.rule, "ok": self.ok, "rows": rows}


def check(reason: str, *kinds: str, name: str = "", **settings: Any) -> Callable[[Run], Run]:
    """Enter a function into the table, under its own name unless another is given; without kinds it is for every library.
    settings: the other fields of a `Check`."""

    def enter(run: Run) -> Run:
        own, called = kinds or KINDS[:2], name or run.__name__.strip("_").replace("_", "-")
        CHECKS[called, own] = Check(called, reason, own, run, **settings)
        return run

    return enter


def choose_checks(subject: Any, *, quick: bool = False, only: Sequence[str] = (), ranks: int = 0) -> list[Check]:
    """Return the checks to run, case by case and in order. only: names, or patterns like resume*; an essential check is always
    among them."""
    asked = [each for each in CHECKS.values() if subject.kind in each.kinds]
    known = [case for each in asked for case in (each.cases(subject, each) if each.cases else [each])]
    if not only:
        return [each for each in known if (each.quick or not quick) and (ranks > 1 or not each.ranks)]
    named = [any(fnmatch.fnmatchcase(each.name, word) for word in only) for each in known]
    if not any(named):
        names = ", ".join(dict.fromkeys(each.name for each in known))
        raise ValueError(f"no check {subject.described} is called {', '.join(only)}; known are {names}")
    return [each for each, wanted in zip(known, named, strict=True) if wanted or each.essential]


def run_check(each: Check, subject: Any) -> Result:
    """Run one check; whatever is raised is what it found."""
    began = time.perf_counter()
    seen: Any = None
    try:
        with subject.undisturbed():
            subject.refuse_check(each)
            seen = each.run(subject)
        seen, note = seen if isinstance(seen, tuple) else (seen, "")
        status, note = ("passed", note) if seen is not None else ("error", "the check ended without having seen anything")
    except Skip as why:
        status, note = "skipped", str(why)
    except Wrong as wrong:
        status, seen, note = "failed", wrong.seen, "; ".join(filter(None, (str(wrong), each.hint)))
    except Exception as problem:
        status, note = subject.crash, subject.explain_crash(problem, each.hint)
    seen = float(seen) if isinstance(seen, float) else seen if seen is None or isinstance(seen, int) else str(seen) or None
    taste = each.taste and each.name not in subject.asked
    return Result(each.name, status, seen, note, each.reason, taste, round(time.perf_counter() - began, 3), each.engine)


def run_checks(subject: Any, checks: Iterable[Check], tick: Callable[[str], None] = lambda name: None) -> Any:
    """Run checks, no further than an essential one that fails, and return the report."""
    results = []
    for each in checks:
        tick(each.name)
        results.append(run_check(each, subject))
        if each.essential and not results[-1].ok:
            break
    return subject.report(subject.target, subject.settings, tuple(results))
