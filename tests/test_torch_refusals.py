"""The torch front end: Sophia's estimates, gradient release, and what is refused."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch_cases import (
    bits,
    curvature,
    every,
    give_gradients,
    make,
    moved,
    network,
    on_engines,
    parameters,
    run,
    same,
    same_state,
    through_disk,
    twins,
)

import rlx_optim.torch as ours

pytestmark = pytest.mark.usefixtures("one_thread")  # tensors are tiny: a second thread of torch only waits


# ---- Sophia --------------------------------------------------------------------------------------------------------------------
@on_engines
def test_hutchinson_is_exact_on_a_diagonal_hessian(engine):
    params = parameters(torch.float64)
    opt = ours.Sophia(params.values(), engine=engine, betas=(0.9, 0.5))
    scales, loss = curvature(params, 1)
    grads = {k: p.grad for k, p in params.items()}
    generator = torch.get_rng_state()
    assert opt.update_hessian(loss) is True
    assert torch.equal(generator, torch.get_rng_state())
    assert {k: p.grad for k, p in params.items()} == grads  # gradients are left alone
    for p, c in zip(params.values(), scales, strict=True):
        assert torch.equal(opt.state[p]["hessian"], 0.5 * c)
        assert float(opt.state[p]["estimates"]) == 1
    opt.update_hessian(loss)
    for p, c in zip(params.values(), scales, strict=True):
        torch.testing.assert_close(opt.state[p]["hessian"], 0.75 * c, rtol=1e-15, atol=0)


def test_hutchinson_averages_to_the_diagonal_of_any_hessian():
    matrix = torch.tensor([[2.0, 0.5, -1.0], [0.5, 1.0, 0.3], [-1.0, 0.3, 4.0]])
    w = nn.Parameter(torch.randn(3))
    opt = ours.Sophia([w], betas=(0.9, 0.0))
    total = torch.zeros(3)
    for _ in range(600):
        opt.update_hessian(lambda: w @ matrix @ w / 2)
        total += opt.state[w]["hessian"]
    torch.testing.assert_close(total / 600, matrix.diagonal(), atol=0.2, rtol=0)


def test_hutchinson_where_the_loss_is_linear_or_does_not_reach():
    bent, flat, apart = (nn.Parameter(torch.ones(3)) for _ in range(3))
    opt = ours.Sophia([bent, flat, apart], betas=(0.9, 0.0))
    assert opt.update_hessian(lambda: (bent**2).sum() + flat.sum())
    assert [float(opt.state[p]["estimates"]) for p in (bent, flat, apart)] == [1, 1, 0]
    assert [float(opt.state[p]["hessian"].sum()) for p in (bent, flat)] == [6, 0]
    assert opt.update_hessian(flat.sum)  # nothing curved at all


def test_every_tenth_step():
    params = parameters()
    opt = ours.Sophia(params.values())
    worked = []
    for t in range(25):
        calls = []
        _, loss = curvature(params, t)
        worked.append(opt.update_hessian(lambda loss=loss, calls=calls: (calls.append(1), loss())[1], every=10))
        assert len(calls) == worked[-1]
        give_gradients(params, t)
        opt.step()
    assert [t for t in range(25) if worked[t]] == [0, 10, 20]
    with pytest.raises(ValueError, match="every must be at least 1"):
        opt.update_hessian(lambda: None, every=0)


def test_sophia_resumes_bit_for_bit_with_its_seed():
    def loss(tensors):  # a Hessian that is not diagonal: the signs matter
        return sum((p.sum() ** 2 + (p**4).sum()) for p in tensors.values())

    results = {}
    for seed in (0, 7):
        params = parameters()
        opt = ours.Sophia(params.values(), hessian_seed=seed)
        for t in range(6):
            if t == 3:
                taken = twins(params)
                resumed = ours.Sophia(taken.values())  # made with seed 0
                resumed.load_state_dict(through_disk(opt.state_dict()))
                assert resumed.hessian_seed == seed
            for o, tensors in [(opt, params)] + ([(resumed, taken)] if t >= 3 else []):
                o.update_hessian(lambda tensors=tensors: loss(tensors))
                give_gradients(tensors, t)
                o.step()
        assert same(bits(params), bits(taken))
        assert same_state(opt.state_dict(), resumed.state_dict())
        results[seed] = bits(params)
    assert not same(results[0], results[7])
    with pytest.raises(ValueError, match="hessian_seed must be an integer >= 0"):
        ours.Sophia(params.values(), hessian_seed=-1)


def test_estimates_through_another_object_on_the_same_state_count():
    """Lightning's optimizer wrappers are shallow copies."""
    params, others = parameters(), parameters()
    opt, plain = ours.Sophia(params.values()), ours.Sophia(others.values())
    for t in range(4):
        copy.copy(opt).update_hessian(curvature(params, t)[1])
        plain.update_hessian(curvature(others, t)[1])
        for o, tensors in ((opt, params), (plain, others)):
            give_gradients(tensors, t)
            o.step()
    assert same(bits(params), bits(others))
    assert same_state(opt.state_dict(), plain.state_dict())


