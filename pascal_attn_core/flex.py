"""FlexAttention without Triton, in O(N) memory: the functions of ``torch.nn.attention.flex_attention`` on any device.

    from pascal_attn_core import create_block_mask, flex_attention

    patch = patch_flex_attention()       # torch's own functions become these, whoever has imported them

A block that the mask skips is not visited, one that it leaves whole is not asked for again, and ``score_mod`` sees one
tile of scores at a time. Gradients go through ``score_mod``, to the tensors that it reads as well. Without Triton, or
without ``torch.compile``, torch's own functions store the whole score matrix. Their ``create_block_mask`` stores some
matrices of that size on every device.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .attention import sdpa_with_lse
from .call import Arguments, AttentionCall, Results, check_call, prepared
from .call.flex_rules import (
    FULL,
    PARTIAL,
    SKIPPED,
    WINDOW,
    Mod,
    Range,
    ScoreRule,
    has_values,
    is_block_mask,
    known_of,
    mask_of,
    pieces,
    reads,
    window_of,
)
from .config import AttentionConfig, config_of
from .machine.device import CPU_LIKE
from .patching.patch import Patch
from .routes.run import run
from .tiled.rule_bytes import bytes_asked

_STRIP_BYTES = 4 << 20  # of what mask_mod allocates when create_block_mask asks it
_COMPILED = "_torchdynamo_orig_callable"  # attribute of what torch.compile makes of a function: that function


@torch._disable_dynamo
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    config: AttentionConfig | None = None,
) -> Any:
    """:func:`torch.nn.attention.flex_attention.flex_attention`, tile by tile and with gradients on every device. Under
    ``torch.compile`` the graph ends before it and goes on behind it.

    Args:
        query: ``[B, Hq, L, D]``; key ``[B, Hkv, S, D]``; value ``[B, Hkv, S, Dv]``; dtypes as :func:`.sdpa`. Keys and
            values of another dtype than the query's, which may be an 8-bit one, are copied into that.
        score_mod: of single elements, ``score_mod(score, batch, head, query, key) -> score``. Tensors that it reads get
            their gradients. It is called again for the gradients and must then do the same.
        block_mask: torch's ``BlockMask``, made by torch's function or by :func:`create_block_mask`; ``sdpa`` takes it
            as ``attn_mask`` too.
        return_lse: also return the natural logarithm of the softmax's denominator, ``[B, Hq, L]``.
        kernel_options: of torch's Triton kernels; of no effect.
        return_aux: torch's ``AuxRequest``: lse, and the largest score of each row, ``[B, Hq, L]``, without gradients.
        config: routes, memory budget, tiles.
    Returns:
        out ``[B, Hq, L, Dv]``; (out, lse) with ``return_lse``; (out, ``AuxOutput``) with ``return_aux``. A row that may
        attend to no key gives zeros, and the lse -inf.
    Raises:
        TypeError, ValueError: arguments that do not fit; nothing has been computed.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse must be False with return_aux, got True")
    with_max = return_aux is not None and return_aux.max_scores
    if with_max and score_mod is None:
        score_mod = _same  # beside a score rule the sum of a row is known apart from its maximum
    call = _checked(query, key, value, block_mask, scale=scale, enable_gqa=enable_gqa)
    without_data = not has_values(call.query)
    if score_mod is not None and not call.is_empty and not without_data:
        rule = ScoreRule(score_mod, call.query.new_empty(0, dtype=call.sums_dtype))
        call = replace(call, score_rule=rule, needs_grad=call.needs_grad or bool(rule.captured))
    with_lse = return_lse or with_max or (return_aux is not None and return_aux.lse)
    if without_data:  # there are shapes only, to which no function of elements matters
        found = sdpa_with_lse(call.query, call.key, call.value, scale=call.scale, enable_gqa=True, config=config)
        results = Results(*found)
    else:
        results = run(call, config_of(config), with_lse=with_lse)
    out, lse, log_sum, _ = results
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    most = None
    if with_max and lse is not None:
        most = lse.detach()
        most = most if log_sum is None else torch.where(most == -torch.inf, most, most - log_sum)
    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=most)


def _checked(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, **options: Any) -> AttentionCall:
    if block_mask is not None and not is_block_mask(block_mask):
        raise TypeError(f"block_mask must be a BlockMask or None, got {type(block_mask).__name__}")
    if isinstance(query, Tensor) and not has_values(query):
        block_mask = None
    given = prepared(Arguments(query, key, value, block_mask, **options))
    if isinstance(query, Tensor):
        dtype = given.query.dtype
        key, value = (t.to(dtype) if isinstance(t, Tensor) else t for t in (given.key, given.value))
    call = check_call(given._replace(key=key, value=value))
    if call.query.dim() != 4:
        raise ValueError(f"query must be [B, Hq, L, D], got {list(query.shape)}")
    if call.query.shape[1] != call.key.shape[1] and not call.enable_gqa:
        heads = f"{call.query.shape[1]} query and {call.key.shape[1]} key/value heads"
        raise ValueError(f"enable_gqa must be True for {heads}")
    return call


