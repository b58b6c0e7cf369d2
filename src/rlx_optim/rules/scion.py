"""Scion: step to where a norm ball of each layer points.

Idea. Give every layer the norm that fits what it does, and step by the point of that norm's ball where the averaged gradient
is largest: a spectral norm for hidden matrices, one of signs for outputs. Learning rates then carry over between widths
(Pethick et al., arXiv:2502.07529).

Formulas.
    m ← (1 − momentum)·m + momentum·g           momentum 1 keeps none: m = g
    L = polar(m)·√(rows/columns)                spectral, by Newton–Schulz; not normalized √rows; max_scale: at least 1
    L = polar(m)·√(rows/columns)/k²             spectralconv, as (first, rest); rows, columns, k: its first three sides
    L = sign(m)/columns                         sign; not normalized sign(m)
    L = m/(column_norm(m)/√rows + 1e-8)         colnorm; normalized: the norm times columns
    L = m/(row_norm(m)·√columns + 1e-8)         rownorm; not normalized: without the root
    L = m/(rms(m) + 1e-8)                       biasrms
    p ← (1 − lr·weight_decay)·p − lr·scale·L    stays in the ball of radius scale/weight_decay
    p ← p − lr·scale·L                          unconstrained
k² is k where the kernel has one dimension, and so on. "auto" is spectral for matrices, biasrms for vectors and numbers,
spectralconv for three dimensions and more; a tensor that the norm asked for does not fit takes the one that auto would. The
authors' code stops there.

Conventions.
- torch, optax: do not have it.
- the authors' code: the same, with float32 products. Its momentum is 1 − the usual one, and so it is here: 0.1 is what they
  recommend. transpose is for embeddings, whose rows are what others' columns are.
- pytorch_optimizer: the same; its momentum is 0.1 and it is unconstrained unless told, which is where its weight_decay
  counts; of kernels that are no squares it divides by both sides. Emerging-Optimizers: the same, for matrices alone.

When, and what it costs. Where learning rates are to be found on small models. Norms by group, or by the name of the layer:
`otherwise=Scion(norm="sign", scale=3000.0)` takes embeddings and output heads. The authors' GPT: scale 50 for hidden matrices,
"sign" with scale 3000 for the tied head, lr 2⁻¹². 4 bytes of state a parameter, none with momentum 1; Muon's products.
"""

import math
from typing import Any

from ..coefficients import KELLER, SCHEMES, STEPS, steps_of
from ..ops import sign
from ..spec import Spec, Torch, choice, flag, integer, like, real, triples

EPS = 1e-7  # joins the norm that Newton–Schulz begins with


def average(g, m, beta, alpha):
    m = beta * m + alpha * g
    u = m
    return u, m


def newest(g):
    u = g
    return u


def signed(u):
    u = sign(u)
    return u


def size(u):
    size = u
    return size


def divided(u, size, times):
    u = u / (size * times + 1e-8)
    return u


def spectral(spec, E, x):
    shape = x.u.shape[1:]
    ratio = shape[0] / shape[1] if spec.chosen(True) else shape[0]
    factor = math.sqrt(max(1.0, ratio) if spec.max_scale else ratio) / math.prod(shape[2:3]) ** (len(shape) - 2)
    X = E.orthogonalize(x.u, *spec.steps(), EPS)
    return x.set(u=X, step=x.step * factor)


def signs(spec, E, x):
    return E.map(signed, x.set(step=x.step / x.u.shape[2] if spec.chosen(True) else x.step))


def columns(spec, E, x):
    rows, columns = x.u.shape[-2:][:: -1 if spec.transpose else 1]
    times = (columns if spec.chosen(False) else 1) / math.sqrt(rows)
    return E.map(divided, E.map(size, x, size="row_norm" if spec.transpose else "column_norm").set(times=times))


def rows(spec, E, x):
    columns = x.u.shape[-2 if spec.transpose else -1]
    times = math.sqrt(columns) if spec.chosen(True) else 1.0
    return E.map(divided, E.map(size, x, size="column_norm" if spec.transpose else "row_norm").set(times=times))


def whole(spec, E, x):
    return E.map(divided, E.map(size, x, size="rms").set(times=1.0))


#: the dimensions that a norm is for, and its lmo
NORMS = {
    "spectral": ((2,), spectral),
    "sign": ((2,), signs),
    "colnorm": ((2,), columns),
    "rownorm": ((2,), rows),
    "biasrms": ((0, 1), whole),
    "spectralconv": ((), spectral),
}


class Scion(Spec):
    """lr: how far to step.
    momentum: how much of a new gradient joins the average; 1 keeps none.
    norm: of matrices, or of whatever tensors it fits; others take that of "auto".
    scale: the radius of the ball.
    weight_decay: times lr, the share of p that is taken away each step; with 1 the radius of the ball is scale.
    unconstrained: no ball: nothing is taken away, whatever weight_decay is.
    normalized: whether the norm is divided by the matrix's sides; None: all are but colnorm.
    max_scale: of spectral norms, never step by less than 1.
    transpose: of rownorm and colnorm, take the matrix transposed.
    ns_steps: how many Newton–Schulz steps; where ns_coefficients are several, 5 is as many as they are.
    ns_coefficients: a, b and c of all of them, or of each in turn, or the name of such a scheme.
    """

    name = "scion"
    summary = "steps of one norm ball a layer: spectral for hidden matrices, signs for outputs"
    torch = Torch(slots={"m": "momentum_buffer"})

    lr: float = real(1e-3, high=1.0)
    momentum: float = real(1.0, high=1.0, open_low=True)
    norm: str = choice("auto", *NORMS)
    scale: float = real(1.0)
    weight_decay: float = real(1.0)  # the authors' code has 1, and no name for it
    unconstrained: bool = flag(False)
    normalized: bool | None = flag(None, optional=True)
    max_scale: bool = flag(False)
    transpose: bool = flag(False)
    ns_steps: int = integer(STEPS, 1)
    ns_coefficients: str | tuple[Any, ...] = triples(KELLER, *SCHEMES)

    matrix = True

    @property
    def averages(self):
        return not (isinstance(self.momentum, float) and self.momentum == 1)  # a traced momentum does

    def chosen(self, usual):
        return usual if self.normalized is None else self.normalized

    def static_key(self):
        return (*super().static_key(), self.averages)

    def graph_safe(self):
        return not self.cautious and self.decay != "hyperball"

    def slots(self, shape):
        """m: the average of gradients; only with momentum below 1."""
        return like(shape, m="first moment") if self.averages else {}

    def scalars(self, t, counters):
        shrink = 0.0 if self.unconstrained else self.lr * self.weight_decay
        return {"beta": 1 - self.momentum, "alpha": self.momentum, "step": self.lr * self.scale, "shrink": shrink}

    def steps(self):
        """How many Newton–Schulz steps, and their coefficients."""
        return steps_of(self.ns_coefficients, self.ns_steps)

    def work(self, shape):
        rows, columns = sorted((shape[0], math.prod(shape[1:]))) if len(shape) > 1 else (1, math.prod(shape))
        return 2 * self.steps()[0] * (2 * columns + rows) * rows**2

    def update(self, E, x):
        x = E.map(average if "m" in x else newest, x)
        ndim = x.u.ndim - 1
        fits, lmo = NORMS.get(self.norm, ((), spectral))
        usual = next((each for ranks, each in NORMS.values() if ndim in ranks), spectral)  # the first that fits
        return (lmo if ndim in fits else usual)(self, E, x)
