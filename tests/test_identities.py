"""What the papers and the conventions promise: reductions to other rules, invariances, fixed points. On both engines."""

import math

import numpy as np
import pytest

import rlx_optim as r

STEPS = 12
SMALL = {"scalar": (), "vector": (37,), "matrix": (19, 23), "conv": (2, 3, 4, 5)}
SHAPES = SMALL | {"big": (1025, 17)}  # more than one chunk of the cpu engine
BAR = 2e-5

both_engines = pytest.mark.parametrize("engine", ["cpu", "reference"])


def tensors(shapes=SHAPES, size=1.0, seed=0):
    """Starting values of a set of tensors, in float32."""
    rng = np.random.default_rng(seed)
    return {name: np.array(size * rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def gradients(shapes=SHAPES, steps=STEPS, seed=1):
    """Gradients with a drift and a size that swings from step to step."""
    return [tensors(shapes, 10 ** math.sin(t), [seed, t]) for t in range(steps)]


def run(opt, params, grads):
    """Where the optimizer takes the parameters."""
    params = {name: np.array(p, np.float32) for name, p in params.items()}
    for g in grads:
        opt.step_all(params, {name: np.array(x, np.float32) for name, x in g.items()})
    return params


def distance(a, b, start):
    """How far apart two places are, per tensor, as a share of the way there."""
    return {name: np.abs(a[name] - b[name]).max() / np.abs(a[name] - start[name]).max() for name in a}


def assert_close(a, b, start, bar=BAR):
    """The same place, measured by the way there."""
    apart = distance(a, b, start)
    assert all(share <= bar for share in apart.values()), apart


def orthogonal(n, rng):
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


# ---- two rules that are one ---------------------------------------------------------------------------------------------
ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 0.01}
SLOW = {"lr": 0.01, "betas": (0.8, 0.9, 0.99)}
HEAVY = {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.3}
EQUAL = {
    "QHAdamW with nus (1, 1) is AdamW": (
        lambda e: r.QHAdamW(**ADAM, nus=(1, 1), weight_decay=0.3, engine=e),
        lambda e: r.AdamW(**ADAM, weight_decay=0.3, engine=e),
    ),
    "Adam without decay is AdamW without decay": (
        lambda e: r.Adam(**ADAM, weight_decay=0, engine=e),
        lambda e: r.AdamW(**ADAM, weight_decay=0, engine=e),
    ),
    "the same with amsgrad": (
        lambda e: r.Adam(**ADAM, weight_decay=0, amsgrad=True, engine=e),
        lambda e: r.AdamW(**ADAM, weight_decay=0, amsgrad=True, engine=e),
    ),
    "AdEMAMix without its slow average is AdamW": (
        lambda e: r.AdEMAMix(lr=0.01, betas=(0.8, 0.9, 0.99), eps=0.01, alpha=0, weight_decay=0.3, beta3_warmup=5, engine=e),
        lambda e: r.AdamW(**ADAM, weight_decay=0.3, engine=e),
    ),
    "AdEMAMix with warm-ups of one step has none": (
        lambda e: r.AdEMAMix(**SLOW, alpha_warmup=1, beta3_warmup=1, engine=e),
        lambda e: r.AdEMAMix(**SLOW, engine=e),
    ),
    "AdEMAMix with a slow average as short as the fast one has no warm-up of it": (
        lambda e: r.AdEMAMix(lr=0.01, betas=(0.8, 0.9, 0.8), beta3_warmup=9, engine=e),
        lambda e: r.AdEMAMix(lr=0.01, betas=(0.8, 0.9, 0.8), engine=e),
    ),
    **{
        f"StableAdamW without clipping is AdamW: {convention}": (
            lambda e, c=convention: r.StableAdamW(**ADAM, weight_decay=0.3, clip=math.inf, convention=c, engine=e),
            lambda e: r.AdamW(**ADAM, weight_decay=0.3, engine=e),
        )
        for convention in ("author", "first")
    },
    "Adan that does not look ahead is AdamW": (
        lambda e: r.Adan(lr=0.01, betas=(0.8, 0, 0.9), eps=0.01, weight_decay=0.3, no_prox=True, engine=e),
        lambda e: r.AdamW(**ADAM, weight_decay=0.3, engine=e),
    ),
    "LaProp without momentum is Adam without it": (
        lambda e: r.LaProp(lr=0.01, betas=(0, 0.9), eps=0.01, engine=e),
        lambda e: r.Adam(lr=0.01, betas=(0, 0.9), eps=0.01, engine=e),
    ),
    **{
        f"LARS without its ratio is SGD: {convention}, nesterov {nesterov}": (
            lambda e, c=convention, n=nesterov: r.LARS(**HEAVY, nesterov=n, trust_coefficient=None, convention=c, engine=e),
            lambda e, n=nesterov: r.SGD(**HEAVY, nesterov=n, engine=e),
        )
        for convention in ("optax", "timm")
        for nesterov in (False, True)
    },
    "MARS without correction and clipping is AdamW": (
        lambda e: r.MARS(**ADAM, weight_decay=0.3, gamma=0, clip_norm=None, otherwise=None, engine=e),
        lambda e: r.AdamW(**ADAM, weight_decay=0.3, engine=e),
    ),
    "MARS hands what is no matrix to its otherwise": (
        lambda e: r.MARS(
            **ADAM, weight_decay=0.3, gamma=0, clip_norm=None, otherwise=r.AdamW(**ADAM, weight_decay=0.3), engine=e
        ),
        lambda e: r.AdamW(**ADAM, weight_decay=0.3, engine=e),
    ),
    "MARS with signs, without correction and clipping, is Lion with equal betas": (
        lambda e: r.MARS(
            lr=0.01, betas=(0.8, 0.5), weight_decay=0.3, gamma=0, clip_norm=None, variant="lion", otherwise=None, engine=e
        ),
        lambda e: r.Lion(lr=0.01, betas=(0.8, 0.8), weight_decay=0.3, engine=e),
    ),
    "Adam without averages is Lion without averages": (
        lambda e: r.Adam(lr=0.01, betas=(0, 0), eps=0, engine=e),
        lambda e: r.Lion(lr=0.01, betas=(0, 0.9), engine=e),
    ),
    "NAdamW as in torch with the momentum schedule over is Dozat's": (
        lambda e: r.NAdamW(**ADAM, weight_decay=0.3, convention="torch", momentum_decay=1e4, engine=e),
        lambda e: r.NAdamW(**ADAM, weight_decay=0.3, convention="dozat", engine=e),
    ),
    **{
        f"NAdamW without momentum is AdamW without it: {convention}": (
            lambda e, c=convention: r.NAdamW(lr=0.01, betas=(0, 0.9), weight_decay=0.3, convention=c, engine=e),
            lambda e: r.AdamW(lr=0.01, betas=(0, 0.9), weight_decay=0.3, engine=e),
        )
        for convention in ("dozat", "algoperf", "torch")
    },
    "Adafactor's relative step is 1e-2 for 10000 steps": (
        lambda e: r.Adafactor(engine=e),
        lambda e: r.Adafactor(lr=1e-2, engine=e),
    ),
    "KronPSGD balances without changing a step": (
        lambda e: r.KronPSGD(lr=0.01, weight_decay=0.3, max_size=100, balance_probability=1.0, engine=e),
        lambda e: r.KronPSGD(lr=0.01, weight_decay=0.3, max_size=100, balance_probability=0.0, engine=e),
    ),
}


@both_engines
@pytest.mark.parametrize("title", EQUAL)
def test_equal(title, engine):
    """Two optimizers that must take the same steps."""
    first, second = EQUAL[title]
    start, grads = tensors(), gradients()
    assert_close(run(first(engine), start, grads), run(second(engine), start, grads), start)


@both_engines
@pytest.mark.parametrize("variant", ["adamw", "lion"])
def test_mars_without_correction_sees_clipped_gradients(variant, engine):
    """With gamma 0 it is AdamW (or Lion with equal betas) on each tensor's gradient, cut to the norm clip_norm."""
    start, grads = tensors(), gradients()
    clipped = [{n: x * min(1, 3 / np.linalg.norm(x.astype(float))) for n, x in g.items()} for g in grads]
    assert not np.array_equal(clipped[2]["matrix"], grads[2]["matrix"])
    settings = {"lr": 0.01, "weight_decay": 0.3, "engine": engine}
    found = run(r.MARS(**settings, betas=(0.8, 0.9), gamma=0, clip_norm=3.0, variant=variant, otherwise=None), start, grads)
    kind, betas = (r.AdamW, (0.8, 0.9)) if variant == "adamw" else (r.Lion, (0.8, 0.8))
    assert_close(run(kind(**settings, betas=betas), start, clipped), found, start)


#: optimizer, settings, others that mean the same: what None stands for, what sets no limit, what a convention does not use
SAME = [
    ("lamb", {"trust_clip": None}, {"trust_clip": math.inf}),
    ("mars", {"clip_norm": None}, {"clip_norm": math.inf}),
    ("adan", {"max_grad_norm": None}, {"max_grad_norm": 0}),
    ("soap", {"betas": (0.9, 0.7)}, {"betas": (0.9, 0.7), "shampoo_beta": 0.7}),
    ("soap", {"max_precond_dim": 23}, {"max_precond_dim": 10_000}),
    ("prodigy", {"beta3": None}, {"beta3": 0.999**0.5}),
    ("prodigy", {"growth_rate": None}, {"growth_rate": math.inf}),
    ("adopt", {"clip_exp": 1e3}, {"clip_exp": 1e6}),
    ("ademamix", {"alpha_warmup": None, "beta3_warmup": None}, {"alpha_warmup": 1, "beta3_warmup": 1}),
    ("schedulefreeadamw", {"warmup_steps": 0}, {"warmup_steps": 1}),
    ("schedulefreesgd", {"warmup_steps": 0}, {"warmup_steps": 1}),
    ("stableadamw", {"clip": 1e30}, {"clip": math.inf}),
    ("adafactor", {"clip_threshold": 1e30}, {"clip_threshold": math.inf}),
    ("nadamw", {"momentum_decay": 0.004}, {"momentum_decay": 1.0}),
    ("nadamw", {"convention": "algoperf", "momentum_decay": 0.004}, {"convention": "algoperf", "momentum_decay": 1.0}),
    *[
        ("normuon", {"convention": c}, {"convention": c, "nesterov": n, "ns_coefficients": s})
        for c, n, s in (("authors", True, "keller"), ("dion", False, "speedrun"), ("speedrun", True, "speedrun"))
    ],
    *[(name, {}, {"ns_coefficients": "keller"}) for name in ("muon", "scion")],
    *[(name, {"ns_coefficients": "aol"}, {"ns_coefficients": "aol", "ns_steps": 4}) for name in ("muon", "normuon", "scion")],
    *[
        ("scion", {"norm": norm}, {"norm": norm, "normalized": True})
        for norm in ("auto", "spectral", "sign", "rownorm", "biasrms", "spectralconv")
    ],
    ("scion", {"unconstrained": True}, {"unconstrained": True, "weight_decay": 0.3}),
    ("kronpsgd", {"max_size": 0}, {"memory_save_mode": "all_diag"}),
    ("kronpsgd", {"min_ndim_triangular": 5}, {"memory_save_mode": "all_diag"}),
]


@both_engines
@pytest.mark.parametrize(("name", "one", "other"), SAME, ids=lambda x: x if isinstance(x, str) else None)
def test_the_same_in_other_words(name, one, other, engine):
    """To the last bit."""
    start, grads = tensors(SMALL), gradients(SMALL, steps=5)
    given = {} if name == "prodigy" else {"lr": 0.01}
    first, second = (run(r.create(name, engine=engine, **given, **settings), start, grads) for settings in (one, other))
    assert all(np.array_equal(first[k], second[k]) for k in start)
    assert any((first[k] != start[k]).any() for k in start)


D, LR = 0.3, 0.1
#: optimizer, settings -> what three steps without a gradient leave of a tensor of a shape, as its weight_decay says
KEPT = [
    *[(name, {}, lambda shape: (1 - LR * D) ** 3) for name in ("adamw", "nadamw", "qhadamw", "ademamix", "lion", "sophia")],
    *[("nadamw", {"convention": c}, lambda shape: (1 - LR * D) ** 3) for c in ("algoperf", "torch")],
    *[("stableadamw", {"convention": c}, lambda shape: (1 - LR * D) ** 3) for c in ("author", "first")],  # the step is lr here
    ("radam", {"decoupled_weight_decay": True}, lambda shape: (1 - LR * D) ** 3),
    ("adan", {}, lambda shape: (1 + LR * D) ** -3),
    ("adan", {"no_prox": True}, lambda shape: (1 - LR * D) ** 3),
    ("adopt", {"decouple": True}, lambda shape: (1 - LR * D) ** 2),  # not at the first
    ("laprop", {}, lambda shape: (1 - D) ** 3),
    ("laprop", {"convention": "timm"}, lambda shape: (1 - LR * D) ** 3),
    ("soap", {}, lambda shape: (1 - LR * D) ** 2),  # not at the first
    ("kronpsgd", {}, lambda shape: (1 - LR * D) ** (3 if len(shape) > 1 else 0)),
    *[("muon", {"convention": c, "otherwise": None}, lambda shape: (1 - LR * D) ** 3) for c in ("keller", "moonlight", "rlx")],
    *[("normuon", {"convention": c, "otherwise": None}, lambda shape: (1 - LR * D) ** 3) for c in ("authors", "dion")],
    (
        "normuon",
        {"convention": "speedrun", "otherwise": None},
        lambda shape: (1 - LR * LR * D * math.sqrt(max(1, shape[0] / math.prod(shape[1:])))) ** 3,
    ),
    ("scion", {}, lambda shape: (1 - LR * D) ** 3),
    ("scion", {"unconstrained": True}, lambda shape: 1.0),
    *[("mars", {"variant": v, "otherwise": None}, lambda shape: (1 - LR * D) ** 3) for v in ("adamw", "lion")],
    ("prodigy", {}, lambda shape: 1.0),  # where no gradient has been, nothing moves
    ("adafactor", {"scale_parameter": False}, lambda shape: (1 - LR * D) ** 3),
    ("adafactor", {"convention": "torch"}, lambda shape: (1 - LR * D) ** 3),
    ("adafactor", {"convention": "rlx"}, lambda shape: (1 - LR * D) ** 3),
]


@both_engines
@pytest.mark.filterwarnings("ignore:Sophia")
@pytest.mark.parametrize(("name", "settings", "kept"), KEPT, ids=lambda x: x if isinstance(x, str) else None)
def test_what_weight_decay_takes_away(name, settings, kept, engine):
    opt = r.create(name, lr=LR, weight_decay=D, engine=engine, **settings)
    shapes = {k: s for k, s in {**SMALL, "tall": (9, 4)}.items() if opt.spec(**settings_of(settings)).takes(s) is None}
    start = tensors(shapes)
    nothing = [{k: np.zeros_like(p) for k, p in start.items()}] * 3
    for k, p in run(opt, start, nothing).items():
        np.testing.assert_allclose(p, start[k] * kept(shapes[k]), rtol=2e-6, err_msg=k)


def settings_of(given):
    return {k: v for k, v in given.items() if k != "otherwise"}


@both_engines
def test_schedule_free_decay_is_taken_from_z(engine):
    """p is b1·x + (1 − b1)·z, so that it shrinks by less than z does."""
    opt, start = r.ScheduleFreeAdamW(lr=LR, weight_decay=D, betas=(0.8, 0.9), engine=engine), tensors(SMALL)
    p = {k: v.astype(float) for k, v in start.items()}
    x, z = dict(p), dict(p)
    for t in range(1, 4):
        for k in p:
            z[k] = z[k] - LR * D * p[k]
            x[k] = x[k] + (z[k] - x[k]) / t
            p[k] = 0.8 * x[k] + 0.2 * z[k]
    found = run(opt, start, [{k: np.zeros_like(v) for k, v in start.items()}] * 3)
    assert_close(p, found, start)
    assert not np.allclose(found["matrix"], start["matrix"] * (1 - LR * D) ** 3, rtol=1e-3)


@both_engines
def test_lamb_with_trust_one_is_adamw(engine):
    """Parameters so large that every ratio is above 1, cut off at 1."""
    start, grads = tensors(size=1e3), gradients()
    settings = {"lr": 100.0, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 1e-3, "engine": engine}
    lamb = run(r.Lamb(**settings, trust_clip=1.0), start, grads)
    assert_close(lamb, run(r.AdamW(**settings), start, grads), start)


@both_engines
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_lamb_moves_by_its_share_of_the_norm(engine, weight_decay):
    """‖step‖ = lr·‖p‖ whatever the gradient and the decay; 1 in place of the ratio where p is 0."""
    opt = r.Lamb(lr=0.1, weight_decay=weight_decay, engine=engine)
    params = tensors() | {"zero": np.zeros(50, np.float32)}
    for t, g in enumerate(gradients()):
        before = {name: p.astype(float) for name, p in params.items()}
        opt.step_all(params, {**g, "zero": np.full(50, 1e-3, np.float32)})
        for name, p in params.items():
            moved, size = np.linalg.norm(p - before[name]), np.linalg.norm(before[name])
            wanted = 0.1 * size if size else 0.1 * math.sqrt(50) / (1 + 1e-3)  # eps is 1e-6, the gradient 1e-3
            assert moved == pytest.approx(wanted, rel=1e-5), (name, t)


@both_engines
def test_sgd_without_momentum_ignores_dampening(engine):
    """To the last bit."""
    start, grads = tensors(), gradients()
    plain = run(r.SGD(lr=0.1, weight_decay=0.1, engine=engine), start, grads)
    damped = run(r.SGD(lr=0.1, weight_decay=0.1, dampening=0.7, engine=engine), start, grads)
    assert all(np.array_equal(plain[name], damped[name]) for name in plain)


@both_engines
def test_lion_moves_by_lr(engine):
    """Every coordinate by lr, to the rounding of p; by nothing where the interpolated momentum is 0."""
    opt, params = r.Lion(lr=0.01, engine=engine), tensors()
    alive = {name: np.random.default_rng(5).random(p.shape) < 0.8 for name, p in params.items()}
    assert not alive["matrix"].all()
    for g in gradients():
        before = {name: p.copy() for name, p in params.items()}
        opt.step_all(params, {name: np.array(np.where(alive[name], x, 0), np.float32) for name, x in g.items()})
        for name, p in params.items():
            moved = np.abs(p.astype(float) - before[name])
            assert (np.abs(moved - 0.01) <= np.spacing(np.abs(p).max()))[alive[name]].all(), name
            assert not moved[~alive[name]].any(), name


# ---- LARS, Adan, ADOPT, AdEMAMix ----------------------------------------------------------------------------------------
@both_engines
@pytest.mark.parametrize("convention", ["optax", "timm"])
def test_lars_moves_by_its_share_of_the_norm(engine, convention):
    """‖step‖ = lr·trust_coefficient·‖p‖ whatever the gradient; 1 in place of the ratio where p is 0."""
    opt = r.LARS(lr=0.5, momentum=0.0, trust_coefficient=0.2, convention=convention, engine=engine)
    params = tensors() | {"zero": np.zeros(50, np.float32)}
    for t, g in enumerate(gradients()):
        before = {name: p.astype(float) for name, p in params.items()}
        opt.step_all(params, {**g, "zero": np.full(50, 1e-3, np.float32)})
        for name, p in params.items():
            moved, size = np.linalg.norm(p - before[name]), np.linalg.norm(before[name])
            assert moved == pytest.approx(0.1 * size if size else 0.5 * 1e-3 * math.sqrt(50), rel=1e-5), (name, t)


@both_engines
def test_lars_conventions_divide_by_other_norms(engine):
    """‖g + weight_decay·p‖ or ‖g‖ + weight_decay·‖p‖: equal where p is along g, and where not, longer steps in "optax"."""
    settings = {"lr": 0.5, "momentum": 0.0, "trust_coefficient": 0.2, "weight_decay": 0.7, "engine": engine}
    start, (across,) = tensors(), gradients(steps=1)
    along = {name: 3 * p for name, p in start.items()}
    optax, timm = (run(r.LARS(**settings, convention=c), start, [along]) for c in ("optax", "timm"))
    assert_close(optax, timm, start)
    optax, timm = (run(r.LARS(**settings, convention=c), start, [across]) for c in ("optax", "timm"))
    for name, p in start.items():
        d = across[name] + 0.7 * p
        ratio = (np.linalg.norm(across[name]) + 0.7 * np.linalg.norm(p)) / np.linalg.norm(d)
        assert np.linalg.norm(optax[name] - p) == pytest.approx(ratio * np.linalg.norm(timm[name] - p), rel=1e-4), name


@both_engines
def test_adan_clips_all_gradients_together(engine):
    """Adan with max_grad_norm is Adan on gradients clipped by the norm of all of them."""
    start, grads = tensors(SMALL), gradients(SMALL)
    clipped = []
    for g in grads:
        length = math.sqrt(sum(np.square(x, dtype=float).sum() for x in g.values()))
        clipped.append({name: x * min(1, 20 / (length + 1e-8)) for name, x in g.items()})
    assert 0 < sum(np.array_equal(a["matrix"], b["matrix"]) for a, b in zip(grads, clipped, strict=True)) < STEPS
    settings = {"lr": 0.01, "betas": (0.8, 0.7, 0.9), "weight_decay": 0.3, "engine": engine}
    assert_close(run(r.Adan(**settings, max_grad_norm=20), start, grads), run(r.Adan(**settings), start, clipped), start)


@both_engines
def test_adan_shrinks_p_after_the_step(engine):
    """Without gradients p is divided by 1 + lr·weight_decay; with no_prox it is multiplied by 1 − lr·weight_decay."""
    start = tensors()
    nothing = [{name: np.zeros_like(p) for name, p in start.items()}] * 5
    for no_prox, factor in ((False, 1.5**-5), (True, 0.5**5)):
        after = run(r.Adan(lr=0.5, weight_decay=1.0, no_prox=no_prox, engine=engine), start, nothing)
        assert_close({name: p * factor for name, p in start.items()}, after, start)


@both_engines
@pytest.mark.parametrize("decouple", [False, True])
def test_adopt_moves_nothing_first_and_then_at_most_lr(engine, decouple):
    """The first call sets v alone. With clip_exp 0 no divided gradient is above 1, so no coordinate moves farther than lr."""
    start, grads = tensors(), gradients()
    opt = r.ADOPT(lr=0.01, weight_decay=0.3, decouple=decouple, engine=engine)
    params = {name: p.copy() for name, p in start.items()}
    opt.step_all(params, grads[0])
    for name, p in start.items():
        assert np.array_equal(params[name], p)
        assert not opt.state(name)["m"].any()
        d = grads[0][name] + (0 if decouple else np.float32(0.3)) * p
        assert np.allclose(opt.state(name)["v"], d * d, rtol=1e-5)
    opt, params = r.ADOPT(lr=0.01, clip_exp=0, engine=engine), tensors()
    for g in grads:
        before = {name: p.copy() for name, p in params.items()}
        opt.step_all(params, g)
        assert all(np.abs(p - before[name]).max() <= 0.01 + np.spacing(np.abs(p).max()) for name, p in params.items())


@both_engines
@pytest.mark.parametrize("clip_exp", [None, 100.0])
def test_adopt_divides_by_the_moment_before(engine, clip_exp):
    """Without momentum a step is the gradient over the v that has not seen it; any power clips the second step at 1, None none."""
    start, grads = tensors(), gradients()
    found = run(r.ADOPT(lr=0.01, betas=(0, 0.9), clip_exp=clip_exp, engine=engine), start, grads)
    wanted = {}
    for name, p in start.items():
        p, v = p.astype(float), np.square(grads[0][name], dtype=float)
        for t, g in enumerate(grads[1:], 2):
            g = g[name].astype(float)
            q = g / np.maximum(np.sqrt(v), 1e-6)
            p, v = p - 0.01 * (np.clip(q, -1, 1) if t == 2 and clip_exp else q), 0.9 * v + 0.1 * g**2
        wanted[name] = p
    assert_close(wanted, found, start)


@pytest.mark.parametrize("warmup", [10, 10_000])
def test_ademamix_warms_up_along_half_lives(warmup):
    """The memory of m2 grows by equal parts of its half-life, from b1's; it is the authors' formula, step by step."""
    spec = r.registry.spec_class("ademamix")(beta3_warmup=warmup, alpha_warmup=warmup / 2)

    def f(beta):
        return math.log(0.5) / math.log(beta + 1e-8) - 1

    for t in (1, 2, warmup // 3, warmup - 1, warmup, warmup + 1):
        numbers, x = spec.scalars(t, {}), (1 - t / warmup) * f(0.9) + t / warmup * f(0.9999)
        want = 0.5 ** (1 / (x + 1)) if t < warmup else 0.9999
        assert numbers["beta3"] == pytest.approx(want, abs=1e-12)
        assert numbers["alpha3"] == pytest.approx(1 - want, rel=1e-8)
        assert numbers["share"] == pytest.approx(2 * min(1, 2 * t / warmup))


@both_engines
def test_laprop_follows_a_rate_that_changes(engine):
    """lr is in m as it was when a gradient came; the correction is the average of rates over the present one. At rate 0 p stays."""
    rates = [0.0, 0.01, 0.02, 0.005, 0.01, 0.0, 0.03]
    opt, params = r.LaProp(lr=lambda i: rates[i], betas=(0.8, 0.9), engine=engine), tensors()
    start = {name: p.astype(float) for name, p in params.items()}
    wanted = {name: [p, 0.0, 0.0] for name, p in start.items()}
    average = 0.0
    for t, (rate, g) in enumerate(zip(rates, gradients(), strict=False), 1):
        opt.step_all(params, g)
        average = 0.8 * average + 0.2 * rate
        for name, (p, m, v) in wanted.items():
            x = g[name].astype(float)
            v = 0.9 * v + 0.1 * x**2
            m = 0.8 * m + 0.2 * rate * x / (np.sqrt(v / (1 - 0.9**t)) + 1e-15)
            wanted[name] = [p - (m * rate / average if rate else 0), m, v]
    assert_close({name: each[0] for name, each in wanted.items()}, params, start)


# ---- NAdamW -------------------------------------------------------------------------------------------------------------
@both_engines
def test_nadamw_algoperf_formula(engine):
    """The one convention without a peer: the numerator is (b1·m + (1 − b1)·g)/bc1."""
    start, grads = tensors(), gradients()
    found = run(r.NAdamW(**ADAM, weight_decay=0.3, convention="algoperf", engine=engine), start, grads)
    (b1, b2), lr, eps = ADAM["betas"], ADAM["lr"], ADAM["eps"]
    wanted = {}
    for name, p in start.items():
        p, m, v = p.astype(float), 0.0, 0.0
        for t, g in enumerate(grads, 1):
            g = g[name].astype(float)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            p = p - lr * 0.3 * p - lr * (b1 * m + (1 - b1) * g) / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        wanted[name] = p
    assert_close(wanted, found, start)


# ---- MARS ---------------------------------------------------------------------------------------------------------------
@both_engines
@pytest.mark.parametrize("variant", ["adamw", "lion"])
def test_mars_clips_at_clip_norm(engine, variant):
    """Without eps the step does not see the scale of the gradient: clipping at 8 is clipping g/8 at 1."""
    start, grads = tensors(), gradients()
    settings = {"lr": 0.01, "eps": 0, "gamma": 0.3, "variant": variant, "otherwise": None, "engine": engine}
    at_8 = run(r.MARS(**settings, clip_norm=8.0), start, grads)
    at_1 = run(r.MARS(**settings, clip_norm=1.0), start, [{name: x / 8 for name, x in g.items()} for g in grads])
    assert_close(at_8, at_1, start)


@both_engines
def test_mars_corrects_the_gradient(engine):
    """MARS on g is AdamW on c = g + gamma·b1/(1 − b1)·(g − g_prev), g_prev = 0 at first."""
    start, grads = tensors(), gradients()
    gain = 0.3 * 0.8 / 0.2
    previous = [{name: np.zeros_like(x) for name, x in start.items()}, *grads]
    corrected = [
        {name: g[name] + gain * (g[name].astype(float) - old[name]) for name in g}
        for g, old in zip(grads, previous, strict=False)
    ]
    mars = run(r.MARS(**ADAM, gamma=0.3, clip_norm=None, otherwise=None, engine=engine), start, grads)
    assert_close(mars, run(r.AdamW(**ADAM, weight_decay=0, engine=engine), start, corrected), start)


# ---- Muon ---------------------------------------------------------------------------------------------------------------
MATRICES = {"matrix": (19, 23), "tall": (40, 12), "conv": (8, 4, 3, 3)}


def muon(engine, start, grads, **settings):
    return run(r.Muon(**{"lr": 0.1, "otherwise": None, "engine": engine, **settings}), start, grads)


@both_engines
@pytest.mark.parametrize(("scale", "eps"), [(1024.0, 0.0), (2.0**-20, 0.0), (1024.0, 1024 * 0.5), (0.25, 0.25 * 0.5)])
def test_muon_does_not_see_the_scale_of_the_gradient(engine, scale, eps):
    """To eps/‖u‖: with eps scaled along, or none, exactly."""
    start, grads = tensors(MATRICES), gradients(MATRICES)
    scaled = [{name: scale * x for name, x in g.items()} for g in grads]
    plain = muon(engine, start, grads, eps=eps / scale)
    assert_close(plain, muon(engine, start, scaled, eps=eps), start)


@both_engines
@pytest.mark.parametrize("shape", [(24, 24), (24, 40), (40, 24)])
def test_muon_evens_out_singular_values(engine, shape):
    """Above 0.003·‖u‖ to [0.68, 1.21]; smaller ones stay small; the singular vectors stay what they are."""
    rng = np.random.default_rng(3)
    values = np.geomspace(1, 1e-6, 24)
    left, right = orthogonal(shape[0], rng)[:, :24], orthogonal(shape[1], rng)[:, :24]
    g = {"w": np.array((left * values) @ right.T, np.float32)}
    start = {"w": np.zeros(shape, np.float32)}
    after = muon(engine, start, [g], lr=1.0, momentum=0.0, convention="keller")["w"]
    core = left.T @ -after.astype(float) @ right / math.sqrt(max(1, shape[0] / shape[1]))
    made, share = np.diag(core), values / np.linalg.norm(values)
    assert np.abs(core - np.diag(made)).max() < 1e-3
    large = share > 0.003
    assert large.sum() == 10
    assert made[large].min() > 0.68
    assert made[large].max() < 1.21
    assert (made[~large] < 3.4445**5 * share[~large] + 1e-3).all()
    assert made[-1] < 0.01


@both_engines
def test_muon_of_an_orthogonal_gradient_keeps_its_direction(engine):
    """All singular values are equal, so the step is a multiple of the gradient."""
    g = {"w": np.array(orthogonal(16, np.random.default_rng(4)), np.float32)}
    step = -muon(engine, {"w": np.zeros((16, 16), np.float32)}, [g], lr=1.0)["w"]
    size = (step * g["w"]).sum() / 16
    assert 0.68 < size < 1.21
    assert np.abs(step - size * g["w"]).max() < 1e-5


@both_engines
def test_muon_conventions_differ_by_their_scales(engine):
    """One direction, three lengths; (first, rest) is the shape of a tensor of more dimensions."""
    start, grads = tensors(MATRICES, 0.0), gradients(MATRICES)
    keller, moonlight, rlx = (muon(engine, start, grads, eps=0, convention=c) for c in ("keller", "moonlight", "rlx"))
    for name, shape in MATRICES.items():
        rows, columns = shape[0], math.prod(shape[1:])
        unit = keller[name] / math.sqrt(max(1, rows / columns))
        assert_close({"w": unit * 0.2 * math.sqrt(max(rows, columns))}, {"w": moonlight[name]}, {"w": start[name]})
        if len(shape) == 2:
            assert_close({"w": unit * math.sqrt(max(rows, columns))}, {"w": rlx[name]}, {"w": start[name]}, 5e-5)


@both_engines
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_rlx_is_sgd_on_what_is_no_matrix(engine, nesterov):
    """Its momentum is SGD's, and so is its step where nothing is orthogonalised."""
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) != 2}
    start, grads = tensors(shapes), gradients(shapes)
    rlx = run(r.Muon(lr=0.1, momentum=0.8, nesterov=nesterov, convention="rlx", engine=engine), start, grads)
    assert_close(rlx, run(r.SGD(lr=0.1, momentum=0.8, nesterov=nesterov, engine=engine), start, grads), start)


