"""The torch front end where it once said one thing and did another: meanings shared with torch.optim, groups, routing, estimates."""

import ast
import collections
import copy
import inspect
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations

import rlx_optim
import rlx_optim.torch as ours
from rlx_optim.registry import OURS
from rlx_optim.torch.engines import KNOWN

TITLES = [kind.title for kind in OURS]
PEERS = {title: title for title in ("SGD", "Adam", "AdamW", "RAdam", "Adafactor", "Muon")} | {"NAdamW": "NAdam"}
RENAMED = {"d": "clip_threshold"}  # the same number under another name
KEYWORDS = {"Adafactor": "beta1 scale_parameter convention", "Muon": "convention", "NAdamW": "convention", "RAdam": "convention"}


def train(opt, params, steps, first=0):
    for t in range(first, first + steps):
        generator = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        opt.step()


def tensors(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes or [(4, 3), (5,)]]


def twins(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


def close(params, others, tolerance=1e-5):
    return all(torch.allclose(p, q, rtol=tolerance, atol=tolerance) for p, q in zip(params, others, strict=True))


# ---- signatures -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("mine", "theirs"), [(m, t) for m, t in PEERS.items() if hasattr(torch.optim, t)])
def test_a_positional_argument_means_what_it_means_in_torch_optim(mine, theirs):
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def places(kind):
        return [RENAMED.get(n, n) for n, p in inspect.signature(kind).parameters.items() if p.kind is either]

    here, there = places(getattr(ours, mine)), places(getattr(torch.optim, theirs))
    assert here == there[: len(here)]
    only_theirs = {"Muon": ["adjust_lr_fn"], "NAdamW": ["decoupled_weight_decay"]}
    assert there[len(here) :] == only_theirs.get(mine, [])
    keywords = inspect.signature(getattr(ours, mine)).parameters
    assert all(keywords[name].kind is inspect.Parameter.KEYWORD_ONLY for name in KEYWORDS.get(mine, "").split())


def test_muons_third_argument_is_weight_decay():
    (group,) = ours.Muon(tensors((4, 3)), 0.02, 0.1).param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.02, 0.1, 0.95)
    with pytest.raises(TypeError, match="too many positional"):
        ours.Muon(tensors((4, 3)), 0.02, 0.1, 0.95, True, (3.4445, -4.7750, 2.0315), 1e-7, 5, "original")


