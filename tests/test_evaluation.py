"""Where a model is evaluated, if that is not where its gradients are taken: Schedule-Free in the three front ends."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from helpers import distance, problem, run, same_bits

import rlx_optim
from rlx_optim.checkpoint.format import CheckpointError

FOLDER = Path(__file__).parent / "golden"
PROBLEM = np.load(FOLDER / "problem.npz")
GOLDEN = ["schedulefree_adamw__author__default", "schedulefree_sgd__author__default"]
NAMES = ["schedulefreeadamw", "schedulefreesgd"]
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "warmup_steps": 3}
SHAPES = {"w": (6, 4), "b": (5,), "s": ()}
each = pytest.mark.parametrize("name", NAMES)


def golden(file):
    """The settings, the start, the gradients, and x after the steps on record."""
    found = np.load(FOLDER / f"{file}.npz")
    note = json.loads(str(found["json"]))
    start = {k: PROBLEM[f"params0/{k}"] for k in note["tensors"]}
    grads = [{k: np.array(PROBLEM[f"grads/{k}"][t]) for k in start} for t in range(max(note["steps"]))]
    want = {t: [{k: found[f"{at}/{k}"][i] for k in start} for at in ("after", "eval")] for i, t in enumerate(note["steps"])}
    return note["optimizer"].replace("_", ""), note["hyper"], start, grads, want


# ---- named ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["cpu", "reference"])
@each
def test_x_is_the_weighted_average_of_z(name, engine):
    """z by the formulas in float64, from the gradients and the parameters that came of them."""
    params, gradients = problem(SHAPES, steps=9)
    opt = rlx_optim.create(name, **SETTINGS, r=1.0, weight_lr_power=1.0, engine=engine)
    start = {k: v.astype(np.float64) for k, v in params.items()}
    z, v, x, total, top = start, dict.fromkeys(start, 0.0), dict(start), 0.0, 0.0
    for t, grads in enumerate(gradients, 1):
        y, rate = {k: p.astype(np.float64) for k, p in params.items()}, SETTINGS["lr"] * min(1, t / 3)
        top = max(top, rate)
        total += t * top
        v = {k: 0.999 * v[k] + 0.001 * grads[k].astype(np.float64) ** 2 for k in y}
        scaled = {k: grads[k] / (np.sqrt(v[k] / (1 - 0.999**t)) + 1e-8) if name == NAMES[0] else grads[k] for k in y}
        z = {k: z[k] - rate * (scaled[k] + 0.1 * y[k]) for k in y}
        x = {k: x[k] + t * top / total * (z[k] - x[k]) for k in y}
        opt.step_all(params, grads)
        assert distance({k: opt.averaged(k) for k in y}, x, start) < 5e-5
        assert distance(params, {k: 0.9 * x[k] + 0.1 * z[k] for k in y}, start) < 5e-5


def test_without_momentum_it_is_sgd_and_polyaks_average():
    params, gradients = problem(SHAPES, steps=7)
    plain = {k: v.copy() for k, v in params.items()}
    free, sgd = rlx_optim.ScheduleFreeSGD(lr=0.1, momentum=0.0), rlx_optim.SGD(lr=0.1)
    seen = []
    for grads in gradients:
        free.step_all(params, grads)
        sgd.step_all(plain, grads)
        seen.append({k: v.copy() for k, v in plain.items()})
        assert all(np.allclose(params[k], plain[k], rtol=0, atol=1e-6) for k in params)
        assert all(np.allclose(free.averaged(k), np.mean([s[k] for s in seen], 0), rtol=0, atol=1e-6) for k in params)


@each
def test_a_changed_momentum_keeps_x(name):
    """x goes on from where it was, whatever share of it p is next."""
    params, gradients = problem(SHAPES, steps=6)
    opt = rlx_optim.create(name, lr=0.05)
    run(opt, params, gradients[:5])
    x = {k: opt.averaged(k).astype(np.float64) for k in params}
    z = {k: params[k] - opt.state(k)["lead"] * (0.9 / 0.1) for k in params}
    setattr(opt, *(("betas", (0.5, 0.999)) if name == NAMES[0] else ("momentum", 0.5)))
    opt.lr = 0.0
    opt.step_all(params, gradients[5])
    for k in params:
        want = x[k] + (z[k] - x[k]) / 6
        assert np.allclose(opt.averaged(k), want, rtol=0, atol=2e-6)
        assert np.allclose(params[k], 0.5 * want + 0.5 * z[k], rtol=0, atol=2e-6)


@each
def test_averaged_by_name(name, tmp_path):
    params, gradients = problem(SHAPES, steps=4)
    opt = rlx_optim.create(name, **SETTINGS)
    with pytest.raises(KeyError, match="no state for 'w'"):
        opt.averaged("w")
    run(opt, params, gradients)
    before = {k: v.copy() for k, v in params.items()}
    x = {k: opt.averaged(k) for k in params}
    assert same_bits(params, before)
    assert all(not np.shares_memory(x[k], params[k]) for k in params)
    assert not np.array_equal(x["w"], params["w"])
    opt.step("w", other := params["w"].copy(), gradients[0]["w"])
    assert np.array_equal(opt.averaged("w"), opt.averaged("w", other))
    opt.save(tmp_path / "a.safetensors")
    for again in (rlx_optim.load(tmp_path / "a.safetensors"), pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt)):
        with pytest.raises(ValueError, match=r"the array last stepped as 'w' is gone; give it: averaged\('w', param\)"):
            again.averaged("w")
        assert np.array_equal(again.averaged("w", other), opt.averaged("w"))
    with pytest.raises(ValueError, match=r"'w' came with shape \(5,\), but its state is for \(6, 4\)"):
        opt.averaged("w", params["b"])
    del other
    with pytest.raises(ValueError, match="is gone"):
        opt.averaged("w")


def test_in_a_family():
    params, gradients = problem({"h.weight": (6, 4), "h.bias": (6,)}, steps=4)
    opt = rlx_optim.Muon(otherwise=rlx_optim.ScheduleFreeAdamW(lr=0.1))
    run(opt, params, gradients)
    assert np.array_equal(opt.averaged("h.weight"), params["h.weight"])
    assert not np.array_equal(opt.averaged("h.bias"), params["h.bias"])
    plain = rlx_optim.AdamW()
    plain.step("w", params["h.weight"], gradients[0]["h.weight"])
    with pytest.raises(TypeError, match="AdamW: it has no other point to evaluate at"):
        plain.averaged("w")


@each
def test_the_average_is_not_converted(name):
    """Weights of an average that is not there would hold x where it begins."""
    params, gradients = problem(SHAPES, steps=5)
    opt = rlx_optim.Lion()
    run(opt, params, gradients)
    new = opt.convert_to(name)
    assert new.state("w")["weight_sum"] == 0
    new.step_all(params, gradients[0])
    assert np.array_equal(new.averaged("w"), params["w"])  # x = z = p after its first step


# ---- torch ---------------------------------------------------------------------------------------------------------------------
torch = pytest.importorskip("torch")
import rlx_optim.torch  # noqa: E402


class Net:
    """Parameters, their optimizer, and the gradients to step them with."""

    def __init__(self, name, start, engine="auto", dtype=torch.float32, **settings):
        self.params = {k: torch.nn.Parameter(torch.from_numpy(np.array(v)).to(dtype)) for k, v in start.items()}
        self.opt = rlx_optim.torch.create(name, list(self.params.items()), engine=engine, **settings)

    def run(self, gradients):
        for grads in gradients:
            for k, p in self.params.items():
                p.grad = torch.from_numpy(np.array(grads[k])).to(p.dtype)
            self.opt.step()
        return self

    def values(self):
        return {k: p.detach().float().numpy().copy() for k, p in self.params.items()}


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("file", GOLDEN)
def test_golden_in_torch(file, engine):
    name, settings, start, grads, want = golden(file)
    net = Net(name, start, engine, **settings)
    for t, g in enumerate(grads, 1):
        net.run([g])
        if t in want:
            assert distance(net.values(), want[t][0], start) < 2e-4
            with net.opt.averaged():
                assert distance(net.values(), want[t][1], start) < 2e-4


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each
def test_evaluation_leaves_no_trace(name, dtype, engine):
    """Training with evaluations in between is training without, bit for bit; what is stepped then is refused and untouched."""
    start, gradients = problem(SHAPES, steps=6)
    plain, net = (Net(name, start, engine, dtype, **SETTINGS) for _ in range(2))
    for grads in gradients:
        plain.run([grads])
        net.run([grads])
        net.opt.train()  # is there already
        before = net.values()
        with net.opt.averaged():
            net.opt.eval()  # is there already
            x = net.values()
            with pytest.raises(RuntimeError, match=r"it is in evaluation mode.*call train\(\) before step\(\)"):
                net.opt.step()
            with net.opt.averaged():
                pass
            assert same_bits(net.values(), x)
        assert same_bits(net.values(), before)
        state = net.opt.state[net.params["w"]]
        assert np.array_equal(x["w"], (net.params["w"].detach().double() + state["lead"].double()).to(dtype).float().numpy())
    assert same_bits(net.values(), plain.values())
    assert not same_bits(x, before)


@pytest.mark.parametrize("saved_in", ["train", "eval"])
@pytest.mark.parametrize("how", ["state_dict", "file", "pickle"])
@each
def test_the_checkpoint_has_both_points(name, how, saved_in, tmp_path):
    """Whichever mode it was saved in, and whichever point the model was saved at, training goes on as if without a break."""
    start, gradients = problem(SHAPES, steps=6)
    net = Net(name, start, **SETTINGS).run(gradients[:3])
    y = net.values()
    with net.opt.averaged():
        x = net.values()
    getattr(net.opt, saved_in)()
    there = net.values()
    assert same_bits(there, x if saved_in == "eval" else y)
    if how == "pickle":
        again = copy.deepcopy(net)
    else:
        again = Net(name, there, **SETTINGS)
        if how == "file":
            net.opt.save(tmp_path / "a.safetensors")
            again.opt.load(tmp_path / "a.safetensors")
        else:
            again.opt.load_state_dict(net.opt.state_dict())
    assert same_bits(again.values(), there)
    if saved_in == "eval":
        with pytest.raises(RuntimeError, match="evaluation mode"):
            again.opt.step()
    again.opt.eval()
    assert same_bits(again.values(), x)
    again.opt.train()
    assert same_bits(again.values(), y)
    net.opt.train()
    assert same_bits(net.run(gradients[3:]).values(), again.run(gradients[3:]).values())


def test_a_kept_state_dict_stays_whole():
    start, gradients = problem(SHAPES, steps=2)
    net = Net("schedulefreesgd", start, **SETTINGS).run(gradients)
    with net.opt.averaged():
        saved = net.opt.state_dict()
    assert all("p" in state for state in saved["state"].values())
    assert not any("p" in state for state in net.opt.state_dict()["state"].values())


def test_files_saved_in_evaluation_mode_are_for_torch(tmp_path):
    start, gradients = problem(SHAPES, steps=2)
    net = Net("schedulefreesgd", start, **SETTINGS).run(gradients)
    net.opt.eval()
    net.opt.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"saved in evaluation mode.*after opt.train\(\)"):
        rlx_optim.load(tmp_path / "a.safetensors")
    net.opt.train()
    net.opt.save(tmp_path / "a.safetensors")
    assert np.array_equal(rlx_optim.load(tmp_path / "a.safetensors").averaged("w", net.values()["w"]), _x(net)["w"])


@each
def test_state_of_the_package_is_refused_by_name(name):
    """As schedulefree 1.4.1 writes it."""
    start, gradients = problem(SHAPES, steps=1)
    net = Net(name, start).run(gradients)
    before, at = net.opt.state_dict(), net.values()
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "r": 0.0, "k": 4, "warmup_steps": 0, "train_mode": True}
    group |= {"weight_sum": 0.04, "lr_max": 0.1, "scheduled_lr": 0.1, "weight_lr_power": 2.0, "weight_decay": 0, "foreach": True}
    state = {i: {"z": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)} for i, p in enumerate(net.params.values())}
    with pytest.raises(ValueError, match=r"the state is of the schedulefree package, whose z cannot.*new optimizer"):
        net.opt.load_state_dict({"state": state, "param_groups": [group | {"params": [0, 1, 2]}]})
    assert same_bits(net.values(), at)
    assert str(net.opt.state_dict()) == str(before)


def _x(net):
    with net.opt.averaged():
        return net.values()


def test_weights_loaded_later_and_rules_without_such_a_point():
    start, gradients = problem({"h.weight": (6, 4), "h.bias": (6,)}, steps=2)
    net = Net("muon", {k: 0 * v for k, v in start.items()}, otherwise=rlx_optim.ScheduleFreeAdamW(lr=0.1))
    with torch.no_grad():
        for k, p in net.params.items():
            p.copy_(torch.from_numpy(start[k]))
    assert same_bits(_x(net), start)
    net.run(gradients)
    at = net.values()
    x = _x(net)
    assert np.array_equal(x["h.weight"], at["h.weight"])
    assert not np.array_equal(x["h.bias"], at["h.bias"])
    plain = Net("adamw", start)
    plain.opt.eval()
    plain.run(gradients)  # nothing was put elsewhere, so nothing is refused


# ---- jax -----------------------------------------------------------------------------------------------------------------------
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import rlx_optim.optax as front  # noqa: E402


def rolled(tx, params, gradients):
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in gradients:
        params, state = step(params, state, grads)
        yield params, state


@pytest.mark.parametrize("file", GOLDEN)
def test_golden_in_jax(file):
    name, settings, start, grads, want = golden(file)
    betas = dict(zip(("b1", "b2"), settings.pop("betas", ()), strict=False))
    tx = front.create(name, settings.pop("lr"), **settings, **betas)
    for t, (params, state) in enumerate(rolled(tx, start, grads), 1):
        if t in want:
            assert distance({k: np.asarray(v) for k, v in params.items()}, want[t][0], start) < 2e-4
            x = jax.jit(front.averaged)(state, params)
            assert distance({k: np.asarray(v) for k, v in x.items()}, want[t][1], start) < 2e-4


def test_averaged_wherever_the_state_is():
    start, gradients = problem(SHAPES, steps=3)
    inner = front.schedulefreesgd(0.05)
    params, state = list(rolled(inner, start, gradients))[-1]
    want = front.averaged(state, params)
    assert not np.array_equal(want["w"], params["w"])
    chained = optax.chain(optax.identity(), front.schedulefreesgd(0.05))
    injected = optax.inject_hyperparams(front.schedulefreesgd)(0.05)
    for tx in (chained, injected):
        params, state = list(rolled(tx, start, gradients))[-1]
        assert all(np.allclose(v, want[k], rtol=0, atol=1e-6) for k, v in front.averaged(state, params).items())
    labels = {"w": "free", "b": "other", "s": "free"}
    tx = optax.multi_transform({"free": front.schedulefreesgd(0.05), "other": front.lion(0.1)}, labels)
    params, state = list(rolled(tx, start, gradients))[-1]
    x = front.averaged(state, params)
    assert np.allclose(x["w"], want["w"], rtol=0, atol=1e-6)
    assert np.array_equal(x["b"], params["b"])
    with pytest.raises(ValueError, match="no other point to evaluate at"):
        front.averaged(front.lion(0.1).init(start), start)
