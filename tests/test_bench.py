"""rlx-optim bench: shape sets, what a run gives, and what it says when something is wrong. Nothing here looks at speed."""

import json
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import rlx_optim
from rlx_optim.registry import spec_class
from rlx_optim.threads import get_threads

pytest.importorskip("typer")
cli = pytest.importorskip("rlx_optim.cli")
from lab import bench, measure, peers, results  # noqa: E402

REPORT = {"model", "tensors", "parameters", "settings", "machine", "rows", "notes", "interrupted"}
ROW = {
    "optimizer", "implementation", "ms_per_step", "ms_best", "ms_worst", "ns_per_parameter", "gb_per_second",
    "copy_gb_per_second", "copy_fraction", "state_bytes_per_parameter", "ratio_to_best_peer", "turns", "steps_per_turn",
    "host_ms", "compile_s", "first_s",
}  # fmt: skip
MACHINE = {"cpu", "cores", "threads", "memory_gb", "load_average", "platform", "date", "versions"}


def test_the_jax_front_end(capsys, monkeypatch):
    """What it runs, here on the CPU; and where it cannot."""
    pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    from lab import cuda

    assert run("--front", "jax") == 2
    assert "--front jax is for --device cuda" in capsys.readouterr().err
    assert run("--front", "mlx") == 2
    place = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    monkeypatch.setattr(cuda, "_for_jax", lambda p, g: (*({k: t.numpy() for k, t in each.items()} for each in (p, g)), None))
    request = results.Request("m", {"w": (4, 3), "b": (3,)}, ["muon"], ["optax", "torch"], device="cuda", front="jax")
    for name in ("adamw", "muon", "soap"):
        field = cuda.field(name, request, (place, place))
        assert next(iter(field)) == "ours, in JAX"
        assert not [label for label in field if "torch" in label]
        mine = field["ours, in JAX"]()
        mine.step()
        mine.step()
        assert mine.state_bytes() > 0
        assert mine.compile_s > 0


@pytest.fixture(autouse=True)
def small_copy(monkeypatch):
    monkeypatch.setattr(measure, "COPIED", 1 << 16)


def run(*options, model="one:1k", optimizers="adamw", library="none", rounds=1):
    """main() on a short benchmark."""
    asked = ["--model", model, "--optimizers", optimizers, "--peers", library, "--rounds", str(rounds)]
    return cli.main(["bench", *asked, "--seconds", "0.0001", *map(str, options)])


def refused(capsys, *options):
    """What is said about a wrong command line, in one line."""
    assert cli.main(list(map(str, options))) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert not said.out
    return said.err


# ---- shape sets -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("two-blocks", 24, 14_175_744),
        ("gpt2-124m", 148, 124_439_808),
        ("one:1k", 1, 1_000),
        ("one:262k", 1, 262_000),
        ("one:32M", 1, 32_000_000),
        ("one:77", 1, 77),
        ("one:2kx64", 1, 128_000),
    ],
)
def test_shape_sets(model, tensors, parameters):
    shapes = bench.shapes_of(model)
    assert (len(shapes), results.count_numbers(shapes)) == (tensors, parameters)


@pytest.mark.parametrize(("model", "least", "most"), [("many-small", 1_000, 64_000), ("many-tiny", 64, 4_096)])
def test_many_vectors(model, least, most):
    shapes = bench.shapes_of(model)
    sizes = [math.prod(shape) for shape in shapes.values()]
    assert len(shapes) == 2000
    assert all(len(shape) == 1 for shape in shapes.values())
    assert least <= min(sizes) < 1.1 * least + 10
    assert 0.99 * most < max(sizes) <= most
    assert shapes == bench.shapes_of(model)