def test_the_stub_has_the_signatures_of_the_classes():
    stub = ast.parse((Path(ours.__file__).parent / "__init__.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert sorted(classes) == sorted(TITLES)
    for title, node in classes.items():
        (init,) = (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
        real = list(inspect.signature(getattr(ours, title).__init__).parameters.values())
        args = init.args
        assert [a.arg for a in args.args] == [p.name for p in real if p.kind is p.POSITIONAL_OR_KEYWORD], title
        assert [a.arg for a in args.kwonlyargs] == [p.name for p in real if p.kind is p.KEYWORD_ONLY], title
        said = dict(zip([a.arg for a in args.args][-len(args.defaults) :], args.defaults, strict=True))
        said |= dict(zip([a.arg for a in args.kwonlyargs], args.kw_defaults, strict=True))
        for p in real[2:]:
            default = ast.literal_eval(said[p.name])
            assert default is ... if p.name == "otherwise" and p.default is not None else default == p.default, (title, p.name)
        types = {a.arg: ast.unparse(a.annotation) for a in args.kwonlyargs}
        assert ast.literal_eval(types["engine"].removeprefix("Literal")) == list(KNOWN)


def test_type_checkers_can_bind_the_methods_that_stay_out_of_graphs():
    """pyright cannot follow torch.compiler.disable; through a function of type F -> F it can."""
    for method in ("step", "state_dict", "load_state_dict"):
        assert inspect.signature(getattr(ours.AdamW, method)).parameters.keys() >= {"self"}
    source = "".join(path.read_text() for path in Path(ours.__file__).parent.rglob("*.py"))
    assert "@torch.compiler.disable" not in source


def test_a_late_group_without_names_says_what_is_wanted():
    model = torch.nn.Linear(3, 2)
    opt = ours.AdamW(model)
    with pytest.raises(ValueError, match="AdamW: the other groups have pairs of name and parameter; give such here too"):
        opt.add_param_group({"params": tensors((2, 2))})
    plain = ours.AdamW(tensors((2, 2)))
    with pytest.raises(ValueError, match="AdamW: the other groups have parameters without names; give such here too"):
        plain.add_param_group({"params": list(model.named_parameters())})
    assert len(opt.param_groups) == len(plain.param_groups) == 1


# ---- checkpoints of torch.optim ----------------------------------------------------------------------------------------------
def saved(kind, **settings):
    params = tensors()
    opt = getattr(torch.optim, kind)(params, lr=0.1, **settings)
    train(opt, params, 2)
    return params, opt


told = pytest.mark.skipif(
    "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters, reason="this torch does not say which decay"
)


@pytest.mark.parametrize(
    ("theirs", "settings", "mine", "how"),
    [
        pytest.param("Adam", {"decoupled_weight_decay": True}, "Adam", "decoupled weight decay .0.1.*AdamW", marks=told),
        pytest.param("AdamW", {}, "Adam", "decoupled weight decay .0.1.*AdamW", marks=told),
        pytest.param("Adam", {}, "AdamW", "coupled weight decay .0.1.*Adam", marks=told),
        ("NAdam", {}, "NAdamW", "coupled weight decay"),
    ],
)
def test_weight_decay_of_the_other_kind_is_refused_and_none_at_all_is_not(theirs, settings, mine, how):
    params, their_opt = saved(theirs, weight_decay=0.1, **settings)
    opt = getattr(ours, mine)(params)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=how):
        opt.load_state_dict(their_opt.state_dict())
    assert opt.state_dict()["param_groups"] == before["param_groups"]
    opt.load_state_dict(saved(theirs, weight_decay=0.0, **settings)[1].state_dict())
    assert opt.param_groups[0]["lr"] == 0.1


TRAVELLERS = [
    ("Adam", "Adam", {"weight_decay": 0.1}),
    ("Adam", "Adam", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("AdamW", "AdamW", {"weight_decay": 0.1}),
    pytest.param("AdamW", "Adam", {"weight_decay": 0.1}, marks=told),  # torch.optim.Adam takes AdamW's word for it
    ("NAdamW", "NAdam", {"weight_decay": 0.1, "convention": "torch"}),
    ("RAdam", "RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", "RAdam", {"weight_decay": 0.1}),
    ("SGD", "SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", "SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adafactor", "Adafactor", {"weight_decay": 0.1, "clip_threshold": 0.5, "maximize": True}),
]


@pytest.mark.parametrize(("mine", "theirs", "settings"), TRAVELLERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_settings_and_state_travel_both_ways_with_their_meaning(mine, theirs, settings, steps):
    params = tensors()
    opt = getattr(ours, mine)(params, lr=0.05, **settings)
    train(opt, params, steps)
    others = twins(params)
    other = getattr(torch.optim, theirs)(others)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(opt, params, 3, steps)
    train(other, others, 3, steps)
    assert close(params, others)
    back = twins(others)
    again = getattr(ours, mine)(back)
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    train(other, others, 3, 9)
    train(again, back, 3, 9)
    assert close(back, others)


def test_a_dampened_average_that_has_not_begun_is_not_handed_on():
    params = tensors((3,))
    opt = ours.SGD(params, lr=1.0, momentum=0.9, dampening=0.5)
    assert "momentum_buffer" in opt.state[params[0]]
    state = opt.state_dict()
    assert "momentum_buffer" not in state["state"][0]
    other = ours.SGD(others := twins(params), lr=1.0, momentum=0.9, dampening=0.5)
    other.load_state_dict(state)
    train(opt, params, 2)
    train(other, others, 2)
    assert torch.equal(params[0], others[0])
    state = opt.state_dict()
    assert torch.equal(state["state"][0]["momentum_buffer"], opt.state[params[0]]["momentum_buffer"])
    del state["state"][0]["momentum_buffer"]  # once begun, it must be there
    with pytest.raises(ValueError, match=r"state 'momentum_buffer' of .* is missing"):
        other.load_state_dict(state)


# ---- Adafactor's epsilon -----------------------------------------------------------------------------------------------------
SMALL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-4}


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("loaded", [False, True])
def test_adafactor_takes_the_epsilon_of_the_parameters_dtype(dtype, engine, loaded):
    """Gradients so small that epsilon decides; half precision rounds torch's state, so it is compared less closely."""
    params = tensors((6, 4), (5,), dtype=dtype)
    others = twins(params)
    opt, other = ours.Adafactor(params, lr=0.5, engine=engine), torch.optim.Adafactor(others, lr=0.5)
    if loaded:
        opt = ours.Adafactor(params, eps=(1e-3, 1e-3), engine=engine)
        opt.load_state_dict(other.state_dict())
    start = twins(params)
    for p, q in zip(params, others, strict=True):
        q.grad = (torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * SMALL[dtype]).to(dtype)
        p.grad = q.grad.clone()
    opt.step()
    other.step()
    for p, q, s in zip(params, others, start, strict=True):
        moved, theirs = (p - s).detach().double().norm(), (q - s).detach().double().norm()
        assert theirs > 0
        assert abs(moved / theirs - 1) < (0.1 if torch.finfo(dtype).eps > 1e-6 else 1e-5), float(moved / theirs)


def test_one_group_may_hold_several_dtypes(tmp_path):
    def mixed():
        return [("a", tensors((6, 4), dtype=torch.float32)[0]), ("b", tensors((6, 4), dtype=torch.bfloat16)[0])]

    def step(opt, params):
        for _, p in params:
            p.grad = torch.full_like(p, 1e-3)
        opt.step()

    params, apart = mixed(), mixed()
    opt = ours.Adafactor(params, lr=0.5)
    alone = [ours.Adafactor([pair], lr=0.5, eps=(torch.finfo(pair[1].dtype).eps, 1e-3)) for pair in apart]
    start = [p.detach().clone() for _, p in params]
    for _ in range(3):
        step(opt, params)
        for each, pair in zip(alone, apart, strict=True):
            step(each, [pair])
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, apart, strict=True))
    assert not any(torch.equal(p, s) for (_, p), s in zip(params, start, strict=True))
    assert opt.param_groups[0]["eps"] == (None, 1e-3)
    opt.save(tmp_path / "a.safetensors")
    again = [(name, nn.Parameter(p.detach().clone())) for name, p in params]
    resumed = ours.Adafactor(again)
    resumed.load(tmp_path / "a.safetensors")
    step(opt, params)
    step(resumed, again)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, again, strict=True))


