"""What a model's modules and config say of its parameters: which are no hidden matrices, and which are several matrices.

torch's own modules say it by their type, Hugging Face models by `model.config`; transformers is not imported. A parameter whose
shape is not what the module or the config makes of it stays whole.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..routing import HEAD, PARAMETRIZED, bare, normalize_name, original
from ..spec import Shape
from ..splits import WHOLE, Split

#: a key and a value that nn.MultiheadAttention puts behind those of every sequence: vectors, though of shape (1, 1, n)
BIASES = ("bias_k", "bias_v")


def find_kinds(model: nn.Module) -> dict[torch.Tensor, str]:
    """Embeddings, norms, biases, tied weights, and the last Linear of a model in which no name says head."""
    found: dict[torch.Tensor, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    owned = [(*split_name(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
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
    if bare(last) and not any(HEAD.search(normalize_name(path)) for path, _, _ in owned):  # a lone Linear has no head beside it
        for path, leaf, parameter in owned:
            if path == last and leaf != "bias":
                found.setdefault(parameter, f"output head (the last Linear, {bare(last)})")
    return found


def split_name(name: str) -> tuple[str, str]:
    """The path of the module that a parameter belongs to, and what it is there, parametrized or not."""
    path, _, leaf = PARAMETRIZED.sub(r"\1", name).rpartition(".")
    return path, leaf


#: what configs call it: the first that is there
NAMES = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads"),
    "size": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "inner": ("moe_intermediate_size", "intermediate_size"),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """heads: of queries; groups: of keys and values; size: rows of one; experts: in a layer, 0 without; inner: rows of a gate, of
    an expert's or without experts of the layer's."""

    heads: int
    groups: int
    size: int
    experts: int
    inner: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values."""
        return self.heads * self.size, self.groups * self.size, self.groups * self.size


