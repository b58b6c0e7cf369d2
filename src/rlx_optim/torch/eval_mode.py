"""Where to evaluate: parameters are put where the model is to be evaluated, and back where gradients are taken."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from .memory import local_part
from .state import outside

try:  # whether frames are being compiled
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler
except ImportError:
    compiler = None  # type: ignore[assignment]

from ..spec import TRAINED, Spec
from ..splits import Split
from .state import piece_shape

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """torch.compiler.disable, with a type that checkers can bind to an instance; where nothing is compiled it costs nothing.
    torch's own form of it, where there is one, does not import the compiler (a second or more) before it is needed."""
    disabled = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)
    if compiler is None:
        return disabled

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiled = torch.compiler.is_compiling() or compiler() is not None
        return disabled(*args, **kwargs) if compiled else function(*args, **kwargs)

    return call  # type: ignore[return-value]


def named(group: Mapping[str, Any], place: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """A group's parameters with their names, or with what can be said of them. place: the group's, so that no two are
    called alike."""
    said = "" if place is None else f"{place}."
    params = group["params"]
    names = group.get("param_names") or [f"{said}{i} of shape {tuple(p.shape)}" for i, p in enumerate(params)]
    if len(names) != len(params):
        raise ValueError(f"a group has {len(params)} parameters and {len(names)} param_names; change both together")
    return zip(names, params, strict=True)


def dicts_in(state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """What is kept of parameters; a user may keep something else beside them."""
    return [each for each in state.values() if isinstance(each, dict)]


class EvalMode(torch.optim.Optimizer):
    """An optimizer whose parameters may have another point to evaluate at: `Spec.evaluated` says which slot leads there."""

    _rules: dict[str, type[Spec]]
    _pieces: Callable[[str | None, torch.Tensor], Split]
    _spec_of: Callable[..., Spec]
    _refresh: Callable[[], None]
    _evaluating: bool | None = None  # parameters are where to evaluate, not where to take gradients; None: ask the state

    def _evaluates(self) -> bool:
        if self._evaluating is None:
            self._evaluating = any(TRAINED in state for state in dicts_in(self.state))
        return self._evaluating

    @eager
    @torch.no_grad()
    def eval(self) -> None:
        """Put the parameters where the model is to be evaluated, until `train()`: those of Schedule-Free at their average x.
        What they were is kept in the state, so that the way back is exact and a checkpoint has both. Others stay as they are."""
        self._refresh()
        if self._evaluates():
            return
        for group in self.param_groups:
            kind = self._rules[group["rule"]]
            if kind.evaluated is None:
                continue
            for name, param in named(group):
                state = self.state.get(param)
                if not state:
                    continue
                key = outside(kind, self._spec_of(group).slots(piece_shape(param, self._pieces(name, param))))[kind.evaluated]
                if TRAINED not in state and key in state:
                    value, offset = local_part(param), local_part(state[key])
                    away = offset.device != value.device  # on the host
                    state[TRAINED] = param.detach().to(offset.device) if away else param.detach().clone()
                    value.add_(offset.to(value.device))
                    self._evaluating = True

    @eager
    @torch.no_grad()
    def train(self) -> None:
        """Put the parameters back where gradients are taken, after `eval()`."""
        self._refresh()
        if self._evaluates():
            for group in self.param_groups:
                for param in group["params"]:
                    if TRAINED in self.state.get(param, {}):
                        local_part(param).copy_(local_part(self.state[param].pop(TRAINED)))
            self._evaluating = False

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """`with opt.averaged():` has the parameters where the model is to be evaluated, and puts them back."""
        before = self._evaluates()
        self.eval()
        try:
            yield
        finally:
            if not before:
                self.train()
