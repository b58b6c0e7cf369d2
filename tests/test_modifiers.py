"""What may be done to any rule's step: every cell of the table of rules and modifiers works or is refused, on every front end."""

import copy
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import NAMES, copies, distance, feed, make, problem
from test_golden import FOLDER, MODIFIED, PROBLEM, kind_and_settings

import rlx_optim
from lab.docsite import modifiers as docsite
from rlx_optim.program import trace
from rlx_optim.registry import spec_class
from rlx_optim.spec import MODIFIERS, Spec, real

WAYS = {"cautious": {"cautious": True}, "decay cautious": {"decay": "cautious"}, "hyperball": {"decay": "hyperball"}}
#: the cells that are refused, and what is said
REFUSED = {
    ("sgd", "decay cautious"): "SGD: decay='cautious' is not for this rule: it decays nothing beside the step",
    ("adam", "decay cautious"): "Adam: decay='cautious' is not for this rule: it decays nothing beside the step",
    ("radam", "decay cautious"): "RAdam: decay='cautious' is not for this rule: it decays nothing beside the step",
    ("lamb", "decay cautious"): "Lamb: decay='cautious' is not for this rule: it decays nothing beside the step",
    ("adopt", "decay cautious"): "ADOPT: decay='cautious' is not for this rule: it decays nothing beside the step",
    ("lars", "decay cautious"): "LARS: decay='cautious' is not for this rule: it decays nothing beside the step",
    ("lars", "hyperball"): "LARS: decay='hyperball' is not for this rule: the trust ratio",
    **{
        (kind.lower(), way): f"{kind}: {said}"
        for kind in ("ScheduleFreeAdamW", "ScheduleFreeSGD")
        for way, said in {
            "cautious": "cautious=True is not for this rule: x averages the steps",
            "decay cautious": "decay='cautious' is not for this rule: it has a commit of its own",
            "hyperball": "decay='hyperball' is not for this rule: it has a commit of its own",
        }.items()
    },
    ("lamb", "hyperball"): "Lamb: decay='hyperball' is not for this rule: the trust ratio",
    ("prodigy", "hyperball"): "Prodigy: decay='hyperball' is not for this rule: it measures how far to go",
    ("adafactor", "hyperball"): "Adafactor: decay='hyperball' is not for this rule: its step is clipped",
}
SHAPES = {"w": (12, 8), "b": (7,), "c": (4, 3, 2)}
LR, DECAY, STEPS = 0.05, 0.3, 3
LEFT = {"adan": 1 / (1 + LR * DECAY), "laprop": 1 - DECAY}
BY_COUNT = ("lion", "adafactor")  # scaled by n/(kept + 1); the others by one over the share kept


def start_and_gradients(steps=STEPS):
    params, gradients = problem(SHAPES, steps=steps)
    return {k: p * np.float32(0.1) for k, p in params.items()}, gradients


def settings(name, **more):
    takes = spec_class(name).fields
    alone = {"mars": {"otherwise": None}, "muon": {"convention": "rlx"}, "sgd": {"momentum": 0.9}, "prodigy": {"d0": 0.5}}.get(
        name, {}
    )
    return {"lr": LR, **({"weight_decay": 0.0} if "weight_decay" in takes else {}), **alone, **more}


def stepped(opt, params, grads, t):
    """How far a step goes, in float64."""
    now = copies(params)
    feed(opt, now, t)
    opt.step_all(now, grads)
    return {k: params[k].astype(np.float64) - now[k] for k in params}, now


