"""Every family of diffusion model that the host loads, sampled over HTTP with and without the patch."""

import functools
import itertools

import pytest
from attn_support.comfy.graph import FAMILIES, Captured, attention_patch, largest_difference, sample
from attn_support.comfy.server import ComfyServer

OVERRIDE, WHOLE = "attention override", "whole model"
# Of the latent's largest value, after two steps in float32; krea2, whose attention is two tokens wide, comes to 7e-6.
ROUNDING = 2e-5

every_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)


@functools.cache
def stock(server: ComfyServer, family: str) -> Captured:
    """The unpatched run that all others of a family are compared with."""
    return sample(server, family)


@every_family
def test_a_wrong_attention_would_be_seen(server: ComfyServer, family: str) -> None:
    wrong = sample(server, family, ("ProbeOtherPatch", {"kind": "wrong", "tag": ""}))
    assert largest_difference(wrong, stock(server, family)) > 100 * ROUNDING


# With torch's SDPA, and with what ComfyUI chooses for a CPU.
WAYS = [("server", coverage, route) for coverage in (OVERRIDE, WHOLE) for route in ("auto", "torch", "tiled")]
WAYS += [("plain_server", *how) for how in ((OVERRIDE, "auto"), (OVERRIDE, "tiled"), (WHOLE, "auto"))]


@pytest.mark.parametrize(("on", "coverage", "route"), WAYS)
@every_family
def test_the_patch_gives_the_same_latent(request, family: str, on: str, coverage: str, route: str) -> None:
    server: ComfyServer = request.getfixturevalue(on)
    ours, host = sample(server, family, attention_patch(route=route, coverage=coverage)), stock(server, family)
    assert largest_difference(ours, host) < ROUNDING
    taken, announced = ours.run.taken, host.counts["wrapped"]
    assert taken == ours.run.calls > 0
    assert route == "auto" or on == "plain_server" or set(ours.run.routes) == {route}
    if on == "plain_server":
        assert taken >= announced if coverage == WHOLE else taken <= announced
    elif coverage == WHOLE:
        assert taken == host.counts["sdpa"]
        assert not ours.says("attention override")
    else:  # what the host still computes itself is what it did not announce
        assert ours.counts["sdpa"] == ours.counts["wrapped"] - taken


# Half the spacing of the numbers above 1; eight of them are what two steps through a network make of it.
LOW = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@functools.cache
def computed_in(server: ComfyServer, family: str, dtype: str) -> Captured:
    """The node is ComfyUI's own; on a CPU it computes in float32 otherwise."""
    return sample(server, family, ("ModelComputeDtype", {"dtype": dtype}))


# Without sd15 in fp16: a CPU takes a minute for its convolutions.
@pytest.mark.parametrize("route", ["auto", "tiled"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("sd15", "bf16"), *itertools.product(["sd3", "flux", "wan_t2v", "ltxv"], LOW)],
    indirect=["family"],
)
def test_in_low_precision_it_is_as_near_to_float32_as_the_host(server, family: str, dtype: str, route: str) -> None:
    exact, host = stock(server, family), computed_in(server, family, dtype)
    ours = sample(server, family, ("ModelComputeDtype", {"dtype": dtype}), attention_patch(route=route))
    assert ours.run.taken == host.counts["sdpa"] == exact.counts["sdpa"]
    host_error = largest_difference(host, exact)
    assert host_error > LOW[dtype] / 2  # it did compute in low precision
    assert largest_difference(ours, exact) < 2 * host_error
    assert largest_difference(ours, host) < 8 * LOW[dtype]
