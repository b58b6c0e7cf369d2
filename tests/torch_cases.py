"""What the tests of the torch front end share."""

import io

import pytest
import torch
from helpers import TORCH as ALL
from torch import nn

import rlx_optim.torch as ours
from rlx_optim.torch import collect

ENGINES = ("cpu", "torch")
SHAPES = {"w": (24, 16), "wide": (6, 30), "b": (37,), "one": (1,), "s": (), "conv": (4, 3, 3, 2)}
every = pytest.mark.parametrize("name", ALL)
on_engines = pytest.mark.parametrize("engine", ENGINES)


def make(name, params, **settings):
    return getattr(ours, name)(params, **{**ALL[name], **settings})


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}


def twins(params):
    return {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}


def give_gradients(params, t, missing=()):
    """The gradients of step t: they depend on t, name and shape alone."""
    for i, (name, p) in enumerate(params.items()):
        generator = torch.Generator().manual_seed(1000 * t + i)
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 0.1
        p.grad = None if name in missing else grad


def curvature(params, t):
    """A loss whose Hessian is diagonal, the same for the same t."""
    scales = [torch.rand(p.shape, generator=torch.Generator().manual_seed(t)).to(p.dtype) * 10 for p in params.values()]
    return scales, lambda: sum((c * p * p).sum() / 2 for c, p in zip(scales, params.values(), strict=True))


def run(opt, params, start, stop):
    for t in range(start, stop):
        if isinstance(opt, ours.Sophia) and t % 3 == 0:
            opt.update_hessian(curvature(params, t)[1])
        give_gradients(params, t)
        opt.step()
    return params


def bits(tensors):
    return {name: t.detach().clone() for name, t in tensors.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def same_state(a, b):
    """Two state_dicts hold the same state, bit for bit."""
    a, b = a["state"], b["state"]
    return a.keys() == b.keys() and all(
        a[i].keys() == b[i].keys()
        and all(torch.equal(torch.as_tensor(a[i][k]), torch.as_tensor(b[i][k])) and type(a[i][k]) is type(b[i][k]) for k in a[i])
        for i in a
    )


def through_disk(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def network(bias):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16, bias), nn.Tanh(), nn.Linear(16, 16, bias), nn.Tanh(), nn.Linear(16, 4, bias))


def moved(params, opt):
    collect.find_ready(opt)[0][0].device = torch.device("cuda", 1)  # as if the state were there
    opt._placements[0].selections.clear()
