"""Whole pipelines of the promised families: same output, every attention call ours, nothing left behind."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import torch
from attn_support.tiny_pipelines import BUILD

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention
from tools.families.proof import attention_state, replaced, uniform

pytestmark = pytest.mark.parametrize("family", BUILD)


def states(pipe):
    return [attention_state(m) for m in pipe.components.values() if isinstance(m, torch.nn.Module)]


def test_a_patched_pipeline_gives_the_output_of_stock_with_every_call_routed_and_nothing_stays(
    family, tiny, stock_calls, routed, assert_same
):
    case = tiny.BUILD[family]()
    stock, calls = stock_calls(case.run)
    before, keys = states(case.pipe), list(case.denoiser.state_dict())
    with patch_attention(case.pipe) as patch:
        assert_same(case.run(), stock)
        assert list(case.denoiser.state_dict()) == keys
    assert len(routed) == calls.count > 0
    assert patch.sites > 0
    assert states(case.pipe) == before
    assert torch.equal(case.run(), stock)


def test_set_attn_processor_of_the_pipeline_does_the_same(family, tiny, stock_calls, routed, assert_same):
    case = tiny.BUILD[family]()
    stock, calls = stock_calls(case.run)
    before, keys, config = states(case.pipe), list(case.denoiser.state_dict()), AttentionConfig(budget_mib=2)
    case.pipe.set_attn_processor(PascalAttnProcessor(config))
    assert_same(case.run(), stock)
    assert list(case.denoiser.state_dict()) == keys
    assert len(routed) == calls.count
    assert all(call["config"] is config for call in routed)
    case.pipe.set_attn_processor(None)
    assert states(case.pipe) == before
    assert torch.equal(case.run(), stock)
    assert len(routed) == calls.count


def test_set_attn_processor_of_the_denoiser_reaches_all_its_attention(family, tiny, stock_calls, routed, assert_same):
    case = tiny.BUILD[family]()
    tiny.require(case.denoiser, "attn_processors")
    stock, calls = stock_calls(case.run)
    _, decoder_calls = stock_calls(lambda: case.pipe.vae.decode(torch.zeros(case.latent_shape)))
    case.denoiser.set_attn_processor(PascalAttnProcessor())
    assert all(isinstance(p, PascalAttnProcessor) for p in case.denoiser.attn_processors.values())
    assert_same(case.run(), stock)
    assert len(routed) == calls.count - decoder_calls.count


def test_wrong_attention_would_be_noticed_in_the_vae_too(family, tiny, assert_same):
    case = tiny.BUILD[family]()
    stock = case.run()
    parts = [case.pipe] if family in ("ltx", "cogvideox") else [case.pipe, case.pipe.vae]  # whose VAE has no attention
    for part in parts:
        with patch_attention(part), replaced(uniform), pytest.raises(AssertionError):
            assert_same(case.run(), stock)
