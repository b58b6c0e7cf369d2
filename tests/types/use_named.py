"""What a user of NumPy writes; type checkers must take it (make types)."""

import numpy as np

import rlx_optim

params = {"fc.weight": np.zeros((64, 32), np.float32), "fc.bias": np.zeros(64, np.float32)}
grads = {name: np.ones_like(p) for name, p in params.items()}
rate = rlx_optim.schedules.warmup_cosine(3e-4, warmup=100, total=10_000)
opt = rlx_optim.AdamW(lr=rate, weight_decay=0.1, groups=[{"match": "*.bias", "weight_decay": 0.0}])
scale: float = rlx_optim.global_grad_clip_scale(grads.values(), max_norm=1.0)
opt.step_all(params, grads, grad_scale=scale)
muon = rlx_optim.Muon(lr=0.02, otherwise=rlx_optim.AdamW(lr=3e-4), nonfinite="skip")
muon.step_all(params, grads)
print(muon.routing_report(), opt.state("fc.weight")["m"].shape)
opt.save("run/{iteration}.safetensors", keep=3)
