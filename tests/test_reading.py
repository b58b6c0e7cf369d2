"""What matrix rules read: a step that CUDA records must get its floats through `scalars`."""

import pytest

from rlx_optim.language import LanguageError
from rlx_optim.reading import check_replays
from rlx_optim.registry import OURS
from rlx_optim.rules.muon import Muon


@pytest.mark.parametrize("kind", [kind for kind in OURS if kind.matrix], ids=lambda kind: kind.name)
def test_what_is_recorded_reads_no_float(kind):
    for shape in ((8, 4), (6, 6)):
        check_replays(kind(lr=0.1), shape)


class Reading(Muon):
    """As Muon, but the rate is read by the update itself."""

    def graph_safe(self):
        return True

    def update(self, E, x):
        return super().update(E, x.set(g=x.g * self.lr))


def test_a_float_that_update_reads_is_refused_by_name():
    with pytest.raises(LanguageError, match=r"Reading\.update reads 'lr'"):
        check_replays(Reading(lr=0.1), (8, 4))
