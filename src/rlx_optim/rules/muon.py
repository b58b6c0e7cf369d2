"""Muon: momentum, orthogonalised.

Idea. The momentum of a weight matrix is dominated by few directions; replace its singular values by about 1, so that every
direction is learned at one pace (Jordan et al., 2024). The singular values are pushed towards 1 by a few Newton–Schulz
steps, which are matrix products alone.

Formulas.
    m ← momentum·m + (1 − momentum)·g
    u = (1 − momentum)·g + momentum·m           with nesterov
    u = m                                       without
    X = u/(‖u‖ + eps)                           transposed so that rows ≤ columns
    A = X·Xᵀ, X ← a·X + (b·A + c·A²)·X          ns_steps times; a, b, c are ns_coefficients, of all or of each
    scale = √max(1, rows/columns)               "keller"
    scale = 0.2·√max(rows, columns)             "moonlight", so that AdamW's lr and decay carry over
    scale = √max(rows, columns)                 "rlx"
    p ← (1 − lr·weight_decay)·p − lr·scale·X
Tensors of more than two dimensions are viewed as (first, rest), scale included. Float32 on the CPU; engines with
half-precision matrix units use them and say so.

Conventions.
- torch: "keller" is torch.optim.Muon with adjust_lr_fn="original" and "moonlight" with "match_rms_adamw", but for its
  bfloat16 products (3 % off). Its lr is 1e-3 and its weight_decay 0.1 unless given; it takes matrices only and has no
  otherwise.
- optax: without nesterov, optax.contrib.muon(consistent_rms=0.2) is "moonlight". Without that it is "keller" with columns/rows,
  since its matrices are (in, out); equal with MuonDimensionNumbers(1, 0), or square. Its Nesterov form corrects m and g for
  bias by different factors. It sends tensors of three dimensions and more to Adam, and embeddings and heads to Muon.
- the author's code: "keller", the default, with float32 products.
- cautious=True is the authors' c_muon.py, which masks u before X is made of it, by the sign of m·g; pytorch_optimizer masks X.
- the Rust crate: "rlx". Every tensor whose rank is not 2 takes p ← (1 − lr·weight_decay)·p − lr·u, and
    m ← momentum·m + g, u = g + momentum·m

When, and what it costs. The hidden matrices of a network; embeddings, heads, norms and biases go to `otherwise`. 4 bytes of
state a parameter; per step 2·ns_steps·(2·columns + rows)·rows² operations for rows ≤ columns.
"""

import math
from typing import Any

from ..coefficients import KELLER, SCHEMES, STEPS, steps_of
from ..modifiers import by_share
from ..ops import sign, where
from ..spec import Foreign, Optax, Otherwise, Spec, Torch, choice, flag, integer, like, real, triples


def nesterov(g, m, beta, alpha):
    m = beta * m + alpha * g
    u = alpha * g + beta * m
    return u, m


def heavy_ball(g, m, beta, alpha):
    m = beta * m + alpha * g
    u = m
    return u, m


# cautious: where the momentum agrees with the gradient, whichever of the two forms it has above
def agreement(g, m):
    kept_count = where(sign(g) * m > 0, 1.0, 0.0)
    lost_count = where(sign(g) * m > 0, 0.0, 1.0)
    return kept_count, lost_count


def masking(g, m, u, keep_gain):
    u = u * where(sign(g) * m > 0, keep_gain, 0.0)
    return u


SCALES = {
    "keller": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "moonlight": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "rlx": lambda rows, columns: math.sqrt(max(rows, columns)),
}


class Muon(Spec):
    """lr: how far to step; a matrix moves by about lr in every direction.
    weight_decay: times lr, the share of p that is taken away each step.
    momentum: how much of the average is kept a step.
    nesterov: use the momentum that the next step would see.
    ns_coefficients: a, b and c of all Newton–Schulz steps, or of each in turn, or the name of such a scheme.
    eps: joins the norm, so that a gradient of zero gives a step of zero.
    ns_steps: how many Newton–Schulz steps; where ns_coefficients are several, 5 is as many as they are.
    convention: how the step is scaled by the matrix's shape.
    """

    name = "muon"
    summary = "orthogonalised momentum for hidden matrices"
    torch = Torch(
        "Muon",
        shared="ns_steps",
        settings={
            "adjust_lr_fn": Foreign(
                "convention",
                {"match_rms_adamw": "moonlight", "original": "keller", None: "keller"}.get,
                {"moonlight": "match_rms_adamw", "keller": "original"}.get,
            )
        },
        slots={"m": "momentum_buffer"},
        telltale="ns_steps",
        counts=False,
    )
    optax = Optax(
        settings={"beta": Foreign("momentum"), "ns_coeffs": Foreign("ns_coefficients")}, state={"MuonState": {"m": "mu"}}
    )

    lr: float = real(0.02)
    weight_decay: float = real(0.0)
    momentum: float = real(0.95, high=1.0, open_high=True)
    nesterov: bool = flag(True)
    ns_coefficients: str | tuple[Any, ...] = triples(KELLER, *SCHEMES)
    eps: float = real(1e-7)
    ns_steps: int = integer(STEPS, 1)
    convention: str = choice("keller", "moonlight", "rlx")

    matrix = True
    accepts_any_shape = False
    caution = None  # as the authors' c_muon.py: before Newton–Schulz, and by m though u is Nesterov's
    otherwise_default = Otherwise("adamw", {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0})

    def mixed_shapes(self):
        return self.convention != "rlx" and not self.cautious and self.decay != "hyperball"  # those two measure

    def graph_safe(self):
        return not self.cautious and self.decay != "hyperball"

    def takes(self, shape):
        return None if len(shape) >= 2 or self.convention == "rlx" else f"{len(shape)} dimensions; Muon takes 2 or more"

    def slots(self, shape):
        """m: the average of gradients."""
        return like(shape, m="first moment")

    def momentum_gain(self):
        return 1 / (1 - self.momentum) if self.convention == "rlx" else 1.0

    def scalars(self, t, counters):
        alpha = 1.0 if self.convention == "rlx" else 1 - self.momentum
        shrink = self.lr * self.weight_decay
        return {"beta": self.momentum, "alpha": alpha, "eps": self.eps, "shrink": shrink, "step": self.lr}

    def work(self, shape):
        rows, columns = sorted((shape[0], math.prod(shape[1:]))) if shape else (1, 1)
        return 2 * steps_of(self.ns_coefficients, self.ns_steps)[0] * (2 * columns + rows) * rows**2

    def update(self, E, x):
        x = E.map(nesterov if self.nesterov else heavy_ball, x)
        if self.cautious:
            x = E.map(masking, E.each(by_share, E.map(agreement, x, kept_count="sum", lost_count="sum")))
        if self.convention == "rlx" and x.u.ndim != 3:
            return x
        X = E.orthogonalize(x.u, *steps_of(self.ns_coefficients, self.ns_steps), x.eps)
        return x.set(u=X, step=x.step * E.by_shape(SCALES[self.convention], x.u))
