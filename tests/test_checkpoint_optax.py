"""Checkpoints of the JAX front end, and from one front end to another."""

import warnings

import numpy as np
import pytest
from checkpoint_cases import EXTRA, SMALL, Torch, assert_same_state
from helpers import MATRIX, NAMES, copies, distance, problem, run, same_bits, slowly

import rlx_optim
from rlx_optim import CheckpointError
from rlx_optim.checkpoint.files import open_checkpoint
from rlx_optim.registry import spec_class


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


def around():
    """Transformations of others that hold ours, by what they are."""
    optax, front = pytest.importorskip("optax"), pytest.importorskip("rlx_optim.optax")
    falling = optax.linear_schedule(1e-2, 0.0, 9)
    return {
        "alone": front.adamw(1e-2),
        "injected": optax.inject_hyperparams(front.adamw)(1e-2),
        "injected schedule": optax.inject_hyperparams(front.adamw)(falling),
        "chain": optax.chain(front.adamw(1.0), optax.scale_by_schedule(falling)),
        "multi": optax.MultiSteps(front.adamw(1e-2), 1),
    }


@pytest.mark.parametrize("how", ["alone", "injected", "injected schedule", "chain", "multi"])
def test_a_loaded_state_may_be_donated_and_traced(how, tmp_path):
    """No two leaves are one buffer, and shapes alone are enough to read it for."""
    jax, front = pytest.importorskip("jax"), pytest.importorskip("rlx_optim.optax")
    tx, params = around()[how], {"w": jax.numpy.ones((4, 3))}
    state = tx.update(params, tx.init(params), params)[1]
    front.save_state(tmp_path / "a.safetensors", tx, state, params)
    loaded = front.load_state(tmp_path / "a.safetensors", tx, params)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, state))
    if "injected" not in how:  # whose settings are numbers of the file
        shapes = jax.eval_shape(lambda p: front.load_state(tmp_path / "a.safetensors", tx, p), params)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), shapes) == jax.tree.map(lambda a: (a.shape, a.dtype), loaded)
    want = jax.jit(tx.update)(params, state, params)
    got = jax.jit(tx.update, donate_argnums=1)(params, loaded, params)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))


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


def test_counts_that_optax_cannot_hold_are_refused(tmp_path):
    params, gradients = problem(SMALL, steps=2)
    opt, there = rlx_optim.LaProp(engine="reference"), Optax("laprop", params)
    run(opt, params, gradients)
    for t, average, said in ((2**31, 0.5, "taken 2147483648 steps; optax counts to 2147483647"), (2, 1e300, "beyond float32")):
        for record in opt._records.values():
            record.t, record.counters["lr_average"] = t, average
        opt.save(tmp_path / "a.safetensors")
        with pytest.raises(CheckpointError, match=said):
            there.load(tmp_path / "a.safetensors")


def test_optax_refusals_and_warnings(tmp_path):
    optax = pytest.importorskip("optax")
    params, gradients = problem(SMALL, steps=2)
    path = tmp_path / "a.safetensors"
    ours = Optax("adamw", params, learning_rate=optax.linear_schedule(0.1, 0.0, 10), mask=lambda p: {k: k != "b" for k in p})
    ours.run(gradients).save(path)
    with open_checkpoint(path) as snapshot:
        assert snapshot.members[0].values.callables == ["lr"]
        assert snapshot.members[0].values.hyperparameters["lr"] == pytest.approx(0.08)
        assert snapshot.spec(snapshot.parameters["b"]).weight_decay == 0
        assert snapshot.spec(snapshot.parameters["w"]).weight_decay == 1e-4
    with pytest.warns(UserWarning, match=r"lr of .* was 0.08.* and is 0.01 now; weight_decay of 'b' was 0.0 and is 0.0001"):
        Optax("adamw", params).load(path)
    with pytest.raises(CheckpointError, match="stepped by AdamW in the checkpoint and by Lion in this transformation"):
        Optax("lion", params).load(path)
    with pytest.raises(CheckpointError, match="no state for 'x'"):
        Optax("adamw", {**params, "x": np.ones(3, np.float32)}).load(path)
    with pytest.raises(CheckpointError, match="unknown here"):
        Optax("adamw", {k: v for k, v in params.items() if k != "b"}).load(path)
    with pytest.raises(CheckpointError, match="state 'vmax' of 'b' is missing, expected"):
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
    with open_checkpoint(tmp_path / "a.safetensors") as snapshot:
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
