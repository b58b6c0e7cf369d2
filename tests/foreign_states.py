"""Optimizer states of other libraries: what each class leaves after six steps, and where its next twenty lead.

    python tests/foreign_states.py                      the libraries that are installed, to tests/golden/foreign; then the pages
    python tests/foreign_states.py timm heavyball       these alone
    python tests/foreign_states.py pages                the tables of docs/migrate alone

A case is a class of a library with settings, and our class with those that its file does not say. The golden files hold the state
dicts, so that the tests need none of the libraries. `outcome` loads a case into ours, and says whether it goes on as theirs did.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import logging
import math
import os
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden" / "foreign"
SHAPES = {"w": (6, 4), "wide": (3, 8), "b": (5,), "cube": (2, 3, 4)}
MATRICES = {"w": (6, 4), "wide": (3, 8), "square": (5, 5)}
PLAIN = {"w": (6, 4), "wide": (3, 8), "b": (5,)}
LARGE = {"w": (17, 18), "b": (5,)}  # what timm's Adafactor factors
CODED = {"w": (16, 32), "b": (5,)}
BLOCKS = {"w": (64, 64), "b": (5,)}  # torchao codes nothing below 4,096
FIRST, MORE = 6, 20
ADAM = {"lr": 0.01, "betas": (0.8, 0.95)}
DECAY = {"weight_decay": 0.1}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """theirs, settings: a class of a library. ours, own: our class, and what it is asked for."""

    library: str
    theirs: str
    settings: dict[str, Any]
    ours: str
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: SHAPES)
    #: what is told of it beside its settings
    note: str = ""

    @functools.cached_property
    def id(self) -> str:
        """Its name in a golden file."""
        said = ",".join(f"{k}={v}" for k, v in self.settings.items() if k != "betas" and (k != "lr" or v is None))
        return f"{self.theirs}({said})-{self.ours}({','.join(map(str, self.own.values()))})-{len(self.shapes)}"


def torch_cases():
    momentum = {"lr": 0.02, "momentum": 0.9}
    yield Case("torch", "SGD", {"lr": 0.02}, "SGD")
    yield Case("torch", "SGD", {**momentum, "dampening": 0.3, **DECAY}, "SGD")
    yield Case("torch", "SGD", {**momentum, "nesterov": True}, "SGD")
    yield Case("torch", "Adam", {**ADAM, **DECAY}, "Adam")
    yield Case("torch", "Adam", {**ADAM, "amsgrad": True}, "Adam")
    yield Case("torch", "AdamW", {**ADAM, **DECAY}, "AdamW")
    yield Case("torch", "AdamW", {**ADAM, "amsgrad": True, "maximize": True}, "AdamW")
    yield Case("torch", "NAdam", ADAM, "NAdamW")
    yield Case("torch", "NAdam", {**ADAM, **DECAY, "decoupled_weight_decay": True}, "NAdamW")
    yield Case("torch", "NAdam", {**ADAM, **DECAY}, "NAdamW")
    yield Case("torch", "RAdam", {**ADAM, **DECAY}, "RAdam")
    yield Case("torch", "RAdam", {**ADAM, **DECAY, "decoupled_weight_decay": True}, "RAdam")
    yield Case("torch", "Adafactor", {"lr": 0.02, **DECAY}, "Adafactor")
    yield Case("torch", "Muon", {"lr": 0.02, **DECAY}, "Muon", {}, MATRICES)
    yield Case("torch", "Muon", {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}, "Muon", {}, MATRICES)


def timm_cases():
    momentum = {"lr": 0.02, "momentum": 0.9}
    yield Case("timm", "SGDW", momentum, "SGD")
    yield Case("timm", "SGDW", {**momentum, "nesterov": True, "caution": True}, "SGD")
    yield Case("timm", "SGDW", {**momentum, **DECAY}, "SGD")
    for more in ({}, {"amsgrad": True}, {"caution": True}, {"clipping_threshold": 1.0}, {"corrected_weight_decay": True}):
        yield Case("timm", "AdamWLegacy", {**ADAM, **DECAY, **more}, "AdamW")
    for more in ({}, {"caution": True}, {"clipping_threshold": 1.0}):
        yield Case("timm", "NAdamW", {**ADAM, **DECAY, **more}, "NAdamW", {"convention": "algoperf"})
    yield Case("timm", "NAdamW", {**ADAM, "weight_decay": 0.0}, "NAdamW")
    yield Case("timm", "NAdamLegacy", ADAM, "NAdamW", {"convention": "torch"})
    yield Case("timm", "NAdamLegacy", {**ADAM, **DECAY}, "NAdamW", {"convention": "torch"})
    yield Case("timm", "RAdamLegacy", {**ADAM, **DECAY}, "RAdam")
    adan = {"lr": 0.01, "betas": (0.9, 0.8, 0.95), **DECAY}
    for more in ({}, {"no_prox": True}, {"caution": True}):
        yield Case("timm", "Adan", {**adan, **more}, "Adan")
    adopt = {"lr": 0.01, "betas": (0.8, 0.95), **DECAY}
    for more in ({}, {"decoupled": True}, {"clip_exp": None}, {"caution": True}):
        yield Case("timm", "Adopt", {**adopt, **more}, "ADOPT")
    for convention in ("author", "timm"):
        yield Case("timm", "LaProp", ADAM, "LaProp", {"convention": convention})
        yield Case("timm", "LaProp", {**ADAM, **DECAY}, "LaProp", {"convention": convention})
    yield Case("timm", "LaProp", {**ADAM, **DECAY, "caution": True}, "LaProp", {"convention": "timm"})
    lamb = {**ADAM, **DECAY, "max_grad_norm": None}
    for more in (
        {}, {"trust_clip": True}, {"bias_correction": False}, {"weight_decay": 0.0, "always_adapt": True}, {"weight_decay": 0.0},
        {"max_grad_norm": 1.0}, {"decoupled_decay": True}, {"grad_averaging": False}, {"caution": True},
    ):  # fmt: skip
        yield Case("timm", "Lamb", {**lamb, **more}, "Lamb")
    lars = {"lr": 1.0, "momentum": 0.9, **DECAY, "trust_coeff": 0.01}
    for more in ({}, {"nesterov": True}, {"weight_decay": 0.0, "lr": 0.02}, {"dampening": 0.1}, {"trust_clip": True}):
        yield Case("timm", "Lars", {**lars, **more}, "LARS", {"convention": "timm"})
    yield Case("timm", "Lars", lars, "LARS")
    for more in ({}, {"caution": True}):
        yield Case("timm", "Lion", {**ADAM, **DECAY, **more}, "Lion")
    paper = {"convention": "paper"}
    factored = {"min_dim_size_to_factor": 1}
    yield Case("timm", "Adafactor", {"lr": None, **factored, **DECAY}, "Adafactor", paper, PLAIN)
    yield Case("timm", "Adafactor", {"lr": 0.02, "betas": (0.9, 0.99), **factored}, "Adafactor", paper, PLAIN)
    yield Case("timm", "Adafactor", {"lr": None}, "Adafactor", paper, LARGE)
    yield Case("timm", "Adafactor", {"lr": None}, "Adafactor", {}, LARGE)
    yield Case(
        "timm", "Adafactor", {"lr": None}, "Adafactor", paper, PLAIN, "matrices of up to 16 rows or columns, not factored there"
    )
    yield Case("timm", "Adafactor", {"lr": None, "warmup_init": True, **factored}, "Adafactor", paper, PLAIN)
    yield Case("timm", "AdafactorBigVision", {"lr": 0.02}, "Adafactor", paper, PLAIN)
    mars = {"lr": 0.01, "betas": (0.9, 0.95), **DECAY}
    for more in ({}, {"mars_type": "lion"}, {"caution": True}):
        yield Case("timm", "Mars", {**mars, **more}, "MARS", {"otherwise": None}, MATRICES)
    yield Case("timm", "Mars", {**mars, "optimize_1d": True}, "MARS", {"otherwise": None})
    yield Case("timm", "Mars", mars, "MARS", {"otherwise": None}, note="vectors")
    muon = {"lr": 0.02, **DECAY}
    for more in ({}, {"adjust_lr_fn": "original", "nesterov": True}, {"adjust_lr_fn": "rms_to_rms"}, {"algo": "adamuon"}):
        yield Case("timm", "Muon", {**muon, **more}, "Muon", {}, {"w": (6, 4), "wide": (4, 8)})
    yield Case("timm", "Kron", {"lr": 0.01}, "KronPSGD", {}, MATRICES)
    yield Case("timm", "Lookahead", ADAM, "AdamW")


def pytorch_optimizer_cases():
    library = "pytorch_optimizer"
    coupled = {"weight_decouple": False}
    momentum = {"lr": 0.02, "momentum": 0.9}
    yield Case(library, "SGD", {**momentum, **DECAY}, "SGD")
    yield Case(library, "SGDW", {**momentum, **DECAY, **coupled, "nesterov": True}, "SGD")
    yield Case(library, "SGDW", {**momentum, **DECAY, "weight_decouple": True}, "SGD")
    yield Case(library, "Adam", {**ADAM, **DECAY}, "Adam")
    yield Case(library, "AdamW", {**ADAM, **DECAY}, "AdamW")
    yield Case(library, "NAdam", {**ADAM, **DECAY, "decoupled_weight_decay": True}, "NAdamW")
    yield Case(library, "RAdam", {**ADAM, **DECAY, "degenerated_to_sgd": True}, "RAdam")
    yield Case(library, "RAdam", {**ADAM, **DECAY, **coupled}, "RAdam")
    yield Case(library, "RAdam", {**ADAM, "adanorm": True}, "RAdam")
    yield Case(library, "QHAdam", {**ADAM, **DECAY, "nus": (0.7, 0.9), "weight_decouple": True}, "QHAdamW")
    yield Case(library, "QHAdam", {**ADAM, **DECAY, **coupled, "nus": (0.7, 0.9)}, "QHAdamW")
    yield Case(library, "StableAdamW", {**ADAM, **DECAY}, "StableAdamW")
    mix = {"lr": 0.01, "betas": (0.8, 0.95, 0.99)}
    yield Case(library, "AdEMAMix", mix, "AdEMAMix")
    yield Case(library, "AdEMAMix", {**mix, **DECAY, "weight_decouple": True, "t_alpha_beta3": 20}, "AdEMAMix")
    yield Case(library, "AdEMAMix", {**mix, **DECAY, **coupled}, "AdEMAMix")
    adan = {"lr": 0.01, "betas": (0.9, 0.8, 0.95), **DECAY}
    for more in ({}, {"weight_decouple": True}, {"max_grad_norm": 1.0}, {"use_gc": True}):
        yield Case(library, "Adan", {**adan, **more}, "Adan")
    yield Case(library, "ADOPT", {**ADAM, **DECAY}, "ADOPT")
    for convention in ("author", "timm"):
        yield Case(library, "LaProp", ADAM, "LaProp", {"convention": convention})
        yield Case(library, "LaProp", {**ADAM, **DECAY}, "LaProp", {"convention": convention})
    for more in ({"centered": True}, {"ams_bound": True}, {"cautious": True}):
        yield Case(library, "LaProp", {**ADAM, **more}, "LaProp", {"convention": "timm"})
    yield Case(library, "Lamb", {**ADAM, **DECAY}, "Lamb")
    lars = {"lr": 1.0, "momentum": 0.9, **DECAY, "trust_coefficient": 0.01}
    for more in ({}, {"nesterov": True}, {"dampening": 0.1}):
        yield Case(library, "LARS", {**lars, **more}, "LARS", {"convention": "timm"}, MATRICES)
    yield Case(library, "LARS", lars, "LARS", {"convention": "timm"}, note="vectors")
    yield Case(library, "AdaFactor", {"lr": None, "betas": (None, 0.999)}, "Adafactor", {"convention": "paper"}, PLAIN)
    for more in ({}, {"cautious": True}, {"weight_decay": 0.1, "weight_decouple": False}):
        yield Case(library, "Lion", {**ADAM, **DECAY, **more}, "Lion")
    soap = {"lr": 0.01, "precondition_frequency": 3, **DECAY}
    for more in ({}, {"max_precondition_dim": 5, "merge_dims": True}, {"normalize_gradient": True}):
        yield Case(library, "SOAP", {**soap, **more}, "SOAP", {"otherwise": None}, {"w": (6, 4), "wide": (3, 8)})
    yield Case(library, "Kron", {"lr": 0.01}, "KronPSGD", {}, MATRICES)
    for theirs, ours in (("Muon", "Muon"), ("NorMuon", "NorMuon")):
        for more in ({}, {"use_adjusted_lr": True}, {"ns_coeffs": "quintic", "nesterov": False}):
            yield Case(library, theirs, {"lr": 0.02, **DECAY, **more}, ours)
    yield Case(library, "NorMuon", {"lr": 0.02, "update_scale": "match_rms"}, "NorMuon")
    yield Case(library, "SophiaH", {**ADAM, **DECAY}, "Sophia")
    mars = {"lr": 0.01, "betas": (0.9, 0.95), **DECAY}
    for more in ({}, {"mars_type": "lion"}, {"ams_bound": True}, {"cautious": True}):
        yield Case(library, "MARS", {**mars, **more}, "MARS", {"otherwise": None}, MATRICES)
    yield Case(library, "MARS", {**mars, "optimize_1d": True}, "MARS", {"otherwise": None})
    yield Case(library, "MARS", mars, "MARS", {"otherwise": None}, note="vectors")
    scion = {"lr": 0.01, "momentum": 0.2, **DECAY}
    yield Case(library, "SCION", scion, "Scion", {"otherwise": None}, PLAIN)
    for more in ({"constraint": True, "weight_decay": 0.0}, {"norm_type": 4}):
        yield Case(library, "SCION", {**scion, **more}, "Scion", {"otherwise": None}, MATRICES)
    yield Case(library, "SCIONLight", {"lr": 0.01}, "Scion", {"otherwise": None}, PLAIN)
    yield Case(library, "Prodigy", {}, "Prodigy")
    yield Case(library, "ScheduleFreeAdamW", ADAM, "ScheduleFreeAdamW")
    yield Case(library, "ScheduleFreeSGD", {"lr": 0.1}, "ScheduleFreeSGD")
    yield Case(library, "FlashAdamW", ADAM, "AdamW")


def bitsandbytes_cases():
    library, small = "bitsandbytes", {"min_8bit_size": 1}
    mix = {"lr": 0.01, "betas": (0.8, 0.95, 0.99), **DECAY}
    for bits, more in (("", {}), ("8bit", small), ("32bit", {})):
        for paged in ("", "Paged"):
            yield Case(library, f"{paged}AdamW{bits}", {**ADAM, **DECAY, **more}, "AdamW", {}, CODED)
            yield Case(library, f"{paged}Adam{bits}", {**ADAM, **more}, "Adam", {}, CODED)
            if bits != "32bit":  # bitsandbytes' own AdEMAMix32bit fails at its first step
                yield Case(library, f"{paged}AdEMAMix{bits}", {**mix, **more}, "AdEMAMix", {}, CODED)
            yield Case(library, f"{paged}Lion{bits}", {**ADAM, **DECAY, **more}, "Lion", {}, CODED)
        yield Case(library, f"SGD{bits}", {"lr": 0.02, "momentum": 0.9, **DECAY, **more}, "SGD", {}, CODED)
        yield Case(library, f"LAMB{bits}", {**ADAM, **DECAY, **more}, "Lamb", {}, CODED)
        yield Case(library, f"LARS{bits}", {"lr": 0.02, "momentum": 0.9, **more}, "LARS", {}, CODED)
    yield Case(library, "Adam8bit", {**ADAM, **DECAY, **small}, "Adam", {}, CODED)
    yield Case(library, "AdEMAMix", {**mix, "t_alpha": 20, "t_beta3": 20}, "AdEMAMix", {}, CODED)


def torchao_cases():
    for kind, ours in (("Adam", "Adam"), ("AdamW", "AdamW")):
        for bits in ("8bit", "4bit", "Fp8"):
            yield Case("torchao", f"{kind}{bits}", {**ADAM, **DECAY}, ours, {}, BLOCKS)


def schedulefree_cases():
    for theirs, ours in (
        ("AdamWScheduleFree", "ScheduleFreeAdamW"), ("AdamWScheduleFreeReference", "ScheduleFreeAdamW"),
        ("AdamWScheduleFreePaper", "ScheduleFreeAdamW"), ("SGDScheduleFree", "ScheduleFreeSGD"),
        ("SGDScheduleFreeReference", "ScheduleFreeSGD"),
    ):  # fmt: skip
        yield Case("schedulefree", theirs, {"lr": 0.02}, ours, {}, PLAIN)


def prodigyopt_cases():
    yield Case("prodigyopt", "Prodigy", DECAY, "Prodigy", {}, PLAIN)


def heavyball_cases():
    for theirs, ours in (
        ("SGD", "SGD"), ("AdamW", "AdamW"), ("NAdam", "NAdamW"), ("AdEMAMix", "AdEMAMix"), ("ADOPT", "ADOPT"), ("LaProp", "LaProp"),
        ("SFAdamW", "ScheduleFreeAdamW"), ("Scion", "Scion"), ("Muon", "Muon"), ("SOAP", "SOAP"), ("PSGDKron", "KronPSGD"),
    ):  # fmt: skip
        yield Case("heavyball", theirs, {"lr": 0.01}, ours, {}, MATRICES)


def transformers_cases():
    paper = {"convention": "paper"}
    yield Case("transformers", "Adafactor", DECAY, "Adafactor", paper, PLAIN)
    fixed = {"lr": 0.02, "relative_step": False}
    yield Case("transformers", "Adafactor", {**fixed, "beta1": 0.9, "clip_threshold": 0.5}, "Adafactor", paper)
    yield Case("transformers", "Adafactor", {**fixed, "scale_parameter": False}, "Adafactor", paper)
    yield Case("transformers", "Adafactor", {"warmup_init": True}, "Adafactor", paper, PLAIN)


LIBRARIES = {
    "torch": torch_cases, "timm": timm_cases, "pytorch_optimizer": pytorch_optimizer_cases, "bitsandbytes": bitsandbytes_cases,
    "torchao": torchao_cases, "schedulefree": schedulefree_cases, "prodigyopt": prodigyopt_cases, "heavyball": heavyball_cases,
    "transformers": transformers_cases,
}  # fmt: skip
CASES = [case for cases in LIBRARIES.values() for case in cases()]


# ---- the libraries ----------------------------------------------------------------------------------------------------------
def classes_of(library: str) -> Any:
    """The module that has a library's classes; ImportError where it is not installed."""
    modules = {"torch": "torch.optim", "transformers": "transformers.optimization"}
    if library == "timm":
        return timm_classes()
    name = modules.get(library, library)
    return importlib.import_module(f"{name}.optim" if library in ("bitsandbytes", "torchao") else name)


