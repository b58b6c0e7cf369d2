"""Tensors as matrix rules see them: of one shape, stacked only when somebody needs the stack; or of several."""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import Any

import torch

from ..torch_ import with_low_half
from .replay import recording


class LazyStack:
    """each: the tensors; pointers: their addresses; norm: of each, where the pass that made them took it; plan: the bundle's;
    moves: they may be elsewhere at the next step; roundings: what parameters of 16 bits have beside; opener: decodes codes."""

    __slots__ = ("_stack", "dtype", "each", "moves", "norm", "opener", "plan", "pointers", "roundings", "scale", "shape")

    def __init__(
        self, each: Any, shape: tuple[int, ...], pointers: Any, dtype: torch.dtype, scale: float = 1.0, moves: bool = False,
        roundings: Any = (),
    ):  # fmt: skip
        self.each, self.shape, self.pointers, self.dtype, self.scale = each, (len(each), *shape), pointers, dtype, scale
        self.moves, self.roundings, self.opener = moves, roundings, None
        self._stack, self.norm, self.plan = None, None, None

    @classmethod
    def of(cls, stack: torch.Tensor, pointers: Any, norm: torch.Tensor | None, plan: Any) -> Any:
        """A stack with the norms of its tensors; just the stack where they are not known."""
        if norm is None:
            return stack
        pile = cls((), tuple(stack.shape[1:]), pointers, stack.dtype)
        pile.shape, pile._stack, pile.norm, pile.plan = tuple(stack.shape), stack, norm, plan
        return pile

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def stack(self) -> torch.Tensor:
        if self._stack is None and self.opener is not None:
            self._stack = self.opener().reshape(self.shape)
        if self._stack is None:
            if self.moves and recording():
                raise RuntimeError("a stack of parameters or gradients cannot be replayed")
            each = [tensor.detach() for tensor in self.each]
            if self.roundings:
                each = [with_low_half(tensor, half).to(self.dtype) for tensor, half in zip(each, self.roundings, strict=True)]
            stack = each[0][None] if len(each) == 1 else torch.stack(each)
            stack = stack.to(self.dtype).reshape(self.shape)
            self._stack = stack if isinstance(self.scale, float) and self.scale == 1.0 else stack * self.scale
        return self._stack

    def written(self, exact: torch.Tensor | None = None) -> None:
        """Its tensors have changed: a stack of them is no longer true; of codes, one of what they were made of is."""
        self._stack = exact

    def reshape(self, *shape: Any) -> Any:
        """Another view; still a pile if the first axis stays."""
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if -1 in shape:
            rest = math.prod(n for n in shape if n != -1)
            shape = tuple(math.prod(self.shape) // rest if n == -1 else n for n in shape)
        if shape[0] != self.shape[0]:
            return self.stack.reshape(shape)
        view = LazyStack(self.each, (), self.pointers, self.dtype, self.scale, self.moves, self.roundings)
        view.shape, view.norm, view.plan, view.opener = shape, self.norm, self.plan, self.opener
        view._stack = None if self._stack is None else self._stack.reshape(shape)
        return view

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stack, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.stack[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """In torch's functions, and beside its tensors: the stack."""
        return function(*map(dense, args), **{name: dense(value) for name, value in (kwargs or {}).items()})


def _by_stack(name: str) -> Any:
    return lambda self, *others: getattr(self.stack, name)(*map(dense, others))


for _name in ("add", "sub", "mul", "truediv", "matmul", "radd", "rsub", "rmul", "rtruediv", "rmatmul", "neg", "abs"):
    setattr(LazyStack, f"__{_name}__", _by_stack(f"__{_name}__"))


class RaggedStack:
    """Tensors of several shapes. each: a bundle's own; room: one flat memory of those that are scratch; plan: the bundle's."""

    __slots__ = ("each", "plan", "pointers", "room")

    def __init__(self, each: Any, pointers: Any, room: torch.Tensor | None, plan: Any):
        self.each, self.pointers, self.room, self.plan = each, pointers, room, plan

    def written(self, exact: None = None) -> None:
        """Nothing was stacked."""


def dense(X: Any) -> Any:
    """The stack of a pile; anything else as it is."""
    return X.stack if isinstance(X, LazyStack) else X


def same(X: Any, Y: Any) -> bool:
    """Whether two values are one, or views of one."""
    return X is Y or (isinstance(X, LazyStack) and isinstance(Y, LazyStack) and X.each is Y.each)
