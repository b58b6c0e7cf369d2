"""What the tests of checkpoints share."""

import warnings

import numpy as np
import pytest

from rlx_optim.registry import spec_class

SMALL = {"w": (6, 4), "wide": (3, 8), "b": (5,), "s": (), "c": (2, 3, 2)}
EXTRA = {"sgd": {"momentum": 0.9, "dampening": 0.1}, "nadamw": {"convention": "torch"}, "adamw": {"amsgrad": True}}
EXTRA |= {"soap": {"precondition_frequency": 2}, "kronpsgd": {"preconditioner_update_probability": 0.5}}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*before any estimate.*")
        yield


def state_of(opt):
    """Every slot, counter and count of a named optimizer."""
    names = [name for member in opt._family() for name in member._records]
    return {k: ({s: np.array(a) for s, a in opt.state(k).items()}, opt.step_count(k)) for k in names}


def assert_same_state(a, b):
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name][1] == b[name][1], name
        assert a[name][0].keys() == b[name][0].keys(), name
        for slot, value in a[name][0].items():
            other = b[name][0][slot]
            assert value.shape == other.shape, (name, slot)
            assert value.tobytes() == other.tobytes() or (not value.shape and float(value) == float(other)), (name, slot)


# ---- torch ----------------------------------------------------------------------------------------------------------------
class Torch:
    """One of rlx_optim.torch's classes on copies of parameters, and how to step it."""

    def __init__(self, name, params, engine="auto", prefix="", **settings):
        self.torch = pytest.importorskip("torch")
        import rlx_optim.torch

        self.params = {k: self.torch.nn.Parameter(self.torch.from_numpy(v.copy())) for k, v in params.items()}
        kind = getattr(rlx_optim.torch, spec_class(name).title)
        self.opt = kind([(prefix + k, p) for k, p in self.params.items()], engine=engine, **{**EXTRA.get(name, {}), **settings})

    def run(self, gradients):
        for grads in gradients:
            for k, p in self.params.items():
                p.grad = self.torch.from_numpy(grads[k].copy())
            if hasattr(self.opt, "update_hessian"):
                self.opt.update_hessian(lambda: sum((p**3).sum() for p in self.params.values()), every=3)
            self.opt.step()
        return self

    def values(self):
        return {k: p.detach().numpy().copy() for k, p in self.params.items()}

    def state(self):
        return {
            k: {s: float(v) if s == "batch" else v.clone() for s, v in self.opt.state[p].items()} for k, p in self.params.items()
        }

    def assert_state(self, other):
        mine, theirs = self.state(), other if isinstance(other, dict) else other.state()
        for k in mine:
            assert mine[k].keys() == theirs[k].keys(), k
            for slot in mine[k]:
                a, b = (self.torch.as_tensor(each[k][slot]) for each in (mine, theirs))
                assert a.dtype == b.dtype, (k, slot)
                assert self.torch.equal(a, b), (k, slot)
