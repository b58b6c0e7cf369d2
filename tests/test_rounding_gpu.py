"""Parameters of 16 bits on CUDA: the triton engine rounds as the torch engine does, launched, replayed and captured."""

import gc

import pytest

torch = pytest.importorskip("torch")

import rlx_optim  # noqa: E402
import rlx_optim.torch as ours  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES = [(300, 128), (64, 257), (1000,), (5,), (3, 4, 5)]
STEPS = 6
NAMES = ("SGD", "AdamW", "Lion", "Lamb", "Adafactor", "Prodigy", "ScheduleFreeAdamW")


def gradients(params, t):
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        g = (torch.randn(p.shape, generator=generator) * 0.1).to("cuda", p.dtype)
        p.grad = g if p.grad is None else p.grad.copy_(g)


def start(dtype):
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    return [torch.nn.Parameter(x.to("cuda", dtype)) for x in drawn]


def made(name, params, **settings):
    given = {"otherwise": rlx_optim.AdamW(lr=1e-3, rounding=settings["rounding"])} if name == "Muon" else {}
    return getattr(ours, name)([(str(i), p) for i, p in enumerate(params)], lr=1e-3, **given, **settings)


def walk(name, dtype=torch.bfloat16, **settings):
    params = start(dtype)
    opt = made(name, params, **settings)
    for t in range(STEPS):
        gradients(params, t)
        opt.step()
    return [p.detach().clone() for p in params], opt


def differing(a, b):
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True)) / sum(x.numel() for x in a)


@pytest.mark.parametrize("rounding", ["stochastic", "exact", "nearest"])
@pytest.mark.parametrize("name", NAMES)
def test_engines_agree(name, rounding):
    """Up to what the last place of float32 does to a rounding."""
    assert differing(*[walk(name, rounding=rounding, engine=engine)[0] for engine in ("triton", "torch")]) < 1e-3


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_coded_state_beside_it(state_dtype):
    for rounding in ("stochastic", "exact"):
        found = [walk("AdamW", rounding=rounding, state_dtype=state_dtype, engine=engine)[0] for engine in ("triton", "torch")]
        assert differing(*found) < 2e-3


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lion", "Lamb", "ScheduleFreeAdamW", "Muon"])
def test_exact_parameters_are_the_upper_half_of_float32_ones(name):
    """On the same gradients, which are bfloat16 numbers. Sums over a tensor (Lamb) are added in another order there."""
    (halves, opt), (wholes, _) = walk(name, rounding="exact"), walk_of_float32(name)
    kept = {
        name: opt.state[p] for group in opt.param_groups for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    for i, (p, q) in enumerate(zip(halves, wholes, strict=True)):
        low = kept[str(i)]["low"].view(torch.int16).view(q.shape).int() & 0xFFFF
        bits = (p.view(torch.int16).int() << 16) | low
        assert int((bits - q.view(torch.int32)).abs().max()) <= (4 if name == "Lamb" else 0)


def walk_of_float32(name):
    params = start(torch.float32)
    opt = made(name, params, rounding="exact")
    for t in range(STEPS):
        gradients(params, t)
        for p in params:
            p.grad.copy_(p.grad.bfloat16())
        opt.step()
    return [p.detach().clone() for p in params], opt


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Muon"])
def test_a_captured_step_rounds_alike(name, rounding):
    want, _ = walk(name, rounding=rounding)
    params = start(torch.bfloat16)
    opt = made(name, params, rounding=rounding, capturable=True)
    gradients(params, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        opt.step()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()  # what is freed on a device may end a recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    for t in range(1, STEPS):
        gradients(params, t)
        graph.replay()
    assert differing([p.detach() for p in params], want) < (1e-3 if name != "Muon" else 1e-2)
