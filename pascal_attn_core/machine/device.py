"""Facts about a device; the only caller of ``torch.cuda.get_device_properties``."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..config import variables
from .amd_system import OVERRIDE, UNKNOWN, Place, true_arch

MIB = 1 << 20
# No buffer of ours is larger, whatever the budget: Intel's drivers allocate no more at once, and Apple's compute wrong
# numbers in one with more than 2^31 elements. Scores have 4 bytes at least.
LARGEST_BUFFER = 4 << 30
# On Apple's M1 and M2 a product that adds up 32,767 numbers or more also adds what lies behind them, if its result has
# 16 rows and columns or more (torch up to 2.15).
LONGEST_SUM_ON_MPS = 1 << 14
# Compute capability, or its major version -> float32 units of a multiprocessor. AMD: see DeviceInfo.num_sms.
_FP32_UNITS: dict[tuple[int, ...], int] = {
    (5,): 128, (6,): 128, (6, 0): 64, (7,): 64, (8,): 128, (8, 0): 64, (9,): 128, (10,): 128, (12,): 128,
}  # fmt: skip


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one device, as far as tile shapes and routes depend on them. Can be made by hand for any card:
    ``DeviceInfo("cuda", "GTX 1080 Ti", capability=(6, 1), num_sms=28, l2_bytes=2816 << 10)``.

    Attributes:
        kind: ``"cpu"``, ``"cuda"``, ``"hip"`` (AMD through ROCm), ``"mps"``, ``"xpu"`` or any other device type.
        name: the marketing name.
        capability: CUDA compute capability (major, minor), None elsewhere.
        num_sms: streaming multiprocessors (AMD up to Vega: compute units; from RDNA on work-group processors, which
            are two of them; CPU: cores that torch may use).
        l2_bytes: size of the cache that all of them share in bytes, 0 if unknown.
        core_l2_bytes: a CPU core's own share of the second-level cache in bytes, 0 if unknown.
        total_bytes: device memory in bytes, 0 if unknown.
        arch: the architecture's name as its compiler spells it (``"sm_61"``, ``"gfx906"``), "" if unknown. AMD: what
            the runtime takes the card for, which ``HSA_OVERRIDE_GFX_VERSION`` may have changed.
        true_arch: AMD: what the card is by the system, where the environment makes it another one: ``"gfx1010"``, or
            ``UNKNOWN``; "" = it is what ``arch`` says.
        wave_size: threads that execute an instruction together: a warp of NVIDIA's, a wave of AMD's; 0 if unknown.
        shared_bytes: shared memory (AMD: LDS) that a block may have without asking, 0 if unknown.
        clock_hz: highest clock of the multiprocessors in Hz, 0 if unknown.
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    num_sms: int = 1
    l2_bytes: int = 0
    total_bytes: int = 0
    arch: str = ""
    clock_hz: int = 0
    core_l2_bytes: int = 0
    true_arch: str = ""
    wave_size: int = 0
    shared_bytes: int = 0

    @property
    def known_arch(self) -> str | None:
        """The real architecture of a card of AMD's; None where that is not known."""
        return None if self.true_arch == UNKNOWN else self.true_arch or self.arch

    @property
    def is_rdna(self) -> bool:
        """Whether it is a card of AMD's with waves of 32 lanes: RX 5000 and newer."""
        return self.arch.startswith(("gfx10", "gfx11", "gfx12"))

    @property
    def fp32_flops(self) -> float:
        """Most float32 operations per second of the plain (not tensor) units, a multiply-add counted as two; 0 where
        the card is not known. Units per multiprocessor: CUDA C++ programming guide, arithmetic instructions; AMD's
        instruction set guides (a compute unit has 64, a work-group processor 128)."""
        capability = self.capability or ()
        units = _FP32_UNITS.get(capability, _FP32_UNITS.get(capability[:1], 0))
        if self.kind == "hip" and self.arch.startswith("gfx"):
            units = 128 if self.is_rdna else 64
        return 2.0 * units * self.num_sms * self.clock_hz

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def longest_sum(self) -> int:
        """How many numbers our matrix products may add up at most for one element of its result."""
        return LONGEST_SUM_ON_MPS if self.kind == "mps" else sys.maxsize

    def default_budget_bytes(self, *, backward: bool = False) -> int:
        """Extra memory one call may use by default: 64 MiB on a GPU; on a CPU 4 MiB, and 6.5 MiB
        for its gradients, which hold two tiles of scores."""
        if self.is_gpu:
            return 64 * MIB
        return 13 * MIB // 2 if backward else 4 * MIB


_AMD_LDS_BYTES = 64 << 10  # that a work-group of any AMD card may have
# Calls on the meta device are planned as on a CPU: it has no properties, and its memory can be counted.
CPU_LIKE = ("cpu", "meta")


