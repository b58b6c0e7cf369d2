"""What torch's own suite asks of an optimizer (TestOptimRenewed of its test_optim.py, which is in no wheel), asked of ours in our own
words, over torch's own settings and faulty settings, which are in the wheel.

A program: torch's test tools change flags of the whole process. It prints {check: {class: what is different}} for all that differs,
and how many checks agreed.
"""

import copy
import io
import json
import re
import sys
import types
import unittest
import warnings

import torch
import torch.optim.optimizer as base
from torch import nn

try:
    import expecttest  # noqa: F401
except ImportError:  # torch's tools inherit from its TestCase; nothing of it is used here
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

import rlx_optim.torch as ours
from rlx_optim import registry

THEIRS = {info.optim_cls.__name__: info for info in optim_db}
#: ours that torch.optim has too, by its name
COUNTERPARTS = {
    "SGD": "SGD",
    "Adam": "Adam",
    "AdamW": "AdamW",
    "NAdamW": "NAdam",
    "RAdam": "RAdam",
    "Adafactor": "Adafactor",
    "Muon": "Muon",
}
SCHEDULERS = [*THEIRS["AdamW"].scheduler_inputs, [lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)]]
#: torch's keywords in ours, None where what it asks for is what ours does
WORDS = {"Adafactor": {"d": "clip_threshold"}, "NAdamW": {"decoupled_weight_decay": None}}
#: settings under which torch's questions make sense: a rate that is for problems as curved as these, a decay that is times the rate
BASE = {"ScheduleFreeSGD": {"lr": 0.05}, "LaProp": {"convention": "timm"}}
RATES = {"Prodigy": (0.5, 2.0)}  # a factor of the rate that it finds; others have a rate, which float32 knows exactly


class Different(Exception):
    """What is not as torch's suite wants it."""


def want(fact, what):
    if not fact:
        raise Different(what)


def rates(name):
    return RATES.get(name, (2**-6, 2**-10))


def in_our_words(name, kwargs):
    words = WORDS.get(name, {})
    kwargs = {words.get(k, k): v for k, v in kwargs.items()}
    kwargs.pop(None, None)
    return kwargs


def inputs_of(name):
    """Settings to try: those of every optimizer, and those that torch tries where it has the same optimizer."""

    def inputs(device, dtype=None):
        common = [{}, {"lr": rates(name)[0]}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "maximize": True}, {"maximize": True}]
        common += [{"lr": torch.tensor(rates(name)[1])}]
        if name in COUNTERPARTS:
            common += [in_our_words(name, each.kwargs) for each in THEIRS[COUNTERPARTS[name]].optim_inputs_func(device)]
        return [OptimizerInput(None, {**BASE.get(name, {}), **kwargs}) for kwargs in common]

    return inputs


def errors_of(name):
    known = name in COUNTERPARTS
    return THEIRS[COUNTERPARTS[name]].optim_error_inputs_func if known else get_error_inputs_for_all_optims


def info_of(kind):
    return OptimizerInfo(
        getattr(ours, kind.title), optim_inputs_func=inputs_of(kind.title), scheduler_inputs=SCHEDULERS, supports_complex=False,
        optim_error_inputs_func=errors_of(kind.title),
    )  # fmt: skip


def say(kwargs):
    return ", ".join(f"{k}={v.item() if torch.is_tensor(v) else v!r}" for k, v in kwargs.items()) or "defaults"


def over_settings(function):
    """The check, for every setting. foreach and fused, which make no difference, have checks of their own."""

    def check(info):
        for each in info.optim_inputs_func("cpu"):
            torch.manual_seed(1)
            try:
                function(info, each.kwargs)
            except Exception as problem:
                raise Different(f"{problem_line(problem)} with {say(each.kwargs)}") from problem

    return check


def problem_line(problem):
    first = str(problem).partition("\n")[0]
    return first if isinstance(problem, Different) else f"{type(problem).__name__}: {first}"


