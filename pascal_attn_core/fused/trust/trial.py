"""The first run of the kernels on a machine, in a process of its own.

A fault inside a kernel leaves the CUDA context of its process unusable: a host that had its models loaded there loses
them. So before ``auto`` takes the fused route for the first time with a card, a driver and these kernels, a child
process runs them against the definition. Its verdict is stored on disk: faults and wrong numbers leave the route off.
A child that ends for another reason (no memory, no time, it cannot start, it is killed) leaves it off in this process
only. A verdict concerns one family of kernels: bad ones for 8 bits leave exact attention on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import logging
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...config import cache_folder, switched_on
from ...machine.device import MIB, free_bytes
from ...machine.facts import NO_WINDOW
from ...machine.out_of_memory import is_out_of_memory
from ...machine.runtime import Runtime, begin_epoch
from ...machine.storage import name_for, read_object, write_object
from ..code import prebuilt
from ..code.compilation import Compilation
from ..code.kinds import GGUF_EXPAND, GGUF_LINEAR, INT8_LINEAR
from ..code.source import digest_of, from_row, gguf_variants, kernels_digest, linear_variants
from ..gpu.runtime import FAULTS
from . import verify
from .kernels import Kernels, KernelUnavailable

log = logging.getLogger("pascal_attn")
SECONDS = 90.0  # that a child may take until it says that torch works there, and from then on for each kernel
RETRY_SECONDS = 60.0  # after which a child that lacked memory is tried again
_EXTRA_SECONDS = 5.0  # for kernels that no call has asked for yet: what ships
_EARLY_SECONDS = 20.0  # for the same where no call waits
_POLL_SECONDS = 0.1
_MIN_FREE = 512 * MIB  # a CUDA context and small tensors
_PACKAGE = Path(__file__).parents[2]
# This very package, whatever else is installed under its name, and nothing from the host's working folder.
_CODE = """
import importlib.util, sys
sys.path[:] = dict.fromkeys(folder for folder in [*sys.path, *{paths!r}] if folder)
spec = importlib.util.spec_from_file_location("pascal_attn_core", {init!r}, submodule_search_locations=[{folder!r}])
package = sys.modules["pascal_attn_core"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from pascal_attn_core.fused.trust.trial import main
main()
"""
_SKIP = "PASCAL_ATTN_TRUST=1 skips this check"
_REPORT = f"pascal-attn selftest says more, please report it; {_SKIP}"
# How a process ends that a kernel, or the driver, has crashed: a signal, or the number of an exception of Windows
# (access violation, illegal instruction, stack overflow, damaged heap, abort).
_CRASHES: tuple[str, ...] = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
_CRASHES += ("0xc0000005", "0xc000001d", "0xc00000fd", "0xc0000374", "0xc0000409")
# The faults of kernels in torch's errors that have no number (before torch 2.9), and in those of ctypes on Windows.
_FAULT_WORDS: tuple[str, ...] = ("illegal", "misaligned address", "launch failure", "launch timed out")
_FAULT_WORDS += ("device-side assert", "hardware stack", "invalid program counter", "address space", "access violation")
# Words of the driver, and what to do about them.
_ADVICE = {
    "busy or unavailable": "one process at a time may use the card where its compute mode is EXCLUSIVE_PROCESS, "
    f"`nvidia-smi -c DEFAULT` lets several; {_SKIP}",
    "MPS": f"the card's MPS server takes no more processes, `echo quit | nvidia-cuda-mps-control` ends it; {_SKIP}",
}


EXACT = "the fused route"
_FAMILIES = {
    "int8": "8-bit attention",
    INT8_LINEAR: "the int8 linear kernel",
    **dict.fromkeys((GGUF_EXPAND, GGUF_LINEAR), "the kernel for GGUF weights"),
}


def family_of(name: str) -> str:
    """The family of a kernel with this ``variant.name``, in words."""
    return _FAMILIES.get(name.partition("-")[0], EXACT)


class Job(NamedTuple):
    """The task of a child: torch's name of the device, the name that the card must have there, the variants that a call
    waits for, and others, tried for some seconds."""

    device: str
    card: str
    needed: list[list[Any]]
    others: list[list[Any]]
    seconds: float = _EXTRA_SECONDS


Start = Callable[[Job, Path], "subprocess.Popen[bytes]"]


def start_child(job: Job, answers: Path) -> subprocess.Popen[bytes]:
    """Start a child; what it finds it appends to the file ``answers``, its errors go into ``errors`` beside that. An
    OSError where it cannot be started."""
    # A frozen program, or one that embeds Python, would start itself once more.
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.lower().startswith(("python", "pypy")):
        raise OSError(f"the path of a Python interpreter is not known, got {sys.executable!r}")
    code = _CODE.format(init=str(_PACKAGE / "__init__.py"), folder=str(_PACKAGE), paths=list(map(str, sys.path)))
    with open(answers.with_name("errors"), "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(job._asdict()), str(answers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            creationflags=NO_WINDOW,
        )


class Trials:
    """The verdicts on the kernels of one device; several threads may use it at once. Made by
    ``runtime.part(Trials)``.

    Args:
        folder: gives the folder of the verdicts, or None.
        seconds: that a child may take until it says that torch works there, and from then on for each kernel.
    """

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
        self._off: dict[str, str] = {}  # families that are left off, and why
        self._refused: dict[str, str] = {}  # variants that cannot be loaded in this process, and why
        self._waits: dict[str, tuple[str, float]] = {}  # families that no child is started for, why, and until when
        self._is_loaded = False
        self._lock = threading.RLock()

    @functools.cached_property
    def is_trusted(self) -> bool:
        return switched_on("PASCAL_ATTN_TRUST")

    def reason(self, variants: Sequence[Compilation]) -> str:
        """Why ``auto`` should not run these variants, all of one family, here now; "" = they are known to be good, or
        are trusted.

        The first question on a machine starts a child process and waits for it, some seconds, unless a graph is being
        captured, this process is a worker that was forked, or memory is short: then the answer holds for this moment.
        """
        if self.is_trusted:
            return ""
        family = family_of(variants[0].name)
        if self._is_loaded and family not in self._off and self._good.issuperset(each.name for each in variants):
            return ""
        if self.runtime.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the kernels are not tried while a graph is being captured"
        with self._lock:
            self._load()
            if family in self._off:
                return self._off[family]
            missing = [variant for variant in variants if variant.name not in self._good]
            refused = next((self._refused[each.name] for each in missing if each.name in self._refused), "")
            return (refused or self._why_not_now(family) or self._try(family, missing)) if missing else ""

    def ask_early(self, make_room: Callable[[int], object]) -> str:
        """Try what ships before any call asks, if nothing is known of it on this machine. A host does so while its
        models are not on the device yet; ``make_room`` asks the host for this many bytes of free memory. Returns why
        the kernels of exact attention are left off, as far as that is known, or an empty text."""
        with self._lock:
            if self.is_trusted:
                return ""
            self._load()
            if self._good or self._off or not self.others():
                return self._off.get(EXACT, "")
            return self._why_not_now(EXACT, make_room) or self._try(EXACT, [])

    def _why_not_now(self, family: str, make_room: Callable[[int], object] = bool) -> str:
        if torch.cuda._is_in_bad_fork():
            return "the kernels are not tried from a worker process that was forked"
        why, until = self._waits.get(family, ("", 0.0))
        if time.monotonic() < until:
            return why
        free = free_bytes(self.runtime.device)
        if free is not None and free < _MIN_FREE:
            make_room(_MIN_FREE)
            torch.cuda.empty_cache()  # torch may hold more than it uses
            free = free_bytes(self.runtime.device) or 0
            if free < _MIN_FREE:
                why = f"the kernels are not tried while less than {_MIN_FREE // MIB} MiB are free, got {free // MIB}"
                return self._wait(family, why, RETRY_SECONDS)
        return ""

    # ---- the child ---------------------------------------------------------------------------------------------------

    def _try(self, family: str, needed: list[Compilation]) -> str:
        others = [] if self._good else [variant for variant in self.others() if variant not in needed]
        seconds = _EXTRA_SECONDS if needed else _EARLY_SECONDS
        rows = [[list(dataclasses.astuple(variant)) for variant in variants] for variants in (needed, others)]
        job = Job(str(self.runtime.device), self.runtime.info.name, rows[0], rows[1], seconds)
        log.info("checking the fused kernel on %s in a process of its own, once", self.runtime.info.name)
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="pascal-attn-", ignore_cleanup_errors=True) as folder:
                answers = Path(folder, "answers")
                answers.touch()
                status = self._status(self.start(job, answers), answers)
                said = answers.with_name("errors")
                said.touch()
                errors = said.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
                lines = _lines_of(answers)
        except OSError as error:
            return self._wait(family, f"the process that checks the kernels cannot be started: {error}")
        log.info("checked in %.1f s", time.monotonic() - began)
        return self._judge(family, lines, status, errors, needed)

    def _status(self, child: subprocess.Popen[bytes], answers: Path) -> int | None:
        """Wait for the end of a child: its exit status, or None where it said nothing for too long and was ended."""
        end, told = time.monotonic() + self.seconds, 0
        try:
            while time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(_POLL_SECONDS)
                if answers.stat().st_size > told:
                    end, told = time.monotonic() + self.seconds, answers.stat().st_size
            return None
        finally:  # an interrupt of the user included
            if child.poll() is None:
                child.kill()
                child.wait()

    def others(self) -> Sequence[Compilation]:
        """The variants that ship, those of exact attention first: the first child may try them beside the variants that
        a call waits for."""
        shipped = prebuilt.variants_for(self.runtime.part(Kernels).arch)
        return sorted(shipped, key=lambda variant: family_of(variant.name) != EXACT)

    def _judge(
        self, family: str, lines: list[dict[str, Any]], status: int | None, said: str, needed: list[Compilation]
    ) -> str:
        """Remember what a child has found, and ``said`` last of its errors; "" or why the needed variants of a family
        should not run."""
        last = {line["variant"]: line for line in lines if "variant" in line}  # the last word on each
        end = f"it said nothing for {self.seconds:g} s" if status is None else _words_of(status)
        is_fault = end in _CRASHES
        end += f": {said}" if said else ""
        for line in lines:
            if "stopped" in line:
                end, is_fault = str(line["stopped"]), line["is_fault"]
        for name, line in last.items():
            if "begun" in line:
                end = f"{name}: {end}" if status is None else f"{name} ended its process: {end}"
                if is_fault:
                    self._disable(name, end)
            elif "refused" in line:
                if not is_out_of_memory(RuntimeError(line["refused"])):
                    self._refused[name] = str(line["refused"])
            elif line["error"] <= line["limit"]:
                self._good.add(name)
            else:
                self._disable(name, f"{name} gives wrong numbers, {line['error']:.2g} off")
        self._save()
        begin_epoch()
        if family in self._off:
            return self._off[family]
        untried = [variant.name for variant in needed if variant.name not in self._good]
        for name in untried:
            if name in self._refused:
                log.info("left to other routes in this process: %s: %s", name, self._refused[name])
                return self._refused[name]
        if self._good and not untried:
            return ""
        refused = {name: str(line["refused"]) for name, line in last.items() if "refused" in line}
        why = next(map(refused.get, untried or refused), None)
        why = why or f"the process that checks the kernels came to no result: {end}"
        return self._wait(family, why, RETRY_SECONDS if is_out_of_memory(RuntimeError(why)) else math.inf)

    def _wait(self, family: str, why: str, seconds: float = math.inf) -> str:
        """Start no child for a family in this process for this time."""
        why = "; ".join([why, *(advice for words, advice in _ADVICE.items() if words in why)])
        if family not in self._waits:
            log.warning("%s is left off in this process: %s", family, why)
        self._waits[family] = why, time.monotonic() + seconds
        return why

    def _disable(self, name: str, what: str) -> None:
        """Leave the family of this kernel off with this card, driver and these kernels."""
        family = family_of(name)
        if family not in self._off:
            self._off[family] = f"its check in a process of its own failed on this machine: {what}"
            self._warn(family)

    def _warn(self, family: str) -> None:
        log.warning("%s is left off: %s; %s", family, self._off[family], _REPORT)

    # ---- on disk -----------------------------------------------------------------------------------------------------

    def _path(self) -> Path | None:
        folder = self.folder()
        return None if folder is None else folder / name_for("trial", self._conditions())

    def _conditions(self) -> dict[str, str]:
        kernels = self.runtime.part(Kernels)
        digests = (
            kernels_digest(kernels.variant_arch),
            digest_of((*linear_variants(), *gguf_variants(kernels.variant_arch))),
        )
        names = {"card": self.runtime.info.name, "arch": kernels.arch, "driver": kernels.gpu.driver_version()}
        return {**names, "kernels": " ".join(digests)}

    def _load(self) -> None:
        path = None if self._is_loaded else self._path()
        self._is_loaded = True
        if path is None:
            return
        try:
            content = read_object(path)
        except (OSError, ValueError):  # as if nothing was known
            return
        good, off = content.get("good"), content.get("off")
        self._good = {name for name in good if isinstance(name, str)} if isinstance(good, list) else set()
        self._off = {str(family): str(why) for family, why in off.items()} if isinstance(off, dict) else {}
        for family in self._off:
            self._warn(family)

    def _save(self) -> None:
        path = self._path()
        if path is None:
            return
        try:
            write_object(path, {**self._conditions(), "good": sorted(self._good), "off": self._off})
        except OSError as error:
            log.info("what is known of the kernels could not be stored in %s: %s", path, error)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines that a child wrote; the last one may be cut."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def _words_of(status: int) -> str:
    if status >= 0:
        return hex(status) if status > 0xFFFF else f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


# ---- in the child ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The program of the child: see :func:`start_child`."""
    if sys.platform == "win32":
        ctypes.windll.kernel32.SetErrorMode(0x8007)  # a crash shows no window, behind which the process would wait
    text, answers = sys.argv[1:] if arguments is None else arguments
    job = Job(**json.loads(text))
    with open(answers, "a", encoding="utf-8") as file:

        def tell(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            run_job(job, tell)
        except Exception as error:
            # Whether it is one that only a kernel causes.
            fault = getattr(error, "error_code", 0) in FAULTS or any(words in str(error) for words in _FAULT_WORDS)
            tell(stopped=f"{type(error).__name__}: {error}".partition("\n")[0], is_fault=fault)


def run_job(job: Job, tell: Callable[..., None]) -> None:
    """Run the variants of a job, the needed ones first; a RuntimeError where the device is another one here. ``tell``
    takes ``ready`` when torch has run a kernel of its own, ``begun`` and ``variant`` before each of ours, and then
    ``variant`` with ``error`` and ``limit``, or with ``refused``: why it cannot be loaded."""
    device = torch.device(job.device)
    if device.type == "cuda" and torch.cuda.get_device_name(device) != job.card:
        raise RuntimeError(f"expected {job.card} as {device}, got {torch.cuda.get_device_name(device)}")
    kernels = Runtime(device).part(Kernels)
    if kernels.machine_reasons:
        raise RuntimeError(kernels.machine_reasons[0])
    torch.randn(64, device=device).sum().item()  # what torch loads at its first kernel may take a while
    tell(ready=True)
    for row in job.needed:
        _run_one(kernels, from_row(row), tell)
    end = time.monotonic() + job.seconds
    for row in itertools.takewhile(lambda _: time.monotonic() <= end, job.others):
        _run_one(kernels, from_row(row), tell)


def _run_one(kernels: Kernels, variant: Compilation, tell: Callable[..., None]) -> None:
    try:
        kernels.functions(variant)
        tell(variant=variant.name, begun=True)
        error = kernels.largest_error(variant)
    except Exception as reason:
        if not isinstance(reason, KernelUnavailable) and not is_out_of_memory(reason):
            raise
        tell(variant=variant.name, refused=str(reason))
        return
    tell(variant=variant.name, error=error if error < float("inf") else 1e30, limit=verify.tolerance(variant))
