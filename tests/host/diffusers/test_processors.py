"""PascalAttnProcessor: what set_attn_processor does with it, and what it leaves as it was."""

from __future__ import annotations

import copy
import io

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusers
import torch
from diffusers.models import attention_processor as host

import pascal_attn_core.diffusers as pascal
from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_pipeline


def run_unet(unet, **arguments):
    random = torch.Generator().manual_seed(0)
    sample, text = torch.randn(2, 4, 8, 8, generator=random), torch.randn(2, 7, 32, generator=random)
    with torch.no_grad():
        return unet(sample, 10, encoder_hidden_states=text, **arguments).sample


def attention(**changes):
    torch.manual_seed(0)
    return host.Attention(**{"query_dim": 32, "heads": 2, "dim_head": 16, **changes}).eval()


# --- the literal calls ------------------------------------------------------------------------------------------------


def test_the_dict_form_gives_each_module_its_own_config(tiny, routed, assert_same):
    unet = tiny.tiny_unet()
    stock = run_unet(unet)
    small, large = AttentionConfig(budget_mib=1), AttentionConfig(budget_mib=8)
    names = list(unet.attn_processors)
    unet.set_attn_processor({name: PascalAttnProcessor(small if "attn1" in name else large) for name in names})
    assert_same(run_unet(unet), stock)
    assert [call["config"] for call in routed] == [small if "attn1" in n else large for n in names_in_call_order(unet)]


def names_in_call_order(unet):
    order = []
    hooks = [
        m.register_forward_hook(lambda *_, n=n: order.append(n))
        for n, m in unet.named_modules()
        if isinstance(m, host.Attention)
    ]
    with patch_pipeline(unet):
        run_unet(unet)
    for hook in hooks:
        hook.remove()
    return order


def test_the_processors_saved_before_are_the_same_objects_when_set_again(tiny, routed):
    unet = tiny.tiny_unet()
    stock, saved = run_unet(unet), dict(unet.attn_processors)
    unet.set_attn_processor(PascalAttnProcessor())
    unet.set_attn_processor(dict(saved))
    assert all(p is saved[name] for name, p in unet.attn_processors.items())
    assert torch.equal(run_unet(unet), stock)


def test_set_default_attn_processor_keeps_ours_around_the_default_ones(tiny, stock_calls, routed, assert_same):
    unet = tiny.tiny_unet()
    _, calls = stock_calls(lambda: run_unet(unet))
    unet.set_default_attn_processor()
    stock = run_unet(unet)
    unet = tiny.tiny_unet()
    unet.set_attn_processor(PascalAttnProcessor())
    unet.set_default_attn_processor()
    assert {type(p._original) for p in unet.attn_processors.values()} == {host.AttnProcessor}
    assert_same(run_unet(unet), stock)
    assert len(routed) == calls.count


def test_setting_it_twice_does_not_stack(tiny, stock_calls, routed):
    unet = tiny.tiny_unet()
    _, calls = stock_calls(lambda: run_unet(unet))
    config = AttentionConfig(budget_mib=8)
    unet.set_attn_processor(PascalAttnProcessor())
    unet.set_attn_processor(PascalAttnProcessor(config))
    run_unet(unet)
    assert len(routed) == calls.count
    assert all(call["config"] is config for call in routed)


def test_the_pipeline_method_takes_ours_off_every_model(tiny, routed):
    case = tiny.wan()
    stock = case.run()
    classes = [type(m) for m in case.pipe.vae.modules()]
    case.pipe.set_attn_processor(PascalAttnProcessor())
    assert [type(m) for m in case.pipe.vae.modules()] != classes
    case.pipe.set_attn_processor(None)
    assert torch.equal(case.run(), stock)
    assert not routed
    assert [type(m) for m in case.pipe.vae.modules()] == classes


def test_another_processor_for_the_pipeline_does_not_go_to_the_vae_and_ours_stays_on_both(tiny, stock_calls, routed):
    case = tiny.flux()
    tiny.require(case.denoiser, "attn_processors")
    _, calls = stock_calls(case.run)
    saved = case.denoiser.attn_processors["transformer_blocks.0.attn.processor"]
    case.pipe.set_attn_processor(PascalAttnProcessor())
    case.pipe.set_attn_processor(type(saved)())
    assert {type(p._original) for p in case.denoiser.attn_processors.values()} == {type(saved)}
    assert {type(p._original) for p in case.pipe.vae.attn_processors.values()} == {host.AttnProcessor2_0}
    case.run()
    assert len(routed) == calls.count
    case.pipe.set_attn_processor(None)
    assert {type(p) for p in case.denoiser.attn_processors.values()} == {type(saved)}
    assert {type(p) for p in case.pipe.vae.attn_processors.values()} == {host.AttnProcessor2_0}


def test_a_dict_for_a_whole_pipeline_is_refused(tiny):
    with pytest.raises(TypeError, match="set it on one model"):
        tiny.sd15().pipe.set_attn_processor({})


