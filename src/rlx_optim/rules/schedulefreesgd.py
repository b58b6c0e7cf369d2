"""ScheduleFreeSGD: SGD whose average takes the place of a learning-rate schedule.

Idea. A schedule that ends in time for the last step has to know when that is. Average the iterates instead, and take
gradients between the average and the newest iterate (Defazio et al., arXiv:2405.15682).

Formulas.
    s = lr·min(1, t/warmup_steps)               s = lr without warm-up
    s_max ← max(s_max, s), w = t^r·s_max^weight_lr_power, W ← W + w
    c = w/W                                     0 while W is 0
    d = g + weight_decay·p                      gradients are taken at p, and so is the decay
    z ← z − s·d                                 plain SGD
    x ← (1 − c)·x + c·z                         its average: what to evaluate with
    p ← momentum·x + (1 − momentum)·z           where the next gradient is taken
Kept is lead = x − p alone, from zero: z = p − lead·momentum/(1 − momentum), with the momentum of the step before. So weights
that are loaded after the optimizer was made are not mistaken for a step, and momentum 0 (x is the average of SGD's own
iterates) is no exception; the authors keep z. s_max, W and momentum are kept per tensor, where the authors' groups have one
of each: a tensor that joins later begins its own average.

Conventions.
- torch: does not have it.
- optax: equal to optax.contrib.schedule_free_sgd without warm-up; with it, optax steps with the rate of the step before and
  does not move at first. It has no r.
- the authors' code (schedulefree 1.4.1), pytorch_optimizer: the same.

When, and what it costs. Training whose length is not known, or not to be tuned for: a constant lr, larger than with a
schedule. Evaluate and save the model at x: `opt.eval()` before and `opt.train()` after. Batch norm's statistics have to be
taken anew there. 4 bytes of state a parameter, 20 bytes of traffic a parameter.
"""

from ..ops import maximum, minimum, where
from ..spec import Spec, integer, like, real


def decayed(p, g, decay):
    u = g + decay * p
    return u


def averaging(u, lead, step, pull, keep, grow):
    change = step * u + pull * lead
    lead = keep * lead + grow * u
    return change, lead


def paced(spec, momentum, t, counters):
    """The numbers of `averaging`, and the counters after this step."""
    s = spec.lr * minimum(1.0, t / spec.warmup_steps) if spec.warmup_steps else spec.lr
    top = maximum(counters["lr_max"], s)
    w = t**spec.r * top**spec.weight_lr_power
    total = counters["weight_sum"] + w
    c = where(total > 0, w / maximum(total, 1e-37), 0.0)
    before = counters["momentum"]
    rest, to_z = momentum * (1 - c), before / (1 - before)  # how much of p is the old x; z = p − to_z·lead
    return {
        "step": (1 - rest) * s,
        "pull": (1 - rest) * to_z - rest,
        "keep": (1 - momentum) * (1 - c) * (1 + to_z),
        "grow": (1 - momentum) * (1 - c) * s,
        "weight_sum": total,
        "lr_max": top,
        "momentum": momentum,
    }


class Averaged(Spec):
    """What both Schedule-Free rules are beside their direction."""

    committed = ("step", "pull", "keep", "grow")
    evaluated = "lead"
    counter_ranges = {"weight_sum": real(0.0), "lr_max": real(0.0), "momentum": real(0.0, high=1.0, open_high=True)}
    incompatible = {"cautious=True": "x averages the steps that gradients ask for, masked ones lead elsewhere"}

    def counters(self):
        """weight_sum: W, the sum of all weights.
        lr_max: s_max, the largest step so far.
        momentum: that of the step before.
        """
        return {"weight_sum": 0.0, "lr_max": 0.0, "momentum": 0.0}

    def commit(self, E, x):
        return E.map(averaging, x)


class ScheduleFreeSGD(Averaged):
    """lr: how far z steps.
    momentum: how much of p is the average x; the rest is z.
    weight_decay: how much of p joins the gradient.
    warmup_steps: how many steps lr takes to reach its value.
    r: the power of t in a step's weight in the average.
    weight_lr_power: the power of the largest lr so far in that weight.
    """

    name = "schedulefreesgd"
    summary = "SGD with an average of iterates in place of a schedule"

    lr: float = real(1.0)
    momentum: float = real(0.9, high=1.0, open_high=True)
    weight_decay: float = real(0.0)
    warmup_steps: int = integer(0, 0)
    r: float = real(0.0)
    weight_lr_power: float = real(2.0)

    def slots(self, shape):
        """lead: x − p, which leads from p to the average."""
        return like(shape, lead="average less parameter")

    def scalars(self, t, counters):
        return {"decay": self.weight_decay, **paced(self, self.momentum, t, counters)}

    def update(self, E, x):
        return E.map(decayed, x)
