"""A plugin for pytest, ``-p tools.gpu.recorder --record FILE``: writes each outcome at once, as a line of JSON,
so that a run that is stopped has told what it found, and another one goes on with the rest: ``--before``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

_MESSAGE = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="file for the outcome of each test, as lines of JSON")
    parser.addoption("--before", type=Path, help="names: passed before, which are left out, lost, which go last")
    parser.addoption("--seconds", type=float, help="no test is begun later")


def pytest_configure(config: pytest.Config) -> None:
    path, before = config.getoption("--record"), config.getoption("--before")
    if path is not None:
        known = {} if before is None else json.loads(before.read_text(encoding="utf-8"))
        config.pluginmanager.register(Recorder(path, known, config.getoption("--seconds")))


class Recorder:
    """Writes ``{"collected": n}``, for each test ``{"begun": name}``, and then ``test``, ``outcome``, ``seconds`` and,
    where it did not pass, ``message``; for a module that was skipped or could not be imported too."""

    def __init__(self, path: Path, before: dict[str, list[str]], seconds: float | None):
        self.path, self.before = path, before
        self.end = None if seconds is None else time.monotonic() + seconds

    def _tell(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._tell(test=report.nodeid, outcome=report.outcome, seconds=0.0, message=_message(report))

    @pytest.hookimpl(trylast=True)  # behind the choice by -m
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._tell(collected=len(items))
        passed, lost = (set(self.before.get(name, ())) for name in ("passed", "lost"))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        left = [item for item in items if item.nodeid not in passed]
        items[:] = sorted(left, key=lambda item: (item.nodeid in lost, item.get_closest_marker("slow") is not None))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.end is not None and time.monotonic() > self.end:
            item.session.shouldstop = "no time for the others"
            return True
        self._tell(begun=item.nodeid)
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            message = {} if report.outcome == "passed" else {"message": _message(report)}
            self._tell(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **message)


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext[-_MESSAGE:]
