"""The names and layouts of pascal-attn 0.1.0; attention layers with projections, by the names of FlashTile."""

from typing import Any

import pytest
import torch
from attn_support.fresh import run

from pascal_attn_core import TiledAttention, compat, layers, record, tiled_attention
from pascal_attn_core.reference import reference_sdpa


@pytest.mark.parametrize("tile_size", [64, 16, None, 1000])
def test_tiled_attention_returns_tokens_before_heads(tile_size: int | None) -> None:
    query, key, value = torch.randn(2, 6, 50, 16), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 16)
    with record() as report:
        out = tiled_attention(query, key, value, tile_size=tile_size)
    assert report.routes() == {"tiled": 1}
    expected = reference_sdpa(query, key, value, enable_gqa=True)[0].transpose(1, 2)
    assert out.shape == (2, 50, 6, 16)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tile_size", ["auto", 16])
def test_the_module_answers_in_the_form_of_its_query(packed: bool, tile_size: int | str) -> None:
    query, key, value = torch.randn(2, 20, 4, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    inputs = [t.flatten(2) if packed else t for t in (query, key, value)]
    out = TiledAttention(4, 2, tile_size=tile_size)(*inputs)
    expected = reference_sdpa(*(t.transpose(1, 2) for t in (query, key, value)), enable_gqa=True)[0].transpose(1, 2)
    assert out.shape == inputs[0].shape
    torch.testing.assert_close(out.view(2, 20, 4, 8), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TiledAttention(6, 4), r"multiple of \(divisible by\) n_kv_heads, got 6 and 4"),
        (lambda: TiledAttention(6, 0), "got 6 and 0"),
        (lambda: TiledAttention(6, tile_size="big"), "'auto', got 'big'"),
        (lambda: TiledAttention(4, head_dim=16)(*[torch.randn(1, 5, 4, 8)] * 3), r"4 \* 16"),
        (lambda: TiledAttention(4)(*[torch.randn(1, 5, 30)] * 3), r"got \(1, 5, 30\)"),
        (lambda: TiledAttention(4)(*[torch.randn(5, 32)] * 3), r"got \(5, 32\)"),
        (lambda: tiled_attention(torch.randn(1, 6, 5, 8), *[torch.randn(1, 4, 5, 8)] * 2), "divisible"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_a_tile_that_cannot_serve_the_gradients_is_refused_before_anything_runs() -> None:
    leaf = torch.randn(1, 2, 1024, 64, requires_grad=True)
    words = r"budget_mib must be at least 8\.\d+ for the gradients in tiles of 1000 x 1000"
    with pytest.raises(ValueError, match=words):
        tiled_attention(leaf, leaf, leaf, tile_size=1000)
    assert tiled_attention(leaf.detach(), leaf.detach(), leaf.detach(), tile_size=1000).isfinite().all()
    tiled_attention(leaf, leaf, leaf, tile_size=500).sum().backward()
    assert leaf.grad is not None


def test_programs_for_pascal_attn_import_ours() -> None:
    run(
        """
        import importlib.metadata, importlib.util, sys
        import pascal_attn_core as core
        from pascal_attn_core import compat
        real = importlib.util.find_spec("pascal_attn") is not None  # the tests install it for comparison
        patch = compat.install_as_pascal_attn(replace=real)
        second = compat.install_as_pascal_attn()
        import pascal_attn
        from pascal_attn import TiledAttention, recommended_tile_size, tiled_attention
        from pascal_attn.functional import tiled_attention as one
        from pascal_attn.nn import TiledAttention as two
        from pascal_attn._gpu import device_l2_mb
        assert tiled_attention is one is core.tiled_attention and TiledAttention is two is core.TiledAttention
        assert pascal_attn.__version__.startswith("0.1.0+pascal.")
        assert importlib.metadata.version("pascal-attn") == pascal_attn.__version__
        patch.remove()
        assert sys.modules["pascal_attn"] is pascal_attn
        second.remove()
        assert not [name for name in sys.modules if name.partition(".")[0] == "pascal_attn"]
        if real:
            import pascal_attn
            assert pascal_attn.tiled_attention is not core.tiled_attention
            try:
                compat.install_as_pascal_attn()
            except RuntimeError as error:
                assert "pascal_attn must not be installed" in str(error) and "replace=True" in str(error)
            else:
                raise SystemExit("the real package must not be hidden")
        else:
            assert importlib.util.find_spec("pascal_attn") is None
        """
    )


EMBED, HEADS, TOKENS = 32, 4, 37
KINDS: dict[str, dict[str, Any]] = {
    "naive": {},
    "flash_v1": {"causal": True},
    "flash_v2": {"block_size": 16},
    "sliding_window": {"window_size": 9},
    "sliding-window": {"window_size": 8, "causal": False},  # half before and half behind
    "gqa": {"num_kv_heads": 2, "causal": True},
    "grouped-query": {"num_kv_heads": 4},
    "mqa": {},
    "Multi Query": {"causal": True},
    "masked": {"causal": True},
    "triton": {},
    "triton_flash": {"causal": True},
}


def by_definition(layer: layers.SelfAttention, x: torch.Tensor, forbidden: torch.Tensor | None = None) -> torch.Tensor:
    """The layer in float64, with its rule as a mask."""
    state = {name: value.double() for name, value in layer.state_dict().items()}

    def linear(name: str, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(t, state[f"{name}.weight"], state[f"{name}.bias"])

    if "qkv_proj.weight" in state:
        q, k, v = linear("qkv_proj", x.double()).chunk(3, dim=-1)
    else:
        q, k, v = (linear(f"{name}_proj", x.double()) for name in "qkv")
    q, k, v = (t.unflatten(-1, (-1, EMBED // HEADS)).transpose(1, 2) for t in (q, k, v))
    distance = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if layer.causal:
        allowed &= distance <= 0
    if layer.window_size is not None:
        allowed &= (distance > -layer.window_size) if layer.causal else (distance.abs() <= layer.window_size // 2)
    if forbidden is not None:
        allowed = allowed & ~forbidden
    out, _ = reference_sdpa(q, k, v, allowed, enable_gqa=True)
    return linear("out_proj", out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_its_name_says(kind: str) -> None:
    layer, x = layers.get_attention(kind, EMBED, HEADS, **KINDS[kind]), torch.randn(2, TOKENS, EMBED)
    out, weights = layer(x)
    torch.testing.assert_close(out.double(), by_definition(layer, x), atol=1e-5, rtol=1e-4)
    assert (weights is not None) == (kind == "naive")


@pytest.mark.parametrize("kind", ["flash_v2", "gqa", "masked", "naive"])
def test_true_in_a_mask_means_that_a_key_does_not_take_part(kind: str) -> None:
    layer, x = layers.get_attention(kind, EMBED, HEADS, causal=True), torch.randn(2, TOKENS, EMBED)
    padding = layers.create_padding_mask(torch.tensor([TOKENS, 11]), TOKENS)
    assert padding.shape == (2, 1, 1, TOKENS)
    assert padding[1, 0, 0].tolist() == [False] * 11 + [True] * (TOKENS - 11)
    out, _ = layer(x, padding)
    torch.testing.assert_close(out.double(), by_definition(layer, x, padding), atol=1e-5, rtol=1e-4)
    three = torch.rand(2, TOKENS, TOKENS) < 0.3
    out, _ = layer(x, three)
    torch.testing.assert_close(out.double(), by_definition(layer, x, three[:, None]), atol=1e-5, rtol=1e-4)


def test_the_naive_layer_returns_the_probabilities_and_its_gradients_flow() -> None:
    layer, x = layers.NaiveAttention(EMBED, HEADS, causal=True), torch.randn(1, TOKENS, EMBED, requires_grad=True)
    out, weights = layer(x)
    assert weights.shape == (1, HEADS, TOKENS, TOKENS)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, HEADS, TOKENS))
    assert not weights.triu(1).any()
    twin = layers.FlashAttentionV2(EMBED, HEADS, causal=True)
    twin.load_state_dict(layer.state_dict())
    seed = torch.randn_like(out)
    (ours,) = torch.autograd.grad(twin(x)[0], x, seed)
    torch.testing.assert_close(torch.autograd.grad(out, x, seed)[0], ours, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: layers.get_attention("flash_v3", 32, 4), "attention_type must be one of .*got 'flash_v3'"),
        (lambda: layers.FlashAttentionV2(30, 4), r"embed_dim must be a multiple of num_heads \(4\), got 30"),
        (lambda: layers.FlashAttentionV2(32, 0), r"embed_dim must be a multiple of num_heads \(0\), got 32"),
        (lambda: layers.GroupedQueryAttention(32, 4, 3), r"num_heads must be a multiple of num_kv_heads \(3\), got 4"),
        (lambda: layers.get_attention("sliding_window", 32, 4, window_size=0), "window_size must be at least 1, got 0"),
        (lambda: layers.FlashAttentionV2(32, 4)(torch.randn(5, 32)), r"x must be \[B, L, 32\], got \[5, 32\]"),
        (lambda: layers.FlashAttentionV2(32, 4)(torch.randn(1, 5, 32), torch.ones(5)), r"attn_mask must be \[L, L\]"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("l2_mib", "tile"),
    [(2.75, 64), (3, 64), (4, 64), (5.5, 128), (6, 128), (40, 256), (72, 256)],
    ids=["GTX 1080 Ti", "P40", "T4", "RTX 2080 Ti", "V100, RTX 3090", "A100", "RTX 4090"],
)
def test_the_tile_sizes_that_pascal_attn_states(l2_mib: float, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_l2_bytes", lambda device: int(l2_mib * 2**20))
    assert compat.recommended_tile_size() == tile
