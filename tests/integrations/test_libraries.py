"""The libraries whose state is taken over, run beside ours: where they are installed, they still leave what tests/golden/foreign keeps
of them, and it still goes on here as there."""

import pytest

torch = pytest.importorskip("torch")

from foreign_states import CASES, classes_of, golden, outcome, outcome_of, taken, version_of  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.library}-{case.id}")
def test_state_of_the_library_itself(case):
    try:
        classes_of(case.library)
    except ImportError as problem:
        pytest.skip(str(problem))
    live, (version, results) = taken(case), golden(case.library)
    seen, kept = outcome(case, live), outcome_of(case)
    assert bool(seen.refusal) == bool(kept.refusal), seen
    assert seen.refusal or seen.distance <= 1e-3
    if version == version_of(case.library) and case.theirs not in ("PSGDKron", "Kron"):  # whose noise is the process's
        for a, b, start in zip(live.after, results[case.id].after, results[case.id].before, strict=True):
            assert (a - b).abs().max() <= 1e-3 * (b - start).abs().max()
