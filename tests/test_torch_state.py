"""The torch front end: state dicts, and groups and state that others change."""

import copy
import pickle
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TORCH, slowly
from torch import nn
from torch_cases import bits, curvature, every, give_gradients, make, network, parameters, run, same, same_state, twins

import rlx_optim.torch as ours
from rlx_optim.torch.placements import local

pytestmark = pytest.mark.usefixtures("one_thread")  # tensors are tiny: a second thread of torch only waits


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
    "KronPSGD": (
        slots("momentum_buffer", W, q1=(6, 6), q2=(4, 4), key=(4,), counter=()),
        slots("momentum_buffer", B, q1=(5,), key=(4,), counter=()),
    ),
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


def kept(key, value, place=0):
    def spoil(saved):
        saved["state"][place][key] = value

    return spoil


def said(key, value):
    def spoil(saved):
        saved["param_groups"][0][key] = value

    return spoil


AFRESH = "The checkpoint is corrupt; remove the state of '{}' to restart it with zero state"
DENSE = r"expected a tensor of shape \(6, 4\)\. Make it dense \(.to_dense\(\)\)"
NUMBER = rf"expected a finite number\. {AFRESH.format('w')}"
PACKAGE = "known are 'nadamw'; it is misspelt or damaged, or of a package that is not installed"


def test_no_state_dict_at_all():
    opt = make("NAdamW", parameters(shapes={"w": W}).items())
    for given in (None, [1], "a path"):
        with pytest.raises(ValueError, match=r"NAdamW: the state dict is .*, expected a dict\. Give what state_dict"):
            opt.load_state_dict(given)


