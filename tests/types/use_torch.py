"""What a user of PyTorch writes; type checkers must take it (make types)."""

import torch

import rlx_optim
from rlx_optim.torch import AdamW, Muon, clip_grad_norm_

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1))
opt = Muon(model, lr=0.02, otherwise=rlx_optim.AdamW(lr=3e-4), route={"*head*": "otherwise"}, engine="auto")
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
model(torch.randn(4, 8)).sum().backward()
clip_grad_norm_(opt, 1.0)
opt.step()
opt.zero_grad()
schedule.step()
plain = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True, capturable=False, engine="triton")
plain.load_state_dict(plain.state_dict())
