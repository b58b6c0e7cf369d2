"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Idea. Rotate the gradient into the eigenvectors of its own second-moment matrices, where Adam's diagonal scaling is close to
the full one, and rotate the step back (Vyas et al., arXiv:2409.11321).

Formulas. For a matrix; n counts the steps that move.
    c = Q1ᵀ·g·Q2                                the gradient in the basis
    m ← b1·m + (1 − b1)·c
    v ← b2·v + (1 − b2)·c²
    p ← p − lr·(√(1 − b2^n)/(1 − b1^n))·Q1·(m/(√v + eps))·Q2ᵀ    eps before bias correction
    p ← (1 − lr·weight_decay)·p                 after the step
    L1 ← beta·L1 + (1 − beta)·g·gᵀ              beta = shampoo_beta, or betas[1]
    L2 ← beta·L2 + (1 − beta)·gᵀ·g
    Q1 ← qr(L1·Q1), Q2 ← qr(L2·Q2)              where n is a multiple of precondition_frequency
The first call only sets each L and Q = eigenvectors of L, descending, and moves nothing. Before a refresh the columns of Q
are ordered by the estimated eigenvalues diag(Qᵀ·L·Q), v is permuted to match, and m follows the basis. A dimension larger
than max_precond_dim is not rotated. A tensor of several dimensions has an L and a Q for each; one of fewer than two is that
rule with Q = I unless precondition_1d. merge_dims first folds neighbouring dimensions, from the left, while their product
is at most max_precond_dim. L and Q are left alone by a gradient that is not finite (or whose Gram matrix is not). They are
computed in float64 where the engine has it and rounded to what is stored: nearly equal eigenvalues are ordered by rounding, so
engines that round alike walk the same path. Directions that L leaves open but for rounding are not left to it: in the first
basis they are unit vectors, later those of the basis before, made orthonormal to the others.

Conventions.
- torch, optax: neither has it.
- the authors' code: the same rule, defaults included, first call and order of eps and decay too.
- pytorch_optimizer: the same rule; it keeps m in the parameter's own basis and rotates it each step.

