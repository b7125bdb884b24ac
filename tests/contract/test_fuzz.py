"""Random calls: legal ones against float64, illegal ones refused by us, in our words.

The number of a legal one is all of it: ``attn_support.fuzz.calls`` draws it, ``check`` makes it and compares.
"""

import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import GXX
from attn_support.fuzz import check
from attn_support.fuzz.calls import DTYPES, RULES, Call, Mask, draw
from attn_support.fuzz.check import TORCH, failure
from attn_support.randomness import some
from torch.nn.attention.bias import causal_lower_right

from pascal_attn_core import AttentionConfig, explain, sdpa, sdpa_with_lse


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The calls in shares, for as many processes as there are."""
    if "share" in metafunc.fixturenames:
        first, count = _numbers(metafunc.config)
        shares = min(20, count)
        ranges = [range(first + i, first + count, shares) for i in range(shares)]
        metafunc.parametrize("share", ranges, ids=[f"from {numbers[0]}" for numbers in ranges])


def _numbers(config: pytest.Config) -> tuple[int, int]:
    """(first, count)"""
    return config.getoption("fuzz_first"), config.getoption("fuzz_calls")


def _run(calls: Iterable[Call], device: str = "cpu") -> None:
    """Make them all; fail with the first wrong ones and how to repeat each."""
    wrong = ((call, what) for call in calls if (what := failure(call, device)))
    lines = [
        f"call {call.number}: {what}\n  {call}\n"
        f"  again: python -m pytest tests/contract/test_fuzz.py --fuzz-first {call.number} --fuzz-calls 1"
        for call, what in islice(wrong, 5)
    ]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_random_calls_give_the_answers_of_the_definition(share: range) -> None:
    _run(draw(number) for number in share)
    assert F.scaled_dot_product_attention is TORCH


TILED: dict[str, Any] = {"route": "tiled"}
LONG: dict[str, Any] = {"math_limit_mib": 0}
PLAIN, VIEWS = "contiguous", ("query", "key", "value")
EVERY_SECOND_COLUMN = Mask("-1e9 padding", dtype="float64", layout="every second column")
# Found by random calls, made as simple as they go; none of the first 2,000 calls is like some of them.
ONCE_WRONG = [
    Call(1, dtype="float16", keys=2, layouts=("negated", PLAIN, PLAIN), config=TILED),
    Call(2, dtype="float16", keys=2, layouts=(PLAIN, PLAIN, "negated"), config=TILED),
    Call(3, heads=(0, 0, 0), sinks="large", wants="s"),
    Call(4, batch=(2, 2), mask=Mask("bool rule of all"), config=TILED),
    Call(5, batch=(2, 1, 2), mask=Mask("float rule with -inf", dtype="float32"), wants="qkv", config=LONG),
    Call(6, rows=40, keys=70, width_v=0, entry="lse"),
    Call(7, rows=40, keys=70, width_v=0, sinks="normal", entry="lse", wants="qks", through="lse"),
    Call(8, rows=6, mask=Mask("bool rule of blocks", keep="hs"), config=LONG),
    Call(9, rows=6, mask=Mask("float rule of distance", keep="bh", dtype="float32"), config=TILED),
    Call(10, batch=(2,), leads=("ones", "short", "full"), mask=Mask("bool left padding")),
    Call(11, "float32", (2,), (2, 1, 1), rows=2, keys=1, width=128, layouts=("rows one apart", PLAIN, PLAIN)),
    Call(12, keys=20, mask=Mask("-1e9 some rows", "ls", dtype="float32"), wants="qkv"),
    Call(13, keys=20, mask=Mask("finfo everywhere", "s", dtype="float32"), wants="qkv", config=LONG),
    Call(14, rows=300, keys=300, mask=Mask("bool", odd_bytes=True), config=TILED),
    Call(15, keys=20, mask=Mask("bool some rows empty"), sinks="all -inf", wants="qkvs"),
    Call(16, batch=(), matrices=True, sinks="normal", wants="qs", config=TILED),
    Call(17, mask=Mask("float rule of distance", dtype="float32", declared=False), config=TILED),
    Call(18, dtype="float16", keys=2, width=256, mask=Mask("-1e9 padding", keep="", dtype="float32"), wants="qkv"),
    Call(19, dtype="float16", keys=150, width=96, mask=Mask("finfo some rows", dtype="float16"), wants="qkv"),
    Call(20, rows=64, keys=2, width=1, mask=Mask("-1e4 some rows", "", dtype="float32"), wants="qkv", config=TILED),
    Call(21, "float32", (2, 2), leads=("short", "full", "full"), rows=20, layouts=(PLAIN, *["columns first"] * 2)),
    Call(22, "float64", (), matrices=True, rows=509, keys=1030, mask=EVERY_SECOND_COLUMN),
]


@pytest.mark.parametrize("call", ONCE_WRONG, ids=str)
def test_calls_that_once_went_wrong(call: Call) -> None:
    check.check(call)


IN_TILES: list[dict[str, Any]] = [{}, {"softmax": "online"}, {"trim_masks": False}, {"q_block": 48, "kv_block": 80}]
EVERY_ROUTE = [{}, LONG, {"route": "torch"}, {"route": "math", "math_limit_mib": 100}, *(TILED | c for c in IN_TILES)]


def _hard_calls() -> dict[str, Call]:
    """Kinds of calls that a kernel of torch, or a route of ours, once answered wrongly."""
    bytes_of = Call(30, batch=(2,), heads=(2, 1, 1), enable_gqa=True, rows=200, keys=260, width=16, wants="qkv")
    odd = [("bool some rows empty", "bhls"), ("bool some rows empty", "ls"), ("bool", "bs"), ("bool padding", "bs"),
           ("bool left padding", "bs"), ("bool blocks", "ls")]  # fmt: skip
    masks = [Mask(kind, keep, odd_bytes=True) for kind, keep in odd]
    found = {f"{mask.kind} [{mask.keep}], True is any byte": replace(bytes_of, mask=mask) for mask in masks}
    mask = Mask("bool", "bls", layout="columns first", odd_bytes=True)
    found["columns first, True is any byte"] = replace(bytes_of, dtype="float64", mask=mask)
    alike = Call(31, heads=(2, 2, 2), width=16, width_v=16, wants="qkv")
    for length in (16, 400):
        square = replace(alike, rows=length, keys=length)
        for low in ("-1e4", "-1e9", "finfo", "1e9"):
            mask = Mask(f"{low} some rows", "ls", dtype="float32")
            found[f"{length} rows, some of {low} only"] = replace(square, mask=mask)
            found[f"{length} rows, causal by {low}"] = replace(square, mask=replace(mask, kind=f"{low} causal"))
        for dtype, of_mask in (("float64", "float64"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"),
                               ("float16", "float16"), ("float16", "float32")):  # fmt: skip
            mask = Mask("-1e4 some rows", "ls", dtype=of_mask)
            found[f"{length} rows of {dtype}, mask of {of_mask}"] = replace(square, dtype=dtype, mask=mask)
    views = Call(32, "float32", (2,), (3, 3, 3), rows=40, keys=57, wants="qkv")
    for layout, name, dtype in product(("stride 0 tokens", "rows one apart", "overlapping rows"), VIEWS, DTYPES):
        layouts = tuple(layout if each == name else PLAIN for each in VIEWS)
        found[f"{layout} in {name} of {dtype}"] = replace(views, dtype=dtype, layouts=layouts)
    apart = Call(33, "float32", (2,), (2, 2, 2), keys=33, width=64)
    for layout, rows in product(("heads one apart", "batch one apart"), (20, 600)):
        found[f"{layout}, {rows} rows"] = replace(apart, rows=rows, layouts=(layout, PLAIN, PLAIN))
    return found


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in some(_hard_calls().items(), 16)])
def test_every_route_is_right_where_one_was_wrong(call: Call) -> None:
    calls = [replace(call, config=config) for config in EVERY_ROUTE] + [replace(call, entry="switch")]
    assert {str(each): what for each in calls if (what := failure(each))} == {}


@pytest.mark.gpu
def test_random_calls_on_a_card_give_the_answers_of_the_definition(share: range) -> None:
    calls = (draw(number) for number in share)
    routes = [*EVERY_ROUTE, {"route": "fused"}]
    chosen = (replace(call, config=routes[call.number % len(routes)]) for call in calls if call.dtype != "float64")
    _run(chosen, "cuda")


@pytest.mark.skipif(GXX is None, reason="needs g++ to build the emulation")
def test_random_calls_by_the_fused_kernels_give_the_answers_of_the_definition(pytestconfig) -> None:
    first, count = _numbers(pytestconfig)
    with emulated_card() as kernels:
        _run(filter(None, (_for_the_emulation(draw(number)) for number in range(first, first + count))))
    assert kernels.queued or count < 500


def _for_the_emulation(call: Call) -> Call | None:
    """The call by the fused route; None for most of them, since one takes as long as a hundred others."""
    units = max(1, len(call.batch)) * call.num_heads
    is_small = units * call.rows * call.keys <= 3000 and {call.width, call.width_v} <= {8, 16, 64}
    is_taken = call.dtype != "float64" and call.softcap is call.sinks is None and call.mask_kind not in RULES
    if not (is_small and is_taken) or call.entry.startswith("switch") or "m" in call.wants or call.is_empty:
        return None
    return replace(call, config={"route": "fused"}, explained=True)


def test_random_calls_from_many_threads_give_the_answers_of_the_definition() -> None:
    """Eight threads, each with calls of its own: direct, by the switch, with gradients."""
    wrong: list[str] = []

    def work(first: int) -> None:
        for number in range(first, first + 12):
            what = failure(replace(draw(number), dropout_p=0.0))
            if what:
                wrong.append(f"call {number}: {what}")

    threads = [threading.Thread(target=work, args=(1_000_000 + 12 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert F.scaled_dot_product_attention is TORCH


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
    {"attn_mask": _tensor(5, 7).to_sparse()}, {"attn_mask": _tensor(5, 7).bool().to_sparse()},
    {"attn_mask": _tensor(5, 7).bool().to("meta"), "value": _tensor(2, 4, 7, 8)},
    {"dropout_p": -0.1}, {"dropout_p": 1.1}, {"dropout_p": float("nan")}, {"dropout_p": "0.5"},
    {"scale": float("inf")}, {"scale": float("nan")}, {"scale": "small"}, {"scale": [1.0, 2.0]},
    {"scale": torch.tensor(0.5, requires_grad=True)}, {"scale": torch.nn.Parameter(torch.tensor(0.5))},
    {"alignment": "lower_left"}, {"alignment": None}, {"window": 5}, {"window": (1,)}, {"window": (1, 2, 3)},
    {"window": (-2, 1)}, {"window": (1, "2")}, {"window": (1.5, 2)}, {"window": ("a", "b")}, {"is_causal": 1},
    {"softcap": float("inf")}, {"softcap": 0.0}, {"softcap": torch.nn.Parameter(torch.tensor(0.5))},
    {"dropout_p": torch.nn.Parameter(torch.tensor(0.5))}, {"sinks": _tensor(3)}, {"sinks": _tensor(4).to("meta")},
    {"sinks": _tensor(4).int()}, {"attn_mask": causal_lower_right(5, 7), "is_causal": True},
    {"attn_mask": causal_lower_right(2, 4)},
]  # fmt: skip
ILLEGAL_ROUTES = [None, AttentionConfig(route="tiled"), AttentionConfig(route="math"), AttentionConfig(route="torch")]


@pytest.mark.parametrize("broken", ILLEGAL, ids=lambda broken: ", ".join(f"{k} {_words(v)}" for k, v in broken.items()))
def test_an_illegal_call_is_refused_in_our_words(broken: dict[str, Any]) -> None:
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **broken}
    for attend, config in product((sdpa, sdpa_with_lse, explain), ILLEGAL_ROUTES):
        with pytest.raises((TypeError, ValueError), match=r"(must|needs) .*, got ") as caught:
            attend(**arguments, config=config)
        assert "pascal_attn_core" in str(caught.traceback[-1].path), f"raised outside of it: {caught.value!r}"


def _words(value: Any) -> str:
    return f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
