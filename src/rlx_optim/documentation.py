"""What is said of an optimizer's arguments and state by help(), `rlx-optim info` and the reference.

It comes from the docstrings in its file; what the front ends have beside hyperparameters is in the tables here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .registry import documentation, nearest, spec_class
from .spec import Otherwise, Spec

NONFINITE = "Literal['propagate', 'raise', 'skip']"
Beside = Mapping[str, tuple[str, str]]
#: arguments that are no hyperparameters, by front end: their type, and what they are
NAMED: Beside = {
    "otherwise": ("NamedOptimizer | None", "who steps the tensors that this rule does not take"),
    "groups": (
        "Sequence[Mapping[str, Any]] | None",
        'settings by name: [{"match": "*.bias", "weight_decay": 0.0}]; the first pattern that matches holds, "use" routes',
    ),
    "engine": ("Any", '"auto", "cpu", "reference", an installed engine\'s name, or an Engine'),
    "precision": ("Literal['float32', 'float64']", "of the cpu engine's arithmetic; state is as wide as the parameters"),
    "nonfinite": (NONFINITE, "what a gradient that is not finite does: goes through, is refused, or leaves the step out"),
    "skip_above": (
        "float | None",
        "leave out a step whose gradient norm, or loss, is so many standard deviations above the mean of the last 128",
    ),
}
TORCH: Beside = {
    "params": ("Params", "parameters, named parameters, groups of them, or a model, whose modules then route them"),
    "maximize": ("bool", "step up the gradient instead of down"),
    "engine": ("Literal['auto', 'cpu', 'torch', 'triton']", "who computes; engine_report() says who did, and why"),
    "nonfinite": NAMED["nonfinite"],
    "skip_above": NAMED["skip_above"],
    "capturable": ("bool", "keep step counts and settings on the device, for CUDA graphs"),
    "amp_scaling": (
        "bool",
        "GradScaler hands over its scale and its verdict, which saves a pass; who clips in between (Lightning) will then refuse",
    ),
    "fused": ("bool | None", "torch.optim's; taken, and without effect: steps are fused wherever `engine` can"),
    "foreach": ("bool | None", "torch.optim's; taken, and without effect"),
    "differentiable": ("bool", "torch.optim's; True is refused, for steps are not recorded by autograd"),
    "offload": (
        "Literal['cpu'] | Mapping[str, Literal['cpu'] | None] | None",
        'keep state in the host\'s memory, of parameters on a CUDA device: of all, or by name: {"*embed*": "cpu"}',
    ),
    "otherwise": NAMED["otherwise"],
    "route": ("Route", 'by name or function: {"*embed*": "otherwise"}, or an optimizer in place of the word'),
    "split": (
        "Mapping[str, int | Sequence[int]] | None",
        'parameters that are several matrices: {"*qkv.weight": 3}, or (2048, 256, 256) for parts of so many rows or columns; '
        "None: what torch's own modules pack, and fused matrices and experts as a model's config says",
    ),
    "heads": (
        "bool | Mapping[str, int]",
        'take queries, keys and values head by head: {"*q_proj.weight": 32, "*k_proj.weight": 8}; True: as a model says',
    ),
    "hessian_seed": ("int", "of Hutchinson's estimates"),
    "process_group": ("Any", "its ranks share out matrices that all of them have"),
}
OPTAX: Beside = {
    "mask": (
        "Any | Callable[[Any], Any]",
        "a tree of booleans like the parameters, or a function that gives it: whose weights decay",
    ),
    "otherwise": (
        "NamedOptimizer | optax.GradientTransformation | Literal['default'] | None",
        "who steps the leaves that this rule does not take",
    ),
    "route": (
        "Mapping[str, NamedOptimizer | optax.GradientTransformation | str] | Callable[[str, Any], bool | None]",
        'by path or function: {"*embed*": "otherwise"}, or an optimizer in place of the word',
    ),
    "stacked": ("Mapping[str, int]", 'leaves that are several matrices: {"*experts*": 1}, how many leading axes count them'),
    "update_interval": ("int | jax.Array", "steps from one estimate of the curvature to the next"),
    "seed": ("int", "of Hutchinson's estimates"),
}


def words(text: str | None) -> dict[str, str]:
    """What a docstring says of names: "word: text", over one or more lines."""
    found: dict[str, str] = {}
    for line in inspect.cleandoc(text or "").splitlines():
        if start := re.fullmatch(r"(\w+): (.*)", line):
            found[start[1]] = start[2]
        elif found:
            found[next(reversed(found))] += f" {line.strip()}"
    return found


def state(kind: type[Spec]) -> dict[str, str]:
    """What each slot and counter of the state is."""
    own = [getattr(kind, method) for method in ("slots", "counters") if getattr(kind, method) is not getattr(Spec, method)]
    return {name: text for method in own for name, text in words(method.__doc__).items()}


def meanings(kind: type[Spec], beside: Beside) -> dict[str, str]:
    """What each argument is, and must be, of the hyperparameters and of a front end's own."""
    explanations = words(kind.__doc__)
    found = {name: text for name, (_, text) in beside.items()}
    for name, field in kind.fields.items():
        found[name] = (
            f"{explanations.get(name, field.meaning)} ({field.expected}"
            f"{'; fixed once there is state' if field.fixed else ''})".lstrip()
        )
    if "otherwise" in found:
        found["otherwise"] += f"; None: {'this rule takes them all' if kind.accepts_any_shape else 'they are refused'}"
    if beside is OPTAX:
        found["learning_rate"] = found["lr"]
        found |= {n: f"{found[n]}; None: the rule's own, {f.default!r}" for n, f in kind.fields.items() if f.annotation == "int"}
        found |= {keyword: found[each.field] for keyword, each in kind.optax.settings.items() if each.field in found}
        for pair, letter in kind.optax.spread.items():
            if pair in kind.fields:
                found |= {f"{letter}{i}": f"number {i} of: {found[pair]}" for i in range(1, len(kind.fields[pair].default) + 1)}
    return found


