"""The torch front end: parity with torch.optim, engines, state and checkpoints, routing, Sophia, gradient release, refusals, growth."""

import contextlib
import copy
import functools
import gc
import inspect
import io
import pickle
import sys
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from helpers import TORCH as ALL
from torch import nn
from torch.optim import lr_scheduler

import rlx_optim
import rlx_optim.torch as ours

ENGINES = ("cpu", "torch")
MATRIX = ("SOAP", "KronPSGD", "Muon", "NorMuon", "Scion")  # engines order the sums of their products differently
SHAPES = {"w": (24, 16), "wide": (6, 30), "b": (37,), "one": (1,), "s": (), "conv": (4, 3, 3, 2)}
every = pytest.mark.parametrize("name", ALL)
on_engines = pytest.mark.parametrize("engine", ENGINES)
pytestmark = pytest.mark.usefixtures("one_thread")  # tensors are tiny: a second thread of torch only waits


def make(name, params, **settings):
    return getattr(ours, name)(params, **{**ALL[name], **settings})


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}


def small(dtype=torch.float32, shapes=SHAPES):
    """Parameters whose own rounding does not show beside the steps."""
    return {name: nn.Parameter(p.detach() * 0.1) for name, p in parameters(dtype, shapes).items()}


def twins(params):
    return {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}


def give_gradients(params, t, missing=()):
    """The gradients of step t: they depend on t, name and shape alone."""
    for i, (name, p) in enumerate(params.items()):
        generator = torch.Generator().manual_seed(1000 * t + i)
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 0.1
        p.grad = None if name in missing else grad


def curvature(params, t):
    """A loss whose Hessian is diagonal, the same for the same t."""
    scales = [torch.rand(p.shape, generator=torch.Generator().manual_seed(t)).to(p.dtype) * 10 for p in params.values()]
    return scales, lambda: sum((c * p * p).sum() / 2 for c, p in zip(scales, params.values(), strict=True))


def run(opt, params, start, stop):
    for t in range(start, stop):
        if isinstance(opt, ours.Sophia) and t % 3 == 0:
            opt.update_hessian(curvature(params, t)[1])
        give_gradients(params, t)
        opt.step()
    return params


def bits(tensors):
    return {name: t.detach().clone() for name, t in tensors.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def same_state(a, b):
    """Two state_dicts hold the same state, bit for bit."""
    a, b = a["state"], b["state"]
    return a.keys() == b.keys() and all(
        a[i].keys() == b[i].keys()
        and all(torch.equal(torch.as_tensor(a[i][k]), torch.as_tensor(b[i][k])) and type(a[i][k]) is type(b[i][k]) for k in a[i])
        for i in a
    )


def distance(got, want, start):
    """max|got − want| over the distance travelled, the worst of all tensors."""
    worst = 0.0
    for k in want:
        g, w, s = (t[k].detach().double() for t in (got, want, start))
        worst = max(worst, float((g - w).abs().max()) / max(float((w - s).abs().max()), 1e-30))
    return worst


def through_disk(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- torch.optim's own optimizers ------------------------------------------------------------------------------------------
def pair(mine, theirs=None, own=None, foreign=None, bound=1e-5, **shared):
    """Our class and torch's, what each is given, and how near they must stay."""
    return mine, shared | (own or {}), theirs or mine, shared | (foreign or {}), bound


COUPLED, DECOUPLED = dict(weight_decay=0.1), dict(lr=2**-6, weight_decay=2**-4)  # lr·wd a power of two: see ROUNDED
TWINS = {
    "SGD": pair("SGD", lr=0.05),
    "SGD momentum": pair("SGD", lr=0.02, momentum=0.9),
    "SGD dampening": pair("SGD", lr=0.02, momentum=0.9, dampening=0.3, **COUPLED),
    "SGD nesterov": pair("SGD", lr=0.02, momentum=0.9, nesterov=True, **COUPLED),
    "Adam": pair("Adam", **COUPLED),
    "Adam amsgrad": pair("Adam", amsgrad=True),
    "AdamW": pair("AdamW", **DECOUPLED),
    "AdamW amsgrad": pair("AdamW", amsgrad=True, **DECOUPLED),
    "NAdam": pair("NAdamW", "NAdam", dict(convention="torch"), dict(decoupled_weight_decay=True), **DECOUPLED),
    "RAdam": pair("RAdam", lr=2**-6, **COUPLED),
    "RAdam decoupled": pair("RAdam", decoupled_weight_decay=True, **DECOUPLED),
    "Adafactor": pair("Adafactor"),
    "Adafactor decay": pair("Adafactor", own=dict(clip_threshold=2.0), foreign=dict(d=2.0), **DECOUPLED),
    "Muon": pair("Muon", own=dict(convention="keller"), foreign=dict(adjust_lr_fn="original"), bound=3e-2, lr=0.02, **COUPLED),
    "Muon match_rms": pair(
        "Muon", own=dict(convention="moonlight"), foreign=dict(adjust_lr_fn="match_rms_adamw"), bound=3e-2, lr=1e-3, **COUPLED
    ),
}
#: torch decays by p·(1 − lr·wd) with that factor rounded to float32; we by p − lr·wd·p, in one rounding. With these numbers the
#: factor is not exact, and torch goes up to 5e-5 from its own float64 run
ROUNDED = {
    "AdamW, defaults": pair("AdamW"),
    "AdamW, 0.1": pair("AdamW", **COUPLED),
    "NAdam, 0.1": pair("NAdamW", "NAdam", dict(convention="torch"), dict(decoupled_weight_decay=True), lr=2e-3, **COUPLED),
    "RAdam, 0.1": pair("RAdam", decoupled_weight_decay=True, **COUPLED),
}
twin = pytest.mark.parametrize("case", TWINS)


def network(bias):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16, bias), nn.Tanh(), nn.Linear(16, 16, bias), nn.Tanh(), nn.Linear(16, 4, bias))


def trained(optimizer, dtype=torch.float32, bias=True):
    """A network after a hundred steps, and before."""
    model = network(bias).to(dtype)
    start, opt = bits(dict(model.named_parameters())), optimizer(list(model.parameters()))
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        x = torch.randn(32, 12, generator=generator).to(dtype)
        opt.zero_grad()
        (model(x) - x[:, :4].sin()).pow(2).mean().backward()
        opt.step()
    return bits(dict(model.named_parameters())), start


@functools.cache
def torchs(case, dtype=torch.float32):
    """The same by torch.optim."""
    _, _, theirs, settings, _ = {**TWINS, **ROUNDED}[case]
    return trained(lambda params: getattr(torch.optim, theirs)(params, **settings), dtype, bias=theirs != "Muon")[0]


@twin
@on_engines
def test_a_hundred_steps_of_a_network_as_torch_optim(case, engine):
    mine, settings, _, _, bound = TWINS[case]
    a, start = trained(lambda params: getattr(ours, mine)(params, engine=engine, **settings), bias=mine != "Muon")
    assert distance(a, torchs(case), start) <= bound


@pytest.mark.parametrize("case", ROUNDED)
@on_engines
def test_where_torch_rounds_its_decay_ours_is_nearer_to_float64(case, engine):
    mine, settings, *_ = ROUNDED[case]
    a, start = trained(lambda params: getattr(ours, mine)(params, engine=engine, **settings))
    exact = torchs(case, torch.float64)
    assert distance(a, exact, start) < distance(torchs(case), exact, start) / 2
    assert distance(a, torchs(case), start) < 1e-4


@pytest.mark.parametrize("case", [case for case in TWINS if case not in ("Muon", "Muon match_rms")])  # torch's Muon is bfloat16
@on_engines
def test_a_hundred_steps_in_float64_are_the_same_rule(case, engine):
    mine, settings, *_ = TWINS[case]
    if mine == "Adafactor":  # torch's default eps is that of the type
        settings = {**settings, "eps": (2.0**-52, 1e-3)}
    a, start = trained(lambda params: getattr(ours, mine)(params, engine=engine, **settings), torch.float64)
    assert distance(a, torchs(case, torch.float64), start) <= (
        1e-6 if case == "NAdam" else 1e-11
    )  # torch keeps NAdam's mu_product in float32


@twin
def test_checkpoints_of_ours_go_on_in_torch_optim(case):
    mine, settings, theirs, _, bound = TWINS[case]
    params = small(shapes={"w": (24, 16), "wide": (6, 30)} | ({} if mine == "Muon" else {"b": (37,), "s": ()}))
    opt = getattr(ours, mine)(params.values(), **settings)
    run(opt, params, 0, 10)
    taken, start = twins(params), bits(params)
    loaded = getattr(torch.optim, theirs)(taken.values())  # every setting comes with the checkpoint
    loaded.load_state_dict(through_disk(opt.state_dict()))
    run(opt, params, 10, 30)
    run(loaded, taken, 10, 30)
    assert distance(params, taken, start) <= bound


