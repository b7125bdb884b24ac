"""What diffusers itself sets as processors while ours is set, and how ours is taken off again."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusers
import torch
from diffusers.models import attention_processor as host

import pascal_attn_core.diffusers as pascal
from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_pipeline

CONFIG = AttentionConfig(budget_mib=2)


def run_unet(unet):
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return unet(
            torch.randn(1, 4, 8, 8, generator=random),
            10,
            encoder_hidden_states=torch.randn(1, 7, 32, generator=random),
        ).sample


def ip_adapter_state(model, names, width, inner):
    """An IP-Adapter for the attention modules called ``names``, as its file would be read: random weights."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape):
        return 0.2 * torch.randn(shape, generator=random)

    attention = {}
    for number, name in names:
        out = model.get_submodule(name.removesuffix(".processor")).to_k.weight.shape[0]
        for part in ("k", "v"):
            attention[f"{number}.to_{part}_ip.weight"] = draw(out, inner)
            attention[f"{number}.to_{part}_ip.bias"] = draw(out)
    projection = {
        "proj.weight": draw(4 * inner, width),
        "proj.bias": draw(4 * inner),
        "norm.weight": 1 + draw(inner),
        "norm.bias": draw(inner),
    }
    return {"image_proj": projection, "ip_adapter": attention}


def sd_adapter(case):
    names = [name for name in case.denoiser.attn_processors if "attn2" in name]
    state = ip_adapter_state(case.denoiser, [(2 * i + 1, name) for i, name in enumerate(names)], 16, 32)
    state["ip_adapter"] = {name: weight for name, weight in state["ip_adapter"].items() if "bias" not in name}
    return state


def flux_adapter(case):
    names = [name for name in case.denoiser.attn_processors if not name.startswith("single")]
    return ip_adapter_state(case.denoiser, list(enumerate(names)), 16, 32)


ADAPTERS = {"sd15": sd_adapter, "flux": flux_adapter}


def load(case, family):
    if not hasattr(case.pipe, "load_ip_adapter"):
        pytest.skip(f"diffusers {diffusers.__version__} loads no IP-Adapter into {type(case.pipe).__name__}")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    case.pipe.register_modules(feature_extractor=transformers.CLIPImageProcessor())  # else it asks the absent encoder
    images = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(4))
    where = {"sd15": {"subfolder": "", "image_encoder_folder": None}}
    encoder = where.get(family, {"image_encoder_pretrained_model_name_or_path": None})
    case.pipe.load_ip_adapter(ADAPTERS[family](case), weight_name="", **encoder)
    case.pipe.set_ip_adapter_scale(0.7)
    if family == "sd15":  # negative and positive in one
        case.text["ip_adapter_image_embeds"] = [images]
    else:
        case.text["negative_ip_adapter_image_embeds"] = [images[:1]]
        case.text["ip_adapter_image_embeds"] = [images[1:]]


@pytest.mark.parametrize("family", list(ADAPTERS))
def test_load_ip_adapter_afterwards_keeps_ours_and_its_weights(family, put_on, tiny, stock_calls, routed, assert_same):
    plain, stock_case, case = (tiny.BUILD[family]() for _ in range(3))
    load(stock_case, family)
    stock, calls = stock_calls(stock_case.run)
    assert not torch.allclose(stock, plain.run())
    put_on(case.pipe, CONFIG)
    load(case, family)
    assert_same(case.run(), stock)
    assert len(routed) == calls.count
    assert all(call["config"] is CONFIG for call in routed)
    case.pipe.unload_ip_adapter()
    case.text = {name: value for name, value in case.text.items() if "ip_adapter" not in name}
    routed.clear()
    assert_same(case.run(), plain.run())
    assert routed
    assert all(call["config"] is CONFIG for call in routed)


@pytest.mark.parametrize("fused_first", [True, False])
@pytest.mark.parametrize("family", ["sd15", "sd3", "flux", "wan", "cogvideox"])
def test_fusing_and_unfusing_projections_keeps_ours(family, fused_first, tiny, stock_calls, routed, assert_same):
    case = tiny.BUILD[family]()
    model = case.denoiser
    tiny.require(model, "fuse_qkv_projections")
    stock, calls = stock_calls(case.run)
    steps = [model.fuse_qkv_projections, lambda: case.pipe.set_attn_processor(PascalAttnProcessor(CONFIG))]
    for step in steps if fused_first else reversed(steps):
        step()
    assert_same(case.run(), stock)
    assert len(routed) == calls.count
    model.unfuse_qkv_projections()
    assert_same(case.run(), stock)
    assert len(routed) == 2 * calls.count
    assert all(call["config"] is CONFIG for call in routed)


