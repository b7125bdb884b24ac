"""The block that `pascal-attn info` prints, for cards that are not here."""

import dataclasses
import subprocess
from unittest.mock import Mock

import pytest
import torch

from pascal_attn_core.cli.info import Info, describe
from pascal_attn_core.machine import facts as machine_facts
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.facts import Machine, parse_smi
from pascal_attn_core.machine.wheels import TorchBuild

CU126 = TorchBuild("2.14.0+cu126", "cuda", "12.6", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
CU130 = TorchBuild("2.14.0+cu130", "cuda", "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
CARDS = {
    "GTX 1080 Ti": DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30, "sm_61"),
    "P100": DeviceInfo("cuda", "P100", (6, 0), 56, 4 << 20, 16 << 30, "sm_60"),
    "V100": DeviceInfo("cuda", "V100", (7, 0), 80, 6 << 20, 16 << 30, "sm_70"),
    "RTX 3090": DeviceInfo("cuda", "RTX 3090", (8, 6), 82, 6 << 20, 24 << 30, "sm_86"),
}
MI50 = DeviceInfo("hip", "AMD Instinct MI50", None, 60, 4 << 20, 16 << 30, "gfx906")
ROUTES_HERE = {
    "float32": {"fused": [], "torch": [], "tiled": [], "math": ["the scores take 512 MiB"]},
    "bfloat16": {"fused": [], "torch": ["bfloat16 goes to math"], "tiled": [], "math": ["the scores take 256 MiB"]},
}


def block(device, build, smi=(), amd=(), **changes):
    machine = Machine("0.1.0", "3.12.1", "Linux", build, (device,), (10 << 30,), smi=smi, amd=amd)
    return describe(Info(machine, routes=ROUTES_HERE, **changes))


@pytest.mark.parametrize("name", CARDS)
def test_a_card_that_the_wheel_fits_shows_its_facts_and_routes(name):
    card = CARDS[name]
    text = block(card, CU126)
    facts = (name, "compute capability {}.{}".format(*card.capability), f"{card.num_sms} SMs", "10.0 GiB free")
    for words in (*facts, "2.14.0+cu126", "tiled  takes all of them", "not bfloat16: bfloat16 goes to math"):
        assert words in text
    assert "pip install" not in text


@pytest.mark.parametrize("name", CARDS)
def test_an_old_card_with_a_new_wheel_is_told_what_to_install(name):
    text = block(CARDS[name], CU130)
    for words in ("NO code", "https://download.pytorch.org/whl/cu126", "none can run on this GPU"):
        assert (words in text) == (CARDS[name].capability < (7, 5))


def test_intel_cards_are_found_as_torch_names_them(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine_facts.device_names() == ["xpu:0", "xpu:1"]


@pytest.mark.parametrize(
    "failure", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10), subprocess.CalledProcessError(9, "x")]
)
def test_a_missing_or_failing_nvidia_smi_is_tolerated(monkeypatch, failure):
    monkeypatch.setattr(machine_facts.subprocess, "run", Mock(side_effect=failure))
    assert machine_facts.ask_nvidia_smi() == ()


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.2.0",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build  (root@a)  12.2",
    ],
)
def test_the_drivers_version_needs_no_nvidia_smi_on_linux(monkeypatch, tmp_path, text):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(machine_facts, "_PROC_DRIVER", tmp_path / "version")
    monkeypatch.setattr(machine_facts, "_asked", None)
    assert machine_facts.ask_driver.__wrapped__() == "535.183.01"


SMI = "NVIDIA GeForce GTX 1080 Ti, 6.1, 11264\nTesla M40, [N/A], 12288\n"
CPU, CPU_ONLY = DeviceInfo("cpu", "CPU", num_sms=8), TorchBuild("2.13.0+cpu", "cpu")
ROCM = TorchBuild("2.9.1+rocm6.3", "hip", "6.3.42131", ("gfx900", "gfx906"))
RX_6800_CODE = TorchBuild("2.13.0+rocm7.2", "hip", "7.2.0", ("gfx1030",))
RX_5700 = DeviceInfo("hip", "AMD Radeon RX 5700 XT", num_sms=20, arch="gfx1030", true_arch="gfx1010", wave_size=32,
                     shared_bytes=64 << 10)  # fmt: skip
