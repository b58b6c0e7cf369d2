"""LaProp: Adam that divides first and averages then.

Idea. Adam averages gradients and divides the average by their size, so old gradients are measured by the size of new ones. Divide
each gradient by the size it was found with, and average what comes out: momentum and adaptivity no longer disturb each other, and
any two betas go together (Ziyin et al., arXiv:2002.04839).

Formulas.
    v ← b2·v + (1 − b2)·g², v̂ = v/(1 − b2^t)
    m ← b1·m + (1 − b1)·lr·g/(√v̂ + eps)
    s ← b1·s + (1 − b1)·lr                      s/lr is 1 − b1^t where lr does not change
    p ← (1 − weight_decay)·(p − lr·m/s)         "author"
    p ← (1 − lr·weight_decay)·(p − lr·m/s)      "timm"

Conventions.
- torch, optax: neither has it.
- the authors' code: "author", the default, whose decay is not times lr. Where lr is 0 it steps by m; here nothing moves then.
  Its centered and amsgrad are not here.
- timm: "timm", the same but for the decay.
- pytorch_optimizer: 1e-15 joins v before the root, which the first steps feel; the decay is timm's.

When, and what it costs. In place of AdamW where b1 is large beside b2, or gradients are noisy. 8 bytes of state a parameter,
28 bytes of traffic a parameter.
"""

from ..ops import one_minus_power, sqrt, where
from ..spec import Spec, betas, choice, like, real


def laprop(g, m, v, beta1, gain, beta2, alpha2, root, eps):
    v = beta2 * v + alpha2 * g * g
    m = beta1 * m + gain * g / (sqrt(v) * root + eps)
    u = m
    return u, m, v


class LaProp(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: the share of p that is taken away each step; in "timm" times lr.
    convention: whose decay.
    """

    name = "laprop"
    summary = "Adam that divides first and averages then"

    lr: float = real(4e-4)
    betas: tuple[float, float] = betas(0.9, 0.999)
    eps: float = real(1e-15, open_low=True)
    weight_decay: float = real(0.0)
    convention: str = choice("author", "timm")

    def static_key(self):
        return ()

    def slots(self, shape):
        """m: the average of steps.
        v: the average of squared gradients.
        """
        return like(shape, m="first moment of steps", v="second moment")

    counter_ranges = {"lr_average": real(0.0)}

    def counters(self):
        """lr_average: s, the average of learning rates."""
        return {"lr_average": 0.0}

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        shrink = self.weight_decay * (1.0 if self.convention == "author" else self.lr)
        average = beta1 * counters["lr_average"] + (1 - beta1) * self.lr
        return {
            "lr_average": average,
            "shrink": shrink,
            "step": (1 - shrink) * self.lr / where(average > 0, average, 1.0),  # the decay is of what the step leaves
            "beta1": beta1,
            "gain": (1 - beta1) * self.lr,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(laprop, x)
