"""`rlx-optim convert`: between a file of torch.save and a checkpoint.

    rlx-optim convert a.pt b.safetensors --optimizer adamw --names names.txt
    rlx-optim convert b.safetensors a.pt

No pickle is executed: torch reads with weights_only=True.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from . import Problem, check_output_path, say, write_json

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def command(
    source: Annotated[Path, typer.Argument(help="What to read.")],
    target: Annotated[Path, typer.Argument(help="What to write; its ending says which way.")],
    optimizer: Annotated[str | None, typer.Option(help="Which optimizer it is of, where the file does not show.")] = None,
    names: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Parameter names, one a line, where the file has none.")
    ] = None,
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Take a state that holds NaN.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn an optimizer's state dict, as torch.save writes it, into a checkpoint, or a checkpoint into a state dict."""
    if importlib.util.find_spec("torch") is None:
        raise Problem('convert needs torch: pip install "rlx-optim[torch]"')
    check_output_path("target", target, SUFFIXES)
    if (source.suffix == SUFFIXES[0]) == (target.suffix == SUFFIXES[0]):
        raise Problem(f"one of {source} and {target} must end in {SUFFIXES[0]}, and the other not")
    try:
        lines = [] if names is None else names.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as problem:
        raise Problem(f"--names: {names}: {getattr(problem, 'strerror', None) or problem}") from None
    listed = None if names is None else [line.strip() for line in lines if line.strip()]
    from ..torch.foreign import convert

    snapshot = convert(source, target, optimizer, listed, allow_nan)
    rules, count = [member.optimizer for member in snapshot.members], len(snapshot.parameters)
    if as_json:
        write_json({"file": str(target), "optimizers": rules, "parameters": count, "steps": snapshot.iteration})
    else:
        say(f"{target}: {', '.join(rules)}, {count:,} parameters, {snapshot.iteration:,} steps")
