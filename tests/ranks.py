"""What the processes of test_distributed do: scenarios, run one after the other by every rank of a gloo group.

A scenario is a function of a `World`; what it gives on each rank is kept for the tests. The same functions, without a World, train the
single process that everything is compared with.
"""

import contextlib
import copy
import datetime
import functools
import importlib.util
import os
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import TORCH as ALL
from torch import nn

import rlx_optim.torch as ours
from rlx_optim.partition import extent

REDUCING, MATRIX = (
    ("Lamb", "LARS", "StableAdamW", "Adafactor", "MARS", "Prodigy"),
    ("SOAP", "KronPSGD", "Muon", "NorMuon", "Scion"),
)
TOGETHER = REDUCING + MATRIX  # ranks work together on a tensor
#: all that ranks do differently; the other rules are stepped shard by shard, as these three are
KINDS = tuple(name for name in ALL if name in (*TOGETHER, "SGD", "AdamW", "ScheduleFreeAdamW"))
#: rows that do not divide, fewer rows than ranks, three and four dimensions, cut along columns ("side"), not cut at all ("s")
SHAPES = {
    "w": (24, 16), "twin": (24, 16), "wide": (6, 30), "few": (2, 9), "odd": (5, 7), "side": (8, 10), "b": (37,), "one": (1,),
    "s": (), "conv": (4, 3, 3, 2),
}  # fmt: skip
STEPS = 10
MORE = (4,) if "SLOW_TESTS" in os.environ else ()  # worlds that only slow tests ask about
SCENARIOS = {}
TIMEOUT = datetime.timedelta(seconds=60)


class World:
    def __init__(self, rank, size, folder):
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.size, self.folder = rank, size, Path(folder)
        self.mesh = init_device_mesh("cpu", (size,))

    def place(self, name, tensor):
        """Give a tensor its place on the mesh."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placement = Shard(1) if name == "side" else Shard(0) if tensor.ndim else Replicate()
        return distribute_tensor(tensor, self.mesh, [placement], src_data_rank=None)


def scenario(*sizes):
    def register(function):
        for size in sizes:
            SCENARIOS.setdefault(size, []).append(function)
        return function

    return register


# ---- training, sharded and not ----------------------------------------------------------------------------------------------
def tensors(t, shapes=SHAPES, dtype=torch.float32):
    """Parameters for t < 0, else the gradients of step t."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(1000 * (t + 1) + i)
        found[name] = (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1).to(dtype)
    return found


def parameters(place, shapes=SHAPES, dtype=torch.float32):
    return {name: nn.Parameter(place(name, value)) for name, value in tensors(-1, shapes, dtype).items()}


def plain(name, tensor):
    return tensor


def make(name, params, **settings):
    return getattr(ours, name)(list(params.items()), **{**ALL[name], **settings})


def curve(opt, params, t, place):
    """Feed Sophia: a loss whose Hessian is diagonal."""
    scales = {k: place(k, v.abs() * 10) for k, v in tensors(500 + t, {k: p.shape for k, p in params.items()}).items()}
    opt.update_hessian(lambda: sum((scales[k] * p * p).sum() for k, p in params.items()))


def train(opt, params, start, stop, place=plain, missing=lambda t: ()):
    shapes = {k: tuple(p.shape) for k, p in params.items()}
    for t in range(start, stop):
        if isinstance(opt, ours.Sophia) and t % 3 == 0:
            curve(opt, params, t, place)
        for k, g in tensors(t, shapes, next(iter(params.values())).dtype).items():
            params[k].grad = None if k in missing(t) else place(k, g)
        opt.step()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else torch.as_tensor(tensor)).detach().clone()


def wholes(params):
    return {k: whole(p) for k, p in params.items()}


def state_of(opt):
    """The state, whole, by place in the groups and name."""
    return {f"{i} {k}": whole(v) for i, state in opt.state_dict()["state"].items() for k, v in state.items()}


def absent(name, rank):
    """Which gradients a rank lacks: "odd" is missing everywhere once, "wide" on rank 1 alone once."""
    return lambda t: ("odd",) if t == 3 else ("wide",) if t == 5 and rank == 1 and name in TOGETHER else ()


def with_holes(name, size):
    """How the single process sees what rank 1 lacks: zeros where its shard is."""

    def place(k, tensor):
        if k == "wide" and getattr(place, "t", None) == 5 and name in TOGETHER:
            tensor = tensor.clone()
            tensor.narrow(0, *extent(tensor.shape[0], size, 1)).zero_()
        return tensor

    return place


def reference(name, size, steps=STEPS, holes=True):
    """The single process: parameters and state after some steps."""
    params = parameters(plain)
    opt = make(name, params)
    place = with_holes(name, size)
    for t in range(steps):
        place.t = t if holes else None
        train(opt, params, t, t + 1, place, (lambda t: ("odd",) if t == 3 else ()) if holes else (lambda t: ()))
    return wholes(params), state_of(opt)