def _same(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score


# ---- block masks -----------------------------------------------------------------------------------------------------


@torch._disable_dynamo
def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> Any:
    """:func:`torch.nn.attention.flex_attention.create_block_mask`, in memory O(number of blocks): ``mask_mod`` is asked
    for some rows and keys at a time. torch's own takes 16 bytes and more for each element of ``Q_LEN * KV_LEN``.

    If ``mask_mod`` reads no tensors and no objects, a causal rule or a sliding window is recognised by all of its
    elements. Every route can then take the call, of :func:`flex_attention` and of :func:`.sdpa`. On ``meta`` and with
    fake tensors every block is listed as partial.

    Args:
        B, H: None = the mask is the same for all.
        device: None = the accelerator, or the CPU where there is none, as for torch.
        separate_full_blocks: False lists full blocks among the partial ones.
        _compile, dq_kv_order: of no effect.
        compute_dq_write_order: True is refused: only torch's compiled kernels for flash attention read that order.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function, got {type(mask_mod).__name__}")
    if compute_dq_write_order:
        raise ValueError("compute_dq_write_order must be False, got True: make such a mask by torch's function")
    device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else (BLOCK_SIZE[0], BLOCK_SIZE[1])
    # What is the same for all heads is found once. The lists are no inference tensors: their versions are asked for.
    sizes = 1 if B is None else B, 1 if H is None else H
    with torch.inference_mode(False), torch.no_grad():
        rows = _Rows(mask_mod, (Q_LEN, KV_LEN), block, device)
        batches, heads = (range(n if differs else min(n, 1)) for n, differs in zip(sizes, reads(mask_mod, device)))
        states = rows.of_all(batches, heads).expand(*sizes, -1, -1)
        full: tuple[Tensor | None, Tensor | None]
        partial, full = _ordered(states == PARTIAL), _ordered(states == FULL)
        if not separate_full_blocks:
            partial, full = _ordered(states != SKIPPED), (None, None)
        made = BlockMask.from_kv_blocks(*partial, full[0], full[1], block, mask_mod, (Q_LEN, KV_LEN))
    is_same = len(batches) == len(heads) == 1 and has_values(states)
    known_of(made)[WINDOW] = window_of(rows.first, rows.last, KV_LEN) if is_same else None
    return made


class _Rows:
    """A mask looked at some rows at a time.

    Attributes:
        first, last: of the keys that each query sees, int64 ``[L]``; first > last where they are not one range.
        may_be_window: no query is known whose keys are not one range.
    """

    def __init__(self, mask_mod: Mod, sizes: tuple[int, int], block: tuple[int, ...], device: torch.device):
        self.asked, self.sizes, self.block, self.device = mask_of(mask_mod), sizes, block, device
        self.may_be_window = True
        self.first = torch.ones(sizes[0], dtype=torch.int64, device=device)
        self.last = torch.zeros_like(self.first)
        self.num_blocks = [-(-n // size) for n, size in zip(sizes, block)]
        self.together = _STRIP_BYTES // 16
        if has_values(self.first):
            self.together = max(1, min(self.together, _STRIP_BYTES // bytes_asked(self.asked, device)))

    def of_all(self, batches: range, heads: range) -> Tensor:
        """int8 ``[batches, heads, rows, columns]``; without data every block is taken to be partial."""
        shape = len(batches), len(heads), *self.num_blocks
        if 0 in shape or not has_values(self.first):
            return torch.full(shape, PARTIAL, dtype=torch.int8, device=self.device)
        return torch.stack([torch.stack([self.states(batch, head) for head in heads]) for batch in batches])

    def states(self, batch: int, head: int) -> Tensor:
        """int8 ``[rows, columns]`` of blocks. As for torch, elements beyond the end are not seen."""
        length, (height, width) = self.sizes[0], self.block
        columns = self.num_blocks[1]
        states = torch.zeros(self.num_blocks, dtype=torch.int8, device=self.device)
        for row, of_row in enumerate(states):
            queries = (row * height, min((row + 1) * height, length))
            seen, missed = torch.zeros(2, columns * width, dtype=torch.bool, device=self.device)
            missed[self.sizes[1] :] = True
            if queries[1] - queries[0] < height:
                missed.fill_(True)
            self._look(batch, head, queries, seen, missed)
            seen, missed = (each.view(columns, width).any(dim=1) for each in (seen, missed))
            of_row.copy_(torch.where(missed, seen * PARTIAL, FULL))
        return states

    def _look(self, batch: int, head: int, queries: Range, seen: Tensor, missed: Tensor) -> None:
        """Whether any of these queries sees a key, and whether any does not: added to bool ``[keys]``."""
        num_keys = self.sizes[1]
        for (t0, t1), (j0, j1) in pieces(queries[1] - queries[0], num_keys, self.together):
            own = (queries[0] + t0, queries[0] + t1)
            part = self.asked(batch, head, *(torch.arange(*span, device=self.device) for span in (own, (j0, j1))))
            seen[j0:j1] |= part.any(dim=0)
            missed[j0:j1] |= ~part.all(dim=0)
            if j1 - j0 == num_keys and self.may_be_window:
                count, ones = part.sum(dim=1), part.contiguous().view(torch.uint8)
                first = ones.argmax(dim=1)
                is_range = (ones.flip(1).argmax(dim=1) == num_keys - first - count) & (count > 0)
                self.first[slice(*own)] = torch.where(is_range, first, 1)
                self.last[slice(*own)] = torch.where(is_range, first + count - 1, 0)
                if self.device.type in CPU_LIKE:  # a GPU would wait for the answer
                    self.may_be_window = bool(is_range.all())


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which first) of the blocks ``[B, H, rows, columns]`` of each row, as a BlockMask lists them."""
    number = blocks.sum(dim=-1, dtype=torch.int32)
    return number, torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)


