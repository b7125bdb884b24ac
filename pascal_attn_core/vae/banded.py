"""The tensor that a model is given instead of its latent or picture: operators on it are recorded, and computed in
bands when their result is needed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import sdpa
from ..observe.memory import leaves, mapped
from ..patching.interception import bind_sdpa
from . import operators
from .lazy import Filled, Known, Lazy, NotInBands, aten
from .run import BandedRun

_SMALLER = 16  # a result of an operator that ran whole is an ordinary tensor if it is this many times smaller
_SAME = {aten.detach, aten.alias, aten.lift_fresh, aten.contiguous}
_Packet = torch._ops.OpOverloadPacket


class Banded(Tensor):
    """A tensor of a run. It has shape, dtype and device, but no memory."""

    node: Lazy
    run: BandedRun
    family: weakref.WeakSet[Banded]  # the tensors that share memory with it in the eyes of the model
    origin: tuple[Banded, int, int, int] | None  # (tensor, dim, start, stop) of which it is a slice

    @staticmethod
    def __new__(cls, node: Lazy, run: BandedRun, device: torch.device, parent: Banded | None = None) -> Banded:
        like = node.like
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device, requires_grad=False)

    def __init__(self, node: Lazy, run: BandedRun, device: torch.device, parent: Banded | None = None):
        self.node, self.run = node, run
        run.tensors[id(self)] = self
        self.family = weakref.WeakSet() if parent is None else parent.family
        self.family.add(self)
        self.origin = None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None  # it holds no tensor; those who look for memory find none

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Banded(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTION:
            return _attention(*args, **kwargs)
        if func is nn.functional.linear:  # as one operator it keeps its rows apart from the batch
            return _linear(*args, **kwargs)
        if func is nn.functional.pad and "circular" in (*args, *kwargs.values()):
            return _circular_pad(*args, **kwargs)  # torch composes it of slices that it writes into
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


_ATTENTION = {nn.functional.scaled_dot_product_attention, sdpa}


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _dispatch(aten.linear.default, _autocast(input, weight, bias), {})


def _autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The arguments of an operator as autocast casts them. Of the others torch has done that before they come here."""
    kind = _first(tensors).device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype, wide = torch.get_autocast_dtype(kind), torch.float64
    return tuple(t if t is None or not t.is_floating_point() or t.dtype == wide else t.to(dtype) for t in tensors)


def _circular_pad(input: Tensor, pad: list[int], mode: str = "circular", value: float | None = None) -> Any:
    tensor = _first(input)
    node = operators.padded(tensor.run, tensor.node, pad, mode)
    return Banded(node, tensor.run, tensor.device)


def _first(args: Any) -> Banded:
    return next(leaf for leaf in leaves(args) if isinstance(leaf, Banded))


def _nodes(args: Any) -> Any:
    return mapped(lambda leaf: leaf.node if isinstance(leaf, Banded) else leaf, args)


def _attention(*args: Any, **kwargs: Any) -> Banded:
    call: Any = bind_sdpa(args, kwargs, like_torch=False)
    tensors, first = call[:4], _first(call[:4])
    options = {name: value for name, value in (kwargs | call.keywords()).items() if name not in call._fields[:4]}
    query, key, value, mask = _nodes(_autocast(*tensors))
    node = operators.attention(first.run, query, key, value, mask, options)
    return Banded(node, first.run, first.device)


def _dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    first = _first((args, kwargs))
    run, device = first.run, first.device

    def wrapped(found: Any) -> Any:
        parent = first if func.is_view else None
        return mapped(lambda leaf: Banded(leaf, run, device, parent) if isinstance(leaf, Lazy) else leaf, found)

    packet = func.overloadpacket
    if packet in _SAME:
        return Banded(first.node, run, device, first)
    if packet is aten.clone:
        return Banded(run.copied(first.node), run, device)
    if packet is aten._to_copy:
        return _converted(first, func, kwargs)
    if func._schema.is_mutable:
        return _mutated(func, args, kwargs)
    handler = operators.HANDLERS.get(packet)
    found = NotImplemented if handler is None else handler(run, func, *_nodes(args), **_nodes(kwargs))
    if found is NotImplemented:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return func.decompose(*args, **kwargs)
        if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
            found = operators.pointwise(run, func, _nodes(args), _nodes(kwargs))
        if found is NotImplemented:
            return _whole(first, func, args, kwargs)
    out = wrapped(found)
    if packet is aten.slice and isinstance(out, Banded):
        out.origin = _range_of_slice(first, *args[1:], **kwargs)
    return out


