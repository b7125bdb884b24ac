"""Whole pipelines of the promised families: same output, every attention call ours, nothing left behind; and every
model family by every door, with a table that would notice if one was wrong."""

import diffusers
import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.randomness import some
from attn_support.tiny_pipelines import BUILD, assert_same, stock_calls

from pascal_attn_core import AttentionConfig
from tools.families import NotInThisVersion, families
from tools.families import proof as proving
from tools.families.proof import attention_state
from tools.families.without import unknown_models


def states(pipe):
    return [attention_state(m) for m in pipe.components.values() if isinstance(m, torch.nn.Module)]


@pytest.mark.parametrize("family", BUILD)
def test_a_pipeline_gives_the_output_of_stock_with_every_call_routed_and_nothing_stays(family, put_on, routed):
    case = tiny.BUILD[family]()
    stock, calls = stock_calls(case.run)  # by this very pipeline: its first run leaves traces in the models
    before, keys, config = states(case.pipe), list(case.denoiser.state_dict()), AttentionConfig(budget_mib=2)
    take_off = put_on(case.pipe, config)
    assert_same(case.run(), stock)
    assert list(case.denoiser.state_dict()) == keys
    take_off()
    assert states(case.pipe) == before
    assert torch.equal(case.run(), stock)
    assert [call["config"] for call in routed] == [config] * calls.count != []


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