def by_hand(name, way, p, g, step, shrunk):
    """p after a modified step, from how far the plain rule goes, and how far its decay."""
    p, g = p.astype(np.float64), g.astype(np.float64)
    if way == "cautious":
        kept = step * g > 0
        scale = p.size / (kept.sum() + 1) if name in BY_COUNT else 1 / max(kept.mean(), 1e-3)
        return p - np.where(kept, step * scale, 0.0)
    if way == "decay cautious":
        return p - np.where(step * p >= 0, shrunk, 0.0) - step
    radius = np.linalg.norm(p)
    q = p - LR * radius * step / max(np.linalg.norm(step), 1e-10)
    return q * radius / np.linalg.norm(q)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_table(name, way):
    """Against the plain rule's own steps, with the modifier worked out by hand."""
    if message := REFUSED.get((name, way)):
        with pytest.raises(ValueError) as refused:
            rlx_optim.create(name, **settings(name, **WAYS[way]))
        assert message in str(refused.value)
        return
    decay = {"weight_decay": DECAY} if way == "decay cautious" else {}
    opts = [rlx_optim.create(name, engine="reference", **settings(name, **more)) for more in ({**WAYS[way], **decay}, {}, decay)]
    params, gradients = start_and_gradients()
    changed = False
    for t, grads in enumerate(gradients):
        (_, got), (step, _), (both, _) = (stepped(opt, params, grads, t) for opt in opts)
        if way == "cautious" and name == "muon":
            assert all(np.isfinite(p).all() for p in got.values())  # masked before Newton–Schulz: test_muon_masks_before
            return
        if name == "soap" and way == "decay cautious":  # decays after the step, so the two steps differ by 1 − shrink
            left = 1 - LR * DECAY * (t > 0)
            both = {k: both[k] - (left - 1) * step[k] for k in both}
        if name in LEFT and way == "decay cautious":  # decays what the step leaves
            step = {k: LEFT[name] * step[k] for k in step}
        want = {k: by_hand(name, way, params[k], grads[k], step[k], both[k] - step[k]) for k in params}
        for k in params:
            if spec_class(name)(lr=LR).takes(SHAPES[k]) is not None:
                continue  # its otherwise's
            np.testing.assert_allclose(got[k], want[k], rtol=2e-5, atol=2e-7, err_msg=f"{k}, step {t + 1}")
            changed |= bool(np.abs(got[k] - (params[k] - step[k])).max() > 1e-5)
        params = got
    assert changed


def test_the_table_in_the_documentation_says_so():
    cells = dict(zip(WAYS, docsite.CELLS, strict=True))
    for name in NAMES:
        for way, modifier in cells.items():
            said = docsite.cell(name, modifier)
            assert said.startswith("refused: ") == ((name, way) in REFUSED), (name, way)
            if (name, way) in REFUSED:
                assert said.removeprefix("refused: ").startswith(REFUSED[name, way].partition("this rule: ")[2])
            elif way == "cautious":
                assert said == (
                    "in its own place" if name == "muon" else "n/(kept + 1)" if name in BY_COUNT else "1/max(share, 1e-3)"
                )
    assert sum(line.startswith("|") for line in docsite.by_rule().splitlines()) == len(NAMES) + 2


def test_some_decay_cautiously_where_they_decay_beside_the_step():
    opt = rlx_optim.RAdam(lr=0.1, weight_decay=0.5, decoupled_weight_decay=True, decay="cautious")
    p = np.array([1.0, -1.0], np.float32)
    opt.step("p", p, np.array([1.0, 1.0], np.float32))
    np.testing.assert_allclose(p, [1 - 0.05 - 0.1, -1 - 0.1], rtol=1e-6)
    opt = rlx_optim.ADOPT(lr=0.1, betas=(0.0, 0.9), weight_decay=0.5, decouple=True, decay="cautious")
    p = np.array([1.0, -1.0], np.float32)
    for _ in range(2):  # the first sets v alone
        opt.step_all({"p": p}, {"p": np.array([1.0, 1.0], np.float32)})
    np.testing.assert_allclose(p, [1 - 0.05 - 0.1, -1 - 0.1], rtol=1e-6)


