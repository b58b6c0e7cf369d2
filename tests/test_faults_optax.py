"""Faults of the JAX front end that were found from outside: each test fails without its mend."""

import ast
import gc
import inspect
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

from helpers import slowly  # noqa: E402

import rlx_optim  # noqa: E402
from rlx_optim import optax as ours  # noqa: E402
from rlx_optim.engine import BOUND, ArrayEngine  # noqa: E402
from rlx_optim.engines.jax_ import engine_in  # noqa: E402
from rlx_optim.language import REDUCTIONS, checked  # noqa: E402
from rlx_optim.optax.foreign import to_optax  # noqa: E402

FACTORIES = tuple(ours.known())
SOURCES = Path(rlx_optim.__file__).parent.parent


def objective(params):
    return sum(jnp.sum(p * p) for p in jax.tree.leaves(params))


def build(name):
    """A transformation and what its update takes beside the usual."""
    return getattr(ours, name)(learning_rate=0.01), {"obj_fn": objective} if name == "sophia" else {}


# ---- complex leaves --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FACTORIES)
def test_complex_leaves_are_refused(name):
    """Arithmetic is real: a complex leaf or gradient would lose its imaginary part."""
    tx, extra = build(name)
    real, twisted = {"a": {"w": jnp.ones((3, 4))}}, {"a": {"w": jnp.ones((3, 4), jnp.complex64)}}
    title = rf"{name.replace('_', '')}: "
    remedy = "is complex64.*real and imaginary parts as two leaves"
    state = tx.init(real)
    for message, call in [
        (f"{title}'a.w' {remedy}", lambda: tx.init(twisted)),
        (f"{title}'a.w' {remedy}", lambda: jax.eval_shape(tx.init, twisted)),
        (f"{title}'a.w' {remedy}", lambda: tx.update(real, state, twisted, **extra)),
        (f"{title}the gradient of 'a.w' {remedy}", lambda: tx.update(twisted, state, real, **extra)),
    ]:
        with pytest.raises(ValueError, match=f"(?i){message}"):
            call()


# ---- leaves that are whole numbers -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("leaf", [np.array([5, 6], np.int32), np.array([True]), 5], ids=["int32", "bool", "number"])
def test_whole_numbers_are_refused(name, leaf):
    """They were stepped by updates cut to whole numbers: by nothing, mostly."""
    tx, extra = build(name)
    params, floating = {"a": {"w": jnp.ones((3, 4)), "n": leaf}}, {"a": {"w": jnp.ones((3, 4)), "n": jnp.ones(jnp.shape(leaf))}}
    message = rf"(?i){name.replace('_', '')}: 'a.n' is (int32|bool), which no step .* optax.set_to_zero\(\) by optax.partition"
    with pytest.raises(ValueError, match=message):
        tx.init(params)
    with pytest.raises(ValueError, match=message):
        tx.update(floating, tx.init(floating), params, **extra)


def test_whole_numbers_may_stand_beside():
    """The way that the message tells. What optax's own rules make of them, for whoever compares: 5 by a step of 1e-3 is 4."""
    params = {"w": jnp.ones((3, 4)), "n": jnp.array([5, 6])}
    grads = {"w": jnp.ones((3, 4)), "n": jnp.array([1, 1])}
    apart = optax.partition({"w": ours.sgd(1e-3), "n": optax.set_to_zero()}, {"w": "w", "n": "n"})
    moved = optax.apply_updates(params, apart.update(grads, apart.init(params), params)[0])
    assert moved["n"].tolist() == [5, 6]
    assert moved["n"].dtype == params["n"].dtype
    np.testing.assert_allclose(moved["w"], 0.999, rtol=1e-6)
    theirs = optax.sgd(1e-3)
    assert optax.apply_updates(params, theirs.update(grads, theirs.init(params), params)[0])["n"].tolist() == [4, 5]


