"""Checkpoints: going on bit for bit, in the same front end and in another; settings, groups and routing; switches and imports."""

import json
import os
import subprocess
import sys
import tracemalloc
import warnings

import numpy as np
import pytest
from helpers import MATRIX, NAMES, copies, distance, make, problem, run, same_bits, slowly

import rlx_optim
from rlx_optim import CheckpointError
from rlx_optim.checkpoint import latest, summary
from rlx_optim.checkpoint.files import opened
from rlx_optim.registry import spec_class

SMALL = {"w": (6, 4), "wide": (3, 8), "b": (5,), "s": (), "c": (2, 3, 2)}
EXTRA = {"sgd": {"momentum": 0.9, "dampening": 0.1}, "nadamw": {"convention": "torch"}, "adamw": {"amsgrad": True}}
EXTRA |= {"soap": {"precondition_frequency": 2}, "kronpsgd": {"preconditioner_update_probability": 0.5}}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*before any estimate.*")
        yield


def state_of(opt):
    """Every slot, counter and count of a named optimizer."""
    names = [name for member in opt._family() for name in member._records]
    return {k: ({s: np.array(a) for s, a in opt.state(k).items()}, opt.step_count(k)) for k in names}


def assert_same_state(a, b):
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name][1] == b[name][1], name
        assert a[name][0].keys() == b[name][0].keys(), name
        for slot, value in a[name][0].items():
            other = b[name][0][slot]
            assert value.shape == other.shape, (name, slot)
            assert value.tobytes() == other.tobytes() or (not value.shape and float(value) == float(other)), (name, slot)


# ---- the named API --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_uninterrupted_one(name, engine, tmp_path):
    """k = 4 is inside Sophia's cycle of 3, SOAP's of 2 (counted from its second call) and KronPSGD's schedule."""
    params, gradients = problem(steps=9)
    opt = make(name, engine=engine, **EXTRA.get(name, {}))
    run(opt, params, gradients[:4])
    assert opt.save(tmp_path / "a.safetensors") == tmp_path / "a.safetensors"
    twin, mine = rlx_optim.load(tmp_path / "a.safetensors", engine=engine), copies(params)
    assert_same_state(opt, twin)
    assert twin.iteration == 4
    run(opt, params, gradients[4:], start=4)
    run(twin, mine, gradients[4:], start=4)
    assert same_bits(mine, params)
    assert_same_state(opt, twin)


def test_settings_groups_routing_and_policy_come_back(tmp_path):
    otherwise = rlx_optim.Lion(lr=0.5, groups=[{"match": "*.bias", "lr": 0.25}])
    groups = [{"match": "emb*", "use": "otherwise"}, {"match": ["odd", "even"], "lr": 0.1, "momentum": 0.5}]
    opt = rlx_optim.Muon(lr=0.3, otherwise=otherwise, groups=groups, nonfinite="skip", engine="reference")
    params, gradients = problem({"emb": (4, 4), "odd": (4, 4), "x.bias": (3,), "y": (3,), "z": (4, 4)}, steps=3)
    opt.step_all(params, gradients[0])
    opt.step_all(params, {**gradients[1], "y": np.full(3, np.nan, np.float32)})
    opt.save(tmp_path / "a.safetensors")
    twin = rlx_optim.load(tmp_path / "a.safetensors", engine="reference")
    assert repr(twin) == repr(opt)
    assert twin.routing_report() == opt.routing_report()
    assert (twin.nonfinite, twin.skipped, twin.iteration) == ("skip", 1, 2)
    assert type(twin.otherwise) is rlx_optim.Lion
    for name in params:
        assert twin.hyperparameters(name) == opt.hyperparameters(name), name
    new = np.ones((4, 4), np.float32)  # a name that joins later is routed as it would have been
    for each in (opt, twin):
        each.step("even", new.copy(), new)
        each.step("embedding", new.copy(), new)
    assert twin.routing_report() == opt.routing_report()
    assert twin.hyperparameters("even")["momentum"] == 0.5


def test_a_save_in_the_middle_of_an_iteration(tmp_path):
    params, gradients = problem(SMALL, steps=2)
    opt = rlx_optim.AdamW(engine="reference")
    opt.step_all(params, gradients[0])
    opt.step("w", params["w"], gradients[1]["w"])
    opt.save(tmp_path / "a.safetensors")
    twin = rlx_optim.load(tmp_path / "a.safetensors", engine="reference")
    with pytest.raises(ValueError, match="already stepped"):
        twin.step("w", params["w"], gradients[1]["w"])
    twin.step("b", params["b"], gradients[1]["b"])
    assert (twin.step_count("w"), twin.step_count("b"), twin.step_count("s")) == (2, 2, 1)
    twin.end_iteration()
    twin.step("w", params["w"], gradients[1]["w"])


def test_tensors_that_join_late_keep_their_counts_and_empty_ones_survive(tmp_path):
    opt = rlx_optim.Adam(engine="reference")
    params, gradients = problem({"a": (3,), "b": (2, 2), "none": (0, 4)}, steps=4)
    for t, g in enumerate(gradients):
        part = {k: v for k, v in g.items() if k != "b" or t > 1}
        opt.step_all({k: params[k] for k in part}, part)
    opt.save(tmp_path / "a.safetensors")
    twin = rlx_optim.load(tmp_path / "a.safetensors", engine="reference")
    assert [twin.step_count(k) for k in ("a", "b", "none")] == [4, 2, 4]
    assert_same_state(opt, twin)


@pytest.mark.parametrize(("name", "field", "values"), [("adamw", "amsgrad", (True, False)), ("sgd", "momentum", (0.9, 0.0))])
def test_state_behind_a_changed_setting(name, field, values, tmp_path):
    """What a setting has left behind, and what it will need at the next step, are in the file as well."""
    params, gradients = problem(SMALL, steps=6)
    for first, then in (values, values[::-1]):
        mine = copies(params)
        opt = make(name, engine="reference", **{field: first})
        run(opt, mine, gradients[:2])
        setattr(opt, field, then)
        opt.save(tmp_path / "a.safetensors")
        twin, others = rlx_optim.load(tmp_path / "a.safetensors", engine="reference"), copies(mine)
        for each, p in ((opt, mine), (twin, others)):
            run(each, p, gradients[2:4])
            setattr(each, field, first)
            run(each, p, gradients[4:])
        assert same_bits(mine, others)


def test_names_of_every_kind(tmp_path):
    names = ["a/b/c", "ü.ñ.漢", "with space", "__metadata__", "[0]", "*", "", "q\"'\\\n", "🙂"]
    params, gradients = problem(dict.fromkeys(names, (3,)), steps=1)
    opt = rlx_optim.AdamW(engine="reference")
    opt.step_all(params, gradients[0])
    opt.save(tmp_path / "a.safetensors")
    assert_same_state(opt, rlx_optim.load(tmp_path / "a.safetensors"))
    opt.step("\ud800", np.ones(2, np.float32), np.ones(2, np.float32))
    with pytest.raises(CheckpointError, match="UTF-8"):
        opt.save(tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]


# ---- schedules ------------------------------------------------------------------------------------------------------------
def scheduled():
    lr = rlx_optim.schedules.linear_warmup(0.4, 8)
    otherwise = rlx_optim.AdamW(lr=lr, groups=[{"match": "b*", "eps": lambda it: 1e-3 + it}])
    return lr, rlx_optim.Muon(lr=lr, otherwise=otherwise, groups=[{"match": "w*", "weight_decay": lr}], engine="reference")


