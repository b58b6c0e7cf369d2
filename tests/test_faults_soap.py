"""SOAP where its Gram matrices leave directions open: what rounding may not decide."""

import copy
import functools

import numpy as np
import pytest
from helpers import distance

import rlx_optim
from rlx_optim import basis
from rlx_optim.engine import ArrayEngine
from rlx_optim.engines import get_engine

STEPS = 26
LARGE = [(513, 64), (640, 16), (600, 40), (48, 700), (64, 768)]
ULP = 1.0000001


@functools.cache
def draw(shape, rank=None):
    """Where to start, and gradients, of full rank unless told otherwise."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape).astype(np.float32)

    def gradient():
        if rank is None:
            return rng.standard_normal(shape)
        return rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))

    return {"w": start}, [{"w": (0.1 * gradient()).astype(np.float32)} for _ in range(STEPS)]


@functools.cache
def walk(shape, rank, engine, every, precision="float32", scale=1):
    start, grads = draw(shape, rank)
    opt = rlx_optim.SOAP(lr=0.01, precondition_frequency=every, engine=engine, precision=precision)
    params = {k: p.copy() for k, p in start.items()}
    for each in grads:
        opt.step_all(params, {k: g * np.float32(scale) for k, g in each.items()})
    return params


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "rank", "every"),
    [*[(shape, None, 10) for shape in LARGE], ((520, 12), None, 2), ((513, 64), 1, 10), ((30, 6), 1, 2)],
)
def test_the_cpu_engine_goes_where_the_reference_goes(shape, rank, every, precision):
    want = walk(shape, rank, "reference", every)
    assert distance(walk(shape, rank, "cpu", every, precision, 1), want, draw(shape, rank)[0]) < 1e-5


@pytest.mark.parametrize(
    ("shape", "rank", "every"),
    [((513, 64), None, 10), ((48, 700), None, 10), ((64, 768), None, 10), ((513, 64), 1, 10), ((640, 16), 1, 10),
     ((40, 8), None, 2), ((24, 16), 1, 2), ((6, 30), 1, 2), ((40, 8), 1, 2), ((200, 16), 1, 10)],
)  # fmt: skip
def test_the_last_bit_of_gradients_decides_nothing(shape, rank, every):
    plain, nudged = (walk(shape, rank, "cpu", every, "float32", scale) for scale in (1, ULP))
    assert distance(nudged, plain, draw(shape, rank)[0]) < 1e-3


@pytest.mark.parametrize(("shape", "rank"), [((24, 16), None), ((24, 16), 1), ((6, 30), 1), ((520, 12), None)])
def test_torch_on_a_cpu_goes_there_too(shape, rank):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch as front

    start, grads = draw(shape, rank)
    p = torch.nn.Parameter(torch.tensor(start["w"]))
    opt = front.SOAP([p], lr=0.01, precondition_frequency=5, engine="torch")
    for each in grads:
        p.grad = torch.tensor(each["w"])
        opt.step()
    assert distance({"w": p.detach().numpy()}, walk(shape, rank, "reference", 5), start) < 1e-5


@pytest.mark.parametrize(("shape", "rank"), [((24, 16), None), ((24, 16), 1), ((40, 8), 1)])
def test_jax_in_float32_goes_there_too(shape, rank):
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    import rlx_optim.optax as front

    start, grads = draw(shape, rank)
    tx = front.soap(0.01, precondition_frequency=5)
    params = jax.tree.map(jax.numpy.asarray, start)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for each in grads:
        params, state = step(params, state, each)
    assert distance({"w": np.asarray(params["w"])}, walk(shape, rank, "reference", 5), start) < 1e-3


def test_a_row_without_gradients_keeps_its_unit_vector():
    start, grads = copy.deepcopy(draw((20, 3)))
    dead = [0, 1, 2, 7, 19]
    for each in grads:
        each["w"][dead] = 0
    opt = rlx_optim.SOAP(precondition_frequency=2)
    for each in grads:
        opt.step_all(start, each)
        Q = opt.state("w")["Q1"]
        np.testing.assert_allclose(np.sort(abs(Q[dead]), axis=1)[:, -2:], [[0, 1]] * len(dead), atol=1e-6)
        np.testing.assert_allclose(Q.T @ Q, np.eye(20), atol=1e-5)


class Single(ArrayEngine):
    """Any array library in float32, nothing overridden."""

    name, dtype = "single", np.float32


@pytest.mark.parametrize("engine", [get_engine("reference"), get_engine("cpu"), Single()], ids=lambda E: E.name)
def test_open_columns_are_those_of_the_basis_before(engine):
    """A dependent column in the midst of others takes nothing from them; two that are zero stay where they were."""
    rng, n = np.random.default_rng(1), 7
    near = np.linalg.qr(rng.standard_normal((n, n)))[0]
    sure = [0, 1, 3, 4]
    X = near @ np.triu(rng.standard_normal((n, n)) + 3 * np.eye(n))
    X[:, 2] = X[:, 0] - 2 * X[:, 1] + 1e-9 * rng.standard_normal(n)
    X[:, 5:] = 0
    X, near = (A.astype(engine.dtype)[None] for A in (X, near))
    found = basis.orthonormalize.default(engine, X, near, np.arange(n)[None], np.zeros((1, n), bool))[0]
    np.testing.assert_allclose(found.T @ found, np.eye(n), atol=1e-6)
    want = np.linalg.qr(X[0][:, sure].astype(np.float64))[0]
    np.testing.assert_allclose(abs((found[:, sure] * want).sum(0)), 1, atol=1e-6)
    rest = near[0] - want @ (want.T @ near[0])
    assert abs((found[:, 2] * rest[:, 2]).sum()) / np.linalg.norm(rest[:, 2]) == pytest.approx(1, abs=1e-6)


def test_sizes_that_are_rounding_keep_their_order():
    E = get_engine("reference")
    sizes = np.array([[1e-9, 2.0, -3e-9, 5.0, 2e-9, 1e-3]])
    assert basis.descending_order(E, sizes).tolist() == [[3, 1, 5, 0, 2, 4]]


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_gram_matrix_is_named(engine, bad):
    """Its first basis is LAPACK's, which says that eigenvalues do not converge, and not whose."""
    torch = pytest.importorskip("torch")
    import rlx_optim.torch as front

    params = {name: torch.nn.Parameter(torch.ones(6, 4)) for name in "ab"}
    opt = front.SOAP(list(params.items()), engine=engine)
    opt.state[params["b"]]["L1"].fill_(bad)
    for p in params.values():
        p.grad = torch.ones(6, 4)
    with pytest.raises(ValueError, match="SOAP: the state cannot be decomposed: 'L1' of 'b' holds NaN or infinity; load a good"):
        opt.step()


def test_a_singular_factor_is_named(tmp_path):
    """The reference solves with KronPSGD's factors."""
    opt = rlx_optim.KronPSGD(engine="reference")
    opt.step_all({"w": np.ones((3, 2), np.float32)}, {"w": np.ones((3, 2), np.float32)})
    opt._records["w"].state["q1"][...] = 0
    with pytest.raises(ValueError, match="KronPSGD: the state cannot be decomposed: 'w': Singular matrix; load a good"):
        opt.step_all({"w": np.ones((3, 2), np.float32)}, {"w": np.ones((3, 2), np.float32)})
