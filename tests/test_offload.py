"""offload="cpu": the numbers are those of a step without it, whatever the buckets are. Here CPU parameters stand for those on a
device (`late`); tests/test_offload_gpu.py has real ones."""

import copy
import importlib.util
import os
import pickle
import signal
import threading

import pytest
import torch
from interpreter import in_the_interpreter
from late import Late
from torch_cases import bits, curvature, every, give_gradients, make, parameters, run, same, twins

import rlx_optim
import rlx_optim.torch as ours
from rlx_optim import buckets
from rlx_optim.torch.placements import host as offload

#: rows that are cut into runs, one row that is not, what is coded, small ones and an empty one
SHAPES = {"w": (24, 16), "wide": (16, 300), "b": (1037,), "one": (1,), "s": (), "conv": (4, 3, 3, 2), "none": (0, 3)}
STEPS = 4
HALVES = [{"rounding": each} for each in ("stochastic", "nearest", "exact")]
HALVES += [{"state_dtype": "int8"}, {"state_dtype": "bfloat16", "rounding": "exact"}]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setitem(offload.COPY_STREAMS, "cpu", Late)
    monkeypatch.setattr(buckets, "BUCKET", 250)  # bytes, a quarter of what the host computes at a time: even the vector is cut


def both(name, dtype=torch.float32, **settings):
    """Parameters and optimizer, as usual and offloaded."""
    mine = parameters(dtype, SHAPES)
    other = twins(mine)
    return [(p, make(name, list(p.items()), **settings, **more)) for p, more in ((mine, {}), (other, {"offload": "cpu"}))]


def flat(opt):
    return {f"{i} {k}": torch.as_tensor(v) for i, each in opt.state_dict()["state"].items() for k, v in each.items()}


def check(pairs):
    """That both have gone the same way, bit for bit, and that nothing is under way."""
    (a, x), (b, y) = pairs
    assert same(bits(a), bits(b))
    assert same(flat(x), flat(y))
    assert all(lane.copies.idle() for lane in y._placements if lane.hosted)


def counted(opt):
    return [len(lane.buckets) for lane in opt._placements]


# ---- numbers ----------------------------------------------------------------------------------------------------------------
@every
def test_the_same_numbers(name):
    pairs = both(name)
    for params, opt in pairs:
        run(opt, params, 0, STEPS)
    check(pairs)
    assert all(lane.hosted for lane in pairs[1][1]._placements)