@pytest.mark.parametrize("value", ["false", 1, None, torch.tensor(True), np.bool_(True)])
def test_maximize_is_a_flag(value):
    """Whatever is true would climb."""
    params = parameters(shapes={"w": W})
    opt = make("NAdamW", params.items())
    with pytest.raises(TypeError, match="NAdamW: maximize must be True or False, got"):
        make("NAdamW", params.items(), maximize=value)
    with pytest.raises(TypeError, match="NAdamW: maximize must be True or False, got"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "param_names": ["late"], "maximize": value})
    saved = opt.state_dict()
    saved["param_groups"][0]["maximize"] = value
    with pytest.raises(TypeError, match="NAdamW: maximize must be True or False, got"):
        opt.load_state_dict(saved)
    run(opt, params, 0, 2)
    before = bits(params)
    opt.param_groups[0]["maximize"] = value
    with pytest.raises(TypeError, match="NAdamW: maximize must be True or False, got"):
        run(opt, params, 2, 3)
    assert same(bits(params), before)
    opt.param_groups[0]["maximize"] = True
    run(opt, params, 2, 3)
    assert not same(bits(params), before)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (kept("exp_avg", torch.zeros(4, 6)), r"'exp_avg' of 'w' has shape \(4, 6\), expected \(6, 4\)"),
        (
            kept("exp_avg", 3.0),
            rf"'exp_avg' of 'w' is 3.0, expected a tensor of shape \(6, 4\)\. {AFRESH.format('w')}",
        ),
        (kept("exp_avg", "zeros"), r"'exp_avg' of 'w' is 'zeros', expected a tensor of shape \(6, 4\)"),
        (
            kept("exp_avg", torch.ones(W).to_sparse()),
            rf"'exp_avg' of 'w' is torch.float32 sparse_coo of shape \(6, 4\) on cpu, {DENSE}",
        ),
        (kept("exp_avg", torch.ones(W, device="meta")), r"'exp_avg' of 'w' is .* on meta, .*\. It was never filled"),
        (
            kept("exp_avg", torch.ones(W, dtype=torch.complex64)),
            "'exp_avg' of 'w' is torch.complex64 .*expected a tensor of shape",
        ),
        (kept("step", "3"), r"'step' of 'w' is '3', expected a whole number from 0 to 2\^53\. The checkpoint is corrupt"),
        (kept("mu_product", "0.9"), f"'mu_product' of 'w' is '0.9', {NUMBER}"),
        (kept("mu_product", None), f"'mu_product' of 'w' is None, {NUMBER}"),
        (
            kept("mu_product", torch.ones(3)),
            rf"'mu_product' of 'w' is torch.float32 of shape \(3,\) on cpu, {NUMBER}",
        ),
        (kept("batch", "3"), r"'batch' of 'w' is '3', expected a split of shape \(6, 4\)"),
        (kept("batch", 5), r"'batch' of 'w' is 5, expected .* cannot be split into 5 equal matrices"),
        (
            lambda saved: saved["state"].update({1: "x"}),
            "the state of 'b' is 'x', expected a dict of tensors; remove the state of 'b' to restart it",
        ),
        (
            lambda saved: saved["state"][1].pop("exp_avg_sq"),
            "state 'exp_avg_sq' of 'b' is missing. The checkpoint is corrupt or from another model; remove the state of 'b'",
        ),
        (lambda saved: saved["state"].update({1: {"step": torch.tensor(3.0)}}), "state 'exp_avg' of 'b' is missing"),
        (
            said("rule", "lion"),
            r"group 0 of the checkpoint is for rule 'lion'; known are 'nadamw'; make .* as rlx_optim.torch.Lion, or",
        ),
        (said("rule", "nadam w"), f"group 0 of the checkpoint is for rule 'nadam w'; {PACKAGE}"),
        (said("rule", ["nadamw"]), rf"group 0 of the checkpoint is for rule \['nadamw'\]; {PACKAGE}"),
        (said("betas", (0.9, 1.0)), "betas must be 2 finite numbers, each >= 0 and < 1"),
        (
            lambda saved: [saved["param_groups"][0][key].pop() for key in ("params", "param_names")],
            "doesn't match the size of optimizer's group",
        ),
        (
            lambda saved: saved.pop("state"),
            r"'state' of the state dict is None, expected a dict.*Give what state_dict\(\) returned",
        ),
        (lambda saved: saved.update(state=[]), r"'state' of the state dict is \[\], expected a dict"),
        (lambda saved: saved.pop("param_groups"), "'param_groups' of the state dict is None, expected a list of dicts"),
        (lambda saved: saved.update(param_groups=[[1]]), r"group 0 of the state dict is \[1\], expected a dict"),
        (lambda saved: saved["param_groups"][0].pop("params"), "'params' of group 0 of the state dict is None, expected a list"),
        (said("param_names", "wb"), "'param_names' of group 0 of the state dict is 'wb', expected a list of 2, a name for each"),
        (said("param_names", ["w", 3]), r"'param_names' of group 0 of the state dict is \['w', 3\], expected a list of 2"),
        (
            said("param_names", np.array(["w", "b"])),
            r"'param_names' of group 0 of the state dict is array\(.*, expected a list of 2",
        ),
        (kept("exp_avg", np.ones(W)), r"'exp_avg' of 'w' is array\(.*, expected a tensor of shape \(6, 4\)"),
        (kept("step", range(3)), r"'step' of 'w' is range\(0, 3\), expected a whole number"),
        (said("param_names", ["w"]), r"'param_names' of group 0 of the state dict is \['w'\], expected a list of 2"),
        (lambda saved: saved["param_groups"].extend(saved["param_groups"]), "different number of parameter groups"),
    ],
)
def test_a_bad_checkpoint_is_refused_and_nothing_is_lost(spoil, message):
    params = parameters(shapes={"w": W, "b": B})
    opt = make("NAdamW", params.items())
    run(opt, params, 0, 2)
    before = copy.deepcopy(opt.state_dict())
    spoiled = copy.deepcopy(before)
    spoil(spoiled)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(spoiled)
    assert same_state(opt.state_dict(), before)
    assert opt.state_dict()["param_groups"] == before["param_groups"]
    others = twins(params)
    other = make("NAdamW", others.items())
    other.load_state_dict(before)
    run(opt, params, 2, 4)
    run(other, others, 2, 4)
    assert same(bits(params), bits(others))


class Name(str):
    __slots__ = ()


def test_names_of_a_type_of_strings():
    params = parameters(shapes={"w": W, "b": B})
    opt = make("NAdamW", params.items())
    saved = opt.state_dict()
    saved["param_groups"][0]["param_names"] = [Name("w"), np.str_("b")]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["param_names"] == ["w", "b"]


