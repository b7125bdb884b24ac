"""These tests check what is known of a device without a driver, of a card of AMD's by its topology, and of wheels."""

import dataclasses
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from pascal_attn_core.config import variables
from pascal_attn_core.machine import device as device_module
from pascal_attn_core.machine.amd_system import UNKNOWN, Node, nodes, true_arch
from pascal_attn_core.machine.device import DeviceInfo, device_info, free_bytes
from pascal_attn_core.machine.room import available_bytes
from pascal_attn_core.machine.wheels import TorchBuild, code_for, has_rocm_wheel, judge, rocm_wheel_for


def test_the_cpu_is_described_without_cuda_meta_like_it_and_other_types_as_gpus_with_unknown_facts() -> None:
    info = device_info("cpu")
    assert (info.kind, info.is_gpu, info.capability) == ("cpu", False, None)
    assert info.num_sms >= 1
    assert info.name == device_module.cpu_name() != ""
    assert device_info("meta") == info
    assert free_bytes("cpu") is free_bytes("meta") is None
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
    silent = RuntimeError("The device doesn't support querying the available free memory.")
    monkeypatch.setattr(torch.xpu, "mem_get_info", Mock(side_effect=silent))
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
def test_the_peak_is_that_of_the_data_sheet(capability, num_sms: int, clock_mhz: float, tera: float) -> None:
    info = DeviceInfo("cuda", capability=capability, num_sms=num_sms, clock_hz=int(clock_mhz * 1e6))
    assert info.fp32_flops == pytest.approx(tera * 1e12, rel=0.01)
    assert dataclasses.replace(info, clock_hz=0).fp32_flops == 0
    assert dataclasses.replace(info, capability=(99, 0)).fp32_flops == 0
    assert DeviceInfo("hip", num_sms=60, clock_hz=10**9).fp32_flops == 0


def test_the_caches_of_a_core_are_read_from_linux(tmp_path: Path) -> None:
    kinds = ("1 Data 48K 0,4", "1 Instruction 32K 0,4", "2 Unified 2M 0,4", "3 Unified 36864K 0-7")
    for index, facts in enumerate(kinds):
        (tmp_path / f"index{index}").mkdir()
        for name, fact in zip(("level", "type", "size", "shared_cpu_list"), facts.split()):
            (tmp_path / f"index{index}" / name).write_text(f"{fact}\n")
    caches = device_module.cpu_caches(tmp_path)
    assert caches == [(1, 48 << 10, 2), (2, 2 << 20, 2), (3, 36 << 20, 8)]
    assert device_module.core_l2_bytes(caches) == 2 << 20  # two threads of one core
    of_four_cores = [device_module.Cache(1, 1 << 15, 1), device_module.Cache(2, 4 << 20, 4)]
    assert device_module.core_l2_bytes(of_four_cores) == 1 << 20
    assert device_module.cpu_caches(tmp_path / "none") == []


_PROPERTIES = """\
cpu_cores_count {cores}
simd_count 144
gfx_target_version {version}
location_id {location}
domain {domain}
unique_id 14210876
"""
OVERRIDE = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
NOWHERE = (None, None, None)


@pytest.fixture
def topology(tmp_path: Path):
    """Writes a processor, and GPUs given by (gfx_target_version, bus)."""

    def write(*gpus: tuple[int, int]) -> Path:
        for number, (version, bus) in enumerate([(0, 0), *gpus]):
            folder = tmp_path / str(number)
            folder.mkdir()
            text = _PROPERTIES.format(cores=0 if version else 16, version=version, location=bus << 8, domain=0)
            (folder / "properties").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("version", "arch"),
    [(90000, "gfx900"), (90006, "gfx906"), (90010, "gfx90a"), (90012, "gfx90c"), (100100, "gfx1010"),
     (100300, "gfx1030"), (100306, "gfx1036"), (110000, "gfx1100")],
)  # fmt: skip
def test_versions_are_read_as_the_kernel_writes_them(topology, version: int, arch: str) -> None:
    assert nodes(topology((version, 9))) == [Node(arch, (0, 9, 0))]


