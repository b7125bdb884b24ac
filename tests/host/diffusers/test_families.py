"""Whole pipelines of the promised families: same output, every attention call ours, nothing left behind."""

import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import BUILD, assert_same, stock_calls

from pascal_attn_core import AttentionConfig
from tools.families.proof import attention_state

pytestmark = pytest.mark.parametrize("family", BUILD)


def states(pipe):
    return [attention_state(m) for m in pipe.components.values() if isinstance(m, torch.nn.Module)]


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
