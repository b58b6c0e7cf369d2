"""The benchmark on a CUDA device: who competes there, and the copy beside them.

Ours runs through `rlx_optim.torch`, as it is and captured in a CUDA graph; torch's fused optimizers likewise. All torch
contenders share the gradients, which nobody writes to. A turn begins and ends with the device idle.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

from rlx_optim.cli import Problem
from rlx_optim.cli.costs import settings_of
from rlx_optim.cli.shapes import Shapes, count_numbers
from rlx_optim.registry import spec_class
from rlx_optim.rounding import EXACT, NEAREST, STOCHASTIC

from .peers import HOW, Contender, Peer, jitted, load, optax_contender, running
from .results import Request, label_of, present

Tensors = dict[str, Any]

COPIED = 1 << 28  # float32 elements: 1 GiB read and as much written
EMBEDDING = 20_000  # a matrix with a side of so many is an embedding or a head, not for Muon


def check(request: Request) -> None:
    """Refuse what cannot run before anything does."""
    if importlib.util.find_spec("torch") is None:
        raise Problem("--device cuda needs torch: pip install torch")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise Problem("--device cuda: torch sees no CUDA device here")
    count, most = (
        count_numbers(request.shapes),
        max(map(len, ((*present(name, request), *request.state_dtypes, 0, 0, 0) for name in request.optimizers))),
    )
    free, _ = torch.cuda.mem_get_info()
    if 4 * count * (3 + 4 * most) > free:
        raise Problem(f"model {request.model}: {count:,} parameters in {most} implementations are too many for this GPU's memory")


def name_of_device() -> str:
    torch = importlib.import_module("torch")
    return str(torch.cuda.get_device_name())


def draw(shapes: Shapes) -> tuple[Tensors, Tensors]:
    """Parameters and gradients on the device."""
    torch = importlib.import_module("torch")
    generator = torch.Generator("cuda").manual_seed(0)

    def made() -> Tensors:
        return {k: 0.02 * torch.randn(shape, generator=generator, device="cuda") for k, shape in shapes.items()}

    return made(), made()


def wait() -> None:
    importlib.import_module("torch").cuda.synchronize()


def memory_copy() -> Contender:
    torch = importlib.import_module("torch")
    source, target = (torch.ones(COPIED, device="cuda") for _ in range(2))
    return Contender("copy", lambda: target.copy_(source), wait=wait, moved=8 * COPIED)


def own(params: Any, grads: Any) -> dict[str, Any]:
    """Parameters of one's own, with the gradients that all share."""
    torch = importlib.import_module("torch")
    tensors = {k: torch.nn.Parameter(p.clone()) for k, p in params.items()}
    for k, tensor in tensors.items():
        tensor.grad = grads[k]
    return tensors


def hidden(tensor: Any) -> bool:
    return bool(tensor.ndim == 2 and max(tensor.shape) < EMBEDDING)


def ours(
    name: str, params: Tensors, grads: Tensors, captured: bool = False, kept: str = "float32", rounding: str | None = None
) -> Contender:
    front = importlib.import_module("rlx_optim.torch")
    tensors, kind = own(params, grads), spec_class(name)
    settings = settings_of(name) | {"state_dtype": kept} | ({} if rounding is None else {"rounding": rounding})
    settings = {k: kind.fields[k].default for k in kind.torch.defaults} | settings  # as in the named API
    if not kind.accepts_any_shape:
        settings["route"] = functools.partial(_route, frozenset(k for k, tensor in tensors.items() if hidden(tensor)))
    made = front.made(kind)(list(tensors.items()), capturable=captured, **settings)
    label = f"{label_of(kept, rounding)}{', in a CUDA graph' * captured}"
    return dataclasses.replace(runs(label, [made], list(tensors.values()), captured), kept=kept, rounding=rounding)


def _route(matrices: frozenset[str], name: str, tensor: Any) -> bool:
    return name in matrices


def in_jax(name: str, params: Tensors, grads: Tensors) -> Contender:
    """Ours as an optax transformation."""
    factories = importlib.import_module("rlx_optim.optax.factories")
    kind = spec_class(name)
    given = {k: value for k, (_, value) in factories.to_keywords(kind, kind(**settings_of(name)).values()).items()}
    if not kind.accepts_any_shape:
        given["route"] = functools.partial(_route, frozenset(k for k, tensor in params.items() if hidden(tensor)))
    return jitted("ours, in JAX", factories.make_factory(kind)(**given), *_for_jax(params, grads))


def _for_jax(params: Tensors, grads: Tensors) -> tuple[Any, Any, Any]:
    """Arrays, and the device to put them on."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the device's memory
    jax = importlib.import_module("jax")
    if all(device.platform == "cpu" for device in jax.devices()):
        raise RuntimeError("jax sees no GPU")
    p, g = ({k: t.cpu().numpy() for k, t in each.items()} for each in (params, grads))
    return p, g, jax.devices()[0]


def theirs(peer: Peer, params: Tensors, grads: Tensors, captured: bool = False) -> Contender:
    if peer.how == "optax":
        return optax_contender(peer, *_for_jax(params, grads))
    tensors = list(own(params, grads).values())
    settings = peer.settings | ({"capturable": True} if captured and "SGD" not in peer.rule else {})
    made = HOW[peer.how](load(peer.rule), tensors, settings, hidden)
    return runs(f"{peer.label}, in a CUDA graph" if captured else peer.label, made, tensors, captured)


def runs(label: str, made: list[Any], tensors: list[Any], captured: bool) -> Contender:
    torch, eager = importlib.import_module("torch"), running(label, made, tensors, wait)
    if not captured:
        return eager
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            eager.step()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager.step()
    return dataclasses.replace(eager, step=graph.replay, renew=lambda: None)


def field(name: str, request: Request, arrays: tuple[Tensors, Tensors]) -> dict[str, Callable[[], Contender]]:
    """Who competes, by label, not built yet. Of the JAX front end ours and optax alone."""
    made: dict[str, Callable[[], Contender]] = {}
    if request.front == "jax":
        made["ours, in JAX"] = functools.partial(in_jax, name, *arrays)
        mine = [peer for peer in present(name, request) if peer.how == "optax"]
        return made | {peer.label: functools.partial(theirs, peer, *arrays) for peer in mine}
    if request.weights == "float32":
        made["ours"] = functools.partial(ours, name, *arrays)
        if not spec_class(name).step_dependent:
            made["ours, in a CUDA graph"] = functools.partial(ours, name, *arrays, True)
        made |= {label_of(kept): functools.partial(ours, name, *arrays, kept=kept) for kept in request.state_dtypes}
    else:
        kind = getattr(importlib.import_module("torch"), request.weights)
        arrays = ({k: t.to(kind) for k, t in arrays[0].items()}, {k: t.to(kind) for k, t in arrays[1].items()})
        formats = itertools.product(("float32", *request.state_dtypes), (NEAREST, STOCHASTIC, EXACT))
        made |= {label_of(*how): functools.partial(ours, name, *arrays, False, *how) for how in formats}
    for peer in present(name, request):
        made[peer.label] = functools.partial(theirs, peer, *arrays)
        if peer.settings.get("fused"):
            made[f"{peer.label}, in a CUDA graph"] = functools.partial(theirs, peer, *arrays, True)
    return made
