"""What an optimizer is, apart from where it runs: hyperparameters with ranges, state by name, one update.

A `Spec` is a frozen, validated set of hyperparameters with the mathematics attached. Its fields are declared once, in the
file of the rule, and give the constructor signatures, the checks, the messages and the documentation of every front end.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from . import modifiers, renamed, rounding, storage
from .fields import REQUIRED, Field, betas, choice, flag, function, integer, real, reals, triples

#: what the file of a rule has from here: fields too
__all__ = [
    "KEY", "MODIFIERS", "REQUIRED", "TRAINED", "Field", "Foreign", "Optax", "Otherwise", "Shape", "Slot", "Spec", "Torch",
    "betas", "choice", "flag", "function", "integer", "like", "real", "reals", "same", "triples",
]  # fmt: skip
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Otherwise:
    """The default optimizer for tensors that are not for this rule: a name in the registry and its settings."""

    name: str
    settings: Mapping[str, Any]


# ---- what differs in a front end ------------------------------------------------------------------------------------
def same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A setting that others have in other words: our field, how to read their value and how to write ours."""

    field: str
    read: Callable[[Any], Any] = same
    write: Callable[[Any], Any] = same


@dataclasses.dataclass(frozen=True)
class Torch:
    """What is otherwise in rlx_optim.torch, mostly as torch.optim's class has it.

    like: that class's name. defaults: where they are not the fields'. shared: the last argument that both have; those after it
    are keywords, so that a place means the same in both. settings: what that class calls them. slots: names in a state_dict,
    where the meaning does not give them. decoupled: which weight decay this rule has, where that class can do both; assumed:
    which one a state dict has that does not say. telltale: a setting that only this optimizer's groups have. counts: that class
    counts its steps. in_dtype: a group, as it is for parameters of a dtype with this epsilon. annotations: of defaults that a
    field would not take.
    """

    like: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shared: str = ""
    settings: Mapping[str, Foreign] = dataclasses.field(default_factory=dict)
    slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
    decoupled: bool | None = None
    assumed: bool = False
    telltale: str = ""
    counts: bool = True
    in_dtype: Callable[[Mapping[str, Any], float], Mapping[str, Any]] | None = None
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Optax:
    """What is otherwise in rlx_optim.optax, mostly as optax has it. Its keywords are the fields, lr as learning_rate.

    factory: its name, if it is not the rule's. defaults: by keyword, where they are not the fields'; an integer that is not
    named here shapes the program, so that it cannot be traced. settings: keywords that are not called like their field.
    spread: tuples whose numbers are keywords of their own (betas: b1, b2). positional: the keywords that come first and may go
    without their names. without: fields that have no keyword. state: the parts of optax's state, our slots and their names there.
    """

    factory: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Foreign] = dataclasses.field(default_factory=dict)
    spread: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"betas": "b"})
    positional: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    state: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


# ---- state ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Slot:
    """One buffer of state: its shape, what it starts as, and which of the parameter's last two axes it lacks.

    `drop` says how the buffer lines up with the parameter in a rule: (-1,) is one number per row, (-2,) one per column; None
    is one number for the whole tensor (shape ()), which rules and `E.each` read and `E.each` gives anew.
    A `factor` does not line up with the parameter at all; matrix rules use those. eye: it starts as a scaled identity.
    `meaning` says what is kept, in words that rules share: "first moment", "second moment", "largest second moment", "row",
    "column", "curvature", "last gradient", "factor", "basis", "key". Its first words give the name in torch's state dicts
    (`torch.names`); state goes over to another optimizer where all the words are the same; it may be kept in fewer bits where
    `storage` knows them, and `storage` here says in which.
    """

    shape: Shape
    fill: float = 0.0
    eye: bool = False
    drop: tuple[int, ...] | None = ()
    factor: bool = False
    meaning: str = ""
    storage: str = storage.EXACT


def like(shape: Shape, *names: str, **meanings: str) -> dict[str, Slot]:
    """Slots of the parameter's own shape, from zero, with what they mean: like(shape, m="first moment"). One that means nothing
    to anybody else is just named."""
    return {name: Slot(shape, meaning=meaning) for name, meaning in {**dict.fromkeys(names, ""), **meanings}.items()}


#: what slots cannot be called: values that a step has beside them, and what front ends keep under these names
TAKEN = ("p", "g", "u", "change", "step", "shrink", "rate", "batch", "low")


