"""Every optimizer as an optax GradientTransformation.

    from rlx_optim.optax import adamw, muon, soap
    tx = muon(learning_rate=0.02)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)

Keyword names and defaults follow optax where optax has the optimizer. The rules are those of `rlx_optim.rules`, traced.
"""

from typing import Any

from .. import documentation, registry

try:
    from .checkpoint import load_state, save_state
    from .factories import create, known, make_factory, name_of
    from .guard import skip_above
    from .nested import routing_report
    from .transform import RuleState, averaged
except ModuleNotFoundError as problem:
    raise documentation.missing_library_error(problem, __name__, "jax", ("jax", "jaxlib", "optax")) from None


__all__ = ["RuleState", "averaged", "create", "load_state", "routing_report", "save_state", "skip_above"]
__all__ += [name_of(kind) for kind in registry.OURS]


def __getattr__(factory: str) -> Any:
    if factory.startswith("_") or factory not in known():
        raise AttributeError(f"module {__name__!r} has no attribute {factory!r}")
    return make_factory(known()[factory])


def __dir__() -> list[str]:
    return list(dict.fromkeys([*__all__, *known()]))