# ---- stacked ---------------------------------------------------------------------------------------------------------------
STACKED = [
    (ValueError, r"stacked\['block.\*'\] matches no leaf; there are 'blocks.b', 'blocks.s', 'blocks.w'", {"block.*": 1}),
    (ValueError, r"stacked\['blocks.w'\] matches no leaf", {"blocks.*": 0, "blocks.w": 1}),  # the first that matches counts
    (ValueError, r"stacked\['blocks.w'\] must be an integer >= 0, got -1", {"blocks.w": -1}),
    (TypeError, r"stacked\['blocks.w'\] must be an integer >= 0, got True", {"blocks.w": True}),
    (TypeError, r"stacked\['blocks.w'\] must be an integer >= 0, got 1.0", {"blocks.w": 1.0}),
    (ValueError, r"stacked\['blocks.w'\] is 4, but 'blocks.w' has shape \(3, 4, 5\)", {"blocks.w": 4}),
    (ValueError, r"stacked\['blocks.\*'\] is 2, but 'blocks.s' has shape \(3,\)", {"blocks.*": 2}),
    (ValueError, r"stacked\['blocks.w'\] is 3, but 'blocks.w' has shape \(3, 4, 5\): no axis is left", {"blocks.w": 3}),
]  # fmt: skip


@pytest.mark.parametrize("name", ["muon", "soap", "kron_psgd", "mars"])
@pytest.mark.parametrize(("error", "message", "stacked"), STACKED, ids=[repr(row[2]) for row in STACKED])
def test_stacked_that_cannot_be_meant_is_refused(name, error, message, stacked):
    params = {"blocks": {"w": jnp.ones((3, 4, 5)), "b": jnp.ones((3, 4)), "s": jnp.ones(3)}}
    with pytest.raises(error, match=f"(?i){name.replace('_', '')}: {message}"):
        getattr(ours, name)(0.1, stacked=stacked).init(params)


def test_stacked_takes_what_can_be_meant():
    """A glob over layers may take in one number a layer, beside matrices."""
    params = {"blocks": {"w": jnp.ones((3, 4, 5)), "s": jnp.ones(3)}, "x": jnp.ones((2, 2))}
    state = ours.soap(0.1, stacked={"blocks.*": np.int64(1), "x": 0}).init(params)
    assert state.factors["blocks"]["w"]["Q1"].shape == (3, 4, 4)
    assert state.factors["blocks"]["s"] == {}
    assert state.factors["x"]["Q1"].shape == (2, 2)


# ---- nothing grows outside jit -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", slowly(["adamw", "adafactor", "soap", "muon", "kron_psgd", "sophia"], ["soap", "sophia"]))
def test_eager_updates_leave_nothing_behind(name):
    """Nothing of a step outside jit stays in a cache, and nothing is compiled again: fifty steps take seconds, not a minute."""
    tx, extra = build(name)
    params = {"w": jnp.linspace(0.1, 1.0, 12).reshape(3, 4), "b": jnp.ones(3)}
    state = tx.init(params)

    def steps(n):
        nonlocal state
        for _ in range(n):
            _, state = tx.update(params, state, params, **extra)
        gc.collect()
        return len(gc.get_objects()), checked.cache_info().currsize, sum(map(len, BOUND.values())), len(BOUND)

    before = steps(22)  # two refreshes of SOAP's basis, three estimates of Sophia's
    after = steps(50)
    assert after[0] - before[0] < 50
    assert after[1:] == before[1:]


def test_an_engine_that_is_dropped_takes_its_rules_along():
    class Own(ArrayEngine):
        pass

    def rule(p, g):
        p = p - g
        return p

    engine, before = Own(), len(BOUND)
    assert engine.bind_rule(rule) is engine.bind_rule(rule)
    assert len(BOUND) == before + 1
    del engine
    gc.collect()
    assert len(BOUND) == before


@pytest.mark.parametrize("name", ["soap", "kron_psgd", "sophia"])
def test_eager_updates_are_those_of_jit(name):
    """Outside jit a branch is taken, not traced."""
    tx, extra = build(name)
    rng = np.random.default_rng(0)
    start = {"w": jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)}
    grads = [{"w": jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)} for _ in range(12)]

    def advance(params, state, g):
        updates, state = tx.update(g, state, params, **extra)
        return optax.apply_updates(params, updates), state

    ends = []
    for step in (advance, jax.jit(advance)):
        params, state = start, tx.init(start)
        for g in grads:
            params, state = step(params, state, g)
        ends.append(params["w"])
    assert np.abs(ends[0] - ends[1]).max() < 1e-4 * np.abs(ends[1] - start["w"]).max()


