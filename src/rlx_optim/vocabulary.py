"""The functions a rule may call.

Here they mean NumPy, so an unbound rule is an ordinary function you can call in a REPL. Every engine runs the same
rule with its own versions of these names (`rlx_optim.engine.bind`).

`less_power` is for the numbers that depend on step counts alone (`Spec.scalars`, update schedules): engines that trace t replace
it, eager engines take it on the host in float64.
"""

import builtins
import math
from typing import Any

import numpy as np

sign = np.sign
maximum = np.maximum
exp = np.exp
abs = builtins.abs


def sqrt(x: Any) -> Any:
    return math.sqrt(x) if type(x) is float else np.sqrt(x)  # ten times faster on the numbers of a step


def where(condition: Any, yes: Any, no: Any) -> Any:
    return (yes if condition else no) if type(condition) is bool else np.where(condition, yes, no)


def minimum(a: Any, b: Any) -> Any:
    return min(a, b) if type(a) is float and type(b) is float else np.minimum(a, b)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """x, but at least low and at most high; NaN stays NaN."""
    return np.minimum(np.maximum(x, low), high)


def rsqrt(x: Any) -> Any:
    return 1 / np.sqrt(x)


def less_power(beta: float, t: float) -> float:
    """1 - beta**t, without cancellation for beta close to 1."""
    return 1.0 if beta == 0 else -math.expm1(t * math.log(beta))


def log(x: Any) -> Any:
    """The natural logarithm; -inf at 0."""
    return (math.log(x) if x > 0 else -math.inf) if isinstance(x, float) else np.log(x)


#: What a rule may call, and how many arguments that takes; and what the scalars of a rule may call beside that.
RULE = {
    "sqrt": 1, "rsqrt": 1, "abs": 1, "sign": 1, "exp": 1, "log": 1, "minimum": 2, "maximum": 2, "clamp": 3, "where": 3,
}  # fmt: skip
SCALARS = (*RULE, "less_power")
