"""How long the first step of an optimizer takes in a fresh process where nothing has been compiled before.

    python -m lab.cold                                       all optimizers on a CPU, from NumPy and from torch
    python -m lab.cold --device cuda --optimizers AdamW,Muon,SOAP --json results.json
    python -m lab.cold --device cuda --optimizers AdamW --profile

Every row is a process of its own with an empty home, so no cache of a compiler is found. The steps are those of GPT-2's tensors,
of the given width on a CPU. import: of the package, NumPy and torch being there. first, second: seconds of these steps. refresh:
the longest step of those after them, until a matrix rule has renewed its bases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 12  # SOAP's bases are renewed in the eleventh
CHILD = """
import json, sys, time
name, front, device, width, profile = sys.argv[1:6]
import numpy as np
if front == "torch":
    import torch
begin = time.perf_counter()
import rlx_optim
if front == "torch":
    import rlx_optim.torch
from rlx_optim.cli.shapes import shapes_of
imported = time.perf_counter() - begin
generator = np.random.default_rng(0)
small = lambda shape: tuple(min(side, int(width)) for side in shape) if int(width) else shape
arrays = {k: generator.standard_normal(small(s), np.float32) * 0.02 for k, s in shapes_of("gpt2-124m").items()}
if front == "torch":
    params = [torch.nn.Parameter(torch.from_numpy(a).to(device)) for a in arrays.values()]
    if name == "Muon" and device == "cuda":
        params = [p for p in params if p.ndim == 2]
    opt = getattr(rlx_optim.torch, name)(params)
    for p in params:
        p.grad = torch.randn_like(p) * 0.01
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step = opt.step
else:
    opt = getattr(rlx_optim, name)()
    grads = {k: generator.standard_normal(a.shape, np.float32) * 0.01 for k, a in arrays.items()}
    wait = lambda: None
    def step():
        opt.step_all(arrays, grads)
wait()
def timed():
    begin = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - begin
if profile == "1":
    import cProfile, pstats
    for kind in ("first", "second"):
        watch = cProfile.Profile()
        watch.runcall(timed)
        print(f"---- {name}: {kind} step", file=sys.stderr)
        pstats.Stats(watch, stream=sys.stderr).sort_stats("cumulative").print_stats(45)
seconds = [timed() for _ in range(STEPS)]
print(json.dumps({"optimizer": name, "front": front, "import": imported, "first": seconds[0], "second": seconds[1],
                  "refresh": max(seconds[2:])}))
""".replace("STEPS", str(STEPS))


def measure(name: str, front: str, device: str, width: int, profile: bool) -> dict[str, Any]:
    """The times of one fresh process."""
    with tempfile.TemporaryDirectory() as home:
        places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME", "NUMBA_CACHE_DIR"), home)
        command = [sys.executable, "-c", CHILD, name, front, device, str(width), str(int(profile))]
        done = subprocess.run(command, check=False, env={**os.environ, **places}, capture_output=True, text=True)
    if done.returncode:
        return {"optimizer": name, "front": front, "error": done.stderr.strip().splitlines()[-1]}
    if profile:
        print(done.stderr, file=sys.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--optimizers", help="names with commas; all of them otherwise")
    parser.add_argument("--width", type=int, default=None, help="the longest side of a tensor; 16 on a CPU, 0 for GPT-2's own")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    options = parser.parse_args()
    import rlx_optim

    names = (
        options.optimizers.split(",")
        if options.optimizers
        else [
            name
            for name, kind in vars(rlx_optim).items()
            if name in rlx_optim.__all__ and isinstance(kind, type) and issubclass(kind, rlx_optim.NamedOptimizer)
        ]
    )
    width = options.width if options.width is not None else 0 if options.device == "cuda" else 16
    rows = []
    print(f"{'optimizer':18} {'front':6} {'import':>8} {'first':>8} {'second':>8} {'refresh':>8}  seconds")
    for name in names:
        for front in ("torch",) if options.device == "cuda" else ("numpy", "torch"):
            row = measure(name, front, options.device, width, options.profile)
            rows.append(row)
            times = [row.get(kind) for kind in ("import", "first", "second", "refresh")]
            print(
                f"{name:18} {front:6} " + " ".join(f"{'':>8}" if t is None else f"{t:8.3f}" for t in times),
                row.get("error", ""),
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