def test_muon_masks_before_newton_schulz():
    """At the first step the momentum is the gradient, and nothing is masked; afterwards by m, as c_muon.py has it, and not by u."""
    params, (first, second) = problem({"w": (6, 5)}, steps=2)
    plain, careful = (rlx_optim.Muon(engine="reference", momentum=0.9, cautious=on) for on in (False, True))
    a, b = copies(params), copies(params)
    plain.step_all(a, first)
    careful.step_all(b, first)
    assert (a["w"] == b["w"]).all()
    m = 0.9 * 0.1 * first["w"].astype(np.float64) + 0.1 * second["w"]
    u = 0.9 * m + 0.1 * second["w"]
    kept = m * second["w"] > 0
    assert not kept.all()
    assert (kept != (u * second["w"] > 0)).any()
    once = rlx_optim.Muon(engine="reference", momentum=0.0, nesterov=False)  # orthogonalises what it is given
    once.step_all(a, {"w": np.asarray(u * kept / kept.mean(), np.float32)})
    careful.step_all(b, second)
    np.testing.assert_allclose(a["w"], b["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", ["adamw", "lion"])
def test_mars_masks_by_the_gradient_as_it_came(variant):
    """k = 1[m·g > 0] with the raw g, in float64 from the formulas; the clip is of the corrected gradient."""
    start, gradients = problem({"w": (16, 12)}, steps=8)
    opt = rlx_optim.MARS(lr=LR, variant=variant, gamma=2.0, cautious=True, engine="reference")
    got, p, m, v, prev, other = copies(start), start["w"].astype(float), 0.0, 0.0, 0.0, 0
    for t, g in enumerate(gradients, 1):
        opt.step_all(got, g)
        g = g["w"].astype(float)
        c = g + 2.0 * 0.95 / 0.05 * (g - prev)
        c /= max(1.0, np.linalg.norm(c))
        m, v, prev = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c**2, g
        u = np.sign(m) if variant == "lion" else m / (1 - 0.95**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        kept = m * g > 0
        other += (kept != (m * c > 0)).sum()
        p = p - LR * u * kept / max(kept.mean(), 1e-3)
    assert other
    np.testing.assert_allclose(got["w"], p, rtol=1e-5, atol=1e-6)


# ---- every engine and front end --------------------------------------------------------------------------------------------
GOLDEN = [path.stem for path in sorted(FOLDER.glob("*__*.npz")) if path.stem.partition("__")[0] in MODIFIED]


def golden(file):
    found = np.load(FOLDER / f"{file}.npz")
    note = json.loads(str(found["json"]))
    start = {k: PROBLEM[f"params0/{k}"] for k in note["tensors"]}
    want = {t: {k: found[f"after/{k}"][i] for k in start} for i, t in enumerate(note["steps"])}
    return *kind_and_settings(note), start, want, [{k: np.array(PROBLEM[f"grads/{k}"][t]) for k in start} for t in range(20)]


@pytest.mark.parametrize("engine", ["torch", "cpu"])
@pytest.mark.parametrize("file", GOLDEN)
def test_golden_in_torch(file, engine):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import made

    kind, given, start, want, gradients = golden(file)
    named = {k: torch.nn.Parameter(torch.tensor(p)) for k, p in start.items()}
    opt = made(kind)(list(named.items()), **given, **({"otherwise": None} if kind.otherwise_default else {}), engine=engine)
    for t, grads in enumerate(gradients, 1):
        for k, p in named.items():
            p.grad = torch.tensor(grads[k])
        opt.step()
        if t in want:
            assert distance({k: p.detach().numpy() for k, p in named.items()}, want[t], start) < 2e-4, t


@pytest.mark.parametrize("file", GOLDEN)
def test_golden_in_jax(file):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    from rlx_optim.optax.factories import make_factory

    kind, given, start, want, gradients = golden(file)
    given = {kind.optax.settings.get(k, k): v for k, v in given.items()}
    given |= {f"b{i}": b for i, b in enumerate(given.pop("betas", ()), 1)} | {"learning_rate": given.pop("lr")}
    given |= {"beta": given.pop("momentum"), "otherwise": None} if "momentum" in given else {}
    tx = make_factory(kind)(**given)
    params = jax.tree.map(jax.numpy.asarray, start)
    state, update = tx.init(params), jax.jit(tx.update)
    for t, grads in enumerate(gradients, 1):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if t in want:
            assert distance(jax.tree.map(np.asarray, params), want[t], start) < 2e-4, t


TOGETHER = [
    ("adamw", {"cautious": True, "decay": "hyperball"}),
    ("mars", {"cautious": True, "decay": "cautious", "weight_decay": 0.2, "otherwise": None}),
    pytest.param("soap", {"cautious": True, "decay": "hyperball"}, marks=pytest.mark.slow),  # 20 s, of JAX compiling
    ("muon", {"cautious": True, "decay": "hyperball", "convention": "rlx"}),
    ("adafactor", {"cautious": True, "decay": "cautious", "weight_decay": 0.2}),
]


@pytest.mark.parametrize(("name", "given"), TOGETHER, ids=lambda x: x if isinstance(x, str) else "+".join(map(str, x.values())))
def test_engines_agree(name, given):
    """cpu, torch and JAX beside the reference; two modifiers at once."""
    torch, jax, optax = (pytest.importorskip(each) for each in ("torch", "jax", "optax"))
    from rlx_optim.optax import create as in_jax
    from rlx_optim.torch import create as in_torch

    start, gradients = start_and_gradients()
    want = copies(start)
    reference, cpu = (make(name, engine=engine, **given) for engine in ("reference", "cpu"))
    other = copies(start)
    named = {k: torch.nn.Parameter(torch.tensor(p)) for k, p in start.items()}
    defaults = {k: f.default for k, f in spec_class(name).fields.items()}
    theirs = in_torch(name, list(named.items()), engine="torch", **{**defaults, **given})
    without = [f.field for f in spec_class(name).optax.settings.values()] + [*spec_class(name).optax.spread, "lr", "probe"]
    keywords = {k: v for k, v in {**defaults, **given}.items() if k not in without and k != "seed"}
    tx = in_jax(name, defaults["lr"], **keywords)
    params = jax.tree.map(jax.numpy.asarray, start)
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in gradients:
        reference.step_all(want, grads)
        cpu.step_all(other, grads)
        for k, p in named.items():
            p.grad = torch.tensor(grads[k])
        theirs.step()
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    bar = 1e-3 if spec_class(name).matrix else 2e-5
    assert distance(other, want, start) < bar
    assert distance({k: p.detach().numpy() for k, p in named.items()}, want, start) < bar
    assert distance(jax.tree.map(np.asarray, params), want, start) < bar


def test_cautious_decay_costs_nothing():
    """One pass, which reads and writes what it did."""
    for kind in map(spec_class, ("adamw", "lion", "nadamw", "sophia")):
        plain, careful = (trace(kind(decay=way), kind().slots((4, 3))) for way in ("decoupled", "cautious"))
        assert careful.traffic() == plain.traffic()
        assert len(careful.passes) == len(plain.passes) == 1
        assert not careful.has_reduction


def test_a_mask_costs_what_the_page_says():
    """Bytes of traffic a parameter beside the plain rule's: u written and read, g read again; p or m where u is made of it."""
    more = {}
    for kind in map(spec_class, NAMES):
        if not kind.matrix and "cautious=True" not in kind.incompatible:
            plain, careful = (trace(s, s.slots((64, 64))) for s in (kind(lr=LR), kind(lr=LR, cautious=True)))
            more.setdefault(4 * (careful.traffic() - plain.traffic()), []).append(kind.title)
    assert sorted(more) == [12, 16, 20]
    text = " ".join((Path(__file__).parent.parent / "docs" / "modifiers.md").read_text().split())
    assert "12 bytes of traffic a parameter more than the plain rule" in text
    for bytes_more in (16, 20):
        (named,) = re.findall(rf"\b{bytes_more} for ([\w, ]+?)(?:\.|, \d)", text)
        assert sorted(re.findall(r"[A-Z]\w+", named)) == sorted(more[bytes_more])


def test_a_mask_that_nothing_passes_keeps_still_and_spreads_nan():
    for name, given in (("adamw", {"weight_decay": 0.0}), ("lion", {})):
        opt = rlx_optim.create(name, lr=0.1, cautious=True, **given)
        p = np.ones(4, np.float32)
        opt.step("p", p, np.zeros(4, np.float32))
        assert (p == 1).all()  # no gradient, no step
        opt.end_iteration()
        opt.step("p", p, np.array([np.nan, 1, 1, 1], np.float32))
        assert np.isnan(p[0])
        assert np.isfinite(p[1:]).all()


# ---- the norm --------------------------------------------------------------------------------------------------------------
def test_the_norm_is_kept():
    start, gradients = start_and_gradients(20)
    params, opt = copies(start), rlx_optim.AdamW(lr=0.02, decay="hyperball")
    for grads in gradients:
        opt.step_all(params, grads)
    for k in params:
        np.testing.assert_allclose(np.linalg.norm(params[k]), np.linalg.norm(start[k]), rtol=2e-6)
        assert np.abs(params[k] - start[k]).max() > 0.01


def test_the_norm_is_that_of_each_slice():
    """Split matrices in torch and stacked leaves in JAX keep the norms of their slices."""
    torch, jax, optax = (pytest.importorskip(each) for each in ("torch", "jax", "optax"))
    from rlx_optim.optax import adamw, muon
    from rlx_optim.torch import Muon

    rng = np.random.default_rng(0)
    start, grad = (rng.standard_normal((3, 6, 5)).astype(np.float32) for _ in range(2))
    start *= np.array([1, 10, 100], np.float32)[:, None, None]
    norms = np.linalg.norm(start.reshape(3, -1), axis=1)
    p = torch.nn.Parameter(torch.tensor(start))
    opt = Muon([("w", p)], split={"w": 3}, otherwise=None, decay="hyperball")
    p.grad = torch.tensor(grad)
    opt.step()
    found = [p.detach().numpy()]
    for make_tx in (lambda: muon(0.02, stacked={"w": 1}, decay="hyperball"), lambda: adamw(0.02, decay="hyperball")):
        params, tx = {"w": jax.numpy.asarray(start)}, make_tx()
        updates, _ = tx.update({"w": grad}, tx.init(params), params)
        found.append(np.asarray(optax.apply_updates(params, updates)["w"]))
    for each in found[:2]:
        np.testing.assert_allclose(np.linalg.norm(each.reshape(3, -1), axis=1), norms, rtol=1e-5)
        assert np.abs(each - start).max() > 0.01
    np.testing.assert_allclose(np.linalg.norm(found[2]), np.linalg.norm(start), rtol=1e-6)  # not stacked: one tensor


def test_zeros_are_refused():
    params = {"w": np.ones((3, 2), np.float32), "b": np.zeros(3, np.float32)}
    grads = {k: np.ones_like(p) for k, p in params.items()}
    opt = rlx_optim.AdamW(decay="hyperball")
    fix = r"AdamW: 'b' is all zeros.*groups=\[\{'match': 'b', 'decay': 'decoupled'\}\]"
    with pytest.raises(ValueError, match=fix):
        opt.step_all(params, grads)
    assert (params["w"] == 1).all()
    with pytest.raises(KeyError, match="no state"):
        opt.state("w")
    opt = rlx_optim.AdamW(decay="hyperball", groups=[{"match": "b", "decay": "decoupled"}])
    opt.step_all(params, grads)
    assert (params["b"] < 0).all()
    np.testing.assert_allclose(np.linalg.norm(params["w"]), np.sqrt(6), rtol=1e-6)


def test_zeros_are_refused_in_torch_and_jax():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    from rlx_optim.optax import adamw
    from rlx_optim.torch import AdamW

    for engine in ("cpu", "torch"):
        w, b = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.zeros(3))
        w.grad, b.grad = torch.ones(3, 2), torch.ones(3)
        opt = AdamW([("w", w), ("b", b)], decay="hyperball", engine=engine)
        with pytest.raises(ValueError, match=r"AdamW: 'b' is all zeros.*a group of its own"):
            opt.step()
        assert bool((w == 1).all())
        opt = AdamW([{"params": [("w", w)]}, {"params": [("b", b)], "decay": "decoupled"}], decay="hyperball", engine=engine)
        opt.step()
        assert bool((b < 0).all())
    params = {"w": jax.numpy.ones((3, 2)), "b": jax.numpy.zeros(3)}
    with pytest.raises(ValueError, match=r"AdamW: 'b' is all zeros.*mask"):
        adamw(0.1, decay="hyperball").init(params)
    tx = adamw(0.1, decay="hyperball", mask={"w": True, "b": False})
    updates, _ = tx.update(params | {"b": jax.numpy.ones(3)}, tx.init(params), params)
    assert bool((updates["b"] < 0).all())


# ---- settings ----------------------------------------------------------------------------------------------------------------
def test_modifiers_are_settings_like_any_other():
    """In groups, as schedules, as attributes, and refused by name."""
    opt = rlx_optim.AdamW(groups=[{"match": "a", "cautious": True}], decay=lambda it: "decoupled" if it < 1 else "cautious")
    rng = np.random.default_rng(0)
    start = {k: rng.standard_normal(50).astype(np.float32) for k in "ab"}
    params = copies(start)
    for _ in range(2):
        opt.step_all(params, {k: rng.standard_normal(50).astype(np.float32) for k in "ab"})
    assert opt.hyperparameters("a")["cautious"] is True
    assert opt.hyperparameters("b")["decay"] == "cautious"
    opt.decay = "hyperball"
    norms = {k: np.linalg.norm(p) for k, p in params.items()}
    opt.step_all(params, {k: rng.standard_normal(50).astype(np.float32) for k in "ab"})
    assert all(np.isclose(np.linalg.norm(p), norms[k], rtol=1e-6) for k, p in params.items())
    with pytest.raises(ValueError, match="AdamW: decay must be one of 'decoupled', 'cautious', 'hyperball', got 'soft'"):
        opt.decay = "soft"
    with pytest.raises(TypeError, match="AdamW: cautious must be True or False, got 1"):
        rlx_optim.AdamW(cautious=1)
    with pytest.raises(TypeError, match="at most 5 positional"):
        rlx_optim.AdamW(1e-3, (0.9, 0.99), 1e-8, 0.0, False, True)


def test_checkpoints(tmp_path):
    """They travel with a checkpoint; one that is older than they are has none."""
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import AdamW

    opt = rlx_optim.AdamW(cautious=True, decay="cautious", skip_above=5.0)
    opt.step_all({"w": np.ones(3, np.float32)}, {"w": np.ones(3, np.float32)})
    opt.save(tmp_path / "new.safetensors")
    back = rlx_optim.load(tmp_path / "new.safetensors")
    assert (back.hyperparameters()["decay"], back.skip_above, opt.convert_to("lion").skip_above) == ("cautious", 5.0, 5.0)
    p = torch.nn.Parameter(torch.ones(3))
    theirs = AdamW([("w", p)])
    theirs.load(tmp_path / "new.safetensors")
    assert (theirs.param_groups[0]["cautious"], theirs.skip_above) == (True, 5.0)
    saved = AdamW([("w", p)], cautious=True).state_dict()
    for group in saved["param_groups"]:
        del group["cautious"], group["decay"]
    fresh = AdamW([("w", p)])
    fresh.load_state_dict(saved)
    assert (fresh.param_groups[0]["cautious"], fresh.param_groups[0]["decay"]) == (False, "decoupled")


def direction(g):
    u = g * 1.0
    return u


class Plain(Spec):
    lr: float = real(0.1)

    def slots(self, shape):
        return {}

    def scalars(self, t, counters):
        return {"step": self.lr}

    def update(self, E, x):
        return E.map(direction, x)


def half(u, step):
    change = step * u * 0.5
    return change


class Committed(Plain):
    def commit(self, E, x):
        return E.map(half, x)


def test_rules_of_others():
    """They have modifiers too; what is unsound for them is refused by name."""
    for given, wanted in (({"cautious": True}, -0.1 * 2 * 0.5), ({}, -0.1)):
        p, opt = np.zeros(2, np.float32), rlx_optim.numpy.classes.make_class(Plain)(**given)
        opt.step("p", p, np.array([1.0, -1.0], np.float32))
        np.testing.assert_allclose(p, [wanted, -wanted] if not given else [-0.1, 0.1], rtol=1e-6)
    with pytest.raises(ValueError, match="Plain: decay='cautious' is not for this rule: it decays nothing"):
        Plain(decay="cautious")
    for way in ("cautious", "hyperball"):
        with pytest.raises(ValueError, match=f"Committed: decay='{way}' is not for this rule: it has a commit of its own"):
            Committed(decay=way)
    assert Committed(cautious=True).cautious
    with pytest.raises(TypeError, match="Twice: every rule has decay already"):
        type("Twice", (Plain,), {"decay": real(0.1)})
    assert list(Plain.fields) == ["lr", *MODIFIERS]


# ---- what a step did -----------------------------------------------------------------------------------------------------------
STATS = ("adamw", "lamb", "adafactor", "lion", "muon", "soap")


def expected(p, g, now):
    p, g, change = (np.asarray(a, np.float64) for a in (p, g, p.astype(np.float64) - now))
    norms = {"grad_norm": np.linalg.norm(g), "param_norm": np.linalg.norm(p), "update_norm": np.linalg.norm(change)}
    return norms | {"update_rms": np.sqrt((change**2).mean())}


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("name", STATS)
def test_stats(name, engine):
    """As NumPy would measure it; asked or not, a step is the same; what is not asked is not measured."""
    start, gradients = start_and_gradients(4)
    opt, other = (rlx_optim.create(name, **settings(name), engine=engine) for _ in range(2))
    with pytest.raises(RuntimeError, match=f"{opt._owner}: no step was asked about"):
        opt.stats()
    params = copies(start)
    for t, grads in enumerate(gradients):
        before = copies(params)
        if t % 2:
            opt.stats(next=True)
        opt.step_all(params, grads)
        if t % 2:
            found = opt.stats()
            want = {k: expected(before[k], grads[k], params[k]) for k in params}
            for k in params:
                for kind, value in want[k].items():
                    np.testing.assert_allclose(found.each[k][kind], value, rtol=2e-4, err_msg=f"{k} {kind}")
            whole = np.sqrt(sum(each["grad_norm"] ** 2 for each in want.values()))
            np.testing.assert_allclose(found.all["grad_norm"], whole, rtol=1e-5)
            assert ("orthogonality" in found.each["w"]) == spec_class(name).matrix
    again = copies(start)
    for grads in gradients:
        other.step_all(again, grads)
    assert all((params[k] == again[k]).all() for k in params)


def test_stats_of_masks_and_muon():
    start, gradients = start_and_gradients(2)
    opt = rlx_optim.Lion(lr=0.01, cautious=True)
    opt.step_all(start, gradients[0])
    opt.stats(next=True)
    before = copies(start)
    opt.step_all(start, gradients[1])
    found = opt.stats()
    for k, p in start.items():
        np.testing.assert_allclose(found.each[k]["masked"], (before[k] == p).mean(), rtol=1e-6)
    still = sum((before[k] == p).sum() for k, p in start.items()) / sum(p.size for p in start.values())
    np.testing.assert_allclose(found.all["masked"], still, rtol=1e-6)
    w, g = {"w": np.ones((6, 9), np.float32)}, {"w": np.random.default_rng(0).standard_normal((6, 9)).astype(np.float32)}
    coarse, fine = (rlx_optim.Muon(ns_steps=n, ns_coefficients=(2.0, -1.5, 0.5)) for n in (2, 20))
    for opt in (coarse, fine):
        opt.stats(next=True)
        opt.step_all(w, g)
    assert fine.stats().all["orthogonality"] < 1e-4 < 0.1 < coarse.stats().all["orthogonality"]


def test_stats_take_no_pass_of_their_own():
    for kind in map(spec_class, ("adamw", "lamb", "mars", "sophia", "adafactor")):
        plain, reporting = (trace(kind(), kind().slots((4, 3)), what) for what in ("step", "stats"))
        assert reporting.traffic() == plain.traffic(), kind
        assert len(reporting.passes) == len(plain.passes)
    with pytest.raises(ValueError, match="unknown program 'told'"):
        trace(kind(), kind().slots((4, 3)), "told")


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_stats_in_torch(engine):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch as front

    start, gradients = start_and_gradients(3)
    for named, make_opt in (
        (True, lambda ps: front.AdamW(list(ps.items()), lr=LR, engine=engine)),
        (True, lambda ps: front.Muon(list(ps.items()), lr=LR, split={"w": 3}, engine=engine)),
        (False, lambda ps: front.Lion([{"params": [p]} for p in ps.values()], lr=LR, cautious=True, engine=engine)),
    ):
        params = {k: torch.nn.Parameter(torch.tensor(p)) for k, p in start.items()}
        opt = make_opt(params)
        with pytest.raises(RuntimeError, match="no step was asked about"):
            opt.stats()
        seen = []
        for t, grads in enumerate(gradients):
            seen.append({k: p.detach().numpy().copy() for k, p in params.items()})
            for k, p in params.items():
                p.grad = torch.tensor(grads[k])
            if t == 1:
                opt.stats(next=True)
            opt.step()
        found = opt.stats()  # of the second: the third was not asked about
        for i, k in enumerate(params):
            for kind, value in expected(seen[1][k], gradients[1][k], seen[2][k]).items():
                got = found.each[k if named else f"{i}.0"][kind]
                assert isinstance(got, torch.Tensor)
                np.testing.assert_allclose(float(got), value, rtol=2e-4, err_msg=f"{k} {kind}")
        assert ("masked" in found.all) == isinstance(opt, front.Lion)
        assert ("orthogonality" in found.all) == isinstance(opt, front.Muon)


# ---- steps left out --------------------------------------------------------------------------------------------------------------
def judge(values, sigmas):
    """Which values are left out, by hand."""
    seen, out = [], []
    for value in values:
        past = np.array(seen[-128:])
        far = len(past) >= 63 and value - past.mean() > sigmas * max(past.std(ddof=1), 1e-6 * abs(past.mean()))
        out.append(bool(not np.isfinite(value) or far))
        seen += [value] if np.isfinite(value) else []
    return out


def curve(n, seed=0, spikes=()):
    rng = np.random.default_rng(seed)
    values = 1 + 0.1 * rng.standard_normal(n)
    for i, factor in dict(spikes).items():
        values[i] = values[i] * factor
    return values


SPIKES = {20: 50.0, 100: 30.0, 101: np.nan, 150: 1.5, 260: 5.0, 299: np.inf}


@pytest.mark.parametrize("sigmas", [6.0, 2.0])
def test_skip_above(sigmas):
    """Who is left out is who should be, by the norm and by the loss; nothing moves, and it is counted."""
    norms, losses = curve(300, spikes=SPIKES), curve(300, 1, {200: 9.0})
    want = [a or b for a, b in zip(judge(norms, sigmas), judge(losses, sigmas), strict=True)]
    assert 4 <= sum(want) < 40
    assert not want[20]  # too early to tell
    assert want[200]
    opt, plain = rlx_optim.Lion(lr=0.01, skip_above=sigmas), rlx_optim.Lion(lr=0.01)
    p, same = (
        {"a": np.ones(3, np.float32), "b": np.ones(1, np.float32)},
        {"a": np.ones(3, np.float32), "b": np.ones(1, np.float32)},
    )
    for norm, loss, out in zip(norms, losses, want, strict=True):
        grads = {"a": np.full(3, norm / 2, np.float32), "b": np.full(1, norm / 2, np.float32)}
        before = copies(p)
        opt.step_all(p, grads, loss=loss)
        assert all((p[k] == before[k]).all() for k in p) == out
        if not out:
            plain.step_all(same, grads)
    assert opt.skipped == sum(want)
    assert opt.iteration == 300
    assert opt.step_count("a") == 300 - sum(want)
    assert all((p[k] == same[k]).all() for k in p)


def test_skip_above_in_torch_and_jax():
    torch, jax, optax = (pytest.importorskip(each) for each in ("torch", "jax", "optax"))
    from rlx_optim.optax import lion, skip_above
    from rlx_optim.torch import Lion

    norms, losses = curve(220, spikes={k: v for k, v in SPIKES.items() if k < 220}), curve(220, 1, {200: 9.0})
    want = [a or b for a, b in zip(judge(norms, 6.0), judge(losses, 6.0), strict=True)]
    p = torch.nn.Parameter(torch.ones(4))
    opt = Lion([p], lr=0.01, skip_above=6.0)
    tx = skip_above(lion(0.01, weight_decay=0.0), 6.0)
    x = jax.numpy.ones(4)
    state, update = tx.init(x), jax.jit(tx.update)
    for norm, loss, out in zip(norms, losses, want, strict=True):
        p.grad = torch.full((4,), float(norm / 2))
        before = p.detach().clone()
        assert opt.step(loss=torch.tensor(loss)) is None
        assert torch.equal(before, p.detach()) == out
        was, inner = x, state.inner
        updates, state = update(jax.numpy.full(4, norm / 2), state, x, loss=loss)
        x = optax.apply_updates(x, updates)
        assert bool((was == x).all()) == out
        assert all(bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (inner, state.inner)), strict=True)) == out
    assert opt.skipped == int(state.skipped) == sum(want)
    assert float(opt.state[p]["step"]) == 220 - sum(want)
    np.testing.assert_allclose(np.asarray(x), p.detach().numpy(), rtol=1e-6)
    assert opt.step(lambda: torch.tensor(1.0)) == 1.0


