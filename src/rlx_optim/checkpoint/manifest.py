"""The manifest: what a checkpoint says beside its tensors, as JSON. `docs/checkpoint-format.md` describes it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..registry import known
from ..routing import OTHERWISE, OWN
from .format import CheckpointError, Tensor
from .reader import is_shape, is_whole_number, parse_strict_json
from .snapshot import Group, Parameter, SavedOptimizer, SavedSettings, Snapshot, check_snapshot

VERSIONS = (1, 2)  # 2: some state is in fewer bits


# ---- to JSON ------------------------------------------------------------------------------------------------------------
def to_json_value(value: Any) -> Any:
    """A hyperparameter as JSON has it: functions are null, infinity is a word, tuples are lists."""
    if isinstance(value, (tuple, list)):
        return [to_json_value(x) for x in value]
    if callable(value):
        return None
    if isinstance(value, (float, np.floating)):
        return "Infinity" if value == math.inf else float(value)
    return value.item() if isinstance(value, np.generic) else value


def to_json_number(value: Any) -> float:
    """A counter, as an integer where it is one."""
    return int(value) if abs(value) < 2**53 and float(value).is_integer() else float(value)


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
            "optimizers": [_encode_member(member) for member in snapshot.members],
            "parameters": {name: _encode_parameter(p) for name, p in snapshot.parameters.items()},
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _encode_values(values: SavedSettings) -> dict[str, Any]:
    hyperparameters = {k: to_json_value(v) for k, v in values.hyperparameters.items()}
    return {"hyperparameters": hyperparameters, "callables": values.callables, "extra": values.extra}


def _encode_member(member: SavedOptimizer) -> dict[str, Any]:
    groups = [
        {"match": g.match, "otherwise": g.use == OTHERWISE, "overrides": g.overrides, **_encode_values(g.values)}
        | ({} if g.use in (None, OTHERWISE) else {"use": g.use})
        for g in member.groups
    ]
    return {"name": member.optimizer, **_encode_values(member.values), "groups": groups}


def _encode_parameter(p: Parameter) -> dict[str, Any]:
    entry = {"optimizer": p.member, "counters": {k: to_json_number(v) for k, v in p.counters.items()}}
    same = ("group", "shape", "dtype", "step", "reason", "stepped", "pieces", "piece", *(["parts"] if p.parts else []))
    return entry | {name: to_json_value(getattr(p, name)) for name in same}


# ---- from JSON ----------------------------------------------------------------------------------------------------------
#: what an entry may be, in words, and whether a value is that
NATURAL = "must be a whole number from 0 on", is_whole_number
DATE = "must be a whole number from 0 on", lambda value: is_whole_number(value, 2**63)
TEXT = "must be a text", lambda value: isinstance(value, str)
FLAG = "must be true or false", lambda value: isinstance(value, bool)
TABLE = "must be an object", lambda value: isinstance(value, dict)
LIST = "must be a list", lambda value: isinstance(value, list)
NAMES = "must be a list of names", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
PATTERN = "must be a name, a list of names or null", lambda value: value is None or TEXT[1](value) or NAMES[1](value)
SHAPE = "must be a list of whole numbers", is_shape
COUNTER = "must be a number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max
Kind = tuple[str, Callable[[Any], bool]]


def get(table: Any, key: str, kind: Kind, where: str) -> Any:
    """An entry of the manifest, of the kind it must be."""
    if not isinstance(table, dict) or key not in table:
        raise CheckpointError(f"{where} lacks {key!r}")
    expected, fits = kind
    if not fits(table[key]):
        raise CheckpointError(f"{where}: {key!r} {expected}, got {table[key]!r:.80}")
    return tuple(table[key]) if kind is SHAPE else table[key]


def get_all(table: Any, where: str, **kinds: Kind) -> dict[str, Any]:
    """Some entries of the manifest."""
    return {key: get(table, key, kind, where) for key, kind in kinds.items()}


def parse_manifest(text: str) -> Any:
    """The manifest as JSON, of a version that can be read."""
    manifest = parse_strict_json(text, "the manifest")
    version = get(manifest, "format_version", NATURAL, "the manifest")
    if version not in VERSIONS:
        raise CheckpointError(
            f"format version {version} is not known here (this rlx_optim reads {' and '.join(map(str, VERSIONS))}); "
            f"it was written by {manifest.get('written_by', 'another program')!r:.80}"
        )
    return manifest


def decode(manifest: Any, tensors: Mapping[str, Tensor]) -> Snapshot:
    """A snapshot from a manifest and the file's tensors."""
    what = "the manifest"
    members = [_decode_member(each, f"optimizer {i}") for i, each in enumerate(get(manifest, "optimizers", LIST, what))]
    slots: dict[str, dict[str, Tensor]] = {}
    for full, each in tensors.items():
        name, slash, slot = full.rpartition("/")
        if not slash:
            raise CheckpointError(f"tensor {full!r} is not named <parameter>/<slot>")
        slots.setdefault(name, {})[slot] = each
    table = get(manifest, "parameters", TABLE, what)
    if strangers := slots.keys() - table.keys():
        name = min(strangers)
        raise CheckpointError(f"tensor {name + '/' + min(slots[name])!r} belongs to no parameter of the manifest")
    snapshot = Snapshot(
        members,
        {name: _decode_parameter(entry, slots.get(name, {}), f"parameter {name!r}") for name, entry in table.items()},
        **get_all(manifest, what, iteration=NATURAL, skipped=NATURAL, nonfinite=TEXT, front_end=TEXT, written_by=TEXT),
        saved_ns=saved_ns(manifest),
        skip_above=manifest.get("skip_above"),  # older files have none
        window=manifest.get("skip_window", {}),
    )
    check_snapshot(snapshot)
    return snapshot


