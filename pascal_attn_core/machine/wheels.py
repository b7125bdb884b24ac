"""Which torch wheel has code for which card: decided by names alone, without asking a driver.

A wheel holds machine code for some architectures (``sm_60``) and sometimes PTX (``compute_120``), which the driver
compiles for newer ones. Machine code runs on its own architecture and on later ones of the same major version:
sm_60 code runs on a GTX 1080 Ti (sm_61), sm_70 code does not run on it. On AMD the name has to be the same (gfx906).
For AMD's cards there are torch's own wheels, for Linux only, and AMD's, for Windows too.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from .amd_system import OVERRIDE
from .device import DeviceInfo

INDEX = "https://download.pytorch.org/whl"
# The wheels for CUDA 12.6 are the last with Maxwell, Pascal and Volta; torch 2.14 is the last that has them. (Those for
# CUDA 12.8 have Volta up to torch 2.10.)
LEGACY_INDEX, LEGACY_TORCH = "cu126", "2.14"
CURRENT_INDEX = "cu130"
_CUDA_FIRST, _CUDA_13_FIRST = (5, 0), (7, 5)
ROCM_INDEX, ROCM_LEGACY_INDEX = "rocm7.2", "rocm6.3"
_ROCM_GFX9 = ("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950")
_ROCM_RDNA = ("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1200", "gfx1201")
# From ROCm 6.4 on the wheels still name these two, but the rocBLAS inside has no code for them any more.
_ROCM_LEGACY = ("gfx900", "gfx906")
# AMD's own wheels (ROCm/TheRock, SUPPORTED_GPUS.md, August 2026).
AMD_INDEX = "https://rocm.nightlies.amd.com/whl-multi-arch/"
_INSIDE_PROCESSORS = ("gfx90c", "gfx1033", "gfx1035", "gfx1036")
_BY_AMD = (
    *_ROCM_GFX9,
    *_ROCM_RDNA,
    *_INSIDE_PROCESSORS,
    *("gfx1010", "gfx1011", "gfx1012", "gfx1031", "gfx1032", "gfx1034", "gfx1152", "gfx1153"),
)


@dataclass(frozen=True)
class TorchBuild:
    """The torch that is installed.

    Attributes:
        version: ``"2.14.0+cu126"``.
        kind: ``"cuda"``, ``"hip"`` or ``"cpu"``.
        toolkit: the CUDA or ROCm version it was built with, "" for none.
        archs: what ``torch.cuda.get_arch_list()`` returns: ``("sm_60", "sm_70", "compute_120")``.
    """

    version: str
    kind: str
    toolkit: str = ""
    archs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Whether a torch build runs on a card, and why, in one sentence; what to install instead, as a pip command or a
    sentence, "" if there is no need to."""

    runs: bool
    why: str
    install: str = ""


def code_for(capability: tuple[int, int], archs: tuple[str, ...]) -> str:
    """The entry of an arch list that a CUDA card runs, ``"sm_60"`` or ``"compute_90"``, or "" if there is none."""
    found = []
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        is_native, built_for, suffix = match[1] == "sm", (int(match[2]), int(match[3])), match[4]
        if suffix == "a" or (suffix and not is_native):  # tied to its architecture; PTX with "f" to its family
            runs = built_for == capability
        else:
            runs = built_for <= capability and (not is_native or built_for[0] == capability[0])
        found += [(is_native, built_for, arch)] if runs else []
    return max(found, key=lambda each: each[:2], default=(False, (0, 0), ""))[2]


def judge(info: DeviceInfo, build: TorchBuild) -> Verdict:
    """Whether this build has code for this card, and if not, what to install."""
    if not info.is_gpu:
        return Verdict(True, "runs on the CPU")
    if info.kind == "cuda":
        return _judge_cuda(info, build)
    if info.kind == "hip":
        return _judge_hip(info, build)
    return Verdict(True, f"torch runs on {info.kind} devices without a list of architectures")


def _install(index: str) -> str:
    """torch's companions hold code that was built against one build of it: they are replaced together."""
    return f"pip install --force-reinstall torch torchvision torchaudio --index-url {INDEX}/{index}"


