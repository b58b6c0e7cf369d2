"""Prodigy: AdamW that finds its own step size.

Idea. The best step size of a method like Adam is the distance d from the start to the solution. How well the gradients agree
with the way travelled so far bounds it from below; take that bound for d, and raise it as the run goes on (Mishchenko and
Defazio, arXiv:2306.06101).

Formulas.
    c = √(1 − b2^t)/(1 − b1^t)                  1 without use_bias_correction
    r = d·lr·c
    N ← b3·N + d/d0·r·sum(g·(p_0 − p))          over all tensors; p_0 is p before its first step
    m ← b1·m + d·(1 − b1)·g
    v ← b2·v + d²·(1 − b2)·g²
    s ← b3·s + d/d0·r·g                         d in the place of r with safeguard_warmup
    d̂ = d_coef·N/sum(|s|)                       over all tensors
    d_max ← max(d_max, d̂)
    d ← min(d_max, growth_rate·d)               growth_rate·max(d, d̂) as long as d is d0
    p ← (1 − r·weight_decay)·p − r·m/(√v + d·eps)
b3 is beta3, or √b2. r is taken with the d of the step before. decouple=False adds weight_decay·p to g instead. d, N and d_max
are one for all tensors of the optimizer, whatever their groups; a tensor whose lr is 0 takes no part. Where sum(|s|) is 0
nothing moves.

Conventions.
- torch: does not have it.
- optax: optax.contrib.prodigy always corrects the bias and has no growth_rate; equal at those settings.
- the authors' prodigyopt: equal. It can keep s and p_0 for every slice_p-th coordinate alone; here they are whole. Groups
  whose lr differ are refused there; here each tensor's r has its own lr.
- pytorch_optimizer: equal, but its coupled decay never reaches the averages.

When, and what it costs. Fine-tuning and diffusion models without a search for the learning rate: leave lr at 1 and schedule it
from there. 16 bytes of state a parameter and three numbers a tensor. Two passes, since d is known only when every tensor has been
read: 56 bytes of traffic a parameter.
"""

import math

from ..ops import maximum, minimum, one_minus_power, sqrt, where
from ..spec import Foreign, Optax, Slot, Spec, betas, flag, like, real


def shared(d, d_max, gained, starts):
    d_max = maximum(d, d_max)
    gained = where(starts > 0, -1e37, gained)  # a tensor that joins takes over what the others have
    return d, d_max, gained


def paced(d, gained, lr, c, d0, safe):
    gained = where(gained > -1e37, gained, 0.0)
    delta = d * lr * c
    pull = d / d0 * delta
    push = d / d0 * where(safe > 0, d, delta)
    d_square = d * d
    return gained, delta, pull, push, d_square


def average(p, g, m, v, s, start, starts, decay, d, d_square, pull, push, beta1, alpha1, beta2, alpha2, beta3, takes_part):
    start = where(starts > 0, p, start)
    h = g + decay * p
    gain = pull * h * (start - p)
    m = beta1 * m + d * alpha1 * h
    v = beta2 * v + d_square * alpha2 * h * h
    s = beta3 * s + push * h
    mass = takes_part * where(s < 0, -s, s)
    return m, v, s, start, gain, mass


def estimate(d, d_max, gained, gain, mass, delta, beta3_all, d0, d_coef, growth, decay_rate, eps):
    gained = beta3_all * gained + gain
    known = mass > 0
    estimated = where(known, d_coef * gained / where(known, mass, 1.0), 0.0)
    d_max = maximum(d_max, estimated)
    raised = minimum(d_max, growth * where(d <= d0 * 1.000001, maximum(d, estimated), d))
    d = where(known, raised, d)
    step = where(known, delta, 0.0)
    shrink = step * decay_rate
    floor = d * eps
    return d, d_max, gained, step, shrink, floor


def direction(m, v, floor):
    u = m / (sqrt(v) + floor)
    return u


