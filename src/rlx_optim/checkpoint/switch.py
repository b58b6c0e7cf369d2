"""From one optimizer to another in the middle of a run: what of the state means the same to both goes along.

A first moment goes along where both average gradients; where one sums them instead (SGD, Muon's "rlx") it is scaled, and where
bias corrections differ (other betas) so that the corrected moment stays what it was. But a step count without the second moment
it corrects would be a disaster: v = 0 taken for a long average makes the next step √(1/(1 − b2)) times too large. So optimizers
with bias-corrected moments take both moments and the count, or start afresh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import named
from ..optimizer import NamedOptimizer
from ..registry import OPTIMIZERS
from ..routing import table
from ..spec import Spec
from ..stepping import Record

#: slots with a meaning that others share: "m" a first moment of the gradient, "v" a second, "vmax" its maximum
MOMENTS = ("m", "v", "vmax")
BOTH = ("adam", "adamw", "nadamw", "radam", "qhadamw", "lamb")  # both moments, and a step count that corrects them
FIRST = ("sgd", "lion", "muon", "sophia")  # a first moment alone; the count plays no part
GIVES = (*BOTH, *FIRST, "kronpsgd")  # those whose m is a first moment of the gradient itself
WHY_NOT = {
    "soap": "m and v are in SOAP's rotated basis",
    "mars": "MARS averages corrected, clipped gradients",
    "adafactor": "Adafactor averages changes, not gradients",
}


def convert(opt: NamedOptimizer, name: str, settings: Mapping[str, Any]) -> NamedOptimizer:
    """The other optimizer, with a record for every parameter the first one knows."""
    engine, precision = opt._engine_choice
    new = named.create(name, **{"engine": engine, "precision": precision, "nonfinite": opt.nonfinite, **settings})
    new._skipped = opt._skipped
    for member in new._family():
        member._iteration = opt._iteration
    rows = [("parameter", "from", "to", "carried over", "dropped")]
    for source in opt._family():
        for key, old in source._records.items():
            target, why = new._route(key, old.shape)
            record = Record(key, old.shape, target._settings.group_of(key))
            record.furnish(target._specs()[record.group], new._engine.allocate)
            carried, dropped = _carry(source, old, target, record)
            record.stepped = new._iteration if old.stepped == source._iteration else -1
            target._records[key], target._why[key] = record, why
            rows.append((key, source._owner, target._owner, carried, dropped))
    new._converted = table(rows)
    return new


def _carry(source: NamedOptimizer, old: Record, target: NamedOptimizer, new: Record) -> tuple[str, str]:
    """Fill a fresh record from an old one; what was carried over and what was not, in words."""
    giver, taker = type(source).__name__.lower(), type(target).__name__.lower()
    before, after = source._specs()[old.group], target._specs()[new.group]
    same = giver == taker and all(old.state.get(slot, np.empty(0)).shape == buffer.shape for slot, buffer in new.state.items())
    if same and (taker not in BOTH or before.values()["betas"] == after.values()["betas"]) and _gain(before) == _gain(after):
        slots, reason = dict.fromkeys(new.state, 1.0), "no such state"
        new.counters |= {k: v for k, v in old.counters.items() if k in new.counters}
    else:
        slots, reason = _shared(giver, before, taker, after, old, new)
    counted = bool(slots) or taker in FIRST
    if counted:
        new.t = old.t
        new.counters = _counters(after, new, bool(slots))
    for slot, factor in slots.items():
        new.state[slot][...] = old.state[slot] if factor == 1 else old.state[slot] * np.float32(factor)
    scaled = [f"{slot} (×{factor:g})" if factor != 1 else slot for slot, factor in slots.items()]
    kept = [*scaled, *([f"step count {old.t}"] if counted else [])]
    lost = [slot for slot in old.state if slot not in slots] + ([] if counted or not old.t else [f"step count {old.t}"])
    return ", ".join(kept) or "nothing", f"{', '.join(lost)}: {reason}" if lost else "nothing"


def _shared(giver: str, before: Spec, taker: str, after: Spec, old: Record, new: Record) -> tuple[dict[str, float], str]:
    """The slots two different optimizers share, each with its factor; and why there are no more."""
    title = OPTIMIZERS[taker][1]
    if taker not in BOTH + FIRST:
        return {}, f"{title} has to start afresh"
    if giver not in GIVES:
        return {}, WHY_NOT[giver]
    if taker in BOTH and not {"m", "v"} <= old.state.keys():
        return {}, f"{title} needs both moments for its bias correction, and there is no v"
    both = [slot for slot in MOMENTS if slot in old.state and slot in new.state]
    factors = _factors(before, after, old, taker)
    if not both or not old.t or not all(math.isfinite(factors[slot]) and factors[slot] for slot in both):
        return {}, f"{title} has no such state here"
    return {slot: factors[slot] for slot in both}, f"{title} has no such state"


def _factors(before: Spec, after: Spec, old: Record, taker: str) -> dict[str, float]:
    """By what to multiply the moments so that they mean the same."""
    first, second = 1.0, 1.0
    if taker in BOTH:
        was, will = _corrections(before, old.t), _corrections(after, old.t)
        first, second = will[0] / was[0], will[1] / was[1]
    gain = _gain(before)
    return {"m": first * _gain(after) / gain if gain else math.inf, "v": second, "vmax": second}


def _corrections(spec: Spec, t: int) -> tuple[float, float]:
    """The bias corrections of both moments at step t."""
    values: Any = spec.values()
    if values.get("bias_correction") is False:
        return 1.0, 1.0
    beta1, beta2 = values["betas"]
    product = _mu_product(spec, t) if "mu_product" in spec.counters() else beta1**t
    return 1 - product, 1 - beta2**t


def _gain(spec: Spec) -> float:
    """How many times the average of the gradients a first moment is."""
    values: Any = spec.values()
    if "dampening" in values:  # SGD: momentum·m + (1 − dampening)·g
        return (1 - values["dampening"]) / (1 - values["momentum"]) if values["momentum"] < 1 else math.inf
    return 1 / (1 - values["momentum"]) if values.get("convention") == "rlx" and "ns_steps" in values else 1.0


@functools.cache
def _mu_product(spec: Spec, t: int) -> float:
    """NAdamW's, after t steps with these settings."""
    product = 1.0
    for n in range(1, t + 1):
        product = spec.scalars(n, {"mu_product": product})["mu_product"]
    return product


def _counters(spec: Spec, new: Record, started: bool) -> dict[str, float]:
    """A rule's counters after t steps: as they were, or as far as they follow from t."""
    known: dict[str, float] = {"started": int(started)}
    if "mu_product" in new.counters:
        known["mu_product"] = _mu_product(spec, new.t)
    fresh = spec.counters()
    return {k: known[k] if v == fresh[k] and k in known else v for k, v in new.counters.items()}
