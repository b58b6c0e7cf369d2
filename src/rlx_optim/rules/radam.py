"""RAdam: Adam that waits until its second moment can be trusted.

Idea. Early on, v is an average of few squares and its reciprocal root varies wildly. Measure that by ρ_t, the length of
the average; step by plain momentum while it is short, and rectify the adaptive step by r afterwards (Liu et al.,
arXiv:1908.03265). It does without warm-up.

Formulas.
    m ← b1·m + (1 − b1)·g, m̂ = m/(1 − b1^t)
    v ← b2·v + (1 − b2)·g², v̂ = v/(1 − b2^t)
    ρ∞ = 2/(1 − b2) − 1, ρ_t = ρ∞ − 2·t·b2^t/(1 − b2^t)
    r = √((ρ_t − 4)·(ρ_t − 2)·ρ∞/((ρ∞ − 4)·(ρ∞ − 2)·ρ_t))
    p ← p − lr·r·m̂·√(1 − b2^t)/(√v + eps)       "torch", where ρ_t > 5
    p ← p − lr·r·m̂/(√v̂ + eps)                   "paper", where ρ_t > 4
    p ← p − lr·m̂                                otherwise
weight_decay joins the gradient first, or shrinks p beside the step where decoupled_weight_decay.

Conventions.
- torch: "torch", the default, equals torch.optim.RAdam: threshold 5, eps before bias correction.
- optax: "paper" equals optax.radam(threshold=4.0); its default threshold is 5. It takes ρ_t as a difference of large
  numbers in float32 and is 1.2 % off at t = 6; here ρ_t and r are taken in float64, in a form where nothing cancels.
- the paper: "paper".

When, and what it costs. In place of Adam where no warm-up is wanted. 8 bytes of state a parameter, 28 of traffic.
"""

from ..ops import log, one_minus_power, sqrt, where
from ..spec import Optax, Spec, Torch, betas, choice, flag, like, real


def radam(p, g, m, v, decay, rectified, beta1, alpha1, beta2, alpha2, root, eps):
    g = g + decay * p
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    u = where(rectified > 0, m / (sqrt(v) * root + eps), m)
    return u, m, v


class RAdam(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: how much of p joins the gradient, or is taken away beside the step.
    decoupled_weight_decay: take it away beside the step, times lr, as AdamW does.
    convention: from which ρ_t on to rectify, and where eps stands.
    """

    name = "radam"
    summary = "Adam that rectifies its early steps, no warm-up"
    torch = Torch("RAdam", shared="decoupled_weight_decay")
    optax = Optax(defaults={"convention": "paper"}, state={"ScaleByAdamState": {"m": "mu", "v": "nu"}})

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.9, 0.999)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)
    decoupled_weight_decay: bool = flag(False)
    convention: str = choice("torch", "paper")

    def decays(self):
        return self.decoupled_weight_decay

    def scalars(self, t, counters):
        (beta1, beta2), torch = self.betas, self.convention == "torch"
        c1, c2 = one_minus_power(beta1, t), one_minus_power(beta2, t)
        rectified, r = rectification(beta2, t, c2, threshold=5 if torch else 4)
        adaptive = r * (sqrt(c2) if torch else 1)
        return {
            "shrink": self.lr * self.weight_decay * self.decoupled_weight_decay,
            "decay": self.weight_decay * (not self.decoupled_weight_decay),
            "step": self.lr / c1 * where(rectified, adaptive, 1.0),
            "rectified": where(rectified, 1.0, 0.0),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "root": 1 if torch else 1 / sqrt(c2),
            "eps": self.eps,
        }

    def slots(self, shape):
        """m: the average of gradients.
        v: the average of their squares.
        """
        return like(shape, m="first moment", v="second moment")

    def update(self, E, x):
        return E.map(radam, x)


def rectification(beta2, t, c2, threshold):
    """Whether the step is rectified at t, and by what factor.

    ρ_t is a small difference of large numbers. With x = −t·log b2 it is (ρ∞ + d)·(1 − x/(eˣ − 1)) − d, d = −2/log b2 − ρ∞, where
    nothing cancels if the bracket is taken as a series for small x: right to 1e-6 in float32, too.
    """
    longest = 2 / (1 - beta2) - 1
    x = -t * log(beta2)
    excess = -2 / log(beta2) - longest
    series = x * (1 / 2 - x * (1 / 12 - x * x * (1 / 720 - x * x * (1 / 30240 - x * x / 1209600))))
    rho = (longest + excess) * where(x < 0.5, series, 1 - x * (1 - c2) / c2) - excess
    rectified = (longest > threshold) & (rho > threshold)
    rho = where(rectified, rho, 8.0)  # r is not real below 4, and not used
    ceiling = where(rectified, longest, 8.0)
    return rectified, sqrt((rho - 4) * (rho - 2) * ceiling / ((ceiling - 4) * (ceiling - 2) * rho))
