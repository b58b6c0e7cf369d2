"""rlx-optim plan: what steps on ranks send, and the documented table."""

import json
from pathlib import Path

import pytest

from rlx_optim.cli import main, plan


def table():
    """The table of docs/distributed.md."""
    counts = (8, 64, 256, 1024)
    lines = ["| model | optimizer | " + " | ".join(f"{n:,} ranks" for n in counts) + " |", "|---" * 6 + "|"]
    for model in ("1b", "8b", "70b"):
        for name in ("muon", "soap", "kronpsgd"):
            rows = [plan.plan_step(model, name, n, 4) for n in counts]
            cells = [f"{plan.show_size(row.sent_most)}, {100 * row.balance:.0f} %" for row in rows]
            lines.append(f"| {model.upper()} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_documented_table_is_what_plan_says():
    assert table() in (Path(__file__).parent.parent / "docs" / "distributed.md").read_text()


def test_plan(capsys, monkeypatch):
    assert main(["plan", "--model", "1b", "--ranks", "8,64", "--optimizer", "adamw,lamb,muon", "--json"]) == 0
    rows = {(row["optimizer"], row["ranks"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["adamw", 8]["sent_most"] == 0
    assert rows["adamw", 8]["all_reduced"] == []
    assert rows["adamw", 8]["state_most"] == 8 * 1_100_048_384 // 8
    assert rows["lamb", 64]["all_reduced"] == [12 + 201, 16 * 201]
    muon = rows["muon", 8]
    hidden = muon["parameters"] - 2 * 32000 * 2048 - 45 * 2048
    assert muon["matrices"] == 154
    assert muon["sent_mean"] == pytest.approx(8 * hidden / 8 * 7 / 8, rel=1e-3)
    assert muon["balance"] > 0.99
    assert rows["muon", 64]["sent_most"] < muon["sent_most"] / 4
    assert (muon["stages"], rows["lamb", 8]["stages"]) == (4, 0)
    assert muon["hidden"] == pytest.approx(0.75, abs=0.02)
    assert rows["adamw", 8]["hidden"] is None
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", "--ranks", "8"]) == 0
    assert "224" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_in_fewer_bits(name):
    """Codes, and a scale for 128 of them; of Muon's matrices on their owners, of AdamW's on the shards."""
    plain, coded = (plan.plan_step("1b", name, 8, 4, form) for form in ("float32", "int8"))
    assert coded.sent_most == plain.sent_most
    assert coded.state_mean / plain.state_mean == pytest.approx((1 + 4 / 128) / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--state-dtype", "float64"],
            "unknown state dtype 'float64'; did you mean 'float32'? Known are float32, bfloat16, int8",
        ),
        (["--model", "2b"], "unknown model '2b'; known are gpt2-124m, llama-1.1b,"),
        (["--ranks", "0"], "--ranks must be whole numbers from 1 to 100000"),
        (["--optimizer", "moun"], "did you mean 'muon'?"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
    ],
)
def test_plan_refuses(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
