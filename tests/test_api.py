"""The named-step API: what a user may rely on."""

import copy
import inspect
import itertools
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Mapping

import numpy as np
import pytest
from helpers import NAMES, SHAPES, copies, feed, make, problem, run, same_bits

import rlx_optim
from rlx_optim import schedules
from rlx_optim.registry import FILES, spec_class


def test_names():
    assert rlx_optim.list_optimizers() == NAMES == list(FILES)
    for name in NAMES:
        assert type(make(name)).__name__.lower() == name
    assert isinstance(rlx_optim.create("kron"), rlx_optim.KronPSGD)
    assert isinstance(rlx_optim.create("AdamW", lr=1.0), rlx_optim.AdamW)


@pytest.mark.parametrize("name", NAMES)
def test_signature_documentation_and_repr(name):
    kind = type(make(name))
    parameters = inspect.signature(kind).parameters
    fields = spec_class(name).fields
    assert list(parameters)[: len(fields)] == list(fields)
    assert {"groups", "engine", "precision", "nonfinite"} <= set(parameters)
    assert "Formulas" in kind.__doc__
    assert "When, and what it costs" in kind.__doc__
    assert all(f"{field}=" in repr(make(name)) for field in fields)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("front_end", ["rlx_optim", "rlx_optim.torch", "rlx_optim.optax"])
def test_help_says_every_argument(front_end, name):
    """With type, default and meaning; hyperparameters with what they must be."""
    module = pytest.importorskip(front_end)
    kind = spec_class(name)
    made = getattr(module, kind.optax.factory or name if front_end.endswith("optax") else kind.title)
    said = made.__doc__.partition("\nArguments.\n")[2].splitlines()
    told = dict(itertools.pairwise(said))
    for parameter in inspect.signature(made).parameters.values():
        (line,) = (line for line in said if line.startswith(f"    {parameter.name}: "))
        assert parameter.annotation is not parameter.empty
        assert str(parameter.annotation) in line
        assert (" = " in line) is (parameter.default is not parameter.empty)
        meaning = told[line].strip()
        assert len(meaning) > 10, parameter.name
        assert not meaning.startswith("("), parameter.name  # what it must be is not what it is


@pytest.mark.parametrize(
    ("front_end", "made", "args", "wrong", "right"),
    [
        ("rlx_optim", "AdamW", (), "learning_rate", "lr"),
        ("rlx_optim", "AdamW", (), "weight_deacy", "weight_decay"),
        ("rlx_optim.torch", "AdamW", ([],), "learning_rate", "lr"),
        ("rlx_optim.torch", "AdamW", ([],), "b2", "betas"),
        ("rlx_optim.optax", "adamw", (), "lr", "learning_rate"),
        ("rlx_optim.optax", "muon", (), "weight_decay_mask", "mask"),
        ("rlx_optim.optax", "adamw", (), "betas", "b1"),
        ("rlx_optim.optax", "adamw", (), "beta2", "b2"),
    ],
)
def test_a_wrong_keyword_says_what_it_is_called_here(front_end, made, args, wrong, right):
    with pytest.raises(
        TypeError, match=rf"^{made}: unknown hyperparameter '{wrong}'; known are .*; {wrong} is called {right} here$"
    ):
        getattr(pytest.importorskip(front_end), made)(*args, **{wrong: 1})


def test_where_groups_stand_in_torch_and_what_its_module_shows():
    ours = pytest.importorskip("rlx_optim.torch")
    with pytest.raises(TypeError, match=r"^Muon: unknown hyperparameter 'groups'.*; groups stand in params.*\"weight_decay\": 0"):
        ours.Muon([], groups=[{"match": "*.bias", "weight_decay": 0.0}])
    assert set(dir(ours)) == set(ours.__all__) >= {"AdamW", "create", "clip_grad_norm_"}


