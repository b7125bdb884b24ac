"""Registering: names, undo, the tile, and which models do not come to us; ``"flex_attention"`` on ours."""

import pytest
import torch
from attn_support import tiny_models as tiny
from attn_support.fresh import run
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pascal_attn_core import patch_flex_attention, record
from pascal_attn_core.transformers import make_hf_attention_fn, register_with_transformers


def behind(name: str) -> list[object]:
    return [interface._global_mapping.get(name) for interface in (AttentionInterface, AttentionMaskInterface)]


def test_attention_and_mask_function_are_registered_and_removed_together() -> None:
    patch = register_with_transformers()
    assert None not in behind("pascal_chunked")
    assert patch.active
    assert patch.sites >= 2, "the attention and its masks, and what continuous batching needs"
    patch.remove()
    patch.remove()
    assert behind("pascal_chunked") == [None, None]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_registrations_of_one_name_can_be_removed_in_any_order(order: tuple[int, ...]) -> None:
    patches = [register_with_transformers(tile_size=size) for size in (None, 32, 64)]
    meant = behind("pascal_chunked")
    for n, index in enumerate(order):
        patches[index].remove()
        if 2 not in order[: n + 1]:
            assert behind("pascal_chunked") == meant, "the latest registration must stay in force"
    assert behind("pascal_chunked") == [None, None]


@pytest.mark.parametrize("name", ["my_sdpa", "flash2", "flex_attention_x", "paged|pascal", "me/pascal", "eager", ""])
def test_names_that_mean_something_to_the_host_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name must not"):
        register_with_transformers(name=name)


def test_a_tile_is_forced_on_the_tiled_route() -> None:
    model = tiny.build("llama")
    with register_with_transformers(tile_size=8), record() as report:
        tiny.with_attention(model, "pascal_chunked", lambda: tiny.logits(model, tiny.prompt()))
    assert report.routes() == {"tiled": 2}


def test_importing_loads_no_transformers_and_so_registers_nothing() -> None:
    run("""
        import sys
        from pascal_attn_core import compat, transformers
        with compat.install_as_pascal_attn(replace=True):
            import pascal_attn.hf
        assert pascal_attn.hf.register_with_transformers is transformers.register_with_transformers
        assert "transformers" not in sys.modules
    """)


flex = pytest.importorskip("torch.nn.attention.flex_attention")


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # gemma2 has a score_mod, and windows
def test_logits_and_gradients_are_those_of_eager_attention(name: str) -> None:
    model, given = tiny.build(name, max_position_embeddings=160), tiny.prompt(length=150, padding=50, left=False)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logits = model(**given).logits[given["attention_mask"].bool()]
        logits.square().mean().backward()
        return logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad

    expected = tiny.with_attention(model, "eager", run)
    with patch_flex_attention(), record() as report:
        actual = tiny.with_attention(model, "flex_attention", run)
    assert sum(stats.count for stats in report.calls.values()) == 2
    for ours, theirs in zip(actual, expected):
        assert tiny.difference(ours, theirs) < 2e-5


def test_our_attention_function_takes_a_block_mask() -> None:
    query, key, value = torch.randn(1, 4, 90, 16), torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16)
    documents = torch.arange(90) // 30
    blocks = flex.create_block_mask(lambda b, h, i, j: documents[i] == documents[j], 1, None, 90, 90, device="cpu")
    attend, mask = make_hf_attention_fn(), documents[:, None] == documents
    ours, expected = (attend(torch.nn.Module(), query, key, value, m)[0] for m in (blocks, mask[None, None]))
    torch.testing.assert_close(ours, expected)
