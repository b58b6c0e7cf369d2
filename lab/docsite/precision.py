"""Tables of docs/numbers.md, from the committed result of `lab/precision.py`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from rlx_optim.registry import spec_class

from .text import table

ROOT = Path(__file__).parents[2]


@functools.cache
def found() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / "benchmarks" / "precision.json").read_text())
    return read


def share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.095 else f"{value:.1g}".replace("e-0", "e-")


def small() -> str:
    scales = list(next(iter(found()["small"].values())))
    rows = [[spec_class(name).title, *(share(row[scale]) for scale in scales)] for name, row in found()["small"].items()]
    return table(["optimizer", *scales], rows, right=tuple(range(1, len(scales) + 1)))


def bfloat16() -> str:
    modes = list(next(iter(found()["bfloat16"].values())))
    rows = [
        [spec_class(name).title, *("−" * (row[mode] < 0) + f"{abs(row[mode]):.2g}".replace("e-0", "e-") for mode in modes)]
        for name, row in found()["bfloat16"].items()
    ]
    return table(["optimizer", *modes], rows, right=tuple(range(1, len(modes) + 1)))


def products() -> str:
    forms = list(next(iter(found()["products"].values())))
    rows = [[kind, *(f"{row[form]:.1e}".replace("e-0", "e-") for form in forms)] for kind, row in found()["products"].items()]
    return table(["matrix", *forms], rows, right=(1, 2, 3))


def outside() -> str:
    rows = [[words, *(share(row[form]) for form in row)] for words, row in found()["outside"].items()]
    return table(["optimizer", "float32", "float64"], rows, right=(1, 2))


def spikes() -> str:
    rows = [
        [
            title,
            f"{row['moved']:.2g}" if row["moved"] < 99.5 else f"{row['moved']:.0f}",
            share(row["after_20"]),
            share(row["after_99"]),
        ]
        for title, row in found()["spikes"].items()
    ]
    return table(["optimizer", "moved by", "a step 20 later", "99 later"], rows, right=(1, 2, 3))


def source() -> str:
    used = ", ".join(f"{name} {version}" for name, version in found()["versions"].items())
    return f"`{found()['command']}` ({used})"
