"""Parameters that are several matrices: unequal parts, columns, heads, experts; by the user's word, a module's type, or a model's
config."""

import copy
import types
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import rlx_optim  # noqa: E402
from rlx_optim import splits  # noqa: E402
from rlx_optim.checkpoint import CheckpointError  # noqa: E402
from rlx_optim.torch import SOAP, AdamW, KronPSGD, Muon, NorMuon, Scion  # noqa: E402
from rlx_optim.torch.params import current_split  # noqa: E402

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
    assert [record.name for record in opt._placements[0].entries[0].records] == ["w[0]", "w[1]"]


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
    for params in (p, nn.Sequential(nn.LSTM(4, 3), nn.Linear(3, 2))):  # gates are no heads
        with pytest.raises(ValueError, match=r"heads=True asks a model's config .* or its nn\.MultiheadAttention"):
            Muon(params, heads=True)


def test_words():
    assert splits.described((20, 6), 2) == "2 of 10×6"
    assert splits.described((6, 20), (12, 8)) == "12+8 columns"
    assert splits.described((20, 6), (12, 8)) == "12+8 rows"
    assert splits.described((6, 20), (10, 10)) == "2 of 6×10"


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


def splits_of(model, **settings):
    """How a model's parameters are split, by the last part of their names."""
    opt = Muon(model, **settings)
    return {name.removesuffix(".weight").split(".")[-1]: current_split(opt, name, p) for name, p in model.named_parameters()}


def test_llama_and_grouped_queries():
    """Separate matrices stay whole, unless heads are asked for: as many keys and values as there are groups."""
    assert set(splits_of(llama()).values()) == {1}
    assert splits_of(llama(), heads=True) == {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 1, "gate_proj": 1, "down_proj": 1}
    qwen = Model({**LLAMA, "head_dim": 8}, attn=Layer(q_proj=(32, 16), k_proj=(16, 16), v_proj=(16, 16), o_proj=(16, 32)))
    assert splits_of(qwen, heads=True) == {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 1}


def test_gpt2():
    """Conv1D keeps its matrices transposed: queries, keys and values are columns."""
    config = {"n_embd": 12, "n_head": 3, "n_layer": 1}
    model = Model(config, attn=Layer(c_attn=(12, 36), c_proj=(12, 12)), mlp=Layer(c_fc=(12, 48)))
    assert splits_of(model) == {"c_attn": (12, 12, 12), "c_proj": 1, "c_fc": 1}
    assert splits_of(model, heads=True)["c_attn"] == (4,) * 9
    assert splits_of(model, split={})["c_attn"] == 1
    assert splits_of(model, split={"*c_attn.weight": 2})["c_attn"] == 2
    report = Muon(model).routing_report()
    (line,) = [line for line in report.splitlines() if "c_attn" in line]
    assert line.endswith("as 3 of 12×12 (queries, keys, values by the model's config)")


def test_fused_rows():
    phi = Model(LLAMA, attn=Layer(qkv_proj=(32, 16), o_proj=(16, 16)), mlp=Layer(gate_up_proj=(48, 16), down_proj=(16, 24)))
    assert splits_of(phi) == {"qkv_proj": (16, 8, 8), "o_proj": 1, "gate_up_proj": 2, "down_proj": 1}
    assert splits_of(phi, heads=True)["qkv_proj"] == 8
    neox = Model({"hidden_size": 16, "num_attention_heads": 4}, attn=Layer(query_key_value=(48, 16)))
    assert splits_of(neox)["query_key_value"] == 1
    assert splits_of(neox, heads=True)["query_key_value"] == 12
    starcoder = Model({"n_embd": 16, "n_head": 4, "multi_query": True}, attn=Layer(c_attn=(24, 16)))
    assert splits_of(starcoder)["c_attn"] == (16, 4, 4)
    deepseek = Model({**LLAMA, "num_key_value_heads": 4}, attn=Layer(q_b_proj=(40, 6), kv_b_proj=(24, 6)))
    assert splits_of(deepseek, heads=True) == {"q_b_proj": 4, "kv_b_proj": 4}


def test_experts():
    """Of Mixtral and Qwen with their gates in rows, and those whose are columns."""
    mixtral = Model({**LLAMA, "num_local_experts": 3}, experts=Experts(gate_up_proj=(3, 48, 16), down_proj=(3, 16, 24)))
    assert splits_of(mixtral) == {"gate_up_proj": 6, "down_proj": 3}
    qwen = Model(
        {**LLAMA, "num_experts": 3, "moe_intermediate_size": 5}, experts=Experts(gate_up_proj=(3, 10, 16), down_proj=(3, 16, 5))
    )
    assert splits_of(qwen) == {"gate_up_proj": 6, "down_proj": 3}
    oss = Model({**LLAMA, "num_local_experts": 3}, experts=Experts(gate_up_proj=(3, 16, 48), down_proj=(3, 24, 16)))
    assert splits_of(oss) == {"gate_up_proj": 3, "down_proj": 3}
    report = Muon(mixtral).routing_report()
    assert "as 6 of 24×16 (experts, gate and up by the model's config)" in report
    assert "as 3 of 16×24 (experts by the model's config)" in report