@pytest.mark.parametrize(("model", "matrices", "tensors"), [("many-shapes", 200, 200), ("many-mixed", 1000, 3000)])
def test_many_shapes(model, matrices, tensors):
    shapes = bench.shapes_of(model)
    twos = [shape for shape in shapes.values() if len(shape) == 2]
    assert len(shapes) == tensors
    assert len(set(twos)) == len(twos) == matrices
    assert 32 <= min(map(min, twos)) <= max(map(max, twos)) <= 512


# ---- the tables ---------------------------------------------------------------------------------------------------------
def test_every_optimizer_has_peers_and_bytes():
    matrix = {name for name in rlx_optim.list_optimizers() if rlx_optim.registry.spec_class(name).matrix}
    assert set(peers.PEERS) <= set(rlx_optim.list_optimizers())
    known = {
        "sgd": 20,
        "lion": 20,
        "sophia": 24,
        "adafactor": 24,
        "lamb": 40,
        "mars": 44,
        "adan": 44,
        "ademamix": 36,
        "stableadamw": 36,
        "prodigy": 56,
        "schedulefreesgd": 20,
    }
    for name in rlx_optim.list_optimizers():  # what the rules' own programs say
        spec = spec_class(name)(**results.settings_of(name))
        assert results.count_bytes(spec, (30, 10)) == (None if name in matrix else known.get(name, 28))
    for name, table in peers.PEERS.items():
        assert len({peer.label for peer in table}) == len(table) > 0, name
        assert {peer.library for peer in table} <= set(peers.LIBRARIES)


def test_weights_in_bfloat16_are_measured_in_each_rounding():
    torch = pytest.importorskip("torch")
    from lab import cuda

    place = {"w": torch.ones(64, 128)}
    request = results.Request("m", {"w": (64, 128)}, ["adamw"], [], device="cuda", state_dtypes=("int8",), weights="bfloat16")
    field = cuda.field("adamw", request, (place, place))
    ways = ("nearest", "stochastic", "exact")
    assert list(field) == [f"ours, {how}" for how in ways] + [f"ours, int8 state, {how}" for how in ways]
    for label, make in field.items():
        made = make()
        made.step()
        assert results.label_of(made.kept, made.rounding) == made.label == label
        first, state = (made.rounding == "exact") * 2 * 8192, {"float32": 8 * 8192, "int8": 2 * 8192 + 2 * 4 * 64}[made.kept]
        assert made.state_bytes() - first - state in range(17)  # and the step


def test_traffic_counts_who_steps_a_tensor():
    shapes = {"w": (30, 10), "b": (100,)}
    assert results.traffic("adamw", shapes) == 28
    assert results.traffic("mars", shapes) == (300 * 44 + 100 * 28) / 400  # vectors go to AdamW
    assert results.traffic("muon", {"b": (100,)}) == 28
    assert results.traffic("muon", shapes) is None
    large = {"w": (64, 128)}
    assert [results.traffic("adamw", large, kept) for kept in ("float32", "bfloat16", "int8")] == [28, 20, 16 + 4 * 4 / 128]
    assert results.traffic("adamw", {"b": (100,)}, "int8") == 28  # which stays exact
    # p and g of two bytes; p with its low half is read and written as four
    assert [results.traffic("adamw", shapes, rounding=how) for how in ("nearest", "stochastic", "exact")] == [22, 22, 26]
    assert results.traffic("adamw", large, "int8", "nearest") == 10 + 4 * 4 / 128


def test_rows_are_arithmetic():
    shapes = {"w": (1_000_000,)}
    timings = [
        results.Timing("ours", [2e-3, 1e-3, 4e-3], 5, 8_000_000),
        results.Timing("slow", [6e-3], 1, 0),
        results.Timing("fast", [3e-3], 1, 0),
    ]
    ours, slow, fast = results.rows("adamw", shapes, timings, copy_gb=20.0)
    assert (ours.ms_per_step, ours.ms_best, ours.ms_worst) == (2, 1, 4)
    assert (ours.ns_per_parameter, ours.state_bytes_per_parameter) == (2, 8)
    assert (ours.gb_per_second, ours.copy_fraction) == (pytest.approx(14), pytest.approx(0.7))
    assert [ours.ratio_to_best_peer, slow.ratio_to_best_peer, fast.ratio_to_best_peer] == [1.5, 0.5, 1]
    assert (ours.turns, ours.steps_per_turn) == (3, 5)
    (alone,) = results.rows("adamw", shapes, timings[:1], copy_gb=None)
    assert alone.ratio_to_best_peer is alone.copy_fraction is None


