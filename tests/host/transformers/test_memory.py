"""A long prefill takes O(N) memory: no scores and no mask of L*S elements are ever stored."""

from typing import Any

import pytest
import torch
from attn_support import tiny_models as tiny

from pascal_attn_core.observe.memory import PeakMemory

TOKENS = 4096
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": TOKENS, "num_key_value_heads": 1}
ONE_LAYER |= {"num_attention_heads": 2, "hidden_size": 32, "head_dim": 16}


def peak(model: Any, inputs: dict[str, Any]) -> PeakMemory:
    with torch.no_grad(), PeakMemory("cpu") as memory:
        model.model(**inputs, use_cache=False)
    return memory


@pytest.mark.parametrize("family", ["llama", "mistral", "llama4", "packed"])
def test_nothing_of_the_size_of_the_mask_exists(registered: str, family: str) -> None:
    own = {"mistral": {"sliding_window": 512}, "llama4": {"attention_chunk_size": 512}}.get(family, {})
    if family == "llama4":
        own |= {"layer_types": ["chunked_attention"], "no_rope_layers": [1]}
    model = tiny.build("llama" if family == "packed" else family, **ONE_LAYER, **own)
    tiny.use(model, registered)
    peaks = {}
    for tokens in (TOKENS // 2, TOKENS):
        inputs = tiny.prompt(batch=1, length=tokens, padding=100 if family == "llama" else 0)
        if family == "packed":
            inputs = {"input_ids": inputs["input_ids"], "position_ids": torch.arange(tokens)[None] % 1000}
        memory = peak(model, inputs)
        peaks[tokens] = memory.peak_bytes
    assert memory.largest_tensor_bytes < TOKENS * TOKENS / 2, "a mask takes L*S bytes, scores take more"
    assert peaks[TOKENS] < 2.2 * peaks[TOKENS // 2]