def wheel_for(capability: tuple[int, int]) -> str:
    """The wheel to install for a CUDA card: a pip command, or a sentence if no wheel has code for it."""
    major, minor = capability
    if capability < _CUDA_FIRST:
        return (
            f"no wheel of torch 2.4 or newer has code for compute capability {major}.{minor}: build torch from source "
            f"with TORCH_CUDA_ARCH_LIST={major}.{minor}"
        )
    return _install(LEGACY_INDEX if capability < _CUDA_13_FIRST else CURRENT_INDEX)


def has_rocm_wheel(arch: str) -> bool:
    """Whether some wheel has code for an AMD card; graphics inside a processor do not count."""
    return arch in _BY_AMD and arch not in _INSIDE_PROCESSORS


def rocm_wheel_for(arch: str, system: str = sys.platform) -> str:
    """The wheel to install for an AMD card: a pip command, or a sentence if no wheel has code for it."""
    if arch in _ROCM_GFX9 + _ROCM_RDNA and system != "win32":
        return _install(ROCM_LEGACY_INDEX if arch in _ROCM_LEGACY else ROCM_INDEX)
    if arch in _BY_AMD:
        parts = " ".join(f'"{name}[device-{arch}]"' for name in ("torch", "torchvision"))
        return f"pip install --force-reinstall {parts} torchaudio --index-url {AMD_INDEX}"
    return f"no wheel has code for {arch}: build torch from source with PYTORCH_ROCM_ARCH={arch}"


def _judge_cuda(info: DeviceInfo, build: TorchBuild) -> Verdict:
    assert info.capability is not None
    card = "sm_{}{}".format(*info.capability)
    install = wheel_for(info.capability)
    if build.kind != "cuda":
        return Verdict(False, f"torch {build.version} is built without CUDA", install)
    found = code_for(info.capability, build.archs)
    if found == card:
        return Verdict(True, f"this wheel has code for {card}")
    if found.startswith("sm_"):
        return Verdict(True, f"this wheel has {found} code, which runs on {card}")
    if found:
        return Verdict(True, f"this wheel has PTX for {found}, which the driver compiles for {card} at first use")
    if info.capability < _CUDA_13_FIRST and info.capability >= _CUDA_FIRST:
        install += f"  # torch {LEGACY_TORCH} is the last with code for {card}: keep its files, see docs/old-torch.md"
    listed = " ".join(build.archs) or "nothing"
    return Verdict(False, f"this wheel has NO code for {card}, only for {listed}", install)


def _judge_hip(info: DeviceInfo, build: TorchBuild) -> Verdict:
    if build.kind != "hip":
        return Verdict(False, f"torch {build.version} is built without ROCm", rocm_wheel_for(info.arch))
    if info.arch in (arch.split(":")[0] for arch in build.archs):
        if info.arch in _ROCM_LEGACY and tuple(map(int, re.findall(r"\d+", build.toolkit)[:2])) >= (6, 4):
            why = f"this wheel names {info.arch}, but its rocBLAS does not since ROCm 6.4: matrix products may abort"
            return Verdict(True, why, rocm_wheel_for(info.arch))
        if info.known_arch != info.arch:
            return _overridden(info)
        return Verdict(True, f"this wheel has code for {info.arch}")
    listed = " ".join(build.archs) or "nothing"
    return Verdict(False, f"this wheel has NO code for {info.arch}, only for {listed}", rocm_wheel_for(info.arch))


def _overridden(info: DeviceInfo) -> Verdict:
    what = f"this {info.known_arch}" if info.known_arch else "this card, whatever it is"
    same = (info.known_arch or "").startswith("gfx103") and info.arch == "gfx1030"
    risk = "the instructions are the same" if same else "torch's own kernels may use instructions that it lacks"
    own = rocm_wheel_for(info.known_arch) if info.known_arch in _BY_AMD and not same else ""
    return Verdict(True, f"this wheel has code for {info.arch}, as which {OVERRIDE} runs {what}: {risk}", own)
