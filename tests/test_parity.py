"""rlx-optim parity: every optimizer on every engine that is here beside the reference, and beside its peers."""

import dataclasses
import json

import numpy as np
import pytest
from test_cli import NAMES, printed, refused, run

from lab import counterparts, parity, walks


def test_every_optimizer_has_a_peer_or_a_reason():
    assert {peer.optimizer for peer in counterparts.PEERS} | set(counterparts.ALONE) == set(NAMES)
    assert not {peer.optimizer for peer in counterparts.PEERS} & set(counterparts.ALONE)


def test_parity_of_the_cpu_engine(capsys):
    found = printed(capsys, "parity", "--engines", "cpu,cpu-float64", "--peers", "none")
    assert len(found["rows"]) == 2 * len(NAMES)
    assert {row["status"] for row in found["rows"]} == {"equal"}
    assert all(row["error"] > 0 for row in found["rows"] if row["against"] == "cpu")  # float32 does show


@pytest.mark.parametrize(
    ("optimizer", "engine", "library"),
    [("adamw", "torch", "torch"), ("sophia", "torch", "pytorch_optimizer"), ("lion", "jax", "optax")],
)
def test_parity_of_other_engines_and_peers(optimizer, engine, library, capsys, tmp_path):
    pytest.importorskip(engine)
    pytest.importorskip(library)
    out = tmp_path / "parity.md"
    assert run("parity", "--optimizers", optimizer, "--engines", engine, "--peers", library, "--out", out) == 0
    assert "all within their bars" in capsys.readouterr().out
    assert f"| optimizer | {engine} | {parity.COLUMNS.get(library, library)} |" in out.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parity_of_everything(tmp_path):
    for library in ("torch", "jax", "optax", "pytorch_optimizer"):
        pytest.importorskip(library)
    out = tmp_path / "parity.json"
    assert run("parity", "--out", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) >= 4 * len(NAMES) + len(counterparts.PEERS)


def test_what_differs_is_noticed(capsys, monkeypatch):
    """Another rule, a failing engine and a result that is not a number: each is told, and the exit code is 1."""
    peer = next(peer for peer in counterparts.PEERS if (peer.optimizer, peer.library) == ("adamw", "torch"))
    pytest.importorskip("torch")
    other = dataclasses.replace(peer, ours={**peer.ours, "eps": 1e-3})
    assert parity.peer_row(other)["status"] == "differs"
    broken = dataclasses.replace(walks.ENGINES["cpu"], walk=lambda *_: 1 / 0)
    monkeypatch.setitem(walks.ENGINES, "cpu", broken)
    rows = printed(capsys, "parity", "--optimizers", "adamw", "--engines", "cpu", "--peers", "none", code=1)["rows"]
    assert (rows[0]["status"], rows[0]["remark"]) == ("failed", "ZeroDivisionError: division by zero")
    lost = dataclasses.replace(broken, walk=lambda name, settings, todo: {k: p * np.nan for k, p in todo.start.items()})
    monkeypatch.setitem(walks.ENGINES, "cpu", lost)
    assert run("parity", "--optimizers", "adamw", "--engines", "cpu", "--peers", "none") == 1
    assert "1 of them wrong" in capsys.readouterr().out


def test_bad_options_of_parity(capsys):
    assert "nothing to compare" in refused(capsys, "parity", "--engines", "none", "--peers", "none")
    assert "must end in .json or .md" in refused(capsys, "parity", "--out", "table.txt")


def test_parity_of_engines_that_are_not_here(capsys, monkeypatch):
    """Nothing compared is nothing shown to be equal."""
    monkeypatch.setitem(walks.ENGINES, "triton", dataclasses.replace(walks.ENGINES["triton"], missing=lambda: "no GPU"))
    assert "nothing to compare: triton: no GPU" in refused(capsys, "parity", "--engines", "triton", "--peers", "none")
    assert "no peer has lion" in refused(capsys, "parity", "--optimizers", "lion", "--engines", "none", "--peers", "torch")
