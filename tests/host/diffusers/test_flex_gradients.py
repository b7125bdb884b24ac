"""Gradients of the models of diffusers that are written for FlexAttention, of which torch has none on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import torch
from torch import Tensor, nn

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import patch_attention
from tools.families import NotInThisVersion, families
from tools.families.family import Family
from tools.families.proof import exact, replaced

NAMES = ("Kandinsky6SRTransformer3DModel", "AnyFlowFARTransformer3DModel", "LTX2VideoDiffusionDecoderModel")
TILES = AttentionConfig(route="tiled", q_block=9, kv_block=5)


def _gradients(family: Family, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the sum of the squares of what the model returns, by the names of its parameters."""
    model.zero_grad()
    torch.manual_seed(0)
    out = model(**family.arguments())
    parts = [t for t in (out if isinstance(out, tuple) else out.values()) if isinstance(t, Tensor)]
    sum(part.square().sum() for part in parts).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_exact_attention(name: str) -> None:
    (family,) = [each for each in families() if each.name == name]
    try:
        model = family.build().requires_grad_()
    except NotInThisVersion:
        pytest.skip(f"this version of diffusers has no {name}")
    with patch_attention(model, config=TILES), torch.random.fork_rng(devices=[]):
        ours = _gradients(family, model)
        with replaced(exact):
            expected = _gradients(family, model)
    assert any(".to_q." in each or "to_query" in each for each in ours), list(ours)
    size = max(grad.abs().max() for grad in expected.values())
    for each, grad in expected.items():
        assert (ours[each] - grad).abs().max() <= 1e-5 * size, each
