"""Parameters of 16 bits in torch: their low halves wherever state goes, and chance that nothing but step, name and place decides."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from test_rounding import SHAPES, bits, made, same, start, walk
from torch import nn

import rlx_optim
import rlx_optim.torch as ours
from rlx_optim import rounding
from rlx_optim.checkpoint.format import CheckpointError, make_tensor
from rlx_optim.checkpoint.snapshot import check_snapshot
from rlx_optim.cli import main
from rlx_optim.engines.torch_ import join_halves
from rlx_optim.torch import bf16, foreign

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = ("stochastic", "exact")
how_rounded = pytest.mark.parametrize("how", BOTH)
engines = pytest.mark.parametrize("engine", ["torch", "cpu"])


def whole(opt, params):
    """Parameters with their low halves."""
    lows = {k: opt.state[p].get("low") for k, p in params.items()}
    return {
        k: p.detach().float() if lows[k] is None else join_halves(p.detach(), lows[k].view(torch.int16))
        for k, p in params.items()
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- the same bits ------------------------------------------------------------------------------------------------------------
@engines
def test_neither_order_nor_groups_nor_company_matter(engine):
    params = start(torch.bfloat16)
    want = walk(made("AdamW", params, engine=engine), params)
    others = start(torch.bfloat16)
    backwards = dict(reversed(others.items()))
    assert same(walk(made("AdamW", backwards, engine=engine), others), want)
    some = start(torch.bfloat16)
    groups = [{"params": [("b", some["b"])]}, {"params": [(k, p) for k, p in some.items() if k != "b"], "lr": 1e-3}]
    assert same(walk(ours.AdamW(groups, engine=engine), some), want)
    single = start(torch.bfloat16)
    opts = {k: ours.AdamW([(k, p)], engine=engine) for k, p in single.items()}  # one by one, beside float32
    opts["b"].add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})

    class Each:
        def step(self):
            for opt in opts.values():
                opt.step()

    assert same(walk(Each(), single), want)


@engines
def test_equal_tensors_do_not_share_their_noise(engine):
    value, push = torch.full((50, 50), 1.0, dtype=torch.bfloat16), torch.ones(50, 50, dtype=torch.bfloat16)
    for named in (True, False):
        params = [nn.Parameter(value.clone()) for _ in range(2)]
        opt = ours.AdamW([("a", params[0]), ("b", params[1])] if named else params, lr=1e-3, engine=engine)
        for p in params:
            p.grad = push.clone()
        opt.step()
        moved = [(p.detach() != 1).float() - 0.25 for p in params]
        assert 0 < moved[0].mean() + 0.25 < 1
        assert abs(float((moved[0] * moved[1]).mean()) - float(moved[0].mean() * moved[1].mean())) < 0.02
        assert not torch.equal(*(p.detach() for p in params))


def test_seeds_of_rules_are_part_of_the_key():
    ends = []
    for seed in (0, 0, 1):
        params = {"v": nn.Parameter(torch.ones(400, dtype=torch.bfloat16))}
        opt = ours.KronPSGD(list(params.items()), lr=1e-3, seed=seed, probe=lambda name, t, shape: np.ones(shape, np.float32))
        ends.append(walk(opt, params, 0, 1)["v"])
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@how_rounded
@engines
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Muon"])
def test_a_resumed_run_is_the_run(name, engine, how, tmp_path):
    params = start(torch.bfloat16)
    opt = made(name, params, engine=engine, rounding=how)
    walk(opt, params, 0, 3)
    copies = {way: {k: nn.Parameter(p.detach().clone()) for k, p in params.items()} for way in ("dict", "disk", "file", "other")}
    file, saved = io.BytesIO(), copy.deepcopy(opt.state_dict())
    torch.save(saved, file)
    file.seek(0)
    opt.save(tmp_path / "there.safetensors")
    both = pickle.loads(pickle.dumps((opt, params)))
    want = walk(opt, params, 3, 6), whole(opt, params)
    for way, mine in copies.items():
        other = made(name, mine, engine="torch" if way == "other" else engine, rounding=how)
        if way == "file":
            other.load(tmp_path / "there.safetensors")
        else:
            other.load_state_dict(torch.load(file, weights_only=True) if way == "disk" else saved)
        assert same(walk(other, mine, 3, 6), want[0]), way
        assert way == "other" or equal(whole(other, mine), want[1]), way
    again, mine = both
    assert same(walk(again, mine, 3, 6), want[0])
    assert equal(whole(again, mine), want[1])


@how_rounded
@engines
def test_where_memory_is_does_not_matter(engine, how):
    """Other strides, gradients of other strides and types, parameters that come late, tensors stepped as soon as they can."""
    shapes = {"w": (40, 24), "v": (30,)}
    plain = start(torch.bfloat16, shapes)
    opt = made("AdamW", plain, engine=engine, rounding=how)
    walk(opt, plain)
    want = whole(opt, plain)
    odd = start(torch.bfloat16, shapes)
    odd["w"] = nn.Parameter(odd["w"].detach().T.contiguous().T)
    other = made("AdamW", odd, engine=engine, rounding=how)
    walk(other, odd)
    assert equal(whole(other, odd), want)
    mixed = start(torch.bfloat16, shapes)
    other = made("AdamW", mixed, engine=engine, rounding=how)
    for t in range(4):
        walk(type("None", (), {"step": lambda self: None})(), mixed, t, t + 1)
        mixed["w"].grad = mixed["w"].grad.T.contiguous().T if t % 2 else mixed["w"].grad  # compiled passes take the others
        other.step()
    assert equal(whole(other, mixed), want)
    single = start(torch.bfloat16, shapes)
    other = made("AdamW", single, engine=engine, rounding=how)
    for t in range(4):
        walk(type("None", (), {"step": lambda self: None})(), single, t, t + 1)
        for p in single.values():
            other._step(p)  # as `attach` does
    assert equal(whole(other, single), want)


@how_rounded
@engines
@pytest.mark.parametrize("split", [2, (16, 24), (10, 14)])
def test_split_parameters_are_rounded_as_wholes(engine, how, split):
    """Rows, equal or not, and columns: an element's noise is of its index in the parameter."""

    def make(dtype):
        params = start(dtype, {"w": (40, 24)})
        opt = made("Muon", params, engine=engine, rounding=how, split={"w": split}, route={"w": "own"}, weight_decay=0.1)
        return params, opt

    params, opt = make(torch.bfloat16)
    single, float32 = make(torch.float32)
    for t in range(4):
        before = bits(params)["w"].float()
        walk(opt, params, t, t + 1)
        if how == "stochastic":
            single["w"].data.copy_(before)
        walk(float32, single, t, t + 1)
        if how == "exact":
            assert torch.equal(whole(opt, params)["w"], single["w"].detach())
        else:
            wide, key = single["w"].detach().numpy(), rounding.key_of(None, "w")
            want = rounding.rounded(rlx_optim.storage.NUMPY, wide, "bfloat16", t + 1, key)
            assert np.array_equal(params["w"].detach().float().numpy(), want)


