"""Attention layers in 8-bit integers, not exact: what each measures and decides, which modules they are, and how their
calls are caught. Hosts with a better way to their calls than catching them bring these to a site themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import sdpa
from ..call import PLAIN, Arguments, check_call, prepared
from ..config import AttentionConfig, UnsupportedAttention
from ..machine.out_of_memory import out_of_memory
from ..patching.interception import TORCH_SDPA, SdpaMode, bind_sdpa
from ..patching.patch import ON, REFUSED, WAITING
from ..patching.selectors import Found, matches, selectors
from ..routes import choose
from ..routes.fused import takes_device, why_untried
from ..routes.run import run
from .binding import Binding
from .judged import Judged, LayerForward, has_numbers
from .measure import Errors, chosen_rows, errors_of, parts_of
from .report import Int8ReportLine

_IN_8_BITS = AttentionConfig(route="fused-int8")


class CaughtForward(LayerForward):
    """A module's ``forward`` during which calls of torch's ``scaled_dot_product_attention`` in the same thread come to
    a site."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        if self.layer is None or torch.compiler.is_compiling():
            return self.whole(*args, **kwargs)
        with SdpaMode(self.layer.catch):
            return self.whole(*args, **kwargs)


class AttentionSite(Judged):
    """The state of one attention layer, and its calls: those that 8 bits do not take, and those of a layer in float,
    are computed exactly."""

    way = ""  # what computes it
    forward = CaughtForward

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
        return rounded if self.state == ON else None

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

    def line(self, name: str = "") -> Int8ReportLine:
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


class AttentionBinding(Binding[AttentionSite]):
    """Attention layers in 8 bits. Options are those of :func:`..patch_attention_int8`."""

    what = "attention layers"

    def find(self, model: nn.Module) -> Iterator[Found]:
        """The innermost modules whose class has "attention" in its name; or those that ``include`` selects."""
        chosen, dropped = (selectors(name, given) for name, given in self.chosen.items())

        def is_one(module: nn.Module) -> bool:
            name = type(module).__name__.lower()
            return ("attention" in name or "attn" in name) and type(module).__call__ is nn.Module.__call__

        for name, module in model.named_modules():
            is_innermost = is_one(module) and not any(is_one(part) for part in module.modules() if part is not module)
            is_chosen = is_innermost if self.chosen["include"] is None else matches(chosen, name, module)
            if is_chosen and not matches(dropped, name, module):
                yield Found(name, module)

    def make(self, name: str, module: nn.Module) -> AttentionSite:
        return AttentionSite(name, type(module).__name__, self.options)
