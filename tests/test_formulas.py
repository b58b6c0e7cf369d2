"""The formulas in the rules' docstrings: the language they are written in, and that they compute what the rules compute."""

import math
import re
import sys
import warnings

import numpy as np
import pytest
from helpers import formula_lines

import rlx_optim
from lab.docsite import formulas
from rlx_optim.engines import get_engine
from rlx_optim.linalg import spectral_bound
from rlx_optim.program import trace
from rlx_optim.registry import spec_class


# ---- the formula language -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p ← p − lr·m̂/(√v̂ + eps)", r"p \gets p - \frac{\eta\,\hat{m}}{\sqrt{\hat{v}} + \varepsilon}"),
        ("a·b/c·d", r"\frac{a\,b}{c}\,d"),
        ("(a + b)·(c − d)/2", r"\frac{(a + b)\,(c - d)}{2}"),
        ("b1^(t + 1)", r"\beta_1^{t + 1}"),
        ("√(a/b)", r"\sqrt{\frac{a}{b}}"),
        ("2·0.5", r"2 \cdot 0.5"),
        ("q1⁻ᵀ·V·q2⁻¹", r"q_{1}^{-\top}\,V\,q_{2}^{-1}"),
        ("max(|a|, ‖u‖)", r"\max(\left\vert a \right\vert, \left\Vert u \right\Vert)"),
        ("μ_{t+1} = 1e-12", r"\mu_{t+1} = 10^{-12}"),
        ("eps[0]·ĥ", r"\varepsilon_0\,\hat{h}"),
        ("trust_clip", r"\mathrm{trust\_clip}"),
    ],
)
def test_formula(text, expected):
    assert formulas.latex(text, {"trust_clip"}) == [expected]


@pytest.mark.parametrize("text", ["weihgt_decay·p", "p ← p −", "(a + b", "a b", "max(a", "‖u", "a)", "eta[0]", "trust_clip"])
def test_what_is_no_formula_is_refused(text):
    with pytest.raises(formulas.FormulaError, match=re.escape(repr(text))):
        formulas.latex(text)


# ---- what a rule costs -----------------------------------------------------------------------------------------------------
#: what stands in parentheses behind a number is of these settings
OTHERWISE = {
    "adam": {"amsgrad": True}, "adamw": {"amsgrad": True}, "adafactor": {"beta1": 0.9}, "mars": {"variant": "lion"},
    "sgd": {"lr": 0.1}, "lars": {"trust_coefficient": None},
}  # fmt: skip
MAIN = {"sgd": {"lr": 0.1, "momentum": 0.9}, "scion": {"momentum": 0.1}}
SIDES = (256, 512)


def costs(kind, settings):
    """Bytes of state and of traffic a parameter, of a large matrix."""
    spec = kind(**settings)
    slots = spec.slots(SIDES)
    size = math.prod(SIDES)
    return sum(4 * math.prod(slot.shape) for slot in slots.values()) / size, spec.matrix or 4 * trace(spec, slots).traffic()


@pytest.mark.parametrize("name", rlx_optim.list_optimizers())
def test_costs_are_those_of_the_docstring(name):
    kind = spec_class(name)
    text = " ".join(sys.modules[kind.__module__].__doc__.split()).partition("When, and what it costs.")[2]
    state, traffic = costs(kind, MAIN.get(name, {}))
    rows, columns = SIDES
    beside = {"soap": 8, "kronpsgd": 4}.get(name, 0) * (rows**2 + columns**2) / (rows * columns)
    beside += {"normuon": 4 / columns}.get(name, 0)
    said = re.search(r"(\d+) bytes (of state )?a parameter|(\d+) bytes of state", text)
    assert int(said[1] or said[3]) == pytest.approx(state - beside, abs=0.03)
    moved = re.search(r"(\d+) (?:bytes )?of traffic(?: a parameter)?(?: \((\d+))?", text)
    assert (moved is None) == kind.matrix
    if moved:
        assert int(moved[1]) == traffic
    if name in OTHERWISE:
        state, traffic = costs(kind, OTHERWISE[name])
        assert int(moved[2]) == traffic
        kept = re.search(r"of state a parameter[^.;(]*\((\d+)", text)
        assert kept is None or int(kept[1]) == pytest.approx(state, abs=0.03)


