"""The public functions: scaled dot-product attention by the fastest exact route."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .call import PLAIN, Arguments, AttentionOutput, Results, Wanted, check_call, order_of_transforms, prepared
from .call.lazy_mask import LazyMask
from .config import AttentionConfig, config_of, default_config
from .routes import choose, route_names, why_not
from .routes.derivatives import is_recorded
from .routes.prepared import Kind, again
from .routes.run import gradients, run


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Scaled dot-product attention by the fastest exact route on this device, never in O(L*S) memory.

    Takes the arguments of :func:`torch.nn.functional.scaled_dot_product_attention`, with the same meaning.

    Args:
        query: ``[*batch, Hq, L, D]``; key ``[*batch, Hkv, S, D]``; value ``[*batch, Hkv, S, Dv]``; float16, bfloat16,
            float32 or float64; leading dimensions broadcast.
        attn_mask: broadcasts to ``[*batch, Hq, L, S]``; bool (True = takes part) or float (added to the scores, any
            float dtype), or a :class:`~pascal_attn_core.LazyMask`, evaluated tile by tile. May be combined with
            ``is_causal`` and ``window``. A row that may attend to no key gives zeros. torch's own
            ``causal_lower_right(L, S)`` is accepted too.
        dropout_p: share of the probabilities that is dropped; the random numbers are those of torch's generator.
        is_causal: query i sees the keys up to i (see ``alignment``).
        scale: factor of the scores; None = 1 / sqrt(D).
        enable_gqa: Hq may be a multiple of Hkv. K and V are never expanded.
        alignment: where the diagonal of ``is_causal`` and ``window`` lies when L != S: ``"upper_left"`` as in torch
            (query 0 sees key 0), or ``"lower_right"`` as in flash-attn (the last query sees the last key). For L = 2,
            S = 4, causal (1 = may attend)::

                upper_left   1 0 0 0      lower_right  1 1 1 0
                             1 1 0 0                   1 1 1 1

        window: (left, right): query i sees keys i - left ... i + right only; -1 = no bound. Tiles outside are skipped.
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2); None = off.
        sinks: ``[Hq]``, one additional score per head that enters only the softmax's denominator (gpt-oss).
        config: routes, memory budget, tiles; None = the one from the environment (:meth:`AttentionConfig.from_env`).
    Returns:
        ``[*batch, Hq, L, Dv]`` in the dtype of query. The tiled route lays it out in memory like query; torch's kernels
        use their own layout.
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments; nothing has been computed.
        UnsupportedAttention: the route that the config names cannot take the call; ``.reasons`` says why.
    """
    kind = None
    is_torchs = window is None and softcap is None and sinks is None and alignment == "upper_left"
    if is_torchs and not torch.compiler.is_compiling():
        its = default_config() if config is None else config
        out, kind = again(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, config=its)
        if out is not None:
            return out
    more: dict[str, Any] = {"alignment": alignment, "window": window, "softcap": softcap, "sinks": sinks}
    given = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **more)
    return _attend(sdpa, given, config, with_lse=False, kind=kind)


