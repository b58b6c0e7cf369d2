"""Every golden trajectory, on both engines and both precisions, within 2e-4 of the distance travelled."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import distance

import rlx_optim
from rlx_optim.numpy.classes import make_class
from rlx_optim.rules.muon import Muon, nesterov

FOLDER = Path(__file__).parent / "golden"
PROBLEM = np.load(FOLDER / "problem.npz")
FILES = sorted(path.stem for path in FOLDER.glob("*__*.npz"))
ENGINES = [("reference", "float32"), ("cpu", "float32"), ("cpu", "float64")]


def probe(name, t, shape):
    return PROBLEM[f"kron_v/{name}"][t - 1].reshape(shape)


def adafactor(h, reference):
    if reference == "hf":
        return {"lr": h["lr"], "scale_parameter": h["scale_parameter"]}
    eps = h["eps"] if "eps" in h else (h["eps1"], h["eps2"])
    same = {k: h[k] for k in ("lr", "beta2_decay", "weight_decay")}
    return {**same, "eps": eps, "clip_threshold": h.get("d", h.get("clip_threshold")), "convention": reference}


def mars(h, reference):
    otherwise = rlx_optim.AdamW(lr=h["lr_1d"], betas=h["betas_1d"], weight_decay=h["weight_decay_1d"])
    return {k: h[k] for k in ("lr", "betas", "eps", "weight_decay", "gamma")} | {"otherwise": otherwise}


def muon(h, reference):
    if reference == "keller_f32":
        return {**h["muon"], "otherwise": rlx_optim.AdamW(**h["adam"])}
    return {k: h[k] for k in ("lr", "momentum", "weight_decay")} | {"convention": "moonlight"}


def normuon(h, reference):
    return {**h["muon"], "otherwise": rlx_optim.AdamW(**h["adam"])}


def scion(h, reference):
    assert all(group == {"norm": "Auto", "norm_kwargs": {}, "scale": 1.0} for group in h["groups"].values())
    return {k: h[k] for k in ("lr", "momentum", "unconstrained")}


def kron(h, reference):
    given = {"preconditioner_update_probability": h["preconditioner_update_probability"], "balance_probability": 0.0}
    return {"lr": h["lr"], "beta1": h["b1"], "weight_decay": h["weight_decay"], "probe": probe, **given}


#: optimizer -> how its hyperparameters are called in the files; the rest have the same names
TRANSLATE = {
    "adafactor": adafactor,
    "mars": mars,
    "muon": muon,
    "normuon": normuon,
    "scion": scion,
    "kron": kron,
    "nadamw": lambda h, reference: {**h, "convention": "dozat" if reference == "optax" else "torch"},
    "qhadamw": lambda h, reference: {k: v for k, v in h.items() if k != "decouple_weight_decay"},
    "soap": lambda h, reference: {**h, "shampoo_beta": None},
    "sophiah": lambda h, reference: (
        {k: h[k] for k in ("lr", "eps", "gamma", "clip", "weight_decay")} | {"betas": (h["b1"], h["b2"])}
    ),
}


# ---- modifiers ------------------------------------------------------------------------------------------------------------
QUINTIC = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
]  # fmt: skip


class MuonQuintic(Muon):
    """Levanter's Muon: other coefficients in each Newton–Schulz step, and eps 1e-8. Its scale does not matter on a ball."""

    def update(self, E, x):
        x = E.map(nesterov, x)
        U = x.u * 1.0
        tall = U.shape[1] > U.shape[2]
        X = U.mT if tall else U
        X = X / (E.norm(X) + 1e-8)
        for a, b, c in QUINTIC:
            A = X @ X.mT
            X = a * X + (b * A + c * A @ A) @ X
        return x.set(u=X.mT if tall else X)


def dion(h):
    return {k: h[k] for k in ("lr", "momentum", "weight_decay", "nesterov")} | {"convention": "moonlight"}