@pytest.mark.parametrize("name", ["HSA_OVERRIDE_GFX_VERSION", "HSA_OVERRIDE_GFX_VERSION_0"])
def test_a_card_is_what_it_says_and_with_an_override_what_the_system_says(topology, monkeypatch, name: str) -> None:
    folder = topology((100100, 3))
    for version, arch in (("", ""), ("10.3.0", "gfx1010")):
        monkeypatch.setenv(name, version)
        assert true_arch(NOWHERE, variables("HSA_OVERRIDE_GFX_VERSION"), folder) == arch


def test_of_several_cards_it_is_the_one_in_this_place(topology) -> None:
    folder = topology((100100, 3), (100306, 17))  # a card, and graphics inside the processor
    assert true_arch((0, 3, 0), OVERRIDE, folder) == "gfx1010"
    assert true_arch((0, 17, 0), OVERRIDE, folder) == "gfx1036"
    assert true_arch((0, 5, 0), OVERRIDE, folder) == UNKNOWN
    assert true_arch(NOWHERE, OVERRIDE, folder) == UNKNOWN  # an older torch does not say where a card is


def test_a_card_is_known_by_its_architecture_also_what_an_older_torch_does_not_say(monkeypatch) -> None:
    common = {"name": "AMD Radeon VII", "major": 9, "minor": 0, "multi_processor_count": 60, "total_memory": 16 << 30}
    monkeypatch.setattr(torch.version, "hip", "6.3.42131")
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)

    def rocm(**facts: object) -> device_module.DeviceInfo:
        properties = types.SimpleNamespace(**{**common, **facts})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return device_module._cuda_info(0)

    info = rocm(gcnArchName="gfx906:sramecc+:xnack-", L2_cache_size=4 << 20, warp_size=64)
    assert (info.kind, info.arch, info.known_arch, info.capability) == ("hip", "gfx906", "gfx906", None)
    assert (info.num_sms, info.wave_size, info.l2_bytes, info.is_rdna) == (60, 64, 4 << 20, False)
    vega, rdna = rocm(gcnArchName="gfx900:xnack-"), rocm(gcnArchName="gfx1030")
    assert (vega.wave_size, vega.shared_bytes, vega.l2_bytes) == (64, 64 << 10, 0)
    assert (rdna.wave_size, rdna.shared_bytes, rdna.is_rdna) == (32, 64 << 10, True)
    unnamed = rocm()
    assert (unnamed.arch, unnamed.true_arch, unnamed.wave_size) == ("", "", 0)


CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
LEGACY = "pip install --force-reinstall torch torchvision torchaudio --index-url https://download.pytorch.org/whl/cu126"
AMD = "torchaudio --index-url https://rocm.nightlies.amd.com/whl-multi-arch/"
CURRENT, MI50_WHEEL = (LEGACY.replace("cu126", name) for name in ("cu130", "rocm6.3"))


def cuda(archs, version="2.14.0+cu126"):
    return TorchBuild(version, "cuda", version[-3:-1] + "." + version[-1], archs)


def card(major, minor):
    return DeviceInfo("cuda", "a card", capability=(major, minor), arch=f"sm_{major}{minor}")


ROCM = ("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100")


def amd(arch, true_arch=""):
    return DeviceInfo("hip", "AMD Instinct MI50", num_sms=60, arch=arch, true_arch=true_arch)


def rocm_wheel(version, archs):
    return TorchBuild(f"2.13.0+rocm{version}", "hip", version, archs)


@pytest.mark.parametrize(
    ("capability", "archs", "code"),
    [
        ((6, 1), CU126, "sm_60"),
        ((5, 2), CU126, "sm_50"),
        ((8, 9), CU126, "sm_86"),
        ((12, 0), CU126, ""),
        ((12, 1), CU130, "sm_120"),
        ((13, 0), CU130, "compute_120"),
        ((8, 6), ("sm_80", "compute_75"), "sm_80"),  # older machine code is preferred to PTX
        ((9, 0), ("sm_90a",), "sm_90a"),
        ((10, 3), ("sm_100a",), ""),  # code for one architecture only
        ((10, 3), ("sm_100f",), "sm_100f"),
        ((12, 0), ("compute_90a",), ""),
        ((6, 1), ("gfx906", "sm_", "nonsense"), ""),
    ],
)
def test_machine_code_runs_within_its_major_version_and_ptx_on_newer_cards(capability, archs, code):
    assert code_for(capability, archs) == code


