"""The race: its data, its models, its runs, its command and its files, and that all reach the goal."""

import dataclasses
import hashlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from importlib.resources import files

import numpy as np
import pytest

import rlx_optim
from lab import landscape
from lab.races import rates as lm_rates
from lab.races.command import MODELS as LM_MODELS
from rlx_optim import cli, race
from rlx_optim.data import load_digits
from rlx_optim.race import digits, rates, report, running

MLP, LOGREG = digits.MLP, digits.LOGREG
quiet = lambda loss: None  # noqa: E731
METRICS = {"accuracy", "test_loss", "train_loss"}
ENTRY = METRICS | {
    "lr", "settings", "runs", "diverged", "diverged_at", "ms_per_step", "seconds", "state_bytes", "peak_bytes", "engine", "curve", "grid",
}  # fmt: skip


def train(name, model=MLP, steps=12, seed=0, engine="reference", tick=quiet, **settings):
    return model.train(name, {**rates.SETTINGS[model.name][name], **settings}, steps, seed, engine, tick)


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
    images, labels, test_images, test_labels = digits.split_digits()
    assert (len(images), len(labels), len(test_images), len(test_labels)) == (1437, 1437, 360, 360)
    both = np.concatenate([images, test_images])
    assert np.array_equal(np.sort(both, axis=0), np.sort(load_digits()[0], axis=0))


@pytest.mark.parametrize("steps", [1, 22, 23, 100])
def test_every_epoch_sees_each_digit_once(steps):
    rows = digits.batches(np.random.default_rng(0), steps)
    assert rows.shape == (steps, digits.BATCH)
    flat = rows.ravel()
    for start in range(0, len(flat), digits.TRAIN):
        epoch = flat[start : start + digits.TRAIN]
        assert len(set(epoch.tolist())) == len(epoch)


# ---- the network ------------------------------------------------------------------------------------------------------
def batch(model, n=5):
    rng = np.random.default_rng(1)
    params = model.initial(rng, np.float64)
    for name in params:
        params[name] += 0.1 * rng.standard_normal(params[name].shape)  # biases too
    return params, rng.random((n, 64)), rng.integers(0, 10, n), rng


@pytest.mark.parametrize("model", [MLP, LOGREG], ids=lambda model: model.name)
def test_the_backward_pass_against_finite_differences(model):
    params, x, labels, _ = batch(model)
    grads, h = model.gradients(params, x, labels)[1], 1e-5
    assert grads.keys() == params.keys()
    for name, p in params.items():
        slope = np.empty_like(p)
        for i in np.ndindex(p.shape):
            kept = p[i]
            p[i] = kept + h
            above = model.gradients(params, x, labels)[0]
            p[i] = kept - h
            slope[i] = (above - model.gradients(params, x, labels)[0]) / (2 * h)
            p[i] = kept
        np.testing.assert_allclose(grads[name], slope, atol=1e-9, rtol=1e-6, err_msg=name)


def test_gradients_keep_the_dtype_of_the_parameters():
    params, x, labels, _ = batch(MLP)
    single = {name: p.astype(np.float32) for name, p in params.items()}
    loss, grads = MLP.gradients(single, x.astype(np.float32), labels)
    assert {g.dtype for g in grads.values()} == {np.dtype(np.float32)}
    assert loss == pytest.approx(MLP.gradients(params, x, labels)[0], rel=1e-5)


def test_the_curvature_estimate_averages_to_the_gauss_newton_diagonal():
    params, x, _, rng = batch(MLP)
    entered, logits = MLP.forward(params, x)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    mean = {name: np.zeros_like(value) for name, value in params.items()}
    for _ in range(4000):
        for name, estimate in MLP.curvature(params, x, rng).items():
            mean[name] += estimate / 4000
    spread = p * (1 - p)  # the softmax's own curvature
    np.testing.assert_allclose(mean["head.bias"], spread.mean(axis=0), rtol=0.15)
    np.testing.assert_allclose(mean["head.weight"].sum(), (spread.T @ entered[-1] ** 2).sum() / len(x), rtol=0.05)


