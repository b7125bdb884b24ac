"""The surroundings that the ComfyUI pack reads: a prompt's graph, earlier patches, a model's code. Without ComfyUI."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from attn_support.comfy.stub import node_module

prompts, others = node_module("comfy.prompt"), node_module("comfy.others")


def graph(**kinds: tuple[str, dict[str, str]]) -> dict[str, Any]:
    return {
        node: {"class_type": kind, "inputs": {n: [s[:-2], 1] if s[-2:] == " 1" else [s, 0] for n, s in inputs.items()}}
        for node, (kind, inputs) in kinds.items()
    }


MERGE = ("ModelMergeSimple", {"model1": "load", "model2": "patch"})


SUBTRACT = ("ModelSubtract", {"model1": "load", "model2": "lora"})
GIVEN = {
    "weights only": ({"merge": MERGE}, "ModelMergeSimple takes only the weights of model2"),
    "behind a LoRA": ({"lora": ("LoraLoaderModelOnly", {"model": "patch"}), "merge": SUBTRACT}, "ModelSubtract"),
    "model1": ({"merge": ("ModelMergeSimple", {"model1": "patch", "model2": "load"})}, ""),
    "sampled beside": ({"merge": MERGE, "other": ("KSampler", {"model": "patch"})}, ""),
    "a guider": ({"merge": ("BasicGuider", {"model": "patch"})}, ""),
    "connected to nothing": ({}, "its first output is not connected"),
    "its CLIP alone": ({"encode": ("CLIPTextEncode", {"clip": "patch 1"})}, "its first output is not connected"),
    "its CLIP, and weights": ({"merge": MERGE, "encode": ("CLIPTextEncode", {"clip": "patch 1"})}, "ModelMergeSimple"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_patch_whose_model_only_gives_weights_is_told(case: str) -> None:
    more, told = GIVEN[case]
    prompt = graph(load=("UNETLoader", {}), patch=("Patch", {}), sampler=("KSampler", {"model": "merge"}), **more)
    found = prompts.without_effect(prompt, "patch")
    assert told in found
    assert bool(found) == bool(told)
    assert prompts.without_effect(prompt, "unknown") == ""


def test_a_patch_is_replaced_where_every_way_ends_in_another_of_its_class() -> None:
    chain = {"patch": ("Patch", {"model": "load"}), "lora": ("Lora", {"model": "patch"})}
    chain |= {"second": ("Patch", {"model": "lora"}), "sampler": ("KSampler", {"model": "second"})}
    one = "node second of the same kind after it takes its place"
    assert prompts.without_effect(graph(**chain), "patch") == one
    assert prompts.without_effect(graph(**chain), "second") == ""
    beside = chain | {"other": ("KSampler", {"model": "patch"}), "decode": ("VAEDecode", {"samples": "other"})}
    assert prompts.without_effect(graph(**beside), "patch") == ""
    saved = chain | {"save": ("ModelSave", {"model": "patch"})}
    assert prompts.without_effect(graph(**saved), "patch") == ""
    third = chain | {"third": ("Patch", {"model": "patch"})}
    assert "nodes second and third of the same kind" in prompts.without_effect(graph(**third), "patch")
    merged = chain | {"merge": MERGE}
    assert prompts.without_effect(graph(**merged), "patch").endswith(f"put this node after it; {one}")


def named(qualname: str, module: str) -> Any:
    return SimpleNamespace(__qualname__=qualname, __module__=module)


KJ = "custom_nodes.ComfyUI-KJNodes.nodes.model_optimization_nodes"


@pytest.mark.parametrize(
    ("qualname", "module", "keeps"),
    [
        ("PathchSageAttentionKJ.patch.<locals>.attention_override_sage", KJ, False),
        ("attention_override_flash", KJ, False),
        ("NABLA.patch.<locals>.attention_override_nabla", KJ, True),
        ("attention_override_sage", "custom_nodes.unknown", True),
        ("anything", "custom_nodes.unknown", True),
    ],
)
def test_only_what_is_known_to_compute_is_replaced(qualname: str, module: str, keeps: bool) -> None:
    override = named(qualname, module)
    assert others.runs_first(override, others.AUTO) is keeps
    assert others.runs_first(override, others.KEEP)
    assert not others.runs_first(override, others.REPLACE)
    assert not others.runs_first(None, others.KEEP)


def test_another_patch_is_named_by_its_node_and_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("PathchSageAttentionKJ", (), {"__module__": KJ})
    function = named("PathchSageAttentionKJ.patch.<locals>.attention_override_sage", KJ)
    assert others.name_of(function) == "attention_override_sage (ComfyUI-KJNodes)"
    titles = {"Sage": "Patch Sage Attention KJ"}
    registered = SimpleNamespace(NODE_CLASS_MAPPINGS={"Sage": kind}, NODE_DISPLAY_NAME_MAPPINGS=titles)
    monkeypatch.setitem(sys.modules, "nodes", registered)
    assert others.name_of(function) == "Patch Sage Attention KJ (ComfyUI-KJNodes)"
    assert others.name_of(named("anything", "comfy.model_patcher")) == "anything (ComfyUI)"
