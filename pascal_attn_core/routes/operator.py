"""One custom operator, ``pascal_attn::sdpa``, with a fake and an autograd formula: what torch.compile, fake tensors and
graphs see of a call. Inside it the call takes the same route as anywhere else, and so do its gradients.

An operator's schema is flat, so the options of a call travel through it one by one. Their list stands here once, as
text; the functions below take them as they come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..call import (
    Arguments,
    AttentionCall,
    AttentionOutput,
    Results,
    TiledStats,
    Wanted,
    check_call,
    empty_output,
    order_of_transforms,
    without_autocast,
)
from ..call.flex_rules import is_block_mask
from ..call.lazy_mask import LazyMask, MaskRule, rule_named
from ..config import AttentionConfig, RouteUnavailable, config_of, default_config
from ..machine.runtime import Runtime, runtime_of
from ..version import __version__
from .derivatives import is_recorded
from .route import Choice, Request, Route
from .run import choose, note, run

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask"
_OPTIONS = (
    "float dropout_p, bool is_causal, float? scale, bool enable_gqa, str alignment, SymInt[]? window, float? softcap, "
    "Tensor? sinks, str config, str rule, SymInt[] rule_shape, Tensor[] rule_tensors"
)
_NUM_INPUTS, _NUM_OPTIONS = 4, len(_OPTIONS.split(", "))
_SINKS = Arguments._fields.index("sinks")  # its place among the operator's arguments

# Compiled graphs are cached on disk by what they pass to the operator: with the version in it, a graph that was
# compiled against another version of the operator is never taken from there.
_TAG = f"{__version__}|"
_ENVIRONMENT = "environment"  # instead of a config's token
_UNREGISTERED = "-"  # instead of a rule's name

_KEY = torch._C.DispatchKey
_AUTOGRAD_KEYS = (_KEY.AutogradFunctionality, _KEY.AutogradOther, _KEY.AutogradNestedTensor, _KEY.ADInplaceOrView)


def call(given: Arguments, config: AttentionConfig | None, *, with_lse: bool) -> AttentionOutput:
    """The call as one node of a graph, for torch.compile, torch.jit.trace and fake tensors; lse is nothing unless asked
    for. A mask that is a rule stays one: it goes in by its name, with the tensors that it reads."""
    query, key, value, attn_mask, _, _, scale, *_ = given
    is_rule = isinstance(attn_mask, LazyMask) or is_block_mask(attn_mask)
    tensors = [query, key, value] if attn_mask is None or is_rule else [query, key, value, attn_mask]
    if not all(isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested for t in tensors):
        check_call(query, key, value, attn_mask)  # raises
    if isinstance(scale, Tensor) and scale.requires_grad:
        check_call(query, key, value, scale=scale)  # raises: a graph would take its value
    if is_rule and query.is_meta:
        attn_mask = check_call(given).attn_mask  # a BlockMask as a LazyMask
    rule: tuple[str, Sequence[int], Sequence[Tensor]] = ("", (), ())
    is_traced, is_compiling = torch._C._get_tracing_state() is not None, torch.compiler.is_compiling()
    if order_of_transforms() and (is_compiling or not (is_traced or query.is_meta or isinstance(query, FakeTensor))):
        return sdpa_between_graphs(given, config, with_lse)
    if is_rule:
        is_never_asked = not is_compiling and (query.is_meta or isinstance(query, FakeTensor))  # there are no numbers
        if not (isinstance(attn_mask, LazyMask) and (isinstance(attn_mask.rule, MaskRule) or is_never_asked)):
            if not is_compiling:
                where = "under torch.jit.trace" if is_traced else f"for tensors of type {type(query).__name__}"
                where = "under make_fx" if is_recorded() else where
                raise TypeError(f"{where} mask_rule must register the rule of a LazyMask, got {attn_mask.rule!r}")
            return sdpa_between_graphs(given, config, with_lse)
        rule, attn_mask = _rule_arguments(attn_mask, is_traced), None
        given = given.changed(attn_mask=None)
    inputs = [t for t in (query, key, value, attn_mask, given.sinks) if t is not None]
    # A trace of torch.jit may run with gradients and without, wherever it was made; a compiled graph is guarded.
    for_grad = is_traced or (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))
    if given.window is not None:
        given = given.changed(window=[-1 if s is None else int(s) if is_traced else s for s in given.window])
    token = _TAG + (_ENVIRONMENT if config is None else config.token)
    flags = with_lse, for_grad, for_grad and attn_mask is not None and attn_mask.requires_grad
    out, lse, *_ = _sdpa(*given, token, *rule, *flags)
    return AttentionOutput(out, lse)


@torch.compiler.disable
def sdpa_between_graphs(given: Arguments, config: AttentionConfig | None, with_lse: bool) -> AttentionOutput:
    """Compute a call that torch.compile leaves between two graphs. A graph cannot hold a LazyMask whose rule is not
    registered by :func:`~pascal_attn_core.call.lazy_mask.mask_rule`. Nor does the operator have rules for tangents and
    for the transforms of torch.func."""
    return AttentionOutput(*run(check_call(given), config_of(config), with_lse=with_lse)[:2])  # type: ignore[arg-type]


# ---- arguments as a schema can carry them ----------------------------------------------------------------------------


def _config(token: str) -> AttentionConfig:
    token = token.partition("|")[2]  # whatever the version: a saved graph may be older than this package
    return default_config() if token == _ENVIRONMENT else AttentionConfig.from_token(token)


def _rule_arguments(mask: LazyMask, is_traced: bool) -> tuple[str, Sequence[int], Sequence[Tensor]]:
    """A mask as the operator takes it: ``"float32 module:name"``, its shape, the tensors that the rule reads."""
    name = mask.rule.name if isinstance(mask.rule, MaskRule) else _UNREGISTERED
    # While torch.jit traces, sizes are tensors, which no list of a traced operator may hold.
    shape = [int(size) if is_traced else size for size in mask.shape]
    return f"{str(mask.dtype).removeprefix('torch.')} {name}", shape, [t.detach() for t in mask.tensors]


def _unregistered(*indices: Tensor) -> Tensor:
    raise LookupError("this graph was traced without data, with a LazyMask whose rule is not registered with mask_rule")


def _checked(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *options: Any
) -> tuple[AttentionCall, str]:
    """(the call, the config's token) of the operator's arguments."""
    *options, token, rule, shape, tensors = options  # type: ignore[assignment]
    given = Arguments(query, key, value, attn_mask, *options)
    if rule:  # the inverse of _rule_arguments
        dtype, _, name = rule.partition(" ")
        function = _unregistered if name == _UNREGISTERED else rule_named(name)
        mask = LazyMask(shape, function, device=query.device, dtype=getattr(torch, dtype), tensors=tensors)
        given = given._replace(attn_mask=mask)
    if given.window is not None:
        given = given._replace(window=(given.window[0], given.window[1]))
    return check_call(given), token


# ---- routes ----------------------------------------------------------------------------------------------------------


class GraphRoutes:
    """Which route the calls of each kind take in graphs with gradients on one device. It is decided once: the backward
    pass, which finds nothing of the forward pass but tensors, must go back by the same route."""

    def __init__(self, runtime: Runtime):
        self.routes: dict[tuple, Route] = {}


def _kind(call: AttentionCall, token: str) -> tuple:
    tensors = (call.query, call.key, call.value, call.attn_mask)
    layouts = ((t.dtype, t.shape, t.stride()) if isinstance(t, Tensor) else t is None for t in tensors)
    flags = (call.scale, call.dropout_p, call.is_causal, call.left, call.right, call.offset, call.softcap)
    return (token, *layouts, *flags, call.sinks is None, call.needs_mask_grad)


def _choice(call: AttentionCall, token: str, *, with_lse: bool) -> Choice:
    """The route of a call whose gradients will be wanted: the same one in both passes."""
    kind, decided = (with_lse, *_kind(call, token)), runtime_of(call.query.device).part(GraphRoutes).routes
    config, route = _config(token), decided.get(kind)
    if route is not None:
        plan = route.plan(Request(call, config, with_lse, in_graph=True))
        if not isinstance(plan, list):
            return Choice(route, "as for earlier calls of this kind in compiled graphs", plan)
    choice = choose(call, config, with_lse=with_lse, in_graph=True, may_time=False)
    decided[kind] = choice.by
    return choice


def _forward_for_grad(call: AttentionCall, token: str, *, with_lse: bool) -> Results:
    stats = TiledStats()
    while True:
        choice = _choice(call, token, with_lse=with_lse)
        try:
            results = choice.by.forward(
                call, _config(token), choice.plan, with_lse=with_lse, for_grad=True, stats=stats
            )
        except RouteUnavailable:  # its plan names the reason from now on
            continue
        note(call, choice, stats)
        return results


@contextlib.contextmanager
def _autograd_reached() -> Iterator[None]:
    """Inside an operator's body nothing is recorded for gradients, whatever enable_grad says: here it is."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


# ---- the operators ---------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "pascal_attn::sdpa",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool with_lse, bool for_grad, bool wants_mask) "
    "-> (Tensor out, Tensor lse, Tensor log_sum, Tensor seed)",
)
def _sdpa(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, log_sum, dropout seed), the last three empty where there is none."""
    *arguments, with_lse, for_grad, wants_mask = arguments  # type: ignore[assignment]
    call, token = _checked(query, *arguments)
    with without_autocast(query):
        if for_grad:
            call = replace(call, needs_grad=True, needs_mask_grad=wants_mask)
            results = _forward_for_grad(call, token, with_lse=with_lse)
        else:
            results = Results(*run(call, _config(token), with_lse=with_lse, may_time=False)[:2])
    expected = _empty_results(call, with_lse=with_lse, for_grad=for_grad)
    return tuple(_as_promised(t, empty) for t, empty in zip(results, expected))  # type: ignore[return-value]


def _empty_results(call: AttentionCall, *, with_lse: bool, for_grad: bool) -> tuple[Tensor, ...]:
    """Results of the operator without values: their shapes, dtypes and strides."""
    out, like, dtype = empty_output(call), call.query, call.sums_dtype
    lse = like.new_empty(out.shape[:-1] if with_lse or for_grad else (0,), dtype=dtype)
    log_sum = like.new_empty(out.shape[:-1] if for_grad and call.has_bias else (0,), dtype=dtype)
    return out, lse, log_sum, like.new_empty((1,) if for_grad and call.dropout_p else (0,), dtype=torch.int64)


def _as_promised(tensor: Tensor | None, expected: Tensor) -> Tensor:
    """A result in the strides that the fake operator has given it. What a route did not compute is never read."""
    if tensor is None:
        return expected.fill_(torch.nan) if expected.is_floating_point() else expected.zero_()
    if expected.numel() == 0:
        return expected
    return tensor if tensor.stride() == expected.stride() else expected.copy_(tensor)


@_sdpa.register_fake
def _(query: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *arguments, with_lse, for_grad, _ = arguments  # type: ignore[assignment]
    return _empty_results(_checked(query, *arguments)[0], with_lse=with_lse, for_grad=for_grad)


@torch.library.custom_op(
    "pascal_attn::sdpa_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor log_sum, Tensor seed, {_INPUTS}, "
    f"{_OPTIONS}, bool with_lse, bool wants_mask, bool wants_sinks) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _sdpa_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, log_sum: Tensor, seed: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, attn_mask (or empty) and sinks (or empty)."""
    *arguments, with_lse, wants_mask, wants_sinks = arguments  # type: ignore[assignment]
    call, token = _checked(*arguments)
    call = replace(call, needs_grad=True, needs_mask_grad=wants_mask)
    saved = Results(out, lse, log_sum if log_sum.numel() else None, seed if seed.numel() else None)
    with without_autocast(call.query), _autograd_reached():
        choice = _choice(call, token, with_lse=with_lse)
        wanted = Wanted(grad_out, grad_lse, wants_mask, wants_sinks)
        grads = choice.by.backward(call, _config(token), choice.plan, saved, wanted)
    return tuple(call.query.new_empty(0) if grad is None else grad.contiguous() for grad in grads[:5])


