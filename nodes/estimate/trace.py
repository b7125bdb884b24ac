"""Traces one call of a diffusion model without data: which attention and feed-forward calls it makes, and how
much memory its own tensors take."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...pascal_attn_core.ffn.find import find_ffn
from ...pascal_attn_core.observe.memory import is_uncounted, uncounted
from ...pascal_attn_core.observe.without_data import WithoutData
from ...pascal_attn_core.patching.interception import TORCH_SDPA, SdpaMode, bind_sdpa
from ..reporting.words import dtype_text

Conditioning = list[Any]  # ComfyUI's: [[tensor [B, T, C], {"pooled_output": ...}], ...]
_SMALL_BYTES = 1 << 20  # constants up to this size keep their values: schedules, position tables
_LEFT_OUT = ("forward", "_v", "_v_weight", "_v_bias", "_v_signature", "_prefetch")  # others' patches; host's buffers
_CASTS = "comfy_cast_weights"
_Shape = TypeVar("_Shape", "AttentionShape", "FfnShape")


class AttentionShape(NamedTuple):
    """An attention call: ``[B, H, L, D]``, ``[B, Hkv, S, D]``, ``[B, Hkv, S, Dv]``, dtype, whether there is a mask."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    masked: bool = False

    @property
    def extra_bytes(self) -> int:
        """Size of the score matrix in the call's number format."""
        batch, heads, rows, _ = self.query
        return batch * heads * rows * self.key[2] * self.dtype.itemsize

    @property
    def text(self) -> str:
        """``"2 x 8 heads x 4096 queries x 77 keys of 40 in float16, masked"``."""
        batch, heads, rows, width = self.query
        sizes = f"{batch} x {heads} heads x {rows} queries x {self.key[2]} keys of {width}"
        return f"{sizes} in {dtype_text(self.dtype)}{', masked' if self.masked else ''}"


