"""Three kernels for every rule: `sweep` over flat blocks, `tiles` over matrices with their rows and columns, `fold` for sums.

Which tensor a block belongs to, where the tensor's arrays are and what its numbers are stand in tables on the device, so tensors
of different groups and step counts share a launch and no number is a constant of the compiler. Sums are taken per block, then
per tensor (row, column) in a fixed order: no atomics, the same bits every time. Full blocks are not masked, so that accesses
stay 16 bytes wide. A `flag` on the device that is not 0 turns a launch into nothing.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

#: elements of a block, 4 warps: the best of those measured on an H200
BLOCK = 1024
#: a tile of a matrix: DEEP times HIGH rows, WIDE columns
HIGH, WIDE, DEEP = 8, 256, 16
#: blocks of neighbours with one scale that a program takes at a time, and how often; its warps where there are scales, and where
#: there are none: the best of those measured on an H200. What is looked up in tables, once a program, is as much work as a turn
STRIPS, TURNS, WARPS, FREE = 4, 4, 2, 1
#: whether a product and a sum are rounded once: then kernels over other types would not compute the same bits
FUSED = False
#: how an array is kept: as it is, or as one of `storage`'s codes
PLAIN, SIGNED, POSITIVE, HALF = 0, 1, 2, 3
#: how an array lies in a matrix: all of it, a number per row, a number per column
FULL, ROW, COLUMN = 0, 1, 2
#: what a result is reduced over; beside it stand whether its squares are taken, and whether the largest is kept and not the sum
TENSOR, ROWS, COLUMNS = 0, 1, 2
#: what a kernel is not compiled anew for: how many tensors there are, where tables begin that numbers are read from one by one,
#: and what is added to addresses, of which ALIGNED says what is to be known
TABLES = ("ADDRESS", "BASES", "NUMBERS", "KEYS", "PARTIAL", "FLAG", "T")


@triton.jit
def larger(a, b):
    """The larger of two; NaN if there is one."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def together(value, axis: tl.constexpr, LARGEST: tl.constexpr):
    """The sum along an axis, or the largest."""
    if LARGEST:
        return tl.reduce(value, axis, larger)
    else:
        return tl.sum(value, axis)


@triton.jit
def joined(a, b, LARGEST: tl.constexpr):
    if LARGEST:
        return larger(a, b)
    else:
        return a + b


@triton.jit
def nothing(LARGEST: tl.constexpr):
    """What changes no sum, or no largest."""
    if LARGEST:
        return float("-inf")
    else:
        return 0.0


@triton.jit
def numbers_of(NUMBERS, SHARED, t, NUMS: tl.constexpr, ALIKE: tl.constexpr, F: tl.constexpr):
    """The numbers of a tensor's rule, and the scale of its gradient."""
    s = ()
    if ALIKE:
        for k in tl.static_range(NUMS):
            s = s + (tl.full((), SHARED[k], F),)
        scale = tl.full((), SHARED[NUMS], F)
    else:
        for k in tl.static_range(NUMS):
            s = s + (tl.load(NUMBERS + t * (NUMS + 1) + k).to(F),)
        scale = tl.load(NUMBERS + t * (NUMS + 1) + NUMS).to(F)
    return s, scale