#: modifiers that measure whole tensors, that do not, and matrix rules whose owners mask and whose shards decay
MODIFIED = {
    "AdamW": {"cautious": True, "decay": "hyperball"},
    "Lion": {"cautious": True, "decay": "cautious", "weight_decay": 0.1},
    "SOAP": {"cautious": True, "decay": "cautious", "weight_decay": 0.1},
    "Muon": {"cautious": True, "decay": "cautious", "weight_decay": 0.1},
}


def modified(world):
    """Modified rules, sharded and not; a matrix's norm, which no rank knows, is refused."""
    out = {}
    for name, settings in MODIFIED.items():
        place = plain if world is None else world.place
        params = parameters(place)
        train(make(name, params, **settings), params, 0, 4, place)
        out[name] = wholes(params)
    if world is not None:
        params = parameters(world.place)
        out["refused"] = failure(train, make("Muon", params, decay="hyperball"), params, 0, 1, world.place)
    return out


# ---- scenarios ----------------------------------------------------------------------------------------------------------------
@scenario(2, 3, *MORE)
def parity(world):
    """All of them over ten steps, and what the agreement and the collectives cost."""
    out = {}
    for name in ALL if world.size == 2 else KINDS:
        params = parameters(world.place)
        opt = make(name, params)
        train(opt, params, 0, STEPS, world.place, absent(name, world.rank))
        out[name] = wholes(params), state_of(opt)
    return out if world.rank == 0 else None


