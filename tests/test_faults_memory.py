"""Memory that moves between steps, gradients that are not what they look like, modes and clips: each test is a fault that was met."""

import sys

import pytest

torch = pytest.importorskip("torch")

from torch import multiprocessing, nn  # noqa: E402

import rlx_optim.torch as ours  # noqa: E402
from rlx_optim.torch import headers, structure  # noqa: E402

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
    with pytest.raises(RuntimeError, match="the storage of w has been resized to 0 bytes"):
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


# ---- headers -------------------------------------------------------------------------------------------------------------------
def test_headers_are_read_here():
    assert headers.trusted()


@pytest.mark.parametrize("watch", [headers.Compiled, headers.Plainly])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("change", range(len(headers.CHANGES)))
def test_every_change_of_a_tensor_is_seen(watch, which, change):
    with torch.no_grad():
        p, state, grad = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4)
        p.grad = grad
        made = watch([p], [state])
        assert made.same() == 1
        p.grad = grad.clone()
        assert made.same() == 2
        headers.CHANGES[change]((p, state)[which])
        assert made.same() == 0


@pytest.mark.parametrize("watch", [headers.Compiled, headers.Plainly])
def test_gradients_of_another_kind_are_seen(watch):
    def same(made, p, grad):
        p.grad = grad
        return made.same()

    p, grad = torch.ones(4, 4), torch.ones(4, 4)
    p.grad = grad
    made = watch([p], [])
    moved = torch.zeros(50)[9:25].view(4, 4)
    assert same(made, p, moved) == 2
    assert made.addresses.tolist() == [moved.data_ptr()]
    short = torch.ones(4, 4)
    short.untyped_storage().resize_(32)
    inside = torch.zeros(40)
    q = inside[:16].view(4, 4)
    q.grad = grad
    made2 = watch([q], [])
    assert same(made2, q, inside[16:32].view(4, 4)) == 2
    assert same(made2, q, inside[15:31].view(4, 4)) == 0
    for wrong in (None, p.view(-1).view(4, 4), grad.t(), torch._neg_view(grad), grad.to_sparse(), short):
        assert same(made, p, wrong) == 0
    p.grad = None
    p.data = torch.ones(5, 4)
    p.grad = torch.ones(5, 4)
    assert made.same() == 0
    assert made.addresses.tolist() == [moved.data_ptr()]  # what was refused left no trace


def test_what_allocators_leave_in_a_header_is_not_looked_at():
    """A header has bits that nobody sets."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
    p, grad = torch.ones(4, 4), torch.ones(4, 4)
    p.grad = grad
    made = headers.Compiled([p], [])
    for byte in (0, 0xAB, 0xFF):
        for size in range(160, 240, 16):
            dirty = [libc.malloc(size) for _ in range(40)]
            for place in dirty:
                libc.memset(place, byte, size)
            for place in dirty:
                libc.free(place)
        p.grad = grad.clone()
        assert made.same() > 0


def test_tensors_of_many_dimensions_go_the_plain_way():
    p = torch.ones(1, 2, 1, 2, 1, 2, 1)
    p.grad = torch.ones_like(p)
    assert isinstance(headers.remembered([p], []), headers.Plainly)


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
@pytest.mark.parametrize("kept", [structure.Compiled, structure.Plainly])
def test_every_change_of_groups_and_state_is_seen(kept):
    if kept is structure.Compiled and not structure.trusted():
        pytest.skip("this interpreter does not count changes")

    def seen(change):
        groups, state = [{"params": [torch.ones(1), torch.ones(1)]}], {"p": {"a": torch.ones(1), "b": 1}}
        made = kept(groups, state)
        assert made.stands(groups, state)
        change(groups, state)
        return not made.stands(groups, state)

    assert all(seen(lambda _, state, f=change: f(state["p"])) for change in structure.CHANGES)
    assert all(seen(lambda groups, _, f=move: f(groups[0]["params"])) for move in structure.MOVES)
    assert seen(lambda groups, _: groups.append({"params": []}))
    assert seen(lambda _, state: state.__setitem__("p", {"a": 2, "b": 1}))
    assert seen(lambda _, state: state.clear())
    assert seen(lambda _, state: state["p"].__setitem__("a", state["p"]["a"].clone()))  # equal, and another
    assert not seen(lambda groups, _: groups[0].update(lr=1.0))


def test_changes_are_counted_here():
    assert structure.trusted() or sys.version_info >= (3, 13)


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
