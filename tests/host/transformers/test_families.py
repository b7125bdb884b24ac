"""Whole models give the same logits and tokens through our attention as through the host's own, and a long
prefill takes O(N) memory."""

from typing import Any

import pytest
import torch
import transformers
from attn_support import tiny_models as tiny
from attn_support.tiny_models import DECODERS, ENCODERS, SEQ2SEQ, difference
from torch import Tensor

import pascal_attn_core.transformers as host
from pascal_attn_core.observe.memory import PeakMemory

SAME = 1e-4  # rounding, through a network, in units of the largest logit
WRONG = 1e-2
pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    return tiny.build(request.param)


def families(*names: str) -> Any:
    return pytest.mark.parametrize("model", names, indirect=True)


@families(*DECODERS, *ENCODERS)
@pytest.mark.parametrize("padding", [0, 5])
def test_same_logits_as_eager(routed: list, model: Any, padding: int) -> None:
    stock, ours = tiny.stock_and_ours(model, lambda: tiny.logits(model, tiny.prompt(padding=padding)))
    assert difference(ours, stock) < SAME
    assert len(routed) == model.config.num_hidden_layers, "a layer did not come to us"


@families(*DECODERS)
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_same_greedy_tokens_as_eager_with_left_padding(routed: list, model: Any, cache: dict[str, str]) -> None:
    stock, ours = tiny.stock_and_ours(model, lambda: tiny.tokens(model, tiny.prompt(), **cache))
    assert torch.equal(ours, stock)
    assert len(routed) == 10 * model.config.num_hidden_layers


@families(*SEQ2SEQ)
def test_encoder_decoders_give_the_same_logits_and_tokens(routed: list, model: Any) -> None:
    inputs = tiny.prompt(left=False)
    labels = {"decoder_input_ids": tiny.prompt(length=9, padding=0)["input_ids"]}
    stock, ours = tiny.stock_and_ours(model, lambda: (tiny.logits(model, inputs | labels), tiny.tokens(model, inputs)))
    assert difference(ours[0], stock[0]) < SAME
    assert torch.equal(ours[1], stock[1])
    layers = 2
    # One encoder and one decoder with self and cross attention; then generate: one encoder, ten steps.
    assert len(routed) == layers * (1 + 2) + layers * (1 + 2 * 10)


def test_whisper_gives_the_same_logits(routed: list) -> None:
    own = {"num_mel_bins": 8, "max_source_positions": 20, "eos_token_id": 2, "decoder_start_token_id": 3}
    unused = {"suppress_tokens": None, "begin_suppress_tokens": None}
    model = tiny.made("WhisperForConditionalGeneration", **own, **unused)
    features = {
        "input_features": torch.randn(2, 8, 40),
        "decoder_input_ids": torch.tensor([[3, 5, 9, 4], [3, 7, 8, 6]]),
    }
    stock, ours = tiny.stock_and_ours(model, lambda: tiny.logits(model, features))
    assert difference(ours, stock) < SAME
    assert len(routed) == 2 + 2 * 2


FORGOTTEN = [
    *((family, "attn_mask") for family in ("llama", "mistral", "gpt_oss", "llama4", "bert", "gpt2")),
    *((family, "bandless") for family in ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "modernbert")),
    ("gemma2", "softcap"),
    ("gpt_oss", "sinks"),
]


