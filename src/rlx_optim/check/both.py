"""Checks of any optimizer, by walks over NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .subject import MATRICES, UNASKED, Arrays, OptimizerSubject, draw, is_finite, replay
from .table import Skip, Wrong, check, expect

LIVELY = {"weight_decay": 0.1, "momentum": 0.9}  # on which other keywords hang, where it is 0 by default
LEAST = 1e-9  # what moves a parameter of size 1 less does nothing
RATES = (0.3, 0.1, 0.03, 0.01, 1e-3, 10.0)  # the last for rules that scale it down by a trust ratio
ORTHOGONAL = ("muon", "scion", "dion", "orthogonal")


# ---- hyperparameters --------------------------------------------------------------------------------------------------------
@check("a keyword that does nothing is a bug that no loss curve shows")
def keywords(s: OptimizerSubject) -> Any:
    want = s.try_settings()
    if want is None:
        raise Wrong("with these settings twelve plain steps fail or end in NaN")
    idle, untried, acting = [], [], 0
    for name in s.keywords:
        if name in UNASKED or "dtype" in name:
            continue
        moved = _try_values(s, name, {}, want)
        if moved == 0.0:
            words = sorted(s.keywords, key=lambda other: not isinstance(s.get_setting(other), (str, bool)))  # switches first
            others = [other for other in words if other not in (name, *UNASKED)]
            beside = (_try_beside(s, name, other, lively) for lively in (LIVELY, {}) for other in others)
            moved = next(filter(None, beside), 0.0)
        if moved is None:
            untried.append(name)
        elif moved > 0:
            acting += 1
        else:
            idle.append(name)
    expect(not idle, f"changed, alone and beside others, and nothing moved: {', '.join(idle)}", f"{len(idle)} idle")
    if not acting:
        raise Skip(f"no keyword takes another value that could be guessed: {', '.join(untried) or 'there is none'}")
    return f"{acting} act" + (f", not tried: {', '.join(untried)}" if untried else "")


def _try_values(s: OptimizerSubject, name: str, context: dict[str, Any], want: Arrays, tried: int | None = None) -> float | None:
    """How far the first value that does something moves the result; None where every other value is refused."""
    most = None
    for value in s.list_values(name)[:tried]:
        got = s.try_settings(**{**context, name: value})
        if got is not None:
            most = max(most or 0.0, *(float(np.abs(got[k].astype(np.float64) - want[k]).max()) for k in want))
            if most > LEAST:
                return most
    return None if most is None else 0.0


def _try_beside(s: OptimizerSubject, name: str, other: str, lively: dict[str, Any]) -> float:
    """The same beside another that is changed too."""
    switched = {k: v for k, v in lively.items() if k in s.keywords and k not in (name, other) and not s.get_setting(k)}
    values = s.list_values(other)
    values = values if isinstance(s.get_setting(other), str) else values[:2]  # a word may be what it hangs on: each of them
    for value in values if switched or not lively else []:
        context = {**switched, other: value}
        want = s.try_settings(**context)
        if want is not None and (moved := _try_values(s, name, context, want, 4)):
            return moved
    return 0.0


# ---- what must not matter ---------------------------------------------------------------------------------------------------
@check("the same steps must give the same bits, or no bug can be found again")
def deterministic(s: OptimizerSubject) -> Any:
    first, second = s.walk_shapes(), s.walk_shapes()
    for name, value in first.items():
        if not np.array_equal(value, second[name], equal_nan=True):
            raise Wrong(f"two equal walks differ in {name}", float(np.abs(value - second[name]).max()))
    return 0.0


@check("which parameter comes first must not matter")
def order(s: OptimizerSubject) -> Any:
    s.refuse_random()
    start, plain = draw(s.shapes), replay(s.shapes)
    back = dict(reversed(start.items()))
    return s.expect_near(s.walk(back, plain, 6), s.walk(start, plain, 6), start, "parameters in another order end elsewhere")


@check("a tensor's step should not depend on which others are there, unless a global norm is the idea", taste=True)
def independence(s: OptimizerSubject) -> Any:
    return expect(
        s.entangled <= s.bar,
        f"beside gradients of zero a tensor ends elsewhere: {s.entangled:.1e} of the distance travelled",
        s.entangled,
    )


@check("scalars, empty tensors and axes of length 1 are in every model")
def shapes(s: OptimizerSubject) -> Any:
    odd: list[tuple[int, ...]] = [(1, 1), (1, 5), (5, 1), (0, 3)]
    if s.shapes is not MATRICES:
        odd += [(), (1,), (0,), (1, 1, 1, 1), (2, 1, 3)]
    for shape in odd:
        both = {"odd": shape, "w": (4, 3)}
        try:
            start = draw(both)
            got = s.walk(start, replay(both), 3)
        except Exception as problem:
            raise Wrong(f"shape {shape}: {type(problem).__name__}: {str(problem).splitlines()[0][:80]}", str(shape)) from None
        if got["odd"].shape != shape or not is_finite(got):
            raise Wrong(f"shape {shape} becomes {got['odd'].shape} or is not finite", str(shape))
        if got["odd"].size and np.array_equal(got["odd"], start["odd"]):
            raise Wrong(f"a parameter of shape {shape} stays where it is", str(shape))
    return f"{len(odd)} shapes"


# ---- gradients that are not nice --------------------------------------------------------------------------------------------
@check("a layer without gradient is normal: 0/0 must not make it NaN")
def zero_gradients(s: OptimizerSubject) -> Any:
    start, plain = draw(s.shapes), replay(s.shapes)
    got = s.walk(start, lambda t, p: plain(t, p) if t > 2 else {n: np.zeros_like(g) for n, g in plain(t, p).items()}, 5)
    expect(is_finite(got), "three gradients of zero end in NaN or infinity", "NaN")
    return "finite"


@check("without gradient and decay a parameter should rest", taste=True)
def zero_stays(s: OptimizerSubject) -> Any:
    start = draw(s.shapes)
    got = s.walk(start, lambda t, p: {n: np.zeros_like(x) for n, x in start.items()}, 2, **s.without_decay())
    moved = max(float(np.abs(got[n] - start[n]).max()) for n in start)
    expect(moved <= 0, f"parameters moved by {moved:.1e} on gradients of zero", moved)
    return 0.0


@check("a NaN in one gradient must not reach another parameter")
def nan_contained(s: OptimizerSubject) -> Any:
    s.refuse_entangled()
    start, plain = draw(s.shapes), replay(s.shapes)
    first, *others = s.shapes
    worst = 0.0
    for bad in (math.nan, math.inf):

        def spoiled(t: int, p: Arrays, bad: float = bad) -> Arrays:
            found = plain(t, p)
            return {**found, first: np.full_like(found[first], bad)} if t == 1 else found

        with s.allow_refusal(f"a gradient of {bad}"):
            got = s.walk(start, spoiled, 3)
        want = s.walk(start, plain, 3)
        pick: Callable[[Arrays], Arrays] = lambda arrays: {n: arrays[n] for n in others}  # noqa: E731
        worst = max(worst, s.expect_near(pick(got), pick(want), start, f"{bad} in the gradient of one parameter moves another"))
    return worst


@check("gradients of 1e-20 and of 1e12 happen; the step must stay finite")
def scales(s: OptimizerSubject) -> Any:
    for scale in (1e-20, 1e-10, 1e12):
        if not is_finite(s.walk(draw(s.shapes), replay(s.shapes, scale), 3)):
            raise Wrong(f"gradients of size {scale:g} end in NaN or infinity", f"{scale:g}")
    return "1e-20 to 1e12"


# ---- dtypes -----------------------------------------------------------------------------------------------------------------
@check("float64 parameters are stepped in float64", "torch")
@check("float64 parameters are stepped in float64", "optax", quick=False)
def float64(s: OptimizerSubject) -> Any:
    shift, plain = 1e-11, replay(s.shapes)
    start = {n: p.astype(np.float64) for n, p in draw(s.shapes).items()}
    with s.allow_refusal("float64"):
        one, other = (
            s.walk({n: p + extra for n, p in start.items()}, plain, 3, "float64", **s.without_decay()) for extra in (0.0, shift)
        )
    kept = max(float(np.abs(other[n] - one[n] - shift).max()) for n in start) / shift
    return expect(kept <= 0.5, "a shift of 1e-11 in the parameters is lost: they pass through float32", kept)


@check("bfloat16 parameters move, stay bfloat16 and stay finite")
def bfloat16(s: OptimizerSubject) -> Any:
    start, plain = draw(s.shapes), replay(s.shapes)
    zeros = {n: np.zeros_like(p) for n, p in start.items()}
    with s.allow_refusal("bfloat16"):
        got = s.walk(zeros, plain, 6, "bfloat16")  # from where any step shows
        rest = s.walk(start, lambda t, p: zeros, 3, "bfloat16")
    for name, p in got.items():
        if not np.isfinite(p).all() or not p.any():
            raise Wrong(f"the bfloat16 parameter {name} is not finite, or did not move", "NaN" if p.any() else 0.0)
    expect(is_finite(rest), "gradients of zero end in NaN: eps is 0 in bfloat16", "NaN")
    return max(float(np.abs(p).max()) for p in got.values())


@check("averages kept in bfloat16 stop moving: after large gradients small ones count for nothing", quick=False)
def bfloat16_learns(s: OptimizerSubject) -> Any:
    start = {"w": np.zeros((4, 4), np.float32)}
    push = np.where(np.arange(16).reshape(4, 4) % 3 == 0, 1.0, -0.5).astype(np.float32)
    ends = []
    for dtype in ("float32", "bfloat16"):
        with s.allow_refusal("bfloat16"):  # put to zero, p itself has bits to spare
            ends.append(
                s.walk(start, lambda t, p: {"w": push * (100 if t < 20 else 1)}, 1020, dtype, 1000, **s.without_decay())["w"]
            )
        if not np.isfinite(ends[0]).all():
            raise Skip("in float32 too it runs away where a gradient never changes")
    apart = float(np.abs(ends[1] - ends[0]).max() / max(np.abs(ends[0]).max(), 1e-30))
    return expect(apart <= 0.1, f"twenty small steps after a thousand differ from float32's by {apart:.0%}", apart)


# ---- does it optimize -------------------------------------------------------------------------------------------------------
def expect_descent(
    s: OptimizerSubject, start: Arrays, loss: Callable[[Arrays], float], gradient: Callable[[Arrays], Arrays], share: float
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


@check("on a convex bowl any optimizer gets down", quick=False)
def quadratic(s: OptimizerSubject) -> Any:
    shape = {"w": (4, 3)}
    bend, goal = 1 + 4 * np.abs(draw(shape, 1)["w"]), draw(shape, 2)["w"]
    return expect_descent(
        s, draw(shape), lambda p: float((bend * (p["w"] - goal) ** 2).sum()), lambda p: {"w": 2 * bend * (p["w"] - goal)}, 0.1
    )


@check("down a bent valley, from (-1.2, 1)", quick=False)
def rosenbrock(s: OptimizerSubject) -> Any:
    def loss(p: Arrays) -> float:
        x, y = p["w"].ravel().astype(np.float64)
        return float((1 - x) ** 2 + 100 * (y - x * x) ** 2)

    def gradient(p: Arrays) -> Arrays:
        x, y = p["w"].ravel()
        return {"w": np.array([[-2 * (1 - x) - 400 * x * (y - x * x)], [200 * (y - x * x)]], np.float32)}

    return expect_descent(s, {"w": np.array([[-1.2], [1.0]], np.float32)}, loss, gradient, 0.3)


@check("a small network fits forty points", quick=False)
def regression(s: OptimizerSubject) -> Any:
    x, target = draw({"x": (40, 5)}, 3)["x"], np.tanh(draw({"x": (40, 5)}, 3)["x"] @ draw({"a": (5, 2)}, 4)["a"])
    start = draw({"first": (8, 5), "second": (2, 8)}, 5, 0.5)

    def parts(p: Arrays) -> tuple[np.ndarray, np.ndarray]:
        hidden = np.tanh(x @ p["first"].T)
        return hidden, hidden @ p["second"].T - target

    def gradient(p: Arrays) -> Arrays:
        hidden, off = parts(p)
        back = (off @ p["second"]) * (1 - hidden**2)
        return {"first": 2 * back.T @ x / len(x), "second": 2 * off.T @ hidden / len(x)}

    return expect_descent(s, start, lambda p: float((parts(p)[1] ** 2).mean()), gradient, 0.35)


# ---- matrices ---------------------------------------------------------------------------------------------------------------
def _first_step(s: OptimizerSubject, scale: float) -> np.ndarray:
    if not any(word in (s.claimed or s.target).lower() for word in ORTHOGONAL):
        raise Skip("it does not claim to orthogonalize")
    shape = {"w": (16, 24)}
    start, push = draw(shape, 7, 0.1), draw(shape, 8, scale)["w"]
    return s.walk(start, lambda t, p: {"w": push}, 1, **s.without_decay())["w"].astype(np.float64) - start["w"]


@check("a step of Muon is a matrix with singular values near each other, or Newton–Schulz did not run")
def orthogonal(s: OptimizerSubject) -> Any:
    sizes = np.linalg.svd(_first_step(s, 1.0), compute_uv=False)
    spread = float(sizes[0] / sizes[-1]) if sizes[-1] > 0 else math.inf  # a step of nothing too
    return expect(spread <= 3, f"the singular values of the first step differ by a factor of {spread:.1f}", spread)


@check("an orthogonalized step does not depend on the gradient's size")
def scale_free(s: OptimizerSubject) -> Any:
    one, other = _first_step(s, 1.0), _first_step(s, 1e-3)
    apart = float(np.abs(one - other).max() / np.abs(one).max())
    return expect(apart <= 0.05, f"gradients a thousandth as large change the step by {apart:.0%}", apart)
