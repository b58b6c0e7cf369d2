"""Which parameters an optimizer has: frozen ones, those that are thawed, those that others put in their place, named ones in groups."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from helpers import TORCH as ALL
from torch import nn

import rlx_optim.torch as ours


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, opt, steps=1, first=0):
    for step in range(first, first + steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def make(name, params, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Muon's about matrices without names, Sophia's about estimates
        return getattr(ours, name)(params, **{**ALL[name], **settings})


def count_bytes(opt):
    return sum(v.nbytes for state in opt.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim)


def tensors(opt):
    """The state by place, so that two optimizers can be compared."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return [{k: v for k, v in opt.state.get(p, {}).items() if torch.is_tensor(v)} for p in params]


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


# ---- frozen ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Sophia")
@pytest.mark.parametrize("name", ALL)
def test_frozen_parameters_have_no_state_and_change_nothing(name):
    model, alone = make_model(), make_model()
    for each in (model, alone):
        each[0].requires_grad_(False)
        each[2].bias.requires_grad_(False)
    opt = make(name, model)
    trained = {p for p in model.parameters() if p.requires_grad}
    other = make(name, [(n, p) for n, p in alone.named_parameters() if p.requires_grad])
    assert set(opt.state) == trained
    before = copy.deepcopy(model[0].state_dict())
    for each, its in ((model, opt), (alone, other)):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(each, its, 3)
    assert set(opt.state) == trained
    assert all(torch.equal(before[k], v) for k, v in model[0].state_dict().items())
    named = name not in ("Muon", "NorMuon", "Scion", "MARS")  # those may find another head in pairs than in a model
    assert not named or all(map(torch.equal, model.parameters(), alone.parameters()))


def test_a_frozen_base_costs_no_bytes():
    base, adapter = nn.Linear(64, 64), nn.Linear(64, 2)
    base.requires_grad_(False)
    model = nn.Sequential(base, adapter)
    opt = ours.AdamW(model)
    reference = torch.optim.AdamW(model.parameters())
    train_on = torch.randn(4, 64)
    model(train_on).sum().backward()
    opt.step()
    reference.step()
    assert count_bytes(opt) == count_bytes(reference) == 2 * 4 * sum(p.numel() for p in adapter.parameters())
    assert len(opt.state_dict()["state"]) == len(reference.state_dict()["state"]) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "Adafactor"])
def test_frozen_parameters_may_be_of_any_type(name, dtype, tmp_path):
    model = make_model()
    model.register_parameter("base", nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False))
    model.register_parameter("meta", nn.Parameter(torch.zeros(4, 4, device="meta"), requires_grad=False))
    for given in (model, list(model.parameters()), list(model.named_parameters())):
        opt = make(name, given)
        train(model, opt, 2)
        assert model.base not in opt.state
        assert model.meta not in opt.state
        again = make(name, given)
        again.load_state_dict(opt.state_dict())
        assert same(tensors(opt), tensors(again))
    opt.save(tmp_path / "opt.safetensors")
    again.load(tmp_path / "opt.safetensors")
    assert same(tensors(opt), tensors(again))
    assert len(again.param_groups) == len(opt.param_groups)
    if dtype is torch.int64:
        model.base.grad = torch.zeros_like(model.base)
        with pytest.raises(ValueError, match=r"'base' has dtype torch.int64; float32"):
            opt.step()


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "Lamb", "ScheduleFreeAdamW"])
def test_thawing_makes_state_then(name):
    model = make_model()
    model[0].requires_grad_(False)
    opt = make(name, model)
    train(model, opt, 2)
    train(model, opt, 1, 2)  # the third is a repetition of the second
    model[0].requires_grad_(True)
    taken = opt.state_dict()  # the shape of its state is known before its first step, which a sharded load needs
    assert len(taken["state"]) == 6
    assert float(opt.state[model[0].weight]["step"]) == 0
    train(model, opt, 2, 3)
    steps = [float(opt.state[p]["step"]) for p in model.parameters()]
    assert steps == [2, 2, 5, 5, 5, 5]
    # what was thawed is stepped as by an optimizer of its own, whatever reduces over nothing but its own tensors
    if name in ("AdamW", "SOAP"):
        twin = make_model()
        twin[0].requires_grad_(False)
        rest = make(name, [(n, p) for n, p in twin.named_parameters() if p.requires_grad])
        train(twin, rest, 3)
        twin[0].requires_grad_(True)
        first = make(name, list(twin.named_parameters())[:2])
        for step in (3, 4):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            twin(x).pow(2).mean().backward()
            for each in (rest, first):
                each.step()
            twin.zero_grad()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_thawed_parameter_is_seen_by_the_very_next_step():
    """Also where nothing else has changed since the last one, and where the gradient is put there by hand."""
    for thaw in (lambda p: p.requires_grad_(True), lambda p: None):
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
        opt = ours.AdamW([a, b], lr=0.1)
        for _ in range(4):
            a.grad = torch.ones(3)
            opt.step()
        thaw(b)
        b.grad = torch.ones(3)
        opt.step()
        assert torch.all(b != 1)
        assert float(opt.state[b]["step"]) == 1


