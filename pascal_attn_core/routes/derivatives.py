"""A route's results in autograd's graph, with every derivative that is asked for: gradients, tangents (forward mode),
and of both of them gradients and tangents once more; all of them in tiles besides the route's own gradients.

Four functions, each of which differentiates into the others::

    RouteFunction    (out, lse) of the inputs            gradients: GradientFunction, tangents: TangentFunction
    GradientFunction gradients of <grad_out, out> + <grad_lse, lse>
    TangentFunction  (out', lse') along a direction
    SecondFunction   gradients of <grad_out, out'> + <grad_lse, lse'>, the same as the derivative of those gradients
                     along the direction; it is differentiated no further

They take part in the transforms of ``torch.func``: under vmap they are one call with one more leading dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call import AttentionCall, Results, TiledStats, Wanted, without_autocast
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig
from ..tiled.tangents import Rates, Tangents

_FIVE, _RESULTS = "tttts", "trrn"  # query, key, value, mask, sinks; out, lse, log_sum, seed


@dataclass(eq=False)
class Given:
    """What a call is made of besides tensors, and its route. ``rule``: its mask, if that is no tensor."""

    call: AttentionCall
    config: AttentionConfig
    route: Any
    plan: Any
    stats: TiledStats | None = None
    rule: LazyMask | None = None

    def of(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Tensor | None) -> AttentionCall:
        return self.call.with_tensors(query, key, value, self.rule or mask, sinks)

    def batched(self, size: int) -> Given:
        """The calls of ``size`` samples as one call, which goes in tiles whatever the single ones do."""
        return replace(self, call=replace(self.call, batch=(size, *self.call.batch)), route=tiles[0], plan=None)


tiles: list[Any] = []  # the route of that name, which is built on this module


def _is_many(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and torch._C._functorch.is_legacy_batchedtensor(tensor)


def _resolved(tensors: Sequence[Any]) -> list[Any]:
    return [t.resolve_neg() if isinstance(t, Tensor) else t for t in tensors]  # see check_call


def _refuse(given: Given) -> None:
    """Raise for a call of which the tiles do not see all."""
    if given.call.score_rule is not None or getattr(given.plan, "packed", None) is not None:
        what = "several sequences in one" if given.call.score_rule is None else "a score_mod"
        raise RuntimeError(f"tangents, and gradients of gradients, are not there for a call with {what}")


def _saved(call: AttentionCall, results: Sequence[Any]) -> Results:
    saved = Results(*results)
    if call.has_bias and saved.log_sum is None and saved.lse is not None:
        saved = saved._replace(log_sum=torch.zeros_like(saved.lse))  # as in run.gradients
    return saved


def _sum(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [a if b is None else b if a is None else a + b for a, b in zip(first, second)]


class _Derivable(torch.autograd.Function):
    """A function of tensors, one letter each in ``takes`` and ``gives``: t ``[..., tokens, X]``, r ``[..., tokens]``,
    s sinks, n nothing to differentiate. What follows in ``apply`` is no tensor."""

    takes = gives = ""

    @classmethod
    def forward(cls, *inputs: Any) -> Any:
        if any(map(_is_many, inputs)):
            return cls.many(*inputs)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None:
            return cls.compute(*inputs)
        from .recorded import derivative  # make_fx, say that of torch.func.linearize, records it as one operator

        return derivative(cls.compute, inputs)

    @staticmethod
    def compute(*inputs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple, output: Any) -> None:
        kept = inputs[: len(cls.takes)]
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)
        ctx.given = inputs[len(cls.takes) :]
        ctx.set_materialize_grads(False)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple, *inputs: Any) -> Any:
        size, count = info.batch_size, len(cls.takes)
        tensors, dims, given = list(inputs[:count]), in_dims[:count], inputs[count]
        if any(kind == "s" and t is not None for kind, t in zip(cls.takes, tensors)):  # a call has one set of sinks
            singles = [
                cls.apply(*(t if d is None else t.select(d, n) for t, d in zip(tensors, dims)), *inputs[count:])
                for n in range(size)
            ]
            found = [None if each[0] is None else torch.stack(each) for each in zip(*singles)]
            return tuple(found), tuple(None if t is None else 0 for t in found)
        shapes: Any = []
        for n, (kind, tensor, dim) in enumerate(zip(cls.takes, tensors, dims)):
            if tensor is None or kind == "n":
                shapes.append(None)
                continue
            tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            shapes.append(tensor.shape)
            rank = 1 + len(given.call.batch) + (3 if kind == "t" else 2)
            tensors[n] = tensor.reshape(size, *[1] * (rank - tensor.dim()), *tensor.shape[1:])
        found = cls.apply(*tensors, given.batched(size), *inputs[count + 1 :])
        shapes = cls.shapes(shapes, given, size)
        found = [t if t is None or shape is None else t.reshape(shape) for t, shape in zip(found, shapes)]
        return tuple(found), tuple(None if t is None or kind == "n" else 0 for kind, t in zip(cls.gives, found))

    @classmethod
    def many(cls, *inputs: Any) -> Any:
        """:meth:`vmap` under the older vmap of ``is_grads_batched`` and ``torch.autograd.functional``, which shows the
        function its own tensors."""
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        dims = tuple(0 if _is_many(t) else None for t in inputs)
        inputs = tuple(t if d is None else torch._remove_batch_dim(t, level, 1, 0) for t, d in zip(inputs, dims))
        size = next(len(t) for t, d in zip(inputs, dims) if d == 0)
        found, dims = cls.vmap(SimpleNamespace(batch_size=size), dims, *inputs)
        return tuple(t if d is None else torch._add_batch_dim(t, 0, level) for t, d in zip(found, dims))

    @classmethod
    def shapes(cls, taken: list[Any], given: Given, size: int) -> Sequence[Any]:
        """Of the results for ``size`` samples: out and lse, by default."""
        heads = () if given.call.num_heads == 1 and len(taken[0]) == 3 else (given.call.num_heads,)
        rows = (size, *given.call.batch, *heads, given.call.seq_len_q)
        return (*rows, given.call.head_dim_v), rows, rows, None


class RouteFunction(_Derivable):
    """``apply(query, key, value, mask, sinks, given, *captured) -> (out, lse, log_sum, seed)`` by a route that computes
    its own gradients; the inputs, what the call's score rule reads, and the route's results are kept for them."""

    takes, gives = _FIVE, _RESULTS

    @staticmethod
    def compute(*inputs: Any) -> Any:
        given = inputs[5]
        call = given.of(*inputs[:5])
        with without_autocast(call.query):
            return tuple(
                given.route.forward(call, given.config, given.plan, with_lse=True, for_grad=True, stats=given.stats)
            )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        kept = [*inputs[:5], *output, *inputs[6:]]
        ctx.save_for_backward(*kept)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*kept)
        ctx.given = inputs[5]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output[2:] if t is not None))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> Any:
        kept, given, wants = ctx.saved_tensors, ctx.given, ctx.needs_input_grad[3:5]
        grad_out = torch.zeros_like(kept[5]) if grad_out is None else grad_out
        inputs = (grad_out, grad_lse, *kept[:9], given, wants)
        if given.call.score_rule is not None:
            with_rule = (*kept[:5], *kept[9:])
            compute = lambda g, h: _gradients(g, h, *inputs[2:], captured=True)  # noqa: E731
            grads = in_any_graph(compute, given.route.name, grad_out, grad_lse, with_rule)
            return *grads[:5], None, *grads[5:]
        is_plain = not torch.is_grad_enabled() and forward_ad._current_level < 0
        if is_plain and not (torch._C._are_functorch_transforms_active() or _is_many(grad_out) or _is_many(grad_lse)):
            return *_gradients(*inputs), None
        return _needed(ctx, (*GradientFunction.apply(*inputs), None))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        kept = ctx.saved_tensors
        return *TangentFunction.apply(*_direction(tangents[:5]), *kept[:9], ctx.given), None, None


def _needed(ctx: Any, grads: Sequence[Any]) -> tuple:
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))


def _direction(tangents: Sequence[Any]) -> list[Tensor | None]:
    return [None if t is None or t._is_zerotensor() else t for t in tangents]


def _gradients(grad_out: Tensor, grad_lse: Tensor | None, *rest: Any, captured: bool = False) -> tuple:
    *inputs, given, wants = rest
    call = given.of(*inputs[:5])
    grad_out, grad_lse = _resolved((grad_out, grad_lse))
    with torch.no_grad(), without_autocast(call.query):
        saved = Results(*inputs[5:9])
        found = given.route.backward(call, given.config, given.plan, saved, Wanted(grad_out, grad_lse, *wants))
    return (*found[:5], *found.captured) if captured else found[:5]


class GradientFunction(_Derivable):
    """``apply(grad_out, grad_lse, *inputs, *results, given, wants) -> gradients of the inputs``; ``wants``: whether
    those of mask and sinks."""

    takes, gives = "tr" + _FIVE + _RESULTS, _FIVE

    @staticmethod
    def compute(*inputs: Any) -> Any:
        return _gradients(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, (given, _) = ctx.saved_tensors, ctx.given
        along, call = _direction(grads), kept[2:11]
        rates = TangentFunction.apply(*along, *call, given)
        grad_lse = rates[1] if ctx.needs_input_grad[1] else None
        second = SecondFunction.apply(*along, *kept, *rates, given, ctx.needs_input_grad[5:7])
        return _needed(ctx, (rates[0], grad_lse, *second, *[None] * 6))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        kept, (given, wants) = ctx.saved_tensors, ctx.given
        (of_out, of_lse), along, found = _direction(tangents[:2]), _direction(tangents[2:7]), [None] * 5
        if of_out is not None or of_lse is not None:
            of_out = torch.zeros_like(kept[7]) if of_out is None else of_out
            found = GradientFunction.apply(of_out, of_lse, *kept[2:], given, wants)
        if any(t is not None for t in along):
            rates = TangentFunction.apply(*along, *kept[2:], given)
            found = _sum(found, SecondFunction.apply(*along, *kept, *rates, given, wants))
        return tuple(found)

    @classmethod
    def shapes(cls, taken: list[Any], given: Given, size: int) -> Sequence[Any]:
        return *taken[2:6], None


class TangentFunction(_Derivable):
    """``apply(*direction, *inputs, *results, given) -> (out', lse')``."""

    takes, gives = _FIVE + _FIVE + _RESULTS, "tr"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        given, along = inputs[-1], Tangents(*_resolved(inputs[:5]))
        _refuse(given)
        call = given.of(*inputs[5:10])
        with without_autocast(call.query):
            return tuple(tiles[0].tangent(call, given.config, _saved(call, inputs[10:14]), along))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        kept, (given,), needs = ctx.saved_tensors, ctx.given, ctx.needs_input_grad
        grad_out = torch.zeros_like(kept[10]) if grad_out is None else grad_out
        first = second = [None] * 5
        if any(needs[:5]):
            first = GradientFunction.apply(grad_out, grad_lse, *kept[5:], given, needs[3:5])
        if any(needs[5:10]):
            rates = TangentFunction.apply(*kept, given)
            second = SecondFunction.apply(*kept[:5], grad_out, grad_lse, *kept[5:], *rates, given, needs[8:10])
        return _needed(ctx, (*first, *second, *[None] * 5))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(t is not None for t in _direction(tangents[5:10])):
            raise RuntimeError(_NO_MORE.format("tangents of tangents"))
        return TangentFunction.apply(*_direction(tangents[:5]), *ctx.saved_tensors[5:], *ctx.given)

    @classmethod
    def shapes(cls, taken: list[Any], given: Given, size: int) -> Sequence[Any]:
        return super().shapes(taken[10:], given, size)


class SecondFunction(_Derivable):
    """``apply(*direction, grad_out, grad_lse, *inputs, *results, out', lse', given, wants) -> five tensors`` in the
    shapes of the inputs."""

    takes, gives = _FIVE + "tr" + _FIVE + _RESULTS + "tr", _FIVE

    @staticmethod
    def compute(*inputs: Any) -> Any:
        *tensors, given, wants = inputs
        _refuse(given)
        tensors = _resolved(tensors)
        call, wanted = given.of(*tensors[7:12]), Wanted(*tensors[5:7], *wants)
        with without_autocast(call.query):
            saved, rates = _saved(call, tensors[12:16]), Rates(*tensors[16:])
            return tiles[0].second(call, given.config, saved, Tangents(*tensors[:5]), rates, wanted)[:5]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_NO_MORE.format("third derivatives"))

    jvp = backward

    @classmethod
    def shapes(cls, taken: list[Any], given: Given, size: int) -> Sequence[Any]:
        return *taken[7:11], None


_NO_MORE = (
    "{} must be taken with route='math', got a call in tiles; "
    "pass config=AttentionConfig(route='math', math_limit_mib=...)"
)


Grads = tuple[Tensor | None, ...]
Compute = Callable[[Tensor, Tensor | None], Grads]


def in_any_graph(
    compute: Compute, route: str, grad_out: Tensor, grad_lse: Tensor | None, inputs: Sequence[Tensor | None]
) -> Grads:
    """The gradients that ``compute(grad_out, grad_lse)`` returns, in a form that serves any backward pass.

    Args:
        compute: a gradient or None for each of ``inputs``; it is called without a graph.
        route: its name, for the error of differentiating the gradients.
        inputs: the tensors besides grad_out and grad_lse on which the gradients depend.
    Raises:
        RuntimeError: the backward pass is for many gradients at once (``is_grads_batched``, ``torch.func.vmap``).
    """
    functorch, given = torch._C._functorch, [t for t in (grad_out, grad_lse) if t is not None]
    if any(functorch.is_legacy_batchedtensor(t) or functorch.is_batchedtensor(t) for t in given):
        raise RuntimeError(f"many gradients at once must be taken with route='math', got a {route} call")
    with torch.no_grad():
        grads = compute(grad_out, grad_lse)
    if not torch.is_grad_enabled():
        return grads
    error = (
        f"gradients of gradients must be taken with route='math', got a {route} call; "
        "pass config=AttentionConfig(route='math', math_limit_mib=...)"
    )
    sources: list[Any] = [*grads, *given, *inputs]
    return torch._C._functions.DelayedError(error, len(sources))(*sources)[: len(grads)]
