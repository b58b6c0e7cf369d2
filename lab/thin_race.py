"""Keep what the races page shows of a race: benchmarks/race/MODEL.json, from the results.json that `rlx-optim race` writes.

    rlx-optim lm-race --model char-gpt --steps 300 --seeds 1 --out my-race
    python -m lab.thin_race my-race

Of the curves it keeps means over POINTS stretches of steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 60


def thinned(curve: dict[str, Any]) -> dict[str, list[float]]:
    """The mean step and loss of each stretch."""
    parts = [np.array_split(np.array(curve[name], np.float64), min(POINTS, len(curve["step"]))) for name in ("step", "loss")]
    return {name: [float(f"{part.mean():.5g}") for part in each] for name, each in zip(("step", "loss"), parts, strict=True)}


def main() -> None:
    found = json.loads((Path(sys.argv[1]) / "results.json").read_text())
    for entry in found["optimizers"].values():
        entry["curve"] = thinned(entry["curve"])
    out = Path(__file__).parents[1] / "benchmarks" / "race" / f"{found['model']['name']}.json"
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(out)


if __name__ == "__main__":
    main()
