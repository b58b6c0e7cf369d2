"""`rlx-optim check`: is a rule fit to be used, and do the engines here speak the language of rules?

    rlx-optim check adamw
    rlx-optim check mypackage.rules:AdaBelief --json
    rlx-optim check --language

A rule is stepped on every engine that is here: over shapes, groups, resumed, with bad gradients, every hyperparameter changed.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Annotated, Any

import typer

from ..checking import check_rule
from ..conformance import BAR, ENGINES, conformance, present
from ..constructs import BROKE, CONSTRUCTS
from ..named import list_optimizers
from ..registry import aliases, spec_class
from ..spec import Spec
from . import Problem, one, show_table, write_json


def found(name: str) -> type[Spec]:
    """A rule by its name here, or by module:Class."""
    if ":" not in name:
        return spec_class(one("optimizer", name, list_optimizers(), aliases()))
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        rule: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise Problem(f"{name}: {problem}") from None
    if not (isinstance(rule, type) and issubclass(rule, Spec)):
        raise Problem(f"{name} is no Spec class but {rule!r}")
    return rule


def language(as_json: bool) -> bool:
    """Show every construct on every engine; whether all hold."""
    engines = [engine for engine in present() if engine != "reference"]
    rows = conformance(engines)
    told = {(row.construct, row.engine): row for row in rows}
    if as_json:
        listed = [{**vars(row), "seen": row.seen if math.isfinite(row.seen) else None} for row in rows]
        write_json({"engines": engines, "bar": BAR, "broke": list(BROKE), "rows": listed})
    else:
        names = [*BROKE, *(each.name for each in CONSTRUCTS if each.name not in BROKE)]
        table = [[name, *(_cell(told.get((name, engine))) for engine in engines)] for name in names]
        show_table(["construct", *engines], table, [name in BROKE for name in names])
        print(
            f"largest difference from the reference over the largest value; up to {BAR:g} is right. Bold: what broke engines once"
        )
        print(*(f"{row.construct}, {row.engine}: {row.note}" for row in rows if not row.ok), sep="\n")
        print(*(f"{name}: {why}" for name, (_, missing) in ENGINES.items() if (why := missing()) is not None), sep="\n")
    return all(row.ok for row in rows)


def _cell(row: Any) -> str:
    if row is None:
        return "–"
    return "WRONG" if not row.ok else "refused" if math.isnan(row.seen) else f"{row.seen:.0e}" if row.seen else "0"


def command(
    rule: Annotated[str | None, typer.Argument(help="A name, or module:Class.", autocompletion=list_optimizers)] = None,
    of_language: Annotated[bool, typer.Option("--language", help="Every construct of the language on every engine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Step a rule on every engine here and try every habit of a good one."""
    if (rule is None) != of_language:
        raise Problem("give a rule (adamw, or module:Class), or --language")
    if rule is None:
        raise typer.Exit(int(not language(as_json)))
    report = check_rule(found(rule))
    write_json(report.as_dict()) if as_json else print(report)
    raise typer.Exit(int(not report.ok))
