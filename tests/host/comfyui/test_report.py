"""Pascal Attention Report on the real host: what it says of runs that another pack has counted too."""

import io
import uuid
from typing import Any

import pytest
import torch
from attn_support.comfy.graph import Captured, Graph, attention_patch, capture, sample_graph
from attn_support.comfy.server import ComfyServer
from PIL import Image

REPORT = "PascalAttentionReport"


def with_report(family: str, *patches: Any, tag: str = "") -> tuple[Graph, str]:
    """A sampler with a report behind it, and the report's id."""
    graph, latent = sample_graph(family, patches, tag)
    return graph, graph.add(REPORT, exactness_check=True, value=latent)[0]


def sampled(server: ComfyServer, family: str, *patches: Any) -> tuple[Captured, str, bool]:
    """Return what a report behind a sampler says, its words in one line, and whether it shows an alarm."""
    tag = uuid.uuid4().hex
    graph, node = with_report(family, *patches, tag=tag)
    text, chart = capture(server, graph, [node, 2], [node, 1], tag=tag)
    picture, red = chart.tensors[0], torch.tensor([0xB3, 0x26, 0x1E]) / 255
    assert (picture.shape[0], picture.shape[3]) == (1, 3)
    is_alarmed = bool(((picture - red).abs() < 1e-3).all(-1).any())
    return text, " ".join(text.text.split()), is_alarmed


@pytest.mark.parametrize("family", ["sd15", "wan_t2v", "ltxv", "flux"], indirect=True)
def test_the_counts_are_those_of_the_probe(server: ComfyServer, family: str) -> None:
    found, top, is_alarmed = sampled(server, family, attention_patch(route="tiled"))
    calls = found.counts["wrapped"]
    assert calls > 0
    counts = f"{calls} calls, {calls} taken (tiled {calls}), 0 passed to ComfyUI"
    assert all(words in top for words in (counts, "exact within rounding", "in attention of")), top
    assert not is_alarmed


def test_a_patch_that_another_node_replaced_is_an_alarm(server: ComfyServer) -> None:
    replaces = "ProbeOtherPatch", {"kind": "replace", "tag": "x"}
    found, top, is_alarmed = sampled(server, "sd15", attention_patch(), replaces)
    alarm = "=== WARNING === SD15, diffusion model: no attention call reached the patch"
    said = alarm, "replaced it and passes nothing on", "ProbeOtherPatch"
    assert all(words in top for words in said), top
    assert is_alarmed
    assert any("no attention call reached the patch" in line for line in found.log)


def test_a_run_cancelled_before_its_first_call_is_no_alarm(server: ComfyServer) -> None:
    trip = ("ProbeTrip", {"action": "interrupt", "at_call": 1})
    graph, node = with_report("sd15", attention_patch(), trip)
    outcome = server.run(graph.prompt)
    assert outcome.status == "interrupted"
    assert any("ended early by InterruptProcessingException" in line for line in outcome.log)
    assert not any("no attention call reached the patch" in line for line in outcome.log)
    again = server.run(graph.prompt).outputs[node]["text"][0]
    assert "ended early" not in again
    assert "of an earlier prompt" not in again


def test_it_runs_as_the_only_output_and_shows_itself_on_the_node(server: ComfyServer) -> None:
    graph, node = with_report("sd15", attention_patch())
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


def kept_graph() -> tuple[Graph, Any]:
    """A sampler that ComfyUI keeps in its cache, and its latent."""
    graph, latent = sample_graph("sd15", [attention_patch()], uuid.uuid4().hex)
    sampler = graph.prompt[latent[0]]["inputs"]
    sampler["latent_image"] = graph.prompt.pop(sampler["latent_image"][0])["inputs"]["value"]
    return graph, latent


def test_a_sampler_from_the_cache_is_said_and_its_earlier_run_shown(server: ComfyServer) -> None:
    graph, latent = kept_graph()
    node, _ = graph.add(REPORT, exactness_check=False, value=latent)
    first = " ".join(server.run(graph.prompt).outputs[node]["text"][0].split())
    graph.prompt[node]["inputs"]["exactness_check"] = True  # else the whole prompt is in the cache
    second = " ".join(server.run(graph.prompt).outputs[node]["text"][0].split())
    assert "in its cache" not in first
    assert "ComfyUI used the results in its cache" in second
    assert "Its most recent earlier run is shown" in second
    assert "of an earlier prompt" in second
    assert "exact within rounding" in second


@pytest.mark.parametrize("connected", [True, False])
def test_what_is_in_the_cache_keeps_its_report(server: ComfyServer, connected: bool) -> None:
    graph, latent = kept_graph()
    node, _ = graph.add(REPORT, exactness_check=False, **({"value": latent} if connected else {}))
    graph.add("PreviewAny", source=latent)
    first, second = (server.run(graph.prompt).outputs.get(node, {}).get("images") for _ in range(2))
    assert first
    assert (second in (None, first)) is connected  # each report writes a picture of its own


def test_the_bug_report_holds_versions_and_settings(server: ComfyServer) -> None:
    text = sampled(server, "sd15", attention_patch(budget_mib=3))[0].text
    block = text.partition("copy from here")[2]
    versions = f"ComfyUI     {server.host.version}", f"torch       {torch.__version__}"[:12]
    assert all(words in block for words in (*versions, "attention_pytorch", "budget 3 MiB", " x torch, q[")), block
    assert str(server.base) not in text