def test_an_estimate_that_is_not_finite():
    w = nn.Parameter(torch.zeros(3))
    for policy, message in (("raise", "not finite"), ("skip", "")):
        opt = ours.Sophia([w], nonfinite=policy)
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            assert opt.update_hessian(lambda: (w.abs() + 1e-30).log().pow(3).sum() * 1e30) is False
        assert torch.equal(opt.state[w]["hessian"], torch.zeros(3))
    assert opt.skipped == 1


# ---- gradient release ----------------------------------------------------------------------------------------------------------
@every
@on_engines
def test_attached_steps_are_the_same_and_free_the_gradients(name, engine):
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    model, other = network(True), network(True)
    attached, plain = make(name, model, engine=engine), make(name, other, engine=engine)
    if name == "Prodigy":
        with pytest.raises(ValueError, match="Prodigy: attach steps parameters one by one, but its rule reduces over all"):
            attached.attach(model)
        return
    detach = attached.attach(model)
    for _ in range(4):
        model(x).pow(2).mean().backward()
        assert all(p.grad is None for p in model.parameters())
        attached.step()  # finds nothing left to do
        other(x).pow(2).mean().backward()
        plain.step()
        plain.zero_grad()
    assert same(bits(dict(model.named_parameters())), bits(dict(other.named_parameters())))
    assert same_state(attached.state_dict(), plain.state_dict())
    detach()
    before = bits(dict(model.named_parameters()))
    model(x).pow(2).mean().backward()
    assert same(before, bits(dict(model.named_parameters())))
    assert all(p.grad is not None for p in model.parameters())


def test_attach_refuses_strangers_and_follows_schedulers():
    model = network(True)
    with pytest.raises(ValueError, match="1 parameters of the model are not in this optimizer"):
        ours.AdamW(list(model.parameters())[:-1]).attach(model)
    opt = ours.SGD(model.parameters(), lr=0.1)
    opt.attach(model)
    before = bits(dict(model.named_parameters()))
    opt.param_groups[0]["lr"] = 0.0
    model(torch.ones(2, 12)).sum().backward()
    assert same(before, bits(dict(model.named_parameters())))
    assert all(float(opt.state[p]["step"]) == 1 for p in model.parameters())


