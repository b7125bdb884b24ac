"""GgufLayer: a linear layer with a GGUF weight under one patch. Its weight stays as it is in the file; what changes is
the method of its host that multiplies by the expanded weight: it rounds the input to 8 bits, as long as the error is
within the limit, and multiplies the blocks as they lie."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..gguf import hosts
from ..gguf.hosts import Multiplier
from ..gguf.int8 import product, way_for
from ..gguf.matrix import GgufMatrix, linear
from ..machine.out_of_memory import out_of_memory
from ..machine.own_thread import in_backward
from .exchange import Source
from .find import shape_of
from .judged import Int8Options, has_numbers, is_captured
from .layer import Int8Layer
from .measure import FEW_OUTPUTS, FEW_ROWS, SAMPLE_ROWS, Sample, error_of, sample_of
from .report import FLOAT, INT8, WAITING


class GgufLayer(Int8Layer):
    """The state of one layer; its attributes are those of :class:`.layer.Int8Layer`, without a rotation."""

    def __init__(self, name: str, module: nn.Module, options: Int8Options):
        super().__init__(name, module, options)
        host = hosts.host_of(module)
        assert host is not None
        self.host, self.shape = host, shape_of(module)
        self.format, self.int8_bytes = hosts.format_of(module, host), self.float_bytes
        self._is_attached = False

    @property
    def is_on(self) -> bool:
        return self.state == INT8 and self._is_attached

    @property
    def was_replaced(self) -> bool:
        return self._is_attached and self._multiplier is None

    @property
    def _multiplier(self) -> GgufMultiplier | None:
        """The multiplier of a module, if it is of this layer."""
        found = vars(self.module).get(self.host.method) if self.module is not None else None
        return found if isinstance(found, GgufMultiplier) and found.layer is self else None

    def attach(self, source: Source) -> None:
        module = self.module
        assert module is not None
        self.source, self._is_attached = source, True
        GgufMultiplier(module, self).put_in()

    def detach(self) -> str:
        multiplier, was_replaced, self._is_attached = self._multiplier, self.was_replaced, False
        self.source = Source()
        if multiplier is not None:
            multiplier.take_out()
        return f"the product of {self.name} was replaced in the meantime" if was_replaced else ""

    def multiply(self, x: Tensor, weight: GgufMatrix, bias: Tensor | None) -> Tensor:
        """The product of an input with the weight: in 8 bits, or with the expanded weight."""
        if self.state != FLOAT and self._is_attached and has_numbers(x) and not in_backward():
            is_to_check = self.watch.check_now(x.numel() // x.shape[-1]) or self.state == WAITING
            if is_to_check and not is_captured(x):
                self._check(x, weight, bias)
        is_in_8_bits = self.state == INT8 and self._is_attached and has_numbers(x)
        out, lora = linear(x, weight, bias, *[product] * is_in_8_bits), self.source.lora_on(x.device)
        return out if lora is None else out + lora(x)

    def _check(self, x: Tensor, weight: GgufMatrix, bias: Tensor | None) -> None:
        """Measure the error of a call, and decide by it."""
        try:
            with self.options.lock, torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                if self.state == INT8:
                    self._recheck(x, weight)
                elif self.state == WAITING:
                    self.device = x.device
                    self.backend = way_for(x, weight)
                    self._note({0: gguf_error(sample_of(x, SAMPLE_ROWS, self.watch.calls), weight, self.backend.name)})
                    if not self.options.gathers:
                        self.decide()
                        if self.state == INT8:
                            self._time(x, weight, bias)
        except out_of_memory():
            if self.state == WAITING:
                self.why = "out of memory while measuring it"

    def _time(self, x: Tensor, weight: GgufMatrix, bias: Tensor | None) -> None:
        ways = (functools.partial(product, x, weight, bias, way) for way in ("float", self.backend.name))
        self.time((x.shape, x.dtype, x.device, self.shape, self.format), [*ways], x.device)
        self._is_no_faster()

    def decide(self) -> None:
        if self.state == WAITING and 0 in self._errors:
            if self.admits(self._errors[0]):
                self.state, self.why = INT8, ""
            self.watch.saw(self._errors[0])

    def _recheck(self, x: Tensor, weight: GgufMatrix) -> None:
        """Measure with few rows and outputs, and where the error seems too large, as thoroughly as at first."""
        limit, seed, way = self.options.max_error, self.watch.calls, way_for(x, weight).name
        some = torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(seed))[:FEW_OUTPUTS]
        error = gguf_error(sample_of(x, FEW_ROWS, seed), weight.at(some), way)
        if error > limit:
            error = gguf_error(sample_of(x, SAMPLE_ROWS, seed), weight, way)
        self.watch.saw(error)
        if not error <= limit:
            self.warn_of(error)
            self.state = FLOAT


class GgufMultiplier(Multiplier):
    """The multiplier of a layer."""

    __slots__ = ("layer",)

    def __init__(self, module: nn.Module, layer: GgufLayer):
        super().__init__(module, layer.host, lambda: layer.options.enabled, layer.multiply)
        self.layer = layer

    def takes(self) -> bool:
        return self.layer.source.lora is not None or super().takes()


def gguf_error(sample: Sample, weight: GgufMatrix, way: str) -> float:
    """:func:`.measure.error_of` the product of a sample, against the weights that the file has, in float32."""
    exact = weight._replace(arithmetic=torch.float32, dtype=torch.float32)
    slices = ((some, exact.rows(some)) for some in exact.slices())
    return error_of(sample, product(sample.rows, weight, None, way), slices)
