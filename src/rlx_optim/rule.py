"""All that the file of an optimizer of your own imports.

    from rlx_optim.rule import Spec, betas, like, real, register, sqrt

    def sign_momentum(g, m, beta, alpha): ...          # gives the direction u, and m

    @register
    class SignMomentum(Spec): ...

A rule is a function of one coordinate in the words of the vocabulary; a Spec has its hyperparameters, state and update. Files in
`rlx_optim/rules/` are written the same way.
"""

from typing import Any

from . import linalg, renamed
from .ops import abs, clamp, exp, log, maximum, minimum, one_minus_power, rsqrt, sign, sqrt, where
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
    "REQUIRED", "Foreign", "Optax", "Otherwise", "Shape", "Slot", "Spec", "Torch", "abs", "betas", "choice", "clamp", "exp",
    "flag", "function", "integer", "like", "linalg", "log", "maximum", "minimum", "one_minus_power", "real", "reals", "register",
    "rsqrt", "sign", "sqrt", "where",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if (new := renamed.WORDS.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    renamed.warn(f"rule.{name}", new)
    return globals()[new]
