"""Parameters that are several matrices: unequal parts, columns, heads, experts; by the user's word or a model's config."""

import types
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import rlx_optim  # noqa: E402
from rlx_optim import pieces  # noqa: E402
from rlx_optim.checkpoint import CheckpointError  # noqa: E402
from rlx_optim.torch import SOAP, KronPSGD, Muon, NorMuon  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Muon. it has matrices without names")


def noise(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(tensor, split):
    """As torch would: parts along the axis whose length they are."""
    return [part.clone() for part in tensor.split(list(split), 0 if sum(split) == tensor.shape[0] else 1)]


def together(parts, split, shape):
    return torch.cat(parts, 0 if sum(split) == shape[0] else 1)


SPLITS = [((20, 6), (12, 5, 3)), ((6, 20), (12, 5, 3)), ((8, 24), (8, 8, 8)), ((9, 4, 3), (4, 5))]


# ---- the same as apart ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("kind", [Muon, NorMuon, SOAP])
@pytest.mark.parametrize(("shape", "split"), SPLITS)
def test_parts_are_stepped_as_parameters_of_their_own(kind, shape, split, engine, tmp_path):
    whole = nn.Parameter(noise(shape, 0))
    parts = [nn.Parameter(part) for part in cut(whole.detach(), split)]
    settings = {"lr": 0.05, "engine": engine, "weight_decay": 0.1}
    opt = kind([("qkv", whole)], split={"qkv": list(split)}, **settings)
    apart = kind([(f"p{i}", part) for i, part in enumerate(parts)], **settings)

    def step(opt, params, t):
        grads = cut(noise(shape, t), split)
        for p, g in zip(params, grads if len(params) > 1 else [noise(shape, t)], strict=True):
            p.grad = g
        opt.step()

    for t in range(1, 4):
        step(opt, [whole], t)
        step(apart, parts, t)
    assert torch.equal(whole, together([p.detach() for p in parts], split, shape))
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    opt.save(tmp_path / "state.safetensors")
    for load in (
        lambda new: new.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)),
        lambda new: new.load(tmp_path / "state.safetensors"),
    ):
        resumed = nn.Parameter(whole.detach().clone())
        new = kind([("qkv", resumed)], **settings)  # the split is in the checkpoint
        load(new)
        step(new, [resumed], 4)
        again = nn.Parameter(whole.detach().clone())
        old = kind([("qkv", again)], split={"qkv": split}, **settings)
        old.load_state_dict(opt.state_dict())
        step(old, [again], 4)
        assert torch.equal(resumed, again)
        assert new.state[resumed]["batch"] == tuple(split)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_other_memory(engine, dtype):
    """Transposed memory, bfloat16, gradients that are not contiguous."""
    shape, split = (6, 20), (12, 5, 3)
    whole = nn.Parameter(noise((20, 6), 0, dtype).T)
    parts = [nn.Parameter(part) for part in cut(whole.detach(), split)]
    near = {"engine": engine, "rounding": "nearest"}  # chance would go by the whole's elements
    opt, apart = Muon([("w", whole)], split={"w": split}, **near), Muon(parts, **near)
    whole.grad = noise((20, 6), 1, dtype).T
    for p, g in zip(parts, cut(whole.grad, split), strict=True):
        p.grad = g.contiguous()
    opt.step()
    apart.step()
    assert torch.equal(whole, together([p.detach() for p in parts], split, shape))


def test_noise_of_parts():
    """KronPSGD draws for each piece by its name."""
    whole = nn.Parameter(noise((12, 4), 0))
    opt = KronPSGD([("w", whole)], split={"w": (8, 4)}, preconditioner_update_probability=1.0)
    whole.grad = noise((12, 4), 1)
    opt.step()
    assert [record.name for record in opt._lanes[0].seats[0].records] == ["w[0]", "w[1]"]


def test_state_of_parts(tmp_path):
    """What has the pieces' shapes is kept in the parameter's, unless columns are split; the rest one after the other."""
    for shape, split, kept in (((20, 6), (12, 8), (20, 6)), ((6, 20), (12, 8), (120,)), ((6, 20), (10, 10), (2, 6, 10))):
        p = nn.Parameter(noise(shape, 0))
        opt = NorMuon([("w", p)], split={"w": split})
        assert tuple(opt.state[p]["momentum_buffer"].shape) == kept
        p.grad = noise(shape, 1)
        opt.step()
        opt.save(tmp_path / "s.safetensors")
    assert tuple(opt.state[p]["second_momentum_buffer"].shape) == (2, 6)
    with pytest.raises(CheckpointError, match="split into 2 of shape"):
        rlx_optim.load(tmp_path / "s.safetensors")


