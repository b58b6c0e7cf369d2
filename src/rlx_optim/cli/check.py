"""`rlx-optim check`: is an optimizer fit to be used, and do the engines here speak the language of rules?

    rlx-optim check torch.optim:AdamW
    rlx-optim check mypackage:Lion --kwargs '{"lr": 1e-4}' --quick --html lion.html
    rlx-optim check optax:adamw --only jit,scan
    rlx-optim check adamw
    rlx-optim check mypackage.rules:AdaBelief --only "schedule*" --json
    rlx-optim check --language

A torch class or an optax factory runs through the conformance suite (`rlx_optim.check`). A rule (by its name here, or a Spec
class) is stepped on every engine that is here (`check_rule`). --language is in the repository's `lab/`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..check import CHECKS, FILES, check_optimizer, checks_of, found, missing
from ..check.page import page, summary
from ..check.rules import REASONS, RuleReport, check_rule
from ..check.table import Check, Report, Result
from ..named import list_optimizers
from ..registry import aliases, spec_class
from ..spec import Spec
from . import Problem, check_place, load_lab, one, progress, say, write_json


def target_of(name: str) -> Any:
    """A rule by its name here, or what PACKAGE:CLASS names."""
    if ":" not in name:
        return spec_class(one("optimizer", name, list_optimizers(), aliases()))
    try:
        return found(name)
    except ModuleNotFoundError as problem:
        extra = {"torch": "torch", "jax": "jax", "optax": "jax"}.get(problem.name or "")
        install = f'{problem.name} is not installed: pip install "rlx-optim[{extra}]"'
        raise Problem(f"{name}: {install if extra else problem}") from None
    except (ImportError, AttributeError, ValueError, SyntaxError) as problem:
        raise Problem(f"{name}: {problem}") from None


def list_all(as_json: bool) -> None:
    """Show every check."""
    for kind in FILES:
        if (why := missing(kind)) is None:
            checks_of(kind)
        else:
            say(f"{kind}: {why}", sys.stderr)
    known = [*CHECKS.values(), *(Check(name, reason, ("rule",), check_rule) for name, reason in REASONS.items())]
    if as_json:
        return write_json(
            [
                {"name": c.name, "kinds": c.kinds, "quick": c.quick, "taste": c.taste, "ranks": c.ranks, "reason": c.reason}
                for c in known
            ]
        )
    for c in known:
        marks = [word for word, on in {"a matter of taste": c.taste, "not quick": not c.quick, "--ranks": c.ranks}.items() if on]
        say(f"{c.name:21} {'+'.join(c.kinds):12} {c.reason}" + (f" ({', '.join(marks)})" if marks else ""))


def show(report: Report) -> None:
    """A line a check: the number it saw, and what is wrong."""
    wide = max(len(each.name) for each in report.results)
    for each in report.results:
        word = {"passed": "ok", "failed": "WRONG", "error": "ERROR", "skipped": "skip"}[each.status]
        word = "taste" if each.taste and each.status in ("failed", "error") else word
        say(f"  {word:5} {each.name:{wide}}  {each.shown[:40] if each.note else each.shown}".rstrip())
        if each.note:
            say(f"        {each.note}")
        if each.status in ("failed", "error"):
            say(f"        why it matters: {each.reason}")
    say(f"{report.target}: {summary(report)}")


def tabled(target: str, settings: dict[str, Any], rule: RuleReport) -> Report:
    """What was found of a rule, as the suite's report."""
    status = {True: "skipped", False: "passed"}
    rows = [
        Result(row.check, status[row.skipped] if row.ok else "failed", row.seen, row.note, row.engine, False, 0.0)
        for row in rule.rows
    ]
    return Report(target, settings, tuple(rows))


def settings_of(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as problem:
        raise Problem(f"--kwargs: {problem}: {text}") from None
    if not isinstance(given, dict):
        raise Problem(f'--kwargs must be an object, as {{"lr": 0.01}}, got {text}')
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def command(
    target: Annotated[
        str | None, typer.Argument(help="PACKAGE:CLASS, or a name of ours.", autocompletion=list_optimizers)
    ] = None,
    kwargs: Annotated[str, typer.Option(help="Settings beside the defaults, as JSON: '{\"lr\": 0.01}'.")] = "{}",
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what takes long.")] = False,
    only: Annotated[str, typer.Option(help="Names of checks, or patterns like resume*, comma-separated.")] = "",
    claimed: Annotated[str, typer.Option("--as", metavar="NAME", help="The rule that it claims to be.")] = "",
    ranks: Annotated[int, typer.Option(help="Also over that many processes: DDP and DTensor.", min=0)] = 0,
    as_html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show every check.")] = False,
    of_language: Annotated[
        bool, typer.Option("--language", help="In a checkout: every construct of the language on every engine.")
    ] = False,
) -> None:
    """Check any optimizer: a torch class, an optax factory, a rule on every engine here."""
    if (target is None) != (of_language or listing):
        raise Problem("give an optimizer (torch.optim:AdamW, optax:adamw, adamw), or --list, or --language")
    check_place("--html", as_html, (".html",))
    settings = settings_of(kwargs)
    words = [word.strip() for word in only.split(",") if word.strip()]
    if listing:
        return list_all(as_json)
    if target is None:
        raise typer.Exit(int(not load_lab("check --language", "language").show(as_json)))
    thing = target_of(target)
    if isinstance(thing, type) and issubclass(thing, Spec):
        if claimed or ranks:
            raise Problem(f"{target} is a rule: --as and --ranks are for torch classes and optax factories")
        for name in settings.keys() - thing.fields.keys():
            raise Problem(f"--kwargs: {target} has no {name!r}; it has {', '.join(thing.fields)}")
        try:
            rule = check_rule(thing, engines=["cpu"] if quick else None, only=words, **settings)
        except (TypeError, ValueError) as problem:
            raise Problem(str(problem)) from None
        if as_html is not None:
            as_html.write_text(page(tabled(target, settings, rule)), encoding="utf-8")
        write_json(rule.as_dict()) if as_json else say(str(rule))
        raise typer.Exit(int(not rule.ok))
    claimed = one("optimizer", claimed, list_optimizers(), aliases()) if claimed else ""
    try:
        with progress(len(CHECKS) or 1) as tick:
            report = check_optimizer(target, settings, quick=quick, only=words, claimed=claimed or None, ranks=ranks, tick=tick)
    except (TypeError, ValueError) as problem:
        raise Problem(str(problem)) from None
    if as_html is not None:
        as_html.write_text(page(report), encoding="utf-8")
    write_json(report.as_dict()) if as_json else show(report)
    raise typer.Exit(int(not report.ok))
