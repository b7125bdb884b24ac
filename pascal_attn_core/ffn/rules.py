"""Rules: which operators treat every token on its own. A feed-forward module is proven by them.

A tensor that was computed from the tokens carries a :class:`TokenAxis`: where its token dimension lies. Each element
may then depend on the token of its own position only. :func:`token_axis_of_output` says where the axis is after one
more operator, or raises :class:`NotTokenwise`. An operator that is not listed here is refused: until a new operator of
torch is listed, modules that use it run whole; results are never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class NotTokenwise(Exception):
    """The module cannot be run over slices of its tokens; the message says why."""


class TokenAxis(NamedTuple):
    """Where the token dimension lies in a tensor: in dimension ``dim`` (from the left), with ``inner`` other indices
    varying faster inside that dimension. ``[B, T, C]`` has (1, 1), its view ``[B * T, C]`` (0, 1)."""

    dim: int
    inner: int = 1


class Call(NamedTuple):
    """One operator: its name without namespace and overload, its arguments by name, and the tensors that hold tokens.

    Attributes:
        axes: the axis of each argument that holds tokens, by argument name (single tensors only).
    """

    name: str
    arguments: dict[str, Any]
    axes: dict[str, TokenAxis]
    tokens: int

    @property
    def axis(self) -> TokenAxis:
        return next(iter(self.axes.values()))

    @property
    def source(self) -> Tensor:
        return self.arguments[next(iter(self.axes))]


def token_axis_of_output(func: Any, args: tuple, kwargs: dict, axis_of: Callable[[Tensor], Any], tokens: int) -> Any:
    """Where the tokens are in what ``func`` returns.

    Args:
        func: an OpOverload of which at least one argument holds tokens.
        axis_of: gives the TokenAxis of a tensor, None if it holds no tokens.
        tokens: number of tokens in this run.
    Raises:
        NotTokenwise: the operator lets one token act on another, or is not known not to.
    """
    name = func._schema.name.partition("::")[2]
    if name in _REASONS:
        raise NotTokenwise(f"{_REASONS[name]} ({name})")
    foreign = _FOREIGN.get(func._schema.name)
    if foreign is not None:
        return foreign(_bind(func, name, args, kwargs, axis_of, tokens))
    if func.namespace != "aten" or func._schema.overload_name == "out":
        raise NotTokenwise(f"operator {func} is not known to work token by token")
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return _elementwise(name, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)], axis_of)
    rule = _RULES.get(name)
    if rule is None:
        raise NotTokenwise(f"operator {func} is not known to work token by token")
    call = _bind(func, name, args, kwargs, axis_of, tokens)
    return rule(call)


def _bind(func: Any, name: str, args: tuple, kwargs: dict, axis_of: Callable, tokens: int) -> Call:
    arguments = {schema.name: schema.default_value for schema in func._schema.arguments if schema.has_default_value()}
    arguments |= {schema.name: value for schema, value in zip(func._schema.arguments, args)}
    arguments |= kwargs
    axes, in_lists = {}, False
    for argument, value in arguments.items():
        if isinstance(value, Tensor):
            axis = axis_of(value)
            if axis is not None:
                axes[argument] = axis
        elif isinstance(value, (list, tuple)):
            in_lists |= any(isinstance(leaf, Tensor) and axis_of(leaf) is not None for leaf in value)
    if in_lists:
        if name not in ("cat", "stack"):
            raise NotTokenwise(f"operator {func} is not known to work token by token")
        arguments["axes"] = [axis_of(leaf) for leaf in arguments["tensors"]]
    return Call(name, arguments, axes, tokens)


def _elementwise(name: str, tensors: Sequence[Tensor], axis_of: Callable) -> TokenAxis:
    """All tensors that hold tokens must have them in the same dimension from the right; the others must not vary along
    it."""
    found = {(axis.dim - tensor.dim(), axis.inner) for tensor in tensors if (axis := axis_of(tensor)) is not None}
    if len(found) > 1:
        raise NotTokenwise(f"combines different tokens with each other ({name})")
    (place, inner), rank = next(iter(found)), max(tensor.dim() for tensor in tensors)
    sizes = {tensor.shape[place] for tensor in tensors if axis_of(tensor) is not None}
    if len(sizes) > 1:
        raise NotTokenwise(f"combines different tokens with each other ({name})")
    for tensor in tensors:
        if axis_of(tensor) is None and _varies(tensor, place):
            raise NotTokenwise(f"combines the tokens with a tensor that differs by position ({name})")
    if name.endswith("_") and axis_of(tensors[0]) is None:
        raise NotTokenwise(f"writes tokens into a buffer of its own ({name})")
    return TokenAxis(rank + place, inner)


def _varies(tensor: Tensor, place: int) -> bool:
    return tensor.dim() >= -place and tensor.shape[place] != 1 and tensor.stride(place) != 0


# --- shapes ---


def _reshape(call: Call) -> TokenAxis:
    sizes = call.arguments.get("size") or call.arguments.get("shape")
    if not isinstance(sizes, (list, tuple)):
        raise NotTokenwise(f"reinterprets the bytes of its tokens ({call.name})")
    (dim, inner), source = call.axis, call.source
    faster = inner * math.prod(source.shape[dim + 1 :])  # elements between one token and the next
    sizes = _resolved(sizes, source.numel())
    below = 1
    for place in range(len(sizes) - 1, -1, -1):
        here = below * sizes[place]
        if below <= faster < here:
            if faster % below or here % (faster * call.tokens):
                break
            return TokenAxis(place, faster // below)
        below = here
    raise NotTokenwise(f"spreads the tokens over several dimensions ({call.name})")


def _resolved(sizes: Sequence[int], numel: int) -> list[int]:
    known = math.prod(size for size in sizes if size != -1)
    return [numel // max(known, 1) if size == -1 else size for size in sizes]


def _expand(call: Call) -> TokenAxis:
    added = len(call.arguments["size"]) - call.source.dim()
    return TokenAxis(call.axis.dim + added, call.axis.inner)


def _permute(call: Call) -> TokenAxis:
    rank = call.source.dim()
    return TokenAxis([dim % rank for dim in call.arguments["dims"]].index(call.axis.dim), call.axis.inner)


def _transpose(call: Call) -> TokenAxis:
    rank = call.source.dim()
    if call.name == "t":
        first, second = 0, rank - 1
    else:
        first, second = call.arguments["dim0"] % rank, call.arguments["dim1"] % rank
    moved = {first: second, second: first}.get(call.axis.dim, call.axis.dim)
    return TokenAxis(moved, call.axis.inner)


def _unsqueeze(call: Call) -> TokenAxis:
    place = call.arguments["dim"] % (call.source.dim() + 1)
    return TokenAxis(call.axis.dim + (place <= call.axis.dim), call.axis.inner)


def _squeeze(call: Call) -> TokenAxis:
    source, axis = call.source, call.axis
    dims = call.arguments.get("dim", list(range(source.dim())))
    gone = [d for d in (dim % source.dim() for dim in _as_list(dims)) if source.shape[d] == 1]
    if axis.dim in gone:
        raise NotTokenwise(f"drops the token dimension ({call.name})")
    return TokenAxis(axis.dim - sum(dim < axis.dim for dim in gone), axis.inner)


def _select(call: Call) -> TokenAxis:
    dim = call.arguments["dim"] % call.source.dim()
    if dim == call.axis.dim:
        raise NotTokenwise(f"picks tokens by position ({call.name})")
    return TokenAxis(call.axis.dim - (dim < call.axis.dim), call.axis.inner)


def _slice(call: Call) -> TokenAxis:
    dim = call.arguments["dim"] % call.source.dim()
    if dim != call.axis.dim:
        return call.axis
    start, end, step = (call.arguments.get(name) for name in ("start", "end", "step"))
    size = call.source.shape[dim]
    if (start or 0) == 0 and (end is None or end >= size) and (step or 1) == 1:
        return call.axis
    raise NotTokenwise(f"picks tokens by position ({call.name})")


def _pad(call: Call) -> TokenAxis:
    pad, from_right = call.arguments["pad"], call.source.dim() - 1 - call.axis.dim
    if any(pad[2 * from_right : 2 * from_right + 2]):
        raise NotTokenwise(f"shifts or pads the tokens ({call.name})")
    return call.axis


def _along_other_dims(call: Call) -> TokenAxis:
    """Splits, shifts, sorts or normalises along ``dim``, which must not hold the tokens."""
    dims = call.arguments.get("dim", call.arguments.get("dims"))
    rank = call.source.dim()
    if dims is None or not _as_list(dims) or call.axis.dim in [dim % rank for dim in _as_list(dims)]:
        raise NotTokenwise(f"works along the token dimension ({call.name})")
    if len(call.axes) > 1:
        raise NotTokenwise(f"combines different tokens with each other ({call.name})")
    return call.axis


def _unbind(call: Call) -> TokenAxis:
    axis = _along_other_dims(call)
    dim = call.arguments["dim"] % call.source.dim()
    return TokenAxis(axis.dim - (dim < axis.dim), axis.inner)


def _reduce(call: Call) -> TokenAxis:
    dims, source, axis = call.arguments.get("dim"), call.source, call.axis
    if dims is None or _as_list(dims) == []:
        raise NotTokenwise(f"takes a statistic over all tokens ({call.name})")
    gone = [dim % source.dim() for dim in _as_list(dims)]
    if axis.dim in gone:
        raise NotTokenwise(f"takes a statistic over the tokens ({call.name})")
    if call.arguments.get("keepdim", False):
        return axis
    return TokenAxis(axis.dim - sum(dim < axis.dim for dim in gone), axis.inner)


def _join(call: Call) -> TokenAxis:
    tensors, axes = call.arguments["tensors"], call.arguments["axes"]
    if None in axes or len(set(axes)) > 1 or len({t.shape[a.dim] for t, a in zip(tensors, axes)}) > 1:
        raise NotTokenwise(f"joins tokens with something else ({call.name})")
    axis, rank = axes[0], tensors[0].dim()
    if call.name == "stack":
        place = call.arguments["dim"] % (rank + 1)
        return TokenAxis(axis.dim + (place <= axis.dim), axis.inner)
    if call.arguments["dim"] % rank == axis.dim:
        raise NotTokenwise(f"works along the token dimension ({call.name})")
    return axis


def _as_list(dims: Any) -> list[int]:
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


# --- products ---


def _product(call: Call) -> TokenAxis:
    """``mm``, ``bmm`` and the like: one of the two matrices holds tokens, not in the dimension that is summed over."""
    left, right = _factors(call)
    axis = _product_axis(call, left, right)
    bias = call.arguments.get("self") if "self" not in (left, right) else None
    if bias is not None:
        holder = call.arguments[left if left in call.axes else right]
        _check_bias(call, bias, axis.dim - holder.dim(), axis.inner, holder.shape[axis.dim])
    return axis


def _check_bias(call: Call, bias: Tensor, place: int, inner: int, size: int) -> None:
    axis = call.axes.get("self")
    if axis is None:
        if _varies(bias, place):
            raise NotTokenwise(f"combines the tokens with a tensor that differs by position ({call.name})")
    elif (axis.dim - bias.dim(), axis.inner, bias.shape[axis.dim]) != (place, inner, size):
        raise NotTokenwise(f"combines different tokens with each other ({call.name})")


def _factors(call: Call) -> tuple[str, str]:
    for names in (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2")):
        if all(name in call.arguments for name in names):
            return names
    raise NotTokenwise(f"operator {call.name} is not known to work token by token")


def _product_axis(call: Call, left: str, right: str) -> TokenAxis:
    if left in call.axes and right in call.axes:
        axis, batch = call.axes[left], call.arguments[left].dim() - 2
        if axis != call.axes[right] or axis.dim >= batch:  # else each token has a product of its own
            raise NotTokenwise(f"multiplies tokens with each other ({call.name})")
        return axis
    holder = left if left in call.axes else right
    if holder not in call.axes:
        raise NotTokenwise(f"adds tokens to something else ({call.name})")
    axis, rank = call.axes[holder], call.arguments[holder].dim()
    other = call.arguments[right if holder == left else left]
    summed = rank - 1 if holder == left else rank - 2
    if axis.dim == summed:
        raise NotTokenwise(f"sums over the tokens ({call.name})")
    if axis.dim < rank - 2 and _varies(other, axis.dim - rank):
        raise NotTokenwise(f"multiplies the tokens by a tensor that differs by position ({call.name})")
    return axis


def _linear(call: Call) -> TokenAxis:
    if list(call.axes) != ["input"]:
        raise NotTokenwise(f"multiplies tokens with each other ({call.name})")
    if call.axis.dim == call.source.dim() - 1:
        raise NotTokenwise(f"sums over the tokens ({call.name})")
    return call.axis


def _scaled_linear(call: Call) -> TokenAxis:
    """A linear layer whose weight is quantised with a scale for each of its rows, and its input, if at all, likewise;
    the input is the first argument."""
    if list(call.axes) != [next(iter(call.arguments))]:
        raise NotTokenwise(f"multiplies tokens with each other ({call.name})")
    if call.axis.dim == call.source.dim() - 1:
        raise NotTokenwise(f"sums over the tokens ({call.name})")
    return call.axis


# --- normalisation, convolution ---


def _layer_norm(call: Call) -> TokenAxis:
    if list(call.axes) != ["input"]:
        raise NotTokenwise(f"combines different tokens with each other ({call.name})")
    normalized = call.arguments["normalized_shape"]
    if call.axis.dim >= call.source.dim() - len(normalized):
        raise NotTokenwise(f"takes statistics over the tokens ({call.name})")
    return call.axis


def _batch_norm(call: Call) -> TokenAxis:
    if call.arguments.get("training", False) or list(call.axes) != ["input"]:
        raise NotTokenwise(f"takes statistics over the tokens ({call.name})")
    if call.axis.dim == 1:
        raise NotTokenwise(f"has a weight for every token position ({call.name})")
    return call.axis


def _convolution(call: Call) -> TokenAxis:
    kernel = call.arguments["weight"].shape[2:]
    numbers = [*call.arguments["stride"], *(1 + p for p in call.arguments["padding"]), *kernel]
    plain = all(number == 1 for number in numbers) and not call.arguments["transposed"]
    if list(call.axes) != ["input"] or call.axis.dim == 1 or not (plain or call.axis.dim == 0):
        raise NotTokenwise(f"mixes neighbouring tokens: a convolution ({call.name})")
    return call.axis


_ELEMENTWISE = {"_to_copy", "alias", "detach", "lift_fresh", "copy_", "fill_", "zero_", "empty_like", "zeros_like",
                "ones_like", "full_like", "lift", "masked_fill_", "_prelu_kernel"}  # fmt: skip

_RULES: dict[str, Callable[[Call], TokenAxis]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), _reshape),
    **dict.fromkeys(("transpose", "t"), _transpose),
    "slice": _slice,
    "constant_pad_nd": _pad,
    "expand": _expand,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    **dict.fromkeys(
        ("split", "split_with_sizes", "unsafe_split", "chunk", "unsafe_chunk", "glu", "flip", "roll", "_softmax",
         "_log_softmax", "cumsum", "sort", "topk"),
        _along_other_dims,
    ),
    "unbind": _unbind,
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "var", "std", "var_mean", "any",
         "all", "logsumexp", "linalg_vector_norm", "norm"),
        _reduce,
    ),
    **dict.fromkeys(("cat", "stack"), _join),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_addmm_activation"), _product),
    "linear": _linear,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"), _batch_norm
    ),
    "convolution": _convolution,
}  # fmt: skip

# Operators of other libraries, and our own, by their full name.
_FOREIGN = dict.fromkeys(("quanto::qbytes_mm", "pascal_attn::int8_linear"), _scaled_linear)

_BY_VALUE = "branches on the values of the tokens"
_SELECTS = "selects, routes or places tokens by their values"
_STATISTICS = "takes statistics over the tokens"
_ATTENTION = "mixes tokens: attention"
_POOLING = "mixes neighbouring tokens: pooling"
_REASONS = {
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"), _BY_VALUE),
    **dict.fromkeys(
        ("nonzero", "masked_select", "index", "index_put", "index_put_", "_unsafe_index", "gather", "scatter",
         "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_select", "embedding", "bincount",
         "histc", "_unique2", "unique_dim", "searchsorted", "bucketize", "masked_scatter"),
        _SELECTS,
    ),
    **dict.fromkeys(
        ("native_group_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
         "miopen_batch_norm", "_batch_norm_with_update", "batch_norm_stats", "aminmax", "median", "quantile", "mode"),
        _STATISTICS,
    ),
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
         "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math"),
        _ATTENTION,
    ),
    **dict.fromkeys(
        ("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "_adaptive_avg_pool2d",
         "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool1d"),
        _POOLING,
    ),
    **dict.fromkeys(("unfold", "as_strided", "as_strided_", "im2col"), "looks at neighbouring tokens"),
}  # fmt: skip
