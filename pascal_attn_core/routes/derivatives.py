"""A route's results in autograd's graph, with every derivative that is asked for.

Four functions, each of which differentiates into the others, in tiles besides the route's own gradients::

    RouteFunction    (out, lse) of the inputs            gradients: GradientFunction, tangents: TangentFunction
    GradientFunction gradients of <grad_out, out> + <grad_lse, lse>
    TangentFunction  (out', lse') along a direction
    SecondFunction   gradients of <grad_out, out'> + <grad_lse, lse'>, the same as the derivative of those gradients
                     along the direction; its own are computed by :meth:`.math.MathRoute.thirds`
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from ..call import AttentionCall, Results, TiledStats, Wanted, check_call, order_of_transforms, without_autocast
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig
from ..tiled.tangents import Tangents


@dataclass(eq=False)
class Given:
    """This holds what a call is made of besides tensors, and its route. ``rule``: its mask, if that is no tensor;
    ``shape``: of its output; ``found``: the gradients, where torch's kernel has computed them."""

    call: AttentionCall
    config: AttentionConfig
    route: Any
    plan: Any
    shape: tuple[int, ...]
    stats: TiledStats | None = None
    rule: LazyMask | None = None
    found: Any = None

    def of(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Tensor | None) -> AttentionCall:
        return self.call.with_tensors(query, key, value, self.rule or mask, sinks)

    @property
    def unseen(self) -> tuple[str, str] | None:
        """What the tiles of one call do not see, and what to do."""
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


def _tiles_of(given: Given, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[AttentionCall, Results]:
    """The call and its results as the passes over tiles take them.

    Raises:
        RuntimeError: the tiles do not see all of the call.
    """
    if given.unseen:
        raise RuntimeError(
            "tangents and gradients of gradients cannot be taken of a call with {}; {}".format(*given.unseen)
        )
    call, saved = given.of(*inputs), Results(*results)
    if call.has_bias and saved.log_sum is None and saved.lse is not None:
        saved = saved._replace(log_sum=torch.zeros_like(saved.lse))  # as in run.gradients
    return call, saved


class _Derivable(torch.autograd.Function):
    """A function of tensors, one letter each in ``takes`` and ``gives``: t ``[..., tokens, X]``, r ``[..., tokens]``,
    s sinks, n nothing to differentiate. The first five are those of the call. What follows in ``apply`` is no tensor,
    first of all a :class:`Given`."""

    takes, gives = "tttts" + "trrn", "tttts"  # query, key, value, mask, sinks; out, lse, log_sum, seed

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*inputs)
        # Function.apply would first bind the arguments to those of forward, which takes 12 microseconds.
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(inputs))  # type: ignore[misc]

    @classmethod
    def forward(cls, *inputs: Any) -> Any:
        if is_recorded():
            from .recorded import as_one_node

            return as_one_node(cls, inputs)
        if "torch._dynamo" in sys.modules and order_of_transforms():
            from .recorded import uncompiled

            return uncompiled(cls.compute, *inputs)
        return cls.compute(*inputs)

    @staticmethod
    def compute(*inputs: Any) -> Any:
        raise NotImplementedError

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
        size, count = info.batch_size, len(cls.takes)
        tensors, dims, given = list(inputs[:count]), in_dims[:count], inputs[count]
        # A call has one set of sinks, and one seed from which each of its units draws other coins.
        has_sinks = any(kind == "s" and t is not None for kind, t in zip(cls.takes, tensors))
        if has_sinks or given.call.dropout_p or given.unseen:
            parts = [tuple(t if d is None else t.select(d, n) for t, d in zip(tensors, dims)) for n in range(size)]
            singles = [cls.apply(*part, *inputs[count:]) for part in parts]
            found = [None if each[0] is None else torch.stack(each) for each in zip(*singles)]
            return tuple(found), tuple(None if t is None else 0 for t in found)
        shapes: list[Any] = [None] * count
        for n, (kind, tensor, dim) in enumerate(zip(cls.takes, tensors, dims)):
            if tensor is not None and kind != "n":
                tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
                shapes[n], rank = tensor.shape, 1 + len(given.call.batch) + (3 if kind == "t" else 2)
                tensors[n] = tensor.reshape(size, *[1] * (rank - tensor.dim()), *tensor.shape[1:])
        found = cls.apply(*tensors, given.batched(size), *inputs[count + 1 :])
        shapes = shapes[:5] if cls.gives == "tttts" else [(size, *given.shape)] + [(size, *given.shape[:-1])] * 2 + [()]
        found = [t if t is None or kind == "n" else t.reshape(s) for kind, t, s in zip(cls.gives, found, shapes)]
        return tuple(found), tuple(None if t is None or kind == "n" else 0 for kind, t in zip(cls.gives, found))


