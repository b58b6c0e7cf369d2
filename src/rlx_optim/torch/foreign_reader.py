"""State dicts of other libraries in our words, or a refusal that names the writer and the way out.

A group without "rule" is somebody else's. `layout_of` finds out whose, `settings_of` reads its settings, `state_of` a parameter's
state. What they do not know is refused: it may be what another optimizer's step reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import storage
from ..checkpoint.snapshot import describe_missing
from ..registry import OURS
from ..routing import quote
from ..spec import MODIFIERS, Foreign, Shape, Spec
from .foreign_table import LAYOUTS, SHARED, STRANGERS, Group, Only, Origin
from .state_dict import check_number, describe_value, restart_hint, state_error, unreadable_reason

#: what bitsandbytes wraps its state in, what is in it beside "state1" and "state2", and how many neighbours may share an absmax
WRAPPED = "__bnb_optimizer_quant_state__"
BESIDE = ("qmap1", "qmap2", "absmax1", "absmax2")
BLOCKS = (256, 2048, 4096, 1024, 512, 128, 64)


# ---- whose a group is -------------------------------------------------------------------------------------------------------
def layout_of(owner: str, kind: type[Spec], group: Group, states: Sequence[Any], others: Sequence[str] = ()) -> Origin | None:
    """How a group of a checkpoint and the states of its parameters are laid out; None: as ours. others: what the user has in a
    group beside settings."""
    if "rule" in group:
        return None
    states = [state for state in states if isinstance(state, Mapping) and state]
    refuse_strangers(owner, group, states)
    if group.get("step") is not None:
        check_number(owner, "step", "a group", group["step"])
    fits = [row for row in make_rows(kind) if row.has(group, states)]
    if not fits:
        words = [quote(map(str, each)) for each in (group.keys() - {*SHARED}, *states[:1]) if each]
        writers = ", ".join(row.writer for row in make_rows(kind) if not row.refusal)
        raise ValueError(
            f"{owner}: the checkpoint is of another optimizer: its groups and states have {' and '.join(words) or 'nothing'}, as "
            f"none of these leaves them: {writers}; load it into the class that it is of, or start afresh"
        )
    row = min(fits, key=lambda each: len(each.unknown(group, others)))
    if row.refusal:
        raise ValueError(f"{owner}: the checkpoint is of {row.writer}, {row.refusal}")
    if row.kept and group.get("step") and not states:  # pytorch_optimizer's SCIONLight has its momentum in the gradients
        raise ValueError(
            f"{owner}: the checkpoint is of {row.writer}, whose group has taken {group['step']!r} steps, and no parameter of it "
            "has state; to start it afresh, take 'step' out of the group"
        )
    if unknown := row.unknown(group, others):
        settings = ", ".join(f"{name}={group[name]!r:.40}" for name in unknown)
        raise ValueError(
            f"{owner}: the groups of the checkpoint have {settings}, no setting of {row.writer}: it is another optimizer's, or "
            "of a version that is not known here. What is your own, take out, or put into this optimizer's groups too"
        )
    return row


def refuse_strangers(owner: str, group: Group, states: Sequence[Mapping[Any, Any]]) -> None:
    """Refuse what none of ours can take over."""
    words = [*group, *(word for state in states for word in state)]
    if any(isinstance(value, Mapping) for state in states for key, value in state.items() if isinstance(key, int)):
        words.append("storage_dtype")  # HeavyBall has a state for each of a parameter's views
    for word in words:
        if isinstance(word, str) and word in STRANGERS:
            raise ValueError(f"{owner}: {STRANGERS[word]}")


def make_rows(kind: type[Spec]) -> list[Origin]:
    """The classes whose state a rule may take over: others', torch.optim's, and whoever names every setting that it has."""
    rows = [row for row in LAYOUTS if row.rule == kind.name]
    make = getattr(torch.optim, kind.torch.like, None) if kind.torch.like else None
    if make is not None:
        words = inspect.signature(make).parameters
        convention = "convention" in kind.fields and "convention" not in {each.field for each in kind.torch.settings.values()}
        rows.append(
            Origin(
                f"torch.optim's {kind.torch.like}",
                kind.name,
                needs=" ".join(word for word in words if word in kind.fields and word not in SHARED),
                marks=" ".join(word for word in kind.torch.settings if word in words),
                reads=kind.torch.settings,
                idle="" if kind.torch.decoupled is None else "decoupled_weight_decay",
                makes=lambda group: {"convention": "torch"} if convention else {},
                counts=kind.torch.counts,
                own=True,
            )
        )
    every = " ".join(name for name in kind.fields if name not in MODIFIERS)
    also = {name: Foreign(name) for name in MODIFIERS}
    return [*rows, Origin(f"{kind.title} itself", kind.name, every, reads=also, counts=kind.torch.counts)]


# ---- settings ---------------------------------------------------------------------------------------------------------------
def settings_of(
    owner: str, kind: type[Spec], layout: Origin | None, group: dict[str, Any], ours: Group | None = None
) -> dict[str, Any]:
    """A group of a checkpoint in our words. ours: the group that it is for, whose settings go on where the file names none."""
    if layout is None:
        torchs = {*kind.torch.settings, *(["decoupled_weight_decay"] if kind.torch.decoupled is not None else [])}
        return {k: v for k, v in group.items() if k not in torchs}
    try:
        for name, each in layout.only.items():
            check_only(owner, layout, group, name, each)
        if problem := layout.problem(group):
            raise ValueError(f"{owner}: the checkpoint is of {layout.writer}, {problem}")
        check_decay(owner, kind, layout, group)
        found = {each.field: each.read(group[name]) for name, each in layout.reads.items() if name in group}
        follows = layout.makes(group)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as problem:
        raise ValueError(
            f"{owner}: the groups of the checkpoint are not as {layout.writer} leaves them: {type(problem).__name__}: {problem}"
        ) from None
    check_convention(owner, kind, layout, follows, ours)
    left_out = {*layout.marks.split(), *layout.idle.split(), *layout.only, *layout.reads, "step"} - {*layout.needs.split()}
    kept = {k: v for k, v in group.items() if k not in left_out}
    own = {k: v for k, v in (ours or {}).items() if k in kind.fields}
    found = {**own, **kept, **found, **follows}
    if torch.is_tensor(found.get("lr")) and not torch.is_tensor(own.get("lr")) and found["lr"].numel() == 1:
        found["lr"] = float(found["lr"])  # torchao's rates are tensors
    return found


def check_only(owner: str, layout: Origin, group: Group, name: str, only: Only) -> None:
    """Refuse a setting with which a rule is not ours."""
    if name not in group or (only.where and not group.get(only.where)):
        return
    value = group[name]
    if value is not only.value and (torch.is_tensor(value) or value != only.value):
        raise ValueError(
            f"{owner}: the checkpoint is of {layout.writer} with {name}={value!r}, which is not this rule{only.hint}"
        )


def check_decay(owner: str, kind: type[Spec], layout: Origin, group: Group) -> None:
    """Refuse the other kind of weight decay, where torch.optim's class can do both."""
    ours = kind.torch
    decoupled = group.get("decoupled_weight_decay", ours.assumed)  # older versions of torch do not say it
    if not layout.own or ours.decoupled is None or not group["weight_decay"] or decoupled == ours.decoupled:
        return
    beside = [k.title for k in OURS if k.torch.decoupled is decoupled and k.fields.keys() == kind.fields.keys()]
    hint = "".join(f"; load it into {title}" for title in beside)
    how = "decoupled" if decoupled else "coupled"
    raise ValueError(
        f"{owner}: the checkpoint has {how} weight decay ({group['weight_decay']!r}), which is not this rule's{hint}"
    )


