"""Which tensor goes to which rule, and why: names and shapes in, a rule and a reason out, the same for every front end.

The user's word comes first; then the shape, which may not fit; then what the front end knows of the module; then the name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .spec import Shape, Spec

OWN, OTHERWISE = "own", "otherwise"
#: parts that torch's wrappers put into names, wherever they stand; DistributedDataParallel's "module" counts at the front alone
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: what torch.nn.utils.parametrize makes of "weight"; weight_norm and spectral_norm of old keep theirs in the module itself
PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original\d*$")
# Names as `normalize_name` gives them: lower case, words joined by "_", parts by ".".
EMBEDDING = re.compile(
    r"(^|[._])(emb|embed|embeddings?|wte|wpe)\d*([._]|$)|(^|[._])embedder(\.|$)|(^|\.)relative_(attention|position)_bias"
    r"|(^|\.)(cls|class|mask|dist|distillation|reg|register)_tokens?(\.|$)"
)
# A whole part of the name: "multi_head_attention" and "heads" are none, nor are the hidden layers "pre_logits", "pre_classifier".
# "output", "fc_out" and "proj_out" are heads at the top only: deeper they are hidden (BERT's output.dense, GPT-J's mlp.fc_out).
HEAD = re.compile(
    r"(^|\.)((?!(pre|multi|per|attn|attention)_)(\w+_)?((lm)?head|classifier|unembed(ding)?|logits(_dense)?|output_layer)(_?\d+)?"
    r"|score|qa_outputs|embed_out)(\.|$)|^((model|net|network|params)\.)*(output|fc_out|proj_out)(\.|$)"
)


# ---- names ------------------------------------------------------------------------------------------------------------------
def bare(name: str) -> str:
    """A parameter's name without what wrappers of the model put into it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def original(name: str) -> str:
    """A name as it would be without wrappers and parametrizations."""
    return PARAMETRIZED.sub(r"\1", bare(name))


def normalize_name(name: str) -> str:
    """A name in the one spelling that patterns are written for: haiku's "net/~/lmHead" is "net.lm_head"."""
    return re.sub(r"[./~]+", ".", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", original(name))).lower()


def quote(names: Any, most: int = 5) -> str:
    """Names in a message: quoted, sorted, and from the sixth on counted only."""
    shown = sorted(map(repr, names))
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def reason_by_name(name: str) -> str | None:
    """What a name says of a tensor that is no hidden matrix."""
    name = normalize_name(name)
    if HEAD.search(name):
        return "output head (by name)"
    return "embedding (by name)" if EMBEDDING.search(name) else None


def first_match(table: Mapping[str, Any], name: str | None) -> tuple[str, Any] | None:
    """The first (pattern, value) whose glob matches a name, as it is or without such additions."""
    names = () if name is None else (name, bare(name), original(name))
    return next((item for item in table.items() if any(fnmatch.fnmatchcase(each, item[0]) for each in names)), None)


# ---- decisions --------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A rule that tensors may go to: its spec, and what the front end knows it by."""

    spec: Spec
    rule: Any


#: what the user wishes for a tensor ("own", "otherwise" or a choice), and by which word
Wish = tuple[str | Choice, str]


def decide(
    owner: str, name: str | None, shape: Shape, own: Choice, otherwise: Choice | None, wish: Wish | None = None,
    kind: str | None = None,
) -> tuple[Choice, str]:  # fmt: skip
    """The rule that takes a tensor, and why where it is not the first. kind: what the front end knows of its module."""
    wished, why = wish or (None, "")
    if wished == OTHERWISE:
        if otherwise is None:
            raise ValueError(f"{owner}: {name!r} is to go to otherwise ({why}), but there is no otherwise")
        return otherwise, why
    first = wished if isinstance(wished, Choice) else own
    unsupported = first.spec.takes(shape)
    if first is not own and (unsupported is None or first.spec.accepts_any_shape):
        return first, why
    if otherwise is not None:
        reason = unsupported or (None if wish else kind or reason_by_name(name or ""))
        return (otherwise, reason) if reason else (own, "")
    if unsupported is not None and not first.spec.accepts_any_shape:
        what = "a parameter" if name is None else repr(name)
        raise ValueError(f"{owner}: {what} has shape {shape}: {unsupported}; give otherwise=AdamW(…) for such tensors")
    return first, "no otherwise" if unsupported else ""


class Router:
    """Decides for one optimizer by its `route`, and remembers which of the user's patterns were of use.

    route: a mapping from glob to "own", "otherwise" or an optimizer, or a function of (name, parameter) that says True (own),
    False (otherwise), an optimizer, or None (decide as usual). admit: makes a choice of such an optimizer, or refuses it.
    """

    def __init__(self, owner: str, otherwise: Choice | None, route: Any, admit: Callable[[Any], Choice]):
        self.owner, self.otherwise, self.admit = owner, otherwise, admit
        if route is not None and not isinstance(route, Mapping) and not callable(route):
            raise TypeError(f"{owner}: route must be a dict of patterns or a function of (name, parameter), got {route!r}")
        self.route = {k: self._meant(v) for k, v in route.items()} if isinstance(route, Mapping) else route
        self.used: set[str] = set()
        self.unnamed = 0  # matrices of which nothing but the shape was known
        self.warned = False  # that there are such

    def decide(self, own: Choice, name: str | None, shape: Shape, parameter: Any, kind: str | None = None) -> tuple[Choice, str]:
        """The rule that takes a parameter, and why. shape: what the rule would see of it."""
        wish = self._wish(name, parameter)
        choice, why = decide(self.owner, name, shape, own, self.otherwise, wish, kind)
        blind = name is None and wish is None and own.spec.matrix and len(shape) > 1
        if blind and choice is own and self.otherwise is not None:
            self.unnamed += 1
        return choice, why

    def warn(self, depth: int) -> None:
        """Once, where routing went by shapes alone. depth: how many calls the user is away."""
        if self.unnamed > 1 and not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.owner}: it has matrices without names, so that embeddings and output heads among them are not told "
                "from hidden matrices; give the model, or model.named_parameters(), or say route=…",
                stacklevel=depth + 1,
            )

    def _wish(self, name: str | None, parameter: Any) -> Wish | None:
        if callable(self.route):
            meant = self.route(bare(name or ""), parameter)
            return None if meant is None else (self._meant(meant), "route")
        found = first_match(self.route or {}, name)
        if found is None:
            return None
        self.used.add(found[0])
        return found[1], f"matches {found[0]!r}"

    def _meant(self, value: Any) -> str | Choice:
        if isinstance(value, str):
            if value not in (OWN, OTHERWISE):
                raise ValueError(
                    f'{self.owner}: route sends to "own", "otherwise" or an optimizer such as rlx_optim.Lion(lr=1e-4), '
                    f"got {value!r}"
                )
            return value
        return (OWN if value else OTHERWISE) if value in (True, False) else self.admit(value)

    def check_used(self) -> None:
        if isinstance(self.route, Mapping) and (unused := set(self.route) - self.used):
            raise ValueError(f"{self.owner}: route pattern {quote(unused)} matches no parameter name")


# ---- reports ----------------------------------------------------------------------------------------------------------------
def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of words, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def sized(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def report(rows: Sequence[tuple[str, Shape, type[Spec], str]]) -> str:
    """A table: parameter, shape, rule, why."""
    cells = [(bare(name), sized(shape), kind.__name__, why) for name, shape, kind, why in rows]
    return table([("parameter", "shape", "rule", "why"), *cells])