UNKNOWN, APPLE = dataclasses.replace(RX_5700, true_arch="unknown"), DeviceInfo("mps", "mps")
P100, V100 = CARDS["P100"], CARDS["V100"]
A770 = DeviceInfo("xpu", "Intel(R) Arc(TM) A770 Graphics", num_sms=32, total_bytes=16 << 30)
TIMED = {"forward-64-float16-none: 1024 x 1024 tokens, 8192 rows": 0.31}
# The block, what it says, and what it does not say.
BLOCKS = {
    "AMD": (block(MI50, ROCM), ["gfx906", "60 compute units", "ROCm 6.3"], ["compute capability", "HSA_OVERRIDE"]),
    "AMD, its attention": (block(MI50, ROCM), ["else our own (AMD only)", "all scores are stored on cards that"], []),
    "AMD, its parts": (block(RX_5700, RX_6800_CODE), ["20 pairs of compute units, L2 unknown, LDS 64 KiB, waves"], []),
    "AMD, timed": (block(RX_5700, RX_6800_CODE, timed={"a relative to b": TIMED}), ["time of a relative to b"], []),
    "AMD, overridden": (block(RX_5700, RX_6800_CODE), ["VERSION makes it a gfx1030; it is a gfx1010"], []),
    "AMD, overridden and unknown": (block(UNKNOWN, RX_6800_CODE), ["the system does not say what it is"], []),
    "AMD, torch without ROCm": (block(CPU, CPU_ONLY, amd=["gfx906"]), ["unused GPU  AMD gfx906", "whl/rocm6.3"], []),
    "AMD, not allowed": (block(CPU, ROCM, amd=["gfx906"]), ["may this user open /dev/kfd"], ["pip install"]),
    "Apple": (block(APPLE, CPU_ONLY), ["gets ", "tiles within the budget", "beyond 2^31"], ["CPU only"]),
    "Intel": (block(A770, CPU_ONLY), ["gets ", "tiles within the budget", "above 4 GiB"], ["CPU only"]),
    "NVIDIA, torch without CUDA": (
        block(CPU, CPU_ONLY, parse_smi(SMI)), ["Ti, compute capability 6.1, 11264 MiB", "without CUDA", "whl/cu126"], []
    ),
    "NVIDIA, no driver": (block(CPU, CU126, parse_smi(SMI)), ["driver"], ["pip install"]),
    "routes alone": (block(P100, CU126), ["routes"], ["gets ", "linear"]),
    "8 bits by torch": (block(P100, CU126, int8=("int_mm", "x")), ["if asked for: by torch._int_mm; x"], []),
    "no attention in 8 bits": (
        block(P100, CU126, int8=("int_mm", ""), int8_attention=["y"]), ["if asked for: no: y"], []
    ),
    "8 bits": (block(V100, CU126, int8=("kernel", "")), ["for: by the int8 kernel", "for: by the kernel"], []),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_the_block_says_what_a_card_is_what_it_gets_and_what_is_missing(case):
    text, words, absent = BLOCKS[case]
    assert [word for word in words if word not in text] == []
    assert [word for word in absent if word in text] == []


@pytest.mark.parametrize(
    ("build", "unused", "complaint"),
    [
        (CPU_ONLY, {"smi": parse_smi(SMI)}, "without CUDA. Install: pip"),
        (CU126, {"smi": parse_smi(SMI)}, "finds no GPU"),
        # graphics inside a processor are no reason to install anything
        (
            CPU_ONLY,
            {"amd": ("gfx906", "gfx1036")},
            "gfx906: torch 2.13.0+cpu is built without ROCm. Install: pip install",
        ),
    ],
)
def test_each_card_that_torch_cannot_use_is_a_complaint(build, unused, complaint):
    found = machine_facts.complaints(Machine("0.1.0", "3.12", "Linux", build, (CPU,), (None,), **unused))
    assert len(found) == (2 if "smi" in unused else 1)
    assert all(complaint in each for each in found)
