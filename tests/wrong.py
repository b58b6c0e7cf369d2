"""Optimizers that are wrong on purpose, for the conformance suite: each is `Right` but for one thing.

WRONG says by which check each is caught, and which others notice it too.
"""

import contextlib
import copy
import itertools
import math

import torch
from torch.optim import Optimizer

COUNT = itertools.count()


class Right(Optimizer):
    """AdamW, written plainly, and right as far as the suite looks."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, maximize=False, foreach=False):
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0 <= float(value) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if not all(0 <= b < 1 for b in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=foreach))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if any(p.is_complex() for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise TypeError("complex parameters are not for this one")

    def step(self, closure=None):
        return self.walk(closure)

    @torch.no_grad()
    def walk(self, closure=None):
        """What those below call: torch runs the hooks around any `step`, so around two of one that calls its parent's, but only once
        the parent was made too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for place, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, self.state[p], dict(group), place)
        return loss

    def begin(self, p, state):
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        state["step"] = torch.zeros((), dtype=torch.float64)
        state["m"], state["v"] = torch.zeros_like(p, dtype=wide), torch.zeros_like(p, dtype=wide)

    def direction(self, g, state, group):
        (b1, b2), t = group["betas"], float(state["step"])
        state["m"] = b1 * state["m"] + (1 - b1) * g
        state["v"] = b2 * state["v"] + (1 - b2) * g * g
        return (state["m"] / (1 - b1**t)) / ((state["v"] / (1 - b2**t)).sqrt() + group["eps"])

    def gradient(self, p, state, group):
        if p.grad.is_sparse:
            raise RuntimeError("sparse gradients are not for this one")
        return -p.grad if group["maximize"] else p.grad

    def one(self, p, state, group, place):
        if not state:
            self.begin(p, state)
        state["step"] = state["step"] + 1
        g = self.gradient(p, state, group).to(state["m"].dtype)
        u = self.direction(g, state, group)
        lr = float(group["lr"])
        p.copy_(p.to(u.dtype) * (1 - lr * group["weight_decay"]) - lr * u)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        places = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(places, (p for group in self.param_groups for p in group["params"]), strict=True):
            if i in state_dict["state"]:  # as it was saved, which torch would cast
                self.state[p] = {name: self.loaded(value, self.state[p][name]) for name, value in state_dict["state"][i].items()}

    def loaded(self, saved, cast):
        return copy.deepcopy(saved)


WRONG = {}


def wrong(check, *also, settings=None, claimed=None, gpu=False, ranks=0):
    """Enter a class: caught by `check`, noticed by `also`."""

    def enter(kind):
        WRONG.setdefault(check, (kind.__name__, set(also), settings or {}, claimed, gpu, ranks))
        return kind

    return enter


# ---- hyperparameters, numbers ------------------------------------------------------------------------------------------------------
@wrong("keywords")
class IgnoresDecay(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"weight_decay": 0.0}, place)


@wrong(
    "deterministic",
    "resume",
    "resume-pickle",
    "resume-file",
    "resume-order",
    "resume-bfloat16",
    "resume-float64",
    "copies",
    "dcp",
    "join",
    "float64",
    "gradients-unkept",
)
class Restless(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * (1 + 1e-6 * (next(COUNT) % 7))}, place)


class ByPlace(Right):
    def one(self, p, state, group, place):
        i = next(i for i, q in enumerate(self.param_groups[place]["params"]) if q is p)
        super().one(p, state, group | {"lr": float(group["lr"]) * (1 + i)}, place)


wrong("order", "groups", "leave")(ByPlace)


@wrong("independence")
class GlobalNorm(Right):
    def gradient(self, p, state, group):
        norm = sum(
            float(q.grad.abs().nan_to_num().sum()) for group in self.param_groups for q in group["params"] if q.grad is not None
        )
        return super().gradient(p, state, group) / (1 + norm)


@wrong("shapes")
class NeedsElements(Right):
    def gradient(self, p, state, group):
        p.reshape(-1)[0]
        return super().gradient(p, state, group)


@wrong("zero-gradients", "bfloat16", "zero-stays", "dcp")
class ZeroOverZero(Right):
    def gradient(self, p, state, group):
        g = super().gradient(p, state, group)
        return g * (g.abs().sum() / g.abs().sum())


@wrong("zero-stays")
class Drifts(Right):
    def direction(self, g, state, group):
        return super().direction(g, state, group) + 1e-3 * (g == 0)


