"""CPU parameters as if they were on a device, with copies that are made as late as they may be.

What is to be done on a stream is done when somebody waits for it, no earlier: who does not wait finds what was there before. Rooms
begin full of nonsense.
"""

import torch

from rlx_optim.torch.placements import host as offload


class Stream:
    def __init__(self):
        self.todo, self.done = [], 0

    def until(self, n):
        while self.done < n:
            self.done += 1
            self.todo[self.done - 1]()

    def synchronize(self):
        self.until(len(self.todo))

    def wait_event(self, event):
        self.todo.append(event.synchronize)

    def wait_stream(self, other):
        n = len(other.todo)
        self.todo.append(lambda: other.until(n))


class Now(Stream):
    """The stream that is computed on: whatever it waits for is done."""

    def wait_event(self, event):
        event.synchronize()

    def wait_stream(self, other):
        other.synchronize()


class Event:
    def __init__(self, stream):
        self.stream, self.n = stream, len(stream.todo)

    def synchronize(self):
        self.stream.until(self.n)


class Late(offload.CopyStreams):
    now = Now()

    def stream(self):
        return Stream()

    def current(self):
        return self.now

    def memory(self, size):
        return torch.full((size,), 77, dtype=torch.uint8)

    def pin(self, tensor):
        return tensor

    def copy(self, stream, pairs):
        stream.todo.append(lambda: [to.copy_(of) for to, of in pairs])
        return Event(stream)

    def idle(self):
        """Whether nothing is under way."""
        return all(stream.done == len(stream.todo) for stream in self.streams)
