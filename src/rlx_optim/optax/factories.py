"""The factories: keywords and defaults in optax's words, from the specs, and the transformations made of them."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from .. import documentation, registry
from ..numpy.classes import create as create_named
from ..numpy.optimizer import NamedOptimizer
from ..spec import MODIFIERS, REQUIRED, Field, Foreign, Spec, same
from .estimates import with_estimates
from .leaves import ScheduledRule, is_static
from .transform import Transform, find_transform, transformation

POSITIONAL = ("b1", "b2", "eps")  # where they come first, as in optax; the rest by keyword alone


def known() -> dict[str, type[Spec]]:
    """The rules by the names of their factories."""
    return {name_of(kind): kind for kind in registry.known().values()}


def name_of(kind: type[Spec]) -> str:
    return kind.optax.factory or kind.name


def find(name: str) -> type[Spec]:
    """The rule of that name, alias or factory."""
    return known().get(name) or registry.spec_class(name)


# ---- keywords ---------------------------------------------------------------------------------------------------------------
def is_unbounded(field: Field) -> bool:
    """Whether None means no bound, as in optax: it may be infinite, and None is nothing else."""
    try:
        field.check(math.inf)
    except (TypeError, ValueError):
        return False
    return "None" not in field.annotation


@functools.cache
def keywords(kind: type[Spec]) -> Mapping[str, tuple[Any, Foreign | None]]:
    """Every keyword but learning_rate: its default, and the field that it is (None where it is none, or a part of one).

    An integer that shapes the program or the state is None for the rule's own default: inject_hyperparams would trace a number.
    """
    called = {each.field: (keyword, each) for keyword, each in kind.optax.settings.items()}
    found: dict[str, tuple[Any, Foreign | None]] = {}
    for name, field in kind.fields.items():
        if name in kind.optax.spread:
            found |= {f"{kind.optax.spread[name]}{i}": (each, None) for i, each in enumerate(field.default, 1)}
        elif name != "lr" and name not in kind.optax.without:
            keyword, foreign = called.get(name, (name, Foreign(name)))
            default = None if field.annotation == "int" and is_static(kind, name) else foreign.write(field.default)
            found[keyword] = default, foreign
    first = [name for name in kind.optax.positional or () if name in found]
    found = {name: found[name] for name in dict.fromkeys([*first, *found])}
    beside: dict[str, Any] = {"update_interval": 10, "seed": None} if kind.observes else {}
    beside |= {"mask": None} if "weight_decay" in kind.fields else {}
    if kind.matrix or kind.otherwise_default:
        beside |= {"otherwise": "default" if kind.otherwise_default else None, "route": None, "stacked": None}
    found |= {name: (default, None) for name, default in beside.items()}
    found |= {name: found.pop(name) for name in MODIFIERS}  # the last
    return {name: (kind.optax.defaults.get(name, default), field) for name, (default, field) in found.items()}


def _values(kind: type[Spec], given: Mapping[str, Any]) -> dict[str, Any]:
    """A factory's keywords as the spec's fields. None, where a field does not take it, is no bound or the rule's own default."""
    values = {"lr": given["learning_rate"]}
    for pair, letter in kind.optax.spread.items():
        if pair in kind.fields:
            values[pair] = tuple(given[f"{letter}{i}"] for i in range(1, len(kind.fields[pair].default) + 1))
    for keyword, (_, foreign) in keywords(kind).items():
        if foreign is not None:
            field, value = kind.fields[foreign.field], given[keyword]
            if value is None and "None" not in field.annotation:
                values[foreign.field] = math.inf if is_unbounded(field) else field.default
            else:
                values[foreign.field] = foreign.read(value)
    return values


