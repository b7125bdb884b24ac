"""FlexAttention's two functions of (batch, head, query, key), as tiles take them: what a ``score_mod`` makes of one
tile of scores, and which keys of a tile a ``BlockMask`` leaves to whom.

Both are written for single elements. ``torch.vmap`` applies them to a tile, as FlexAttention itself does: with index
tensors that broadcast they may mean something else (``table[batch][head]``).
"""

from __future__ import annotations

import dis
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .lazy_mask import LazyMask

Mod = Callable[..., Tensor]
Range = tuple[int, int]  # first and one-past-last
SKIPPED, PARTIAL, FULL = 0, 1, 2  # what a BlockMask says of a block
ASKED = 1 << 14  # elements for which a mask_mod is asked at once
WINDOW = "window"  # in known_of(a BlockMask): the Window that it is
KEPT = 32  # blocks of different contents that are known


class ScoreRule:
    """A ``score_mod(score, batch, head, query, key)``.

    Attributes:
        tensors: the tensors that it reads, wherever it finds them; ``captured``: those that want a gradient.
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
        place = torch.zeros((), dtype=torch.int64, device=like.device)
        self.tensors, value = tensors_read(score_mod, like.new_zeros(()), place, place, place, place)
        if not isinstance(value, Tensor):
            raise TypeError(f"score_mod must return a tensor, got {type(value).__name__}")
        self.captured = [t for t in self.tensors if t.requires_grad] if torch.is_grad_enabled() else []
        if value.requires_grad and not self.captured:
            raise TypeError("score_mod must read tensors that require gradients by torch's functions, got one unseen")
        self._versions = [_Version(t) for t in self.tensors if not t.is_inference()]

    def check_unwritten(self) -> None:
        if any(seen != _Version(seen.tensor) for seen in self._versions):
            raise RuntimeError("a tensor that score_mod reads was modified in place after the forward pass")


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

    def add_gradients(self, scores: Tensor, grad: Tensor, sums: Sequence[Tensor]) -> Tensor | None:
        """The gradient of the scores ``[u, tokens, G, keys]``, or None, from that of what the rule makes of them,
        ``[u, G, tokens, keys]``. Those of the captured tensors are added to ``sums``. What is only indexed gets the
        gradients of the elements that the tile has read: a table's dense gradient would be made in every tile.

        Raises:
            RuntimeError: the rule reads a tensor that has been written since the forward pass.
        """
        self.rule.check_unwritten()
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            values = self(leaf.clone())  # which the rule may change in place
        if values.grad_fn is None:
            return None
        edges = [get_gradient_edge(t) for t in self.rule.captured]
        readers = _readers(values.grad_fn, [(edge.node, edge.output_nr) for edge in edges])
        wanted = [
            [GradientEdge(node, 0) for node in nodes] if all(node.name() == _INDEX for node in nodes) else [edge]
            for edge, nodes in zip(edges, readers)
        ]
        sources: Any = (leaf, *chain.from_iterable(wanted))
        of_scores, *rest = torch.autograd.grad(values, sources, grad.to(values.dtype), allow_unused=True)
        found = iter(rest)
        for total, own in zip(sums, wanted):
            for edge, part in zip(own, found):
                if part is not None and edge.node.name() == _INDEX:
                    indices = edge.node._saved_indices  # type: ignore[attr-defined]
                    torch.ops.aten.index_put_(total, indices, part.to(total.dtype), accumulate=True)
                elif part is not None:
                    total.add_(part)
        return of_scores


_INDEX = "IndexBackward0"  # autograd's name of table[indices]


def _readers(last: Any, edges: list[tuple[Any, int]]) -> list[list[Any]]:
    """The nodes of autograd's graph that read what each of these edges stands for; ``last`` is the graph's end."""
    readers: list[list[Any]] = [[] for _ in edges]
    seen, ahead = {last}, [last]
    while ahead:
        node = ahead.pop()
        for edge in node.next_functions:
            if edge in edges:
                readers[edges.index(edge)].append(node)
            elif edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                ahead.append(edge[0])
    return readers


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


def tensors_read(function: Mod, *args: Tensor) -> tuple[list[Tensor], Any]:
    """The tensors that a function of single elements reads besides its arguments, and its result. What it does is the
    same for all elements, or vmap would refuse it."""
    with _Reads() as reads:
        result = function(*args)
    return [t for t in reads.found.values() if all(t is not given for given in args)], result


def referred(function: FunctionType) -> list[Any]:
    """The values that a function refers to: what its names stand for outside of it, and its defaults.

    Raises:
        ValueError: one of the names has no value yet.
    """
    names = _names(function.__code__)
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [function.__globals__[name] for name in names if name in function.__globals__]
    return [*values, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _names(code: CodeType) -> Iterator[str]:
    """The names that code, and the functions in it, look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


