"""The vocabulary of rules in Triton's language, and rules bound to it."""

# mypy: ignore-errors

from __future__ import annotations

import os
import types
from typing import Any

import torch
import triton
import triton.language as tl

from ...language import Rule
from ...ops import RULE

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
TYPES |= {torch.int8: tl.int8, torch.uint8: tl.uint8, torch.int16: tl.int16}


if os.environ.get("TRITON_INTERPRET"):  # loops of run-time length end in int(array of one), which NumPy 2.4 refuses
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = _patch_lang_tensor


# wrappers, because the compiler does not take tl's own functions as globals of a rule
@triton.jit
def t_sqrt(x):
    return tl.sqrt(x)


@triton.jit
def t_rsqrt(x):
    return 1 / tl.sqrt(x)


@triton.jit
def t_where(condition, yes, no):
    return tl.where(condition, yes, no)


@triton.jit
def t_sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def t_minimum(a, b):
    return tl.where(a < b, a, tl.where(a != a, a, b))  # not a | of conditions, which may be of different shapes


@triton.jit
def t_maximum(a, b):
    return tl.where(a > b, a, tl.where(a != a, a, b))


@triton.jit
def t_clamp(x, low, high):
    return t_minimum(t_maximum(x, low), high)


@triton.jit
def t_exp(x):
    return tl.exp(x)


@triton.jit
def t_log(x):
    return tl.log(x)


@triton.jit
def t_abs(x):
    return tl.abs(x)


WORDS = {
    "sqrt": t_sqrt, "rsqrt": t_rsqrt, "where": t_where, "sign": t_sign, "minimum": t_minimum, "maximum": t_maximum,
    "clamp": t_clamp, "exp": t_exp, "log": t_log, "abs": t_abs, "tl": tl,
}  # fmt: skip
assert set(WORDS) == {*RULE, "tl"}
_bound: dict[Rule, Any] = {}


def bound(rule: Rule) -> Any:
    """The rule as a Triton function."""
    if rule not in _bound:
        copy = types.FunctionType(rule.__code__, {**rule.__globals__, **WORDS}, rule.__name__)
        copy.__module__, copy.__qualname__ = rule.__module__, f"{rule.__qualname__}@triton"
        _bound[rule] = triton.jit(copy)
    return _bound[rule]
