"""Which optimizer wins, by how much: tables, sentences and figures from committed runs of `rlx-optim lm-race --model gpt`.

What was not run is a dash; a difference is called a lead only where `leads` does. Nothing here is typed by hand.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lab.races import leads, plan, records
from lab.races.rates import SETTINGS
from rlx_optim import list_optimizers
from rlx_optim.race.digits import HESSIAN_EVERY
from rlx_optim.registry import spec_class

from .text import table

ROOT = Path(__file__).parents[2]
FILES = "benchmarks/gpt/*.jsonl"
STEPS = 1000
MARKS = {"muon": 0.60, "soap": 0.75}  # of AdamW's seconds in which its loss is to be reached
SHORT = [round(share * STEPS) for share in (*plan.SHORTER, plan.LONGER)]
OLD = "precondition_frequency"
NONE, SPACE = "–", "\N{NO-BREAK SPACE}"
PLUS = f" ±{SPACE}"  # a line may end before it


class Recorded:
    """The model as the newest record tells it: the site is built without torch."""

    name, metric, decides, halves = "gpt", "test_loss", "validation_loss", True

    def __init__(self, record: Mapping[str, Any]):
        self.record = record

    def describe(self) -> dict[str, Any]:
        return dict(self.record)


@functools.cache
def pool() -> records.Pool:
    """The committed runs, under the conditions of the newest."""
    files = sorted(ROOT.glob(FILES))
    known = sorted(records.read(files), key=lambda record: record["date"])
    model: Any = Recorded(known[-1] if known else {})
    return records.Pool(model, beside=files)


class Result(NamedTuple):
    """What the runs of an optimizer say. Where nothing was run there is no Result."""

    settings: dict[str, Any]
    losses: dict[int, float]  # of the test text after a full run, by seed
    learned: float  # the loss of what it was trained on, at the end
    rates: int  # how many of the best were run at full length
    bounded: bool  # whether there are enough of them: the best is not at an edge
    lead: leads.Lead | None  # against AdamW
    least: int | None  # steps of the shortest run that reached AdamW's loss
    asked: bool  # whether shorter ones were run at all
    share: float | None  # of AdamW's seconds that these steps take

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values())


@functools.cache
def result(name: str) -> Result | None:
    search = plan.Search(pool(), name, STEPS)
    settings = search.winner()
    if settings is None or not all(map(pool().has, search.decay())):  # a search that is not over is no result
        return None
    losses = search.losses(settings, STEPS)
    learned = [r["train_loss"] for r in pool().of(name, STEPS) if r["settings"] == settings and "train_loss" in r]
    beside = plan.Search(pool(), "adamw", STEPS)
    ends = {length: found for length in (*SHORT, STEPS) if (found := search.losses(settings, length))}
    least = leads.reached(ends, plan.goal_of(pool(), STEPS))
    return Result(
        dict(settings),
        losses,
        statistics.fmean(learned),
        len(search.done(search.others())),
        all(map(pool().has, search.others())),
        None if name == "adamw" else leads.lead(losses, beside.losses(beside.winner(), STEPS)),
        least,
        len(ends) > 1 or name == "adamw",
        share_of(name, least),
    )


class Cost(NamedTuple):
    step: float  # seconds of a training step
    own: float  # of it the optimizer's
    peak: float | None  # bytes


@functools.cache
def cost(name: str) -> Cost | None:
    """Of runs that had the device to themselves. Forward and backward are alike for all and vary more from minute to minute than
    most optimizers take: where no run is of full length, AdamW's step stands, with this optimizer's part in place of AdamW's."""
    runs, search = pool().timed(name, STEPS), plan.Search(pool(), name, STEPS)
    stepped = pool().has(next(search.stepped())) if name in plan.STEPS else None
    short = [stepped] if stepped else pool().timed(name, round(plan.COST * STEPS))
    if not (used := runs or short):
        return None
    peaks = [r["peak_bytes"] for r in used if r["peak_bytes"]]
    whole, own = (
        statistics.median(r["seconds"] / r["steps"] for r in used),
        statistics.median(r["ms_per_step"] for r in used) / 1e3,
    )
    if not runs and name != "adamw" and (beside := cost("adamw")):
        passes = beside.step - beside.own
        whole = passes * (1 + spec_class(name).observes / HESSIAN_EVERY) + own
    return Cost(whole, own, statistics.median(peaks) if peaks else None)