@pytest.mark.parametrize(
    ("front_end", "hidden", "extra"), [("torch", "torch", "torch"), ("optax", "jax", "jax"), ("optax", "optax", "jax")]
)
def test_a_missing_extra_says_what_to_install(front_end, hidden, extra):
    program = f"import sys; sys.modules[{hidden!r}] = None; import rlx_optim.{front_end}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert last == f'ModuleNotFoundError: rlx_optim.{front_end} needs {hidden}: pip install "rlx-optim[{extra}]"'


def test_defaults_are_those_of_the_table():
    """A second writing of the table of defaults, from the papers and peers, so that a slip in a rule's file shows."""
    table = {
        "sgd": dict(momentum=0, dampening=0, nesterov=False, weight_decay=0),
        "adam": dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False),
        "adamw": dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, amsgrad=False),
        "nadamw": dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, convention="dozat", momentum_decay=4e-3),
        "radam": dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, decoupled_weight_decay=False, convention="torch"),
        "qhadamw": dict(lr=1e-3, betas=(0.995, 0.999), nus=(0.7, 1.0), eps=1e-8, weight_decay=0.01),
        "stableadamw": dict(lr=2e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2, clip=1.0, convention="author"),
        "ademamix": dict(lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=2.0, eps=1e-8, weight_decay=0, alpha_warmup=None, beta3_warmup=None),
        "adan": dict(lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0, no_prox=False, max_grad_norm=None),
        "adopt": dict(lr=1e-3, betas=(0.9, 0.9999), eps=1e-6, weight_decay=0, decouple=False, clip_exp=0.25),
        "laprop": dict(lr=4e-4, betas=(0.9, 0.999), eps=1e-15, weight_decay=0, convention="author"),
        "lars": dict(lr=1.0, momentum=0.9, weight_decay=0, trust_coefficient=1e-3, eps=0, nesterov=False, convention="optax"),
        "lamb": dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=True, trust_clip=None),
        "adafactor": dict(lr=None, beta2_decay=-0.8, eps=(1e-30, 1e-3), clip_threshold=1.0, weight_decay=0, beta1=None,
                          scale_parameter=True, convention="paper"),
        "lion": dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0),
        "soap": dict(lr=3e-3, betas=(0.95, 0.95), shampoo_beta=None, eps=1e-8, weight_decay=0.01, precondition_frequency=10,
                     max_precond_dim=10000, merge_dims=False, precondition_1d=False),
        "kronpsgd": dict(lr=1e-3, beta1=0.9, weight_decay=0, precond_lr=0.1, precond_init_scale=1.0,
                         preconditioner_update_probability=None, max_size=8192, min_ndim_triangular=2, memory_save_mode=None,
                         momentum_into_precond_update=True, balance_probability=0.01, seed=0, probe=None),
        "muon": dict(lr=0.02, momentum=0.95, nesterov=True, weight_decay=0, ns_steps=5, ns_coefficients=(3.4445, -4.7750, 2.0315),
                     eps=1e-7, convention="keller"),
        "sophia": dict(lr=1e-3, betas=(0.965, 0.99), gamma=0.01, clip=1.0, eps=1e-12, weight_decay=0.1),
        "mars": dict(lr=3e-3, betas=(0.95, 0.99), eps=1e-8, weight_decay=0, gamma=0.025, clip_norm=1.0, variant="adamw"),
        "prodigy": dict(lr=1.0, betas=(0.9, 0.999), beta3=None, eps=1e-8, weight_decay=0, decouple=True, use_bias_correction=False,
                        safeguard_warmup=False, d0=1e-6, d_coef=1.0, growth_rate=None),
        "normuon": dict(lr=0.02, weight_decay=0, momentum=0.95, beta2=0.95, nesterov=None, ns_steps=5, ns_coefficients=None,
                        convention="authors"),
        "scion": dict(lr=1e-3, momentum=1.0, norm="auto", scale=1.0, unconstrained=False, weight_decay=1.0, normalized=None,
                      max_scale=False, transpose=False, ns_steps=5, ns_coefficients=(3.4445, -4.7750, 2.0315)),
        "schedulefreeadamw": dict(lr=2.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, warmup_steps=0, r=0.0,
                                  weight_lr_power=2.0),
        "schedulefreesgd": dict(lr=1.0, momentum=0.9, weight_decay=0, warmup_steps=0, r=0.0, weight_lr_power=2.0),
    }  # fmt: skip
    common = dict(cautious=False, decay="decoupled", state_dtype="float32", rounding="stochastic")
    for name in NAMES:
        given = {"lr": 0.01} if name == "sgd" else {}
        assert rlx_optim.create(name, **given).hyperparameters() == {**given, **table[name], **common}
    muon, normuon = (kind().otherwise.hyperparameters() for kind in (rlx_optim.Muon, rlx_optim.NorMuon))
    assert muon == normuon == dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, amsgrad=False, **common)
    mars = rlx_optim.MARS().otherwise.hyperparameters()
    assert mars == dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, amsgrad=False, **common)


