"""Every model class of Transformers that can be built tiny: the same answer under our name as under "eager".

Some classes use AttentionInterface, some compute attention by themselves, some do both, and some work on the mask that
they asked for: whatever they do, loading them under our name must not change what they compute.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from attn_support.randomness import some
from torch import Tensor

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

KINDS = {
    "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "both": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
AT_LEAST = {"decoder": 90, "encoder": 30, "both": 10}
# Sizes by every name that some configuration has for them.
SIZES: dict[int, str] = {
    61: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size d_model n_embd word_embed_proj_dim embedding_size dim moe_intermediate_size"
    " shared_expert_intermediate_size",
    48: "intermediate_size d_ff ffn_dim hidden_dim encoder_ffn_dim decoder_ffn_dim",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers"
    " num_key_value_heads num_global_key_value_heads num_experts_per_tok linear_num_key_heads",
    4: "num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads"
    " decoder_attention_heads num_local_experts num_experts n_routed_experts linear_num_value_heads rotary_dim",
    8: "head_dim global_head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim hidden_size_per_layer_input"
    " linear_key_head_dim linear_value_head_dim",
    16: "q_lora_rank kv_lora_rank",
    7: "sliding_window attention_chunk_size",
    128: "max_position_embeddings n_positions",
    1: "n_group topk_group first_k_dense_replace",
    0: "pad_token_id attention_dropout num_kv_shared_layers",
}
PARAMETERS = 20_000_000  # what ignores our sizes is left out


def config_of(model_type: str) -> Any:
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    known = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(config_class.attribute_map)
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    return config_class(**{name: size for name, size in sizes.items() if name in known})


def build(model_class: Any, model_type: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model = model_class._from_config(config_of(model_type), attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return model


def logits(model: Any, kind: str) -> Tensor:
    ids = torch.randint(3, 60, (2, 19), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if kind == "decoder" else slice(-5, None)] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "both":
        inputs["decoder_input_ids"] = ids[:, :7]
    with torch.no_grad():
        outputs = model(**inputs)
    found = outputs[0] if getattr(outputs, "logits", None) is None else outputs.logits
    return found if kind == "both" else found * mask[..., None]


def stock(name: str, model_type: str, kind: str) -> Tensor | None:
    """Return what a class computes with "eager"; None if it cannot be built this small or takes other inputs."""
    model_class = getattr(transformers, name, None)
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in model_class(config_of(model_type)).parameters())
        return None if size > PARAMETERS else logits(build(model_class, model_type, "eager"), kind)
    except Exception:  # of any kind: these are other people's constructors
        return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_no_model_computes_anything_else_under_our_name(
    registered: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    same, wrong = [], []
    for model_type, names in some(KINDS[kind].items(), 6):
        name = names if isinstance(names, str) else names[0]
        expected = stock(name, model_type, kind) if model_type in CONFIG_MAPPING_NAMES else None
        if expected is None:
            continue
        try:
            found = logits(build(getattr(transformers, name), model_type, registered), kind)
        except (NotImplementedError, KeyError):  # refused by us or by the host (Falcon), not computed wrongly
            continue
        difference = ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9)).item()
        same.append(name) if difference < 1e-3 else wrong.append(f"{name}: {difference:.1e}")
    assert not wrong
    assert len(same) >= len(some(range(AT_LEAST[kind]), 6)), "too few models could be built to say anything"
