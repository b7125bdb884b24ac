"""One random call against the float64 oracle: output, lse, gradients, and that nothing else has changed."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pascal_attn_core import LazyMask, UnsupportedAttention, explain, sdpa, sdpa_with_lse
from pascal_attn_core.sdpa_patch import patch_sdpa

from . import oracle
from .calls import LAYOUTS, Built, Call, build, sums_dtype
from .oracle import Bounded, Precision, smallest

TORCH = torch._C._nn.scaled_dot_product_attention
_TORCH_KNOWS_GROUPS = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")  # since torch 2.5


class Wrong(AssertionError):
    """This class holds what is wrong with the answer to a call."""


def check(call: Call, device: str = "cpu") -> None:
    """Make one call, which a route asked for by name may refuse; :class:`Wrong` if anything about it is wrong."""
    built = build(call)
    tensors, mask, sinks, memory = _leaves(call, built, device)
    before = [_bytes(t).clone() for t in memory]
    versions = [t._version for t in memory]
    random_state = torch.get_rng_state()
    options = built.options | ({} if sinks is None else {"sinks": sinks})
    try:
        with _entry(call, built) as attend:
            out, lse = attend(*tensors, mask, **options)
    except UnsupportedAttention:
        if not _may_refuse(call):
            raise
        _explained(tensors, mask, options, built, may_refuse=True)
        return
    if call.explained:
        _explained(tensors, mask, options, built, may_refuse=False)
    if not call.dropout_p and not torch.equal(random_state, torch.get_rng_state()):
        raise Wrong("the state of torch's generator has changed")
    precision = precision_of(call)
    answers = ways(call, built, precision)
    heads = built.poisoned
    outs = [Bounded(*map(torch.zeros_like, way.out)) if call.dropout_p == 1 else way.out for way in answers]
    _compare("out", out, outs, call.torch_dtype, heads[..., None, None], call)
    if lse is not None:
        _compare("lse", lse, [way.lse for way in answers], precision.sums, heads[..., None], call)
    if call.wants:
        _check_gradients(call, built, tensors, mask, sinks, out, lse, answers, precision)
    for whole, old, version in zip(memory, before, versions):
        if whole._version != version or not torch.equal(_bytes(whole), old):
            raise Wrong("an input was written to")


def failure(call: Call, device: str = "cpu") -> str:
    """Return what goes wrong with a call, in a line or two; empty = nothing does."""
    try:
        check(call, device)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
        return f"{type(error).__name__}: {str(error)[:300]} ({where})"
    return ""


def _leaves(call: Call, built: Built, device: str) -> tuple[list[Tensor], Any, Tensor | None, list[Tensor]]:
    """(query, key, value), mask, sinks: leaves in the strides they have, and the memory they lie in, on the device."""
    memory = built.memory if device == "cpu" else [whole.to(device) for whole in built.memory]
    places = iter(memory)

    def leaf(tensor: Any, name: str) -> Any:
        if tensor is None or (isinstance(tensor, LazyMask) and device == "cpu"):
            return tensor
        if isinstance(tensor, LazyMask):
            return LazyMask(tensor.shape, tensor.rule, device=memory[0].device, dtype=tensor._dtype)
        place = next(places)
        if device != "cpu":
            view = place.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            tensor = torch._neg_view(view) if tensor.is_neg() else view
        return tensor.detach().requires_grad_(name in call.wants and tensor.is_floating_point())

    tensors = [leaf(t, name) for t, name in zip(built.tensors, "qkv")]
    return tensors, leaf(built.mask, "m"), leaf(built.sinks, "s"), memory


@contextmanager
def _entry(call: Call, built: Built) -> Iterator[Callable[..., tuple[Tensor, Tensor | None]]]:
    """The function that the call is made by."""
    if call.entry == "lse":
        yield lambda *args, **options: sdpa_with_lse(*args, **options, config=built.config)
    elif call.entry == "sdpa":
        yield lambda *args, **options: (sdpa(*args, **options, config=built.config), None)
    else:
        with patch_sdpa(built.config):
            by_name = call.entry.endswith("by name") and (_TORCH_KNOWS_GROUPS or not call.enable_gqa)
            function = TORCH if by_name else F.scaled_dot_product_attention
            grouped = {"enable_gqa": call.enable_gqa} if _TORCH_KNOWS_GROUPS or call.enable_gqa else {}
            yield lambda *args, enable_gqa, **options: (function(*args, **options, **grouped), None)
        if F.scaled_dot_product_attention is not TORCH and torch._C._len_torch_function_stack():
            raise Wrong("the switch left a mode behind")


def _explained(tensors: list, mask: Any, options: dict, built: Built, *, may_refuse: bool) -> None:
    try:
        text = explain(*tensors, mask, **options, config=built.config)
    except UnsupportedAttention:
        if may_refuse:
            return
        raise
    if not text.startswith("route "):
        raise Wrong(f"explain says {text!r}")


def _may_refuse(call: Call) -> bool:
    """Whether the route asked for by name is one that does not take every call."""
    route = call.config.get("route", "auto")
    return route in ("torch", "fused") or (route == "math" and (call.entry == "lse" or call.is_empty))


def precision_of(call: Call) -> Precision:
    """torch's kernels round probabilities of 16-bit inputs, and make gradients from one lse, which must not be larger
    than :mod:`pascal_attn_core.routes.torch_faults` says; which of its kernels ``auto`` takes is its affair."""
    sums = sums_dtype(call.torch_dtype)
    by_torch = call.config.get("route", "auto") in ("auto", "torch")
    return Precision(sums, call.torch_dtype, call.torch_dtype if by_torch else sums, 1e3 if by_torch else 0.0)


def _scale(call: Call) -> float:
    return call.scale if call.scale is not None else call.width**-0.5 if call.width else 1.0


def ways(call: Call, built: Built, precision: Precision) -> list[oracle.Forward]:
    """Return what the call may give: two answers where a bias is so large that scores lose their digits beside it."""
    sinks = None if built.sinks is None else built.sinks.detach().to(precision.sums).double()
    large = built.bias is not None and bool((built.bias.abs() > 30).any())
    rest = (built.allowed, built.bias, _scale(call), call.softcap, sinks, precision)
    return [oracle.attend(*built.clean, *rest, rounded=rounded) for rounded in ((True, False) if large else (True,))]


def _check_gradients(call, built, tensors, mask, sinks, out, lse, answers, precision) -> None:
    generator = torch.Generator().manual_seed(call.number % (1 << 62) + 1)
    uses_out, uses_lse = call.through in ("out", "both"), call.through in ("lse", "both")
    grad_out, _ = LAYOUTS[call.grad_layout](torch.randn(out.shape, generator=generator).to(call.torch_dtype), generator)
    grad_lse = torch.randn(out.shape[:-1], generator=generator).to(precision.sums)
    outputs = [t for t, used in ((out, uses_out), (lse, uses_lse)) if used]
    grads = [t.to(out.device) for t, used in ((grad_out, uses_out), (grad_lse, uses_lse)) if used]
    named = {"q": tensors[0], "k": tensors[1], "v": tensors[2], "m": mask, "s": sinks}
    leaves = [named[name] for name in call.wants]
    found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    full = (*call.batch, call.num_heads, call.rows)
    wide_out = grad_out.double().view(*full, call.width_v) if uses_out else torch.zeros(*full, call.width_v).double()
    wide_lse = grad_lse.double().view(full) if uses_lse else torch.zeros(full).double()
    if call.dropout_p == 1:
        wide_out = torch.zeros_like(wide_out)
    rest = (_scale(call), wide_out, wide_lse, built.bias is not None, precision)
    expected = oracle.gradients(answers[0], *built.clean, *rest, other=answers[1] if len(answers) > 1 else None)
    for name, leaf, grad in zip(call.wants, leaves, found):
        field = {"q": "query", "k": "key", "v": "value", "m": "bias", "s": "sinks"}[name]
        gradient = getattr(expected, field)
        if name == "s":
            wanted = Bounded(gradient.value, gradient.error + precision.stored(gradient.value))
            poisoned = built.poisoned.any()
        else:
            grouped = name in "kv" and call.enable_gqa and call.num_heads
            groups = call.num_heads // call.heads["qkv".index(name)] if grouped else 1
            wanted = _summed(gradient, leaf, groups, precision)
            heads = built.poisoned[..., None, None].expand(gradient.value.shape)
            poisoned = _sum_to(heads.double(), leaf.shape, groups) > 0
        grad = torch.zeros_like(leaf) if grad is None else grad
        _compare(f"gradient of {field}", grad, [wanted], leaf.dtype, poisoned, call)


def _sum_to(tensor: Tensor, shape: Any, groups: int) -> Tensor:
    if groups > 1:
        tensor = tensor.unflatten(-3, (-1, groups)).sum(-3)
    return tensor.sum_to_size(shape)


def _summed(gradient: Bounded, leaf: Tensor, groups: int, precision: Precision) -> Bounded:
    """Over everything that the leaf was broadcast to; the parts may have been rounded first."""
    parts = gradient.value.abs() * max(torch.finfo(leaf.dtype).eps, torch.finfo(precision.outputs).eps)
    value = _sum_to(gradient.value, leaf.shape, groups)
    tiny = max(smallest(leaf.dtype), smallest(precision.outputs))
    copies = gradient.value.numel() // max(1, leaf.numel())
    return Bounded(value, _sum_to(gradient.error + parts, leaf.shape, groups) + tiny * (1 + copies))


def _compare(what: str, actual: Tensor, ways: list[Bounded], dtype: torch.dtype, poisoned: Tensor, call: Call) -> None:
    """``poisoned``: where numbers that nobody looks at may leave NaN, but nothing else."""
    full = ways[0].value.shape
    shape = full[1:] if call.matrices and full != actual.shape and len(full) > 1 else full
    if actual.dtype != dtype:
        raise Wrong(f"{what}: dtype {actual.dtype}, want {dtype}")
    if actual.shape != shape:
        raise Wrong(f"{what}: shape {tuple(actual.shape)}, want {tuple(shape)}")
    actual = actual.detach().cpu().double().reshape(full)
    wrong = ~(poisoned & ~actual.isfinite())
    for value, error in ways:
        assert not error.isnan().any(), "the oracle has no bound"
        infinite, beyond = value.isinf(), value.abs() + error > torch.finfo(dtype).max
        difference = (actual - value.masked_fill(infinite, 0.0)).abs()
        wrong = wrong & torch.where(infinite, actual != value, ~(difference <= error) & ~beyond)
    if not wrong.any():
        return
    value, error = ways[0]
    ratio = ((actual - value).abs() / error.clamp_min(1e-300)).nan_to_num(nan=1e300, posinf=1e300)
    at = int(ratio.masked_fill(~wrong, -1.0).argmax())
    place = [int(n) for n in torch.unravel_index(torch.tensor(at), full)] if full else []
    raise Wrong(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements wrong, at {place} {actual.flatten()[at].item():.6g}, "
        f"want {value.flatten()[at].item():.6g} within {error.flatten()[at].item():.2g}"
    )


def _bytes(memory: Tensor) -> Tensor:
    return memory.flatten().view(torch.uint8)
