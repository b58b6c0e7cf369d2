"""NAdamW: AdamW with Nesterov momentum.

Idea. Use the momentum that the next step would see (Dozat, 2016). Three rules share the name and differ by 7 to 49 % after
20 steps, so the convention is explicit.

Formulas.
    m ← b1·m + (1 − b1)·g
    v ← b2·v + (1 − b2)·g², v̂ = v/(1 − b2^t)
    m̂ = b1·m/(1 − b1^(t + 1)) + (1 − b1)·g/(1 − b1^t)              "dozat"
    m̂ = (b1·m + (1 − b1)·g)/(1 − b1^t)                             "algoperf"
    μ_t = b1·(1 − ½·0.96^(t·momentum_decay)), Π_t = μ_1·…·μ_t      "torch"
    m̂ = μ_{t+1}·m/(1 − Π_{t+1}) + (1 − μ_t)·g/(1 − Π_t)            "torch"
    p ← (1 − lr·weight_decay)·p − lr·m̂/(√v̂ + eps)
In "torch" m itself still averages with b1, and Π is state.

Conventions.
- torch: "torch" equals torch.optim.NAdam with decoupled_weight_decay=True (its default lr is 2e-3); its coupled decay is
  not here.
- optax: "dozat", the default, equals optax.nadamw, whose weight_decay is 1e-4 unless given.
- timm, MLCommons AlgoPerf: "algoperf".

When, and what it costs. Often a little ahead of AdamW at the same cost (it won MLCommons' AlgoPerf baselines).
8 bytes of state a parameter, 28 bytes of traffic a parameter.
"""

from ..ops import one_minus_power, sqrt
from ..spec import Optax, Spec, Torch, betas, choice, like, real


def nadamw(g, m, v, from_m, from_g, beta1, alpha1, beta2, alpha2, root, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    u = (from_m * m + from_g * g) / (sqrt(v) * root + eps)
    return u, m, v


class NAdamW(Spec):
    """lr: about how far each coordinate moves a step.
    betas: how much of m and of v is kept a step.
    eps: joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr, the share of p that is taken away each step.
    momentum_decay: how fast "torch" raises its momentum towards betas[0]; the others do not use it.
    convention: which of the three rules.
    """

    name = "nadamw"
    summary = "AdamW with Nesterov momentum, three conventions"
    torch = Torch("NAdam", shared="momentum_decay", decoupled=True, telltale="momentum_decay")
    optax = Optax(defaults={"weight_decay": 1e-4}, state={"ScaleByAdamState": {"m": "mu", "v": "nu"}})

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.9, 0.999)
    eps: float = real(1e-8)
    weight_decay: float = real(0.01)
    momentum_decay: float = real(4e-3)
    convention: str = choice("dozat", "algoperf", "torch")

    def slots(self, shape):
        """m: the average of gradients.
        v: the average of their squares.
        """
        return like(shape, m="first moment", v="second moment")

    counter_ranges = {"mu_product": real(1.0, high=1.0)}

    def counters(self):
        """mu_product: Π, the product of all momenta so far; only in "torch"."""
        return {"mu_product": 1.0} if self.convention == "torch" else {}

    def corrections(self, t, counters):
        first, second = super().corrections(t, counters)
        return 1 - counters["mu_product"] if counters else first, second

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        numbers = {
            "shrink": self.lr * self.weight_decay,
            "step": self.lr,
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "root": 1 / sqrt(one_minus_power(beta2, t)),
            "eps": self.eps,
        }
        if self.convention == "torch":
            beta_t, after = (beta1 * (1 - 0.5 * 0.96 ** (n * self.momentum_decay)) for n in (t, t + 1))
            product = counters["mu_product"] * beta_t
            from_m, from_g = after / (1 - product * after), (1 - beta_t) / (1 - product)
            numbers["mu_product"] = product
        else:
            from_m = beta1 / one_minus_power(beta1, t + (self.convention == "dozat"))
            from_g = (1 - beta1) / one_minus_power(beta1, t)
        return numbers | {"from_m": from_m, "from_g": from_g}

    def update(self, E, x):
        return E.map(nadamw, x)
