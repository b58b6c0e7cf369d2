"""The language of rules: functions of one coordinate, and what becomes of their results.

A rule is a plain Python function: arithmetic, comparisons inside `where`, the vocabulary, local names, returned names. It means
the same on every engine, whether its arguments are numbers, arrays, lists of tensors or registers of a GPU. `checked` reads its
text once and refuses what is outside, with the line and the way to say it. docs/language.md is the specification.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from . import ops

Rule = Callable[..., Any]


class LanguageError(TypeError):
    """A rule or an update says something that engines could not all run."""


# ---- reductions -----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Reduction:
    """What becomes of a result instead of being stored: `kind` of a whole tensor, of each row, of each column, or of all tensors.

    squared: the squares are taken; largest: the largest is kept, not the sum; then `mean` divides by how many there were and
    `root` takes the root. axis: the axis of the domain that goes; None: all of them.
    """

    name: str
    axis: int | None
    everything: bool = False
    squared: bool = False
    largest: bool = False
    mean: bool = False
    root: bool = False


_KINDS: dict[str, dict[str, bool]] = {
    "sum": {},
    "mean": {"mean": True},
    "norm": {"squared": True, "root": True},
    "rms": {"squared": True, "mean": True, "root": True},
    "max": {"largest": True},
}
_SCOPES: dict[str, dict[str, Any]] = {
    "": {"axis": None},
    "row_": {"axis": -1},
    "column_": {"axis": -2},
    "all_": {"axis": None, "everything": True},
}
#: by name: "sum", "mean", "norm", "rms", "max" of a tensor; "row_…" and "column_…" of each row and column; "all_…" of all tensors
REDUCTIONS = {
    scope + kind: Reduction(scope + kind, **where, **how) for scope, where in _SCOPES.items() for kind, how in _KINDS.items()
}


# ---- rules ----------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Text:
    """A rule, read: the names it takes, the names it returns, and its syntax."""

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    tree: ast.FunctionDef


OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
COMPARISONS = (ast.Lt, ast.Gt, ast.LtE, ast.GtE, ast.Eq, ast.NotEq)
HINTS: dict[type, str] = {
    ast.Pow: "write x * x, or exp(n * log(x))",
    ast.IfExp: "write where(condition, yes, no)",
    ast.If: "write where(condition, yes, no), or two rules and choose between them in `update`",
    ast.For: "a rule is about one coordinate; what needs several goes into `update`",
    ast.While: "a rule is about one coordinate; what needs several goes into `update`",
    ast.BoolOp: "write & and | between comparisons in parentheses, inside where",
    ast.Subscript: "a rule is about one coordinate; what needs several goes into `update`",
    ast.Attribute: "call the vocabulary by its bare name: " + ", ".join(ops.RULE),
    ast.AugAssign: "write x = x + y",
    ast.Compare: "comparisons stand inside where(…)",
}


@functools.cache
def checked(rule: Rule) -> Text:
    """A rule that is inside the language, read."""
    return _Reader(rule).read()


def signature(rule: Rule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names a rule takes and the names it returns. A returned name replaces the value it names."""
    text = checked(rule)
    return text.takes, text.gives


