"""The coefficients of Newton–Schulz steps X ← a·X + (b·A + c·A²)·X, A = X·Xᵀ, that are known by name.

A scheme is the triple of each step, taken on u/(‖u‖ + eps). Where its authors divide the norm by more, so that no singular value
is above 1, its first step does. Polar Express differs from code to code (other bounds, safety and cushion): "polar_express" is
the authors', "speedrun" what modded-nanogpt and dion have. "aol" is Emerging-Optimizers', which begins as the others do: the
start that it is named after (flash-newton-schulz) scales rows apart and leads to another matrix than the polar factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Triple = tuple[float, float, float]
#: how many steps there are unless said
STEPS = 5


def safer(safety: float, first: Triple, *others: Triple) -> tuple[Triple, ...]:
    """A scheme whose norm is taken so many times: its first step divides."""
    a, b, c = first
    return (a / safety, b / safety**3, c / safety**5), *others


KELLER = (3.4445, -4.7750, 2.0315)
SAFETY = 1.02  # of the speedrun
SCHEMES: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan's Muon
    "keller": (KELLER,) * 5,
    # Jiacheng You's; "quintic" of Emerging-Optimizers, timm and pytorch_optimizer, "dion" of optax
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., arXiv:2505.16932: the first five of NoahAmsel/PolarExpress
    "polar_express": safer(
        1.01,
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064838, -2.893047735332589, 0.5252849256975651),
        (3.9263479922546547, -2.854746803476529, 0.5318022422894988),
        (3.2982187133085152, -2.424541981026706, 0.48632008358844064),
        (2.297036943455257, -1.63662558125903, 0.4002628455953626),
    ),
    # Polar Express with five steps in view, safety and cushion 0.02
    "speedrun": safer(
        SAFETY,
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Grishina et al., arXiv:2506.10935, as Emerging-Optimizers has them
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # eight steps to come near 1, two to reach it
    "deepseek_v4": (*(KELLER,) * 8, *((2.0, -1.5, 0.5),) * 2),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
#: the steps of a scheme's list that come after those it has by itself
FURTHER: dict[str, tuple[Triple, ...]] = {
    "polar_express": (
        (1.8763805351440408, -1.2347896577722248, 0.35891887501668485),
        (1.856442348572721, -1.2132449881149632, 0.3568003487930794),
        (1.8564367725, -1.2132398983, 0.3568007178),
        (1.8564311670, -1.2132289083, 0.3567953310),
        (1.8749954776, -1.2499909552, 0.3749954776),
    )
}


def steps_of(coefficients: Any, steps: int) -> tuple[int, Any]:
    """How many steps, and the triple of all or of each: the last goes on. A name or several triples say by themselves how many,
    unless `steps` is another number than usual."""
    several: Sequence[Any] = SCHEMES[coefficients] if isinstance(coefficients, str) else coefficients
    if not isinstance(several[0], tuple):
        return steps, several
    n = len(several) if steps == STEPS else steps
    further = FURTHER.get(coefficients, ()) if isinstance(coefficients, str) else ()
    return n, (*several, *further)[:n]
