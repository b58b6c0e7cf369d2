"""The formulas of a rule's docstring as KaTeX.

    latex("p ← p − lr·m̂/(√v̂ + eps)")
    # ["p \\gets p - \\frac{\\eta\\,\\hat{m}}{\\sqrt{\\hat{v}} + \\varepsilon}"]

The docstrings hold formulas as text that reads well in `help()`. It is a small language with a grammar, read here by recursive
descent; a word that is neither a hyperparameter, nor a known function, nor a symbol is an error, so a typing mistake is one too.

    line     = relation {"," relation}
    relation = sum {("←" | "=") sum}
    sum      = product {("+" | "−") product}
    product  = factor {("·" | "/") factor}                    from the left: a·b/c is (a·b)/c
    factor   = "−" factor | atom {"²" | "ᵀ" | "⁻¹" | "⁻ᵀ" | "^" factor}
    atom     = number | name | function "(" sum {"," sum} ")" | "√" factor | "(" sum ")" | "‖" sum "‖" | "|" sum "|"

What is read is handed to a writer, a method for each construct. `Latex` is one; tests/test_formulas.py has another, which
computes, and compares the formulas with the rules.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any

FUNCTIONS = (
    "max",
    "min",
    "sign",
    "rms",
    "mean",
    "sum",
    "row_mean",
    "column_mean",
    "row_norm",
    "column_norm",
    "polar",
    "qr",
    "triu",
)
HAT = "\N{COMBINING CIRCUMFLEX ACCENT}"
LETTER = f"[A-Za-zρμΠ]{HAT}?"
NUMBER = r"\d+(?:\.\d+)?(?:e-\d+)?"
WORD = rf"{LETTER}[A-Za-z0-9]*(?:_(?:\{{[^}}]*\}}|[A-Za-z0-9]+))*(?:\[\d\])?"
TOKEN = re.compile(rf"\s*({NUMBER}|⁻¹|⁻ᵀ|ρ∞|{WORD}|\S)")


class FormulaError(ValueError):
    """Text that is not in the language."""


def read(text: str, write: Any) -> list[str]:
    """What the writer makes of each relation of a line."""
    return _Reader(text, write).line()


def latex(text: str, names: Collection[str] = ()) -> list[str]:
    """A line of formulas, one after the other. `names` are words that stand for themselves: the rule's hyperparameters."""
    return read(text, Latex(names))


class _Reader:
    def __init__(self, text: str, write: Any):
        self.text, self.write = text, write
        self.tokens = TOKEN.findall(unicodedata.normalize("NFD", text))  # ĥ is h and a hat

    def at(self, *tokens: str) -> bool:
        return bool(self.tokens) and self.tokens[0] in tokens

    def next(self) -> str:
        if not self.tokens:
            raise FormulaError(f"{self.text!r} ends too early")
        return self.tokens.pop(0)

    def closed(self, token: str) -> None:
        if not self.at(token):
            raise FormulaError(f"{self.text!r}: expected {token!r} before {' '.join(self.tokens)!r}")
        self.next()

    def listed(self, one: Any) -> list[str]:
        found = [one()]
        while self.at(","):
            self.next()
            found.append(one())
        return found

    def line(self) -> list[str]:
        found = self.listed(self.relation)
        if self.tokens:
            raise FormulaError(f"{self.text!r}: {' '.join(self.tokens)!r} is left over")
        return found

    def relation(self) -> str:
        left = self.sum()
        while self.at("←", "="):
            left = self.write.relation(left, self.next(), self.sum())
        return left

    def sum(self) -> str:
        left = self.product()
        while self.at("+", "−"):
            left = self.write.sum(left, self.next().replace("−", "-"), self.product())
        return left

    def product(self) -> str:
        left = self.factor()
        while self.at("·", "/"):
            join = self.write.product if self.next() == "·" else self.write.fraction
            left = join(left, self.factor())
        return left

    def factor(self) -> str:
        if self.at("−"):
            self.next()
            return self.write.negative(self.factor())
        base = self.atom()
        while self.at("^", "²", "ᵀ", "⁻¹", "⁻ᵀ"):
            sign = self.next()
            base = self.write.power(base, self.factor()) if sign == "^" else self.write.mark(base, sign)
        return base

    def atom(self) -> str:
        token = self.next()
        if token == "√":
            return self.write.root(self.factor())
        if token in FUNCTIONS and self.at("("):
            self.next()
            arguments = self.listed(self.sum)
            self.closed(")")
            return self.write.call(token, arguments)
        for left, right, method in (("(", ")", "group"), ("‖", "‖", "norm"), ("|", "|", "absolute")):
            if token == left:
                inside = self.sum()
                self.closed(right)
                return getattr(self.write, method)(inside)
        try:
            return self.write.number(token) if token[0].isdigit() else self.write.name(token)
        except KeyError:
            raise FormulaError(f"{self.text!r}: {token!r} is no hyperparameter, function or symbol") from None


