"""docs/own.md: its files, as printed, in a package outside the source tree, through every front end and on every engine.

The package is in a folder of its own with the metadata of an installed one; what a test asks of it runs in a process that has this
folder on its path, by a function of this file.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import distance

import rlx_optim

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs/own.md").read_text()
FILES = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
ENTRIES = re.search(r'^```toml\n\[project.entry-points."rlx_optim.optimizers"\]\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)[1]
SHAPES = {"w": (24, 16), "wide": (6, 30), "twin": (24, 16), "conv": (4, 3, 3, 2), "b": (37,), "s": ()}
MOVED = [name for name, shape in SHAPES.items() if shape]  # by more than what float32 leaves of a number
STEPS = 8
#: settings, and how far from the reference a float32 engine may be, in the distance travelled
OWN = {
    "adabelief": ({"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, 2e-5),
    "clippedadamw": ({"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1, "limit": 0.7}, 2e-5),
    "rowmuon": ({"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "beta2": 0.8}, 1e-3),
}
REST = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}  # RowMuon's otherwise


# ---- the formulas, once more ----------------------------------------------------------------------------------------------
def adabelief(p, gradients, lr, betas, eps, weight_decay):
    (b1, b2), m, s = betas, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m) ** 2 + eps
        p = p * (1 - lr * weight_decay) - lr * m / (1 - b1**t) / (np.sqrt(s / (1 - b2**t)) + eps)
    return p


def clippedadamw(p, gradients, lr, betas, eps, weight_decay, limit):
    (b1, b2), m, v = betas, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p * (1 - lr * weight_decay) - lr * u / max(1.0, np.sqrt(np.mean(u**2)) / limit)
    return p


def rowmuon(p, gradients, lr, weight_decay, momentum, beta2):
    if p.ndim < 2:
        return adamw(p, gradients, **REST)
    shape, m, v = p.shape, 0.0, 0.0
    p = p.reshape(shape[0], -1)
    for g in gradients:
        g = g.reshape(p.shape)
        m = momentum * m + (1 - momentum) * g
        v = beta2 * v + (1 - beta2) * np.mean(g**2, axis=1, keepdims=True)
        X = m / (np.sqrt(v) + 1e-10)
        X = X / (np.linalg.norm(X) + 1e-7)
        for _ in range(5):
            X = 3.4445 * X + (-4.7750 * X @ X.T + 2.0315 * X @ X.T @ X @ X.T) @ X
        p = p * (1 - lr * weight_decay) - lr * np.sqrt(max(1, p.shape[0] / p.shape[1])) * X
    return p.reshape(shape)


def adamw(p, gradients, lr, betas, eps, weight_decay):
    return clippedadamw(p, gradients, lr, betas, eps, weight_decay, np.inf)


def by_hand(name, steps=STEPS):
    settings, formula = OWN[name][0], globals()[name]
    grads = gradients()[:steps]
    return {k: formula(np.float64(p), [np.float64(g[k]) for g in grads], **settings) for k, p in start().items()}


# ---- what runs in the process that has the package ------------------------------------------------------------------------
def start():
    rng = np.random.default_rng(0)
    return {k: np.asarray(0.1 * rng.standard_normal(s), np.float32) for k, s in SHAPES.items()}


def gradients():
    """They grow, so that ClippedAdamW has something to slow down."""
    rng = np.random.default_rng(1)
    return [{k: np.asarray(1.5**t * rng.standard_normal(s), np.float32) for k, s in SHAPES.items()} for t in range(STEPS)]


def otherwise(name):
    return {"otherwise": rlx_optim.AdamW(**REST)} if rlx_optim.registry.spec_class(name).matrix else {}


def in_numpy(name, engine="reference"):
    opt, params = rlx_optim.create(name, engine=engine, **OWN[name][0], **otherwise(name)), start()
    for each in gradients():
        opt.step_all(params, each)
    return params


def in_torch(name, engine, dtype=np.float32, path=None):
    import torch

    import rlx_optim.torch as front

    params = {k: torch.nn.Parameter(torch.tensor(p.astype(dtype))) for k, p in start().items()}
    opt = front.create(name, params.items(), engine=engine, **OWN[name][0], **otherwise(name))
    assert type(opt).__name__.lower() == name
    for t, each in enumerate(gradients()):
        for k, p in params.items():
            p.grad = torch.tensor(each[k].astype(dtype))
        if path and t == STEPS // 2:
            opt.save(path)
            np.savez(f"{path}.npz", **{k: p.detach().numpy() for k, p in params.items()})
        opt.step()
    return {k: p.detach().numpy() for k, p in params.items()}


def keywords(name):
    """The settings in optax's words."""
    settings = dict(OWN[name][0])
    lr, betas = settings.pop("lr"), settings.pop("betas", ())
    return lr, settings | {f"b{i}": b for i, b in enumerate(betas, 1)}


