"""One router for three front ends: what a name says, what the user says, any number of rules, and the report."""

import copy
import warnings

import numpy as np
import pytest

import rlx_optim
from rlx_optim.routing import reason_by_name

HIDDEN = """
h.0.fc.weight h.0.attn.c_attn.weight transformer.h.11.mlp.c_proj.weight model.layers.0.self_attn.q_proj.weight
model.layers.31.mlp.down_proj.weight layers.2.feed_forward.w1.weight bert.encoder.layer.0.attention.output.dense.weight
encoder.layer.0.output.dense.weight transformer.h.0.mlp.fc_out.weight blocks.0.proj_out.weight sa.heads.0.key.weight
encoder.multi_head.q.weight self_attn.in_proj_weight self_attn.out_proj.weight pre_classifier.weight pre_logits.kernel
embedder_mlp.kernel member.kernel remember.weight params.Dense_2.kernel params.blocks_0.multi_head_attention.query.kernel
params.MultiHeadDotProductAttention_0.query.kernel params.mlp.output.kernel transformer/~/linear_1.w layers.1.kernel.value
conv1.weight fc1.weight w 0.weight _orig_mod.layers.0.fc.weight blocks.0.fc.parametrizations.weight.original0
"""
EMBEDDINGS = """
wte.weight wpe.weight transformer.wte.weight model.embed_tokens.weight tok_embeddings.weight tok_emb.weight pos_emb.weight
bert.embeddings.word_embeddings.weight embeddings.position_embeddings.weight token_type_embeddings.weight pos_embed
patch_embed.proj.weight token_embedder.embedding embedding_table tokenEmbedding.weight Embed_0.embedding
params.Embed_0.embedding params.embed.embedding posembed_input.pos_embedding transformer/~/embed.embeddings
embed.W_E cls_token register_tokens module.wte.weight _orig_mod.wte.weight wte.parametrizations.weight.original
block.0.layer.0.SelfAttention.relative_attention_bias.weight layers.0.attn.relative_position_bias_table EMBED.weight
"""
HEADS = """
lm_head.weight head.weight heads.head.weight classifier.weight classifier.6.weight score.weight unembed.W_U output_layer.weight
output.weight model.output.weight module.output.weight fc_out.weight proj_out.weight embed_out.weight qa_outputs.weight
mlm_head.weight policy_head.kernel head_2.kernel params.head_0.kernel params.lm_head.kernel params.output.kernel LMHead_0.kernel
params.ClassificationHead_0.kernel decoder.logits_dense.kernel to_logits.weight lmHead.weight net/~/lm_head.w
module._orig_mod.lm_head.weight lm_head.parametrizations.weight.original1
"""
REASONS = dict.fromkeys(HIDDEN.split())
REASONS |= dict.fromkeys(EMBEDDINGS.split(), "embedding (by name)") | dict.fromkeys(HEADS.split(), "output head (by name)")
SHAPE = (4, 3)


def decisions(report):
    """name -> (rule, why)"""
    rows = [line.split(None, 3) for line in report.splitlines()[1:]]
    return {row[0]: (row[2], row[3] if len(row) > 3 else "") for row in rows}


def numpy_report(names, **settings):
    opt = rlx_optim.Muon(engine="reference", **settings)
    opt.step_all({k: np.ones(SHAPE, np.float32) for k in names}, {k: np.ones(SHAPE, np.float32) for k in names})
    return decisions(opt.routing_report())


def torch_report(names, **settings):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import Muon

    return decisions(Muon([(k, torch.nn.Parameter(torch.ones(SHAPE))) for k in names], **settings).routing_report())


def jax_report(names, **settings):
    jnp = pytest.importorskip("jax.numpy")
    from rlx_optim.optax import routing_report

    return decisions(routing_report("muon", {k: jnp.ones(SHAPE) for k in names}, **settings))


FRONTS = {"numpy": numpy_report, "torch": torch_report, "jax": jax_report}
every_front = pytest.mark.parametrize("front", FRONTS)


# ---- names ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", REASONS)
def test_what_a_name_says(name):
    assert reason_by_name(name) == REASONS[name]


@every_front
def test_names_mean_the_same_everywhere(front):
    """All names that differ once they are bare, in one model."""
    from rlx_optim.routing import bare

    names = {bare(name): name for name in REASONS}
    found = FRONTS[front](list(names.values()))
    assert len(names) >= 40
    assert found == {k: ("AdamW", REASONS[v]) if REASONS[v] else ("Muon", "") for k, v in names.items()}