# ---- the low half ----------------------------------------------------------------------------------------------------------------
def test_a_parameter_that_others_write_keeps_its_low_half():
    """Less than a unit of bfloat16 is added to what they wrote."""
    params = start(torch.bfloat16)
    opt = made("SGD", params, lr=0.0, momentum=0.0, weight_decay=0.0, rounding="exact")
    walk(opt, params, 0, 1)
    opt.state[params["w"]]["low"].fill_(0x7F)
    with torch.no_grad():
        params["w"].fill_(2.0)
    walk(opt, params, 1, 2)
    assert bool((params["w"] == 2.0).all())
    assert 2.0 < float(whole(opt, params)["w"].max()) < 2.0 + 2.0**-6


def test_inspect_compares_low_halves_as_numbers(tmp_path, capsys):
    files = []
    for value in (0x0001, 0xFF02):
        params = start(torch.bfloat16, {"a": (30, 20)})
        opt = ours.AdamW(list(params.items()), lr=1e-3, rounding="exact")
        walk(opt, params, 0, 1)
        low = opt.state[params["a"]]["low"]
        low.copy_(torch.tensor([value & 0xFF, value >> 8], dtype=torch.uint8).expand(low.shape))
        files.append(str(opt.save(tmp_path / f"{value}.safetensors")))
    assert main(["inspect", *files]) == 1
    assert f"a/low: 600 of 600 numbers differ, by at most {0xFF01:.3g}" in capsys.readouterr().out


