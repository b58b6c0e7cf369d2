"""AdamW: Adam with decoupled weight decay.

Idea. Shrink the parameters beside the adaptive step, not through it, so that the decay does not depend on the gradient's
scale (Loshchilov & Hutter, arXiv:1711.05101).

Formulas.
    m ← b1·m + (1 − b1)·g
    v ← b2·v + (1 − b2)·g²
    m̂ = m/(1 − b1^t), v̂ = v/(1 − b2^t)
    vmax ← max(vmax, v), v̂ = vmax/(1 − b2^t)    with amsgrad
    p ← (1 − lr·weight_decay)·p − lr·m̂/(√v̂ + eps)

Conventions.
- torch: equal to torch.optim.AdamW. The decay is computed as p − lr·weight_decay·p in one rounding, where torch rounds the
  factor 1 − lr·weight_decay to float32 first.
- optax: equal to optax.adamw, whose weight_decay is 1e-4 unless given.
- the paper: multiplies the decay by the schedule but not by lr; the libraries multiply by both, and so does this one.

When, and what it costs. The default choice for transformers. 8 bytes of state a parameter (12 with amsgrad),
28 bytes of traffic a parameter (36).
"""

from ..ops import maximum, one_minus_power, sqrt
from ..spec import Optax, Spec, Torch, betas, flag, like, real


def adamw(g, m, v, beta1, alpha1, beta2, alpha2, root, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    u = m / (sqrt(v) * root + eps)
    return u, m, v


def amsgrad(g, m, v, vmax, beta1, alpha1, beta2, alpha2, root, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    vmax = maximum(vmax, v)
    u = m / (sqrt(vmax) * root + eps)
    return u, m, v, vmax


class AdamW(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr, the share of p that is taken away each step.
    amsgrad: divide by the largest v so far.
    """

    name = "adamw"
    summary = "Adam with decoupled weight decay"
    torch = Torch("AdamW", decoupled=True, assumed=True)
    optax = Optax(defaults={"weight_decay": 1e-4}, state={"ScaleByAdamState": {"m": "mu", "v": "nu"}})

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.9, 0.999)
    eps: float = real(1e-8)
    weight_decay: float = real(0.01)
    amsgrad: bool = flag(False)

    def slots(self, shape):
        """m: the average of gradients.
        v: the average of their squares.
        vmax: the largest v so far; only with amsgrad.
        """
        largest = like(shape, vmax="largest second moment") if self.amsgrad else {}
        return like(shape, m="first moment", v="second moment") | largest

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        return {
            "shrink": self.lr * self.weight_decay,
            "step": self.lr / one_minus_power(beta1, t),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(amsgrad if self.amsgrad else adamw, x)
