"""The facts of this machine that a bug report needs: Python, torch, driver, cards, and what torch cannot use of them.

``pascal-attn info`` and the ComfyUI report node both show them.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..version import __version__
from .amd_system import OVERRIDE
from .amd_system import nodes as amd_nodes
from .device import MIB, DeviceInfo, device_info, free_bytes, smi_id
from .wheels import TorchBuild, has_rocm_wheel, judge, rocm_wheel_for, wheel_for

GIB = 1 << 30
_LABEL = 12
NO_WINDOW = getattr(subprocess, "CREATE_NO_WINDOW", 0)  # of a process that is started on Windows
_PROC_DRIVER = Path("/proc/driver/nvidia/version")
_CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
# What a call gets on devices that are not NVIDIA's, and what it is spared.
_GETS = "torch's kernel where torch has a fused one for the call, else our own (AMD only) or tiles within the budget"
_SPARED = {
    "hip": "without them: all scores are stored on cards that torch has no fused kernel for",
    "mps": "without them: all scores are stored, and come out wrong beyond 2^31 of them",
    "xpu": "without them: all scores may be stored, and a buffer above 4 GiB cannot be allocated",
}


@dataclass(frozen=True)
class SmiCard:
    """One line of nvidia-smi. ``capability`` is None where an old driver does not report it."""

    name: str
    capability: tuple[int, int] | None
    memory: str


@dataclass(frozen=True)
class Machine:
    """The facts; may be made by hand for any card.

    Attributes:
        devices: what torch can use: one per GPU, else the CPU alone.
        free: free memory of each device in bytes, None where it is unknown.
        smi: cards that nvidia-smi lists; amd: architectures of AMD's cards that the kernel driver lists. Both are
            queried only if torch sees no GPU.
        driver: version of NVIDIA's driver, "" if unknown.
    """

    package: str
    python: str
    system: str
    build: TorchBuild
    devices: tuple[DeviceInfo, ...]
    free: tuple[int | None, ...]
    smi: tuple[SmiCard, ...] = ()
    driver: str = ""
    amd: tuple[str, ...] = ()


# ---- gathering -------------------------------------------------------------------------------------------------------


def look_around(*, asks_devices: bool = True) -> Machine:
    """Gather the facts of this machine; ``asks_devices``: how much memory is free, too, which initialises CUDA on every
    card."""
    build, names = torch_build(), device_names()
    return Machine(
        package=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        build=build,
        devices=tuple(device_info(name) for name in names),
        free=tuple(_free(name) if asks_devices else None for name in names),
        smi=() if torch.cuda.is_available() else ask_nvidia_smi(),
        driver=ask_driver() if build.kind == "cuda" else "",
        amd=() if torch.cuda.is_available() else tuple(node.arch for node in amd_nodes()),
    )


def device_names() -> list[str]:
    """The names of the devices that torch can use: every GPU, or else the CPU."""
    if torch.cuda.is_available():
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.xpu.is_available():
        return [f"xpu:{index}" for index in range(torch.xpu.device_count())]
    return ["mps"] if torch.backends.mps.is_available() else ["cpu"]


def torch_build() -> TorchBuild:
    if torch.version.hip is not None:
        return TorchBuild(torch.__version__, "hip", torch.version.hip, tuple(torch.cuda.get_arch_list()))
    if torch.version.cuda is not None:
        # the flags that torch was built with; get_arch_list() is empty where no driver is found
        archs = torch.cuda.get_arch_list() or (torch._C._cuda_getArchFlags() or "").split()
        return TorchBuild(torch.__version__, "cuda", torch.version.cuda, tuple(archs))
    return TorchBuild(torch.__version__, "cpu")


def ask_nvidia_smi() -> tuple[SmiCard, ...]:
    """The cards that nvidia-smi lists; none where it is missing or fails."""
    return parse_smi(_asked("name,compute_cap,memory.total"))


@functools.cache
def ask_driver() -> str:
    """The version of NVIDIA's driver, found once per process: as Linux shows it, which containers without nvidia-smi
    see too, else by nvidia-smi; "" where neither is there."""
    with contextlib.suppress(OSError):
        found = re.search(r"\d+(\.\d+)+", _PROC_DRIVER.read_text(encoding="utf-8"))
        if found:
            return found[0]
    return _asked("driver_version").partition("\n")[0].strip()


class Clocks(NamedTuple):
    """A card at one moment, as its driver reports it: multiprocessor and memory clock in MHz, temperature in
    degrees Celsius, power in watts; None where it does not say."""

    sm_mhz: float | None
    memory_mhz: float | None
    celsius: float | None
    watts: float | None

    @property
    def text(self) -> str:
        """``"1480 MHz, memory 5005 MHz, 61 C, 212 W"``."""
        words = zip(("{:.0f} MHz", "memory {:.0f} MHz", "{:.0f} C", "{:.0f} W"), self)
        return ", ".join(text.format(value) for text, value in words if value is not None) or "unknown"


def ask_clocks(device: torch.device) -> Clocks | None:
    """The clocks of a card of NVIDIA's now; None where nvidia-smi is missing or fails, and on other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return parse_clocks(_asked(_CLOCKS, "--id", smi_id(device)))


def parse_clocks(text: str) -> Clocks | None:
    """The clocks in a line of nvidia-smi's CSV; None where it has another form."""
    parts = text.partition("\n")[0].split(",")
    if len(parts) != len(Clocks._fields):
        return None
    numbers = (re.fullmatch(r"\s*\d+(\.\d+)?\s*", part) for part in parts)  # "[N/A]" on cards that do not say
    return Clocks(*(None if number is None else float(number[0]) for number in numbers))