@wrong("nan-contained")
class Leaks(Right):
    def gradient(self, p, state, group):
        return super().gradient(p, state, group) + 0 * sum(q.grad.sum() for q in group["params"] if q.grad is not None)


@wrong("scales")
class Overflows(Right):
    def gradient(self, p, state, group):
        g = super().gradient(p, state, group)
        return g + 0 * torch.exp(g * 1e-9)


class Ascends(Right):
    def direction(self, g, state, group):
        return -super().direction(g, state, group)


for each in ("quadratic", "rosenbrock", "regression"):
    wrong(each, "quadratic", "rosenbrock", "regression")(Ascends)


class MuonAlone(Right):
    """Momentum, orthogonalized by SVD."""

    def direction(self, g, state, group):
        super().direction(g, state, group)
        return self.shaped(state["m"], group) if g.ndim == 2 and g.numel() else g / (g.abs() + group["eps"])

    def shaped(self, m, group):
        u, _, v = torch.linalg.svd(m + group["eps"], full_matrices=False)
        return u @ v


@wrong("orthogonal", "keywords")
class MuonWithoutNewtonSchulz(MuonAlone):
    def shaped(self, m, group):
        return m / (m.norm() + group["eps"])


@wrong("scale-free", "keywords")
class MuonWithNorm(MuonAlone):
    def shaped(self, m, group):
        return super().shaped(m, group) * m.norm()


@wrong("which", claimed="adamw")
class EpsInside(Right):
    def direction(self, g, state, group):
        super().direction(g, state, group)
        (b1, b2), t = group["betas"], float(state["step"])
        return state["m"] / (1 - b1**t) / (state["v"] / (1 - b2**t) + group["eps"]).sqrt()


@wrong("neutral")
class ForeachDiffers(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * (1.01 if group["foreach"] else 1)}, place)


class Unchecked(Right):
    def __init__(self, params, lr=1e-2, weight_decay=0.01):
        super().__init__(params, weight_decay=0.0)
        for group in self.param_groups:
            group.setdefault("given", True)
            group["weight_decay"] = weight_decay
            group["lr"] = lr if group["lr"] == 1e-2 else group["lr"]
        self.defaults.update(lr=lr, weight_decay=weight_decay)


wrong("bad-settings", "infinite-settings")(Unchecked)


@wrong("infinite-settings")
class TakesInfinity(Right):
    def __init__(self, params, lr=1e-2, eps=1e-8, weight_decay=0.01):
        if not (lr >= 0 and weight_decay >= 0 and eps >= 0):
            raise ValueError("negative or NaN")
        super().__init__(params, lr if lr < math.inf else 1.0, (0.9, 0.99), min(eps, 1.0), min(weight_decay, 1.0))


@wrong("unknown-keyword")
class Swallows(Right):
    def __init__(self, params, lr=1e-2, weight_decay=0.01, **others):
        super().__init__(params, lr=lr, weight_decay=weight_decay)


@wrong("bad-parameters")
class TakesTwice(Right):
    def __init__(self, params, lr=1e-2, weight_decay=0.01):
        params = params if isinstance(params, torch.Tensor) else list(params)
        if isinstance(params, list) and all(isinstance(p, torch.Tensor) for p in params):
            params = list(dict.fromkeys(params))
        super().__init__(params, lr=lr, weight_decay=weight_decay)


# ---- where tensors lie -------------------------------------------------------------------------------------------------------------
@wrong("groups", "leave")
class ByGroupSize(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) / len(group["params"])}, place)


@wrong("group-settings")
class FirstGroupOnly(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": self.param_groups[0]["lr"]}, place)


@wrong("strides", "memory-format")
class ReadsMemory(Right):
    def gradient(self, p, state, group):
        g = super().gradient(p, state, group)
        flat = torch.as_strided(g, (g.numel(),), (1,)) if g.is_contiguous() or g.ndim >= 2 else g
        return flat.reshape(g.shape)


@wrong("memory-format")
class ForgetsChannels(Right):
    def gradient(self, p, state, group):
        g = super().gradient(p, state, group)
        last = g.ndim == 4 and g.is_contiguous(memory_format=torch.channels_last) and not g.is_contiguous()
        return g * 0.5 + 0.1 if last else g


@wrong("default-dtype")
class DefaultDtype(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * float(torch.tensor(1.003))}, place)


@wrong("float64")
class ThroughFloat32(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group, place)
        p.copy_(p.float())


@wrong("bfloat16", "resume-bfloat16")
class Widens(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group, place)
        p.data = p.data.float() if p.dtype == torch.bfloat16 else p.data