def test_positional_arguments_and_lists():
    opt = rlx_optim.AdamW(0.1, [0.5, 0.6])
    assert opt.lr == 0.1
    assert opt.betas == (0.5, 0.6)
    opt.betas = [0.7, 0.8]
    assert opt.betas == (0.7, 0.8)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_flat_buffers_with_a_shape_equal_shaped_ones(name, engine):
    params, gradients = problem(steps=3)
    want = run(make(name, engine=engine), copies(params), gradients)
    flat, opt = {k: v.reshape(-1).copy() for k, v in params.items()}, make(name, engine=engine)
    for t, grads in enumerate(gradients):
        if name == "sophia" and t % 3 == 0:
            feed(opt, {k: v.reshape(SHAPES[k]) for k, v in flat.items()}, t)
        for k in flat:
            opt.step(k, flat[k], grads[k].reshape(-1), shape=SHAPES[k])
        opt.end_iteration()
    assert same_bits({k: v.reshape(SHAPES[k]) for k, v in flat.items()}, want)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_neither_written_nor_kept(name, engine):
    params, gradients = problem(steps=3)
    before = [copies(g) for g in gradients]
    for grads in gradients:
        for g in grads.values():
            g.flags.writeable = False
    opt = make(name, engine=engine)
    start = copies(params)
    run(opt, params, gradients)
    assert all(same_bits(a, b) for a, b in zip(gradients, before, strict=True))
    for k in params:
        assert not any(np.shares_memory(s, g[k]) for s in opt.state(k).values() for g in gradients)
    # a gradient that changes after the step must not matter: MARS keeps the previous one by value
    again, other = copies(start), make(name, engine=engine)
    for t, grads in enumerate(gradients):
        mine = copies(grads)
        feed(other, again, t)
        other.step_all(again, mine)
        for g in mine.values():
            g[...] = np.nan
    assert same_bits(again, params)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_grad_scale_multiplies_inside_the_pass(name, engine):
    params, gradients = problem(steps=3)
    scaled = [{k: np.asarray(g * np.float32(0.25)) for k, g in grads.items()} for grads in gradients]  # a power of two: exact
    want = run(make(name, engine=engine), copies(params), scaled)
    got, opt = copies(params), make(name, engine=engine)
    for t, grads in enumerate(gradients):
        feed(opt, got, t)
        opt.step_all(got, grads, grad_scale=0.25)
    assert same_bits(got, want)


def test_a_late_tensor_is_corrected_by_its_own_count():
    """t is counted per name: a tensor that joins at iteration 5 moves as one that starts alone."""
    params, gradients = problem(steps=8)
    for name in NAMES:
        late, alone = copies(params), copies(params)
        opt, fresh = make(name), make(name)
        for t, grads in enumerate(gradients):
            names = [k for k in params if k != "w" or t >= 5]
            if name == "sophia" and t == 5:
                opt.update_hessian("w", np.ones(SHAPES["w"], np.float32))
                fresh.update_hessian("w", np.ones(SHAPES["w"], np.float32))
            opt.step_all({k: late[k] for k in names}, {k: grads[k] for k in names})
            if t >= 5:
                fresh.step("w", alone["w"], grads["w"])
                fresh.end_iteration()
        assert late["w"].tobytes() == alone["w"].tobytes(), name
        assert opt.step_count("w") == 3
        assert opt.step_count("b") == 8


