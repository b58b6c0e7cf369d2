"""What a step costs in the situations that training meets, as a ratio to torch.optim's fused AdamW in the same run.

    python -m lab.situations                     host time on a CPU: 148 tiny tensors laid out like GPT-2's, and other counts
    python -m lab.situations --device cuda       milliseconds a step of GPT-2 small, on a GPU
    python -m lab.situations --optimizers AdamW,Muon --json results.json
    rlx-optim bench --situations

every: every gradient is there. never: one parameter never has one. comes and goes: one has one in every second step. new:
gradients are new tensors each step. skip: every gradient, with nonfinite="skip", which the peer is timed without. The NumPy API
is measured beside its own steady step, and a single tensor beside torch's fused step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import rlx_optim
import rlx_optim.torch as ours
from rlx_optim.cli.shapes import shapes_of

SITUATIONS = ("every", "never", "comes and goes", "new", "skip")
ROUNDS, STEPS = 15, 6  # rounds in turn, steps a round: an even number, so that both halves of "comes and goes" are in it
SETTINGS: dict[str, dict[str, Any]] = {"int8 AdamW": {"state_dtype": "int8"}}
#: what is measured, by device: an optimizer, and its tensors ("gpt2", or how many of which shape)
CASES: dict[str, tuple[tuple[str, str], ...]] = {
    "cpu": (
        ("AdamW", "gpt2"),
        ("int8 AdamW", "gpt2"),
        ("Muon", "gpt2"),
        ("SOAP", "gpt2"),
        ("AdamW", "2000 of 4×4"),
    ),
    "cuda": (("AdamW", "gpt2"), ("int8 AdamW", "gpt2"), ("Muon", "gpt2"), ("SOAP", "gpt2")),
}
Found = dict[str, dict[str, dict[str, float]]]


def make_params(device: str, tensors: str = "gpt2") -> list[nn.Parameter]:
    """The tensors of a case. GPT-2's are at full size on a GPU, and have 4 elements a side on a CPU, where the arithmetic would
    hide the host."""
    generator = torch.Generator().manual_seed(0)
    if tensors == "gpt2":
        shapes = [shape if device == "cuda" else (4,) * len(shape) for shape in shapes_of("gpt2-124m").values()]
    else:
        count, _, shape = tensors.partition(" of ")
        shapes = [tuple(map(int, shape.split("×")))] * int(count)
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device)) for shape in shapes]


def run_rounds(situation: str, make: Callable[..., Any], params: list[nn.Parameter]) -> Iterator[float]:
    """Give the seconds of a step in one round of steps at each request."""
    opt, on_cuda = make(params), params[0].device.type == "cuda"
    grads = [torch.randn_like(p) * 0.01 for p in params]
    for step in range(1 << 30):
        if step % STEPS == 0:
            seconds = 0.0
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            p.grad = grad.clone() if situation == "new" else grad
            if i == 3 and (situation == "never" or (situation == "comes and goes" and step % 2)):
                p.grad = None
        if on_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        opt.step()
        if on_cuda:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if step % STEPS == STEPS - 1:
            yield seconds / STEPS


def compare(runs: Sequence[Iterator[float]], rounds: int) -> tuple[float, float, float]:
    """The seconds of the fastest rounds of two runs that take turns, and their ratio: other programs only make a step slower."""
    for run in runs:
        next(run), next(run)  # what is compiled, and what is recorded
    collecting = gc.isenabled()
    gc.disable()  # as timeit does
    try:
        times = [[next(run) for run in runs] for _ in range(rounds)]
    finally:
        if collecting:
            gc.enable()
    first, second = map(min, zip(*times, strict=True))
    return first, second, first / second


def measure_torch(name: str, tensors: str, situation: str, device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """One optimizer in one situation, beside torch's fused AdamW: seconds a step of both, and the ratio."""
    kind = getattr(ours, name.rpartition(" ")[2])
    settings = {**SETTINGS.get(name, {}), **({"nonfinite": "skip"} if situation == "skip" else {})}
    makes: tuple[Callable[..., Any], ...] = (
        lambda params: kind(params, lr=1e-3, **settings),
        lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    )
    runs = []
    for make in makes:
        params = [p for p in make_params(device, tensors) if not kind.spec.matrix or p.ndim == 2]
        runs.append(run_rounds(situation, make, params))
    own, peer, ratio = compare(runs, rounds)
    return {"ours": own, "torch fused AdamW": peer, "ratio": ratio}