def test_parts_that_need_other_state():
    p = nn.Parameter(noise((24, 6), 0))
    with pytest.raises(ValueError, match=r"SOAP: parts of .* do not have the same state"):
        SOAP([("w", p)], split={"w": (20, 4)}, max_precond_dim=10)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((3, 4), r"'w': shape \(20, 6\) cannot be split into parts of 3, 4"),
        ((20, 0), "split of 'w' must be the lengths >= 1 of its parts, got"),
        ((), "split of 'w' must be the lengths >= 1 of its parts, got"),
        (2.5, "split of 'w' must be an integer >= 1, got 2.5"),
        (True, "split of 'w' must be an integer >= 1, got True"),
    ],
)
def test_refused(split, message):
    with pytest.raises(ValueError, match=message):
        Muon([("w", nn.Parameter(noise((20, 6), 0)))], split={"w": split})


def test_what_is_no_table_is_refused():
    p = [("w", nn.Parameter(noise((20, 6), 0)))]
    with pytest.raises(TypeError, match=r'split must be a dict such as {"\*.qkv.weight": 3}, got 3'):
        Muon(p, split=3)
    with pytest.raises(TypeError, match="heads must be a dict"):
        Muon(p, heads=4)
    with pytest.raises(ValueError, match="heads of 'w' must be their number"):
        Muon(p, heads={"w": (10, 10)})
    with pytest.raises(ValueError, match="heads of 'w' must be their number, and not be in split too"):
        Muon(p, heads={"w": 2}, split={"w": 2})
    with pytest.raises(ValueError, match="split pattern 'v' matches no parameter"):
        Muon(p, heads={"v": 2})
    with pytest.raises(ValueError, match="heads=True asks a model's config"):
        Muon(p, heads=True)


def test_words():
    assert pieces.described((20, 6), 2) == "2 of 10×6"
    assert pieces.described((6, 20), (12, 8)) == "12+8 columns"
    assert pieces.described((20, 6), (12, 8)) == "12+8 rows"
    assert pieces.described((6, 20), (10, 10)) == "2 of 6×10"


# ---- by a model's config -------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            module = nn.Module()
            module.weight = nn.Parameter(noise(shape, len(name)))
            self.add_module(name, module)


class Experts(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(noise(shape, len(name))))


class Model(nn.Module):
    def __init__(self, config, **layers):
        super().__init__()
        self.config = types.SimpleNamespace(**config)
        self.layers = nn.ModuleDict(layers)


LLAMA = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
SPLIT = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}


def llama(**config):
    return Model({**LLAMA, **config}, attn=Layer(**SPLIT), mlp=Layer(gate_proj=(24, 16), down_proj=(16, 24)))


def splits(model, **settings):
    """How a model's parameters are split, by the last part of their names."""
    opt = Muon(model, **settings)
    return {name.removesuffix(".weight").split(".")[-1]: opt._pieces(name, p) for name, p in model.named_parameters()}


def test_llama_and_grouped_queries():
    """Separate matrices stay whole, unless heads are asked for: as many keys and values as there are groups."""
    assert set(splits(llama()).values()) == {1}
    assert splits(llama(), heads=True) == {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 1, "gate_proj": 1, "down_proj": 1}
    qwen = Model({**LLAMA, "head_dim": 8}, attn=Layer(q_proj=(32, 16), k_proj=(16, 16), v_proj=(16, 16), o_proj=(16, 32)))
    assert splits(qwen, heads=True) == {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 1}


def test_gpt2():
    """Conv1D keeps its matrices transposed: queries, keys and values are columns."""
    config = {"n_embd": 12, "n_head": 3, "n_layer": 1}
    model = Model(config, attn=Layer(c_attn=(12, 36), c_proj=(12, 12)), mlp=Layer(c_fc=(12, 48)))
    assert splits(model) == {"c_attn": (12, 12, 12), "c_proj": 1, "c_fc": 1}
    assert splits(model, heads=True)["c_attn"] == (4,) * 9
    assert splits(model, split={})["c_attn"] == 1
    assert splits(model, split={"*c_attn.weight": 2})["c_attn"] == 2
    report = Muon(model).routing_report()
    (line,) = [line for line in report.splitlines() if "c_attn" in line]
    assert line.endswith("as 3 of 12×12 (queries, keys, values by the model's config)")


