"""What users change between steps: the type of a parameter, its group, a rate that a schedule ends at, a state dict on its way."""

import copy

import pytest
import torch
from torch import nn

from rlx_optim.torch import SGD, AdamW, Lion, Muon

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def stepped(opt, *params):
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()


# ---- the type of a parameter ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["auto", "torch"])
@pytest.mark.parametrize("settings", [{}, {"state_dtype": "int8"}, {"rounding": "nearest"}])
@pytest.mark.parametrize("kind", [AdamW, Lion, SGD])
@pytest.mark.parametrize("then", TYPES)
@pytest.mark.parametrize("first", TYPES)
def test_a_model_that_is_cast_goes_on_as_one_that_was_cast_before(first, then, kind, settings, engine):
    """The second step is bit for bit that of an optimizer that took over the state with the parameters as they are now."""
    torch.manual_seed(0)
    model = nn.Linear(48, 40, bias=False).to(first)
    more = {"momentum": 0.9} if kind is SGD else {}
    opt = kind(model.named_parameters(), lr=1e-3, engine=engine, **more, **settings)
    stepped(opt, model.weight)
    stepped(opt, model.weight)
    model.zero_grad()
    model.to(then)
    twin = copy.deepcopy(model)
    other = kind(twin.named_parameters(), lr=1e-3, engine=engine, **more, **settings)
    other.load_state_dict(opt.state_dict())
    before = model.weight.detach().clone()
    for _ in range(3):
        stepped(opt, model.weight)
        stepped(other, twin.weight)
    assert torch.equal(model.weight, twin.weight)
    assert model.weight.dtype is then
    moved = (before.float() - model.weight.detach().float()).mean()
    assert moved == pytest.approx((2.71 + 3.439 + 4.0951) * 1e-3 if kind is SGD else 3e-3, rel=0.25)


def test_float32_that_becomes_bfloat16_is_rounded_as_its_group_says():
    for rounding, moves in (("nearest", False), ("stochastic", True), ("exact", True)):
        p = nn.Parameter(torch.ones(256, 256))
        opt = AdamW([p], lr=2e-5, weight_decay=0.0, rounding=rounding)
        stepped(opt, p)
        p.grad, p.data = None, p.data.bfloat16()
        for _ in range(100):
            stepped(opt, p)
        moved = 1 - p.detach().float().mean().item()
        assert (moved > 0) is moves
        if moves:  # of what is exact the upper half is seen, in steps of 2^-8
            assert moved == pytest.approx(2e-3 if rounding == "stochastic" else 2**-8, rel=0.05)
        assert ("low" in opt.state[p]) is (rounding == "exact")


def test_what_was_exact_goes_on_from_what_is_seen():
    for engine in ("auto", "torch"):
        p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        opt = SGD([p], lr=1e-3, rounding="exact", engine=engine)
        stepped(opt, p)
        p.grad, p.data = None, p.data.float()
        before = p.detach().clone()
        stepped(opt, p)
        assert torch.allclose(before - p, torch.full_like(p, 1e-3), rtol=1e-3)
        assert "low" not in opt.state[p]


def test_exact_parameters_that_become_float16_are_refused_and_stay():
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    opt = SGD([p], lr=1e-3, rounding="exact")
    stepped(opt, p)
    p.grad, p.data = None, p.data.half()
    before = p.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="is float16, which is not the upper half"):
            stepped(opt, p)
    assert torch.equal(p, before)
    p.grad, p.data = None, p.data.bfloat16()
    stepped(opt, p)


def test_float64_is_refused_as_before():
    p = nn.Parameter(torch.ones(8))
    opt = AdamW([p], lr=1e-3)
    stepped(opt, p)
    p.grad, p.data = None, p.data.double()
    with pytest.raises(RuntimeError, match=r"has become torch\.float64, its state is torch\.float32"):
        stepped(opt, p)


