"""FlexAttention's two functions of (batch, head, query, key), as tiles take them: what a ``score_mod`` makes of one
tile of scores, and which keys of a tile a ``BlockMask`` leaves to whom.

Both are written for single elements. ``torch.vmap`` applies them to a tile, as FlexAttention itself does: with index
tensors that broadcast they may mean something else (``table[batch][head]``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .lazy_mask import LazyMask

Mod = Callable[..., Tensor]
Range = tuple[int, int]  # first and one-past-last
SKIPPED, PARTIAL, FULL = 0, 1, 2  # what a BlockMask says of a block
ASKED = 1 << 14  # elements for which a mask_mod is asked at once
WINDOW = "window"  # in known_of(a BlockMask): the Window that it is
_KNOWN = "_pascal_attn_known"  # attribute of a BlockMask
KEPT = 32  # blocks of different contents that are kept with a BlockMask


class ScoreRule:
    """A ``score_mod(score, batch, head, query, key)``.

    Attributes:
        captured: the tensors that it reads, wherever it finds them, and that want a gradient.
        like: a tensor of the scores' dtype, on their device.
    """

    def __init__(self, score_mod: Mod, like: Tensor):
        if not callable(score_mod):
            raise TypeError(f"score_mod must be a function, got {type(score_mod).__name__}")
        self.score_mod, self.like = score_mod, like
        by_key = torch.vmap(score_mod, (0, None, None, None, 0))
        by_query = torch.vmap(by_key, (0, None, None, 0, None))
        by_group = torch.vmap(by_query, (1, None, 0, None, None))
        # The batch too: of a plain tensor in its place table[batch] reads the value, for which a GPU waits.
        self.of_tile = torch.vmap(torch.vmap(by_group, (0, None, 0, None, None)), (None, 0, None, None, None))
        self.captured = _wanting_gradients(score_mod, like) if torch.is_grad_enabled() else []


class ScoreTile(NamedTuple):
    """A :class:`ScoreRule` at the place of one tile."""

    rule: ScoreRule
    batch: int
    heads: Range
    queries: Range
    keys: Range

    def __call__(self, scores: Tensor) -> Tensor:
        """``[u, G, tokens, keys]``, what the rule makes of scores ``[u, tokens, G, keys]``."""
        device = scores.device
        spans = ((self.batch, self.batch + 1), self.heads, self.queries, self.keys)
        batch, heads, queries, keys = (torch.arange(*span, device=device) for span in spans)
        return self.rule.of_tile(scores, batch, heads.view(scores.shape[0], scores.shape[2]), queries, keys)[0]

    def gradients(self, scores: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the scores ``[u, tokens, G, keys]`` and of each captured tensor, None where there is none,
        from that of what the rule makes of them, ``[u, G, tokens, keys]``."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            values = self(leaf)
        if not values.requires_grad:
            return (None,) * (1 + len(self.rule.captured))
        return torch.autograd.grad(values, (leaf, *self.rule.captured), grad.to(values.dtype), allow_unused=True)


class _Reads(TorchFunctionMode):
    """Notes the tensors that torch's functions are given before any of them has made them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and id(t) not in self.made]
        result = function(*args, **(kwargs or {}))
        self.made.update((id(t), t) for t in tree_leaves(result))
        self.found.update((id(t), t) for t in given)
        return result


def _wanting_gradients(score_mod: Mod, like: Tensor) -> list[Tensor]:
    """The tensors that the rule reads and that want a gradient: it is asked for one element, and watched. What it does
    is the same for all of them, or vmap would refuse it."""
    place = torch.zeros((), dtype=torch.int64, device=like.device)
    with _Reads() as reads:
        score_mod(like.new_zeros(()), place, place, place, place)
    return [t for t in reads.found.values() if t.requires_grad]


# ---- block masks -----------------------------------------------------------------------------------------------------


