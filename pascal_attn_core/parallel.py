"""One attention call over several processes, each of which holds a part of the tokens: ring attention, Ulysses, both.

    out = context_parallel_sdpa(query, key, value, ring=group)  # each process passes its own tokens

Ring (Liu, Zaharia and Abbeel 2023): the keys and values travel from process to process while the queries stay, and the
results over each part are merged by their lse. No process holds the keys of more than two at once. Ulysses (Jacobs et
al. 2023): all tokens of some heads are exchanged for some tokens of all heads, and back. Both (Fang and Zhao 2024):
Ulysses inside, the ring around it.

Every process of the groups makes the same call at the same time, under torch.distributed as the program has set it up.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .attention import sdpa, sdpa_backward, sdpa_with_lse
from .call import Arguments, AttentionCall, check_call, prepared
from .config import AttentionConfig, config_of
from .routes import choose
from .routes.derivatives import Grads

__all__ = ["context_parallel_sdpa"]

Group = Any  # torch.distributed.ProcessGroup, which a torch without distributed has not
_NO_MASK = -1  # rows and columns of a mask that is None
_UNDIVIDED = (
    "gradients of gradients cannot be taken of a call with keys of several processes; compute it in one process"
)


def context_parallel_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    ring: Group | None = None,
    ulysses: Group | None = None,
    uneven: bool = False,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention over all tokens of all processes; each process passes its own tokens and gets their output: exact, in
    O(N) memory, with gradients of query, key and value.

    The tokens lie in the order of the ranks; with both groups, rank i of the ring holds what the ranks of its Ulysses
    group hold, in their order.

    Args:
        query: ``[B, Hq, L, D]``, this process's tokens; key ``[B, Hkv, S, D]``; value ``[B, Hkv, S, Dv]``.
        attn_mask: bool (True = takes part) or float (added), broadcast to ``[B, Hq, rows, columns]``. Rows: all
            queries, this process's queries, or 1. Columns: all keys, this process's keys (the parts are then gathered,
            and there must be one row), or 1. Every process passes the same kind; of several kinds that fit on all
            processes, as where each holds one token, the first named here counts. It gets no gradient.
        is_causal: counted over all processes, query i sees the keys up to i; needs as many keys as queries.
        ring, ulysses: process groups; None = no such sharing.
        uneven: processes may hold different numbers of tokens; the numbers are exchanged first. Otherwise all must hold
            the same number, which is not checked.
        others: as in :func:`pascal_attn_core.sdpa`.
    Returns:
        ``[B, Hq, L, Dv]``; zero where a query sees no key.
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments; nothing but numbers of tokens has been sent.
        UnsupportedAttention: the route that the config names cannot take the call, for a ring with its lse; nothing
            has been sent.
        RuntimeError: another process is gone or did not answer within its group's timeout.
    """
    call, mask = _checked(query, key, value, attn_mask, scale, enable_gqa)
    query, key, value = call.query, call.key, call.value
    around, within = _Ranks.of(ring, "ring"), _Ranks.of(ulysses, "ulysses")
    heads = _Heads.of(query.shape[1], key.shape[1], within)
    choose(call, config_of(config), with_lse=around.size > 1, may_time=False)  # or raises
    share = _Share.of(query, key, mask, around, within, uneven=uneven)
    if is_causal and share.queries != share.keys:
        raise ValueError(
            f"is_causal needs as many keys as queries, got {share.keys.lengths} and {share.queries.lengths}"
        )
    if any(rows != _NO_MASK for rows in itertools.chain(*share.queries.in_mask)):
        mask = _mask_of_all(mask, share)
        if mask.shape[1] > 1:  # last: before, the processes of a Ulysses group hold all heads
            mask = mask.split(heads.query, 1)[within.rank]
    if within.size > 1:
        if heads.kept is not None:
            key, value = key[:, heads.kept], value[:, heads.kept]
        query = _Exchange.apply(query, heads.query, share.queries.of_part(share), within, True)
        key, value = (_Exchange.apply(t, heads.key, share.keys.of_part(share), within, True) for t in (key, value))
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    options |= {"enable_gqa": query.shape[1] != key.shape[1], "config": config}
    is_ring = around.size > 1
    out = _Ring.apply(query, key, value, mask, options, share) if is_ring else sdpa(query, key, value, mask, **options)
    if within.size > 1:
        out = _Exchange.apply(out, heads.query, share.queries.of_part(share), within, False)
    return out


