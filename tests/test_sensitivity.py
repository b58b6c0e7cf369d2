"""Every hyperparameter of every optimizer, changed, moves the result where it has a say, and does not where it has none."""

import itertools
import math

import numpy as np
import pytest

import rlx_optim
from rlx_optim.coefficients import SCHEMES
from rlx_optim.registry import FILES, spec_class
from rlx_optim.spec import MODIFIERS

BAR = 2e-4  # of the distance travelled: what the tests of the rules would notice
STEPS = 12
SHAPES = {"vector": (13,), "matrix": (6, 9), "cube": (3, 4, 5)}

# ---- special inputs -----------------------------------------------------------------------------------------------------


def swinging(t):
    return 10 ** math.sin(t)


def shrinking(t):
    return 0.5**t


def probe(name, t, shape):
    return np.random.default_rng([t, *shape]).standard_normal(shape)


def another_probe(name, t, shape):
    return np.random.default_rng([t, 1, *shape]).standard_normal(shape)


def problem(steps=STEPS, size=swinging, start=1.0, only=tuple(SHAPES)):
    """Parameters and gradients: how many steps, how large the gradient is at t, how large p is, which tensors."""
    rng = np.random.default_rng(0)
    params = {name: np.array(start * rng.standard_normal(SHAPES[name]), np.float32) for name in only}
    grads = [{n: np.array(size(t) * rng.standard_normal(p.shape), np.float32) for n, p in params.items()} for t in range(steps)]
    return params, grads


# ---- the table ------------------------------------------------------------------------------------------------------------
#: what every row of an optimizer starts from
BASE = {
    "sgd": {"lr": 0.05},
    "adam": {"lr": 0.01},
    "adamw": {"lr": 0.01},
    "nadamw": {"lr": 0.01},
    "radam": {"lr": 0.01},
    "qhadamw": {"lr": 0.01},
    "stableadamw": {"lr": 0.01},
    "ademamix": {"lr": 0.01},
    "adan": {"lr": 0.01},
    "adopt": {"lr": 0.01},
    "laprop": {"lr": 0.01},
    "lamb": {"lr": 0.01},
    "lars": {"lr": 10.0},
    "adafactor": {},
    "lion": {"lr": 0.01},
    "soap": {"lr": 0.01},
    "kronpsgd": {"lr": 0.01},
    "muon": {"lr": 0.02},
    "sophia": {"lr": 0.01},
    "mars": {"lr": 0.01},
    "prodigy": {"d0": 0.01, "d_coef": 10.0},
    "normuon": {"lr": 0.02},
    "scion": {"lr": 0.02},
    "schedulefreeadamw": {"lr": 0.01},
    "schedulefreesgd": {"lr": 0.05},
}
HEAVY = {"momentum": 0.9}
AMSGRAD = {"betas": (0.9, 0.5)}
PROBED = {"probe": probe}
TORCH = {"convention": "torch"}
RLX = {"convention": "rlx"}
LION = {"variant": "lion"}
SMALL_P = {"start": 1e-4}
LONG = {"steps": 520, "only": ("matrix",)}