def check_convention(owner: str, kind: type[Spec], layout: Origin, follows: Group, ours: Group | None) -> None:
    """Refuse to change a convention that was asked for, where the file does not name one."""
    wanted, asked = follows.get("convention"), (ours or {}).get("convention")
    usual = kind.torch.defaults.get("convention", kind.fields["convention"].default) if wanted else None
    if wanted is None or asked in (None, wanted) or (layout.own and asked == usual):
        return
    raise ValueError(
        f"{owner}: the checkpoint is of {layout.writer}, which is convention={wanted!r} here, and this optimizer has {asked!r}; "
        f"make it with convention={wanted!r}"
    )


# ---- the state of a parameter -----------------------------------------------------------------------------------------------
def unwrap_state(state: Any) -> Any:
    """A parameter's state as one flat dict."""
    if not isinstance(state, Mapping) or not isinstance(state.get(WRAPPED), Mapping):
        return state
    return {**{k: v for k, v in state.items() if k != WRAPPED}, **state[WRAPPED]}


def state_of(
    owner: str, spec: Spec, layout: Origin | None, group: Group, state: Mapping[str, Any], names: Sequence[str], shape: Shape,
    what: str,
) -> dict[str, Any]:  # fmt: skip
    """The state of a parameter in our words. names: those of its slots; what: the parameter's."""
    if layout is None or not state:
        return dict(state)
    if lacking := [key for key in layout.kept.split() if key not in state]:
        raise ValueError(f"{owner}: {describe_missing(lacking[0], what)}{restart_hint(what)}")
    given = dequantize(owner, dict(state), what)
    for key, value in given.items():
        if key != "step" and torch.is_tensor(value) and (unreadable_reason(value) or not value.is_floating_point()):
            raise state_error(owner, key, what, value, "a tensor of real numbers")
    step = group.get("step")
    if step is not None and not _is_equal(given.setdefault("step", step), step):
        own, of_group = describe_value(given["step"]), describe_value(step)
        raise ValueError(f"{owner}: 'step' of {what!r} is {own} in the checkpoint, and {of_group} in its group")
    try:
        given = layout.remade(spec, given, shape, group)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as problem:
        why = str(problem) if type(problem) is ValueError else f"its state is not as that leaves it ({problem})"
        raise ValueError(
            f"{owner}: the checkpoint is of {layout.writer}, and {what!r} of it cannot be taken over: {why}"
        ) from None
    unknown = [k for k in given if k in layout.slots.values() and k not in layout.slots]  # ours for what is in other words there
    given = {layout.slots.get(k, k): v for k, v in given.items() if k not in layout.idle.split()}
    for n, name in enumerate(names, 1):
        if f"state{n}" in given:
            given[name] = given.pop(f"state{n}")
    if not layout.counts:
        given.setdefault("step", 0.0)
    known = {"step", "batch", *spec.counters(), *(name + end for name in names for end in ("", *storage.BESIDE))}
    if unknown := unknown or [key for key, value in given.items() if key not in known and value is not None]:
        raise ValueError(
            f"{owner}: the checkpoint's state of {what!r} has {quote(unknown)}, which {layout.writer} does not keep: it is of "
            "another optimizer, or of a version that is not known here; what is your own, take out and put into opt.state again"
        )
    return {k: v for k, v in given.items() if k in known}


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return float(one) == float(other)
    except (TypeError, ValueError, RuntimeError):
        return False


