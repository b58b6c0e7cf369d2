"""Faults of the named API, its checkpoints and schedules that were found by attacking it."""

import copy
import pickle
import time

import numpy as np
import pytest
from helpers import NAMES, copies, problem, run, same_bits
from helpers import make as made

import rlx_optim
from rlx_optim import schedules
from rlx_optim.checkpoint import latest
from rlx_optim.engine import ArrayEngine

F = np.float32


def full(value, n=4):
    return {k: np.full(n, value, F) for k in "ab"}


# ---- a refused step_all ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["dtype", "shape", "overlap", "read-only"])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_the_call_after_a_refused_one_takes_its_own_gradients(engine, how):
    """The earlier gradient has moved, the later one is refused, the corrected call has it where it always was."""
    opt, params, grads = rlx_optim.SGD(lr=1.0, engine=engine), full(0), full(1)
    opt.step_all(params, grads)
    good = {"a": np.full(4, 100, F), "b": grads["b"]}
    bad = {"dtype": grads["b"].astype(np.float64), "shape": np.ones(3, F), "overlap": params["a"], "read-only": grads["b"]}[how]
    if how == "read-only":
        params["b"].flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        opt.step_all(params, {**good, "b": bad})
    params["b"].flags.writeable = True
    assert opt.iteration == 1
    opt.step_all(params, good)
    assert (params["a"][0], params["b"][0]) == (-101, -2)


@pytest.mark.parametrize("where", ["rlx_optim.numpy.validation.locate", "rlx_optim.numpy.family.run_part"])
def test_an_interrupt_leaves_no_stale_address(where, monkeypatch):
    """A KeyboardInterrupt may come before the gradients of a call are known, and when they are."""
    opt, params, grads = rlx_optim.SGD(lr=1.0, engine="cpu"), full(0), full(1)
    opt.step_all(params, grads)
    good = full(100)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            opt.step_all(params, good)
    opt.step_all(params, good)
    assert params["a"][0] == -101


def test_a_step_that_failed_half_way_is_not_taken_again(monkeypatch):
    """The tensors that were stepped before the failure are not stepped again in the same iteration."""
    opt = rlx_optim.Muon(lr=0.1, otherwise=rlx_optim.SGD(lr=1.0), engine="cpu")
    params, grads = {"w": np.eye(4, dtype=F), "b": np.zeros(3, F)}, {"w": np.eye(4, dtype=F), "b": np.ones(3, F)}
    opt.step_all(params, grads)
    real = rlx_optim.numpy.family.run_part

    def failing(part, *rest):
        if part.records[0].name == "b":
            raise MemoryError
        real(part, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("rlx_optim.numpy.family.run_part", failing)
        with pytest.raises(MemoryError):
            opt.step_all(params, grads)
    with pytest.raises(ValueError, match="'w' was already stepped in iteration 1"):
        opt.step_all(params, grads)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor", "prodigy", "muon", "soap"])
def test_names_that_come_and_go_are_stepped_as_one_by_one(name, engine):
    """Any choice of names, in any order, in one call; beside a twin that takes them one after the other."""
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 6), "b": (6,), "c": (3, 4), "d": (20, 10), "e": (1,)}
    sides = [({k: rng.standard_normal(s).astype(F) for k, s in shapes.items()}) for _ in range(1)]
    sides.append({k: p.copy() for k, p in sides[0].items()})
    opts = [rlx_optim.create(name, lr=1e-2, engine=engine) for _ in sides]
    for _ in range(12):
        names = list(rng.permutation(list(shapes))[: rng.integers(1, 6)])
        grads = {k: rng.standard_normal(shapes[k]).astype(F) for k in names}
        opts[0].step_all({k: sides[0][k] for k in names}, grads)
        for k in names:
            opts[1].step(k, sides[1][k], grads[k])
        opts[1].end_iteration()
    for k in shapes:
        np.testing.assert_allclose(sides[0][k], sides[1][k], rtol=0, atol=2e-6)


