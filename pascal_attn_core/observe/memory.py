"""Exact peak memory of a piece of code; the tests prove O(N) memory with it, without a GPU. As a block,
:func:`measure_memory`, or for one call, ``measure(sdpa, query, key, value).extra_bytes``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..machine.device import MIB

_DispatchKey = torch._C.DispatchKey
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta", "xpu": "XPU", "mps": "MPS"}
_LEAVES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")
# Beginnings of names: not views by their schema, but they move no element.
_NO_KERNEL = ("_unsafe_view", "unsafe_split", "lift", "empty", "new_empty", "resize_", "set_", "device")


_left_out: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_leaving = threading.local()


@contextmanager
def uncounted() -> Iterator[None]:
    """Memory that this thread allocates in the block is never counted: it stands for the host's where the CPU plays
    the device."""
    before = getattr(_leaving, "on", False)
    _leaving.on = True
    try:
        yield
    finally:
        _leaving.on = before


def is_uncounted(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` was allocated, or first seen, within :func:`uncounted`."""
    return tensor.untyped_storage()._cdata in _left_out


class Measurement(NamedTuple):
    """The result of :func:`measure`.

    Attributes:
        out: what the function returned.
        extra_bytes: the peak minus the bytes of the output's own storages: what the call needed besides its result.
        peak_bytes: the most bytes alive at once above those alive at the start, including the output.
        largest_tensor_bytes: the largest single storage that the call created and that is not part of the output.
    """

    out: Any
    extra_bytes: int
    peak_bytes: int
    largest_tensor_bytes: int


class PeakMemory:
    """Measures the most memory that tensors took at once during a ``with`` block, above what they took at its start.

    On a CPU and on ``meta`` every storage is followed from the operator that creates it (or resizes it) until it is
    freed, so the number is exact (except for scalars made inside kernels, a few bytes). On CUDA it is the allocator's
    own peak, in whole allocator blocks.

    What is seen: each operator of this thread and of the autograd engine working for it, below the composite ones:
    torch's math attention counts with every matrix it makes, and so does the inside of a custom operator. On a CPU it
    does not see scratch memory that a kernel allocates and frees internally (torch's fused CPU attention: a few MiB),
    allocations by other libraries, and sparse tensors. On ``meta`` it does not see the inside of an operator that has a
    kernel of its own for ``meta``. A tensor from before the block counts as freed if it dies inside it, once an
    operator has touched it. Within the block a function compiled by ``torch.compile`` runs as the Python that it was
    compiled from (with ``fullgraph=True`` it raises), and that is what is measured, as by every mode of torch that sees
    operators.

    Args:
        device: whose memory; tensors of other device types are not counted.
        follow: False on CUDA only reads the allocator's peak: no cost per operator, but not the largest tensor either.

    ``peak_bytes`` and ``largest_tensor_bytes``, as in :class:`Measurement`, grow while the block runs.
    """

    def __init__(self, device: torch.device | str = "cpu", *, follow: bool = True):
        self.device = torch.device(device)
        self._follower = Follower(self.device.type)
        self._is_cuda = self.device.type == "cuda"
        if not (follow or self._is_cuda):
            raise ValueError(f"follow must be True on {self.device.type}, got False; only CUDA has a peak of its own")
        self._follows = follow
        self._cuda_start, self._cuda_peak = 0, 0
        self._running = False

    @property
    def peak_bytes(self) -> int:
        if not self._is_cuda:
            return self._follower.peak
        if self._running:
            self._cuda_peak = max(0, torch.cuda.max_memory_allocated(self.device) - self._cuda_start)
        return self._cuda_peak

    @property
    def peak_mib(self) -> float:
        """``peak_bytes`` in MiB."""
        return self.peak_bytes / MIB

    @property
    def largest_tensor_bytes(self) -> int:
        return self._follower.largest_without(())

    def __enter__(self) -> PeakMemory:
        if self._running:
            raise RuntimeError("PeakMemory must not be entered twice, got a second `with` on the same object")
        self._follower.reset()
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._cuda_start = torch.cuda.memory_allocated(self.device)
        self._running = True
        if self._follows:
            self._follower.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._follows:
            self._follower.__exit__(kind, error, traceback)
            self._follower.look_again()
        _ = self.peak_bytes
        self._running = False


def measure_memory(device: torch.device | str | None = None) -> PeakMemory:
    """The most memory that tensors take at once in a block:

        with measure_memory() as peak:
            out = model(x)
        print(f"{peak.peak_mib:.1f} MiB")

    Args:
        device: None = the current CUDA device if there is one, else the CPU, where the number is exact.
    """
    return PeakMemory(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)


