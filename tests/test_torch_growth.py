"""The torch front end keeps nothing that grows with steps."""

import gc
import sys
import tracemalloc
import warnings

import pytest
from helpers import TORCH as ALL
from torch_cases import give_gradients, make, parameters, run

import rlx_optim.torch as ours

pytestmark = pytest.mark.usefixtures("one_thread")  # tensors are tiny: a second thread of torch only waits


# ---- growth --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lamb", "Adafactor", "Sophia", "Muon", "SOAP", "Prodigy", "ScheduleFreeAdamW"])
def test_nothing_grows(name):
    params = parameters(shapes={"w": (6, 4), "b": (5,), "late": (4, 4)})
    opt = make(name, params.items())
    gradients = []
    for t in range(7):
        give_gradients(params, t, missing=("late",) if t == 3 else ())  # bundles change now and then
        gradients.append([p.grad for p in params.values()])

    def steps(n):
        for t in range(n):
            for p, grad in zip(params.values(), gradients[t % 7], strict=True):
                p.grad = grad
            if name == "Sophia" and t % 10 == 0:
                opt.update_hessian(lambda: sum((p * p).sum() for p in params.values()))
            opt.param_groups[0]["lr"] = 1e-4 * (1 + t % 7)
            opt.step()
        gc.collect()

    few, many = (100, 600) if name in ("SOAP", "Muon", "Sophia", "Adafactor") else (300, 1200)
    steps(few)
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    steps(many)
    assert len(gc.get_objects()) - objects < 30
    assert sys.getallocatedblocks() - blocks < many / 2  # Python's free lists fill up; one object a step would be `many`
    if name in ("AdamW", "Muon"):
        tracemalloc.start()
        try:
            steps(few)
            for last in (False, True):  # free lists fill up here too, the longer the less
                memory = tracemalloc.get_traced_memory()[0]
                steps(many)
                if (grown := tracemalloc.get_traced_memory()[0] - memory) < 14 * many:  # the smallest object has 28 bytes
                    break
                assert not last, grown
        finally:
            tracemalloc.stop()


def test_nothing_is_kept_alive():
    import weakref

    params = parameters()
    opt = ours.Muon(params.items())
    run(opt, params, 0, 2)
    grads = [weakref.ref(p.grad) for p in params.values()]
    opt.zero_grad()
    gc.collect()
    assert not any(ref() is not None for ref in grads)
    alive = weakref.ref(params["w"]), weakref.ref(opt)
    del params, opt
    gc.collect()
    assert alive[0]() is None
    assert alive[1]() is None


def test_import_and_use_are_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ALL:
            params = parameters()
            run(make(name, params.items()), params, 0, 2)