class Prodigy(Spec):
    """lr: times d, the step size; leave it at 1 and schedule it from there.
    betas: how much of m and of v is kept a step.
    beta3: how much of N and s is kept a step; the root of the second beta where None.
    eps: times d, joins the root, so that a coordinate without gradient does not divide by zero.
    weight_decay: times lr and d, the share of p that is taken away each step; or what of p joins the gradient.
    decouple: let the decay act on p; else it joins the gradient.
    use_bias_correction: make up for averages that start at 0, with smaller first steps.
    safeguard_warmup: leave lr out of s, for a learning rate that is warmed up.
    d0: the first estimate of d. Too small costs a few steps, and all of them where a step of d0 is lost in the rounding of p; too
    large cannot be taken back.
    d_coef: multiplies the estimate of d.
    growth_rate: the most that d grows by a step once it has left d0; None sets no limit.
    """

    name = "prodigy"
    summary = "AdamW that finds its own step size"
    optax = Optax(positional=(), settings={"estim_lr0": Foreign("d0"), "estim_lr_coef": Foreign("d_coef")})

    lr: float = real(1.0)
    betas: tuple[float, float] = betas(0.9, 0.999)
    beta3: float | None = real(None, 0.0, 1.0, open_high=True, optional=True)
    eps: float = real(1e-8)
    weight_decay: float = real(0.0)
    decouple: bool = flag(True)
    use_bias_correction: bool = flag(False)
    safeguard_warmup: bool = flag(False)
    d0: float = real(1e-6, open_low=True)
    d_coef: float = real(1.0, open_low=True)
    growth_rate: float | None = real(None, 1.0, infinite=True, optional=True)

    incompatible = {"decay='hyperball'": "it measures how far to go, and on a ball lr alone says it"}

    def decays(self):
        return self.decouple

    def static_key(self):
        return ()

    def slots(self, shape):
        """m: the average of gradients, each times d.
        v: the average of their squares.
        s: the sum that says how far the gradients alone would have gone.
        start: the parameter before its first step.
        d: the estimate of the distance, the same for all tensors.
        d_max: the largest estimate so far.
        gained: the sum N that the estimate is made of.
        """
        numbers = {
            "d": Slot((), self.d0, drop=None, meaning="distance"),
            "d_max": Slot((), self.d0, drop=None, meaning="largest distance"),
        }
        numbers["gained"] = Slot((), drop=None, meaning="gain")
        return {
            **like(
                shape, m="first moment times d", v="second moment times d", s="sum of gradients times d", start="first parameter"
            ),
            **numbers,
        }

    def scalars(self, t, counters):
        (beta1, beta2), on = self.betas, where(self.lr > 0, 1.0, 0.0)
        beta3 = beta2**0.5 if self.beta3 is None else self.beta3
        return {
            "lr": self.lr,
            "c": sqrt(one_minus_power(beta2, t)) / one_minus_power(beta1, t) if self.use_bias_correction else 1.0,
            "starts": where(t < 2, 1.0, 0.0),
            "takes_part": on,
            "safe": 1.0 if self.safeguard_warmup else 0.0,
            "beta1": where(self.lr > 0, beta1, 1.0),
            "alpha1": on * (1 - beta1),
            "beta2": where(self.lr > 0, beta2, 1.0),
            "alpha2": on * (1 - beta2),
            "beta3": where(self.lr > 0, beta3, 1.0),
            "beta3_all": beta3,
            "decay": 0.0 if self.decouple else self.weight_decay,
            "decay_rate": self.weight_decay if self.decouple else 0.0,
            "d0": self.d0,
            "d_coef": self.d_coef,
            "growth": math.inf if self.growth_rate is None else self.growth_rate,
            "eps": self.eps,
        }

    def update(self, E, x):
        x = E.each(paced, E.each(shared, x, d="all_max", d_max="all_max", gained="all_max"))
        x = E.map(average, x, gain="all_sum", mass="all_sum")
        return E.map(direction, E.each(estimate, x))