def in_optax(name, path=None):
    import jax
    import optax

    import rlx_optim.optax as front

    lr, settings = keywords(name)
    tx = front.create(name, lr, **settings, **otherwise(name))
    params = dict(np.load(f"{path}.npz")) if path else start()
    params = jax.tree.map(jax.numpy.asarray, params)
    state = front.load_state(path, tx, params) if path else tx.init(params)
    update = jax.jit(tx.update)
    for each in gradients()[STEPS // 2 if path else 0 :]:
        updates, state = update(each, state, params)
        params = optax.apply_updates(params, updates)
    return {k: np.asarray(p) for k, p in params.items()}


def from_torch_to_numpy(path, engine):
    opt, params = rlx_optim.load(path, engine=engine), dict(np.load(f"{path}.npz"))
    for each in gradients()[STEPS // 2 :]:
        opt.step_all(params, each)
    return params


def every_engine(folder):
    """What each front end and engine gives for each of the three, and what goes on from torch's file."""
    found = {}
    for name in OWN:
        path = f"{folder}/{name}.safetensors"
        for engine in ("reference", "cpu"):
            found[name, "numpy", engine] = in_numpy(name, engine)
        for engine in ("cpu", "torch"):
            found[name, "torch", engine] = in_torch(name, engine, path=path)
        found[name, "torch", "float64"] = in_torch(name, "torch", np.float64)
        found[name, "optax", "jax"] = in_optax(name)
        found[name, "loaded", "reference"] = from_torch_to_numpy(path, "reference")
        found[name, "loaded", "cpu"] = from_torch_to_numpy(path, "cpu")
        found[name, "loaded", "jax"] = in_optax(name, path)
    assert not any(file.startswith(str(HERE.parent / "src")) for file in map(inspect.getfile, specs()))
    return {"/".join((*key, k)): p for key, params in found.items() for k, p in params.items()}


def specs():
    return [rlx_optim.registry.spec_class(name) for name in OWN]


def in_the_interpreter(folder):
    """On the triton engine without a GPU; of RowMuon also a version whose v lines up with the rows of a matrix."""
    from rlx_optim.rule import Slot, like, register

    def slots(self, shape):
        return like(shape, m="first moment") | {"v": Slot(shape[:-1], drop=(-1,), meaning="row")}

    def takes(self, shape):
        return None if len(shape) == 2 else "no matrix"

    register(type("Aligned", (rlx_optim.registry.spec_class("rowmuon"),), {"slots": slots, "takes": takes}))
    OWN["aligned"] = OWN["rowmuon"]
    return {f"{name}/{k}": p for name in OWN for k, p in in_torch(name, "triton").items()}


def as_a_rank(folder, rank):
    """RowMuon and the others on tensors that two ranks have half of each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import rlx_optim.torch as front

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def cut(x):
        return distribute_tensor(torch.tensor(x), mesh, [Shard(0) if x.ndim else Replicate()], src_data_rank=None)

    found = {}
    for name in OWN:
        params = {k: torch.nn.Parameter(cut(p)) for k, p in start().items()}
        opt = front.create(name, params.items(), **OWN[name][0], **otherwise(name))
        for each in gradients():
            for k, p in params.items():
                p.grad = cut(each[k])
            opt.step()
        opt.save(f"{folder}/{name}.ranks.safetensors")
        found |= {f"{name}/{k}": p.full_tensor().detach().numpy() for k, p in params.items()}
    dist.destroy_process_group()
    return found


# ---- the tests ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that looks like site-packages, with what the page prints."""
    folder = tmp_path_factory.mktemp("site")
    for file, text in FILES.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    (folder / "my_optimizers/__init__.py").touch()
    info = folder / "my_optimizers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_optimizers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlx_optim.optimizers]\n" + ENTRIES.replace('"', ""))
    return folder


def process(site, *argv, **environment):
    path = os.pathsep.join([str(site), str(HERE), str(Path(rlx_optim.__file__).parent.parent)])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *argv], env={**os.environ, "PYTHONPATH": path, **environment}, **pipes)


