"""Every optimizer as a torch.optim.Optimizer.

    from rlx_optim.torch import AdamW, Muon, SOAP
    opt = Muon(model, lr=0.02)            # or model.parameters(), model.named_parameters(), groups
    loss.backward(); opt.step(); opt.zero_grad()

The classes are made from the specs in `rlx_optim.rules`; `__init__.pyi` beside this file shows them to editors and type checkers.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from .. import documentation, registry
from ..numpy.classes import create as create_named
from ..spec import MODIFIERS, REQUIRED, Spec

try:
    from .attention import qk_clip_
    from .clip import clip_grad_norm_
    from .cuda_graphs import Graphed
    from .curvature import CurvatureRuleOptimizer
    from .optimizer import RuleOptimizer
except ModuleNotFoundError as problem:
    raise documentation.missing_library_error(problem, __name__, "torch", ("torch",)) from None

__all__ = ["Graphed", "RuleOptimizer", "clip_grad_norm_", "create", "qk_clip_"] + [kind.title for kind in registry.OURS]

COMMON = {
    "maximize": False, "engine": "auto", "nonfinite": "propagate", "skip_above": None, "capturable": False, "amp_scaling": False,
    "fused": None, "foreach": None, "differentiable": False, "offload": None,
}  # fmt: skip


def _signature(kind: type[Spec]) -> inspect.Signature:
    def parameter(name: str, default: Any, how: Any) -> inspect.Parameter:
        annotation = documentation.TORCH[name][0] if name in documentation.TORCH else kind.fields[name].annotation
        annotation = {"lr": f"{annotation} | torch.Tensor", **kind.torch.annotations}.get(name, annotation)
        given = inspect.Parameter.empty if default is REQUIRED else default
        return inspect.Parameter(name, how, default=given, annotation=annotation)

    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    defaults = {field: f.default for field, f in kind.fields.items()} | dict(kind.torch.defaults)
    places = [field for field in defaults if field not in MODIFIERS]
    shared = places[: places.index(kind.torch.shared) + 1] if kind.torch.shared else places
    fields = [parameter(field, default, either if field in shared else keyword) for field, default in defaults.items()]
    routed = {"otherwise": kind.otherwise_default, "route": None, "split": None} if kind.matrix or kind.otherwise_default else {}
    routed |= {"heads": False} if kind.matrix else {}
    seed = {"hessian_seed": 0} if kind.observes else {}
    ranks = {"process_group": None} if kind.matrix else {}
    extra = [parameter(k, v, keyword) for k, v in {**COMMON, **routed, **seed, **ranks}.items()]
    return inspect.Signature([inspect.Parameter("self", either), parameter("params", REQUIRED, either), *fields, *extra])


@functools.cache
def made(kind: type[Spec]) -> type[RuleOptimizer]:
    """The class of that rule."""
    signature = _signature(kind)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(documentation.bind_arguments(kind.title, signature, (self, *args), kwargs).arguments)
        self, params = given.pop("self"), given.pop("params")
        if kind.otherwise_default is not None and "otherwise" not in given:
            settings = {**kind.otherwise_default.settings, **{k: given[k] for k in given.keys() & {"rounding"}}}
            given["otherwise"] = create_named(kind.otherwise_default.name, **settings)
        hyperparameters = {**kind.torch.defaults, **{field: given.pop(field) for field in kind.fields if field in given}}
        super(its, self).__init__(params, hyperparameters, **given)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{kind.title}.__init__"
    base = CurvatureRuleOptimizer if kind.observes else RuleOptimizer
    space = {
        "__init__": __init__,
        "__doc__": documentation.describe_class(kind, signature, documentation.TORCH),
        "__module__": __name__,
        "spec": kind,
        "rule": kind.name,
    }
    its: type[RuleOptimizer] = type(kind.title, (base,), space)
    return its


def __getattr__(title: str) -> Any:
    return made(registry.find_titled(title, __name__))


def __dir__() -> list[str]:
    return sorted({*__all__, *(kind.title for kind in registry.known().values())})


def create(name: str, params: Any, **settings: Any) -> RuleOptimizer:
    """An optimizer by name: create("adamw", model, lr=3e-4)."""
    return made(registry.spec_class(name))(params, **settings)
