"""Checks of a torch class: compilers and devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .table import Skip, Wrong, check
from .torch_subject import Params, TorchSubject, numbers, seed


@check("compile", "torch.compile around the step gives the same numbers", "torch", quick=False)
def compiled(s: TorchSubject) -> Any:
    params = s.params()
    opt = s.make(params)
    if hasattr(opt, "update_hessian"):
        raise Skip("its estimates are made outside of step")
    step: Any = torch.compile(opt.step, backend="eager")
    for t in range(4):
        s.grads(params, t)
        seed(1000 + t)
        step()
    torch.compiler.reset()
    return s.close(params, s.after(4), "compiled, it ends elsewhere")


def on_cuda(s: TorchSubject, **settings: Any) -> tuple[Params, Any]:
    if not torch.cuda.is_available():
        raise Skip("torch sees no CUDA device")
    params = [nn.Parameter(p.detach().cuda()) for p in s.params()]
    with s.refusable("a CUDA parameter"):
        return params, s.make(params, **settings)


def fed(s: TorchSubject, params: Any, t: int) -> None:
    twins = s.params()
    s.grads(twins, t)
    for p, twin in zip(params, twins, strict=True):
        p.grad = twin.grad.to(p.device) if p.grad is None else p.grad.copy_(twin.grad)


@check("cuda", "on CUDA it ends where it ends on the CPU", "torch")
def cuda(s: TorchSubject) -> Any:
    params, opt = on_cuda(s)
    if s.random or hasattr(opt, "update_hessian"):
        raise Skip("it draws random numbers, and those of CUDA are others")
    for t in range(6):
        fed(s, params, t)
        s.step(opt, params, t)
    return s.near(numbers(params), numbers(s.after()), numbers(s.params()), "CUDA ends elsewhere than the CPU", max(s.bar, 1e-3))


@check("cuda-sync", "a step that waits for the device stops the queue of kernels", "torch")
def cuda_sync(s: TorchSubject) -> Any:
    params, opt = on_cuda(s)
    for t in range(3):
        fed(s, params, t)
        s.step(opt, params, t)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    except RuntimeError as problem:
        raise Wrong(f"a step waits for the device: {str(problem).splitlines()[0]}", "waits") from None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no wait"


@check("cuda-graph", "with capturable=True a step can be captured, and replays the same", "torch")
def cuda_graph(s: TorchSubject) -> Any:
    s.needs("capturable")
    params, opt = on_cuda(s, capturable=True)
    plain, other = on_cuda(s, capturable=True)
    if hasattr(opt, "update_hessian"):
        raise Skip("its estimates are made outside of step")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for t in range(3):
            fed(s, params, t)
            with s.refusable("a step with capturable=True"):
                s.step(opt, params, t)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with s.refusable("capturing this step"), torch.cuda.graph(graph):
        opt.step()
    for t in range(3, 6):
        fed(s, params, t)
        graph.replay()
    for t in range(6):
        fed(s, plain, t)
        s.step(other, plain, t)
    start = [p.detach().cuda() for p in s.params()]
    return s.close(params, plain, "a captured step replays elsewhere", start)
