"""PyTorch: Muon for hidden matrices, AdamW for the rest, no decay on vectors,
clipping, warm-up and cosine; stopped and resumed.

python examples/torch_muon.py
"""

import itertools

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import rlx_optim
from rlx_optim.data import load_digits
from rlx_optim.torch import Muon, clip_grad_norm_

STEPS = 120
device = "cuda" if torch.cuda.is_available() else "cpu"
images, labels = (torch.tensor(x, device=device) for x in load_digits())


def begun():
    """A model, its optimizer and its schedule."""
    torch.manual_seed(0)
    sizes = (64, 64, 32, 10)
    layers = [
        part
        for a, b in itertools.pairwise(sizes)
        for part in (nn.Linear(a, b), nn.Tanh())
    ]
    model = nn.Sequential(*layers[:-1]).to(device)
    named = list(model.named_parameters())
    groups = [
        {
            "params": [(name, p) for name, p in named if p.ndim > 1],
            "weight_decay": 0.01,
        },
        {
            "params": [(name, p) for name, p in named if p.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    opt = Muon(
        groups,
        lr=0.02,
        otherwise=rlx_optim.AdamW(lr=0.01),
        route={"4.weight": "otherwise"},
    )
    warm, cosine = (
        LinearLR(opt, 0.1, total_iters=10),
        CosineAnnealingLR(opt, T_max=STEPS - 10),
    )
    return model, opt, SequentialLR(opt, [warm, cosine], milestones=[10])


def trained(model, opt, schedule, steps):
    for step in steps:
        batch = torch.randint(
            1500, (64,), generator=torch.Generator().manual_seed(step)
        ).to(device)
        nn.functional.cross_entropy(
            model(images[batch]), labels[batch].long()
        ).backward()
        clip_grad_norm_(opt, 1.0)  # measured here, multiplied in the step
        opt.step()
        schedule.step()
        opt.zero_grad()
    return model


whole = begun()
trained(*whole, range(STEPS))
half = begun()
trained(*half, range(60))
torch.save([part.state_dict() for part in half], "half.pt")

resumed = begun()
for part, state in zip(resumed, torch.load("half.pt"), strict=True):
    part.load_state_dict(state)
trained(*resumed, range(60, STEPS))

print(whole[1].routing_report())
print(whole[1].engine_report())
# bit for bit
assert all(
    torch.equal(a, b)
    for a, b in zip(whole[0].parameters(), resumed[0].parameters(), strict=True)
)
accuracy = (whole[0](images[1500:]).argmax(1) == labels[1500:]).float().mean()
print(f"accuracy {accuracy:.3f}")
assert accuracy > 0.85
