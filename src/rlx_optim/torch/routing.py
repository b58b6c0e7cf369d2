"""What a model's modules say of its parameters: which of them are no hidden matrices, and why."""

from __future__ import annotations

import collections

import torch
from torch import nn

from ..routing import HEAD, PARAMETRIZED, bare, spelled

#: a key and a value that nn.MultiheadAttention puts behind those of every sequence: vectors, though of shape (1, 1, n)
BIASES = ("bias_k", "bias_v")


def kinds_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """Embeddings, norms, biases, tied weights, and the last Linear of a model in which no name says head."""
    found: dict[torch.Tensor, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    owned = [(*owner(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    for path, leaf, parameter in owned:
        kind = type(modules[path]).__name__
        if isinstance(modules[path], (nn.Embedding, nn.EmbeddingBag)):
            found[parameter] = f"embedding ({kind})"
        elif "Norm" in kind:
            found.setdefault(parameter, f"norm ({kind})")
        elif isinstance(modules[path], nn.MultiheadAttention) and leaf.startswith(BIASES):
            found.setdefault(parameter, f"bias ({kind})")
    uses = collections.Counter(parameter for _, _, parameter in owned)
    found |= {parameter: f"tied weight ({count} uses)" for parameter, count in uses.items() if count > 1}
    last = next((path for path, module in reversed([*model.named_modules()]) if isinstance(module, nn.Linear)), "")
    if bare(last) and not any(HEAD.search(spelled(path)) for path, _, _ in owned):  # a lone Linear has no head beside it
        for path, leaf, parameter in owned:
            if path == last and leaf != "bias":
                found.setdefault(parameter, f"output head (the last Linear, {bare(last)})")
    return found


def owner(name: str) -> tuple[str, str]:
    """The path of the module that a parameter belongs to, and what it is there, parametrized or not."""
    path, _, leaf = PARAMETRIZED.sub(r"\1", name).rpartition(".")
    return path, leaf
