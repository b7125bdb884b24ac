"""Ours costs little: no matrix of scores is ever stored (whole models at 9,216 tokens), no function is in the way."""

import pytest
import torch
import torch.nn.functional as F
from attn_support import tiny_pipelines as tiny
from attn_support.randomness import some
from attn_support.tiny_pipelines import FAMILIES, SOME, assert_same
from torch.nn.attention import SDPBackend, sdpa_kernel

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import patch_attention, redirect
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.patching.interception import SdpaMode
from tools.families.family import before_031
from tools.families.proof import counted, outputs

MIB = 1 << 20
SIDE = 96
TOKENS = SIDE * SIDE


def unet():
    """Self-attention of 96 x 96 latents at the top level, two heads."""
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    net = tiny.tiny_unet(down_block_types=down, up_block_types=up, attention_head_dim=2)
    return net, {
        "sample": torch.zeros(1, 4, SIDE, SIDE),
        "encoder_hidden_states": torch.zeros(1, 7, 16),
        "timestep": 10,
    }


def flux():
    """A packed image of 96 x 96 tokens, a joint block and a single one, two heads."""
    place = None if before_031() else ...  # ids had a batch dimension
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(SIDE)), torch.arange(float(SIDE)))
    text = {"encoder_hidden_states": torch.zeros(1, 12, 16), "txt_ids": torch.zeros(12, 3)[place]}
    more = {"pooled_projections": torch.zeros(1, 12), "timestep": torch.ones(1), "img_ids": ids[place]}
    return tiny.model("FluxTransformer2DModel"), {"hidden_states": torch.zeros(1, TOKENS, 4), **text, **more}


def peak(net, inputs, device="cpu"):
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with torch.no_grad(), PeakMemory(device) as memory:
        net(**given)
    return memory.peak_bytes, memory.largest_tensor_bytes


@pytest.mark.parametrize("model", some([flux, unet], 2))
def test_a_model_at_9k_tokens_takes_memory_for_its_own_activations_only(model, monkeypatch):
    net, inputs = model()
    budget_mib = 2
    with patch_attention(net, AttentionConfig(route="tiled", budget_mib=budget_mib)):
        ours, largest = peak(net, inputs)
        monkeypatch.setattr(redirect, "sdpa", lambda query, *_, **__: torch.zeros_like(query))
        without_attention, _ = peak(net, inputs)
    net.to("meta")
    with sdpa_kernel(SDPBackend.MATH):
        math, matrix = peak(net, inputs, "meta")
    print(f"\n{type(net).__name__}: ours {ours / MIB:,.0f} MiB, math {math / MIB:,.0f} MiB")
    assert ours <= without_attention + budget_mib * MIB
    assert matrix >= 2 * TOKENS * TOKENS * 4
    assert largest < matrix / 50
    assert math > 30 * ours


@pytest.mark.parametrize("name", [*SOME, "StableAudioDiTModel"])
def test_no_function_of_the_model_is_seen(name, put_on, monkeypatch):
    """No function but the attention call is seen by Python: the redirect is asked about none."""
    monkeypatch.setattr(SdpaMode, "__torch_function__", lambda _, function, *given: pytest.fail(f"{function} is seen"))
    family = tiny.family(name)
    model = family.build()
    put_on(model)
    with counted() as calls:
        outputs(family, model)
    assert calls


@pytest.mark.parametrize("what", ["backend", "dispatch function"])
def test_what_is_replaced_meanwhile_keeps_its_turn(what, monkeypatch):
    backends = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no backends")
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    family = FAMILIES["FluxTransformer2DModel"]
    model, theirs = family.build(), []
    stock = outputs(family, model)
    place, name = vars(flux), "dispatch_attention_fn"
    if what == "backend":
        place, name = backends._AttentionBackendRegistry._backends, backends.AttentionBackendName.NATIVE
    original = place[name]

    def counting(*args, **kwargs):
        theirs.append(kwargs)
        return original(*args, **kwargs)

    with patch_attention(model), counted() as ours:
        assert_same(outputs(family, model), stock)
        monkeypatch.setitem(place, name, counting)
        assert_same(outputs(family, model), stock)
    assert len(theirs) == 2
    assert len(ours) == 4


def test_a_replacement_of_sdpa_comes_first(monkeypatch):
    """Code that had replaced torch's function keeps its turn; we get what it passes to torch's own."""
    torchs, calls = F.scaled_dot_product_attention, []

    def doubled(query, key, value, *args, **kwargs):
        calls.append(query.shape)
        return 2 * torchs(query, key, value, *args, **kwargs)

    family = FAMILIES["SD3Transformer2DModel (SD3)"]
    model = family.build()
    monkeypatch.setattr(F, "scaled_dot_product_attention", doubled)
    stock, made = outputs(family, model), len(calls)
    with patch_attention(model), counted() as ours:
        assert_same(outputs(family, model), stock)
    assert len(calls) == 2 * made
    assert len(ours) == made
