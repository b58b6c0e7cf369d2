"""Checkpoints of the named API: resuming, schedules, many files, other optimizers."""

import json
import os
import tracemalloc
import warnings

import numpy as np
import pytest
from checkpoint_cases import EXTRA, SMALL, assert_same_state, state_of
from helpers import NAMES, copies, make, problem, run, same_bits

import rlx_optim
from rlx_optim import CheckpointError
from rlx_optim.checkpoint import latest
from rlx_optim.checkpoint.files import open_checkpoint
from rlx_optim.random import key, split_key


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
    with open_checkpoint(path) as snapshot:
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


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="save: path must name a file or a folder, got ''"):
        rlx_optim.AdamW().save("")


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


def test_keys_of_noise_are_kept(tmp_path):
    opt = rlx_optim.KronPSGD(seed=7, engine="reference")
    opt.step("w", np.ones((3, 2), np.float32), np.ones((3, 2), np.float32))
    assert opt.state("w")["key"].tolist() == split_key(key(7, "w"))
    opt.save(tmp_path / "a.safetensors")
    with open_checkpoint(tmp_path / "a.safetensors") as file:
        assert file.tensors()["w/key"].read().tolist() == split_key(key(7, "w"))


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
