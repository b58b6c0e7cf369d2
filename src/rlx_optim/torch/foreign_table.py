"""How other libraries keep what our rules keep: which state dicts go on exactly in ours, and why others do not.

A state dict names neither its library nor its class, but its groups and states have the words of both. Each row of `LAYOUTS` is a
class whose state one of our rules could read; torch.optim's classes follow from `Torch` in the rules' files. What a row does not
know is refused, so that nothing is dropped which a step would have read. Rows are tried with tests/foreign_states.py, which runs
the libraries beside ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..coefficients import SCHEMES
from ..spec import Foreign, Shape, Spec
from .state_dict import unreadable_reason

Group = Mapping[str, Any]
#: settings that change no step here, or that every group here has
SHARED = ("params", "param_names", "maximize", "foreach", "fused", "capturable", "differentiable")
#: what schedulers and timm's functions for groups leave beside the settings
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale", "name", "group_name")


@dataclasses.dataclass(frozen=True)
class Only:
    """The one value of a setting with which a rule is ours. where: a setting without which it makes no difference. hint: the way
    out."""

    value: Any
    where: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Origin:
    """How a class of another library, the `writer`, keeps what our `rule` keeps.

    needs: settings that all its groups have and that mean here what they mean there.
    marks: further settings that all its groups have.
    kept: what every state of it has.
    reads: settings that it has in other words.
    only: settings that must have one value, since with another the rule is not ours.
    idle: settings, and parts of a state, that no step of ours needs.
    makes: settings of ours that follow from a group.
    slots: parts of a state that it has in other words.
    remade: a state in our words, where other names are not enough.
    counts: whether it counts steps.
    own: whether a convention that it makes may take the place of the default, which nobody asked for.
    problem: what is wrong with a group.
    refusal: why no state of it is taken over, and what to do.
    """

    writer: str
    rule: str = ""
    needs: str = ""
    marks: str = ""
    kept: str = ""
    reads: Mapping[str, Foreign] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Only] = dataclasses.field(default_factory=dict)
    idle: str = ""
    makes: Callable[[Group], Mapping[str, Any]] = lambda group: {}
    slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remade: Callable[[Spec, dict[str, Any], Shape, Group], dict[str, Any]] = lambda spec, state, shape, group: state
    counts: bool = True
    own: bool = False
    problem: Callable[[Group], str] = lambda group: ""
    refusal: str = ""

    def has(self, group: Group, states: Sequence[Mapping[Any, Any]]) -> bool:
        """Whether a group and its states have the words of this class."""
        kept = {*self.kept.split()}
        return {*self.needs.split(), *self.marks.split()} <= group.keys() and all(kept <= state.keys() for state in states[:1])

    def unknown(self, group: Group, others: Collection[str]) -> list[str]:
        """The settings of a group that this class does not have. others: what the user has there beside settings."""
        words = f"{self.needs} {self.marks} {self.idle} step".split()
        return [k for k in group if k not in {*words, *self.reads, *self.only, *SHARED, *SCHEDULED, *others}]


# ---- what rows share --------------------------------------------------------------------------------------------------------
def follow(value: Any) -> Callable[[Group], Mapping[str, Any]]:
    return lambda group: {"convention": value}


def check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"a flag must be True or False, got {value!r}")
    return value


def only_off(*names: str, where: str = "") -> dict[str, Only]:
    return {name: Only(False, where) for name in names}


CAUTION = {"caution": Foreign("cautious")}
UNCAUTIOUS = {"caution": Only(False, hint=": timm's cautious variant has another mask")}
CORRECTED = only_off("corrected_weight_decay", where="weight_decay")
#: pytorch_optimizer takes any keyword into its groups; these change steps
PO = {
    **only_off("cautious", "adanorm", "adam_debias", "stable_adamw", "use_gc", "ams_bound"),
    **only_off("fixed_decay", where="weight_decay"),
}
DECOUPLED, COUPLED = {"weight_decouple": Only(True, "weight_decay")}, {"weight_decouple": Only(False, "weight_decay")}
BNB = "alpha t_alpha t_beta3"
ADAM = "lr betas eps weight_decay"
MOMENTUM = "lr momentum weight_decay nesterov"


def refuse_large_eps(group: Group) -> str:
    """pytorch_optimizer adds some eps before bias correction, and 1e-15 below roots: nothing where eps is small."""
    return f"whose eps ({group['eps']!r}) stands before bias correction; start afresh" if group["eps"] > 1e-7 else ""


def refuse_eps_bound(group: Group) -> str:
    """Muon's eps bounds a norm in other libraries, and joins it here."""
    return f"whose eps ({group['eps']!r}) bounds a norm, and joins it here; start afresh" if group.get("eps", 0.0) > 1e-6 else ""


