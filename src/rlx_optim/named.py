"""The fourteen named-step optimizers, made from their specs. `named.pyi` beside it shows them to editors and type checkers."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from .curvature import CurvatureOptimizer
from .optimizer import NamedOptimizer
from .registry import ALIASES, OPTIMIZERS
from .spec import REQUIRED, Spec

_DEFAULT: Any = object()


def spec_class(name: str) -> type[Spec]:
    """The spec in `rules/` behind a registered name."""
    file, attribute, _ = OPTIMIZERS[name]
    found: type[Spec] = getattr(importlib.import_module(f".rules.{file}", __package__), attribute)
    return found


def _signature(kind: type[Spec]) -> inspect.Signature:
    def parameter(name: str, default: Any, how: Any = inspect.Parameter.KEYWORD_ONLY) -> inspect.Parameter:
        return inspect.Parameter(name, how, default=inspect.Parameter.empty if default is REQUIRED else default)

    fields = [parameter(n, f.default, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n, f in kind.fields.items()]
    common = {"groups": None, "engine": "auto", "precision": "float32", "nonfinite": "propagate"}
    extra = [parameter("otherwise", kind.otherwise_default)] if kind.otherwise_default else []
    return inspect.Signature([*fields, *extra, *(parameter(n, d) for n, d in common.items())])


def _make(name: str) -> type[NamedOptimizer]:
    kind, (_, title, _) = spec_class(name), OPTIMIZERS[name]
    base = CurvatureOptimizer if kind.observes else NamedOptimizer
    fallback = kind.otherwise_default

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(kind.fields):
            raise TypeError(f"{title} takes at most {len(kind.fields)} positional arguments, got {len(args)}")
        given = dict(zip(kind.fields, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{title}: {', '.join(sorted(twice))} given twice")
        if fallback is None and "otherwise" in kwargs:
            raise TypeError(f"{title}: takes every tensor itself and has no otherwise")
        if fallback is not None and kwargs.setdefault("otherwise", _DEFAULT) is _DEFAULT:
            kwargs["otherwise"] = create(fallback.name, **fallback.settings)
        base.__init__(self, **given, **kwargs)

    doc = inspect.getdoc(importlib.import_module(kind.__module__))
    return type(title, (base,), {
        "__init__": __init__, "__doc__": doc, "__module__": __name__, "__signature__": _signature(kind), "spec": kind,
    })  # fmt: skip


for _name, (_, _title, _) in OPTIMIZERS.items():
    globals()[_title] = _make(_name)


def create(name: str, **settings: Any) -> NamedOptimizer:
    """An optimizer by name: create("adamw", lr=3e-4)."""
    key = ALIASES.get(name.lower(), name.lower()) if isinstance(name, str) else name
    if key not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; known are {', '.join([*OPTIMIZERS, *ALIASES])}")
    made: NamedOptimizer = globals()[OPTIMIZERS[key][1]](**settings)
    return made


def list_optimizers() -> list[str]:
    """The names that `create` knows."""
    return list(OPTIMIZERS)
