"""Which route a call takes, and that it says so; arguments that are checked once."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, patch_transformers, record
from pascal_attn_core.attention import sdpa, sdpa_backward, sdpa_with_lse
from pascal_attn_core.call import AttentionCall, Gradients, Results, Wanted, check_call
from pascal_attn_core.config import RouteUnavailable, known_routes
from pascal_attn_core.diffusers import PascalAttnProcessor
from pascal_attn_core.flex import flex_attention, patch_flex_attention
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import choose, route_names, run, why_not
from pascal_attn_core.routes.route import Choice, Request, Route
from pascal_attn_core.routes.run import ROUTES, TORCH
from pascal_attn_core.routes.short import ShortCalls
from pascal_attn_core.routes.tiled import Rewritten

AUTO = AttentionConfig()


def _route(*tensors: torch.Tensor, config: AttentionConfig = AUTO, **options) -> str:
    return choose(check_call(*tensors, **options), config).route


def _qkv(length: int = 300, keys: int = 300) -> list[torch.Tensor]:
    return [torch.randn(1, 2, tokens, 8) for tokens in (length, keys, keys)]


def test_a_route_that_cannot_take_the_call_says_why() -> None:
    with pytest.raises(UnsupportedAttention) as caught:
        sdpa(*_qkv(), config=AttentionConfig(route="math", math_limit_mib=0.5))
    assert caught.value.reasons == ["its score matrix of 0.7 MiB is above math_limit_mib 0.5"]
    with pytest.raises(UnsupportedAttention) as caught:
        sdpa_with_lse(*_qkv(), config=AttentionConfig(route="torch"))
    assert caught.value.reasons == ["torch's function does not return lse"]
    assert str(caught.value).startswith("route 'torch' cannot take this call: torch's function does not return lse; ")
    assert isinstance(caught.value, NotImplementedError)


def test_the_table_of_the_choice_has_every_route_in_its_order_and_its_sentence() -> None:
    rows = [re.split(r"  +", line) for line in run.__doc__.splitlines() if re.match(r"[A-Z]\w+  +[a-z]", line)]
    names = {ShortCalls: "torch, math", Rewritten: "tiled"}
    assert [row[:2] for row in rows] == [[type(each).__name__, names.get(type(each), each.name)] for each in run.ROUTES]
    sentences = {row[0]: row[3].partition(",")[0] for row in rows}
    small, large = check_call(*_qkv(20, 20)), check_call(*_qkv(2000, 2000))
    banded, left = (check_call(*_qkv(tokens, tokens), window=(2, 2)) for tokens in (20, 2000))
    for asked, call in {"ShortCalls": small, "TorchRoute": large, "MathRoute": banded}.items():
        assert all(part.strip() in choose(call, AUTO).why for part in sentences[asked].split("..."))
    assert choose(left, AUTO).why == why_not("torch", left, AUTO)[0]


def test_large_calls_never_take_the_route_math(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TORCH, "plan", lambda request: ["no fused kernel"])
    assert _route(*_qkv(2000, 2000)) == "tiled"
    assert _route(*_qkv(20, 20), window=(2, 2)) == "math"
    assert _route(*_qkv(20, 20), window=(2, 2), config=AttentionConfig(math_limit_mib=0)) == "tiled"


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 2)}], ids=str)
def test_explain_names_the_route_that_runs_and_every_other(options: dict) -> None:
    inputs = [torch.randn(1, heads, 300, 8) for heads in (4, 2, 2)]
    text = explain(*inputs, enable_gqa=True, **options)
    with record() as report:
        sdpa(*inputs, enable_gqa=True, **options)
    (route,) = report.routes()
    assert text.startswith(f"route {route}: ")
    assert all(f"  {other}: " in text for other in route_names() if other != route)
    assert len(text.splitlines()) == len(route_names())


def test_one_line_per_reason_and_never_per_call(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(TORCH, "plan", lambda request: ["a reason of this test"])
    with caplog.at_level(logging.DEBUG, logger="pascal_attn"):
        for _ in range(3):
            sdpa(*_qkv(), dropout_p=0.1, config=AttentionConfig(math_limit_mib=0))
    lines = [record.getMessage() for record in caplog.records if "a reason of this test" in record.getMessage()]
    assert len(lines) == 1


SHORT = [{}, {"is_causal": True}, {"attn_mask": torch.rand(8, 8) < 0.8}, {"scale": 0.3}]
NOT_SHORT = [
    {"window": (1, 1)}, {"is_causal": True, "alignment": "lower_right", "window": (1, 1)}, {"scale": -1.0},
    {"config": AttentionConfig(route="tiled")}, {"config": AttentionConfig(math_limit_mib=0)}, {"softcap": 5.0},
    {"is_causal": True, "attn_mask": torch.rand(8, 8) < 0.8}, {"sinks": torch.zeros(2)},
]  # fmt: skip


@pytest.mark.torch_2_5
@pytest.mark.parametrize("options", [*SHORT, *NOT_SHORT], ids=lambda options: "-".join(options) or "plain")
def test_short_calls_go_to_torch_as_they_are_watched_or_not(options: dict) -> None:
    query = torch.randn(1, 2, 8, 8)
    with record() as report:
        watched = sdpa(query, query, query, **options)
    (call,) = report.calls
    assert ("torch's function as it is" in call.why) == (options in SHORT)
    assert torch.equal(sdpa(query, query, query, **options), watched)


@pytest.mark.parametrize("name", ["grad_out", "out", "lse", "grad_lse"])
def test_results_that_do_not_fit_are_refused_by_sdpa_backward(name: str) -> None:
    query, key, value = _qkv(40, 50)
    out, lse = sdpa_with_lse(query, key, value)
    given = {"grad_out": torch.randn_like(out), "query": query, "key": key, "value": value, "out": out, "lse": lse}
    right = given.get(name, given["lse"])
    for wrong in (right.long(), "out", *([None] if name != "grad_lse" else [])):
        with pytest.raises(TypeError, match=f"{name} must be a float tensor, got"):
            sdpa_backward(**{**given, name: wrong})
    for wrong in (right[:, :1], right.to("meta")):
        with pytest.raises(ValueError, match=f"{name} must have shape .* on cpu, got"):
            sdpa_backward(**{**given, name: wrong})
    expected = sdpa_backward(**{**given, name: right})
    for other in (right.double(), torch._neg_view(-right)):
        torch.testing.assert_close(sdpa_backward(**{**given, name: other}), expected)


_KEYS_ONLY = (torch.arange(256) < 200)[None, None, None]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((8, 2, 1, 4096, 64), {"enable_gqa": True}), ((8, 2, 1, 9000, 128), {"enable_gqa": True}),
     ((2, 2, 1024, 77, 64), {}), ((2, 2, 256, 256, 64), {"attn_mask": _KEYS_ONLY})],
)  # fmt: skip
def test_watching_changes_neither_bits_nor_route(sizes: tuple[int, ...], options: dict) -> None:
    """Score matrices below the limit, which the routes tiled and torch compute with different bits."""
    heads, kv_heads, queries, keys, dim = sizes
    tensors = [torch.randn(1, heads, queries, dim), *torch.randn(2, 1, kv_heads, keys, dim)]
    with torch.no_grad():
        unwatched = sdpa(*tensors, **options)
        with record() as report:
            watched = sdpa(*tensors, **options)
    assert torch.equal(unwatched, watched)
    (key,) = report.calls
    assert explain(*tensors, **options).startswith(f"route {key.route}: {key.why}")


class PlainRoute(Route):
    """A route as somebody would add one: plain attention, which may find while running that it cannot (``fails``)."""

    name = "plain"

    def __init__(self) -> None:
        self.fails, self.ran = False, []

    def plan(self, request: Request) -> Any:
        if self.fails and self.ran:
            return ["it has failed"]
        return ["it has no masks"] if request.call.attn_mask is not None else {"scale": request.call.scale}

    def claim(self, request: Request) -> Choice | None:
        plan = request.plan(self)
        return None if isinstance(plan, list) else Choice(self, "it comes first", plan)

    def forward(self, call: AttentionCall, config: AttentionConfig, plan: Any, **options: Any) -> Results:
        self.ran.append(options)
        if self.fails:
            raise RouteUnavailable("it cannot")
        return Results(*reference_sdpa(call.query, call.key, call.value, scale=plan["scale"]))

    def backward(
        self, call: AttentionCall, config: AttentionConfig, plan: Any, saved: Results, wanted: Wanted
    ) -> Gradients:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
            out = reference_sdpa(*leaves, scale=plan["scale"])[0]
        return Gradients(*torch.autograd.grad(out, leaves, wanted.grad_out))


@pytest.fixture
def plain_route() -> Iterator[PlainRoute]:
    route = PlainRoute()
    ROUTES.insert(ROUTES.index(TORCH), route)
    known_routes.append(route.name)
    yield route
    ROUTES.remove(route)
    known_routes.remove(route.name)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_route_is_added_by_adding_an_element(plain_route: PlainRoute, compiled: bool) -> None:
    """It is chosen, named, explained, recorded, differentiated and compiled like the others."""
    attend = torch.compile(sdpa, backend="aot_eager", fullgraph=True) if compiled else sdpa
    tensors = [t.requires_grad_() for t in _qkv(900, 900)]
    for config in (AttentionConfig(), AttentionConfig(route="plain")):
        with record() as report:
            out = attend(*tensors, config=config)
        assert report.routes() == {"plain": 1}
        grads = torch.autograd.grad(out.square().sum(), tensors)
        expected = reference_sdpa(*tensors)[0]
        torch.testing.assert_close(out, expected)
        for ours, right in zip(grads, torch.autograd.grad(expected.square().sum(), tensors)):
            torch.testing.assert_close(ours, right)
    assert all(options["for_grad"] for options in plain_route.ran)
    assert explain(*tensors).startswith("route plain: it comes first\n")
    mask = torch.ones(900, 900, dtype=torch.bool)
    assert why_not("plain", check_call(*tensors, mask), AUTO) == ["it has no masks"]
    with pytest.raises(UnsupportedAttention, match="it has no masks"):
        sdpa(*tensors, mask, config=AttentionConfig(route="plain"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_is_counted_once_even_when_its_route_turns_out_to_be_unavailable(plain_route, compiled: bool) -> None:
    plain_route.fails = True
    torch.compiler.reset()  # a graph that another test could not make would be left out here
    attend = torch.compile(sdpa, backend="aot_eager", fullgraph=True) if compiled else sdpa
    tensors = [t.requires_grad_() for t in _qkv(700, 700)]
    with record() as report:
        attend(*tensors)
    assert len(plain_route.ran) == report.total == 1
    assert report.routes() == {"torch": 1}


@pytest.mark.parametrize("length", [20, 800])
@pytest.mark.parametrize("config", ["tiled", {"route": "tiled"}, AttentionConfig], ids=str)
def test_a_config_of_another_type_is_refused(config, length: int) -> None:
    query, key, value = _qkv(length, length)
    backward = (value, query, key, value, *sdpa_with_lse(query, key, value))
    for attend in (sdpa, sdpa_with_lse, explain, sdpa_backward):
        given = backward if attend is sdpa_backward else backward[1:4]
        with pytest.raises(TypeError, match="config must be an AttentionConfig or None, got"):
            attend(*given, config=config)


@pytest.mark.parametrize("door", [
    lambda config: flex_attention(*_qkv(), config=config),
    lambda config: patch_flex_attention(config),
    lambda config: patch_transformers(config=config),
    lambda config: PascalAttnProcessor(config),
])  # fmt: skip
def test_every_other_door_refuses_it_too(door) -> None:
    with pytest.raises(TypeError, match="config must be an AttentionConfig or None, got 'tiled'"):
        door("tiled")
