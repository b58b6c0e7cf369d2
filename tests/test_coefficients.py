"""Newton–Schulz with one triple, several, or a scheme by its name: against the polynomial of the singular values in float64."""

import re
from pathlib import Path

import numpy as np
import pytest

import rlx_optim
from rlx_optim.coefficients import SCHEMES, steps_of

#: (triples, what the norm is taken times) as their sources have them, written down apart from the package
KELLER = [3.4445, -4.7750, 2.0315]
SOURCES = {
    "keller": ([KELLER] * 5, 1.0),
    "you": (
        [[4.0848, -6.8946, 2.9270], [3.9505, -6.3029, 2.6377], [3.7418, -5.5913, 2.3037], [2.8769, -3.1427, 1.2046],
         [2.8366, -3.0525, 1.2012]], 1.0,
    ),
    "polar_express": (
        [[8.237312490495555, -23.157747414558198, 16.680568411445915], [4.082441999064838, -2.893047735332589, 0.5252849256975651],
         [3.9263479922546547, -2.854746803476529, 0.5318022422894988], [3.2982187133085152, -2.424541981026706, 0.48632008358844064],
         [2.297036943455257, -1.63662558125903, 0.4002628455953626]], 1.01,
    ),
    "speedrun": (
        [[8.156554524902461, -22.48329292557795, 15.878769915207462], [4.042929935166739, -2.808917465908714, 0.5000178451051316],
         [3.8916678022926607, -2.772484153217685, 0.5060648178503393], [3.285753657755655, -2.3681294933425376, 0.46449024233003106],
         [2.3465413258596377, -1.7097828382687081, 0.42323551169305323]], 1.02,
    ),
    "cans": (
        [[8.4703, -25.1081, 18.6293], [4.1828, -3.1087, 0.5806], [3.9619, -2.9541, 0.5630], [3.2866, -2.4647, 0.5074],
         [2.2737, -1.6447, 0.4162]], 1.0,
    ),
    "deepseek_v4": ([KELLER] * 8 + [[2.0, -1.5, 0.5]] * 2, 1.0),
    "aol": (
        [[4.0098, -7.0585, 2.4635], [3.4585, -5.5479, 2.5959], [2.7573, -3.2939, 1.4254], [2.7215, -3.0494, 1.3169]], 1.0,
    ),
}  # fmt: skip
#: of each, ‖X − UVᵀ‖/√r for the first gradients of the golden problem, as measured from the sources' own code
DISTANCES = {
    "keller": (0.213, 0.212, 0.251), "you": (0.016, 0.016, 0.143), "polar_express": (0.088, 0.093, 0.161),
    "speedrun": (0.097, 0.084, 0.171), "cans": (0.083, 0.082, 0.157), "deepseek_v4": (2e-4, 2e-4, 2e-4),
    "aol": (0.008, 0.008, 0.167),
}  # fmt: skip
PROBLEM = np.load(Path(__file__).parent / "golden" / "problem.npz")
GRADIENTS = {name: PROBLEM[f"grads/{name}"][0] * 2.0**12 for name in ("w64x32", "w32x64", "w48x48")}  # far above eps
ENGINES = ["reference", "cpu", "torch", "jax"]


def exact(G, triples, safety=1.0, eps=1e-7):
    """By the singular values alone, in float64."""
    U, s, V = np.linalg.svd(G.astype(np.float64), full_matrices=False)
    s = s / (safety * np.linalg.norm(s) + eps)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return U * s @ V


def direction(optimizer, G, engine="cpu", **settings):
    """What a first step from zero goes along, for a rule whose first momentum is along the gradient."""
    p = {"w": np.zeros(G.shape, np.float32)}
    rlx_optim.create(optimizer, lr=1.0, engine=engine, otherwise=None, **settings).step_all(p, {"w": G})
    return -p["w"]


