"""How much is drawn at random: the same few examples (profile ``ci``), or others each time and ten times as many
(``nightly``). ``--hypothesis-profile`` or ``HYPOTHESIS_PROFILE`` of the environment chooses; else it is ``ci``.
"""

import datetime
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

NIGHTLY = 10  # examples for each one of profile ci
_UNIT = 100  # examples of a test in profile ci that says nothing
_Item = TypeVar("_Item")


def register() -> None:
    """Both profiles, and the one that the environment names, before any test is read."""
    common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
    settings.register_profile("ci", derandomize=True, max_examples=_UNIT, **common)
    settings.register_profile("nightly", derandomize=False, max_examples=_UNIT * NIGHTLY, print_blob=True, **common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def times(count: int) -> int:
    """``count``, or as many as the profile makes of it."""
    return count * settings.default.max_examples // _UNIT


def is_random() -> bool:
    """Whether other examples are drawn each time. A process that has not registered the profiles draws the same few."""
    return settings.default.max_examples == _UNIT * NIGHTLY


def at_night(test: Callable[..., None]) -> Callable[..., None]:
    """A test that is costly, and a part of which is tested elsewhere by day: it runs in profile ``nightly``."""
    return pytest.mark.skipif(not is_random(), reason="costly: in profile nightly only")(test)


def some(items: Iterable[_Item], every: int) -> list[_Item]:
    """Every n-th of the items of an exhaustive table that is costly to run; all of them in profile ``nightly``."""
    return list(items)[:: 1 if is_random() else every]


def examples(count: int) -> settings:
    """Hypothesis' settings for a test with so many examples in profile ``ci``."""
    return settings(max_examples=times(count))


def seeds(count: int) -> range:
    """Numbers to draw from, the same in all processes of a run: those from 0 on, or others every day."""
    first = datetime.date.today().toordinal() * 1_000_000 if is_random() else 0
    return range(first, first + times(count))
