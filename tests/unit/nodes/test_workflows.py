"""The example workflows: what can be said of their files without ComfyUI."""

import re
from typing import Any

import pytest
from attn_support.comfy import workflow_files as files
from attn_support.comfy.pack import load_pack
from PIL import Image

NODES: dict[str, Any] = load_pack().NODE_CLASS_MAPPINGS
every_workflow = pytest.mark.parametrize("name", files.NAMES)


def inputs_of(kind: str) -> dict[str, Any]:
    """Name -> (type, options) of a node of the pack, in the order of its widgets."""
    types = NODES[kind].INPUT_TYPES()
    return {**types.get("required", {}), **types.get("optional", {})}


def values(node: dict[str, Any]) -> list[Any]:
    """The values of a node's widgets, without the front end's own."""
    return [value for value in node.get("widgets_values") or [] if value not in files.SEED_MODES]


SIMPLE = {"BOOLEAN": (bool,), "INT": (int,), "FLOAT": (int, float), "STRING": (str,)}
BYPASSED = 4  # the mode of a node that stands there for the user to switch on


def test_each_workflow_has_a_picture_a_twin_and_a_tiny_model_and_nothing_else_is_there() -> None:
    """The template browser shows every file at the top."""
    assert set(files.NAMES) == set(files.TINY)
    subjects = "SD15 SDXL Z-Image Krea2 Qwen-Image-GGUF Wan-2.2-5B LTX-2 11-GB every-node fp8 int8 EasyCache"
    assert [word for word in subjects.split() if not any(word in name for name in files.NAMES)] == []
    at_top = {path.name for path in files.FOLDER.iterdir() if path.is_file()}
    assert at_top == {f"{name}{end}" for name in files.NAMES for end in (".json", ".jpg")}
    assert {path.stem for path in (files.FOLDER / "api").iterdir()} == set(files.NAMES)
    assert all(Image.open(files.FOLDER / f"{name}.jpg").width >= 1000 for name in files.NAMES)
    assert [name for name in files.NAMES if not files.is_drawn(name)] == [], (
        "python tools/workflows pictures draws them"
    )


def test_the_pictures_of_the_documents_show_the_nodes_as_they_are() -> None:
    """A node with another input changes the workflow that has every node, by the tests below."""
    assert files.is_shown(), "python tools/workflows readme draws them"


@every_workflow
def test_both_twins_are_the_same_graph(name: str) -> None:
    workflow, prompt = files.opened(name), files.prompt_of(name)
    runs = (node for node in workflow["nodes"] if node["type"] not in files.PAGES and node["mode"] != BYPASSED)
    nodes = {str(node["id"]): node for node in runs}
    kinds = {key: node["class_type"] for key, node in prompt.items()}
    assert {key: node["type"] for key, node in nodes.items()} == kinds
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    bypassed = (node for node in workflow["nodes"] if node["mode"] == BYPASSED)
    past = {str(node["id"]): links[node["inputs"][0]["link"]] for node in bypassed}
    links = {link: past.get(source[0], source) for link, source in links.items()}
    for key, node in nodes.items():
        given = prompt[key]["inputs"]
        linked = {slot["name"]: links[slot["link"]] for slot in node.get("inputs", []) if slot.get("link") is not None}
        assert linked == {name: value for name, value in given.items() if files.is_link(value)}
        if node["type"] == "PreviewAny":  # its widgets show what came in
            continue
        if node["type"] in NODES:
            specs = inputs_of(node["type"]).items()
            order = [name for name, (kind, *_) in specs if isinstance(kind, list) or kind in SIMPLE]
            unlinked = {name: value for name, value in zip(order, values(node), strict=True) if name not in linked}
            assert unlinked == {name: value for name, value in given.items() if not files.is_link(value)}
        elif node["type"] == "SaveVideo":  # its widgets depend on each other and on ComfyUI's version
            assert values(node)[0] == given["filename_prefix"]
        else:
            assert values(node) == [value for value in given.values() if not files.is_link(value)]


@every_workflow
def test_nodes_of_the_pack_get_inputs_that_they_have_and_values_and_links_that_they_allow(name: str) -> None:
    prompt = files.prompt_of(name)
    for node in prompt.values():
        kind = node["class_type"]
        if kind not in NODES:
            continue
        assert set(NODES[kind].INPUT_TYPES()["required"]) <= set(node["inputs"]) <= set(inputs_of(kind))
        for key, value in node["inputs"].items():
            source = NODES.get(prompt[value[0]]["class_type"]) if files.is_link(value) else None
            if source is not None:
                assert inputs_of(kind)[key][0] == source.RETURN_TYPES[value[1]], (kind, key)
            assert files.is_link(value) or allows(inputs_of(kind)[key], value), (kind, key, value)


def allows(spec: tuple, value: Any) -> bool:
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    if isinstance(kind, list):
        return value in kind
    is_within = kind not in ("INT", "FLOAT") or options.get("min", value) <= value <= options.get("max", value)
    return type(value) in SIMPLE[kind] and is_within


@every_workflow
def test_each_workflow_patches_the_model_exactly_and_ends_in_a_report(name: str) -> None:
    used = set(files.ours(files.prompt_of(name)).values())
    assert {"PascalAttentionPatch", "PascalAttentionReport"} <= used
    assert "Pascal8Bit" not in used


def test_one_workflow_has_every_node_that_a_model_of_comfyui_can_use() -> None:
    """Left out are a switch of the process, and what needs a second card."""
    others = {"PascalFlashAttnFunctions", "PascalSecondCard"}
    found = {
        node["type"]: node["mode"] for node in files.opened("Pascal-SD15-every-node")["nodes"] if node["type"] in NODES
    }
    assert set(found) == set(NODES) - others
    assert [kind for kind, mode in found.items() if mode == BYPASSED] == ["Pascal8Bit"], "it is not exact"


@every_workflow
def test_what_a_workflow_needs_is_named_in_its_short_note_and_known_to_the_front_end(name: str) -> None:
    nodes = files.opened(name)["nodes"]
    note = next(node["widgets_values"][0] for node in nodes if node["type"] in files.PAGES)
    loaded = {value for node in nodes for value in values(node) if str(value).endswith((".safetensors", ".gguf"))}
    models = [model for node in nodes for model in node.get("properties", {}).get("models", [])]
    assert loaded == {model["name"] for model in models} != set()
    for model in models:
        assert model["url"].startswith("https://huggingface.co/")
        assert model["url"].endswith(f"/{model['name']}")
        assert f"[{model['name']}]({model['url']})" in note
        assert f"`models/{model['directory']}`" in note
    for node in nodes:
        pack, url = files.FOREIGN.get(node["type"], ("", ""))
        assert node["properties"].get("cnr_id", "") == pack
        assert url in note
    assert len(re.sub(r"\]\(\S+\)", "", note).split()) <= 110
