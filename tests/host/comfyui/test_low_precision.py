"""Models that the real host computes in bfloat16 and float16: as near to the float32 latent as the unpatched ones."""

from __future__ import annotations

import functools

import pytest
from attn_support.comfy.graph import Captured, Patch, attention_patch, largest_difference, sample
from attn_support.comfy.server import ComfyServer

TRANSFORMERS = ["sd3", "flux", "wan_t2v", "ltxv"]
# Without sd15 in fp16: a CPU takes a minute for its convolutions.
CASES = [("sd15", "bf16"), *((family, dtype) for family in TRANSFORMERS for dtype in ("bf16", "fp16"))]
# Half the spacing of the numbers above 1; eight of them are what two steps through a network make of it.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@functools.cache
def stock(server: ComfyServer, family: str, dtype: str) -> Captured:
    return sample(server, family, *([] if dtype == "fp32" else [computed_in(dtype)]))


def computed_in(dtype: str) -> Patch:
    """ComfyUI's own node; on a CPU it computes in float32 otherwise."""
    return "ModelComputeDtype", {"dtype": dtype}


@pytest.mark.parametrize("route", ["auto", "tiled"])
@pytest.mark.parametrize(("family", "dtype"), CASES, indirect=["family"])
def test_the_patch_is_as_exact_as_the_host(server: ComfyServer, family: str, dtype: str, route: str) -> None:
    exact, host = stock(server, family, "fp32"), stock(server, family, dtype)
    ours = sample(server, family, computed_in(dtype), attention_patch(route=route))
    assert ours.run.taken == host.counts["sdpa"] == exact.counts["sdpa"]
    host_error = largest_difference(host, exact)
    assert host_error > ROUNDING[dtype] / 2  # it did compute in low precision
    assert largest_difference(ours, exact) < 2 * host_error
    assert largest_difference(ours, host) < 8 * ROUNDING[dtype]
