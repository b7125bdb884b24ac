"""How the kernels take a call: which compilations, and into how many ranges the keys are cut. Worked out once for both
passes, from sizes alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import AttentionCall
from ..code.kinds import sibling
from ..code.source import HEAD_DIMS, AnyGeometry, Variant
from ..geometry.amd import RANGES
from ..geometry.gradient import generation_of
from ..geometry.plain import INT8_HEAD_DIMS
from .fields import rows_are_readable
from .repeat import Repeats
from .stream_k import Pieces, busiest, distribute
from .tail_rows import TailRows, tail_rows

MAX_SPLITS = 64
# Calls of so few queries come with ever more keys, as a model generates: from four steps on their plans are those of
# the whole steps of keys that they have.
FEW_QUERIES, KEYS_STEP = 8, 256
# Of a full tile for few rows, in units of the plain kernel's: it reads more of shared memory per multiplication.
_SPLIT_SPEED = 0.6
# What it takes until the next tile of keys may add to the same tile of queries (query_sums.cuh), in tiles of a product:
# some 2,000 cycles of 24,000, by the latencies of memory.
_HANDED_ON = 0.1
# Queries or keys of a range, see num_ranges: each block reads its own rows first, and its sums are stored and added.
_LEAST_RANGE = 256
# Shared memory of a multiprocessor in KiB by compute capability, or its major version: CUDA C++ programming guide,
# technical specifications. From 8.0 on each block takes 1 KiB beside its own.
_SHARED_KIB: dict[tuple[int, ...], int] = {
    (5,): 64, (5, 2): 96, (6,): 64, (6, 1): 96, (7,): 96, (7, 5): 64, (8,): 100, (8, 0): 164, (8, 7): 164, (9,): 228,
    (10,): 228, (12,): 100,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Packed:
    """The sequences in the tokens of a call with one batch element.

    Attributes:
        cu_q, cu_k: int32 ``[B + 1]``, contiguous, on the device of the call: the first query and the first key of each
            sequence, and where the last one ends.
        max_q, max_k: queries and keys of the longest sequence.
        end_q, end_k: where the last sequence ends.
        lower_right: each sequence's band begins in the corner of its last query and last key, else of its first ones.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    end_q: int
    end_k: int
    lower_right: bool

    @staticmethod
    def of(q_ends: list[int], k_ends: list[int], device: torch.device, *, lower_right: bool) -> Packed:
        """From ``q_ends`` and ``k_ends``: cumulative lengths ``[B + 1]``, non-decreasing from 0, at most the tokens of
        the call. Not checked here, nor by the kernels."""
        cu_q, cu_k = torch.tensor([q_ends, k_ends], dtype=torch.int32, device=device)
        lengths = ((end - first for first, end in itertools.pairwise(ends)) for ends in (q_ends, k_ends))
        max_q, max_k = (max(each, default=0) for each in lengths)
        return Packed(cu_q, cu_k, max_q, max_k, q_ends[-1], k_ends[-1], lower_right)

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.cu_q.shape[0] - 1