@engines
def test_the_way_may_change_and_differ_by_group(engine):
    params = start(torch.bfloat16, {"a": (30, 20), "b": (30, 20)})
    groups = [{"params": [("a", params["a"])], "rounding": "exact"}, {"params": [("b", params["b"])], "rounding": "nearest"}]
    opt = ours.AdamW(groups, lr=1e-3, engine=engine)
    walk(opt, params, 0, 2)
    assert ["low" in opt.state[p] for p in params.values()] == [True, False]
    opt.param_groups[0]["rounding"], opt.param_groups[1]["rounding"] = "stochastic", "exact"
    walk(opt, params, 2, 4)
    assert ["low" in opt.state[p] for p in params.values()] == [False, True]
    opt.param_groups[0]["rounding"] = "up"
    with pytest.raises(ValueError, match="AdamW: rounding must be one of"):
        walk(opt, params, 4, 5)


def test_default_of_others_follows():
    for how in rounding.ROUNDINGS:
        opt = ours.Muon(nn.Linear(4, 4).bfloat16(), rounding=how)
        assert [group["rounding"] for group in opt.param_groups] == [how, how]
    opt = ours.Muon(nn.Linear(4, 4).bfloat16(), rounding="exact", otherwise=rlx_optim.AdamW(lr=1e-3))
    assert [group["rounding"] for group in opt.param_groups] == ["exact", "stochastic"]


def test_states_of_other_ways_are_loaded():
    """Into "exact" from none: on from the upper half. From it: the low half is dropped, with the setting of the checkpoint."""
    for there, here in (("exact", "stochastic"), ("nearest", "exact")):
        params, mine = start(torch.bfloat16), start(torch.bfloat16)
        opt, other = made("AdamW", params, rounding=there), made("AdamW", mine, rounding=here)
        walk(opt, params, 0, 2)
        other.load_state_dict(opt.state_dict())
        assert {group["rounding"] for group in other.param_groups} == {there}
        assert all(("low" in state) == (there == "exact") for state in other.state.values())
        old = copy.deepcopy(opt.state_dict())
        for group in old["param_groups"]:
            del group["rounding"]  # of a version that had none
        third = made("AdamW", mine, rounding=here)
        third.load_state_dict(old)
        assert all(("low" in state) == (here == "exact") for state in third.state.values())
        if here == "exact":
            assert all(not bool(state["low"].any()) for state in third.state.values())


@pytest.mark.parametrize("damage", ["shape", "dtype", "kind"])
def test_a_damaged_low_half_is_refused(damage, tmp_path):
    params = start(torch.bfloat16)
    opt = made("AdamW", params, rounding="exact")
    walk(opt, params, 0, 2)
    saved, before = copy.deepcopy(opt.state_dict()), copy.deepcopy(opt.state_dict())
    low = saved["state"][0]["low"]
    saved["state"][0]["low"] = {"shape": low[:3], "dtype": low.float(), "kind": 3}[damage]
    with pytest.raises(ValueError, match=r"AdamW: state 'low' of 'w' is .*, expected uint8 of shape"):
        opt.load_state_dict(saved)
    assert all(torch.equal(opt.state_dict()["state"][0][k], v) for k, v in before["state"][0].items())
    opt.state[params["w"]]["low"] = low[:3]
    with pytest.raises(RuntimeError, match="AdamW: 'low' of w must be a contiguous uint8 of shape"):
        walk(opt, params, 2, 3)


