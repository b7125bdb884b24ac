"""The example workflows run on the host, with tiny models in the place of the published files."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from attn_support.comfy.graph import Captured, Graph, capture, largest_difference
from attn_support.comfy.server import ComfyServer
from attn_support.comfy.workflow_files import FOREIGN, NAMES, Prompt, find, ours, prompt_of, small_prompt, without_ours

ROUNDING = 1e-4  # of the latent's and of the picture's largest value, after two steps and a decoder in float32
SEEDS = itertools.count(1)
every_workflow = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def prompt(name: str, tiny_model: Callable[[str], str]) -> Prompt:
    return small_prompt(name, tiny_model)


def run(server: ComfyServer, prompt: Prompt) -> list[Captured]:
    """Latent and picture of a prompt, run to its end as the user's Run button would."""
    graph = Graph()
    graph.prompt = copy.deepcopy(prompt)
    return capture(server, graph, [sampler_of(prompt), 0], [find(prompt, "VAEDecode"), 0])


def sampler_of(prompt: Prompt) -> str:
    (key,) = (key for key, node in prompt.items() if node["class_type"] in ("KSampler", "SamplerCustom"))
    return key


WRITTEN_BY = (0, 33, 0)  # the ComfyUI whose front end wrote the files


def nodes_for(server: ComfyServer, name: str) -> dict[str, Any]:
    """Return what the host says of its nodes; a skip where it is older than some that the workflow has."""
    known = server.request("/object_info")
    absent = {node["class_type"] for node in prompt_of(name).values()} - set(known) - set(FOREIGN)
    if absent and server.host.version_tuple < WRITTEN_BY:
        pytest.skip(f"ComfyUI {server.host.version} has no {', '.join(sorted(absent))}")
    return known


@every_workflow
def test_the_host_knows_every_node_and_every_input(server: ComfyServer, name: str) -> None:
    known, is_older = nodes_for(server, name), server.host.version_tuple < WRITTEN_BY
    for node in prompt_of(name).values():
        if node["class_type"] in FOREIGN and node["class_type"] not in known:
            continue
        types = known[node["class_type"]]["input"]
        given = {key.partition(".")[0] for key in node["inputs"]}  # "format.codec": of the choice in "format"
        assert set(types.get("required", {})) <= given, node["class_type"]
        extra = given - set(types.get("required", {})) - set(types.get("optional", {}))
        assert is_older or not extra, (node["class_type"], extra)  # an older host leaves such inputs aside


@pytest.mark.parametrize("host", ["server", "plain_server"])
@every_workflow
def test_it_runs_and_gives_what_it_gives_without_the_pack(request, name: str, prompt: Prompt, host: str) -> None:
    server: ComfyServer = request.getfixturevalue(host)
    patched = run(server, prompt)
    plain = run(server, without_ours(prompt))
    for ours_, stock in zip(patched, plain, strict=True):
        assert largest_difference(ours_, stock) < ROUNDING
    sampling = next(found for found in patched[0].runs if found.taken)
    assert sampling.taken == sampling.calls
    assert not plain[0].runs


@every_workflow
def test_each_node_says_what_it_did(server: ComfyServer, name: str, prompt: Prompt) -> None:
    text = report_of(server, prompt)
    assert "WARNING" not in text
    assert "!!" not in text
    words = {
        "PascalAttentionPatch": "diffusion model",
        "PascalVAEAttention": "VAE",
        "PascalTextEncoderAttention": "text encoder",
    }
    for kind in set(ours(prompt).values()) & set(words):
        assert words[kind].lower() in text.lower(), text


def report_of(server: ComfyServer, prompt: Prompt) -> str:
    graph: dict[str, Any] = copy.deepcopy(prompt)
    sampler = graph[sampler_of(graph)]
    seed = "seed" if "seed" in sampler["inputs"] else "noise_seed"
    sampler["inputs"][seed] = next(SEEDS)  # so that the host runs it again
    outcome = server.run(graph)
    assert outcome.status == "success", outcome.message
    return outcome.outputs[find(graph, "PascalAttentionReport")]["text"][0]