@twin
def test_checkpoints_of_torch_optim_go_on_in_ours_and_back(case):
    mine, settings, theirs, their_settings, bound = TWINS[case]
    params = small(shapes={"w": (24, 16), "wide": (6, 30)} | ({} if mine == "Muon" else {"b": (37,), "s": ()}))
    source = getattr(torch.optim, theirs)(params.values(), **their_settings)
    run(source, params, 0, 10)

    taken = twins(params)
    loaded = getattr(ours, mine)(taken.values())  # every setting comes with the checkpoint
    loaded.load_state_dict(through_disk(source.state_dict()))
    start = bits(params)
    run(source, params, 10, 30)
    run(loaded, taken, 10, 30)
    assert distance(taken, params, start) <= bound
    assert all(loaded.param_groups[0][k] == v for k, v in settings.items())

    back, start = twins(taken), bits(taken)
    returned = getattr(torch.optim, theirs)(back.values())
    returned.load_state_dict(through_disk(loaded.state_dict()))
    run(loaded, taken, 30, 50)
    run(returned, back, 30, 50)
    assert distance(taken, back, start) <= bound


def test_a_checkpoint_of_another_rule_is_not_taken_for_ours():
    params = parameters()
    nadam = torch.optim.NAdam(params.values(), weight_decay=0.1)  # coupled
    run(nadam, params, 0, 2)
    opt = ours.NAdamW(twins(params).values())
    with pytest.raises(ValueError, match="coupled weight decay"):
        opt.load_state_dict(nadam.state_dict())
    nadam.param_groups[0]["decoupled_weight_decay"] = True
    opt.load_state_dict(nadam.state_dict())
    assert opt.param_groups[0]["convention"] == "torch"  # although ours was made with the default one


@pytest.mark.parametrize("case", ["SGD nesterov", "AdamW", "AdamW amsgrad"])
@on_engines
def test_float64_is_stepped_in_float64(case, engine):
    mine, settings, theirs, their_settings, _ = TWINS[case]
    params = parameters(torch.float64)
    others, start = twins(params), bits(params)
    opt = getattr(ours, mine)(params.values(), engine=engine, **settings)
    run(opt, params, 0, 50)
    run(getattr(torch.optim, theirs)(others.values(), **their_settings), others, 0, 50)
    assert distance(params, others, start) <= 1e-12
    assert all(v.dtype == torch.float64 for s in opt.state.values() for v in s.values() if v.ndim)


# ---- engines -----------------------------------------------------------------------------------------------------------------
def named_twin(name, groups=None):
    defaults = {"adafactor": {**ours.Adafactor.spec.torch.defaults, "eps": (2.0**-23, 1e-3)}}.get(name.lower(), {})  # float32's
    return rlx_optim.create(name, groups=groups, engine="cpu", **{**defaults, **ALL[name]})


@every
@pytest.mark.filterwarnings("ignore:.*matched no parameter")
def test_engines_agree_with_each_other_and_with_the_named_api(name):
    """Two learning rates in one step, and step counts that differ from tensor to tensor."""
    start = small()
    lr = ALL[name].get("lr", inspect.signature(getattr(ours, name)).parameters["lr"].default)
    slow, results = (
        ("w",) if name in ("Muon", "NorMuon", "MARS") else ("w", "one"),
        {},
    )  # there "one" goes to otherwise, with its group's lr
    for engine in ENGINES:
        params = twins(start)
        groups = [
            {"params": [(k, p) for k, p in params.items() if k not in slow]},
            {"params": [(k, p) for k, p in params.items() if k in slow], "lr": lr / 2},
        ]
        opt = make(name, groups, engine=engine)
        for t in range(20):
            if name == "Sophia" and t % 3 == 0:
                opt.update_hessian(curvature(params, t)[1])
            give_gradients(params, t, missing=("b", "wide") if t % 4 == 1 else ())
            opt.step()
        results[engine] = params
    arrays = {k: p.detach().numpy().copy() for k, p in start.items()}
    named = named_twin(name, groups=[{"match": k, "lr": lr / 2} for k in slow])
    for t in range(20):
        fake = twins(start)
        give_gradients(fake, t, missing=("b", "wide") if t % 4 == 1 else ())
        if name == "Sophia" and t % 3 == 0:
            for k, c in zip(fake, curvature(fake, t)[0], strict=True):
                named.update_hessian(k, c.numpy())
        present = [k for k in fake if fake[k].grad is not None]
        named.step_all({k: arrays[k] for k in present}, {k: fake[k].grad.numpy() for k in present})
    bound = 1e-3 if name in MATRIX else 1e-5
    assert distance(results["torch"], results["cpu"], start) <= bound
    assert same(bits(results["cpu"]), {k: torch.from_numpy(a) for k, a in arrays.items()})  # the same engine: the same bits


@pytest.mark.parametrize(
    ("name", "settings", "differing"),
    [
        ("SGD", dict(momentum=0.9), dict(momentum=0.5, dampening=0.2, weight_decay=0.1)),
        ("Adam", {}, dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)),
        ("AdamW", {}, dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)),
        ("NAdamW", {}, dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)),
        ("RAdam", {}, dict(betas=(0.8, 0.9), weight_decay=0.2, decoupled_weight_decay=True)),
        ("QHAdamW", {}, dict(betas=(0.8, 0.9), nus=(0.5, 0.9), weight_decay=0.2)),
        ("StableAdamW", {}, dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, clip=0.5)),
        ("AdEMAMix", {}, dict(betas=(0.8, 0.9, 0.99), alpha=5.0, eps=1e-3, weight_decay=0.2, alpha_warmup=3, beta3_warmup=4)),
        ("Adan", {}, dict(betas=(0.8, 0.9, 0.7), eps=1e-3, weight_decay=0.2, no_prox=True)),
        ("ADOPT", {}, dict(betas=(0.8, 0.9), eps=0.1, weight_decay=0.2, decouple=True, clip_exp=0.1)),
        ("LaProp", {}, dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.01)),
        ("LARS", {}, dict(momentum=0.5, weight_decay=0.2, trust_coefficient=1e-2, eps=0.1)),
        ("LARS", {}, dict(trust_coefficient=None, lr=0.1)),
        ("Lamb", {}, dict(betas=(0.8, 0.9), trust_clip=0.5, bias_correction=False)),
        ("Adafactor", {}, dict(beta2_decay=-0.5, eps=(1e-5, 1e-2), clip_threshold=0.3, weight_decay=0.2)),
        ("Lion", dict(lr=1e-3), dict(betas=(0.8, 0.9), weight_decay=0.2)),
        ("Sophia", {}, dict(betas=(0.8, 0.9), gamma=0.1, clip=0.1, eps=1e-3, weight_decay=0.2)),
        ("MARS", {}, dict(betas=(0.8, 0.9), gamma=0.1, clip_norm=0.1)),
        ("MARS", {}, dict(clip_norm=None)),
        ("MARS", dict(variant="lion", clip_norm=None), dict(betas=(0.8, 0.9), gamma=0.1)),
    ],
)
def test_groups_that_differ_in_everything_equal_optimizers_of_their_own(name, settings, differing):
    start = parameters(shapes={"a": (6, 5), "b": (5, 7), "c": (4, 4)})
    for engine in ENGINES:
        together, apart = twins(start), twins(start)
        second = {"params": [together["b"], together["c"]], **differing}
        opt = getattr(ours, name)([{"params": [together["a"]]}, second], engine=engine, **settings)
        alone = [
            getattr(ours, name)([apart["a"]], engine=engine, **settings),
            getattr(ours, name)([apart["b"], apart["c"]], engine=engine, **settings | differing),
        ]
        run(opt, together, 0, 5)
        for t in range(5):
            give_gradients(apart, t)
            if name == "Sophia" and t % 3 == 0:
                for each in alone:
                    each.update_hessian(curvature(apart, t)[1])
            for each in alone:
                each.step()
        assert same(bits(together), bits(apart)), engine


