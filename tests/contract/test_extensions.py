"""What torch's function does not have: softcap, attention sinks and masks that are rules, on every route that takes
them, forward and backward, against the float64 definition."""

from __future__ import annotations

import pytest
import torch
from attn_support.oracle import assert_close, assert_gradients_close

from pascal_attn_core import AttentionConfig, LazyMask, UnsupportedAttention, sdpa, sdpa_with_lse
from pascal_attn_core.observe.memory import measure
from pascal_attn_core.reference import reference_sdpa

CONFIGS = {
    "auto": AttentionConfig(),
    "tiled": AttentionConfig(route="tiled"),
    "online": AttentionConfig(route="tiled", softmax="online"),
    "small tiles": AttentionConfig(route="tiled", q_block=16, kv_block=16),
    "math": AttentionConfig(route="math", math_limit_mib=64),
}
SHAPES = [(2, 2, 2, 37, 53, 8), (2, 4, 2, 70, 90, 16), (3, 6, 3, 1, 90, 8)]


def _mask(kind: str, batch: int, heads: int, rows: int, keys: int) -> tuple:
    """(the mask as given, the same as a tensor)"""
    if kind == "bool rule":
        rule = LazyMask((batch, 1, rows, keys), lambda b, h, i, j: (i * 7 + j * 3 + b) % 5 != 0, device="cpu")
    elif kind == "float rule":
        shape = (batch, heads, rows, keys)
        rule = LazyMask(shape, lambda b, h, i, j: (i - j).abs() * -0.1 * (h + 1), device="cpu", dtype=torch.float32)
    else:
        mask = {"none": None, "bool": torch.rand(batch, 1, 1, keys) > 0.4, "float": torch.randn(1, heads, rows, keys)}
        return mask[kind], mask[kind]
    return rule, rule.dense()


@pytest.mark.parametrize("kind", ["none", "bool", "float", "bool rule", "float rule"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (None, True), (50.0, True), (None, False)])
def test_softcap_sinks_and_rules_give_the_answer_and_gradients_of_the_definition(kind, causal, softcap, sinks) -> None:
    for batch, heads, kv_heads, rows, keys, head_dim in SHAPES:
        leaves = [torch.randn(batch, h, n, head_dim) for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys))]
        leaves += [torch.randn(heads)] if sinks else []
        mask, dense = _mask(kind, batch, heads, rows, keys)
        options = {"is_causal": causal, "enable_gqa": heads != kv_heads, "softcap": softcap}

        def run(function, dtype, config=None, *, mask=mask, dense=dense, leaves=leaves, options=options):
            own = [t.to(dtype, copy=True).requires_grad_() for t in leaves]
            given = mask
            if function is reference_sdpa:
                given = dense if dense is None or dense.dtype == torch.bool else dense.to(dtype)
            extra = {} if function is reference_sdpa else {"config": config}
            out = function(*own[:3], given, **options, **extra, sinks=own[3] if sinks else None)
            out, lse = out if isinstance(out, tuple) else (out, None)
            grad_out = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(dtype)
            return out, lse, torch.autograd.grad(out, own, grad_out)

        oracle, lse, oracle_grads = run(reference_sdpa, torch.float64)
        plain, _, plain_grads = run(reference_sdpa, torch.float32)
        for name, config in CONFIGS.items():
            out, _, grads = run(sdpa, torch.float32, config)
            assert_close(out, oracle, plain, f"out by {name}", dtype=torch.float32, scale=1.0)
            assert_gradients_close(grads, oracle_grads, plain_grads, lse, torch.float32, by=name)


def test_a_rule_is_never_stored_whole() -> None:
    tokens = 4096
    query, key, value = (torch.randn(1, 1, tokens, 8) for _ in range(3))
    rule = LazyMask((1, 1, tokens, tokens), lambda b, h, i, j: (i // 512) == (j // 512), device="cpu")
    measured = measure(lambda q, k, v: sdpa(q, k, v, rule), query, key, value)
    assert measured.largest_tensor_bytes <= tokens * tokens // 8  # as bool the whole would be tokens * tokens


def test_a_route_that_has_no_such_thing_says_so() -> None:
    query = torch.randn(1, 2, 70, 8)
    with pytest.raises(UnsupportedAttention, match="softcap"):
        sdpa(query, query, query, softcap=3.0, config=AttentionConfig(route="torch"))
    with pytest.raises(ValueError, match="softcap must be greater than 0"):
        sdpa(query, query, query, softcap=-1.0)
    with pytest.raises(ValueError, match=r"sinks must be \[2\]"):
        sdpa(query, query, query, sinks=torch.zeros(3))


def test_a_compiled_call_has_softcap_and_sinks_with_gradients() -> None:
    query, sinks = torch.randn(1, 4, 20, 8, requires_grad=True), torch.randn(4, requires_grad=True)

    def model(query, sinks):
        return sdpa(query, query, query, softcap=3.0, sinks=sinks)

    expected = torch.autograd.grad(model(query, sinks).square().sum(), (query, sinks))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(query, sinks).square().sum(), (query, sinks))
    torch.testing.assert_close(actual, expected)


def test_without_keys_the_sinks_are_the_whole_denominator() -> None:
    query, sinks = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(3, requires_grad=True)
    key = torch.randn(2, 3, 0, 8)
    result = sdpa_with_lse(query, key, key, sinks=sinks, config=AttentionConfig(route="tiled"))
    assert torch.equal(result.out, torch.zeros(2, 3, 5, 8))
    assert torch.equal(result.lse, sinks[None, :, None].expand(2, 3, 5))
    result.lse.sum().backward()
    assert torch.equal(sinks.grad, torch.full((3,), 10.0))
    assert torch.equal(query.grad, torch.zeros_like(query))
