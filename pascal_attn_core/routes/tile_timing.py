"""Tiles timed against torch's own kernel on the user's CPU, in two or three shapes, once per kind of call.

Which of the two is faster, and in which tile shape, differs from processor to processor: by the speed of its
exponentials against that of its products, and by the size of the caches. So a slice of a real call is run by both. The
result is stored on disk, so that the same machine decides the same way from then on.

A timing is bought only with calls that are worth it: it comes when the calls of a kind have taken about as long as it
will take itself. Until then, and for short calls, torch's kernel is used.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tiled
from ..call import AttentionCall, check_call
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig
from ..machine.device import MIB
from ..machine.runtime import Runtime
from ..tiled.layout import is_padding
from ..tiled.plan import plan_call
from ..tiled.tiles import Basis, TilePlan, cpu_bases
from .route import Request, Route
from .timing_table import Attempt, CallKind, Clock, Contest, kind_text, least_times, power_of_two
from .torch_kernel import TorchForm, find_form, run_form

SECONDS = 0.3  # that a timing may take
_ROUNDS = 6
CLEARLY = 0.97  # of torch's time: more is not worth the change, since a timing errs by some percent
_OTHER_TILES = 0.9  # of the time of the first tile shape: between shapes a slice of a call errs by several percent
_CONFIG = AttentionConfig()

# The timed slice. Torch's kernel takes other blocks for calls below 768 queries.
_LEAST_QUERIES, _MOST_QUERIES = 768, 1024
_LEAST_KEYS, _MOST_KEYS, _MOST_CAUSAL = 1024, 2048, 2048
_MOST_PADDED_KEYS = 8192  # padding lies at the end
_KEYS_OF_FEW_QUERIES = 16384
_FEW = 64
_COST = 1 << 29  # multiply-adds, about 10 ms
_READ_COST = 8  # multiply-adds in the time that one number of K or V takes from memory
_MOST_ROWS = 1 << 13
_NO_WEIGHT = -200.0  # a key with such a bias takes no part
_MOST_SEEN = 1024
# Calls with a mask that have fewer are not timed: to look at the mask would cost more than a thousandth of the call.
_MASKED_SCORES = 1 << 22


class TileTiming(NamedTuple):
    """The conclusion from the times of a kind: the chosen tiles, which are the first of :func:`.cpu_bases` unless
    others are clearly faster, and their time in units of that of torch's kernel; None where torch has no kernel."""

    ratio: float | None
    basis: Basis

    @property
    def words(self) -> str:
        return f"timed on this CPU at {self.ratio:.2f} of the time of torch's kernel ({_basis_name(self.basis)})"


_OPEN = object()