@every
@on_engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_float32_step_rounded_once(name, engine, dtype):
    params = parameters(dtype)
    single = {k: nn.Parameter(p.detach().float()) for k, p in params.items()}
    settings = {"lr": 0.05} if name in ("Lamb", "Lion") else {"eps": (1e-7, 1e-3)} if name == "Adafactor" else {}
    opt, other = make(name, params.items(), engine=engine, **settings), make(name, single.items(), engine=engine, **settings)
    before = bits(params)
    for t in range(4):
        run(opt, params, t, t + 1)
        if name == "Sophia" and t % 3 == 0:  # the same estimate, which half precision has rounded
            rounded = {k: p.detach().to(dtype).requires_grad_() for k, p in single.items()}
            scales, _ = curvature(rounded, t)
            other.update_hessian(
                lambda s=scales: sum((c.float() * p * p).sum() / 2 for c, p in zip(s, single.values(), strict=True))
            )
        for k, p in single.items():
            give_gradients(rounded := twins(before), t)
            p.grad = rounded[k].grad.float()
        other.step()
        for k, p in single.items():
            assert torch.equal(params[k], p.to(dtype)), (k, t)
            p.data.copy_(params[k].detach())
    assert not same(before, bits(params))
    assert all(v.dtype == torch.float32 for s in opt.state.values() for k, v in s.items() if v.ndim)
    assert same_state(opt.state_dict(), other.state_dict())


@every
@on_engines
def test_strides_do_not_matter(name, engine):
    base = parameters(shapes={"w": (6, 4), "conv": (4, 3, 5, 5), "b": (10,)})
    odd = {
        "w": nn.Parameter(base["w"].detach().t().contiguous().t()),
        "conv": nn.Parameter(base["conv"].detach().clone().to(memory_format=torch.channels_last)),
        "b": nn.Parameter(torch.stack([base["b"].detach()] * 2, 1)[:, 0]),
    }
    a, b = make(name, base.items(), engine=engine), make(name, odd.items(), engine=engine)
    for t in range(3):
        give_gradients(base, t)
        for k, p in odd.items():
            p.grad = base[k].grad.clone() if k == "b" else torch.empty_like(p).copy_(base[k].grad)
        a.step()
        b.step()
    assert not odd["w"].is_contiguous()
    assert same(bits(base), bits(odd))


@every
@on_engines
def test_odd_shapes_missing_gradients_and_late_parameters(name, engine):
    params = parameters(
        shapes={"s": (), "one": (1,), "none": (0,), "no rows": (0, 3), "w": (5, 3), "thin": (1, 5), "never": (3, 3)}
    )
    opt = make(name, params.items(), engine=engine)
    for t in range(3):
        give_gradients(params, t, missing=("never", *(["w"] if t < 1 else [])))
        before = bits(params)
        opt.step()
        moved = {k for k in params if not torch.equal(before[k], params[k])}
        assert moved <= {"s", "one", "w", "thin"}
        assert ("w" in moved) == (t > (1 if name in ("SOAP", "ADOPT") else 0))  # whose first step only looks
    assert all(torch.isfinite(p).all() for p in params.values())
    steps = {k: float(opt.state[p]["step"]) for k, p in params.items()}
    assert steps == {"s": 3, "one": 3, "none": 3, "no rows": 3, "w": 2, "thin": 3, "never": 0}
    opt.zero_grad()
    before, state = bits(params), copy.deepcopy(opt.state_dict())
    opt.step()
    assert same(before, bits(params))
    assert same_state(state, opt.state_dict())


# ---- the interface of torch.optim.Optimizer ------------------------------------------------------------------------------------
@every
def test_signature_says_every_hyperparameter(name):
    cls = getattr(ours, name)
    signature = inspect.signature(cls)
    assert next(iter(signature.parameters)) == "params"
    assert set(cls.spec.fields) <= set(signature.parameters)
    assert not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    opt = cls(parameters().values())
    assert isinstance(opt, torch.optim.Optimizer)
    assert all(field in opt.defaults and field in opt.param_groups[0] for field in cls.spec.fields)
    assert repr(opt).startswith(f"{name} (\nParameter Group 0\n")
    with pytest.raises(TypeError, match="typo"):
        cls(parameters().values(), typo=1)


@every
def test_words_of_torch_optim_for_how_to_step(name):
    """nanoGPT and its like pass fused=; both are taken, and the report says that they decide nothing."""
    cls = getattr(ours, name)
    for given in ({"fused": True}, {"foreach": False}, {"fused": False, "foreach": True}, {"differentiable": False}):
        one, other = parameters(), parameters()
        opt = cls(one.values(), **given)
        for params, each in ((one, opt), (other, cls(other.values()))):
            for p in params.values():
                p.grad = torch.full_like(p, 0.1)
            each.step()
        assert same(bits(one), bits(other))
        assert all(("makes no difference" in why) is ("differentiable" not in given) for why in opt.engine_report().values())
    with pytest.raises(RuntimeError, match="fused and foreach"):
        cls(parameters().values(), fused=True, foreach=True)
    with pytest.raises(ValueError, match=rf"{name}: differentiable=True is not done here"):
        cls(parameters().values(), differentiable=True)


@every
@on_engines
def test_maximize_is_the_step_on_the_negated_gradient(name, engine):
    up, down = parameters(), parameters()
    a, b = make(name, up.items(), engine=engine, maximize=True), make(name, down.items(), engine=engine)
    for t in range(3):
        give_gradients(up, t)
        give_gradients(down, t)
        for p in down.values():
            p.grad.neg_()
        a.step()
        b.step()
    assert same(bits(up), bits(down))
    for group in a.param_groups:
        group["maximize"] = False  # read at every step
    run(a, up, 3, 4)
    run(b, down, 3, 4)
    assert same(bits(up), bits(down))


def test_hooks():
    params, log = parameters(), []
    opt = ours.AdamW(params.values())
    handles = [
        opt.register_step_pre_hook(lambda *_: log.append("before")),
        opt.register_step_post_hook(lambda *_: log.append("after")),
    ]
    run(opt, params, 0, 1)
    assert log == ["before", "after"]
    for handle in handles:
        handle.remove()
    run(opt, params, 1, 2)
    assert len(log) == 2

    opt.register_state_dict_post_hook(lambda _, saved: saved | {"note": 1})
    saved = opt.state_dict()
    assert saved["note"] == 1
    fresh = ours.AdamW(parameters().values())
    fresh.register_load_state_dict_pre_hook(
        lambda _, loaded: loaded | {"param_groups": [g | {"lr": 0.5} for g in loaded["param_groups"]]}
    )
    fresh.register_load_state_dict_post_hook(lambda o: log.append(o.param_groups[0]["lr"]))
    fresh.load_state_dict(saved)
    assert log[-1] == 0.5
    assert saved["param_groups"][0]["lr"] == 1e-3


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[g["lr"] for g in o.param_groups], total_steps=20),
    "Plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_schedulers_do_what_they_do_to_torch_optim(schedule, name):
    settings = dict(lr=0.01, momentum=0.9) if name == "SGD" else dict(lr=0.01, weight_decay=0.0)
    params = parameters()
    others, start = twins(params), bits(params)
    pairs = [
        (getattr(ours, name)(params.values(), **settings), params),
        (getattr(torch.optim, name)(others.values(), **settings), others),
    ]
    schedulers = [SCHEDULERS[schedule](opt) for opt, _ in pairs]
    for t in range(12):
        for (opt, tensors), scheduler in zip(pairs, schedulers, strict=True):
            run(opt, tensors, t, t + 1)
            scheduler.step(1.0) if schedule == "Plateau" else scheduler.step()
        mine, theirs = pairs[0][0].param_groups[0], pairs[1][0].param_groups[0]
        assert all(mine[k] == theirs[k] for k in ("lr", "betas" if name == "AdamW" else "momentum"))
    assert distance(params, others, start) <= 1e-5


def test_schedulers_see_the_learning_rate_of_otherwise():
    model = network(True)
    opt = ours.Muon(model, lr=0.02, otherwise=rlx_optim.AdamW(lr=1e-3))
    assert [(g["rule"], g["lr"]) for g in opt.param_groups] == [("muon", 0.02), ("adamw", 1e-3)]
    scheduler = lr_scheduler.LambdaLR(opt, [lambda t: 0.5**t, lambda t: 0.1**t])
    for _ in range(2):
        opt.step()
        scheduler.step()
    np.testing.assert_allclose([g["lr"] for g in opt.param_groups], [0.02 / 4, 1e-5], rtol=1e-12)
    assert scheduler.get_last_lr() == [g["lr"] for g in opt.param_groups]