def test_numpy_sends_embeddings_and_heads_to_otherwise_by_name():
    found = numpy_report(["wte.weight", "h.0.fc.weight", "lm_head.weight"])
    assert {k: rule for k, (rule, _) in found.items()} == {
        "wte.weight": "AdamW",
        "h.0.fc.weight": "Muon",
        "lm_head.weight": "AdamW",
    }
    alone = rlx_optim.Muon(otherwise=None, engine="reference")
    alone.step("wte.weight", np.ones(SHAPE, np.float32), np.ones(SHAPE, np.float32))
    assert decisions(alone.routing_report()) == {"wte.weight": ("Muon", "")}


def test_an_otherwise_of_otherwise_goes_by_name_too():
    opt = rlx_optim.Muon(otherwise=rlx_optim.MARS(otherwise=rlx_optim.AdamW()), engine="reference")
    one = {"wte": np.ones(SHAPE, np.float32), "w": np.ones(SHAPE, np.float32), "b": np.ones(3, np.float32)}
    opt.step_all(one, {k: np.ones_like(p) for k, p in one.items()})
    assert {k: rule for k, (rule, _) in decisions(opt.routing_report()).items()} == {"w": "Muon", "wte": "AdamW", "b": "AdamW"}


# ---- the user's word ------------------------------------------------------------------------------------------------------
def as_groups(route):
    return {"groups": [{"match": pattern, "use": use} for pattern, use in route.items()]}


@every_front
def test_a_mapping_routes_to_any_number_of_rules(front):
    route = {
        "wte*": rlx_optim.Lion(lr=1e-4),
        "lm_head.*": "own",
        "h.1.*": "otherwise",
        "h.2.*": rlx_optim.SGD(lr=0.1),
    }
    names = ["wte.weight", "lm_head.weight", "h.0.weight", "h.1.weight", "h.2.weight", "wpe.weight"]
    found = FRONTS[front](names, **(as_groups(route) if front == "numpy" else {"route": route}))
    assert found == {
        "wte.weight": ("Lion", "matches 'wte*'"),
        "lm_head.weight": ("Muon", ""),
        "h.0.weight": ("Muon", ""),
        "h.1.weight": ("AdamW", "matches 'h.1.*'"),
        "h.2.weight": ("SGD", "matches 'h.2.*'"),
        "wpe.weight": ("AdamW", "embedding (by name)"),
    }


@pytest.mark.parametrize("front", ["torch", "jax"])
def test_a_function_routes(front):
    words = {"wte.weight": True, "h.0.weight": False, "h.1.weight": np.bool_(False), "h.2.weight": "otherwise"}
    found = FRONTS[front]([*words, "h.3.weight"], route=lambda name, p: words.get(name))
    assert [rule for rule, _ in (found[k] for k in [*words, "h.3.weight"])] == ["Muon", "AdamW", "AdamW", "AdamW", "Muon"]
    assert found["h.0.weight"][1] == "route"


@pytest.mark.parametrize("front", ["torch", "jax"])
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"route": {"nothing*": "own"}}, ValueError, r"Muon: route pattern 'nothing\*' matches no parameter name"),
        ({"route": {"*": "elsewhere"}}, ValueError, 'route sends to "own", "otherwise" or an optimizer'),
        ({"route": {"*": 3}}, TypeError, "must be like rlx_optim.AdamW|got 3"),
        ({"route": "*"}, TypeError, "route must be a dict of patterns or a function"),
        ({"route": lambda name, p: "muon"}, ValueError, "route sends to"),
        ({"route": {"*": "otherwise"}, "otherwise": None}, ValueError, "'w' is to go to otherwise .*there is no otherwise"),
        ({"route": {"*": rlx_optim.Muon()}}, ValueError, "Muon otherwise=None|one rule"),
        ({"route": {"*": rlx_optim.AdamW(lr=lambda t: 0.1)}}, ValueError, "schedule"),
    ],
)  # fmt: skip
def test_refusals(front, settings, error, message):
    with pytest.raises(error, match=message):
        FRONTS[front](["w"], **settings)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"use": "adamw"}, '"use" must be "otherwise", "own" or an optimizer such as .*, got .adamw.'),
        ({"use": rlx_optim.Muon()}, "hands nothing on, with otherwise=None"),
        ({"use": rlx_optim.Lion(), "lr": 0.1}, "is an optimizer, which has its own 'lr'"),
    ],
)
def test_refusals_of_groups(group, message):
    with pytest.raises(ValueError, match=message):
        rlx_optim.Muon(groups=[{"match": "*", **group}])