class RouteFunction(_Derivable):
    """``apply(query, key, value, mask, sinks, given, *captured) -> (out, lse, log_sum, seed)`` by a route that computes
    its own gradients; the inputs, what the call's score rule reads, and the route's results are kept for them."""

    takes, gives = "tttts", "trrn"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        given, call = inputs[5], inputs[5].of(*inputs[:5])
        return tuple(
            given.route.forward(call, given.config, given.plan, with_lse=True, for_grad=True, stats=given.stats)
        )

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple, output: Any) -> None:
        cls.keep(ctx, (*inputs[:5], *output, *inputs[6:]), inputs[5])
        if output[2] is not None or output[3] is not None:
            ctx.mark_non_differentiable(*(t for t in output[2:] if t is not None))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> Any:
        kept, given, wants = ctx.saved_tensors, ctx.given, ctx.needs_input_grad[3:5]
        if any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in (grad_out, grad_lse)):
            raise RuntimeError("many gradients at once must be taken by torch.func.vmap, got is_grads_batched=True")
        grad_out = torch.zeros_like(kept[5]) if grad_out is None else grad_out
        function = GradientFunction.apply if torch.is_grad_enabled() or order_of_transforms() else _gradients
        grads = function(*kept[:9], grad_out, grad_lse, given, wants, *kept[9:])
        return _needed(ctx, (*grads[:5], None, *grads[5:]))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return *TangentFunction.apply(*ctx.saved_tensors[:9], *_direction(tangents[:5]), ctx.given), None, None


def _needed(ctx: Any, grads: Sequence[Any]) -> tuple:
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))


def _direction(tangents: Sequence[Any]) -> list[Tensor | None]:
    return [None if t is None or t._is_zerotensor() else t for t in tangents]


def _gradients(*inputs: Any) -> tuple:
    tensors, (given, wants) = inputs[:11], inputs[11:13]
    wanted = Wanted(*_resolved(tensors[9:]), *wants)
    call = given.of(*tensors[:5])
    with torch.no_grad(), without_autocast(call.query):
        found = given.route.backward(call, given.config, given.plan, Results(*tensors[5:9]), wanted)
    return *found[:5], *found.captured


class GradientFunction(_Derivable):
    """``apply(*inputs, *results, grad_out, grad_lse, given, wants, *captured) -> gradients of inputs and captured``;
    ``wants``: whether those of mask and sinks. Without results they are computed when a derivative asks for them."""

    takes = _Derivable.takes + "tr"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        found = inputs[11].found
        return _gradients(*inputs) if found is None else found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given, call = ctx.given[0], _with_results(ctx)
        along, outer = _direction(grads), ctx.saved_tensors[9:]
        rates = TangentFunction.apply(*call, *along, given)
        second = SecondFunction.apply(*call, *along, *outer, *rates, given, ctx.needs_input_grad[3:5])
        return _needed(ctx, (*second, *[None] * 4, *rates, None, None))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given, wants, *_ = ctx.given
        call = _with_results(ctx)
        (of_out, of_lse), along = _direction(tangents[9:11]), _direction(tangents[:5])
        rates = TangentFunction.apply(*call, *along, given)
        found = SecondFunction.apply(*call, *along, *ctx.saved_tensors[9:], *rates, given, wants)
        if of_out is not None or of_lse is not None:
            of_out = torch.zeros_like(call[5]) if of_out is None else of_out
            first = GradientFunction.apply(*call, of_out, of_lse, given, wants)
            found = (a if a is None else a + b for a, b in zip(found, first))
        return tuple(found)


