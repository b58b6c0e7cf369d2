"""One step, from gradients to parameters: collect, decide, run, count."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from ..spec import Spec
from ..stepping import StepPart, TensorState, list_stats
from .aliasing import Work, split_rounds
from .collect import collect
from .eval_mode import is_evaluating
from .placements.host import finish_copies
from .policy import decide

if TYPE_CHECKING:
    from .optimizer import RuleOptimizer

log = logging.getLogger("rlx_optim")
CAST = ("cuda", "cpu", "xpu", "mps")  # devices that autocast knows


def take_step(opt: RuleOptimizer, only: torch.Tensor | None, loss: Any = None, problem: Exception | None = None) -> None:
    """Step all parameters that have a gradient, or one. problem: why this rank cannot, which the others wait to hear."""
    if cast := list(filter(torch.is_autocast_enabled, CAST)):  # for forward passes: products here would lose bits
        with contextlib.ExitStack() as off:
            for kind in cast:
                off.enter_context(torch.autocast(kind, enabled=False))
            return take_step(opt, only, loss, problem)
    if is_evaluating(opt):
        problem = RuntimeError(
            f"{opt._owner}: it is in evaluation mode, where parameters are their averages; call train() before step()"
        )
        if opt._homes is None:
            raise problem  # else the other ranks wait to hear of it
    specs, work, problem = collect_all(opt, only, problem)
    factor = decide(opt, work, loss, problem)
    if factor is not None:
        run(opt, work, specs, factor, opt._stats_requested and only is None)


def collect_all(
    opt: RuleOptimizer, only: torch.Tensor | None, problem: Exception | None
) -> tuple[list[Spec], Work, Exception | None]:
    """The specs as they are now, and what is to be stepped. Where ranks step together, what this rank refuses is told to all
    before it is raised."""
    work: Work = []
    specs, refusal = update_specs(opt)
    problem = problem or refusal
    try:
        work += collect(opt, only)  # after a refusal too: ranks lay out together, and the consensus is made with the placements
    except Exception as refused:
        if opt._consensus is None:
            raise problem or refused  # noqa: B904
        problem = problem or refused
    if only is not None and opt._gathering:
        raise RuntimeError(f"{opt._owner}: its rule reduces over all parameters; step them together, not one by one")
    if only is not None and opt.skip_above is not None:
        raise RuntimeError(f"{opt._owner}: skip_above is about the gradients of all parameters at once, and not for attach")
    return specs, work, problem


def update_specs(opt: RuleOptimizer) -> tuple[list[Spec], Exception | None]:
    """The specs as they are now. Where ranks step together, a bad one is told to all before it is raised."""
    try:
        return opt._specs.update(opt), None
    except Exception as problem:
        if opt._homes is None:
            raise
        return [spec for spec in opt._specs.made if spec is not None], problem


def run(opt: RuleOptimizer, work: Work, specs: list[Spec], factor: Any, asked: bool) -> None:
    """Step what was collected, placement by placement. factor: of gradients. asked: whether the step says what it does."""
    placements, done = [batch.placement for batch in work], list[StepPart]()
    for placement in placements:
        placement.with_stats = asked
    try:
        with finish_copies(placements) if any(placement.hosted for placement in placements) else contextlib.nullcontext():
            for round_ in split_rounds(opt._owner, work, opt.param_groups, opt._repeated):
                for batch in round_:
                    placement = batch.placement
                    placement.step(batch, specs, opt._specs.fusion_keys, placement.sign * factor)
                    placement.count(batch.chosen)
                    if log.isEnabledFor(logging.DEBUG):
                        log.debug("%s: %s", opt._owner, placement.describe(len(batch.chosen)))
                    done += placement.parts if asked else ()
    except BaseException:
        for placement in opt._placements or ():  # what was stepped until now counts, and the next step begins from there
            placement.restore_counts()
        opt._layout = []
        raise
    if asked:
        opt._stats_requested, opt._rows = False, list_stats(done, name_records(opt))


def name_records(opt: RuleOptimizer) -> dict[TensorState, str]:
    """What each record is called in `stats`: as its parameter, or by its place, "group.place"."""
    names: dict[TensorState, str] = {}
    for i, group in enumerate(opt.param_groups):
        given = group.get("param_names") or [f"{i}.{k}" for k in range(len(group["params"]))]
        for name, (placement, place) in (
            (n, opt._places[p]) for n, p in zip(given, group["params"], strict=True) if p in opt._places
        ):
            names |= dict.fromkeys(placement.entries[place].records, name)
    return names