def close(a, b, what):
    """As torch's assertEqual: tensors by value, in the default tolerance of their dtype."""
    if isinstance(a, dict):
        want(isinstance(b, dict) and a.keys() == b.keys(), f"{what}: other keys")
        for key in a:
            close(a[key], b[key], f"{what}, {key}")
    elif isinstance(a, (list, tuple)):
        want(len(a) == len(b), f"{what}: of another length")
        for x, y in zip(a, b, strict=True):
            close(x, y, what)
    elif torch.is_tensor(a):
        want(torch.is_tensor(b) and a.dtype is b.dtype and a.shape == b.shape, f"{what}: another kind of tensor")
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError:
            raise Different(f"{what}: other values") from None
    else:
        want(a == b, f"{what}: {a!r} and {b!r}")


# ---- problems ---------------------------------------------------------------------------------------------------------------------
class Line:
    """‖W·x + b‖², which every optimizer makes smaller."""

    def __init__(self, contiguous=True):
        weight, bias = (
            (torch.randn(10, 5), torch.randn(10)) if contiguous else (torch.randn(10, 5, 2)[..., 0], torch.randn(10, 2)[..., 0])
        )
        self.weight, self.bias, self.x = nn.Parameter(weight), nn.Parameter(bias), torch.randn(5)
        self.params = [self.weight, self.bias]

    def loss(self):
        return (self.weight.mv(self.x) + self.bias).pow(2).sum()

    def backward(self, opt):
        opt.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def copied(self):
        other = copy.copy(self)
        other.params = other.weight, other.bias = [nn.Parameter(p.detach().clone()) for p in self.params]
        return other


def go(opt, line, steps=20, schedulers=()):
    """How far the loss moved."""
    before = line.loss().item()
    for _ in range(steps):
        loss = line.backward(opt)
        opt.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[loss.detach()] * plateau)
    return line.loss().item() - before


def right_direction(moved, kwargs):
    want(moved > 0 if kwargs.get("maximize") else moved < 0, f"the loss moved by {moved:.3g}")


def convolution():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))
    x = torch.rand(1, 4, 16, 16)

    def train(opt, steps=3):
        for _ in range(steps):
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()

    return model, train


def given(params):
    """Parameters with gradients."""
    for p in params:
        p.grad = torch.rand_like(p)
    return params


def named(params, names):
    return [(f"name{i}", p) for i, p in enumerate(params)] if names else params


def two():
    return given([nn.Parameter(torch.randn(2, 3)) for _ in range(2)])


def without_names(state_dict):
    found = copy.deepcopy(state_dict)
    for group in found["param_groups"]:
        group.pop("param_names", None)
    return found


# ---- checks -----------------------------------------------------------------------------------------------------------------------
CHECKS = {}


def add(name, function):
    CHECKS[name] = function


for contiguous in (True, False):
    for scheduled in (True, False):

        def goes_right(info, contiguous=contiguous, scheduled=scheduled):
            for schedulers in info.scheduler_inputs if scheduled else [[]]:

                def one(info, kwargs, schedulers=schedulers):
                    line = Line(contiguous)
                    opt = info.optim_cls(line.params, **kwargs)
                    right_direction(go(opt, line, schedulers=[make(opt) for make in schedulers]), kwargs)

                over_settings(one)(info)

        add(f"goes right, {'contiguous' if contiguous else 'strided'}{', scheduled' * scheduled}", goes_right)


def groups_scheduled(info):
    for schedulers in info.scheduler_inputs:
        torch.manual_seed(1)
        line = Line()
        opt = info.optim_cls([{"params": [line.weight]}, {"params": [line.bias], "lr": 0.01}])
        right_direction(go(opt, line, schedulers=[make(opt) for make in schedulers]), {})


add("groups, scheduled", groups_scheduled)


def tensor_lr(info, kwargs):
    line = Line()
    other = line.copied()
    number = rates(info.name)[0]
    opts = [info.optim_cls(side.params, **{**kwargs, "lr": lr}) for side, lr in ((line, number), (other, torch.tensor(number)))]
    for _ in range(5):
        for opt, side in zip(opts, (line, other), strict=True):
            side.backward(opt)
            opt.step()
        close(line.params, other.params, "a tensor for lr gives other parameters than its number")


add("a tensor for lr", over_settings(tensor_lr))


def complex_parameters(info):
    """torch tests real against complex where an optimizer takes complex; these are refused."""
    try:
        info.optim_cls([torch.randn(3, 2, dtype=torch.complex64, requires_grad=True)])
    except ValueError as problem:
        want("complex" in str(problem), f"refused in other words: {problem}")
    else:
        raise Different("complex parameters are taken and nothing is known of them")


