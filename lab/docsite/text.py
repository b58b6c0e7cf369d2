"""Docstrings and tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from .formulas import latex

Fields = Collection[str]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """A Markdown table; `right` are the columns of numbers."""
    rule = ["--:" if i in right else "---" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, rule, *rows])


def stacked(text: str) -> str:
    """A table whose rows become paragraphs on a phone."""
    return f'<div class="stacked" markdown="block">\n\n{text}\n\n</div>'


# ---- docstrings -------------------------------------------------------------------------------------------------------------
#: names short enough to be taken for a word are code all the same
SHORT = ("lr", "eps", "betas", "nus", "amsgrad", "nesterov", "beta1")
FACTOR = r"(?:\w*\([^()]*[·−+][^()]*\)|\d+\.\d+|[\w√‖ᵀ²]+)"
TERM = rf"{FACTOR}(?:[·/]{FACTOR})*"
CODE = re.compile(
    r"`[^`]*`"  # code already
    rf"|(?<![\w·/])(?:{TERM} [−+←=] )*(?:{FACTOR}·{TERM}|\w+\([^()]*·[^()]*\))(?: [−+] {TERM})*"  # a formula with a product
    r"|\b(?:torch|optax|rlx_optim)(?:\.\w+)+(?:\([^)]*\))?"  # a function of a library
    r"|\b[a-zA-Z]\w*=(?:\([^)]*\)|\"\w+\"|[\w.]+)"  # an argument
    r"|\"\w+\""  # its value
    r"|\b[a-z]\w*(?:\[\d\])?"  # a word: code if it is a hyperparameter
)


def prose(text: str, fields: Fields) -> str:
    """Text of a docstring: arguments and functions in code, papers linked."""

    def mark(match: re.Match[str]) -> str:
        word = match[0]
        name = word.partition("[")[0]
        common = re.fullmatch(r"\w+(\[\d\])?", word) and not (name in fields and ("_" in name or name in SHORT))
        return word if word.startswith("`") or common else f"`{word}`"

    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", CODE.sub(mark, text))


def part(text: str, fields: Fields) -> str:
    """A part of a docstring: prose, list items and rows of formulas."""
    blocks: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        kind = "formulas" if line.startswith("    ") else "item" if line.startswith("- ") else "prose" if line.strip() else ""
        before = blocks[-1][0] if blocks else ""
        if (kind and kind == before != "item") or ((kind, before) == ("prose", "item") and line.startswith("  ")):
            blocks[-1][1].append(line)
        elif kind:
            blocks.append((kind, [line]))
    return "\n\n".join(BLOCKS[kind](lines, fields) for kind, lines in blocks)


def _joined(lines: Sequence[str], fields: Fields) -> str:
    return prose(" ".join(line.strip() for line in lines), fields)


def _item(lines: Sequence[str], fields: Fields) -> str:
    name, _, first = lines[0].removeprefix("- ").partition(": ")
    return f"- **{name}**: {_joined([first, *lines[1:]], fields)}"


def _formulas(lines: Sequence[str], fields: Fields) -> str:
    rows = []
    for line in lines:
        formula, _, note = re.sub(r"\s{2,}", "\0", line.strip(), count=1).partition("\0")
        shown = " ".join(rf"\(\displaystyle {one}\)" for one in latex(formula, fields))
        said = f' <span class="note">{prose(note, fields)}</span>' if note else ""
        rows.append(f'<div class="formula" markdown="span">{shown}{said}</div>')
    return "\n".join(['<div class="formulas" markdown="block">', *rows, "</div>"])


BLOCKS = {"formulas": _formulas, "item": _item, "prose": _joined}