# ---- Adafactor ------------------------------------------------------------------------------------------------------------
def rank_one(rng, shape=(9, 14)):
    return np.exp(rng.standard_normal(shape[0]))[:, None] * np.exp(rng.standard_normal(shape[1]))


def flat_and_not(settings, grads):
    """The same problem as a matrix, which is factored, and as a vector, which is not."""
    start = tensors({"w": (9, 14)})
    matrix = run(r.Adafactor(**settings), start, [{"w": g} for g in grads])
    flat = {"w": start["w"].reshape(-1)}
    vector = run(r.Adafactor(**settings), flat, [{"w": g.reshape(-1)} for g in grads])
    return {"w": vector["w"].reshape(9, 14)}, matrix, start


@both_engines
@pytest.mark.parametrize(
    "settings", [{}, {"lr": 0.02, "beta1": 0.8, "weight_decay": 0.3}, {"lr": 0.02, "convention": "torch", "clip_threshold": 2.0}]
)
def test_adafactor_is_exact_on_one_rank_one_square(engine, settings):
    """Where every g² is a multiple of one rank-one matrix, rows and columns say it all. Changing ones are not enough."""
    rng = np.random.default_rng(6)
    shape = rank_one(rng)
    same = [10 ** math.sin(t) * shape * rng.choice([-1, 1], shape.shape) for t in range(STEPS)]
    assert_close(*flat_and_not({**settings, "engine": engine}, same))
    changing = [rank_one(rng) * rng.choice([-1, 1], shape.shape) for t in range(STEPS)]
    assert distance(*flat_and_not({**settings, "engine": engine}, changing))["w"] > 0.01


