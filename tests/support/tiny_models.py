"""Tiny random models of the families that Transformers serves through AttentionInterface.

Their weights are drawn so that attention decides the output; windows and chunks are smaller than the prompt.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

VOCAB = 61
WINDOW = 7
NAME = "pascal_chunked"
# Sizes by every name that some configuration has for them.
SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
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
    WINDOW: "sliding_window attention_chunk_size",
    128: "max_position_embeddings n_positions",
    1: "n_group topk_group first_k_dense_replace",
    0: "pad_token_id attention_dropout num_kv_shared_layers",
}
_SWA: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_MOE: dict[str, Any] = {"num_experts_per_tok": 1, "use_sliding_window": True, "moe_intermediate_size": 16}
_T5: dict[str, Any] = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
_LLAMA4: dict[str, Any] = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
_LLAMA4 |= {"moe_layers": [], "intermediate_size_mlp": 48, "attn_temperature_tuning": False}
_MODERNBERT = {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}

# family: (model class, what its configuration has besides the sizes)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", _SWA | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3ForCausalLM", _SWA),
    "gpt_oss": ("GptOssForCausalLM", _SWA | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _SWA | _MOE),  # its attention does not say that it has a window
    "gpt2": ("GPT2LMHeadModel", {}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None}),
    "llama4": ("Llama4ForCausalLM", _LLAMA4),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "modernbert": ("ModernBertModel", _MODERNBERT),
}
SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", {"forced_eos_token_id": None}),
    "t5": ("T5ForConditionalGeneration", _T5 | {"decoder_start_token_id": 0}),
    "umt5": ("UMT5ForConditionalGeneration", _T5 | {"decoder_start_token_id": 0}),
}
FAMILIES = DECODERS | ENCODERS | SEQ2SEQ


def is_older(version: str) -> bool:
    """Whether Transformers is older than this."""
    return tuple(int(n) for n in transformers.__version__.split(".")[:2]) < tuple(int(n) for n in version.split("."))


def config_of(config_class: Any, **own: Any) -> Any:
    """A configuration with the sizes of the table, by the names that the class has for them."""
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    sizes = {name: size for size, names in SIZES.items() for name in names.split() if name in known}
    return config_class(**{**sizes, **own})


def build(family: str, **changes: Any) -> Any:
    """A model of this family in eval mode, the same for every call; a skip where this Transformers cannot serve it."""
    name, own = FAMILIES[family]
    if not hasattr(transformers, name):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    if is_older("5.0") and family in ("bert", "modernbert", "t5", "umt5"):
        pytest.skip(f"{name} does not use AttentionInterface in Transformers {transformers.__version__}")
    return made(name, **{**own, **changes})


def made(name: str, **own: Any) -> Any:
    """A tiny model of this class in eval mode, with a configuration of its own besides the sizes."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(config_of(kind.config_class, **{"bos_token_id": 1, "eos_token_id": None, **own})).eval()
    draw_weights(model)
    return model


def draw_weights(model: Any) -> None:
    """Weights with which queries and keys agree or disagree strongly."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                strong = any(part in name for part in ("q_proj", "k_proj", "query", "key", "qkv", "Wqkv", "c_attn"))
                std = 0.5 if strong else 0.25
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            elif name.endswith("sinks"):
                weight.copy_(torch.randn(weight.shape, generator=generator))


def packed_mask(inner: Any, positions: Tensor, sequences: Tensor) -> Any:
    """The host's mask function of sequences packed into one row; before Transformers 5.23 it keeps the positions."""
    remapped = getattr(masking_utils, "remap_positions_for_packed_sequence", lambda function, _: function)
    same = masking_utils.packed_sequence_mask_function(sequences)
    return masking_utils.and_masks(remapped(inner, positions), same)


def prompt(batch: int = 2, length: int = 19, padding: int = 5, *, left: bool = True) -> dict[str, Tensor]:
    """Token ids and their mask; the first sequence is shorter by ``padding`` tokens."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        where = slice(0, padding) if left else slice(length - padding, length)
        mask[0, where], ids[0, where] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def use(model: Any, name: str) -> None:
    """Make the model use this implementation."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(name)
        return
    for module in model.modules():  # Transformers 4.53
        if hasattr(module, "config"):
            module.config._attn_implementation = name


def with_attention(model: Any, name: str, function: Callable[[], Any]) -> Any:
    """Return what a function returns while the model uses this implementation."""
    before = model.config._attn_implementation
    use(model, name)
    try:
        return function()
    finally:
        use(model, before)


def stock_and_ours(model: Any, function: Callable[[], Any], stock: str = "eager") -> list[Any]:
    """Return what a function returns while the model uses the host's own implementation, and ours."""
    return [with_attention(model, name, function) for name in (stock, NAME)]


def difference(ours: Tensor, stock: Tensor) -> float:
    """The largest difference of two results in units of the largest value."""
    assert ours.shape == stock.shape
    assert torch.isfinite(ours).all()
    return ((ours - stock).abs().max() / stock.abs().max()).item()


def tokens(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Greedy tokens, ten of them."""
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        return model.generate(**inputs, **options)


def logits(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Logits (hidden states of an encoder) with padded positions set to zero, since nobody reads them."""
    with torch.no_grad():
        outputs = model(**inputs, **options)
    found = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    mask = inputs.get("attention_mask")
    if mask is None or mask.dim() != 2 or mask.shape[1] != found.shape[1]:
        return found
    return found * mask[..., None]


def plain(
    tensors: list[Tensor],
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what the host's eager functions compute, ``[B, L, Hq, Dv]``; a row without keys gives zeros."""
    query, key, value = tensors
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
    weights = (scores - scores.amax(-1, keepdim=True).detach().clamp_min(-1e30)).exp()
    probs = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    return (probs[..., : key.shape[2]] @ value.repeat_interleave(groups, 1)).transpose(1, 2)
