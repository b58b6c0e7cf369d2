"""QHAdamW: AdamW with quasi-hyperbolic moments.

Idea. Mix the momentum with the plain gradient, in numerator and denominator, so that a long average can be kept without
its delay (Ma & Yarats, arXiv:1810.06801).

Formulas.
    m ← b1·m + (1 − b1)·g, m̂ = m/(1 − b1^t)
    v ← b2·v + (1 − b2)·g², v̂ = v/(1 − b2^t)
    u = (1 − nu1)·g + nu1·m̂
    w = (1 − nu2)·g² + nu2·v̂
    p ← (1 − lr·weight_decay)·p − lr·u/(√w + eps)
nus = (1, 1) is AdamW.

Conventions.
- torch, optax: neither has it.
- the authors' qhoptim: the same rule; one of its trajectories is among the tests.
- pytorch_optimizer: equal to QHAdam(weight_decouple=True), whose nus are (1, 1) unless given.

When, and what it costs. Where AdamW is unstable at long averages. 8 bytes of state a parameter, 28 of traffic.
"""

from ..ops import one_minus_power, sqrt
from ..spec import Optax, Spec, betas, like, real, reals


def qhadamw(g, m, v, from_g, from_m, from_gg, from_v, beta1, alpha1, beta2, alpha2, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    u = (from_g * g + from_m * m) / (sqrt(from_gg * g * g + from_v * v) + eps)
    return u, m, v


class QHAdamW(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    nus: how much of numerator and denominator comes from the averages; the rest from this step's gradient.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr, the share of p that is taken away each step.
    """

    name = "qhadamw"
    summary = "AdamW with quasi-hyperbolic moments"
    optax = Optax(spread={"betas": "b", "nus": "nu"})

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.995, 0.999)
    nus: tuple[float, float] = reals((0.7, 1.0), high=1.0)
    eps: float = real(1e-8)
    weight_decay: float = real(0.01)

    def slots(self, shape):
        """m: the average of gradients.
        v: the average of their squares.
        """
        return like(shape, m="first moment", v="second moment")

    def scalars(self, t, counters):
        (beta1, beta2), (nu1, nu2) = self.betas, self.nus
        return {
            "shrink": self.lr * self.weight_decay,
            "step": self.lr,
            "from_g": 1 - nu1,
            "from_m": nu1 / one_minus_power(beta1, t),
            "from_gg": 1 - nu2,
            "from_v": nu2 / one_minus_power(beta2, t),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(qhadamw, x)
