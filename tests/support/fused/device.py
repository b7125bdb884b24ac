"""A card that is not here: all of the fused route is real but the driver, in whose place launches are emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pascal_attn_core.call import AttentionCall
from pascal_attn_core.device import DeviceInfo
from pascal_attn_core.fused.kernels import Kernels
from pascal_attn_core.fused.launches import Launch
from pascal_attn_core.fused.source import Variant
from pascal_attn_core.routes.route import Route
from pascal_attn_core.routes.timing import Timings
from pascal_attn_core.runtime import Runtime, using

from .emulation import CARD, emulate


class EmulatedKernels(Kernels):
    """Kernels that need no driver and no check of their first answers.

    Args:
        execute: is given every launch, in the parts that would be queued.

    Attributes:
        queued: these launches.
        ensured: the kinds of the variants that each call asked for.
    """

    machine_reasons = ()

    def __init__(self, runtime: Runtime, execute: Callable[[Launch], object], **options: Any):
        super().__init__(runtime, **options)
        self.execute = execute
        self.queued: list[Launch] = []
        self.ensured: list[list[str]] = []

    def ensure(self, variants: tuple[Variant, ...]) -> None:  # type: ignore[override]
        self.ensured.append([variant.kind for variant in variants])
        super().ensure(variants)

    def functions(self, variant: Variant) -> dict[str, None]:
        return dict.fromkeys(variant.functions)

    def largest_error(self, variant: Variant) -> float:
        return 0.0

    def queue(self, launch: Launch, handle: None) -> None:
        self.queued.append(launch)
        self.execute(launch)


class Timed(Timings):
    """A card for which ``ratio`` is known for every kind of call; None = it was never timed."""

    ratio: float | None = None
    asked: list[AttentionCall]

    def fused_over_torch(self, ours: Route, call: AttentionCall, budget_bytes: int) -> float | None:
        self.asked = [*getattr(self, "asked", []), call]
        return self.ratio


@contextmanager
def emulated_card(
    execute: Callable[[Launch], object] = lambda launch: emulate([launch]),
    info: DeviceInfo = CARD,
    kind: type[EmulatedKernels] = EmulatedKernels,
    ratio: float | None = None,
    **options: Any,
) -> Iterator[EmulatedKernels]:
    """Let the CPU be such a card while the block runs.

    Args:
        ratio: our kernel's time in units of torch's; None = never timed.
        options: of :class:`Kernels`.
    """

    def kernels(runtime: Runtime) -> Kernels:
        return kind(runtime, execute, **options)

    def timings(runtime: Runtime) -> Timings:
        made = Timed(runtime)
        made.ratio = ratio
        return made

    with using(Runtime("cpu", info, {Kernels: kernels, Timings: timings})) as runtime:
        made = runtime.part(Kernels)
        assert isinstance(made, EmulatedKernels)
        yield made
