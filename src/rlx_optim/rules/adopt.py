"""ADOPT: Adam that divides by the second moment of the steps before, and averages what it has divided.

Idea. Adam's second moment holds the gradient that it divides, and so it need not converge unless b2 suits the problem. Divide by
the v of the step before, clip, and only then average: that converges at the best rate for any b2 (Taniguchi et al.,
arXiv:2411.02853).

Formulas.
    d = g + weight_decay·p                      coupled decay
    d = g                                       with decouple
    c = (t − 1)^clip_exp                        no limit where clip_exp is None
    q = min(max(d/max(√v, eps), −c), c)
    m ← b1·m + (1 − b1)·q                       no bias correction
    p ← p − lr·m
    p ← (1 − lr·weight_decay)·p − lr·m          with decouple
    v ← b2·v + (1 − b2)·d²                      after the step
The first step sets v = d² and nothing else: p does not move, nor does it decay.

Conventions.
- torch: does not have it.
- optax: equal to optax.contrib.adopt, which has no decay; with add_decayed_weights behind it, the first step decays there. Its
  use_clipping=False is clip_exp=None.
- the authors' code: equal, with its clip at the fourth root of the steps taken; the paper's first version had no clip, and is
  clip_exp=None (clip_lambda=None there). Any number clips the second step at 1.
- timm: equal; its clip_exp is 0.333 unless given.
- pytorch_optimizer: clips at t^0.25, and its decoupled decay acts at the first step too.

When, and what it costs. In place of AdamW where training is unstable or b2 is hard to choose. 8 bytes of state a parameter,
28 bytes of traffic a parameter.
"""

import math

from ..ops import clamp, exp, log, maximum, minimum, sqrt, where
from ..spec import Foreign, Optax, Spec, Torch, betas, flag, like, real


def adopt(p, g, m, v, decay, ceiling, beta1, alpha1, beta2, alpha2, eps):
    d = g + decay * p
    m = beta1 * m + alpha1 * clamp(d / maximum(sqrt(v), eps), -ceiling, ceiling)
    v = beta2 * v + alpha2 * d * d
    u = m
    return u, m, v


class ADOPT(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: the least that a gradient is divided by.
    weight_decay: how much of p joins the gradient; with decouple, times lr, the share of p that is taken away each step.
    decouple: take the decay from p beside the step, as AdamW does.
    clip_exp: the power of the steps taken at which a divided gradient is clipped; None clips nothing.
    """

    name = "adopt"
    summary = "Adam that divides by the second moment of the steps before, for any b2"
    torch = Torch(settings={"decoupled": Foreign("decouple")}, telltale="clip_exp")  # timm's word for it
    optax = Optax(positional=("b1", "b2", "eps"), state={"ScaleByAdamState": {"m": "mu", "v": "nu"}})

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.9, 0.9999)
    eps: float = real(1e-6, open_low=True)
    weight_decay: float = real(0.0)
    decouple: bool = flag(False)
    clip_exp: float | None = real(0.25, optional=True)

    def static_key(self):
        return ()

    def slots(self, shape):
        """m: the average of divided gradients.
        v: the average of squares.
        """
        return like(shape, m="first moment of divided gradients", v="second moment")

    def corrections(self, t, counters):
        return 1.0, 1.0

    def decays(self):
        return self.decouple

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        first, power = t == 1, self.clip_exp
        ceiling = math.inf if power is None else exp(minimum(power * log(maximum(t - 1.0, 1.0)), 80.0))  # e^80 clips nothing
        return {
            "shrink": where(first, 0.0, self.lr * self.weight_decay * self.decouple),
            "step": where(first, 0.0, self.lr),
            "decay": self.weight_decay * (not self.decouple),
            "ceiling": ceiling,
            "beta1": where(first, 1.0, beta1),
            "alpha1": where(first, 0.0, 1 - beta1),
            "beta2": where(first, 0.0, beta2),
            "alpha2": where(first, 1.0, 1 - beta2),
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(adopt, x)
