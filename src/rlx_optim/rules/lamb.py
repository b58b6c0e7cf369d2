"""Lamb: AdamW's direction with a step proportional to the parameter's own norm.

Idea. Let each tensor move by a share lr of its norm, so that one learning rate suits all layers at very large batches (You
et al., arXiv:1904.00962).

Formulas.
    m ← b1·m + (1 − b1)·g, m̂ = m/(1 − b1^t)
    v ← b2·v + (1 − b2)·g², v̂ = v/(1 − b2^t)
    u = m̂/(√v̂ + eps) + weight_decay·p
    r = ‖p‖/‖u‖                                 1 where either norm is 0; at most trust_clip where given
    p ← p − lr·r·u
The norms are those of the whole tensor. bias_correction=False takes m and v as they are.

Conventions.
- torch: does not have it.
- optax: equal to optax.lamb, whose weight_decay is 0 unless given.
- the paper: passes ‖p‖ through a function of the user's choice; here it is the norm itself.
- timm, pytorch_optimizer: timm clips the global gradient norm and switches the ratio off where weight_decay is 0;
  pytorch_optimizer cuts ‖p‖ at 10, corrects the bias of m alone and decays p beside the step unless told otherwise. Nothing
  of that happens here: the ratio applies to every tensor.

When, and what it costs. Batches in the tens of thousands. 8 bytes of state a parameter. Two passes: the first averages and
measures (p, g, m, v read, m, v written: 24 bytes), the second recomputes u from m and v rather than storing it
(p, m, v read, p written: 16 bytes): 40 bytes of traffic a parameter and no scratch.
"""

import math

from ..ops import minimum, one_minus_power, sqrt, where
from ..spec import Optax, Spec, betas, flag, like, real


def measure(p, g, m, v, first, decay, beta1, alpha1, beta2, alpha2, root, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    size = p
    pace = first * m / (sqrt(v) * root + eps) + decay * p
    return m, v, size, pace


def trust(size, pace, lr, trust_clip):
    step = lr * minimum(where((size > 0) & (pace > 0), size / pace, 1.0), trust_clip)
    return step


def direction(p, m, v, first, decay, root, eps):
    u = first * m / (sqrt(v) * root + eps) + decay * p
    return u


class Lamb(Spec):
    """lr: the share of its own norm by which a tensor moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: how much of p joins the direction, before the norms are taken.
    bias_correction: divide m and v by 1 − b^t.
    trust_clip: the largest ratio of norms; None sets no limit.
    """

    name = "lamb"
    summary = "AdamW's direction scaled by each tensor's norm, for large batches"
    optax = Optax(defaults={"weight_decay": 0.0}, state={"ScaleByAdamState": {"m": "mu", "v": "nu"}})

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.9, 0.999)
    eps: float = real(1e-6)
    weight_decay: float = real(0.01)
    bias_correction: bool = flag(True)
    trust_clip: float | None = real(None, open_low=True, infinite=True, optional=True)

    incompatible = {"decay='hyperball'": "the trust ratio makes its step a share of the tensor's norm already"}

    def static_key(self):
        return ()

    def slots(self, shape):
        """m: the average of gradients.
        v: the average of their squares.
        """
        return like(shape, m="first moment", v="second moment")

    def corrections(self, t, counters):
        return super().corrections(t, counters) if self.bias_correction else (1.0, 1.0)

    def scalars(self, t, counters):
        (beta1, beta2), corrected = self.betas, self.bias_correction
        return {
            "lr": self.lr,
            "decay": self.weight_decay,
            "trust_clip": math.inf if self.trust_clip is None else self.trust_clip,
            "first": 1 / one_minus_power(beta1, t) if corrected else 1.0,
            "root": 1 / sqrt(one_minus_power(beta2, t)) if corrected else 1.0,
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "eps": self.eps,
        }

    def update(self, E, x):
        x = E.map(measure, x, size="norm", pace="norm")
        return E.map(direction, E.each(trust, x))
