"""Beside packs that many users have: each keeps its effect, and so does ours. Without a pack's folder, in
``PASCAL_ATTN_KJNODES``, ``PASCAL_ATTN_ANIMATEDIFF``, ``PASCAL_ATTN_IPADAPTER`` or ``PASCAL_ATTN_ADVANCED_CONTROLNET``,
or what it needs in the host, its tests are skipped."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attn_support.comfy import graph as graphs
from attn_support.comfy.server import ComfyServer

ROUNDING = 3e-5
PACKS = {
    "KJNODES": "PathchSageAttentionKJ",  # a node by which the pack is known to have loaded
    "ANIMATEDIFF": "ADE_UseEvolvedSampling",
    "IPADAPTER": "IPAdapterUnifiedLoader",
    "ADVANCED_CONTROLNET": "ACN_AdvancedControlNetApply",
}
FOLDERS = {name: os.environ.get(f"PASCAL_ATTN_{name}", "") for name in PACKS}
Model = Callable[[graphs.Graph], graphs.Link]
WHOLE = graphs.attention_patch(route="tiled")
# A node that changes the model of a family, by pack.
MODEL_NODES = [
    ("KJNODES", "WanVideoEnhanceAVideoKJ", "wan_t2v"),
    ("KJNODES", "CFGZeroStarAndInit", "sd15"),
    ("KJNODES", "ModelPatchTorchSettings", "sd15"),
    ("KJNODES", "SkipLayerGuidanceWanVideo", "wan_t2v"),
    ("ANIMATEDIFF", "ADE_UseEvolvedSampling", "sd15"),
]


@pytest.fixture(scope="module")
def crowded(start_server: Callable[..., ComfyServer]) -> ComfyServer:
    """A server with all packs that are given, and ours."""
    folders = [Path(folder) for folder in FOLDERS.values() if folder]
    if not folders:
        pytest.skip("no folder of another pack is given")
    return start_server("--use-pytorch-cross-attention", packs=(Path(__file__).parent / "probe_pack", *folders))


def known(server: ComfyServer, pack: str, node: str = "") -> dict:
    """Return what the server says of a node of a pack; a skip with the reason where there is none."""
    if not FOLDERS[pack]:
        pytest.skip(f"PASCAL_ATTN_{pack} is not set")
    nodes = server.request("/object_info")
    if PACKS[pack] not in nodes:
        failed = [line for line in server.log if "IMPORT FAILED" in line or "ModuleNotFoundError" in line]
        pytest.skip(f"{pack} did not load in this host by itself: {'; '.join(failed) or 'no reason in the log'}")
    if (node or PACKS[pack]) not in nodes:
        pytest.skip(f"this version of {pack} has no {node}")
    return nodes[node or PACKS[pack]]


def defaults(described: dict, graph: graphs.Graph, family: str) -> dict:
    """The inputs that a node asks for besides the model, at their defaults."""
    given = {}
    for name, entry in described["input"].get("required", {}).items():
        kind, options = entry[0], entry[1] if len(entry) > 1 else {}
        if kind == "LATENT":
            class_type, inputs = graphs.FAMILIES[family].latent
            given[name] = graph.add(class_type, **inputs)
        elif isinstance(kind, list) or kind == "COMBO":
            choices = kind if isinstance(kind, list) else options["options"]
            given[name] = options.get("default", choices[0])
        elif kind != "MODEL":
            given[name] = options["default"]
    return given


def sampled(server: ComfyServer, load: Model, *patches: graphs.Patch, family: str = "sd15") -> graphs.Captured:
    """The latent of a family from ``load``'s model through the patches."""
    graph = graphs.Graph()
    return graphs.capture(server, graph, graph.sample(graph.patched(load(graph), patches), graphs.FAMILIES[family]))[0]


def plain(graph: graphs.Graph) -> graphs.Link:
    return graph.load("sd15")


@pytest.mark.parametrize(("pack", "node", "family"), MODEL_NODES)
def test_its_effect_is_kept_in_both_orders(crowded: ComfyServer, pack: str, node: str, family: str) -> None:
    described = known(crowded, pack, node)

    def through(*names: str) -> graphs.Captured:
        graph = graphs.Graph()
        theirs = node, defaults(described, graph, family)
        model = graph.patched(graph.load(family), [WHOLE if name == "ours" else theirs for name in names])
        return graphs.capture(crowded, graph, graph.sample(model, graphs.FAMILIES[family]))[0]

    stock = through(node)
    for order in ((node, "ours"), ("ours", node)):
        both = through(*order)
        assert graphs.largest_difference(both, stock) < ROUNDING, order
        assert both.run.taken == both.run.calls > 0, order