@both_engines
@pytest.mark.parametrize("clip", [0.5, 2.0])
def test_adafactor_rlx_divides_by_its_clip_threshold(engine, clip):
    """On a rank-one square u is √rows·sign(g), so u / max(1, clip·rms(u)) is sign(g)/clip; a given lr is not scaled."""
    rng = np.random.default_rng(7)
    shape = rank_one(rng)
    g = shape * rng.choice([-1, 1], shape.shape)
    start = tensors({"w": shape.shape})
    after = run(r.Adafactor(lr=0.1, clip_threshold=clip, convention="rlx", engine=engine), start, [{"w": g}])
    assert_close({"w": start["w"] - 0.1 / clip * np.sign(g)}, after, start)


@both_engines
@pytest.mark.parametrize(
    "settings", [{}, {"lr": 0.02, "clip_threshold": 0.2, "weight_decay": 0.3}, {"eps": (0.5, 2.0), "beta2_decay": -0.5}]
)
def test_adafactor_rlx_formula(engine, settings):
    """The convention without a peer: only rank 2 is factored, ΣR in place of its mean, √V at least √eps[0]."""
    start, grads = tensors(), gradients()
    found = run(r.Adafactor(**settings, convention="rlx", engine=engine), start, grads)
    rule = {"lr": None, "clip_threshold": 1.0, "weight_decay": 0.0, "eps": (1e-30, 1e-3), "beta2_decay": -0.8, **settings}
    wanted = {}
    for name, p in start.items():
        p, rows, columns, v = p.astype(float), 0.0, 0.0, 0.0
        for t, g in enumerate(grads, 1):
            g, new = g[name].astype(float), t ** rule["beta2_decay"]
            square = g**2 + rule["eps"][0]
            if g.ndim == 2:
                rows = (1 - new) * rows + new * square.mean(1, keepdims=True)
                columns = (1 - new) * columns + new * square.mean(0, keepdims=True)
                v = rows * columns / rows.sum()
            else:
                v = (1 - new) * v + new * square
            u = g / np.maximum(np.sqrt(v), math.sqrt(rule["eps"][0]))
            u /= max(1, rule["clip_threshold"] * math.sqrt(np.square(u).mean()))
            scale = max(rule["eps"][1], math.sqrt(np.square(p).mean()))
            step = min(1e-2, 1 / math.sqrt(t)) * scale if rule["lr"] is None else rule["lr"]
            p = p - step * (u + rule["weight_decay"] * p)
        wanted[name] = p
    assert_close(wanted, found, start)