class Store(Mapping):
    """A weight store: one buffer, views made on demand."""

    def __init__(self, arrays):
        self.shapes = {k: v.shape for k, v in arrays.items()}
        self.buffer = np.concatenate([v.reshape(-1) for v in arrays.values()])

    def __getitem__(self, name):
        at = 0
        for k, shape in self.shapes.items():
            size = int(np.prod(shape))
            if k == name:
                return self.buffer[at : at + size].reshape(shape)
            at += size
        raise KeyError(name)

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self):
        return len(self.shapes)


def test_step_all_takes_any_mapping_without_copies():
    params, gradients = problem(steps=4)
    store, want = Store(params), copies(params)
    opt, other = make("adamw"), make("adamw")
    for grads in gradients:
        opt.step_all(store, Store(grads))
        other.step_all(want, grads)
    assert same_bits(dict(store), want)


def test_new_gradient_buffers_and_new_parameter_buffers():
    """PointerTable may change every step, of gradients and of parameters, and views of every alignment are right."""
    params, gradients = problem({"w": (33, 7), "b": (5,), "s": ()}, steps=6)
    want = run(make("lamb"), copies(params), gradients)
    opt, now = make("lamb"), copies(params)
    for t, grads in enumerate(gradients):
        shifted = {}
        for k, g in grads.items():
            room = np.empty(g.size + t, np.float32)
            room[t:] = g.reshape(-1)
            shifted[k] = room[t:].reshape(g.shape)
        if t == 3:
            now = copies(now)
        opt.step_all(now, shifted)
    assert same_bits(now, want)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_state_is_by_slot_name_and_read_only(engine):
    slots = {"sgd": (), "adam": ("m", "v"), "adafactor": ("row", "col"), "lion": ("m",), "mars": ("m", "prev", "v"),
             "ademamix": ("m", "slow", "v"), "adan": ("m", "d", "v", "neg"), "laprop": ("m", "v", "lr_average"), "lars": ("m",),
             "soap": ("m", "v", "L1", "L2", "Q1", "Q2"), "kronpsgd": ("m", "q1", "q2", "key", "counter"),
             "sophia": ("m", "h", "estimates"), "muon": ("m",)}  # fmt: skip
    params, gradients = problem({"w": (6, 4)}, steps=1)
    for name, expected in slots.items():
        opt = run_one(make(name, engine=engine), params, gradients)
        assert tuple(opt.state("w")) == expected
        for array in opt.state("w").values():
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    with pytest.raises(KeyError, match="'nobody'"):
        opt.state("nobody")


def run_one(opt, params, gradients):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step_all(copies(params), gradients[0])
    return opt


def test_state_bytes():
    shapes = {"w": (6, 4), "b": (5,)}
    params, gradients = problem(shapes, steps=1)
    expected = {
        "sgd": 0, "adam": 2 * 29 * 4, "lion": 29 * 4, "adafactor": (6 + 4 + 5) * 4, "mars": 3 * 24 * 4 + 2 * 5 * 4,
        "muon": 24 * 4 + 2 * 5 * 4, "soap": 2 * 29 * 4 + 2 * (36 + 16) * 4, "kronpsgd": 29 * 4 + (36 + 16 + 5 + 2 * 4) * 4,
    }  # fmt: skip
    for name, count in expected.items():
        assert run_one(make(name), params, gradients).state_bytes() == count, name


def test_hyperparameters_change_at_the_next_step():
    p, g = np.ones(3, np.float32), np.ones(3, np.float32)
    opt = rlx_optim.SGD(lr=0.5)
    opt.step("p", p, g)
    opt.end_iteration()
    opt.lr = 0.25
    opt.step("p", p, g)
    assert p.tolist() == [0.25] * 3
    assert opt.lr == 0.25