# ---- refusals ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "settings", "error", "message"),
    [
        (lambda: [nn.Parameter(torch.ones(3, device="meta"))], {}, ValueError, "on the meta device; materialise the model"),
        (lambda: [nn.Parameter(torch.ones(3, dtype=torch.complex64))], {}, ValueError, r"complex64; .*; optimize torch.view_as_real"),
        (lambda: [("w", nn.Parameter(torch.ones(3, dtype=torch.float8_e4m3fn)))], {}, ValueError, "'w' has dtype torch.float8_e4m3fn"),
        (lambda: [Wrapped(torch.ones(3)).requires_grad_()], {}, ValueError, "is a Wrapped; plain tensors and DTensors can be stepped"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(engine="tpu"), ValueError, "unknown engine 'tpu'; known are 'auto', 'cpu', 'torch'"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(nonfinite="ignore"), ValueError, "nonfinite must be one of"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(lr=-1.0), ValueError, "lr must be a finite number >= 0, got -1.0"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(lr=float("nan")), ValueError, "lr must be a finite number >= 0, got nan"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(betas=(0.9, 1.0)), ValueError, "betas must be 2 finite numbers"),
        (lambda: [nn.Parameter(torch.ones(3))], dict(lr="fast"), TypeError, "lr must be a finite number >= 0, got 'fast'"),
        (lambda: [{"params": [nn.Parameter(torch.ones(3))], "lr": -1.0}], {}, ValueError, "lr must be a finite number"),
        (lambda: [{"params": [nn.Parameter(torch.ones(3))], "rule": "lion"}], {}, ValueError, "a group is for rule 'lion'"),
        (lambda: [], {}, ValueError, "empty parameter list"),
        (lambda: nn.Parameter(torch.ones(3)), {}, TypeError, "iterable of"),
        (lambda: [1.0], {}, TypeError, "can only optimize Tensors"),
        (lambda: [nn.Parameter(torch.ones(3)) * 2], {}, ValueError, "non-leaf"),
        (lambda: [{"params": {nn.Parameter(torch.ones(3))}}], {}, TypeError, "ordered collections"),
    ],
)  # fmt: skip
def test_what_cannot_be_optimized_is_refused_at_once(params, settings, error, message):
    with pytest.raises(error, match=message):
        ours.AdamW(params(), **settings)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as sharded ones are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapped(args[0].inner) if "detach" in str(func) else NotImplemented


def sparse(params, opt):
    params["w"].grad = params["w"].grad.to_sparse()


def smaller(params, opt):
    params["w"].data = torch.zeros(2, 2)
    params["w"].grad = torch.zeros(2, 2)


def doubled(params, opt):
    params["w"].grad = None
    params["w"].data = params["w"].data.double()
    params["w"].grad = torch.ones(24, 16, dtype=torch.float64)


def other_gradient(params, opt):
    params["w"].grad.data = torch.zeros(3)


def wrapped_gradient(params, opt):
    params["w"].grad = Wrapped(params["w"].grad)


