"""Checks of a torch class: compilers, devices and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .ranks import run_ranks
from .table import Skip, Wrong, check
from .torch_subject import Params, TorchSubject, set_seed, to_arrays


@check("torch.compile around the step gives the same numbers", "torch", quick=False)
def compile_(s: TorchSubject) -> Any:
    params, opt = s.begin()
    if hasattr(opt, "update_hessian"):
        raise Skip("its estimates are made outside of step")
    step: Any = torch.compile(opt.step, backend="eager")
    for t in range(4):
        s.set_grads(params, t)
        set_seed(1000 + t)
        step()
    torch.compiler.reset()
    return s.expect_close(params, s.step_params(4), "compiled, it ends elsewhere")


def make_on_cuda(s: TorchSubject, **settings: Any) -> tuple[Params, Any]:
    if not torch.cuda.is_available():
        raise Skip("torch sees no CUDA device")
    params = [nn.Parameter(p.detach().cuda()) for p in s.params()]
    with s.allow_refusal("a CUDA parameter"):
        return params, s.make(params, **settings)


def feed(s: TorchSubject, params: Any, t: int) -> None:
    twins = s.params()
    s.set_grads(twins, t)
    for p, twin in zip(params, twins, strict=True):
        p.grad = twin.grad.to(p.device) if p.grad is None else p.grad.copy_(twin.grad)


@check("on CUDA it ends where it ends on the CPU", "torch")
def cuda(s: TorchSubject) -> Any:
    params, opt = make_on_cuda(s)
    if s.random or hasattr(opt, "update_hessian"):
        raise Skip("it draws random numbers, and those of CUDA are others")
    for t in range(6):
        feed(s, params, t)
        s.step(opt, params, t)
    return s.expect_close(params, s.step_params(), "CUDA ends elsewhere than the CPU", bar=1e-3)


@check("a step that waits for the device stops the queue of kernels", "torch")
def cuda_sync(s: TorchSubject) -> Any:
    params, opt = make_on_cuda(s)
    for t in range(3):
        feed(s, params, t)
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


@check("with capturable=True a step can be captured, and replays the same", "torch")
def cuda_graph(s: TorchSubject) -> Any:
    s.require("capturable")
    params, opt = make_on_cuda(s, capturable=True)
    plain, other = make_on_cuda(s, capturable=True)
    if hasattr(opt, "update_hessian"):
        raise Skip("its estimates are made outside of step")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for t in range(3):
            feed(s, params, t)
            with s.allow_refusal("a step with capturable=True"):
                s.step(opt, params, t)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with s.allow_refusal("capturing this step"), torch.cuda.graph(graph):
        opt.step()
    for t in range(3, 6):
        feed(s, params, t)
        graph.replay()
    for t in range(6):
        feed(s, plain, t)
        s.step(other, plain, t)
    start = [p.detach().cuda() for p in s.params()]
    return s.expect_close(params, plain, "a captured step replays elsewhere", start)


# ---- ranks ------------------------------------------------------------------------------------------------------------------
def make_model(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 18, bias=bias), nn.Tanh(), nn.Linear(18, 5, bias=bias), nn.Tanh(), nn.Linear(5, 7, bias=bias)
    )  # fmt: skip


def train(module: nn.Module, opt: Any) -> None:
    for t in range(5):
        module(torch.randn(8, 12, generator=torch.Generator().manual_seed(t))).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def train_on_rank(rank: int, join: Callable[[], Any], how: str, target: str, settings: dict[str, Any], bias: bool) -> Any:
    from . import load_target

    mesh = join()
    whole: Any = make_model(bias)
    module: Any = whole
    if how == "ddp":
        module = nn.parallel.DistributedDataParallel(whole)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in (*(layer for layer in whole if isinstance(layer, nn.Linear)), whole):
            fully_shard(layer, mesh=mesh)
    train(module, load_target(target)(list(module.parameters()), **settings))
    return to_arrays([p.full_tensor() if how == "sharded" else p for p in whole.parameters()])


def compare_ranks(s: TorchSubject, how: str) -> Any:
    bias = len(s.small) > 1
    single = make_model(bias)
    start = to_arrays(list(single.parameters()))
    opt = s.make(list(single.parameters()))
    if hasattr(opt, "update_hessian"):
        raise Skip("its estimates are made outside of step")
    train(single, opt)
    ends = run_ranks("spawn", train_on_rank, (how, s.target, s.settings, bias), s.ranks, 300)
    what = f"{s.ranks} ranks end elsewhere than one process"
    return s.expect_near(ends, to_arrays(list(single.parameters())), start, what, max(s.bar, 1e-4))


@check("under DistributedDataParallel ranks end where one process does", "torch", quick=False, ranks=True)
def ddp(s: TorchSubject) -> Any:
    return compare_ranks(s, "ddp")


@check(
    "on DTensors of fully_shard ranks end where one process does: norms and matrices are of the whole tensor",
    "torch", quick=False, ranks=True,
)  # fmt: skip
def sharded(s: TorchSubject) -> Any:
    return compare_ranks(s, "sharded")