def test_a_learning_rate_may_be_a_tensor_of_one_element():
    params, others = parameters(), parameters()
    rate = torch.tensor(0.01, dtype=torch.float64)
    a, b = ours.AdamW(params.values(), lr=rate), ours.AdamW(others.values(), lr=0.01)
    run(a, params, 0, 2)
    run(b, others, 0, 2)
    rate.mul_(0.5)  # read at every step
    b.param_groups[0]["lr"] = 0.005
    run(a, params, 2, 4)
    run(b, others, 2, 4)
    assert same(bits(params), bits(others))
    with pytest.raises(ValueError, match=r"Tensor lr must be 1-element, got shape \(2,\)"):
        ours.AdamW(params.values(), lr=torch.tensor([0.1, 0.2]))


def test_compiled_models_train_the_same():
    results = []
    for compiled in (False, True):
        model = network(True)
        opt = ours.Muon(model)
        forward = torch.compile(model, backend="eager") if compiled else model
        for t in range(3):
            opt.zero_grad()
            forward(torch.randn(4, 12, generator=torch.Generator().manual_seed(t))).pow(2).mean().backward()
            opt.step()
        results.append(bits(dict(model.named_parameters())))
    assert same(*results)


def test_grad_scaler_hands_over_scale_and_verdict():
    params, others = parameters(), parameters()
    scaled, plain = ours.AdamW(params.values(), amp_scaling=True), ours.AdamW(others.values())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.ones(()))
    for t in range(3):
        run(plain, others, t, t + 1)
        give_gradients(params, t)
        for p in params.values():
            p.grad.mul_(1024.0)
        scaler.step(scaled)
        scaler.update()
    assert same(bits(params), bits(others))
    assert not hasattr(scaled, "grad_scale")
    before, state = bits(params), copy.deepcopy(scaled.state_dict())
    give_gradients(params, 3)
    params["w"].grad[0, 0] = torch.inf
    scaler.step(scaled)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert same(before, bits(params))
    assert same_state(state, scaled.state_dict())


def test_a_step_is_seen_by_autograd():
    for engine in ENGINES:
        w = nn.Parameter(torch.randn(3, 3))
        opt = ours.AdamW([w], engine=engine)
        loss = (w * w).sum()  # keeps w for backward
        w.grad = torch.ones_like(w)
        version = w._version
        opt.step()
        assert w._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- state ---------------------------------------------------------------------------------------------------------------------
W, B = (6, 4), (5,)


def slots(names, shape, **others):
    return dict.fromkeys(names.split(), shape) | others


ADAM = "exp_avg exp_avg_sq"
AVERAGING = {"weight_sum": (), "lr_max": (), "momentum": ()}
#: what the state of a 6×4 and of a 5 parameter holds beside "step", from the start
STATE = {
    "SGD": (slots("momentum_buffer", W, started=()), slots("momentum_buffer", B, started=())),
    "Adam": (slots(f"{ADAM} max_exp_avg_sq", W), slots(f"{ADAM} max_exp_avg_sq", B)),
    **dict.fromkeys(("AdamW", "RAdam", "QHAdamW", "Lamb"), (slots(ADAM, W), slots(ADAM, B))),
    **dict.fromkeys(("StableAdamW", "ADOPT"), (slots(ADAM, W), slots(ADAM, B))),
    "AdEMAMix": tuple(slots("exp_avg_fast exp_avg_slow exp_avg_sq", shape) for shape in (W, B)),
    "Adan": tuple(slots(f"{ADAM} exp_avg_diff neg_pre_grad", shape) for shape in (W, B)),
    "LaProp": (slots(ADAM, W, lr_average=()), slots(ADAM, B, lr_average=())),
    "LARS": (slots("momentum_buffer", W), slots("momentum_buffer", B)),
    "NAdamW": (slots(ADAM, W, mu_product=()), slots(ADAM, B, mu_product=())),
    "Adafactor": ({"row_var": (6, 1), "col_var": (1, 4)}, {"variance": B}),
    "Lion": (slots("exp_avg", W), slots("exp_avg", B)),
    "SOAP": (slots(ADAM, W, L1=(6, 6), L2=(4, 4), Q1=(6, 6), Q2=(4, 4)), slots(ADAM, B)),
    "KronPSGD": (slots("momentum_buffer", W, q1=(6, 6), q2=(4, 4), counter=()), slots("momentum_buffer", B, q1=(5,), counter=())),
    "Muon": (slots("momentum_buffer", W), slots(ADAM, B)),
    "Sophia": (slots("exp_avg hessian", W, estimates=()), slots("exp_avg hessian", B, estimates=())),
    "MARS": (slots(f"{ADAM} last_grad", W), slots(ADAM, B)),
    "Prodigy": tuple(slots(f"{ADAM} s start", shape, d=(), d_max=(), gained=()) for shape in (W, B)),
    "NorMuon": (slots("momentum_buffer", W, second_momentum_buffer=(6,)), slots(ADAM, B)),
    "Scion": (slots("momentum_buffer", W), slots("momentum_buffer", B)),
    "ScheduleFreeAdamW": (slots("lead exp_avg_sq", W, **AVERAGING), slots("lead exp_avg_sq", B, **AVERAGING)),
    "ScheduleFreeSGD": (slots("lead", W, **AVERAGING), slots("lead", B, **AVERAGING)),
}


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_is_there_from_the_start(name, dtype):
    params = parameters(dtype, {"w": W, "b": B})
    opt = make(name, params.items())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for p, expected in zip(params.values(), STATE[name], strict=True):
        state = opt.state[p]
        assert {k: tuple(v.shape) for k, v in state.items()} == {"step": (), **expected}
        assert float(state["step"]) == 0
        assert state["step"].dtype == torch.float64
        assert all(v.dtype == wide for v in state.values() if v.ndim)
        assert not any(v.requires_grad for v in state.values())
    keys = {p: list(opt.state[p]) for p in params.values()}
    run(opt, params, 0, 2)
    assert {p: list(opt.state[p]) for p in params.values()} == keys


@every
def test_distributed_checkpoint_takes_no_hidden_step(name):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

    model, other = network(True), network(True)
    opt, reference = make(name, model), make(name, other)
    for flat in (False, True):
        get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    assert same_state(opt.state_dict(), reference.state_dict())
    params, others = dict(model.named_parameters()), dict(other.named_parameters())
    run(opt, params, 0, 3)
    run(reference, others, 0, 3)
    assert same(bits(params), bits(others))
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
        clone = copy.deepcopy(model)
        taken = make(name, clone)
        set_optimizer_state_dict(clone, taken, saved, options=options)
        assert same_state(taken.state_dict(), opt.state_dict())


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_resume_is_bitwise(name, dtype):
    params = parameters(dtype)
    opt = make(name, params.items())
    run(opt, params, 0, 4)
    resumed = twins(params)
    other = getattr(ours, name)(resumed.items(), lr=0.123)  # settings, too, are the checkpoint's
    other.load_state_dict(through_disk(opt.state_dict()))
    run(opt, params, 4, 9)
    run(other, resumed, 4, 9)
    assert same(bits(params), bits(resumed))
    assert same_state(opt.state_dict(), other.state_dict())
    assert [g | {"params": 0} for g in opt.param_groups] == [g | {"params": 0} for g in other.param_groups]


@every
def test_loading_shares_no_memory_and_leaves_its_argument_alone(name):
    params = parameters()
    opt = make(name, params.items())
    run(opt, params, 0, 2)
    live, before = opt.state_dict(), copy.deepcopy(opt.state_dict())
    others = twins(params)
    other = make(name, others.items())
    other.load_state_dict(live)
    run(other, others, 2, 4)
    assert same_state(opt.state_dict(), before)
    assert opt.state_dict()["param_groups"] == before["param_groups"]
    assert not same_state(other.state_dict(), before)


def wrong_shape(saved):
    saved["state"][0]["exp_avg"] = torch.zeros(4, 6)


def no_tensor(saved):
    saved["state"][0]["exp_avg"] = 3.0


def missing_slot(saved):
    del saved["state"][1]["exp_avg_sq"]


def only_the_step(saved):
    saved["state"][1] = {"step": torch.tensor(3.0)}


def unknown_rule(saved):
    saved["param_groups"][0]["rule"] = "lion"


def bad_setting(saved):
    saved["param_groups"][0]["betas"] = (0.9, 1.0)


def fewer_parameters(saved):
    saved["param_groups"][0]["params"].pop()


