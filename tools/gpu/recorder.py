"""A plugin for pytest, ``-p tools.gpu.recorder --told FOLDER``: tells each outcome at once (:mod:`.told`), leaves out
what passed before, and ends a process of pytest-xdist whose card a kernel has taken away: another one goes on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from . import told

_MESSAGE = 2000
# Seconds of a test after which it hangs: the slow ones compile what does not ship.
_LIMIT, _LIMIT_OF_SLOW = 120, 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--told", type=Path, help="folder for the outcome of each test, as lines of JSON")
    parser.addoption("--until", type=float, default=float("inf"), help="no test is begun later: of time.time()")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--told") is not None:
        # Not by its variable in the environment, which another pytest around this one may have left there.
        worker = getattr(config, "workerinput", {}).get("workerid", "")
        config.pluginmanager.register(Recorder(config.getoption("--told"), config.getoption("--until"), worker))


class Recorder:
    """Tells what is begun in the processes that run tests, and outcomes in the one that has those of all; of a module
    that was skipped or could not be imported too."""

    def __init__(self, folder: Path, until: float, worker: str):
        self.folder, self.until, self.worker = folder, until, worker
        self.teller = told.Teller(folder, f"tests-{worker}")
        self.has_failed = False

    @pytest.hookimpl(trylast=True)  # behind the choice by -m
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.teller.tell(collected=len(items))
        passed = {line["test"] for line in told.read(self.folder, told.FRAME).with_outcome("passed")}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = sorted((item for item in items if item.nodeid not in passed), key=_is_slow)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.time() > self.until:
            return True  # left for another run
        self.teller.begin(item.nodeid, _LIMIT_OF_SLOW if _is_slow(item) else _LIMIT)
        return None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._tell(report, 0.0, is_extra=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.outcome == "failed"
        if report.when == "call" or report.outcome != "passed":
            self._tell(report, report.duration)

    def pytest_runtest_logfinish(self) -> None:
        if self.has_failed and self.worker and _is_card_lost():
            os._exit(1)
        self.has_failed = False

    def _tell(self, report: pytest.CollectReport | pytest.TestReport, seconds: float, **line: Any) -> None:
        message = {} if report.outcome == "passed" else {"message": _message(report)}
        if not self.worker:
            line |= {"test": report.nodeid, "outcome": report.outcome, "seconds": round(seconds, 3), **message}
            self.teller.tell(**line)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _is_card_lost() -> bool:
    """Whether no later test of this process could use the card: a fault of a kernel ends the context."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext[-_MESSAGE:]