def test_attention_slicing_switched_on_and_off_changes_nothing(put_on, tiny, stock_calls, routed, assert_same):
    case = tiny.sd15()
    stock, calls = stock_calls(case.run)
    put_on(case.pipe)
    case.pipe.enable_attention_slicing()
    assert_same(case.run(), stock)
    case.pipe.disable_attention_slicing()
    assert_same(case.run(), stock)
    assert len(routed) == 2 * calls.count


@pytest.mark.parametrize("by", ["a user", "a step of a pipeline"])
def test_it_does_not_matter_who_sets_a_processor(by, tiny, stock_calls, routed, assert_same):
    unet, config = tiny.tiny_unet(), AttentionConfig(budget_mib=3)
    unet.fuse_qkv_projections()
    stock, calls = stock_calls(lambda: run_unet(unet))
    unet.set_attn_processor(PascalAttnProcessor(config))
    if by == "a user":
        unet.set_attn_processor(host.FusedAttnProcessor2_0())
    else:
        unet.fuse_qkv_projections()
    assert {type(p._original) for p in unet.attn_processors.values()} == {host.FusedAttnProcessor2_0}
    assert_same(run_unet(unet), stock)
    assert len(routed) == calls.count
    assert all(call["config"] is config for call in routed)


def plain_function(attn, hidden_states, **_):
    heads = [getattr(attn, name)(hidden_states).unflatten(-1, (attn.heads, -1)) for name in ("to_q", "to_k", "to_v")]
    out = torch.nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads))
    return attn.to_out[0](out.transpose(1, 2).flatten(2))


