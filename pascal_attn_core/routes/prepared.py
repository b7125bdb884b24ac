"""Calls of a kind that has been seen: what was found out for the first of them is used again.

A kind is everything that :func:`..call.check_call` and :func:`.run.choose` read of a call, and what they read around
it. Two calls of one kind differ in the numbers in their tensors only, and in where these lie. What such a number
decides is not kept, nor what is found out while a graph is captured or a backward pass runs, where less can be asked. A
choice is kept for some seconds: what changes unnoticed, such as the free memory, is then asked again.

Calls that only torch's function can take need no memory: torch itself is asked, which takes less than a microsecond.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call import FLOATS, PLAIN, AttentionCall, check_call
from ..config import AttentionConfig, RouteUnavailable
from ..fused.launch.plan import FEW_QUERIES, KEYS_STEP, Plan
from ..machine import runtime
from ..machine.device import LONGEST_SUM_ON_MPS, MIB
from ..machine.own_thread import in_backward
from ..machine.runtime import runtime_of
from ..observe import report
from ..patching.interception import torch_sdpa
from .derivatives import Given, RouteFunction, differentiable
from .route import Choice
from .short import MANY_KEYS
from .torch_faults import EMPTY_ROWS_ARE_ZERO, MOST_BLOCKS, TorchAlone, is_torchs_own, reads_values
from .torch_kernel import TorchForm, as_four_dimensions, as_numbers, is_made_numbers, sdp_choice

Kind = tuple[Any, ...]
BY_TORCH: Kind = ()  # the kind of the calls that torch's function takes as they came, whatever else there is
_MOST = 1024  # kinds that are kept, a few KB each
_SECONDS = 10.0
_ALIGNED = 16  # bytes: no kernel reads more at a time
_NUMBERS = (float, int, type(None))  # types of scale and dropout_p that are compared by value
_C = torch._C
_tracing, _transforms, _grad = _C._get_tracing_state, _C._are_functorch_transforms_active, _C.is_grad_enabled
_modes = _C._len_torch_dispatch_stack


def _asked(name: str) -> Callable[[], Any]:
    return getattr(_C, name, tuple)  # () where this torch does not know it


_any_autocast: Any = getattr(_C, "_is_any_autocast_enabled", None) or (
    lambda: torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()
)
# What torch's choice of a kernel reads besides the call.
_flash, _efficient, _math, _cudnn, _other = (
    _asked(f"_get_{name}_sdp_enabled") for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
)
_priority, _deterministic, _has_cudnn = (
    _asked(f"_get_{name}") for name in ("sdp_priority_order", "deterministic_algorithms", "cudnn_enabled")
)


class Prepared(NamedTuple):
    """This tuple holds what was found out for a kind.

    Attributes:
        given: the first call, without its tensors, and its route; None = torch's function on the arguments as they
            came.
        until: the time of the monotonic clock up to which that holds.
    """

    given: Given | None
    until: float


known: dict[Kind, Prepared] = {}


def kind_of(config: AttentionConfig, given: tuple[Any, ...]) -> Kind | None:
    """The kind of a call, before any check of it: BY_TORCH, or a key of :data:`known`; None for a call whose choice is
    not kept. What else may be wrong with a call BY_TORCH torch's function refuses itself. ``given``: the arguments of
    torch's function in its order, enable_gqa the last.

    The dtypes, devices and layouts of key and value are not part of it: torch's function refuses those that are not the
    query's, and :func:`_by_choice` looks at them for other routes.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = given
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN) or _tracing() is not None:
        return None  # torch.jit.trace would warn of every size that is looked at
    if not (is_causal is False or (is_causal is True and attn_mask is None)):
        return None  # 0 == False, but is refused
    if forward_ad._current_level >= 0 or _transforms():
        return None  # derivatives of a higher order
    try:
        q_shape, k_shape, v_shape, dtype = query.shape, key.shape, value.shape, query.dtype
        q_dense, k_dense, v_dense = query.is_contiguous(), key.is_contiguous(), value.is_contiguous()
        is_small = q_shape.numel() * k_shape[-2] * 4 <= config.math_limit_mib * MIB * q_shape[-1]
        is_dense = q_dense and k_dense and v_dense
        if _is_by_torch(config, given, (q_shape, k_shape, v_shape), is_small=is_small, is_dense=is_dense):
            return BY_TORCH
        if not (enable_gqa is False or enable_gqa is True) or config.devices:
            return None
        if not (type(scale) in _NUMBERS and type(dropout_p) in _NUMBERS) or _any_autocast() or _modes():
            return None
        keys: Any = k_shape[-2]
        wants = _grad() and (query.requires_grad, key.requires_grad, value.requires_grad)
        if q_shape[-2] <= FEW_QUERIES and keys >= 4 * KEYS_STEP and attn_mask is None and not (wants and any(wants)):
            if v_shape[-2] != keys or not len(q_shape) == len(k_shape) == len(v_shape) == 4:
                return None
            keys = keys // KEYS_STEP, is_small, k_shape.numel() >= MANY_KEYS
            k_shape, v_shape = (*k_shape[:-2], k_shape[-1]), (*v_shape[:-2], v_shape[-1])
        return (
            q_shape, k_shape, v_shape, keys, dtype, query.device,
            q_dense or query.stride(), k_dense or key.stride(), v_dense or value.stride(),
            attn_mask if attn_mask is None else _kind_of_mask(attn_mask),
            wants,
            dropout_p, is_causal, scale, enable_gqa, config.token, runtime.epoch,
            _flash(), _efficient(), _math(), _cudnn(), _other(), _deterministic(), _has_cudnn(), *_priority(),
        )  # fmt: skip
    except (RuntimeError, IndexError, AttributeError):  # nested and sparse tensors have no such shape or strides
        return None


