"""Muon on a model that is sharded by fully_shard (FSDP2): train, save on all ranks,
load, go on.

    torchrun --nproc-per-node 2 examples/fsdp2_muon.py  # CPU: gloo
    torchrun --nproc-per-node 8 examples/fsdp2_muon.py  # 8 GPUs: nccl

Nothing in it is said about meshes or ranks to the optimizer: it reads from the
parameters where they lie.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import rlx_optim
from rlx_optim.torch import Muon, clip_grad_norm_

WORDS, WIDTH, LAYERS, LENGTH = 64, 64, 2, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(-2)
        )
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.lm_head = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WORDS, bias=False),
        )

    def forward(self, words):
        x = self.wte(words)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def sharded(device):
    torch.manual_seed(0)
    model = Gpt().to(device)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(model, opt, steps, generator, device):
    """Learn to count: the next word is the word before plus a constant."""
    for _ in range(steps):
        start, stride = (
            torch.randint(1, WORDS, (16, 1), generator=generator).to(device)
            for _ in range(2)
        )
        words = (start + stride * torch.arange(LENGTH + 1, device=device)) % WORDS
        loss = nn.functional.cross_entropy(
            model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
        )
        loss.backward()
        clip_grad_norm_(opt, 1.0)  # over all ranks, and folded into the step
        opt.step()
        opt.zero_grad()
    return loss.item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)  # each rank has data of its own

    model = sharded(device)
    opt = Muon(
        model,
        lr=0.02,
        split={"*.qkv.weight": 3},
        otherwise=rlx_optim.AdamW(lr=3e-3),
    )
    losses = [train(model, opt, steps // 2, generator, device)]

    folder = [
        tempfile.mkdtemp() if rank == 0 else None
    ]  # a folder that all ranks see
    dist.broadcast_object_list(folder)
    dcp.save(
        dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True)),
        checkpoint_id=folder[0],
    )

    model = sharded(device)
    opt = Muon(model, split={"*.qkv.weight": 3})
    state = dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True))
    dcp.load(state, checkpoint_id=folder[0])  # into any number of ranks
    set_state_dict(
        model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"]
    )
    losses.append(train(model, opt, steps - steps // 2, generator, device))

    if rank == 0:
        print(opt.routing_report())
        for lane, engine in opt.engine_report().items():
            print(f"{lane}: {engine}")
        (saved, last), n = losses, dist.get_world_size()
        print(f"loss {saved:.3f} when saved, {last:.3f} at the end, on {n} ranks")
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
