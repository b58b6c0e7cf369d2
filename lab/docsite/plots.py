"""Figures: each optimizer at work (the digits of `make race`, and a path through a valley), and the benchmarks as bars."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import rlx_optim
from rlx_optim import create, list_optimizers
from rlx_optim.race.digits import MLP
from rlx_optim.race.rates import settings_of
from rlx_optim.registry import spec_class

from . import bench, evidence, races

ROOT = Path(__file__).parents[2]
BESIDE = "adamw"  # what each is shown beside
THEMES = {
    "light": {"ink": "#3b4252", "faint": "#c9ced8", "own": "#4051b5", "beside": "#d9822b"},
    "dark": {"ink": "#cdd3df", "faint": "#4b5263", "own": "#8f9ffb", "beside": "#f2a65a"},
}
SMOOTH = 25  # steps

# ---- the valley -------------------------------------------------------------------------------------------------------
START, GOAL, STEPS = (-1.2, 1.4), (1.0, 1.0), 200
LEFT, RIGHT, BOTTOM, TOP = -1.7, 1.7, -0.9, 2.2
RATES = [a * 10.0**b for b in range(-4, 1) for a in (1, 2, 5)]
SETTINGS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "muon": {"otherwise": None}, "mars": {"otherwise": None}}


def valley(x: Any, y: Any) -> Any:
    """Rosenbrock's function, a little wider than usual."""
    return (1 - x) ** 2 + 20 * (y - x * x) ** 2


def slope(p: np.ndarray) -> np.ndarray:
    x, y = p[:, 0]
    return np.array([[-2 * (1 - x) - 80 * x * (y - x * x)], [40 * (y - x * x)]], np.float32)


def curvature(p: np.ndarray) -> np.ndarray:
    x, y = p[:, 0]
    return np.array([[2 - 80 * y + 240 * x * x], [40.0]], np.float32)


def walk(name: str, lr: float) -> np.ndarray:
    """The points of a walk; the parameter is a 2×1 matrix, so that every rule takes it."""
    opt = create(name, lr=rlx_optim.schedules.cosine(lr, STEPS), **SETTINGS.get(name, {}))
    p = np.array(START, np.float32).reshape(2, 1)
    points = [p.copy()]
    for t in range(STEPS):
        if isinstance(opt, rlx_optim.Sophia) and t % 10 == 0:
            opt.update_hessian("p", curvature(p))
        opt.step_all({"p": p}, {"p": slope(p)})
        points.append(p.copy())
    return np.array(points)[:, :, 0]


def takes(name: str, lr: float) -> bool:
    with contextlib.suppress(ValueError):
        return spec_class(name).fields["lr"].check(lr) == lr
    return False


@functools.cache
def best_walk(name: str) -> tuple[float, np.ndarray]:
    """The learning rate of the grid whose walk, within the picture, is lowest on the way and at its end; and that walk."""

    def height(points: np.ndarray) -> float:
        inside = (points > (LEFT, BOTTOM)).all() and (points < (RIGHT, TOP)).all()
        heights = valley(*points.astype(np.float64).T)
        return float(np.log(heights + 1e-3).mean()) if inside else float("inf")

    with np.errstate(all="ignore"):
        walks = [(lr, walk(name, lr)) for lr in RATES if takes(name, lr)]
        return min(walks, key=lambda pair: height(pair[1]))


# ---- figures ------------------------------------------------------------------------------------------------------------
@functools.cache
def curve(name: str) -> np.ndarray:
    """The smoothed loss of the race."""
    run = MLP.train(name, settings_of(MLP.name, name), MLP.steps, 0, "auto", lambda loss: None)
    return np.convolve(run.losses, np.full(SMOOTH, 1 / SMOOTH), "valid")


