"""How parameters of 16 bits take a step: what `rounding` defines, on every engine, and what its values are for."""

import warnings

import numpy as np
import pytest
import torch
from helpers import TORCH as ALL
from helpers import slowly
from interpreter import in_the_interpreter
from torch import nn

import rlx_optim
import rlx_optim.torch as ours
from rlx_optim import rounding, storage
from rlx_optim.engines.torch_ import TorchEngine, join_halves, split_halves

pytestmark = pytest.mark.usefixtures("one_thread")
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CPU = ("torch", "cpu")
KINDS = ("SGD", "AdamW", "Lamb", "Adafactor", "Sophia", "Muon", "SOAP", "KronPSGD", "Prodigy", "ScheduleFreeSGD")
every = pytest.mark.parametrize("name", slowly(ALL, KINDS))
SHAPES = {"w": (40, 24), "twin": (40, 24), "b": (37,), "cube": (3, 5, 7), "s": (), "none": (0, 3)}
FIXED = {"Adafactor": {"eps": (1e-7, 1e-3)}}  # by default it follows the parameter's dtype, as torch's


def made(name, params, **settings):
    return getattr(ours, name)(list(params.items()), **{**ALL[name], **FIXED.get(name, {}), **settings})


def start(dtype, shapes=SHAPES, common=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return {k: nn.Parameter(torch.randn(s, generator=generator).to(common).to(dtype)) for k, s in shapes.items()}


def walk(opt, params, first=0, last=4, common=torch.bfloat16):
    """Steps whose gradients depend on t and the name alone, and are of 16 bits in every dtype."""
    for t in range(first, last):
        if isinstance(opt, ours.Sophia) and t % 3 == 0:
            opt.update_hessian(lambda: sum((3.0 * p.float() * p.float()).sum() for p in params.values()))
        for i, p in enumerate(params[k] for k in sorted(params)):
            generator = torch.Generator().manual_seed(1000 * t + i)
            p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(common).to(p.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
    return bits(params)


def bits(params):
    return {k: p.detach().clone() for k, p in params.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.int16), b[k].view(torch.int16)) for k in a)


