"""Rules whose slots do not fit, or are called what a step calls something else: refused, before any memory is written by them."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rlx_optim.optax as front
import rlx_optim.torch
from rlx_optim import create, registry
from rlx_optim.engines.torch_ import LISTS, ForeachTensor
from rlx_optim.rule import Slot, Spec, like, real, register
from rlx_optim.torch import AdamW


def averaged(g, m, beta):
    m = beta * m + g
    u = m
    return u, m


class Plain(Spec):
    lr: float = real(0.1)
    beta: float = real(0.9)

    def slots(self, shape):
        return like(shape, "m")

    def scalars(self, t, counters):
        return {"beta": self.beta, "step": self.lr}

    def update(self, E, x):
        return E.map(averaged, x)


@pytest.fixture
def made(monkeypatch):
    """A rule like Plain with other methods, known as long as the test lasts."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))

    def make(**methods):
        return register(type("Unfitting", (Plain,), {"__module__": __name__, **methods}))

    return make


def engines(name):
    """What makes and steps a 6x4 parameter in each front end."""

    def numpy(engine):
        opt = create(name, engine=engine)
        opt.step_all({"w": np.ones((6, 4), np.float32)}, {"w": np.ones((6, 4), np.float32)})

    def in_torch(engine):
        p = torch.nn.Parameter(torch.ones(6, 4))
        p.grad = torch.ones(6, 4)
        rlx_optim.torch.Unfitting([p], engine=engine).step()

    def in_jax(_):
        tx = getattr(front, name)(0.1)
        params = {"w": jnp.ones((6, 4))}
        tx.update(params, tx.init(params), params)

    return [(numpy, "reference"), (numpy, "cpu"), (in_torch, "auto"), (in_torch, "torch"), (in_jax, None)]


@pytest.mark.parametrize(("slots", "why"), [
    (lambda self, shape: {"m": Slot((3, 5))}, r"'m' has shape \(3, 5\), but lines up with the parameter: \(6, 4\) is needed"),
    (lambda self, shape: {"m": Slot(shape[:1])}, r"'m' has shape \(6,\)"),
    (lambda self, shape: {"m": Slot(shape[1:], drop=(-1,))}, r"with drop=\(-1,\): \(6,\) is needed"),
    (lambda self, shape: {"m": Slot(shape, drop=None)}, r"'m' has shape \(6, 4\), but lines up with the parameter: \(\) is needed"),
    (lambda self, shape: {"m": shape}, r"'m' is \(6, 4\); a Slot is needed"),
    (lambda self, shape: like(shape, "m", "m_scale"), "'m_scale', as is what 'm' has beside it in fewer bits"),
    (lambda self, shape: like(shape, "m", "_m"), "does not begin with _"),
    (lambda self, shape: {"m": Slot(shape), "a/b": Slot(shape)}, "'a/b'; a name of letters"),
    *((lambda self, shape, word=word: like(shape, "m", word), f"a slot is called '{word}', which a value of every step is")
      for word in ("p", "g", "u", "change", "step", "shrink", "rate", "low", "batch")),
])  # fmt: skip
def test_slots_that_do_not_fit_are_refused_everywhere(made, slots, why):
    made(slots=slots)
    for step, engine in engines("unfitting"):
        # optax asks for shapes of its own first
        with pytest.raises(ValueError, match=why if engine else why.partition(r"\(")[0]):
            step(engine)


def test_a_slot_is_not_called_like_a_counter(made):
    made(slots=lambda self, shape: like(shape, "m", "seen"), counters=lambda self: {"seen": 0.0})
    for step, engine in engines("unfitting"):
        with pytest.raises(ValueError, match="'seen', which a counter is"):
            step(engine)


@pytest.mark.parametrize("word", ["m", "p", "g", "u", "change"])
def test_numbers_are_not_called_like_arrays(made, word):
    made(scalars=lambda self, t, counters: {"beta": self.beta, "step": self.lr, word: 1.0})
    for step, engine in engines("unfitting"):
        with pytest.raises(TypeError, match=f"a number of `scalars` is called '{word}'"):
            step(engine)


@pytest.mark.parametrize("method", ["slots", "scalars"])
def test_a_return_that_was_forgotten_is_told(made, method):
    made(**{method: lambda *_: None})
    for step, engine in engines("unfitting"):
        with pytest.raises(ValueError, match=rf"Unfitting: `?{method}.*got None; does it lack a return\?"):
            step(engine)


