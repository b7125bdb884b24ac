"""The ways to compute attention and the choice among them.

A route is an object (:mod:`.route`); :mod:`.run` holds the ordered list of them, chooses one and runs it.
"""

from __future__ import annotations

from ..config import RouteUnavailable
from .route import Choice, Request, Route
from .run import ROUTES, TORCH, choose, route_named, route_names, why_not
from .short import is_short

__all__ = [
    "ROUTES",
    "TORCH",
    "Choice",
    "Request",
    "Route",
    "RouteUnavailable",
    "choose",
    "is_short",
    "route_named",
    "route_names",
    "why_not",
]
