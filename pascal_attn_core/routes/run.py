"""Which route a call takes, and why; and running it. Whoever watches is shown the call, and told what ran.

``auto`` asks in this order, and the first that claims the call computes it. Its sentence stands in errors, in the log
and in reports: nothing is chosen silently.

===========  ============  ============================================  ===============================================
asked        route         claims a call                                 its sentence
===========  ============  ============================================  ===============================================
ShortCalls   torch, math   whose scores fit ``math_limit_mib`` and that  the score matrix is below ... MiB: torch's
                           torch's function takes as it is               function as it is
TensorRoute  fused-tensor  in 16 bits on a card with matrix units, if a  timed on this card at ... of the time of ...
                           timing there finds it the fastest
FusedRoute   fused         on a card of ours, for which torch has no     what torch lacks, or: timed on this card at ...
                           fused kernel or was timed as slower           of the time of torch's kernel
Rewritten    tiled         on a GPU, that torch's kernel takes in        timed on this card at ... of the time of
                           another form, which was timed as slower       torch's kernel
TorchRoute   torch         that torch's fused kernel takes, as it is or  torch has a fused kernel for it, and how the
                           rewritten; where it has none flash-attn's     call is rewritten
                           does, if the user has installed it
MathRoute    math          whose scores fit ``math_limit_mib``           the score matrix is below ... MiB
TiledRoute   tiled         whatever is left                              why torch's kernel does not take it
Int8Route    fused-int8    never: it is not exact                        asked for by name
===========  ============  ============================================  ===============================================

Flash attention and cuDNN's are not timed (:class:`.torch_faults.TorchAlone`). What was found out for a call is used
again for the next one of its kind (:mod:`.prepared`).

A configuration that names a route asks that one only. One that names several devices (:mod:`.several`) divides the call
among them; each part goes by the route that the whole call would take.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..call import AttentionCall, Gradients, Results, TiledStats, Wanted, without_autocast
from ..config import AttentionConfig, RouteUnavailable, UnsupportedAttention, known_routes
from ..observe import report
from . import derivatives
from .fused import FusedRoute, Int8Route
from .math import BEYOND_SECONDS, MathRoute
from .prepared import Kind, keep
from .route import Choice, Request, Route
from .several import on_one_device, on_several
from .short import ShortCalls
from .tensor import TensorRoute
from .tiled import Rewritten, TiledRoute
from .torch_kernel import TorchRoute

TORCH = TorchRoute()
_PLAIN = FusedRoute(TORCH)
_TILED = TiledRoute(TORCH)
# In the order of the table above.
ROUTES: list[Route] = [
    ShortCalls(),
    TensorRoute(TORCH, _PLAIN),
    _PLAIN,
    Rewritten(TORCH, _TILED),
    TORCH,
    MathRoute(),
    _TILED,
    Int8Route(),
]


def route_names() -> list[str]:
    """The names of the exact routes, in the order in which they are asked last."""
    names = [route.name for route in ROUTES if route.name and not route.is_opt_in]
    return list(reversed(dict.fromkeys(reversed(names))))


known_routes[1:] = [*route_names(), *(route.name for route in ROUTES if route.is_opt_in)]


def route_named(name: str) -> Route:
    """The first route of that name."""
    for route in ROUTES:
        if route.name == name:
            return route
    raise ValueError(f"route must be one of {known_routes}, got {name!r}")


derivatives.routes.update({name: route_named(name) for name in ("tiled", "math")})


def why_not(route: str, call: AttentionCall, config: AttentionConfig, *, with_lse: bool = False) -> list[str]:
    """Why a route cannot take a call, one sentence each; an empty list = it can."""
    return _reasons(Request(call, config, with_lse), route)


def choose(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    with_lse: bool = False,
    in_graph: bool = False,
    may_time: bool = True,
) -> Choice:
    """The route for a call; ``in_graph`` and ``may_time`` as in :class:`.route.Request`.

    Raises:
        UnsupportedAttention: the config names a route that cannot take it, or none can.
    """
    request = Request(call, config, with_lse, in_graph, may_time)
    if config.devices:
        flags = {"with_lse": with_lse, "in_graph": in_graph, "may_time": may_time}
        return on_several(request, choose(call, on_one_device(config), **flags))
    if config.route != "auto":
        route = route_named(config.route)
        plan = route.plan(request) if route.is_differentiable or call.order < 3 else [BEYOND_SECONDS]
        if isinstance(plan, list):
            raise UnsupportedAttention(config.route, plan)
        return Choice(route, "asked for by name", plan)
    for route in ROUTES:
        choice = route.claim(request) if route.is_differentiable or call.order < 3 else None
        if choice is not None:
            return choice
    raise UnsupportedAttention("auto", [reason for name in ("torch", "tiled") for reason in _reasons(request, name)])


def _reasons(request: Request, name: str) -> list[str]:
    plan = request.plan(route_named(name))
    return plan if isinstance(plan, list) else []


def run(
    call: AttentionCall,
    config: AttentionConfig,
    *,
    with_lse: bool,
    choice: Choice | None = None,
    stats: TiledStats | None = None,
    may_time: bool = True,
    kind: Kind | None = None,
) -> Results:
    """A checked call by the route that :func:`choose` finds, or has found: out, lse or None, and what else there is,
    with gradients where the call needs them. What the route ``tiled`` counts is added to ``stats``. The choice is kept
    for calls of this ``kind``."""
    if stats is None and report.active:
        stats = TiledStats()
    while True:
        taken = choose(call, config, with_lse=with_lse, may_time=may_time) if choice is None else choice
        try:
            result = by(taken, call, config, with_lse=with_lse, stats=stats)
        except RouteUnavailable:  # its plan names the reason from now on
            choice = None
        else:
            note(call, taken, stats)
            if kind is not None:
                keep(kind, call, config, taken)
            return result


def by(
    choice: Choice, call: AttentionCall, config: AttentionConfig, *, with_lse: bool, stats: TiledStats | None
) -> Results:
    """The results of a call by the route that was chosen. RouteUnavailable: nothing has been computed."""
    route = choice.by
    with without_autocast(call.query):
        if not route.is_differentiable and (
            call.needs_grad or call.order > 1 or torch._C._are_functorch_transforms_active()
        ):
            return route.with_gradients(call, config, choice.plan, stats=stats)
        return route.forward(call, config, choice.plan, with_lse=with_lse, for_grad=False, stats=stats)


def gradients(call: AttentionCall, config: AttentionConfig, saved: Results, wanted: Wanted) -> Gradients:
    """Return the gradients of a checked call from given results, whatever computed them, by the first route that claims
    them. Torch's kernels compute gradients from their own results only.

    Raises:
        UnsupportedAttention: the config names a route that cannot, or none can.
    """
    if call.has_bias and saved.log_sum is None and saved.lse is not None:
        # the gradients count on it beside a float mask; without it all of lse takes its part
        saved = saved._replace(log_sum=torch.zeros_like(saved.lse))
    request = Request(replace(call, needs_grad=True), config, with_lse=True)
    if config.route == "auto":
        route = next((each for each in ROUTES if each.claims_gradients(request)), route_named("tiled"))
    else:
        route = route_named(config.route)
    plan = request.plan(route)
    reasons = list(plan) if isinstance(plan, list) else []
    if route.is_differentiable:
        reasons.append("its backward pass takes only results of its own forward pass")
    if reasons:
        raise UnsupportedAttention(config.route, reasons)
    with without_autocast(call.query):
        return route.backward(request.call, config, plan, saved, wanted)


def note(call: AttentionCall, choice: Choice, stats: TiledStats | None) -> None:
    """Count a call that has run in the reports that are being recorded."""
    if not report.active:
        return
    mask = report.mask_kind(call.attn_mask, is_causal=call.is_causal, left=call.left, right=call.right)
    shapes, dtype = (tuple(call.query.shape), tuple(call.key.shape)), str(call.query.dtype).removeprefix("torch.")
    report.note(report.CallKey(choice.route, *shapes, dtype, mask, choice.why), stats or TiledStats())