def test_a_structural_change_finds_or_makes_its_state():
    """Momentum switched on late starts with d itself, amsgrad from the v there is."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(7).astype(np.float32) for _ in range(6)]
    for engine in ("reference", "cpu"):
        p, q = np.zeros(7, np.float32), np.zeros(7, np.float32)
        opt, buffer = rlx_optim.SGD(lr=0.1, dampening=0.5, engine=engine), None
        for t, g in enumerate(gradients):
            if t == 3:
                opt.momentum = 0.9
            opt.step_all({"p": p}, {"p": g})
            buffer = None if t < 3 else g.copy() if buffer is None else 0.9 * buffer + 0.5 * g
            q -= np.float32(0.1) * (g if t < 3 else buffer).astype(np.float32)
        np.testing.assert_allclose(p, q, rtol=1e-5)
        opt = rlx_optim.AdamW(engine=engine)
        for t, g in enumerate(gradients):
            opt.amsgrad = t > 2
            opt.step_all({"p": p}, {"p": g})
        assert (opt.state("p")["vmax"] >= opt.state("p")["v"]).all()


# ---- groups, schedules, routing -----------------------------------------------------------------------------------------
def test_groups_override_by_name_first_match_wins():
    names = ["fc.weight", "fc.bias", "norm.bias", "norm.weight"]
    params = {k: np.ones(4, np.float32) for k in names}
    grads = {k: np.ones(4, np.float32) for k in names}
    groups = [{"match": "norm.*", "lr": 0.0}, {"match": "*.bias", "weight_decay": 0.0, "lr": 0.5}]
    for engine in ("reference", "cpu"):
        now = copies(params)
        opt = rlx_optim.SGD(lr=0.25, weight_decay=1.0, groups=groups, engine=engine)
        opt.step_all(now, grads)
        assert {k: float(v[0]) for k, v in now.items()} == {
            "fc.weight": 0.5, "fc.bias": 0.5, "norm.bias": 1.0, "norm.weight": 1.0}  # fmt: skip
        assert opt.hyperparameters("fc.bias")["weight_decay"] == 0.0
        assert opt.hyperparameters("norm.bias")["lr"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_groups_in_one_pass_equal_separate_optimizers(name):
    """Tensors whose numbers differ share a pass; each must get its own."""
    params, gradients = problem(steps=5)
    lr = 0.003
    got = copies(params)
    opt = make(name, groups=[{"match": "[wb]*", "lr": lr}])
    run(opt, got, gradients)
    want = copies(params)
    for names, settings in ((["w", "wide", "b"], {"lr": lr}), (["tall", "one", "s", "c"], {})):
        other = make(name)
        if settings:
            other.lr = lr
        for t, grads in enumerate(gradients):
            feed(other, want, t) if name == "sophia" else None
            other.step_all({k: want[k] for k in names}, {k: grads[k] for k in names})
    assert same_bits(got, want)


def test_a_pattern_that_never_matched_is_reported_once():
    opt = rlx_optim.AdamW(groups=[{"match": "*.bias", "lr": 0.1}, {"match": "nothing.*", "lr": 0.1}])
    with pytest.warns(UserWarning, match=r"'nothing\.\*' matched no parameter") as caught:
        opt.step_all({"a.bias": np.ones(2, np.float32)}, {"a.bias": np.ones(2, np.float32)})
        opt.step_all({"a.bias": np.ones(2, np.float32)}, {"a.bias": np.ones(2, np.float32)})
    assert len(caught) == 1
    assert "a.bias" not in str(caught[0].message)


def test_schedules_are_called_with_the_iteration():
    seen = []

    def lr(iteration):
        seen.append(iteration)
        return 0.5 ** (iteration + 1)

    p, g = np.zeros(1, np.float32), np.ones(1, np.float32)
    opt = rlx_optim.SGD(lr=lr)
    for _ in range(3):
        opt.step("p", p, g)
        opt.step("q", np.zeros(1, np.float32), g)
        opt.end_iteration()
    assert p[0] == -(0.5 + 0.25 + 0.125)
    assert sorted(set(seen)) == [0, 1, 2]
    assert opt.lr is lr
    assert opt.hyperparameters()["lr"] == 0.5**4


def test_every_hyperparameter_may_be_a_schedule():
    params, gradients = problem({"w": (6, 4), "b": (5,)}, steps=4)
    for name in NAMES:
        plain = make(name)
        values = plain.hyperparameters()
        scheduled = {k: (lambda it, v=v: v) for k, v in values.items() if not spec_class(name).fields[k].fixed and k != "probe"}
        got = run(rlx_optim.create(name, **{**values, **scheduled}), copies(params), gradients)
        assert same_bits(got, run(plain, copies(params), gradients)), name


def test_built_in_schedules():
    assert [schedules.constant(0.1)(i) for i in (0, 9)] == [0.1, 0.1]
    assert [schedules.linear_warmup(1.0, 4)(i) for i in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    cosine = schedules.cosine(1.0, 10, end=0.2)
    np.testing.assert_allclose([cosine(i) for i in (0, 5, 10, 20)], [1.0, 0.6, 0.2, 0.2], atol=1e-12)
    both = schedules.warmup_cosine(1.0, 2, 12)
    np.testing.assert_allclose([both(i) for i in (0, 1, 2, 7, 12, 13)], [0, 0.5, 1, 0.5, 0, 0], atol=1e-12)
    wsd = schedules.warmup_stable_decay(1.0, 2, 3, 4, end=0.2)
    np.testing.assert_allclose([wsd(i) for i in (0, 1, 2, 5, 6, 7, 9, 99)], [0, 0.5, 1, 1, 0.8, 0.6, 0.2, 0.2], atol=1e-12)
    for bad in (lambda: schedules.cosine(1.0, 0), lambda: schedules.linear_warmup(1.0, -1), lambda: schedules.constant(float("nan")),
                lambda: schedules.warmup_cosine(1.0, 5, 5), lambda: schedules.warmup_stable_decay(1, 1, 1, 1, shape="step")):  # fmt: skip
        with pytest.raises(ValueError):
            bad()


def test_routing_and_its_report():
    params, gradients = problem(steps=1)
    opt = rlx_optim.Muon(groups=[{"match": "wide", "use": "otherwise"}])
    opt.step_all(params, gradients[0])
    lines = {line.split()[0]: line for line in opt.routing_report().splitlines()}
    assert set(lines) == {"parameter", *params}
    for k, shape in SHAPES.items():
        rule = "Muon" if len(shape) >= 2 and k != "wide" else "AdamW"
        assert rule in lines[k].split(), k
    assert "matches 'wide'" in lines["wide"]
    assert "1 dimensions; Muon takes 2 or more" in lines["b"]
    assert set(opt.state("wide")) == {"m", "v"}
    assert set(opt.state("w")) == {"m"}
    assert opt.hyperparameters("b")["eps"] == 1e-10


def test_otherwise_is_a_whole_optimizer_and_follows_its_owner():
    """Its own groups, schedule and hyperparameters; the owner's engine and iterations."""
    params, gradients = problem({"w": (4, 4), "x.bias": (3,), "y": (3,)}, steps=4)
    lr = schedules.linear_warmup(0.1, 2)
    otherwise = rlx_optim.Lion(lr=lr, groups=[{"match": "*.bias", "lr": 0.5}], engine="cpu")
    opt = rlx_optim.Muon(otherwise=otherwise, engine="reference")
    got = run(opt, copies(params), gradients)
    assert opt.otherwise.engine.name == "reference"
    assert otherwise.iteration == opt.iteration == 4
    alone = rlx_optim.Lion(lr=lr, groups=[{"match": "*.bias", "lr": 0.5}], engine="reference")
    want = {k: params[k].copy() for k in ("x.bias", "y")}
    run(alone, want, [{k: g[k] for k in want} for g in gradients])
    assert same_bits({k: got[k] for k in want}, want)
    assert opt.state_bytes() == 16 * 4 + 6 * 4


