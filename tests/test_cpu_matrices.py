"""What the cpu engine does with large matrices, against NumPy."""

import numpy as np
import pytest

from rlx_optim import SOAP, basis, create, linalg, random
from rlx_optim.engines import get_engine
from rlx_optim.engines.cpu import bases, matrices, noise, triangular
from rlx_optim.engines.cpu.engine import Cpu

E = get_engine("cpu")


def low_rank(n, rank, seed=0, least=1e-3):
    """An average Gram matrix whose eigenvalues fall to `least` and then vanish, and its eigenvectors."""
    V = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]
    return (V[:, :rank] * np.geomspace(1, least, rank)) @ V[:, :rank].T, V


def apart(Q):
    return abs(Q.T @ Q - np.eye(Q.shape[1])).max()


@pytest.mark.parametrize(("n", "columns"), [(1, 3), (70, 5), (256, 9), (300, 40), (1024, 5), (1100, 20)])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_average_gram_is_that_of_float64_rounded(n, columns, precision):
    rng, engine = np.random.default_rng(n), get_engine("cpu", precision=precision)
    X, L = (rng.standard_normal((2, n, k)).astype(precision) for k in (columns, n))  # L need not be symmetric
    for axis, Y in ((1, X), (2, X.mT.copy())):
        stored, later = engine.average_gram(L, Y, axis, 0.9, 0.1)
        want = 0.9 * L.astype(np.float64) + 0.1 * (X.astype(np.float64) @ X.astype(np.float64).mT)
        np.testing.assert_allclose(stored, want.astype(np.float32), rtol=3e-7, atol=3e-8)
        np.testing.assert_allclose(engine.to_float64(later), want, rtol=1e-12, atol=1e-13)
        assert stored.dtype == engine.dtype
    symmetric, _ = engine.average_gram(L + L.mT, X, 1, 0.9, 0.1)
    np.testing.assert_array_equal(symmetric, symmetric.mT)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e30])
def test_a_gram_matrix_that_is_not_finite_leaves_its_own_alone(bad):
    X, L = np.ones((2, 300, 2), np.float32), np.ones((2, 300, 300), np.float32)
    X[1, 299, 0] = bad
    stored, _ = linalg.average_gram(E, L, X, 1, 0.5, 0.5)
    np.testing.assert_array_equal(stored[1], L[1])
    np.testing.assert_array_equal(stored[0], np.full((300, 300), 1.5, np.float32))


@pytest.mark.parametrize("n", [1, 127, 128, 300])
@pytest.mark.parametrize("rank", [0.2, 1.0])
def test_reflections_are_a_qr_that_ends_where_nothing_is_left(n, rank):
    X, rank = np.random.default_rng(n).standard_normal((n, n)), max(1, int(rank * n))
    X[:, rank:] = X[:, :rank] @ np.random.default_rng(1).standard_normal((rank, n - rank))
    X[:, n // 3] *= rank == n  # a zero before the others
    Q, taken = bases.find_householder_q(X)
    assert apart(Q) < 1e-13
    np.testing.assert_allclose(np.tril(Q.T @ X, -1), 0, atol=1e-10)
    assert taken == min(n, -(-rank // bases.PANEL) * bases.PANEL)


def test_reflections_of_nothing():
    Q, taken = bases.find_householder_q(np.zeros((300, 300)))
    np.testing.assert_array_equal(Q, np.eye(300))
    assert taken == 0


@pytest.mark.parametrize("rank", [0, 1, 100, 128, 290, 300])
def test_eigenvectors_within_the_range(rank):
    L, V = low_rank(300, rank)
    values, Q = bases.solve_symmetric(L)
    want = np.zeros(300)
    want[:rank] = np.geomspace(1, 1e-3, rank)
    np.testing.assert_allclose(values, want, atol=1e-13)
    assert apart(Q) < 1e-12
    np.testing.assert_allclose(abs((Q * V).sum(0))[:rank], 1, atol=1e-9)


def rounded(n, first):
    """A basis as it is kept in float32, but for its first columns."""
    X = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))[0].astype(np.float32).astype(np.float64)
    X[:, :first] = np.linalg.qr(X[:, :first])[0]
    return X


@pytest.mark.parametrize("first", [0, 10, 300, 500])
def test_what_is_nearly_orthonormal_is_completed(first):
    X = rounded(500, first)
    Q = X.copy()
    assert E._completed(Q[:, :first], Q[:, first:], 0.0)
    assert apart(Q) < 1e-11
    want = np.linalg.qr(X)[0]
    np.testing.assert_allclose(Q, want * np.sign((want * X).sum(0)), atol=1e-11)


def test_columns_that_are_loose_stay_so_but_leave_those_before_them():
    """As long as that is what float32 would do to them again."""
    n, first = 500, 100
    X, loose = rounded(n, first), 2 * np.finfo(np.float32).eps
    Q = X.copy()
    assert E._completed(Q[:, :first], Q[:, first:], loose)
    assert abs(Q[:, :first].T @ Q[:, first:]).max() < 1e-13
    assert 1e-11 < apart(Q) < 1e-8
    np.testing.assert_allclose(np.linalg.norm(Q, axis=0), 1, atol=1e-14)
    np.testing.assert_allclose(Q, X, atol=1e-8)

    for skew in ({(400, 300): 5e-7}, {(400, 300): 9e-7, (400, 301): -9e-7, (401, 300): -9e-7, (401, 301): 9e-7}):
        Q = X.copy()  # more than that, the second so that sums of rows do not tell
        for (i, j), share in skew.items():
            Q[:, i] += share * X[:, j]
        assert E._completed(Q[:, :first], Q[:, first:], loose)
        assert apart(Q) < 1e-11


def test_what_is_not_nearly_orthonormal_is_not_completed_and_spans_what_it_did():
    n, first = 600, 100
    X = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))[0]
    X[:, 450] += 1e-3 * X[:, 3]
    Q = X.copy()
    assert not E._completed(Q[:, :first], Q[:, first:], 0.0)
    np.testing.assert_allclose(abs((np.linalg.qr(Q)[0] * np.linalg.qr(X)[0]).sum(0)), 1, atol=1e-12)
    found = basis.extend_basis(E, X[None], X[None], np.arange(n)[None] >= first)[0]
    assert apart(found) < 1e-12


