"""From a rule to machine code: one generated loop per rule and layout, compiled by numba and cached on disk.

A kernel is a C function over a table of addresses (tensor × array), a table of numbers (tensor × number) and a table of
chunks. The source below is written to a file whose name holds a hash of its text, because numba caches by file; in it the rule
stands as its author wrote it but for its literals, and the vocabulary is imported from `native`.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import hashlib
import os
import sys
import tempfile
import textwrap
import types
from pathlib import Path
from typing import Any

from ... import ops
from ...language import Reduction, Rule, checked
from ...rounding import EXACT, NEAREST, STOCHASTIC
from ...storage import BLOCK, COMPONENTS, HALF, POSITIVE, SIGNED, TINY, TOP
from .cache import kept

#: columns of the chunk table
CHUNK = ("tensor", "first", "last", "rows", "columns", "scratch")
ROWWISE = {"row": "_r", "matrix": "_r // _rows", "column": "(_r // _rows) * _columns"}  # where a row of the domain finds its own


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a rule's arguments and results lie in memory.

    takes: per argument "full" (an array), "scaled" (the gradient: an array times the scale), "row", "column" or "matrix" (one
    number per row, per column or per matrix of the domain) or "number" (one per tensor).
    gives: per result "store" (into an array of its own), the number of the argument whose array it replaces, or its reduction. A
    replacement is not a store to a second pointer, because the compiler's overlap check would then always fail and the loop run
    one element at a time.
    element, arithmetic: "float32" or "float64", of the buffers and of the computation.
    coded: per argument what it is kept in (`storage`), "" as it is; no row, column or reduction of such goes with that.
    half: "bfloat16" or "float16" where the parameter and the gradient are that. parameter: which argument it is, if any.
    rounding: how it is rounded (`rounding`).
    """

    takes: tuple[str, ...]
    gives: tuple[str | int | Reduction, ...]
    element: str = "float32"
    arithmetic: str = "float32"
    coded: tuple[str, ...] = ()
    half: str = ""
    parameter: int = -1
    rounding: str = NEAREST

    @property
    def by_row(self) -> bool:
        lines = any(kind in ROWWISE for kind in self.takes) or any(how.axis is not None for _, how in self.reductions)
        return lines or bool(self.scaled)

    @property
    def scaled(self) -> list[int]:
        """Arguments that have scales beside their codes."""
        return [j for j, storage in enumerate(self.coded) if len(COMPONENTS[storage]) > 1]

    @property
    def beside(self) -> int:
        """How many numbers stand behind the rule's own: the scale of gradients; where chance rounds, the step and the first place
        of the state; where it rounds the parameter, its key and its first place."""
        return 5 if self.by_chance else 3 if HALF in self.coded else 1

    @property
    def by_chance(self) -> bool:
        return bool(self.half) and self.parameter in self.gives and self.rounding == STOCHASTIC

    @property
    def lows(self) -> bool:
        """Whether the parameter has a low half."""
        return bool(self.half) and self.parameter >= 0 and self.rounding == EXACT

    @property
    def reductions(self) -> list[tuple[int, Reduction]]:
        """(result, how)."""
        return [(k, how) for k, how in enumerate(self.gives) if isinstance(how, Reduction)]

    @property
    def over_tensors(self) -> list[tuple[int, Reduction]]:
        return [(k, how) for k, how in self.reductions if how.axis is None]

    @property
    def over_columns(self) -> list[tuple[int, Reduction]]:
        return [(k, how) for k, how in self.reductions if how.axis == -2]

    @property
    def placed(self) -> list[int]:
        """Results that have an array of their own: stored ones, rows and columns."""
        return [k for k, how in enumerate(self.gives) if how == "store" or (isinstance(how, Reduction) and how.axis is not None)]


