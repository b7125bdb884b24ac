"""Attention layers in 8-bit integers, not exact: what each measures and decides, which modules they are, and how their
calls are caught. Hosts with a better way to their calls than catching them bring these to a site themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import sdpa
from ..call import PLAIN, Arguments, check_call, prepared
from ..config import AttentionConfig, UnsupportedAttention
from ..contest.timing_table import median_times
from ..machine.out_of_memory import out_of_memory
from ..patching.forward import ReplacedForward, put_in, take_out
from ..patching.interception import TORCH_SDPA, SdpaMode, bind_sdpa
from ..patching.patch import ON, REFUSED, WAITING
from ..patching.selectors import matches, selectors
from ..routes import choose
from ..routes.fused import takes_device, why_untried
from ..routes.run import run
from .judged import Int8Options, Judged, Layers, has_numbers, limit_of
from .measure import Errors, chosen_rows, errors_of, parts_of
from .report import Int8Report, Int8ReportLine

_IN_8_BITS = AttentionConfig(route="fused-int8")


class CaughtForward(ReplacedForward):
    """A module's ``forward`` during which calls of torch's ``scaled_dot_product_attention`` in the same thread come to
    a site."""

    __slots__ = ("site",)

    def __init__(self, site: AttentionSite, module: nn.Module, inner: Callable[..., Any] | None):
        super().__init__(module, inner)
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        if not self.site.options.enabled or torch.compiler.is_compiling():
            return self.whole(*args, **kwargs)
        with SdpaMode(self.site.catch):
            return self.whole(*args, **kwargs)


def find_attention(model: nn.Module, include: Any = None, exclude: Any = None) -> Iterator[tuple[str, nn.Module]]:
    """(qualified name, module) of the attention layers of ``model``: the innermost modules whose class has "attention"
    in its name; or those that ``include`` selects."""
    chosen, dropped = selectors("include", include), selectors("exclude", exclude)

    def is_one(module: nn.Module) -> bool:
        name = type(module).__name__.lower()
        return ("attention" in name or "attn" in name) and type(module).__call__ is nn.Module.__call__

    for name, module in model.named_modules():
        is_innermost = is_one(module) and not any(is_one(part) for part in module.modules() if part is not module)
        is_chosen = is_innermost if include is None else matches(chosen, name, module)
        if is_chosen and not matches(dropped, name, module):
            yield name, module


class AttentionSite(Judged):
    """The state of one attention layer, and its calls: those that 8 bits do not take, and those of a layer in float,
    are computed exactly.

    Attributes:
        way: what computes it.
    """

    way = ""

    def catch(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """One call of torch's function."""
        bound = bind_sdpa(args, kwargs)
        if isinstance(bound, str) or (bound.attn_mask is not None and type(bound.attn_mask) not in PLAIN):
            return TORCH_SDPA(*args, **kwargs)
        if not all(has_numbers(t) for t in bound[:3]):
            return TORCH_SDPA(*args, **kwargs)
        out = self.attend(bound)
        return sdpa(**bound.keywords()) if out is None else out

    def attend(self, given: Arguments) -> Tensor | None:
        """The output of one call in 8 bits; None = it is to be computed as without 8 bits. The tensors have numbers,
        and the mask is a plain one."""
        rounded = None if self.state == REFUSED else self._rounded(given)
        if rounded is None:
            return None
        measure = functools.partial(self._measure, given, rounded)
        self.look(given[:3], measure, functools.partial(self._time, given), keys=given.key.shape[-2])
        return rounded if self.state == ON and not self.options.gathers else None

    def _rounded(self, given: Arguments) -> Tensor | None:
        try:
            return in_8_bits(given)
        except UnsupportedAttention as error:
            self.why = error.reasons[0]
        except (TypeError, ValueError) as error:  # the exact computation says what is wrong with it, or can do it
            self.why = str(error)
        except out_of_memory():
            self.why = "out of memory in 8 bits"
        return None

    def _measure(self, given: Arguments, rounded: Tensor, rows: int) -> Errors:
        return attention_error(given, rounded, self.watch.calls, rows)

    def _time(self, given: Arguments) -> None:
        """Time the call both ways, on GPUs only: on a CPU 8-bit attention exists for checks."""
        query = given.query
        self.way = "kernel" if query.is_cuda else "operators"
        if query.is_cuda:
            shapes = tuple((t.shape, t.dtype, t.device) for t in given if isinstance(t, Tensor))
            self.time(shapes, [lambda: sdpa(**given.keywords()), lambda: in_8_bits(given)], query.device)

    def line(self, name: str | None = None) -> Int8ReportLine:
        line = super().line(name)
        return line._replace(
            state=REFUSED if self.state == WAITING and self.why else line.state,  # no call so far can be in 8 bits
            way=self.way if line.state == ON else "",
            why_way="the 8-bit kernel needs an NVIDIA GPU" if self.way == "operators" else "",
        )