@functools.cache
def timm_classes() -> Any:
    """timm.optim without the rest of timm, which wants torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        raise ImportError("No module named 'timm'")
    folder = Path(found.submodule_search_locations[0]) / "optim"
    package = types.ModuleType("timm_optim_alone")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    for file in sorted(folder.glob("[a-z]*.py")):
        if file.stem != "optim_factory":
            found = vars(importlib.import_module(f"{package.__name__}.{file.stem}"))
            vars(package).update({name: value for name, value in found.items() if isinstance(value, type)})
    return package


def version_of(library: str) -> str:
    from importlib.metadata import version

    return version(library).partition("+")[0]


@contextlib.contextmanager
def in_float32(case: Case):
    """Newton–Schulz in float32, where a library takes half precision for it: what is compared is the state."""
    if case.theirs not in ("Muon", "NorMuon", "SCION") or case.library == "heavyball":
        yield
    elif case.library == "torch":
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
            yield
    else:
        module, name = {
            "timm": ("timm_optim_alone.muon", "zeropower_via_newtonschulz"),
            "pytorch_optimizer": ("pytorch_optimizer.optimizer.utils.matrix", "zero_power_via_newton_schulz_5"),
        }[case.library]
        function = getattr(importlib.import_module(module), name)
        exact = tuple(torch.float32 if each is torch.bfloat16 else each for each in function.__defaults__)
        with mock.patch.object(function, "__defaults__", exact):
            yield


def made(case: Case, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A case's optimizer as its library makes it."""
    classes, settings = classes_of(case.library), dict(case.settings)
    if case.theirs == "Lookahead":
        return classes.Lookahead(torch.optim.AdamW(params, **settings))
    if case.library == "pytorch_optimizer" and case.theirs in ("Muon", "NorMuon"):
        matrices = [p for p in params if p.ndim > 1]
        groups = [{"params": matrices, "use_muon": True}, {"params": [p for p in params if p.ndim < 2], "use_muon": False}]
        return getattr(classes, case.theirs)(groups, **settings)
    if case.library == "pytorch_optimizer" and case.theirs == "SophiaH":
        settings["update_period"] = 10**9
    kind = getattr(classes, case.theirs)
    opt = kind(params, **settings)
    if case.library == "schedulefree":
        opt.train()
    return opt


