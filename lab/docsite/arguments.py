"""Every argument of every class and factory, by front end, from the stubs and `documentation`, without torch and JAX."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlx_optim import documentation
from rlx_optim.registry import OURS
from rlx_optim.spec import Spec

from .text import prose, stacked, table

PACKAGE = Path(documentation.__file__).parent
#: the stub, the module, what it has beside hyperparameters
FRONT_ENDS = {
    "NumPy": (PACKAGE / "numpy" / "classes.pyi", "rlx_optim", documentation.NAMED),
    "PyTorch": (PACKAGE / "torch" / "__init__.pyi", "rlx_optim.torch", documentation.TORCH),
    "JAX": (PACKAGE / "optax" / "__init__.pyi", "rlx_optim.optax", documentation.OPTAX),
}


class Argument(NamedTuple):
    name: str
    type: str
    default: str | None  # None: required
    keyword: bool


@functools.cache
def signatures(front_end: str) -> dict[str, list[Argument]]:
    """Every class or factory of a stub and its arguments."""
    found = {}
    for node in ast.parse(FRONT_ENDS[front_end][0].read_text()).body:
        bodies = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in bodies:
            if isinstance(function, ast.FunctionDef) and function.name in ("__init__", node.name):
                found[node.name] = [each for each in listed(function.args) if each.name != "self"]
    return found


def listed(args: ast.arguments) -> Iterator[Argument]:
    blank = [None] * (len(args.args) - len(args.defaults))
    for keyword, names, defaults in ((False, args.args, [*blank, *args.defaults]), (True, args.kwonlyargs, args.kw_defaults)):
        for each, default in zip(names, defaults, strict=True):
            kind = ast.unparse(each.annotation) if each.annotation else ""
            yield Argument(each.arg, kind, None if default is None else ast.unparse(default), keyword)


def name_in(front_end: str, kind: type[Spec]) -> str:
    return kind.optax.factory or kind.name if front_end == "JAX" else kind.title


def signature(front_end: str, kind: type[Spec]) -> str:
    """The call with all defaults, folded."""
    lines = []
    for each in signatures(front_end)[name_in(front_end, kind)]:
        lines += ["*"] if each.keyword and "*" not in lines else []
        lines.append(each.name if each.default is None else f"{each.name}={default(each, kind)}")
    call = f"{name_in(front_end, kind)}({', '.join(lines)})"
    return "\n".join(textwrap.wrap(call, 78, subsequent_indent="    ", break_long_words=False))


def default(argument: Argument, kind: type[Spec]) -> str:
    given = documentation.format_default(kind.otherwise_default) if argument.default == "..." else str(argument.default)
    return given.replace("e-0", "e-")


def arguments(front_end: str, kind: type[Spec]) -> str:
    """A table: argument, type, default, meaning."""
    said, rows = documentation.meanings(kind, FRONT_ENDS[front_end][2]), []
    for each in signatures(front_end)[name_in(front_end, kind)]:
        given = "required" if each.default is None else f"`{default(each, kind)}`"
        meaning = prose(said[each.name], kind.fields).replace(">=", "≥").replace("<=", "≤").replace("<", "&lt;")
        kind_of = each.type.replace("|", "&#124;")  # which would end the cell
        rows.append([f"`{each.name}`", f"<code>{kind_of}</code>", given, meaning])
    return stacked(table(["argument", "type", "default", "what it is, and must be"], rows)).replace(
        "stacked", "stacked arguments", 1
    )


def reference(front_end: str) -> str:
    """All of a front end."""
    module = FRONT_ENDS[front_end][1]
    return "\n\n".join(
        f"### {module}.{name_in(front_end, kind)} {{ #{name_in(front_end, kind)} }}\n\n"
        f"{kind.summary[0].upper()}{kind.summary[1:]}; its [formulas and conventions](../optimizers/{kind.name}.md).\n\n"
        f"{arguments(front_end, kind)}"
        for kind in OURS
    )
