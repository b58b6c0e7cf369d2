"""`clip_grad_norm_(opt, …)` beside torch's: whoever zeroes the gradients, and whatever happens between clip and step."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import rlx_optim.torch as ours  # noqa: E402

ROUNDS = 3


class Refused(Exception):
    """What a user's hook raises."""


class Side:
    """A model, an optimizer over it, and a clip."""

    def __init__(self, kind, library, **settings):
        torch.manual_seed(0)
        self.ours = library is ours
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.params = list(self.model.parameters())
        given = {"SGD": dict(lr=0.5, momentum=0.9), "AdamW": dict(lr=0.05, weight_decay=0.1)}[kind]
        self.opt = getattr(library, kind)(self.params, **given, **(settings if self.ours else {}))
        self.other = getattr(library, kind)(self.params[:2], **given)

    def backward(self, t, scale=1.0):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        (self.model(x).pow(2).sum() * scale).backward()

    def clip(self, norm=0.3, opt=None):
        if self.ours:
            return ours.clip_grad_norm_(opt or self.opt, norm)
        params = [p for group in (opt or self.opt).param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(params, norm)

    @property
    def grads(self):
        return [p.grad for p in self.params if p.grad is not None]


def replace_by_zeros(side):
    for p in side.params:
        p.grad = torch.zeros_like(p)


def each(change):
    return lambda side: [change(p) for p in side.params if p.grad is not None]


#: who throws the gradients away, and how
ZEROING = {
    "opt.zero_grad()": lambda side: side.opt.zero_grad(),
    "opt.zero_grad(False)": lambda side: side.opt.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda side: side.model.zero_grad(),
    "model.zero_grad(False)": lambda side: side.model.zero_grad(set_to_none=False),
    "layer.zero_grad(False)": lambda side: side.model[0].zero_grad(set_to_none=False),
    "another optimizer's": lambda side: torch.optim.SGD(side.params, lr=1.0).zero_grad(set_to_none=False),
    "grad = None": each(lambda p: setattr(p, "grad", None)),
    "grad.zero_()": each(lambda p: p.grad.zero_()),
    "grad.data.zero_()": each(lambda p: p.grad.data.zero_()),
    "grad.detach_().zero_()": each(lambda p: p.grad.detach_().zero_()),
    "grad *= 0": each(lambda p: p.grad.mul_(0.0)),
    "numpy": each(lambda p: p.grad.numpy().fill(0.0)),
    "foreach_zero_": lambda side: torch._foreach_zero_(side.grads),
    "grad = zeros": replace_by_zeros,
    "one of them": lambda side: side.params[0].grad.zero_(),
    "a decay of gradients": each(lambda p: p.grad.mul_(0.5)),
    "nobody": lambda side: None,
}


def step(side, t):
    side.clip()
    side.opt.step()


def step_twice(side, t):
    step(side, t)
    side.opt.step()


def clip_twice(side, t):
    side.clip(0.3)
    side.clip(0.1)
    side.opt.step()


def accumulate(side, t):
    for k in range(3):
        side.backward(100 * t + k)
    step(side, t)


def accumulate_after_clip(side, t):
    side.clip()
    side.backward(100 * t)
    side.opt.step()


def clip_and_throw_away(side, t):
    side.clip()


def clip_now_and_then(side, t):
    if t % 2:
        side.clip()
    side.opt.step()


def closure(side, t):
    def loss():
        side.opt.zero_grad(set_to_none=False)
        side.backward(100 * t)
        side.clip()
        return torch.zeros(())

    side.opt.step(loss)


def two_optimizers(side, t):
    side.clip()
    side.clip(0.05, side.other)
    side.other.step()
    side.opt.step()


def clip_of_another(side, t):
    side.clip(0.05, side.other)
    side.opt.step()


def noise(side, t):
    side.clip()
    for p in side.params:
        p.grad.add_(0.01)
    side.opt.step()


def unseen_noise(side, t):
    side.clip()
    for p in side.params:
        p.grad.data.add_(0.01)
    side.opt.step()


def halve(side, t):
    side.clip()
    for p in side.params:
        p.grad = p.grad / 2
    side.opt.step()


def refused_setting(side, t):
    side.clip()
    if t % 2 == 0:
        side.opt.step()
    elif side.ours:
        before, side.opt.param_groups[0]["lr"] = side.opt.param_groups[0]["lr"], -1.0
        with pytest.raises(ValueError, match="lr must be"):
            side.opt.step()
        side.opt.param_groups[0]["lr"] = before


def raising_hook(side, t):
    def refuse(*_):
        raise Refused

    side.clip()
    handle = side.opt.register_step_pre_hook(refuse) if t % 2 else None
    try:
        side.opt.step()
    except Refused:
        assert handle
    if handle:
        handle.remove()


def not_finite(side, t):
    """torch.optim has no nonfinite="skip": there the step is left out by hand."""
    bad = t % 2 == 1
    if bad:
        side.params[0].grad[0, 0] = float("nan")
    side.clip()
    if side.ours or not bad:
        side.opt.step()
    if bad:  # a nan outlives every factor
        side.model.zero_grad(set_to_none=False)


def scaler(side, t):
    """A GradScaler that skips every other step."""
    made = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    if t % 2:
        side.params[0].grad[0, 0] = float("inf")
    else:
        for p in side.params:
            p.grad.mul_(8.0)
    made.scale(torch.ones(()))  # makes its scale
    made.unscale_(side.opt)
    side.clip()
    made.step(side.opt)
    if t % 2:
        side.model.zero_grad(set_to_none=False)


BETWEEN = [
    step, step_twice, clip_twice, accumulate, accumulate_after_clip, clip_and_throw_away, clip_now_and_then, closure, two_optimizers,
    clip_of_another, noise, unseen_noise, halve, refused_setting, raising_hook, not_finite, scaler,
]  # fmt: skip
SETTINGS = {not_finite: {"nonfinite": "skip"}}


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_clip_is_torchs_whoever_zeroes(kind, between):
    """After every round, parameters and gradients are those of torch.nn.utils.clip_grad_norm_ and torch.optim."""
    wrong = []
    for how, zero in ZEROING.items():
        sides = [Side(kind, library, **SETTINGS.get(between, {})) for library in (ours, torch.optim)]
        for t in range(ROUNDS):
            for side in sides:
                side.backward(t)
                between(side, t)
                zero(side)
            pairs = zip(*(side.params + side.grads for side in sides), strict=True)
            wrong += [f"{how}, round {t}"] * (not all(torch.allclose(a, b, rtol=0.0, atol=1e-12) for a, b in pairs))
    assert not wrong


@pytest.mark.parametrize("how", ["model.zero_grad(False)", "grad.data.zero_()", "opt.zero_grad()"])
def test_skip_above_judges_by_the_norm_before_the_clip(how):
    """The spike is seen through the clip, and goes with the step that is left out."""
    plain, watched = Side("SGD", ours), Side("SGD", ours, skip_above=6.0)
    for t in range(80):
        for side in (plain, watched):
            side.backward(t % 5, scale=1e4 if t == 70 else 1.0)
            side.clip(0.01, side.opt if t % 2 else None)
            if side is watched or t != 70:
                side.opt.step()
            ZEROING[how](side)
    assert watched.opt.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(plain.params, watched.params, strict=True))


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_skip_above_judges_gradients_changed_after_a_clip_as_they_are(order):
    side = Side("SGD", ours, skip_above=6.0)
    side.opt.param_groups[0]["lr"] = 1e-6
    for t in range(80):
        side.opt.zero_grad()
        side.backward(t % 5)
        ours.clip_grad_norm_(side.opt, 0.01, order)
        if t == 70:
            side.params[0].grad.mul_(1e6)
        side.opt.step()
        assert side.opt.skipped == (t >= 70)


def test_a_clip_of_everything_counts_a_parameter_once():
    """A group that lists a parameter twice steps it twice, and has one gradient of it."""
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with pytest.warns(UserWarning, match="duplicate"):
        opt = ours.SGD([p, p, q], lr=1.0)
    p.grad, q.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert float(ours.clip_grad_norm_(opt, 1.0)) == 5.0
    assert torch.allclose(p.grad, torch.tensor([0.6, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_clip_of_16_bits_rounds_once(dtype):
    p = nn.Parameter(torch.zeros(4096, dtype=dtype))
    grad = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    p.grad = grad.clone()
    norm = ours.clip_grad_norm_([p], 1.0)
    assert torch.equal(p.grad, (grad.double() * (1.0 / (norm + 1e-6))).to(dtype))
