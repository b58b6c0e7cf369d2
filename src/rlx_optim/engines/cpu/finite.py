"""Whether numbers in memory are finite, at the speed of memory: each is read once, and arrays of any size in one call."""

from __future__ import annotations

import functools

import numpy as np

from ...pointers import address
from .codegen import Code
from .runtime import Call

PIECE = 1 << 15  # elements that a thread looks at before it takes the next
#: the bits of an exponent, all of which are set in what is not finite, and the integers that have them
EXPONENTS = {
    "float16": ("int16", 0x7C00), "bfloat16": ("int16", 0x7F80), "float32": ("int32", 0x7F800000),
    "float64": ("int64", 0x7FF0000000000000),
}  # fmt: skip


@functools.cache
def _compile_scan(kind: str) -> int:
    """Compile the scan of one type. Its words: the addresses of the tables of addresses, of sizes and of findings, the number of
    rows, and the counter that threads take rows from."""
    integer, exponent = EXPONENTS[kind]
    code = Code(f"scan_{kind}", ["int64"])
    words = code.array("int64", code.arguments[0])
    places, sizes, found = (code.array("int64", words[k]) for k in range(3))
    with code.while_taken(words, 4, code.constant("int64", 1), words[3]) as (first, last), code.loop(first, last) as row:
        numbers, bad = code.array(integer, places[row]), code.variable(code.constant(integer, 0))
        with code.loop(0, sizes[row]) as i:
            bad[0] = bad[0] | ((numbers[i] & exponent) == exponent).to(integer)
        found[row] = bad[0].to("int64")
    return code.compile()


def are_finite(addresses: np.ndarray, sizes: np.ndarray, kind: str) -> bool:
    """Whether the contiguous arrays of one type at these addresses hold nothing but finite numbers."""
    if (elements := int(sizes.sum())) > PIECE:
        itemsize = np.dtype(EXPONENTS[kind][0]).itemsize
        pieces = -(-sizes // PIECE)
        starts = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * PIECE
        addresses, sizes = np.repeat(addresses, pieces) + starts * itemsize, np.minimum(np.repeat(sizes, pieces) - starts, PIECE)
    tables = [np.ascontiguousarray(addresses), np.ascontiguousarray(sizes), np.empty(len(sizes), np.int64)]
    Call(_compile_scan(kind), *map(address, tables), len(sizes)).run(elements, elements)
    return not tables[2].any()
