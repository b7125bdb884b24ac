"""The interface of a route, and how one becomes part of autograd's graph.

A route is an object: ``plan`` says how it would take a call, or why it cannot; ``claim`` whether it wants the call when
no route is named; ``forward`` and ``backward`` compute. The list of them is :data:`.run.ROUTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients, Results, TiledStats, Wanted, without_autocast
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig
from ..machine.device import LARGEST_BUFFER, MIB
from ..machine.room import room_of
from ..machine.runtime import Runtime, runtime_of


@dataclass(eq=False, slots=True)
class Request:
    """A call whose route is to be found.

    Attributes:
        with_lse: the log-sum-exp of each row is wanted as well.
        in_graph: the call is an operator of a graph whose backward pass asks once more: only what is the same both
            times may decide, so no value of a tensor is read.
        may_time: routes may be timed for it now.
        remarks: what routes that passed the call on have found out, for the sentence of the one that takes it.
    """

    call: AttentionCall
    config: AttentionConfig
    with_lse: bool = False
    in_graph: bool = False
    may_time: bool = False
    remarks: list[str] = field(default_factory=list)
    _plans: dict[Route, Any] = field(default_factory=dict)

    @property
    def runtime(self) -> Runtime:
        return runtime_of(self.call.query.device)

    @property
    def budget_bytes(self) -> int:
        if self.config.budget_mib is None:
            return self.runtime.info.default_budget_bytes()
        return min(int(self.config.budget_mib * MIB), LARGEST_BUFFER)

    @property
    def copy_bytes(self) -> int:
        """What copies of the size of the inputs may take: the budget where one is given, else what memory is free. In a
        graph, whose backward pass must come to the same, the default budget."""
        if self.config.budget_mib is not None or self.in_graph:
            return self.budget_bytes
        return max(self.budget_bytes, room_of(self.call.query.device))

    def plan(self, route: Route) -> Any:
        """The answer of ``route.plan``, asked once."""
        if route not in self._plans:
            self._plans[route] = route.plan(self)
        return self._plans[route]


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """A route for a call, and the sentence that says why.

    Attributes:
        plan: what ``route.plan`` answered.
        over_torch: this route's time in units of that of torch's kernel, where both were timed on this device.
        torch_stores: whether torch's own function would store the score matrix of the call, having no fused kernel that
            takes it as it is; None where that is not known.
    """

    by: Route
    why: str
    plan: Any = None
    over_torch: float | None = None
    torch_stores: bool | None = None

    @property
    def route(self) -> str:
        return self.by.name


class Route:
    """One way to compute attention.

    Attributes:
        name: as in ``AttentionConfig.route``, errors and reports.
        is_differentiable: autograd records ``forward``, which consists of operators it can differentiate; where it is
            not, ``backward`` computes the gradients from what ``forward`` returned.
        is_opt_in: less exact than the others, so it takes no call that does not name it.
    """

    name = ""
    is_differentiable = False
    is_opt_in = False

    def plan(self, request: Request) -> Any:
        """How the route takes the call, handed to ``forward`` and ``backward``; or a list of reasons, one sentence
        each, why it cannot. A plan must not hold the call's tensors where ``is_differentiable`` is False: autograd
        keeps them."""
        raise NotImplementedError

    def claim(self, request: Request) -> Choice | None:
        """The call for this route, if none that comes later in the list is faster; None = go on."""
        raise NotImplementedError

    def claims_gradients(self, request: Request) -> bool:
        """Whether the route wants to go back from results that are given, whatever computed them, if none that comes
        earlier in the list does and no route is named."""
        return False

    def for_parts(self, call: AttentionCall, config: AttentionConfig, plan: Any) -> Any:
        """The facts that parts of a call (some of its key/value heads) must know so that each row comes out with the
        bits that it has in the whole, whose plan is given; or a list of reasons why it would not."""
        return None

    def plan_part(self, request: Request, shared: Any) -> Any:
        """:meth:`plan` for a part of a call, which may be on another device; ``shared`` is from :meth:`for_parts`."""
        return request.plan(self) if shared is None else shared

    def forward(
        self,
        call: AttentionCall,
        config: AttentionConfig,
        plan: Any,
        *,
        with_lse: bool,
        for_grad: bool,
        stats: TiledStats | None,
    ) -> Results:
        """The results, with ``for_grad`` all that ``backward`` needs; what the route ``tiled`` counts is added to
        ``stats``. RouteUnavailable: nothing has been computed."""
        raise NotImplementedError

    def backward(
        self, call: AttentionCall, config: AttentionConfig, plan: Any, saved: Results, wanted: Wanted
    ) -> Gradients:
        """Gradients in the shapes of the inputs, from what ``forward(for_grad=True)`` returned. A differentiable route
        computes the call once more and lets autograd go back through it: this serves graphs, whose operators autograd
        does not see into."""
        grad_out, grad_lse, *others = wanted
        inputs = (call.query, call.key, call.value, call.attn_mask, call.sinks)
        wants = (True, True, True, *others)
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(each) if isinstance(t, Tensor) else t for t, each in zip(inputs, wants)]
            again = call.with_tensors(*leaves)  # type: ignore[arg-type]
            plan = self.plan(Request(again, config, with_lse=grad_lse is not None))
            results = self.forward(again, config, plan, with_lse=grad_lse is not None, for_grad=False, stats=None)
            outputs, seeds = [results.out], [grad_out]
            if grad_lse is not None and results.lse is not None:
                outputs, seeds = [results.out, results.lse], [grad_out, grad_lse]
            sources = [t for t, each in zip(leaves, wants) if isinstance(t, Tensor) and each]
            found = iter(torch.autograd.grad(outputs, sources, seeds))
        grads = [next(found) if isinstance(t, Tensor) and each else None for t, each in zip(leaves, wants)]
        return Gradients(*grads)  # type: ignore[arg-type]

    def with_gradients(
        self, call: AttentionCall, config: AttentionConfig, plan: Any, *, stats: TiledStats | None = None
    ) -> Results:
        """Results as part of autograd's graph, in which ``backward`` computes the gradients of out and lse."""
        inputs = (call.query, call.key, call.value, call.attn_mask, call.sinks)
        captured = () if call.score_rule is None else call.score_rule.captured
        return Results(*RouteFunction.apply(*inputs, call, config, self, plan, stats, *captured))


