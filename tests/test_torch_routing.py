"""The torch front end: which parameter goes to which rule, and the reports that say so."""

import pytest
import torch
from torch import nn
from torch_cases import bits, give_gradients, make, network, on_engines, parameters, run, through_disk

import rlx_optim
import rlx_optim.torch as ours

pytestmark = pytest.mark.usefixtures("one_thread")  # tensors are tiny: a second thread of torch only waits


# ---- routing -------------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)  # a hidden matrix whatever it is called


class Gpt(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.lm_head = nn.Linear(8, 11, bias=False)  # made first: the last Linear is not always the head
        self.stem = nn.Conv2d(1, 4, 3)
        self.wte = nn.Embedding(11, 8)
        self.h = nn.ModuleList([Block(8)])
        self.norm = nn.LayerNorm(8)
        if tied:
            self.lm_head.weight = self.wte.weight


def table(opt):
    rows = [line.split(None, 3) for line in opt.routing_report().splitlines()[1:]]
    return {row[0]: (row[2], *row[3:]) for row in rows}


def one_d(rule="Muon", dims=1, takes="2 or more"):
    return ("AdamW", f"{dims} dimensions; {rule} takes {takes}")


MODEL = {
    "stem.weight": ("Muon",),
    "stem.bias": one_d(),
    "wte.weight": ("AdamW", "embedding (Embedding)"),
    "h.0.norm.weight": one_d(),
    "h.0.norm.bias": one_d(),
    "h.0.qkv.weight": ("Muon",),
    "h.0.output.weight": ("Muon",),
    "h.0.output.bias": one_d(),
    "norm.weight": one_d(),
    "norm.bias": one_d(),
    "lm_head.weight": ("AdamW", "output head (by name)"),
}
BY_NAME = MODEL | {
    "wte.weight": ("AdamW", "embedding (by name)"),
    "lm_head.weight": ("AdamW", "output head (by name)"),
}


@pytest.mark.parametrize(
    ("tied", "what", "settings", "expected"),
    [
        (False, "model", {}, MODEL),
        (
            True,
            "model",
            {},
            {k: v for k, v in MODEL.items() if k != "wte.weight"} | {"lm_head.weight": ("AdamW", "tied weight (2 uses)")},
        ),
        (False, "names", {}, BY_NAME),
        (
            False,
            "model",
            dict(route={"stem.*": "otherwise"}),
            MODEL | dict.fromkeys(("stem.weight", "stem.bias"), ("AdamW", "matches 'stem.*'")),
        ),
        (False, "model", dict(route={"lm_head.weight": "own"}), MODEL | {"lm_head.weight": ("Muon",)}),
        (
            False,
            "model",
            dict(route={"*.bias": "own", "*": "otherwise"}),
            {k: one_d() if k.endswith("bias") else ("AdamW", "matches '*'") for k in MODEL},
        ),
        (
            False,
            "names",
            dict(route=lambda name, p: p.shape[0] != 24 if p.ndim == 2 else None),  # everything 2-D but qkv
            BY_NAME | {"h.0.qkv.weight": ("AdamW", "route"), "wte.weight": ("Muon",), "lm_head.weight": ("Muon",)},
        ),
    ],
    ids=["untied", "tied", "by name", "glob to otherwise", "glob to own", "first pattern wins", "predicate"],
)
def test_muon_routes(tied, what, settings, expected):
    model = Gpt(tied)
    opt = ours.Muon(model if what == "model" else model.named_parameters(), **settings)
    assert table(opt) == expected
    assert sum(len(g["params"]) for g in opt.param_groups) == len(expected)
    assert len(opt.param_groups) == len({v[0] for v in expected.values()})


def test_mars_routes():
    expected = {k: one_d("MARS", 1, "2") if v == one_d() else v for k, v in MODEL.items()}
    expected |= {"h.0.qkv.weight": ("MARS",), "h.0.output.weight": ("MARS",), "stem.weight": one_d("MARS", 4, "2")}
    assert table(ours.MARS(Gpt(False))) == expected


def test_soap_and_kronpsgd_take_everything_unless_told():
    for cls in (ours.SOAP, ours.KronPSGD):
        assert set(table(cls(Gpt(False))).values()) == {(cls.__name__,)}
        split = table(cls(Gpt(False), otherwise=rlx_optim.Lion(lr=1e-4)))
        assert split["wte.weight"] == ("Lion", "embedding (Embedding)")
        assert split["h.0.qkv.weight"] == (cls.__name__,)


def test_hidden_layers_called_output_and_models_without_a_head():
    bert = ours.Muon(
        [(f"encoder.layer.0.{k}.weight", nn.Parameter(torch.zeros(4, 4))) for k in ("attention.output.dense", "mlp.fc_out")]
    )
    assert set(table(bert).values()) == {("Muon",)}
    top = ours.Muon([(f"{k}.weight", nn.Parameter(torch.zeros(4, 4))) for k in ("output", "model.fc_out", "layers.0.w1")])
    assert [v[0] for v in table(top).values()] == ["Muon", "AdamW", "AdamW"]
    plain = table(ours.Muon(network(False)))
    assert plain["4.weight"] == ("AdamW", "output head (the last Linear, 4)")
    assert plain["2.weight"] == ("Muon",)
    assert table(ours.Muon(nn.Linear(4, 4, bias=False))) == {"weight": ("Muon",)}


def test_plain_lists_go_by_shape_and_1d_alone_is_fine():
    matrix, vector = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    opt = ours.Muon([matrix, vector])
    assert [(g["rule"], g["params"]) for g in opt.param_groups] == [("muon", [matrix]), ("adamw", [vector])]
    only = ours.Muon([vector])
    assert [g["rule"] for g in only.param_groups] == ["adamw"]
    give_gradients({"v": vector}, 0)
    before = vector.detach().clone()
    only.step()
    assert not torch.equal(before, vector)


def test_groups_and_late_groups_are_routed_too():
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (3, 3), "b.bias": (3,), "embed.weight": (9, 3)}
    params = parameters(shapes=shapes)
    a, b = ([(k, p) for k, p in params.items() if k.startswith(x)] for x in ("a", "b"))
    opt = ours.Muon([{"params": a, "lr": 0.5, "tag": "first"}], otherwise=rlx_optim.Lion(lr=1e-3))
    opt.add_param_group({"params": b})
    opt.add_param_group({"params": [("embed.weight", params["embed.weight"])]})
    opt.add_param_group({"params": [("c", nn.Parameter(torch.ones(2, 2)))], "rule": "lion", "lr": 1e-4})  # the user says
    assert [(g["rule"], g["lr"], g.get("tag"), g["param_names"]) for g in opt.param_groups] == [
        ("muon", 0.5, "first", ["a.weight"]),
        ("lion", 0.5, "first", ["a.bias"]),  # what the group itself says
        ("muon", 0.02, None, ["b.weight"]),
        ("lion", 1e-3, None, ["b.bias"]),
        ("lion", 1e-3, None, ["embed.weight"]),
        ("lion", 1e-4, None, ["c"]),
    ]
    before = bits(params)
    run(opt, params, 0, 1)
    assert not any(torch.equal(before[k], params[k]) for k in params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(route={"nowhere.*": "otherwise"}), r"route pattern 'nowhere\.\*' matches no parameter name"),
        (dict(split={"nowhere.*": 3}), r"split pattern 'nowhere\.\*' matches no parameter name"),
        (dict(route={"*": "elsewhere"}), "route sends to \"own\", \"otherwise\" or an optimizer .*, got 'elsewhere'"),
        (dict(otherwise=None), "give otherwise="),
        (dict(otherwise=None, route={"*": "otherwise"}), "there is no otherwise"),
        (dict(split={"2.weight": 3}), r"'2.weight': shape \(16, 16\) cannot be split into 3 equal matrices"),
        (dict(split={"2.weight": 0}), "split of '2.weight' must be an integer >= 1, got 0"),
        (dict(otherwise=rlx_optim.AdamW(lr=lambda t: 0.1)), "otherwise has a schedule for 'lr'"),
        (dict(otherwise=rlx_optim.AdamW(groups=[{"match": "*", "lr": 0.1}])), "otherwise has groups of its own"),
        (dict(otherwise=rlx_optim.MARS()), "otherwise must take every tensor itself"),
    ],
)  # fmt: skip
def test_routing_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        ours.Muon(network(True), **settings)


