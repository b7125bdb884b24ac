"""The graph of a prompt before and while it runs: where a node's output goes, and where a value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Prompt = Mapping[str, Mapping[str, Any]]
_MERGES = ("ModelMerge", "ModelSubtract", "ModelAdd")  # they clone model1 and read nothing but the weights of model2
_PATCHED = ("model", "model1", "model2", "vae", "clip")  # inputs of nodes that put out a patched clone of what comes in


def without_effect(prompt: Prompt, node: str) -> str:
    """Why nothing is ever computed with what ``node`` patched, its first output; "" where something may be.

    The output leads nowhere then, or every way from it ends in a node of the same kind, which replaces the patch, or in
    a merge that reads only the weights. What is done with a CLIP or a VAE says nothing about the model.
    """
    kind = kind_of(prompt, node)
    if node in prompt and not any(_followers(prompt, node, 0)):
        return "its first output is not connected"
    merges, replacing, waiting, seen = set[str](), set[str](), [node], {node}
    while waiting:
        name = waiting.pop()
        for follower, entrance in _followers(prompt, name, 0 if name == node else None):
            its_kind = kind_of(prompt, follower)
            if entrance == "model2" and its_kind.startswith(_MERGES):
                merges.add(its_kind)
            elif its_kind == kind:
                replacing.add(follower)
            elif not any(name in _PATCHED for _, name in _followers(prompt, follower)):
                return ""  # it runs or saves what it gets
            elif follower not in seen:
                seen.add(follower)
                waiting.append(follower)
    weights = f"{' and '.join(sorted(merges))} takes only the weights of model2; put this node after it"
    nodes = f"node{'s' * (len(replacing) > 1)} {' and '.join(sorted(replacing))} of the same kind after it"
    place = f"{nodes} take{'s' * (len(replacing) == 1)} its place"
    return "; ".join([weights] * bool(merges) + [place] * bool(replacing))


def kind_of(prompt: Prompt, node: str) -> str:
    return str(prompt.get(node, {}).get("class_type"))


def links(prompt: Prompt, node: str) -> dict[str, str]:
    """The inputs of a node that come from other nodes, and from which."""
    return {name: source for name, (source, _) in _sources(prompt, node).items()}


def _sources(prompt: Prompt, node: str) -> dict[str, tuple[str, Any]]:
    """The inputs of a node that come from other nodes: from which, and from which of its outputs."""
    given = prompt.get(node, {}).get("inputs", {}).items()
    pairs = ((name, value) for name, value in given if isinstance(value, (list, tuple)) and len(value) == 2)
    return {name: (str(source), output) for name, (source, output) in pairs if isinstance(source, (str, int))}


def _followers(prompt: Prompt, node: str, output: int | None = None) -> Iterator[tuple[str, str]]:
    """The nodes, and their inputs, to which an output of a node goes; None: any of its outputs."""
    for follower in prompt:
        for entrance, (source, own) in _sources(prompt, follower).items():
            if source == node and output in (None, own):
                yield follower, entrance