def by_torch(G, **settings):
    import torch

    from rlx_optim.torch import Muon

    p = torch.nn.Parameter(torch.zeros(G.shape))
    p.grad = torch.tensor(G)
    Muon([p], lr=1.0, weight_decay=0.0, engine="torch", otherwise=None, **settings).step()
    return -p.detach().numpy()


def by_jax(G, **settings):
    from rlx_optim.optax import muon

    tx = muon(1.0, otherwise=None, ns_coeffs=settings.pop("ns_coefficients"), **settings)
    updates, _ = tx.update({"w": G}, tx.init({"w": G}), {"w": G})
    return -np.asarray(updates["w"])


def by_muon(engine, G, **settings):
    scale = max(1.0, G.shape[0] / G.shape[1]) ** 0.5
    made = {"torch": by_torch, "jax": by_jax}.get(engine) or (lambda G, **s: direction("muon", G, engine, **s))
    return made(G, **settings) / scale


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scheme", SOURCES)
def test_a_scheme_is_the_polynomial_of_the_singular_values(scheme, engine):
    """Momentum scales the first gradient, which Newton–Schulz does not see."""
    for name, G in GRADIENTS.items():
        got = by_muon(engine, G, ns_coefficients=scheme)
        want = exact(G, *SOURCES[scheme])
        assert np.abs(got - want).max() < (1e-5 if engine != "reference" else 2e-6), name


@pytest.mark.parametrize("scheme", SOURCES)
def test_how_far_schemes_are_from_the_polar_factor(scheme):
    for (name, G), known in zip(GRADIENTS.items(), DISTANCES[scheme], strict=True):
        U, s, V = np.linalg.svd(G.astype(np.float64), full_matrices=False)
        far = np.linalg.norm(by_muon("reference", G, ns_coefficients=scheme) - U @ V) / np.sqrt(len(s))
        assert far == pytest.approx(known, abs=6e-4 if known > 1e-3 else 1e-4), name


@pytest.mark.parametrize("engine", ["cpu", "torch", "jax"])
def test_wide_matrices_with_many_steps(engine):
    """The Gram form restarts as long as the steps go on."""
    G = np.random.default_rng(0).standard_normal((24, 120)).astype(np.float32)
    got = by_muon(engine, G, ns_coefficients="deepseek_v4")
    assert np.abs(got - exact(G, *SOURCES["deepseek_v4"])).max() < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_triples_of_ones_own(engine):
    """One for all steps, or one each; lists as well; the last goes on where ns_steps says more."""
    G, triples = GRADIENTS["w32x64"], [[3.0, -4.0, 1.5], [2.5, -3.0, 1.2], [2.0, -1.5, 0.5]]
    for given, steps, taken in [
        (triples[0], 5, [triples[0]] * 5),
        (triples, 5, triples),
        (tuple(map(tuple, triples)), 4, [*triples, triples[-1]]),
        (triples, 2, triples[:2]),
        ("you", 3, SOURCES["you"][0][:3]),
    ]:
        got = by_muon(engine, G, ns_coefficients=tuple(given) if given is triples[0] else given, ns_steps=steps)
        assert np.abs(got - exact(G, taken)).max() < 1e-5, (given, steps)


def test_polar_express_goes_on():
    """Its authors' list has ten steps; eight are at the polar factor but for the smallest singular values."""
    G = GRADIENTS["w64x32"]
    U, s, V = np.linalg.svd(G.astype(np.float64), full_matrices=False)
    far = np.linalg.norm(by_muon("reference", G, ns_coefficients="polar_express", ns_steps=8) - U @ V) / np.sqrt(len(s))
    assert far < 3e-6


