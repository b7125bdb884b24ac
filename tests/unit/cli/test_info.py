"""The block that `pascal-attn info` prints, for cards that are not here."""

import dataclasses
import subprocess
from unittest.mock import Mock

import pytest
import torch

from pascal_attn_core.cli.info import Info, describe, gather
from pascal_attn_core.config import AttentionConfig
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
def test_a_card_that_the_wheel_fits_shows_its_facts_tiles_and_routes(name):
    card = CARDS[name]
    text = block(card, CU126)
    facts = (name, "compute capability {}.{}".format(*card.capability), f"{card.num_sms} SMs", "10.0 GiB free")
    models = ("SD1.5", "SDXL", "Flux", "Wan", "LLM")
    for words in (*facts, "2.14.0+cu126", *models, "tiled  takes all of them", "not bfloat16: bfloat16 goes to math"):
        assert words in text
    assert "pip install" not in text


def test_what_was_timed_on_the_card_is_shown():
    timed = {"forward-64-float32-none: 1024 x 128 tokens, 65536 rows": 0.784}
    assert "timed" not in block(CARDS["P100"], CU126)
    lines = block(CARDS["P100"], CU126, timed=timed).splitlines()
    assert lines[-1].split(maxsplit=1) == ["0.78", *timed]
    tiles = {"float32 head_dim 64: 1 x 4096 tokens, 256 rows, groups of 4": 0.83}
    lines = block(CARDS["P100"], CU126, timed_tiles=tiles).splitlines()
    assert "time of tiles relative to torch's kernel" in lines[-2]
    assert lines[-1].split(maxsplit=1) == ["0.83", *tiles]


@pytest.mark.parametrize("name", CARDS)
def test_an_old_card_with_a_new_wheel_is_told_what_to_install(name):
    text = block(CARDS[name], CU130)
    for words in ("NO code", "https://download.pytorch.org/whl/cu126", "none can run on this GPU"):
        assert (words in text) == (CARDS[name].capability < (7, 5))


def test_amd_cards_are_named_by_their_architecture():
    text = block(MI50, TorchBuild("2.9.1+rocm6.3", "hip", "6.3.42131", ("gfx900", "gfx906")))
    assert all(words in text for words in ("gfx906", "60 compute units", "ROCm 6.3"))
    assert not any(words in text for words in ("compute capability", "HSA_OVERRIDE"))


def test_amd_cards_are_shown_with_what_a_block_has_and_what_an_override_makes_of_them():
    rx_5700 = DeviceInfo("hip", "AMD Radeon RX 5700 XT", num_sms=20, arch="gfx1030", true_arch="gfx1010", wave_size=32,
                         shared_bytes=64 << 10)  # fmt: skip
    build = TorchBuild("2.13.0+rocm7.2", "hip", "7.2.0", ("gfx1030",))
    text = block(rx_5700, build, timed_plain={"forward-64-float16-none: 1024 x 1024 tokens, 8192 rows": 0.31})
    assert "20 pairs of compute units, L2 unknown, LDS 64 KiB, waves of 32" in text
    assert "HSA_OVERRIDE_GFX_VERSION makes it a gfx1030; it is a gfx1010" in text
    assert "time of the fused kernel relative to torch's math attention" in text
    unknown = block(dataclasses.replace(rx_5700, true_arch="unknown"), build)
    assert "the system does not say what it is" in unknown


def test_amd_cards_that_torch_cannot_use_are_seen_through_the_kernel_driver():
    cpu = DeviceInfo("cpu", "CPU", num_sms=8)
    text = block(cpu, TorchBuild("2.13.0+cpu", "cpu"), amd=("gfx906",))
    assert "unused GPU  AMD gfx906" in text
    assert "whl/rocm6.3" in text
    closed = block(cpu, TorchBuild("2.9.1+rocm6.3", "hip", "6.3.42131", ("gfx906",)), amd=("gfx906",))
    assert "may this user open /dev/kfd" in closed
    assert "pip install" not in closed
    build = TorchBuild("2.13.0+cpu", "cpu")
    machine = Machine("0.1.0", "3.12", "Linux", build, (cpu,), (None,), amd=("gfx906", "gfx1036"))
    (found,) = machine_facts.complaints(machine)  # graphics inside a processor are no reason to install anything
    assert found.startswith("gfx906: torch 2.13.0+cpu is built without ROCm. Install: pip install")


