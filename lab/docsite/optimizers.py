"""A page for each optimizer, from its module's docstring, its spec and committed bench."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlx_optim import documentation, list_optimizers
from rlx_optim.cli.info import describe_rule
from rlx_optim.registry import spec_class
from rlx_optim.spec import REQUIRED

from . import arguments, bench, evidence
from .formulas import PAIRS, symbol
from .text import part, prose, stacked, table

NOTATION = (
    "p is the parameter, g its gradient, t the number of steps the parameter has taken, this one included; "
    "← replaces a value, and everything acts elementwise unless it is a matrix product. "
    "The [table below](#hyperparameters) says which symbol is which argument."
)
MATRIX, VECTOR = (3, 5), (3,)  # stand for n×m and n: two numbers that occur nowhere else
LETTERS = {3: "n", 5: "m"}
EXAMPLE = {"sgd": "lr=0.1, momentum=0.9, nesterov=True", "adafactor": "weight_decay=0.01"}  # where lr alone does not say enough


def indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}".rstrip() for line in lines)


# ---- sections -------------------------------------------------------------------------------------------------------------
def number(value: Any) -> str:
    return f"`{value!r}`".replace("e-0", "e-")


def hyperparameters(name: str, told: dict[str, Any], formulas: str) -> str:
    rows = []
    for field, f in told["hyperparameters"].items():
        sign = symbol(field, len(f["default"]) if isinstance(f["default"], (list, tuple)) else 1)
        seen = sign in formulas or field in PAIRS
        bounds = f["expected"].replace(">=", "≥").replace("<=", "≤").replace("<", "&lt;")
        bounds += ", fixed once there is state" if f["fixed"] else ""
        default = "required" if f["required"] else number(f["default"])
        what = f'{prose(f["meaning"], told["hyperparameters"])}<br><span class="note">{bounds}</span>'
        rows.append([f"`{field}`", rf"\({sign}\)" if seen else "", default, what])
    text = stacked(table(["argument", "symbol", "default", "what it is, and must be"], rows))
    if told["otherwise"]:
        settings = dict(told["otherwise"])
        title = spec_class(settings.pop("optimizer")).title
        given = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        text += f"\n\nTensors that it does not take go to `otherwise`, by default `{title}({given})`."
    calls = []
    for front_end, page in {"NumPy": "named", "PyTorch": "torch", "JAX": "optax"}.items():
        kind = spec_class(name)
        call = indented(arguments.signature(front_end, kind).splitlines())
        link = f"[Every argument](../api/{page}.md#{arguments.name_in(front_end, kind)}) with type and meaning."
        calls.append(f'=== "{front_end}"\n\n    ```python\n{call}\n    ```\n\n    {link}')
    text += "\n\nThe whole call in each front end:\n\n" + "\n\n".join(calls)
    return text + (
        "\n\nA number may also be a [schedule](../named.md#schedules), a function of the iteration. "
        "All front ends check these ranges; `rlx_optim.optax` takes optax's [names and defaults](../jax.md#the-factories)."
    )


def state(name: str) -> str:
    kind, meaning = spec_class(name), documentation.state(spec_class(name))
    given = {"lr": 0.1} if kind.fields["lr"].default is REQUIRED else {}
    spec = kind(**given)

    def sizes(shape: tuple[int, ...]) -> dict[str, str]:
        return {slot: "×".join(LETTERS.get(n, str(n)) for n in s.shape) for slot, s in spec.slots(shape).items()}

    matrix, vector = sizes(MATRIX), sizes(VECTOR) if spec.takes(VECTOR) is None else {}
    slots = [*dict.fromkeys([*matrix, *vector, *(n for n in meaning if n not in spec.counters())])]
    rows = [[f"`{s}`", matrix.get(s, "–"), vector.get(s, "–"), prose(meaning.get(s, ""), kind.fields)] for s in slots]
    rows += [[f"`{c}`", "a number", "a number", meaning[c]] for c in spec.counters()]
    for counter in meaning.keys() - {*slots, *spec.counters()}:
        rows.append([f"`{counter}`", "–", "–", meaning[counter]])
    size = sum(4 * math.prod(s.shape) for s in spec.slots((768, 3072)).values())
    share = size / (768 * 3072)
    return table(["name", "for an n×m matrix", "for a vector of n", "what it is"], rows) + (
        f"\n\nAt the defaults a 768×3072 matrix has {size:,} bytes of state, {share:.3g} a parameter: float32, whatever the "
        "parameter's own type (float64 for float64 parameters). A dash: not in this case."
    )


def usage(name: str, told: dict[str, Any]) -> str:
    """The same optimizer in three front ends."""
    title, field = spec_class(name).title, told["hyperparameters"]["lr"]
    given = EXAMPLE.get(name) or f"lr={field['default']!r}".replace("e-0", "e-")
    factory = told["names"]["jax"].rpartition(".")[2]
    numpy_curvature = torch_curvature = jax_curvature = ""
    if spec_class(name).observes:
        numpy_curvature = """for name, g in grads.items():  # every ten steps or so, your estimate of the Hessian's diagonal
    opt.update_hessian(name, g * g)
