"""`rlx-optim info`: one optimizer, from its module's docstring and its spec.

rlx-optim info muon
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..documentation import state, words
from ..numpy.classes import list_optimizers
from ..registry import aliases, documentation, spec_class
from ..spec import REQUIRED
from . import Problem, choose_one, get_width, say, write_json
from .listing import entry

#: how a part of a rule's docstring begins -> what it is
PARTS = {"Idea": "idea", "Formulas": "formulas", "Conventions": "conventions", "When, and what it costs": "when"}


def parts_of(name: str) -> dict[str, str]:
    """The docstring of a rule in its parts, and its title; a paragraph that begins none of them belongs to the one before."""
    title, *paragraphs = documentation(spec_class(name)).split("\n\n")
    parts, part = {"title": title}, "title"
    for paragraph in paragraphs:
        head = next((head for head in PARTS if paragraph.startswith(head)), None)
        if head is not None:
            part, paragraph = PARTS[head], paragraph[len(head) :].removeprefix(".")[1:]
        parts[part] = f"{parts[part]}\n\n{paragraph}" if part in parts else paragraph
    return parts


def join_lines(text: str) -> str:
    """Prose without the file's own line breaks, so that any width suits it; indented formulas and list items keep theirs."""
    lines: list[str] = []
    for line in text.splitlines():
        free = lines and lines[-1] and not lines[-1].startswith(" ")  # the line before can be gone on with
        if free and line and not line.startswith((" ", "- ")):
            lines[-1] += f" {line}"
        elif free and line.startswith("  ") and lines[-1].startswith("- "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def describe_rule(name: str) -> dict[str, Any]:
    """Everything that is known of an optimizer."""
    kind = spec_class(name)
    said = words(kind.__doc__)
    fields = {
        field: {
            "meaning": said.get(field, f.meaning),
            "required": f.default is REQUIRED,
            "default": None if f.default is REQUIRED else f.default,
            "expected": f.expected,
            "fixed": f.fixed,
        }
        for field, f in kind.fields.items()
    }
    fallback = kind.otherwise_default
    own = {"numpy": kind.title, "torch": f"torch.{kind.title}", "jax": f"optax.{kind.optax.factory or name}"}
    return {
        **entry(name),
        **parts_of(name),
        "hyperparameters": fields,
        "state": state(kind),
        "otherwise": None if fallback is None else {"optimizer": fallback.name, **fallback.settings},
        "names": {framework: f"rlx_optim.{path}" for framework, path in own.items()},
    }


def show(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(highlight=False, width=get_width())

    def section(title: str, text: str) -> None:
        if text:
            console.print(f"\n[bold]{title}[/]")
            say(join_lines(text))

    console.print(f"[bold]{told['title'].replace('[', chr(92) + '[')}[/]")
    section("Idea", told.get("idea", ""))
    section("Formulas", told.get("formulas", ""))
    console.print("\n[bold]Hyperparameters[/]")
    table = Table(Column("name", no_wrap=True), "default", "what it is, and must be")
    for name, field in told["hyperparameters"].items():
        default = "required" if field["required"] else repr(field["default"])
        bounds = f"{field['expected']}{'; fixed once there is state' if field['fixed'] else ''}"
        table.add_row(name, default, Text(f"{field['meaning']} ").append(f"({bounds})", "dim"))
    console.print(table)
    if told["otherwise"]:
        settings = dict(told["otherwise"])
        rule = spec_class(settings.pop("optimizer")).title
        given = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        say(f"What it does not take goes to otherwise = {rule}({given}).")
    section("State", "\n".join(f"- {slot}: {text}" for slot, text in told["state"].items()) or "- none")
    section("Conventions", told.get("conventions", ""))
    section("When, and what it costs", told.get("when", ""))
    section("Names", "   ".join(told["names"].values()))


def command(
    name: Annotated[str, typer.Argument(help="An optimizer.", autocompletion=list_optimizers)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain one optimizer: idea, formulas, defaults, when to use it, what it costs."""
    if sys.flags.optimize > 1:
        raise Problem("info reads docstrings, and python -OO takes them away; run it without -OO")
    told = describe_rule(choose_one("optimizer", name, list_optimizers(), aliases()))
    write_json(told) if as_json else show(told)
