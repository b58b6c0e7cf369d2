"""Which optimizers there are, by name: ours, those that were registered, those of installed packages.

    @rlx_optim.register
    class AdaBelief(Spec): ...

    [project.entry-points."rlx_optim.optimizers"]        # in a package's pyproject.toml: a Spec, or a module that registers some
    adabelief = "my_package.adabelief:AdaBelief"

Installed packages are asked when a name is not known otherwise, or all names are wanted.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import keyword
import sys
import types
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

from .spec import REQUIRED, Spec

GROUP = "rlx_optim.optimizers"
#: ours: the file in `rules/` and the class in it
FILES = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadamw": "NAdamW",
    "radam": "RAdam",
    "qhadamw": "QHAdamW",
    "stableadamw": "StableAdamW",
    "ademamix": "AdEMAMix",
    "adan": "Adan",
    "adopt": "ADOPT",
    "laprop": "LaProp",
    "lamb": "Lamb",
    "lars": "LARS",
    "adafactor": "Adafactor",
    "lion": "Lion",
    "soap": "SOAP",
    "kronpsgd": "KronPSGD",
    "muon": "Muon",
    "sophia": "Sophia",
    "mars": "MARS",
    "prodigy": "Prodigy",
    "normuon": "NorMuon",
    "scion": "Scion",
    "schedulefreeadamw": "ScheduleFreeAdamW",
    "schedulefreesgd": "ScheduleFreeSGD",
}
#: what in the front ends' modules is something else, in lower case
TAKEN = {
    "optimizer", "namedoptimizer", "ruleoptimizer", "curvatureoptimizer", "rulestate", "checkpointerror", "create", "load_state",
    "save_state", "averaged", "routing_report", "skip_above", "guard", "checkpoint", "estimates", "factories", "foreign",
    "graphed", "leaves", "nested", "transform",
}  # fmt: skip
_KINDS: dict[str, type[Spec]] = {}
_asked = False  # whether installed packages were
Kind = TypeVar("Kind", bound=type[Spec])


def register(kind: Kind) -> Kind:
    """Make an optimizer known to every front end, by the name its class says. Gives the class back: it may be a decorator.

    A class that is defined again (the same module and qualified name: a notebook's cell run twice, a module reloaded) takes the
    place of the one before. Optimizers made before stay of the class they were made from: make them anew after a change.
    """
    if not (isinstance(kind, type) and issubclass(kind, Spec)) or inspect.isabstract(kind):
        raise TypeError(f"register takes a subclass of rlx_optim.rule.Spec with slots and update, got {kind!r}")
    if _KINDS.get(kind.name) is kind:
        return kind
    if "lr" not in kind.fields:
        raise ValueError(f"{kind.title}: a rule needs a hyperparameter lr, which schedules move")
    for word in (kind.name, *kind.aliases, kind.optax.factory or kind.name):
        if not (isinstance(word, str) and word.isidentifier() and word.islower() and not keyword.iskeyword(word)):
            raise ValueError(f"{kind.title}: a name must be an identifier in lower case, got {word!r}")
    if not kind.title.isidentifier() or kind.title.islower() or kind.title.startswith("_"):
        raise ValueError(f"{kind.title}: a title must be a class's name, with a capital, got {kind.title!r}")
    before = []
    for other in _KINDS.values():
        if words := names_of(kind) & names_of(other):
            if other.name in FILES or not is_redefined(kind, other):
                raise ValueError(
                    f"{kind.__module__}.{kind.__qualname__}: {min(words)!r} is already {other.__module__}.{other.__qualname__}; "
                    "give the class another name"
                )
            before.append(other.name)
    if words := names_of(kind) & TAKEN:
        raise ValueError(f"{kind.__module__}.{kind.__qualname__}: {min(words)!r} is a word of rlx_optim; give it another name")
    for name in before:
        del _KINDS[name]
    _KINDS[kind.name] = kind
    return kind


def names_of(kind: type[Spec]) -> set[str]:
    """Every name that a rule has in a front end, in lower case."""
    return {kind.name, *kind.aliases, kind.optax.factory or kind.name, kind.title.lower()}


def is_redefined(kind: type[Spec], other: type[Spec]) -> bool:
    """Whether one is the other, defined again."""
    return (kind.__module__, kind.__qualname__) == (other.__module__, other.__qualname__)


OURS = [register(getattr(importlib.import_module(f".rules.{file}", __package__), title)) for file, title in FILES.items()]


def known() -> dict[str, type[Spec]]:
    """Every optimizer by its name, those of installed packages included. A package that fails is warned about."""
    global _asked
    if not _asked:
        _asked = True
        for entry in importlib.metadata.entry_points(group=GROUP):
            try:
                found = entry.load()
                if not isinstance(found, types.ModuleType):
                    register(found)
            except Exception as problem:
                package = entry.dist.name if entry.dist is not None else "?"
                warnings.warn(
                    f"the optimizer {entry.name!r} ({entry.value}) of the package {package} cannot be loaded: "
                    f"{type(problem).__name__}: {problem}",
                    stacklevel=2,
                )
    return dict(_KINDS)


def aliases() -> dict[str, str]:
    """Other names of optimizers, and what they stand for."""
    return {alias: kind.name for kind in known().values() for alias in kind.aliases}


def is_registered(kind: type[Spec]) -> bool:
    """Whether it is known by its name, or what it was defined again as."""
    return kind.name in _KINDS and is_redefined(kind, _KINDS[kind.name])


def spec_class(name: str) -> type[Spec]:
    """The spec of that name or alias, in any case."""
    key = name.lower() if isinstance(name, str) else ""
    if key in _KINDS:
        return _KINDS[key]
    kinds, others = known(), aliases()
    if others.get(key, key) not in kinds:
        near = nearest(key, [*kinds, *others])
        asked = f"did you mean {near!r}? Known" if near else "known"
        raise ValueError(f"unknown optimizer {name!r}; {asked} are {', '.join([*kinds, *others])}")
    return kinds[others.get(key, key)]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that fewest slips lead to; a letter changed, left out or added and two exchanged are one each. Of
    names that are equally near, one that begins with the word comes first, then one of its length."""
    word = word.lower()
    near = difflib.get_close_matches(word, list(dict.fromkeys(known)), 9)

    def slips(name: str) -> int:
        rows = [list(range(len(name) + 1))]
        for i, a in enumerate(word, 1):
            rows.append([i])
            for j, b in enumerate(name, 1):
                least = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (a != b))
                if i > 1 and j > 1 and (a, word[i - 2]) == (name[j - 2], b):
                    least = min(least, rows[i - 2][j - 2] + 1)
                rows[i].append(least)
        return rows[-1][-1]

    return min(near, key=lambda name: (slips(name), not name.startswith(word), abs(len(name) - len(word))), default=None)


def find_titled(title: str, module: str) -> type[Spec]:
    """The spec whose classes have that name, where it is asked of a module."""
    if not title.islower() and not title.startswith("_"):  # modules are in lower case, and no optimizer's title is
        titles = {kind.title: kind for kind in _KINDS.values()}
        if found := titles.get(title) or {kind.title: kind for kind in known().values()}.get(title):
            return found
    raise AttributeError(f"module {module!r} has no attribute {title!r}")


def required(kind: type[Spec]) -> dict[str, float]:
    """A number for every hyperparameter that has no default, where any will do."""
    return {name: 0.01 for name, field in kind.fields.items() if field.default is REQUIRED}


def documentation(kind: type[Spec]) -> str:
    """Of the file, which is the optimizer's; of the class, where the file has none or has several."""
    module: Any = sys.modules.get(kind.__module__)
    beside = [each for each in vars(module or kind).values() if isinstance(each, type) and issubclass(each, Spec)]
    alone = kind in beside and all(each.__module__ != kind.__module__ or each in kind.__mro__ for each in beside)
    return (inspect.getdoc(module) if alone else None) or inspect.cleandoc(kind.__doc__ or "")
