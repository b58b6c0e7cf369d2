"""Compiled kernels beside NumPy, bit for bit: every word and operator, every way to keep state and parameters, special values."""

import threading

import numpy as np
import pytest

from rlx_optim import rounding, storage
from rlx_optim.engines.cpu import kernels
from rlx_optim.engines.cpu.codegen import Code
from rlx_optim.engines.cpu.engine import Kernel
from rlx_optim.engines.cpu.finite import are_finite
from rlx_optim.engines.cpu.kernels import Layout
from rlx_optim.language import LanguageError
from rlx_optim.ops import abs, clamp, exp, log, maximum, minimum, rsqrt, sign, sqrt, where
from rlx_optim.pointers import address

NUMBER = 0.7
SPECIAL = [
    0.0, 1.0, np.inf, np.nan, 1e-40, 1e-45, 3e38, 1e30, 1e-30, 2.0**-14, 2.0**-24, 1.5 * 2.0**-25, 65504.0, 65519.0, 65520.0, 1e5, 127.5, 0.5,
    1.5, 2.5, 3.3895e38, 3.4e38, 88.0, 0.1,
]  # fmt: skip


def rule_of_words(x, y, a):
    root = sqrt(x)
    inverse = rsqrt(y)
    size = abs(x)
    direction = sign(x) + 0  # that of -0 is 0 or -0
    low = minimum(x, y)
    high = maximum(x, y)
    held = clamp(x, a, y)
    chosen = where((x > y) & (x != a) | (y <= a), x, 0.25)
    other = where((x < y) | (x == y) & (y >= 1), -x, 1e-42)
    return root, inverse, size, direction, low, high, held, chosen, other


def rule_of_operators(x, y, a):
    sum_ = x + y + a
    difference = 1 - x - y
    product = x * y * 0.1 - a * y
    quotient = x / y
    share = a / x - (-y) / 3
    fused = x * x - y * y + 16777217 * a
    return sum_, difference, product, quotient, share, fused


def rule_of_libm(x, y, a):
    power = exp(x)
    exponent = log(y)
    return power, exponent


def pairs(kind):
    """Every special number with every other, of both signs; in rows that no vector divides."""
    one = np.array([*SPECIAL, *np.negative(SPECIAL), *np.random.default_rng(0).standard_normal(5)])
    with np.errstate(all="ignore"):
        return [np.ascontiguousarray(each.reshape(-1), kind) for each in np.meshgrid(one, one)]


def run(rule, layout, arrays, shape, numbers=(), own=()):
    kernel = Kernel(rule, layout, [shape], own)
    kernel.addresses[0] = [address(each) for each in arrays]
    kernel.numbers[0, : len(numbers)] = numbers
    kernel.run()
    return kernel


def same(got, want):
    """The same bits, or NaN both."""
    assert got.dtype == want.dtype
    different = (got != want) | (np.signbit(got) != np.signbit(want))
    assert not (different & ~(np.isnan(got) & np.isnan(want))).any()


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("rule", [rule_of_words, rule_of_operators, rule_of_libm])
def test_every_word_and_operator(rule, kind):
    x, y = pairs(kind)
    number = np.dtype(kind).type(NUMBER)
    with np.errstate(all="ignore"):
        want = [np.broadcast_to(np.asarray(each, kind), x.shape) for each in rule(x, y, number)]
    out = [np.empty_like(x) for _ in want]
    run(rule, Layout(("full", "full", "number"), ("store",) * len(out), kind, kind), [x, y, *out], x.shape, (NUMBER, 1.0))
    for got, expected in zip(out, want, strict=True):
        if rule is rule_of_libm:  # two libraries, each right but for the last bits
            np.testing.assert_allclose(got, expected, rtol=4 * np.finfo(kind).eps)
        else:
            same(got, expected)


def keep(m, g):
    m = m + g
    return m


@pytest.mark.parametrize(
    ("kept", "arithmetic"),
    [(s, a) for s in (storage.SIGNED, storage.HALF) for a in ("float32", "float64")] + [(storage.POSITIVE, "float32")],
)
def test_state_in_fewer_bits(kept, arithmetic):
    """Blocks with a NaN, an infinity or nothing but zeros among them."""
    rng, shape, t, first = np.random.default_rng(0), (9, 300), 3, 1000
    x = np.asarray(rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape)), np.float32)
    x[0, 5], x[1, 140], x[2], x[3, :128], x[4, :48] = np.nan, np.inf, 0, 1e-40, [*SPECIAL, *np.negative(SPECIAL)]
    x = abs(x) if kept == storage.POSITIVE else x
    g = np.asarray(rng.standard_normal(shape), np.float32)
    g = abs(g) if kept == storage.POSITIVE else g
    with np.errstate(all="ignore"):
        coded = storage.Quantized(kept, *storage.encode(storage.NUMPY, kept, x, 0).values())
        sums = storage.decode(storage.NUMPY, coded).astype(arithmetic) + g
        want = storage.encode(storage.NUMPY, kept, sums, t, first)
    parts = [np.array(part) for part in coded.components.values()]
    layout = Layout(("full", "full"), (0,), "float32", arithmetic, (kept, ""))
    own = (first,) if kept == storage.HALF else ()
    run(keep, layout, [parts[0], g, *parts[1:]], shape, (1.0, t) if own else (1.0,), own)
    for got, expected in zip(parts, want.values(), strict=True):
        if got.dtype == np.float32:
            same(got, expected)
        elif kept == storage.HALF:  # NaN has several codes
            same(storage.NUMPY.from_half(got), storage.NUMPY.from_half(np.asarray(expected)))
        else:
            sound = np.isfinite(np.repeat(parts[1], storage.BLOCK, 1)[:, : shape[1]])
            np.testing.assert_array_equal(got[sound], expected[sound])


