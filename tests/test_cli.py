"""The command line: list, info, memory, doctor, what all commands share, and how fast it starts."""

import contextlib
import dataclasses
import inspect
import io
import json
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers import make

import rlx_optim
from rlx_optim.registry import spec_class

pytest.importorskip("typer")
from lab import walks
from rlx_optim import cli
from rlx_optim.check import engines
from rlx_optim.cli import doctor, info, listing, memory

NAMES = rlx_optim.list_optimizers()
ALL = cli.COMMANDS | cli.LAB


def run(*argv):
    return cli.main(list(map(str, argv)))


def printed(capsys, *argv, code=0):
    """The JSON that a command prints."""
    assert run(*argv, "--json") == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *argv):
    """What is said about a wrong command line, in one line."""
    assert run(*argv) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert not said.out
    return said.err


def started(*argv, **environment):
    return subprocess.run(
        [sys.executable, "-m", "rlx_optim.cli", *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


# ---- all commands -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_a_command_says_what_the_table_says(name):
    assert inspect.getdoc(cli.load_command(name).command).splitlines()[0] == ALL[name]


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_help_and_json(name, capsys):
    assert run(name, "--help") == 0
    said = capsys.readouterr().out
    assert "--json" in said
    assert f"rlx-optim {name}" in said.partition("Examples:")[2]
    assert "bool" not in said.lower()  # a flag takes no value


def test_help_lists_the_commands_and_imports_none_of_them():
    code = (
        "import sys, rlx_optim.cli as cli; cli.main(['--help']);"
        "print(sorted(m for m in sys.modules if m.startswith('rlx_optim.cli.') or m.partition('.')[0] in"
        " {'lab', 'llvmlite', 'torch', 'jax', 'optax', 'scipy', 'matplotlib', 'pytorch_optimizer'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ALL)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_can_be_run():
    done = subprocess.run([sys.executable, "-m", "rlx_optim", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == rlx_optim.__version__


def test_help_is_quick():
    """Nothing is imported for it that takes long."""
    code = "import atexit, runpy, sys; sys.argv = ['rlx-optim', '--help']; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    code += "runpy.run_module('rlx_optim.cli', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded = set(done.stderr.split())
    assert "doctor" in done.stdout
    assert "rlx_optim.cli" in loaded
    assert not loaded & {"llvmlite", "scipy", "torch", "jax", "optax", "matplotlib", "lab", "rlx_optim.engines.cpu"}


#: a letter changed, left out or added, two exchanged, something behind it
SLIPS = {
    "adanw": "adamw",
    "sopa": "soap",
    "loin": "lion",
    "admaw": "adamw",
    "radm": "radam",
    "adamw8bit": "adamw",
    "nada": "nadamw",
}


def test_a_name_almost_right_is_suggested(capsys):
    assert "Did you mean 'doctor'?" in refused(capsys, "docter")
    assert "did you mean 'muon'?" in refused(capsys, "info", "moun")
    for word, meant in SLIPS.items():
        assert f"unknown optimizer {word!r}; did you mean {meant!r}? Known are" in refused(capsys, "info", word)
    assert "did you mean 'gpt2-124m'?" in refused(capsys, "memory", "--shapes", "gpt2-124")
    assert "did you mean 'torch'?" in refused(capsys, "parity", "--peers", "troch")
    assert "did you mean 'cpu'?" in refused(capsys, "parity", "--engines", "cpuu")
    assert "--jsn" in refused(capsys, "list", "--jsn")


def test_completion_of_commands_options_and_names():
    def completed(*words):
        asked = {
            "COMP_WORDS": " ".join(["rlx-optim", *words]),
            "COMP_CWORD": str(len(words)),
            "_RLX_OPTIM_COMPLETE": "complete_bash",
        }
        return started(**asked).stdout.split()

    assert completed("in") == ["info", "inspect"]
    assert completed("race", "--se") == ["--seeds"]
    assert completed("info", "ada") == ["adam", "adamw", "adan", "adafactor"]


def test_completion_can_be_shown_and_installed(tmp_path):
    shell = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    assert "_RLX_OPTIM_COMPLETE=complete_bash" in started("--show-completion", "bash", **shell).stdout
    done = started("--install-completion", "bash", **shell)
    assert done.returncode == 0, done.stderr
    assert "rlx-optim" in (tmp_path / ".bashrc").read_text()


def test_short_help_and_both_names_of_an_option(capsys):
    for argv in (("-h",), ("memory", "-h"), ("bench", "-h")):
        assert run(*argv) == 0
        assert "Usage" in capsys.readouterr().out
    for command in ("memory", "plan"):
        one, other = (printed(capsys, command, option, "soap,adamw") for option in ("--optimizer", "--optimizers"))
        assert one == other
    assert list(one) == list(other)
    assert [row["optimizer"] for row in one] == ["soap", "adamw"]  # in the order asked for
    assert printed(capsys, "memory", "--model", "two-blocks") == printed(capsys, "memory", "--shapes", "two-blocks")
    (short,), (long,) = (printed(capsys, "plan", "--model", model) for model in ("1b", "llama-1.1b"))
    assert {**short, "model": long["model"]} == long
    for model in ("gpt2-124m", "llama-8b", "70b"):  # every model by every command
        (planned,), counted = (
            printed(capsys, command, "--model", model, "--optimizers", "adamw") for command in ("plan", "memory")
        )
        assert planned["parameters"] == counted["parameters"]


def test_inspect_of_a_file_of_torch(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(1)}, tmp_path / "theirs.pt")
    assert "theirs.pt is a torch.save file; make a checkpoint of it: rlx-optim convert" in refused(
        capsys, "inspect", tmp_path / "theirs.pt"
    )


@pytest.mark.parametrize("name", ALL)
def test_help_fits_80_columns_and_no_option_is_cut(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(name, "--help") == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert not [line for line in said.splitlines() if line.startswith("│ --") and "…" in line]


LONG = [
    ("info", "lio"),
    ("memory", "--optimizers", "adanw"),
    ("parity", "--optimizers", "sopa"),
    ("check", "lio"),
    ("check",),
    ("race", "--model", "nobody"),
    ("bench", "--model", "none", "--optimizers", "adamw"),
    ("inspect", "/nowhere/a folder of checkpoints that somebody moved away/checkpoint-000100.safetensors"),
    ("convert", "a", "b"),
    ("nobody",),
    ("list", "--nothing"),
]


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("argv", LONG, ids=lambda argv: argv[0])
def test_errors_are_folded_between_words(argv, columns, capsys, monkeypatch):
    """COLUMNS is the terminal's width; without a terminal an error is one line."""
    monkeypatch.delenv("COLUMNS", raising=False)
    line = refused(capsys, *argv)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(*argv) == 2
    said = capsys.readouterr().err
    assert said.split() == line.split()
    assert all(len(each) <= columns or " " not in each.strip() for each in said.splitlines())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals")
def test_errors_are_folded_for_the_terminal_that_stderr_is(tmp_path):
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    argv = [sys.executable, "-m", "rlx_optim.cli", "info", "lio"]
    with (tmp_path / "out").open("w") as out:
        assert subprocess.run(argv, stdout=out, stderr=theirs, env=environment, check=False).returncode == 2
    os.close(theirs)
    said = os.read(ours, 10_000).decode().splitlines()
    os.close(ours)
    assert len(said) > 4
    assert max(map(len, said)) <= 50
    assert "unknown optimizer 'lio'; did you mean 'lion'? Known are" in " ".join(" ".join(said).split())
    assert " ".join(said).split()[-1] == NAMES[-1]


def test_headings_are_folded(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for argv in (("parity", "--optimizers", "sgd", "--engines", "cpu", "--peers", "none"), ("check", "--list")):
        assert run(*argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 40


@pytest.mark.parametrize("name", cli.LAB)
def test_a_command_of_the_lab_without_a_checkout(name, capsys, monkeypatch):
    monkeypatch.setattr(cli, "find_checkout", lambda: None)
    assert f"{name} is in the repository's lab/, which is not part of the installed package" in refused(capsys, name)


def test_an_installed_package_finds_the_lab_of_the_checkout_it_is_started_in(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "rlx_optim" / "cli" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.find_checkout() is None
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("")
    assert cli.find_checkout() is None  # anybody's folder of that name
    (tmp_path / "src" / "rlx_optim").mkdir(parents=True)
    assert cli.find_checkout() == tmp_path


def test_an_installed_package_in_a_folder_that_has_been_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "rlx_optim" / "cli" / "__init__.py"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.find_checkout() is None
    assert run("list") == 0
    capsys.readouterr()
    assert "No module named 'nowhere'" in refused(capsys, "check", "nowhere:Rule")


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"rlx-optim {rlx_optim.__version__}\n"


def test_ctrl_c_is_130_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run("doctor") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_the_package_is_imported():
    """As the installed program starts; the interrupt comes with one of its first modules."""
    code = """
        import sys
        class Interrupt:
            def find_spec(self, name, *rest):
                if name == "rlx_optim.numpy.classes": raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupt())
        from rlx_optim_cli import main
        sys.exit(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_program_is_the_command_line(capsys, monkeypatch):
    import rlx_optim_cli

    monkeypatch.setattr(sys, "argv", ["rlx-optim", "--version"])
    assert rlx_optim_cli.main() == 0
    assert capsys.readouterr().out == f"rlx-optim {rlx_optim.__version__}\n"


def test_what_check_lacks_is_named_with_its_extra(capsys, monkeypatch):
    from rlx_optim.cli import check

    def absent(target):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(check, "load_target", absent)
    assert 'torch is not installed: pip install "rlx-optim[torch]"' in refused(capsys, "check", "torch.optim:AdamW")


# ---- stdout ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv", [("list",), ("info", "muon"), ("list", "--json"), ("info", "muon", "--json")], ids=" ".join)
def test_a_stdout_that_is_not_utf_8(argv):
    done = started(*argv, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    if "--json" in argv:
        assert json.loads(done.stdout) == json.loads(started(*argv, PYTHONIOENCODING="utf-8").stdout)


def redirected(*argv, to):
    """Exit code and stderr of a command in a shell, with its stdout redirected."""
    line = f"{sys.executable} -m rlx_optim.cli {' '.join(argv)} {to}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("argv", [("list",), ("info", "muon"), ("list", "--json")], ids=" ".join)
def test_a_stdout_that_is_full_or_closed(argv):
    full = (2, "rlx-optim: the output cannot be written: No space left on device\n")
    assert redirected(*argv, to="> /dev/full") == full
    assert redirected(*argv, to=">&-") == (0, "")
    assert redirected("info", "lio", to="2> /dev/full") == (2, "")


def test_a_reader_that_goes_away():
    assert redirected("info", "soap", to="| sleep 0; exit ${PIPESTATUS[0]}") == (141, "")


def test_info_without_docstrings():
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "rlx_optim.cli", "info", "muon"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rlx-optim: info reads docstrings, and python -OO takes them away; run it without -OO\n"


# ---- list and info --------------------------------------------------------------------------------------------------------
def test_list(capsys):
    assert [entry["name"] for entry in printed(capsys, "list")] == NAMES
    assert run("list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in NAMES)


def test_list_says_what_steps_cost():
    assert listing.entry("adamw")["state_bytes_per_parameter"] == 8
    assert listing.entry("soap")["state_bytes_per_parameter"] == 24
    assert listing.entry("kronpsgd")["aliases"] == ["kron"]
    assert {name: listing.kind_of(name) for name in ("sgd", "mars", "muon")} == {
        "sgd": "elementwise",
        "mars": "reduces",
        "muon": "matrix",
    }


@pytest.mark.parametrize("name", NAMES)
def test_info(name, capsys):
    told = printed(capsys, "info", name)
    assert set(told["hyperparameters"]) == set(spec_class(name).fields)
    assert all(told[part] for part in ("title", "idea", "formulas", "conventions", "when"))
    assert all(field["meaning"] for field in told["hyperparameters"].values())
    assert "bytes" in told["when"]
    assert run("info", name.upper()) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert told["title"] in said
    assert all(field in said for field in told["hyperparameters"])


@pytest.mark.parametrize("name", NAMES)
def test_info_names_what_can_be_imported(name):
    names = info.describe_rule(name)["names"]
    assert getattr(rlx_optim, names["numpy"].partition(".")[2]) is not None
    for framework, module in {"torch": "rlx_optim.torch", "jax": "rlx_optim.optax"}.items():
        pytest.importorskip("torch" if framework == "torch" else "optax")
        found = __import__(module, fromlist=["x"])
        assert callable(getattr(found, names[framework].rpartition(".")[2]))


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "argv",
    [
        ("list",),
        ("info", "muon"),
        ("memory", "--optimizer", "soap"),
        ("plan", "--optimizer", "muon,soap,adamw", "--ranks", "8,512"),
        ("bench", "--model", "one:1k", "--optimizers", "adamw", "--peers", "none", "--rounds", "1", "--seconds", "0.0001"),
    ],
    ids=lambda argv: argv[0],
)
def test_everything_fits_the_terminal_and_no_number_is_cut(argv, columns, capsys, monkeypatch):
    if columns == 60 and argv[0] in ("plan", "bench"):
        return  # what is left of them needs more
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(*argv) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    cells = [cell.strip() for line in said.splitlines() if line.startswith("│") for cell in line.split("│")]
    assert not any(cell.endswith("…") for cell in cells)
    if argv[0] != "info":
        assert "optimizer" in said.partition("┡")[0]  # no head is broken either
    if columns == 80 and argv[0] in ("list", "plan", "bench"):
        assert "Left out at 80 columns" in said


def test_a_narrow_terminal_keeps_what_rows_are_called(capsys, monkeypatch):
    for columns, left in ((80, None), (55, "rounded"), (40, "rounded, tensors, B/param")):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run("memory", "--model", "one:1k", "--optimizers", "adamw") == 0
        said = capsys.readouterr().out
        assert "AdamW: m" in said
        assert "4,000" in said
        assert (f"Left out at {columns} columns: {left}." in " ".join(said.split())) is (left is not None)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (27983, "28.0 kB"),
        (999_600, "1.00 MB"),
        (3_618_007_040, "3.62 GB"),
        (2e15, "2,000 TB"),
    ],
)
def test_bytes_have_one_unit(count, text):
    assert cli.show_size(count) == text


def test_info_keeps_formulas_and_flows_prose():
    text = "One\nsentence.\n    m ← g\n    p ← m\nAfter\nit.\n\n- an item\n  goes on\n- another"
    assert info.join_lines(text) == "One sentence.\n    m ← g\n    p ← m\nAfter it.\n\n- an item goes on\n- another"


# ---- memory ---------------------------------------------------------------------------------------------------------------
SHAPES = {"w": (24, 16), "tall": (40, 8), "b": (37,), "one": (1,), "s": (), "c": (4, 3, 3, 2), "none": (0, 5)}
SETTINGS = [
    {},
    {"sgd": {"momentum": 0.9}, "adam": {"amsgrad": True}, "adafactor": {"beta1": 0.9}, "soap": {"precondition_1d": True, "max_precond_dim": 16},
     "kronpsgd": {"memory_save_mode": "one_diag"}, "mars": {"variant": "lion", "otherwise": None}, "nadamw": {"convention": "torch"}},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS, ids=["defaults", "others"])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_a_real_allocation(name, engine, settings):
    """Slot by slot, against what stepping really allocates."""
    given = settings.get(name, {})
    counted = memory.slots_of(make(name, **given), SHAPES)
    opt = make(name, engine=engine, **given)
    opt.step_all({k: np.ones(s, np.float32) for k, s in SHAPES.items()}, {k: np.ones(s, np.float32) for k, s in SHAPES.items()})
    real = {}
    for member in opt._family():
        for record in member._records.values():
            for slot, array in record.state.items():
                at = type(member).__name__, slot
                tensors, size = real.get(at, (0, 0))
                real[at] = tensors + 1, size + array.nbytes
    assert {(s.rule, s.slot): (s.tensors, s.bytes) for s in counted} == real
    assert sum(s.bytes for s in counted) == opt.state_bytes()


def test_memory_of_gpt2(capsys):
    found = printed(capsys, "memory", "--shapes", "gpt2-124m", "--optimizer", "adamw,soap,muon")
    assert (found["tensors"], found["parameters"], found["parameter_bytes"]) == (148, 124_439_808, 497_759_232)
    assert found["optimizers"]["adamw"]["state_bytes"] == 8 * 124_439_808
    # SOAP: 8 a parameter, and L and Q of 4·n² for every dimension up to 10,000 of the 50 matrices; the vocabulary's 50,257 is not one
    blocks = 12 * (5 * 768**2 + 2304**2 + 2 * 3072**2)
    rotated = blocks + 768**2 + 1024**2 + 768**2
    assert found["optimizers"]["soap"]["state_bytes"] == 8 * 124_439_808 + 8 * rotated
    vectors, embeddings = 12 * (2304 + 768 + 3072 + 768 + 4 * 768) + 2 * 768, (50257 + 1024) * 768
    matrices = 124_439_808 - vectors - embeddings
    assert found["optimizers"]["muon"]["state_bytes"] == 4 * matrices + 8 * (124_439_808 - matrices)
    assert run("memory", "--optimizer", "all") == 0
    assert "all state" in capsys.readouterr().out


def test_memory_of_a_file(tmp_path, capsys):
    named, listed = tmp_path / "a.json", tmp_path / "b.json"
    named.write_text('{"fc.weight": [64, 32], "fc.bias": [64], "scale": []}')
    listed.write_text("[[64, 32], [64], []]")
    for file in (named, listed):
        found = printed(capsys, "memory", "--shapes", file, "--optimizer", "adamw", "--set", "amsgrad=true")
        assert found["optimizers"]["adamw"]["state_bytes"] == 12 * (64 * 32 + 64 + 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("3", "must hold"),
        ("{}", "must hold"),
        ('{"w": 3}', "'w' must be a list of whole numbers, got 3"),
        ('{"w": [3, -1]}', "got [3, -1]"),
        ('{"w": [true]}', "got [True]"),
    ],
)
def test_bad_files_of_shapes(text, words, tmp_path, capsys):
    (tmp_path / "s.json").write_text(text)
    assert words in refused(capsys, "memory", "--shapes", tmp_path / "s.json")


def test_bad_options_of_memory(capsys):
    assert "No such file" in refused(capsys, "memory", "--shapes", "/no/such.json")
    assert "'momentum' must look like KEY=VALUE" in refused(capsys, "memory", "--set", "momentum")
    assert "unknown hyperparameter 'foo'" in refused(capsys, "memory", "--set", "foo=1")
    assert "lr must be" in refused(capsys, "memory", "--set", "lr=fast")


# ---- convert --------------------------------------------------------------------------------------------------------------
def adamw_file(path, **how):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    torch.save(opt.state_dict(), path, **how)


def test_convert_of_the_older_format_of_torch(tmp_path, capsys):
    adamw_file(tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = printed(capsys, "convert", tmp_path / "old.pt", tmp_path / "a.safetensors")
    assert (found["optimizers"], found["parameters"]) == (["adamw"], 2)


def test_convert_of_another_optimizer_than_said(tmp_path, capsys):
    adamw_file(tmp_path / "a.pt")
    said = refused(capsys, "convert", tmp_path / "a.pt", tmp_path / "a.safetensors", "--optimizer", "sgd")
    assert "SGD: the checkpoint is of another optimizer: its groups and states have 'amsgrad', 'betas'" in said


def test_convert_to_where_torch_cannot_write(tmp_path, capsys, monkeypatch):
    adamw_file(tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "a.safetensors") == 0
    capsys.readouterr()

    def save(*_):
        raise RuntimeError("Parent directory does not exist.\nmore of it")

    monkeypatch.setattr("torch.save", save)
    said = refused(capsys, "convert", tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert "b.pt: cannot be written: Parent directory does not exist." in said


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize(
    "argv", [("inspect", "{}"), ("inspect", "{}", "{}"), ("convert", "{}", "b.pt"), ("convert", "{}.pt", "b.safetensors")]
)
def test_what_is_no_file_is_not_read(argv, tmp_path, capsys):
    """A pipe has no end, and neither has /dev/zero."""
    for name in ("a.safetensors", "a.safetensors.pt"):
        os.mkfifo(tmp_path / name)
    assert "a.safetensors" in refused(capsys, *(word.replace("{}", str(tmp_path / "a.safetensors")) for word in argv))


def test_check_of_what_cannot_be_read_or_has_no_such_setting(tmp_path, capsys, monkeypatch):
    (tmp_path / "broken_rule.py").write_text("class Bad(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "broken_rule:Bad: invalid syntax" in refused(capsys, "check", "broken_rule:Bad")
    assert "--kwargs: adamw has no 'foo'; it has lr" in refused(capsys, "check", "adamw", "--kwargs", '{"foo": 1}')
    assert "unknown optimizer 'foo'" in refused(capsys, "check", "torch.optim:AdamW", "--as", "foo")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("race", "--seeds", "nan"), "'--seeds': Input should be a valid integer"),
        (("race", "--seeds", "nan"), "got 'nan'"),
        (("race", "--seeds=1.5"), "got '1.5'"),
        (("check", "torch.optim:SGD", "--ranks", "-3"), "got '-3'"),
        (("memory", "--model", "deep.json"), "deep.json is not JSON: maximum recursion depth"),
        (("convert", "a.pt", "b.safetensors", "--names", "names.txt"), "--names: names.txt: 'utf-8' codec can't decode"),
        (("check", "raising_rule:X"), "raising_rule:X: RuntimeError: boom"),
        (("check", "ending_rule:X"), "ending_rule:X: SystemExit: 3"),
        (("check", "..:x"), "..:x: TypeError: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_refused_is_named(argv, words, tmp_path, capsys, monkeypatch):
    (tmp_path / "deep.json").write_text("[" * 50_000)
    (tmp_path / "names.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "raising_rule.py").write_text("raise RuntimeError('boom')")
    (tmp_path / "ending_rule.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert words in refused(capsys, *argv)


def test_a_program_may_collect_the_output():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run("--version") == 0
    assert out.getvalue() == f"rlx-optim {rlx_optim.__version__}\n"


# ---- doctor ---------------------------------------------------------------------------------------------------------------
@pytest.fixture
def few_engines(monkeypatch):
    """The doctor with what imports quickly."""
    monkeypatch.setattr(doctor, "ENGINES", {name: engines.ENGINES[name] for name in ("reference", "cpu")})


def test_the_doctor(few_engines, capsys):
    found = printed(capsys, "doctor")
    assert found["healthy"]
    assert {e["engine"]: e["status"] for e in found["engines"]} == {"reference": "live", "cpu": "live"}
    assert found["more_threads_from_bytes"] == 2 << 20
    assert found["offload"]["status"] in ("live", "not here")
    assert run("doctor") == 0
    assert "healthy" in capsys.readouterr().out


def test_the_doctor_says_why_an_engine_is_not_here(few_engines, capsys, monkeypatch):
    absent = dataclasses.replace(engines.ENGINES["cpu"], missing=lambda: 'x is not installed (pip install "rlx-optim[x]")')
    monkeypatch.setitem(doctor.ENGINES, "cpu", absent)
    found = printed(capsys, "doctor")
    assert found["engines"][1]["why"] == 'x is not installed (pip install "rlx-optim[x]")'
    assert found["more_threads_from_bytes"] is None
    assert run("doctor") == 0
    assert "not here" in capsys.readouterr().out


def test_the_doctor_finds_a_broken_and_a_wrong_engine(few_engines, capsys, monkeypatch):
    cpu, right = engines.ENGINES["cpu"], doctor.step_rule
    for made, status, word in ((lambda: 1 / 0, "broken", "ZeroDivisionError"), (lambda: "still", "wrong", "adamw is off by 1")):
        monkeypatch.setitem(doctor.ENGINES, "cpu", dataclasses.replace(cpu, make=made))
        monkeypatch.setattr(
            doctor, "step_rule",
            lambda spec, engine: [(p, p) for p, _ in right(spec, cpu.make())] if engine == "still" else right(spec, engine),
        )  # fmt: skip
        found = printed(capsys, "doctor", code=1)
        (told,) = (e for e in found["engines"] if e["engine"] == "cpu")
        assert told["status"] == status
        assert word in told["why"]
        assert not found["healthy"]


def test_distance():
    start, want = {"a": np.zeros(2), "b": np.zeros(1)}, {"a": np.array([2.0, 0.0]), "b": np.array([4.0])}
    assert walks.distance({"a": np.array([2.0, 0.1]), "b": np.array([4.1])}, want, start) == pytest.approx(0.05)
    assert walks.distance({"a": np.array([2.0, math.nan]), "b": np.array([4.0])}, want, start) == math.inf


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    assert walks.ENGINES["torch"].missing() == engines.ENGINES["torch"].missing()
    assert walks.ENGINES["torch"].missing() == 'torch is not installed (pip install "rlx-optim[torch]")'
    assert walks.ENGINES["jax"].missing() == 'jax is not installed (pip install "rlx-optim[jax]")'
    assert walks.ENGINES["cpu"].missing() == "llvmlite is not installed (pip install llvmlite)"


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_inspect_is_whole_at_every_width(columns, tmp_path, capsys, monkeypatch):
    """A table where it fits, else lines; no number and no name is cut."""
    name, files = "blocks.11.attention.qkv.weight", [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    params = {name: np.ones((300, 200), np.float32), "head[0]": np.ones(7, np.float32)}
    opt = rlx_optim.NAdamW(convention="torch")
    for file in files:
        opt.step_all(params, {k: np.ones_like(p) for k, p in params.items()})
        opt.save(file)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    assert run("inspect", files[0].name) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    assert ("┃ parameter" in said) is (columns == 140)
    words = said.replace(",", " ").replace(":", " ").split()
    for word in (name, "head[0]", "300×200", "480", "000", "56", "mu_product=0.450073", "float32", "NAdamW"):
        assert word in words
    assert "480,000" in said
    assert run("inspect", *(file.name for file in files)) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    assert "60,000 of 60,000 numbers differ" in " ".join(said.split())


# ---- checkpoints ----------------------------------------------------------------------------------------------------------
def test_inspect_in_json(tmp_path, capsys):
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for file, lr in ((one, 0.1), (two, 0.2)):
        opt = rlx_optim.AdamW(lr=lr)
        opt.step_all({"w": np.ones(3, np.float32)}, {"w": np.ones(3, np.float32)})
        opt.save(file)
    found = printed(capsys, "inspect", one)
    assert found["verified"]
    assert [entry["parameter"] for entry in found["state"]] == ["w"]
    assert printed(capsys, "inspect", one, one) == {"files": [str(one)] * 2, "equal": True, "differences": []}
    assert "lr is 0.1 and 0.2" in printed(capsys, "inspect", one, two, code=1)["differences"][0]
