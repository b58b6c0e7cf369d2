"""JAX: SOAP in an optax chain, compiled, saved, and taken over by NumPy.

python examples/jax_soap.py
"""

import jax
import jax.numpy as jnp
import optax

import rlx_optim
from rlx_optim.data import load_digits
from rlx_optim.optax import load_state, routing_report, save_state, soap

STEPS = 200
images, labels = map(jnp.asarray, load_digits())
keys = jax.random.split(jax.random.key(0), 2)
params = {
    "fc1": {
        "kernel": 0.1 * jax.random.normal(keys[0], (64, 32)),
        "bias": jnp.zeros(32),
    },
    "fc2": {
        "kernel": 0.1 * jax.random.normal(keys[1], (32, 10)),
        "bias": jnp.zeros(10),
    },
}
tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    soap(
        optax.warmup_cosine_decay_schedule(0.0, 0.01, 10, STEPS), weight_decay=0.01
    ),
)
print(routing_report(tx, params))


def logits(params, x):
    hidden = jnp.tanh(x @ params["fc1"]["kernel"] + params["fc1"]["bias"])
    return hidden @ params["fc2"]["kernel"] + params["fc2"]["bias"]


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, x), y
    ).mean()


@jax.jit
def step(params, state, key):
    batch = jax.random.randint(key, (64,), 0, 1500)
    updates, state = tx.update(
        jax.grad(loss)(params, images[batch], labels[batch]), state, params
    )
    return optax.apply_updates(params, updates), state


state = tx.init(params)
for i in range(STEPS):
    params, state = step(params, state, jax.random.key(i))

save_state(
    "soap.safetensors", tx, state, params
)  # our part of the chain, by parameter name
state = load_state("soap.safetensors", tx, params)
# the same state under NumPy; a schedule is given anew
print(rlx_optim.load("soap.safetensors", lr=1e-3))

accuracy = (logits(params, images[1500:]).argmax(1) == labels[1500:]).mean()
print(f"accuracy {accuracy:.3f}")
assert accuracy > 0.85
