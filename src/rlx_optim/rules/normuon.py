"""NorMuon: Muon whose rows are brought to one length.

Idea. Muon's orthogonalised momentum still has rows of very different length. Divide each by the root of its average square,
and give the whole its length back (Li et al., arXiv:2510.05491).

Formulas.
    m ← momentum·m + (1 − momentum)·g
    u = (1 − momentum)·g + momentum·m           with nesterov
    u = m                                       without
    O = polar(u)                                by Newton–Schulz, as Muon's X
    v ← beta2·v + (1 − beta2)·row_mean(O²)      one number a row, not corrected for bias
    N = O/(√v + 1e-10)
    N ← N·‖O‖/(‖N‖ + 1e-10)
    p ← (1 − lr·weight_decay)·p − lr·√max(1, rows/columns)·N
Tensors of more than two dimensions are viewed as (first, rest), scale included; the authors' code takes the rows and the
lengths of a convolution per kernel (0.38 away). After the first step all rows of N have one length.

Conventions.
- torch, optax: do not have it.
- the authors' code: "authors", the default, with float32 products. pytorch_optimizer: the same.
- microsoft/dion: "dion". Without nesterov unless given, Polar Express coefficients, 1e-8 for both epsilons, the second of which
  is the least ‖N‖, and √(rows/columns) for the scale, which shrinks wide matrices. Its lr is 0.01 and its weight_decay 0.01.
- modded-nanogpt: "speedrun". Polar Express coefficients; of wide matrices the columns are brought to one length; v and ‖N‖
  are at least 1e-10; decay only where N and p do not differ in sign, by lr²·scale·weight_decay, scale being the root in the last
  formula. Its beta2 is 0.9, and its momentum rises from 0.85 to 0.95.

When, and what it costs. The hidden matrices of a network, as Muon. 4 bytes of state a parameter and 4 a row; Muon's products,
and the matrix is read twice more and written once.
"""

import math
from typing import Any

from ..coefficients import SAFETY, SCHEMES, STEPS, steps_of
from ..spec import Otherwise, Slot, Spec, Torch, choice, flag, integer, like, real, triples
from .muon import heavy_ball, nesterov

#: of each convention: whether with nesterov, the coefficients and what joins the norm before them, what joins the root of v and
#: the least v, what joins ‖N‖ and the least of it
CONVENTIONS = {
    "authors": (True, "keller", 1e-7, (1e-10, 0.0), (1e-10, 0.0)),
    "dion": (False, "speedrun", 1e-8 / SAFETY, (1e-8, 0.0), (0.0, 1e-8)),
    "speedrun": (True, "speedrun", 1e-6 / SAFETY, (0.0, 1e-10), (0.0, 1e-10)),
}


class NorMuon(Spec):
    """lr: how far to step; a matrix moves by about lr in every direction.
    weight_decay: times lr, the share of p that is taken away each step.
    momentum: how much of the average of gradients is kept a step.
    beta2: how much of the average of each row's squares is kept a step.
    nesterov: use the momentum that the next step would see; None does as the convention's code.
    ns_steps: how many Newton–Schulz steps; where the coefficients are several, 5 is as many as they are.
    ns_coefficients: a, b and c of all of them, or of each in turn, or the name of such a scheme; None does as the convention's.
    convention: whose scale, coefficients and decay.
    """

    name = "normuon"
    summary = "Muon whose rows are brought to one length"
    torch = Torch(slots={"m": "momentum_buffer", "v": "second_momentum_buffer"})  # as the authors' code has them

    lr: float = real(0.02)
    weight_decay: float = real(0.0)
    momentum: float = real(0.95, high=1.0, open_high=True)
    beta2: float = real(0.95, high=1.0, open_high=True)
    nesterov: bool | None = flag(None, optional=True)
    ns_steps: int = integer(STEPS, 1)
    ns_coefficients: str | tuple[Any, ...] | None = triples(None, *SCHEMES)
    convention: str = choice("authors", "dion", "speedrun")

    matrix = True
    accepts_any_shape = False
    otherwise_default = Otherwise("adamw", {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0})

    def takes(self, shape):
        return None if len(shape) >= 2 else f"{len(shape)} dimensions; NorMuon takes 2 or more"

    def by_columns(self, rows, columns):
        return self.convention == "speedrun" and rows < columns

    def graph_safe(self):
        return not self.cautious and self.decay != "hyperball"

    def slots(self, shape):
        """m: the average of gradients.
        v: the average of each row's mean square, or of each column's.
        """
        rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
        n, what = (columns, "columns") if self.by_columns(rows, columns) else (rows, "rows")
        return like(shape, m="first moment") | {"v": Slot((n,), factor=True, meaning=f"second moment of {what}")}

    def scalars(self, t, counters):
        joins, joins_length = CONVENTIONS[self.convention][3:]
        shrink = self.lr * self.weight_decay
        return {
            "beta": self.momentum,
            "alpha": 1 - self.momentum,
            "beta2": self.beta2,
            "alpha2": 1 - self.beta2,
            "joins": joins[0],
            "least": joins[1],
            "joins_length": joins_length[0],
            "least_length": joins_length[1],
            "shrink": shrink * self.lr if self.convention == "speedrun" else shrink,
            "step": self.lr,
        }

    def steps(self):
        """How many Newton–Schulz steps, and their coefficients."""
        chosen = CONVENTIONS[self.convention][1] if self.ns_coefficients is None else self.ns_coefficients
        return steps_of(chosen, self.ns_steps)

    def work(self, shape):
        rows, columns = sorted((shape[0], math.prod(shape[1:]))) if shape else (1, 1)
        return 2 * self.steps()[0] * (2 * columns + rows) * rows**2

    def update(self, E, x):
        ahead, _, eps = CONVENTIONS[self.convention][:3]
        x = E.map(nesterov if (ahead if self.nesterov is None else self.nesterov) else heavy_ball, x)
        U = x.u.reshape(*x.u.shape[:2], -1)
        rows, columns = U.shape[1:]
        flat = self.by_columns(rows, columns)
        X = E.orthogonalize(U, *self.steps(), eps)
        across, count = (-2, rows) if flat else (-1, columns)
        squares = E.sum_squares(X, across)  # and from here on one number a line: X is read and written once more
        v = x.beta2 * (x.v[:, None, :] if flat else x.v[:, :, None]) + x.alpha2 * squares / count
        gain = 1 / (E.sqrt(E.floor(v, x.least)) + x.joins)
        sums = (each.reshape(each.shape[0], -1).sum(-1) for each in (squares, squares * gain * gain))
        length, new_length = (E.sqrt(each).reshape(-1, 1, 1) for each in sums)  # of X and of what it becomes
        gain = gain * (length / (E.floor(new_length, x.least_length) + x.joins_length))
        scale = math.sqrt(rows / columns if self.convention == "dion" else max(1.0, rows / columns))
        shrink = x.shrink * scale if self.convention == "speedrun" else x.shrink
        u = E.scale(X, gain).reshape(x.p.shape)
        return x.set(u=u, v=v.reshape(v.shape[0], -1), step=x.step * scale, shrink=shrink)

    def way(self):
        """The speedrun's decay is the cautious one."""
        return "cautious" if self.convention == "speedrun" and self.decay == "decoupled" else self.decay