@both_engines
def test_adafactor_clips_its_rms(engine):
    """rms(step) is at most lr·clip_threshold, and exactly that when a gradient is much larger than all before."""
    rng = np.random.default_rng(8)
    opt = r.Adafactor(lr=0.01, clip_threshold=0.5, scale_parameter=False, engine=engine)
    shapes = {"matrix": (30, 20), "vector": (50,)}
    params = tensors(shapes, 0.0)
    for t in range(6):
        before = {name: p.copy() for name, p in params.items()}
        grads = {name: np.array((100 if t == 5 else 1) * rng.standard_normal(s), np.float32) for name, s in shapes.items()}
        opt.step_all(params, grads)
        for name in shapes:
            moved = math.sqrt(np.square(params[name].astype(float) - before[name]).mean())
            assert moved == pytest.approx(0.005, rel=1e-4) if t in (0, 5) else moved < 0.00501, (name, t)


# ---- SOAP -----------------------------------------------------------------------------------------------------------------
@both_engines
@pytest.mark.parametrize("settings", [{"max_precond_dim": 0}, {"max_precond_dim": 0, "precondition_1d": True}])
def test_soap_without_rotation_is_adamw(engine, settings):
    """With eps before bias correction and decay after the step, on the gradients from the second on."""
    lr, (b1, b2), eps, decay = 0.01, (0.8, 0.9), 0.1, 0.3
    start, grads = tensors(), gradients()
    rule = {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": decay, "precondition_frequency": 3, "engine": engine}
    found = run(r.SOAP(**rule, **settings), start, grads)
    wanted = {}
    for name, p in start.items():
        p, m, v = p.astype(float), 0.0, 0.0
        for t, g in enumerate(grads[1:], 1):
            g = g[name].astype(float)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            p = p - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
            p = p - lr * decay * p
        wanted[name] = p
    assert_close(wanted, found, start)


@both_engines
def test_soap_does_not_see_a_rotation(engine):
    """Gradients in another orthonormal basis give the steps in that basis."""
    rng = np.random.default_rng(9)
    turn = orthogonal(6, rng)
    grads = [rng.standard_normal((6, 30)) for _ in range(STEPS)]
    rule = {"lr": 0.1, "weight_decay": 0, "max_precond_dim": 10, "precondition_frequency": 2, "engine": engine}
    zero = {"w": np.zeros((6, 30), np.float32)}
    plain = run(r.SOAP(**rule), zero, [{"w": g} for g in grads])
    turned = run(r.SOAP(**rule), zero, [{"w": turn @ g} for g in grads])
    assert_close({"w": turn @ plain["w"]}, turned, zero, 1e-4)
    unrotated = run(r.SOAP(**{**rule, "max_precond_dim": 0}), zero, [{"w": g} for g in grads])
    assert np.abs(unrotated["w"] - plain["w"]).max() > 0.1 * np.abs(plain["w"]).max()


# ---- KronPSGD ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("fed", "bar"), [("gradient", 0.1), ("momentum", 0.2)])
def test_kron_whitens_what_it_is_fed(fed, bar):
    """QᵀQ becomes covariance^(−1/2); fed the momentum, √((1 + b1)/(1 − b1)) times that."""
    rng, updates, b1 = np.random.default_rng(10), 2000, 0.9
    mix = [orthogonal(n, rng) * np.geomspace(0.5, 2, n) for n in (5, 4)]
    opt = r.KronPSGD(
        lr=1e-3, beta1=b1, precond_lr=lambda t: 0.1 * 0.05 ** (t / updates), preconditioner_update_probability=1.0,
        momentum_into_precond_update=fed == "momentum", engine="cpu",
    )  # fmt: skip
    p = np.zeros((5, 4), np.float32)
    for g in (mix[0] @ rng.standard_normal((updates, 5, 4)) @ mix[1].T).astype(np.float32):
        opt.step("w", p, g)
        opt.end_iteration()
    q = [opt.state("w")[name].astype(float) for name in ("q1", "q2")]
    assert all(np.array_equal(f, np.triu(f)) for f in q)
    roots = [(vectors / np.sqrt(values)) @ vectors.T for values, vectors in (np.linalg.eigh(f @ f.T) for f in mix)]
    wanted = np.kron(*roots) * (math.sqrt((1 + b1) / (1 - b1)) if fed == "momentum" else 1.0)
    found = np.kron(*(f.T @ f for f in q))
    assert np.linalg.norm(found - wanted) < bar * np.linalg.norm(wanted)


@both_engines
def test_kron_without_updates_is_clipped_momentum(engine):
    """With precond_lr 0 every factor stays at its first value: the step is m̂, at an rms of at most 1.1."""
    start, grads = tensors(SMALL), gradients(SMALL)
    found = run(r.KronPSGD(lr=0.1, beta1=0.8, precond_lr=0, precond_init_scale=0.5, engine=engine), start, grads)
    wanted = {}
    for name, p in start.items():
        p, m = p.astype(float), 0.0
        for t, g in enumerate(grads, 1):
            m = 0.8 * m + 0.2 * g[name]
            u = 0.25 * m / (1 - 0.8**t)  # QᵀQ is precond_init_scale² whatever the number of factors
            p = p - 0.1 * u * min(1, 1.1 / math.sqrt(np.square(u).mean()))
        wanted[name] = p
    assert_close(wanted, found, start)


# ---- Sophia ---------------------------------------------------------------------------------------------------------------
@both_engines
def test_sophia_can_be_a_newton_step(engine):
    """Betas 0, gamma 1, no clip, lr 1: one step to the minimum of a separable quadratic."""
    rng = np.random.default_rng(11)
    opt = r.Sophia(lr=1.0, betas=(0, 0), gamma=1.0, clip=math.inf, weight_decay=0, engine=engine)
    params, goal = tensors(), tensors(seed=12)
    for name, p in params.items():
        h = np.array(np.exp(rng.standard_normal(p.shape)), np.float32)
        opt.update_hessian(name, h)
        opt.step(name, p, np.array(h * (p - goal[name])))
        assert np.abs(p - goal[name]).max() < 2e-6, name


@both_engines
def test_sophia_before_an_estimate_is_a_clipped_sign(engine):
    """h is 0, so the step is clip·sign(m), and one warning says what to call."""
    opt = r.Sophia(lr=0.1, clip=0.5, weight_decay=0, engine=engine)
    params, (g,) = tensors(), gradients(steps=1)
    start = {name: p.copy() for name, p in params.items()}
    with pytest.warns(UserWarning, match="update_hessian") as told:
        opt.step_all(params, g)
    assert len(told) == 1
    assert_close({name: start[name] - 0.05 * np.sign(g[name]) for name in g}, params, start)


# ---- every optimizer --------------------------------------------------------------------------------------------------------
#: p, g -> -p, -g mirrors every trajectory
MIRRORED = [name for name in r.list_optimizers() if name != "sophia"]


@both_engines
@pytest.mark.parametrize("name", MIRRORED)
def test_mirror_image(name, engine):
    """No rule prefers a sign: the problem turned around is the trajectory turned around."""
    shapes = SMALL if name in ("soap", "kronpsgd") else SHAPES
    start, grads = tensors(shapes), gradients(shapes)

    def opt():
        return r.create(name, lr=0.01, engine=engine)

    forth = run(opt(), start, grads)
    back = run(opt(), {n: -p for n, p in start.items()}, [{n: -x for n, x in g.items()} for g in grads])
    assert_close(forth, {n: -p for n, p in back.items()}, start)


# ---- NorMuon and Scion -----------------------------------------------------------------------------------------------------
MATRICES = {"tall": (23, 11), "wide": (9, 21), "square": (12, 12), "conv": (8, 3, 3, 2)}
KELLER = [(3.4445, -4.7750, 2.0315)] * 5
EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def newton_schulz(G, coefficients=KELLER, safety=1.0, eps=1e-7):
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / (safety * np.linalg.norm(X) + eps)
    for a, b, c in coefficients:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


def normuon(p, m, v, g, convention, lr=0.02, decay=0.3, momentum=0.9, beta2=0.8):
    """One step in float64, written from the formulas of each implementation."""
    m = momentum * m + (1 - momentum) * g
    u = m if convention == "dion" else (1 - momentum) * g + momentum * m
    rows, columns = g.shape
    if convention == "authors":
        o = newton_schulz(u)
        v = beta2 * v + (1 - beta2) * (o**2).mean(1, keepdims=True)
        N = o / (np.sqrt(v) + 1e-10)
        N = N * np.linalg.norm(o) / (np.linalg.norm(N) + 1e-10)
        return (1 - lr * decay) * p - lr * np.sqrt(max(1, rows / columns)) * N, m, v
    if convention == "dion":
        o = newton_schulz(u, EXPRESS, 1.02, 1e-8)
        v = beta2 * v + (1 - beta2) * (o**2).mean(1, keepdims=True)
        N = o / (np.sqrt(v) + 1e-8)
        N = N * np.linalg.norm(o) / max(np.linalg.norm(N), 1e-8)
        return (1 - lr * decay) * p - lr * np.sqrt(rows / columns) * N, m, v
    o = newton_schulz(u, EXPRESS, 1.02, 1e-6)
    v = beta2 * v + (1 - beta2) * (o**2).mean(1 if rows >= columns else 0, keepdims=True)
    N = o / np.sqrt(np.maximum(v, 1e-10))
    N = N * np.linalg.norm(o) / max(np.linalg.norm(N), 1e-10)
    step = lr * np.sqrt(max(1, rows / columns))
    return p - step * N - p * (N * p >= 0) * (decay * lr) * step, m, v


@both_engines
@pytest.mark.parametrize("convention", ["authors", "dion", "speedrun"])
def test_normuon_by_the_formulas(convention, engine):
    start, grads = tensors(MATRICES), gradients(MATRICES)
    settings = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "beta2": 0.8}
    got = run(r.NorMuon(**settings, convention=convention, engine=engine), start, grads)
    want = {}
    for name, p in start.items():
        p, m, v = p.astype(np.float64).reshape(len(p), -1), 0.0, 0.0
        for g in grads:
            p, m, v = normuon(p, m, v, g[name].astype(np.float64).reshape(p.shape), convention)
        want[name] = p.reshape(start[name].shape)
    assert_close(got, want, start, 1e-4)


