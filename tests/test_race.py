"""The race: its data, its network, its command line, and that all fourteen reach the goal."""

import dataclasses
import hashlib
import json
from importlib.resources import files

import numpy as np
import pytest

import rlx_optim
from rlx_optim import race
from rlx_optim.data import load_digits
from rlx_optim.race import __main__ as command

ENTRY = {"accuracy", "loss", "ms_per_step", "state_bytes", "settings"}


# ---- the data ---------------------------------------------------------------------------------------------------------
def test_the_digits_are_those_of_the_repository():
    images, labels = load_digits()
    assert images.shape == (1797, 64)
    assert images.dtype == np.float32
    assert labels.dtype == np.int64
    assert (images.min(), images.max()) == (0, 1)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    stored = (16 * images).astype(np.uint8).tobytes() + labels.astype(np.uint8).tobytes()
    assert hashlib.sha256(stored).hexdigest() == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_data_is_small_and_names_its_source():
    folder = files("rlx_optim.data")
    assert len((folder / "optdigits.npz").read_bytes()) < 100_000
    licence = (folder / "LICENSE-optdigits.txt").read_text()
    for words in ("Alpaydin", "Kaynak", "10.24432/C50P49", "CC BY 4.0", "repackaged"):
        assert words in licence


def test_the_split_leaves_no_digit_out_and_none_twice():
    images, labels, test_images, test_labels = race.digits()
    assert (len(images), len(labels), len(test_images), len(test_labels)) == (1437, 1437, 360, 360)
    both = np.concatenate([images, test_images])
    assert np.array_equal(np.sort(both, axis=0), np.sort(load_digits()[0], axis=0))


@pytest.mark.parametrize("steps", [1, 22, 23, 100])
def test_every_epoch_sees_each_digit_once(steps):
    rows = race.batches(np.random.default_rng(0), steps)
    assert rows.shape == (steps, race.BATCH)
    flat = rows.ravel()
    for start in range(0, len(flat), race.TRAIN):
        epoch = flat[start : start + race.TRAIN]
        assert len(set(epoch.tolist())) == len(epoch)


# ---- the network ------------------------------------------------------------------------------------------------------
def batch(n=5):
    rng = np.random.default_rng(1)
    params = race.initial(rng, np.float64)
    for name in params:
        params[name] += 0.1 * rng.standard_normal(params[name].shape)  # biases too
    return params, rng.random((n, 64)), rng.integers(0, 10, n), rng


def test_the_backward_pass_against_finite_differences():
    params, x, labels, _ = batch()
    grads, h = race.gradients(params, x, labels)[1], 1e-5
    assert grads.keys() == params.keys()
    for name, p in params.items():
        slope = np.empty_like(p)
        for i in np.ndindex(p.shape):
            kept = p[i]
            p[i] = kept + h
            above = race.gradients(params, x, labels)[0]
            p[i] = kept - h
            slope[i] = (above - race.gradients(params, x, labels)[0]) / (2 * h)
            p[i] = kept
        np.testing.assert_allclose(grads[name], slope, atol=1e-9, rtol=1e-6, err_msg=name)


def test_gradients_keep_the_dtype_of_the_parameters():
    params, x, labels, _ = batch()
    single = {name: p.astype(np.float32) for name, p in params.items()}
    loss, grads = race.gradients(single, x.astype(np.float32), labels)
    assert {g.dtype for g in grads.values()} == {np.dtype(np.float32)}
    assert loss == pytest.approx(race.gradients(params, x, labels)[0], rel=1e-5)


def test_the_curvature_estimate_averages_to_the_gauss_newton_diagonal():
    params, x, _, rng = batch()
    entered, logits = race.forward(params, x)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    mean = {name: np.zeros_like(value) for name, value in params.items()}
    for _ in range(4000):
        for name, estimate in race.curvature(params, x, rng).items():
            mean[name] += estimate / 4000
    spread = p * (1 - p)  # the softmax's own curvature
    np.testing.assert_allclose(mean["head.bias"], spread.mean(axis=0), rtol=0.15)
    np.testing.assert_allclose(mean["head.weight"].sum(), (spread.T @ entered[-1] ** 2).sum() / len(x), rtol=0.05)


# ---- training ---------------------------------------------------------------------------------------------------------
def test_the_table_names_all_fourteen():
    assert list(race.SETTINGS) == rlx_optim.list_optimizers()


def test_all_start_alike_and_a_race_repeats():
    first, again, other = (race.train(name, steps=12, engine="reference") for name in ("sophia", "sophia", "muon"))
    assert first.curve == again.curve
    assert first.curve[0] == other.curve[0]
    assert first.curve[-1] != other.curve[-1]
    assert len(first.curve) == 12
    assert race.train("sophia", steps=1, seed=1, engine="reference").curve[0] != first.curve[0]