def gradient(shape: tuple[int, ...], place: int, t: int) -> torch.Tensor:
    """A drift and noise, the same on every machine."""
    drift, noise = np.random.default_rng([1, place]), np.random.default_rng([2, place, t])
    return torch.tensor(
        np.asarray(0.7 * np.sign(drift.standard_normal(shape)) + noise.standard_normal(shape)), dtype=torch.float32
    )


def steps(opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], first: int, last: int, rate: float | None = None) -> None:
    """Steps; where `rate` is given, the learning rate rises to it."""
    for t in range(first, last):
        for group in opt.param_groups if rate else []:
            now = rate * min(1.0, (t + 1) / (FIRST - 1))
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        for i, p in enumerate(params):
            p.grad = gradient(tuple(p.shape), i, t)
        if type(opt).__name__ == "SophiaH" and t == 0:
            opt.step(hessian=[gradient(tuple(p.shape), i, 99).abs() for i, p in enumerate(params)])
        else:
            opt.step()


def start(case: Case) -> list[torch.nn.Parameter]:
    draws = (np.random.default_rng([3, i]).standard_normal(shape) for i, shape in enumerate(case.shapes.values()))
    return [torch.nn.Parameter(torch.tensor(np.asarray(draw), dtype=torch.float32)) for draw in draws]


