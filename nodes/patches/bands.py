"""Decoding and encoding of a VAE in bands, between ComfyUI's VAE and its network."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...pascal_attn_core.patching.patch import REFUSED
from ...pascal_attn_core.vae.banded import Banded
from ...pascal_attn_core.vae.calls import BandSettings, PatchedMethod
from ..comfy import host
from ..engine.engine import Engine

AS_IT_IS, NEEDED, ALWAYS = MODES = ("as it is", "in bands when needed", "always in bands")
METHODS = ("decode", "encode")
_STEPS = 1000  # of ComfyUI's progress bar
_BUFFER, _DEVICE = "output_buffer", "device"  # arguments of networks that read and write in parts

Call = Callable[..., Any]
Estimate = Callable[[tuple[int, ...], torch.dtype], float]


class _Now(threading.local):
    """The call in progress: what came, the same on the device, where the network shall write its result, the progress
    bar, and the Cancel that came."""

    samples: Tensor | None = None
    given: Tensor | None = None
    buffer: Tensor | None = None
    bar: Any = None
    cancelled: BaseException | None = None


class InBands:
    """``decode`` or ``encode`` of a network, by the core: in bands always, or where it does not fit.

    Args:
        estimate: ComfyUI's own of the memory of a call, in bytes; None where it has none.
    """

    def __init__(
        self, engine: Engine, network: nn.Module, method: str, mode: str, estimate: Estimate | None, previous: Call
    ):
        functools.update_wrapper(self, previous)
        self.engine, self.estimate, self.previous = engine, estimate, previous
        self.now = _Now()
        settings = BandSettings(
            when_needed=mode == NEEDED,
            progress=self._show,
            expected_bytes=lambda _, shape, dtype: _reckoned(estimate, shape, dtype),
        )
        self.site = PatchedMethod(network, method, self._own, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args or type(args[0]) is not Tensor:
            return self.previous(*args, **kwargs)
        samples, *args = args  # type: ignore[assignment]
        now, calls = self.now, self.site.calls
        before = calls[-1] if calls else None
        device = kwargs.get(_DEVICE)
        given = samples if device is None else samples.to(device)
        now.samples, now.given, now.buffer = samples, given, kwargs.pop(_BUFFER, None)
        try:
            out = self.site(given, *args, **kwargs)
            self._go_on()
            return out
        except MemoryError as error:  # the computer's memory: said before anything was computed
            if not self.site.settings.when_needed:
                raise
            self.engine.warn(f"{error}; it runs as it is instead")
            return self._own(given, *args, **kwargs)
        finally:
            vars(now).clear()
            call = calls[-1] if calls and calls[-1] is not before else None
            if call is not None and call.state == REFUSED:
                self.engine.warn(f"{call.method} cannot run in bands: {call.why}; it runs as it is")
            elif call is not None and call.figures is not None:
                self.engine.run.gain(call.text(_reckoned(self.estimate, tuple(given.shape), given.dtype)))

    def _own(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The network's own method, as ComfyUI calls it. Trials on small inputs, or without numbers, must not write
        into ComfyUI's buffer."""
        now, is_rehearsal = self.now, isinstance(tensor, Banded) and tensor.run.is_rehearsal
        if now.buffer is not None and now.given is not None and tensor.shape == now.given.shape and not is_rehearsal:
            kwargs[_BUFFER] = now.buffer
        return self.previous(now.samples if tensor is now.given else tensor, *args, **kwargs)

    def _show(self, done: float) -> None:
        """ComfyUI's progress bar of the node that is running, and its Cancel, after each band."""
        self._go_on()
        try:
            host.throw_if_interrupted()
        except BaseException as error:
            self.now.cancelled = error
            raise
        self.now.bar = self.now.bar or host.progress_bar(_STEPS)
        self.now.bar.update_absolute(int(done * _STEPS))

    def _go_on(self) -> None:
        """Raise a Cancel that ComfyUI's code has swallowed: around its upsampling is an ``except`` for everything."""
        if self.now.cancelled is not None:
            raise self.now.cancelled


def _reckoned(estimate: Estimate | None, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """ComfyUI's estimate in bytes, 0 where it has none for such a call."""
    if estimate is None:
        return 0
    try:
        return int(estimate(shape, dtype))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return 0
