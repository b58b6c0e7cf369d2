"""State in 8 and 16 bits in torch: state dicts, files, other formats, split parameters, and what is refused."""

import gc
import io
import random

import numpy as np
import pytest
from test_storage import FORMATS, RULES, made, relative, start, walk

import rlx_optim
from rlx_optim.storage import NUMPY, SIGNED, Quantized, decode

torch = pytest.importorskip("torch")
import rlx_optim.torch  # noqa: E402
import rlx_optim.torch.foreign  # noqa: E402


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("name", RULES)
def test_the_torch_engine_agrees_with_the_reference(name, wanted):
    begin, opt = start(), made(name, engine="reference", state_dtype=wanted)
    want = walk(opt, start(), 4)
    kind = getattr(rlx_optim.torch, type(opt).__name__)
    params = {each: torch.nn.Parameter(torch.from_numpy(p.copy())) for each, p in begin.items()}
    settings = {each: opt.hyperparameters()[each] for each in opt.spec.fields}
    other = {} if opt.otherwise is None else {"otherwise": rlx_optim.AdamW(**opt.otherwise.hyperparameters())}
    theirs = kind(params.items(), engine="torch", **settings, **other)
    for i in range(4):
        for each, g in start(100 + i).items():
            params[each].grad = torch.from_numpy(g)
        theirs.step()
    for each, p in params.items():
        assert relative(p.detach().numpy() - begin[each], want[each] - begin[each]) < 2e-3, each


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(200, 40), torch.nn.Linear(40, 130))


def steps(net, opt, first, count):
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(i)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("wanted", [*FORMATS, {"m": "int8", "v": "bfloat16"}], ids=str)
def test_torch_resumes_and_changes_format(engine, wanted, tmp_path):
    net = model()
    opt = rlx_optim.torch.AdamW(net, lr=1e-2, engine=engine, state_dtype=wanted)
    steps(net, opt, 0, 3)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    opt.save(tmp_path / "a.safetensors")

    def other(kept, how):
        mine = model()
        mine.load_state_dict(net.state_dict())
        theirs = rlx_optim.torch.AdamW(mine, lr=1e-2, engine=engine, state_dtype=kept)
        how(theirs)
        return mine, theirs

    loaded = torch.load(io.BytesIO(buffer.getvalue()))
    branches = [other(wanted, lambda o: o.load_state_dict(loaded)), other(wanted, lambda o: o.load(tmp_path / "a.safetensors"))]
    wide = [other("float32", lambda o: o.load_state_dict(loaded)), other("float32", lambda o: o.load(tmp_path / "a.safetensors"))]
    back = other(wanted, lambda o: o.load_state_dict(wide[0][1].state_dict()))
    first = next(iter(net.parameters()))
    codes = {k: v.clone() for k, v in opt.state[first].items()}
    for mine, theirs in [*branches, back]:
        assert theirs.param_groups[0]["state_dtype"] == wanted
        for key, value in theirs.state[next(iter(mine.parameters()))].items():
            assert value.dtype == codes[key].dtype
            assert (value != codes[key]).float().mean() < (1e-3 if theirs is back[1] else 1e-9)
    for mine, theirs in wide:
        assert all(v.dtype in (torch.float32, torch.float64) for v in theirs.state[next(iter(mine.parameters()))].values())
    steps(net, opt, 3, 2)
    for mine, theirs in branches:
        steps(mine, theirs, 3, 2)
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), net.parameters(), strict=True))
    for mine, theirs in [*wide, back]:
        steps(mine, theirs, 3, 2)
        assert all((a - b).abs().max() < 1e-3 for a, b in zip(mine.parameters(), net.parameters(), strict=True))


def test_torch_state_is_ordinary_tensors_and_half_precision_parameters_have_it_too():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        net = model().to(dtype)
        opt = rlx_optim.torch.AdamW(net, lr=1e-2, state_dtype="int8")
        steps(net, opt, 0, 2)
        state = opt.state[net[0].weight]
        kinds = {k: (v.dtype, tuple(v.shape)) for k, v in state.items() if k != "step"}
        shape = (40, 200)
        assert kinds == {
            "exp_avg": (torch.int8, shape), "exp_avg_scale": (torch.float32, (40, 2)),
            "exp_avg_sq": (torch.uint8, shape), "exp_avg_sq_scale": (torch.float32, (40, 2)),
        }  # fmt: skip