#: (optimizer, field, changed value, other settings, input): the field has a say
MOVES = [
    ("sgd", "lr", 0.06),
    ("sgd", "momentum", 0.5),
    ("sgd", "dampening", 0.5, HEAVY),
    ("sgd", "nesterov", True, HEAVY),
    ("sgd", "weight_decay", 0.1),
    ("sgd", "weight_decay", 0.1, HEAVY),
    ("sgd", "weight_decay", 0.1, {**HEAVY, "nesterov": True}),
    *(
        row
        for name in ("adam", "adamw")
        for row in [
            (name, "lr", 0.011),
            (name, "betas", (0.8, 0.999)),
            (name, "betas", (0.9, 0.99)),
            (name, "eps", 0.1),
            (name, "weight_decay", 0.3),
            (name, "amsgrad", True, AMSGRAD, {"size": shrinking}),
            (name, "eps", 0.1, {"amsgrad": True}),
            (name, "weight_decay", 0.3, {"amsgrad": True}),
        ]
    ),
    ("nadamw", "lr", 0.011),
    *(
        row
        for convention in ("dozat", "algoperf", "torch")
        for row in [
            ("nadamw", "betas", (0.8, 0.999), {"convention": convention}),
            ("nadamw", "betas", (0.9, 0.99), {"convention": convention}),
            ("nadamw", "eps", 0.1, {"convention": convention}),
            ("nadamw", "weight_decay", 0.3, {"convention": convention}),
        ]
    ),
    ("nadamw", "convention", "algoperf"),
    ("nadamw", "convention", "torch"),
    ("nadamw", "convention", "torch", {"convention": "algoperf"}),
    ("nadamw", "momentum_decay", 0.1, TORCH),
    *(
        row
        for convention in ("torch", "paper")
        for row in [
            ("radam", "lr", 0.011, {"convention": convention}),
            ("radam", "betas", (0.8, 0.999), {"convention": convention}),
            ("radam", "betas", (0.9, 0.99), {"convention": convention}),
            ("radam", "eps", 0.1, {"convention": convention}),
            ("radam", "weight_decay", 0.3, {"convention": convention}),
            ("radam", "decoupled_weight_decay", True, {"convention": convention, "weight_decay": 0.3}),
        ]
    ),
    ("radam", "convention", "paper"),
    ("qhadamw", "lr", 0.011),
    ("qhadamw", "betas", (0.9, 0.999)),
    ("qhadamw", "betas", (0.995, 0.9)),
    ("qhadamw", "nus", (0.8, 1.0)),
    ("qhadamw", "nus", (0.7, 0.9)),
    ("qhadamw", "eps", 0.1),
    ("qhadamw", "weight_decay", 0.3),
    *(
        row
        for convention in ("author", "first")
        for row in [
            ("stableadamw", "lr", 0.011, {"convention": convention}),
            ("stableadamw", "betas", (0.8, 0.99), {"convention": convention}),
            ("stableadamw", "betas", (0.9, 0.9), {"convention": convention}),
            ("stableadamw", "eps", 0.1, {"convention": convention}),
            ("stableadamw", "weight_decay", 0.3, {"convention": convention}),
            ("stableadamw", "clip", 0.5, {"convention": convention}),
        ]
    ),
    ("stableadamw", "convention", "first"),
    ("ademamix", "lr", 0.011),
    ("ademamix", "betas", (0.8, 0.999, 0.9999)),
    ("ademamix", "betas", (0.9, 0.99, 0.9999)),
    ("ademamix", "betas", (0.9, 0.999, 0.99)),
    ("ademamix", "alpha", 5.0),
    ("ademamix", "eps", 0.1),
    ("ademamix", "weight_decay", 0.3),
    ("ademamix", "alpha_warmup", 6, {"betas": (0.9, 0.999, 0.99)}),
    ("ademamix", "alpha_warmup", 8, {"betas": (0.9, 0.999, 0.99), "alpha_warmup": 6}),
    ("ademamix", "beta3_warmup", 6),
    ("ademamix", "beta3_warmup", 8, {"beta3_warmup": 6}),
    *(
        row
        for more in ({}, {"no_prox": True}, {"max_grad_norm": 1.0})
        for row in [
            ("adan", "lr", 0.011, more),
            ("adan", "betas", (0.9, 0.92, 0.99), more),
            ("adan", "betas", (0.98, 0.8, 0.99), more),
            ("adan", "betas", (0.98, 0.92, 0.9), more),
            ("adan", "eps", 0.1, more),
            ("adan", "weight_decay", 0.3, more),
        ]
    ),
    ("adan", "no_prox", True, {"weight_decay": 0.3}),
    ("adan", "max_grad_norm", 1.0),
    ("adan", "max_grad_norm", 2.0, {"max_grad_norm": 1.0}),
    *(
        row
        for more in ({}, {"decouple": True})
        for row in [
            ("adopt", "lr", 0.011, more),
            ("adopt", "betas", (0.8, 0.9999), more),
            ("adopt", "betas", (0.9, 0.9), more),
            ("adopt", "eps", 1.0, more),
            ("adopt", "weight_decay", 0.3, more),
            ("adopt", "clip_exp", 0.1, more),
            ("adopt", "clip_exp", None, more),
        ]
    ),
    ("adopt", "decouple", True, {"weight_decay": 0.3}),
    *(
        row
        for convention in ("author", "timm")
        for row in [
            ("laprop", "lr", 0.011, {"convention": convention}),
            ("laprop", "betas", (0.8, 0.999), {"convention": convention}),
            ("laprop", "betas", (0.9, 0.99), {"convention": convention}),
            ("laprop", "eps", 0.1, {"convention": convention}),
            ("laprop", "weight_decay", 0.3, {"convention": convention}),
        ]
    ),
    ("laprop", "convention", "timm", {"weight_decay": 0.3}),
    *(
        row
        for convention in ("optax", "timm")
        for row in [
            ("lars", "lr", 11.0, {"convention": convention}),
            ("lars", "momentum", 0.8, {"convention": convention}),
            ("lars", "weight_decay", 0.3, {"convention": convention}),
            ("lars", "trust_coefficient", 2e-3, {"convention": convention}),
            ("lars", "trust_coefficient", None, {"convention": convention}),
            ("lars", "eps", 0.1, {"convention": convention}),
            ("lars", "nesterov", True, {"convention": convention}),
        ]
    ),
    ("lars", "convention", "timm", {"weight_decay": 0.3}),
    ("lamb", "lr", 0.011),
    ("lamb", "betas", (0.8, 0.999)),
    ("lamb", "betas", (0.9, 0.99)),
    ("lamb", "eps", 0.1),
    ("lamb", "weight_decay", 0.3),
    ("lamb", "bias_correction", False),
    ("lamb", "trust_clip", 0.5),  # the ratio is about 1
    ("lion", "lr", 0.011),
    ("lion", "betas", (0.5, 0.99)),
    ("lion", "betas", (0.9, 0.5)),
    ("lion", "weight_decay", 0.3),
    ("adafactor", "lr", 0.02),
    ("adafactor", "beta2_decay", -0.5),
    ("adafactor", "eps", (1e-2, 1e-3)),
    ("adafactor", "eps", (1e-10, 1e-3), {}, {"size": lambda t: 1e-5 * swinging(t)}),
    ("adafactor", "eps", (1e-30, 1e-2), {}, SMALL_P),
    ("adafactor", "clip_threshold", 0.5),
    ("adafactor", "weight_decay", 0.3),
    ("adafactor", "beta1", 0.9),
    ("adafactor", "scale_parameter", False),
    ("adafactor", "convention", "torch", {"eps": (1e-2, 1e-3)}),
    ("adafactor", "convention", "rlx"),
    ("adafactor", "convention", "torch", {**RLX}),
    ("adafactor", "lr", 0.02, TORCH),
    ("adafactor", "beta2_decay", -0.5, TORCH),
    ("adafactor", "eps", (1.0, 1e-3), TORCH),
    ("adafactor", "eps", (1e-30, 1e-2), TORCH, SMALL_P),
    ("adafactor", "clip_threshold", 0.5, TORCH),
    ("adafactor", "weight_decay", 0.3, TORCH),
    ("adafactor", "lr", 0.02, RLX),
    ("adafactor", "beta2_decay", -0.5, RLX),
    ("adafactor", "eps", (1.0, 1e-3), RLX),
    ("adafactor", "eps", (1e-30, 1e-2), RLX, SMALL_P),
    ("adafactor", "clip_threshold", 0.5, RLX),
    ("adafactor", "weight_decay", 0.3, RLX),
    ("soap", "lr", 0.011),
    ("soap", "betas", (0.8, 0.95)),
    ("soap", "betas", (0.95, 0.9)),
    ("soap", "betas", (0.95, 0.9), {"shampoo_beta": 0.95}),
    ("soap", "shampoo_beta", 0.5),
    ("soap", "eps", 0.1),
    ("soap", "weight_decay", 0.3),
    ("soap", "precondition_frequency", 2),
    ("soap", "max_precond_dim", 5, {}, {"only": ("matrix",)}),
    ("soap", "max_precond_dim", 3, {}, {"only": ("cube",)}),
    ("soap", "max_precond_dim", 12, {"merge_dims": True}, {"only": ("cube",)}),
    ("soap", "merge_dims", True, {"max_precond_dim": 12}, {"only": ("cube",)}),
    ("soap", "precondition_1d", True, {}, {"only": ("vector",)}),
    ("kronpsgd", "lr", 0.011),
    ("kronpsgd", "beta1", 0.8),
    ("kronpsgd", "weight_decay", 0.3, {}, {"only": ("matrix",)}),
    ("kronpsgd", "precond_lr", 0.2),
    ("kronpsgd", "precond_init_scale", 0.3),
    ("kronpsgd", "preconditioner_update_probability", 0.5),
    ("kronpsgd", "preconditioner_update_probability", 1.0, {"memory_save_mode": "all_diag"}, LONG),
    ("kronpsgd", "max_size", 8, {}, {"only": ("matrix",)}),
    ("kronpsgd", "min_ndim_triangular", 3, {}, {"only": ("matrix",)}),
    ("kronpsgd", "min_ndim_triangular", 1, {}, {"only": ("vector",)}),
    ("kronpsgd", "memory_save_mode", "one_diag"),
    ("kronpsgd", "memory_save_mode", "all_diag"),
    ("kronpsgd", "momentum_into_precond_update", False),
    ("kronpsgd", "seed", 1),
    ("kronpsgd", "probe", probe),
    ("kronpsgd", "probe", another_probe, PROBED),
    *(
        row
        for convention in ("keller", "moonlight", "rlx")
        for row in [
            ("muon", "lr", 0.022, {"convention": convention}),
            ("muon", "momentum", 0.8, {"convention": convention}),
            ("muon", "nesterov", False, {"convention": convention}),
            ("muon", "weight_decay", 0.3, {"convention": convention}),
            ("muon", "weight_decay", 0.3, {"convention": convention}, {"only": ("cube",)}),
            ("muon", "ns_steps", 4, {"convention": convention}),
            ("muon", "ns_coefficients", (3.4, -4.7750, 2.0315), {"convention": convention}),
            ("muon", "ns_coefficients", (3.4445, -4.7, 2.0315), {"convention": convention}),
            ("muon", "ns_coefficients", (3.4445, -4.7750, 2.0), {"convention": convention}),
            ("muon", "eps", 1.0, {"convention": convention}),
        ]
    ),
    *(
        (name, "ns_coefficients", scheme, {"ns_coefficients": (1.5, -0.5, 0.0)}, {"only": ("matrix",)})
        for name, scheme in itertools.product(("muon", "normuon", "scion"), SCHEMES)
    ),
    ("muon", "convention", "moonlight"),
    ("muon", "convention", "rlx"),
    ("sophia", "lr", 0.011),
    ("sophia", "betas", (0.9, 0.99)),
    ("sophia", "betas", (0.965, 0.5), {"gamma": 1.0}),
    ("sophia", "gamma", 1.0),
    ("sophia", "clip", 0.5),
    ("sophia", "clip", math.inf, {"gamma": 1.0}),
    ("sophia", "eps", 0.1),
    ("sophia", "weight_decay", 0.3),
    *(
        row
        for variant in ("adamw", "lion")
        for row in [
            ("mars", "lr", 0.011, {"variant": variant}),
            ("mars", "betas", (0.8, 0.99), {"variant": variant}),
            ("mars", "weight_decay", 0.3, {"variant": variant}),
            ("mars", "gamma", 0.2, {"variant": variant}),
            ("mars", "clip_norm", 20.0, {"variant": variant}),
            ("mars", "clip_norm", None, {"variant": variant}),
        ]
    ),
    ("mars", "betas", (0.95, 0.9)),
    ("mars", "eps", 0.01),
    ("mars", "variant", "lion"),
    ("prodigy", "lr", 0.9),
    ("prodigy", "betas", (0.8, 0.999)),
    ("prodigy", "betas", (0.9, 0.99)),
    ("prodigy", "beta3", 0.9),
    ("prodigy", "eps", 0.1),
    ("prodigy", "weight_decay", 0.3),
    ("prodigy", "decouple", False, {"weight_decay": 0.3}),
    ("prodigy", "use_bias_correction", True),
    ("prodigy", "safeguard_warmup", True, {"lr": 0.5}),
    ("prodigy", "d0", 0.02),
    ("prodigy", "d_coef", 0.5),
    ("prodigy", "growth_rate", 1.02, {}, {"steps": 60}),
    *(
        row
        for convention in ("authors", "dion", "speedrun")
        for row in [
            ("normuon", "lr", 0.022, {"convention": convention}),
            ("normuon", "momentum", 0.8, {"convention": convention}),
            ("normuon", "beta2", 0.5, {"convention": convention}),
            ("normuon", "nesterov", convention == "dion", {"convention": convention}),  # the other way round
            ("normuon", "weight_decay", 0.3, {"convention": convention}),
            ("normuon", "ns_steps", 4, {"convention": convention}),
            ("normuon", "ns_coefficients", "aol", {"convention": convention}),
        ]
    ),
    ("normuon", "convention", "dion", {}, {"only": ("matrix",)}),
    ("normuon", "convention", "speedrun", {}, {"only": ("matrix",)}),
    ("scion", "lr", 0.022),
    ("scion", "momentum", 0.1),
    ("scion", "scale", 2.0),
    ("scion", "unconstrained", True),
    ("scion", "weight_decay", 0.3),
    *(("scion", "norm", norm, {}, {"only": ("matrix",)}) for norm in ("sign", "colnorm", "rownorm")),
    *(("scion", "norm", norm, {"norm": "sign"}, {"only": ("matrix",)}) for norm in ("spectral", "spectralconv", "biasrms")),
    *(("scion", "normalized", False, {"norm": norm}, {"only": ("matrix",)}) for norm in ("spectral", "sign", "rownorm")),
    ("scion", "normalized", True, {"norm": "colnorm"}, {"only": ("matrix",)}),
    *(("scion", "transpose", True, {"norm": norm}, {"only": ("matrix",)}) for norm in ("colnorm", "rownorm")),
    ("scion", "max_scale", True, {}, {"only": ("matrix", "cube")}),
    ("scion", "ns_steps", 4, {}, {"only": ("matrix", "cube")}),
    ("scion", "ns_coefficients", (3.4, -4.7, 2.0), {}, {"only": ("matrix", "cube")}),
    ("schedulefreeadamw", "betas", (0.8, 0.999)),
    ("schedulefreeadamw", "betas", (0.9, 0.99)),
    ("schedulefreeadamw", "eps", 0.1),
    ("schedulefreesgd", "momentum", 0.8),
    *(
        row
        for name in ("schedulefreeadamw", "schedulefreesgd")
        for row in [
            (name, "lr", 0.011),
            (name, "weight_decay", 0.3),
            (name, "warmup_steps", 5),
            (name, "r", 1.0),
            (name, "weight_lr_power", 1.0, {"warmup_steps": 5}),
        ]
    ),
]