def test_a_pattern_of_the_named_api_that_matches_nothing_is_warned_about():
    opt = rlx_optim.Muon(groups=[{"match": "wte*", "use": rlx_optim.Lion()}], engine="reference")
    with pytest.warns(UserWarning, match=r"group pattern 'wte\*' matched no parameter"):
        opt.step_all({"w": np.ones(SHAPE, np.float32)}, {"w": np.ones(SHAPE, np.float32)})


def test_a_rule_that_does_not_take_the_shape_hands_on_to_otherwise():
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import SOAP

    params = [("a.weight", torch.nn.Parameter(torch.ones(SHAPE))), ("a.bias", torch.nn.Parameter(torch.ones(3)))]
    route = {"a.*": rlx_optim.Muon(otherwise=None)}
    opt = SOAP(params, otherwise=rlx_optim.AdamW(), route=route)
    assert decisions(opt.routing_report()) == {
        "a.weight": ("Muon", "matches 'a.*'"),
        "a.bias": ("AdamW", "1 dimensions; Muon takes 2 or more"),
    }
    with pytest.raises(ValueError, match=r"SOAP: 'a.bias' has shape \(3,\): 1 dimensions; .*give otherwise="):
        SOAP(params, route=route)


# ---- each rule steps as it would alone ------------------------------------------------------------------------------------
NAMES = {"wte.weight": "lion", "wide.weight": "sgd", "h.0.weight": "muon", "h.0.bias": "adamw", "deep.weight": "lion"}
SETTINGS = {"lion": {"lr": 0.01}, "sgd": {"lr": 0.1, "momentum": 0.5}, "adamw": {"lr": 0.02}, "muon": {"lr": 0.03}}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((5,) if k.endswith("bias") else (5, 4)).astype(np.float32) for k in NAMES}


def alone(steps=3):
    """Every parameter stepped by an optimizer of its own."""
    params = arrays(0)
    lrs = {"deep.weight": 0.5}
    for name, rule in NAMES.items():
        settings = SETTINGS[rule] | ({"lr": lrs[name]} if name in lrs else {})
        opt = rlx_optim.create(rule, **settings, **({"otherwise": None} if rule == "muon" else {}), engine="reference")
        for i in range(steps):
            opt.step_all({name: params[name]}, {name: arrays(i + 1)[name]})
    return params


def routes():
    return {
        "wte*": rlx_optim.Lion(**SETTINGS["lion"]),
        "wide*": rlx_optim.SGD(**SETTINGS["sgd"]),
        "deep*": rlx_optim.Lion(lr=0.5),
    }


def named_muon():
    return rlx_optim.Muon(lr=0.03, otherwise=rlx_optim.AdamW(lr=0.02), **as_groups(routes()), engine="reference")


def torch_muon(**settings):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import Muon

    params = {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in arrays(0).items()}
    opt = Muon(list(params.items()), lr=0.03, otherwise=rlx_optim.AdamW(lr=0.02), **{"route": routes()} | settings)
    return opt, params


def torch_steps(opt, params, first, last):
    import torch

    for i in range(first, last):
        for k, g in arrays(i + 1).items():
            params[k].grad = torch.from_numpy(g)
        opt.step()


def close(got, want):
    return all(np.abs(np.asarray(got[k]) - want[k]).max() < 1e-5 for k in want)


def test_many_rules_step_in_the_named_api_and_come_back_from_a_file(tmp_path):
    want, params, opt = alone(), arrays(0), named_muon()
    opt.step_all(params, arrays(1))
    opt.save(tmp_path / "a")
    for twin in (rlx_optim.load(tmp_path / "a", engine="reference"), copy.deepcopy(opt)):
        mine = copy.deepcopy(params)
        for i in (2, 3):
            twin.step_all(mine, arrays(i))
        assert close(mine, want)
        assert twin.routing_report() == opt.routing_report()
        assert twin.iteration == 3
        late = np.ones(SHAPE, np.float32)  # a pattern is known still
        twin.step("wte2", late, np.ones_like(late))
        assert set(twin.state("wte2")) == {"m"}
        assert decisions(twin.routing_report())["wte2"] == ("Lion", "matches 'wte*'")
        assert [type(m).__name__ for m in twin._family()] == ["Muon", "AdamW", "Lion", "SGD", "Lion"]


