"""CUDA graphs of our own, for what the host takes longer to launch than the device to compute.

`Replay`: Newton–Schulz on matrices that are small for the device, some twenty launches, where the step around it cannot be
recorded. The graph's input and output stay allocated, four bytes an entry, which is why large ones are not kept.

`Passes`: the passes of a rule, or the whole step of matrices. Where the arrays are and what the numbers are stands in tables on
the device, so a step sends what has changed of them and replays. The graphs of a lane that run one after the other share their
scratch; stacks of matrices, which leave much of a device idle, run beside each other, on a `Track` each.
"""

# mypy: ignore-errors

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...linalg import Coefficients
from ..torch_ import pause_gc
from . import products

SHARE = 256  # bytes of the device's memory for an entry of what is recorded: its scratch, some ten bytes each, stays
SMALL = 1 << 26  # entries of a stack that `Replay` is for: 128 MiB in and as much out
PAGES = 8  # sets of numbers that may be under way to the device at once
SHORT = 1 << 28  # entries up to which a single launch is recorded: above, numbers that are read from tables cost more than it
PATIENCE = 8  # how often passes are recorded anew before they are launched one by one for good
TRACKS = 4  # of stacks of matrices that run beside each other
SOON = 512  # a basis of more rows has a longer way to go than others: it goes first, by the logarithm
_thread = threading.local()


def recording() -> bool:
    """Whether this thread is recording passes."""
    return getattr(_thread, "recording", False)


