"""QK-Clip: what it does to the logits of every head."""

import math

import pytest

torch = pytest.importorskip("torch")

import ranks  # noqa: E402
from torch import nn  # noqa: E402

from rlx_optim.torch import AdamW, Muon, qk_clip_  # noqa: E402

SIZE, WIDTH = 4, 12


def layer(heads, groups, dtype=torch.float32):
    generator = torch.Generator().manual_seed(heads)
    return [nn.Parameter(torch.randn(n * SIZE, WIDTH, generator=generator).to(dtype)) for n in (heads, groups)]


def logits(query, key, x):
    """By head: of every token with every token."""
    q, k = ((x @ w.detach().double().T).reshape(len(x), -1, SIZE).transpose(0, 1) for w in (query, key))
    return q @ k.repeat_interleave(len(q) // len(k), 0).mT / math.sqrt(SIZE)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_each_head_by_its_own_factor(heads, groups, alpha):
    """Those above the threshold end there, the others stay, whether or not they share a key."""
    query, key = layer(heads, groups)
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = logits(query, key, x)
    largest = before.amax((1, 2))
    threshold = float(largest.median())
    factors = qk_clip_(query, key, largest, threshold, alpha=alpha)
    want = torch.where(largest > threshold, threshold / largest, 1.0)
    assert torch.allclose(factors.double(), want, rtol=1e-6)
    assert torch.allclose(logits(query, key, x), before * want[:, None, None], rtol=1e-5, atol=1e-5)
    assert (want < 1).any()


def test_formulas():
    """Kimi K2's: each by the root, where heads have keys of their own."""
    query, key = layer(2, 2)
    q, k = query.detach().clone(), key.detach().clone()
    qk_clip_(query, key, [400.0, 50.0])
    assert torch.allclose(query[:SIZE], q[:SIZE] * 0.5)
    assert torch.allclose(key[:SIZE], k[:SIZE] * 0.5)
    assert torch.equal(query[SIZE:], q[SIZE:])
    assert torch.equal(key[SIZE:], k[SIZE:])


def test_slices_of_a_fused_parameter_biases_and_a_step():
    fused, bias = nn.Parameter(torch.randn(6 * SIZE, WIDTH)), nn.Parameter(torch.randn(6 * SIZE))
    opt = Muon([("w", fused)], split={"w": (4 * SIZE, SIZE, SIZE)})
    for _ in range(3):  # memory stays where it is
        fused.grad = torch.randn(6 * SIZE, WIDTH)
        opt.step()
        before, version = fused.detach().clone(), fused._version
        for each in (fused, bias):
            qk_clip_(each[: 4 * SIZE], each[4 * SIZE : 5 * SIZE], torch.tensor([10.0, 200.0, 10.0, 10.0]))
        assert torch.equal(fused[5 * SIZE :], before[5 * SIZE :])
        assert torch.allclose(fused[4 * SIZE : 5 * SIZE], before[4 * SIZE : 5 * SIZE] * 0.5**0.5)
        assert fused._version > version


def test_rounded_once():
    query, key = layer(2, 2, torch.bfloat16)
    want = (query.detach().float() * (100 / 130) ** 0.5).bfloat16()
    qk_clip_(query, key, [130.0, 130.0])
    assert torch.equal(query, want)


def exact(*shapes):
    """bfloat16 parameters after a few steps, beside the float32 ones that they are the upper halves of."""
    pairs = []
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in shapes]
        opt = AdamW(params, lr=1e-3, rounding="exact")
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
            opt.step()
        pairs.append((params, opt))
    return pairs


def low_bits(p):
    return (p.detach().view(torch.int32) & 0xFFFF).to(torch.int16)


def test_low_halves_are_scaled_with_their_weights():
    """Bit for bit what float32 would be, then and after the next step."""
    ((query, key), opt), ((query32, key32), opt32) = exact((4 * SIZE, WIDTH), (2 * SIZE, WIDTH))
    largest = [120.0, 50.0, 300.0, 101.0]
    qk_clip_(query, key, largest, optimizer=opt)
    qk_clip_(query32, key32, largest, optimizer=opt32)
    for half, full in ((query, query32), (key, key32)):
        assert torch.equal(half.float(), (full.detach().view(torch.int32) & -65536).view(torch.float32))
        assert torch.equal(opt.state[half]["low"].view(torch.int16).view(half.shape), low_bits(full))
        half.grad, full.grad = torch.ones_like(half), torch.ones_like(full)
    opt.step()
    opt32.step()
    assert torch.equal(query.float(), (query32.detach().view(torch.int32) & -65536).view(torch.float32))


def test_low_halves_of_slices():
    ((fused,), opt), ((fused32,), opt32) = exact((6 * SIZE, WIDTH))
    for each, its in ((fused, opt), (fused32, opt32)):
        for part in (each, each.data):
            qk_clip_(part[: 4 * SIZE], part[4 * SIZE : 5 * SIZE], [10.0, 200.0, 10.0, 10.0], optimizer=its)
    assert torch.equal(fused.float(), (fused32.detach().view(torch.int32) & -65536).view(torch.float32))
    assert torch.equal(opt.state[fused]["low"].view(torch.int16).view(fused.shape), low_bits(fused32))


def test_an_optimizer_that_has_no_part_in_it():
    query, key = layer(2, 2)
    before = query.detach().clone()
    with pytest.raises(ValueError, match=r"the key of shape \(8, 12\) is no parameter of the optimizer"):
        qk_clip_(query, key, [200.0, 200.0], optimizer=AdamW([query], lr=1e-3))
    assert torch.equal(query, before)
    qk_clip_(query, key, [200.0, 200.0], optimizer=AdamW([query, key], lr=1e-3))  # it keeps no low halves
    assert torch.allclose(query, before * 0.5**0.5)


def test_what_is_not_finite_is_left_alone():
    query, key = layer(3, 3)
    q = query.detach().clone()
    assert qk_clip_(query, key, [math.nan, math.inf, 99.0]).tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(query, q)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0] * 5,), "5 largest logits do not fit"),
        (([],), "0 largest logits do not fit"),
        (([1.0] * 4, 0.0), "threshold must be > 0, got 0.0"),
        (([1.0] * 4, math.nan), "threshold must be > 0"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        qk_clip_(*layer(4, 2), *arguments)
    with pytest.raises(ValueError, match="alpha must be from 0 to 1, got 2"):
        qk_clip_(*layer(4, 2), [1.0] * 4, alpha=2)
    with pytest.raises(ValueError, match=r"keys of \(12, 12\)"):
        qk_clip_(*layer(4, 3), [1.0] * 4)


# ---- on ranks: see test_stages.py -------------------------------------------------------------------------------------------
def clipped(world):
    """Queries cut by rows and keys by columns ("side"), float32 and bfloat16 with low halves: what each ends as, and its low half."""
    place, out = ranks.plain if world is None else world.place, {}
    for dtype in (torch.float32, torch.bfloat16):
        shapes = {"w": (3 * SIZE, WIDTH), "side": (3 * SIZE, WIDTH)}
        params = ranks.parameters(place, shapes, dtype)
        opt = ranks.make("AdamW", params, rounding="exact")
        for t in range(2):
            for k, g in ranks.tensors(t, shapes, dtype).items():
                params[k].grad = place(k, g)
            opt.step()
            qk_clip_(params["w"], params["side"], [120.0, 50.0, 300.0], optimizer=opt)
        lows = [ranks.whole(opt.state[p]["low"]) for p in params.values() if dtype is torch.bfloat16]
        out[str(dtype)] = [*ranks.wholes(params).values(), *lows]
    return out
