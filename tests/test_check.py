"""The conformance suite: what is right passes, what is wrong on purpose is caught by its check, and ours are right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wrong
import wrong_optax
from helpers import TORCH as OURS
from helpers import slowly

from rlx_optim.check import check_optimizer, checks_of, subject_of
from rlx_optim.check.engines import list_present
from rlx_optim.check.page import render_page
from rlx_optim.check.rules import check_rule
from rlx_optim.check.table import Check, Skip, Wrong, choose_checks, run_check
from rlx_optim.cli import main
from rlx_optim.registry import OURS as RULES
from rlx_optim.registry import spec_class

TORCH = {check.name: check for check in checks_of("torch")}
OPTAX = {check.name: check for check in checks_of("optax")}
RULE = {check.name: check for check in checks_of("rule")}
FACTORIES = [kind.optax.factory or kind.name for kind in RULES]
TASTE = {"Prodigy": ["independence"]}  # whose estimate is one for all tensors
ODD = ("bfloat16-accumulates",)  # nobody's bfloat16 parameter has more bits


@pytest.fixture(autouse=True)
def quiet(one_thread):
    pass


def failing(report):
    return {each.name for each in report.results if each.status in ("failed", "error")}


# ---- optimizers that are wrong on purpose ------------------------------------------------------------------------------------------
def test_there_is_a_wrong_one_for_every_check():
    assert set(wrong.WRONG) == set(TORCH)
    assert set(wrong_optax.WRONG) == set(OPTAX)


def caught(check, **how):
    name, _, settings, claimed, gpu, ranks = wrong.WRONG[check]
    if gpu and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return check_optimizer(f"wrong:{name}", settings, claimed=claimed, ranks=ranks, **how)


def caught_optax(check, **how):
    return check_optimizer(f"wrong_optax:{wrong_optax.WRONG[check][0]}", claimed=wrong_optax.CLAIMED.get(check), **how)


@pytest.mark.parametrize("check", slowly(TORCH, [name for name, each in TORCH.items() if each.quick and name != "keywords"]))
def test_what_is_wrong_is_caught(check):
    (result,) = caught(check, only=[check]).results
    assert result.status in ("failed", "error"), result
    assert result.note


@pytest.mark.parametrize(
    "check", slowly(wrong_optax.WRONG, ["empty-tree", "inject-hyperparams", "gradients-unwritten", "stable-state"])
)
def test_what_is_wrong_in_optax_is_caught(check):
    (result,) = caught_optax(check, only=[check]).results
    assert result.status in ("failed", "error"), result
    assert result.note


@pytest.mark.slow
@pytest.mark.parametrize("check", [name for name, each in TORCH.items() if each.quick])
def test_what_is_wrong_is_caught_by_its_check_alone(check):
    found = failing(caught(check, quick=True))
    assert check in found
    assert found <= {check, *wrong.WRONG[check][1]}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "ranks", "odd"), [("wrong:Right", 2, ODD), ("wrong_optax:right", 0, ())])
def test_what_is_right_passes(target, ranks, odd):
    report = check_optimizer(target, ranks=ranks)
    assert failing(report) == set(odd), render_page(report)
    assert report.ok


# ---- ours --------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(OURS))
def test_ours_are_right(name):
    report = check_optimizer(f"rlx_optim.torch:{name}", OURS[name], quick=True)
    assert failing(report) == set(TASTE.get(name, ())), render_page(report)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(OURS))
def test_ours_are_right_in_what_takes_long_too(name):
    only = [check.name for check in TORCH.values() if not check.quick]
    report = check_optimizer(f"rlx_optim.torch:{name}", OURS[name], only=only, ranks=2)
    assert not failing(report), render_page(report)


def test_lion_is_right_as_a_transformation():
    report = check_optimizer("rlx_optim.optax:lion", quick=True)
    assert not failing(report), render_page(report)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FACTORIES)
def test_ours_are_right_as_transformations(name):
    report = check_optimizer(f"rlx_optim.optax:{name}", {"learning_rate": 1.0} if name == "prodigy" else None)
    assert report.ok, render_page(report)


@pytest.mark.parametrize(("name", "engine"), [("muon", "cpu"), ("soap", "jax")])
def test_matrix_rules_are_right_on_an_engine(name, engine):
    report = check_rule(spec_class(name), engines=[engine], only=["engine"] if engine == "jax" else ())
    assert report.ok, str(report)


@pytest.mark.parametrize("name", slowly([kind.name for kind in RULES], ["adamw", "lamb", "adafactor"]))
def test_ours_are_right_as_rules(name):
    report = check_rule(spec_class(name))
    assert report.ok, str(report)
    assert {row.engine for row in report.rows} >= {"reference", *list_present()}
    assert all(len(line) <= 100 for line in str(report).splitlines())


CUDA = ("cuda", "cuda-sync", "cuda-graph")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OURS))
def test_ours_are_right_on_cuda(name):
    report = check_optimizer(f"rlx_optim.torch:{name}", OURS[name], only=CUDA)
    assert report.ok, [each for each in report.results if not each.ok]
    assert "passed" in [each.status for each in report.results]


@pytest.mark.gpu
@pytest.mark.parametrize("check", CUDA)
def test_what_is_wrong_on_cuda_is_caught(check):
    (result,) = caught(check, only=[check]).results
    assert result.status in ("failed", "error"), result


# ---- nothing passes unseen -------------------------------------------------------------------------------------------------------------
def test_no_check_passes_without_having_seen_something():
    subject = subject_of("wrong:Right")

    def said(run):
        return run_check(Check("one", "why", ("torch",), run), subject)

    def skipped(s):
        raise Skip("not here")

    def failed(s):
        raise Wrong("off", 0.5)

    assert (said(lambda s: 0.0).status, said(lambda s: 0.0).seen) == ("passed", 0.0)
    assert (said(lambda s: None).status, said(lambda s: 1 / 0).status) == ("error", "error")
    assert (said(skipped).status, said(skipped).note) == ("skipped", "not here")
    assert (said(failed).status, said(failed).seen, said(failed).ok) == ("failed", 0.5, False)


class MuonThatRests(torch.optim.SGD):
    """Steps of nothing."""

    def step(self, closure=None):
        pass


def test_a_step_of_nothing_is_not_orthogonal():
    (result,) = check_optimizer(f"{__name__}:MuonThatRests", {"lr": 0.01}, only=["orthogonal"]).results
    assert result.status == "failed"


def test_which_adam_is_this():
    for target, claimed, words in [
        ("wrong:EpsInside", "adamw", "AdamW but for: eps inside the root"),
        ("torch.optim:Adam", "adamw", "AdamW but for: decay joins the gradient"),
        ("torch.optim:AdamW", None, "AdamW: "),
        ("torch.optim:RAdam", None, "RAdam, convention 'torch': "),
    ]:
        (result,) = check_optimizer(target, only=["which"], claimed=claimed).results
        assert words in f"{result.note} {result.seen}", result
        assert result.taste == (claimed is None)


# ---- the command and the plugin ----------------------------------------------------------------------------------------------------------
def test_the_command(capsys, tmp_path):
    assert main(["check", "torch.optim:SGD", "--only", "closure,resume*", "--html", str(tmp_path / "a.html")]) == 0
    shown = capsys.readouterr().out
    assert "ok    closure" in shown
    assert "resume-bfloat16" in shown
    assert "none of them wrong" in shown
    text = (tmp_path / "a.html").read_text()
    assert "torch.optim:SGD" in text
    assert "http" not in text  # self-contained
    assert main(["check", "torch.optim:SGD", "--only", "bad-settings", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["counts"]["failed"] == 1
    assert "lr=nan" in told["results"][0]["note"]
    assert main(["check", "torch.optim:SGD", "--only", "bad-settings", "--kwargs", '{"momentum": 0.9}', "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["settings"] == {"momentum": 0.9}
    assert main(["check", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in [*TORCH, *OPTAX, *RULE])
    asked = {each.name for each in choose_checks(subject_of("adamw"))}
    assert all(any(kind.startswith(name) for kind in asked) for name in RULE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give an optimizer"),
        (["torch.optim:NoSuch"], "has no attribute 'NoSuch'"),
        (["nosuch:Thing"], "No module named 'nosuch'"),
        (["torch.optim:SGD", "--only", "nosuch"], "no check for torch is called nosuch; known are keywords"),
        (["torch.optim:LBFGS"], "takes no step"),
        (["torch.optim:SGD", "--kwargs", "[1]"], "--kwargs must be an object"),
        (["torch.optim:SGD", "--kwargs", "{"], "--kwargs: "),
        (["torch.optim:SGD", "--html", "-"], "--html: - must end in .html"),
        (["math:pi"], "neither a torch.optim.Optimizer class nor an optax factory"),
        (["adamw", "--as", "adam"], "adamw is a rule"),
        (["adamw", "--only", "nosuch"], "no check of AdamW is called nosuch; known are language, declared, slots, ranks, engine"),
    ],
)
def test_the_command_refuses(capsys, arguments, message):
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_on_a_rule(capsys, tmp_path):
    assert main(["check", "adamw", "--quick", "--only", "resume,schedule of lr", "--html", str(tmp_path / "a.html")]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines()[1:-1]] == ["language", "resume", "resume", "schedule"]
    assert "schedule of lr" in (tmp_path / "a.html").read_text()


def plugged(folder, *words):
    tests = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "rlx_optim_pytest", "-p", "no:cacheprovider", "--optim-quick", "-rs", *words],
        capture_output=True, text=True, check=False, cwd=folder, env={"PYTHONPATH": f"{tests.parent / 'src'}:{tests}", "PATH": ""},
    )  # fmt: skip


def test_the_plugin_on_rules(tmp_path):
    (tmp_path / "idle.py").write_text(IDLE)
    done = plugged(tmp_path, "--optim", "idle:Idle", "--optim", "lion", "-k", "language or eps")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "idle:Idle: hyperparameter eps, reference" in done.stdout, done.stdout
    assert "eps was changed, alone and beside others, and nothing moved" in done.stdout
    assert "1 failed" in done.stdout


IDLE = """
from rlx_optim.rule import Spec, like, real


def stepped(g):
    u = g
    return u


class Idle(Spec):
    lr: float = real(0.01)
    eps: float = real(1e-8)

    def slots(self, shape):
        return like(shape)

    def scalars(self, t, counters):
        return {"step": self.lr}

    def update(self, E, x):
        return E.map(stepped, x)
"""


def test_the_plugin(tmp_path):
    done = plugged(tmp_path, "--optim", "wrong:IgnoresScale", "-k", "scaler or closure or cuda-graph or infinite")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout
    assert "GradScaler skips" in done.stdout
    assert "it has no keyword capturable" in done.stdout
