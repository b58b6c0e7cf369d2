"""Optimizers of others: one class, registered, in every front end; and those of installed packages."""

import copy
import inspect
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from slowmix import SlowMix

import rlx_optim
from rlx_optim import registry, rule
from rlx_optim.checkpoint import CheckpointError
from rlx_optim.registry import OURS, register, spec_class

HERE = Path(__file__).parent
SETTINGS = {"lr": 0.01, "betas": (0.8, 0.95), "beta3": 0.99, "alpha": 2.0, "eps": 1e-6, "weight_decay": 0.1}
SHAPES = {"w": (6, 5), "b": (5,), "s": ()}


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))


@pytest.fixture
def mix():
    return register(SlowMix)


def start():
    rng = np.random.default_rng(0)
    return {k: np.asarray(rng.standard_normal(s), np.float32) for k, s in SHAPES.items()}


def gradients(steps=6):
    rng = np.random.default_rng(1)
    return [{k: np.asarray(rng.standard_normal(s), np.float32) for k, s in SHAPES.items()} for _ in range(steps)]


def by_hand(params, grads, lr, betas, beta3, alpha, eps, weight_decay):
    (b1, b2), out = betas, {}
    for k, p in params.items():
        p, m1, m2, v = (np.array(x, np.float64) for x in (p, 0 * p, 0 * p, 0 * p))
        for t, g in enumerate((np.float64(g[k]) for g in grads), 1):
            m1, m2, v = b1 * m1 + (1 - b1) * g, beta3 * m2 + (1 - beta3) * g, b2 * v + (1 - b2) * g * g
            p = p - lr * ((m1 / (1 - b1**t) + alpha * m2) / (np.sqrt(v / (1 - b2**t)) + eps) + weight_decay * p)
        out[k] = p
    return out


def close(got, want, bar=2e-6):
    for k, value in want.items():
        np.testing.assert_allclose(np.asarray(got[k], np.float64), value, rtol=0, atol=bar, err_msg=k)


def stepped(opt, params, grads):
    for each in grads:
        opt.step_all(params, each)
    return params


# ---- names --------------------------------------------------------------------------------------------------------------
def rule_class(title="Other", **attributes):
    return type(title, (SlowMix,), {"aliases": (), **attributes})


def test_register_gives_the_class_back_and_may_be_repeated():
    assert register(SlowMix) is SlowMix
    assert register(SlowMix) is SlowMix
    assert rlx_optim.list_optimizers() == [*registry.FILES, "slowmix"]
    assert rlx_optim.register is register is rule.register

    @rlx_optim.register
    class Mine(rule.Spec):
        lr: float = rule.real(0.1)

        def slots(self, shape):
            return {}

        def update(self, E, x):
            return x

    assert spec_class("mine") is Mine
    assert (Mine.name, Mine.title, Mine.aliases) == ("mine", "Mine", ())


