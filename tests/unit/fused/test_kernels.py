"""Where kernels come from and how they are launched, with a stand-in for the driver (``attn_support.fused.driver``)."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.fused.device import CardKernels, emulated_card
from attn_support.fused.driver import Compiler, StandIn
from attn_support.fused.emulation import CARD
from attn_support.fused.hip import RADEON_VII, RX_5700, RX_6800, HipStandIn, plain_launch

from pascal_attn_core import AttentionConfig, UnsupportedAttention, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.gpu.cuda import CudaDriver, CudaRuntime, cuda_driver
from pascal_attn_core.fused.gpu.hip import HipDriver, HipRuntime
from pascal_attn_core.fused.gpu.runtime import CompileError
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable, parts
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime
from pascal_attn_core.routes import choose

VARIANT = Variant("forward", 64, "float32")
ELF = Compiler().compile(source("forward"), 61, VARIANT.macros()).cubin
Machine = Callable[..., Kernels]


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def machine(compiler: Compiler, tmp_path: Path) -> Machine:
    """Makes the kernels of a GTX 1080 Ti without prebuilt ones, with an empty cache and a compiler."""

    def made(
        device: str = "cuda:0",
        capability: tuple[int, int] = (6, 1),
        open_driver: Callable[[], Any] = cuda_driver,
        find_compiler: Callable[[int], Any] = lambda arch: compiler,
        shipped: Callable[..., bytes | None] = lambda *_: None,
    ) -> Kernels:
        runtime, gpu = Runtime(device, replace(CARD, capability=capability)), CudaRuntime(open_driver, find_compiler)
        return Kernels(runtime, gpu=gpu, shipped=shipped, folder=lambda: tmp_path / "cache")

    return made


@pytest.fixture
def driver() -> StandIn:
    """A driver of two cards; torch's current stream is number 77."""
    made = StandIn(devices=2, current_stream=77)
    made.variants = {ELF: VARIANT}
    return made


def test_what_has_been_compiled_once_comes_from_the_disk(machine: Machine, compiler: Compiler) -> None:
    assert [machine().machine_code(VARIANT) for _ in range(2)] == [ELF, ELF]
    assert len(compiler.compiled) == 1
    machine(capability=(6, 0)).machine_code(VARIANT)
    machine().machine_code(replace(VARIANT, dtype="float16"))
    assert len(compiler.compiled) == 3


def test_a_prebuilt_kernel_goes_before_the_cache_and_the_compiler(machine: Machine, compiler: Compiler) -> None:
    kernels = machine(shipped=lambda variant, arch: arch.encode())
    assert (kernels.machine_code(VARIANT), compiler.compiled) == (b"sm_61", [])


def test_a_damaged_file_is_compiled_again(machine: Machine, compiler: Compiler, tmp_path: Path) -> None:
    machine().machine_code(VARIANT)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:-1] + b"?", b"something else"):
        file.write_bytes(damaged)
        assert machine().machine_code(VARIANT) == ELF
        assert file.read_bytes() == whole
    assert len(compiler.compiled) == 5


def test_without_a_compiler_the_reason_names_what_to_install(machine: Machine) -> None:
    with pytest.raises(KernelUnavailable, match="no NVRTC for sm_61; pip install nvidia-cuda-nvrtc-cu12"):
        machine(find_compiler=lambda arch: None).machine_code(VARIANT)
    with pytest.raises(CompileError, match="no NVRTC for sm_61"):
        CudaRuntime(find_compiler=lambda arch: None).compile(VARIANT, "sm_61")


OVERRIDDEN = "the card is a {}, and HSA_OVERRIDE_GFX_VERSION makes it a gfx1030"


@pytest.mark.parametrize(
    ("info", "driver", "reason"),
    [
        (DeviceInfo("xpu", "Arc A770"), object, "the fused kernel needs a GPU of NVIDIA's, or of AMD's with ROCm"),
        (replace(CARD, capability=(3, 5)), object, "the fused kernel needs compute capability 5.0, got 3.5"),
        (CARD, lambda: CudaDriver("no-such-library.so"), "the CUDA driver could not be opened: no-such-library.so"),
        (replace(CARD, capability=(9, 9)), object, "no prebuilt kernel and no NVRTC for sm_99; pip install"),
        (replace(RADEON_VII, arch="gfx942"), object, "there is no fused kernel for gfx942"),
        (replace(RADEON_VII, arch=""), object, "there is no fused kernel for an unknown architecture"),
        (replace(RX_6800, true_arch="gfx906"), object, OVERRIDDEN.format("gfx906")),
        (replace(RX_6800, true_arch="gfx1103"), object, OVERRIDDEN.format("gfx1103")),
        (RADEON_VII, lambda: HipDriver(["no-such-library.so"]), "the HIP runtime could not be opened"),
        (replace(RX_5700, arch="gfx1013"), object, "no prebuilt kernel and no HIPRTC for gfx1013"),
        (replace(RX_5700, arch="gfx1201"), object, "no prebuilt kernel and no HIPRTC for gfx1201"),
    ],
)
def test_a_machine_that_can_run_no_kernel_has_a_reason(info: DeviceInfo, driver: Callable, reason: str) -> None:
    makers = {"cuda": lambda: CudaRuntime(driver, lambda arch: None), "hip": lambda: HipRuntime(driver, lambda: None)}
    kernels = Kernels(Runtime("cuda:0", info), gpu=makers.get(info.kind, lambda: None)())
    (found,) = kernels.machine_reasons
    assert found.startswith(reason)
    assert kernels.reasons([VARIANT]) == [found]


