"""Children that try kernels, without torch: for what only the parent decides."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.fused.trust.trial import Job, Trials
from pascal_attn_core.machine.runtime import Runtime

from .device import CardKernels
from .driver import StandIn
from .emulation import CARD

_CHILD = """
import json, os, signal, sys, time
job = json.loads(sys.argv[1])
with open(sys.argv[2], "a") as file:
    for row in job["needed"] + job["others"]:
        name, error = "-".join(str(part) for part in row if part and part is not True), 1e-7
        print(json.dumps({{"variant": name, "begun": True}}), file=file, flush=True)
        {body}
        print(json.dumps({{"variant": name, "error": error, "limit": 1e-4}}), file=file, flush=True)
"""


class Starter:
    """Starts children that find every kernel right, unless ``body``, which each runs for each, does something else.

    Attributes:
        jobs, children: so far.
    """

    def __init__(self, body: str = "pass"):
        self.code = _CHILD.format(body=body)
        self.jobs: list[Job] = []
        self.children: list[Any] = []

    def __call__(self, job: Job, answers: Path) -> Any:
        self.jobs.append(job)
        with open(answers.with_name("errors"), "wb") as errors:
            self.children.append(self.started(errors, json.dumps(job._asdict()), str(answers)))
        return self.children[-1]

    def started(self, errors: Any, *arguments: str) -> Any:
        return subprocess.Popen([sys.executable, "-c", self.code, *arguments], stderr=errors)


def tried(start: Starter, folder: Path) -> Runtime:
    """A card whose kernels such children try, with what the folder says about earlier ones."""
    parts = {
        Kernels: lambda runtime: CardKernels(runtime, StandIn()),
        Trials: lambda runtime: Trials(runtime, start=start, folder=lambda: folder),
    }
    return Runtime("cpu", CARD, parts)
