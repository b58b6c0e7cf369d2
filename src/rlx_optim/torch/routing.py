"""Which parameters of a model are hidden matrices, and which go to `otherwise`: by module type, by name, by shape.

The user's word comes first: `route={"pattern": "otherwise" | "own"}` by glob, or a predicate route(name, parameter) that says
True (own), False (otherwise) or None (decide as usual).
"""

from __future__ import annotations

import collections
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..spec import Shape, Spec
from .names import bare

Route = Mapping[str, str] | Callable[[str, torch.Tensor], bool | None] | None
EMBEDDING = re.compile(
    r"(^|[._])(emb|embed|embedding|embeddings|wte|wpe|tok_embeddings|position_embeddings)([._]|$)|embed_tokens"
)
# "output" and "fc_out" are heads at the top only: deeper they are hidden matrices (BERT's output.dense, GPT-J's mlp.fc_out)
HEAD = re.compile(r"(^|\.)(lm_head|head|classifier|unembed|output_layer|score)(\.|$)|^(module\.|model\.)?(output|fc_out)(\.|$)")
#: what torch.nn.utils.parametrize makes of "weight"; weight_norm and spectral_norm of old keep theirs in the module itself
PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original\d*$")


def reasons_from(model: nn.Module) -> dict[torch.Tensor, str]:
    """Parameters of a model that are not hidden matrices, with the reason."""
    found: dict[torch.Tensor, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    last = next((path for path, module in reversed([*model.named_modules()]) if isinstance(module, nn.Linear)), "")
    owned = [(*owner(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    headed = False
    for path, _, parameter in owned:
        module, name = modules[path], bare(path)
        kind = type(module).__name__
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            found[parameter] = f"embedding ({kind})"
        elif "Norm" in kind:
            found.setdefault(parameter, f"norm ({kind})")
        elif HEAD.search(name):
            found.setdefault(parameter, f"output head ({name})")
            headed = True
    uses = collections.Counter(parameter for _, _, parameter in owned)
    found |= {parameter: f"tied weight ({count} uses)" for parameter, count in uses.items() if count > 1}
    if bare(last) and not headed:  # a model that is one Linear has no head beside it
        for path, leaf, parameter in owned:
            if path == last and leaf != "bias":
                found.setdefault(parameter, f"output head (the last Linear, {bare(last)})")
    return found


def owner(name: str) -> tuple[str, str]:
    """The path of the module that a parameter belongs to, and what it is there, parametrized or not."""
    path, _, leaf = PARAMETRIZED.sub(r"\1", name).rpartition(".")
    return path, leaf


def reason_by_name(name: str) -> str | None:
    name = bare(name)
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
            return self.route(bare(name or ""), parameter)
        found = first_match(self.route or {}, name)
        if found is None:
            return None
        self.used.add(found[0])
        return found[1] == "own"

    def check_used(self) -> None:
        if isinstance(self.route, Mapping) and (unused := set(self.route) - self.used):
            raise ValueError(f"{self.owner}: route pattern {', '.join(sorted(map(repr, unused)))} matches no parameter name")


def first_match(table: Mapping[str, Any], name: str | None) -> tuple[str, Any] | None:
    """The first (pattern, value) whose glob matches, with or without what wrappers put into the name."""
    names = () if name is None else (name, bare(name))
    return next((item for item in table.items() if any(fnmatch.fnmatchcase(each, item[0]) for each in names)), None)