def setting(**values):
    def spoil(params, opt):
        opt.param_groups[0].update(values)

    spoil.__name__ = next(iter(values))
    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (sparse, "w has a sparse gradient; dense ones are needed"),
        (smaller, r"w has now shape \(2, 2\), its state is for \(24, 16\); .* before making the optimizer"),
        (doubled, "w has become torch.float64, its state is torch.float32"),
        (other_gradient, r"of shape \(24, 16\), its gradient on cpu and of shape \(3,\)"),
        (wrapped_gradient, "the gradient of w is a Wrapped, not a tensor"),
        (moved, "w has moved to cpu, its state is on cuda:1; move or cast the model before making the optimizer"),
        (setting(lr=-1.0), "lr must be a finite number >= 0, got -1.0"),
        (setting(lr=None), "lr must be a finite number >= 0, got None"),
        (setting(betas=(0.9,)), "betas must be 2 finite numbers"),
        (setting(weight_decay=float("inf")), "weight_decay must be a finite number"),
        (setting(lr=torch.ones(2)), r"Tensor lr must be 1-element, got shape \(2,\)"),
        (setting(convention="torch"), "convention shapes the state and cannot change in a group"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
@on_engines
def test_a_refused_step_moves_nothing(spoil, message, engine):
    params = parameters()
    opt = ours.NAdamW([{"params": [(k, params[k])]} for k in params], engine=engine)
    run(opt, params, 0, 2)
    give_gradients(params, 2)
    spoil(params, opt)
    before, state = bits(params), copy.deepcopy(opt.state_dict()["state"])
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        opt.step()
    assert same(before, bits(params))
    assert same_state({"state": state}, opt.state_dict())


@on_engines
def test_a_step_interrupted_while_it_is_laid_out_is_taken_as_if_nothing_had_been(engine, monkeypatch):
    """Ctrl-C where other parameters than before have gradients: the next step must not go by what was laid out for those."""
    (params, opt), (others, other) = ((p, ours.AdamW(p.items(), engine=engine)) for p in (parameters(), parameters()))
    run(opt, params, 0, 2), run(other, others, 0, 2)
    for each in (params, others):
        give_gradients(each, 2, missing=("wide", "one"))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            "rlx_optim.stepping.make_part" if engine == "torch" else "rlx_optim.engines.cpu.engine.RowSelection", interrupt
        )
        with pytest.raises(KeyboardInterrupt):
            opt.step()
    opt.step(), other.step()
    assert same(bits(params), bits(others))
    assert same_state(opt.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("SOAP", "max_precond_dim", 3),
        ("SOAP", "merge_dims", True),
        ("KronPSGD", "memory_save_mode", "all_diag"),
        ("MARS", "variant", "lion"),
    ],
)
def test_what_shapes_the_state_cannot_change(name, field, value):
    params = parameters(shapes={"w": (6, 4)})
    opt = getattr(ours, name)(params.values())
    opt.param_groups[0][field] = value
    give_gradients(params, 0)
    with pytest.raises(ValueError, match=f"{field} shapes the state"):
        opt.step()


@every
@on_engines
def test_nonfinite_policies(name, engine):
    for policy in ("raise", "skip"):
        params = parameters()
        opt = make(name, params.items(), engine=engine, nonfinite=policy)
        run(opt, params, 0, 2)
        give_gradients(params, 2)
        params["conv"].grad[0, 0, 0, 0] = torch.nan
        before, state = bits(params), copy.deepcopy(opt.state_dict())
        with (
            pytest.raises(ValueError, match="gradient of 'conv' is not finite; nothing was stepped")
            if policy == "raise"
            else contextlib.nullcontext()
        ):
            opt.step()
        assert opt.skipped == (policy == "skip")
        assert same(before, bits(params))
        assert same_state(state, opt.state_dict())
    params, others = parameters(), parameters()  # by default a NaN goes through, but stays where it is
    opt, other = make(name, params.items(), engine=engine), make(name, others.items(), engine=engine)
    for t in range(2):
        give_gradients(params, t)
        give_gradients(others, t)
        params["w"].grad[0, 0] = torch.nan
        opt.step()
        other.step()
    assert torch.isnan(params["w"]).any()
    alone = name != "Prodigy"  # whose d is of all tensors
    assert all(torch.equal(params[k], others[k]) == alone for k in params if k != "w")


@pytest.mark.parametrize("place", range(4))
def test_a_gradient_that_is_not_finite_is_found_among_types_and_strides(place):
    params = [torch.nn.Parameter(torch.ones(3, 4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    params += [torch.nn.Parameter(torch.ones(4, 3).T)]
    opt = ours.SGD(params, lr=0.1, nonfinite="skip")
    for bad in (False, True, False):
        for p in params:
            p.grad = torch.ones_like(p)
        if bad:
            params[place].grad[2, 3] = -torch.inf
        opt.step()
    assert opt.skipped == 1
    torch.testing.assert_close(params[0].detach(), torch.full((3, 4), 0.8))


def test_names_for_some_parameters_are_refused():
    p, q = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    for name in ("AdamW", "Muon"):
        with pytest.raises(ValueError, match=f"{name}: some parameters have names and some have none; name all, or none"):
            getattr(ours, name)([("w", p), q])


def test_what_is_refused_is_not_warned_about():
    """A refusal comes before the word that names are missing."""
    p, q = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="appear in more than one parameter group"):
            ours.Muon([{"params": [p, q]}, {"params": [p]}])