def move(p, g):
    p = p - g
    return p


def as_float(codes, kind):
    return storage.NUMPY.from_half(codes) if kind == "bfloat16" else codes.view(np.float16).astype(np.float32)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_parameters_of_16_bits_are_read_exactly(kind):
    """All 65,536 codes: what is read and rounded to the nearest is what it was."""
    p, g = np.arange(1 << 16).astype(np.uint16), np.zeros(1 << 16, np.uint16)
    run(move, Layout(("full", "scaled"), (0,), half=kind, parameter=0), [p, g], p.shape, (1.0,))
    same(as_float(p, kind), as_float(np.arange(1 << 16).astype(np.uint16), kind))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_parameters_rounded_by_chance(kind):
    rng, t, key, first = np.random.default_rng(0), 7, 0xDEADBEEF, 12345
    p, g = (rng.integers(0, 1 << 16, 1 << 16).astype(np.uint16) for _ in range(2))
    with np.errstate(all="ignore"):
        want = rounding.rounded(storage.NUMPY, as_float(p, kind) - as_float(g, kind), kind, t, key, first)
    layout = Layout(("full", "scaled"), (0,), half=kind, parameter=0, rounding=rounding.STOCHASTIC)
    run(move, layout, [p, g], p.shape, (1.0, t, 0, key, first))
    same(as_float(p, kind), want)


def test_parameters_with_a_low_half():
    rng = np.random.default_rng(0)
    whole = np.asarray(rng.standard_normal(1001), np.float32)
    p, low = (whole.view(np.uint32) >> 16).astype(np.uint16), whole.view(np.uint32).astype(np.uint16)
    g = (np.asarray(rng.standard_normal(1001), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    want = whole - storage.NUMPY.from_half(g) * np.float32(0.5)
    layout = Layout(("full", "scaled"), (0,), half="bfloat16", parameter=0, rounding=rounding.EXACT)
    run(move, layout, [p, g, low], p.shape, (0.5,))
    same(((p.astype(np.uint32) << 16) | low).view(np.float32), want)


def test_threads_that_need_one_kernel_get_one_each_that_works():
    x, ends, layout = np.ones(1000, np.float32), [], Layout(("full", "full"), (0,))
    kernels.compile_kernel.cache_clear()

    def work():
        p = x.copy()
        run(move, layout, [p, x], p.shape, (1.0,))
        ends.append(p.any())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert ends == [False] * 8


def outside(p, g):
    p = p - g**2
    return p


def test_what_is_outside_the_language_is_refused_with_its_place():
    line = outside.__code__.co_firstlineno + 1
    with pytest.raises(LanguageError, match=rf"test_cpu_kernels\.py:{line}: outside: `g \*\* 2` is outside the language"):
        kernels.compile_kernel(outside, Layout(("full", "full"), (0,)))


def test_compiled_code_that_mixes_kinds_is_refused_while_it_is_made():
    """Not by LLVM, which would end the process."""
    code = Code("wrong", ["float32", "float64"])
    one, two = code.arguments
    with pytest.raises(TypeError, match=r"mixes float32 and float64; convert one by \.to"):
        one + two
    with pytest.raises(TypeError, match=r"does not branch in Python; use where"):
        bool(one > 0)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sizes", [(3, 0, 35), (100_000, 33), (1,)])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(kind, sizes):
    arrays = [np.random.default_rng(0).standard_normal(size).astype(kind) for size in sizes]
    arrays[0][0], arrays[-1][0] = np.finfo(kind).max, np.finfo(kind).smallest_subnormal

    def found():
        return are_finite(np.array([address(a) for a in arrays]), np.array(sizes), kind)

    assert found()
    for array in arrays:
        for place in {0, array.size // 2, array.size - 1} if array.size else ():
            for bad in (np.inf, -np.inf, np.nan):
                kept, array[place] = array[place], bad
                assert not found()
                array[place] = kept
    assert found()