class FfnShape(NamedTuple):
    """A feed-forward call: name and class of the module, shape and dtype of its input, and the most bytes that it took
    besides input and output."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    extra_bytes: int

    @property
    def text(self) -> str:
        """``"blocks.3.ffn (FeedForward) on 2 x 4096 x 640 in float16"``."""
        return f"{self.name} ({self.kind}) on {' x '.join(map(str, self.shape))} in {dtype_text(self.dtype)}"


class ModelCall(NamedTuple):
    """The calls that one evaluation of the model makes.

    Attributes:
        calls: each call in order, and the bytes of the model's own tensors beside it, its result among them.
        other_bytes: most bytes of the model's own tensors at once, outside of these calls.
        copies: prompts in one batch.
    """

    calls: list[tuple[AttentionShape | FfnShape, int]]
    other_bytes: int
    copies: int = 1

    def of(self, kind: type[_Shape]) -> list[_Shape]:
        """The calls of one kind, in order."""
        return [each for each, _ in self.calls if isinstance(each, kind)]


class Tracer(WithoutData):
    """Notes the attention and feed-forward calls of a shadow, and how much memory its tensors would take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[AttentionShape | FfnShape, int]] = []
        self.peak_outside = 0
        self._is_inside = False

    def made(self, out: Any, inputs: Sequence[Tensor]) -> None:
        """Count what an operator returned, unless it was made of weights alone: a cast of a weight, say."""
        if inputs and all(isinstance(tensor, nn.Parameter) or is_uncounted(tensor) for tensor in inputs):
            with uncounted():
                super().made(out, inputs)
            return
        super().made(out, inputs)
        if not self._is_inside:
            self.peak_outside = max(self.peak_outside, self.live)

    def attend(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Note a call of torch's function; returns a result without data, laid out as ComfyUI's reshape wants it."""
        call = bind_sdpa(args, kwargs)
        if isinstance(call, str):
            return TORCH_SDPA(*args, **kwargs)  # which raises its own error
        # [*batch, H, N, D] with one leading dimension
        query, key, value = (t.flatten(0, -4) if t.dim() > 4 else t[(None,) * (4 - t.dim())] for t in call[:3])
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])).transpose(1, 2)
        self.calls.append((AttentionShape(*shapes, query.dtype, call.attn_mask is not None), self.live))
        return out.reshape(*call.query.shape[:-3], *out.shape[-3:])

    def watch(self, network: nn.Module) -> None:
        for name, module, state, _ in find_ffn(network):
            if not state:
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
                self.calls.append((FfnShape(name, kind, tuple(x.shape), x.dtype, extra), self.live))
            return out

        return watched

    def run(self, call: Callable[[], Any]) -> ModelCall:
        with torch.no_grad(), SdpaMode(self.attend), self:
            call()
        return ModelCall(self.calls, self.peak_outside)


class Shadow:
    """Makes copies of modules without their numbers: the same modules, whose weights have shapes but no memory. Equal
    modules and weights have one shadow. A forward through it computes nothing, loads nothing, and leaves the model, its
    layers and its device as they are.

    Args:
        mode: the mode in which the weights have shapes only.
    """

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self._known: dict[int, tuple[Any, Any]] = {}  # the shadow behind its original, which keeps its id

    def of(self, value: Any, depth: int = 2) -> Any:
        """The shadow of a module, a tensor, or of those in containers up to ``depth`` deep; other values as they are.
        Modules are on the CPU, without hooks, patches of forwards, and weights still to be cast."""
        kind = type(value)
        if isinstance(value, (nn.Module, Tensor)):
            if id(value) not in self._known:
                shadow = object.__new__(kind) if isinstance(value, nn.Module) else self._tensor(value)
                self._known[id(value)] = value, shadow
                if isinstance(value, nn.Module):
                    object.__setattr__(shadow, "__dict__", self._attributes(value))
            return self._known[id(value)][1]
        if depth and kind in (dict, OrderedDict):
            return kind((key, self.of(item, depth - 1)) for key, item in value.items())
        if depth and kind in (list, tuple):
            return kind(self.of(item, depth - 1) for item in value)
        return set(value) if kind is set else value

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        hooks = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
        found = {
            name: OrderedDict() if name.endswith(hooks) else self.of(value)
            for name, value in vars(module).items()
            if name not in _LEFT_OUT
        }
        if hasattr(module, _CASTS):  # cast in each call, as a host does with weights that it has not loaded
            found |= {_CASTS: True, "weight_function": [], "bias_function": []}
            found |= {name: None for name in ("weight_lowvram_function", "bias_lowvram_function") if name in found}
        return found

    def _tensor(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        if not (is_parameter or tensor.is_meta) and tensor.nbytes <= _SMALL_BYTES:
            return tensor.detach().to("cpu", copy=True)
        dtype = tensor.dtype if tensor.dtype.is_floating_point or not is_parameter else torch.float16  # quantised
        with self.mode:
            empty = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return nn.Parameter(empty, requires_grad=False) if is_parameter else empty


# ---- as ComfyUI's sampler calls a model ----


@dataclass(frozen=True)
class Latent:
    """A latent as the sampler packs it.

    Attributes:
        samples: ``[B, C, ...]``; of several streams (video and sound) one packed tensor.
        shapes: of each stream.
    """

    samples: Tensor
    shapes: list[Any]

    @staticmethod
    def of(patcher: Any, latent: dict[str, Any]) -> Latent:
        """A LATENT, with the channels and dimensions that the model wants."""
        import comfy.sample
        import comfy.utils

        samples = latent["samples"]
        ratios = (latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal"))
        try:
            samples = comfy.sample.fix_empty_latent_channels(patcher, samples, *ratios)
        except TypeError:  # up to ComfyUI 0.8
            samples = comfy.sample.fix_empty_latent_channels(patcher, samples)
        if getattr(samples, "is_nested", False):
            packed, shapes = comfy.utils.pack_latents(samples.unbind())
            return Latent(packed.float().cpu(), shapes)
        return Latent(samples.float().cpu(), [samples.shape])


def prompts(conditioning: Conditioning) -> list[dict[str, Any]]:
    """The conditioning on the CPU in the form that the model's ``extra_conds`` takes; without ControlNets and hooks."""
    import comfy.sampler_helpers

    left_out = ("control", "hooks", "gligen", "area", "mask")
    return [
        {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in cond.items()
            if name not in left_out
        }
        for cond in comfy.sampler_helpers.convert_cond(conditioning)
    ]


def arguments(model: nn.Module, latent: Latent, cond: dict[str, Any], copies: int) -> tuple[Tensor, Tensor, dict]:
    """x, sigma and the keyword arguments of ``apply_model`` for ``copies`` prompts in one batch."""
    import comfy.samplers

    x, cpu = latent.samples, torch.device("cpu")
    options = {"latent_image": x, "denoise_mask": None, "seed": 0, "latent_shapes": latent.shapes}
    # the sampler hands all of this on to the model by name
    conds = comfy.samplers.encode_model_conds(model.extra_conds, [cond], x, cpu, "positive", **options)
    sigma = torch.full((x.shape[0],), float(model.model_sampling.sigma_max))  # type: ignore[union-attr, arg-type]
    part = comfy.samplers.get_area_and_mult({**conds[0], "uuid": 0}, x, sigma)
    given = comfy.samplers.cond_cat([part.conditioning] * copies)
    return torch.cat([x] * copies), torch.cat([sigma] * copies), given


def _by_sdpa(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """ComfyUI's attention by torch's function, which the tracer sees, whichever it would use itself."""
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch(*args, **kwargs)


def trace_model(patcher: Any, latent: Latent, prompt: dict[str, Any], copies: int) -> ModelCall:
    """Trace one call of the patcher's model as the sampler would make it, with ``copies`` prompts in one batch.

    Raises:
        Exception: whatever the model raises where it cannot be followed.
    """
    tracer = Tracer()
    model: Any = Shadow(tracer.shapes).of(patcher.model)
    model.current_patcher = None
    tracer.watch(model.diffusion_model)
    options = {
        "optimized_attention_override": _by_sdpa,
        "cond_or_uncond": list(range(copies)),
        "sigmas": torch.full((1,), float(model.model_sampling.sigma_max)),
        "sample_sigmas": torch.linspace(float(model.model_sampling.sigma_max), 0.0, 3),
    }

    def call() -> None:
        x, sigma, given = arguments(model, latent, prompt, copies)
        model.apply_model(x, sigma, transformer_options=options, **given)

    return tracer.run(call)._replace(copies=copies)
