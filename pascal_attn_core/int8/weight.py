"""A linear layer's weight in 8 bits, which stands where its float parameter was: a tensor that says it is float.

``F.linear`` with it runs in 8 bits. ``to``, ``clone``, ``detach`` and others give another one, so that a model can be
moved, cast, copied and offloaded as usual. For every other operator it is the float matrix: the one that it was made
from where that is still there, else the one that its integers stand for. Writing into it rounds what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ..reference.int8_rows import Int8Matrix, quantize_rows
from . import stored
from .backends import FLOATS
from .product import int8_linear


class LowRank:
    """Adapters beside a weight: ``x -> x down^T up^T``, in x's dtype, with down float ``[R, K]``, and up float
    ``[N, R]``, which holds the adapter's factor. They stay on the device of the last x."""

    def __init__(self, down: Tensor, up: Tensor):
        self.down, self.up = down, up

    def __call__(self, x: Tensor) -> Tensor:
        down, up = self.down.to(x.device), self.up.to(x.device)
        if down is not self.down:
            self.down, self.up = down, up
        return F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype))

    def matrix(self) -> Tensor:
        """The matrix that it adds to the weight, float32 ``[N, K]``."""
        return self.up.float() @ self.down.float()


class InFloat:
    """The float part of a weight in 8 bits. Aliases of the weight share it, as they share the integers. ``original``:
    the matrix that the integers were made from, maybe in host memory, or None if it was discarded. ``lora``: adapters,
    which add to the result of the layer: ``F.linear(x, w) + lora(x)``."""

    def __init__(self, original: Tensor | None, lora: LowRank | None):
        self.original, self.lora = original, lora


class _Rest:
    """The parts of a weight that are no tensors. Copies hold the same objects, since graphs compare them."""

    def __init__(self, layer: Any, lora: LowRank | None):
        self.layer, self.lora = layer, lora

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rest) and self.layer is other.layer and self.lora is other.lora

    def __hash__(self) -> int:
        return hash((id(self.layer), id(self.lora)))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rest:
        return self

    def __reduce__(self) -> Any:  # graphs are stored by a hash of this; they do not depend on it
        return _Rest, (None, None)


