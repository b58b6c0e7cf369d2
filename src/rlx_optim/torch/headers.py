"""Whether tensors still are where and what they were: a compiled look at torch's own tensor headers.

A tensor's header (c10::TensorImpl) holds its sizes, strides, offset, element type, device and dispatch keys (the lazy negative
bit is one), and leads to its storage, which holds the address and the bytes behind it, and to its gradient's header. Reading all
of it costs 20 nanoseconds, where one attribute from Python costs a hundred; and it sees whatever is done to a tensor behind the
optimizer's back: `.data = …`, `set_`, `swap_tensors`, `share_memory_`, a storage resized or moved to another process.

Where the fields are is found out by looking for known values in headers made for it (`layout`), and `trusted` tries out that
every kind of change is seen; where either fails, or numba is missing, `Plainly` asks Python for the same.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..engines import no_compiler

WORD = 8
GRADIENT = operator.attrgetter("grad")


def is_fake(tensor: Any) -> bool:
    """A tensor without memory, of FakeTensorMode."""
    return isinstance(tensor, FakeTensor)


def described(tensor: Any) -> Any:
    """All that says where a tensor's memory is and how it is to be read; of a DTensor, the part that is here."""
    if not isinstance(tensor, torch.Tensor) or is_fake(tensor):
        return None
    t: Any = getattr(tensor, "_local_tensor", tensor)
    return t.data_ptr(), t.untyped_storage().nbytes(), t.shape, t.stride(), t.dtype, t.device, t.is_neg()


def in_bounds(tensor: torch.Tensor) -> bool:
    """Whether the storage still has the bytes that a strided tensor reads: it may have been resized."""
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


class Headers(Protocol):
    """Remembers parameters and other standing tensors, and the parameters' gradients, which may be others each time."""

    addresses: np.ndarray  # of the gradients last seen to be as good as those remembered

    def same(self) -> int:
        """0 where a standing tensor is not what and where it was, or a gradient not of the kind it was or in the memory of a
        parameter; 2 where all is well and a gradient has moved; else 1."""


def spans(params: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """From where to where the memory of contiguous parameters reaches, in order; empty ones own none."""
    return sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in params if p.numel())


class Plainly:
    """Through Python's attributes."""

    def __init__(self, params: Sequence[torch.Tensor], others: Sequence[torch.Tensor]):
        self.params, self.standing = params, [*params, *others]
        self.known = [described(t) for t in self.standing]
        grads: Any = list(map(GRADIENT, params))
        self.types, self.kinds = [(type(g), g.layout) for g in grads], [described(g)[2:] for g in grads]
        self.addresses = np.array([g.data_ptr() for g in grads], np.int64)
        self.starts, self.ends = np.array(spans(params), np.int64).reshape(-1, 2).T

    def same(self) -> int:
        grads: Any = list(map(GRADIENT, self.params))
        kinds = [(type(g), getattr(g, "layout", None)) for g in grads]
        if kinds != self.types or [described(t) for t in self.standing] != self.known:
            return 0
        now = [described(g) for g in grads]
        if [each[2:] for each in now] != self.kinds:
            return 0
        sizes = np.array([g.numel() * g.element_size() for g in grads], np.int64)
        found = np.array([each[0] for each in now], np.int64)
        if any(g.storage_offset() * g.element_size() + n > each[1] for g, n, each in zip(grads, sizes, now, strict=True)):
            return 0
        after = np.searchsorted(self.ends, found, "right")  # the first parameter that ends after the gradient starts
        before = np.searchsorted(self.starts, found + sizes, "left")  # the first that starts after the gradient ends
        if ((after < before) & (sizes > 0)).any():
            return 0
        if np.array_equal(found, self.addresses):
            return 1
        self.addresses[:] = found
        return 2


# ---- where the fields are ---------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Layout:
    """Offsets in bytes: of the header in a Python tensor; in a header of the storage, of the first field that describes (the
    number of dimensions; sizes and strides follow), of the last's end, of the storage's offset (the number of elements, type and
    device, dispatch keys follow); of the address and the length in a storage; of what autograd keeps in a header, and of the
    gradient there."""

    header: int
    storage: int
    first: int
    last: int
    offset: int
    data: int
    length: int
    meta: int
    grad: int

    @property
    def fields(self) -> int:
        return (self.last - self.first) // WORD


def words_at(address: int, n: int) -> list[int]:
    return list((ctypes.c_int64 * n).from_address(address))


def _find(words: list[int], *wanted: int) -> int:
    """Where these words stand one after the other, in bytes."""
    return next(i for i in range(len(words)) if words[i : i + len(wanted)] == [*wanted]) * WORD


