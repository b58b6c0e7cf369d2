"""Checkpoints: one safetensors file with state by parameter name, for every front end, exact to the bit.

    opt.save("run/{iteration}.safetensors", every=100, keep=3)
    opt = rlx_optim.load_latest("run", lr=schedule)

`format` and `reader` have the bytes, `files` writes and finds them, `manifest` has the JSON, `snapshot` what is in it,
`optimizers` the named API, `switch` the change to another optimizer, `summary` what `rlx-optim inspect` shows. The other front
ends have modules of their own.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ..numpy.optimizer import NamedOptimizer
from .files import latest as latest
from .files import open_checkpoint
from .format import CheckpointError as CheckpointError
from .format import Gone
from .optimizers import optimizer_from


def load(
    path: str | os.PathLike[str], *, engine: Any = "auto", precision: str = "float32", allow_nan: bool = False, **callables: Any
) -> NamedOptimizer:
    """The optimizer that was saved to a file by any front end, ready to go on.

    Hyperparameters that were schedules must be given again: load(path, lr=f); in a group, groups={"*.bias": {"lr": f}}; in the
    optimizer behind it, otherwise={"lr": f}.
    """
    with open_checkpoint(path, allow_nan) as snapshot:
        return optimizer_from(snapshot, engine, precision, callables)


def load_latest(
    where: str | os.PathLike[str], *, engine: Any = "auto", precision: str = "float32", allow_nan: bool = False, **callables: Any
) -> NamedOptimizer:
    """`load` of the file written last, of those that verify, in a folder or among those named by a path with {iteration} in it.

    The order is that of writing, even where a clock went back or a run began anew in the same folder. A newer file that does not
    verify is warned about.
    """
    while True:
        path = latest(where, allow_nan)
        with contextlib.suppress(Gone):  # a writer has just removed it, and written a newer one
            return load(path, engine=engine, precision=precision, allow_nan=allow_nan, **callables)
