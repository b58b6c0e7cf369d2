"""A race in pieces: a list of runs in the order of their worth, of which each session does as many as its time allows.

    rlx-optim lm-race --model gpt --plan race --minutes 9 --out evidence

Every finished run is a line of `runs.jsonl`, written at once; what is there is not run again. What comes next follows from what
is there (`Search`), so a plan that is broken off goes on where it was, and files of several sessions add up (`--known`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlx_optim.race import Settings
from rlx_optim.race.running import Entry, Trial
from rlx_optim.registry import spec_class

from .leads import lead, reached, reaches
from .rates import settings_of
from .records import TUNING_SEED, Job, Pool, Record, as_run, plain

TUNING, HALF = 0.25, 0.5  # of the steps of a full run: searches a rate; a decay, which tells late
COARSE, FINE = (1.0, 3.0, 1 / 3), 3**0.5  # times the rate a search begins at; times the best of those
FARTHEST = 28.0  # from where it began, if the best rate is ever at an edge
DECAYS, DECAY = 5.0, 0.1  # times the decay a search begins with; in place of none
MOST = 4  # decays of a search
SHORTER, LONGER = (0.6, 0.5, 0.4), 0.75  # of a full run, each with its own schedule: in which is AdamW's loss reached?
COST = 0.06  # of a full run: enough for a few refreshes
STEPPED = 0.12  # of a full run: in the second half graphs are captured, and there are six refreshes of SOAP's
FREQUENCIES = (1, 2, 4, 10)  # steps between two bases of SOAP's
OFTEN = FREQUENCIES[:-1]  # those that are not its default
#: whose training steps are compared, and with what settings beside those that a search begins at
STEPS: dict[str, Sequence[Settings]] = {
    "adamw": ({},),
    "muon": ({},),
    "soap": tuple({"precondition_frequency": n} for n in reversed(FREQUENCIES)),
    "kronpsgd": ({"preconditioner_update_probability": 0.1}, {"preconditioner_update_probability": 0.03}),
}
LEAST = 3  # seeds of everyone; below that a spread is not known well
SEEDS = {"adamw": 5}  # those who get more
STORAGE = ("adamw", "lion", "muon", "soap", "lamb", "mars", "sophia")
FORMATS: dict[str, Settings] = {form: {"state_dtype": form} for form in ("float32", "bfloat16", "int8")}
#: of parameters in bfloat16, by how they are rounded
HALVES: dict[str, Settings] = {
    f"weights bfloat16, {how}": {"weights": "bfloat16", "rounding": how} for how in ("nearest", "stochastic", "exact")
}
BEST = 3  # rates of a search that go on to full length at least


# ---- rounds: what an optimizer's next runs are, given those there are ----------------------------------------------------
class Search:
    """One optimizer's way through a pool. A round gives jobs; the first that is not done is the next to run."""

    def __init__(self, pool: Pool, optimizer: str, steps: int):
        self.pool, self.optimizer, self.steps = pool, optimizer, steps
        self.start = settings_of(pool.model.name, optimizer)
        self.tuning, self.half = max(1, round(TUNING * steps)), max(1, round(HALF * steps))

    def at(self, lr: float, **more: Any) -> dict[str, Any]:
        return {**self.start, "lr": float(f"{lr:.3g}"), **more}

    def score(self, record: Record) -> float:
        """What decides; endless for a run that diverged."""
        found: float = record.get(self.pool.model.decides, float("inf"))
        return found

    def tried(self, steps: int, seed: int) -> list[Record]:
        """Runs of a length that did not diverge, the best first."""
        good = [record for record in self.pool.of(self.optimizer, steps, seed) if self.pool.model.decides in record]
        return sorted(good, key=self.score)

    def done(self, jobs: Iterable[Job]) -> list[Record]:
        return [record for job in jobs if (record := self.pool.has(job))]

    def tune(self, settings: Settings, steps: int | None = None) -> Job:
        return Job(self.optimizer, plain(settings), steps or self.tuning, TUNING_SEED)

    def coarse(self) -> Iterator[Job]:
        """Three rates, and further ones while the best is at an edge."""
        yield from self.widened([self.start["lr"] * factor for factor in COARSE], 3.0, lambda rate: self.tune(self.at(rate)))

    def widened(self, rates: Iterable[float], factor: float, job: Callable[[float], Job | None]) -> Iterator[Job]:
        """Jobs at these rates, and at ever further ones while the best is at an edge, unless there is no job there."""
        tried = [each for each in map(job, rates) if each is not None]
        yield from tried
        while len(known := self.done(tried)) == len(tried) > 0:
            losses = {record["settings"]["lr"]: self.score(record) for record in known}
            best = min(losses, key=lambda lr: (losses[lr], lr))  # the least where all diverged
            beyond = {max(losses): factor * best, min(losses): best / factor}.get(best)
            if beyond is None or max(beyond / self.start["lr"], self.start["lr"] / beyond) > FARTHEST:
                return
            if (further := job(beyond)) is None:
                return
            tried.append(further)
            yield further

    def fine(self) -> Iterator[Job]:
        """On both sides of the best rate."""
        if known := self.done(self.coarse()):
            best = min(known, key=self.score)["settings"]["lr"]
            yield from (self.tune(self.at(best * factor)) for factor in (FINE, 1 / FINE))

    def decay(self) -> Iterator[Job]:
        """Two decays at the best rate, and further ones while the largest is the best."""
        given = self.start.get("weight_decay", 0.0)
        if not (rates := self.rates()) or "weight_decay" not in spec_class(self.optimizer).fields:
            return
        tried = [self.tune(self.at(rates[0]), self.half)]
        while len(tried) < MOST:
            given = float(f"{DECAYS * given:.3g}") or DECAY
            tried.append(self.tune(self.at(rates[0], weight_decay=given), self.half))
            yield from tried
            known = self.done(tried)
            if len(known) < len(tried) or min(known, key=self.score) is not known[-1]:
                return

    def rates(self) -> list[float]:
        """Those that were tried, the best first."""
        known = self.tried(self.tuning, TUNING_SEED)
        return list(dict.fromkeys(r["settings"]["lr"] for r in known if r["settings"] == plain(self.at(r["settings"]["lr"]))))

    def whole(self, rate: float) -> Job:
        """A run of full length, with the best decay."""
        known = self.done(self.decay())
        best = min(known, key=self.score)["settings"] if known else self.start
        return Job(self.optimizer, plain({**best, "lr": rate}), self.steps, 0)

    def full(self) -> Iterator[Job]:
        """The best rate at full length."""
        yield from map(self.whole, self.rates()[:1])

    def others(self) -> Iterator[Job]:
        """The next best rates at full length too, and further ones while the best of these is at an edge."""
        yield from self.widened(self.rates()[:BEST], FINE, self.sound)

    def sound(self, rate: float) -> Job | None:
        """A run of full length at a rate, as it was tried if it was; None where it diverged in a short run."""
        short = self.pool.of(self.optimizer, self.tuning, TUNING_SEED)
        near = next((r for r in short if math.isclose(r["settings"]["lr"], rate, rel_tol=0.02)), None)
        if near is None:
            return self.whole(float(f"{rate:.3g}"))
        return self.whole(near["settings"]["lr"]) if math.isfinite(self.score(near)) else None

    def winner(self) -> Settings | None:
        """The settings that did best at full length."""
        best = self.tried(self.steps, 0)
        return best[0]["settings"] if best else None

    def seeds(self) -> Iterator[Job]:
        if (settings := self.winner()) is not None:
            yield from (Job(self.optimizer, settings, self.steps, seed) for seed in range(SEEDS.get(self.optimizer, LEAST)))

    def losses(self, settings: Settings | None, steps: int) -> dict[int, float]:
        """Test losses by seed."""
        runs = self.pool.of(self.optimizer, steps)
        return {
            r["seed"]: r["test_loss"] for r in runs if r["settings"] == settings and r["seed"] != TUNING_SEED and "test_loss" in r
        }

    def lengths(self) -> Iterator[Job]:
        """Where a full run reaches AdamW's loss: ever shorter ones of the winner, while they do."""
        settings, goal = self.winner(), goal_of(self.pool, self.steps)
        if settings and self.optimizer != "adamw" and reaches(self.losses(settings, self.steps), goal):
            yield from self.shorter(settings)

    def shorter(self, settings: Settings) -> Iterator[Job]:
        """Runs with schedules of their own, ever shorter while AdamW's loss is reached; a longer one where the first does not."""
        goal = goal_of(self.pool, self.steps)
        for share in SHORTER if goal else ():
            yield (job := Job(self.optimizer, settings, round(share * self.steps), 0))
            if (record := self.pool.has(job)) is None:
                return
            if not reaches({0: record.get("test_loss", float("inf"))}, goal):
                if share == SHORTER[0]:
                    yield dataclasses.replace(job, steps=round(LONGER * self.steps))
                return

    def again(self) -> Iterator[Job]:
        yield from self.repeated(self.lengths())

    def repeated(self, lengths: Iterable[Job]) -> Iterator[Job]:
        """The shortest of these that reached it, with other seeds."""
        known = self.done(lengths)
        ends = {r["steps"]: {0: r["test_loss"]} for r in known if "test_loss" in r}
        if (least := reached(ends, goal_of(self.pool, self.steps))) is not None:
            yield from (Job(self.optimizer, known[0]["settings"], least, seed) for seed in (1, 2))

    def distance(self) -> float:
        """From AdamW after full runs, on the seeds of both; endless where there is none."""
        found = lead(self.losses(self.winner(), self.steps), goal_of(self.pool, self.steps))
        return float("inf") if found is None else abs(found.mean)

    def cost(self) -> Iterator[Job]:
        """A few steps where a search would begin: their time and memory."""
        if not self.pool.shared:
            yield Job(self.optimizer, plain(self.start), max(1, round(COST * self.steps)), 0)

    def stepped(self) -> Iterator[Job]:
        """What a training step costs with it: a few dozen, for each of STEPS."""
        for more in () if self.pool.shared else STEPS[self.optimizer]:
            yield Job(self.optimizer, plain({**self.start, **more}), max(1, round(STEPPED * self.steps)), 0)

    def frequencies(self) -> Iterator[Job]:
        """Bases made anew after so many steps; after each also at half of a run's length, with the decay that a search found."""
        known = self.done(self.decay())
        best = {"weight_decay": min(known, key=self.score)["settings"]["weight_decay"]} if known else {}
        for n in FREQUENCIES:
            yield self.tune({**self.start, "precondition_frequency": n})
        yield self.tune({**self.start, **best, "precondition_frequency": FREQUENCIES[0]}, self.half)

    def oftener(self, n: int) -> Iterator[Job]:
        """The winner with bases that are n steps old at most: in how many steps does it reach AdamW's loss?"""
        if (settings := self.winner()) is not None:
            yield from self.shorter(plain({**settings, "precondition_frequency": n}))

    def often(self) -> Iterator[Job]:
        for n in reversed(OFTEN):
            yield from self.oftener(n)
            yield from self.repeated(self.oftener(n))

    def fitted(self) -> Iterator[Job]:
        """The winner with factors that are fitted in every step, as KronPSGD's own schedule does in the first 500."""
        if (settings := self.winner()) is not None:
            always = plain({**settings, "preconditioner_update_probability": 1.0})
            yield from (Job(self.optimizer, always, self.steps, seed) for seed in range(LEAST))

    def formats(self, forms: Mapping[str, Settings] = FORMATS) -> Iterator[Job]:
        """State in each format, at half length, where a search would begin."""
        for seed in range(3):
            for more in forms.values():
                yield Job(self.optimizer, plain({**self.start, **more}), max(1, self.steps // 2), seed)

    def halves(self) -> Iterator[Job]:
        """Likewise bfloat16 weights, rounded in each way."""
        if self.pool.model.halves and "rounding" in spec_class(self.optimizer).fields:
            yield from self.formats(HALVES)


def goal_of(pool: Pool, steps: int) -> dict[int, float]:
    """AdamW's loss after a full run, by seed."""
    search = Search(pool, "adamw", steps)
    return search.losses(search.winner(), steps)


# ---- plans --------------------------------------------------------------------------------------------------------------
ALL = None  # every optimizer that was asked for
#: by name: who takes which rounds, in the order of their worth; each optimizer ends its rounds before the next begins
PLANS: dict[str, Sequence[tuple[Sequence[str] | None, Sequence[str]]]] = {
    "race": (
        (("adamw",), ("coarse", "fine", "decay", "others", "seeds")),
        (("muon", "soap"), ("coarse", "fine", "decay", "full", "lengths")),
        (ALL, ("cost",)),
        (ALL, ("coarse", "fine", "decay", "full")),
        (ALL, ("others", "seeds", "lengths", "again")),
    ),
    "cost": ((ALL, ("cost",)),),
    "storage": ((STORAGE, ("formats",)), (STORAGE, ("halves",))),
    "steps": ((tuple(STEPS), ("stepped",)),),
    "frequency": ((("soap",), ("frequencies", "often")), (("kronpsgd",), ("fitted",))),
}


def jobs(pool: Pool, plan: str, optimizers: Sequence[str], steps: int) -> Iterator[Job]:
    """All that a plan asks for, as far as the pool decides it. Of all optimizers those go first whose place is in doubt."""
    for who, rounds in PLANS[plan]:
        if who is None:
            names = sorted(optimizers, key=lambda name: Search(pool, name, steps).distance())
        else:
            names = [name for name in who if name in optimizers]
        for name in names:
            for each in rounds:
                yield from getattr(Search(pool, name, steps), each)()


def following(pool: Pool, plan: str, optimizers: Sequence[str], steps: int) -> Job | None:
    """The next run, or None when the plan is done."""
    missing = (job for job in jobs(pool, plan, optimizers, steps) if pool.has(job) is None)
    return next((job for job in missing if job.key not in pool.failed), None)


@dataclasses.dataclass
class Deadline:
    """Seconds from now after which nothing is begun that would not end in time."""

    seconds: float | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.start = self.clock()

    def allows(self, expected: float) -> bool:
        return self.seconds is None or self.clock() - self.start + expected <= self.seconds


def go(
    pool: Pool, plan: str, optimizers: Sequence[str], steps: int, deadline: Deadline, machine: Mapping[str, Any],
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Run what is missing while there is time; whether the plan is done. Ctrl-C is for the caller: finished runs are written."""
    while (job := following(pool, plan, optimizers, steps)) is not None:
        if not deadline.allows(job.steps * pool.pace(job)):
            return False
        say(job.describe())
        try:
            run = pool.model.train(job.optimizer, job.settings, job.steps, job.seed, pool.engine, lambda loss: None)
        except Exception as problem:
            pool.failed[job.key] = f"{type(problem).__name__}: {problem}"
            say(f"  failed: {pool.failed[job.key]}")
        else:
            say(told(pool.add(job, run, machine), pool.model.metric))
    return not pool.failed


def told(record: Record, metric: str) -> str:
    end = f"{metric.replace('_', ' ')} {record[metric]:.4f}" if metric in record else f"diverged at {record['diverged_at']}"
    return f"  {end}, {record['seconds']:.1f} s, of a step {record['ms_per_step']:.2f} ms the optimizer's"


def entries(pool: Pool, optimizers: Sequence[str], steps: int) -> list[Entry]:
    """What a report shows of a pool: of each optimizer the runs of full length with the best settings, and the rates tried."""
    found = []
    for name in optimizers:
        search = Search(pool, name, steps)
        settings = search.winner()
        if settings is not None:
            runs = [as_run(r) for r in pool.of(name, steps) if r["settings"] == settings and r["seed"] != TUNING_SEED]
            tried = [
                r for r in pool.of(name, search.tuning, TUNING_SEED) if r["settings"] == plain(search.at(r["settings"]["lr"]))
            ]
            tried.sort(key=lambda r: r["settings"]["lr"])
            grid = [Trial(r["settings"]["lr"], r.get("train_loss"), r.get("accuracy"), r["diverged_at"]) for r in tried]
            found.append(Entry(name, settings, runs, grid))
    return found