def more_groups(saved):
    saved["param_groups"] *= 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_shape, r"'exp_avg' of w has shape \(4, 6\) in the checkpoint, needed is \(6, 4\)"),
        (no_tensor, r"'exp_avg' of w has shape 3.0 in the checkpoint, needed is \(6, 4\)"),
        (missing_slot, "state of b lacks 'exp_avg_sq'"),
        (only_the_step, "state of b lacks 'exp_avg'"),
        (unknown_rule, "a group is for rule 'lion'; known are 'adamw'"),
        (bad_setting, "betas must be 2 finite numbers, each >= 0 and < 1"),
        (fewer_parameters, "doesn't match the size of optimizer's group"),
        (more_groups, "different number of parameter groups"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_bad_checkpoint_is_refused_and_nothing_is_lost(spoil, message):
    params = parameters(shapes={"w": W, "b": B})
    opt = ours.AdamW(params.items())
    run(opt, params, 0, 2)
    before = copy.deepcopy(opt.state_dict())
    spoiled = copy.deepcopy(before)
    spoil(spoiled)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(spoiled)
    assert same_state(opt.state_dict(), before)
    assert opt.state_dict()["param_groups"] == before["param_groups"]
    others = twins(params)
    other = ours.AdamW(others.items())
    other.load_state_dict(before)
    run(opt, params, 2, 4)
    run(other, others, 2, 4)
    assert same(bits(params), bits(others))


def test_more_state_and_older_checkpoints():
    params = parameters(shapes={"w": W})
    opt = ours.SGD(params.items(), lr=0.1)
    run(opt, params, 0, 2)
    assert "momentum_buffer" not in opt.state[params["w"]]
    opt.param_groups[0]["momentum"] = 0.9  # from now on: the state grows
    run(opt, params, 2, 4)
    assert opt.state[params["w"]]["momentum_buffer"].abs().sum() > 0
    saved = copy.deepcopy(opt.state_dict())
    del saved["param_groups"][0]["maximize"]  # older than the setting
    saved["state"][0]["step"] = 4  # a number
    saved["state"][0]["mine"] = torch.ones(3)  # and the user's own
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["maximize"] is False
    assert torch.equal(opt.state[params["w"]]["mine"], torch.ones(3))
    assert torch.equal(opt.state[params["w"]]["step"], torch.tensor(4.0))


@every
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_copies_go_on_alike(name, how, scheduled):
    params = parameters()
    opt = make(name, params.items())
    run(opt, params, 0, 2)
    if scheduled:
        lr_scheduler.StepLR(opt, 100)  # wraps opt.step: the copy must not step the original
    others, other = copy.deepcopy((params, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((params, opt)))
    before = bits(params)
    run(other, others, 2, 4)
    assert same(bits(params), before)
    run(opt, params, 2, 4)
    assert same(bits(params), bits(others))
    assert other.routing_report() == opt.routing_report()


# ---- groups and state are the truth --------------------------------------------------------------------------------------------
def test_late_groups():
    params = parameters()
    opt = ours.AdamW([params["w"]])
    run(opt, {"w": params["w"]}, 0, 2)
    opt.add_param_group({"params": [params["b"], params["s"]], "lr": 0.1})
    assert "exp_avg" in opt.state[params["b"]]
    before = bits(params)
    run(opt, params, 2, 3)
    assert {k for k in params if not torch.equal(before[k], params[k])} == {"w", "b", "s"}
    assert {k: float(opt.state[params[k]]["step"]) for k in ("w", "b", "s")} == {"w": 3, "b": 1, "s": 1}
    assert len(opt.state_dict()["state"]) == 3


def test_a_refused_group_leaves_nothing_behind():
    w = nn.Parameter(torch.randn(3, 3))
    opt = ours.Muon([w])
    for bad in (
        [nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.zeros(3, dtype=torch.complex64))],  # the second goes elsewhere
        [nn.Parameter(torch.randn(2, 2)), w],
        [nn.Parameter(torch.randn(2)), torch.ones(2) * nn.Parameter(torch.ones(2))],
    ):
        with pytest.raises(ValueError, match=r"complex64|more than one parameter group|non-leaf"):
            opt.add_param_group({"params": bad})
        assert len(opt.param_groups) == len(opt.state) == 1


def test_what_others_put_into_groups_and_state_counts():
    params = parameters(shapes={"a": (4, 3), "b": (4, 3)})
    opt = ours.AdamW([params["a"]], betas=[0.9, 0.99])
    run(opt, {"a": params["a"]}, 0, 2)

    opt.param_groups[0]["betas"] = [0.9, 0.99]
    run(opt, {"a": params["a"]}, 2, 3)
    reference = copy.deepcopy(opt)
    opt.param_groups[0]["betas"][0] = 0.0  # inside the list
    reference.param_groups[0]["betas"] = (0.0, 0.99)
    opt.state[params["a"]]["step"].zero_()  # in place
    twin_of_a = reference.param_groups[0]["params"][0]
    reference.state[twin_of_a]["step"] = torch.tensor(0.0)  # or another tensor
    reference.state[twin_of_a] = dict(reference.state[twin_of_a])  # or another dict
    run(opt, {"a": params["a"]}, 3, 5)
    run(reference, {"a": twin_of_a}, 3, 5)
    assert torch.equal(params["a"], twin_of_a)
    assert float(opt.state[params["a"]]["step"]) == 2
    assert float(reference.state[twin_of_a]["step"]) == 2

    opt.param_groups[0]["params"][0] = params["b"]  # another parameter in its place
    before = bits(params)
    run(opt, params, 5, 6)
    assert torch.equal(before["a"], params["a"])
    assert not torch.equal(before["b"], params["b"])
    assert float(opt.state[params["b"]]["step"]) == 1

    opt.state.clear()  # a fresh start
    run(opt, {"b": params["b"]}, 6, 7)
    assert float(opt.state[params["b"]]["step"]) == 1
    opt.state[params["b"]]["exp_avg"] = torch.zeros(4, 3, dtype=torch.float64)
    give_gradients({"b": params["b"]}, 7)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of shape \(4, 3\) must be contiguous, .* torch.float32"):
        opt.step()


def test_state_does_not_follow_the_default_device():
    w = nn.Parameter(torch.randn(3, 3))
    with torch.device("meta"):
        opt = ours.KronPSGD([w])
    assert {v.device.type for v in opt.state[w].values()} == {"cpu"}


# ---- routing -------------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)  # a hidden matrix whatever it is called


class Gpt(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.lm_head = nn.Linear(8, 11, bias=False)  # made first: the last Linear is not always the head
        self.stem = nn.Conv2d(1, 4, 3)
        self.wte = nn.Embedding(11, 8)
        self.h = nn.ModuleList([Block(8)])
        self.norm = nn.LayerNorm(8)
        if tied:
            self.lm_head.weight = self.wte.weight


def table(opt):
    rows = [line.split(None, 3) for line in opt.routing_report().splitlines()[1:]]
    return {row[0]: (row[2], *row[3:]) for row in rows}


def one_d(rule="Muon", dims=1, takes="2 or more"):
    return ("AdamW", f"{dims} dimensions; {rule} takes {takes}")


MODEL = {
    "stem.weight": ("Muon",),
    "stem.bias": one_d(),
    "wte.weight": ("AdamW", "embedding (Embedding)"),
    "h.0.norm.weight": one_d(),
    "h.0.norm.bias": one_d(),
    "h.0.qkv.weight": ("Muon",),
    "h.0.output.weight": ("Muon",),
    "h.0.output.bias": one_d(),
    "norm.weight": one_d(),
    "norm.bias": one_d(),
    "lm_head.weight": ("AdamW", "output head (by name)"),
}
BY_NAME = MODEL | {
    "wte.weight": ("AdamW", "embedding (by name)"),
    "lm_head.weight": ("AdamW", "output head (by name)"),
}


@pytest.mark.parametrize(
    ("tied", "what", "settings", "expected"),
    [
        (False, "model", {}, MODEL),
        (
            True,
            "model",
            {},
            {k: v for k, v in MODEL.items() if k != "wte.weight"} | {"lm_head.weight": ("AdamW", "tied weight (2 uses)")},
        ),
        (False, "names", {}, BY_NAME),
        (
            False,
            "model",
            dict(route={"stem.*": "otherwise"}),
            MODEL | dict.fromkeys(("stem.weight", "stem.bias"), ("AdamW", "matches 'stem.*'")),
        ),
        (False, "model", dict(route={"lm_head.weight": "own"}), MODEL | {"lm_head.weight": ("Muon",)}),
        (
            False,
            "model",
            dict(route={"*.bias": "own", "*": "otherwise"}),
            {k: one_d() if k.endswith("bias") else ("AdamW", "matches '*'") for k in MODEL},
        ),
        (
            False,
            "names",
            dict(route=lambda name, p: p.shape[0] != 24 if p.ndim == 2 else None),  # everything 2-D but qkv
            BY_NAME | {"h.0.qkv.weight": ("AdamW", "route"), "wte.weight": ("Muon",), "lm_head.weight": ("Muon",)},
        ),
    ],
    ids=["untied", "tied", "by name", "glob to otherwise", "glob to own", "first pattern wins", "predicate"],
)
def test_muon_routes(tied, what, settings, expected):
    model = Gpt(tied)
    opt = ours.Muon(model if what == "model" else model.named_parameters(), **settings)
    assert table(opt) == expected
    assert sum(len(g["params"]) for g in opt.param_groups) == len(expected)
    assert len(opt.param_groups) == len({v[0] for v in expected.values()})


def test_mars_routes():
    expected = {k: one_d("MARS", 1, "2") if v == one_d() else v for k, v in MODEL.items()}
    expected |= {"h.0.qkv.weight": ("MARS",), "h.0.output.weight": ("MARS",), "stem.weight": one_d("MARS", 4, "2")}
    assert table(ours.MARS(Gpt(False))) == expected


def test_soap_and_kronpsgd_take_everything_unless_told():
    for cls in (ours.SOAP, ours.KronPSGD):
        assert set(table(cls(Gpt(False))).values()) == {(cls.__name__,)}
        split = table(cls(Gpt(False), otherwise=rlx_optim.Lion(lr=1e-4)))
        assert split["wte.weight"] == ("Lion", "embedding (Embedding)")
        assert split["h.0.qkv.weight"] == (cls.__name__,)


def test_hidden_layers_called_output_and_models_without_a_head():
    bert = ours.Muon(
        [(f"encoder.layer.0.{k}.weight", nn.Parameter(torch.zeros(4, 4))) for k in ("attention.output.dense", "mlp.fc_out")]
    )
    assert set(table(bert).values()) == {("Muon",)}
    top = ours.Muon([(f"{k}.weight", nn.Parameter(torch.zeros(4, 4))) for k in ("output", "model.fc_out", "layers.0.w1")])
    assert [v[0] for v in table(top).values()] == ["Muon", "AdamW", "AdamW"]
    plain = table(ours.Muon(network(False)))
    assert plain["4.weight"] == ("AdamW", "output head (the last Linear, 4)")
    assert plain["2.weight"] == ("Muon",)
    assert table(ours.Muon(nn.Linear(4, 4, bias=False))) == {"weight": ("Muon",)}


def test_plain_lists_go_by_shape_and_1d_alone_is_fine():
    matrix, vector = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    opt = ours.Muon([matrix, vector])
    assert [(g["rule"], g["params"]) for g in opt.param_groups] == [("muon", [matrix]), ("adamw", [vector])]
    only = ours.Muon([vector])
    assert [g["rule"] for g in only.param_groups] == ["adamw"]
    give_gradients({"v": vector}, 0)
    before = vector.detach().clone()
    only.step()
    assert not torch.equal(before, vector)


def test_groups_and_late_groups_are_routed_too():
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (3, 3), "b.bias": (3,), "embed.weight": (9, 3)}
    params = parameters(shapes=shapes)
    a, b = ([(k, p) for k, p in params.items() if k.startswith(x)] for x in ("a", "b"))
    opt = ours.Muon([{"params": a, "lr": 0.5, "tag": "first"}], otherwise=rlx_optim.Lion(lr=1e-3))
    opt.add_param_group({"params": b})
    opt.add_param_group({"params": [("embed.weight", params["embed.weight"])]})
    opt.add_param_group({"params": [("c", nn.Parameter(torch.ones(2, 2)))], "rule": "lion", "lr": 1e-4})  # the user says
    assert [(g["rule"], g["lr"], g.get("tag"), g["param_names"]) for g in opt.param_groups] == [
        ("muon", 0.5, "first", ["a.weight"]),
        ("lion", 0.5, "first", ["a.bias"]),  # what the group itself says
        ("muon", 0.02, None, ["b.weight"]),
        ("lion", 1e-3, None, ["b.bias"]),
        ("lion", 1e-3, None, ["embed.weight"]),
        ("lion", 1e-4, None, ["c"]),
    ]
    before = bits(params)
    run(opt, params, 0, 1)
    assert not any(torch.equal(before[k], params[k]) for k in params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(route={"nowhere.*": "otherwise"}), r"route pattern 'nowhere\.\*' matches no parameter name"),
        (dict(split={"nowhere.*": 3}), r"split pattern 'nowhere\.\*' matches no parameter name"),
        (dict(route={"*": "elsewhere"}), "route sends to \"own\", \"otherwise\" or an optimizer .*, got 'elsewhere'"),
        (dict(otherwise=None), "give otherwise="),
        (dict(otherwise=None, route={"*": "otherwise"}), "there is no otherwise"),
        (dict(split={"2.weight": 3}), r"'2.weight': shape \(16, 16\) cannot be split into 3 equal matrices"),
        (dict(split={"2.weight": 0}), "split of '2.weight' must be an integer >= 1, got 0"),
        (dict(otherwise=rlx_optim.AdamW(lr=lambda t: 0.1)), "otherwise has a schedule for 'lr'"),
        (dict(otherwise=rlx_optim.AdamW(groups=[{"match": "*", "lr": 0.1}])), "otherwise has groups of its own"),
        (dict(otherwise=rlx_optim.MARS()), "otherwise must take every tensor itself"),
    ],
)  # fmt: skip
def test_routing_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        ours.Muon(network(True), **settings)


