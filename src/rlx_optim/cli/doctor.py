"""`rlx-optim doctor`: what is live here, and whether it computes what it should.

    rlx-optim doctor

Every engine steps a few optimizers on a small problem beside the reference. The exit code is 1 if an engine that is installed
fails or gives another result.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from ..check.engines import ENGINES, Speaker, Walk
from ..check.rule_subject import BAR, MATRIX_BAR
from ..check.subject import distance
from ..engines import list_engines
from ..registry import spec_class
from ..spec import Spec
from . import get_machine, say, show_size, show_table, write_json

#: an elementwise rule, one that reduces, one that multiplies matrices; far enough that a unit in the last place does not show
CHECKED: dict[str, dict[str, Any]] = {"adamw": {"lr": 0.01}, "lamb": {"lr": 0.05}, "muon": {}}
STEPS, SHAPES = 4, ((6, 30), (37,))  # small: most of the time goes into imports and compilers


def step_rule(spec: Spec, engine: Speaker) -> list[tuple[np.ndarray, np.ndarray]]:
    """Step small tensors by a rule; return where each begins and ends."""
    rng, shapes = np.random.default_rng(0), [shape for shape in SHAPES if spec.takes(shape) is None]
    start, *gradients = ([np.asarray(0.1 * rng.standard_normal(s), np.float32) for s in shapes] for _ in range(1 + STEPS))
    walk = Walk([spec], engine, start)
    for g in gradients:
        walk.step(g)
    return list(zip(start, walk.found()["p"], strict=True))


def check(name: str) -> dict[str, Any]:
    """Whether an engine is there, what it is, how long the check took and how far it ended from the reference."""
    engine = ENGINES[name]
    told: dict[str, Any] = {"engine": name, "what": engine.what}
    start = time.perf_counter()
    try:
        reason = engine.missing()
        if reason is not None:
            return told | {"status": "not here", "why": reason}
        errors, wrong = {}, []
        for rule, settings in CHECKED.items():
            spec = spec_class(rule)(**settings)
            got, want = (step_rule(spec, ENGINES[each].make()) for each in (name, "reference"))
            errors[rule] = max(distance(a, b, begin) for (_, a), (begin, b) in zip(got, want, strict=True))
            if not errors[rule] <= (MATRIX_BAR if spec.matrix else BAR):
                wrong.append(f"{rule} is off by {errors[rule]:.2g}")
    except Exception as error:  # whatever a broken library raises is what the user wants to read
        return told | {"status": "broken", "why": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    status = {"status": "wrong" if wrong else "live", "why": ", ".join(wrong)}
    return told | status | {"errors": errors, "seconds": time.perf_counter() - start}


def check_offload() -> dict[str, Any]:
    """Whether `offload="cpu"` works, and gives what parameters on the CPU give, bit for bit."""
    if importlib.util.find_spec("torch") is None:
        return {"status": "not here", "why": "torch is not installed"}
    torch, front = importlib.import_module("torch"), importlib.import_module("rlx_optim.torch")
    if not torch.cuda.is_available():
        return {"status": "not here", "why": "torch sees no CUDA device; parameters on the CPU need none"}
    start, grad = (torch.randn((64, 300), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = []
    for device, settings in (("cuda", {"offload": "cpu"}), ("cpu", {})):
        p = torch.nn.Parameter(start.to(device))
        p.grad = grad.to(device)
        opt = front.AdamW([("w", p)], **settings)
        opt.step()
        opt.step()
        found.append((p.detach().cpu(), next(iter(opt.engine_report()))))
    (above, why), (below, _) = found
    if not torch.equal(above, below):
        return {"status": "wrong", "why": f"AdamW is off by {float((above - below).abs().max()):.2g}"}
    return {"status": "live", "why": why}


def examine() -> dict[str, Any]:
    """Everything the doctor looks at. `healthy` is what the exit code says."""
    start = time.perf_counter()
    engines = [check(engine) for engine in ENGINES]
    away = check_offload()
    known, compiled = {"reference", "cpu"}, next(e for e in engines if e["engine"] == "cpu")["status"] == "live"
    return {
        "healthy": all(e["status"] in ("live", "not here") for e in engines) and away["status"] != "wrong",
        "engines": engines,
        "third_party_engines": [name for name in list_engines() if name not in known],
        # that a pass of float32 tensors moves before the cpu engine takes more than one thread for it
        "more_threads_from_bytes": 4 * importlib.import_module("rlx_optim.engines.cpu.runtime").WORTHWHILE if compiled else None,
        "offload": away,
        "machine": get_machine(),
        "seconds": time.perf_counter() - start,
    }


def show(found: dict[str, Any]) -> None:
    m = found["machine"]
    rows = []
    for e in found["engines"]:
        worst = f"{max(e['errors'].values()):.1g}" if "errors" in e else "–"
        seconds = f"{e['seconds']:.2f}" if "seconds" in e else "–"
        why = escape(f": {e['why']}") if e["why"] else ""  # an extra stands in brackets, which rich would take for a style
        rows.append([e["engine"], e["what"] + why, e["status"], worst, seconds])
    show_table(("engine", "what it is", "status", "error", "s"), rows, [e["status"] != "not here" for e in found["engines"]])
    others = ", ".join(found["third_party_engines"])
    say(f"error: the largest of {', '.join(CHECKED)} after {STEPS} steps, as a share of the distance travelled")
    say(f"third-party engines: {others}" if others else "")
    say(f"threads: {m['threads']} of {m['cores']} cores")
    if (least := found["more_threads_from_bytes"]) is not None:
        say(f"more than one thread: for passes that move {show_size(least)} or more")
    away = found["offload"]
    say(f"offload: {away['status']}, {away['why']}")
    say(f"machine: {m['cpu']}, {m['memory_gb']} GB, {m['platform']}")
    say("versions: " + ", ".join(f"{name} {version}" for name, version in m["versions"].items()))
    say(f"{'healthy' if found['healthy'] else 'something is broken'} ({found['seconds']:.1f} s)")


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say which engines are live and why others are not, and check them."""
    found = examine()
    write_json(found) if as_json else show(found)
    raise typer.Exit(int(not found["healthy"]))