def seconds(name: str, steps: int, aside: Mapping[str, Any]) -> float | None:
    """Of such a run from its first step to its last: of those that had the device to themselves, at any rate, or of as many
    steps as those that were timed."""
    runs = [
        r["seconds"]
        for r in pool().whose.get(name, ())
        if r["steps"] == steps and not r.get("shared") and r["diverged_at"] is None and aside_of(r["settings"]) == aside
    ]
    if runs:
        return statistics.median(runs)
    return cost(name).step * steps if not aside and cost(name) else None


def aside_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run that are no part of a search."""
    return {key: value for key, value in settings.items() if key in records.ASIDE}


def share_of(name: str, steps: int | None, **aside: Any) -> float | None:
    """Of AdamW's seconds that so many steps take."""
    own, theirs = seconds(name, steps, aside) if steps else None, seconds("adamw", STEPS, {})
    return own / theirs if own and theirs else None


def rated(name: str) -> list[dict[str, Any]]:
    """The short runs that tried rates, at the decay a search begins with."""
    begun = decay(name, SETTINGS["gpt"][name])
    return [r for r in tried(name) if decay(name, r["settings"]) == begun]


def searched(name: str) -> list[dict[str, Any]]:
    """Those that did not diverge, the smallest rate first."""
    return sorted((r for r in rated(name) if "validation_loss" in r), key=lambda r: r["settings"]["lr"])


def whole(name: str) -> list[dict[str, Any]]:
    """The runs of full length that decide between rates, but for those that diverged."""
    search = plan.Search(pool(), name, STEPS)
    return [r for r in search.done(search.others()) if "validation_loss" in r]


def least(name: str) -> tuple[float, float]:
    """The rate of those with the lowest loss, and that loss."""
    return min(((r["settings"]["lr"], r["validation_loss"]) for r in searched(name)), key=lambda pair: pair[1])


def start(name: str) -> float:
    rate: float = SETTINGS["gpt"][name]["lr"]
    return rate


def curve(name: str) -> list[float]:
    """The training loss of full runs, the mean over seeds of every ten steps."""
    found = result(name)
    runs = [r["loss"] for r in pool().of(name, STEPS) if found and r["settings"] == found.settings and r["diverged_at"] is None]
    return [statistics.fmean(point) for point in zip(*runs, strict=True)]


# ---- words ----------------------------------------------------------------------------------------------------------------
def spread(losses: Mapping[int, float]) -> str:
    deviation = leads.deviation(list(losses.values()))
    return f"{statistics.fmean(losses.values()):.4f}" + (f"{PLUS}{deviation:.4f}" if deviation is not None else "")


def enough(found: Result) -> str:
    """In how many steps, and of AdamW's seconds, its loss is reached."""
    if found.least is None:
        return f">{SPACE}{STEPS:,}"
    most = "" if found.asked else f"≤{SPACE}"
    return f"{most}{found.least:,}" + ("" if found.share is None else f", {most}{found.share:.0%}")


def said(lead: leads.Lead | None) -> str:
    """A difference and whether it is one."""
    if lead is None:
        return NONE
    margin = f"{PLUS}{lead.margin:.4f}" if lead.margin is not None else ""
    return f"{-lead.mean:+.4f}{margin}, {lead.verdict}".replace("-", "−")


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def few(found: Result) -> str:
    return "" if found.bounded else f", the best of {counted(found.rates, 'rate')} so far"


def early(found: Result) -> bool:
    """Whether another rate or seed of its own could change a verdict."""
    seeds = len(found.losses) if found.lead is None else found.lead.seeds
    return not found.bounded or seeds < plan.LEAST


def adamw_early() -> bool:
    beside = result("adamw")
    return beside is None or not beside.bounded


def so_far(found: Result) -> str:
    """What follows a verdict that another rate could change, its own or AdamW's, or another seed."""
    return " so far" if early(found) or adamw_early() else ""


def sentence(name: str) -> str:
    """What our run says of an optimizer, for a line of prose."""
    found = result(name)
    if found is None:
        return "its rate is searched, no full run of ours yet" if searched(name) else "not run by us on a GPU yet"
    what = f"our run: {spread(found.losses)} after {STEPS:,} steps ({counted(len(found.losses), 'seed')}{few(found)})"
    if found.lead is None:
        return what
    words = {
        "ahead": "ahead of AdamW", "behind": "behind AdamW", "level": "level with AdamW",
        "unclear": "seeds too far apart to say more", "open": "beside AdamW's one seed",
    }  # fmt: skip
    what += f", {words[found.lead.verdict]}{so_far(found)} (loss {-found.lead.mean:+.4f})".replace("+-", "−").replace(
        "(loss -", "(loss −"
    )
    if found.share is not None and found.least is not None and found.least < STEPS:
        what += f"; AdamW's loss in {found.least} steps and {found.share:.0%} of its seconds"
    return what


