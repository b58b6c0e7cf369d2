"""Which Adam is this? How far an optimizer ends from our reference, and what differs.

Looked at in turn, until one is close: our conventions; another weight decay; for Adam another eps and bias correction; the same
without decay, or with an eps of nothing; each keyword that ours does not have, at another value.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..numpy.classes import create
from ..registry import aliases, known
from .subject import UNASKED, Arrays, OptimizerSubject, draw, find_gap, replay
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
CLOSE, NEAR, ABOUT = 1e-4, 1e-2, 0.1  # the last for matrix rules, whose products may be of bfloat16
LEAST = 1e-4  # what moves parameters of size 1 less tells nothing

DECAYS = {
    "decoupled": "decoupled decay, times lr",
    "coupled": "decay joins the gradient",
    "apart": "decoupled decay, not times lr",
    "none": "no decay",
}
#: what may differ in a form that is not known: without it both are the same
REST = {"the decay": {"weight_decay": 0.0}, "eps": {"eps": 1e-10}, "the decay and eps": {"weight_decay": 0.0, "eps": 1e-10}}
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


def find_claim(s: OptimizerSubject) -> str:
    """The rule here that it says it is."""
    names = {_keep_letters(name): name for name in known()} | {_keep_letters(alias): name for alias, name in aliases().items()}
    word = _keep_letters(s.claimed or s.target.rpartition(":")[2])
    if word not in names and word + "w" not in names:  # NAdam and NAdamW differ in the decay, which is looked at
        raise Skip(f"no rule here is called {word!r}; --as NAME says which it claims to be")
    return names.get(word) or names[word + "w"]


def _keep_letters(word: str) -> str:
    return "".join(filter(str.isalnum, word.lower()))


def match_settings(s: OptimizerSubject, rule: str, probe: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings for it and for ours that mean the same: the probe's where both have the keyword, its own otherwise."""
    fields = known()[rule].fields
    foreign = {"torch": known()[rule].torch.settings, "optax": known()[rule].optax.settings}[s.kind]
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in fields and not s.find_keyword("weight_decay") else {}
    for keyword in s.keywords:
        given = s.get_setting(keyword)
        if keyword in foreign:
            if given is not None:
                ours[foreign[keyword].field] = foreign[keyword].read(given)
            continue
        field, place = (keyword, None) if keyword in fields else NAMES.get(keyword, (keyword, None))
        if field not in fields or (keyword in s.settings and keyword != s.rate):
            value = s.settings.get(keyword)
        elif field not in probe:
            value = given
        else:
            value = probe[field] if place is None else probe[field][place]
            fits = isinstance(given, tuple) == isinstance(value, tuple) and np.size(value) == np.size(given)
            if not fits and place is None and isinstance(given, (tuple, type(None))):
                value = given
            theirs[keyword] = value
        if field in fields and value is not None:
            ours[field] = value if place is None else _replace_at(ours.get(field, fields[field].default), place, value)
    return theirs, ours


def _replace_at(pair: Any, place: int, value: Any) -> Any:
    return tuple(value if i == place else old for i, old in enumerate(pair))


