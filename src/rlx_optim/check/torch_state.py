"""Checks of a torch class: its state, torch's interface."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as base

from .subject import is_refused
from .table import Skip, Wrong, check, expect
from .torch_subject import TorchSubject, copy_params, expect_bitwise, find_diff, find_move, list_arguments, set_seed, state_of

FAR = 2**24  # float32 counts no further


# ---- state ------------------------------------------------------------------------------------------------------------------
Carry = Callable[[TorchSubject, Any, Any], tuple[Any, Any]]  # from parameters and their optimizer to twins that go on alike


def carry_state(change: Callable[[Any], Any]) -> Carry:
    """Return a carry by state_dict and load_state_dict, which must give the same state dict again."""

    def carry(s: TorchSubject, params: Any, opt: Any) -> tuple[Any, Any]:
        others = copy_params(params)
        again = s.make(others)
        again.load_state_dict(change(opt.state_dict()))
        if where := find_diff(opt.state_dict(), again.state_dict(), "state_dict"):
            raise Wrong(f"what was loaded is not what was saved: {where}", where)
        return others, again

    return carry


def go_through_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def reverse_keys(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: reverse_keys(value) for key, value in reversed(thing.items())}
    return [reverse_keys(value) for value in thing] if isinstance(thing, list) else copy.deepcopy(thing)


def carry_by_dcp(s: TorchSubject, params: Any, opt: Any, flat: bool) -> tuple[Any, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

    options, others = StateDictOptions(flatten_optimizer_state_dict=flat), copy_params(params)
    saved = copy.deepcopy(get_optimizer_state_dict(nn.ParameterList(params), opt, options=options))
    again = s.make(others)
    set_optimizer_state_dict(nn.ParameterList(others), again, saved, options=options)
    return others, again


def resume_beside(s: TorchSubject, carries: Mapping[str, Carry], dtype: Any = torch.float32, compared: bool = True) -> Any:
    """Carry a run over half-way, and go on beside the original: bit for bit."""
    for what, carry in carries.items():
        with s.allow_refusal(str(dtype)):
            params, opt = s.begin(0, dtype)
        s.run(opt, params, 0, 4)
        others, again = carry(s, params, opt)
        before = copy_params(params)
        s.run(again, others, 4, 8)
        expect_bitwise(params, before, f"{what} steps the original")
        s.run(opt, params, 4, 8)
        if where := compared and find_diff(opt.state_dict(), again.state_dict(), "state_dict"):
            raise Wrong(f"{what} has state that goes on elsewhere: {where}", where)
        expect_bitwise(others, params, f"{what} goes on elsewhere")
    return 0.0


def carry_by_copy(how: Callable[[Any], Any], scheduled: bool) -> Carry:
    def carry(s: TorchSubject, params: Any, opt: Any) -> tuple[Any, Any]:
        if scheduled and "lr" in s.keywords:
            torch.optim.lr_scheduler.StepLR(opt, 100)  # wraps opt.step: a copy must not step the original
        others, again = how((params, opt))
        return others, again

    return carry


def go_through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


LOADED = "what is resumed"
RESUMED: tuple[tuple[str, str, dict[str, Carry], dict[str, Any]], ...] = (
    ("resume", "a run that is resumed goes on bit for bit", {LOADED: carry_state(copy.deepcopy)}, {}),
    ("resume-pickle", "a state dict survives pickle", {LOADED: carry_state(go_through_pickle)}, {}),
    (
        "resume-file", "torch.save and torch.load(weights_only=True), which is the default, are how checkpoints are kept",
        {LOADED: carry_state(go_through_file)}, {},
    ),
    ("resume-order", "the order of keys in a state dict means nothing", {LOADED: carry_state(reverse_keys)}, {}),
    (
        "resume-bfloat16", "loading must not cast float32 state to the parameter's dtype",
        {LOADED: carry_state(copy.deepcopy)}, {"dtype": torch.bfloat16},
    ),
    ("resume-float64", "a float64 run is resumed in float64", {LOADED: carry_state(copy.deepcopy)}, {"dtype": torch.float64}),
    (
        "copies", "deepcopy and pickle of the optimizer itself go on alike, under a scheduler too",
        {
            f"a copy by {word}{' under a scheduler' * scheduled}": carry_by_copy(how, scheduled)
            for scheduled in (False, True) for word, how in (("deepcopy", copy.deepcopy), ("pickle", go_through_pickle))
        }, {"compared": False},
    ),
    (
        "dcp", "torch.distributed.checkpoint's state dicts resume bit for bit",
        {f"what DCP resumes (flatten={flat})": functools.partial(carry_by_dcp, flat=flat) for flat in (False, True)},
        {"compared": False},
    ),
)  # fmt: skip
for _name, _reason, _carries, _settings in RESUMED:
    check(_reason, "torch", name=_name)(functools.partial(resume_beside, carries=_carries, **_settings))


@check("lr and every other number of a group come back with the state", "torch")
def resume_settings(s: TorchSubject) -> Any:
    params = s.params()
    opt, again = s.make(params), s.make(s.params())
    for group in opt.param_groups:
        group.update({name: value / 7 for name, value in group.items() if type(value) is float})
    s.run(opt, params, 0, 2)
    again.load_state_dict(state_of(opt))
    count = 0
    for group, loaded in zip(opt.param_groups, again.param_groups, strict=True):
        for name in (name for name, value in group.items() if type(value) is float):
            if loaded.get(name) != group[name]:
                raise Wrong(f"{name} is {loaded.get(name)} after loading a state with {group[name]:g}", str(loaded.get(name)))
            count += 1
    if not count:
        raise Skip("no setting of its groups is a number")
    return f"{count} numbers"


@check("a state for other parameters is refused", "torch")
def resume_mismatch(s: TorchSubject) -> Any:
    _, opt = s.begin(1)
    fewer = s.make(s.params()[:-1])
    taken = not is_refused(lambda: fewer.load_state_dict(state_of(opt)))
    expect(not taken, "a state with more parameters is taken without a word", "taken")
    return "refused"


@check("loading should copy: two optimizers on one state dict should not step each other's averages", "torch", taste=True)
def resume_alias(s: TorchSubject) -> Any:
    params, opt = s.begin(2)
    saved, kept = opt.state_dict(), state_of(opt)
    others = copy_params(params)
    again = s.make(others)
    again.load_state_dict(saved)
    s.run(again, others, 2, 4)
    if where := find_diff(kept, opt.state_dict()):
        raise Wrong(f"steps of one change the other's state: {where}", where)
    return 0.0


@check("float32 stops counting at 16777216; what depends on the count then stands still", "torch")
def count(s: TorchSubject) -> Any:
    params, opt = s.begin(1)
    saved, found = state_of(opt), 0
    for place in [*saved["state"].values(), *saved["param_groups"]]:
        value = place.get("step") if isinstance(place, dict) else None
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            place["step"], found = torch.full_like(value, FAR), found + 1
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            place["step"], found = type(value)(FAR), found + 1
    if not found:
        raise Skip("it keeps no count of steps that is called step")
    opt.load_state_dict(saved)
    before = copy_params(params)
    s.run(opt, params, 1, 4)
    if not all(p.isfinite().all() for p in params) or find_move(params, before) == 0:
        raise Wrong("after 2^24 steps parameters stand still or are not finite", "NaN")
    after = opt.state_dict()
    counts = [
        float(place["step"])
        for place in [*after["state"].values(), *after["param_groups"]]
        if isinstance(place, dict) and "step" in place
    ]
    if counts and max(counts) < FAR + 3:
        raise Wrong(f"three steps after 2^24 the count is 2^24 + {max(counts) - FAR:g}", max(counts) - FAR)
    return "2^24 + 3"


# ---- torch's interface ------------------------------------------------------------------------------------------------------
@check("step(closure) runs it once, with gradients on, and gives its loss", "torch")
def closure(s: TorchSubject) -> Any:
    params = s.params()
    opt, calls = s.make(params), []

    def loss() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        s.set_grads(params, 0)
        return torch.tensor(1.5)

    with torch.no_grad():
        given = opt.step(loss)
    expect(calls == [True], f"the closure ran {len(calls)} times, with gradients {'on' if all(calls) else 'off'}", len(calls))
    if given is None or float(given) != 1.5:
        raise Wrong(f"step(closure) gave {given!r}, not the loss", str(given))
    set_seed(1000)
    want, plain = s.begin()
    s.set_grads(want, 0)
    if (given := plain.step()) is not None:
        raise Wrong(f"step() without a closure gave {given!r}", str(given))
    return s.expect_close(params, want, "a step with a closure ends elsewhere")


@check("hooks before and after steps, saving and loading run, once, and can be removed", "torch")
def hooks(s: TorchSubject) -> Any:
    params = s.params()
    opt, log = s.make(params), list[str]()

    def note(word: str) -> Any:
        return lambda *given: log.append(word)

    handles = [
        base.register_optimizer_step_pre_hook(note("all before")), base.register_optimizer_step_post_hook(note("all after")),
        opt.register_step_pre_hook(note("before")), opt.register_step_post_hook(note("after")),
    ]  # fmt: skip
    try:
        s.set_grads(params, 0)
        opt.step()
    finally:
        for handle in handles:
            handle.remove()
    opt.step()
    expect(log == ["all before", "before", "after", "all after"], f"the hooks of a step ran as {log}", len(log))
    opt.register_state_dict_pre_hook(note("save"))
    opt.register_state_dict_post_hook(lambda o, saved: log.append("saved"))
    saved = copy.deepcopy(opt.state_dict())
    again = s.make(s.params())
    again.register_load_state_dict_pre_hook(lambda o, given: log.append("load"))
    again.register_load_state_dict_post_hook(note("loaded"))
    again.load_state_dict(saved)
    expect(log[4:] == ["save", "saved", "load", "loaded"], f"the hooks of saving and loading ran as {log[4:]}", len(log) - 4)
    return f"{len(log)} ran"


@check("trainers call step, zero_grad, state_dict and load_state_dict by keyword", "torch")
def signatures(s: TorchSubject) -> Any:
    methods = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
    for name in methods:
        (wanted, _), (mine, anything) = (list_arguments(getattr(kind, name)) for kind in (torch.optim.Optimizer, s.factory))
        if not anything and (missing := wanted - mine):
            raise Wrong(f"{name} lacks {', '.join(sorted(missing))}", name)
    return f"{len(methods)} methods"


@check("zero_grad gives None, or zeros where asked", "torch")
def zero_grad(s: TorchSubject) -> Any:
    params, opt = s.begin()
    s.set_grads(params, 0)
    opt.zero_grad(set_to_none=False)
    if not all(p.grad is not None and not p.grad.any() for p in params):
        raise Wrong("zero_grad(set_to_none=False) does not leave zeros", "no zeros")
    opt.zero_grad()
    expect(not any(p.grad is not None for p in params), "zero_grad() leaves gradients", "kept")
    return "None, and zeros"


@check("parameters stay leaves, and state has no history", "torch")
def autograd(s: TorchSubject) -> Any:
    params, opt = s.begin(3)
    if not all(p.is_leaf and p.requires_grad for p in params):
        raise Wrong("a parameter is no longer a leaf that requires gradients", "no leaf")
    for state in opt.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and (value.requires_grad or value.grad_fn is not None):
                raise Wrong(f"state {name!r} carries autograd's history", name)
    return "no history"


@check("GradScaler skips a step with an infinite gradient, and otherwise changes nothing", "torch")
def grad_scaler(s: TorchSubject) -> Any:
    params, scaler = s.params(), torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = s.make(params)
    scaler.scale(torch.ones(()))
    for t in range(4):
        set_seed(1000 + t)
        s.set_grads(params, t)
        for p in params:
            p.grad *= 8
        scaler.step(opt)
        scaler.update(8.0)
    want, plain = s.begin()
    for t in range(4):
        set_seed(1000 + t)
        s.set_grads(want, t)
        plain.step()
    seen = s.expect_close(params, want, "scaled and unscaled again it ends elsewhere")
    before, state = copy_params(params), state_of(opt)
    s.set_grads(params, 9)
    params[0].grad.view(-1)[0] = torch.inf
    scaler.step(opt)
    scaler.update()
    expect_bitwise(params, before, "parameters moved in a step that GradScaler skips")
    if where := find_diff(state["state"], opt.state_dict()["state"]):
        raise Wrong(f"state moved in a step that GradScaler skips: {where}", where)
    return seen


@check("a sparse gradient is refused, or means what its dense form means", "torch")
def sparse(s: TorchSubject) -> Any:
    p, q = s.params(shapes={"w": (6, 4)})[0], s.params(shapes={"w": (6, 4)})[0]
    place, value = torch.tensor([[1, 1, 4]]), torch.ones(3, 4)
    thin = torch.sparse_coo_tensor(place, value, (6, 4))
    first, second = s.make([p]), s.make([q])
    with s.allow_refusal("a sparse gradient"):
        for _ in range(2):
            p.grad = thin.clone()
            first.step()
    for _ in range(2):
        q.grad = thin.to_dense()
        second.step()
    start = s.params(shapes={"w": (6, 4)})  # duplicates are added one by one: a few roundings
    return s.expect_close([p], [q], "a sparse gradient ends elsewhere than its dense form", start, 1e-3)


@check("complex parameters are refused, or stepped as pairs of real numbers", "torch", taste=True)
def complex_(s: TorchSubject) -> Any:
    p = nn.Parameter(torch.view_as_complex(torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))))
    start = torch.view_as_real(p.detach()).clone()
    q = nn.Parameter(start.clone())
    with s.allow_refusal("a complex parameter"):
        first = s.make([p])
        for t in range(3):
            p.grad = torch.view_as_complex(torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(t)))
            first.step()
    second = s.make([q])
    for t in range(3):
        q.grad = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(t))
        second.step()
    return s.expect_close([torch.view_as_real(p.detach())], [q], "a complex parameter ends elsewhere than its real view", [start])
