"""No matrix of scores is ever stored: whole models at 9,216 tokens under the exact counter."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import patch_attention, redirect
from pascal_attn_core.observe.memory import PeakMemory
from tools.families.family import before_031

MIB = 1 << 20
SIDE = 96
TOKENS = SIDE * SIDE


def unet(tiny):
    """Self-attention of 96 x 96 latents at the top level, two heads."""
    net = tiny.tiny_unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2,
    )

    def run(device):
        text = torch.zeros(1, 7, 16, device=device)
        return net(torch.zeros(1, 4, SIDE, SIDE, device=device), 10, encoder_hidden_states=text)

    return net, run


def flux(tiny):
    """A packed image of 96 x 96 tokens, a joint block and a single one, two heads."""
    net = tiny.model("FluxTransformer2DModel")
    place = None if before_031() else ...  # ids had a batch dimension
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(SIDE)), torch.arange(float(SIDE)))

    def run(device):
        return net(
            hidden_states=torch.zeros(1, TOKENS, 4, device=device),
            encoder_hidden_states=torch.zeros(1, 12, 16, device=device),
            pooled_projections=torch.zeros(1, 12, device=device),
            timestep=torch.ones(1, device=device),
            img_ids=ids.to(device)[place],
            txt_ids=torch.zeros(12, 3, device=device)[place],
        )

    return net, run


def peak(run, device="cpu"):
    with torch.no_grad(), PeakMemory(device) as memory:
        run(device)
    return memory.peak_bytes, memory.largest_tensor_bytes


@pytest.mark.parametrize("model", [unet, flux], ids=["unet", "dit"])
def test_a_model_at_9k_tokens_takes_memory_for_its_own_activations_only(model, tiny, monkeypatch):
    net, run = model(tiny)
    budget_mib = 2
    with patch_attention(net, AttentionConfig(route="tiled", budget_mib=budget_mib)):
        ours, largest = peak(run)
        monkeypatch.setattr(redirect, "sdpa", lambda query, *_, **__: torch.zeros_like(query))
        without_attention, _ = peak(run)
    net.to("meta")
    with sdpa_kernel(SDPBackend.MATH):
        math, matrix = peak(run, "meta")
    print(f"\n{type(net).__name__}: ours {ours / MIB:,.0f} MiB, math {math / MIB:,.0f} MiB")
    assert ours <= without_attention + budget_mib * MIB
    assert matrix >= 2 * TOKENS * TOKENS * 4
    assert largest < matrix / 50
    assert math > 30 * ours