def _is_by_torch(
    config: AttentionConfig, given: tuple[Any, ...], shapes: tuple[Any, ...], *, is_small: bool, is_dense: bool
) -> bool:
    """Whether torch's function takes these arguments as they came. ``shapes``: of query, key and value; ``is_small``:
    their scores fit the limit of the math route; ``is_dense``: all three are contiguous."""
    (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), (q_shape, k_shape, v_shape) = given, shapes
    if not (
        dropout_p == 0.0
        and len(q_shape) == len(k_shape) == 4
        and k_shape == v_shape
        and k_shape[0] == q_shape[0] <= MOST_BLOCKS
        and k_shape[2]
        and q_shape.numel()
        and query.dtype in FLOATS
        and (scale is None or (type(scale) is float and 0.0 < scale < math.inf))
        and (is_dense or _have_dense_rows(query, key, value))
    ):
        return False
    has_as_many_heads = k_shape[1] == q_shape[1]
    if is_small and config.route == "auto" and has_as_many_heads and k_shape[2] <= LONGEST_SUM_ON_MPS:
        return attn_mask is None or _is_plain_mask(attn_mask)
    if attn_mask is not None or config.route not in ("auto", "torch") or config.devices:
        return False
    alone = runtime_of(query.device).part(TorchAlone)
    if not (alone.answers and (enable_gqa is True or has_as_many_heads)) or (query.dtype, q_shape[3]) in alone.refused:
        return False
    return sdp_choice(query, key, value, None, 0.0, is_causal, scale) in alone.answers


def _have_dense_rows(*tensors: Tensor) -> bool:
    """Whether rows of these tensors, of four dimensions, are contiguous, and neither overlap nor slide by one."""
    for tensor in tensors:
        batch_stride, head_stride, row_stride, last_stride = tensor.stride()
        head_dim = tensor.shape[3]
        if not (last_stride == 1 and row_stride >= head_dim and head_stride >= head_dim and batch_stride != 1):
            return False
    return True


def _is_plain_mask(mask: Any) -> bool:
    """Whether torch reads such a mask as we do in a short call. One on meta it reads as if it had numbers."""
    if type(mask) is not Tensor or mask.dtype is not torch.bool:
        return False
    return mask.dim() > 1 and not mask.is_meta and EMPTY_ROWS_ARE_ZERO


