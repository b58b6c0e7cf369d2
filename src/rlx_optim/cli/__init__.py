"""The command line, `rlx-optim`. A command is a file of this folder with a function `command`, named in COMMANDS. Those of LAB
are files of the repository's `lab/`, which is in a checkout and not in an installed package.

A command's file is imported when the command runs, and nothing heavy before. What the user did wrong is a `Problem`: one line on
stderr, folded for a terminal. Exit codes: 0 done; 1 done, and what was asked for does not hold; 2 refused, or the output cannot
be written; 130 interrupted; 141 nobody reads on.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

from ..checkpoint.format import CheckpointError
from ..registry import nearest
from ..threads import available, get_threads

try:
    import rich  # noqa: F401
    import typer
    import typer.core
except ImportError:  # the extra "cli" is not installed
    typer = None  # type: ignore[assignment]

#: name -> the first line of its help, so that no command is imported to list them all
COMMANDS = {
    "race": "Train one model with every optimizer and write a report that opens in a browser.",
    "list": "List the optimizers.",
    "info": "Explain one optimizer: idea, formulas, defaults, when to use it, what it costs.",
    "memory": "Count the bytes of state that an optimizer needs for a model.",
    "check": "Check any optimizer: a torch class, an optax factory, a rule on every engine here.",
    "doctor": "Say which engines are live and why others are not, and check them.",
    "inspect": "Show what is in a checkpoint and verify it, or say what differs between two.",
    "convert": "Turn an optimizer's state dict, as torch.save writes it, into a checkpoint, or a checkpoint into a state dict.",
    "plan": "Say what a step sends and how evenly its work is shared out, for a model sharded over many ranks.",
}
LAB = {
    "bench": "Time our steps and those of every installed peer, interleaved, beside a memory copy.",
    "parity": "Compare every optimizer on every installed engine with the reference, and with its peers.",
    "landscape": "Draw the optimizers' paths on Rosenbrock, Beale and Rastrigin as one page.",
    "lm-race": "Train a language model with every optimizer, in one go or by a plan that goes on where it stopped.",
}
#: where a file of the command's name would hide a built-in of this package, or cannot be
FILES = {"list": "listing", "lm-race": "races.command"}
NAMES = "Names, comma-separated, or all."  # of every command that takes several
SAME = {"optimizer": "optimizers", "shapes": "model"}  # other names of options
HELP = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda word: SAME.get(word, word)}
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 and the number of the signal
VERSIONED = ("numpy", "scipy", "llvmlite", "torch", "jax", "jaxlib", "optax", "pytorch_optimizer")


class Problem(Exception):
    """What the user can mend."""


# ---- what the commands share ------------------------------------------------------------------------------------------
def unknown_name(kind: str, name: str, known: Sequence[str]) -> Problem:
    """The message about a name that nobody knows."""
    near = nearest(name, known)
    asked = f"did you mean {near!r}? Known" if near else "known"
    return Problem(f"unknown {kind} {name!r}; {asked} are {', '.join(known)}")


def choose(kind: str, text: str, known: Sequence[str], aliases: Mapping[str, str] | None = None) -> list[str]:
    """A comma-separated list of names, in its order, or "all"."""
    asked = [(aliases or {}).get(name, name) for name in (part.strip().lower() for part in text.split(","))]
    if asked == ["all"]:
        return list(known)
    for name in asked:
        if name not in known:
            raise unknown_name(kind, name, known)
    return list(dict.fromkeys(asked))


def choose_one(kind: str, name: str, known: Sequence[str], aliases: Mapping[str, str] | None = None) -> str:
    """A name, spelled as `known` spells it."""
    found = name.strip().lower()
    found = (aliases or {}).get(found, found)
    if found not in known:
        raise unknown_name(kind, name, known)
    return found


def check_output_path(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse a file that could not be written, before any work is done for it. "-" is stdout, for JSON alone."""
    if path is None or (str(path) == "-" and ".json" in suffixes):
        return
    if path.suffix not in suffixes:
        raise Problem(f"{option}: {path} must end in {' or '.join(suffixes)}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Problem(f"{option}: cannot write {path}")


def write_json(data: Any, path: Path | None = None) -> None:
    """Print data as JSON, or write it to a file; "-" is stdout."""
    if path is None or str(path) == "-":
        print(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=not _is_unicode()))
    else:
        path.write_text(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def get_machine() -> dict[str, Any]:
    """Where a measurement was made: processor, GPU where torch has found one, threads, memory, versions, date."""
    torch = sys.modules.get("torch")
    return {
        "cpu": _processor(),
        **({"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}),
        "cores": available(),
        "threads": get_threads(),
        "memory_gb": round(physical_memory() / 1e9, 1),
        "load_average": round(load_average(), 2),
        "platform": platform.platform(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "rlx_optim": _own_version()} | _versions(VERSIONED),
    }


def physical_memory() -> int:
    """Bytes of physical memory; 0 where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def load_average() -> float:
    """Of the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _own_version() -> str:
    version: str = sys.modules[__name__.partition(".")[0]].__version__
    return version


@contextlib.contextmanager
def show_progress(total: int, begun: int = -1) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr, and give the function that moves it: by one when the next thing begins, unless `advance` is another
    number. note: what is said behind the bar. begun: where it starts; -1, because what begins is not done yet."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=begun, note="")

        def tick(name: str | None = None, advance: float = 1, note: str | None = None) -> None:
            fields: dict[str, Any] = {} if note is None else {"note": note}
            bar.update(task, description=name, advance=advance, **fields)

        yield tick


def get_width(stream: TextIO | None = None) -> int:
    """Return the columns of the terminal behind a stream, stdout by default; COLUMNS overrides it, and 80 stands for none."""
    columns = os.environ.get("COLUMNS", "")
    if stream is not None and not (columns.isdecimal() and int(columns)):
        with contextlib.suppress(OSError, ValueError):  # no terminal, no file
            return os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size().columns


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines, folded where they are too long; what is folded stands under its line's own text."""
    for line in text.splitlines():
        margin = " " * (len(line) - len(line.lstrip()) + (4 if line.startswith(" ") else 2))
        folded = textwrap.wrap(line, get_width(stream), subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
        print("\n".join(folded), file=stream or sys.stdout)


def complain(text: str) -> None:
    """Print an error on stderr: folded for a terminal, or where COLUMNS is set; one line for a program that reads it."""
    line = " ".join(f"rlx-optim: {text}".split())
    try:
        if sys.stderr.isatty() or os.environ.get("COLUMNS"):
            say(line, sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)
    except OSError:  # nobody can be told, and the exit code says it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def show_size(count: float) -> str:
    """Bytes with three digits, in units of 1000, here and everywhere."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:#.3g}".rstrip(".") + f" {unit}"
        count /= 1000
    return f"{count:,.0f} TB" if count >= 100 else f"{count:#.3g} TB"


def show_digits(value: float | None, unit: str = "") -> str:
    """Three digits that count, or a dash."""
    if value is None:
        return "–"
    return (f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")) + unit


def show_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], bold: Sequence[bool], spare: Sequence[int] = (), texts: int = 2
) -> None:
    """Print a table: first columns of text, which fold, then of numbers, which do not; some rows bold. Where it is too wide,
    heads are folded, then the spare columns are left out one by one, then text is folded."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Column, Table

    console = Console(width=get_width())

    def table(folded: bool, kept: Sequence[int]) -> Table:
        def column(i: int) -> Column:
            if i < texts:
                return Column(head[i], overflow="fold", min_width=max(map(len, head[i].split())))
            heads = head[i].split() if folded else [head[i]]
            return Column(head[i], justify="right", width=max(map(len, (*heads, *(row[i] for row in rows)))))

        made = Table(*map(column, kept))
        for row, strong in zip(rows, bold, strict=True):
            made.add_row(*(row[i] for i in kept), style="bold" if strong else "")
        return made

    ways = [(0, False), *((count, True) for count in range(len(spare) + 1))]
    for count, folded in ways:
        found = table(folded, [i for i in range(len(head)) if i not in spare[:count]])
        if Measurement.get(console, console.options.update(width=100_000), found).maximum <= console.width:
            break
    console.print(found)
    if count:
        say(f"Left out at {console.width} columns: {', '.join(head[i] for i in spare[:count])}. --json has everything.")


# ---- the repository's lab -----------------------------------------------------------------------------------------------
def find_checkout() -> Path | None:
    """The repository that this package is in, or else the one that the process was started in."""
    roots = [Path(__file__).parents[3]]
    with contextlib.suppress(OSError):  # a folder that has been removed
        roots.append(Path.cwd())
    return next((r for r in roots if (r / "lab" / "__init__.py").exists() and (r / "src" / "rlx_optim").is_dir()), None)


def load_command(name: str) -> Any:
    """Import the module of a command."""
    file = FILES.get(name, name)
    return importlib.import_module(f".{file}", __name__) if name in COMMANDS else load_lab(name, file)


def load_lab(what: str, module: str) -> Any:
    """Import a module of the repository's lab. what: the command or option that needs it."""
    root = find_checkout()
    if root is None:
        raise Problem(
            f"{what} is in the repository's lab/, which is not part of the installed package; run it in a checkout: "
            "clone the repository that `pip show -v rlx-optim` names, then pip install --editable '.[all]' there"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module(f"lab.{module}")


# ---- the program ------------------------------------------------------------------------------------------------------
def _find_examples(text: str) -> str:
    """The lines of a command's docstring that call it, for the end of its help."""
    lines = [line.strip() for line in text.splitlines()]
    return "\n\n".join(["Examples:", *(line for line in lines if line.startswith("rlx-optim "))])


def _strip_metavars(options: list[Any]) -> list[Any]:
    """Options in whose help flags have no "<bool>" beside them."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


def _make_application() -> Any:
    class Bare(typer.core.TyperCommand):
        def get_params(self, context: Any) -> list[Any]:
            return _strip_metavars(super().get_params(context))

    class Lazy(typer.core.TyperGroup):
        """Lists commands by COMMANDS alone, and imports the one that runs."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            for name, text in (COMMANDS | (LAB if find_checkout() else {})).items():
                self.add_command(typer.core.TyperCommand(name, help=text))

        def get_params(self, context: Any) -> list[Any]:
            return _strip_metavars(super().get_params(context))

        def resolve_command(self, context: Any, arguments: list[str]) -> Any:
            name: str | None = arguments[0]
            rest = arguments[1:]
            if name not in LAB:
                name, _, rest = super().resolve_command(context, arguments)
            assert name is not None
            module = load_command(name)
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(name, cls=Bare, context_settings=HELP, epilog=_find_examples(module.__doc__ or ""))(module.command)
            return name, typer.main.get_command(alone), rest

    made = typer.Typer(name="rlx-optim", cls=Lazy, pretty_exceptions_enable=False, context_settings=HELP)

    @made.callback(invoke_without_command=True)
    def start(
        context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False
    ) -> None:
        """Training-step optimizers: race them, measure them, look inside."""
        if version:
            print(f"rlx-optim {_own_version()}")
        elif context.invoked_subcommand is None:
            print(context.get_help())

    return made


app = None if typer is None else _make_application()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code."""
    try:
        _tame_output()
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as problem:
        if not isinstance(problem, BrokenPipeError):
            where = problem.filename or "the output cannot be written"
            complain(f"{where}: {problem.strerror or problem}")
        with contextlib.suppress(OSError):  # so that nothing is left to fail when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED if isinstance(problem, BrokenPipeError) else 2
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code


def _run(argv: Sequence[str] | None) -> int:
    if app is None:
        complain('the command line needs typer and rich: pip install "rlx-optim[cli]"')
        return 2
    usage_error: Any = typer.BadParameter.__mro__[2]  # ClickException, which typer has from click or brings itself
    try:
        return app(args=argv, prog_name="rlx-optim", standalone_mode=False) or 0
    except (Problem, CheckpointError) as problem:
        complain(str(problem))
        return 2
    except usage_error as problem:
        complain(add_value(problem, sys.argv[1:] if argv is None else argv))
        return 2
    except typer.Abort:
        return INTERRUPTED
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # typer and rich would end with 1
            raise ending.__context__ from None
        raise


def add_value(error: Any, argv: Sequence[str]) -> str:
    """Return what a usage error says, with the value that was given for its option."""
    said: str = error.format_message()
    names = getattr(getattr(error, "param", None), "opts", ())
    given = [after for word, after in itertools.pairwise(argv) if word in names]
    given += [word.partition("=")[2] for word in argv if word.partition("=")[0] in names and "=" in word]
    return said if not given or given[-1] in said else f"{said}, got {given[-1]!r}"


def _tame_output() -> None:
    """Where stdout is closed, print into the void; where it has not all our characters, print "?" for those."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if not _is_unicode():
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def _is_unicode() -> bool:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a string that a program collects has none
    return encoding.lower().replace("-", "") == "utf8"