def _range_of_slice(
    tensor: Banded, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[Banded, int, int, int] | None:
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return (tensor, dim % tensor.dim(), first, max(first, last)) if step == 1 else None


def _converted(tensor: Banded, func: Any, kwargs: dict[str, Any]) -> Tensor:
    """Convert to another dtype, or to an ordinary tensor on another device."""
    device = kwargs.get("device")
    if device is not None and torch.device(device) != tensor.device:
        return func(ordinary(tensor), **kwargs)
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype == tensor.dtype:
        return Banded(tensor.node, tensor.run, tensor.device)
    node = operators.pointwise(tensor.run, func, (tensor.node,), {"dtype": dtype})
    return Banded(node, tensor.run, tensor.device)


def _mutated(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator that writes into its first argument."""
    name = func._schema.name.partition("::")[2]
    target = args[0]
    if not isinstance(target, Banded):
        return func(*mapped(lambda leaf: ordinary(leaf) if isinstance(leaf, Banded) else leaf, args), **kwargs)
    chain = [target]
    while chain[-1].origin is not None:
        chain.append(chain[-1].origin[0])
    if any(all(other is not link for link in chain) for other in target.family):
        raise NotInBands(f"{name} changes a tensor of which a view is in use")
    if name == "copy_":
        found = operators.replaced(target.run, target.node, _nodes(args[1]))
    elif name in ("zero_", "fill_"):
        number = 0.0 if name == "zero_" else args[1]
        if isinstance(number, Tensor):
            raise NotInBands(f"{name} with a tensor")
        found = Filled(target.node.like, number, target.run.device)
    else:
        packet = getattr(aten, name.removesuffix("_"), None) if name[-1] == "_" else None
        overload = getattr(packet, func._overloadname, None) if isinstance(packet, _Packet) else None
        if overload is None:
            raise NotInBands(f"{name} writes into its argument")
        made = _dispatch(overload, args, kwargs)
        found = made.node if isinstance(made, Banded) else target.run.known(made)
        if found.shape != target.shape:
            raise NotInBands(f"{name} changes the shape of its argument")
        if found.like.dtype != target.dtype:
            found = operators.cast(found, target.dtype)
    target.node = found
    for link in chain[:-1]:  # what it is a slice of holds the new numbers too
        assert link.origin is not None
        whole, dim, start, stop = link.origin
        whole.node = operators.written(whole.run, whole.node, link.node, dim, start, stop)
    return target


def _whole(first: Banded, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator that is not known: on whole tensors. Its name is in the report."""
    run = first.run
    run.figures.whole[func._schema.name.partition("::")[2]] += 1

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Banded):
            return leaf.node.like if run.is_rehearsal else run.whole(leaf.node)
        return leaf.to("meta") if run.is_rehearsal and isinstance(leaf, Tensor) else leaf

    if run.is_rehearsal:
        kwargs = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
    given, named = mapped(real, (args, kwargs))
    with run.as_recorded():
        found = run.patiently(lambda: func(*given, **named))
    largest = max(leaf.numel() for leaf in leaves((args, kwargs)) if isinstance(leaf, Banded))

    def kept(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (leaf.numel() * _SMALLER <= largest and not run.is_rehearsal):
            return leaf
        return Banded(Known(leaf.to("meta"), run.store.on_device(leaf)), run, first.device)

    return mapped(kept, found)


def ordinary(tensor: Banded) -> Tensor:
    """The whole tensor as an ordinary one on its device."""
    if tensor.run.is_rehearsal:
        raise NotInBands("a shape-only run has no numbers")
    return tensor.run.whole(tensor.node)


def finish(run: BandedRun) -> None:
    """The tensors of a run that are still in use become ordinary ones, wherever they are held: in its result, in
    attributes of the model, in a hook's list. In a rehearsal they are on ``meta``."""
    for tensor in list(run.tensors.values()):
        tensor.origin = None  # what it was cut from may not be in use any more
    survivors = list(run.tensors.values())
    run.tensors.clear()  # a tensor with weak references cannot be swapped
    for tensor in survivors:
        tensor.family.clear()
    for tensor in reversed(survivors):  # a view holds what it is a view of, which was there before
        made = torch.empty_like(tensor.node.like) if run.is_rehearsal else ordinary(tensor).detach()
        torch.utils.swap_tensors(tensor, made)
        del made
