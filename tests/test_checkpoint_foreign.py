"""Other people's states, and checkpoints on the command line."""

import os
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from checkpoint_cases import SMALL, Torch
from helpers import NAMES, copies, distance, problem, run, slowly

import rlx_optim
from rlx_optim import CheckpointError
from rlx_optim.checkpoint import summary
from rlx_optim.checkpoint.files import open_checkpoint

# ---- other people's states --------------------------------------------------------------------------------------------------
TORCH_OPTIM = [
    ("SGD", "sgd", {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}, 1e-6),
    ("Adam", "adam", {"weight_decay": 0.1}, 1e-4),
    ("AdamW", "adamw", {"amsgrad": True}, 1e-3),
    ("NAdam", "nadamw", {"decoupled_weight_decay": True, "weight_decay": 0.1}, 1e-3),
    ("RAdam", "radam", {"weight_decay": 0.1}, 1e-4),
    ("Adafactor", "adafactor", {"weight_decay": 0.1}, 1e-4),
    ("Muon", "muon", {"lr": 0.02}, 3e-2),  # torch orthogonalises in bfloat16
]


@pytest.mark.parametrize(("kind", "name", "settings", "bar"), TORCH_OPTIM, ids=[row[0] for row in TORCH_OPTIM])
def test_torch_optim_to_a_checkpoint_and_back(kind, name, settings, bar, tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import convert, to_state_dict

    params, gradients = problem({k: s for k, s in SMALL.items() if name != "muon" or len(s) == 2}, steps=8)
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in params.items()}
    opt = getattr(torch.optim, kind)(list(tensors.items()), **settings)

    def steps(optimizer, tensors, gradients):
        for g in gradients:
            for k, p in tensors.items():
                p.grad = torch.from_numpy(g[k].copy())
            optimizer.step()

    steps(opt, tensors, gradients[:4])
    torch.save({"model": {}, "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    snapshot = convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert [member.optimizer for member in snapshot.members] == [name]
    ours = rlx_optim.load(tmp_path / "b.safetensors", engine="reference")
    twins = {k: torch.nn.Parameter(p.detach().clone()) for k, p in tensors.items()}
    twin = getattr(torch.optim, kind)(list(twins.items()), lr=0.5)
    twin.load_state_dict(to_state_dict(tmp_path / "b.safetensors"))
    assert twin.param_groups[0].keys() == opt.param_groups[0].keys()
    start = {k: p.detach().numpy().copy() for k, p in tensors.items()}
    mine = copies(start)
    for g in gradients[4:]:
        ours.step_all(mine, g)
    steps(opt, tensors, gradients[4:])
    steps(twin, twins, gradients[4:])
    theirs = {k: p.detach().numpy() for k, p in tensors.items()}
    assert all(torch.equal(twins[k], tensors[k]) for k in twins)
    assert distance(mine, theirs, start) < bar


def test_state_dicts_that_do_not_say_enough(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import from_state_dict, read_state_dict, to_state_dict

    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = torch.optim.AdamW([p])
    opt.step()
    saved = opt.state_dict()
    with pytest.raises(CheckpointError, match="no names for its 1 parameters"):
        from_state_dict(saved)
    with pytest.raises(CheckpointError, match="2 names are given for 1"):
        from_state_dict(saved, names=["a", "b"])
    assert list(from_state_dict(saved, names=["module.a"]).parameters) == ["a"]
    del saved["param_groups"][0]["decoupled_weight_decay"]
    with pytest.raises(CheckpointError, match="which optimizer it is of"):
        from_state_dict(saved, names=["a"])
    assert from_state_dict(saved, "AdamW", ["a"]).members[0].optimizer == "adamw"
    with pytest.raises(CheckpointError, match="unknown optimizer 'adamx'"):
        from_state_dict(saved, "adamx", ["a"])
    for broken in ({}, {"state": {}, "param_groups": 3}, {"state": {0: {"exp_avg": 1}}, "param_groups": saved["param_groups"]}):
        with pytest.raises(CheckpointError):
            from_state_dict(broken, "adamw", ["a"])
    nadam = torch.optim.NAdam([p], weight_decay=0.1)
    with pytest.raises(CheckpointError, match="coupled weight decay"):
        from_state_dict(nadam.state_dict(), names=["a"])
    opt = rlx_optim.NAdamW(engine="reference")
    opt.step("a", np.ones(2, np.float32), np.ones(2, np.float32))
    opt.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="no NAdamW of the convention 'dozat'"):
        to_state_dict(tmp_path / "a.safetensors")
    lion = opt.convert_to("lion")
    lion.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"torch.optim has no Lion"):
        to_state_dict(tmp_path / "a.safetensors")
    torch.save({"model": 1}, tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"junk")
    for path in (tmp_path / "x.pt", tmp_path / "y.pt", tmp_path / "z.pt"):
        with pytest.raises(CheckpointError, match=path.name):
            read_state_dict(path)


def test_no_pickle_is_ever_executed(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import read_state_dict

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"state": {}, "param_groups": [Evil()]}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="weights_only"):
        read_state_dict(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


def damaged(tmp_path, key, value):
    """A state dict of torch.optim.AdamW with another value for a weight of (2, 3), in a file."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    found = opt.state_dict()
    found["state"][0][key] = value(torch)
    torch.save(found, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("exp_avg_sq", lambda torch: torch.ones(3, 2), r"'exp_avg_sq' of 'weight' has shape \(3, 2\), expected \(2, 3\)"),
        ("exp_avg_sq", lambda torch: torch.ones(7), r"'exp_avg_sq' of 'weight' has shape \(7,\), expected \(2, 3\)"),
        ("exp_avg_sq", lambda torch: torch.ones(()).expand(2, 3), r"'exp_avg_sq' of 'weight' repeats few numbers 6 times"),
        (
            "exp_avg",
            lambda torch: torch.ones(1).expand(1 << 40),
            r"'exp_avg' of 'weight' repeats few numbers 1,099,511,627,776 times",
        ),
        ("exp_avg_sq", lambda torch: torch.ones(2, 3).to_sparse(), r"'exp_avg_sq' of 'weight' is .*sparse.*Make it dense"),
        (
            "exp_avg_sq",
            lambda torch: torch.ones(2, 3, device="meta"),
            r"'exp_avg_sq' of 'weight' is .*meta, expected .* It was never filled",
        ),
        ("exp_avg_sq", lambda torch: torch.ones(2, 3, dtype=torch.complex64), r"'exp_avg_sq' of 'weight' is .*complex64"),
        ("step", lambda torch: torch.tensor(float("inf")), r"'step' of 'weight' is tensor\(inf\).*a whole number"),
        ("step", lambda torch: torch.tensor(2.5), r"'step' of 'weight' is tensor\(2.5000\).*a whole number"),
        ("step", lambda torch: -1, r"'step' of 'weight' is -1.*a whole number"),
    ],
)
def test_damaged_state_dicts_are_refused_by_name(key, value, said, tmp_path):
    path = damaged(tmp_path, key, value)
    from rlx_optim.torch.foreign import convert

    with pytest.raises(CheckpointError, match=said):
        convert(path, tmp_path / "b.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda found, torch: found["state"][0].update(exp_avg="x"), "state 'exp_avg' of 'weight' is 'x', expected a tensor of"),
        (
            lambda found, torch: found["state"].update({0: torch.ones(3)}),
            "the state of 'weight' is torch.float32 of shape .3,. on",
        ),
        (lambda found, torch: found["state"].update({1: "x"}), "the state of 'bias' is 'x', expected a dict of tensors"),
        (lambda found, torch: found["param_groups"][0].update(eps="x"), "AdamW: eps must be a finite number >= 0, got 'x'"),
        (
            lambda found, torch: found.update(param_groups=None),
            "'param_groups' of the state dict is None, expected a list of dicts",
        ),
        (lambda found, torch: found["param_groups"][0].pop("params"), "'params' of group 0 of the state dict is None, expected"),
    ],
)
def test_what_is_wrong_with_a_state_dict_is_named(spoil, said):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import from_state_dict

    model = torch.nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    found = opt.state_dict()
    spoil(found, torch)
    with pytest.raises(CheckpointError, match=said):
        from_state_dict(found)


def test_a_compressed_archive_is_refused(tmp_path):
    """torch maps it into memory, where compressed bytes would be taken for numbers; or it is a bomb."""
    path = damaged(tmp_path, "step", lambda torch: torch.tensor(7.0))
    from rlx_optim.torch.foreign import convert

    assert convert(path, tmp_path / "b.safetensors").iteration == 7
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for member in source.infolist():
            packed.writestr(member.filename, source.read(member))
    with pytest.raises(CheckpointError, match=r"c.pt: .*data.pkl in it is compressed, as torch.save never does; save it with"):
        convert(tmp_path / "c.pt", tmp_path / "b.safetensors")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "EOFError"),
        (b"PK", "Unsupported operand 80"),
        (pickle.dumps({"state": {}, "param_groups": []}, 5), "Unsupported operand 149"),
        (b"\x80\x02cos\nsystem\nq\x00.", "Trying to load unsupported GLOBAL os.system whose module os is blocked."),
    ],
)
def test_files_that_torch_does_not_read_say_why_in_few_words(raw, said, tmp_path):
    """Not how the pickle could be run all the same."""
    pytest.importorskip("torch")
    from rlx_optim.torch.foreign import convert

    (tmp_path / "a.pt").write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert str(caught.value) == f"{tmp_path / 'a.pt'}: torch cannot read it with weights_only=True: {said}"


def test_our_own_state_dicts_convert(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import convert

    params, gradients = problem({"w": (6, 4), "b": (5,)}, steps=3)
    for name in NAMES:
        given = {"momentum": 0.1} if name == "scion" else {"otherwise": rlx_optim.AdamW()} if name in ("soap", "kronpsgd") else {}
        ours = Torch(name, params, **given).run(gradients)
        torch.save(ours.opt.state_dict(), tmp_path / "a.pt")
        convert(tmp_path / "a.pt", tmp_path / "a.safetensors", name)
        ours.opt.save(tmp_path / "b.safetensors")
        with open_checkpoint(tmp_path / "a.safetensors") as one, open_checkpoint(tmp_path / "b.safetensors") as two:
            assert not [d for d in summary.find_differences(one, two) if not d.startswith("optimizer: ")], name


class AuthorsSOAP:
    """The rule of the authors' soap.py on NumPy arrays, in the layout of its state: independent of ours, for two dimensions."""

    def __init__(self, params, lr=0.01, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01, every=2, most=5):
        self.params, self.state = params, {}
        self.group = {
            "lr": lr, "betas": betas, "shampoo_beta": -1, "eps": eps, "weight_decay": weight_decay, "precondition_frequency": every,
            "max_precond_dim": most, "merge_dims": False, "precondition_1d": False, "normalize_grads": False, "correct_bias": True,
        }  # fmt: skip

    def rotate(self, x, Q, back=False):
        for axis, q in enumerate(Q):
            if len(q):
                x = np.moveaxis(np.tensordot(x, q, ([axis], [1 if back else 0])), -1, axis)
        return x

    def step(self, grads):
        g = self.group
        (b1, b2), every = g["betas"], g["precondition_frequency"]
        for k, p in self.params.items():
            grad = grads[k].astype(np.float64)
            if k not in self.state:
                GG = [np.zeros((n, n)) if p.ndim > 1 and n <= g["max_precond_dim"] else [] for n in p.shape]
                s = self.state[k] = {
                    "step": 0,
                    "exp_avg": np.zeros(p.shape),
                    "exp_avg_sq": np.zeros(p.shape),
                    "GG": GG,
                    "Q": None,
                }
                self.average(s, grad, b2)
                s["Q"] = [np.linalg.eigh(m)[1][:, ::-1] if len(m) else [] for m in GG]
                continue
            s = self.state[k]
            s["step"] += 1
            rotated = self.rotate(grad, s["Q"])
            s["exp_avg"] = b1 * s["exp_avg"] + (1 - b1) * rotated
            s["exp_avg_sq"] = b2 * s["exp_avg_sq"] + (1 - b2) * rotated**2
            size = g["lr"] * np.sqrt(1 - b2 ** s["step"]) / (1 - b1 ** s["step"])
            p -= size * self.rotate(s["exp_avg"] / (np.sqrt(s["exp_avg_sq"]) + g["eps"]), s["Q"], back=True)
            p -= g["lr"] * g["weight_decay"] * p
            whole = self.rotate(s["exp_avg"], s["Q"], back=True)
            self.average(s, grad, b2)
            if s["step"] % every == 0:
                for axis, (m, q) in enumerate(zip(s["GG"], s["Q"], strict=True)):
                    if len(m):
                        order = np.argsort(-np.diag(q.T @ m @ q))
                        s["exp_avg_sq"] = np.take(s["exp_avg_sq"], order, axis)
                        s["Q"][axis] = np.linalg.qr(m @ q[:, order])[0]
            s["exp_avg"] = self.rotate(whole, s["Q"])

    def average(self, s, grad, beta):
        for axis, m in enumerate(s["GG"]):
            if len(m):
                other = [a for a in range(grad.ndim) if a != axis]
                m *= beta
                m += (1 - beta) * np.tensordot(grad, grad, (other, other))

    def state_dict(self):
        import torch

        def tensors(x):
            return [tensors(each) for each in x] if isinstance(x, list) else torch.tensor(np.asarray(x, np.float32))

        states = {i: {k: v if k == "step" else tensors(v) for k, v in s.items()} for i, s in enumerate(self.state.values())}
        return {"state": states, "param_groups": [{**self.group, "params": list(range(len(states)))}]}


def test_the_authors_soap(tmp_path):
    torch = pytest.importorskip("torch")
    from rlx_optim.torch.foreign import convert, to_state_dict

    params, gradients = problem({"w": (4, 9), "b": (3,)}, steps=12)  # 9 > most: one dimension without a basis
    wide = {k: v.astype(np.float64) for k, v in params.items()}
    theirs = AuthorsSOAP(wide)
    for g in gradients[:6]:
        theirs.step(g)
    torch.save(theirs.state_dict(), tmp_path / "soap.pt")
    (tmp_path / "names.txt").write_text("w\nb\n")
    convert(tmp_path / "soap.pt", tmp_path / "soap.safetensors", names=["w", "b"])
    ours = rlx_optim.load(tmp_path / "soap.safetensors", engine="reference")
    assert type(ours) is rlx_optim.SOAP
    assert ours.step_count("w") == 6
    start = {k: v.astype(np.float32) for k, v in wide.items()}
    mine = copies(start)
    for g in gradients[6:]:
        theirs.step(g)
        ours.step_all(mine, g)
    assert distance(mine, {k: v.astype(np.float32) for k, v in wide.items()}, start) < 1e-3
    back = to_state_dict(tmp_path / "soap.safetensors")
    was = torch.load(tmp_path / "soap.pt", weights_only=True)
    assert {k: v for k, v in back["param_groups"][0].items() if k != "param_names"} == was["param_groups"][0]
    for i, state in was["state"].items():
        assert back["state"][i]["step"] == state["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(back["state"][i][key], state[key])
        for key in ("GG", "Q"):
            assert [torch.is_tensor(m) for m in back["state"][i][key]] == [
                torch.is_tensor(m) and bool(m.numel()) for m in state[key]
            ]
            assert all(torch.equal(a, b) for a, b in zip(back["state"][i][key], state[key], strict=True) if torch.is_tensor(a))


OPTAX = {
    "sgd": ({"learning_rate": 0.01, "momentum": 0.9}, {}, 1e-4),
    **{name: ({"learning_rate": 0.01}, {}, 1e-3) for name in ("adam", "adamw", "nadamw", "ademamix", "adopt", "lamb", "lion")},
    "radam": ({"learning_rate": 0.01}, {"threshold": 4.0}, 1e-2),
    "adafactor": ({"learning_rate": 0.01, "momentum": 0.9}, {"min_dim_size_to_factor": 1}, 1e-3),
    "muon": ({"learning_rate": 0.01, "nesterov": False}, {}, None),  # optax's rules are other ones: see test_peers
    "sophia": ({"learning_rate": 0.01}, {}, None),
}


@pytest.mark.parametrize("name", slowly(OPTAX))
def test_optax_states_to_ours_and_back(name):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    import rlx_optim.optax as front
    from rlx_optim.optax.foreign import from_optax, to_optax

    settings, theirs, bar = OPTAX[name]
    made = (getattr(optax, name, None) or getattr(optax.contrib, name))(**settings, **theirs)
    routed = {"otherwise": rlx_optim.AdamW(), "route": lambda path, leaf: leaf.ndim == 2} if name == "muon" else {}
    tx = getattr(front, name)(**settings, **routed)
    params, gradients = problem({"w": (6, 4), "wide": (3, 8), "b": (5,), "one": (1,)}, steps=4)
    more = {"obj_fn": lambda p: sum((x**3).sum() for x in jax.tree.leaves(p))} if name == "sophia" else {}

    def go(tx, params, state, gradients):
        for g in gradients:
            updates, state = tx.update({k: jax.numpy.asarray(v) for k, v in g.items()}, state, params, **more)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = go(made, {k: jax.numpy.asarray(v) for k, v in params.items()}, made.init(params), gradients[:3])
    ours = from_optax(tx, state, params, count=3)
    assert int(ours.count) == 3
    back = to_optax(tx, ours, params, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True))
    if bar is not None:
        want, got = (go(each, params, its, gradients[3:])[0] for each, its in ((made, state), (tx, ours)))
        assert distance(*({k: np.asarray(v) for k, v in each.items()} for each in (got, want, params))) < bar


def test_optax_states_that_do_not_fit():
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    import rlx_optim.optax as front
    from rlx_optim.optax.foreign import from_optax, to_optax

    params = {"w": jax.numpy.ones((6, 4)), "cube": jax.numpy.ones((8, 3, 4))}
    whole = optax.adafactor(0.1)  # small matrices are not factored there: their means are exactly what ours would have
    state = whole.init(params)
    full = {k: jax.random.uniform(jax.random.key(1), v.shape) for k, v in params.items()}
    state = tuple(part._replace(v=full) if "v_row" in getattr(part, "_fields", ()) else part for part in state)
    ours = from_optax(front.adafactor(0.1), state, params)
    np.testing.assert_allclose(ours.slots["row"]["w"], full["w"].mean(-1), rtol=1e-6)
    np.testing.assert_allclose(ours.slots["col"]["cube"], full["cube"].mean(-2), rtol=1e-6)
    with pytest.raises(CheckpointError, match="optax keeps v of shape"):
        to_optax(front.adafactor(0.1), ours, params, whole.init(params))
    with pytest.raises(CheckpointError, match="two largest dimensions"):
        from_optax(front.adafactor(0.1), optax.adafactor(0.1, min_dim_size_to_factor=1).init(params), params)
    with pytest.raises(CheckpointError, match="no 'm' for 'cube'"):
        from_optax(front.lion(0.1), optax.adam(0.1).init(params), params)
    with pytest.raises(CheckpointError, match="optax has no QHAdamW"):
        from_optax(front.qhadamw(0.1), optax.adam(0.1).init(params), params)
    with pytest.raises(
        CheckpointError, match="optax has no LARS whose state could be taken over"
    ):  # its momentum is negated there
        from_optax(front.lars(0.1), optax.lars(0.1).init(params), params)


# ---- the command line -------------------------------------------------------------------------------------------------------
def cli(*words):
    pytest.importorskip("typer")
    from rlx_optim.cli import main

    return main([*map(str, words)])


def test_inspect(tmp_path, capsys):
    params, gradients = problem(SMALL, steps=3)
    opt = rlx_optim.Muon(groups=[{"match": "w[i]*", "lr": lambda it: 0.5}], engine="reference")
    run(opt, params, gradients[:2])
    opt.save(tmp_path / "a.safetensors")
    assert cli("inspect", tmp_path / "a.safetensors") == 0
    said = capsys.readouterr().out
    for word in ("iteration 2", "Muon(lr=0.02", "otherwise AdamW", "lr=0.5 (a callable)", "wide", "2×3×2", "SHA-256 verified"):
        assert word in said, word
    assert cli("inspect", tmp_path / "a.safetensors", tmp_path / "a.safetensors") == 0
    assert "equal" in capsys.readouterr().out
    opt.step_all(params, gradients[2])
    opt.otherwise.lr = 0.75
    opt.save(tmp_path / "b.safetensors")
    assert cli("inspect", tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 1
    said = capsys.readouterr().out
    for word in ("iteration: 2 and 3", "AdamW: lr is 0.0003 and 0.75", "w: steps 2 and 3", "w/m: 24 of 24 numbers differ"):
        assert word in said, word
    (tmp_path / "c.safetensors").write_bytes(b"junk" * 100)
    assert cli("inspect", tmp_path / "c.safetensors") == 2
    assert "c.safetensors: not a checkpoint" in capsys.readouterr().err


def test_convert_on_the_command_line(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = torch.optim.Adam([p])
    opt.step()
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    (tmp_path / "names.txt").write_text("w\n")
    assert cli("convert", tmp_path / "a.pt", tmp_path / "b.safetensors") == 2
    assert "--names" in capsys.readouterr().err
    assert cli("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", "--names", tmp_path / "names.txt") == 0
    assert "adam, 1 parameters, 1 steps" in capsys.readouterr().out
    assert rlx_optim.load(tmp_path / "b.safetensors").step_count("w") == 1
    assert cli("convert", tmp_path / "b.safetensors", tmp_path / "c.pt") == 0
    opt.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=True))
    assert opt.state[p]["step"] == 1
    assert cli("convert", tmp_path / "a.pt", tmp_path / "c.pt") == 2
    assert cli("convert", tmp_path / "a.pt", tmp_path / "d.safetensors", "--names", tmp_path / "nowhere") == 2


def test_importing_the_package_imports_no_safetensors():
    code = "import sys, rlx_optim; print('safetensors' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---- Adan and ADOPT of timm and of their authors -----------------------------------------------------------------------------
def adan_of_timm(groups, params, gradients):
    """Its state dict after these gradients, as timm 1.0.30 and sail-sg/Adan keep it: the step is the group's, the gradient negated."""
    import torch

    (b1, b2, b3), states = groups["betas"], {}
    for i, p in enumerate(params.values()):
        m, d, n = (np.zeros(p.shape) for _ in range(3))
        before = gradients[0][list(params)[i]]
        for g in (each[list(params)[i]] for each in gradients):
            s, before = g - before, g
            m, d, n = b1 * m + (1 - b1) * g, b2 * d + (1 - b2) * s, b3 * n + (1 - b3) * (g + b2 * s) ** 2
        kept = {"exp_avg": m, "exp_avg_diff": d, "exp_avg_sq": n, "neg_pre_grad": -before}
        states[i] = {k: torch.tensor(np.asarray(v, np.float32)) for k, v in kept.items()}
    return {"state": states, "param_groups": [{**groups, "step": len(gradients), "params": list(range(len(params)))}]}


def adopt_of_timm(groups, params, gradients):
    import torch

    (b1, b2), states = groups["betas"], {}
    for i, name in enumerate(params):
        m, v = 0.0, gradients[0][name].astype(float) ** 2
        for t, g in enumerate((each[name].astype(float) for each in gradients[1:]), 1):
            m = b1 * m + (1 - b1) * np.clip(g / np.maximum(np.sqrt(v), groups["eps"]), -(t**0.25), t**0.25)
            v = b2 * v + (1 - b2) * g**2
        kept = {"exp_avg": m, "exp_avg_sq": v}
        states[i] = {k: torch.tensor(np.asarray(x, np.float32)) for k, x in kept.items()} | {
            "step": torch.tensor(float(len(gradients)))
        }
    return {"state": states, "param_groups": [{**groups, "params": list(range(len(params)))}]}


ADAN = {"lr": 0.01, "betas": (0.9, 0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0, "no_prox": False}
ADOPT = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0}
OTHERS = [
    ("adan", adan_of_timm, {**ADAN, "caution": False, "foreach": None}),
    ("adan", adan_of_timm, {**ADAN, "max_grad_norm": 0.0, "fused": False, "foreach": True}),  # the authors'
    ("adopt", adopt_of_timm, {**ADOPT, "decoupled": True, "clip_exp": 0.25, "caution": False, "maximize": False}),
    ("adopt", adopt_of_timm, {**ADOPT, "decouple": False, "foreach": None, "maximize": False}),  # the authors'
]


@pytest.mark.parametrize(("name", "state_dict", "group"), OTHERS, ids=[f"{row[0]}{i}" for i, row in enumerate(OTHERS)])
def test_adan_and_adopt_of_timm_and_of_their_authors_go_on_here(name, state_dict, group):
    torch = pytest.importorskip("torch")
    import rlx_optim.torch as front
    from rlx_optim.torch.foreign import from_state_dict

    params, gradients = problem(SMALL, steps=6)
    saved = state_dict(group, params, gradients[:4])
    settings = {k: v for k, v in group.items() if k in rlx_optim.registry.spec_class(name).fields}
    whole, start = rlx_optim.create(name, engine="reference", **settings), copies(params)
    run(whole, start, gradients[:4])
    want = run(whole, copies(start), gradients[4:], start=4)
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in start.items()}
    opt = front.create(name, tensors.items(), lr=0.5, engine="torch")
    opt.load_state_dict(saved)
    assert opt.param_groups[0].get("decouple") == (group.get("decoupled", group.get("decouple")))
    for g in gradients[4:]:
        for k, p in tensors.items():
            p.grad = torch.from_numpy(g[k].copy())
        opt.step()
    assert distance({k: p.detach().numpy() for k, p in tensors.items()}, want, start) < 2e-5
    snapshot = from_state_dict(saved, None if "no_prox" in group or "clip_exp" in group else name, list(params))
    assert snapshot.members[0].optimizer == name
    assert {p.step for p in snapshot.parameters.values()} == {4}
    if "caution" in group:
        saved["param_groups"][0]["caution"] = True
        with pytest.raises(ValueError, match="timm's cautious variant"):
            opt.load_state_dict(saved)


def test_adan_starts_afresh_and_gives_its_average_away():
    """Its second moment is of other numbers than AdamW's: with AdamW's count and none of its own, steps would be far too long."""
    params, gradients = problem(SMALL, steps=3)
    adamw = rlx_optim.AdamW(engine="reference")
    run(adamw, copies(params), gradients)
    adan = adamw.convert_to("adan")
    assert not adan.state("w")["m"].any()
    assert "step count 3: Adan needs both moments" in adan.conversion_report()
    run(adan, copies(params), gradients)
    lion = adan.convert_to("lion")
    np.testing.assert_array_equal(lion.state("w")["m"], adan.state("w")["m"])
    mix = adamw.convert_to("ademamix")
    np.testing.assert_array_equal(mix.state("w")["m"], adamw.state("w")["m"])
    assert not mix.state("w")["slow"].any()
    stable = adamw.convert_to("stableadamw", betas=(0.9, 0.999))  # whose moments are kept corrected
    np.testing.assert_allclose(stable.state("w")["v"], adamw.state("w")["v"] / (1 - 0.999**3), rtol=1e-5)
