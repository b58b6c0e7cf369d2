"""The torch engine: the same rules on any torch device, tensors of a bundle batched through torch._foreach_*.

A rule is run once on *lists*: `ForeachTensor` stands for one tensor per parameter and maps every operator to the matching foreach
function, so a bundle of any length costs as many launches as the rule has operations. Arithmetic is float32, or float64 for
float64 parameters; bfloat16 and float16 parameters and gradients are widened on load and rounded once on store.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import basis, ops, storage
from ..engine import ArrayEngine, Bundle, as_tuple, bind, without
from ..language import Reduction, Rule, signature
from ..linalg import Coefficients
from ..program import Each, Pass, Program, Values
from ..rounding import ParamRounding
from ..spec import Shape, Slot, Spec
from . import padding


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Nothing is collected meanwhile: what is freed on a device may end the recording of a CUDA graph."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


JACOBI = 512  # rows of a float32 matrix up to which torch takes that method on CUDA


def _make_operator(name: str) -> Callable[[ForeachTensor, Any], ForeachTensor]:
    """Make an operator of lists of tensors from the foreach function of that name."""

    def operate(self: ForeachTensor, other: Any) -> ForeachTensor:
        function = getattr(torch, f"_foreach_{name}")
        return ForeachTensor(function(self.each, other.each if isinstance(other, ForeachTensor) else _to_scalars(other)))

    return operate


class ForeachTensor:
    """A list of tensors that a rule can compute with. What stands beside it is another, a float, or `Numbers`. real: where they
    are conditions, the type of what was compared."""

    __slots__ = ("each", "real")
    __array_priority__ = 1000  # a NumPy number on the left must not take over

    def __init__(self, each: Sequence[torch.Tensor], real: torch.dtype | None = None):
        self.each, self.real = list(each), real

    @property
    def dtype(self) -> torch.dtype | None:
        return self.real or (self.each[0].dtype if self.each else None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.each)

    def clone(self) -> ForeachTensor:
        return ForeachTensor([t.clone() for t in self.each])

    __add__ = __radd__ = _make_operator("add")
    __mul__ = __rmul__ = _make_operator("mul")
    __sub__, __truediv__ = _make_operator("sub"), _make_operator("div")

    def __rsub__(self, other: Any) -> ForeachTensor:
        return -self + other

    def __rtruediv__(self, other: Any) -> ForeachTensor:
        return ForeachTensor(torch._foreach_reciprocal(self.each)) * other

    def __neg__(self) -> ForeachTensor:
        return ForeachTensor(torch._foreach_neg(self.each))


class Numbers(list[float]):
    """One number per tensor, where they differ: what a scalar is to a single tensor."""


def _to_scalars(number: Any) -> Any:
    return list(number) if isinstance(number, Numbers) else float(number)


def _lift(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of floats on `Numbers`, tensor by tensor; where a ForeachTensor is among its arguments, it is for the other."""

    def apply(*values: Any) -> Any:
        if any(isinstance(value, ForeachTensor) for value in values):
            return NotImplemented
        n = next(len(value) for value in values if isinstance(value, Numbers))
        rows = zip(*(value if isinstance(value, Numbers) else [value] * n for value in values), strict=True)
        return Numbers(function(*row) for row in rows)

    return apply