# ---- numbers as leaves -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(
    "leaf", [1.5, np.float64(1.5), np.float16(1.5), np.full((2, 3), 1.5), np.float32(1.5)], ids=lambda x: type(x).__name__
)
def test_numbers_and_numpy_arrays_are_leaves(name, leaf):
    """They step as the arrays that JAX makes of them, and updates are arrays of that dtype."""
    tx, extra = build(name)
    ends = []
    for params in ({"w": leaf}, {"w": jnp.asarray(leaf)}):
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(params, state, params, **extra)
        ends.append((updates["w"], state))
    got, want = ends[0][0], ends[1][0]
    assert isinstance(got, jax.Array)
    assert got.dtype == want.dtype == jnp.asarray(leaf).dtype
    assert got.shape == np.shape(leaf)
    assert (np.asarray(got) == np.asarray(want)).all()
    assert jax.tree.structure(ends[0][1]) == jax.tree.structure(ends[1][1])


def test_numbers_are_leaves_of_checkpoints_and_reports(tmp_path):
    params, tx = {"w": 1.5, "x": np.ones(3)}, ours.adamw(0.1)
    _, state = tx.update(params, tx.init(params), params)
    ours.save_state(tmp_path / "a", tx, state, params)
    again = ours.load_state(tmp_path / "a", tx, params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, state))
    assert "scalar" in ours.routing_report("muon", params)


@pytest.mark.parametrize("wrong", [None, [1.0, 2.0], "x"], ids=repr)
def test_what_is_no_array_is_refused_by_name(wrong):
    params, tx = {"w": jnp.ones(2)}, ours.adamw(0.1)
    with pytest.raises(TypeError, match=r"AdamW: the gradient of 'w' is .*neither an array nor a number"):
        tx.update({"w": wrong}, tx.init(params), params)


# ---- states that are not ours -----------------------------------------------------------------------------------------------------
def test_save_state_says_what_it_takes(tmp_path):
    """Another's transformation or state: refused in words, and no file is written."""
    params, tx = {"w": jnp.ones((2, 2))}, ours.adamw(0.1)
    chain, injected = optax.chain(optax.clip(1.0), tx), optax.inject_hyperparams(ours.adamw)(0.1)
    two = optax.chain(tx, ours.lion(0.1))
    for error, message, given, state in [
        (TypeError, "made by rlx_optim.optax", optax.adamw(0.1), optax.adamw(0.1).init(params)),
        (TypeError, "made by rlx_optim.optax", None, tx.init(params)),
        (TypeError, "has 2 of them; save each", two, two.init(params)),
        (TypeError, "AdamW: state must be what this tx's init.*got tuple", tx, chain.init(params)),
        (TypeError, "AdamW: state must be what this tx's init.*got InjectStatefulHyperparamsState", tx, injected.init(params)),
        (TypeError, "AdamW: state must be what this tx's init", chain, optax.adamw(0.1).init(params)),
        (ValueError, "AdamW: state has 'm', but this tx keeps 'm', 'v'", tx, ours.lion(0.1).init(params)),
    ]:
        with pytest.raises(error, match=message):
            ours.save_state(tmp_path / "a", given, state, params)
    with pytest.raises(TypeError, match="AdamW: state must be what"):
        to_optax(tx, chain.init(params), params, optax.adamw(0.1).init(params))
    assert list(tmp_path.iterdir()) == []
    ours.save_state(tmp_path / "a", tx, chain.init(params)[1], params)  # the chain's part


HOLDERS = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), ours.soap(3e-3)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("muon", ours.muon(0.02))),
    "inject": lambda: optax.inject_hyperparams(ours.adamw)(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.3),
    "chain in inject": lambda: optax.inject_hyperparams(lambda learning_rate: optax.chain(optax.clip(1.0), ours.lion(learning_rate)))(0.1),
    "MultiSteps": lambda: optax.MultiSteps(ours.adamw(optax.linear_schedule(0.1, 0.0, 10)), 2),
    "masked": lambda: optax.masked(ours.lamb(0.01), {"w": True, "b": False}),
    "schedule": lambda: optax.chain(ours.adamw(1.0), optax.scale_by_schedule(optax.linear_schedule(0.1, 0.0, 10))),
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
def test_our_part_of_what_holds_it_is_saved_and_goes_on_bit_for_bit(holder, tmp_path):
    tx, params = HOLDERS[holder](), {"w": jnp.linspace(0.1, 1.0, 12).reshape(4, 3), "b": jnp.ones(3)}
    start, update = tx.init(params), jax.jit(tx.update)

    def walk(params, state, steps):
        for i in range(steps):
            updates, state = update(jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 2)), params), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = walk(params, start, 4)
    ours.save_state(tmp_path / "a.safetensors", tx, state, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = ours.load_state(tmp_path / "a.safetensors", HOLDERS[holder](), params)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    ends = [walk(params, each, 4)[0] for each in (state, again)]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *ends))
    assert not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ends[0], walk(params, start, 4)[0]))


