"""The names and layouts of pascal-attn 0.1.0."""

import pytest
import torch
from attn_support.fresh import run

from pascal_attn_core import TiledAttention, record, tiled_attention
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