@both_engines
def test_normuons_first_rows_have_one_length(engine):
    """1 − beta2 cancels where the length is restored; in the speedrun's convention the columns of wide matrices do."""
    start, (grads, *_) = tensors(MATRICES), gradients(MATRICES)
    for convention in ("authors", "speedrun"):
        moved = run(r.NorMuon(convention=convention, engine=engine), start, [grads])
        for name, p in moved.items():
            step = (p - start[name]).astype(np.float64).reshape(len(p), -1)
            axis = 0 if convention == "speedrun" and step.shape[0] < step.shape[1] else 1
            assert np.ptp(np.linalg.norm(step, axis=axis)) < 1e-4 * np.linalg.norm(step), (convention, name)


@both_engines
def test_normuon_is_as_long_as_muon(engine):
    start, (grads, *_) = tensors(MATRICES), gradients(MATRICES)
    moved = [run(kind(lr=0.02, engine=engine), start, [grads]) for kind in (r.NorMuon, r.Muon)]
    for name in start:
        lengths = [np.linalg.norm((p[name] - start[name]).astype(np.float64)) for p in moved]
        assert lengths[0] == pytest.approx(lengths[1], rel=1e-4)


@both_engines
def test_unconstrained_scion_is_muon_without_nesterov(engine):
    """Up to its scale: √max(1, rows/columns) with max_scale; √(rows/columns), so that the wide lag behind, without."""
    shapes = {k: v for k, v in MATRICES.items() if len(v) == 2}
    start, grads = tensors(shapes), gradients(shapes)
    muon = run(r.Muon(lr=0.02, momentum=0.9, nesterov=False, engine=engine), start, grads)
    scion = {"lr": 0.02, "momentum": 0.1, "unconstrained": True, "engine": engine}
    assert_close(run(r.Scion(**scion, max_scale=True), start, grads), muon, start)
    plain = run(r.Scion(**scion), start, grads)
    scaled = {k: start[k] + (muon[k] - start[k]) * min(1.0, np.sqrt(shapes[k][0] / shapes[k][1])) for k in start}
    assert_close(plain, scaled, start)