# ---- Sophia --------------------------------------------------------------------------------------------------------------------
def bowl(p):
    return (torch.tensor([1.0, 2.0]) * p * p).sum() / 2


@pytest.mark.filterwarnings("error")
def test_sophia_maximizes_as_it_minimizes_the_negated_loss():
    results = []
    for sign in (1.0, -1.0):
        p = nn.Parameter(torch.tensor([1.0, 2.0]))
        opt = ours.Sophia([p], lr=0.1, gamma=1.0, weight_decay=0.0, maximize=sign < 0)
        for _ in range(10):
            assert opt.update_hessian(lambda p=p, sign=sign: sign * bowl(p))
            assert (opt.state[p]["hessian"] > 0).all()
            opt.zero_grad()
            (sign * bowl(p)).backward()
            opt.step()
        results.append(p.detach().clone())
    assert torch.equal(*results)
    assert (results[0].abs() < torch.tensor([1.0, 2.0])).all()


def test_estimates_from_gradients_are_squares_whichever_way_the_loss_goes():
    p = nn.Parameter(torch.ones(2))
    opt = ours.Sophia([p], maximize=True)
    p.grad = torch.tensor([-2.0, 3.0])
    assert opt.update_hessian_from_gradients(batch_size=4)
    assert (opt.state[p]["hessian"] > 0).all()


def test_nothing_to_observe_is_said():
    p = nn.Parameter(torch.ones(2))
    opt = ours.Sophia([p])
    for every in (1, 10):
        assert opt.update_hessian_from_gradients(8, every=every) is False
        assert opt.update_hessian(lambda: torch.ones((), requires_grad=True) * 2, every=every) is False
    p.requires_grad_(False)
    for every in (1, 10):
        assert opt.update_hessian(lambda: pytest.fail("there is nothing to estimate"), every=every) is False
    assert opt.state[p]["estimates"] == 0


@pytest.mark.parametrize("every", [1, 10])
def test_estimates_begin_anew_with_the_state(every):
    p = nn.Parameter(torch.ones(2))
    opt = ours.Sophia([p])
    assert opt.update_hessian(lambda: bowl(p))
    bowl(p).backward()
    opt.step()
    opt.zero_grad()
    opt.state.clear()
    assert opt.update_hessian(lambda: bowl(p), every=every)
    assert opt.state[p]["estimates"] == 1


def test_sophia_without_an_estimate_warns_once():
    p = nn.Parameter(torch.ones(2))
    opt = ours.Sophia([("a.weight", p)])
    bowl(p).backward()
    with pytest.warns(UserWarning, match=r"Sophia: 'a\.weight' is stepped before any estimate.*update_hessian") as told:
        opt.step()
        opt.step()
    assert len(told) == 1
    assert told[0].filename == __file__


