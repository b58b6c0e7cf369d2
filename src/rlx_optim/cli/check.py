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

from ..check import FILES, Check, checks_of, load_target, say_missing, subject_of
from ..check.page import render_page
from ..check.table import choose_checks, run_checks
from ..numpy.classes import list_optimizers
from ..registry import aliases
from . import Problem, check_output_path, choose_one, load_lab, say, show_progress, write_json


def find_target(name: str) -> str:
    """Return a rule's name as it is registered, or PACKAGE:CLASS where that names something."""
    if ":" not in name:
        return choose_one("optimizer", name, list_optimizers(), aliases())
    try:
        load_target(name)
    except ModuleNotFoundError as problem:
        extra = {"torch": "torch", "jax": "jax", "optax": "jax"}.get(problem.name or "")
        install = f'{problem.name} is not installed: pip install "rlx-optim[{extra}]"'
        raise Problem(f"{name}: {install if extra else problem}") from None
    except (Exception, SystemExit) as problem:  # whatever a module does when it is imported
        kind = (
            "" if isinstance(problem, (ImportError, AttributeError, ValueError, SyntaxError)) else f"{type(problem).__name__}: "
        )
        raise Problem(f"{name}: {kind}{problem}") from None
    return name


def list_all(as_json: bool) -> None:
    """Show every check."""
    known: dict[Check, None] = {}
    for kind in FILES:
        if (why := say_missing(kind)) is None:
            known |= dict.fromkeys(checks_of(kind))
        else:
            say(f"{kind}: {why}", sys.stderr)
    if as_json:
        fields = ("name", "kinds", "quick", "taste", "ranks", "reason")
        return write_json([{field: getattr(each, field) for field in fields} for each in known])
    for c in known:
        marks = [word for word, on in {"a matter of taste": c.taste, "not quick": not c.quick, "--ranks": c.ranks}.items() if on]
        say(f"{c.name:21} {'+'.join(c.kinds):12} {c.reason}" + (f" ({', '.join(marks)})" if marks else ""))


def parse_settings(text: str) -> dict[str, Any]:
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
    check_output_path("--html", as_html, (".html",))
    settings = parse_settings(kwargs)
    words = [word.strip() for word in only.split(",") if word.strip()]
    if listing:
        return list_all(as_json)
    if target is None:
        raise typer.Exit(int(not load_lab("check --language", "language").show(as_json)))
    claimed = choose_one("optimizer", claimed, list_optimizers(), aliases()) if claimed else ""
    try:
        engines = ["cpu"] if quick else None
        subject = subject_of(find_target(target), settings, claimed=claimed or None, ranks=ranks or 2, engines=engines)
        if subject.kind == "rule":
            if claimed or ranks:
                raise Problem(f"{target} is a rule: --as and --ranks are for torch classes and optax factories")
            for name in settings.keys() - subject.rule.fields.keys():
                raise Problem(f"--kwargs: {target} has no {name!r}; it has {', '.join(subject.rule.fields)}")
        checks = choose_checks(subject, quick=quick, only=words, ranks=ranks)
        with show_progress(len(checks)) as tick:
            report = run_checks(subject, checks, tick)
    except (TypeError, ValueError) as problem:
        raise Problem(str(problem)) from None
    except SystemExit as problem:
        raise Problem(f"{target}: SystemExit: {problem}") from None
    if as_html is not None:
        as_html.write_text(render_page(report), encoding="utf-8")
    write_json(report.as_dict()) if as_json else say("\n".join(report.lines()))
    raise typer.Exit(int(not report.ok))
