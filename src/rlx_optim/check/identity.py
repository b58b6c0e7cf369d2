"""Which Adam is this? How far an optimizer ends from our reference, under each of our conventions and of the known variants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..named import create
from ..registry import aliases, known
from .subject import Arrays, Subject, drawn, gap, replayed
from .table import Skip, Wrong, check

STEPS = 20
#: settings under which variants show; eps is large enough to be seen
PROBE: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1, "momentum": 0.8}
#: what others call a field of ours, and the place in it
NAMES = {
    "learning_rate": ("lr", None),
    "b1": ("betas", 0),
    "b2": ("betas", 1),
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "decay": ("momentum", None),
}
CLOSE, NEAR = 1e-4, 1e-2

DECAYS = {
    "decoupled": "decoupled decay, times lr",
    "coupled": "decay joins the gradient",
    "apart": "decoupled decay, not times lr",
    "none": "no decay",
}
EPS = {
    "outside": "eps outside the root",
    "inside": "eps inside the root",
    "early": "eps outside the root, before bias correction",
}
BIAS = {
    "both": "both moments corrected for bias",
    "none": "no bias correction",
    "first": "only the first moment corrected for bias",
}
USUAL = {"adamw": ("decoupled", "outside", "both"), "adam": ("coupled", "outside", "both")}


def claim(s: Subject) -> str:
    """The rule here that it says it is."""
    names = {name: name for name in known()} | aliases()
    word = (s.claimed or s.target.rpartition(":")[2]).lower()
    if word not in names:
        raise Skip(f"no rule here is called {word!r}; --as NAME says which it claims to be")
    return names[word]


def shared(s: Subject, rule: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings for it and for ours that mean the same: the probe's where both have the keyword, its own otherwise."""
    fields = known()[rule].fields
    foreign = {"torch": known()[rule].torch.settings, "optax": known()[rule].optax.settings}[s.kind]
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for keyword in s.keywords:
        if keyword in foreign:
            if s.given(keyword) is not None:
                ours[foreign[keyword].field] = foreign[keyword].read(s.given(keyword))
            continue
        field, place = (keyword, None) if keyword in fields else NAMES.get(keyword, (keyword, None))
        if field not in fields or (keyword in s.settings and keyword != s.rate):
            value = s.settings.get(keyword)
        elif field not in PROBE:
            value = s.given(keyword)
        else:
            value = PROBE[field] if place is None else PROBE[field][place]
            if isinstance(s.given(keyword), tuple) != isinstance(value, tuple) or len(np.atleast_1d(value)) != len(
                np.atleast_1d(s.given(keyword))
            ):
                value = s.given(keyword) if place is None and isinstance(s.given(keyword), (tuple, type(None))) else value
            theirs[keyword] = value
        if field in fields and value is not None:
            ours[field] = value if place is None else _placed(ours.get(field, fields[field].default), place, value)
    return theirs, ours


def _placed(pair: Any, place: int, value: Any) -> Any:
    return tuple(value if i == place else old for i, old in enumerate(pair))


