"""The profiles of random tests: ``ci`` is fixed, ``nightly`` draws other examples, ten times as many."""

from __future__ import annotations

import json

import pytest
from attn_support import randomness
from attn_support.fresh import run
from hypothesis import settings

PROGRAM = """
    import json, sys, types
    support = sys.modules["attn_support"] = types.ModuleType("attn_support")
    support.__path__ = sys.argv[1:]
    from attn_support import randomness as profile
    from hypothesis import given, strategies
    profile.register()
    drawn = []
    profile.examples(7)(given(strategies.integers())(lambda number: drawn.append(number)))()
    print(json.dumps([profile.is_random(), drawn, list(profile.seeds(3))]))
"""


def _drawn(name: str) -> tuple[bool, list[int], list[int]]:
    support = randomness.__file__.rpartition("randomness.py")[0]
    return tuple(json.loads(run(PROGRAM, support, env={"HYPOTHESIS_PROFILE": name})))


def test_ci_draws_the_same_every_time_and_nightly_others_ten_times_as_many() -> None:
    ci, again, nightly, other = _drawn("ci"), _drawn("ci"), _drawn("nightly"), _drawn("nightly")
    assert ci == again
    assert not ci[0]
    assert nightly[0]
    assert nightly[1] != other[1]
    assert len(ci[1]) == 7
    assert len(nightly[1]) >= 70
    assert (ci[2], len(nightly[2])) == ([0, 1, 2], 30)
    assert nightly[2][0] > 1000


def test_the_options_of_a_run_follow_its_profile(pytestconfig: pytest.Config) -> None:
    named = pytestconfig.getoption("--hypothesis-profile")
    assert named is None or settings.default == settings.get_profile(named)
    assert randomness.times(1) == (randomness.NIGHTLY if randomness.is_random() else 1)