# ---- otherwise ------------------------------------------------------------------------------------------------------------
def test_an_optimizer_is_the_otherwise_of_one_owner():
    shared = rlx_optim.AdamW(lr=0.1)
    owner = rlx_optim.Muon(otherwise=shared)
    for make in (rlx_optim.Muon, rlx_optim.MARS):
        with pytest.raises(ValueError, match=rf"{make.__name__}: AdamW\(lr=0.1.*already the otherwise.*fresh"):
            make(otherwise=shared)
    assert owner.otherwise is shared
    with pytest.raises(ValueError, match="already the otherwise"):
        rlx_optim.MARS(otherwise=rlx_optim.Muon(otherwise=shared))
    chain = rlx_optim.MARS(otherwise=owner)  # an owner may itself be one
    assert chain.otherwise.otherwise is shared


@pytest.mark.parametrize("given", [None, "itself", "another"])
def test_otherwise_is_given_once(given):
    opt = rlx_optim.Muon()
    before = opt.otherwise
    with pytest.raises(AttributeError, match="Muon: otherwise is given when the optimizer is made"):
        opt.otherwise = {"itself": opt, "another": rlx_optim.AdamW()}.get(given)
    assert opt.otherwise is before


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_family_and_of_an_otherwise(how, tmp_path):
    params, grads = problem(steps=3)
    opt = rlx_optim.Muon(lr=0.02, otherwise=rlx_optim.AdamW(lr=0.01))
    rlx_optim.MARS(otherwise=how(opt.otherwise))  # a copy of it alone is free
    run(opt, params, grads)
    twin, twin_params = how(opt), copies(params)
    opt.save(tmp_path / "a.safetensors")
    loaded, loaded_params = rlx_optim.load(tmp_path / "a.safetensors"), copies(params)
    for family in (opt, twin, loaded):
        with pytest.raises(ValueError, match="already the otherwise"):
            rlx_optim.MARS(otherwise=family.otherwise)
    run(opt, params, grads)
    assert same_bits(run(twin, twin_params, grads), params)
    assert same_bits(run(loaded, loaded_params, grads), params)
    assert opt.convert_to("mars", otherwise=rlx_optim.AdamW()).otherwise.iteration == opt.iteration


def test_an_otherwise_that_has_begun_is_refused():
    begun = rlx_optim.AdamW()
    begun.end_iteration()
    with pytest.raises(ValueError, match="Muon: AdamW has already stepped"):
        rlx_optim.Muon(otherwise=begun)


# ---- checkpoints and the clock --------------------------------------------------------------------------------------------
def begun(folder, opt, steps, keep=3):
    params, grads = full(0), full(1)
    for _ in range(steps):
        opt.step_all(params, grads)
        opt.save(folder / "run-{iteration}.safetensors", keep=keep)
    return opt


def there(folder):
    return sorted(int(path.name[4:12]) for path in folder.iterdir())


def test_a_run_goes_on_where_the_clock_is_behind(tmp_path, monkeypatch):
    begun(tmp_path, rlx_optim.SGD(lr=0.1), 3)
    hour, real = 3600 * 10**9, time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - hour)
    begun(tmp_path, rlx_optim.load_latest(tmp_path), 50)
    assert there(tmp_path) == [51, 52, 53]
    assert rlx_optim.load_latest(tmp_path).iteration == 53
    assert latest(tmp_path / "run-{iteration}.safetensors").name == "run-00000053.safetensors"


@pytest.mark.parametrize("clock", [0, -3600, 3600])
def test_a_run_that_begins_anew_in_the_same_folder_keeps_its_files(tmp_path, monkeypatch, clock):
    begun(tmp_path, rlx_optim.SGD(lr=0.1), 9)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + clock * 10**9)
    begun(tmp_path, rlx_optim.SGD(lr=0.1), 1)
    assert there(tmp_path) == [1, 8, 9]
    assert rlx_optim.load_latest(tmp_path).iteration == 1
    begun(tmp_path, rlx_optim.SGD(lr=0.1), 2)
    assert there(tmp_path) == [1, 2, 9]
    begun(tmp_path, rlx_optim.load_latest(tmp_path), 1)
    assert there(tmp_path) == [1, 2, 3]


