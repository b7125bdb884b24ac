"""Where kernels come from and how they are launched. A real driver cannot exist here: a library with its functions,
built with g++, stands in for it."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attn_support.fused.cases import CARD
from attn_support.fused.emulation import GXX, HERE

from pascal_attn_core import AttentionConfig, UnsupportedAttention, attention, routes, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.fused import cache, kernels, nvrtc, prebuilt
from pascal_attn_core.fused import driver as _driver
from pascal_attn_core.fused.launches import forward_launches
from pascal_attn_core.fused.source import Variant
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import Choice
from pascal_attn_core.routes import fused as route

needs_compiler = pytest.mark.skipif(GXX is None, reason="needs g++ to build the stand-in for the driver")
VARIANT = Variant("forward", 64, "float32")
ELF = b"\x7fELF and what follows"


class FakeNvrtc:
    """As much of NVRTC as choosing needs; counts compilations."""

    version = (12, 6)

    def __init__(self, error: str = ""):
        self.compiled, self.error = 0, error

    def compile(self, text: str, arch: int, macros: dict) -> nvrtc.Compiled:
        self.compiled += 1
        if self.error:
            raise nvrtc.CompileError(self.error)
        return nvrtc.Compiled(ELF, "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    """A GTX 1080 Ti without prebuilt kernels, with an empty cache and a compiler."""
    compiler = FakeNvrtc()
    monkeypatch.setattr(kernels, "device_info", lambda device: CARD)
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(nvrtc, "find", lambda arch: compiler)
    monkeypatch.setattr(prebuilt, "load", lambda variant, arch: None)
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "_failed", {})
    return compiler


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _driver.Driver:
    library = tmp_path / "driver.so"
    source = str(HERE / "fake_driver.cpp")
    subprocess.run([GXX, "-shared", "-fPIC", "-O1", source, "-o", str(library)], check=True)
    made = _driver.Driver(str(library))
    made._lib.fake_last_stream.restype = ctypes.c_void_p
    monkeypatch.setattr(_driver, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=77))
    return made


def test_what_has_been_compiled_once_comes_from_the_disk(machine: FakeNvrtc) -> None:
    assert kernels.machine_code(VARIANT, (6, 1)) == ELF
    assert kernels.machine_code(VARIANT, (6, 1)) == ELF
    assert machine.compiled == 1
    kernels.machine_code(VARIANT, (6, 0))
    kernels.machine_code(replace(VARIANT, dtype="float16"), (6, 1))
    assert machine.compiled == 3


def test_a_prebuilt_kernel_goes_before_the_cache_and_the_compiler(
    machine: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "best_arch", lambda capability: 61)
    monkeypatch.setattr(prebuilt, "load", lambda variant, arch: b"shipped")
    assert kernels.machine_code(VARIANT, (6, 1)) == b"shipped"
    assert machine.compiled == 0


def test_a_damaged_file_is_compiled_again(machine: FakeNvrtc, tmp_path: Path) -> None:
    kernels.machine_code(VARIANT, (6, 1))
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:-1] + b"?", b"something else"):
        file.write_bytes(damaged)
        assert kernels.machine_code(VARIANT, (6, 1)) == ELF
        assert file.read_bytes() == whole
    assert machine.compiled == 5


def test_a_folder_that_cannot_be_written_only_costs_the_time(machine: FakeNvrtc, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert kernels.machine_code(VARIANT, (6, 1)) == ELF
    assert cache.save(tmp_path / "cache", "x", ELF) is not None


def test_no_reader_sees_half_a_file(tmp_path: Path) -> None:
    stop, seen = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            seen.append(cache.load(tmp_path, "x"))

    readers = [threading.Thread(target=read) for _ in range(2)]
    cache.save(tmp_path, "x", b"a" * 100_000)
    for reader in readers:
        reader.start()
    for i in range(60):
        assert cache.save(tmp_path, "x", b"ab"[i % 2 : i % 2 + 1] * 100_000) is None
    stop.set()
    for reader in readers:
        reader.join()
    assert set(seen) == {b"a" * 100_000, b"b" * 100_000}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_without_a_compiler_the_reason_names_what_to_install(
    machine: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "find", lambda arch: None)
    with pytest.raises(kernels.KernelUnavailable, match="no NVRTC for sm_61; pip install nvidia-cuda-nvrtc-cu12"):
        kernels.machine_code(VARIANT, (6, 1))


@needs_compiler
def test_a_variant_is_loaded_once_by_many_threads(machine: FakeNvrtc, driver: _driver.Driver) -> None:
    threads = [threading.Thread(target=kernels.functions, args=(0, VARIANT)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.compiled == driver._lib.fake_loads() == 1
    assert driver._lib.fake_depth() == 0
    kernels.functions(1, VARIANT)
    assert driver._lib.fake_loads() == 2


@needs_compiler
def test_a_failure_warns_once_and_is_remembered(
    machine: FakeNvrtc, driver: _driver.Driver, caplog: pytest.LogCaptureFixture
) -> None:
    machine.error = "NVRTC_ERROR_COMPILATION for sm_61"
    with caplog.at_level(logging.WARNING, logger="pascal_attn"):
        for _ in range(3):
            with pytest.raises(kernels.KernelUnavailable, match=r"forward-64-float32-none.*NVRTC_ERROR_COMPILATION"):
                kernels.functions(0, VARIANT)
    assert machine.compiled == 1
    assert len(caplog.records) == 1
    assert "NVRTC_ERROR_COMPILATION" in (kernels.failure(0, VARIANT) or "")


@needs_compiler
def test_a_cubin_that_the_driver_refuses_is_a_reason_too(
    machine: FakeNvrtc, driver: _driver.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "machine_code", lambda variant, capability: b"not a cubin")
    with pytest.raises(kernels.KernelUnavailable, match="cuModuleLoadData: invalid kernel image"):
        kernels.functions(0, VARIANT)
    assert driver._lib.fake_depth() == 0


def _launch(rows: int, keys: int, batch: int = 1):
    query = torch.empty(batch, 1, rows, 64)
    call = check_call(query, torch.empty(batch, 1, keys, 64), torch.empty(batch, 1, keys, 64))
    (launch,) = forward_launches(call, torch.empty_like(query), None, None, CARD, may_split=False)
    return launch


@needs_compiler
def test_a_launch_goes_to_the_current_stream_with_its_parameters(machine: FakeNvrtc, driver: _driver.Driver) -> None:
    launch = _launch(300, 200)
    kernels.run([launch], 0)
    assert driver._lib.fake_last_stream() == 77
    assert (driver._lib.fake_last_x(), driver._lib.fake_last_threads()) == (3, 128)
    driver._lib.fake_first_bytes.restype = ctypes.c_void_p
    first = ctypes.cast(driver._lib.fake_first_bytes(), ctypes.POINTER(ctypes.c_uint64))[0]
    assert first == launch.params.q


def test_long_launches_come_in_parts_that_cover_every_tile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = _launch(1300, 200, batch=3)
    assert list(kernels.parts(launch, 28)) == [launch]
    monkeypatch.setattr(kernels, "_WORK_PER_SM", launch.work // (7 * 28))
    parts = list(kernels.parts(launch, 28))
    covered = [
        (tile, batch)
        for part in parts
        for tile in range(part.params.first_tile, part.params.first_tile + part.grid[0])
        for batch in range(part.params.first_batch, part.params.first_batch + part.grid[2])
    ]
    assert sorted(covered) == [(tile, batch) for tile in range(11) for batch in range(3)]
    assert len(parts) > 3


def test_switched_off_or_on_a_cpu_the_route_says_so() -> None:
    query = torch.randn(1, 1, 8, 16)
    with pytest.raises(UnsupportedAttention, match="the fused kernel needs a CUDA device, got cpu"):
        sdpa(query, query, query, config=AttentionConfig(route="fused"))
    with pytest.raises(UnsupportedAttention, match="the fused kernel needs a CUDA device, got cpu"):
        sdpa(query, query, query, config=AttentionConfig(route="fused-int8"))
    assert AttentionConfig.from_env({"PASCAL_ATTN_FUSED": "0"}).fused is False


def test_a_kernel_that_fails_at_its_first_call_hands_the_call_to_the_next_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = torch.randn(1, 1, 600, 16)
    call, failed = check_call(query, query, query), []

    def fails(*arguments: object, **options: object) -> None:
        failed.append("no kernel")
        raise kernels.KernelUnavailable("no kernel")

    monkeypatch.setattr(route, "run", fails)
    monkeypatch.setattr(route, "why_not", lambda call, config, **options: list(failed))
    real = routes._choose_kernel
    monkeypatch.setattr(routes, "_choose_kernel", lambda *what: real(*what) if failed else Choice("fused", ""))
    monkeypatch.setattr(routes, "_tiled_is_faster", lambda call: False)
    out, _ = attention.run(call, AttentionConfig(), with_lse=False)
    assert failed == ["no kernel"]
    torch.testing.assert_close(out, reference_sdpa(query, query, query)[0], atol=1e-5, rtol=1e-5)
    failed.clear()
    with pytest.raises(UnsupportedAttention, match="route 'fused' cannot take this call: no kernel"):
        attention.run(call, AttentionConfig(route="fused"), with_lse=False)