@pytest.mark.parametrize(("model", "forgotten"), FORGOTTEN, indirect=["model"])
def test_what_is_forgotten_is_noticed(model: Any, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiny.is_older("4.57") and model.config.model_type == "gpt2" and forgotten == "bandless":
        pytest.skip("GPT-2 makes its mask itself in this Transformers")
    options = {"bandless": {"is_causal": False, "window": None}}.get(forgotten, {forgotten: None})
    original = host.sdpa

    def forgetful(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, **given: Any) -> Tensor:
        return original(query, key, value, dropout_p=dropout_p, **{"attn_mask": mask, **given, **options})

    monkeypatch.setattr(host, "sdpa", forgetful)
    stock, wrong = tiny.stock_and_ours(model, lambda: tiny.logits(model, tiny.prompt()))
    assert difference(wrong, stock) > WRONG


@families("llama", "mistral", "gpt_oss", "llama4")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_in_parts_gives_the_same_logits(model: Any, cache: str) -> None:
    """The prompt in three parts, so that a band begins in the middle of a cache."""
    ids, mask = tiny.prompt().values()

    def run() -> Tensor:
        size = {"max_batch_size": 2} if tiny.is_older("4.57") else {}
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=32, **size)
        else:
            past = transformers.DynamicCache(**({} if tiny.is_older("4.57") else {"config": model.config}))
        parts = []
        for first, last in ((0, 8), (8, 15), (15, 19)):
            part = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last]}
            position = {"cache_position": torch.arange(first, last)} if tiny.is_older("5.0") else {}
            with torch.no_grad():
                out = model(**part, **position, past_key_values=past, use_cache=True)
            parts.append(out.logits * mask[:, first:last, None])
        return torch.cat(parts, dim=1)

    stock, ours = tiny.stock_and_ours(model, run, stock="sdpa" if model.config.model_type != "gpt_oss" else "eager")
    assert difference(ours, stock) < SAME


@families("llama", "mistral", "gemma3")
def test_packed_sequences_do_not_see_each_other(model: Any) -> None:
    ids = tiny.prompt(batch=1, padding=0)["input_ids"]
    lengths = (9, 4, 6)
    packed = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if tiny.is_older("5.0") and not hasattr(transformers.masking_utils, "packed_sequence_mask_function"):
        pytest.skip("this Transformers does not know packed sequences")
    ours = tiny.with_attention(model, tiny.NAME, lambda: tiny.logits(model, packed, use_cache=False))
    alone = [tiny.logits(model, {"input_ids": part}, use_cache=False) for part in ids.split(lengths, dim=1)]
    assert difference(ours, torch.cat(alone, dim=1)) < SAME


@families("llama", "gpt2")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_one_s_own_is_used_as_it_is(model: Any, dtype: torch.dtype) -> None:
    inputs = tiny.prompt(padding=0)
    allowed = (torch.rand(2, 1, 19, 19, generator=torch.Generator().manual_seed(3)) < 0.5) | torch.eye(19).bool()
    mask = allowed if dtype == torch.bool else torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(dtype).min)
    own = {**inputs, "attention_mask": mask}
    stock, ours = tiny.stock_and_ours(model, lambda: tiny.logits(model, own), stock="sdpa")
    assert difference(ours, stock) < SAME
    causal = tiny.with_attention(model, "sdpa", lambda: tiny.logits(model, inputs))
    assert difference(stock, causal) > WRONG


TOKENS = 4096
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": TOKENS, "num_key_value_heads": 1}
ONE_LAYER |= {"num_attention_heads": 2, "hidden_size": 32, "head_dim": 16}


@pytest.mark.parametrize("family", ["llama", "mistral", "llama4", "packed"])
def test_nothing_of_the_size_of_the_mask_exists(family: str) -> None:
    own = {"mistral": {"sliding_window": 512}, "llama4": {"attention_chunk_size": 512}}.get(family, {})
    if family == "llama4":
        own |= {"layer_types": ["chunked_attention"], "no_rope_layers": [1]}
    model = tiny.build("llama" if family == "packed" else family, **ONE_LAYER, **own)
    tiny.use(model, tiny.NAME)
    peaks = {}
    for tokens in (TOKENS // 2, TOKENS):
        inputs = tiny.prompt(batch=1, length=tokens, padding=100 if family == "llama" else 0)
        if family == "packed":
            inputs = {"input_ids": inputs["input_ids"], "position_ids": torch.arange(tokens)[None] % 1000}
        with torch.no_grad(), PeakMemory("cpu") as memory:
            model.model(**inputs, use_cache=False)
        peaks[tokens] = memory.peak_bytes
    assert memory.largest_tensor_bytes < TOKENS * TOKENS / 2, "a mask takes L*S bytes, scores take more"
    assert peaks[TOKENS] < 2.2 * peaks[TOKENS // 2]
