"""The rows of docs/migrate/pytorch_optimizer.md and timm.md: with the settings they say, both walk the same way."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from foreign_states import classes_of  # noqa: E402

import rlx_optim.torch as ours  # noqa: E402

PAGES = Path(__file__).parent.parent / "docs" / "migrate"
ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
LION = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
#: (library, theirs, their settings, ours, our settings)
ROWS = [
    ("pytorch_optimizer", "SGDW", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "weight_decouple": False}, "SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    ("pytorch_optimizer", "Adam", ADAM, "Adam", ADAM),
    ("pytorch_optimizer", "AdamW", ADAM, "AdamW", ADAM),
    ("pytorch_optimizer", "NAdam", {**ADAM, "decoupled_weight_decay": True}, "NAdamW", {**ADAM, "convention": "torch"}),
    ("pytorch_optimizer", "RAdam", {**ADAM, "degenerated_to_sgd": True}, "RAdam", {**ADAM, "decoupled_weight_decay": True}),
    ("pytorch_optimizer", "QHAdam", {**ADAM, "nus": (0.7, 0.9), "weight_decouple": True}, "QHAdamW", {**ADAM, "nus": (0.7, 0.9)}),
    ("pytorch_optimizer", "Lamb", {**ADAM, "eps": 1e-6, "weight_decouple": False, "adam": False, "pre_norm": False, "adam_debias": True}, "Lamb", {**ADAM, "eps": 1e-6, "bias_correction": False}),
    ("pytorch_optimizer", "AdaFactor", {"lr": None, "weight_decay": 0.0, "relative_step": True, "betas": (None, 0.999)}, "Adafactor", {"lr": None, "weight_decay": 0.0, "convention": "paper", "eps": (1e-30, 1e-3)}),
    ("pytorch_optimizer", "Lion", LION, "Lion", LION),
    ("pytorch_optimizer", "SOAP", {"lr": 0.01, "max_precondition_dim": 4, "precondition_frequency": 3}, "SOAP", {"lr": 0.01, "max_precond_dim": 4, "precondition_frequency": 3}),
    ("pytorch_optimizer", "MARS", {**ADAM, "eps": 1e-15, "gamma": 0.3, "optimize_1d": True}, "MARS", {**ADAM, "eps": 1e-15, "gamma": 0.3, "otherwise": None}),
    ("timm.optim", "LaProp", ADAM, "LaProp", {**ADAM, "convention": "timm"}),
    ("timm.optim", "Adan", {**ADAM, "betas": (0.8, 0.7, 0.9)}, "Adan", {**ADAM, "betas": (0.8, 0.7, 0.9)}),
    ("timm.optim", "Adopt", {**ADAM, "eps": 1e-6, "decoupled": True}, "ADOPT", {**ADAM, "eps": 1e-6, "decouple": True, "clip_exp": 0.333}),
    ("timm.optim", "Lars", {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.1}, "LARS", {"lr": 1.0, "weight_decay": 0.1, "eps": 1e-8, "convention": "timm"}),
    ("timm.optim", "Lars", {"lr": 1.0, "momentum": 0.9, "always_adapt": True}, "LARS", {"lr": 1.0, "eps": 1e-8, "convention": "timm"}),
    ("timm.optim", "AdamWLegacy", {**ADAM, "caution": True}, "AdamW", {**ADAM, "cautious": True}),
    ("timm.optim", "SGDW", {"lr": 0.05, "momentum": 0.9}, "SGD", {"lr": 0.05, "momentum": 0.9}),
    ("timm.optim", "NAdamW", ADAM, "NAdamW", {**ADAM, "convention": "algoperf"}),
    ("timm.optim", "Lamb", {**ADAM, "max_grad_norm": None}, "Lamb", ADAM),
    ("timm.optim", "Lion", LION, "Lion", LION),
    ("timm.optim", "Adafactor", {"lr": None, "min_dim_size_to_factor": 1}, "Adafactor", {"convention": "paper", "eps": (1e-30, 1e-3)}),
]  # fmt: skip


def walked(kind, settings):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 6), (5, 3), (7,))]
    start, opt = [p.detach().clone() for p in params], kind(params, **settings)
    for _ in range(10):
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()
    return start, [p.detach() for p in params]


@pytest.mark.parametrize(
    ("library", "theirs", "given", "mine", "settings"), ROWS, ids=lambda each: each if isinstance(each, str) else ""
)
def test_with_these_settings_both_walk_the_same_way(library, theirs, given, mine, settings):
    try:
        kind = getattr(classes_of(library.partition(".")[0]), theirs)
    except ImportError as problem:
        pytest.skip(str(problem))
    (start, want), (_, got) = walked(kind, given), walked(getattr(ours, mine), settings)
    for s, a, b in zip(start, want, got, strict=True):
        assert (a - b).abs().max() <= 1e-6 * (a - s).abs().max()


@pytest.mark.parametrize("library", ["pytorch_optimizer", "timm"])
def test_the_page_says_what_is_tested(library):
    """Every optimizer in a row here has one there, and every setting of the row that is not the common ones is named in it."""
    lines = [line.lower() for line in (PAGES / f"{library}.md").read_text().splitlines() if line.startswith("|")]
    for _, theirs, given, mine, settings in (row for row in ROWS if row[0].startswith(library)):
        rows = [
            line
            for line in lines
            if re.search(rf"`{theirs.lower()}\b", line.split("|")[1]) and mine.lower() in line.split("|")[2]
        ]
        assert rows, theirs
        for word in {*given, *settings} - {
            "lr",
            "betas",
            "weight_decay",
            "momentum",
            "eps",
            "nus",
            "gamma",
            "precondition_frequency",
            "adam",
            "pre_norm",
        }:
            assert any(word in row for row in rows) or word in ("decoupled_weight_decay", "convention"), (theirs, word)
