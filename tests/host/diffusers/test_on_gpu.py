"""Families on a CUDA card, in the types that cards run them in."""

import pytest
import torch
from attn_support import tiny_pipelines as tiny

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import patch_attention
from tools.families.proof import counted

SOME = [
    "UNet2DConditionModel (Stable Diffusion 1.5)",
    "FluxTransformer2DModel",
    "WanTransformer3DModel (text to video)",
    "QwenImageTransformer2DModel",
    "StableAudioDiTModel",
    "AutoencoderKL",
]


def on_gpu(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to("cuda", dtype) if value.is_floating_point() else value.cuda()
    if isinstance(value, dict):
        return {name: on_gpu(item, dtype) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_gpu(item, dtype) for item in value)
    return value


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["auto", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_a_family_gives_the_output_of_stock(name, dtype, route):
    family = tiny.family(name)
    model = family.build().to("cuda", dtype)

    def run():
        with torch.no_grad():
            return model(**on_gpu(family.arguments(), dtype))[0].float()

    stock = run()
    with patch_attention(model, AttentionConfig(route=route)), counted() as calls:
        ours = run()
    assert calls
    # a rounding of every layer, of which a tiny model has up to a hundred
    limit = 100 * torch.finfo(dtype).eps * stock.abs().max().item()
    torch.testing.assert_close(ours, stock, rtol=0, atol=limit)