# ---- the formulas compute what the rules compute --------------------------------------------------------------------------------
class Matrix(np.ndarray):
    """Its product with another matrix is a matrix product."""

    def __new__(cls, array):
        return np.asarray(array, np.float64).view(cls)

    def __mul__(self, other):
        return self @ other if self.ndim == np.ndim(other) == 2 else super().__mul__(other)

    def __rmul__(self, other):
        return other @ self if self.ndim == np.ndim(other) == 2 else super().__rmul__(other)

    @property
    def I(self):  # noqa: E743
        return np.linalg.inv(self)


class Compute:
    """Writes Python. Names are looked up in E, functions in F."""

    relation = staticmethod(lambda left, sign, right: f"{left} = {right}")
    sum = staticmethod(lambda left, sign, right: f"({left} {sign} {right})")
    product = staticmethod(lambda left, right: f"({left} * {right})")
    fraction = staticmethod(lambda left, right: f"({left} / {right})")
    negative = staticmethod(lambda inside: f"(-{inside})")
    power = staticmethod(lambda base, exponent: f"({base} ** {exponent})")
    root = staticmethod(lambda inside: f"np.sqrt({inside})")
    norm = staticmethod(lambda inside: f"np.sqrt(np.square({inside}).sum())")
    absolute = staticmethod(lambda inside: f"abs({inside})")
    group = staticmethod(lambda inside: f"({inside})")
    call = staticmethod(lambda function, arguments: f"F[{function!r}]({', '.join(arguments)})")
    number = staticmethod(lambda token: token)
    name = staticmethod(lambda token: f"E[{token!r}]")
    mark = staticmethod(lambda base, sign: {"²": "F['square']({})", "ᵀ": "{}.T", "⁻¹": "{}.I", "⁻ᵀ": "{}.I.T"}[sign].format(base))


