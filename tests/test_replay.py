"""Passes that are replayed as a CUDA graph are those that are launched one by one, bit for bit, whatever moves between them."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

pytest.importorskip("triton")

import rlx_optim.torch as ours  # noqa: E402
from rlx_optim.engines.triton_.engine import Triton  # noqa: E402
from rlx_optim.engines.triton_.replay import Passes, recording  # noqa: E402

pytestmark = pytest.mark.gpu

CASES = [
    ("AdamW", {}),
    ("NAdamW", {}),
    ("SGD", {"momentum": 0.9}),
    ("ScheduleFreeAdamW", {}),
    ("Lamb", {}),
    ("Adafactor", {}),
    ("Adafactor", {"convention": "paper", "beta1": 0.9}),
    ("MARS", {}),
    ("LARS", {}),
    ("Prodigy", {}),
    ("Muon", {}),
    ("NorMuon", {}),
    ("Scion", {"momentum": 0.1}),
    ("SOAP", {"precondition_frequency": 2}),
    ("KronPSGD", {"preconditioner_update_probability": 0.5}),
]
SHAPES = [(64, 48), (33, 17), (64, 48), (48, 32), (5,), (1,), (40, 3), (1000,)]  # of matrices three stacks in one group


def replays(opt):
    """The recorded passes of an optimizer."""
    plans = [part.bundle.plan for lane in opt._placements for part in lane.parts]
    return [each for plan in plans if plan is not None for each in plan.made.values() if isinstance(each, Passes)]


def walk(case, moves, steps=12):
    """Parameters after some steps, between which things move, and the recordings."""
    name, settings = case
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda") * 0.1) for shape in SHAPES]
    groups = [{"params": params[:6]}, {"params": params[6:], "weight_decay": 0.1}]
    opt = getattr(ours, name)(groups, **settings)
    kept = []
    for t in range(steps):
        for k, p in enumerate(params):
            generator = torch.Generator("cuda").manual_seed(100 * t + k)
            p.grad = torch.randn(p.shape, device="cuda", generator=generator)
        if t >= 4:
            moves(t, opt, params, kept)
        opt.step()
    return [p.detach().clone() for p in params], replays(opt)


def nothing(t, opt, params, kept):
    pass


def rates(t, opt, params, kept):
    for group in opt.param_groups:
        group["lr"] = group["lr"] * 0.9 if group["lr"] is not None else None


def gradients(t, opt, params, kept):
    for p in params:
        kept.append(p.grad)  # so that the next lie elsewhere
        p.grad = p.grad.clone()


def parameters(t, opt, params, kept):
    """To memory that is not aligned."""
    p = params[t % len(params)]
    room = torch.empty(p.numel() + 1, device="cuda")[1:].view(p.shape)
    p.data = room.copy_(p.data)


def absent(t, opt, params, kept):
    params[t % len(params)].grad = None


@pytest.mark.parametrize("moves", [nothing, rates, gradients, parameters, absent])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def test_replayed_steps_are_the_launched_ones(case, moves, monkeypatch):
    if case[0] == "Prodigy" and moves is absent:
        pytest.skip("its rule is of all parameters at once")
    replayed, graphs = walk(case, moves)
    assert graphs
    if moves in (nothing, rates, gradients):
        assert all(each.graph is not None and each.recorded == 1 for each in graphs)
    monkeypatch.setattr("rlx_optim.engines.triton_.replay.PATIENCE", -1)
    launched, graphs = walk(case, moves)
    assert all(each.graph is None for each in graphs)
    assert all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))


def coefficients(t, opt, params, kept):
    for group in opt.param_groups:
        if group["rule"] == "muon":
            group["ns_coefficients"] = "you" if t < 8 else (2.0, -1.5, 0.5)


def test_what_an_update_reads_itself_is_noticed(monkeypatch):
    replayed, graphs = walk(("Muon", {}), coefficients)
    assert max(each.recorded for each in graphs) == 3
    monkeypatch.setattr("rlx_optim.engines.triton_.replay.PATIENCE", -1)
    launched, _ = walk(("Muon", {}), coefficients)
    assert all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))


def test_recorded_steps_keep_no_gradient():
    p = torch.nn.Parameter(torch.randn(40, 20, device="cuda"))
    opt = ours.Muon([("w", p)])
    for _ in range(5):
        p.grad = torch.randn_like(p)
        opt.step()
    assert replays(opt)[0].graph is not None
    left, p.grad = weakref.ref(p.grad), None
    gc.collect()
    assert left() is None


def test_a_recording_that_fails_is_no_loss(monkeypatch):
    expected, _ = walk(("Lamb", {}), nothing)

    def broken(self, **_):
        raise RuntimeError("no")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", broken)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda self: None)
    found, graphs = walk(("Lamb", {}), nothing)
    assert all(each.graph is None for each in graphs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_recording_that_breaks_off_leaves_torch_as_it_was(monkeypatch):
    expected, _ = walk(("Lamb", {}), nothing)
    late = Triton._late

    def waiting(self, *given):
        if recording():
            torch.cuda.synchronize()  # is not permitted there
        return late(self, *given)

    monkeypatch.setattr(Triton, "_late", waiting)
    found, graphs = walk(("Lamb", {}), nothing)
    assert all(each.graph is None for each in graphs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.randn(3, device="cuda").isfinite().all()


def test_an_optimizer_that_is_gone_frees_its_graphs():
    def left():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    walk(("Lamb", {}), nothing)
    before = left()
    for _ in range(3):
        walk(("Lamb", {}), nothing)
    assert left() <= before