def test_attention_without_a_second_derivative_says_what_helps():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = nn.Parameter(torch.randn(1, 2, 4, 8))
    opt = ours.Sophia([q])

    def loss():
        return nn.functional.scaled_dot_product_attention(q, q, q).pow(2).sum()

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match=r"sdpa_kernel\(SDPBackend.MATH\)"):
        opt.update_hessian(loss)
    with sdpa_kernel(SDPBackend.MATH):
        assert opt.update_hessian(loss)
    with pytest.raises(TypeError, match="Sophia: update_hessian takes a function that computes the loss"):
        opt.update_hessian(loss())


# ---- split --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reset", ["clear", "replace"])
@pytest.mark.parametrize("saves", [False, True])
def test_split_outlives_the_state(reset, saves, tmp_path):
    whole, parts = tensors((12, 4)), [nn.Parameter(part.clone()) for part in tensors((12, 4))[0].detach().chunk(3)]
    opt, other = ours.Muon([("qkv", whole[0])], split={"qkv": 3}), ours.Muon(parts)
    for _ in range(2):
        grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(7))
        whole[0].grad = grad
        for part, its in zip(parts, grad.chunk(3), strict=True):
            part.grad = its
        opt.step()
        other.step()
        assert torch.equal(whole[0], torch.cat(parts))
        if reset == "clear":
            opt.state.clear()
        else:
            opt.state = collections.defaultdict(dict)
        other.state.clear()
        if saves:
            opt.save(tmp_path / "a.safetensors")
            opt.load_state_dict(opt.state_dict())
            opt.load(tmp_path / "a.safetensors")


# ---- routing --------------------------------------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self, dress):
        super().__init__()
        self.lookup = dress(nn.Embedding(10, 8))
        self.hidden = dress(nn.Linear(8, 8))
        self.final = dress(nn.Linear(8, 4))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "dress",
    [lambda m: m, parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal, utils.weight_norm,
     utils.spectral_norm],
    ids=["plain", "weight_norm", "spectral_norm", "orthogonal", "old weight_norm", "old spectral_norm"],
)  # fmt: skip
@pytest.mark.parametrize("compiled", [False, True])
def test_parametrized_modules_are_routed_like_plain_ones(dress, compiled):
    model = Net(dress)
    opt = ours.Muon(torch.compile(model, backend="eager") if compiled else model)
    rules = {name: group["rule"] for group in opt.param_groups for name in group["param_names"]}
    matrices = {name.removeprefix("_orig_mod."): rule for name, rule in rules.items() if not name.endswith("bias")}
    assert {rule for name, rule in matrices.items() if name.startswith("hidden")} == {"muon"}
    assert {rule for name, rule in matrices.items() if not name.startswith("hidden")} == {"adamw"}
    report = opt.routing_report()
    assert "_orig_mod" not in report
    assert "output head (the last Linear, final)" in report


def test_patterns_see_through_wrappers():
    model = torch.compile(Net(lambda m: m), backend="eager")
    opt = ours.Muon(model, route={"hidden.weight": "otherwise", "_orig_mod.final.weight": "own"}, split={"final.weight": 2})
    assert [group["param_names"] for group in opt.param_groups if group["rule"] == "muon"] == [["_orig_mod.final.weight"]]
    assert opt.state[model.final.weight]["batch"] == 2
    seen = []
    ours.Muon(model, route=lambda name, p: seen.append(name))
    assert "hidden.weight" in seen


def test_a_module_under_two_names_is_tied():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["c"] = model["a"]
    assert "tied weight (2 uses)" in ours.Muon(model).routing_report()


# ---- groups ---------------------------------------------------------------------------------------------------------------------
def groups_of(**vectors):
    named = [(name.replace("lookup", "embed"), p) for name, p in Net(lambda m: m).named_parameters()]
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.3},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0, **vectors},
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cls", [ours.Muon, ours.MARS])
def test_what_a_group_says_holds_for_otherwise(cls):
    opt = cls(groups_of(lr=5e-4), lr=0.02, otherwise=rlx_optim.AdamW(lr=3e-4, weight_decay=0.1))
    settings = [(group["rule"], group["lr"], group["weight_decay"]) for group in opt.param_groups]
    own = cls.rule
    assert settings == [(own, 0.02, 0.3), ("adamw", 3e-4, 0.3), ("adamw", 5e-4, 0.0)]
    opt.add_param_group({"params": [("late.bias", nn.Parameter(torch.ones(3)))]})
    assert (opt.param_groups[-1]["lr"], opt.param_groups[-1]["weight_decay"]) == (3e-4, 0.1)  # it says nothing


def test_one_tensor_is_not_two_learning_rates():
    rate = torch.tensor(0.5)
    opt = ours.Muon([{"params": list(Net(lambda m: m).named_parameters()), "lr": rate}])
    assert opt.param_groups[0]["lr"] is rate
    assert opt.param_groups[1]["lr"] == 0.5
    assert not torch.is_tensor(opt.param_groups[1]["lr"])


