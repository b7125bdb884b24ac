"""Whole pipelines of the promised families: same output, every attention call ours, nothing left behind."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import torch

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_pipeline

FAMILIES = ["sd15", "sdxl", "sd3", "flux", "wan", "ltx", "cogvideox", "hunyuanvideo"]
pytestmark = pytest.mark.parametrize("family", FAMILIES)


def attention_state(pipe):
    """Class and processor of every module of the pipeline, by identity."""
    models = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
    modules = [module for model in models for module in model.modules()]
    return [(type(m), getattr(m, "processor", None), sorted(m.__dict__)) for m in modules]


def test_a_patched_pipeline_gives_the_output_of_stock_with_every_call_routed(
    family, tiny, stock_calls, routed, assert_same
):
    case = tiny.BUILD[family]()
    stock, calls = stock_calls(case.run)
    with patch_pipeline(case.pipe) as patch:
        ours = case.run()
    assert_same(ours, stock)
    assert len(routed) == calls.count > 0
    assert patch.sites > 0


def test_set_attn_processor_of_the_pipeline_does_the_same(family, tiny, stock_calls, routed, assert_same):
    case = tiny.BUILD[family]()
    stock, calls = stock_calls(case.run)
    config = AttentionConfig(budget_mib=2)
    case.pipe.set_attn_processor(PascalAttnProcessor(config))
    assert_same(case.run(), stock)
    assert len(routed) == calls.count
    assert all(call["config"] is config for call in routed)


def test_set_attn_processor_of_the_denoiser_reaches_all_its_attention(family, tiny, stock_calls, routed, assert_same):
    case = tiny.BUILD[family]()
    tiny.require(case.denoiser, "attn_processors")
    stock, calls = stock_calls(case.run)
    _, decoder_calls = stock_calls(lambda: case.pipe.vae.decode(torch.zeros(case.latent_shape)))
    case.denoiser.set_attn_processor(PascalAttnProcessor())
    assert all(isinstance(p, PascalAttnProcessor) for p in case.denoiser.attn_processors.values())
    assert_same(case.run(), stock)
    assert len(routed) == calls.count - decoder_calls.count


def test_wrong_attention_would_be_noticed(family, tiny, wrong_attention, assert_same):
    case = tiny.BUILD[family]()
    stock = case.run()
    with patch_pipeline(case.pipe), wrong_attention("uniform"), pytest.raises(AssertionError):
        assert_same(case.run(), stock)


def test_wrong_attention_in_the_vae_alone_would_be_noticed(family, tiny, wrong_attention, assert_same):
    if family in ("ltx", "cogvideox"):
        pytest.skip("its VAE has no attention")
    case = tiny.BUILD[family]()
    stock = case.run()
    with patch_pipeline(case.pipe.vae), wrong_attention("uniform"), pytest.raises(AssertionError):
        assert_same(case.run(), stock)


def test_removal_brings_back_the_very_objects_and_bits(family, tiny):
    case = tiny.BUILD[family]()
    stock, before = case.run(), attention_state(case.pipe)
    with patch_pipeline(case.pipe):
        case.run()
    after = attention_state(case.pipe)
    assert len(before) == len(after)
    for (cls, processor, names), (cls_after, processor_after, names_after) in zip(before, after):
        assert cls is cls_after
        assert processor is processor_after
        assert names == names_after
    assert torch.equal(case.run(), stock)


def test_the_state_dict_keeps_its_keys(family, tiny):
    case = tiny.BUILD[family]()
    keys = list(case.denoiser.state_dict())
    with patch_pipeline(case.pipe):
        assert list(case.denoiser.state_dict()) == keys
    case.pipe.set_attn_processor(PascalAttnProcessor())
    assert list(case.denoiser.state_dict()) == keys