@pytest.mark.parametrize("scheme", ["you", "aol", [[2.0, -1.5, 0.5]] * 3])
def test_rules_that_use_newton_schulz_take_them(scheme):
    steps, triples = steps_of(SCHEMES.get(scheme) if isinstance(scheme, str) else tuple(map(tuple, scheme)), 5)
    assert steps == len(triples)
    for name, G in GRADIENTS.items():
        X = exact(G, triples)
        rows, columns = G.shape
        scion = direction("scion", G, momentum=1.0, ns_coefficients=scheme) / np.sqrt(rows / columns)
        assert np.abs(scion - X).max() < 1e-5, name
        level = X / np.linalg.norm(X, axis=1, keepdims=True) * np.linalg.norm(X) / np.sqrt(rows)
        normuon = direction("normuon", G, ns_coefficients=scheme) / max(1.0, rows / columns) ** 0.5
        assert np.abs(normuon - level).max() < 1e-5, name
    without = direction("normuon", G)
    assert np.array_equal(without, direction("normuon", G, ns_coefficients="keller"))
    assert not np.array_equal(without, direction("normuon", G, ns_coefficients=scheme))


@pytest.mark.parametrize(
    "given", ["kepler", "", (1.0, 2.0), ((1.0, 2.0, 3.0), (1.0, 2.0)), (), (1.0, 2.0, float("nan")), 3.0, None]
)
@pytest.mark.parametrize("optimizer", ["muon", "normuon", "scion"])
def test_what_is_no_scheme_is_refused(optimizer, given):
    if given is None and optimizer == "normuon":
        return
    with pytest.raises(
        (TypeError, ValueError), match=r"ns_coefficients must be 3 finite numbers, several such, or one of 'keller'"
    ):
        rlx_optim.create(optimizer, ns_coefficients=given)


@pytest.mark.parametrize("given", ["cans", [[2.0, -1.5, 0.5], [1.5, -0.5, 0.0]]])
def test_coefficients_are_saved(given, tmp_path):
    G = {"w": GRADIENTS["w32x64"]}
    opt, p = rlx_optim.Muon(ns_coefficients=given), {"w": np.zeros((32, 64), np.float32)}
    opt.step_all(p, G)
    opt.save(tmp_path / "m.safetensors")
    again = rlx_optim.load(tmp_path / "m.safetensors")
    assert again.ns_coefficients == opt.ns_coefficients == (given if isinstance(given, str) else tuple(map(tuple, given)))
    q = {"w": p["w"].copy()}
    opt.step_all(p, G), again.step_all(q, G)
    assert np.array_equal(p["w"], q["w"])


def test_the_scheme_of_a_group_and_of_a_schedule():
    G = GRADIENTS["w32x64"]
    by_group = rlx_optim.Muon(lr=1.0, otherwise=None, groups=[{"match": "a", "ns_coefficients": "aol"}])
    p = {"a": np.zeros(G.shape, np.float32), "b": np.zeros(G.shape, np.float32)}
    by_group.step_all(p, {"a": G, "b": G})
    scheduled = rlx_optim.Muon(lr=1.0, otherwise=None, ns_coefficients=lambda t: "aol" if t == 0 else "keller")
    q = {"a": np.zeros(G.shape, np.float32)}
    scheduled.step_all(q, {"a": G})
    assert np.array_equal(p["a"], q["a"])
    assert np.array_equal(-p["b"], direction("muon", G))


def test_the_named_steps_cost_what_they_are():
    """Owners of matrices are shared out by their work."""
    spec = rlx_optim.Muon(ns_coefficients="deepseek_v4").spec
    assert spec(ns_coefficients="deepseek_v4").work((8, 16)) == 2 * spec().work((8, 16))


def test_the_table_of_the_page():
    """docs/matrices.md says what its own lines compute."""
    text = (Path(__file__).parent.parent / "docs" / "matrices.md").read_text()
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "said" in block]
    space = {}
    exec(code, space)
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in text.splitlines() if line.startswith('| `"')]
    assert rows == [
        [f'`"{name}"`', str(steps), *(f"{far:#.2g}".rstrip(".") for far in distances)]
        for name, (steps, *distances) in space["said"].items()
    ]
