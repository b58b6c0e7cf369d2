"""The conformance suite: what is right passes, what is wrong on purpose is caught by its check, and ours are right."""

import pytest
import torch
import wrong

from rlx_optim.check import check_optimizer, checks_of

TORCH = {check.name: check for check in checks_of("torch")}


@pytest.fixture(autouse=True)
def quiet(one_thread):
    pass


def failing(report):
    return {each.name for each in report.results if each.status in ("failed", "error")}


def test_there_is_a_wrong_one_for_every_check():
    assert set(wrong.WRONG) == set(TORCH)


def caught(check, **how):
    name, _, settings, claimed, gpu, ranks = wrong.WRONG[check]
    if gpu and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return check_optimizer(f"wrong:{name}", settings, claimed=claimed, ranks=ranks, **how)


@pytest.mark.parametrize("check", [name for name, check in TORCH.items() if check.quick])
def test_what_is_wrong_is_caught(check):
    (result,) = [each for each in caught(check, only=[check]).results if each.name == check]
    assert result.status in ("failed", "error"), result
    assert result.note


@pytest.mark.slow
@pytest.mark.parametrize("check", list(TORCH))
def test_what_is_wrong_is_caught_by_its_check_alone(check):
    _, also, _, _, _, _ = wrong.WRONG[check]
    slow = not TORCH[check].quick
    report = caught(check, only=sorted({check, *also, "regression", "keywords"})) if slow else caught(check, quick=True)
    assert check in failing(report)
    assert failing(report) <= {check, *also}


@pytest.mark.slow
def test_what_is_right_passes():
    report = check_optimizer("wrong:Right", ranks=2)
    assert failing(report) == {"bfloat16-accumulates"}, report
    assert report.ok
