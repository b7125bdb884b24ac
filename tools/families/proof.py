"""Measures one family of diffusers with and without this package: calls, errors, and whether everything is restored."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pascal_attn_core.call.flex_rules import block_rule, is_block_mask
from pascal_attn_core.config import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_pipeline
from pascal_attn_core.diffusers import redirect as redirecting
from pascal_attn_core.diffusers.sites import counted as by_reason
from pascal_attn_core.diffusers.sites import left_alone, sites_of
from pascal_attn_core.ffn import patch_ffn
from pascal_attn_core.patching.interception import TORCH_SDPA, SdpaMode, bind_sdpa, torch_sdpa
from pascal_attn_core.reference import reference_sdpa

from .family import Family

#: our own tiles, several per call at these sizes; the default config would pass such short calls to torch
TILES = AttentionConfig(route="tiled", q_block=9, kv_block=5)
# our error may be this many times that of torch's own backends, plus rounding of the output
# From another order of the sums, some layers deep, which differs between processors. A wrong attention is at
# least a hundred times as far away.
_TIMES_TORCH, _ROUNDINGS = 2.0, 64
_EPS = torch.finfo(torch.float32).eps
_NOTICED = 1e-3  # a wrong attention changes the output by at least this share of its largest value


@dataclass
class Proof:
    """One row of the table.

    Attributes:
        made: calls of torch's SDPA by the stock model; masked: how many of them had a mask that tells keys apart.
        taken: by way of handing ourselves over, how many of them reached us.
        error: largest difference to exact attention of ours, relative to the largest value of the output.
        torch_error: the same of torch's own backends, the worst of them.
        uniform, maskless: how far off the output is, likewise, where every key counts the same and where masks are
            dropped; None where there is no mask.
        sliced: how many feed-forward modules ``patch_ffn`` ran in slices beside ours, with the same output.
        left_alone: kinds of attention that are not ours.
        problems: sentences; empty = proven.
    """

    family: str
    made: int = 0
    masked: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    torch_error: float = 0.0
    uniform: float = 0.0
    maskless: float | None = None
    sliced: int = 0
    left_alone: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Calls:
    """Counts the calls of torch's SDPA within its ``with`` block, and has ``function`` compute them; and those of
    FlexAttention by way of its module."""

    def __init__(self, function: Callable[..., Tensor] = TORCH_SDPA):
        self.function, self._mode = function, SdpaMode(self._attend)
        self.count = self.masked = self.flex = 0
        self._flex_module = sys.modules.get("torch.nn.attention.flex_attention")

    def _attend_by_flex(self, *args: Any, **kwargs: Any) -> Any:
        self.flex += 1
        return self._torchs_flex(*args, **kwargs)

    def _attend(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        call = bind_sdpa(args, kwargs)
        self.count += 1
        self.masked += not isinstance(call, str) and _matters(call.attn_mask)
        return self.function(*args, **kwargs)

    def __enter__(self) -> Calls:
        self._mode.__enter__()
        if self._flex_module is not None:
            self._torchs_flex, self._flex_module.flex_attention = self._flex_module.flex_attention, self._attend_by_flex
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        if self._flex_module is not None:
            self._flex_module.flex_attention = self._torchs_flex


def _matters(mask: Tensor | None) -> bool:
    """Whether a mask tells keys apart."""
    return mask is not None and bool((~mask).any() if mask.dtype == torch.bool else mask.amin() < mask.amax())


def exact(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **kw: Any) -> Tensor:
    """Attention in float64, rounded once at the end."""
    if is_block_mask(attn_mask):
        attn_mask = block_rule(attn_mask, (*query.shape[:3], key.shape[2])).dense()
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.double()
    kw = {name: kw[name] for name in ("is_causal", "scale", "enable_gqa") if name in kw}
    return reference_sdpa(query.double(), key.double(), value.double(), attn_mask, **kw)[0].to(query.dtype)


def uniform(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Wrong on purpose: every key counts the same."""
    mean = value.mean(dim=-2, keepdim=True).repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    return mean.expand(*query.shape[:-1], value.shape[-1])


def maskless(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kw: Any) -> Tensor:
    """Wrong on purpose: the mask is dropped."""
    kw = {name: item for name, item in kw.items() if name not in ("attn_mask", "config")}
    return torch_sdpa(query, key, value, None, *args, **kw)


