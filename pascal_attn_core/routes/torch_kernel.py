"""The route ``torch``: torch's own fused attention, after the call has been made acceptable to it.

Whether a fused kernel takes a call is asked of torch itself, for the very tensors, never guessed from a version. Where
the answer is no, the call is rewritten without changing its result, and asked again:

* grouped heads: with few queries the heads of a group become query rows (a view); otherwise key/value heads become
  the batch, and K and V are viewed once per query head with stride 0. Neither copies K or V.
* bfloat16 that this card has no kernel for: converted to float32 a few heads at a time, within the budget.
* rows that are not contiguous or overlap, and queries that slide by one element: copied when the call runs, if that
  fits the budget.
* a mask that torch would copy densely: a range of queries at a time, so that the copy fits the budget.

On a card that torch has no fused kernel for, a package that has one stands in its place (:mod:`.flash_attn_triton`).
Where torch's kernels are known to be wrong (:mod:`.torch_faults`), they do not take the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, Results, distinct, empty_output
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig, RouteUnavailable
from ..machine.device import CPU_LIKE
from ..machine.out_of_memory import out_of_memory
from ..machine.room import Room
from ..machine.runtime import begin_epoch, runtime_of
from ..observe.progress import this_thread
from ..tiled.layout import is_matrix, slides_by_one
from . import flash_attn_triton
from .derivatives import differentiable
from .route import Choice, Request, Route
from .torch_faults import MOST_BLOCKS, TorchAlone, broken_promise, fault_reasons, is_torchs_own, torch_sdpa, unkept

_QUERIES = 64  # that torch's CPU kernel takes at a time in calls below 768 of them
_MATH = 0  # torch.nn.attention.SDPBackend.MATH: no fused kernel takes the call


class Four(NamedTuple):
    """The tensors of a call with four dimensions each: ``[B, H, L, D]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None


@dataclass(frozen=True)
class TorchForm:
    """How torch's fused kernel takes a call: what its tensors become, and how they are walked. It holds none of them.

    Attributes:
        copied: names of the tensors that are copied first.
        fold: "" as they are (grouped heads if torch takes them), "rows" heads of a group as query rows, "heads"
            key/value heads as batch.
        upcast: convert each step to float32.
        heads_step, q_step: key/value heads and query tokens per step; 0 = all at once, in one call.
        by_package: it is flash-attn's kernel that takes it.
    """

    copied: tuple[str, ...] = ()
    fold: str = ""
    upcast: bool = False
    heads_step: int = 0
    q_step: int = 0
    by_package: bool = False

    @property
    def is_one_call(self) -> bool:
        """Whether torch's function is called once."""
        return not (self.fold or self.upcast or self.q_step or self.by_package)

    @property
    def kernel(self) -> str:
        return flash_attn_triton.KERNEL if self.by_package else "torch's kernel"

    @property
    def is_as_it_came(self) -> bool:
        """Whether torch's function is called once, with the tensors of the call."""
        return self.is_one_call and not self.copied

    @property
    def torch_stores(self) -> bool | None:
        """Whether torch's function, given the call as it came, would compute by its math attention. Where only a mask
        is too large that is not known."""
        return True if self.fold or self.upcast or self.by_package else None if self.q_step else False

    def over_torch(self, ratio: float | None) -> float | None:
        """The time of another route in units of that of torch's kernel, from one in units of this form's."""
        return None if self.by_package else ratio

    def words(self) -> str:
        parts = {"rows": "GQA folded into rows", "heads": "GQA folded into the batch"}.get(self.fold, "")
        extra = ["bfloat16 in float32"] if self.upcast else []
        if self.copied:
            extra.append(f"with a copy of {' and '.join(self.copied)}")
        if self.q_step:
            extra.append(f"{self.q_step} queries at a time")
        if self.by_package:
            extra.append(f"by {self.kernel}")
        return ", ".join(filter(None, [parts, *extra]))


