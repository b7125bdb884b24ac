"""Names of flash-attn that are not provided: what trains language models or splits a model over processes, blocks and
embeddings of flash-attn's own models, generation of text. Programs import them beside names that they use, so the
import succeeds; calling one, or a class that has one as its base, raises a NotImplementedError."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} is not provided by Pascal Attention")

    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (), {"__new__": refuse, "__module__": __name__})
