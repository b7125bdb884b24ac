"""The patch beside LoRAs, other packs' patches, the other nodes and itself; cancelled, failed, unloaded, changed."""

import functools
import time
import uuid
from itertools import count

import pytest
import torch
from attn_support.comfy import graph as graphs
from attn_support.comfy.server import ComfyServer, WorkflowError

ROUNDING = 2e-5  # of the latent's largest value, as in test_families
TILED, TORCH = graphs.attention_patch(route="tiled"), graphs.attention_patch(route="torch")
WHOLE = graphs.attention_patch(coverage="whole model")
both_coverages = pytest.mark.parametrize("patch", [TILED, WHOLE], ids=["override", "whole model"])


@functools.cache
def stock(server: ComfyServer) -> graphs.Captured:
    """SD1.5 without our patch."""
    return graphs.sample(server, "sd15")


def other(kind: str) -> graphs.Patch:
    return "ProbeOtherPatch", {"kind": kind, "tag": "other"}


def lora(family: str) -> graphs.Patch:
    return "LoraLoaderModelOnly", {"lora_name": f"tiny_lora_{family}.safetensors", "strength_model": 1.0}


@pytest.mark.parametrize("family", ["sd15", "wan_t2v"])
@pytest.mark.parametrize("lora_first", [True, False])
@both_coverages
def test_a_lora_works_before_and_after(server: ComfyServer, family: str, lora_first: bool, patch: graphs.Patch) -> None:
    with_lora = graphs.sample(server, family, lora(family))
    ours = graphs.sample(server, family, *([lora(family), patch] if lora_first else [patch, lora(family)]))
    assert graphs.largest_difference(ours, with_lora) < ROUNDING
    assert ours.run.taken == with_lora.counts["sdpa"]
    assert graphs.largest_difference(graphs.sample(server, family), with_lora) > 100 * ROUNDING


@pytest.mark.parametrize(("earlier", "calls"), [("auto", 16), ("run it first", 16), ("replace it", 8)])
@pytest.mark.parametrize("kind", ["chain", "replace"])
def test_a_patch_before_ours_runs_first_unless_told_otherwise(server, kind: str, earlier: str, calls: int) -> None:
    graph, tag = graphs.Graph(), uuid.uuid4().hex
    patches = [
        ("ProbeOtherPatch", {"kind": kind, "tag": tag}),
        graphs.attention_patch(min_keys=78, earlier_patch=earlier),
    ]
    latent = graph.sample(graph.patched(graph.load("sd15"), patches), graphs.FAMILIES["sd15"])
    ours = graphs.capture(server, graph, latent, tag=tag)[0]
    assert graphs.largest_difference(ours, stock(server)) < ROUNDING
    assert ours.run.taken == ours.run.passed == 8
    assert ours.counts["other"] == calls
    said = "is replaced" if earlier == "replace it" else "runs before this node"
    assert any("ProbeOtherPatch" in line and said in line for line in ours.log), ours.log


def test_whole_model_reaches_what_a_patch_after_ours_calls(server: ComfyServer) -> None:
    ours = graphs.sample(server, "sd15", WHOLE, other("replace"))
    assert graphs.largest_difference(ours, stock(server)) < ROUNDING
    assert ours.run.taken == ours.run.calls == stock(server).counts["sdpa"]


def test_two_clones_in_one_graph_keep_their_own_settings(server: ComfyServer) -> None:
    graph = graphs.Graph()
    model = graph.load("sd15")
    models = [graph.patched(model, [patch]) for patch in (TILED, TORCH)]
    latents = [graph.sample(m, graphs.FAMILIES["sd15"]) for m in (models[0], model, models[1], models[0])]
    results = graphs.capture(server, graph, *latents)
    routes = [run.routes for run in results[0].runs]
    assert sorted(map(tuple, routes)) == [("tiled",), ("tiled",), ("torch",)]
    for result in results:
        assert graphs.largest_difference(result, stock(server)) < ROUNDING
    assert torch.equal(results[1].tensors[0], stock(server).tensors[0])
    assert torch.equal(results[0].tensors[0], results[3].tensors[0])


