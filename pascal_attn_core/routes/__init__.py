"""Which route a call takes, and why: ``why_not`` and ``choose``, over one ordered list of routes.

Nothing is chosen silently: the sentences that decide here are the ones in errors, in the log and in reports.
"""

from __future__ import annotations

from ..call import AttentionCall
from ..config import AttentionConfig, RouteUnavailable, UnsupportedAttention, known_routes
from .fused import FusedRoute, Int8Route
from .math import MathRoute
from .route import Choice, Request, Route
from .short import ShortCalls, is_plainly_short, is_short
from .tiled import FirstTiles, TiledRoute
from .torch_kernel import TorchRoute

__all__ = [
    "ROUTES",
    "Choice",
    "Request",
    "Route",
    "RouteUnavailable",
    "add_route",
    "choose",
    "is_plainly_short",
    "is_short",
    "remove_route",
    "route_named",
    "why_not",
]

TORCH = TorchRoute()
# In the order in which they are asked whether they want a call that names no route: the first that claims it has it.
ROUTES: list[Route] = [
    ShortCalls(),
    FirstTiles(TORCH),
    FusedRoute(TORCH),
    TORCH,
    MathRoute(),
    TiledRoute(TORCH),
    Int8Route(),
]


def add_route(route: Route, *, before: str | None = None) -> None:
    """Add a route that is asked before the one named ``before``, or after all others. Its name becomes valid in
    :class:`~pascal_attn_core.config.AttentionConfig`."""
    places = [i for i, other in enumerate(ROUTES) if other.name == before] or [len(ROUTES)]
    ROUTES.insert(places[0], route)
    known_routes.append(route.name)


def remove_route(route: Route) -> None:
    """Take back :func:`add_route`."""
    ROUTES.remove(route)
    known_routes.remove(route.name)


def route_named(name: str) -> Route:
    """The route of that name.

    Raises:
        ValueError: there is none.
    """
    for route in ROUTES:
        if route.name == name:
            return route
    raise ValueError(f"route must be one of {known_routes}, got {name!r}")


def why_not(route: str, call: AttentionCall, config: AttentionConfig, *, with_lse: bool = False) -> list[str]:
    """Why a route cannot take a call, one sentence each; an empty list = it can."""
    return _reasons(Request(call, config, with_lse), route)


def choose(call: AttentionCall, config: AttentionConfig, *, with_lse: bool = False, in_graph: bool = False) -> Choice:
    """The route for a call. ``in_graph``: see :class:`.route.Request`.

    Raises:
        UnsupportedAttention: the config names a route that cannot take it, or none can.
    """
    request = Request(call, config, with_lse, in_graph)
    if config.route != "auto":
        route = route_named(config.route)
        plan = request.plan(route)
        if isinstance(plan, list):
            raise UnsupportedAttention(config.route, plan)
        return Choice(route, "asked for by name", plan)
    for route in ROUTES:
        choice = route.claim(request)
        if choice is not None:
            return choice
    raise UnsupportedAttention("auto", [reason for name in ("torch", "tiled") for reason in _reasons(request, name)])


def _reasons(request: Request, name: str) -> list[str]:
    plan = request.plan(route_named(name))
    return plan if isinstance(plan, list) else []
