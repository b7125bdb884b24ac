"""These tests check what diffusers itself sets as processors while ours is set, and how ours is taken off again."""

import diffusers
import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import assert_same, do, stock_calls
from diffusers.models import attention_processor as host

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention

CONFIG = AttentionConfig(budget_mib=2)


def ip_adapter_state(model, family, width=16, inner=16):
    """An IP-Adapter as its file would be read: random weights for every module that attends to the text."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape):
        return 0.2 * torch.randn(shape, generator=random)

    names = [name for name in model.attn_processors if ("attn2" in name if family == "sd15" else "single" not in name)]
    attention = {}
    for place, name in enumerate(names):
        number = 2 * place + 1 if family == "sd15" else place
        out = model.get_submodule(name.removesuffix(".processor")).to_k.weight.shape[0]
        for part in ("k", "v"):
            attention[f"{number}.to_{part}_ip.weight"] = draw(out, inner)
            if family == "flux":
                attention[f"{number}.to_{part}_ip.bias"] = draw(out)
    projection = {"proj.weight": draw(4 * inner, width), "proj.bias": draw(4 * inner)}
    projection |= {"norm.weight": 1 + draw(inner), "norm.bias": draw(inner)}
    return {"image_proj": projection, "ip_adapter": attention}


def load(case, family):
    if not hasattr(case.pipe, "load_ip_adapter"):
        pytest.skip(f"diffusers {diffusers.__version__} loads no IP-Adapter into {type(case.pipe).__name__}")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    case.pipe.register_modules(feature_extractor=transformers.CLIPImageProcessor())  # else it asks the absent encoder
    images = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(4))
    where = {"sd15": {"subfolder": "", "image_encoder_folder": None}}
    encoder = where.get(family, {"image_encoder_pretrained_model_name_or_path": None})
    case.pipe.load_ip_adapter(ip_adapter_state(case.denoiser, family), weight_name="", **encoder)
    case.pipe.set_ip_adapter_scale(0.7)
    if family == "sd15":  # negative and positive in one
        case.text["ip_adapter_image_embeds"] = [images]
    else:
        case.text["negative_ip_adapter_image_embeds"] = [images[:1]]
        case.text["ip_adapter_image_embeds"] = [images[1:]]


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_an_ip_adapter_keeps_its_weights_and_ours(family, ours_first, put_on, routed):
    (plain, _), stock_case, case = tiny.stock_of(family), tiny.BUILD[family](), tiny.BUILD[family]()
    load(stock_case, family)
    stock, calls = stock_calls(stock_case.run)
    assert not torch.allclose(stock, plain)
    do(lambda: load(case, family), lambda: put_on(case.pipe, CONFIG), backwards=ours_first)
    assert list(case.denoiser.state_dict()) == list(stock_case.denoiser.state_dict())
    assert_same(case.run(), stock)
    assert [call["config"] for call in routed] == [CONFIG] * calls.count
    for each in (stock_case, case):
        each.pipe.set_ip_adapter_scale(0.0)
    assert_same(case.run(), stock_case.run())
    case.pipe.unload_ip_adapter()
    case.text = {name: value for name, value in case.text.items() if "ip_adapter" not in name}
    routed.clear()
    assert_same(case.run(), plain)
    assert routed
    assert all(call["config"] is CONFIG for call in routed)


@pytest.mark.parametrize(
    ("family", "fused_first"), [("sd15", True), ("sd3", False), ("flux", True), ("wan", False), ("cogvideox", True)]
)
def test_fusing_and_unfusing_projections_keeps_ours(family, fused_first, put_on, routed):
    case = tiny.BUILD[family]()
    model = case.denoiser
    tiny.require(model, "fuse_qkv_projections")
    stock, calls = tiny.stock_of(family)
    do(model.fuse_qkv_projections, lambda: put_on(case.pipe, CONFIG), backwards=not fused_first)
    assert_same(case.run(), stock)
    assert len(routed) == calls.count
    model.unfuse_qkv_projections()
    assert_same(case.run(), stock)
    assert [call["config"] for call in routed] == [CONFIG] * 2 * calls.count


def plain_function(attn, hidden_states, **_):
    heads = [getattr(attn, name)(hidden_states).unflatten(-1, (attn.heads, -1)) for name in ("to_q", "to_k", "to_v")]
    out = torch.nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads))
    return attn.to_out[0](out.transpose(1, 2).flatten(2))


class TwiceAttnProcessor(host.AttnProcessor2_0):
    """A processor whose own maths shows in the result."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return 2 * super().__call__(attn, hidden_states, *args, **kwargs)


@pytest.mark.parametrize("theirs", [TwiceAttnProcessor(), plain_function], ids=["an object", "a function"])
def test_a_processor_set_over_ours_keeps_its_own_maths(theirs, routed):
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


def test_linear_attention_is_named_by_the_patch_and_in_the_refusal():
    if not hasattr(host, "SanaLinearAttnProcessor2_0"):
        pytest.skip("this diffusers has no linear attention")
    linear = host.SanaLinearAttnProcessor2_0()
    both = torch.nn.ModuleList([host.Attention(8, heads=2, dim_head=4, processor=p) for p in (None, linear)])
    both[1].set_processor(PascalAttnProcessor())
    assert both[1].processor is linear
    with patch_attention(both) as patch:
        assert list(patch.left_alone.values()) == ["SanaLinearAttnProcessor2_0: linear attention"]
        assert [state.name for state in patch.report().states if state.state == "refused"] == list(patch.left_alone)
        assert patch.sites == 1
    with pytest.raises(ValueError, match="left alone: 1 x SanaLinearAttnProcessor2_0: linear attention"):
        patch_attention(both[1])


def test_flex_attention_chosen_for_a_processor_stays_its_choice():
    """The masks of this model are of another kind, which diffusers hands to no other backend."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no backends")
    transformer = tiny.model("FluxTransformer2DModel")
    for backend, expected in (("flex", "FLEX"), ("flash", "NATIVE"), ("_flash_3", "NATIVE")):
        for processor in transformer.attn_processors.values():
            processor._attention_backend = dispatch.AttentionBackendName(backend)
        transformer.set_attn_processor(PascalAttnProcessor())
        found = {p._attention_backend for p in transformer.attn_processors.values()}
        assert found == {dispatch.AttentionBackendName[expected]}
        transformer.set_attn_processor(None)
