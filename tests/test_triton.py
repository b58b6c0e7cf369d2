"""The triton engine. Without a GPU its kernels run in Triton's interpreter, in a process of its own; with one, compiled (`-m gpu`)."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers import MATRIX, copies, distance, problem  # noqa: E402
from test_engines import EVERY  # noqa: E402

import rlx_optim  # noqa: E402
import rlx_optim.torch as front  # noqa: E402
from rlx_optim.named import spec_class  # noqa: E402

#: rules that the engine sweeps itself; the others run on the torch engine that it extends
SWEPT = [case for case in EVERY if case[0] not in (*MATRIX, "adafactor")]


def walk(case, device, dtype=torch.float32, steps=4, shapes=None):
    """(distance from the reference) after some steps of a case through the torch front end on the triton engine."""
    name, settings = case
    settings = {"lr": 0.01, **settings} if name == "sgd" else settings
    settings = {**settings, "max_precond_dim": 6} if name == "soap" else settings  # dimensions whose first basis is determined
    if name == "adafactor":  # the front end's defaults are torch's
        settings = {"lr": None, "eps": (1e-30, 1e-3), "convention": "paper", **settings}
    params, gradients = problem(*([shapes] if shapes else []), steps=steps)
    tensors = {k: torch.nn.Parameter(torch.tensor(v).to(device, dtype)) for k, v in params.items()}
    start = {k: p.detach().float().cpu().numpy() for k, p in tensors.items()}
    reference, want = rlx_optim.create(name, engine="reference", **settings), copies(start)
    opt = getattr(front, spec_class(name).__name__)(list(tensors.items()), engine="triton", **settings)
    for grads in gradients:
        for k, p in tensors.items():
            p.grad = torch.tensor(grads[k]).to(device, dtype)
        opt.step()
        reference.step_all(want, {k: p.grad.float().cpu().numpy().copy() for k, p in tensors.items()})
    assert all(text.startswith("triton") for text in opt.engine_report().values())
    return float(distance({k: p.detach().float().cpu().numpy() for k, p in tensors.items()}, want, start))


def test_every_swept_rule_in_the_interpreter():
    """All variants, tensors of every size around a block, float32 and bfloat16 storage, in one process."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_triton; test_triton.report()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == len(SWEPT) + 1
    assert {k: v for k, v in results.items() if not v < 1e-5} == {}


def report():
    """What the interpreter's process prints."""
    warnings.simplefilter("ignore")
    shapes = {"long": (2100,), "block": (1024,), "w": (33, 7), "s": (), "one": (1,)}
    results = {f"{name} {settings}": walk((name, settings), "cpu", steps=3, shapes=shapes) for name, settings in SWEPT}
    mixed = [torch.nn.Parameter(torch.ones(1500, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float32)]
    opt = front.AdamW(mixed, lr=0.5, engine="triton")
    for p in mixed:
        p.grad = torch.ones_like(p)
    opt.step()
    results["mixed storage"] = max(float((p.detach().float() - 0.495).abs().max()) for p in mixed[::2])
    assert np.allclose(mixed[1].detach().float(), 0.495, atol=2e-3)
    print(json.dumps(results))


def test_without_a_gpu_it_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="engine 'triton' cannot step a parameter on cpu"):
        front.AdamW([torch.nn.Parameter(torch.ones(3))], engine="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())]))
def test_every_rule_on_the_gpu(case):
    assert walk(case, "cuda", steps=20) < (1e-3 if case[0] in MATRIX else 1e-5)


@pytest.mark.gpu
def test_automatic_choice_on_the_gpu():
    p = torch.nn.Parameter(torch.ones(5, device="cuda"))
    (text,) = front.AdamW([p]).engine_report().values()
    assert text.startswith("triton: cuda:0")
    assert text.endswith("(CUDA tensors, Triton installed)")


@pytest.mark.gpu
def test_views_at_odd_addresses_on_the_gpu():
    """Views that do not start on 16 bytes are right, too."""
    room, grads = torch.ones(5000, device="cuda"), torch.full((5000,), 0.5, device="cuda")
    odd, even = room[1:4001].detach().requires_grad_(), torch.ones(4000, device="cuda").requires_grad_()
    for p, g in ((odd, grads[3:4003]), (even, torch.full((4000,), 0.5, device="cuda"))):
        p.grad = g
        front.AdamW([p], lr=0.1).step()
    assert torch.equal(odd, even)
    assert room[0] == 1
    assert (room[4001:] == 1).all()