def test_a_processor_assigned_past_set_processor_says_how_to_set_it():
    module = attention()
    module.processor = PascalAttnProcessor()
    with pytest.raises(RuntimeError, match=r"set_attn_processor\(\)"):
        module(torch.zeros(1, 4, 32))


def test_an_attention_module_may_be_made_with_it(routed, assert_same):
    module, stock = attention(processor=PascalAttnProcessor()), attention()
    x = torch.randn(1, 5, 32)
    assert_same(module(x), stock(x))
    assert len(routed) == 1


def test_uninstall_takes_every_change_to_diffusers_back():
    try:
        pascal.uninstall()
        assert not hasattr(diffusers.DiffusionPipeline, "set_attn_processor")
        assert not hasattr(host.Attention.set_processor, "_pascal_original")
    finally:
        patch = pascal.install()
        assert pascal.install() is patch
        assert patch.active
    assert host.Attention.set_processor._pascal_original.__qualname__ == "Attention.set_processor"
    assert not hasattr(host.Attention.set_processor._pascal_original, "_pascal_original")


def test_config_must_be_a_config():
    with pytest.raises(TypeError, match="AttentionConfig"):
        PascalAttnProcessor({"route": "tiled"})


# --- what the model's processors do stays theirs ----------------------------------------------------------------------


def ip_adapter_unet(tiny):
    """A UNet with IP-Adapter processors, their weights random, and the arguments of a call."""
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    unet = tiny.tiny_unet()
    processors = {}
    for name in unet.attn_processors:
        width = 64
        processors[name] = (
            host.AttnProcessor2_0()
            if "attn1" in name
            else host.IPAdapterAttnProcessor2_0(width, cross_attention_dim=32, num_tokens=(4,), scale=[0.7])
        )
    unet.set_attn_processor(processors)
    projection = ImageProjection(image_embed_dim=16, cross_attention_dim=32, num_image_text_embeds=4)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    unet.config.encoder_hid_dim_type = "ip_image_proj"
    tiny.reinitialise(unet)
    return unet, {"added_cond_kwargs": {"image_embeds": [torch.randn(2, 1, 16)]}}


def test_ip_adapter_weights_keep_working(put_on, tiny, stock_calls, routed, assert_same):
    unet, arguments = ip_adapter_unet(tiny)
    adapters = [p for p in unet.attn_processors.values() if isinstance(p, torch.nn.Module)]
    stock, calls = stock_calls(lambda: run_unet(unet, **arguments))
    keys = list(unet.state_dict())
    put_on(unet)
    assert_same(run_unet(unet, **arguments), stock)
    assert len(routed) == calls.count
    assert list(unet.state_dict()) == keys
    assert sum(isinstance(p, host.IPAdapterAttnProcessor2_0) for p in unet.attn_processors.values()) == len(adapters)


def test_the_scale_of_an_ip_adapter_can_be_changed_under_ours(tiny):
    unet, arguments = ip_adapter_unet(tiny)
    saved = dict(unet.attn_processors)
    with_image = run_unet(unet, **arguments)
    unet.set_attn_processor(PascalAttnProcessor())
    for processor in unet.attn_processors.values():
        if isinstance(processor, host.IPAdapterAttnProcessor2_0):
            processor.scale = [0.0]
    without_image = run_unet(unet, **arguments)
    assert not torch.allclose(with_image, without_image)
    unet.set_attn_processor(saved)
    assert torch.allclose(run_unet(unet, **arguments), without_image, atol=1e-5)


def test_a_patch_outlives_processors_that_diffusers_sets_meanwhile(tiny, stock_calls, routed, assert_same):
    unet = tiny.tiny_unet()
    stock, calls = stock_calls(lambda: run_unet(unet))
    with patch_pipeline(unet):
        unet.fuse_qkv_projections()
        assert_same(run_unet(unet), stock)
        assert len(routed) == calls.count


def test_lora_of_peft_works_under_a_patch_and_beside_the_processor(tiny, routed, assert_same):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    unet = tiny.tiny_unet()
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    stock = run_unet(unet)
    with patch_pipeline(unet):
        assert_same(run_unet(unet), stock)
    unet.set_attn_processor(PascalAttnProcessor())
    assert_same(run_unet(unet), stock)
    unet.disable_adapters()
    assert not torch.allclose(run_unet(unet), stock)


class StrongAttnProcessor(host.AttnProcessor2_0):
    """A third party's processor with a keyword of its own."""

    def __call__(self, attn, hidden_states, *args, strength=1.0, **kwargs):
        kwargs.pop("cross_attention_kwargs", None)
        return strength * super().__call__(attn, hidden_states, *args, **kwargs)


def test_keywords_of_a_third_partys_processor_arrive(put_on, routed, assert_same):
    module, x = attention(processor=StrongAttnProcessor()), torch.randn(1, 5, 32)
    stock, plain = module(x, strength=2.0), module(x)
    assert not torch.allclose(stock, plain)
    put_on(module)
    assert_same(module(x, strength=2.0), stock)
    assert len(routed) == 1