# ---- its group --------------------------------------------------------------------------------------------------------------
def test_a_parameter_that_moves_to_the_next_group_follows_it():
    for kind, theirs in ((SGD, torch.optim.SGD), (AdamW, torch.optim.AdamW)):
        ours, peers = ([nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
        opts = [
            make([{"params": params, "lr": 0.1, "weight_decay": 0.0}, {"params": [], "lr": 0.01, "weight_decay": 0.5}])
            for make, params in ((kind, list(ours)), (theirs, list(peers)))
        ]
        for step in range(6):
            for opt, params in zip(opts, (ours, peers), strict=True):
                if step == 2:
                    opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop())
                if step == 4:  # and both into one
                    opt.param_groups[0]["params"] += opt.param_groups[1]["params"]
                    opt.param_groups[1]["params"] = []
                stepped(opt, *params)
            for mine, other in zip(ours, peers, strict=True):
                assert torch.allclose(mine, other, rtol=1e-6), (kind, step)


def test_a_matrix_that_moves_to_the_other_rule_is_stepped_by_it():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    opt = Muon(model)
    params = list(model.parameters())
    stepped(opt, *params)
    first, second = opt.param_groups[:2]
    assert (first["rule"], second["rule"]) == ("muon", "adamw")
    second["params"].insert(0, moved := first["params"].pop())
    second["param_names"].insert(0, first["param_names"].pop())
    stepped(opt, *params)
    assert {"exp_avg", "exp_avg_sq"} <= opt.state[moved].keys()


# ---- a schedule's end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("total", [7, 10, 13, 20])
@pytest.mark.parametrize("start", [0.1, 0.3, 1 / 3, 0.7, 0.9])
def test_linear_schedules_end_at_zero(start, total):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt, peer = AdamW([p], lr=1e-3), torch.optim.AdamW([q], lr=1e-3)
    rates = [
        torch.optim.lr_scheduler.LinearLR(each, start_factor=start, end_factor=0.0, total_iters=total) for each in (opt, peer)
    ]
    for _ in range(total + 3):
        stepped(opt, p)
        stepped(peer, q)
        for rate in rates:
            rate.step()
    assert torch.allclose(p, q, rtol=1e-6)


def test_a_rate_below_zero_is_refused_otherwise():
    p = nn.Parameter(torch.ones(3))
    opt = AdamW([p], lr=1e-3)
    for first, bad in ((None, -1e-20), (1e-3, -1e-6)):
        opt.param_groups[0]["lr"] = bad
        if first is not None:
            opt.param_groups[0]["initial_lr"] = first
        with pytest.raises(ValueError, match="lr must be a finite number >= 0"):
            stepped(opt, p)
    assert torch.equal(p, torch.ones(3))


# ---- a state dict on its way --------------------------------------------------------------------------------------------------
def test_hooks_may_wrap_the_state_dict():
    p = nn.Parameter(torch.ones(3))
    opt = AdamW([p], lr=1e-3, skip_above=6.0)
    for _ in range(3):
        stepped(opt, p)
    seen = []
    opt.register_state_dict_post_hook(lambda _, state: seen.append(state))
    opt.register_state_dict_post_hook(lambda _, state: {"wrapped": state, "version": 1})
    opt.register_load_state_dict_pre_hook(lambda _, state: state["wrapped"])
    saved = opt.state_dict()
    assert saved.keys() == {"wrapped", "version"}
    assert seen[0]["param_groups"][0]["amsgrad"] is False  # torch's names are there
    assert seen[0]["skip_window"]["norm"][0] == 3
    plain = AdamW([p], lr=1e-3, skip_above=6.0)
    plain.load_state_dict(saved["wrapped"])
    opt.load_state_dict(saved)
    assert opt._guard.values() == plain._guard.values()
    assert len(opt._optimizer_state_dict_post_hooks) == 2  # ours is gone
    assert opt.state_dict()["wrapped"]["state"].keys() == {0}


@pytest.mark.parametrize(
    "bad", [-3.0, 2.5, float("nan"), float("inf"), 1e30, "x", None, torch.tensor([1.0, 2.0]), torch.tensor(-1)]
)
def test_a_count_that_is_none_is_refused_before_anything_changes(bad):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    opt = Muon(model)
    stepped(opt, *model.parameters())
    before = copy.deepcopy(opt.state_dict())
    saved = copy.deepcopy(before)
    saved["state"][saved["param_groups"][1]["params"][0]]["step"] = bad
    with pytest.raises(
        ValueError, match=r"Muon: state 'step' of .* is .* expected a whole number from 0 to 2\^53\. The checkpoint is corrupt"
    ):
        opt.load_state_dict(saved)
    after = opt.state_dict()
    assert after["state"].keys() == before["state"].keys()
    for key, state in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in state.items() if torch.is_tensor(value))


