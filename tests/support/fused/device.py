"""A card that is not here, NVIDIA's or AMD's: all of the fused route is real but the driver, for which a strict
stand-in executes the launches in the emulation."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pascal_attn_core import record, sdpa
from pascal_attn_core.call import AttentionCall
from pascal_attn_core.contest.timing_table import Clock
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.gpu.hip import HipRuntime
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.fused.trust.trial import Trials
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.routes.route import Route
from pascal_attn_core.routes.timing import Times, Timings

from .driver import Compiler, StandIn
from .emulation import CARD, emulate
from .hip import RADEON_VII, HipCompiler, HipStandIn

AnyStandIn = StandIn | HipStandIn


def execute(launch: Launch) -> None:
    """A launch in the emulation."""
    emulate([launch])


@functools.cache
def _emulated_error(variant: Compilation) -> float:
    """The error that the check of a kernel's first answers finds: the same whenever the kernel is executed by the
    emulation."""
    return verify.largest_error(variant, torch.device("cpu"), emulate)


def noting(driver: AnyStandIn, machine_code: Callable[..., bytes]) -> Callable[..., bytes]:
    """``Kernels.machine_code`` that tells a stand-in whose machine code an image is."""

    def noted(*given: Any, **options: Any) -> bytes:
        code = machine_code(*given, **options)
        driver.variants[code] = given[-1]
        return code

    return noted


class CardKernels(Kernels):
    """Kernels that a stand-in loads and launches. All else is theirs: what ships, else what is compiled, is loaded, and
    each kernel's first answers are checked. ``ensured``: the kinds of the variants that each call asked for."""

    def __init__(self, runtime: Runtime, driver: AnyStandIn, **options: Any):
        is_hip = isinstance(driver, HipStandIn)
        compiler = HipCompiler() if is_hip else Compiler()
        find = options.pop("find_compiler", lambda *arch: compiler)
        gpu = (HipRuntime if is_hip else CudaRuntime)(lambda: driver, find)
        super().__init__(runtime, **{"gpu": gpu, "folder": lambda: None, **options})
        self.driver = driver
        self.queued = driver.queued
        self.ensured: list[list[str]] = []

        self.machine_code = noting(driver, self.machine_code)  # type: ignore[method-assign]

    def ensure(self, variants: Iterable[Compilation]) -> None:
        variants = list(variants)
        self.ensured.append([variant.kind for variant in variants])
        super().ensure(variants)


class EmulatedKernels(CardKernels):
    """Whose first answers are checked once in a process, since the emulation always gives the same, and outside of
    ``queued``. Where launches are not executed there is nothing to check."""

    def largest_error(self, variant: Compilation) -> float:
        return _emulated_error(variant) if self.driver.execute is execute else 0.0


class UncheckedKernels(CardKernels):
    """Kernels whose first answers are not checked: for launches that are not executed."""

    def largest_error(self, variant: Compilation) -> float:
        return 0.0


class Timed(Timings):
    """A card for which ``ratio`` and ``times`` are known for every kind of call; None = it was never timed."""

    ratio: float | None = None
    times: Times | None = None
    asked: list[AttentionCall]

    def fused_over_torch(self, ours: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        self.asked = [*getattr(self, "asked", []), call]
        return self.ratio

    def over_tensor(self, *given: Any) -> Times | None:
        return self.times


@contextmanager
def emulated_card(
    execute: Callable[[Launch], object] = execute,
    info: DeviceInfo = CARD,
    kind: type[CardKernels] = EmulatedKernels,
    ratio: float | None = None,
    times: Times | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Let the CPU be such a card while the block runs: gives its kernels, an object of ``kind``; ``ratio``, ``times``:
    of :class:`Timed`; options: of :class:`Kernels`, and ``find_compiler`` of :class:`CudaRuntime`."""

    def timings(runtime: Runtime) -> Timings:
        made = Timed(runtime, folder=lambda: None, is_on=False)
        made.ratio, made.times = ratio, times
        return made

    stand_in = HipStandIn if info.kind == "hip" else StandIn
    with _card(stand_in(info, execute), kind, {Timings: timings}, **options) as kernels:
        yield kernels


@contextmanager
def fresh_card(
    driver: AnyStandIn,
    timing: Clock | None = None,
    folder: Callable[[], Path | None] = lambda: None,
    kind: type[CardKernels] = CardKernels,
    **options: Any,
) -> Iterator[Any]:
    """Let the CPU be the card of a driver while the block runs, as a new process on a new machine finds it: no kernel
    is loaded or checked, and nothing has been timed. Gives its kernels, made with ``options``. ``timing``: the clock of
    :class:`Timings`."""

    def timings(runtime: Runtime) -> Timings:
        return Timings(runtime, clock=timing or passing_time, folder=folder, is_on=True)

    with _card(driver, kind, {Timings: timings}, folder=folder, **options) as kernels:
        yield kernels


def hip_card(info: DeviceInfo = RADEON_VII, **options: Any) -> AbstractContextManager[Any]:
    """As :func:`fresh_card`: an AMD card for which nothing ships, on which nothing is executed, and on which ours is
    always faster."""
    given = {"kind": UncheckedKernels, "shipped": lambda *_: None, **options}
    return fresh_card(HipStandIn(info), always_faster, **given)


def route_of(*inputs: Tensor, **options: Any) -> str:
    """Return the name of the route by which a call is answered."""
    with record() as report:
        sdpa(*inputs, **options)
    (route,) = report.routes()
    return route


def always_faster(attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """A clock that lets the first one win."""
    return [1.0] + [2.0] * (len(attempts) - 1)


def passing_time(attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Milliseconds of each, run once."""
    times = []
    for attempt in attempts:
        begin = time.perf_counter()
        attempt()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


@contextmanager
def _card(
    driver: AnyStandIn, kind: type[CardKernels], timings: Mapping[type, Callable[[Runtime], Any]], **options: Any
) -> Iterator[CardKernels]:
    parts = {
        Kernels: lambda runtime: kind(runtime, driver, **options),
        **timings,
        Trials: type("TrustedTrials", (Trials,), {"is_trusted": True}),  # every kernel has had its own
    }
    with using(Runtime("cpu", driver.card, parts)) as runtime:
        kernels = runtime.part(Kernels)
        assert isinstance(kernels, CardKernels)
        yield kernels
    assert driver.problems == []
    assert driver.left_behind() == []