@pytest.mark.parametrize("name", [name for name in NAMES if spec_class(name).matrix or spec_class(name).otherwise_default])
def test_help_says_what_otherwise_none_does(name):
    """As it happens in all three front ends: the rule takes a vector, or refuses it."""
    jnp, torch = pytest.importorskip("jax.numpy"), pytest.importorskip("torch")
    from rlx_optim import optax as in_jax
    from rlx_optim import torch as in_torch

    kind = spec_class(name)
    told = "this rule takes them all" if kind.accepts_any_shape else "they are refused"
    vector = np.ones(5, np.float32)
    for made, use in (
        (getattr(rlx_optim, kind.title), lambda make: make(otherwise=None).step("b", vector.copy(), vector)),
        (getattr(in_torch, kind.title), lambda make: make([("b", torch.nn.Parameter(torch.ones(5)))], otherwise=None)),
        (getattr(in_jax, kind.optax.factory or name), lambda make: make(0.01, otherwise=None).init({"b": jnp.ones(5)})),
    ):
        assert f"; None: {told}" in " ".join(inspect.getdoc(made).split())
        if kind.accepts_any_shape:
            use(made)
        else:
            with pytest.raises(ValueError, match="dimensions"):
                use(made)


def test_precision_is_of_arithmetic_and_state_of_the_parameters_type():
    assert "state is as wide as the parameters" in rlx_optim.AdamW.__doc__
    for dtype in (np.float32, np.float64):
        opt = rlx_optim.AdamW(precision="float64", engine="cpu")
        opt.step("w", np.ones((3, 4), dtype), np.ones((3, 4), dtype))
        assert opt.state("w")["m"].dtype == dtype


