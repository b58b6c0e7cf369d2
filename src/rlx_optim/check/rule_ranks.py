"""A rule over ranks: the torch front end on DTensors of a few gloo processes, beside one process."""

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

from .table import Skip

LIMIT, GRACE = 60, 3  # seconds, after which ranks are waiting for each other in vain; and after one has failed
Found = dict[str, list[np.ndarray]]


def walked(rule: Any, settings: Mapping[str, Any], start: Any, gradients: Any, *, place: Callable[[Any], Any]) -> Found:
    """Parameters and state after some steps of the torch front end."""
    torch, front = importlib.import_module("torch"), importlib.import_module("rlx_optim.torch")
    params = [torch.nn.Parameter(place(torch.tensor(p))) for p in start]
    opt = front.made(rule)([(f"tensor {i}", p) for i, p in enumerate(params)], **settings)
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = place(torch.tensor(g))
        opt.step()

    def whole(value: Any) -> np.ndarray:
        value = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
        found: np.ndarray = value.detach().float().numpy()
        return found

    state = opt.state_dict()["state"]
    found = {f"{key} of tensor {i}": [whole(each)] for i, its in state.items() for key, each in its.items()}
    return {"p": [whole(p) for p in params], **found}


def rank_main(rank: int, size: int, folder: str, given: Sequence[Any]) -> None:
    """What each process does: the first walks alone, then all together."""
    code = 1
    try:
        torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
        tensors = importlib.import_module("torch.distributed.tensor")
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        alone = walked(*given, place=lambda t: t) if rank == 0 else {}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))

        def cut(t: Any) -> Any:
            return tensors.distribute_tensor(t, mesh, [tensors.Shard(0) if t.ndim else tensors.Replicate()], src_data_rank=None)

        together = walked(*given, place=cut)
        Path(folder, f"ends{rank}").write_bytes(pickle.dumps((alone, together)))
        dist.barrier()
        code = 0
    except Exception as problem:
        Path(folder, f"problem{rank}").write_text(f"{type(problem).__name__}: {str(problem).strip()}")
    os._exit(code)  # gloo's threads may still hold a tensor, and abort where the interpreter is ending (pytorch#65231)


def over_ranks(rule: Any, settings: Mapping[str, Any], start: Any, gradients: Any, size: int = 2) -> tuple[Found, Found]:
    """What a rule ends with in one process, and over ranks."""
    check_place(rule)
    given, context = (rule, dict(settings), start, gradients), multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forks beside threads: what is forked here touches none of theirs
        ranks = [context.Process(target=rank_main, args=(rank, size, folder, given), daemon=True) for rank in range(size)]
        try:
            for rank in ranks:
                rank.start()
            end = time.monotonic() + LIMIT
            while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
                if any(rank.exitcode for rank in ranks):  # the others have a moment to say why
                    end = min(end, time.monotonic() + GRACE)
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        problems = [each.read_text() for each in sorted(Path(folder).glob("problem*"))]
        problems.sort(key=lambda text: text.startswith("Elsewhere"))  # which repeats another
        if problems:
            raise RuntimeError(f"over {size} ranks: {problems[0]}")
        if not Path(folder, "ends0").exists():
            raise RuntimeError(f"{size} ranks did not end in {LIMIT} s, or ended without a word")
        found: tuple[Found, Found] = pickle.loads(Path(folder, "ends0").read_bytes())
        return found


def check_place(rule: Any) -> None:
    """Skip where processes cannot be forked: only those know a rule that is of a script, a notebook or a test."""
    torch = importlib.import_module("torch")
    if not torch.distributed.is_available():
        raise Skip("torch is without torch.distributed")
    if torch.distributed.is_initialized():
        raise Skip("this process is a rank itself")
    if sys.platform != "linux" or torch.cuda.is_initialized():
        raise Skip(
            "asked on Linux, in a process that has not used CUDA; of an installed rule elsewhere by "
            f"rlx-optim check rlx_optim.torch:{rule.title} --ranks 2"
        )
    importlib.import_module("torch.distributed.tensor")  # once, for all
    importlib.import_module("rlx_optim.torch")