def test_a_date_from_far_ahead_does_not_stop_the_next(tmp_path, monkeypatch):
    """And what is no checkpoint has no say."""
    monkeypatch.setattr(time, "time_ns", lambda: 2**63 - 1)
    rlx_optim.SGD(lr=0.1).save(tmp_path / "a.safetensors")
    monkeypatch.undo()
    (tmp_path / "other.safetensors").write_bytes(b'\\"saved_ns\\":99999999999999999999999,')
    (tmp_path / "folder.safetensors").mkdir()
    opt = begun(tmp_path, rlx_optim.SGD(lr=0.1), 2)
    assert rlx_optim.load(tmp_path / "run-00000002.safetensors").iteration == opt.iteration


# ---- schedules ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("whole", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("real", [np.float64, np.float32, np.int64])
def test_schedules_take_numpy_numbers(whole, real):
    made = {
        schedules.cosine(real(2), whole(10)): schedules.cosine(2.0, 10),
        schedules.constant(real(2)): schedules.constant(2.0),
        schedules.linear_warmup(real(2), whole(3), real(1)): schedules.linear_warmup(2.0, 3, 1.0),
        schedules.warmup_cosine(real(2), whole(3), whole(10)): schedules.warmup_cosine(2.0, 3, 10),
        schedules.warmup_stable_decay(real(2), whole(3), whole(2), whole(4)): schedules.warmup_stable_decay(2.0, 3, 2, 4),
    }
    for got, want in made.items():
        assert [got(i) for i in range(12)] == [want(i) for i in range(12)]
        assert type(got(5)) is float


def test_what_schedules_refuse():
    for make in (
        lambda: schedules.cosine(1.0, np.float64(10)),
        lambda: schedules.cosine(1.0, np.int64(0)),
        lambda: schedules.cosine(1.0, True),
        lambda: schedules.cosine(np.float32("nan"), 10),
        lambda: schedules.warmup_cosine(1.0, 2.5, 10),
        lambda: schedules.constant("1"),
    ):
        with pytest.raises(ValueError, match=r"must be (an integer|a finite number)"):
            make()


# ---- arrays ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_a_flat_buffer_says_its_shape_every_time(engine):
    """The very buffer that was stepped before as well as a copy of it."""
    opt, flat, grad = rlx_optim.Muon(lr=0.1, engine=engine), np.ones(6, F), np.ones(6, F)
    for _ in range(3):
        opt.step("w", flat, grad, shape=(2, 3))
        opt.end_iteration()
        before = flat.copy()
        for again in (flat, flat.copy()):
            with pytest.raises(ValueError, match=r"'w' came with shape \(6,\), but its state is for \(2, 3\)"):
                opt.step("w", again, grad)
        assert (flat == before).all()
    opt.step("w", flat.reshape(2, 3), grad.reshape(2, 3))  # not flat, it says it itself
    opt.end_iteration()
    with pytest.raises(ValueError, match=r"came with shape \(6,\)"):
        opt.step("w", flat, grad)
    assert opt.step_count("w") == 4


@pytest.mark.parametrize("where", ["parameter", "gradient"])
def test_masked_arrays_are_refused(where):
    opt, arrays = rlx_optim.AdamW(), {"parameter": np.ones(3, F), "gradient": np.ones(3, F)}
    arrays[where] = np.ma.masked_array(arrays[where], [0, 1, 0])
    with pytest.raises(TypeError, match=rf"AdamW: {where} of 'w' is a masked array.*pass \.filled\(0\)"):
        opt.step("w", *arrays.values())


@pytest.mark.parametrize("shape", [(), (2, 3), (6,), (1,)])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_a_flat_estimate_before_the_first_step(engine, shape):
    opt, like = rlx_optim.Sophia(engine=engine), rlx_optim.Sophia(engine=engine)
    p, q, g = np.ones(shape, F), np.ones(shape, F), np.full(shape, 0.1, F)
    for _ in range(2):
        opt.update_hessian("w", np.full(p.size, 5.0, F))
        like.update_hessian("w", np.full(shape, 5.0, F))
    opt.step("w", p, g)
    like.step("w", q, g)
    opt.update_hessian("w", np.full(p.size, 5.0, F))
    like.update_hessian("w", np.full(shape, 5.0, F))
    assert p.tobytes() == q.tobytes()
    assert opt.state("w")["h"].shape == shape
    assert opt.state("w")["h"].tobytes() == like.state("w")["h"].tobytes()
    assert opt.state("w")["estimates"] == 3