class Int8Weight(Tensor):
    """A parameter ``[N, K]``.

    Attributes:
        matrix: its 8-bit integers, with their scales.
        in_float: what there is of it in float.
        follows: whether the original moves along when the weight is moved or cast.
        layer: the :class:`.layer.Int8Layer` that it belongs to; ``layer.is_on`` False = it runs in float.
    """

    matrix: Int8Matrix
    in_float: InFloat
    follows: bool
    layer: Any

    @staticmethod
    def __new__(
        cls,
        matrix: Any,
        dtype: torch.dtype | None = None,
        *,
        in_float: InFloat | None = None,
        follows: bool = False,
        layer: Any = None,
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
        weight.matrix, weight.in_float = matrix, in_float or InFloat(None, None)
        weight.follows, weight.layer = follows, layer
        return weight

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    @property
    def original(self) -> Tensor | None:
        return self.in_float.original

    @property
    def lora(self) -> LowRank | None:
        return self.in_float.lora

    @property
    def runs_in_int8(self) -> bool:
        """Whether the layer is computed in 8 bits; False = by a matrix product in float."""
        return self.original is None or self.layer is None or self.layer.is_on

    def float_matrix(self) -> Tensor:
        """The matrix with what its adapters add, in the weight's dtype, on its device."""
        matrix = self.own_matrix()
        return matrix if self.lora is None else (matrix.float() + self.lora.matrix().to(self.device)).to(self.dtype)

    def own_matrix(self) -> Tensor:
        """The matrix without its adapters."""
        if self.original is not None:
            return stored.values(self.original, self.device).to(self.dtype)
        return self.matrix.float().to(self.dtype)

    def rows(self, some: Tensor | slice, device: torch.device) -> tuple[Tensor, Int8Matrix]:
        """The rows ``some`` of the float matrix without its adapters and of the one in 8 bits, on a device."""
        codes, scales, rotation = self.matrix
        matrix = Int8Matrix(codes[some], scales[some], rotation).to(device)
        return (matrix.float() if self.original is None else stored.values(self.original)[some].to(device)), matrix

    def like(self, matrix: Int8Matrix, in_float: InFloat, dtype: torch.dtype | None = None) -> Int8Weight:
        """Another weight for the same layer; an alias where it has the same ``in_float``."""
        return Int8Weight(matrix, dtype or self.dtype, in_float=in_float, follows=self.follows, layer=self.layer)

    def write(self, values: Tensor, matrix: Int8Matrix | None = None, lora: LowRank | None = None) -> None:
        """Take other values, ``[N, K]`` of any float dtype, which hold what adapters add but those of ``lora``;
        ``matrix``: the same in 8 bits, where that is known."""
        rounded = quantize_rows(values.detach().to(self.device), self.matrix.rotation) if matrix is None else matrix
        self.matrix.copy_(rounded)
        self.in_float.lora, old = lora, self.original
        if old is not None:  # copies of the weight may share the tensor
            self.in_float.original = values.detach().to(old.device, old.dtype, copy=True)
        if self.layer is not None:
            self.layer.is_another()

    def _set_data(self, values: Tensor) -> None:
        """``weight.data = values``."""
        if self.layer is not None and getattr(values, "layer", None) is not self.layer:
            self.layer.is_another()
        if not isinstance(values, Int8Weight):
            original = self.original
            if original is not None:  # it stays where it is: on the device, or in host memory
                original = values.detach().to(values.device if self.follows else original.device, copy=True)
            matrix = quantize_rows(values.detach(), self.matrix.rotation)
            values = self.like(matrix, InFloat(original, None), values.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            _SET_DATA(self, values)
        self.matrix, self.in_float, self.follows = values.matrix, values.in_float, values.follows

    # ---- what torch asks of a tensor that holds tensors ----

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # A graph is made for a layer that runs in 8 bits, or for one that does not.
        if self.layer is not None:
            self.layer.is_compiled = True
        inner = ["codes", "scales"] if self.runs_in_int8 else ["codes", "scales", "original"]
        return inner, (self.matrix.rotation, self.dtype, self.runs_in_int8, _Rest(self.layer, self.lora))

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Int8Weight:
        rotation, dtype, _, rest = context
        matrix = Int8Matrix(inner["codes"], inner["scales"], rotation)
        return Int8Weight(matrix, dtype, in_float=InFloat(inner.get("original"), rest.lora), layer=rest.layer)

    @property
    def codes(self) -> Tensor:
        return self.matrix.codes

    @property
    def scales(self) -> Tensor:
        return self.matrix.scales

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Int8Weight({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A deep copy is a plain parameter, as in a state dict."""
        values = self.float_matrix() if self.layer is None else self.layer.host_values(self)
        return memo.setdefault(id(self), nn.Parameter(values.to(self.device, copy=True), requires_grad=False))

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
    if isinstance(weight, Int8Weight) and weight.layer is not None and x.dtype == torch.float64:
        weight.layer.missed = "its inputs are float64"
    if not isinstance(weight, Int8Weight) or not _is_ordinary(x) or x.shape[-1:] != weight.shape[1:]:
        return F.linear(*tree_map(_plain, (x, weight, bias)))
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if weight.runs_in_int8 and weight.layer is not None and not torch.compiler.is_compiling():
        weight = weight.layer.recheck(x, weight)
        if not isinstance(weight, Int8Weight):
            return F.linear(x, weight.to(x.device, x.dtype), bias)
    if weight.runs_in_int8:
        bias = None if bias is None else bias.to(x.device)
        out = int8_linear(x, weight.matrix.to(x.device, non_blocking=True), bias)
    else:
        out = F.linear(x, weight.own_matrix().to(x.device, x.dtype), None if bias is None else bias.to(x.dtype))
    return out if weight.lora is None else out + weight.lora(x)


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
    if not args or not isinstance(args[0], Int8Weight):
        return None
    info = func._schema.arguments[0].alias_info
    return args[0] if info is not None and info.is_write else None


# ---- operators that give another one ---------------------------------------------------------------------------------


def _each(func: Any, weight: Int8Weight, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Int8Weight:
    """The operator on each tensor inside; ``dtype`` is for the float one."""
    codes, scales, rotation = weight.matrix
    matrix = Int8Matrix(func(codes, *args, **kwargs), func(scales, *args, **kwargs), rotation)
    original = weight.original
    if original is not None and weight.follows:
        original = func(original.detach(), *args, **kwargs, **({} if dtype is None else {"dtype": dtype}))
    return weight.like(matrix, InFloat(original, weight.lora), dtype)


def _alias(func: Any, weight: Int8Weight) -> Int8Weight:
    codes, scales, rotation = weight.matrix
    return weight.like(Int8Matrix(func(codes), func(scales), rotation), weight.in_float)


def _moved(func: Any, weight: Int8Weight, **kwargs: Any) -> Any:
    """``to``: the float dtype is the weight's own, the integers stay what they are."""
    dtype = kwargs.pop("dtype", None) or weight.dtype
    if not dtype.is_floating_point:
        return func(weight.float_matrix(), dtype=dtype, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking", "pin_memory")}
    return _each(func, weight, dtype=dtype, **kwargs)


def _empty_like(func: Any, weight: Int8Weight, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None) or weight.dtype
    device = kwargs.get("device") or weight.device
    if not dtype.is_floating_point:
        return torch.empty(weight.shape, dtype=dtype, device=device)
    codes, scales, rotation = weight.matrix
    matrix = Int8Matrix(torch.empty_like(codes, device=device), torch.empty_like(scales, device=device), rotation)
    return weight.like(matrix, InFloat(None, weight.lora), dtype)


def _copy(func: Any, target: Int8Weight, source: Any, *_: Any) -> Int8Weight:
    if isinstance(source, Int8Weight) and source.matrix.rotation == target.matrix.rotation:
        target.write(source.own_matrix(), source.matrix, source.lora)
    else:
        target.write(_plain(source))
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