def test_a_config_that_says_nothing_of_it():
    assert set(splits_of(Model({"hidden_size": 16}, attn=Layer(c_attn=(16, 48)))).values()) == {1}
    assert set(splits_of(Model({**LLAMA, "num_attention_heads": "4"}, attn=Layer(c_attn=(16, 48)))).values()) == {1}
    other = Model(LLAMA, attn=Layer(c_attn=(7, 9), gate_up_proj=(14, 3)))
    assert set(splits_of(other).values()) == {1}
    nested = Model({"text_config": types.SimpleNamespace(**LLAMA)}, attn=Layer(qkv_proj=(32, 16)))
    assert splits_of(nested)["qkv_proj"] == (16, 8, 8)


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


# ---- by the type of torch's own modules ------------------------------------------------------------------------------------
class Attention(nn.MultiheadAttention):
    """As people derive from torch's."""


def behind(module, width=16):
    """A model that ends in a head, so that the module's own matrices are hidden ones."""
    return nn.Sequential(module, nn.Linear(width, 3))


def lowered(shape, seed):
    return noise(shape, seed) * 0.1


#: module, settings -> by parameter, into how many matrices it is split; those left out stay whole
PACKED = {
    "attention": (lambda: nn.MultiheadAttention(16, 4), {}, {"in_proj_weight": 3}),
    "attention by head": (lambda: nn.MultiheadAttention(16, 4), {"heads": True}, {"in_proj_weight": 12}),
    "a subclass": (lambda: Attention(16, 4, bias=False), {}, {"in_proj_weight": 3}),
    "torch.ao's": (lambda: torch.ao.nn.quantizable.MultiheadAttention(16, 4), {}, {"in_proj_weight": 3}),
    "keys and values of other sizes": (lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=6, add_bias_kv=True), {}, {}),
    "the same by head": (
        lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=6),
        {"heads": True},
        {"q_proj_weight": 4, "k_proj_weight": 4, "v_proj_weight": 4},
    ),
    "an encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32), {}, {"self_attn.in_proj_weight": 3}),
    "a decoder layer": (
        lambda: nn.TransformerDecoderLayer(16, 4, 32),
        {},
        {"self_attn.in_proj_weight": 3, "multihead_attn.in_proj_weight": 3},
    ),
    "LSTM": (
        lambda: nn.LSTM(8, 6, proj_size=4, bidirectional=True),
        {},
        {f"weight_{w}_l0{back}": 4 for w in ("ih", "hh") for back in ("", "_reverse")},
    ),
    "GRU": (lambda: nn.GRU(8, 6, num_layers=2), {}, {f"weight_{w}_l{i}": 3 for w in ("ih", "hh") for i in (0, 1)}),
    "LSTMCell": (lambda: nn.LSTMCell(8, 6), {}, {"weight_ih": 4, "weight_hh": 4}),
    "GRUCell": (lambda: nn.GRUCell(8, 6), {}, {"weight_ih": 3, "weight_hh": 3}),
    "RNN has one matrix": (lambda: nn.RNN(8, 6), {}, {}),
    "Bilinear is a tensor": (lambda: nn.Bilinear(4, 5, 6), {}, {}),
    "left whole": (lambda: nn.MultiheadAttention(16, 4), {"split": {}}, {}),
    "by one's own word": (
        lambda: nn.MultiheadAttention(16, 4),
        {"split": {"*in_proj_weight": (32, 16)}},
        {"in_proj_weight": (32, 16)},
    ),
    "heads by one's own word": (lambda: nn.MultiheadAttention(16, 4), {"heads": {"*in_proj_weight": 6}}, {"in_proj_weight": 6}),
}


@pytest.mark.parametrize("title", PACKED)
def test_modules_say_what_they_pack(title):
    make, settings, expected = PACKED[title]
    model = behind(make())
    opt = Muon(model, **settings)
    found = {name.removeprefix("0."): current_split(opt, name, p) for name, p in model.named_parameters()}
    assert {name: split for name, split in found.items() if split != 1} == expected
    for name, p in model[0].named_parameters():
        rule = next(group["rule"] for group in opt.param_groups if any(p is each for each in group["params"]))
        assert rule == ("adamw" if p.ndim == 1 or "norm" in name or "bias" in name else "muon"), name