# ---- KaTeX ------------------------------------------------------------------------------------------------------------------
SYMBOLS = {
    "lr": r"\eta", "weight_decay": r"\lambda", "eps": r"\varepsilon", "b1": r"\beta_1", "b2": r"\beta_2", "b3": r"\beta_3",
    "beta1": r"\beta_1", "b2_t": r"\beta_{2,t}", "nu1": r"\nu_1", "nu2": r"\nu_2", "momentum": r"\mu", "dampening": r"\tau",
    "gamma": r"\gamma", "beta": r"\beta", "vmax": r"v_{\max}", "prev": r"g_{\mathrm{prev}}", "beta2_decay": r"\kappa",
    "clip_threshold": "d",
    "clip_norm": r"c_{\max}", "max_grad_norm": r"c_{\max}", "alpha": r"\alpha", "neg": r"g_{\mathrm{neg}}",
    "slow": r"m_{\mathrm{slow}}", "alpha_warmup": r"T_\alpha", "beta3_warmup": r"T_{\beta_3}", "trust_coefficient": r"\tau",
    "clip": r"\rho",
    "momentum_decay": r"\psi", "precond_lr": r"\eta_q", "ρ∞": r"\rho_\infty",
    "…": r"\cdots", "½": r"\tfrac12", "scale": r"\mathrm{scale}", "rows": r"\mathrm{rows}", "columns": r"\mathrm{columns}",
}  # fmt: skip
#: arguments that formulas name by their parts
PAIRS = {"betas": r"(\beta_1, \beta_2)", "nus": r"(\nu_1, \nu_2)", "ns_coefficients": "(a, b, c)", "shampoo_beta": r"\beta"}
THREE = {"betas": r"(\beta_1, \beta_2, \beta_3)"}
LETTERS = {"ρ": r"\rho", "μ": r"\mu", "Π": r"\Pi"}
MARKS = {"²": "2", "ᵀ": r"\top", "⁻¹": "-1", "⁻ᵀ": r"-\top"}
SPACED = {name: name.replace("_", r"\,") for name in FUNCTIONS if "_" in name}


def _escaped(word: str) -> str:
    return word.replace("_", r"\_")


def symbol(field: str, parts: int = 1) -> str:
    """How a hyperparameter is written in formulas."""
    return (
        (THREE.get(field) if parts == 3 else None) or PAIRS.get(field) or SYMBOLS.get(field) or rf"\mathrm{{{_escaped(field)}}}"
    )


class Latex:
    def __init__(self, names: Collection[str]):
        self.names = names

    def relation(self, left: str, sign: str, right: str) -> str:
        return rf"{left} {sign.replace('←', chr(92) + 'gets')} {right}"

    def sum(self, left: str, sign: str, right: str) -> str:
        return f"{left} {sign} {right}"

    def product(self, left: str, right: str) -> str:
        return left + (r" \cdot " if right[0].isdigit() else r"\,") + right

    def fraction(self, left: str, right: str) -> str:
        return rf"\frac{{{bare(left)}}}{{{bare(right)}}}"  # which groups by itself

    def negative(self, inside: str) -> str:
        return f"-{inside}"

    def power(self, base: str, exponent: str) -> str:
        return f"{base}^{{{bare(exponent)}}}"

    def mark(self, base: str, sign: str) -> str:
        return f"{base}^{{{MARKS[sign]}}}"

    def root(self, inside: str) -> str:
        return rf"\sqrt{{{bare(inside)}}}"

    def norm(self, inside: str) -> str:
        return rf"\left\Vert {inside} \right\Vert"

    def absolute(self, inside: str) -> str:
        return rf"\left\vert {inside} \right\vert"

    def group(self, inside: str) -> str:
        tall = r"\frac" in inside or r"\sqrt" in inside
        return rf"\left({inside}\right)" if tall else f"({inside})"

    def call(self, function: str, arguments: Sequence[str]) -> str:
        known = function in ("max", "min")
        shown = rf"\{function}" if known else rf"\operatorname{{{SPACED.get(function, function)}}}"
        return shown + self.group(", ".join(arguments))

    def number(self, token: str) -> str:
        return re.sub(r"^1e(-\d+)$", r"10^{\1}", token)

    def name(self, token: str) -> str:
        if token in SYMBOLS or token in self.names:
            return symbol(token)
        base, _, index = token.removesuffix("]").partition("[")
        if index:
            return f"{SYMBOLS[base]}_{index}"
        match = re.fullmatch(rf"({LETTER})(\d*|_\w+|_\{{.*\}})", token)
        if not match:
            raise KeyError(token)
        letter = LETTERS.get(match[1][0], match[1][0])
        subscript = match[2].lstrip("_").strip("{}")
        return (rf"\hat{{{letter}}}" if HAT in match[1] else letter) + (f"_{{{subscript}}}" if subscript else "")


def bare(text: str) -> str:
    """Without the pair of parentheses around the whole, where there is one."""
    for left, right in ((r"\left(", r"\right)"), ("(", ")")):
        if text.startswith(left) and text.endswith(right):
            inside = text[len(left) : -len(right)]
            depths = list(itertools.accumulate((c == "(") - (c == ")") for c in inside))
            return text if min(depths) < 0 else inside  # "(a) (b)" closes before it ends
    return text
