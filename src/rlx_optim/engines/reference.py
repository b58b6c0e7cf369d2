"""The reference: NumPy, tensor by tensor, arithmetic and scratch in float64, only stored buffers rounded to float32.

It is the definition of right, and slow. Every other engine is tested against it.
"""

from ..engine import ArrayEngine
from ..spec import Spec


class Reference(ArrayEngine):
    name = "reference"

    def live(self, spec: Spec) -> str:
        return "reference: NumPy in float64, tensor by tensor"
