"""patch_attention, patch_pipeline: how far they reach, how they go away, and who else may be at work meanwhile."""

import logging

import pytest
import torch
import torch.nn.functional as F
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import assert_same, do, stock_calls
from diffusers.models import attention_processor as host

import pascal_attn_core.diffusers as pascal
from pascal_attn_core import AttentionConfig
from pascal_attn_core.config import log_once
from pascal_attn_core.diffusers import PascalAttnProcessor, modules, patch_attention, patch_pipeline
from pascal_attn_core.observe.report import record


def test_a_compiled_component_is_reached_and_a_model_that_is_two_components_once():
    case = tiny.wan()
    with patch_attention(case.pipe) as patch:
        sites = patch.sites
    case.pipe.register_modules(transformer_2=case.pipe.transformer)
    assert patch_attention(case.pipe).sites == sites
    case.pipe.transformer = case.pipe.transformer_2 = torch.compile(case.pipe.transformer, backend="eager")
    assert patch_attention(case.pipe).sites == sites


def test_a_denoiser_inside_of_a_wrapper_is_reached_and_one_without_attention_is_named(monkeypatch):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    case = tiny.flux()
    with patch_attention(case.pipe) as patch:
        sites = patch.sites
    plain, is_site = case.pipe.transformer, pascal.sites.is_site
    case.pipe.transformer = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    with patch_attention(case.pipe) as patch:
        assert patch.sites == sites
        assert not patch.left_alone
    monkeypatch.setattr(
        pascal.sites, "is_site", lambda module: False if module in {*plain.modules()} else is_site(module)
    )
    with patch_attention(case.pipe) as patch:
        assert "no attention that calls" in patch.left_alone["transformer"]


def test_what_has_no_softmax_attention_is_refused_by_name():
    for wrong in ("tiled", {"route": "tiled"}):
        with pytest.raises(TypeError, match="config must be an AttentionConfig or None"):
            patch_attention(tiny.tiny_unet(), config=wrong)
    with pytest.raises(TypeError, match="eight_bit must be a bool, got 'yes'"):
        patch_pipeline(tiny.tiny_unet(), eight_bit="yes")
    with pytest.raises(ValueError, match=r"Linear must hold attention that calls scaled_dot_product_attention, got"):
        patch_attention(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got str"):
        patch_attention("unet")


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch):
    unet, calls = tiny.tiny_unet(), []

    def fails_at_the_third(module, redirect):
        calls.append(module)
        if len(calls) == 3:
            raise RuntimeError("no more")
        modules.redirect_module(module, redirect)

    monkeypatch.setattr(pascal, "redirect_module", fails_at_the_third)
    with pytest.raises(RuntimeError, match="no more"):
        patch_attention(unet)
    assert all(type(m) is host.Attention for m in calls)


@pytest.mark.parametrize("first", [0, 1])
def test_patches_may_be_removed_in_any_order(first, routed):
    unet = tiny.tiny_unet()
    _, calls = stock_calls(lambda: tiny.run_unet(unet))
    configs = [AttentionConfig(budget_mib=1), AttentionConfig(budget_mib=2)]
    patches = [patch_attention(unet, config) for config in configs]
    tiny.run_unet(unet)
    assert [call["config"] for call in routed] == [configs[1]] * calls.count
    routed.clear()
    patches[first].remove()
    tiny.run_unet(unet)
    assert [call["config"] for call in routed] == [configs[1 - first]] * calls.count
    routed.clear()
    patches[1 - first].remove()
    patches[first].remove()
    tiny.run_unet(unet)
    assert not routed
    assert {type(m) for m in unet.modules() if isinstance(m, host.Attention)} == {host.Attention}


@pytest.mark.parametrize("family", ["sd15", "wan"])
@pytest.mark.parametrize("patched_first", [True, False])
def test_a_processor_decides_over_a_patch_around_it(family, patched_first, routed):
    case, (_, calls) = tiny.BUILD[family](), tiny.stock_of(family)
    inner = AttentionConfig(budget_mib=2)
    do(
        lambda: patch_attention(case.pipe, AttentionConfig(budget_mib=1)),
        lambda: case.pipe.set_attn_processor(PascalAttnProcessor(inner)),
        backwards=not patched_first,
    )
    case.run()
    assert [call["config"] for call in routed] == [inner] * calls.count


@pytest.mark.parametrize("scores", ["scores", "output"])
def test_skip_layer_guidance_works_with_ours(scores, put_on):
    layer_skip = pytest.importorskip("diffusers.hooks.layer_skip", reason="this diffusers has no guiders")
    unet = tiny.tiny_unet()
    plain = tiny.run_unet(unet)
    put_on(unet)
    skip = {"skip_attention": scores == "output", "skip_attention_scores": scores == "scores", "skip_ff": False}
    config = layer_skip.LayerSkipConfig(indices=[0], fqn="mid_block.attentions", **skip)
    layer_skip._apply_layer_skip_hook(unet, config)
    ours = tiny.run_unet(unet)
    stock = tiny.tiny_unet()
    layer_skip._apply_layer_skip_hook(stock, config)
    assert_same(ours, tiny.run_unet(stock))
    assert not torch.allclose(ours, plain)


def test_a_replaced_sdpa_is_reported_once(monkeypatch, caplog):
    original = F.scaled_dot_product_attention

    def sage_attention(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sage_attention)
    unet = tiny.tiny_unet()
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        for _ in range(2):
            patch_attention(unet).remove()
            unet.set_attn_processor(PascalAttnProcessor())
    assert caplog.text.count("has been replaced by") == 1
    assert "sage_attention" in caplog.text


@pytest.mark.parametrize("make", ["sd15", "wan"])
def test_a_whole_pipeline_is_patched_in_one_call_and_left_as_it_was(make):
    case, (stock, _) = tiny.BUILD[make](), tiny.stock_of(make)
    patch = patch_pipeline(case.pipe)
    assert set(patch.parts) == {"attention", "feed-forward", "vae"}
    assert_same(case.run(), stock)
    report = patch.report()
    assert {state.name.partition(":")[0] for state in report.states} == set(patch.parts)
    assert all(f"{name}: " in report.text() for name in patch.parts)
    patch.remove()
    assert not any(part.active for part in patch.parts.values())
    assert torch.equal(case.run(), stock)


def test_8_bits_are_asked_for_by_name_and_come_back_exact():
    case, (stock, _) = tiny.wan(), tiny.stock_of("wan")
    with patch_pipeline(case.pipe, eight_bit=True) as patch:
        rounded = case.run()
        states = {state.name.partition(":")[0]: state for state in patch.report().states}
        assert states["8-bit attention"].state == "on"
        assert "must have something to patch" in states["8-bit linear"].why  # no layer of so small a model
    assert not torch.equal(rounded, stock)
    assert (rounded - stock).norm() < 0.1 * stock.norm()
    assert torch.equal(case.run(), stock)


def test_an_error_of_a_part_ends_the_patch_of_all_and_is_not_taken_for_a_part_that_is_not_there():
    case = tiny.sd15()

    class Unread(type(case.pipe.vae)):
        @property
        def decode(self):
            raise ValueError("the weights have not been read")

    case.pipe.vae.__class__ = Unread
    with pytest.raises(ValueError, match="have not been read"):
        patch_pipeline(case.pipe)
    case.pipe.vae.__class__ = Unread.__base__
    with record() as report:
        case.run()
    assert report.total == 0
    with patch_pipeline(case.pipe) as patch:
        assert not patch.left_alone