class TileTimings(Contest[CallKind]):
    """Made by ``runtime.part(TileTimings)``."""

    file_kind, kind_type = "tiles", CallKind

    def __init__(self, runtime: Runtime, *, clock: Clock | None = None, **options: Any):
        super().__init__(
            runtime, clock=clock or functools.partial(least_times, rounds=_ROUNDS, seconds=SECONDS), **options
        )
        self._is_off = not self.is_on or self.info.kind != "cpu" or self.device.type != "cpu"
        self._seen: dict[tuple, Any] = {}  # what is final for calls of the same sizes
        self._last_mask: tuple[weakref.ref, tuple] | None = None
        self._spent: dict[CallKind, int] = {}

    def of(self, ours: Route, request: Request) -> TileTiming | None:
        """The timing of calls of this kind by the route of tiles, made now if the request allows that and it is worth
        it."""
        call = request.call
        mask = call.attn_mask
        if self._is_off or (mask is not None and (call.num_scores < _MASKED_SCORES or isinstance(mask, LazyMask))):
            return None
        key = (
            call.query.dtype, call.batch, call.num_heads, call.num_kv_heads, call.seq_len_q, call.seq_len_kv,
            call.head_dim, call.head_dim_v, call.left, call.right, call.offset, call.needs_grad,
            mask if mask is None else self._mask_key(mask), torch.get_num_threads(), request.config.token,
        )  # fmt: skip
        found = self._seen.get(key, _OPEN)
        return self._look_up(ours, request, key) if found is _OPEN else found

    def _mask_key(self, mask: Tensor) -> tuple:
        """The properties of a mask that the kind of a call depends on. The layers of a model share a mask, so it is
        looked at once."""
        if self._last_mask is not None and self._last_mask[0]() is mask:
            return self._last_mask[1]
        key = mask.dtype, mask.shape, _kept(mask)
        self._last_mask = weakref.ref(mask), key
        return key

    def _look_up(self, ours: Route, request: Request, key: tuple) -> TileTiming | None:
        call, config = request.call, request.config
        is_enough = config.budget_mib is None or config.budget_mib * MIB >= self.info.default_budget_bytes()
        is_as_timed = config.q_block is config.kv_block is None and config.softmax == "auto" and config.trim_masks
        kind = kind_of_call(call) if is_enough and is_as_timed else None
        times = None if kind is None else self.known.get(kind)
        if kind is not None and kind not in self.known:
            if not request.may_time:
                return None
            bases = self._bases(slice_of(call))
            self._spent[kind] = self._spent.get(kind, 0) + _cost(call)
            if self._spent[kind] < _cost(slice_of(call)) * _ROUNDS * (1 + len(bases)):
                return None
            times = self.find(kind, lambda: self._timed(kind, ours, call, request.budget_bytes))
        found = self.verdict(times)
        if kind is None or (kind in self.known and kind not in self._again):
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = found
        return found

    def _bases(self, sample: AttentionCall) -> list[Basis]:
        """The bases that make different tiles for a call."""
        plans: dict[TilePlan, Basis] = {}
        for basis in cpu_bases(self.info):
            plans.setdefault(plan_call(sample, self.info, _CONFIG, basis=basis), basis)
        return list(plans.values())

    def verdict(self, times: Mapping[str, float] | None) -> TileTiming | None:
        """The conclusion from the times of a kind; None where there are none."""
        bases = {_basis_name(basis): basis for basis in cpu_bases(self.info)}
        names = [name for name in times or () if name in bases]
        if times is None or not names:
            return None
        best = min(names, key=times.__getitem__)
        if times[best] >= _OTHER_TILES * times[names[0]]:
            best = names[0]
        return TileTiming(times[best] / times["torch"] if "torch" in times else None, bases[best])

    def ratios(self) -> dict[str, float]:
        """The ratio of each kind that is known, by its words."""
        found = {kind_text(kind): self.verdict(times) for kind, times in self.known.items()}
        return {words: timing.ratio for words, timing in found.items() if timing is not None and timing.ratio}

    def _timed(self, kind: CallKind, ours: Route, call: AttentionCall, budget_bytes: int) -> dict[str, float] | None:
        with torch.no_grad():
            sample = slice_of(call)
            bases, form, whole = self._bases(sample), find_form(sample, budget_bytes), find_form(call, budget_bytes)
            attempts: dict[str, Attempt] = {}
            if isinstance(form, TorchForm):
                if isinstance(whole, TorchForm) and whole.q_step:  # a mask too large to be copied at once
                    form = replace(form, q_step=whole.q_step)
                attempts["torch"] = lambda: run_form(sample, form)
            elif len(bases) == 1:
                return None
            for basis in bases:
                attempts[_basis_name(basis)] = functools.partial(
                    ours.forward, sample, _CONFIG, basis, with_lse=False, for_grad=False, stats=None
                )
            times = self.timed(kind, attempts)
        return times if self.verdict(times) else None

    # ---- on disk -----------------------------------------------------------------------------------------------------

    def conditions(self) -> dict[str, str]:
        info, instructions = self.info, torch.backends.cpu.get_cpu_capability()
        caches = f"{info.core_l2_bytes}, {info.l2_bytes}"
        found = {"processor": info.name, "instructions": instructions, "caches": caches}
        return {**found, "torch": torch.__version__, "tiles": tiles_digest()}


