"""AdEMAMix: AdamW with a second, slow average of gradients beside the first.

Idea. Old gradients still help: mix a fast average, which follows the loss, with one that remembers tens of thousands of steps
(Pagliardini et al., arXiv:2409.03137). Both the weight of the slow one and its memory may grow over the first steps.

Formulas.
    a = alpha·min(1, t/alpha_warmup)            alpha itself where alpha_warmup is None
    h = h1 + t/beta3_warmup·(h3 − h1)           from the half-life of b1 to that of b3, in beta3_warmup steps
    b = 0.5^(1/h)                               b3 itself after them, and where beta3_warmup is None
    m ← b1·m + (1 − b1)·g
    slow ← b·slow + (1 − b)·g                   not corrected for bias
    v ← b2·v + (1 − b2)·g², v̂ = v/(1 − b2^t)
    u = (m/(1 − b1^t) + a·slow)/(√v̂ + eps)
    p ← (1 − lr·weight_decay)·p − lr·u

Conventions.
- torch: does not have it.
- optax: equal to optax.contrib.ademamix, whose alpha is 5 unless given, without warm-ups. The schedules it takes for alpha and b3
  see t − 1: with b3 equal to b1 at its first step, a tenth of the first gradient stays in the slow average.
- the authors' code: equal to their torch class, warm-ups included. The half-life of b is log(0.5)/log(b + 1e-8) there and here.
- pytorch_optimizer: the same with weight_decouple=True; its alpha is 5 and it has one warm-up for both.

When, and what it costs. Long runs, where old gradients pay; give both warm-ups the length of the run. 12 bytes of state a
parameter, 36 bytes of traffic a parameter.
"""

from ..ops import log, minimum, one_minus_power, sqrt, where
from ..spec import Optax, Spec, Torch, like, real, reals


def ademamix(g, m, slow, v, first, share, beta1, alpha1, beta2, alpha2, beta3, alpha3, root, eps):
    m = beta1 * m + alpha1 * g
    slow = beta3 * slow + alpha3 * g
    v = beta2 * v + alpha2 * g * g
    u = (first * m + share * slow) / (sqrt(v) * root + eps)
    return u, m, slow, v


class AdEMAMix(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m, of v and of the slow average is kept a step.
    alpha: how much of the slow average joins the direction.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr, the share of p that is taken away each step.
    alpha_warmup: over how many steps alpha grows from 0; None: it is there at once.
    beta3_warmup: over how many steps the memory of the slow average grows from that of m; None: it is there at once.
    """

    name = "ademamix"
    summary = "AdamW with a second, slow average of gradients"
    torch = Torch(slots={"m": "exp_avg_fast", "slow": "exp_avg_slow"}, telltale="beta3_warmup")  # as the authors' code has them
    optax = Optax(
        defaults={"alpha": 5.0},
        positional=("b1", "b2", "b3", "alpha", "eps"),
        state={"ScaleByAdemamixState": {"m": "m1", "slow": "m2", "v": "nu"}},
    )

    lr: float = real(1e-3)
    betas: tuple[float, float, float] = reals((0.9, 0.999, 0.9999), high=1.0, open_high=True)
    alpha: float = real(2.0)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)
    alpha_warmup: float | None = real(None, open_low=True, optional=True)
    beta3_warmup: float | None = real(None, open_low=True, optional=True)

    def slots(self, shape):
        """m: the fast average of gradients.
        slow: the slow one.
        v: the average of their squares.
        """
        return like(shape, m="first moment", slow="slow first moment", v="second moment")

    def scalars(self, t, counters):
        beta1, beta2, beta3 = self.betas
        alpha3 = 1 - beta3
        if self.beta3_warmup is not None:
            short, long = half_life(beta1), half_life(beta3)
            life = short + t / self.beta3_warmup * (long - short)
            alpha3 = where(t >= self.beta3_warmup, alpha3, one_minus_power(0.5, 1 / life))
        return {
            "shrink": self.lr * self.weight_decay,
            "step": self.lr,
            "first": 1 / one_minus_power(beta1, t),
            "share": self.alpha if self.alpha_warmup is None else self.alpha * minimum(1.0, t / self.alpha_warmup),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "beta3": 1 - alpha3,
            "alpha3": alpha3,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(ademamix, x)


def half_life(beta):
    """After how many steps half of an average is gone."""
    return log(0.5) / log(beta + 1e-8)
