"""A plugin for pytest, ``-p tools.gpu.recorder --record FILE``: writes each outcome at once, as a line of JSON,
so that a run that is stopped has told what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_MESSAGE = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="file for the outcome of each test, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is not None:
        config.pluginmanager.register(Recorder(path))


class Recorder:
    """Writes ``{"collected": n}``, then for each test ``test``, ``outcome``, ``seconds`` and, where it did not pass,
    ``message``; for a module that was skipped or could not be imported too."""

    def __init__(self, path: Path):
        self.path = path

    def _tell(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._tell(test=report.nodeid, outcome=report.outcome, seconds=0.0, message=_message(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell(collected=len(session.items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            message = {} if report.outcome == "passed" else {"message": _message(report)}
            self._tell(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **message)


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext[-_MESSAGE:]
