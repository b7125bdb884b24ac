"""A linear layer's weight in 8 bits, in the place of its float parameter: a tensor that says it is float.

``F.linear`` with it runs in 8 bits. ``to``, ``clone``, ``detach`` and the like give another one, so that a model can be
moved, cast, copied and offloaded as ever. For every other operator it is the float matrix: the one that it was made
from where that is still there, else the one that its integers stand for. Writing into it rounds what is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from .branch import LowRank
from .product import int8_linear
from .quantize import Int8Matrix, quantize_rows
from .ways import FLOATS

Branch = Callable[[Tensor], Tensor]


class _Rest:
    """What of a weight is no tensor: the same object in copies, since graphs compare it with a copy that they keep."""

    def __init__(self, state: Any, branch: Branch | None):
        self.state, self.branch = state, branch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rest) and self.state is other.state and self.branch is other.branch

    def __hash__(self) -> int:
        return hash((id(self.state), id(self.branch)))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rest:
        return self

    def __reduce__(self) -> Any:  # graphs are stored by a hash of this; they do not depend on it
        return _Rest, (None, None)


class Int8Weight(Tensor):
    """A parameter ``[N, K]``.

    Attributes:
        matrix: its 8-bit integers, with their scales.
        holder: holds ``original``; aliases of the weight share it as they share the integers.
        follows: whether ``original`` moves along when the weight is moved or cast.
        state: of the layer that it belongs to; ``state.is_on`` False = the layer runs in float.
        branch: adds to the layer's result, in float: ``F.linear(x, w) + branch(x)``. None = nothing.
    """

    matrix: Int8Matrix
    holder: list[Tensor | None]
    follows: bool
    state: Any
    branch: Branch | None

    @staticmethod
    def __new__(
        cls,
        matrix: Any,
        dtype: torch.dtype | None = None,
        *,
        original: Tensor | None = None,
        follows: bool = False,
        state: Any = None,
        branch: Branch | None = None,
        requires_grad: bool = False,
        **_: Any,
    ) -> Int8Weight:
        # Hosts that exchange parameters make a new one of the type of the old one, from whatever tensor they kept.
        if isinstance(matrix, Int8Weight):
            return matrix
        if isinstance(matrix, Tensor):
            return nn.Parameter(matrix, requires_grad=requires_grad)  # type: ignore[return-value]
        codes = matrix.codes
        weight: Int8Weight = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype or torch.float32, device=codes.device, requires_grad=False
        )
        weight.matrix, weight.holder, weight.follows = matrix, [original], follows
        weight.state, weight.branch = state, branch
        return weight

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    @property
    def original(self) -> Tensor | None:
        """The float matrix, or None where it was given up. It may be in host memory."""
        return self.holder[0]

    @property
    def runs_in_int8(self) -> bool:
        """False = another matrix product, in float, stands in for it."""
        return self.original is None or self.state is None or self.state.is_on

    def float_matrix(self) -> Tensor:
        """The matrix in the weight's dtype, on its device, with what a branch of low rank adds."""
        matrix = self.own_matrix()
        if isinstance(self.branch, LowRank):
            added = self.branch.to(self.device).matrix()
            return (matrix.float() + added).to(self.dtype)
        return matrix

    def own_matrix(self) -> Tensor:
        """The same without the branch."""
        if self.original is not None:
            return self.original.detach().to(self.device, self.dtype)
        return self.matrix.float().to(self.dtype)

    def matrix_on(self, device: torch.device) -> Int8Matrix:
        """The integers on a device; copied there if they are elsewhere."""
        if self.matrix.codes.device == device:
            return self.matrix
        codes, scales = (t.to(device, non_blocking=True) for t in self.matrix[:2])
        return Int8Matrix(codes, scales, self.matrix.rotation)

    def like(self, matrix: Int8Matrix, dtype: torch.dtype | None = None, original: Tensor | None = None) -> Int8Weight:
        """Another one for the same layer."""
        return Int8Weight(
            matrix,
            dtype or self.dtype,
            original=original,
            follows=self.follows,
            state=self.state,
            branch=self.branch,
        )

    def write(self, values: Tensor) -> None:
        """Take other values, ``[N, K]`` of any float dtype."""
        found = quantize_rows(values.detach().to(self.device), self.matrix.rotation)
        self.matrix.codes.copy_(found.codes)
        self.matrix.scales.copy_(found.scales)
        self.branch = None if isinstance(self.branch, LowRank) else self.branch  # the values hold what it adds
        self._write_original(values)

    def _write_original(self, values: Tensor) -> None:
        old = self.original
        if old is not None:  # copies of the weight may share the tensor
            self.holder[0] = values.detach().to(old.device, old.dtype, copy=True)

    def _set_data(self, values: Tensor) -> None:
        """``weight.data = values``."""
        if not isinstance(values, Int8Weight):
            original = self.original
            if original is not None:  # it stays where it is: on the device, or in host memory
                original = values.detach().to(values.device if self.follows else original.device, copy=True)
            values = self.like(quantize_rows(values.detach(), self.matrix.rotation), values.dtype, original)
        with torch._C.DisableTorchFunctionSubclass():
            _SET_DATA(self, values)
        self.matrix, self.holder, self.follows = values.matrix, values.holder, values.follows

    # ---- what torch asks of a tensor that holds tensors ----

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # A graph is made for a layer that runs in 8 bits, or for one that does not.
        inner = ["codes", "scales"] if self.runs_in_int8 else ["codes", "scales", "original"]
        return inner, (self.matrix.rotation, self.dtype, self.runs_in_int8, _Rest(self.state, self.branch))

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Int8Weight:
        rotation, dtype, _, rest = context
        matrix = Int8Matrix(inner["codes"], inner["scales"], rotation)
        original = inner.get("original")
        return Int8Weight(matrix, dtype, original=original, state=rest.state, branch=rest.branch)

    @property
    def codes(self) -> Tensor:
        return self.matrix.codes

    @property
    def scales(self) -> Tensor:
        return self.matrix.scales

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Int8Weight({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Weight:
        if id(self) in memo:
            return memo[id(self)]
        codes, scales, rotation = self.matrix
        original = None if self.original is None else copy.deepcopy(self.original.detach(), memo)
        copied = self.like(Int8Matrix(codes.clone(), scales.clone(), rotation), original=original)
        copied.state, copied.branch = copy.deepcopy(self.state, memo), copy.deepcopy(self.branch, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is a plain parameter: a file must not depend on this package."""
        return nn.Parameter(self.float_matrix(), requires_grad=False).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func == _SET_DATA and isinstance(args[0], Int8Weight):
            return args[0]._set_data(args[1])
        with torch._C.DisableTorchFunctionSubclass():  # results are what they are, not another of us
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _views_an_ordinary_one(func, args):
            with torch.inference_mode(False), torch.no_grad():  # a view of it must be one too
                return cls.__torch_dispatch__(func, types, args, kwargs)
        mapped = _MAPPED.get(func)
        if mapped is not None and isinstance(args[0], Int8Weight):
            return mapped(func, *args, **kwargs)
        written = _written(func, args)
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        if written is None:
            return func(*plain_args, **plain_kwargs)
        values = plain_args[0].clone()  # it may be the original itself, which copies of the weight share
        func(values, *plain_args[1:], **plain_kwargs)
        written.write(values)
        return written


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear`` where one of the arguments is an Int8Weight."""
    x = input
    if not isinstance(weight, Int8Weight) or not _is_ordinary(x):
        return F.linear(*tree_map(_plain, (x, weight, bias)))
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if weight.runs_in_int8:
        bias = bias if bias is None or bias.device == x.device else bias.to(x.device)
        out = int8_linear(x, weight.matrix_on(x.device), bias)
        if weight.state is not None and not torch.compiler.is_compiling():
            weight.state.saw(x, weight)
    else:
        out = F.linear(x, weight.own_matrix().to(x.device, x.dtype), None if bias is None else bias.to(x.dtype))
    return out if weight.branch is None else out + weight.branch(x)


def _is_ordinary(x: Any) -> bool:
    """Whether a tensor's numbers are just numbers; others may mean something else to whoever made them."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        return False
    if torch.compiler.is_compiling():
        return True
    is_plain = type(x) in (Tensor, nn.Parameter, FakeTensor)
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _plain(value: Any) -> Any:
    return value.float_matrix() if isinstance(value, Int8Weight) else value


def _views_an_ordinary_one(func: Any, args: Any) -> bool:
    """Whether the result is a view of a weight that was not made in inference mode."""
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return is_view and bool(args) and isinstance(args[0], Int8Weight) and not args[0].is_inference()


def _written(func: Any, args: Any) -> Int8Weight | None:
    """The weight that an operator writes into: its first argument."""
    arguments = func._schema.arguments
    info = arguments[0].alias_info if arguments else None
    first = args[0] if args else None
    return first if info is not None and info.is_write and isinstance(first, Int8Weight) else None


# ---- operators that give another one ---------------------------------------------------------------------------------


def _each(func: Any, weight: Int8Weight, *args: Any, **kwargs: Any) -> Int8Weight:
    """The operator on each tensor inside."""
    codes, scales, rotation = weight.matrix
    matrix = Int8Matrix(func(codes, *args, **kwargs), func(scales, *args, **kwargs), rotation)
    original = weight.original
    if original is not None and weight.follows:
        original = func(original.detach(), *args, **kwargs)
    return weight.like(matrix, original=original)


def _alias(func: Any, weight: Int8Weight) -> Int8Weight:
    codes, scales, rotation = weight.matrix
    alias = weight.like(Int8Matrix(func(codes), func(scales), rotation))
    alias.holder = weight.holder
    return alias


def _moved(func: Any, weight: Int8Weight, **kwargs: Any) -> Any:
    """``to``: the float dtype is the weight's own, the integers stay what they are."""
    dtype = kwargs.pop("dtype", None) or weight.dtype
    if not dtype.is_floating_point:
        return func(weight.float_matrix(), dtype=dtype, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking", "pin_memory")}
    codes, scales, rotation = weight.matrix
    original = weight.original
    if original is not None and weight.follows:
        original = func(original.detach(), dtype=dtype, **kwargs)
    return weight.like(Int8Matrix(func(codes, **kwargs), func(scales, **kwargs), rotation), dtype, original)


def _empty_like(func: Any, weight: Int8Weight, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None) or weight.dtype
    device = kwargs.get("device") or weight.device
    if not dtype.is_floating_point:
        return torch.empty(weight.shape, dtype=dtype, device=device)
    codes, scales, rotation = weight.matrix
    matrix = Int8Matrix(torch.empty_like(codes, device=device), torch.empty_like(scales, device=device), rotation)
    return weight.like(matrix, dtype)


def _copy(func: Any, target: Int8Weight, source: Any, non_blocking: bool = False) -> Int8Weight:
    if not isinstance(source, Int8Weight) or source.matrix.rotation != target.matrix.rotation:
        target.write(source.float_matrix() if isinstance(source, Int8Weight) else source)
        return target
    for mine, other in zip(target.matrix[:2], source.matrix[:2]):
        mine.copy_(other, non_blocking=non_blocking)
    target._write_original(source.float_matrix())
    return target


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ATEN = torch.ops.aten
_MAPPED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((_ATEN.detach.default, _ATEN.alias.default), _alias),
    **dict.fromkeys((_ATEN.clone.default, _ATEN._pin_memory.default), _each),
    _ATEN._to_copy.default: _moved,
    _ATEN.empty_like.default: _empty_like,
    _ATEN.copy_.default: _copy,
    _ATEN.is_pinned.default: lambda func, weight, *args, **kwargs: func(weight.matrix.codes, *args, **kwargs),
}