@both_engines
def test_constrained_scion_is_muon_with_decay_one(engine):
    shapes = {"tall": (23, 11), "square": (12, 12)}
    start, grads = tensors(shapes), gradients(shapes)
    muon = run(r.Muon(lr=0.02, momentum=0.9, nesterov=False, weight_decay=1.0, engine=engine), start, grads)
    assert_close(run(r.Scion(lr=0.02, momentum=0.1, engine=engine), start, grads), muon, start)


ROWS, COLUMNS = MATRICES["wide"]
#: norm, other settings -> what a gradient becomes; of a matrix of ROWS rows
LMO = {
    "spectral": ({}, lambda g: newton_schulz(g) * math.sqrt(ROWS / COLUMNS)),
    "spectral, not normalized": ({"normalized": False}, lambda g: newton_schulz(g) * math.sqrt(ROWS)),
    "sign": ({}, lambda g: np.sign(g) / COLUMNS),
    "sign, not normalized": ({"normalized": False}, np.sign),
    "colnorm": ({}, lambda g: g / (np.linalg.norm(g, axis=0) / math.sqrt(ROWS) + 1e-8)),
    "colnorm, normalized": ({"normalized": True}, lambda g: g / (np.linalg.norm(g, axis=0) / math.sqrt(ROWS) * COLUMNS + 1e-8)),
    "colnorm, transposed": ({"transpose": True}, lambda g: g / (np.linalg.norm(g, axis=1)[:, None] / math.sqrt(COLUMNS) + 1e-8)),
    "rownorm": ({}, lambda g: g / (np.linalg.norm(g, axis=1)[:, None] * math.sqrt(COLUMNS) + 1e-8)),
    "rownorm, not normalized": ({"normalized": False}, lambda g: g / (np.linalg.norm(g, axis=1)[:, None] + 1e-8)),
    "rownorm, transposed": ({"transpose": True}, lambda g: g / (np.linalg.norm(g, axis=0) * math.sqrt(ROWS) + 1e-8)),
}


