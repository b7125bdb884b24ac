"""The route ``fused`` through the public functions, its kernels emulated on a CPU."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_support.fused.cases import takes
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import CARD, GXX
from attn_support.fused.packed import poisoned_memory
from attn_support.oracle import assert_attention, assert_gradients, exact, gradients, int8_bound
from attn_support.table import GRADIENT_TABLE, TABLE, Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, record, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.flash_attn import flash_attn_func
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.plan import plan_call
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.reference import reference_sdpa

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
FUSED, INT8 = AttentionConfig(route="fused"), AttentionConfig(route="fused-int8")


@pytest.fixture(autouse=True)
def queued() -> Iterator[list[Launch]]:
    with emulated_card() as kernels:
        yield kernels.queued


# On one multiprocessor few rows alone are a reason to cut the keys into parts: the table takes both kernels.
ONE_SM = replace(CARD, num_sms=1)


TAKEN = [case for case in TABLE if takes(case)]


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_every_call_gets_the_answer_of_the_definition(case: Case) -> None:
    inputs, options = case.build()
    with emulated_card(info=ONE_SM) as kernels, poisoned_memory():
        out, lse = sdpa_with_lse(*inputs, **options, config=FUSED)
    assert_attention(out, lse, inputs, options, case.dtype)
    assert kernels.queued


REFUSED = {
    "square, float64": "the fused kernel takes float32, float16 and bfloat16, got torch.float64",
    "no queries": "the call is empty",
    "square, columns_first": "key's rows must be contiguous and begin at multiples of 4 elements",
    "square, float64 mask": "attn_mask is torch.float64 and query torch.float32",
    "square, float16 mask": "attn_mask is torch.float16 and query torch.float32",
    "square, bfloat16 mask": "attn_mask is torch.bfloat16 and query torch.float32",
    "head_dim_v 1": "head_dim must be a multiple of 4, got 8 and 1",
}


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_call_that_it_does_not_take_is_refused_with_the_reason(name: str, reason: str, queued: list[Launch]) -> None:
    (case,) = (case for case in TABLE if case.name == name)
    inputs, options = case.build()
    for attend in (sdpa, sdpa_with_lse):
        with pytest.raises(UnsupportedAttention, match=f"route 'fused' cannot take this call.*{re.escape(reason)}"):
            attend(*inputs, **options, config=FUSED)
    assert not queued


def test_the_table_takes_both_kernels_and_is_refused_for_these_reasons_alone() -> None:
    kinds: collections.Counter[str] = collections.Counter()
    for case in TABLE:
        inputs, options = case.build()
        call = check_call(*inputs, **options)
        reasons = call_reasons(call)
        kinds["refused" if reasons else plan_call(call, 1).forward.kind] += 1
        for reason in reasons:
            # "query's", "key's" and "value's rows"; "got 8 and 1", "got 1 and 1"
            words = reason.partition("'s ")[2] or reason.partition(", got 1 ")[0]
            assert any(words in known for known in REFUSED.values()), (case.name, reason)
    assert min(kinds["forward"], kinds["split"]) > 100


@pytest.mark.parametrize("case", [case for case in GRADIENT_TABLE if takes(case)][::2], ids=lambda case: case.name)
def test_gradients_come_in_the_shapes_of_the_inputs(case: Case) -> None:
    inputs, options = case.build(requires_grad=True)
    if len(inputs) > 3 and inputs[3] is not None:
        inputs[3] = inputs[3].detach()

    def backward(grad_out: Tensor, _: object) -> list[Tensor]:
        with poisoned_memory():
            ours = sdpa_with_lse(*inputs, **options, config=FUSED)
            found = gradients(ours.out, inputs[:3], grad_out, ours.lse)
        assert [grad.shape for grad in found] == [t.shape for t in inputs[:3]]
        return found

    assert_gradients(backward, inputs, options, case.dtype, with_lse=True)


def test_inputs_that_broadcast_get_gradients_of_their_own_shapes() -> None:
    leaves = _leaves((2, 4, 40, 64), (1, 2, 50, 64), (2, 2, 50, 64))
    actual = torch.autograd.grad(sdpa(*leaves, enable_gqa=True, config=FUSED).square().sum(), leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out, _ = reference_sdpa(wide[0], wide[1].expand(2, -1, -1, -1), wide[2], enable_gqa=True)
    for a, e in zip(actual, torch.autograd.grad(out.square().sum(), wide)):
        torch.testing.assert_close(a.double(), e, atol=1e-4, rtol=1e-4)


def test_lse_has_gradients_and_out_may_have_none() -> None:
    leaves = _leaves((1, 2, 40, 64), (1, 2, 50, 64), (1, 2, 50, 64))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out, lse = sdpa_with_lse(*leaves, config=FUSED)
    _, expected = reference_sdpa(*wide)
    actual = torch.autograd.grad(lse.square().sum(), leaves, retain_graph=True)
    oracle = torch.autograd.grad(expected.square().sum(), wide, materialize_grads=True)
    for a, e in zip(actual, oracle):
        torch.testing.assert_close(a.double(), e, atol=1e-4, rtol=1e-4)
    assert torch.autograd.grad(out.sum(), leaves[2])[0].isfinite().all()  # the gradient of a sum has stride 0


def test_gradients_of_gradients_are_refused_by_name() -> None:
    (leaf,) = _leaves((1, 1, 8, 64))
    out = sdpa(leaf, leaf, leaf, config=FUSED)
    (plain,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    assert torch.equal(grad, plain)
    with pytest.raises(RuntimeError, match=r"gradients of gradients must be taken with route='math', got a fused call"):
        grad.sum().backward()


@pytest.mark.parametrize("create_graph", [False, True])
def test_many_gradients_at_once(create_graph: bool) -> None:
    leaves = _leaves((1, 2, 40, 64), (1, 2, 50, 64), (1, 2, 50, 64))
    out, lse = sdpa_with_lse(*leaves, config=FUSED)
    grad_outs = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)
    batched = torch.autograd.grad(
        (out, lse), leaves, grad_outs, retain_graph=True, is_grads_batched=True, create_graph=create_graph
    )
    for i in range(3):
        single = torch.autograd.grad((out, lse), leaves, [g[i] for g in grad_outs], retain_graph=True)
        assert all(torch.equal(many[i], one) for many, one in zip(batched, single))


def test_the_output_is_laid_out_as_the_query_is() -> None:
    tokens_first = [torch.randn(2, 40, 4, 64) for _ in range(3)]
    out = sdpa(*(t.transpose(1, 2) for t in tokens_first), config=FUSED)
    assert out.transpose(1, 2).is_contiguous()
    flash = flash_attn_func(*tokens_first)
    torch.testing.assert_close(out.transpose(1, 2), flash, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_compiled_call_and_its_gradients_are_the_same(is_causal: bool, queued: list[Launch]) -> None:
    leaves = _leaves((1, 2, 70, 64), (1, 2, 70, 64), (1, 2, 70, 64))

    def attend(*tensors: Tensor) -> Tensor:
        return sdpa(*tensors, is_causal=is_causal, config=FUSED)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    outs = compiled(*leaves), attend(*leaves)
    torch.testing.assert_close(*outs, atol=0, rtol=0)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in outs)):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    kinds = [launch.function for launch in queued]
    assert kinds == ["pa_forward"] * 2 + ["pa_delta", "pa_grad_query", "pa_grad_key_value"] * 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), outs[1], atol=0, rtol=0)


def test_recomputation_in_the_backward_pass_changes_no_bit() -> None:
    leaves = _leaves((1, 2, 40, 64), (1, 2, 40, 64), (1, 2, 40, 64))
    plainly = sdpa(*leaves, config=FUSED)
    again = checkpoint(lambda *t: sdpa(*t, config=FUSED), *leaves, use_reentrant=False)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (plainly, again))):
        assert torch.equal(a, b)


def test_autocast_means_what_it_means_for_torchs_function() -> None:
    leaves = _leaves((1, 2, 40, 64), (1, 2, 40, 64), (1, 2, 40, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sdpa(*leaves, config=FUSED)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
    narrow = [t.detach().bfloat16().requires_grad_() for t in leaves]
    expected = sdpa(*narrow, config=FUSED)
    assert torch.equal(out, expected)
    for a, b in zip(grads, torch.autograd.grad(expected.float().square().sum(), narrow)):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def test_auto_takes_it_for_what_torch_has_no_kernel_for() -> None:
    query = torch.randn(1, 2, 600, 64)
    with record() as report:
        out = sdpa(query, query, query, window=(64, 0))
    assert report.routes() == {"fused": 1}
    assert explain(query, query, query, window=(64, 0)).startswith(
        "route fused: torch's function has no sliding window"
    )
    torch.testing.assert_close(out, reference_sdpa(query, query, query, window=(64, 0))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", range(4))
def test_a_negated_view_is_read_as_what_it_means(place: int, queued: list[Launch]) -> None:
    inputs = [torch.randn(1, 2, 40, 64) for _ in range(3)] + [torch.randn(1, 1, 40, 40)]
    expected = sdpa(*(-t if i == place else t for i, t in enumerate(inputs)), config=FUSED)
    inputs[place] = torch._neg_view(inputs[place])
    assert torch.equal(sdpa(*inputs, config=FUSED), expected)
    assert len(queued) == 2


def test_few_queries_are_spread_over_the_card(queued: list[Launch]) -> None:
    query, key, value = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 900, 64), torch.randn(1, 2, 900, 64)
    out, lse = sdpa_with_lse(query, key, value, enable_gqa=True, config=FUSED)
    expected, expected_lse = reference_sdpa(query, key, value, enable_gqa=True)
    assert [launch.function for launch in queued] == ["pa_forward_split", "pa_combine"]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_a_batch_of_few_queries_takes_one_part(queued: list[Launch]) -> None:
    query, key, value = (torch.randn(40, heads, n, 64) for heads, n in ((4, 3), (2, 70), (2, 70)))
    out = sdpa(query, key, value, is_causal=True, enable_gqa=True, config=FUSED)
    assert [(launch.function, launch.params.splits) for launch in queued] == [
        ("pa_forward_split", 1),
        ("pa_combine", 1),
    ]
    expected, _ = reference_sdpa(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_int8_stays_within_its_bound_and_is_never_chosen() -> None:
    query, key, value = (torch.randn(2, 2, n, 64) for n in (70, 90, 90))
    out = sdpa(query, key, value, config=INT8)
    expected = exact([query, key, value], {})[0]
    assert not torch.equal(out.double(), expected)
    assert ((out.double() - expected).abs().amax(-1) <= int8_bound(query, key, value, 64**-0.5)).all()
    with pytest.raises(UnsupportedAttention, match="the int8 mode does not return lse"):
        sdpa_with_lse(query, key, value, config=INT8)
    with pytest.raises(UnsupportedAttention, match="the int8 mode has no gradients"):
        sdpa(query.requires_grad_(), key, value, config=INT8)
    assert "fused-int8" not in explain(query, key, value)


def test_long_launches_in_parts_give_the_same_bits(queued: list[Launch]) -> None:
    leaves = _leaves((3, 2, 300, 64), (3, 2, 200, 64), (3, 2, 200, 64))
    whole = sdpa(*leaves, config=FUSED)
    grads = torch.autograd.grad(whole.square().sum(), leaves)
    with emulated_card(work_per_sm=1 << 17) as kernels:
        parts = sdpa(*leaves, config=FUSED)
        assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(parts.square().sum(), leaves)))
    assert torch.equal(whole, parts)
    assert len(kernels.queued) > 3 * len(queued)
