"""The committed settings, by model and optimizer. lr is the peak: it falls to 0 along half a cosine (`gpt`: along a line).

They come from `rlx-optim race --model M --tune`, rounded. "otherwise" is the AdamW for tensors that the rule does not take;
"groups" gives a rule the head of a NumPy network too, which its name would keep out. RUN is as many steps as a run has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..named import spec_class

SGD = {"momentum": 0.9, "nesterov": True}
HEAD = {"groups": [{"match": "head.*", "use": "own"}]}
DECAY = {"weight_decay": 0.1}

Table = Mapping[str, Mapping[str, dict[str, Any]]]

SETTINGS: Table = {
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
}


def settings_of(model: str, optimizer: str, table: Table = SETTINGS) -> dict[str, Any]:
    """The committed settings of a model, or the optimizer's own learning rate where none are."""
    rate = spec_class(optimizer).fields["lr"].default
    return table[model].get(optimizer) or {"lr": rate if isinstance(rate, float) else 1e-3}
