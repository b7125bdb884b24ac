"""Models of diffusers that are written for FlexAttention: outputs, gradients, and no score matrix."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from attn_support.randomness import some
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pascal_attn_core import AttentionConfig, patch_flex_attention
from pascal_attn_core.diffusers import patch_attention
from tools.families import NotInThisVersion, families
from tools.families.family import Family
from tools.families.proof import exact, outputs, replaced

TILES = AttentionConfig(route="tiled", q_block=9, kv_block=5)
WIDE_TILES = AttentionConfig(route="tiled", q_block=45, kv_block=35)  # for 256 tokens, which have 1,500 of the others


def _with_flex_processors(model: Any) -> None:
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor

    for block in model.transformer_blocks:
        block.attn.set_processor(QwenImage21FlexAttnProcessor())


def _of_neighbouring_blocks(inputs: dict[str, Any]) -> dict[str, Any]:
    """A video of 2 x 16 x 8 patches, 4 blocks of 64, of which each sees itself and a neighbour, and what NABLA adds."""
    seen = torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool).roll(1, 1)
    return inputs | {
        "hidden_states": torch.randn(2, 2, 32, 16, 4, generator=torch.Generator().manual_seed(0)),
        "visual_rope_pos": [torch.arange(2), torch.arange(16), torch.arange(8)],
        "sparse_params": {"sta_mask": seen[None, None], "to_fractal": True, "P": 0.3},
    }


def _of_a_generation(inputs: dict[str, Any]) -> dict[str, Any]:
    """Three frames of 2 x 2 patches; keys and values of two reference frames, as if an earlier pass had kept them."""
    drawn = torch.Generator().manual_seed(0)
    inputs["kv_cache"].get(0).store(*torch.randn(2, 1, 8, 2, 16, generator=drawn))
    return inputs | {
        "hidden_states": [torch.randn(16, 3, 4, 4, generator=drawn)],
        "condition_latents": [torch.randn(20, 3, 4, 4, generator=drawn)],
        "reference_grid_sizes": inputs["offset_grid_sizes"],
        **{"kv_cache_mode": "cached", "seq_len": 12, "origin_len": 4, "origin_area": [32, 32]},
    }


# family -> what is changed of the model, and of its arguments
CHANGES: dict[str, tuple[Any, Any]] = {
    "AnyFlowFARTransformer3DModel": (None, None),
    "Kandinsky6SRTransformer3DModel": (None, None),
    "WanAnimate2Transformer3DModel": (None, _of_a_generation),
    "LTX2VideoDiffusionDecoderModel": (None, None),
    "Kandinsky5Transformer3DModel": (lambda model: model.set_attention_backend("flex"), _of_neighbouring_blocks),
    "QwenImage21Transformer2DModel": (_with_flex_processors, None),
}


class _Matrices(TorchDispatchMode):
    """Notes the last two sizes of every float tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        self.sizes.update(tuple(t.shape[-2:]) for t in made if t.dim() > 1)
        return result


def _gradients(family: Family, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the sum of the squares of what the model returns, by the names of its parameters."""
    model.zero_grad()
    torch.manual_seed(0)
    out = model(**family.arguments())
    parts = tree_leaves(out if isinstance(out, tuple) else tuple(out.values()))
    sum(part.square().sum() for part in parts if isinstance(part, Tensor)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", some(CHANGES, 3))
def test_outputs_and_gradients_without_a_score_matrix(name: str) -> None:
    (family,) = [each for each in families() if each.name == name]
    prepare, change = CHANGES[name]
    if prepare:
        family = dataclasses.replace(family, prepare=prepare)
    if change:
        given = family.inputs
        family = dataclasses.replace(family, inputs=lambda draw: change(given(draw)))
    try:
        model = family.build().requires_grad_()
    except NotInThisVersion:
        pytest.skip(f"this version of diffusers has no {name}")
    tiles = WIDE_TILES if change is _of_neighbouring_blocks else TILES
    with patch_attention(model, config=tiles), torch.random.fork_rng(devices=[]):
        with patch_flex_attention(), _Matrices() as made:  # for the masks that a model makes itself
            out, ours = outputs(family, model), _gradients(family, model)
        with replaced(exact), _Matrices() as dense:
            exact_out, expected = outputs(family, model), _gradients(family, model)
    assert (out - exact_out).abs().max() <= 1e-5 * exact_out.abs().max()
    weights = {sizes for p in model.parameters() for sizes in (tuple(p.shape[-2:]), tuple(p.shape[-2:][::-1]))}
    assert max(dense.sizes - weights, key=math.prod) not in made.sizes  # the score matrix
    assert any(".to_q." in each or "to_query" in each for each in ours), list(ours)
    size = max(grad.abs().max() for grad in expected.values())
    for each, grad in expected.items():
        assert (ours[each] - grad).abs().max() <= 1e-5 * size, each