@_sdpa_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, attn_mask, *options = arguments[6:-3]
    wants_mask, wants_sinks = arguments[-2:]
    sinks = options[_SINKS - _NUM_INPUTS] if wants_sinks else None
    like = (query, key, value, attn_mask if wants_mask else None, sinks)
    return tuple(query.new_empty(0) if t is None else t.new_empty(t.shape) for t in like)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    options, ctx.with_lse = inputs[_NUM_INPUTS : _NUM_INPUTS + _NUM_OPTIONS], inputs[-3]
    ctx.save_for_backward(*inputs[:_NUM_INPUTS], inputs[_SINKS], *output, *options[-1])
    ctx.options = [None if isinstance(option, Tensor) else option for option in options[:-1]]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *others: None) -> tuple:
    *inputs, sinks, out, lse, log_sum, seed = ctx.saved_tensors[: _NUM_INPUTS + 5]
    rule_tensors = list(ctx.saved_tensors[_NUM_INPUTS + 5 :])
    options = [*ctx.options, rule_tensors]
    options[_SINKS - _NUM_INPUTS] = sinks
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    wants_mask, wants_sinks = ctx.needs_input_grad[3], sinks is not None and ctx.needs_input_grad[_SINKS]
    flags = ctx.with_lse, wants_mask, wants_sinks
    found = _sdpa_backward(grad_out, grad_lse, out, lse, log_sum, seed, *inputs, *options, *flags)
    grads: list[Any] = [*found[:3], found[3] if wants_mask else None, *[None] * (_NUM_OPTIONS + 3)]
    grads[_SINKS] = found[4] if wants_sinks else None
    # To autograd an empty list is a list of tensors.
    shape, tensors = _NUM_INPUTS + _NUM_OPTIONS - 2, _NUM_INPUTS + _NUM_OPTIONS - 1
    grads[shape] = None if options[-2] else []
    grads[tensors] = [None] * len(rule_tensors)
    return tuple(grads)


_sdpa.register_autograd(_backward, setup_context=_save)
