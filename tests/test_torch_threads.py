"""An optimizer that several threads or processes use."""

import os
import signal
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from torch_cases import give_gradients, make, parameters  # noqa: E402

import rlx_optim.torch  # noqa: E402

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def hold_up(opt):
    """A thread that is in the middle of `state_dict`, and the event that lets it go on."""
    begun, go_on = threading.Event(), threading.Event()
    opt.register_state_dict_post_hook(lambda *_: begun.set() or (go_on.wait(60) and None))
    thread = threading.Thread(target=opt.state_dict, daemon=True)
    thread.start()
    assert begun.wait(60)
    return thread, go_on


def in_child(function, seconds=60):
    """Whether a function comes to its end in a forked child."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(seconds)
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


USES = {
    "step": lambda opt: opt.step(),
    "state_dict": lambda opt: opt.state_dict(),
    "add_param_group": lambda opt: opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
    "engine_report": lambda opt: opt.engine_report(),
    "eval": lambda opt: opt.eval(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_thread_waits_for_another_to_leave_the_optimizer(use):
    params = parameters()
    opt = make("AdamW", params.values())
    give_gradients(params, 0)
    thread, go_on = hold_up(opt)
    other = threading.Thread(target=use, args=(opt,), daemon=True)
    other.start()
    other.join(0.2)
    assert other.is_alive()
    go_on.set()
    thread.join(60)
    other.join(60)
    assert not other.is_alive()


def test_state_dicts_on_two_threads():
    opt = make("AdamW", parameters().values())
    problems = []

    def save():
        try:
            for _ in range(40):
                assert set(opt.state_dict()) == {"state", "param_groups"}
        except Exception as problem:
            problems.append(problem)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=save) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert problems == []


@needs_fork
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_a_child_is_not_held_up_by_a_thread_of_its_parent():
    params = parameters()
    opt = make("AdamW", params.values())
    give_gradients(params, 0)
    begun, go_on = threading.Event(), threading.Event()

    def stay_inside():
        with opt._lock:
            begun.set()
            go_on.wait(60)

    thread = threading.Thread(target=stay_inside, daemon=True)
    thread.start()
    assert begun.wait(60)
    try:
        assert in_child(opt.step, 20)
    finally:
        go_on.set()
        thread.join(60)


@needs_fork
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
@pytest.mark.parametrize("name", ["AdamW", "NAdamW"])
def test_steps_of_a_child_count_in_shared_memory(name):
    """As torch.optim's do: parent and child step one model in turn."""
    params, alone = parameters(torch.float64), parameters(torch.float64)
    opt, other = (make(name, each.values()) for each in (params, alone))

    def step(opt, params, t):
        give_gradients(params, t)
        opt.step()

    step(opt, params, 0)
    for tensor in [*params.values(), *(value for state in opt.state.values() for value in state.values())]:
        tensor.data.share_memory_()
    assert in_child(lambda: [step(opt, params, t) for t in (1, 2)])
    step(opt, params, 3)
    for t in range(4):
        step(other, alone, t)
    assert {int(state["step"]) for state in opt.state.values()} == {4}
    for key, param in params.items():
        assert torch.equal(param, alone[key])


class Forwarding:
    """An object of the optimizer's class that forwards what it has not got, as Lightning's does."""

    def __init__(self, optimizer):
        self._wrapped = optimizer
        self.__class__ = type("Forwarding", (Forwarding, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self._wrapped, name)


def test_a_wrapper_that_forwards_uses_the_lock_of_what_it_wraps():
    p = torch.nn.Parameter(torch.ones(3))
    opt = rlx_optim.torch.Sophia([p])
    wrapper = Forwarding(opt)
    p.grad = torch.ones(3)
    wrapper.update_hessian_from_gradients(2)
    wrapper.step()
    assert wrapper.state_dict()["state"][0]["step"] == 1 == opt.state[p]["estimates"]