@contextlib.contextmanager
def drawing(colours: Mapping[str, str], out: io.BytesIO, *size: Any) -> Iterator[Any]:
    """Axes in the colours of a theme; what is drawn on them is written as SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = {
        "svg.fonttype": "none", "svg.hashsalt": "rlx-optim", "font.family": "sans-serif", "font.size": 10, "axes.titlesize": 11,
        "axes.edgecolor": colours["faint"], "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours["ink"]),
    }  # fmt: skip
    with plt.rc_context(style):
        columns, width, height = size
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
        yield axes
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def at_work(name: str, theme: str) -> bytes:
    """An optimizer beside AdamW: the digits, and the valley."""
    colours, out = THEMES[theme], io.BytesIO()
    shown = dict.fromkeys([BESIDE, name])
    tint = {BESIDE: colours["beside"], name: colours["own"]}
    with drawing(colours, out, 2, 9, 3.6) as (loss, path):
        for each in shown:
            steps = np.arange(SMOOTH - 1, SMOOTH - 1 + len(curve(each)))
            loss.semilogy(steps, curve(each), color=tint[each], lw=2 if each == name else 1.5, label=spec_class(each).title)
        loss.set(xlabel="step", title="Handwritten digits: training loss")
        loss.grid(color=colours["faint"], lw=0.4, which="major")
        loss.legend()
        x, y = np.meshgrid(np.linspace(LEFT, RIGHT, 60), np.linspace(BOTTOM, TOP, 60))
        path.contour(x, y, np.log(valley(x, y) + 0.05), levels=9, colors=colours["faint"], linewidths=0.7)
        for each in shown:
            lr, points = best_walk(each)
            path.plot(*points.T, ".-", color=tint[each], ms=4, lw=1, label=f"{spec_class(each).title}, lr {lr:g}")
        path.plot(*START, "o", color=colours["ink"], ms=6)
        path.plot(*GOAL, "*", color=colours["ink"], ms=12)
        path.set(xlim=(LEFT, RIGHT), ylim=(BOTTOM, TOP), xticks=[], yticks=[])
        path.set_title(f"A curved valley: {STEPS} steps to the star")
        path.legend(loc="lower left")
    return out.getvalue()


def speed(model: str, theme: str) -> bytes:
    """How many times each optimizer is as fast as its best peer, from the committed results."""
    colours, out = THEMES[theme], io.BytesIO()
    ratios = {name: (m.ratio, m.peer) for (of, name), m in bench.newest().items() if of == model and m.ratio}
    names = [name for name in reversed(list_optimizers()) if name in ratios]
    with drawing(colours, out, 1, 9, 0.8 + 0.28 * len(names)) as axes:
        axes.barh([spec_class(n).title for n in names], [ratios[n][0] for n in names], 0.62, color=colours["own"])
        for place, name in enumerate(names):
            ratio, peer = ratios[name]
            label = f"{bench.times(ratio)} {peer}"
            axes.annotate(label, (max(ratio, 1), place), (5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.axvline(1, color=colours["beside"], lw=1.5)
        axes.set(xlim=(0, 1.2 * max(ratio for ratio, _ in ratios.values())), xlabel="times the speed of the best peer")
    return out.getvalue()


def told(of: str, theme: str) -> bytes:
    """The committed runs of the GPT, one of TOLD."""
    colours, out = THEMES[theme], io.BytesIO()
    found = {name: r for name in list_optimizers() if (r := evidence.result(name)) is not None}
    order = sorted(found, key=lambda name: found[name].mean)
    front = [*order[:SHOWN], *([BESIDE] if BESIDE in order[SHOWN:] else [])]
    draw, columns, shown = TOLD[of]
    names = front if shown else order
    with drawing(colours, out, columns, 9, 3.8 if shown else 0.8 + 0.26 * len(names)) as axes:
        looks = {
            name: {"color": f"C{place % 10}", "lw": 2.2 if name == BESIDE else 1.4, "label": spec_class(name).title}
            for place, name in enumerate(names)
        }
        draw(axes, found, looks, colours)
        for one in np.atleast_1d(axes):
            one.grid(color=colours["faint"], lw=0.4)
        if shown:
            axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return out.getvalue()


def ends(axes: Any, found: Mapping[str, Any], looks: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """The loss of every seed and their mean; what is far to the right is a number at the edge."""
    beside = found.get(BESIDE)
    edge = (beside.mean if beside else min(r.mean for r in found.values())) + FAR
    for place, name in enumerate(reversed(looks)):
        losses, mean = list(found[name].losses.values()), found[name].mean
        tint = colours["beside"] if name == BESIDE else colours["own"]
        inside = [loss for loss in losses if loss < edge]
        axes.plot(inside, [place] * len(inside), "o", ms=3.5, color=tint, alpha=0.55, mew=0)
        if mean < edge:
            axes.plot([mean], [place], "|", ms=13, mew=2.2, color=tint)
        else:
            axes.annotate(
                f"{mean:.2f} →", (edge, place), (-4, 0), textcoords="offset points", ha="right", va="center", color=tint
            )
    if beside:
        axes.axvline(beside.mean, color=colours["beside"], lw=1)
    axes.set(xlim=(None, edge), xlabel=f"loss after {evidence.STEPS:,} steps: of each seed, and the mean")
    axes.set_yticks(range(len(looks)), [look["label"] for look in reversed(looks.values())])
    axes.set_ylim(-0.7, len(looks) - 0.3)


def curves(axes: Any, found: Mapping[str, Any], looks: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    for name, look in looks.items():
        losses = np.array(evidence.curve(name))
        steps = evidence.records.EVERY * np.arange(1, len(losses) + 1)
        spent = evidence.cost(name)
        for one, pace in zip(axes, (1, spent.step if spent else np.nan), strict=True):  # what is no number is not drawn
            one.plot(pace * steps[LATE:], losses[LATE:], **look)
    axes[0].set(xlabel="step", ylabel="training loss, mean of ten steps")
    axes[1].set(xlabel="seconds")


def over_rates(axes: Any, found: Mapping[str, Any], looks: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """In short runs and in those of full length."""
    for name, look in looks.items():
        for one, runs in zip(axes, (evidence.searched(name), evidence.whole(name)), strict=True):
            start = evidence.start(name)
            points = sorted((r["settings"]["lr"] / start, r["validation_loss"]) for r in runs)
            one.plot(*zip(*points, strict=True), "o-", ms=4, **look)
            one.plot(*min(points, key=lambda point: point[1]), "o", ms=9, mfc="none", color=look["color"])
    for one, steps in zip(axes, (round(evidence.plan.TUNING * evidence.STEPS), evidence.STEPS), strict=True):
        one.set(xscale="log", xlim=(0.3, 11), xlabel="rate, times where its search began", title=f"{steps:,} steps")
        one.set_xticks([1 / 3, 1, 3, 9], ["⅓", "1", "3", "9"], minor=False)
        one.set_xticks([], minor=True)
    axes[0].set(ylabel="loss of the text that chooses")


FAR = 0.1  # from AdamW's loss
#: by name: what draws it, in how many panels, whether of the best alone
TOLD: dict[str, tuple[Callable[..., None], int, bool]] = {
    "ends": (ends, 1, False),
    "curves": (curves, 2, True),
    "rates": (over_rates, 2, True),
}


def raced(model: str, theme: str) -> bytes:
    """A small race from its committed curves: the best at the end in colour, the others behind them."""
    colours, out = THEMES[theme], io.BytesIO()
    entries = races.found(model)["optimizers"]
    order = sorted(entries, key=lambda name: entries[name]["curve"]["loss"][-1])
    front = [*order[:SHOWN], *([BESIDE] if BESIDE not in order[:SHOWN] else [])]
    with drawing(colours, out, 1, 9, 4.2) as axes:
        for name in reversed(order):
            curve = entries[name]["curve"]
            if name not in front:
                axes.semilogy(curve["step"], curve["loss"], color=colours["faint"], lw=0.9, zorder=1)
        for place, name in enumerate(front):
            curve, wide = entries[name]["curve"], 2.2 if name == BESIDE else 1.4
            axes.semilogy(curve["step"], curve["loss"], color=f"C{place % 10}", lw=wide, label=spec_class(name).title)
        axes.set(xlabel="step", ylabel="training loss")
        axes.grid(color=colours["faint"], lw=0.4)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return out.getvalue()


SHOWN, LATE = 9, 10  # curves of a figure; points at the start of each that are left out

#: every figure: its path on the site, what draws it, and of what
FIGURES: dict[str, tuple[Callable[[str, str], bytes], str, str]] = {
    f"assets/plots/{file}-{theme}.svg": (draw, of, theme)
    for draw, of, file in [
        *((at_work, name, name) for name in list_optimizers()),
        (speed, "two-blocks", "speed"),
        *((raced, model, f"race-{model}") for model in races.drawn()),
        *((told, of, f"evidence-{of}") for of in TOLD if evidence.drawn()),
    ]
    for theme in THEMES
}


def files() -> dict[str, Path]:
    """Every figure's file under build/, drawn anew where the code or the results have changed."""
    folder = ROOT / "build" / "plots" / state_of_code()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.iterdir():
        if old != folder:
            shutil.rmtree(old)
    found = {}
    for path, (draw, of, theme) in FIGURES.items():
        found[path] = folder / Path(path).name
        if not found[path].exists():
            found[path].write_bytes(draw(of, theme))
    return found


@functools.cache
def state_of_code() -> str:
    read = [
        *Path(__file__).parent.glob("*.py"),
        *(ROOT / "src" / "rlx_optim").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.json*"),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(read))).hexdigest()[:12]
