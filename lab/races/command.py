"""`rlx-optim lm-race`: every optimizer trains the same language model, in one go or by a plan, and a page shows how they did.

rlx-optim lm-race --model char-gpt --optimizers adamw,muon,soap --steps 500 --tune --out my-race
rlx-optim lm-race --model gpt --device cuda --plan race --minutes 9 --out evidence
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from rlx_optim import list_optimizers
from rlx_optim.cli import NAMES, Problem, choose, choose_one, get_machine
from rlx_optim.cli.race import OUT, SEEDS, STEPS, TUNE, command_line, conclude, new_folder, train
from rlx_optim.race import Model
from rlx_optim.race.running import Race
from rlx_optim.registry import aliases

from . import plan as planned
from . import records
from .rates import SETTINGS

#: name -> the module that has it as GPT
MODELS = {"char-gpt": "char_gpt", "gpt": "gpt"}


def get_model(name: str) -> Model:
    found: Model = importlib.import_module(f".{MODELS[name]}", __package__).GPT
    return found


def cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def known_runs(given: list[Path]) -> list[Path]:
    """Files of earlier runs: those given, and those of folders given."""
    for path in given:
        if not path.exists():
            raise Problem(f"--known: no file or folder {path}")
    return [file for path in given for file in ([path] if path.is_file() else sorted(path.rglob("*.jsonl")))]


def pursue(race: Race, folder: Path, known: list[Path], stop: planned.Deadline, shared: bool) -> int:
    """Run what is missing of a plan, a line for each finished run; the exit code."""
    where = get_machine()
    pool = records.Pool(race.model, race.engine, folder / records.RUNS, known, shared)
    began, code, race.interrupted = len(pool.records), 0, True
    print(f"{began} runs known", flush=True)
    try:
        race.interrupted = not planned.go(
            pool, race.plan or "", race.optimizers, race.steps, stop, {key: where[key] for key in ("cpu", "versions")},
            lambda words: print(words, flush=True),
        )  # fmt: skip
    except KeyboardInterrupt:
        code = 130
    print(f"{len(pool.records) - began} runs made; {'more to do' if race.interrupted else 'the plan is done'}", flush=True)
    race.entries += planned.entries(pool, race.optimizers, race.steps)
    return code


def command(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.", autocompletion=lambda: list(MODELS))] = "char-gpt",
    optimizers: Annotated[str, typer.Option(help=NAMES, autocompletion=list_optimizers)] = "all",
    steps: Annotated[int | None, typer.Option(min=1, help=STEPS)] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help=SEEDS)] = None,
    engine: Annotated[str, typer.Option(help="auto, cpu, torch or triton.")] = "auto",
    tune: Annotated[bool, typer.Option("--tune", help=TUNE)] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT)] = None,
    plan: Annotated[
        str | None,
        typer.Option(help=f"{' or '.join(planned.PLANS)}: runs in the order of their worth, resumed where they stand."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Of a plan: begin nothing that would end later.")] = None,
    known: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Of a plan: earlier runs, a file or a folder of *.jsonl.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Of a plan: others use the device too; losses count, seconds do not.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; for gpt cuda by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Train a language model with every optimizer, in one go or by a plan that goes on where it stopped."""
    chosen = choose("optimizer", optimizers, list_optimizers(), aliases())
    name = choose_one("model", model, list(MODELS))
    if importlib.util.find_spec("torch") is None:
        raise Problem(f'model {name} needs torch: pip install "rlx-optim[torch]"; the models of rlx-optim race do not')
    stop = planned.Deadline(None if minutes is None else 60 * minutes)
    raced = get_model(name)
    raced.device = raced.device if device is None else choose_one("device", device, raced.devices)
    if raced.device == "cuda" and not cuda_is_there():
        raise Problem(f"model {name} is for a GPU, and torch finds none; --device cpu runs it all the same, slowly")
    where = choose_one("engine", engine, raced.engines)
    followed = choose_one("plan", plan, list(planned.PLANS)) if plan is not None else "race" if tune and name == "gpt" else None
    if followed is None and (minutes is not None or known or shared):
        raise Problem(f"--minutes, --known and --shared are for a plan: add --plan, one of {', '.join(planned.PLANS)}")
    steps, seeds = steps or raced.steps, seeds or raced.seeds
    race = Race(raced, chosen, steps, seeds, where, tune or bool(followed), followed, settings=SETTINGS)
    files = known_runs(known or [])
    folder, code = new_folder(out, records.RUNS if followed else None), 130
    if followed is not None:
        code = pursue(race, folder, files, stop, shared)
    else:
        train(race)
    conclude(race, folder, command_line(race, "lm-race"), as_json, code)
