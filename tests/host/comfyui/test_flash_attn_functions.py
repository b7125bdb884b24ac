"""Pascal Flash-Attn Functions on the real host: a pack that imports flash_attn works, and fails again afterwards."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from attn_support.comfy.graph import Graph, Link, capture
from attn_support.comfy.server import ComfyServer, WorkflowError

NODE, REPORT = "PascalFlashAttnFunctions", "PascalAttentionReport"
SEEDS = count(1)


def flash_graph(*, enabled: bool | None) -> tuple[Graph, Link, int]:
    """A latent through our switch (None = without it) and the node of the other pack, which runs anew each time."""
    graph, seed = Graph(), next(SEEDS)
    latent = graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    if enabled is not None:
        latent = graph.add(NODE, value=latent, enabled=enabled)
    return graph, graph.add("ProbeFlash", latent=latent, seed=seed), seed


def failure(server: ComfyServer, *, enabled: bool | None) -> str:
    graph, latent, _ = flash_graph(enabled=enabled)
    with pytest.raises(WorkflowError) as caught:
        capture(server, graph, latent)
    return str(caught.value)


def test_a_pack_works_while_it_is_on_and_the_report_counts_its_calls(server: ComfyServer) -> None:
    assert "flash_attn" in failure(server, enabled=None)
    graph, latent, seed = flash_graph(enabled=True)
    node, _ = graph.add(REPORT, exactness_check=False, value=latent)
    found, text = capture(server, graph, latent, [node, 2])
    query = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found.tensors[0], expected)
    assert "flash_attn functions" in text.text
    assert "flash_attn.flash_attn_func" in text.text
    assert any("'import flash_attn' now uses this pack's functions" in line for line in found.log)
    assert "flash_attn" in failure(server, enabled=False)


def test_the_environment_turns_it_on_when_comfyui_starts(start_server: Any) -> None:
    graph, latent, _ = flash_graph(enabled=None)
    assert capture(start_server(PASCAL_ATTN_FLASH="1"), graph, latent)[0].tensors
