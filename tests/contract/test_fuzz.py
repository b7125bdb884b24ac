"""Random calls: legal ones against float64, illegal ones refused by us, in our words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_support.oracle import ULPS, assert_close, assert_gradients_close, cast, exact, gradients, plain, plain_dtype
from attn_support.table import BY_TORCH, LAYOUTS, MASKS, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pascal_attn_core import AttentionConfig, UnsupportedAttention, sdpa, sdpa_with_lse
from pascal_attn_core.reference import reference_sdpa

FUZZ = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}
LENGTHS = st.sampled_from((0, 1, 2, 3, 16, 31, 64, 65, 129))
DTYPES = st.sampled_from((torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64))


@st.composite
def legal_cases(draw: st.DrawFn) -> Case:
    batch = draw(st.sampled_from(((), (1,), (2,), (3,), (2, 2), (0,))))
    kv_heads, groups = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 1, 2, 4)))
    heads = kv_heads * groups
    length, keys = draw(LENGTHS), draw(LENGTHS)
    width, width_v = draw(st.sampled_from((1, 3, 8, 16))), draw(st.sampled_from((1, 5, 8, 16)))
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 or draw(st.booleans()) else {}
    options |= draw(st.sampled_from(({}, {}, {"is_causal": True}, {"is_causal": True, "alignment": "lower_right"})))
    if draw(st.integers(0, 4)) == 0:
        sides = st.integers(-1, 70)
        options["window"] = (draw(sides), draw(sides))
    if draw(st.integers(0, 3)) == 0:
        options["scale"] = draw(st.sampled_from((0.0, 1.0, -0.3, 2.5)))
    kv_batch = tuple(1 if draw(st.integers(0, 9)) == 0 else n for n in batch)
    kv_batch = kv_batch[1:] if batch and draw(st.integers(0, 9)) == 0 else kv_batch
    return Case(
        name=str(draw(st.integers(0, 1 << 30))),
        query=(*batch, heads, length, width),
        key=(*kv_batch, kv_heads, keys, width),
        value=(*kv_batch, kv_heads, keys, width_v),
        mask=draw(st.one_of(st.just("none"), st.sampled_from(sorted(MASKS)))),
        layout=draw(st.sampled_from(sorted(set(LAYOUTS) - {"expanded"}))),
        dtype=draw(DTYPES),
        options=options,
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.1, 20.0))),
    )


CONFIGS = st.builds(
    AttentionConfig,
    route=st.sampled_from(("tiled", "tiled", "auto")),
    softmax=st.sampled_from(("auto", "online")),
    q_block=st.one_of(st.none(), st.integers(1, 140)),
    kv_block=st.one_of(st.none(), st.integers(1, 140)),
    trim_masks=st.booleans(),
    math_limit_mib=st.sampled_from((0, 1)),
)


def _check_forward(case: Case, config: AttentionConfig) -> None:
    inputs, options = case.build()
    before = [None if t is None else t.clone() for t in inputs]
    oracle, oracle_lse = exact(inputs, options)
    if case.mask == "float64 mask" and case.dtype != torch.float64:
        inputs = [cast(t, case.dtype) for t in inputs]
        before, (oracle, oracle_lse) = inputs, exact(inputs, options)
    if len(case.name) % 2:
        out, lse = sdpa_with_lse(*inputs, **options, config=config)
        similar_lse = plain(inputs, options, plain_dtype(case.dtype))[1]
        assert_close(lse, oracle_lse, similar_lse, "lse", dtype=case.dtype, scale=1.0)
    else:
        out = sdpa(*inputs, **options, config=config)
    similar, _ = plain(inputs, options, plain_dtype(case.dtype, as_torch=config.route in BY_TORCH))
    # A score in the thousands is itself rounded in its fourth decimal: plain attention may be lucky there, once.
    finite = oracle_lse[oracle_lse.isfinite()].abs()
    digits = 1.0 + (finite.max().item() if finite.numel() else 0.0) / ULPS
    assert_close(out, oracle, similar, "out", dtype=case.dtype, scale=digits)
    assert all(t is None or torch.equal(t, old) for t, old in zip(inputs, before))


@settings(max_examples=300, **FUZZ)
@given(case=legal_cases(), config=CONFIGS)
def test_random_legal_calls_give_the_answer_of_the_definition(case: Case, config: AttentionConfig) -> None:
    _check_forward(case, config)


@pytest.mark.slow
@settings(max_examples=3000, **FUZZ)
@given(case=legal_cases(), config=CONFIGS)
def test_thousands_of_legal_calls_give_the_answer_of_the_definition(case: Case, config: AttentionConfig) -> None:
    _check_forward(case, config)


@settings(max_examples=500, **FUZZ)
@given(case=legal_cases(), config=CONFIGS)
def test_random_legal_calls_have_the_gradients_of_the_definition(case: Case, config: AttentionConfig) -> None:
    inputs, options = case.build(requires_grad=True)
    wide = [cast(t, torch.float64) for t in inputs]
    similar = [cast(t, plain_dtype(case.dtype, as_torch=True)) for t in inputs]
    leaves = [[t for t in tensors if t is not None and t.requires_grad] for tensors in (inputs, wide, similar)]
    out = sdpa(*inputs, **options, config=config)
    oracle, lse = reference_sdpa(*wide, **options)
    grad_out = torch.randn(out.shape, dtype=torch.float64)
    outs = (out, oracle, reference_sdpa(*similar, **options)[0])
    actual, expected, yardstick = (gradients(o, some, grad_out) for o, some in zip(outs, leaves))
    assert_gradients_close(actual, expected, yardstick, lse, case.dtype)


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


QUERY, KEY, VALUE = _tensor(2, 4, 5, 8), _tensor(2, 4, 7, 8), _tensor(2, 4, 7, 6)
# Each breaks one argument of a legal call.
ILLEGAL: list[dict[str, Any]] = [
    {"query": None}, {"query": [[1.0]]}, {"query": 3}, {"key": None}, {"value": "value"}, {"attn_mask": [[True]]},
    {"attn_mask": 1}, {"query": QUERY.int()}, {"query": QUERY.double()}, {"key": KEY.half()},
    {"query": QUERY.to(torch.complex64)}, {"value": VALUE.bfloat16()}, {"query": _tensor(8)}, {"key": _tensor(8)},
    {"query": torch.tensor(1.0)}, {"key": torch.tensor(1.0)}, {"query": _tensor(2, 4, 5, 9)},
    {"key": _tensor(2, 4, 7, 9)}, {"value": _tensor(2, 4, 8, 6)}, {"query": _tensor(3, 4, 5, 8)},
    {"key": _tensor(3, 4, 7, 8)},
    {"query": _tensor(2, 6, 5, 8)}, {"key": _tensor(2, 3, 7, 8)}, {"value": _tensor(2, 3, 7, 6), "enable_gqa": True},
    {"query": _tensor(2, 6, 5, 8), "enable_gqa": True}, {"query": _tensor(5, 8)}, {"query": QUERY.to("meta")},
    {"value": VALUE.to("meta")}, {"attn_mask": _tensor(5, 8)}, {"attn_mask": _tensor(4, 7)},
    {"attn_mask": _tensor(3, 1, 5, 7)}, {"attn_mask": _tensor(1, 2, 4, 5, 7)}, {"attn_mask": _tensor(5, 7).int()},
    {"attn_mask": _tensor(5, 7).to("meta")}, {"attn_mask": _tensor(5, 7, dtype=torch.uint8)},
    {"dropout_p": -0.1}, {"dropout_p": 1.1}, {"dropout_p": float("nan")}, {"dropout_p": "0.5"},
    {"scale": float("inf")}, {"scale": float("nan")}, {"scale": "small"}, {"scale": [1.0, 2.0]},
    {"alignment": "lower_left"}, {"alignment": None}, {"window": 5}, {"window": (1,)}, {"window": (1, 2, 3)},
    {"window": (-2, 1)}, {"window": (1, "2")}, {"window": (1.5, 2)}, {"window": ("a", "b")},
]  # fmt: skip
ILLEGAL_ROUTES = [None, AttentionConfig(route="tiled"), AttentionConfig(route="math"), AttentionConfig(route="torch")]
REFUSALS = (TypeError, ValueError, UnsupportedAttention)


@pytest.mark.parametrize("broken", ILLEGAL, ids=lambda broken: ", ".join(f"{k} {_words(v)}" for k, v in broken.items()))
@pytest.mark.parametrize("config", ILLEGAL_ROUTES, ids=["default", "tiled", "math", "torch"])
def test_an_illegal_call_is_refused_in_our_words(broken: dict[str, Any], config: AttentionConfig | None) -> None:
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **broken}
    with pytest.raises(REFUSALS) as caught:
        sdpa(**arguments, config=config)
    assert _raised_by_us(caught), f"raised outside of pascal_attn_core: {caught.value!r}"
    assert str(caught.value)


def _words(value: Any) -> str:
    return f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _raised_by_us(caught: pytest.ExceptionInfo) -> bool:
    return "pascal_attn_core" in str(caught.traceback[-1].path)


@settings(max_examples=600, **FUZZ)
@given(
    broken=st.lists(st.sampled_from(ILLEGAL), min_size=1, max_size=3),
    config=st.sampled_from(ILLEGAL_ROUTES),
    is_causal=st.booleans(),
    with_lse=st.booleans(),
)
def test_random_illegal_calls_raise_nothing_else(broken, config, is_causal, with_lse) -> None:
    arguments = {"query": QUERY.clone(), "key": KEY.clone(), "value": VALUE.clone(), "is_causal": is_causal}
    for change in broken:
        arguments |= change
    attend = sdpa_with_lse if with_lse else sdpa
    try:
        attend(**arguments, config=config)
    except REFUSALS:
        pass
    else:  # two wrongs can make a right: a query and a key of another head_dim each
        assert len(broken) > 1
    assert torch.equal(QUERY, torch.ones_like(QUERY))


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        ({"query": _tensor(2, 4, 5, 9)}, ValueError, r"head_dim of query and key must be equal, got 9 and 8"),
        ({"value": _tensor(2, 4, 8, 6)}, ValueError, r"same number of tokens, got 7 and 8"),
        ({"query": _tensor(2, 8, 5, 8)}, ValueError, r"pass enable_gqa=True"),
        ({"key": KEY.half()}, TypeError, r"one dtype, got torch.float32, torch.float16"),
        ({"query": QUERY.to("meta")}, ValueError, r"one device, got meta, cpu and cpu"),
        ({"attn_mask": _tensor(5, 8)}, ValueError, r"broadcast to \(2, 4, 5, 7\), got \(5, 8\)"),
        ({"attn_mask": _tensor(5, 7).int()}, TypeError, r"bool or one of .*, got torch.int32"),
        ({"dropout_p": 1.1}, ValueError, r"from 0 to 1, got 1.1"),
        ({"scale": float("nan")}, ValueError, r"finite, got nan"),
        ({"alignment": "lower_left"}, ValueError, r"\['upper_left', 'lower_right'\], got 'lower_left'"),
        ({"window": (-2, 1)}, ValueError, r"at least 0, or -1 for no bound, got \(-2, 1\)"),
    ],
    ids=str,
)
def test_refusals_say_what_came_and_what_is_expected(what: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        sdpa(**{"query": QUERY, "key": KEY, "value": VALUE, **what})
