"""A class of torch.optim.Optimizer, made and stepped; imported where torch is."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .subject import Arrays, Gradient, OptimizerSubject, draw, is_refused
from .table import Skip, Wrong

Params = list[Any]  # nn.Parameter, whose grad is there


def set_seed(number: int) -> None:
    """torch.manual_seed, which formats the stack for every kind of device that is not here: a third of all time."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


class TorchSubject(OptimizerSubject):
    kind = "torch"

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        dtype, random = torch.get_default_dtype(), torch.get_rng_state()
        try:
            with super().undisturbed():
                yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(random)

    # ---- making and stepping -----------------------------------------------------------------------------------------------
    def make(self, params: Any, **settings: Any) -> Any:
        opt = self.factory(params, **{**self.settings, **settings})
        if settings.get("weight_decay") == 0.0:  # of every rule, where it hands some parameters to another
            for group in opt.param_groups:
                group.update(weight_decay=0.0) if "weight_decay" in group else None
        return opt

    def step(self, opt: Any, params: Sequence[torch.Tensor], t: int) -> None:
        set_seed(1000 + t)  # for rules that draw
        if hasattr(opt, "update_hessian"):
            gradients = [p.grad for p in params]
            opt.update_hessian(
                lambda: sum((1 + p.numel() % 3) * (p * p).sum() for p in params)
            )  # diagonal: what is drawn cancels
            for p, g in zip(params, gradients, strict=True):
                p.grad = g
        opt.step()

    def walk(
        self, start: Arrays, gradient: Gradient, steps: int, in_dtype: str = "float32", zeroed_at: int = -1, **settings: Any
    ) -> Arrays:
        dtype = getattr(torch, in_dtype)
        params = {name: nn.Parameter(torch.tensor(p).to(dtype)) for name, p in start.items()}
        listed = list(params.values())
        set_seed(0)
        opt = self.make(listed, **settings)
        for t in range(steps):
            found = gradient(t, dict(zip(params, to_arrays(listed).values(), strict=True)))
            for name, p in params.items():
                p.data.zero_() if t == zeroed_at else None
                p.grad = torch.tensor(found[name]).to(dtype)
            self.step(opt, listed, t)
            if other := next((p.dtype for p in listed if p.dtype != dtype), None):
                raise Wrong(f"{in_dtype} parameters became {other}", str(other))
        return dict(zip(params, to_arrays(listed).values(), strict=True))

    # ---- lists of parameters -----------------------------------------------------------------------------------------------
    def params(self, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Params:
        return [nn.Parameter(torch.tensor(p).to(dtype)) for p in draw(self.shapes if shapes is None else shapes).values()]

    def set_grads(self, params: Sequence[torch.Tensor], t: int, scale: float = 1.0) -> None:
        for i, p in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * t + i)
            p.grad = (scale * torch.randn(p.shape, generator=generator, dtype=torch.float32)).to(p.dtype)

    def run(
        self, opt: Any, params: Sequence[torch.Tensor], begin: int, end: int, change: Callable[[], None] = lambda: None
    ) -> None:
        """Step on gradients of their own. change: what is done to them before each step."""
        for t in range(begin, end):
            self.set_grads(params, t)
            change()
            self.step(opt, params, t)

    def begin(self, steps: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Params, Any]:
        """Return parameters, and the optimizer that has stepped them so often."""
        params = self.params(dtype)
        opt = self.make(params, **settings)
        self.run(opt, params, 0, steps)
        return params, opt

    def step_params(self, steps: int = 6, dtype: torch.dtype = torch.float32, **settings: Any) -> Params:
        """Parameters after some steps of the plain way."""
        return self.begin(steps, dtype, **settings)[0]

    def expect_close(self, got: Any, want: Any, what: str, start: Any = None, bar: float = 0.0) -> float:
        """How far apart tensors end; Wrong where that is more than rounding, and more than `bar`."""
        before = self.params() if start is None else start
        return self.expect_near(to_arrays(got), to_arrays(want), to_arrays(before), what, max(self.bar, bar))

    @functools.cached_property
    def draws(self) -> bool:  # type: ignore[override]
        params = self.params()
        opt = self.make(params)
        self.set_grads(params, 0)
        before = torch.get_rng_state()
        opt.step()
        return not torch.equal(before, torch.get_rng_state())

    @functools.cached_property
    def takes_groups(self) -> bool:
        return not is_refused(lambda: self.make([{"params": [p]} for p in self.params()]))

    def require(self, keyword: str) -> None:
        if keyword not in self.keywords:
            raise Skip(f"it has no keyword {keyword}")

    def lr(self) -> float:
        """The learning rate it has, or 0.01 where that is None or not a number."""
        self.require("lr")
        value = self.get_setting("lr")
        return float(value) if isinstance(value, (int, float)) else 0.01


def to_arrays(tensors: Sequence[torch.Tensor]) -> Arrays:
    return {
        str(i): p.detach().to(torch.float64 if p.dtype == torch.float64 else torch.float32).cpu().numpy().copy()
        for i, p in enumerate(tensors)
    }


def expect_bitwise(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], what: str) -> float:
    """0.0 where all bits are the same; Wrong otherwise."""
    for a, b in zip(got, want, strict=True):
        if a.dtype != b.dtype or not torch.equal(a.nan_to_num(), b.nan_to_num()) or not torch.equal(a.isnan(), b.isnan()):
            raise Wrong(what, float((a.double() - b.double()).abs().max()) if a.numel() else str(a.dtype))
    return 0.0


def copy_params(params: Sequence[torch.Tensor]) -> Params:
    return [nn.Parameter(p.detach().clone()) for p in params]


def find_diff(a: Any, b: Any, path: str = "state") -> str | None:
    """Where two state dicts differ first, bit for bit; None where they do not."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        return None if same else f"{path} ({a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)})"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        return next((found for k in a if (found := find_diff(a[k], b[k], f"{path}/{k}"))), None)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} entries"
        return next((found for i, (x, y) in enumerate(zip(a, b, strict=True)) if (found := find_diff(x, y, f"{path}/{i}"))), None)
    try:
        return None if type(a) is type(b) and (a == b or a != a) else f"{path}: {a!r} and {b!r}"
    except Exception:
        return None  # objects that cannot be compared


def state_of(opt: Any) -> Any:
    return copy.deepcopy(opt.state_dict())


def list_arguments(function: Any) -> tuple[set[str], bool]:
    """The names of a function's arguments, and whether it takes any."""
    found = inspect.signature(inspect.unwrap(function)).parameters
    return set(found), any(p.kind is p.VAR_KEYWORD for p in found.values())


def find_move(got: Sequence[torch.Tensor], start: Sequence[torch.Tensor]) -> float:
    return max(
        (float((a.detach().double() - b.detach().double()).abs().max()) for a, b in zip(got, start, strict=True) if a.numel()),
        default=0.0,
    )