def run_named(comes_and_goes: bool) -> Iterator[float]:
    """Give the seconds of a step of the NumPy API in one round of steps at each request."""
    generator, opt = np.random.default_rng(0), rlx_optim.AdamW(lr=1e-3)
    params = {name: generator.standard_normal((4,) * len(shape), np.float32) for name, shape in shapes_of("gpt2-124m").items()}
    grads = {name: param * np.float32(0.01) for name, param in params.items()}
    shorter = [{name: each for i, (name, each) in enumerate(side.items()) if i != 3} for side in (params, grads)]
    while True:
        seconds = 0.0
        for step in range(STEPS):
            given = shorter if comes_and_goes and step % 2 else (params, grads)
            start = time.perf_counter()
            opt.step_all(*given)
            seconds += time.perf_counter() - start
        yield seconds / STEPS


def run_single(make: Callable[[], Callable[[], Any]]) -> Iterator[float]:
    """Give the seconds of a step of one small tensor at each request."""
    step = make()
    while True:
        start = time.perf_counter()
        for _ in range(100):
            step()
        yield (time.perf_counter() - start) / 100


def measure_single(rounds: int = ROUNDS) -> dict[str, float]:
    """`step_all` of one array of 1,000, beside torch's fused AdamW on one such tensor."""

    def make_own() -> Callable[[], Any]:
        opt, params = rlx_optim.AdamW(lr=1e-3), {"w": np.ones(1000, np.float32)}
        grads = {"w": np.full(1000, 0.01, np.float32)}
        return lambda: opt.step_all(params, grads)

    def make_peer() -> Callable[[], Any]:
        param = nn.Parameter(torch.ones(1000))
        param.grad = torch.full_like(param, 0.01)
        return torch.optim.AdamW([param], lr=1e-3, fused=True).step

    own, peer, ratio = compare([run_single(make_own), run_single(make_peer)], rounds)
    return {"ours": own, "torch fused AdamW": peer, "ratio": ratio}


def measure_named(rounds: int = ROUNDS) -> dict[str, float]:
    """`step_all` where a name comes and goes, beside the step that has every name."""
    own, steady, ratio = compare([run_named(True), run_named(False)], rounds)
    return {"ours": own, "every name": steady, "ratio": ratio}


def measure(cases: Sequence[tuple[str, str]], device: str) -> Found:
    """By case and situation: ours and the peer in seconds a step, and their ratio."""
    found: Found = {}
    for name, tensors in cases:
        for situation in SITUATIONS:
            found.setdefault(f"{name}, {tensors}", {})[situation] = measure_torch(name, tensors, situation, device)
        print(f"  {name}, {tensors}: done", file=sys.stderr)
    if device == "cpu":
        found["NumPy AdamW, gpt2"] = {"comes and goes": measure_named()}
        found["NumPy AdamW, 1 of 1000"] = {"every": measure_single()}
    return found


def show(found: Found, device: str) -> None:
    """Print a row for each case and situation."""
    unit, factor = ("ms", 1e3) if device == "cuda" else ("µs", 1e6)
    print(f"{'optimizer, tensors':22} {'situation':16} {f'ours, {unit}':>12} {f'peer, {unit}':>12} {'ratio':>8}")
    for case, rows in found.items():
        for situation, row in rows.items():
            own, peer, ratio = row.values()
            print(f"{case:22} {situation:16} {own * factor:12.2f} {peer * factor:12.2f} {ratio:8.2f}")


def run(device: str, file: Path | None = None, optimizers: str = "") -> None:
    """Measure, print, and write the figures to a file if one is given."""
    wanted = [name for name in optimizers.split(",") if name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Muon's about matrices without names
        found = measure([case for case in CASES[device] if not wanted or case[0] in wanted], device)
    show(found, device)
    if file is not None:
        machine = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
        report = {"device": device, "machine": machine, "torch": torch.__version__, "found": found}
        file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(CASES))
    parser.add_argument("--optimizers", default="", help="of those that are measured on the device, comma-separated; all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    run(given.device, given.json, given.optimizers)


if __name__ == "__main__":
    main()
