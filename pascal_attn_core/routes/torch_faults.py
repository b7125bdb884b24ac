"""Known faults of torch's fused kernels, as data: which calls each concerns, and a small call that shows it.

A call that a fault concerns does not go to torch's function, as long as the torch that is installed shows the fault:
the small call is made once per process, device and dtype, when a call that needs to know comes first. A torch that is
mended is therefore used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import AttentionCall, distinct, may_read
from ..lazy_mask import LazyMask
from ..machine.own_thread import in_backward, in_own_thread
from ..machine.runtime import Runtime, runtime_of
from ..patching.interception import torch_sdpa
from ..tiled.layout import worth_looking

log = logging.getLogger("pascal_attn")

# The denominator's logarithm is kept beside the row's maximum in one float32: next to 1000 it has an error of 3e-5.
_SWALLOWS = 1e3
_WRONG = 0.05  # relative error above which a probe has found the fault; NaN counts as well


@dataclass(frozen=True)
class Fault:
    """One fault of torch's kernels.

    Attributes:
        reason: the sentence for errors and reports; ``{call}`` is the call.
        concerns: whether it could make the result or the gradients of such a call wrong, whatever its tensors hold.
        probe: makes a small call of the kind with torch's function on a device, in a dtype: whether it is wrong.
        is_in: whether the values of a call's tensors make it wrong; None = all do. Asked only where torch shows the
            fault; where looking is not possible, or costs more than another route, it is assumed.
    """

    name: str
    reason: str
    concerns: Callable[[AttentionCall], bool]
    probe: Callable[[torch.device, torch.dtype], bool]
    is_in: Callable[[AttentionCall], bool] | None = None


def fault_reasons(call: AttentionCall, *, read: bool = True) -> list[str]:
    """Why torch's kernels would compute this call wrongly, one sentence per fault.

    Args:
        read: whether values of the call's tensors may be looked at.
    """
    return [
        fault.reason.format(call=call)
        for fault in FAULTS
        if fault.concerns(call)
        and is_shown(fault, call.query.device, call.query.dtype)
        and (fault.is_in is None or not (read and may_read(call) and worth_looking(call)) or fault.is_in(call))
    ]


class ShownFaults:
    """Which faults the torch that is installed has shown on one device: ``{(name, dtype): whether}``."""

    def __init__(self, runtime: Runtime):
        self.found: dict[tuple[str, torch.dtype], bool] = {}


def is_shown(fault: Fault, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the torch that is installed shows a fault. True while that cannot be tried."""
    found, key = runtime_of(device).part(ShownFaults).found, (fault.name, dtype)
    shown = found.get(key)
    if shown is None:
        if device.type == "cuda" and (torch.cuda.is_current_stream_capturing() or in_backward()):
            return True
        shown = _try(fault, device, dtype)
        if shown is None:
            return True
        found[key] = shown
        log.info("torch %s on %s in %s: %s: %s", torch.__version__, device, dtype, fault.name, shown)
    return shown


def _try(fault: Fault, device: torch.device, dtype: torch.dtype) -> bool | None:
    """Without the caller's modes, transforms, autocast and inference settings; None = there was no memory for it."""

    def run() -> bool | None:
        try:
            with torch.enable_grad():
                return fault.probe(device, dtype)
        except torch.cuda.OutOfMemoryError:
            return None
        except Exception:  # a kernel that raises does not serve either
            return True

    return in_own_thread(run, device)


# ---- the faults ----------------------------------------------------------------------------------------------------


def _mask_of(call: AttentionCall) -> Tensor | None:
    """The call's mask, if it is a tensor that may hold anything."""
    mask = call.attn_mask
    return None if isinstance(mask, LazyMask) or call.is_empty or call.query.device.type == "meta" else mask


def _has_rows_that_may_lack_keys(call: AttentionCall) -> bool:
    return _mask_of(call) is not None


def _has_rows_without_keys(call: AttentionCall) -> bool:
    mask = _mask_of(call)
    assert mask is not None
    mask = distinct(mask.detach())
    allowed = mask != 0 if mask.dtype == torch.bool else mask != -torch.inf
    return not bool(allowed.any(dim=-1).all())


def _is_not_zero_without_keys(device: torch.device, dtype: torch.dtype) -> bool:
    leaves = [t.requires_grad_() for t in _inputs(device, dtype)]
    keep = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=device)
    keep[1] = False
    for mask in (keep, torch.zeros_like(keep, dtype=dtype).masked_fill_(~keep, -torch.inf)):
        out = torch_sdpa(*leaves, mask)
        grads = torch.autograd.grad(out.sum(), leaves)
        if not (bool((out[..., 1, :] == 0).all()) and all(bool(t.isfinite().all()) for t in (out, *grads))):
            return True
    return False


def _repeats_over_keys(call: AttentionCall) -> bool:
    mask = _mask_of(call)
    return mask is not None and call.seq_len_kv > 1 and (mask.shape[-1] == 1 or mask.stride(-1) == 0)


def _misreads_repetitions(device: torch.device, dtype: torch.dtype) -> bool:
    query, key, value = _inputs(device, dtype)
    of_rows = _wave((_TOKENS, 1), device, dtype)
    return any(_is_wrong(query, key, value, mask) for mask in (of_rows, of_rows.expand(-1, _TOKENS)))