def test_files_keep_it_and_say_so(tmp_path, capsys):
    from rlx_optim.checkpoint.files import open_checkpoint

    params = start(torch.bfloat16)
    opt = made("AdamW", params, rounding="exact")
    walk(opt, params, 0, 2)
    path = tmp_path / "exact.safetensors"
    opt.save(path)
    with open_checkpoint(path) as snapshot:
        p = snapshot.parameters["w"]
        assert p.tensors["low"].dtype == np.uint8
        assert p.tensors["low"].shape == (*SHAPES["w"], 2)
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "low" in shown
    assert "rounding='exact'" in shown
    named = rlx_optim.load(path)  # of float32 parameters, which have no such half
    assert named.rounding == "exact"
    assert "low" not in named.state("w")
    theirs = foreign.to_state_dict(path)  # torch.optim's: low halves are dropped
    torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in params.values()]).load_state_dict(theirs)
    assert "low" not in theirs["state"][0]
    other = made("AdamW", start(torch.float32), rounding="exact")
    other.load(path)
    assert not any("low" in state for state in other.state.values())
    back = foreign.from_state_dict(opt.state_dict(), "adamw")
    assert back.parameters["w"].tensors["low"].dtype == np.uint8
    for wrong, words in (
        (np.zeros(3, np.uint8), "has shape"),
        (np.zeros((*SHAPES["w"], 2), np.int8), "is int8, expected uint8"),
    ):
        back.parameters["w"].tensors["low"] = make_tensor(wrong)
        with pytest.raises(CheckpointError, match=f"state 'low' of 'w' {words}"):
            check_snapshot(back)
    back.parameters["w"].dtype = "float32"
    with pytest.raises(CheckpointError, match="state 'low' of 'w' is unknown to AdamW"):
        check_snapshot(back)


def test_memory_counts_it(capsys):
    assert main(["memory", "--shapes", "one:1000", "--set", "rounding=exact", "--json"]) == 0
    import json

    slots = json.loads(capsys.readouterr().out)["optimizers"]["adamw"]["slots"]
    assert {slot["slot"]: slot["bytes"] for slot in slots} == {"m": 4000, "v": 4000, "low": 2000}


def test_places_of_plain_tensors_count_from_zero():
    p = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    spec = rlx_optim.registry.spec_class("adamw")()
    assert bf16.find_rounding(spec, p, "w", None).first == 0
    assert bf16.find_rounding(spec.replace(rounding="nearest"), p, "w", None) is None
    assert bf16.find_rounding(spec, nn.Parameter(torch.zeros(3)), "w", None) is None


@how_rounded
def test_tensors_that_sit_a_step_out_may_be_rounded_elsewhere(how):
    """Columns that are split are rounded beside the engine, those beside them in it; both are in one table."""
    found = []
    for engine in ("cpu", "torch"):
        torch.manual_seed(0)
        params = {
            k: nn.Parameter(torch.randn(shape).bfloat16()) for k, shape in {"a": (7, 4), "cut": (6, 16), "b": (7, 4)}.items()
        }
        opt = ours.MARS(list(params.items()), rounding=how, split={"cut": (4, 12)}, otherwise=None, engine=engine)
        for t in range(3):
            for name, p in params.items():
                grad = torch.randn(p.shape).bfloat16()
                p.grad = None if (t, name) == (1, "cut") else grad
            opt.step()
        found.append({k: p.detach().clone() for k, p in params.items()})
    assert equal(*found)


@pytest.mark.parametrize(("name", "settings"), [("Prodigy", {}), ("Adan", {"max_grad_norm": 1.0})])
def test_types_that_are_stepped_together_are_each_read_as_it_is(name, settings):
    """What is reduced over all tensors is one bundle of all types: of 16 bits no less than of 32."""
    ends = []
    for engine in ("cpu", "torch"):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 3).bfloat16()), nn.Parameter(torch.randn(5, 3))]
        opt = getattr(ours, name)(params, rounding="nearest", engine=engine, **settings)
        for t in range(3):
            for p in params:
                p.grad = torch.full_like(p, 0.1 * (t + 1))
            opt.step()
        ends.append(params)
    (half, single), (other, wanted) = ends
    assert torch.allclose(single, wanted, rtol=1e-5, atol=1e-7)
    assert torch.allclose(half.float(), other.float(), rtol=2**-7, atol=0)
