"""Which parameters of a model are hidden matrices, and which go to `otherwise`: by module type, by name, by shape.

The user's word comes first: `route={"pattern": "otherwise" | "own"}` by glob, or a predicate route(name, parameter) that says
True (own), False (otherwise) or None (decide as usual).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..spec import Shape, Spec

Route = Mapping[str, str] | Callable[[str, torch.Tensor], bool | None] | None
EMBEDDING = re.compile(
    r"(^|[._])(emb|embed|embedding|embeddings|wte|wpe|tok_embeddings|position_embeddings)([._]|$)|embed_tokens"
)
# "output" and "fc_out" are heads at the top only: deeper they are hidden matrices (BERT's output.dense, GPT-J's mlp.fc_out)
HEAD = re.compile(r"(^|\.)(lm_head|head|classifier|unembed|output_layer|score)(\.|$)|^(module\.|model\.)?(output|fc_out)(\.|$)")


def reasons_from(model: nn.Module) -> dict[torch.Tensor, str]:
    """Parameters of a model that are not hidden matrices, with the reason."""
    found: dict[torch.Tensor, str] = {}
    linear, headed = None, False
    for name, module in model.named_modules():
        kind = type(module).__name__
        for parameter in module.parameters(recurse=False):
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                found[parameter] = f"embedding ({kind})"
            elif "Norm" in kind:
                found.setdefault(parameter, f"norm ({kind})")
            elif HEAD.search(name):
                found.setdefault(parameter, f"output head ({name})")
                headed = True
        if isinstance(module, nn.Linear):
            linear = (name, module)
    uses: dict[torch.Tensor, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[parameter] = uses.get(parameter, 0) + 1
    for _, parameter in model.named_parameters():
        if uses[parameter] > 1:
            found[parameter] = f"tied weight ({uses[parameter]} uses)"
    if linear is not None and linear[0] and not headed:  # a model that is one Linear has no head beside it
        found.setdefault(linear[1].weight, f"output head (the last Linear, {linear[0]})")
    return found


def reason_by_name(name: str) -> str | None:
    if EMBEDDING.search(name):
        return "embedding (by name)"
    return "output head (by name)" if HEAD.search(name) else None


class Router:
    """Decides for one optimizer, and remembers which of the user's patterns were of use."""

    def __init__(self, owner: str, route: Route, has_otherwise: bool, known: Mapping[torch.Tensor, str]):
        if isinstance(route, Mapping):
            wrong = [w for w in route.values() if w not in ("own", "otherwise")]
            if wrong:
                raise ValueError(f'{owner}: route sends to "own" or "otherwise", got {wrong[0]!r}')
        elif route is not None and not callable(route):
            raise TypeError(f"{owner}: route must be a dict of patterns or a function of (name, parameter), got {route!r}")
        self.owner, self.route, self.has_otherwise, self.known = owner, route, has_otherwise, known
        self.used: set[str] = set()

    def to_otherwise(self, name: str | None, parameter: torch.Tensor, spec: Spec, piece: Shape) -> str | None:
        """None if the rule takes the parameter itself, else why it goes to otherwise. piece: the shape the rule would see."""
        shape = spec.takes(piece)
        wish = self._wish(name, parameter)
        if not self.has_otherwise:
            if wish is False:
                raise ValueError(f"{self.owner}: route sends {name!r} to otherwise, but there is no otherwise")
            if shape is not None and not spec.everywhere:
                raise ValueError(
                    f"{self.owner}: {name or 'a parameter'} has shape {tuple(parameter.shape)}: {shape}; give otherwise=…"
                )
            return None
        if wish is not None:
            return shape if wish else "route"
        learned = self.known.get(parameter) or (reason_by_name(name) if name else None)
        return shape or learned

    def _wish(self, name: str | None, parameter: torch.Tensor) -> bool | None:
        if callable(self.route):
            return self.route(name or "", parameter)
        found = first_match(self.route or {}, name)
        if found is None:
            return None
        self.used.add(found[0])
        return found[1] == "own"

    def check_used(self) -> None:
        if isinstance(self.route, Mapping) and (unused := set(self.route) - self.used):
            raise ValueError(f"{self.owner}: route pattern {', '.join(sorted(map(repr, unused)))} matches no parameter name")


def first_match(table: Mapping[str, Any], name: str | None) -> tuple[str, Any] | None:
    """The first (pattern, value) whose glob matches."""
    return next((item for item in table.items() if name is not None and fnmatch.fnmatchcase(name, item[0])), None)