@pytest.mark.parametrize("rank", [100, 256, 300, 900, 1000])
def test_a_column_is_left_out_where_l_leaves_rounding_alone(rank):
    n, share = 1000, basis.ROUNDING[8]
    L, V = low_rank(n, rank, least=1e-4)
    L, Q = L.astype(np.float32), V.astype(np.float32).astype(np.float64)
    X, want = np.zeros((n, n)), L.astype(np.float64) @ Q
    bases.multiply_gram(L, Q, X, share)
    missing = ~X.any(0)
    np.testing.assert_allclose(X[:, ~missing], want[:, ~missing], atol=1e-14)
    sizes = (Q * want).sum(0)
    assert (sizes[missing] <= share * sizes.max()).all()
    quarter = n // bases.QUARTERS
    assert missing.sum() == (n - quarter * -(-rank // quarter) if rank <= 300 else 0)


def test_a_column_that_l_does_not_leave_alone_is_found_behind_those_that_it_does():
    n, share = 1000, basis.ROUNDING[8]
    L, V = low_rank(n, 200)
    for size in (3 * share, 1e-2):
        X = np.zeros((n, n))
        bases.multiply_gram(L + size * np.outer(V[:, 990], V[:, 990]), V, X, share)
        np.testing.assert_allclose(X[:, 990], size * V[:, 990], atol=1e-12)


@pytest.mark.parametrize("n", [1, 191, 192, 193, 500])
def test_products_with_triangular_matrices(n):
    rng = np.random.default_rng(n)
    T, X = rng.standard_normal((n, n)), rng.standard_normal((n, 7))
    R = np.triu(rng.standard_normal((n, n)))
    for multiply, A, B, want in (
        (triangular.matmul_upper, R, X, R @ X),
        (triangular.matmul_upper_transposed, R, X, R.T @ X),
        (triangular.matmul_two_upper, T, R, np.triu(T) @ R),
    ):
        out = np.full(B.shape, np.nan)
        multiply(A, B, out)
        np.testing.assert_allclose(out, want, atol=1e-11)


def test_reach_of_columns_that_are_not_free():
    rng, n = np.random.default_rng(0), 40
    X, free = rng.standard_normal((2, n, n)), rng.random((2, n)) < 0.3
    Q = np.linalg.qr(X)[0]
    np.testing.assert_allclose(
        basis.inv_r_norms(E, Q, X, free), basis.inv_r_norms.default(get_engine("reference"), Q, X, free), rtol=1e-9
    )


@pytest.mark.parametrize("axis", [1, 2])
def test_take_by_an_order(axis):
    X, order = np.random.default_rng(0).standard_normal((1, 5, 5)), np.array([[3, 1, 0, 4, 2]])
    np.testing.assert_array_equal(linalg.permute(E, X, order, axis), X.take(order[0], axis))
    assert linalg.permute(E, X, np.arange(5)[None], axis) is X


@pytest.mark.parametrize("n", [0, 1, 5, 1000])
@pytest.mark.parametrize("beside", [0, 41, 2**32 - 1, 2**34 + 5])
def test_compiled_noise_is_threefry(n, beside):
    key0, key1 = (np.array([[a], [b]]) for a, b in ((0, 2**32 - 1), (123_456_789, 7)))
    found, want = noise.threefry(key0, key1, n, beside), random.threefry(key0, key1, np.arange(n), beside)
    np.testing.assert_array_equal(found, want)


def test_reordered_columns_are_in_the_same_memory():
    X, order = np.random.default_rng(0).standard_normal((2, 3, 5)), np.array([[3, 1, 0, 4, 2], [0, 1, 2, 4, 3]])
    want = np.take_along_axis(X, order[:, None], 2)
    assert basis.permute_columns(E, X, order) is X
    np.testing.assert_array_equal(X, want)


@pytest.mark.parametrize("least", [0.0, 1e-25])
def test_soap_where_there_was_no_gradient_yet(least):
    """All directions are open then; a gradient of 1e-25 leaves nothing in float32 either."""
    rng = np.random.default_rng(0)
    G = rng.standard_normal((300, 280)).astype(np.float32)
    ends = []
    for engine in ("cpu", "reference"):
        p, opt = {"w": np.ones((300, 280), np.float32)}, SOAP(precondition_frequency=2, engine=engine)
        for t in range(6):
            opt.step_all(p, {"w": G if t == 5 else np.float32(least) * G})
            opt.end_iteration()
        ends.append(p["w"])
    assert np.isfinite(ends[0]).all()
    assert (ends[0] != 1).any()
    if not least:  # the reference keeps more than float32
        np.testing.assert_allclose(ends[0], ends[1], rtol=2e-6)


STACKS = {
    "small": [(8, 8)] * 3 + [(5, 12)] * 2 + [(12, 5)] * 2 + [(7,)] * 3 + [(3, 4, 5)] * 2 + [()] * 2,
    "large": [(300, 20)] * 3 + [(64, 70)] * 2 + [(18, 18)] * 2,
}
OF_STACKS = {
    "soap": [
        {"precondition_frequency": 3},
        {"precondition_frequency": 1, "decay": "hyperball"},
        {"precondition_1d": True},
        {"merge_dims": True, "max_precond_dim": 400},
    ],
    "kronpsgd": [{}, {"preconditioner_update_probability": 0.4, "balance_probability": 0.5, "memory_save_mode": "one_diag"}],
    "muon": [{}, {"convention": "rlx"}, {"ns_coefficients": "polar_express", "decay": "hyperball", "weight_decay": 0.1}],
    "normuon": [{}],
    "scion": [{}],
}


@pytest.mark.parametrize("shapes", STACKS)
@pytest.mark.parametrize(("name", "settings"), [(name, each) for name, several in OF_STACKS.items() for each in several])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_small_tensors_in_stacks_go_where_they_go_alone_bit_for_bit(name, settings, shapes, precision, monkeypatch):
    """Those of one shape that took part in as many steps; one is left out now and then, one has no gradient or none that is
    finite, one has a rank that makes its basis ask for more."""

    def walk(entries):
        monkeypatch.setattr(matrices, "STACKED", entries)
        rng = np.random.default_rng(0)
        params = {f"w{i}": np.asarray(rng.standard_normal(shape), precision) for i, shape in enumerate(STACKS[shapes])}
        opt, given = create(name, engine="cpu", **settings), []

        def counted(self, bundle, move=True):
            given.append(len(bundle.shapes) if bundle.spec.matrix else 1)
            return run(self, bundle, move)

        monkeypatch.setattr(Cpu, "run", counted)
        for t in range(9):
            grads = {k: np.asarray(0.1 * rng.standard_normal(p.shape), precision) for k, p in params.items()}
            grads["w0"] = np.asarray(grads["w0"][:, :1] * grads["w0"][:1] if t < 5 else grads["w0"], precision)
            grads["w1"] *= t != 5
            grads["w3"].flat[0] = np.nan if t == 7 else grads["w3"].flat[0]
            if t % 4 == 2:
                del grads["w2"]
            opt.step_all({k: params[k] for k in grads}, grads)
        return params, {k: opt.state(k) for k in params}, max(given)

    run, usual = Cpu.run, matrices.STACKED
    (one, ones, single), (two, twos, most) = walk(1), walk(usual)
    assert (single, most > 1) == (1, True)
    for k in one:
        assert one[k].tobytes() == two[k].tobytes()
        assert [np.asarray(a).tobytes() for a in ones[k].values()] == [np.asarray(a).tobytes() for a in twos[k].values()]


@pytest.mark.parametrize("shape", [(), (7,), (64, 64), (1, 500), (500, 1), (3, 4, 5), (512,), (4, 4000), (300, 300)])
def test_stacks_take_no_more_memory_than_one_large_matrix(shape):
    """Nor do their factors, which are far larger than a thin tensor."""
    many, longest = E.stack_size(shape), max(shape, default=1)
    assert many == 1 or many * max(np.prod(shape), longest**2) <= matrices.STACKED
    assert (many > 1) == (longest <= 362)