def test_a_resumed_run_leaves_out_the_same_steps(tmp_path):
    """The windows go on in files, state dicts, pickles and copies, from one front end to the other."""
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import Lion

    norms, losses = curve(220, spikes={k: v for k, v in SPIKES.items() if k < 220}), curve(220, 1, {200: 9.0})
    want = [a or b for a, b in zip(judge(norms, 6.0), judge(losses, 6.0), strict=True)]
    p = torch.nn.Parameter(torch.ones(4))
    opt, ours = Lion([("p", p)], lr=0.01, skip_above=6.0), rlx_optim.Lion(lr=0.01, skip_above=6.0)
    q = {"p": np.ones(4, np.float32)}
    for t, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
        p.grad = torch.full((4,), float(norm / 2))
        opt.step(loss=loss)
        ours.step_all(q, {"p": p.grad.numpy()}, loss=loss)
        if t % 30 == 20:  # half of a window, a whole one, one that has gone round
            saved, fresh = opt.state_dict(), Lion([("p", p)], lr=0.01, skip_above=6.0)
            if t % 60 == 20:
                fresh.load_state_dict(saved)
                fresh.skipped = opt.skipped
                opt, ours = fresh, pickle.loads(pickle.dumps(ours))
            else:
                opt, ours = copy.deepcopy(opt), rlx_optim.load(ours.save(tmp_path / "ours.safetensors"))
                (p,) = opt.param_groups[0]["params"]
        if t == 100:
            opt.load(ours.save(tmp_path / "theirs.safetensors"))
    assert opt.skipped == ours.skipped == sum(want)
    damaged = {"norm": [3, 1.0]}
    with pytest.raises(ValueError, match="Lion: 'skip_window' of the state dict: 'norm' must be a count and as many finite"):
        opt.load_state_dict({**opt.state_dict(), "skip_window": damaged})
    assert opt.state_dict()["skip_window"]["norm"][0] == np.isfinite(norms).sum()