def _with_results(ctx: Any) -> tuple[Any, ...]:
    """The inputs and the results of a call: those that are kept, or by tiles."""
    inputs, results = ctx.saved_tensors[:5], ctx.saved_tensors[5:9]
    if results[0] is None:
        with torch.no_grad(), without_autocast(inputs[0]):
            results = RouteFunction.apply(*inputs, ctx.given[0])
    return *inputs, *results


class TangentFunction(_Derivable):
    """``apply(*inputs, *results, *direction, given) -> (out', lse')``."""

    takes, gives = _Derivable.takes + "tttts", "tr"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        given, (call, saved) = inputs[-1], _tiles_of(inputs[-1], inputs[:5], inputs[5:9])
        with without_autocast(call.query):
            return routes["tiled"].tangent(call, given.config, saved, Tangents(*_resolved(inputs[9:14])))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        kept, (given,), needs = ctx.saved_tensors, ctx.given, ctx.needs_input_grad
        call, along = kept[:9], kept[9:]
        grad_out = torch.zeros_like(call[5]) if grad_out is None else grad_out
        first = second = [None] * 5
        if any(needs[9:14]):
            first = GradientFunction.apply(*call, grad_out, grad_lse, given, needs[12:14])
        if any(needs[:5]):
            rates = TangentFunction.apply(*kept, given)
            second = SecondFunction.apply(*call, *along, grad_out, grad_lse, *rates, given, needs[3:5])
        return _needed(ctx, (*second, *[None] * 4, *first, None))


class SecondFunction(_Derivable):
    """``apply(*inputs, *results, *direction, grad_out, grad_lse, out', lse', given, wants) -> five tensors`` in the
    shapes of the inputs."""

    takes = _Derivable.takes + "tttts" + "tr" + "tr"

    @staticmethod
    def compute(*inputs: Any) -> Any:
        *tensors, given, wants = inputs
        call, saved = _tiles_of(given, tensors[:5], tensors[5:9])
        along, wanted = Tangents(*_resolved(tensors[9:14])), Wanted(*_resolved(tensors[14:16]), *wants)
        given = {"saved": saved, "along": along, "rates": tensors[16:], "wanted": wanted}
        with without_autocast(call.query):
            return routes["tiled"].second(call, inputs[-2].config, **given)[:5]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, (given, _) = ctx.saved_tensors, ctx.given
        found = routes["math"].thirds(given.of(*kept[:5]), kept[9:14], kept[14:16], grads)
        return _needed(ctx, (*found[:5], *[None] * 4, *found[5:], *[None] * 4))


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
    """The hook of all outputs of calls with the config of this token: one is made in no time."""
    return {0: functools.partial(_before_gradients, AttentionConfig.from_token(token))}


def _before_gradients(config: AttentionConfig, grad: Tensor) -> None:
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return
    node: Any = torch._C._current_autograd_node()
    while node is not None and not hasattr(node, "_saved_query"):  # a view or a slice of its output
        node = node.next_functions[0][0] if node.next_functions else None

    def after(found: Grads, grads: Grads) -> Grads:
        handle.remove()
        return _taken_again(node, config, found, grads[0])

    if node is not None:
        handle = node.register_hook(after)


def _taken_again(node: Any, config: AttentionConfig, found: Grads, grad_out: Tensor | None) -> Grads:
    """The gradients that the node of torch's kernel has found, as those of a call in tiles if they are differentiated:
    torch's own have no derivatives."""
    if grad_out is None or node._saved_dropout_p:  # only torch's kernel knows its coins
        return found
    query, key, value = node._saved_query, node._saved_key, node._saved_value
    mask = node._saved_attn_mask if hasattr(node, "_saved_attn_mask") else getattr(node, "_saved_attn_bias", None)
    grouped, plain = query.shape[1] != key.shape[1], [None if t is None else t.detach() for t in found]
    call = check_call(query, key, value, mask, 0.0, node._saved_is_causal, node._saved_scale, grouped)
    grads = (*plain, *[None] * (5 - len(plain)))
    given = Given(call.without_tensors(), config, routes["tiled"], None, call.out_shape, found=grads)
    inputs = (query, key, value, mask, None, *[None] * 4, grad_out, None, given, (grads[3] is not None, False))
    grads, given.found = GradientFunction.apply(*inputs), None
    return grads[: len(found)]
