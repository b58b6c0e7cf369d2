"""The named-step optimizers, made from their specs. `named.pyi` beside it shows ours to editors and type checkers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from . import registry
from .curvature import CurvatureOptimizer
from .optimizer import NamedOptimizer
from .registry import spec_class as spec_class
from .spec import MODIFIERS, REQUIRED, Spec

_DEFAULT: Any = object()
__all__ = [kind.title for kind in registry.OURS]


def _signature(kind: type[Spec]) -> inspect.Signature:
    def parameter(name: str, default: Any, how: Any = inspect.Parameter.KEYWORD_ONLY) -> inspect.Parameter:
        return inspect.Parameter(name, how, default=inspect.Parameter.empty if default is REQUIRED else default)

    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    fields = [parameter(n, f.default, keyword if n in MODIFIERS else either) for n, f in kind.fields.items()]
    common = {"groups": None, "engine": "auto", "precision": "float32", "nonfinite": "propagate", "skip_above": None}
    extra = [parameter("otherwise", kind.otherwise_default)] if kind.otherwise_default else []
    return inspect.Signature([*fields, *extra, *(parameter(n, d) for n, d in common.items())])


@functools.cache
def made(kind: type[Spec]) -> type[NamedOptimizer]:
    """The class of that rule."""
    title, fallback = kind.title, kind.otherwise_default
    base = CurvatureOptimizer if kind.observes else NamedOptimizer

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > (most := len(kind.fields) - len(MODIFIERS)):
            raise TypeError(f"{title} takes at most {most} positional arguments, got {len(args)}")
        given = dict(zip(kind.fields, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{title}: {', '.join(sorted(twice))} given twice")
        if fallback is None and "otherwise" in kwargs:
            raise TypeError(f"{title}: takes every tensor itself and has no otherwise")
        if fallback is not None and kwargs.setdefault("otherwise", _DEFAULT) is _DEFAULT:
            kwargs["otherwise"] = create(fallback.name, **fallback.settings)
        base.__init__(self, **given, **kwargs)

    return type(title, (base,), {
        "__init__": __init__, "__doc__": registry.documentation(kind), "__module__": __name__,
        "__signature__": _signature(kind), "spec": kind,
    })  # fmt: skip


def __getattr__(title: str) -> Any:
    return made(registry.titled(title, __name__))


def create(name: str, **settings: Any) -> NamedOptimizer:
    """An optimizer by name: create("adamw", lr=3e-4)."""
    return made(spec_class(name))(**settings)


def list_optimizers() -> list[str]:
    """The names that `create` knows."""
    return list(registry.known())
