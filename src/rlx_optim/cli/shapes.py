"""Models by name, as the shapes of their tensors: for `bench`, `memory` and `plan`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from . import unknown_name

Shapes = dict[str, tuple[int, ...]]


def _block(prefix: str) -> Shapes:
    """One transformer block of GPT-2 small."""
    linear = {"attn.c_attn": (768, 2304), "attn.c_proj": (768, 768), "mlp.c_fc": (768, 3072), "mlp.c_proj": (3072, 768)}
    weights: Shapes = {f"{prefix}.{layer}.weight": shape for layer, shape in linear.items()}
    biases: Shapes = {f"{prefix}.{layer}.bias": shape[1:] for layer, shape in linear.items()}
    return weights | biases | {f"{prefix}.{norm}.{part}": (768,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}


def _blocks(count: int) -> Shapes:
    return {name: shape for i in range(count) for name, shape in _block(f"h.{i}").items()}


def _vectors(least: int, most: int) -> Shapes:
    sizes = np.random.default_rng(0).integers(least, most, 2000, endpoint=True)
    return {f"v{i}": (int(size),) for i, size in enumerate(sizes)}


def _matrices(count: int, least: int = 32, most: int = 512) -> Shapes:
    """So many matrices, no two of one shape."""
    drawn = np.random.default_rng(0).integers(least, most, (2 * count, 2), endpoint=True)
    return {f"m{i}": shape for i, shape in enumerate([*dict.fromkeys(map(tuple, drawn.tolist()))][:count])}


def _gpt2() -> Shapes:
    ends: Shapes = {"wte.weight": (50257, 768), "wpe.weight": (1024, 768), "ln_f.weight": (768,), "ln_f.bias": (768,)}
    return ends | _blocks(12)


def _llama(count: int, width: int, inner: int, keys: int, words: int = 32_000) -> Shapes:
    """So many layers; some have grouped queries."""
    linear: Shapes = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
    linear |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner), "norm_1": (width,), "norm_2": (width,)}
    layers: Shapes = {f"layers.{i}.{layer}": shape for i in range(count) for layer, shape in linear.items()}
    return {"embed": (words, width), "head": (words, width), "norm": (width,)} | layers


MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt2-124m": _gpt2,
    "llama-1.1b": lambda: _llama(22, 2048, 5632, 256),
    "llama-7b": lambda: _llama(32, 4096, 11008, 4096),
    "llama-8b": lambda: _llama(32, 4096, 14336, 1024, 128_256),
    "llama-13b": lambda: _llama(40, 5120, 13824, 5120),
    "llama-70b": lambda: _llama(80, 8192, 28672, 1024, 128_256),
    "two-blocks": lambda: _blocks(2),
    "many-small": lambda: _vectors(1_000, 64_000),
    "many-tiny": lambda: _vectors(64, 4_096),
    "many-shapes": lambda: _matrices(200),
    "many-mixed": lambda: _matrices(1_000) | _vectors(64, 4_096),
}
SHORT = {"1b": "llama-1.1b", "7b": "llama-7b", "8b": "llama-8b", "13b": "llama-13b", "70b": "llama-70b"}
KNOWN = f"{', '.join(MODELS)}, or one:N (one:1k, one:32M, one:4kx1k)"
UNITS = {"": 1, "k": 1_000, "M": 1_000_000}


def shapes_of(model: str) -> Shapes:
    """The tensors of a model by name; "one:262k" is one vector of 262,000, "one:512x1k" a matrix."""
    model = SHORT.get(model, model)
    one = re.fullmatch(r"one:([1-9]\d*[kM]?(x[1-9]\d*[kM]?)?)", model)
    if one:
        return {"w": tuple(int(n.rstrip("kM")) * UNITS[n.lstrip("0123456789")] for n in one[1].split("x"))}
    if model not in MODELS:
        raise unknown_name("model", model, [*MODELS, "one:N (such as one:1k, one:262k, one:32M), one:NxN"])
    return MODELS[model]()


def count_numbers(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
