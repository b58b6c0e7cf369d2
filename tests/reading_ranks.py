"""Matrix rules that read p, which their owners are sent: scenarios of `ranks`, and the single process beside them."""

import contextlib

import torch
import torch.distributed as dist
from ranks import SHAPES, counting, failure, parameters, plain, scenario, state_of, train, wholes

import rlx_optim.torch as ours
from rlx_optim import partition
from rlx_optim.rule import Slot, Spec, flag, integer, like, real

STEPS = 5


def coupled(p, g, m, decay, beta):
    m = beta * m + g + decay * p
    return m


def averaged(p, m, g, a, beta, keep, rest, pull):
    m = beta * m + g
    a = keep * a + rest * p
    u = m + pull * (p - a)
    return u, m, a


def heavy(g, m, beta):
    m = beta * m + g
    return m


def ahead(p, m, fast, lr):
    quick = fast * p - lr * m
    return quick


def whole_change(p, quick):
    u = p - quick
    return u


def back(p, quick, slow, part):
    slow = slow + part * (quick - slow)
    u = p - slow
    return u, slow


def begun(p, slow, first):
    slow = slow + first * p
    return slow


def sized(p, u):
    size = p
    return size


def away(u, step, size):
    change = step * u / (1 + size)
    return change


class Reading(Spec):
    """What the rules here share."""

    lr: float = real(0.02)
    weight_decay: float = real(0.1)
    momentum: float = real(0.9, high=1.0, open_high=True)
    matrix = True

    def slots(self, shape):
        return like(shape, m="first moment")

    def scalars(self, t, counters):
        return {"step": self.lr, "beta": self.momentum, "decay": self.weight_decay}

    def work(self, shape):
        return 10 * super().work(shape)


class CoupledMuon(Reading):
    """Weight decay joins the gradient, before the momentum and Newton–Schulz; and, where `sometimes`, every third step alone."""

    sometimes: bool = flag(False)

    def update(self, E, x):
        x = E.map(heavy, x) if self.sometimes and x.t % 3 else E.map(coupled, x)
        flat = x.m.reshape(x.m.shape[0], -1, x.m.shape[-1] if x.m.ndim > 1 else 1)
        return x.set(u=E.orthogonalize(flat, 3, (3.4445, -4.7750, 2.0315), 1e-7).reshape(x.p.shape))


class MixedMuon(CoupledMuon):
    """Takes matrices of unequal shapes at once, where the engine does."""

    def takes(self, shape):
        return None if len(shape) == 2 else "no matrix"

    def mixed_shapes(self):
        return True

    def update(self, E, x):
        x = E.map(coupled, x)
        return x.set(u=E.orthogonalize(x.m, 3, (3.4445, -4.7750, 2.0315), 1e-7))


class Averaging(Reading):
    """Pulled towards an average of p, which is state."""

    def slots(self, shape):
        return like(shape, m="first moment", a="average of p")

    def scalars(self, t, counters):
        share = (1 - 0.8) / (1 - 0.8**t)
        return {**super().scalars(t, counters), "keep": 1 - share, "rest": share, "pull": 0.5, "shrink": self.lr * 0.1}

    def update(self, E, x):
        return E.map(averaged, x)


class Stiefel(Reading):
    """The gradient's part along the manifold of p, by matrix products, and the retraction's second-order term."""

    def update(self, E, x):
        x = E.map(heavy, x)
        shape = x.p.shape
        X, M = (A.reshape(shape[0], -1, shape[-1] if len(shape) > 1 else 1) for A in (x.p, x.m))
        S = X.mT @ M
        U = M - 0.5 * (X @ (S + S.mT))
        U = U + 0.5 * self.lr * (X @ (U.mT @ U))
        return x.set(u=U.reshape(shape))


class Looking(Reading):
    """Lookahead around heavy ball: every second step p goes back, part of the way, to where it was."""

    every: int = integer(2, 1)

    def slots(self, shape):
        return like(shape, m="first moment", slow="where p was")

    def scalars(self, t, counters):
        first = 1.0 if t == 1 else 0.0
        return {**super().scalars(t, counters), "step": 1.0, "lr": self.lr, "fast": 1.0, "part": 0.5, "first": first}

    def decisions(self, t, counters):
        return {"syncs": t % self.every == 0}

    def update(self, E, x):
        x = E.map(ahead, E.map(heavy, E.map(begun, x)))

        def sync(slow):
            y = E.map(back, x.set(slow=slow))
            return y.u, y.slow

        def go(slow):
            return E.map(whole_change, x).u, slow

        u, slow = E.cond(x.syncs, sync, go, x.slow)
        return x.set(u=u, slow=slow)


class Ignoring(Reading):
    """Coupled decay only where there is any; and nothing is sent where it is not read."""

    def update(self, E, x):
        x = E.map(coupled, x) if self.weight_decay else E.map(heavy, x)
        return x.set(u=x.m)


class Rows(Reading):
    """A factor, one number a row, of p's own rows."""

    def slots(self, shape):
        return like(shape, m="first moment") | {"r": Slot(shape[:1], factor=True, meaning="second moment of rows")}

    def update(self, E, x):
        x = E.map(heavy, x)
        shape = x.p.shape
        P, M = (A.reshape(shape[0], shape[1] if len(shape) > 1 else 1, -1) for A in (x.p, x.m))
        r = 0.9 * x.r.reshape(P.shape[:2]) + 0.1 * (P * P).sum(-1)
        return x.set(u=(M * r[..., None]).reshape(shape), r=r.reshape(x.r.shape))


