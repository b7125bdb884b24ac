"""Continuous batching: requests of different lengths in one row, their keys in a paged cache, served by ours."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_support import tiny_models as tiny
from attn_support.randomness import at_night
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23", reason="the manager of older versions does not run on a CPU")

import transformers
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import pascal_attn_core.transformers as host
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.transformers import make_hf_attention_fn, register_with_transformers

LENGTHS = (5, 23, 1, 14, 40, 9)
NEW = 8
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
ONE_LAYER |= {"hidden_size": 32, "head_dim": 16}


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]


def options(max_batch_tokens: int = 16, num_blocks: int = 64, **more: Any) -> Any:
    """Steps of so few tokens that prompts come in parts, beside others that decode."""
    return transformers.ContinuousBatchingConfig(
        num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, page_size=8, auto_switch_to_flash=False, **more
    )


def batched(model: Any, inputs: list[list[int]], new: int = NEW, **more: Any) -> list[list[int]]:
    greedy = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    more.setdefault("continuous_batching_config", options())
    results = model.generate_batch(inputs, generation_config=greedy, progress_bar=False, **more)
    return [result.generated_tokens for result in results.values()]


def alone(model: Any, inputs: list[list[int]]) -> list[list[int]]:
    def one(ids: list[int]) -> list[int]:
        given = torch.tensor([ids])
        found = tiny.tokens(model, {"input_ids": given, "attention_mask": torch.ones_like(given)}, max_new_tokens=NEW)
        return found[0, len(ids) :].tolist()

    return tiny.with_attention(model, "eager", lambda: [one(ids) for ids in inputs])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The query lengths of every call that reaches ours."""
    seen: list[list[int]] = []
    original = host.paged_attend

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, kwargs: Any, **more: Any) -> Tensor:
        seen.append(kwargs["cu_seq_lens_q"].diff().tolist())
        return original(module, query, key, value, kwargs, **more)

    monkeypatch.setattr(host, "paged_attend", watched)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen2_moe"])
def test_tokens_are_those_of_each_request_alone(registered: str, steps: list[list[int]], family: str) -> None:
    """Grouped heads, sliding windows, layers of both kinds, softcap and sinks; prompts in parts beside decoding."""
    model = tiny.build(family)
    wanted = alone(model, prompts())
    ours = tiny.with_attention(model, registered, lambda: batched(model, prompts()))
    assert ours == wanted
    assert model.config._attn_implementation != registered
    assert any(1 in step and max(step) > 1 for step in steps), "no step held both prompts and decoding requests"


@at_night
@pytest.mark.slow
def test_a_compiled_step_gives_the_same_tokens(registered: str) -> None:
    """Compiled steps are padded: there are queries behind the last request."""
    model, inputs = tiny.build("llama", num_hidden_layers=1), prompts((5, 11))
    compiled = transformers.CompileConfig(backend="eager", fullgraph=False, mode=None)
    config = options(varlen_compile_config=compiled, q_padding_interval_size=16, kv_padding_interval_size=64)
    torch.compiler.reset()
    ours = tiny.with_attention(model, registered, lambda: batched(model, inputs, continuous_batching_config=config))
    torch.compiler.reset()
    assert ours == alone(model, inputs)


def test_no_mask_of_queries_by_keys_exists(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 2048
    model = tiny.build("llama", **ONE_LAYER, max_position_embeddings=2 * tokens)
    largest, masks = [], []
    original = host.paged_attend

    def measured(*args: Any, **more: Any) -> Tensor:
        with PeakMemory("cpu") as memory:
            out = original(*args, **more)
        largest.append(memory.largest_tensor_bytes)
        return out

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        masks.append(kwargs["attention_mask"])

    monkeypatch.setattr(host, "paged_attend", measured)
    model.register_forward_pre_hook(forward, with_kwargs=True)
    config = options(max_batch_tokens=tokens, num_blocks=400)
    inputs = prompts((tokens // 2, tokens))
    tiny.with_attention(model, registered, lambda: batched(model, inputs, 2, continuous_batching_config=config))
    assert len(masks) > 2
    assert all(mask is None for mask in masks)
    assert max(largest) < tokens * tokens, "a bool mask takes L*S bytes"


def test_the_host_is_left_as_it_was_found() -> None:
    def methods() -> tuple[object, object]:
        return ContinuousBatchingManager.switch_to_cb_friendly_attn, PagedAttentionMemoryHandler.attention_mask_bytes

    before = methods()
    one, two = register_with_transformers(name="pascal_one"), register_with_transformers(name="pascal_two")
    again = register_with_transformers(name="pascal_one")
    model = tiny.build("llama")
    one.remove()
    assert len(tiny.with_attention(model, "pascal_one", lambda: batched(model, prompts()))) == len(LENGTHS)
    tiny.use(model, "pascal_two")
    two.remove()
    with pytest.raises(ValueError, match="pascal_two is not supported for continuous batching"):
        batched(model, prompts())
    again.remove()
    assert methods() == before


def test_what_is_not_served_is_refused_with_a_reason() -> None:
    attention = make_hf_attention_fn()
    tokens, module = torch.zeros(1, 2, 3, 4), torch.nn.Module()
    ends = torch.tensor([0, 3])
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    cache = SimpleNamespace(update=None)
    with pytest.raises(NotImplementedError, match="a SimpleNamespace without cu_seq_lens_q and cu_seq_lens_k"):
        attention(module, tokens, tokens, tokens, None, cache=cache)
    with pytest.raises(NotImplementedError, match="a object and 1 rows"):
        attention(module, tokens, tokens, tokens, None, cache=object(), **lengths)
    with pytest.raises(NotImplementedError, match="max_blocks_per_request=0"):
        attention(module, tokens, tokens, tokens, None, cache=cache, block_table=ends[None], **lengths)