@pytest.mark.parametrize("wanted", FORMATS)
def test_torch_sophia_codes_its_curvature(wanted):
    found = []
    for engine in ("cpu", "torch"):
        net = model()
        opt = rlx_optim.torch.Sophia(net, lr=1e-3, engine=engine, state_dtype=wanted)
        x = torch.randn(8, 200, generator=torch.Generator().manual_seed(5))
        opt.update_hessian(lambda net=net, x=x: net(x).square().mean())
        steps(net, opt, 0, 2)
        opt.update_hessian(lambda net=net, x=x: net(x).square().mean())
        found.append((net[0].weight.detach(), opt.state[net[0].weight]["hessian"].float()))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-6
    assert (found[0][1] != found[1][1]).float().mean() < 0.01
    assert found[0][1].any()


def test_torch_split_parameters_and_gradient_release():
    found = []
    for engine in ("cpu", "torch"):
        torch.manual_seed(0)
        net = torch.nn.Module()
        net.experts = torch.nn.Parameter(torch.randn(4, 64, 130))
        opt = rlx_optim.torch.Muon(net, lr=1e-2, engine=engine, state_dtype="int8", split={"experts": 4}, route={"*": "own"})
        detach = opt.attach(net)
        for i in range(3):
            (net.experts * torch.randn(4, 64, 130, generator=torch.Generator().manual_seed(i))).sum().backward()
        detach()
        assert opt.state[net.experts]["momentum_buffer_scale"].shape == (4, 64, 2)
        assert net.experts.grad is None
        found.append(net.experts.detach())
    assert relative(found[0].numpy(), found[1].numpy()) < 1e-5


def test_torch_splits_of_unequal_parts_change_format(tmp_path):
    def made(wanted):
        torch.manual_seed(0)
        net = torch.nn.Module()
        net.qkv, net.wide = torch.nn.Parameter(torch.randn(128, 130)), torch.nn.Parameter(torch.randn(64, 200))
        split = {"qkv": (64, 32, 32), "wide": (120, 80)}  # rows, columns
        return net, rlx_optim.torch.Muon(net, lr=1e-2, state_dtype=wanted, split=split, route={"*": "own"})

    net, opt = made("int8")
    steps(net, opt, 0, 2)
    assert opt.state[net.qkv]["momentum_buffer"].dtype is torch.int8
    assert opt.state[net.wide]["momentum_buffer"].dtype is torch.float32  # rows of two lengths
    opt.save(tmp_path / "a.safetensors")
    ends = []
    for wanted in ("int8", "float32"):
        for how in ("file", "dict"):
            mine, other = made(wanted)
            mine.load_state_dict(net.state_dict())
            other.load(tmp_path / "a.safetensors") if how == "file" else other.load_state_dict(opt.state_dict())
            steps(mine, other, 2, 1)
            ends.append(torch.cat([p.detach().flatten() for p in mine.parameters()]))
    steps(net, opt, 2, 1)
    want = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(ends[0], want)
    assert torch.equal(ends[1], want)
    assert (ends[2] - want).abs().max() < 1e-5
    assert (ends[3] - want).abs().max() < 1e-5


