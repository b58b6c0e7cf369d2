"""All that the file of an optimizer of your own imports.

    from rlx_optim.rule import Spec, betas, like, real, register, sqrt

    def sign_momentum(g, m, beta, alpha): ...          # gives the direction u, and m

    @register
    class SignMomentum(Spec): ...

A rule is a function of one coordinate in the words of the vocabulary; a Spec has its hyperparameters, state and update. Files in
`rlx_optim/rules/` are written the same way.
"""

from . import linalg
from .ops import abs, clamp, exp, less_power, log, maximum, minimum, rsqrt, sign, sqrt, where
from .registry import register
from .spec import (
    REQUIRED,
    Foreign,
    Optax,
    Otherwise,
    Shape,
    Slot,
    Spec,
    Torch,
    betas,
    choice,
    flag,
    function,
    integer,
    like,
    real,
    reals,
)

__all__ = [
    "REQUIRED",
    "Foreign",
    "Optax",
    "Otherwise",
    "Shape",
    "Slot",
    "Spec",
    "Torch",
    "abs",
    "betas",
    "choice",
    "clamp",
    "exp",
    "flag",
    "function",
    "integer",
    "less_power",
    "like",
    "linalg",
    "log",
    "maximum",
    "minimum",
    "real",
    "reals",
    "register",
    "rsqrt",
    "sign",
    "sqrt",
    "where",
]