def copied(value: Any) -> Any:
    """A state dict by value. torchao's tensors cannot be copied, and are replaced where they change."""
    if isinstance(value, torch.Tensor):
        return value if hasattr(value, "codes") else value.clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else copy.copy(value)


def numbers(value: Any) -> Any:
    """A coded state in the numbers that it stands for."""
    if hasattr(value, "codes"):
        return value.dequantize()
    return {k: numbers(v) for k, v in value.items()} if isinstance(value, dict) else value


def widened(case: Case, opt: Any, params: list[torch.nn.Parameter]) -> Any:
    """The optimizer of 32 bits of the same library, with the numbers that the codes of `opt` stand for: where these lead is what ours
    should reach, which goes on with 32 bits."""
    if case.library == "torchao":
        classes = importlib.import_module("torchao.optim.adam")
        group = opt.param_groups[0]
        plain = functools.partial(
            classes._AdamBase, block_size=1, bf16_stochastic_round=False, is_adamw=case.theirs.startswith("AdamW")
        )
        twin = plain(params, *(group[k] for k in ("lr", "betas", "eps", "weight_decay", "amsgrad")))
        twin.state.update({p: {k: numbers(v) for k, v in opt.state[p].items()} for p in params})
        return twin
    blockwise = importlib.import_module("bitsandbytes.functional").dequantize_blockwise
    twin = made(
        dataclasses.replace(case, theirs=case.theirs.replace("8bit", ""), settings=without(case.settings, "min_8bit_size")),
        params,
    )
    for p in params:
        state = dict(opt.state[p])
        for n in (1, 2):
            if f"qmap{n}" in state:
                codes, largest = state[f"state{n}"], state.pop(f"absmax{n}")
                rows = zip(codes, largest, strict=True) if largest.ndim > 1 else [(codes, largest)]
                table = state.pop(f"qmap{n}")
                each = [blockwise(c.contiguous(), absmax=a, code=table, blocksize=256) for c, a in rows]
                state[f"state{n}"] = (torch.stack(each) if largest.ndim > 1 else each[0]).float()
        twin.state[p] = state
    twin.initialized = True
    return twin


