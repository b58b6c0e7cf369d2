"""The triton engine: CUDA devices, one launch a pass over all tensors of a bundle; `engine` says how, `products` has matrices."""

from .engine import Triton

__all__ = ["Triton"]