"""
        torch_curvature = "opt.update_hessian(lambda: model(x).square().mean(), every=10)  # Hutchinson's estimate\n"
        jax_curvature = ", obj_fn=loss"
    blocks = {
        "NumPy": f"""import numpy as np
import rlx_optim

params = {{"w": np.ones((64, 32), np.float32), "b": np.zeros(64, np.float32)}}
grads = {{name: np.full_like(p, 0.1) for name, p in params.items()}}

opt = rlx_optim.{title}({given})
{numpy_curvature}opt.step_all(params, grads)  # in place""",
        "PyTorch": f"""import torch
from rlx_optim.torch import {title}

model, x = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)), torch.randn(16, 8)
opt = {title}(model, {given})
{torch_curvature}model(x).square().mean().backward()
opt.step()
opt.zero_grad()""",
        "JAX": f"""import jax.numpy as jnp
from rlx_optim.optax import {factory}

params = {{"w": jnp.ones((64, 32)), "b": jnp.zeros(64)}}
tx = {factory}({given.replace("lr=", "learning_rate=")})
state = tx.init(params)  # updates, state = tx.update(grads, state, params{jax_curvature})""",
    }
    tabs = []
    for label, code in blocks.items():
        body = indented(["```python", *code.splitlines(), "```"])
        tabs.append(f'=== "{label}"\n\n{body}')
    return "\n\n".join(tabs)


def page(name: str) -> str:
    """The whole page."""
    told = describe_rule(name)
    fields = told["hyperparameters"]
    formulas = part(told["formulas"], fields)
    conventions = part(told["conventions"], fields)
    title, summary = spec_class(name).title, spec_class(name).summary
    heading = told["title"].partition(": ")[2].rstrip(".")
    measured = bench.measured(name)
    sections = [
        f"# {title}",
        f"*{heading[0].upper()}{heading[1:]}.*{{ .lead }}",
        part(told["idea"], fields),
        "## Formulas",
        NOTATION,
        formulas,
        "## Use it",
        usage(name, told),
        "## Hyperparameters",
        hyperparameters(name, told, formulas + conventions),
        "## State",
        state(name),
        "## Conventions, and other libraries",
        conventions,
        "## When, and what it costs",
        part(told["when"], fields),
        *([measured] if measured else []),
        *([f"[On a GPT of 25 M parameters](../evidence.md): {evidence.sentence(name)}."] if evidence.result(name) else []),
        "## Seen at work",
        f"![{title} and AdamW on the handwritten digits](../assets/plots/{name}-light.svg#only-light)\n"
        f"![{title} and AdamW on the handwritten digits](../assets/plots/{name}-dark.svg#only-dark)",
        CAPTION,
        f"*In other words*: `rlx-optim info {name}` prints this page's text, [the chooser](../choose.md) compares them all, "
        f"[the reference](../api/named.md) has the methods.",
    ]
    return f"---\ntitle: {title}\ndescription: {summary}\n---\n\n" + "\n\n".join(sections) + "\n"


CAPTION = (
    "Made when this page was built, by the code it documents. Left: the network of `make race` on real handwritten digits, its "
    "loss on each batch smoothed over 25 steps, at the race's settings. Right: the path through a curved valley (Rosenbrock's, "
    "exact gradients), at the best learning rate of a small grid that stays in the picture. Both fall along half a cosine. One "
    "small run shows how a rule moves, not which is best."
)


def index() -> str:
    """The list of all."""
    rows = []
    for name in list_optimizers():
        told = describe_rule(name)
        bytes_ = told["state_bytes_per_parameter"]
        rows.append([f"[{told['class']}]({name}.md)", told["summary"], f"{bytes_:.3g}", bench.speed(name)])
    return (
        "---\ntitle: All optimizers\n---\n\n# The optimizers\n\nEach is one file in `src/rlx_optim/rules/`, run by every engine. "
        "Which one is for you: [the chooser](../choose.md).\n\n"
        + table(["optimizer", "what it is", "bytes of state a parameter", "ns a parameter and step"], rows, right=(2, 3))
        + "\n\nState is that of a 1024×1024 matrix at the defaults (SGD with momentum). Time is "
        + bench.source("two-blocks")
        + "; see [the benchmarks](../benchmarks.md).\n"
    )


def pages() -> dict[str, str]:
    """Every generated page of this part: its path under docs/ and its text."""
    return {"optimizers/index.md": index()} | {f"optimizers/{name}.md": page(name) for name in list_optimizers()}