def _kind_of_mask(mask: Tensor) -> tuple:
    if type(mask) not in PLAIN:
        raise AttributeError("a rule has no strides")
    return mask.dtype, mask.device, mask.shape, mask.stride(), mask.requires_grad


def keep(kind: Kind, call: Any, config: AttentionConfig, choice: Choice) -> None:
    """Keep the choice for a call that has run, if it holds for all calls of its kind."""
    query, plan = call.query, choice.plan
    if query.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    if in_backward() or reads_values(call) or not _are_alike(query, call.key, call.value, call.attn_mask):
        return
    has_few = type(kind[3]) is tuple
    if isinstance(plan, Plan):
        if plan.band_rows or (has_few and plan.pieces is not None):
            return
        plan = plan.repeatable()
    elif isinstance(plan, TorchForm) and has_few and not plan.is_one_call and plan.upcast:
        return  # how many heads fit the budget depends on the keys
    if len(known) >= _MOST:
        known.clear()
    as_they_came = isinstance(plan, TorchForm) and plan.is_as_it_came and _is_torchs_shape(call)
    given = Given(call.without_tensors(), config, choice.by, plan, call.out_shape)
    known[kind] = Prepared(None if as_they_came else given, time.monotonic() + _SECONDS)


def _is_torchs_shape(call: AttentionCall) -> bool:
    """Whether torch's function takes the tensors of a call by the kernel that it has promised."""
    came = call.query, call.key, call.value, call.attn_mask
    is_four = all(map(operator.is_, as_four_dimensions(call), came))
    return is_four and (call.groups == 1 or call.enable_gqa) and call.batch_size <= MOST_BLOCKS


def again(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: AttentionConfig,
) -> tuple[Tensor | None, Kind | None]:
    """The output of a call of torch's function, before any check of it, by what was found out for its kind; or None,
    and the kind under which its choice is to be kept, if it may be.

    Raises:
        TypeError, ValueError: torch's function has refused the call, for this reason.
    """
    if report.active or type(config) is not AttentionConfig:
        return None, None
    kind = kind_of(config, (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    if kind is None:
        return None, None
    ready = known.get(kind) if kind else None
    if kind and (ready is None or ready.until < time.monotonic()):
        return None, kind
    try:
        if ready is not None and ready.given is not None:
            return _as_before(ready.given, query, key, value, attn_mask), kind
        if ready is not None and attn_mask is not None and is_made_numbers(attn_mask):
            attn_mask = as_numbers(attn_mask, query.dtype)
        if enable_gqa and query.shape[1] > key.shape[1]:  # torch 2.4 does not know it
            out = torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
        else:
            out = torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        return out if out.grad_fn is None else differentiable(out, config), None
    except RouteUnavailable:  # its plan names the reason from now on
        return None, kind
    except RuntimeError as error:
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        check_call(query, key, value, attn_mask, **options)  # knows the reason better
        if (ready is not None and ready.given is not None) or not is_torchs_own(error):
            raise
        return None, None


def _as_before(given: Given, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor | None:
    """The output of a call by the route that is known for its kind, None where its tensors are none that it takes.

    Raises:
        RouteUnavailable: nothing has been computed.
    """
    if not _are_alike(query, key, value, attn_mask):
        return None
    if given.call.needs_grad and not given.route.is_differentiable:
        return RouteFunction.apply(query, key, value, attn_mask, None, given)[0]
    call = given.call.with_tensors(query, key, value, attn_mask, None)
    if call.seq_len_kv != key.shape[-2]:
        call.seq_len_kv = key.shape[-2]
        call.__dict__.pop("num_scores", None)
    return given.route.forward(call, given.config, given.plan, with_lse=False, for_grad=False, stats=None).out


def _are_alike(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether tensors of one kind fit together, and lie in memory so that every kernel can read them."""
    return (
        query.dtype is key.dtype is value.dtype
        and query.device == key.device == value.device
        and key.layout is value.layout is query.layout is torch.strided
        and not (query.is_neg() or key.is_neg() or value.is_neg() or (attn_mask is not None and attn_mask.is_neg()))
        and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) % _ALIGNED
    )