class TwiceAttnProcessor(host.AttnProcessor2_0):
    """A processor whose own maths shows in the result."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return 2 * super().__call__(attn, hidden_states, *args, **kwargs)


@pytest.mark.parametrize("theirs", [TwiceAttnProcessor(), plain_function], ids=["an object", "a function"])
def test_a_processor_set_over_ours_keeps_its_own_maths(theirs, routed, assert_same):
    module, x = host.Attention(16, heads=2, dim_head=8).eval(), torch.randn(1, 5, 16)
    module.set_processor(theirs)
    stock = module(x)
    module.set_processor(host.AttnProcessor2_0())
    module.set_processor(PascalAttnProcessor(CONFIG))
    module.set_processor(theirs)
    assert_same(module(x), stock)
    assert [call["config"] for call in routed] == [CONFIG]
    module.set_processor(None)
    assert module.processor is theirs
    assert torch.equal(module(x), stock)
    assert len(routed) == 1


def test_linear_attention_set_over_ours_is_left_alone_and_what_follows_is_ours_again(routed):
    if not hasattr(host, "SanaLinearAttnProcessor2_0"):
        pytest.skip("this diffusers has no linear attention")
    module, linear = host.Attention(16, heads=2, dim_head=8).eval(), host.SanaLinearAttnProcessor2_0()
    module.set_processor(PascalAttnProcessor(CONFIG))
    module.set_processor(linear)
    module(torch.randn(1, 5, 16))
    assert module.processor is linear
    assert not routed
    module.set_processor(host.AttnProcessor2_0())
    module(torch.randn(1, 5, 16))
    assert [call["config"] for call in routed] == [CONFIG]


# --- taking off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["pipe", "denoiser"])
@pytest.mark.parametrize("family", ["sd15", "flux", "wan"])
def test_none_gives_the_very_processors_back(family, by, tiny, routed):
    case = tiny.BUILD[family]()
    door = getattr(case, by)
    stock = case.run()
    before = [(type(m), getattr(m, "processor", None)) for m in case.denoiser.modules()]
    door.set_attn_processor(PascalAttnProcessor())
    door.set_attn_processor(None)
    after = [(type(m), getattr(m, "processor", None)) for m in case.denoiser.modules()]
    assert all(a[0] is b[0] and a[1] is b[1] for a, b in zip(before, after))
    assert torch.equal(case.run(), stock)
    assert not routed


def test_none_does_nothing_where_ours_is_not_set(tiny):
    unet = tiny.tiny_unet()
    before = dict(unet.attn_processors)
    unet.set_attn_processor(None)
    assert all(p is before[name] for name, p in unet.attn_processors.items())


def test_a_model_without_set_attn_processor_has_it_with_us(tiny, routed):
    vae = tiny.BUILD["wan"]().pipe.vae
    latents = torch.randn(1, 16, 1, 4, 4)
    with torch.no_grad():
        stock = vae.decode(latents).sample
        vae.set_attn_processor(PascalAttnProcessor())
        vae.decode(latents)
        assert routed
        vae.set_attn_processor(None)
        routed.clear()
        assert torch.equal(vae.decode(latents).sample, stock)
    assert not routed
    assert vae.attn_processors == {}  # its attention has none
    with pytest.raises(ValueError, match="number of processors must be 0, got 1"):
        vae.set_attn_processor({"decoder.processor": PascalAttnProcessor()})


def test_a_model_with_a_method_of_its_own_keeps_it(tiny):
    unet = tiny.tiny_unet()
    assert "diffusers." in unet.set_attn_processor.__func__.__module__
    assert "diffusers." in diffusers.PriorTransformer.set_attn_processor.__module__


def test_uninstalled_the_method_is_gone_from_models_too_and_ours_is_off(tiny, routed):
    unet, vae = tiny.tiny_unet(), tiny.BUILD["wan"]().pipe.vae
    before = {id(m): (type(m), m.__dict__.get("processor")) for each in (unet, vae) for m in each.modules()}
    for each in (unet, vae):
        each.set_attn_processor(PascalAttnProcessor())
    try:
        pascal.uninstall()
        assert not hasattr(diffusers.AutoencoderKLCogVideoX, "set_attn_processor")
        run_unet(unet)
        assert not routed
        for each in (unet, vae):
            for module in each.modules():
                cls, processor = before[id(module)]
                assert type(module) is cls
                assert module.__dict__.get("processor") is processor
    finally:
        pascal.install()
    assert hasattr(diffusers.AutoencoderKLCogVideoX, "set_attn_processor")


def test_linear_attention_is_named_by_the_patch_and_in_the_refusal():
    if not hasattr(host, "SanaLinearAttnProcessor2_0"):
        pytest.skip("this diffusers has no linear attention")
    both = torch.nn.ModuleList(
        [host.Attention(8, heads=2, dim_head=4, processor=p) for p in (None, host.SanaLinearAttnProcessor2_0())]
    )
    with patch_pipeline(both) as patch:
        assert list(patch.left_alone.values()) == ["SanaLinearAttnProcessor2_0: linear attention"]
        assert [state.name for state in patch.report().states if state.state == "refused"] == list(patch.left_alone)
        assert patch.sites == 1
    with pytest.raises(ValueError, match="left alone: 1 x SanaLinearAttnProcessor2_0: linear attention"):
        patch_pipeline(both[1])


def test_flex_attention_chosen_for_a_processor_stays_its_choice(tiny):
    """Its masks are of another kind: whoever chose flex for NABLA would otherwise get an error from our sdpa."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no backends")
    transformer = tiny.tiny_flux_transformer()
    for backend, expected in (("flex", "FLEX"), ("flash", "NATIVE"), ("_flash_3", "NATIVE")):
        for processor in transformer.attn_processors.values():
            processor._attention_backend = dispatch.AttentionBackendName(backend)
        transformer.set_attn_processor(PascalAttnProcessor())
        found = {p._attention_backend for p in transformer.attn_processors.values()}
        assert found == {dispatch.AttentionBackendName[expected]}
        transformer.set_attn_processor(None)


def test_a_function_as_processor_is_served_by_the_patch_and_refused_by_the_processor(routed, assert_same):
    module, x = host.Attention(16, heads=2, dim_head=8).eval(), torch.randn(1, 5, 16)
    module.processor = plain_function
    stock = module(x)
    with patch_pipeline(module):
        assert_same(module(x), stock)
        assert module.processor is plain_function
    assert len(routed) == 1
    with pytest.raises(TypeError, match="use patch_attention"):
        module.set_processor(PascalAttnProcessor())