def test_what_else_a_chain_keeps_begins_anew_with_a_warning(tmp_path):
    params = {"w": jnp.ones((2, 2))}
    tx = optax.chain(optax.trace(0.9), ours.sgd(0.1))
    ours.save_state(tmp_path / "a.safetensors", tx, tx.init(params), params)
    with pytest.warns(UserWarning, match=r"SGD: the file has the part of rlx_optim alone; state\[0\].trace\['w'\] begins anew"):
        ours.load_state(tmp_path / "a.safetensors", tx, params)
    steps = optax.MultiSteps(ours.sgd(0.1), 2)
    _, state = steps.update(params, steps.init(params), params)
    with pytest.raises(ValueError, match="SGD: MultiSteps has gathered 1 gradients that would be lost"):
        ours.save_state(tmp_path / "b.safetensors", steps, state, params)


def test_injected_settings_are_those_of_the_file(tmp_path):
    params, tx = {"w": jnp.ones((2, 2))}, optax.inject_hyperparams(ours.adamw)(0.1, b2=0.5)
    state = tx.init(params)
    state.hyperparams["learning_rate"], state.hyperparams["b1"] = jnp.float32(0.25), jnp.float32(0.75)
    ours.save_state(tmp_path / "a.safetensors", tx, state, params)
    loaded = rlx_optim.load(tmp_path / "a.safetensors").hyperparameters()
    assert (loaded["lr"], loaded["betas"], loaded["eps"]) == (0.25, (0.75, 0.5), float(np.float32(1e-8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = ours.load_state(tmp_path / "a.safetensors", tx, params)
    assert again.hyperparams == state.hyperparams


# ---- types ------------------------------------------------------------------------------------------------------------------------
PROGRAM = """
import optax
import rlx_optim
from rlx_optim.optax import RuleState, adafactor, adamw, load_state, muon, routing_report, save_state, sophia

params = {"w": 1.0}
tx = adamw(optax.cosine_decay_schedule(1e-3, 100), 0.9, weight_decay=0.1, mask=lambda p: p)
state = tx.init(params)
updates, state = tx.update(params, state, params)
chain = optax.chain(optax.clip(1.0), muon(0.02, otherwise=rlx_optim.AdamW(lr=3e-4), stacked={"w": 1}))
other = muon(0.02, otherwise=adamw(1e-3), route=lambda path, leaf: None)
text: str = routing_report("muon", params)
more = adafactor(), sophia(1e-3, clip_threshold=None)
save_state("a", tx, state, params)
again: RuleState = load_state("a", tx, params)
"""
WRONG = """
from rlx_optim.optax import adamw, muon
adamw(1e-3, wieght_decay=0.1)
muon(0.1, convention="kellr")
muon(0.1, stacked={"w": "1"})
"""


@pytest.mark.slow  # mypy reads all of jax
def test_a_type_checker_knows_the_factories(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "program.py", "wrong.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(SOURCES)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [line.split(": error: ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert found == ["wrong.py:3", "wrong.py:4", "wrong.py:5"], done.stdout


def test_the_stub_has_what_the_module_has():
    """Every public name, and of every factory the names, kinds and defaults of its arguments."""
    tree = ast.parse((SOURCES / "rlx_optim" / "optax" / "__init__.pyi").read_text())
    stubbed = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert stubbed.keys() == set(FACTORIES)
    others = {"RuleState", "averaged", "create", "load_state", "save_state", "routing_report", "skip_above"}
    assert set(ours.__all__) == {*FACTORIES, *others} == set(dir(ours))
    for name, node in stubbed.items():
        node.body = [ast.Pass()]
        scope = {"__name__": "stub"}
        for each in [*node.args.args, *node.args.kwonlyargs]:
            each.annotation = None
        node.returns = None
        exec(compile(ast.fix_missing_locations(ast.Module([node], [])), name, "exec"), scope)
        written = inspect.signature(scope[name]).parameters.values()
        visible = inspect.signature(getattr(ours, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in written] == [(p.name, p.kind, p.default) for p in visible]


@pytest.mark.parametrize("shape", [(33, 128), (3, 5), (64, 1000), (7, 4096)])
def test_the_largest_keeps_what_is_not_a_number(shape):
    """XLA's largest of a compiled program may lose it on a CPU."""
    engine = engine_in(jnp.float32)
    X = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    largest = {name: how for name, how in REDUCTIONS.items() if how.largest}
    for row, column in ((0, 0), (shape[0] // 2, shape[1] - 1)):
        bad = X.copy()
        bad[row, column] = np.nan
        for name, how in largest.items():
            for given in (X, bad):
                found = np.asarray(jax.jit(lambda x, how=how: engine.reduce_array(x, how))(given))
                want = given.max() if how.axis is None else given.max(how.axis)
                np.testing.assert_array_equal(found, want, err_msg=name)
        assert np.isnan(jax.jit(lambda x: engine.norm(x[None], math.inf))(bad)).all()


# ---- mappings that are no dicts ------------------------------------------------------------------------------------------------
class Kept(Mapping):
    """A mapping with its children in the order they came in."""

    def __init__(self, entries):
        self.entries = tuple(entries)

    def __getitem__(self, name):
        return dict(self.entries)[name]

    def __iter__(self):
        return (name for name, _ in self.entries)

    def __len__(self):
        return len(self.entries)


jax.tree_util.register_pytree_with_keys(
    Kept,
    lambda kept: (tuple((jax.tree_util.DictKey(name), each) for name, each in kept.items()), tuple(kept)),
    lambda names, values: Kept(zip(names, values, strict=True)),
)


def handed_back(tree):
    """A tree with other mappings in the places of its dicts, and the other way round in the order of names."""
    if isinstance(tree, dict):
        return Kept((name, handed_back(tree[name])) for name in sorted(tree, reverse=True))
    if isinstance(tree, tuple):
        return type(tree)(*map(handed_back, tree)) if hasattr(tree, "_fields") else tuple(map(handed_back, tree))
    return tree


def in_dicts(tree):
    if isinstance(tree, Kept):
        return {name: in_dicts(each) for name, each in tree.items()}
    return type(tree)(*map(in_dicts, tree)) if hasattr(tree, "_fields") else tree


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_may_come_back_in_other_mappings(name):
    """flax.nnx does that. The state keeps the tree that it came with, and every step is that of dicts."""
    plain = {"layer": {"w": jnp.linspace(0.1, 1.0, 12).reshape(4, 3), "b": jnp.ones(3)}}
    params = {"dict": plain, "kept": handed_back(plain)}
    tx, beside = build(name)
    states = {"dict": tx.init(plain), "kept": handed_back(tx.init(plain))}
    for i in range(3):
        for kind, p in params.items():
            grads = jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 2)), p)
            updates, state = tx.update(grads, states[kind], p, **beside)
            assert jax.tree.structure(state) == jax.tree.structure(states[kind])
            params[kind], states[kind] = optax.apply_updates(p, updates), state
    for found in (params, states):
        assert jax.tree.structure(in_dicts(found["kept"])) == jax.tree.structure(found["dict"])
        pairs = zip(jax.tree.leaves(in_dicts(found["kept"])), jax.tree.leaves(found["dict"]), strict=True)
        if name not in ("soap", "kron_psgd"):  # whose matrices come in another order of one stack, and end a rounding apart
            assert all(np.array_equal(a, b) for a, b in pairs)
        else:
            assert all(np.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("holder", ["MultiSteps", "skip_above", "apply_if_finite"])
def test_who_compares_two_states_may_have_them_in_other_mappings(holder):
    held = {"MultiSteps": lambda tx: optax.MultiSteps(tx, 2), "skip_above": ours.skip_above,
            "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3)}[holder]  # fmt: skip
    params = {"w": jnp.linspace(0.1, 1.0, 12).reshape(4, 3), "b": jnp.ones(3)}
    tx = held(ours.prodigy(1.0))
    want, got, state, kept = params, handed_back(params), tx.init(params), handed_back(tx.init(params))
    for _ in range(4):
        updates, state = tx.update(want, state, want)
        want = optax.apply_updates(want, updates)
        updates, kept = tx.update(got, kept, got)
        got = optax.apply_updates(got, updates)
    assert all(np.array_equal(got[name], want[name]) for name in params)
    assert not np.array_equal(got["w"], params["w"])


# ---- trees that do not fit ------------------------------------------------------------------------------------------------------
PAIR = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}


@pytest.mark.parametrize(
    ("name", "state", "error", "message"),
    [
        ("adamw", None, TypeError, "AdamW: state must be what this tx's init or update gave, got NoneType"),
        ("adamw", optax.adamw(0.1).init(PAIR), TypeError, "AdamW: state must be .*got tuple"),
        ("adamw", "lion", ValueError, "AdamW: state has 'm', but this tx keeps 'm', 'v'; tx.init"),
        ("muon", "adamw", ValueError, "Muon: the state 'v' of 'w' has shape .3, 2., needed is none such"),
        ("soap", "muon", ValueError, "SOAP: the state .* of 'w' has shape missing, needed is "),
        ("muon", "soap", ValueError, "Muon: the state .* of 'w' has shape .*, needed is none such"),
        ("prodigy", "adamw", ValueError, "Prodigy: state has 'm', 'v', but this tx keeps"),
    ],
)
def test_a_state_of_another_transformation_is_refused(name, state, error, message):
    tx = getattr(ours, name)(0.1)
    given = getattr(ours, state)(0.1).init(PAIR) if isinstance(state, str) else state
    with pytest.raises(error, match=message):
        tx.update(PAIR, given, PAIR)


def test_trees_that_differ_are_refused_in_words(tmp_path):
    tx, one = ours.adamw(0.1), {"w": jnp.ones((3, 2))}
    state = tx.init(PAIR)
    with pytest.raises(ValueError, match="AdamW: the gradients have another tree than the parameters"):
        tx.update(one, state, PAIR)
    with pytest.raises(ValueError, match=r"AdamW: the state was made for other parameters, tx.init"):
        tx.update(one, state, one)
    with pytest.raises(ValueError, match=r"AdamW: the state was made for other parameters, tx.init"):
        ours.save_state(tmp_path / "a", tx, state, one)
    with pytest.raises(ValueError, match=r"AdamW: the state 'm' of 'w' has shape \(3, 2\), needed is \(9, 2\)"):
        ours.save_state(tmp_path / "a", tx, state, {**PAIR, "w": jnp.ones((9, 2))})
    with pytest.raises(ValueError, match="averaged: the state has another tree than the parameters"):
        ours.averaged(ours.schedulefreesgd(0.1).init(PAIR), one)


@pytest.mark.parametrize(
    ("error", "mask"),
    [
        (ValueError, {"w": True}),
        (ValueError, [True, False]),
        (ValueError, lambda params: None),  # a return that was forgotten
        (TypeError, {"w": "yes", "b": "no"}),
        (TypeError, {"w": jnp.array([True, False]), "b": True}),
        (TypeError, True),
    ],
)
def test_masks_that_cannot_be_meant_are_refused(error, mask):
    with pytest.raises(error, match="AdamW: mask must be a tree of booleans like the parameters"):
        ours.adamw(0.1, mask=mask).init(PAIR)


def test_traced_settings_that_cannot_be_meant_are_refused():
    state = ours.sgd(0.1, momentum=0.9).init(PAIR)
    with pytest.raises(TypeError, match=r"SGD: lr must be a finite number >= 0, got .*1\., 1\."):
        ours.sgd(jnp.ones(2), momentum=0.9).update(PAIR, state, PAIR)
    with pytest.raises(TypeError, match="SGD: nesterov cannot be traced"):
        jax.jit(lambda flag: ours.sgd(0.1, momentum=0.9, nesterov=flag).update(PAIR, state, PAIR))(True)
    rates = jnp.array([0.1, 0.2])
    updates = jax.vmap(lambda rate: ours.sgd(rate, momentum=0.9).update(PAIR, state, PAIR)[0])(rates)
    assert np.allclose(updates["b"], -rates[:, None])


def test_what_no_function_or_number_is_is_refused():
    tx = ours.sophia(0.1)
    with pytest.raises(TypeError, match=r"Sophia: update needs obj_fn=, a function of the parameters.*got 5"):
        tx.update(PAIR, tx.init(PAIR), PAIR, obj_fn=5)
    with pytest.raises(TypeError, match=r"skip_above: inner must be a transformation.*got 5"):
        ours.skip_above(5)
    guarded = ours.skip_above(ours.adamw(0.1))
    for loss in ("x", jnp.ones(2)):
        with pytest.raises(TypeError, match="skip_above: loss must be a number, got "):
            guarded.update(PAIR, guarded.init(PAIR), PAIR, loss=loss)


def test_skip_above_sums_16_bits_in_32():
    guarded, params = ours.skip_above(ours.sgd(0.1)), {"w": jnp.ones(3000, jnp.bfloat16)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, state = guarded.update(params, guarded.init(params), params)
    assert state.norm[0][0] == np.float32(3000**0.5)