def test_routing_refuses_what_is_no_route():
    with pytest.raises(TypeError, match="route must be a dict of patterns or a function"):
        ours.Muon(network(True), route="*.bias")
    with pytest.raises(TypeError, match="otherwise must be like"):
        ours.Muon(network(True), otherwise=torch.optim.AdamW)
    with pytest.raises(ValueError, match="'s': a parameter without dimensions cannot be split"):
        ours.Muon([("s", nn.Parameter(torch.ones(())))], split={"s": 3})


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
@on_engines
@pytest.mark.parametrize(("shape", "pieces"), [((24, 8), 3), ((3, 8, 8), 3), ((2, 3, 4, 5), 6), ((3, 8, 8), 6)])
def test_split_equals_separate_parameters(name, engine, shape, pieces):
    whole = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    inner = {(24, 8): (8, 8), (2, 3, 4, 5): (4, 5), (3, 8, 8): (8, 8) if pieces == 3 else (4, 8)}[shape]
    parts = [nn.Parameter(part.clone()) for part in whole.detach().reshape(pieces, *inner)]
    opt = make(name, [("a.qkv.weight", whole)], engine=engine, split={"*.qkv.weight": pieces})
    apart = make(name, parts, engine=engine)
    assert opt.param_groups[0]["rule"] == name.lower()
    for t in range(5):
        give_gradients({"w": whole}, t)
        for part, grad in zip(parts, whole.grad.reshape(pieces, *inner), strict=True):
            part.grad = grad.clone()
        opt.step()
        apart.step()
    assert torch.equal(whole.reshape(pieces, *inner), torch.stack([p.detach() for p in parts]))
    resumed = nn.Parameter(whole.detach().clone())
    other = make(name, [resumed], engine=engine)  # the split is in the checkpoint
    other.load_state_dict(through_disk(opt.state_dict()))
    for o, p in ((opt, whole), (other, resumed)):
        run(o, {"w": p}, 5, 8)
    assert torch.equal(whole, resumed)


def test_split_experts_are_matrices_to_mars():
    experts = nn.Parameter(torch.randn(4, 6, 5))
    assert table(ours.MARS([("experts", experts)]))["experts"][0] == "AdamW"
    assert table(ours.MARS([("experts", experts)], split={"experts": 4}))["experts"] == ("MARS",)


# ---- Sophia --------------------------------------------------------------------------------------------------------------------
@on_engines
def test_hutchinson_is_exact_on_a_diagonal_hessian(engine):
    params = parameters(torch.float64)
    opt = ours.Sophia(params.values(), engine=engine, betas=(0.9, 0.5))
    scales, loss = curvature(params, 1)
    grads = {k: p.grad for k, p in params.items()}
    generator = torch.get_rng_state()
    assert opt.update_hessian(loss) is True
    assert torch.equal(generator, torch.get_rng_state())
    assert {k: p.grad for k, p in params.items()} == grads  # gradients are left alone
    for p, c in zip(params.values(), scales, strict=True):
        assert torch.equal(opt.state[p]["hessian"], 0.5 * c)
        assert float(opt.state[p]["estimates"]) == 1
    opt.update_hessian(loss)
    for p, c in zip(params.values(), scales, strict=True):
        torch.testing.assert_close(opt.state[p]["hessian"], 0.75 * c, rtol=1e-15, atol=0)