def most(device: torch.device) -> int:
    """How many entries may be recorded at once."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE if device.type == "cuda" else 1 << 28


def spare(device: torch.device, entries: int) -> bool:
    """Whether the scratch of a refresh of so much state, some fifty bytes an entry, leaves half of what is free."""
    return 2 * 50 * entries <= torch.cuda.mem_get_info(device)[0]


def pays(X: torch.Tensor) -> bool:
    return X.device.type == "cuda" and X.numel() <= SMALL


class Replay:
    """The iteration for stacks of one shape. The first call runs it, the second records it."""

    def __init__(self, X: torch.Tensor, steps: int, coefficients: Coefficients):
        self.input = products.zero_padded(X.shape, X.device)
        self.how = (steps, coefficients)
        self.calls, self.graph, self.output = 0, None, None

    def __call__(self, U: torch.Tensor, norm: torch.Tensor, eps: float) -> Any:
        self.calls += 1
        products.half(U, norm, eps, self.input)
        inside = (slice(None), slice(U.shape[1]), slice(U.shape[2]))
        if self.calls == 1:
            return products.iterate(self.input, *self.how)[inside]
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.output = products.iterate(self.input, *self.how)
        self.graph.replay()
        return self.output[inside]


class Page:
    """Page-locked memory that words are sent from, again and again."""

    def __init__(self, size: int):
        self.memory = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        self.view, self.sent = self.memory.numpy(), torch.cuda.Event()

    def send(self, words: np.ndarray, room: torch.Tensor) -> None:
        """As many words as there are, to the beginning of the room."""
        n = len(words)
        self.sent.synchronize()  # that was PAGES steps ago: the host seldom is as far ahead
        self.view[:n] = words
        room[:n].copy_(self.memory[:n], non_blocking=True)
        self.sent.record(torch.cuda.current_stream(room.device))


def urgency(n: int) -> int:
    """The priority of the stream of a basis of n rows; what is less than 0 goes first, and -3 is as far as it goes."""
    return -min(3, max(0, round(math.log2(n / SOON))))


class Track:
    """A stream with scratch of its own. Who sends something down it lets what comes after wait for it (`joined`)."""

    def __init__(self, device: torch.device):
        self.device, self.stream, self.pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.busy = False

    def replay(self, graph: Any) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            graph.replay()
        self.busy = True

    def joined(self) -> None:
        if self.busy:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self.busy = False


@contextlib.contextmanager
def branches(device: torch.device, streams: list[Any]) -> Iterator[Callable[[], Any]]:
    """What is done in each block that this gives does not wait for the others: each goes to the next of these streams, or stays
    where it is when there are none. What comes after waits for all."""
    current = torch.cuda.current_stream(device) if streams else None
    start = current.record_event() if streams else None
    left = list(streams)

    @contextlib.contextmanager
    def branch() -> Iterator[None]:
        stream = left.pop(0) if left else None
        if stream is None:
            yield
            return
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            yield

    yield branch
    for stream in streams:
        current.wait_stream(stream)


class Passes:
    """The passes of one bundle. The first call runs them with numbers that are on the device, which compiles what is to be
    recorded, the second records. They are recorded anew where something moved that launches depend on. Numbers and addresses
    are words of one room, numbers first, so that what changed is one copy."""

    def __init__(self, device: torch.device, count: int, pointers: Any, track: Track | None = None):
        self.device, self.count, self.pointers, self.track = device, count, pointers, track
        self.form: Any = None
        self.graph: Any = None
        self.retired: Any = None
        self.recorded = 0
        self._start(())

    def _start(self, form: Any) -> None:
        """form: of each number whether there is one, and then whether there is one per tensor."""
        self.form, self.calls = form, 0
        self._retire()
        self.version: Any = None
        self.depends_on: Any = None  # what the recorded launches depend on, beside the words
        self.tables: list[Any] = []
        self._lay_out([])

    @torch.inference_mode(False)  # what is made here is written to in every mode
    def _lay_out(self, tables: list[Any]) -> None:
        """Room for the numbers and for the addresses of these tables."""
        sizes = [0 if column is None else self.count if column else 1 for _, column in self.form]
        self.tables, self.few = tables, sum(sizes)
        self.words = np.zeros(self.few + sum(table.size for table in tables), np.int64)
        self.room = torch.zeros(len(self.words), dtype=torch.int64, device=self.device)
        self.numbers = self.words[: self.few].view(np.float64)
        self.ring, self.turn = [Page(len(self.words)) for _ in range(PAGES)] if len(self.words) else [], 0
        parts = self.room[: self.few].view(torch.float64).split(sizes) if sizes else ()
        self.views = {
            n: None if column is None else part if column else part.reshape(())
            for (n, column), part in zip(self.form, parts, strict=True)
        }

    def __call__(
        self, version: Any, numbers: Mapping[int, Any], run: Callable[[Any], Any], tables: Callable[[], Any], other: Any = None
    ) -> dict[str, Any]:
        """version: moves with addresses. run: the passes with these numbers. tables: see `Triton._tables`. other: what launches
        depend on beside them."""
        form = tuple([(n, None if value is None else type(value) is np.ndarray) for n, value in numbers.items()])
        if form != self.form:
            self._start(form)
        self.calls += 1
        if self.recorded > PATIENCE:
            return run(numbers)
        given = [value for value in numbers.values() if value is not None]
        values = np.hstack(given) if any(column for _, column in form) else np.array(given, np.float64)
        if self.calls > 1 and (self.graph is None or version != self.version):
            self._place(tables(), values)
            depends_on = [*[table.aligned for table in self.tables], other]
            if (self.graph is None or depends_on != self.depends_on) and not self._record(run):
                return run(numbers)
            self.version, self.depends_on = version, depends_on
        elif self.calls == 1 or not np.array_equal(values, self.numbers):
            self.numbers[:] = values
            self._send(self.words[: self.few])
        if self.calls == 1:
            return run(self.views)
        if self.track is None:
            self.graph.replay()
        else:
            self.track.replay(self.graph)
        return self.given

    def _place(self, pairs: list[tuple[Any, Any]], numbers: np.ndarray) -> None:
        """Send numbers, and where the arrays of each table are."""
        fresh = self.graph is None or [table for table, _ in pairs] != self.tables
        if fresh:
            self._retire()
            self._lay_out([table for table, _ in pairs])
        self.numbers[:] = numbers
        start = self.few
        for table, arrays in pairs:
            current = slice(start, start := start + table.size)
            table.fill(arrays, self.words[current], self.room[current] if fresh else None)
        self._send(self.words)

    def _send(self, words: np.ndarray) -> None:
        self.turn = (self.turn + 1) % PAGES
        self.ring[self.turn].send(words, self.room)

    def _retire(self) -> None:
        """The graph is no longer good. It goes when there is another: memory whose last graph is gone takes no new one."""
        self.graph, self.retired = None, self.graph or self.retired

    def _pool(self) -> Any:
        """The memory of the graphs of one lane, or track."""
        if self.track is not None:
            return self.track.pool
        if self.pointers.pool is None:
            self.pointers.pool = torch.cuda.graph_pool_handle()
        return self.pointers.pool

    @pause_gc()
    def _record(self, run: Callable[[Any], Any]) -> bool:
        """Other threads may go on: only what this one does is recorded. Where it fails, nothing has been computed, and it is not
        tried again."""
        self._retire()
        self.recorded += 1
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device) if self.track is None else self.track.stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        _thread.recording = True
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool(), capture_error_mode="thread_local")
                try:
                    self.given = run(self.views)
                finally:
                    graph.capture_end()
        except RuntimeError:
            self.recorded = PATIENCE + 1
            released(stream)
            return False
        finally:
            _thread.recording = False
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.graph, self.retired = graph, None
        return True


def released(stream: Any) -> None:
    """Have torch's generator out of a recording that failed: it leaves with the next that does not."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # of an empty graph
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()
