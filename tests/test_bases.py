"""SOAP's bases: how they are made orthonormal, what happens where that fails, and that they stay so."""

import numpy as np
import pytest
from helpers import distance
from test_faults_soap import Single, draw, walk

import rlx_optim
from rlx_optim import basis, linalg
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
    found, want = basis.gram_schmidt(get_engine("cpu"), X.copy()), np.linalg.qr(X)[0]
    assert apart(found) < 1e-9
    np.testing.assert_allclose(abs((found * want).sum(-2)), 1, atol=1e-9)
    np.testing.assert_array_less(0, (found * X).sum(-2))  # the diagonal of R


@pytest.mark.parametrize("n", [300])
def test_in_float32_it_is_straightened(n, monkeypatch):
    torch = pytest.importorskip("torch")
    from rlx_optim.engines.torch_ import TorchEngine

    X, E = stale(n), TorchEngine()
    monkeypatch.setattr(TorchEngine, "panel_width", 64)
    rough = basis.gram_schmidt(E, torch.tensor(X, dtype=torch.float32), torch.zeros(X.shape[0], n))
    assert apart(rough.double().numpy()) < 1e-4
    assert apart(basis.reorthogonalize(E, rough).double().numpy()) < 2e-6
    np.testing.assert_allclose(abs((rough.numpy() * np.linalg.qr(X)[0]).sum(-2)), 1, atol=1e-4)