def slot_error(name: str, slot: Any, shape: Shape, slots: Mapping[str, Any], counters: Mapping[str, float]) -> str | None:
    """Why a tensor of this shape cannot have such a slot; None if it can. Engines go by what it says: no memory tells them."""
    if not isinstance(slot, Slot):
        return f"{name!r} is {slot!r:.80}; a Slot is needed, such as like(shape, {name}=…) gives"
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        return f"a slot is called {name!r}; a name of letters, digits and _ is needed that does not begin with _"
    if name in TAKEN or name in counters:
        return f"a slot is called {name!r}, which a {'counter' if name in counters else 'value of every step'} is; rename it"
    if whose := next((each for each in slots for end in storage.BESIDE if name == f"{each}{end}"), None):
        return f"a slot is called {name!r}, as is what {whose!r} has beside it in fewer bits; rename it"
    if slot.factor:
        return None
    kept = () if slot.drop is None else tuple(n for axis, n in enumerate(shape, -len(shape)) if axis not in slot.drop)
    if tuple(slot.shape) != kept:
        lacks = "" if not slot.drop else f" with drop={slot.drop}"
        return (
            f"{name!r} has shape {tuple(slot.shape)}, but lines up with the parameter{lacks}: {kept} is needed; matrix rules say "
            "factor=True of what does not"
        )
    return None


#: what a slot means that noise is drawn by (`random.key`): shape (4,), from zero
KEY = "key"
#: where a parameter is kept while the point to evaluate at takes its place
TRAINED = "p"


# ---- modifiers ------------------------------------------------------------------------------------------------------
QUOTED = ", ".join(f'"{each}"' for each in storage.FORMATS)
#: hyperparameters that every rule has beside its own: `modifiers` says what they do
MODIFIERS: dict[str, Field] = {
    "cautious": dataclasses.replace(
        flag(False), meaning="step only where the direction agrees with the gradient, and as much further there."
    ),
    "decay": dataclasses.replace(
        choice("decoupled", "cautious", "hyperball", fixed=False),
        meaning="how weight_decay acts: everywhere, only where the step shrinks p as well, or not at all: p keeps its norm.",
    ),
    "state_dtype": Field(
        "float32",
        f"one of {QUOTED}, or a mapping from slots to these",
        storage.check_format,
        f"Literal[{QUOTED}] | Mapping[str, str]",
        structural=True,
        fixed=True,
        meaning="what large tensors' moments are kept in (docs/memory.md).",
    ),
    "rounding": dataclasses.replace(
        choice(*rounding.ROUNDINGS, fixed=False),
        meaning="how bfloat16 and float16 parameters take a step (docs/half.md); float32 and float64 have no use for it.",
    ),
}


#: modifiers that may be unsound for a rule, as `Spec.incompatible` calls them
UNSOUND = ("cautious=True", "decay='cautious'", "decay='hyperball'")
UNDECAYED = "it decays nothing beside the step (weight_decay joins the gradient or the direction, or there is none)"


