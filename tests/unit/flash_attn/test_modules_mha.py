"""flash-attn's attention with projections against plain attention."""

from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, assert_same_gradients, plain, rand

from pascal_attn_core.flash_attn.modules.mha import MHA

LAYERS: list[dict[str, Any]] = [
    {},
    {"num_heads_kv": 2, "causal": True},
    {"use_flash_attn": True, "window_size": (4, 0), "causal": True},
    {"qkv_proj_bias": False, "softmax_scale": 0.3},
]


@pytest.mark.parametrize("options", LAYERS)
def test_a_layer_is_its_parts(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MHA(32, 4, dtype=F64, **options)
    x = rand(2, 6, 32).requires_grad_()
    heads_kv = options.get("num_heads_kv", 4)
    parts = layer.Wqkv(x).split([32, 8 * heads_kv, 8 * heads_kv], -1)
    rule = {name: options[name] for name in ("causal", "window_size", "softmax_scale") if name in options}
    expected, _ = plain(*(part.unflatten(-1, (-1, 8)) for part in parts), **rule)
    expected = layer.out_proj(expected.flatten(-2))
    out = layer(x)
    torch.testing.assert_close(out, expected)
    leaves = [x, *layer.parameters()]
    assert_same_gradients(out, leaves, expected, leaves, 1e-7)


@pytest.mark.parametrize("cross", [True, False])
def test_what_a_checkpoint_is_called(cross: bool) -> None:
    parts = ["Wq", "Wkv", "out_proj"] if cross else ["Wqkv", "out_proj"]
    assert list(MHA(32, 4, cross_attn=cross).state_dict()) == [
        f"{p}.{end}" for p in parts for end in ("weight", "bias")
    ]


def test_sequences_of_different_lengths_and_cross_attention() -> None:
    ends = torch.tensor([0, 4, 4, 6]).int()
    for heads_kv in (4, 2):
        layer = MHA(32, 4, heads_kv, causal=True, dtype=F64)
        x = rand(6, 32)
        out = layer(x, cu_seqlens=ends, max_seqlen=4)
        torch.testing.assert_close(out, torch.cat([layer(x[None, :4])[0], layer(x[None, 4:])[0]]))
    cross = MHA(32, 4, 2, cross_attn=True, dtype=F64)
    x, other = rand(2, 3, 32), rand(2, 5, 32)
    kv = cross.Wkv(other).unflatten(-1, (2, 2, 8))
    expected = plain(cross.Wq(x).unflatten(-1, (4, 8)), *kv.unbind(2))[0]
    torch.testing.assert_close(cross(x, x_kv=other), cross.out_proj(expected.flatten(-2)))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(1, 2, 32)
    for heads in ((5, None), (4, 3)):
        with pytest.raises(ValueError, match="num_heads of num_heads_kv, got 32"):
            MHA(32, *heads)
    with pytest.raises(ValueError, match="x_kv must be None without cross_attn"):
        MHA(32, 4)(x, x)
    for name in ("inference_params", "mixer_subset", "key_padding_mask"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            MHA(32, 4)(x, **{name: object()})
    with pytest.raises(NotImplementedError, match="rotary_emb_dim is not supported"):
        MHA(32, 4, rotary_emb_dim=8)
