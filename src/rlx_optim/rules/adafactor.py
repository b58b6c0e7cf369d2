"""Adafactor: Adam's second moment from row and column means alone.

Idea. Keep the second moment of a matrix as one average per row and one per column; their outer product stands for the whole
(Shazeer & Stern, arXiv:1804.04235). The update is clipped by its own rms and scaled by the parameter's.

Formulas.
    b2_t = 1 − t^beta2_decay
    R ← b2_t·R + (1 − b2_t)·row_mean(g² + eps[0])           two or more dimensions, over the last two
    C ← b2_t·C + (1 − b2_t)·column_mean(g² + eps[0])
    V = R·Cᵀ/mean(R)
    V ← b2_t·V + (1 − b2_t)·(g² + eps[0])                   fewer dimensions
    u = g/√V, u ← u/max(1, rms(u)/clip_threshold)
    s = lr                                                  or min(0.01, 1/√t) where lr is None
    s ← s·max(eps[1], rms(p))                               where scale_parameter
    p ← p − s·weight_decay·p − s·u                          rms(p) is taken before
    m ← beta1·m + (1 − beta1)·s·u                           with beta1; m takes the place of s·u, not bias-corrected
1/√V is kept as a product of a row factor and a column factor, so the passes over the matrix need no root and no division, and
R·Cᵀ is never formed (it underflows in float32): a deviation in form, not in value.

Conventions.
- torch: "torch" equals torch.optim.Adafactor and is the default in rlx_optim.torch, with torch's lr 1e-2 and, where eps[0] is
  None, the epsilon of p's type. R, C and V average g² alone, mean(R) is at least eps[0] and V at least eps[0]²; the decay
  uses lr, which is 1e-2 where None; it has no beta1 and always scales:
    s = min(lr, 1/√t)·max(eps[1], rms(p))
- optax: "paper", the default, equals optax.adafactor(min_dim_size_to_factor=1) up to two dimensions, without decay. optax
  does not multiply its decay by the step, factors only from 128 rows and columns on, and of several dimensions the two
  largest.
- the paper: "paper". Hugging Face transformers' Adafactor is that too.
- the Rust crate: "rlx" follows rlx-optim 0.2.6: only rank-2 tensors are factored; R and C are still means though V divides
  by the sum, so u is √rows too large and the clip nearly always acts; a given lr is used unscaled; ΣR is at least eps[0]
  and √V at least √eps[0]; no beta1. There
    V = R·Cᵀ/sum(R), u ← u/max(1, clip_threshold·rms(u))

When, and what it costs. When memory is what is short: about 0 bytes of state a parameter for matrices (4 with beta1).
Three passes: means (g read: 4 bytes), rms (g, p read: 8), update (g, p read, p written: 12): 24 bytes of traffic a parameter
(32).
"""

import math
import operator

from ..modifiers import by_count
from ..ops import maximum, minimum, rsqrt, sqrt
from ..spec import Foreign, Optax, Slot, Spec, Torch, choice, flag, like, real, reals

HUGE = 3e38  # below float32's largest: keeps 0 · (1/√0) at 0 where eps[0] is 0


# the second moment of a matrix ---------------------------------------------------------------------------------------
def squares(g, eps1):
    row_mean = g * g + eps1
    col_mean = g * g + eps1
    return row_mean, col_mean


def average_rows(row, row_mean, beta2, alpha2):
    row = beta2 * row + alpha2 * row_mean
    total = row
    return row, total


def average_columns(col, col_mean, beta2, alpha2):
    col = beta2 * col + alpha2 * col_mean
    col_factor = rsqrt(col)
    return col, col_factor


def row_factors(row, total, least):
    row_factor = sqrt(maximum(total, least) / row)
    return row_factor


def measure(p, g, row_factor, col_factor, top):
    size = p
    pace = g * minimum(row_factor * col_factor, top)
    return size, pace


def direction(g, row_factor, col_factor, top):
    u = g * minimum(row_factor * col_factor, top)
    return u


# the second moment elementwise ---------------------------------------------------------------------------------------
def measure_whole(p, g, v, eps1, beta2, alpha2, top):
    v = beta2 * v + alpha2 * (g * g + eps1)
    size = p
    pace = g * minimum(rsqrt(v), top)
    return v, size, pace


def direction_whole(g, v, top):
    u = g * minimum(rsqrt(v), top)
    return u


# momentum averages what p would move by, and is that itself -----------------------------------------------------------
def glide(m, u, step, beta1, alpha1):
    m = beta1 * m + alpha1 * (step * u)
    u = m
    return u, m


# the step, one number a tensor ---------------------------------------------------------------------------------------
def scaled_step(size, pace, base, unscaled, eps2, clip, weight_decay, fixed_decay):
    pace_clip = maximum(1.0, pace * clip)
    change = base * maximum(unscaled, maximum(eps2, size) * (1 - unscaled))
    shrink = fixed_decay + change * weight_decay
    step = change / pace_clip
    return shrink, step


def in_dtype(group, epsilon):
    """None in eps is torch's word for the epsilon of the dtype; the other conventions, which add eps to squares, take 1e-30."""
    eps = group["eps"]
    if not isinstance(eps, (tuple, list)) or len(eps) != 2 or eps[0] is not None:
        return group
    return {**group, "eps": (epsilon if group["convention"] == "torch" else 1e-30, eps[1])}


