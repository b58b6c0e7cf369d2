"""Random sequences of everything the named API can be asked to do, on the cpu engine beside the reference.

The reference checks every call in full and keeps no plan, so whatever the cpu engine remembers of arrays, addresses and numbers
must not show. A refusal must be the same on both, and leave everything as it was. A failure prints the seed:

    play("adamw", seed)
"""

import copy
import pickle
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import ELEMENTWISE, NAMES, make

import rlx_optim
from rlx_optim import schedules

F = np.float32
SHAPES = {"w": (6, 4), "u": (6, 4), "tall": (9, 2), "b": (5,), "s": (), "none": (0,)}
POLICIES = ("propagate", "raise", "skip")
pytestmark = pytest.mark.filterwarnings("ignore")


def drawn(rng, shape, scale=1.0):
    return np.asarray(rng.standard_normal(shape) * scale, F).reshape(shape)


class Side:
    """An optimizer, its parameters and the gradients that stay where they are."""

    def __init__(self, name, engine, settings, seed):
        rng = np.random.default_rng(seed)
        # float64 on both sides: what elementwise rules compute is then the same to the bit
        self.engine = {"engine": engine, "precision": "float64"}
        self.opt = make(name, **copy.deepcopy(settings), **self.engine)
        self.params = {k: drawn(rng, shape) for k, shape in SHAPES.items()}
        self.grads = {k: np.zeros(shape, F) for k, shape in SHAPES.items()}
        self.given = {}  # schedules, which a checkpoint wants again

    def knows(self, name):
        return any(name in member._records for member in self.opt._family())

    def seen(self):
        """Everything that can be seen of it."""
        opt = self.opt
        told = {"iteration": opt.iteration, "skipped": opt.skipped, "hyper": repr(opt), "routing": opt.routing_report()}
        for member in opt._family():
            for k, record in member._records.items():
                told[f"t of {k}"] = record.t
                told |= {f"{slot} of {k}": np.array(value) for slot, value in opt.state(k).items()}
        return told | {f"p of {k}": p.copy() for k, p in self.params.items()}


def equal(a, b, exact):
    """What differs between two looks, or None."""
    if a.keys() != b.keys():
        return f"there is {a.keys() ^ b.keys()}"
    for key, x in a.items():
        y = b[key]
        if not isinstance(x, np.ndarray):
            same = x == y
        elif exact:
            same = np.array_equal(x, y, equal_nan=True)
        else:
            same = np.allclose(x, y, rtol=2e-3, atol=2e-4 * (1 + np.abs(y[np.isfinite(y)]).max(initial=0)), equal_nan=True)
        if not same:
            return f"{key}: {x!r} is not {y!r}"
    return None


# ---- what is done: each takes a side and a generator that is in the same state for both sides -----------------------------
def fresh(rng, names=SHAPES, scale=1.0):
    return {k: drawn(rng, SHAPES[k], scale) for k in names}


def step_standing(side, rng):
    """The same arrays as ever, with other numbers in them."""
    for k, g in fresh(rng).items():
        side.grads[k][...] = g
    side.opt.step_all(side.params, side.grads)


def step_new(side, rng):
    """New gradients, some of them where others were before, and sometimes scaled."""
    some = [k for k in SHAPES if rng.random() < 0.6]
    for k in some:
        del side.grads[k]
    side.grads |= fresh(rng, some, 10.0)
    side.opt.step_all(side.params, side.grads, grad_scale=float(rng.choice([1.0, 0.25, 0.0])))


def step_moved(side, rng):
    """Parameters that lie elsewhere, now and then at the address of one that is gone."""
    for k in SHAPES:
        if rng.random() < 0.4:
            side.params[k] = side.params[k].copy()
    side.params = {k: side.params[k] for k in rng.permutation(list(SHAPES))}
    step_standing(side, rng)


def step_swapped(side, rng):
    """Two gradients of one shape change places; so do two parameters."""
    side.grads["w"], side.grads["u"] = side.grads["u"], side.grads["w"]
    if rng.random() < 0.5:
        side.params["w"], side.params["u"] = side.params["u"], side.params["w"]
    side.opt.step_all(side.params, side.grads)


def step_some(side, rng):
    names = [k for k in SHAPES if rng.random() < 0.5] or ["w"]
    side.opt.step_all({k: side.params[k] for k in names}, fresh(rng, names))