@functools.cache
def tiles_digest() -> str:
    """Hash of the code that tiles run: another one, and what was measured of them no longer holds."""
    code = hashlib.sha256()
    for file in sorted(Path(tiled.__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
    return code.hexdigest()[:16]


def kind_of_call(call: AttentionCall) -> CallKind | None:
    """The kind of a call; None for those that are not timed. What a softcap, sinks, or the wish for lse change is the
    same for all tile shapes, and torch's kernel takes none of them."""
    mask = call.attn_mask
    if call.needs_grad or call.dropout_p or call.is_empty or not call.head_dim or isinstance(mask, LazyMask):
        return None
    if call.left is not None or (call.right is not None and not call.plain_causal):
        return None
    tokens_q, tokens_kv, _, _ = _sizes(call)
    return CallKind(
        kernel=_name(call.query.dtype),
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        q_tokens=power_of_two(tokens_q),
        kv_tokens=power_of_two(tokens_kv),
        groups=call.groups,
        rows=min(_MOST_ROWS, power_of_two(call.batch_size * call.num_heads * call.seq_len_q)),
        mask="" if mask is None else f"{_name(mask.dtype)} {'keys' if is_padding(mask) else 'queries'}",
        kept=0 if mask is None else _kept(mask),
        is_causal=call.is_causal,
        threads=torch.get_num_threads(),
    )


def _basis_name(basis: Basis) -> str:
    return f"{basis.rows} x {basis.keys}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kept(mask: Tensor) -> int:
    if not is_padding(mask):
        return 4
    row = mask if mask.dim() < 2 else mask[..., :1, :]
    if row.dtype != torch.bool:
        row = row > _NO_WEIGHT
    return -(-4 * int(row.count_nonzero()) // max(1, row.numel()))


def _sizes(call: AttentionCall) -> tuple[int, int, int, int]:
    """Queries, keys, key/value heads and batch elements of the timed slice of a call."""
    tokens_q, tokens_kv, mask = call.seq_len_q, call.seq_len_kv, call.attn_mask
    if call.is_causal:
        queries, keys = min(tokens_q, _MOST_CAUSAL), min(tokens_kv, _MOST_CAUSAL)
        if _unit_cost(call, queries, keys) > _COST:
            queries, keys = min(queries, _LEAST_KEYS), min(keys, _LEAST_KEYS)
    elif tokens_q < _FEW:
        queries, keys = tokens_q, min(tokens_kv, _KEYS_OF_FEW_QUERIES)
    elif isinstance(mask, Tensor):
        # More heads instead: what is done to a mask once serves all of them.
        most = _MOST_PADDED_KEYS if is_padding(mask) else _LEAST_KEYS
        queries, keys = min(tokens_q, _LEAST_QUERIES), min(tokens_kv, most)
    else:
        queries, keys = min(tokens_q, _MOST_QUERIES), min(tokens_kv, _MOST_KEYS)
        if _unit_cost(call, queries, keys) > _COST:
            keys = min(keys, _LEAST_KEYS)
        if _unit_cost(call, queries, keys) > _COST:
            queries = min(queries, _LEAST_QUERIES)
    units = max(1, _COST // _unit_cost(call, queries, keys))
    heads = min(call.num_kv_heads, units)
    return queries, keys, heads, min(call.batch[-1] if call.batch else 1, max(1, units // heads))


def _unit_cost(call: AttentionCall, queries: int, keys: int) -> int:
    """Cost of one key/value head and its query heads, in multiply-adds."""
    products = call.groups * queries * keys // (1 + call.is_causal)
    return (products + _READ_COST * keys) * (call.head_dim + call.head_dim_v)


def _cost(call: AttentionCall) -> int:
    return call.batch_size * call.num_kv_heads * _unit_cost(call, call.seq_len_q, call.seq_len_kv)


def slice_of(call: AttentionCall) -> AttentionCall:
    """The part of a call that is timed, without copies: of its first heads the first queries and keys. A bool mask with
    a row for each query is replaced by one that leaves something and forbids something in every tile, for which tiles
    take longest."""
    queries, keys, kv_heads, batch = _sizes(call)
    heads, mask = kv_heads * call.groups, call.attn_mask
    if isinstance(mask, Tensor):
        if mask.dtype == torch.bool and not is_padding(mask):
            odd = [torch.arange(count).bitwise_and_(1).bool() for count in (queries, keys)]
            mask = (odd[0][:, None] ^ odd[1])[None, None]
        else:
            mask = _part(mask, (batch, heads, queries, keys))
    query = _part(call.query, (batch, heads, queries, call.head_dim))
    key = _part(call.key, (batch, kv_heads, keys, call.head_dim))
    value = _part(call.value, (batch, kv_heads, keys, call.head_dim_v))
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": call.groups > 1}
    return check_call(query, key, value, mask, **options)


def _part(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The first elements of each of the last four dimensions, as a view; dimensions that broadcast stay."""
    tensor = tensor.detach()
    tensor = tensor[(0,) * (tensor.dim() - 4)] if tensor.dim() > 4 else tensor[(None,) * (4 - tensor.dim())]
    for dim, size in enumerate(sizes):
        tensor = tensor.narrow(dim, 0, min(size, tensor.shape[dim]))
    return tensor