@pytest.mark.parametrize(
    ("card", "spared"),
    [
        (MI50, "all scores are stored on cards that torch has no fused kernel for"),
        (DeviceInfo("mps", "mps"), "beyond 2^31"),
        (DeviceInfo("xpu", "Intel(R) Arc(TM) A770 Graphics", num_sms=32, total_bytes=16 << 30), "above 4 GiB"),
    ],
    ids=["AMD", "Apple", "Intel"],
)
def test_other_makers_cards_are_told_what_they_get(card, spared):
    text = block(card, TorchBuild("2.13.0", "cpu"))
    (gets,) = [line for line in text.splitlines() if line.startswith("gets ")]
    assert ("else ours (Vega, MI50" if card.kind == "hip" else "tiles within the budget") in gets
    assert spared in text
    assert "CPU only" not in text or card.kind == "hip"
    assert "gets " not in block(CARDS["P100"], CU126)


def test_intel_cards_are_found_as_torch_names_them(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine_facts.device_names() == ["xpu:0", "xpu:1"]


def test_the_budget_of_the_configuration_decides_the_tiles():
    small = block(CARDS["P100"], CU126, config=AttentionConfig(budget_mib=8))
    assert "budget of 8 MiB" in small
    assert small != block(CARDS["P100"], CU126)


SMI = "name, compute_cap, memory.total [MiB]\nNVIDIA GeForce GTX 1080 Ti, 6.1, 11264 MiB\nTesla M40, [N/A], 12288 MiB\n"


def test_a_gpu_that_torch_cannot_use_is_seen_through_nvidia_smi():
    cpu = DeviceInfo("cpu", "CPU", num_sms=8)
    text = block(cpu, TorchBuild("2.13.0+cpu", "cpu"), smi=parse_smi(SMI))
    assert "GTX 1080 Ti, compute capability 6.1, 11264 MiB" in text
    assert "built without CUDA" in text
    assert "whl/cu126" in text
    driver = block(cpu, CU126, smi=parse_smi(SMI))
    assert "driver" in driver
    assert "pip install" not in driver
    for build, words in ((TorchBuild("2.13.0+cpu", "cpu"), "without CUDA. Install: pip"), (CU126, "finds no GPU")):
        machine = Machine("0.1.0", "3.12", "Linux", build, (cpu,), (None,), smi=parse_smi(SMI))
        assert all(words in each for each in machine_facts.complaints(machine))
        assert len(machine_facts.complaints(machine)) == 2


def test_nvidia_smi_output_that_does_not_fit_is_left_out():
    cards = parse_smi(SMI)
    assert [(c.name, c.capability) for c in cards] == [("NVIDIA GeForce GTX 1080 Ti", (6, 1)), ("Tesla M40", None)]
    assert parse_smi("NVIDIA-SMI has failed because it could not talk to the driver\nreboot") == ()


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
    monkeypatch.setattr(machine_facts, "_output_of", None)
    assert machine_facts.ask_driver.__wrapped__() == "535.183.01"


def test_what_would_compute_linear_layers_in_8_bits_is_named_with_the_reason():
    assert "linear layers" not in block(CARDS["P100"], CU126)
    why = "the int8 linear kernel needs dp4a"
    text = block(CARDS["P100"], CU126, int8=("int_mm", why))
    assert f"linear layers, if asked for: by torch._int_mm; {why}" in text
    assert block(CARDS["V100"], CU126, int8=("kernel", "")).endswith(
        "by the int8 kernel\n            attention, if asked for: by the kernel"
    )
    why = "the int8 mode needs compute capability 6.1, got 6.0"
    assert block(CARDS["P100"], CU126, int8=("int_mm", ""), int8_attention=[why]).endswith(f"if asked for: no: {why}")
    assert gather().int8_attention == []
    assert gather().int8 == ("int_mm", "the int8 linear kernel needs a CUDA device, got cpu")
