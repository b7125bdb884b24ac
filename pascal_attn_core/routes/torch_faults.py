"""Known faults of torch's fused kernels, as data: which calls each concerns, and a small call that shows it.

A call that a fault concerns does not go to torch's function if the installed torch shows the fault. The small call is
made once per process, device, dtype of query and dtype of mask, when the first call needs to know. A torch without the
fault is therefore used again.

A kernel that torch promises for a call and that then raises is not used again in this process for calls of its kind.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, distinct, may_read
from ..call.lazy_mask import LazyMask
from ..config import RouteUnavailable, log_once
from ..machine.out_of_memory import is_out_of_memory
from ..machine.own_thread import in_backward, in_own_thread
from ..machine.runtime import Runtime, begin_epoch, runtime_of
from ..patching.interception import torch_sdpa
from ..reference import reference_sdpa
from ..tiled.layout import worth_looking

log = logging.getLogger("pascal_attn")

# Since torch 2.5 its math attention too gives zeros, not NaN, for a row that may look at no key.
EMPTY_ROWS_ARE_ZERO = hasattr(torch, "_safe_softmax")
# The denominator's logarithm is kept beside the row's maximum in one float32: next to 1000 it has an error of 3e-5.
_SWALLOWS = 1e3
_WRONG = 0.05  # relative error above which a probe has found the fault; NaN counts as well
MOST_BLOCKS = (1 << 16) - 1  # in two of the three dimensions of a CUDA grid: batch elements, heads
TORCHS = "torch's kernel"
_WORSE = 2.0  # times the error of the same call without its fault, above which a probe has found a smaller one


class FaultyKind(NamedTuple):
    """The calls for which torch runs the same kernel, as far as its faults go: device, dtypes of query and mask (that
    of the query where there is none)."""

    device: torch.device
    dtype: torch.dtype
    mask: torch.dtype

    @staticmethod
    def of(call: AttentionCall) -> FaultyKind:
        dtype = call.query.dtype
        return FaultyKind(call.query.device, dtype, dtype if call.attn_mask is None else call.attn_mask.dtype)


@dataclass(frozen=True)
class Fault:
    """One fault of torch's kernels.

    Attributes:
        reason: the sentence for errors and reports; ``{call}`` is the call.
        concerns: whether it could make the result or the gradients of such a call wrong, whatever its tensors hold.
        probe: makes a small call of the kind with torch's function on a device, in the dtypes of query and mask:
            whether it is wrong.
        is_in: whether the values of a call's tensors make it wrong; None = all do. Asked only where torch shows the
            fault; where looking is not possible, or costs more than another route, it is assumed.
    """

    name: str
    reason: str
    concerns: Callable[[AttentionCall], bool]
    probe: Callable[[FaultyKind], bool]
    is_in: Callable[[AttentionCall], bool] | None = None


def fault_reasons(call: AttentionCall, *, read: bool = True) -> list[str]:
    """Why torch's kernels would compute this call wrongly, one sentence per fault. ``read``: the values of its tensors
    may be looked at."""
    return [
        fault.reason.format(call=call)
        for fault in FAULTS
        if fault.concerns(call)
        and is_shown(fault, FaultyKind.of(call))
        and (fault.is_in is None or not (read and may_read(call) and worth_looking(call)) or fault.is_in(call))
    ]


def reads_values(call: AttentionCall) -> bool:
    """Whether the numbers in a call's tensors decide what :func:`fault_reasons` says."""
    return any(
        fault.is_in is not None and fault.concerns(call) and is_shown(fault, FaultyKind.of(call)) for fault in FAULTS
    )


class TorchAlone:
    """The answers of torch, when it is asked for its kernel, after which no other route of a device can win: flash
    attention and cuDNN's on cards of NVIDIA's that have them, any kernel on a CPU.

    Attributes:
        answers: numbers of ``torch.nn.attention.SDPBackend``.
        refused: dtype and head_dim of calls that torch's function has refused, for which they can no longer be relied
            on.
    """

    def __init__(self, runtime: Runtime):
        info = runtime.info
        of_nvidia = (1, 3) if info.kind == "cuda" and (info.capability or (0, 0)) >= (8, 0) else ()
        # Before torch 2.5 the kernels had faults that concern calls without a mask.
        found = (1, 2, 3, 4) if info.kind == "cpu" else of_nvidia
        self.answers = frozenset(found if EMPTY_ROWS_ARE_ZERO else ())
        self.refused: set[tuple[torch.dtype, int]] = set()


class ShownFaults:
    """Which faults the torch that is installed has shown on one device, ``{(name, kind): whether}``, and the errors
    that kernels have raised there for calls they were promised for, by kernel and kind of call."""

    def __init__(self, runtime: Runtime):
        self.found: dict[tuple[str, FaultyKind], bool] = {}
        self.broken_promises: dict[tuple, str] = {}


