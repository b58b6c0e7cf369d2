"""SGD: step against the gradient, with optional momentum.

Idea. Move against the gradient; momentum averages past gradients so that the walk keeps its direction across noise and
narrow valleys. Nesterov's variant looks one momentum step ahead.

Formulas. d = g + weight_decay·p (coupled decay). The first step sets m = d, undampened; later
m ← momentum·m + (1 − dampening)·d. The update is m, or d + momentum·m with Nesterov; p ← p − lr·update.
With momentum 0 the update is d and dampening plays no part. Equal to torch.optim.SGD.

When, and what it costs. Convolutional networks with a tuned learning-rate schedule; the yardstick for everything else.
No state without momentum, 4 bytes a parameter with it; 20 bytes of traffic a parameter (12 without momentum).
"""

from ..spec import REQUIRED, Spec, flag, like, real


def plain(p, g, lr, decay):
    p = p - lr * (g + decay * p)
    return p


def heavy_ball(p, g, m, lr, decay, beta, alpha):
    m = beta * m + alpha * (g + decay * p)
    p = p - lr * m
    return p, m


def nesterov(p, g, m, lr, decay, beta, alpha):
    d = g + decay * p
    m = beta * m + alpha * d
    p = p - lr * (d + beta * m)
    return p, m


class SGD(Spec):
    lr: float = real(REQUIRED)
    momentum: float = real(0.0)
    dampening: float = real(0.0, high=1.0)
    nesterov: bool = flag(False)
    weight_decay: float = real(0.0)

    def check(self):
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            raise self.refuse(
                f"nesterov=True needs momentum > 0 and dampening 0, got momentum={self.momentum!r}, dampening={self.dampening!r}"
            )

    @property
    def averages(self):
        return not (isinstance(self.momentum, float) and self.momentum == 0)  # a traced momentum is one

    def structure(self):
        return (self.nesterov, self.averages)

    def slots(self, shape):
        return like(shape, "m") if self.averages else {}

    def counters(self):
        return {"started": 0} if self.averages else {}

    def scalars(self, t, counters):
        alpha = 1 - self.dampening * counters.get("started", 0)  # the first buffer is d itself, undampened
        return {"lr": self.lr, "decay": self.weight_decay, "beta": self.momentum, "alpha": alpha, "started": 1}

    def update(self, E, x):
        return E.map(nesterov if self.nesterov else heavy_ball if self.averages else plain, x)