def test_ticks_count_the_steps():
    ticks = []
    race.train("sgd", steps=7, engine="reference", tick=lambda: ticks.append(1))
    assert len(ticks) == 7


# ---- the command line -------------------------------------------------------------------------------------------------
def unreachable(*args, **kwargs):
    raise AssertionError("trained although the arguments are wrong")


def stub(accuracy=1.0, **changes):
    """In place of `train`: a result at once."""
    made = race.Result("", accuracy, 0.1, 0.1, 0, {"lr": 0.1}, [0.1])
    return lambda name, **_: dataclasses.replace(made, optimizer=name, **changes)


def refused(argv, capsys):
    """What main says about arguments that it refuses, in one line."""
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_short_race(tmp_path, capsys):
    out = tmp_path / "deep" / "race"
    assert command.main(["--optimizers", "muon, AdamW", "--steps", "20", "--seed", "3", "--out", str(out)]) == 0
    report = json.loads((out / "results.json").read_text())
    assert report.keys() == {"settings", "versions", "machine", "optimizers"}
    assert list(report["optimizers"]) == ["adamw", "muon"]  # the registry's order
    assert all(entry.keys() == ENTRY for entry in report["optimizers"].values())
    assert report["optimizers"]["adamw"]["settings"] == race.SETTINGS["adamw"]
    assert report["optimizers"]["adamw"]["state_bytes"] == 8 * sum(o * (i + 1) for i, o in race.LAYERS.values())
    assert (report["settings"]["steps"], report["settings"]["seed"]) == (20, 3)
    assert report["versions"]["rlx_optim"] == rlx_optim.__version__
    assert "muon" in capsys.readouterr().out


def test_without_rich_there_are_plain_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "rich", None)
    assert command.main(["--optimizers", "sgd,kron", "--steps", "2", "--engine", "reference", "--out", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["sgd"], ["kronpsgd"]]
    assert lines[2][:3] == ["optimizer", "test", "accuracy"]
    assert [line[0] for line in lines[3:5]] == ["sgd", "kronpsgd"]


def test_the_default_folder_is_new_and_dated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "train", stub())
    assert command.main([]) == 0
    assert len(list(tmp_path.glob("race-????????-??????/results.json"))) == 1


def test_a_folder_in_use_is_refused_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "train", unreachable)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for name, reason in {"full": "not empty", "full/notes.txt": "exists"}.items():
        assert reason in refused(["--out", str(tmp_path / name)], capsys)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--optimizers", "adamw,moun"], ["'moun'", "did you mean 'muon'?", *rlx_optim.list_optimizers()]),
        (["--optimizers", "xyz"], ["'xyz'", *rlx_optim.list_optimizers()]),
        (["--optimizers", ""], ["''"]),
        (["--steps", "0"], ["--steps", "from 1 up", "'0'"]),
        (["--steps", "many"], ["--steps", "'many'"]),
        (["--seed", "-1"], ["--seed"]),
        (["--engine", "abacus"], ["--engine", "reference"]),
    ],
)
def test_bad_arguments_are_refused_in_one_line(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "train", unreachable)
    monkeypatch.chdir(tmp_path)
    said = refused(argv, capsys)
    assert all(word in said for word in words)
    assert not any(tmp_path.iterdir())


def test_an_interrupt_writes_what_was_done(tmp_path, capsys, monkeypatch):
    def train(name, **_):
        if name == "adamw":
            raise KeyboardInterrupt
        return stub()(name)

    monkeypatch.setattr(command, "train", train)
    assert command.main(["--out", str(tmp_path)]) == 130
    assert list(json.loads((tmp_path / "results.json").read_text())["optimizers"]) == ["sgd", "adam"]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("extra", "code"), [([], 1), (["--steps", "9"], 0), (["--optimizers", "sgd"], 0)])
def test_only_a_full_race_can_be_lost(extra, code, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", stub(accuracy=0.94))
    assert command.main(["--out", str(tmp_path), *extra]) == code


def test_a_diverged_loss_is_still_json(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", stub(loss=float("nan")))
    assert command.main(["--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["optimizers"]["sgd"]["loss"] is None


@pytest.mark.timeout(120)
def test_all_fourteen_reach_the_goal(tmp_path):
    assert command.main(["--engine", "cpu", "--out", str(tmp_path)]) == 0
    entries = json.loads((tmp_path / "results.json").read_text())["optimizers"]
    assert list(entries) == rlx_optim.list_optimizers()
    assert {name: entry["accuracy"] for name, entry in entries.items() if entry["accuracy"] < 0.95} == {}
