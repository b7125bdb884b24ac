"""These tests check what is known about a device, without asking a driver that is not there."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch

from pascal_attn_core.machine import device as device_module
from pascal_attn_core.machine.device import DeviceInfo, device_info, free_bytes
from pascal_attn_core.observe.memory import available_bytes


def test_the_cpu_is_described_without_cuda_and_meta_is_planned_like_it() -> None:
    info = device_info("cpu")
    assert (info.kind, info.is_gpu, info.capability) == ("cpu", False, None)
    assert info.num_sms >= 1
    assert info.name == device_module.cpu_name() != ""
    assert device_info("meta") == info
    assert free_bytes("cpu") is free_bytes("meta") is None


def test_other_device_types_are_gpus_with_unknown_facts() -> None:
    info = device_info(torch.device("mps"))
    assert (info.kind, info.is_gpu, info.l2_bytes, info.total_bytes) == ("mps", True, 0, 0)


def test_an_apple_tells_its_cores_and_what_the_system_lets_it_use(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"recommended_max": 12, "driver_allocated": 5, "current_allocated": 4}
    for name, number in facts.items():
        monkeypatch.setattr(torch.mps, f"{name}_memory", lambda number=number: number << 30)
    for name, answer in (("is_available", True), ("get_name", "Apple M1"), ("get_core_count", 8)):
        monkeypatch.setattr(torch.backends.mps, name, lambda answer=answer: answer, raising=False)
    device_info.cache_clear()
    try:
        info = device_info("mps")
        assert (info.kind, info.name, info.num_sms, info.total_bytes) == ("mps", "Apple M1", 8, 12 << 30)
        assert free_bytes("mps") == 7 << 30
        assert available_bytes("mps") == 8 << 30
    finally:
        device_info.cache_clear()


def test_the_free_memory_of_intels_cards_is_known_where_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda device: 2 << 30)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (6 << 30, 16 << 30), raising=False)
    assert (free_bytes("xpu"), available_bytes("xpu")) == (6 << 30, 7 << 30)

    def silent(device: torch.device) -> None:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "mem_get_info", silent)
    assert free_bytes("xpu") is available_bytes("xpu") is None


def test_a_cuda_device_is_read_once_from_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"name": "Tesla P40", "major": 6, "minor": 1, "multi_processor_count": 30, "total_memory": 24 << 30}
    properties = types.SimpleNamespace(**facts, L2_cache_size=3 << 20, gcnArchName="gfx906:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    info = device_module._cuda_info(0)
    assert info == DeviceInfo("cuda", "Tesla P40", (6, 1), 30, 3 << 20, 24 << 30, "sm_61", wave_size=32)


@pytest.mark.parametrize(
    ("capability", "num_sms", "clock_mhz", "tera"),
    [((6, 1), 28, 1582, 11.3), ((6, 0), 56, 1480.5, 10.6), ((5, 2), 24, 1114, 6.8), ((9, 0), 132, 1980, 66.9)],
    ids=["GTX 1080 Ti", "P100", "M40", "H200"],
)
def test_the_peak_is_that_of_the_data_sheet(
    capability: tuple[int, int], num_sms: int, clock_mhz: float, tera: float
) -> None:
    info = DeviceInfo("cuda", capability=capability, num_sms=num_sms, clock_hz=int(clock_mhz * 1e6))
    assert info.fp32_flops == pytest.approx(tera * 1e12, rel=0.01)
    assert dataclasses.replace(info, clock_hz=0).fp32_flops == 0
    assert dataclasses.replace(info, capability=(99, 0)).fp32_flops == 0
    assert DeviceInfo("hip", num_sms=60, clock_hz=10**9).fp32_flops == 0


def _cache_folder(folder: Path, *caches: tuple[int, str, str, str]) -> Path:
    for index, facts in enumerate(caches):
        (folder / f"index{index}").mkdir()
        for name, fact in zip(("level", "type", "size", "shared_cpu_list"), facts):
            (folder / f"index{index}" / name).write_text(f"{fact}\n")
    return folder


def test_the_caches_of_a_core_are_read_from_linux(tmp_path: Path) -> None:
    instructions = (1, "Instruction", "32K", "0,4")
    folder = _cache_folder(
        tmp_path, (1, "Data", "48K", "0,4"), instructions, (2, "Unified", "2M", "0,4"), (3, "Unified", "36864K", "0-7")
    )
    caches = device_module.cpu_caches(folder)
    assert caches == [(1, 48 << 10, 2), (2, 2 << 20, 2), (3, 36 << 20, 8)]
    assert device_module.core_l2_bytes(caches) == 2 << 20  # two threads of one core
    of_four_cores = [device_module.Cache(1, 1 << 15, 1), device_module.Cache(2, 4 << 20, 4)]
    assert device_module.core_l2_bytes(of_four_cores) == 1 << 20
    assert device_module.cpu_caches(tmp_path / "none") == []