@wrong("bfloat16-learns")
class NarrowState(Right):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), **settings):  # so long a memory moves by less than a unit of bfloat16
        super().__init__(params, lr, betas, **settings)

    def direction(self, g, state, group):
        u = super().direction(g, state, group)
        if self.narrow:
            state["m"], state["v"] = state["m"].bfloat16().float(), state["v"].bfloat16().float()
        return u

    def one(self, p, state, group, place):
        self.narrow = p.dtype == torch.bfloat16
        super().one(p, state, group, place)


wrong("bfloat16-accumulates")(Right)  # p itself has no more bits, and so has everybody's


# ---- gradients -----------------------------------------------------------------------------------------------------------------------
@wrong("gradients-unwritten")
class WritesGradients(Right):
    def gradient(self, p, state, group):
        g = super().gradient(p, state, group).clone()
        p.grad.mul_(0.5)
        return g


@wrong("gradients-unkept")
class KeepsGradients(Right):
    def gradient(self, p, state, group):
        g = super().gradient(p, state, group)
        before, state["before"] = state.get("before", g), g
        return g + 0.1 * before


@wrong("none-gradients")
class CountsAnyway(Right):
    def step(self, closure=None):
        loss = self.walk(closure)
        for state in self.state.values():
            state["steps"] = state.get("steps", 0) + 1
        return loss


@wrong("freeze")
class NeverThaws(Right):
    def step(self, closure=None):
        self.frozen = getattr(self, "frozen", set()) | {
            id(p) for g in self.param_groups for p in g["params"] if p.grad is None and self.state[p]
        }
        return self.walk(closure)

    def one(self, p, state, group, place):
        if id(p) not in self.frozen:
            super().one(p, state, group, place)


@wrong("join")
class NoNewcomers(Right):
    first = None

    def step(self, closure=None):
        if self.first is None:
            self.first = len(self.param_groups)
        return self.walk(closure)

    def one(self, p, state, group, place):
        if place < self.first:
            super().one(p, state, group, place)


@wrong("leave")
class RemembersAll(Right):
    def step(self, closure=None):
        kept = (
            vars(self).setdefault("kept", {}).setdefault(len(self.param_groups), [list(g["params"]) for g in self.param_groups])
        )
        now = [g["params"] for g in self.param_groups]
        for group, params in zip(self.param_groups, kept, strict=True):
            group["params"] = params
        try:
            return self.walk(closure)
        finally:
            for group, params in zip(self.param_groups, now, strict=True):
                group["params"] = params


# ---- learning rates --------------------------------------------------------------------------------------------------------------------
@wrong("lr-read", "lr-tensor", "dcp")
class FirstRate(Right):
    def one(self, p, state, group, place):
        rates = vars(self).setdefault("rates", {})
        super().one(p, state, group | {"lr": rates.setdefault(id(p), float(group["lr"]))}, place)


@wrong("lr-tensor")
class TensorRate(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * (1.01 if torch.is_tensor(group["lr"]) else 1)}, place)


@wrong("schedulers")
class InitialRate(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": group.get("initial_lr", group["lr"])}, place)


@wrong("maximize")
class HalfMaximize(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * (1.01 if group["maximize"] else 1)}, place)


@wrong("rng-free")
class Draws(Right):
    def direction(self, g, state, group):
        return super().direction(g, state, group) + 0 * torch.rand(())


class Log:
    """Kept where nobody looks."""

    gradients = []  # noqa: RUF012


@wrong("memory")
class Grows(Right):
    def direction(self, g, state, group):
        Log.gradients.append(g.clone())
        return super().direction(g, state, group)


# ---- state -----------------------------------------------------------------------------------------------------------------------------
RESUMES = ("resume", "resume-pickle", "resume-file", "resume-order", "resume-bfloat16", "resume-float64", "dcp", "copies", "join")


@wrong("resume", *RESUMES)
class StateBeside(Right):
    def gradient(self, p, state, group):
        beside = vars(self).setdefault("beside", {})
        beside[id(p)] = 0.5 * beside.get(id(p), 0) + super().gradient(p, state, group)
        return beside[id(p)]


class Number:
    """A number that pickle forgets."""

    def __init__(self, value=0.0):
        self.value = value

    def __deepcopy__(self, memo):
        return type(self)(self.value)

    def __reduce__(self):
        return type(self), (0.0,)

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


class Kept(Number):
    def __reduce__(self):
        return type(self), (self.value,)


