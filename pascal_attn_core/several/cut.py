"""Where a call may be cut, and its parts: some of the key/value heads, or of the query rows, each a call of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..call import AttentionCall
from ..lazy_mask import LazyMask

HEADS, ROWS = "key/value heads", "query rows"
ROW_STEP = 768  # a multiple of the blocks of rows that the kernels work in


@dataclass(frozen=True)
class Seam:
    """How a call is cut.

    Attributes:
        kind: HEADS or ROWS.
        count: units that a part may have any number of.
        step: of query tokens in a unit of ROWS; 1 otherwise.
    """

    kind: str
    count: int
    step: int = 1

    @property
    def words(self) -> str:
        """``"24 key/value heads"``, ``"22 blocks of 768 query rows"``."""
        return f"{self.count} {HEADS}" if self.kind == HEADS else f"{self.count} blocks of {self.step} {ROWS}"


def seam_of(call: AttentionCall, step: int | None = None) -> Seam:
    """By key/value heads; by query rows where there is one of them.

    Args:
        step: query tokens that must stay together; None = ROW_STEP.
    """
    if call.num_kv_heads > 1:
        return Seam(HEADS, call.num_kv_heads)
    step = step or ROW_STEP
    return Seam(ROWS, -(-call.seq_len_q // step), step)


@dataclass(frozen=True)
class Part:
    """Units ``first ... last - 1`` of a call."""

    seam: Seam
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def of_call(self, call: AttentionCall, tensors: Sequence[Tensor | None] | None = None) -> AttentionCall:
        """This part as a call.

        Args:
            tensors: its query, key, value and attn_mask; None = views of the call's own.
        """
        query, key, value, mask = self.inputs(call) if tensors is None else tensors
        assert query is not None
        assert key is not None
        assert value is not None
        if self.seam.kind == HEADS:
            sizes = {"num_heads": self.size * call.groups, "num_kv_heads": self.size}
        else:
            first, last = self._tokens(call)
            sizes = {"seq_len_q": last - first, "offset": call.offset + first if call.has_band else call.offset}
        return replace(call, query=query, key=key, value=value, attn_mask=mask, **sizes)  # type: ignore[arg-type]

    def inputs(self, call: AttentionCall) -> list[Tensor | None]:
        """Views of query, key, value and attn_mask; what has no dimension to be cut in is there as it is."""
        mask = call.attn_mask
        assert not isinstance(mask, LazyMask)
        if self.seam.kind == ROWS:
            return [
                self._rows(call, call.query),
                call.key,
                call.value,
                mask if mask is None else self._rows(call, mask),
            ]
        query, mask = (t if t is None else self.per_query(call, t, -3) for t in (call.query, mask))
        return [query, self.per_key(call, call.key), self.per_key(call, call.value), mask]

    def per_query(self, call: AttentionCall, tensor: Tensor, heads: int = -3) -> Tensor:
        """A view of a tensor that has query heads in dimension ``heads`` and query tokens in the next."""
        if self.seam.kind == ROWS:
            first, last = self._tokens(call)
            return _narrow(tensor, heads + 1, call.seq_len_q, first, last)
        return _narrow(tensor, heads, call.num_heads, self.first * call.groups, self.last * call.groups)

    def per_key(self, call: AttentionCall, tensor: Tensor) -> Tensor:
        """A view of a tensor ``[*batch, Hkv, S, ...]``."""
        if self.seam.kind == ROWS:
            return tensor
        return _narrow(tensor, -3, call.num_kv_heads, self.first, self.last)

    def _rows(self, call: AttentionCall, tensor: Tensor) -> Tensor:
        first, last = self._tokens(call)
        return _narrow(tensor, -2, call.seq_len_q, first, last)

    def _tokens(self, call: AttentionCall) -> tuple[int, int]:
        return self.first * self.seam.step, min(self.last * self.seam.step, call.seq_len_q)


def _narrow(tensor: Tensor, dim: int, size: int, first: int, last: int) -> Tensor:
    """The tensor itself where it has no such dimension, or one for all."""
    if tensor.dim() < -dim or tensor.shape[dim] != size or size == 1:
        return tensor
    return tensor.narrow(dim, first, last - first)