def _checked(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, scale: float | None, enable_gqa: bool
) -> tuple[AttentionCall, Tensor | None]:
    """This process's call without its mask, and the mask with four dimensions."""
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None across processes, got {type(attn_mask).__name__}")
    query, key, value, attn_mask, *_ = prepared(Arguments(query, key, value, attn_mask))
    call = check_call(query, key, value, scale=scale, enable_gqa=enable_gqa)
    if query.dim() != 4:
        raise ValueError(f"query must be [B, heads, tokens, head_dim], got {list(query.shape)}")
    if key.shape[:2] != value.shape[:2] or query.shape[1] != call.num_heads or not key.shape[1]:
        raise ValueError(
            "key and value must have the same batch and heads across processes, and the query as many heads or more, "
            f"got query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
        )
    if isinstance(attn_mask, Tensor) and attn_mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("attn_mask must not require a gradient across processes; pass attn_mask.detach()")
    return call, None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]


# ---- who holds what --------------------------------------------------------------------------------------------------


class _Ranks(NamedTuple):
    """A group, or this process alone."""

    group: Group
    rank: int
    size: int

    @staticmethod
    def of(group: Group | None, name: str) -> _Ranks:
        if group is None:
            return _Ranks(None, 0, 1)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"{name} must be a group of this process, got one without it")
        return _Ranks(group, rank, dist.get_world_size(group))


class _Tokens(NamedTuple):
    """How many tokens each process holds, ``lengths[rank of the ring][rank of Ulysses]``, and in the same order, how
    many rows or columns each one's mask has."""

    lengths: tuple[tuple[int, ...], ...]
    in_mask: tuple[tuple[int, ...], ...]

    @property
    def parts(self) -> list[int]:
        """Number of tokens of each rank of the ring."""
        return list(map(sum, self.lengths))

    @property
    def starts(self) -> list[int]:
        """Number of the first token of each rank of the ring, and that behind the last one."""
        return [0, *itertools.accumulate(self.parts)]

    def of_part(self, share: _Share) -> tuple[int, ...]:
        """Number of tokens of each process of this one's Ulysses group."""
        return self.lengths[share.around.rank]

    def mask_holds(self) -> str:
        """``"all"``, ``"own"`` or ``"one"``: the first that fits every process's mask; "" = none does."""
        kinds = {"all": ((self.starts[-1],) * len(self.lengths[0]),) * len(self.lengths), "own": self.lengths}
        kinds["one"] = ((1,) * len(self.lengths[0]),) * len(self.lengths)
        return next((kind for kind, counts in kinds.items() if counts == self.in_mask), "")


class _Share(NamedTuple):
    """The processes of a call. around: the ring; within: Ulysses."""

    around: _Ranks
    within: _Ranks
    queries: _Tokens
    keys: _Tokens

    @staticmethod
    def of(query: Tensor, key: Tensor, mask: Tensor | None, around: _Ranks, within: _Ranks, *, uneven: bool) -> _Share:
        """Learn who holds what. What depends on it is decided from the numbers of all processes, and so by all alike.

        Args:
            mask: ``[B, Hq, rows, columns]``.
        """
        if around.size > 1 and within.size > 1:
            both = set(dist.get_process_group_ranks(around.group)) & set(dist.get_process_group_ranks(within.group))
            if len(both) > 1:  # each of them would lack the keys of the others' heads
                raise ValueError(f"ring and ulysses must have only this process in common, got {sorted(both)}")
        own = [query.shape[2], key.shape[2], *((_NO_MASK,) * 2 if mask is None else mask.shape[2:])]
        if uneven:
            part = torch.stack(_gathered(torch.tensor(own, device=query.device), within, "the numbers of tokens"))
            table = torch.stack(_gathered(part, around, "the numbers of tokens")).tolist()
        else:
            table = [[own] * within.size] * around.size
        queries, keys, rows, columns = (tuple(tuple(one[i] for one in part) for part in table) for i in range(4))
        return _Share(around, within, _Tokens(queries, rows), _Tokens(keys, columns))


