"""The interface of a route, and how one becomes part of autograd's graph.

A route is an object: ``plan`` says how it would take a call, or why it cannot; ``claim`` whether it wants the call when
no route is named; ``forward`` and ``backward`` compute. The list of them is :data:`.run.ROUTES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, Gradients, Results, TiledStats, Wanted
from ..call.lazy_mask import LazyMask
from ..config import AttentionConfig
from ..machine.device import LARGEST_BUFFER, MIB
from ..machine.room import room_of
from ..machine.runtime import Runtime, runtime_of
from .derivatives import Given, RouteFunction


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
        """Copies of the size of the inputs may take this much: the budget where one is given, else what memory is free.
        In a graph, whose backward pass must come to the same, the default budget."""
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
        """Return a Choice if no later route of the list is faster for the call; None = ask the next route."""
        raise NotImplementedError

    def claims_gradients(self, request: Request) -> bool:
        """Whether the route wants to compute gradients from given results, whatever computed them. It is asked if no
        route is named and no earlier one of the list wants to."""
        return False

    def for_parts(self, call: AttentionCall, config: AttentionConfig, plan: Any) -> Any:
        """Return what parts of a call (some of its key/value heads) must know so that each row has the same bits as in
        the whole call, or a list of reasons why it would not. ``plan`` is that of the whole."""
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

    def again(self, plan: Any, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Compute a call by the launches that the plan keeps from an earlier one of its kind; None = it keeps none for
        such tensors. From query, key, value and mask: what :meth:`forward` returns for gradients, without a seed. With
        out, lse, log_sum, grad_out and grad_lse behind them: the gradients of the first three, in full where these
        broadcast, which autograd adds up."""
        return None

    def with_gradients(
        self, call: AttentionCall, config: AttentionConfig, plan: Any, *, stats: TiledStats | None = None
    ) -> Results:
        """Results as part of autograd's graph, in which ``backward`` computes the gradients of out and lse."""
        rule, mask = (call.attn_mask, None) if isinstance(call.attn_mask, LazyMask) else (None, call.attn_mask)
        given = Given(call.without_tensors(), config, self, plan, call.out_shape, stats, rule)
        captured = () if call.score_rule is None else call.score_rule.captured
        return Results(*RouteFunction.apply(call.query, call.key, call.value, mask, call.sinks, given, *captured))