def test_equal_shapes_in_another_order_are_told_apart_by_name():
    params = {name: nn.Parameter(torch.full((4,), float(i))) for i, name in enumerate("abc")}
    opt = AdamW(params.items(), lr=1e-3)
    for p in params.values():
        p.grad = 1.0 + p.detach()
    opt.step()
    saved = opt.state_dict()
    turned = AdamW([(name, params[name]) for name in "cab"], lr=1e-3)
    turned.load_state_dict(saved)
    assert turned.param_groups[0]["param_names"] == ["c", "a", "b"]
    for p in params.values():
        assert torch.equal(turned.state[p]["exp_avg"], opt.state[p]["exp_avg"])
    prefixed = AdamW([(f"module.{name}", params[name]) for name in "cab"], lr=1e-3)  # as DDP calls them
    prefixed.load_state_dict(saved)
    assert torch.equal(prefixed.state[params["a"]]["exp_avg"], opt.state[params["a"]]["exp_avg"])
    other = AdamW([("x", params["c"]), ("y", params["a"]), ("z", params["b"])], lr=1e-3)  # by place, as torch does
    other.load_state_dict(saved)
    assert torch.equal(other.state[params["c"]]["exp_avg"], opt.state[params["a"]]["exp_avg"])
    theirs = torch.optim.AdamW(params.items(), lr=1e-3)
    theirs.step()
    turned.load_state_dict(theirs.state_dict())
    assert torch.equal(turned.state[params["b"]]["exp_avg"], theirs.state[params["b"]]["exp_avg"])


BROKEN = [
    ("step", None), ("step", "two"), ("step", -1.0), ("step", float("nan")), ("step", torch.ones(3, 4)),
    ("exp_avg", None), ("exp_avg", 1.5), ("exp_avg", [1.0]), ("exp_avg", torch.ones(3, 4).to_sparse()),
    ("low", None), ("low", torch.zeros(25, dtype=torch.uint8)[1:].view(3, 4, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_state_that_no_engine_can_read_is_refused_by_name_and_nothing_moves(key, value):
    p = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    opt = AdamW([("fc.weight", p)], rounding="exact")
    p.grad = torch.ones_like(p)
    opt.step()
    kept, before = opt.state[p][key], p.detach().clone()
    opt.state[p][key] = value
    with pytest.raises((ValueError, RuntimeError), match=rf"AdamW: .*'{key}' of '?fc\.weight"):
        opt.step()
    assert torch.equal(p, before)
    opt.state[p][key] = kept
    opt.step()
    assert float(opt.state[p]["step"]) == 2


def test_what_a_user_keeps_beside_the_state_may_be_anything():
    p = nn.Parameter(torch.ones(3, 4))
    opt = AdamW([p])
    opt.state[p] |= {"mask": torch.eye(3).to_sparse(), "note": "mine"}
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    assert opt.state[p]["note"] == "mine"


def test_a_thawed_parameter_is_stepped_after_a_refusal_of_another():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    opt = AdamW([("first", first), ("second", second)])
    first.grad = torch.ones(3)
    opt.step()
    second.requires_grad_(True)
    second.grad = torch.ones(3)
    kept = opt.state[first]["exp_avg"]
    opt.state[first]["exp_avg"] = torch.ones(2)
    with pytest.raises(RuntimeError, match="'exp_avg' of first"):
        opt.step()
    opt.state[first]["exp_avg"] = kept
    opt.step()
    assert not torch.equal(second, torch.ones(3))


def test_a_sign_left_for_later_is_kept_in_half_precision():
    params = [nn.Parameter(torch.linspace(-2, 2, 9, dtype=torch.float16)) for _ in range(2)]
    for k, p in enumerate(params):
        opt = AdamW([("p", p)])
        if k:
            p.data = torch._neg_view(-p.data)
        p.grad = torch.ones_like(p)
        opt.step()
    assert torch.equal(params[0], params[1].detach().resolve_neg())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float32, torch.float64])
def test_torchs_default_type_does_not_matter(default):
    """Numbers that a rule chooses from are of the parameter's arithmetic."""
    ends = []
    for engine in ("cpu", "torch"):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        opt = Muon([p], cautious=True, engine=engine, otherwise=None)
        try:
            torch.set_default_dtype(default)
            for _ in range(3):
                p.grad = torch.randn(6, 4, dtype=torch.float64)
                opt.step()
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(p.detach())
    assert torch.allclose(*ends, rtol=0, atol=1e-13)
