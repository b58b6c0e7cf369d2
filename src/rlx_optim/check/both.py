"""Checks of any optimizer, by walks over NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .subject import MATRICES, UNASKED, Arrays, Subject, drawn, finite, replayed
from .table import Skip, Wrong, check

LIVELY = {"weight_decay": 0.1, "momentum": 0.9}  # on which other keywords hang, where it is 0 by default
LEAST = 1e-9  # what moves a parameter of size 1 less does nothing
RATES = (0.3, 0.1, 0.03, 0.01, 1e-3, 10.0)  # the last for rules that scale it down by a trust ratio
ORTHOGONAL = ("muon", "scion", "dion", "orthogonal")


# ---- hyperparameters --------------------------------------------------------------------------------------------------------
@check("keywords", "a keyword that does nothing is a bug that no loss curve shows")
def keywords(s: Subject) -> Any:
    want = s.trial()
    if want is None:
        raise Wrong("with these settings twelve plain steps fail or end in NaN")
    idle, untried, acting = [], [], 0
    for name in s.keywords:
        if name in UNASKED or "dtype" in name:
            continue
        moved = _moves(s, name, {}, want)
        if moved == 0.0:
            words = sorted(s.keywords, key=lambda other: not isinstance(s.given(other), (str, bool)))  # switches first
            others = [other for other in words if other not in (name, *UNASKED)]
            moved = next((far for lively in (LIVELY, {}) for other in others if (far := _beside(s, name, other, lively))), 0.0)
        if moved is None:
            untried.append(name)
        elif moved > 0:
            acting += 1
        else:
            idle.append(name)
    if idle:
        raise Wrong(f"changed, alone and beside others, and nothing moved: {', '.join(idle)}", f"{len(idle)} idle")
    if not acting:
        raise Skip(f"no keyword takes another value that could be guessed: {', '.join(untried) or 'there is none'}")
    return f"{acting} act" + (f", not tried: {', '.join(untried)}" if untried else "")


def _moves(s: Subject, name: str, context: dict[str, Any], want: Arrays, tried: int | None = None) -> float | None:
    """How far the first value that does something moves the result; None where every other value is refused."""
    most = None
    for value in s.alternatives(name)[:tried]:
        got = s.trial(**{**context, name: value})
        if got is not None:
            most = max(most or 0.0, *(float(np.abs(got[k].astype(np.float64) - want[k]).max()) for k in want))
            if most > LEAST:
                return most
    return None if most is None else 0.0


def _beside(s: Subject, name: str, other: str, lively: dict[str, Any]) -> float:
    """The same beside another that is changed too."""
    switched = {k: v for k, v in lively.items() if k in s.keywords and k not in (name, other) and not s.given(k)}
    values = s.alternatives(other)
    values = values if isinstance(s.given(other), str) else values[:2]  # a word may be what it hangs on: each of them
    for value in values if switched or not lively else []:
        context = {**switched, other: value}
        want = s.trial(**context)
        if want is not None and (moved := _moves(s, name, context, want, 4)):
            return moved
    return 0.0


# ---- what must not matter ---------------------------------------------------------------------------------------------------
@check("deterministic", "the same steps must give the same bits, or no bug can be found again")
def deterministic(s: Subject) -> Any:
    first, second = s.walked(), s.walked()
    for name, value in first.items():
        if not np.array_equal(value, second[name], equal_nan=True):
            raise Wrong(f"two equal walks differ in {name}", float(np.abs(value - second[name]).max()))
    return 0.0


@check("order", "which parameter comes first must not matter")
def order(s: Subject) -> Any:
    s.placeless()
    start, plain = drawn(s.shapes), replayed(s.shapes)
    back = dict(reversed(start.items()))
    return s.near(s.walk(back, plain, 6), s.walk(start, plain, 6), start, "parameters in another order end elsewhere")


@check(
    "independence", "a tensor's step should not depend on which others are there, unless a global norm is the idea", taste=True
)
def independence(s: Subject) -> Any:
    if s.entangled > s.bar:
        raise Wrong(f"beside gradients of zero a tensor ends elsewhere: {s.entangled:.1e} of the distance travelled", s.entangled)
    return s.entangled


@check("shapes", "scalars, empty tensors and axes of length 1 are in every model")
def shapes(s: Subject) -> Any:
    odd: list[tuple[int, ...]] = [(1, 1), (1, 5), (5, 1), (0, 3)]
    if s.shapes is not MATRICES:
        odd += [(), (1,), (0,), (1, 1, 1, 1), (2, 1, 3)]
    for shape in odd:
        both = {"odd": shape, "w": (4, 3)}
        try:
            start = drawn(both)
            got = s.walk(start, replayed(both), 3)
        except Exception as problem:
            raise Wrong(f"shape {shape}: {type(problem).__name__}: {str(problem).splitlines()[0][:80]}", str(shape)) from None
        if got["odd"].shape != shape or not finite(got):
            raise Wrong(f"shape {shape} becomes {got['odd'].shape} or is not finite", str(shape))
        if got["odd"].size and np.array_equal(got["odd"], start["odd"]):
            raise Wrong(f"a parameter of shape {shape} stays where it is", str(shape))
    return f"{len(odd)} shapes"


# ---- gradients that are not nice --------------------------------------------------------------------------------------------
@check("zero-gradients", "a layer without gradient is normal: 0/0 must not make it NaN")
def zero_gradients(s: Subject) -> Any:
    start, plain = drawn(s.shapes), replayed(s.shapes)
    got = s.walk(start, lambda t, p: plain(t, p) if t > 2 else {n: np.zeros_like(g) for n, g in plain(t, p).items()}, 5)
    if not finite(got):
        raise Wrong("three gradients of zero end in NaN or infinity", "NaN")
    return "finite"


@check("zero-stays", "without gradient and decay a parameter should rest", taste=True)
def zero_stays(s: Subject) -> Any:
    start = drawn(s.shapes)
    got = s.walk(start, lambda t, p: {n: np.zeros_like(x) for n, x in start.items()}, 2, **s.without_decay())
    moved = max(float(np.abs(got[n] - start[n]).max()) for n in start)
    if not moved <= 0:
        raise Wrong(f"parameters moved by {moved:.1e} on gradients of zero", moved)
    return 0.0


@check("nan-contained", "a NaN in one gradient must not reach another parameter")
def nan_contained(s: Subject) -> Any:
    s.independent()
    start, plain = drawn(s.shapes), replayed(s.shapes)
    first, *others = s.shapes
    worst = 0.0
    for bad in (math.nan, math.inf):

        def spoiled(t: int, p: Arrays, bad: float = bad) -> Arrays:
            found = plain(t, p)
            return {**found, first: np.full_like(found[first], bad)} if t == 1 else found

        with s.refusable(f"a gradient of {bad}"):
            got = s.walk(start, spoiled, 3)
        want = s.walk(start, plain, 3)
        pick: Callable[[Arrays], Arrays] = lambda arrays: {n: arrays[n] for n in others}  # noqa: E731
        worst = max(worst, s.near(pick(got), pick(want), start, f"{bad} in the gradient of one parameter moves another"))
    return worst


@check("scales", "gradients of 1e-20 and of 1e12 happen; the step must stay finite")
def scales(s: Subject) -> Any:
    for scale in (1e-20, 1e-10, 1e12):
        if not finite(s.walk(drawn(s.shapes), replayed(s.shapes, scale), 3)):
            raise Wrong(f"gradients of size {scale:g} end in NaN or infinity", f"{scale:g}")
    return "1e-20 to 1e12"


# ---- does it optimize -------------------------------------------------------------------------------------------------------
def descended(
    s: Subject, start: Arrays, loss: Callable[[Arrays], float], gradient: Callable[[Arrays], Arrays], share: float
) -> float:
    """The share of the loss that is left, at the best of a few learning rates; Wrong where it is more than `share`."""
    began, best = loss(start), math.inf
    for rate in RATES if s.rate else (None,):
        settings = {} if rate is None else {str(s.rate): rate}
        try:
            ended = loss(s.walk(start, lambda t, p: gradient(p), 200, **{**s.without_decay(), **settings}))
        except Exception:
            continue
        best = min(best, ended / began) if math.isfinite(ended) else best
        if best <= share:
            return best
    raise Wrong(f"after 200 steps {best:.0%} of the loss are left, at the best of the rates {RATES}", best)


@check("quadratic", "on a convex bowl any optimizer gets down", quick=False)
def quadratic(s: Subject) -> Any:
    shape = {"w": (4, 3)}
    bend, goal = 1 + 4 * np.abs(drawn(shape, 1)["w"]), drawn(shape, 2)["w"]
    return descended(
        s, drawn(shape), lambda p: float((bend * (p["w"] - goal) ** 2).sum()), lambda p: {"w": 2 * bend * (p["w"] - goal)}, 0.1
    )


@check("rosenbrock", "down a bent valley, from (-1.2, 1)", quick=False)
def rosenbrock(s: Subject) -> Any:
    def loss(p: Arrays) -> float:
        x, y = p["w"].ravel().astype(np.float64)
        return float((1 - x) ** 2 + 100 * (y - x * x) ** 2)

    def gradient(p: Arrays) -> Arrays:
        x, y = p["w"].ravel()
        return {"w": np.array([[-2 * (1 - x) - 400 * x * (y - x * x)], [200 * (y - x * x)]], np.float32)}

    return descended(s, {"w": np.array([[-1.2], [1.0]], np.float32)}, loss, gradient, 0.3)


@check("regression", "a small network fits forty points", quick=False)
def regression(s: Subject) -> Any:
    x, target = drawn({"x": (40, 5)}, 3)["x"], np.tanh(drawn({"x": (40, 5)}, 3)["x"] @ drawn({"a": (5, 2)}, 4)["a"])
    start = drawn({"first": (8, 5), "second": (2, 8)}, 5, 0.5)

    def parts(p: Arrays) -> tuple[np.ndarray, np.ndarray]:
        hidden = np.tanh(x @ p["first"].T)
        return hidden, hidden @ p["second"].T - target

    def gradient(p: Arrays) -> Arrays:
        hidden, off = parts(p)
        back = (off @ p["second"]) * (1 - hidden**2)
        return {"first": 2 * back.T @ x / len(x), "second": 2 * off.T @ hidden / len(x)}

    return descended(s, start, lambda p: float((parts(p)[1] ** 2).mean()), gradient, 0.35)


# ---- matrices ---------------------------------------------------------------------------------------------------------------
def _first_step(s: Subject, scale: float) -> np.ndarray:
    if not any(word in (s.claimed or s.target).lower() for word in ORTHOGONAL):
        raise Skip("it does not claim to orthogonalize")
    shape = {"w": (16, 24)}
    start, push = drawn(shape, 7, 0.1), drawn(shape, 8, scale)["w"]
    return s.walk(start, lambda t, p: {"w": push}, 1, **s.without_decay())["w"].astype(np.float64) - start["w"]


@check("orthogonal", "a step of Muon is a matrix with singular values near each other, or Newton–Schulz did not run")
def orthogonal(s: Subject) -> Any:
    sizes = np.linalg.svd(_first_step(s, 1.0), compute_uv=False)
    spread = float(sizes[0] / max(sizes[-1], 1e-30))
    if spread > 3:
        raise Wrong(f"the singular values of the first step differ by a factor of {spread:.1f}", spread)
    return spread


@check("scale-free", "an orthogonalized step does not depend on the gradient's size")
def scale_free(s: Subject) -> Any:
    one, other = _first_step(s, 1.0), _first_step(s, 1e-3)
    apart = float(np.abs(one - other).max() / np.abs(one).max())
    if apart > 0.05:
        raise Wrong(f"gradients a thousandth as large change the step by {apart:.0%}", apart)
    return apart
