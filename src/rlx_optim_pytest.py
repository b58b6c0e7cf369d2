"""The pytest plugin of rlx-optim: `pytest --optim PACKAGE:CLASS` runs each check of the conformance suite as a test.

Where --optim is not given it does nothing, and imports nothing.
"""

from __future__ import annotations

import functools
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
        from rlx_optim.check import found, subject_of
        from rlx_optim.check.rules import RuleChecks
        from rlx_optim.check.table import chosen
        from rlx_optim.registry import spec_class
        from rlx_optim.spec import Spec

        option = self.config.getoption
        try:
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(option("--optim-kwargs")).items()}
            thing = found(self.name) if ":" in self.name else spec_class(self.name)
            if isinstance(thing, type) and issubclass(thing, Spec):
                asked = RuleChecks(thing, settings, ["cpu"] if option("--optim-quick") else None)
                spoken = asked.told(*next(asked.plan()))  # the others step the shapes that it finds
                for kind, engine, run in asked.plan():
                    tell = (lambda: spoken) if kind == "language" else functools.partial(asked.told, kind, engine, run)
                    yield OneOfRule.from_parent(self, name=f"{kind}, {engine}", tell=tell, spoken=spoken.ok)
                return
            subject = subject_of(self.name, settings, claimed=option("--optim-as"), ranks=option("--optim-ranks") or 2)
        except (AttributeError, ImportError, KeyError, TypeError, ValueError) as problem:
            raise pytest.UsageError(f"--optim {self.name}: {problem}") from problem
        for check in chosen(subject.kind, quick=option("--optim-quick"), ranks=option("--optim-ranks")):
            yield One.from_parent(self, name=check.name, check=check, subject=subject)


class One(pytest.Item):
    """A check of it."""

    def __init__(self, *, check: Any, subject: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self.check, self.subject = check, subject

    def runtest(self) -> None:
        from rlx_optim.check.table import ran

        result = ran(self.check, self.subject)
        self.user_properties.append(("seen", result.shown))
        if result.status == "skipped":
            pytest.skip(result.note)
        if result.status != "passed":
            said = f"{result.note or result.status} (seen: {result.shown or 'nothing'})\n{result.reason}"
            pytest.xfail(f"a matter of taste: {said}") if result.taste else pytest.fail(said, pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.subject.target}: {self.name}"


class OneOfRule(pytest.Item):
    """A check of a rule, on one engine."""

    def __init__(self, *, tell: Any, spoken: bool, **kwargs: Any):
        super().__init__(**kwargs)
        self.tell, self.spoken = tell, spoken

    def runtest(self) -> None:
        if not (self.spoken or self.name.startswith("language")):
            pytest.skip("the rule is outside the language")
        finding = self.tell()
        if finding.skipped:
            pytest.skip(finding.note)
        if not finding.ok:
            pytest.fail(f"{finding.note} (seen: {finding.seen})", pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.parent.name if self.parent else ''}: {self.name}"


@pytest.hookimpl(tryfirst=True)  # so that -k sees them
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for target in config.getoption("--optim"):
        parent = Target.from_parent(session, name=target, nodeid=target)
        items += list(parent.collect())