def test_a_setting_that_otherwise_does_not_have_is_told():
    with pytest.warns(
        UserWarning, match=r"group 2 sets 'momentum', which adamw does not have, and 'final.bias', 'hidden.bias' of"
    ):
        ours.Muon(groups_of(momentum=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.Muon([{"params": tensors((4, 3)), "momentum": 0.5}])


# ---- GradScaler, tensors for numbers ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("title", TITLES)
def test_gradients_may_be_clipped_between_scaler_and_step(title):
    """Lightning and others refuse to clip for an optimizer that says it unscales by itself."""
    opt = getattr(ours, title)(tensors((4, 3)))
    assert getattr(opt, "_step_supports_amp_scaling", False) is False
    assert copy.deepcopy(opt)._step_supports_amp_scaling is False
    assert copy.deepcopy(getattr(ours, title)(tensors((4, 3)), amp_scaling=True))._step_supports_amp_scaling is True
    with pytest.raises(TypeError, match=f"{title}: amp_scaling must be True or False, got 1"):
        getattr(ours, title)(tensors((4, 3)), amp_scaling=1)


@pytest.mark.parametrize("amp_scaling", [False, True])
def test_grad_scaler_works_either_way(amp_scaling):
    params = tensors()
    others = twins(params)
    opt, plain = ours.AdamW(params, amp_scaling=amp_scaling), ours.AdamW(others)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(3):
        train(plain, others, 1, t)
        for p, q in zip(params, others, strict=True):
            p.grad = scaler.scale(q.grad)
        scaler.step(opt)
        scaler.update()
    assert all(map(torch.equal, params, others))
    before = twins(params)
    params[0].grad = torch.full_like(params[0], torch.inf)
    scaler.step(opt)
    scaler.update()
    assert all(map(torch.equal, params, before))
    assert scaler.get_scale() == 512.0


def test_a_tensor_for_lr_has_one_element():
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        ours.AdamW(tensors(), lr=torch.tensor([0.1, 0.2]))


def test_a_step_within_compiled_code_is_not_compiled():
    """Neither where the training step is compiled, nor where the optimizer's own is; and it computes the same."""

    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        opt = ours.AdamW(model, lr=1e-2)

        def train(x):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        wrap = (lambda f: torch.compile(f, backend="eager")) if compiled else (lambda f: f)
        train, step = wrap(train), wrap(opt.step)
        for t in range(6):
            x = torch.full((2, 5), 0.3 * t + 0.1)
            train(x)
            model(x).sum().backward()
            step()
            opt.zero_grad()
            opt.param_groups[0]["lr"] *= 0.9
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(False), run(True)))


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])  # whose settings may follow the dtype
def test_settings_that_were_refused_leave_nothing_behind(name):
    """Where one group's setting is bad, another's that changed with it is not half taken: set back, it is what it was."""
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    opt = getattr(ours, name)([{"params": [p]} for p in params], lr=0.1)

    def step():
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        return [p.detach().clone() for p in params]

    step()
    first, second = opt.param_groups
    was = first["lr"], second["weight_decay"]
    first["lr"], second["weight_decay"] = 0.7, -1.0
    with pytest.raises(ValueError, match="weight_decay"):
        step()
    first["lr"], second["weight_decay"] = was
    a, b = step()
    assert torch.equal(a, b)
    first["betas" if name == "AdamW" else "eps"] = list(first["betas" if name == "AdamW" else "eps"])
    step()
    if name == "AdamW":
        first["betas"][0] = 0.5  # in place
    else:
        first["eps"][1] = 50.0
    a, b = step()
    assert not torch.equal(a, b)


@pytest.mark.parametrize("name", ["Muon", "SOAP", "KronPSGD", "NorMuon", "AdamW", "Adafactor"])
@pytest.mark.parametrize("attached", [False, True])
def test_autocast_is_not_for_steps(name, attached):
    """A step within it is one without, bit for bit: products of matrices would be of eight bits."""
    ends = []
    for cast in (False, True):
        p = torch.nn.Parameter(torch.randn(40, 24, generator=torch.Generator().manual_seed(0)))
        opt = getattr(ours, name)([("p", p)], lr=0.1, engine="torch")
        if attached:
            opt.attach([p])
        for i in range(4):
            direction = torch.randn(40, 24, generator=torch.Generator().manual_seed(i))
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                (p * direction).sum().backward()
                if not attached:
                    opt.step()
                    opt.zero_grad()
                assert torch.is_autocast_enabled("cpu") == cast
        ends.append(p.detach().clone())
    assert torch.equal(*ends)