def test_skip_above_refusals():
    for value in (0.0, -1.0, float("nan"), float("inf"), "6", True):
        with pytest.raises((TypeError, ValueError), match="AdamW: skip_above must be a finite number > 0 or None, got"):
            rlx_optim.AdamW(skip_above=value)
    opt = rlx_optim.AdamW(skip_above=6.0)
    with pytest.raises(RuntimeError, match="AdamW: skip_above is about the gradients of all tensors; give them to step_all"):
        opt.step("p", np.ones(2, np.float32), np.ones(2, np.float32))
    opt.skip_above = None
    opt.step("p", np.ones(2, np.float32), np.ones(2, np.float32))
    with pytest.raises(ValueError, match="skip_above must be"):
        opt.skip_above = -1.0
    torch = pytest.importorskip("torch")
    from rlx_optim.torch import AdamW

    p = torch.nn.Parameter(torch.ones(2))
    theirs = AdamW([p], skip_above=6.0)
    theirs.attach([p])
    with pytest.raises(RuntimeError, match="skip_above is about the gradients of all parameters at once"):
        (p * p).sum().backward()


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_stats_of_two_steps_in_a_row_are_of_each(engine):
    """The second runs by what the first has prepared, and says what it did itself."""
    torch = pytest.importorskip("torch")
    import rlx_optim.torch as front

    p = torch.nn.Parameter(torch.ones(6, 4))
    opt = front.AdamW([("w", p)], engine=engine)
    for size in (1.0, 3.0, 0.5):
        p.grad = torch.full_like(p, size)
        opt.stats(next=True)
        opt.step()
        assert float(opt.stats().all["grad_norm"]) == pytest.approx(size * 24**0.5, rel=1e-6)