def outputs(family: Family, model: nn.Module) -> Tensor:
    """All tensors that one call of the model returns, as one vector."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return torch.cat([part.double().flatten() for part in _tensors(model(**family.arguments()))])


def prove(family: Family) -> Proof:
    """Measure one family; what the model is built of must exist in the installed diffusers."""
    model = family.build()
    with Calls() as stock_calls:
        stock = outputs(family, model)
    left = by_reason(left_alone({"": model}).values())
    if not list(sites_of({"": model})):
        problems = [f"{stock_calls.count} calls made, none can be taken"] if stock_calls.count else []
        return Proof(family.name, made=stock_calls.count, left_alone=left, problems=problems)
    before = attention_state(model)
    proof = Proof(family.name, made=stock_calls.count + stock_calls.flex, masked=stock_calls.masked, left_alone=left)
    true = _with_exact_attention(family, model, through_us=bool(stock_calls.flex or not stock_calls.count))
    size = true.abs().max().item()
    with sdpa_kernel(SDPBackend.MATH):
        by_math = outputs(family, model)
    proof.torch_error = max(_distance(out, true) for out in (stock, by_math)) / size
    _measure_ours(family, model, proof, true)
    _measure_beside_ffn(family, model, proof, true)
    if attention_state(model) != before:
        proof.problems.append("what was there before is not back")
    elif not torch.equal(outputs(family, model), stock):
        proof.problems.append("the output has changed after removal")
    _judge(proof, lambda: _rounding_error(family, model, true))
    return proof


def _measure_ours(family: Family, model: nn.Module, proof: Proof, true: Tensor) -> None:
    size = true.abs().max().item()
    for name, (set_ours, configs) in WAYS.items():
        for config in configs:
            with set_ours(model, config), counted() as calls:
                error = _distance(outputs(family, model), true) / size
            proof.taken[name] = len(calls)
            proof.error = max(proof.error, error)
    with patch_pipeline(model), replaced(uniform):
        proof.uniform = _distance(outputs(family, model), true) / size
    if proof.masked:
        with patch_pipeline(model), replaced(maskless):
            proof.maskless = _distance(outputs(family, model), true) / size


def _measure_beside_ffn(family: Family, model: nn.Module, proof: Proof, true: Tensor) -> None:
    ffn = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch_pipeline(model))
        with contextlib.suppress(ValueError):  # no feed-forward modules
            ffn = stack.enter_context(patch_ffn(model, chunk_tokens=4, min_tokens=5))
        calls = stack.enter_context(counted())
        error = _distance(outputs(family, model), true) / true.abs().max().item()
        proof.sliced = len([state for state in ffn.report().states if state.state == "on"]) if ffn else 0
    proof.taken["beside patch_ffn"] = len(calls)
    proof.error = max(proof.error, error)


def _judge(proof: Proof, rounding: Callable[[], float]) -> None:
    """
    Args:
        rounding: measures what roundings of attention's output do to the model's, relative to its largest value. It is
            asked where torch's own error, two samples of that, seems too small.
    """
    taken = set(proof.taken.values())
    if proof.made and taken != {proof.made}:
        proof.problems.append(f"{proof.made} calls made, taken {proof.taken}")
    if not proof.made and (len(taken) != 1 or 0 in taken):
        proof.problems.append(f"no call taken: {proof.taken}")
    limit = _TIMES_TORCH * proof.torch_error + _ROUNDINGS * _EPS
    if not proof.error <= limit:
        limit = max(limit, _TIMES_TORCH * rounding())
    if not proof.error <= limit:
        proof.problems.append(f"error {proof.error:.1e} above {limit:.1e}")
    for name in ("uniform", "maskless"):
        difference = getattr(proof, name)
        if difference is not None and not difference >= max(_NOTICED, 10 * limit):
            proof.problems.append(f"{name} attention would go unnoticed ({difference:.1e})")


def attention_state(model: nn.Module) -> list[tuple]:
    """Class, processor and attributes of every module, by identity."""
    return [(type(m), id(getattr(m, "processor", None)), sorted(m.__dict__)) for m in model.modules()]


@contextlib.contextmanager
def counted() -> Iterator[list[dict[str, Any]]]:
    """One dict of keywords per call that reaches our sdpa."""
    calls: list[dict[str, Any]] = []
    original = redirecting.sdpa

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return original(*args, **kwargs)

    with replaced(counting):
        yield calls


@contextlib.contextmanager
def replaced(function: Callable[..., Tensor]) -> Iterator[None]:
    """Replaces our sdpa."""
    original: Any = redirecting.sdpa
    redirecting.sdpa = function
    try:
        yield
    finally:
        redirecting.sdpa = original


@contextlib.contextmanager
def _by_processor(owner: Any, config: AttentionConfig | None) -> Iterator[None]:
    """Sets our processor on a model or a pipeline."""
    owner.set_attn_processor(PascalAttnProcessor(config))
    try:
        yield
    finally:
        owner.set_attn_processor(None)


def pipeline_of(model: nn.Module) -> Any:
    """A pipeline with this one component."""
    import diffusers

    base: Any = diffusers.DiffusionPipeline

    class Pipeline(base):
        def __init__(self, model: Any):
            super().__init__()
            self.register_modules(model=model)

    return Pipeline(model)


#: the ways to set our attention on a model, and the configs to try with each; small tiles, which are slow, with one
WAYS: dict[str, tuple[Callable[[Any, AttentionConfig | None], Any], tuple[AttentionConfig | None, ...]]] = {
    "patch": (patch_pipeline, (TILES, None)),
    "model": (_by_processor, (AttentionConfig(budget_mib=2),)),
    "pipeline": (lambda model, config: _by_processor(pipeline_of(model), config), (None,)),
}


def _with_exact_attention(family: Family, model: nn.Module, *, through_us: bool) -> Tensor:
    """Older models compute attention without SDPA; for them the calls are redirected here."""
    if not through_us:
        with Calls(exact):
            return outputs(family, model)
    with patch_pipeline(model), replaced(exact):
        return outputs(family, model)


def _rounding_error(family: Family, model: nn.Module, true: Tensor) -> float:
    """The worst of several runs in which exact attention is off by at most one rounding of its largest value."""
    draws = torch.Generator().manual_seed(0)

    def rounded(*args: Any, **kwargs: Any) -> Tensor:
        out = exact(*args, **kwargs)
        return out + out.abs().max() * _EPS * (2 * torch.rand(out.shape, generator=draws).to(out) - 1)

    errors = []
    for _ in range(6):
        with patch_pipeline(model), replaced(rounded):
            errors.append(_distance(outputs(family, model), true))
    return max(errors) / true.abs().max().item()


def _distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.detach()
        return
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
