"""Peak memory of training steps of a GPT-2-124M on a CUDA device, by optimizer and format of its state, measured.

    python -m lab.peak > benchmarks/memory-h200.json     # or: python -m lab.peak AdamW Muon

A step is forward, backward and the optimizer's, on a batch of 1×1,024 tokens, float32 weights. State: what the optimizer holds
after a step. Peak: the most that torch had allocated at once during the second step, with weights, gradients, activations.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import rlx_optim.torch as ours

SIZES = {"vocabulary": 50257, "context": 1024, "width": 768, "heads": 12, "layers": 12}
SMALL = {"vocabulary": 512, "context": 64, "width": 128, "heads": 2, "layers": 1}
FORMATS = ("float32", "bfloat16", "int8")
OPTIMIZERS = ("AdamW", "Lion", "Lamb", "MARS", "Muon")


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.norm(self.blocks(x)) @ self.wte.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def measured(make: Callable[[nn.Module], Any], sizes: dict[str, int], device: str) -> dict[str, float]:
    """MiB: of weights, of state, and the peak of a step; and the loss after two."""
    gc.collect()
    torch.manual_seed(0)
    model = GPT(**sizes).to(device)
    opt = make(model)
    tokens = torch.randint(sizes["vocabulary"], (1, sizes["context"]), device=device)
    peak = 0.0
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = model(tokens)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**20
    state = sum(t.nbytes for each in opt.state.values() for t in each.values() if torch.is_tensor(t) and t.device.type == device)
    weights = sum(p.nbytes for p in model.parameters())
    return {"weights": weights / 2**20, "state": state / 2**20, "peak": peak, "loss": float(loss.detach())}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = SIZES if device == "cuda" else SMALL
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU, a small model: no peaks"
    rows = [{"optimizer": "torch.optim.AdamW (fused)", "state_dtype": "float32"}]
    rows[0] |= measured(lambda model: torch.optim.AdamW(model.parameters(), fused=True), sizes, device)
    for name in sys.argv[1:] or OPTIMIZERS:
        for kept in FORMATS:
            row: dict[str, Any] = {"optimizer": name, "state_dtype": kept}
            row |= measured(
                lambda model, name=name, kept=kept: getattr(ours, name)(model, lr=1e-4, state_dtype=kept), sizes, device
            )
            rows.append(row)
    report = {"device": where, "torch": torch.__version__, "model": sizes, "unit": "MiB", "rows": rows}
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