#: optimizer of a file -> ours, with which modifier, and how its hyperparameters are called
MODIFIED = {
    "cautious_adamw": ("adamw", {"cautious": True}, dict),
    "cautious_lion": ("lion", {"cautious": True}, dict),
    "cwd_adamw": ("adamw", {"decay": "cautious"}, dict),
    "cwd_lion": ("lion", {"decay": "cautious"}, dict),
    "cwd_muon": ("muon", {"decay": "cautious"}, dion),
    "hyperball_adamw": ("adamw", {"decay": "hyperball"}, dict),
    "hyperball_muon": (MuonQuintic, {"decay": "hyperball"}, lambda h: {k: h[k] for k in ("lr", "momentum", "nesterov")}),
}


def kind_and_settings(note):
    """The class of a file's optimizer and what it is made with."""
    if note["optimizer"] in MODIFIED:
        rule, modifier, read = MODIFIED[note["optimizer"]]
        kind = rule if isinstance(rule, type) else rlx_optim.registry.spec_class(rule)
        return kind, {**read(note["hyper"]), **modifier}
    translate = TRANSLATE.get(note["optimizer"], lambda h, reference: h)
    kind = rlx_optim.registry.spec_class(note["optimizer"].replace("sophiah", "sophia").replace("_", ""))
    return kind, translate(note["hyper"], note["reference"])


@pytest.mark.parametrize(("engine", "precision"), ENGINES, ids=lambda x: x)
@pytest.mark.parametrize("file", FILES)
def test_golden(file, engine, precision):
    golden = np.load(FOLDER / f"{file}.npz")
    note = json.loads(str(golden["json"]))
    kind, settings = kind_and_settings(note)
    opt = make_class(kind)(**settings, engine=engine, precision=precision)
    start = {k: PROBLEM[f"params0/{k}"] for k in note["tensors"]}
    params = {k: v.copy() for k, v in start.items()}
    for t in range(max(note["steps"])):
        if "k" in note["hyper"] and t % note["hyper"]["k"] == 0:
            for k in params:
                opt.update_hessian(k, np.array(PROBLEM[f"hess/{k}"][t]))
        opt.step_all(params, {k: np.array(PROBLEM[f"grads/{k}"][t]) for k in params})
        if t + 1 in note["steps"]:
            want = {k: golden[f"after/{k}"][note["steps"].index(t + 1)] for k in params}
            if file.startswith("soap") and t == 0:
                assert all((params[k] == start[k]).all() for k in params)  # the first call only initialises
            else:
                assert distance(params, want, start) < 2e-4, f"step {t + 1}"
            if f"eval/{next(iter(params))}" in golden:
                want = {k: golden[f"eval/{k}"][note["steps"].index(t + 1)] for k in params}
                assert distance({k: opt.averaged(k) for k in params}, want, start) < 2e-4, f"average at step {t + 1}"


def test_every_file_is_read():
    assert len(FILES) == 40


@pytest.mark.parametrize("tensor", ["w64x32", "w32x64", "w48x48"])
@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_newton_schulz(tensor, engine):
    """One orthogonalisation: Muon with momentum 0 and lr 1 moves p by scale times it."""
    golden, g = np.load(FOLDER / "newton_schulz.npz"), np.array(PROBLEM[f"grads/{tensor}"][0])
    p = np.zeros_like(g)
    rlx_optim.Muon(lr=1.0, momentum=0.0, nesterov=False, engine=engine).step(tensor, p, g)
    got = -p / np.sqrt(max(1.0, g.shape[0] / g.shape[1]))
    want, tolerance = (golden[f"ns5_f64/{tensor}"], 2e-6) if engine == "reference" else (golden[f"f32/{tensor}"], 2e-5)
    assert np.abs(got - want).max() < tolerance


def test_kron_schedule():
    """The probability of an update by step, from a file; the counter follows it."""
    golden = np.load(FOLDER / "kron_schedule.npz")
    chance = dict(zip(golden["n"].tolist(), golden["prob"].tolist(), strict=True))
    opt = rlx_optim.KronPSGD(lr=0.0, engine="reference")
    p, rng = np.ones(2, np.float32), np.random.default_rng(0)
    counter = 0
    for n in range(700):
        opt.step("p", p, rng.standard_normal(2).astype(np.float32))
        opt.end_iteration()
        want = chance.get(n, max(0.03, min(1.0, np.exp(-0.001 * (n - 500)))))
        counter = 0 if counter + 1 >= 1 / want else counter + 1
        assert opt.state("p")["counter"] == counter, n
