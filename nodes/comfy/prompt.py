"""Facts about a node in a prompt's graph before it has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Prompt = Mapping[str, Mapping[str, Any]]
_SUBTRACT = ("ModelSubtract", "ModelAdd")
_PATCHED = ("model", "model1", "vae", "clip")  # inputs of nodes that put out a patched clone of what comes in


def where_only_weights_go(prompt: Prompt, node: str | None) -> str:
    """Why a patch on the model that ``node`` puts out is never run; "" where it may be.

    ComfyUI's merging nodes go on with a clone of model1 and read nothing but the weights of model2.
    """
    if node is None:
        return ""
    ends: set[str] = set()
    waiting, seen = [str(node)], {str(node)}
    while waiting:
        followers = list(_followers(prompt, waiting.pop()))
        if not followers and len(seen) == 1:
            return ""  # its output is connected to nothing, which the report says
        for follower, entrance in followers:
            kind = str(prompt[follower].get("class_type", ""))
            if entrance == "model2" and (kind.startswith("ModelMerge") or kind in _SUBTRACT):
                ends.add(kind)
            elif not _passes_models(prompt, follower):
                return ""
            elif follower not in seen:
                seen.add(follower)
                waiting.append(follower)
    if not ends:
        return ""
    return f"{' and '.join(sorted(ends))} takes only the weights of model2; put this node after it"


def replaced_by(prompt: Prompt, node: str) -> list[str]:
    """The nodes of the same class that every way from ``node`` ends in, before anything is computed with what it puts
    out: each of them replaces what ``node`` did. [] where something may run in between."""
    kind = prompt.get(node, {}).get("class_type")
    found: set[str] = set()
    waiting, seen = [node], {node}
    while waiting:
        followers = list(_followers(prompt, waiting.pop()))
        if not followers:
            return []
        for follower, entrance in followers:
            if entrance not in _PATCHED:
                return []
            if prompt[follower].get("class_type") == kind:
                found.add(follower)
            elif follower not in seen:
                seen.add(follower)
                waiting.append(follower)
    return sorted(found)


def _followers(prompt: Prompt, node: str) -> Iterator[tuple[str, str]]:
    for follower, entry in prompt.items():
        for entrance, value in entry.get("inputs", {}).items():
            if isinstance(value, (list, tuple)) and len(value) == 2 and str(value[0]) == node:
                yield follower, entrance


def _passes_models(prompt: Prompt, node: str) -> bool:
    """Whether a node's own output goes on to others as a model: one that nothing follows runs or saves it."""
    return any(entrance in ("model", "model1", "model2") for _, entrance in _followers(prompt, node))