def without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k not in names}


class Result(NamedTuple):
    state_dict: dict[str, Any]
    before: list[torch.Tensor]
    after: list[torch.Tensor]


def taken(case: Case) -> Result:
    """The library's own: its state dict after the first steps, the parameters there, and where the next lead."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its step, bitsandbytes its kernels
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    params = start(case)
    with warnings.catch_warnings(), in_float32(case):
        warnings.simplefilter("ignore")
        opt = made(case, params)
        rate = case.settings.get("lr")
        varies = rate and not (case.library == "pytorch_optimizer" and case.theirs in ("Muon", "NorMuon"))
        steps(opt, params, 0, FIRST, rate if varies else None)
        state_dict = copied(opt.state_dict())
        before = [p.detach().clone() for p in params]
        if case.library == "torchao" or (
            case.library == "bitsandbytes" and "8bit" in case.theirs and case.ours not in ("Lamb", "LARS")
        ):
            opt = widened(case, opt, params)
        steps(opt, params, FIRST, FIRST + MORE)
    return Result(state_dict, before, [p.detach().clone() for p in params])


# ---- ours -------------------------------------------------------------------------------------------------------------------
def own(case: Case, params: list[torch.nn.Parameter]) -> Any:
    """Our optimizer for a case, as somebody makes it who changes the import."""
    import rlx_optim.torch as front

    kind = getattr(front, case.ours)
    given = {"lr": 0.5} if case.ours == "SGD" else {}
    if case.ours in ("Muon", "NorMuon") and len(case.shapes) > len([s for s in case.shapes.values() if len(s) > 1]):
        import rlx_optim

        given["otherwise"] = rlx_optim.AdamW()
    return kind([(name, p) for name, p in zip(case.shapes, params, strict=True)], **given, **case.own)


class Outcome(NamedTuple):
    """distance: max|ours − theirs| over the distance travelled, of the worst tensor; None where it was refused, with the words."""

    distance: float | None
    refusal: str = ""

    @property
    def says(self) -> str:
        return self.refusal or ("exact" if self.distance is not None and self.distance <= 1e-3 else f"{self.distance:.2g} off")

    @property
    def why(self) -> str:
        """A refusal in short, without what a table says anyway."""
        told, rule, hint = self.refusal.partition(", which is not this rule")
        if rule:
            return re.sub(r"^('s)?[:;]? ?", "", hint)
        if "; make it with " in told:
            return "make it with `" + told.partition("; make it with ")[2] + "`"
        _, _, why = told.partition(" cannot be taken over: ") if " cannot be taken over: " in told else told.partition(": ")
        for word, ours in (("which", "it"), ("whose", "its")):
            if (found := re.match(rf"the (checkpoint|state) is .*?, {word} (.*)", why)) is not None:
                return f"{ours} {found[2]}"
        return re.sub("^the checkpoint .*?: ", "", why)


def outcome(case: Case, result: Result) -> Outcome:
    """What becomes of a state dict in ours."""
    params = [torch.nn.Parameter(p.clone()) for p in result.before]
    opt = own(case, params)
    kept = copy.deepcopy(opt.state_dict())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.load_state_dict(copied(result.state_dict))
    except (TypeError, ValueError) as refusal:
        assert str(opt.state_dict()) == str(kept), "a refused state has left something behind"
        return Outcome(None, str(refusal))
    steps(opt, params, FIRST, FIRST + MORE)
    worst = 0.0
    for p, before, after in zip(params, result.before, result.after, strict=True):
        gap, moved = float((p.detach() - after).abs().max()), float((after - before).abs().max())
        worst = max(worst, gap / moved if math.isfinite(gap) else math.inf)
    return Outcome(worst)


# ---- golden files -----------------------------------------------------------------------------------------------------------
class Coded(torch.Tensor):
    """A stand-in for torchao's tensors, which decode themselves."""

    codes: Any = None
    values: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.values