def test_many_rules_step_in_torch():
    opt, params = torch_muon()
    torch_steps(opt, params, 0, 3)
    assert close({k: p.detach().numpy() for k, p in params.items()}, alone())
    assert sorted((g["rule"], g["lr"]) for g in opt.param_groups) == [
        ("adamw", 0.02), ("lion", 0.01), ("lion", 0.5), ("muon", 0.03), ("sgd", 0.1),
    ]  # fmt: skip


def test_many_rules_of_torch_go_through_state_dict_file_and_copy(tmp_path):
    opt, params = torch_muon()
    torch_steps(opt, params, 0, 1)
    opt.save(tmp_path / "a")
    kept, values = copy.deepcopy(opt.state_dict()), {k: p.detach().clone() for k, p in params.items()}
    for how in ("state_dict", "file"):
        twin, others = torch_muon()
        for k, p in others.items():
            p.data.copy_(values[k])
        twin.load_state_dict(kept) if how == "state_dict" else twin.load(tmp_path / "a")
        torch_steps(twin, others, 1, 3)
        assert close({k: p.detach().numpy() for k, p in others.items()}, alone()), how
        assert twin.routing_report() == opt.routing_report()
        import torch

        twin.add_param_group({"params": [("late.bias", torch.nn.Parameter(torch.ones(2)))]})
        assert (twin.param_groups[-1]["rule"], twin.param_groups[-1]["lr"]) == ("adamw", 0.02)
    named = rlx_optim.load(tmp_path / "a", engine="reference")  # and into the named API
    mine = {k: v.numpy().copy() for k, v in values.items()}
    for i in (2, 3):
        named.step_all(mine, arrays(i))
    assert close(mine, alone())
    named.save(tmp_path / "b")
    back, others = torch_muon()
    back.load(tmp_path / "b")
    assert {g["rule"] for g in back.param_groups} == {"adamw", "lion", "muon", "sgd"}


def test_a_function_of_torch_may_give_an_optimizer():
    by = {"wte.weight": rlx_optim.Lion(lr=0.01), "wide.weight": rlx_optim.SGD(lr=0.1, momentum=0.5)}
    opt, params = torch_muon(route=lambda name, p: rlx_optim.Lion(lr=0.5) if name == "deep.weight" else by.get(name))
    torch_steps(opt, params, 0, 3)
    assert close({k: p.detach().numpy() for k, p in params.items()}, alone())
    assert len(opt.param_groups) == 5


def test_what_a_group_says_holds_for_every_rule():
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import Muon

    params = [(k, torch.nn.Parameter(torch.ones(SHAPE))) for k in ("wte.a", "h.a", "lm_head.a")]
    opt = Muon([{"params": params, "weight_decay": 0.3}], route={"wte*": rlx_optim.Lion(lr=1e-4, weight_decay=1.0)})
    assert {(g["rule"], g["lr"], g["weight_decay"]) for g in opt.param_groups} == {
        ("muon", 0.02, 0.3), ("lion", 1e-4, 0.3), ("adamw", 3e-4, 0.3),
    }  # fmt: skip


def test_many_rules_step_in_optax_and_come_back_from_a_file(tmp_path):
    pytest.importorskip("optax")
    import optax

    from rlx_optim import optax as ours

    route = {"wte*": ours.lion(0.01, b1=0.9, b2=0.99, weight_decay=0.0), "wide*": rlx_optim.SGD(**SETTINGS["sgd"])}
    route |= {"deep*": rlx_optim.Lion(lr=0.5)}
    tx = ours.muon(0.03, otherwise=rlx_optim.AdamW(lr=0.02), route=route)
    params = arrays(0)
    state = tx.init(params)
    for i in range(3):
        if i == 1:
            ours.save_state(tmp_path / "a", tx, state, params)
            state = ours.load_state(tmp_path / "a", tx, params)
            named = rlx_optim.load(tmp_path / "a", engine="reference")
            assert named.step_count("deep.weight") == 1
        updates, state = tx.update(arrays(i + 1), state, params)
        params = optax.apply_updates(params, updates)
    assert close(params, alone())


