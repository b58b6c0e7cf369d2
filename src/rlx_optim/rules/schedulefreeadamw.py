"""ScheduleFreeAdamW: AdamW whose average takes the place of momentum and of a learning-rate schedule.

Idea. Average the iterates of AdamW without momentum, and take gradients between the average and the newest iterate: no
schedule has to know when training ends (Defazio et al., arXiv:2405.15682).

Formulas.
    s = lr·min(1, t/warmup_steps)               s = lr without warm-up
    s_max ← max(s_max, s), w = t^r·s_max^weight_lr_power, W ← W + w
    c = w/W                                     0 while W is 0
    v ← b2·v + (1 − b2)·g²
    d = g/(√(v/(1 − b2^t)) + eps) + weight_decay·p          gradients are taken at p, and so is the decay
    z ← z − s·d                                 AdamW without momentum
    x ← (1 − c)·x + c·z                         its average: what to evaluate with
    p ← b1·x + (1 − b1)·z                       where the next gradient is taken
Kept is lead = x − p, from zero, in place of z = p − lead·b1/(1 − b1); s_max, W and b1 are kept per tensor, where the authors'
groups have one of each: see ScheduleFreeSGD.

Conventions.
- torch: does not have it.
- optax: equal to optax.contrib.schedule_free_adamw without warm-up; with it, optax steps with the rate of the step before and
  does not move at first. It has no r.
- the authors' code (schedulefree 1.4.1): the same as AdamWScheduleFree. Their AdamWScheduleFreePaper puts the bias
  correction into s, and so into w: 0.28 away.
- pytorch_optimizer: 1e-15 joins v under the root, which matters where gradients are about 1e-6.

When, and what it costs. Training whose length is not known, or not to be tuned for: a constant lr, one to ten times that of
AdamW with a schedule, with warm-up. Evaluate and save the model at x: `opt.eval()` before and `opt.train()` after. 8 bytes of
state a parameter and 28 bytes of traffic, as AdamW.
"""

from ..ops import one_minus_power, sqrt
from ..spec import betas, integer, like, real
from .schedulefreesgd import Averaged, paced


def scaled(p, g, v, beta2, alpha2, root, eps, decay):
    v = beta2 * v + alpha2 * g * g
    u = g / (sqrt(v) * root + eps) + decay * p
    return u, v


class ScheduleFreeAdamW(Averaged):
    """lr: about how far each coordinate of z moves a step.
    betas: how much of p is the average x, and how much of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr, the share of p that is taken from z each step.
    warmup_steps: how many steps lr takes to reach its value.
    r: the power of t in a step's weight in the average.
    weight_lr_power: the power of the largest lr so far in that weight.
    """

    name = "schedulefreeadamw"
    summary = "AdamW with an average of iterates in place of a schedule"

    lr: float = real(2.5e-3)
    betas: tuple[float, float] = betas(0.9, 0.999)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)
    warmup_steps: int = integer(0, 0)
    r: float = real(0.0)
    weight_lr_power: float = real(2.0)

    def slots(self, shape):
        """lead: x − p, which leads from p to the average.
        v: the average of squared gradients.
        """
        return like(shape, lead="average less parameter", v="second moment")

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        return {
            "decay": self.weight_decay,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
            **paced(self, beta1, t, counters),
        }

    def update(self, E, x):
        return E.map(scaled, x)
