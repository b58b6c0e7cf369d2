"""KronPSGD: momentum whitened by a Kronecker-factored preconditioner that is learned by descent on a Lie group.

Idea. Keep one small factor q per dimension whose product Q makes the momentum's covariance the identity: QᵀQ approaches
covariance^(−1/2). Fit it by comparing the preconditioned momentum with inversely preconditioned noise, without any
eigendecomposition (Li, arXiv:1512.04202 and arXiv:2402.11858).

Formulas. For a matrix, whose factors are q1 and q2.
    m ← beta1·m + (1 − beta1)·g, m̂ = m/(1 − beta1^t)
    A = q1·m̂·q2ᵀ, B = q1⁻ᵀ·V·q2⁻¹               when q is updated; V is standard normal noise
    q1 ← q1 − precond_lr·triu(A·Aᵀ − B·Bᵀ)·q1/s1        s1 bounds the spectral norm of A·Aᵀ + B·Bᵀ from below
    q2 ← q2 − precond_lr·triu(Aᵀ·A − Bᵀ·B)·q2/s2        and s2 that of Aᵀ·A + Bᵀ·B
    u = q1ᵀ·q1·m̂·q2ᵀ·q2
    u ← u·min(1, 1.1/(rms(u) + 1e-12))
    p ← p − lr·(u + weight_decay·p)             decay for two dimensions and up
A factor is upper triangular, or diagonal when its dimension exceeds max_size, the tensor has fewer than min_ndim_triangular
dimensions, or memory_save_mode says so ("one_diag": the largest dimension, the last of equals; "all_diag": every one); it
begins as precond_init_scale^(1/ndim)·I. With T1 and T2 the diagonals of the two products, a diagonal one follows
    q ← q − precond_lr·(T1 − T2)·q/max(|T1 + T2|)
With balance_probability per update the factors are rescaled to equal largest entries, which changes no step. A 0-D tensor
counts as length 1. Updates come with probability max(0.03, min(1, exp(−0.001·(n − 500)))), n = t − 1, or the one given: the
counter rises by 1 a step, at 1/probability or more there is an update and it returns to 0. Noise is drawn by t and a key
of state, which begins as that of (seed, name); probe(name, t, shape) replaces it. Factors are left alone where they would
stop being finite.

Conventions.
- torch, optax: neither has it.
- kron_torch: the same rule without the small damping noise that it adds to the momentum.
- pytorch_optimizer: equal to Kron, but for small constants and the source of the noise.
- the Rust crate: feeds the gradient to both A and B, so its Q never leaves the identity: a defect, and not offered.

When, and what it costs. Where Adam's diagonal is too coarse and an eigendecomposition too dear. 4 bytes of state a parameter
and 4·n² for every triangular dimension n; two products of the tensor with each q a step, and per update two more products,
a triangular solve and two Gram matrices.
"""

import math

from .. import linalg
from ..ops import exp, one_minus_power
from ..spec import KEY, Foreign, Optax, Slot, Spec, Torch, choice, flag, function, integer, like, real


def average(m, g, beta, alpha, share):
    m = beta * m + alpha * g
    mhat = m / share
    return m, mhat


def taken(g):
    G = g
    return G


