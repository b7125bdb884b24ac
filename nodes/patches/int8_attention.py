"""Attention of a ComfyUI model in 8 bits, not exact: the host's override brings each call to the site of its layer."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...pascal_attn_core.call import PLAIN
from ...pascal_attn_core.int8.attention import AttentionBinding, AttentionSite
from ...pascal_attn_core.int8.judged import has_numbers
from ...pascal_attn_core.int8.report import Int8Report
from ..comfy import host
from ..comfy.by_name import OVERRIDE, Attention
from ..comfy.layout import HostCall, empty_containers
from ..engine.runs import block_name
from .override import make_override, owner_of, pass_to, previous_of

AUTO, ALWAYS, OFF = CHOICES = ("auto", "always", "off")
KEY = f"{host.KEY}_int8"
ON_A_CPU = "attention stays exact: on a CPU 8 bits are slow, and for checks only"


class AttentionLayers(AttentionBinding):
    """The attention layers of one model, known by the block that a call comes from and by its number within the
    block."""

    def __init__(self, max_error: float):
        super().__init__(max_error=max_error)
        self._layers = {}
        self._local = threading.local()  # seen: how often each block has called attention in this model call

    def report(self, model: Any = None) -> Int8Report:
        return self.report_of([site.line() for site in self._layers.values()])

    def around_model(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """For ``add_wrapper_with_key``: a call of the model begins."""
        self._local.seen = Counter()
        return executor(*args, **kwargs)

    def attend(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of the host's attention function in 8 bits, in the host's layout; None = to be computed exactly."""
        site = self._site(kwargs.get("transformer_options"))
        try:
            call = HostCall.of(args, kwargs)
        except Exception as error:  # an unforeseen call is the host's, whatever is wrong with it
            site.why = f"reading a call failed with {type(error).__name__}: {error}"
            return None
        tensors = [t for t in call.given[:4] if t is not None]
        if any(type(t) not in PLAIN for t in tensors) or not all(map(has_numbers, tensors[:3])):
            return None
        host.throw_if_interrupted()
        out = site.attend(call.given)
        if out is None:
            return None
        empty_containers(args, kwargs)
        return call.returned(out)

    def answer(self, func: Attention, rest: Attention | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call in 8 bits, or else exactly, by ``rest`` or by ``func``: see :func:`.override.make_override`."""
        out = None if torch.compiler.is_compiling() else self.attend(args, kwargs)
        return pass_to(func, rest, args, kwargs) if out is None else out

    def _site(self, options: dict[str, Any] | None) -> AttentionSite:
        block, seen = block_name(options) or "call", vars(self._local).setdefault("seen", Counter())
        seen[block] += 1
        name = block if seen[block] == 1 else f"{block} ({seen[block]})"
        return self._layers.setdefault(name, AttentionSite(name, "attention", self.options))


_known: weakref.WeakKeyDictionary[nn.Module, dict[float, AttentionLayers]] = weakref.WeakKeyDictionary()


def layers_for(model: nn.Module, max_error: float) -> AttentionLayers:
    """The layers of this loaded model: a node that is executed again goes on with what was measured."""
    known = _known.setdefault(model, {})
    return known.setdefault(max_error, AttentionLayers(max_error))


def layers_in(override: Any) -> AttentionLayers | None:
    """The layers of the first of our overrides in a chain, which our other nodes may have continued."""
    while (owner := owner_of(override)) is not None:
        if isinstance(owner, AttentionLayers):
            return owner
        override = previous_of(override)
    return None


def install(patched: Any, layers: AttentionLayers | None, earlier: str) -> None:
    """Put our override on a fresh clone, in front of the one it had, or behind it by the choice of ``others``; one of
    ours that it had in front goes."""
    from comfy.patcher_extension import WrappersMP

    options = host.own_options(patched)
    patched.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    before = previous_of(options.pop(OVERRIDE, None), AttentionLayers)
    if layers is not None:
        patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, layers.around_model)
        before = make_override(layers, layers.answer, before, earlier)
        # The words of the node by which other nodes' reports name it.
        before.__module__, before.__qualname__ = f"{__name__.rpartition('.patches.')[0]}.eight_bit", "Pascal8Bit.patch"
    if before is not None:
        options[OVERRIDE] = before
