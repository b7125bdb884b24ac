"""Models that change after ours was set on them: rebuilt blocks, processors assigned by pipelines."""

import diffusers
import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import assert_same, stock_calls

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention

pytestmark = pytest.mark.filterwarnings("ignore")


def animatediff():
    """An AnimateDiff pipeline that is called with prompts: FreeNoise takes no embeddings."""
    if not hasattr(diffusers.AnimateDiffPipeline, "enable_free_noise"):
        pytest.skip("this diffusers has no FreeNoise")
    unet = tiny.tiny_unet()
    layers = {"motion_layers_per_block": 1, "motion_norm_num_groups": 2, "motion_num_attention_heads": 4}
    adapter = diffusers.MotionAdapter(block_out_channels=(16, 32), motion_max_seq_length=8, **layers)
    parts = {"unet": unet, "motion_adapter": tiny.reinitialise(adapter), "text_encoder": None, "tokenizer": None}
    stock = tiny.sd15().pipe
    pipe = diffusers.AnimateDiffPipeline(vae=stock.vae, scheduler=stock.scheduler, **parts)
    pipe.set_progress_bar_config(disable=True)
    pipe.unet.eval()

    def embeddings(prompt, *args, **kwargs):
        values = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(3))
        return values.expand(len(prompt), -1, -1), -values.expand(len(prompt), -1, -1)

    pipe.encode_prompt = embeddings
    return pipe


def run(pipe):
    sizes = {"num_frames": 10 if pipe.free_noise_enabled else 6, "height": 16, "width": 16}
    start = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return pipe("a", num_inference_steps=1, generator=start, output_type="latent", **sizes).frames


def classes_of(model):
    return [type(module) for module in model.modules()]


def test_free_noise_builds_blocks_of_its_own_and_removal_restores_everything(put_on, routed):
    """The blocks that it builds have torch's attention."""
    free_noise = {"context_length": 8, "context_stride": 4}
    stock_pipe, pipe = animatediff(), animatediff()
    first = run(stock_pipe)
    stock_pipe.enable_free_noise(**free_noise)
    noisy, noisy_calls = stock_calls(lambda: run(stock_pipe))
    stock_pipe.disable_free_noise()
    plain_classes = classes_of(stock_pipe.unet)

    take_off = put_on(pipe, AttentionConfig(budget_mib=4))
    pipe.enable_free_noise(**free_noise)
    assert_same(run(pipe), noisy)
    assert 0 < len(routed) < noisy_calls.count
    pipe.disable_free_noise()
    assert_same(run(pipe), first)
    take_off()
    routed.clear()
    assert torch.equal(run(pipe), first)
    assert classes_of(pipe.unet) == plain_classes
    assert not routed


def test_perturbed_attention_guidance_has_every_call_routed(routed):
    case = tiny.sd15()
    parts = {**case.pipe.components, "safety_checker": None}
    parts.pop("image_encoder", None)
    pag = diffusers.StableDiffusionPAGPipeline(**parts, requires_safety_checker=False, pag_applied_layers="mid")
    pag.set_progress_bar_config(disable=True)
    case.pipe = pag
    stock, calls = stock_calls(case.run)
    before = dict(pag.unet.attn_processors)
    with patch_attention(pag):
        assert_same(case.run(), stock)
    assert len(routed) == calls.count
    routed.clear()
    pag.set_attn_processor(PascalAttnProcessor())
    ours = dict(pag.unet.attn_processors)
    assert_same(case.run(), stock)
    assert len(routed) == calls.count
    assert all(p is ours[name] for name, p in pag.unet.attn_processors.items())
    pag.set_attn_processor(None)
    assert all(p is before[name] for name, p in pag.unet.attn_processors.items())
    routed.clear()
    assert torch.equal(case.run(), stock)
    assert not routed