# ---- the definition -----------------------------------------------------------------------------------------------------------
def patterns(kind):
    """Every number of a type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(HALVES[kind])


@pytest.mark.parametrize("kind", HALVES)
def test_a_number_goes_to_a_neighbour_the_nearer_the_likelier(kind):
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.uniform(-30 if kind == "float16" else -120, 15, 200)  # numbers of float16 below 2^-14 are evenly spaced
    x = np.asarray(sizes * rng.choice([-1, 1], 200), np.float32)
    draws = np.stack([rounding.rounded(storage.NUMPY, x, kind, t, key=7) for t in range(4000)]).astype(np.float64)
    below, above = draws.min(0), draws.max(0)
    near = torch.tensor(x).to(HALVES[kind]).double().numpy()  # one of both
    assert np.all((below <= x) & (x <= above) & ((below == near) | (above == near)))
    gap = np.where(above > below, above - below, np.inf)
    assert np.abs((draws.mean(0) - x) / gap).max() < 4.5 * 0.5 / np.sqrt(4000)
    both = torch.tensor(np.stack([below, above])).to(HALVES[kind])
    assert np.array_equal(both.double().numpy(), np.stack([below, above]))  # they are of the type
    apart = both.view(torch.int16).int().diff(dim=0).abs()
    assert int(apart.max()) == 1  # and neighbours


@pytest.mark.parametrize("kind", HALVES)
def test_what_is_of_the_type_stays_and_what_is_finite_stays_so(kind):
    every = patterns(kind).float()
    for t in range(3):
        found = rounding.rounded(TorchEngine(), every, kind, t, 1)
        assert torch.equal(found.nan_to_num(7.0), every.nan_to_num(7.0))
        assert torch.equal(found.isnan(), every.isnan())
    most = rounding.LARGEST[kind]
    beyond = torch.tensor([most * 1.001, -most * 1.0001, 3.4e38, -3.4e38, float("inf"), -float("inf")])
    assert rounding.rounded(TorchEngine(), beyond, kind, 1, 1).tolist() == [most, -most, most, -most, float("inf"), -float("inf")]


def test_chance_is_of_the_step_the_key_and_the_place():
    def draw(t, key, places=None, n=4096):
        return storage.hash_bits(storage.NUMPY, t, n, key=key, places=places) / 65536 - 0.5

    for one, other in ((draw(1, 5), draw(2, 5)), (draw(1, 5), draw(1, rounding.key_of(0, "w")))):
        assert abs(np.mean(one * other) * 12) < 5 / 64
    assert np.array_equal(draw(3, 9)[1000:2000], draw(3, 9, np.arange(1000, 2000), 1000))
    assert np.array_equal(draw(3, 0), storage.hash_bits(storage.NUMPY, 3, 4096) / 65536 - 0.5)  # of state, which has no key
    over = np.stack([draw(t, rounding.key_of(0, "w")) for t in range(1, 401)])
    assert np.abs(over.mean(0)).max() < 4.5 / np.sqrt(12 * 400)  # at every place, over the steps
    keys = {rounding.key_of(seed, name) for seed in (0, 1) for name in ("w", "b", "0.0", "0.1")}
    assert len(keys) == 8


def test_array_libraries_agree_to_the_bit():
    jnp = pytest.importorskip("jax.numpy")
    from rlx_optim.engines.jax_ import engine_in

    rng = np.random.default_rng(1)
    x = np.asarray(rng.standard_normal(5000) * 10.0 ** rng.integers(-9, 6, 5000), np.float32)
    for kind in HALVES:
        want = rounding.rounded(storage.NUMPY, x, kind, 12345, 0xDEADBEEF)
        assert np.array_equal(rounding.rounded(TorchEngine(), torch.tensor(x), kind, 12345, 0xDEADBEEF).numpy(), want)
        traced = rounding.rounded(engine_in(jnp.float32), jnp.asarray(x), kind, jnp.asarray(12345), 0xDEADBEEF)
        assert np.array_equal(np.asarray(traced), want)


def test_halves_are_those_of_the_bits():
    x = torch.randn(7, 5)
    p, low = torch.empty(7, 5, dtype=torch.bfloat16), torch.empty(7, 5, dtype=torch.int16)
    split_halves(x, p, low)
    assert torch.equal(p.view(torch.int16), (x.view(torch.int32) >> 16).to(torch.int16))
    assert torch.equal(join_halves(p, low), x)


# ---- engines -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", rounding.ROUNDINGS)
@pytest.mark.parametrize("kind", HALVES)
def test_compiled_rounding_is_the_definition_for_every_number(kind, how):
    """From zero, by a multiple of every number of the type: those too small for it, too large, and not finite."""
    if (kind, how) == ("float16", "exact"):
        return
    for lr in (0.3, 3.0, 1e-3):
        found = []
        for engine in CPU:
            p = nn.Parameter(torch.zeros(2**16, dtype=HALVES[kind]))
            opt = ours.SGD([("p", p)], lr=lr, engine=engine, rounding=how)
            p.grad = patterns(kind).clone()
            opt.step()
            found.append(p.detach())
        assert torch.equal(*(p.isnan() for p in found))
        assert torch.equal(*(p.nan_to_num(1.0, 2.0, 3.0) for p in found))
        wide = 0.0 - torch.tensor(lr) * patterns(kind).float()
        if how == "nearest":
            assert torch.equal(found[0].nan_to_num(1.0, 2.0, 3.0), wide.to(HALVES[kind]).nan_to_num(1.0, 2.0, 3.0))
        if how == "stochastic":
            want = rounding.rounded(storage.NUMPY, wide.numpy(), kind, 1, rounding.key_of(0, "p"))
            assert np.array_equal(found[0].float().numpy(), want, equal_nan=True)
            assert torch.equal(found[0].isfinite(), wide.isfinite())


@every
@pytest.mark.parametrize("engine", CPU)
def test_exact_is_float32_bit_for_bit(name, engine):
    """p is the upper half of what a float32 parameter would be on the same gradients, the state the same."""
    steps = 50 if name in ("SGD", "AdamW", "Lamb") else 12
    half, single = start(torch.bfloat16), start(torch.float32)
    opts = [made(name, params, engine=engine, rounding="exact") for params in (half, single)]
    for opt, params in zip(opts, (half, single), strict=True):
        walk(opt, params, 0, steps)
    for k, p in half.items():
        own, wide = opts[0].state[p], single[k].detach()
        assert torch.equal(join_halves(p.detach(), own["low"].view(torch.int16)), wide), k
        assert torch.equal(p.detach().view(torch.int16), (wide.view(torch.int32) >> 16).to(torch.int16)), k
        assert own["low"].dtype is torch.uint8
        assert own["low"].shape == (*p.shape, 2)
        theirs = opts[1].state[single[k]]
        assert {*own} - {*theirs} == {"low"}
        assert all(torch.equal(torch.as_tensor(own[s]), torch.as_tensor(theirs[s])) for s in theirs)


@every
def test_engines_round_alike(name):
    """Where float32 arithmetic agrees, which is nearly everywhere."""
    for dtype in HALVES.values():
        ends = [walk(made(name, params, engine=e), params, 0, 3) for e in CPU for params in [start(dtype)]]
        apart = sum(int((ends[0][k] != ends[1][k]).sum()) for k in SHAPES)
        assert apart <= 25, (dtype, apart)


def test_in_the_interpreter():
    """Triton's kernels: flat ones, rows and columns, coded state, matrices."""
    found = in_the_interpreter("interpreted", "test_rounding")
    assert found == dict.fromkeys(found, 0)
    assert len(found) == 11


