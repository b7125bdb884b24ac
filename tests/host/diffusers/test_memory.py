"""No matrix of scores is ever stored: whole models at 9,216 tokens under the exact counter."""

import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.randomness import some
from torch.nn.attention import SDPBackend, sdpa_kernel

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import patch_attention, redirect
from pascal_attn_core.observe.memory import PeakMemory
from tools.families.family import before_031

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