def source() -> str:
    """How much was run, where, with what."""
    runs = pool().records
    if not runs:
        return "No run is committed yet."
    new, dates = runs[-1], sorted(record["date"][:10] for record in runs)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    versions = ", ".join(f"{n} {v}" for n, v in new["versions"].items() if n in ("python", "torch", "triton", "rlx_optim"))
    steps_ = sum(record["steps"] if record["diverged_at"] is None else record["diverged_at"] for record in runs)
    return (
        f"{len(runs)} runs, {steps_:,} training steps on one {new['device']}, {when}; {versions}; "
        f"{new['parameters'] / 1e6:.1f} M parameters, {new['batch']:,} bytes a batch, text of SHA-256 `{new['corpus'][:12]}`."
    )


def marks() -> str:
    """Whether the marks are reached."""
    lines = []
    for name, wanted in MARKS.items():
        found, title = result(name), spec_class(name).title
        if found is None or result("adamw") is None or (found.least and not found.asked):
            verdict = "not measured yet"
        elif (best := best_share(name, found)) is not None:
            share, how = best
            verdict = f"{share:.0%} ({how}): {'reached' if share <= wanted else 'missed'}{so_far(found)}"
        elif found.least is None:
            verdict = f"not reached{so_far(found)}, in {STEPS:,} steps either"
        else:
            verdict = f"reached in {found.least} steps, whose seconds were not measured"
        lines.append(f"- {title}, AdamW's loss in at most {wanted:.0%} of AdamW's seconds: **{verdict}**.")
    return "\n".join(lines)


def best_share(name: str, found: Result) -> tuple[float, str] | None:
    """The smallest share of AdamW's seconds in which its loss was reached, and how."""
    shares = [(found.share, f"{found.least} steps")]
    if name == "soap":
        shares += [(there.share, f"{there.steps} steps, {often(n)}") for n in plan.OFTEN if (there := reach(n))]
    return min(((share, how) for share, how in shares if share is not None), default=None)


class Reach(NamedTuple):
    steps: int
    share: float | None  # of AdamW's seconds


def reach(n: int) -> Reach | None:
    """Where SOAP with bases that are n steps old at most reaches AdamW's loss, at any rate that was run."""
    ends: dict[float, dict[int, dict[int, float]]] = {}
    for r in pool().whose.get("soap", ()):
        if aside_of(r["settings"]) == {OLD: n} and r["steps"] in SHORT and r["seed"] != records.TUNING_SEED and "test_loss" in r:
            ends.setdefault(r["settings"]["lr"], {}).setdefault(r["steps"], {})[r["seed"]] = r["test_loss"]
    goal = plan.goal_of(pool(), STEPS)
    least = min((found for of in ends.values() if (found := leads.reached(of, goal))), default=None)
    return None if least is None else Reach(least, share_of("soap", least, **{OLD: n}))


# ---- tables -----------------------------------------------------------------------------------------------------------------
def page(name: str) -> str:
    return f"[{spec_class(name).title}](optimizers/{name}.md)"


def results() -> str:
    """One line an optimizer, the best first; those of which nothing is known are named below."""
    known = {name: found for name in list_optimizers() if (found := result(name))}
    rows = []
    for name, found in sorted(known.items(), key=lambda pair: pair[1].mean):
        rows.append(
            [
                page(name), f"{found.settings['lr']:g}", f"{decay(name, found.settings):g}", spread(found.losses),
                f"{found.learned:.3f}", f"{len(found.losses)}, {found.rates}",
                said(found.lead) + " so far" * bool(found.lead and early(found)), enough(found),
            ]
        )  # fmt: skip
    head = [
        "optimizer", "lr", "decay", f"loss after {STEPS:,} steps", "training loss", "seeds, rates", "less AdamW's",
        "steps to AdamW's loss",
    ]  # fmt: skip
    absent = ", ".join(page(name) for name in list_optimizers() if name not in known)
    below = ["Every verdict is one so far: of AdamW's own rates the best is at an edge of those run."] * (
        bool(known) and adamw_early()
    )
    below += [f"Not run yet: {absent}."] * bool(absent)
    return "\n\n".join([table(head, rows, right=(1, 2, 4, 5, 7)), *below])


