"""A call with a ``BlockMask`` as the fused kernels take it: in bands of query rows. Each band has the keys that its
blocks leave, and their mask as a bool tensor. The kernels skip tiles of it in which nothing takes part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..call import AttentionCall, may_read
from ..call.flex_rules import BlockRule
from ..machine.device import MIB
from ..tiled.rule_bytes import rule_bytes
from ..tiled.tiles import even_ranges


def rows_at_once(call: AttentionCall, rule: BlockRule, budget_bytes: int) -> int | list[str]:
    """Query rows whose mask fits half of the budget, whole blocks of them; or why there are none."""
    if not may_read(call):
        return ["no BlockMask is written for the kernels while a graph is captured"]
    row_bytes, height = rule.num_masks * max(1, call.seq_len_kv), min(rule.block[0], max(1, call.seq_len_q))
    rows = budget_bytes // 2 // row_bytes
    if rows < height:
        needed, most = height * row_bytes / MIB, budget_bytes / 2 / MIB
        return [
            f"a row of blocks of its BlockMask takes {needed:.1f} MiB, more than half of the budget, {most:.1f} MiB"
        ]
    return min(rows // height * height, max(1, call.seq_len_q))


def sample(call: AttentionCall, rule: BlockRule, rows: int) -> AttentionCall:
    """A call of the kind of all bands, with as many rows and all keys; its mask takes no memory."""
    sizes = (call.batch_size if rule.by_batch else 1, call.num_heads if rule.by_head else 1, rows, call.seq_len_kv)
    mask = call.query.new_ones((), dtype=rule.dtype).expand(sizes)
    return replace(call, query=call.query[..., :rows, :], attn_mask=mask, seq_len_q=rows)


def bands(call: AttentionCall, rule: BlockRule, rows: int) -> Iterator[tuple[AttentionCall, slice, slice]]:
    """The bands of a call: at most so many rows, as a call of their own, which rows these are, and the keys between the
    first and the last that they see. Rows that see no key are in none. To ask ``mask_mod`` takes half as much memory as
    a band's mask."""
    together = rule.num_masks * rows * call.seq_len_kv // 2 // max(1, rule_bytes(call, backward=False).asked)
    for q0, q1 in even_ranges(0, call.seq_len_q, rows, rule.block[0]):
        k0, k1 = rule.key_range((q0, q1))
        if k0 == k1:
            continue
        part = replace(
            call,
            query=call.query[..., q0:q1, :],
            key=call.key[..., k0:k1, :],
            value=call.value[..., k0:k1, :],
            attn_mask=rule.part((q0, q1), (k0, k1), together),
            seq_len_q=q1 - q0,
            seq_len_kv=k1 - k0,
            offset=call.offset + q0 - k0,
        )
        yield part, slice(q0, q1), slice(k0, k1)
