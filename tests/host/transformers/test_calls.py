"""One attention call: what arrives at sdpa, biases, weights, and what is refused."""

from typing import Any

import pytest
import torch
from attn_support import tiny_models as tiny
from attn_support.randomness import some
from attn_support.tiny_models import WINDOW, plain
from torch import Tensor

from pascal_attn_core.call.lazy_mask import LazyMask
from pascal_attn_core.transformers import make_hf_attention_fn

attention = make_hf_attention_fn()
MODULE = torch.nn.Module()


def qkv(seq_len_q: int = 9, seq_len_kv: int = 9, heads: int = 4, kv_heads: int = 2, dim_v: int = 8) -> list[Tensor]:
    shapes = [(2, heads, seq_len_q, 8), (2, kv_heads, seq_len_kv, 8), (2, kv_heads, seq_len_kv, dim_v)]
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_gradients_reach_the_position_bias(kind: str) -> None:
    tensors, bias = qkv(), torch.randn(1, 4, 9, 9, requires_grad=True)
    mask, allowed, added = None, None, torch.zeros(9, 9)
    if kind == "bool":
        mask = allowed = torch.rand(2, 1, 9, 9) < 0.7
    elif kind == "float":
        mask = added = torch.randn(2, 1, 9, 9)
    out, _ = attention(MODULE, *tensors, mask, position_bias=bias, is_causal=False if mask is None else None)
    upstream = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, bias, upstream)
    (expected,) = torch.autograd.grad(plain(tensors, allowed, bias + added), bias, upstream)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_bias_and_a_mask_tensor_are_never_stored_together(routed: list, dtype: torch.dtype) -> None:
    tensors, bias = qkv(), torch.randn(1, 4, 9, 9)
    allowed = torch.rand(2, 1, 9, 9) < 0.7
    mask = allowed if dtype == torch.bool else torch.zeros(2, 1, 9, 9).masked_fill(~allowed, -torch.inf)
    out, _ = attention(MODULE, *tensors, mask, position_bias=bias)
    torch.testing.assert_close(out, plain(tensors, allowed, bias))
    assert isinstance(routed[0]["mask"], LazyMask)


def test_none_means_causal_from_the_first_key_unless_the_module_says_otherwise() -> None:
    tensors, module = qkv(4, 9), torch.nn.Module()
    causal = torch.ones(4, 9).tril().bool()
    torch.testing.assert_close(attention(module, *tensors, None)[0], plain(tensors, causal))
    torch.testing.assert_close(attention(module, *tensors, None, is_causal=False)[0], plain(tensors))
    module.is_causal = False
    torch.testing.assert_close(attention(module, *tensors, None)[0], plain(tensors))
    one = qkv(1, 9)
    torch.testing.assert_close(attention(torch.nn.Module(), *one, None)[0], plain(one))


@pytest.mark.parametrize(("name", "words"), [
    ("indices", "selects keys"),
    ("block_indices", "selects keys"),
    ("cache", "continuous batching"),
    ("read_index", "continuous batching"),
])  # fmt: skip
def test_what_would_be_silently_wrong_is_refused(name: str, words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        attention(MODULE, *qkv(), None, **{name: torch.zeros(2, 9, 3)})


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_weights_that_are_asked_for_are_those_of_eager(registered: str, family: str, caplog) -> None:
    model, inputs = tiny.build(family), tiny.prompt()

    def run() -> Any:
        with torch.no_grad():
            return model(**inputs, output_attentions=True).attentions

    stock, ours = tiny.stock_and_ours(model, run)
    seen = inputs["attention_mask"][:, None, :, None].bool()
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine * seen, theirs * seen, atol=1e-4, rtol=1e-3)


def only(routed: list[dict[str, Any]], **wanted: Any) -> None:
    assert routed
    for call in routed:
        assert {name: call[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("family", "padding", "window"), [("llama", 0, None), ("llama", 5, None), ("mistral", 0, (WINDOW - 1, -1))]
)
def test_a_prefill_arrives_as_causal_with_a_window_and_one_row_of_padding(
    registered: str, routed: list, family: str, padding: int, window: tuple[int, int] | None
) -> None:
    model = tiny.build(family)
    tiny.with_attention(model, registered, lambda: tiny.logits(model, tiny.prompt(padding=padding)))
    only(routed, is_causal=True, window=window, alignment="upper_left", enable_gqa=True)
    shapes = {None if call["mask"] is None else tuple(call["mask"].shape) for call in routed}
    assert shapes == {(2, 1, 1, 19) if padding else None}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_eager(registered: str, family: str, checkpointing: bool) -> None:
    model, inputs = tiny.build(family), tiny.prompt()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[0, 5] = -100  # predicted from padding, which sees nothing here and everything in eager

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        model.gradient_checkpointing_disable()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    stock, ours = tiny.stock_and_ours(model, run)
    assert stock.keys() == ours.keys()
    for name, grad in stock.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-3, atol=1e-4 * grad.abs().max().item() + 1e-7)


@pytest.mark.parametrize(
    ("family", "padding"), some([("llama", 0), ("mistral", 5), ("gpt_oss", 5), ("llama", 5), ("gemma2", 0)], 5)
)
def test_a_compiled_model_gives_the_same_logits(registered: str, family: str, padding: int) -> None:
    if tiny.is_older("5.0"):
        pytest.skip("compiling is tested with Transformers 5")
    model, inputs = tiny.build(family), tiny.prompt(padding=padding)
    stock = tiny.with_attention(model, "eager", lambda: tiny.logits(model, inputs))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=family != "gpt_oss")
    tiny.use(model, registered)
    assert tiny.difference(tiny.logits(compiled, inputs), stock) < 1e-4


def test_a_compiled_decode_is_compiled_once(registered: str) -> None:
    """With a static cache the mask of a step is a tensor of one shape: nothing is compiled anew from step to step."""
    if tiny.is_older("5.0"):
        pytest.skip("compiling is tested with Transformers 5")
    model, inputs = tiny.build("llama"), tiny.prompt()
    tiny.use(model, registered)
    stock = tiny.tokens(model, inputs, cache_implementation="static")
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    forward = model.forward
    step = torch.compile(forward, backend=backend)
    model.forward = lambda *args, **kwargs: (step if kwargs["input_ids"].shape[1] == 1 else forward)(*args, **kwargs)
    ours = tiny.tokens(model, inputs, cache_implementation="static")
    assert torch.equal(ours, stock)
    assert 1 <= len(graphs) <= 2
