"""The functions a rule may call.

Here they mean NumPy, so an unbound rule is an ordinary function you can call in a REPL. Every engine runs the same
rule with its own versions of these names (`rlx_optim.engine.bind`). What else calls them (`Spec.scalars`, a matrix `update`) is
plain Python, run as it stands: there a word is that of the library whose number it is given, so that a count may be traced, or
lie on a device.

`one_minus_power` is for the numbers that depend on step counts alone (`Spec.scalars`, update schedules): eager engines compute
it on the host in float64.
"""

import builtins
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: the words of other libraries, by the package that the types of their numbers are in; engines add theirs
LIBRARIES: dict[str, Mapping[str, Callable[..., Any]]] = {}


def _word(name: str, function: Callable[..., Any], *given: Any) -> Any:
    """A word in the library that one of these is a number of; the function, which is NumPy's, where none is."""
    for each in given:
        if words := LIBRARIES.get(type(each).__module__.partition(".")[0]):
            return words[name](*given)
    return function(*given)


def sign(x: Any) -> Any:
    return _word("sign", np.sign, x)


def maximum(a: Any, b: Any) -> Any:
    return _word("maximum", np.maximum, a, b)


def exp(x: Any) -> Any:
    return _word("exp", np.exp, x)


abs = builtins.abs


def sqrt(x: Any) -> Any:
    return math.sqrt(x) if type(x) is float else _word("sqrt", np.sqrt, x)  # ten times faster on the numbers of a step


def where(condition: Any, yes: Any, no: Any) -> Any:
    return (yes if condition else no) if type(condition) is bool else _word("where", np.where, condition, yes, no)


def minimum(a: Any, b: Any) -> Any:
    return min(a, b) if type(a) is float and type(b) is float else _word("minimum", np.minimum, a, b)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """x, but at least low and at most high; NaN stays NaN."""
    return minimum(maximum(x, low), high)


def rsqrt(x: Any) -> Any:
    return _word("rsqrt", _rsqrt, x)


def _rsqrt(x: Any) -> Any:
    return 1 / np.sqrt(x)


def one_minus_power(beta: Any, t: Any) -> Any:
    """1 - beta**t, without cancellation for beta close to 1."""
    on_host = type(beta) is float and type(t) is int
    return _one_minus_power(beta, t) if on_host else _word("one_minus_power", _one_minus_power, beta, t)


def _one_minus_power(beta: float, t: float) -> float:
    return 1.0 if beta == 0 else -math.expm1(t * math.log(beta))


def log(x: Any) -> Any:
    """The natural logarithm; -inf at 0."""
    return (math.log(x) if x > 0 else -math.inf) if isinstance(x, float) else _word("log", np.log, x)


#: What a rule may call, and how many arguments that takes; and what the scalars of a rule may call beside that.
RULE = {
    "sqrt": 1, "rsqrt": 1, "abs": 1, "sign": 1, "exp": 1, "log": 1, "minimum": 2, "maximum": 2, "clamp": 3, "where": 3,
}  # fmt: skip
SCALARS = (*RULE, "one_minus_power")
