"""PascalAttnProcessor: what set_attn_processor does with it, what it leaves as it was, and models that change later."""

import copy
import io

import diffusers
import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import assert_same, stock_calls
from diffusers import DiffusionPipeline
from diffusers.models import attention_processor as host

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention


def attention(**changes):
    torch.manual_seed(0)
    return host.Attention(**{"query_dim": 32, "heads": 2, "dim_head": 16, **changes}).eval()


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "set it on one model"), ("pascal", "'pascal'"), (host.AttnProcessor2_0(), "set it on one model")],
)
def test_what_is_no_processor_of_a_whole_pipeline_is_refused(given, words):
    with pytest.raises(TypeError, match=words):
        DiffusionPipeline().set_attn_processor(given)


@pytest.mark.parametrize("make", [lambda: tiny.flux().pipe.transformer, tiny.tiny_unet, attention])
def test_a_class_in_the_place_of_a_processor_is_refused(make):
    model = make()
    with pytest.raises(TypeError, match="must be an attention processor, got the class PascalAttnProcessor: call it"):
        getattr(model, "set_attn_processor", getattr(model, "set_processor", None))(PascalAttnProcessor)


def test_a_processor_assigned_past_set_processor_says_how_to_set_it():
    module = attention()
    module.processor = PascalAttnProcessor()
    with pytest.raises(RuntimeError, match=r"set_attn_processor\(\)"):
        module(torch.zeros(1, 4, 32))


class StrongAttnProcessor(host.AttnProcessor2_0):
    """A third party's processor with a keyword of its own."""

    def __call__(self, attn, hidden_states, *args, strength=1.0, **kwargs):
        kwargs.pop("cross_attention_kwargs", None)
        return strength * super().__call__(attn, hidden_states, *args, **kwargs)


def test_keywords_of_a_third_partys_processor_arrive(put_on, routed):
    module, x = attention(processor=StrongAttnProcessor()), torch.randn(1, 5, 32)
    stock, plain = module(x, strength=2.0), module(x)
    assert not torch.allclose(stock, plain)
    put_on(module)
    assert_same(module(x, strength=2.0), stock)
    assert len(routed) == 1


@pytest.mark.parametrize("slice_size", [None, 1], ids=["AttnProcessor", "SlicedAttnProcessor"])
def test_older_processors_run_as_their_sdpa_successors(put_on, slice_size, routed):
    unet = tiny.tiny_unet()
    unet.set_attn_processor(host.SlicedAttnProcessor(1) if slice_size else host.AttnProcessor())
    stock, saved = tiny.run_unet(unet), dict(unet.attn_processors)
    put_on(unet)
    assert_same(tiny.run_unet(unet), stock)
    unet.set_attn_processor(dict(saved))
    assert len(routed) == len(saved)
    assert all(p is saved[name] for name, p in unet.attn_processors.items())


def test_copies_and_files_of_a_model_compute_the_same_and_stay_routed(put_on, routed):
    unet = tiny.tiny_unet()
    take_off = put_on(unet)
    ours = tiny.run_unet(unet)
    count = len(routed)
    file = io.BytesIO()
    torch.save(unet, file)
    file.seek(0)
    for other in (copy.deepcopy(unet), torch.load(file, weights_only=False)):
        routed.clear()
        assert torch.equal(tiny.run_unet(other), ours)
        assert len(routed) == count
    take_off()
    routed.clear()
    tiny.run_unet(unet)
    assert not routed
    tiny.run_unet(other)
    assert len(routed) == count


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
