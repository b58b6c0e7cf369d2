"""Fine-tuning with LoRA: adapters alone are trained, at two rates, with their state
in 16 bits and an average of the weights.

python examples/lora.py
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rlx_optim.data import load_digits
from rlx_optim.torch import AdamW


class Adapted(nn.Module):
    """A layer that stays, and a product of two thin matrices beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def trained(model, opt, kept, steps, ema=None):
    for step in range(steps):
        batch = kept[
            torch.randint(
                len(kept), (64,), generator=torch.Generator().manual_seed(step)
            )
        ]
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        opt.step()
        opt.zero_grad()
        if ema is not None:
            ema.update_parameters(model)


def accuracy(model):
    with torch.no_grad():
        return (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()


torch.manual_seed(0)
images, labels = map(torch.tensor, load_digits())
labels, learned = labels.long(), torch.arange(1500)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
few = learned[labels[:1500] < 7]  # what it learns at first
trained(model, AdamW(model, lr=0.01), few, 150)
before = accuracy(model)

model.requires_grad_(False)
model[0], model[2] = Adapted(model[0]), Adapted(model[2])
adapters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
opt = AdamW(
    [
        {
            "params": [(n, p) for n, p in adapters if n.endswith("lora_A")],
            "lr": 0.01,
        },
        {
            "params": [(n, p) for n, p in adapters if n.endswith("lora_B")],
            "lr": 0.04,
        },  # LoRA+
    ],
    weight_decay=0.0,
    state_dtype="bfloat16",
)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
trained(model, opt, learned, 150, ema)

count = sum(p.numel() for _, p in adapters)
print(f"{count} parameters trained; accuracy {before:.3f} before,")
print(f"{accuracy(model):.3f} after, {accuracy(ema):.3f} of the average")
assert accuracy(ema) > before + 0.1
