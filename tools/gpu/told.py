"""Processes that go through tests or kernels tell of each at once, as lines of JSON in a file of their own: a run that
is cut has told what it found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FRAME = "frame"  # tells what passed in an earlier run, and what it has ended
_OUTCOMES = ("passed", "skipped", "failed")


class Teller(NamedTuple):
    """One file, ``<writer>.jsonl``."""

    folder: Path
    writer: str

    def tell(self, **line: Any) -> None:
        """Append ``collected`` (a number), or ``test`` (a name), ``outcome``, ``seconds``, ``message`` where it did not
        pass, ``is_extra`` where it is none of those that were collected, and whatever else is known of it."""
        with (self.folder / f"{self.writer}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self, name: str, limit: float) -> None:
        """``limit``: seconds after which it hangs."""
        self.tell(begun=name, process=os.getpid(), limit=limit)

    def lose(self, begun: dict[str, Any], seconds: float, message: str) -> None:
        """Tell of one that has begun that its process has ended: it has failed."""
        self.tell(test=begun["begun"], outcome="failed", seconds=round(seconds, 3), message=message)


@dataclass
class Told:
    """collected: how many there are; ended, begun: name -> its line. What has ended is no longer begun."""

    collected: int = 0
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: dict[str, dict[str, Any]] = field(default_factory=dict)

    def with_outcome(self, outcome: str) -> list[dict[str, Any]]:
        return [line for line in self.ended.values() if line["outcome"] == outcome]

    @property
    def left(self) -> int:
        """How many have no outcome."""
        return self.collected - sum(not line.get("is_extra") for line in self.ended.values())

    def figures(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "collected": self.collected,
            "counts": dict(Counter(line["outcome"] for line in self.ended.values())),
            "failures": self.with_outcome("failed"),
            "skipped": dict(Counter(line["message"] for line in self.with_outcome("skipped"))),
            "known": [line for line in self.ended.values() if line["outcome"] != "failed"],
        }


def read(folder: Path, writer: str = "*") -> Told:
    """All that was told, or by some writers. Of several outcomes the worst counts, and of these the frame's."""
    found = Told()
    for path in sorted(folder.glob(f"{writer}.jsonl"), key=lambda path: (path.stem != FRAME, path.stem)):
        last = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line may be cut
                line = json.loads(text)
                found.collected = max(found.collected, line.get("collected", 0))
                if "begun" in line:
                    last = {line["begun"]: line}  # a process does one thing at a time
                if "test" in line:
                    known = found.ended.get(line["test"], line)
                    found.ended[line["test"]] = max(known, line, key=lambda each: _OUTCOMES.index(each["outcome"]))
        found.begun |= last
    found.begun = {name: line for name, line in found.begun.items() if name not in found.ended}
    return found


class Watch:
    """The frame's view of a folder: ends the processes in which a test or a kernel hangs. ``before``: figures of an
    earlier run; what did not fail there is known."""

    def __init__(self, folder: Path, before: dict[str, Any]):
        self.folder, self.teller = folder, Teller(folder, FRAME)
        self._since: dict[str, float] = {}  # a line that begins one -> when it was seen first
        folder.mkdir()
        for line in before.get("known", ()):
            self.teller.tell(**line)

    def look(self) -> Told:
        """All that has been told so far."""
        found, now = read(self.folder), time.monotonic()
        since = {str(line): self._since.get(str(line), now) for line in found.begun.values()}
        for line in found.begun.values():
            if now - since[str(line)] > line["limit"]:
                self.teller.lose(line, line["limit"], f"it hangs: ended after {line['limit']:g} s")
                with contextlib.suppress(OSError):
                    os.kill(line["process"], getattr(signal, "SIGKILL", signal.SIGTERM))
        self._since = since
        return found
