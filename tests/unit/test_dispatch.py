"""Which route a call takes, and that it says so."""

from __future__ import annotations

import logging

import pytest
import torch

from pascal_attn_core import (
    AttentionConfig,
    UnsupportedAttention,
    dispatch,
    explain,
    record,
    routes,
    sdpa,
    sdpa_with_lse,
)
from pascal_attn_core.call import check_call
from pascal_attn_core.config import ROUTES
from pascal_attn_core.routes import choose, why_not

AUTO = AttentionConfig()


def _route(*tensors: torch.Tensor, config: AttentionConfig = AUTO, **options) -> str:
    return choose(check_call(*tensors, **options), config).route


def _qkv(length: int = 300, keys: int = 300, heads: int = 2, kv_heads: int = 2) -> list[torch.Tensor]:
    return [torch.randn(1, h, n, 8) for h, n in ((heads, length), (kv_heads, keys), (kv_heads, keys))]


@pytest.mark.parametrize("route", ["tiled", "torch", "math"])
def test_a_route_asked_for_by_name_is_taken(route: str) -> None:
    with record() as report:
        sdpa(*_qkv(), config=AttentionConfig(route=route))
    assert report.routes() == {route: 1}


def test_a_route_that_cannot_take_the_call_says_why() -> None:
    with pytest.raises(UnsupportedAttention) as caught:
        sdpa(*_qkv(), config=AttentionConfig(route="math", math_limit_mib=0.5))
    assert caught.value.reasons == ["its score matrix of 0.7 MiB is above math_limit_mib 0.5"]
    with pytest.raises(UnsupportedAttention) as caught:
        sdpa_with_lse(*_qkv(), config=AttentionConfig(route="torch"))
    assert caught.value.reasons == ["torch's function does not return lse"]


def test_the_fused_kernel_needs_a_gpu() -> None:
    with pytest.raises(UnsupportedAttention) as caught:
        sdpa(*_qkv(), config=AttentionConfig(route="fused"))
    assert caught.value.reasons


def test_tiled_takes_every_call() -> None:
    for options in ({}, {"window": (1, 2)}, {"is_causal": True, "alignment": "lower_right"}, {"dropout_p": 0.5}):
        assert why_not("tiled", check_call(*_qkv(), **options), AUTO) == []
    with pytest.raises(ValueError, match="route must be one of"):
        why_not("flash", check_call(*_qkv()), AUTO)


def test_auto_never_takes_a_route_with_a_reason_against_it() -> None:
    masks = (None, torch.ones(300, 300, dtype=torch.bool), torch.zeros(300, 300), torch.zeros(300, 300).double())
    for mask in masks:
        for options in ({}, {"is_causal": True}, {"window": (5, 5)}, {"dropout_p": 0.2}):
            for with_lse in (False, True):
                call = check_call(*_qkv(), mask, **options)
                route = choose(call, AUTO, with_lse=with_lse).route
                assert why_not(route, call, AUTO, with_lse=with_lse) == []


def test_large_calls_never_take_the_route_math(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "find_form", lambda *args, **options: ["no fused kernel"])
    assert _route(*_qkv(2000, 2000)) == "tiled"
    assert _route(*_qkv(20, 20)) == "math"
    assert _route(*_qkv(20, 20), config=AttentionConfig(math_limit_mib=0)) == "tiled"


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 2)}], ids=str)
def test_explain_names_the_route_that_runs_and_every_other(options: dict) -> None:
    inputs = _qkv(heads=4, kv_heads=2)
    text = explain(*inputs, enable_gqa=True, **options)
    with record() as report:
        sdpa(*inputs, enable_gqa=True, **options)
    (route,) = report.routes()
    assert text.startswith(f"route {route}: ")
    assert all(f"  {other}: " in text for other in ROUTES if other != route)
    assert len(text.splitlines()) == len(ROUTES)


def test_explain_runs_nothing() -> None:
    query = torch.empty(1, 12, 32760, 128, device="meta")
    assert "route" in explain(query, query, query)


def test_one_line_per_reason_and_never_per_call(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(routes, "find_form", lambda *args, **options: ["a reason of this test"])
    routes._warn_once.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="pascal_attn"):
        for _ in range(3):
            sdpa(*_qkv(), config=AttentionConfig(math_limit_mib=0))
    lines = [record.getMessage() for record in caplog.records if "a reason of this test" in record.getMessage()]
    assert len(lines) <= 1


def test_short_calls_are_handed_to_torch_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(dispatch, "run_as_it_is", lambda call: seen.append(call) or call.query)
    query = torch.randn(1, 2, 8, 8)
    sdpa(query, query, query)
    sdpa(query, query, query, is_causal=True)
    assert len(seen) == 2
    others = [{"window": (1, 1)}, {"is_causal": True, "alignment": "lower_right", "window": (1, 1)}, {"scale": -1.0}]
    others += [{"config": AttentionConfig(route="tiled")}, {"config": AttentionConfig(math_limit_mib=0)}]
    for options in others:
        sdpa(query, query, query, **options)
    assert len(seen) == 2