@pytest.mark.parametrize("settings", HALVES, ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lamb", "Adafactor", "Muon", "SOAP"])
def test_the_same_numbers_in_sixteen_bits(name, settings):
    """Chance is keyed by name, step and element: buckets are none of its business."""
    pairs = both(name, torch.bfloat16, **settings)
    for params, opt in pairs:
        run(opt, params, 0, STEPS)
    check(pairs)


@pytest.mark.parametrize("size", [300, 5000, 1 << 20])
def test_any_bucket(size, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", size)
    for name in ("AdamW", "Muon"):
        pairs = both(name, torch.bfloat16, state_dtype="bfloat16")
        for params, opt in pairs:
            run(opt, params, 0, STEPS)
        check(pairs)


def test_what_is_cut_and_what_is_not():
    cut, whole, together = (both(name)[1] for name in ("AdamW", "Lamb", "Prodigy"))
    for params, opt in (cut, whole, together):
        run(opt, params, 0, 1)
    assert {name: len(cut[1]._placements[0].entries[i].records) for i, name in enumerate(SHAPES)}["wide"] == 16  # a row each
    assert all(len(seat.records) == 1 for seat in whole[1]._placements[0].entries)
    assert counted(cut[1]) > counted(whole[1]) > counted(together[1]) == [1]
    rooms = cut[1]._placements[0].buffers
    assert len(rooms) == 3
    assert all(room.memory.numel() <= 2 * 1200 + 512 for room in rooms)  # a row of "wide", p and g


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_engines(name, engine):
    """engine="cpu" has matrix rules step on the host, too."""
    pairs = both(name, engine=engine)
    for params, opt in pairs:
        run(opt, params, 0, STEPS)
    if engine == "torch" and name == "Muon":  # whose products are not the same in any memory, in the last place
        torch.testing.assert_close(*(bits(params) for params, _ in pairs), rtol=1e-6, atol=1e-6)
    else:
        check(pairs)
    lanes = pairs[1][1]._placements
    assert all(lane.engine.name == engine for lane in lanes)
    assert any(lane.on_device for lane in lanes) == (name == "Muon" and engine == "torch")


def on_the_device():
    """How far engine="triton" ends from the same without offload; run where Triton interprets its kernels."""
    from rlx_optim.cli import memory

    found, memory.round_up_locked = {}, lambda size: size
    offload.COPY_STREAMS["cpu"], buckets.BUCKET = Late, 700
    for name, dtype, settings in DEVICE:
        pairs = [
            (p, make(name, list(p.items()), engine="triton", **settings, **more))
            for more in ({}, {"offload": "cpu"})
            for p in [parameters(dtype, {"w": (8, 16), "b": (300,)})]
        ]
        for params, opt in pairs:
            run(opt, params, 0, 2)
        check(pairs)
        (lane,) = pairs[1][1]._placements
        counted = memory.place_bytes(
            rlx_optim.create(name.lower(), **settings), {k: tuple(p.shape) for k, p in pairs[1][0].items()}, 4, True, "triton"
        )
        assert counted["device"]["buckets"] == sum(room.memory.numel() for room in lane.buffers)
        found[name] = type(lane.buckets[0].placement).__name__
    return found


DEVICE = [("AdamW", torch.float32, {}), ("Sophia", torch.bfloat16, {"rounding": "exact"})]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_on_the_device():
    """engine="triton" has every rule compute on the device; its state goes up and comes down."""
    found = in_the_interpreter("on_the_device", "test_offload")
    assert found == {name: "LocalTriton" for name, _, _ in DEVICE}


def test_a_split_parameter():
    for name, settings in (("Muon", {"split": {"w": 3, "wide": (100, 150, 50)}}), ("SOAP", {"split": {"w": 2}})):
        pairs = both(name, **settings)
        for params, opt in pairs:
            run(opt, params, 0, STEPS)
        check(pairs)


def test_groups_schedules_and_closures():
    pairs = []
    for more in ({}, {"offload": "cpu"}):
        params = parameters(shapes=SHAPES)
        names = list(params.items())
        opt = ours.AdamW([{"params": names[:2], "weight_decay": 0.0}, {"params": names[2:], "maximize": True}], lr=0.1, **more)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 4)
        for t in range(STEPS):

            def closure(t=t, params=params):
                give_gradients(params, t, missing=("w",) if t == 2 else ())
                return torch.tensor(1.0)

            opt.step(closure)
            schedule.step()
        opt.add_param_group({"params": [("late", extra := torch.nn.Parameter(torch.ones(3)))]})
        extra.grad = torch.ones(3)
        opt.step()
        pairs.append(({**params, "late": extra}, opt))
    check(pairs)


def test_clips_scales_and_skips():
    """clip_grad_norm_, GradScaler's scale and verdict, nonfinite, skip_above, accumulated gradients."""
    pairs = both("AdamW", nonfinite="skip", skip_above=6.0)
    for params, opt in pairs:
        for t in range(6):
            give_gradients(params, t)
            kept = {k: p.grad.clone() for k, p in params.items()}
            if t == 1:
                ours.clip_grad_norm_(opt, 0.01)
            if t == 2:
                for k, p in params.items():
                    p.grad += kept[k]
            if t == 3:
                params["b"].grad[5] = float("nan")
            opt.grad_scale, opt.found_inf = torch.tensor(4.0), torch.tensor(float(t == 4))
            opt.step()
        assert opt.skipped == 1
        assert int(opt.state[params["w"]]["step"]) == 4
    check(pairs)
    params, opt = both("AdamW", nonfinite="raise")[1]
    give_gradients(params, 0)
    params["b"].grad[5] = float("inf")
    with pytest.raises(ValueError, match="gradient of 'b' is not finite"):
        opt.step()


@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Muon"])
def test_gradient_release(name):
    pairs = both(name)
    for params, opt in pairs:
        detach = opt.attach(params.values())
        for t in range(STEPS):
            sum((p * p * (t + 1)).sum() for p in params.values()).backward()
            assert all(p.grad is None for p in params.values())
        detach()
    check(pairs)


def test_what_the_owner_does_between_steps_counts():
    """No copy of a parameter outlives a step."""
    pairs = both("AdamW")
    for params, opt in pairs:
        run(opt, params, 0, 2)
        with torch.no_grad():
            params["w"].mul_(2.0)
            params["wide"].data = torch.full_like(params["wide"], 0.5).t().contiguous().t()  # other memory, other strides
        run(opt, params, 2, 3)
        params["b"].data.copy_(torch.ones(1037))
        give_gradients(params, 3)
        params["w"].grad = params["w"].grad.t().contiguous().t()
        opt.step()
    check(pairs)


def test_parameters_over_one_memory():
    outcome = []
    for more in ({}, {"offload": "cpu"}):
        base = torch.zeros(40)
        params = {"a": torch.nn.Parameter(base[:30]), "b": torch.nn.Parameter(base[10:])}
        opt = ours.SGD(list(params.items()), lr=0.1, momentum=0.9, **more)
        run(opt, params, 0, STEPS)
        outcome.append(base.clone())
    assert torch.equal(*outcome)


def test_stats():
    found = []
    for params, opt in both("AdamW"):
        opt.stats(next=True)
        run(opt, params, 0, 1)
        found.append(opt.stats())
    for want, got in zip(*([each.all, *each.each.values()] for each in found), strict=True):
        assert want.keys() == got.keys()
        for kind in want:
            assert float(got[kind]) == pytest.approx(float(want[kind]), rel=1e-6)


def test_estimates_of_curvature():
    pairs = both("Sophia")
    for params, opt in pairs:
        opt.update_hessian(curvature(params, 0)[1])
        give_gradients(params, 0)
        opt.update_hessian_from_gradients(4)
        opt.step()
    check(pairs)


def test_evaluation():
    pairs = both("ScheduleFreeAdamW")
    for params, opt in pairs:
        run(opt, params, 0, STEPS)
        with opt.averaged():
            pass
        run(opt, params, STEPS, STEPS + 1)
        opt.eval()
    check(pairs)


# ---- state ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "file"])
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Muon"])
def test_resumed_bit_for_bit(name, way, tmp_path):
    """From offloaded to offloaded, to not, and back."""
    (a, x), (b, y) = both(name, torch.bfloat16, rounding="exact", state_dtype="int8")
    run(x, a, 0, 2)
    run(y, b, 0, 2)
    if way in ("deepcopy", "pickle"):
        y = copy.deepcopy((b, y)) if way == "deepcopy" else pickle.loads(pickle.dumps((b, y)))
        b, y = y
        assert all(param in y._hosted for param in b.values())
    for first, second in ((y, x), (x, y)) if way in ("state_dict", "file") else ():
        if way == "state_dict":
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        else:
            first.save(tmp_path / "state.safetensors")
            second.load(tmp_path / "state.safetensors")
    run(x, a, 2, STEPS)
    run(y, b, 2, STEPS)
    check([(a, x), (b, y)])


def test_torch_goes_on_with_it():
    b, y = both("AdamW")[1]
    run(y, b, 0, 2)
    theirs = torch.optim.AdamW(list(twins(b).values()), lr=1e-3)
    theirs.load_state_dict(y.state_dict())
    assert torch.equal(theirs.state[theirs.param_groups[0]["params"][0]]["exp_avg"], y.state[b["w"]]["exp_avg"])


# ---- who, and who not -------------------------------------------------------------------------------------------------------
def test_by_pattern():
    params = parameters(shapes=SHAPES)
    opt = ours.AdamW(list(params.items()), lr=0.1, offload={"wide": None, "w*": "cpu", "b": "cpu"})
    run(opt, params, 0, 2)
    assert {k for k, p in params.items() if p in opt._hosted} == {"w", "b"}
    told = list(opt.engine_report())
    assert told == [
        "5 parameters on cpu, float32 arithmetic",
        "2 parameters on cpu, float32 arithmetic, state on the host, stepped there",
    ]
    plain = parameters(shapes=SHAPES)
    run(ours.AdamW(list(plain.items()), lr=0.1), plain, 0, 2)
    assert same(bits(params), bits(plain))


def test_refusals(monkeypatch):
    named = list(parameters(shapes=SHAPES).items())
    for bad in ("gpu", {"w": "disk"}, 3, ["cpu"]):
        with pytest.raises(ValueError, match='AdamW: offload must be "cpu", or a dict such as'):
            ours.AdamW(named, lr=0.1, offload=bad)
    with pytest.raises(ValueError, match="AdamW: offload pattern 'v' matches no parameter name"):
        ours.AdamW(named, lr=0.1, offload={"w": "cpu", "v": "cpu"})
    with pytest.raises(ValueError, match="AdamW: offload='cpu' has state on the host, where no CUDA graph reaches"):
        ours.AdamW(named, lr=0.1, offload="cpu", capturable=True)
    opt = ours.Prodigy(named, offload={"w": "cpu"})
    with pytest.raises(ValueError, match=r"Prodigy: .* is over all tensors, but 'w' and 'wide' are not stepped together"):
        run(opt, dict(named), 0, 1)
    monkeypatch.delitem(offload.COPY_STREAMS, "cpu")
    with pytest.raises(ValueError, match=r"AdamW: parameter 'w' is on cpu, and offload='cpu' is for parameters on a CUDA device"):
        ours.AdamW(named, lr=0.1, offload="cpu")


def test_parameters_of_ranks_are_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        spread = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match="AdamW: 'w' is spread over ranks, and offload='cpu' is for parameters that are not"):
            ours.AdamW([("w", torch.nn.Parameter(spread))], lr=0.1, offload="cpu")
        with pytest.raises(ValueError, match=r"Muon: 'w' is spread over ranks, .* or leave out process_group"):
            ours.Muon([("w", torch.nn.Parameter(torch.ones(4, 4)))], offload="cpu", process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_a_state_that_was_moved_is_refused():
    params, opt = both("AdamW")[1]
    run(opt, params, 0, 1)
    opt.state[params["w"]]["exp_avg"] = torch.zeros(24, 16, dtype=torch.float64)
    give_gradients(params, 1)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of w must be contiguous, .*on cpu"):
        opt.step()


# ---- interruptions ----------------------------------------------------------------------------------------------------------
def in_the_middle(monkeypatch, what):
    """Have something happen while a bucket is computed."""
    step, calls = offload.Hosted.run_buckets, []

    def run_buckets(self, chosen, grads, compute):
        def disturbed(work):
            calls.append(work)
            if len(calls) == 3:
                what()
            compute(work)

        step(self, chosen, grads, disturbed)

    monkeypatch.setattr(offload.Hosted, "run_buckets", run_buckets)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_ctrl_c_comes_after_the_step(name, monkeypatch, request):
    """It is taken whole; then KeyboardInterrupt is raised."""
    pairs = both(name)
    for params, opt in pairs:
        run(opt, params, 0, 1)
    in_the_middle(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.default_int_handler  # a shell may have started us without it
    ours = signal.signal(signal.SIGINT, before)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ours))
    for params, opt in pairs:
        give_gradients(params, 1)
        if params is pairs[0][0]:
            opt.step()
        else:
            with pytest.raises(KeyboardInterrupt):
                opt.step()
    assert signal.getsignal(signal.SIGINT) is before
    check(pairs)
    for params, opt in pairs:
        run(opt, params, 2, STEPS)
    check(pairs)