@functools.cache
def layout() -> Layout | None:
    """None where headers do not look as expected."""
    if ctypes.sizeof(ctypes.c_void_p) != WORD or no_compiler() is not None:
        return None
    with torch.inference_mode(False):
        t: Any = torch.zeros(2002, dtype=torch.float32, device="cpu")[3:1004].view(7, 11, 13)
        leaf, gradient = torch.zeros(3, device="cpu"), torch.zeros(3, device="cpu")
    storage = t.untyped_storage()
    try:
        header = _find(words_at(id(t), 4), t._cdata)
        words = words_at(t._cdata, 22)
        first, offset = _find(words, 3, 7, 11, 13), _find(words, 3, 1001)
        held = words_at(storage._cdata, 8)
        data, length = _find(held, storage.data_ptr()), _find(held, storage.nbytes())
        before = words_at(leaf._cdata, 22)
        leaf.requires_grad_()
        meta = next(i for i, word in enumerate(words_at(leaf._cdata, 22)) if word and not before[i]) * WORD  # made just now
        leaf.grad = gradient
        grad = _find(words_at(words_at(leaf._cdata + meta, 1)[0], 12), gradient._cdata)
        found = Layout(header, _find(words, storage._cdata), first, offset + 4 * WORD, offset, data, length, meta, grad)
    except (StopIteration, AttributeError, RuntimeError):
        return None
    return found if found.storage < found.first == found.offset - 11 * WORD else None  # sizes and strides of five dimensions


# ---- the look itself --------------------------------------------------------------------------------------------------------
class Compiled:
    """Through the headers. `standing` is held, so that no header is gone while it is read."""

    def __init__(self, params: Sequence[torch.Tensor], others: Sequence[torch.Tensor]):
        from ..engines.cpu.headers import AHEAD, HEAD, ROW, look

        where = layout()
        assert where is not None
        self.standing = [*params, *others]
        grads: Any = list(map(GRADIENT, params))
        n, m, reach = len(self.standing), len(grads), spans(params)
        head = [1, n, m, len(reach), where.header, where.storage, where.first, where.fields]
        head += [(where.offset - where.first) // WORD, where.data, where.length, where.meta, where.grad]
        width = ROW + where.fields
        self.table = np.zeros(HEAD + (n + m) * width + 2 * m + 2 * len(reach) + 2 * AHEAD, np.int64)
        self.table[:HEAD] = head
        rows = self.table[HEAD : HEAD + (n + m) * width].reshape(n + m, width)
        tail = self.table[HEAD + (n + m) * width :]
        rows[:n, 0] = list(map(id, self.standing))
        rows[n:, 2] = [g.element_size() for g in grads]
        rows[n:, 3] = [g.numel() * g.element_size() for g in grads]
        self.addresses = tail[m : 2 * m]
        tail[2 * m : -2 * AHEAD] = [start for start, _ in reach] + [end for _, end in reach]
        self.where = self.table.ctypes.data
        self.look = look()
        self.good = self.look(self.where) > 0
        self.table[0] = 0

    def same(self) -> int:
        return int(self.look(self.where))


def remembered(params: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Headers:
    """The quickest way there is to tell whether these are as they were. A class may say for itself what a gradient is."""
    kinds: set[Any] = set(map(type, params))
    plain = all(kind.grad is torch.Tensor.grad for kind in kinds)
    if plain and trusted() and (made := Compiled(params, others)).good:
        return made
    return Plainly(params, others)


# ---- whether to believe it ----------------------------------------------------------------------------------------------------
def _by_data(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(t: Any) -> None:
        t.data = make(t.data)

    return change


#: what can be done to a tensor of shape (4, 4) behind the optimizer's back
CHANGES: list[Callable[[Any], Any]] = [
    _by_data(lambda t: t.clone()),
    _by_data(lambda t: t.t()),
    _by_data(lambda t: t[:2]),
    _by_data(lambda t: t.reshape(2, 8)),
    _by_data(lambda t: t.view(torch.int32)),
    _by_data(lambda t: t.bfloat16()),
    _by_data(torch._neg_view),
    lambda t: t.set_(torch.ones(4, 4, device="cpu")),
    lambda t: t.resize_(5, 4),
    lambda t: t.untyped_storage().resize_(0),
    lambda t: torch.utils.swap_tensors(t, torch.ones(4, 4, device="cpu")),
]


@functools.cache
def trusted() -> bool:
    """Whether headers can be read here, and every change is seen."""
    if layout() is None:
        return False

    def fresh() -> torch.Tensor:
        return torch.zeros(4, 4, device="cpu")

    def given(p: torch.Tensor, grad: Any) -> torch.Tensor:
        p.grad = grad
        return p

    def sees(change: Callable[[Any], Any]) -> bool:
        p, state = given(fresh(), fresh()), fresh()
        watch = Compiled([p], [state])
        if not watch.good or watch.same() != 1:
            return False
        change(state)
        return watch.same() == 0

    with torch.inference_mode(False), torch.no_grad():
        p, moved = given(fresh(), fresh()), torch.zeros(40, device="cpu")[7:23].view(4, 4)
        watch = Compiled([p], [])
        if not watch.good or given(p, moved) is not p or watch.same() != 2 or int(watch.addresses[0]) != moved.data_ptr():
            return False
        wrong = [None, p.view(-1).view(4, 4), fresh().t(), torch._neg_view(fresh()), fresh().to_sparse()]
        return not any(given(p, grad) is p and watch.same() for grad in wrong) and all(map(sees, CHANGES))