def test_two_of_one_rule_keep_their_counters_apart_in_optax():
    """NAdamW's product of momenta depends on its betas."""
    pytest.importorskip("optax")
    import optax

    from rlx_optim import optax as ours

    def tx_of(betas):
        return rlx_optim.NAdamW(lr=0.1, betas=betas)

    tx = ours.muon(0.03, otherwise=tx_of((0.9, 0.99)), route={"wte*": tx_of((0.5, 0.99))})
    params = {"wte": np.ones(SHAPE, np.float32), "b": np.ones(3, np.float32)}
    grads = {"wte": np.full(SHAPE, 0.5, np.float32), "b": np.arange(3, dtype=np.float32)}
    want = copy.deepcopy(params)
    for name, betas in (("wte", (0.5, 0.99)), ("b", (0.9, 0.99))):
        opt = tx_of(betas)
        for _ in range(3):
            opt.step_all({name: want[name]}, {name: grads[name]})
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert close(params, want)


# ---- nothing but shapes -----------------------------------------------------------------------------------------------------
def told(make):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make()
    return [str(w.message) for w in found if w.filename == __file__]


def test_muon_warns_where_it_sees_shapes_alone():
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import MARS, SOAP, AdamW, Muon

    def matrices(n):
        return [torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(n)] + [torch.nn.Parameter(torch.ones(3))]

    said = told(lambda: Muon(matrices(3)))
    assert len(said) == 1
    assert "Muon: it has matrices without names" in said[0]
    assert "named_parameters()" in said[0]
    assert "route=" in said[0]
    assert len(told(lambda: Muon([{"params": matrices(1)}, {"params": matrices(1)}]))) == 1  # two groups, a matrix each
    assert len(told(lambda: SOAP(matrices(2), otherwise=rlx_optim.AdamW()))) == 1
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    for make in (
        lambda: Muon(matrices(1)),
        lambda: Muon(model),
        lambda: Muon(model.named_parameters()),
        lambda: Muon(matrices(3), route=lambda name, p: True),
        lambda: Muon(matrices(3)[:3], otherwise=None),
        lambda: MARS(matrices(3)),
        lambda: SOAP(matrices(3)),
        lambda: AdamW(matrices(3)),
    ):
        assert told(make) == []


# ---- modules ----------------------------------------------------------------------------------------------------------------
def test_patterns_see_through_parametrizations():
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import Muon

    model = torch.nn.ModuleDict({"hidden": torch.nn.Linear(4, 4), "last": torch.nn.Linear(4, 4)})
    torch.nn.utils.parametrizations.weight_norm(model["hidden"])
    found = decisions(Muon(torch.compile(model, backend="eager"), route={"hidden.weight": rlx_optim.Lion()}).routing_report())
    assert found["hidden.parametrizations.weight.original1"] == ("Lion", "matches 'hidden.weight'")


# ---- one rule, several norms ---------------------------------------------------------------------------------------------------
def test_scions_norms_by_name_in_torch_and_jax():
    """Embeddings and heads go to `otherwise`, here the same rule with another norm; all front ends end in the same place."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    import rlx_optim.optax
    import rlx_optim.torch

    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (12, 6), "h.weight": (6, 6), "h.bias": (6,), "lm_head.weight": (12, 6)}
    start, grads = ({k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()} for _ in range(2))
    own, sign = {"momentum": 0.1, "scale": 5.0}, {"momentum": 0.1, "norm": "sign", "scale": 300.0}
    want = {k: v.copy() for k, v in start.items()}
    rlx_optim.Scion(0.01, **own, otherwise=rlx_optim.Scion(0.01, **sign)).step_all(want, grads)
    params = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in start.items()}
    opt = rlx_optim.torch.Scion(params.items(), 0.01, **own, otherwise=rlx_optim.Scion(0.01, **sign))
    for k, p in params.items():
        p.grad = torch.from_numpy(grads[k])
    opt.step()
    tx = rlx_optim.optax.scion(0.01, **own, otherwise=rlx_optim.optax.scion(0.01, **sign))
    updates, _ = tx.update(grads, tx.init(start), jax.tree.map(jax.numpy.asarray, start))
    for k in start:
        assert np.allclose(params[k].detach().numpy(), want[k], rtol=0, atol=1e-6), k
        assert np.allclose(start[k] + updates[k], want[k], rtol=0, atol=1e-5), k
    for k in ("wte.weight", "lm_head.weight"):
        step = want[k] - (1 - 0.01) * start[k]
        assert np.allclose(np.abs(step), 0.01 * 300 / 6, rtol=1e-4)
