"""The manifest: what a checkpoint says beside its tensors, as JSON. `docs/checkpoint-format.md` describes it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..registry import known
from ..routing import OTHERWISE, OWN
from ..spec import Shape
from .format import CheckpointError, Tensor
from .reader import strict_json, whole
from .snapshot import Group, Member, Parameter, Snapshot, Values, check

VERSIONS = (1, 2)  # 2: some state is in fewer bits


# ---- to JSON ------------------------------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """A hyperparameter as JSON has it: functions are null, infinity is a word, tuples are lists."""
    if isinstance(value, (tuple, list)):
        return [plain(x) for x in value]
    if callable(value):
        return None
    if isinstance(value, (float, np.floating)):
        return "Infinity" if value == math.inf else float(value)
    return value.item() if isinstance(value, np.generic) else value


def number(value: Any) -> float:
    """A counter, as an integer where it is one."""
    return int(value) if isinstance(value, (int, np.integer)) else float(value)


def encode(snapshot: Snapshot, after: int = 0) -> str:
    """The manifest. It is dated now, but later than `after`, whatever the clock says."""
    version = getattr(sys.modules[__name__.partition(".")[0]], "__version__", "")
    return json.dumps(
        {
            "format_version": 2 if any(each.dtype.kind != "f" for each in snapshot.tensors().values()) else 1,
            "written_by": f"rlx_optim {version}",
            "front_end": snapshot.front_end,
            "saved_ns": max(time.time_ns(), after + 1),
            "iteration": snapshot.iteration,
            "skipped": snapshot.skipped,
            "nonfinite": snapshot.nonfinite,
            "skip_above": snapshot.skip_above,
            **({"skip_window": snapshot.window} if snapshot.window else {}),
            "optimizers": [_encoded_member(member) for member in snapshot.members],
            "parameters": {name: _encoded_parameter(p) for name, p in snapshot.parameters.items()},
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _encoded_values(values: Values) -> dict[str, Any]:
    hyperparameters = {k: plain(v) for k, v in values.hyperparameters.items()}
    return {"hyperparameters": hyperparameters, "callables": values.callables, "extra": values.extra}


def _encoded_member(member: Member) -> dict[str, Any]:
    groups = [
        {"match": g.match, "otherwise": g.use == OTHERWISE, "overrides": g.overrides, **_encoded_values(g.values)}
        | ({} if g.use in (None, OTHERWISE) else {"use": g.use})
        for g in member.groups
    ]
    return {"name": member.optimizer, **_encoded_values(member.values), "groups": groups}


def _encoded_parameter(p: Parameter) -> dict[str, Any]:
    entry = {
        "optimizer": p.member,
        "group": p.group,
        "shape": list(p.shape),
        "dtype": p.dtype,
        "step": p.step,
        "counters": {k: number(v) for k, v in p.counters.items()},
        "reason": p.reason,
        "stepped": p.stepped,
        "pieces": p.pieces,
        "piece": list(p.piece),
    }
    entry |= {"parts": list(p.parts)} if p.parts else {}
    return entry


# ---- from JSON ----------------------------------------------------------------------------------------------------------
def get(table: Any, key: str, kind: Any, where: str) -> Any:
    """An entry of the manifest, of the kind it must be."""
    if not isinstance(table, dict) or key not in table:
        raise CheckpointError(f"{where} lacks {key!r}")
    value = table[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{where}: {key!r} cannot be {value!r:.80}")
    return value


def natural(table: Any, key: str, where: str) -> int:
    value: int = get(table, key, int, where)
    if not whole(value):
        raise CheckpointError(f"{where}: {key!r} must be a whole number from 0 on, got {value!r:.80}")
    return value


def texts(table: Any, key: str, where: str) -> list[str]:
    values: list[str] = get(table, key, list, where)
    if not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{where}: {key!r} must be a list of names, got {values!r:.80}")
    return values


def shape_of(table: Any, key: str, where: str) -> Shape:
    value = get(table, key, list, where)
    if not all(map(whole, value)) or len(value) > 64:
        raise CheckpointError(f"{where}: {key!r} must be a list of whole numbers, got {value!r:.80}")
    return tuple(value)


def parsed(text: str) -> Any:
    """The manifest as JSON, of a version that can be read."""
    manifest = strict_json(text, "the manifest")
    version = natural(manifest, "format_version", "the manifest")
    if version not in VERSIONS:
        raise CheckpointError(
            f"format version {version} is not known here (this rlx_optim reads {' and '.join(map(str, VERSIONS))}); "
            "it was written by "
            f"{manifest.get('written_by', 'another program')!r:.80}"
        )
    return manifest


def decode(manifest: Any, tensors: Mapping[str, Tensor]) -> Snapshot:
    """A snapshot from a manifest and the file's tensors."""
    members = [_member(each, f"optimizer {i}") for i, each in enumerate(get(manifest, "optimizers", list, "the manifest"))]
    slots: dict[str, dict[str, Tensor]] = {}
    for full, each in tensors.items():
        name, slash, slot = full.rpartition("/")
        if not slash:
            raise CheckpointError(f"tensor {full!r} is not named <parameter>/<slot>")
        slots.setdefault(name, {})[slot] = each
    entries = get(manifest, "parameters", dict, "the manifest")
    if strangers := slots.keys() - entries.keys():
        name = min(strangers)
        raise CheckpointError(f"tensor {name + '/' + min(slots[name])!r} belongs to no parameter of the manifest")
    parameters = {name: _parameter(entry, slots.get(name, {}), f"parameter {name!r}") for name, entry in entries.items()}
    snapshot = Snapshot(
        members,
        parameters,
        natural(manifest, "iteration", "the manifest"),
        natural(manifest, "skipped", "the manifest"),
        get(manifest, "nonfinite", str, "the manifest"),
        get(manifest, "front_end", str, "the manifest"),
        get(manifest, "written_by", str, "the manifest"),
        natural_ns(manifest),
        manifest.get("skip_above"),  # older files have none
        manifest.get("skip_window", {}),
    )
    check(snapshot)
    return snapshot