RULES = {kind.title: kind for kind in (CoupledMuon, MixedMuon, Averaging, Stiefel, Looking, Ignoring, Rows)}
SETTINGS = {"sometimes": ("CoupledMuon", {"sometimes": True})}
KINDS = (*RULES, *SETTINGS)


def made(kind, params, **settings):
    rule, own = SETTINGS.get(kind, (kind, {}))
    return ours.made(RULES[rule])(list(params.items()), **own, **settings)


def shapes_for(kind):
    return {k: shape for k, shape in SHAPES.items() if RULES[SETTINGS.get(kind, (kind,))[0]]().takes(shape) is None and shape}


def ended(kind, place=plain, dtype=torch.float32, shapes=None, steps=STEPS, **settings):
    params = parameters(place, shapes or shapes_for(kind), dtype)
    opt = made(kind, params, **settings)
    train(opt, params, 0, steps, place)
    return wholes(params), state_of(opt)


@contextlib.contextmanager
def stages(elements):
    """As if so many elements were enough for a stage."""
    before, partition.STAGE = partition.STAGE, elements
    try:
        yield
    finally:
        partition.STAGE = before


HALVES = [(kind, how) for kind in ("CoupledMuon", "Averaging") for how in ("stochastic", "exact", "nearest")]
LARGE = {"w": (70, 130), "even": (64, 128)}
SPLIT = {"w": 3, "wide": (10, 15, 5), "side": (5, 3)}
CUT = {k: v for k, v in SHAPES.items() if k in ("w", "twin", "wide", "side")}


def walked(world):
    """Every rule; and one or two of them in 16 bits, with coded state, in stages, on split matrices, in float64, on torch's engine."""
    place = plain if world is None else world.place
    out = {kind: ended(kind, place) for kind in KINDS}
    for kind, how in HALVES:
        out[kind, how] = ended(kind, place, torch.bfloat16, rounding=how)
    out["int8"] = ended("Averaging", place, shapes=LARGE, state_dtype="int8", steps=3)
    out["int8, exact"] = ended("Averaging", place, torch.bfloat16, LARGE, 3, state_dtype="int8", rounding="exact")
    out["split"] = ended("CoupledMuon", place, shapes=CUT, split=SPLIT)
    out["split halves"] = ended("CoupledMuon", place, torch.bfloat16, CUT, split=SPLIT, rounding="exact")
    out["float64"] = ended("Stiefel", place, torch.float64)
    out["torch"] = ended("MixedMuon", place, engine="torch")
    out["maximize"] = ended("Looking", place, maximize=True)
    with stages(100), counting(0 if world is None else world.rank) as log:
        out["stages"] = ended("Looking", place)
    out["exchanges"] = log["all_to_alls"]
    return out


scenario(2, 3)(walked)


DECAYS = (0.1, 0.0, 0.0, 0.2)
ROWS = {k: CUT[k] for k in ("w", "twin", "wide")}  # cut along the first axis


def decay_comes_and_goes(world):
    """Coupled decay that is set to 0 and back, which changes no structure; and the bytes that each step sends."""
    place, sent = plain if world is None else world.place, []
    params = parameters(place, ROWS)
    opt = made("Ignoring", params)
    for t, decay in enumerate(DECAYS):
        opt.param_groups[0]["weight_decay"] = decay
        with counting(0 if world is None else world.rank) as log:
            train(opt, params, t, t + 1, place)
        sent.append((log["sent"], log["all_to_alls"]))
    return wholes(params), sent


scenario(2)(decay_comes_and_goes)


@scenario(2)
def reading_under_ddp(world):
    out = {}
    for kind in KINDS:
        params = parameters(plain, shapes_for(kind))
        train(made(kind, params, process_group=dist.group.WORLD), params, 0, STEPS)
        out[kind] = wholes(params)
    return out


MESHES = {"hsdp": ("Replicate", 0), "both": (0, 1), "twice": (0, 0)}


@scenario(4)
def reading_on_meshes(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    out = {}
    for way, cuts in MESHES.items():

        def place(k, t, cuts=cuts):
            fits = all(cut == "Replicate" or cut < t.ndim for cut in cuts)
            there = [Shard(cut) if fits and cut != "Replicate" else Replicate() for cut in cuts]
            return distribute_tensor(t, mesh, there, src_data_rank=None)

        for kind in KINDS:
            out[way, kind] = ended(kind, place)
        out[way, "exact"] = ended("CoupledMuon", place, torch.bfloat16, CUT, rounding="exact")
    return out if world.rank == 0 else None


class Failing(Reading):
    """Raises on the owner of one matrix at one step."""

    failing = True

    def update(self, E, x):
        if type(self).failing and x.t == 3 and "wide" in x.names:
            raise ArithmeticError(f"no step of {x.names[0]}")
        return E.map(decayed, x)


def decayed(p, g, m, beta, decay):
    m = beta * m + g
    u = m + decay * p
    return u, m


class Measuring(Reading):
    """A commit that reduces p."""

    def update(self, E, x):
        return E.map(decayed, x)

    def commit(self, E, x):
        return E.map(away, E.map(sized, x, size="norm"))


@scenario(2)
def a_commit_that_measures(world):
    params = parameters(world.place, CUT)
    return failure(train, ours.made(Measuring)(list(params.items())), params, 0, 1, world.place)


@scenario(2, 3)
def an_owner_fails(world):
    """An update that raises on one owner: all ranks hear of it, its matrix is left alone, and training goes on."""
    params = parameters(world.place, CUT)
    opt, told = ours.made(Failing)(list(params.items())), []
    for t in range(STEPS):
        Failing.failing = t == 2
        told.append(failure(train, opt, params, t, t + 1, world.place))
    return wholes(params), state_of(opt), told
