"""Which route a call takes, and why: ``why_not`` and ``choose``.

Nothing is chosen silently: the sentences that decide here are the ones in errors, in the log and in reports.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import PLAIN
from ..call import FLOATS, AttentionCall
from ..config import OPT_IN_ROUTES, ROUTES, AttentionConfig, UnsupportedAttention
from ..device import MIB, device_info
from ..lazy_mask import LazyMask
from ..tiled.layout import rows_overlap
from . import fused
from .timing import fused_over_torch
from .torch_faults import fault_reasons
from .torch_kernel import TorchForm, find_form, fused_takes

log = logging.getLogger("pascal_attn")

# A single query: from so many elements of K on, reading K once for a group outweighs the tiles' fixed cost.
_DECODE_ELEMENTS = 1 << 21

# Up to so many threads the tiled route keeps pace with torch's kernel, which spreads heads over threads.
_TILED_THREADS = 4


# Since torch 2.5 its math attention too gives zeros, not NaN, for a row that may look at no key.
_EMPTY_ROWS_ARE_ZERO = hasattr(torch, "_safe_softmax")


@dataclass(frozen=True, eq=False)
class Choice:
    """A route, the sentence that says why, and how torch's kernel is called if it is that one.

    Attributes:
        as_it_is: torch's function gets the call as it is, and ``form`` is None.
        over_torch: this route's time in units of that of torch's kernel, where both were timed on this card.
        torch_stores: whether torch's own function would store the score matrix of the call, having no fused kernel that
            takes it as it is; None where nobody asked.
    """

    route: str
    why: str
    form: TorchForm | None = None
    as_it_is: bool = False
    over_torch: float | None = None
    torch_stores: bool | None = None


def why_not(route: str, call: AttentionCall, config: AttentionConfig, *, with_lse: bool = False) -> list[str]:
    """Why a route cannot take a call, one sentence each; an empty list = it can."""
    if route == "tiled":
        return _why_not_tiled()
    if route == "torch":
        form = find_form(call, _budget(call, config), with_lse=with_lse)
        return form if isinstance(form, list) else []
    if route == "math":
        return _why_not_math(call, config, with_lse)
    if route in ("fused", "fused-int8"):
        return fused.why_not(call, config, int8=route == "fused-int8", with_lse=with_lse)
    raise ValueError(f"route must be one of {[*ROUTES, *OPT_IN_ROUTES]}, got {route!r}")


def choose(call: AttentionCall, config: AttentionConfig, *, with_lse: bool = False) -> Choice:
    """The route for a call.

    Raises:
        UnsupportedAttention: the config names a route that cannot take it.
    """
    if config.route != "auto":
        return _by_name(config.route, call, config, with_lse)
    if not with_lse and is_short(call, config):
        return _short(call, config)
    if _tiled_is_faster(call):
        return Choice("tiled", "measured faster than torch's kernel for this kind of call on a CPU")
    form = find_form(call, _budget(call, config), with_lse=with_lse)
    kernel = _choose_kernel(call, config, form)
    if kernel is not None:
        return kernel
    assert isinstance(form, list)
    if not _why_not_math(call, config, with_lse):
        return Choice("math", f"the score matrix is below {config.math_limit_mib:g} MiB")
    against = _why_not_tiled()
    if against:
        raise UnsupportedAttention("auto", [*form, *against])
    if not with_lse:
        _warn_once(call.query.device.type, form[0])
    return Choice("tiled", form[0], torch_stores=True)


def _short(call: AttentionCall, config: AttentionConfig) -> Choice:
    """A call of which only the route's name is open: which kernel torch's function will take."""
    assert not isinstance(call.attn_mask, LazyMask)
    is_fused = fused_takes(call, call.query, call.key, call.value, call.attn_mask)
    why = f"the score matrix is below {config.math_limit_mib:g} MiB: torch's function as it is"
    return Choice("torch" if is_fused else "math", why, as_it_is=True, torch_stores=not is_fused)


def _choose_kernel(call: AttentionCall, config: AttentionConfig, form: TorchForm | list[str]) -> Choice | None:
    """Our fused kernel or torch's, which has said in ``form`` how it takes the call; None = neither."""
    has_form, words = isinstance(form, TorchForm), []
    is_candidate = fused.takes_device(call.query.device) and fused.may_win(call, torch_has_a_kernel=has_form)
    if is_candidate and not fused.why_not(call, config):
        if not isinstance(form, TorchForm):
            return Choice("fused", form[0], torch_stores=True)
        ratio = fused_over_torch(call, _budget(call, config))
        stores = _torch_stores(form)
        if ratio is None and not form.is_one_call:
            why = f"torch has no fused kernel that takes it as it is ({form.words()})"
            return Choice("fused", why, torch_stores=stores)
        if ratio is not None and ratio < 1:
            why = f"timed on this card at {ratio:.2f} of the time of torch's kernel"
            return Choice("fused", why, over_torch=ratio, torch_stores=stores)
        words = [] if ratio is None else [f"ours was timed on this card at {ratio:.2f} of its time"]
    if not isinstance(form, TorchForm):
        return None
    said = "; ".join(filter(None, [form.words(), *words]))
    why = "torch has a fused kernel for it" + (f" ({said})" if said else "")
    return Choice("torch", why, form, torch_stores=_torch_stores(form))


def _torch_stores(form: TorchForm) -> bool | None:
    """Whether torch's function, given the call as it came, would compute by its math attention. Where only a mask is
    too large that is not known."""
    return True if form.fold or form.upcast else None if form.q_step else False


