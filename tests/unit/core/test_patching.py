"""One reversible change to a host; the one mode, binder and mark by which calls of torch's SDPA are intercepted."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attn_support.sdpa_switch import qkv
from torch.nn.functional import scaled_dot_product_attention as taken_by_name

from pascal_attn_core import AttentionConfig, Patch, sdpa, sdpa_with_lse
from pascal_attn_core.ffn import FfnReport
from pascal_attn_core.int8 import Int8Report
from pascal_attn_core.patching.interception import TORCH_SDPA, SdpaMode, torch_sdpa
from pascal_attn_core.patching.patch import ON, AnyReport, PatchGroup, PatchReport, State
from pascal_attn_core.vae import VaeReport

REPORTS = [PatchReport([State("blocks.0", ON)]), FfnReport([]), Int8Report([], 0.05, "host"), VaeReport([])]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_is_printed_as_its_text(report: AnyReport) -> None:
    assert str(report) == report.text()


def test_a_patch_is_active_until_it_is_removed_once_also_by_an_error_and_not_by_forgetting_it() -> None:
    undone = []
    Patch("forgotten", lambda: undone.append(1))
    assert undone == []
    patch = Patch("change", lambda: undone.append(1), sites=3)
    assert patch.active
    assert repr(patch) == "Patch('change', sites=3, active)"
    patch.remove()
    patch.remove()
    assert undone == [1]
    assert not patch.active
    assert repr(patch) == "Patch('change', sites=3, removed)"
    patch = Patch("change", lambda: None)
    with pytest.raises(KeyError), patch:
        {}["missing"]
    assert not patch.active


def test_a_finished_group_is_one_patch_and_one_that_fails_half_way_undoes_itself_backwards() -> None:
    undone = []

    def change() -> None:
        with PatchGroup("change") as group:
            for site in (1, 2):
                group.add(lambda site=site: undone.append(site))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    assert undone == [2, 1]
    undone = []
    with PatchGroup("change") as group:
        for site in (1, 2, 3):
            group.add(lambda site=site: undone.append(site) or [f"left {site}"])
    patch = group.patch()
    assert patch.sites == 3
    assert undone == []
    patch.remove()
    assert undone == [3, 2, 1]


def calls() -> Mock:
    """A handler that lets torch compute, and keeps what it was given."""
    return Mock(side_effect=lambda args, kwargs: TORCH_SDPA(*args, **kwargs))


@pytest.mark.parametrize(
    "spelling",
    [lambda *a, **k: F.scaled_dot_product_attention(*a, **k), taken_by_name, torch._C._nn.scaled_dot_product_attention],
    ids=["attribute", "taken by name", "torch._C"],
)
def test_every_spelling_reaches_the_handler_with_its_arguments(spelling: Any) -> None:
    q, k, v = qkv()
    expected = TORCH_SDPA(q, k, v, is_causal=True)
    with SdpaMode(handler := calls()):
        out = spelling(q, k, value=v, is_causal=True)
    assert torch.equal(out, expected)
    args, kwargs = handler.call_args.args
    assert args[0] is q
    assert args[1] is k
    assert kwargs == {"value": v, "is_causal": True}
    spelling(q, k, v)
    assert handler.call_count == 1


def test_other_threads_are_not_intercepted() -> None:
    q, k, v = qkv()
    with SdpaMode(handler := calls()), ThreadPoolExecutor(1) as pool:
        pool.submit(F.scaled_dot_product_attention, q, k, v).result()
    assert not handler.called


@pytest.mark.parametrize("depth", [1, 2])
def test_our_own_call_of_torch_is_not_intercepted_also_after_an_error(depth: int) -> None:
    q, k, v = qkv()
    expected = TORCH_SDPA(q, k, v)
    outer, inner = calls(), calls()
    with SdpaMode(outer), SdpaMode(inner) if depth == 2 else torch.no_grad():
        assert torch.equal(torch_sdpa(q, k, v), expected)
        with pytest.raises(RuntimeError):
            torch_sdpa(q, k[..., :5], v)
        assert not outer.called
        assert not inner.called
        F.scaled_dot_product_attention(q, k, v)
    assert outer.call_count == 1


@pytest.mark.parametrize("route", ["auto", "torch", "math", "tiled"])
@pytest.mark.parametrize("tokens", [8, 300])
def test_what_our_routes_call_of_torch_is_never_intercepted(route: str, tokens: int) -> None:
    q, k, v = qkv(tokens=tokens)
    config = AttentionConfig(route=route, math_limit_mib=0.1 if route == "auto" else 64)
    with SdpaMode(handler := calls()):
        sdpa(q, k, v, config=config)
        sdpa(q, k[:, :1], v[:, :1], enable_gqa=True, config=config)
        if route != "torch" and route != "math":
            sdpa_with_lse(q, k, v, config=config)
    assert not handler.called