#: the same for fields that have no say in these settings or on this input
STAYS = [
    ("sgd", "dampening", 0.5),
    ("nadamw", "momentum_decay", 0.1, {"convention": "dozat"}),
    ("nadamw", "momentum_decay", 0.1, {"convention": "algoperf"}),
    ("radam", "decoupled_weight_decay", True),
    ("stableadamw", "convention", "first", {"weight_decay": 0.0}),
    ("ademamix", "betas", (0.9, 0.999, 0.5), {"alpha": 0.0}),
    ("ademamix", "beta3_warmup", 6, {"alpha": 0.0}),
    ("adan", "no_prox", True),
    ("adan", "max_grad_norm", 0.0),
    ("adan", "max_grad_norm", 1e4),
    ("adopt", "decouple", True),
    ("laprop", "convention", "timm"),
    ("lars", "eps", 0.1, {"trust_coefficient": None, "lr": 0.01}),
    ("lars", "convention", "timm"),  # lr inside m or outside matters where it changes
    ("lamb", "trust_clip", 100.0),
    ("adafactor", "eps", (1e-30, 1e-2)),  # rms(p) is above it
    ("adafactor", "eps", (1e-20, 1e-3), TORCH),
    ("adafactor", "eps", (1e-30, 1e-2), {**RLX, "lr": 0.01}, SMALL_P),  # a given lr is not scaled
    ("soap", "max_precond_dim", 9),
    ("soap", "merge_dims", True, {"max_precond_dim": 9}, {"only": ("matrix", "vector")}),
    ("soap", "precondition_1d", True, {}, {"only": ("matrix", "cube")}),
    ("soap", "precondition_frequency", 11, {}, {"steps": 11}),  # one call initialises; the tenth that moves refreshes after it
    ("kronpsgd", "balance_probability", 1.0),
    ("kronpsgd", "balance_probability", 0.0, PROBED),
    ("kronpsgd", "seed", 1, PROBED),
    ("kronpsgd", "weight_decay", 0.3, {}, {"only": ("vector",)}),
    ("kronpsgd", "preconditioner_update_probability", 1.0),  # the schedule starts at 1
    ("kronpsgd", "max_size", 9),
    ("kronpsgd", "memory_save_mode", "all_diag", {}, {"only": ("vector",)}),
    ("muon", "eps", 1.0, RLX, {"only": ("cube", "vector")}),
    ("muon", "ns_steps", 1, RLX, {"only": ("cube", "vector")}),
    ("mars", "eps", 0.1, LION),
    ("mars", "betas", (0.95, 0.5), LION),
    ("mars", "clip_norm", 1e4, {"clip_norm": None}),
    ("prodigy", "safeguard_warmup", True),  # lr is 1
    ("prodigy", "growth_rate", math.inf),
    ("scion", "norm", "spectral"),
    ("scion", "norm", "sign", {}, {"only": ("cube", "vector")}),
    ("scion", "transpose", True),
    ("scion", "weight_decay", 0.3, {"unconstrained": True}),
    ("scion", "max_scale", True, {"norm": "sign"}, {"only": ("matrix", "vector")}),
    ("schedulefreeadamw", "weight_lr_power", 1.0),  # without warm-up all weights are equal
    ("schedulefreesgd", "weight_lr_power", 1.0),
]