def natural_ns(manifest: Any) -> int:
    """When it was saved, in nanoseconds since 1970."""
    value: int = get(manifest, "saved_ns", int, "the manifest")
    if not whole(value, 2**63):
        raise CheckpointError(f"the manifest: 'saved_ns' cannot be {value!r:.80}")
    return value


def _values(table: Any, where: str) -> Values:
    def read(value: Any) -> Any:
        return tuple(map(read, value)) if isinstance(value, list) else math.inf if value == "Infinity" else value

    given = {k: read(v) for k, v in get(table, "hyperparameters", dict, where).items()}
    return Values(given, texts(table, "callables", where), get(table, "extra", dict, where))


def _member(table: Any, where: str) -> Member:
    name = get(table, "name", str, where)
    if name not in known():
        raise CheckpointError(f"it is of {name!r:.80}, which is not registered; import the package that defines it")
    groups = [_group(each, f"group {i} of {name}") for i, each in enumerate(get(table, "groups", list, where))]
    return Member(name, _values(table, where), groups)


def _group(table: Any, where: str) -> Group:
    match = get(table, "match", str | list | None, where)
    if isinstance(match, list):
        match = texts(table, "match", where)
    use = OTHERWISE if get(table, "otherwise", bool, where) else table.get("use")
    if use not in (None, OWN, OTHERWISE):
        use = natural(table, "use", where)
    return Group(_values(table, where), match, use, texts(table, "overrides", where))


def _parameter(table: Any, tensors: dict[str, Tensor], where: str) -> Parameter:
    counters = get(table, "counters", dict, where)
    for name, value in counters.items():
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise CheckpointError(f"{where}: counter {name!r} cannot be {value!r:.80}")
    return Parameter(
        natural(table, "optimizer", where),
        None if table.get("group") is None else natural(table, "group", where),
        shape_of(table, "shape", where),
        natural(table, "step", where),
        tensors,
        counters,
        get(table, "dtype", str, where),
        natural(table, "pieces", where),
        shape_of(table, "piece", where),
        get(table, "reason", str, where),
        get(table, "stepped", bool, where),
        shape_of(table, "parts", where) if "parts" in table else (),
        table.get("generator"),
    )