# ---- runs -------------------------------------------------------------------------------------------------------------
def test_the_table_has_every_model_and_every_optimizer():
    assert set(rates.SETTINGS) == set(running.MODELS)
    assert set(lm_rates.SETTINGS) == {*running.MODELS, *LM_MODELS}
    for table in lm_rates.SETTINGS.values():
        assert list(table) == rlx_optim.list_optimizers()


def test_all_start_alike_and_a_race_repeats():
    first, again, other = (train(name) for name in ("sophia", "sophia", "muon"))
    assert first.losses == again.losses
    assert first.losses[0] == other.losses[0]
    assert first.losses[-1] != other.losses[-1]
    assert len(first.losses) == len(first.seconds) == 12
    assert first.seconds == sorted(first.seconds)
    assert first.metrics.keys() == METRICS
    assert train("sophia", steps=1, seed=1).losses[0] != first.losses[0]


def test_every_step_ticks_once_with_its_loss():
    ticks = []
    assert train("sgd", steps=7, tick=ticks.append).losses == ticks
    assert len(ticks) == 7


def test_a_run_that_diverges_ends_there_and_says_where():
    run = train("sgd", steps=40, lr=1e38)
    assert run.diverged_at is not None
    assert 0 < run.diverged_at <= 40
    assert run.metrics == {}
    assert len(run.losses) == min(run.diverged_at + 1, 40)


def test_tuning_takes_the_rate_with_the_lowest_training_loss():
    raced = running.Race(MLP, ["adamw"], 20, 1, "reference", tune=True)
    told = []
    running.run(raced, told.append, quiet)
    (entry,) = raced.entries
    assert [trial.lr for trial in entry.grid] == pytest.approx([0.003, 0.009, 0.03, 0.09, 0.3])
    assert entry.settings["lr"] == min(entry.grid, key=lambda trial: trial.train_loss).lr
    assert entry.settings["weight_decay"] == rates.SETTINGS["digits-mlp"]["adamw"]["weight_decay"]
    assert len(told) == 6
    assert raced.total == 20 * 6


def test_tuning_survives_rates_at_which_everything_diverges(monkeypatch):
    monkeypatch.setattr(running, "GRID", (1e38, 5e38))
    raced = running.Race(MLP, ["sgd"], 20, 1, "reference", tune=True)
    running.run(raced, quiet, quiet)
    assert [trial.train_loss for trial in raced.entries[0].grid] == [None, None]
    assert raced.entries[0].settings["lr"] == rates.SETTINGS["digits-mlp"]["sgd"]["lr"]


# ---- what is written ----------------------------------------------------------------------------------------------------
def runs(*losses, ms=1.0):
    """Runs with these losses, a second a step."""
    good = {"accuracy": 0.9, "test_loss": 0.2, "train_loss": 0.1}
    return [
        race.Run(i, list(each), [float(k) for k in range(1, len(each) + 1)], good if math.isfinite(each[-1]) else {}, ms, 8,
                 None if math.isfinite(each[-1]) else len(each) - 1)
        for i, each in enumerate(losses)
    ]  # fmt: skip


def test_a_curve_is_the_mean_and_the_range_over_seeds():
    curve = report.curve(runs([3.0, 2.0], [1.0, 1.0]))
    assert curve == {"step": [1, 2], "loss": [2, 1.5], "low": [1, 1], "high": [3, 2], "seconds": [1, 2]}


def test_a_diverged_run_counts_up_to_its_last_finite_loss():
    curve = report.curve(runs([3.0, math.inf], [1.0, 0.5, 0.25]))
    assert curve["loss"] == [2, 0.5, 0.25]
    assert report.curve(runs([2.0, math.nan]))["step"] == [1]