class TorchRoute(Route):
    name = "torch"
    is_differentiable = True

    def plan(self, request: Request) -> TorchForm | list[str]:
        flags = {"with_lse": request.with_lse, "in_graph": request.in_graph, "named": request.config.route == self.name}
        return find_form(request.call, request.budget_bytes, **flags, copy_bytes=request.copy_bytes)

    def claim(self, request: Request) -> Choice | None:
        form = request.plan(self)
        if isinstance(form, list):
            return None
        said = "; ".join(filter(None, [form.words(), *request.remarks]))
        why = "torch has none, flash-attn" if form.by_package else "torch"
        why += " has a fused kernel for it" + (f" ({said})" if said else "")
        return Choice(self, why, form, torch_stores=form.torch_stores)

    def forward(self, call: AttentionCall, config: AttentionConfig, plan: TorchForm | None, **options: Any) -> Results:
        """``plan`` None: the tensors of the call as they are. If there is no memory for its copies, the next plan makes
        smaller ones."""
        form = plan or TorchForm()
        try:
            return Results(differentiable(run_form(call, form), config))
        except out_of_memory() as error:
            if form.is_as_it_came or config.budget_mib is not None:
                raise
            if not runtime_of(call.query.device).part(Room).ran_out():
                raise
            begin_epoch()
            raise RouteUnavailable(f"no memory for its copies: {error}") from None


def find_form(
    call: AttentionCall,
    budget_bytes: int,
    *,
    with_lse: bool = False,
    in_graph: bool = False,
    named: bool = False,
    copy_bytes: int | None = None,
) -> TorchForm | list[str]:
    """How torch's fused attention can take the call, or the reasons why it cannot. ``copy_bytes``: memory for what is
    no larger than the inputs; None = the budget. ``named``: torch is asked for by name, so no package serves."""
    copy_bytes = budget_bytes if copy_bytes is None else copy_bytes
    if reasons := _refusals(call, with_lse=with_lse, in_graph=in_graph):
        return reasons
    four = as_four_dimensions(call)
    if isinstance(four, str):
        return [four]
    copied = _without_matrix_strides(four)
    if (needed := sum(t.numel() * t.element_size() for t in copied.values())) > copy_bytes:
        size = f"{needed >> 20} MiB"
        return [f"torch's kernel needs a copy that exceeds the budget ({size}): rows are not contiguous or overlap"]
    form = TorchForm(tuple(copied))
    # Torch is asked about memory that lies as the copies will.
    four = four._replace(**{name: t.new_empty(t.shape) for name, t in copied.items()})
    q_step = _query_step(call, four.attn_mask, budget_bytes)
    if call.needs_grad and q_step:
        return ["torch's kernel would keep a dense copy of the mask for the gradients"]
    if fused_takes(call, *four):
        return replace(form, q_step=q_step)
    if call.groups > 1 and (folded := _folded(call, four, form, q_step, copy_bytes)) is not None:
        return folded
    if not named and flash_attn_triton.takes(call):
        return replace(form, by_package=True)
    if call.query.dtype == torch.bfloat16 and not call.needs_grad and not q_step:
        return _upcast(call, four, form, copy_bytes)
    kind = "GQA or " if call.groups > 1 else ""
    return [f"torch has no fused kernel for {kind}this call on this device"]


def _refusals(call: AttentionCall, *, with_lse: bool, in_graph: bool) -> list[str]:
    """Say why torch's function must not compute a call, whatever its form."""
    checks = (
        (with_lse, "torch's function does not return lse"),
        (call.needs_mask_grad, "torch's fused kernels give no gradient of attn_mask"),
        (
            in_graph and call.dropout_p,
            "a compiled graph recomputes it for its gradients, with a different dropout mask",
        ),
    )
    reasons = [why for holds, why in checks if holds] + lacks(call)
    return reasons or list(filter(None, [broken_promise(call)])) or fault_reasons(call, read=not in_graph)


def lacks(call: AttentionCall) -> list[str]:
    """Say what a call asks for that torch's function does not have, one sentence each."""
    reasons = []
    if call.left is not None or (call.right is not None and not call.is_causal):
        reasons.append("torch's function has no sliding window")
    elif call.is_causal and call.offset:
        reasons.append("torch's is_causal is upper-left only")
    if call.softcap is not None:
        reasons.append("torch's function has no softcap")
    if call.sinks is not None:
        reasons.append("torch's function has no attention sinks")
    if call.score_rule is not None:
        reasons.append("torch's function has no score_mod")
    if call.order > 1:
        reasons.append("torch's kernels have no forward mode and no gradients of gradients")
    mask = call.attn_mask
    if isinstance(mask, LazyMask):
        return [*reasons, "torch's function takes a tensor as attn_mask, not a rule"]
    if mask is not None:
        if call.is_causal:
            reasons.append("torch takes attn_mask or is_causal, not both")
        if mask.dtype not in (torch.bool, torch.float32, call.query.dtype):
            reasons.append(f"torch's kernel takes no attn_mask of {mask.dtype} with a query of {call.query.dtype}")
    if call.is_empty:
        reasons.append("the call is empty")
    return reasons