def step_each(side, rng):
    """One by one, standing or new, flat or not."""
    said = []
    for k in rng.permutation(list(SHAPES)):
        how, g = rng.integers(5), drawn(rng, SHAPES[k])
        if how == 0:
            continue
        if how == 1:
            side.grads[k][...] = g
            side.opt.step(k, side.params[k], side.grads[k])
        elif how == 2:
            side.opt.step(k, side.params[k], g, grad_scale=0.5)
        else:
            flat = side.params[k].reshape(-1)
            if how == 3 and side.knows(k) and flat.shape != SHAPES[k]:
                said.append(refused(side, lambda flat=flat, k=k, g=g: side.opt.step(k, flat, g.reshape(-1))))
            side.opt.step(k, flat, g.reshape(-1), shape=SHAPES[k])
    side.opt.end_iteration()
    return said


def spoiled(kind, k, params, grads):
    """One thing wrong with a call."""
    other = "u" if k != "u" else "w"
    if kind == "dtype":
        grads[k] = grads[k].astype(np.float64)
    elif kind == "parameter's dtype":
        params[k] = params[k].astype(np.float16)
    elif kind == "shape":
        grads[k] = np.zeros((*SHAPES[k], 2), F)
    elif kind == "other shape":
        params[k], grads[k] = np.zeros((3, 3, 3), F), np.zeros((3, 3, 3), F)
    elif kind == "strides":
        grads[k] = np.zeros((*SHAPES[k], 2), F)[..., 0]
    elif kind == "read-only":
        params[k] = params[k].copy()
        params[k].flags.writeable = False
    elif kind == "gradient in a parameter":
        grads["w"] = params["u"]
    elif kind == "two names":
        params["w"] = params["u"]
    elif kind == "masked":
        grads[k] = np.ma.masked_array(grads[k])
    elif kind == "list":
        grads[k] = grads[k].tolist()
    elif kind == "missing":
        del grads[k]
    elif kind == "extra":
        grads["stranger"] = grads[other]


KINDS = (
    "dtype", "parameter's dtype", "shape", "other shape", "strides", "read-only", "gradient in a parameter", "two names",
    "masked", "list", "missing", "extra",
)  # fmt: skip


def refused(side, call):
    """The refusal of a call, which must have left everything as it was."""
    before = side.seen()
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    problem = equal(side.seen(), before, exact=True)
    assert problem is None, f"a refusal changed something: {problem}"
    return type(caught.value), str(caught.value)


def step_refused(side, rng):
    """A call with good gradients, some new and some where they were, and one thing wrong; then the same call put right."""
    kind, k = str(rng.choice(KINDS)), str(rng.choice(["w", "u", "tall", "b"]))
    kind = "shape" if kind == "other shape" and not side.knows(k) else kind  # a new name may have any
    good = fresh(rng, scale=100.0)
    for name in SHAPES:
        if name == k or rng.random() < 0.7:
            side.grads[name][...] = good[name]
            good[name] = side.grads[name]
    params, grads = dict(side.params), dict(good)
    spoiled(kind, k, params, grads)
    said = refused(side, lambda: side.opt.step_all(params, grads))
    if rng.random() < 0.8:
        side.opt.step_all(side.params, good)
    return said


def one_refused(side, rng):
    """The same for a single tensor."""
    kind, k = str(rng.choice(["dtype", "shape", "strides", "read-only", "masked", "list"])), str(rng.choice(["w", "b"]))
    good = fresh(rng, scale=100.0)
    params, grads = dict(side.params), dict(good)
    spoiled(kind, k, params, grads)
    said = refused(side, lambda: side.opt.step(k, params[k], grads.get(k)))
    side.opt.step(k, side.params[k], good[k])
    again = refused(side, lambda: side.opt.step(k, side.params[k], good[k]))  # twice in an iteration
    twice = refused(side, lambda: side.opt.step_all(side.params, good))
    side.opt.end_iteration()
    return said, again, twice


def numbers_refused(side, rng):
    opt = side.opt
    grads = fresh(rng)
    said = [refused(side, lambda: setattr(opt, "lr", -1.0)), refused(side, lambda: setattr(opt, "nonfinite", "no"))]
    return [*said, refused(side, lambda: opt.step_all(side.params, grads, grad_scale=float("nan")))]