class Adafactor(Spec):
    """lr: the step, relative to the rms of p where scale_parameter; None takes min(0.01, 1/√t).
    beta2_decay: the power of t by which new squares join the averages.
    eps: what joins the squares, and the least rms of p that scales the step.
    clip_threshold: the largest rms of the update.
    weight_decay: times the step, the share of p that is taken away.
    beta1: how much of the average of steps is kept; None keeps none.
    scale_parameter: multiply the step by the rms of p.
    convention: the paper's rule, torch's or the Rust crate's.
    """

    name = "adafactor"
    summary = "factored second moment, almost no state"
    torch = Torch(
        "Adafactor",
        {"lr": 1e-2, "eps": (None, 1e-3), "convention": "torch"},
        shared="weight_decay",
        settings={"d": Foreign("clip_threshold", float, float)},
        slots={"v": "variance", "m": "exp_avg"},
        telltale="beta2_decay",
        in_dtype=in_dtype,
        annotations={"eps": "tuple[float | None, float]"},
    )
    optax = Optax(
        settings={
            "decay_rate": Foreign("beta2_decay", operator.neg, operator.neg),
            "eps": Foreign("eps", lambda eps: (eps, 1e-3), operator.itemgetter(0)),
            "clipping_threshold": Foreign("clip_threshold"),
            "momentum": Foreign("beta1"),
            "multiply_by_parameter_scale": Foreign("scale_parameter"),
        },
        state={"FactoredState": {"row": "v_row", "col": "v_col", "v": "v"}, "EmaState": {"m": "ema"}},
    )

    lr: float | None = real(None, optional=True)
    beta2_decay: float = real(-0.8, low=-math.inf, high=0.0)
    eps: tuple[float, float] = reals((1e-30, 1e-3))
    clip_threshold: float = real(1.0, open_low=True, infinite=True)
    weight_decay: float = real(0.0)
    beta1: float | None = real(None, high=1.0, open_high=True, optional=True)
    scale_parameter: bool = flag(True)
    convention: str = choice("paper", "torch", "rlx")

    caution = staticmethod(by_count)  # n/(kept + 1), as the authors' c_adafactor.py
    incompatible = {
        "decay='hyperball'": "its step is clipped by its own rms, and a share of the tensor's already (scale_parameter)"
    }

    def check(self):
        if self.convention != "paper" and self.beta1 is not None:
            raise self.refuse(f"beta1 has no place in convention {self.convention!r}; got beta1={self.beta1!r}")
        if self.convention != "paper" and not self.scale_parameter:
            raise self.refuse(f"scale_parameter=False has no place in convention {self.convention!r}")

    def decays(self):
        return True

    def static_key(self):
        return (self.convention, self.beta1 is None)

    def factored(self, shape):
        return len(shape) == 2 or (len(shape) > 2 and self.convention != "rlx")

    def slots(self, shape):
        """row: R, the average of each row's mean square.
        col: C, the average of each column's mean square.
        v: V, elementwise; for tensors that are not factored.
        m: the average of steps; only with beta1.
        """
        momentum = {} if self.beta1 is None else like(shape, m="average of steps")
        if not self.factored(shape):
            return like(shape, v="second moment and eps") | momentum
        rows = Slot(shape[:-1], drop=(-1,), meaning="row")
        cols = Slot(shape[:-2] + shape[-1:], drop=(-2,), meaning="column")
        return {"row": rows, "col": cols} | momentum

    def scalars(self, t, counters):
        eps1, eps2 = self.eps
        alpha2 = t**self.beta2_decay
        relative = 1 / sqrt(t)
        numbers = {"beta1": self.beta1, "alpha1": None if self.beta1 is None else 1 - self.beta1, "eps2": eps2}
        numbers |= {"beta2": 1 - alpha2, "alpha2": alpha2, "eps1": eps1, "least": 0.0, "top": HUGE}
        numbers |= {"clip": 1 / self.clip_threshold, "weight_decay": self.weight_decay, "fixed_decay": 0.0, "one": 1.0}
        if self.convention == "torch":
            lr = 1e-2 if self.lr is None else self.lr
            numbers |= {"base": minimum(lr, relative), "unscaled": 0.0, "eps1": 0.0, "least": eps1}
            numbers |= {"top": reciprocal(eps1), "weight_decay": 0.0, "fixed_decay": lr * self.weight_decay}
        else:
            scaled = self.lr is None or self.convention == "paper"
            numbers["base"] = minimum(1e-2, relative) if self.lr is None else self.lr
            numbers["unscaled"] = 0.0 if scaled and self.scale_parameter else 1.0
        if self.convention == "rlx":
            numbers |= {"least": eps1, "top": reciprocal(math.sqrt(eps1)), "clip": self.clip_threshold}
        return numbers

    def update(self, E, x):
        if "row" not in x:
            x = E.map(measure_whole, x, size="rms", pace="rms")
            x = E.map(direction_whole, E.each(scaled_step, x))
        else:
            x = E.map(squares, x, row_mean="row_mean", col_mean="column_mean")
            x = E.map(average_rows, x, total="row_sum" if self.convention == "rlx" else "row_mean")
            x = E.map(row_factors, E.map(average_columns, x))
            x = E.map(measure, x, size="rms", pace="rms")
            x = E.map(direction, E.each(scaled_step, x))
        return x if self.beta1 is None else E.map(glide, x).set(step=x.one)


def reciprocal(eps):
    return 1 / eps if eps > 1 / HUGE else HUGE
