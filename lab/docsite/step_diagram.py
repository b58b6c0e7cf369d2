"""The picture of the page on the architecture: one step, file by file, as an SVG made from the table below.

python -m lab.docsite.step_diagram          writes docs/assets/step.svg
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).parents[2] / "docs" / "assets" / "step.svg"
#: (what happens, boxes: (title, file below src/rlx_optim, what it does)) from top to bottom
ROWS = (
    ("call", (
        ("NumPy", "numpy/optimizer.py", "step, step_all"),
        ("torch", "torch/step.py", "opt.step()"),
        ("JAX", "optax/transform.py", "tx.update()"),
    )),
    ("collect, decide", (
        ("check every array", "numpy/validation.py", "all refusals are before this line"),
        ("take the step?", "guard.py", "nonfinite, skip_above, GradScaler"),
        ("who steps what", "routing.py", "rule and reason for each tensor"),
    )),
    ("plan", (
        ("what goes together", "stepping.py", "TensorStates to bundles; an LRU by the choice"),
        ("a rule as data", "program.py", "an update traced once: passes over values"),
    )),
    ("place", (
        ("Local", "torch/placements/local.py", "this process's memory"),
        ("Sharded", "torch/placements/sharded.py", "this rank's part"),
        ("Owner", "torch/placements/owner.py", "whole matrices, one rank each"),
        ("Host", "torch/placements/host.py", "state in host memory"),
    )),
    ("run", (
        ("reference", "engines/reference.py", "NumPy, float64"),
        ("cpu", "engines/cpu", "LLVM and BLAS"),
        ("torch", "engines/torch_.py", "any device"),
        ("triton", "engines/triton_", "CUDA"),
        ("jax", "engines/jax_.py", "XLA"),
    )),
)  # fmt: skip
MONOSPACE = ' font-family="ui-monospace, Menlo, Consolas, monospace"'
WIDTH, LEFT, GAP, HIGH, STEP = 960, 128, 12, 74, 104
FILLS = ("#dfe4ff", "#eceff4", "#fff0d9", "#e9e2f7", "#d9f2e6")


def draw() -> str:
    """The SVG."""
    height = STEP * len(ROWS) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="One step: call, collect and decide, plan, place, run" '
        'font-family="ui-sans-serif, system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
        '<defs><marker id="down" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 10 5 0 10z" fill="#8892a6"/></marker></defs>',
    ]
    for r, (label, boxes) in enumerate(ROWS):
        top, width = STEP * r + 6, (WIDTH - LEFT - GAP * len(boxes)) / len(boxes)
        lines.append(f'<rect x="4" y="{top + 24}" width="112" height="26" rx="13" fill="#3b4252"/>')
        lines.append(_text(60, top + 41.5, label, 12.5, "#f5f7fb"))
        for k, (title, file, what) in enumerate(boxes):
            x = LEFT + k * (width + GAP)
            middle = x + width / 2
            lines.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{HIGH}" rx="9" fill="{FILLS[r]}" stroke="#8892a6"/>'
            )
            lines.append(_text(middle, top + 22, title, 15, "#1b2130", ' font-weight="600"'))
            lines.append(
                _text(middle, top + 42, file, 11.5, "#3b4252", ' font-family="ui-monospace, Menlo, Consolas, monospace"')
            )
            lines.append(_text(middle, top + 61, what, 12, "#3b4252"))
        if r + 1 < len(ROWS):
            x = LEFT + (WIDTH - LEFT - GAP) / 2
            lines.append(
                f'<path d="M{x} {top + HIGH + 3}V{top + STEP - 4}" stroke="#8892a6" stroke-width="1.6" marker-end="url(#down)"/>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, size: float, fill: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle" font-size="{size}"{more} fill="{fill}">{escape(text)}</text>'


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