class Plan(NamedTuple):
    """How the kernels take a call. It holds none of the call's inputs.

    Attributes:
        forward: the compilation of the forward pass.
        splits: ranges of keys, for kernels for few query rows only.
        gradients: the compilations for the gradients of query, and of key and value, where they will be wanted.
        packed: the sequences of the call, where it holds several.
        pieces: the blocks of a forward pass that lists them.
        tail: the last rows of every head, where another kernel computes them.
        band_rows: query rows that run at a time, each band by a plan of its own; 0 = all at once.
        ranges: of keys for the gradient of query, and of queries for those of key and value: see :func:`num_ranges`.
        repeats: the launches of calls of one kind, where they are kept.
    """

    forward: Variant
    splits: int = 0
    gradients: tuple[Variant, ...] = ()
    packed: Packed | None = None
    pieces: Pieces | None = None
    tail: TailRows | None = None
    band_rows: int = 0
    ranges: tuple[int, int] = (1, 1)
    repeats: Repeats | None = None

    def repeatable(self) -> Plan:
        """This plan for calls of one kind, whose launches are kept."""
        return self._replace(repeats=Repeats())

    @property
    def is_all_at_once(self) -> bool:
        """Whether one kernel computes all gradients."""
        return [variant.kind for variant in self.gradients] == ["grad_all"]

    @property
    def variants(self) -> tuple[Variant, ...]:
        return (self.forward, *(() if self.tail is None else (self.tail.variant,)), *self.gradients)

    @property
    def unlisted(self) -> Plan:
        """This plan by the kernel that has a block for each tile of rows."""
        if self.pieces is None:
            return self
        return self._replace(forward=replace(self.forward, kind=sibling(self.forward.kind, is_even=False)), pieces=None)


def plan_call(
    call: AttentionCall,
    num_sms: int,
    capability: tuple[int, int] | None = None,
    *,
    int8: bool = False,
    for_grad: bool = False,
    packed: Packed | None = None,
    arch: str = "",
    all_at_once: bool = True,
) -> Plan:
    """The plan of a call that the kernels on plain cores can take.

    Args:
        num_sms: multiprocessors of the device.
        capability: its compute capability; None = a multiprocessor holds the blocks that kernels are compiled for.
        arch: of AMD's devices, as :func:`..geometry.amd.kernel_arch` says it.
        all_at_once: one kernel may compute all gradients, where it is the faster way.
    """
    if int8:
        return Plan(variant_of(call, "int8", arch))
    gradients: tuple[Variant, ...] = plain_gradients(call, arch) if for_grad else ()
    ranges = (1, 1) if packed else _gradient_ranges(call, gradients, num_sms, capability)
    at_once = variant_of(call, "grad_all", arch)
    if for_grad and all_at_once and at_once.exists:
        places = num_sms * resident_blocks(at_once, capability)
        if is_faster_at_once(Shape.of(call, packed), at_once.geometry, places, ranges):
            gradients, ranges = (at_once,), (1, 1)
    whole, split = (variant_of(call, kind, arch) for kind in forward_kinds(call))
    if packed is not None:
        return Plan(whole, 0, gradients, packed)
    places = num_sms * resident_blocks(split, capability)
    splits = num_splits(call, whole.geometry, split.geometry, num_sms, places)
    tail = tail_rows(call, whole, variant_of(call, RANGES, arch), num_sms) if arch and not splits else None
    return Plan(split if splits else whole, splits, gradients, tail=tail, ranges=ranges)


def variant_of(call: AttentionCall, kind: str, arch: str = "") -> Variant:
    """The compilation on plain cores, of a kind, that takes a call whose head_dims are in the table; ``arch``: on AMD's
    devices."""
    return _variant(kind, call.head_dim, call.head_dim_v, call.query.dtype, _mask_kind(call), arch)


@functools.lru_cache(maxsize=4096)
def _variant(kind: str, head_dim: int, head_dim_v: int, dtype: torch.dtype, mask: str, arch: str) -> Variant:
    is_int8 = kind == "int8"
    dim: Any = table_dim(head_dim, head_dim_v, INT8_HEAD_DIMS if is_int8 else HEAD_DIMS)
    padded = not is_int8 and not head_dim == head_dim_v == dim
    return Variant(kind, dim, str(dtype).removeprefix("torch."), mask, padded, arch)


def forward_kinds(call: AttentionCall) -> tuple[str, str]:
    """The kinds for a call's output: with one block per tile of rows, and with the keys in ranges."""
    is_capped = call.softcap is not None or call.sinks is not None
    return ("capped", "capped_split") if is_capped else ("forward", "split")


