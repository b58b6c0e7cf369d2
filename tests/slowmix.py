"""SlowMix: AdamW's step with a second, slow average of gradients beside the first, as an optimizer from outside the package.

Idea. Old gradients still help: mix a fast average with one that remembers tens of thousands of steps (arXiv:2409.03137).

Formulas.
    m1 ← b1·m1 + (1 − b1)·g
    m2 ← b3·m2 + (1 − b3)·g
    v ← b2·v + (1 − b2)·g²
    p ← p − lr·((m1/(1 − b1^t) + alpha·m2)/(√(v/(1 − b2^t)) + eps) + weight_decay·p)

When, and what it costs. Long runs. 12 bytes of state a parameter.
"""

from rlx_optim.rule import Spec, betas, like, one_minus_power, real, sqrt


def slowmix(g, m1, m2, v, fast, slow, beta1, alpha1, beta2, alpha2, beta3, alpha3, root, eps):
    m1 = beta1 * m1 + alpha1 * g
    m2 = beta3 * m2 + alpha3 * g
    v = beta2 * v + alpha2 * g * g
    u = (fast * m1 + slow * m2) / (sqrt(v) * root + eps)
    return u, m1, m2, v


class SlowMix(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m1 and of v is kept a step.
    beta3: how much of m2 is kept a step.
    alpha: how much of m2 joins the direction.
    eps: joins the root.
    weight_decay: times lr, the share of p that is taken away each step.
    """

    summary = "AdamW with a second, slow average of gradients"
    aliases = ("mix",)

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.9, 0.999)
    beta3: float = real(0.9999, high=1.0, open_high=True)
    alpha: float = real(5.0)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)

    def slots(self, shape):
        """m1: the fast average of gradients.
        m2: the slow one.
        v: the average of their squares.
        """
        return like(shape, m1="first moment", m2="slow first moment", v="second moment")

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        return {
            "shrink": self.lr * self.weight_decay,
            "step": self.lr,
            "fast": 1 / one_minus_power(beta1, t),
            "slow": self.alpha,
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "beta3": self.beta3,
            "alpha3": 1 - self.beta3,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(slowmix, x)
