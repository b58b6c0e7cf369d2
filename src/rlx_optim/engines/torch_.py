"""The torch engine: the same rules on any torch device, tensors of a bundle batched through torch._foreach_*.

A rule is run once on *lists*: `Many` stands for one tensor per parameter and maps every operator to the matching foreach
function, so a bundle of any length costs as many launches as the rule has operations. Arithmetic is float32, or float64 for
float64 parameters; bfloat16 and float16 parameters and gradients are widened on load and rounded once on store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import linalg, vocabulary
from ..engine import ArrayEngine, Bundle, Rule, Tensors, Values, bind, signature
from ..spec import Shape, Slot, Spec

Number = float | list[float]


class Many:
    """A list of tensors that a rule can compute with. A number beside it is a float or one float per tensor."""

    __slots__ = ("each",)
    __array_priority__ = 1000  # a NumPy number on the left must not take over

    def __init__(self, each: Sequence[torch.Tensor]):
        self.each = list(each)

    def _with(self, name: str, other: Any) -> Many:
        return Many(getattr(torch, f"_foreach_{name}")(self.each, other.each if isinstance(other, Many) else other))

    def __add__(self, other: Any) -> Many:
        return self._with("add", other)

    def __sub__(self, other: Any) -> Many:
        return self._with("sub", other)

    def __mul__(self, other: Any) -> Many:
        return self._with("mul", other)

    def __truediv__(self, other: Any) -> Many:
        return self._with("div", other)

    def __rsub__(self, other: Any) -> Many:
        return Many(torch._foreach_neg(self.each)) + other

    def __rtruediv__(self, other: Any) -> Many:
        return Many(torch._foreach_reciprocal(self.each)) * other

    __radd__, __rmul__ = __add__, __mul__


class Numbers(list[float]):
    """One number per tensor, where they differ: what a scalar is to a single tensor."""

    def __neg__(self) -> Numbers:
        return Numbers(-x for x in self)

    def __gt__(self, other: Any) -> list[bool]:  # type: ignore[override]
        return [x > other for x in self]

    def __add__(self, other: Any) -> Any:
        return other + self

    def __mul__(self, other: Any) -> Any:
        return Numbers(x * other for x in self) if isinstance(other, float) else other * self


def _sqrt(x: Many) -> Many:
    return Many(torch._foreach_sqrt(x.each))


def _rsqrt(x: Many) -> Many:
    return Many(torch._foreach_reciprocal(torch._foreach_sqrt(x.each)))


def _sign(x: Many) -> Many:
    return Many([torch.where(t.isnan(), t, t.sign()) for t in x.each])


def _bound(name: str) -> Callable[[Any, Any], Many]:
    def bound(a: Any, b: Any) -> Many:
        many, other = (a, b) if isinstance(a, Many) else (b, a)
        return many._with(name, other)

    return bound


def _where(condition: Any, yes: Many, no: Many) -> Many:
    flags = condition if isinstance(condition, list) else [condition] * len(yes.each)
    return Many([y if flag else n for flag, y, n in zip(flags, yes.each, no.each, strict=True)])


LISTS = {
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "sign": _sign,
    "where": _where,
    "minimum": _bound("clamp_max"),
    "maximum": _bound("clamp_min"),
}


def _extreme(name: str) -> Callable[[Any, Any], Any]:
    def extreme(a: Any, b: Any) -> Any:
        tensor, other = (a, b) if torch.is_tensor(a) else (b, a)
        if not torch.is_tensor(tensor):
            return getattr(vocabulary, f"{name}imum")(a, b)
        if torch.is_tensor(other):
            return getattr(torch, f"{name}imum")(tensor, other.to(tensor.dtype))
        return tensor.clamp(**{"max" if name == "min" else "min": other})  # a number stays on the host

    return extreme


STACKS = {
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sign": torch.sign,
    "where": torch.where,
    "minimum": _extreme("min"),
    "maximum": _extreme("max"),
}


def _either(name: str) -> Callable[[Any], Any]:
    """A function of numbers, wherever they are."""

    def function(x: Any) -> Any:
        return getattr(torch, name)(x) if torch.is_tensor(x) else getattr(vocabulary, name)(x)

    return function


def _less_power(beta: Any, t: Any) -> Any:
    if not torch.is_tensor(beta) and not torch.is_tensor(t):
        return vocabulary.less_power(beta, t)
    return 1.0 if not torch.is_tensor(beta) and beta == 0 else -torch.expm1(t * NUMBERS["log"](beta))


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if not torch.is_tensor(condition):
        return vocabulary.where(condition, yes, no)

    def there(x: Any) -> torch.Tensor:  # made on the device: nothing may be copied to it while a graph is captured
        return x if torch.is_tensor(x) else torch.full((), x, dtype=torch.float64, device=condition.device)

    return torch.where(condition, there(yes), there(no))


#: the words of `Spec.scalars` where the step count, or a hyperparameter, is on the device
NUMBERS: dict[str, Any] = {
    **STACKS,
    **{name: _either(name) for name in ("sqrt", "rsqrt", "sign", "exp", "log")},
    "where": _choose,
    "less_power": _less_power,
}


class Torch(ArrayEngine):
    """Any torch device. One engine per device and arithmetic."""

    name = "torch"
    xp = torch

    def __init__(self, device: Any = "cpu", dtype: torch.dtype = torch.float32):
        self.device, self.dtype = torch.device(device), dtype
        self._lists: dict[Rule, Rule] = {}
        self._stacks: dict[Rule, Rule] = {}

    def live(self, spec: Spec) -> str:
        return f"torch: {self.device}, {str(self.dtype).removeprefix('torch.')} arithmetic, batched by foreach"

    # bundles -------------------------------------------------------------------------------------------------------
    def allocate(self, slot: Slot) -> Any:
        if slot.eye:
            return torch.eye(slot.shape[0], dtype=self.dtype, device=self.device) * slot.fill
        return torch.full(slot.shape, slot.fill, dtype=self.dtype, device=self.device)

    def load(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array).detach().to(self.device, self.dtype)

    def store(self, buffer: Any, value: torch.Tensor) -> None:
        if buffer.dtype != value.dtype or not buffer.is_set_to(value):
            buffer.copy_(value.reshape(buffer.shape))

    def stack(self, shape: Shape) -> int:
        return 1 << 30

    def finite(self, grads: Sequence[Any]) -> bool:
        return all(bool(torch.isfinite(g).all()) for g in grads)

    def run(self, bundle: Bundle, update: Callable[[Any, Values], Values]) -> Values:
        with torch.no_grad():
            return super().run(bundle, update)

    # every update ----------------------------------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        takes, gives = signature(rule)
        values = [x[name] for name in takes]
        lists = [v for v in values if isinstance(v, Tensors)]
        if not lists:
            if rule not in self._stacks:
                self._stacks[rule] = bind(rule, STACKS)
            result = self._stacks[rule](*values)
            return x.set(**dict(zip(gives, result if len(gives) > 1 else (result,), strict=True)))
        if rule not in self._lists:
            self._lists[rule] = bind(rule, LISTS)
        domain = tuple(d for d in lists[0].drop if all(d in v.drop for v in lists))
        result = self._lists[rule](*(self._listed(value, domain, len(lists[0])) for value in values))
        out = {}
        for name, many in zip(gives, result if len(gives) > 1 else (result,), strict=True):
            kind = reduce.get(name)
            each = many.each if kind is None else [self.reduced(t, kind) for t in many.each]
            out[name] = self.collected(each, domain, kind)
        return x.set(**out)

    def _listed(self, value: Any, domain: tuple[int, ...], n: int) -> Any:
        if isinstance(value, Tensors):
            return Many([self.line_up(value, i, domain) for i in range(n)])
        if torch.is_tensor(value) and value.ndim:  # a reduction, on the device: no waiting for it
            return Many(list(value.to(self.dtype)))
        return float(value) if isinstance(value, (int, float)) or not value.ndim else Numbers(value.tolist())

    def each(self, function: Rule, x: Values) -> Values:
        numbers = {
            n: torch.as_tensor(v, dtype=torch.float64, device=self.device) for n, v in x.items() if n in signature(function)[0]
        }
        return x.set(**{n: v for n, v in super().each(function, x.set(**numbers)).items() if n in signature(function)[1]})

    @property
    def words(self) -> dict[str, Any]:
        return STACKS

    def reduced(self, array: torch.Tensor, kind: str) -> Any:
        if kind in ("norm", "rms"):
            norm = torch.linalg.vector_norm(array.double())
            return norm if kind == "norm" else norm / math.sqrt(array.numel())
        return super().reduced(array, kind)

    # matrix updates ----------------------------------------------------------------------------------------------------
    def norm(self, X: torch.Tensor, order: float = 2) -> torch.Tensor:
        return torch.linalg.vector_norm(X.reshape(X.shape[0], -1), order, dim=-1).reshape(-1, *[1] * (X.ndim - 1))

    def floor(self, X: torch.Tensor, low: float) -> torch.Tensor:
        return X.clamp(min=low)

    def cap(self, X: torch.Tensor, high: float) -> torch.Tensor:
        return X.clamp(max=high)

    def take(self, X: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.take_along_dim(X, index, axis)

    def wide(self, X: torch.Tensor) -> torch.Tensor:
        return X.double() if self.device.type == "cpu" else X

    def narrow(self, X: torch.Tensor) -> torch.Tensor:
        return X.to(self.dtype)

    def eigh(self, L: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigh(L)[1].flip(-1)

    def qr(self, X: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        found = None if self.device.type == "cpu" else by_cholesky(X, near)  # LAPACK's is as good on a CPU
        return torch.linalg.qr(X)[0] if found is None else found

    def solve(self, R: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(R.mT, X, upper=False)

    def counter(self, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.int64, device=self.device)

    def real(self, words: torch.Tensor) -> torch.Tensor:
        return words.to(self.dtype)

    def concatenate(self, arrays: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat(arrays)


# ---- an orthonormal basis by matrix products, where Householder's reflections wait for the memory -------------------------
def by_cholesky(X: torch.Tensor, near: torch.Tensor) -> torch.Tensor | None:
    """The Q of X = QR, up to signs, for X in float32. Where that is too few bits it is taken in float64, and a little of `near`,
    about what X is rounded by, makes it exist. None where even that fails."""
    found = cholesky_twice(X)
    if found is None:
        wide = X.double()
        largest = torch.linalg.vector_norm(wide, dim=-2).amax(-1)[:, None, None]
        found = cholesky_twice(wide + near.double() * (2.0**-19 * largest))
    return None if found is None else found.to(X.dtype)


def cholesky_twice(X: torch.Tensor) -> torch.Tensor | None:
    """Q from Cholesky factors of Gram matrices, twice, since the first leaves an error of the condition number squared; the
    columns have length 1 before. None where this fails."""
    Y = X / torch.linalg.vector_norm(X, dim=-2, keepdim=True).clamp(min=linalg.TINY)
    n = Y.shape[-1]
    for again in (False, True):
        G = Y.mT @ Y
        if again:
            off = torch.linalg.matrix_norm(G) ** 2 - 2 * torch.linalg.matrix_norm(Y) ** 2 + n  # ‖G − I‖²
            if (off < 1e-10 * n * n).all():  # about what rounding leaves
                return Y
            if not (off < 0.25).all():  # NaN is not less
                return None
        lower, info = torch.linalg.cholesky_ex(G)
        if info.any():
            return None
        Y = torch.linalg.solve_triangular(lower, Y.mT, upper=False).mT
    return Y


assert set(LISTS) == set(STACKS) == set(vocabulary.RULE)
assert set(NUMBERS) == set(vocabulary.SCALARS)