def test_a_variant_is_loaded_once_by_many_threads(machine: Machine, compiler: Compiler, driver: StandIn) -> None:
    kernels = machine(open_driver=lambda: driver)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(kernels.functions, [VARIANT] * 8))
    assert len(compiler.compiled) == driver.asked["cuModuleLoadData"] == 1
    assert not driver.left_behind()
    machine("cuda:1", open_driver=lambda: driver).functions(VARIANT)
    assert driver.asked["cuModuleLoadData"] == 2
    assert not driver.problems


def test_a_failure_warns_once_and_is_remembered(machine: Machine, compiler: Compiler, driver: StandIn, caplog) -> None:
    compiler.compile = Mock(side_effect=CompileError("NVRTC_ERROR_COMPILATION for sm_61"))
    kernels = machine(open_driver=lambda: driver)
    with caplog.at_level(logging.WARNING, logger="pascal_attn"):
        for _ in range(3):
            with pytest.raises(KernelUnavailable, match=r"forward-64-float32-none.*NVRTC_ERROR_COMPILATION"):
                kernels.functions(VARIANT)
    assert compiler.compile.call_count == len(caplog.records) == 1
    assert "NVRTC_ERROR_COMPILATION" in kernels.reasons([VARIANT])[0]


def test_code_that_the_driver_refuses_is_compiled_again(machine, compiler, driver, caplog) -> None:
    """A refusal is a reason where there is no compiler."""
    given = {"open_driver": lambda: driver, "shipped": lambda *_: b"for another driver"}
    kernels = machine(**given)
    with caplog.at_level(logging.INFO, logger="pascal_attn"):
        assert kernels.functions(VARIANT)
    assert len(compiler.compiled) == 1
    assert "since the driver refuses its machine code" in caplog.text
    assert not kernels.reasons([VARIANT])
    with pytest.raises(KernelUnavailable, match="cuModuleLoadData: device kernel image is invalid"):
        machine(**given, find_compiler=lambda arch: None).functions(VARIANT)
    assert not driver.left_behind()
    assert not driver.problems


@pytest.mark.parametrize("maker", [StandIn, HipStandIn])
def test_a_launch_goes_to_the_current_stream_with_its_parameters(maker: type[StandIn | HipStandIn]) -> None:
    """The stream is the second card's, and the card that was current before is so again."""
    launch = plain_launch("" if maker is StandIn else "gfx906")
    driver = maker(devices=2, current_stream=77)
    kernels = CardKernels(Runtime("cuda:1", driver.card), driver, shipped=lambda *_: None)
    kernels.run([launch])
    (queued,) = driver.queued
    assert queued[:4] == launch[:4]
    assert bytes(queued.params) == bytes(launch.params)
    assert driver.left_behind() == driver.problems == []
    driver.streams.discard(77)
    with pytest.raises(KernelUnavailable, match=r"LaunchKernel: invalid argument"):
        kernels.run([launch])
    assert driver.problems == ["pa_forward: stream 0x4d"]


def test_no_part_has_more_batch_elements_than_a_grid_may() -> None:
    launch = plain_launch()._replace(grid=(1, 1, 140_000), work=140_000)
    found = [(part.params.first_batch, part.grid[2]) for part in parts(launch, 1 << 40)]
    assert found == [(0, 65_535), (65_535, 65_535), (131_070, 8_930)]


def test_switched_off_or_on_a_cpu_the_route_says_so() -> None:
    query = torch.randn(1, 1, 8, 16)
    with pytest.raises(UnsupportedAttention, match="the fused kernel needs a CUDA or ROCm device, got cpu"):
        sdpa(query, query, query, config=AttentionConfig(route="fused"))
    assert AttentionConfig.from_env({"PASCAL_ATTN_FUSED": "0"}).fused is False


def test_a_kernel_that_fails_at_its_first_call_leaves_it_to_the_next_route(caplog: pytest.LogCaptureFixture) -> None:
    query, words = torch.randn(1, 8, 1024, 64), "forward-64-float32-none differs from the definition by"
    with emulated_card(lambda launch: None, kind=CardKernels, ratio=0.5) as kernels:
        assert choose(check_call(query, query, query), AttentionConfig()).route == "fused"
        with caplog.at_level(logging.WARNING, logger="pascal_attn"), record() as report:
            for _ in range(2):
                sdpa(query, query, query)
        assert (len(kernels.queued), report.routes()) == (1, {"torch": 2})
        (warned,) = caplog.records
        assert warned.getMessage().startswith(f"a kernel of the fused route is disabled: {words}")
        with pytest.raises(UnsupportedAttention, match=f"route 'fused' cannot take this call: {words}"):
            sdpa(query, query, query, config=AttentionConfig(route="fused"))