def test_mars_without_otherwise_takes_every_tensor():
    params, gradients = problem(steps=1)
    opt = rlx_optim.MARS(otherwise=None)
    opt.step_all(params, gradients[0])
    assert all("prev" in opt.state(k) for k in params)


# ---- Sophia, iterations, copies -----------------------------------------------------------------------------------------
def test_update_hessian_before_the_first_step_is_legal_and_used_in_it():
    p, g, h = np.zeros(3, np.float32), np.ones(3, np.float32), np.full(3, 4.0, np.float32)
    opt = rlx_optim.Sophia(lr=1.0, betas=(0.0, 0.0), gamma=1.0, clip=float("inf"), weight_decay=0.0)
    opt.update_hessian("p", h)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step("p", p, g)
    np.testing.assert_allclose(p, -0.25)
    assert opt.state("p")["estimates"] == 1


def test_sophia_without_an_estimate_warns_once_and_steps_by_the_sign():
    p, g = np.zeros(3, np.float32), np.array([2.0, -0.5, 0.0], np.float32)
    opt = rlx_optim.Sophia(lr=0.5, weight_decay=0.0)
    with pytest.warns(UserWarning, match="update_hessian") as caught:
        for name in ("p", "q"):
            opt.step(name, p if name == "p" else p.copy(), g)
    assert len(caught) == 1
    assert p.tolist() == [-0.5, 0.5, 0.0]


def test_iteration_and_step_count():
    opt = rlx_optim.AdamW()
    p, g = np.ones(2, np.float32), np.ones(2, np.float32)
    assert opt.iteration == 0
    opt.step("p", p, g)
    assert opt.iteration == 0
    opt.end_iteration()
    opt.step_all({"p": p}, {"p": g})
    assert opt.iteration == 2
    assert opt.step_count("p") == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on_bit_for_bit(name, how):
    params, gradients = problem(steps=8)
    opt = make(name)
    run(opt, params, gradients[:4])
    twin, mine = how(opt), copies(params)
    run(opt, params, gradients[4:], start=4)
    run(twin, mine, gradients[4:], start=4)
    assert same_bits(mine, params)
    assert twin.iteration == opt.iteration == 8