def test_a_class_that_is_defined_again_takes_the_place_of_the_one_before(tmp_path):
    """As a notebook's cell that is run twice."""

    def cell(**attributes):
        return register(rule_class(**attributes))

    first = cell(name="mine", aliases=("other_mine",))
    old, params = rlx_optim.create("mine", **SETTINGS), start()
    stepped(old, params, gradients(2))
    second = cell(name="mine", lr=rule.real(0.5), aliases=("mine_too",))
    assert spec_class("mine") is spec_class("mine_too") is second
    assert rlx_optim.create("mine").lr == rlx_optim.Other().lr == 0.5
    with pytest.raises(ValueError, match="unknown optimizer 'other_mine'"):
        spec_class("other_mine")
    assert old.spec is first  # and goes on
    old.save(tmp_path / "a.safetensors")
    again = rlx_optim.load(tmp_path / "a.safetensors")
    assert again.spec is second
    ends = [stepped(opt, {k: p.copy() for k, p in params.items()}, gradients(4)[2:]) for opt in (old, again)]
    assert all(np.array_equal(ends[0][k], ends[1][k]) for k in SHAPES)
    third = cell(name="renamed")  # with another name, by its title
    assert spec_class("renamed") is third
    assert list(registry.known())[len(registry.FILES) :] == ["renamed"]
    before = registry.known()
    for attributes, said in (
        ({"__qualname__": "Another"}, "'other' is already"),
        ({"__module__": "elsewhere"}, "'other' is already"),
    ):
        with pytest.raises(ValueError, match=said):
            cell(name="renamed", **attributes)
    ours = {"__module__": "rlx_optim.rules.adamw", "__qualname__": "AdamW", "title": "AdamW"}
    with pytest.raises(ValueError, match=r"'adamw' is already rlx_optim.rules.adamw.AdamW; give the class another name"):
        cell(**ours, name="adamw")
    assert registry.known() == before


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"name": "adamw"}, "'adamw' is already rlx_optim.rules.adamw.AdamW"),
        ({"name": "kron"}, "'kron' is already rlx_optim.rules.kronpsgd.KronPSGD"),
        ({"aliases": ("muon",)}, "'muon' is already"),
        ({"title": "Adam", "name": "other"}, "'adam' is already"),
        ({"optax": rule.Optax("kron_psgd")}, "'kron_psgd' is already"),
        ({"name": "slowmix"}, "'slowmix' is already slowmix.SlowMix"),
        ({"name": "mix"}, "'mix' is already slowmix.SlowMix"),
        ({"name": "Other"}, "an identifier in lower case, got 'Other'"),
        ({"name": "my-opt"}, "an identifier in lower case, got 'my-opt'"),
        ({"name": "lambda"}, "an identifier in lower case, got 'lambda'"),
        ({"name": ""}, "an identifier in lower case, got ''"),
        ({"title": "other"}, "a class's name, with a capital, got 'other'"),
        ({"title": "Optimizer", "name": "other"}, "'optimizer' is a word of rlx_optim"),
        ({"optax": rule.Optax("create")}, "'create' is a word of rlx_optim"),
    ],
)
def test_names_that_are_taken_or_unfit_are_refused(mix, attributes, said):
    before = registry.known()
    with pytest.raises(ValueError, match=said):
        register(rule_class(**attributes))
    assert registry.known() == before


def test_what_is_no_rule_is_refused():
    for wrong in (SlowMix(), rule.Spec, dict, "adamw", None):
        with pytest.raises(TypeError, match=r"register takes a subclass of rlx_optim\.rule\.Spec"):
            register(wrong)

    class Rateless(rule.Spec):
        def slots(self, shape):
            return {}

        def update(self, E, x):
            return x

    with pytest.raises(ValueError, match="Rateless: a rule needs a hyperparameter lr"):
        register(Rateless)
    with pytest.raises(TypeError, match="Clash: name is a word of Spec"):
        type("Clash", (SlowMix,), {"name": rule.real(0.1)})


def test_everything_a_rule_needs_is_in_one_module():
    from rlx_optim import ops, spec

    makers = {"real", "reals", "betas", "integer", "flag", "choice", "function", "like"}
    assert makers | {"Spec", "Slot", "REQUIRED", "Otherwise", "linalg", "register"} <= set(rule.__all__)
    assert set(ops.SCALARS) <= set(rule.__all__)
    assert all(getattr(rule, name) is getattr(spec, name) for name in makers)


def test_words_of_the_front_ends_cannot_be_registered():
    torch, optax = pytest.importorskip("rlx_optim.torch"), pytest.importorskip("rlx_optim.optax")
    here = Path(optax.__file__).parent
    words = (
        {p.stem for p in here.glob("*.py")}
        | {n.lower() for n in optax.__all__}
        | {n.lower() for n in torch.__all__ if not n.islower()}
    )
    words |= {name.lower() for name in rlx_optim.__all__ if not name.islower()}
    ours = {word for kind in OURS for word in (kind.name, kind.title.lower(), kind.optax.factory)}
    assert {word for word in words - ours if word.isidentifier() and not word.startswith("_")} <= registry.TAKEN