add("complex", complex_parameters)


def as_forloop(flag, dtype):
    def check(info, kwargs):
        sides = []
        for value in (False, True):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)
            scalar = torch.empty((), dtype=dtype).fill_(0.5).requires_grad_()
            scalar.grad = torch.full_like(scalar, 0.25)
            sides.append((model, info.optim_cls([*model.parameters(), scalar], **kwargs, **{flag: value})))
        x = torch.arange(1, 7).to(dtype).reshape(3, 2) / 10
        for t in range(7):
            for model, opt in sides:
                opt.zero_grad()
                if t in (3, 5):
                    model[2].requires_grad_(t == 5)
                if t != 2:
                    model(x).sum().backward()
                opt.step()
            (a, opt_a), (b, opt_b) = sides
            close(list(a.parameters()), list(b.parameters()), f"{flag}=True gives other parameters")
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                close(dict(opt_a.state[p]), dict(opt_b.state[q]), f"{flag}=True gives other state")

    return over_settings(check)


add("foreach is the loop", as_forloop("foreach", torch.float64))
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    add(f"fused is the loop, {str(dtype).removeprefix('torch.')}", as_forloop("fused", dtype))


def meta(info):
    """torch refuses fused steps of meta parameters, and takes the model once it is materialised; here the optimizer comes after."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    opt = info.optim_cls(model.parameters(), fused=True)
    with torch.device("meta"):
        given(model.parameters())
    try:
        opt.step()
    except RuntimeError:
        pass
    else:
        raise Different("a step of meta parameters is not refused")
    opt.zero_grad()
    model.to_empty(device="cpu")
    given(model.parameters())
    opt.step()


add("meta parameters", meta)


def decay_by_group(info, kwargs):
    line = Line()
    opt = info.optim_cls([{"params": [line.weight], **kwargs}, {"params": [line.bias], **kwargs, "weight_decay": 0.0}])
    right_direction(go(opt, line), kwargs)


add("weight_decay by group", over_settings(decay_by_group))


def lr_by_group(info, kwargs):
    line, still = Line(), nn.Parameter(torch.randn(2))
    before = still.detach().clone()
    kwargs = {**kwargs, "lr": kwargs.get("lr", rates(info.name)[1])}
    opt = info.optim_cls([{"params": line.params, **kwargs}, {"params": [still]}], lr=1e-28)
    still.grad = torch.rand(2)
    inner, opt.zero_grad = opt.zero_grad, lambda: [setattr(p, "grad", None) for p in line.params]
    right_direction(go(opt, line), kwargs)
    opt.zero_grad = inner
    close(still, before, "an lr of 1e-28 moves a parameter")


add("lr by group", over_settings(lr_by_group))


def no_gradients(info, kwargs):
    params = [torch.randn(2, 3) for _ in range(2)]
    before = [p.clone() for p in params]
    info.optim_cls(params, **kwargs).step(lambda: torch.tensor([1.0]))
    close(params, before, "a step without gradients moves parameters")


add("no gradients", over_settings(no_gradients))


def zero_gradients(info, kwargs):
    if kwargs.get("weight_decay", 0):
        return
    kwargs = {**kwargs, "weight_decay": 0.0}  # by default some decay; torch's suite lowers their rate
    p = torch.randn(5, 1, requires_grad=True)
    before = p.detach().clone()
    opt = info.optim_cls([p], **kwargs)
    p.grad = torch.zeros_like(p)
    opt.step(lambda: torch.tensor([1.0]))
    close(p.detach(), before, "a gradient of zeros moves a parameter")


add("gradients of zeros", over_settings(zero_gradients))
add("printed", over_settings(lambda info, kwargs: want(repr(info.optim_cls(two(), **kwargs)), "nothing is printed")))

for first in (True, False):
    for second in (True, False):
        words = f"{'named' if first else 'plain'} into {'named' if second else 'plain'}"

        def resumed(info, kwargs, first=first, second=second):
            line = Line()
            opt = info.optim_cls(named(line.params, first), **kwargs)
            go(opt, line, 10)
            other = line.copied()
            resumed = info.optim_cls(named(other.params, second), **kwargs)
            resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
            for _ in range(10):
                for each, side in ((opt, line), (resumed, other)):
                    side.backward(each)
                    each.step()
                close(line.params, other.params, "a resumed run goes elsewhere")
            one, two = (without_names(each.state_dict()) for each in (opt, resumed))
            close(one, two, "state dicts of equal runs")
            resumed.param_groups.extend(resumed.param_groups)
            again = without_names(resumed.state_dict())["param_groups"][-1]
            close(one["param_groups"][-1], again, "a group that comes twice")

        def loaded(info, kwargs, first=first, second=second):
            model, train = convolution()
            opt = info.optim_cls(model.named_parameters() if first else model.parameters(), **kwargs)
            train(opt)
            other = info.optim_cls(model.named_parameters() if second else model.parameters(), **kwargs)
            other.load_state_dict(copy.deepcopy(opt.state_dict()))
            train(other, 1)
            if first or second:
                groups = other.state_dict()["param_groups"]
                names = [group.get("param_names") for group in groups]
                want(names[0] == ["0.weight", "0.bias", "1.weight", "1.bias"], f"the names of the groups are {names}")

        add(f"resumed, {words}", over_settings(resumed))
        add(f"loaded, {words}", over_settings(loaded))


def older(info, kwargs):
    model, train = convolution()
    opt = info.optim_cls(model.parameters(), **kwargs)
    train(opt)
    old = copy.deepcopy(opt.state_dict())
    for group in old["param_groups"]:
        for flag in info.not_og_supported_flags:
            group.pop(flag, None)
    opt.load_state_dict(old)
    train(opt, 1)


add("an older state dict", over_settings(older))


for names in (True, False):

    def saved(info, kwargs, names=names):
        line = Line()
        opt = info.optim_cls(named(line.params, names), **kwargs)
        go(opt, line, 3)
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        for safely in (True, False):
            file.seek(0)
            close(torch.load(file, weights_only=safely), opt.state_dict(), f"saved and loaded, weights_only={safely}")

    add(f"saved, {'named' if names else 'plain'}", over_settings(saved))


def number_for_step(info, kwargs):
    opt = info.optim_cls(two(), **kwargs)
    for _ in range(3):
        opt.step()
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].item()
    opt.load_state_dict(saved)
    opt.step()


add("a number for step", over_settings(number_for_step))


def one(info, kwargs):
    return info.optim_cls([torch.rand(2, 3, requires_grad=True)], **kwargs)


def before_saving(opt):
    opt.state["test"] = 1


def after_saving(opt, saved):
    saved["found"] = saved["state"].pop("test", None)
    return saved


def state_dict_hooks(before, after):
    def check(info, kwargs):
        opt = one(info, kwargs)
        if before:
            opt.register_state_dict_pre_hook(before_saving)
        if after:
            opt.register_state_dict_post_hook(after_saving)
        saved = opt.state_dict()
        found = saved["found"] if after else saved["state"]["test"]
        want(found == (1 if before else None), f"the hooks left {found!r}")

    return over_settings(check)


add("state_dict hooks, before", state_dict_hooks(True, False))
add("state_dict hooks, after", state_dict_hooks(False, True))
add("state_dict hooks, both", state_dict_hooks(True, True))


def lr_of_2(opt, saved):
    saved["param_groups"][0]["lr"] = 0.002


def lr_of_3(opt, saved):
    saved = copy.deepcopy(saved)
    saved["param_groups"][0]["lr"] = 0.003
    return saved


def after_loading(opt):
    opt.state["lr"], opt.state["loaded"] = opt.param_groups[0]["lr"], True


def hooks_prepended(info, kwargs):
    opt = one(info, kwargs)
    saved = opt.state_dict()
    opt.register_load_state_dict_pre_hook(lr_of_2)
    opt.load_state_dict(saved)
    want(opt.param_groups[0]["lr"] == 0.002, "a hook before loading changes nothing")
    opt.register_load_state_dict_pre_hook(lr_of_3, prepend=True)
    opt.load_state_dict(saved)
    want(opt.param_groups[0]["lr"] == 0.002, "a hook that is put first has the last word")


def hooks_of_loading(before):
    def check(info, kwargs):
        opt = one(info, kwargs)
        lr = opt.param_groups[0]["lr"]
        if before:
            opt.register_load_state_dict_pre_hook(lr_of_3)
        opt.register_load_state_dict_post_hook(after_loading)
        opt.load_state_dict(opt.state_dict())
        want(opt.state["loaded"] is True, "the hook after loading was not called")
        want(opt.state["lr"] == (0.003 if before else lr), f"the hook after loading saw an lr of {opt.state['lr']}")

    return over_settings(check)


add("load_state_dict hooks, prepended", over_settings(hooks_prepended))
add("load_state_dict hooks, after", hooks_of_loading(False))
add("load_state_dict hooks, both", hooks_of_loading(True))


def step_hooks(register):
    def check(info, kwargs):
        opt, calls = info.optim_cls([torch.tensor([1.0, 1.0])], **kwargs), []
        handle = getattr(opt, register)(lambda *given: calls.append(given))
        opt.step()
        opt.step()
        want([each[0] for each in calls] == [opt, opt], f"the hook was called {len(calls)} times in two steps")
        handle.remove()
        opt.step()
        want(len(calls) == 2, "a hook that was removed is called")

    return over_settings(check)


add("step hooks, before", step_hooks("register_step_pre_hook"))
add("step hooks, after", step_hooks("register_step_post_hook"))


def all_step_hooks(info, kwargs):
    params, order = [torch.tensor([1.0, 1.0])], []
    opts = [info.optim_cls(params, **kwargs), torch.optim.SGD(params)]
    handles = [
        base.register_optimizer_step_pre_hook(lambda *_: order.append("all, before")),
        base.register_optimizer_step_post_hook(lambda *_: order.append("all, after")),
    ]
    for opt in opts:
        handles.append(opt.register_step_pre_hook(lambda *_: order.append("before")))
        handles.append(opt.register_step_post_hook(lambda *_: order.append("after")))
    for opt in (*opts, opts[0]):
        opt.step()
    for handle in handles:
        handle.remove()
    for opt in opts:
        opt.step()
    want(order == ["all, before", "before", "after", "all, after"] * 3, f"hooks were called in the order {order}")


add("step hooks, all", over_settings(all_step_hooks))


def public(opt):
    return {name for name in vars(opt) if not name.startswith("_")}


def deep_copy(info, kwargs):
    opt = info.optim_cls(two(), **kwargs)
    for _ in range(3):
        opt.step()
    want(public(opt) == public(copy.deepcopy(opt)), "a deep copy has other public attributes")


add("deep copy", over_settings(deep_copy))


def state_there(info, kwargs):
    model = nn.Linear(5, 5)
    opt = info.optim_cls(model.parameters(), **kwargs)
    model(torch.rand(2, 5)).sum().backward()
    opt.step()
    want(all(len(state) > 0 for state in opt.state.values()) and len(opt.state) == 2, "state is empty")


add("state", over_settings(state_there))


# ---- what is to be refused ---------------------------------------------------------------------------------------------------------
def refusals(info):
    """(what, how it differs or None) for every faulty setting of torch's."""
    for error in info.optim_error_inputs_func("cpu", torch.float32):
        params = error.optimizer_error_input.params
        kwargs = in_our_words(info.name, error.optimizer_error_input.kwargs)
        if params is None:  # torch's own refuse settings before they look
            params = two()
        found = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                opt = info.optim_cls(params, **kwargs)
                if error.error_on is OptimizerErrorEnum.STEP_ERROR:
                    opt.step()
        except Exception as problem:
            found = problem
        if found is None:
            how = "is not refused"
        elif not isinstance(found, error.error_type):
            how = f"{type(found).__name__}: {str(found).splitlines()[0]}"
        else:
            how = None if re.search(error.error_regex, str(found)) else "words"
        yield error.optimizer_error_input.desc, how


def outcome(check, info):
    """How it differs, in a line; None: not at all."""
    try:
        check(info)
    except Exception as problem:
        return problem_line(problem)
    return None


def main(only=None):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found, agreed = {}, 0
    for kind in registry.OURS:
        if only and kind.title not in only:
            continue
        info = info_of(kind)
        all_of_them = [(name, outcome(check, info)) for name, check in CHECKS.items()]
        all_of_them += [(f"refused: {what}", how) for what, how in refusals(info)]
        agreed += sum(how is None for _, how in all_of_them)
        for name, how in all_of_them:
            if how is not None:
                found.setdefault(name, {})[kind.title] = how
    print(json.dumps({"agreed": agreed, "different": found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
