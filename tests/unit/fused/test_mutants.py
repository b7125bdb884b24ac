"""The list of mistakes that ``tools/mutants.py`` makes fits the code."""

from dataclasses import replace

import pytest
from mutants import MUTANTS, mutated


def test_every_mutant_has_its_place_in_the_source() -> None:
    for mutant in MUTANTS.values():
        assert mutant.wrong in mutated(mutant)


def test_a_place_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"forward\.cu has 0 times 'no such line', want one"):
        mutated(replace(MUTANTS["lse_in_base_2"], right="no such line"))