def _in_arithmetic(rule: Rule) -> str:
    """A rule's text for numba: literals in the kernel's arithmetic, as a plain one would widen it."""

    class Literals(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Call(ast.Name("_F", ast.Load()), [node], []) if isinstance(node.value, (int, float)) else node

    tree = Literals().visit(copy.deepcopy(checked(rule).tree))
    tree.name = "_rule"
    return ast.unparse(ast.fix_missing_locations(tree))


def _kept(into: str, value: str, how: Reduction) -> str:
    """A statement that takes a value into a running reduction."""
    value = f"float64({value})"
    value = f"{value} * {value}" if how.squared else value
    return f"{into} = {'maximum' if how.largest else 'loose_add'}({into}, {value})"


#: what `native` has for slots in fewer bits
CODED = {"int8_at", "uint8_at", "uint16_at", "room", "chance", "spun", "onward", "larger", "magnitude", "sqrt"}
CODED |= {f"{way}_{kind}" for way in ("from", "to") for kind in ("signed", "positive", "half")}
#: and for parameters and gradients of 16 bits
HALVED = {"uint16_at", "chance", "spun", "onward", "crossed", "half_at", "of_halves", "from_half", "from_float16"}
HALVED |= {f"{way}_{kind}" for way in ("to", "near") for kind in ("bfloat16", "float16")}
#: how a slot in fewer bits is read and written: the type of its codes, its bytes, and two functions of `native`
CODES = {
    SIGNED: ("int8", 1, "from_signed", "to_signed"),
    POSITIVE: ("uint8", 1, "from_positive", "to_positive"),
    HALF: ("uint16", 2, "from_half", "to_half"),
}


def _coded(layout: Layout, j: int, codes: str, scale: str, start: str, n: str) -> tuple[list[str], str, list[str], list[str]]:
    """Of an argument in fewer bits: what is fetched before a block, how a coordinate is read, what is written of it, and after
    the block. codes, scale: their addresses. start, n: where the block begins, and how long it is."""
    storage = layout.coded[j]
    kind, size, read, write = CODES[storage]
    k = next((k for k, place in enumerate(layout.gives) if place == j), None)
    before = [f"_a{j} = carray({kind}_at({codes} + {size} * ({start})), {n})"]
    if storage == HALF:
        inner = [f"_a{j}[_i] = {write}(float32(_y{k}), chance(_u, _tick))"]
        return before, f"_F({read}(_a{j}[_i], float32(0)))", [] if k is None else inner, []
    top = TOP[storage]
    before += [
        f"_k{j} = float32_at({scale} + 4 * (_r * _blocks + _q))",
        f"_z{j} = _k{j}[0]",
        f"_m{j} = int32(0)",
    ]
    before += [f"_t{j} = carray(room(), {BLOCK})"]
    value = f"sqrt(_y{k})" if storage == POSITIVE else f"_y{k}"
    inner = [f"_e{j} = float32({value})", f"_t{j}[_i] = _e{j}", f"_m{j} = larger(_m{j}, _e{j})"]
    after = [f"_k{j}[0] = magnitude(_m{j}, int32(0))", f"_v{j} = float32({top**2}) / max(_k{j}[0], float32({TINY}))"]
    after += ["for _i in range(_w):", f"    _a{j}[_i] = {write}(_t{j}[_i], _v{j})"]
    return before, f"_F({read}(_a{j}[_i], _z{j}))", *(([], []) if k is None else (inner, after))


def _halved(layout: Layout, j: int, place: str, low: str, start: str, n: str) -> tuple[list[str], str, list[str]]:
    """Of a parameter or a gradient of 16 bits: what is fetched before the loop, how a coordinate is read, what is written of it.
    place, low: the addresses of it and of its low half."""
    k = next((k for k, place in enumerate(layout.gives) if place == j), None)
    before = [f"_a{j} = carray(uint16_at({place} + 2 * ({start})), {n})"]
    read = f"_F({'from_half' if layout.half == 'bfloat16' else 'from_float16'}(_a{j}[_i], float32(0)))"
    if layout.takes[j] == "scaled":
        return before, f"{read} * _scale", []
    if layout.lows:
        before.append(f"_l{j} = carray(uint16_at({low} + 2 * ({start})), {n})")
        inner = [f"_w{j} = float32(_y{k})", f"_a{j}[_i] = half_at(_w{j}, int32(16))", f"_l{j}[_i] = half_at(_w{j}, int32(0))"]
        read = f"_F(of_halves(_a{j}[_i], _l{j}[_i]))"
    elif layout.by_chance:
        inner = [f"_a{j}[_i] = to_{layout.half}(float32(_y{k}), chance(_v, _word))"]
    else:
        inner = [f"_a{j}[_i] = near_{layout.half}(float32(_y{k}), int32(0))"]
    return before, read, [] if k is None else inner


def source(rule: Rule, layout: Layout) -> str:
    """The generated module. Address table, per tensor: array arguments, then results that have arrays of their own. All names
    that it makes up begin with an underscore, which those of a rule never do."""
    takes = checked(rule).takes
    arrays = [j for j, kind in enumerate(layout.takes) if kind != "number"]
    numbers = [j for j, kind in enumerate(layout.takes) if kind == "number"]
    placed, by_row = layout.placed, layout.by_row
    width = len(arrays) + len(placed) + len(layout.scaled) + layout.lows
    size = 4 if layout.element == "float32" else 8
    words = {word for word in ops.RULE if word in rule.__code__.co_names} | {"maximum"}
    words |= CODED if any(layout.coded) else set()
    words |= HALVED if layout.half else set()

    def where(slot: int, offset: str, n: str | None) -> str:
        pointer = f"{layout.element}_at(_address_of[{width} * _t + {slot}] + {size} * ({offset}))"
        return f"carray({pointer}, {n})" if n else f"{pointer}[0]"

    setup: list[str] = []  # what is fetched before the innermost loop
    start, n = ("_r * _columns", "_columns") if by_row else ("_first", "_last - _first")
    start, n = ("_o", "_w") if layout.scaled else (start, n)
    loads: dict[int, str] = {}
    coded: list[str] = []
    after: list[str] = []
    for slot, j in enumerate(arrays):
        kind = layout.takes[j]
        if layout.coded and layout.coded[j]:
            scale = len(arrays) + len(placed) + (layout.scaled.index(j) if j in layout.scaled else 0)
            codes, scales = (f"_address_of[{width} * _t + {place}]" for place in (slot, scale))
            before, loads[j], inside, behind = _coded(layout, j, codes, scales, start, n)
            setup, coded, after = setup + before, coded + inside, after + behind
        elif layout.half and (kind == "scaled" or j == layout.parameter):
            own, low = (f"_address_of[{width} * _t + {place}]" for place in (slot, width - 1))
            before, loads[j], inside = _halved(layout, j, own, low, start, n)
            setup, coded = setup + before, coded + inside
        elif kind in ("row", "matrix"):
            setup.append(f"_a{j} = _F({where(slot, ROWWISE[kind], None)})")
        else:
            setup.append(f"_a{j} = {where(slot, ROWWISE.get(kind, start), n)}")
    usual = {"number": "_n{}", "row": "_a{}", "matrix": "_a{}", "scaled": "_F(_a{}[_i]) * _scale"}
    values = ", ".join(loads.get(j, usual.get(kind, "_F(_a{}[_i])").format(j)) for j, kind in enumerate(layout.takes))
    results = ", ".join(f"_y{k}" for k in range(len(layout.gives)))
    inner = [f"{results} = _rule({values})", *coded]
    inner += [f"_a{j}[_i] = _y{k}" for k, j in enumerate(layout.gives) if isinstance(j, int) and j not in loads]
    for slot, k in enumerate(placed, len(arrays)):
        how = layout.gives[k]
        if not isinstance(how, Reduction):
            setup.append(f"_b{k} = {where(slot, start, n)}")
            inner.append(f"_b{k}[_i] = _y{k}")
        elif how.axis == -2:
            inner.append(_kept(f"_c{k}[_i]", f"_y{k}", how))
        else:
            setup.append(f"_s{k} = {_start(how)}")
            inner.append(_kept(f"_s{k}", f"_y{k}", how))
            done = f"_s{k} / _columns" if how.mean else f"_s{k}"
            store = f"carray({layout.element}_at(_address_of[{width} * _t + {slot}]), _r + 1)[_r]"
            after.append(f"{store} = {f'sqrt({done})' if how.root else done}")
            words |= {"sqrt"} if how.root else set()
    inner += [_kept(f"_s{k}", f"_y{k}", how) for k, how in layout.over_tensors]

    lines = ["_t = _chunk[0]", "_first = _chunk[1]", "_last = _chunk[2]"]
    lines += ["_rows = _chunk[3]", "_columns = _chunk[4]"] if by_row else []
    lines += [f"_n{j} = _F(_number[{i}])" for i, j in enumerate(numbers)] + [f"_scale = _F(_number[{len(numbers)}])"]
    if layout.beside > 1:
        lines.append(f"_tick = spun(int64(_number[{len(numbers) + 1}]), {0x85EBCA77})")
    begins = {"_u": f"int64(_number[{len(numbers) + 2}])"} if HALF in layout.coded else {}
    if layout.by_chance:
        lines.append(f"_word = crossed(_tick, spun(int64(_number[{len(numbers) + 3}]), 1))")
        begins["_v"] = f"int64(_number[{len(numbers) + 4}])"
    for each, begin in begins.items():  # the place of a coordinate, of the state and of the parameter
        setup.append(f"{each} = spun({begin} + {start}, {0x9E3779B1})")
        inner.append(f"{each} = onward({each}, int32({0x9E3779B1 - 2**32}))")
    lines += [f"_s{k} = {_start(how)}" for k, how in layout.over_tensors]
    for i, (k, how) in enumerate(layout.over_columns):
        lines.append(f"_c{k} = carray(float64_at(_scratch + 8 * (_chunk[5] + {i} * _columns)), _columns)")
        lines.append(f"_c{k}[:] = {_start(how)}")
    loop = [*setup, f"for _i in range({n}):", *(f"    {line}" for line in inner), *after]
    if layout.scaled:
        loop = [f"_o = _r * _columns + {BLOCK} * _q", f"_w = min({BLOCK}, _columns - {BLOCK} * _q)", *loop]
        loop = [f"_blocks = -(-_columns // {BLOCK})", "for _q in range(_blocks):", *(f"    {line}" for line in loop)]
    lines += ["for _r in range(_first, _last):", *(f"    {line}" for line in loop)] if by_row else loop
    lines += [f"_out[{i}] = _s{k}" for i, (k, _) in enumerate(layout.over_tensors)]

    body = textwrap.indent("\n".join(lines), " " * 8)
    native_names = ", ".join(["float32_at", "float64_at", "int64_at", "loose_add", *sorted(words)])
    return f'''"""Generated from {rule.__module__}.{rule.__qualname__}({", ".join(takes)}); do not edit."""
from math import inf
from numba import carray, cfunc, float32, float64, int32, int64, njit, void
from rlx_optim.engines.cpu.native import {native_names}

_F = {layout.arithmetic}


@njit(error_model="numpy")
{_in_arithmetic(rule)}


@cfunc(void(int64, int64, int64, int64, int64, int64, int64), error_model="numpy", cache=__file__ is not None)
def kernel(_address, _numbers, _chunks, _start, _stop, _partial, _scratch):
    _address_of = int64_at(_address)
    for _c in range(_start, _stop):
        _chunk = int64_at(_chunks + {8 * len(CHUNK)} * _c)
        _number = float64_at(_numbers + {8 * (len(numbers) + layout.beside)} * _chunk[0])
        _out = float64_at(_partial + {8 * len(layout.over_tensors)} * _c)
{body}
'''


def _start(how: Reduction) -> str:
    return "-inf" if how.largest else "0.0"


@functools.cache
def compiled(rule: Rule, layout: Layout) -> Any:
    """The kernel of a rule; `.address` is what callers need."""
    text = source(rule, layout)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    name = f"rlx_{rule.__name__[:40]}_{digest}"
    return kept(lambda folder: _made(name, text, folder))


def _made(name: str, text: str, folder: Path | None) -> Any:
    """The kernel of a generated module, which is a file only where what is compiled from it can be kept."""
    module = types.ModuleType(name)
    module.__file__ = None
    if folder is not None:
        module.__file__ = str(path := folder / f"{name}.py")
        if not path.exists() or path.read_bytes() != text.encode():
            _write(path, text)
    sys.modules[name] = module  # numba's cache looks the module up by name
    exec(compile(text, module.__file__ or f"<{name}>", "exec"), module.__dict__)
    return module.kernel


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(text.encode())
            file.close()  # Windows renames no file that is open
            os.replace(file.name, path)  # whole or not at all, whoever else writes it
        except BaseException:
            file.close()
            os.unlink(file.name)
            raise
