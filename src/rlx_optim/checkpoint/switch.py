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
from ..routing import table
from ..spec import Spec
from ..stepping import TensorState
from ..storage import NUMPY, Quantized, decode, filled

#: what optimizers with these words mean by them is the same to all
FIRST, SECOND, LARGEST = "first moment", "second moment", "largest second moment"


def convert(opt: NamedOptimizer, name: str, settings: Mapping[str, Any]) -> NamedOptimizer:
    """The other optimizer, with a record for every parameter the first one knows."""
    engine, precision, stored = opt._engine_choice
    new = named.create(
        name, **{"engine": engine, "precision": precision, "nonfinite": opt.nonfinite, "skip_above": opt.skip_above, **settings}
    )
    new._skipped = opt._skipped
    for member in new._family():
        member._store(stored)
        member._iteration = opt._iteration
    rows = [("parameter", "from", "to", "carried over", "dropped")]
    for source in opt._family():
        for key, old in source._records.items():
            target, why = new._route(key, old.shape)
            record = TensorState(key, old.shape, target._settings.group_of(key))
            record.init_state(target._specs()[record.group], new._engine.allocate)
            carried, dropped = _carry(source, old, target, record)
            record.stepped = new._iteration if old.stepped == source._iteration else -1
            target._records[key], target._why[key] = record, why
            rows.append((key, source._owner, target._owner, carried, dropped))
    new._converted = table(rows)
    return new


def _carry(source: NamedOptimizer, old: TensorState, target: NamedOptimizer, new: TensorState) -> tuple[str, str]:
    """Fill a fresh record from an old one; what was carried over and what was not, in words."""
    before, after = source._specs()[old.group], target._specs()[new.group]
    same = source.spec is target.spec and all(
        old.state.get(slot, np.empty(0)).shape == buffer.shape for slot, buffer in new.state.items()
    )
    alike = SECOND not in _meanings(after, new) or _corrections(before, old.t) == _corrections(after, old.t)
    if same and alike and before.momentum_gain() == after.momentum_gain():
        slots, reason = {slot: (slot, 1.0) for slot in new.state}, "no such state"
        new.counters |= {k: v for k, v in old.counters.items() if k in new.counters}
    else:
        slots, reason = _shared(before, after, old, new)
    counted = bool(slots) or _timeless(after)
    if counted:
        new.t = old.t
        new.counters = _counters(after, new, bool(slots))
    for slot, (its, factor) in slots.items():
        _put(target, new, slot, old.state[its], factor)
    scaled = [f"{slot} (×{factor:g})" if factor != 1 else slot for slot, (_, factor) in slots.items()]
    kept = [*scaled, *([f"step count {old.t}"] if counted else [])]
    gone = old.state.keys() - {its for its, _ in slots.values()}
    lost = [slot for slot in old.state if slot in gone] + ([] if counted or not old.t else [f"step count {old.t}"])
    return ", ".join(kept) or "nothing", f"{', '.join(lost)}: {reason}" if lost else "nothing"


def _put(target: NamedOptimizer, new: TensorState, slot: str, old: Any, factor: float) -> None:
    """A slot's values, times a factor, in what they are kept in here."""
    buffer = new.state[slot]
    if isinstance(old, Quantized) and isinstance(buffer, Quantized) and buffer.storage == old.storage and factor == 1:
        for end, part in buffer.components.items():
            part[...] = old.components[end]
        return
    values = decode(NUMPY, old) if isinstance(old, Quantized) else old
    filled(target._engine, buffer, values if factor == 1 else values * values.dtype.type(factor))


def _meanings(spec: Spec, record: TensorState) -> dict[str, str]:
    """What is kept -> the first slot of that meaning."""
    found: dict[str, str] = {}
    for name, slot in spec.slots(record.shape).items():
        if name in record.state:
            found.setdefault(slot.meaning, name)
    return found


def _timeless(spec: Spec) -> bool:
    """Whether the step count plays no part in the rule."""
    first = spec.counters()
    return not spec.branches and spec.scalars(1, first) == spec.scalars(2, first)


def _shared(before: Spec, after: Spec, old: TensorState, new: TensorState) -> tuple[dict[str, tuple[str, float]], str]:
    """The slots of one optimizer that mean the same to another: new name -> old name and a factor; and why there are no more."""
    has, wants = _meanings(before, old), _meanings(after, new)
    if FIRST not in wants or any(slot.factor for slot in after.slots(old.shape).values()):
        return {}, f"{after.title} has to start afresh"
    if FIRST not in has:
        return {}, f"to {before.title} they are {' and '.join(has)}" if has else "there is none"
    if any(each.startswith(SECOND) and each not in has for each in wants):
        return {}, f"{after.title} needs both moments for its bias correction, and there is no second"
    factors = _factors(before, after, old.t, SECOND in wants)
    both = {wants[each]: (has[each], factors[each]) for each in factors if each in has and each in wants}
    if not old.t or not all(math.isfinite(factor) and factor for _, factor in both.values()):
        return {}, f"{after.title} has no such state here"
    return both, f"{after.title} has no such state"


def _factors(before: Spec, after: Spec, t: int, corrected: bool) -> dict[str, float]:
    """By what to multiply the moments so that they mean the same."""
    was, will = (_corrections(spec, t) if corrected else (1.0, 1.0) for spec in (before, after))
    gain = before.momentum_gain()
    first = after.momentum_gain() / gain if gain else math.inf
    first *= will[0] / was[0] if was[0] else math.inf
    second = will[1] / was[1] if was[1] else math.inf
    return {FIRST: first, SECOND: second, LARGEST: second}


def _corrections(spec: Spec, t: int) -> tuple[float, float]:
    return spec.corrections(t, _replayed(spec, t))


@functools.cache
def _replayed(spec: Spec, t: int) -> Mapping[str, float]:
    """The counters after t steps with these settings, as far as `scalars` moves them."""
    counters: dict[str, float] = spec.counters()
    for n in range(1, t + 1) if counters else ():
        moved = spec.scalars(n, counters)
        after = {k: moved.get(k, v) for k, v in counters.items()}
        if after == counters:
            break
        counters = after
    return counters


def _counters(spec: Spec, new: TensorState, carried: bool) -> dict[str, float]:
    """A rule's counters after t steps: as they were, or as far as they follow from t. Averages not carried over begin anew."""
    fresh, after = spec.counters(), _replayed(spec, new.t) if carried else {}
    return {k: after.get(k, v) if v == fresh[k] else v for k, v in new.counters.items()}
