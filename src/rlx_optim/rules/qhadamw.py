"""QHAdamW: AdamW with quasi-hyperbolic moments.

Idea. Mix the momentum with the plain gradient, in numerator and denominator, so that a long average can be kept without
its delay (Ma & Yarats, arXiv:1810.06801).

Formulas. m, v as in AdamW. num = (1 − nu1)·g + nu1·m/bc1; den = √((1 − nu2)·g² + nu2·v/bc2) + eps;
p ← (1 − lr·weight_decay)·p − lr·num/den. nus = (1, 1) is AdamW.

When, and what it costs. Where AdamW is unstable at long averages. 8 bytes of state a parameter, 28 of traffic.
"""

from ..spec import Spec, betas, like, real, reals
from ..vocabulary import less_power, sqrt


def qhadamw(p, g, m, v, shrink, from_g, from_m, from_gg, from_v, beta1, alpha1, beta2, alpha2, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    p = p - (shrink * p + (from_g * g + from_m * m) / (sqrt(from_gg * g * g + from_v * v) + eps))
    return p, m, v


class QHAdamW(Spec):
    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.995, 0.999)
    nus: tuple[float, float] = reals((0.7, 1.0), high=1.0)
    eps: float = real(1e-8)
    weight_decay: float = real(0.01)

    def slots(self, shape):
        return like(shape, "m", "v")

    def scalars(self, t, counters):
        (beta1, beta2), (nu1, nu2) = self.betas, self.nus
        return {
            "shrink": self.lr * self.weight_decay,
            "from_g": self.lr * (1 - nu1),
            "from_m": self.lr * nu1 / less_power(beta1, t),
            "from_gg": 1 - nu2,
            "from_v": nu2 / less_power(beta2, t),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(qhadamw, x)