@functools.cache
def signature_of_numbers(function: Rule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The same of a function on numbers (`E.each`): any Python over the vocabulary that returns names."""
    reader = _Reader(function)
    return reader.takes(), reader.returned(reader.tree.body[-1])


class _Reader:
    def __init__(self, rule: Rule):
        self.rule = rule
        if not inspect.isfunction(rule) or rule.__name__ == "<lambda>":
            raise LanguageError(f"a rule must be a function with a name (def …), got {rule!r}")
        try:
            lines, self.first = inspect.getsourcelines(rule)
        except (OSError, TypeError):
            raise LanguageError(f"{rule.__qualname__}: the text of a rule must be in a file, where engines can read it") from None
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or hasattr(rule, "__wrapped__"):
            raise self.refused(tree, "a rule is a plain function without decorators")
        self.tree, self.known = tree, set[str]()

    def refused(self, node: Any, why: str) -> LanguageError:
        code, line = self.rule.__code__, self.first + getattr(node, "lineno", 1) - 1
        quoted = "" if node is getattr(self, "tree", None) else f"`{ast.unparse(node)}` "
        where = f"{code.co_filename}:{line}: {self.rule.__name__}"
        return LanguageError(f"{where}: {quoted}is outside the language of rules: {why}; see docs/language.md")

    def takes(self) -> tuple[str, ...]:
        a = self.tree.args
        if a.vararg or a.kwarg or a.kwonlyargs or a.defaults or a.posonlyargs:
            raise self.refused(self.tree, "it takes names without defaults, each a coordinate or a number")
        names = tuple(each.arg for each in a.args)
        for name in names:
            self.check_name(self.tree, name)
        return names

    def check_name(self, node: Any, name: str) -> None:
        if name.startswith("_") or name in ops.SCALARS:
            raise self.refused(node, f"{name!r} cannot be the name of a value")

    def returned(self, statement: ast.stmt) -> tuple[str, ...]:
        value = statement.value if isinstance(statement, ast.Return) else None
        names = value.elts if isinstance(value, ast.Tuple) else [value]
        if not all(isinstance(name, ast.Name) for name in names):
            raise self.refused(statement, "it must end in `return` and the names of its results")
        found = tuple(name.id for name in names)  # type: ignore[union-attr]
        if len(set(found)) < len(found):
            raise self.refused(statement, "each result is returned once")
        return found

    def read(self) -> Text:
        takes = self.takes()
        if self.rule.__closure__ is not None:
            raise self.refused(
                self.tree, f"it takes {self.rule.__code__.co_freevars[0]!r} from around it; give it as an argument"
            )
        self.known = set(takes)
        body = self.tree.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]  # a docstring
        for statement in body[:-1]:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise self.refused(statement, HINTS.get(type(statement), "statements are `name = expression`"))
            (target,) = statement.targets
            if not isinstance(target, ast.Name):
                raise self.refused(statement, "statements are `name = expression`, one name each")
            self.check_name(statement, target.id)
            self.expression(statement.value)
            self.known.add(target.id)
        gives = self.returned(body[-1])
        if unknown := [name for name in gives if name not in self.known]:
            raise self.refused(body[-1], f"{unknown[0]!r} has no value")
        if "g" in gives:
            raise self.refused(body[-1], "gradients are never written; give the result another name than g")
        return Text(takes, gives, self.tree)

    def expression(self, node: ast.expr) -> None:
        match node:
            case ast.Name(id=name):
                if name not in self.known:
                    raise self.refused(node, "it is neither an argument nor a name given a value above")
            case ast.Constant(value=value):
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise self.refused(node, "the only literals are numbers")
            case ast.BinOp(left=left, op=op, right=right):
                if not isinstance(op, OPERATORS):
                    raise self.refused(node, HINTS.get(type(op), "the operators are + - * /"))
                self.expression(left)
                self.expression(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self.expression(operand)
            case ast.Call():
                self.call(node)
            case _:
                raise self.refused(node, HINTS.get(type(node), "the language has arithmetic, the vocabulary and names"))

    def call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in ops.RULE:
            raise self.refused(node, f"the vocabulary is {', '.join(ops.RULE)}")
        if len(node.args) != ops.RULE[name] or node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            raise self.refused(node, f"{name} takes {ops.RULE[name]} arguments")
        first, *rest = node.args
        if name == "where":
            self.condition(first)
        else:
            self.expression(first)
        for each in rest:
            self.expression(each)

    def condition(self, node: ast.expr) -> None:
        match node:
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
                self.condition(left)
                self.condition(right)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(op, COMPARISONS):
                self.expression(left)
                self.expression(right)
            case _:
                hint = (
                    HINTS[ast.BoolOp]
                    if isinstance(node, ast.BoolOp)
                    else "the first argument of where compares two values: a > b"
                )
                raise self.refused(node, hint)
