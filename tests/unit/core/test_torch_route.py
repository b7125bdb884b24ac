"""The rewrites for torch's kernel, on a CPU that answers as an older card whether there is a fused kernel."""

from collections.abc import Callable

import pytest
import torch
from attn_support.oracle import assert_close, exact, plain
from torch import Tensor

from pascal_attn_core import AttentionConfig, UnsupportedAttention, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.machine.runtime import begin_epoch, runtime_of
from pascal_attn_core.observe.memory import measure
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import short
from pascal_attn_core.routes import torch_kernel as torch_route
from pascal_attn_core.routes.torch_faults import TorchAlone
from pascal_attn_core.routes.torch_kernel import TorchForm, find_form

TORCH = AttentionConfig(route="torch")


@pytest.fixture
def torch_takes(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """``torch_takes(rule)``: a fused kernel takes exactly the calls for which ``rule(query, key, value, mask)``."""

    def set_rule(rule: Callable[..., bool]) -> None:
        for module in (torch_route, short):
            monkeypatch.setattr(module, "fused_takes", lambda call, *tensors: rule(*tensors))
        monkeypatch.setattr(runtime_of(torch.device("cpu")).part(TorchAlone), "answers", frozenset())
        begin_epoch()

    return set_rule


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Return what torch's function is called with."""
    calls: list[dict] = []
    original = torch_route.torch_sdpa

    def spy(query, key, value, mask, dropout_p, is_causal, **options):
        calls.append({"query": query, "key": key, "value": value, "mask": mask, "is_causal": is_causal, **options})
        return original(query, key, value, mask, dropout_p, is_causal, **options)

    monkeypatch.setattr(torch_route, "torch_sdpa", spy)
    return calls


def _no_grouping(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return query.shape[1] == key.shape[1] == value.shape[1]


def _no_bfloat16(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return _no_grouping(query, key, value, mask) and query.dtype != torch.bfloat16


def _form(*inputs, budget: int = 4 << 20, **options) -> TorchForm:
    form = find_form(check_call(*inputs, **options), budget)
    assert isinstance(form, TorchForm), form
    return form


def _check(inputs: list[Tensor | None], *, dtype: torch.dtype = torch.float32, config=TORCH, **options) -> Tensor:
    out = sdpa(*inputs, **options, config=config)
    oracle, similar = exact(inputs, options)[0], plain(inputs, options, dtype)[0]
    assert_close(out, oracle, similar, "out", dtype=inputs[0].dtype)
    return out


def _grouped(length: int, *, dtype: torch.dtype = torch.float32, keys: int = 40) -> list[Tensor]:
    query = torch.randn(2, 8, length, 16).to(dtype)
    return [query, *(torch.randn(2, 2, keys, 16).to(dtype) for _ in range(2))]


def _same_memory(view: Tensor, base: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize("length", [1, 33])
def test_heads_of_a_group_become_rows_without_a_copy(torch_takes, received, length: int) -> None:
    torch_takes(_no_grouping)
    query, key, value = _grouped(length)
    assert _form(query, key, value, enable_gqa=True).fold == "rows"
    _check([query, key, value], enable_gqa=True)
    assert received
    for call in received:
        assert call["query"].shape[1] == call["key"].shape[1] <= 2
        assert call["query"].shape[2] == 4 * length
        assert _same_memory(call["key"], key)
        assert _same_memory(call["value"], value)
        assert "enable_gqa" not in call


@pytest.mark.parametrize("mask", ["none", "bool", "float", "per head"])
def test_key_heads_become_the_batch_with_views_of_stride_zero(torch_takes, received, mask: str) -> None:
    """A causal rule or a mask per row cannot be folded into rows."""
    torch_takes(_no_grouping)
    query, key, value = _grouped(33)
    bias = {"none": None, "bool": torch.rand(33, 40) < 0.7, "float": torch.randn(2, 1, 33, 40),
            "per head": torch.randn(1, 8, 33, 40)}[mask]  # fmt: skip
    options = {"enable_gqa": True, "is_causal": bias is None}
    assert _form(query, key, value, bias, **options).fold == "heads"
    _check([query, key, value, bias], **options)
    assert received
    for call in received:
        for name, base in (("key", key), ("value", value)):
            assert call[name].shape[1] == 4
            assert call[name].stride(1) == 0
            assert _same_memory(call[name], base)
        assert call["is_causal"] == (mask == "none")


def test_folding_takes_only_as_many_heads_as_fit_the_budget(torch_takes, received) -> None:
    torch_takes(_no_grouping)
    query = torch.randn(1, 16, 256, 64)
    key, value = torch.randn(1, 4, 256, 64), torch.randn(1, 4, 256, 64)
    one_head = 4 * 256 * (64 + 1) * 4  # its output, and the lse that torch's kernel makes beside it
    assert _form(query, key, value, enable_gqa=True, budget=2 * one_head).heads_step == 2
    config = AttentionConfig(route="torch", budget_mib=2 * one_head / (1 << 20))
    _check([query, key, value], enable_gqa=True, config=config)
    assert [call["key"].shape[1] for call in received] == [2, 2]


def test_folded_heads_have_gradients_as_rows_only(torch_takes) -> None:
    torch_takes(_no_grouping)
    leaves = [t.requires_grad_() for t in _grouped(9)]
    outs = sdpa(*leaves, enable_gqa=True, config=TORCH), reference_sdpa(*leaves, enable_gqa=True)[0]
    actual, expected = (torch.autograd.grad(out.square().sum(), leaves) for out in outs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(UnsupportedAttention):
        sdpa(*leaves, is_causal=True, enable_gqa=True, config=TORCH)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("mask", "is_causal"), [(None, False), (None, True), (torch.bool, False), (torch.float32, False)]
)
def test_bfloat16_is_computed_in_float32_within_the_budget(torch_takes, received, grouped, mask, is_causal) -> None:
    torch_takes(_no_bfloat16)
    query, key, value = _grouped(33, dtype=torch.bfloat16)
    if not grouped:
        query = query[:, :2]
    bias = None if mask is None else (torch.rand(2, 1, 33, 40) < 0.7).to(mask)
    options = {"is_causal": is_causal, "enable_gqa": grouped}
    form = _form(query, key, value, bias, **options)
    assert form.upcast
    assert "bfloat16 in float32" in form.words()
    out = _check([query, key, value, bias], **options)
    assert out.dtype == torch.bfloat16
    assert {call["query"].dtype for call in received} == {torch.float32}


def test_upcasting_takes_the_budget_and_no_more(torch_takes) -> None:
    torch_takes(_no_bfloat16)
    query, key, value = (torch.randn(1, 16, 512, 64).bfloat16() for _ in range(3))
    config = AttentionConfig(route="torch", budget_mib=1)
    measured = measure(sdpa, query, key, value, config=config)
    assert measured.extra_bytes <= 1 << 20
    with pytest.raises(UnsupportedAttention, match="exceeds the budget"):
        sdpa(query, key, value, config=AttentionConfig(route="torch", budget_mib=1 / 4))


@pytest.mark.parametrize("shape", [(200, 300), (1, 1, 200, 300), (2, 1, 200, 300), (2, 4, 200, 300)])
def test_a_bool_mask_is_copied_some_queries_at_a_time(received, shape: tuple[int, ...]) -> None:
    query, key, value = torch.randn(2, 4, 200, 16), torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16)
    mask = torch.rand(shape) < 0.7
    budget = mask.numel() * 4 // 5
    form = _form(query, key, value, mask, budget=budget)
    assert 0 < form.q_step < 200
    masks = mask.shape[0] if mask.dim() == 4 else 1
    row = mask.numel() // masks // 200 * 4 + 4 * (16 + 1) * 4  # the rest: output and lse of all heads
    assert row * form.q_step <= budget  # of one batch element at a time
    config = AttentionConfig(route="torch", budget_mib=max(1 / 16, budget / (1 << 20)))
    _check([query, key, value, mask], config=config)
    assert max(call["query"].shape[2] for call in received) <= max(form.q_step, 200 * (1 << 16) // (mask.numel() * 4))


@pytest.mark.torch_2_5
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "columns first", "repeated"])
def test_a_bool_mask_gives_the_bits_that_it_gives_torch(received, dtype: torch.dtype, layout: str) -> None:
    query, key, value = (torch.randn(2, 3, n, 16).to(dtype) for n in (37, 50, 50))
    mask = torch.rand(2, 3, 37, 50) < 0.5
    mask[0, 0, 3] = False  # nobody may be looked at
    if layout == "columns first":
        mask = mask.mT.contiguous().mT
    elif layout == "repeated":
        mask = mask[:1, :1, :, :1].expand(2, 3, 37, 50)
    out = sdpa(query, key, value, mask, config=AttentionConfig(route="torch", math_limit_mib=64))
    numbers = received[-1]["mask"]
    assert numbers.dtype == dtype
    assert set(numbers.unique().tolist()) == {0.0, -float("inf")}
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.equal(out, expected)


def test_a_last_dimension_with_gaps_is_copied_if_that_fits(received) -> None:
    query, key, value = (torch.randn(2, 2, 16, 40).transpose(2, 3) for _ in range(3))
    assert query.stride(-1) != 1
    _check([query, key, value])
    assert all(call[name].stride(-1) == 1 for call in received for name in ("query", "key", "value"))
    reasons = find_form(check_call(query, key, value), 1 << 10)
    assert "not contiguous" in reasons[0]