def as_four_dimensions(call: AttentionCall) -> Four | str:
    """``[B, H, L, D]`` views with broadcast leading dimensions expanded."""
    mask: Any = call.attn_mask
    query, key, value = call.query, call.key, call.value
    heads, kv_heads = (*call.batch, call.num_heads), (*call.batch, call.num_kv_heads)
    is_four = query.dim() == 4 and (mask is None or mask.dim() == 4)
    if is_four and query.shape[:-2] == heads and key.shape[:-2] == value.shape[:-2] == kv_heads:
        return Four(query, key, value, mask)
    try:
        lead = zip((query, key, value), (heads, kv_heads, kv_heads))
        four = [_merge_batch(t.expand(*shape, *t.shape[-2:])) for t, shape in lead]
        if mask is not None:
            mask = mask[(None,) * (len(call.batch) + 3 - mask.dim())]
            batch = mask.shape[:1] if len(call.batch) == 1 else call.batch
            mask = _merge_batch(mask.expand(*batch, *mask.shape[-3:]))
    except RuntimeError:
        return "torch's kernel needs leading dimensions that merge without a copy"
    return Four(four[0], four[1], four[2], mask)


def _merge_batch(tensor: Tensor) -> Tensor:
    return tensor.view(math.prod(tensor.shape[:-3]), *tensor.shape[-3:]) if tensor.dim() != 4 else tensor


def _without_matrix_strides(four: Four) -> dict[str, Tensor]:
    """The tensors whose rows are not contiguous or overlap: torch's kernels give the strides to products of matrices,
    which then raise, or leave their result as it was."""
    given = {"query": four.query, "key": four.key, "value": four.value}
    return {name: t for name, t in given.items() if not is_matrix(t) or (t is four.query and slides_by_one(t))}