# ---- block masks -----------------------------------------------------------------------------------------------------


def has_values(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be read: it is neither on ``meta`` nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_block_mask(mask: object) -> bool:
    """Whether a mask is torch's ``BlockMask``. The module of that class is not imported for this, since it imports
    torch._dynamo; where there is such a mask, it is loaded."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(mask, module.BlockMask)


class _Version:
    """A tensor that has not been written since: equal to a later one of the same tensor while that holds."""

    def __init__(self, tensor: Tensor | None):
        self.tensor, self.version = tensor, 0 if tensor is None else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


_Facts = dict[Any, Any]
# Not attributes of the BlockMasks, which are copied, pickled and saved. Facts that follow from the lists of blocks
# ("lists") and those that follow from mask_mod too ("mask"), each with the condition under which they hold.
_facts: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, _Facts]]] = weakref.WeakKeyDictionary()


def _kept(block_mask: Any, name: str, condition: Any) -> _Facts:
    """The facts of that name about a BlockMask, empty where another condition held. None: nothing can be kept."""
    if condition is None:
        return {}
    own = _facts.setdefault(block_mask, {})
    if name not in own or own[name][0] != condition:
        own[name] = condition, {}
    return own[name][1]


def _lists_of(block_mask: Any) -> list[_Version] | None:
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return None if any(t is not None and t.is_inference() for t in lists) else [_Version(t) for t in lists]


@torch._disable_dynamo
def known_of(block_mask: Any) -> _Facts:
    """The facts found about a BlockMask, as long as they hold. Of a ``mask_mod`` that reads tensors or objects none are
    kept, since these may change unseen; nor of lists that were made in inference mode, which have no versions."""
    lists, state = _lists_of(block_mask), state_of(block_mask.mask_mod)
    is_known = lists is not None and state is not None
    return _kept(block_mask, "mask", (lists, state, tuple(block_mask.shape)) if is_known else None)


_PLAIN_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)
_IMPORT = dis.opmap["IMPORT_NAME"]


def state_of(function: object) -> list[Any] | None:
    """Return what the results of a function follow from: code, and the numbers and functions that it refers to, to be
    compared by ``==``. None if it may read anything else."""
    found: list[Any] = []
    return found if _add_state(function, found) else None


def _add_state(value: Any, found: list[Any]) -> bool:
    """Whether a value that a function refers to is plain. It is added to what was found."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "math")
    if type(value) is tuple:
        found.append(len(value))
        return all(_add_state(each, found) for each in value)
    if type(value) is not FunctionType:
        found.append((type(value), value) if type(value) in _PLAIN_VALUES else None)
        return found[-1] is not None or (
            isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (type, ModuleType, type(None)))
        )
    if any(value is each for each in found):
        return True
    found += [value, value.__code__]
    if vars(value) or _imports(value.__code__):
        return False
    try:
        return all(_add_state(each, found) for each in referred(value))
    except ValueError:
        return False


def _imports(code: CodeType) -> bool:
    """Whether code, or a function in it, imports."""
    return _IMPORT in code.co_code[::2] or any(_imports(each) for each in code.co_consts if isinstance(each, CodeType))