def split_averages(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    """bitsandbytes' AdEMAMix has both first moments in one tensor."""
    if torch.is_tensor(both := state["state1"]) and both.shape == (2, *shape):
        averages = {"exp_avg_fast": both[0], "exp_avg_slow": both[1], "exp_avg_sq": state.get("state2")}
        return drop_keys(state, "state1", "state2") | averages
    return state


def read_factors(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    """Adafactor as Hugging Face and timm keep it: row and column means without the axis that they lack."""
    state = drop_keys(state, "RMS")
    if spec.factored(shape) and "exp_avg_sq" in state:  # type: ignore[attr-defined]
        raise ValueError("it is not factored there (min_dim_size_to_factor); with nothing in its state it starts afresh")
    rows, columns = state.pop("exp_avg_sq_row", None), state.pop("exp_avg_sq_col", None)
    if rows is None and columns is None:
        return rename_keys(state, {"exp_avg_sq": "variance"})
    for value, needed in ((rows, shape[:-1]), (columns, (*shape[:-2], *shape[-1:]))):
        if unreadable_reason(value) or tuple(value.shape) != needed:
            raise ValueError("it is not factored along its last two dimensions there; with nothing in its state it starts afresh")
    return {**state, "row_var": rows.unsqueeze(-1), "col_var": columns.unsqueeze(-2)}


def read_paper(group: Group) -> dict[str, Any]:
    """Adafactor's settings as Hugging Face and timm have them: the rate that they computed for the last step is no setting."""
    relative, eps = check_flag(group["relative_step"]), group["eps"]
    eps = (eps, group["eps_scale"]) if "eps_scale" in group else eps
    # timm does not scale a rate that is given
    scaled = check_flag(group["scale_parameter"]) and (relative or "eps_scale" not in group)
    return {"convention": "paper", "eps": eps, "lr": None if relative else group["lr"], "scale_parameter": scaled}


def read_bases(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    """SOAP as the authors keep it: lists of matrices, [] for a dimension without a basis."""
    if state.get("Q") is None:
        raise ValueError("it has no basis yet; take a step before saving it")
    if len(state["Q"]) != len(spec.merged(shape)):  # type: ignore[attr-defined]
        raise ValueError("its dimensions are merged in another way there; with nothing in its state it starts afresh")
    lists = ("L", state["GG"]), ("Q", state["Q"])
    matrices = {f"{label}{i}": each for label, axes in lists for i, each in enumerate(axes, 1) if torch.is_tensor(each)}
    return {**drop_keys(state, "GG", "Q", "precondition_frequency", "shampoo_beta"), **matrices}


def read_authors_bases(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    return {**read_bases(spec, state, shape, group), "step": state["step"] + 1}  # they count the steps that moved


def read_rotated_bases(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    """pytorch_optimizer's keeps the first moment outside of the basis."""
    state = read_bases(spec, state, shape, group)
    if tuple(state["exp_avg"].shape) != shape:  # before it is reshaped
        raise ValueError(f"its 'exp_avg' has shape {tuple(state['exp_avg'].shape)}, expected {shape}")
    moment = state["exp_avg"].detach().double().reshape(spec.merged(shape))  # type: ignore[attr-defined]
    for axis in range(moment.ndim):
        if (basis := state.get(f"Q{axis + 1}")) is not None:
            moment = torch.tensordot(moment, basis.detach().double(), ([axis], [0])).movedim(-1, axis)
    return {**state, "exp_avg": moment.reshape(shape).to(state["exp_avg"].dtype)}


def uncorrect_averages(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    """pytorch_optimizer's QHAdam keeps its averages corrected for bias, and beside them the sums of their weights."""
    sums = [float(state[key].detach()) for key in ("beta1_weight", "beta2_weight")]
    if min(sums) < 1:
        raise ValueError(f"the sums of its weights are {sums}, which are 1 after a step")
    moments = zip(("exp_avg", "exp_avg_sq"), sums, group["betas"], strict=True)
    found = {key: (state[key].detach().double() * (weights * (1 - beta))).to(state[key].dtype) for key, weights, beta in moments}
    return {**drop_keys(state, "beta1_weight", "beta2_weight"), **found}


def refuse_vectors(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    if len(shape) < 2 and not check_flag(group.get("optimize_1d", False)):
        how = "AdamW" if "optimize_1d" in group else "SGD without decay"
        raise ValueError(f"it has {len(shape)} dimensions and is stepped as {how} there; give it to another optimizer here")
    return drop_keys(state, "exp_avg_sq") if group.get("mars_type") == "lion" else state


def flatten_rows(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    rows = state.get("second_momentum_buffer")
    flat = torch.is_tensor(rows) and rows.shape == (shape[0], 1)
    return {**state, "second_momentum_buffer": rows.flatten()} if flat else state  # type: ignore[union-attr]


def count_estimate(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    return {**drop_keys(state, "hessian"), "estimates": 1.0}  # how many there were is not told; the last one is in the average


def refuse_adamw(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    """timm's Muon says of each parameter whether it is one of Muon's."""
    if not state["use_muon"]:
        raise ValueError("it is stepped by AdamW there; start afresh, or save a run of its matrices alone")
    return drop_keys(state, "use_muon")


def drop_keys(state: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in state.items() if k not in names}


def rename_keys(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(k, k): v for k, v in state.items()}


def read_newton_schulz(group: Group) -> dict[str, Any]:
    """The coefficients of all Newton–Schulz steps: the last goes on."""
    given = group["ns_coefficients" if "ns_coefficients" in group else "ns_coeffs"]
    known = {"original": SCHEMES["keller"][:1], "quintic": SCHEMES["you"]}
    several = known[given] if isinstance(given, str) else given if isinstance(given[0], (list, tuple)) else [given]
    triples = [tuple(several[min(i, len(several) - 1)]) for i in range(group["ns_steps"])]
    return {"ns_coefficients": triples[0] if len({*triples}) == 1 else tuple(triples)}


def read_scion(group: Group) -> dict[str, Any]:
    norm, ball = NORMS[int(group["norm_type"])], check_flag(group["constraint"])
    decay = 1.0 if ball else group["weight_decay"]
    fixed = {"normalized": None, "max_scale": False, "transpose": False}
    return {"norm": norm, "unconstrained": not decay, "weight_decay": decay, **fixed}


def refuse_oblong(spec: Spec, state: dict[str, Any], shape: Shape, group: Group) -> dict[str, Any]:
    if len(set(shape[2:])) > 1:
        raise ValueError(
            f"its kernel of {shape[2:]} is no square, and is scaled by both sides there; give it to another optimizer"
        )
    return state


def is_early(group: Group) -> bool:
    """Whether pytorch_optimizer's RAdam may leave the next step out: its file does not say."""
    t, beta2 = group["step"] + 1, group["betas"][1]
    kept = beta2**t
    return group["step"] > 0 and 2 / (1 - beta2) - 1 - 2 * t * kept / (1 - kept) <= 5


def refuse_older_torch(group: Group) -> str:
    """torch.optim's RAdam has not always said which weight decay it does."""
    unsaid = group["weight_decay"] and {*SHARED} & group.keys() - {"params", "param_names"}
    return "or of an older torch.optim's RAdam; write decoupled_weight_decay into its groups" if unsaid else ""


NORMS = ("", "auto", "spectral", "spectralconv", "sign", "biasrms", "colnorm", "rownorm")  # pytorch_optimizer's LMONorm
CONVENTIONS = {"original": "keller", "match_rms_adamw": "moonlight"}  # timm's adjust_lr_fn

# ---- the rows ---------------------------------------------------------------------------------------------------------------
#: by a word that is in their groups or states, whichever rule is asked for
STRANGERS = {
    **dict.fromkeys(("storage_dtype", "is_preconditioning"), (
        "the checkpoint is HeavyBall's, which keeps state by the stages of a chain, and other averages than ours; start afresh, "
        "with a short warm-up")),
    "train_mode": (
        "the state is of the schedulefree package, whose z cannot be taken over without the parameters that it was saved with; "
        "start from its average (its optimizer.eval(), then the weights) with a new optimizer"),
    "d_numerator": "the checkpoint is prodigyopt's, whose d is in its groups: start afresh, with d0 at its d",
    "lookahead_alpha": (
        "the checkpoint is timm's Lookahead's, whose slow weights ours do not have; call its sync_lookahead(), and save the "
        "state of the optimizer in it"),
    "exp_avg::quantized": (
        "the checkpoint is of pytorch_optimizer's FlashAdamW, whose codes are not read; start afresh, with a short warm-up"),
    "gnorm_vec": (
        "the checkpoint is of bitsandbytes with percentile_clipping, which ours do not do; to go on without, take 'gnorm_vec' "
        "out of its states"),
    "unorm_vec": (
        "the checkpoint is of bitsandbytes' LAMB or LARS, or made with max_unorm: it bounds the norm of an update, and is no "
        "Lamb or LARS of ours; start afresh, with a short warm-up"),
}  # fmt: skip
LAYOUTS = (
    # SGD
    Origin("timm's SGDW", "sgd", f"{MOMENTUM} dampening", "caution", counts=False, idle="max_lr_snapshot corrected_weight_decay",
        reads=CAUTION, only={"weight_decay": Only(0, hint=": it is decoupled there")}),
    Origin("pytorch_optimizer's SGDW", "sgd", f"{MOMENTUM} dampening", "weight_decouple", only=PO | COUPLED),
    Origin("bitsandbytes' SGD", "sgd", "lr weight_decay", "betas eps", "state1", idle="betas", only={"eps": Only(0)},
        makes=lambda group: {"momentum": group["betas"][0], "dampening": 0.0, "nesterov": False},
        problem=lambda group: f"but betas={group['betas']!r} is Lion's" if group["betas"][1] else ""),
    # Adam and its next of kin
    Origin("bitsandbytes' Adam", "adam", ADAM, "", "state1", idle="t_alpha t_beta3",
        only={"alpha": Only(0), "weight_decay": Only(0, hint=": it is decoupled there; load it into AdamW")}),
    Origin("bitsandbytes' AdamW", "adamw", ADAM, "", "state1", idle="t_alpha t_beta3", only={"alpha": Only(0)}),
    Origin("timm's AdamWLegacy", "adamw", f"{ADAM} amsgrad", "caution", reads=CAUTION, idle="max_lr_snapshot",
        only=CORRECTED | {"clipping_threshold": Only(None)}),
    Origin("pytorch_optimizer's Muon, of what it steps as AdamW", "adamw", ADAM, "use_muon weight_decouple",
        only=PO | DECOUPLED | only_off("use_muon")),
    Origin("timm's NAdamW", "nadamw", ADAM, "caution", reads=CAUTION, idle="max_lr_snapshot", makes=follow("algoperf"),
        only=CORRECTED | {"clipping_threshold": Only(None)}),
    Origin("timm's NAdamLegacy", "nadamw", ADAM, "schedule_decay", "m_schedule",
        reads={"schedule_decay": Foreign("momentum_decay")},
        only={"weight_decay": Only(0, hint=": it is coupled there")}, makes=follow("torch"), slots={"m_schedule": "mu_product"}),
    Origin("timm's RAdamLegacy", "radam", ADAM, kept="step", problem=refuse_older_torch,
        makes=lambda group: {"decoupled_weight_decay": True, "convention": "torch"}),
    Origin("pytorch_optimizer's RAdam", "radam", ADAM, "weight_decouple fixed_decay", only=PO | DECOUPLED,
        makes=lambda group: {"decoupled_weight_decay": True, "convention": "torch"},
        problem=lambda group: "which may leave out the next step, and does not say so; start afresh" if is_early(group) else ""),
    Origin("pytorch_optimizer's QHAdam", "qhadamw", f"{ADAM} nus", "weight_decouple", only=PO | DECOUPLED,
        remade=uncorrect_averages),
    Origin("pytorch_optimizer's StableAdamW", "stableadamw", ADAM, "kahan_sum weight_decouple", "kahan_comp", only=PO | DECOUPLED,
        idle="kahan_sum", makes=lambda group: {"convention": "author", "clip": 1.0}),
    Origin("pytorch_optimizer's AdEMAMix", "ademamix", f"{ADAM} alpha", "t_alpha_beta3 weight_decouple", only=PO | DECOUPLED,
        makes=lambda group: dict.fromkeys(("alpha_warmup", "beta3_warmup"), group["t_alpha_beta3"]),
        idle="t_alpha_beta3", slots={"exp_avg": "exp_avg_fast"}),
    Origin("bitsandbytes' AdEMAMix", "ademamix", f"{ADAM} alpha", "t_alpha t_beta3", "state1", remade=split_averages,
        reads={"t_alpha": Foreign("alpha_warmup"), "t_beta3": Foreign("beta3_warmup")}),
    # Adan, ADOPT, LaProp
    Origin("timm's Adan", "adan", f"{ADAM} no_prox", "", only=UNCAUTIOUS, makes=lambda group: {"max_grad_norm": None}),
    Origin("pytorch_optimizer's Adan", "adan", f"{ADAM} max_grad_norm", "weight_decouple", only=PO,
        reads={"weight_decouple": Foreign("no_prox")}, slots={"previous_grad": "neg_pre_grad"}),
    Origin("the authors' ADOPT", "adopt", f"{ADAM} decouple"),
    Origin("timm's ADOPT", "adopt", f"{ADAM} clip_exp", "decoupled", reads={"decoupled": Foreign("decouple")},
        idle="max_lr_snapshot", only=CORRECTED | UNCAUTIOUS,
        problem=lambda group: "which clips nothing with clip_exp=None; start afresh" if group["clip_exp"] is None else ""),
    Origin("pytorch_optimizer's ADOPT", "adopt", ADAM, "weight_decouple fixed_decay", refusal=(
        "which clips a step ahead (at t^0.25) and decays at the first step; start afresh")),
    Origin("timm's LaProp", "laprop", ADAM, "caution", "exp_avg_lr_1", reads=CAUTION, idle="max_lr_snapshot exp_avg_lr_2",
        only=CORRECTED, makes=lambda group: {"convention": "timm"} if group["weight_decay"] else {},
        slots={"exp_avg_lr_1": "lr_average"}),
    Origin("pytorch_optimizer's LaProp", "laprop", ADAM, "centered weight_decouple", "exp_avg_lr_1", idle="exp_avg_lr_2",
        only=PO | DECOUPLED | only_off("centered"), makes=lambda group: {"convention": "timm"} if group["weight_decay"] else {},
        slots={"exp_avg_lr_1": "lr_average"}, problem=refuse_large_eps),
    # Lamb, LARS
    Origin("timm's Lamb", "lamb", f"{ADAM} bias_correction", "trust_clip always_adapt", idle="always_adapt max_lr_snapshot",
        reads={"trust_clip": Foreign("trust_clip", lambda clip: 1.0 if check_flag(clip) else None)},
        only=UNCAUTIOUS | only_off("decoupled_decay", "corrected_weight_decay", where="weight_decay") | {
            "grad_averaging": Only(True),
            "max_grad_norm": Only(None, hint=(
                ": set it to None in the groups of the state dict, and call clip_grad_norm_ before each step")),
        },
        problem=lambda group: "" if check_flag(group["always_adapt"]) or group["weight_decay"] else (
            "which takes no ratio of norms where weight_decay is 0: give such a group to AdamW")),
    Origin("pytorch_optimizer's Lamb", "lamb", ADAM, "weight_decouple grad_averaging", refusal=(
        "which corrects the bias of m alone, cuts the norm of p at 10, and does not say whether it clips; start afresh")),
    Origin("timm's Lars", "lars", f"{MOMENTUM} eps", "trust_coeff always_adapt", counts=False, idle="trust_coeff always_adapt",
        only={"dampening": Only(0)} | only_off("trust_clip"),
        makes=lambda group: {"convention": "timm", "trust_coefficient": (
            group["trust_coeff"] if check_flag(group["always_adapt"]) or group["weight_decay"] else None)}),
    Origin("pytorch_optimizer's LARS", "lars", f"{MOMENTUM} trust_coefficient", "dampening", only=PO | {"dampening": Only(0)},
        makes=lambda group: {"convention": "timm", "eps": 0.0}, remade=refuse_vectors),
    # Adafactor
    Origin("Hugging Face's Adafactor", "adafactor", "clip_threshold beta1 weight_decay",
        "lr eps decay_rate scale_parameter relative_step warmup_init",
        reads={"decay_rate": Foreign("beta2_decay")}, idle="lr eps scale_parameter relative_step", makes=read_paper,
        remade=read_factors, only=only_off("warmup_init", where="relative_step")),
    Origin("timm's Adafactor", "adafactor", "clip_threshold beta1 weight_decay",
        "lr eps eps_scale decay_rate scale_parameter relative_step warmup_init", reads={"decay_rate": Foreign("beta2_decay")},
        idle="lr eps eps_scale scale_parameter relative_step min_dim_size_to_factor", makes=read_paper, remade=read_factors,
        only=only_off("warmup_init", where="relative_step") | only_off("caution", where="beta1")),
    Origin("timm's AdafactorBigVision", "adafactor", "lr", "decay_offset beta2_cap",
        refusal="whose rule is not here; start afresh"),
    Origin("pytorch_optimizer's AdaFactor", "adafactor", "lr betas", "eps1 eps2 relative_step", refusal=(
        "which caps b2, keeps momentum in bfloat16 and does not say its decay_rate; start afresh")),
    # Lion, SOAP, KronPSGD, Sophia
    Origin("timm's Lion", "lion", "lr betas weight_decay", "caution", counts=False, idle="max_lr_snapshot",
        only=CORRECTED | UNCAUTIOUS),
    Origin("pytorch_optimizer's Lion", "lion", "lr betas weight_decay", "weight_decouple",
        only=drop_keys(PO, "cautious") | DECOUPLED, reads={"cautious": Foreign("cautious")}),
    Origin("bitsandbytes' Lion", "lion", "lr betas weight_decay", "eps", "state1", only={"eps": Only(0)},
        problem=lambda group: "" if group["betas"][1] else f"but betas={group['betas']!r} is SGD's"),
    Origin("the authors' SOAP", "soap", f"{ADAM} precondition_frequency max_precond_dim merge_dims precondition_1d",
        "shampoo_beta normalize_grads correct_bias", "GG Q", idle="shampoo_beta", remade=read_authors_bases,
        only=only_off("normalize_grads") | {"correct_bias": Only(True)},
        makes=lambda group: {"shampoo_beta": None if group["shampoo_beta"] < 0 else group["shampoo_beta"]}),
    Origin("pytorch_optimizer's SOAP", "soap", f"{ADAM} shampoo_beta precondition_frequency merge_dims precondition_1d",
        "max_precondition_dim correct_bias", "GG Q", reads={"max_precondition_dim": Foreign("max_precond_dim")},
        remade=read_rotated_bases, only=only_off("normalize_gradient") | {"correct_bias": Only(True)}),
    Origin("timm's Kron", "kronpsgd", "lr", "momentum_into_precond_update max_size_triangular", refusal=(
        "whose noise comes from a generator of its own; start afresh, with a short warm-up")),
    Origin("pytorch_optimizer's Kron", "kronpsgd", "lr", "momentum_into_precondition_update max_size_triangular", refusal=(
        "whose noise comes from a generator of its own; start afresh, with a short warm-up")),
    Origin("pytorch_optimizer's SophiaH", "sophia", ADAM, "p weight_decouple", "momentum hessian_moment", only=PO | DECOUPLED,
        reads={"p": Foreign("clip")}, makes=lambda group: {"gamma": 1.0}, remade=count_estimate,
        slots={"momentum": "exp_avg", "hessian_moment": "hessian"}),
    # Muon, NorMuon, MARS, Scion
    Origin("Keller Jordan's Muon", "muon", "lr momentum weight_decay", counts=False, only={"use_muon": Only(True)},
        makes=lambda group: {"convention": "keller", "nesterov": True, "ns_steps": 5, "ns_coefficients": SCHEMES["keller"][0]}),
    Origin("timm's Muon", "muon", f"{MOMENTUM} ns_steps", "ns_coefficients adjust_lr_fn conv_mode", "use_muon",
        reads={"adjust_lr_fn": Foreign("convention", CONVENTIONS.get)}, makes=read_newton_schulz, remade=refuse_adamw,
        idle="ns_coefficients eps betas fallback_lr_scale normalize_spatial verbose", counts=False,
        problem=lambda group: refuse_eps_bound(group) or (
            "" if group["adjust_lr_fn"] in CONVENTIONS else f"whose scale {group['adjust_lr_fn']!r} is not here; start afresh"),
        only=only_off("scale_eps") | {"algo": Only("muon"), "conv_mode": Only("flatten"), "safety_factor": Only(1)}),
    Origin("pytorch_optimizer's Muon", "muon", f"{MOMENTUM} ns_steps", "use_muon ns_coeffs use_adjusted_lr",
        reads={"use_adjusted_lr": Foreign("convention", lambda adjusted: "moonlight" if check_flag(adjusted) else "keller")},
        makes=read_newton_schulz,
        only=PO | DECOUPLED | {"use_muon": Only(True), "ns_method": Only("newton_schulz")}, idle="ns_reset_steps"),
    Origin("pytorch_optimizer's NorMuon", "normuon", f"{MOMENTUM} beta2 ns_steps",
        "use_muon ns_coeffs use_adjusted_lr update_scale", idle="eps",
        makes=lambda group: {**read_newton_schulz(group), "convention": "authors"}, remade=flatten_rows, problem=refuse_eps_bound,
        only=PO | DECOUPLED | only_off("use_adjusted_lr") | {"use_muon": Only(True), "update_scale": Only("preserve_norm")}),
    Origin("timm's Mars", "mars", f"{ADAM} gamma", "mars_type optimize_1d caution",
        reads={"mars_type": Foreign("variant"), **CAUTION}, idle="optimize_1d lr_1d_factor betas_1d",
        makes=lambda group: {"clip_norm": 1.0}, remade=refuse_vectors),
    Origin("pytorch_optimizer's MARS", "mars", f"{ADAM} gamma", "mars_type optimize_1d weight_decouple", only=PO | DECOUPLED,
        reads={"mars_type": Foreign("variant")}, idle="optimize_1d lr_1d lr_1d_factor betas_1d weight_decay_1d",
        makes=lambda group: {"clip_norm": 1.0}, remade=refuse_vectors, problem=refuse_large_eps),
    Origin("pytorch_optimizer's SCION", "scion", "lr momentum scale weight_decay", "constraint norm_type norm_kwargs", "d",
        slots={"d": "momentum_buffer"}, only=PO | DECOUPLED | {"norm_kwargs": Only({})}, makes=read_scion, remade=refuse_oblong,
        idle="constraint norm_type"),
)  # fmt: skip