def test_routing_refuses_what_is_no_route():
    with pytest.raises(TypeError, match="route must be a dict of patterns or a function"):
        ours.Muon(network(True), route="*.bias")
    with pytest.raises(TypeError, match="otherwise must be like"):
        ours.Muon(network(True), otherwise=torch.optim.AdamW)
    with pytest.raises(ValueError, match="'s': a parameter without dimensions cannot be split"):
        ours.Muon([("s", nn.Parameter(torch.ones(())))], split={"s": 3})


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
@on_engines
@pytest.mark.parametrize(("shape", "pieces"), [((24, 8), 3), ((3, 8, 8), 3), ((2, 3, 4, 5), 6), ((3, 8, 8), 6)])
def test_split_equals_separate_parameters(name, engine, shape, pieces):
    whole = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    inner = {(24, 8): (8, 8), (2, 3, 4, 5): (4, 5), (3, 8, 8): (8, 8) if pieces == 3 else (4, 8)}[shape]
    parts = [nn.Parameter(part.clone()) for part in whole.detach().reshape(pieces, *inner)]
    opt = make(name, [("a.qkv.weight", whole)], engine=engine, split={"*.qkv.weight": pieces})
    apart = make(name, parts, engine=engine)
    assert opt.param_groups[0]["rule"] == name.lower()
    for t in range(5):
        give_gradients({"w": whole}, t)
        for part, grad in zip(parts, whole.grad.reshape(pieces, *inner), strict=True):
            part.grad = grad.clone()
        opt.step()
        apart.step()
    assert torch.equal(whole.reshape(pieces, *inner), torch.stack([p.detach() for p in parts]))
    resumed = nn.Parameter(whole.detach().clone())
    other = make(name, [resumed], engine=engine)  # the split is in the checkpoint
    other.load_state_dict(through_disk(opt.state_dict()))
    for o, p in ((opt, whole), (other, resumed)):
        run(o, {"w": p}, 5, 8)
    assert torch.equal(whole, resumed)


