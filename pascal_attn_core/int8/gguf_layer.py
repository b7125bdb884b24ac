"""GgufLayer: a linear layer with a GGUF weight under one patch. Its weight stays as it is in the file; what changes is
the method of its host that multiplies by the expanded weight: it rounds the input to 8 bits, as long as the error is
within the limit, and multiplies the blocks as they lie."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..gguf import hosts
from ..gguf.hosts import Multiplier
from ..gguf.int8 import product, way_for, why_not
from ..gguf.matrix import GgufMatrix, linear
from ..machine.own_thread import in_backward
from ..patching.patch import ON, REFUSED, WAITING
from . import stored
from .exchange import Source
from .find import shape_of
from .judged import Int8Options, Judged, has_numbers
from .layer import Int8Layer
from .measure import Errors, error_of, outputs_of, sample_of
from .report import Int8ReportLine


class GgufLayer(Int8Layer):
    """The state of one layer; its attributes are those of :class:`.layer.Int8Layer`, without a rotation."""

    def __init__(self, name: str, module: nn.Module, options: Int8Options):
        super().__init__(name, module, options)
        host = hosts.host_of(module)
        assert host is not None
        self.host, self.shape = host, shape_of(module)
        self.format, self.int8_bytes = hosts.format_of(module, host), self.float_bytes
        self._is_attached, self._seen = False, stored.Seen()

    @property
    def is_on(self) -> bool:
        return self.state == ON and self._is_attached

    @property
    def was_replaced(self) -> bool:
        return self._is_attached and self._multiplier is None

    @property
    def _multiplier(self) -> Multiplier | None:
        """The multiplier of a module, if it is of this layer."""
        found = vars(self.module).get(self.host.method) if self.module is not None else None
        return found if isinstance(found, Multiplier) and found.multiply == self.multiply else None

    def _takes(self, has_patches: bool) -> bool:
        return self.options.enabled and self._is_attached and (self.source.lora is not None or not has_patches)

    def attach(self, module: nn.Module, source: Source) -> None:
        self.source, self._is_attached = source, True
        Multiplier(module, self.host, self._takes, self.multiply).put_in()

    def detach(self) -> str:
        multiplier, was_replaced, self._is_attached = self._multiplier, self.was_replaced, False
        self.source = Source()
        if multiplier is not None:
            multiplier.take_out()
        return f"the product of {self.name} was replaced in the meantime" if was_replaced else ""

    def multiply(self, x: Tensor, weight: GgufMatrix, bias: Tensor | None) -> Tensor:
        """The product of an input with the weight: in 8 bits, or with the expanded weight."""
        is_real = has_numbers(x)
        if self.state != REFUSED and is_real and not in_backward():
            parameter = self._parameter
            if parameter is not None and self._seen.changes(parameter):
                self.is_another()
            if self.state != WAITING or self._meets(x, weight):
                measure = functools.partial(self._error, x, weight)
                self.look((x,), measure, functools.partial(self._time_ways, x, weight, bias))
        out, lora = linear(x, weight, bias, *[product] * (is_real and self.is_on)), self.source.lora
        return out if lora is None else out + lora(x)

    def _meets(self, x: Tensor, weight: GgufMatrix) -> bool:
        """Whether a call in 8 bits is to be judged with this weight."""
        self.device, self.backend, self.format = x.device, way_for(x, weight), weight.format
        self.float_bytes = self.int8_bytes = weight.data.numel()
        if reason := why_not(weight.format, weight.shape[1]):
            self.refuse(reason)
        elif self.backend.name == "float":
            self.why = "the expanded weight is faster, or all that this device has"
        return self.state == WAITING and self.backend.name != "float"

    def line(self, name: str = "") -> Int8ReportLine:
        line = super().line(name)
        return line._replace(state=REFUSED) if self.backend.name == "float" else line

    def _error(self, x: Tensor, weight: GgufMatrix, rows: int) -> Errors:
        """The errors of a call on these rows against the weights that the file has, in float32; on few of them, of few
        outputs too."""
        seed, way = self.watch.calls, way_for(x, weight).name
        sample, some = sample_of(x, rows, seed), weight.at(outputs_of(weight.shape[0], rows, seed))
        exact = some._replace(arithmetic=torch.float32, dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            slices = ((each, exact.rows(each)) for each in exact.slices())
            return error_of(sample, product(sample.rows, some, None, way), slices)

    def _time_ways(self, x: Tensor, weight: GgufMatrix, bias: Tensor | None) -> None:
        ways = [functools.partial(product, x, weight, bias, way) for way in ("float", self.backend.name)]
        with torch.autocast(x.device.type, enabled=False):
            self.time((x.shape, x.dtype, x.device, self.shape, self.format), ways, x.device)

    def start(self) -> None:
        """Nothing is put in: the weight stays where it is."""

    def is_another(self) -> None:
        super().is_another()
        self.state = WAITING  # another format may have another way, or none

    def go_back(self) -> None:
        Judged.go_back(self)
