"""Tiny random models of the families that Transformers serves through AttentionInterface.

The default initialisation gives nearly uniform attention, which hides every fault: weights are drawn anew so that
attention decides the output, and windows and chunks are smaller than the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils

VOCAB = 61
WINDOW = 7
NAME = "pascal_chunked"
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_SWA: dict[str, Any] = {
    "sliding_window": WINDOW,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_BART: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    pad_token_id=0,
    eos_token_id=None,
    forced_eos_token_id=None,
)
_T5: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
    pad_token_id=0,
    eos_token_id=None,
    decoder_start_token_id=0,
)

# family: (model class, config class, config)
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _SWA | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _SWA),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", _SWA | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen2_moe": (  # its attention does not say that it has a window
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _SWA | {"use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "num_key_value_heads": 4},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": None}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [],
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "attn_temperature_tuning": False,
        },
    ),
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", {}),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
}
SEQ2SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", _T5),
}
FAMILIES = DECODERS | ENCODERS | SEQ2SEQ


def is_older(version: str) -> bool:
    """Whether Transformers is older than this."""
    return tuple(int(n) for n in transformers.__version__.split(".")[:2]) < tuple(int(n) for n in version.split("."))


def missing(family: str) -> str | None:
    """Why the installed Transformers cannot serve a family."""
    model_class, config_class, _ = FAMILIES[family]
    if not hasattr(transformers, model_class) or not hasattr(transformers, config_class):
        return f"Transformers {transformers.__version__} has no {model_class}"
    if is_older("5.0") and family in ("bert", "modernbert", "t5", "umt5"):
        return f"{model_class} does not use AttentionInterface in Transformers {transformers.__version__}"
    return None


def build(family: str, **changes: Any) -> Any:
    """A model of this family in eval mode, the same for every call."""
    model_class, config_class, own = FAMILIES[family]
    sizes = own if family in SEQ2SEQ else {**_SIZES, **own}
    config = getattr(transformers, config_class)(**{**sizes, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
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