class RouteFunction(torch.autograd.Function):
    """``apply(query, key, value, mask, sinks, call, config, route, plan, stats, *captured) -> (out, lse, log_sum)``
    by a route that computes its own gradients; the inputs, what the call's score rule reads, and the route's results
    are kept for them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Tensor | None, *rest: Any
    ) -> Any:
        call, config, route, plan, stats, *captured = rest
        results = route.forward(call, config, plan, with_lse=True, for_grad=True, stats=stats)
        ctx.rule = attn_mask if isinstance(attn_mask, LazyMask) else None
        kept = None if ctx.rule is not None else attn_mask
        ctx.save_for_backward(query, key, value, kept, sinks, *results, *captured)
        ctx.call, ctx.given = call.without_tensors(), (config, route, plan)
        ctx.set_materialize_grads(False)
        if results.log_sum is not None:
            ctx.mark_non_differentiable(results.log_sum)
        return results.out, results.lse, results.log_sum

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> Any:
        query, key, value, attn_mask, sinks, *kept = ctx.saved_tensors
        call = ctx.call.with_tensors(query, key, value, ctx.rule or attn_mask, sinks)
        saved, captured = Results(*kept[: len(Results._fields)]), kept[len(Results._fields) :]
        config, route, plan = ctx.given
        others = ctx.needs_input_grad[3:5]

        def compute(grad_out: Tensor, grad_lse: Tensor | None) -> Grads:
            # Negated views: see check_call.
            grad_lse = None if grad_lse is None else grad_lse.resolve_neg()
            with without_autocast(query):
                found = route.backward(call, config, plan, saved, Wanted(grad_out.resolve_neg(), grad_lse, *others))
            return *found[:5], *found.captured

        grad_out = torch.zeros_like(saved.out) if grad_out is None else grad_out
        inputs = (query, key, value, attn_mask, sinks, *captured)
        grads = in_any_graph(compute, route.name, grad_out, grad_lse, inputs)
        return *grads[:5], None, None, None, None, None, *grads[5:]


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
