"""Code followed on tensors that have shapes but no data: which operators run, and how much memory they would take."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .memory import Follower, is_composite, tensors_in

_MOST_LAYOUTS = 4096
_layouts: dict[Any, tuple] = {}  # of results in new memory, by operator and arguments
_LARGE_ELEMENTS = 8 << 20  # a new tensor of this size or more has no data either


class WithoutData(Follower):
    """A mode for code that is called with tensors without data, made by :meth:`like`.

    Operators on such tensors compute shapes only. All others (positions, schedules) run normally: values that the code
    reads exist, and no tensor without data gets into a cache of constants. ``live`` and ``peak`` count the bytes that
    the tensors without data would take.
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self.shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor without data on the device and in the dtype of ``tensor``."""
        with self.shapes:
            return torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any("__tensor_flatten__" in vars(kind) for kind in types):
            return NotImplemented  # a wrapper around tensors unwraps itself, and its operators are seen then
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and is_composite(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # which would turn results into the classes of a host's weights
            return self.run_operator(func, args, kwargs)

    def run_operator(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_data = not any(isinstance(tensor, FakeTensor) for tensor in tensors) if tensors else not _is_large(args)
        if has_data:
            return func(*args, **kwargs)
        self.look(tensor for tensor in tensors if isinstance(tensor, FakeTensor))
        with self.shapes, _quiet():
            out = func(*args, **kwargs)
        self.made(out, tensors)
        return out

    def made(self, out: Any, inputs: Sequence[Tensor]) -> None:
        """Count what an operator on ``inputs`` returned without data."""
        self.look((leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)), is_new=True)


def _is_large(args: tuple) -> bool:
    """Whether an operator that creates a tensor from sizes alone creates a large one."""
    sizes = next((arg for arg in args if isinstance(arg, (list, tuple)) and arg), ())
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) > _LARGE_ELEMENTS


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a traceback for shapes that do not fit, which the caller expects."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def results_without_data(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operator returns on tensors of the device "meta". It is remembered for other tensors of the same
    shapes, strides and dtypes: to find it out takes torch up to a millisecond."""
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": "meta", "pin_memory": None}
    key = (
        func,
        torch.get_default_dtype(),
        _layout(args),
        tuple((name, _layout(value)) for name, value in kwargs.items()),
    )
    with _disable_current_modes():
        if key in _layouts:
            shape, stride, dtype = _layouts[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        results = func(*args, **kwargs)
    given = map(storage_of, tensors_in((*args, *kwargs.values())))
    if isinstance(results, Tensor) and storage_of(results) not in given and len(_layouts) < _MOST_LAYOUTS:
        _layouts[key] = results.shape, results.stride(), results.dtype
    return results


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_layout, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return id(tensor)


def written_by(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator writes to, by its schema."""
    named = {**dict(zip((argument.name for argument in func._schema.arguments), args)), **kwargs}
    return list(tensors_in(named.get(argument.name) for argument in func._schema.arguments if argument.is_write))
