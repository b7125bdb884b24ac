"""The ways to compute attention and the choice among them.

A route is an object (:mod:`.route`); :mod:`.run` holds the ordered list of them, chooses one and runs it.
"""

from __future__ import annotations

from .route import Choice
from .run import choose, route_named, route_names, why_not

__all__ = ["Choice", "choose", "route_named", "route_names", "why_not"]
