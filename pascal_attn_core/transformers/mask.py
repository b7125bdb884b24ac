"""The mask object for Transformers: which query sees which key, evaluated tile by tile.

Transformers describes masks as functions of indices, ``f(batch, head, query, key) -> bool``, built from a few parts
(causal, sliding window, chunks, packed sequences, padding), and calls the attention's *mask function* for the result.
Its own returns a tensor of L*S elements, ours a :class:`HostMask`, which keeps the parts:

- causal rule and sliding window as numbers (a band), so that tiles outside are never visited;
- padding as ``[B, S]``;
- anything else as the function itself, called for one tile at a time.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..call import PLAIN
from ..call.lazy_mask import LazyMask
from ..config import log_once
from ..tiled.masks import Band
from .pattern import MaskFunction, Pattern, made_by, read_pattern

log = logging.getLogger("pascal_attn")


@dataclass(eq=False)
class HostMask(LazyMask):
    """Bool ``[B, 1, L, S]``, True = takes part, of which only the parts are stored.

    It behaves as Transformers needs: it has a tensor's shape, is contiguous, moves between devices, can be cut along
    queries and keys, and comes back from the mask function as itself. Any other operation turns it into the tensor it
    represents, which is correct but takes L*S elements and is logged once. Added to scores by a model's own attention
    code, it is the float mask that such code expects.
    """

    dtype = torch.bool
    tensors = ()

    batch_size: int
    seq_len_q: int
    seq_len_kv: int
    q_offset: int  # the absolute position of the first query
    kv_offset: int
    pattern: Pattern  # of absolute positions
    padding: Tensor | None  # bool ``[B, S]``
    device: torch.device
    home: torch.device  # of the tensors that the pattern's functions read
    use_vmap: bool  # they take scalar indices only

    # ---- what it says ----------------------------------------------------------------------------------------------

    @property
    def band(self) -> Band:
        """Causal rule and window for this mask's own indices."""
        return Band(self.pattern.left, self.pattern.right, self.q_offset - self.kv_offset)

    @property
    def is_everything(self) -> bool:
        """Whether its parts let every query see every key."""
        last_of_first = self.band.key_range(0, 1, self.seq_len_kv)[1]
        first_of_last = self.band.key_range(self.seq_len_q - 1, self.seq_len_q, self.seq_len_kv)[0]
        all_keys = first_of_last <= 0 and last_of_first >= self.seq_len_kv
        return all_keys and self.padding is None and not self.pattern.rest

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        device = query.device
        allowed = query.new_ones((), dtype=torch.bool)
        if self.padding is not None:
            allowed = self.padding[batch, key]
        if self.pattern.rest:
            indices = [t.to(self.home) for t in (batch, head, query + self.q_offset, key + self.kv_offset)]
            for function in self.pattern.rest:
                evaluate = functools.partial(_one_by_one, function) if self.use_vmap else function
                allowed = allowed & evaluate(*indices).to(device)
        left, right, offset = self.band
        if left is not None:
            allowed = allowed & (key >= query + (offset - left))
        if right is not None:
            allowed = allowed & (key <= query + (offset + right))
        return allowed

    def dense(self) -> Tensor:
        """The tensor it represents."""
        views = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        indices = [torch.arange(n, device=self.device).view(view) for n, view in zip(self.shape, views)]
        return self.rule(*indices).expand(self.shape)

    # ---- what Transformers asks of it ------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((self.batch_size, 1, self.seq_len_q, self.seq_len_kv))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> HostMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The mask on another device; with a dtype, the tensor that it represents."""
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, (torch.dtype, Tensor)) or "dtype" in kwargs or "other" in kwargs or len(args) > 1:
            return self._stored("to").to(*args, **kwargs)
        device = self.device if target is None else torch.device(target)
        padding = None if self.padding is None else self.padding.to(device)
        return self.changed(padding=padding, device=device)

    def on(self, device: torch.device) -> HostMask:
        return self.to(device)

    def part(self, rows: tuple[int, int], keys: tuple[int, int]) -> HostMask:
        """Rows and keys of it, each from the first to before the last."""
        padding = None if self.padding is None else self.padding[:, keys[0] : keys[1]]
        sizes = {"seq_len_q": rows[1] - rows[0], "seq_len_kv": keys[1] - keys[0]}
        offsets = {"q_offset": self.q_offset + rows[0], "kv_offset": self.kv_offset + keys[0]}
        return self.changed(padding=padding, **sizes, **offsets)

    def changed(self, **changes: Any) -> HostMask:
        mask = copy.copy(self)
        vars(mask).update(changes)
        return mask

    def __getitem__(self, index: Any) -> Any:
        """``mask[:, :, rows, keys]`` and ``mask[..., rows, keys]`` with plain slices stay lazy."""
        parts = index if isinstance(index, tuple) else (index,)
        if parts and parts[0] is Ellipsis:
            parts = (slice(None),) * (5 - len(parts)) + parts[1:]
        if len(parts) <= 4 and all(isinstance(p, slice) and p.step in (None, 1) for p in parts):
            parts = (*parts, *(slice(None),) * (4 - len(parts)))
            spans = [p.indices(n)[:2] for p, n in zip(parts, self.shape)]
            if spans[0] == (0, self.batch_size) and spans[1] == (0, 1):
                rows, keys = ((first, max(first, last)) for first, last in spans[2:])
                return self.part(rows, keys)
        return self._stored("indexing")[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "batch_size" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._stored(name), name)

    def _stored(self, what: str) -> Tensor:
        if not torch.compiler.is_compiling():
            text = "a model operates on its attention mask itself (%s): a mask of L*S elements is stored"
            log_once(logging.WARNING, text, what)
        return self.dense()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _ADDITIONS and len(args) == 2 and not kwargs:
            return func(*cls._for_addition(*args))
        # Combined with a float mask it has to be one.
        others = [t for t in tree_leaves(args) if isinstance(t, Tensor)] if name in ("cat", "concat") else []
        dtype = next((t.dtype for t in others if t.is_floating_point()), None)

        def stored(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            return x._stored(name) if dtype is None else additive(x._stored(name), dtype)

        args, kwargs = tree_map(stored, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def _for_addition(cls, one: Any, other: Any) -> tuple[Any, Any]:
        """The two with the mask as a float mask: 0 where a key takes part, the lowest number where it does not."""
        mask, scores = (one, other) if isinstance(one, cls) else (other, one)
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            raise TypeError(f"a mask can be added to scores only, got {type(scores).__name__}")
        added = additive(mask._stored("addition"), scores.dtype)
        return (added, other) if mask is one else (one, added)

    def __add__(self, scores: Any) -> Tensor:
        return torch.add(*self._for_addition(self, scores))

    __radd__ = __add__


def _as_stored(name: str) -> Callable[..., Any]:
    def operate(self: HostMask, *others: Any) -> Any:
        return getattr(self._stored(name), name)(*others)

    return operate


for _operator in ("invert", "and", "rand", "or", "ror", "xor", "mul", "rmul", "eq", "ne", "lt", "gt"):
    setattr(HostMask, f"__{_operator}__", _as_stored(f"__{_operator}__"))


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as Transformers' float mask: 0 where a key takes part, the lowest number where it does not."""
    return torch.where(allowed, torch.zeros((), dtype=dtype, device=allowed.device), torch.finfo(dtype).min)


_ADDITIONS = ("add", "add_", "__add__", "__radd__", "__iadd__")


def _one_by_one(function: MaskFunction, *indices: Tensor) -> Tensor:
    """A function of four scalar indices, vectorised to ``[b, h, q, k]``."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:  # torch before 2.5
        TransformGetItemToIndex = nullcontext  # type: ignore[assignment,misc]
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=dims)
    with TransformGetItemToIndex():
        return function(*(t.flatten() for t in indices))


# ---- the mask function ---------------------------------------------------------------------------------------------


def pascal_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function to register beside the attention; the arguments of ``transformers.masking_utils.sdpa_mask``.

    A model with attention code of its own can still be loaded under a registered name, and then asks for masks: it gets
    the float masks of "eager", which its code expects. All others get those of :func:`lazy_mask`.
    """
    config = kwargs.get("config")
    if config is not None and not asks_interface(type(config).__module__):
        from transformers.masking_utils import eager_mask

        return eager_mask(*args, **kwargs)
    return lazy_mask(*args, **kwargs)


@torch.compiler.assume_constant_result
def asks_interface(module: str) -> bool:
    """Whether the model file next to this configuration module (or this model file) uses AttentionInterface; True where
    there is no source to read."""
    return _file_asks_interface(module.replace(".configuration_", ".modeling_"))


@functools.lru_cache(maxsize=1024)
def _file_asks_interface(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    if ".modeling_" not in module or not module.startswith("transformers.models.") or file is None:
        return True
    with open(file, encoding="utf-8") as source:
        text = source.read()
    asks = "ALL_ATTENTION_FUNCTIONS" in text or re.search(r"^class \w*Attention", text, re.MULTILINE) is None
    if not asks:
        log.warning("%s computes attention by itself: the registered attention is not used there", module)
    return asks


def lazy_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool | None = None,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    dtype: torch.dtype = torch.bool,
    **others: Any,
) -> Any:
    """A mask in parts; the arguments of ``transformers.masking_utils.sdpa_mask``.

    Transformers 4.53 to 4.57 pass ``cache_position`` in place of ``q_length``, ``q_offset`` and ``device``.

    Returns:
        None where every query sees every key; else a :class:`HostMask`. For a single query for which Transformers needs
        a mask in any case (a static cache's compiled step) a float tensor ``[B, 1, 1, S]``, whose shape does not change
        from step to step. While a graph is traced, what band and padding cannot express is a tensor of L*S bytes.
    """
    if isinstance(attention_mask, HostMask):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    if device is None:
        device = attention_mask.device if attention_mask is not None else "cpu"
    padding = _padding(attention_mask, batch_size, kv_length, kv_offset)
    traced = _is_traced(q_offset, padding)
    if traced:
        pattern = _read_traced(mask_function)
    else:
        pattern, q_offset = Pattern(right=0) if mask_function is None else read_pattern(mask_function), int(q_offset)
    if use_vmap is None:
        use_vmap = any(made_by(function) not in _INDEXED for function in pattern.rest)
    sizes, home = (batch_size, q_length, kv_length), torch.device(device)
    at: Any = q_offset  # a tensor goes into the rule as it is: such a mask is stored, never kept
    mask = HostMask(*sizes, at, kv_offset, pattern, padding, device=home, home=home, use_vmap=use_vmap)
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if q_length == 1 and not may_skip:
        return additive(mask.dense(), dtype) if dtype.is_floating_point else mask.dense()
    is_said = isinstance(q_offset, int) and not pattern.rest  # else its parts cannot be part of a graph
    answer = _simplified(mask) if not traced else mask if is_said else mask.dense()
    return None if may_skip and isinstance(answer, HostMask) and answer.is_everything else answer


_INDEXED = ("chunked_overlay", "packed_sequence_mask_function", "remap_positions_for_packed_sequence")


def _simplified(mask: HostMask) -> HostMask:
    """The mask without parts that have no effect."""
    first, last = mask.band.key_range(0, mask.seq_len_q, mask.seq_len_kv)
    if mask.padding is not None and bool(mask.padding[:, first:last].all()):
        mask = mask.changed(padding=None)
    if mask.seq_len_q == 1 and mask.pattern.rest and bool(mask.dense().all()):
        mask.pattern = Pattern()
    return mask


def _read_traced(mask_function: MaskFunction | None) -> Pattern:
    """While a graph is traced functions cannot be inspected: the two plain ones are recognised by identity."""
    from transformers import masking_utils

    if mask_function is None or mask_function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern()
    return Pattern(rest=(mask_function,))


def _padding(attention_mask: Tensor | None, batch_size: int, kv_length: int, kv_offset: int) -> Tensor | None:
    """Bool ``[B, S]``: which keys are not padding; keys beyond the end of the host's mask are."""
    if attention_mask is None:
        return None
    padding = attention_mask.to(torch.bool)
    missing = kv_length + kv_offset - padding.shape[-1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return padding[:, kv_offset : kv_offset + kv_length].expand(batch_size, -1)


def _is_traced(*values: Any) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return any(isinstance(v, Tensor) and (type(v) not in PLAIN or v.device.type == "meta") for v in values)