def references(rule: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Ours under each of its conventions, with as many of the settings as it takes."""
    kind = known()[rule]
    options: list[str | None] = [None]
    if "convention" in kind.fields:
        inside = kind.fields["convention"].annotation.partition("[")[2].rpartition("]")[0]
        options = [word.strip().strip("'\"") for word in inside.split(",")]
    for convention in options:
        given = dict(settings) if convention is None else {**settings, "convention": convention}
        for dropped in (None, *settings):  # what the names share they need not mean alike
            try:
                if dropped is not None:
                    given.pop(dropped)
                kind(**given)
                break
            except (TypeError, ValueError):
                continue
        yield f"{kind.title}" + ("" if convention is None else f", convention {convention!r}"), given


def variant(start: Arrays, steps: int, gradient: Any, settings: dict[str, Any], decay: str, eps: str, bias: str) -> Arrays:
    """Adam in float64, with its choices said one by one."""
    (b1, b2), lr, small, shrink = settings["betas"], settings["lr"], settings["eps"], settings["weight_decay"]
    params = {n: p.astype(np.float64) for n, p in start.items()}
    m, v = ({n: np.zeros_like(p) for n, p in params.items()} for _ in range(2))
    for t in range(steps):
        found = gradient(t, params)
        for n, p in params.items():
            g = found[n].astype(np.float64) + (shrink * p if decay == "coupled" else 0)
            m[n], v[n] = b1 * m[n] + (1 - b1) * g, b2 * v[n] + (1 - b2) * g * g
            first = 1 - b1 ** (t + 1) if bias != "none" else 1.0
            second = 1 - b2 ** (t + 1) if bias == "both" else 1.0
            root = {
                "outside": lambda x, c: np.sqrt(x / c) + small,
                "inside": lambda x, c: np.sqrt(x / c + small),
                "early": lambda x, c: (np.sqrt(x) + small) / np.sqrt(c),
            }[eps](v[n], second)
            taken = {"decoupled": lr * shrink, "apart": shrink}.get(decay, 0.0) * p
            params[n] = p - taken - lr * m[n] / first / root
    return params


def walked(rule: str, settings: dict[str, Any], start: Arrays, gradient: Any, mark: str) -> Arrays:
    """Ours in float64. mark: before the names, by which it draws where it does."""
    opt = create(rule, engine="reference", **settings)
    params = {mark + n: p.copy() for n, p in start.items()}
    for t in range(STEPS):
        opt.step_all(params, {mark + n: g for n, g in gradient(t, {}).items()})
    return {n: params[mark + n] for n in start}


def candidates(s: Subject, rule: str, ours: dict[str, Any], start: Arrays, gradient: Any) -> Iterator[tuple[str, Arrays]]:
    for label, given in references(rule, ours):
        one, other = (walked(rule, given, start, gradient, mark) for mark in ("", "other "))
        if (apart := gap(one, other, start)) > CLOSE:
            raise Skip(f"it draws random numbers: two of ours end {apart:.0e} apart")
        yield label, one
    if rule in USUAL:
        kind = known()[rule]
        settings = {name: ours.get(name, kind.fields[name].default) for name in ("lr", "betas", "eps", "weight_decay")}
        for choice in itertools.product(DECAYS, EPS, BIAS):
            if choice != USUAL[rule]:
                words = [
                    table[each]
                    for table, each, usual in zip((DECAYS, EPS, BIAS), choice, USUAL[rule], strict=True)
                    if each != usual
                ]
                yield f"{kind.title} but for: {'; '.join(words)}", variant(start, STEPS, gradient, settings, *choice)


def which(s: Subject) -> tuple[float, str, float]:
    """How far it ends from ours as its name says; the nearest candidate, and how far that is."""
    rule = claim(s)
    if known()[rule].observes:
        raise Skip("it steps by estimates of the Hessian, which libraries are given in ways of their own")
    theirs, ours = shared(s, rule)
    shapes = {name: shape for name, shape in s.shapes.items() if len(shape) <= 2}
    start, gradient = drawn(shapes), replayed(shapes, 0.3)
    with s.refusable(f"stepping with {theirs}"):
        got = s.walk(start, gradient, STEPS, **theirs)
    ranking = [(gap(got, want, start), label) for label, want in candidates(s, rule, ours, start, gradient)]
    best = min(ranking)
    return ranking[0][0], best[1], best[0]


@check("which", "what calls itself AdamW may be another Adam: how far from ours, and what differs", taste=True)
def identity(s: Subject) -> Any:
    named, nearest, distance = which(s)
    if distance > NEAR:
        raise Wrong(f"{named:.1e} from ours after {STEPS} steps; nearest is {nearest}, {distance:.1e} away", named)
    if "but for" in nearest and named > CLOSE:
        raise Wrong(f"{named:.1e} from ours after {STEPS} steps; it is {nearest} ({distance:.0e} away)", named)
    return f"{nearest}: {distance:.0e}"
