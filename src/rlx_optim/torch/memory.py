"""Where tensors are in memory and how they are read, asked of many at once.

A question to a tensor costs 40 ns in a C-level map and several times that in a loop of Python, so each question is one map over
all tensors, and the answers are columns.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

GRAD, SHAPE, DTYPE, DEVICE, LAYOUT = map(operator.attrgetter, ("grad", "shape", "dtype", "device", "layout"))
REQUIRES_GRAD, IS_CPU = map(operator.attrgetter, ("requires_grad", "is_cpu"))
POINTER, IS_NEG = torch.Tensor.data_ptr, torch.Tensor.is_neg
OFFSET: Callable[[torch.Tensor], Any] = torch.Tensor.storage_offset
IS_CONTIGUOUS, STRIDE, ITEMSIZE = torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.element_size
NUMEL, STORAGE, STORED = torch.Tensor.numel, torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no memory: it is one of FakeTensorMode."""
    return isinstance(tensor, FakeTensor)


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; told without importing torch.distributed."""
    return hasattr(tensor, "placements")


def local_part(tensor: Any) -> Any:
    """The part of a DTensor that is on this rank; another tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, without what a subclass makes of it (`__torch_function__`)."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


#: what is said of such a parameter, and the way out
REPEATS = "has several elements that are one number in memory (expand)", "give it memory of its own: p.data = p.data.contiguous()"


def has_repeats(tensor: torch.Tensor) -> bool:
    """Whether several elements are one number in memory, as after `expand`."""
    return tensor.numel() > 0 and any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def in_bounds(tensor: torch.Tensor) -> bool:
    """Whether the storage still has the bytes that a strided tensor reads: it may have been resized."""
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def stored_bytes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The bytes of each tensor's storage."""
    return list(map(STORED, map(STORAGE, tensors)))


def locate_in_storage(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Where each tensor begins in its storage, and the bytes of that."""
    return list(map(OFFSET, tensors)), stored_bytes(tensors)


try:  # one look of torch.compile's at type, dispatch keys (a lazy sign is one), dtype, device, sizes and strides of all tensors
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it is torch's own affair
    TensorGuards = None  # type: ignore[assignment,misc]

#: all that says how a tensor is read
QUESTIONS: tuple[Callable[[Sequence[torch.Tensor]], list[Any]], ...] = (
    lambda tensors: list(map(type, tensors)),
    lambda tensors: list(map(SHAPE, tensors)),
    lambda tensors: list(map(STRIDE, tensors)),
    lambda tensors: list(map(DTYPE, tensors)),
    lambda tensors: list(map(DEVICE, tensors)),
    lambda tensors: list(map(IS_NEG, tensors)),
)


class Forms:
    """How some tensors are read: type, shape, strides, dtype, device, sign."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.columns = [ask(tensors) for ask in QUESTIONS]
        self.guard: Any = None

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors are read in the same way."""
        if self.guard is not None and self.guard.check(*tensors):
            return True
        if not all(ask(tensors) == column for ask, column in zip(QUESTIONS, self.columns, strict=True)):
            return False
        if TensorGuards is not None and self.guard is None and tensors:
            sizes, strides = ([list(each) for each in column] for column in self.columns[1:3])
            make: Any = TensorGuards
            self.guard = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return True


class Whereabouts:
    """Where some tensors are and how they are read, to be compared later."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.places = list(map(POINTER, tensors)), stored_bytes(tensors)
        self.forms = Forms(tensors)

    @classmethod
    def join(cls, each: Sequence[Whereabouts]) -> Whereabouts:
        """Those of all these tensors, in order."""
        found = cls(())
        found.places = tuple(list(itertools.chain.from_iterable(c)) for c in zip(*(one.places for one in each), strict=True))  # type: ignore[assignment]
        columns = zip(*(one.forms.columns for one in each), strict=True)
        found.forms.columns = [list(itertools.chain.from_iterable(column)) for column in columns]
        return found

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the same tensors are still there."""
        return (list(map(POINTER, tensors)), stored_bytes(tensors)) == self.places and self.forms.are(tensors)


class Addresses:
    """Where parameters and their gradients begin, which of the pairs cannot be read in place, and the types of both."""

    def __init__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], types: Any = None, odd: Any = None):
        """types, odd: where they are known."""
        self.params, self.grads = (np.fromiter(map(POINTER, side), np.int64, len(side)) for side in (params, grads))
        kinds: tuple[list[torch.dtype], ...] = (list(map(DTYPE, params)), list(map(DTYPE, grads))) if types is None else types
        self.param_types, self.grad_types = kinds
        self.odd: set[int] = find_odd(params, grads) if odd is None else odd


def find_odd(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> set[int]:
    """The pairs of which one is not contiguous, or has a sign that is left for later."""
    both = [*params, *grads]
    if all(map(IS_CONTIGUOUS, both)) and not any(map(IS_NEG, both)):
        return set()
    n = len(params)
    return {i % n for i, t in enumerate(both) if not t.is_contiguous() or t.is_neg()}


def reach_beyond(extents: tuple[list[int], list[int]], sizes: np.ndarray, itemsizes: np.ndarray) -> np.ndarray:
    """Which contiguous tensors of so many elements reach beyond the end of their storage, which may have been resized. extents:
    where they begin in their storages, and the bytes of these."""
    offsets, stored = (np.array(column, np.int64) for column in extents)
    found: np.ndarray = ((offsets + sizes) * itemsizes > stored) & (sizes > 0)
    return found


#: types whose numbers are looked at in memory
SCANNED = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element of these tensors is finite."""
    devices, dtypes = list(map(DEVICE, tensors)), list(map(DTYPE, tensors))
    if all(map(IS_CPU, tensors)) and all(map(IS_CONTIGUOUS, tensors)) and SCANNED.keys() >= set(dtypes):
        places, sizes = (np.fromiter(map(ask, tensors), np.int64, len(tensors)) for ask in (POINTER, NUMEL))
        return are_finite_at(places, sizes, dtypes)
    alike: dict[Any, list[torch.Tensor]] = {}
    for tensor, *key in zip(tensors, devices, dtypes, strict=True):
        if tensor.numel():
            alike.setdefault(tuple(key), []).append(tensor)
    return all(bool(torch.stack(torch._foreach_norm(each, float("inf"))).isfinite().all()) for each in alike.values())


def are_finite_at(places: np.ndarray, sizes: np.ndarray, dtypes: list[torch.dtype]) -> bool:
    """Whether the contiguous tensors of these sizes and types at these addresses, on the host, are finite."""
    from ..engines.cpu import finite  # its compiler, which no device needs

    if not dtypes:
        return True
    if dtypes.count(dtypes[0]) == len(dtypes):
        return finite.are_finite(places, sizes, SCANNED[dtypes[0]])
    columns = np.array(dtypes, object)
    return all(finite.are_finite(places[of], sizes[of], SCANNED[dtype]) for dtype in set(dtypes) for of in [columns == dtype])