def dequantize(owner: str, state: dict[str, Any], what: str) -> dict[str, Any]:
    """State of the 8-bit optimizers of bitsandbytes (codes, a table of what they mean, the largest of each block of neighbours)
    and of torchao (tensors that decode themselves), in numbers."""
    state = {k: v.dequantize() if hasattr(v, "codes") and hasattr(v, "dequantize") else v for k, v in state.items()}
    for n in (1, 2):
        if f"state{n}" not in state:
            continue
        for key in (f"{label}{n}" for label in ("state", "qmap", "absmax") if f"{label}{n}" in state):
            if unreadable_reason(state[key]):
                raise state_error(owner, key, what, state[key], "a tensor")
        if f"qmap{n}" in state:
            table, codes, largest = state[f"qmap{n}"], state[f"state{n}"], state.get(f"absmax{n}")
            # AdEMAMix has both averages in one
            several = largest is not None and largest.ndim == 2 and codes.shape[:1] == largest.shape[:1]
            each: list[Any] = list(zip(codes, largest, strict=True)) if several and largest is not None else [(codes, largest)]
            values = [decode_blocks(owner, codes, table, largest, what) for codes, largest in each]
            state[f"state{n}"] = torch.stack(values) if several else values[0]
    return {k: v for k, v in state.items() if k not in BESIDE}


def decode_blocks(owner: str, codes: torch.Tensor, table: torch.Tensor, largest: torch.Tensor | None, what: str) -> torch.Tensor:
    """The numbers that bitsandbytes' codes stand for."""
    block = None if largest is None else next((b for b in BLOCKS if -(-codes.numel() // b) == largest.numel()), None)
    if largest is None or block is None:
        raise ValueError(
            f"{owner}: the checkpoint has bitsandbytes' 8-bit state of {what!r} without blocks (block_wise=False), which "
            "is not read; load it there, train a step with block_wise=True or optim_bits=32, and save it again"
        )
    if codes.dtype is not torch.uint8 or table.shape != (256,):
        raise state_error(owner, "state1", what, codes, "codes of 8 bits with a table of 256 numbers")
    each = largest.float().flatten().repeat_interleave(block)[: codes.numel()]
    return (table.float()[codes.reshape(-1).long()] * each).reshape(codes.shape)
