"""Checks of a torch class: settings, gradients, parameters, groups, learning rates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .subject import NEUTRAL, SHAPES
from .table import Skip, Wrong, check
from .torch_subject import TorchSubject, bitwise, copies, different, moved, numbers, state_of

KEPT = 1e-12


# ---- settings ---------------------------------------------------------------------------------------------------------------
@check("neutral", "foreach, fused, capturable and engine are about speed; the result must be the same", "torch")
def neutral(s: TorchSubject) -> Any:
    want, worst, tried = s.after(), 0.0, []
    for name in (name for name in NEUTRAL if name in s.keywords):
        now = s.given(name)
        for value in s._words(name) if isinstance(now, str) else (True, False):
            try:
                got = s.after(**{name: value})
            except Exception:
                continue  # not on this device
            worst = max(worst, s.close(got, want, f"{name}={value!r} ends elsewhere"))
            tried.append(name)
    if not tried:
        raise Skip("it has none of these keywords, or takes no other value of them here")
    return worst


def all_refused(s: TorchSubject, asked: list[tuple[str, Any]], otherwise: str) -> str:
    """Whether the class refuses each of these settings; otherwise: why there are none."""
    if not asked:
        raise Skip(otherwise)
    taken = []
    for name, value in asked:
        try:
            s.make(s.params(), **{name: value})
        except Exception:
            continue
        taken.append(f"{name}={value}")
    if taken:
        raise Wrong(f"taken without a word: {', '.join(taken)}", f"{len(taken)} of {len(asked)}")
    return f"{len(asked)} refused"


@check("bad-settings", "a negative or NaN learning rate is a slip, and must be refused at once", "torch")
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
        if not isinstance(value, tuple) or (isinstance(s.given(name), tuple) and len(s.given(name)) == 2)
    ]
    return all_refused(s, asked, "it has none of lr, weight_decay, eps, momentum, betas")


@check("infinite-settings", "lr=inf, a decay or an eps of NaN are slips too", "torch", taste=True)
def infinite_settings(s: TorchSubject) -> Any:
    pairs = [
        (n, v)
        for n in ("lr", "weight_decay", "eps")
        if isinstance(s.keywords.get(n) and s.given(n), float)
        for v in (math.inf, math.nan)
    ]
    return all_refused(s, pairs, "it has none of lr, weight_decay, eps as a number")


@check("unknown-keyword", "a keyword that is spelled wrong and swallowed trains another model", "torch")
def unknown_keyword(s: TorchSubject) -> Any:
    try:
        s.make(s.params(), wieght_decay=0.1)
    except Exception:
        return "refused"
    raise Wrong("wieght_decay=0.1 is taken without a word", "taken")


@check("bad-parameters", "no parameters, one tensor, a parameter twice, a non-leaf: refused when the optimizer is made", "torch")
def bad_parameters(s: TorchSubject) -> Any:
    p, q = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    cases: dict[str, Any] = {
        "a bare tensor": p, "an empty list": [], "a parameter twice": [p, p], "a non-leaf": [p * 2], "a number": [1.0],
        "a parameter in two groups": [{"params": [p]}, {"params": [p]}], "a set": [{"params": {p, q}}],
    }  # fmt: skip
    for what, given in cases.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                s.made(given, **s.settings)
        except Exception:
            continue
        raise Wrong(f"{what} is taken without a word", what)
    return f"{len(cases)} refused"


# ---- where tensors lie ------------------------------------------------------------------------------------------------------
@check("groups", "how parameters are grouped must not matter while the settings are the same", "torch")
def groups(s: TorchSubject) -> Any:
    if not s.takes_groups:
        raise Skip("it takes one group alone")
    s.placeless()
    params = s.params()
    s.run(s.make([{"params": [p]} for p in params]), params, 0, 6)
    return s.close(params, s.after(), "one group a parameter ends elsewhere than one group of all")


@check("group-settings", "a group's own learning rate holds for its parameters and no others", "torch")
def group_settings(s: TorchSubject) -> Any:
    lr = s.lr()
    if not s.takes_groups:
        raise Skip("it takes one group alone")
    s.placeless()
    s.independent()
    together, apart = s.params(), s.params()
    half = len(together) // 2
    opt = s.make([{"params": together[:half], "lr": lr}, {"params": together[half:], "lr": 3 * lr}])
    ones = s.make([{"params": apart[:half], "lr": lr}]), s.make([{"params": apart[half:], "lr": 3 * lr}])
    for t in range(6):
        s.grads(together, t)
        s.grads(apart, t)
        s.step(opt, together, t)
        s.step(ones[0], apart[:half], t)
        s.step(ones[1], apart[half:], t)
    return s.close(together, apart, "two groups with different lr end elsewhere than two optimizers")


@check("strides", "a transposed parameter or gradient is the same numbers", "torch")
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
        s.grads(params, t)
        for p in params:
            p.grad = turned(p.grad)
        s.step(opt, params, t)
    return s.close(params, s.after(), "tensors that are not contiguous end elsewhere")


@check("memory-format", "channels_last is the same numbers", "torch")
def memory_format(s: TorchSubject) -> Any:
    if s.shapes is not SHAPES:
        raise Skip("it takes matrices alone")
    shape = {"conv": (4, 3, 5, 5)}
    plain, last = s.params(shapes=shape), s.params(shapes=shape)
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    first, second = s.make(plain), s.make(last)
    for t in range(5):
        s.grads(plain, t)
        last[0].grad = plain[0].grad.clone().to(memory_format=torch.channels_last)
        s.step(first, plain, t)
        s.step(second, last, t)
    return s.close(last, plain, "a channels_last parameter ends elsewhere", s.params(shapes=shape))


@check("default-dtype", "torch.set_default_dtype is about new tensors, not about this one", "torch")
def default_dtype(s: TorchSubject) -> Any:
    want, worst = s.after(), 0.0
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            got = s.after()
        finally:
            torch.set_default_dtype(torch.float32)
        start = s.params()
        worst = max(
            worst,
            s.near(numbers(got), numbers(want), numbers(start), f"under the default {dtype} it ends elsewhere", max(s.bar, 1e-3)),
        )
    return worst


@check("float64", "float64 parameters are stepped in float64", "torch")
def float64(s: TorchSubject) -> Any:
    shift, ends = 1e-11, []
    for extra in (0.0, shift):
        params = s.params(torch.float64)
        for p in params:
            p.data += extra
        with s.refusable("float64"):
            s.run(s.make(params, **s.without_decay()), params, 0, 3)
        if any(p.dtype != torch.float64 for p in params):
            raise Wrong("parameters changed their dtype", str(params[0].dtype))
        ends.append(params)
    kept = max(float(((b - a) - shift).abs().max()) for a, b in zip(*ends, strict=True)) / shift
    if kept > 0.5:
        raise Wrong("a shift of 1e-11 in the parameters is lost: they pass through float32", kept)
    return kept


@check("bfloat16", "bfloat16 parameters move, stay bfloat16 and stay finite", "torch")
def bfloat16(s: TorchSubject) -> Any:
    start = [torch.zeros_like(p) for p in s.params(torch.bfloat16)]  # from where any step shows
    params = copies(start)
    with s.refusable("bfloat16"):
        opt = s.make(params)
    s.run(opt, params, 0, 6)
    for p, q in zip(params, start, strict=True):
        if p.dtype != torch.bfloat16 or not p.isfinite().all() or torch.equal(p, q):
            raise Wrong(f"a bfloat16 parameter became {p.dtype}, is not finite, or did not move", str(p.dtype))
    for p in params:
        p.grad = torch.zeros_like(p)
    fresh = s.params(torch.bfloat16)
    other = s.make(fresh)
    for t in range(3):
        for p in fresh:
            p.grad = torch.zeros_like(p)
        s.step(other, fresh, t)
    if not all(p.isfinite().all() for p in fresh):
        raise Wrong("gradients of zero end in NaN: eps is 0 in bfloat16", "NaN")
    return moved(params, start)


@check(
    "bfloat16-learns",
    "averages kept in bfloat16 stop moving: after large gradients small ones count for nothing",
    "torch",
    quick=False,
)
def bfloat16_learns(s: TorchSubject) -> Any:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
        push = torch.where(torch.arange(16).reshape(4, 4) % 3 == 0, 1.0, -0.5).to(dtype)
        with s.refusable("bfloat16"):
            opt = s.make([p], **s.without_decay())
            for t in range(1020):
                p.grad = push * (100.0 if t < 20 else 1.0)
                if t == 1000:
                    p.data.zero_()  # so that p itself has bits to spare
                s.step(opt, [p], t)
        ends.append(p.detach().float())
    apart = float((ends[1] - ends[0]).abs().max() / ends[0].abs().max().clamp_min(1e-30))
    if not apart <= 0.1:
        raise Wrong(f"twenty small steps after a thousand differ from float32's by {apart:.0%}", apart)
    return apart


@check(
    "bfloat16-accumulates",
    "steps below half a unit of bfloat16 add up only with more bits or random rounding",
    "torch",
    taste=True,
    quick=False,
)
def bfloat16_accumulates(s: TorchSubject) -> Any:
    lr = s.lr()
    p = nn.Parameter(torch.full((4, 4), 512 * max(lr, 1e-6), dtype=torch.bfloat16))
    start = p.detach().clone()
    with s.refusable("bfloat16"):
        opt = s.make([p], **s.without_decay())
        for t in range(100):
            p.grad = torch.ones_like(p)
            s.step(opt, [p], t)
    if torch.equal(p, start):
        raise Wrong("a hundred equal steps left a bfloat16 parameter where it was", 0.0)
    return moved([p], [start])


# ---- gradients --------------------------------------------------------------------------------------------------------------
@check("gradients-unwritten", "others read p.grad after the step: logs, clips, other optimizers", "torch")
def gradients_unwritten(s: TorchSubject) -> Any:
    for settings in ({}, {"maximize": True}) if "maximize" in s.keywords else ({},):
        params = s.params()
        opt = s.make(params, **settings)
        for t in range(4):
            s.grads(params, t)
            before = [p.grad.clone() for p in params]
            s.step(opt, params, t)
            for p, g in zip(params, before, strict=True):
                if p.grad is None or not torch.equal(p.grad, g):
                    raise Wrong(f"step wrote to a gradient {settings or ''}", "None" if p.grad is None else moved([p.grad], [g]))
    return 0.0


@check("gradients-unkept", "zero_grad(set_to_none=False) overwrites gradients: what was kept of them is lost", "torch")
def gradients_unkept(s: TorchSubject) -> Any:
    params = s.params()
    opt = s.make(params)
    for t in range(6):
        s.grads(params, t)
        kept = [p.grad for p in params]
        s.step(opt, params, t)
        for g in kept:
            g.fill_(math.nan)
    return bitwise(params, s.after(), "overwriting old gradients changes later steps: state shares their memory")


@check("none-gradients", "a parameter without gradient is left alone, and its state too", "torch")
def none_gradients(s: TorchSubject) -> Any:
    params = s.params()
    opt = s.make(params)
    s.run(opt, params, 0, 3)
    before, state = copies(params), state_of(opt)
    opt.zero_grad(set_to_none=True)
    opt.step()
    bitwise(params, before, "parameters moved without gradients")
    if where := different(state["state"], opt.state_dict()["state"]):
        raise Wrong(f"state changed without gradients: {where}", where)
    return 0.0


@check("freeze", "a layer that is frozen for a while rests, and the others do not notice", "torch")
def freeze(s: TorchSubject) -> Any:
    params = s.params()
    opt = s.make(params)
    for t in range(6):
        s.grads(params, t)
        frozen = 2 <= t < 4
        if frozen:
            params[0].grad = None
        before = params[0].detach().clone()
        s.step(opt, params, t)
        if frozen and not torch.equal(before, params[0]):
            raise Wrong("a parameter with grad None moved", moved([params[0]], [before]))
        if t == 5 and torch.equal(before, params[0]):
            raise Wrong("a parameter that was frozen stays where it is", 0.0)
    s.independent()
    return s.close(params[1:], s.after()[1:], "others moved elsewhere while one was frozen", s.params()[1:])


@check("join", "add_param_group half-way: the new are stepped and saved, the old do not notice", "torch")
def join(s: TorchSubject) -> Any:
    if not s.takes_groups:
        raise Skip("it takes one group alone")
    params = s.params()
    opt = s.make(params[:2])
    s.run(opt, params[:2], 0, 3)
    opt.add_param_group({"params": params[2:]})
    before = copies(params)
    s.run(opt, params, 3, 6)
    if any(torch.equal(p, q) for p, q in zip(params[2:], before[2:], strict=True)):
        raise Wrong("a parameter that was added later is not stepped", 0.0)
    saved = opt.state_dict()
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    if len(ids) != len(params) or (saved["state"] and len(set(saved["state"]) & set(ids)) not in (0, len(params))):
        raise Wrong("state_dict lacks parameters that were added later", f"{len(saved['state'])} of {len(params)}")
    again = s.make(copies(params[:2]))
    rest = copies(params[2:])
    again.add_param_group({"params": rest})
    with_all = [*again.param_groups[0]["params"], *rest]
    again.load_state_dict(state_of(opt))
    s.run(opt, params, 6, 8)
    s.run(again, with_all, 6, 8)
    bitwise(with_all, params, "resumed after a group was added it goes on elsewhere")
    s.placeless()
    s.independent()
    return s.close(params[:2], s_after(s, 2, 8), "older parameters end elsewhere because others joined", s.params()[:2])


def s_after(s: TorchSubject, count: int, steps: int) -> Any:
    params = s.params()[:count]
    s.run(s.make(params), params, 0, steps)
    return params


@check("leave", "a parameter that is taken out of its group rests, and the others go on", "torch")
def leave(s: TorchSubject) -> Any:
    params = s.params()
    opt = s.make(params)
    s.run(opt, params, 0, 3)
    out = opt.param_groups[0]["params"].pop(0)
    opt.state.pop(out, None)
    place = next(i for i, p in enumerate(params) if p is out)
    before = out.detach().clone()
    s.run(opt, params, 3, 6)
    if not torch.equal(out, before):
        raise Wrong("a parameter that was taken out is still stepped", moved([out], [before]))
    rest = [i for i in range(len(params)) if i != place]
    s.independent()
    want, start = s.after(), s.params()
    return s.close([params[i] for i in rest], [want[i] for i in rest], "the others end elsewhere", [start[i] for i in rest])


# ---- learning rates ---------------------------------------------------------------------------------------------------------
def stopped(s: TorchSubject, steps: int, lr: Any, stop: Callable[[dict[str, Any]], None]) -> float:
    """How far parameters go at a rate of 0 that is theirs after some steps; 0 where a momentum that has the rate in it goes on
    (LARS): then gradients have no part in it."""
    ends = []
    for first in (steps, steps + 10):
        params = s.params()
        opt = s.make(params, **({} if lr is None else {"lr": lr()}), **s.without_decay())
        s.run(opt, params, 0, steps)
        before = copies(params)
        for group in opt.param_groups:
            stop(group)
        s.run(opt, params, first, first + 2)
        far = moved(params, before)
        ends.append(copies(params))
        if far <= KEPT:
            return 0.0
    return far if moved(params, ends[0]) > KEPT else 0.0


@check("lr-read", "param_groups[…]['lr'] is read at every step", "torch")
def lr_read(s: TorchSubject) -> Any:
    s.lr()
    far = stopped(s, 2, None, lambda group: group.update(lr=0.0))
    if far > KEPT:
        raise Wrong(f"parameters moved by {far:.1e} with group['lr'] = 0", far)
    return 0.0


@check("lr-tensor", "a tensor as lr is that number, and is read when it changes", "torch")
def lr_tensor(s: TorchSubject) -> Any:
    lr = s.lr()
    with s.refusable("a tensor as lr"):
        params = s.params()
        opt = s.make(params, lr=torch.tensor(lr), **s.without_decay())
        s.run(opt, params, 0, 6)
    seen = s.close(params, s.after(lr=lr, **s.without_decay()), "lr as a tensor ends elsewhere than lr as a number")
    if isinstance(opt.param_groups[0]["lr"], torch.Tensor):
        far = stopped(s, 6, lambda: torch.tensor(lr), lambda group: group["lr"].fill_(0.0))
        if far > KEPT:
            raise Wrong("an lr that is filled with 0 in place is not read", far)
    return seen


@check("schedulers", "torch's schedulers move the learning rate as they move that of SGD", "torch")
def schedulers(s: TorchSubject) -> Any:
    rates, lr = torch.optim.lr_scheduler, s.lr()
    made: dict[str, Any] = {
        "LambdaLR": lambda o: rates.LambdaLR(o, lambda t: 1 / (1 + t)),
        "StepLR": lambda o: rates.StepLR(o, 2, 0.5),
        "CosineAnnealingLR": lambda o: rates.CosineAnnealingLR(o, 6),
        "OneCycleLR": lambda o: rates.OneCycleLR(o, 2 * lr, total_steps=8, cycle_momentum=False),
        "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
    }
    worst = 0.0
    for name, schedule in made.items():
        plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
        guide, params, byhand = schedule(plain), s.params(), s.params()
        opt, other = s.make(params, lr=lr), s.make(byhand, lr=lr)
        moving = schedule(opt)
        for t in range(6):
            want, got = float(plain.param_groups[0]["lr"]), float(opt.param_groups[0]["lr"])
            if abs(want - got) > 1e-6 * lr:
                raise Wrong(f"{name}: lr is {got:g} where SGD has {want:g}", got)
            for group in other.param_groups:
                group["lr"] = want
            s.run(opt, params, t, t + 1)
            s.run(other, byhand, t, t + 1)
            plain.step()
            for each in (guide, moving):
                each.step(1.0) if name == "ReduceLROnPlateau" else each.step()
        if len(opt.param_groups) == 1:
            worst = max(worst, s.close(params, byhand, f"{name} ends elsewhere than the same rates by hand"))
    return worst


@check("maximize", "maximize is the step on the negated gradient", "torch")
def maximize(s: TorchSubject) -> Any:
    s.needs("maximize")
    up, down = s.params(), s.params()
    first, second = s.make(up, maximize=True), s.make(down, maximize=False)
    if hasattr(first, "update_hessian"):
        raise Skip("the Hessian that it estimates is negated too")
    for t in range(6):
        s.grads(up, t)
        s.grads(down, t)
        for p in down:
            p.grad = -p.grad
        s.step(first, up, t)
        s.step(second, down, t)
    return s.close(up, down, "maximize=True ends elsewhere than negated gradients")


# ---- randomness, memory -----------------------------------------------------------------------------------------------------
@check("rng-free", "a step that draws from torch's generator changes dropout and data order", "torch", taste=True)
def rng_free(s: TorchSubject) -> Any:
    if s.draws:
        raise Wrong("step draws from torch's global generator", "drawn")
    return "not drawn"


@check("memory", "what an optimizer holds must not grow from step to step", "torch")
def memory(s: TorchSubject) -> Any:
    params = s.params()
    opt = s.make(params)
    s.run(opt, params, 0, 12)
    before = held(opt)
    s.run(opt, params, 12, 36)
    grown = held(opt) - before
    if grown > 0:
        raise Wrong(f"24 steps left {grown} bytes behind", grown)
    return 0


def held(thing: Any, seen: set[int] | None = None) -> int:
    """Bytes of the tensors that can be reached from an object, and eight for each entry of a container."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return thing.numel() * thing.element_size()
    if isinstance(thing, dict):
        return sum(8 + held(value, seen) for value in thing.values())
    if isinstance(thing, (list, tuple, set)) or type(thing).__name__ == "deque":
        return sum(8 + held(value, seen) for value in thing)
    return held(vars(thing), seen) if isinstance(thing, torch.optim.Optimizer) else 0