def test_the_report_says_what_a_module_packs():
    report = Muon(behind(nn.TransformerEncoderLayer(16, 4, 32))).routing_report()
    assert "as 3 of 16×16 (queries, keys, values of MultiheadAttention)" in report
    assert report.count(" as ") == 1
    assert (
        "as 12 of 4×16 (queries, keys, values of MultiheadAttention)"
        in Muon(behind(nn.MultiheadAttention(16, 4)), heads=True).routing_report()
    )
    assert (
        "as 4 of 4×8 (heads of MultiheadAttention)"
        in Muon(behind(nn.MultiheadAttention(16, 4, kdim=8)), heads=True).routing_report()
    )
    assert "as 4 of 6×8 (gates of LSTM)" in Muon(behind(nn.LSTM(8, 6))).routing_report()
    assert " as " not in Muon(behind(nn.LSTM(8, 6)), split={}).routing_report()


def test_biases_of_attention_are_no_matrices():
    """bias_k and bias_v are of shape (1, 1, n), as a convolution's kernel might be."""
    report = Muon(behind(nn.MultiheadAttention(16, 4, add_bias_kv=True))).routing_report()
    assert [line.split(None, 3)[2:] for line in report.splitlines() if "bias_" in line] == [
        ["AdamW", "bias (MultiheadAttention)"]
    ] * 2