def is_block_mask(mask: object) -> bool:
    """Whether a mask is torch's ``BlockMask``. The module of that class is not imported for this, since it imports
    torch._dynamo; where there is such a mask, it is loaded."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(mask, module.BlockMask)


class _Known(NamedTuple):
    """Facts found about a BlockMask. ``of``: its functions and sizes; ``tensors``: its lists of blocks and what its
    mask_mod reads, with their versions."""

    of: tuple
    tensors: list[tuple[Tensor, int]]
    facts: dict[Any, Any]


def known_of(block_mask: Any) -> dict[Any, Any]:
    """The facts found about a BlockMask, kept with it until somebody gives it another ``mask_mod`` or other lists of
    blocks, or writes into these or into a tensor that ``mask_mod`` reads."""
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    of = (block_mask.mask_mod, tuple(block_mask.shape), *map(id, lists))
    known = getattr(block_mask, _KNOWN, None)
    if known is None or known.of != of or any(_version(t) != version for t, version in known.tensors):
        with _Reads() as reads:
            if 0 not in block_mask.shape:
                first = torch.zeros(1, dtype=torch.int64, device=lists[0].device)
                mask_of(block_mask.mask_mod)(0, 0, first, first)
        tensors = [t for t in (*lists, *reads.found.values()) if t is not None]
        known = _Known(of, [(t, _version(t)) for t in tensors], {})
        setattr(block_mask, _KNOWN, known)
    return known.facts


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def block_rule(block_mask: Any, shape: tuple[int, ...]) -> BlockRule:
    """The mask of a call of shape (B, Hq, L, S). It is kept with the BlockMask, whose lists of blocks are read once.

    Raises:
        ValueError: the BlockMask was made for other sizes.
    """
    if len(shape) != 4:
        raise ValueError(f"with a BlockMask query must be [B, Hq, L, D], got {len(shape)} dimensions")
    known = known_of(block_mask)
    rule = known.get(shape)
    if rule is None:
        rule = known[shape] = BlockRule(block_mask, shape)
    return rule


class BlockRule(LazyMask):
    """A ``BlockMask`` of torch: blocks that it skips and blocks that it leaves whole are known without asking its
    ``mask_mod``.

    Attributes:
        states: SKIPPED, PARTIAL or FULL of each block, int8 ``[B or 1, Hq or 1, rows, columns]`` on the CPU.
        block: query tokens and keys of a block.
        window: the number of keys that the blocks of a row leave, on average.
        by_batch, by_head: the mask differs between batch elements, between heads.
        kept_bytes: memory that known blocks will take.
    """

    def __init__(self, block_mask: Any, shape: tuple[int, ...]):
        device = block_mask.kv_num_blocks.device
        self.block = block_mask.BLOCK_SIZE
        is_whole = min(self.block) >= 1 << 30  # torch's own for "no mask"
        sizes, counts = tuple(block_mask.shape[-2:]), [-(-n // block) for n, block in zip(shape[2:], self.block)]
        if sizes != shape[2:] and not is_whole:
            raise ValueError(f"block_mask must be made for (L, S) = {tuple(shape[2:])}, got one for {sizes}")
        self.states = _states(block_mask, counts)
        for name, size, own in zip(("batch size", "number of heads"), shape, self.states.shape):
            if own not in (1, size):
                raise ValueError(f"the {name} of block_mask must be 1 or {size}, got {own}")
        super().__init__(shape, block_mask.mask_mod, device=device, dtype=torch.bool)
        self.window = max(1, round(float((self.states > 0).float().mean()) * shape[3])) if self.states.numel() else 1
        self.asked = mask_of(self.rule)
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._columns: dict[tuple, bytes] = {}
        self._kinds: list[Tensor] = []
        size = math.prod(self.block)
        self.kept_bytes = 0
        if size <= ASKED and device.type == "cpu":  # a GPU would wait for the comparison
            self.kept_bytes = min(KEPT, int((self.states == PARTIAL).sum())) * size
        of_first = self.states[:1], self.states[:, :1]
        self.by_batch, self.by_head = (
            bool((self.states != first).any()) or (size > 1 and reads(self.rule, index, device))
            for first, size, index in zip(of_first, shape, ("batch", "head"))
        )

    @property
    def num_masks(self) -> int:
        """How many batch elements and heads have a mask of their own."""
        return (self.shape[0] if self.by_batch else 1) * (self.shape[1] if self.by_head else 1)

    def on(self, device: torch.device) -> LazyMask:
        raise ValueError(f"block_mask must be on the device of query ({device}), got {self.device}")

    def blocks(self, batch: int, heads: Range, queries: Range, keys: Range) -> Tensor:
        """States ``[h or 1, rows, columns]`` of the blocks that a tile touches."""
        (q0, q1), (j0, j1), (rows, columns) = queries, keys, self.block
        of_batch = self.states[batch if self.states.shape[0] > 1 else 0]
        of_heads = of_batch[slice(*heads)] if of_batch.shape[0] > 1 else of_batch
        return of_heads[:, q0 // rows : -(-q1 // rows), j0 // columns : -(-j1 // columns)]

    def key_range(self, queries: Range) -> Range:
        """First and one-past-last key of the blocks that some batch element or head does not skip."""
        rows = self.states[:, :, queries[0] // self.block[0] : -(-queries[1] // self.block[0])]
        seen = (rows != SKIPPED).flatten(0, 2).any(dim=0).nonzero()
        if not len(seen):
            return 0, 0
        return int(seen[0]) * self.block[1], min((int(seen[-1]) + 1) * self.block[1], self.shape[3])

    def part(self, queries: Range, keys: Range, together: int) -> Tensor:
        """These rows and keys of the mask, bool ``[B or 1, Hq or 1, queries, keys]``. ``together``: elements of partial
        blocks for which ``mask_mod`` is asked at once."""
        batches, heads = range(self.shape[0] if self.by_batch else 1), range(self.shape[1] if self.by_head else 1)
        shape = (len(batches), len(heads), queries[1] - queries[0], keys[1] - keys[0])
        keep = torch.empty(shape, dtype=torch.bool, device=self.device)
        for batch in batches:
            for head in heads:
                self._fill(keep[batch, head], (batch, head), queries, keys, together)
        return keep

    def _fill(self, keep: Tensor, place: tuple[int, int], queries: Range, keys: Range, together: int) -> None:
        """One head's part of the mask ``[queries, keys]``, from the first element of a block on."""
        (batch, head), (height, width), device = place, self.block, self.device
        states, (top, left) = self.blocks(batch, (head, head + 1), queries, keys)[0], (queries[0], keys[0])
        rows, columns = (torch.arange(n, device=device) // size for n, size in zip(keep.shape, self.block))
        torch.index_select((states == FULL).to(device)[rows], 1, columns, out=keep)
        partial = (states == PARTIAL).nonzero()
        if height * width > together:
            for i, j in partial.tolist():
                own = [(n * size, min((n + 1) * size, end)) for n, size, end in zip((i, j), self.block, keep.shape)]
                asked = ((first + start, first + end) for first, (start, end) in zip((top, left), own))
                keep[slice(*own[0]), slice(*own[1])] = self._evaluate(batch, head, *asked)
            return
        for places in partial.to(device).split(together // (height * width)):
            # Beyond the end the last one is asked for again.
            i = (places[:, :1] * height + torch.arange(height, device=device)).clamp_max(keep.shape[0] - 1)
            j = (places[:, 1:] * width + torch.arange(width, device=device)).clamp_max(keep.shape[1] - 1)
            keep[i[:, :, None], j[:, None, :]] = self.asked(batch, head, i + top, j + left)

    def columns(self, batch: int, heads: Range, queries: Range, keys: Range) -> bytes:
        """The state of each column of blocks that a tile touches: PARTIAL where it is not the same for all of these
        heads and queries."""
        place = (batch % len(self.states), heads if self.states.shape[1] > 1 else None, queries)
        columns = self._columns.get(place)
        if columns is None:
            least, most = self.blocks(batch, heads, queries, (0, self.shape[3])).flatten(0, 1).aminmax(dim=0)
            columns = self._columns[place] = bytes(torch.where(least == most, least, PARTIAL).tolist())
        return columns[keys[0] // self.block[1] : -(-keys[1] // self.block[1])]

    def runs(self, batch: int, heads: Range, queries: Range, keys: Range, *, besides: int) -> list[Range]:
        """The keys, among these, of neighbouring blocks that some of these heads and queries have ``besides`` those of
        that state."""
        width, end, found = self.block[1], keys[0] // self.block[1], []
        for is_wanted, run in groupby(self.columns(batch, heads, queries, keys), besides.__ne__):
            first, end = end, end + len(list(run))
            if is_wanted:
                found.append((max(first * width, keys[0]), min(end * width, keys[1])))
        return found

    def tile(self, batch: int, heads: Range, queries: Range, keys: Range) -> Tensor:
        own = range(*heads) if self.by_head else range(heads[0], heads[0] + 1)
        parts = [self._of_head(batch, head, queries, keys) for head in own]
        return (torch.stack(parts) if len(parts) > 1 else parts[0][None]).expand(heads[1] - heads[0], -1, -1)

    def _of_head(self, batch: int, head: int, queries: Range, keys: Range) -> Tensor:
        """One head's part of a tile, ``[queries, keys]``."""
        (rows, columns), (q0, q1), (j0, j1) = self.block, queries, keys
        if q1 <= (q0 // rows + 1) * rows and self.columns(batch, (head, head + 1), queries, keys) == bytes([PARTIAL]):
            return self._ask(batch, head, queries, keys)
        states = self.blocks(batch, (head, head + 1), queries, keys)[0].tolist()
        keep = torch.empty(q1 - q0, j1 - j0, dtype=torch.bool, device=self.device)
        for i, of_row in enumerate(states, q0 // rows):
            top, bottom = max(q0, i * rows), min(q1, (i + 1) * rows)
            for j, state in enumerate(of_row, j0 // columns):
                left, right = max(j0, j * columns), min(j1, (j + 1) * columns)
                part = keep[top - q0 : bottom - q0, left - j0 : right - j0]
                if state == PARTIAL:
                    part.copy_(self._ask(batch, head, (top, bottom), (left, right)))
                else:
                    part.fill_(state == FULL)
        return keep

    def _ask(self, batch: int, head: int, queries: Range, keys: Range) -> Tensor:
        """The values of ``mask_mod`` for queries and keys of one block, bool ``[queries, keys]``."""
        (rows, columns), (length, num_keys) = self.block, self.shape[2:]
        if not self.kept_bytes:
            return self._evaluate(batch, head, queries, keys)
        top, left = queries[0] // rows * rows, keys[0] // columns * columns
        place = (batch if self.by_batch else 0, head if self.by_head else 0, top, left)
        block = self._known.get(place)
        if block is None:
            block = self._evaluate(batch, head, (top, min(top + rows, length)), (left, min(left + columns, num_keys)))
            self._keep(place, block)
        return block[queries[0] - top : queries[1] - top, keys[0] - left : keys[1] - left]

    def _keep(self, place: tuple[int, ...], block: Tensor) -> None:
        """Know a block next time. Blocks of the same contents share their memory: of a window there are two kinds."""
        if len(self._kinds) == KEPT:
            return
        for kind in self._kinds:
            if torch.equal(kind, block):
                block = kind
                break
        else:
            self._kinds.append(block)
        self._known[place] = block

    def _evaluate(self, batch: int, head: int, queries: Range, keys: Range) -> Tensor:
        """The values of ``mask_mod``, computed for a few elements at a time."""
        keep = torch.empty(queries[1] - queries[0], keys[1] - keys[0], dtype=torch.bool, device=self.device)
        for (t0, t1), (k0, k1) in pieces(keep.shape[0], keep.shape[1], ASKED):
            own = (queries[0] + t0, queries[0] + t1), (keys[0] + k0, keys[0] + k1)
            indices = (torch.arange(*span, device=self.device) for span in own)
            keep[t0:t1, k0:k1] = self.asked(batch, head, *indices)
        return keep


def reads(mask_mod: Mod, index: str, device: torch.device) -> bool:
    """Whether what a ``mask_mod`` says depends on "batch" or on "head": vmap expands what does not."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    at = ("batch", "head").index(index)
    given, dims = [place] * 4, [None] * 4
    given[at], dims[at] = place.new_zeros(2), 0  # type: ignore[call-overload]
    return torch.vmap(mask_mod, tuple(dims))(*given).stride(0) != 0


def mask_of(mask_mod: Mod) -> Callable[[int, int, Tensor, Tensor], Tensor]:
    """``mask_mod`` of one head's queries and keys: a function of (batch, head, queries, keys), int64 ``[queries]`` and
    ``[keys]``, or ``[n, queries]`` and ``[n, keys]``, that returns bool ``[queries, keys]``, or ``[n, queries, keys]``.
    """
    of_all = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        of_all = torch.vmap(of_all, dims)
    of_many = torch.vmap(of_all, (None, None, 0, 0))

    def asked(batch: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        place = (torch.full((1,), n, device=queries.device) for n in (batch, head))
        keep = (of_all if queries.dim() == 1 else of_many)(*place, queries, keys)[..., 0, 0, :, :]
        if keep.dtype != torch.bool:
            raise TypeError(f"mask_mod must return a bool, got {keep.dtype}")
        return keep

    return asked


def pieces(rows: int, columns: int, most: int) -> Iterator[tuple[Range, Range]]:
    """A rectangle in pieces of at most ``most`` elements, whole rows where they are no longer."""
    wide = min(columns, most)
    high = max(1, most // max(1, wide))
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            yield (top, min(top + high, rows)), (left, min(left + wide, columns))


def _states(block_mask: Any, sizes: list[int]) -> Tensor:
    """int8 ``[B, H, rows, columns]`` on the CPU; without data every block is taken to be partial."""
    if block_mask.kv_num_blocks.is_meta:
        return torch.full((*block_mask.kv_num_blocks.shape[:2], *sizes), PARTIAL, dtype=torch.int8)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, sizes)
    states = partial.to(torch.int8) * PARTIAL
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, sizes)
        states.masked_fill_(full, FULL)
    return states


def _listed(counts: Tensor, indices: Tensor, sizes: list[int]) -> Tensor:
    """Bool ``[B, H, rows, columns]``: the blocks among the first ``counts`` of ``indices`` of each row."""
    rows, columns = sizes
    counts, indices = counts[:, :, :rows].cpu(), indices[:, :, :rows].cpu().long()
    beyond = torch.arange(indices.shape[-1]) >= counts[..., None]
    seen = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool)
    seen.scatter_(-1, indices.masked_fill(beyond, columns), True)
    return seen[..., :columns]


# ---- masks that are a band -------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A mask under which each query sees one range of keys that moves with it: ``window`` and ``alignment`` of
    :func:`pascal_attn_core.sdpa`."""

    window: tuple[int, int]
    alignment: str


def window_of(first: Tensor, last: Tensor, num_keys: int) -> Window | None:
    """The window of queries that see all keys from ``first`` to ``last``, int64 ``[L]``; None if it is none."""
    queries, far = torch.arange(len(first), device=first.device), torch.iinfo(torch.int64).max
    if not len(first) or bool((first > last).any()):
        return None
    for alignment, offset in (("upper_left", 0), ("lower_right", num_keys - len(first))):
        own = queries + offset
        left = int(torch.where(first > 0, own - first, far).amin())
        right = int(torch.where(last < num_keys - 1, last - own, far).amin())
        if min(left, right) < 0:
            continue
        same_first = first == ((own - left).clamp_min(0) if left < far else 0)
        same_last = last == ((own + right).clamp_max(num_keys - 1) if right < far else num_keys - 1)
        if bool((same_first & same_last).all()):
            return Window((left if left < far else -1, right if right < far else -1), alignment)
    return None
