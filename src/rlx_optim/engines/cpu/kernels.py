"""From a rule to machine code: one generated loop per rule and layout, compiled by numba and cached on disk.

A kernel is a C function over a table of addresses (tensor × array), a table of numbers (tensor × number) and a table of
chunks. The source below is written to a file whose name holds a hash of its text, because numba caches by file; in it the rule
stands as its author wrote it, and the vocabulary is imported from `native`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import sys
import tempfile
import textwrap
import types
from pathlib import Path
from typing import Any

from ... import vocabulary
from ...engine import Rule, signature
from .cache import kept

#: columns of the chunk table
CHUNK = ("tensor", "first", "last", "rows", "columns", "scratch")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a rule's arguments and results lie in memory.

    takes: per argument "full" (an array), "scaled" (the gradient: an array times the scale), "row" or "column" (one number per
    row or per column of the domain) or "number" (one per tensor).
    gives: per result "update" (in place, into the argument of that name), "store" (into an array of its own), or the reduction:
    "norm", "rms", "row_mean", "row_sum", "column_mean". An update is not a store to a second pointer, because the compiler's
    overlap check would then always fail and the loop run one element at a time.
    element, arithmetic: "float32" or "float64", of the buffers and of the computation.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    element: str = "float32"
    arithmetic: str = "float32"

    @property
    def by_row(self) -> bool:
        return any(kind in ("row", "column") for kind in self.takes) or any("_" in kind for kind in self.gives)

    def count(self, *kinds: str) -> int:
        return sum(kind in kinds for kind in self.gives)


def source(rule: Rule, layout: Layout) -> str:
    """The generated module. Address table, per tensor: array arguments, then results that have arrays of their own."""
    takes, gives = signature(rule)
    arrays = [name for name, kind in zip(takes, layout.takes, strict=True) if kind != "number"]
    numbers = [name for name, kind in zip(takes, layout.takes, strict=True) if kind == "number"]
    results = [f"y{k}" for k in range(len(gives))]
    placed = [k for k, kind in enumerate(layout.gives) if kind not in ("norm", "rms", "update")]
    width, size, by_row = len(arrays) + len(placed), 4 if layout.element == "float32" else 8, layout.by_row
    words = ", ".join(word for word in vocabulary.RULE if word in rule.__code__.co_names)
    norms = [k for k, kind in enumerate(layout.gives) if kind in ("norm", "rms")]
    columns = [k for k, kind in enumerate(layout.gives) if kind == "column_mean"]

    def where(slot: int, offset: str, n: str | None) -> str:
        pointer = f"{layout.element}_at(address_of[{width} * t + {slot}] + {size} * ({offset}))"
        return f"carray({pointer}, {n})" if n else f"{pointer}[0]"

    setup, values = [], []  # what is fetched before the innermost loop; the rule's arguments inside it
    start, n = ("r * columns", "columns") if by_row else ("first", "last - first")
    for slot, (name, kind) in enumerate((a, k) for a, k in zip(takes, layout.takes, strict=True) if k != "number"):
        if kind == "row":
            setup.append(f"a_{name} = F({where(slot, 'r', None)})")
        else:
            setup.append(f"a_{name} = {where(slot, '(r // rows) * columns' if kind == 'column' else start, n)}")
    for name, kind in zip(takes, layout.takes, strict=True):
        values.append(
            {"number": f"n_{name}", "row": f"a_{name}", "scaled": f"F(a_{name}[i]) * n_scale"}.get(kind, f"F(a_{name}[i])")
        )
    inner = [f"{', '.join(results)} = {rule.__name__}({', '.join(values)})"]
    after = []
    inner += [f"a_{name}[i] = y{k}" for k, (name, kind) in enumerate(zip(gives, layout.gives, strict=True)) if kind == "update"]
    for k in placed:
        slot, kind = len(arrays) + placed.index(k), layout.gives[k]
        if kind == "store":
            setup.append(f"b{k} = {where(slot, start, n)}")
            inner.append(f"b{k}[i] = y{k}")
        elif kind == "column_mean":
            inner.append(f"c{k}[i] += y{k}")
        else:
            setup.append(f"s{k} = 0.0")
            inner.append(f"s{k} = loose_add(s{k}, float64(y{k}))")
            store = f"carray({layout.element}_at(address_of[{width} * t + {slot}]), r + 1)[r]"
            after.append(f"{store} = s{k}" + (" / columns" if kind == "row_mean" else ""))
    inner += [line for k in norms for line in (f"z{k} = float64(y{k})", f"s{k} = loose_add(s{k}, z{k} * z{k})")]

    lines = ["t = chunk[0]", "first = chunk[1]", "last = chunk[2]"]
    lines += ["rows = chunk[3]", "columns = chunk[4]"] if by_row else []
    lines += [f"n_{name} = F(number[{j}])" for j, name in enumerate([*numbers, "scale"])]
    lines += [f"s{k} = 0.0" for k in norms]
    for j, k in enumerate(columns):
        lines.append(f"c{k} = carray(float64_at(scratch + 8 * (chunk[5] + {j} * columns)), columns)")
        lines.append(f"c{k}[:] = 0.0")
    loop = [*setup, f"for i in range({n}):", *(f"    {line}" for line in inner), *after]
    lines += ["for r in range(first, last):", *(f"    {line}" for line in loop)] if by_row else loop
    lines += [f"out[{j}] = s{k}" for j, k in enumerate(norms)]

    body = textwrap.indent("\n".join(lines), " " * 8)
    native_names = "call, float32_at, float64_at, int64_at, loose_add" + (f", {words}" if words else "")
    return f'''"""Generated from {rule.__module__}.{rule.__qualname__}; do not edit."""
from numba import carray, cfunc, float32, float64, int64, njit, void
from rlx_optim.engines.cpu.native import {native_names}

F = {layout.arithmetic}


@njit(error_model="numpy")
{textwrap.dedent(inspect.getsource(rule))}

@cfunc(void(int64, int64, int64, int64, int64, int64, int64), error_model="numpy", cache=__file__ is not None)
def kernel(address, numbers, chunks, start, stop, partial, scratch):
    address_of = int64_at(address)
    for c in range(start, stop):
        chunk = int64_at(chunks + {8 * len(CHUNK)} * c)
        number = float64_at(numbers + {8 * (len(numbers) + 1)} * chunk[0])
        out = float64_at(partial + {8 * len(norms)} * c)
{body}
'''


@functools.cache
def compiled(rule: Rule, layout: Layout) -> Any:
    """The kernel of a rule; `.address` is what callers need."""
    text = source(rule, layout)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    name = f"rlx_{rule.__module__.rpartition('.')[2]}_{rule.__name__}_{digest}"
    return kept(lambda folder: _made(name, text, folder))


def _made(name: str, text: str, folder: Path | None) -> Any:
    """The kernel of a generated module, which is a file only where what is compiled from it can be kept."""
    module = types.ModuleType(name)
    module.__file__ = None
    if folder is not None:
        module.__file__ = str(path := folder / f"{name}.py")
        if not path.exists() or path.read_text() != text:
            _write(path, text)
    sys.modules[name] = module  # numba's cache looks the module up by name
    exec(compile(text, module.__file__ or f"<{name}>", "exec"), module.__dict__)
    return module.kernel


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)  # whole or not at all, whoever else writes it
        except BaseException:
            os.unlink(file.name)
            raise