# ---- in place of torch's functions -----------------------------------------------------------------------------------

_Site = tuple[dict[str, Any], str, Any, Any]  # names of a module, name, what was there, what is there now
_lock = threading.Lock()
_in_force: list[list[AttentionConfig | None]] = []  # of the patches; the last one counts
_sites: list[_Site] = []


def patch_flex_attention(config: AttentionConfig | None = None) -> Patch:
    """Put :func:`flex_attention` and :func:`create_block_mask` in place of torch's in this process, also in modules
    that have imported these by name, as they are or in ``torch.compile``, until ``remove()`` of the Patch. Of several
    patches the last one's ``config`` counts.

    What is being compiled on a CUDA device of compute capability 8.0 or later with Triton stays torch's: there it is
    one fused kernel.

    Args:
        config: how to compute; None = the environment's.
    Raises:
        ImportError: this torch (before 2.5) has no FlexAttention.
        TypeError: config is no AttentionConfig.
    """
    from torch.nn.attention import flex_attention as module

    config_of(config)  # or raises
    own = [config]
    with _lock:
        if not _in_force:
            _sites.extend(_put_in_place(module.flex_attention, module.create_block_mask))
        _in_force.append(own)

    def undo() -> None:
        with _lock:
            _in_force[:] = [each for each in _in_force if each is not own]
            if not _in_force:
                _put_back()

    return Patch("flex_attention", undo, sites=len(_sites))


def _put_in_place(attend: Callable[..., Any], make: Callable[..., Any]) -> list[_Site]:
    """Ours in place of torch's functions. Who keeps them longer than the last patch is in force gets torch's."""
    compiles_well = _has_compiled_kernels()

    @functools.wraps(attend)
    def our_attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        last = _in_force[-1:]
        if not last or (compiles_well and torch.compiler.is_compiling() and query.is_cuda):
            return attend(query, *args, **kwargs)
        return flex_attention(query, *args, **kwargs, config=last[0][0])

    @functools.wraps(make)
    def our_block_mask(*args: Any, **kwargs: Any) -> Any:
        is_torchs = not _in_force or (compiles_well and kwargs.get("compute_dq_write_order"))
        return (make if is_torchs else create_block_mask)(*args, **kwargs)

    pairs = (attend, our_attention), (make, our_block_mask)
    return [site for old, new in pairs for site in _exchange(old, new, compiled=not compiles_well)]


def _put_back() -> None:
    for names, name, before, ours in _sites:
        if names.get(name) is ours:
            names[name] = before
    for ours in {ours for *_, ours in _sites}:  # imported by name since then
        _exchange(ours, ours.__wrapped__)
    _sites.clear()


def _has_compiled_kernels() -> bool:
    """Whether torch.compile makes one fused kernel of torch's function on every CUDA device here."""
    if torch.version.hip or not torch.cuda.is_available():
        return False
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return min(capabilities) >= (8, 0) and importlib.util.find_spec("triton") is not None


def _exchange(old: Any, new: Any, *, compiled: bool = False) -> list[_Site]:
    """Put one function in place of another in every module that holds it. ``compiled``: also where it is wrapped by
    ``torch.compile``."""
    sites = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name, value in list(names.items()):
            is_wrapped = compiled and type(value) is FunctionType and value.__dict__.get(_COMPILED) is old
            if value is old or is_wrapped:
                names[name] = new
                sites.append((names, name, value, new))
    return sites
