"""Every model family: taken and right, by every door; and a table that would notice if they were not."""

import diffusers
import pytest
from attn_support.randomness import some

from tools.families import NotInThisVersion, families
from tools.families import proof as proving
from tools.families.without import unknown_models

FAMILIES = {family.name: family for family in families()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(FAMILIES, 16))
def test_every_call_of_the_family_is_taken_and_right(name):
    try:
        proof = proving.prove(FAMILIES[name])
    except NotInThisVersion as missing:
        pytest.skip(f"diffusers {diffusers.__version__}: {missing}")
    assert not proof.problems, proof
    assert proof.made or proof.taken or proof.left_alone


def test_every_model_class_of_diffusers_is_in_the_table():
    if not diffusers.__version__.startswith("0.42."):
        pytest.skip("the table is kept for the newest version it was made with, 0.42")
    assert list(unknown_models()) == []