# ---- the tests --------------------------------------------------------------------------------------------------------------
def run(name, settings, special, engine):
    """Where an optimizer takes the problem, without its otherwise where it has one."""
    params, grads = problem(**special)
    opt = rlx_optim.create(name, engine=engine, **settings)
    for t, g in enumerate(grads):
        if name == "sophia" and t % 3 == 0:
            for n, p in params.items():
                opt.update_hessian(n, np.array(np.abs(g[n]) + 0.1 * np.abs(p), np.float32))
        opt.step_all(params, g)
    return params


def change(name, field, value, settings=None, special=None, engine="cpu"):
    """How far the changed field moves each tensor, as a share of the distance travelled, at the larger of the two."""
    before = {**BASE[name], **(settings or {})}
    start, _ = problem(**(special or {}))
    a, b = (run(name, s, special or {}, engine) for s in (before, {**before, field: value}))
    travelled = {n: max(np.abs(x[n] - start[n]).max() for x in (a, b)) for n in start}
    return {n: np.abs(a[n] - b[n]).max() / travelled[n] for n in start}


def describe(row):
    name, field, value, *rest = row
    value = getattr(value, "__name__", value)
    settings = ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in (rest[0] if rest else {}).items())
    only = "+".join(rest[1].get("only", ())) if len(rest) > 1 else ""
    return f"{name}-{field}={value}" + (f"-{settings}" if settings else "") + (f"-{only}" if only else "")


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("row", MOVES, ids=describe)
def test_moves(row, engine):
    """The change shows in some tensor, and in every one the row names."""
    apart = change(*row, engine=engine)
    named = len(row) > 4 and "only" in row[4]
    assert (min if named else max)(apart.values()) > BAR, apart


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("row", STAYS, ids=describe)
def test_stays(row, engine):
    """The change shows nowhere."""
    apart = change(*row, engine=engine)
    assert max(apart.values()) <= BAR, apart