@pytest.mark.parametrize("n", [100, 300])
def test_columns_of_two_bases_are_made_one(n):
    """As a refresh does once it is known what is open: half of a basis of an old one, and unit vectors that it says nothing of."""
    E = Products()
    Q = np.linalg.qr(np.random.default_rng(n).standard_normal((2, n, n)))[0]
    X = np.concatenate((Q[..., : n // 2], np.broadcast_to(np.eye(n)[:, : n - n // 2], (2, n, n - n // 2))), -1)
    found = basis.reorthogonalize(E, basis.gram_schmidt(E, X.astype(np.float32)))
    assert apart(found.astype(np.float64)) < 2e-6
    np.testing.assert_allclose((found * np.linalg.qr(X)[0]).sum(-2) ** 2, 1, atol=2e-4)


@pytest.mark.parametrize("n", [40, 300])
def test_dependent_columns_of_the_cpu_engine_go_to_lapack(n):
    X = np.random.default_rng(0).standard_normal((2, n, n))
    X[0, :, n // 2] = X[0, :, 0] - X[0, :, 1]
    X[0, :, -1] = 0
    Q = get_engine("cpu").qr(X)
    assert apart(Q) < 1e-9
    np.testing.assert_allclose(np.tril(Q.mT @ X, -1), 0, atol=1e-9)


class Products(Single):
    """Bases as CUDA makes them."""

    name, panel_width = "products", 16

    def orthonormalize_panel(self, X, noise=None):
        noise = np.zeros((X.shape[0], X.shape[2]), self.dtype) if noise is None else noise
        X[...] = basis.orthonormalize_by_pivots(self, X.astype(np.float64), noise)

    def orthonormalize(self, X, near, order, free):
        return basis.orthonormalize_by_products(self, X, near, order, free)


class Wide(Products):
    dtype = np.float64


@pytest.mark.parametrize("n", [1, 16, 60])
def test_a_few_columns_one_after_the_other_are_qr(n):
    X = np.random.default_rng(n).standard_normal((2, n + 3, n))
    found, want = basis.orthonormalize_by_pivots(Wide(), X, np.zeros((2, n))), np.linalg.qr(X)[0]
    np.testing.assert_allclose(found, want * np.sign((want * X).sum(-2, keepdims=True)), atol=1e-9)


@pytest.mark.parametrize("n", [40, 16])
def test_columns_that_depend_on_others_but_for_noise_become_zero(n):
    """Across panels of 16 and within one."""
    rng, lost, off = np.random.default_rng(0), [7, n // 2, n - 1], 1e-6
    X = rng.standard_normal((1, n + 3, n))
    X[..., lost] = X[..., [0, 1, 2]] + X[..., [3, 4, 5]]
    X /= np.linalg.norm(X, axis=-2, keepdims=True)
    X[..., lost] += 0.1 * off * rng.standard_normal((1, n + 3, 3)) / np.sqrt(n)
    kept = np.setdiff1d(np.arange(n), lost)
    found = basis.gram_schmidt(Wide(), X.copy(), noise := np.full((1, n), off**2))
    assert not found[..., lost].any()
    want = np.linalg.qr(X[..., kept])[0]
    np.testing.assert_allclose(abs((found[..., kept] * want).sum(-2)), 1, atol=1e-9)
    # and how far the others may be off: about the noise times the entries of R^-1
    inverse = np.linalg.norm(np.linalg.inv(np.triu(want[0].T @ X[0][:, kept])), axis=0)
    assert ((noise[0, kept] / (off * inverse) ** 2 < 2) & (noise[0, kept] / (off * inverse) ** 2 > 1 / n)).all()


def test_what_a_small_pivot_does_to_later_columns_is_seen():
    """Column 1 is nearly column 0: what it is made of is off by a thousandth, so what follows depends on both, but for more."""
    rng, near = np.random.default_rng(1), 1e-3
    q = np.linalg.qr(rng.standard_normal((1, 9, 3)))[0]
    X = np.stack([q[..., 0], q[..., 0] + near * q[..., 1], q[..., 1] + 5e-4 * q[..., 2]], -1)
    noise = np.full((1, 3), 1e-6**2)
    found = basis.gram_schmidt(Wide(), X, noise)
    assert not found[..., 2].any()
    np.testing.assert_allclose(noise[0, 1], 1e-6, rtol=1e-2)


def refreshed(E, L, Q):
    """L·Q and Q by descending estimates, what of it is open, and the basis that E makes of it."""
    X = L @ Q
    order = basis.descending_order(E, (Q * X).sum(-2))
    X, near = (linalg.permute(E, Y, order, 2) for Y in (X, Q))
    return X, near, basis.orthonormalize(E, X, near, order, basis.below_rounding(E, (near * X).sum(-2)))


@pytest.mark.parametrize(("E", "bar"), [(Wide(), 1e-9), (Products(), 2e-3)], ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize("n", [1, 40, 100])
def test_a_basis_by_products_is_that_of_qr(E, bar, n):
    rng = np.random.default_rng(n)
    V = np.linalg.qr(rng.standard_normal((2, n, n)))[0]
    Q = np.linalg.qr(V + 0.1 * rng.standard_normal((2, n, n)) / np.sqrt(n))[0].astype(E.dtype)
    X, _, found = refreshed(E, ((V * np.geomspace(1, 1e-3, n)) @ V.mT).astype(E.dtype), Q)
    assert apart(found.astype(np.float64)) < 2e-6
    np.testing.assert_allclose(abs((found * np.linalg.qr(X.astype(np.float64))[0]).sum(-2)), 1, atol=bar)


@pytest.mark.parametrize("E", [Wide(), Products()], ids=["float64", "float32"])
def test_columns_that_products_leave_open_are_those_of_the_basis_before(E):
    """Of rank 12 of 40: what is not spanned keeps near, made orthonormal to what is."""
    rng, n, rank = np.random.default_rng(6), 40, 12
    V = np.linalg.qr(rng.standard_normal((1, n, n)))[0]
    Q = np.linalg.qr(V + 0.02 * rng.standard_normal((1, n, n)) / np.sqrt(n))[0].astype(E.dtype)
    L = ((V[..., :rank] * np.geomspace(1, 0.1, rank)) @ V[..., :rank].mT).astype(E.dtype)
    X, near, found = refreshed(E, L, Q)
    assert apart(found.astype(np.float64)) < 2e-6
    want = np.linalg.qr(np.concatenate([X[..., :rank], near[..., rank:]], -1).astype(np.float64))[0]
    np.testing.assert_allclose(abs((found * want).sum(-2)), 1, atol=1e-5)


def test_a_rank_that_grows():
    """Gradients of 16 columns, eleven steps after the first basis: what is not spanned yet is spanned but for a thousandth."""
    (_, grads), n, E = draw((640, 16)), 640, Products()
    each = [0.05 * g["w"].astype(np.float64) @ g["w"].T for g in grads[:11]]
    L = sum(0.95 ** (10 - t) * G for t, G in enumerate(each))[None].astype(np.float32)
    Q = basis.eigenbasis(E, each[0][None].astype(np.float32), np.eye(n, dtype=np.float32)[None])
    X, near, found = refreshed(E, L, Q)
    assert (found != near).any()
    assert apart(found.astype(np.float64)) < 2e-6
    np.testing.assert_allclose(abs((found * np.linalg.qr(X.astype(np.float64))[0]).sum(-2))[:, :100], 1, atol=1e-4)


def test_without_gradients_a_basis_by_products_stays():
    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 20, 20)))[0].astype(np.float32)
    *_, found = refreshed(Products(), np.zeros_like(Q), Q)
    np.testing.assert_allclose(found, Q, atol=1e-6)


def test_where_products_give_no_basis_the_one_before_stays():
    class Failing(Products):
        def orthonormalize_panel(self, X, noise=None):
            super().orthonormalize_panel(X, noise)
            X[1] = np.nan

    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 20, 20)))[0].astype(np.float32)
    L = (Q * np.geomspace(1, 0.1, 20, dtype=np.float32)) @ Q.mT + np.float32(0.01)
    _, near, found = refreshed(Failing(), L, Q)
    np.testing.assert_array_equal(found[1], near[1])
    np.testing.assert_array_equal(found[0], refreshed(Products(), L, Q)[2][0])
    assert (found[0] != near[0]).any()