def newton_schulz(X):
    """Of a matrix with fewer rows than columns."""
    X = X / (np.linalg.norm(X) + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


F = {
    "square": np.square,
    "max": lambda *x: np.maximum(*x) if len(x) > 1 else x[0].max(),
    "min": np.minimum,
    "sign": np.sign,
    "rms": lambda x: np.sqrt(np.square(x).mean()),
    "mean": np.mean,
    "sum": np.sum,
    "row_mean": lambda x: Matrix(x.mean(1, keepdims=True)),
    "column_mean": lambda x: Matrix(x.mean(0, keepdims=True).T),
    "row_norm": lambda x: np.linalg.norm(x, axis=1, keepdims=True),
    "column_norm": lambda x: np.linalg.norm(x, axis=0, keepdims=True),
    "polar": newton_schulz,
    "triu": np.triu,
}


class Names(dict):
    """What formulas name; `late` has what follows from others at the moment it is asked for."""

    def __init__(self, values, late):
        super().__init__(values)
        self.late = late

    def __missing__(self, name):
        return self.late[name](self)


def mu(E, t):
    return E["b1"] * (1 - 0.5 * 0.96 ** (t * E["momentum_decay"]))


def bound(gram):
    return spectral_bound(get_engine("reference"), np.asarray(gram)[None]).item()


def probe(name, t, shape):
    return np.random.default_rng(t).standard_normal(shape)


LATE = {
    "½": lambda E: 0.5,
    "rows": lambda E: E["p"].shape[0],
    "columns": lambda E: E["p"].shape[1],
    "n": lambda E: E["t"] - 1,
    "μ_{t+1}": lambda E: mu(E, E["t"] + 1),
    "μ_1": lambda E: mu(E, 1),
    "…": lambda E: math.prod(mu(E, i + 1) for i in range(E["t"])) / mu(E, 1) / mu(E, E["t"]),
    "Π_{t+1}": lambda E: math.prod(mu(E, i + 1) for i in range(E["t"] + 1)),
    "a": lambda E: E["alpha"],
    "b": lambda E: E["b3"],
    "h1": lambda E: math.log(0.5) / math.log(E["b1"] + 1e-8),
    "h3": lambda E: math.log(0.5) / math.log(E["b3"] + 1e-8),
    "neg": lambda E: -E["g"],  # before the first step
    "V": lambda E: Matrix(probe("w", E["t"], E["p"].shape)),
    "s1": lambda E: bound(E["A"] * E["A"].T + E["B"] * E["B"].T),
    "s2": lambda E: bound(E["A"].T * E["A"] + E["B"].T * E["B"]),
}
DECAY = {"weight_decay": 0.1}
SCIONS = ["spectral,", "spectralconv", "sign;", "colnorm", "rownorm", "biasrms"]  # as the notes of its formulas begin
#: optimizer, settings, and which lines (by a part of their text) do not belong to that setting
CASES = [
    ("sgd", {"lr": 0.1, **DECAY}, ["momentum·m", "u = m"]),
    ("sgd", {"lr": 0.1, "momentum": 0.9, **DECAY}, ["with nesterov", "without"]),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ["with momentum", "without"]),
    ("adam", DECAY, ["amsgrad"]),
    ("adam", {"amsgrad": True}, []),
    ("adamw", {}, ["amsgrad"]),
    ("adamw", {"amsgrad": True}, []),
    ("nadamw", {}, ["algoperf", "torch"]),
    ("nadamw", {"convention": "algoperf"}, ["dozat", "torch"]),
    ("nadamw", {"convention": "torch", "momentum_decay": 0.3}, ["dozat", "algoperf"]),
    ("radam", {"betas": (0.9, 0.5)}, ["where"]),
    ("radam", {"betas": (0.9, 0.999)}, ["paper", "otherwise"]),
    ("radam", {"betas": (0.9, 0.999), "convention": "paper"}, ["torch", "otherwise"]),
    ("qhadamw", {"nus": (0.7, 0.6)}, []),
    ("stableadamw", {"clip": 0.5}, ["first"]),
    ("stableadamw", {"convention": "first"}, ["author"]),
    ("ademamix", DECAY, ["a = ", "h = ", "b = "]),
    ("ademamix", {"alpha_warmup": 9.0, "beta3_warmup": 9.0}, []),
    ("adan", DECAY, ["max_grad_norm", "with no_prox"]),
    ("adan", {"no_prox": True, **DECAY}, ["max_grad_norm", "(p − lr·u)/"]),
    ("adan", {"max_grad_norm": 1.0}, ["with no_prox"]),
    ("adopt", DECAY, ["with decouple"]),
    ("adopt", {"decouple": True, **DECAY}, ["coupled decay", "p ← p −"]),
    ("laprop", DECAY, ["timm"]),
    ("laprop", {"convention": "timm", **DECAY}, ["author"]),
    ("lars", DECAY, ["timm", "nesterov"]),
    ("lars", {"nesterov": True, **DECAY}, ["timm", "p ← p − m"]),
    ("lars", {"convention": "timm", **DECAY}, ["optax", "nesterov"]),
    ("lars", {"convention": "timm", "nesterov": True, **DECAY}, ["optax", "p ← p − lr·m"]),
    ("lamb", DECAY, []),
    ("adafactor", {"lr": 0.02, **DECAY}, ["fewer", "beta1", "min(lr", "sum(R)"]),
    ("adafactor", {"lr": 0.02, "scale_parameter": False, "clip_threshold": 0.5}, ["fewer", "beta1", "s ←", "min(lr", "sum(R)"]),
    ("lion", DECAY, []),
    ("soap", {}, ["Q1 ←"]),
    ("kronpsgd", {"preconditioner_update_probability": 1.0, "balance_probability": 0.0, "probe": probe, **DECAY}, ["q ← q"]),
    ("muon", DECAY, ["without", "moonlight", "rlx", "m + g"]),
    ("muon", {"nesterov": False, "convention": "moonlight"}, ["with nesterov", "keller", "rlx", "m + g"]),
    ("muon", {"convention": "rlx", "nesterov": True, "otherwise": None}, ["(1 − momentum)", "u = m", "keller", "moonlight"]),
    ("sophia", {"gamma": 0.5}, []),
    ("mars", DECAY, ["sign"]),
    ("mars", {"variant": "lion", "gamma": 0.3}, ["m̂/(√v̂", "v ←"]),
    ("prodigy", {"d0": 0.01, "beta3": 0.9, "growth_rate": 2.0, "use_bias_correction": True, **DECAY}, []),
    ("normuon", {"beta2": 0.8, **DECAY}, ["without"]),
    ("normuon", {"nesterov": False, "beta2": 0.8}, ["with nesterov"]),
    *(
        ("scion", {"norm": norm.strip(",;"), "momentum": 0.3, "lr": 0.1}, [other for other in SCIONS if other != norm] + ["unconstrained"])
        for norm in SCIONS if norm not in ("spectralconv", "biasrms")
    ),
    ("scion", {"momentum": 0.3, "unconstrained": True}, [*SCIONS[1:], "weight_decay"]),
    ("schedulefreeadamw", {"warmup_steps": 2, "r": 1.0, "betas": (0.8, 0.9), **DECAY}, []),
    ("schedulefreesgd", {"lr": 0.1, "warmup_steps": 2, "r": 1.0, "weight_lr_power": 1.0, **DECAY}, []),
]  # fmt: skip
PARTS = {"betas": ("b1", "b2", "b3"), "nus": ("nu1", "nu2"), "ns_coefficients": "abc", "eps": ("eps[0]", "eps[1]")}
MATRICES = ("soap", "kronpsgd", "muon")
RECTIFIED = 8  # by then RAdam rectifies, or never does