def test_torch_optim_takes_over_what_is_decoded(tmp_path):
    net = model()
    opt = rlx_optim.torch.AdamW(net, lr=1e-2, state_dtype="int8")
    steps(net, opt, 0, 2)
    opt.save(tmp_path / "a.safetensors")
    theirs = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    theirs.load_state_dict(rlx_optim.torch.foreign.to_state_dict(tmp_path / "a.safetensors"))
    mine, state = theirs.state[net[0].weight]["exp_avg"], opt.state[net[0].weight]
    want = decode(NUMPY, Quantized(SIGNED, state["exp_avg"].numpy(), state["exp_avg_scale"].numpy()))
    assert np.array_equal(mine.numpy(), want)


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_eight_bit_states_of_others_are_read(kept):
    """bitsandbytes': codes, a table, the largest of each 256, wrapped or not; torchao's: tensors that decode themselves."""
    net = model()
    opt = rlx_optim.torch.AdamW(net, lr=1e-2, state_dtype=kept)
    theirs, want = torch.optim.AdamW(net.parameters(), lr=1e-2).state_dict(), {}
    generator = torch.Generator().manual_seed(0)
    for i, p in enumerate(net.parameters()):
        if p.numel() < 4096:
            state = {"state1": torch.randn(p.shape, generator=generator), "state2": torch.rand(p.shape, generator=generator)}
            want[i] = state["state1"], state["state2"]
        else:
            blocks = -(-p.numel() // 256)
            state = {f"state{n}": torch.randint(256, p.shape, generator=generator, dtype=torch.uint8) for n in (1, 2)}
            state |= {"qmap1": torch.linspace(-1, 1, 256), "qmap2": torch.linspace(0, 1, 256)}
            state |= {f"absmax{n}": torch.rand(blocks, generator=generator) + 0.5 for n in (1, 2)}
            want[i] = tuple(
                (state[f"qmap{n}"][state[f"state{n}"].long().flatten()] * state[f"absmax{n}"].repeat_interleave(256)[: p.numel()])
                .reshape(p.shape) for n in (1, 2)
            )  # fmt: skip
        theirs["state"][i] = {"step": 7, **(state if i else {"__bnb_optimizer_quant_state__": state})}
    opt.load_state_dict(theirs)
    for i, p in enumerate(net.parameters()):
        state = {k: v.numpy() for k, v in opt.state[p].items()}
        assert state["step"] == 7
        for key, kind, value in zip(("exp_avg", "exp_avg_sq"), (SIGNED, "positive"), want[i], strict=True):
            found = state[key]
            if found.dtype != np.float32:
                found = decode(NUMPY, Quantized(kind, found, state[f"{key}_scale"]))
            assert relative(found, value.numpy()) < (1e-6 if kept == "float32" else 0.01), (i, key)
        assert not {"qmap1", "absmax2"} & state.keys()
    steps(net, opt, 0, 1)

    class Decoding(torch.Tensor):
        codes = None

        def dequantize(self):
            return torch.full(self.shape, 0.25)

    theirs["state"] = {
        i: {"step": 1, **{k: torch.zeros(p.shape).as_subclass(Decoding) for k in ("exp_avg", "exp_avg_sq")}}
        for i, p in enumerate(net.parameters())
    }
    opt.load_state_dict(theirs)
    assert relative(opt.state[net[0].bias]["exp_avg"].numpy(), np.full(40, 0.25)) == 0
    theirs["state"][0] = {
        "step": 1,
        "state1": state_of_zeros(net),
        "state2": state_of_zeros(net),
        "qmap1": torch.zeros(256),
        "max1": torch.ones(1),
    }
    with pytest.raises(ValueError, match=r"bitsandbytes' 8-bit state of '0\.weight' without blocks"):
        opt.load_state_dict(theirs)
    theirs["state"][0]["qmap1"] = "a table"
    with pytest.raises(ValueError, match=r"'qmap1' of '0\.weight' is 'a table', expected a tensor\. The checkpoint is corrupt"):
        opt.load_state_dict(theirs)


def state_of_zeros(net):
    return torch.zeros(net[0].weight.shape, dtype=torch.uint8)


def test_refused_in_torch():
    double = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match="is float64, and so is its state"):
        rlx_optim.torch.AdamW([double], state_dtype="int8")
    net = model()
    opt = rlx_optim.torch.AdamW(net, state_dtype="int8")
    steps(net, opt, 0, 1)
    good = opt.state_dict()
    for change, message in (
        ({"exp_avg_scale": -good["state"][0]["exp_avg_scale"]}, "'exp_avg_scale' of .* has scales below zero"),
        ({"exp_avg_scale": None}, r"'exp_avg_scale' of .* is None, expected a tensor of shape \(40, 2\)"),
        ({"exp_avg_scale": torch.ones(3)}, r"'exp_avg_scale' of .* has shape \(3,\), expected \(40, 2\)"),
    ):
        bad = {**good, "state": {**good["state"], 0: {**good["state"][0], **change}}}
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(bad)
    wide = rlx_optim.torch.AdamW(model(), state_dtype="float32")
    before = {k: v.clone() for k, v in wide.state_dict()["state"][0].items()}
    cast = {k: {n: v.float() for n, v in each.items() if not n.endswith("_scale")} for k, each in good["state"].items()}
    with pytest.raises(
        ValueError, match=r"'exp_avg' of .* are codes that were read as numbers: the checkpoint has state_dtype='int8'"
    ):
        wide.load_state_dict({**good, "state": cast})
    assert all(torch.equal(v, before[k]) for k, v in wide.state_dict()["state"][0].items())
    wide.load_state_dict(good)
    opt.param_groups[0]["state_dtype"] = "float32"
    with pytest.raises(ValueError, match="state_dtype shapes the state"):
        opt.step()