def test_unknown_names_are_told_with_the_nearest():
    torch, optax = pytest.importorskip("rlx_optim.torch"), pytest.importorskip("rlx_optim.optax")
    for make in (rlx_optim.create, lambda name: torch.create(name, []), lambda name: optax.create(name, 0.1)):
        with pytest.raises(ValueError, match=r"unknown optimizer 'adamv'; did you mean 'adamw'\? Known are sgd, .*, kron$"):
            make("adamv")
    with pytest.raises(AttributeError, match=r"module 'rlx_optim' has no attribute 'SlowMix'"):
        _ = rlx_optim.SlowMix
    with pytest.raises(AttributeError, match=r"module 'rlx_optim.torch' has no attribute 'SlowMix'"):
        _ = torch.SlowMix
    with pytest.raises(AttributeError, match=r"module 'rlx_optim.optax' has no attribute 'slowmix'"):
        _ = optax.slowmix


# ---- the front ends -----------------------------------------------------------------------------------------------------
def test_classes_signatures_and_documentation(mix):
    torch, optax = pytest.importorskip("rlx_optim.torch"), pytest.importorskip("rlx_optim.optax")
    assert "SlowMix" in dir(rlx_optim)
    assert "SlowMix" in dir(torch)
    assert "slowmix" in dir(optax)
    assert rlx_optim.SlowMix is rlx_optim.numpy.classes.SlowMix
    fields = ["lr", "betas", "beta3", "alpha", "eps", "weight_decay"]
    assert list(inspect.signature(rlx_optim.SlowMix).parameters)[:6] == fields
    assert list(inspect.signature(torch.SlowMix).parameters)[:7] == ["params", *fields]
    assert str(inspect.signature(optax.slowmix)).startswith(
        "(learning_rate: 'optax.ScalarOrSchedule', b1: 'jax.typing.ArrayLike' = 0.9, b2: 'jax.typing.ArrayLike' = 0.999, *, "
        "beta3: 'optax.ScalarOrSchedule' = 0.9999, alpha: 'optax.ScalarOrSchedule' = 5.0,"
    )
    assert list(inspect.signature(optax.slowmix).parameters)[-5:] == ["mask", "cautious", "decay", "state_dtype", "rounding"]
    for each in (rlx_optim.SlowMix, torch.SlowMix, optax.slowmix):
        assert each.__doc__.startswith("SlowMix: AdamW's step")
        assert each.__name__.lower() == "slowmix"


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_named_steps(mix, engine):
    if engine == "cpu":
        pytest.importorskip("llvmlite")
    for name in ("slowmix", "SlowMix", "mix"):
        opt = rlx_optim.create(name, engine=engine, **SETTINGS)
        close(stepped(opt, start(), gradients()), by_hand(start(), gradients(), **SETTINGS))
    assert set(opt.state("w")) == {"m1", "m2", "v"}
    with pytest.raises(ValueError, match="SlowMix: alpha must be a finite number >= 0, got -1"):
        rlx_optim.SlowMix(alpha=-1)


def torch_params():
    import torch

    return {k: torch.nn.Parameter(torch.tensor(p)) for k, p in start().items()}


def torch_steps(opt, params, grads):
    import torch

    for each in grads:
        for k, p in params.items():
            p.grad = torch.tensor(each[k])
        opt.step()
    return {k: p.detach().numpy() for k, p in params.items()}


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_torch_steps_groups_and_state_dicts(mix, engine):
    torch = pytest.importorskip("torch")
    front = pytest.importorskip("rlx_optim.torch")
    params = torch_params()
    opt = front.create("mix", params.items(), engine=engine, **SETTINGS)
    assert type(opt) is front.SlowMix
    close(torch_steps(opt, params, gradients()), by_hand(start(), gradients(), **SETTINGS))
    assert set(opt.state[params["w"]]) == {"step", "exp_avg", "m2", "exp_avg_sq"}
    again = torch_params()
    with torch.no_grad():
        for k, p in again.items():
            p.copy_(params[k])
    other = front.SlowMix(again.items(), engine=engine)
    other.load_state_dict(opt.state_dict())
    copied_params, copied = copy.deepcopy((params, opt))
    unpickled = pickle.loads(pickle.dumps(opt))
    assert type(unpickled) is front.SlowMix
    for one, its in ((opt, params), (other, again), (copied, copied_params)):
        torch_steps(one, its, gradients(3))
    for k in params:
        assert torch.equal(params[k], again[k])
        assert torch.equal(params[k], copied_params[k])
    grouped = torch_params()
    groups = [{"params": [grouped["w"]], "alpha": 0.0}, {"params": [grouped["b"], grouped["s"]], "beta3": 0.5}]
    opt = front.SlowMix(groups, engine=engine, **SETTINGS)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1.0)
    got = torch_steps(opt, grouped, gradients())
    schedule.step()
    want = by_hand({"w": start()["w"]}, gradients(), **{**SETTINGS, "alpha": 0.0})
    want |= by_hand({k: start()[k] for k in "bs"}, gradients(), **{**SETTINGS, "beta3": 0.5})
    close(got, want)


