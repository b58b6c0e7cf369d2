"""StableAdamW: AdamW that slows a tensor down whose gradients outgrow their average.

Idea. Where squared gradients are suddenly larger than their average, AdamW's steps are too long and the loss spikes; divide the
step by how much too long they are, as Adafactor clips its update (Wortsman et al., arXiv:2304.13013).

Formulas.
    a1 = (1 − b1)/(1 − b1^t), a2 = (1 − b2)/(1 − b2^t)
    m ← (1 − a1)·m + a1·g                       m and v are corrected for bias as they are kept
    v ← (1 − a2)·v + a2·g²
    r = √mean(g²/max(v, eps²))                  of the whole tensor
    s = lr/max(1, r/clip)
    p ← (1 − s·weight_decay)·p − s·m/(√v + eps)    "author"
    p ← (1 − lr·weight_decay)·p − s·m/(√v + eps)   "first"

Conventions.
- torch, optax: neither has it.
- the authors' code: "author", the default, is its second version; "first" is its first, of which there are many copies: the decay
  does not follow the shortened step.
- optimi, pytorch_optimizer: "author"; weight_decay is 0.01 and lr 1e-3 there unless given, and pytorch_optimizer's eps is 1e-8.

When, and what it costs. Large models whose losses spike, in place of clipping gradients. 8 bytes of state a parameter. Two
passes: the first averages and measures (g, m, v read, m, v written: 20 bytes), the second steps (p, m, v read, p written: 16):
36 bytes of traffic a parameter.
"""

from ..ops import maximum, one_minus_power, sqrt
from ..spec import Spec, betas, choice, like, real


def average(g, m, v, beta1, alpha1, beta2, alpha2, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    excess = g / maximum(sqrt(v), eps)
    return m, v, excess


def slowed(excess, lr, clip, weight_decay, fixed_decay):
    step = lr / maximum(1.0, excess / clip)
    shrink = step * weight_decay + fixed_decay
    return step, shrink


def direction(m, v, eps):
    u = m / (sqrt(v) + eps)
    return u


class StableAdamW(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, and is the least that a gradient is divided by.
    weight_decay: times the step, in "first" times lr, the share of p that is taken away.
    clip: how many times their average gradients may be before the step is shortened.
    convention: which version of the authors' code.
    """

    name = "stableadamw"
    summary = "AdamW whose step shrinks where gradients outgrow their average"

    lr: float = real(2e-3)
    betas: tuple[float, float] = betas(0.9, 0.99)
    eps: float = real(1e-6, open_low=True)
    weight_decay: float = real(0.2)
    clip: float = real(1.0, open_low=True, infinite=True)
    convention: str = choice("author", "first")

    def static_key(self):
        return ()

    def slots(self, shape):
        """m: the average of gradients, corrected for bias.
        v: the average of their squares, corrected for bias.
        """
        return like(shape, m="first moment", v="second moment")

    def corrections(self, t, counters):
        return 1.0, 1.0  # nothing is left to divide by: what AdamW's m has to be told, where state goes from one to the other

    def decays(self):
        return True

    def scalars(self, t, counters):
        alpha1, alpha2 = ((1 - beta) / one_minus_power(beta, t) for beta in self.betas)
        follows = self.convention == "author"
        return {
            "lr": self.lr,
            "clip": self.clip,
            "weight_decay": self.weight_decay * follows,
            "fixed_decay": 0.0 if follows else self.lr * self.weight_decay,
            "beta1": 1 - alpha1,
            "alpha1": alpha1,
            "beta2": 1 - alpha2,
            "alpha2": alpha2,
            "eps": self.eps,
        }

    def update(self, E, x):
        x = E.map(average, x, excess="rms")
        return E.map(direction, E.each(slowed, x))
