"""What ranks do with state in fewer bits: scenarios of `ranks`, and the single process beside them."""

import torch
from ranks import by_name, by_number, failure, make, parameters, plain, same_tensors, scenario, state_of, train, wholes, wrapped
from torch import nn

import rlx_optim.torch as ours

#: rows that do not divide, whole blocks, cut along columns ("side"), fewer rows than ranks, four dimensions, and what stays exact
SHAPES = {
    "w": (70, 130),
    "even": (64, 128),
    "side": (64, 300),
    "thin": (3, 2048),
    "conv": (16, 4, 8, 10),
    "b": (70,),
    "s": (9, 9),
}
CASES = [("AdamW", "int8"), ("AdamW", "bfloat16"), ("Lamb", "int8"), ("Muon", "int8")]
STEPS = 2


def walked(name, wanted, place=plain, start=0, opt=None, params=None):
    """Parameters and optimizer after some steps."""
    params = params or parameters(place, SHAPES)
    opt = opt or make(name, params, state_dtype=wanted)
    train(opt, params, start, start + STEPS, place)
    return params, opt


def both(params, opt):
    names = [name for group in opt.param_groups for name in group["param_names"]]
    return wholes(params), {f"{names[int(k.split()[0])]} {k.split()[1]}": v for k, v in state_of(opt).items()}


@scenario(2)
def coded(world):
    """A few steps, and what was reached in torch's distributed checkpoint and in a file of our own."""
    import torch.distributed.checkpoint as dcp

    out = {}
    for name, wanted in CASES:
        params, opt = walked(name, wanted, world.place)
        dcp.save({"params": wrapped(params), "opt": by_name(opt)}, checkpoint_id=world.folder / f"coded2.{name}.{wanted}")
        opt.save(world.folder / f"coded.{name}.{wanted}.safetensors")
        out[name, wanted] = both(params, opt)
    return out if world.rank == 0 else None


@scenario(4)
def coded_elsewhere(world):
    """The same on twice as many ranks, by either way; then steps; and saved again."""
    import torch.distributed.checkpoint as dcp

    out = {}
    for name, wanted in CASES:
        for way in ("dcp", *(["own"] if name == "AdamW" else [])):
            params = parameters(world.place, SHAPES)
            opt = make(name, params, state_dtype=wanted)
            into = {"params": wrapped(params), "opt": by_name(opt)}
            dcp.load(into, checkpoint_id=world.folder / f"coded2.{name}.{wanted}")
            if way == "dcp":
                opt.load_state_dict(by_number(opt, into["opt"]))
                dcp.save({"params": wrapped(params), "opt": by_name(opt)}, checkpoint_id=world.folder / f"coded4.{name}.{wanted}")
            else:
                opt.load(world.folder / f"coded.{name}.{wanted}.safetensors")
            there = both(params, opt)
            walked(name, wanted, world.place, STEPS, opt, params)
            out[name, wanted, way] = there, both(params, opt)
    return out if world.rank == 0 else None


@scenario(4)
def coded_meshes(world):
    """HSDP, cut along both dimensions, cut twice along the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ways = {"hsdp": [Replicate(), Shard(0)], "both": [Shard(0), Shard(1)], "twice": [Shard(0), Shard(0)]}
    out = {}
    for way, placements in ways.items():
        for name, wanted in CASES[:2] if way == "hsdp" else CASES[:1]:

            def place(k, t, placements=placements):
                return distribute_tensor(t, mesh, placements if t.ndim > 1 else [Replicate()] * 2, src_data_rank=None)

            out[way, name, wanted] = both(*walked(name, wanted, place))
    return out if world.rank == 0 else None


def coded_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 64), nn.Tanh(), nn.Linear(64, 70))


@scenario(2)
def coded_models(world):
    """FSDP2 and DDP: torch's helpers for state dicts, whole and flat, back and forth; another format; damaged scales."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def step(model, opt):
        model(torch.randn(8, 130, generator=torch.Generator().manual_seed(5))).pow(2).mean().backward()
        opt.step()

    out = {}
    for name in ("AdamW", "Muon"):
        for full in (True, False):
            options = StateDictOptions(full_state_dict=full, cpu_offload=full, flatten_optimizer_state_dict=not full)
            models = [fully_shard(coded_net(), mesh=world.mesh) for _ in range(2)]
            opts = [getattr(ours, name)(model, lr=0.01, state_dtype="int8") for model in models]
            step(models[0], opts[0])
            taken = get_optimizer_state_dict(models[0], opts[0], options=options)
            options.broadcast_from_rank0 = full
            set_optimizer_state_dict(models[1], opts[1], taken, options=options)
            out[name, full] = same_tensors(state_of(opts[0]), state_of(opts[1]))
        wide, back = (
            getattr(ours, name)(fully_shard(coded_net(), mesh=world.mesh), lr=0.01, state_dtype=kept)
            for kept in ("float32", "int8")
        )
        wide.load_state_dict(opts[0].state_dict())
        back.load_state_dict(wide.state_dict())
        before, after = state_of(opts[0]), state_of(back)
        out[name, "back"] = max(
            float((before[k].float() - after[k].float()).abs().max()) for k in before if not k.endswith("_scale")
        )
        out[name, "kinds"] = sorted({str(v.dtype) for v in state_of(wide).values()})
    damaged = opts[0].state_dict()
    damaged["state"][0]["momentum_buffer_scale"] = -damaged["state"][0]["momentum_buffer_scale"]
    out["damaged"] = failure(opts[0].load_state_dict, damaged), same_tensors(state_of(opts[0]), before)
    model = DistributedDataParallel(coded_net())
    opt = ours.Muon(model, lr=0.01, state_dtype="int8")
    step(model, opt)
    held = sum(v.nbytes for state in opt.state.values() for k, v in state.items() if k.startswith("momentum_buffer"))
    opt.consolidate_state_dict()
    again = ours.Muon(DistributedDataParallel(coded_net()), lr=0.01, state_dtype="int8")
    again.load_state_dict(opt.state_dict())
    again.consolidate_state_dict()
    alone = coded_net()
    other = ours.Muon(alone, lr=0.01, state_dtype="int8")
    step(alone, other)
    out["ddp"] = held, same_tensors(state_of(opt), state_of(again)), same_tensors(state_of(opt), state_of(other))
    return out


def exactly(got, want, but=()):
    """Bits and types, for all names but those that begin so."""
    assert got.keys() == want.keys() or but
    names = [k for k in want if not k.startswith(but)] if but else list(want)
    assert names
    for k in names:
        assert (got[k].dtype, got[k].shape) == (want[k].dtype, want[k].shape), k
        assert torch.equal(got[k], want[k]), k
