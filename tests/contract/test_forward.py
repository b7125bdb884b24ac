"""Every route gives the answer of the definition, for every kind of call that it takes, and refuses the others."""

import collections
import re

import pytest
from attn_support.oracle import assert_close, exact, plain, plain_dtype
from attn_support.randomness import some
from attn_support.table import BY_TORCH, ROUTES, TABLE, Case, on_mps, routes_for

from pascal_attn_core import UnsupportedAttention, sdpa
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.routes import choose, why_not

BY_NAME = {case.name: case for case in TABLE}
# A call of the table, and why the route does not take it.
REFUSED = {
    "torch": [
        ("grouped", "torch has no fused kernel for GQA or this call on this device"),
        ("square, window (9, 4)", "torch's function has no sliding window"),
        ("grouped, causal, bool [B, H, L, S]", "torch takes attn_mask or is_causal, not both"),
        ("square, scale 0", "torch's fused kernels need a positive scale, got 0"),
        ("square, scale -0.7", "torch's fused kernels need a positive scale, got -0.7"),
        ("no queries", "the call is empty"),
        ("no head_dim", "torch has no fused kernel for this call on this device"),
        ("square, float64 mask", "no attn_mask of torch.float64 with a query of torch.float32"),
        ("square, float16 mask", "no attn_mask of torch.float16 with a query of torch.float32"),
        ("square, bfloat16 mask", "no attn_mask of torch.bfloat16 with a query of torch.float32"),
        ("square, float64 float32 mask", "torch's fused kernels misread masks of another float type"),
        ("grouped, causal lower right", "torch's is_causal is upper-left only"),
        ("more batch dimensions in key", "torch's kernel needs leading dimensions that merge without a copy"),
    ],
    "math": [("no queries", "the call is empty")],
}
# Said of 16-bit calls by processors without kernels for them.
ON_SOME_PROCESSORS = re.compile(r"no fused b?float16 kernel on|on this device, in b?float16 or float32")


def _why_not(route: str, call: AttentionCall) -> list[str]:
    return [] if route == "auto" else why_not(ROUTES[route].route, call, ROUTES[route])


@pytest.mark.parametrize(
    ("device", "case"),
    some([("cpu", case) for case in TABLE] + [("mps", case) for case in on_mps(TABLE)], 3),
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_every_route_gives_the_answer_of_the_definition(device: str, case: Case) -> None:
    inputs, options = case.build()
    oracle, _ = exact(inputs, options)
    dtypes = {by_torch: plain_dtype(case.dtype, as_torch=by_torch) for by_torch in (False, True)}
    similar = {dtype: plain(inputs, options, dtype)[0] for dtype in set(dtypes.values())}
    inputs, _ = case.build(device=device)
    for route in routes_for(case) if device == "cpu" else [route for route in ROUTES if ROUTES[route].route == "tiled"]:
        out = sdpa(*inputs, **options, config=ROUTES[route])
        assert out.dtype == case.dtype
        assert_close(out.cpu(), oracle, similar[dtypes[route in BY_TORCH]], f"out by {route}", dtype=case.dtype)


@pytest.mark.parametrize(("route", "name", "reason"), [(r, *row) for r, rows in REFUSED.items() for row in rows])
def test_a_call_that_a_route_does_not_take_is_refused_with_the_reason(route: str, name: str, reason: str) -> None:
    inputs, options = BY_NAME[name].build()
    with pytest.raises(UnsupportedAttention, match=re.escape(reason)) as caught:
        sdpa(*inputs, **options, config=ROUTES[route])
    assert caught.value.reasons == _why_not(route, check_call(*inputs, **options))


@pytest.mark.torch_2_5
def test_routes_take_as_much_of_the_table_as_they_can() -> None:
    """This is what the tests above compare, and that nothing is refused for a reason that they do not know."""
    taken: dict[str, collections.Counter[str]] = {route: collections.Counter() for route in ROUTES}
    empty = 0
    for case in TABLE:
        inputs, options = case.build()
        call = check_call(*inputs, **options)
        for route in ROUTES:
            reasons = _why_not(route, call)
            taken[route]["refused" if reasons else "taken"] += 1
            known = [reason for _, reason in REFUSED.get(route, [])]
            for reason in reasons:
                assert any(words in reason for words in known) or ON_SOME_PROCESSORS.search(reason), (case.name, reason)
        empty += call.is_empty
        taken["auto"][choose(call, ROUTES["auto"]).route] += 1
    assert all(taken[route]["refused"] == 0 for route in ROUTES if ROUTES[route].route in ("auto", "tiled"))
    assert taken["math"]["refused"] == empty > 0
    assert taken["torch"]["taken"] > 200
    assert taken["auto"]["tiled"] > 150
    assert taken["auto"]["torch"] > 150