def measure(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Measurement:
    """Call ``fn(*args, **kwargs)`` and measure its memory.

    The device is that of the first tensor among the arguments (CPU if there is none). Gradients count as output only
    when ``fn`` returns them (``torch.autograd.grad``), not when it leaves them in ``.grad``.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    peak = PeakMemory(tensors[0].device if tensors else "cpu")
    peak._follower.look(tensors)  # an argument returned as it is, or resized, is not new
    with peak:
        out = fn(*args, **kwargs)
    created, out_bytes = peak._follower.created_storages(out)
    largest = peak._follower.largest_without(created)
    return Measurement(out, peak.peak_bytes - out_bytes, peak.peak_bytes, largest)


@dataclass(eq=False, slots=True)
class _Storage:
    """One storage being followed: its size when last checked, and whether it is new since the block began."""

    ref: weakref.ref[Any]
    nbytes: int
    is_new: bool


class Follower(TorchDispatchMode):
    """Follows storages by their address; a weak reference reports when one dies, before its address is reused."""

    supports_higher_order_operators = True

    def __init__(self, device_type: str):
        super().__init__()
        self.device_type = device_type
        self.storages: dict[int, _Storage] = {}
        self.reset()

    def reset(self) -> None:
        self.live = self.peak = self.largest_dead = 0
        for storage in self.storages.values():
            storage.is_new = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any("__tensor_flatten__" in vars(kind) for kind in types):
            return NotImplemented  # a wrapper around tensors unwraps itself, and its operators are seen then
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        how = _how_to_run(func, inputs[0].device.type if inputs else self.device_type)
        self.look(inputs, is_new=how.input_is_new)
        if how.inside is None:
            out = func(*args, **kwargs)
        else:
            with self:
                out = func._op_dk(how.inside, *args, **kwargs)
        self.look(tensors_in((out,)), is_new=True)
        if how.mutates:
            self.look(inputs)  # it may have resized what it wrote to
        return out

    def look(self, tensors: Iterable[Tensor], *, is_new: bool = False) -> None:
        """Record new storages among these tensors, and those that changed their size."""
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
                continue
            if getattr(_leaving, "on", False):
                _left_out[storage._cdata] = storage
            if storage._cdata in _left_out:
                continue
            known = self.storages.get(storage._cdata)
            if known is None:
                if storage.device.type == self.device_type:
                    died = weakref.ref(storage, functools.partial(self._freed, storage._cdata))
                    self.storages[storage._cdata] = _Storage(died, storage.nbytes(), is_new)
                    self._add(storage.nbytes() if is_new else 0)
            elif (nbytes := storage.nbytes()) != known.nbytes:
                self._add(nbytes - known.nbytes)
                known.nbytes = nbytes

    def look_again(self) -> None:
        """Find storages that were resized without the dispatcher (``untyped_storage().resize_``)."""
        for known in list(self.storages.values()):
            storage = known.ref()
            if storage is not None and storage.nbytes() != known.nbytes:
                self._add(storage.nbytes() - known.nbytes)
                known.nbytes = storage.nbytes()

    def created_storages(self, out: Any) -> tuple[set[int], int]:
        """Which followed storages these tensors live in, as addresses, and how many bytes of them the block created."""
        addresses = {leaf.untyped_storage()._cdata for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        known = [self.storages[address] for address in addresses if address in self.storages]
        return addresses, sum(storage.nbytes for storage in known if storage.is_new)

    def largest_without(self, addresses: Container[int]) -> int:
        alive = (s.nbytes for address, s in list(self.storages.items()) if s.is_new and address not in addresses)
        return max(self.largest_dead, max(alive, default=0))

    def _freed(self, address: int, _: Any) -> None:
        storage = self.storages.pop(address)
        self.live -= storage.nbytes
        if storage.is_new:
            self.largest_dead = max(self.largest_dead, storage.nbytes)

    def _add(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class _Run(NamedTuple):
    """How the follower treats an operator on one device type."""

    inside: Any  # the dispatch key of a kernel composed of other operators; None for a kernel of its own
    mutates: bool
    input_is_new: bool


@functools.cache
def _how_to_run(func: Any, device_type: str) -> _Run:
    if not isinstance(func, OpOverload):  # a higher-order operator: its inside is unknown
        return _Run(None, mutates=True, input_is_new=False)
    name = func._schema.name.partition("::")[2]
    inside = _inside_key(func, device_type, moves_nothing=func.is_view or name.startswith(_NO_KERNEL))
    return _Run(inside, func._schema.is_mutable, input_is_new=name in ("lift", "lift_fresh"))


def _inside_key(func: OpOverload, device_type: str, *, moves_nothing: bool) -> Any:
    """The dispatch key that shows what happens inside an operator. In inference mode composite ones arrive whole; some
    (``aten::_safe_softmax``) always do, and so do custom operators. Called as usual, their inside would not be seen."""
    if is_composite(func):
        return _DispatchKey.CompositeImplicitAutograd
    backend = _BACKENDS.get(device_type, "")
    has_own_meta = func._schema.name == "aten::_safe_softmax"  # for shapes only: it hides a mask of the input's size
    if backend and _has_kernel(func, backend) and not has_own_meta:
        return None if func.namespace in _LEAVES else getattr(_DispatchKey, backend)
    # Such a kernel passes a number to its tensor variant as a wrapped tensor, which arrives here as a number.
    takes_number = any(isinstance(argument.type, torch.NumberType) for argument in func._schema.arguments)
    if not (moves_nothing or takes_number) and _has_kernel(func, "CompositeExplicitAutograd"):
        return _DispatchKey.CompositeExplicitAutograd
    return None


def is_composite(func: OpOverload) -> bool:
    """Whether an operator is made of others and has no kernel of its own: in inference mode it arrives whole."""
    return _has_kernel(func, "CompositeImplicitAutograd")


def _has_kernel(func: OpOverload, key: str) -> bool:
    # not func.has_kernel_for_dispatch_key: that also counts Python kernels, which plain execution never uses
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


# torch.utils._pytree knows more containers and takes several times as long, which adds up: every operator of a decoder
# in bands, or of a feed-forward module in slices, looks through its arguments again and again.
def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of the containers with each leaf replaced by ``function(leaf)``, from the first to the last."""
    kind = type(tree)
    if kind is tuple:
        return tuple([mapped(function, item) for item in tree])
    if kind is list:
        return [mapped(function, item) for item in tree]
    if kind is dict:
        return {name: mapped(function, item) for name, item in tree.items()}
    return tree_map(function, tree) if isinstance(tree, (tuple, list, dict)) else function(tree)


def leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, tree)
    return found