# ---- triton ---------------------------------------------------------------------------------------------------------------
OWN = {"route": {"*": "own"}}
CASES = [
    ("AdamW", {}), ("AdamW", {"cautious": True}), ("Lion", {}), ("Lamb", {}), ("StableAdamW", {}), ("Muon", OWN), ("NorMuon", OWN),
    ("SOAP", {"precondition_frequency": 1}), ("KronPSGD", {}),
]  # fmt: skip
#: rule and format: elementwise in one pass, a matrix rule that only writes, one that codes in its second pass
FEW = [("AdamW", "int8"), ("AdamW", "bfloat16"), ("Muon", "int8"), ("Lamb", "int8")]


def coded_in_kernels(device="cpu"):
    """By rule and format: how far the triton engine ends from torch's, and the largest share of codes that differ."""
    found = {}
    for name, settings in CASES:
        for wanted in FORMATS:
            if device == "cpu" and ((name, wanted) not in FEW or settings.get("cautious")):
                continue
            ends, states = [], []
            for engine in ("torch", "triton"):
                torch.manual_seed(0)
                net = torch.nn.ParameterDict({"a": torch.randn(33, 130), "b": torch.randn(17, 256)}).to(device)
                opt = getattr(rlx_optim.torch, name)(net, lr=1e-2, engine=engine, state_dtype=wanted, **settings)
                for i in range(3 if name == "SOAP" else 2):
                    for p in net.values():
                        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(device)
                    opt.step()
                ends.append(torch.cat([p.detach().flatten() for p in net.values()]).cpu().numpy())
                states.append(
                    [v.float().cpu() for p in net.values() for k, v in opt.state[p].items() if k.startswith(("exp", "mom"))]
                )
            share = max(float((a != b).float().mean()) for a, b in zip(*states, strict=True) if a.shape[-1] > 2)
            share = 0.0 if name == "SOAP" else share  # blocks where there is no gradient have codes of rounding
            found[f"{name} {settings} {wanted}"] = [float(relative(*ends)), share]
    return found


def capturing(device="cpu"):
    """By rule and format: whether counts on the device end where counts on the host do; and what is refused."""
    found = {}
    for name, wanted in FEW[:3]:
        held, ends = HELD if name == "AdamW" or device == "cuda" else {"b": HELD["b"]}, []
        for capturable in (False, True):
            params = {
                k: torch.nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(1)).to(device))
                for k, s in held.items()
            }
            settings = OWN if name == "Muon" else {}
            settings = {"lr": 1e-2, "engine": "triton", "state_dtype": wanted, "capturable": capturable, **settings}
            opt = getattr(rlx_optim.torch, name)(params.items(), **settings)
            for p in params.values():
                p.grad = torch.zeros_like(p)
            given = [
                {k: torch.randn(s, generator=torch.Generator().manual_seed(i)).to(device) for k, s in held.items()}
                for i in range(4 if device == "cuda" else 2)
            ]
            stepped(opt, params, given, capturable and device == "cuda")
            ends.append([t.detach().cpu() for p in params.values() for t in (p, *opt.state[p].values())])
        same = [
            float((a != b).float().mean()) for a, b in zip(*ends, strict=True) if a.dtype not in (torch.float32, torch.float64)
        ]
        found[f"{name} {wanted}"] = (
            max(same),
            max(float((a.float() - b.float()).abs().max()) for a, b in zip(*ends, strict=True) if a.dtype is torch.float32),
        )
        params = {k: torch.nn.Parameter(torch.ones(s, device=device)) for k, s in held.items()}
        settings |= {"nonfinite": "skip"}
        opt = getattr(rlx_optim.torch, name)(params.items(), **settings)
        for bad in (False, True):  # a step that is skipped writes no code and no scale
            before = [t.detach().clone() for p in params.values() for t in (p, *opt.state[p].values())]
            for p in params.values():
                p.grad = torch.ones_like(p)
            params["b"].grad[3, 5] = float("nan") if bad else 1.0
            opt.step()
        after = [t.detach() for p in params.values() for t in (p, *opt.state[p].values())]
        found[f"{name} {wanted} skipped"] = all(map(torch.equal, before, after)) and opt.skipped == 1
    params = {k: torch.nn.Parameter(torch.ones(s, device=device)) for k, s in {**HELD, "small": (3, 5)}.items()}
    opt = rlx_optim.torch.Prodigy(params.items(), engine="triton", state_dtype="int8", capturable=True)
    for p in params.values():
        p.grad = torch.ones_like(p)
    try:
        opt.step()
    except ValueError as problem:  # all of its tensors are one bundle, and the small one's state is float32
        found["refused"] = str(problem), all(bool((p == 1).all()) for p in params.values())
    return found