def test_split_experts_are_matrices_to_mars():
    experts = nn.Parameter(torch.randn(4, 6, 5))
    assert table(ours.MARS([("experts", experts)]))["experts"][0] == "AdamW"
    assert table(ours.MARS([("experts", experts)], split={"experts": 4}))["experts"] == ("MARS",)


# ---- reports -------------------------------------------------------------------------------------------------------------------
def test_engine_report():
    half, double = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [
        {"params": [nn.Parameter(torch.ones(2, 2)), half]},
        {"params": [double]},
        {"params": [nn.Parameter(torch.ones(3))], "maximize": True},
    ]
    report = ours.AdamW(groups).engine_report()
    assert list(report) == [
        "2 parameters on cpu, float32 arithmetic",
        "1 parameters on cpu, float64 arithmetic",
        "1 parameters on cpu, float32 arithmetic, maximized",
    ]
    assert all(
        text.startswith("cpu: compiled by LLVM") and text.endswith("(CPU tensors, llvmlite installed)")
        for text in report.values()
    )
    (text,) = ours.Muon([half], engine="torch").engine_report().values()
    assert text == "torch: cpu, float32 arithmetic, batched by foreach (asked for)"
    with pytest.raises(ValueError, match="engine 'cpu' cannot step a parameter on cuda:0"):
        ours.engines.choose_engine("cpu", torch.device("cuda", 0), torch.float32)


def test_without_llvmlite_the_torch_engine_takes_over(monkeypatch):
    find = ours.engines.importlib.util.find_spec
    monkeypatch.setattr(ours.engines.importlib.util, "find_spec", lambda name: None if name == "llvmlite" else find(name))
    ours.engines.choose_engine.cache_clear()
    try:
        (text,) = ours.AdamW([nn.Parameter(torch.ones(2))]).engine_report().values()
        assert text.endswith("(llvmlite is not installed (pip install llvmlite))")
        with pytest.raises(ValueError, match="engine 'cpu' cannot run: llvmlite is not installed"):
            ours.AdamW([nn.Parameter(torch.ones(2))], engine="cpu")
    finally:
        ours.engines.choose_engine.cache_clear()


def test_routing_report_is_a_table():
    assert ours.Muon(network(True)).routing_report() == (
        "parameter  shape  rule   why\n"
        "0.weight   16×12  Muon\n"
        "2.weight   16×16  Muon\n"
        "0.bias     16     AdamW  1 dimensions; Muon takes 2 or more\n"
        "2.bias     16     AdamW  1 dimensions; Muon takes 2 or more\n"
        "4.weight   4×16   AdamW  output head (the last Linear, 4)\n"
        "4.bias     4      AdamW  1 dimensions; Muon takes 2 or more"
    )
    assert "(unnamed)" in ours.Muon([nn.Parameter(torch.ones(2, 2))]).routing_report()