def test_freezing_keeps_the_state():
    model = make_model()
    opt = ours.AdamW(model)
    train(model, opt, 2)
    model[0].requires_grad_(False)
    kept = copy.deepcopy(opt.state[model[0].weight])
    train(model, opt, 2)
    assert all(torch.equal(kept[k], v) for k, v in opt.state[model[0].weight].items())
    again = ours.AdamW(model)
    again.load_state_dict(opt.state_dict())
    assert same(tensors(opt), tensors(again))


def test_a_checkpoint_without_what_is_frozen(tmp_path):
    """Files and state dicts of torch lack it; what is frozen stays in its group, whose settings the file brings."""

    def optimizer(model, lr):
        pairs = list(model.named_parameters())
        return ours.AdamW([{"params": pairs[:4], "lr": lr}, {"params": pairs[4:], "lr": 10 * lr}])

    model, other = make_model(), make_model()
    for each in (model, other):
        each[0].requires_grad_(False)
    opt, again = optimizer(model, 0.01), optimizer(other, 0.02)
    train(model, opt, 2)
    opt.save(tmp_path / "opt.safetensors")
    other.load_state_dict(model.state_dict())
    again.load(tmp_path / "opt.safetensors")
    assert [len(group["params"]) for group in again.param_groups] == [4, 2]
    assert [group["lr"] for group in again.param_groups] == [0.01, 0.1]
    for each, its in ((model, opt), (other, again)):
        each[0].requires_grad_(True)
        train(each, its, 2, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))

    third = make_model()
    third[0].requires_grad_(False)
    reference = torch.optim.AdamW(third.parameters(), lr=0.01)
    train(third, reference, 2)
    taken = optimizer(third, 0.01)
    taken = ours.AdamW(third.parameters())
    taken.load_state_dict(reference.state_dict())
    assert third[0].weight not in taken.state
    assert len(taken.state) == 4


def test_reports_say_what_is_frozen():
    model = make_model()
    model[0].requires_grad_(False)
    opt = ours.Muon(model)
    rows = opt.routing_report().splitlines()
    assert [row.split()[0] for row in rows if "frozen" in row] == ["0.weight", "0.bias"]
    assert opt.engine_report()["2 frozen parameters"] == "not stepped, no state until they are trained"
    train(model, opt, 1)
    opt.stats(next=True)
    train(model, opt, 1)
    assert list(opt.stats().each) == ["2.weight", "2.bias", "4.weight", "4.bias"]
    model[0].requires_grad_(True)
    train(model, opt, 1)
    assert "frozen" not in opt.routing_report()
    assert not any("frozen" in key for key in opt.engine_report())


def test_an_optimizer_of_frozen_parameters_alone_does_nothing():
    model = make_model().requires_grad_(False)
    opt = ours.Muon(model)
    opt.step()
    assert not opt.state
    assert opt.state_dict()["state"] == {}
    copy.deepcopy(opt).step()


# ---- replaced --------------------------------------------------------------------------------------------------------------------
def replace(model, opt, change=lambda p: nn.Parameter(p.detach().clone())):
    """Give a model other parameters and put them into the groups, as wrappers do. Weak references to the old ones."""
    old = {id(p): weakref.ref(p) for p in model.parameters()}
    new = {}
    for module in model.modules():
        for leaf, p in list(module.named_parameters(recurse=False)):
            new[id(p)] = change(p)
            setattr(module, leaf, new[id(p)])
    for group in opt.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]
    return list(old.values())