def interpreted():
    warnings.simplefilter("ignore")
    few, large, found = {"w": (12, 10), "b": (9,)}, {"large": (64, 65)}, {}
    cases = (
        ("AdamW", {}, few),
        ("AdamW", {"state_dtype": "int8"}, large),
        ("Adafactor", {}, few),
        ("Muon", {"weight_decay": 0.1}, few),
    )
    for name, settings, shapes in cases:
        for dtype in HALVES.values() if settings == {} and name == "AdamW" else (torch.bfloat16,):
            ends = []
            for engine in ("torch", "triton"):
                params = start(dtype, shapes)
                ends.append(walk(made(name, params, engine=engine, **settings), params, 0, 1))
            found[f"{name} {settings} {dtype}"] = sum(int((ends[0][k] != ends[1][k]).sum()) for k in shapes)
        wide = []
        for dtype in (torch.bfloat16, torch.float32):
            params = start(dtype, shapes)
            opt = made(name, params, engine="triton", rounding="exact", **settings)
            walk(opt, params, 0, 2)
            lows = [opt.state[p].get("low") for p in params.values()]
            wide.append(
                [
                    p if low is None else join_halves(p, low.view(torch.int16))
                    for p, low in zip(bits(params).values(), lows, strict=True)
                ]
            )
        found[f"{name} {settings} exact"] = sum(int((a != b).sum()) for a, b in zip(*wide, strict=True))
    for how in ("stochastic", "exact"):  # counts on the device
        ends = []
        for capturable in (False, True):
            params = start(torch.bfloat16, few)
            params["b"] = nn.Parameter(params["w"].detach().T.contiguous().T[:, :3])  # not as it is
            if how == "exact":
                params["large"] = start(torch.bfloat16, large)["large"]
            opt = made("AdamW", params, engine="triton", capturable=capturable, rounding=how, state_dtype="int8")
            ends.append(walk(opt, params, 0, 2))
        found[f"capturable {how}"] = sum(int((ends[0][k] != ends[1][k]).sum()) for k in ends[0])
    return found


