"""The kernels of one device: where a variant's machine code comes from (shipped with the package, else the disk cache,
else the maker's runtime compiler), what is loaded, and what has been checked."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...call import AttentionCall
from ...config import RouteUnavailable, cache_folder
from ...machine.out_of_memory import is_out_of_memory, with_room
from ...machine.own_thread import in_backward, in_own_thread
from ...machine.runtime import Runtime, begin_epoch, runtime_of
from ..code import cache, prebuilt
from ..code.compilation import Compilation
from ..code.params import Params
from ..code.source import digest
from ..gpu import gpu_runtime_of
from ..gpu.runtime import REFUSED_IMAGE, CompileError, Driver, DriverError, GpuRuntime
from ..launch import Launch
from ..launch.repeat import Loaded
from . import verify

log = logging.getLogger("pascal_attn")
# Multiplications of one launch for each multiprocessor: some tenths of a second, since a driver that shows a desktop
# ends kernels that take two seconds.
WORK_PER_SM = 1 << 34
# Seconds for which a kernel that found no memory is not tried again.
MEMORY_PAUSE = 5.0
_GRID_LIMIT = 65535
_MOST_THREADS = 2**32 - 1  # in a direction of a grid, by HIP


class KernelUnavailable(RouteUnavailable):
    """A kernel variant is not available on this machine; the message says why."""


class Kernels:
    """The kernels on one device; several threads may use them at once. Made by ``runtime.part(Kernels)``.

    Args:
        gpu: its maker's driver and compiler; None = those of :func:`..gpu.gpu_runtime_of`.
        shipped: gives the prebuilt machine code of a variant for an architecture, or None.
        folder: gives the folder in which compiled kernels are stored, or None.
        work_per_sm: multiplications that one launch may have for each multiprocessor.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        gpu: GpuRuntime | None = None,
        shipped: Callable[[Compilation, str], bytes | None] = prebuilt.find,
        folder: Callable[[], Path | None] = cache_folder,
        work_per_sm: int = WORK_PER_SM,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.device, self.info = runtime.device, runtime.info
        self._gpu = gpu_runtime_of(runtime.info) if gpu is None else gpu
        self.shipped, self.folder, self.clock = shipped, folder, clock
        self.work_per_launch = work_per_sm * runtime.info.num_sms
        self._loaded: dict[Compilation, dict[str, Any]] = {}
        self._refused: dict[Compilation, tuple[str, float]] = {}  # why, and until when
        self._exists: dict[Compilation, bool] = {}
        self._checked: set[Compilation] = set()
        self._lock = threading.RLock()

    @functools.cached_property
    def index(self) -> int:
        """The number of the device among the CUDA devices."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    @property
    def gpu(self) -> GpuRuntime:
        """The driver and the compiler of the device's maker. Only to be asked for where the kernels run on its kind."""
        assert self._gpu is not None
        return self._gpu

    @functools.cached_property
    def driver(self) -> Driver:
        """Loads and launches; see :class:`.GpuRuntime` for what opening it raises."""
        return self.gpu.open_driver()

    @functools.cached_property
    def arch(self) -> str:
        """The architecture whose machine code the device runs: ``"sm_61"``, ``"gfx906"``."""
        return self.gpu.arch(self.info)

    @functools.cached_property
    def variant_arch(self) -> str:
        """The ``arch`` of the variants of AMD's devices; "" on others."""
        return self.arch if self.info.kind == "hip" else ""

    @functools.cached_property
    def machine_reasons(self) -> tuple[str, ...]:
        """Why no kernel can run on this device at all; empty = it can."""
        if self._gpu is None:
            return ("the fused kernel needs a GPU of NVIDIA's, or of AMD's with ROCm",)
        refusal = self._gpu.refusal(self.info)
        if refusal:
            return (refusal,)
        try:
            self._gpu.open_driver()
        except (OSError, DriverError) as error:
            return (f"the {self._gpu.driver_name} could not be opened: {error}",)
        if not prebuilt.ships_for(self.arch) and self._gpu.compiler_version(self.arch) is None:
            return (f"no prebuilt kernel and {self._gpu.no_compiler(self.arch)}",)
        return ()

    def reasons(self, variants: Iterable[Compilation]) -> list[str]:
        """Why these variants cannot run on this device, as far as that is known; empty = nothing speaks against it."""
        return list(self.machine_reasons) or [reason for v in variants if (reason := self._reason(v))]

    def _reason(self, variant: Compilation) -> str | None:
        """Why a variant cannot run now, if that is known."""
        if variant not in self._refused:
            return None
        reason, until = self._refused[variant]
        # Recomputation in a backward pass has to take the route that its forward pass took.
        return reason if self.clock() < until or in_backward() else None

    def functions(self, variant: Compilation) -> dict[str, Any]:
        """A variant's functions, loaded at the first call.

        Raises:
            KernelUnavailable: after one warning; the same from then on, or for a while where memory is short.
            DriverError: the process can no longer use the device.
        """
        if variant in self._loaded:
            return self._loaded[variant]
        with self._lock:
            if variant not in self._loaded:
                if reason := self._reason(variant):
                    raise KernelUnavailable(reason)
                try:
                    self._loaded[variant] = self._load(variant)
                except (KernelUnavailable, DriverError) as error:
                    raise self.unavailable(variant, error) from error
            return self._loaded[variant]

    def _load(self, variant: Compilation) -> dict[str, Any]:
        try:
            return self._load_image(variant, self.machine_code(variant))
        except DriverError as error:
            if error.error_code not in REFUSED_IMAGE or self.gpu.compiler_version(self.arch) is None:
                raise
            log.info("compiling %s, since the driver refuses its machine code: %s", variant.name, error)
            return self._load_image(variant, self.machine_code(variant, compiled=True))

    def _load_image(self, variant: Compilation, image: bytes) -> dict[str, Any]:
        load = functools.partial(self.driver.load, self.index, image, variant.functions)
        try:
            functions = load()
        except DriverError as error:
            if not is_out_of_memory(error) or self._captures():
                raise
            torch.cuda.empty_cache()  # which torch's allocator does as well before it reports a lack of memory
            functions = load()
        if variant.dynamic_bytes:
            self.driver.allow_shared(self.index, functions[variant.functions[0]], variant.dynamic_bytes)
        return functions

    def _captures(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def ensure(self, variants: Iterable[Compilation]) -> None:
        """Load variants, and compare each at its first use on this device with the definition: one that gives wrong
        answers, with this card and this driver, is disabled with a warning. While a graph is being captured they are
        only loaded.

        Raises:
            KernelUnavailable: one cannot be loaded or launched, or gives wrong answers here.
            DriverError: the process can no longer use the device.
        """
        for variant in variants:
            if variant in self._checked:
                continue
            self.functions(variant)
            if self._captures():
                continue
            try:
                with_room(functools.partial(in_own_thread, functools.partial(self._check, variant), self.device))
            except RouteUnavailable:
                raise
            except Exception as error:  # a check of ours does not end the user's call
                raise self.unavailable(variant, error) from error

    def _check(self, variant: Compilation) -> None:
        with self._lock, torch.no_grad():
            if variant in self._checked:
                return
            error = self.largest_error(variant)
            if not error <= verify.tolerance(variant):
                raise self.disable(variant, f"{variant.name} differs from the definition by {error:.2g}")
            self._checked.add(variant)

    def largest_error(self, variant: Compilation) -> float:
        """The error of :func:`.verify.largest_error` on this device."""
        return verify.largest_error(variant, self.device, self.run)

    def unavailable(self, variant: Compilation, error: Exception) -> KernelUnavailable:
        """The error to raise for a variant that could not be loaded or launched. It is remembered for the rest of the
        process, or where memory was short for MEMORY_PAUSE.

        Raises:
            DriverError: ``error``, where the process can no longer use the device: no route could.
        """
        if isinstance(error, DriverError) and error.loses_device:
            raise error
        if isinstance(error, RouteUnavailable) or not is_out_of_memory(error):
            return self.disable(variant, f"no kernel {variant.name}: {error}")
        return self.disable(variant, f"no memory for the kernel {variant.name}: {error}", MEMORY_PAUSE)

    def disable(self, variant: Compilation, reason: str, seconds: float = math.inf) -> KernelUnavailable:
        """Do not run a variant on this device for this time; returns the error to raise."""
        with self._lock:
            before, until = self._refused.get(variant, ("", 0.0))
            if until == math.inf:
                return KernelUnavailable(before)
            self._refused[variant] = reason, self.clock() + seconds
            begin_epoch()
            if seconds == math.inf:
                self._loaded.pop(variant, None)
                log.warning("a kernel of the fused route is disabled: %s", reason)
            elif not before:
                log.warning("the fused route is not taken until there is more memory: %s", reason)
        return KernelUnavailable(reason)

    def existing_code(self, variant: Compilation) -> tuple[bytes | None, str]:
        """The machine code of a variant that need not be compiled, and where it comes from: ``"shipped"`` or ``"disk
        cache"``. None with ``"NVRTC 12.6"`` where that would compile it, with ``""`` where nothing can."""
        code = self.shipped(variant, self.arch)
        if code is not None:
            return code, "shipped"
        version = self.gpu.compiler_version(self.arch)
        if version is None:
            return None, ""
        folder = self.folder()
        code = None if folder is None else cache.load(folder, self._file_name(variant, version))
        return code, f"{self.gpu.compiler_name} {version[0]}.{version[1]}" if code is None else "disk cache"

    def is_to_be_had(self, variant: Compilation) -> bool:
        """Whether a variant is loaded, or could be, as far as that is known without loading it."""
        if variant in self._loaded or self.reasons([variant]):
            return variant in self._loaded
        if variant not in self._exists:
            self._exists[variant] = bool(self.existing_code(variant)[1])
        return self._exists[variant]

    def _file_name(self, variant: Compilation, version: tuple[int, int]) -> str:
        return cache.file_name(digest(variant), self.arch, self.gpu.compiler_name, version)

    def machine_code(self, variant: Compilation, *, compiled: bool = False) -> bytes:
        """Machine code for this device: prebuilt, from the disk cache (neither where ``compiled`` is asked for), or
        compiled now and stored there; KernelUnavailable where there is none."""
        code = None if compiled else self.existing_code(variant)[0]
        if code is not None:
            return code
        version = self.gpu.compiler_version(self.arch)
        if version is None:
            raise KernelUnavailable(f"not prebuilt, and {self.gpu.no_compiler(self.arch)}")
        try:
            code = self.gpu.compile(variant, self.arch)
        except CompileError as error:
            raise KernelUnavailable(str(error).strip()) from error
        folder = self.folder()
        problem = None if folder is None else cache.save(folder, self._file_name(variant, version), code)
        if problem:
            log.info("a compiled kernel could not be stored: %s", problem)
        return code

    def run(self, launches: Sequence[Launch]) -> list[Loaded]:
        """Queue launches on the current stream of the device, long ones in parts, and return what was queued.

        Raises:
            KernelUnavailable: one could not be loaded or launched. What was queued before it writes only where these
                launches write: their call can be computed again, by another route.
            DriverError: the process can no longer use the device.
        """
        handles = [self.functions(launch.variant)[launch.function] for launch in launches]
        loaded = [
            Loaded(part, handle, part.shared_bytes)
            for launch, handle in zip(launches, handles)
            for part in parts(launch, self.work_per_launch)
        ]
        self.queue(loaded, [each.launch.params for each in loaded])
        return loaded

    def queue(self, loaded: Sequence[Loaded], params: Sequence[Params]) -> None:
        """Queue what :meth:`run` has returned, with these parameters; see there."""
        driver, stream = self.driver, self.driver.stream(self.index)
        with driver.on(self.index):
            for (launch, handle, shared_bytes), own in zip(loaded, params):
                try:
                    driver.launch(stream, handle, launch.grid, launch.threads, own, shared_bytes)
                except DriverError as error:
                    raise self.unavailable(launch.variant, error) from error


def kernels_of(call: AttentionCall) -> Kernels:
    return runtime_of(call.query.device).part(Kernels)


def parts(launch: Launch, most_work: int) -> list[Launch]:
    """A launch as several of at most ``most_work`` multiplications each, or one tile, with grids that the driver
    takes. Where tiles must stay together, all of a batch element's, or of a launch whose blocks are listed all."""
    x, y, z = launch.grid
    params = launch.params
    if not launch.work or not hasattr(params, "first_tile"):  # a kernel that reads its inputs once, without tiles
        return [launch]
    per_tile = y * max(1, launch.work // max(1, x * y * z))
    stays = launch.variant.cuts_keys or launch.variant.is_even
    tiles = x if stays else max(1, min(x, most_work // per_tile, _MOST_THREADS // launch.threads))
    batches = min(_GRID_LIMIT, max(1, most_work // (per_tile * tiles)))
    if tiles >= x and batches >= z:
        return [launch]
    found = []
    for first_batch in range(0, z, batches):
        for first_tile in range(0, x, tiles):
            part = type(params).from_buffer_copy(params)
            part.first_tile = first_tile
            if z > 1:
                part.first_batch = first_batch
            grid = (min(tiles, x - first_tile), y, min(batches, z - first_batch))
            found.append(launch._replace(grid=grid, params=part))
    return found
