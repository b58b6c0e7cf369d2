"""What ranks agree on before a step touches anything: which parameters have a gradient, and whether the step is taken at all.

One small all-reduce a step and process group (one byte a parameter), wherever later collectives or the verdict depend on it. A
parameter whose gradient is missing everywhere is left alone everywhere; one that has a gradient on some rank is stepped on all,
with zeros where it is missing. What one rank refuses, all refuse; so they do where ranks would send each other different things.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...partition import DIGEST
from ...spec import Spec
from ..aliasing import Work
from ..memory import is_dtensor, local_part
from .comm import CommChain, RemoteError
from .local import Batch, Placement

REFUSED, STOPPED, NOT_FINITE, UNMEASURED, VERDICTS = range(5)
ABSENT, PRESENT, READ = range(3)  # of a parameter: whether it has a gradient, and whether its rule reads p too


class Consensus:
    """Who must agree. `layout` is what must be the same on all ranks: by its place in the groups, the placement of each parameter
    that ranks step together, and which settings it has."""

    def __init__(
        self, owner: str, together: CommChain, device: torch.device, layout: Mapping[int, tuple[Any, ...]], replicas: bool
    ):
        """replicas: ranks share out plain parameters, too."""
        self.owner, self.together, self.device, self.layout, self.replicas = owner, together, device, dict(layout), replicas
        self.groups = sorted({group for *_, group in layout.values()})
        self.placements: list[Any] = []
        self.places: dict[torch.Tensor, tuple[Any, int]] = {}
        self.known: tuple[Any, bytes] = None, b""  # the settings last met, and their digest

    def cover(self, placements: Iterable[Placement]) -> None:
        """Take the placements of what ranks step together, once they are made."""
        self.placements = list(placements)
        self.places = {entry.param: (placement, i) for placement in self.placements for i, entry in enumerate(placement.entries)}

    def agree(
        self,
        groups: Sequence[Mapping[str, Any]],
        specs: Sequence[Spec],
        prepare: Callable[[], tuple[Work, bool, torch.Tensor | None]],
        stopped: bool,
    ) -> tuple[Work, bool, bool, torch.Tensor | None]:
        """What is to be done, by the word of all ranks: (work, stopped, not finite, the norm before a clip, if all know it).
        `prepare` gives what this rank says of it."""
        problem: Exception | None = None
        work: Work = []
        bad, norm = False, None
        params = list(dict.fromkeys(p for group in groups for p in group["params"] if self.replicas or is_dtensor(p)))
        digest, present = bytes(2 * DIGEST), dict[torch.Tensor, int]()  # zeros agree with whatever the others have
        try:
            work, bad, norm = prepare()
            digest, present = self._digest(specs), self._find_present(work, specs)
        except Exception as raised:
            problem = raised
        flags = [int(problem is not None), int(stopped), int(bad), int(norm is None), *digest]
        flags += [present.get(param, ABSENT) for param in params]
        flags = self.together.highest(flags, device=self.device)
        if problem is not None:
            raise problem
        if flags[REFUSED]:
            raise RemoteError("a gradient or a setting was refused on another rank, which says why; nothing was stepped")
        lo, hi = flags[VERDICTS : VERDICTS + DIGEST], flags[VERDICTS + DIGEST : VERDICTS + 2 * DIGEST]
        if any(low + high != 255 for low, high in zip(lo, hi, strict=True)):
            raise RuntimeError(
                f"{self.owner}: ranks step parameters together that are listed, frozen or set otherwise on another rank; "
                "requires_grad, the groups and their settings must be the same on all ranks; nothing was stepped"
            )
        norm = None if flags[UNMEASURED] else norm
        found = dict(zip(params, flags[VERDICTS + 2 * DIGEST :], strict=True))
        return self._completed(work, found), bool(flags[STOPPED]), bool(flags[NOT_FINITE]), norm

    def _digest(self, specs: Sequence[Spec]) -> bytes:
        """What depends on the layout and on settings in what ranks send, as bytes; then their complement, so that the largest of
        each on any rank tell whether all are the same."""
        settings = []  # but for numbers that schedules move: by the others the work of a matrix is reckoned, and its stage
        for spec in map(specs.__getitem__, self.groups):
            values = [value for value in spec.values().values() if type(value) in (bool, int, str)]
            settings.append((type(spec).__name__, stable(spec.fusion_key()), values))
        if self.known[0] != settings:
            found = hashlib.blake2b(repr((settings, sorted(self.layout.items()))).encode(), digest_size=DIGEST).digest()
            self.known = settings, found + bytes(255 - each for each in found)
        return self.known[1]

    def _find_present(self, work: Work, specs: Sequence[Spec]) -> dict[torch.Tensor, int]:
        """What is said of each parameter that has a gradient on this rank."""
        found = {}
        for batch in work:
            if batch.placement in self.placements:
                readers = batch.placement.find_readers(specs)
                for i in batch.chosen:
                    found[batch.placement.entries[i].param] = READ if i in readers else PRESENT
        return found

    def _completed(self, work: Work, found: Mapping[torch.Tensor, int]) -> Work:
        """The work with zeros for gradients that only others have."""
        grads = {b.placement.entries[i].param: grad for b in work for i, grad in zip(b.chosen, b.grads, strict=True)}
        chosen: dict[Placement, list[int]] = {placement: [] for placement in self.placements}
        for placement in self.placements:
            placement.reading = set()
        for param, flag in found.items():
            if flag != ABSENT:
                placement, i = self.places[param]
                chosen[placement].append(i)
                if flag == READ:
                    placement.reading.add(i)
        out: Work = [batch for batch in work if batch.placement not in chosen]
        for placement, places in chosen.items():
            places.sort()
            params = [placement.entries[i].param for i in places]
            if params:
                given = [grads[param] if param in grads else torch.zeros_like(local_part(param)) for param in params]
                out.append(Batch(placement, places, given))
        return out


def stable(value: Any) -> Any:
    """A value as it is written on every rank."""
    return tuple(map(stable, value)) if isinstance(value, tuple) else "a function" if callable(value) else value


def local_grad(owner: str, name: str, param: Any, grad: Any) -> torch.Tensor:
    """The part of a DTensor's gradient that is here, placed like the parameter."""
    if not hasattr(grad, "placements"):
        raise RuntimeError(f"{owner}: {name} is a DTensor and its gradient a plain tensor; make it a DTensor of the same mesh")
    if grad.device_mesh != param.device_mesh:
        raise RuntimeError(f"{owner}: {name} lies on {param.device_mesh}, its gradient on {grad.device_mesh}")
    if tuple(grad.placements) != tuple(param.placements):  # a replicated parameter's gradient may be a partial sum
        grad = grad.redistribute(placements=param.placements)
    local = local_part(grad)
    return local.wait() if hasattr(local, "wait") else local