@pytest.mark.parametrize(("cycle", "step", "multiple"), [(1, 2e-4, 1), (10, 2e-4, 10), (10, 2e-3, 10)])
def test_a_turn_fills_its_time_with_whole_cycles(cycle, step, multiple):
    entrant = measure.prepare(peers.Contender("sleeper", lambda: time.sleep(step)), 1e-3, cycle, fresh=False)
    assert entrant.steps >= 1
    assert entrant.steps % multiple == 0


def test_fresh_gradients_are_new_arrays_of_the_same_values():
    grads = {"w": np.ones(5, np.float32)}
    contender = measure.ours("sgd", {"w": np.zeros(5, np.float32)}, grads)
    given = contender.step.args[1]
    for _ in range(2):
        before = given["w"]
        contender.renew()
        assert given["w"] is not before
        assert (given["w"] == 1).all()
    contender.step()
    assert list(grads) == ["w"]


# ---- a run --------------------------------------------------------------------------------------------------------------
def test_a_run_alone(tmp_path, capsys):
    assert run("--json", tmp_path / "r.json", optimizers="adamw,lion,muon", rounds=2) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report.keys() == REPORT
    assert report["machine"].keys() == MACHINE
    assert report["machine"]["versions"]["rlx_optim"] == rlx_optim.__version__
    assert (report["model"], report["tensors"], report["parameters"]) == ("one:1k", 1, 1000)
    assert report["settings"]["optimizers"] == ["adamw", "lion", "muon"]
    assert [(r["optimizer"], r["implementation"]) for r in report["rows"]] == [
        (name, who) for name in ("adamw", "lion", "muon") for who in ("ours", "ours (step)")
    ]
    for row in report["rows"]:
        assert row.keys() == ROW
        assert row["turns"] == 2
        assert 0 < row["ms_best"] <= row["ms_per_step"] <= row["ms_worst"]
        assert row["ratio_to_best_peer"] is None
    assert [r["state_bytes_per_parameter"] for r in report["rows"]] == [8, 8, 4, 4, 8, 8]
    said = capsys.readouterr().out
    assert report["machine"]["cpu"] in said
    assert "ours (step)" in said
    assert "muon: there are only vectors here; all go to `otherwise` (adamw)" in said


def test_a_run_with_state_in_fewer_bits(tmp_path):
    assert run("--json", tmp_path / "r.json", "--state-dtype", "bfloat16,int8", model="one:64x128", optimizers="adamw,muon") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["state_dtypes"] == ["bfloat16", "int8"]
    who = ["ours", "ours (step)", "ours, bfloat16 state", "ours, int8 state"]
    assert [(r["optimizer"], r["implementation"]) for r in report["rows"]] == [
        (k, each) for k in ("adamw", "muon") for each in who
    ]
    assert [r["state_bytes_per_parameter"] for r in report["rows"]] == [8, 8, 4, 2.0625, 4, 4, 2, 1.03125]


def test_a_run_with_torch(tmp_path):
    pytest.importorskip("torch")
    assert run("--json", tmp_path / "r.json", "--fresh-gradients", library="torch") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    rows = {row["implementation"]: row for row in report["rows"]}
    assert set(rows) == {"ours", "ours (step)", "torch fused", "torch foreach"}
    best = min(rows["torch fused"]["ms_per_step"], rows["torch foreach"]["ms_per_step"])
    assert rows["ours"]["ratio_to_best_peer"] == pytest.approx(best / rows["ours"]["ms_per_step"])
    assert report["settings"]["fresh_gradients"] is True


