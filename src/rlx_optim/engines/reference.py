"""The reference: NumPy, tensor by tensor, arithmetic and scratch in float64, only stored buffers rounded to their own type.

It is the definition of right, and slow. Every other engine is tested against it.
"""

import numpy as np

from ..engine import ArrayEngine
from ..spec import Spec


class Reference(ArrayEngine):
    name = "reference"

    def __init__(self, stored: str = "float32"):
        self.stored = np.dtype(stored)

    def describe(self, spec: Spec) -> str:
        return "reference: NumPy in float64, tensor by tensor"
