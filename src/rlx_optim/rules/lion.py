"""Lion: step by the sign of an interpolated momentum.

Idea. Every coordinate moves by exactly lr; only the direction is learned from the gradient. The rule was found by program
search (Chen et al., arXiv:2302.06675).

Formulas.
    u = sign(b1·m + (1 − b1)·g)                 sign(0) = 0
    p ← (1 − lr·weight_decay)·p − lr·u
    m ← b2·m + (1 − b2)·g                       after the step

Conventions.
- torch: does not have it.
- optax: equal to optax.lion, whose weight_decay is 1e-3 unless given.
- the authors' code, timm, pytorch_optimizer: the same.

When, and what it costs. Large batches and tight memory: use 3 to 10 times less lr and as much more weight_decay than with
AdamW. 4 bytes of state a parameter, 20 bytes of traffic a parameter.
"""

from ..modifiers import by_count
from ..ops import sign
from ..spec import Optax, Spec, betas, like, real


def lion(g, m, beta1, alpha1, beta2, alpha2):
    u = sign(beta1 * m + alpha1 * g)
    m = beta2 * m + alpha2 * g
    return u, m


class Lion(Spec):
    """lr: how far every coordinate moves a step.
    betas: how much of m counts in the direction, and how much of it is kept a step.
    weight_decay: times lr, the share of p that is taken away each step.
    """

    name = "lion"
    summary = "sign of an interpolated momentum, half of Adam's state"
    optax = Optax(defaults={"weight_decay": 1e-3}, state={"ScaleByLionState": {"m": "mu"}})

    lr: float = real(1e-4)
    betas: tuple[float, float] = betas(0.9, 0.99)
    weight_decay: float = real(0.0)

    caution = staticmethod(by_count)  # n/(kept + 1), as the authors' c_lion.py; timm takes their AdamW's

    def slots(self, shape):
        """m: the average of gradients."""
        return like(shape, m="first moment")

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        return {
            "shrink": self.lr * self.weight_decay,
            "step": self.lr,
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
        }

    def update(self, E, x):
        return E.map(lion, x)