def _swap_arguments(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(b, a)


for _name in ("add", "sub", "mul", "truediv", "lt", "gt", "le", "ge", "eq", "ne", "neg", "and_", "or_"):
    setattr(Numbers, f"__{_name.strip('_')}__", _lift(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(Numbers, f"__r{_name}__", _lift(_swap_arguments(getattr(operator, _name))))


def _make_comparison(name: str) -> Callable[[ForeachTensor, Any], ForeachTensor]:
    def compare(self: ForeachTensor, other: Any) -> ForeachTensor:
        rows = zip(self.each, _repeat(other, len(self.each)), strict=True)
        return ForeachTensor([getattr(operator, name)(t, value) for t, value in rows], self.dtype)

    return compare


def _repeat(value: Any, n: int) -> Sequence[Any]:
    """One for each tensor."""
    return value.each if isinstance(value, ForeachTensor) else value if isinstance(value, Numbers) else [value] * n


for _name in ("lt", "gt", "le", "ge", "eq", "ne", "and_", "or_"):
    setattr(ForeachTensor, f"__{_name.strip('_')}__", _make_comparison(_name))
    setattr(ForeachTensor, f"__r{_name.strip('_')}__", _make_comparison(_name))


def _make_unary(name: str) -> Callable[[Any], Any]:
    """A word on one value: a list of tensors, or numbers."""

    def apply(x: Any) -> Any:
        if isinstance(x, ForeachTensor):
            return ForeachTensor(getattr(torch, f"_foreach_{name}")(x.each))
        return _lift(getattr(ops, name))(x) if isinstance(x, Numbers) else getattr(ops, name)(x)

    return apply


def _sign(x: Any) -> Any:
    return ForeachTensor([_sign_of(t) for t in x.each]) if isinstance(x, ForeachTensor) else _make_unary("sign")(x)


def _make_bound(name: str) -> Callable[[Any, Any], Any]:
    def bound(a: Any, b: Any) -> Any:
        many, other = (a, b) if isinstance(a, ForeachTensor) else (b, a)
        if isinstance(many, ForeachTensor):
            return _make_operator("clamp_max" if name == "minimum" else "clamp_min")(many, other)
        function = getattr(ops, name)
        return _lift(function)(a, b) if isinstance(a, Numbers) or isinstance(b, Numbers) else function(a, b)

    return bound


def _where(condition: Any, yes: Any, no: Any) -> Any:
    lists = [value for value in (condition, yes, no) if isinstance(value, ForeachTensor)]
    if not lists:
        sides = (condition, yes, no)
        return _lift(ops.where)(*sides) if any(isinstance(v, Numbers) for v in sides) else (yes if condition else no)
    n = len(lists[0].each)
    rows = zip(*(_repeat(value, n) for value in (condition, yes, no)), strict=True)
    like = next(value for value in (yes, no, condition) if isinstance(value, ForeachTensor))
    return ForeachTensor([_select_tensor(flag, y, z, like.dtype) for flag, y, z in rows])


def _select_tensor(flag: Any, yes: Any, no: Any, dtype: torch.dtype | None) -> torch.Tensor:
    if torch.is_tensor(flag):
        if not torch.is_tensor(yes) and not torch.is_tensor(no):  # which torch would make of its default type
            yes = torch.full((), yes, dtype=dtype, device=flag.device)
        return torch.where(flag, yes, no).to(dtype)
    chosen = yes if flag else no
    return (
        chosen.clone() if torch.is_tensor(chosen) else torch.full_like(next(v for v in (yes, no) if torch.is_tensor(v)), chosen)
    )


def _clamp(x: Any, low: Any, high: Any) -> Any:
    return LISTS["minimum"](LISTS["maximum"](x, low), high)


LISTS: dict[str, Callable[..., Any]] = {
    **{name: _make_unary(name) for name in ("sqrt", "exp", "log", "abs")},
    "rsqrt": lambda x: 1.0 / LISTS["sqrt"](x),
    "sign": _sign,
    "where": _where,
    "minimum": _make_bound("minimum"),
    "maximum": _make_bound("maximum"),
    "clamp": _clamp,
}


def _make_extreme(name: str) -> Callable[[Any, Any], Any]:
    def extreme(a: Any, b: Any) -> Any:
        tensor, other = (a, b) if torch.is_tensor(a) else (b, a)
        if not torch.is_tensor(tensor):
            return getattr(ops, f"{name}imum")(a, b)
        if torch.is_tensor(other):
            return getattr(torch, f"{name}imum")(tensor, other.to(tensor.dtype))
        return tensor.clamp(**{"max" if name == "min" else "min": other})  # a number stays on the host

    return extreme


def _make_function(name: str) -> Callable[[Any], Any]:
    """A function of tensors and of numbers."""

    def function(x: Any) -> Any:
        return getattr(torch, name)(x) if torch.is_tensor(x) else getattr(ops, name)(x)

    return function


def _sign_of(x: Any) -> Any:
    return torch.where(x.isnan(), x, x.sign()) if torch.is_tensor(x) else ops.sign(x)


def _select(dtype: torch.dtype | None, condition: Any, yes: Any, no: Any) -> Any:
    """Choose by a condition. Numbers are made where it is (nothing may be copied there while a graph is captured), and of this
    dtype: torch's default one may be bfloat16."""
    if not torch.is_tensor(condition):
        return yes if condition else no
    given = (x if torch.is_tensor(x) else torch.full((), x, dtype=dtype, device=condition.device) for x in (yes, no))
    return torch.where(condition, *given)


STACKS: dict[str, Callable[..., Any]] = {
    **{name: _make_function(name) for name in ("sqrt", "rsqrt", "exp", "log", "abs")},
    "sign": _sign_of,
    "where": functools.partial(_select, None),
    "minimum": _make_extreme("min"),
    "maximum": _make_extreme("max"),
    "clamp": lambda x, low, high: _make_extreme("min")(_make_extreme("max")(x, low), high),
}


def _one_minus_power(beta: Any, t: Any) -> Any:
    if not torch.is_tensor(beta) and not torch.is_tensor(t):
        return ops.one_minus_power(beta, t)
    return 1.0 if not torch.is_tensor(beta) and beta == 0 else -torch.expm1(t * NUMBERS["log"](beta))


#: the words of `Spec.scalars` where the step count, or a hyperparameter, is on the device
NUMBERS: dict[str, Any] = {**STACKS, "where": functools.partial(_select, torch.float64), "one_minus_power": _one_minus_power}
ops.LIBRARIES["torch"] = NUMBERS


@functools.cache
def _bind_numbers(function: Rule) -> Rule:
    return bind(function, NUMBERS)


# ---- parameters of 16 bits ----------------------------------------------------------------------------------------------------
def join_halves(p: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """A float32 parameter of its halves: p is the upper one."""
    wide = torch.empty(p.numel(), dtype=torch.float32, device=p.device)
    lower, upper = wide.view(torch.int16).view(-1, 2).unbind(1)
    lower.copy_(low.reshape(-1))
    upper.copy_(p.reshape(-1).view(torch.int16))
    return wide.view(p.shape)


def split_halves(wide: torch.Tensor, p: torch.Tensor, low: torch.Tensor) -> None:
    """Leave a float32 parameter in its halves."""
    lower, upper = wide.reshape(-1).view(torch.int16).view(-1, 2).unbind(1)
    low.copy_(lower.view(p.shape))
    p.copy_(upper.contiguous().view(torch.bfloat16).view(p.shape))


def with_low_half(p: torch.Tensor, rounding: ParamRounding | None) -> torch.Tensor:
    """A parameter, with its low half if it has one."""
    return join_halves(p, rounding.low) if rounding is not None and rounding.low is not None and p.dtype is torch.bfloat16 else p


class TorchEngine(ArrayEngine):
    """Any torch device. One engine per device and arithmetic."""

    name = "torch"
    xp = torch
    copying = "clone"

    def __init__(self, device: Any = "cpu", dtype: torch.dtype = torch.float32):
        self.device, self.dtype = torch.device(device), dtype
        self._lists: dict[Rule, Rule] = {}

    def describe(self, spec: Spec) -> str:
        return f"torch: {self.device}, {str(self.dtype).removeprefix('torch.')} arithmetic, batched by foreach"

    # bundles -------------------------------------------------------------------------------------------------------
    def allocate(self, slot: Slot) -> Any:
        if slot.storage:
            made = (self._zeros(shape, dtype) for shape, dtype in storage.components(slot).values())
            return storage.Quantized(slot.storage, *made)
        if slot.eye:
            return torch.eye(slot.shape[0], dtype=self.dtype, device=self.device) * slot.fill
        return torch.full(slot.shape, slot.fill, dtype=self.dtype, device=self.device)

    def _zeros(self, shape: Shape, dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def load(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, dtype=self.dtype, device=self.device).detach()

    def store(self, buffer: Any, value: torch.Tensor) -> None:
        if buffer.dtype != value.dtype or not buffer.is_set_to(value):
            buffer.copy_(value.reshape(buffer.shape))

    def stack_size(self, shape: Shape) -> int:
        return 1 << 30

    def mixes(self, shape: Shape) -> bool:
        return padding.mixes(shape)

    def values(self, bundle: Bundle) -> Values:
        """Tensors of unequal shapes are lists."""
        if len(set(bundle.shapes)) == 1:
            return super().values(bundle)
        return Values(
            {name: ForeachTensor(each) for name, each in self.load_buffers(bundle).items()}, **bundle.numbers, t=bundle.t
        )

    def all_finite(self, grads: Sequence[Any]) -> bool:
        return all(bool(torch.isfinite(g).all()) for g in grads)

    def run(self, bundle: Bundle, move: bool = True) -> Mapping[str, Any]:
        with torch.no_grad():
            return super().run(bundle, move)

    # programs --------------------------------------------------------------------------------------------------------
    @property
    def words(self) -> dict[str, Any]:
        return {**STACKS, "where": functools.partial(_select, self.dtype)}

    def bind_lists(self, rule: Rule) -> Rule:
        """A rule in the words of lists, made once."""
        if rule not in self._lists:
            self._lists[rule] = bind(rule, LISTS)
        return self._lists[rule]

    def apply(self, program: Program, step: Pass, shapes: Sequence[Shape], found: dict[int, Any]) -> None:
        local = {n: ForeachTensor([self.align_axes(a, program.drops[n], step.domain) for a in found[n]]) for n in step.arrays}
        local |= {n: self._as_operand(found[n]) for n in step.numbers}
        arguments = [local[n] for n in step.takes]
        results = as_tuple(self.bind_lists(step.rule)(*arguments), step.gives)
        results = tuple([self.copy_if_given(value, arguments) for value in results])
        over = [without(shape, step.domain) for shape in shapes]
        given = {
            n: [self.broadcast_to(t, shape) for t, shape in zip(_repeat(value, len(over)), over, strict=True)]
            for n, value in zip(step.gives, results, strict=True)
        }
        found |= {n: given[n] for n, _ in step.stores}
        found |= self.finish_reductions(
            step, shapes, [[self.reduce_array(t, how) for t in given[n]] for _, n, how in step.reduces]
        )

    def _as_operand(self, value: Any) -> Any:
        if torch.is_tensor(value):  # a reduction, on the device: no waiting for it
            return ForeachTensor(list(value.to(self.dtype))) if value.ndim else value.to(self.dtype)
        return float(value) if np.ndim(value) == 0 else Numbers(value.tolist())

    def broadcast_to(self, value: Any, shape: Shape) -> torch.Tensor:
        value = self.send(value, self.dtype)
        return value if tuple(value.shape) == shape else value.broadcast_to(shape)

    def run_function(self, step: Each, found: dict[int, Any]) -> None:
        """On the device, in float64, where nothing waits for them."""
        given = [self._to_float64(found[n]) for n in step.takes]
        self.keep_numbers(step, as_tuple(_bind_numbers(step.function)(*given), step.gives), found)

    def _to_float64(self, value: Any) -> Any:
        return self.send(value, torch.float64)

    def send(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor or numbers of the host, on the device; the host does not wait for it."""
        if torch.is_tensor(value) or self.device.type != "cuda":
            return torch.as_tensor(value, dtype=dtype, device=self.device)
        if np.ndim(value) == 0:
            return torch.full((), float(value), dtype=dtype, device=self.device)
        return torch.as_tensor(value, dtype=dtype, device="cpu").pin_memory().to(self.device, non_blocking=True)

    def reduce_array(self, array: torch.Tensor, how: Reduction) -> torch.Tensor:
        if how.axis is None:  # one number: in float64
            wide = array.double()
            return wide.max() if how.largest else (wide * wide).sum() if how.squared else wide.sum()
        array = array * array if how.squared else array
        return array.amax(how.axis) if how.largest else array.sum(how.axis)

    def column_of(self, values: Sequence[float]) -> Any:
        return self.send(values, torch.float64)

    # matrix updates ----------------------------------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        takes, gives = signature(rule)
        if not any(isinstance(x[name], ForeachTensor) for name in takes):
            return super().map(rule, x, **reduce)
        given = [x[name] if isinstance(x[name], ForeachTensor) else self._as_operand(x[name]) for name in takes]
        results = as_tuple(self.bind_lists(rule)(*given), gives)
        return x.set(**{name: self.copy_if_given(value, given) for name, value in zip(gives, results, strict=True)})

    def by_shape(self, function: Callable[[int, int], float], X: Any) -> Any:
        return np.array([function(*t.shape) for t in X]) if isinstance(X, ForeachTensor) else super().by_shape(function, X)

    def orthogonalize(self, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
        if not isinstance(X, ForeachTensor):
            return super().orthogonalize(X, steps, coefficients, eps)
        out = list(X.each)
        for (_, sides), chosen in padding.stacks([tuple(t.shape) for t in X]).items():
            stack = torch.zeros((len(chosen), *sides), dtype=self.dtype, device=self.device)
            torch._foreach_copy_(_view_members(stack, X.each, chosen), [X.each[i] for i in chosen])
            done = super().orthogonalize(stack, steps, coefficients, eps)
            for i, matrix in zip(chosen, _view_members(done, X.each, chosen), strict=True):
                out[i] = matrix
        return ForeachTensor(out)

    def norm(self, X: torch.Tensor, order: float = 2) -> torch.Tensor:
        return torch.linalg.vector_norm(X.reshape(X.shape[0], -1), order, dim=-1).reshape(-1, *[1] * (X.ndim - 1))

    def sum_squares(self, X: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.linalg.vector_norm(X, dim=axis, keepdim=True).square()  # X is read once, and nothing of its size written

    def floor(self, X: torch.Tensor, low: float) -> torch.Tensor:
        return X.clamp(min=low)

    def minimum(self, X: torch.Tensor, high: float) -> torch.Tensor:
        return X.clamp(max=high)

    def where(self, condition: torch.Tensor, yes: Any, no: Any) -> torch.Tensor:
        numbers = not torch.is_tensor(yes) and not torch.is_tensor(no)
        return torch.where(condition, torch.full((), yes, dtype=self.dtype, device=self.device) if numbers else yes, no)

    def take(self, X: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
        shape = (*X.shape[:axis], index.shape[axis], *X.shape[axis + 1 :])
        return torch.gather(X, axis, index.expand(shape))  # take_along_dim would write down the index for every entry

    def to_float64(self, X: torch.Tensor) -> torch.Tensor:
        return X.double() if self.device.type == "cpu" else X

    def to_storage_dtype(self, X: torch.Tensor) -> torch.Tensor:
        return X.to(self.dtype)

    def eigh(self, L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For small float32 matrices on CUDA torch has Jacobi's method, one after the other: slower than another in float64, and
        what it gives is orthonormal to 3e-4 (torch 2.11, an H200)."""
        jacobi = self.device.type == "cuda" and L.shape[-1] <= JACOBI
        values, vectors = torch.linalg.eigh(L.double() if jacobi else L)
        return values.flip(-1).to(L.dtype), vectors.flip(-1).to(L.dtype)

    def qr(self, X: torch.Tensor, surely: bool = False) -> torch.Tensor:
        return torch.linalg.qr(X)[0]

    def orthonormalize(self, X: torch.Tensor, near: torch.Tensor, order: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """On a device by matrix products, where Householder's reflections would wait for the memory."""
        made = basis.orthonormalize.default if self.device.type == "cpu" else basis.orthonormalize_by_products
        return made(self, X, near, order, free)

    def orthonormalize_panel(self, X: torch.Tensor, noise: torch.Tensor | None = None) -> None:
        """In float64: a Gram matrix has the square of the condition number."""
        wide = X.double()
        basis.orthonormalize_panel.default(self, wide, noise)
        X.copy_(wide)

    def cholesky(self, G: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky_ex(G)[0].mT

    def solve_triangular(self, R: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(R.mT, X, upper=False)

    def cast(self, X: torch.Tensor, dtype: str) -> torch.Tensor:
        return X.to(getattr(torch, dtype))

    def row_max(self, X: torch.Tensor) -> torch.Tensor:
        return X.amax(-1)

    def to_half(self, X: torch.Tensor) -> torch.Tensor:
        return X.bfloat16()

    def from_half(self, X: torch.Tensor) -> torch.Tensor:
        return X.float()

    def counter(self, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.int64, device=self.device)

    def to_real(self, words: torch.Tensor) -> torch.Tensor:
        return words.to(self.dtype)

    def concatenate(self, arrays: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat(arrays, -1)


def _view_members(stack: torch.Tensor, each: Sequence[torch.Tensor], chosen: Sequence[int]) -> list[torch.Tensor]:
    """Where the chosen matrices are in a stack of larger ones."""
    sides = [(each[i].shape[0] > each[i].shape[1], sorted(each[i].shape)) for i in chosen]
    views = [matrix[:small, :large] for matrix, (_, (small, large)) in zip(stack, sides, strict=True)]
    return [view.mT if tall else view for view, (tall, _) in zip(views, sides, strict=True)]


assert set(LISTS) == set(STACKS) == set(ops.RULE)
assert set(NUMBERS) == set(ops.SCALARS)
