"""A small transformer that learns the characters of Python's standard library, in torch (`char-gpt`)."""

from __future__ import annotations

import functools
import importlib.util
import math
import platform
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlx_optim import create
from rlx_optim import torch as front
from rlx_optim.race import Run, Settings, Tick
from rlx_optim.race.digits import HESSIAN_EVERY, WARM, Stopwatch, finish_run
from rlx_optim.registry import spec_class
from rlx_optim.torch.engines import KNOWN

BATCH, CONTEXT, WIDTH, HEADS, BLOCKS = 16, 64, 64, 4, 2
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # what is not here is a "?"
MODULES = (
    "argparse", "ast", "bisect", "calendar", "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal",
    "difflib", "enum", "fractions", "functools", "heapq", "inspect", "logging", "pathlib", "random", "shutil", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "traceback", "typing", "zipfile",
)  # fmt: skip
TESTED = 16  # batches of the part of the text that is not learned


@functools.cache
def text() -> str:
    """The source of some modules, one after the other."""
    found = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            found.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "".join(found)


@functools.cache
def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """What is learned, and the last tenth, which tests."""
    place = {c: i for i, c in enumerate(CHARACTERS)}
    codes = torch.tensor([place.get(c, place["?"]) for c in text()])
    cut = len(codes) * 9 // 10
    return codes[:cut], codes[cut:]


def windows(codes: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch: characters, and for each the one that follows."""
    starts = torch.randint(len(codes) - CONTEXT, (BATCH,), generator=generator)
    rows = starts[:, None] + torch.arange(CONTEXT + 1)
    return codes[rows[:, :-1]], codes[rows[:, 1:]]


# ---- the transformer ----------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        # written out, because torch's fused attention cannot be differentiated twice, which Sophia needs
        weights = (q @ k.mT / math.sqrt(WIDTH / HEADS)).masked_fill(mask, -math.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))
        for part in self.modules():
            if isinstance(part, nn.Embedding | nn.Linear):
                hidden = isinstance(part, nn.Linear) and part is not self.head
                nn.init.normal_(part.weight, std=1 / math.sqrt(part.weight.shape[1]) if hidden else 0.02)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) + self.position.weight
        for block in self.blocks:
            h = block(h, self.mask)
        return self.head(self.norm(h))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def build(model: nn.Module, optimizer: str, settings: Settings, engine: str) -> Any:
    given = dict(settings)
    if "otherwise" in given:
        given["otherwise"] = create("adamw", **given["otherwise"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which matrix goes where is known here
        return front.create(optimizer, model, engine=engine, **given)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of nested state, but for counts."""
    if isinstance(value, torch.Tensor):
        yield from [value] if value.ndim else []
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)


class CharGpt:
    name, metric, decides, goal, steps, seeds = "char-gpt", "test_loss", "train_loss", None, 300, 1
    title = "a small transformer on Python's own source"
    engines, devices, halves = KNOWN, ("cpu", "cuda"), False
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def describe(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in Transformer().parameters()),
            "shape": {"blocks": BLOCKS, "width": WIDTH, "heads": HEADS, "context": CONTEXT},
            "batch": BATCH,
            "device": self.device,
            "data": f"{len(text()):,} characters of the source of Python {platform.python_version()}, a tenth of it to test",
        }

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        def mean(codes: torch.Tensor) -> tuple[float, float]:
            generator, right, loss = torch.Generator().manual_seed(0), 0.0, 0.0
            for _ in range(TESTED):
                x, y = (part.to(self.device) for part in windows(codes, generator))
                logits = model(x)
                loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())) / TESTED
                right += float((logits.argmax(-1) == y).float().mean()) / TESTED
            return loss, right

        learned, held = halves()
        test_loss, accuracy = mean(held)
        return {"accuracy": accuracy, "test_loss": test_loss, "train_loss": mean(learned)[0]}

    def train(self, optimizer: str, settings: Settings, steps: int, seed: int, engine: str, tick: Tick) -> Run:
        self._walk(optimizer, settings, WARM, seed, engine, lambda loss: None)
        run, model = self._walk(optimizer, settings, steps, seed, engine, tick)
        return run if run.diverged_at is not None else finish_run(run, self.evaluate(model))

    def _walk(self, optimizer: str, settings: Settings, steps: int, seed: int, engine: str, tick: Tick) -> tuple[Run, nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Transformer().to(self.device)
        generator = torch.Generator().manual_seed(seed)
        opt = build(model, optimizer, settings, engine)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.5 * (1 + math.cos(math.pi * min(t / steps, 1))))
        run, stepping = Run(seed), Stopwatch()
        start = time.perf_counter()
        for step in range(steps):
            x, y = (part.to(self.device) for part in windows(halves()[0], generator))
            if spec_class(optimizer).observes:
                opt.update_hessian(functools.partial(loss_of, model, x, y), every=HESSIAN_EVERY)
            loss = loss_of(model, x, y)
            loss.backward()
            run.losses.append(float(loss.detach()))
            run.seconds.append(time.perf_counter() - start)
            if not math.isfinite(run.losses[-1]):
                run.diverged_at = step
                break
            with stepping:
                opt.step()
                if self.device == "cuda":
                    torch.cuda.synchronize()
            opt.zero_grad()
            schedule.step()
            tick(run.losses[-1])
        run.ms_per_step, run.engine = stepping.late_ms(), next(iter(opt.engine_report().values()))
        run.state_bytes = sum(t.nbytes for state in opt.state.values() for t in tensors(state))
        return run, model


GPT = CharGpt()