class _Heads(NamedTuple):
    """Which heads each process of a Ulysses group computes: how many of the query and of the key, in order.

    kept: numbers of the key/value heads to send, where some go to several processes; None = all.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    kept: list[int] | None

    @staticmethod
    def of(query_heads: int, key_heads: int, ranks: _Ranks) -> _Heads:
        groups = query_heads // key_heads
        if key_heads >= ranks.size:
            shares = [key_heads // ranks.size + (r < key_heads % ranks.size) for r in range(ranks.size)]
            return _Heads(tuple(groups * share for share in shares), tuple(shares), None)
        each = query_heads // ranks.size
        if query_heads % ranks.size or groups % each:
            raise ValueError(
                f"ulysses needs a key/value head for each of {ranks.size} processes, or query heads that can be shared "
                f"out evenly without cutting a group, got {query_heads} query and {key_heads} key/value heads"
            )
        return _Heads((each,) * ranks.size, (1,) * ranks.size, [r * each // groups for r in range(ranks.size)])


def _mask_of_all(mask: Tensor | None, share: _Share) -> Tensor:
    """The mask of the queries of this process's Ulysses group over all keys, with as many heads as it has.

    Args:
        mask: ``[B, Hq, rows, columns]`` as this process was given it.
    """
    queries, keys = share.queries, share.keys
    rows, columns = queries.mask_holds(), keys.mask_holds()
    if mask is None or not rows or not columns:
        own_rows, own_columns = (of.of_part(share)[share.within.rank] for of in (queries, keys))
        raise ValueError(
            f"attn_mask must have {queries.starts[-1]}, {own_rows} or 1 rows and {keys.starts[-1]}, {own_columns} or 1 "
            f"columns here, and be of one kind on all processes, got {None if mask is None else list(mask.shape)}"
        )
    if columns == "own":
        if set(itertools.chain(*queries.in_mask)) != {1}:
            raise ValueError(
                f"attn_mask must hold the columns of all {keys.starts[-1]} keys, or one row, got {list(mask.shape)}: "
                "which keys of other processes this process's queries may attend to is not known"
            )
        mask = _gathered_tokens(mask, 3, keys.of_part(share), share.within)
        mask = _gathered_tokens(mask, 3, keys.parts, share.around)
    if rows == "own":
        return _gathered_tokens(mask, 2, queries.of_part(share), share.within)
    return mask.split(queries.parts, 2)[share.around.rank] if rows == "all" else mask


# ---- the ring --------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """Attention of this process's queries over the keys of all, which travel around. Algorithms 1 and 2 of
    FlashAttention-2 (Dao 2023), with processes for blocks of keys."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any], share: _Share
    ) -> Tensor:
        sums: Tensor | None = None
        lse: Tensor | None = None
        with contextlib.closing(_travelling(key, value, share)) as parts:
            for owner, pair in parts:
                seen = _seen(owner, mask, options, share)
                if seen is None:
                    continue
                part, part_lse = sdpa_with_lse(query, *pair, **seen)
                part = part.to(part_lse.dtype)
                sums, lse = (part, part_lse) if sums is None or lse is None else _merged(sums, lse, part, part_lse)
        assert sums is not None  # every query block sees its own process's keys
        assert lse is not None
        out = sums.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.given = options, share
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Grads:
        query, key, value, mask, out, lse = ctx.saved_tensors
        options, share = ctx.given

        def compute() -> Grads:
            grad_query = torch.zeros_like(query, dtype=lse.dtype)
            # the gradients of each process's keys and values follow them around, and are added to on the way
            held = [tensor.zero_() for tensor in _like(key, value, key.shape[2], lse.dtype)]
            passing: _Passing | None = None
            with contextlib.closing(_travelling(key, value, share)) as parts:
                try:
                    for owner, pair in parts:
                        found: Sequence[Tensor] = ()
                        seen = _seen(owner, mask, options, share)
                        if seen is not None:
                            found = sdpa_backward(grad_out, query, pair[0], pair[1], out, lse, **seen)
                            grad_query += found[0]
                        held = held if passing is None else passing.arrived()
                        for total, part in zip(held, found[1:]):
                            total += part
                        before = share.keys.parts[owner - 1]  # tokens of which the previous process has the gradients
                        arriving = _like(key, value, before, lse.dtype)
                        passing = _Passing(held, arriving, share.around, "passing on gradients")
                finally:
                    held = held if passing is None else passing.arrived()
            return tuple(grad.to(query.dtype) for grad in (grad_query, *held))

        with torch.no_grad():
            grads = compute()
        if torch.is_grad_enabled():  # create_graph=True, which many programs ask for and never differentiate
            sources: Any = (*grads, grad_out, query, key, value)
            grads = torch._C._functions.DelayedError(_UNDIVIDED, len(sources))(*sources)[: len(grads)]
        return *grads, None, None, None