def coded(values: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(values).as_subclass(Coded)
    found.values = values
    return found


def packed(value: Any, arrays: list[np.ndarray]) -> Any:
    """A value as JSON, its tensors in `arrays`."""
    if isinstance(value, torch.Tensor):
        kind, value = ("coded", value.dequantize()) if hasattr(value, "codes") else ("tensor", value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        arrays.append((value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy())
        return {kind: len(arrays) - 1, "dtype": dtype}
    if isinstance(value, dict):
        return {"dict": [[packed(k, arrays), packed(v, arrays)] for k, v in value.items()]}
    if isinstance(value, (list, tuple, set)):
        return {type(value).__name__ if type(value) in (list, set) else "tuple": [packed(each, arrays) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def unpacked(value: Any, arrays: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind in ("tensor", "coded"):
        tensor = torch.tensor(arrays[f"a{content}"]).to(getattr(torch, value["dtype"]))
        return coded(tensor) if kind == "coded" else tensor
    if kind == "dict":
        return {unpacked(k, arrays): unpacked(v, arrays) for k, v in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in ("torch", "float"):
        return getattr(torch, content) if kind == "torch" else float(content)
    return {"list": list, "tuple": tuple, "set": set}[kind](unpacked(each, arrays) for each in content)


def write(library: str) -> None:
    """The golden file of a library."""
    arrays: list[np.ndarray] = []
    found = {case.id: packed(tuple(taken(case)), arrays) for case in LIBRARIES[library]()}
    said = {"library": library, "version": version_of(library), "cases": found}
    text = np.frombuffer(json.dumps(said, separators=(",", ":")).encode(), np.uint8)
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN / f"{library}.npz", text=text, **{f"a{i}": each for i, each in enumerate(arrays)})


@functools.cache
def golden(library: str) -> tuple[str, dict[str, Result]]:
    """The version that wrote a golden file, and its cases."""
    with np.load(GOLDEN / f"{library}.npz") as arrays:
        said = json.loads(bytes(arrays["text"]))
        return said["version"], {name: Result(*unpacked(value, arrays)) for name, value in said["cases"].items()}


# ---- the pages --------------------------------------------------------------------------------------------------------------
PAGES = Path(__file__).parents[1] / "docs" / "migrate"
TABLE = re.compile(r"(<!-- states: (\w+) -->\n).*?(<!-- /states -->)", re.DOTALL)


@functools.cache
def outcome_of(case: Case) -> Outcome:
    return outcome(case, golden(case.library)[1][case.id])


#: settings that every row has, and need not be told
USUAL = (
    "lr",
    "betas",
    "momentum",
    "weight_decay",
    "min_8bit_size",
    "precondition_frequency",
    "nus",
    "trust_coeff",
    "trust_coefficient",
)


def called(name: str, settings: dict[str, Any]) -> str:
    return f"`{name}({', '.join(f'{k}={v!r}' for k, v in settings.items())})`" if settings else f"`{name}`"


def label(case: Case, first: Case) -> str:
    """What a case has that the first of its class has not."""
    found = [f"{k}={v!r}" for k, v in case.settings.items() if first.settings.get(k, case) != v and k not in ("lr", "betas")]
    return " and ".join([*(f"`{each}`" for each in found), *([case.note] if case.note else [])])


def state(cases: list[Case], first: Case) -> str:
    """What becomes of the states of one class in one of ours."""
    found = [(label(case, first), outcome_of(case)) for case in cases]
    assert all(each.refusal or each.says == "exact" for _, each in found), found
    exact = [words for words, each in found if not each.refusal]
    refused = [(words, each.why) for words, each in found if each.refusal]
    if not exact:
        return f"refused: {refused[0][1]}"
    also = f", also with {', '.join(filter(None, exact))}" if any(exact) else ""
    but = ", ".join(f"{words} ({why})" if why else words for words, why in refused)
    return f"**exact**{also}" + (f"; refused with {but}" if but else "")


def table(library: str) -> str:
    """What becomes of each class's state, in Markdown. Classes of which the same is true have one row."""
    cases = list(LIBRARIES[library]())
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for theirs, ours, own in dict.fromkeys((case.theirs, case.ours, tuple(case.own.items())) for case in cases):
        first = next(case for case in cases if case.theirs == theirs)
        mine = [case for case in cases if (case.theirs, case.ours, tuple(case.own.items())) == (theirs, ours, own)]
        says, here = state(mine, first), called(ours, dict(own))
        usual = called(theirs, without(first.settings, *USUAL))
        rows.setdefault((says, "" if says.startswith("refused") else here), []).append((usual, here))
    lines = ["| class | here | state |", "|---|---|---|"]
    for (says, _), names in rows.items():
        lines.append("| " + " | ".join(", ".join(dict.fromkeys(each)) for each in zip(*names, strict=True)) + f" | {says} |")
    return "\n".join(lines)


def renewed(text: str) -> str:
    """A page with its tables made anew."""
    return TABLE.sub(lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}", text)


if __name__ == "__main__":
    for name in [name for name in sys.argv[1:] or LIBRARIES if name != "pages"]:
        try:
            classes_of(name)
        except ImportError as problem:
            print(f"{name}: {problem}")
            continue
        write(name)
        print(
            f"{name} {version_of(name)}: {len(list(LIBRARIES[name]()))} cases, {(GOLDEN / f'{name}.npz').stat().st_size:,} bytes"
        )
    for page in PAGES.glob("*.md"):
        page.write_text(renewed(page.read_text()))
