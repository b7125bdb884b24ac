"""One attention call: its arguments checked once, in the words of ``scaled_dot_product_attention``.

Shape legend: ``*batch`` any leading dimensions, Hq query heads, Hkv key/value heads, G = Hq / Hkv groups,
L query tokens, S key tokens, D head_dim, Dv head_dim_v.
"""

from __future__ import annotations

import math
import operator
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .flex_rules import WINDOW, ScoreRule, block_rule, is_block_mask, known_of
from .lazy_mask import LazyMask

ALIGNMENTS = ("upper_left", "lower_right")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter)  # types of tensors without behaviour of their own
_LONGEST_WINDOW = 2**62  # so that sums with it fit into 64 bits


class Arguments(NamedTuple):
    """The arguments of one call, as :func:`pascal_attn_core.sdpa` takes them. The first eight are those of torch's
    function, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    alignment: str = "upper_left"
    window: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def keywords(self) -> dict[str, Any]:
        """The arguments by name, without those that have their default: torch 2.4 does not know ``enable_gqa``."""
        defaults = self._field_defaults
        given = zip(self._fields, self)
        return {name: value for name, value in given if name not in defaults or value is not defaults[name]}

    def changed(self, **changes: Any) -> Arguments:
        """These arguments, some of them replaced. The compiler of torch 2.4 cannot trace ``_replace``."""
        return Arguments(*[changes.get(name, value) for name, value in zip(Arguments._fields, self)])


class AttentionOutput(NamedTuple):
    """out ``[*batch, Hq, L, Dv]``; lse ``[*batch, Hq, L]``, natural logarithm, -inf for a row without keys."""

    out: Tensor
    lse: Tensor


class Results(NamedTuple):
    """The results of a forward pass, as far as the gradients need them besides the inputs.

    out: ``[*batch, Hq, L, Dv]`` in the dtype of the query.
    lse: ``[*batch, Hq, L]`` in the dtype of the sums, or None.
    log_sum: lse - row_max, kept apart for gradients under a float mask: a bias of -finfo.max would swallow it in lse.
    seed: int64 ``[1]``, from which dropout is drawn.
    """

    out: Tensor
    lse: Tensor | None = None
    log_sum: Tensor | None = None
    seed: Tensor | None = None


class Wanted(NamedTuple):
    """The gradients of a call's results, and which others to compute than those of query, key and value.

    grad_out: ``[*batch, Hq, L, Dv]``, or what expands to it; grad_lse: ``[*batch, Hq, L]``, or None for zeros.
    mask, sinks: the gradient of attn_mask, of the sinks.
    """

    grad_out: Tensor
    grad_lse: Tensor | None = None
    mask: bool = False
    sinks: bool = False


class Gradients(NamedTuple):
    """Gradients in the shapes of the inputs; those of attn_mask and sinks where they were wanted. ``captured``: those
    of the tensors that the score rule reads, in a sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None
    captured: Any = ()


@dataclass
class TiledStats:
    """Counts of calls that have run.

    Attributes:
        blocks, bounded_blocks: query blocks that the route ``tiled`` worked on, and how many of them needed no running
            row maximum because their scores are provably bounded.
        budget_halvings: how often a call ran out of memory and was retried with half the budget.
        devices: key/value heads that each device computed, where several shared a call.
        remarks: reasons why a device did not compute its part, and how often each occurred.
        count: number of calls, where those of several are added.
    """

    blocks: int = 0
    bounded_blocks: int = 0
    budget_halvings: int = 0
    devices: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def add(self, other: TiledStats) -> None:
        """Add what a call, or a part of the same call, has counted."""
        self.blocks += other.blocks
        self.bounded_blocks += other.bounded_blocks
        self.budget_halvings += other.budget_halvings
        for sums, more in ((self.devices, other.devices), (self.remarks, other.remarks)):
            for name, number in more.items():
                sums[name] = sums.get(name, 0) + number