def describe_class(kind: type[Spec], signature: inspect.Signature, beside: Beside) -> str:
    """The documentation of a class or factory: that of the rule, and its arguments with type, default and meaning."""
    explanations, lines = meanings(kind, beside), ["Arguments."]
    for name, parameter in signature.parameters.items():
        if name != "self":
            lines.append(
                f"    {name}: {parameter.annotation}"
                + ("" if parameter.default is parameter.empty else f" = {format_default(parameter.default)}")
            )
            lines += textwrap.wrap(explanations[name], 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join([documentation(kind), "", *lines])


#: where a torch class has its groups
GROUPS = '; groups stand in params, as for any torch optimizer: [{"params": …, "weight_decay": 0.0}, …]'
#: what others call it
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("lr",), "lr": ("learning_rate",), "wd": ("weight_decay",), "decay": ("weight_decay",),
    "weight_decay_mask": ("mask",), "betas": ("b1",), "beta1": ("betas", "b1"), "beta2": ("betas", "b2"),
    "b1": ("betas", "beta1"), "b2": ("betas", "beta2"),
}  # fmt: skip


def unknown_keyword_error(owner: str, given: Iterable[str], known: Sequence[str]) -> TypeError:
    """The error about keywords that nobody has, with what they are called here."""
    bad = sorted(set(given) - set(known))
    meant: dict[str, str] = {}
    for word in bad:
        found = [*(each for each in SYNONYMS.get(word, ()) if each in known), *filter(None, [nearest(word, known)])]
        meant |= {word: found[0]} if found else {}
    hint = "".join(f"; {word} is called {name} here" for word, name in meant.items())
    hint += GROUPS if "groups" in bad and "params" in known else ""
    return TypeError(f"{owner}: unknown hyperparameter {', '.join(map(repr, bad))}; known are {', '.join(known)}{hint}")


def bind_arguments(
    owner: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """A call's arguments, or an error that says which there are."""
    known = [name for name in signature.parameters if name != "self"]
    if not kwargs.keys() <= set(known):
        raise unknown_keyword_error(owner, kwargs, known)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as problem:
        raise TypeError(f"{owner}: {problem}; known are {', '.join(known)}") from None


def missing_library_error(problem: ModuleNotFoundError, module: str, extra: str, libraries: Sequence[str]) -> ModuleNotFoundError:
    """The error where a library is not installed, with what to do; any other module that is missing stays what it is."""
    name = (problem.name or "").partition(".")[0]
    if name not in libraries:
        return problem
    return ModuleNotFoundError(f'{module} needs {name}: pip install "rlx-optim[{extra}]"', name=problem.name)


def format_default(default: object) -> str:
    """A default as one writes it."""
    if isinstance(default, Otherwise):
        return f"{spec_class(default.name).title}({', '.join(f'{k}={v!r}' for k, v in default.settings.items())})"
    return repr(default)
