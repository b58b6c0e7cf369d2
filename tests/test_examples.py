"""The programs of examples/ run, each from an empty folder; the sharded one is run on ranks (test_distributed.py)."""

import runpy
from pathlib import Path

import pytest

from rlx_optim import registry

ROOT = Path(__file__).parent.parent
QUICK = {"numpy_digits": (), "own_rule": ()}
NEEDS = {**QUICK, "torch_muon": ("torch",), "lora": ("torch",), "jax_soap": ("jax", "optax")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NEEDS])
def test_it_runs(name, tmp_path, monkeypatch, capsys):
    for library in NEEDS[name]:
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))  # what it registers is gone after it
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


def test_every_example_is_shown():
    page = (ROOT / "docs" / "examples.md").read_text()
    found = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert found == sorted([*NEEDS, "fsdp2_muon"])
    for name in found:
        assert f'--8<-- "examples/{name}.py"' in page
        assert max(map(len, (ROOT / "examples" / f"{name}.py").read_text().splitlines())) <= 88
