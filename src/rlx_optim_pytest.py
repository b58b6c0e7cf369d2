"""The pytest plugin of rlx-optim: `pytest --optim PACKAGE:CLASS` runs each check of the conformance suite as a test.

Where --optim is not given it does nothing, and imports nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlx-optim", "conformance of optimizers")
    group.addoption(
        "--optim", action="append", default=[], metavar="PACKAGE:CLASS", help="check this optimizer, or rule; may be repeated"
    )
    group.addoption("--optim-kwargs", default="{}", metavar="JSON", help="its settings beside the defaults")
    group.addoption("--optim-quick", action="store_true", help="leave out what takes long")
    group.addoption("--optim-as", default=None, metavar="NAME", help="the rule that it claims to be")
    group.addoption("--optim-ranks", type=int, default=0, metavar="N", help="also over that many processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--optim") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []  # no files were named: only the checks


class Target(pytest.Collector):
    """An optimizer."""

    def collect(self) -> Iterator[pytest.Item]:
        from rlx_optim.check import subject_of
        from rlx_optim.check.table import choose_checks

        option = self.config.getoption
        quick, ranks = option("--optim-quick"), option("--optim-ranks")
        try:
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(option("--optim-kwargs")).items()}
            given = {"claimed": option("--optim-as"), "ranks": ranks or 2, "engines": ["cpu"] if quick else None}
            subject = subject_of(self.name, settings, **given)
        except (AttributeError, ImportError, KeyError, TypeError, ValueError) as problem:
            raise pytest.UsageError(f"--optim {self.name}: {problem}") from problem
        for check in choose_checks(subject, quick=quick, ranks=ranks):
            name = ", ".join(filter(None, (check.name, check.engine)))
            yield One.from_parent(self, name=name, check=check, subject=subject)


class One(pytest.Item):
    """A check of it."""

    def __init__(self, *, check: Any, subject: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self.check, self.subject = check, subject

    def runtest(self) -> None:
        from rlx_optim.check.table import run_check

        result = run_check(self.check, self.subject)
        self.user_properties.append(("seen", result.shown))
        if result.status == "skipped":
            pytest.skip(result.note)
        if result.status != "passed":
            said = f"{result.note or result.status} (seen: {result.shown or 'nothing'})\n{result.reason}"
            pytest.xfail(f"a matter of taste: {said}") if result.taste else pytest.fail(said, pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.parent.name if self.parent else ''}: {self.name}"


@pytest.hookimpl(tryfirst=True)  # so that -k sees them
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for target in config.getoption("--optim"):
        parent = Target.from_parent(session, name=target, nodeid=target)
        items += list(parent.collect())