@pytest.mark.parametrize(
    ("action", "status", "message", "calls"),
    [
        ("interrupt", "interrupted", "", 16),  # two evaluations of eight calls
        ("raise", "error", "RuntimeError: probe: an accident in the middle of sampling", 24),  # after the third
    ],
)
@both_coverages
def test_cancelled_or_failed_in_the_middle_the_next_run_is_clean(
    server: ComfyServer, patch: graphs.Patch, action: str, status: str, message: str, calls: int
) -> None:
    """The third of four model evaluations ends badly, once; the same graph then gives what the unpatched one gives."""
    trip = ("ProbeTrip", {"action": action, "at_call": 3})
    graph, latent = graphs.sample_graph("sd15", [patch, trip], "accident", steps=4)
    with pytest.raises(WorkflowError) as failed:
        graphs.capture(server, graph, latent)
    outcome = failed.value.outcome
    assert outcome is not None
    assert outcome.status == status
    assert message in outcome.message
    assert [run.taken for run in graphs.patch_runs(outcome.log)] == [calls]
    again = graphs.capture(server, graph, latent)[0]
    undisturbed = graphs.sample(server, "sd15", steps=4)  # after it: the host forgets what a prompt does not use
    assert graphs.largest_difference(again, undisturbed) < ROUNDING
    assert again.run.taken == again.run.calls == undisturbed.counts["sdpa"]


def wait_until_within_attention(server: ComfyServer, texts_from: int) -> None:
    """Returns when a node has said how far an attention call is, as it does after a second in one."""
    deadline = time.monotonic() + 120
    while not any("attention" in text and "%" in text for _, text in texts(server)[texts_from:]):
        assert time.monotonic() < deadline, "no attention call lasted a second"
        time.sleep(0.05)


def texts(server: ComfyServer) -> list[list[str]]:
    """``[node id, text]`` for everything that nodes have written on themselves so far."""
    return server.request("/probe/texts")["texts"]


def test_cancel_does_not_wait_for_the_attention_call_to_end(server: ComfyServer) -> None:
    """12544 tokens in tiles of 64 keys on one core: one call takes many seconds."""
    graph, latent = graphs.sample_graph("sd15", [graphs.attention_patch(route="tiled", tile_size=64)], "long")
    graph.add("ProbeCapture", value=latent, path=str(server.base / "never.pt"), tag="")
    sizes = [node["inputs"] for node in graph.prompt.values() if node["class_type"] == "EmptyLatentImage"]
    sizes[0].update(width=896, height=896)
    log_from, texts_from = len(server.log), len(texts(server))
    prompt_id = server.post(graph.prompt)
    wait_until_within_attention(server, texts_from)
    server.interrupt()
    pressed = time.monotonic()
    outcome = server.outcome(server.wait(prompt_id), log_from)
    assert outcome.status == "interrupted"
    assert time.monotonic() - pressed < 10.0
    assert [run.calls for run in graphs.patch_runs(outcome.log)] == [1]