@dataclass(eq=False)
class AttentionCall:
    """The arguments of one call after :func:`check_call`; every field is final.

    Attributes:
        query: ``[*batch, Hq, L, D]`` (or ``[L, D]``), key ``[*batch, Hkv, S, D]``, value ``[*batch, Hkv, S, Dv]``;
            leading dimensions broadcast.
        attn_mask: None, or a bool (True = takes part) or float (added to the scores) tensor that broadcasts to
            ``[*batch, Hq, L, S]``.
        batch: the broadcast leading dimensions without the heads.
        scale: the factor of the scores.
        softcap: scores become softcap * tanh(scores / softcap) before the mask; None = off.
        sinks: ``[Hq]``, a further score per head that takes part in the softmax's denominator only; None = off.
        left, right: query i sees the keys ``i + offset - left ... i + offset + right``; None = no bound on that side.
        offset: 0 for the upper-left alignment, S - L for the lower-right one.
        score_rule: what FlexAttention's ``score_mod`` makes of the scores, before the mask; None = off.
        needs_grad, needs_mask_grad: gradients will be wanted, that of attn_mask among them.
        order: of the derivatives that may be wanted while it runs, 1 = gradients; see :func:`order_of_transforms`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | LazyMask | None
    batch: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    dropout_p: float
    is_causal: bool
    left: int | None
    right: int | None
    offset: int
    needs_grad: bool
    enable_gqa: bool
    softcap: float | None = None
    sinks: Tensor | None = None
    needs_mask_grad: bool = False
    score_rule: ScoreRule | None = None
    order: int = 1

    @cached_property
    def sums_dtype(self) -> torch.dtype:
        """Dtype of scores, row statistics and sums."""
        return accumulate_dtype(self.query.dtype)

    @cached_property
    def groups(self) -> int:
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @cached_property
    def batch_size(self) -> int:
        return math.prod(self.batch)

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        heads = () if self.query.dim() == 2 else (self.num_heads,)
        return (*self.batch, *heads, self.seq_len_q, self.head_dim_v)

    @cached_property
    def is_empty(self) -> bool:
        """No output element, or no key to look at: the output is all zeros."""
        return 0 in self.out_shape or self.seq_len_kv == 0

    @cached_property
    def num_scores(self) -> int:
        """Elements of the score matrix that is never stored."""
        return self.batch_size * self.num_heads * self.seq_len_q * self.seq_len_kv

    @cached_property
    def has_bias(self) -> bool:
        """Whether anything is added to the products of query and key: by a float mask, or by a score rule."""
        return self.score_rule is not None or (self.attn_mask is not None and self.attn_mask.dtype != torch.bool)

    @cached_property
    def has_band(self) -> bool:
        """Whether ``is_causal`` or a window bounds the keys of a query."""
        return self.left is not None or self.right is not None

    def without_tensors(self) -> AttentionCall:
        """The sizes alone, to be kept while the tensors are saved elsewhere."""
        return self.with_tensors(None, None, None, None)  # type: ignore[arg-type]

    def with_tensors(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | LazyMask | None,
        sinks: Tensor | None = None,
    ) -> AttentionCall:
        other = object.__new__(AttentionCall)
        other.__dict__ |= self.__dict__  # much faster than dataclasses.replace, and what is cached comes along
        other.__dict__ |= {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks}
        other.__dict__.pop("has_bias", None)  # of a call without tensors it says nothing
        return other


def check_call(*given: Any, **by_name: Any) -> AttentionCall:
    """Check the arguments of a call, and work out its sizes. Negated views (of the imaginary part of a conjugate, say)
    become tensors of their own: kernels read the memory as it lies, and torch's ``copy_`` from float16 to float32
    forgets the sign.

    Args:
        given, by_name: an :class:`Arguments`, or what one is made of.
    Raises:
        TypeError: an argument of the wrong kind, or tensors of different or unsupported dtypes.
        ValueError: shapes, devices or numbers that do not fit; the message holds what came.
    """
    arguments = given[0] if len(given) == 1 else Arguments(*given, **by_name)
    query, key, value, attn_mask = arguments[:4]
    _check_tensors(query, key, value)
    sizes = _sizes(query.shape, key.shape, value.shape, arguments.enable_gqa)
    rules = _checked_options(arguments, sizes)
    if attn_mask is not None:
        heads = () if query.dim() == 2 else (sizes["num_heads"],)
        attn_mask = _checked_mask(attn_mask, query, (*sizes["batch"], *heads, query.shape[-2], sizes["seq_len_kv"]))
    wants = _wanted_gradients(query, key, value, attn_mask, arguments.sinks)
    if query.is_neg() or key.is_neg() or value.is_neg() or (isinstance(attn_mask, Tensor) and attn_mask.is_neg()):
        query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
        if isinstance(attn_mask, Tensor) and attn_mask.is_neg():
            attn_mask = distinct(attn_mask).resolve_neg().expand(attn_mask.shape)
    return AttentionCall(query=query, key=key, value=value, attn_mask=attn_mask, **sizes, **rules, **wants)


def _sizes(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, enable_gqa: bool) -> dict[str, Any]:
    """The sizes of a call, as fields of :class:`AttentionCall`."""
    head_dim, seq_len_kv = k_shape[-1], k_shape[-2]
    if q_shape[-1] != head_dim:
        raise ValueError(f"head_dim of query and key must be equal, got {q_shape[-1]} and {head_dim}")
    if v_shape[-2] != seq_len_kv:
        raise ValueError(f"key and value must have the same number of tokens, got {seq_len_kv} and {v_shape[-2]}")
    if (
        len(q_shape) == len(k_shape) == len(v_shape) == 4
        and q_shape[0] == k_shape[0] == v_shape[0]
        and q_shape[1] == k_shape[1] == v_shape[1]
    ):
        batch: tuple[int, ...] = (q_shape[0],)
        num_heads = num_kv_heads = q_shape[1]
    else:
        batch, num_heads, num_kv_heads = _broadcast_heads(q_shape, k_shape, v_shape, enable_gqa)
    return {
        "batch": batch,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "seq_len_q": q_shape[-2],
        "seq_len_kv": seq_len_kv,
        "head_dim": head_dim,
        "head_dim_v": v_shape[-1],
        "enable_gqa": enable_gqa,
    }


def _checked_options(given: Arguments, sizes: dict[str, Any]) -> dict[str, Any]:
    """The arguments besides the tensors and the mask, as fields of :class:`AttentionCall`."""
    query, _, _, _, dropout_p, is_causal, scale, _, alignment, window, softcap, sinks = given
    if scale is None:
        head_dim = sizes["head_dim"]
        scale = head_dim**-0.5 if head_dim else 1.0
    else:
        scale = _number("scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {given.scale}")
    if dropout_p:
        dropout_p = _number("dropout_p", dropout_p)
        if not 0.0 <= dropout_p <= 1.0:
            raise ValueError(f"dropout_p must be from 0 to 1, got {dropout_p}")
    if is_causal is not False and is_causal is not True:
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    left, right, offset = None, 0 if is_causal else None, 0
    if alignment != "upper_left" or window is not None:
        left, right, offset = _band(is_causal, alignment, window, sizes["seq_len_q"], sizes["seq_len_kv"])
    if softcap is not None:
        softcap = _number("softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap must be greater than 0 and finite, or None, got {softcap}")
    if sinks is not None:
        _check_sinks(sinks, query, sizes["num_heads"])
    return {
        "scale": scale,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "left": left,
        "right": right,
        "offset": offset,
        "softcap": softcap,
        "sinks": sinks,
    }


def _wanted_gradients(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | LazyMask | None, sinks: Tensor | None
) -> dict[str, Any]:
    """Whether gradients will be wanted, as fields of :class:`AttentionCall`."""
    order = max(1, order_of_transforms())
    if order > 1 and not torch._C._are_functorch_transforms_active():
        given = (t for t in (query, key, value, attn_mask, sinks) if isinstance(t, Tensor))
        order = 2 if any(forward_ad.unpack_dual(t).tangent is not None for t in given) else 1
    if not torch.is_grad_enabled():
        return {"needs_grad": False, "needs_mask_grad": False, "order": order}
    of_mask = attn_mask is not None and attn_mask.requires_grad
    of_inputs = query.requires_grad or key.requires_grad or value.requires_grad
    return {
        "order": order,
        "needs_grad": of_mask or of_inputs or (sinks is not None and sinks.requires_grad),
        "needs_mask_grad": of_mask,
    }


def order_of_transforms() -> int:
    """The highest derivatives that may be asked of a call made here while it runs: 0 = none, 1 = gradients or vmap of
    ``torch.func``, 2 = tangents, or gradients of gradients, 3 = more of either."""
    if not torch._C._are_functorch_transforms_active():
        return 2 if forward_ad._current_level >= 0 else 0
    kinds = [str(each.key()).rpartition(".")[2] for each in torch._C._functorch.get_interpreter_stack() or ()]
    tangents = max(kinds.count("Jvp"), int(forward_ad._current_level >= 0))
    if tangents:
        return 3 if tangents + kinds.count("Grad") > 2 or tangents > 1 else 2
    return max(1, min(3, kinds.count("Grad")))


# As torch.compiler.assume_constant_result does, which would import the compiler: older ones cannot trace that function.
# A graph is guarded by the transforms around it.
order_of_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _number(name: str, value: Any) -> float:
    """An option as a number. A tensor that wants a gradient is refused, as torch does: it would get none."""
    if isinstance(value, Tensor) and value.requires_grad:
        hint = "; multiply the query by a learnable scale and pass scale=1.0" if name == "scale" else ""
        raise TypeError(f"{name} must be a number, got a tensor that requires a gradient: none is computed{hint}")
    try:
        if not isinstance(value, (str, bytes)):  # float() would read them
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} must be a number, got {value!r}")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    try:
        dtype, device = query.dtype, query.device
        same = dtype == key.dtype == value.dtype and device == key.device == value.device
        deep_enough = query.dim() > 1 and key.dim() > 1 and value.dim() > 1
    except AttributeError:
        kinds = ", ".join(type(t).__name__ for t in (query, key, value))
        raise TypeError(f"query, key and value must be tensors, got {kinds}") from None
    if (
        query.is_nested or key.is_nested or value.is_nested
        or not (query.layout == key.layout == value.layout == torch.strided)
    ):  # fmt: skip
        raise TypeError("query, key and value must be dense tensors, got a nested or sparse one")
    if not same:
        if device != key.device or device != value.device:
            raise ValueError(
                f"query, key and value must be on one device, got {device}, {key.device} and {value.device}"
            )
        raise TypeError(f"query, key and value must have one dtype, got {dtype}, {key.dtype} and {value.dtype}")
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be one of {_names(FLOATS)}, got {dtype}")
    if not deep_enough:
        raise ValueError(
            "query, key and value must have at least 2 dimensions ([..., tokens, head_dim]), got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )


def _broadcast_heads(
    q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, enable_gqa: bool
) -> tuple[tuple[int, ...], int, int]:
    """(batch, Hq, Hkv) of shapes that are not plainly equal."""
    shapes = f"got query {tuple(q_shape)}, key {tuple(k_shape)} and value {tuple(v_shape)}"
    q_heads, k_heads, v_heads = ((s[-3] if len(s) > 2 else 1) for s in (q_shape, k_shape, v_shape))
    batch = tuple(q_shape[:-3])
    if not batch == k_shape[:-3] == v_shape[:-3]:
        try:
            batch = tuple(torch.broadcast_shapes(batch, k_shape[:-3], v_shape[:-3]))
        except RuntimeError:
            raise ValueError(f"leading dimensions must broadcast, {shapes}") from None
    if len(q_shape) == 2 and (len(k_shape) > 2 or len(v_shape) > 2):
        raise ValueError(f"a query without heads needs key and value without heads, {shapes}")
    if enable_gqa:
        if k_heads != v_heads:
            raise ValueError(f"with enable_gqa key and value must have the same number of heads, {shapes}")
        if q_heads % k_heads if k_heads else q_heads:
            raise ValueError(
                f"the number of query heads must be a multiple of (divisible by) the key/value heads, {shapes}"
            )
        return batch, q_heads, k_heads
    heads = max(q_heads, k_heads, v_heads) if 0 not in (q_heads, k_heads, v_heads) else 0
    if any(h not in (1, heads) for h in (q_heads, k_heads, v_heads)):
        hint = "" if k_heads == 0 or q_heads % k_heads else "; pass enable_gqa=True for grouped heads"
        raise ValueError(f"the numbers of heads must broadcast, {shapes}{hint}")
    # One key/value head for every query head is the extreme of grouping: nothing has to be expanded for it.
    return batch, heads, 1 if k_heads == v_heads == 1 and heads else heads


def _band(
    is_causal: bool, alignment: str, window: tuple[int, int] | None, seq_len_q: int, seq_len_kv: int
) -> tuple[int | None, int | None, int]:
    """(left, right, offset): query i sees keys from i + offset - left to i + offset + right."""
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment must be one of {list(ALIGNMENTS)}, got {alignment!r}")
    offset = seq_len_kv - seq_len_q if alignment == "lower_right" else 0
    left = right = None
    if window is not None:
        try:
            left, right = (None if side is None or side == -1 else operator.index(side) for side in window)
        except (TypeError, ValueError):
            raise TypeError(f"window must be two whole numbers (left, right), got {window!r}") from None
        for side in (left, right):
            if side is not None and side < 0:
                raise ValueError(f"window sides must be at least 0, or -1 for no bound, got {window}")
        left, right = (None if side is None else min(side, _LONGEST_WINDOW) for side in (left, right))
    if is_causal:
        right = 0
    return left, right, offset


def _check_sinks(sinks: Tensor, query: Tensor, num_heads: int) -> None:
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise TypeError(f"sinks must be a float tensor or None, got {getattr(sinks, 'dtype', type(sinks).__name__)}")
    if sinks.shape != (num_heads,) or sinks.device != query.device:
        raise ValueError(f"sinks must be [{num_heads}] on {query.device}, got {list(sinks.shape)} on {sinks.device}")


def _checked_mask(attn_mask: Any, query: Tensor, full: tuple[int, ...]) -> Tensor | LazyMask:
    if is_block_mask(attn_mask):
        attn_mask = block_rule(attn_mask, full)
    if not isinstance(attn_mask, (Tensor, LazyMask)):
        raise TypeError(f"attn_mask must be a tensor or None, got {type(attn_mask).__name__}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATS:
        raise TypeError(f"attn_mask must be bool or one of {_names(FLOATS)}, got {attn_mask.dtype}")
    if isinstance(attn_mask, Tensor) and (attn_mask.is_nested or attn_mask.layout != torch.strided):
        raise TypeError("attn_mask must be a dense tensor, got a nested or sparse one")
    if attn_mask.device != query.device:
        # A rule has no memory: "cuda" means the query's.
        if isinstance(attn_mask, Tensor) or attn_mask.device != torch.device(query.device.type):
            raise ValueError(f"attn_mask must be on the device of query ({query.device}), got {attn_mask.device}")
        attn_mask = attn_mask.on(query.device)
    shape = attn_mask.shape
    if len(shape) > len(full) or any(m not in (1, f) for m, f in zip(reversed(shape), reversed(full))):
        raise ValueError(f"attn_mask must broadcast to {full}, got {tuple(shape)}")
    return attn_mask


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return "[" + ", ".join(str(d).removeprefix("torch.") for d in dtypes) + "]"


# ---- what torch does to the arguments of its attention first: its causal bias objects, and autocast -----------------


def prepared(given: Arguments) -> Arguments:
    """The arguments as :func:`check_call` takes them."""
    query, attn_mask = given.query, given.attn_mask
    if isinstance(attn_mask, Tensor) and type(attn_mask) in PLAIN:
        if not attn_mask.dim():
            given = given.changed(attn_mask=attn_mask[None])
    elif attn_mask is not None and all(isinstance(t, Tensor) and t.dim() > 1 for t in (query, given.key)):
        if isinstance(attn_mask, Tensor):
            given = _unwrap_causal_bias(given)
        elif is_block_mask(attn_mask):
            given = _as_window(given)
    if isinstance(query, Tensor) and autocast_on(query):
        dtype = torch.get_autocast_dtype(query.device.type)
        given = given.changed(**{name: _cast(each, dtype) for name, each in zip(Arguments._fields, given[:4])})
    return given


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """Autocast of one argument: float tensors except float64. What is no tensor is left for the check to refuse."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is a ``CausalBias``. The module of that class is not imported for this, since it imports
    torch._dynamo; where there is such a mask, it is loaded."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _unwrap_causal_bias(given: Arguments) -> Arguments:
    """torch.nn.attention.bias.causal_upper_left / causal_lower_right: causal rules wrapped as tensor subclasses."""
    mask = given.attn_mask
    if not is_causal_bias(mask):
        return given
    from torch.nn.attention.bias import CausalVariant

    if given.is_causal:
        raise ValueError("is_causal must be False with a CausalBias as attn_mask, got True")
    sizes, needed = (mask.seq_len_q, mask.seq_len_kv), (given.query.shape[-2], given.key.shape[-2])
    if sizes != needed:
        raise ValueError(f"a CausalBias must be made for (L, S) = {needed}, got {sizes}")
    alignment = "lower_right" if mask.variant == CausalVariant.LOWER_RIGHT else "upper_left"
    return given.changed(attn_mask=None, is_causal=True, alignment=alignment)