@triton.jit
def loaded(at, live, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=live, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def stored(at, value, live, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, value, mask=live)
    else:
        tl.store(at, value)


@triton.jit
def read(where, flat, live, j: tl.constexpr, MASKED: tl.constexpr, ELEMENTS: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr):
    """Numbers of an array, of a parameter with its low half."""
    value = loaded(where[j] + flat, live, MASKED)
    if HALF[1] == 2 and j == HALF[0] and ELEMENTS[j] == tl.bfloat16:
        return joined_halves(value, loaded(where[HALF[2]] + flat, live, MASKED))
    else:
        return value.to(F)


@triton.jit
def write(
    where, flat, live, result, place, word, j: tl.constexpr, MASKED: tl.constexpr, ELEMENTS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Leave numbers in an array, rounded as it is, and the low half of a parameter beside."""
    if j == HALF[0]:
        if HALF[1] == 2 and ELEMENTS[j] == tl.bfloat16:
            stored(where[HALF[2]] + flat, lower_half(result), live, MASKED)
        stored(where[j] + flat, halved(result, place, word, ELEMENTS[j], HALF[1]), live, MASKED)
    else:
        stored(where[j] + flat, result.to(ELEMENTS[j]), live, MASKED)


@triton.jit
def summed(value, live, MASKED: tl.constexpr, SQUARED: tl.constexpr, LARGEST: tl.constexpr):
    """What of a result goes into its sum, or its largest."""
    value = tl.broadcast_to(value, live.shape)
    if SQUARED:
        value = value * value
    if MASKED:
        value = tl.where(live, value, nothing(LARGEST))
    return value


@triton.jit
def one_block(
    where, s, scale, at, live, place, word, out, rule: tl.constexpr, MASKED: tl.constexpr, ELEMENTS: tl.constexpr,
    GRADIENT: tl.constexpr, HALF: tl.constexpr, READS: tl.constexpr, STORES: tl.constexpr, SUMS: tl.constexpr,
    SINGLE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Load, apply the rule, store; sums go to `out`."""
    x = ()
    for j in tl.static_range(READS):
        value = read(where, at, live, j, MASKED, ELEMENTS, HALF, F)
        if j == GRADIENT:
            value = value * scale
        x = x + (value,)
    y = rule(*x, *s)
    if SINGLE:
        y = (y,)
    for k in tl.static_range(len(STORES)):
        result = tl.broadcast_to(y[STORES[k][0]], live.shape)
        write(where, at, live, result, place, word, STORES[k][1], MASKED, ELEMENTS, HALF)
    for k in tl.static_range(len(SUMS)):
        tl.store(out + k, together(summed(y[SUMS[k][0]], live, MASKED, SUMS[k][2], SUMS[k][3]), 0, SUMS[k][3]))


@triton.jit(do_not_specialize=TABLES)
def sweep(
    ADDRESS, BASES, SIZES, TENSOR, INDEX, NUMBERS, SHARED, KEYS, PARTIAL, FLAG, T,
    rule: tl.constexpr, ELEMENTS: tl.constexpr, NUMS: tl.constexpr, GRADIENT: tl.constexpr, HALF: tl.constexpr,
    READS: tl.constexpr, STORES: tl.constexpr, SUMS: tl.constexpr, SINGLE: tl.constexpr, ALIGNED: tl.constexpr,
    FLAGGED: tl.constexpr, ALIKE: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block. ADDRESS[array, tensor], relative to BASES[array]: READS arrays that are read, then those that are only written.
    STORES: (result, array) pairs; SUMS: (result, kind). NUMBERS[tensor, number], the scale of gradients last, or SHARED where
    they are ALIKE for all tensors. HALF: which array is a parameter that may be of 16 bits, how it is rounded, and which has its
    low half; where by chance, KEYS has the key and the first place of each tensor, and the last of the numbers is the step."""
    if FLAGGED:
        if tl.load(FLAG) != 0:
            return
    b = tl.program_id(0)
    t = tl.load(TENSOR + b)
    start = tl.load(INDEX + b).to(tl.int64) * BLOCK
    n = tl.load(SIZES + t)
    at = tl.arange(0, BLOCK)
    live = at < (n - start)
    where = ()
    for j in tl.static_range(len(ELEMENTS)):
        base = (tl.load(ADDRESS + j * T + t) + BASES[j]).to(tl.pointer_type(ELEMENTS[j])) + start
        if ALIGNED:
            base = tl.multiple_of(base, 16)  # a hint before the sum is lost: a pointer made of an integer has none
        where = where + (base,)
    s, scale = numbers_of(NUMBERS, SHARED, t, NUMS, ALIKE, F)
    word, first = word_of(KEYS, s, t, HALF[1])
    s = own_numbers(s, HALF[1] == 1)
    out = PARTIAL + b.to(tl.int64) * len(SUMS)
    place = start + first + at
    if n - start >= BLOCK:
        one_block(
            where, s, scale, at, live, place, word, out, rule, False, ELEMENTS, GRADIENT, HALF, READS, STORES, SUMS, SINGLE, F
        )
    else:
        one_block(
            where, s, scale, at, live, place, word, out, rule, True, ELEMENTS, GRADIENT, HALF, READS, STORES, SUMS, SINGLE, F
        )


@triton.jit
def chance(place, word):
    """`storage.hash_bits`: 16 random bits. word: of the step and the key."""
    z = (place.to(tl.uint32) * 0x9E3779B1) ^ word
    return ((z ^ (z >> 15)) * 0x2C1B3C6D) >> 16


@triton.jit
def spun(tick):
    return tick.to(tl.int32).to(tl.uint32) * 0x85EBCA77


@triton.jit
def word_of(KEYS, s, t, MODE: tl.constexpr):
    """What chance is given for a tensor's parameter beside the place, and its first place."""
    word, first = tl.full((), 0, tl.uint32), tl.full((), 0, tl.int64)
    if MODE == 1:
        word = spun(s[len(s) - 1]) ^ tl.load(KEYS + 2 * t).to(tl.uint32)
        first = tl.load(KEYS + 2 * t + 1)
    return word, first


@triton.jit
def own_numbers(s, TICK: tl.constexpr):
    """The numbers of a rule, without the step that comes last."""
    own = ()
    for k in tl.static_range(len(s) - 1 if TICK else len(s)):
        own = own + (s[k],)
    return own


@triton.jit
def halved(x, place, word, kind: tl.constexpr, MODE: tl.constexpr):
    """Float32 numbers as `rounding` has them in a parameter's type."""
    if MODE == 0 or (kind != tl.bfloat16 and kind != tl.float16):
        return x.to(kind)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        if MODE == 2:
            return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            size, noise = bits & 0x7FFFFFFF, chance(place, word)
            if kind == tl.bfloat16:  # what is above the largest number, infinite or none, keeps its upper half
                half_bits = tl.where(size < 0x7F7F0000, bits + noise, bits) >> 16
            else:
                small = (tl.where(size < 0x38800000, tl.abs(x), 0.0) * 1099511627776.0).to(tl.int32).to(tl.uint32) + noise
                half_bits = tl.where(size < 0x38800000, small >> 16, ((size + (noise >> 3)) >> 13) - 0x1C000)
                half_bits = tl.minimum(half_bits, 0x7BFF)
                half_bits = tl.where(size < 0x7F800000, half_bits, tl.where(size == 0x7F800000, 0x7C00, 0x7E00))
                half_bits = half_bits | ((bits >> 16) & 0x8000)
            return half_bits.to(tl.uint16).to(kind, bitcast=True)


@triton.jit
def rounded(x):
    """Numbers of up to 22 bits as the nearest integers, in the lowest bits: the others are no digits of theirs."""
    return (x + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def lower_half(x):
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def joined_halves(p, low):
    """A float32 parameter of its upper half, a bfloat16, and its low one."""
    upper = p.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return (upper | low.to(tl.uint16, bitcast=True).to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def one_strip(
    where, scales, s, scale, tick, begin, origin, word, flat, some, live, before, rule: tl.constexpr, MASKED: tl.constexpr,
    ELEMENTS: tl.constexpr, CODES: tl.constexpr, GRADIENT: tl.constexpr, HALF: tl.constexpr, READS: tl.constexpr,
    STORES: tl.constexpr, SUMS: tl.constexpr, SINGLE: tl.constexpr, F: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Load, decode, apply the rule, encode, store; the sums with those from before."""
    x = ()
    for j in tl.static_range(READS):
        value = read(where, flat, live, j, MASKED, ELEMENTS, HALF, F)
        if CODES[j] == 1:
            value = value * tl.abs(value) * (1.0 / 16129.0) * tl.load(scales[j], mask=some, other=0.0)[:, None]
        elif CODES[j] == 2:
            value = value * value * (1.0 / 65025.0) * tl.load(scales[j], mask=some, other=0.0)[:, None]
            value = value * value
        if j == GRADIENT:
            value = value * scale
        x = x + (value,)
    y = rule(*x, *s)
    if SINGLE:
        y = (y,)
    for k in tl.static_range(len(STORES)):
        result = tl.broadcast_to(y[STORES[k][0]], live.shape)
        if CODES[STORES[k][1]] == 0:
            place = origin.to(tl.uint32) + flat.to(tl.uint32)
            write(where, flat, live, result, place, word, STORES[k][1], MASKED, ELEMENTS, HALF)
        elif CODES[STORES[k][1]] == 3:
            bits = result.to(tl.uint32, bitcast=True)
            noise = chance(begin.to(tl.uint32) + flat.to(tl.uint32), spun(tick))
            bits = tl.where(result == result, bits + noise, bits) >> 16
            stored(where[STORES[k][1]] + flat, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), live, MASKED)
        else:
            if CODES[STORES[k][1]] == 2:
                result = tl.sqrt(result)
            bits = tl.abs(result).to(tl.int32, bitcast=True)
            if MASKED:
                bits = tl.where(live, bits, 0)
            most = tl.max(bits, 1).to(tl.float32, bitcast=True)  # NaN is above all
            tl.store(scales[STORES[k][1]], most, mask=some)
            if CODES[STORES[k][1]] == 2:
                code = tl.sqrt(result * (65025.0 / tl.maximum(most, TINY))[:, None])
                result = rounded(tl.maximum(code, 1.0)).to(tl.uint8)
            else:
                code = tl.sqrt(tl.abs(result) * (16129.0 / tl.maximum(most, TINY))[:, None])
                result = rounded(tl.where(result < 0, -code, code)).to(tl.int8)
            stored(where[STORES[k][1]] + flat, result, live, MASKED)
    totals = ()
    for k in tl.static_range(len(SUMS)):
        value = summed(y[SUMS[k][0]], live, MASKED, SUMS[k][2], SUMS[k][3])
        totals = totals + (joined(before[k], together(together(value, 1, SUMS[k][3]), 0, SUMS[k][3]), SUMS[k][3]),)
    return totals


@triton.jit
def some_strips(
    first, rows, columns, across, bases, s, scale, tick, begin, own, word, out, rule: tl.constexpr, MASKED: tl.constexpr,
    ELEMENTS: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GRADIENT: tl.constexpr, HALF: tl.constexpr,
    READS: tl.constexpr, STORES: tl.constexpr, SUMS: tl.constexpr, SINGLE: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, F: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """DEEP turns from the first block on; sums go to `out`."""
    row, at = tl.arange(0, HIGH), tl.arange(0, WIDE)
    totals = ()
    for k in tl.static_range(len(SUMS)):
        totals = totals + (tl.full((), nothing(SUMS[k][3]), F),)
    for turn in range(DEEP):
        block = first + turn * HIGH
        some = row < rows - block
        if EVEN == WIDE:
            start = block.to(tl.int64) * WIDE
            flat = row[:, None] * WIDE + at[None, :]
            live = some[:, None] & (at >= 0)[None, :]
        else:
            start = (block // across).to(tl.int64) * columns
            tile = block % across + row
            column = (tile % across * WIDE)[:, None] + at[None, :]
            flat = (tile // across * columns)[:, None] + column
            live = some[:, None] & (column < columns)
        where = ()
        scales = ()
        for j in tl.static_range(len(ELEMENTS)):
            base = bases[j] + start
            if ALIGNED and EVEN > 1:
                base = tl.multiple_of(base, min(16, EVEN * ELEMENTS[j].primitive_bitwidth // 8))
            where = where + (base,)
            scales = scales + (bases[SCALES[j]] + block + row,)
        totals = one_strip(
            where, scales, s, scale, tick, start + begin, start + own, word, flat, some, live, totals, rule, MASKED, ELEMENTS,
            CODES, GRADIENT, HALF, READS, STORES, SUMS, SINGLE, F, TINY,
        )  # fmt: skip
    for k in tl.static_range(len(SUMS)):
        tl.store(out + k, totals[k])


@triton.jit(do_not_specialize=TABLES)
def strips(
    ADDRESS, BASES, ROWS, COLUMNS, ACROSS, FIRSTS, TENSOR, INDEX, NUMBERS, SHARED, KEYS, PARTIAL, FLAG, T,
    rule: tl.constexpr, ELEMENTS: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, NUMS: tl.constexpr,
    GRADIENT: tl.constexpr, HALF: tl.constexpr, READS: tl.constexpr, STORES: tl.constexpr, SUMS: tl.constexpr,
    SINGLE: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, FLAGGED: tl.constexpr, ALIKE: tl.constexpr, F: tl.constexpr,
    HIGH: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """DEEP times HIGH blocks of WIDE neighbours with one scale. As `sweep`; CODES: how each array is kept, SCALES: which has its
    scales. The last of the numbers is the step, FIRSTS where in a whole tensor each begins. EVEN: what divides the lengths of
    all rows, a power of two; WIDE where they are whole blocks."""
    if FLAGGED:
        if tl.load(FLAG) != 0:
            return
    b = tl.program_id(0)
    t = tl.load(TENSOR + b)
    first, rows = tl.load(INDEX + b) * (DEEP * HIGH), tl.load(ROWS + t).to(tl.int32)  # no memory has 2^31 blocks
    columns, across = tl.multiple_of(tl.load(COLUMNS + t), EVEN), tl.load(ACROSS + t).to(tl.int32)
    bases = ()
    for j in tl.static_range(len(ELEMENTS)):
        bases = bases + ((tl.load(ADDRESS + j * T + t) + BASES[j]).to(tl.pointer_type(ELEMENTS[j])),)
    numbers, scale = numbers_of(NUMBERS, SHARED, t, NUMS, ALIKE, F)
    word, own = word_of(KEYS, numbers, t, HALF[1])
    s, tick, begin = own_numbers(numbers, True), numbers[NUMS - 1], tl.load(FIRSTS + t)
    out = PARTIAL + b.to(tl.int64) * len(SUMS)
    if EVEN == WIDE and rows - first >= DEEP * HIGH:
        some_strips(
            first, rows, columns, across, bases, s, scale, tick, begin, own, word, out, rule, False, ELEMENTS, CODES, SCALES,
            GRADIENT, HALF, READS, STORES, SUMS, SINGLE, ALIGNED, EVEN, F, HIGH, DEEP, WIDE, TINY,
        )  # fmt: skip
    else:
        some_strips(
            first, rows, columns, across, bases, s, scale, tick, begin, own, word, out, rule, True, ELEMENTS, CODES, SCALES,
            GRADIENT, HALF, READS, STORES, SUMS, SINGLE, ALIGNED, EVEN, F, HIGH, DEEP, WIDE, TINY,
        )  # fmt: skip


@triton.jit
def one_tile(
    where, s, scale, rows, columns, R, C, first, columnfirst, i, j, begin, word, SUMS_OUT, out, rule: tl.constexpr,
    MASKED: tl.constexpr, ELEMENTS: tl.constexpr, KINDS: tl.constexpr, GRADIENT: tl.constexpr, HALF: tl.constexpr,
    READS: tl.constexpr, STORES: tl.constexpr, SUMS: tl.constexpr, SINGLE: tl.constexpr, F: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    c = columns + tl.arange(0, WIDE)
    totals = ()
    for k in tl.static_range(len(SUMS)):
        totals = totals + (tl.full((WIDE,), nothing(SUMS[k][3]), F),)
    for step in range(DEEP):
        r = rows + step * HIGH + tl.arange(0, HIGH)
        live, flat = (r < R)[:, None] & (c < C)[None, :], r[:, None] * C + c[None, :]
        x = ()
        for a in tl.static_range(READS):
            if KINDS[a] == 0:
                value = read(where, flat, live, a, MASKED, ELEMENTS, HALF, F)
            elif KINDS[a] == 1:
                value = tl.load(where[a] + r, mask=r < R, other=0.0).to(F)[:, None]
            else:
                value = tl.load(where[a] + c, mask=c < C, other=0.0).to(F)[None, :]
            if a == GRADIENT:
                value = value * scale
            x = x + (value,)
        y = rule(*x, *s)
        if SINGLE:
            y = (y,)
        for k in tl.static_range(len(STORES)):
            result = tl.broadcast_to(y[STORES[k][0]], live.shape)
            write(where, flat, live, result, flat + begin, word, STORES[k][1], MASKED, ELEMENTS, HALF)
        new = ()
        for k in tl.static_range(len(SUMS)):
            value = summed(y[SUMS[k][0]], live, MASKED, SUMS[k][2], SUMS[k][3])
            if SUMS[k][1] == 1:
                tl.store(SUMS_OUT[k] + first + j * R + r, together(value, 1, SUMS[k][3]), mask=r < R)
                new = new + (totals[k],)
            else:
                new = new + (joined(totals[k], together(value, 0, SUMS[k][3]), SUMS[k][3]),)
        totals = new
    place = 0
    for k in tl.static_range(len(SUMS)):
        if SUMS[k][1] == 2:
            tl.store(SUMS_OUT[k] + columnfirst + i * C + c, totals[k], mask=c < C)
        elif SUMS[k][1] == 0:
            tl.store(out + place, together(totals[k], 0, SUMS[k][3]))
            place += 1


@triton.jit(do_not_specialize=TABLES)
def tiles(
    ADDRESS, BASES, HEIGHT, WIDTH, TENSOR, DOWN, ACROSS, ROWFIRST, COLFIRST, NUMBERS, SHARED, KEYS, PARTIAL, SUMS_OUT, FLAG,
    T, rule: tl.constexpr, ELEMENTS: tl.constexpr, KINDS: tl.constexpr, NUMS: tl.constexpr, GRADIENT: tl.constexpr,
    HALF: tl.constexpr, READS: tl.constexpr, STORES: tl.constexpr, SUMS: tl.constexpr, WHOLE: tl.constexpr,
    SINGLE: tl.constexpr, ALIGNED: tl.constexpr,
    FLAGGED: tl.constexpr, ALIKE: tl.constexpr, F: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One tile of a matrix; arrays are FULL, ROW or COLUMN. Sums over the tensor (WHOLE of them) go to PARTIAL, those over rows
    and columns to SUMS_OUT of their own, one line per tile."""
    if FLAGGED:
        if tl.load(FLAG) != 0:
            return
    b = tl.program_id(0)
    t = tl.load(TENSOR + b)
    i = tl.load(DOWN + b).to(tl.int64)
    j = tl.load(ACROSS + b).to(tl.int64)
    R = tl.load(HEIGHT + t)
    C = tl.load(WIDTH + t)
    if ALIGNED:
        C = tl.multiple_of(C, 8)
    where = ()
    for a in tl.static_range(len(ELEMENTS)):
        base = (tl.load(ADDRESS + a * T + t) + BASES[a]).to(tl.pointer_type(ELEMENTS[a]))
        if ALIGNED and KINDS[a] != 1:
            base = tl.multiple_of(base, 16)  # as in `sweep`
        where = where + (base,)
    s, scale = numbers_of(NUMBERS, SHARED, t, NUMS, ALIKE, F)
    word, begin = word_of(KEYS, s, t, HALF[1])
    s = own_numbers(s, HALF[1] == 1)
    rows, columns = i * (HIGH * DEEP), j * WIDE
    first = tl.load(ROWFIRST + t)
    columnfirst = tl.load(COLFIRST + t)
    out = PARTIAL + b.to(tl.int64) * WHOLE
    if (rows + HIGH * DEEP <= R) & (columns + WIDE <= C):
        one_tile(
            where, s, scale, rows, columns, R, C, first, columnfirst, i, j, begin, word, SUMS_OUT, out, rule, False, ELEMENTS,
            KINDS, GRADIENT, HALF, READS, STORES, SUMS, SINGLE, F, HIGH, WIDE, DEEP,
        )  # fmt: skip
    else:
        one_tile(
            where, s, scale, rows, columns, R, C, first, columnfirst, i, j, begin, word, SUMS_OUT, out, rule, True, ELEMENTS,
            KINDS, GRADIENT, HALF, READS, STORES, SUMS, SINGLE, F, HIGH, WIDE, DEEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=("S", "T"))
def fold(PARTIAL, FIRST, DIVISOR, OUT, S, T, KINDS: tl.constexpr, WIDTH: tl.constexpr):
    """A tensor's partial sums, summed in order: program (tensor). KINDS: per sum whether the largest, whether a mean, whether its
    root."""
    t = tl.program_id(0)
    for k in tl.static_range(len(KINDS)):
        lo, hi = tl.load(FIRST + t), tl.load(FIRST + t + 1)
        total = tl.full((WIDTH,), nothing(KINDS[k][0]), tl.float64)
        while lo < hi:
            at = lo + tl.arange(0, WIDTH)
            part = tl.load(PARTIAL + at * S + k, mask=at < hi, other=nothing(KINDS[k][0])).to(tl.float64)
            total = joined(total, part, KINDS[k][0])
            lo += WIDTH
        result = together(total, 0, KINDS[k][0])
        if KINDS[k][1]:
            result = result / tl.load(DIVISOR + t)
        if KINDS[k][2]:
            result = tl.sqrt(result)
        tl.store(OUT + k * T + t, result)


@triton.jit
def fold_lines(
    SUMS, FIRST, LINES, SIZES, OUTFIRST, DIVISOR, OUT, TENSOR, INDEX, KIND: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """The lines that tiles left of rows (or columns), summed in order and finished: one block of a tensor's rows (columns)."""
    b = tl.program_id(0)
    t = tl.load(TENSOR + b)
    n, first, lines = tl.load(SIZES + t), tl.load(FIRST + t), tl.load(LINES + t)
    at = tl.load(INDEX + b).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), nothing(KIND[0]), F)
    end = first + lines * n
    while first < end:
        total = joined(total, tl.load(SUMS + first + at, mask=at < n, other=nothing(KIND[0])), KIND[0])
        first += n
    if KIND[1]:
        total = total / tl.load(DIVISOR + t).to(F)
    if KIND[2]:
        total = tl.sqrt(total)
    tl.store(OUT + tl.load(OUTFIRST + t) + at, total, mask=at < n)