@functools.lru_cache(maxsize=64)
def device_info(device: torch.device | str) -> DeviceInfo:
    """The facts of a device, asked once per process; ``"cuda"`` without an index is the current CUDA device."""
    device = torch.device(device)
    if device.type in CPU_LIKE:
        caches = cpu_caches()
        return DeviceInfo(
            "cpu",
            cpu_name(),
            num_sms=os.cpu_count() or 1,
            l2_bytes=max((cache.num_bytes for cache in caches), default=0),
            core_l2_bytes=core_l2_bytes(caches),
        )
    if device.type == "cuda":
        return _cuda_info(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "xpu":
        props = torch.xpu.get_device_properties(device)
        return DeviceInfo(
            "xpu", props.name, num_sms=getattr(props, "gpu_subslice_count", 1) or 1, total_bytes=props.total_memory
        )
    if device.type == "mps" and torch.backends.mps.is_available():
        metal = torch.backends.mps
        name, cores = (getattr(metal, ask, None) for ask in ("get_name", "get_core_count"))  # newer torch only
        return DeviceInfo(
            "mps",
            name() if name else "mps",
            num_sms=cores() if cores else 1,
            total_bytes=torch.mps.recommended_max_memory() if hasattr(torch.mps, "recommended_max_memory") else 0,
        )
    return DeviceInfo(device.type, device.type)


def _cuda_info(index: int) -> DeviceInfo:
    props = torch.cuda.get_device_properties(index)
    is_hip = torch.version.hip is not None
    # gcnArchName may end with features: gfx906:sramecc+:xnack-
    arch = getattr(props, "gcnArchName", "").split(":")[0] if is_hip else f"sm_{props.major}{props.minor}"
    # Threads of a wave where torch does not say it: AMD's instruction set guides.
    wave_size = 64 if arch.startswith("gfx9") else 32 if arch.startswith(("sm_", "gfx1")) else 0
    return DeviceInfo(
        kind="hip" if is_hip else "cuda",
        name=props.name,
        capability=None if is_hip else (props.major, props.minor),
        num_sms=props.multi_processor_count,
        l2_bytes=getattr(props, "L2_cache_size", 0),
        total_bytes=props.total_memory,
        arch=arch,
        clock_hz=1000 * getattr(props, "clock_rate", 0),  # newer torch only, as the next two
        true_arch=true_arch(_place(props), variables(OVERRIDE)) if is_hip else "",
        wave_size=getattr(props, "warp_size", wave_size),
        shared_bytes=getattr(props, "shared_memory_per_block", _AMD_LDS_BYTES if arch.startswith("gfx") else 0),
    )


def _place(props: Any) -> Place:
    return tuple(getattr(props, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))


def cpu_name() -> str:
    """The name of the processor; "CPU" where the system does not say."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine() or "CPU"


class Cache(NamedTuple):
    """One cache of the first core: its level, size, and how many of the system's processors share it."""

    level: int
    num_bytes: int
    sharing: int


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cpu_caches(folder: Path = _CACHES) -> list[Cache]:
    """The caches for data that Linux lists for the first core; empty where there is no such list."""
    found = []
    for index in range(8):
        where = folder / f"index{index}"
        try:
            facts = ("type", "level", "size", "shared_cpu_list")
            kind, level, size, sharing = ((where / name).read_text().strip() for name in facts)
        except OSError:
            continue
        if kind != "Instruction" and size.rstrip("KM").isdigit():
            unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            ranges = (part.split("-") for part in sharing.split(",") if part)  # "0-3,8"
            count = sum(int(part[-1]) - int(part[0]) + 1 for part in ranges)
            found.append(Cache(int(level), int(size.rstrip("KM")) * unit, max(1, count)))
    return found


def core_l2_bytes(caches: list[Cache]) -> int:
    """A core's share: threads of one core share its first-level cache too, so they are not counted."""
    by_level = {cache.level: cache for cache in caches}
    if 2 not in by_level:
        size = getattr(torch._C._cpu, "_L2_cache_size", None)  # newer torch, on other systems too
        return int(size()) if size is not None else 0
    threads = by_level[1].sharing if 1 in by_level else 1
    return by_level[2].num_bytes // max(1, by_level[2].sharing // threads)


def smi_id(device: torch.device) -> str:
    """The name of a CUDA device for ``nvidia-smi --id``, which counts as the driver does, torch as CUDA_VISIBLE_DEVICES
    says; only the identifier is common to both. The index where this torch does not tell the identifier."""
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(index) if uuid is None else f"GPU-{uuid}"


def free_bytes(device: torch.device | str) -> int | None:
    """Free memory of a device in bytes as its driver reports it, or None where torch does not know it. On MPS what is
    left of the memory that the system recommends to use at most."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps" and device_info(device).total_bytes:
        return max(0, device_info(device).total_bytes - torch.mps.driver_allocated_memory())
    if device.type == "xpu" and hasattr(torch.xpu, "mem_get_info"):
        with contextlib.suppress(RuntimeError):  # some of Intel's drivers do not tell
            return torch.xpu.mem_get_info(device)[0]
    return None