@both_engines
@pytest.mark.parametrize("title", LMO)
def test_scions_norms(title, engine):
    """One step from zero is −lr·scale·lmo(g); vectors, numbers and convolutions take the norm that is theirs."""
    settings, lmo = LMO[title]
    shapes = {"wide": MATRICES["wide"], "vector": (7,), "number": (), "line": (4, 3, 5), "conv": (4, 3, 5, 5)}
    grads = tensors(shapes, seed=5)
    opt = r.Scion(lr=0.5, scale=3.0, norm=title.partition(",")[0], engine=engine, **settings)
    zero = {k: 0 * v for k, v in grads.items()}
    got = {k: v / -1.5 for k, v in run(opt, zero, [grads]).items()}
    g = {k: v.astype(np.float64) for k, v in grads.items()}
    out = 4 / 3 if settings.get("normalized", True) or "spectral" not in title else 4
    want = {"wide": lmo(g["wide"]), "vector": g["vector"] / np.sqrt((g["vector"] ** 2).mean()), "number": np.sign(g["number"])}
    if settings.get("normalized") is not False:
        for name, k in (("line", 5), ("conv", 25)):
            want[name] = (newton_schulz(g[name].reshape(4, -1)) * math.sqrt(out) / k).reshape(shapes[name])
    for name, value in want.items():
        assert np.abs(got[name] - value).max() <= 2e-5 * np.abs(value).max(), name


def test_scions_norms_by_group_and_by_name():
    """A norm for heads and embeddings: by group, and through `otherwise`, which the router finds them by their names."""
    shapes = {"wte.weight": (12, 6), "h.0.weight": (6, 6), "h.0.bias": (6,), "lm_head.weight": (12, 6)}
    start, grads = tensors(shapes), gradients(shapes)
    spectral, sign = {"lr": 0.01, "scale": 50.0}, {"norm": "sign", "scale": 3000.0}
    grouped = run(r.Scion(**spectral, groups=[{"match": ["wte*", "lm_head*"], **sign}]), start, grads)
    opt = r.Scion(**spectral, otherwise=r.Scion(lr=0.01, **sign))
    routed = run(opt, start, grads)
    assert all(np.array_equal(grouped[k], routed[k]) for k in start)
    plain = run(r.Scion(**spectral), start, grads)
    assert [k for k in start if np.array_equal(plain[k], routed[k])] == ["h.0.weight", "h.0.bias"]
    assert "output head (by name)" in opt.routing_report()