@pytest.mark.parametrize("convention", ["torch", "rlx"])
@pytest.mark.parametrize("setting", [{"beta1": 0.9}, {"scale_parameter": False}])
def test_no_place_in_the_convention(convention, setting):
    """What could only be ignored is refused."""
    with pytest.raises(ValueError, match=f"{next(iter(setting))}.*no place in convention '{convention}'"):
        rlx_optim.Adafactor(**setting, convention=convention)


@pytest.mark.parametrize(("name", "taken"), [("muon", {"matrix", "cube"}), ("normuon", {"matrix", "cube"}), ("mars", {"matrix"})])
def test_otherwise_moves_what_is_not_taken(name, taken):
    """A changed otherwise moves the tensors handed to it and no others."""
    a, b = (run(name, {"otherwise": rlx_optim.AdamW(lr=lr)}, {}, "cpu") for lr in (0.01, 0.02))
    assert {n for n in a if np.array_equal(a[n], b[n])} == taken


def changed_parts(name, field, default):
    """Which entries of a field the rows of the table change; 0 stands for a field that is one value."""
    found = set()
    for row in MOVES + [row for row in STAYS if row[1] == "balance_probability"]:
        if row[:2] == (name, field) and not (isinstance(default, tuple) and isinstance(row[2], str)):
            before = {**BASE[name], **(row[3] if len(row) > 3 else {})}.get(field, default)
            pairs = zip(before, row[2], strict=True) if isinstance(default, tuple) else [(before, row[2])]
            found |= {i for i, (x, y) in enumerate(pairs) if x != y}
    return found


@pytest.mark.parametrize("name", FILES)
def test_table_is_complete(name):
    """Every field is in the table, every entry of those that are tuples, every choice of those that are names. Those that all
    rules have are test_modifiers.py's."""
    for field, declared in spec_class(name).fields.items():
        if field in MODIFIERS:
            continue
        default = declared.default
        parts = set(range(len(default))) if isinstance(default, tuple) else {0}
        assert changed_parts(name, field, default) == parts, field
        if declared.annotation.startswith("Literal"):
            seen = {default} | {row[2] for row in MOVES if row[:2] == (name, field)}
            names = set(declared.expected.rpartition("one of ")[2].split(", "))
            assert {repr(each) for each in seen if each is None or isinstance(each, str)} == names, field
