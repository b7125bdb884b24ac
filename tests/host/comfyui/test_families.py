"""Every family of diffusion model that the host loads, sampled over HTTP with and without the patch."""

from __future__ import annotations

import functools

import pytest
import torch
from attn_support.comfy.graph import (
    FAMILIES,
    Captured,
    attention_patch,
    capture,
    largest_difference,
    sample,
    sample_graph,
)
from attn_support.comfy.server import ComfyServer

OVERRIDE, WHOLE = "attention override", "whole model"
# Of the latent's largest value, after two steps in float32; krea2, whose attention is two tokens wide, comes to 7e-6.
ROUNDING = 2e-5

every_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)
every_route = pytest.mark.parametrize("route", ["auto", "torch", "tiled"])


@functools.cache
def stock(server: ComfyServer, family: str) -> Captured:
    """The unpatched run that all others of a family are compared with."""
    return sample(server, family)


@every_family
def test_the_unpatched_run_repeats_itself_bit_for_bit(server: ComfyServer, family: str) -> None:
    again = sample(server, family)
    for a, b in zip(again.tensors, stock(server, family).tensors):
        assert torch.equal(a, b)
    assert again.counts["sdpa"] == again.counts["wrapped"] > 0


@every_family
def test_a_wrong_attention_would_be_seen(server: ComfyServer, family: str) -> None:
    wrong = sample(server, family, ("ProbeOtherPatch", {"kind": "wrong", "tag": ""}))
    assert largest_difference(wrong, stock(server, family)) > 100 * ROUNDING


@every_route
@every_family
def test_the_override_gives_the_same_latent(server: ComfyServer, family: str, route: str) -> None:
    ours = sample(server, family, attention_patch(route=route, coverage=OVERRIDE))
    assert largest_difference(ours, stock(server, family)) < ROUNDING
    assert ours.run.taken == ours.run.calls > 0
    assert route == "auto" or set(ours.run.routes) == {route}
    # What the host still computes itself is what it did not announce.
    assert ours.counts["sdpa"] == ours.counts["wrapped"] - ours.run.taken


@every_route
@every_family
def test_whole_model_takes_every_call_that_the_model_makes(server: ComfyServer, family: str, route: str) -> None:
    ours = sample(server, family, attention_patch(route=route, coverage=WHOLE))
    assert largest_difference(ours, stock(server, family)) < ROUNDING
    assert ours.run.taken == ours.run.calls == stock(server, family).counts["sdpa"]
    assert not ours.says("attention override")


@every_route
@every_family
def test_a_host_without_sdpa_gives_the_same_latent(plain_server: ComfyServer, family: str, route: str) -> None:
    ours = sample(plain_server, family, attention_patch(route=route))
    assert largest_difference(ours, stock(plain_server, family)) < ROUNDING
    assert ours.run.taken == ours.run.calls > 0
    assert ours.run.taken <= stock(plain_server, family).counts["wrapped"]


@every_family
def test_whole_model_takes_every_call_where_the_host_has_no_sdpa(plain_server: ComfyServer, family: str) -> None:
    ours = sample(plain_server, family, attention_patch(coverage=WHOLE))
    assert largest_difference(ours, stock(plain_server, family)) < ROUNDING
    assert ours.run.taken == ours.run.calls >= stock(plain_server, family).counts["wrapped"]


@pytest.mark.parametrize("coverage", [OVERRIDE, WHOLE])
def test_small_calls_are_passed_bit_for_bit(server: ComfyServer, coverage: str) -> None:
    ours = sample(server, "sd15", attention_patch(min_keys=1024, coverage=coverage))
    assert ours.run.taken == 0
    assert ours.run.passed == ours.run.calls == stock(server, "sd15").counts["sdpa"]
    assert torch.equal(ours.tensors[0], stock(server, "sd15").tensors[0])


def test_min_keys_takes_self_attention_and_passes_cross_attention(server: ComfyServer) -> None:
    ours = sample(server, "sd15", attention_patch(min_keys=78))
    assert ours.run.taken == ours.run.passed == ours.run.calls // 2
    assert largest_difference(ours, stock(server, "sd15")) < ROUNDING


@pytest.mark.parametrize(("tile_size", "budget_mib"), [(16, 0), (0, 1), (48, 1)])
def test_tiles_and_budgets_do_not_change_the_latent(server: ComfyServer, tile_size: int, budget_mib: int) -> None:
    patch = attention_patch(route="tiled", tile_size=tile_size, budget_mib=budget_mib)
    ours = sample(server, "sd15", patch)
    assert ours.run.routes == {"tiled": ours.run.calls}
    assert largest_difference(ours, stock(server, "sd15")) < ROUNDING


def test_a_route_that_this_machine_has_not_falls_back_and_says_so(server: ComfyServer) -> None:
    ours = sample(server, "sd15", attention_patch(route="fused"))
    assert ours.says("route fused cannot take every call")
    assert ours.run.taken == ours.run.calls
    assert "fused" not in ours.run.routes
    assert largest_difference(ours, stock(server, "sd15")) < ROUNDING


def test_the_nan_guard_says_once_that_the_model_was_broken_before(server: ComfyServer) -> None:
    graph, latent = sample_graph("sd15", [attention_patch(), ("ProbeOtherPatch", {"kind": "nan", "tag": ""})], "nan")
    ours = capture(server, graph, latent)[0]
    said = [line for line in ours.log if "already held NaN" in line]
    assert len(said) == 1
    assert "query already held" in said[0]
    assert "input 1.0" in said[0]  # the block
    assert ours.run.taken == 16


def test_the_node_writes_on_itself_what_it_did(server: ComfyServer) -> None:
    ours = sample(server, "sd15", attention_patch())
    answer = server.request("/probe/texts")
    if not answer["supported"]:
        pytest.skip("this ComfyUI cannot write on a node")
    texts = [text for _, text in answer["texts"]]
    assert f"SD15: {ours.run.taken} of {ours.run.calls} calls taken" in texts[-1]