LOOKS = {
    "step": lambda model, opt: train(model, opt, 1, 2),
    "state_dict": lambda model, opt: opt.state_dict(),
    "load_state_dict": lambda model, opt: opt.load_state_dict(opt.state_dict()),
    "save": lambda model, opt: opt.save("opt.safetensors"),
    "deepcopy": lambda model, opt: copy.deepcopy(opt).state_dict(),
    "routing_report": lambda model, opt: opt.routing_report(),
    "engine_report": lambda model, opt: opt.engine_report(),
    "add_param_group": lambda model, opt: opt.add_param_group({"params": [("more", nn.Parameter(torch.zeros(2)))]}),
    "eval": lambda model, opt: (opt.eval(), opt.train()),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "ScheduleFreeAdamW", "Adafactor"])
def test_state_follows_its_place(name, look, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, twin = make_model(), make_model()
    settings = {"state_dtype": "int8"} if name == "AdamW" else {}
    opt, other = make(name, model, **settings), make(name, twin, **settings)
    for each, its in ((model, opt), (twin, other)):
        train(each, its, 2)
    opt.state[model[0].weight]["mine"] = "kept"
    gone = replace(model, opt)
    LOOKS[look](model, opt)
    if look == "step":
        train(twin, other, 1, 2)
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    assert opt.state[model[0].weight]["mine"] == "kept"
    assert set(opt.state) == {p for group in opt.param_groups for p in group["params"]}
    for each, its in ((model, opt), (twin, other)):
        train(each, its, 2, 3)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert "frozen" not in opt.routing_report()
    assert opt.routing_report().splitlines()[1:7] == other.routing_report().splitlines()[1:7]


def test_what_accelerate_does_to_groups():
    """Placeholders first, the new parameters later: nothing of ours is asked in between, or everything starts anew, and is said."""
    for ask in (False, True):
        model, twin = make_model(), make_model()
        opt, other = ours.Muon(model, lr=0.01), ours.Muon(twin, lr=0.01)
        train(model, opt, 1)
        train(twin, other, 1)
        places = [(group, i, group["params"][i]) for group in opt.param_groups for i in range(len(group["params"]))]
        for group, i, _ in places:
            group["params"][i] = torch.empty(1)
        if ask:
            with pytest.warns(UserWarning, match=r"the state of .*2.weight.* was dropped: parameters of other shapes"):
                opt.state_dict()
        for group, i, p in places:
            group["params"][i] = p
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, opt, 2, 1)
        train(twin, other, 2, 1)
        assert all(map(torch.equal, model.parameters(), twin.parameters())) is not ask
        assert {int(opt.state[p]["step"]) for p in model.parameters()} == {2 if ask else 3}


