"""Every route gives the answer of the definition, for every kind of call."""

from __future__ import annotations

import pytest
import torch
from attn_support.oracle import assert_close, exact, plain, plain_dtype
from attn_support.table import BY_TORCH, ROUTES, TABLE, Case

from pascal_attn_core import UnsupportedAttention, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.routes import why_not


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_every_route_gives_the_answer_of_the_definition(case: Case, route: str) -> None:
    inputs, options = case.build()
    config = ROUTES[route]
    reasons = [] if config.route == "auto" else why_not(config.route, check_call(*inputs, **options), config)
    if reasons:
        with pytest.raises(UnsupportedAttention) as caught:
            sdpa(*inputs, **options, config=config)
        assert caught.value.reasons == reasons
        return
    out = sdpa(*inputs, **options, config=config)
    oracle, _ = exact(inputs, options)
    similar, _ = plain(inputs, options, plain_dtype(case.dtype, as_torch=route in BY_TORCH))
    assert out.dtype == case.dtype
    assert_close(out, oracle, similar, "out", dtype=case.dtype)


@pytest.mark.parametrize("route", ["auto", "tiled", "online", "small_tiles"])
@pytest.mark.parametrize("case", TABLE[::3], ids=lambda case: case.name)
def test_lse_is_the_log_of_the_denominator(case: Case, route: str) -> None:
    inputs, options = case.build()
    out, lse = sdpa_with_lse(*inputs, **options, config=ROUTES[route])
    oracle, oracle_lse = exact(inputs, options)
    similar, similar_lse = plain(inputs, options, plain_dtype(case.dtype))
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_close(out, oracle, similar, "out", dtype=case.dtype)
    assert_close(lse, oracle_lse, similar_lse, "lse", dtype=case.dtype)
