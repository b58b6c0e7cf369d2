"""SOAP and KronPSGD with capturable=True: the host counts what they decide by, and `Graphed` has a graph for each thing they do."""

import contextlib
import gc
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers import problem  # noqa: E402
from interpreter import in_the_interpreter  # noqa: E402
from test_triton import DECIDING, give, two_groups  # noqa: E402

import rlx_optim.torch as front  # noqa: E402
from rlx_optim.engines.torch_ import pause_gc  # noqa: E402

#: phases come and go: a basis refreshed every third step, factors fitted every other
OFTEN = {"SOAP": {"precondition_frequency": 3}, "KronPSGD": {"preconditioner_update_probability": 0.5}}
SHAPES = {"w": (33, 7), "b": (40,), "big": (40, 30), "twin": (40, 30)}


@pause_gc()
def recorded():
    assert not gc.isenabled()
    raise RuntimeError


@pytest.mark.parametrize("before", [True, False])
def test_nothing_is_collected_while_a_graph_is_recorded(before):
    (gc.enable if before else gc.disable)()
    try:
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                recorded()
            assert gc.isenabled() == before
    finally:
        gc.enable()


def test_a_skipped_step_moves_nothing_in_the_interpreter():
    assert in_the_interpreter("skipping", "test_graphed") == []


def skipping():
    """What a step that the device leaves out has changed, at every phase: nothing but the host's count of what is due."""
    warnings.simplefilter("ignore")
    wrong = []
    for name, settings in OFTEN.items():
        params, gradients = problem({"b": (5,), "big": (8, 6), "twin": (8, 6)}, steps=4)
        tensors = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in params.items()}
        opt = getattr(front, name)(list(tensors.items()), engine="triton", capturable=True, nonfinite="skip", **settings)
        for t, grads in enumerate(gradients):
            give(tensors, grads)
            tensors["b"].grad[3] = float("nan")
            before = kept(opt, tensors)
            opt.step()
            wrong += [] if all(map(torch.equal, before, kept(opt, tensors))) else [f"{name} at {t}"]
            give(tensors, grads)
            opt.step()
            wrong += [f"{name} did not step at {t}"] if all(map(torch.equal, before, kept(opt, tensors))) else []
        wrong += [] if opt.skipped == len(gradients) else [f"{name} counts {opt.skipped}"]
        big = opt.state[tensors["big"]]
        begun = big["key"].any() if "key" in big else big["Q1"].diagonal().sum() != len(big["Q1"])
        wrong += [] if begun else [f"{name} has not begun: its first step was left out"]
    return wrong


def kept(opt, tensors):
    state = [value for p in tensors.values() for key, value in opt.state[p].items() if key != "counter"]
    return [t.detach().clone() for t in (*tensors.values(), *state)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: front.Graphed(print), r"give the optimizers that step\(\) takes a step of"),
        (lambda p: front.Graphed(print, front.SOAP([p])), "SOAP must be one of rlx_optim.torch, made with capturable=True"),
        (lambda p: front.Graphed(print, torch.optim.SGD([p])), "SGD must be one of rlx_optim.torch"),
    ],
)
def test_what_cannot_be_replayed_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(torch.nn.Parameter(torch.ones(3, 3)))


# ---- on a GPU --------------------------------------------------------------------------------------------------------------
def walk(name, settings, graphed, steps, shapes, capturable=True):
    """A model's parameters and state after some steps, forward and backward among them."""
    params, gradients = problem(shapes, steps=steps)
    tensors = {k: torch.nn.Parameter(torch.tensor(v, device="cuda")) for k, v in params.items()}
    inputs = {k: torch.zeros_like(p) for k, p in tensors.items()}
    opt = getattr(front, name)(list(tensors.items()), capturable=capturable, **settings)

    def step():
        opt.zero_grad()
        loss = sum((p * inputs[k]).sum() for k, p in tensors.items())
        loss.backward()
        opt.step()
        return loss.detach()

    call, losses = front.Graphed(step, opt) if graphed else step, []
    for grads in gradients:
        for k, given in inputs.items():
            given.copy_(torch.tensor(grads[k]))
        losses.append(call().clone())
    torch.cuda.synchronize()
    assert all(float(opt.state[p]["step"]) == steps for p in tensors.values())
    state = [value.cpu() for p in tensors.values() for value in (p.detach(), *opt.state[p].values())]
    return [*losses, *state], call


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["SOAP", "KronPSGD", "Muon"])
def test_graphed_steps_are_the_eager_ones_bit_for_bit(name):
    """Also without capturable=True, but for numbers that are float64 on the device."""
    shapes = {**SHAPES, "large": (256, 768)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, _ = walk(name, OFTEN.get(name, {}), False, 20, shapes)
        found, call = walk(name, OFTEN.get(name, {}), True, 20, shapes)
        plain, _ = walk(name, OFTEN.get(name, {}), False, 20, shapes, capturable=False)
    assert len(call.graphs) == {"SOAP": 2, "KronPSGD": 2, "Muon": 1}[name]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(eager, found, strict=True))
    assert all(
        torch.allclose(a.cpu().double(), b.cpu().double(), rtol=1e-4, atol=1e-5) for a, b in zip(eager, plain, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECIDING, ids=lambda case: "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())]))
def test_a_capture_that_nobody_follows_is_refused(case):
    tensors, opt, gradients, _ = two_groups(case, True, "cuda", steps=2)
    give(tensors, gradients[0])
    opt.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"capture it with rlx_optim.torch.Graphed"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rank"), [*((name, None) for name in OFTEN), ("SOAP", 5)])
def test_steps_that_are_recorded_are_those_that_are_not(name, rank, monkeypatch):
    """The engine's own graphs, with gradients that move, hyperparameters that change and a state that is loaded; also where
    gradients are of low rank."""
    from rlx_optim.engines.triton_ import replay

    ends = []
    for most in (0, 1 << 28):
        monkeypatch.setattr(replay, "most", lambda device, most=most: most)
        params, gradients = problem({"w": (33, 7), "large": (256, 768), "b": (40,)}, steps=30)
        tensors = {k: torch.nn.Parameter(torch.tensor(v, device="cuda")) for k, v in params.items()}
        opt = getattr(front, name)(list(tensors.items()), **OFTEN[name])
        for t, grads in enumerate(gradients):
            if rank is not None:
                grads["large"] = grads["large"][:, :rank] @ grads["large"][:rank]
            give(tensors, grads)
            opt.param_groups[0]["lr"] = 0.01 / (1 + t)
            if t == 8:
                opt.load_state_dict(opt.state_dict())
            opt.step()
        torch.cuda.synchronize()
        ends.append([t.clone() for p in tensors.values() for t in (p.detach(), *opt.state[p].values())])
        plans = [part.bundle.plan for lane in opt._placements for part in lane.parts]
        made = [(key[1:], passes.graph) for plan in plans for key, passes in plan.made.items() if key[:1] == ("replay",)]
        kept = [key for key, graph in made if graph is not None]
        assert {key[:2] for key in kept} == ({(False, False), (False, True)} if most else set())
    for a, b in zip(*ends, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)
