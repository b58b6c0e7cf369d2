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

from ..numpy import classes
from ..numpy.optimizer import NamedOptimizer
from ..routing import table
from ..spec import Slot, Spec
from ..storage import COMPONENTS
from .format import Tensor, make_tensor
from .optimizers import parameters_of, restore
from .snapshot import Parameter

#: what optimizers with these words mean by them is the same to all
FIRST, SECOND, LARGEST = "first moment", "second moment", "largest second moment"


def convert(opt: NamedOptimizer, name: str, settings: Mapping[str, Any]) -> NamedOptimizer:
    """The other optimizer, with state for every parameter the first one knows."""
    engine, precision, stored = opt._engine_choice
    new = classes.create(
        name, **{"engine": engine, "precision": precision, "nonfinite": opt.nonfinite, "skip_above": opt.skip_above, **settings}
    )
    new._skipped = opt._skipped
    family, rows = list(new._family()), [("parameter", "from", "to", "carried over", "dropped")]
    converted: dict[str, Parameter] = {}
    for source, before, key, p in parameters_of(opt):
        target, why = new._route(key, p.shape)
        group = target._settings.group_of(key)
        after = target._specs()[group]
        converted[key] = Parameter(
            family.index(target), group, p.shape, 0, {}, after.counters(), p.dtype, piece=p.shape, reason=why, stepped=p.stepped
        )
        rows.append((key, source._owner, target._owner, *_carry_over(before, p, after, converted[key])))
    restore(dict(enumerate(family)), converted, opt._iteration, stored)
    new._converted = table(rows)
    return new


def _carry_over(before: Spec, old: Parameter, after: Spec, new: Parameter) -> tuple[str, str]:
    """Fill a parameter of a snapshot from one of another optimizer; what was carried over and what was not, in words."""
    has, wants = old.used(before), new.slots(after)
    same = type(before) is type(after) and all(slot in has and has[slot][0].shape == wants[slot][0].shape for slot in wants)
    corrections = (_compute_corrections(spec, old.step) for spec in (before, after))
    alike = SECOND not in _index_by_meaning(wants) or len({*corrections}) == 1
    if same and alike and before.momentum_gain() == after.momentum_gain():
        slots, reason = {slot: (slot, 1.0) for slot in wants}, "no such state"
        new.counters |= {k: v for k, v in old.counters.items() if k in new.counters}
    else:
        slots, reason = _match_slots(before, after, old, new)
    counted = bool(slots) or _is_timeless(after)
    if counted:
        new.step = old.step
        new.counters = _carry_counters(after, new, bool(slots))
    for slot, (its, factor) in slots.items():
        new.tensors |= _scale_slot(old, its, slot, factor)
    scaled = [f"{slot} (×{factor:g})" if factor != 1 else slot for slot, (_, factor) in slots.items()]
    kept = [*scaled, *([f"step count {old.step}"] if counted else [])]
    gone = has.keys() - {its for its, _ in slots.values()}
    lost = [slot for slot in has if slot in gone] + ([] if counted or not old.step else [f"step count {old.step}"])
    return ", ".join(kept) or "nothing", f"{', '.join(lost)}: {reason}" if lost else "nothing"


def _scale_slot(old: Parameter, its: str, slot: str, factor: float) -> dict[str, Tensor]:
    """The components of a slot under another name; its values, where they are multiplied."""
    if factor == 1:
        return {slot + end: old.tensors[its + end] for end in COMPONENTS[old.storage_of(its)]}
    values = old.values(its)
    return {slot: make_tensor(values * values.dtype.type(factor))}


def _index_by_meaning(slots: Mapping[str, tuple[Slot, ...]]) -> dict[str, str]:
    """What is kept -> the first slot of that meaning."""
    found: dict[str, str] = {}
    for name, (slot,) in slots.items():
        found.setdefault(slot.meaning, name)
    return found


def _is_timeless(spec: Spec) -> bool:
    """Whether the step count plays no part in the rule."""
    first = spec.counters()
    return not spec.step_dependent and spec.scalars(1, first) == spec.scalars(2, first)


def _match_slots(before: Spec, after: Spec, old: Parameter, new: Parameter) -> tuple[dict[str, tuple[str, float]], str]:
    """The slots of one optimizer that mean the same to another: new name -> old name and a factor; and why there are no more."""
    has, wants = _index_by_meaning(old.used(before)), _index_by_meaning(new.slots(after))
    if FIRST not in wants or any(slot.factor for slot in after.slots(old.shape).values()):
        return {}, f"{after.title} has to start afresh"
    if FIRST not in has:
        return {}, f"to {before.title} they are {' and '.join(has)}" if has else "there is none"
    if any(each.startswith(SECOND) and each not in has for each in wants):
        return {}, f"{after.title} needs both moments for its bias correction, and there is no second"
    factors = _find_factors(before, after, old.step, SECOND in wants)
    both = {wants[each]: (has[each], factors[each]) for each in factors if each in has and each in wants}
    if not old.step or not all(math.isfinite(factor) and factor for _, factor in both.values()):
        return {}, f"{after.title} has no such state here"
    return both, f"{after.title} has no such state"


def _find_factors(before: Spec, after: Spec, t: int, corrected: bool) -> dict[str, float]:
    """By what to multiply the moments so that they mean the same."""
    was, will = (_compute_corrections(spec, t) if corrected else (1.0, 1.0) for spec in (before, after))
    gain = before.momentum_gain()
    first = after.momentum_gain() / gain if gain else math.inf
    first *= will[0] / was[0] if was[0] else math.inf
    second = will[1] / was[1] if was[1] else math.inf
    return {FIRST: first, SECOND: second, LARGEST: second}


def _compute_corrections(spec: Spec, t: int) -> tuple[float, float]:
    return spec.corrections(t, _replay_counters(spec, t))


@functools.cache
def _replay_counters(spec: Spec, t: int) -> Mapping[str, float]:
    """The counters after t steps with these settings, as far as `scalars` moves them."""
    counters: dict[str, float] = spec.counters()
    for n in range(1, t + 1) if counters else ():
        moved = spec.scalars(n, counters)
        after = {k: moved.get(k, v) for k, v in counters.items()}
        if after == counters:
            break
        counters = after
    return counters


def _carry_counters(spec: Spec, new: Parameter, carried: bool) -> dict[str, float]:
    """A rule's counters after t steps: as they were, or as far as they follow from t. Averages not carried over begin anew."""
    fresh, after = spec.counters(), _replay_counters(spec, new.step) if carried else {}
    return {k: after.get(k, v) if v == fresh[k] else v for k, v in new.counters.items()}