def test_hutchinson_averages_to_the_diagonal_of_any_hessian():
    matrix = torch.tensor([[2.0, 0.5, -1.0], [0.5, 1.0, 0.3], [-1.0, 0.3, 4.0]])
    w = nn.Parameter(torch.randn(3))
    opt = ours.Sophia([w], betas=(0.9, 0.0))
    total = torch.zeros(3)
    for _ in range(600):
        opt.update_hessian(lambda: w @ matrix @ w / 2)
        total += opt.state[w]["hessian"]
    torch.testing.assert_close(total / 600, matrix.diagonal(), atol=0.2, rtol=0)


def test_hutchinson_where_the_loss_is_linear_or_does_not_reach():
    bent, flat, apart = (nn.Parameter(torch.ones(3)) for _ in range(3))
    opt = ours.Sophia([bent, flat, apart], betas=(0.9, 0.0))
    assert opt.update_hessian(lambda: (bent**2).sum() + flat.sum())
    assert [float(opt.state[p]["estimates"]) for p in (bent, flat, apart)] == [1, 1, 0]
    assert [float(opt.state[p]["hessian"].sum()) for p in (bent, flat)] == [6, 0]
    assert opt.update_hessian(flat.sum)  # nothing curved at all


def test_every_tenth_step():
    params = parameters()
    opt = ours.Sophia(params.values())
    worked = []
    for t in range(25):
        calls = []
        _, loss = curvature(params, t)
        worked.append(opt.update_hessian(lambda loss=loss, calls=calls: (calls.append(1), loss())[1], every=10))
        assert len(calls) == worked[-1]
        give_gradients(params, t)
        opt.step()
    assert [t for t in range(25) if worked[t]] == [0, 10, 20]
    with pytest.raises(ValueError, match="every must be at least 1"):
        opt.update_hessian(lambda: None, every=0)


def test_sophia_resumes_bit_for_bit_with_its_seed():
    def loss(tensors):  # a Hessian that is not diagonal: the signs matter
        return sum((p.sum() ** 2 + (p**4).sum()) for p in tensors.values())

    results = {}
    for seed in (0, 7):
        params = parameters()
        opt = ours.Sophia(params.values(), hessian_seed=seed)
        for t in range(6):
            if t == 3:
                taken = twins(params)
                resumed = ours.Sophia(taken.values())  # made with seed 0
                resumed.load_state_dict(through_disk(opt.state_dict()))
                assert resumed.hessian_seed == seed
            for o, tensors in [(opt, params)] + ([(resumed, taken)] if t >= 3 else []):
                o.update_hessian(lambda tensors=tensors: loss(tensors))
                give_gradients(tensors, t)
                o.step()
        assert same(bits(params), bits(taken))
        assert same_state(opt.state_dict(), resumed.state_dict())
        results[seed] = bits(params)
    assert not same(results[0], results[7])
    with pytest.raises(ValueError, match="hessian_seed must be an integer >= 0"):
        ours.Sophia(params.values(), hessian_seed=-1)


def test_estimates_through_another_object_on_the_same_state_count():
    """Lightning's optimizer wrappers are shallow copies."""
    params, others = parameters(), parameters()
    opt, plain = ours.Sophia(params.values()), ours.Sophia(others.values())
    for t in range(4):
        copy.copy(opt).update_hessian(curvature(params, t)[1])
        plain.update_hessian(curvature(others, t)[1])
        for o, tensors in ((opt, params), (plain, others)):
            give_gradients(tensors, t)
            o.step()
    assert same(bits(params), bits(others))
    assert same_state(opt.state_dict(), plain.state_dict())


def test_an_estimate_that_is_not_finite():
    w = nn.Parameter(torch.zeros(3))
    for policy, message in (("raise", "not finite"), ("skip", "")):
        opt = ours.Sophia([w], nonfinite=policy)
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            assert opt.update_hessian(lambda: (w.abs() + 1e-30).log().pow(3).sum() * 1e30) is False
        assert torch.equal(opt.state[w]["hessian"], torch.zeros(3))
    assert opt.skipped == 1


# ---- gradient release ----------------------------------------------------------------------------------------------------------
@every
@on_engines
def test_attached_steps_are_the_same_and_free_the_gradients(name, engine):
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    model, other = network(True), network(True)
    attached, plain = make(name, model, engine=engine), make(name, other, engine=engine)
    if name == "Prodigy":
        with pytest.raises(ValueError, match="Prodigy: attach steps parameters one by one, but its rule reduces over all"):
            attached.attach(model)
        return
    detach = attached.attach(model)
    for _ in range(4):
        model(x).pow(2).mean().backward()
        assert all(p.grad is None for p in model.parameters())
        attached.step()  # finds nothing left to do
        other(x).pow(2).mean().backward()
        plain.step()
        plain.zero_grad()
    assert same(bits(dict(model.named_parameters())), bits(dict(other.named_parameters())))
    assert same_state(attached.state_dict(), plain.state_dict())
    detach()
    before = bits(dict(model.named_parameters()))
    model(x).pow(2).mean().backward()
    assert same(before, bits(dict(model.named_parameters())))
    assert all(p.grad is not None for p in model.parameters())


def test_attach_refuses_strangers_and_follows_schedulers():
    model = network(True)
    with pytest.raises(ValueError, match="1 parameters of the model are not in this optimizer"):
        ours.AdamW(list(model.parameters())[:-1]).attach(model)
    opt = ours.SGD(model.parameters(), lr=0.1)
    opt.attach(model)
    before = bits(dict(model.named_parameters()))
    opt.param_groups[0]["lr"] = 0.0
    model(torch.ones(2, 12)).sum().backward()
    assert same(before, bits(dict(model.named_parameters())))
    assert all(float(opt.state[p]["step"]) == 1 for p in model.parameters())


# ---- refusals ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "settings", "error", "message"),
    [
        (lambda: [nn.Parameter(torch.ones(3, device="meta"))], {}, ValueError, "on the meta device; materialise the model"),
        (lambda: [nn.Parameter(torch.ones(3, dtype=torch.complex64))], {}, ValueError, r"complex64; .*; optimize torch.view_as_real"),
        (lambda: [torch.ones(3, dtype=torch.int64)], {}, ValueError, "has dtype torch.int64; float32, float64, bfloat16 and float16"),
        (lambda: [("w", nn.Parameter(torch.ones(3, dtype=torch.float8_e4m3fn)))], {}, ValueError, "'w' has dtype torch.float8_e4m3fn"),
        (lambda: [Wrapped(torch.ones(3)).requires_grad_()], {}, ValueError, "is a Wrapped; plain tensors and DTensors can be stepped"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(engine="tpu"), ValueError, "unknown engine 'tpu'; known are 'auto', 'cpu', 'torch'"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(nonfinite="ignore"), ValueError, "nonfinite must be one of"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(lr=-1.0), ValueError, "lr must be a finite number >= 0, got -1.0"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(lr=float("nan")), ValueError, "lr must be a finite number >= 0, got nan"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(betas=(0.9, 1.0)), ValueError, "betas must be 2 finite numbers"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(lr="fast"), TypeError, "lr must be a finite number >= 0, got 'fast'"),
        (lambda: [{"params": [nn.Parameter(torch.ones(3))], "lr": -1.0}], {}, ValueError, "lr must be a finite number"),
        (lambda: [{"params": [nn.Parameter(torch.ones(3))], "rule": "lion"}], {}, ValueError, "a group is for rule 'lion'"),
        (lambda: [], {}, ValueError, "empty parameter list"),
        (lambda: nn.Parameter(torch.ones(3)), {}, TypeError, "iterable of"),
        (lambda: [1.0], {}, TypeError, "can only optimize Tensors"),
        (lambda: [nn.Parameter(torch.ones(3)) * 2], {}, ValueError, "non-leaf"),
        (lambda: [{"params": {nn.Parameter(torch.ones(3))}}], {}, TypeError, "ordered collections"),
    ],
)  # fmt: skip
def test_what_cannot_be_optimized_is_refused_at_once(params, settings, error, message):
    with pytest.raises(error, match=message):
        ours.AdamW(params(), **settings)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as sharded ones are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapped(args[0].inner) if "detach" in str(func) else NotImplemented


def sparse(params, opt):
    params["w"].grad = params["w"].grad.to_sparse()