@pytest.mark.parametrize(
    "patches", [[TILED], [WHOLE, graphs.CHUNKING]], ids=["attention", "attention and feed-forward"]
)
def test_a_lora_is_trained_with_gradient_checkpointing(server: ComfyServer, patches: list[graphs.Patch]) -> None:
    """ComfyUI's default: what the first pass saves and what its recomputation saves must be the same."""
    graph = graphs.Graph()
    latent = graph.add("ProbeFresh", value=graph.add("EmptyLatentImage", width=128, height=128, batch_size=1))
    family = graphs.FAMILIES["sd15"]
    text = graph.add("ProbeCond", tokens=family.tokens, dim=family.dim, pooled=0, mask=False, seed=1)
    wanted = {"steps": 2, "training_dtype": "fp32", "lora_dtype": "fp32", "gradient_checkpointing": True}
    if not server.request("/object_info/SaveLoRA"):
        pytest.skip("this ComfyUI has no node SaveLoRA")
    node = server.request("/object_info/TrainLoraNode")["TrainLoraNode"]
    known, output = node["input"]["required"], node["output"].index("LORA_MODEL")  # older: behind a MODEL
    settings = {name: wanted.get(name, spec[1]["default"]) for name, spec in known.items() if "default" in spec[1]}
    model = graph.patched(graph.load("sd15"), patches)
    inputs = {"model": model, "latents": latent, "positive": text, **settings}
    trained = graph.add("TrainLoraNode", output=output, **inputs)
    graph.add("SaveLoRA", lora=trained, prefix="loras/trained")
    outcome = server.run(graph.prompt)
    assert outcome.status == "success", outcome.message
    calls = stock(server).counts["sdpa"]  # of two evaluations; each is computed again in the backward pass
    assert [(run.taken, run.passed) for run in graphs.patch_runs(outcome.log)] == [(2 * calls, 0)]


def test_patches_work_together_in_any_order(server: ComfyServer) -> None:
    alone = graphs.sample(server, "sd15", graphs.INT8)
    for patches in ((graphs.CHUNKING, TILED), (TILED, graphs.CHUNKING), (graphs.INT8, graphs.CHUNKING, TILED)):
        ours, is_exact = graphs.sample(server, "sd15", *patches), graphs.INT8 not in patches
        assert ours.run.taken == stock(server).counts["sdpa"]
        assert ours.says("4 of 4 feed-forward modules chunked")
        assert is_exact or ours.says("linear layers in int8")
        assert graphs.largest_difference(ours, stock(server) if is_exact else alone) < (ROUNDING if is_exact else 0.1)


SEEDS = count(1)


def flash_graph(*, enabled: bool | None) -> tuple[graphs.Graph, graphs.Link, int]:
    """A latent through our switch (None = without it) and the node of the other pack, which runs anew each time."""
    graph, seed = graphs.Graph(), next(SEEDS)
    latent = graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    if enabled is not None:
        latent = graph.add("PascalFlashAttnFunctions", value=latent, enabled=enabled)
    return graph, graph.add("ProbeFlash", latent=latent, seed=seed), seed


def test_a_pack_works_while_it_is_on_and_the_report_counts_its_calls(server: ComfyServer) -> None:
    with pytest.raises(WorkflowError, match="flash_attn"):
        graphs.capture(server, *flash_graph(enabled=None)[:2])
    graph, latent, seed = flash_graph(enabled=True)
    node, _ = graph.add("PascalAttentionReport", exactness_check=False, value=latent)
    found, text = graphs.capture(server, graph, latent, [node, 2])
    query = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found.tensors[0], expected)
    assert "flash_attn functions" in text.text
    assert "flash_attn.flash_attn_func" in text.text
    assert any("flash_attn, sageattention, xformers now find this pack's functions" in line for line in found.log)
    with pytest.raises(WorkflowError, match="flash_attn"):
        graphs.capture(server, *flash_graph(enabled=False)[:2])


def test_steps_that_comfyui_skips_are_the_same_beside_us(server: ComfyServer) -> None:
    cache = ("EasyCache", {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False})
    whole, skipping = graphs.sample(server, "sd15", steps=6), graphs.sample(server, "sd15", cache, steps=6)
    assert 0 < skipping.counts["sdpa"] < whole.counts["sdpa"]
    for patches in ((cache, TILED), (TILED, cache)):
        ours = graphs.sample(server, "sd15", *patches, steps=6)
        assert ours.run.taken == skipping.counts["sdpa"]
        assert graphs.largest_difference(ours, skipping) < ROUNDING