@pytest.mark.parametrize("kept", [5, None, "x", torch.ones(3), [1, "two"], {"a": ("b", {"c": torch.ones(2)})}], ids=repr)
@pytest.mark.parametrize("name", ["NAdamW", "ScheduleFreeAdamW"])
def test_what_users_keep_beside_parameters(name, kept, tmp_path):
    """In the state, or in that of a parameter, loaded or put there: it arrives as it was, by value, and steps are the same."""
    params, others = (parameters(shapes={"w": W, "b": B}) for _ in range(2))
    opt, other = make(name, params.items()), make(name, others.items())
    for each, its in ((opt, params), (other, others)):
        run(each, its, 0, 3)
    opt.state["mine"] = kept
    run(opt, params, 3, 5)
    saved = opt.state_dict()
    saved["state"][0]["mine"] = kept
    opt.load_state_dict(saved)
    for found in (opt.state["mine"], opt.state[params["w"]]["mine"]):
        assert str(found) == str(kept)
    assert kept is None or isinstance(kept, (int, str)) or opt.state[params["w"]]["mine"] is not kept
    saved["state"][0]["mine"] = lock = threading.Lock()  # nobody copies that
    opt.load_state_dict(saved)
    assert opt.state[params["w"]].pop("mine") is lock
    opt.save(tmp_path / "a.safetensors")
    run(opt, params, 5, 8)
    run(other, others, 3, 8)
    assert same(bits(params), bits(others))
    assert str(opt.state_dict()["state"]["mine"]) == str(kept)


def test_parameters_in_a_tuple_are_stepped_alike():
    """A tuple's header is no list's."""
    params, others = (parameters(shapes={"w": W, "b": B}) for _ in range(2))
    opt, other = make("NAdamW", params.items()), make("NAdamW", others.items())
    opt.param_groups[0]["params"] = tuple(opt.param_groups[0]["params"])
    for each, its in ((opt, params), (other, others)):
        run(each, its, 0, 6)
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
    saved["state"][0] |= {"mine": torch.ones(3), "note": "mine too"}  # and the user's own
    saved["state"]["apart"] = {"note": "of no parameter", "numbers": torch.ones(2)}
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["maximize"] is False
    assert torch.equal(opt.state[params["w"]]["mine"], torch.ones(3))
    assert opt.state[params["w"]]["note"] == "mine too"
    assert opt.state["apart"] == saved["state"]["apart"]
    assert torch.equal(opt.state[params["w"]]["step"], torch.tensor(4.0))


def test_copies_are_routed_alike():
    params = parameters()
    opt = make("Muon", params.items())
    for _, other in (copy.deepcopy((params, opt)), pickle.loads(pickle.dumps((params, opt)))):
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
    assert float(opt.state[params["b"]]["step"]) == 3  # state follows its place
    assert params["a"] not in opt.state

    opt.state.clear()  # a fresh start
    run(opt, {"b": params["b"]}, 6, 7)
    assert float(opt.state[params["b"]]["step"]) == 1
    opt.state[params["b"]]["exp_avg"] = torch.zeros(4, 3, dtype=torch.float64)
    give_gradients({"b": params["b"]}, 7)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of 0.0 of shape \(4, 3\) must be contiguous, .* torch.float32"):
        opt.step()


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("attached", [False, True])
def test_one_optimizer_in_two_threads(engine, attached):
    """As many steps as were asked for, one after the other. With `attach`, autograd steps on a thread for every device."""
    (params, opt), (others, other) = ((p, ours.Adam(p.items(), lr=0.01, engine=engine)) for p in (parameters(), parameters()))
    if attached:
        opt.attach(params.values())
    else:
        give_gradients(params, 0)
    before, problems = sys.getswitchinterval(), []

    def go(half):
        try:
            for _ in range(20):
                sum(p.sum() for p in half).backward() if attached else opt.step()
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=go, args=(list(params.values())[i::2],)) for i in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not problems
    give_gradients(others, 0)
    for p in others.values() if attached else ():
        p.grad = torch.ones_like(p)
    for _ in range(20 if attached else 40):
        other.step()
    assert same(bits(params), bits(others))
    assert same_state(opt.state_dict(), other.state_dict())


def life(name, engine, dtype, device, path):
    """What becomes of parameters, and of state, where this is the default device of whatever names none."""
    params = parameters(dtype, {"w": W, "b": B})
    given = []
    for t in range(4):
        give_gradients(params, t)
        given.append({k: p.grad for k, p in params.items()})
    losses = [curvature(params, t)[1] for t in range(4)]
    with torch.device(device):
        opt = make(name, params.items(), engine=engine)
        for t, grads in enumerate(given):
            for k, p in params.items():
                p.grad = grads[k].clone()
            if name == "Sophia":
                opt.update_hessian(losses[t])
            ours.clip_grad_norm_(opt, 0.5)
            if t == 2:
                opt.stats(next=True)
            opt.step()
            if t == 0:
                opt.load_state_dict(copy.deepcopy(opt).state_dict())
            elif t == 1:
                opt.save(path)
                opt.load(path)
            with opt.averaged():
                pass
        norm = opt.stats().all["grad_norm"]
    assert {v.device.type for p in params.values() for v in opt.state[p].values()} == {"cpu"}
    return {**bits(params), "norm": torch.as_tensor(norm)}, opt.state_dict()