# ---- the optimizer --------------------------------------------------------------------------------------------------
class Spec(abc.ABC):
    """A frozen set of hyperparameters and the update they parametrise. Subclasses are the files in `rules/`, and others'."""

    fields: ClassVar[dict[str, Field]] = {}
    cautious: bool
    decay: str
    state_dtype: Any
    rounding: str
    lr: Any
    #: the name of its classes in the front ends; the class's own unless said
    title: ClassVar[str] = "Spec"
    #: by which it is made and saved: in lower case; the title unless said
    name: ClassVar[str] = "spec"
    #: other names by which it may be made
    aliases: ClassVar[tuple[str, ...]] = ()
    #: what it is, in one line
    summary: ClassVar[str] = ""
    #: what differs in a front end
    torch: ClassVar[Torch] = Torch()
    optax: ClassVar[Optax] = Optax()
    #: the unit of `update` is a stack of tensors of equal shape, step count and hyperparameters
    matrix: ClassVar[bool] = False
    #: without an `otherwise` this rule steps every tensor; False: it refuses what it does not take. A class that says `takes` has
    #: False unless it says True
    accepts_any_shape: ClassVar[bool] = True
    #: `update` branches on the step count, which must then be known to the host
    step_dependent: ClassVar[bool] = False
    #: `update` uses factors in products, averages of Gram matrices and `E.jointly` alone: an engine need not stack them
    unstacked_factors: ClassVar[bool] = False
    #: those of its `decisions` after which the host asks the device what it found, or brings something there: no CUDA graph can
    #: hold such a step
    syncs_on: ClassVar[tuple[str, ...]] = ()
    #: it takes estimates of the Hessian's diagonal into a slot h, through a second update `observe`, and counts `estimates`
    observes: ClassVar[bool] = False
    #: the slot that leads from p to the point to evaluate at, which is p plus it; None: p itself
    evaluated: ClassVar[str | None] = None
    #: what its counters may be, as fields say it: one outside is refused where state is loaded, before a step divides by zero
    counter_ranges: ClassVar[Mapping[str, Field]] = {}
    #: the numbers that its `commit` reads
    committed: ClassVar[tuple[str, ...]] = ("shrink", "step")
    #: what a cautious step is scaled by, from how many coordinates are kept and lost; None where `update` masks by itself
    caution: ClassVar[Callable[..., Any] | None] = staticmethod(modifiers.by_share)
    #: why a modifier is not for this rule, by its name in `UNSOUND`
    incompatible: ClassVar[Mapping[str, str]] = {}
    #: the optimizer for tensors this one does not take; None where it takes all
    otherwise_default: ClassVar[Otherwise | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        if words := own.keys() & vars(Spec).keys():
            raise TypeError(f"{cls.__name__}: {min(words)} is a word of Spec and cannot be a hyperparameter")
        if words := own.keys() & MODIFIERS:
            raise TypeError(f"{cls.__name__}: every rule has {min(words)} already (docs/modifiers.md); give it another name")
        renamed.take_attributes(cls)
        if words := cls.incompatible.keys() - set(UNSOUND):
            known = ", ".join(UNSOUND)
            raise TypeError(f"{cls.__name__}: incompatible has {min(words)!r}, which is no modifier; known are {known}")
        if "takes" in vars(cls):
            cls.accepts_any_shape = vars(cls).get("accepts_any_shape", False)
        cls.title = vars(cls).get("title", cls.__name__)
        cls.name = vars(cls).get("name", cls.title.lower())
        cls.aliases = vars(cls).get("aliases", ())
        cls.fields = {**{name: field for name, field in cls.fields.items() if name not in MODIFIERS}, **own, **MODIFIERS}
        for name in own:
            delattr(cls, name)

    def __init__(self, **values: Any) -> None:
        owner = self.title
        unknown = set(values) - set(self.fields)
        if unknown:
            raise TypeError(
                f"{owner}: unknown hyperparameter {', '.join(sorted(map(repr, unknown)))}; known are {', '.join(self.fields)}"
            )
        for name, field in self.fields.items():
            value = values.get(name, field.default)
            if value is REQUIRED:
                raise TypeError(f"{owner}: {name} is required ({field.expected})")
            self.__dict__[name] = field.validated(owner, name, value)
        self.check()
        self.check_modifiers()
        self.check_storage()

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __repr__(self) -> str:
        return f"{self.title}({', '.join(f'{k}={v!r}' for k, v in self.values().items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def values(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def replace(self, **values: Any) -> Self:
        return type(self)(**{**self.values(), **values})

    def refuse(self, message: str) -> ValueError:
        return ValueError(f"{self.title}: {message}")

    def check_modifiers(self, traced: bool = False) -> None:
        """Refuse a modifier that is unsound for this rule. traced: numbers are not known yet, and the commit looks."""
        asked = dict(zip(UNSOUND, (self.cautious, self.decay == "cautious", self.decay == "hyperball"), strict=True))
        reasons = {**self.incompatible}
        if type(self).commit is not Spec.commit:
            reasons |= dict.fromkeys(UNSOUND[1:], "it has a commit of its own, which says what happens beside the step")
        elif self.decay == "cautious" and not traced and not self.decays():
            reasons["decay='cautious'"] = UNDECAYED
        for modifier in (each for each, on in asked.items() if on and each in reasons):
            raise self.refuse(f"{modifier} is not for this rule: {reasons[modifier]}")

    def check_storage(self) -> None:
        """Refuse formats of slots that this rule does not have, or keeps exact."""
        if isinstance(self.state_dtype, storage.Formats):
            shapes = [shape for shape in ((), (64,), (64, 64)) if not self.takes(shape)]
            slots = {name: slot for shape in shapes for name, slot in self.slots(shape).items()}
            if problem := storage.unsupported_reason(slots, self.state_dtype):
                raise self.refuse(problem)

    def zero_norm_error(self, name: str, where: str) -> ValueError:
        """What is said of a tensor of zeros that is to keep its norm. where: how it is given another decay."""
        return self.refuse(
            f"{name!r} is all zeros, and decay='hyperball' keeps the norm of a tensor: it would stay so; start it from something "
            f"else, or decay it otherwise: {where}"
        )

    # What a rule's file says --------------------------------------------------------------------------------------
    def check(self) -> None:  # noqa: B027
        """Conditions on several hyperparameters at once."""

    def decays(self) -> bool:
        """Whether weight_decay is taken from p beside the step: there is a number `shrink`. Where `update` makes it, say so."""
        return self.scalars(1, self.counters()).get("shrink") is not None

    def takes(self, shape: Shape) -> str | None:
        """None if this rule takes a tensor of this shape, else why not."""
        return None

    def mixed_shapes(self) -> bool:
        """Whether a matrix rule's `update` takes tensors of unequal shapes at once: with them it may use `E.map`,
        `E.by_shape` and `E.orthogonalize` alone."""
        return False

    def graph_safe(self) -> bool:
        """Whether a matrix rule's step can be recorded and replayed: of p and g nothing but maps are made, what `update` reads of
        the hyperparameters itself are not floats (those reach it through `scalars`), and it moves no counter itself."""
        return False

    @abc.abstractmethod
    def slots(self, shape: Shape) -> dict[str, Slot]:
        """The state of a tensor of this shape."""

    def stored_slots(self, shape: Shape) -> dict[str, Slot]:
        """The state of a tensor of this shape, with what it is kept in."""
        slots = self.slots(shape)
        if not isinstance(slots, Mapping):
            raise self.refuse(f"slots({shape}) must return a dict of Slots by name, got {slots!r:.80}; does it lack a return?")
        for name, slot in slots.items():
            if problem := slot_error(name, slot, shape, slots, self.counters()):
                raise self.refuse(f"slots({shape}): {problem}")
        return storage.assign_storage(slots, self.state_dtype)

    def counters(self) -> dict[str, float]:
        """Numbers of state kept beside the slots, with their first value; `scalars`, `decisions` or the `update` of a matrix rule
        return the next ones. One called `started` is 1 once the averages have begun: a state without it has none yet."""
        return {}

    def corrections(self, t: int, counters: Mapping[str, float]) -> tuple[float, float]:
        """By what the rule divides its first and its second moment at step t, the counters being those after it."""
        betas = self.__dict__.get("betas")
        return (1.0, 1.0) if betas is None else (1 - betas[0] ** t, 1 - betas[1] ** t)

    def momentum_gain(self) -> float:
        """How many times the average of the gradients its first moment is, in the long run."""
        return 1.0

    def scalars(self, t: int, counters: Mapping[str, float]) -> dict[str, Any]:
        """Every number the rule needs at step t, by the rule's argument names, in float64."""
        return {}

    def decisions(self, t: int, counters: Mapping[str, float]) -> dict[str, Any]:
        """What a matrix rule's `update` branches on (`E.cond`), by name, and the next values of counters that this rests on: like
        `scalars`, but of what the host has counted, also where steps are counted on a device."""
        return {}

    @abc.abstractmethod
    def update(self, E: Any, x: Any) -> Any:
        """The direction u of a step on a bundle x, in the words of engine E. Unless `matrix`, tensors of a bundle share the
        structural fields alone: everything else reaches the rule through `scalars`."""

    def commit(self, E: Any, x: Any) -> Any:
        """How far p moves along u: `change`, which is then taken from p, once a step. step and shrink are numbers of the rule."""
        if self.decay == "cautious" and x.get("shrink") is None:
            raise self.refuse(f"decay='cautious' is not for this rule: {UNDECAYED}")
        return modifiers.committed(self.way(), E, x)

    def way(self) -> str:
        """How weight_decay acts: `decay`, unless a convention of the rule says otherwise."""
        return self.decay

    def mask(self, E: Any, x: Any) -> Any:
        """What `update` gave, as it is committed: masked where `cautious`."""
        return modifiers.masked(E, x, self.caution) if self.cautious and self.caution is not None else x

    def numbers(self, t: Any, counters: Mapping[str, Any], decided: Any = None) -> dict[str, Any]:
        """What `scalars` and `decisions` give, and what modifiers need beside. decided: what `decisions` gave already."""
        found: dict[str, Any] = self.scalars(t, counters)
        if found is None:
            raise self.refuse("`scalars` must return a dict of numbers by name, got None; does it lack a return?")
        if decided is None and type(self).decisions is not Spec.decisions:
            decided = self.decisions(t, counters)
        found = {**found, **decided} if decided else found
        if self.decay == "hyperball":
            if "rate" in found:
                raise self.refuse("`scalars` gives a number called 'rate', which decay='hyperball' has of its own; rename it")
            found = {**found, "rate": self.lr}
        return found if self.state_dtype == "float32" else {**found, "_rng_step": t}

    def observe(self, E: Any, x: Any) -> Any:
        """The second update of those that take estimates (`observes`): the estimate comes as x.g."""
        raise self.refuse("it takes no estimates")

    def work(self, shape: Shape) -> int:
        """About how many operations a step of such a tensor takes: what tensors are shared out by."""
        return math.prod(shape)

    def advice(self, counters: Mapping[str, float]) -> str | None:
        """What to warn about once, if a tensor is stepped with these counters."""
        return None

    def fusion_key(self) -> tuple[Any, ...]:
        """What tensors must share to be stepped in one pass: the static key, and how it is modified."""
        return (self.static_key(), self.cautious, self.decay)

    def static_key(self) -> tuple[Any, ...]:
        """Of the hyperparameters that are its own, what picks the rule or the state."""
        return tuple(value if self.fields[name].structural else value is None for name, value in self.__dict__.items())
