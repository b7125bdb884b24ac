"""What torch's function does not have: softcap, attention sinks and masks that are rules, on every route that takes
them, forward and backward, against the float64 definition."""

from __future__ import annotations

import pytest
import torch
from attn_support.oracle import assert_close, assert_gradients_close
from torch import Tensor

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


def test_lse_counts_the_sinks() -> None:
    query, key, value = (torch.randn(1, 2, 70, 8) for _ in range(3))
    sinks = torch.randn(2)
    config = AttentionConfig(route="tiled")
    lse = sdpa_with_lse(query, key, value, sinks=sinks, config=config).lse
    without = sdpa_with_lse(query, key, value, config=config).lse
    torch.testing.assert_close(lse, torch.logaddexp(without, sinks[:, None].expand_as(without)))


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


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, zeros and -inf in a row that nothing takes part in."""
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    column = sinks.view(-1, 1) if query.dim() == 2 else sinks.view(-1, 1, 1)
    scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    probs = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return probs[..., :-1] @ value, lse


@pytest.mark.parametrize("sink", [-torch.inf, 0.5, 500.0])
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig(),
        AttentionConfig(route="tiled"),
        AttentionConfig(route="tiled", q_block=16, kv_block=32),
        AttentionConfig(route="math"),
    ],
    ids=lambda config: config.token or "auto",
)
def test_sinks_beside_rows_without_keys(config: AttentionConfig, dims: int, as_float: bool, sink: float) -> None:
    heads = 1 if dims == 2 else 2
    shape = (130, 8) if dims == 2 else (2, heads, 130, 8)
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    sinks = torch.full((heads,), sink).requires_grad_()
    allowed = torch.rand(130, 130) > 0.5
    allowed[5:50] = False
    mask = torch.zeros(130, 130).masked_fill(~allowed, -torch.inf) if as_float else allowed
    wide = [t.detach().double().requires_grad_() for t in (*leaves, sinks)]
    expected, expected_lse = _with_sinks(*wide[:3], allowed, wide[3])
    out = sdpa(*leaves, mask, sinks=sinks, config=config)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    grad_out = torch.randn(out.shape)
    grads = torch.autograd.grad(out, [*leaves, sinks], grad_out)
    wanted = torch.autograd.grad(expected, wide, grad_out.double(), retain_graph=True)
    for actual, want in zip(grads, wanted):
        torch.testing.assert_close(actual.double(), want, atol=1e-4, rtol=1e-4)
    if config.route != "math":
        lse = sdpa_with_lse(*leaves, mask, sinks=sinks, config=config).lse
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
        finite = expected_lse.isfinite()
        actual = torch.autograd.grad(lse[finite].sum(), [leaves[0], sinks])
        want = torch.autograd.grad(expected_lse[finite].sum(), [wide[0], wide[3]])
        for a, w in zip(actual, want):
            torch.testing.assert_close(a.double(), w, atol=1e-4, rtol=1e-4)


def test_sinks_over_scores_without_a_mask() -> None:
    """-inf changes nothing, on 2-D inputs too."""
    leaves = [torch.randn(600, 16, requires_grad=True) for _ in range(3)]
    sinks = torch.full((1,), -torch.inf, requires_grad=True)
    for config in (AttentionConfig(), AttentionConfig(route="tiled")):
        out, plain = sdpa(*leaves, sinks=sinks, config=config), sdpa(*leaves, config=config)
        torch.testing.assert_close(out, plain)
        (grad,) = torch.autograd.grad(out.sum(), sinks)
        assert grad.tolist() == [0.0]
