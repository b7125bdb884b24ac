"""Models of Transformers with ``attn_implementation="flex_attention"``, whose attention is ours."""

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from pascal_attn_core import patch_flex_attention, record
from pascal_attn_core.transformers import make_hf_attention_fn

flex = pytest.importorskip("torch.nn.attention.flex_attention")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZES, sliding_window=32)),  # a score_mod, and windows
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager_attention(name: str) -> None:
    cls, config = MODELS[name]
    torch.manual_seed(0)
    model = cls(config)
    model.set_attn_implementation("eager")
    given = {"input_ids": torch.randint(0, 64, (2, 160)), "attention_mask": torch.ones(2, 160, dtype=torch.int64)}
    given["attention_mask"][1, 100:] = 0

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logits = model(**given).logits[given["attention_mask"].bool()]
        logits.square().mean().backward()
        return logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad

    expected = run()
    with patch_flex_attention(), record() as report:
        model.set_attn_implementation("flex_attention")
        actual = run()
    assert sum(stats.count for stats in report.calls.values()) == 2
    for ours, theirs in zip(actual, expected):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_our_attention_function_takes_a_block_mask() -> None:
    query, key, value = torch.randn(1, 4, 90, 16), torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16)
    documents = torch.arange(90) // 30
    blocks = flex.create_block_mask(lambda b, h, i, j: documents[i] == documents[j], 1, None, 90, 90, device="cpu")
    attend, mask = make_hf_attention_fn(), documents[:, None] == documents
    ours, expected = (attend(torch.nn.Module(), query, key, value, m)[0] for m in (blocks, mask[None, None]))
    torch.testing.assert_close(ours, expected)