When, and what it costs. Where a step of the model is expensive: its authors report over 40 % fewer of them than with
AdamW, at large batches. 8 bytes of state a parameter and 8·n² for every rotated dimension n; four products of the tensor with
n×n matrices a step and a QR of each L every precondition_frequency steps.
"""

import functools
import math

from .. import basis, linalg
from ..ops import maximum, one_minus_power, sqrt, where
from ..spec import Optax, Slot, Spec, Torch, betas, flag, integer, like, real


def taken(g):
    G = g
    return G


def direction(g, m, v, beta1, alpha1, beta2, alpha2, eps):
    m = beta1 * m + alpha1 * g
    v = beta2 * v + alpha2 * g * g
    u = m / (sqrt(v) + eps)
    return m, v, u


def based(E, begins, refreshes, stacks):
    """m, v and Q of each of the stacks (m, v, Q, L) in the bases that follow."""

    def begin(stacks):
        Q = basis.map_by_size(E, functools.partial(first_basis, E), [(Q, L) for _, _, Q, L in stacks])
        return [(m, v, new) for (m, v, _, _), new in zip(stacks, Q, strict=True)]

    def refresh(stacks):
        found = basis.map_by_size(E, functools.partial(next_basis, E), [(Q, L) for _, _, Q, L in stacks])
        return [followed(E, m, v, Q, new) for (m, v, Q, _), new in zip(stacks, found, strict=True)]

    def same(stacks):
        return [stack[:3] for stack in stacks]

    def renewed(stacks):
        return E.cond(begins, begin, refresh, stacks)

    return E.cond(refreshes, renewed, same, stacks)  # which the first call is too


def first_basis(E, Q, L):
    return E.to_storage_dtype(basis.eigenbasis(E, E.to_float64(L[1]), E.to_float64(Q)))  # Q is the identity


def next_basis(E, Q, L):
    """The basis, and the order that the columns of the one before have in it."""
    near = E.to_float64(Q)
    LQ = basis.gram_matmul(E, L[0], near)
    sizes = basis.column_dots(E, near, LQ)  # the estimated eigenvalues diag(Q' L Q)
    order = basis.descending_order(E, sizes)
    # L times the permuted Q is the permuted L Q
    LQ, near = basis.permute_columns(E, LQ, order), basis.permute_columns(E, near, order)
    free = basis.below_rounding(E, linalg.permute(E, sizes, order, 1))
    return E.to_storage_dtype(basis.orthonormalize(E, LQ, near, order, free)), order


def followed(E, m, v, Q, found):
    for i, (_, order) in found.items():
        v = linalg.permute(E, v, order, i)
    new = {i: basis for i, (basis, _) in found.items()}
    return linalg.rotate(E, new, linalg.rotate(E, Q, m, back=True)), v, new


class SOAP(Spec):
    """lr: about how far each coordinate moves a step, in the rotated basis.
    betas: how much of m and of v is kept a step.
    shampoo_beta: how much of the Gram matrices is kept a step; None takes betas[1].
    eps: joins the root, before bias correction.
    weight_decay: times lr, the share of p that is taken away after each step.
    precondition_frequency: how many steps between refreshes of the basis.
    max_precond_dim: a larger dimension is not rotated.
    merge_dims: fold neighbouring dimensions first.
    precondition_1d: rotate vectors as well.
    """

    name = "soap"
    summary = "Adam in the eigenbasis of Shampoo's preconditioner"
    torch = Torch(telltale="precondition_frequency")
    optax = Optax(defaults={"precondition_frequency": 10})

    lr: float = real(3e-3)
    betas: tuple[float, float] = betas(0.95, 0.95)
    shampoo_beta: float | None = real(None, high=1.0, open_high=True, optional=True)
    eps: float = real(1e-8)
    weight_decay: float = real(0.01)
    precondition_frequency: int = integer(10, 1)
    max_precond_dim: int = integer(10000, 0, fixed=True)
    merge_dims: bool = flag(False, fixed=True)
    precondition_1d: bool = flag(False, fixed=True)

    matrix = True
    step_dependent = True
    unstacked_factors = True
    syncs_on = ("begins",)

    def merged(self, shape):
        """The shape whose dimensions are rotated."""
        if not self.merge_dims or len(shape) < 2:
            return shape
        folded: tuple[int, ...] = ()
        product = 1
        for n in shape:
            if product * n <= self.max_precond_dim:
                product *= n
            elif product > 1:
                folded, product = (*folded, product), n
            else:
                folded = (*folded, n)
        return (*folded, product) if product > 1 or not folded else folded

    def rotated(self, shape):
        """The axes, counted in a stack of merged tensors, that have a basis."""
        merged = self.merged(shape)
        wanted = len(shape) > 1 or self.precondition_1d
        return [axis for axis, n in enumerate(merged, 1) if wanted and n <= self.max_precond_dim]

    def slots(self, shape):
        """m: the average of gradients, in the basis.
        v: the average of their squares, in the basis.
        L1: the average Gram matrix of the first dimension; L2 of the second, and so on.
        Q1: the basis of the first dimension; Q2 of the second, and so on.
        """
        merged = self.merged(shape)
        square = {axis: (merged[axis - 1],) * 2 for axis in self.rotated(shape)}
        factors = {f"L{axis}": Slot(s, factor=True, meaning="factor") for axis, s in square.items()}
        bases = {f"Q{axis}": Slot(s, eye=True, fill=1.0, factor=True, meaning="basis") for axis, s in square.items()}
        moments = like(shape, m="first moment in the basis", v="second moment in the basis")
        return moments | factors | bases

    def scalars(self, t, counters):
        beta1, beta2 = self.betas
        numbers = {"beta1": beta1, "alpha1": 1 - beta1, "beta2": beta2, "alpha2": 1 - beta2, "eps": self.eps}
        beta = beta2 if self.shampoo_beta is None else self.shampoo_beta
        n, moves = maximum(t - 1, 1), where(t > 1, 1.0, 0.0)  # the first call moves nothing
        shrink = moves * self.lr * self.weight_decay
        step = moves * self.lr * sqrt(one_minus_power(beta2, n)) / one_minus_power(beta1, n)
        # decay after the step: (1 − shrink)·(p − step·u) = p − (shrink·p + (1 − shrink)·step·u); a cautious one is of p as it was
        left = 1 - shrink if self.decay == "decoupled" else 1.0
        return numbers | {"beta": beta, "alpha": 1 - beta, "shrink": shrink, "step": left * step}

    def decisions(self, t, counters):
        return {"begins": t == 1, "refreshes": (t - 1) % self.precondition_frequency == 0}  # t - 1 steps have moved, with this

    def graph_safe(self):
        return True

    def work(self, shape):
        size, every = math.prod(shape), self.precondition_frequency
        dims = [self.merged(shape)[axis - 1] for axis in self.rotated(shape)]
        return size + sum(6 * size * n + (4 * size * n + 6 * n**3) // every for n in dims)

    def update(self, E, x):
        shape = x.p.shape[1:]
        stacked = (x.p.shape[0], *self.merged(shape))
        G, m, v = (X.reshape(stacked) for X in (E.map(taken, x).G, x.m, x.v))
        Q = {i: x[f"Q{i}"] for i in self.rotated(shape)}
        L = {i: linalg.average_gram(E, x[f"L{i}"], G, i, x.beta, x.alpha) for i in Q}  # as it is stored, and before it is rounded

        def stay(m, v):
            return m, m, v

        def move(m, v):
            y = E.map(direction, x.set(g=linalg.rotate(E, Q, G), m=m, v=v))
            return linalg.rotate(E, Q, y.u, back=True), y.m, y.v

        u, m, v = E.either(x.begins, stay, move, m, v)

        def ended(m, v, Q):
            slots = {f"L{i}": stored for i, (stored, _) in L.items()} | {f"Q{i}": basis for i, basis in Q.items()}
            return x.set(u=u.reshape(x.p.shape), m=m.reshape(x.p.shape), v=v.reshape(x.p.shape), **slots)

        return E.defer(functools.partial(based, E, x.begins, x.refreshes), (m, v, Q, L), ended)
