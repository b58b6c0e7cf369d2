"""What a user of JAX writes; type checkers must take it (make types)."""

import jax.numpy as jnp
import optax

from rlx_optim.optax import adamw, load_state, muon, save_state, soap

params = {"w": jnp.ones((8, 8)), "b": jnp.zeros(8)}
tx = optax.chain(optax.clip_by_global_norm(1.0), soap(optax.cosine_decay_schedule(3e-3, 1000)))
updates, state = tx.update(params, tx.init(params), params)
params = optax.apply_updates(params, updates)
save_state("soap.safetensors", tx, state, params)
state = load_state("soap.safetensors", tx, params)
other = muon(learning_rate=0.02, otherwise=adamw(3e-4, b2=0.95))