@pytest.mark.parametrize(("name", "settings", "left_out"), CASES, ids=lambda x: x if isinstance(x, str) else None)
def test_formulas_are_the_rule(name, settings, left_out):
    """The docstring's formulas, computed in float64, go where the reference engine goes."""
    rng = np.random.default_rng(0)
    lines = [(f, note) for f, note in formula_lines(name) if not any(part in f"{f}  {note}" for part in left_out)]
    if name == "muon" and settings.get("convention") == "rlx":
        lines = lines[-1:] + lines[:-1]  # stated last, in the conventions
    functions = F | ({"square": lambda A: A @ A} if name == "muon" else {})  # the square of a matrix, there alone
    opt = rlx_optim.create(name, engine="reference", **settings)
    spec, kind = opt.hyperparameters(), Matrix if name in MATRICES else np.array
    start = rng.standard_normal((4, 6)).astype(np.float32)
    params = {"w": start.copy()}
    E = Names({key: value for key, value in spec.items() if value is not None}, LATE)
    for pair, parts in PARTS.items():
        if isinstance(spec.get(pair), tuple):
            E |= dict(zip(parts, spec[pair], strict=False))
    E |= dict.fromkeys(("m", "slow", "d", "s", "v", "h", "vmax", "prev", "R", "C", "s_max", "W"), 0.0)
    E |= {"q1": Matrix(np.eye(4)), "q2": Matrix(np.eye(6))} | dict.fromkeys(("z", "x"), start.astype(np.float64))
    if name == "prodigy":
        E |= {"N": 0.0, "d": spec["d0"], "d_max": spec["d0"], "p_0": start.astype(np.float64), "b3": spec["beta3"]}
    E |= {"p": kind(start.astype(np.float64)), "beta": spec["betas"][1] if name == "soap" else None}
    rectified = name == "radam" and "otherwise" in left_out
    for t in range(1, 12 if rectified else 4):
        g = rng.standard_normal((4, 6)).astype(np.float32)
        E |= {"t": t, "g": kind(g.astype(np.float64)), "h\u0302": np.square(g).astype(np.float64)}
        if name == "sophia":
            opt.update_hessian("w", np.square(g))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step_all(params, {"w": g})
        if name == "soap" and t == 1:  # the first call only sets L and Q
            E |= {key: Matrix(value) for key, value in opt.state("w").items() if key[0] in "LQ"}
            continue
        if (rectified and t < RECTIFIED) or (name == "adopt" and t == 1):  # follow the rule until it rectifies, or moves p
            E |= {key: value.astype(np.float64) for key, value in opt.state("w").items()} | {"p": params["w"].astype(np.float64)}
            start = params["w"].copy()
            continue
        for formula, note in lines:
            for code in formulas.read(formula, Compute) * (spec["ns_steps"] if "ns_steps" in note else 1):
                with np.errstate(invalid="ignore"):  # r, where RAdam does not rectify
                    exec(code, {"E": E, "F": functions, "np": np})
        E["prev"] = E["g"]
    E["lead"] = E["x"] - E["p"]
    travelled = np.abs(E["p"] - start).max()
    assert travelled > 0
    assert np.abs(params["w"] - E["p"]).max() < 2e-5 * travelled + 2e-7
    for slot, value in opt.state("w").items():
        if value.ndim and slot != "key":  # counters are not in the formulas, nor is what noise is drawn from
            computed = np.asarray(E[{"row": "R", "col": "C", "start": "p_0"}.get(slot, slot)]).reshape(value.shape)
            assert np.abs(computed - value).max() < 2e-6 * np.abs(value).max(), slot
