"""What a caller's arrays must be before anything is written. Every refusal names the optimizer, the parameter and the fix."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..pointers import address
from ..routing import quote
from ..spec import Shape

#: flags of an array: C-contiguous and aligned; and writable
READABLE, WRITABLE = 0x0001 | 0x0100, 0x0001 | 0x0100 | 0x0400
VIEW: Any = ctypes.c_char.from_buffer
DTYPE, SHAPE, FLAGS, NBYTES = map(operator.attrgetter, ("dtype", "shape", "flags.num", "nbytes"))
TYPES = (np.dtype(np.float32), np.dtype(np.float64))
OTHERS = {"torch": "torch", "jax": "optax", "jaxlib": "optax"}  # whose arrays have a front end of their own


def check_array(owner: str, name: str, role: str, array: Any, writable: bool = False) -> None:
    what = f"{owner}: {role} of {name!r}"
    if not isinstance(array, np.ndarray):
        front = OTHERS.get(type(array).__module__.partition(".")[0])
        hint = f"; rlx_optim.{front} is for those" if front else ""
        if isinstance(array, np.generic):
            hint = "; keep it as an array: np.array(…)" if writable else "; pass np.asarray(…)"
        raise TypeError(f"{what} must be a NumPy array, got {type(array).__name__}{hint}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, and a step would ignore the mask; pass .filled(0) or .data")
    keep = "keep the parameter itself so: a copy made for the call would be stepped and lost" if writable else ""
    if array.dtype not in TYPES:
        raise TypeError(f"{what} must be float32 or float64, got {array.dtype}; {keep or 'convert it with .astype(np.float32)'}")
    if not array.flags.c_contiguous:
        mend = keep or "pass np.ascontiguousarray(…)"
        raise ValueError(f"{what} must be C-contiguous, got strides {array.strides}; {mend}")
    if not array.flags.aligned:
        raise ValueError(f"{what} must be aligned to {array.itemsize} bytes in memory; {keep or 'pass a copy'}")
    if writable and not array.flags.writeable:
        raise ValueError(f"{what} is read-only, and a step writes to it in place; pass a writable array")


def logical_shape(owner: str, name: str, param: np.ndarray, shape: Any) -> Shape:
    """The tensor's own shape, which a flat buffer is given beside it."""
    if shape is None:
        return param.shape
    try:
        wanted = tuple(map(operator.index, shape))
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: shape of {name!r} must be a tuple of integers, got {shape!r}") from None
    if any(n < 0 for n in wanted) or math.prod(wanted) != param.size:
        raise ValueError(f"{owner}: shape {wanted} of {name!r} does not multiply to its {param.size} elements")
    return wanted


def locate(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where arrays begin in memory."""
    try:
        return list(map(ctypes.addressof, map(VIEW, arrays)))
    except (TypeError, ValueError):  # one is read-only, or empty
        return list(map(address, arrays))


def locate_sound(
    params: Sequence[Any], grads: Sequence[Any], shapes: Sequence[Shape], dtype: str
) -> tuple[list[int], list[int]] | None:
    """Where parameters and gradients begin that pass every check below; None where one may not: those say which."""
    both = [*params, *grads]
    if set(map(type, both)) != {np.ndarray} or set(map(DTYPE, both)) != {np.dtype(dtype)}:
        return None
    if list(map(SHAPE, params)) != shapes or list(map(SHAPE, grads)) != shapes:
        return None
    if not all(flags & WRITABLE == WRITABLE for flags in set(map(FLAGS, params))):
        return None
    if not all(flags & READABLE == READABLE for flags in set(map(FLAGS, grads))):
        return None
    sides = locate(params), locate(grads)
    starts, others = (np.array(side, np.int64) for side in sides)
    sizes = np.array(list(map(NBYTES, params)), np.int64)
    order = np.argsort(starts)
    starts, ends = starts[order], (starts + sizes)[order]
    if (starts[1:] < ends[:-1]).any():
        return None
    after, before = np.searchsorted(ends, others, "right"), np.searchsorted(starts, others + sizes, "left")
    return None if (after < before).any() else sides


def locate_sound_pair(param: Any, grad: Any, shape: Shape, dtype: str) -> tuple[int, int] | None:
    """The same of one pair."""
    if type(param) is not np.ndarray or type(grad) is not np.ndarray or param.shape != shape or grad.shape != shape:
        return None
    if param.dtype != dtype or grad.dtype != dtype:
        return None
    if param.flags.num & WRITABLE != WRITABLE or grad.flags.num & READABLE != READABLE:
        return None
    (start,), (other,) = locate((param,)), locate((grad,))
    size = param.nbytes
    return (start, other) if start + size <= other or other + size <= start else None


def check_pair(owner: str, name: Any, param: Any, grad: Any, shape: Any) -> Shape:
    """Check one parameter and its gradient, and give the tensor's shape."""
    check_name(owner, name)
    check_array(owner, name, "parameter", param, writable=True)
    check_array(owner, name, "gradient", grad)
    if param.dtype != grad.dtype:
        raise TypeError(
            f"{owner}: gradient of {name!r} must be {param.dtype}, as its parameter is, got {grad.dtype}; "
            f"convert the gradient with .astype(np.{param.dtype})"
        )
    if param.shape != grad.shape:
        raise ValueError(f"{owner}: gradient of {name!r} has shape {grad.shape}, its parameter {param.shape}")
    return logical_shape(owner, name, param, shape)


def check_number(owner: str, what: str, value: Any) -> float:
    """Give an argument that must be one number as a float."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: {what} must be a number, got {value!r:.80}") from None


def check_scale(owner: str, scale: Any) -> float:
    value = check_number(owner, "grad_scale", scale)
    if not math.isfinite(value):
        raise ValueError(f"{owner}: grad_scale must be finite, got {scale!r}")
    return value


def check_name(owner: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{owner}: a parameter's name must be a string, got {name!r}")


def check_overlap(owner: str, names: Sequence[str], params: Sequence[np.ndarray], grads: Sequence[np.ndarray]) -> None:
    """No parameter may share memory with another one or with any gradient: the result would depend on the order."""
    spans = []
    for role, arrays in (("parameter", params), ("gradient", grads)):
        for name, array in zip(names, arrays, strict=True):
            if array.size:
                start = array.__array_interface__["data"][0]
                spans.append((start, start + array.nbytes, role, name))
    spans.sort()
    reach: dict[str, tuple[int, str]] = {}  # role -> (where its memory ends so far, whose that is)
    for start, stop, role, name in spans:
        for other, (end, whose) in reach.items():
            if start < end and "parameter" in (role, other):
                raise ValueError(f"{owner}: {role} of {name!r} and {other} of {whose!r} overlap in memory; pass a copy")
        reach[role] = max(reach.get(role, (0, "")), (stop, name))


def check_names(owner: str, params: Any, grads: Any) -> None:
    for role, mapping in (("params", params), ("grads", grads)):
        if not isinstance(mapping, Mapping):
            raise TypeError(f"{owner}: {role} must be a mapping from names to arrays, got {type(mapping).__name__}")
    missing, extra = set(params) - set(grads), set(grads) - set(params)
    if missing:
        raise ValueError(f"{owner}: no gradient for {quote(missing)}; step_all needs one for every parameter")
    if extra:
        raise ValueError(f"{owner}: gradient for {quote(extra)}, which is not among the parameters")
