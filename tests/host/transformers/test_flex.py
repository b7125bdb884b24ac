"""Models of Transformers with ``attn_implementation="flex_attention"``, whose attention is ours."""

import pytest
import torch
from attn_support import tiny_models as tiny

from pascal_attn_core import patch_flex_attention, record
from pascal_attn_core.transformers import make_hf_attention_fn

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
