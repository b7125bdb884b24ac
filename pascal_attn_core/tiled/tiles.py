"""Tile shapes: pure arithmetic on (device facts, shapes, memory budget). No tensor, no driver call.

A step works on ``units`` key/value heads x (``q_block`` query tokens x G query heads) rows x ``kv_block`` keys. What
decides its speed:

* Shape, not size. Both matrix products run at full speed on about 1024 rows x 512 keys. Twice as many rows as keys is
  the best use of a budget, since each step reads its slice of K and V once for all its rows.
* CPU: the scores of a step should stay in a cache, and one unit at a time does that until a step gets so small that
  the cost of calling operators shows. In which cache differs from machine to machine: see :func:`_cpu_tile`.
* GPU: an operator in eager PyTorch costs some microseconds to launch, so a step must be large (millions of scores),
  and the second product (rows x Dv) needs enough rows in flight to occupy every multiprocessor. The budget is spent on
  rows first, then on keys.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from ..call.flex_rules import ASKED
from ..machine.device import LARGEST_BUFFER, MIB, DeviceInfo
from .dropout import BYTES_PER_SCORE
from .rule_bytes import NO_RULES, RuleBytes

Ranges = list[tuple[int, int]]  # first and one-past-last of each

# Scalars (maxima of norms, 0-dim constants) that a step holds beside its buffers.
_SCALAR_BYTES = 512
# Elements of the buffer through which a bool mask is written over scores on a CPU.
MASK_WORDS = 1 << 17
_ROW_STATS = 6  # row_max, row_sum, and at most four temporaries of one element per row


class Workload(NamedTuple):
    """Sizes of one call as far as tiles depend on them.

    Attributes:
        units: batch size x num_kv_heads; at most this many share a step.
        groups: query heads per key/value head.
        acc_size: bytes per element of scores and sums (4, or 8 for float64).
        copies_query, copies_kv, copies_out: blocks that have to be copied to or from a buffer, because they are of
            another dtype than the sums or cannot be viewed as one matrix.
        writes_mask: a mask, or a band, is written over the scores through a buffer.
        has_band: a causal rule or window.
        mask_keys: elements of a mask that is the same for all rows, which is looked at as a whole; 0 for others.
        dropout, causal, softcap: whether they apply.
        window: number of keys a query sees at most, or under a BlockMask on average; None without a window.
        backward: plan for the gradients: two score tiles, and blocks of gradients beside them.
        mask_grad: the gradient of a float mask is wanted.
        rules: what the caller's own functions allocate.
    """

    units: int
    groups: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    head_dim_v: int
    acc_size: int = 4
    copies_query: bool = False
    copies_kv: bool = False
    copies_out: bool = False
    writes_mask: bool = False
    has_band: bool = False
    mask_keys: int = 0
    dropout: bool = False
    causal: bool = False
    softcap: bool = False
    window: int | None = None
    backward: bool = False
    mask_grad: bool = False
    rules: RuleBytes = NO_RULES


@dataclass(frozen=True)
class TilePlan:
    """Tile shape of one call: units x q_block tokens (x groups) x kv_block tokens, and the bytes that takes.

    ``scans_mask``: whether the budget allows to look at the values of the mask.
    """

    units: int
    q_block: int
    kv_block: int
    extra_bytes: int
    scans_mask: bool = True


def step_bytes(work: Workload, units: int, q_block: int, kv_block: int) -> int:
    """Extra memory in bytes of steps of this shape, everything together."""
    rows, acc = units * work.groups * q_block, work.acc_size
    scores = rows * kv_block
    per_score = acc + (BYTES_PER_SCORE if work.dropout else 0)
    pairs = q_block * kv_block
    total = scores * (per_score + work.rules.score) + pairs * (work.has_band + work.rules.pair)
    total += work.rules.asked * min(ASKED, pairs) + work.rules.kept
    if work.writes_mask:
        total += acc * min(MASK_WORDS, scores)
    total += _ROW_STATS * rows * acc + _SCALAR_BYTES
    if work.dropout:
        # 64-bit numbers and codes of rows and keys; a causal diagonal's tiles may be wider than the others.
        total += 8 * 5 * (rows + max(kv_block, q_block * kv_block // 128))
    widest = max(work.head_dim, work.head_dim_v)
    if work.backward:
        total += scores * acc * (1 + work.mask_grad + work.softcap) + 3 * rows * acc
        copied = work.copies_query * (work.head_dim + work.head_dim_v)
        total += rows * (copied + work.head_dim + work.head_dim_v) * acc
        total += units * kv_block * (work.head_dim + work.head_dim_v) * acc * work.copies_kv
        return total
    total += rows * acc * (work.head_dim * work.copies_query + work.head_dim_v * work.copies_out)
    total += units * kv_block * acc * (widest * work.copies_kv + 1)  # and the norms of as many keys
    return total


@functools.lru_cache(maxsize=1024)
def plan_tiles(
    info: DeviceInfo,
    work: Workload,
    budget_bytes: int | None = None,
    *,
    q_block: int | None = None,
    kv_block: int | None = None,
) -> TilePlan:
    """The tile shape for one call.

    Args:
        info: the device, real or made by hand.
        work: the call's sizes.
        budget_bytes: upper bound of the extra memory; None = the device's default. Above 4 GiB it counts as 4 GiB.
        q_block, kv_block: tokens per tile if the caller wants to decide them.
    Raises:
        ValueError: not even the smallest tile, or not the tile asked for, fits the budget.
    """
    budget = info.default_budget_bytes(backward=work.backward) if budget_bytes is None else budget_bytes
    budget = min(budget, LARGEST_BUFFER)
    scan = 4 * (work.mask_keys + work.seq_len_kv) if work.mask_keys else 0  # copies as bool, and flags per key
    scans_mask = scan <= budget // 4  # a mask in float32 takes four times as much for the moment of the look
    if scans_mask:
        budget -= scan
    shape = (_gpu_shape if info.is_gpu else _cpu_shape)(info, work, budget)
    units, rows, keys = shape
    if q_block is not None:
        units, rows = 1, min(q_block, work.seq_len_q)
    if kv_block is not None:
        keys = min(kv_block, work.seq_len_kv)
    rows, keys = min(rows, max(1, info.longest_sum // work.groups)), min(keys, info.longest_sum)
    units, rows, keys = _fit(work, budget, units, rows, keys, q_block is not None, kv_block is not None)
    needed = step_bytes(work, units, rows, keys)
    if needed > budget:
        what = "the gradients in tiles" if work.backward else "tiles"
        raise ValueError(
            f"budget_mib must be at least {needed / MIB:.3f} for {what} of {rows} x {keys} tokens with head_dim "
            f"{work.head_dim}, got {budget / MIB:.3f}"
        )
    return TilePlan(units, rows, keys, needed + scan * scans_mask, scans_mask)


def _fit(
    work: Workload, budget: int, units: int, q_block: int, kv_block: int, keep_q: bool, keep_kv: bool
) -> tuple[int, int, int]:
    """Halve units, then the longer side, until the step fits; a side the caller chose stays."""
    while step_bytes(work, units, q_block, kv_block) > budget:
        rows = q_block * work.groups
        if units > 1:
            units = (units + 1) // 2
        elif not keep_q and q_block > 1 and (rows >= 2 * kv_block or keep_kv or kv_block == 1):
            q_block = (q_block + 1) // 2
        elif not keep_kv and kv_block > 1:
            kv_block = (kv_block + 1) // 2
        elif not keep_q and q_block > 1:
            q_block = (q_block + 1) // 2
        else:
            break
    return units, q_block, kv_block


_LARGE = (1024, 512)
_LARGE_L2 = 1 << 20  # from here on half of it holds a tile that is large enough for both products
_SHORT_KEYS = 1024  # up to here all keys fit one tile: no running maximum, no second pass over the sums
_SMALL_STEP = 1 << 17  # scores; below it the operators' call cost shows, and units are batched


@functools.lru_cache(maxsize=16)
def _cpu_tile(info: DeviceInfo) -> tuple[int, int]:
    """Query rows and keys of a tile on a CPU, for calls that have as many of both.

    A large tile is best for the matrix products, and its scores pass through a cache that several cores share. A core's
    own second-level cache is taken if it has 2 MiB or more. Half of it then holds the scores of a tile on which both
    products still run well; the other half is for Q, K, V and the sums.
    """
    if info.core_l2_bytes < 2 * _LARGE_L2:
        return _LARGE
    bits = min(info.core_l2_bytes // 2 // 4, math.prod(_LARGE)).bit_length() - 1
    return 1 << bits - bits // 2, 1 << bits // 2


def _cpu_shape(info: DeviceInfo, work: Workload, budget: int) -> tuple[int, int, int]:
    tokens_q, tokens_kv, groups = max(1, work.seq_len_q), max(1, work.seq_len_kv), work.groups
    rows, keys = _cpu_tile(info)
    if work.window is not None:
        # A tile of R rows covers R + window keys, of which window are useful to each row; best all of them at once.
        rows = min(rows, max(128, _power_of_two_below(work.window // 4)))
        keys = max(keys, min(_SHORT_KEYS, -(-(rows + work.window) // 64) * 64))
    while step_bytes(work, 1, max(1, rows // groups), keys) > budget and rows * keys > 1024:
        if rows >= 2 * keys:
            rows //= 2
        else:
            keys //= 2
    q_block = max(1, min(tokens_q, rows // groups))
    if tokens_kv <= _SHORT_KEYS and step_bytes(work, 1, q_block, tokens_kv) <= budget:
        keys = tokens_kv
    elif q_block * groups < rows:
        keys = max(keys, rows * keys // (q_block * groups) // 64 * 64)
    keys = min(keys, tokens_kv)
    units = 1
    if q_block * groups * keys < _SMALL_STEP:
        units = max(1, min(work.units, budget // 2 // step_bytes(work, 1, q_block, keys)))
    if work.rules != NO_RULES:  # much of the cost of a rule is the same for one head and for several
        shared = step_bytes(work, 0, q_block, keys)
        units = max(1, min(work.units, (budget - shared) // (step_bytes(work, 1, q_block, keys) - shared)))
    return units, q_block, keys


_GEMM_TILE_ROWS = 128
_GPU_STEP = 1 << 22  # scores; less does not pay for the launches of a step


def _gpu_shape(info: DeviceInfo, work: Workload, budget: int) -> tuple[int, int, int]:
    tokens_q, tokens_kv, groups = max(1, work.seq_len_q), max(1, work.seq_len_kv), work.groups
    all_rows = max(1, work.units) * groups * tokens_q
    # Two waves of blocks of 128 rows each for the second product, whose output is only head_dim_v wide; with few keys
    # as many rows as make a step large.
    rows_wanted = max(info.num_sms * 2 * _GEMM_TILE_ROWS, _GPU_STEP // tokens_kv)
    rows_wanted = max(_GEMM_TILE_ROWS, min(all_rows, rows_wanted))
    if work.window is not None:
        rows_wanted = min(rows_wanted, max(1, work.units) * groups * max(128, _power_of_two_below(work.window)))
    # Few rows: let several units share the step. Many: as many tokens of few units as make up the rows.
    q_block = max(1, min(tokens_q, max(rows_wanted // groups, 1)))
    units = max(1, min(work.units, rows_wanted // (q_block * groups)))
    score_bytes = budget * 3 // 4
    keys = score_bytes // (work.acc_size * units * q_block * groups)
    if keys >= tokens_kv:
        return units, q_block, tokens_kv
    return units, q_block, min(tokens_kv, max(128, keys // 128 * 128))


def even_ranges(first: int, last: int, longest: int, align: int = 64) -> Ranges:
    """``first ... last`` cut into the fewest ranges of at most ``longest``, about equally long, so that no short
    remainder costs a step of its own; boundaries are multiples of ``align`` from the start where that fits."""
    total = last - first
    if total <= 0:
        return []
    count = -(-total // longest)
    length = -(-total // count)
    length = min(longest, -(-length // align) * align)
    return [(i, min(i + length, last)) for i in range(first, last, length)]


def _power_of_two_below(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)