@pytest.mark.parametrize(
    ("shape", "rank", "every"), [((40, 8), None, 2), ((24, 16), 1, 2), ((30, 6), 1, 2), ((33, 130), None, 1), ((64, 48), None, 5)]
)
def test_with_bases_by_products_soap_goes_where_the_reference_goes(shape, rank, every):
    far = [distance(walk(shape, rank, E, every, scale=scale), walk(shape, rank, "reference", every), draw(shape, rank)[0])
           for E, scale in ((Products(), 1), (Products(), 1.0000001))]  # fmt: skip
    assert max(far) < 1e-4


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
    free = basis.below_rounding(E, (Q * X).sum(-2))
    found = basis.orthonormalize.default(E, X, Q.astype(np.float32), np.arange(n)[None], free)
    assert calls == [False]
    assert free.sum() == n - rank
    np.testing.assert_allclose(abs((found * Q).sum(-2)), 1, atol=1e-5)


@pytest.mark.parametrize(("shape", "every", "engine"), [((24, 16), 1, "cpu"), ((40, 8), 7, "cpu"), ((12, 8), 4, Products())])
def test_bases_are_orthonormal_after_a_thousand_steps(shape, every, engine):
    rng = np.random.default_rng(5)
    opt, p = (
        rlx_optim.SOAP(lr=1e-3, precondition_frequency=every, engine=engine),
        {"w": rng.standard_normal(shape).astype(np.float32)},
    )
    for _ in range(1000):
        opt.step_all(p, {"w": rng.standard_normal(shape).astype(np.float32)})
    for name in ("Q1", "Q2"):
        assert apart(opt.state("w")[name].astype(np.float64)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(768, 256), (1024, 64)])
def test_large_bases_go_where_the_reference_goes(shape):
    found, start = walk(shape, None, "cpu", 10), draw(shape)[0]
    assert distance(found, walk(shape, None, "reference", 10), start) < 1e-5
    assert distance(found, walk(shape, None, "cpu", 10, scale=1.0000001), start) < 3e-3
