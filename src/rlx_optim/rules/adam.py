"""Adam: step by the ratio of the gradient's mean to its root mean square.

Idea. Divide each coordinate's average gradient by the root of its average square, so that every coordinate moves about
lr a step whatever its scale (Kingma & Ba, arXiv:1412.6980).

Formulas.
    g ← g + weight_decay·p                      coupled decay
    m ← b1·m + (1 − b1)·g
    v ← b2·v + (1 − b2)·g²
    m̂ = m/(1 − b1^t), v̂ = v/(1 − b2^t)
    vmax ← max(vmax, v), v̂ = vmax/(1 − b2^t)    with amsgrad
    p ← p − lr·m̂/(√v̂ + eps)
eps stands outside the root, after bias correction.

Conventions.
- torch: equal to torch.optim.Adam, amsgrad included.
- optax: equal to optax.adam with add_decayed_weights before it. optax.amsgrad keeps the maximum of the corrected v; here,
  as in torch, of the uncorrected one.
- the paper: the same; weight decay and amsgrad came later.

When, and what it costs. Where an existing recipe says Adam; with weight decay prefer AdamW.
8 bytes of state a parameter (12 with amsgrad), 28 bytes of traffic a parameter (36).
"""

from ..ops import maximum, one_minus_power, sqrt
from ..spec import Optax, Spec, Torch, betas, flag, like, real


def adam(p, g, m, v, decay, beta1, alpha1, beta2, alpha2, root, eps):
    g = g + decay * p
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    u = m / (sqrt(v) * root + eps)
    return u, m, v


def amsgrad(p, g, m, v, vmax, decay, beta1, alpha1, beta2, alpha2, root, eps):
    g = g + decay * p
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    vmax = maximum(vmax, v)
    u = m / (sqrt(vmax) * root + eps)
    return u, m, v, vmax


class Adam(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: how much of p joins the gradient, before the averages.
    amsgrad: divide by the largest v so far.
    """

    name = "adam"
    summary = "first over root of second moment, coupled decay"
    torch = Torch("Adam", decoupled=False)
    optax = Optax(state={"ScaleByAdamState": {"m": "mu", "v": "nu"}})

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.9, 0.999)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)
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
            "decay": self.weight_decay,
            "step": self.lr / one_minus_power(beta1, t),
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
        }

    def update(self, E, x):
        return E.map(amsgrad if self.amsgrad else adam, x)