def test_long_curves_are_thinned():
    losses = list(np.linspace(3, 1, 12_345))
    curve = report.curve(runs(losses))
    assert len(curve["step"]) == report.POINTS
    assert curve["step"][-1] == 12_345
    assert curve["loss"] == sorted(curve["loss"], reverse=True)
    assert np.mean(curve["loss"]) == pytest.approx(2, rel=1e-3)


def test_spread():
    assert running.spread([]) is None
    assert running.spread([2.0]) == {"mean": 2, "low": 2, "high": 2, "sd": None, "values": [2]}
    assert running.spread([1.0, 3.0])["sd"] == pytest.approx(math.sqrt(2))


def test_a_page_is_whole_and_asks_for_nothing():
    hostile = {"names": [], "text": "</script><script>alert(1)</script>"}
    page = report.page(report.PAGES / "report", "a < b & c", hostile)
    assert "<title>a &lt; b &amp; c</title>" in page
    assert "{{" not in page
    assert page.count("</script>") == 2  # the data and the program: nothing in the data can end its own
    assert not re.search(
        r"""(src|href)=["'](?!data:)|https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)""", page.replace("url(#${clip})", "")
    )


# ---- the command ------------------------------------------------------------------------------------------------------
def main(*argv):
    return cli.main(["race", *map(str, argv)])


def stub(monkeypatch, accuracy=1.0, fails=None, **changes):
    """In place of training: a result at once."""
    made = race.Run(0, [2.0, 1.0], [0.1, 0.2], {"accuracy": accuracy, "test_loss": 0.1, "train_loss": 0.1}, 0.1, 8)

    def train(self, optimizer, settings, steps, seed, engine, tick):
        if optimizer == fails and seed == 1:
            raise KeyboardInterrupt
        return dataclasses.replace(made, seed=seed, **changes)

    monkeypatch.setattr(digits.Digits, "train", train)