def plain_gradients(call: AttentionCall, arch: str = "") -> tuple[Variant, Variant]:
    """The compilations for the gradients of query, and of key and value, that sum each in one order."""
    return variant_of(call, "grad_query", arch), variant_of(call, "grad_key_value", arch)


def _mask_kind(call: AttentionCall) -> str:
    """One of MASKS."""
    mask = call.attn_mask
    if mask is None:
        # Scores with such a scale are scaled before their maximum is taken, as those with a float mask are.
        return "none" if call.scale > 0 else "float"
    return "bool" if mask.dtype == torch.bool else "float"


def table_dim(head_dim: int, head_dim_v: int, table: tuple[int, ...] = HEAD_DIMS) -> int | None:
    """The smallest head_dim of the table that both fit into, or None."""
    return next((d for d in table if max(head_dim, head_dim_v) <= d), None)


@functools.lru_cache(maxsize=1024)
def resident_blocks(variant: Variant, capability: tuple[int, int] | None) -> int:
    """Blocks of a kernel that a multiprocessor of this compute capability holds: those that it is compiled for, as far
    as shared memory suffices. None = that is not known, and suffices."""
    known = () if capability is None or variant.arch else capability
    found = _SHARED_KIB.get(known, _SHARED_KIB.get(known[:1]))
    if found is None or capability is None:
        return variant.geometry.blocks
    of_block = -(-variant.tile_bytes // 256) * 256 + (1024 if capability >= (8, 0) else 0)
    return max(1, min(variant.geometry.blocks, (found << 10) // of_block))


def num_splits(call: AttentionCall, plain: AnyGeometry, split: AnyGeometry, num_sms: int, places: int) -> int:
    """Into how many ranges the keys are cut by the kernel for few query rows, so that they still fill the device; 0 =
    the plain kernel takes the call.

    A tile of that kernel is small and holds the queries of all heads of a group, one of the plain kernel those of one
    head: the one that has less of its tiles empty wins, at the speed that a full tile has. ``places``: blocks of the
    kernel for few query rows that the device holds at a time."""
    tokens, groups = call.seq_len_q, call.groups
    is_small = _SPLIT_SPEED * _fullness(groups * tokens, split.rows) > _fullness(tokens, plain.rows)
    batch_size = call.batch_size
    blocks = batch_size * call.num_heads * -(-tokens // plain.rows)
    if 2 * blocks > num_sms and not is_small:
        return 0
    units = batch_size * call.num_kv_heads * -(-groups * tokens // split.rows)
    wanted = -(-places // max(1, units))
    splits = max(1, min(wanted, planned_keys(tokens, call.seq_len_kv) // (2 * split.cols), MAX_SPLITS))
    return splits if is_small or splits > 1 else 0


def planned_keys(tokens: int, keys: int) -> int:
    """The keys that a call is planned for."""
    return keys - keys % KEYS_STEP if tokens <= FEW_QUERIES and keys >= 4 * KEYS_STEP else keys


def _fullness(rows: int, tile_rows: int) -> float:
    """The share of the rows of all tiles that exist."""
    return rows / (-(-rows // tile_rows) * tile_rows)


# ---- on tensor cores -------------------------------------------------------------------------------------------------

# The speed of the kernel for few query rows in units of that of the wide one, on a full card. A warp with one tile of
# 16 rows reads twice as much shared memory for each product as one with two. The second number: one block alone on its
# multiprocessor. The third: the first on Volta at head_dim 128, by tools/models/tensor.py.
_SMALL_SPEED, _ALONE, _SMALL_ON_VOLTA = 0.65, 0.6, 0.86
# Of the kernel that lists its blocks in units of the wide one's, with masks, whose places and bits take registers, by
# tools/models/tensor.py. Without a mask it is as fast.
_LISTED_SPEED = 0.94
# What joining parts costs, in multiply-adds of a query row with a key.
_JOINING = 1 << 16
# And the small launch that makes the counters of cut tiles zero.
_ZEROING = 1 << 14
# Blocks of a banded call up to which it is worked out who has which.
_FOLLOWED = 1024


def tensor_plan(
    call: AttentionCall,
    num_sms: int,
    capability: tuple[int, int] | None,
    *,
    for_grad: bool = False,
    packed: Packed | None = None,
    arch: str = "",
) -> Plan:
    """The plan of a call that the kernels on tensor cores can take; see :func:`plan_call`."""
    generation = generation_of(capability, arch)
    assert generation is not None
    dim: Any = table_dim(call.head_dim, call.head_dim_v, generation.head_dims)
    padded, dtype = _is_padded(call, dim), str(call.query.dtype).removeprefix("torch.")

    def variant(suffix: str) -> Variant:
        return Variant(generation.name + suffix, dim, dtype, _mask_kind(call), padded, arch)

    gradients = gradient_variants(call, capability, packed=packed is not None, arch=arch) if for_grad else ()
    if packed is not None:
        return Plan(variant("_packed"), 0, gradients, packed)
    ranges = _gradient_ranges(call, gradients, num_sms, capability)
    wide, small, even = variant(""), variant("_small"), variant("_even")
    splits, pieces = _fastest(Shape.of(call), wide, small, even, num_sms)
    if pieces is not None:
        return Plan(even, 0, gradients, pieces=pieces, ranges=ranges)
    return Plan(small if splits else wide, splits, gradients, ranges=ranges)


def gradient_variants(
    call: AttentionCall, capability: tuple[int, int] | None, *, packed: bool = False, arch: str = ""
) -> tuple[Variant, ...]:
    """The compilations for the gradients of query, and of key and value, of a call that the kernels on tensor cores
    take: on plain cores where a head_dim has none there."""
    generation = generation_of(capability, arch)
    assert generation is not None
    suffix = "_capped" * (call.softcap is not None) + "_packed" * packed
    kinds = [f"{generation.name}_{name}{suffix}" for name in ("grad_query", "grad_key_value")]
    dim = table_dim(call.head_dim, call.head_dim_v, generation.gradient_head_dims)
    if dim is None:
        return plain_gradients(call, arch)
    padded = _is_padded(call, dim)
    return tuple(Variant(kind, dim, "float16", _mask_kind(call), padded) for kind in kinds)


def _is_padded(call: AttentionCall, dim: int) -> bool:
    whole_pieces = all(rows_are_readable(t, 8) for t in (call.query, call.key, call.value))
    return not (call.head_dim == call.head_dim_v == dim and whole_pieces)


class Shape(NamedTuple):
    """The sizes of a call that decide which kernel takes it: ``groups`` query heads for each key/value head, and the
    band, where query i sees keys i + low ... i + high; None = it has none."""

    batch: int
    heads: int
    groups: int
    tokens: int
    keys: int
    band: tuple[int, int] | None
    has_mask: bool

    @staticmethod
    def of(call: AttentionCall, packed: Packed | None = None) -> Shape:
        """``packed``: as if all its sequences were the longest."""
        tokens, keys, band = call.seq_len_q, call.seq_len_kv, None
        if call.has_band:
            low = -tokens - keys if call.left is None else call.offset - call.left
            band = low, tokens + keys if call.right is None else call.offset + call.right
        elif call.attn_mask is None:
            keys = planned_keys(tokens, keys)
        has_mask = call.attn_mask is not None
        shape = Shape(call.batch_size, call.num_heads, call.groups, tokens, keys, band, has_mask)
        return shape._replace(batch=packed.count, tokens=packed.max_q, keys=packed.max_k) if packed else shape

    @property
    def transposed(self) -> Shape:
        """The rows are keys, which meet the queries of all heads of a group."""
        band = self.band and (-self.band[1], -self.band[0])
        return self._replace(heads=self.heads // self.groups, tokens=self.keys, keys=self.tokens, band=band)


@functools.lru_cache(maxsize=1024)
def _fastest(shape: Shape, wide: Variant, small: Variant, even: Variant, num_sms: int) -> tuple[int, Pieces | None]:
    """The answer of :func:`tensor_splits`, and the blocks of the kernel that lists them where that one is faster."""
    speed = _SMALL_ON_VOLTA if (small.kind, small.head_dim) == ("volta_small", 128) else _SMALL_SPEED
    splits, best = tensor_splits(shape, wide.geometry, small.geometry, num_sms, speed)
    if even.arch or not even.exists:
        return splits, None
    own = even.geometry
    sizes = key_tiles(shape, own)
    pieces = distribute(sizes, shape.batch * shape.heads, own.cols, num_sms * own.blocks)
    if pieces is None:
        return splits, None
    cost = own.rows * own.blocks * pieces.keys / (_LISTED_SPEED if shape.has_mask else 1.0)
    cost += _ZEROING if pieces.slots else 0
    return splits, pieces if cost < 0.95 * best else None


@functools.lru_cache(maxsize=1024)
def tensor_splits(shape: Shape, wide: AnyGeometry, own: AnyGeometry, num_sms: int, speed: float) -> tuple[int, float]:
    """Return the number of ranges into which the kernel for few query rows cuts the keys, and the cost of that
    (:func:`_busiest`). Its tiles hold the queries of all heads of a group. 0 ranges: the wide kernel takes the call.
    ``speed``: of that kernel, in units of the wide one's."""
    heads = shape.batch * shape.heads
    best, chosen = _busiest(_keys_met(shape, wide, 1), heads, 1, wide, num_sms), 0
    units, met = heads // shape.groups, _keys_met(shape, own, shape.groups)
    most = min(MAX_SPLITS, max(1, shape.keys // (2 * own.cols)))
    for splits in range(1, most + 1):
        cost = _busiest(met, units, splits, own, num_sms) / speed + (_JOINING if splits > 1 else 0)
        if cost < 0.95 * best:
            best, chosen = cost, splits
        if units * len(met) * splits > own.blocks * num_sms:  # more parts only add to what is joined
            break
    return chosen, best


def _gradient_ranges(
    call: AttentionCall, gradients: tuple[Variant, ...], num_sms: int, capability: tuple[int, int] | None
) -> tuple[int, int]:
    """``ranges`` of the :class:`Plan` of a call."""
    if not gradients or call.attn_mask is not None or call.is_empty:
        return 1, 1
    of_query, of_key = (
        num_ranges(shape, variant, num_sms * resident_blocks(variant, capability), num_sms)
        for variant, shape in zip(gradients, (Shape.of(call), Shape.of(call).transposed))
    )
    return of_query, of_key


def num_ranges(shape: Shape, variant: Variant, places: int, num_sms: int) -> int:
    """Into how many ranges the columns are cut for a gradient of the rows, each with sums of its own; 1 = not at all.

    A block has a tile of rows and meets all columns that it sees. The 77 keys of cross attention are one or two tiles
    of each head, which leave most of a device idle, and under a causal rule few blocks take as long as the longest.
    Where columns are cut, batch elements are computed one after the other."""
    if shape.band is not None and not variant.on_tensor_cores:
        return 1
    sizes, heads = key_tiles(shape, variant.geometry), shape.heads
    full = heads * sum(sizes) / max(1, *sizes)  # as many blocks that see all columns have the same work
    ranges = max(1, min(int(places / max(1, full)), shape.keys // _LEAST_RANGE))
    while not variant.on_tensor_cores and shape.keys % ranges:  # there they have one length
        ranges -= 1
    fits = shape.batch * heads * len(sizes) <= num_sms
    return ranges if fits and ranges >= 2 * shape.batch else 1


@functools.lru_cache(maxsize=1024)
def is_faster_at_once(shape: Shape, geometry: AnyGeometry, places: int, ranges: tuple[int, int]) -> bool:
    """Whether the kernel of five products is faster than those of three and four, for which the columns are cut into
    ``ranges``. places: blocks that the device holds at a time."""
    of_keys = shape.transposed
    by_query, by_key = _tiles(shape, geometry, places), _tiles(of_keys, geometry, places, shape.groups)
    waits = min(-(-of_keys.tokens // geometry.rows), places / (of_keys.batch * of_keys.heads))
    # In a window each tile of keys begins behind the one before.
    at_once = max(by_key[1], -(-shape.tokens // geometry.cols)) + _HANDED_ON * waits
    return 5 * at_once < 0.95 * (3 * by_query[ranges[0] == 1] + 4 * by_key[ranges[1] == 1])


def _tiles(shape: Shape, geometry: AnyGeometry, places: int, groups: int = 1) -> tuple[float, float]:
    """Return the tiles of a place where all have as many, and of the one that has most in a launch of whole blocks;
    each tile of rows meets so many ``groups`` of columns."""
    sizes, heads = key_tiles(shape, geometry), shape.batch * shape.heads
    evenly = groups * heads * sum(sizes) / places
    if min(sizes) == max(sizes):
        return evenly, -(-heads * len(sizes) // places) * groups * sizes[0]
    return evenly, max(evenly, groups * max(sizes))


def _keys_met(shape: Shape, geometry: AnyGeometry, group: int) -> tuple[int, ...]:
    """The keys that each tile of the rows of ``group`` heads multiplies, in the order of their launch: one tile holds
    rows of several heads where they have few."""
    met = [max(0, end - begin) for begin, end in _spans(shape, geometry.rows, group)]
    is_last_first = shape.band is not None and shape.band[1] < shape.keys
    return tuple(reversed(met) if is_last_first else met)


def _spans(shape: Shape, rows: int, group: int = 1) -> Iterator[tuple[int, int]]:
    """The first key, and the end of those, that each tile of the rows of ``group`` heads meets, as ``find_place`` of
    ``tensor_call.cuh`` has them."""
    tokens, keys = shape.tokens, shape.keys
    low, high = shape.band or (-tokens - keys, tokens + keys)
    for row0 in range(0, group * tokens, rows):
        first = row0 % tokens
        last = first + min(rows, group * tokens - row0) - 1
        if last >= tokens:
            first, last = 0, tokens - 1
        yield max(0, first + low), min(keys, last + high + 1)


def key_tiles(shape: Shape, geometry: AnyGeometry) -> tuple[int, ...]:
    """Tiles of keys that each row tile of one head meets, with a mask from where its own tiles begin."""
    cols = geometry.cols
    spans = ((begin - (begin % cols if shape.has_mask else 0), end) for begin, end in _spans(shape, geometry.rows))
    return tuple(max(0, -(-(end - begin) // cols)) for begin, end in spans)


def _busiest(met: tuple[int, ...], units: int, splits: int, geometry: AnyGeometry, num_sms: int) -> float:
    """The work of the multiprocessor that has most of ``units`` times tiles that meet so many keys, in ``splits``
    ranges, in multiply-adds of a query row with a key at the speed of a full one."""
    number, longest = units * len(met) * splits, -(-max(met) // splits)
    each = -(-number // num_sms)
    keys: float
    if min(met) == max(met):  # tiles of one size come in whole rounds
        keys = each * longest
    elif each >= geometry.blocks and number <= _FOLLOWED:  # one head after the other
        parts = (-(-some // splits) for _ in range(units) for some in met for _ in range(splits))
        keys = geometry.blocks * busiest(parts, geometry.blocks * num_sms)
    else:  # many even out, and one that is left alone on its multiprocessor is faster
        keys = max(longest, units * sum(met) / num_sms)
    return geometry.rows * keys / (_ALONE if each < geometry.blocks else 1.0)