def _query_step(call: AttentionCall, mask: Tensor | None, budget_bytes: int) -> int:
    """Query tokens per call so that the dense copy torch makes of the mask fits the budget; 0 = all of them."""
    if mask is None or mask.shape[-2] == 1:
        return 0
    # Bool masks become floats. A float mask is made contiguous, on CUDA also where its rows are not 16-byte aligned.
    is_bool, on_cuda = mask.dtype == torch.bool, mask.device.type == "cuda"
    if not is_bool and not (mask.stride(-1) > 1 or (on_cuda and (call.seq_len_kv % 8 or mask.stride(-1) != 1))):
        return 0
    if is_bool and mask.device.type in CPU_LIKE:
        mask = distinct(mask)  # see as_numbers
    element_size, tokens = call.query.element_size() if is_bool else mask.element_size(), call.seq_len_q
    lse_bytes = call.num_heads * 4  # of one query: the kernels return one whether it is wanted or not
    row_bytes = mask.numel() // mask.shape[-2] * element_size
    if tokens * (row_bytes + call.batch_size * lse_bytes) <= budget_bytes:
        return 0
    # One batch element at a time, and the output of each step is copied into the whole.
    step_bytes = row_bytes // mask.shape[0] + call.num_heads * call.head_dim_v * element_size + lse_bytes
    step = max(1, budget_bytes // max(1, step_bytes))
    return min(step // _QUERIES * _QUERIES or step, tokens)


def fused_takes(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Torch's own answer: is there a fused kernel for exactly this call?"""
    return sdp_choice(query, key, value, mask, call.dropout_p, call.is_causal, call.scale) > _MATH


def sdp_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> int:
    """The number in ``torch.nn.attention.SDPBackend`` of the kernel that torch will take for tensors of four
    dimensions."""
    given, grouped = (query, key, value, mask, dropout_p, is_causal), query.shape[1] > key.shape[1]
    try:
        if grouped:  # torch 2.4 does not know it
            return torch._fused_sdp_choice(*given, scale=scale, enable_gqa=True)
        return torch._fused_sdp_choice(*given, scale=scale)
    except (TypeError, NotImplementedError, RuntimeError):
        return _MATH


def is_torchs_alone(call: AttentionCall) -> bool:
    """Whether torch takes a call as it came by a kernel that no other route of the device beats."""
    alone = runtime_of(call.query.device).part(TorchAlone)
    if not alone.answers or (call.query.dtype, call.head_dim) in alone.refused or isinstance(call.attn_mask, LazyMask):
        return False
    four = as_four_dimensions(call)
    return isinstance(four, Four) and sdp_choice(*four, call.dropout_p, call.is_causal, call.scale) in alone.answers


def _folded(call: AttentionCall, four: Four, form: TorchForm, q_step: int, budget_bytes: int) -> TorchForm | None:
    """Grouped heads without grouping, K and V as they are."""
    query, key, value, mask = four
    step_heads = _heads_within(call, budget_bytes, call.query.element_size(), with_inputs=False)
    row_like = mask is None or (call.seq_len_q == 1 and mask.shape[1] == 1)
    rows = _rows_view(query[:1], call) if row_like and not call.is_causal else None
    if rows is not None and fused_takes(call, rows, key[:1], value[:1], None if mask is None else mask[:1]):
        return replace(form, fold="rows", heads_step=max(1, step_heads))
    if call.needs_grad:
        return None  # the gradient of a stride-0 view is as large as K and V expanded
    if fused_takes(call, *_heads_view(four, call, 0, slice(0, 1), slice(None))):
        return replace(form, fold="heads", heads_step=max(1, step_heads), q_step=q_step)
    return None


def _rows_view(query: Tensor, call: AttentionCall) -> Tensor | None:
    """``[B, Hq, L, D]`` as ``[B, Hkv, G * L, D]``, or None where that is no view."""
    batch, heads, tokens, head_dim = query.shape
    try:
        return query.view(batch, heads // call.groups, call.groups * tokens, head_dim)
    except RuntimeError:
        return None


def _heads_view(four: Four, call: AttentionCall, batch: int, heads: slice, queries: slice) -> Four:
    """Some key/value heads of one batch element as batch: K and V ``[h, G, S, D]`` with stride 0 over G."""
    groups = call.groups
    query = four.query[batch].unflatten(0, (-1, groups))[heads, :, queries]
    key, value = (t[batch, heads, None].expand(-1, groups, -1, -1) for t in (four.key, four.value))
    mask = four.attn_mask
    if mask is not None:
        mask = mask[batch if mask.shape[0] > 1 else 0]
        mask = mask[None] if mask.shape[0] == 1 else mask.unflatten(0, (-1, groups))[heads]
        mask = mask[:, :, queries] if mask.shape[2] > 1 else mask
    return Four(query, key, value, mask)


def _heads_within(call: AttentionCall, budget_bytes: int, element_size: int, *, with_inputs: bool) -> int:
    """Key/value heads whose output (and, converted, whose inputs) fit the budget together; 0 if not one does."""
    rows = call.groups * call.seq_len_q
    elements = rows * call.head_dim_v
    if with_inputs:
        elements += rows * call.head_dim + call.seq_len_kv * (call.head_dim + call.head_dim_v)
    lse_bytes = rows * 4  # its kernels return one whether it is wanted or not
    return min(call.num_kv_heads, budget_bytes // max(1, elements * element_size + lse_bytes))


def _upcast(call: AttentionCall, four: Four, form: TorchForm, budget_bytes: int) -> TorchForm | list[str]:
    mask = four.attn_mask
    if mask is not None and mask.dtype == torch.bfloat16:
        return ["torch has no fused bfloat16 kernel on this device, and its mask would have to be converted"]
    query, key, value, mask = _heads_view(four, call, 0, slice(0, 1), slice(0, 1))
    query, key, value = (t[..., :1, :].float() for t in (query, key, value))
    if not fused_takes(call, query, key, value, None if mask is None else mask[..., :1]):
        return ["torch has no fused kernel for this call on this device, in bfloat16 or float32"]
    heads = _heads_within(call, budget_bytes, 4, with_inputs=True)
    if not heads:
        return ["torch's kernel needs a copy in float32, of which one head exceeds the budget"]
    return replace(form, fold="heads", upcast=True, heads_step=heads)


def run_form(call: AttentionCall, form: TorchForm) -> Tensor:
    """The call by torch's fused kernel. Shapes and dtypes as in :func:`pascal_attn_core.sdpa`."""
    four = as_four_dimensions(call)
    assert isinstance(four, Four)
    if form.copied:
        four = four._replace(**{name: getattr(four, name).contiguous() for name in form.copied})
    if form.is_one_call or form.by_package:
        out = flash_attn_triton.attend(call, *four[:3]) if form.by_package else call_torch(call, *four)
        return out if out.shape == call.out_shape else out.reshape(call.out_shape)
    if call.needs_grad and form.fold == "rows":
        rows: Any = _rows_view(four.query, call)
        return call_torch(call, rows, *four[1:]).reshape(call.out_shape)
    out = empty_output(call)
    places = out if out.dim() == 4 else out.view(four.query.shape[0], call.num_heads, *out.shape[-2:])
    heads_step, q_step = form.heads_step or call.num_kv_heads, form.q_step or call.seq_len_q
    firsts = [(b, h) for b in range(places.shape[0]) for h in range(0, call.num_kv_heads, heads_step)]
    checkpoint, done = this_thread.checkpoint, 0
    total = len(firsts) * (1 if form.fold == "rows" else -(-call.seq_len_q // q_step))
    for batch, first in firsts:
        for _ in _run_heads(call, four, form, places[batch], batch, slice(first, first + heads_step)):
            done += 1
            if checkpoint is not None:
                checkpoint(done, total)
    return out


def _run_heads(
    call: AttentionCall, four: Four, form: TorchForm, out: Tensor, batch: int, heads: slice
) -> Iterator[None]:
    """Fill the output of some heads of one batch element; stops after each call of torch's function."""
    target = out.unflatten(0, (-1, call.groups))[heads]
    if form.fold == "rows":
        query = four.query[batch].unflatten(0, (-1, call.groups))[heads].flatten(1, 2)
        mask = four.attn_mask
        mask = None if mask is None else mask[batch : batch + 1] if mask.shape[0] > 1 else mask
        part = call_torch(call, query[None], four.key[batch, heads][None], four.value[batch, heads][None], mask)
        target.copy_(part[0].unflatten(1, (call.groups, -1)))
        yield
        return
    step = form.q_step or call.seq_len_q
    for first in range(0, call.seq_len_q, step):
        queries = slice(first, first + step)
        query, key, value, mask = _heads_view(four, call, batch, heads, queries)
        if form.upcast:
            key, value = (t[:, :1].float().expand(t.shape) for t in (key, value))
            query = query.float()
        target[:, :, queries].copy_(call_torch(call, query, key, value, mask))
        yield


def is_made_numbers(mask: Tensor) -> bool:
    return mask.dtype == torch.bool and mask.device.type in CPU_LIKE


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as torch's functions add it: 0 where it is true, else -inf, in memory for what it does not repeat.
    By arithmetic, 1 - 1/1 and 1 - 1/0: on a CPU torch selects element by element, which takes several times as long."""
    held = distinct(mask).to(dtype, memory_format=torch.contiguous_format)  # else torch copies it once more
    return held.reciprocal_().neg_().add_(1).expand(mask.shape)


def call_torch(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Torch's function, whichever kernel it takes, on tensors with the options of a call."""
    if mask is not None and is_made_numbers(mask):
        mask = as_numbers(mask, query.dtype)
    if len(query) > MOST_BLOCKS and query.device.type not in CPU_LIKE:
        masks = [mask] * -(-len(query) // MOST_BLOCKS) if mask is None or len(mask) == 1 else mask.split(MOST_BLOCKS)
        parts = zip(*(t.split(MOST_BLOCKS) for t in (query, key, value)), masks)
        return torch.cat([call_torch(call, *part) for part in parts])
    grouped = {"enable_gqa": True} if query.shape[1] > key.shape[1] else {}
    try:
        return torch_sdpa(query, key, value, mask, call.dropout_p, call.is_causal, scale=call.scale, **grouped)
    except RuntimeError as error:
        if not is_torchs_own(error):
            raise
        raise unkept(call, error) from error