def test_optax_steps(mix):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    front = pytest.importorskip("rlx_optim.optax")
    keywords = {"b1": 0.8, "b2": 0.95, "beta3": 0.99, "alpha": 2.0, "eps": 1e-6, "weight_decay": 0.1}
    want = by_hand(start(), gradients(), **SETTINGS)
    for tx in (front.slowmix(0.01, **keywords), front.create("mix", lambda count: 0.01, **keywords)):
        params = jax.tree.map(jax.numpy.asarray, start())
        state, update = tx.init(params), jax.jit(tx.update)
        for each in gradients():
            updates, state = update(each, state, params)
            params = optax.apply_updates(params, updates)
        close(params, want)
    masked = front.create("slowmix", 0.01, mask={"w": True, "b": False, "s": False}, **keywords)
    assert masked.init(params).slots.keys() == {"m1", "m2", "v"}
    with pytest.raises(TypeError, match=r"slowmix: .*; known are learning_rate, b1, b2, beta3, alpha, eps, weight_decay, mask"):
        front.slowmix(0.01, betas=(0.9, 0.999))


def test_schedules_groups_and_copies(mix):
    whole, grads = stepped(rlx_optim.SlowMix(**SETTINGS), start(), gradients()), gradients()
    opt = rlx_optim.SlowMix(**{**SETTINGS, "lr": lambda it: 0.01, "alpha": lambda it: 2.0})
    params = stepped(opt, start(), grads[:3])
    twin, theirs = copy.deepcopy(opt), copy.deepcopy(params)
    stepped(opt, params, grads[3:])
    stepped(twin, theirs, grads[3:])
    for k in SHAPES:
        np.testing.assert_array_equal(params[k], whole[k])
        np.testing.assert_array_equal(theirs[k], whole[k])
    assert type(pickle.loads(pickle.dumps(rlx_optim.SlowMix()))) is rlx_optim.SlowMix
    opt = rlx_optim.SlowMix(**SETTINGS, groups=[{"match": "b", "alpha": 0.0}])
    got = stepped(opt, start(), grads)
    close({"b": got["b"]}, by_hand({"b": start()["b"]}, grads, **{**SETTINGS, "alpha": 0.0}))


def test_as_otherwise(mix):
    matrices = rlx_optim.Muon(otherwise=rlx_optim.SlowMix(**SETTINGS))
    got = stepped(matrices, start(), gradients())
    close({k: got[k] for k in "bs"}, by_hand({k: start()[k] for k in "bs"}, gradients(), **SETTINGS))
    torch = pytest.importorskip("rlx_optim.torch")
    params = torch_params()
    opt = torch.Muon(params.items(), otherwise=rlx_optim.SlowMix(**SETTINGS))
    got = torch_steps(opt, params, gradients())
    close({k: got[k] for k in "bs"}, by_hand({k: start()[k] for k in "bs"}, gradients(), **SETTINGS))
    assert [group["rule"] for group in opt.param_groups] == ["muon", "slowmix"]
    optax = pytest.importorskip("rlx_optim.optax")
    for other in (rlx_optim.SlowMix(**SETTINGS), optax.slowmix(0.01)):
        assert "SlowMix" in optax.routing_report("muon", start(), otherwise=other)


