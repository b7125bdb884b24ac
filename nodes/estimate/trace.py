"""One call of a diffusion model without data: which attention and feed-forward calls it makes, and how much memory its
own tensors take."""

from __future__ import annotations

import contextlib
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...pascal_attn_core.ffn.find import find_ffn
from ...pascal_attn_core.patching.interception import TORCH_SDPA, SdpaMode, bind_sdpa
from ..comfy.layout import HostCall, NotOurs, empty_containers
from .inputs import Latent, arguments
from .shadow import Shadow

_LARGE_BYTES = 32 << 20  # a fresh tensor from here on has no memory either


@dataclass(frozen=True)
class AttentionShape:
    """One attention call: ``[B, H, L, D]``, ``[B, Hkv, S, D]``, ``[B, Hkv, S, Dv]``, dtype, whether there is a mask,
    and the bytes of the model's own tensors at that moment, the result among them."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    masked: bool = False
    live_bytes: int = field(default=0, compare=False)

    @property
    def score_bytes(self) -> int:
        """Size of the score matrix in the call's number format."""
        batch, heads, rows, _ = self.query
        return batch * heads * rows * self.key[2] * self.dtype.itemsize


@dataclass(frozen=True)
class FfnShape:
    """One feed-forward call: name and class of the module, shape and dtype of its input, the most bytes that it took
    besides input and output, and the bytes of all tensors of the model after it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    extra_bytes: int
    live_bytes: int = field(default=0, compare=False)


@dataclass
class ModelCall:
    """What one call of the model does.

    Attributes:
        attention, ffn: its calls in order.
        other_bytes: most bytes of the model's own tensors at once, outside of these calls.
        unread: attention calls whose shapes could not be read, and why.
        is_rough: not traced but estimated: only the largest calls, approximately.
    """

    attention: list[AttentionShape] = field(default_factory=list)
    ffn: list[FfnShape] = field(default_factory=list)
    other_bytes: int = 0
    unread: list[str] = field(default_factory=list)
    is_rough: bool = False


class Tracer(TorchDispatchMode):
    """Runs operators on the shadow's weights without data, and the few others (positions, schedules) normally: so that
    values which a model reads exist, and no tensor without data gets into a cache."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.fake, self.found = mode, ModelCall()
        self.live = self.peak = self.peak_outside = 0
        self._is_inside = False
        self._storages: dict[int, weakref.ref] = {}
        self._weights: set[int] = set()  # storages of weights, and of what was made of weights alone

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it depends on no input, only on weights."""
        return isinstance(tensor, FakeTensor) and (
            isinstance(tensor, nn.Parameter) or tensor.untyped_storage()._cdata in self._weights
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        without_data = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload) and _is_composite(func):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if not without_data and not tensors:
            without_data = _is_large(args)
        if not without_data:
            return func(*args, **kwargs)
        with self.fake:
            out = func(*args, **kwargs)
        of_weights = bool(tensors) and all(map(self.is_weight, tensors))
        for result in tree_leaves(out):
            if isinstance(result, FakeTensor):
                self._count(result, of_weights)
        return out

    def _count(self, tensor: Tensor, of_weights: bool) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            return
        nbytes = 0 if of_weights else storage.nbytes()
        if of_weights:
            self._weights.add(address)

        def freed(_: Any) -> None:
            self._storages.pop(address, None)
            self._weights.discard(address)
            self.live -= nbytes

        self._storages[address] = weakref.ref(storage, freed)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        if not self._is_inside:
            self.peak_outside = max(self.peak_outside, self.live)

    # ---- attention ----

    def override(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Put at ``optimized_attention_override``: notes the call's shape and returns a result without data."""
        try:
            call = HostCall.of(args, kwargs)
        except NotOurs as reason:
            self.found.unread.append(str(reason))
            return func(*args, **kwargs)
        empty_containers(args, kwargs)
        return call.returned(self.attend(call.query, call.key, call.value, call.mask))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Note a call ``[B, H, L, D]``; returns an empty result of its shape."""
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
        self.found.attention.append(AttentionShape(*shapes, query.dtype, mask is not None, self.live))
        return out.transpose(1, 2)

    def _sdpa(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """A call of torch's function by a model that bypasses the override."""
        call = bind_sdpa(args, kwargs)
        if isinstance(call, str):
            return TORCH_SDPA(*args, **kwargs)  # which raises its own error
        query, key, value = (_four_dimensions(tensor) for tensor in call[:3])
        out = self.attend(query, key, value, call.attn_mask)
        return out.reshape(*call.query.shape[:-3], *out.shape[-3:])

    # ---- feed-forward ----

    def watch(self, network: nn.Module) -> None:
        """Note the feed-forward calls of the shadow ``network``."""
        for name, module, why_not in find_ffn(network):
            if not why_not:
                module.__dict__["forward"] = self._watched(name, module, types.MethodType(type(module).forward, module))

    def _watched(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Any, *args: Any, **kwargs: Any) -> Any:
            before, peak_before = self.live, self.peak
            self.peak, self._is_inside = self.live, True
            try:
                out = forward(x, *args, **kwargs)
            finally:
                inside, self.peak, self._is_inside = self.peak, max(self.peak, peak_before), False
            if isinstance(x, Tensor) and isinstance(out, Tensor):
                extra = max(0, inside - before - out.numel() * out.element_size())
                kind = type(module).__name__
                self.found.ffn.append(FfnShape(name, kind, tuple(x.shape), x.dtype, extra, self.live))
            return out

        return watched

    def run(self, call: Callable[[], Any]) -> ModelCall:
        """``call()`` under this tracer."""
        with torch.no_grad(), SdpaMode(self._sdpa), self:
            call()
        self.found.other_bytes = self.peak_outside
        return self.found


def _four_dimensions(tensor: Tensor) -> Tensor:
    """``[*batch, H, N, D]`` with one leading dimension."""
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor[None] if tensor.dim() == 3 else tensor


def _is_large(args: Iterable[Any]) -> bool:
    """Whether an operator that creates a tensor from sizes alone creates a large one."""
    sizes = next((arg for arg in args if isinstance(arg, (list, tuple)) and arg), ())
    if not all(isinstance(size, int) for size in sizes):
        return False
    numel = 1
    for size in sizes:
        numel *= size
    return numel * 4 > _LARGE_BYTES


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def trace_model(patcher: Any, latent: Latent, prompt: dict[str, Any], copies: int) -> ModelCall:
    """One call of the patcher's model as the sampler would make it, with ``copies`` prompts in one batch.

    Raises:
        Exception: whatever the model raises where it cannot be followed.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model: Any = Shadow(mode).of(patcher.model)
    model.current_patcher = None
    tracer = Tracer(mode)
    tracer.watch(model.diffusion_model)
    options = {
        # a closure, for hosts that look for attributes of an override
        "optimized_attention_override": lambda func, *args, **kwargs: tracer.override(func, *args, **kwargs),
        "cond_or_uncond": list(range(copies)),
        "sigmas": torch.full((1,), float(model.model_sampling.sigma_max)),
        "sample_sigmas": torch.linspace(float(model.model_sampling.sigma_max), 0.0, 3),
    }

    def call() -> None:
        x, sigma, given = arguments(model, latent, prompt, copies)
        model.apply_model(x, sigma, transformer_options=options, **given)

    with _quiet():
        return tracer.run(call)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs a traceback for shapes that do not fit; here they only mean that another prompt is tried."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