@pytest.mark.parametrize(
    "peer", [pytest.param(peer, id=f"{name}-{peer.label}") for name, table in peers.PEERS.items() for peer in table]
)
def test_every_peer_builds_and_steps(peer):
    """With a matrix and a vector, and with a vector alone."""
    pytest.importorskip(peer.library)
    for shapes in ({"w": (6, 4), "b": (5,)}, {"b": (5,)}):
        contender = peers.contender(peer, *measure.draw(shapes))
        assert contender.label == peer.label
        for _ in range(3):
            contender.renew()
            contender.step()
        assert contender.state_bytes() > 0


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_optax_compiles_before_its_first_step_alone(name, caplog):
    jax = pytest.importorskip("jax")
    (peer,) = (peer for peer in peers.PEERS[name] if peer.library == "optax")
    contender = peers.contender(peer, *measure.draw({"w": (6, 4), "b": (5,)}))
    with jax.log_compiles():
        contender.step()
        contender.step()
        contender.renew()
        contender.step()
    assert "jit(advance)" not in caplog.text


@pytest.mark.parametrize("name", rlx_optim.list_optimizers())
def test_all_of_ours_run_without_a_warning(name, recwarn):
    contender = measure.ours(name, *measure.draw({"w": (6, 4), "b": (5,)}))
    contender.step()
    assert contender.state_bytes() > 0 or name == "scion"  # which keeps nothing with momentum 1
    assert not recwarn.list


def test_threads_are_set_for_the_run_alone(tmp_path):
    before = dict(os.environ)
    assert run("--threads", 1, "--json", tmp_path / "r.json") == 0
    assert json.loads((tmp_path / "r.json").read_text())["machine"]["threads"] == 1
    assert get_threads() == rlx_optim.threads.available()
    assert dict(os.environ) == before


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert run("--plot", tmp_path / "r.png", optimizers="adamw,sgd") == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


# ---- what goes wrong ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--optimizers", "adamw,moun"], ["'moun'", "did you mean 'muon'?", *rlx_optim.list_optimizers()]),
        (["--optimizers", ""], ["''"]),
        (["--model", "two-block"], ["'two-block'", "did you mean 'two-blocks'?", "gpt2-124m", "many-tiny", "one:N"]),
        (["--model", "one:0"], ["'one:0'"]),
        (["--model", "one:3x"], ["'one:3x'"]),
        (["--model", "one:900000000M"], ["900,000,000,000,000 parameters", "memory"]),
        (["--peers", "torhc"], ["'torhc'", "did you mean 'torch'?", "optax", "pytorch_optimizer"]),
        (["--rounds", "0"], ["--rounds"]),
        (["--state-dtype", "int4"], ["'int4'", "bfloat16", "int8"]),
        (["--weights", "float61"], ["'float61'", "float32", "bfloat16"]),
        (["--weights", "bfloat16"], ["--weights bfloat16 is for --device cuda and --front torch"]),
        (["--threads", "no"], ["--threads"]),
        (["--seconds", "-1"], ["--seconds"]),
        (["--json", "/no/such/folder/r.json"], ["--json", "/no/such/folder/r.json"]),
        (["r.json"], ["--json r.json"]),
        (["--plot", "r.jpeg"], ["--plot", ".png"]),
        (["--sped"], ["--sped"]),
    ],
)
def test_bad_options_are_refused_in_one_line(options, words, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("measured although the options are wrong"))
    said = refused(capsys, "bench", *options)
    assert all(word in said for word in words)


def test_an_unknown_command_is_refused(capsys):
    assert "bench" in refused(capsys, "bnech")