# ---- helpers ------------------------------------------------------------------------------------------------------------
def test_norm_and_clipping():
    x = np.array([3.0, np.nan, 4.0, np.inf], np.float32)
    assert rlx_optim.l2_norm(x) == 5.0
    assert rlx_optim.l2_norm(np.zeros(0, np.float32)) == 0.0
    big = np.full(10_000, 3e30, np.float32)
    assert rlx_optim.l2_norm(big) == pytest.approx(3e32)
    arrays = [np.full(4, 1.0, np.float32), np.full((2, 6), 2.0, np.float32)]
    norm = np.sqrt(4 + 48)
    assert rlx_optim.global_norm(iter(arrays)) == pytest.approx(norm)
    assert rlx_optim.global_grad_clip_scale((a for a in arrays), 1.0) == pytest.approx(1 / norm, rel=1e-12)
    assert rlx_optim.global_grad_clip_scale(arrays, 100.0) == 1.0
    assert rlx_optim.global_grad_clip_scale([], 1.0) == 1.0
    assert rlx_optim.clip_scale is rlx_optim.global_grad_clip_scale
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            rlx_optim.global_grad_clip_scale(arrays, bad)
    assert arrays[1][0, 0] == 2.0


def test_the_protocol():
    for name in NAMES:
        assert isinstance(make(name), rlx_optim.Optimizer)
    assert not isinstance(object(), rlx_optim.Optimizer)


def test_set_threads():
    try:
        rlx_optim.set_threads(1)
        assert rlx_optim.get_threads() == 1
        rlx_optim.set_threads(10_000)
        assert 1 <= rlx_optim.get_threads() <= 10_000
        for bad in (0, -1, 1.5, "2", True):
            with pytest.raises(ValueError, match="set_threads"):
                rlx_optim.set_threads(bad)
    finally:
        rlx_optim.set_threads(None)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_norm_of_much(dtype):
    """The compiled sum: sizes around a chunk, entries that are not finite, arrays it must leave to NumPy, any number of threads."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(dtype) for n in (0, 1, 32767, 32768, 32769, 400_001)]
    arrays += [rng.standard_normal((300, 200)).astype(dtype).T, np.arange(7), rng.standard_normal(99)[::3].astype(dtype)]
    arrays[3][[5, 99]] = np.nan, np.inf
    before = [a.tobytes() for a in arrays]
    want = math.sqrt(math.fsum(float(np.square(a[np.isfinite(a)].astype(np.float64)).sum()) for a in arrays))
    found = []
    for count in (1, 2, 3):
        rlx_optim.set_threads(count)
        found.append(rlx_optim.global_norm(arrays))
    rlx_optim.set_threads(None)
    assert found[0] == pytest.approx(want, rel=1e-13)
    assert len(set(found)) == 1
    assert [a.tobytes() for a in arrays] == before
    assert rlx_optim.l2_norm(arrays[5]) == pytest.approx(float(np.linalg.norm(arrays[5].astype(np.float64))), rel=1e-13)
    with pytest.raises(TypeError, match="real numbers"):
        rlx_optim.global_norm([arrays[5], np.zeros(3, complex)])


def test_blas_uses_our_threads():
    """Within a step of a matrix rule, and only there, NumPy's BLAS has the number of threads that was set."""
    pool = pytest.importorskip("threadpoolctl")

    def blas():
        return {library["num_threads"] for library in pool.threadpool_info() if library["user_api"] == "blas"}

    seen = []

    def probe(name, t, shape):
        seen.append(blas())
        return np.ones(shape)

    before = blas()
    opt = rlx_optim.KronPSGD(lr=0.1, probe=probe)
    try:
        rlx_optim.set_threads(1)
        opt.step_all({"w": np.ones((4, 3), np.float32)}, {"w": np.ones((4, 3), np.float32)})
    finally:
        rlx_optim.set_threads(None)
    assert seen == [{1}]
    assert blas() == before
