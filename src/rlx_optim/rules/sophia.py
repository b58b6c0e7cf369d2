"""Sophia: momentum over a diagonal Hessian estimate, clipped.

Idea. Divide by the curvature, estimated now and then, and clip each coordinate so that flat or negative curvature cannot
throw the parameter away (Liu et al., arXiv:2305.14342; this is the paper's Sophia-H).

Formulas.
    m ← b1·m + (1 − b1)·g                       no bias correction
    h ← b2·h + (1 − b2)·ĥ                       where an estimate ĥ of the Hessian's diagonal is given, before the step
    u = m/max(gamma·h, eps)
    p ← (1 − lr·weight_decay)·p − lr·min(max(u, −clip), clip)
The estimate is the caller's: Hutchinson's z⊙Hz for random signs z, every 10 steps or so, or a Gauss–Newton–Bartlett
estimate; the torch and JAX front ends make Hutchinson's themselves. Before the first one h = 0 and the step is the clipped
sign of m.

Conventions.
- torch: does not have it.
- optax: optax.contrib.sophia corrects the bias of m and uses an estimate one step after it was made; here as in the paper.
- the authors' code: their SophiaG is the Gauss–Newton–Bartlett variant: give batch size × g², g taken at labels drawn from
  the model, and gamma is their rho.
- pytorch_optimizer: SophiaH has no gamma (it is 1) and calls clip p; equal at those settings.

When, and what it costs. Language-model pretraining where a Hessian product every ten steps is affordable. 8 bytes of
state a parameter, 24 of traffic a parameter, and the estimate.
"""

import math

from ..ops import clamp, maximum
from ..spec import Foreign, Optax, Spec, betas, like, real


def sophia(g, m, h, beta1, alpha1, gamma, clip, eps):
    m = beta1 * m + alpha1 * g
    u = clamp(m / maximum(gamma * h, eps), -clip, clip)
    return u, m


def observe(h, g, beta2, alpha2):
    h = beta2 * h + alpha2 * g  # g: the estimate
    return h


class Sophia(Spec):
    """lr: times clip, the farthest a coordinate moves a step.
    betas: how much of m is kept a step, and of h an estimate.
    gamma: scales the curvature; the smaller, the more coordinates are clipped.
    clip: the largest ratio of momentum to curvature.
    eps: the least curvature.
    weight_decay: times lr, the share of p that is taken away each step.
    """

    name = "sophia"
    summary = "momentum over a diagonal Hessian estimate, clipped"
    optax = Optax(
        defaults={"eps": 1e-8, "weight_decay": 1e-4},
        settings={"clip_threshold": Foreign("clip")},
        positional=("b1", "b2", "eps"),
        state={"SophiaState": {"m": "mu", "h": "nu"}},
    )

    lr: float = real(1e-3)
    betas: tuple[float, float] = betas(0.965, 0.99)
    gamma: float = real(0.01)
    clip: float = real(1.0, open_low=True, high=math.inf, infinite=True)
    eps: float = real(1e-12, open_low=True)
    weight_decay: float = real(0.1)

    observes = True

    def slots(self, shape):
        """m: the average of gradients.
        h: the average of the estimates.
        """
        return like(shape, m="first moment", h="curvature")

    counter_ranges = {"estimates": real(0)}

    def counters(self):
        """estimates: how many estimates the tensor has had."""
        return {"estimates": 0}  # how many the tensor has had; 0 warns once

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        return {
            "shrink": self.lr * self.weight_decay,
            "step": self.lr,
            "beta1": beta1,
            "alpha1": 1 - beta1,
            "beta2": beta2,
            "alpha2": 1 - beta2,
            "gamma": self.gamma,
            "clip": self.clip,
            "eps": self.eps,
        }

    def advice(self, counters):
        if counters["estimates"]:
            return None
        return (
            "is stepped before any estimate of the Hessian's diagonal, so the step is the clipped sign of the momentum; "
            "call update_hessian every 10 steps or so"
        )

    def update(self, E, x):
        return E.map(sophia, x)

    def observe(self, E, x):
        """The estimate, as x.g, joins h."""
        return E.map(observe, x)