def _as_window(given: Arguments) -> Arguments:
    """A BlockMask, as a window if :func:`..flex.create_block_mask` has found it to be one."""
    found = known_of(given.attn_mask).get(WINDOW)
    fits = tuple(given.attn_mask.shape[-2:]) == (given.query.shape[-2], given.key.shape[-2])
    if found is None or not fits or given.is_causal or given.window is not None:
        return given
    return given.changed(attn_mask=None, window=found.window, alignment=found.alignment)


def autocast_on(tensor: Tensor) -> bool:
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Switch autocast off for the block: it would cast inside products that write into given buffers."""
    return torch.autocast(tensor.device.type, enabled=False) if autocast_on(tensor) else nullcontext()


def may_read(call: AttentionCall) -> bool:
    """Whether values on the call's device may be read by the host now."""
    device = call.query.device
    if device.type == "meta":
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


# ---- results ---------------------------------------------------------------------------------------------------------


def distinct(tensor: Tensor) -> Tensor:
    """The tensor without its repetitions: every expanded (stride 0) dimension cut to length 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, row statistics and sums are float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(call: AttentionCall) -> Tensor:
    """``[*batch, Hq, L, Dv]`` with the memory layout of the query: heads inside tokens stay heads inside tokens, so
    that the caller's ``transpose(1, 2).flatten(2)`` is free."""
    query, shape = call.query, call.out_shape
    if has_heads_inside_tokens(call):
        batch, heads, tokens, head_dim_v = shape
        return query.new_empty(batch, tokens, heads, head_dim_v).transpose(1, 2)
    return query.new_empty(shape)


def has_heads_inside_tokens(call: AttentionCall) -> bool:
    """Whether the output of a call lies in memory as ``[B, L, Hq, Dv]``."""
    query, shape = call.query, call.out_shape
    return query.dim() == 4 and len(shape) == 4 and query.stride(1) < query.stride(2) and shape[1] > 1
