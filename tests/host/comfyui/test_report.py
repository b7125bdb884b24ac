"""Pascal Attention Report on the real host: what it says of runs that another pack has counted too."""

import io
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attn_support.comfy.graph import Graph, Link, attention_patch, capture, sample_graph
from attn_support.comfy.server import ComfyServer
from PIL import Image

REPORT = "PascalAttentionReport"


@dataclass(frozen=True)
class Reported:
    """A report's outputs, the probe's counts, and what the server logged."""

    value: list[torch.Tensor]
    chart: torch.Tensor
    text: str
    counts: dict[str, int]
    log: list[str]

    @property
    def top(self) -> str:
        """The text down to the first run's section, on one line."""
        return " ".join(self.text.partition("===")[0].split())

    @property
    def is_alarmed(self) -> bool:
        """Whether the picture has a red ground somewhere."""
        red = torch.tensor([0xFD, 0xEC, 0xEA]) / 255
        return bool(((self.chart - red).abs() < 1e-3).all(-1).any())


def reported(server: ComfyServer, graph: Graph, value: Link | None, tag: str = "", **inputs: Any) -> Reported:
    """Run the graph with a report behind ``value``."""
    given = {"exactness_check": True, **inputs} | ({} if value is None else {"value": value})
    node, _ = graph.add(REPORT, **given)
    text, chart, same = capture(server, graph, [node, 2], [node, 1], [node, 0] if value else [node, 1], tag=tag)
    assert chart.tensors[0].shape[0] == 1
    assert chart.tensors[0].shape[3] == 3
    return Reported(same.tensors, chart.tensors[0], text.text, dict(text.counts), text.log)


def sampled(server: ComfyServer, family: str, *patches: Any, **inputs: Any) -> Reported:
    tag = uuid.uuid4().hex
    graph, latent = sample_graph(family, patches, tag)
    return reported(server, graph, latent, tag, **inputs)


@pytest.mark.parametrize("family", ["sd15", "wan_t2v", "ltxv", "flux"], indirect=True)
def test_the_counts_are_those_of_the_probe(server: ComfyServer, family: str) -> None:
    found = sampled(server, family, attention_patch(route="tiled"))
    calls = found.counts["wrapped"]
    assert calls > 0
    assert f"{calls} calls, {calls} taken (tiled {calls}), 0 passed to ComfyUI" in found.top
    assert "exact within rounding" in found.top
    assert "in attention of" in found.top
    assert not found.is_alarmed


def test_a_patch_that_another_node_replaced_is_an_alarm(server: ComfyServer) -> None:
    found = sampled(server, "sd15", attention_patch(), ("ProbeOtherPatch", {"kind": "replace", "tag": "x"}))
    assert "!! SD15, diffusion model: no attention call reached the patch" in found.top
    assert "replaced it and passes nothing on" in found.top
    assert "ProbeOtherPatch" in found.top
    assert "0 calls" in found.top
    assert found.is_alarmed
    assert any("no attention call reached the patch" in line for line in found.log)


def test_a_run_cancelled_before_its_first_call_is_no_alarm(server: ComfyServer) -> None:
    trip = ("ProbeTrip", {"action": "interrupt", "at_call": 1})
    graph, latent = sample_graph("sd15", [attention_patch(), trip], "")
    node, _ = graph.add(REPORT, exactness_check=True, value=latent)
    outcome = server.run(graph.prompt)
    assert outcome.status == "interrupted"
    assert any("ended early by InterruptProcessingException" in line for line in outcome.log)
    assert not any("no attention call reached the patch" in line for line in outcome.log)
    again = server.run(graph.prompt).outputs[node]["text"][0]
    assert "ended early" not in again
    assert "of an earlier prompt" not in again


def test_it_runs_as_the_only_output_and_shows_itself_on_the_node(server: ComfyServer) -> None:
    graph, latent = sample_graph("sd15", [attention_patch()], "")
    node, _ = graph.add(REPORT, exactness_check=True, value=latent)
    before = len(server.request("/probe/texts")["texts"])
    outcome = server.run(graph.prompt)
    assert outcome.status == "success", outcome.message
    shown = outcome.outputs[node]
    assert "PASCAL ATTENTION REPORT" in shown["text"][0].splitlines()
    picture = shown["images"][0]
    assert picture["type"] == "temp"
    query = f"filename={picture['filename']}&subfolder={picture['subfolder']}&type=temp"
    assert Image.open(io.BytesIO(server.fetched(f"/view?{query}"))).width == 1600
    texts = [text for unique_id, text in server.request("/probe/texts")["texts"][before:] if unique_id == node]
    assert not texts  # the picture says it, and needs the room


def test_a_sampler_from_the_cache_is_said_and_its_earlier_run_shown(server: ComfyServer) -> None:
    graph, latent = sample_graph("sd15", [attention_patch()], uuid.uuid4().hex)
    sampler = graph.prompt[latent[0]]["inputs"]
    sampler["latent_image"] = graph.prompt.pop(sampler["latent_image"][0])["inputs"]["value"]
    node, _ = graph.add(REPORT, exactness_check=True, value=latent)
    first, second = (" ".join(server.run(graph.prompt).outputs[node]["text"][0].split()) for _ in range(2))
    assert "in its cache" not in first
    assert "ComfyUI used the results in its cache. Its most recent earlier run is shown." in second
    assert "of an earlier prompt" in second
    assert "exact within rounding" in second


def test_the_bug_report_holds_versions_and_settings(server: ComfyServer) -> None:
    text = sampled(server, "sd15", attention_patch(budget_mib=3)).text
    block = text.partition("copy from here")[2]
    assert f"ComfyUI     {server.host.version}" in block
    assert "attention_pytorch" in block
    assert f"torch       {torch.__version__}"[:12] in block
    assert "budget 3 MiB" in block
    assert " x torch, q[" in block
    assert str(server.base) not in text
