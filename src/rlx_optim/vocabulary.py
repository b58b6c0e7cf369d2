"""The functions a rule may call.

Here they mean NumPy, so an unbound rule is an ordinary function you can call in a REPL. Every engine runs the same
rule with its own versions of these names (`rlx_optim.engine.bind`).

`less_power` and `exp` are for the numbers that depend on step counts alone (`Spec.scalars`, update schedules): engines
that trace t replace them, eager engines take them on the host in float64.
"""

import math
from typing import Any

import numpy as np

sqrt = np.sqrt
where = np.where
sign = np.sign
minimum = np.minimum
maximum = np.maximum
exp = np.exp


def rsqrt(x: Any) -> Any:
    return 1 / np.sqrt(x)


def less_power(beta: float, t: float) -> float:
    """1 - beta**t, without cancellation for beta close to 1."""
    return 1.0 if beta == 0 else -math.expm1(t * math.log(beta))


#: What a rule may call, and what the scalars of a rule may call beside that.
RULE = ("sqrt", "rsqrt", "where", "sign", "minimum", "maximum")
SCALARS = (*RULE, "less_power", "exp")