def _merged(sums: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, from that over each and its lse; it overwrites ``sums`` and ``part``. A row that
    has no key in either stays zero."""
    new_lse = torch.logaddexp(lse, part_lse)
    nothing = new_lse == -torch.inf
    for total, total_lse in ((sums, lse), (part, part_lse)):
        total *= (total_lse - new_lse).exp_().masked_fill_(nothing, 0.0)[..., None]
    sums += part
    return sums, new_lse


def _seen(owner: int, mask: Tensor | None, options: dict[str, Any], share: _Share) -> dict[str, Any] | None:
    """The arguments of ``sdpa`` for this process's queries and the owner's keys; None = no query sees a key."""
    start, end = share.keys.starts[owner : owner + 2]
    if options["is_causal"] and owner > share.around.rank:
        return None
    is_causal = options["is_causal"] and owner == share.around.rank
    mask = mask if mask is None or mask.shape[3] == 1 else mask[..., start:end]
    return {**options, "attn_mask": mask, "is_causal": is_causal}


def _travelling(key: Tensor, value: Tensor, share: _Share) -> Generator[Any]:
    """(owner, [its keys, its values]) of every process of the ring, this one's first, while the next ones are on their
    way; the list is the same for all."""
    ranks, held = share.around, [key.contiguous(), value.contiguous()]
    for step in range(ranks.size):
        owner, following, passing = (ranks.rank - step) % ranks.size, (ranks.rank - step - 1) % ranks.size, None
        if step + 1 < ranks.size:
            what = f"passing on keys and values, step {step + 1} of {ranks.size - 1},"
            arriving = _like(key, value, share.keys.parts[following], key.dtype)
            passing = _Passing(held, arriving, ranks, what)
        try:
            yield owner, held
        finally:  # also where the computation failed: a transfer that is dropped would break the group
            if passing is not None:
                held[:] = passing.arrived()


def _like(key: Tensor, value: Tensor, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Memory for that many tokens of key and value."""
    return [t.new_empty((*t.shape[:2], tokens, t.shape[3]), dtype=dtype) for t in (key, value)]


# ---- collectives -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _named_errors(what: str, ranks: _Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        raise RuntimeError(f"{what} failed on rank {ranks.rank} of {ranks.size}: {error}") from error


class _Passing:
    """Tensors on their way to the next process of the ring while ``arriving`` are filled by the previous one."""

    def __init__(self, held: list[Tensor], arriving: list[Tensor], ranks: _Ranks, what: str):
        following, previous = (dist.get_global_rank(ranks.group, (ranks.rank + step) % ranks.size) for step in (1, -1))
        operations = [dist.P2POp(dist.isend, tensor, following, ranks.group) for tensor in held]
        operations += [dist.P2POp(dist.irecv, tensor, previous, ranks.group) for tensor in arriving]
        self.arriving, self.ranks, self.what = arriving, ranks, what
        self.held = held  # kept until it has been sent
        with _named_errors("starting a transfer", ranks):
            self.work = dist.batch_isend_irecv(operations)

    def arrived(self) -> list[Tensor]:
        """Wait for all; a second call does nothing."""
        work, self.work = self.work, []
        with _named_errors(self.what, self.ranks):
            for each in work:
                each.wait()
        self.held = []
        return self.arriving


def _gathered(tensor: Tensor, ranks: _Ranks, what: str) -> list[Tensor]:
    """The tensors of all processes, which have the same shape."""
    if ranks.size == 1:
        return [tensor]
    as_bytes = tensor.dtype == torch.bool  # not every backend sends bools
    tensor = (tensor.to(torch.uint8) if as_bytes else tensor).contiguous()
    parts = [torch.empty_like(tensor) for _ in range(ranks.size)]
    with _named_errors(f"gathering {what}", ranks):
        dist.all_gather(parts, tensor, group=ranks.group)
    return [part.bool() for part in parts] if as_bytes else parts


def _gathered_tokens(tensor: Tensor, dim: int, lengths: Sequence[int], ranks: _Ranks) -> Tensor:
    """``[B, H, rows, columns]`` of all processes, joined along ``dim``, where process r has ``lengths[r]``."""
    missing = max(lengths) - tensor.shape[dim]
    tensor = torch.nn.functional.pad(tensor, (*(0, 0) * (3 - dim), 0, missing)) if missing else tensor
    parts = _gathered(tensor, ranks, "the mask")
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths)], dim)


class _Exchange(torch.autograd.Function):
    """All heads of some tokens for some heads of all tokens, or back; the gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, heads: tuple[int, ...], tokens: tuple[int, ...], ranks: _Ranks, to_heads: bool
    ) -> Tensor:
        ctx.given = heads, tokens, ranks, to_heads
        batch, dim, rank = tensor.shape[0], tensor.shape[3], ranks.rank
        sent = tensor.split(heads, 1) if to_heads else tensor.split(tokens, 2)
        counts = tokens if to_heads else heads
        shapes = [(batch, heads[rank], n, dim) if to_heads else (batch, n, tokens[rank], dim) for n in counts]
        sizes = list(map(math.prod, shapes))
        leaving = torch.cat([part.reshape(-1) for part in sent])
        arriving = leaving.new_empty(sum(sizes))
        with _named_errors("exchanging heads for tokens", ranks):
            dist.all_to_all_single(arriving, leaving, sizes, [part.numel() for part in sent], group=ranks.group)
        parts = [part.view(shape) for part, shape in zip(arriving.split(sizes), shapes)]
        return torch.cat(parts, 2 if to_heads else 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, tokens, ranks, to_heads = ctx.given
        return _Exchange.apply(grad, heads, tokens, ranks, not to_heads), None, None, None, None