def costs() -> str:
    """What a training step takes with each, and at most of the device's memory."""
    rows = [
        [
            page(name),
            f"{1e3 * spent.step:.1f}",
            f"{1e3 * spent.own:.2f}",
            NONE if spent.peak is None else f"{spent.peak / 1e9:.2f}",
        ]
        for name in list_optimizers()
        if (spent := cost(name))
    ]
    head = ["optimizer", "ms a training step", "the optimizer's", "peak GB"]
    return table(head, rows, right=(1, 2, 3)) if rows else "No run is committed yet."


def tried(name: str) -> list[dict[str, Any]]:
    """The short runs that searched a rate."""
    return pool().of(name, plan.Search(pool(), name, STEPS).tuning, records.TUNING_SEED)


def decay(name: str, settings: Mapping[str, Any]) -> float:
    """What it is given, or its default."""
    field = spec_class(name).fields.get("weight_decay")
    return float(settings.get("weight_decay", 0.0 if field is None else field.default))


def rates() -> str:
    """The loss of the runs that searched, by the rate and by the decay that was tried."""
    rows = []

    def cells(found: Iterable[tuple[float, dict[str, Any]]]) -> str:
        by = {value: f"{r['validation_loss']:.3f}" if "validation_loss" in r else "diverged" for value, r in found}
        return ", ".join(f"{value:g}: {by[value]}" for value in sorted(by)) or NONE

    for name in list_optimizers():
        if by_rate := rated(name):
            by_decay = pool().of(name, plan.Search(pool(), name, STEPS).half, records.TUNING_SEED)
            begun, rates_ = decay(name, SETTINGS["gpt"][name]), cells((r["settings"]["lr"], r) for r in by_rate)
            rows.append([spec_class(name).title, f"{begun:g}", rates_, cells((decay(name, r["settings"]), r) for r in by_decay)])
    head = ["optimizer", "decay", "loss by rate", "loss by decay, at the best rate"]
    return table(head, rows) if rows else "None is committed yet."


def starts() -> str:
    """Where to begin, and what that rests on."""
    rows = []
    for name in list_optimizers():
        found, own = result(name), spec_class(name).fields["lr"].default
        count = counted(len({r["settings"]["lr"] for r in (*tried(name), *whole(name))}), "rate")
        if found is not None:
            lr, rests = found.settings["lr"], f"[our run](evidence.md), the best of {count}"
        elif searched(name):
            lr, rests = least(name)[0], f"[short runs](evidence.md#what-was-searched) of ours, the best of {count}"
        else:
            lr, rests = start(name), "a place to begin a search: not run by us at this size"
        rows.append(
            [
                page(name), f"{own:g}" if isinstance(own, float) else NONE,
                f"{SETTINGS['char-gpt'][name]['lr']:g}", f"{lr:g}", rests,
            ]
        )  # fmt: skip
    head = ["optimizer", "default", "width 64, best of 5", "width 512", "which rests on"]
    return table(head, rows, right=(1, 2, 3))


def decays() -> str:
    """The decay of each that was raced, the largest first."""
    found = {name: decay(name, r.settings) for name in list_optimizers() if (r := result(name))}
    order = sorted(found, key=lambda name: (-found[name], name))
    return ", ".join(f"{spec_class(name).title} {found[name]:g}" for name in order) or "none yet"


def steps() -> str:
    """What a training step takes with each of `plan.STEPS`, against AdamW's in the newest of such runs."""
    rows, whole = [], dict[str, float]()
    for name in plan.STEPS:
        search = plan.Search(pool(), name, STEPS)
        for job, more in zip(search.stepped(), plan.STEPS[name], strict=True):
            if found := pool().has(job):
                whole[name] = found["training_ms"]
                with_ = "".join(f", {key.replace('_', ' ')} {value:g}" for key, value in more.items())
                over = f"{found['training_ms'] / whole['adamw']:.2f}×" if "adamw" in whole else NONE
                rows.append(
                    [f"{spec_class(name).title}{with_}", f"{found['training_ms']:.1f}", over, f"{found['ms_per_step']:.2f}"]
                )
    head = ["optimizer", "ms a training step", "AdamW's", "the optimizer's"]
    return table(head, rows, right=(1, 2, 3)) if rows else "No run is committed yet."