# ---- what it is for -----------------------------------------------------------------------------------------------------------
@every
def test_small_steps_count_by_default(name):
    """A hundred steps of a fraction of a unit: p moves as float32 does, and rounded to nearest it stands still."""
    rate = {"Prodigy": 2e-3, "SGD": 2e-5, "LARS": 1e-2}.get(name, 1e-4)  # LARS moves by a thousandth of it, times ‖p‖
    generator = torch.Generator().manual_seed(3)
    push = torch.randn(64, 64, generator=generator).sign() * torch.rand(64, 64, generator=generator).add(0.5)
    ends = {}
    for dtype, settings in ((torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"rounding": "nearest"})):
        params = {"w": nn.Parameter(torch.full((64, 64), 1.0, dtype=dtype))}
        opt = made(name, params, lr=rate, **({"weight_decay": 0.0} if "weight_decay" in opt_fields(name) else {}), **settings)
        for _ in range(100):
            params["w"].grad = push.to(torch.bfloat16).to(dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opt.step()
        ends[dtype, *settings] = params["w"].detach().float() - 1.0
    want, got, still = ends.values()
    share = [float((each * want).sum() / (want * want).sum()) for each in (got, still)]
    assert abs(share[0] - 1) < 0.1, share
    assert abs(share[1]) < 0.5, share


def opt_fields(name):
    return getattr(ours, name).spec.fields


def test_nearest_is_the_numbers_of_torch():
    ours_, theirs = start(torch.bfloat16), start(torch.bfloat16)
    first = ours.AdamW(ours_.values(), lr=1e-2, rounding="nearest")
    second = torch.optim.AdamW(theirs.values(), lr=1e-2)
    for params, opt in ((ours_, first), (theirs, second)):
        walk(opt, params, 0, 1)
    gap = max(float((ours_[k].detach().float() - theirs[k].detach().float()).abs().max()) for k in SHAPES if SHAPES[k] != (0, 3))
    assert gap <= 2**-7  # torch rounds its averages as well


# ---- refusals -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("front", ["named", "torch", "optax"])
def test_unknown_values_are_refused(front):
    make = {
        "named": lambda: rlx_optim.AdamW(rounding="up"),
        "torch": lambda: ours.AdamW([nn.Parameter(torch.ones(3))], rounding="up"),
        "optax": lambda: pytest.importorskip("rlx_optim.optax").adamw(1e-3, rounding="up"),
    }[front]
    with pytest.raises(ValueError, match="AdamW: rounding must be one of 'stochastic', 'nearest', 'exact', got 'up'"):
        make()


def test_exact_is_not_for_float16():
    good, bad = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3, dtype=torch.float16))
    words = "AdamW: parameter 'b' is float16, which is not the upper half of a float32; use rounding='stochastic', or bfloat16"
    with pytest.raises(ValueError, match=words):
        ours.AdamW([("a", good), ("b", bad)], rounding="exact")
    opt = ours.AdamW([("a", good)], rounding="exact")
    with pytest.raises(ValueError, match=words):
        opt.add_param_group({"params": [("b", bad)]})
    assert list(opt.state) == [good]
    opt.add_param_group({"params": [("b", bad)], "rounding": "stochastic"})


def test_float32_and_float64_have_no_use_for_it():
    for dtype in (torch.float32, torch.float64):
        ends = []
        for how in rounding.ROUNDINGS:
            params = start(dtype)
            opt = made("AdamW", params, rounding=how)
            ends.append(walk(opt, params))
            assert not any("low" in state for state in opt.state.values())
        assert all(torch.equal(ends[0][k], each[k]) for each in ends for k in SHAPES)
    p, g = np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)
    found = []
    for how in rounding.ROUNDINGS:
        opt, mine = rlx_optim.AdamW(lr=0.1, rounding=how), p.copy()
        opt.step("w", mine, g)
        found.append(mine)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
