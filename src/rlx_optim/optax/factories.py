"""The factories: a table of keywords and defaults in optax's words, and the transformations made of them."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from ..named import create, spec_class
from ..optimizer import NamedOptimizer
from .places import STATIC, Member
from .sophia import with_estimates
from .transform import Transform, transformation

MASK = {"mask": None}
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
ROUTED = {"otherwise": "default", "route": None, "stacked": None}

#: factory -> rule, keywords with their defaults, and the names of keywords that the rule calls otherwise. Integers that shape the
#: program or the state are None for the rule's own default: inject_hyperparams would trace a number.
FACTORIES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "sgd": ("sgd", {"momentum": None, "nesterov": False, "dampening": 0.0, "weight_decay": 0.0, **MASK}, {}),
    "adam": ("adam", {**ADAM, "weight_decay": 0.0, "amsgrad": False, **MASK}, {}),
    "adamw": ("adamw", {**ADAM, "weight_decay": 1e-4, "amsgrad": False, **MASK}, {}),
    "nadamw": ("nadamw", {**ADAM, "weight_decay": 1e-4, "convention": "dozat", "momentum_decay": 4e-3, **MASK}, {}),
    "radam": ("radam", {**ADAM, "weight_decay": 0.0, "decoupled_weight_decay": False, "convention": "paper", **MASK}, {}),
    "qhadamw": ("qhadamw", {"b1": 0.995, "b2": 0.999, "nu1": 0.7, "nu2": 1.0, "eps": 1e-8, "weight_decay": 0.01, **MASK}, {}),
    "lamb": ("lamb", {**ADAM, "eps": 1e-6, "weight_decay": 0.0, "bias_correction": True, "trust_clip": None, **MASK}, {}),
    "adafactor": (
        "adafactor",
        {"decay_rate": 0.8, "eps": 1e-30, "clipping_threshold": 1.0, "momentum": None, "multiply_by_parameter_scale": True,
         "weight_decay": 0.0, "convention": "paper", **MASK},
        {"clipping_threshold": "clip_threshold", "momentum": "beta1", "multiply_by_parameter_scale": "scale_parameter"},
    ),
    "lion": ("lion", {"b1": 0.9, "b2": 0.99, "weight_decay": 1e-3, **MASK}, {}),
    "soap": (
        "soap",
        {"b1": 0.95, "b2": 0.95, "shampoo_beta": None, "eps": 1e-8, "weight_decay": 0.01, "precondition_frequency": 10,
         "max_precond_dim": None, "merge_dims": False, "precondition_1d": False, **MASK, "stacked": None},
        {},
    ),
    "kron_psgd": (
        "kronpsgd",
        {"b1": 0.9, "weight_decay": 0.0, "precond_lr": 0.1, "precond_init_scale": 1.0, "preconditioner_update_probability": None,
         "max_size": None, "min_ndim_triangular": None, "memory_save_mode": None, "momentum_into_precond_update": True,
         "balance_probability": 0.01, "seed": None, **MASK, "stacked": None},
        {"b1": "beta1"},
    ),
    "muon": (
        "muon",
        {"beta": 0.95, "nesterov": True, "weight_decay": 0.0, "ns_steps": None, "ns_coeffs": (3.4445, -4.7750, 2.0315),
         "eps": 1e-7, "convention": "keller", **MASK, **ROUTED},
        {"beta": "momentum", "ns_coeffs": "ns_coefficients"},
    ),
    "sophia": (
        "sophia",
        {"b1": 0.965, "b2": 0.99, "eps": 1e-8, "weight_decay": 1e-4, "gamma": 0.01, "clip_threshold": 1.0, "update_interval": 10,
         "seed": None, **MASK},
        {"clip_threshold": "clip"},
    ),
    "mars": (
        "mars",
        {"b1": 0.95, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "gamma": 0.025, "clip_norm": 1.0, "variant": "adamw",
         **MASK, **ROUTED},
        {},
    ),
}  # fmt: skip
ENDLESS = ("clip", "clip_threshold")  # fields of which None means no bound, as in optax
OPTIONAL_RATE = ("adafactor",)
POSITIONAL = ("b1", "b2", "eps", "momentum", "nesterov")  # where they come first, as in optax; the rest by keyword alone
#: keywords that are no fields of the rule, with their types
BESIDE = {
    "mask": "Any | Callable[[Any], Any]",
    "otherwise": "NamedOptimizer | optax.GradientTransformation | Literal['default'] | None",
    "route": "Mapping[str, NamedOptimizer | optax.GradientTransformation | str] | Callable[[str, Any], bool | None]",
    "stacked": "Mapping[str, int]",
    "update_interval": "int | jax.Array",
}


def _values(rule: str, given: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """A factory's keywords as the spec's fields."""
    fields = spec_class(rule).fields
    values = {renamed.get(k, k): v for k, v in given.items() if k not in BESIDE}
    values["lr"] = values.pop("learning_rate")
    for pair, names in (("betas", ("b1", "b2")), ("nus", ("nu1", "nu2"))):
        if pair in fields:
            values[pair] = tuple(values.pop(name) for name in names)
    if rule == "adafactor":
        values |= {"beta2_decay": -values.pop("decay_rate"), "eps": (values["eps"], 1e-3)}
    if rule == "sgd" and values["momentum"] is None:
        values["momentum"] = 0.0
    if rule == "sophia":
        values.pop("seed")
    values |= {k: math.inf for k in ENDLESS if k in values and values[k] is None}
    missing = [k for k, v in values.items() if v is None and fields[k].annotation in ("int",)]
    return {k: fields[k].default if k in missing else v for k, v in values.items()}


def _member(rule: str, values: Mapping[str, Any]) -> Member:
    return Member(rule, spec_class(rule), values)


def _other(rule: str, choice: Any, what: str) -> Member | None:
    default = spec_class(rule).otherwise_default
    if choice == "default" and default is not None:
        choice = create(default.name, **default.settings)
    match choice:
        case None:
            return None
        case NamedOptimizer():
            member = _member(type(choice).__name__.lower(), choice.hyperparameters())
            settings = choice._settings
            scheduled = any(callable(value) for name, value in settings.given.items() if name != "probe")
            alone = not scheduled and not settings.groups and choice.otherwise is None
        case optax.GradientTransformation(init=types.MethodType(__self__=Transform() as inner)):
            member, alone = inner.own, len(inner.members) == 1 and inner.mask is None and not inner.stacked
        case _:
            raise TypeError(
                f"{rule}: {what} must be like rlx_optim.AdamW(lr=3e-4) or rlx_optim.optax.adamw(3e-4), or None, got {choice!r}"
            )
    if not alone or member.kind.observes or (what == "otherwise" and not member.kind.everywhere):
        raise ValueError(
            f"{rule}: {what} must be one rule that takes every tensor, without groups or a mask of its own, "
            f"and with schedules only as rlx_optim.optax.adamw(schedule); got {choice!r}"
        )
    return member


def _build(factory: str, given: dict[str, Any]) -> Transform:
    rule, _, renamed = FACTORIES[factory]
    own = _member(rule, _values(rule, given, renamed))
    other, route = _other(rule, given.get("otherwise"), "otherwise"), given.get("route")
    if isinstance(route, Mapping):
        route = {k: v if isinstance(v, (str, bool)) else _other(rule, v, f"route[{k!r}]") for k, v in route.items()}
    return Transform(own, other, given.get("mask"), route, given.get("stacked"))


def _annotation(factory: str, keyword: str, default: Any) -> str:
    """The type of a keyword: a single number may be a schedule, one of a pair may not."""
    rule, _, renamed = FACTORIES[factory]
    name = renamed.get(keyword, keyword)
    field = spec_class(rule).fields.get("lr" if name == "learning_rate" else name)
    if keyword in BESIDE:
        found = BESIDE[keyword]
    elif keyword == "seed":
        found = "int"
    elif field is None or field.annotation == "tuple[float, float]":
        found = "jax.typing.ArrayLike"
    elif field.annotation.startswith("float"):
        found = field.annotation.replace("float", "optax.ScalarOrSchedule")
    elif field.annotation == "int" and not field.fixed and name not in STATIC:
        found = "int | jax.Array"
    else:
        found = field.annotation
    optional = (default is None or name in ENDLESS) and "None" not in found.split(" | ")
    return f"{found} | None" if optional else found


def signature(factory: str) -> inspect.Signature:
    """What the factory takes and gives; `tools/stubs.py` writes the same."""
    keywords, rate = FACTORIES[factory][1], None if factory in OPTIONAL_RATE else inspect.Parameter.empty
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    leading = ["learning_rate", *itertools.takewhile(lambda name: name in POSITIONAL, keywords)]
    return inspect.Signature(
        [
            inspect.Parameter(k, either if k in leading else keyword, default=v, annotation=_annotation(factory, k, v))
            for k, v in {"learning_rate": rate, **keywords}.items()
        ],
        return_annotation="optax.GradientTransformationExtraArgs",
    )


def _bound(factory: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = signature(factory).bind(*args, **kwargs)
    except TypeError as problem:
        raise TypeError(f"{factory}: {problem}; known are learning_rate, {', '.join(FACTORIES[factory][1])}") from None
    bound.apply_defaults()
    return bound.arguments


def made(factory: str) -> Any:
    """The factory of that name."""

    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        given = _bound(factory, args, kwargs)
        transform = _build(factory, given)
        if factory != "sophia":
            return transformation(transform)
        return transformation(transform, with_estimates(transform, given["update_interval"], given["seed"]))

    function: Any = make
    function.__name__ = function.__qualname__ = factory
    function.__module__, function.__signature__ = __package__, signature(factory)
    function.__doc__ = sys.modules[spec_class(FACTORIES[factory][0]).__module__].__doc__
    return function


def routing_report(factory: str, params: Any, **keywords: Any) -> str:
    """Which parameter goes to which rule under `muon(**keywords)` and the like, and why, as a table."""
    return _build(factory, _bound(factory, (), {"learning_rate": 1.0, **keywords})).routing_report(params)
