"""The page on the architecture: short, with files that exist, and a picture made from its table."""

import re
from pathlib import Path

import pytest

import rlx_optim

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = Path(rlx_optim.__file__).parent
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="installed package")


def test_it_is_read_in_minutes():
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 1500


def test_the_files_it_names_exist():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 25
    assert {name for name in named if not (SOURCE / name).exists() and not (ROOT / name).exists()} <= {"kernels", "src/"}


def test_the_picture_is_made_from_its_table():
    from lab.docsite import step_diagram

    assert step_diagram.TARGET.read_text(encoding="utf-8") == step_diagram.draw(), "run python -m lab.docsite.step_diagram"
    files = {file for _, boxes in step_diagram.ROWS for _, file, _ in boxes}
    assert {file for file in files if not (SOURCE / file).exists()} == set()