def to_keywords(kind: type[Spec], values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """A spec's settings as a factory's keywords: the field, and the value."""
    found = {"learning_rate": ("lr", values["lr"])}
    for pair, letter in kind.optax.spread.items():
        found |= {f"{letter}{i}": (pair, value) for i, value in enumerate(values.get(pair, ()), 1)}
    own = {keyword: foreign for keyword, (_, foreign) in keywords(kind).items() if foreign is not None}
    return found | {keyword: (each.field, each.write(values[each.field])) for keyword, each in own.items()}


def put_over(kind: type[Spec], values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A spec's settings with some of a factory's keywords put over them."""
    own = {keyword: value for keyword, (_, value) in to_keywords(kind, values).items()}
    fields = _values(kind, {**dict.fromkeys(keywords(kind)), **own, **given})
    return {name: fields.get(name, value) for name, value in values.items()}


def _other(kind: type[Spec], choice: Any, what: str, **beside: Any) -> ScheduledRule | None:
    """beside: further settings of the default one."""
    rule, default = kind.name, kind.otherwise_default
    if choice == "default" and default is not None:
        choice = create_named(default.name, **default.settings, **beside)
    match choice:
        case None:
            return None
        case NamedOptimizer():
            member = ScheduledRule(choice.spec, choice.hyperparameters())
            settings = choice._settings
            scheduled = any(callable(value) and not choice.spec.fields[name].callable for name, value in settings.given.items())
            alone = not scheduled and not settings.groups and choice.otherwise is None
        case optax.GradientTransformation() if inner := find_transform(choice):
            member, alone = inner.own, len(inner.members) == 1 and inner.mask is None and not inner.stacked
        case _:
            raise TypeError(
                f"{rule}: {what} must be like rlx_optim.AdamW(lr=3e-4) or rlx_optim.optax.adamw(3e-4), or None, got {choice!r}"
            )
    if not alone or member.kind.observes or (what == "otherwise" and not member.kind.accepts_any_shape):
        raise ValueError(
            f"{rule}: {what} must be one rule that takes every tensor, without groups or a mask of its own, "
            f"and with schedules only as rlx_optim.optax.adamw(schedule); got {choice!r}"
        )
    return member


def _build(kind: type[Spec], given: dict[str, Any]) -> Transform:
    own = ScheduledRule(kind, _values(kind, given))
    other = _other(kind, given.get("otherwise"), "otherwise", rounding=own.values["rounding"])
    route = given.get("route")
    if isinstance(route, Mapping):
        route = {k: v if isinstance(v, (str, bool)) else _other(kind, v, f"route[{k!r}]") for k, v in route.items()}
    return Transform(own, other, given.get("mask"), route, given.get("stacked"))


def _annotation(kind: type[Spec], keyword: str, default: Any) -> str:
    """The type of a keyword: a single number may be a schedule, one of a pair, or one that is converted, may not."""
    foreign = Foreign("lr") if keyword == "learning_rate" else keywords(kind)[keyword][1]
    field = None if foreign is None else kind.fields[foreign.field]
    if foreign is None or field is None:
        found = documentation.OPTAX.get(keyword, ("jax.typing.ArrayLike", ""))[0]
    elif foreign.read is not same:
        found = "jax.typing.ArrayLike"
    elif field.annotation.startswith("float"):
        found = field.annotation.replace("float", "optax.ScalarOrSchedule")
    elif field.annotation == "int" and not is_static(kind, foreign.field):
        found = "int | jax.Array"
    else:
        found = field.annotation
    optional = (default is None or (field is not None and is_unbounded(field))) and "None" not in found.split(" | ")
    return f"{found} | None" if optional else found


def signature(kind: type[Spec]) -> inspect.Signature:
    """What the factory takes and gives; `lab/stubs.py` writes the same."""
    defaults = {k: inspect.Parameter.empty if v is REQUIRED else v for k, (v, _) in keywords(kind).items()}
    rate = None if kind.fields["lr"].default is None else inspect.Parameter.empty
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    first = POSITIONAL if kind.optax.positional is None else kind.optax.positional
    leading = ["learning_rate", *itertools.takewhile(lambda name: name in first, defaults)]
    return inspect.Signature(
        [
            inspect.Parameter(k, either if k in leading else keyword, default=v, annotation=_annotation(kind, k, v))
            for k, v in {"learning_rate": rate, **defaults}.items()
        ],
        return_annotation="optax.GradientTransformationExtraArgs",
    )


def _bound(kind: type[Spec], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = documentation.bind_arguments(name_of(kind), signature(kind), args, kwargs)
    bound.apply_defaults()
    return bound.arguments


@functools.cache
def make_factory(kind: type[Spec]) -> Any:
    """The factory of that rule."""

    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        given = _bound(kind, args, kwargs)
        transform = _build(kind, given)
        if not kind.observes:
            return transformation(transform)
        return transformation(transform, with_estimates(transform, given["update_interval"], given["seed"]))

    function: Any = make
    function.__name__ = function.__qualname__ = name_of(kind)
    function.__module__, function.__signature__ = __package__, signature(kind)
    function.__doc__ = documentation.describe_class(kind, signature(kind), documentation.OPTAX)
    return function


def create(name: str, *args: Any, **keywords: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation by name: create("adamw", 1e-3, weight_decay=0.1)."""
    found: optax.GradientTransformationExtraArgs = make_factory(find(name))(*args, **keywords)
    return found


def build_by_name(name: str, keywords: Mapping[str, Any]) -> Transform:
    """What a factory would make of these keywords, at any rate."""
    kind = find(name)
    return _build(kind, _bound(kind, (), {"learning_rate": 1.0, **keywords}))
