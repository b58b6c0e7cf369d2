"""Checks of a torch class: settings, groups, where tensors lie, dtypes."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .subject import NEUTRAL, SHAPES, is_refused
from .table import Skip, check, expect
from .torch_subject import TorchSubject, find_move


# ---- settings ---------------------------------------------------------------------------------------------------------------
@check("foreach, fused, capturable and engine are about speed; the result must be the same", "torch")
def neutral(s: TorchSubject) -> Any:
    want, worst, tried = s.step_params(), 0.0, []
    for name in (name for name in NEUTRAL if name in s.keywords):
        now = s.get_setting(name)
        for value in s.list_words(name) if isinstance(now, str) else (True, False):
            try:
                got = s.step_params(**{name: value})
            except Exception:
                continue  # not on this device
            worst = max(worst, s.expect_close(got, want, f"{name}={value!r} ends elsewhere"))
            tried.append(name)
    if not tried:
        raise Skip("it has none of these keywords, or takes no other value of them here")
    return worst


def expect_refusals(calls: Mapping[str, Callable[[], Any]]) -> str:
    """Make calls that must raise, each by the words for what is given."""
    taken = [what for what, call in calls.items() if not is_refused(call)]
    expect(not taken, f"taken without a word: {', '.join(taken)}", f"{len(taken)} of {len(calls)}")
    return f"{len(calls)} refused"


def expect_settings_refused(s: TorchSubject, asked: Sequence[tuple[str, Any]], otherwise: str) -> str:
    """Make the class with each of these settings, which it must refuse. otherwise: why there are none."""
    if not asked:
        raise Skip(otherwise)
    return expect_refusals({f"{name}={value}": functools.partial(s.make, s.params(), **{name: value}) for name, value in asked})


@check("a negative or NaN learning rate is a slip, and must be refused at once", "torch")
def bad_settings(s: TorchSubject) -> Any:
    nan = math.nan
    bad: dict[str, tuple[Any, ...]] = {
        "lr": (-1.0, nan), "weight_decay": (-0.1,), "eps": (-1e-8,), "momentum": (-0.5,),
        "betas": ((1.5, 0.9), (0.9, -0.1)), "rho": (-0.1,),
    }  # fmt: skip
    asked = [
        (name, value)
        for name, values in bad.items()
        if name in s.keywords
        for value in values
        if not isinstance(value, tuple) or (isinstance(s.get_setting(name), tuple) and len(s.get_setting(name)) == 2)
    ]
    return expect_settings_refused(s, asked, "it has none of lr, weight_decay, eps, momentum, betas")


@check("lr=inf, a decay or an eps of NaN are slips too", "torch", taste=True)
def infinite_settings(s: TorchSubject) -> Any:
    pairs = [
        (n, v)
        for n in ("lr", "weight_decay", "eps")
        if isinstance(s.keywords.get(n) and s.get_setting(n), float)
        for v in (math.inf, math.nan)
    ]
    return expect_settings_refused(s, pairs, "it has none of lr, weight_decay, eps as a number")


@check("a keyword that is spelled wrong and swallowed trains another model", "torch")
def unknown_keyword(s: TorchSubject) -> Any:
    return expect_refusals({"wieght_decay=0.1": lambda: s.make(s.params(), wieght_decay=0.1)})


@check("no parameters, one tensor, a parameter twice, a non-leaf: refused when the optimizer is made", "torch")
def bad_parameters(s: TorchSubject) -> Any:
    p, q = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    cases: dict[str, Any] = {
        "a bare tensor": p, "an empty list": [], "a parameter twice": [p, p], "a non-leaf": [p * 2], "a number": [1.0],
        "a parameter in two groups": [{"params": [p]}, {"params": [p]}], "a set": [{"params": {p, q}}],
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return expect_refusals({what: functools.partial(s.factory, given, **s.settings) for what, given in cases.items()})


# ---- where tensors lie ------------------------------------------------------------------------------------------------------
@check("how parameters are grouped must not matter while the settings are the same", "torch")
def groups(s: TorchSubject) -> Any:
    if not s.takes_groups:
        raise Skip("it takes one group alone")
    s.refuse_random()
    params = s.params()
    s.run(s.make([{"params": [p]} for p in params]), params, 0, 6)
    return s.expect_close(params, s.step_params(), "one group a parameter ends elsewhere than one group of all")


@check("a group's own learning rate holds for its parameters and no others", "torch")
def group_settings(s: TorchSubject) -> Any:
    lr = s.lr()
    if not s.takes_groups:
        raise Skip("it takes one group alone")
    s.refuse_random()
    s.refuse_entangled()
    together, apart = s.params(), s.params()
    half = len(together) // 2
    opt = s.make([{"params": together[:half], "lr": lr}, {"params": together[half:], "lr": 3 * lr}])
    ones = s.make([{"params": apart[:half], "lr": lr}]), s.make([{"params": apart[half:], "lr": 3 * lr}])
    for t in range(6):
        s.set_grads(together, t)
        s.set_grads(apart, t)
        s.step(opt, together, t)
        s.step(ones[0], apart[:half], t)
        s.step(ones[1], apart[half:], t)
    return s.expect_close(together, apart, "two groups with different lr end elsewhere than two optimizers")


@check("a transposed parameter or gradient is the same numbers", "torch")
def strides(s: TorchSubject) -> Any:
    def turned(tensor: Any) -> torch.Tensor:
        return (
            tensor.detach().mT.contiguous().mT
            if tensor.ndim >= 2
            else torch.stack((tensor.detach(), tensor.detach()), -1)[..., 0]
        )

    params = [nn.Parameter(turned(p)) for p in s.params()]
    opt = s.make(params)
    for t in range(6):
        s.set_grads(params, t)
        for p in params:
            p.grad = turned(p.grad)
        s.step(opt, params, t)
    return s.expect_close(params, s.step_params(), "tensors that are not contiguous end elsewhere")


@check("channels_last is the same numbers", "torch")
def memory_format(s: TorchSubject) -> Any:
    if s.shapes is not SHAPES:
        raise Skip("it takes matrices alone")
    shape = {"conv": (4, 3, 5, 5)}
    plain, last = s.params(shapes=shape), s.params(shapes=shape)
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    first, second = s.make(plain), s.make(last)
    for t in range(5):
        s.set_grads(plain, t)
        last[0].grad = plain[0].grad.clone().to(memory_format=torch.channels_last)
        s.step(first, plain, t)
        s.step(second, last, t)
    return s.expect_close(last, plain, "a channels_last parameter ends elsewhere", s.params(shapes=shape))


@check("torch.set_default_dtype is about new tensors, not about this one", "torch")
def default_dtype(s: TorchSubject) -> Any:
    want, worst = s.step_params(), 0.0
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            got = s.step_params()
        finally:
            torch.set_default_dtype(torch.float32)
        worst = max(worst, s.expect_close(got, want, f"under the default {dtype} it ends elsewhere", bar=1e-3))
    return worst


@check("steps below half a unit of bfloat16 add up only with more bits or random rounding", "torch", taste=True, quick=False)
def bfloat16_accumulates(s: TorchSubject) -> Any:
    lr = s.lr()
    p = nn.Parameter(torch.full((4, 4), 512 * max(lr, 1e-6), dtype=torch.bfloat16))
    start = p.detach().clone()
    with s.allow_refusal("bfloat16"):
        opt = s.make([p], **s.without_decay())
        for t in range(100):
            p.grad = torch.ones_like(p)
            s.step(opt, [p], t)
    expect(not torch.equal(p, start), "a hundred equal steps left a bfloat16 parameter where it was", 0.0)
    return find_move([p], [start])