def lives(name, engine, dtype, folder):
    found = [life(name, engine, dtype, device, Path(folder) / f"{device}.safetensors") for device in ("cpu", "meta")]
    return same(*(each for each, _ in found)) and same_state(*(each for _, each in found))


@pytest.mark.parametrize(
    "name", slowly(TORCH, ("AdamW", "Adafactor", "Muon", "SOAP", "KronPSGD", "Prodigy", "Sophia", "ScheduleFreeSGD"))
)
@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_nothing_follows_the_default_device(name, engine, tmp_path):
    """`torch.set_default_device("cuda")` is for models that are made after it."""
    assert lives(name, engine, torch.bfloat16 if name in ("AdamW", "Muon") else torch.float32, tmp_path)


def interpreted():
    with tempfile.TemporaryDirectory() as folder:
        return [name for name in ("Adafactor", "Muon") if not lives(name, "triton", torch.float32, folder)]


@pytest.mark.slow  # interpreted
def test_nothing_follows_the_default_device_on_the_triton_engine():
    pytest.importorskip("triton")
    from interpreter import in_the_interpreter

    assert in_the_interpreter("interpreted", "test_torch_state") == []


# ---- one count ---------------------------------------------------------------------------------------------------------------
WRITES = {
    "data": lambda step: step.data.fill_(9),
    "numpy": lambda step: step.numpy().fill(9),
    "detach": lambda step: step.detach().fill_(9),
    "fill_": lambda step: step.fill_(9),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["AdamW", "SOAP", "NAdamW"])
def test_a_step_count_that_is_written_is_the_count(name, engine, write):
    """However it is written: the next step is that of a state that was loaded with this count."""
    params = parameters(shapes={"a": (4, 3), "b": (4, 3)})
    opt = getattr(ours, name)(list(params.values()), engine=engine)
    run(opt, params, 0, 3)
    twin = copy.deepcopy(opt)
    others = dict(zip(params, twin.param_groups[0]["params"], strict=True))
    saved = twin.state_dict()
    for k, state in saved["state"].items():
        saved["state"][k] = {**state, "step": torch.tensor(9.0)}
    twin.load_state_dict(saved)
    for p in params.values():
        WRITES[write](opt.state[p]["step"])
    run(opt, params, 3, 5)
    run(twin, others, 3, 5)
    assert all(torch.equal(params[k], others[k]) for k in params)
    assert {float(state["step"]) for state in opt.state.values()} == {11}


@pytest.mark.parametrize("place", ["first", "second", "count"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_breaks_off_counts_what_was_stepped(place, error, monkeypatch):
    """What was stepped is counted, what was not is not, and training goes on as torch's does."""

    def make_two(cls):
        params = parameters(torch.float64, {"a": (4, 3), "b": (5,)})
        groups = [{"params": [params["a"]]}, {"params": [params["b"]], "amsgrad": True}]
        return params, cls(groups, lr=0.1, weight_decay=0.0)

    params, opt = make_two(ours.Adam)
    others, reference = make_two(torch.optim.Adam)
    run(opt, params, 0, 3)
    run(reference, others, 0, 3)

    step, stepped = local.run_part, []

    def failing(part, *args):
        if len(stepped) == (place == "second"):
            raise error
        stepped.append(part)
        step(part, *args)

    def uncounted(*args):
        raise error

    with monkeypatch.context() as broken:
        if place == "count":
            broken.setattr(local.LocalCpu, "count", uncounted)
        else:
            broken.setattr(local, "run_part", failing)
        give_gradients(params, 3)
        with pytest.raises(error):
            opt.step()
    done = {"first": [], "second": ["a"], "count": ["a", "b"]}[place]
    give_gradients(others, 3)
    for k, p in others.items():
        p.grad = p.grad if k in done else None
    reference.step()
    assert {k: int(opt.state[p]["step"]) for k, p in params.items()} == {k: 3 + (k in done) for k in params}
    run(opt, params, 4, 7)
    run(reference, others, 4, 7)
    for k in params:
        torch.testing.assert_close(params[k], others[k], atol=1e-12, rtol=0)
