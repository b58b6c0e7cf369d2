"""Muon on small matrices of many shapes, which engines fill up with zeros and stack: as if each were alone."""

import numpy as np
import pytest
from helpers import copies, distance

import rlx_optim
from rlx_optim.engines import padding

torch = pytest.importorskip("torch")

from rlx_optim.torch import Muon  # noqa: E402

SHAPES = [(3, 5), (5, 3), (16, 16), (17, 40), (40, 17), (1, 7), (7, 1), (33, 64), (64, 33), (3, 5), (100, 130), (12, 300)]
CASES = [{}, {"convention": "moonlight", "weight_decay": 0.1}, {"nesterov": False, "ns_coefficients": "polar_express"}]


def problem(steps=3, shapes=SHAPES):
    rng = np.random.default_rng(0)
    start = {str(i): rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    return start, [{k: rng.standard_normal(p.shape).astype(np.float32) for k, p in start.items()} for _ in range(steps)]


def walked(start, gradients, engine, dtype=torch.float32, **settings):
    params = {k: torch.nn.Parameter(torch.tensor(p).to(dtype)) for k, p in start.items()}
    opt = Muon(list(params.items()), engine=engine, **{"lr": 0.02, "weight_decay": 0.0, **settings})
    for grads in gradients:
        for k, p in params.items():
            p.grad = torch.tensor(grads[k]).to(dtype)
        opt.step()
    return {k: p.detach().float().numpy() for k, p in params.items()}, opt


def gap(engine, dtype=torch.float32, start=None, gradients=None, **settings):
    """How far from the reference engine, of the distance travelled."""
    start, gradients = problem() if start is None else (start, gradients)
    start, *gradients = ({k: torch.tensor(a).to(dtype).float().numpy() for k, a in each.items()} for each in (start, *gradients))
    got, opt = walked(start, gradients, engine, dtype, **settings)
    want, reference = copies(start), rlx_optim.Muon(engine="reference", **{"lr": 0.02, **settings})
    for grads in gradients:
        reference.step_all(want, grads)
    assert all(engine in text for text in opt.engine_report().values())
    return float(distance(got, want, start)), opt


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_as_the_reference(engine, settings):
    far, _ = gap(engine, **settings)
    assert far < 3e-5


def test_they_are_stepped_together():
    _, opt = gap("torch")
    assert [len(part.records) for lane in opt._placements for part in lane.parts] == [len(SHAPES)]


def test_what_measures_is_not():
    """A mask is scaled by the share it keeps, hyperball keeps a norm, stats measure all: none of that counts zeros."""
    start, gradients = problem(2, SHAPES[:4])
    for settings in ({"cautious": True}, {"decay": "hyperball"}):
        far, opt = gap("torch", torch.float32, start, gradients, **settings)
        assert far < 1e-5
        assert len(opt._placements[0].parts) == 4
    _, opt = walked(start, gradients[:1], "torch")
    for k, p in zip(start, opt.param_groups[0]["params"], strict=True):
        p.grad = torch.tensor(gradients[1][k])
    opt.stats(next=True)
    opt.step()
    norms = {k: np.linalg.norm(g) for k, g in gradients[1].items()}
    assert {k: float(opt.stats().each[k]["grad_norm"]) for k in norms} == pytest.approx(norms, rel=1e-5)


def test_no_matrix_depends_on_its_company():
    start, gradients = problem()
    together, _ = walked(start, gradients, "torch")
    some = ["1", "4", "10"]
    apart, _ = walked({k: start[k] for k in some}, [{k: g[k] for k in some} for g in gradients], "torch")
    assert all(np.array_equal(apart[k], together[k]) for k in some)


def test_bfloat16_beside():
    far, _ = gap("torch", torch.bfloat16, lr=1.0)
    assert far < 0.1  # rounded once a step, to three digits


def test_who_mixes():
    assert padding.padded((97, 48)) == padding.padded((48, 97)) == (64, 128)
    assert padding.padded((128, 129)) == (128, 256)
    assert padding.padded((1030, 300)) == (384, 1280)
    assert padding.stacks([(100, 250), (250, 128)]) == {(True, (128, 256)): [0], (False, (128, 256)): [1]}
    assert [padding.mixes(shape) for shape in ((127, 4096), (128, 128), (3, 3, 3), (5,), (0, 4))] == [True, *[False] * 4]
    assert [rlx_optim.create(name).spec().mixed_shapes() for name in ("muon", "normuon", "adamw")] == [True, False, False]


def test_in_the_interpreter():
    """On the triton engine, in Triton's interpreter."""
    pytest.importorskip("triton")
    from interpreter import in_the_interpreter

    small, larger, stacks = in_the_interpreter("interpreted", "test_padding")
    assert small < 1e-5
    assert larger < 2e-2  # products in half precision
    assert stacks == 1


def interpreted():
    import warnings

    warnings.simplefilter("ignore")
    small, larger = [(3, 5), (5, 3), (17, 40), (40, 17), (1, 7)], [(130, 140), (200, 129), (129, 300), (100, 40)]
    settings = {"convention": "moonlight", "weight_decay": 0.1}
    far, _ = gap("triton", torch.float32, *problem(2, small), **settings)
    farther, opt = gap("triton", torch.float32, *problem(1, larger), **settings)
    return far, farther, len(opt._placements[0].parts)


@pytest.mark.gpu
def test_larger_ones_on_a_gpu():
    """Stacked with those of other shapes they are at most half as far from float64 as the usual bfloat16 iteration."""

    def iterate(X):
        X = (X.mT if X.shape[0] > X.shape[1] else X) / X.norm()
        for _ in range(5):
            A = X @ X.mT
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        return X

    shapes = [(128, 128), (129, 300), (300, 129), (200, 201), (512, 512), (131, 2000), (512, 385), (100, 90)]
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(*shape, device="cuda")) for shape in shapes]
    opt = Muon(params, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, convention="keller")
    for _ in range(4):  # as they are launched, and as they are replayed
        for p in params:
            p.grad = torch.randn_like(p)
        before = [p.detach().clone() for p in params]
        opt.step()
        for p, start, (rows, columns) in zip(params, before, shapes, strict=True):
            moved = (start - p.detach()).double() / max(1.0, rows / columns) ** 0.5
            want, usual = (iterate(p.grad.to(dtype)).double() for dtype in (torch.float64, torch.bfloat16))
            moved = moved.mT if rows > columns else moved
            assert (moved - want).norm() <= (usual - want).norm() / 2
    assert len(opt._placements[0].parts) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["triton", "torch"])
def test_on_a_gpu(engine):
    start, gradients = problem()
    params = {k: torch.nn.Parameter(torch.tensor(p).cuda()) for k, p in start.items()}
    opt = Muon(list(params.items()), lr=0.02, weight_decay=0.0, engine=engine)
    want, reference = copies(start), rlx_optim.Muon(lr=0.02, engine="reference")
    for grads in gradients:
        for k, p in params.items():
            p.grad = torch.tensor(grads[k]).cuda()
        opt.step()
        reference.step_all(want, grads)
    assert distance({k: p.detach().cpu().numpy() for k, p in params.items()}, want, start) < 1e-4
