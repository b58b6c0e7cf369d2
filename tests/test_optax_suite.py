"""optax's own test suite on ours."""

import ast
import functools
import json
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")


from optax_cases import FACTORIES  # noqa: E402

import rlx_optim  # noqa: E402
from rlx_optim import optax as ours  # noqa: E402

SUITE = json.loads((Path(__file__).parent / "optax_suite.json").read_text())


# ---- optax's own suite ----------------------------------------------------------------------------------------------------------
def suite(name, factory, keywords):
    """optax's common tests of contributed optimizers, from the installed wheel, with our factory in their table."""
    path = Path(optax.contrib.__file__).with_name("_common_test.py")
    if not path.exists():
        pytest.skip("this optax comes without its tests")
    tree = ast.parse(path.read_text(), str(path))
    row = [{"opt_name": name, "opt_kwargs": keywords}]
    for node in tree.body:
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        match node, getattr(target, "id", None):
            case ast.Assign(value=ast.List()), "_MAIN_OPTIMIZERS_UNDER_TEST":
                node.value = ast.parse(repr(row), mode="eval").body
            case ((ast.Assign() | ast.AugAssign()), "_BASE_OPTIMIZERS" | "_MAIN_OPTIMIZERS_UNDER_TEST") if isinstance(
                node.value, ast.List
            ):
                node.value = ast.List([], ast.Load())
    module = types.ModuleType("optax_common_suite")
    with mock.patch.dict(sys.modules, {module.__name__: module}), mock.patch.object(optax.contrib, name, factory, create=True):
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)
        yield from unittest.TestLoader().loadTestsFromModule(module)


def outcome(name, factory, keywords, *patterns):
    """How many tests of optax's suite ran, and what failed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS([sys.argv[0]])
    result = unittest.TestResult()
    for group in suite(name, factory, keywords):
        for test in group:
            if any(pattern in test.id() for pattern in patterns or ("",)):
                test.run(result)
    return result.testsRun, [trace for _, trace in result.errors + result.failures]


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_optax_suite(name):
    """The whole of it, 30,000 steps on each of its four problems included, at the settings on record."""
    ran, failed = outcome(name, getattr(ours, name), SUITE[name])
    assert ran >= 14
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in ("sgd", "lion")])
def test_optax_suite_of_the_others(name):
    factory = getattr(ours, name)
    if name == "normuon":  # as Muon below: all but matrices goes to its otherwise
        factory = functools.partial(factory, otherwise=rlx_optim.AdamW(lr=0.01))
    ran, failed = outcome(name, factory, SUITE[name])
    assert ran >= 14
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["keller", "moonlight"])
def test_optax_suite_muon_with_another_rate_for_the_rest(convention):
    """On record is the convention that takes every tensor: the default `otherwise`, at 3e-4, needs more than 30,000 steps for 11."""
    factory = functools.partial(ours.muon, otherwise=rlx_optim.AdamW(lr=0.01), convention=convention)
    ran, failed = outcome(
        "muon", factory, {"learning_rate": 0.001}, "test_optimizers0", "test_optimizers1", "test_optimizers2", "test_optimizers3"
    )
    assert ran >= 4
    assert failed == []


def test_the_record_covers_all():
    assert SUITE.keys() == set(FACTORIES)
    assert all(kwargs["learning_rate"] > 0 for kwargs in SUITE.values())
