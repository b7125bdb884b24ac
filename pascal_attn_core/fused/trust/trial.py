"""The first run of the kernels on a machine, in a process of its own.

A fault inside a kernel leaves the CUDA context of its process unusable: a host that had its models loaded there loses
them. So before ``auto`` takes the fused route for the first time with a card, a driver and these kernels, a child
process runs them against the definition. Its verdict is stored on disk. A child that dies, hangs or finds wrong numbers
leaves the route off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...checks import is_out_of_memory
from ...config import cache_folder, switched_on
from ...machine.device import MIB, free_bytes
from ...machine.runtime import Runtime
from ...machine.storage import name_for, read_object, write_object
from ..code import prebuilt
from ..code.compilation import Compilation
from ..code.source import Variant, from_row, kernels_digest
from . import verify
from .kernels import Kernels, KernelUnavailable

log = logging.getLogger("pascal_attn")
SECONDS = 90.0  # from the start of the child, most of which it imports torch for
_EXTRA_SECONDS = 5.0  # for kernels that no call has asked for yet: what ships
_MIN_FREE = 1024 * MIB  # a CUDA context and small tensors
_PACKAGE = Path(__file__).parents[2]
# This very package, whatever else is installed under its name, and nothing from the host's working folder.
_CODE = """
import importlib.util, sys
sys.path[:] = [folder for folder in sys.path if folder]
spec = importlib.util.spec_from_file_location("pascal_attn_core", {init!r}, submodule_search_locations=[{folder!r}])
package = sys.modules["pascal_attn_core"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from pascal_attn_core.fused.trust.trial import main
main()
"""
_REPORT = "pascal-attn selftest says more, please report it; PASCAL_ATTN_TRUST=1 skips this check"


class Job(NamedTuple):
    """The task of a child.

    Attributes:
        device: torch's name of it; card: the name that the card must have there.
        needed: variants that a call waits for; others: more of them, tried while there is time.
    """

    device: str
    card: str
    needed: list[list[Any]]
    others: list[list[Any]]


Start = Callable[[Job, Path], "subprocess.Popen[bytes]"]


def start_child(job: Job, answers: Path) -> subprocess.Popen[bytes]:
    """Start a child; what it finds it appends to the file ``answers``.

    Raises:
        OSError: it cannot be started.
    """
    # A frozen program, or one that embeds Python, would start itself once more.
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.lower().startswith(("python", "pypy")):
        raise OSError(f"the path of a Python interpreter is not known, got {sys.executable!r}")
    code = _CODE.format(init=str(_PACKAGE / "__init__.py"), folder=str(_PACKAGE))
    options: dict[str, Any] = {}
    if sys.platform == "win32":
        options["creationflags"] = subprocess.CREATE_NO_WINDOW
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(job._asdict()), str(answers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **options,
    )


class Trials:
    """The verdicts on the kernels of one device; several threads may use it at once. Made by
    ``runtime.part(Trials)``.

    Args:
        runtime: of the device.
        start: starts a child.
        folder: gives the folder of the verdicts, or None.
        seconds: that a child may take.
    """

    file, words = "trial", "the fused route"  # of the verdict's name, and of what it is about

    def __init__(
        self,
        runtime: Runtime,
        *,
        start: Start = start_child,
        folder: Callable[[], Path | None] = cache_folder,
        seconds: float = SECONDS,
    ):
        self.runtime, self.start, self.folder, self.seconds = runtime, start, folder, seconds
        self._good: set[str] = set()
        self._off = ""  # why the whole route is left off
        self._refused: dict[str, str] = {}  # variants that could not be tried in this process, and why
        self._is_loaded = False
        self._lock = threading.RLock()

    @functools.cached_property
    def is_trusted(self) -> bool:
        """Whether the user wants no trial."""
        return switched_on("PASCAL_ATTN_TRUST")

    def reason(self, variants: Sequence[Compilation]) -> str:
        """Why ``auto`` should not run these variants here now; "" = they are known to be good, or are trusted.

        The first question on a machine starts a child process and waits for it, some seconds, unless a graph is being
        captured, this process is a worker that was forked, or memory is short: then the answer holds for this moment.
        """
        if self.is_trusted:
            return ""
        if self._is_loaded and not self._off and self._good.issuperset(variant.name for variant in variants):
            return ""
        if self.runtime.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the kernels are not tried while a graph is being captured"
        with self._lock:
            if not self._is_loaded:
                self._load()
            if self._off:
                return self._off
            missing = [variant for variant in variants if variant.name not in self._good]
            for variant in missing:
                if variant.name in self._refused:
                    return self._refused[variant.name]
            return (self._why_not_now() or self._try(missing)) if missing else ""

    def _why_not_now(self) -> str:
        if torch.cuda._is_in_bad_fork():
            return "the kernels are not tried from a worker process that was forked"
        free = free_bytes(self.runtime.device)
        if free is not None and free < _MIN_FREE:
            return f"the kernels are not tried while less than {_MIN_FREE // MIB} MiB are free, got {free // MIB}"
        return ""

    # ---- the child ---------------------------------------------------------------------------------------------------

    def _try(self, needed: list[Compilation]) -> str:
        others = [] if self._good else [variant for variant in self.others() if variant not in needed]
        job = Job(str(self.runtime.device), self.runtime.info.name, _rows(needed), _rows(others))
        log.info("checking the fused kernel on %s in a process of its own, once", self.runtime.info.name)
        with _scratch_file() as answers:
            try:
                child = self.start(job, answers)
            except OSError as error:
                return self._refuse(needed, f"the process that checks the kernels cannot be started: {error}")
            began = time.monotonic()
            try:
                status: int | None = child.wait(self.seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # an interrupt of the user included
                if child.poll() is None:
                    child.kill()
                    child.wait()
            lines = _lines_of(answers)
        log.info("checked in %.1f s", time.monotonic() - began)
        return self._judge(lines, status, needed)

    def others(self) -> Sequence[Compilation]:
        """The variants that the first child tries beside those that a call waits for."""
        shipped = prebuilt.variants_for(self.runtime.part(Kernels).arch)
        return [variant for variant in shipped if isinstance(variant, Variant)]

    def kernels_digest(self) -> str:
        """Hash of the kernels that a verdict is about."""
        return kernels_digest(self.runtime.part(Kernels).variant_arch)

    def _judge(self, lines: list[dict[str, Any]], status: int | None, needed: list[Compilation]) -> str:
        """Remember what a child has found; "" or why the needed variants should not run."""
        begun = [line["variant"] for line in lines if "begun" in line]
        errors = {line["variant"]: (line["error"], line["limit"]) for line in lines if "error" in line}
        refused = {line["variant"]: str(line["refused"]) for line in lines if "refused" in line}
        stopped = next((str(line["stopped"]) for line in lines if "stopped" in line), "")
        end = stopped or (f"it did not end in {self.seconds:g} s" if status is None else _words_of(status))
        for name in begun:
            if name not in errors and name not in refused:
                return self._disable(f"{name} ended its process: {end}" if status is not None else f"{name}: {end}")
        for name, (error, limit) in errors.items():
            if not error <= limit:
                return self._disable(f"{name} gives wrong numbers, {error:.2g} off")
        self._good |= set(errors)
        self._refused.update(refused)
        self._save()
        untried = [variant for variant in needed if variant.name not in self._good]
        if not untried:
            return ""
        why = refused.get(untried[0].name) or f"the process that checks the kernels came to no result: {end}"
        return self._refuse(untried, why)

    def _refuse(self, variants: list[Compilation], reason: str) -> str:
        """Do not try these again in this process; the next one does."""
        self._refused.update((variant.name, reason) for variant in variants)
        log.info("left to other routes in this process: %s: %s", ", ".join(v.name for v in variants), reason)
        return reason

    def _disable(self, what: str) -> str:
        """Leave the route off with this card, driver and these kernels."""
        self._off = f"its check in a process of its own failed on this machine: {what}"
        self._save()
        self._warn()
        return self._off

    def _warn(self) -> None:
        log.warning("%s is left off: %s; %s", self.words, self._off, _REPORT)

    # ---- on disk -----------------------------------------------------------------------------------------------------

    def _path(self) -> Path | None:
        folder = self.folder()
        return None if folder is None else folder / name_for(self.file, self._conditions())

    def _conditions(self) -> dict[str, str]:
        info = self.runtime.info
        kernels = self.runtime.part(Kernels)
        return {
            "card": info.name,
            "arch": kernels.arch,
            "driver": kernels.gpu.driver_version(),
            "kernels": self.kernels_digest(),
        }

    def _load(self) -> None:
        self._is_loaded = True
        path = self._path()
        if path is None:
            return
        try:
            content = read_object(path)
        except (OSError, ValueError):  # as if nothing was known
            return
        good, off = content.get("good"), content.get("off")
        self._good = {name for name in good if isinstance(name, str)} if isinstance(good, list) else set()
        self._off = off if isinstance(off, str) else ""
        if self._off:
            self._warn()

    def _save(self) -> None:
        path = self._path()
        if path is None:
            return
        try:
            write_object(path, {**self._conditions(), "good": sorted(self._good), "off": self._off})
        except OSError as error:
            log.info("what is known of the kernels could not be stored in %s: %s", path, error)


def _rows(variants: Iterable[Compilation]) -> list[list[Any]]:
    return [list(dataclasses.astuple(variant)) for variant in variants]


@contextlib.contextmanager
def _scratch_file() -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix="pascal-attn-", suffix=".jsonl")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines that a child wrote; the last one may be cut."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def _words_of(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


# ---- in the child ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The program of the child: see :func:`start_child`."""
    text, answers = sys.argv[1:] if arguments is None else arguments
    job = Job(**json.loads(text))
    with open(answers, "a", encoding="utf-8") as file:

        def tell(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            run_job(job, tell)
        except Exception as error:
            tell(stopped=f"{type(error).__name__}: {error}")


def run_job(job: Job, tell: Callable[..., None]) -> None:
    """Run the variants of a job, the needed ones first.

    Args:
        tell: takes ``begun`` and ``variant`` before each, and then ``variant`` with ``error`` and ``limit``, or with
            ``refused``: why it cannot be loaded.
    Raises:
        RuntimeError: the device is another one here.
    """
    device = torch.device(job.device)
    if device.type == "cuda" and torch.cuda.get_device_name(device) != job.card:
        raise RuntimeError(f"expected {job.card} as {device}, got {torch.cuda.get_device_name(device)}")
    kernels = Runtime(device).part(Kernels)
    if kernels.machine_reasons:
        raise RuntimeError(kernels.machine_reasons[0])
    for row in job.needed:
        _run_one(kernels, from_row(row), tell)
    end = time.monotonic() + _EXTRA_SECONDS
    for row in job.others:
        if time.monotonic() > end:
            return
        _run_one(kernels, from_row(row), tell)


def _run_one(kernels: Kernels, variant: Compilation, tell: Callable[..., None]) -> None:
    try:
        kernels.functions(variant)
    except KernelUnavailable as reason:
        tell(variant=variant.name, refused=str(reason))
        return
    tell(variant=variant.name, begun=True)
    try:
        error = kernels.largest_error(variant)
    except Exception as short:
        if not isinstance(short, KernelUnavailable) and not is_out_of_memory(short):
            raise
        tell(variant=variant.name, refused=str(short))
        return
    tell(variant=variant.name, error=error if error < float("inf") else 1e30, limit=verify.tolerance(variant))