@scenario(2)
def averaged(world):
    """Schedule-Free on shards: the average while it lasts, and the training that goes on from it and from its checkpoint."""
    params = parameters(world.place)
    opt = make("ScheduleFreeAdamW", params)
    train(opt, params, 0, STEPS // 2, world.place)
    before = wholes(params)
    with opt.averaged():
        average, saved = wholes(params), opt.state_dict()
        refused = failure(opt.step)
    after = wholes(params)
    again = parameters(world.place)
    other = make("ScheduleFreeAdamW", again)
    other.load_state_dict(saved)
    other.train()
    for its, mine in ((opt, params), (other, again)):
        train(its, mine, STEPS // 2, STEPS, world.place)
    return before, average, after, wholes(params), wholes(again), refused


@scenario(2)
def evaluated_elsewhere(world):
    """A state dict of evaluation mode, loaded where parameters lie in another way: `train()` puts them back as they were."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def columns(name, tensor):
        return distribute_tensor(tensor, world.mesh, [Shard(1) if tensor.ndim > 1 else Replicate()], src_data_rank=None)

    params, out = parameters(world.place), []
    opt = make("ScheduleFreeAdamW", params)
    train(opt, params, 0, 2, world.place)
    before = wholes(params)
    with opt.averaged():
        average, saved = wholes(params), opt.state_dict()
    whole_state = {i: {k: whole(v) for k, v in state.items()} for i, state in saved["state"].items()}
    for place, state in ((columns, saved["state"]), (columns, whole_state), (plain, whole_state), (world.place, whole_state)):
        again = {k: nn.Parameter(place(k, v)) for k, v in average.items()}
        other = make("ScheduleFreeAdamW", again)
        other.load_state_dict({**saved, "state": state})
        other.train()
        out.append(same_tensors(wholes(again), before))
    return out


@contextlib.contextmanager
def counting(rank):
    """Bytes sent to others by all-to-all, and the lengths of what is all-reduced, while it lasts."""
    log = {"sent": 0, "all_to_alls": 0, "all_reduced": []}
    exchange, reduce = dist.all_to_all_single, dist.all_reduce

    def all_to_all_single(output, given, output_sizes, given_sizes, group=None, **more):
        log["sent"] += sum(size for r, size in enumerate(given_sizes) if r != rank) * given.element_size()
        log["all_to_alls"] += 1
        return exchange(output, given, output_sizes, given_sizes, group=group, **more)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        log["all_reduced"].append(tensor.numel() * tensor.element_size())
        return reduce(tensor, op, group=group)

    dist.all_to_all_single, dist.all_reduce = all_to_all_single, all_reduce
    try:
        yield log
    finally:
        dist.all_to_all_single, dist.all_reduce = exchange, reduce


CUT = {k: v for k, v in SHAPES.items() if k not in ("side", "s")}


@scenario(2, 3, *MORE)
def bytes_sent(world):
    """What a step of each optimizer sends; torch's own count of collectives beside ours."""
    from torch.distributed.tensor.debug import CommDebugMode

    out = {}
    for name in ALL if world.size == 2 else KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            params = parameters(world.place, CUT, dtype)
            opt = make(name, params)
            train(opt, params, 0, 1, world.place)
            for k, g in tensors(1, CUT, dtype).items():
                params[k].grad = world.place(k, g)
            with counting(world.rank) as log, CommDebugMode() as mode:
                opt.step()
            out[name, str(dtype)] = {**log, "torch": mode.get_total_counts()}
    return out


@scenario(2, 4)
def fully_sharded(world):
    """A model under fully_shard, by FSDP2's own backward; two also with its CPU offload policy."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    out = {}
    away = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}  # there is no CUDA here to pin it for
    cases = [(name, name, {}) for name in ("AdamW", "Adafactor", "Muon", "SOAP")]
    for key, name, policy in (*cases, *((f"{name} offloaded", name, away) for name in ("AdamW", "Lamb", "Muon"))):
        model = net()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=world.mesh, **policy)
        fully_shard(model, mesh=world.mesh, **policy)
        opt = getattr(ours, name)(model, lr=0.01)
        losses(model, opt)
        out[key] = [whole(p) for p in model.parameters()]
    return out if world.rank == 0 else None


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 18), nn.Tanh(), nn.Linear(18, 5), nn.Tanh(), nn.Linear(5, 7))


def losses(model, opt, steps=5):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        model(torch.randn(8, 12, generator=generator)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


class Packed(nn.Module):
    """Torch's own modules whose parameters are several matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(12, 3, 18, dropout=0.0, batch_first=True)
        self.cell = nn.GRUCell(12, 10)
        self.head = nn.Linear(10, 7)


PACKING = {name: {} for name in ("Muon", "NorMuon", "SOAP", "KronPSGD")} | {"Muon by head": {"heads": True}}


def packed(world):
    """What torch's modules pack, under fully_shard, under DDP and alone; and through torch's helpers for whole state dicts."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def sharded():
        model = Packed()
        for part in (model.layer, model.cell, model):
            fully_shard(part, mesh=world.mesh)
        return model

    def walk(model, opt, start, stop):
        for t in range(start, stop):
            params = dict(model.named_parameters())
            for (name, p), g in zip(params.items(), tensors(t, {k: p.shape for k, p in params.items()}).values(), strict=True):
                p.grad = world.place(name, g) if way == "fsdp" else g
            opt.step()

    out = {}
    ways = {"fsdp": sharded, "ddp": lambda: DistributedDataParallel(Packed())} if world else {"": Packed}
    for title, settings in PACKING.items():
        for way, place in ways.items():
            model = place()
            opt = getattr(ours, title.split()[0])(model, lr=0.01, **settings)
            walk(model, opt, 0, 3)
            if way == "fsdp":
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                again = sharded()
                other = getattr(ours, title.split()[0])(again, lr=0.01, **settings)
                taken = get_optimizer_state_dict(model, opt, options=options)
                options.broadcast_from_rank0 = True
                set_optimizer_state_dict(again, other, taken, options=options)
                out[title, "helpers"] = same_tensors(state_of(opt), state_of(other))
                opt.save(world.folder / f"packed.{title}.safetensors")
            report = opt.routing_report()
            walk(model, opt, 3, 5)
            out[title, way] = [whole(p) for p in model.parameters()], report
    return out


scenario(2)(packed)
WAYS = [(way, name) for way in ("hsdp", "both") for name in ("AdamW", *TOGETHER)] + [("twice", "AdamW"), ("twice", "Muon")]


@scenario(4)
def meshes(world):
    """Two-dimensional meshes: HSDP, two shard dimensions, strided shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ways = {
        "hsdp": lambda t: [Replicate(), Shard(0)] if t.ndim else [Replicate()] * 2,
        "both": lambda t: [Shard(0), Shard(1)] if t.ndim > 1 else [Shard(0), Replicate()] if t.ndim else [Replicate()] * 2,
        "twice": lambda t: [Shard(0), Shard(0)] if t.ndim else [Replicate()] * 2,
    }
    out = {}
    for way, name in WAYS:

        def place(k, t, placements=ways[way]):
            return distribute_tensor(t, mesh, placements(t), src_data_rank=None)

        params = parameters(place)
        opt = make(name, params)
        train(opt, params, 0, STEPS, place)
        out[way, name] = wholes(params), state_of(opt)
    out["refused"] = refused_on_a_replica(world, lambda k, t: distribute_tensor(t, mesh, ways["hsdp"](t), src_data_rank=None))
    return out


def refused_on_a_replica(world, place):
    """A setting that is bad on one rank, whose replica may not go on alone."""
    out = []
    for name in ("Lamb", "Muon"):
        params = parameters(place)
        opt = make(name, params)
        for t in range(2):
            for k, g in tensors(t).items():
                params[k].grad = place(k, g)
            before, lr = wholes(params), opt.param_groups[0]["lr"]
            opt.param_groups[0]["lr"] = -1.0 if world.rank == 1 else lr
            out.append((failure(opt.step), same_tensors(before, wholes(params))))
            opt.param_groups[0]["lr"] = lr
            opt.step()
    return out


@scenario(4)
def fsdp_and_tensor_parallel(world):
    """fully_shard over a tensor-parallel model: strided shards, made by torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    out = {}
    for name in ("AdamW", "Lamb", "Adafactor", "Muon"):
        model = net()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        opt = getattr(ours, name)([(k, p) for k, p in model.named_parameters() if not k.startswith("4")], lr=0.01)
        losses(model, opt)
        kinds = sorted({type(place).__name__ for p in model.parameters() for place in p.placements})
        out[name] = {k: whole(p) for k, p in model.named_parameters()}, kinds, opt.engine_report()
    return out if world.rank == 0 else None


@scenario(2, 3)
def data_parallel(world):
    """Muon(ddp_model), and an explicit process_group: owners compute, every rank has the result, state lies with the owner."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net())
    opt = ours.Muon(model, lr=0.02)
    with counting(world.rank) as log:
        losses(model, opt)
    held = sum(v.numel() for state in opt.state.values() for k, v in state.items() if k == "momentum_buffer")
    refusal = failure(opt.state_dict)
    opt.consolidate_state_dict()
    state = state_of(opt)
    again = ours.Muon(DistributedDataParallel(net()), lr=0.02)
    again.load_state_dict(opt.state_dict())
    again.consolidate_state_dict()
    opt.save(world.folder / f"ddp{world.size}.safetensors")
    shared = {}
    for name in MATRIX:
        params = parameters(plain)
        shared[name] = params, make(name, params, process_group=dist.group.WORLD)
        train(shared[name][1], params, 0, STEPS, plain, lambda t: ("odd",) if t == 3 else ())
    every = ours.Muon([("w", nn.Parameter(torch.ones(3, 4)))])  # a plain parameter without a word about groups
    return {
        "params": [whole(p) for p in model.parameters()],
        "state": state,
        "loaded": state_of(again),
        "held": held,
        "refusal": refusal,
        "log": log,
        "shared": {name: wholes(params) for name, (params, _) in shared.items()},
        "alone": every._consensus is None and every._homes is None,
    }


@scenario(2)
def saved(world):
    """Ten steps, then torch's distributed checkpoint and our own file; and twenty steps without a break."""
    import torch.distributed.checkpoint as dcp

    for name in ALL:
        params = parameters(world.place)
        opt = make(name, params)
        train(opt, params, 0, STEPS, world.place)
        dcp.save({"params": wrapped(params), "opt": by_name(opt)}, checkpoint_id=world.folder / "dcp" / name)
        path = opt.save(world.folder / f"{name}.safetensors")
        torch.save(wholes(params), world.folder / f"{name}.{world.rank}.pt")
        assert path == world.folder / f"{name}.safetensors"


def wrapped(params):
    return {k: p.detach() for k, p in params.items()}


def by_name(opt):
    """An optimizer's state_dict for torch's checkpoints: state under parameter names."""
    saved = opt.state_dict()
    names = [name for group in opt.param_groups for name in group["param_names"]]
    return {"state": {names[i]: state for i, state in saved["state"].items()}, "param_groups": saved["param_groups"]}


def by_number(opt, saved):
    names = [name for group in opt.param_groups for name in group["param_names"]]
    return {**saved, "state": {i: saved["state"][name] for i, name in enumerate(names)}}


@scenario(3, *MORE)
def resumed(world):
    """What two ranks (or one process) saved, loaded here, and ten more steps."""
    import torch.distributed.checkpoint as dcp

    out = {}
    for name in ALL if world.size == 3 else KINDS:
        for way in ("dcp", "own", "single") if world.size == 3 and name in KINDS else ("dcp",):
            params = parameters(world.place)
            opt = make(name, params)
            if way == "dcp":
                into = {"params": wrapped(params), "opt": by_name(opt)}
                dcp.load(into, checkpoint_id=world.folder / "dcp" / name)
                opt.load_state_dict(by_number(opt, into["opt"]))
            else:
                opt.load(world.folder / (f"{name}.safetensors" if way == "own" else f"single.{name}.safetensors"))
                before = torch.load(world.folder / f"{name}.0.pt")
                with torch.no_grad():
                    for k, p in params.items():
                        p.copy_(world.place(k, before[k]))
            train(opt, params, STEPS, 2 * STEPS, world.place)
            out[name, way] = wholes(params), state_of(opt)
    return out if world.rank == 0 else None


ROUNDED = [
    (name, how, kept)
    for name, kept in (("AdamW", "float32"), ("AdamW", "int8"), ("AdamW", "bfloat16"), ("Lamb", "float32"), ("Muon", "float32"))
    for how in ("stochastic", "exact")
]


def rounded(world):
    """bfloat16 parameters, two steps, a checkpoint (torch's, and a file of our own), and two more steps from either."""
    place, out = plain if world is None else world.place, {}
    for name, how, kept in ROUNDED:
        shapes, settings = SHAPES if kept == "float32" else {"large": (64, 96)}, {"rounding": how, "state_dtype": kept}
        params = parameters(place, shapes, torch.bfloat16)
        opt = make(name, params, **settings)
        train(opt, params, 0, 2, place)
        if world is not None:
            before = wholes(params)
            path = opt.save(world.folder / f"rounded.{name}.{how}.{kept}.safetensors")
            for way in ("loaded", "file"):
                again = {k: nn.Parameter(place(k, before[k].clone())) for k in before}
                other = make(name, again, **settings)
                if way == "file":
                    other.load(path)
                else:
                    other.load_state_dict(opt.state_dict())
                train(other, again, 2, 4, place)
                out[name, how, kept, way] = wholes(again), state_of(other)
        train(opt, params, 2, 4, place)
        out[name, how, kept, "end"] = wholes(params), state_of(opt)
    return out


scenario(2)(rounded)


@scenario(2)
def model_state_dicts(world):
    """torch's helpers for models: whole state dicts on rank 0 and back, flat ones, with a matrix rule."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    out = {}
    for full in (True, False):
        options = StateDictOptions(full_state_dict=full, cpu_offload=full, flatten_optimizer_state_dict=not full)
        models = [fully_shard(net(), mesh=world.mesh) for _ in range(2)]
        opts = [ours.SOAP(model, lr=0.01) for model in models]
        losses(models[0], opts[0])
        taken = get_optimizer_state_dict(models[0], opts[0], options=options)
        options.broadcast_from_rank0 = full
        set_optimizer_state_dict(models[1], opts[1], taken, options=options)
        out[full] = same_tensors(state_of(opts[0]), state_of(opts[1])), len(taken)
    return out


@scenario(2)
def thawed(world):
    """A layer that is frozen at first: its state is loaded by torch's helpers into an optimizer that has none for it yet."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    def start(name, frozen):
        model = net()
        first = next(iter(model.children()))
        first.requires_grad_(not frozen)
        fully_shard(model, mesh=world.mesh)
        return model, first, getattr(ours, name)(model, lr=0.01)

    out = {}
    for name in ("AdamW", "Muon", "SOAP"):
        model, first, opt = start(name, frozen=True)
        losses(model, opt)
        without = [p in opt.state for p in first.parameters()]
        first.requires_grad_(True)
        losses(model, opt)
        where = world.folder / "thawed" / name
        dcp.save({"opt": get_optimizer_state_dict(model, opt)}, checkpoint_id=where)
        for frozen in (False, True):
            other, layer, again = start(name, frozen)
            layer.requires_grad_(True)  # its state does not exist yet where it was frozen
            taken = {"opt": get_optimizer_state_dict(other, again)}
            dcp.load(taken, checkpoint_id=where)
            set_optimizer_state_dict(other, again, taken["opt"])
            out[name, frozen] = without, same_tensors(state_of(opt), state_of(again))
    return out


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def failure(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


@scenario(2, 3)
def not_finite(world):
    """A NaN on one rank alone: all ranks skip, or all refuse, and nothing has moved."""
    out = {}
    for name in ("AdamW", "Lamb", "Muon"):
        for how in ("skip", "raise"):
            params = parameters(world.place)
            opt = make(name, params, nonfinite=how)
            train(opt, params, 0, 2, world.place)
            before, state = wholes(params), state_of(opt)
            for k, g in tensors(2).items():
                params[k].grad = world.place(k, g)
            if world.rank == 1:
                params["w"].grad.to_local()[0, 0] = float("nan")
            problem = failure(opt.step)
            still = same_tensors(before, wholes(params)) and same_tensors(state, state_of(opt))
            out[name, how] = problem, opt.skipped, still
    return out


scenario(2)(modified)


def guarded(world):
    """skip_above on shards and in one process: a spike of the gradients, then one of the loss on the last rank alone."""
    out = {}
    place, last = (plain, True) if world is None else (world.place, world.rank == world.size - 1)
    for name in ("AdamW", "Muon"):
        shapes = {k: SHAPES[k] for k in ("w", "b")}
        params = parameters(place, shapes)
        opt = make(name, params, skip_above=6.0)
        moved = []
        for t in range(72):
            for k, g in tensors(t, shapes).items():
                params[k].grad = place(k, g * (40 if t == 68 else 1))
            ours.clip_grad_norm_(opt, 0.5)  # which hides the spike from the step, and not from skip_above
            before = whole(params["w"])
            opt.step(loss=90.0 if t == 70 and last else 1.0 + 0.1 * (t % 3))
            moved.append(not torch.equal(before, whole(params["w"])))
        out[name] = wholes(params), opt.skipped, [t for t, each in enumerate(moved) if not each]
    return out


scenario(2)(guarded)


@scenario(2)
def refused(world):
    """What cannot be done is refused on every rank, wherever the fault lies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    out = {}
    partial = DTensor.from_local(torch.ones(4, 3), world.mesh, [Partial()])
    out["partial"] = failure(ours.AdamW, [("w", nn.Parameter(partial))])
    params = parameters(world.place)
    opt = make("Muon", params)
    for k, g in tensors(0).items():
        params[k].grad = world.place(k, g)
    other = init_device_mesh("cpu", (2, 1))
    if world.rank == 1:
        params["w"].grad = distribute_tensor(tensors(0)["w"], other, [Shard(0), Replicate()], src_data_rank=None)
    out["one rank"] = failure(opt.step)
    out["attach"] = failure(opt.attach, list(params.values()))
    for name in ("Lamb", "Sophia", "Muon"):  # a setting that is bad on one rank: at the first step, and later
        params = parameters(world.place)
        opt = make(name, params, nonfinite="raise" if name == "Sophia" else "propagate")
        for t in range(2):
            for k, g in tensors(t).items():
                params[k].grad = world.place(k, g)
            before, lr = wholes(params), opt.param_groups[0]["lr"]
            opt.param_groups[0]["lr"] = -1.0 if world.rank == 1 else lr
            out[name, t] = failure(opt.step), same_tensors(before, wholes(params))
            opt.param_groups[0]["lr"] = lr
            opt.step()
    out["closure"] = refused_closure(world)
    out["engine"] = opt_report(world)
    out["split"] = failure(make, "MARS", parameters(world.place), split={"w": 3})
    out["file"] = failure(opt.load, world.folder / ("missing" if world.rank else "single.Muon.safetensors"))
    out["hessian"] = sharded_hessian(world)
    return out


def refused_closure(world):
    """A closure that raises on rank 1, at the first step and later; then the steps that all ranks take."""
    out, params, alone = [], parameters(world.place), parameters(plain)
    opt, single = make("Muon", params), make("Muon", alone)
    for t in range(2):
        for k, g in tensors(t).items():
            params[k].grad, alone[k].grad = world.place(k, g), g.clone()
        out.append(failure(opt.step, functools.partial(failing, world.rank)))
        opt.step(lambda: 1.0)
        single.step()
    return out, same_tensors(wholes(params), wholes(alone))


def failing(rank):
    if rank:
        raise KeyError("no such batch")
    return 1.0


@scenario(2)
def refused_while_laid_out(world):
    """Rank 1 alone cannot lay out its parameters anew, as they were replaced, thawed or their state was damaged; then it can."""
    out = {}
    for name in ("Lamb", "Muon"):
        for change in ("replaced", "thawed", "damaged"):
            params = parameters(world.place)
            params["odd"].requires_grad_(change != "thawed")
            opt = make(name, params)
            train(opt, params, 0, 1, world.place, lambda t, change=change: ("odd",) if change == "thawed" else ())
            lr, state, key = opt.param_groups[0]["lr"], opt.state[params["b"]], list(opt.state[params["b"]])[-1]
            right = state[key]
            if change == "replaced":
                params = {k: nn.Parameter(p.detach().clone()) for k, p in params.items()}
                for group in opt.param_groups:
                    group["params"] = [params[k] for k in group["param_names"]]
            params["odd"].requires_grad_(True)
            if world.rank == 1:
                opt.param_groups[0]["lr"] = lr if change == "damaged" else -1.0
                state[key] = torch.zeros(3) if change == "damaged" else right
            before = wholes(params)
            problem = failure(train, opt, params, 1, 2, world.place)
            opt.param_groups[0]["lr"], still = lr, same_tensors(before, wholes(params))
            if change == "damaged":
                state[key] = right
            train(opt, params, 1, 2, world.place)
            out[name, change] = problem, still, {k: float(opt.state[p]["step"]) for k, p in params.items()}
    return out


@scenario(2)
def refused_on_one(world):
    """What rank 1 alone has otherwise: all refuse, nothing moves, and once it is as on the others, all go on as one process does."""

    def change(opt, params, what):
        """On rank 1; gives what undoes it."""
        if world.rank == 0:
            return lambda: None
        group = opt.param_groups[0]
        if what == "state":
            state = opt.state[params["b"]]
            right, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
            return lambda: state.__setitem__("exp_avg", right)
        if what == "frozen":
            grad, params["wide"].grad = params["wide"].grad, None
            opt._placements = None  # as after a change of the groups
            state = opt.state.pop(params["wide"])
            params["wide"].requires_grad_(False)
            return lambda: (
                params["wide"].requires_grad_(True),
                opt.state.update({params["wide"]: state}),
                wear(params["wide"], grad),
            )
        if what == "evaluation":
            opt.eval()
            return opt.train
        before = group[what]
        group[what] = not before
        return lambda: group.__setitem__(what, before)

    out = {}
    cases = [(name, what) for name in ("Lamb", "Muon") for what in ("state", "frozen", "maximize", "cautious")]
    cases += [("Muon", "nesterov"), ("ScheduleFreeAdamW", "evaluation"), ("Sophia", "state")]
    for name, what in cases:
        params, alone = parameters(world.place), parameters(plain)
        settings = {"nonfinite": "skip"} if name in ("ScheduleFreeAdamW", "Sophia") else {}
        opt, single = make(name, params, **settings), make(name, alone, **settings)
        if name == "Sophia":
            what = "hessian"
        if what == "evaluation":
            train(opt, params, 0, 1, world.place)
            train(single, alone, 0, 1)
        found = []
        for t in range(1, 3):  # the first step, which lays out, and a later one
            for k, g in tensors(t).items():
                params[k].grad, alone[k].grad = world.place(k, g), g.clone()
            before = wholes(params)
            undo = change(opt, params, "state" if what == "hessian" else what)
            problem = failure(opt.step)
            undo()
            found.append((problem, what == "evaluation" or same_tensors(before, wholes(params))))
            opt.step()
            single.step()
        gaps = [float((a - b).abs().max()) for a, b in zip(wholes(params).values(), wholes(alone).values(), strict=True)]
        out[name, what] = found, max(gaps)
    params = parameters(world.place)
    opt = make("Muon", params, skip_above=6.0)
    for k, g in tensors(0).items():
        params[k].grad = world.place(k, g)
    out["loss"] = failure(opt.step, loss="1.0x" if world.rank else 1.0), failure(opt.step, loss=1.0)
    state = opt.state[params["b"]]
    right = state["exp_avg"]
    state["exp_avg"] = torch.zeros(3) if world.rank else right
    path = world.folder / "refused on one.safetensors"
    out["save"] = failure(opt.save, path)
    state["exp_avg"] = right
    out["saved"] = failure(opt.save, path), path.exists()
    good = opt.state_dict()
    for key, damage in {"load": {}, "size": {"param_groups": good["param_groups"][:1]}}.items():
        bad = copy.copy(good)
        if world.rank:
            bad |= damage or {"state": {i: {**state, "step": torch.tensor(-1.0)} for i, state in good["state"].items()}}
        before = state_of(opt)
        out[key] = failure(opt.load_state_dict, bad), same_tensors(before, state_of(opt))
    out["loaded"] = failure(opt.load_state_dict, good)
    return out


def wear(param, grad):
    param.grad = grad


@scenario(2)
def copied(world):
    """Copies and pickles of optimizers on ranks go on as the optimizers do; parameters that lie with owners stay there."""
    import pickle

    out = {}
    ways = {"sharded": (world.place, {}), "shared out": (plain, {"process_group": dist.group.WORLD})}
    for name in ("Muon", "AdamW", "Lamb"):
        for way, (place, settings) in ways.items() if name == "Muon" else [("sharded", ways["sharded"])]:
            params = parameters(place)
            opt = make(name, params, **settings)
            train(opt, params, 0, 2, place)
            both = copy.deepcopy((params, opt)), pickle.loads(pickle.dumps((params, opt)))
            train(opt, params, 2, 4, place)
            for kind, (again, other) in zip(("copy", "pickle"), both, strict=True):
                train(other, again, 2, 4, place)
                out[name, way, kind] = same_tensors(wholes(again), wholes(params))
    return out


@scenario(2)
def empty_tensors(world):
    """A tensor without elements counts its steps, and nothing else, as in one process."""
    out = []
    for place in (world.place, plain):
        params = {k: nn.Parameter(place(k, torch.ones(shape))) for k, shape in {"w": (6, 4), "none": (0, 4)}.items()}
        opt = make("ScheduleFreeAdamW", params)
        for t in range(3):
            for k, p in params.items():
                p.grad = place(k, torch.full(tuple(p.shape), 0.1 * (t + 1)))
            opt.step()
        out.append(state_of(opt))
    return same_tensors(*out)


def opt_report(world):
    """Rules that measure whole tensors run on the torch engine, and say so whatever was asked for."""
    params = parameters(world.place)
    return list(make("Lamb", params, engine="cpu").engine_report().values())


def sharded_hessian(world):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net(), mesh=world.mesh)
    opt = ours.Sophia(model)
    refusal = failure(opt.update_hessian, lambda: model(torch.ones(2, 12)).pow(2).mean())
    model.zero_grad()
    model(torch.ones(2, 12)).pow(2).mean().backward()
    worked = opt.update_hessian_from_gradients(2)
    squares = [whole(p.grad) ** 2 * 2 for p in model.parameters()]
    share = 1 - opt.param_groups[0]["betas"][1]
    kept = [whole(opt.state[p]["hessian"]) for p in model.parameters()]
    return refusal, worked, all(torch.allclose(h, share * s, rtol=1e-5, atol=0) for h, s in zip(kept, squares, strict=True))


@scenario(2, 3)
def clipped(world):
    """The norm over all ranks, of an optimizer's gradients or of a list's."""
    out = {}
    for name in ("AdamW", "Lamb", "Muon"):
        params = parameters(world.place)
        opt = make(name, params)
        for t in range(3):
            for k, g in tensors(t).items():
                params[k].grad = world.place(k, g)
            norm = ours.clip_grad_norm_(opt, 0.5)
            opt.step()
        out[name] = float(norm), wholes(params)
    for k, g in tensors(0).items():
        params[k].grad = world.place(k, g)
    orders = {order: float(ours.clip_grad_norm_(params.values(), 1e9, order)) for order in (1.0, 3.0, float("inf"))}
    with counting(world.rank) as log:
        total = ours.clip_grad_norm_(list(params.values()), 0.5)
    out["written"] = float(total), {k: whole(p.grad) for k, p in params.items()}, log["all_reduced"], orders
    return out if world.rank == 0 else None


@scenario(3)
def mixed(world):
    """bfloat16 beside float32 in one exchange, fused matrices that are split, groups added later, maximize, GradScaler's verdict."""
    out = {}
    for kind, place in (("sharded", world.place), ("single", plain)):
        params = {
            "w": nn.Parameter(place("w", tensors(-1)["w"])),
            "half": nn.Parameter(place("half", tensors(-1)["twin"].bfloat16())),
            "wide": nn.Parameter(place("wide", tensors(-1)["wide"])),
            "side": nn.Parameter(place("side", tensors(-1)["side"])),
        }
        split = {"w": 3, "wide": (10, 15, 5), "side": (5, 3)}  # rows, columns, rows that are cut along columns
        opt = ours.Muon(list(params.items()), split=split, weight_decay=0.1)
        late = nn.Parameter(place("odd", tensors(-1)["odd"]))
        opt.add_param_group({"params": [("odd", late)], "lr": 0.5, "maximize": True})
        for t in range(4):
            for k, p in {**params, "odd": late}.items():
                p.grad = place(k, tensors(t)[{"half": "twin"}.get(k, k)].to(p.dtype))
            if t == 2:
                opt.found_inf = torch.tensor(float(world.rank == 1 or kind == "single"))  # one rank's word is enough
            opt.step()
            opt.found_inf = None
        out[kind] = wholes({**params, "odd": late}), state_of(opt)
        query, key = (
            nn.Parameter(place(how, tensors(-1)[k])) for how, k in (("w", "w"), ("side", "twin"))
        )  # by rows, by columns
        ours.qk_clip_(query, key, [50.0, 200.0, 300.0, 100.0])
        out[f"{kind}, clipped"] = wholes({"query": query, "key": key})
    return out if world.rank == 0 else None


ENGINES = ["torch", *(["triton"] if importlib.util.find_spec("triton") else [])]


@scenario(2)
def engines(world):
    """The engines of other devices, on the CPU (Triton's through its interpreter)."""
    out = {}
    for engine in ENGINES:
        for name in ("NAdamW", "Lamb", "Muon", "SOAP"):
            params = parameters(world.place)
            train(make(name, params, engine=engine), params, 0, 5, world.place)
            out[engine, name] = wholes(params)
    return out if world.rank == 0 else None


import coded_ranks  # noqa: E402, F401  (its scenarios, before the last)
import reading_ranks  # noqa: E402, F401  (its own, too)


@scenario(2)
def killed(world):
    """The last of a world: rank 1 dies while a second checkpoint is written."""
    params = parameters(world.place)
    opt = make("SOAP", params)
    path = world.folder / "killed.safetensors"
    train(opt, params, 0, 1, world.place)
    opt.save(path)
    first = path.read_bytes()
    train(opt, params, 1, 2, world.place)
    if world.rank == 1:
        from rlx_optim.torch.checkpoint import Lockstep

        finish = Lockstep.finish
        Lockstep.finish = lambda self: (self.tensors[0].read(), self.tensors[1].read(), os._exit(7), finish)
    problem = failure(opt.save, path)
    left = sorted(each.name for each in world.folder.iterdir() if "killed" in each.name)
    return {"problem": problem, "same": path.read_bytes() == first, "left": left}


# ---- a process -----------------------------------------------------------------------------------------------------------------
def main(rank, size, folder, scenarios=SCENARIOS):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{size}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    world = World(rank, size, folder)
    results = {}
    for function in scenarios[size]:
        try:
            given = function(world)
            if function is not killed:
                everyone = [None] * size
                dist.all_gather_object(everyone, given)
                given = everyone
            results[function.__name__] = given
        except Exception:
            results[function.__name__] = traceback.format_exc()
            torch.save(results, f"{folder}/results{size}.{rank}.pt")
            raise
        torch.save(results, f"{folder}/results{size}.{rank}.pt")
    if killed not in scenarios[size]:
        dist.barrier()
        dist.destroy_process_group()
