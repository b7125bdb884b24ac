"""The operators that treat every token by itself, and where they leave the tokens: nothing else is ever run in slices.

A rule gets one call of an operator with the shapes of all tokens. It returns where the tokens are in its results, or
None if the operator makes one token depend on another; what slices need in place of an argument it writes there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..config import Unsupported


class NotTokenwise(Unsupported):
    """The module cannot be run over slices of its tokens; the message says why."""


class Along(NamedTuple):
    """Where the tokens are in a tensor: dimension ``dim`` has ``before * tokens * after`` entries, in this order."""

    dim: int
    before: int = 1
    after: int = 1


class Later(NamedTuple):
    """In place of an argument: gives it for a part of the tokens, of values by number, first token and length."""

    get: Callable[[dict[int, Any], int, int], Any]


class Call:
    """One call of an operator: ``given``, its arguments by name; ``along``, where the tokens are in those that have
    some; ``tokens``, how many there are; ``shape``, that of the first result."""

    def __init__(self, schema: Any, args: Sequence[Any], kwargs: dict[str, Any], tokens: int, along_of: Callable):
        self.name = schema.name.removeprefix("aten::")
        self.given = {argument.name: argument.default_value for argument in schema.arguments}
        self.given.update(zip(self.given, args), **kwargs)
        self.along: dict[str, Along] = {name: a for name, value in self.given.items() if (a := along_of(value))}
        self.tokens, self.along_of = tokens, along_of
        self.shape: Sequence[int] = ()

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def dims(self) -> set[int] | None:
        """The dimensions that the operator works along; None = all."""
        dims, rank = self.given.get("dim", self.given.get("dims")), self["self"].dim()
        dims = dims if isinstance(dims, (list, tuple)) else [] if dims is None else [dims]
        return {dim % rank for dim in dims} or None

    def put_beside(self, tensor: Tensor, dim: int) -> Any:
        """A tensor without tokens, for slices, beside one that has them at ``dim``, counted from the last; None = its
        entries there belong to no token."""
        if tensor.dim() < -dim or tensor.shape[dim] == 1:
            return tensor
        is_of_tokens = tensor.shape[dim] == self.tokens  # or of the same number for each
        return Later(lambda _, start, count: tensor.narrow(dim, start, count)) if is_of_tokens else None


def along_results(call: Call, arguments: int) -> Along | None:
    """Where an operator that may be put off leaves the tokens, which are in this many of its arguments."""
    rule = rule_of(call.name)
    if rule is None or (rule is not _cat and arguments != len(call.along)):  # some are in lists
        return None
    if rule in _SEVERAL:
        return rule(call)
    name, a = next(iter(call.along.items()))
    return rule(call, a, call[name]) if name in _FIRST and len(call.along) == 1 else None


def rule_of(name: str) -> Callable[..., Along | None] | None:
    """Only operators of single entries may write to their first argument."""
    rule = RULES.get(name.removesuffix("_"))
    return rule if rule is _of_entries else RULES.get(name)


def _of_entries(call: Call) -> Along | None:
    tensors = {name: value for name, value in call.given.items() if isinstance(value, Tensor)}
    found = {(a.dim - tensors[name].dim(), a.before, a.after) for name, a in call.along.items()}
    if len(found) > 1 or any(tensor.dim() > len(call.shape) for tensor in tensors.values()):
        return None
    dim, before, after = found.pop()
    a = Along(len(call.shape) + dim, before, after)
    call.given.update((name, call.put_beside(tensors[name], dim)) for name in tensors.keys() - call.along.keys())
    return None if any(call[name] is None for name in tensors) else a


def _product(call: Call) -> Along | None:
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}.get(call.name, ("self", "mat2"))
    (one, two), rank = (call.along.pop(name, None) for name in names), len(call.shape)
    if (two and call.name.startswith("_")) or call.along.get("scale_a", one) != one or call.along.keys() - {"scale_a"}:
        return None
    if one and two:  # products of matrices that belong to one token each
        found = one if one == two and one.dim == 0 and rank == 3 else None
    else:
        found = one if one and one.dim == rank - 2 else two if two and two.dim == rank - 1 else None
    if found and call.name in ("addmm", "baddbmm"):
        call.given["self"] = call.put_beside(call["self"], found.dim - rank)
        return None if call["self"] is None else found
    return found


def _cat(call: Call) -> Along | None:
    tensors, rank, dim = call["tensors"], call["tensors"][0].dim(), call["dim"] % len(call.shape)
    alongs = [call.along_of(tensor) for tensor in tensors]
    a = next(filter(None, alongs))
    is_new = len(call.shape) > rank  # stack
    if (a.dim == dim and not is_new) or set(alongs) - {a, None} or any(tensor.dim() != rank for tensor in tensors):
        return None
    call.given["tensors"] = [t if own else call.put_beside(t, a.dim - rank) for t, own in zip(tensors, alongs)]
    return (
        None if any(tensor is None for tensor in call["tensors"]) else a._replace(dim=a.dim + (is_new and dim <= a.dim))
    )


def _convolution(call: Call, a: Along, x: Tensor) -> Along | None:
    stride, padding, n = call["stride"], call["padding"], a.dim - 2
    is_one = n >= 0 and call["weight"].shape[a.dim] == 1 == stride[n % len(stride)] and not padding[n % len(padding)]
    return a if a.dim == 0 or (is_one and not call["transposed"]) else None


def _along_others(call: Call, a: Along, x: Tensor) -> Along | None:
    dims = call.dims()
    if dims is None or a.dim in dims:
        return None
    return (
        a
        if len(call.shape) == x.dim()
        else a._replace(dim=a.dim - sum(dim < a.dim and dim in dims for dim in range(x.dim())))
    )


def _slice(call: Call, a: Along, x: Tensor) -> Along | None:
    if call.dims() == {a.dim}:  # x[:, :]
        call.given["end"] = 1 << 62
        return a if call.shape[a.dim] == x.shape[a.dim] else None
    return a


def _expand(call: Call, a: Along, x: Tensor) -> Along:
    a = a._replace(dim=a.dim + len(call["size"]) - x.dim())
    call.given["size"] = [-1 if dim == a.dim else size for dim, size in enumerate(call["size"])]
    return a


def _view(call: Call, a: Along, x: Tensor) -> Along | None:
    """The entries keep their order, so that the tokens stay where they are in it: between those before and after."""
    old, new = ([size or 1 for size in shape] for shape in (x.shape, call.shape))  # without entries, no order matters
    before, after = math.prod(old[: a.dim]) * a.before, math.prod(old[a.dim + 1 :]) * a.after
    for dim in range(len(new)) if "size" in call.given else ():  # not a view in another dtype
        outer, inner = math.prod(new[:dim]), math.prod(new[dim + 1 :])
        times, rest = divmod(before * after, outer * inner)
        if before % outer == after % inner == rest == 0 and new[dim] == times * call.tokens:
            count_of = Later(lambda _values, _start, count, times=times: times * count)  # type: ignore[misc]
            call.given["size"] = [*call.shape[:dim], count_of, *call.shape[dim + 1 :]]
            return Along(dim, before // outer, after // inner)
    return None


def _transpose(call: Call, a: Along, x: Tensor) -> Along:
    one, two = (call.given.get(name, default) % x.dim() for name, default in (("dim0", 0), ("dim1", -1)))
    return a._replace(dim={one: two, two: one}.get(a.dim, a.dim))


_SEVERAL: tuple[Callable[..., Any], ...] = (_of_entries, _product, _cat)  # tensors of tokens
_FIRST = ("self", "input", "x", "indices")  # the name of the only one, in the schemas of all others
_TABLE: dict[Callable[..., Along | None], str] = {
    _of_entries: "abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and bitwise_not  "
    "bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clone _conj copy copysign cos cosh detach div elu "
    "empty_like eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac full_like ge gelu gt "
    "hardshrink hardsigmoid hardswish hardtanh hypot isfinite isinf isnan le leaky_relu lerp lift_fresh log log10 "
    "log1p log2 log_sigmoid_forward logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill "
    "maximum minimum mish mul nan_to_num ne neg ones_like pow _prelu_kernel reciprocal relu relu6 remainder round "
    "rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub tan tanh threshold "
    "_to_copy trunc where xlogy zero zeros_like",
    _product: "mm addmm bmm baddbmm _int_mm _scaled_mm _weight_int8pack_mm _weight_int4pack_mm",
    _cat: "cat stack",
    _convolution: "convolution",
    _along_others: "all amax amin any argmax argmin cumsum _fft_c2c _fft_c2r _fft_r2c flip glu index_select "
    "_log_softmax logsumexp max mean min linalg_vector_norm prod roll select _softmax sort split split_with_sizes "
    "std sum topk unbind var var_mean",
    _slice: "slice",
    lambda call, a, x: a._replace(
        dim=a.dim - sum(dim < a.dim and x.shape[dim] == 1 for dim in call.dims() or range(a.dim))
    ): (
        "squeeze"  # a slice has two tokens at least
    ),
    _expand: "expand",
    _view: "view _unsafe_view view_copy",
    _transpose: "transpose t",
    lambda call, a, x: a if a.dim < len(call.shape) - 1 else None: "linear pascal_attn::int8_linear",
    lambda call, a, x: a if a.dim < x.dim() - len(call["normalized_shape"]) else None: (
        "native_layer_norm _fused_rms_norm"
    ),
    lambda call, a, x: None if a.dim == 1 or call["training"] else a: "native_batch_norm cudnn_batch_norm",
    lambda call, a, x: None if any(call["pad"][2 * (x.dim() - 1 - a.dim) :][:2]) else a: "constant_pad_nd",
    lambda call, a, x: a if a.dim < min(x.dim(), len(call.shape)) else None: "view_as_complex view_as_real",
    lambda call, a, x: None if call["scale_grad_by_freq"] else a: "embedding",
    lambda call, a, x: a._replace(dim=a.dim + (call["dim"] % len(call.shape) <= a.dim)): "unsqueeze",
    lambda call, a, x: a._replace(dim=[dim % x.dim() for dim in call["dims"]].index(a.dim)): "permute",
}
RULES = {name: rule for rule, names in _TABLE.items() for name in names.split()}
"""The rule of each operator, by its name."""