# ---- checkpoints --------------------------------------------------------------------------------------------------------
def test_a_file_goes_through_every_front_end(mix, tmp_path):
    jax = pytest.importorskip("jax")
    torch, optax = pytest.importorskip("rlx_optim.torch"), pytest.importorskip("rlx_optim.optax")
    grads = gradients()
    opt = rlx_optim.SlowMix(**SETTINGS)
    params = stepped(opt, start(), grads[:4])
    opt.save(tmp_path / "a.safetensors")
    tensors = {k: __import__("torch").nn.Parameter(__import__("torch").tensor(p)) for k, p in params.items()}
    there = torch.SlowMix(tensors.items())
    there.load(tmp_path / "a.safetensors")
    assert there.param_groups[0]["beta3"] == 0.99
    there.save(tmp_path / "b.safetensors")
    tree = jax.tree.map(jax.numpy.asarray, params)
    tx = optax.slowmix(0.01, b1=0.8, b2=0.95, beta3=0.99, alpha=2.0, eps=1e-6, weight_decay=0.1)
    state = optax.load_state(tmp_path / "b.safetensors", tx, tree)
    optax.save_state(tmp_path / "c.safetensors", tx, state, tree)
    back = rlx_optim.load(tmp_path / "c.safetensors")
    assert type(back) is rlx_optim.SlowMix
    for slot in ("m1", "m2", "v"):
        np.testing.assert_array_equal(back.state("w")[slot], opt.state("w")[slot])
    mine, theirs = copy.deepcopy(params), copy.deepcopy(params)
    stepped(opt, mine, grads[4:])
    stepped(back, theirs, grads[4:])
    for k in SHAPES:
        np.testing.assert_array_equal(mine[k], theirs[k])


def test_a_file_of_an_unregistered_optimizer_says_which(mix, tmp_path, capsys):
    opt = rlx_optim.SlowMix()
    stepped(opt, start(), gradients(1))
    opt.save(tmp_path / "a.safetensors")
    del registry._KINDS["slowmix"]
    with pytest.raises(
        CheckpointError, match=r"the checkpoint is of 'slowmix', which is not registered; import the package that defines it"
    ):
        rlx_optim.load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="SlowMix: only registered optimizers can be saved"):
        opt.save(tmp_path / "b.safetensors")
    cli = pytest.importorskip("rlx_optim.cli")
    assert cli.main(["inspect", str(tmp_path / "a.safetensors")]) == 2
    assert "which is not registered" in capsys.readouterr().err


def test_state_goes_over_from_and_to_others(mix):
    adamw = rlx_optim.AdamW(lr=0.01, betas=(0.8, 0.95))
    params = stepped(adamw, start(), gradients(4))
    opt = adamw.convert_to("slowmix", **{**SETTINGS, "betas": (0.9, 0.95)})
    factor = np.float32((1 - 0.9**4) / (1 - 0.8**4))
    np.testing.assert_array_equal(opt.state("w")["m1"], adamw.state("w")["m"] * factor)
    np.testing.assert_array_equal(opt.state("w")["v"], adamw.state("w")["v"])
    assert not opt.state("w")["m2"].any()
    assert opt.step_count("w") == 4
    stepped(opt, params, gradients(2))
    lion = opt.convert_to("lion")
    np.testing.assert_array_equal(lion.state("w")["m"], opt.state("w")["m1"])
    assert "m2, v: Lion has no such state" in lion.conversion_report()
    soap = opt.convert_to("soap")
    assert soap.step_count("w") == 0
    assert "SOAP has to start afresh" in soap.conversion_report()
    assert "they are first moment in the basis" in stepped_soap().convert_to("slowmix").conversion_report()


def stepped_soap():
    opt = rlx_optim.SOAP()
    stepped(opt, start(), gradients(2))
    return opt


def test_a_state_dict_of_torch_becomes_a_checkpoint(mix, tmp_path):
    pytest.importorskip("torch")
    front = pytest.importorskip("rlx_optim.torch")
    from rlx_optim.torch.foreign import from_state_dict, to_state_dict

    params = torch_params()
    opt = front.SlowMix(params.items(), **SETTINGS)
    torch_steps(opt, params, gradients(2))
    snapshot = from_state_dict(opt.state_dict())
    assert snapshot.members[0].optimizer == "slowmix"
    assert {k: p.shape for k, p in snapshot.parameters.items()} == SHAPES
    assert set(snapshot.parameters["w"].tensors) == {"m1", "m2", "v"}
    with pytest.raises(CheckpointError, match=r"torch\.optim has no SlowMix"):
        to_state_dict(snapshot)