def test_schedules_are_marked_and_demanded_again(tmp_path):
    lr, opt = scheduled()
    params, gradients = problem(SMALL, steps=5)
    run(opt, params, gradients[:2])
    path = tmp_path / "a.safetensors"
    opt.save(path)
    with opened(path) as snapshot:
        assert snapshot.members[0].values.callables == ["lr"]
        assert snapshot.members[0].values.hyperparameters["lr"] == lr(2) == 0.1
        assert snapshot.members[1].groups[0].values.callables == ["lr", "eps"]
        assert snapshot.members[1].groups[0].values.hyperparameters["eps"] == 2.001
    given = {
        "lr": lr,
        "groups": {"w*": {"weight_decay": lr}},
        "otherwise": {"lr": lr, "groups": {"b*": {"eps": lambda it: 1e-3 + it}}},
    }
    twin, mine = rlx_optim.load(path, engine="reference", **given), copies(params)
    run(opt, params, gradients[2:], start=2)
    run(twin, mine, gradients[2:], start=2)
    assert same_bits(mine, params)
    for missing, said in (
        ({**given, "lr": None}, r"Muon: lr was a callable .* worth 0.1\).*load\(path, lr=…\)"),
        ({**given, "groups": {}}, r"group 'w\*': weight_decay was .*load\(path, groups=\{'w\*': dict\(weight_decay=…\)\}\)"),
        ({**given, "otherwise": {}}, r"AdamW: lr was .*load\(path, otherwise=dict\(lr=…\)\)"),
    ):
        with pytest.raises(CheckpointError, match=said):
            rlx_optim.load(path, **{k: v for k, v in missing.items() if v is not None})
    number = rlx_optim.load(path, **{**given, "lr": 0.125})
    assert number.lr == 0.125
    for extra in (
        {"momentum": 0.9},
        {"otherwise": {**given["otherwise"], "otherwise": {}}},
        {"groups": {**given["groups"], "q": {}}},
    ):
        with pytest.raises(TypeError, match="load"):
            rlx_optim.load(path, **{**given, **extra})


def test_a_probe_is_given_again(tmp_path):
    def probe(name, t, shape):
        return np.random.default_rng(t).standard_normal(shape)

    params, gradients = problem({"w": (4, 3)}, steps=4)
    opt = rlx_optim.KronPSGD(probe=probe, engine="reference")
    run(opt, params, gradients[:2])
    opt.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="probe was a callable"):
        rlx_optim.load(tmp_path / "a.safetensors")
    twin, mine = rlx_optim.load(tmp_path / "a.safetensors", engine="reference", probe=probe), copies(params)
    assert same_bits(run(opt, params, gradients[2:]), run(twin, mine, gradients[2:]))


# ---- many files -----------------------------------------------------------------------------------------------------------
def test_every_keep_and_the_latest(tmp_path):
    params, gradients = problem(SMALL, steps=9)
    opt = rlx_optim.AdamW(engine="reference")
    written = []
    for g in gradients:
        opt.step_all(params, g)
        written.append(opt.save(tmp_path / "run-{iteration}.safetensors", every=2, keep=3))
    assert [w and w.name for w in written[:4]] == [None, "run-00000002.safetensors", None, "run-00000004.safetensors"]
    assert sorted(os.listdir(tmp_path)) == [f"run-0000000{i}.safetensors" for i in (4, 6, 8)]
    assert rlx_optim.load_latest(tmp_path).iteration == 8
    assert rlx_optim.load_latest(tmp_path / "run-{iteration}.safetensors").iteration == 8
    newest = tmp_path / "run-00000008.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="SKIPPED A BAD CHECKPOINT.*run-00000008.*cut off"):
        assert rlx_optim.load_latest(tmp_path).iteration == 6
    for path in tmp_path.iterdir():
        path.write_bytes(b"x" * 1000)
    with pytest.warns(UserWarning, match="SKIPPED"), pytest.raises(CheckpointError, match=r"no good checkpoint.*run-00000004"):
        rlx_optim.load_latest(tmp_path)
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        rlx_optim.load_latest(tmp_path / "other-{iteration}.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        rlx_optim.load_latest(tmp_path / "nowhere")


def test_a_folder_and_who_is_newest(tmp_path):
    opt = rlx_optim.AdamW(engine="reference")
    opt.step_all(*({"p": np.ones(2, np.float32)} for _ in range(2)))
    later = opt.save(tmp_path, keep=2)
    assert later == tmp_path / "checkpoint-00000001.safetensors"
    opt._iteration = 0  # a run that was taken back: the file written last counts, whatever its number
    opt.save(tmp_path, keep=2)
    os.utime(later)
    assert latest(tmp_path).name == "checkpoint-00000000.safetensors"
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")  # not ours, and none of our business
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path).name == "checkpoint-00000000.safetensors"
    opt.save(tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00000000.safetensors", "model.safetensors"]


def test_bad_arguments_of_save(tmp_path):
    opt = rlx_optim.AdamW()
    for bad in ({"every": 0}, {"every": True}, {"keep": 0}, {"keep": 1.5}):
        with pytest.raises(ValueError, match="integer >= 1"):
            opt.save(tmp_path / "a-{iteration}.safetensors", **bad)
    with pytest.raises(ValueError, match="keep=2 needs a folder"):
        opt.save(tmp_path / "a.safetensors", keep=2)
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "a.safetensors" / "x").touch()
    assert opt.save(tmp_path / "a.safetensors") == tmp_path / "a.safetensors" / "checkpoint-00000000.safetensors"


def test_the_umask_links_and_leftovers(tmp_path):
    opt = rlx_optim.AdamW()
    leftover = tmp_path / ".a.safetensors.0123456789abcdef.rlx-tmp"
    leftover.write_bytes(b"of a writer that died")
    before = os.umask(0o027)
    try:
        opt.save(tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "a.safetensors")
    inode = (tmp_path / "a.safetensors").stat().st_ino
    opt.save(tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "a.safetensors").stat().st_ino != inode
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "link.safetensors"]


