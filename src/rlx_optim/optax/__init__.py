"""Every optimizer as an optax GradientTransformation.

    from rlx_optim.optax import adamw, muon, soap
    tx = muon(learning_rate=0.02)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)

Keyword names and defaults follow optax where optax has the optimizer. The rules are those of `rlx_optim.rules`, traced.
"""

from .checkpoint import load_state, save_state
from .factories import FACTORIES, made, routing_report
from .transform import RuleState

__all__ = ["RuleState", "load_state", "routing_report", "save_state"]
__all__ += list(FACTORIES)

globals().update({name: made(name) for name in FACTORIES})


def __dir__() -> list[str]:
    return __all__
