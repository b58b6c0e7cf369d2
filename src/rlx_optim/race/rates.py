"""The committed settings, by model and optimizer. lr is the peak: it falls to 0 along half a cosine (`gpt`: along a line).

They come from `rlx-optim race --model M --tune`, rounded. "otherwise" is the AdamW for tensors that the rule does not take;
"groups" gives a rule the head of a NumPy network too, which its name would keep out. RUN is as many steps as a run has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..numpy.classes import spec_class

SGD = {"momentum": 0.9, "nesterov": True}
HEAD = {"groups": [{"match": "head.*", "use": "own"}]}
DECAY = {"weight_decay": 0.1}

Table = Mapping[str, Mapping[str, dict[str, Any]]]

#: by optimizer: the rate of digits-mlp, that of logreg, and what both have besides
RATES: dict[str, tuple[float, float, dict[str, Any]]] = {
    "sgd": (0.2, 1.0, SGD), "adam": (2e-2, 0.1, {}), "adamw": (3e-2, 0.1, DECAY), "nadamw": (3e-2, 0.1, DECAY),
    "radam": (0.1, 0.3, {}), "qhadamw": (3e-2, 0.1, DECAY), "stableadamw": (3e-2, 0.1, DECAY), "ademamix": (3e-2, 0.1, DECAY),
    "adan": (3e-2, 0.3, {}), "adopt": (2e-2, 0.3, {}), "laprop": (2e-2, 0.3, {}), "lamb": (2e-2, 5e-2, {}),
    "lars": (6.0, 15.0, {}), "adafactor": (0.1, 0.1, {}), "lion": (3e-3, 3e-2, DECAY), "soap": (2e-2, 0.1, {}),
    "kronpsgd": (1e-2, 0.1, {}), "muon": (4e-2, 0.3, {}), "sophia": (4e-3, 3e-2, DECAY), "mars": (3e-2, 0.1, {}),
    "prodigy": (1.0, 1.0, {}), "normuon": (4e-2, 0.3, {}), "scion": (1e-2, 3e-2, {"scale": 10.0, "momentum": 0.1}),
    "schedulefreeadamw": (9e-2, 0.1, {}), "schedulefreesgd": (1.0, 3.0, {}),
}  # fmt: skip
#: what those have besides that hand tensors to an AdamW
HANDING: dict[str, dict[str, dict[str, Any]]] = {
    "digits-mlp": {name: {**(HEAD if name == "mars" else {}), "otherwise": {"lr": 1e-2}} for name in ("muon", "mars", "normuon")},
    "logreg": {name: {**HEAD, "otherwise": {"lr": 0.1}} for name in ("muon", "mars", "normuon")},
}
SETTINGS: Table = {
    model: {name: {"lr": row[place], **row[2], **handing.get(name, {})} for name, row in RATES.items()}
    for place, (model, handing) in enumerate(HANDING.items())
}


def settings_of(model: str, optimizer: str, table: Table = SETTINGS) -> dict[str, Any]:
    """The committed settings of a model, or the optimizer's own learning rate where none are."""
    rate = spec_class(optimizer).fields["lr"].default
    return table[model].get(optimizer) or {"lr": rate if isinstance(rate, float) else 1e-3}
