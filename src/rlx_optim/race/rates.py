"""The committed settings, by model and optimizer. lr is the peak: it falls to 0 along half a cosine (`gpt`: along a line).

They come from `rlx-optim race --model M --tune`, rounded. "otherwise" is the AdamW for tensors that the rule does not take;
"groups" gives a rule the head of a NumPy network too, which its name would keep out. RUN is as many steps as a run has.
"""

from __future__ import annotations

from typing import Any

from ..named import spec_class

SGD = {"momentum": 0.9, "nesterov": True}
HEAD = {"groups": [{"match": "head.*", "use": "own"}]}
DECAY = {"weight_decay": 0.1}
SHORT = {"betas": (0.9, 0.95)}
RUN = "run"

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "digits-mlp": {
        "sgd": {"lr": 0.2, **SGD},
        "adam": {"lr": 2e-2},
        "adamw": {"lr": 3e-2, **DECAY},
        "nadamw": {"lr": 3e-2, **DECAY},
        "radam": {"lr": 0.1},
        "qhadamw": {"lr": 3e-2, **DECAY},
        "stableadamw": {"lr": 3e-2, **DECAY},
        "ademamix": {"lr": 3e-2, **DECAY},
        "adan": {"lr": 3e-2},
        "adopt": {"lr": 2e-2},
        "laprop": {"lr": 2e-2},
        "lamb": {"lr": 2e-2},
        "lars": {"lr": 6.0},
        "adafactor": {"lr": 0.1},
        "lion": {"lr": 3e-3, **DECAY},
        "soap": {"lr": 2e-2},
        "kronpsgd": {"lr": 1e-2},
        "muon": {"lr": 4e-2, "otherwise": {"lr": 1e-2}},
        "sophia": {"lr": 4e-3, **DECAY},
        "mars": {"lr": 3e-2, **HEAD, "otherwise": {"lr": 1e-2}},
        "prodigy": {"lr": 1.0},
        "normuon": {"lr": 4e-2, "otherwise": {"lr": 1e-2}},
        "scion": {"lr": 1e-2, "scale": 10.0, "momentum": 0.1},
        "schedulefreeadamw": {"lr": 9e-2},
        "schedulefreesgd": {"lr": 1.0},
    },
    "logreg": {
        "sgd": {"lr": 1.0, **SGD},
        "adam": {"lr": 0.1},
        "adamw": {"lr": 0.1, **DECAY},
        "nadamw": {"lr": 0.1, **DECAY},
        "radam": {"lr": 0.3},
        "qhadamw": {"lr": 0.1, **DECAY},
        "stableadamw": {"lr": 0.1, **DECAY},
        "ademamix": {"lr": 0.1, **DECAY},
        "adan": {"lr": 0.3},
        "adopt": {"lr": 0.3},
        "laprop": {"lr": 0.3},
        "lamb": {"lr": 5e-2},
        "lars": {"lr": 15.0},
        "adafactor": {"lr": 0.1},
        "lion": {"lr": 3e-2, **DECAY},
        "soap": {"lr": 0.1},
        "kronpsgd": {"lr": 0.1},
        "muon": {"lr": 0.3, **HEAD, "otherwise": {"lr": 0.1}},
        "sophia": {"lr": 3e-2, **DECAY},
        "mars": {"lr": 0.1, **HEAD, "otherwise": {"lr": 0.1}},
        "prodigy": {"lr": 1.0},
        "normuon": {"lr": 0.3, **HEAD, "otherwise": {"lr": 0.1}},
        "scion": {"lr": 3e-2, "scale": 10.0, "momentum": 0.1},
        "schedulefreeadamw": {"lr": 0.1},
        "schedulefreesgd": {"lr": 3.0},
    },
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
    """The committed settings, or its own learning rate where none are."""
    rate = spec_class(optimizer).fields["lr"].default
    return SETTINGS[model].get(optimizer) or {"lr": rate if isinstance(rate, float) else 1e-3}