def test_slots_with_one_meaning_have_names_of_their_own():
    from rlx_optim.torch.state import name_slots

    both = rule.like((2,), m1="first moment", m2="first moment", v="second moment", q="factor")
    assert name_slots(SlowMix, both) == {"m1": "exp_avg", "m2": "m2", "v": "exp_avg_sq", "q": "q"}
    said = type("Said", (SlowMix,), {"torch": rule.Torch(slots={"m1": "exp_avg_fast", "m2": "exp_avg_slow"})})
    assert name_slots(said, both) == {"m1": "exp_avg_fast", "m2": "exp_avg_slow", "v": "exp_avg_sq", "q": "q"}


@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_a_dtensor_is_stepped_and_saved(mix, tmp_path):
    torch, front = pytest.importorskip("torch"), pytest.importorskip("rlx_optim.torch")
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    code = f"""
        import os, sys, torch, torch.distributed as dist, test_registry as t, rlx_optim.torch as front
        from torch.distributed.tensor import Shard, distribute_tensor
        t.register(t.SlowMix)
        rank, where = int(sys.argv[1]), {str(tmp_path)!r}
        dist.init_process_group("gloo", store=dist.FileStore(where + "/store", 2), rank=rank, world_size=2)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        def cut(x):
            return distribute_tensor(torch.tensor(x), mesh, [Shard(0)], src_data_rank=None)
        p = torch.nn.Parameter(cut(t.start()["w"]))
        opt = front.create("slowmix", [("w", p)], **t.SETTINGS)
        for g in t.gradients():
            p.grad = cut(g["w"])
            opt.step()
        opt.save(where + "/d.safetensors")
        whole = p.full_tensor().detach()
        rank or torch.save(whole, where + "/w.pt")
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads may still hold a tensor, and abort where the interpreter is ending (pytorch#65231)
    """
    path = os.pathsep.join([str(HERE), str(Path(rlx_optim.__file__).parent.parent)])
    argv = [sys.executable, "-c", inspect.cleandoc(code)]
    ranks = [subprocess.Popen([*argv, str(rank)], env={**os.environ, "PYTHONPATH": path}) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    params = torch_params()
    opt = front.SlowMix([("w", params["w"])], **SETTINGS)
    torch_steps(opt, {"w": params["w"]}, gradients())
    assert torch.equal(torch.load(tmp_path / "w.pt"), params["w"].detach())
    back = rlx_optim.load(tmp_path / "d.safetensors")
    np.testing.assert_array_equal(back.state("w")["m2"], opt.state[params["w"]]["m2"].numpy())


# ---- what a rule's file says --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
def test_every_file_says_what_it_is(kind):
    assert vars(kind)["name"] == kind.__module__.rpartition(".")[2] == kind.name
    assert kind.title == kind.__name__
    assert kind.summary
    spec = kind(**registry.required(kind))
    for shape in ((), (3,), (3, 4), (2, 3, 4)):
        assert all(slot.meaning for slot in spec.slots(shape).values())


def test_a_rule_that_needs_more_than_defaults_is_listed_and_measured():
    """Nothing fails where a table of benchmarks, peers or races has no row."""
    pytest.importorskip("rlx_optim.cli").app or pytest.skip("typer")
    from lab import results, walks
    from lab.races.rates import SETTINGS as RATES
    from lab.races.rates import settings_of
    from rlx_optim.cli import listing

    bare = type("Bare", (SlowMix,), {"lr": rule.real(rule.REQUIRED), "__doc__": "A rule.", "summary": ""})
    register(bare)
    assert listing.entry("bare")["summary"] == "A rule."
    assert listing.entry("bare")["state_bytes_per_parameter"] == 12
    request = results.Request("m", {"w": (4, 4)}, ["bare"], ["torch"])
    assert results.turns(request) == [2]
    assert any("bare: none of torch has it" in note for note in results.notes(request))
    assert walks.settings_of("bare") == {"lr": 0.01}
    for model in RATES:
        assert settings_of(model, "bare") == {"lr": 1e-3}


# ---- installed packages -------------------------------------------------------------------------------------------------
def installed(folder, **entries):
    """A folder that looks like site-packages with a package that has these entry points."""
    info = folder / "mixes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mixes\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[rlx_optim.optimizers]", *lines, ""]))
    return folder


