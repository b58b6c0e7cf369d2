"""SOAP's bases: how they are made orthonormal, what happens where that fails, and that they stay so."""

import numpy as np
import pytest
from helpers import distance
from test_faults_soap import Single, draw, walk

import rlx_optim
from rlx_optim import linalg
from rlx_optim.engines import get_engine


def stale(n, decay=1e-4, batch=2):
    """L·Q for a Q that was L's basis some steps ago: the eigenvalues fall by `decay`."""
    rng = np.random.default_rng(n)
    V = np.linalg.qr(rng.standard_normal((batch, n, n)))[0]
    Q = np.linalg.qr(V + 0.3 * rng.standard_normal((batch, n, n)) / np.sqrt(n))[0]
    return (V * np.geomspace(1, decay, n)) @ V.mT @ Q


def apart(Q):
    return abs(Q.mT @ Q - np.eye(Q.shape[-1])).max()


@pytest.mark.parametrize("n", [1, 128, 129, 300])
@pytest.mark.parametrize("make", [stale, lambda n: np.random.default_rng(n).standard_normal((2, n, n))], ids=["stale", "gauss"])
def test_block_gram_schmidt_is_qr(n, make):
    X = make(n)
    found, want = linalg.gram_schmidt(get_engine("cpu"), X.copy()), np.linalg.qr(X)[0]
    assert apart(found) < 1e-9
    np.testing.assert_allclose(abs((found * want).sum(-2)), 1, atol=1e-9)
    np.testing.assert_array_less(0, (found * X).sum(-2))  # the diagonal of R


@pytest.mark.parametrize("n", [300])
def test_in_float32_it_is_straightened(n, monkeypatch):
    torch = pytest.importorskip("torch")
    from rlx_optim.engines.torch_ import Torch

    X, E = stale(n), Torch()
    monkeypatch.setattr(Torch, "panel", 64)
    rough = linalg.gram_schmidt(E, torch.tensor(X, dtype=torch.float32))
    assert apart(rough.double().numpy()) < 1e-4
    assert apart(linalg.straightened(E, rough).double().numpy()) < 2e-6
    np.testing.assert_allclose(abs((rough.numpy() * np.linalg.qr(X)[0]).sum(-2)), 1, atol=1e-4)


@pytest.mark.parametrize("n", [40, 300])
def test_dependent_columns_of_the_cpu_engine_go_to_lapack(n):
    X = np.random.default_rng(0).standard_normal((2, n, n))
    X[0, :, n // 2] = X[0, :, 0] - X[0, :, 1]
    X[0, :, -1] = 0
    Q = get_engine("cpu").qr(X)
    assert apart(Q) < 1e-9
    np.testing.assert_allclose(np.tril(Q.mT @ X, -1), 0, atol=1e-9)


class Waiting(Single):
    """Decides by what was the last time, as CUDA does."""

    name = "waiting"

    def __init__(self):
        self.last = {}

    def soon(self, predicate, yes, no, *operands):
        before = self.last.get(yes.__qualname__, predicate)
        self.last[yes.__qualname__] = predicate
        return (yes if before else no)(*operands)


def test_an_engine_that_does_not_wait_keeps_the_basis_before_once():
    n, E = 12, Waiting()
    rng = np.random.default_rng(3)
    near = np.linalg.qr(rng.standard_normal((2, n, n)))[0].astype(np.float32)
    good = stale(n, 0.1).astype(np.float32)
    bad = good.copy()
    bad[1, :, 5] = bad[1, :, 2]
    order, none = np.arange(n)[None].repeat(2, 0), np.zeros((2, n), bool)
    plain = linalg.orthonormal(E, good, near, order, none)
    late = linalg.orthonormal(E, bad, near, order, none)
    np.testing.assert_array_equal(late[1], near[1])
    np.testing.assert_array_equal(late[0], plain[0])
    settled = linalg.orthonormal(E, bad, near, order, none)
    np.testing.assert_allclose(settled, linalg.orthonormal(Single(), bad, near, order, none), atol=1e-6)
    for each in (plain, late, settled):
        assert apart(each) < 1e-5


def test_columns_known_to_be_open_need_no_second_decomposition():
    n, rank, calls = 40, 10, []

    class Counting(Single):
        def qr(self, X, surely=False):
            calls.append(surely)
            return super().qr(X, surely)

    rng = np.random.default_rng(4)
    Q = np.linalg.qr(rng.standard_normal((1, n, n)))[0]
    L = (Q[..., :rank] * np.geomspace(1, 0.1, rank)) @ Q[..., :rank].mT
    X, E = (L @ Q).astype(np.float32), Counting()
    free = linalg.minor(E, (Q * X).sum(-2))
    found = linalg.orthonormal(E, X, Q.astype(np.float32), np.arange(n)[None], free)
    assert calls == [False]
    assert free.sum() == n - rank
    np.testing.assert_allclose(abs((found * Q).sum(-2)), 1, atol=1e-5)


@pytest.mark.parametrize(("shape", "every"), [((24, 16), 1), ((40, 8), 7)])
def test_bases_are_orthonormal_after_a_thousand_steps(shape, every):
    rng = np.random.default_rng(5)
    opt, p = rlx_optim.SOAP(lr=1e-3, precondition_frequency=every), {"w": rng.standard_normal(shape).astype(np.float32)}
    for _ in range(1000):
        opt.step_all(p, {"w": rng.standard_normal(shape).astype(np.float32)})
    for name in ("Q1", "Q2"):
        assert apart(opt.state("w")[name].astype(np.float64)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(768, 256), (1024, 64)])
def test_large_bases_go_where_the_reference_goes(shape):
    start, grads = draw(shape)
    found = walk(start, grads, "cpu", 10)
    assert distance(found, walk(start, grads, "reference", 10), start) < 1e-5
    assert distance(found, walk(start, grads, "cpu", 10, scale=1.0000001), start) < 3e-3
