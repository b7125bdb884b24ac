"""These tests check what a card of AMD's is, by a topology folder as the kernel driver shows it."""

from __future__ import annotations

import functools
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from pascal_attn_core.config import variables
from pascal_attn_core.machine import device
from pascal_attn_core.machine import facts as machine
from pascal_attn_core.machine.amd_system import UNKNOWN, Node, nodes, readings, true_arch

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


def test_a_node_that_may_not_be_read_hides_no_other(topology) -> None:
    folder = topology((90006, 3), (100100, 4))
    (folder / "1" / "properties").unlink()
    (folder / "1" / "properties").mkdir()
    assert [node.arch for node in nodes(folder)] == ["gfx1010"]
    assert true_arch(NOWHERE, OVERRIDE, folder) == "gfx1010"


def test_a_system_that_does_not_say_leaves_it_unknown(tmp_path: Path) -> None:
    assert true_arch(NOWHERE, OVERRIDE, tmp_path / "nothing") == UNKNOWN
    assert true_arch((0, 3, 0), OVERRIDE, tmp_path) == UNKNOWN
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "properties").write_text("gfx_target_version many\n\nname\n")
    assert true_arch(NOWHERE, OVERRIDE, tmp_path) == UNKNOWN


def test_of_several_cards_it_is_the_one_in_this_place(topology) -> None:
    folder = topology((100100, 3), (100306, 17))  # a card, and graphics inside the processor
    assert true_arch((0, 3, 0), OVERRIDE, folder) == "gfx1010"
    assert true_arch((0, 17, 0), OVERRIDE, folder) == "gfx1036"
    assert true_arch((0, 5, 0), OVERRIDE, folder) == UNKNOWN
    assert true_arch(NOWHERE, OVERRIDE, folder) == UNKNOWN  # an older torch does not say where a card is


def test_of_several_cards_of_one_kind_the_place_does_not_matter(topology) -> None:
    assert true_arch(NOWHERE, OVERRIDE, topology((100100, 3), (100100, 17))) == "gfx1010"


on_linux = pytest.mark.skipif(sys.platform == "win32", reason="no such names of folders")


@pytest.fixture
def monitor(tmp_path: Path) -> Path:
    """PCI devices of which one has the files of a Radeon VII."""
    folder = tmp_path / "pci" / "0000:03:00.0" / "hwmon" / "hwmon4"
    folder.mkdir(parents=True)
    for name, text in (("freq1_input", "1750000000"), ("freq2_input", "1000000000"), ("temp1_input", "61000")):
        (folder / name).write_text(text + "\n")
    return tmp_path / "pci"


@on_linux
def test_the_clocks_are_those_of_the_card_in_this_place(topology, monitor: Path, tmp_path: Path) -> None:
    at_work = (1750.0, 1000.0, 61.0, None)  # this one does not show its power
    assert readings((0, 3, 0), monitor) == pytest.approx(at_work)
    assert readings((0, 4, 0), monitor) is None
    assert readings(NOWHERE, monitor, tmp_path / "nothing") is None
    several = topology((90006, 3), (90006, 4))
    assert readings(NOWHERE, monitor, several) is None
    shutil.rmtree(several / "2")
    assert readings(NOWHERE, monitor, several) == pytest.approx(at_work)


@on_linux
def test_clocks_are_asked_of_the_system_on_amd_cards(rocm, monitor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "readings", functools.partial(readings, folder=monitor))
    rocm(gcnArchName="gfx906", pci_domain_id=0, pci_bus_id=3, pci_device_id=0)
    assert str(machine.ask_clocks(torch.device("cuda", 0)).text) == "1750 MHz, memory 1000 MHz, 61 C"


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch):
    """Lets torch be a ROCm build with one card of these properties."""

    common = {"name": "AMD Radeon VII", "major": 9, "minor": 0, "multi_processor_count": 60, "total_memory": 16 << 30}

    def install(**facts: object) -> device.DeviceInfo:
        properties = types.SimpleNamespace(**{**common, **facts})
        monkeypatch.setattr(torch.version, "hip", "6.3.42131")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
        return device._cuda_info(0)

    return install


def test_a_card_is_known_by_its_architecture_without_features(rocm) -> None:
    info = rocm(gcnArchName="gfx906:sramecc+:xnack-", L2_cache_size=4 << 20, warp_size=64)
    assert (info.kind, info.arch, info.known_arch, info.capability) == ("hip", "gfx906", "gfx906", None)
    assert (info.num_sms, info.wave_size, info.l2_bytes, info.is_rdna) == (60, 64, 4 << 20, False)


def test_what_an_older_torch_does_not_say_is_known_by_the_architecture(rocm) -> None:
    vega, rdna = rocm(gcnArchName="gfx900:xnack-"), rocm(gcnArchName="gfx1030")
    assert (vega.wave_size, vega.shared_bytes, vega.l2_bytes) == (64, 64 << 10, 0)
    assert (rdna.wave_size, rdna.shared_bytes, rdna.is_rdna) == (32, 64 << 10, True)
    unnamed = rocm()
    assert (unnamed.arch, unnamed.true_arch, unnamed.wave_size) == ("", "", 0)


def test_the_peak_counts_the_units_of_amds_multiprocessors(rocm) -> None:
    radeon_vii = rocm(gcnArchName="gfx906", clock_rate=1_750_000)
    rx_6800 = rocm(gcnArchName="gfx1030", multi_processor_count=30, clock_rate=2_105_000)
    assert radeon_vii.fp32_flops == pytest.approx(13.44e12)  # 60 compute units of 64 lanes
    assert rx_6800.fp32_flops == pytest.approx(16.17e12, rel=1e-3)  # 30 pairs of compute units


def test_a_card_under_an_override_is_asked_for_where_it_is(rocm, topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "true_arch", functools.partial(true_arch, folder=topology((100100, 3), (100306, 17))))
    facts = {"gcnArchName": "gfx1030", "pci_domain_id": 0, "pci_bus_id": 3, "pci_device_id": 0}
    assert rocm(**facts).known_arch == "gfx1030"
    monkeypatch.setattr(device, "variables", lambda prefix: {prefix: "10.3.0"})
    assert (rocm(**facts).arch, rocm(**facts).known_arch) == ("gfx1030", "gfx1010")
    assert rocm(gcnArchName="gfx1030").known_arch is None