def is_shown(fault: Fault, kind: FaultyKind) -> bool:
    """Whether the torch that is installed shows a fault. True while that cannot be tried, or there is no memory for
    it; a kernel that raises does not serve either. The probe runs without the caller's modes, transforms, autocast and
    inference settings."""
    found, key = runtime_of(kind.device).part(ShownFaults).found, (fault.name, kind)
    shown = found.get(key)
    if shown is None:
        if kind.device.type == "cuda" and (torch.cuda.is_current_stream_capturing() or in_backward()):
            return True
        try:
            shown = in_own_thread(functools.partial(fault.probe, kind), kind.device)
        except Exception as error:
            if is_out_of_memory(error):
                return True
            shown = True
        found[key] = shown
        log.info("torch %s on %s: %s: %s", torch.__version__, ", ".join(map(str, kind)), fault.name, shown)
    return shown


def broken_promise(call: AttentionCall, kernel: str = TORCHS) -> str:
    """Why a kernel does not take calls of this kind, although it was promised for them; empty = it does."""
    reasons = runtime_of(call.query.device).part(ShownFaults).broken_promises
    return reasons.get(_promise(call, kernel), "") if reasons else ""


def is_torchs_own(error: Exception) -> bool:
    """Whether an error of torch's function says that it does not take such calls. A lack of memory does not, nor does
    what a mode, a hook or a transform around the call may have raised."""
    around = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    around = around or torch.autograd.forward_ad._current_level >= 0
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # older ones cannot tell
    return not (around or (top_hooks is not None and top_hooks(True)) or is_out_of_memory(error))


def unkept(call: AttentionCall, error: Exception, kernel: str = TORCHS) -> RouteUnavailable:
    """Remember what a kernel has raised for a call, until this process ends, with one warning per sentence."""
    reason = f"{kernel} for it raised: {str(error).strip().partition(chr(10))[0]}"
    runtime = runtime_of(call.query.device)
    runtime.part(ShownFaults).broken_promises[_promise(call, kernel)] = reason
    if kernel == TORCHS:
        runtime.part(TorchAlone).refused.add((call.query.dtype, call.head_dim))
    begin_epoch()
    where = call.query.device.type
    log_once(logging.WARNING, "on %s some attention calls go on by other routes in this process: %s", where, reason)
    return RouteUnavailable(reason)


def _promise(call: AttentionCall, kernel: str) -> tuple:
    """Return what may have made a kernel refuse a call: its name, its kind, sizes that no grid of a kernel has, and the
    kernels that are forbidden around it."""
    mask_dtype = None if call.attn_mask is None else call.attn_mask.dtype
    sizes = call.head_dim, call.head_dim_v, call.groups > 1, call.seq_len_q == 1, call.num_heads > MOST_BLOCKS
    allowed = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")]
    return kernel, call.query.dtype, mask_dtype, sizes, *allowed, call.is_causal, call.dropout_p > 0, call.needs_grad


# ---- the faults ----------------------------------------------------------------------------------------------------


def _mask_of(call: AttentionCall) -> Any:
    """The call's mask, if it is a tensor that may hold anything."""
    mask = call.attn_mask
    return None if isinstance(mask, LazyMask) or call.is_empty or call.query.device.type == "meta" else mask


def _has_rows_without_keys(call: AttentionCall) -> bool:
    mask = distinct(_mask_of(call).detach())
    allowed = mask != 0 if mask.dtype == torch.bool else mask != -torch.inf
    return not bool(allowed.any(dim=-1).all())


def _is_not_zero_without_keys(kind: FaultyKind) -> bool:
    leaves = [t.requires_grad_() for t in _inputs(kind)]
    mask = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=kind.device)
    mask[1] = False
    if kind.mask != torch.bool:
        mask = torch.zeros_like(mask, dtype=kind.mask).masked_fill_(~mask, -torch.inf)
    out = torch_sdpa(*leaves, mask)
    grads = torch.autograd.grad(out.sum(), leaves)
    return not (bool((out[..., 1, :] == 0).all()) and all(bool(t.isfinite().all()) for t in (out, *grads)))


def _repeats_over_keys(call: AttentionCall) -> bool:
    mask = _mask_of(call)
    return mask is not None and call.seq_len_kv > 1 and (mask.shape[-1] == 1 or mask.stride(-1) == 0)


def _misreads_repetitions(kind: FaultyKind) -> bool:
    dtype = kind.dtype if kind.mask == torch.bool else kind.mask  # torch adds a bool mask as numbers too
    of_rows = wave((_TOKENS, 1), kind.device, dtype)
    return any(is_wrong(_inputs(kind), mask) for mask in (of_rows, of_rows.expand(-1, _TOKENS)))


def _is_float16_on_a_cpu(call: AttentionCall) -> bool:
    return call.query.dtype == torch.float16 and not call.is_empty and runtime_of(call.query.device).info.kind == "cpu"