def sizes_of(config: Any) -> Sizes | None:
    """None where it says nothing of attention."""
    config = getattr(config, "text_config", None) or config
    found = {
        what: next((n for n in (getattr(config, name, None) for name in names) if isinstance(n, int)), 0)
        for what, names in NAMES.items()
    }
    heads, width = found["heads"], found["width"]
    if not heads or not (found["size"] or width):
        return None
    groups = 1 if getattr(config, "multi_query", False) is True else found["groups"] or heads
    return Sizes(heads, groups, found["size"] or width // heads, found["experts"], found["inner"])


def split_heads(count: Callable[[Sizes], int]) -> Rule:
    """A rule by which a matrix is split into so many heads, in rows or in columns, where heads are asked for."""

    def split(sizes: Sizes, shape: Shape, by_head: bool) -> Split | None:
        if by_head and shape[0] == count(sizes) * sizes.size:
            return count(sizes)
        return (sizes.size,) * count(sizes) if by_head and shape[1] == count(sizes) * sizes.size else None

    return split


def split_latent(sizes: Sizes, shape: Shape, by_head: bool) -> Split | None:
    """What leads from a latent vector to heads, whose sizes differ from those of others."""
    return sizes.heads if by_head and shape[0] % sizes.heads == 0 else None


def split_fused(sizes: Sizes, shape: Shape, by_head: bool) -> Split | None:
    """Queries, keys and values one after the other."""
    return each_head(sizes, shape, by_head) or (sizes.parts if sum(sizes.parts) in shape and not by_head else None)


def split_halves(sizes: Sizes, shape: Shape, by_head: bool) -> Split | None:
    """Gate and up projection; of experts where they are rows."""
    fits = bool(sizes.inner) and shape[-2] == 2 * sizes.inner
    if len(shape) == 2:
        return 2 if fits else None
    return 2 * shape[0] if fits else shape[0]


#: into what a rule splits a parameter of this shape, and whether heads are asked for
Rule = Callable[[Sizes, Shape, bool], Split | None]
queries, keys = split_heads(lambda sizes: sizes.heads), split_heads(lambda sizes: sizes.groups)
each_head = split_heads(lambda sizes: sizes.heads + 2 * sizes.groups)
#: by the last part of a name but "weight": how it is split, and what that is called
KNOWN: dict[str, tuple[Rule, str]] = {
    "q_proj": (queries, "heads"),
    "k_proj": (keys, "heads"),
    "v_proj": (keys, "heads"),
    "q_b_proj": (split_latent, "heads"),
    "kv_b_proj": (split_latent, "heads"),
    "qkv_proj": (split_fused, "queries, keys, values"),
    "c_attn": (split_fused, "queries, keys, values"),
    "query_key_value": (each_head, "queries, keys, values by head"),  # one head after another: they come apart only so
    "gate_up_proj": (split_halves, "gate and up"),
}

GATES = ("weight_ih", "weight_hh")
#: torch's own modules: how a parameter's name begins there, how many matrices it is, of how many rows each, and what they are
PACKED = (
    (nn.MultiheadAttention, ("in_proj_weight",), 3, "embed_dim", "queries, keys, values"),
    (nn.MultiheadAttention, ("q_proj_weight", "k_proj_weight", "v_proj_weight"), 1, "embed_dim", "heads"),
    (nn.LSTM, GATES, 4, "hidden_size", "gates"),
    (nn.LSTMCell, GATES, 4, "hidden_size", "gates"),
    (nn.GRU, GATES, 3, "hidden_size", "gates"),
    (nn.GRUCell, GATES, 3, "hidden_size", "gates"),
)


def splits_of(model: Any, by_head: bool) -> dict[torch.Tensor, tuple[Split, str]]:
    """The split of each parameter that is several matrices, and why: by its module's type, else by the model's config."""
    if not isinstance(model, nn.Module):
        return {}
    return splits_by_config(model, by_head) | splits_by_module(model, by_head)


def splits_by_module(model: nn.Module, by_head: bool) -> dict[torch.Tensor, tuple[Split, str]]:
    """The splits that the types of torch's own modules give."""
    found: dict[torch.Tensor, tuple[Split, str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, param in model.named_parameters():
        path, leaf = split_name(name)
        for kind, starts, parts, rows, what in PACKED:
            module = modules[path]
            if not isinstance(module, kind) or not leaf.startswith(starts):
                continue
            split = parts * module.num_heads if by_head and isinstance(module, nn.MultiheadAttention) else parts
            if param.ndim == 2 and param.shape[0] == parts * getattr(module, rows) and split != WHOLE:
                found[param] = split, f"{what} of {kind.__name__}"
    return found


def has_heads(model: Any) -> bool:
    """Whether a model says how many heads its attention has."""
    if not isinstance(model, nn.Module):
        return False
    return bool(config_sizes(model)) or any(isinstance(module, nn.MultiheadAttention) for module in model.modules())


def config_sizes(model: nn.Module) -> Sizes | None:
    """The sizes in a model's config, which DistributedDataParallel hides."""
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return sizes_of(getattr(model, "config", None))


def splits_by_config(model: nn.Module, by_head: bool) -> dict[torch.Tensor, tuple[Split, str]]:
    """The splits that the config of a Hugging Face model gives."""
    found: dict[torch.Tensor, tuple[Split, str]] = {}
    sizes = config_sizes(model)
    for name, param in model.named_parameters() if sizes is not None else ():
        shape, path = tuple(param.shape), original(name).removesuffix(".weight").split(".")
        rule, what = KNOWN.get(path[-1], (None, ""))
        if len(shape) == 3 and sizes is not None and shape[0] == sizes.experts:
            rule, what = (rule, "experts, gate and up") if rule is split_halves else (lambda sizes, shape, _: shape[0], "experts")
        elif len(shape) != 2:
            continue
        split = None if rule is None or sizes is None else rule(sizes, shape, by_head)
        if split is not None and split != WHOLE:
            found[param] = split, f"{what} by the model's config"
    return found
