"""What several test files share."""

import re
import sys

import numpy as np
import pytest

import rlx_optim
from rlx_optim.registry import spec_class

NAMES = rlx_optim.list_optimizers()
MATRIX = tuple(name for name in NAMES if spec_class(name).matrix)
REDUCING = ("lamb", "lars", "mars", "adafactor", "stableadamw", "prodigy")
ELEMENTWISE = tuple(name for name in NAMES if name not in MATRIX + REDUCING)
#: one of each kind of rule: what costs long is shown for these in `make test`, for all in `make test-all`
KINDS = ("sgd", "adamw", "lamb", "adafactor", "sophia", "muon", "soap", "kronpsgd", "prodigy", "schedulefreesgd")
SHAPES = {"w": (24, 16), "tall": (40, 8), "wide": (6, 30), "b": (37,), "one": (1,), "s": (), "c": (4, 3, 3, 2)}


def slowly(names, quick=KINDS):
    """These names, those that are not quick marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def make(name, **settings):
    """An optimizer by name, with a learning rate where there is no default."""
    return rlx_optim.create(name, **({"lr": 0.01} if name == "sgd" else {}), **settings)


def problem(shapes=SHAPES, seed=0, steps=1):
    """Parameters, and a list with the gradients of each step."""
    rng = np.random.default_rng(seed)

    def draw(scale):
        return {k: np.asarray(rng.standard_normal(s) * scale, np.float32).reshape(s) for k, s in shapes.items()}

    return draw(1.0), [draw(0.1) for _ in range(steps)]


def copies(arrays):
    return {k: v.copy() for k, v in arrays.items()}


def feed(opt, params, t):
    """Sophia's estimates, every third step, from a seed of their own."""
    if isinstance(opt, rlx_optim.Sophia) and t % 3 == 0:
        for i, (k, p) in enumerate(params.items()):
            noise = np.random.default_rng(1000 * t + i).random(p.shape, dtype=np.float32)
            opt.update_hessian(k, np.asarray(noise * 10, np.float32).reshape(p.shape))


def run(opt, params, gradients, start=0):
    """Step through gradients in place and give the parameters."""
    for t, grads in enumerate(gradients, start):
        feed(opt, params, t)
        opt.step_all(params, grads)
    return params


def distance(got, want, start):
    """max|got − want| over the distance travelled, the worst of all tensors. One unit in the last place of p is free."""
    worst = 0.0
    for k in want:
        free = np.spacing(np.abs(want[k]).max())
        moved = np.abs(want[k].astype(np.float64) - start[k]).max()
        gap = np.abs(got[k].astype(np.float64) - want[k]).max()
        worst = max(worst, max(0.0, gap - free) / max(moved, 1e-30))
    return worst


def same_bits(a, b):
    return all(a[k].tobytes() == b[k].tobytes() for k in b) and a.keys() == b.keys()


def formula_lines(name):
    """The lines of formulas in a rule's docstring: formula and note."""
    module = sys.modules[spec_class(name).__module__]
    found = [line.strip() for line in module.__doc__.splitlines() if line.startswith("    ")]
    return [[*re.split(r"\s{2,}", line, maxsplit=1), ""][:2] for line in found]


#: every optimizer of rlx_optim.torch, with settings under which a few steps show everything it does
TORCH = {
    "SGD": dict(lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": dict(weight_decay=0.01, amsgrad=True),
    "AdamW": {},
    "NAdamW": dict(convention="torch"),
    "RAdam": dict(weight_decay=0.01),
    "QHAdamW": {},
    "StableAdamW": {},
    "Prodigy": dict(d0=0.05, weight_decay=0.01),
    "AdEMAMix": dict(weight_decay=0.01, alpha_warmup=4, beta3_warmup=5),
    "Adan": dict(weight_decay=0.01),
    "ADOPT": dict(weight_decay=0.01),
    "LaProp": dict(weight_decay=0.01),
    "Lamb": {},
    "LARS": dict(lr=10.0, weight_decay=0.01),
    "Adafactor": dict(weight_decay=0.01),
    "Lion": dict(lr=1e-3, weight_decay=0.1),
    "SOAP": dict(precondition_frequency=3),
    "KronPSGD": dict(weight_decay=0.01),
    "Muon": dict(weight_decay=0.01),
    "Sophia": {},
    "MARS": {},
    "NorMuon": dict(weight_decay=0.01),
    "Scion": dict(momentum=0.1),
    "ScheduleFreeAdamW": dict(weight_decay=0.01, warmup_steps=2),
    "ScheduleFreeSGD": dict(lr=0.05, weight_decay=0.01),
}
