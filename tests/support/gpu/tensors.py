"""Tensors on cards that are not here: wrappers of tensors in main memory that say ``cuda:1``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

_CPU = torch.device("cpu")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index", "aten::index_put_")
# What a card of these kinds does not have for them: torch's own code would call a kernel that is not here.
_KERNELS_OF_TORCH = (
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn",
    "aten::_efficient_attention",
    "aten::_flash_attention_forward",
)
_libraries: list[torch.library.Library] = []  # as long as these live, torch asks here


class OnCard(torch.Tensor):
    """A tensor that says it is on a card; ``held`` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> OnCard:
        assert not isinstance(held, OnCard)
        like = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **like, layout=held.layout, device=device)
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream: Any) -> None: ...

    def is_pinned(self, *options: Any) -> bool:
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> OnCard:
        copy = OnCard(self.held.clone(), self.device)
        copy.requires_grad_(self.requires_grad)
        return copy

    def __repr__(self, **options: Any) -> str:
        return f"OnCard({self.held!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


_index_of: Callable[..., int] = int
_kind = "cuda"


def serve(index_of: Callable[..., int], kind: str = "cuda") -> None:
    """Let torch make such tensors for a kind of device; ``index_of`` gives the number of the current one."""
    global _index_of, _kind
    _index_of, _kind = index_of, kind
    for module in list(sys.modules.values()):
        if module.__name__.startswith("pascal_attn_core") and isinstance(getattr(module, "PLAIN", None), tuple):
            module.PLAIN = (*module.PLAIN, OnCard)
    _libraries.append(torch.library.Library("_", "IMPL"))
    _libraries[-1].fallback(lambda operator, *args, **kwargs: _run(operator, args, kwargs), kind.upper())
    torch.tensor, torch.as_tensor = _on_its_device(torch.tensor), _on_its_device(torch.as_tensor)
    torch.Generator = _Generator  # type: ignore[misc]
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # else a parameter takes the wrapper's place only


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, device="cpu")


def _on_its_device(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` in two steps: its numbers are read in C++, past the fallback."""

    def made(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
        goes = device is not None and torch.device(device).type == _kind
        if isinstance(data, torch.Tensor):
            return data.to(device=device or data.device, dtype=dtype or data.dtype)
        found = function(data, dtype=dtype, device=None if goes else device)
        return (found.to(device) if goes else found).requires_grad_(requires_grad)

    return made


def _run(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator on the numbers that the tensors hold; its results are where torch would have put them."""
    name, flat = operator._schema.name, tree_flatten((args, kwargs))[0]
    if name.startswith(_KERNELS_OF_TORCH):
        raise RuntimeError(f"there is no card to run {name}")
    device = _device(name, flat, kwargs.get("device"))
    if _kind != "cuda" and any(torch.float64 in (each, getattr(each, "dtype", None)) for each in flat):
        raise TypeError(f"{_kind} has no float64 ({name})")
    if name.startswith("pascal_attn") and device.type == _kind:
        return torch._library.custom_ops.OPDEFS[name]._init_fn(*args, **kwargs)
    if name == "aten::pin_memory":
        return args[0]
    held_args, held_kwargs = tree_map(_held, args), tree_map(_held, kwargs)
    if "pin_memory" in held_kwargs:
        held_kwargs["pin_memory"] = None
    found = operator(*held_args, **held_kwargs)
    if operator._schema.is_mutable and name.endswith("_"):
        return args[0]
    known = {id(each.held): each for each in flat if isinstance(each, OnCard)}

    def put(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, OnCard) or device.type != _kind:
            return value
        return known[id(value)] if id(value) in known else OnCard(value, device)

    return tree_map(put, found)


def _held(value: Any) -> Any:
    if isinstance(value, OnCard):
        return value.held
    return _CPU if isinstance(value, torch.device) and value.type == _kind else value


def _device(name: str, flat: list[Any], asked: Any) -> torch.device:
    """Return where an operator computes; a RuntimeError if its tensors are on several devices."""
    cards = {each.device for each in flat if isinstance(each, OnCard)}
    beside = [each for each in flat if isinstance(each, torch.Tensor) and not isinstance(each, OnCard) and each.dim()]
    if (len(cards) > 1 and "copy" not in name) or (cards and beside and name not in _COPIES):
        places = ", ".join(sorted(map(str, cards | {each.device for each in beside})))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} ({name})")
    device = next(iter(cards), _CPU) if asked is None else torch.device(asked)
    return torch.device(_kind, _index_of()) if device.type == _kind and device.index is None else device