def _by_name(route: str, call: AttentionCall, config: AttentionConfig, with_lse: bool) -> Choice:
    form = find_form(call, _budget(call, config), with_lse=with_lse) if route == "torch" else None
    reasons = form if isinstance(form, list) else [] if form else why_not(route, call, config, with_lse=with_lse)
    if reasons:
        raise UnsupportedAttention(route, reasons)
    return Choice(route, "asked for by name", form if isinstance(form, TorchForm) else None)


def _budget(call: AttentionCall, config: AttentionConfig) -> int:
    if config.budget_mib is None:
        return device_info(call.query.device).default_budget_bytes()
    return int(config.budget_mib * MIB)


def _why_not_tiled() -> list[str]:
    if torch._C._are_functorch_transforms_active():
        return ["transforms of torch.func (grad, vmap, ...) are active: use torch.autograd, or a larger math_limit_mib"]
    return []


def _why_not_math(call: AttentionCall, config: AttentionConfig, with_lse: bool) -> list[str]:
    reasons = []
    score_mib = call.num_scores * max(4, call.query.element_size()) / MIB
    if score_mib > config.math_limit_mib:
        reasons.append(f"its score matrix of {score_mib:.1f} MiB is above math_limit_mib {config.math_limit_mib:g}")
    if with_lse:
        reasons.append("torch's function does not return lse")
    if call.is_empty:
        reasons.append("the call is empty")
    return reasons


def _tiled_is_faster(call: AttentionCall) -> bool:
    """Kinds of calls for which ``pascal-attn bench`` shows the tiled route ahead of torch's fused CPU kernel."""
    if call.query.device.type != "cpu" or torch.get_num_threads() > _TILED_THREADS or _why_not_tiled():
        return False
    rows, keys, mask = call.groups * call.seq_len_q, call.seq_len_kv, call.attn_mask
    if call.softcap is not None or call.sinks is not None or isinstance(mask, LazyMask):
        return False  # torch has no kernel for it at all
    if mask is not None:
        if mask.dtype != torch.bool and mask.dim() > 1 and mask.shape[-2] > 1:
            return False
        return rows >= 128 and keys >= 256 and not call.needs_grad
    if call.query.dtype != torch.float32 and call.needs_grad:
        return False  # torch's kernel multiplies in 16 bits there
    if call.seq_len_q == 1:
        elements = call.batch_size * call.num_kv_heads * keys * call.head_dim
        return call.groups > 1 and keys >= 1024 and elements >= _DECODE_ELEMENTS and not call.needs_grad
    return rows >= 1024 and (keys <= 128 or (call.plain_causal and keys >= 1024))


def is_short(call: AttentionCall, config: AttentionConfig) -> bool:
    """A call whose score matrix is below the limit, and which torch's function takes as it is with our meaning: it may
    do with it as it likes. Decided in a few comparisons, since such a call takes microseconds."""
    if call.num_scores * 4 > config.math_limit_mib * MIB or config.route != "auto" or call.query.dim() != 4:
        return False
    if call.left is not None or (call.right is not None and not call.plain_causal) or call.scale <= 0:
        return False
    mask = call.attn_mask
    if call.softcap is not None or call.sinks is not None or isinstance(mask, LazyMask):
        return False
    if mask is not None and (
        call.is_causal or mask.dim() < 2 or mask.dtype not in (torch.bool, call.query.dtype) or not _EMPTY_ROWS_ARE_ZERO
    ):
        return False
    query, key, value = call.query, call.key, call.value
    if mask is not None and query.shape[:2] != (*call.batch, call.num_heads):
        return False  # torch's math adds it in place to scores that may lack the dimensions of value
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()) and (
        rows_overlap(query) or rows_overlap(key) or rows_overlap(value)
    ):
        return False
    if mask is not None and call.needs_grad and mask.dtype != torch.bool and fault_reasons(call):
        return False
    if call.groups > 1:
        if not fused_takes(call, query, key, value, mask):
            return False  # torch's math would expand K and V
        if call.seq_len_q == 1 and _tiled_is_faster(call):
            return False
    return not call.is_empty


def is_plainly_short(
    config: AttentionConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether the arguments, before any check of them, are those of one of the commonest calls that :func:`is_short`
    accepts. What else may be wrong with them torch's function refuses itself: it never gives them another meaning.

    It is all that a short call pays for having come here, so it reads each attribute once.
    """
    if config.route != "auto" or not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        return False
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace would warn of every size that is looked at
        return False
    if dropout_p != 0.0 or (scale is not None and not (type(scale) is float and 0.0 < scale < math.inf)):
        return False
    try:
        q_shape, k_shape = query.shape, key.shape
        if len(q_shape) != 4 or k_shape != value.shape or query.dtype not in FLOATS:
            return False
        batch, heads, seq_len_q, head_dim = q_shape
        if k_shape[0] != batch or k_shape[1] != heads or not head_dim:
            return False
        if not 0 < batch * heads * seq_len_q * k_shape[2] * 4 <= config.math_limit_mib * MIB:
            return False
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            for tensor in (query, key, value):
                _, head_stride, row_stride, last_stride = tensor.stride()
                if last_stride != 1 or row_stride < head_dim or head_stride < head_dim:
                    return False
        if is_causal is not False and (is_causal is not True or attn_mask is not None):
            return False
        if attn_mask is not None:
            is_bool = type(attn_mask) is Tensor and attn_mask.dtype is torch.bool
            return is_bool and attn_mask.dim() > 1 and _EMPTY_ROWS_ARE_ZERO
    except RuntimeError:  # nested and sparse tensors have no such shape or strides
        return False
    return True


@functools.lru_cache(maxsize=256)
def _warn_once(device_type: str, reason: str) -> None:
    # Without a fused kernel to hope for there is nothing to warn of.
    level = logging.INFO if device_type == "cpu" else logging.WARNING
    log.log(level, "on %s some attention calls run in tiles of plain PyTorch: %s", device_type, reason)
