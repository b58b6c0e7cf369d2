"""A conformance suite for any optimizer: a class of torch.optim.Optimizer, an optax factory.

    report = check_optimizer("torch.optim:AdamW", quick=True)
    print(report.ok, report.counts())

`rlx-optim check PACKAGE:CLASS` and `pytest --optim PACKAGE:CLASS` are the same checks. torch, JAX and optax are imported when
something of theirs is checked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..registry import spec_class
from ..spec import Spec
from . import engines
from .table import CHECKS, Check, Report, Result, choose_checks, run_checks

__all__ = ["CHECKS", "Check", "Report", "Result", "check_optimizer", "checks_of", "load_target", "say_missing", "subject_of"]

#: by kind: the files that enter checks into the table
FILES = {
    "torch": ("both", "identity", "torch_steps", "torch_course", "torch_state", "torch_devices"),
    "optax": ("both", "identity", "optax_checks"),
    "rule": ("rules",),
}
NEEDS = {"torch": ("torch",), "optax": ("jax", "optax"), "rule": ()}


def say_missing(kind: str) -> str | None:
    """Return None, or what is not installed and how to get it."""
    return engines.say_missing(*NEEDS[kind])


def checks_of(kind: str) -> list[Check]:
    """Return all checks for that kind of optimizer, in the order in which they run."""
    for file in FILES[kind]:
        importlib.import_module(f".{file}", __package__)
    return [each for each in CHECKS.values() if kind in each.kinds]


def load_target(target: str) -> Any:
    """Import what PACKAGE:NAME names, or the rule of that name."""
    module, colon, name = target.partition(":")
    if not colon and module:
        return spec_class(module)
    if not (module and name):
        raise ValueError(f"{target!r}: say PACKAGE:CLASS, as in torch.optim:AdamW")
    with contextlib.suppress(OSError):  # a folder that has been removed
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` has it
    thing = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def subject_of(
    target: str, settings: Mapping[str, Any] | None = None, *, claimed: str | None = None, ranks: int = 2,
    engines: Sequence[str] | None = None,
) -> Any:  # fmt: skip
    """Return the optimizer or rule that is named, ready to be checked. claimed: the rule here that it is said to be. engines:
    where a rule is stepped."""
    thing, given = load_target(target), settings or {}
    torch = sys.modules.get("torch")
    if isinstance(thing, type) and issubclass(thing, Spec):
        from .rule_subject import RuleSubject

        checks_of("rule")
        return RuleSubject(thing, given, engines)
    if torch is not None and isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer):
        from .torch_subject import TorchSubject as Kind
    elif callable(thing) and not isinstance(thing, type) and say_missing("optax") is None:
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
    target: str, settings: Mapping[str, Any] | None = None, *, quick: bool = False, only: Sequence[str] = (),
    claimed: str | None = None, ranks: int = 0, tick: Callable[[str], None] = lambda name: None,
) -> Report:  # fmt: skip
    """Check a torch class, an optax factory or a rule by PACKAGE:NAME. quick: leave out what takes long. only: names of checks,
    or patterns like resume*. claimed: the rule that it is said to be. ranks: over how many processes, from 2 on."""
    made = subject_of(target, settings, claimed=claimed, ranks=ranks or 2, engines=["cpu"] if quick else None)
    report: Report = run_checks(made, choose_checks(made, quick=quick, only=only, ranks=ranks), tick)
    return report
