"""LARS: SGD with momentum whose step is a share of each tensor's own norm.

Idea. Where batches are large and lr with them, some layers diverge while others hardly move. Let every tensor step by a share
of its norm, whatever the norm of its gradient (You et al., arXiv:1708.03888).

Formulas.
    d = g + weight_decay·p
    r = trust_coefficient·‖p‖/(‖d‖ + eps)                      "optax"
    r = trust_coefficient·‖p‖/(‖g‖ + weight_decay·‖p‖ + eps)   "timm"
    m ← momentum·m + lr·r·d                                    "optax"
    p ← p − m                                                  "optax"
    p ← p − lr·r·d − momentum·m                                "optax" with nesterov
    m ← momentum·m + r·d                                       "timm"
    p ← p − lr·m                                               "timm"
    p ← p − lr·(r·d + momentum·m)                              "timm" with nesterov
The norms are those of the whole tensor; r is 1 where either is 0, and where trust_coefficient is None: SGD, as biases and norms
are often stepped.

Conventions.
- torch: does not have it.
- optax: "optax", the default, equals optax.lars. A trust_ratio_mask is trust_coefficient=None in a group.
- the paper, apex, timm: "timm", whose ratio has the sum of two norms where optax has the norm of the sum. The paper and timm keep
  lr out of m. timm's eps is 1e-8, its momentum 0, and it is plain SGD where weight_decay is 0 unless always_adapt; its dampening
  and trust_clip are not here.
- pytorch_optimizer: "timm" without eps, and SGD without decay on tensors of fewer than two dimensions.

When, and what it costs. Convolutional networks at batches in the thousands; Lamb is the same for transformers. 4 bytes of state
a parameter. Two passes: the first measures (p, g read: 8 bytes), the second steps: 28 bytes of traffic a parameter (20 with
trust_coefficient=None, which measures nothing).
"""

from ..ops import where
from ..spec import Optax, Spec, Torch, choice, flag, like, real


def measure(p, g, decay):
    size = p
    pace = g + decay * p
    return size, pace


def measure_apart(p, g):
    size = p
    pace = g
    return size, pace


def trust(size, pace, inner, trust_coefficient, beside, eps):
    ratio = where((size > 0) & (pace > 0), trust_coefficient * size / (pace + beside * size + eps), 1.0)
    gain = inner * ratio
    return gain


def heavy_ball(p, g, m, decay, gain, beta):
    m = beta * m + gain * (g + decay * p)
    u = m
    return u, m


def nesterov(p, g, m, decay, gain, beta):
    d = gain * (g + decay * p)
    m = beta * m + d
    u = d + beta * m
    return u, m


class LARS(Spec):
    """lr: with trust_coefficient, the share of its own norm that a tensor moves a step, or that joins m.
    momentum: how much of m is kept a step.
    weight_decay: how much of p joins the gradient.
    trust_coefficient: by what the ratio of norms is multiplied; None takes 1 for the whole, as SGD does.
    eps: joins the norm that is divided by.
    nesterov: step by the gradient plus the momentum that the next step would see.
    convention: which norm is divided by, and whether m has lr in it.
    """

    name = "lars"
    summary = "SGD scaled by each tensor's norm, for large batches"
    torch = Torch(slots={"m": "momentum_buffer"})
    optax = Optax(positional=("weight_decay",))
    incompatible = {"decay='hyperball'": "the trust ratio makes its step a share of the tensor's norm already"}

    lr: float = real(1.0)
    momentum: float = real(0.9)
    weight_decay: float = real(0.0)
    trust_coefficient: float | None = real(1e-3, optional=True)
    eps: float = real(0.0)
    nesterov: bool = flag(False)
    convention: str = choice("optax", "timm")

    def slots(self, shape):
        """m: the sum of scaled gradients, each step less of the old; in "optax" of steps."""
        return like(shape, m="sum of steps" if self.convention == "optax" else "sum of scaled gradients")

    def scalars(self, t, counters):
        optax = self.convention == "optax"
        inner, step = (self.lr, 1.0) if optax else (1.0, self.lr)
        return {
            "step": step,
            "inner": inner,
            "gain": inner,
            "decay": self.weight_decay,
            "beside": 0.0 if optax else self.weight_decay,
            "trust_coefficient": self.trust_coefficient,
            "beta": self.momentum,
            "eps": self.eps,
        }

    def update(self, E, x):
        if self.trust_coefficient is not None:
            norms = measure if self.convention == "optax" else measure_apart
            x = E.each(trust, E.map(norms, x, size="norm", pace="norm"))
        return E.map(nesterov if self.nesterov else heavy_ball, x)
