"""The named-step optimizers, made from their specs. `classes.pyi` beside it shows ours to editors and type checkers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from .. import documentation, registry
from ..registry import spec_class as spec_class
from ..spec import MODIFIERS, REQUIRED, Field, Spec
from .curvature import CurvatureOptimizer
from .optimizer import NamedOptimizer

_DEFAULT: Any = object()
__all__ = [kind.title for kind in registry.OURS]


def _signature(kind: type[Spec]) -> inspect.Signature:
    def parameter(name: str, default: Any, annotation: str, how: Any = inspect.Parameter.KEYWORD_ONLY) -> inspect.Parameter:
        return inspect.Parameter(
            name, how, default=inspect.Parameter.empty if default is REQUIRED else default, annotation=annotation
        )

    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    fields = [parameter(n, f.default, _annotation(f), keyword if n in MODIFIERS else either) for n, f in kind.fields.items()]
    defaults = {"otherwise": kind.otherwise_default} if kind.matrix or kind.otherwise_default else {}
    defaults |= {"groups": None, "engine": "auto", "precision": "float32", "nonfinite": "propagate", "skip_above": None}
    return inspect.Signature([*fields, *(parameter(n, d, documentation.NAMED[n][0]) for n, d in defaults.items())])


def _annotation(field: Field) -> str:
    """A setting may be a schedule unless it shapes the state."""
    if field.fixed or field.annotation.startswith("Callable"):
        return field.annotation
    return f"{field.annotation} | Callable[[int], {field.annotation}]"


@functools.cache
def make_class(kind: type[Spec]) -> type[NamedOptimizer]:
    """The class of that rule."""
    title, fallback = kind.title, kind.otherwise_default
    base, signature = CurvatureOptimizer if kind.observes else NamedOptimizer, _signature(kind)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], Iterable) and not isinstance(args[0], str) and getattr(args[0], "shape", None) != ():
            raise TypeError(
                f"{title}: parameters are given to step_all(params, grads), not here; the first argument is lr, got "
                f"{type(args[0]).__name__}"
            )
        if len(args) > (most := len(kind.fields) - len(MODIFIERS)):
            raise TypeError(f"{title} takes at most {most} positional arguments, got {len(args)}")
        given = dict(zip(kind.fields, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{title}: {', '.join(sorted(twice))} given twice")
        if fallback is None and not kind.matrix and "otherwise" in kwargs:
            raise TypeError(f"{title}: takes every tensor itself and has no otherwise")
        if not kwargs.keys() <= signature.parameters.keys():
            raise documentation.unknown_keyword_error(title, kwargs, list(signature.parameters))
        if fallback is not None and kwargs.setdefault("otherwise", _DEFAULT) is _DEFAULT:
            kwargs["otherwise"] = create(fallback.name, **fallback.settings)
        base.__init__(self, **given, **kwargs)

    return type(title, (base,), {
        "__init__": __init__, "__doc__": documentation.describe_class(kind, signature, documentation.NAMED),
        "__module__": __name__, "__signature__": signature, "spec": kind,
    })  # fmt: skip


def __getattr__(title: str) -> Any:
    return make_class(registry.find_titled(title, __name__))


def create(name: str, **settings: Any) -> NamedOptimizer:
    """An optimizer by name: create("adamw", lr=3e-4)."""
    return make_class(spec_class(name))(**settings)


def list_optimizers() -> list[str]:
    """The names that `create` knows."""
    return list(registry.known())
