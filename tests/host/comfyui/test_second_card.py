"""Pascal Second Card on the tiny diffusion models of a real ComfyUI, with a second device played by the CPU."""

from __future__ import annotations

from attn_support.comfy.graph import largest_difference, sample
from attn_support.comfy.server import ComfyServer


def test_through_the_server_a_card_that_is_not_there_is_no_error(server: ComfyServer) -> None:
    stock = sample(server, "sd15")
    ours = sample(server, "sd15", ("PascalSecondCard", {"device": "cuda:3", "least_tokens": 64}))
    assert largest_difference(ours, stock) == 0
    assert ours.says("the model is on cpu, not on a card: the model is returned unchanged")
