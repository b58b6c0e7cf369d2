"""NumPy alone: a small network by hand, two optimizers for its parameters, a
checkpoint every fifty steps.

python examples/numpy_digits.py
"""

from pathlib import Path

import numpy as np

import rlx_optim
from rlx_optim.data import load_digits

STEPS = 200
images, labels = load_digits()
rng = np.random.default_rng(0)
params = {
    "fc1.weight": rng.normal(0, 0.1, (64, 32)).astype(np.float32),
    "fc1.bias": np.zeros(32, np.float32),
    "fc2.weight": rng.normal(0, 0.1, (32, 10)).astype(np.float32),
    "fc2.bias": np.zeros(10, np.float32),
}


def gradients(x, y):
    """Of the mean cross-entropy, by name."""
    hidden = np.tanh(x @ params["fc1.weight"] + params["fc1.bias"])
    logits = hidden @ params["fc2.weight"] + params["fc2.bias"]
    error = np.exp(logits - logits.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    back = error @ params["fc2.weight"].T * (1 - hidden * hidden)
    grads = {"fc1.weight": x.T @ back, "fc1.bias": back.sum(0)}
    return grads | {"fc2.weight": hidden.T @ error, "fc2.bias": error.sum(0)}


def accuracy():
    hidden = np.tanh(images[1500:] @ params["fc1.weight"] + params["fc1.bias"])
    found = (hidden @ params["fc2.weight"] + params["fc2.bias"]).argmax(1)
    return (found == labels[1500:]).mean()


opt = rlx_optim.Muon(
    lr=rlx_optim.schedules.warmup_cosine(0.05, warmup=10, total=STEPS),
    otherwise=rlx_optim.AdamW(lr=rlx_optim.schedules.cosine(0.01, total=STEPS)),
)
folder = Path("digits-run")
folder.mkdir(exist_ok=True)
for _ in range(STEPS):
    batch = rng.integers(0, 1500, 64)
    grads = gradients(images[batch], labels[batch])
    opt.step_all(
        params,
        grads,
        grad_scale=rlx_optim.global_grad_clip_scale(grads.values(), 1.0),
    )
    opt.save(
        folder, every=50, keep=2
    )  # rlx_optim.load_latest(folder, …) goes on from there

print(opt.routing_report())
print(f"accuracy {accuracy():.3f}")
assert accuracy() > 0.85