def set_number(side, rng):
    opt, value = side.opt, float(rng.choice([1e-3, 1e-2]))
    which = rng.integers(4)
    if which == 0:
        opt.lr, side.given = value, {}
    elif which == 1 and "weight_decay" in opt.spec.fields:
        opt.weight_decay = float(rng.choice([0.0, 0.1]))
    elif which == 2 and "momentum" in opt.spec.fields:
        opt.momentum = float(rng.choice([0.5, 0.9]))
    else:
        opt.lr = side.given["lr"] = schedules.cosine(value, 10)


def not_finite(side, rng):
    """Under each policy; what propagates is left out of the rest by new parameters."""
    side.opt.nonfinite = str(rng.choice(POLICIES))
    grads = fresh(rng)
    grads[str(rng.choice(["w", "b"]))].reshape(-1)[-1] = rng.choice([np.nan, np.inf])
    said = None
    if side.opt.nonfinite == "raise":
        said = refused(side, lambda: side.opt.step_all(side.params, grads))
    elif side.opt.nonfinite == "skip":
        side.opt.step_all(side.params, grads)
    side.opt.nonfinite = "propagate" if rng.random() < 0.5 else side.opt.nonfinite
    return said


def copied(side, rng):
    side.opt = copy.deepcopy(side.opt)


def pickled(side, rng):
    side.opt = pickle.loads(pickle.dumps(side.opt))


def saved(side, rng):
    with tempfile.TemporaryDirectory() as folder:
        made = side.opt.save(Path(folder) / "{iteration}.safetensors", keep=1)
        side.opt = rlx_optim.load(made, **side.engine, **side.given)


def beside_a_thread(side, rng):
    """Another optimizer is stepped by another thread meanwhile."""
    other, grads = make("adamw", **side.engine), fresh(rng)
    params = {k: np.zeros(shape, F) for k, shape in SHAPES.items()}
    thread = threading.Thread(target=lambda: [other.step_all(params, grads) for _ in range(5)])
    thread.start()
    for _ in range(2):
        side.opt.step_all(side.params, grads)
    thread.join()


def estimated(side, rng):
    """Sophia's estimates, flat or not, also before the first step."""
    if isinstance(side.opt, rlx_optim.Sophia):
        for k in SHAPES:
            if rng.random() < 0.5:
                estimate = np.abs(drawn(rng, SHAPES[k]))
                side.opt.update_hessian(k, np.asarray(estimate if rng.random() < 0.5 else estimate.reshape(-1), F))


def nothing(side, rng):
    side.opt.end_iteration()


#: what is done how often
MENU = {
    step_standing: 6, step_new: 6, step_moved: 3, step_swapped: 2, step_some: 2, step_each: 3, step_refused: 8, one_refused: 2,
    numbers_refused: 1, set_number: 2, not_finite: 2, copied: 1, pickled: 1, saved: 1, beside_a_thread: 1, estimated: 2, nothing: 1,
}  # fmt: skip


def play(name, seed, length=12):
    """One sequence on both sides."""
    rng = np.random.default_rng([seed, NAMES.index(name)])
    settings = {"groups": [{"match": ["b", "u"], "lr": 0.003}]} if rng.random() < 0.3 else {}
    if name == "prodigy":
        settings["d0"] = 0.01  # with 1e-6 the first steps are no larger than rounding
    if name in ("muon", "mars") and rng.random() < 0.5:
        settings["otherwise"] = make(str(rng.choice(["lion", "sgd"])))
        settings["groups"] = [{"match": "tall", "use": "otherwise"}]
    cpu, reference = (Side(name, engine, settings, seed) for engine in ("cpu", "reference"))
    done, weights = [], np.array(list(MENU.values())) / sum(MENU.values())
    try:
        for _ in range(length):
            do = list(MENU)[rng.choice(len(MENU), p=weights)]
            inner = int(rng.integers(1 << 30))
            done.append(do.__name__)
            said = [do(side, np.random.default_rng(inner)) for side in (cpu, reference)]
            assert said[0] == said[1]
            problem = equal(cpu.seen(), reference.seen(), name in ELEMENTWISE)
            assert problem is None, problem
    except BaseException as problem:
        problem.add_note(f"play({name!r}, {seed}, {length}): {', '.join(done)}")
        raise


@pytest.mark.parametrize("name", NAMES)
def test_sequences(name):
    for seed in range(20):
        play(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_sequences(name):
    for seed in range(1000, 1080):
        play(name, seed, 30)
