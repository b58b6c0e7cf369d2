"""A GPT of 25 million parameters that learns the bytes of Python's standard library, on a GPU (`gpt`).

Its parts are those of today's speed runs: RMSNorm without gains, rotary positions, normalised queries and keys, ReLU², an untied
head, bfloat16 autocast, compiled blocks. Every parameter is a matrix. One model serves all runs of a process: its weights are
drawn again from the seed, so that nothing is compiled twice. Nothing waits for the device but every CHECK steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rlx_optim.race import Run, Settings, Tick
from rlx_optim.race.digits import HESSIAN_EVERY, finish_run
from rlx_optim.registry import spec_class
from rlx_optim.torch.engines import KNOWN

from .char_gpt import build, tensors
from .rates import RUN

CHECK = 50  # steps between looks at the loss
WARM = 36  # steps before the clock starts, once an optimizer: they compile, and record what comes in every tenth step too
WARM_UP, COOL_DOWN = 0.05, 0.5  # shares of a run in which the rate rises from 0, and falls back to it, each along a line
#: packages that distributions of Python leave out, and tables of numbers or words that are no source
LEFT_OUT = {
    "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo", "venv",
}  # fmt: skip
HELD = 20  # a part in HELD of the text tests, another decides between settings


# ---- the text -----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Corpus:
    learned: torch.Tensor  # bytes
    validation: torch.Tensor
    test: torch.Tensor
    files: int
    digest: str  # of all of it, in order

    def describe(self) -> str:
        sizes = (
            f"{len(self.learned):,} bytes to learn, {len(self.validation):,} to choose settings by, {len(self.test):,} to test"
        )
        return (
            f"{self.files} files of Python {platform.python_version()}'s standard library, {sizes} (SHA-256 {self.digest[:12]})"
        )


@functools.cache
def corpus() -> Corpus:
    """The modules of `sys.stdlib_module_names` but for LEFT_OUT. Files are ordered by the SHA-256 of their paths, each ends in a
    zero byte, and none is cut: the first ones that make up a part in HELD test, the next ones choose, the rest is learned. So the
    text is the same wherever Python's version is."""
    root, parts = Path(sysconfig.get_path("stdlib")), []
    for name in set(sys.stdlib_module_names) - LEFT_OUT:
        found = [root / f"{name}.py", *(root / name).rglob("*.py")]
        parts += [(path.relative_to(root).as_posix(), path.read_bytes() + b"\0") for path in found if path.is_file()]
    parts.sort(key=lambda part: hashlib.sha256(part[0].encode()).digest())
    cuts: list[int] = []
    total, size = sum(len(text) for _, text in parts), 0
    for place, (_, text) in enumerate(parts):
        if len(cuts) < 2 and size >= total * (len(cuts) + 1) // HELD:
            cuts.append(place)
        size += len(text)
    ends = [0, *cuts, len(parts)]
    texts = [b"".join(text for _, text in parts[a:b]) for a, b in itertools.pairwise(ends)]
    test, validation, learned = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return Corpus(learned, validation, test, len(parts), hashlib.sha256(b"".join(texts)).hexdigest())


