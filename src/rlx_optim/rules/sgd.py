"""SGD: step against the gradient, with optional momentum.

Idea. Move against the gradient; momentum averages past gradients so that the walk keeps its direction across noise and
narrow valleys. Nesterov's variant looks one momentum step ahead.

Formulas.
    d = g + weight_decay·p                      coupled decay
    m ← momentum·m + (1 − dampening)·d          the first step sets m = d, undampened
    u = m                                       with momentum
    u = d + momentum·m                          with nesterov
    u = d                                       without momentum; dampening plays no part
    p ← p − lr·u

Conventions.
- torch: equal to torch.optim.SGD. There lr is 1e-3 unless given; here it must be given (rlx_optim.torch follows torch).
- optax: equal to optax.sgd with add_decayed_weights before it; optax has no dampening.

When, and what it costs. Convolutional networks with a tuned learning-rate schedule; the yardstick for everything else.
No state without momentum, 4 bytes a parameter with it; 20 bytes of traffic a parameter (12 without momentum).
"""

import math

from ..spec import REQUIRED, Optax, Spec, Torch, flag, like, real


def plain(p, g, decay):
    u = g + decay * p
    return u


def heavy_ball(p, g, m, decay, beta, alpha):
    m = beta * m + alpha * (g + decay * p)
    u = m
    return u, m


def nesterov(p, g, m, decay, beta, alpha):
    d = g + decay * p
    m = beta * m + alpha * d
    u = d + beta * m
    return u, m


class SGD(Spec):
    """lr: how far to step along the update.
    momentum: how much of the running average is kept; 0 keeps none.
    dampening: how much of each new gradient is left out of the average, the first excepted.
    weight_decay: how much of p joins the gradient.
    nesterov: step by the gradient plus the momentum that the next step would see; needs momentum and no dampening.
    """

    name = "sgd"
    summary = "plain, heavy-ball or Nesterov momentum"
    torch = Torch("SGD", {"lr": 1e-3}, slots={"m": "momentum_buffer"}, telltale="dampening", counts=False)
    optax = Optax(defaults={"momentum": None}, positional=("momentum", "nesterov"), state={"TraceState": {"m": "trace"}})

    lr: float = real(REQUIRED)
    momentum: float = real(0.0)
    dampening: float = real(0.0, high=1.0)
    weight_decay: float = real(0.0)
    nesterov: bool = flag(False)

    def check(self):
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            raise self.refuse(
                f"nesterov=True needs momentum > 0 and dampening 0, got momentum={self.momentum!r}, dampening={self.dampening!r}"
            )

    @property
    def averages(self):
        return not (isinstance(self.momentum, float) and self.momentum == 0)  # a traced momentum is one

    def static_key(self):
        return (self.nesterov, self.averages)

    def slots(self, shape):
        """m: the average of gradients; only with momentum."""
        return like(shape, m="first moment") if self.averages else {}

    def momentum_gain(self):
        return (1 - self.dampening) / (1 - self.momentum) if self.momentum < 1 else math.inf

    counter_ranges = {"started": real(0, high=1.0)}

    def counters(self):
        """started: 1 once the average has begun."""
        return {"started": 0} if self.averages else {}

    def scalars(self, t, counters):
        dampened = not (isinstance(self.dampening, float) and self.dampening == 0)  # a traced dampening is one
        alpha = 1 - self.dampening * counters.get("started", 0) if dampened else 1.0  # the first buffer is d itself, undampened
        return {"step": self.lr, "decay": self.weight_decay, "beta": self.momentum, "alpha": alpha, "started": 1}

    def update(self, E, x):
        return E.map(nesterov if self.nesterov else heavy_ball if "m" in x else plain, x)
