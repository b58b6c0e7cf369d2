"""One rank of test_accelerate's FSDP2: `python fsdp2_ranks.py start|resume FOLDER`, with the environment that torchrun gives."""

import gc
import os
import sys
import weakref
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor

import rlx_optim.torch as ours

#: by label: the class, its settings, and whether shards give the same bits as one process
CASES = {
    "AdamW": (ours.AdamW, {}, True),
    "int8 AdamW": (ours.AdamW, {"state_dtype": "int8"}, False),
    "Muon": (ours.Muon, {}, False),
    "SOAP": (ours.SOAP, {"precondition_frequency": 2}, False),
    "ScheduleFreeAdamW": (ours.ScheduleFreeAdamW, {}, True),
}
BREAK, END = 3, 6


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3))


def make_batch(step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].sin()


def train(model, optimizer, steps, backward=torch.Tensor.backward):
    for step in steps:
        x, y = make_batch(step)
        backward((model(x) - y).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def gather(model):
    with torch.no_grad():
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def make_accelerator():
    accelerator = accelerate.Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"],
        state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False, reshard_after_forward=True,
    )  # fmt: skip
    # accelerate shards on accelerators alone; everything below `prepare` is what runs there
    for shared in (accelerate.PartialState(), accelerator.state):
        shared.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    assert accelerator.distributed_type == DistributedType.FSDP
    return accelerator


def prepare(accelerator, cls, settings):
    model = make_model()
    optimizer = cls(model, lr=0.01, **settings)
    old = [weakref.ref(p) for p in model.parameters()]
    return *accelerator.prepare(model, optimizer), old


def start(accelerator, folder, label):
    cls, settings, bitwise = CASES[label]
    model, optimizer, old = prepare(accelerator, cls, settings)
    optimizer.state_dict()  # before any step
    train(model, optimizer, range(BREAK), accelerator.backward)
    gc.collect()
    assert not any(ref() is not None for ref in old), f"{label}: parameters that were replaced are still there"
    params = {p for group in optimizer.param_groups for p in group["params"]}
    assert set(optimizer.state) == params == set(model.parameters()), label
    accelerator.save_state(str(folder / label))
    train(model, optimizer, range(BREAK, END), accelerator.backward)
    alone = make_model()
    train(alone, cls(alone, lr=0.01, **settings), range(END))
    for whole, expected in zip(gather(model), gather(alone), strict=True):
        if bitwise:
            assert torch.equal(whole, expected), f"{label}: not what one process gives"
        torch.testing.assert_close(whole, expected, atol=2e-3 if "int8" in label else 2e-5, rtol=0)
    torch.save(gather(model), folder / label / f"end{dist.get_rank()}.pt")


def resume(accelerator, folder, label):
    cls, settings, _ = CASES[label]
    model, optimizer, _ = prepare(accelerator, cls, settings)
    accelerator.load_state(str(folder / label))
    train(model, optimizer, range(BREAK, END), accelerator.backward)
    expected = torch.load(folder / label / f"end{dist.get_rank()}.pt")
    assert all(map(torch.equal, gather(model), expected)), f"{label}: not as without the break"


def main():
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    for label in CASES:
        {"start": start, "resume": resume}[sys.argv[1]](accelerator, Path(sys.argv[2]), label)
        accelerator.free_memory()
    print("done", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process whose interpreter is ending


if __name__ == "__main__":
    main()
