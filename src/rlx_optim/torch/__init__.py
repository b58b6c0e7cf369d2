"""Every optimizer as a torch.optim.Optimizer.

    from rlx_optim.torch import AdamW, Muon, SOAP
    opt = Muon(model, lr=0.02)            # or model.parameters(), model.named_parameters(), groups
    loss.backward(); opt.step(); opt.zero_grad()

The classes are made from the specs in `rlx_optim.rules`; `__init__.pyi` beside this file shows them to editors and type checkers.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from ..named import create, spec_class
from ..registry import OPTIMIZERS
from ..spec import REQUIRED, Spec
from .clip import clip_grad_norm_
from .curvature import CurvatureOptimizer
from .optimizer import RuleOptimizer

__all__ = ["RuleOptimizer", "clip_grad_norm_"] + [title for _, title, _ in OPTIMIZERS.values()]

_DEFAULT: Any = object()
#: rules that can hand tensors to another one
ROUTED = ("muon", "mars", "soap", "kronpsgd")
#: where torch.optim has the optimizer and other defaults than the named API; schedulers need a number for lr
DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-3},
    "adafactor": {"lr": 1e-2, "eps": (None, 1e-3), "convention": "torch"},
}
#: the last argument that torch.optim's class has too; those after it are keywords, so that a place means the same in both
SHARED = {"nadamw": "momentum_decay", "radam": "decoupled_weight_decay", "adafactor": "weight_decay", "muon": "ns_steps"}
COMMON = {"maximize": False, "engine": "auto", "nonfinite": "propagate", "capturable": False, "amp_scaling": False}


def _signature(name: str, kind: type[Spec]) -> inspect.Signature:
    def parameter(field: str, default: Any, how: Any) -> inspect.Parameter:
        return inspect.Parameter(field, how, default=inspect.Parameter.empty if default is REQUIRED else default)

    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    defaults = {field: f.default for field, f in kind.fields.items()} | DEFAULTS.get(name, {})
    places = list(defaults)
    shared = places[: places.index(SHARED[name]) + 1] if name in SHARED else places
    fields = [parameter(field, default, either if field in shared else keyword) for field, default in defaults.items()]
    routed = {"otherwise": kind.otherwise_default, "route": None, "split": None} if name in ROUTED else {}
    seed = {"hessian_seed": 0} if kind.observes else {}
    ranks = {"process_group": None} if kind.matrix else {}
    extra = [parameter(k, v, keyword) for k, v in {**COMMON, **routed, **seed, **ranks}.items()]
    return inspect.Signature([parameter("self", REQUIRED, either), parameter("params", REQUIRED, either), *fields, *extra])


def _make(name: str) -> type[RuleOptimizer]:
    kind, (_, title, _) = spec_class(name), OPTIMIZERS[name]
    signature = _signature(name, kind)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        self, params = given.pop("self"), given.pop("params")
        if kind.otherwise_default is not None and "otherwise" not in given:
            given["otherwise"] = create(kind.otherwise_default.name, **kind.otherwise_default.settings)
        hyperparameters = DEFAULTS.get(name, {}) | {field: given.pop(field) for field in kind.fields if field in given}
        super(made, self).__init__(params, hyperparameters, **given)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{title}.__init__"
    base = CurvatureOptimizer if kind.observes else RuleOptimizer
    doc = inspect.getdoc(importlib.import_module(kind.__module__))
    made: type[RuleOptimizer] = type(
        title, (base,), {"__init__": __init__, "__doc__": doc, "__module__": __name__, "spec": kind, "rule": name}
    )
    return made


for _name, (_, _title, _) in OPTIMIZERS.items():
    globals()[_title] = _make(_name)