def refused(capsys, monkeypatch, *argv):
    """What is said about arguments that are refused, in one line, before anything is trained."""
    monkeypatch.setattr(digits.Digits, "train", lambda *_: pytest.fail("trained although the arguments are wrong"))
    assert main(*argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def written(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_short_race(tmp_path, capsys):
    out = tmp_path / "deep" / "race"
    assert main("--optimizers", "muon, AdamW", "--steps", 20, "--seeds", 2, "--out", out) == 0
    found = written(out)
    assert list(found["optimizers"]) == ["muon", "adamw"]  # as asked for
    adamw = found["optimizers"]["adamw"]
    assert adamw.keys() == ENTRY
    assert adamw["settings"] == rates.SETTINGS["digits-mlp"]["adamw"]
    assert adamw["state_bytes"] == 8 * sum(o * (i + 1) for i, o in MLP.layers.values())
    assert adamw["engine"].startswith("cpu: compiled by LLVM")  # what ran, not "auto"
    assert adamw["runs"] == len(adamw["accuracy"]["values"]) == 2
    assert adamw["accuracy"]["low"] <= adamw["accuracy"]["mean"] <= adamw["accuracy"]["high"]
    assert len(adamw["curve"]["step"]) == 20
    assert (found["steps"], found["seeds"], found["interrupted"]) == (20, 2, False)
    assert found["machine"]["versions"]["rlx_optim"] == rlx_optim.__version__
    assert found["command"] == "rlx-optim race --model digits-mlp --optimizers muon,adamw --steps 20 --seeds 2 --engine auto"
    page = (out / "report.html").read_text()
    assert found["command"] in page
    assert len(page) < 3e6
    said = capsys.readouterr().out
    assert "muon" in said
    assert f"report: {out / 'report.html'}" in said


def test_logreg_with_a_grid_and_json(tmp_path, capsys):
    assert (
        main("--model", "logreg", "--optimizers", "sgd", "--steps", 5, "--seeds", 1, "--tune", "--json", "--out", tmp_path) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found == written(tmp_path)
    assert len(found["optimizers"]["sgd"]["grid"]) == len(running.GRID)
    assert found["model"]["parameters"] == 650
    assert found["command"].endswith("--tune")


def test_the_grid_is_shown(tmp_path, capsys):
    main("--optimizers", "lion", "--steps", 3, "--seeds", 1, "--tune", "--out", tmp_path)
    said = capsys.readouterr().out
    assert "× 0.3" in said
    assert "0.0003: " in said
    assert said.count(" *") >= 1


def test_the_module_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlx_optim.race", "--model", "digit-mlp"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "did you mean 'digits-mlp'?" in " ".join(done.stderr.split())
    assert not any(tmp_path.iterdir())


def test_the_default_folder_is_new_and_dated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stub(monkeypatch)
    assert main() == 0
    assert len(list(tmp_path.glob("race-????????-??????/report.html"))) == 1


def test_a_folder_in_use_is_refused_before_training(tmp_path, capsys, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for name, reason in {"full": "not empty", "full/notes.txt": "cannot write"}.items():
        assert reason in refused(capsys, monkeypatch, "--out", tmp_path / name)
    assert "cannot write" in refused(capsys, monkeypatch, "--out", "/proc/no/such")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--optimizers", "adamw,moun"], ["'moun'", "did you mean 'muon'?", *rlx_optim.list_optimizers()]),
        (["--optimizers", ""], ["''"]),
        (["--model", "digits"], ["'digits'", "did you mean 'digits-mlp'?", "logreg"]),
        (["--steps", "0"], ["--steps"]),
        (["--steps"], ["--steps"]),
        (["--seeds", "0"], ["--seeds"]),
        (["--engine", "cpux"], ["'cpux'", "did you mean 'cpu'?", "reference"]),
    ],
)
def test_bad_arguments_are_refused_in_one_line(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, monkeypatch, *argv)
    assert all(word in said for word in words)
    assert not any(tmp_path.iterdir())


def test_without_torch_char_gpt_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lm-race"]) == 2
    assert 'pip install "rlx-optim[torch]"' in capsys.readouterr().err


def test_an_interrupt_writes_what_was_done(tmp_path, capsys, monkeypatch):
    stub(monkeypatch, fails="adamw")
    assert main("--out", tmp_path) == 130
    found = written(tmp_path)
    assert {name: entry["runs"] for name, entry in found["optimizers"].items()} == {"sgd": 3, "adam": 3, "adamw": 1}
    assert found["interrupted"] is True
    assert '"interrupted":true' in (tmp_path / "report.html").read_text()
    assert "interrupted" in capsys.readouterr().err


def test_an_interrupt_before_anything_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr(digits.Digits, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main("--out", tmp_path) == 130
    assert written(tmp_path)["optimizers"] == {}


def test_a_real_ctrl_c(tmp_path):
    """A process in the middle of training, as a terminal would interrupt it."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell ignores it
        "from rlx_optim.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    asked = [
        "race",
        "--optimizers",
        "sgd,adam",
        "--steps",
        "5",
        "--seeds",
        "100000",
        "--engine",
        "reference",
        "--out",
        tmp_path / "r",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", code, *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(600):
            if (tmp_path / "r").exists():
                break
            time.sleep(0.1)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said[1]
    assert written(tmp_path / "r")["optimizers"]["sgd"]["runs"] > 0
    assert (tmp_path / "r" / "report.html").exists()


@pytest.mark.parametrize(
    ("extra", "code"), [([], 1), (["--steps", "9"], 0), (["--optimizers", "sgd"], 0), (["--model", "logreg"], 0)]
)
def test_only_a_full_race_can_be_lost(extra, code, tmp_path, monkeypatch):
    stub(monkeypatch, accuracy=0.94)
    assert main("--out", tmp_path, *extra) == code


def test_a_diverged_race_is_shown_as_such(tmp_path, capsys, monkeypatch):
    stub(monkeypatch, metrics={}, diverged_at=1, losses=[2.0, math.nan])
    assert main("--out", tmp_path) == 1
    entry = written(tmp_path)["optimizers"]["sgd"]
    assert (entry["accuracy"], entry["diverged"], entry["curve"]["loss"]) == (None, 3, [2.0])
    said = capsys.readouterr()
    assert "sgd (3 of 3 diverged)" in said.out
    assert "below the goal of 95%" in said.err


@pytest.mark.timeout(120)
def test_all_reach_the_goal(tmp_path):
    assert main("--engine", "cpu", "--seeds", 1, "--out", tmp_path) == 0
    entries = written(tmp_path)["optimizers"]
    assert list(entries) == rlx_optim.list_optimizers()
    assert {name: e["accuracy"]["low"] for name, e in entries.items() if e["accuracy"]["low"] < 0.95} == {}


# ---- char-gpt -----------------------------------------------------------------------------------------------------------
def test_the_transformer_learns(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from lab.races import char_gpt

    monkeypatch.setattr(char_gpt, "TESTED", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: a second thread only waits
    code = cli.main(["lm-race", "--optimizers", "adamw,sophia", "--steps", "12", "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert code == 0
    for entry in written(tmp_path)["optimizers"].values():
        first, *_, last = entry["curve"]["loss"]
        assert first == pytest.approx(math.log(96), rel=0.05)  # nothing known: every character alike
        assert last < first - 0.2
    adamw = written(tmp_path)["optimizers"]["adamw"]
    assert adamw["state_bytes"] == 8 * written(tmp_path)["model"]["parameters"]


def test_the_transformer_cannot_look_ahead():
    torch = pytest.importorskip("torch")
    from lab.races import char_gpt

    model = char_gpt.Transformer()
    x = torch.arange(char_gpt.CONTEXT)[None] % 96
    changed = x.clone()
    changed[0, 40:] = 5
    assert torch.allclose(model(x)[0, :40], model(changed)[0, :40], atol=1e-5)
    assert not torch.allclose(model(x)[0, 40:], model(changed)[0, 40:], atol=1e-5)


# ---- landscapes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", landscape.SURFACES)
def test_the_surfaces_are_what_they_say(name):
    surface, h = landscape.SURFACES[name], 1e-5
    assert surface.value(*surface.minimum) == pytest.approx(0, abs=1e-12)
    assert surface.gradient(*surface.minimum) == pytest.approx((0, 0), abs=1e-9)
    for x, y in (surface.start, (0.7, -0.4), (1.3, 1.9)):
        f, g = surface.value, surface.gradient
        assert g(x, y) == pytest.approx(
            ((f(x + h, y) - f(x - h, y)) / (2 * h), (f(x, y + h) - f(x, y - h)) / (2 * h)), rel=1e-5, abs=1e-4
        )
        around = (g(x + h, y)[0] - g(x - h, y)[0], g(x, y + h)[1] - g(x, y - h)[1])
        assert surface.curvature(x, y) == pytest.approx([d / (2 * h) for d in around], rel=1e-5, abs=1e-3)


def test_a_landscape(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(landscape, "RATES", (0.01, 1e9))
    page = tmp_path / "paths.html"
    assert (
        cli.main(["landscape", "--optimizers", "adamw,muon,sophia", "--steps", "30", "--engine", "reference", "--out", str(page)])
        == 0
    )
    assert "Rosenbrock" in capsys.readouterr().out
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert list(data["surfaces"]) == ["rosenbrock", "beale", "rastrigin"]
    for surface in data["surfaces"].values():
        for walked in surface["paths"].values():
            assert walked["lr"] == 0.01  # at 1e9 the walk leaves the picture
            assert len(walked["path"]) == 31
            assert walked["path"][0] == pytest.approx(surface["start"])
    assert cli.main(["landscape", "--out", str(page)]) == 2
    assert "exists" in capsys.readouterr().err