def ended(started):
    out, err = started.communicate(timeout=300)
    assert started.returncode == 0, err
    return out


def called(site, folder, function, *arguments, **environment):
    """A function of this file in a process that has the package."""
    target = f"{folder}/{function}{''.join(map(str, arguments))}.npz"
    call = ", ".join(map(repr, (str(folder), *arguments)))
    # left at once, as the ranks of test_registry are
    code = f"import numpy, os, test_own; numpy.savez({target!r}, **test_own.{function}({call})); os._exit(0)"
    return process(site, "-c", code, **environment), target


@pytest.fixture(scope="module")
def found(site, tmp_path_factory):
    for package in ("torch", "jax", "optax", "llvmlite"):
        pytest.importorskip(package)
    started, target = called(site, tmp_path_factory.mktemp("steps"), "every_engine")
    ended(started)
    results = {}
    for key, value in np.load(target).items():
        name, front, engine, k = key.split("/")
        results.setdefault((name, front, engine), {})[k] = value
    return results


def test_the_page_prints_what_is_tested():
    assert [Path(file).stem for file in FILES] == [*OWN, "wrong"]
    assert [line.split(" = ")[0] for line in ENTRIES.splitlines()] == [*OWN]
    for name in OWN:
        head = FILES[f"my_optimizers/{name}.py"].split('"""')[1]
        assert re.search(r"\nIdea\. .*\nFormulas\.\n.*\nWhen, and what it costs\. ", head, re.DOTALL), name


@pytest.mark.parametrize("name", OWN)
def test_it_is_its_formulas(found, name):
    want = by_hand(name)
    assert distance(found[name, "torch", "float64"], want, start()) < 1e-10
    stored = {k: np.float32(p) for k, p in want.items()}
    gaps = {k: distance({k: found[name, "numpy", "reference"][k]}, {k: stored[k]}, start()) for k in MOVED}
    assert max(gaps.values()) < 1e-6, gaps


@pytest.mark.parametrize("name", OWN)
def test_front_ends_and_engines_agree(found, name):
    want = found[name, "numpy", "reference"]
    for (rule, front, engine), got in found.items():
        if rule == name and front != "loaded" and engine != "float64":
            assert distance(got, want, start()) < OWN[name][1], (front, engine)


@pytest.mark.parametrize("name", OWN)
def test_what_torch_saved_goes_on_elsewhere(found, name):
    want = found[name, "torch", "cpu"]
    for engine in ("reference", "cpu", "jax"):
        assert distance(found[name, "loaded", engine], want, start()) < OWN[name][1], engine


def test_triton_agrees(site, found, tmp_path):
    pytest.importorskip("triton")
    started, target = called(site, tmp_path, "in_the_interpreter", TRITON_INTERPRET="1")
    ended(started)
    got = np.load(target)
    for name, (_, bar) in OWN.items():
        assert distance({k: got[f"{name}/{k}"] for k in SHAPES}, found[name, "numpy", "reference"], start()) < bar, name
    flat = [k for k, shape in SHAPES.items() if len(shape) == 2]
    np.testing.assert_array_equal([got[f"aligned/{k}"].sum() for k in flat], [got[f"rowmuon/{k}"].sum() for k in flat])