def test_an_estimate_of_another_size_is_refused():
    opt = rlx_optim.Sophia()
    opt.update_hessian("w", np.ones(6, F))
    with pytest.raises(ValueError, match=r"estimate of 'w' has shape \(5,\), its parameter \(6,\)"):
        opt.update_hessian("w", np.ones(5, F))
    with pytest.raises(ValueError, match="came with shape"):
        opt.step("w", np.ones((2, 2), F), np.ones((2, 2), F))
    opt.step("w", np.ones((2, 3), F), np.ones((2, 3), F))
    with pytest.raises(ValueError, match=r"has shape \(3, 2\), its parameter \(2, 3\)"):
        opt.update_hessian("w", np.ones((3, 2), F))


# ---- float64 ----------------------------------------------------------------------------------------------------------------
def wide(arrays):
    return {k: v.astype(np.float64) for k, v in arrays.items()}


@pytest.mark.parametrize("name", NAMES)
def test_float64_parameters_are_stepped_in_float64(name, tmp_path):
    """What np.zeros and np.random make: equal to the reference to float64's rounding, and resumed bit for bit."""
    start, gradients = problem({"w": (5, 4), "b": (3,), "s": ()}, steps=6)
    start, gradients = wide(start), [wide(grads) for grads in gradients]
    ends = {}
    for engine in ("cpu", "reference"):
        params, opt = copies(start), made(name, engine=engine, **({"otherwise": rlx_optim.AdamW()} if name == "muon" else {}))
        for grads in gradients[:3]:
            if name == "sophia":
                opt.update_hessian("w", grads["w"] ** 2)
            opt.step_all(params, grads)
        assert {a.dtype for k in params for a in opt.state(k).values()} - {np.dtype(int)} <= {np.dtype(float)}
        opt.save(tmp_path / engine)
        ends[engine] = copies(params)
        resumed = [
            (each, copies(params))
            for each in (opt, rlx_optim.load(tmp_path / engine, engine=engine), pickle.loads(pickle.dumps(opt)))
        ]
        for each, its in resumed:
            for grads in gradients[3:]:
                each.step_all(its, grads)
        assert all(same_bits(its, resumed[0][1]) for _, its in resumed)
    assert all(
        np.abs(ends["cpu"][k] - ends["reference"][k]).max() <= 1e-9 * np.abs(ends["cpu"][k] - start[k]).max() + 1e-15
        for k in start
    )


def test_float64_is_not_float32_in_disguise():
    p = {"w": np.array([1.0])}
    rlx_optim.SGD(lr=1.0).step_all(p, {"w": np.array([1e-12])})
    assert p["w"][0] == 1.0 - 1e-12


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_one_optimizer_steps_one_type(engine):
    a, b = np.ones(3), np.ones(3, np.float32)
    opt = rlx_optim.AdamW(engine=engine)
    with pytest.raises(TypeError, match="AdamW: 'a' is float64, 'b' is float32, but one optimizer steps one type"):
        opt.step_all({"a": a, "b": b}, {"a": a.copy(), "b": b.copy()})
    opt.step_all({"b": b}, {"b": b.copy()})
    opt.step("b", b, b.copy())
    with pytest.raises(
        TypeError, match="AdamW: 'a' is float64, but this optimizer steps float32 ones; give each type an optimizer of its own"
    ):
        opt.step("a", a, a.copy())
    with pytest.raises(TypeError, match="gradient of 'b' must be float32, as its parameter is, got float64"):
        opt.step("b", b, a)
    assert (a == 1).all()
    assert opt.step_count("b") == 2
    lion = opt.convert_to("lion")
    lion.end_iteration()
    lion.step("b", b, b.copy())