def test_a_rate_of_its_own_does_not_go_with_the_hyperball(made):
    made(scalars=lambda self, t, counters: {"beta": self.beta, "step": self.lr, "rate": 1.0})
    create("unfitting")
    with pytest.raises(ValueError, match="a number called 'rate', which decay='hyperball' has of its own"):
        create("unfitting", decay="hyperball").step_all({"w": np.ones((6, 4), np.float32)}, {"w": np.ones((6, 4), np.float32)})


def test_what_check_says_of_a_slot_that_does_not_fit(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rlx_optim.rule import Slot, Spec, real\n\n\ndef averaged(g, m):\n    m = m + g\n    u = m\n    return u, m\n\n\n"
        "class Mine(Spec):\n    lr: float = real(0.1)\n\n    def slots(self, shape):\n        return {'m': Slot((3, 5))}\n\n"
        "    def scalars(self, t, counters):\n        return {'step': self.lr}\n\n"
        "    def update(self, E, x):\n        return E.map(averaged, x)\n"
    )
    command = [sys.executable, "-m", "rlx_optim.cli", "check", "mine:Mine", "--quick"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=with_path(tmp_path), check=False
    )
    assert done.returncode == 1, done.stderr
    assert "'m' has shape (3, 5)" in " ".join(done.stdout.split())


def with_path(folder):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent.parent / "src")]),
        "COLUMNS": "200",
    }


# ---- what a rule takes, under optax -----------------------------------------------------------------------------------------
def test_optax_asks_for_slots_only_of_what_a_rule_takes(made):
    def slots(self, shape):
        rows, columns = shape
        return {"m": Slot((rows, columns))}

    made(slots=slots, takes=lambda self, shape: None if len(shape) == 2 else "two dimensions are needed", accepts_any_shape=False)
    tx = front.unfitting(0.1)
    params = {"w": jnp.ones((6, 4))}
    updates, _ = tx.update(params, tx.init(params), params)
    assert np.allclose(updates["w"], -0.1)


@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "kron_psgd", "scion", "normuon", "adafactor"])
@pytest.mark.parametrize("shape", [(4, 8), (32,), (4,), (8, 1), ()])
def test_a_gradient_of_another_shape_is_refused_by_name(name, shape):
    tx = getattr(front, name)(0.1)
    params = {"w": jnp.ones((8, 4))}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"the gradient of 'w' has shape .*, its parameter \(8, 4\)"):
        tx.update({"w": jnp.ones(shape)}, state, params)


@pytest.mark.parametrize("name", ["adamw", "muon", "soap"])
def test_a_state_for_other_shapes_is_refused_by_name(name):
    tx = getattr(front, name)(0.1)
    state, params = tx.init({"w": jnp.ones((8, 4))}), {"w": jnp.ones((4, 8))}
    with pytest.raises(ValueError, match=r"the state '\w+' of 'w' has shape .*; it was made for other parameters"):
        tx.update(params, state, params)


# ---- numbers that are chosen between, on torch --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_chosen_between_are_of_the_arithmetics_type(dtype, default):
    one = torch.tensor([-1.0, 0.5, 2.0], dtype=dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        x = ForeachTensor([one, one + 1])
        found = LISTS["where"]((x > 0) & (x < 2.5), 0.1, 1 / 3)
    finally:
        torch.set_default_dtype(before)
    for each, given in zip(found, (one, one + 1), strict=True):
        assert each.dtype is dtype
        assert torch.equal(
            each, torch.where((given > 0) & (given < 2.5), torch.tensor(0.1, dtype=dtype), torch.tensor(1 / 3, dtype=dtype))
        )


def test_the_default_type_of_torch_changes_no_step():
    ends = []
    for default, engine in ((torch.float32, "cpu"), (torch.float32, "torch"), (torch.bfloat16, "torch")):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 60, dtype=torch.float64))
        opt = AdamW([p], lr=0.01, weight_decay=0.1, decay="cautious", engine=engine)
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            for t in range(10):
                p.grad = torch.sin(7 * p.detach() + t)
                opt.step()
        finally:
            torch.set_default_dtype(before)
        ends.append(p.detach().clone())
    assert torch.allclose(ends[0], ends[1], rtol=0, atol=1e-14)
    assert torch.equal(ends[1], ends[2])
