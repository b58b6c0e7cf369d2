"""`rlx-optim bench --offload`: steps of parameters on a CUDA device whose state is on the host, and what they are made of.

Beside each step stand the two things that it cannot be faster than, measured by themselves: its copies, without the arithmetic,
and its arithmetic, on parameters and gradients that are on the host already. And torch's fused optimizer on copies: gradients
down, a step there, parameters up; where torchao is installed, its CPUOffloadOptimizer, which takes gradients down as backward
gives them (given at once here). Buffers of the host that are copied from or to are page-locked.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

from rlx_optim import buckets
from rlx_optim.cli import Problem, get_machine, say, show_size, show_table
from rlx_optim.cli.costs import settings_of
from rlx_optim.cli.shapes import Shapes, count_numbers
from rlx_optim.registry import spec_class

GIB = 1 << 30
#: what weights and gradients are, what state is kept in, and who computes: the host, or the device (engine="triton")
KINDS = {
    "float32": ("float32", "float32", "auto"),
    "bfloat16, int8 state": ("bfloat16", "int8", "auto"),
    "float32, on the device": ("float32", "float32", "triton"),
    "bfloat16, int8 state, on the device": ("bfloat16", "int8", "triton"),
}
FUSED = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}  # torch's


@dataclasses.dataclass
class Row:
    """A step of one optimizer: seconds, and the bytes that it holds."""

    optimizer: str
    kind: str
    step: float
    copies: float
    host: float | None  # the arithmetic alone, where that is the host's
    torch_fused: float | None
    torchao: float | None
    over_limit: float  # the step over the larger of copies and host
    device_peak: int  # bytes beside parameters and gradients
    state: int  # bytes on the host


@dataclasses.dataclass
class Report:
    model: str
    parameters: int
    down: float  # bytes a second, device to host
    up: float
    both: float  # each way, at once
    bucket: int
    machine: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)


def timed(step: Callable[[], Any], rounds: int) -> float:
    """The median of some steps, after two."""
    torch = importlib.import_module("torch")
    found = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def bandwidth(rounds: int) -> tuple[float, float, float]:
    """Of one large copy: down, up, both at once."""
    torch = importlib.import_module("torch")
    host, device = (
        [torch.empty(GIB, dtype=torch.uint8, **where) for _ in range(2)] for where in ({"pin_memory": True}, {"device": "cuda"})
    )
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(*ways: int) -> None:
        for way in ways:
            to, of = (host, device) if way == 0 else (device, host)
            with torch.cuda.stream(streams[way]):
                to[way].copy_(of[way], non_blocking=True)

    down, up, both = (GIB / timed(functools.partial(copy, *ways), rounds) for ways in ((0,), (1,), (0, 1)))
    return down, up, both


def drawn(shapes: Shapes, dtype: Any, device: str) -> dict[str, Any]:
    """Parameters with gradients."""
    torch = importlib.import_module("torch")
    generator, found = torch.Generator("cuda").manual_seed(0), {}
    for name, shape in shapes.items():
        p, g = ((0.02 * torch.randn(shape, generator=generator, device="cuda")).to(device, dtype) for _ in range(2))
        found[name] = torch.nn.Parameter(p)
        found[name].grad = g
    return found


def made(name: str, params: dict[str, Any], **settings: Any) -> Any:
    front, kind = importlib.import_module("rlx_optim.torch"), spec_class(name)
    given = {k: kind.fields[k].default for k in kind.torch.defaults} | settings_of(name) | settings
    opt = front.made(kind)(list(params.items()), **given)
    if kind.observes:
        opt.update_hessian_from_gradients(1)
    return opt


def row(name: str, kind: str, shapes: Shapes, rounds: int) -> Row:
    torch = importlib.import_module("torch")
    weights, kept, engine = KINDS[kind]
    dtype = getattr(torch, weights)
    params = drawn(shapes, dtype, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    opt = made(name, params, state_dtype=kept, offload="cpu", engine=engine)
    opt.step()
    torch.cuda.reset_peak_memory_stats()
    step = timed(opt.step, rounds)
    peak = torch.cuda.max_memory_allocated() - before
    state = sum(t.nbytes for each in opt.state.values() for t in each.values() if torch.is_tensor(t))
    copies = timed(functools.partial(carry, opt), rounds)
    below = not any(lane.on_device for lane in opt._placements)
    del opt
    gc.collect()
    fused = ao = None
    if name in FUSED and below and kept == "float32":
        fused = timed(torch_fused(FUSED[name], params), rounds)
        gc.collect()
        if importlib.util.find_spec("torchao") is not None:
            ao = timed(torchao(FUSED[name], params), rounds)
    params.clear()
    gc.collect()
    torch.cuda.empty_cache()
    host = None
    if below:
        opt = made(name, drawn(shapes, dtype, "cpu"), state_dtype=kept)
        host = timed(opt.step, rounds)
        del opt
        gc.collect()
    return Row(name, kind, step, copies, host, fused, ao, step / max(host or 0.0, copies), peak, state)


def carry(opt: Any) -> None:
    """What a step copies, and nothing else."""
    for lane in opt._placements:
        grads = [seat.param.grad for seat in lane.entries]
        lane.carry(lane.turns(range(len(grads)), grads), lambda turn: None)


def torch_fused(title: str, params: dict[str, Any]) -> Callable[[], None]:
    """A step of torch's on page-locked copies."""
    torch = importlib.import_module("torch")

    def pinned(tensor: Any) -> Any:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)

    above = list(params.values())
    below = [torch.nn.Parameter(pinned(p.detach())) for p in above]
    for p, q in zip(above, below, strict=True):
        q.grad = pinned(p.grad)
    opt = getattr(torch.optim, title)(below, lr=1e-3, fused=True)

    def step() -> None:
        torch._foreach_copy_([q.grad for q in below], [p.grad for p in above], non_blocking=True)
        torch.cuda.synchronize()
        opt.step()
        with torch.no_grad():
            torch._foreach_copy_(above, below, non_blocking=True)

    return step