def frequencies() -> str:
    """SOAP's loss by how many steps there are between two bases, and AdamW's in runs as long."""
    search, beside = (plan.Search(pool(), name, STEPS) for name in ("soap", "adamw"))
    lengths = (search.tuning, search.half)
    found = {(job.settings[OLD], job.steps): pool().has(job) for job in search.frequencies()}
    stepped = {job.settings[OLD]: pool().has(job) for job in search.stepped()}
    best = [next(iter(beside.tried(steps, records.TUNING_SEED)), None) for steps in lengths]
    default = result("soap")
    ends: dict[int, Any] = {n: reach(n) for n in plan.OFTEN}
    ends[plan.FREQUENCIES[-1]] = Reach(default.least, default.share) if default and default.least else None
    rows = [["AdamW", *best, pool().has(next(beside.stepped())), Reach(STEPS, 1.0) if result("adamw") else None]]
    rows += [
        [f"SOAP, {often(n)}", *(found.get((n, steps)) for steps in lengths), stepped.get(n), ends[n]]
        for n in plan.FREQUENCIES[::-1]
    ]
    if not any(row[1] for row in rows[1:]):
        return "No run is committed yet."
    cells = [
        [
            words, *map(loss_of, losses), f"{step['training_ms']:.1f}" if step else NONE,
            f"{there.steps:,}" if there else NONE, f"{there.share:.0%}" if there and there.share else NONE,
        ]
        for words, *losses, step, there in rows
    ]  # fmt: skip
    head = [
        "",
        *(f"loss after {steps} steps" for steps in lengths),
        "ms a training step",
        "steps to AdamW's loss",
        "of AdamW's seconds",
    ]
    return table(head, cells, right=(1, 2, 3, 4, 5))


def fits() -> str:
    """KronPSGD's losses by how often its factors are fitted, and how far they are from AdamW's."""
    search, goal = plan.Search(pool(), "kronpsgd", STEPS), plan.goal_of(pool(), STEPS)
    by = {
        "ever more rarely after 500 steps (the default)": search.losses(search.winner(), STEPS),
        "in every step": {r["seed"]: r["test_loss"] for r in search.done(search.fitted()) if "test_loss" in r},
    }
    rows = [
        [words, ", ".join(f"{losses[seed]:.4f}" for seed in sorted(losses)), said(leads.lead(losses, goal))]
        for words, losses in by.items()
        if losses
    ]
    head = ["factors are fitted", f"loss after {STEPS:,} steps, by seed", "less AdamW's"]
    return table(head, rows) if len(rows) == len(by) else "No run is committed yet."


def often(n: int) -> str:
    return "a new basis every step" if n == 1 else f"every {n} steps"


def loss_of(record: Mapping[str, Any] | None) -> str:
    """What settings are chosen by."""
    return f"{record['validation_loss']:.3f}" if record and "validation_loss" in record else NONE


def storage() -> str:
    """The loss with state in fewer bits and with bfloat16 weights, and how far it is from float32's at equal seeds."""
    rows, forms = [], {**plan.FORMATS, **plan.HALVES}

    def losses(name: str, more: Mapping[str, Any]) -> dict[int, float]:
        fits = [
            r
            for r in pool().whose.get(name, [])
            if more.items() <= {k: v for k, v in r["settings"].items() if k in WORDS}.items()
        ]
        return {r["seed"]: r["test_loss"] for r in fits if "test_loss" in r}

    for name in plan.STORAGE:
        exact, *others = (losses(name, more) for more in forms.values())
        if exact:
            cells = [compared(found, exact) for found in others]
            rows.append([spec_class(name).title, spread(exact), *cells])
    used = [i for i, form in enumerate(["optimizer", *forms]) if i < 4 or any(row[i] != NONE for row in rows)]
    head = ["optimizer", *(f"state {form}" if form in plan.FORMATS else form for form in forms)]
    return table([head[i] for i in used], [[row[i] for i in used] for row in rows]) if rows else "No run is committed yet."


def compared(own: Mapping[int, float], exact: Mapping[int, float]) -> str:
    """How much higher a loss is, and over how many seeds where not over all."""
    found = leads.lead(own, exact)
    words = said(found).replace("ahead", "lower").replace("behind", "higher")
    return words + (f" ({counted(found.seeds, 'seed')})" if found and found.seeds < len(exact) else "")


WORDS = {"state_dtype", "weights", "rounding"}


# ---- figures ----------------------------------------------------------------------------------------------------------------
def drawn() -> bool:
    return any(result(name) for name in list_optimizers())


def figures() -> str:
    """The pictures, where there is something to see."""
    if not drawn():
        return "Nothing to draw yet."
    told = {
        "evidence-ends": "Loss after 1,000 steps of every optimizer, seed by seed",
        "evidence-curves": "Training loss by step and by second, each optimizer at its best settings",
        "evidence-rates": "Loss against the learning rate, of short runs and of those of full length",
    }
    return "\n\n".join(
        "\n".join(f"![{words}](assets/plots/{file}-{theme}.svg#only-{theme})" for theme in ("light", "dark"))
        for file, words in told.items()
    )
