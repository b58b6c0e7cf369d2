"""A compiled look at tensor headers; where their fields are is told in the table (`rlx_optim.torch.headers` finds it out)."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import ctypes
import functools
from typing import Any

from numba import cfunc, types

from .cache import compiled
from .native import int64_at

WORD = 8
INLINE = 5  # dimensions whose sizes stand in the header itself
HEAD = 11  # words of a table before its rows
ROW = 4  # words of a row before its fields
#: of the word that holds them; behind them are flags, which follow from the rest, and bits that nobody sets
TYPE_AND_DEVICE = (1 << 40) - 1


@compiled(cfunc, types.int64(types.int64))
def _look(table):
    """The table: whether to record, the numbers of standing tensors, of gradients and of spans, seven offsets, a row per tensor,
    a word per gradient for what is found and one for what is known, the spans' starts, their ends."""
    t = int64_at(table)
    record, n, m, s = t[0], t[1], t[2], t[3]
    header, storage, first, fields, offset, data, length = t[4], t[5], t[6], t[7], t[8], t[9], t[10]
    found = HEAD + (n + m) * (ROW + fields)
    known, starts, ends = found + m, found + 2 * m, found + 2 * m + s
    for k in range(n + m):
        row = HEAD + k * (ROW + fields)
        python = t[row]
        kind = int64_at(python + WORD)[0]
        if record:
            t[row + 1] = kind
        elif kind != t[row + 1]:
            return 0
        at = int64_at(python + header)[0]
        if at == 0:
            return 0
        field = int64_at(at + first)
        if field[0] > INLINE:
            return 0
        for j in range(fields):
            if 0 < j < offset and (j - 1) % INLINE >= field[0]:
                continue  # the size or stride of a dimension that it has not
            value = field[j] & TYPE_AND_DEVICE if j == offset + 2 else field[j]
            if record:
                t[row + ROW + j] = value
            elif value != t[row + ROW + j] and (k < n or j != offset):
                return 0
        held = int64_at(at + storage)[0]
        if held == 0:
            return 0
        place, size = int64_at(held + data)[0], int64_at(held + length)[0]
        if k < n:
            if record:
                t[row + 2], t[row + 3] = place, size
            elif place != t[row + 2] or size != t[row + 3]:
                return 0
            continue
        begin = field[offset] * t[row + 2]
        end = begin + t[row + 3]
        if end > size:
            return 0
        begin, end = begin + place, end + place
        t[found + k - n] = begin
        lo, hi = 0, s  # the first parameter that ends after the gradient starts
        while lo < hi:
            middle = (lo + hi) // 2
            if t[ends + middle] <= begin:
                lo = middle + 1
            else:
                hi = middle
        if lo < s and begin < end and t[starts + lo] < end:
            return 0
    verdict = 1
    for k in range(m):
        if t[known + k] != t[found + k]:
            t[known + k] = t[found + k]
            verdict = 2
    return verdict


@functools.cache
def look() -> Any:
    """What `_look` says of the table at an address."""
    # PYFUNCTYPE keeps the interpreter's lock: nobody changes a header while it is read
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_look.address or 0)