def _asked(query: str, *more: str) -> str:
    """The lines that nvidia-smi prints for a query; "" where it is missing or fails."""
    command = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *more)
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True, creationflags=NO_WINDOW
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_smi(text: str) -> tuple[SmiCard, ...]:
    """The cards in nvidia-smi's CSV; lines of another form are skipped."""
    cards = []
    for name, *capability, memory in (line.rsplit(",", 2) for line in text.splitlines() if line.count(",") > 1):
        found = re.fullmatch(r"(\d+)\.(\d+)", capability[0].strip())
        cards.append(SmiCard(name.strip(), (int(found[1]), int(found[2])) if found else None, f"{memory.strip()} MiB"))
    return tuple(cards)


def _free(name: str) -> int | None:
    try:
        return free_bytes(name)
    except RuntimeError:  # a card that the driver lists but cannot start
        return None


# ---- as text ---------------------------------------------------------------------------------------------------------


def complaints(machine: Machine) -> list[str]:
    """For each card that this torch cannot use, or not well, a sentence with what to install; [] if there is none."""
    verdicts = [(info.name, judge(info, machine.build)) for info in machine.devices]
    found = [f"{name}: {verdict.why}. Install: {verdict.install}" for name, verdict in verdicts if verdict.install]
    for name, _, why in _unused(machine):
        # graphics inside a processor, which no wheel supports, are no reason to install anything
        if name not in machine.amd or machine.build.kind == "hip" or has_rocm_wheel(name):
            found.append(f"{name}: {why}")
    return found


def _unused(machine: Machine) -> list[tuple[str, str, str]]:
    """(name, description, why torch cannot use it) of each card that the drivers list and torch does not see."""
    build, found = machine.build, []
    finds_none = f"torch {build.version} finds no GPU"
    for card in machine.smi:
        capability = "unknown" if card.capability is None else "{}.{}".format(*card.capability)
        why = f"{finds_none}: is the driver new enough for it?"
        if build.kind != "cuda":
            why = f"torch {build.version} is built without CUDA. Install: {wheel_for(card.capability or (6, 1))}"
        found.append((card.name, f"{card.name}, compute capability {capability}, {card.memory}", why))
    for arch in machine.amd:
        why = f"{finds_none}: may this user open /dev/kfd (groups render and video)?"
        if build.kind != "hip":
            why = f"torch {build.version} is built without ROCm. Install: {rocm_wheel_for(arch)}"
        found.append((arch, f"AMD {arch}", why))
    return found


def describe_facts(machine: Machine) -> list[str]:
    """The lines that a bug report needs of any machine."""
    lines = head_lines(machine)
    for number in range(len(machine.devices)):
        lines += device_lines(machine, number)
    return lines


def head_lines(machine: Machine) -> list[str]:
    """The package, Python, the system, torch, cards that it cannot use, and the driver."""
    build, first = machine.build, machine.devices[0].kind if machine.devices else ""
    plain = {"mps": "Metal", "xpu": "XPU"}.get(first, "CPU only")
    toolkit = {"cuda": f"CUDA {build.toolkit}", "hip": f"ROCm {build.toolkit}"}.get(build.kind, plain)
    lines = [f"Pascal Attention {machine.package}, Python {machine.python}, {machine.system}"]
    lines.append(line("torch", f"{build.version}, {toolkit}"))
    if build.archs:
        lines.append(line("code for", " ".join(build.archs)))
    for _, description, why in _unused(machine):
        lines += [line("unused GPU", description), line("", why)]
    return [*lines, line("driver", machine.driver)] if machine.driver else lines


def device_lines(machine: Machine, number: int) -> list[str]:
    """One device: its name, what it has, its memory, and whether this torch has code for it."""
    info, free = machine.devices[number], machine.free[number]
    if not info.is_gpu:
        cache = f", {_size(info.l2_bytes)} cache" if info.l2_bytes else ""
        return [line("device", f"CPU, {info.num_sms} cores{cache}")]
    units = {"hip": "compute units", "xpu": "Xe cores", "mps": "cores"}.get(info.kind, "SMs")
    units = "pairs of compute units" if info.is_rdna else units
    torch_kind = "cuda" if info.kind == "hip" else info.kind
    lines = [line("device", f"{info.name} ({torch_kind}:{number}), {info.arch or info.kind}")]
    facts = [f"compute capability {info.capability[0]}.{info.capability[1]}"] if info.capability else []
    facts += [f"{info.num_sms} {units}"] if info.kind != "mps" or info.num_sms > 1 else []  # older torch
    facts += [f"L2 {_size(info.l2_bytes) if info.l2_bytes else 'unknown'}"]
    if info.kind == "hip" and info.wave_size:
        facts += [f"LDS {info.shared_bytes >> 10} KiB", f"waves of {info.wave_size}"]
    lines.append(line("", ", ".join(facts)))
    if info.kind == "hip" and info.known_arch != info.arch:
        what = f"it is a {info.known_arch}" if info.known_arch else "the system does not say what it is"
        lines.append(line("", f"{OVERRIDE} makes it a {info.arch}; {what}"))
    total = _size(info.total_bytes) if info.total_bytes else "unknown"
    lines.append(line("memory", total if free is None else f"{total}, {_size(free)} free"))
    verdict = judge(info, machine.build)
    lines.append(line("wheel", verdict.why))
    if verdict.install:
        lines.append(line("install", verdict.install))
    if info.kind in _SPARED:
        lines += [line("gets", _GETS), line("", _SPARED[info.kind])]
    return lines


def line(label: str, text: str) -> str:
    """``text`` after a label in its own column."""
    return f"{label:{_LABEL}s}{text}".rstrip()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.1f} GiB"
