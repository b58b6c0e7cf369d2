"""MARS: AdamW (or Lion) on a variance-reduced gradient.

Idea. Correct the gradient by a scaled difference to the previous one, which cancels part of the noise that consecutive
batches share (Yuan et al., arXiv:2411.10438).

Formulas.
    c = g + gamma·(b1/(1 − b1))·(g − prev)      prev is the gradient before this one, 0 at first
    c ← c·min(1, clip_norm/‖c‖)                 per tensor; not where clip_norm is None
    m ← b1·m + (1 − b1)·c, m̂ = m/(1 − b1^t)
    v ← b2·v + (1 − b2)·c², v̂ = v/(1 − b2^t)
    p ← (1 − lr·weight_decay)·p − lr·m̂/(√v̂ + eps)
    p ← (1 − lr·weight_decay)·p − lr·sign(m)    variant "lion", which has no v
Rank-2 tensors only, the rest goes to `otherwise`; otherwise=None is MARS everywhere.

Conventions.
- torch, optax: neither has it.
- the authors' code: the same, for the approximate form (one gradient a step) and the variants AdamW and Lion; its Shampoo
  variant is not here.
- timm: the first c is g itself, up to 1.0.30 unclipped, which v remembers: after 20 steps a matrix is up to 0.9 of the way off,
  with caution or without. Its mask is that of cautious=True, but in "lion" it comes before the sign, so that nothing is scaled.
- pytorch_optimizer: eps stands before bias correction, and tensors of more than two dimensions are MARS's.

When, and what it costs. Language models, as a drop-in for AdamW with a larger lr. 12 bytes of state a parameter (8 with
"lion"). Two passes: the first measures c (g, prev read: 8 bytes), the second recomputes it
(p, g, prev, m, v read, p, prev, m, v written: 36 bytes): 44 bytes of traffic a parameter (36) and no scratch.
"""

from ..ops import minimum, one_minus_power, sign, sqrt
from ..spec import Otherwise, Spec, betas, choice, like, real


def measure(g, prev, gain):
    length = g + gain * (g - prev)
    return length


def clipping(length, clip_norm):
    clip = minimum(1.0, clip_norm / length)
    return clip


def adamw(g, m, v, prev, gain, clip, beta1, alpha1, beta2, alpha2, root, eps):
    c = clip * (g + gain * (g - prev))
    m = beta1 * m + alpha1 * c
    v = beta2 * v + alpha2 * c * c
    u = m / (sqrt(v) * root + eps)
    prev = g
    return u, m, v, prev


def lion(g, m, prev, gain, clip, beta1, alpha1):
    m = beta1 * m + alpha1 * clip * (g + gain * (g - prev))
    u = sign(m)
    prev = g
    return u, m, prev


class MARS(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr, the share of p that is taken away each step.
    gamma: how much of the difference of gradients is added; 0 is AdamW, or signs of its momentum, on clipped gradients.
    clip_norm: the largest norm of the corrected gradient of a tensor; None sets no limit.
    variant: AdamW's step or Lion's.
    """

    name = "mars"
    summary = "AdamW or Lion on a variance-reduced gradient"

    lr: float = real(3e-3)
    betas: tuple[float, float] = betas(0.95, 0.99)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)
    gamma: float = real(0.025)
    clip_norm: float | None = real(1.0, open_low=True, infinite=True, optional=True)
    variant: str = choice("adamw", "lion")

    accepts_any_shape = True
    otherwise_default = Otherwise("adamw", {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1})

    def takes(self, shape):
        return None if len(shape) == 2 else f"{len(shape)} dimensions; MARS takes 2"

    def slots(self, shape):
        """m: the average of corrected gradients.
        prev: the gradient of the step before.
        v: the average of their squares; only in "adamw".
        """
        second = like(shape, v="second moment of corrected gradients") if self.variant == "adamw" else {}
        return like(shape, m="first moment of corrected gradients", prev="last gradient") | second

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        return {
            "gain": self.gamma * beta1 / (1 - beta1),
            "clip_norm": self.clip_norm,
            "clip": 1.0,
            "shrink": self.lr * self.weight_decay,
            "step": self.lr if self.variant == "lion" else self.lr / one_minus_power(beta1, t),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
        }

    def update(self, E, x):
        if self.clip_norm is not None:
            x = E.each(clipping, E.map(measure, x, length="norm"))
        return E.map(adamw if self.variant == "adamw" else lion, x)