# ---- the transformer ----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Shape:
    blocks: int = 8
    width: int = 512
    heads: int = 8
    context: int = 512
    rows: int = 64  # of a batch: 32,768 bytes
    limit: int | None = None  # bytes of each part of the text that are used


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        together = torch.cat((self.q.weight, self.k.weight, self.v.weight))  # three parameters, one product
        q, k, v = F.linear(norm(x), together).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(norm(q), cos, sin), rotated(norm(k), cos, sin)
        attended = F.scaled_dot_product_attention(q.type_as(v), k.type_as(v), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, shape.width), nn.Linear(shape.width, 256, bias=False)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        half = shape.width // shape.heads // 2
        angles = torch.arange(shape.context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    @torch.no_grad()
    def drawn(self, seed: int) -> None:
        """Weights from a seed, the same on every device: of variance 1/inputs; what ends a branch is smaller by the root of the
        number of branches, embedding and head are 0.02."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            std = 0.02 if name.startswith(("embedding", "head")) else p.shape[1] ** -0.5
            if name.endswith(("out.weight", "down.weight")):
                std /= math.sqrt(2 * len(self.blocks))
            p.copy_(std * torch.randn(p.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = norm(self.embedding(x))
        if torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))  # what blocks add to is as short as what they compute
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        logits: torch.Tensor = self.head(norm(h))
        return logits.float()


def share(step: int, steps: int, falls: bool = True) -> float:
    """Of the learning rate at a step: up, level, down to 0."""
    up = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
    return min(up, (steps - step) / max(1.0, COOL_DOWN * steps)) if falls else up


class Timeline:
    """When things happened, in seconds since the start, asked of the device at the end: marking does not wait."""

    def __init__(self, device: str):
        self.cuda, self.marks = device == "cuda", list[Any]()
        if self.cuda:
            torch.cuda.synchronize()
        self.mark()

    def mark(self) -> int:
        if self.cuda:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        return len(self.marks) - 1

    def seconds(self) -> list[float]:
        if self.cuda:
            torch.cuda.synchronize()
            return [self.marks[0].elapsed_time(mark) / 1e3 for mark in self.marks]
        return [mark - self.marks[0] for mark in self.marks]


class Gpt:
    name, metric, goal, steps, seeds = "gpt", "test_loss", None, 1000, 3
    title = "a GPT of 25 million parameters on Python's own source"
    decides, halves = "validation_loss", True
    engines, devices = KNOWN, ("cuda", "cpu")

    def __init__(self, shape: Shape, device: str = "cuda"):
        self.shape, self.device = shape, device
        self.weights, self.made = "float32", dict[str, Transformer]()
        self.warmed: set[str] = set()

    def describe(self) -> dict[str, Any]:
        shape, text = self.shape, corpus()
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "shape": {"blocks": shape.blocks, "width": shape.width, "heads": shape.heads, "context": shape.context},
            "batch": shape.rows * shape.context,
            "unit": "bytes",
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "data": text.describe(),
            "corpus": text.digest,
            "schedule": f"up in {WARM_UP:.0%} of the steps, down to 0 in the last {COOL_DOWN:.0%}; Schedule-Free stays up",
        }

    # ---- made once --------------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Transformer:
        """The one whose weights are in the format at hand."""
        if self.weights not in self.made:
            self.made[self.weights] = model = Transformer(self.shape).to(self.device)
            for p in model.parameters():  # and no angle of a rotation
                p.data = p.data.to(getattr(torch, self.weights))
            if self.device == "cuda":
                for block in model.blocks:  # each alike, so that one is compiled
                    block.compile(dynamic=False, fullgraph=True)
        return self.made[self.weights]

    @functools.cached_property
    def texts(self) -> dict[str, torch.Tensor]:
        text = corpus()
        parts = {"learned": text.learned, "validation": text.validation, "test": text.test}
        return {name: part[: self.shape.limit].to(self.device) for name, part in parts.items()}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()

    def windows(self, part: str, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.texts[part][starts[:, None] + torch.arange(self.shape.context + 1, device=starts.device)].long()
        return rows[:, :-1], rows[:, 1:]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            logits = self.model(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    # ---- a run ------------------------------------------------------------------------------------------------------------
    def evaluated(self, part: str) -> tuple[float, float]:
        """Loss and accuracy over a part of the text, window after window; what is left of the last batch is not looked at.
        Gradients stay on, as compiled: without them the blocks would be compiled again."""
        shape, found = self.shape, []
        starts = torch.arange(0, len(self.texts[part]) - shape.context, shape.context, device=self.device)
        for some in starts[: len(starts) // shape.rows * shape.rows].split(shape.rows):
            x, y = self.windows(part, some)
            with self.autocast():
                logits = self.model(x).detach()
            loss, right = F.cross_entropy(logits.flatten(0, 1), y.flatten()), (logits.argmax(-1) == y).float().mean()
            found.append(torch.stack((loss, right)))
        loss_, right_ = torch.stack(found).mean(0).tolist()
        return loss_, right_

    def train(self, optimizer: str, settings: Settings, steps: int, seed: int, engine: str, tick: Tick) -> Run:
        """`weights` among the settings is the format of the parameters; the rest is the optimizer's."""
        kind = f"{optimizer} {engine} {[(key, value) for key, value in settings.items() if isinstance(value, str)]}"
        settings = {key: steps if value == RUN else value for key, value in settings.items()}
        self.weights = settings.pop("weights", "float32")
        if kind not in self.warmed:
            self._walk(optimizer, settings, min(WARM, steps), seed, engine, lambda loss: None)
            self.warmed.add(kind)
        run, opt = self._walk(optimizer, settings, steps, seed, engine, tick)
        if run.diverged_at is None:
            with opt.averaged():
                validation, (test, accuracy) = self.evaluated("validation")[0], self.evaluated("test")
            late = run.losses[-max(1, steps // 20) :]
            learned = sum(late) / len(late)  # the batches of the last twentieth
            run = finish_run(run, {"accuracy": accuracy, "test_loss": test, "validation_loss": validation, "train_loss": learned})
        del opt
        gc.collect()  # state that nobody holds would count as memory of the next run
        return run

    def _walk(self, optimizer: str, settings: Settings, steps: int, seed: int, engine: str, tick: Tick) -> tuple[Run, Any]:
        kind, shape, model, cuda = spec_class(optimizer), self.shape, self.model, self.device == "cuda"
        model.drawn(seed)
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.texts["learned"]) - shape.context, (steps, shape.rows), generator=generator)
        starts = starts.to(self.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            own = [*model.parameters(), *model.buffers(), *self.texts.values(), starts]
            kept = torch.cuda.memory_allocated() - sum(t.nbytes for t in own)  # by earlier runs of this process
        opt = build(model, optimizer, settings, engine)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: share(t, steps, falls=kind.evaluated is None))
        losses, run = torch.zeros(steps, device=self.device), Run(seed)
        timeline, stepped, done = Timeline(self.device), [], 0
        for step, some in enumerate(starts):
            x, y = self.windows("learned", some)
            if kind.observes and step % HESSIAN_EVERY == 0:
                self._observed(opt, x, generator)
            loss = self.loss(x, y)
            loss.backward()
            losses[step] = loss.detach()
            stepped.append((timeline.mark(), (opt.step(), timeline.mark())[1]))
            opt.zero_grad()
            schedule.step()
            if (step + 1) % CHECK == 0 or step + 1 == steps:
                known, done = losses[done : step + 1].tolist(), step + 1
                run.losses += known
                for value in known:
                    tick(value)
                if not known[-1] <= run.losses[0] and step + 1 > 2 * CHECK:  # or no number
                    run.diverged_at = next((i for i, loss_ in enumerate(run.losses) if not math.isfinite(loss_)), step)
                    break
        at = timeline.seconds()
        run.seconds = [at[after] for _, after in stepped]
        late = [at[after] - at[before] for before, after in stepped[len(stepped) // 2 :]]
        run.ms_per_step, run.engine = 1e3 * sum(late) / len(late), next(iter(opt.engine_report().values()))
        run.peak_bytes = torch.cuda.max_memory_allocated() - kept if cuda else 0
        run.state_bytes = sum(t.nbytes for state in opt.state.values() for t in tensors(state))
        return run, opt

    def _observed(self, opt: Any, x: torch.Tensor, generator: torch.Generator) -> None:
        """Gauss–Newton–Bartlett: gradients at bytes drawn from the model's own predictions; one backward pass, as compiled."""
        with self.autocast():
            logits = self.model(x)
        with torch.no_grad():
            noise = torch.Generator(self.device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
            drawn = (logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=noise)).argmax(-1)
        F.cross_entropy(logits.flatten(0, 1), drawn.flatten()).backward()
        opt.update_hessian_from_gradients(drawn.numel())
        opt.zero_grad()


GPT = Gpt(Shape())