def smaller(params, opt):
    params["w"].data = torch.zeros(2, 2)
    params["w"].grad = torch.zeros(2, 2)


def doubled(params, opt):
    params["w"].grad = None
    params["w"].data = params["w"].data.double()
    params["w"].grad = torch.ones(24, 16, dtype=torch.float64)


def other_gradient(params, opt):
    params["w"].grad.data = torch.zeros(3)


def wrapped_gradient(params, opt):
    params["w"].grad = Wrapped(params["w"].grad)


def moved(params, opt):
    opt._ready()[0][0].device = torch.device("cuda", 1)  # as if the state were there
    opt._again = None


def setting(**values):
    def spoil(params, opt):
        opt.param_groups[0].update(values)

    spoil.__name__ = next(iter(values))
    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (sparse, "w has a sparse gradient; dense ones are needed"),
        (smaller, r"w has now shape \(2, 2\), its state is for \(24, 16\); .* before making the optimizer"),
        (doubled, "w has become torch.float64, its state is torch.float32"),
        (other_gradient, r"of shape \(24, 16\), its gradient on cpu and of shape \(3,\)"),
        (wrapped_gradient, "the gradient of w is a Wrapped, not a tensor"),
        (moved, "w has moved to cpu, its state is on cuda:1; move or cast the model before making the optimizer"),
        (setting(lr=-1.0), "lr must be a finite number >= 0, got -1.0"),
        (setting(lr=None), "lr must be a finite number >= 0, got None"),
        (setting(betas=(0.9,)), "betas must be 2 finite numbers"),
        (setting(weight_decay=float("inf")), "weight_decay must be a finite number"),
        (setting(lr=torch.ones(2)), r"Tensor lr must be 1-element, got shape \(2,\)"),
        (setting(convention="torch"), "convention shapes the state and cannot change in a group"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
@on_engines
def test_a_refused_step_moves_nothing(spoil, message, engine):
    params = parameters()
    opt = ours.NAdamW([{"params": [(k, params[k])]} for k in params], engine=engine)
    run(opt, params, 0, 2)
    give_gradients(params, 2)
    spoil(params, opt)
    before, state = bits(params), copy.deepcopy(opt.state_dict()["state"])
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        opt.step()
    assert same(before, bits(params))
    assert same_state({"state": state}, opt.state_dict())


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("SOAP", "max_precond_dim", 3),
        ("SOAP", "merge_dims", True),
        ("KronPSGD", "memory_save_mode", "all_diag"),
        ("MARS", "variant", "lion"),
    ],
)
def test_what_shapes_the_state_cannot_change(name, field, value):
    params = parameters(shapes={"w": (6, 4)})
    opt = getattr(ours, name)(params.values())
    opt.param_groups[0][field] = value
    give_gradients(params, 0)
    with pytest.raises(ValueError, match=f"{field} shapes the state"):
        opt.step()


@every
@on_engines
def test_nonfinite_policies(name, engine):
    for policy in ("raise", "skip"):
        params = parameters()
        opt = make(name, params.items(), engine=engine, nonfinite=policy)
        run(opt, params, 0, 2)
        give_gradients(params, 2)
        params["conv"].grad[0, 0, 0, 0] = torch.nan
        before, state = bits(params), copy.deepcopy(opt.state_dict())
        with (
            pytest.raises(ValueError, match="gradient of 'conv' is not finite; nothing was stepped")
            if policy == "raise"
            else contextlib.nullcontext()
        ):
            opt.step()
        assert opt.skipped == (policy == "skip")
        assert same(before, bits(params))
        assert same_state(state, opt.state_dict())
    params, others = parameters(), parameters()  # by default a NaN goes through, but stays where it is
    opt, other = make(name, params.items(), engine=engine), make(name, others.items(), engine=engine)
    for t in range(2):
        give_gradients(params, t)
        give_gradients(others, t)
        params["w"].grad[0, 0] = torch.nan
        opt.step()
        other.step()
    assert torch.isnan(params["w"]).any()
    alone = name != "Prodigy"  # whose d is of all tensors
    assert all(torch.equal(params[k], others[k]) == alone for k in params if k != "w")


# ---- reports -------------------------------------------------------------------------------------------------------------------
def test_engine_report():
    half, double = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [
        {"params": [nn.Parameter(torch.ones(2, 2)), half]},
        {"params": [double]},
        {"params": [nn.Parameter(torch.ones(3))], "maximize": True},
    ]
    report = ours.AdamW(groups).engine_report()
    assert list(report) == [
        "2 parameters on cpu, float32 arithmetic",
        "1 parameters on cpu, float64 arithmetic",
        "1 parameters on cpu, float32 arithmetic, maximized",
    ]
    assert all(
        text.startswith("cpu: compiled by numba") and text.endswith("(CPU tensors, numba installed)") for text in report.values()
    )
    (text,) = ours.Muon([half], engine="torch").engine_report().values()
    assert text == "torch: cpu, float32 arithmetic, batched by foreach (asked for)"
    with pytest.raises(ValueError, match="engine 'cpu' cannot step a parameter on cuda:0"):
        ours.engines.choose("cpu", torch.device("cuda", 0), torch.float32)


def test_without_numba_the_torch_engine_takes_over(monkeypatch):
    find = ours.engines.importlib.util.find_spec
    monkeypatch.setattr(ours.engines.importlib.util, "find_spec", lambda name: None if name == "numba" else find(name))
    ours.engines.choose.cache_clear()
    try:
        (text,) = ours.AdamW([nn.Parameter(torch.ones(2))]).engine_report().values()
        assert text.endswith("(numba is not installed (pip install numba))")
        with pytest.raises(ValueError, match="engine 'cpu' cannot run: numba is not installed"):
            ours.AdamW([nn.Parameter(torch.ones(2))], engine="cpu")
    finally:
        ours.engines.choose.cache_clear()


def test_routing_report_is_a_table():
    assert ours.Muon(network(True)).routing_report() == (
        "parameter  shape  rule   why\n"
        "0.weight   16×12  Muon\n"
        "2.weight   16×16  Muon\n"
        "0.bias     16     AdamW  1 dimensions; Muon takes 2 or more\n"
        "2.bias     16     AdamW  1 dimensions; Muon takes 2 or more\n"
        "4.weight   4×16   AdamW  output head (the last Linear, 4)\n"
        "4.bias     4      AdamW  1 dimensions; Muon takes 2 or more"
    )
    assert "(unnamed)" in ours.Muon([nn.Parameter(torch.ones(2, 2))]).routing_report()


# ---- growth --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lamb", "Adafactor", "Sophia", "Muon", "SOAP", "Prodigy", "ScheduleFreeAdamW"])
def test_nothing_grows(name):
    params = parameters(shapes={"w": (6, 4), "b": (5,), "late": (4, 4)})
    opt = make(name, params.items())
    gradients = []
    for t in range(7):
        give_gradients(params, t, missing=("late",) if t == 3 else ())  # bundles change now and then
        gradients.append([p.grad for p in params.values()])

    def steps(n):
        for t in range(n):
            for p, grad in zip(params.values(), gradients[t % 7], strict=True):
                p.grad = grad
            if name == "Sophia" and t % 10 == 0:
                opt.update_hessian(lambda: sum((p * p).sum() for p in params.values()))
            opt.param_groups[0]["lr"] = 1e-4 * (1 + t % 7)
            opt.step()
        gc.collect()

    few, many = (100, 600) if name in ("SOAP", "Muon", "Sophia", "Adafactor") else (300, 1200)
    steps(few)
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    steps(many)
    assert len(gc.get_objects()) - objects < 30
    assert sys.getallocatedblocks() - blocks < many / 2  # Python's free lists fill up; one object a step would be `many`
    if name in ("AdamW", "Muon"):
        tracemalloc.start()
        try:
            steps(few)
            memory = tracemalloc.get_traced_memory()[0]
            steps(many)
            assert tracemalloc.get_traced_memory()[0] - memory < 28 * many  # the smallest object has 28 bytes
        finally:
            tracemalloc.stop()


def test_nothing_is_kept_alive():
    import weakref

    params = parameters()
    opt = ours.Muon(params.items())
    run(opt, params, 0, 2)
    grads = [weakref.ref(p.grad) for p in params.values()]
    opt.zero_grad()
    gc.collect()
    assert not any(ref() is not None for ref in grads)
    alive = weakref.ref(params["w"]), weakref.ref(opt)
    del params, opt
    gc.collect()
    assert alive[0]() is None
    assert alive[1]() is None


def test_import_and_use_are_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ALL:
            params = parameters()
            run(make(name, params.items()), params, 0, 2)
