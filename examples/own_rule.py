"""An optimizer of your own in one file: SignSGD with momentum, checked on every
engine here, then used in NumPy and torch.

python examples/own_rule.py
"""

import numpy as np

import rlx_optim
from rlx_optim.rule import Spec, like, real, register, sign


def signum(g, m, beta, alpha):
    m = beta * m + alpha * g
    u = sign(m)
    return u, m


@register
class Signum(Spec):
    """lr: how far each coordinate moves a step.
    momentum: how much of the average of gradients is kept a step.
    weight_decay: times lr, the share of p that is taken away each step.
    """

    summary = "sign of the momentum"

    lr: float = real(1e-3)
    momentum: float = real(0.9, high=1.0, open_high=True)
    weight_decay: float = real(0.0)

    def slots(self, shape):
        """m: the average of gradients."""
        return like(shape, m="first moment")

    def scalars(self, t, counters):
        beta = self.momentum
        return {
            "step": self.lr,
            "shrink": self.lr * self.weight_decay,
            "beta": beta,
            "alpha": 1 - beta,
        }

    def update(self, E, x):
        return E.map(signum, x)


report = rlx_optim.check_rule(Signum)
print(report)
assert report.ok

params = {"w": np.zeros((4, 3), np.float32)}
rlx_optim.Signum(lr=0.1).step_all(params, {"w": np.full((4, 3), -2.0, np.float32)})
assert np.all(params["w"] == np.float32(0.1))

try:
    import torch

    import rlx_optim.torch
except ModuleNotFoundError:
    print("no torch here")
else:
    model = torch.nn.Linear(3, 1)
    opt = rlx_optim.torch.Signum(model, lr=0.01)
    model(torch.ones(2, 3)).sum().backward()
    opt.step()
    print(opt.engine_report())
