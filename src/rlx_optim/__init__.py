"""rlx-optim: training-step optimizers, each written once, with state by parameter name.

    import rlx_optim
    opt = rlx_optim.AdamW(lr=3e-4, weight_decay=0.1)
    opt.step_all(params, grads)          # mappings from names to float32 arrays, updated in place

Importing this package imports no engine, no llvmlite, no torch and no jax.
"""

from typing import TYPE_CHECKING, Any

from . import registry, schedules
from .check.rules import check_rule
from .checkpoint import CheckpointError, load, load_latest
from .engines import list_engines
from .numpy import classes
from .numpy.classes import *  # noqa: F403
from .numpy.classes import create, list_optimizers
from .numpy.clip import clip_scale, global_grad_clip_scale, global_norm, l2_norm
from .numpy.optimizer import NamedOptimizer, Optimizer
from .registry import register
from .threads import get_threads, set_threads

__version__ = "0.2.0"

__all__ = [
    "CheckpointError",
    "NamedOptimizer",
    "Optimizer",
    "check_rule",
    "clip_scale",
    "create",
    "get_threads",
    "global_grad_clip_scale",
    "global_norm",
    "l2_norm",
    "list_engines",
    "list_optimizers",
    "load",
    "load_latest",
    "register",
    "schedules",
    "set_threads",
]
__all__ += classes.__all__

if not TYPE_CHECKING:  # for which there are ours alone

    def __getattr__(title: str) -> Any:
        return classes.make_class(registry.find_titled(title, __name__))

    def __dir__() -> list[str]:
        return sorted({*globals(), *(kind.title for kind in registry.known().values())})