HELD = {"a": (33, 130), "b": (17, 256)}


def stepped(opt, params, given, captured):
    """A step for each of these gradients; the last ones by a CUDA graph."""
    for grads in given[: 2 if captured else None]:
        for k, p in params.items():
            p.grad.copy_(grads[k])
        opt.step()
    if captured:
        gc.collect()  # what is freed on a device may end a recording
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            opt.step()
        for grads in given[2:]:
            for k, p in params.items():
                p.grad.copy_(grads[k])
            graph.replay()
        torch.cuda.synchronize()


def captured_well(found):
    for name, wanted in FEW[:3]:
        share, gap = found[f"{name} {wanted}"]
        assert share < 0.02, (name, wanted)
        assert gap < 1e-6, (name, wanted)
        assert found[f"{name} {wanted} skipped"]
    assert list(found["refused"]) == [f"Prodigy: state_dtype='int8': {rlx_optim.torch.placements.captured.ALONE}", True]


def test_captured_in_the_interpreter():
    pytest.importorskip("triton")
    from interpreter import in_the_interpreter

    captured_well(in_the_interpreter("capturing", "test_storage_torch"))


@pytest.mark.gpu
def test_captured_on_the_gpu():
    captured_well({k: list(v) if isinstance(v, tuple) else v for k, v in capturing("cuda").items()})


def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    from interpreter import in_the_interpreter

    for case, (gap, share) in in_the_interpreter("coded_in_kernels", "test_storage_torch").items():
        assert gap < 1e-5, case
        assert share < 0.01, case


@pytest.mark.gpu
def test_triton_on_the_gpu():
    for case, (gap, share) in coded_in_kernels("cuda").items():
        assert gap < 1e-4, case
        assert share < 0.02, case


# ---- at random -----------------------------------------------------------------------------------------------------------------
def _anew(opt, params, make, chance):
    again = make(params)
    again.load_state_dict(opt.state_dict())
    return again


def _through_a_file(opt, params, make, chance):
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = make(params)
    again.load_state_dict(torch.load(file, weights_only=True))
    return again


def _state_elsewhere(opt, params, make, chance):
    for state in opt.state.values():
        for name, value in list(state.items()):
            if torch.is_tensor(value) and value.ndim and chance.random() < 0.5:
                state[name] = value.clone()
            elif torch.is_tensor(value) and value.ndim:
                value.data = value.data.clone()
    return opt


def _parameter_elsewhere(opt, params, make, chance):
    p = chance.choice(params)
    p.data = p.data.clone()
    return opt


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("wanted", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "MARS", "SGD", "NorMuon", "SOAP"])
def test_whatever_moves_or_is_resumed_coded_steps_are_the_same(name, wanted, engine):
    shapes, chance = [(64, 130), (80, 64), (70,), (3, 5)], random.Random(f"{name} {wanted} {engine}")
    settings = {"momentum": 0.9} if name == "SGD" else {"route": lambda name, p: p.ndim == 2} if name == "NorMuon" else {}

    def make(params):
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        return getattr(rlx_optim.torch, name)(named, lr=1e-2, engine=engine, state_dtype=wanted, **settings)

    def drawn(shape, seed):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    sides = [[torch.nn.Parameter(drawn(shape, i)) for i, shape in enumerate(shapes)] for _ in range(2)]
    opts = [make(params) for params in sides]
    for t in range(12):
        for i, pair in enumerate(zip(*sides, strict=True)):
            grad = drawn(shapes[i], 10 * t + i) * 10 ** chance.choice([-8, -3, 0])
            for p in pair:
                p.grad = None if (t + i) % 7 == 0 else grad.clone()
        change = chance.choice([_anew, _through_a_file, _state_elsewhere, _parameter_elsewhere])
        opts[1] = change(opts[1], sides[1], make, chance)
        for opt in opts:
            opt.step()
        assert all(torch.equal(p, q) for p, q in zip(*sides, strict=True)), (t, change.__name__)
