"""A route's results in autograd's graph, with every derivative that is asked for.

Three functions, each of which differentiates into the others::

    RouteFunction      (out, lse) of the inputs, by a route
    GradientFunction   gradients of <grad_out, out> + <grad_lse, lse>, by the same route
    DirectionFunction  along a direction, in tiles: (out', lse'), and the derivatives of those gradients, which are
                       also the gradients of <grad_out, out'> + <grad_lse, lse'>; theirs are computed by
                       :meth:`.math.MathRoute.thirds`
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call import AttentionCall, Results, TiledStats, Wanted, check_call, order_of_transforms, without_autocast
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig


@dataclass(eq=False)
class Given:
    """This holds what a call is made of besides tensors, and its route. ``rule``: its mask, if that is no tensor;
    ``shape``: of its output."""

    call: AttentionCall
    config: AttentionConfig
    route: Any
    plan: Any
    shape: tuple[int, ...]
    stats: TiledStats | None = None
    rule: LazyMask | None = None

    def of(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Tensor | None) -> AttentionCall:
        return self.call.with_tensors(query, key, value, self.rule or mask, sinks)

    @property
    def unseen(self) -> tuple[str, str] | None:
        """A part of the call that its tiles do not see, and the remedy; None where they see all of it."""
        if getattr(self.plan, "packed", None) is not None:
            return "several sequences in one", "pass config=AttentionConfig(route='tiled')"
        return ("a score_mod", "pass a float attn_mask or a LazyMask instead of it") if self.call.score_rule else None

    def batched(self, size: int) -> Given:
        """The calls of ``size`` samples as one call, which goes in tiles whatever the single ones do."""
        batch, call = (size, *self.call.batch), self.call
        shape = (*batch, call.num_heads, call.seq_len_q, call.head_dim_v)
        return replace(self, call=replace(call, batch=batch), route=routes["tiled"], plan=None, shape=shape)


def is_recorded() -> bool:
    """Whether ``make_fx``, that of ``torch.func.linearize`` say, records the operators that run."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


routes: dict[str, Any] = {}  # tiled and math by name, which are built on this module


def _resolved(tensors: Sequence[Any]) -> list[Any]:
    return [t.resolve_neg() if isinstance(t, Tensor) else t for t in tensors]  # see check_call


