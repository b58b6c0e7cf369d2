"""Check every optimizer of torch.optim, optax, pytorch_optimizer, timm and of ours, and write benchmarks/conformance.json.

    pip install --no-deps timm==1.0.30
    python -m lab.conformance                                # everything, with the quick checks
    python -m lab.conformance --libraries timm --optimizers lion,muon

What was not asked for stays as it is in the file. The pages' tables are made from it (`docsite/conformance.py`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "benchmarks" / "conformance.json"
#: versions that the published table is made from
PINNED = {"torch": "2.13.0", "optax": "0.2.8", "jax": "0.10.2", "pytorch_optimizer": "4.1.0", "timm": "1.0.30"}
LIMIT = 600  # seconds of the processor for one optimizer
#: torch.optim, timm and ours are taken whole, of the others what many people use: all of them would be hundreds
OPTAX = [
    "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "adan", "amsgrad", "fromage", "lamb", "lars",
    "lion", "nadam", "nadamw", "novograd", "optimistic_adam", "radam", "rmsprop", "rprop", "sgd", "sign_sgd", "sm3", "yogi",
]  # fmt: skip
CONTRIB = ["ademamix", "adopt", "muon", "prodigy", "schedule_free_adamw", "sophia"]
COLLECTED = [
    "AdaBelief", "AdaFactor", "Adai", "AdamMini", "AdamP", "AdamS", "Adan", "AdEMAMix", "ADOPT", "CAME", "FAdam", "Grams", "Kron",
    "Lamb", "LaProp", "LARS", "Lion", "MADGRAD", "MARS", "Muon", "NorMuon", "Prodigy", "QHAdam", "RAdam", "SCION",
    "ScheduleFreeAdamW", "SGDW", "SM3", "SOAP", "SophiaH", "StableAdamW", "Tiger", "Yogi",
]  # fmt: skip


#: where a rate must be given and 0.01, the suite's, is none that anybody gives
SETTINGS = {"rlx_optim.optax:prodigy": {"learning_rate": 1.0}}


def classes(module: Any) -> Iterator[str]:
    """Every class of torch.optim.Optimizer in a module, by its name."""
    import torch

    for name, kind in sorted(vars(module).items()):
        ours = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind.__name__ == name
        if ours and kind is not torch.optim.Optimizer and "Base" not in name:
            yield name


def timm() -> Iterator[str]:
    """timm's optimizers without its models, which would need torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None:
        return
    (folder,) = found.submodule_search_locations or [""]
    for name, path in (("timm", folder), ("timm.optim", f"{folder}/optim")):
        shell: Any = sys.modules.setdefault(name, types.ModuleType(name))
        shell.__path__ = [path]
    for file in sorted(path.stem for path in Path(folder, "optim").glob("[a-z]*.py") if path.stem != "optim_factory"):
        module = importlib.import_module(f"timm.optim.{file}")
        yield from (f"{module.__name__}:{n}" for n in classes(module) if getattr(module, n).__module__ == module.__name__)


def targets(library: str) -> Iterator[str]:
    if library == "timm":
        yield from timm()
    elif library == "torch.optim":
        yield from (f"{library}:{name}" for name in classes(importlib.import_module(library)))
    elif library == "pytorch_optimizer":
        yield from (f"{library}:{name}" for name in COLLECTED)
    elif library == "optax":
        yield from (f"optax:{name}" for name in OPTAX)
        yield from (f"optax.contrib:{name}" for name in CONTRIB)
    elif library == "rlx_optim.torch":
        yield from (f"{library}:{kind.title}" for kind in importlib.import_module("rlx_optim.registry").OURS)
    else:
        front = importlib.import_module("rlx_optim.optax")
        yield from (f"{library}:{front.name_of(kind)}" for kind in importlib.import_module("rlx_optim.registry").OURS)


LIBRARIES = ("torch.optim", "pytorch_optimizer", "timm", "optax", "rlx_optim.torch", "rlx_optim.optax")


class Late(BaseException):
    """Nothing that a check would catch."""


def late(*given: Any) -> None:
    raise Late(f"it took more than {LIMIT} s of the processor")


def row(library: str, target: str) -> dict[str, Any]:
    """What is found of one optimizer; why, where it could not be checked."""
    from rlx_optim.check import check_optimizer

    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        report = check_optimizer(target, SETTINGS.get(target), quick=True)
    except (Exception, Late) as problem:
        lines = (str(problem).strip() or type(problem).__name__).splitlines()
        return {"library": library, "optimizer": target, "unchecked": lines[0][:200]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    results = {each.name: [each.status, each.shown[:60], each.note[:200]] for each in report.results}
    return {"library": library, "optimizer": target, "counts": report.counts(), "results": results}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--libraries", default=",".join(LIBRARIES))
    asked.add_argument("--optimizers", default="", help="only names that contain one of these, comma-separated")
    asked.add_argument("--out", type=Path, default=OUT)
    given = asked.parse_args()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # what compiles its own steps would do so for every shape anew
    import torch

    from rlx_optim.check import CHECKS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, late)
    for name, version in PINNED.items():
        here = importlib.metadata.version(name).partition("+")[0]
        if here != version:
            sys.exit(f"conformance: {name} is {here}, the table is made with {version}")
    before = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    rows = {each["optimizer"]: each for each in before["rows"]}
    words = given.optimizers.lower().split(",")
    for library in given.libraries.split(","):
        for target in targets(library):
            if any(word in target.lower() for word in words):
                rows[target] = row(library, target)
                print(target, rows[target].get("counts") or rows[target]["unchecked"], flush=True)
                place = {name: i for i, name in enumerate(LIBRARIES)}
                asked_of = {
                    c.name: {"reason": c.reason, "taste": c.taste} for c in CHECKS.values() if c.quick and c.kinds != ("rule",)
                }
                known = {**before.get("checks", {}), **asked_of}
                ordered = sorted(rows.values(), key=lambda each: (place[each["library"]], each["optimizer"].lower()))
                told = {"versions": PINNED, "checks": known, "rows": ordered}
                given.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