def test_an_error_leaves_nothing_under_way(monkeypatch):
    params, opt = both("AdamW")[1]
    run(opt, params, 0, 1)

    def fail():
        raise MemoryError

    in_the_middle(monkeypatch, fail)
    give_gradients(params, 1)
    with pytest.raises(MemoryError):
        opt.step()
    assert all(lane.copies.idle() for lane in opt._placements)


def test_threads():
    """Two optimizers at once, neither in the main thread."""
    pairs, failed = both("AdamW"), []

    def work(params, opt):
        try:
            run(opt, params, 0, 20)
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    check(pairs)


def test_fork():
    """A child that was forked between steps, and ends, changes nothing."""
    pairs = both("AdamW")
    for params, opt in pairs:
        run(opt, params, 0, 2)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        run(opt, params, 2, STEPS)
    check(pairs)


# ---- what the command line says ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "engine"),
    [("AdamW", "auto"), ("Lamb", "auto"), ("Prodigy", "auto"), ("Muon", "auto"), ("SOAP", "auto"), ("Muon", "cpu")],
)
def test_memory_counts_what_is_taken(name, engine, monkeypatch):
    """To the byte, where no page-locked memory is rounded up."""
    from rlx_optim.cli import memory

    monkeypatch.setattr(buckets, "BUCKET", 1 << 15)
    monkeypatch.setattr(memory, "round_up_locked", lambda size: size)
    shapes = {"w": (64, 80), "v": (64, 80), "embed": (600, 64), "b": (1037,)}
    found = memory.place_bytes(rlx_optim.create(name.lower()), shapes, 4, True, engine)
    params = parameters(shapes=shapes)
    opt = make(name, list(params.items()), offload="cpu", engine=engine)
    run(opt, params, 0, 2)
    kept = [v for state in opt.state.values() for k, v in state.items() if k not in ("step", *opt.spec().counters())]
    assert found["host"]["state"] == sum(v.nbytes for v in kept if torch.is_tensor(v))
    rooms = {
        above: sum(r.memory.numel() for lane in opt._placements if lane.on_device == above for r in lane.buffers)
        for above in (True, False)
    }
    for said, taken in ((found["device"]["buckets"], rooms[True]), (found["host"]["buckets"], rooms[False])):
        assert said == taken
    assert found["device"]["parameters"] == found["device"]["gradients"] == sum(4 * p.numel() for p in params.values())


def test_the_command_line(capsys, monkeypatch):
    from rlx_optim.cli import main

    monkeypatch.setattr(buckets, "BUCKET", 8 << 20)
    assert main(["memory", "--shapes", "llama-7b", "--weights", "bfloat16", "--offload", "--set", "state_dtype=int8"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "device: 27.0 GB (parameters 13.5 GB, gradients 13.5 GB); host: 14.0 GB (state 13.9 GB, buckets 101 MB)" in told
    assert main(["memory", "--weights", "int4"]) == 2
    assert "unknown type 'int4'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "--offload"]) == 2
        assert "--offload: torch sees no CUDA device here" in capsys.readouterr().err