def outside_process(folder, *code, command=None):
    path = os.pathsep.join([str(folder), str(HERE), str(Path(rlx_optim.__file__).parent.parent)])
    argv = [sys.executable, "-c", "\n".join(code)] if command is None else [sys.executable, "-m", "rlx_optim.cli", *command]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done


def test_an_entry_point_is_loaded_when_it_is_needed(tmp_path):
    folder = installed(tmp_path / "site", slowmix="slowmix:SlowMix", broken="no_such_module:Rule", ours="rlx_optim.rule:Spec")
    done = outside_process(
        folder,
        "import sys, rlx_optim",
        "rlx_optim.AdamW(), rlx_optim.create('kronpsgd'), hasattr(rlx_optim, 'schedule')",
        "print('slowmix' in sys.modules)",
        "print(rlx_optim.create('slowmix', lr=0.5))",
        "print(rlx_optim.list_optimizers()[-1], rlx_optim.SlowMix.__name__)",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "False"
    assert lines[1].startswith("SlowMix(lr=0.5")
    assert lines[2] == "slowmix SlowMix"
    assert (
        "the optimizer 'broken' (no_such_module:Rule) of the package mixes cannot be loaded: ModuleNotFoundError" in done.stderr
    )
    assert "the optimizer 'ours' (rlx_optim.rule:Spec) of the package mixes cannot be loaded: TypeError" in done.stderr


def test_the_command_line_knows_entry_points(tmp_path):
    pytest.importorskip("typer")
    folder = installed(tmp_path / "site", slowmix="slowmix:SlowMix")
    listed = json.loads(outside_process(folder, command=["list", "--json"]).stdout)[-1]
    assert (listed["name"], listed["class"], listed["kind"], listed["aliases"]) == (
        "slowmix",
        "SlowMix",
        "elementwise",
        ["mix"],
    )
    assert "slow average" in listed["summary"]
    assert listed["state_bytes_per_parameter"] == 12
    told = json.loads(outside_process(folder, command=["info", "mix", "--json"]).stdout)
    assert told["hyperparameters"]["beta3"]["default"] == 0.9999
    assert told["names"] == {
        "numpy": "rlx_optim.SlowMix",
        "torch": "rlx_optim.torch.SlowMix",
        "jax": "rlx_optim.optax.slowmix",
    }
    assert "Old gradients still help" in outside_process(folder, command=["info", "slowmix"]).stdout
    memory = json.loads(
        outside_process(folder, command=["memory", "--optimizer", "slowmix", "--shapes", "one:1k", "--json"]).stdout
    )
    assert memory["optimizers"]["slowmix"]["state_bytes"] == 12 * memory["parameters"]


def test_races_and_benchmarks_take_it(tmp_path):
    pytest.importorskip("typer")
    pytest.importorskip("llvmlite")
    folder = installed(tmp_path / "site", slowmix="slowmix:SlowMix")
    race = ["race", "--model", "logreg", "--optimizers", "slowmix", "--steps", "5", "--seeds", "1", "--out", str(tmp_path / "r")]
    found = json.loads(outside_process(folder, command=[*race, "--json"]).stdout)
    assert found["optimizers"]["slowmix"]["lr"] == 1e-3
    bench = ["bench", "--optimizers", "slowmix", "--model", "one:1k", "--rounds", "1", "--seconds", "1e-4", "--json", "-"]
    found = json.loads(outside_process(folder, command=[*bench, "--peers", "none"]).stdout)
    assert [row["implementation"] for row in found["rows"]] == ["ours", "ours (step)"]


def test_a_module_may_be_an_entry_point(tmp_path):
    folder = installed(tmp_path / "site", mine="mine")
    (folder / "mine.py").write_text("import rlx_optim, slowmix\nrlx_optim.register(slowmix.SlowMix)\n")
    with warnings.catch_warnings():
        done = outside_process(folder, "import rlx_optim; print(rlx_optim.create('mix'))")
    assert done.stdout.startswith("SlowMix(")
    assert done.stderr == ""
