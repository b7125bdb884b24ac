"""The operators on lazy tensors. One that is not here and does not work element by element runs whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..observe.memory import leaves, mapped
from .attention import Attention
from .lazy import (
    Expanded,
    Filled,
    Flipped,
    Joined,
    Known,
    Lazy,
    Narrowed,
    Permuted,
    Pointwise,
    Rowwise,
    Viewed,
    aten,
)
from .run import BandedRun
from .store import Value
from .windows import Convolution, Moments, Resized

Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {}
_MOST_STEPS = 64  # of element by element work that is done at once


def handles(names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for operators, ``"view reshape"``, where this torch has them."""

    def note(handler: Handler) -> Handler:
        for name in names.split():
            packet = getattr(aten, name, None)
            if packet is not None:
                HANDLERS[packet] = handler
        return handler

    return note


def _like(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an operator on ``meta``."""

    def like(leaf: Any) -> Any:
        return leaf.like if isinstance(leaf, Lazy) else leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    args, kwargs = mapped(like, (args, kwargs))
    return func(*args, **kwargs)


def _with_steady_weights(run: BandedRun, node: Lazy, args: Any, kind: type[Tensor] = nn.Parameter) -> Lazy:
    """Compute a node at once where its weights, the tensors of this kind among its arguments, may be others as soon as
    their layer has been called: a hook may write to them, or a host has made them for this call."""
    weights = (leaf for leaf in leaves(args) if isinstance(leaf, kind))
    if any(not isinstance(weight, nn.Parameter) or id(weight) in run.unsteady for weight in weights):
        run.evaluate(node)
    return node


def pointwise(run: BandedRun, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator that works element by element."""
    like = _like(func, args, kwargs)
    if not isinstance(like, Tensor):
        return NotImplemented
    node = Pointwise(like, func, args, kwargs)
    for each in node.inputs:
        if each.is_pending and each.readers > 1:
            run.evaluate(each)
    if node.steps > _MOST_STEPS or (len(node.inputs) > 1 and node.leaf_bytes() > 3 * node.nbytes):
        run.evaluate(node)
    return _with_steady_weights(run, node, args)


def rowwise(
    run: BandedRun,
    node: Lazy,
    func: Any,
    args: tuple,
    kwargs: dict[str, Any],
    dims: Sequence[Any],
    *,
    heavy: bool = False,
) -> Lazy:
    """An operator that treats ranges of some dimensions of its input on their own; see :class:`.lazy.Rowwise`."""
    run.settled(node)
    like = _like(func, args, kwargs)
    found = Rowwise(like[0] if isinstance(like, tuple) else like, func, args, kwargs, dims, heavy=heavy)
    return _with_steady_weights(run, found, args)


# ---- the same numbers under other shapes -----------------------------------------------------------------------------


def _view(run: BandedRun, node: Lazy, of_tensor: Callable[[Tensor], Tensor], of_node: Callable[[], Lazy]) -> Lazy:
    """A view: of the value where there is one, else of what is still to be computed."""
    value = run.settled(node).value
    if value is not None:
        with contextlib.suppress(RuntimeError):  # these strides may have no such view
            tensor = of_tensor(value.tensor)
            return Known(of_node().like, Value(tensor, value.owner, on_host=value.on_host))
    return of_node()


@handles("view _unsafe_view reshape _reshape_alias")
def _viewed(run: BandedRun, func: Any, node: Lazy, shape: Sequence[int], *_: Any) -> Lazy:
    sizes = list(node.like.contiguous().view(list(shape)).shape)
    return _view(run, node, lambda t: t.view(sizes), lambda: Viewed(node, sizes))


@handles("squeeze unsqueeze")
def _squeezed(run: BandedRun, func: Any, node: Lazy, *args: Any) -> Lazy:
    sizes = list(func(node.like, *args).shape)
    return _view(run, node, lambda t: func(t, *args), lambda: Viewed(node, sizes))


@handles("permute")
def _permuted(run: BandedRun, func: Any, node: Lazy, dims: Sequence[int]) -> Lazy:
    return _view(run, node, lambda t: t.permute(*dims), lambda: Permuted(node, dims))


@handles("transpose t")
def _transposed(run: BandedRun, func: Any, node: Lazy, first: int = 0, second: int = -1) -> Lazy:
    order = list(range(node.like.dim()))
    order[first], order[second] = order[second], order[first]
    return _permuted(run, func, node, order)


def _narrowed(run: BandedRun, node: Lazy, dim: int, start: int, stop: int, step: int = 1) -> Lazy:
    if (start, stop, step) == (0, node.size(dim), 1):
        return node
    dim %= node.like.dim()
    index = tuple([*[slice(None)] * dim, slice(start, stop, step)])
    return _view(run, node, lambda t: t[index], lambda: Narrowed(node, dim, start, stop, step))


@handles("slice")
def _slice(
    run: BandedRun, func: Any, node: Lazy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Lazy:
    first, last, _ = slice(start, end).indices(node.size(dim))
    return _narrowed(run, node, dim, first, max(first, last), step)


@handles("select")
def _select(run: BandedRun, func: Any, node: Lazy, dim: int, index: int) -> Lazy:
    index %= node.size(dim)
    return _squeezed(run, aten.squeeze.dim, _narrowed(run, node, dim, index, index + 1), dim)


@handles("split split_with_sizes")
def _split(run: BandedRun, func: Any, node: Lazy, sizes: int | Sequence[int], dim: int = 0) -> list[Lazy]:
    total = node.size(dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [_narrowed(run, node, dim, start, start + size) for start, size in zip(starts, sizes)]


@handles("unbind")
def _unbind(run: BandedRun, func: Any, node: Lazy, dim: int = 0) -> list[Lazy]:
    return [_select(run, func, node, dim, index) for index in range(node.size(dim))]


@handles("expand")
def _expand(run: BandedRun, func: Any, node: Lazy, shape: Sequence[int], *, implicit: bool = False) -> Lazy:
    return Expanded(run.settled(node), list(shape))


@handles("repeat")
def _repeat(run: BandedRun, func: Any, node: Lazy, repeats: Sequence[int]) -> Lazy:
    missing = len(repeats) - node.like.dim()
    if missing:
        node = _viewed(run, func, node, [*[1] * missing, *node.shape])
    for dim, count in enumerate(repeats):
        if count == 0:
            node = _narrowed(run, node, dim, 0, 0)
        elif count != 1:
            node = _joined(run, [node] * count, dim)
    return node


def _joined(run: BandedRun, parts: Sequence[Any], dim: int) -> Lazy:
    nodes = [run.settled(part if isinstance(part, Lazy) else run.known(part)) for part in parts]
    nodes = [node for node in nodes if node.like.numel()] or nodes[:1]
    like = torch.cat([node.like for node in nodes], dim)
    return Joined(like, [cast(node, like.dtype) for node in nodes], dim % like.dim())


def written(run: BandedRun, node: Lazy, part: Lazy, dim: int, start: int, stop: int) -> Lazy:
    """A node of which a range is replaced by another node."""
    parts = [_narrowed(run, node, dim, 0, start), part, _narrowed(run, node, dim, stop, node.size(dim))]
    return _joined(run, [each for each in parts if each.size(dim)], dim)


def replaced(run: BandedRun, node: Lazy, source: Any) -> Lazy:
    """The content of a tensor with the shape and dtype of ``node`` after ``copy_``."""
    found = source if isinstance(source, Lazy) else run.known(source)
    if found.shape != node.shape:
        found = Expanded(run.settled(found), list(node.shape))
    return cast(found, node.like.dtype)


def cast(node: Lazy, dtype: torch.dtype) -> Lazy:
    if node.like.dtype == dtype:
        return node
    return Pointwise(node.like.to(dtype), aten._to_copy.default, (node,), {"dtype": dtype})


@handles("cat")
def _cat(run: BandedRun, func: Any, parts: Sequence[Any], dim: int = 0) -> Lazy:
    return _joined(run, parts, dim)


@handles("stack")
def _stack(run: BandedRun, func: Any, parts: Sequence[Any], dim: int = 0) -> Lazy:
    nodes = [part if isinstance(part, Lazy) else run.known(part) for part in parts]
    dim %= nodes[0].like.dim() + 1
    return _joined(run, [_squeezed(run, aten.unsqueeze.default, node, dim) for node in nodes], dim)


@handles("pixel_shuffle pixel_unshuffle")
def _pixel_shuffle(run: BandedRun, func: Any, node: Lazy, factor: int) -> Lazy:
    *outer, channels, height, width = node.shape
    if "unshuffle" in func._schema.name:
        split, order = [channels, height // factor, factor, width // factor, factor], (0, 2, 4, 1, 3)
    else:
        split, order = [channels // factor**2, factor, factor, height, width], (0, 3, 1, 4, 2)
    sizes, count = func(node.like, factor).shape, len(outer)
    node = _viewed(run, func, node, [*outer, *split])
    return _viewed(run, func, _permuted(run, func, node, [*range(count), *(count + each for each in order)]), sizes)


# ---- new numbers -----------------------------------------------------------------------------------------------------


@handles("zeros_like empty_like ones_like full_like new_zeros new_empty new_ones new_full")
def _filled(run: BandedRun, func: Any, node: Lazy, *args: Any, **kwargs: Any) -> Lazy:
    kwargs = {name: value for name, value in kwargs.items() if name == "dtype"}
    name = func._schema.name
    return Filled(func(node.like, *args, **kwargs), args[-1] if "full" in name else float("ones" in name), run.device)


# ---- windows ---------------------------------------------------------------------------------------------------------


@handles("convolution")
def _convolution(run: BandedRun, func: Any, node: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    if not isinstance(node, Lazy) or isinstance(weight, Lazy) or isinstance(bias, Lazy):
        return NotImplemented
    like = _like(func, (run.settled(node), weight, bias, *rest), {})
    return _with_steady_weights(run, Convolution(like, node, weight, bias, *rest), (weight, bias), Tensor)


@handles("constant_pad_nd")
def _constant_pad(run: BandedRun, func: Any, node: Lazy, pad: Sequence[int], value: float = 0.0) -> Lazy:
    return padded(run, node, pad, "constant", value)


@handles(" ".join(f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3)))
def _edge_pad(run: BandedRun, func: Any, node: Lazy, pad: Sequence[int]) -> Lazy:
    return padded(run, node, pad, "reflect" if "reflection" in func._schema.name else "replicate")


def padded(run: BandedRun, node: Lazy, pad: Sequence[int], mode: str, number: float = 0.0) -> Lazy:
    """A padding by ``mode`` as torch counts it: (before, after) from the last dimension on, negative where it cuts."""
    for place, (before, after) in enumerate(zip(pad[::2], pad[1::2])):
        if before or after:
            dim = node.like.dim() - 1 - place
            node = _joined(run, _padded_along(run, run.settled(node), dim, before, after, mode, number), dim)
    return node


def _padded_along(
    run: BandedRun, node: Lazy, dim: int, before: int, after: int, mode: str, number: float
) -> list[Lazy]:
    size, first, last = node.size(dim), max(before, 0), max(after, 0)

    def rows(start: int, stop: int) -> Lazy:
        return _narrowed(run, node, dim, start, stop)

    left: Lazy
    right: Lazy
    likes = [node.like.new_empty(node.shape_of(dim, 0, count)) for count in (first, last)]
    if mode == "constant":
        left, right = (Filled(like, number, run.device) for like in likes)
    elif mode == "circular":
        left, right = rows(size - first, size), rows(0, last)
    elif mode == "replicate":
        left, right = (Expanded(rows(at, at + 1), like.shape) for at, like in zip((0, size - 1), likes))
    else:
        left, right = Flipped(rows(1, first + 1), dim), Flipped(rows(size - 1 - last, size - 1), dim)
    return [left, rows(first - before, size + after - last), right]


_HALO = {"nearest": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}


@handles(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d"
)
def _upsample(run: BandedRun, func: Any, node: Lazy, size: Sequence[int] | None, *rest: Any) -> Any:
    name = func._schema.name.partition("::")[2]
    is_nearest = "nearest" in name
    if func._overloadname == "vec":  # in inference mode it comes as it was called
        scales = rest[-1] or [None] * (node.like.dim() - 2)
        if size is None:
            size = [int(given * scale) for given, scale in zip(node.shape[2:], scales)]
        func, rest = getattr(aten, name).default, (*rest[:-1], *scales)
    elif func._overloadname != "default" or size is None:
        return NotImplemented
    scales = rest if is_nearest else rest[1:]
    if not is_nearest and rest[0]:
        return NotImplemented  # align_corners: where an element comes from depends on the size of the whole
    factors = [(1, 1)] * 2
    for made, given, scale in zip(size, node.shape[2:], [*scales, *[None] * len(size)]):
        if made % given or scale not in (None, made // given):
            return NotImplemented
        factors.append((made // given, 1))

    def resized(piece: Tensor) -> Tensor:
        sizes = [given * factor for given, (factor, _) in zip(piece.shape[2:], factors[2:])]
        return func(piece, sizes, *rest)

    halo = next(halo for key, halo in _HALO.items() if key in name)
    return Resized(func(node.like, size, *rest), run.settled(node), resized, factors, halo)


@handles("avg_pool2d avg_pool3d max_pool2d_with_indices avg_pool1d max_pool2d")
def _pool(run: BandedRun, func: Any, node: Lazy, kernel: Sequence[int], *rest: Any) -> Any:
    spatial = node.like.dim() - 2
    kernel = list(kernel) * (spatial if len(kernel) == 1 else 1)
    stride = list(rest[0]) if rest and rest[0] else kernel
    stride = stride * (spatial if len(stride) == 1 else 1)
    is_plain = not any(rest[1] if len(rest) > 1 else ()) and stride == kernel
    if not is_plain or any(given % size for given, size in zip(node.shape[2:], kernel)):
        return NotImplemented

    def pooled(piece: Tensor) -> Tensor:
        out = func(piece, kernel, *rest)
        return out[0] if isinstance(out, tuple) else out

    factors = [(1, 1), (1, 1), *((1, size) for size in kernel)]
    found = Resized(pooled(node.like), run.settled(node), pooled, factors, 0)
    return (found, None) if "indices" in func._schema.name else found


# ---- norms and sums --------------------------------------------------------------------------------------------------


@handles("native_group_norm")
def _group_norm(run: BandedRun, func: Any, node: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    if not isinstance(node, Lazy) or node.like.dim() < 3:
        return NotImplemented
    batch, _, _, groups, eps = rest
    moments = Moments(batch, groups)
    run.evaluate(node, moments)
    dims = [None, None, *range(2, node.like.dim())]
    found = Rowwise(node.like, functools.partial(moments.normalised, eps), (node, weight, bias), {}, dims)
    return _with_steady_weights(run, found, (weight, bias)), None, None


@handles("native_layer_norm _fused_rms_norm")
def _layer_norm(run: BandedRun, func: Any, node: Any, shape: Sequence[int], *rest: Any) -> Any:
    if not isinstance(node, Lazy):
        return NotImplemented
    kept = node.like.dim() - len(shape)
    dims = [dim if dim < kept else None for dim in range(node.like.dim())]
    return rowwise(run, node, func, (node, shape, *rest), {}, dims), *[None] * (len(func._schema.returns) - 1)


@handles("native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit_no_training")
def _batch_norm(run: BandedRun, func: Any, node: Any, *rest: Any) -> Any:
    is_training = "no_training" not in func._schema.name and rest[4]
    if not isinstance(node, Lazy) or is_training:
        return NotImplemented
    dims = [None if dim == 1 else dim for dim in range(node.like.dim())]
    return rowwise(run, node, func, (node, *rest), {}, dims), *[None] * (len(func._schema.returns) - 1)


@handles("mean sum amax amin var std linalg_vector_norm norm any all prod logsumexp")
def _reduction(run: BandedRun, func: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    if "dim" not in names or not isinstance(node, Lazy):
        return NotImplemented
    given = dict(zip(names, (node, *args))) | kwargs
    dims = given.get("dim")
    if dims is None or dims == []:
        return NotImplemented
    rank = node.like.dim()
    gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    keeps = given.get("keepdim", False)
    places = [None if dim in gone else dim for dim in range(rank) if keeps or dim not in gone]
    if not any(place is not None and node.size(place) > 1 for place in places):
        return NotImplemented
    return rowwise(run, node, func, (node, *args), kwargs, places)


@handles("_softmax _log_softmax cumsum index_select glu")
def _along_one(run: BandedRun, func: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(node, Lazy):
        return NotImplemented
    names = [argument.name for argument in func._schema.arguments]
    rank = node.like.dim()
    along = (dict(zip(names, (node, *args))) | kwargs).get("dim", -1) % rank
    dims = [None if dim == along else dim for dim in range(rank)]
    return rowwise(run, node, func, (node, *args), kwargs, dims)


# ---- products --------------------------------------------------------------------------------------------------------


@handles("linear")
def _linear(run: BandedRun, func: Any, node: Any, weight: Any, bias: Any = None) -> Any:
    """``aten::linear``: each row on its own."""
    if not isinstance(node, Lazy) or isinstance(weight, Lazy):
        return NotImplemented
    rank = node.like.dim()
    found = rowwise(run, node, func, (node, weight, bias), {}, [*range(rank - 1), None], heavy=True)
    return _with_steady_weights(run, found, (weight, bias), Tensor)


@handles("mm bmm addmm")
def _product(run: BandedRun, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A matrix product in ranges of the rows of its left side, or of the columns of its right side."""
    *bias, left, right = args
    if kwargs or any(isinstance(each, Lazy) or each.dim() > 1 for each in bias):
        return NotImplemented
    of_batch: list[int | None] = [None] * (len(left.shape) - 2)
    if isinstance(left, Lazy):
        right = run.whole(right) if isinstance(right, Lazy) else right
        dims, heavy = [*of_batch, len(of_batch), None], left
    elif not bias:
        dims, heavy = [*of_batch, None, len(of_batch) + 1], right
    else:
        return NotImplemented
    found = rowwise(run, heavy, func, (*bias, left, right), {}, dims, heavy=True)
    return run.settled(found)


def attention(run: BandedRun, query: Any, key: Any, value: Any, attn_mask: Any, options: dict[str, Any]) -> Lazy:
    """Attention with a query, key or value that is lazy: in ranges of the query's rows, or of the batch."""
    q, k, v = (each if isinstance(each, Lazy) else run.known(each) for each in (query, key, value))
    for node in (q, k, v):
        run.evaluate(node)
    if isinstance(attn_mask, Lazy):
        attn_mask = run.whole(attn_mask)
    return run.settled(Attention(q, k, v, attn_mask, options, run.budget // 4))
