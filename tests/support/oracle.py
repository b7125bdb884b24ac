"""This module has what is correct, and how far from it an answer may be: the one place with tolerances.

The oracle is :func:`pascal_attn_core.reference.reference_sdpa` in float64. An answer may be twice as far from it as
plain attention, plus some units in the last place (plain attention is exact by luck where there are few elements).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pascal_attn_core.reference import reference_sdpa

FACTOR = 2.0
ULPS = 16.0
REFERENCE_OPTIONS = ("is_causal", "scale", "enable_gqa", "alignment", "window", "softcap")


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor in another dtype as a fresh leaf; bool stays bool."""
    if tensor is None or tensor.dtype == torch.bool:
        return tensor
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


def plain(inputs: Sequence[Tensor | None], options: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) of plain attention computed in ``dtype`` throughout."""
    kept = {name: value for name, value in options.items() if name in REFERENCE_OPTIONS}
    if "sinks" in options:
        kept["sinks"] = cast(options["sinks"], dtype)
    return reference_sdpa(*(cast(t, dtype) for t in inputs), **kept)  # type: ignore[arg-type]


def exact(inputs: Sequence[Tensor | None], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64."""
    return plain(inputs, options, torch.float64)


def error_of(found: Tensor, right: Tensor) -> float:
    """The relative error of a result as a whole."""
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def plain_dtype(dtype: torch.dtype, *, as_torch: bool = False) -> torch.dtype:
    """In what plain attention is computed for inputs of ``dtype``: float32, as we promise; ``as_torch``: ``dtype``
    itself, since torch's kernels round the probabilities of 16-bit inputs. In float64 plain attention is the oracle:
    its error is that in float32, scaled to the finer type."""
    return dtype if as_torch and dtype != torch.float64 else torch.float32


def assert_close(
    actual: Tensor, oracle: Tensor, plain_answer: Tensor, what: str, *, dtype: torch.dtype, scale: float = 0.0
) -> None:
    """``actual`` is at most FACTOR times as far from the oracle as plain attention is.

    Args:
        dtype: that of the call's query: what the work was done in, float64 or else float32.
        scale: the size of the numbers that were summed, where the result itself is smaller.
    """
    assert actual.shape == oracle.shape, f"{what}: shape {tuple(actual.shape)}, want {tuple(oracle.shape)}"
    if not oracle.numel():
        return
    actual_dtype = actual.dtype
    rounded = plain_answer.detach().to(actual_dtype).double()
    actual, oracle = actual.detach().double(), oracle.detach()
    infinite = oracle.isinf()
    assert torch.equal(actual[infinite], oracle[infinite]), f"{what}: infinities are elsewhere"
    error = (actual - oracle).masked_fill(infinite, 0.0).abs().max().item()
    plain_error = (rounded - oracle).masked_fill(infinite | ~rounded.isfinite(), 0.0).abs().max().item()
    largest = max(scale, oracle.masked_fill(infinite, 0.0).abs().max().item())
    allowed = FACTOR * plain_error + ULPS * torch.finfo(plain_answer.dtype).eps * largest
    if dtype == actual_dtype == torch.float64:
        allowed *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert error <= allowed, f"{what}: error {error:.3g} > {allowed:.3g} (plain attention: {plain_error:.3g})"


def assert_attention(
    out: Tensor, lse: Tensor, inputs: Sequence[Tensor | None], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Both are as close to the oracle as :func:`assert_close` asks."""
    right, similar = exact(inputs, options), plain(inputs, options, plain_dtype(dtype))
    for what, *three in zip(("out", "lse"), (out, lse), right, similar):
        assert_close(*three, what, dtype=dtype)


def assert_gradients(
    backward: Callable[[Tensor, Tensor | None], Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    options: dict[str, Any],
    dtype: torch.dtype,
    *,
    with_lse: bool = False,
) -> None:
    """``backward``, given a gradient of the output and (None: not ``with_lse``) one of lse, returns those of query, key
    and value as close to the oracle as :func:`assert_gradients_close` asks."""
    definitions = []
    for own in (torch.float64, plain_dtype(dtype, as_torch=True)):
        leaves = [cast(t, own) for t in inputs]
        for leaf in leaves[:3]:
            leaf.requires_grad_()  # type: ignore[union-attr]
        definitions.append((leaves[:3], *reference_sdpa(*leaves, **options)))  # type: ignore[arg-type]
    _, out, lse = definitions[0]
    grad_out = torch.randn(out.shape, device=out.device).to(dtype)
    answers = [
        gradients(o, leaves, grad_out.to(o.dtype), s if with_lse else None)  # type: ignore[arg-type]
        for leaves, o, s in definitions
    ]
    actual = backward(grad_out, lse.isfinite().float() if with_lse else None)
    assert_gradients_close(actual, *answers, lse.detach(), dtype)


def assert_gradients_close(
    actual: Sequence[Tensor],
    oracle: Sequence[Tensor],
    plain_answer: Sequence[Tensor],
    lse: Tensor,
    dtype: torch.dtype,
    *,
    by: str = "",
) -> None:
    """Like :func:`assert_close` for the gradients of one call. Those of different inputs are made of the same numbers,
    and the probabilities are computed again from an lse that is rounded to the last place of its own size."""
    finite = lse[lse.isfinite()].abs()
    digits = 1.0 + (finite.max().item() if finite.numel() else 0.0) / ULPS
    scale = max((g.abs().max().item() for g in oracle if g.numel()), default=0.0) * digits
    for name, *three in zip(("query", "key", "value", "attn_mask"), actual, oracle, plain_answer):
        assert_close(*three, f"gradient of {name}{by and f' by {by}'}", dtype=dtype, scale=scale)


def gradients(out: Tensor, leaves: Sequence[Tensor], grad_out: Tensor, lse: Tensor | None = None) -> list[Tensor]:
    """Gradients of sum(out * grad_out) (+ sum of the finite lse) in the dtypes of the leaves."""
    total = (out * grad_out.to(out.dtype)).sum()
    if lse is not None:
        total = total + lse[lse.isfinite()].sum().to(total.dtype)
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def same_bits(found: Tensor, right: Tensor) -> bool:
    """Whether both have the same bits, those of zeros included; any NaN is as good as another."""
    nan = right.isnan()
    bits = [t.masked_fill(nan, 0).view(torch.int16) for t in (found, right)]
    return torch.equal(found.isnan(), nan) and torch.equal(*bits)
