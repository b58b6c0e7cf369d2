"""The cpu engine: rules compiled by LLVM into one parallel pass over all tensors, matrices through BLAS and LAPACK."""

from .engine import Cpu

__all__ = ["Cpu"]