@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_two_ranks_give_the_result_of_one(site, found, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    ranks = [called(site, tmp_path, "as_a_rank", rank) for rank in range(2)]
    for started, _ in ranks:
        ended(started)
    got = np.load(ranks[0][1])
    for name, (_, bar) in OWN.items():
        whole = {k: got[f"{name}/{k}"] for k in SHAPES}
        assert distance(whole, found[name, "torch", "cpu"], start()) < min(bar, 2e-5), name
    code = f"import rlx_optim; print(rlx_optim.load({str(tmp_path / 'rowmuon.ranks.safetensors')!r}).state('w')['v'].shape)"
    assert ended(process(site, "-c", code)) == "(24,)\n"


def row_of_ranks(rule, **settings):
    """What `check_rule` finds of it over two ranks."""
    (row,) = (row for row in rlx_optim.check_rule(rule, only=["ranks"], **settings).rows if row.check == "ranks")
    return row


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_check_rule_asks_two_ranks():
    """Of rules that are no file's, too: one that reads p, one that goes by how often it was called, one whose commit measures."""
    pytest.importorskip("torch.distributed")
    from reading_ranks import Averaging, Looking, Measuring, Reading, decayed

    class Counting(Reading):
        calls = 0

        def update(self, E, x):
            Counting.calls += 1
            return E.map(decayed, x.set(g=x.g * (1.0 + Counting.calls)))

    class Refusing(Reading):
        def update(self, E, x):
            if "tensor 3" in x.names:
                raise ArithmeticError("no such step")
            return E.map(decayed, x)

    for rule in (Averaging, Looking, rlx_optim.registry.spec_class("lamb")):
        row = row_of_ranks(rule)
        assert row.ok, row
        assert not row.skipped
        assert row.seen < 1e-6
    assert row_of_ranks(Averaging).seen == 0
    assert "parameters end elsewhere than in one process" in row_of_ranks(Counting).note
    assert "no such step" in row_of_ranks(Refusing).note
    for rule, settings in ((Measuring, {}), (rlx_optim.registry.spec_class("muon"), {"decay": "hyperball"})):
        row = row_of_ranks(rule, **settings)
        assert row.skipped
        assert "its commit measures p or u, which is refused where matrices are spread over ranks" in row.note


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_it_is_checked(site, name):
    pytest.importorskip("typer")
    report = json.loads(ended(process(site, "-m", "rlx_optim.cli", "check", name, "--json")))
    assert report["ok"], report
    assert len(report["rows"]) > 20


def test_the_command_line_has_them(site):
    pytest.importorskip("typer")

    def told(*argv):
        return json.loads(ended(process(site, "-m", "rlx_optim.cli", *argv, "--json")))

    listed = {each["name"]: each for each in told("list")}
    assert [listed[name]["class"] for name in OWN] == ["AdaBelief", "ClippedAdamW", "RowMuon"]
    assert [listed[name]["kind"] for name in OWN][::2] == ["elementwise", "matrix"]
    assert [listed[name]["state_bytes_per_parameter"] for name in OWN][:2] == [8, 8]
    assert told("info", "adabelief")["hyperparameters"]["betas"]["default"] == [0.9, 0.999]
    assert "A gradient near its average can be believed" in ended(process(site, "-m", "rlx_optim.cli", "info", "adabelief"))
    (site / "shapes.json").write_text(json.dumps({"w": [8, 16], "b": [8]}))
    memory = told("memory", "--optimizer", "rowmuon", "--shapes", str(site / "shapes.json"))
    slots = {(each["rule"], each["slot"]): each["bytes"] for each in memory["optimizers"]["rowmuon"]["slots"]}
    assert slots == {("RowMuon", "m"): 512, ("RowMuon", "v"): 32, ("AdamW", "m"): 32, ("AdamW", "v"): 32}
