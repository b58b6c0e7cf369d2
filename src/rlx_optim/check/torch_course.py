"""Checks of a torch class: gradients, parameters that come and go, learning rates, memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .table import Skip, Wrong, check, expect
from .torch_subject import TorchSubject, copy_params, expect_bitwise, find_diff, find_move, state_of

KEPT = 1e-12


# ---- gradients --------------------------------------------------------------------------------------------------------------
@check("others read p.grad after the step: logs, clips, other optimizers", "torch")
def gradients_unwritten(s: TorchSubject) -> Any:
    for settings in [dict[str, Any](), {"maximize": True}][: 1 + ("maximize" in s.keywords)]:
        params, opt = s.begin(0, **settings)
        for t in range(4):
            s.set_grads(params, t)
            before = [p.grad.clone() for p in params]
            s.step(opt, params, t)
            for p, g in zip(params, before, strict=True):
                if p.grad is None or not torch.equal(p.grad, g):
                    seen = "None" if p.grad is None else find_move([p.grad], [g])
                    raise Wrong(f"step wrote to a gradient {settings or ''}", seen)
    return 0.0


@check("zero_grad(set_to_none=False) overwrites gradients: what was kept of them is lost", "torch")
def gradients_unkept(s: TorchSubject) -> Any:
    params, opt = s.begin()
    for t in range(6):
        s.set_grads(params, t)
        kept = [p.grad for p in params]
        s.step(opt, params, t)
        for g in kept:
            g.fill_(math.nan)
    return expect_bitwise(params, s.step_params(), "overwriting old gradients changes later steps: state shares their memory")


@check("a parameter without gradient is left alone, and its state too", "torch")
def none_gradients(s: TorchSubject) -> Any:
    params, opt = s.begin(3)
    before, state = copy_params(params), state_of(opt)
    opt.zero_grad(set_to_none=True)
    opt.step()
    expect_bitwise(params, before, "parameters moved without gradients")
    if where := find_diff(state["state"], opt.state_dict()["state"]):
        raise Wrong(f"state changed without gradients: {where}", where)
    return 0.0


@check("a layer that is frozen for a while rests, and the others do not notice", "torch")
def freeze(s: TorchSubject) -> Any:
    params, opt = s.begin()
    for t in range(6):
        s.set_grads(params, t)
        frozen = 2 <= t < 4
        if frozen:
            params[0].grad = None
        before = params[0].detach().clone()
        s.step(opt, params, t)
        if frozen and not torch.equal(before, params[0]):
            raise Wrong("a parameter with grad None moved", find_move([params[0]], [before]))
        if t == 5 and torch.equal(before, params[0]):
            raise Wrong("a parameter that was frozen stays where it is", 0.0)
    s.refuse_entangled()
    return s.expect_close(params[1:], s.step_params()[1:], "others moved elsewhere while one was frozen", s.params()[1:])


@check("add_param_group half-way: the new are stepped and saved, the old do not notice", "torch")
def join(s: TorchSubject) -> Any:
    if not s.takes_groups:
        raise Skip("it takes one group alone")
    params = s.params()
    opt = s.make(params[:2])
    s.run(opt, params[:2], 0, 3)
    opt.add_param_group({"params": params[2:]})
    before = copy_params(params)
    s.run(opt, params, 3, 6)
    if any(torch.equal(p, q) for p, q in zip(params[2:], before[2:], strict=True)):
        raise Wrong("a parameter that was added later is not stepped", 0.0)
    saved = opt.state_dict()
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    if len(ids) != len(params) or (saved["state"] and len(set(saved["state"]) & set(ids)) not in (0, len(params))):
        raise Wrong("state_dict lacks parameters that were added later", f"{len(saved['state'])} of {len(params)}")
    again = s.make(copy_params(params[:2]))
    rest = copy_params(params[2:])
    again.add_param_group({"params": rest})
    with_all = [*again.param_groups[0]["params"], *rest]
    again.load_state_dict(state_of(opt))
    s.run(opt, params, 6, 8)
    s.run(again, with_all, 6, 8)
    expect_bitwise(with_all, params, "resumed after a group was added it goes on elsewhere")
    s.refuse_random()
    s.refuse_entangled()
    alone = s.params()[:2]
    s.run(s.make(alone), alone, 0, 8)
    return s.expect_close(params[:2], alone, "older parameters end elsewhere because others joined", s.params()[:2])


@check("a parameter that is taken out of its group rests, and the others go on", "torch")
def leave(s: TorchSubject) -> Any:
    params, opt = s.begin(3)
    out = opt.param_groups[0]["params"].pop(0)
    opt.state.pop(out, None)
    place = next(i for i, p in enumerate(params) if p is out)
    before = out.detach().clone()
    s.run(opt, params, 3, 6)
    expect(torch.equal(out, before), "a parameter that was taken out is still stepped", find_move([out], [before]))
    rest = [i for i in range(len(params)) if i != place]
    s.refuse_entangled()
    want, start = s.step_params(), s.params()
    return s.expect_close(
        [params[i] for i in rest], [want[i] for i in rest], "the others end elsewhere", [start[i] for i in rest]
    )


# ---- learning rates ---------------------------------------------------------------------------------------------------------
def measure_stopped(s: TorchSubject, steps: int, lr: Any, stop: Callable[[dict[str, Any]], None]) -> float:
    """How far parameters go at a rate of 0 that is theirs after some steps; 0 where a momentum that has the rate in it goes on
    (LARS): then gradients have no part in it."""
    ends = []
    for first in (steps, steps + 10):
        params, opt = s.begin(0, **({} if lr is None else {"lr": lr()}), **s.without_decay())
        s.run(opt, params, 0, steps)
        before = copy_params(params)
        for group in opt.param_groups:
            stop(group)
        s.run(opt, params, first, first + 2)
        far = find_move(params, before)
        ends.append(copy_params(params))
        if far <= KEPT:
            return 0.0
    return far if find_move(params, ends[0]) > KEPT else 0.0


@check("param_groups[…]['lr'] is read at every step", "torch")
def lr_read(s: TorchSubject) -> Any:
    s.lr()
    far = measure_stopped(s, 2, None, lambda group: group.update(lr=0.0))
    expect(not far > KEPT, f"parameters moved by {far:.1e} with group['lr'] = 0", far)
    return 0.0


@check("a tensor as lr is that number, and is read when it changes", "torch")
def lr_tensor(s: TorchSubject) -> Any:
    lr = s.lr()
    with s.allow_refusal("a tensor as lr"):
        params, opt = s.begin(6, lr=torch.tensor(lr), **s.without_decay())
    seen = s.expect_close(params, s.step_params(lr=lr, **s.without_decay()), "lr as a tensor ends elsewhere than lr as a number")
    if isinstance(opt.param_groups[0]["lr"], torch.Tensor):
        far = measure_stopped(s, 6, lambda: torch.tensor(lr), lambda group: group["lr"].fill_(0.0))
        expect(not far > KEPT, "an lr that is filled with 0 in place is not read", far)
    return seen


@check("torch's schedulers move the learning rate as they move that of SGD", "torch")
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
            worst = max(worst, s.expect_close(params, byhand, f"{name} ends elsewhere than the same rates by hand"))
    return worst


@check("maximize is the step on the negated gradient", "torch")
def maximize(s: TorchSubject) -> Any:
    s.require("maximize")
    up, down = s.params(), s.params()
    first, second = s.make(up, maximize=True), s.make(down, maximize=False)
    if hasattr(first, "update_hessian"):
        raise Skip("the Hessian that it estimates is negated too")

    def negate() -> None:
        for p in down:
            p.grad = -p.grad

    s.run(first, up, 0, 6)
    s.run(second, down, 0, 6, negate)
    return s.expect_close(up, down, "maximize=True ends elsewhere than negated gradients")


# ---- randomness, memory -----------------------------------------------------------------------------------------------------
@check("a step that draws from torch's generator changes dropout and data order", "torch", taste=True)
def rng_free(s: TorchSubject) -> Any:
    expect(not s.draws, "step draws from torch's global generator", "drawn")
    return "not drawn"


@check("what an optimizer holds must not grow from step to step", "torch")
def memory(s: TorchSubject) -> Any:
    params, opt = s.begin(12)
    gc.freeze()  # what is there now is not looked at again
    try:
        sizes = []
        for t in (12, 24):
            s.run(opt, params, t, t + 12)
            sizes.append((count_held_bytes(opt), count_live_bytes()))
    finally:
        gc.unfreeze()
    grown = max(after - before for before, after in zip(*sizes, strict=True))
    expect(not grown > 0, f"12 steps left {grown} bytes behind", grown)
    return 0


def count_live_bytes() -> int:
    """Bytes of the tensors of this process that are newer than gc.freeze, whoever keeps them."""
    gc.collect()
    return sum(tensor.numel() * tensor.element_size() for tensor in gc.get_objects() if type(tensor) is torch.Tensor)


def count_held_bytes(thing: Any, seen: set[int] | None = None) -> int:
    """Bytes of the tensors that can be reached from an object, and eight for each entry of a container."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return thing.numel() * thing.element_size()
    if isinstance(thing, dict):
        return sum(8 + count_held_bytes(value, seen) for value in thing.values())
    if isinstance(thing, (list, tuple, set)) or type(thing).__name__ == "deque":
        return sum(8 + count_held_bytes(value, seen) for value in thing)
    return count_held_bytes(vars(thing), seen) if isinstance(thing, torch.optim.Optimizer) else 0
