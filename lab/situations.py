"""What a step costs in the situations that training meets, as a ratio to torch.optim's fused AdamW in the same run.

    python -m lab.situations                     host time of 148 tiny tensors, laid out like GPT-2's, on a CPU
    python -m lab.situations --device cuda       milliseconds a step of GPT-2 small, on a GPU
    python -m lab.situations --optimizers AdamW,Muon --json results.json

every: every gradient is there. never: one parameter never has one. comes and goes: one has one in every second step. new:
gradients are new tensors each step. skip: every gradient, with nonfinite="skip", which the peer is timed without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import rlx_optim.torch as ours
from rlx_optim.cli.shapes import shapes_of

SITUATIONS = ("every", "never", "comes and goes", "new", "skip")
ROUNDS, STEPS = 7, 6  # rounds in turn, steps a round: an even number, so that both halves of "comes and goes" are in it
SETTINGS: dict[str, dict[str, Any]] = {"int8 AdamW": {"state_dtype": "int8"}}


def make_params(device: str) -> list[nn.Parameter]:
    """GPT-2's tensors: at full size on a GPU, at 4 elements a side on a CPU, where the arithmetic would hide the host."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape if device == "cuda" else (4,) * len(shape) for shape in shapes_of("gpt2-124m").values()]
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device)) for shape in shapes]


def prepare(situation: str, make: Callable[..., Any], device: str, matrices: bool) -> Iterator[float]:
    """Gives the seconds of one round of steps at each request."""
    params = [p for p in make_params(device) if not matrices or p.ndim == 2]
    opt = make(params, situation)
    grads = [torch.randn_like(p) * 0.01 for p in params]
    for step in range(1 << 30):
        if step % STEPS == 0:
            seconds = 0.0
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            p.grad = grad.clone() if situation == "new" else grad
            if i == 3 and (situation == "never" or (situation == "comes and goes" and step % 2)):
                p.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        opt.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if step % STEPS == STEPS - 1:
            yield seconds / STEPS


def measure(names: list[str], device: str) -> dict[str, dict[str, dict[str, float]]]:
    """By optimizer and situation: ours and the peer in seconds a step (the median over rounds taken in turn), and their ratio."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        kind = getattr(ours, name.rpartition(" ")[2])
        for situation in SITUATIONS:

            def make(params: list[nn.Parameter], situation: str, kind: Any = kind, name: str = name) -> torch.optim.Optimizer:
                beside = {"nonfinite": "skip"} if situation == "skip" else {}
                return kind(params, lr=1e-3, **SETTINGS.get(name, {}), **beside)

            def peer(params: list[nn.Parameter], _: str) -> torch.optim.Optimizer:
                return torch.optim.AdamW(params, lr=1e-3, fused=True)

            matrices = kind.spec.matrix
            runs = [prepare(situation, each, device, matrices) for each in (make, peer)]
            for run in runs:
                next(run), next(run)  # what is compiled, and what is recorded
            times = [[next(run) for run in runs] for _ in range(ROUNDS)]
            mine, theirs = (statistics.median(column) for column in zip(*times, strict=True))
            found.setdefault(name, {})[situation] = {"ours": mine, "torch fused AdamW": theirs, "ratio": mine / theirs}
            print(f"  {name}, {situation}: done", file=sys.stderr)
    return found


def show(found: dict[str, dict[str, dict[str, float]]], device: str) -> None:
    """A table: a row for each optimizer and situation."""
    unit, factor = ("ms", 1e3) if device == "cuda" else ("µs", 1e6)
    print(f"{'optimizer':12} {'situation':16} {f'ours, {unit}':>12} {f'torch, {unit}':>12} {'ratio':>8}")
    for name, rows in found.items():
        for situation, row in rows.items():
            mine, theirs = row["ours"] * factor, row["torch fused AdamW"] * factor
            print(f"{name:12} {situation:16} {mine:12.2f} {theirs:12.2f} {row['ratio']:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--optimizers", default="AdamW,int8 AdamW,Muon,SOAP")
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # Muon's about matrices without names
    found = measure(given.optimizers.split(","), given.device)
    show(found, given.device)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"device": given.device, "torch": torch.__version__, "found": found}, file, indent=1)


if __name__ == "__main__":
    main()