class KronPSGD(Spec):
    """lr: how far to step along the whitened momentum, whose rms is at most 1.1.
    beta1: how much of the momentum is kept a step.
    weight_decay: how much of p joins the update; tensors of two dimensions and up.
    precond_lr: how far the factors move at an update.
    precond_init_scale: the size of the preconditioner at first.
    preconditioner_update_probability: how often the factors are updated; None follows the schedule from 1 down to 0.03.
    max_size: a larger dimension has a diagonal factor.
    min_ndim_triangular: tensors of fewer dimensions have diagonal factors.
    memory_save_mode: make the largest dimension's factor diagonal, or all of them.
    momentum_into_precond_update: fit the factors to the momentum; else to the gradient.
    balance_probability: how often, at an update, the factors are rescaled to equal size.
    seed: of the noise, with the tensor's name, at its first step.
    probe: a function of name, t and shape that gives the noise in place of the generator.
    """

    name = "kronpsgd"
    summary = "momentum whitened by learned Kronecker factors"
    aliases = ("kron",)
    torch = Torch(slots={"m": "momentum_buffer"})
    optax = Optax("kron_psgd", settings={"b1": Foreign("beta1")}, without=("probe",))

    lr: float = real(1e-3)
    beta1: float = real(0.9, high=1.0, open_high=True)
    weight_decay: float = real(0.0)
    precond_lr: float = real(0.1)
    precond_init_scale: float = real(1.0, open_low=True)
    preconditioner_update_probability: float | None = real(None, open_low=True, high=1.0, optional=True)
    max_size: int = integer(8192, 0, fixed=True)
    min_ndim_triangular: int = integer(2, 0, fixed=True)
    memory_save_mode: str | None = choice(None, "one_diag", "all_diag")
    momentum_into_precond_update: bool = flag(True)
    balance_probability: float = real(0.01, high=1.0)
    seed: int = integer(0, 0)
    probe: object = function()

    matrix = True
    step_dependent = True
    syncs_on = ("begins",)

    def diagonal(self, dims):
        """Which factors are diagonal."""
        if self.memory_save_mode == "all_diag" or len(dims) < self.min_ndim_triangular:
            return set(range(len(dims)))
        spared = {max((n, i) for i, n in enumerate(dims))[1]} if self.memory_save_mode == "one_diag" else set()
        return spared | {i for i, n in enumerate(dims) if n > self.max_size}

    def slots(self, shape):
        """m: the average of gradients.
        q1: the factor of the first dimension; q2 of the second, and so on.
        key: what noise is drawn by, four numbers below 2^16; zeros become those of (seed, name) at the first step.
        """
        dims = shape or (1,)
        scale, diagonal = self.precond_init_scale ** (1 / len(dims)), self.diagonal(dims)
        factors = {
            f"q{i}": Slot((n,) if i - 1 in diagonal else (n, n), scale, eye=i - 1 not in diagonal, factor=True, meaning="factor")
            for i, n in enumerate(dims, 1)
        }
        return like(shape, m="first moment") | factors | {"key": Slot((4,), factor=True, meaning=KEY)}

    counter_ranges = {"counter": real(0)}

    def counters(self):
        """counter: steps since the last update of the factors."""
        return {"counter": 0}

    def scalars(self, t, counters):
        average = {"beta": self.beta1, "alpha": 1 - self.beta1, "share": one_minus_power(self.beta1, t)}
        fit = {"precond_lr": self.precond_lr, "balance_probability": self.balance_probability}
        return average | fit | {"step": self.lr, "shrink": self.lr * self.weight_decay}

    def decisions(self, t, counters):
        counter, given = counters["counter"] + 1, self.preconditioner_update_probability
        scheduled = (counter * exp(-0.001 * (t - 501)) >= 1) | (counter >= 1 / 0.03)  # 1 / p(n), n = t - 1
        fits = scheduled if given is None else counter >= 1 / given
        return {"begins": t == 1, "fits": fits, "counter": counter * (1 - fits)}

    def graph_safe(self):
        return self.probe is None

    def work(self, shape):
        size, diagonal = math.prod(shape), self.diagonal(shape)
        return size + sum(2 * size * n for i, n in enumerate(shape) if i not in diagonal)  # the rarer fit grows alike

    def update(self, E, x):
        stack = x.p.shape if x.p.ndim > 1 else (*x.p.shape, 1)
        x = E.map(average, x)
        mhat = x.mhat.reshape(stack)
        q = {i: x[f"q{i}"] for i in range(1, len(stack))}
        key = E.either(x.begins, lambda key: E.derive_keys(key, x.seed, x.names), lambda key: key, x.key)

        # a factor is upper triangular (B, n, n) or diagonal (B, n)
        def multiply(f, U, rounds=False):
            return linalg.triangular_matmul(E, f, U, rounds) if f.ndim == 3 else f[..., None] * U

        def multiply_for_step(f, U):
            return multiply(f, U, rounds=True)

        def multiply_transposed(f, U):
            return linalg.triangular_matmul_transposed(E, f, U) if f.ndim == 3 else f[..., None] * U

        def divide(f, U):
            return E.solve_triangular(f, U) if f.ndim == 3 else U / f[..., None]

        def fit(q):
            V = E.random("normal", key, x.t, stack) if self.probe is None else E.probe(self.probe, x).reshape(stack)
            A = linalg.apply_factors(
                E, multiply, q, mhat if self.momentum_into_precond_update else E.map(taken, x).G.reshape(stack)
            )
            B = linalg.apply_factors(E, divide, q, V)
            new = {}
            for i, f in q.items():
                T1, T2 = (linalg.gram(E, X, i, diagonal=f.ndim == 2) for X in (A, B))
                if f.ndim == 3:
                    share = 1 / linalg.spectral_bound(E, T1 + T2)
                    new[i] = E.subtract(f, E.scale(linalg.triangular_product(E, E.subtract(T1, T2), f), x.precond_lr * share))
                else:
                    new[i] = f - x.precond_lr * (T1 - T2) * f / E.floor(E.norm(T1 + T2, math.inf), linalg.TINY)
            # one factor that is not finite spoils the tensor's others: keep them all as they were
            sound = math.prod(linalg.is_finite(E, f).reshape(-1) for f in new.values()) > 0
            if len(q) > 1:
                new = balanced(new)
            return {i: E.where(sound.reshape(-1, *[1] * (f.ndim - 1)), f, q[i]) for i, f in new.items()}

        def balanced(q):
            top = {i: E.norm(f, math.inf).reshape(-1) for i, f in q.items()}
            mean = math.prod(size ** (1 / len(q)) for size in top.values())
            coin = E.random("uniform", key, x.t, (stack[0],)) < x.balance_probability
            return {i: E.scale(f, E.where(coin, mean / top[i], 1.0).reshape(-1, *[1] * (f.ndim - 1))) for i, f in q.items()}

        q = E.cond(x.fits, fit, lambda q: q, q)
        u = linalg.apply_factors(E, multiply_transposed, q, linalg.apply_factors(E, multiply_for_step, q, mhat))
        rms = E.norm(u) / math.sqrt(math.prod(stack[1:]))
        u = (u * E.minimum(1.1 / (rms + 1e-12), 1.0)).reshape(x.p.shape)
        shrink = x.shrink if x.p.ndim > 2 else 0.0
        return x.set(u=u, shrink=shrink, key=key, **{f"q{i}": f for i, f in q.items()})