def test_a_sage_patch_before_ours_is_replaced_and_is_named(crowded: ComfyServer) -> None:
    node = "PathchSageAttentionKJ"
    known(crowded, "KJNODES", node)
    sage = {"sage_attention": "sageattn_qk_int8_pv_fp16_cuda", "allow_compile": False}
    try:
        ours = sampled(crowded, plain, (node, sage), WHOLE)
    except AssertionError as error:
        pytest.skip(f"the node needs a package that this host has not: {str(error)[:200]}")
    assert graphs.largest_difference(ours, sampled(crowded, plain)) < ROUNDING
    assert any("KJNodes) is replaced" in line for line in ours.log), ours.log


def with_picture(server: ComfyServer, host_script: Callable[..., str]) -> Model:
    """The tiny model with an IPAdapter, which replaces two of its cross attentions."""
    known(server, "IPADAPTER")
    path, embeds = server.base / "models" / "ipadapter" / "tiny.safetensors", server.base / "input" / "tiny.ipadpt"
    host_script(f"from comfy_other_packs import *\nwrite_ipadapter({str(path)!r}, {str(embeds)!r})")
    settings = {"weight": 1.0, "weight_type": "linear", "start_at": 0.0, "end_at": 1.0, "embeds_scaling": "V only"}

    def model(graph: graphs.Graph) -> graphs.Link:
        adapter = graph.add("IPAdapterModelLoader", ipadapter_file=path.name)
        seen = graph.add("IPAdapterLoadEmbeds", embeds=embeds.name)
        links = {"model": graph.load("sd15"), "ipadapter": adapter, "pos_embed": seen, "neg_embed": seen}
        return graph.add("IPAdapterEmbeds", **links, **settings)

    return model


def test_a_picture_of_ipadapter_gives_what_it_gives_without_ours(crowded, host_script) -> None:
    model = with_picture(crowded, host_script)
    stock, both = sampled(crowded, model), sampled(crowded, model, WHOLE, graphs.CHUNKING)
    effect = graphs.largest_difference(stock, sampled(crowded, plain))
    assert effect > 10 * ROUNDING, "it changes nothing"
    assert graphs.largest_difference(both, stock) < ROUNDING
    assert both.run.taken == both.run.calls > 0
    rounded = sampled(crowded, model, graphs.INT8)
    assert 0 < graphs.largest_difference(rounded, stock) < max(0.1, effect)
    assert not rounded.says("0 of 0 linear layers")


def test_a_controlnet_of_advanced_controlnet_keeps_its_effect(crowded, host_script) -> None:
    apply = "ACN_AdvancedControlNetApply_v2"
    known(crowded, "ADVANCED_CONTROLNET", apply)
    path = crowded.base / "models" / "controlnet" / "tiny.safetensors"
    host_script(f"from comfy_other_packs import *\nwrite_controlnet({str(path)!r})")

    def run(strength: float, *patches: graphs.Patch) -> graphs.Captured:
        graph = graphs.Graph()
        latent = graph.sample(graph.patched(graph.load("sd15"), patches), graphs.FAMILIES["sd15"])
        texts = graph.prompt[latent[0]]["inputs"]
        net = graph.add("ACN_ControlNetLoaderAdvanced", cnet=path.name)
        picture = graph.add("EmptyImage", width=128, height=128, batch_size=1, color=0x4080C0)
        links = {"positive": texts["positive"], "negative": texts["negative"], "control_net": net, "image": picture}
        applied = graph.add(apply, strength=strength, start_percent=0.0, end_percent=1.0, **links)
        texts.update(positive=applied, negative=[applied[0], 1])
        return graphs.capture(crowded, graph, latent)[0]

    stock, both = run(1.0), run(1.0, WHOLE)
    assert graphs.largest_difference(stock, run(0.0)) > 10 * ROUNDING, "it changes nothing"
    assert graphs.largest_difference(both, stock) < ROUNDING
    assert both.run.taken == both.run.calls > 0
