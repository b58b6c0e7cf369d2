"""Names of 0.2 that optimizers outside this package may use: they work in 0.3, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from typing import Any

#: operations of E: the method of that name now, or the function of `linalg` or `basis` that takes E first
OPERATIONS = {
    "most": "amax", "lines": "sum_squares", "scaled": "scale", "difference": "subtract", "cap": "minimum", "product": "matmul",
    "less": "matmul_sub", "precise": "matmul_precise", "square": "syrk", "wide": "to_float64", "narrow": "to_storage_dtype",
    "solve": "solve_triangular", "real": "to_real", "jointly": "defer",
    "keyed": "derive_keys", "bound": "bind_rule", "one_number": "number_of",
    "average_gram": "linalg.average_gram", "upper": "linalg.triangular_matmul", "inverse": "linalg.invert_permutation",
    "upper_transposed": "linalg.triangular_matmul_transposed", "upper_upper": "linalg.triangular_product",
    "diagonal": "basis.column_dots", "applied": "basis.gram_matmul", "reordered": "basis.permute_columns",
    "orthonormal": "basis.orthonormalize", "alike": "basis.map_by_size",
}  # fmt: skip
#: functions of `rlx_optim.rule.linalg`
FUNCTIONS = {
    "along": "linalg.apply_along_axis", "every": "linalg.apply_factors", "rotated": "linalg.rotate", "finite": "linalg.is_finite",
    "of_each_step": "linalg.step_coefficients", "orthogonalize": "linalg.newton_schulz", "eigenbasis": "basis.eigenbasis",
    "orthonormal": "basis.orthonormalize.default", "minor": "basis.below_rounding", "descending": "basis.descending_order",
}  # fmt: skip

#: what `rlx_optim.rule` has
WORDS = {"less_power": "one_minus_power"}

#: what the class of an optimizer says of itself
ATTRIBUTES = {
    "everywhere": "accepts_any_shape", "branches": "step_dependent", "piled": "unstacked_factors", "asks": "syncs_on",
    "ragged": "mixed_shapes", "replays": "graph_safe", "unfit": "incompatible", "structure": "static_key",
}  # fmt: skip


def take_attributes(cls: type) -> None:
    """Let a class say the old names: each becomes the new one."""
    for old in ATTRIBUTES.keys() & vars(cls).keys():
        warn(f"{cls.__name__}.{old}", ATTRIBUTES[old])
        setattr(cls, ATTRIBUTES[old], vars(cls)[old])
        delattr(cls, old)


def find_operation(E: Any, name: str) -> Any:
    """The operation of an engine that had this name."""
    if (new := OPERATIONS.get(name)) is None:
        raise AttributeError(f"{type(E).__name__!r} object has no attribute {name!r}")
    warn(f"E.{name}", new if "." in new else f"E.{new}")
    return functools.partial(_function(new), E) if "." in new else getattr(E, new)


def find_function(name: str) -> Any:
    """The function of `linalg` that had this name."""
    if (new := FUNCTIONS.get(name)) is None:
        raise AttributeError(f"module 'rlx_optim.linalg' has no attribute {name!r}")
    warn(f"linalg.{name}", new)
    return _function(new)


def warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} since 0.3; the old name goes in 0.4", DeprecationWarning, stacklevel=5)


def _function(path: str) -> Any:
    from . import basis, linalg

    module, *names = path.split(".")
    return functools.reduce(getattr, names, {"basis": basis, "linalg": linalg}[module])
