"""Decoding: ``flash_attn.utils.generation``, without CUDA graphs."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..options import FlashArgumentError
from ..signatures import called_as

DecoderOnlyOutput = namedtuple("DecoderOnlyOutput", ["sequences", "scores"])


@dataclass
class InferenceParams:
    """The state of a generation that caches keys and values.

    Attributes:
        max_seqlen, max_batch_size: size of the caches.
        seqlen_offset: tokens that are cached.
        batch_size_offset: first row of the caches that is used.
        key_value_memory_dict: layer -> cache.
        lengths_per_sample: int32 ``[B]``, cached tokens of each sequence where they differ.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start again with caches that are kept."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


def allocate_inference_cache(
    max_batch_size: int, max_seqlen: int, nheads: int, headdim: int, layers: Any, device: Any, dtype: Any = torch.half
) -> dict[Any, Tensor]:
    """Layer -> empty cache ``[max_batch_size, max_seqlen, 2, nheads, headdim]``; layers: their number or names."""
    names = range(layers) if isinstance(layers, int) else layers
    shape = max_batch_size, max_seqlen, 2, nheads, headdim
    return {name: torch.empty(shape, device=device, dtype=dtype) for name in names}


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """``[..., V]``, in place: -inf below the k-th largest."""
    smallest = logits.topk(top_k, dim=-1).values[..., -1:]
    logits.masked_fill_(logits < smallest, -torch.inf)


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """``[B, V]``, in place: -inf for the least likely, of which the probabilities sum up to at most 1 - top_p."""
    if not 0.0 < top_p < 1.0:
        return
    values, order = logits.sort(dim=-1)
    unlikely = values.softmax(-1).cumsum(-1) <= 1 - top_p
    logits.masked_fill_(torch.zeros_like(unlikely).scatter(-1, order, unlikely), -torch.inf)


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """The next tokens ``[B]`` by ``logits [B, V]``; top_k = 1: the likeliest, 0: any. logits are not changed."""
    if top_k == 1:
        return logits.argmax(-1)
    if not 0.0 <= top_p <= 1.0:
        raise FlashArgumentError(f"top_p must be from 0 to 1, got {top_p}")
    tokens = None
    chosen = logits
    if top_k > 0:
        chosen, tokens = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    chosen = chosen / temperature
    modify_logits_for_top_p_filtering(chosen, top_p)
    picked = torch.multinomial(chosen.softmax(-1), 1)
    return (picked if tokens is None else tokens.gather(-1, picked)).squeeze(-1)


@called_as(
    "input_ids model max_length top_k=1 top_p=0.0 temperature=1.0 eos_token_id=None teacher_outputs=None "
    "vocab_size=None tensor_parallel=1 cg=False enable_timing=False",
    ignored="tensor_parallel enable_timing",
    refused="cg",
)
@torch.inference_mode()
def decode(
    input_ids: Tensor, model: Any, max_length: int, eos_token_id: Any, teacher_outputs: Any, vocab_size: Any, **how: Any
) -> Any:
    """Greedy or sampled decoding of a batch of prompts of one length.

    Args:
        input_ids: ``[B, L]``.
        model: called as model(input_ids, position_ids=, inference_params=, num_last_tokens=1).logits.
        max_length: tokens in all.
        top_k, top_p, temperature: see :func:`sample`.
        eos_token_id: stop where all sequences have it.
        teacher_outputs: ``[B, T]``: use its tokens where it has any.
        vocab_size: only that many of the logits.
        tensor_parallel, enable_timing: ignored, for compatibility.
        cg: must be False: there are no CUDA graphs here, the tokens are the same without.
    Returns:
        (sequences ``[B, tokens]``, scores: a tuple of ``[B, V]``).
    """
    batch = input_ids.shape[0]
    params = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
    sequences, scores = [input_ids], []
    while True:
        latest, cached = sequences[-1], params.seqlen_offset
        positions = torch.full((batch, 1), cached, device=input_ids.device) if cached else None
        logits = model(latest, position_ids=positions, inference_params=params, num_last_tokens=1).logits.squeeze(1)
        logits = logits[..., :vocab_size]
        params.seqlen_offset += latest.shape[1]
        if teacher_outputs is not None and params.seqlen_offset < teacher_outputs.shape[1]:
            tokens = teacher_outputs[:, params.seqlen_offset]
        else:
            tokens = sample(logits, **how)
        scores.append(logits)
        sequences.append(tokens[:, None])
        ended = eos_token_id is not None and bool((tokens == eos_token_id).all())
        if ended or params.seqlen_offset >= max_length - 1:
            break
    return DecoderOnlyOutput(sequences=torch.cat(sequences, dim=1), scores=tuple(scores))


class GenerationMixin:
    """``generate`` for a model whose forward pass takes ``inference_params``."""

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> Any:
        """The caches; a model must define this."""
        raise NotImplementedError(f"{type(self).__name__} must define allocate_inference_cache")

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Sequences ``[B, tokens]``, with ``return_dict_in_generate`` what :func:`decode` returns."""
        output = decode(input_ids, self, max_length, top_k=top_k, top_p=top_p, temperature=temperature, **kwargs)
        if not output_scores:
            output = output._replace(scores=None)
        return output if return_dict_in_generate else output.sequences
