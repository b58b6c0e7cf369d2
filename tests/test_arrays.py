"""What a matrix update may call: the table of the documentation is whole, an engine may replace a function, old names warn."""

import re
from pathlib import Path

import numpy as np
import pytest

from rlx_optim import basis, linalg, renamed, rule
from rlx_optim.arrays import Arrays
from rlx_optim.engine import ArrayEngine
from rlx_optim.engines import get_engine
from rlx_optim.spec import Spec

LANGUAGE = Path(__file__).parent.parent / "docs" / "language.md"
#: methods of an engine, beside the operations on arrays, that an update may call
CONTROL = {"map", "each", "by_shape", "cond", "either", "defer", "random", "derive_keys", "probe"}


def test_the_table_of_operations_is_whole():
    operations = {name for name, value in vars(Arrays).items() if not name.startswith("_") and callable(value)}
    words = {name for base in Arrays.__mro__[1:-1] for name, value in vars(base).items() if callable(value)}
    operations |= {name for name in words if not name.startswith("_")}
    operations -= {"dtype", "stored"}
    rows = [line.split("|")[1] for line in LANGUAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `E.")]
    assert sorted(re.findall(r"`E\.(\w+)", " ".join(rows))) == sorted(operations | CONTROL)
    assert all(callable(getattr(ArrayEngine, name)) for name in CONTROL)
    assert len(operations | CONTROL) <= 50


def test_an_engine_replaces_a_function_by_a_method_of_its_name():
    class Own(ArrayEngine):
        def column_dots(self, A, B):
            return -basis.column_dots.default(self, A, B)

    A = np.ones((1, 3, 2))
    assert (basis.column_dots(ArrayEngine(), A, A) == 3).all()
    assert (basis.column_dots(Own(), A, A) == -3).all()


@pytest.mark.parametrize("name", renamed.OPERATIONS)
def test_old_operations_warn_and_work(name):
    with pytest.warns(DeprecationWarning, match=rf"E\.{name} is called .*{renamed.OPERATIONS[name].split('.')[-1]}"):
        assert callable(getattr(get_engine("reference"), name))


@pytest.mark.parametrize("name", renamed.FUNCTIONS)
def test_old_functions_warn_and_work(name):
    with pytest.warns(DeprecationWarning, match=rf"linalg\.{name} is called {renamed.FUNCTIONS[name]}"):
        assert callable(getattr(linalg, name))


@pytest.mark.parametrize(("old", "new"), renamed.WORDS.items())
def test_old_words_of_a_rule_warn_and_work(old, new):
    with pytest.warns(DeprecationWarning, match=rf"rule\.{old} is called {new}"):
        assert getattr(rule, old) is getattr(rule, new)


@pytest.mark.parametrize(("old", "new"), renamed.ATTRIBUTES.items())
def test_old_attributes_of_a_class_warn_and_work(old, new):
    said = {"unfit": {}}.get(old, (lambda self: "said") if old in ("ragged", "replays", "structure") else "said")
    with pytest.warns(DeprecationWarning, match=rf"Old\.{old} is called {new}"):
        Old = type("Old", (Spec,), {old: said, "__module__": __name__})
    assert vars(Old)[new] is said
    assert old not in vars(Old)


def test_an_old_operation_gives_what_the_new_one_does():
    E, X = get_engine("reference"), np.arange(6.0).reshape(1, 2, 3)
    with pytest.warns(DeprecationWarning, match="is called"):
        assert (E.lines(X, -1) == E.sum_squares(X, -1)).all()
    with pytest.warns(DeprecationWarning, match="is called"):
        assert (E.diagonal(X, X) == basis.column_dots(E, X, X)).all()


def test_what_never_was_is_no_attribute():
    with pytest.raises(AttributeError, match="'Reference' object has no attribute 'svd'"):
        get_engine("reference").svd
    with pytest.raises(AttributeError, match=r"rlx_optim\.linalg.*'svd'"):
        linalg.svd
