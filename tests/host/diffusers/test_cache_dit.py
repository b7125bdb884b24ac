"""cache-dit, which skips blocks of a diffusers transformer in some steps: the same image with our attention as without
it, whichever was put on first. Skipped where it is not installed."""

from __future__ import annotations

import pytest

cache_dit = pytest.importorskip("cache_dit", reason="cache-dit is not installed")


@pytest.mark.parametrize("is_ours_first", [False, True])
def test_steps_that_cache_dit_skips_give_its_stock_output(is_ours_first: bool, put_on, tiny, routed, assert_same):
    options = cache_dit.DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=100.0, max_warmup_steps=1)
    stock_case, case = tiny.flux(), tiny.flux()
    for each in (stock_case, case):
        each.arguments["num_inference_steps"] = 6
    take_off = put_on(case.denoiser)
    case.run()
    whole = len(routed)
    take_off()
    cache_dit.enable_cache(stock_case.pipe, cache_config=options)
    stock = stock_case.run()
    if is_ours_first:
        put_on(case.denoiser)
    cache_dit.enable_cache(case.pipe, cache_config=options)
    if not is_ours_first:
        put_on(case.denoiser)
    routed.clear()
    assert_same(case.run(), stock)
    assert 0 < len(routed) < whole