def _also_of_many(backward: Any) -> Any:
    """``backward``, which takes many gradients at once (``is_grads_batched``), too: as :func:`torch.func.vmap` does."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor

    def taken(ctx: Any, *grads: Any) -> Any:
        dims = tuple([0 if isinstance(t, Tensor) and is_batched(t) else None for t in grads])
        if 0 not in dims:
            return backward(ctx, *grads)
        many = grads[dims.index(0)]  # one of another level would get a dimension of size 0
        level = next((n for n in range(1, 65) if len(torch._remove_batch_dim(many, n, 0, 0))), 1)
        grads = tuple(t if dim is None else torch._remove_batch_dim(t, level, 0, 0) for t, dim in zip(grads, dims))
        found: list[Any] = []

        def of_one(*grads: Any) -> Any:
            found[:] = backward(ctx, *grads)
            return [t for t in found if t is not None]

        stacked = iter(torch.func.vmap(of_one, dims)(*grads))
        return tuple(t if t is None else torch._add_batch_dim(next(stacked), 0, level) for t in found)

    return staticmethod(taken)


class _Derivable(torch.autograd.Function):
    """A function of tensors, one letter each in ``takes`` and ``gives``: t ``[..., tokens, X]``, r ``[..., tokens]``,
    s sinks, n nothing to differentiate. The first five are those of the call. What follows in ``apply`` is no tensor,
    first of all a :class:`Given`."""

    takes, gives = "tttts" + "trrn", "tttts"  # query, key, value, mask, sinks; out, lse, log_sum, seed
    compute: Any

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*inputs)
        # Function.apply would first bind the arguments to those of forward, which takes 12 microseconds.
        return super(torch.autograd.Function, cls).apply(*inputs)  # type: ignore[misc]

    @classmethod
    def forward(cls, *inputs: Any) -> Any:
        if is_recorded():
            from .recorded import as_one_node

            return as_one_node(cls, inputs)
        if "torch._dynamo" in sys.modules and order_of_transforms():  # a transform ends a graph, but not the compiling
            return torch.compiler.disable(cls.compute)(*inputs)
        return cls.compute(*inputs)

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple, output: Any) -> None:
        cls.keep(ctx, inputs[: len(cls.takes)], inputs[len(cls.takes) :])

    @staticmethod
    def keep(ctx: Any, tensors: Sequence[Any], given: Any) -> None:
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
        ctx.given = given
        ctx.set_materialize_grads(False)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple, *inputs: Any) -> Any:
        size, count, given = info.batch_size, len(cls.takes), inputs[len(cls.takes)]
        stacked = [
            t if t is None else t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(inputs[:count], in_dims)
        ]
        # A call has one set of sinks, and one seed from which each of its units draws other coins.
        has_sinks = any(kind == "s" and t is not None for kind, t in zip(cls.takes, stacked))
        if has_sinks or given.call.dropout_p or given.unseen:
            singles = [cls.apply(*(t if t is None else t[n] for t in stacked), *inputs[count:]) for n in range(size)]
            found = [None if each[0] is None else torch.stack(each) for each in zip(*singles)]
        else:
            ranks = [1 + len(given.call.batch) + (3 if kind == "t" else 2) for kind in cls.takes]
            units = [
                t if t is None else t.reshape(size, *[1] * (r - t.dim()), *t.shape[1:]) for t, r in zip(stacked, ranks)
            ]
            found = cls.apply(*units, given.batched(size), *inputs[count + 1 :])
            shapes: Any = [t if t is None else t.shape for t in stacked[:5]] if cls.gives.startswith("tttts") else []
            shapes += [(size, *given.shape[: None if kind == "t" else -1]) for kind in cls.gives[len(shapes) :]]
            found = [t if t is None else t.reshape(shape) for t, shape in zip(found, shapes)]
        return tuple(found), tuple(None if t is None else 0 for t in found)


class RouteFunction(_Derivable):
    """``apply(query, key, value, mask, sinks, given, *captured) -> (out, lse, log_sum, seed)`` by a route that computes
    its own gradients; the inputs, what the call's score rule reads, and the route's results are kept for them."""

    takes, gives = "tttts", "trrn"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        given = inputs[5]
        found = given.route.again(given.plan, inputs[:4])
        if found:
            return *found, None
        call = given.of(*inputs[:5])
        return tuple(
            given.route.forward(call, given.config, given.plan, with_lse=True, for_grad=True, stats=given.stats)
        )

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple, output: Any) -> None:
        cls.keep(ctx, (*inputs[:5], *output, *inputs[6:]), inputs[5])
        if numbers := [t for t in output[2:] if t is not None]:
            ctx.mark_non_differentiable(*numbers)

    @_also_of_many
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> Any:
        kept, given = ctx.saved_tensors, ctx.given
        grad_out = torch.zeros_like(kept[5]) if grad_out is None else grad_out
        is_first = not (torch.is_grad_enabled() or order_of_transforms())
        found = given.route.again(given.plan, (*kept[:4], *kept[5:8], grad_out, grad_lse)) if is_first else None
        if found:
            return *found, None, None, None
        function = GradientFunction.compute if is_first else GradientFunction.apply
        grads = function(*kept[:9], grad_out, grad_lse, given, ctx.needs_input_grad[3:5], *kept[9:])
        return _needed(ctx, (*grads[:5], None, *grads[5:]))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs = (*ctx.saved_tensors[:9], *_direction(tangents[:5]), None, None, ctx.given, (False, False))
        return *DirectionFunction.apply(*inputs)[5:], None, None


def _needed(ctx: Any, grads: Sequence[Any]) -> tuple:
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))


def _direction(tangents: Sequence[Any]) -> list[Tensor | None]:
    return [None if t is None or t._is_zerotensor() else t for t in tangents]


class GradientFunction(_Derivable):
    """``apply(*inputs, *results, grad_out, grad_lse, given, wants, *captured) -> gradients of inputs and captured``;
    ``wants``: whether those of mask and sinks."""

    takes = _Derivable.takes + "tr"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        tensors, (given, wants) = inputs[:11], inputs[11:13]
        wanted, call = Wanted(*_resolved(tensors[9:]), *wants), given.of(*tensors[:5])
        with torch.no_grad(), without_autocast(call.query):
            found = given.route.backward(call, given.config, given.plan, _saved(given, tensors), wanted)
        return *found[:5], *found.captured

    @_also_of_many
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, wants = ctx.saved_tensors, ctx.needs_input_grad[3:5]
        found = DirectionFunction.apply(*kept[:9], *_direction(grads[:5]), *kept[9:], ctx.given[0], wants)
        return _needed(ctx, (*found[:5], *[None] * 4, *found[5:], *[None] * (len(ctx.needs_input_grad) - 11)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        kept, (given, wants, *_), (of_out, of_lse) = ctx.saved_tensors, ctx.given, _direction(tangents[9:11])
        found = DirectionFunction.apply(*kept[:9], *_direction(tangents[:5]), *kept[9:], given, wants)[:5]
        if of_out is not None or of_lse is not None:
            of_out = torch.zeros_like(kept[5]) if of_out is None else of_out
            first = GradientFunction.apply(*kept[:9], of_out, of_lse, given, wants)
            found = tuple(a if a is None else a + b for a, b in zip(found, first))
        return found


class FoundGradients(GradientFunction):
    """``apply(*inputs, *results, grad_out, grad_lse, given, wants, *gradients) -> gradients``, which something else has
    found. Results that are None are computed when a derivative asks for them."""

    @staticmethod
    def compute(*inputs: Any) -> Any:
        return inputs[13:]


def _saved(given: Given, tensors: Sequence[Any]) -> Results:
    if tensors[5] is not None:
        return Results(*tensors[5:9])
    with torch.no_grad(), without_autocast(tensors[0]):
        return Results(*RouteFunction.compute(*tensors[:5], given))


class DirectionFunction(_Derivable):
    """``apply(*inputs, *results, *direction, grad_out, grad_lse, given, wants) -> (*second, out', lse')``, where the
    derivatives of the five gradients are each None without ``grad_out``."""

    takes, gives = _Derivable.takes + "tttts" + "tr", "tttts" + "tr"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        *tensors, given, wants = inputs
        if given.unseen:
            raise RuntimeError(_UNSEEN.format(*given.unseen))
        call, saved, outer = given.of(*tensors[:5]), _saved(given, tensors), _resolved(tensors[14:])
        if call.has_bias and saved.log_sum is None and saved.lse is not None:
            saved = saved._replace(log_sum=torch.zeros_like(saved.lse))  # as in run.gradients
        along = call.with_tensors(*_resolved(tensors[9:14]))
        wanted = None if outer[0] is None else Wanted(*outer, *wants)
        with without_autocast(call.query):
            return routes["tiled"].along(call, given.config, wanted, saved=saved, along=along)

    @_also_of_many
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, (given, _), needs = ctx.saved_tensors, ctx.given, ctx.needs_input_grad
        if any(grad is not None for grad in grads[:5]):
            found = routes["math"].thirds(given.of(*kept[:5]), kept[9:14], kept[14:], grads)
            return _needed(ctx, (*found[:5], *[None] * 4, *found[5:], None, None))
        outer = torch.zeros_like(kept[5]) if grads[5] is None else grads[5], grads[6]
        first = second = [None] * 5
        if any(needs[9:14]):
            first = GradientFunction.apply(*kept[:9], *outer, given, needs[12:14])
        if any(needs[:5]):
            second = DirectionFunction.apply(*kept[:14], *outer, given, needs[3:5])[:5]
        return _needed(ctx, (*second, *[None] * 4, *first, *[None] * 4))


_UNSEEN = "tangents and gradients of gradients cannot be taken of a call with {}; {}"


# ---- gradients that something else has computed ----------------------------------------------------------------------

Grads = tuple[Tensor | None, ...]


def differentiable(out: Tensor, config: AttentionConfig) -> Tensor:
    """The output of torch's kernel, of which gradients of gradients can be taken. What can be known only when the
    gradients are computed costs a call no more than a hook, as by :meth:`torch.Tensor.register_hook` without its
    handle."""
    node = out.grad_fn
    if node is not None:
        out._backward_hooks = _hooks(config.token)
        node._register_hook_dict(out)
        out._backward_hooks = None  # for those of others
    return out


@functools.lru_cache(maxsize=64)
def _hooks(token: str) -> dict[int, Any]:
    """The hook of all outputs of calls with the config of this token, which are too many to make one for each."""
    return {0: functools.partial(_before_gradients, AttentionConfig.from_token(token))}


def _before_gradients(config: AttentionConfig, grad: Tensor) -> None:
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return
    node: Any = torch._C._current_autograd_node()
    while node is not None and not hasattr(node, "_saved_query"):  # a view or a slice of its output
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None or node._saved_dropout_p:  # only torch's kernel knows its coins
        return

    def after(found: Grads, grads: Grads) -> Grads:
        handle.remove()
        return found if grads[0] is None else _by_tiles(node, config, found, grads[0])

    handle = node.register_hook(after)


def _by_tiles(node: Any, config: AttentionConfig, found: Grads, grad_out: Tensor) -> Grads:
    """The gradients of a call of torch's kernel, whose node has found them without derivatives, by tiles."""
    query, key, value = node._saved_query, node._saved_key, node._saved_value
    mask = node._saved_attn_mask if hasattr(node, "_saved_attn_mask") else getattr(node, "_saved_attn_bias", None)
    inputs, grouped, count = (query, key, value, mask, None), query.shape[1] != key.shape[1], len(found)
    call = check_call(query, key, value, mask, 0.0, node._saved_is_causal, node._saved_scale, grouped)
    given = Given(call.without_tensors(), config, routes["tiled"], None, call.out_shape)
    found = (*(None if t is None else t.detach() for t in found), *[None] * (5 - len(found)))
    wants = found[3] is not None, False
    return FoundGradients.apply(*inputs, *[None] * 4, grad_out, None, given, wants, *found)[:count]
