"""flax.nnx: its Optimizer takes variables apart and hands states back in mappings of its own; steps are those without it."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from rlx_optim import optax as ours  # noqa: E402

pytestmark = pytest.mark.slow
FACTORIES = tuple(ours.known())
X = jnp.sin(jnp.arange(24.0)).reshape(4, 6)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(6, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.layers[0](nnx.relu(self.inner(x))))


def loss(model):
    return (model(X) ** 2).mean()


def arrays(model):
    return jax.tree.map(jnp.array, nnx.as_pure(nnx.state(model, nnx.Param)))


def objective(definition):
    """The loss as a function of parameters alone, for Sophia."""
    return lambda params: loss(nnx.merge(definition, params))


def with_nnx(tx, steps, jit=True, **beside):
    model = Net()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model), **beside)

    step = nnx.jit(step) if jit else step
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def without(tx, steps, jit=True, **beside):
    definition, variables = nnx.split(Net())
    params = nnx.to_pure_dict(variables)
    state = tx.init(params)

    def step(params, state):
        grads = jax.grad(lambda p: loss(nnx.merge(definition, p)))(params)
        updates, state = tx.update(grads, state, params, **beside)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for _ in range(steps):
        params, state = step(params, state)
    return params


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("name", FACTORIES)
def test_three_steps_are_those_without_it(name):
    definition, _ = nnx.split(Net())
    beside = {"obj_fn": objective(definition)} if name == "sophia" else {}
    tx, jit = getattr(ours, name)(0.01), name not in ("soap", "kron_psgd")  # which XLA compiles for long
    model, _ = with_nnx(tx, 3, jit, **beside)
    assert same(arrays(model), without(tx, 3, jit, **beside))
    assert not same(arrays(model), arrays(Net()))


HOLDERS = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), ours.prodigy(1.0)),
    "MultiSteps": lambda: optax.MultiSteps(ours.prodigy(1.0), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(ours.prodigy)(1.0),
    "skip_above": lambda: ours.skip_above(ours.prodigy(1.0)),
    "int8": lambda: ours.adamw(0.01, state_dtype="int8"),
    "mask": lambda: ours.adamw(0.01, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
    "a pattern": lambda: ours.muon(0.01, route={"layers.*.kernel": "otherwise"}),
    "a path": lambda: ours.muon(0.01, route=lambda path, _: False if path == "inner.kernel" else None),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_around_them(holder):
    model, _ = with_nnx(HOLDERS[holder](), 4)
    assert same(arrays(model), without(HOLDERS[holder](), 4))


def test_leaves_are_called_the_same_before_and_after_it_takes_them_out_of_variables():
    variables = nnx.state(Net(), nnx.Param)
    table = ours.routing_report("muon", variables)
    assert table == ours.routing_report("muon", nnx.as_pure(variables))
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        "head.bias", "head.kernel", "inner.bias", "inner.kernel", "layers.0.bias", "layers.0.kernel",
    ]  # fmt: skip


def test_a_saved_state_goes_on_bit_for_bit(tmp_path):
    tx = ours.kron_psgd(0.01)
    whole, _ = with_nnx(tx, 6, jit=False)
    half, optimizer = with_nnx(tx, 3, jit=False)
    ours.save_state(tmp_path / "half", optimizer.tx, nnx.as_pure(optimizer.opt_state), arrays(half))
    again = nnx.Optimizer(half, tx, wrt=nnx.Param)
    nnx.update(again.opt_state, nnx.state(ours.load_state(tmp_path / "half", tx, arrays(half))))
    for _ in range(3):
        again.update(half, nnx.grad(loss)(half))
    assert same(arrays(whole), arrays(half))