def list_conventions(rule: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
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


def walk_adam(start: Arrays, steps: int, gradient: Any, settings: dict[str, Any], decay: str, eps: str, bias: str) -> Arrays:
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


def walk_reference(rule: str, settings: dict[str, Any], start: Arrays, gradient: Any, mark: str = "", decay: str = "") -> Arrays:
    """Ours in float64. mark: before the names, by which it draws where it does. decay: another than its own."""
    lr, shrink = settings.get("lr") or 0.0, settings.get("weight_decay") or 0.0
    opt = create(rule, engine="reference", **(settings | {"weight_decay": 0.0} if decay else settings))
    params = {mark + n: p.copy() for n, p in start.items()}
    taken = lr * shrink if decay == "decoupled" else shrink if decay == "apart" else 0.0
    for t in range(STEPS):
        before = {n: p.copy() for n, p in params.items()}
        joins = shrink if decay == "coupled" else 0.0
        opt.step_all(params, {mark + n: g + joins * before[mark + n] for n, g in gradient(t, {}).items()})
        for n, p in params.items():
            p -= taken * before[n]
    return {n: params[mark + n] for n in start}


def list_candidates(rule: str, ours: dict[str, Any], start: Arrays, gradient: Any) -> Iterator[tuple[str, Arrays]]:
    """Ours under its conventions, under other decays, and Adam in other forms; the plainest first."""
    given = list(list_conventions(rule, ours))
    one, other = (walk_reference(rule, given[0][1], start, gradient, mark) for mark in ("", "other "))
    if (apart := find_gap(one, other, start)) > CLOSE:
        raise Skip(f"it draws random numbers: two of ours end {apart:.0e} apart")
    yield given[0][0], one
    yield from ((label, walk_reference(rule, settings, start, gradient)) for label, settings in given[1:])
    for (label, settings), (decay, words) in itertools.product(given, DECAYS.items()):
        if settings.get("weight_decay") and settings.get("lr"):
            yield _join_words(label, words), walk_reference(rule, settings, start, gradient, decay=decay)
    if rule in USUAL:
        kind = known()[rule]
        settings = {name: ours.get(name, kind.fields[name].default) for name in ("lr", "betas", "eps", "weight_decay")}
        for choice in itertools.product(DECAYS, EPS, BIAS):
            pairs = zip((DECAYS, EPS, BIAS), choice, USUAL[rule], strict=True)
            words = "; ".join(table[each] for table, each, usual in pairs if each != usual)
            if words:
                yield _join_words(kind.title, words), walk_adam(start, STEPS, gradient, settings, *choice)


@dataclasses.dataclass(frozen=True)
class Answer:
    """named: how far it ends from ours as its name says. label: the form that is nearest, and how far that is. same: where it is
    the same all the same."""

    named: float
    label: str
    distance: float
    same: str = ""


def _join_words(label: str, words: str) -> str:
    return f"{label}; {words}" if " but for: " in label else f"{label} but for: {words}"


def identify(s: OptimizerSubject) -> Answer:
    rule = find_claim(s)
    if known()[rule].observes:
        raise Skip("it steps by estimates of the Hessian, which libraries are given in ways of their own")
    kind = known()[rule]
    flat = (2,) if kind.matrix else (1, 2)  # a matrix rule may hand vectors to any other
    shapes = {name: shape for name, shape in s.shapes.items() if len(shape) in flat}
    start, gradient = draw(shapes), replay(shapes, 0.3)
    probe = PROBE | ({"lr": 1.0} if kind.fields["lr"].default == 1.0 else {})  # a factor, as Prodigy's
    theirs, ours = match_settings(s, rule, probe)
    with s.allow_refusal(f"stepping with {theirs}"):
        got = s.walk(start, gradient, STEPS, **theirs)
    if (far := max(float(np.abs(got[n] - start[n]).max()) for n in start)) < LEAST:
        raise Skip(f"in {STEPS} steps it moves by {far:.0e}: too little to tell")
    forms: list[tuple[str, Arrays]] = []
    ranking: list[tuple[float, str]] = []
    for label, want in list_candidates(rule, ours, start, gradient):
        forms.append((label, want))
        ranking.append((find_gap(got, want, start), label))
        if ranking[-1][0] <= CLOSE:
            return Answer(ranking[0][0], label, ranking[-1][0])
    named = ranking[0][0]
    for words, rest in REST.items():
        if not all(name in ours for name in rest):
            continue
        theirs_now, ours_now = match_settings(s, rule, probe | rest)
        got_now = s.walk(start, gradient, STEPS, **theirs_now)
        for label, given in list_conventions(rule, ours_now):
            if (distance := find_gap(got_now, walk_reference(rule, given, start, gradient), start)) <= CLOSE:
                return Answer(named, _join_words(label, f"{words}, in a form that is not known here"), distance)
    for name in s.keywords:
        if name in theirs or name in UNASKED or "dtype" in name:
            continue
        switches = [value for value in s.list_values(name) if isinstance(value, (bool, str))]
        for value in switches or (0.0, 1):
            try:
                got_now = s.walk(start, gradient, STEPS, **{**theirs, name: value})
            except Exception:
                continue
            for label, want in forms:
                if (distance := find_gap(got_now, want, start)) <= CLOSE:
                    return Answer(named, _join_words(label, f"{name}={s.get_setting(name)!r} (with {value!r} it is)"), distance)
    distance, label = min(ranking)
    want = dict(forms)[label]
    on = {n: find_gap({n: got[n]}, {n: want[n]}, start) <= CLOSE for n in start}
    same = [word for word, flat in (("vectors", 1), ("matrices", 2)) if all(on[n] == (len(shapes[n]) == flat) for n in on)]
    return Answer(named, label, distance, same[0] if same else "")


@check("what calls itself AdamW may be another Adam: how far from ours, and what differs", taste=True, name="which")
def identity(s: OptimizerSubject) -> Any:
    found = identify(s)
    far = f"{found.named:.1e} from ours after {STEPS} steps"
    if found.distance <= CLOSE and "but for" in found.label and found.named > CLOSE:
        raise Wrong(f"{far}; it is {found.label} ({found.distance:.0e} away)", found.named)
    if found.distance > (ABOUT if known()[find_claim(s)].matrix else NEAR):
        same = f"; on {found.same} it is the same" if found.same else ""
        raise Wrong(f"{far}; of no form known here: nearest, {found.distance:.1e} away, is {found.label}{same}", found.named)
    return f"{found.label}: {found.distance:.0e}"