@pytest.mark.parametrize("how", ["processor", "patch"])
def test_a_processor_bound_to_another_backend_comes_to_us(how, tiny, routed):
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no backends")
    case = tiny.flux()
    processors = dict(case.denoiser.attn_processors)
    for processor in processors.values():
        processor._attention_backend = dispatch.AttentionBackendName.FLASH
    if how == "patch":
        with patch_pipeline(case.denoiser):
            case.run()
    else:
        case.denoiser.set_attn_processor(PascalAttnProcessor())
        case.run()
        case.denoiser.set_attn_processor(dict(processors))
    assert len(routed) == 2 * len(processors)
    assert all(p is processors[name] for name, p in case.denoiser.attn_processors.items())
    assert all(p._attention_backend == dispatch.AttentionBackendName.FLASH for p in processors.values())


def test_rope_reaches_the_models_own_processor(tiny, assert_same, wrong_attention):
    case = tiny.flux()
    tiny.require(case.denoiser, "attn_processors")
    stock = case.run()
    case.denoiser.set_attn_processor(PascalAttnProcessor())
    assert_same(case.run(), stock)
    moved = case.denoiser.pos_embed.theta
    case.denoiser.pos_embed.theta = moved * 0.01
    with pytest.raises(AssertionError):
        assert_same(case.run(), stock)


def test_a_dropped_mask_would_be_noticed(tiny, stock_calls, wrong_attention, assert_same):
    unet = tiny.tiny_unet()
    mask = {"encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]]).bool()}
    stock, calls = stock_calls(lambda: run_unet(unet, **mask))
    assert calls.masked > 0
    with patch_pipeline(unet):
        assert_same(run_unet(unet, **mask), stock)
        with wrong_attention("maskless"), pytest.raises(AssertionError):
            assert_same(run_unet(unet, **mask), stock)


@pytest.mark.parametrize("how", ["processor", "patch"])
@pytest.mark.parametrize("slice_size", [None, 1], ids=["AttnProcessor", "SlicedAttnProcessor"])
def test_older_processors_run_as_their_sdpa_successors(how, slice_size, tiny, routed, assert_same):
    unet = tiny.tiny_unet()
    unet.set_attn_processor(host.SlicedAttnProcessor(1) if slice_size else host.AttnProcessor())
    stock, saved = run_unet(unet), dict(unet.attn_processors)
    if how == "patch":
        with patch_pipeline(unet):
            assert_same(run_unet(unet), stock)
    else:
        unet.set_attn_processor(PascalAttnProcessor())
        assert_same(run_unet(unet), stock)
        unet.set_attn_processor(dict(saved))
    assert len(routed) == len(saved)
    assert all(p is saved[name] for name, p in unet.attn_processors.items())


def test_scores_that_a_model_does_not_scale_stay_unscaled(assert_same):
    module = attention(scale_qk=False)
    assert type(module.processor) is host.AttnProcessor
    x = 0.3 * torch.randn(1, 6, 32)
    stock = module(x)
    with patch_pipeline(module):
        assert_same(module(x), stock)
    module.set_processor(PascalAttnProcessor())
    assert_same(module(x), stock)


# --- copies, files, threads, training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["processor", "patch"])
def test_copies_and_files_of_a_model_compute_the_same_and_stay_routed(how, tiny, routed):
    unet = tiny.tiny_unet()
    patch = patch_pipeline(unet) if how == "patch" else unet.set_attn_processor(PascalAttnProcessor())
    ours = run_unet(unet)
    count = len(routed)
    file = io.BytesIO()
    torch.save(unet, file)
    file.seek(0)
    for other in (copy.deepcopy(unet), torch.load(file, weights_only=False)):
        routed.clear()
        assert torch.equal(run_unet(other), ours)
        assert len(routed) == count
    if patch is not None:
        patch.remove()
        routed.clear()
        run_unet(unet)
        assert not routed


def test_a_copied_processor_is_bound_to_the_copy(tiny):
    unet, _ = ip_adapter_unet(tiny)
    unet.set_attn_processor(PascalAttnProcessor())
    twin = copy.deepcopy(unet)
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert all(p.abs().sum() > 0 for n, p in unet.named_parameters() if "to_k_ip" in n)
    assert all(p._original is not unet.attn_processors[n]._original for n, p in twin.attn_processors.items())


def test_gradients_are_those_of_stock_with_and_without_checkpointing(tiny, routed, assert_same):
    def gradients(unet):
        unet.zero_grad()
        random = torch.Generator().manual_seed(0)
        x, text = torch.randn(1, 4, 8, 8, generator=random), torch.randn(1, 7, 32, generator=random)
        unet(x, 10, encoder_hidden_states=text).sample.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in unet.parameters() if p.grad is not None])

    unet = tiny.tiny_unet().train()
    stock = gradients(unet)
    unet.set_attn_processor(PascalAttnProcessor())
    assert_same(gradients(unet), stock)
    count = len(routed)
    unet.enable_gradient_checkpointing()
    assert_same(gradients(unet), stock)
    assert len(routed) > 2 * count
