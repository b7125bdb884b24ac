"""These tests check what ran, by which route and why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core.observe.report import mask_kind

TILED = AttentionConfig(route="tiled")


def _call(length: int = 70, **options) -> None:
    query = torch.randn(1, 2, length, 8)
    sdpa(query, query, query, **options)


def test_calls_of_one_kind_are_counted_together() -> None:
    with record() as report:
        for _ in range(3):
            _call(config=TILED)
        _call(is_causal=True, config=TILED)
        _call(40, config=AttentionConfig(route="math"))
    assert sorted(stats.count for stats in report.calls.values()) == [1, 1, 3]
    assert report.routes() == {"tiled": 4, "math": 1}
    assert list(report.routes()) == ["tiled", "math"]


def test_blocks_say_how_many_were_bounded() -> None:
    with record() as report:
        _call(config=TILED)
        _call(config=AttentionConfig(route="tiled", softmax="online"))
    assert "bounded: " in report.text()
    with record() as nothing:
        pass
    assert nothing.total == 0
    assert str(nothing) == nothing.text() == "0 attention calls"


def test_the_text_has_shapes_mask_route_and_reason() -> None:
    with record() as report:
        _call(window=(3, 4), config=TILED)
    text = report.text()
    assert "1 attention calls: 1 tiled" in text
    assert "q[1, 2, 70, 8] k[1, 2, 70, 8] float32 mask window (3, 4)" in text
    assert "asked for by name" in text


def test_reports_can_be_nested_and_see_other_threads() -> None:
    with record() as outer:
        _call()
        with record() as inner, ThreadPoolExecutor(1) as pool:
            pool.submit(_call).result()
        _call()
    assert (outer.total, inner.total) == (3, 1)


def test_masks_in_words() -> None:
    mask = torch.ones(1, 1, 1, 77, dtype=torch.bool)
    assert mask_kind(None, is_causal=False, left=None, right=None) == "none"
    assert mask_kind(mask, is_causal=False, left=None, right=None) == "bool [1, 1, 1, 77]"
    assert mask_kind(None, is_causal=True, left=None, right=0) == "causal"
    assert mask_kind(mask.float(), is_causal=False, left=8, right=None) == "float32 [1, 1, 1, 77] window (8, -1)"
