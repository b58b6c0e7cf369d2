"""offload="cpu" on CUDA: the numbers are those of CPU parameters, of matrix rules those of the step on the device; what is where."""

import threading

import pytest

torch = pytest.importorskip("torch")

from torch_cases import every, make  # noqa: E402

import rlx_optim.torch as ours  # noqa: E402
from rlx_optim import buckets  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES = {"w": (96, 80), "wide": (16, 640), "b": (1037,), "one": (1,), "s": (), "conv": (4, 3, 3, 2), "big": (700, 300)}
STEPS = 4


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 200_000)


def start(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {k: torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for k, s in SHAPES.items()}


def gradients(params, t):
    generator = torch.Generator().manual_seed(100 + t)
    for p in params.values():
        p.grad = (0.1 * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype)


def walk(name, device, dtype=torch.float32, steps=STEPS, **settings):
    params = start(device, dtype)
    opt = make(name, list(params.items()), **settings)
    for t in range(steps):
        gradients(params, t)
        if name == "Sophia":
            opt.update_hessian_from_gradients(4)
        opt.step()
    return params, opt


def values(params):
    return {k: p.detach().cpu() for k, p in params.items()}


def equal(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@every
def test_the_same_numbers(name):
    matrix = getattr(ours, name).spec.matrix
    params, opt = walk(name, "cuda", offload="cpu")
    want, plain = walk(name, "cuda" if matrix else "cpu")
    if matrix:  # in stacks of other sizes
        torch.testing.assert_close(values(params), values(want), rtol=1e-5, atol=1e-5)
    else:
        assert equal(values(params), values(want))
    tensors = [v for state in opt.state.values() for v in state.values() if torch.is_tensor(v)]
    assert {t.device.type for t in tensors} == {"cpu"}
    assert opt.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    assert all(lane.kept.type == "cpu" for lane in opt._placements)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("settings", [{}, {"rounding": "exact"}, {"state_dtype": "int8"}, {"state_dtype": "bfloat16"}], ids=str)
def test_sixteen_bits(settings, dtype):
    if settings.get("rounding") == "exact" and dtype is torch.float16:
        return
    found = [
        values(walk("AdamW", device, dtype, **settings, **more)[0])
        for device, more in (("cuda", {"offload": "cpu"}), ("cpu", {}))
    ]
    assert equal(*found)


@pytest.mark.parametrize("settings", [{"rounding": "exact"}, {"state_dtype": "int8"}], ids=str)
def test_matrices_in_sixteen_bits(settings):
    got, want = (walk("Muon", "cuda", torch.bfloat16, **settings, **more) for more in ({"offload": "cpu"}, {}))
    for k, p in values(got[0]).items():
        assert float((p != values(want[0])[k]).float().mean()) < 2e-3
    own = [v for state in got[1].state.values() for k, v in state.items() if k.startswith("momentum_buffer")]
    assert own
    assert all(v.is_pinned() for v in own)


@pytest.mark.parametrize("settings", [{}, {"state_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Sophia"])
def test_on_the_device(name, settings):
    """engine="triton": the state goes up and comes down; the numbers are those of the step on the device."""
    (got, opt), (want, _) = (walk(name, "cuda", engine="triton", **settings, **more) for more in ({"offload": "cpu"}, {}))
    assert equal(values(got), values(want))
    assert all(lane.on_device for lane in opt._placements)
    kept = [v for state in opt.state.values() for k, v in state.items() if k.startswith(("exp_avg", "m", "h"))]
    assert all(v.is_pinned() for v in kept)
    assert len(opt._placements[0].buckets) > 1


def test_resumed_bit_for_bit(tmp_path):
    whole = values(walk("AdamW", "cuda", offload="cpu")[0])
    for way in ("state_dict", "file"):
        params, opt = walk("AdamW", "cuda", steps=2, offload="cpu")
        other = {k: torch.nn.Parameter(p.detach().clone()) for k, p in params.items()}
        new = make("AdamW", list(other.items()), offload="cpu")
        if way == "file":
            opt.save(tmp_path / "s.safetensors")
            new.load(tmp_path / "s.safetensors")
        else:
            new.load_state_dict(opt.state_dict())
        for t in range(2, STEPS):
            gradients(other, t)
            new.step()
        assert equal(values(other), whole)
        assert {v.device.type for state in new.state.values() for v in state.values()} == {"cpu"}


def test_grad_scaler_clip_release_and_evaluation():
    params = start("cuda")
    opt = make("ScheduleFreeAdamW", list(params.items()), offload="cpu", amp_scaling=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
    want = start("cpu")
    plain = make("ScheduleFreeAdamW", list(want.items()))
    for t in range(STEPS):
        gradients(want, t)
        plain.step()
        scaler.scale(torch.zeros((), device="cuda"))  # it begins with the first
        gradients(params, t)
        for p in params.values():
            p.grad *= 16.0
        scaler.step(opt)
        scaler.update()
    assert equal(values(params), values(want))
    opt.eval()
    plain.eval()
    torch.testing.assert_close(values(params), values(want), rtol=1e-6, atol=1e-6)
    opt.train()
    plain.train()
    assert equal(values(params), values(want))
    detach = opt.attach(params.values())
    sum((p * p).sum() for p in params.values()).backward()
    assert all(p.grad is None for p in params.values())
    detach()


def test_who_computes_before_and_after_waits():
    """Gradients that are still being computed when the step begins, parameters that are read at once after it."""
    params, plain = start("cuda"), start("cpu")
    opt, other = (make("AdamW", list(each.items()), **more) for each, more in ((params, {"offload": "cpu"}), (plain, {})))
    slow = torch.randn(4096, 4096, device="cuda")
    for t in range(6):
        gradients(plain, t)
        gradients(params, t)
        torch.cuda.synchronize()
        for _ in range(10):
            slow = slow @ slow / 4096
        for p in params.values():
            p.grad.add_(0.0 * slow.flatten()[0].nan_to_num(0.0, 0.0, 0.0))
        opt.step()
        read = {k: p.detach().clone() for k, p in params.items()}
        other.step()
        assert equal({k: p.cpu() for k, p in read.items()}, values(plain))


def test_side_streams_and_threads():
    want, failed = values(walk("AdamW", "cpu")[0]), []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = walk("AdamW", "cuda", offload="cpu")[0]
                torch.cuda.current_stream().synchronize()
            assert equal(values(found), want)
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Muon"])
def test_peak_memory(name, monkeypatch):
    """Beside parameters and gradients: nothing, or for matrix rules the rooms and what an engine computes with."""
    monkeypatch.setattr(buckets, "BUCKET", 4 << 20)
    params = {f"w{i}": torch.nn.Parameter(torch.randn(1024, 1024, device="cuda")) for i in range(24)}
    for p in params.values():
        p.grad = torch.randn_like(p)
    before = torch.cuda.memory_allocated()
    opt = make(name, list(params.items()), offload="cpu")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        opt.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < (64 << 20 if name == "Muon" else 1 << 20)


def test_refusals():
    with pytest.raises(ValueError, match="is on cpu, and offload='cpu' is for parameters on a CUDA device"):
        make("AdamW", list(start("cpu").items()), offload="cpu")
    params = start("cuda")
    opt = make("Prodigy", list(params.items()), offload="cpu", engine="triton")
    gradients(params, 0)
    with pytest.raises(ValueError, match="Prodigy: engine='triton' would bring all state to the device at once"):
        opt.step()
