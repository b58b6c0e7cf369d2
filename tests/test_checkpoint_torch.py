"""Checkpoints of the torch front end."""

import numpy as np
import pytest
from checkpoint_cases import SMALL, Torch
from helpers import NAMES, problem, same_bits

import rlx_optim
from rlx_optim import CheckpointError
from rlx_optim.checkpoint.files import open_checkpoint


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_torch_resumes_bit_for_bit_by_name(name, engine, tmp_path):
    params, gradients = problem(SMALL, steps=8)
    ours = Torch(name, params, engine).run(gradients[:4])
    ours.opt.save(tmp_path / "a.safetensors")
    settings = {"lr": 0.5, "weight_decay": 0.25}  # another optimizer, wrapped, in other settings and with state of its own
    twin = Torch(name, ours.values(), engine, "module._orig_mod.", **settings).run(gradients[:1])
    for k, p in twin.params.items():
        p.data.copy_(ours.params[k].data)
    twin.opt.load(tmp_path / "a.safetensors")
    twin.assert_state(ours)
    for mine, theirs in zip(ours.opt.param_groups, twin.opt.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k not in ("params", "param_names")} == {
            k: v for k, v in theirs.items() if k not in ("params", "param_names")
        }
    ours.run(gradients[4:])
    twin.run(gradients[4:])
    assert same_bits(twin.values(), ours.values())
    twin.assert_state(ours)


def test_torch_names_are_needed_and_prefixes_go(tmp_path):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch
    from rlx_optim.routing import bare

    for given, want in {
        "module.w": "w", "module.module.w": "w", "_orig_mod.module.a.b": "a.b", "layers.0._orig_mod.w": "layers.0.w",
        "module._fsdp_wrapped_module.w": "w", "a._checkpoint_wrapped_module.w": "a.w", "encoder.module.w": "encoder.module.w",
        "module": "module", "w": "w",
    }.items():  # fmt: skip
        assert bare(given) == want
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"goes by names.*named_parameters"):
        rlx_optim.torch.AdamW(model.parameters()).save(tmp_path / "a.safetensors")
    twice = [("w", torch.nn.Parameter(torch.ones(1))), ("module.w", torch.nn.Parameter(torch.ones(1)))]
    with pytest.raises(CheckpointError, match="two parameters are called 'w'"):
        rlx_optim.torch.AdamW(twice).save(tmp_path / "a.safetensors")
    rlx_optim.torch.AdamW(torch.nn.DataParallel(model)).save(tmp_path / "a.safetensors")
    with open_checkpoint(tmp_path / "a.safetensors") as snapshot:
        assert list(snapshot.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_torch_refusals_leave_everything_as_it_was(tmp_path):
    pytest.importorskip("torch")
    params, gradients = problem(SMALL, steps=2)
    path = tmp_path / "a.safetensors"
    ours = Torch("adamw", params).run(gradients)
    ours.opt.save(path)
    other = {**{k: v for k, v in params.items() if k != "w"}, "x": np.ones((2, 2), np.float32)}
    cases = [
        ("lion", params, {}, "the checkpoint is of AdamW; load it into rlx_optim.torch.AdamW, not into Lion"),
        ("adamw", other, {}, "the checkpoint has no state for 'x' and state for 'w', unknown here; strict=False"),
        (
            "adamw",
            {**params, "w": np.ones((4, 6), np.float32)},
            {},
            r"'w' has shape \(6, 4\) in the checkpoint, expected \(4, 6\)",
        ),
    ]
    for name, there, settings, said in cases:
        twin = Torch(name, there, amsgrad=True, **settings) if name == "adamw" else Torch(name, there, **settings)
        state, groups = twin.state(), [dict(g) for g in twin.opt.param_groups]
        with pytest.raises(CheckpointError, match=said):
            twin.opt.load(path)
        twin.assert_state(state)
        assert [dict(g) for g in twin.opt.param_groups] == groups
    with pytest.raises(TypeError, match="no 'lr' that was a callable"):
        ours.opt.load(path, lr=1.0)
    loose = Torch("adamw", other, lr=0.5)
    fresh = loose.state()["x"]
    loose.opt.load(path, strict=False)
    assert loose.state()["b"]["step"] == 2
    assert loose.state()["x"]["step"] == fresh["step"] == 0
    assert [g["lr"] for g in loose.opt.param_groups] == [1e-3, 0.5]  # what the file does not know keeps its settings


def test_torch_wide_narrow_and_half_parameters(tmp_path):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch

    def opt(dtype):
        p = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
        p.grad = torch.full_like(p, 0.1)
        made = rlx_optim.torch.AdamW([("w", p)])
        made.step()
        return p, made

    for dtype in (torch.float64, torch.bfloat16):
        p, mine = opt(dtype)
        mine.save(tmp_path / "a.safetensors")
        _, twin = opt(dtype)
        twin.step()
        twin.load(tmp_path / "a.safetensors")
        assert torch.equal(next(iter(twin.state.values()))["exp_avg"], mine.state[p]["exp_avg"])
    narrow, wide = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    p, mine = opt(torch.float64)
    mine.load(narrow)  # widened, exactly
    mine.save(wide)
    with pytest.raises(CheckpointError, match=r"is float64, expected float32, which would lose bits"):
        opt(torch.float32)[1].load(wide)
    assert rlx_optim.load(wide).state("w")["m"].tobytes() == mine.state[p]["exp_avg"].numpy().tobytes()
    with open_checkpoint(narrow) as snapshot:
        assert snapshot.parameters["w"].dtype == "bfloat16"
        assert snapshot.parameters["w"].tensors["m"].dtype == np.float32


def test_torch_split_parameters(tmp_path):
    torch = pytest.importorskip("torch")
    params, gradients = problem({"qkv": (12, 4), "experts": (3, 4, 5)}, steps=6)
    split = {"split": {"qkv": 3, "experts": 3}, "otherwise": None}
    for name in ("soap", "kronpsgd", "muon"):
        ours = Torch(name, params, **split).run(gradients[:3])
        ours.opt.save(tmp_path / "a.safetensors")
        twin = Torch(name, ours.values(), prefix="module.", **split_prefixed(split))
        twin.opt.load(tmp_path / "a.safetensors")
        twin.assert_state(ours)
        assert same_bits(twin.run(gradients[3:]).values(), ours.run(gradients[3:]).values())
        with pytest.raises(CheckpointError, match="'qkv' is split into 3 of shape"):
            rlx_optim.load(tmp_path / "a.safetensors")
    assert torch


def split_prefixed(split):
    return {**split, "split": {f"module.{k}": v for k, v in split["split"].items()}}


def test_a_group_of_several_types_stays_one(tmp_path):
    """Adafactor's eps follows the type of a parameter; a file says it for each, and the group still says it once."""
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import Adafactor

    def build():
        params = [("a", torch.nn.Parameter(torch.ones(4, 3))), ("b", torch.nn.Parameter(torch.ones(5, 3).bfloat16()))]
        params.append(("c", torch.nn.Parameter(torch.ones(6))))
        return params, Adafactor(params)

    params, opt = build()
    for _, p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    opt.save(tmp_path / "kinds.safetensors")
    _, other = build()
    other.load(tmp_path / "kinds.safetensors")
    assert [group["param_names"] for group in other.param_groups] == [["a", "b", "c"]]
    assert {k: v for k, v in other.param_groups[0].items() if k != "params"} == {
        k: v for k, v in opt.param_groups[0].items() if k != "params"
    }
    build()[1].load_state_dict(other.state_dict())
