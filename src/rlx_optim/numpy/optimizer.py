"""The named-step API: one object steps a whole model, its state kept by parameter name.

    opt = AdamW(lr=3e-4, weight_decay=0.1)
    opt.step("layers.0.q_proj", w, g)      # in place
    opt.end_iteration()
    opt.step_all(params, grads)            # mappings by name: every tensor in one pass, then end_iteration

Everything is checked before anything is written: all arrays of a call at once, and one by one where an answer is unexpected, so
that a refusal names the parameter. `family` has what an optimizer and those that it hands tensors to do together.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from ..engine import Engine
from ..guard import check_sigmas
from ..program import reduces_over_all
from ..routing import quote, report
from ..stats import Stats, summarize_stats
from ..stepping import TensorState
from ..storage import flatten_components
from . import validation
from .family import Member, Work

NONFINITE = ("propagate", "raise", "skip")


@runtime_checkable
class Optimizer(Protocol):
    """All a trainer needs. Ours follow it, and so may a backend with its own kernels and device-resident state."""

    def step(self, name: str, param: Any, grad: Any) -> None:
        """Update one parameter in place from its gradient."""

    def end_iteration(self) -> None:
        """Close the iteration: every parameter may be stepped again."""


class NamedOptimizer(Member):
    """Base of all optimizers. Subclasses say which spec they run; `rlx_optim.create` makes them by name."""

    # ---- hyperparameters as attributes ---------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("_settings")
        if settings is not None and name in settings.given:
            return settings.given[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self.spec.fields:
            self._settings.assign(name, value, bool(self._records), self._iteration)
            self._numbers.clear()
        elif name == "nonfinite" and value not in NONFINITE:
            raise ValueError(f"{self._owner}: nonfinite must be one of {', '.join(map(repr, NONFINITE))}, got {value!r}")
        elif name == "otherwise":
            raise AttributeError(f"{self._owner}: otherwise is given when the optimizer is made; make a new one")
        elif name not in ("nonfinite", "skip_above"):
            known = ", ".join([*self.spec.fields, "nonfinite", "skip_above"])
            raise AttributeError(f"{self._owner} has no hyperparameter {name!r}; known are {known}")
        else:
            object.__setattr__(self, name, check_sigmas(self._owner, value) if name == "skip_above" else value)

    def __repr__(self) -> str:
        given = {**self._settings.given, **({"otherwise": self.otherwise} if self.otherwise is not None else {})}
        return f"{self._owner}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def hyperparameters(self, name: str | None = None) -> dict[str, Any]:
        """The values in force now, schedules evaluated: for one parameter, or for those in no group."""
        if name is not None and (found := self._find_record(name)):
            member, record = found
            return member._specs()[record.group].values()
        group = None if name is None else self._settings.group_for(name)
        return self._specs()[-1 if group is None else self._settings.groups.index(group)].values()

    # ---- what can be asked -----------------------------------------------------------------------------------------
    @property
    def iteration(self) -> int:
        """How many iterations have ended."""
        return self._iteration

    @property
    def skipped(self) -> int:
        """How many steps nonfinite="skip" and skip_above have left out."""
        return self._skipped

    @property
    def engine(self) -> Engine:
        """The engine the steps run on."""
        return self._engine

    def _find(self, name: str) -> tuple[Member, TensorState]:
        if found := self._find_record(name):
            return found
        known = quote(n for member in self._family() for n in member._records) or "none yet"
        raise KeyError(f"{self._owner}: no state for {name!r}; stepped so far: {known}")

    def state(self, name: str) -> dict[str, np.ndarray]:
        """Read-only views of a parameter's state by slot name; counters as 0-D arrays. A slot in 8 bits is its codes and, under
        its name and "_scale", their scales; bfloat16 is in a uint16."""
        _, record = self._find(name)
        views = {name: array.view() for name, array in flatten_components(record.state).items()}
        views |= {counter: np.array(value) for counter, value in record.counters.items()}
        for view in views.values():
            view.flags.writeable = False
        return views

    def averaged(self, name: str, param: np.ndarray | None = None) -> np.ndarray:
        """The point to evaluate a parameter at, as a new array: of Schedule-Free the average x, of a rule without such a point
        the parameter as it is. param: the parameter, where it is not the array that was stepped last."""
        member, record = self._find(name)
        if self._seen is None:
            raise TypeError(f"{self._owner}: it has no other point to evaluate at than the parameters; Schedule-Free rules do")
        if param is None:
            param = self._seen.get(name, lambda: None)()
            if param is None:
                raise ValueError(f"{self._owner}: the array last stepped as {name!r} is gone; give it: averaged({name!r}, param)")
        if param.size != record.size:
            raise ValueError(f"{self._owner}: {name!r} came with shape {param.shape}, but its state is for {record.shape}")
        if member.spec.evaluated is None:
            return param.copy()
        return np.asarray(param + record.state[member.spec.evaluated].reshape(param.shape), param.dtype)

    def step_count(self, name: str) -> int:
        """t: how many steps this parameter has taken."""
        return self._find(name)[1].t

    def state_bytes(self) -> int:
        """Bytes of all state buffers, those of `otherwise` included."""
        return sum(a.nbytes for member in self._family() for r in member._records.values() for a in r.state.values())

    def engine_report(self) -> dict[str, str]:
        """What runs each optimizer in use: {"Muon": "cpu: …", "AdamW": "cpu: …"}."""
        return {m._owner: m._engine.describe(m._settings.specs(m._iteration)[-1]) for m in self._family()}

    def routing_report(self) -> str:
        """A table: parameter, shape, rule, why."""
        rows = []
        for member in self._family():
            rows += [(name, record.shape, member.spec, member._why[name]) for name, record in member._records.items()]
        return report(rows)

    def stats(self, next: bool = False) -> Stats:
        """What the last iteration that was asked about did, in all and by parameter: `opt.stats(next=True)` asks about the next,
        which takes it in the same passes; the others measure nothing."""
        found = summarize_stats(self._rows)
        if next:
            self._asked, self._rows = True, []
        elif not self._rows:
            raise RuntimeError(f"{self._owner}: no step was asked about; call stats(next=True) before it")
        return found

    # ---- stepping -----------------------------------------------------------------------------------------------
    def step(self, name: str, param: np.ndarray, grad: np.ndarray, shape: Any = None, grad_scale: float = 1.0) -> None:
        """Update one parameter in place. A second step of the same name needs `end_iteration` first.

        A rule that sums over all tensors of an optimizer (Prodigy) cannot move one before it has seen the others: its parameters
        are kept with a copy of their gradients, and updated by `end_iteration`.
        """
        if self.nonfinite == "propagate" and self.skip_above is None and self._step_known(name, param, grad, shape, grad_scale):
            return
        if self.skip_above is not None:
            raise RuntimeError(f"{self._owner}: skip_above is about the gradients of all tensors; give them to step_all together")
        scale = validation.check_scale(self._owner, grad_scale)
        item = self._checked(name, param, grad, shape)
        spec = item.member._specs()[item.record.group]
        if not reduces_over_all(spec, item.record.shape):
            return self._run(self._collect([item]), scale)
        validation.check_overlap(self._owner, [name], [param], [grad])
        self._settle([name], [param])  # in the right type it is asked whether the gradient is finite
        if self._passes([name], [grad]):
            self._waiting[name] = item._replace(grad=np.asarray(grad * np.asarray(scale, grad.dtype)))

    def _step_known(self, name: Any, param: Any, grad: Any, shape: Any, scale: Any) -> bool:
        """Step a tensor that has been stepped before, if this call certainly passes every check; False, and nothing done, where
        it must be looked at closer."""
        member, record = (isinstance(name, str) and self._find_record(name)) or (self, None)
        if record is None or record.alone is None or record.stepped == member._iteration or type(scale) is not float:
            return False
        if member._specs() and record.version != member._settings.version:  # a schedule's bad value is refused here
            return False
        usual = record.shape == record.alone.shape
        if shape != record.shape and not (shape is None and usual):
            return False
        where = validation.locate_sound_pair(param, grad, record.alone.shape, self._engine_choice[2])
        if where is None or not -1e300 < scale < 1e300:
            return False
        member._step_alone(record, param, grad, *where, scale)
        if self._seen is not None:
            self._seen[name] = weakref.ref(param)
        return True

    def step_all(
        self,
        params: Mapping[str, np.ndarray],
        grads: Mapping[str, np.ndarray],
        grad_scale: float = 1.0,
        *,
        loss: float | None = None,
    ) -> None:
        """Update every parameter in one pass and end the iteration. Any refusal leaves every tensor untouched.

        loss: what skip_above looks at beside the norm of the gradients."""
        scale = validation.check_scale(self._owner, grad_scale)
        given = None if loss is None else np.float64(validation.check_number(self._owner, "loss", loss))
        if type(params) is dict and type(grads) is dict and len(params) == 1 and params.keys() == grads.keys():
            ((name, param),) = params.items()
            watched = self.nonfinite != "propagate" or self.skip_above is not None or self._waiting
            if not watched and self._step_known(name, param, grads[name], None, scale):
                return self.end_iteration()
        work = None if self._waiting else self._collect_known(params, grads)
        if work is None:
            validation.check_names(self._owner, params, grads)
            items = [self._checked(name, params[name], grads[name], None) for name in params]
            self._refuse_waiting("step_all")
            work = self._collect(items)
        self._run(work, scale, given)
        self.end_iteration()

    def _collect_known(self, params: Any, grads: Any) -> Work | None:
        """Collect tensors that have been stepped before, if this call certainly passes every check; else None."""
        if not isinstance(params, Mapping) or not isinstance(grads, Mapping) or not params or params.keys() != grads.keys():
            return None
        if self._children():
            every = {name: (member, record) for member in self._family() for name, record in member._records.items()}
            entries = list(map(every.get, params))
        else:
            entries = [(self, record) if record else None for record in map(self._records.get, params)]
        for member in self._family():
            member._specs()  # a schedule's bad value is refused here
        known = [entry for entry in entries if entry is not None]
        if len(known) < len(entries) or any(
            record.stepped == member._iteration or record.version != member._settings.version for member, record in known
        ):
            return None
        ps, gs = list(params.values()), [grads[name] for name in params]
        places = validation.locate_sound(ps, gs, [record.shape for _, record in known], self._engine_choice[2])
        return None if places is None else Work(known, ps, gs, places)

    def end_iteration(self) -> None:
        """Close the iteration: schedules move on, and every parameter may be stepped again."""
        if self._waiting:
            items, self._waiting = list(self._waiting.values()), {}
            self._run(self._collect(items), 1.0)
        self.__dict__.update(_iteration=self._iteration + 1, _asked=False)
        if self._iteration == 1 and (unmatched := self._settings.unmatched()):
            owned = " (tensors that go to `otherwise` take its own groups)" if self.otherwise is not None else ""
            self._tell("groups", f"group pattern {quote(unmatched)} matched no parameter in the first iteration{owned}")
        self._numbers.clear()
        for child in self._children():
            child.end_iteration()

    def _refuse_waiting(self, what: str) -> None:
        if self._waiting:
            waiting = quote(self._waiting)
            raise ValueError(
                f"{self._owner}: {waiting} of this iteration waits for the others; call end_iteration() before {what}"
            )

    # ---- checkpoints ------------------------------------------------------------------------------------------------
    def save(
        self, path: str | os.PathLike[str], every: int = 1, keep: int | None = None, *, allow_nan: bool = False
    ) -> Path | None:
        """Write everything to a file that `rlx_optim.load` and every front end reads; a crash leaves the old file or the new one.

        every: only when the iteration is a multiple of it (None is returned otherwise). keep: remove all but the so many written
        last; for that, path is a folder or has {iteration} in its last part. NaN in the state is refused unless allow_nan.
        """
        from ..checkpoint import files, optimizers  # they import this module

        self._refuse_waiting("save")
        return files.save(lambda: optimizers.snapshot_of(self), self._iteration, path, every, keep, allow_nan)

    def convert_to(self, name: str, **settings: Any) -> NamedOptimizer:
        """Another optimizer that goes on from here: it takes over the iteration and, for each parameter, what of the state means
        the same to it. Its `conversion_report()` says what was carried over and what was dropped."""
        from ..checkpoint import switch

        return switch.convert(self, name, settings)

    def conversion_report(self) -> str:
        """What `convert_to` carried over into this optimizer, and what it dropped, as a table; empty if it was not converted."""
        return self._converted

    # ---- copies -----------------------------------------------------------------------------------------------------
    _passing: ClassVar[tuple[str, ...]] = ("_grouping", "_numbers", "_seen", "_asked", "_rows")  # made anew

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_waiting("a copy")
        return {k: v for k, v in self.__dict__.items() if k not in ("_engine", "_belongs", *self._passing)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _belongs=False, _grouping=None, _numbers={}, _asked=False, _rows=[])
        for child in self._children():
            child._belongs = True  # a copy of it alone is free
        self._seen = {} if any(member.spec.evaluated for member in self._family()) else None
