"""Adan: Adam with Nesterov momentum, made of the difference of consecutive gradients.

Idea. Nesterov's look ahead needs a gradient at another point; the difference of the last two gradients says the same without it.
Average the gradient and the difference apart, and divide both by the size of the gradient that looks ahead (Xie et al.,
arXiv:2208.06677).

Formulas.
    g ← g·min(1, max_grad_norm/(‖g‖ + eps))     the norm of all gradients together; not where max_grad_norm is None
    s = g + neg                                 neg is minus the gradient before this one; s is 0 at the first step
    m ← b1·m + (1 − b1)·g
    d ← b2·d + (1 − b2)·s
    v ← b3·v + (1 − b3)·(g + b2·s)²
    u = (m/(1 − b1^t) + b2·d/(1 − b2^t))/(√(v/(1 − b3^t)) + eps)
    p ← (p − lr·u)/(1 + lr·weight_decay)
    p ← (1 − lr·weight_decay)·p − lr·u          with no_prox
    neg ← −g

Conventions.
- torch: does not have it.
- optax: optax.adan takes 1 − b2 where b2 multiplies the difference, and is another rule unless b2 is 0.5.
- the authors' code: equal, and so are timm's and pytorch_optimizer's (weight_decouple=True is no_prox). The paper's betas are 1
  minus these.

When, and what it costs. In place of AdamW with a larger lr, on vision transformers above all. 16 bytes of state a parameter,
44 bytes of traffic a parameter; with max_grad_norm 4 more, and all tensors in one pass.
"""

import dataclasses

from ..ops import minimum, one_minus_power, sqrt, where
from ..spec import Spec, Torch, flag, like, real, reals


def measure(g):
    length = g
    return length


def clipping(length, max_grad_norm, eps):
    clip = minimum(1.0, max_grad_norm / (length + eps))
    return clip


def adan(g, m, d, v, neg, clip, later, first, second, beta1, alpha1, beta2, alpha2, beta3, alpha3, root, eps):
    c = clip * g
    s = later * (c + neg)
    m = beta1 * m + alpha1 * c
    d = beta2 * d + alpha2 * s
    ahead = c + beta2 * s
    v = beta3 * v + alpha3 * ahead * ahead
    u = (first * m + second * d) / (sqrt(v) * root + eps)
    neg = -c
    return u, m, d, v, neg


def limit():
    """A number or None, for which the authors say 0."""
    field = real(None, optional=True)
    return dataclasses.replace(field, check=lambda value: field.check(value) or None)


class Adan(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m, of d and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr, how much p shrinks each step.
    no_prox: shrink p beside the step, as AdamW does, and not after it.
    max_grad_norm: the largest norm of all gradients together; None (or 0) sets no limit.
    """

    name = "adan"
    summary = "Adam with Nesterov momentum from the difference of gradients"
    torch = Torch(slots={"d": "exp_avg_diff", "neg": "neg_pre_grad"}, telltale="no_prox")  # as the authors' code has them

    lr: float = real(1e-3)
    betas: tuple[float, float, float] = reals((0.98, 0.92, 0.99), high=1.0, open_high=True)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)
    no_prox: bool = flag(False)
    max_grad_norm: float | None = limit()

    def static_key(self):
        return (self.max_grad_norm is None,)

    def slots(self, shape):
        """m: the average of gradients.
        d: the average of their differences.
        v: the average of the squares of gradients that look ahead.
        neg: minus the gradient of the step before.
        """
        return like(
            shape,
            m="first moment",
            d="average of differences",
            v="second moment of gradients ahead",
            neg="minus the last gradient",
        )

    def scalars(self, t, counters):
        (beta1, beta2, beta3), decay = self.betas, self.lr * self.weight_decay
        whole = 1.0 if self.no_prox else 1 + decay
        return {
            "shrink": decay / whole,
            "step": self.lr / whole,
            "max_grad_norm": self.max_grad_norm,
            "clip": 1.0,
            "later": where(t == 1, 0.0, 1.0),
            "first": 1 / one_minus_power(beta1, t),
            "second": beta2 / one_minus_power(beta2, t),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "beta3": beta3,
            "alpha3": 1 - beta3,
            "root": 1 / sqrt(one_minus_power(beta3, t)),
            "eps": self.eps,
        }

    def update(self, E, x):
        if self.max_grad_norm is not None:
            x = E.each(clipping, E.map(measure, x, length="all_norm"))
        return E.map(adan, x)
