"""Work that several gloo processes do together, and a rule stepped on DTensors over them, beside one process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .table import Skip

GRACE = 3  # seconds that the others have to say why, after one has failed
Found = dict[str, list[np.ndarray]]


def rank_main(rank: int, size: int, folder: str, work: Callable[..., Any], given: Sequence[Any]) -> None:
    """Do one process's share of the work, and write what came of it."""
    code = 1
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist = importlib.import_module("torch.distributed")

        def join() -> Any:
            """Enter the group, and return its mesh."""
            store = dist.FileStore(f"{folder}/store", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            return importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (size,))

        found = work(rank, join, *given)
        if rank == 0:
            Path(folder, "found").write_bytes(pickle.dumps(found))
        dist.barrier()
        code = 0
    except Exception as problem:
        Path(folder, f"problem{rank}").write_text(f"{type(problem).__name__}: {str(problem).strip()}")
    os._exit(code)  # gloo's threads may still hold a tensor, and abort where the interpreter is ending (pytorch#65231)


def run_ranks(method: str, work: Callable[..., Any], given: Sequence[Any], size: int, limit: int) -> Any:
    """Run work(rank, join, *given) in processes that are forked or spawned; return what the first returns. limit: seconds."""
    context: Any = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forks beside threads: what is forked here touches none of theirs
        ranks = [context.Process(target=rank_main, args=(rank, size, folder, work, given), daemon=True) for rank in range(size)]
        try:
            for rank in ranks:
                rank.start()
            end = time.monotonic() + limit
            while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
                if any(rank.exitcode for rank in ranks):
                    end = min(end, time.monotonic() + GRACE)
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        problems = [each.read_text() for each in sorted(Path(folder).glob("problem*"))]
        problems.sort(key=lambda text: text.startswith("RemoteError"))  # which repeats another
        if problems:
            raise RuntimeError(f"over {size} ranks: {problems[0]}")
        if not Path(folder, "found").exists():
            raise RuntimeError(f"{size} ranks did not end in {limit} s, or ended without a word")
        return pickle.loads(Path(folder, "found").read_bytes())


# ---- rules ----------------------------------------------------------------------------------------------------------------
def walk_rule(rule: Any, settings: Mapping[str, Any], start: Any, gradients: Any, place: Callable[[Any], Any]) -> Found:
    """Return parameters and state after some steps of the torch front end. place: makes a DTensor of a tensor, or leaves it."""
    params = [torch.nn.Parameter(place(torch.tensor(p))) for p in start]
    made = importlib.import_module("rlx_optim.torch").made(rule)
    opt = made([(f"tensor {i}", p) for i, p in enumerate(params)], **settings)
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = place(torch.tensor(g))
        opt.step()

    def whole(value: Any) -> np.ndarray:
        value = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
        found: np.ndarray = value.detach().float().numpy()
        return found

    state = opt.state_dict()["state"]
    found = {f"{key} of tensor {i}": [whole(each)] for i, slots in state.items() for key, each in slots.items()}
    return {"p": [whole(p) for p in params], **found}


def walk_alone_and_together(
    rank: int, join: Callable[[], Any], rule: Any, settings: Any, start: Any, gradients: Any
) -> tuple[Found, Found]:
    alone = walk_rule(rule, settings, start, gradients, lambda t: t) if rank == 0 else {}
    mesh, tensors = join(), importlib.import_module("torch.distributed.tensor")

    def shard(t: Any) -> Any:
        return tensors.distribute_tensor(t, mesh, [tensors.Shard(0) if t.ndim else tensors.Replicate()], src_data_rank=None)

    return alone, walk_rule(rule, settings, start, gradients, shard)


def over_ranks(rule: Any, settings: Mapping[str, Any], start: Any, gradients: Any, size: int = 2) -> tuple[Found, Found]:
    """Return what a rule ends with in one process, and over ranks. They are forked, which alone gives them a rule of a script, a
    notebook or a test; Skip where processes cannot be."""
    if not torch.distributed.is_available():
        raise Skip("torch is without torch.distributed")
    if torch.distributed.is_initialized():
        raise Skip("this process is a rank itself")
    if sys.platform != "linux" or torch.cuda.is_initialized():
        raise Skip(
            "asked on Linux, in a process that has not used CUDA; of an installed rule elsewhere by "
            f"rlx-optim check rlx_optim.torch:{rule.title} --ranks 2"
        )
    for module in ("torch.distributed.tensor", "rlx_optim.torch"):  # once, for all
        importlib.import_module(module)
    found: tuple[Found, Found] = run_ranks("fork", walk_alone_and_together, (rule, dict(settings), start, gradients), size, 60)
    return found
