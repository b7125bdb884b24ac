"""Audio transformers, and what else attends: priors, text conditioners, decoders of codes, proteins."""

from __future__ import annotations

from typing import Any

import torch

from .family import Draw, Family


def _stable_audio(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 4, 11),
        "timestep": draw.uniform(2),
        "encoder_hidden_states": draw(2, 7, 12),
        "global_hidden_states": draw(2, 1, 10),
        "rotary_embedding": tuple(part.float() for part in draw.rotary(12, 4)),
        "attention_mask": draw.padding(2, 11),
        "encoder_attention_mask": draw.padding(2, 7),
    }


def _stable_audio3(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 8, 16),
        "timestep": draw.uniform(2),
        "encoder_hidden_states": draw(2, 7, 16),
        "global_hidden_states": draw(2, 12),
        "encoder_attention_mask": draw.padding(2, 7),
    }


def _ace_step(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 24, 8),
        "timestep": draw.uniform(2),
        "timestep_r": draw.uniform(2),
        "encoder_hidden_states": draw(2, 9, 32),
        "context_latents": draw(2, 24, 16),
    }


def _longcat(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(2, 16, 8),
        "encoder_hidden_states": draw(2, 10, 32),
        "encoder_attention_mask": draw.padding(2, 10),
        "attention_mask": draw.padding(2, 16),
        "timestep": draw.uniform(2),
    }


def _t5_film(draw: Draw) -> dict[str, Any]:
    return {
        "encodings_and_masks": [(draw(2, 7, 16), draw.padding(2, 7)), (draw(2, 5, 16), draw.padding(2, 5))],
        "decoder_input_tokens": draw(2, 8, 6),
        "decoder_noise_time": draw.uniform(2),
    }


def _anima(draw: Draw) -> dict[str, Any]:
    return {
        "source_hidden_states": draw(2, 9, 16),
        "target_input_ids": draw.ints(40, 2, 7),
        "target_attention_mask": draw.padding(2, 7),
        "source_attention_mask": draw.padding(2, 9),
    }


def _protein(draw: Draw) -> dict[str, Any]:
    return {
        "bb_ca": draw(2, 10, 3),
        "local_latents": draw(2, 10, 4),
        "bb_ca_time": draw.uniform(2),
        "local_latents_time": draw.uniform(2),
        "padding_mask": draw.padding(2, 10),
        "token_type": draw.ints(7, 2, 10),
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(2, 10, dtype=torch.bool),
            "supports_local_latent": torch.ones(2, 10, dtype=torch.bool),
        },
    }


_STABLE_AUDIO3 = {
    "io_channels": 8,
    "patch_size": 1,
    "embed_dim": 32,
    "depth": 1,
    "num_heads": 4,
    "cond_token_dim": 16,
    "global_cond_dim": 12,
    "local_add_cond_dim": 5,
    "timestep_features_dim": 16,
    "ff_mult": 2,
    "num_memory_tokens": 3,
}

FAMILIES = [
    Family(
        "StableAudioDiTModel",
        {
            "sample_size": 11,
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "time_proj_dim": 8,
            "global_states_input_dim": 10,
            "cross_attention_input_dim": 12,
        },
        _stable_audio,
    ),
    Family("StableAudio3DiTModel", {**_STABLE_AUDIO3, "use_differential_attention": False}, _stable_audio3),
    Family(
        "StableAudio3DiTModel",
        {**_STABLE_AUDIO3, "use_differential_attention": True},
        _stable_audio3,
        "differential attention",
    ),
    Family(
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "in_channels": 24,
            "audio_acoustic_hidden_dim": 8,
            "patch_size": 2,
            "sliding_window": 4,
        },
        _ace_step,
    ),
    Family(
        "LongCatAudioDiTTransformer",
        {"dit_dim": 32, "dit_depth": 1, "dit_heads": 2, "dit_text_dim": 32, "latent_dim": 8, "text_conv": False},
        _longcat,
    ),
    Family(
        "MiniMaxMusic3Transformer1DModel",
        {
            "in_channels": 8,
            "condition_dim": 16,
            "num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "ff_inner_dim": 32,
            "rotary_dim": 4,
            "fourier_embedding_dim": 8,
        },
        lambda draw: {
            "hidden_states": draw(2, 8, 24),
            "encoder_hidden_states": draw(2, 24, 16),
            "timestep": draw.uniform(2),
        },
    ),
    Family(
        "MiniMaxMusic3RVQDepthDecoder",
        {
            "hidden_size": 32,
            "num_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "audio_vocab_size": 16,
            "num_codebooks": 4,
            "max_position_embeddings": 16,
        },
        lambda draw: {"inputs_embeds": draw(2, 9, 32)},
    ),
    Family(
        "T5FilmDecoder",
        {
            "input_dims": 6,
            "targets_length": 8,
            "d_model": 16,
            "num_layers": 1,
            "num_heads": 2,
            "d_kv": 8,
            "d_ff": 16,
        },
        _t5_film,
    ),
    Family(
        "PriorTransformer",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "embedding_dim": 16,
            "num_embeddings": 7,
            "additional_embeddings": 4,
        },
        lambda draw: {
            "hidden_states": draw(2, 16),
            "timestep": 2,
            "proj_embedding": draw(2, 16),
            "encoder_hidden_states": draw(2, 7, 16),
            "attention_mask": draw.padding(2, 7),
        },
    ),
    Family(
        "AnimaTextConditioner",
        {
            "source_dim": 16,
            "target_dim": 16,
            "model_dim": 16,
            "num_layers": 1,
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "target_vocab_size": 40,
            "min_sequence_length": 8,
        },
        _anima,
    ),
    Family(
        "RFD4ProteinaTransformer",
        {
            "nlayers": 1,
            "token_dim": 16,
            "nheads": 2,
            "dim_cond": 16,
            "pair_repr_dim": 16,
            "latent_dim": 4,
            "token_type_emb_dim": 8,
            "cath_emb_dim": 4,
            "t_emb_dim": 8,
            "seq_sep_dim": 4,
            "tri_mult_c": 8,
            "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
            "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"),
            "feats_pair_repr": ("xt_bb_ca_pair_dists",),
        },
        _protein,
    ),
]