def _is_float16_on_a_cpu(call: AttentionCall) -> bool:
    return call.query.dtype == torch.float16 and not call.is_empty and runtime_of(call.query.device).info.kind == "cpu"


def _rounds_scores(device: torch.device, dtype: torch.dtype) -> bool:
    query, key, value = _inputs(device, dtype)
    return _is_wrong(query * 100, key * 100, value, None)


def _may_have_swallowing_rows(call: AttentionCall) -> bool:
    mask = _mask_of(call)
    return mask is not None and mask.dtype != torch.bool and call.needs_grad


def _has_swallowing_rows(call: AttentionCall) -> bool:
    """Some row's largest value is so large, of either sign, that the denominator's logarithm is lost beside it."""
    mask = _mask_of(call)
    assert mask is not None
    top = distinct(mask.detach()).amax(dim=-1).abs()
    return bool(((top > _SWALLOWS) & (top != torch.inf)).any())


def _loses_the_denominator(device: torch.device, dtype: torch.dtype) -> bool:
    query, key, value = _inputs(device, dtype)
    mask = torch.zeros(_TOKENS, _TOKENS, dtype=dtype, device=device)
    mask[:8] = torch.finfo(dtype).min
    return _is_wrong(query, key, value, mask, with_gradients=True)


def _has_no_positive_scale(call: AttentionCall) -> bool:
    return call.scale <= 0


def _scales_too_late(device: torch.device, dtype: torch.dtype) -> bool:
    query, key, value = _inputs(device, dtype)
    keep = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=device).tril_()
    return any(
        _is_wrong(query * size, key * size, value, mask, scale=scale, is_causal=causal)
        for size, scale in ((1.0, 0.0), (1.0, -0.5), (16.0, -0.5))
        for mask, causal in ((None, False), (None, True), (keep, False))
    )


def _mixes_float_types(call: AttentionCall) -> bool:
    mask = call.attn_mask
    return mask is not None and mask.dtype == torch.float32 and call.query.dtype == torch.float64


def _misreads_float32(device: torch.device, dtype: torch.dtype) -> bool:
    query, key, value = _inputs(device, dtype)
    twice = _wave((2 * _TOKENS, _TOKENS), device, torch.float32)  # as float64 torch reads on behind the mask
    return _is_wrong(query, key, value, twice[:_TOKENS])


FAULTS = (
    Fault(
        "float masks that fill rows with large numbers",
        "the gradients of torch's fused kernels are wrong where a row of a float mask holds very large numbers only",
        _may_have_swallowing_rows,
        _loses_the_denominator,
        _has_swallowing_rows,
    ),
    Fault(  # before torch 2.5
        "rows that may look at no key",
        "torch's fused kernels do not give zeros for rows of the mask that allow no key",
        _has_rows_that_may_lack_keys,
        _is_not_zero_without_keys,
        _has_rows_without_keys,
    ),
    Fault(  # the CPU's kernel before torch 2.5
        "masks that repeat over keys",
        "torch's fused kernels misread masks with one number for all keys",
        _repeats_over_keys,
        _misreads_repetitions,
    ),
    Fault(  # the CPU's kernel before torch 2.5
        "scores rounded to float16",
        "torch's fused kernels round scores to float16",
        _is_float16_on_a_cpu,
        _rounds_scores,
    ),
    Fault(  # they take the maximum, or mask with -inf, before they scale
        "scales that are not positive",
        "torch's fused kernels need a positive scale, got {call.scale:g}",
        _has_no_positive_scale,
        _scales_too_late,
    ),
    Fault(  # the CPU's kernel reads the mask as if it were float64
        "float32 masks of float64 queries",
        "torch's fused kernels misread masks of another float type: "
        "attn_mask is {call.attn_mask.dtype} and query {call.query.dtype}",
        _mixes_float_types,
        _misreads_float32,
    ),
)

_TOKENS, _HEAD_DIM = 64, 64


def _wave(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, step: float = 0.7) -> Tensor:
    """Numbers between -1 and 1 that do not touch anybody's random numbers."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, device=device, dtype=torch.float64) * step).view(shape).to(dtype)


def _inputs(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [_wave((1, 1, _TOKENS, _HEAD_DIM), device, dtype, step) for step in (0.7, 1.3, 1.9)]


def _is_wrong(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float = 0.125,
    is_causal: bool = False,
    with_gradients: bool = False,
) -> bool:
    """Whether torch's function is far from plain attention, in its output or in its gradients."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    own, plain = (
        [t.detach().to(d).requires_grad_(with_gradients) for t in (query, key, value)] for d in (query.dtype, wide)
    )
    results = [torch_sdpa(own[0], own[1], own[2], mask, 0.0, is_causal, scale=scale)]
    scores = plain[0] @ plain[1].mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    expected = [scores.softmax(dim=-1) @ plain[2]]
    if with_gradients:
        weight = _wave(tuple(query.shape), query.device, query.dtype, 2.3)
        results += torch.autograd.grad((results[0] * weight).sum(), own)
        expected += torch.autograd.grad((expected[0] * weight.to(wide)).sum(), plain)
    # A comparison with NaN is false.
    return not all(bool((r.to(wide) - e).norm() <= _WRONG * e.norm()) for r, e in zip(results, expected))
