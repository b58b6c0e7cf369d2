"""What may be done to the step of any rule between its direction u and p: said once, for every optimizer and every engine.

Modifiers are hyperparameters that every Spec has. `cautious` masks u before it is committed; `decay` says what the commit does
beside the step. docs/modifiers.md has the formulas and the table of which rule takes which.
"""

from __future__ import annotations

from typing import Any

from .ops import maximum, sign, sqrt, where

LEAST = 1e-10  # a norm that is divided by

# mypy: disable-error-code="no-untyped-def"


# ---- cautious: u only where it agrees with the gradient (Liang et al., arXiv:2411.16085) --------------------------------------
def agreement(g, u):
    kept_count = where(sign(g) * u > 0, 1.0, 0.0)  # strictly: no gradient, no step
    lost_count = where(sign(g) * u > 0, 0.0, 1.0)
    return kept_count, lost_count


def masking(g, u, keep_gain):
    u = u * where(sign(g) * u > 0, keep_gain, 0.0)  # a product: what is not finite stays so
    return u


def by_share(kept_count, lost_count):
    """One over the share that is kept, which counts as 1e-3 at least: the authors' AdamW, timm."""
    keep_gain = 1 / maximum(kept_count / (kept_count + lost_count), 1e-3)
    return keep_gain


def by_count(kept_count, lost_count):
    """n/(kept + 1): the authors' Lion and Adafactor."""
    keep_gain = (kept_count + lost_count) / (kept_count + 1)
    return keep_gain


def masked(E: Any, x: Any, gain: Any = by_share) -> Any:
    """x with u masked, and scaled by what gain makes of the share kept."""
    x = E.map(agreement, x, kept_count="sum", lost_count="sum")
    return E.map(masking, E.each(gain, x))


# ---- decay: what the commit does beside the step ------------------------------------------------------------------------------
def stepping(u, step):
    change = step * u
    return change


def decoupled(p, u, shrink, step):
    change = shrink * p + step * u
    return change


def cautious(p, u, shrink, step):
    """arXiv:2510.12402: only where the step shrinks p as well; equality counts (dion, the speedrun)."""
    change = where(u * p >= 0, shrink, 0.0) * p + step * u
    return change


# hyperball (arXiv:2606.16899): q = p − rate·‖p‖·u/‖u‖ is brought back to the norm of p, p ← q·‖p‖/‖q‖. ‖q‖ follows from three
# sums over p and u, so that this is a shrink and a step like any other, in one pass after the one that measures.
def measuring(p, u):
    p_norm = p
    u_norm = u
    p_dot_u = p * u
    return p_norm, u_norm, p_dot_u


def on_the_ball(p_norm, u_norm, p_dot_u, rate, step):
    length = where(step == 0, 0.0, rate) * u_norm / maximum(u_norm, LEAST)  # a rule that does not step yet (SOAP) stays
    cosine = p_dot_u / maximum(p_norm * u_norm, LEAST * LEAST)
    excess = length * (length - 2 * cosine)
    ratio = sqrt(maximum(1 + excess, LEAST))  # ‖q‖/‖p‖
    shrink = excess / (ratio * (1 + ratio))  # 1 − 1/now, without cancellation
    step = length * p_norm / (ratio * maximum(u_norm, LEAST))
    return shrink, step


def committed(decay: str, E: Any, x: Any) -> Any:
    """x with `change`, which is then taken from p."""
    if decay == "hyperball":
        x = E.each(on_the_ball, E.map(measuring, x, p_norm="norm", u_norm="norm", p_dot_u="sum"))
    if x.get("shrink") is None:
        return E.map(stepping, x)
    return E.map(cautious if decay == "cautious" else decoupled, x)