def test_float64_repeats_quickly_and_refuses_what_moved():
    """A step of known names sees an array of the other type, or a gradient inside a parameter."""
    room, opt = np.ones(20), rlx_optim.AdamW(engine="cpu")
    p, g = room[:8], np.full(8, 0.5)
    opt.step_all({"w": p}, {"w": g})
    with pytest.raises(ValueError, match="overlap in memory"):
        opt.step_all({"w": p}, {"w": room[7:15]})
    with pytest.raises(TypeError, match="gradient of 'w' must be float64"):
        opt.step_all({"w": p}, {"w": g.astype(np.float32)})
    opt.step_all({"w": p}, {"w": g.copy()})
    assert opt.step_count("w") == 2


def test_float64_on_an_engine_of_others():
    class Mine(ArrayEngine):
        name = "mine"

    with pytest.raises(TypeError, match="steps float32 arrays; float64 ones are for 'reference', 'cpu'"):
        rlx_optim.AdamW(engine=Mine()).step_all({"w": np.ones(2)}, {"w": np.ones(2)})


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_the_first_float64_gradient_that_waits_is_judged_as_float64(policy):
    grad = np.array([0x3FD000007FC00000], np.uint64).view(np.float64)  # 0.25…, whose lower half would be a NaN of float32
    params = [np.array([0.7]) for _ in range(2)]
    one, all_ = (rlx_optim.Prodigy(nonfinite=policy) for _ in params)
    one.step("w", params[0], grad)
    one.end_iteration()
    all_.step_all({"w": params[1]}, {"w": grad})
    assert one.skipped == 0
    assert params[0][0] == params[1][0] != 0.7


# ---- what is no number, no name, no shape ---------------------------------------------------------------------------------
ONE = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "AdamW: loss must be a number, got 'x'", lambda o: o.step_all({"w": ONE.copy()}, {"w": ONE}, loss="x")),
        (TypeError, "AdamW: loss must be a number, got array", lambda o: o.step_all({"w": ONE.copy()}, {"w": ONE}, loss=ONE)),
        (TypeError, "AdamW: shape of 'w' must be a tuple of integers", lambda o: o.step("w", ONE.copy(), ONE, shape=(3.5,))),
        (TypeError, r"gradient of 's'.*got float32; pass np.asarray", lambda o: o.step_all({"s": np.array(1.0, F)}, {"s": F(1)})),
        (TypeError, r"parameter of 's'.*got float32; keep it as an array", lambda o: o.step("s", F(1), F(1))),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(error, message, call):
    opt = rlx_optim.AdamW()
    with pytest.raises(error, match=message):
        call(opt)
    assert opt.iteration == 0
    assert opt._records == {}


def test_a_loss_that_is_refused_is_not_judged_by():
    opt = rlx_optim.AdamW(skip_above=3.0)
    with pytest.raises(TypeError, match="loss must be a number"):
        opt.step_all({"w": ONE.copy()}, {"w": ONE}, loss=ONE)
    assert opt._guard.values() == {"norm": [0], "loss": [0]}


def test_groups_that_are_no_list_and_names_that_are_none_are_refused():
    with pytest.raises(TypeError, match="AdamW: groups must be a list of dicts, got 5"):
        rlx_optim.AdamW(groups=5)
    for name in (5, []):
        with pytest.raises(TypeError, match="Sophia: a parameter's name must be a string"):
            rlx_optim.Sophia().update_hessian(name, ONE)
    with pytest.raises(TypeError, match=r"got a mapping; pass grads.values\(\)"):
        rlx_optim.global_norm({"w": ONE})
    with pytest.raises(ValueError, match="max_norm must be a positive number, got 'x'"):
        rlx_optim.global_grad_clip_scale([ONE], "x")


@pytest.mark.parametrize("way", ["step", "step_all"])
def test_advice_points_at_the_call(way):
    opt, p, g = rlx_optim.Sophia(), np.ones(3, F), np.ones(3, F)
    with pytest.warns(UserWarning, match="before any estimate") as caught:
        opt.step("w", p, g) if way == "step" else opt.step_all({"w": p}, {"w": g})
    assert caught[0].filename == __file__
