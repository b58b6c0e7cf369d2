"""Products of float32 on half-precision tensor cores, in Triton's interpreter; on a GPU with SOAP and KronPSGD around them."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from interpreter import in_the_interpreter  # noqa: E402

import rlx_optim  # noqa: E402
import rlx_optim.torch as front  # noqa: E402


def gap(found, want):
    return float((found.double() - want).norm() / want.norm())


def products(device="cpu"):
    """How far products are from float64, by what is multiplied."""
    from rlx_optim.engines.triton_ import precise

    torch.manual_seed(0)
    A, B = (
        torch.randn(2, 20, 70, device=device, dtype=torch.float32),
        1e-6 * torch.randn(2, 70, 30, device=device, dtype=torch.float32),
    )
    A[1] *= 1e9
    found = {}
    for name, a, b in (
        ("plain", A, B), ("turned", A.mT.contiguous().mT, B), ("both turned", A.mT.contiguous().mT, B.mT.contiguous().mT),
        ("a part", A[:, :, 8:64], B[:, 8:64]), ("tiny", A, 1e-25 * B),
    ):  # fmt: skip
        found[name] = gap(precise.product(a, b), a.double() @ b.double())
    small = torch.rand(1, 20, 70, device=device, dtype=torch.float32) - 0.5
    square = small.double() @ small.double().mT
    found["bounded"] = gap(precise.product(small, small.mT, bound=1), square)
    whole = torch.randn(1, 20, 50, device=device, dtype=torch.float32)
    before, here = whole.double(), whole[..., 10:30]
    precise.joined(here, small, small.mT, 1, 1.0, -1.0)
    found["joined to columns"] = gap(here, before[..., 10:30] - square)
    found["beside them"] = float((whole.double() - before)[..., [*range(10), *range(30, 50)]].abs().sum())
    for name, X in (
        ("square", 1e-17 * torch.randn(2, 256, 70, device=device, dtype=torch.float32)),
        ("of the other side", torch.randn(2, 70, 256, device=device, dtype=torch.float32).mT),
    ):
        found[name] = gap(precise.square(X), X.double() @ X.double().mT)
    return found


def averages(device="cpu"):
    """An average of Gram matrices in place: how far it is from float64; what is not finite, or told to wait, leaves it alone."""
    from rlx_optim.engines.triton_ import precise

    torch.manual_seed(1)
    X = 3e-5 * torch.randn(2, 256, 70, device=device)
    each = [torch.eye(256, device=device) * 1e-9 for _ in X]
    address = torch.tensor([L.data_ptr() for L in each], device=device)
    want = 0.95 * torch.stack(each).double() + 0.05 * X.double() @ X.double().mT
    precise.average_gram(address, X, False, 0.95, 0.05, None)
    found = {"average": gap(torch.stack(each), want)}
    X[1, 3, 3] = float("inf")
    before = torch.stack(each)
    precise.average_gram(address, X, False, 0.95, 0.05, None)
    found["not finite"] = float((each[1] != before[1]).any()) + float((each[0] == before[0]).all())
    before = torch.stack(each)
    precise.average_gram(address, X, False, 0.95, 0.05, torch.tensor(False, device=device))
    found["told to wait"] = float((torch.stack(each) != before).any())
    return found


def columns(device="cpu"):
    """A few columns in the midst of larger arrays: how far they are from the Q of float64, one that nearly depends on others, too;
    one that does but for noise is zero, and the noise follows."""
    from rlx_optim import basis
    from rlx_optim.engines import get_engine
    from rlx_optim.engines.triton_ import panels
    from rlx_optim.engines.triton_.engine import Triton

    torch.manual_seed(2)
    found = {}
    for n, rows in ((64, 300), (40, 40), (20, 100)):
        X = torch.randn(2, rows, 100, device=device)
        X[..., 8] = X[..., 5] + 1e-3 * X[..., 8]
        X[1, :, 5 + n // 2] = X[1, :, 6] + X[1, :, 7]
        X /= X.norm(dim=-2, keepdim=True)
        noise = torch.full((2, 100), 1e-10, device=device)
        here, before, off = slice(5, 5 + n), X.clone(), noise[:, 5 : 5 + n].double().cpu().numpy()
        panels.orthonormal(X[..., here], noise[:, here])
        Q, beside = X[..., here], torch.cat((X - before, noise[:, None] - 1e-10), 1)
        want = basis.orthonormalize_by_pivots(get_engine("reference"), before[..., here].double().cpu().numpy(), off)
        found[f"{n}"] = gap(Q.cpu(), torch.tensor(want))
        found[f"{n}, one left out"] = float(Q[1, :, n // 2].abs().sum() + (want[1, :, n // 2] != 0).sum())
        found[f"{n}, beside it"] = float(beside[..., :5].abs().sum() + beside[..., 5 + n :].abs().sum())
        found[f"{n}, noise"] = gap(noise[:, here].cpu(), torch.tensor(off))
    X, near = (torch.randn(2, 70, 150, device=device) for _ in range(2))
    found["diagonal"] = gap(panels.diagonal(X, near), (X.double() * near.double()).sum(-2))
    free, order = X[:, 0] > 0.5, X[:, 1].argsort(-1)
    want = torch.where(free[:, None], near, X).gather(2, order[:, None].expand(X.shape))
    found["chosen"] = float((panels.chosen(X, near, free, order) != want).sum())
    for rows, n in ((100, 70), (300, 200)):
        X, noise = torch.randn(2, rows, n, device=device), torch.full((2, n), 1e-10, device=device)
        wanted = X.double().cpu().numpy(), noise.double().cpu().numpy()
        basis.gram_schmidt(Triton(torch.device(device)), X, noise)
        basis.gram_schmidt(get_engine("reference"), *wanted)
        found[f"{n} columns"] = gap(X.cpu(), torch.tensor(wanted[0]))
        found[f"{n} columns, noise"] = gap(noise.cpu(), torch.tensor(wanted[1]))
    return found


def products_by_default(device="cpu"):
    """Whatever type torch makes where none is asked for."""
    found = {}
    for default in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            found |= {f"{name}, by default {default}": value for name, value in products(device).items()}
        finally:
            torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize("function", ["products", "products_by_default", "averages", "columns"])
def test_they_have_the_bits_of_float32(function):
    found = in_the_interpreter(function, "test_precise")
    assert {name: value for name, value in found.items() if not value < 5e-7} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("function", [products, products_by_default, averages, columns])
def test_they_have_the_bits_of_float32_on_the_gpu(function):
    assert {name: value for name, value in function("cuda").items() if not value < 3e-6} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["SOAP", "KronPSGD"])
def test_large_matrices_on_the_gpu(name):
    """Sides that are split, a Gram matrix at its place, Gram–Schmidt in panels; near the reference, and orthonormal."""
    rng = np.random.default_rng(0)
    settings = {"SOAP": {"precondition_frequency": 5}, "KronPSGD": {"preconditioner_update_probability": 0.5}}[name]
    start = {k: rng.standard_normal((640, 512)).astype(np.float32) for k in "ab"}
    tensors = {k: torch.nn.Parameter(torch.tensor(v, device="cuda")) for k, v in start.items()}
    opt = getattr(front, name)(list(tensors.items()), lr=0.01, engine="triton", **settings)
    reference, want = (
        rlx_optim.create(name.lower(), lr=0.01, engine="reference", **settings),
        {k: v.copy() for k, v in start.items()},
    )
    for _ in range(12):
        grads = {k: (0.1 * rng.standard_normal(v.shape)).astype(np.float32) for k, v in start.items()}
        for k, p in tensors.items():
            p.grad = torch.tensor(grads[k], device="cuda")
        opt.step()
        reference.step_all(want, grads)
    for k, p in tensors.items():
        far = np.linalg.norm(p.detach().cpu().numpy() - want[k]) / np.linalg.norm(want[k] - start[k])
        assert far < 0.02
        for slot in ("Q1", "Q2") if name == "SOAP" else ():
            Q = opt.state[p][slot].double()
            assert float((Q.T @ Q - torch.eye(len(Q), device="cuda")).abs().max()) < 1e-5


@pytest.mark.gpu
def test_stacks_beside_each_other_give_the_bits_of_one_after_the_other(monkeypatch):
    """Graphs on streams of their own, and bases of two sizes within one; recorded at the third refresh."""
    from rlx_optim.engines.triton_ import replay

    def walk():
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((256, 256), (512, 256), (256, 512), (256, 300))
        ]
        opt = front.SOAP(params, lr=0.01, precondition_frequency=1, engine="triton")
        for _ in range(8):
            for p in params:
                p.grad = torch.randn_like(p)
            opt.step()
        return [t.clone() for p in params for t in (p.detach(), *opt.state[p].values())]

    found = walk()
    monkeypatch.setattr(replay, "TRACKS", 1)
    monkeypatch.setattr(replay, "branches", lambda device, streams: contextlib.nullcontext(contextlib.nullcontext))
    assert all(map(torch.equal, found, walk()))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(512, 512), (640, 130), (40, 300), (96, 8)])
def test_first_bases_on_the_gpu(engine, shape):
    """Orthonormal, which torch's own eigenvectors are not up to 512 rows; where the reference has them; open columns too."""
    rng, least = np.random.default_rng(0), min(shape)
    U, V = (np.linalg.qr(rng.standard_normal((n, least)))[0] for n in shape)
    g = ((U * np.geomspace(1, 0.1, least)) @ V.T).astype(np.float32)
    p = torch.nn.Parameter(torch.zeros(shape, device="cuda"))
    opt, reference = front.SOAP([p], engine=engine), rlx_optim.SOAP(engine="reference")
    p.grad = torch.tensor(g, device="cuda")
    opt.step()
    reference.step("w", np.zeros(shape, np.float32), g)
    for slot in ("Q1", "Q2"):
        Q, want = opt.state[p][slot].double().cpu().numpy(), reference.state("w")[slot]
        assert abs(Q.T @ Q - np.eye(len(Q))).max() < 5e-6
        assert (1 - abs((Q * want).sum(0))).max() < 1e-3
