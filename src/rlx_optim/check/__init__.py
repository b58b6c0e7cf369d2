"""A conformance suite for any optimizer: a class of torch.optim.Optimizer, an optax factory.

    report = check_optimizer("torch.optim:AdamW", quick=True)
    print(report.ok, report.counts())

`rlx-optim check PACKAGE:CLASS` and `pytest --optim PACKAGE:CLASS` are the same checks. torch, JAX and optax are imported when
something of theirs is checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .table import CHECKS, KINDS, Check, Report, Result, chosen, told

__all__ = ["CHECKS", "Check", "Report", "Result", "check_optimizer", "checks_of", "found", "missing", "subject_of"]

#: by kind: the files that enter checks into the table, and the class of a subject
FILES = {
    "torch": ("torch_steps", "torch_course", "torch_state", "torch_devices", "ranks"),
    "optax": ("optax_checks",),
}
SHARED = ("both", "identity")
NEEDS = {"torch": ("torch",), "optax": ("jax", "optax")}


def missing(kind: str) -> str | None:
    """None, or what is not installed and how to get it."""
    absent = [name for name in NEEDS[kind] if importlib.util.find_spec(name) is None]
    extra = {"torch": "torch", "optax": "jax"}[kind]
    return f'{", ".join(absent)} not installed (pip install "rlx-optim[{extra}]")' if absent else None


def checks_of(kind: str) -> list[Check]:
    """All checks for that kind of optimizer, in the order in which they run."""
    for file in (*SHARED, *FILES[kind]):
        importlib.import_module(f".{file}", __package__)
    return [each for each in CHECKS.values() if kind in each.kinds]


def found(target: str) -> Any:
    """What PACKAGE:NAME names."""
    module, colon, name = target.partition(":")
    if not (colon and module and name):
        raise ValueError(f"{target!r}: say PACKAGE:CLASS, as in torch.optim:AdamW")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    thing = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def subject_of(target: str, settings: Mapping[str, Any] | None = None, *, claimed: str | None = None, ranks: int = 2) -> Any:
    """The optimizer that PACKAGE:NAME names, ready to be checked. claimed: the rule here that it is said to be."""
    thing, given = found(target), settings or {}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer):
        from .torch_subject import TorchSubject as Kind
    elif callable(thing) and not isinstance(thing, type) and missing("optax") is None:
        from .optax_subject import OptaxSubject as Kind  # type: ignore[assignment]
    else:
        raise TypeError(f"{target} is neither a torch.optim.Optimizer class nor an optax factory but {thing!r}")
    made = Kind(target, thing, given)
    made.claimed, made.ranks = claimed, ranks
    if claimed is not None:
        made.asked.add("which")
    checks_of(made.kind)
    return made


def check_optimizer(
    target: str,
    settings: Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    claimed: str | None = None,
    ranks: int = 0,
    tick: Callable[[str], None] = lambda name: None,
) -> Report:
    """Check a torch class or an optax factory by PACKAGE:NAME. quick: leave out what takes long. only: names of checks, or
    patterns like resume*. claimed: the rule that it is said to be. ranks: over how many processes, from 2 on."""
    made = subject_of(target, settings, claimed=claimed, ranks=ranks or 2)
    checks = list(chosen(made.kind, quick=quick, only=only, ranks=ranks))
    if not checks:
        known = ", ".join(each.name for each in checks_of(made.kind))
        raise ValueError(f"no check for {made.kind} is called {', '.join(only)}; known are {known}")
    return told(made, checks, tick)


assert set(FILES) == set(KINDS)
