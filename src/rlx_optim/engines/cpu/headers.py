"""A compiled look at the headers of tensors, dictionaries and lists; where their fields are is told in the table
(`rlx_optim.torch.headers` and `rlx_optim.torch.structure` find it out)."""

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
HEAD = 13  # words of a table before its rows
ROW = 4  # words of a row before its fields
AHEAD = 16  # tensors whose headers are fetched before the first is read: memory answers many at once
#: of the word that holds them; behind them are flags, which follow from the rest, and bits that nobody sets
TYPE_AND_DEVICE = (1 << 40) - 1


@compiled(cfunc, types.int64(types.int64))
def _look(table):
    """The table: whether to record, the numbers of standing tensors, of gradients and of spans, nine offsets, a row per tensor,
    a word per gradient for what is found and one for what is known, the spans' starts, their ends, room for 2·AHEAD words.
    The gradients are those of the first standing tensors."""
    t = int64_at(table)
    record, n, m, s = t[0], t[1], t[2], t[3]
    header, storage, first, fields, offset, data, length, meta, grad = t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12]
    width = ROW + fields
    found = HEAD + (n + m) * width
    known, starts, ends = found + m, found + 2 * m, found + 2 * m + s
    ahead = ends + s
    storages = ahead + AHEAD
    for k in range(n + m):
        row = HEAD + k * width
        j = k % AHEAD if k < n else (k - n) % AHEAD
        if j == 0:
            for i in range(min(AHEAD, (n if k < n else n + m) - k)):
                python = t[row + i * width] if k < n else t[HEAD + (k - n + i) * width]
                if k < n:
                    kind = int64_at(python + WORD)[0]
                    if record:
                        t[row + i * width + 1] = kind
                    elif kind != t[row + i * width + 1]:
                        return 0
                t[ahead + i] = int64_at(python + header)[0]
                if t[ahead + i] == 0:
                    return 0
            if k >= n:
                for i in range(min(AHEAD, n + m - k)):
                    t[ahead + i] = int64_at(t[ahead + i] + meta)[0]
                    if t[ahead + i] == 0:
                        return 0
                for i in range(min(AHEAD, n + m - k)):
                    t[ahead + i] = int64_at(t[ahead + i] + grad)[0]
                    if t[ahead + i] == 0:
                        return 0
            for i in range(min(AHEAD, (n if k < n else n + m) - k)):
                t[storages + i] = int64_at(t[ahead + i] + storage)[0]
        field = int64_at(t[ahead + j] + first)
        if field[0] > INLINE:
            return 0
        if record:
            for f in range(fields):
                t[row + ROW + f] = field[f] & TYPE_AND_DEVICE if f == offset + 2 else field[f]
        now = row + ROW
        if field[0] != t[now]:
            return 0
        for d in range(1, field[0] + 1):  # sizes and strides
            if field[d] != t[now + d] or field[INLINE + d] != t[now + INLINE + d]:
                return 0
        if (k < n and field[offset] != t[now + offset]) or field[offset + 1] != t[now + offset + 1]:
            return 0
        if field[offset + 2] & TYPE_AND_DEVICE != t[now + offset + 2] or field[offset + 3] != t[now + offset + 3]:
            return 0
        held = t[storages + j]
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


@compiled(cfunc, types.int64(types.int64))
def _unchanged(table):
    """The table: the numbers of dictionaries and of lists, the offsets of a dictionary's version, of a list's length and of its
    items; the address and the version of each dictionary; of each list its address, its length and what it holds."""
    t = int64_at(table)
    n, m, version, length, items = t[0], t[1], t[2], t[3], t[4]
    at = 5
    for _ in range(n):
        if int64_at(t[at] + version)[0] != t[at + 1]:
            return 0
        at += 2
    for _ in range(m):
        count = t[at + 1]
        if int64_at(t[at] + length)[0] != count:
            return 0
        held = int64_at(int64_at(t[at] + items)[0])
        for k in range(count):
            if held[k] != t[at + 2 + k]:
                return 0
        at += 2 + count
    return 1


@functools.cache
def unchanged() -> Any:
    """What `_unchanged` says of the table at an address."""
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_unchanged.address or 0)