def _rounds_scores(kind: FaultyKind) -> bool:
    query, key, value = _inputs(kind)
    return is_wrong((query * 100, key * 100, value), None)


def _has_swallowing_rows(call: AttentionCall) -> bool:
    """Some row's largest value is so large, of either sign, that the denominator's logarithm is lost beside it."""
    top = distinct(_mask_of(call).detach()).amax(dim=-1).abs()
    return bool(((top > _SWALLOWS) & (top != torch.inf)).any())


def _loses_the_denominator(kind: FaultyKind) -> bool:
    """The largest number of float16 costs the logarithm a few digits only, so the gradients are also compared with
    those under a mask of zeros."""
    inputs, mask = _inputs(kind), torch.zeros(_TOKENS, _TOKENS, dtype=kind.mask, device=kind.device)
    usual = _errors(inputs, mask, gradients=True)
    mask[:8] = torch.finfo(kind.mask).min
    found = _errors(inputs, mask, gradients=True)
    return not all(error <= _WRONG and error <= _WORSE * max(before, 1e-6) for error, before in zip(found, usual))


def _scales_too_late(kind: FaultyKind) -> bool:
    query, key, value = _inputs(kind)
    keep = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=kind.device).tril_()
    return any(
        is_wrong((query * size, key * size, value), mask, scale=scale, is_causal=causal)
        for size, scale in ((1.0, 0.0), (1.0, -0.5), (16.0, -0.5))
        for mask, causal in ((None, False), (None, True), (keep, False))
    )


def _misreads_float32(kind: FaultyKind) -> bool:
    twice = wave((2 * _TOKENS, _TOKENS), kind.device, kind.mask)  # as float64 torch reads on behind the mask
    return is_wrong(_inputs(kind), twice[:_TOKENS])


FAULTS = (
    Fault(
        "float masks that fill rows with large numbers",
        "the gradients of torch's fused kernels are wrong where a row of a float mask holds very large numbers only",
        lambda call: call.needs_grad and (mask := _mask_of(call)) is not None and mask.dtype != torch.bool,
        _loses_the_denominator,
        _has_swallowing_rows,
    ),
    Fault(  # before torch 2.5
        "rows that may look at no key",
        "torch's fused kernels do not give zeros for rows of the mask that allow no key",
        lambda call: _mask_of(call) is not None,
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
        lambda call: call.scale <= 0,
        _scales_too_late,
    ),
    Fault(  # the CPU's kernel reads the mask as if it were float64
        "float32 masks of float64 queries",
        "torch's fused kernels misread masks of another float type: "
        "attn_mask is {call.attn_mask.dtype} and query {call.query.dtype}",
        lambda call: call.query.dtype == torch.float64 and FaultyKind.of(call).mask == torch.float32,
        _misreads_float32,
    ),
)

_TOKENS, _HEAD_DIM = 64, 64


def wave(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, step: float = 0.7) -> Tensor:
    """Numbers between -1 and 1 that leave every random generator as it was."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * step).view(shape).to(dtype).to(device)


def _inputs(kind: FaultyKind) -> tuple[Tensor, Tensor, Tensor]:
    shape = (1, 1, _TOKENS, _HEAD_DIM)
    query, key, value = (wave(shape, kind.device, kind.dtype, step) for step in (0.7, 1.3, 1.9))
    return query, key, value


def is_wrong(inputs: Sequence[Tensor], mask: Tensor | None, **options: Any) -> bool:
    """Whether torch's function, or the one given as ``by``, is far from plain attention."""
    return not all(error <= _WRONG for error in _errors(inputs, mask, **options))  # NaN is not


def _errors(
    inputs: Sequence[Tensor],
    mask: Tensor | None,
    scale: float = 0.125,
    is_causal: bool = False,
    gradients: bool = False,
    by: Callable[..., Tensor] = torch_sdpa,
) -> list[float]:
    """How far torch's function, or one with its arguments, is from plain attention, relative to the size of its output
    and of each gradient."""
    query = inputs[0]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    own, plain = ([t.detach().to(d).requires_grad_(gradients) for t in inputs] for d in (query.dtype, wide))
    results = [by(own[0], own[1], own[2], mask, 0.0, is_causal, scale=scale)]
    added = mask if mask is None or mask.dtype == torch.bool else mask.to(wide)
    expected = [reference_sdpa(plain[0], plain[1], plain[2], added, is_causal, scale, enable_gqa=True)[0]]
    if gradients:
        weight = wave(tuple(query.shape), query.device, query.dtype, 2.3)
        results += torch.autograd.grad((results[0] * weight).sum(), own)
        expected += torch.autograd.grad((expected[0] * weight.to(wide)).sum(), plain)
    pairs = [(r.detach().to(wide), e.detach()) for r, e in zip(results, expected)]
    return [float((r - e).norm() / e.norm()) for r, e in pairs]