def test_fused_rows():
    phi = Model(LLAMA, attn=Layer(qkv_proj=(32, 16), o_proj=(16, 16)), mlp=Layer(gate_up_proj=(48, 16), down_proj=(16, 24)))
    assert splits(phi) == {"qkv_proj": (16, 8, 8), "o_proj": 1, "gate_up_proj": 2, "down_proj": 1}
    assert splits(phi, heads=True)["qkv_proj"] == 8
    neox = Model({"hidden_size": 16, "num_attention_heads": 4}, attn=Layer(query_key_value=(48, 16)))
    assert splits(neox)["query_key_value"] == 1
    assert splits(neox, heads=True)["query_key_value"] == 12
    starcoder = Model({"n_embd": 16, "n_head": 4, "multi_query": True}, attn=Layer(c_attn=(24, 16)))
    assert splits(starcoder)["c_attn"] == (16, 4, 4)
    deepseek = Model({**LLAMA, "num_key_value_heads": 4}, attn=Layer(q_b_proj=(40, 6), kv_b_proj=(24, 6)))
    assert splits(deepseek, heads=True) == {"q_b_proj": 4, "kv_b_proj": 4}


def test_experts():
    """Of Mixtral and Qwen with their gates in rows, and those whose are columns."""
    mixtral = Model({**LLAMA, "num_local_experts": 3}, experts=Experts(gate_up_proj=(3, 48, 16), down_proj=(3, 16, 24)))
    assert splits(mixtral) == {"gate_up_proj": 6, "down_proj": 3}
    qwen = Model(
        {**LLAMA, "num_experts": 3, "moe_intermediate_size": 5}, experts=Experts(gate_up_proj=(3, 10, 16), down_proj=(3, 16, 5))
    )
    assert splits(qwen) == {"gate_up_proj": 6, "down_proj": 3}
    oss = Model({**LLAMA, "num_local_experts": 3}, experts=Experts(gate_up_proj=(3, 16, 48), down_proj=(3, 24, 16)))
    assert splits(oss) == {"gate_up_proj": 3, "down_proj": 3}
    report = Muon(mixtral).routing_report()
    assert "as 6 of 24×16 (experts, gate and up by the model's config)" in report
    assert "as 3 of 16×24 (experts by the model's config)" in report


def test_a_config_that_says_nothing_of_it():
    assert set(splits(Model({"hidden_size": 16}, attn=Layer(c_attn=(16, 48)))).values()) == {1}
    assert set(splits(Model({**LLAMA, "num_attention_heads": "4"}, attn=Layer(c_attn=(16, 48)))).values()) == {1}
    other = Model(LLAMA, attn=Layer(c_attn=(7, 9), gate_up_proj=(14, 3)))
    assert set(splits(other).values()) == {1}
    nested = Model({"text_config": types.SimpleNamespace(**LLAMA)}, attn=Layer(qkv_proj=(32, 16)))
    assert splits(nested)["qkv_proj"] == (16, 8, 8)


def test_a_model_steps_as_its_matrices_would():
    """GPT-2's fused columns and Mixtral's experts, bit for bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model(
            {"n_embd": 12, "n_head": 3, "num_experts": 2}, attn=Layer(c_attn=(12, 36)), experts=Experts(down_proj=(2, 8, 6))
        )
        fused, experts = model.layers["attn"].c_attn.weight, model.layers["experts"].down_proj
        parts = [nn.Parameter(p) for p in (*cut(fused.detach(), (12, 12, 12)), *experts.detach().clone())]
        opt, apart = Muon(model), Muon(parts)
        for t in range(3):
            fused.grad, experts.grad = noise((12, 36), t), noise((2, 8, 6), t)
            for p, g in zip(parts, (*cut(fused.grad, (12, 12, 12)), *experts.grad), strict=True):
                p.grad = g.clone()
            opt.step()
            apart.step()
        assert torch.equal(fused, torch.cat([p.detach() for p in parts[:3]], 1))
        assert torch.equal(experts, torch.stack([p.detach() for p in parts[3:]]))