CPU_ONLY, LAST = TorchBuild("2.13.0+cpu", "cpu"), f"{LEGACY}  # torch 2.14 is the last"
RX_6800_CODE = rocm_wheel("7.2", ("gfx1030",))


@pytest.mark.parametrize(
    ("device", "build", "runs", "why", "install"),
    [
        (card(6, 1), cuda(CU126), True, "this wheel has sm_60 code, which runs on sm_61", ""),
        (card(8, 6), cuda(CU126), True, "sm_86", ""),
        (card(13, 0), cuda(CU130, "2.15.0+cu130"), True, "compiles", ""),  # PTX, at first use
        *(
            (card(*c), cuda(CU130, "2.14.0+cu130"), False, "NO code for", LAST)
            for c in ((5, 2), (6, 0), (6, 1), (7, 0))
        ),
        (card(3, 7), cuda(CU126), False, "NO code for sm_37", "no wheel of torch"),
        (card(6, 1), CPU_ONLY, False, "is built without CUDA", LEGACY),
        (amd("gfx90a"), rocm_wheel("6.4", ("gfx90a:sramecc+:xnack-",)), True, "", ""),
        (amd("gfx906"), rocm_wheel("6.3", ROCM), True, "has code for gfx906", ""),
        (amd("gfx906"), rocm_wheel("7.2", ROCM), True, "its rocBLAS does not", MI50_WHEEL),
        (amd("gfx906"), rocm_wheel("7.2", ("gfx1100",)), False, "NO code for gfx906", MI50_WHEEL),
        (amd("gfx1030", "gfx1010"), RX_6800_CODE, True, "may use instructions that it lacks", "pip install"),
        (amd("gfx1030", "gfx1032"), RX_6800_CODE, True, "runs this gfx1032: the instructions are the same", ""),
        (amd("gfx1030", "unknown"), RX_6800_CODE, True, "runs this card, whatever it is: torch's own kernels may", ""),
        (DeviceInfo("cpu", "CPU"), CPU_ONLY, True, "", ""),
        (DeviceInfo("mps", "mps"), TorchBuild("2.13.0", "cpu"), True, "", ""),
    ],
)
def test_a_card_is_told_whether_this_torch_has_code_for_it_and_which_one_has(device, build, runs, why, install):
    verdict = judge(device, build)
    assert verdict.runs is runs
    assert why in verdict.why
    assert verdict.install.startswith(install) if install else verdict.install == ""


@pytest.mark.parametrize(
    ("arch", "linux", "windows"),
    [
        ("gfx906", "/rocm6.3", AMD),
        ("gfx1030", "/rocm7.2", AMD),
        ("gfx1201", "/rocm7.2", AMD),
        *[(arch, AMD, AMD) for arch in ("gfx1010", "gfx1012", "gfx1031", "gfx1036", "gfx90c")],
        *[(arch, f"PYTORCH_ROCM_ARCH={arch}", f"PYTORCH_ROCM_ARCH={arch}") for arch in ("gfx803", "gfx1013")],
    ],
)
def test_each_card_of_amds_is_told_whose_wheels_have_code_for_it(arch, linux, windows):
    for system, end in (("linux", linux), ("win32", windows)):
        wheel = rocm_wheel_for(arch, system)
        assert wheel.endswith(end)
        assert (f'"torch[device-{arch}]"' in wheel) == (end == AMD)


def test_graphics_inside_a_processor_are_no_reason_to_install_anything():
    cards = ("gfx906", "gfx1030", "gfx1031", "gfx1010", "gfx1036", "gfx803")
    assert [has_rocm_wheel(arch) for arch in cards] == [True, True, True, True, False, False]