class Odd(Right):
    number = Number

    def gradient(self, p, state, group):
        before = state.setdefault("number", self.number())
        state["number"] = self.number(before.value + 1)
        return super().gradient(p, state, group) * (1 + 0.1 * before.value)


wrong("resume-pickle", "resume-file", "copies", "dcp")(Odd)


@wrong("resume-file", "dcp")
class OddObjects(Odd):
    number = Kept


@wrong("resume-order", "dcp")
class ByOrder(Right):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict | {"state": dict(enumerate(state_dict["state"].values()))})


@wrong("resume-bfloat16", "resume-alias")
class TorchCasts(Right):
    def loaded(self, saved, cast):
        return cast


@wrong("resume-float64")
class LoadsFloat32(Right):
    def loaded(self, saved, cast):
        return saved.float() if saved.dtype == torch.float64 and saved.ndim else saved.clone()


@wrong("resume-settings")
class OwnRate(Right):
    def load_state_dict(self, state_dict):
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


@wrong("resume-mismatch")
class LoadsAnything(Right):
    def load_state_dict(self, state_dict):
        with contextlib.suppress(ValueError):
            super().load_state_dict(state_dict)


@wrong("resume-alias")
class SharesState(Right):
    def one(self, p, state, group, place):
        before = dict(state)
        super().one(p, state, group, place)
        for name, old in before.items():
            state[name] = old.copy_(state[name])

    def loaded(self, saved, cast):
        return saved


@wrong("copies")
class CopiesLose(Right):
    def __setstate__(self, state):
        super().__setstate__(state)
        for each in self.state.values():
            each["m"] = torch.zeros_like(each["m"])


@wrong("dcp", "closure", "signatures")
class NoClosure(Right):
    def step(self):
        return self.walk()


@wrong("count")
class CountsInFloat32(Right):
    def begin(self, p, state):
        super().begin(p, state)
        state["step"] = torch.zeros(())


# ---- torch's interface -------------------------------------------------------------------------------------------------------------------
@wrong("closure")
class ClosureTwice(Right):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return self.walk(closure)


@wrong("hooks")
class NoHooks(Right):
    def load_state_dict(self, state_dict):
        kept = self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_post_hooks = type(kept)()
        super().load_state_dict(state_dict)
        self._optimizer_load_state_dict_post_hooks = kept


@wrong("signatures", "dcp")
class OtherNames(Right):
    def load_state_dict(self, saved):
        super().load_state_dict(saved)


@wrong("zero-grad")
class AlwaysNone(Right):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=True)


@wrong("autograd")
class History(Right):
    def begin(self, p, state):
        super().begin(p, state)
        state["trace"] = torch.zeros(1, requires_grad=True)


@wrong("grad-scaler")
class IgnoresScale(Right):
    _step_supports_amp_scaling = True


@wrong("sparse")
class HalvesSparse(Right):
    def gradient(self, p, state, group):
        return -p.grad.to_dense() if p.grad.is_sparse else super().gradient(p, state, group)


@wrong("complex")
class RealPart(Right):
    def add_param_group(self, param_group):
        Optimizer.add_param_group(self, param_group)

    def one(self, p, state, group, place):
        if p.is_complex():
            return p.sub_(0.1 * p.grad.real)
        super().one(p, state, group, place)


@wrong("compile")
class CompiledDiffers(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * (1.5 if torch.compiler.is_compiling() else 1)}, place)


# ---- devices and ranks -------------------------------------------------------------------------------------------------------------------
@wrong("cuda", gpu=True)
class CudaDiffers(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * (1.01 if p.is_cuda else 1)}, place)


@wrong("cuda-sync", gpu=True)
class Waits(Right):
    def gradient(self, p, state, group):
        return super().gradient(p, state, group) * (1 if float(p.grad.sum()) < math.inf else 0)


class Capturable(Right):
    """Says that it can be captured, and counts on the host."""

    def __init__(self, params, lr=1e-2, weight_decay=0.01, capturable=False):
        super().__init__(params, lr=lr, weight_decay=weight_decay)


wrong("cuda-graph", gpu=True)(Capturable)


@wrong("ddp", "sharded", ranks=2)
class ByRank(Right):
    def one(self, p, state, group, place):
        super().one(p, state, group | {"lr": float(group["lr"]) * (1.1 if torch.distributed.is_initialized() else 1)}, place)


@wrong("sharded", ranks=2)
class LocalNorm(Right):
    def gradient(self, p, state, group):
        g = super().gradient(p, state, group)
        own = g.to_local() if hasattr(g, "to_local") else g
        return g / (1 + 100 * own.abs().sum().item())