def in_8_bits(given: Arguments) -> Tensor:
    """The output of a call. UnsupportedAttention where 8 bits do not take it, or the kernels were not tried on this
    card, or found bad, in a process of their own: a fault of theirs must not end this one."""
    call = check_call(prepared(given))
    choice = choose(call, _IN_8_BITS)
    if takes_device(call.query.device) and (why := why_untried(call, choice.plan)):
        raise UnsupportedAttention(_IN_8_BITS.route, [f"the 8-bit kernel is left off: {why}"])
    return run(call, _IN_8_BITS, with_lse=False, choice=choice).out


def attention_error(given: Arguments, rounded: Tensor, seed: int, most: int) -> Errors:
    """The errors of a call's output against the exact route; the worst row is of one head.

    The same rows are compared in every head and batch element. A quarter of them have the largest norm of the query in
    some head, in units of the head's mean; the others are drawn. inf or NaN in either make all inf.

    Args:
        rounded: the output in 8 bits, ``[*batch, Hq, L, Dv]``.
        seed: of the draw; another one for each check of a layer.
        most: rows.
    """
    query, mask, length = given.query.detach(), given.attn_mask, rounded.shape[-2]
    norms = torch.linalg.vector_norm(query, dim=-1, dtype=torch.float32).reshape(-1, length)
    largest = (norms / norms.mean(dim=1, keepdim=True).clamp_min(1e-30)).amax(dim=0)
    rows, counts = chosen_rows(largest[:, None], most, seed)
    if len(rows) < length:
        if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask.index_select(-2, rows)
        if given.is_causal:
            seen = torch.arange(given.key.shape[-2], device=rows.device) <= rows[:, None]
            mask = seen if mask is None else mask & seen
        given = given._replace(query=query.index_select(-2, rows), attn_mask=mask, is_causal=False)
        rounded = rounded.index_select(-2, rows)
    exact = sdpa(**given.keywords()).double()
    wrong, size = (t.square().sum(dim=-1) for t in (rounded.double() - exact, exact))
    parts = parts_of(query[..., 0])
    above, below = (t.reshape(parts, -1, len(rows)).sum(dim=1).flatten() for t in (wrong, size))  # of all heads
    found = errors_of(above, below, torch.kron(torch.eye(parts).to(counts), counts[:, None]))
    worst = torch.where(wrong == 0, 0.0, wrong / size).amax().sqrt().nan_to_num(math.inf, math.inf)
    return found._replace(worst_row=worst.item())


class AttentionBinding(Layers[AttentionSite]):
    """Attention layers of models in 8 bits; what a binding does is said in :class:`.binding.Int8Binding`."""

    what = "attention layers"

    def __init__(self, *, max_error: float = 0.02, include: Any = None, exclude: Any = None):
        super().__init__(Int8Options(limit_of(max_error), "", median_times, only_faster=True))
        self._include, self._exclude = include, exclude
        self._caught: list[CaughtForward] = []

    def attach(self, model: nn.Module) -> int:
        """Let the attention layers of ``model`` run in 8 bits. Returns their number."""
        found = list(find_attention(model, self._include, self._exclude))
        for name, module in found:
            site = self._layers[module] = AttentionSite(name or "(the model)", type(module).__name__, self.options)
            self._caught.append(put_in(module, functools.partial(CaughtForward, site)))
        return len(found)

    def detach(self, model: nn.Module) -> list[str]:
        """Undo :meth:`attach`. Returns what could not be."""
        caught, self._caught = self._caught, []
        return [sentence for forward in caught for sentence in take_out(forward)]

    def report(self, model: nn.Module) -> Int8Report:
        """The state of each layer."""
        return self.report_of([site.line() for site in self.layers_of(model)])