def test_nan_is_refused_unless_asked_for(tmp_path):
    opt = rlx_optim.AdamW(engine="reference")
    p = np.ones((3, 2), np.float32)
    opt.step("w", p, np.full((3, 2), np.nan, np.float32))
    with pytest.raises(CheckpointError, match=r"m of 'w' holds NaN; allow_nan=True"):
        opt.save(tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []
    opt.save(tmp_path / "a.safetensors", allow_nan=True)
    with pytest.raises(CheckpointError, match="holds NaN"):
        rlx_optim.load(tmp_path / "a.safetensors")
    assert np.isnan(rlx_optim.load(tmp_path / "a.safetensors", allow_nan=True).state("w")["m"]).all()
    opt = rlx_optim.AdamW(engine="reference")
    opt.step("w", p, np.full((3, 2), 1e30, np.float32))  # v is infinite: a fact, not an accident
    opt.save(tmp_path / "b.safetensors")
    assert np.isinf(rlx_optim.load(tmp_path / "b.safetensors").state("w")["v"]).all()


def test_peak_memory_is_one_tensor(tmp_path):
    shapes = {f"w{i}": (1024, 512) for i in range(12)}  # 2 MiB each, 48 MiB of state
    opt = rlx_optim.AdamW(engine="reference")
    p, g = np.ones((1024, 512), np.float32), np.ones((1024, 512), np.float32)
    for name in shapes:
        opt.step(name, p, g)
    tracemalloc.start()
    try:
        opt.save(tmp_path / "a.safetensors")
        _, saving = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        twin = rlx_optim.load(tmp_path / "a.safetensors", engine="reference")
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert saving < 2 * 4 << 20  # two chunks of the verification; the state is 48 MiB
    assert peak - now < 4 << 20, (peak, now)
    assert now - before < twin.state_bytes() + (2 << 20)


def test_the_safetensors_library_reads_it(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    params, gradients = problem(steps=2)
    opt = rlx_optim.SOAP(engine="reference")
    run(opt, params, gradients)
    opt.save(tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert file.metadata()["format"] == "rlx_optim"
        manifest = json.loads(file.metadata()["manifest"])
        for key in file.keys():  # noqa: SIM118
            name, _, slot = key.rpartition("/")
            assert file.get_tensor(key).tobytes() == opt.state(name)[slot].tobytes()
    assert manifest["parameters"]["w"] | {"reason": ""} == {
        "optimizer": 0, "group": None, "shape": [24, 16], "dtype": "float32", "step": 2, "counters": {}, "reason": "",
        "stepped": False, "pieces": 1, "piece": [24, 16],
    }  # fmt: skip


def test_generator_keys_are_kept_and_held(tmp_path):
    opt = rlx_optim.KronPSGD(seed=7, engine="reference")
    opt.step("w", np.ones((3, 2), np.float32), np.ones((3, 2), np.float32))
    opt.save(tmp_path / "a.safetensors")
    with opened(tmp_path / "a.safetensors"):
        from rlx_optim.random import key
    raw = (tmp_path / "a.safetensors").read_bytes()
    manifest = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["manifest"])
    assert manifest["parameters"]["w"]["generator"] == [list(key(7, "w"))]


# ---- from one optimizer to another ------------------------------------------------------------------------------------------
def test_convert_to_carries_what_means_the_same():
    params, gradients = problem(SMALL, steps=6)
    opt = rlx_optim.AdamW(engine="reference")
    run(opt, params, gradients[:5])
    before = state_of(opt)
    new = opt.convert_to("muon", lr=0.01)
    assert type(new) is rlx_optim.Muon
    assert new.engine.name == "reference"
    assert new.iteration == 5
    assert new.state("w")["m"].tobytes() == opt.state("w")["m"].tobytes()
    assert new.step_count("w") == 5
    corrected = [o.state("b")["v"] / (1 - b2**5) for o, b2 in ((opt, 0.999), (new, 0.95))]  # to Muon's AdamW, whose betas differ
    np.testing.assert_allclose(*corrected, rtol=1e-5)
    lines = {line.split()[0]: line for line in new.conversion_report().splitlines()}
    assert "m, step count 5" in lines["w"]
    assert "v: Muon has no such state" in lines["w"]
    assert "nothing" in lines["b"].split()[-1]
    run(new, params, gradients[5:])
    assert before.keys() == state_of(opt).keys()
    assert all(before[k][0]["m"].tobytes() == opt.state(k)["m"].tobytes() for k in before)
    assert opt.conversion_report() == ""


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_no_conversion_throws_the_parameters_away(source, target):
    """The first steps after a switch are no larger than a few of the same optimizer's own."""
    shapes = {"w": (6, 4), "b": (5,)}
    params, gradients = problem(shapes, steps=8)
    opt = make(source, engine="reference", **EXTRA.get(source, {}))
    run(opt, params, gradients[:4])
    extra = {"lr": 0.01, "momentum": 0.9} if target == "sgd" else {}
    new = opt.convert_to(target, **extra)
    assert new.iteration == 4
    report = new.conversion_report()
    assert {"w", "b"} <= {line.split()[0] for line in report.splitlines()}
    fresh = make(target, engine="reference", **({"momentum": 0.9} if target == "sgd" else {}))
    theirs, start = copies(params), copies(params)
    run(new, params, gradients[4:], start=4)
    run(fresh, theirs, gradients[4:], start=4)
    for k in shapes:
        own = np.abs(theirs[k] - start[k]).max()
        assert np.abs(params[k] - start[k]).max() <= 4 * own + 1e-6, (k, report)


def test_conversions_keep_the_corrected_moments():
    params, gradients = problem({"w": (6, 4)}, steps=3)
    opt = rlx_optim.AdamW(betas=(0.9, 0.99), engine="reference")
    run(opt, params, gradients)
    new = opt.convert_to("qhadamw", betas=(0.995, 0.999))
    for slot, was, now in (("m", 0.9, 0.995), ("v", 0.99, 0.999)):
        want = opt.state("w")[slot] / (1 - was**3)
        np.testing.assert_allclose(new.state("w")[slot] / (1 - now**3), want, rtol=1e-5)
    torch_like = opt.convert_to("nadamw", convention="torch")
    assert 0 < float(torch_like.state("w")["mu_product"]) < 1
    sgd = opt.convert_to("sgd", lr=0.1, momentum=0.8)
    np.testing.assert_allclose(sgd.state("w")["m"], opt.state("w")["m"] / 0.2, rtol=1e-6)
    assert sgd.state("w")["started"] == 1
    back = sgd.convert_to("lion")
    np.testing.assert_allclose(back.state("w")["m"], opt.state("w")["m"], rtol=1e-6)
    with pytest.raises(ValueError, match="unknown optimizer"):
        opt.convert_to("adamx")
    with pytest.raises(ValueError, match="lr must be"):
        opt.convert_to("lion", lr=-1)


@pytest.mark.parametrize("name", NAMES)
def test_to_the_same_optimizer_is_a_copy(name):
    params, gradients = problem(SMALL, steps=8)
    opt = make(name, engine="reference", **EXTRA.get(name, {}))
    run(opt, params, gradients[:4])
    new, mine = opt.convert_to(name, **opt.hyperparameters()), copies(params)
    assert_same_state(opt, new)
    assert same_bits(run(opt, params, gradients[4:], start=4), run(new, mine, gradients[4:], start=4))


# ---- torch ----------------------------------------------------------------------------------------------------------------
class Torch:
    """One of rlx_optim.torch's classes on copies of parameters, and how to step it."""

    def __init__(self, name, params, engine="auto", prefix="", **settings):
        self.torch = pytest.importorskip("torch")
        import rlx_optim.torch

        self.params = {k: self.torch.nn.Parameter(self.torch.from_numpy(v.copy())) for k, v in params.items()}
        kind = getattr(rlx_optim.torch, spec_class(name).title)
        self.opt = kind([(prefix + k, p) for k, p in self.params.items()], engine=engine, **{**EXTRA.get(name, {}), **settings})

    def run(self, gradients):
        for grads in gradients:
            for k, p in self.params.items():
                p.grad = self.torch.from_numpy(grads[k].copy())
            if hasattr(self.opt, "update_hessian"):
                self.opt.update_hessian(lambda: sum((p**3).sum() for p in self.params.values()), every=3)
            self.opt.step()
        return self

    def values(self):
        return {k: p.detach().numpy().copy() for k, p in self.params.items()}

    def state(self):
        return {
            k: {s: float(v) if s == "batch" else v.clone() for s, v in self.opt.state[p].items()} for k, p in self.params.items()
        }

    def assert_state(self, other):
        mine, theirs = self.state(), other if isinstance(other, dict) else other.state()
        for k in mine:
            assert mine[k].keys() == theirs[k].keys(), k
            for slot in mine[k]:
                a, b = (self.torch.as_tensor(each[k][slot]) for each in (mine, theirs))
                assert a.dtype == b.dtype, (k, slot)
                assert self.torch.equal(a, b), (k, slot)


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_torch_resumes_bit_for_bit_by_name(name, engine, tmp_path):
    params, gradients = problem(SMALL, steps=8)
    ours = Torch(name, params, engine).run(gradients[:4])
    ours.opt.save(tmp_path / "a.safetensors")
    settings = {"lr": 0.5, "weight_decay": 0.25}  # another optimizer, wrapped, in other settings and with state of its own
    twin = Torch(name, ours.values(), engine, "module._orig_mod.", **settings).run(gradients[:1])
    for k, p in twin.params.items():
        p.data.copy_(ours.params[k].data)
    twin.opt.load(tmp_path / "a.safetensors")
    twin.assert_state(ours)
    for mine, theirs in zip(ours.opt.param_groups, twin.opt.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k not in ("params", "param_names")} == {
            k: v for k, v in theirs.items() if k not in ("params", "param_names")
        }
    ours.run(gradients[4:])
    twin.run(gradients[4:])
    assert same_bits(twin.values(), ours.values())
    twin.assert_state(ours)


def test_torch_names_are_needed_and_prefixes_go(tmp_path):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch
    from rlx_optim.routing import bare

    for given, want in {
        "module.w": "w", "module.module.w": "w", "_orig_mod.module.a.b": "a.b", "layers.0._orig_mod.w": "layers.0.w",
        "module._fsdp_wrapped_module.w": "w", "a._checkpoint_wrapped_module.w": "a.w", "encoder.module.w": "encoder.module.w",
        "module": "module", "w": "w",
    }.items():  # fmt: skip
        assert bare(given) == want
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"goes by names.*named_parameters"):
        rlx_optim.torch.AdamW(model.parameters()).save(tmp_path / "a.safetensors")
    twice = [("w", torch.nn.Parameter(torch.ones(1))), ("module.w", torch.nn.Parameter(torch.ones(1)))]
    with pytest.raises(CheckpointError, match="two parameters are called 'w'"):
        rlx_optim.torch.AdamW(twice).save(tmp_path / "a.safetensors")
    rlx_optim.torch.AdamW(torch.nn.DataParallel(model)).save(tmp_path / "a.safetensors")
    with opened(tmp_path / "a.safetensors") as snapshot:
        assert list(snapshot.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_torch_refusals_leave_everything_as_it_was(tmp_path):
    pytest.importorskip("torch")
    params, gradients = problem(SMALL, steps=2)
    path = tmp_path / "a.safetensors"
    ours = Torch("adamw", params).run(gradients)
    ours.opt.save(path)
    other = {**{k: v for k, v in params.items() if k != "w"}, "x": np.ones((2, 2), np.float32)}
    cases = [
        ("lion", params, {}, "it is of AdamW; load it into rlx_optim.torch.AdamW, not into Lion"),
        ("adamw", other, {}, "no state for 'x'; it has state for 'w', unknown here .strict=False"),
        ("adamw", {**params, "w": np.ones((4, 6), np.float32)}, {}, r"'w' has shape \(6, 4\) there and \(4, 6\) here"),
    ]
    for name, there, settings, said in cases:
        twin = Torch(name, there, amsgrad=True, **settings) if name == "adamw" else Torch(name, there, **settings)
        state, groups = twin.state(), [dict(g) for g in twin.opt.param_groups]
        with pytest.raises(CheckpointError, match=said):
            twin.opt.load(path)
        twin.assert_state(state)
        assert [dict(g) for g in twin.opt.param_groups] == groups
    with pytest.raises(TypeError, match="no 'lr' that was a callable"):
        ours.opt.load(path, lr=1.0)
    loose = Torch("adamw", other, lr=0.5)
    fresh = loose.state()["x"]
    loose.opt.load(path, strict=False)
    assert loose.state()["b"]["step"] == 2
    assert loose.state()["x"]["step"] == fresh["step"] == 0
    assert [g["lr"] for g in loose.opt.param_groups] == [1e-3, 0.5]  # what the file does not know keeps its settings


def test_torch_wide_narrow_and_half_parameters(tmp_path):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch

    def opt(dtype):
        p = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
        p.grad = torch.full_like(p, 0.1)
        made = rlx_optim.torch.AdamW([("w", p)])
        made.step()
        return p, made

    for dtype in (torch.float64, torch.bfloat16):
        p, mine = opt(dtype)
        mine.save(tmp_path / "a.safetensors")
        _, twin = opt(dtype)
        twin.step()
        twin.load(tmp_path / "a.safetensors")
        assert torch.equal(next(iter(twin.state.values()))["exp_avg"], mine.state[p]["exp_avg"])
    narrow, wide = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    p, mine = opt(torch.float64)
    mine.load(narrow)  # widened, exactly
    mine.save(wide)
    with pytest.raises(CheckpointError, match=r"float64; .* would lose bits"):
        opt(torch.float32)[1].load(wide)
    assert rlx_optim.load(wide).state("w")["m"].tobytes() == mine.state[p]["exp_avg"].numpy().tobytes()
    with opened(narrow) as snapshot:
        assert snapshot.parameters["w"].dtype == "bfloat16"
        assert snapshot.parameters["w"].tensors["m"].dtype == np.float32


def test_torch_split_parameters(tmp_path):
    torch = pytest.importorskip("torch")
    params, gradients = problem({"qkv": (12, 4), "experts": (3, 4, 5)}, steps=6)
    split = {"split": {"qkv": 3, "experts": 3}, "otherwise": None}
    for name in ("soap", "kronpsgd", "muon"):
        ours = Torch(name, params, **split).run(gradients[:3])
        ours.opt.save(tmp_path / "a.safetensors")
        twin = Torch(name, ours.values(), prefix="module.", **split_prefixed(split))
        twin.opt.load(tmp_path / "a.safetensors")
        twin.assert_state(ours)
        assert same_bits(twin.run(gradients[3:]).values(), ours.run(gradients[3:]).values())
        with pytest.raises(CheckpointError, match="'qkv' is split into 3 of shape"):
            rlx_optim.load(tmp_path / "a.safetensors")
    assert torch


def split_prefixed(split):
    return {**split, "split": {f"module.{k}": v for k, v in split["split"].items()}}


# ---- optax ----------------------------------------------------------------------------------------------------------------
class Optax:
    """One of rlx_optim.optax's transformations on copies of parameters, and how to step it."""

    def __init__(self, name, params, **settings):
        self.jax, self.optax = pytest.importorskip("jax"), pytest.importorskip("optax")
        import rlx_optim.optax as front

        extra = {"learning_rate": 0.01, **EXTRA.get(name, {}), **settings}
        factory = spec_class(name).optax.factory or name
        self.front, self.tx = front, getattr(front, factory)(**extra)
        self.params = {k: self.jax.numpy.asarray(v) for k, v in params.items()}
        self.state = self.tx.init(self.params)
        more = {"obj_fn": lambda p: sum((x**3).sum() for x in self.jax.tree.leaves(p))} if name == "sophia" else {}

        def step(p, s, g):
            updates, s = self.tx.update(g, s, p, **more)
            return self.optax.apply_updates(p, updates), s

        self.step = self.jax.jit(step)

    def run(self, gradients):
        for grads in gradients:
            self.params, self.state = self.step(self.params, self.state, {k: self.jax.numpy.asarray(v) for k, v in grads.items()})
        return self

    def save(self, path):
        self.front.save_state(path, self.tx, self.state, self.params)

    def load(self, path):
        return self.front.load_state(path, self.tx, self.params)

    def assert_state(self, state):
        tree = self.jax.tree
        assert tree.structure(state) == tree.structure(self.state)
        for a, b in zip(tree.leaves(state), tree.leaves(self.state), strict=True):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", slowly(NAMES))
def test_optax_resumes_bit_for_bit(name, tmp_path):
    shapes = SMALL if name not in MATRIX else {k: SMALL[k] for k in ("w", "b")}
    params, gradients = problem(shapes, steps=6)
    ours = Optax(name, params).run(gradients[:4])
    ours.save(tmp_path / "a.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = ours.load(tmp_path / "a.safetensors")
    ours.assert_state(state)
    mine = ours.params
    ours.run(gradients[4:])
    there = ours.params, ours.state
    ours.params, ours.state = mine, state
    ours.run(gradients[4:])
    assert same_bits(*({k: np.asarray(v) for k, v in each.items()} for each in (ours.params, there[0])))
    ours.assert_state(there[1])


def test_optax_refusals_and_warnings(tmp_path):
    optax = pytest.importorskip("optax")
    params, gradients = problem(SMALL, steps=2)
    path = tmp_path / "a.safetensors"
    ours = Optax("adamw", params, learning_rate=optax.linear_schedule(0.1, 0.0, 10), mask=lambda p: {k: k != "b" for k in p})
    ours.run(gradients).save(path)
    with opened(path) as snapshot:
        assert snapshot.members[0].values.callables == ["lr"]
        assert snapshot.members[0].values.hyperparameters["lr"] == pytest.approx(0.08)
        assert snapshot.spec(snapshot.parameters["b"]).weight_decay == 0
        assert snapshot.spec(snapshot.parameters["w"]).weight_decay == 1e-4
    with pytest.warns(UserWarning, match=r"lr of .* was 0.08.* and is 0.01 now; weight_decay of 'b' was 0.0 and is 0.0001"):
        Optax("adamw", params).load(path)
    with pytest.raises(CheckpointError, match="stepped by AdamW there and by Lion here"):
        Optax("lion", params).load(path)
    with pytest.raises(CheckpointError, match="no state for 'x'"):
        Optax("adamw", {**params, "x": np.ones(3, np.float32)}).load(path)
    with pytest.raises(CheckpointError, match="unknown here"):
        Optax("adamw", {k: v for k, v in params.items() if k != "b"}).load(path)
    with pytest.raises(CheckpointError, match="'vmax' is missing there"):
        Optax("adamw", params, amsgrad=True).run([]).load(_without_vmax(tmp_path, params, gradients))
    with pytest.raises(TypeError, match=r"made by rlx_optim.optax"):
        ours.front.save_state(path, optax.adamw(1e-3), ours.state, ours.params)
    opt = rlx_optim.AdamW(engine="reference")
    run(opt, params, gradients)
    opt.step("w", params["w"], gradients[0]["w"])
    opt.save(path)
    with pytest.raises(CheckpointError, match="between 2 and 3 steps"):
        ours.load(path)


def _without_vmax(tmp_path, params, gradients):
    Optax("adamw", params, amsgrad=False).run(gradients).save(tmp_path / "b.safetensors")
    return tmp_path / "b.safetensors"


def test_optax_nested_trees_and_stacks(tmp_path):
    jax = pytest.importorskip("jax")
    import rlx_optim.optax as front

    params = {
        "blocks": [{"kernel": jax.numpy.ones((2, 3, 4))}, {"kernel": jax.numpy.ones((1, 3, 3))}],
        "out": (jax.numpy.ones(3),),
    }
    tx = front.soap(0.1, stacked={"blocks.*": 1})
    state, update = tx.init(params), jax.jit(tx.update)
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    for _ in range(3):
        _, state = update(grads, state, params)
    front.save_state(tmp_path / "a.safetensors", tx, state, params)
    back = front.load_state(tmp_path / "a.safetensors", tx, params)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True))
    with opened(tmp_path / "a.safetensors") as snapshot:
        assert list(snapshot.parameters) == ["blocks.0.kernel", "blocks.1.kernel", "out.0"]
        assert snapshot.parameters["blocks.0.kernel"].tensors["L1"].shape == (2, 3, 3)
        assert snapshot.parameters["blocks.1.kernel"].piece == (3, 3)


# ---- from one front end to another ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_every_front_end_takes_over_bit_identical_state(name, tmp_path):
    """named -> torch -> optax -> named: the same settings, the same state; and each goes on as itself, starting from there."""
    params, gradients = problem({"w": (6, 4), "b": (5,)}, steps=6)
    a, b, c = (tmp_path / f"{k}.safetensors" for k in "abc")
    settings = {**EXTRA.get(name, {}), "lr": 0.01, "weight_decay": 0.125}
    opt = rlx_optim.create(name, engine="reference", **settings)
    run(opt, params, gradients[:3])
    opt.save(a)
    there = Torch(name, params)
    there.opt.load(a)
    there.opt.save(b)
    twin = rlx_optim.load(b, engine="reference")
    assert_same_state(opt, twin)
    assert repr(twin) == repr(opt)
    mine, theirs = copies(params), copies(params)
    assert same_bits(run(opt, mine, gradients[3:], start=3), run(twin, theirs, gradients[3:], start=3))
    opt = rlx_optim.load(a, engine="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its settings are other ones
        traced = Optax(name, params)
        traced.state = traced.load(b)
        traced.save(c)
    twin = rlx_optim.load(c, engine="reference")
    if name in ("nadamw", "laprop", "schedulefreeadamw", "schedulefreesgd"):  # optax keeps numbers in float32
        counters = opt._records["w"].counters
        assert all(float(twin.state("w")[k]) == pytest.approx(np.float32(v), rel=1e-7) for k, v in counters.items())
        for member in twin._family():
            for record in member._records.values():
                record.counters = dict(opt._records[record.name].counters)
    assert_same_state(opt, twin)
    moved = {k: np.asarray(v) for k, v in traced.run(gradients[3:4]).params.items()}
    assert all(np.isfinite(v).all() for v in moved.values())
    if name in ("lion", "sgd"):
        assert distance(moved, run(twin, copies(params), gradients[3:4], start=3), params) < 1e-4


def test_groups_travel_from_the_named_api_to_torch_and_back(tmp_path):
    pytest.importorskip("torch")
    params, gradients = problem({"w": (4, 4), "emb": (4, 4), "x.bias": (3,), "y": (3,)}, steps=6)
    groups = [{"match": "emb", "use": "otherwise"}]
    otherwise = rlx_optim.AdamW(lr=0.5, groups=[{"match": "*.bias", "lr": 0.25}])
    opt = rlx_optim.Muon(lr=0.125, otherwise=otherwise, groups=groups, engine="reference")
    run(opt, params, gradients[:3])
    opt.save(tmp_path / "a.safetensors")
    there = Torch("muon", params, engine="cpu")  # one group of each rule
    first = there.opt.param_groups[0]
    there.opt.load(tmp_path / "a.safetensors")
    assert there.opt.param_groups[0] is first
    found = {n: (g["rule"], g["lr"]) for g in there.opt.param_groups for n in g["param_names"]}
    assert found == {"w": ("muon", 0.125), "emb": ("adamw", 0.5), "x.bias": ("adamw", 0.25), "y": ("adamw", 0.5)}
    there.run(gradients[3:4])
    there.opt.save(tmp_path / "b.safetensors")
    twin = rlx_optim.load(tmp_path / "b.safetensors", engine="reference")
    assert {k: twin.hyperparameters(k)["lr"] for k in params} == {k: lr for k, (_, lr) in found.items()}
    assert "matches 'emb'" in twin.routing_report()
    mine = there.values()
    run(twin, mine, gradients[4:])
    there.run(gradients[4:])
    assert distance(mine, there.values(), params) < 1e-3


def test_torch_gets_schedules_as_numbers_and_keeps_a_tensor_of_lr(tmp_path):
    torch = pytest.importorskip("torch")
    params, gradients = problem({"w": (4, 4)}, steps=2)
    opt = rlx_optim.AdamW(lr=lambda it: 0.1 / (1 + it), engine="reference")
    run(opt, params, gradients)
    opt.save(tmp_path / "a.safetensors")
    there = Torch("adamw", params, lr=torch.tensor(0.7))
    with pytest.raises(CheckpointError, match=r"lr was a callable .*load\(path, lr=…\)"):
        there.opt.load(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="torch takes numbers"):
        there.opt.load(tmp_path / "a.safetensors", lr=lambda it: 0.1)
    there.opt.load(tmp_path / "a.safetensors", lr=0.25)
    assert torch.is_tensor(there.opt.param_groups[0]["lr"])
    assert there.opt.param_groups[0]["lr"] == 0.25


def test_what_maximizes_is_not_taken_where_nothing_can(tmp_path):
    pytest.importorskip("torch")
    params, gradients = problem({"w": (4, 4)}, steps=1)
    Torch("adamw", params, maximize=True).run(gradients).opt.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="maximized, which the named API"):
        rlx_optim.load(tmp_path / "a.safetensors")
    there = Torch("adamw", params)
    there.opt.load(tmp_path / "a.safetensors")
    assert there.opt.param_groups[0]["maximize"] is True


# ---- other people's states --------------------------------------------------------------------------------------------------
TORCH_OPTIM = [
    ("SGD", "sgd", {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}, 1e-6),
    ("Adam", "adam", {"weight_decay": 0.1}, 1e-4),
    ("AdamW", "adamw", {"amsgrad": True}, 1e-3),
    ("NAdam", "nadamw", {"decoupled_weight_decay": True, "weight_decay": 0.1}, 1e-3),
    ("RAdam", "radam", {"weight_decay": 0.1}, 1e-4),
    ("Adafactor", "adafactor", {"weight_decay": 0.1}, 1e-4),
    ("Muon", "muon", {"lr": 0.02}, 3e-2),  # torch orthogonalises in bfloat16
]


@pytest.mark.parametrize(("kind", "name", "settings", "bar"), TORCH_OPTIM, ids=[row[0] for row in TORCH_OPTIM])
def test_torch_optim_to_a_checkpoint_and_back(kind, name, settings, bar, tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import convert, to_state_dict

    params, gradients = problem({k: s for k, s in SMALL.items() if name != "muon" or len(s) == 2}, steps=8)
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in params.items()}
    opt = getattr(torch.optim, kind)(list(tensors.items()), **settings)

    def steps(optimizer, tensors, gradients):
        for g in gradients:
            for k, p in tensors.items():
                p.grad = torch.from_numpy(g[k].copy())
            optimizer.step()

    steps(opt, tensors, gradients[:4])
    torch.save({"model": {}, "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    snapshot = convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert [member.optimizer for member in snapshot.members] == [name]
    ours = rlx_optim.load(tmp_path / "b.safetensors", engine="reference")
    twins = {k: torch.nn.Parameter(p.detach().clone()) for k, p in tensors.items()}
    twin = getattr(torch.optim, kind)(list(twins.items()), lr=0.5)
    twin.load_state_dict(to_state_dict(tmp_path / "b.safetensors"))
    assert twin.param_groups[0].keys() == opt.param_groups[0].keys()
    start = {k: p.detach().numpy().copy() for k, p in tensors.items()}
    mine = copies(start)
    for g in gradients[4:]:
        ours.step_all(mine, g)
    steps(opt, tensors, gradients[4:])
    steps(twin, twins, gradients[4:])
    theirs = {k: p.detach().numpy() for k, p in tensors.items()}
    assert all(torch.equal(twins[k], tensors[k]) for k in twins)
    assert distance(mine, theirs, start) < bar


def test_state_dicts_that_do_not_say_enough(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import from_state_dict, read_state_dict, to_state_dict

    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = torch.optim.AdamW([p])
    opt.step()
    saved = opt.state_dict()
    with pytest.raises(CheckpointError, match="no names for its 1 parameters"):
        from_state_dict(saved)
    with pytest.raises(CheckpointError, match="2 names are given for 1"):
        from_state_dict(saved, names=["a", "b"])
    assert list(from_state_dict(saved, names=["module.a"]).parameters) == ["a"]
    del saved["param_groups"][0]["decoupled_weight_decay"]
    with pytest.raises(CheckpointError, match="which optimizer it is of"):
        from_state_dict(saved, names=["a"])
    assert from_state_dict(saved, "AdamW", ["a"]).members[0].optimizer == "adamw"
    with pytest.raises(CheckpointError, match="unknown optimizer 'adamx'"):
        from_state_dict(saved, "adamx", ["a"])
    for broken in ({}, {"state": {}, "param_groups": 3}, {"state": {0: {"exp_avg": 1}}, "param_groups": saved["param_groups"]}):
        with pytest.raises(CheckpointError):
            from_state_dict(broken, "adamw", ["a"])
    nadam = torch.optim.NAdam([p], weight_decay=0.1)
    with pytest.raises(CheckpointError, match="coupled weight decay"):
        from_state_dict(nadam.state_dict(), names=["a"])
    opt = rlx_optim.NAdamW(engine="reference")
    opt.step("a", np.ones(2, np.float32), np.ones(2, np.float32))
    opt.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="no NAdamW of the convention 'dozat'"):
        to_state_dict(tmp_path / "a.safetensors")
    lion = opt.convert_to("lion")
    lion.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"torch.optim has no Lion"):
        to_state_dict(tmp_path / "a.safetensors")
    torch.save({"model": 1}, tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"junk")
    for path in (tmp_path / "x.pt", tmp_path / "y.pt", tmp_path / "z.pt"):
        with pytest.raises(CheckpointError, match=path.name):
            read_state_dict(path)


def test_no_pickle_is_ever_executed(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import read_state_dict

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"state": {}, "param_groups": [Evil()]}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="weights_only"):
        read_state_dict(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


def test_our_own_state_dicts_convert(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import convert

    params, gradients = problem({"w": (6, 4), "b": (5,)}, steps=3)
    for name in NAMES:
        given = {"momentum": 0.1} if name == "scion" else {"otherwise": rlx_optim.AdamW()} if name in ("soap", "kronpsgd") else {}
        ours = Torch(name, params, **given).run(gradients)
        torch.save(ours.opt.state_dict(), tmp_path / "a.pt")
        convert(tmp_path / "a.pt", tmp_path / "a.safetensors", name)
        ours.opt.save(tmp_path / "b.safetensors")
        with opened(tmp_path / "a.safetensors") as one, opened(tmp_path / "b.safetensors") as two:
            assert not [d for d in summary.differences(one, two) if not d.startswith("optimizer: ")], name


class AuthorsSOAP:
    """The rule of the authors' soap.py on NumPy arrays, in the layout of its state: independent of ours, for two dimensions."""

    def __init__(self, params, lr=0.01, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01, every=2, most=5):
        self.params, self.state = params, {}
        self.group = {
            "lr": lr, "betas": betas, "shampoo_beta": -1, "eps": eps, "weight_decay": weight_decay, "precondition_frequency": every,
            "max_precond_dim": most, "merge_dims": False, "precondition_1d": False, "normalize_grads": False, "correct_bias": True,
        }  # fmt: skip

    def rotate(self, x, Q, back=False):
        for axis, q in enumerate(Q):
            if len(q):
                x = np.moveaxis(np.tensordot(x, q, ([axis], [1 if back else 0])), -1, axis)
        return x

    def step(self, grads):
        g = self.group
        (b1, b2), every = g["betas"], g["precondition_frequency"]
        for k, p in self.params.items():
            grad = grads[k].astype(np.float64)
            if k not in self.state:
                GG = [np.zeros((n, n)) if p.ndim > 1 and n <= g["max_precond_dim"] else [] for n in p.shape]
                s = self.state[k] = {
                    "step": 0,
                    "exp_avg": np.zeros(p.shape),
                    "exp_avg_sq": np.zeros(p.shape),
                    "GG": GG,
                    "Q": None,
                }
                self.average(s, grad, b2)
                s["Q"] = [np.linalg.eigh(m)[1][:, ::-1] if len(m) else [] for m in GG]
                continue
            s = self.state[k]
            s["step"] += 1
            rotated = self.rotate(grad, s["Q"])
            s["exp_avg"] = b1 * s["exp_avg"] + (1 - b1) * rotated
            s["exp_avg_sq"] = b2 * s["exp_avg_sq"] + (1 - b2) * rotated**2
            size = g["lr"] * np.sqrt(1 - b2 ** s["step"]) / (1 - b1 ** s["step"])
            p -= size * self.rotate(s["exp_avg"] / (np.sqrt(s["exp_avg_sq"]) + g["eps"]), s["Q"], back=True)
            p -= g["lr"] * g["weight_decay"] * p
            whole = self.rotate(s["exp_avg"], s["Q"], back=True)
            self.average(s, grad, b2)
            if s["step"] % every == 0:
                for axis, (m, q) in enumerate(zip(s["GG"], s["Q"], strict=True)):
                    if len(m):
                        order = np.argsort(-np.diag(q.T @ m @ q))
                        s["exp_avg_sq"] = np.take(s["exp_avg_sq"], order, axis)
                        s["Q"][axis] = np.linalg.qr(m @ q[:, order])[0]
            s["exp_avg"] = self.rotate(whole, s["Q"])

    def average(self, s, grad, beta):
        for axis, m in enumerate(s["GG"]):
            if len(m):
                other = [a for a in range(grad.ndim) if a != axis]
                m *= beta
                m += (1 - beta) * np.tensordot(grad, grad, (other, other))

    def state_dict(self):
        import torch

        def tensors(x):
            return [tensors(each) for each in x] if isinstance(x, list) else torch.tensor(np.asarray(x, np.float32))

        states = {i: {k: v if k == "step" else tensors(v) for k, v in s.items()} for i, s in enumerate(self.state.values())}
        return {"state": states, "param_groups": [{**self.group, "params": list(range(len(states)))}]}


def test_the_authors_soap(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import convert, to_state_dict

    params, gradients = problem({"w": (4, 9), "b": (3,)}, steps=12)  # 9 > most: one dimension without a basis
    wide = {k: v.astype(np.float64) for k, v in params.items()}
    theirs = AuthorsSOAP(wide)
    for g in gradients[:6]:
        theirs.step(g)
    torch.save(theirs.state_dict(), tmp_path / "soap.pt")
    (tmp_path / "names.txt").write_text("w\nb\n")
    convert(tmp_path / "soap.pt", tmp_path / "soap.safetensors", names=["w", "b"])
    ours = rlx_optim.load(tmp_path / "soap.safetensors", engine="reference")
    assert type(ours) is rlx_optim.SOAP
    assert ours.step_count("w") == 6
    start = {k: v.astype(np.float32) for k, v in wide.items()}
    mine = copies(start)
    for g in gradients[6:]:
        theirs.step(g)
        ours.step_all(mine, g)
    assert distance(mine, {k: v.astype(np.float32) for k, v in wide.items()}, start) < 1e-3
    back = to_state_dict(tmp_path / "soap.safetensors")
    was = torch.load(tmp_path / "soap.pt", weights_only=True)
    assert {k: v for k, v in back["param_groups"][0].items() if k != "param_names"} == was["param_groups"][0]
    for i, state in was["state"].items():
        assert back["state"][i]["step"] == state["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(back["state"][i][key], state[key])
        for key in ("GG", "Q"):
            assert [torch.is_tensor(m) for m in back["state"][i][key]] == [
                torch.is_tensor(m) and bool(m.numel()) for m in state[key]
            ]
            assert all(torch.equal(a, b) for a, b in zip(back["state"][i][key], state[key], strict=True) if torch.is_tensor(a))


OPTAX = {
    "sgd": ({"learning_rate": 0.01, "momentum": 0.9}, {}, 1e-4),
    **{name: ({"learning_rate": 0.01}, {}, 1e-3) for name in ("adam", "adamw", "nadamw", "ademamix", "adopt", "lamb", "lion")},
    "radam": ({"learning_rate": 0.01}, {"threshold": 4.0}, 1e-2),
    "adafactor": ({"learning_rate": 0.01, "momentum": 0.9}, {"min_dim_size_to_factor": 1}, 1e-3),
    "muon": ({"learning_rate": 0.01, "nesterov": False}, {}, None),  # optax's rules are other ones: see test_peers
    "sophia": ({"learning_rate": 0.01}, {}, None),
}


@pytest.mark.parametrize("name", slowly(OPTAX))
def test_optax_states_to_ours_and_back(name):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    import rlx_optim.optax as front
    from rlx_optim.optax.foreign import from_optax, to_optax

    settings, theirs, bar = OPTAX[name]
    made = (getattr(optax, name, None) or getattr(optax.contrib, name))(**settings, **theirs)
    routed = {"otherwise": rlx_optim.AdamW(), "route": lambda path, leaf: leaf.ndim == 2} if name == "muon" else {}
    tx = getattr(front, name)(**settings, **routed)
    params, gradients = problem({"w": (6, 4), "wide": (3, 8), "b": (5,), "one": (1,)}, steps=4)
    more = {"obj_fn": lambda p: sum((x**3).sum() for x in jax.tree.leaves(p))} if name == "sophia" else {}

    def go(tx, params, state, gradients):
        for g in gradients:
            updates, state = tx.update({k: jax.numpy.asarray(v) for k, v in g.items()}, state, params, **more)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = go(made, {k: jax.numpy.asarray(v) for k, v in params.items()}, made.init(params), gradients[:3])
    ours = from_optax(tx, state, params, count=3)
    assert int(ours.count) == 3
    back = to_optax(tx, ours, params, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True))
    if bar is not None:
        want, got = (go(each, params, its, gradients[3:])[0] for each, its in ((made, state), (tx, ours)))
        assert distance(*({k: np.asarray(v) for k, v in each.items()} for each in (got, want, params))) < bar


def test_optax_states_that_do_not_fit():
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    import rlx_optim.optax as front
    from rlx_optim.optax.foreign import from_optax, to_optax

    params = {"w": jax.numpy.ones((6, 4)), "cube": jax.numpy.ones((8, 3, 4))}
    whole = optax.adafactor(0.1)  # small matrices are not factored there: their means are exactly what ours would have
    state = whole.init(params)
    full = {k: jax.random.uniform(jax.random.key(1), v.shape) for k, v in params.items()}
    state = tuple(part._replace(v=full) if "v_row" in getattr(part, "_fields", ()) else part for part in state)
    ours = from_optax(front.adafactor(0.1), state, params)
    np.testing.assert_allclose(ours.slots["row"]["w"], full["w"].mean(-1), rtol=1e-6)
    np.testing.assert_allclose(ours.slots["col"]["cube"], full["cube"].mean(-2), rtol=1e-6)
    with pytest.raises(CheckpointError, match="optax keeps v of shape"):
        to_optax(front.adafactor(0.1), ours, params, whole.init(params))
    with pytest.raises(CheckpointError, match="two largest dimensions"):
        from_optax(front.adafactor(0.1), optax.adafactor(0.1, min_dim_size_to_factor=1).init(params), params)
    with pytest.raises(CheckpointError, match="no 'm' for 'cube'"):
        from_optax(front.lion(0.1), optax.adam(0.1).init(params), params)
    with pytest.raises(CheckpointError, match="optax has no QHAdamW"):
        from_optax(front.qhadamw(0.1), optax.adam(0.1).init(params), params)
    with pytest.raises(
        CheckpointError, match="optax has no LARS whose state could be taken over"
    ):  # its momentum is negated there
        from_optax(front.lars(0.1), optax.lars(0.1).init(params), params)


# ---- the command line -------------------------------------------------------------------------------------------------------
def cli(*words):
    pytest.importorskip("typer")
    from rlx_optim.cli import main

    return main([*map(str, words)])


def test_inspect(tmp_path, capsys):
    params, gradients = problem(SMALL, steps=3)
    opt = rlx_optim.Muon(groups=[{"match": "w[i]*", "lr": lambda it: 0.5}], engine="reference")
    run(opt, params, gradients[:2])
    opt.save(tmp_path / "a.safetensors")
    assert cli("inspect", tmp_path / "a.safetensors") == 0
    said = capsys.readouterr().out
    for word in ("iteration 2", "Muon(lr=0.02", "otherwise AdamW", "lr=0.5 (a callable)", "wide", "2×3×2", "SHA-256 verified"):
        assert word in said, word
    assert cli("inspect", tmp_path / "a.safetensors", tmp_path / "a.safetensors") == 0
    assert "equal" in capsys.readouterr().out
    opt.step_all(params, gradients[2])
    opt.otherwise.lr = 0.75
    opt.save(tmp_path / "b.safetensors")
    assert cli("inspect", tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 1
    said = capsys.readouterr().out
    for word in ("iteration: 2 and 3", "AdamW: lr is 0.0003 and 0.75", "w: steps 2 and 3", "w/m: 24 of 24 numbers differ"):
        assert word in said, word
    (tmp_path / "c.safetensors").write_bytes(b"junk" * 100)
    assert cli("inspect", tmp_path / "c.safetensors") == 2
    assert "c.safetensors: not a checkpoint" in capsys.readouterr().err


def test_convert_on_the_command_line(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = torch.optim.Adam([p])
    opt.step()
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    (tmp_path / "names.txt").write_text("w\n")
    assert cli("convert", tmp_path / "a.pt", tmp_path / "b.safetensors") == 2
    assert "--names" in capsys.readouterr().err
    assert cli("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", "--names", tmp_path / "names.txt") == 0
    assert "adam, 1 parameters, 1 steps" in capsys.readouterr().out
    assert rlx_optim.load(tmp_path / "b.safetensors").step_count("w") == 1
    assert cli("convert", tmp_path / "b.safetensors", tmp_path / "c.pt") == 0
    opt.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=True))
    assert opt.state[p]["step"] == 1
    assert cli("convert", tmp_path / "a.pt", tmp_path / "c.pt") == 2
    assert cli("convert", tmp_path / "a.pt", tmp_path / "d.safetensors", "--names", tmp_path / "nowhere") == 2


def test_importing_the_package_imports_no_safetensors():
    code = "import sys, rlx_optim; print('safetensors' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---- Adan and ADOPT of timm and of their authors -----------------------------------------------------------------------------
def adan_of_timm(groups, params, gradients):
    """Its state dict after these gradients, as timm 1.0.30 and sail-sg/Adan keep it: the step is the group's, the gradient negated."""
    import torch

    (b1, b2, b3), states = groups["betas"], {}
    for i, p in enumerate(params.values()):
        m, d, n = (np.zeros(p.shape) for _ in range(3))
        before = gradients[0][list(params)[i]]
        for g in (each[list(params)[i]] for each in gradients):
            s, before = g - before, g
            m, d, n = b1 * m + (1 - b1) * g, b2 * d + (1 - b2) * s, b3 * n + (1 - b3) * (g + b2 * s) ** 2
        kept = {"exp_avg": m, "exp_avg_diff": d, "exp_avg_sq": n, "neg_pre_grad": -before}
        states[i] = {k: torch.tensor(np.asarray(v, np.float32)) for k, v in kept.items()}
    return {"state": states, "param_groups": [{**groups, "step": len(gradients), "params": list(range(len(params)))}]}


def adopt_of_timm(groups, params, gradients):
    import torch

    (b1, b2), states = groups["betas"], {}
    for i, name in enumerate(params):
        m, v = 0.0, gradients[0][name].astype(float) ** 2
        for t, g in enumerate((each[name].astype(float) for each in gradients[1:]), 1):
            m = b1 * m + (1 - b1) * np.clip(g / np.maximum(np.sqrt(v), groups["eps"]), -(t**0.25), t**0.25)
            v = b2 * v + (1 - b2) * g**2
        kept = {"exp_avg": m, "exp_avg_sq": v}
        states[i] = {k: torch.tensor(np.asarray(x, np.float32)) for k, x in kept.items()} | {
            "step": torch.tensor(float(len(gradients)))
        }
    return {"state": states, "param_groups": [{**groups, "params": list(range(len(params)))}]}


ADAN = {"lr": 0.01, "betas": (0.9, 0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0, "no_prox": False}
ADOPT = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0}
OTHERS = [
    ("adan", adan_of_timm, {**ADAN, "caution": False, "foreach": None}),
    ("adan", adan_of_timm, {**ADAN, "max_grad_norm": 0.0, "fused": False, "foreach": True}),  # the authors'
    ("adopt", adopt_of_timm, {**ADOPT, "decoupled": True, "clip_exp": 0.25, "caution": False, "maximize": False}),
    ("adopt", adopt_of_timm, {**ADOPT, "decouple": False, "foreach": None, "maximize": False}),  # the authors'
]


@pytest.mark.parametrize(("name", "state_dict", "group"), OTHERS, ids=[f"{row[0]}{i}" for i, row in enumerate(OTHERS)])
def test_adan_and_adopt_of_timm_and_of_their_authors_go_on_here(name, state_dict, group):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch as front
    from rlx_optim.torch.foreign import from_state_dict

    params, gradients = problem(SMALL, steps=6)
    saved = state_dict(group, params, gradients[:4])
    settings = {k: v for k, v in group.items() if k in rlx_optim.registry.spec_class(name).fields}
    whole, start = rlx_optim.create(name, engine="reference", **settings), copies(params)
    run(whole, start, gradients[:4])
    want = run(whole, copies(start), gradients[4:], start=4)
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in start.items()}
    opt = front.create(name, tensors.items(), lr=0.5, engine="torch")
    opt.load_state_dict(saved)
    assert opt.param_groups[0].get("decouple") == (group.get("decoupled", group.get("decouple")))
    for g in gradients[4:]:
        for k, p in tensors.items():
            p.grad = torch.from_numpy(g[k].copy())
        opt.step()
    assert distance({k: p.detach().numpy() for k, p in tensors.items()}, want, start) < 2e-5
    snapshot = from_state_dict(saved, None if "no_prox" in group or "clip_exp" in group else name, list(params))
    assert snapshot.members[0].optimizer == name
    assert {p.step for p in snapshot.parameters.values()} == {4}
    if "caution" in group:
        saved["param_groups"][0]["caution"] = True
        with pytest.raises(ValueError, match="timm's cautious variant"):
            opt.load_state_dict(saved)


def test_adan_starts_afresh_and_gives_its_average_away():
    """Its second moment is of other numbers than AdamW's: with AdamW's count and none of its own, steps would be far too long."""
    params, gradients = problem(SMALL, steps=3)
    adamw = rlx_optim.AdamW(engine="reference")
    run(adamw, copies(params), gradients)
    adan = adamw.convert_to("adan")
    assert not adan.state("w")["m"].any()
    assert "step count 3: Adan needs both moments" in adan.conversion_report()
    run(adan, copies(params), gradients)
    lion = adan.convert_to("lion")
    np.testing.assert_array_equal(lion.state("w")["m"], adan.state("w")["m"])
    mix = adamw.convert_to("ademamix")
    np.testing.assert_array_equal(mix.state("w")["m"], adamw.state("w")["m"])
    assert not mix.state("w")["slow"].any()
    stable = adamw.convert_to("stableadamw", betas=(0.9, 0.999))  # whose moments are kept corrected
    np.testing.assert_allclose(stable.state("w")["v"], adamw.state("w")["v"] / (1 - 0.999**3), rtol=1e-5)