def apart(model, opt):
    """(name, parameter) of every matrix that an optimizer sees in a model, as parameters of their own; and how to cut like that."""

    def pieces_of(name, tensor, split):
        split = split if isinstance(split, tuple) else (tensor.shape[0] // split,) * split
        return [(f"{name}[{i}]" if len(split) > 1 else name, part.clone()) for i, part in enumerate(tensor.split(list(split)))]

    ways = {name: current_split(opt, name, p) for name, p in model.named_parameters()}
    return lambda tensors: [pair for name, t in tensors for pair in pieces_of(name, t, ways[name])]


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("kind", [Muon, NorMuon, Scion, SOAP, KronPSGD])
@pytest.mark.parametrize("title", ["an encoder layer", "attention by head", "LSTM", "GRUCell"])
def test_what_a_module_packs_steps_as_matrices_of_their_own(kind, title, engine):
    """Bit for bit; vectors go along, as the same rule's or as `otherwise`'s."""
    make, settings, _ = PACKED[title]
    torch.manual_seed(0)
    model = behind(make())
    more = {"momentum": 0.1} if kind is Scion else {}
    opt = kind(model, lr=0.05, engine=engine, **settings, **more)
    whole = [(name, p) for group in opt.param_groups for name, p in zip(group["param_names"], group["params"], strict=True)
             if group["rule"] == opt.rule]  # fmt: skip
    cut_alike = apart(model, opt)
    parts = [(name, nn.Parameter(part)) for name, part in cut_alike([(name, p.detach()) for name, p in whole])]
    assert len(parts) > len(whole)
    alone = kind(parts, lr=0.05, engine=engine, **more, **({"route": lambda name, p: True} if kind in (Muon, NorMuon) else {}))
    for t in range(3):
        for i, p in enumerate(model.parameters()):
            p.grad = lowered(p.shape, 100 * t + i)
        for (_, part), (_, grad) in zip(parts, cut_alike([(name, p.grad) for name, p in whole]), strict=True):
            part.grad = grad
        opt.step()
        alone.step()
    ends = cut_alike([(name, p.detach()) for name, p in whole])
    assert all(torch.equal(end, part) for (_, end), (_, part) in zip(ends, parts, strict=True))


def test_a_packed_step_is_far_from_that_of_the_whole():
    """What it was before: 0.8 of the step away."""
    found = {}
    for split in (None, {}):
        torch.manual_seed(0)
        model = behind(nn.MultiheadAttention(16, 4))
        opt, p = Muon(model, split=split), model[0].in_proj_weight
        before = p.detach().clone()
        p.grad = noise(p.shape, 1)
        opt.step()
        found[split is None] = p.detach() - before
    assert (found[True] - found[False]).norm() > 0.5 * found[True].norm()


def test_modules_are_seen_through_what_is_put_around_them():
    """Parametrizations, torch.compile, checkpoint wrappers; names in the state dict are those of the parameters."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = behind(nn.MultiheadAttention(16, 4))
    nn.utils.parametrizations.weight_norm(model[0], "in_proj_weight")
    opt = Muon(model)
    assert current_split(opt, "", model[0].parametrizations.in_proj_weight.original1) == 3
    model = behind(nn.LSTM(8, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[0], "weight_hh_l0")
    assert current_split(Muon(model), "", model[0].weight_hh_l0_v) == 4
    model = behind(nn.MultiheadAttention(16, 4))
    assert current_split(Muon(torch.compile(model)), "", model[0].in_proj_weight) == 3
    model[0] = checkpoint_wrapper(model[0])
    assert current_split(Muon(model), "", next(model[0].parameters())) == 3


def test_modules_that_are_shared_or_have_other_shapes_stay_whole():
    """A layer in two places is tied, and goes to otherwise, where nothing is split; nor is a shape that the type does not explain."""
    layer = nn.MultiheadAttention(16, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(16, 3))
    opt = Muon(model)
    assert "tied weight (2 uses)\n" in opt.routing_report() + "\n"
    assert "batch" not in opt.state[layer.in_proj_weight]
    other = nn.MultiheadAttention(16, 4)
    other.in_proj_weight = nn.Parameter(noise((40, 16), 0))
    assert current_split(Muon(behind(other)), "", other.in_proj_weight) == 1
    flat = nn.MultiheadAttention(16, 4)
    flat.in_proj_weight = nn.Parameter(noise((48,), 0))
    assert current_split(Muon(behind(flat)), "", flat.in_proj_weight) == 1


def test_only_matrix_rules_ask_a_model():
    """AdamW, and a rule that a parameter is routed to, have it whole: they measure and keep what they did before."""
    model = behind(nn.MultiheadAttention(16, 4))
    p = model[0].in_proj_weight
    assert "batch" not in AdamW(model).state[p]
    opt = Muon(model, route={"*in_proj_weight": rlx_optim.Lamb()})
    assert "batch" not in opt.state[p]
    assert "matches '*in_proj_weight'\n" in opt.routing_report()
    assert Muon(model, route={"*in_proj_weight": rlx_optim.SOAP()}).state[p]["batch"] == 3
    assert current_split(Muon(model.named_parameters()), "0.in_proj_weight", p) == 1  # names alone do not say it


@pytest.mark.parametrize("kind", [Muon, NorMuon, Scion, SOAP, KronPSGD])
@pytest.mark.parametrize("before", [None, {}], ids=["split", "whole"])
def test_a_run_goes_on_as_it_began(kind, before, tmp_path):
    """Saved split or whole (as older versions had it), loaded where the model, or split={}, says the other: bit for bit."""
    more = {"momentum": 0.1} if kind is Scion else {}

    def begun(split):
        torch.manual_seed(0)
        model = behind(nn.MultiheadAttention(16, 4))
        return model, kind(model, lr=0.05, split=split, **more)

    def step(model, opt, t):
        for i, p in enumerate(model.parameters()):
            p.grad = lowered(p.shape, 100 * t + i)
        opt.step()

    model, opt = begun(before)
    for t in range(3):
        step(model, opt, t)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    opt.save(tmp_path / "state.safetensors")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, opt, 3)
    for split in (None, {}):
        for way in ("state_dict", "file"):
            resumed, new = begun(split)
            resumed.load_state_dict(weights)
            if way == "file":
                new.load(tmp_path / "state.safetensors")
            else:
                new.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            again = copy.deepcopy(new.state_dict())  # keeps saying it
            step(resumed, new, 3)
            assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), model.parameters(), strict=True)), (split, way)
            assert current_split(new, "0.in_proj_weight", resumed[0].in_proj_weight) == (3 if before is None else 1)
            shown = " as 3 of 16×16 " in new.routing_report()
            assert shown == (before is None and split is None)
            third, last = begun(None)
            third.load_state_dict(weights)
            last.load_state_dict(again)
            step(third, last, 3)
            assert all(torch.equal(p, q) for p, q in zip(third.parameters(), model.parameters(), strict=True))


def test_a_split_of_ones_own_holds_for_state_that_was_whole():
    """Where it fits (Muon's momentum has the parameter's shape); else it is refused by name."""
    model = behind(nn.MultiheadAttention(16, 4))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    saved = {}
    for kind in (Muon, SOAP):
        opt = kind(model, split={})
        opt.step()
        saved[kind] = opt.state_dict()
    opt = Muon(model, split={"*in_proj_weight": 3})
    opt.load_state_dict(saved[Muon])
    assert current_split(opt, "0.in_proj_weight", model[0].in_proj_weight) == 3
    with pytest.raises(ValueError, match=r"SOAP: state 'L1' of '0.in_proj_weight' has shape \(48, 48\), expected"):
        SOAP(model, split={"*in_proj_weight": 3}).load_state_dict(saved[SOAP])