def test_other_shapes_start_with_zero_state():
    """Pruning: warned of once, by name; what was never stepped has nothing to lose."""
    model = make_model()
    opt = ours.AdamW(model, lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(model, opt)
        opt.state_dict()
    train(model, opt, 2)
    old = model[2].weight
    model[2] = nn.Linear(8, 4)
    model[4] = nn.Linear(4, 3)
    opt.param_groups[0]["params"][2:] = [*model[2].parameters(), *model[4].parameters()]
    with pytest.warns(UserWarning, match=r"AdamW: the state of '2.bias', '2.weight', '4.weight' was dropped"):
        train(model, opt, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, 1)
    assert [int(opt.state[p]["step"]) for p in model.parameters()] == [4, 4, 2, 2, 2, 4]  # the last bias has its shape still
    assert old not in opt.state


def test_state_survives_a_refusal_while_its_parameter_is_replaced():
    """A setting of another group is bad when state is asked to follow: nothing has been moved yet."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = ours.AdamW([{"params": [a]}, {"params": [b]}], lr=0.1)
    for p in (a, b):
        p.grad = torch.ones(3)
    opt.step()
    taken = nn.Parameter(b.detach().clone())
    opt.param_groups[1]["params"] = [taken]
    opt.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be"):
        opt.state_dict()
    opt.param_groups[0]["lr"] = 0.1
    assert [float(state["step"]) for state in opt.state_dict()["state"].values()] == [1, 1]


def test_parameters_that_change_places_keep_their_state():
    model = make_model()
    opt = ours.AdamW(model, lr=0.01)
    train(model, opt, 2)
    kept = {p: state["exp_avg"].clone() for p, state in opt.state.items()}
    opt.param_groups[0]["params"].reverse()
    opt.param_groups[0]["param_names"].reverse()
    opt.state_dict()
    assert all(torch.equal(opt.state[p]["exp_avg"], each) for p, each in kept.items())


def test_a_removed_parameter_is_forgotten():
    model = make_model()
    opt = ours.AdamW(model, lr=0.01)
    train(model, opt, 2)
    last = [opt.param_groups[0]["params"].pop(2) for _ in range(2)]
    del opt.param_groups[0]["param_names"][2:4]
    assert len(opt.state_dict()["state"]) == 4
    assert not any(p in opt.state for p in last)
    train(model, opt, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_replacement_of_another_type(dtype):
    """State goes on by value, in the arithmetic of the new parameter."""
    model = make_model()
    opt = ours.AdamW(model, lr=0.01, rounding="nearest")
    train(model, opt, 2)
    before = tensors(opt)
    replace(model, opt, lambda p: nn.Parameter(p.detach().to(dtype)))
    opt.state_dict()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for now, was in zip(tensors(opt), before, strict=True):
        assert now["exp_avg"].dtype is wide
        assert torch.equal(now["exp_avg"].float(), was["exp_avg"])
        assert float(now["step"]) == 2
    model.to(dtype)
    x = torch.randn(5, 6).to(dtype)
    model(x).pow(2).mean().backward()
    opt.step()


def test_a_replacement_that_cannot_be_stepped_changes_nothing():
    model = make_model()
    opt = ours.AdamW(model, lr=0.01)
    train(model, opt, 2)
    before = copy.deepcopy(tensors(opt))
    params = list(opt.param_groups[0]["params"])
    opt.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(8, 6, dtype=torch.complex64))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'0.weight' has dtype torch.complex64"):
            opt.state_dict()
    opt.param_groups[0]["params"][0] = params[0]
    assert same(tensors(opt), before)
    train(model, opt, 1)


# ---- groups with names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_groups_with_param_names(name):
    """As torchtitan makes them, and as `Optimizer.param_groups` of torch are."""
    model, twin = make_model(), make_model()
    pairs = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in part], "param_names": [n for n, _ in part], "lr": 0.01} for part in (pairs[:3], pairs[3:])
    ]
    given = copy.copy(groups[0])
    opt = make(name, groups)
    others = list(twin.named_parameters())
    other = make(name, [{"params": others[:3], "lr": 0.01}, {"params": others[3:], "lr": 0.01}])
    assert groups[0].keys() == given.keys()
    assert [group["param_names"] for group in opt.param_groups] == [group["param_names"] for group in other.param_groups]
    assert opt.routing_report() == other.routing_report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, opt, 2)
        train(twin, other, 2)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_groups_with_param_names_that_do_not_fit():
    w, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    for cls in (ours.AdamW, ours.Muon):
        with pytest.raises(ValueError, match="a group has 2 parameters and 1 param_names; give each its name"):
            cls([{"params": [w, b], "param_names": ["w"]}])
        with pytest.raises(ValueError, match="pairs of name and parameter, and param_names too"):
            cls([{"params": [("w", w), ("b", b)], "param_names": ["w", "b"]}])
        opt = cls([{"params": w, "param_names": ["w"]}])
        assert opt.param_groups[0]["param_names"] == ["w"]


def test_a_split_of_frozen_parameters_waits_for_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    opt = ours.SOAP([{"params": list(model.named_parameters()), "rule": "soap"}], split={"1.weight": 2})
    model.requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert opt.state[model[1].weight]["Q1"].shape == (2, 2, 2)


@pytest.mark.parametrize("ask", ["step", "state_dict", "routing_report"])
def test_names_that_are_not_as_many_as_parameters(ask):
    opt = ours.AdamW(nn.Linear(4, 4))
    opt.param_groups[0]["params"] = opt.param_groups[0]["params"][:1]
    with pytest.raises(ValueError, match="a group has 1 parameters and 2 param_names; change both together"):
        getattr(opt, ask)()
