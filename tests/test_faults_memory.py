"""Memory that moves between steps, gradients that are not what they look like, modes and clips: each test is a fault that was met."""

import pytest

torch = pytest.importorskip("torch")

from torch import multiprocessing, nn  # noqa: E402

import rlx_optim.torch as ours  # noqa: E402
from rlx_optim.torch import memory  # noqa: E402

ENGINES = ["cpu", "torch"]
engines = pytest.mark.parametrize("engine", ENGINES)


def twins(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return [[nn.Parameter(t.clone()) for t in start] for _ in range(2)]


def give(sides, seed=1, only=None):
    generator = torch.Generator().manual_seed(seed)
    for i, pair in enumerate(zip(*sides, strict=True)):
        g = torch.randn(pair[0].shape, generator=generator, dtype=torch.float64).to(pair[0].dtype)
        for p in pair:
            p.grad = g.clone() if only is None or i in only else None


def agree(sides, atol=5e-6):
    for a, b in zip(*sides, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=atol), (a - b).abs().max()


# ---- parameters ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [10, 100_000])
def test_a_lane_that_sat_out_a_step_is_not_taken_for_one_that_stood_still(n):
    """Lagrange multipliers in a group that is maximized, clamped by hand, without a gradient now and then."""
    sides = twins((n,), (n,))
    opts = [
        kind([{"params": [lam], "maximize": True}, {"params": [w]}], lr=0.1)
        for kind, (lam, w) in zip((ours.AdamW, torch.optim.AdamW), sides, strict=True)
    ]
    for t in range(6):
        for side in sides:
            side[0].data = side[0].data.clamp(min=0)
        give(sides, t, only={1} if t % 3 == 1 else None)
        for opt in opts:
            opt.step()
    agree(sides)


def test_a_step_without_any_gradient_forgets_where_parameters_were():
    sides = twins((1000,))
    opts = [kind(side, lr=0.1) for kind, side in zip((ours.AdamW, torch.optim.AdamW), sides, strict=True)]
    for t in range(6):
        give(sides, t)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        for side in sides:
            side[0].data = side[0].data.clone()
        for opt in opts:
            opt.step()
    agree(sides)


@engines
def test_a_parameter_transposed_in_place(engine):
    sides = twins((4, 4))
    opts = [ours.SGD(sides[0], lr=0.1, engine=engine), torch.optim.SGD(sides[1], lr=0.1)]
    give(sides)
    for t in range(4):
        for opt in opts:
            opt.step()
        if t == 1:
            for side in sides:
                side[0].data = side[0].data.t()
        for p in (side[0] for side in sides):
            p.grad.copy_(torch.arange(16.0).view(4, 4) * (t + 1))
    agree(sides)


@engines
@pytest.mark.parametrize("threads", [1, 2])
def test_parameters_over_one_memory_are_stepped_in_turn(engine, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    sides = twins((40_000,), (40_000,), (40_000,))
    for side in sides:
        side[2].data = side[0].data
    opts = [ours.AdamW(sides[0], lr=0.1, engine=engine), torch.optim.AdamW(sides[1], lr=0.1)]
    for t in range(5):
        give(sides, t)
        for opt in opts:
            opt.step()
    torch.set_num_threads(before)
    agree(sides, 1e-5)


@engines
def test_views_that_overlap_are_stepped_in_turn(engine):
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        memory = torch.randn(30)
        sides.append([nn.Parameter(memory[:20]), nn.Parameter(memory[10:]), nn.Parameter(memory[5:8])])
    opts = [ours.SGD(sides[0], lr=0.1, momentum=0.9, engine=engine), torch.optim.SGD(sides[1], lr=0.1, momentum=0.9)]
    for t in range(5):
        give(sides, t)
        for opt in opts:
            opt.step()
    agree(sides)


@engines
@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_a_parameter_listed_twice_is_stepped_twice(engine):
    sides = twins((5,), (3, 2))
    opts = [
        ours.AdamW([sides[0][0], sides[0][1], sides[0][0]], lr=0.1, engine=engine),
        torch.optim.AdamW([sides[1][0], sides[1][1], sides[1][0]], lr=0.1),
    ]
    for t in range(5):
        give(sides, t)
        for opt in opts:
            opt.step()
    agree(sides)
    assert [float(opts[0].state[p]["step"]) for p in sides[0]] == [10, 5]


@engines
def test_a_gradient_that_lies_in_a_parameter_is_read_before_it_is_written(engine):
    memory = torch.arange(1.0, 12.0)
    p, q = nn.Parameter(memory[1:]), nn.Parameter(torch.ones(3))
    p.grad, q.grad = memory[:-1], torch.ones(3)
    opt = ours.SGD([p, q], lr=0.5, engine=engine)
    want = memory[1:] - 0.5 * memory[:-1]
    opt.step()
    assert torch.equal(p.detach(), want)


def test_a_storage_that_was_given_up_is_refused():
    p = nn.Parameter(torch.ones(100))
    opt = ours.AdamW([("w", p)])
    for _ in range(3):
        p.grad = torch.ones(100)
        opt.step()
    p.data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="w is in a storage that has been resized to 0 bytes"):
        opt.step()


def test_a_storage_can_be_resized_after_a_step():
    p = nn.Parameter(torch.ones(6, 4))
    opt = ours.Muon([("w", p)])
    p.grad = torch.ones(6, 4)
    opt.step()
    p.data.untyped_storage().resize_(1000)
    opt.state[p]["momentum_buffer"].untyped_storage().resize_(1000)
    opt.step()


# ---- state ---------------------------------------------------------------------------------------------------------------------
def shared(t):
    t.share_memory_()


def by_data(t):
    t.data = t.data.clone()


def zeroed(t):
    t.data = torch.zeros_like(t)


def set_to(t):
    t.set_(t.clone())


def swapped(t):
    try:
        torch.utils.swap_tensors(t, t.clone())
    except RuntimeError:  # torch's: there are views of it
        t.data = t.data.clone()


@engines
@pytest.mark.parametrize("change", [shared, by_data, zeroed, set_to, swapped])
@pytest.mark.parametrize("n", [7, 50_000])
def test_state_whose_memory_is_replaced(engine, change, n):
    sides = twins((n,), (3, 4))
    opts = [ours.AdamW(sides[0], lr=0.1, engine=engine), torch.optim.AdamW(sides[1], lr=0.1)]
    foreign = []
    for t in range(9):
        give(sides, t)
        for opt in opts:
            opt.step()
        if t % 3 == 2:
            for opt in opts:
                for state in opt.state.values():
                    for name, value in state.items():
                        if name != "step" or change is not zeroed:
                            change(value)
            foreign += [torch.full((n,), 3.0) for _ in range(6)]
    agree(sides)
    assert all(bool((t == 3.0).all()) for t in foreign)
    for p, q in zip(*sides, strict=True):
        mine, theirs = opts[0].state[p], opts[1].state[q]
        assert float(mine["step"]) == float(theirs["step"]) == 9
        assert torch.allclose(mine["exp_avg"], theirs["exp_avg"], rtol=0, atol=1e-6)


def test_a_state_dict_sent_through_a_queue():
    """torch moves what it sends into shared memory, in place."""
    sides = twins((1000,), (30, 40))
    opts = [kind(side, lr=0.1) for kind, side in zip((ours.AdamW, torch.optim.AdamW), sides, strict=True)]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    for t in range(4):
        give(sides, t)
        for opt in opts:
            opt.step()
            queue.put(opt.state_dict())
            queue.get()
    agree(sides)


# ---- gradients -----------------------------------------------------------------------------------------------------------------
@engines
def test_the_lazy_negative_bit(engine):
    start = torch.tensor([3.0])
    re, im = (nn.Parameter(start.clone()) for _ in range(2))
    opt = ours.SGD([re, im], lr=0.1, engine=engine)
    for _ in range(50):
        opt.zero_grad()
        z = torch.complex(re, im).conj()
        loss = ((z - torch.complex(torch.ones(1), torch.ones(1))).abs() ** 2).sum()
        loss.backward()
        opt.step()
    assert float(loss.detach()) < 1e-4


@engines
@pytest.mark.parametrize("name", ["AdamW", "Muon", "Lamb"])
def test_negative_views_in_turn_with_ordinary_gradients(engine, name):
    sides = twins((4, 3), (6,))
    opts = [getattr(ours, name)(side, lr=0.1, engine=engine) for side in sides]
    for t in range(6):
        give(sides, t)
        for p in sides[0]:
            p.grad = torch._neg_view(-p.grad) if t % 3 else p.grad
        for opt in opts:
            opt.step()
    agree(sides)


# ---- what a step compares ------------------------------------------------------------------------------------------------------
def by_data(make):
    def change(t):
        t.data = make(t.data)

    return change


#: what can be done to a tensor of shape (4, 4) behind the optimizer's back
CHANGES = {
    "clone": by_data(lambda t: t.clone()),
    "transpose": by_data(lambda t: t.t()),
    "slice": by_data(lambda t: t[:2]),
    "reshape": by_data(lambda t: t.reshape(2, 8)),
    "integers": by_data(lambda t: t.view(torch.int32)),
    "cast": by_data(lambda t: t.bfloat16()),
    "sign": by_data(torch._neg_view),
    "set": lambda t: t.set_(torch.ones(4, 4)),
    "resize": lambda t: t.resize_(5, 4),
    "given up": lambda t: t.untyped_storage().resize_(0),
    "swap": lambda t: torch.utils.swap_tensors(t, torch.ones(4, 4)),
}


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_tensor_is_seen(change, guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(memory, "TensorGuards", None)
    with torch.no_grad():
        tensors = [torch.ones(4, 4), torch.ones(4, 4)]
        before = memory.Whereabouts(tensors)
        assert before.hold(tensors)
        assert before.hold(tensors)
        assert (before.forms.guard is not None) == guarded
        change(tensors[1])
        assert not before.hold(tensors)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_changes_between_steps_is_stepped_as_it_is_or_refused(change, n):
    """As a new optimizer with the same state steps it; or nothing is written."""
    if change in ("integers", "swap", "resize"):
        pytest.skip("torch lets no parameter become that")
    ours_, other = ([nn.Parameter(torch.ones(4, 4)) for _ in range(n)] for _ in range(2))
    opts = ours.SGD(ours_, lr=0.5), torch.optim.SGD(other, lr=0.5)
    for t in range(4):
        if t == 2:
            with torch.no_grad():
                CHANGES[change](ours_[0])
                CHANGES[change](other[0])
        for side in (ours_, other):
            for p in side:
                p.grad = None
                p.grad = torch.arange(p.numel(), dtype=p.dtype).view(p.shape)
        if t == 2 and change in ("slice", "reshape", "given up"):
            with pytest.raises(RuntimeError, match=r"shape|resized"):
                opts[0].step()
            return
        for opt in opts:
            opt.step()
    agree((ours_, other), 0.1 if change == "cast" else 1e-6)


def test_a_gradient_that_reaches_beyond_its_storage_is_refused():
    p = nn.Parameter(torch.ones(4, 4))
    opt = ours.SGD([p], lr=0.5)
    for _ in range(3):
        p.grad = torch.ones(4, 4)
        opt.step()
    p.grad = torch.ones(4, 4)
    p.grad.untyped_storage().resize_(32)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="resized"):
        opt.step()
    assert torch.equal(p, before)


def test_gradients_of_other_kinds_are_stepped_as_torch_steps_them():
    """Transposed, negative views, expanded, parts of a larger storage, one after the other among ordinary ones."""
    sides = twins((4, 4), (4, 4), (7,))
    opts = [kind(side, lr=0.1) for kind, side in zip((ours.AdamW, torch.optim.AdamW), sides, strict=True)]
    square = torch.arange(16.0).view(4, 4) - 7
    kinds = [square, square.t(), torch._neg_view(square), torch.ones(1, 4).expand(4, 4), torch.zeros(50)[9:25].view(4, 4), None]
    for t in range(3 * len(kinds)):
        give(sides, t)
        for side in sides:
            side[0].grad = kinds[t % len(kinds)]
        for opt in opts:
            opt.step()
    agree(sides, 1e-5)


def test_a_class_that_says_what_its_gradient_is_is_asked():
    class Own(nn.Parameter):
        given = None

        @property
        def grad(self):
            return type(self).given

    p, q = Own(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    opts = ours.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    for t in range(4):
        Own.given = q.grad = torch.full((3,), float(t))
        for opt in opts:
            opt.step()
    assert torch.equal(p, q)


# ---- groups and state ----------------------------------------------------------------------------------------------------------
STATE = {
    "equal, and another": lambda s: s.__setitem__("exp_avg", s["exp_avg"].clone()),
    "moved": lambda s: setattr(s["exp_avg"], "data", s["exp_avg"].data.clone()),
    "in place": lambda s: s["exp_avg"].mul_(0.5),
    "a new dict": None,
    "a count": lambda s: s["step"].fill_(7.0),
    "a count that moved": lambda s: s.__setitem__("step", torch.tensor(7.0)),
}


@pytest.mark.parametrize("change", STATE.values(), ids=STATE)
def test_state_that_others_change_is_what_the_next_step_reads(change):
    sides = twins((5, 3), (5, 3))
    opts = [kind(side, lr=0.1) for kind, side in zip((ours.AdamW, torch.optim.AdamW), sides, strict=True)]
    for t in range(6):
        if t == 3:
            for opt, side in zip(opts, sides, strict=True):
                if change is None:
                    opt.state[side[0]] = dict(opt.state[side[0]])
                else:
                    change(opt.state[side[0]])
        give(sides, t)
        for opt in opts:
            opt.step()
    agree(sides)


def test_groups_that_others_change_are_what_the_next_step_reads():
    sides = twins((5,), (6,), (7,))
    opts = [kind(side[:2], lr=0.1) for kind, side in zip((ours.AdamW, torch.optim.AdamW), sides, strict=True)]
    changes = [
        lambda opt, side: opt.param_groups[0]["params"].reverse(),
        lambda opt, side: opt.param_groups[0]["params"].pop(),
        lambda opt, side: opt.add_param_group({"params": [side[2]], "lr": 0.5}),
        lambda opt, side: opt.param_groups[0].update(lr=0.01),
    ]
    for t, change in enumerate([None, *changes]):
        for opt, side in zip(opts, sides, strict=True):
            if change:
                change(opt, side)
        for again in range(2):
            give(sides, 2 * t + again)
            for opt in opts:
                opt.step()
    agree(sides)


# ---- clipping ------------------------------------------------------------------------------------------------------------------
def clipped_and(then):
    """An optimizer whose gradient of norm 100 was clipped to 1, and then something else happened."""
    p = nn.Parameter(torch.zeros(2))
    opt = ours.SGD([("w", p)], lr=0.5)
    p.grad = torch.tensor([100.0, 0.0])
    ours.clip_grad_norm_(opt, 1.0)
    then(opt, p)
    return opt, p


def new_gradient(opt, p):
    p.grad = torch.tensor([1.0, 0.0])


def thrown_away(how):
    def then(opt, p):
        how(opt, p)
        if p.grad is None:
            p.grad = torch.zeros(2)
        p.grad.add_(torch.tensor([1.0, 0.0]))

    return then


@pytest.mark.parametrize(
    "then",
    [
        new_gradient,
        thrown_away(lambda opt, p: opt.zero_grad()),
        thrown_away(lambda opt, p: opt.zero_grad(set_to_none=False)),
        thrown_away(lambda opt, p: nn.ParameterList([p]).zero_grad()),
        lambda opt, p: (opt.load_state_dict(opt.state_dict()), new_gradient(opt, p)),
    ],
)
def test_a_clip_goes_with_the_gradients_it_was_for(then):
    opt, p = clipped_and(then)
    opt.step()
    assert torch.allclose(p.detach(), torch.tensor([-0.5, 0.0]))


def test_a_nan_that_was_thrown_away_is_gone():
    opt, p = clipped_and(lambda opt, p: None)
    p.grad = torch.full((2,), float("nan"))
    ours.clip_grad_norm_(opt, 1.0)
    p.grad = torch.tensor([1.0, 0.0])
    opt.step()
    assert torch.isfinite(p).all()


def test_clips_as_torchs_in_every_order():
    """Twice, stepped twice, gradients that come after the clip, one optimizer's clip and a plain one."""
    sides = twins((5,), (3,))
    opts = [kind(side, lr=0.1) for kind, side in zip((ours.AdamW, torch.optim.AdamW), sides, strict=True)]

    def clip(norm, plainly=False):
        ours.clip_grad_norm_(sides[0] if plainly else opts[0], norm)
        nn.utils.clip_grad_norm_(sides[1], norm)

    def step():
        for opt in opts:
            opt.step()

    give(sides, 1)
    clip(0.5), clip(0.1), step(), step()
    give(sides, 2, only={0})
    clip(0.1)
    for side in sides:
        side[1].grad = torch.ones(3)
    step()
    clip(0.05), clip(0.01, plainly=True), step()
    give(sides, 3)
    step()
    agree(sides)


# ---- settings and modes ------------------------------------------------------------------------------------------------------------
def test_tensors_inside_betas_are_read_at_every_step():
    sides = twins((5,))
    betas = [(torch.tensor(0.9), torch.tensor(0.99)) for _ in range(2)]
    opts = [ours.Adam(sides[0], lr=0.1, betas=betas[0]), torch.optim.Adam(sides[1], lr=0.1, betas=betas[1])]
    for t in range(6):
        give(sides, t)
        for opt, (beta1, _) in zip(opts, betas, strict=True):
            opt.step()
            beta1.fill_(0.1)
    agree(sides, 1e-5)


@engines
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Sophia", "KronPSGD", "Lamb"])
def test_steps_in_inference_mode(engine, name):
    sides = twins((4, 3), (5,))
    settings = {"momentum": 0.9} if name == "SGD" else {}
    opts = [getattr(ours, name)(side, lr=0.1, engine=engine, **settings) for side in sides]
    for t in range(6):
        give(sides, t)
        with torch.inference_mode(t % 2 == 0):
            opts[0].step()
        opts[1].step()
    agree(sides, 0)


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        p = nn.Parameter(torch.ones(3), requires_grad=False)
        opt = ours.AdamW([p], lr=0.1)
        for _ in range(3):
            p.grad = torch.ones(3)
            opt.step()
    assert torch.allclose(p, torch.full((3,), 0.7), atol=0.01)


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Lamb"])
def test_fake_tensors(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Linear(4, 3)
        opt = getattr(ours, name)(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            opt.step()
        assert opt.state[model.weight]["exp_avg" if name != "Muon" else "momentum_buffer"].shape == (3, 4)
