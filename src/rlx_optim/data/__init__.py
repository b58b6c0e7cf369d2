"""The handwritten digits that the race is run on (their source and licence: LICENSE-optdigits.txt)."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
from numpy.typing import NDArray


def load_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """1,797 images of 8×8 pixels, flat and from 0 to 1, and the digit that each one shows."""
    with (files(__name__) / "optdigits.npz").open("rb") as file, np.load(file) as stored:
        return stored["images"].astype(np.float32) / 16, stored["labels"].astype(np.int64)
