"""The torch front end: torch.optim's own optimizers, engines, the interface of torch.optim.Optimizer."""

import copy
import functools
import inspect

import numpy as np
import pytest
import torch
from helpers import TORCH as ALL
from torch import nn
from torch.optim import lr_scheduler
from torch_cases import (
    ENGINES,
    SHAPES,
    bits,
    curvature,
    every,
    give_gradients,
    make,
    network,
    on_engines,
    parameters,
    run,
    same,
    same_state,
    through_disk,
    twins,
)

import rlx_optim
import rlx_optim.torch as ours

pytestmark = pytest.mark.usefixtures("one_thread")  # tensors are tiny: a second thread of torch only waits
MATRIX = ("SOAP", "KronPSGD", "Muon", "NorMuon", "Scion")  # engines order the sums of their products differently


def small(dtype=torch.float32, shapes=SHAPES):
    """Parameters whose own rounding does not show beside the steps."""
    return {name: nn.Parameter(p.detach() * 0.1) for name, p in parameters(dtype, shapes).items()}


def distance(got, want, start):
    """max|got − want| over the distance travelled, the worst of all tensors."""
    worst = 0.0
    for k in want:
        g, w, s = (t[k].detach().double() for t in (got, want, start))
        worst = max(worst, float((g - w).abs().max()) / max(float((w - s).abs().max()), 1e-30))
    return worst


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
twin = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.skipif(not hasattr(torch.optim, theirs), reason=f"this torch has no {theirs}"))
        for case, (_, _, theirs, *_) in TWINS.items()
    ],
)


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
    settings["rounding"] = "nearest"
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