def saved_ns(manifest: Any) -> int:
    """When it was saved, in nanoseconds since 1970."""
    return int(get(manifest, "saved_ns", DATE, "the manifest"))


def _decode_values(table: Any, where: str) -> SavedSettings:
    def read(value: Any) -> Any:
        return tuple(map(read, value)) if isinstance(value, list) else math.inf if value == "Infinity" else value

    found = SavedSettings(**get_all(table, where, hyperparameters=TABLE, callables=NAMES, extra=TABLE))
    found.hyperparameters = {k: read(v) for k, v in found.hyperparameters.items()}
    return found


def _decode_member(table: Any, where: str) -> SavedOptimizer:
    name = get(table, "name", TEXT, where)
    if name not in known():
        raise CheckpointError(f"the checkpoint is of {name!r:.80}, which is not registered; import the package that defines it")
    groups = [_decode_group(each, f"group {i} of {name}") for i, each in enumerate(get(table, "groups", LIST, where))]
    return SavedOptimizer(name, _decode_values(table, where), groups)


def _decode_group(table: Any, where: str) -> Group:
    use = OTHERWISE if get(table, "otherwise", FLAG, where) else table.get("use")
    if use not in (None, OWN, OTHERWISE):
        use = get(table, "use", NATURAL, where)
    return Group(_decode_values(table, where), use=use, **get_all(table, where, match=PATTERN, overrides=NAMES))


def _decode_parameter(table: Any, tensors: dict[str, Tensor], where: str) -> Parameter:
    member, counters = get(table, "optimizer", NATURAL, where), get(table, "counters", TABLE, where)
    return Parameter(
        member,
        None if table.get("group") is None else get(table, "group", NATURAL, where),
        tensors=tensors,
        counters={name: get(counters, name, COUNTER, f"{where}: counters") for name in counters},
        parts=get(table, "parts", SHAPE, where) if "parts" in table else (),
        generator=table.get("generator"),
        **get_all(table, where, shape=SHAPE, step=NATURAL, dtype=TEXT, pieces=NATURAL, piece=SHAPE, reason=TEXT, stepped=FLAG),
    )