def torchao(title: str, params: dict[str, Any]) -> Callable[[], None]:
    """A step of its CPUOffloadOptimizer, gradients given by backward."""
    torch = importlib.import_module("torch")
    offloading = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    leaves = list(params.values())
    grads = [p.grad for p in leaves]
    opt = offloading(leaves, getattr(torch.optim, title), fused=True, lr=1e-3)

    def step() -> None:
        opt.zero_grad()
        torch.autograd.backward(leaves, grads)
        opt.step()

    return step


def run(model: str, shapes: Shapes, optimizers: list[str], rounds: int, tick: Callable[[str], None]) -> Report:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise Problem("--offload: torch sees no CUDA device here")
    tick("copies")
    report = Report(model, count_numbers(shapes), *bandwidth(rounds), buckets.BUCKET, get_machine())
    for name in optimizers:
        for kind in [kind for kind, (_, _, engine) in KINDS.items() if engine == "auto" or not spec_class(name).matrix]:
            tick(f"{name}, {kind}")
            report.rows.append(row(name, kind, shapes, rounds))
    return report


# ---- what is printed --------------------------------------------------------------------------------------------------------
def milli(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f}"


HEAD = (
    "optimizer", "weights, state", "ms/step", "copies alone", "host alone", "over the larger", "torch fused", "torchao",
    "device, beside", "host state",
)  # fmt: skip


def cells(r: Row) -> list[str]:
    times = [milli(seconds) for seconds in (r.step, r.copies, r.host)]
    peers = [milli(seconds) for seconds in (r.torch_fused, r.torchao)]
    return [r.optimizer, r.kind, *times, f"{r.over_limit:.2f}×", *peers, show_size(r.device_peak), show_size(r.state)]


def show(report: Report) -> None:
    m, (down, up, both) = report.machine, (each / 1e9 for each in (report.down, report.up, report.both))
    say(f"{m.get('gpu', '')}; {m['cpu']}, {m['cores']} cores, {m['date']}")
    say(f"{report.model}: parameters {report.parameters:,}; buckets of {show_size(report.bucket)} and multiples")
    say(f"copies of 1.07 GB, page-locked: {down:.1f} GB/s down, {up:.1f} up, {both:.1f} each way at once")
    show_table(HEAD, [cells(r) for r in report.rows], [True] * len(report.rows), (8, 9, 7))