def sdpa_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> AttentionOutput:
    """As :func:`sdpa`, and also return lse, the natural logarithm of the softmax's denominator.

    It is ``[*batch, Hq, L]`` in float32 (float64 for float64 inputs), -inf for a row without keys, and differentiable
    too. Two results over disjoint keys can be merged by their lse."""
    more: dict[str, Any] = {"alignment": alignment, "window": window, "softcap": softcap, "sinks": sinks}
    given = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **more)
    return _attend(sdpa_with_lse, given, config, with_lse=True)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    grad_lse: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value from given forward results, in O(N) memory and without autograd.

    ``out`` and ``lse`` may come from more keys than ``key`` holds, as in ring attention: the probabilities are
    ``exp(scores - lse)``, wherever lse comes from (Dao 2023, FlashAttention-2, Algorithm 2).

    Args:
        grad_out: gradient of the output, in the shape of ``out``.
        out, lse: as :func:`sdpa_with_lse` returns them: ``[*batch, Hq, L, Dv]`` and ``[*batch, Hq, L]``.
        grad_lse: gradient of lse, in its shape; None = zero.
        others: those of the call that returned out and lse. With a float mask whose values are far larger than the
            scores, precision is lost: autograd's own backward pass saves more of the sums than lse holds.
    Returns:
        (grad_query, grad_key, grad_value) in the shapes and the dtype of query, key and value.
    Raises:
        TypeError, ValueError: invalid or inconsistent arguments.
        UnsupportedAttention: the route that the config names cannot compute gradients from given results.
    """
    more: dict[str, Any] = {"alignment": alignment, "window": window, "softcap": softcap, "sinks": sinks}
    given = Arguments(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, **more)
    call, config = check_call(prepared(given)), config_of(config)
    query, dtype, shape = call.query, call.query.dtype, call.out_shape
    saved = Results(_result("out", out, query, dtype, shape), _result("lse", lse, query, call.sums_dtype, shape[:-1]))
    grad_out = _result("grad_out", grad_out, query, dtype, shape)
    if grad_lse is not None:
        grad_lse = _result("grad_lse", grad_lse, query, call.sums_dtype, shape[:-1])
    with torch.no_grad():
        grads = gradients(call, config, saved, Wanted(grad_out, grad_lse))
    return grads.query, grads.key, grads.value


def _result(name: str, tensor: Tensor, query: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A result of a call, or the gradient of one, in the dtype that the gradients are computed from."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name} must be a float tensor, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if tuple(tensor.shape) != shape or tensor.device != query.device:
        found = f"{list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name} must have shape {list(shape)} on {query.device}, got {found}")
    return tensor.resolve_neg().to(dtype)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LazyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: str = "upper_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> str:
    """Return which route :func:`sdpa` would take for this call and why, and why not each of the others.

    If the choice depends on timing two kernels (:mod:`.routes.timing`), they are timed. Raises as :func:`sdpa` does."""
    config = config_of(config)
    more: dict[str, Any] = {"alignment": alignment, "window": window, "softcap": softcap, "sinks": sinks}
    given = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **more)
    call = check_call(prepared(given))
    chosen = choose(call, config)
    lines = [f"route {chosen.route}: {chosen.why}"]
    for route in route_names():
        if route != chosen.route:
            reasons = why_not(route, call, config)
            lines.append(f"  {route}: {'; '.join(reasons) if reasons else 'could take it'}")
    return "\n".join(lines)


def _may_be_recorded() -> bool:
    """Whether a call may be recorded: by ``make_fx``, which does not record derivatives, or by torch.compile, which
    watches each function that runs after a transform has ended its graph."""
    if order_of_transforms():
        return "torch._dynamo" in sys.modules
    return is_recorded()


def _attend(
    function: Callable[..., Any],
    given: Arguments,
    config: AttentionConfig | None,
    *,
    with_lse: bool,
    kind: Kind | None = None,
) -> Any:
    """Compute a call of ``function``; its choice is kept for ``kind``. Compiled, traced, fake and meta calls, and those
    of tensor classes with a dispatch of their own, become one operator."""
    if config is not None:
        config_of(config)  # raises what is wrong with it
    is_compiling = torch.compiler.is_compiling()
    is_plain = type(given.query) in PLAIN and type(given.key) in PLAIN and type(given.value) in PLAIN
    if not is_plain and not is_compiling:
        overriding = (*given[:4], given.sinks)
        if has_torch_function(overriding):
            by_name = {**dict(zip(Arguments._fields[8:], given[8:])), "config": config}
            return handle_torch_function(function, overriding, *given[:8], **by_name)
    as_given, given = given, prepared(given)
    has_dispatch = any(isinstance(t, Tensor) and (t.is_meta or type(t) not in PLAIN) for t in given[:4])
    # While torch.jit.trace records, sizes are tensors, with which no route can work.
    if is_compiling or has_dispatch or torch._C._get_tracing_state() is not None or _may_be_recorded():
        from .routes import operator  # not before: where two copies of this package are loaded, both would register it

        found = operator.call(given, config, with_lse=with_lse)
        return found if with_lse else found.out
    call = check_call(given)
    if any(own is not its for own, its in zip(as_given, (call.query, call.key, call.value, call.attn_mask))):
        kind = None  # the choice is one for other tensors than those of the kind
    out, lse, *_ = run(call, default_config() if config is None else config, with_lse=with_lse, kind=kind)
    return AttentionOutput(out, lse) if with_lse else out  # type: ignore[arg-type]
