"""Which torch wheel runs on which card."""

import pytest

from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.wheels import TorchBuild, code_for, has_rocm_wheel, judge, rocm_wheel_for, wheel_for

CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
LEGACY = "pip install --force-reinstall torch torchvision torchaudio --index-url https://download.pytorch.org/whl/cu126"
AMD = "torchaudio --index-url https://rocm.nightlies.amd.com/whl-multi-arch/"
CURRENT = LEGACY.replace("cu126", "cu130")


def cuda(archs, version="2.14.0+cu126"):
    return TorchBuild(version, "cuda", version[-3:-1] + "." + version[-1], archs)


def card(major, minor):
    return DeviceInfo("cuda", "a card", capability=(major, minor), arch=f"sm_{major}{minor}")


ROCM = ("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100")


def amd(arch):
    return DeviceInfo("hip", "AMD Instinct MI50", num_sms=60, arch=arch)


@pytest.mark.parametrize(
    ("capability", "archs", "code"),
    [
        ((6, 1), CU126, "sm_60"),
        ((5, 2), CU126, "sm_50"),
        ((8, 9), CU126, "sm_86"),
        ((12, 0), CU126, ""),
        ((3, 5), CU126, ""),
        ((6, 1), CU130, ""),
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


@pytest.mark.parametrize("capability", [(5, 2), (6, 0), (6, 1), (7, 0)])
def test_a_wheel_without_code_for_an_old_card_names_the_one_that_has_it(capability):
    verdict = judge(card(*capability), cuda(CU130, "2.14.0+cu130"))
    assert not verdict.runs
    assert f"NO code for sm_{capability[0]}{capability[1]}" in verdict.why
    assert verdict.install.startswith(LEGACY)
    assert "torch 2.14 is the last" in verdict.install


@pytest.mark.parametrize(
    ("device", "build", "why"),
    [
        (card(6, 1), cuda(CU126), "this wheel has sm_60 code, which runs on sm_61"),
        (card(8, 6), cuda(CU126), "sm_86"),
        (card(13, 0), cuda(CU130, "2.15.0+cu130"), "compiles"),  # PTX, at first use
        (amd("gfx90a"), TorchBuild("2.9.0", "hip", "6.4", ("gfx90a:sramecc+:xnack-",)), ""),
        (DeviceInfo("cpu", "CPU"), TorchBuild("2.13.0+cpu", "cpu"), ""),
        (DeviceInfo("mps", "mps"), TorchBuild("2.13.0", "cpu"), ""),
    ],
)
def test_a_matching_wheel_needs_nothing_else(device, build, why):
    verdict = judge(device, build)
    assert verdict.runs
    assert verdict.install == ""
    assert why in verdict.why


def test_newer_cards_are_sent_to_the_current_wheels_and_cards_older_than_every_wheel_to_the_source():
    assert wheel_for((7, 5)) == wheel_for((12, 0)) == CURRENT
    assert "TORCH_CUDA_ARCH_LIST=3.7" in wheel_for((3, 7))
    assert not judge(card(3, 7), cuda(CU126)).runs


def test_torch_without_cuda_cannot_use_a_card():
    verdict = judge(card(6, 1), TorchBuild("2.13.0+cpu", "cpu"))
    assert not verdict.runs
    assert verdict.install == LEGACY


def test_mi50_runs_on_the_last_wheels_whose_libraries_have_code_for_it():
    assert judge(amd("gfx906"), TorchBuild("2.9.1+rocm6.3", "hip", "6.3.42131", ROCM)).install == ""
    later = judge(amd("gfx906"), TorchBuild("2.13.0+rocm7.2", "hip", "7.2.0", ROCM))
    assert "rocBLAS" in later.why
    assert later.install.endswith("/rocm6.3")
    missing = judge(amd("gfx906"), TorchBuild("2.13.0", "hip", "7.2.0", ("gfx1100",)))
    assert not missing.runs
    assert missing.install.endswith("/rocm6.3")


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


@pytest.mark.parametrize(
    ("true", "words"),
    [
        ("gfx1010", "runs this gfx1010: torch's own kernels may use instructions that it lacks"),
        ("gfx1032", "runs this gfx1032: the instructions are the same"),
        ("unknown", "runs this card, whatever it is: torch's own kernels may"),
    ],
)
def test_an_overridden_card_is_told_what_it_is(true: str, words: str) -> None:
    card = DeviceInfo("hip", "AMD Radeon", arch="gfx1030", true_arch=true)
    verdict = judge(card, TorchBuild("2.13.0+rocm7.2", "hip", "7.2.0", ("gfx1030",)))
    assert verdict.runs
    assert words in verdict.why
    assert ("torch[device-gfx1010]" in verdict.install) == (true == "gfx1010") == (verdict.install != "")