def test_a_missing_peer_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(results, "installed", lambda library: False)
    assert run(library="all") == 0
    said = capsys.readouterr().out
    for library in peers.LIBRARIES:
        assert f"missing: {library} (pip install {library})" in said


def test_a_peer_without_the_rule_is_reported(capsys):
    assert run(optimizers="qhadamw", library="torch") == 0
    assert "qhadamw: none of torch has it" in capsys.readouterr().out


def test_a_failing_peer_is_reported_with_its_reason(tmp_path, capsys, monkeypatch):
    def fails(peer, params, grads):
        count = iter(range(3 if "foreach" in peer.label else 0))

        def step():
            if next(count, None) is None:
                raise RuntimeError("no such kernel\nand more")

        return peers.Contender(peer.label, step)

    monkeypatch.setattr(measure, "contender", fails)
    monkeypatch.setattr(results, "installed", lambda library: True)
    monkeypatch.setattr(measure, "prepare", lambda contender, *_, **__: contender.step() or measure.Entrant(contender, 1))
    assert run("--json", tmp_path / "r.json", library="torch", rounds=4) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert "failed: adamw, torch fused: RuntimeError: no such kernel" in report["notes"]  # at its first step
    assert "failed: adamw, torch foreach: RuntimeError: no such kernel" in report["notes"]  # in the third round
    turns = {row["implementation"]: row["turns"] for row in report["rows"]}
    assert turns == {"ours": 4, "ours (step)": 4}
    assert "no such kernel" in capsys.readouterr().out


def test_if_ours_fails_so_does_the_command(monkeypatch, capsys):
    monkeypatch.setattr(measure, "ours", lambda *_, **__: 1 / 0)
    assert run() == 1
    assert "failed: adamw, ours: ZeroDivisionError" in capsys.readouterr().out


def test_an_interrupt_leaves_what_was_measured(tmp_path, capsys, monkeypatch):
    real, turns = measure.turn, []

    def turn(contender, steps, fresh):
        turns.append(contender.label)
        if turns.count("copy") == 5:  # two first steps or more, then one in every round
            raise KeyboardInterrupt
        return real(contender, steps, fresh)

    monkeypatch.setattr(measure, "turn", turn)
    monkeypatch.setattr(measure, "prepare", lambda contender, *_, **__: measure.Entrant(contender, 1))
    assert run("--json", tmp_path / "r.json", optimizers="sgd,adamw", rounds=3) == 130
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"] is True
    assert {(r["optimizer"], r["turns"]) for r in report["rows"]} == {("sgd", 3), ("adamw", 1)}
    said = capsys.readouterr()
    assert "interrupted" in said.err
    assert "adamw" in said.out


def test_without_typer_one_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(cli, "app", None)
    assert 'pip install "rlx-optim[cli]"' in refused(capsys, "bench")


def test_plot_needs_matplotlib(tmp_path, capsys, monkeypatch):
    found = bench.importlib.util.find_spec
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert 'pip install "rlx-optim[cli]"' in refused(capsys, "bench", "--plot", tmp_path / "r.png")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from rlx_optim.cli import main; main(['bench', '--help']);"
        "print(sorted({'llvmlite', 'torch', 'jax', 'optax', 'scipy', 'matplotlib', 'pytorch_optimizer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--fresh-gradients" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlx_optim.cli", "bench", "--model", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("rlx-optim: unknown model 'x'")
    help = subprocess.run([sys.executable, "-m", "rlx_optim.cli"], capture_output=True, text=True, check=True)
    assert "bench" in help.stdout


@pytest.mark.parametrize("dash", [(), ("-",)], ids=["flag", "dash"])
def test_bench_prints_json(dash, capsys, monkeypatch):
    monkeypatch.setattr(measure, "COPIED", 1 << 16)
    assert cli.main(["bench", "--model", "one:1k", "--peers", "none", "--rounds", "1", "--seconds", "1e-4", "--json", *dash]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "one:1k"
