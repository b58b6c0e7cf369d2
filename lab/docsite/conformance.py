"""Tables of conformance, from the committed result of `lab/conformance.py`."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from .text import table

ROOT = Path(__file__).parents[2]
BAD = ("failed", "error")
#: what a failure means where it lies in the nature of the method
NATURE = {
    ("torch.optim:ASGD", "keywords"): "`t0` acts on the average in its state, not on the parameters",
    ("torch.optim:ASGD", "lr-read"): "the rate of the next step is computed in this one",
    ("torch.optim:Rprop", "lr-read"): "`lr` is the size of the first step alone",
    ("torch.optim:Rprop", "lr-tensor"): "`lr` is the size of the first step alone",
}


@functools.cache
def found() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((ROOT / "benchmarks" / "conformance.json").read_text())
    return told


def checked() -> list[dict[str, Any]]:
    return [row for row in found()["rows"] if "counts" in row]


def wrong(row: dict[str, Any], taste: bool = False) -> list[str]:
    """The checks that an optimizer fails: those that count, or the matters of taste."""
    return [
        name for name, (status, _, _) in row["results"].items() if status in BAD and found()["checks"][name]["taste"] == taste
    ]


def libraries() -> list[str]:
    return list(dict.fromkeys(row["library"] for row in checked()))


def by_library() -> str:
    rows = []
    for library in libraries():
        mine = [row for row in checked() if row["library"] == library]
        fails = [len(wrong(row)) for row in mine]
        rows.append(
            [
                f"`{library}`",
                str(len(mine)),
                str(sum(not each for each in fails)),
                f"{min(fails)} to {max(fails)}",
                str(sum(fails)),
            ]
        )
    return table(["library", "optimizers", "without failure", "failures of one", "of all"], rows, range(1, 5))


def by_check() -> str:
    """How many optimizers of each library fail a check, of how many that were asked."""
    rows = []
    for name, about in found()["checks"].items():
        cells = []
        for library in libraries():
            told = [row["results"][name][0] for row in checked() if row["library"] == library and name in row["results"]]
            asked = [status for status in told if status != "skipped"]
            bad = sum(status in BAD for status in asked)
            cells.append("–" if not asked else f"**{bad}** of {len(asked)}" if bad else f"0 of {len(asked)}")
        rows.append([f"`{name}`" + (" (taste)" if about["taste"] else ""), *cells])
    heads = ["`" + re.sub(r"([._])", "\\1\u200b", library) + "`" for library in libraries()]  # to be folded there
    return table(["check", *heads], rows, range(1, len(heads) + 1))


def by_optimizer() -> str:
    """A line an optimizer: what it fails, and what is a matter of taste."""
    rows = []
    for row in checked():
        named = [f"`{name}`" + (f" ({why})" if (why := NATURE.get((row["optimizer"], name))) else "") for name in wrong(row)]
        which = row["results"].get("which", ["", "", ""])
        said = which[1] if which[0] == "passed" else which[2] if which[0] in BAD else ""
        rows.append(
            [
                f"`{row['optimizer']}`",
                str(row["counts"]["passed"]),
                ", ".join(named) or "–",
                ", ".join(wrong(row, True)) or "–",
                said,
            ]
        )
    return table(["optimizer", "passed", "failed", "matters of taste", "which is it?"], rows, (1,))


def unchecked() -> str:
    left = [f"- `{row['optimizer']}`: {row['unchecked']}" for row in found()["rows"] if "unchecked" in row]
    return "\n".join(left) or "None."


def source() -> str:
    return ", ".join(f"{name} {version}" for name, version in found()["versions"].items())
