"""Checks of a torch class over several processes: DDP and fully_shard on gloo, beside the single process."""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .table import Skip, check
from .torch_subject import TorchSubject, numbers

STEPS = 5


def model(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 18, bias=bias), nn.Tanh(), nn.Linear(18, 5, bias=bias), nn.Tanh(), nn.Linear(5, 7, bias=bias)
    )


def trained(module: nn.Module, opt: Any) -> None:
    for t in range(STEPS):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(t))
        module(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def rank_main(rank: int, size: int, folder: str, how: str, target: str, settings: dict[str, Any], bias: bool) -> None:
    """What every process does; the first writes what came out."""
    dist: Any = importlib.import_module("torch.distributed")

    from . import found

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        whole: Any = model(bias)
        module: Any = whole
        if how == "ddp":
            module = nn.parallel.DistributedDataParallel(whole)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (size,))
            for layer in whole:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(whole, mesh=mesh)
        trained(module, found(target)(list(module.parameters()), **settings))
        ends = [p.full_tensor().detach() if how == "sharded" else p.detach() for p in whole.parameters()]
        if rank == 0:
            torch.save(ends, f"{folder}/ends")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still hold a tensor, and abort where the interpreter is ending (pytorch#65231)


def spread(s: TorchSubject, how: str) -> Any:
    processes: Any = importlib.import_module("torch.multiprocessing")

    single = model(len(s.small) > 1)
    start = numbers(list(single.parameters()))
    opt = s.make(list(single.parameters()))
    if hasattr(opt, "update_hessian"):
        raise Skip("its estimates are made outside of step")
    trained(single, opt)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        processes.spawn(rank_main, (s.ranks, folder, how, s.target, s.settings, len(s.small) > 1), nprocs=s.ranks)
        ends = torch.load(Path(folder) / "ends")
    return s.near(
        numbers(ends),
        numbers(list(single.parameters())),
        start,
        f"{s.ranks} ranks end elsewhere than one process",
        max(s.bar, 1e-4),
    )


@check("ddp", "under DistributedDataParallel ranks end where one process does", "torch", quick=False, ranks=True)
def ddp(s: TorchSubject) -> Any:
    return spread(s, "ddp")


@check(
    "sharded",
    "on DTensors of fully_shard ranks end where one process does: norms and matrices are of the whole tensor",
    "torch",
    quick=False,
    ranks=True,
)
def sharded(s: TorchSubject) -> Any:
    return spread(s, "sharded")
