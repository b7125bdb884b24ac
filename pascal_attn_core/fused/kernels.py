"""Where a variant's machine code comes from: shipped with the package, else the disk cache, else NVRTC; and what is
loaded already. Everything here may be called from several threads at once."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Iterable, Iterator

import torch

from ..config import RouteUnavailable, cache_folder
from ..device import device_info
from . import cache, driver, nvrtc, prebuilt
from .launches import Launch
from .source import Variant, digest, source

log = logging.getLogger("pascal_attn")
_lock = threading.RLock()
_loaded: dict[tuple[int, Variant], dict[str, ctypes.c_void_p]] = {}
_failed: dict[tuple[int, Variant], str] = {}
# Multiplications of one launch for each multiprocessor: some tenths of a second, since a driver that shows a desktop
# ends kernels that take two seconds.
_WORK_PER_SM = 1 << 34
_GRID_LIMIT = 65535


class KernelUnavailable(RouteUnavailable):
    """A kernel variant is not available on this machine; the message says why."""


@functools.cache
def machine_reasons(index: int) -> tuple[str, ...]:
    """Why no kernel can run on a CUDA device at all; empty = it can."""
    info = device_info(torch.device("cuda", index))
    if info.kind != "cuda" or info.capability is None:
        return ("the fused kernel needs an NVIDIA GPU",)
    if info.capability < (5, 0):
        return (f"the fused kernel needs compute capability 5.0, got {info.capability[0]}.{info.capability[1]}",)
    try:
        driver.driver()
    except (OSError, driver.DriverError) as error:
        return (f"the CUDA driver could not be opened: {error}",)
    arch = _arch(index)
    if prebuilt.best_arch(info.capability) is None and nvrtc.find(arch) is None:
        return (f"no prebuilt kernel and no NVRTC for sm_{arch}; pip install nvidia-cuda-nvrtc-cu12",)
    return ()


def failure(index: int, variant: Variant) -> str | None:
    """Why a variant could not be loaded earlier, or None."""
    return _failed.get((index, variant))


def functions(index: int, variant: Variant) -> dict[str, ctypes.c_void_p]:
    """A variant's functions on a device, loaded at the first call.

    Raises:
        KernelUnavailable: after one warning; the same from then on.
    """
    key = (index, variant)
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _loaded and key not in _failed:
            try:
                cubin = machine_code(variant, device_info(torch.device("cuda", index)).capability or (0, 0))
                _loaded[key] = driver.driver().load(index, cubin, variant.functions)
            except (KernelUnavailable, driver.DriverError) as error:
                _failed[key] = f"no kernel {variant.name}: {error}"
                log.warning("the fused route is left out: %s", _failed[key])
        if key in _failed:
            raise KernelUnavailable(_failed[key])
        return _loaded[key]


def give_up(index: int, variant: Variant, reason: str) -> None:
    """Never run a variant on a device again."""
    with _lock:
        _loaded.pop((index, variant), None)
        if (index, variant) not in _failed:
            _failed[index, variant] = reason
            log.warning("the fused route is left out: %s", reason)


def machine_code(variant: Variant, capability: tuple[int, int]) -> bytes:
    """A cubin for a device: prebuilt, from the disk cache, or compiled now and stored there.

    Raises:
        KernelUnavailable: none of the three.
    """
    shipped = prebuilt.best_arch(capability)
    cubin = None if shipped is None else prebuilt.load(variant, shipped)
    if cubin is not None:
        return cubin
    arch = capability[0] * 10 + capability[1]
    compiler = nvrtc.find(arch)
    if compiler is None:
        raise KernelUnavailable(f"not prebuilt, and no NVRTC for sm_{arch}; pip install nvidia-cuda-nvrtc-cu12")
    folder, name = cache_folder(), cache.file_name(digest(variant), arch, compiler.version)
    cubin = cache.load(folder, name)
    if cubin is not None:
        return cubin
    try:
        cubin = compiler.compile(source(variant.kind), arch, variant.macros()).cubin
    except nvrtc.CompileError as error:
        raise KernelUnavailable(str(error).strip()) from error
    problem = cache.save(folder, name, cubin)
    if problem:
        log.info("a compiled kernel could not be stored: %s", problem)
    return cubin


def run(launches: Iterable[Launch], index: int) -> None:
    """Queue launches on the current stream of a device, long ones in parts.

    Raises:
        KernelUnavailable: before anything has been queued.
    """
    launches = list(launches)
    handles = [functions(index, launch.variant)[launch.function] for launch in launches]
    num_sms = device_info(torch.device("cuda", index)).num_sms
    for launch, handle in zip(launches, handles):
        for part in parts(launch, num_sms):
            driver.driver().launch(index, handle, part.grid, part.threads, part.params)


def parts(launch: Launch, num_sms: int) -> Iterator[Launch]:
    """A launch as several that each take some tenths of a second at most, with grids that the driver takes."""
    x, y, z = launch.grid
    params = launch.params
    if not hasattr(params, "first_tile"):  # a kernel that reads its inputs once
        yield launch
        return
    most = _WORK_PER_SM * num_sms
    per_tile = y * max(1, launch.work // max(1, x * y * z))
    tiles = x if launch.variant.kind == "split" else max(1, min(x, most // per_tile))
    batches = min(_GRID_LIMIT, max(1, most // (per_tile * tiles)))
    if tiles >= x and batches >= z:
        yield launch
        return
    for first_batch in range(0, z, batches):
        for first_tile in range(0, x, tiles):
            part = type(params).from_buffer_copy(params)
            part.first_batch, part.first_tile = first_batch, first_tile
            grid = (min(tiles, x - first_tile), y, min(batches, z - first_batch))
            yield launch._replace(grid=grid, params=part)


def _arch(index: int) -> int:
    capability = device_info(torch.device("cuda", index)).capability
    return 0 if capability is None else capability[0] * 10 + capability[1]
