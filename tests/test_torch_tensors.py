"""Parameters and gradients that are not plain tensors with memory of their own."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_cases import bits, give_gradients, make, on_engines, parameters, same  # noqa: E402

import rlx_optim.torch as ours  # noqa: E402


@on_engines
def test_a_parameter_that_repeats_its_numbers_is_refused(engine):
    with pytest.raises(
        ValueError, match=r"AdamW: a parameter of shape \(4,\) has several elements that are one number in memory"
    ):
        make("AdamW", [nn.Parameter(torch.ones(1).expand(4))], engine=engine)
    params = {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(3))}
    opt = make("AdamW", params.items(), engine=engine)
    give_gradients(params, 0)
    opt.step()
    params["a"].data = params["a"].data[:1].expand(4)
    before = bits(params)
    with pytest.raises(RuntimeError, match=r"AdamW: a has several elements that are one number in memory .*contiguous"):
        opt.step()
    assert same(params, before)
    assert {int(state["step"]) for state in opt.state.values()} == {1}


class Labelled(torch.Tensor):
    pass


class Tagged(torch.Tensor):
    pass


@on_engines
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_subclasses_without_memory_of_their_own_are_stepped_as_tensors(name, engine):
    plain = parameters()
    params = {key: nn.Parameter(p.detach().clone().as_subclass(Labelled)) for key, p in plain.items()}
    opts = [make(name, each.items(), engine=engine) for each in (plain, params)]
    for t in range(3):
        give_gradients(plain, t)
        for key, p in params.items():
            p.grad = plain[key].grad.clone().as_subclass(Tagged)
        for opt in opts:
            opt.step()
    assert same(plain, {key: p.as_subclass(torch.Tensor) for key, p in params.items()})


@pytest.mark.parametrize("name", ["AdamW", "NAdamW", "Sophia", "Muon"])
def test_fake_tensors_are_loaded_and_clipped(name):
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        opt = make(name, model)
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            ours.clip_grad_norm_(opt, 1.0)
            opt.step()
            opt.load_state_dict(opt.state_dict())
    assert {float(state["step"]) for state in opt.state.values()} == {2.0}
