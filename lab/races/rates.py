"""The committed settings of the language models, beside those of `rlx_optim.race.rates`. RUN is as many steps as a run has."""

from __future__ import annotations

from typing import Any

from rlx_optim.race import rates
from rlx_optim.race.rates import DECAY, SGD, Table

SHORT = {"betas": (0.9, 0.95)}
RUN = "run"

SETTINGS: Table = {
    **rates.SETTINGS,
    "char-gpt": {
        "sgd": {"lr": 0.1, **SGD},
        "adam": {"lr": 3e-3},
        "adamw": {"lr": 3e-3, **DECAY},
        "nadamw": {"lr": 3e-3, **DECAY},
        "radam": {"lr": 2e-2},
        "qhadamw": {"lr": 3e-3, **DECAY},
        "stableadamw": {"lr": 3e-3, **DECAY},
        "ademamix": {"lr": 3e-3, **DECAY},
        "adan": {"lr": 3e-3},
        "adopt": {"lr": 3e-3},
        "laprop": {"lr": 3e-3},
        "lamb": {"lr": 2e-2},
        "lars": {"lr": 20.0},
        "adafactor": {"lr": 3e-2},
        "lion": {"lr": 2e-3, **DECAY},
        "soap": {"lr": 1e-2},
        "kronpsgd": {"lr": 1e-2},
        "muon": {"lr": 2e-2, "otherwise": {"lr": 3e-3}},
        "sophia": {"lr": 1e-3, **DECAY},
        "mars": {"lr": 3e-3, "otherwise": {"lr": 3e-3}},
        "prodigy": {"lr": 1.0},
        "normuon": {"lr": 2e-2, "otherwise": {"lr": 3e-3}},
        "scion": {"lr": 2e-3, "scale": 30.0, "momentum": 0.1},
        "schedulefreeadamw": {"lr": 5e-3},
        "schedulefreesgd": {"lr": 0.3},
    },
    # where searches begin (`plan`), not what they found; b2 is 0.95 where the rule leaves it free, as is usual in runs this short
    "gpt": {
        "sgd": {"lr": 0.3, **SGD, "weight_decay": 1e-4},
        "adam": {"lr": 2e-3, **SHORT},
        "adamw": {"lr": 2e-3, **SHORT, **DECAY},
        "nadamw": {"lr": 2e-3, **SHORT, **DECAY},
        "radam": {"lr": 2e-3, **SHORT},
        "qhadamw": {"lr": 2e-3, "betas": (0.95, 0.95), **DECAY},
        "stableadamw": {"lr": 2e-3, **SHORT, **DECAY},
        "ademamix": {"lr": 2e-3, "betas": (0.9, 0.95, 0.99), **DECAY, "alpha_warmup": RUN, "beta3_warmup": RUN},
        "adan": {"lr": 3e-3},
        "adopt": {"lr": 2e-3, **SHORT},
        "laprop": {"lr": 2e-3, **SHORT},
        "lamb": {"lr": 1e-2, **SHORT},
        "lars": {"lr": 10.0, "weight_decay": 1e-4},
        "adafactor": {"lr": 3e-2},
        "lion": {"lr": 3e-4, **SHORT, "weight_decay": 1.0},
        "soap": {"lr": 3e-3, **DECAY},
        "kronpsgd": {"lr": 1e-3, **DECAY},
        "muon": {"lr": 2e-2, "weight_decay": 0.01, "otherwise": {"lr": 2e-3, **SHORT, **DECAY}},
        "sophia": {"lr": 1e-3, **DECAY},
        "mars": {"lr": 3e-3, **DECAY, "otherwise": {"lr": 2e-3, **SHORT, **DECAY}},
        "prodigy": {"lr": 1.0, **SHORT},
        "normuon": {"lr": 2e-2, "weight_decay": 0.01, "otherwise": {"lr": 2e-3, **SHORT, **DECAY}},
        "scion": {"lr": 1e-3, "scale": 30.0, "momentum": 0.1},
        "schedulefreeadamw": {"lr": 5e-3, **SHORT},
        "schedulefreesgd": {"lr": 1.0, "weight_decay": 1e-4},
    },
}


def settings_of(model: str, optimizer: str) -> dict[str, Any]:
    """The committed settings of any model, or the optimizer's own learning rate where none are."""
    return rates.settings_of(model, optimizer, SETTINGS)
