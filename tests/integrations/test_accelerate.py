"""Hugging Face accelerate: train, save_state, load_state into new objects, go on: bit for bit as without the break."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rlx_optim.torch import AdamW, Muon, ScheduleFreeAdamW

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


def prepared(cls):
    """Accelerator, model, optimizer, data and scheduler, all new."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(24, 6)
    data = DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=4)
    optimizer = cls(model, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1)
    return accelerator, *accelerator.prepare(model, optimizer, data, scheduler)


def train(run, batches):
    accelerator, model, optimizer, _, scheduler = run
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).pow(2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_schedule_free(mode, tmp_path):
    """The prepared optimizer hands eval and train on; save_state keeps both points in either mode."""
    whole = prepared(ScheduleFreeAdamW)
    batches = list(whole[3])
    train(whole, batches[:3])
    optimizer = whole[2]
    y = [p.detach().clone() for p in whole[1].parameters()]
    optimizer.eval()
    assert not all(map(torch.equal, whole[1].parameters(), y))
    getattr(optimizer, mode)()
    whole[0].save_state(str(tmp_path))
    second = prepared(ScheduleFreeAdamW)
    second[0].load_state(str(tmp_path))
    for run in (whole, second):
        run[2].train()
        assert all(map(torch.equal, run[1].parameters(), y))
        train(run, batches[3:])
    assert all(map(torch.equal, whole[1].parameters(), second[1].parameters()))


@pytest.mark.parametrize("cls", [AdamW, Muon])
def test_resume_is_bitwise(cls, tmp_path):
    whole = prepared(cls)
    batches = list(whole[3])
    start = [p.detach().clone() for p in whole[1].parameters()]
    train(whole, batches)

    first = prepared(cls)
    train(first, batches[:3])
    first[0].save_state(str(tmp_path))
    second = prepared(cls)
    with torch.no_grad():
        for p in second[1].parameters():
            p.zero_()
    second[0].load_state(str(tmp_path))
    train(second, batches[3:])

    assert isinstance(second[2].optimizer, cls)
    assert [g["lr"] for g in second[2].param_groups] == [g["lr"] for g in whole[2].param_groups]
    for p, q, s in zip(whole[1].parameters(), second[1].parameters(), start, strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, s)


def run_ranks(*args):
    """Both ranks of fsdp2_ranks.py, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("fsdp2_ranks.py")
    around = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, script, *args],
            env={**os.environ, **{k: str(v) for k, v in {**around, "RANK": rank, "LOCAL_RANK": rank}.items()}},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(each.endswith("done\n") for each in said), said[0] + said[1]


def test_fsdp2(tmp_path):
    """`prepare` shards the model and replaces the parameters in the groups: train, save, and resume in new processes, bit for bit."""
    run_ranks("start", str(tmp_path))
    run_ranks("resume", str(tmp_path))