@torch._disable_dynamo
def block_rule(block_mask: Any, shape: tuple[int, ...]) -> BlockRule:
    """The mask of a call of shape (B, Hq, L, S). Its lists of blocks are read once.

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
        lists = _kept(block_mask, "lists", _lists_of(block_mask))
        states = lists.get(shape[2:])
        if states is None:
            states = lists[shape[2:]] = _states(block_mask, counts)
        self.states: Tensor = states
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
        asked = reads(self.rule, device) if max(shape[:2]) > 1 else (False, False)
        of_first = self.states[:1], self.states[:, :1]
        self.by_batch, self.by_head = (
            bool((self.states != first).any()) or (size > 1 and differs)
            for first, size, differs in zip(of_first, shape, asked)
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
        """These rows and keys of the mask, bool ``[B or 1, Hq or 1, queries, keys]``, from the first element of a block
        on. ``together``: elements of partial blocks for which ``mask_mod`` is asked at once."""
        lead = self.shape[0] if self.by_batch else 1, self.shape[1] if self.by_head else 1
        sizes = *lead, queries[1] - queries[0], keys[1] - keys[0]
        keep = torch.empty(sizes, dtype=torch.bool, device=self.device)
        for batch, own in enumerate(keep):
            self._fill(own, batch, 0, queries, keys, together)
        return keep

    def tile(self, batch: int, heads: Range, queries: Range, keys: Range) -> Tensor:
        sizes = heads[1] - heads[0], queries[1] - queries[0], keys[1] - keys[0]
        keep = torch.empty(sizes if self.by_head else (1, *sizes[1:]), dtype=torch.bool, device=self.device)
        self._fill(keep, batch, heads[0], queries, keys)
        return keep.expand(sizes)

    def _fill(self, keep: Tensor, batch: int, first: int, queries: Range, keys: Range, together: int = 0) -> None:
        """The mask ``[heads, queries, keys]`` of heads from ``first`` on; blocks of more elements than ``together`` are
        asked for one by one."""
        (height, width), (top, left), device = self.block, (queries[0], keys[0]), self.device
        for head, own in enumerate(keep, first):
            states = self.blocks(batch, (head, head + 1), queries, keys)[0]
            if height * width > together:
                for i, of_row in enumerate(states.tolist(), top // height):
                    rows = max(top, i * height), min(queries[1], (i + 1) * height)
                    for j, state in enumerate(of_row, left // width):
                        columns = max(left, j * width), min(keys[1], (j + 1) * width)
                        part = own[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left]
                        if state == PARTIAL:
                            part.copy_(self._ask(batch, head, rows, columns))
                        else:
                            part.fill_(state == FULL)
                continue
            places = (torch.arange(n, device=device) // size for n, size in zip(own.shape, self.block))
            torch.index_select((states == FULL).to(device)[next(places)], 1, next(places), out=own)
            for partial in (states == PARTIAL).nonzero().to(device).split(together // (height * width)):
                # Beyond the end the last one is asked for again.
                i = (partial[:, :1] * height + torch.arange(height, device=device)).clamp_max(own.shape[0] - 1)
                j = (partial[:, 1:] * width + torch.arange(width, device=device)).clamp_max(own.shape[1] - 1)
                own[i[:, :, None], j[:, None, :]] = self.asked(batch, head, i + top, j + left)

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


def reads(mask_mod: Mod, device: torch.device) -> tuple[bool, bool]:
    """Whether what a ``mask_mod`` says depends on the batch element, on the head: vmap expands what does not."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    two = place.new_zeros(2)
    of_both = torch.vmap(torch.vmap(mask_mod, (None, 0, None, None)), (0, None, None, None))
    by_batch, by_head = of_both(two, two, place, place).stride()
    return by_batch != 0, by_head != 0


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
    if not has_values(block_mask.kv_num_blocks):
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
